"""
The spool over several processes that are killed at any moment, with any part of the sent records saved.

All data taken from standard input is delivered once, in order, from the checkpoints; no segment name is used twice.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random

import anyio
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.config.settings import SpoolSettings
from shipper.model.records import Chunk, Stream
from shipper.sources.segments import newest_segment_id
from shipper.sources.spool import Spool
from tests.spooling import spooling


class Rows:
    """The spool streams in the store."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.youngest = 0

    def save(self, chunk: Chunk) -> None:
        chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
        self.streams[chunk.stream.stream_id] = msgspec.structs.replace(chunk.stream)
        self.youngest = max(self.youngest, chunk.stream.stream_id)

    def forget(self, stream_ids: Iterable[int]) -> None:
        for stream_id in stream_ids:
            self.streams.pop(stream_id, None)


class Machine:
    """One state directory, used by one process after the other."""

    def __init__(self, directory: Path, rng: Random, *, segment_bytes: int, max_bytes: int) -> None:
        self.directory = directory
        self.rng = rng
        self.segment_bytes = segment_bytes
        self.max_bytes = max_bytes
        self.rows = Rows()
        self.saved: dict[int, list[Chunk]] = {}
        self.given_ids: list[int] = []

    async def process(self, data: bytes, *, is_last: bool) -> bytes:
        """
        Run a process on a part of the input; all except the last are killed.

        Returns:
            The data that it took from the input.
        """
        rx_end, tx_end = os.pipe()
        os.write(tx_end, data)
        if is_last:
            os.close(tx_end)
        first_id = 1 + max(self.rows.youngest, newest_segment_id(self.directory))
        own: dict[int, Path] = {}

        def next_id() -> int:
            own[first_id + len(own)] = self.directory
            self.given_ids.append(first_id + len(own) - 1)
            return self.given_ids[-1]

        known = [msgspec.structs.replace(row, read_offset=0) for row in self.rows.streams.values()]
        spool = Spool(
            self.directory,
            rx_end,
            SpoolSettings(
                max_bytes=max(self.max_bytes, self.segment_bytes), segment_bytes=self.segment_bytes, fsync="never"
            ),
            wall_time=lambda: 1.0,
            known=known,
            next_stream_id=next_id,
            forget=self.rows.forget,
            max_record_bytes=100,
        )
        left = {path.stem: path.read_bytes() for path in self.directory.iterdir()}
        sent: list[Chunk] = []
        to_come = self.rng.randrange(6) if not is_last else 1 << 30
        async with spooling(spool) as rx:
            while len(sent) < to_come:
                # A producer that pauses: existing data is delivered at once, then nothing.
                with anyio.move_on_after(None if is_last else 0.02) as waiting:
                    try:
                        chunk = await rx.receive()
                    except anyio.EndOfStream:
                        break
                    sent.append(chunk)
                    await self.maybe_save(spool, sent, is_last=is_last)
                if waiting.cancelled_caught:
                    break
        if is_last:
            await spool.after_save(())
        else:
            os.close(tx_end)
        os.close(rx_end)
        taken = {int(path.stem): path.read_bytes() for path in self.directory.iterdir() if path.stem not in left}
        for stream_id in own:  # deleted segments are known from the saved positions
            taken.setdefault(stream_id, b"".join(chunk.data for chunk in self.saved.get(stream_id, [])))
        return b"".join(content for _, content in sorted(taken.items()))

    async def maybe_save(self, spool: Spool, sent: list[Chunk], *, is_last: bool) -> None:
        if is_last or self.rng.random() < 0.4:
            many = len(sent) if is_last else self.rng.randrange(len(sent) + 1)
            for chunk in sent[:many]:
                self.rows.save(chunk)
                self.saved.setdefault(chunk.stream.stream_id, []).append(chunk)
            del sent[:many]
            if is_last or self.rng.random() < 0.8:  # otherwise the crash is between the commit and the deletion
                await spool.after_save(())


INPUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 60), max_size=25), st.integers(0, 40)).map(
        lambda part: b"".join(b"%d%s\n" % (number, b"x" * size) for number, size in enumerate(part[0])) + b"t" * part[1]
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(INPUTS, st.sampled_from([1, 50, 300, 10_000]), st.sampled_from([1, 200, 1 << 20]), st.integers(0, 10**6))
def test_all_input_is_delivered_once_in_order(parts: list[bytes], segment_bytes: int, max_bytes: int, seed: int):
    async def all_processes() -> None:
        with tempfile.TemporaryDirectory(prefix="shipper-spool-") as folder:
            machine = Machine(Path(folder), Random(seed), segment_bytes=segment_bytes, max_bytes=max_bytes)
            taken = b""
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                took = await machine.process(part, is_last=is_last)
                assert part.startswith(took) or (is_last and took == part + b"\n"), "the input was not taken in order"
                assert not is_last or took.rstrip(b"\n") == part.rstrip(b"\n"), (
                    "the last process did not take everything"
                )
                taken += took
            assert os.listdir(folder) == []
            assert machine.rows.streams == {}
        assert len(set(machine.given_ids)) == len(machine.given_ids)
        assert machine.given_ids == sorted(machine.given_ids)
        for chunks in machine.saved.values():
            offset = 0
            for chunk in chunks:
                assert chunk.start_offset == offset, "there is a gap or an overlap"
                offset = chunk.end_offset
        assert b"".join(chunk.data for _, chunks in sorted(machine.saved.items()) for chunk in chunks) == taken

    anyio.run(all_processes)
