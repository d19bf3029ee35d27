"""When files that are done with are put away."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from threading import Event

import anyio

from shipper.model.records import Chunk, Stream
from shipper.sources.completion import Completion, Outcome
from shipper.sources.identity import StreamBook
from shipper.sources.once import FilesOnce
from shipper.state.store import Store


async def test_a_file_is_put_away_once_though_a_save_comes_beside_the_end_of_the_reading(tmp_path: Path):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path in paths:
        path.write_bytes(b"{}\n")
    put_away: list[Stream] = []
    has_begun, may_end = Event(), Event()

    class Slow(Completion):
        def complete(self, stream: Stream) -> Outcome:
            put_away.append(stream)
            has_begun.set()
            assert may_end.wait(20)
            return super().complete(stream)

    store = Store(tmp_path)
    book = StreamBook([], count(1).__next__, max_record_bytes=2000)
    source = FilesOnce(paths, book, store.streams, wall_time=lambda: 1.0, completion=Slow("delete"))
    tx, rx = anyio.create_memory_object_stream[Chunk](10)
    with tx, rx, anyio.fail_after(20):
        await source.run(tx)
        for chunk in [rx.receive_nowait() for _ in paths]:
            chunk.stream.move_checkpoint(chunk.end_offset, b"")
        async with anyio.create_task_group() as group:
            group.start_soon(source.after_save, ())
            await anyio.to_thread.run_sync(has_begun.wait)
            group.start_soon(source.after_save, ())
            await anyio.wait_all_tasks_blocked()
            may_end.set()
    assert [Path(stream.path) for stream in put_away] == paths
    assert not any(path.exists() for path in paths)
    store.close()
