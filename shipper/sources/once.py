"""Files that are read to their end, one after the other."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.model.errors import SourceError, StateError
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, move_checkpoints, shown
from shipper.sources.completion import KEEP, Completion
from shipper.sources.identity import StreamBook
from shipper.sources.reader import TURN_STEPS, StreamReader
from shipper.sources.register import StreamRegister, forget_oldest, note_gone, tell_unreachable
from shipper.sources.turns import Turns

log = structlog.get_logger("sources")

_NAMED: Final = 10  # files that cannot be read
READ_TOGETHER_BYTES: Final = 1 << 20  # of many small files, as many as this


class ReadBefore(NamedTuple):
    """
    A file that an earlier run has read.

    Attributes:
        offset: Up to where.
    """

    path: Path
    stream: Stream
    offset: int

    @property
    def has_grown(self) -> bool:
        """Whether this run has found more in it."""
        return self.stream.read_offset > self.offset


class FilesOnce:
    """
    Reads files one after the other, each to the end that it has when it is reached.

    Args:
        wall_time: Seconds since the epoch.

    Attributes:
        total_bytes: Size of all files, as of the start.
        done_bytes: Bytes of them that were read, now or by an earlier run.
        read_before: Those of which an earlier run had read something, as far as this one has come.
        unreadable: Files that were there at the start and could not be read.
        is_exhausted: Whether every readable file was read to its end.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        book: StreamBook,
        register: StreamRegister,
        *,
        wall_time: Callable[[], float],
        completion: Completion = KEEP,
    ) -> None:
        self._paths = paths
        self._waiting = list(reversed(paths))
        self._book = book
        self._register = register
        self._wall_time = wall_time
        self._completion = completion
        self._reader: StreamReader | None = None
        self._status: os.stat_result
        self._read_streams: list[Stream] = []
        self._uncompleted: list[Stream] = []
        self._completing = anyio.Lock()
        self._turns = Turns()
        self.total_bytes = sum(status.st_size for _, status in self._look())
        self.done_bytes = 0
        self.read_before: list[ReadBefore] = []
        self.unreadable = 0
        self._unreadable: list[str] = []
        self._unreachable_bytes = 0
        self.is_exhausted = False

    def _look(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._paths:
            with suppress(OSError):
                yield path, path.stat()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send the chunks of all files, one file after the other."""
        try:
            await self._turns.call(self._identify)
            while (chunks := await self._turns.call(self._read_some)) is not None:
                for chunk in chunks:
                    await chunks_tx.send(chunk)
        finally:
            with anyio.CancelScope(shield=True):  # it ends by itself
                await run_sync(self._leave)
        self._unreachable_bytes = await run_sync(tell_unreachable, self._register, self._book.lost(), self._wall_time())
        await run_sync(self._note_gone)
        await self.after_save(())  # nothing is saved of a file in which there was nothing new
        self.is_exhausted = not self.unreadable

    def backlog(self) -> Backlog:
        """Return how much of all files is left to read; of an archive, in compressed bytes until it is opened."""
        unsettled = sum(max(0, stream.read_offset - stream.checkpoint) for stream in self._read_streams)
        return Backlog(
            lag_bytes=max(0, self.total_bytes - self.done_bytes) + unsettled,
            total_bytes=self.total_bytes,
            unreachable_bytes=self._unreachable_bytes,
            unreadable=self._unreadable,
            unreadable_count=self.unreadable,
        )

    def _note_gone(self) -> None:
        """Give up files that are gone, except those that may live on in a copy beside them that was not named."""
        names: dict[str, list[str]] = {}
        gone = []
        for stream in self._book.lost():
            folder, name = os.path.split(stream.path)
            if folder not in names:
                names[folder] = []
                with suppress(OSError):
                    names[folder] = sorted(os.listdir(folder or "."))
            at = bisect(names[folder], name)
            if at == len(names[folder]) or not names[folder][at].startswith(name):
                gone.append(stream)
        with suppress(StateError):  # it is asked again next time
            note_gone(self._register, gone, self._wall_time())

    def _identify(self) -> None:
        """Find out which streams have lost their place, before a file that may be one of them is read."""
        places = []
        for path, status in self._look():
            places.append((status.st_dev, status.st_ino))
            stream = self._book.at(places[-1])
            if stream is not None and self._book.has_news(stream, status):
                with suppress(SourceError), self._book.opening(path, places[-1]):  # told in its turn
                    if reader := self._book.open_in_place(path):
                        reader.close()
        forget_oldest(self._register, self._book, self._book.lose(places).lost)

    def _leave(self) -> None:
        if self._turns.end():
            self._close()
            with suppress(StateError):  # it would be for a report of what is lost, should these files go
                self._register.note([each for each in self._read_streams if not each.is_settled], self._wall_time())

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints; delete or move the files of which everything is settled."""
        move_checkpoints(saved)
        async with self._completing:  # a save may come beside the end of the reading
            if settled := [stream for stream in self._uncompleted if stream.is_settled]:
                await run_sync(self._complete, settled)

    def _complete(self, settled: list[Stream]) -> None:
        put_away = []
        for stream in settled:
            outcome = self._completion.complete(stream)
            if outcome in {"put_away", "done"}:
                self._uncompleted.remove(stream)
            if outcome == "put_away":
                put_away.append(stream)
        with suppress(StateError):  # the next run sees that they are gone
            note_gone(self._register, put_away, self._wall_time())

    def _read_some(self) -> list[Chunk] | None:
        """Read on, into the next files if one gives little; None at the end of all."""
        if self._reader is None and not self._waiting:
            return None
        chunks: list[Chunk] = []
        read_bytes = 0
        while read_bytes < READ_TOGETHER_BYTES and (self._reader is not None or self._waiting):
            if self._reader is None and not self._open(self._waiting.pop()):
                continue
            chunk = self._read()
            if chunk is not None:
                chunks.append(chunk)
                read_bytes += max(1, len(chunk.data))
            elif self._reader is not None:
                break  # its turn has ended, and a stop may wait for that
        return chunks

    def _open(self, path: Path) -> bool:
        """Open a file; False if it cannot be read, or was read and settled before."""
        try:
            self._status = path.stat()
            stream = self._book.at((self._status.st_dev, self._status.st_ino))
            if stream is not None and not self._book.has_news(stream, self._status):
                stream.path = str(path)
                self.read_before.append(ReadBefore(path, stream, stream.checkpoint))
                self._end(stream)
                return False
            with self._book.opening(path, (self._status.st_dev, self._status.st_ino)):
                self._reader = self._book.open(path)
            self._reader.note_size(self._status, self._wall_time())
            self._read_streams.append(self._reader.stream)
            if self._reader.offset:
                self.read_before.append(ReadBefore(path, self._reader.stream, self._reader.offset))
        except (OSError, SourceError) as error:
            self._log_unreadable(path, error)
            return False
        if not self._reader.content.compression:
            self.done_bytes += self._reader.offset
        return True

    def _read(self) -> Chunk | None:
        """Read a chunk of the open file, and close it at its end."""
        reader = self._reader
        assert reader is not None
        try:
            before = reader.offset
            with self._book.reading(reader):
                chunk = reader.read(is_final=True, turn_steps=TURN_STEPS)
            if reader.is_unfinished:
                return None
            if chunk is not None:
                if not reader.content.compression:
                    self.done_bytes += reader.offset - before  # with the hole in front of a chunk
                return chunk
            if not reader.content.compression:
                self.done_bytes += max(0, self._status.st_size - reader.offset)  # NULs that are no content
            reader.note_end(self._status, self._wall_time())
            self._end(reader.stream)
        except (OSError, SourceError) as error:
            self._log_unreadable(reader.path, error)
        self._close()
        return None

    def _end(self, stream: Stream) -> None:
        """Record a file that was read to its end."""
        if stream.compression or self._reader is None:
            self.done_bytes += self._status.st_size
        if self._completion.action != "keep":
            self._uncompleted.append(stream)

    def _log_unreadable(self, path: Path, error: Exception) -> None:
        log.error("source_unreadable", path=shown(path), error=str(error))
        self.unreadable += 1
        self._unreadable = [*self._unreadable, shown(str(error))][:_NAMED]

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
