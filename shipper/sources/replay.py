"""
Send dead letters once more: a source like any other, whose streams are the letters one after the other.

A replay saves no checkpoint: its offset tells which letters are settled. The store deletes those, or updates their
reason, in the transaction that counts them. So after a crash, the letters that are left are what is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final, Protocol

from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.model.framing import LINES, csv_rows
from shipper.model.records import Backlog, Checkpoint, Chunk, ReplayStream

_CHUNK_BYTES: Final = 1 << 20
# Not 0: three bytes at the start of a stream may be a byte-order mark, which is no part of a record.
_START_OFFSET: Final = 1


class Letters(Protocol):
    """Dead letters that can be read; closed when all are sent."""

    def content(self, letter_id: int) -> tuple[bytes, bytes] | None:
        """Read the header and the bytes of a letter; None if it is gone."""

    def close(self) -> None: ...


class Replay:
    """
    Ships dead letters.

    Args:
        letters: Of a connection that nobody else uses; closed when all are sent.
        letter_ids: Which to send, in this order, all with their bytes; those that are gone by their turn are left out.
        next_stream_id: Gives an id that was never given.
        csv_delimiter: Between the values of rows of CSV; empty = their header tells.

    Attributes:
        streams: Those that were begun.
    """

    def __init__(
        self, letters: Letters, letter_ids: Sequence[int], next_stream_id: Callable[[], int], *, csv_delimiter: str = ""
    ) -> None:
        self._letters = letters
        self._letter_ids = letter_ids
        self._next_stream_id = next_stream_id
        self._csv_delimiter = csv_delimiter
        self.streams: list[ReplayStream] = []
        self.is_exhausted = False

    def backlog(self) -> Backlog:
        """Letters have no size to tell; how many are left is known from the counts."""
        return Backlog()

    def __repr__(self) -> str:
        return f"<Replay of {len(self._letter_ids)} dead letters>"

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send the letters."""
        chunks = self.chunks()
        try:
            while (chunk := await run_sync(next, chunks, None)) is not None:
                await chunks_tx.send(chunk)
        finally:
            self._letters.close()
        self.is_exhausted = True

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Keep no checkpoint: the store has deleted the letters."""

    def chunks(self) -> Iterator[Chunk]:
        """Cut the letters into chunks of about 1 MiB; blocks."""
        for header, group in groupby(self._contents(), key=lambda content: content[0]):
            stream = ReplayStream(
                stream_id=self._next_stream_id(),
                kind="replay",
                path="dead letters",
                letter_ids=[],
                starts=[],
                read_offset=_START_OFFSET,
                framing=csv_rows(header, is_whole=True, delimiter=self._csv_delimiter) or LINES if header else LINES,
            )
            self.streams.append(stream)
            lines: list[bytes] = []
            size = 0
            for _, letter_id, raw in group:
                # To JSON a carriage return is what a newline is: white space, or a fault within a string.
                # A row of CSV stands alone, as a quote in it could take in the next.
                line = (raw if header else raw.replace(b"\n", b"\r")) + b"\n"
                stream.letter_ids.append(letter_id)
                stream.starts.append(stream.read_offset + size)
                lines.append(line)
                size += len(line)
                if header or size >= _CHUNK_BYTES:
                    yield _chunk(stream, b"".join(lines))
                    lines, size = [], 0
            if lines:
                yield _chunk(stream, b"".join(lines))

    def _contents(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield header, id and record of each letter that is still there."""
        for letter_id in self._letter_ids:
            if (content := self._letters.content(letter_id)) is not None:
                header, raw = content
                yield header, letter_id, raw


def _chunk(stream: ReplayStream, data: bytes) -> Chunk:
    start = stream.read_offset
    stream.read_offset = start + len(data)
    return Chunk(stream=stream, start_offset=start, end_offset=stream.read_offset, data=data)
