"""
Sends dead letters again: a source whose streams are the concatenated letters.

A replay saves no checkpoint. The store deletes settled letters, or updates their reason, in the transaction that counts
them, so after a crash the remaining letters are those still to send.
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
# Not 0: a byte-order mark at the start of a stream is not part of a record.
_START_OFFSET: Final = 1


class Letters(Protocol):
    """Readable dead letters."""

    def content(self, letter_id: int) -> tuple[bytes, bytes] | None:
        """Return the header and the bytes of a letter; None if it no longer exists."""

    def close(self) -> None: ...


class Replay:
    """
    Ships dead letters.

    Args:
        letters: With its own connection; closed when all are sent.
        letter_ids: The letters to send, in order, all with their content. Letters deleted since are skipped.
        csv_delimiter: Delimiter of CSV; empty = detect it from the header.
        name_letter: As in `ReplayStream`.

    Attributes:
        streams: The streams begun so far.
    """

    def __init__(
        self,
        letters: Letters,
        letter_ids: Sequence[int],
        next_stream_id: Callable[[], int],
        *,
        csv_delimiter: str = "",
        name_letter: Callable[[int], int | str] = int,
    ) -> None:
        self._letters = letters
        self._letter_ids = letter_ids
        self._next_stream_id = next_stream_id
        self._csv_delimiter = csv_delimiter
        self._name_letter = name_letter
        self.streams: list[ReplayStream] = []
        self.is_exhausted = False

    def backlog(self) -> Backlog:
        """Return an empty backlog: the size of letters is unknown, and their number is counted elsewhere."""
        return Backlog()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        chunks = self.chunks()
        try:
            while (chunk := await run_sync(next, chunks, None)) is not None:
                await chunks_tx.send(chunk)
        finally:
            self._letters.close()
        self.is_exhausted = True

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Do nothing: the store has deleted the letters."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield chunks of about 1 MiB. Blocks."""
        for header, group in groupby(self._contents(), key=lambda content: content[0]):
            stream = ReplayStream(
                stream_id=self._next_stream_id(),
                kind="replay",
                path="dead letters",
                name_letter=self._name_letter,
                letter_ids=[],
                starts=[],
                read_offset=_START_OFFSET,
                framing=csv_rows(header, is_whole=True, delimiter=self._csv_delimiter) or LINES if header else LINES,
            )
            self.streams.append(stream)
            lines: list[bytes] = []
            size = 0
            for _, letter_id, raw in group:
                # In JSON a carriage return is equivalent to a newline: whitespace, or an error within a string.
                # Each row of CSV is a chunk, as a quote in it could otherwise extend into the next row.
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
        """Yield header, id and record of each letter that still exists."""
        for letter_id in self._letter_ids:
            if (content := self._letters.content(letter_id)) is not None:
                header, raw = content
                yield header, letter_id, raw


def _chunk(stream: ReplayStream, data: bytes) -> Chunk:
    start = stream.read_offset
    stream.read_offset = start + len(data)
    return Chunk(stream=stream, start_offset=start, end_offset=stream.read_offset, data=data)
