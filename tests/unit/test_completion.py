"""When files are completed: only rotated and settled ones, never a live file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Event

import anyio
import pytest
from structlog.testing import capture_logs

from shipper.model.records import Chunk, Stream
from shipper.sources.completion import Completion, Outcome
from shipper.sources.identity import StreamIndex
from shipper.sources.once import FilesOnce
from shipper.state.store import Store
from tests.unit.follower_bench import ROTATE_WAIT_S, Bench, lines, settle

DELETE = Completion("delete")


def ship_late(bench: Bench) -> bytes:
    """Ship until all waits are over."""
    moments = [bench.now + each for each in (0.0, 1.0, ROTATE_WAIT_S + 1, 2 * ROTATE_WAIT_S + 2)]
    bench.now = moments[-1]
    return bench.ship(*moments)


def test_only_rotated_files_are_completed(bench: Bench):
    """
    Only a file whose own name belongs to another one by now, or that was renamed, is rotated: within the glob, or out
    of it, as logrotate does it where input.include names one file.

    Half a line at its end is no record; and it would be gone with the file.
    """
    (bench.folder / "deep").mkdir()
    app, linked = bench.write("app.log", lines(0, 10)), bench.write("app.log.other", lines(10, 20))
    single, torn = bench.write("single.log", lines(30, 40)), bench.write("torn.log", lines(40, 50) + b'{"n"')
    kept = [app, linked, single, bench.folder / "app.log.linked", bench.write("deep/app.log", lines(20, 30))]
    os.link(linked, bench.folder / "app.log.linked")
    bench.start("app.log*", "deep/*", "single.log", "torn.*", completion=DELETE)
    ship_late(bench)
    assert all(path.exists() for path in (*kept, torn))
    for path in (app, single, torn):
        path.rename(f"{path}.1")
    bench.write("app.log", lines(50, 60))
    bench.write("single.log", lines(60, 70))
    ship_late(bench)
    assert sorted(path.name for path in bench.folder.glob("*.1")) == ["torn.log.1"]
    bench.write("torn.log.1", b": 0}\n")
    assert ship_late(bench) == b'{"n": 0}\n'
    assert list(bench.folder.glob("*.1")) == [], "it is put away when its last line is whole"
    assert all(path.exists() for path in kept)


def test_files_rotated_while_stopped_are_moved_and_live_files_stay(bench: Bench, tmp_path: Path):
    """Even one that was rotated before another completed file."""
    path = bench.write("app.log", lines(0, 10))
    bench.start("app.log")
    ship_late(bench)
    bench.stop()
    bench.write("app.log", lines(10, 20))
    path.rename(f"{path}.1")
    bench.write("app.log", lines(20, 30))
    bench.start("app.log", completion=Completion("move", tmp_path / "done"))
    assert ship_late(bench) == lines(10, 30)
    with capture_logs() as logs, path.open("ab", buffering=0) as writer:
        written = path.rename(f"{path}.2")
        bench.write("app.log", lines(30, 40))
        ship_late(bench)
        path.rename(f"{path}.3")
        bench.write("app.log", lines(40, 50))
        ship_late(bench)
        assert written.exists(), "somebody has it open"
        writer.write(lines(50, 60))
        ship_late(bench)
        assert written.exists(), "and writes to it"
    ship_late(bench)
    assert [entry["path"] for entry in logs if entry["event"] == "source_still_written"] == [str(written)]
    done = {path.name: path.read_bytes() for path in (tmp_path / "done").iterdir()}
    moved = {"app.log.1": lines(0, 20), "app.log.2": lines(20, 30) + lines(50, 60), "app.log.3": lines(30, 40)}
    assert done == moved
    assert path.read_bytes() == lines(40, 50)


def test_a_rotated_file_stays_until_everything_in_it_is_settled(bench: Bench):
    path = bench.write("app.log", lines(0, 10))
    bench.start("app.log*", completion=DELETE)
    chunks = bench.look(1.0)
    old = path.rename(f"{path}.1")
    for now in (2.0, 3.0 + ROTATE_WAIT_S, 20.0):
        assert bench.look(now) == []
        assert old.exists()
    settle(bench.store, chunks)
    bench.ship(21.0)
    assert not old.exists()


def restored(path: Path) -> Path:
    """A new inode with the same name, as after a restore or on another disk."""
    copy = Path(shutil.copy2(path, path.with_name("backup")))
    path.unlink()
    return copy.rename(path)


def restored_in_a_folder_that_was_renamed(path: Path) -> Path:
    """The patterns match both folders, as where one of several disks is mounted elsewhere."""
    return path.parent.rename(path.parent.with_name("disk-2")) / path.name


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("replace", [restored, restored_in_a_folder_that_was_renamed])
def test_a_live_file_is_not_completed_after_changes_of_its_inode_or_folder(
    bench: Bench, replace: Callable[[Path], Path], is_running: bool
):
    (bench.folder / "disk-1").mkdir()
    path = bench.write("disk-1/app.log", lines(0, 10))
    bench.start("disk-*/app.log", completion=DELETE)
    ship_late(bench)
    with bench.stopped(not is_running):
        live = replace(path)
    assert ship_late(bench) == b""
    with live.open("ab") as out:
        out.write(lines(10, 20))
    assert ship_late(bench) == lines(10, 20)
    assert live.exists()


async def test_a_file_is_completed_once_if_a_save_coincides_with_the_end_of_reading(store: Store, tmp_path: Path):
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

    index = StreamIndex([], count(1).__next__, max_record_bytes=2000)
    source = FilesOnce(paths, index, store.streams, wall_time=lambda: 1.0, completion=Slow("delete"))
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
