"""Completes settled files: keeps, deletes or moves them."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import structlog

from shipper.model.records import Stream, shown
from shipper.sources.discovery import expanded
from shipper.sources.identity import Place
from shipper.system.crash_points import crash_point
from shipper.system.work import Piece, at_work

log = structlog.get_logger("sources")

# It is put away; there is nothing to do, as somebody else has taken it away; somebody has it open for writing; it alone
# holds the record of a dead letter; it is not settled to its end.
Outcome = Literal["put_away", "done", "written", "needed", "unsettled"]

_PRIVATE: Final = ".shipper-done"  # ends the name, `.NAME.shipper-done`, of a file that is being put away
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1


class Completion:
    """
    Puts files away, each only once it is proven that it is the settled one and that nobody writes to it.

    For that moment it has a private name, so that nothing can take its place unseen; what does not stand the proof
    gets its name back. A crash in between leaves it there, for `put_back_unfinished`.

    Args:
        action: What to do with a settled file.
        directory: Where to move it.
        is_needed: Whether a dead letter tells but where its record stands in the stream with this id.
    """

    def __init__(
        self,
        action: Literal["keep", "delete", "move"] = "keep",
        directory: Path | None = None,
        *,
        is_needed: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.action = action
        self._is_needed = is_needed
        self._directory = directory if action == "move" else None
        self._told: set[Place] = set()

    def complete(self, stream: Stream) -> Outcome:
        """Delete or move a settled file, if it still is the one that was read and nothing has come to it since."""
        path = Path(stream.path)
        try:
            if _place_of(path) != stream.place:
                return "done"
            with _opened(path) as descriptor:
                return self._complete(path, descriptor, stream)
        except FileNotFoundError:
            return "done"
        except OSError as error:
            log.error("source_not_completed", path=shown(path), action=self.action, error=str(error))
            return "done"

    def _complete(self, path: Path, descriptor: int, stream: Stream) -> Outcome:
        if (outcome := self._look(path, descriptor, stream)) != "done":
            return outcome  # and so a live file does not lose its name even for a moment
        if self._directory is not None and path.parent.resolve() == self._directory.resolve():
            return "done"
        crash_point("complete.delete")
        private = path.with_name(f".{path.name}{_PRIVATE}")
        rename_exclusively(path, private)
        crash_point("complete.taken")
        try:
            outcome = self._look(private, descriptor, stream)
            if outcome == "done":
                self._put_away(private, path, stream)
                outcome = "put_away"
        finally:
            if os.path.lexists(private):
                _put_back(private, path)
        crash_point("complete.done")
        return outcome

    def _look(self, path: Path, descriptor: int, stream: Stream) -> Outcome:
        """Return what there is to say against putting a file away; `done` = nothing."""
        if _place_of(path) != stream.place or not _is_settled(descriptor, stream):
            return "unsettled"
        if _is_open_for_writing(descriptor):
            if self._is_news(stream):
                log.info(
                    "source_still_written",
                    path=shown(path),
                    hint="moved or deleted once no process has it open for writing",
                )
            return "written"
        if self._is_needed(stream.stream_id):
            if self._is_news(stream):
                log.warning(
                    "source_needed",
                    path=shown(path),
                    hint="kept: it is the only copy of oversized records; moved or deleted once their dead letters are "
                    "purged: shipper dead-letters list --reason oversized",
                )
            return "needed"
        return "done"

    def _is_news(self, stream: Stream) -> bool:
        is_news = stream.place not in self._told
        self._told.add(stream.place)
        return is_news

    def _put_away(self, private: Path, path: Path, stream: Stream) -> None:
        if self._directory is None:
            private.unlink()
            log.info("source_deleted", path=shown(path), bytes=stream.size)
        else:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            moved = _move(private, self._directory / path.name)
            log.info("source_moved", path=shown(path), to=shown(moved), bytes=stream.size)


KEEP: Final = Completion()


def put_back_unfinished(patterns: Iterable[str]) -> None:
    """Restore the names of files that an earlier process was putting away when it was killed."""
    done: set[str] = set()
    for pattern in patterns:
        with suppress(OSError, ValueError), at_work(Piece("find", pattern, pattern)):
            folder = os.path.join(glob.escape(pattern), "**") if os.path.isdir(pattern) else os.path.dirname(pattern)
            if folder in done:
                continue
            done.add(folder)
            for private in map(Path, expanded(os.path.join(folder, f".*{_PRIVATE}"))):
                _put_back(private, private.with_name(private.name[1 : -len(_PRIVATE)]))


def rename_exclusively(source: Path, target: Path) -> None:
    """
    Rename a file.

    Raises:
        FileExistsError: The name is taken; what has it stays as it is.
        OSError: It cannot be renamed.
    """
    try:
        _renameat2()(source, target)
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EINVAL}:
            raise
        # This system, or this file system, cannot do it at one stroke: for a moment it has both names.
        os.link(source, target, follow_symlinks=False)
        source.unlink()


def _renameat2() -> Callable[[Path, Path], None]:
    """Return the system call, which Python does not have."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "renameat2", None)

    def rename(source: Path, target: Path) -> None:
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(source), None, str(target))

    return rename


def _put_back(private: Path, path: Path) -> None:
    """Restore a file's name, or one beside it if that is taken by now."""
    back = _first_free(private, path)
    if back != path:
        log.warning("source_name_taken", path=shown(path), now=shown(back))


def _first_free(source: Path, target: Path) -> Path:
    """Rename a file to this name, or to the first `NAME.1`, `NAME.2` … that is not taken."""
    for number in itertools.count():
        free = target.with_name(f"{target.name}.{number}") if number else target
        try:
            rename_exclusively(source, free)
        except FileExistsError:
            continue
        return free
    raise AssertionError("numbers do not end")


def _move(source: Path, target: Path) -> Path:
    """Move a file, also to another disk; what is there by this name stays."""
    try:
        return _first_free(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copy = target.with_name(source.name)
    try:
        shutil.copy2(source, copy)
        with copy.open("rb") as copied:
            os.fsync(copied.fileno())
        moved = _first_free(copy, target)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    source.unlink()
    return moved


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _place_of(path: Path) -> Place:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_settled(descriptor: int, stream: Stream) -> bool:
    """Return whether an open file is the stream's, as it was when its end was settled."""
    status = os.fstat(descriptor)
    is_the_file = (status.st_dev, status.st_ino) == stream.place
    is_as_it_was = (status.st_size, status.st_mtime_ns) == (stream.ended_size, stream.ended_ns)
    return is_the_file and is_as_it_was and stream.is_settled


def _is_open_for_writing(descriptor: int) -> bool:
    """
    Return whether anybody has a file open for writing; False where the kernel does not tell.

    It tells by refusing a read lease, to the file's owner and to who may (`CAP_LEASE`), on Linux and local disks.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        # Should somebody open it within the moment: the usual signal would end the process, this one is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False
