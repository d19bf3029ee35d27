"""The followed files that are open, and the order in which new data is read from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from shipper.model.errors import SourceError
from shipper.model.framing import LINES
from shipper.model.records import Chunk, shown
from shipper.sources.content import Archive, Content, OtherKindError
from shipper.sources.discovery import FileId, Signature, file_id_of, signature_of
from shipper.sources.identity import StreamIndex, open_file
from shipper.sources.reader import READ_BYTES, TURN_STEPS, StreamReader
from shipper.sources.siblings import looks_like_generation
from shipper.system.work import WorkItem, at_work

log = structlog.get_logger("sources")

_READ_BYTES_MAX: Final = 1 << 21
_CHUNK_BYTES_MIN: Final = 1 << 16  # of these, per file with new data
_BEGINNING_BYTES: Final = 1 << 20  # of the content of an archive
_BEGINNING_STEPS: Final = 128  # of decompression in a turn, 2 MiB; few enough not to get deep into a member
_BEGINNING_TURNS: Final = 4  # more turns than this make the start of an archive slow
_LATER_S: Final = 10.0  # minimum time to read an archive beyond its beginning before switching to another one

# Of an archive: growing; quiet, but another member may follow; rotated, so nothing will follow. A plain file is open,
# or quiet after a rotation, as its writer may still have it open.
Ending = Literal["open", "quiet", "final"]
# Of an archive: at its beginning, still there after some turns, beyond.
_Stage = Literal["start", "slow start", "later"]


@dataclass(eq=False)
class OpenFile:
    reader: StreamReader
    file_id: FileId
    name: str  # where it was last found
    grew_at: float  # when a change was last seen
    is_present: bool = True  # a pattern matched it in the last scan
    signature: Signature | None = None  # at that time
    ending: Ending = "open"  # at the last read
    new_since: float | None = None  # since when it is undecided whether it is a copy of another input; None = decided
    compared: dict[int, int] = field(default_factory=dict)  # as for `StreamIndex.has_settled_copy`
    saved_size: int = 0
    # The last scan, seconds since the epoch, without data after the end that was read.
    unchanged_at: float | None = None
    unfinished_turns: int = 0  # consecutive ones, of an archive
    error: str = ""  # of the last attempt to read it

    @property
    def may_end(self) -> bool:
        """Whether an incomplete end is read once nothing follows; a torn line of a plain file always waits."""
        return bool(self.reader.content.compression) or self.reader.stream.framing is not LINES

    def has_changed(self, status: os.stat_result) -> bool:
        return signature_of(status) != self.signature

    def update(self, status: os.stat_result, now: float) -> None:
        if self.has_changed(status):
            self.signature, self.grew_at = signature_of(status), now

    def set_error(self, error: OSError) -> None:
        self.error = shown(f"{self.reader.path} cannot be read: {error.strerror}")


class _ArchiveTurns:
    """
    Decides which archives are decompressed: one for each of three stages, as many decompressors need much memory.

    So a small archive waits neither for a large one nor for one with a slow start, such as very many empty members. In
    the stage "later", the archive of which the least has been read goes first. A suspended archive is decompressed from
    its beginning again; so an archive is suspended only after it was read for as long as that took. When it is the turn
    of a waiting archive, the active one of its stage is read instead.
    """

    def __init__(self) -> None:
        self._active: dict[_Stage, OpenFile] = {}
        # Of the active archive of the stage "later": when and where it became active, and since when it advances.
        self._active_since = 0.0
        self._active_position = 0
        self._advancing_since: float | None = None

    def choose(self, ready: Iterable[OpenFile], now: float) -> None:
        """Choose the active archives among the files with new data."""
        waiting: dict[_Stage, list[OpenFile]] = {"start": [], "slow start": [], "later": []}
        for file in ready:
            if isinstance(file.reader.content, Archive):
                waiting[_stage(file)].append(file)
        for stage, files in waiting.items():
            active = self._active.get(stage)
            if not files:
                if active is not None and active in waiting[_stage(active)]:
                    del self._active[stage]  # it is in another stage now and waits like others
            elif active not in files or (stage == "later" and self._should_suspend(active, now)):
                self._replace(files, stage, now)

    def _should_suspend(self, file: OpenFile, now: float) -> bool:
        if self._advancing_since is None and _position(file) > self._active_position:
            self._advancing_since = now
        since = self._advancing_since
        return since is not None and now >= since + max(_LATER_S, since - self._active_since)

    def _replace(self, files: list[OpenFile], stage: _Stage, now: float) -> None:
        file = files[0]
        if stage == "later":
            file = min(files, key=_position)
            self._active_since, self._active_position, self._advancing_since = now, _position(file), None
        previous, self._active[stage] = self._active.get(stage), file
        if previous is not None and previous not in self._active.values():
            previous.reader.content.suspend()

    def in_turn(self, file: OpenFile) -> OpenFile | None:
        """Return the archive to read in a file's turn: the file itself if active, else the active one of its stage."""
        if file in self._active.values():
            return file
        file.reader.content.suspend()
        active = self._active.get(_stage(file))
        return active if active is not None and _stage(active) == _stage(file) else None


