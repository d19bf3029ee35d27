"""Files: found by name, glob or folder, then read to their end or followed as they grow."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.errors import SourceError
from shipper.records import Chunk, Stream
from shipper.sources.reader import NDJSON, InputForm, StreamReader, is_same

log = structlog.get_logger("sources")


def find_files(patterns: Iterable[str], *, own_directory: Path, exclude: Sequence[str] = ()) -> Iterator[Path]:
    """
    Expand names, globs (`**` goes down) and folders into files, each once, in the order of the patterns.

    A name without wildcards is given back even if nothing is there, so that the caller can say so.

    Args:
        own_directory: The state directory. What lies in it is shipper's own and never an input.
    """
    own = str(own_directory.resolve()) + os.sep
    seen = {path for pattern in exclude for path in glob.glob(pattern, recursive=True)}
    for pattern in patterns:
        if os.path.isdir(pattern):
            paths = sorted(glob.glob(f"{glob.escape(pattern)}/**", recursive=True))
        elif glob.has_magic(pattern) and not os.path.exists(pattern):
            paths = sorted(glob.glob(pattern, recursive=True))
        else:
            paths = [pattern]
        for path in paths:
            if path not in seen and not os.path.isdir(path) and not os.path.realpath(path).startswith(own):
                seen.add(path)
                yield Path(path)


class StreamBook:
    """
    Knows which files are streams that were read before.

    Args:
        known: The file streams of the state store, older ones first.
        next_stream_id: Gives an id that was never given.
        max_record_bytes: The longest line that is a record.
        form: How records lie in the files.
    """

    def __init__(
        self,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        *,
        max_record_bytes: int,
        form: InputForm = NDJSON,
    ) -> None:
        self._max_record_bytes = max_record_bytes
        self._form = form
        self._by_inode = {(stream.device, stream.inode): stream for stream in known}
        self._next_stream_id = next_stream_id

    def known(self) -> list[Stream]:
        return list(self._by_inode.values())

    def knows(self, path: Path) -> bool:
        """Tell whether a file is a known stream: its inode alone says little, as inodes are given out again."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            known = self._by_inode.get((status.st_dev, status.st_ino))
            return known is not None and is_same(file.fileno(), known)

    def begin(self, path: Path, status: os.stat_result) -> Stream:
        """Begin a stream at the start of a file."""
        stream = Stream(
            stream_id=self._next_stream_id(),
            kind="file",
            path=shown(path),
            device=status.st_dev,
            inode=status.st_ino,
        )
        self._by_inode[status.st_dev, status.st_ino] = stream
        return stream

    def open(self, path: Path) -> StreamReader:
        """
        Open a file where it was left, or at its start if it is new.

        Raises:
            SourceError: It is not a regular file, or cannot be read.
        """
        try:
            # O_NONBLOCK: a FIFO would otherwise hold the open until somebody writes to it.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{path} is not a regular file; a stream goes through `shipper pipe`")
            stream = self._by_inode.get((status.st_dev, status.st_ino))
            if stream is not None and not is_same(descriptor, stream):
                log.warning("source_replaced", path=shown(path), checkpoint=stream.checkpoint, size=status.st_size)
                stream = None
            if stream is None:
                stream = self.begin(path, status)
            stream.path = shown(path)
        except BaseException:
            os.close(descriptor)
            raise
        return StreamReader(descriptor, stream, path, max_record_bytes=self._max_record_bytes, form=self._form)


