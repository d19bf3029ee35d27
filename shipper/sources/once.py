"""Reads files to their end, one after the other."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.model.errors import SourceError, StateError
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, move_checkpoints, shown
from shipper.sources.completion import KEEP, Completion
from shipper.sources.discovery import FileId, file_id_of
from shipper.sources.identity import StreamIndex
from shipper.sources.reader import TURN_STEPS, Turns
from shipper.sources.register import StreamRegister, forget_oldest_lost, report_unreachable, save_changes

log = structlog.get_logger("sources")

_UNREADABLE_SHOWN: Final = 10
READ_BYTES_MAX: Final = 1 << 20  # of many small files


class ReadBefore(NamedTuple):
    """A file of which an earlier run has read at least a part."""

    path: Path
    stream: Stream
    is_rewritten: bool = False  # it was written to since, or replaced, without a change of its length


class FilesOnce:
    """
    Reads files one after the other, each to its end at that moment.

    Attributes:
        total_bytes: Total size of the files, as of the start.
        done_bytes: How many of these bytes were read, now or by an earlier run.
        read_before: Files, among those reached, that an earlier run had read at least in part.
        unreadable: Number of files that existed at the start but could not be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        index: StreamIndex,
        register: StreamRegister,
        *,
        wall_time: Callable[[], float],
        completion: Completion = KEEP,
    ) -> None:
        self._paths = paths
        self._index = index
        self._register = register
        self._wall_time = wall_time
        self._completion = completion
        self._reading = self._read_all()
        self._read_streams: list[Stream] = []
        self._uncompleted: list[Stream] = []
        self._completing = anyio.Lock()
        self._turns = Turns()
        self.total_bytes = sum(status.st_size for _, status in self._statuses())
        self.done_bytes = 0
        self.read_before: list[ReadBefore] = []
        self.unreadable = 0
        self._messages: list[str] = []
        self._unreachable_bytes = 0
        self.is_exhausted = False

    def _statuses(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._paths:
            with suppress(OSError):
                yield path, path.stat()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        try:
            await self._turns.call(self._identify)
            while (chunks := await self._turns.call(self._read_next)) is not None:
                for chunk in chunks:
                    await chunks_tx.send(chunk)
        finally:
            with anyio.CancelScope(shield=True):  # `_close` has its own time limit
                await run_sync(self._close)
        self._unreachable_bytes = await run_sync(
            report_unreachable, self._register, self._index.lost(), self._wall_time()
        )
        await run_sync(self._save_places)
        await self.after_save(())  # files without new data cause no save
        self.is_exhausted = not self.unreadable

    def backlog(self) -> Backlog:
        """Return the unread and unsettled bytes of all files; those of an archive count compressed until it is read."""
        unsettled = sum(max(0, stream.read_offset - stream.checkpoint) for stream in self._read_streams)
        return Backlog(
            lag_bytes=max(0, self.total_bytes - self.done_bytes) + unsettled,
            total_bytes=self.total_bytes,
            unreachable_bytes=self._unreachable_bytes,
            unreadable=self._messages.copy(),
            unreadable_count=self.unreadable,
        )

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints; delete or move the settled files."""
        move_checkpoints(saved)
        async with self._completing:  # a save may coincide with the end of reading
            if settled := [stream for stream in self._uncompleted if stream.is_settled]:
                await run_sync(self._complete, settled)

    def _complete(self, settled: list[Stream]) -> None:
        for stream in settled:
            outcome = self._completion.complete(stream)
            if outcome in {"completed", "done"}:
                self._uncompleted.remove(stream)
            if outcome == "completed":
                self._index.mark_gone([stream])
        with suppress(StateError):  # the next run notices that they are gone
            save_changes(self._register, self._index, self._wall_time())

    def _identify(self) -> None:
        """Find lost streams before reading a file that may be one of them."""
        present: list[FileId] = []
        for path, status in self._statuses():
            present.append(file_id_of(status))
            stream = self._index.at(present[-1])
            if stream is not None and self._index.needs_reading(stream, status):
                with suppress(SourceError), self._index.opening(path, present[-1]):  # reported when it is read
                    if reader := self._index.open_in_place(path):
                        reader.close()
        self._index.update_lost(present)
        forget_oldest_lost(self._register, self._index)

    def _close(self) -> None:
        if self._turns.end():
            self._reading.close()
            with suppress(StateError):  # only needed to report unread bytes if these files disappear
                self._register.note(
                    [stream for stream in self._read_streams if not stream.is_settled], self._wall_time()
                )

    def _save_places(self) -> None:
        """
        Save where files were found again, even if nothing new was read from them, and that the others are gone.

        Lost streams that a rotated file such as NAME.1 beside them may continue do not count as gone.
        """
        names: dict[str, list[str]] = {}
        for stream in self._index.lost():
            folder, name = os.path.split(stream.path)
            if folder not in names:
                names[folder] = []
                with suppress(OSError):
                    names[folder] = sorted(os.listdir(folder or "."))
            position = bisect(names[folder], name)
            if position == len(names[folder]) or not names[folder][position].startswith(name):
                self._index.mark_gone([stream])
        with suppress(StateError):  # the next run tries again
            save_changes(self._register, self._index, self._wall_time())

    # Reading ----------------------------------------------------------------------------------------------------------

    def _read_next(self) -> list[Chunk] | None:
        """Read about 1 MiB, from several files if they are small; return None at the end of the last one."""
        chunks: list[Chunk] = []
        read_bytes = 0
        for chunk in self._reading:
            if chunk is None:
                return chunks
            chunks.append(chunk)
            read_bytes += max(1, len(chunk.data))
            if read_bytes >= READ_BYTES_MAX:
                return chunks
        return chunks or None

    def _read_all(self) -> Generator[Chunk | None, None, None]:
        """Yield the chunks of all files; None when a turn ends without a chunk, so that a stop need not wait longer."""
        for path in self._paths:
            try:
                yield from self._read_file(path)
            except (OSError, SourceError) as error:
                log.error("source_unreadable", path=shown(path), error=str(error))
                self.unreadable += 1
                self._messages = [*self._messages, shown(str(error))][:_UNREADABLE_SHOWN]

    def _read_file(self, path: Path) -> Iterator[Chunk | None]:
        status = path.stat()
        file_id = file_id_of(status)
        stream = self._index.at(file_id)
        done_before = self.done_bytes
        if stream is not None and not self._index.needs_reading(stream, status):
            if stream.path != str(path):  # its folder was renamed
                stream.path = str(path)
                self._index.save_later(stream)
            self.read_before.append(ReadBefore(path, stream))
        else:
            with self._index.opening(path, file_id):
                reader = self._index.open(path)
            with closing(reader):
                reader.note_size(status, self._wall_time())
                stream = reader.stream
                self._read_streams.append(stream)
                if reader.offset:
                    is_as_long = status.st_size in {stream.ended_size, reader.offset}
                    is_rewritten = is_as_long and stream.ended_ns != status.st_mtime_ns
                    self.read_before.append(ReadBefore(path, stream, is_rewritten))
                if not reader.content.compression:
                    self.done_bytes += reader.offset
                while True:
                    with self._index.reading(reader):
                        chunk = reader.read(is_final=True, turn_steps=TURN_STEPS)
                    if chunk is None and not reader.is_unfinished:
                        break
                    if not reader.content.compression:
                        self.done_bytes = done_before + reader.offset
                    yield chunk
                reader.note_end(status, self._wall_time())
        self.done_bytes = max(self.done_bytes, done_before + status.st_size)
        if self._completion.action != "keep":
            self._uncompleted.append(stream)