def _stage(file: OpenFile) -> _Stage:
    if _position(file) >= _BEGINNING_BYTES:
        return "later"
    return "slow start" if file.unfinished_turns > _BEGINNING_TURNS else "start"


def _position(file: OpenFile) -> int:
    """Return how far an archive was read, or searched for the end of a line."""
    return max(file.reader.offset, file.reader.content.size())


class OpenFiles:
    """The open files; those with new data are read in turn, a chunk each."""

    def __init__(self, index: StreamIndex, *, rotate_wait_s: float, wall_time: Callable[[], float]) -> None:
        self._index = index
        self._rotate_wait_s = rotate_wait_s
        self._wall_time = wall_time
        self._files: dict[FileId, OpenFile] = {}
        self._ready: dict[OpenFile, None] = {}  # files with new data, in the order of their turns
        self._archives = _ArchiveTurns()
        self._quiet: list[OpenFile] | None = None  # may be closed for others at this scan, the quietest last

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(list(self._files.values()))

    def at(self, file_id: FileId) -> OpenFile | None:
        return self._files.get(file_id)

    def add(self, file: OpenFile) -> None:
        """Add a file, even beyond the limit: a renamed file would be lost."""
        self._files[file.file_id] = file

    def close(self, file: OpenFile) -> None:
        """Close a file and forget it."""
        del self._files[file.file_id]
        self._ready.pop(file, None)
        file.reader.close()

    def close_all(self) -> None:
        for file in self:
            self.close(file)

    def close_unusable(self) -> bool:
        """Close files of a network file system that is gone, for a scan to find them again; return whether any were."""
        is_any_closed = False
        for file in self:
            try:
                file.reader.content.status()
            except OSError as error:
                log.warning("source_unreadable", path=shown(file.reader.path), error=str(error))
                self.close(file)
                is_any_closed = True
        return is_any_closed

    def begin_scan(self) -> None:
        """Forget which files were quiet at the previous scan or check."""
        self._quiet = None

    def close_quietest(self) -> OpenFile | None:
        """Close and return the file that has been at its end longest; None if none is at its end."""
        if self._quiet is None:
            quiet = [file for file in self if not self.is_ready(file)]
            self._quiet = sorted(quiet, key=lambda file: file.grew_at, reverse=True)
        while self._quiet:
            file = self._quiet.pop()
            if self._files.get(file.file_id) is file and self.is_at_end(file):
                file.signature = file.signature or signature_of(file.reader.content.status())
                self.close(file)
                return file
        return None

    # New data ---------------------------------------------------------------------------------------------------------

    @property
    def has_ready(self) -> bool:
        """Whether a file has new data for `read`."""
        return bool(self._ready)

    def is_ready(self, file: OpenFile) -> bool:
        """Return whether a file is scheduled to be read."""
        return file in self._ready

    def is_at_end(self, file: OpenFile) -> bool:
        """Return whether nothing is left to read, including data appended since the last scan."""
        try:
            status = file.reader.content.status()
        except OSError:
            return False  # `close_unusable` closes it
        if file.new_since is not None:
            return status.st_size == 0
        return file not in self._ready and not file.has_changed(status)

    def wake(self, file: OpenFile) -> None:
        """Schedule a file to be read."""
        self._ready.setdefault(file)

    def touch(self, paths: Iterable[str]) -> bool:
        """Schedule files that were reported as changed; return False if one is not open or may be a copy."""
        by_path = {str(file.reader.path): file for file in self._files.values()}
        touched = [by_path.get(path) for path in paths]
        for file in touched:
            if file is not None and file.new_since is None:
                self.wake(file)
        return all(file is not None and file.new_since is None for file in touched)

    def check(self, file: OpenFile, now: float) -> None:
        """Schedule a file if it has changed, whether or not a change was reported."""
        with at_work(WorkItem("open", file.name, file.reader.stream.key)):
            if file.new_since is None and (
                file.has_changed(file.reader.content.status()) or self._ending(file, now) != file.ending
            ):
                self.wake(file)

    def restart_truncated(self, now: float) -> None:
        """Start truncated files over, and note first lines, so that copies of content not read yet are recognised."""
        for file in self._files.values():
            with suppress(OSError, SourceError):  # reported when it is read
                status = file.reader.content.status()
                if file.new_since is not None or not file.has_changed(status):
                    continue
                if not file.reader.is_intact():
                    self._begin_again(file, status)
                    file.update(status, now)
                    self.wake(file)
                elif not file.reader.stream.head.length and not file.reader.content.compression:
                    file.reader.note_head()

    def update_settled_until(self, file: OpenFile) -> None:
        """Set `settled_until` of a settled file to the last scan, as the file had not changed by then."""
        stream = file.reader.stream
        if file.unchanged_at is not None and stream.is_settled:
            stream.settled_until = file.unchanged_at
            self._index.save_later(stream)

    def _begin_again(self, file: OpenFile, status: os.stat_result) -> None:
        path, offset = shown(file.reader.path), file.reader.offset
        log.warning("source_truncated", path=path, offset=offset, size=status.st_size)
        _open_again(file)
        file.reader = self._index.begin_again(file.reader)

    def _ending(self, file: OpenFile, now: float) -> Ending:
        if not file.may_end or now - file.grew_at < self._rotate_wait_s:
            return "open"
        is_rotated, is_deleted = file.reader.stream.is_rotated, not file.reader.content.status().st_nlink
        if file.reader.content.compression:
            return "final" if is_rotated or is_deleted else "quiet"
        # A matched file may be in use again, unless its name is that of a generation.
        has_left = (is_rotated and not file.is_present) or looks_like_generation(os.path.basename(file.name))
        return "quiet" if has_left or is_deleted else "open"

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, now: float) -> list[Chunk]:
        """
        Read the next chunk of each file with new data, up to a few MiB in total.

        The more files there are, the smaller the chunks: otherwise, with a slow service, a small file would wait for a
        MiB of each large one.
        """
        share = _READ_BYTES_MAX // max(1, len(self._ready))
        length = max(_CHUNK_BYTES_MIN, min(share, READ_BYTES))
        chunks: list[Chunk] = []
        read_bytes = 0
        have_chosen = False
        for file in list(self._ready):
            if read_bytes >= _READ_BYTES_MAX:
                break
            if file not in self._ready:
                continue  # it was read to its end in another file's turn
            del self._ready[file]
            in_turn: OpenFile | None = file
            if isinstance(file.reader.content, Archive):
                if not have_chosen:
                    self._archives.choose([file, *self._ready], now)
                    have_chosen = True
                in_turn = self._archives.in_turn(file)
                if in_turn is not file:
                    self.wake(file)
            if in_turn is None or (in_turn is not file and in_turn not in self._ready):
                continue
            chunk = self._try_to_read(in_turn, now, length)
            if chunk is not None:
                chunks.append(chunk)
                read_bytes += len(chunk.data)
            elif not in_turn.reader.is_unfinished:
                self._ready.pop(in_turn, None)
                have_chosen = False  # so that the next small archive is read now, not after the next scan
        return chunks

    def _try_to_read(self, file: OpenFile, now: float, length: int) -> Chunk | None:
        """Read a chunk of a file; return None at its end or if it cannot be read now."""
        try:
            with self._index.reading(file.reader):
                return self._read_one(file, now, length)
        except OSError as error:
            log.warning("source_unreadable", path=shown(file.reader.path), error=str(error))
            _open_again(file)
            file.signature = None  # the next check tries again
            file.set_error(error)
        except OtherKindError:
            self.close(file)  # the next scan refuses it
        except SourceError as error:
            log.error("source_unreadable", path=shown(file.reader.path), error=str(error))
            file.error = shown(str(error))
        return None

    def _read_one(self, file: OpenFile, now: float, length: int) -> Chunk | None:
        wall_time = self._wall_time()
        status = file.reader.content.status()
        if file.has_changed(status):
            if not file.reader.is_intact():
                self._begin_again(file, status)
            else:
                self.update_settled_until(file)
            file.update(status, now)
        file.ending = self._ending(file, now)
        reader = file.reader
        reader.note_size(status, wall_time)
        steps = _BEGINNING_STEPS
        if reader.content.compression and _stage(file) == "later":
            steps, length = TURN_STEPS, READ_BYTES  # only one such archive is read, for a limited time
        is_final, is_quiet = file.ending == "final", file.ending != "open"
        chunk = reader.read(is_final=is_final, is_quiet=is_quiet, turn_steps=steps, length=length)
        file.error = ""
        file.unfinished_turns = file.unfinished_turns + 1 if reader.is_unfinished else 0
        if reader.is_unfinished:
            self.wake(file)
        elif chunk is None and _is_shorter_than(reader.content, status.st_size):
            _open_again(file)
            file.signature = None  # the next check tries again
        elif chunk is None or (not reader.content.compression and reader.offset >= status.st_size):
            previous_ended_ns = reader.stream.ended_ns
            reader.note_end(status, wall_time)
            # The end of an archive, or an end before NULs, may be found long after the last checkpoint was saved.
            is_end_inside = bool(reader.content.compression) or reader.offset < status.st_size
            if is_end_inside and reader.stream.ended_ns != previous_ended_ns:
                self._index.save_later(reader.stream)
        else:
            self.wake(file)
        return chunk


def _is_shorter_than(content: Content, size: int) -> bool:
    """Return whether a plain file has fewer bytes than its status says, and was not truncated since."""
    return not content.compression and bool(size) and not content.pread(1, size - 1) and content.size() >= size


def _open_again(file: OpenFile) -> None:
    """
    Open a file again by its path, if it is still there, for the reader to continue in.

    On a network file system, a descriptor may fail for good after a new connection, or remain that of a replaced file
    although its status is that of the new one.
    """
    with suppress(OSError, SourceError):
        descriptor = open_file(file.reader.path)
        try:
            if file_id_of(os.fstat(descriptor)) == file.file_id:
                os.dup2(descriptor, file.reader.content.descriptor, inheritable=False)
        finally:
            os.close(descriptor)