class FilesOnce:
    """
    Reads files one after the other, each to the end that it has when it is reached.

    Attributes:
        total_bytes: Size of all files, as of the start.
        done_bytes: Bytes of them that were read, now or by an earlier run.
        unreadable: Files that were there at the start and could not be read.
        is_exhausted: Whether every readable file was read to its end.
    """

    def __init__(self, paths: Sequence[Path], book: StreamBook) -> None:
        self._paths = paths
        self._book = book
        self.total_bytes = sum(path.stat().st_size for path in paths)
        self.done_bytes = 0
        self.unreadable = 0
        self.is_exhausted = False

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send the chunks of all files, one file after the other."""
        for path in self._paths:
            try:
                reader = await run_sync(self._book.open, path)
            except SourceError as error:
                log.error("source_unreadable", path=shown(path), error=str(error))
                self.unreadable += 1
                continue
            self.done_bytes += reader.offset
            read_on = partial(reader.read, is_final=True)
            try:
                while chunk := await run_sync(read_on):
                    await chunks_tx.send(chunk)
                    self.done_bytes += chunk.end_offset - chunk.start_offset
            except SourceError as error:
                log.error("source_unreadable", path=shown(path), error=str(error))
                self.unreadable += 1
            finally:
                reader.close()
        self.is_exhausted = not self.unreadable

    async def after_save(self) -> None:
        """Files stay where they are."""


@dataclass(eq=False)
class _Followed:
    """A file that is followed: its size and time at the last look, `grew_at` when these last changed."""

    reader: StreamReader
    grew_at: float
    size: int = -1
    modified_ns: int = -1
    has_more: bool = True

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left to read, also of what has come since the last look."""
        status = self.reader.status()
        return not self.has_more and (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


class FilesFollowed:
    """
    Follows growing files until it is cancelled.

    A busy file and a quiet one take turns, a chunk each. A file that was renamed or deleted stays open until its
    end was seen and it has not grown for `rotate_wait_s`, as its writer may still have it open.

    Args:
        include, exclude: Names, globs or folders.
        own_directory: The state directory; nothing below it is ever an input.
        poll_interval_s: How often to look for new files, and for growth that nothing announced.
        max_open: Most files to hold open. Beyond it, the one that has been quiet longest is closed until it changes.
    """

    is_exhausted = False  # there is no end to reach

    def __init__(
        self,
        include: Sequence[str],
        exclude: Sequence[str],
        book: StreamBook,
        *,
        own_directory: Path,
        poll_interval_s: float,
        rotate_wait_s: float,
        max_open: int = 512,
    ) -> None:
        self._include = include
        self._exclude = exclude
        self._book = book
        self._own_directory = own_directory
        self._poll_interval_s = poll_interval_s
        self._rotate_wait_s = rotate_wait_s
        self._max_open = max_open
        self._asleep: dict[tuple[int, int], tuple[int, int]] = {}
        self._is_crowded = False
        self._files: dict[tuple[int, int], _Followed] = {}
        self._refused: dict[Path, str] = {}
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<FilesFollowed {len(self._files)} open>"

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks as they appear; ends only by cancellation."""
        try:
            async with anyio.create_task_group() as side:
                stop_watching = anyio.Event()
                side.start_soon(self._watch, stop_watching)
                try:
                    await self._follow(chunks_tx)
                finally:
                    stop_watching.set()  # ends the watcher's thread, which no cancellation reaches
        finally:
            for file in self._files.values():
                file.reader.close()

    async def after_save(self) -> None:
        """Files stay where they are."""

    async def _follow(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        await run_sync(self._find_strays, anyio.current_time())
        look_at = 0.0
        while True:
            self._wake = wake = anyio.Event()
            now = anyio.current_time()
            if now >= look_at:
                await run_sync(self._discover, now)
                look_at = now if self._is_crowded else now + self._poll_interval_s
            chunks = await run_sync(self._read_round, now)
            for chunk in chunks:
                await chunks_tx.send(chunk)
            if not chunks:
                with anyio.move_on_at(look_at):
                    await wake.wait()
                    look_at = 0.0

    async def _watch(self, stop: anyio.Event) -> None:
        """Let the kernel's word of a change end the wait; where it has none to give, the poll is enough."""
        from watchfiles import awatch

        folders = {folder for pattern in self._include if (folder := fixed_folder(pattern)).is_dir()}
        if not folders:
            return
        changes = awatch(
            *folders,
            watch_filter=None,
            stop_event=stop,
            debounce=50,
            step=25,
            recursive=any("**" in pattern or Path(pattern) in folders for pattern in self._include),
            ignore_permission_denied=True,
        )
        try:
            async for _ in changes:
                self._wake.set()
        except Exception as error:  # whatever the watcher has to say, the poll goes on
            log.warning("watch_unavailable", error=str(error), poll_interval_seconds=self._poll_interval_s)

    def _discover(self, now: float) -> None:
        """Open what is new, note what was renamed, close what has gone."""
        present: set[tuple[int, int]] = set()
        self._is_crowded = False
        for path in find_files(self._include, exclude=self._exclude, own_directory=self._own_directory):
            try:
                status = path.stat()
                present.add((status.st_dev, status.st_ino))
                self._open(path, status, now)
                self._refused.pop(path, None)
            except FileNotFoundError:
                continue
            except (SourceError, OSError) as error:
                if self._refused.get(path) != str(error):
                    log.warning("source_refused", path=shown(path), error=str(error))
                    self._refused[path] = str(error)
        self._asleep = {key: seen for key, seen in self._asleep.items() if key in present}
        for key, file in list(self._files.items()):
            if key not in present and now - file.grew_at >= self._rotate_wait_s and file.is_at_its_end:
                log.info("source_closed", path=shown(file.reader.path), offset=file.reader.offset)
                file.reader.close()
                del self._files[key]

    def _open(self, path: Path, status: os.stat_result, now: float) -> None:
        key = (status.st_dev, status.st_ino)
        file = self._files.get(key)
        if file is None:
            if self._asleep.get(key) == (status.st_size, status.st_mtime_ns):
                return
            if len(self._files) >= self._max_open and not self._close_quietest():
                self._is_crowded = True  # all of them are being read; it is this file's turn at the next look
                return
            self._asleep.pop(key, None)
            reader = self._book.open(path)
            opened = reader.status()
            self._files[opened.st_dev, opened.st_ino] = _Followed(reader, now)
            log.info("source_opened", path=shown(path), offset=reader.offset, size=opened.st_size)
        elif file.reader.path != path and not _is_at(file.reader.path, status):
            log.info("source_renamed", path=shown(path), formerly=shown(file.reader.path))
            file.reader.path = path
            file.reader.stream.path = shown(path)

    def _close_quietest(self) -> bool:
        """Close the file that has been at its end for longest; False if none is at its end."""
        quiet = [key for key, file in self._files.items() if file.is_at_its_end]
        if not quiet:
            return False
        key = min(quiet, key=lambda each: self._files[each].grew_at)
        file = self._files.pop(key)
        file.reader.close()
        self._asleep[key] = (file.size, file.modified_ns)
        return True

    def _find_strays(self, now: float) -> None:
        """Open unread rests of files that were renamed while nobody watched: same folder, same inode."""
        by_folder: dict[str, dict[int, Stream]] = {}
        for stream in self._book.known():
            by_folder.setdefault(os.path.dirname(stream.path), {})[stream.inode] = stream
        for folder, by_inode in by_folder.items():
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        known = by_inode.get(entry.inode())
                        if known is not None and entry.is_file(follow_symlinks=False):
                            status = entry.stat()
                            path = Path(entry.path)
                            if (
                                status.st_size > known.checkpoint
                                and entry.path != known.path
                                and self._book.knows(path)
                            ):
                                self._open(path, status, now)
            except (OSError, SourceError) as error:
                log.warning("source_refused", path=folder, error=str(error))

    def _read_round(self, now: float) -> list[Chunk]:
        """Read at most one chunk of each file that has something new."""
        chunks: list[Chunk] = []
        for file in self._files.values():
            reader = file.reader
            status = reader.status()
            try:
                if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
                    if not reader.is_intact():
                        log.warning(
                            "source_truncated", path=shown(reader.path), offset=reader.offset, size=status.st_size
                        )
                        reader.restart(self._book.begin(reader.path, status))
                    file.size, file.modified_ns, file.grew_at = status.st_size, status.st_mtime_ns, now
                elif not file.has_more:
                    continue
                chunk = reader.read(is_final=False)
            except OSError as error:
                log.warning("source_unreadable", path=shown(reader.path), error=str(error))
                file.size = -1
                continue
            except SourceError as error:
                log.error("source_unreadable", path=shown(reader.path), error=str(error))
                file.has_more = False  # until it changes
                continue
            file.has_more = chunk is not None and reader.offset < file.size
            if chunk is not None:
                chunks.append(chunk)
        return chunks


def shown(path: Path) -> str:
    """Write a path for people and for the state, also one that is not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def fixed_folder(pattern: str) -> Path:
    """Tell the deepest folder that a pattern names without wildcards."""
    folder = Path(pattern)
    if not folder.is_dir():
        folder = folder.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Tell whether a name still points at a file: a hard link is no rename."""
    try:
        there = path.stat()
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino)
