"""Keeps, deletes or moves settled files."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import structlog

from shipper.model.records import Stream, shown
from shipper.sources.discovery import FileId, expand_glob, file_id_of, unescaped
from shipper.system.crash_points import crash_point
from shipper.system.work import WorkItem, at_work

log = structlog.get_logger("sources")

# completed: deleted or moved; done: nothing to do, for instance because another process removed it; written: a process
# has it open for writing; needed: the only copy of a dead-lettered record; unsettled: not settled to its end.
Outcome = Literal["completed", "done", "written", "needed", "unsettled"]

_PRIVATE: Final = ".shipper-done"  # suffix of the name, `.NAME.shipper-done`, of a file being deleted or moved
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1


class Completion:
    """
    Deletes or moves files after verifying that each is the settled one and that no process writes to it.

    For the verification a file gets a private name, so that it cannot be replaced unnoticed; if that fails, it gets its
    name back. A crash in between leaves the private name, for `restore_unfinished`.

    Args:
        is_needed: Returns whether the file of the stream with this id has the only copy of a dead letter's record.
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
        self._logged: set[FileId] = set()

    def complete(self, stream: Stream) -> Outcome:
        """Delete or move a settled file if it is still the one that was read and has not grown since."""
        path = Path(stream.path)
        try:
            if file_id_of(path.stat()) != stream.file_id:
                return "done"
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not to wait if it is a FIFO by now
            with open(descriptor, "rb", buffering=0):
                return self._complete(path, descriptor, stream)
        except FileNotFoundError:
            return "done"
        except OSError as error:
            log.error("source_not_completed", path=shown(path), action=self.action, error=str(error))
            return "done"

    def _complete(self, path: Path, descriptor: int, stream: Stream) -> Outcome:
        if (outcome := self._objection(path, descriptor, stream)) is not None:
            return outcome  # so that a live file keeps its name at all times
        if self._directory is not None and path.parent.resolve() == self._directory.resolve():
            return "done"
        crash_point("complete.delete")
        private = path.with_name(f".{path.name}{_PRIVATE}")
        rename_noreplace(path, private)
        crash_point("complete.taken")
        try:
            outcome = self._objection(private, descriptor, stream)
            if outcome is None:
                self._dispose(private, path, stream)
        finally:
            if os.path.lexists(private):
                _restore_name(private, path)
        crash_point("complete.done")
        return outcome or "completed"

    def _objection(self, path: Path, descriptor: int, stream: Stream) -> Outcome | None:
        """Return why a file must not be deleted or moved; None if it may be."""
        if file_id_of(path.stat()) != stream.file_id or not _is_settled(descriptor, stream):
            return "unsettled"
        if _is_open_for_writing(descriptor):
            hint = "will be moved or deleted once no process has it open for writing"
            self._log_once(log.info, "source_still_written", path, stream, hint)
            return "written"
        if self._is_needed(stream.stream_id):
            hint = (
                "kept, because it has the only copy of oversized records; will be moved or deleted once their dead "
                "letters are purged: shipper dead-letters list --reason oversized"
            )
            self._log_once(log.warning, "source_needed", path, stream, hint)
            return "needed"
        return None

    def _log_once(self, report: Callable[..., None], event: str, path: Path, stream: Stream, hint: str) -> None:
        if stream.file_id not in self._logged:
            self._logged.add(stream.file_id)
            report(event, path=shown(path), hint=hint)

    def _dispose(self, private: Path, path: Path, stream: Stream) -> None:
        if self._directory is None:
            private.unlink()
            log.info("source_deleted", path=shown(path), bytes=stream.size)
        else:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            moved = _move_file(private, self._directory / path.name)
            log.info("source_moved", path=shown(path), to=shown(moved), bytes=stream.size)


KEEP: Final = Completion()


def restore_unfinished(patterns: Iterable[str]) -> None:
    """Restore the names of files that a killed process was deleting or moving."""
    done: set[str] = set()
    for pattern in patterns:
        with suppress(OSError, ValueError), at_work(WorkItem("find", pattern, pattern)):
            name = unescaped(pattern)
            folder = os.path.join(glob.escape(name), "**") if os.path.isdir(name) else os.path.dirname(pattern)
            if folder in done:
                continue
            done.add(folder)
            for private in map(Path, expand_glob(os.path.join(folder, f".*{_PRIVATE}"))):
                _restore_name(private, private.with_name(private.name[1 : -len(_PRIVATE)]))


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a file; raise `FileExistsError` if the new name exists."""
    try:
        _renameat2(source, target)
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EINVAL}:
            raise
        # The system or the file system cannot do this atomically: briefly the file has both names.
        os.link(source, target, follow_symlinks=False)
        source.unlink()


def _renameat2(source: Path, target: Path) -> None:
    """Call `renameat2`, which Python does not offer."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    number = errno.ENOSYS
    if hasattr(library, "renameat2"):
        if not library.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
            return
        number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), str(source), None, str(target))


def _restore_name(private: Path, path: Path) -> None:
    """Restore a file's name; if another file has it now, append a number."""
    restored = _rename_to_free(private, path)
    if restored != path:
        log.warning("source_name_taken", path=shown(path), now=shown(restored))


def _rename_to_free(source: Path, target: Path) -> Path:
    """Rename a file to `target`, or to the first of `NAME.1`, `NAME.2` … that does not exist."""
    for number in itertools.count():
        free = target.with_name(f"{target.name}.{number}") if number else target
        try:
            rename_noreplace(source, free)
        except FileExistsError:
            continue
        return free
    raise AssertionError("unreachable")


def _move_file(source: Path, target: Path) -> Path:
    """Move a file, possibly to another disk, without replacing an existing one."""
    try:
        return _rename_to_free(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    copy = target.with_name(source.name)
    try:
        shutil.copy2(source, copy)
        with copy.open("rb") as copied:
            os.fsync(copied.fileno())
        moved = _rename_to_free(copy, target)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    source.unlink()
    return moved


def _is_settled(descriptor: int, stream: Stream) -> bool:
    """Return whether an open file is the stream's and has not changed since its end was settled."""
    status = os.fstat(descriptor)
    is_same_file = file_id_of(status) == stream.file_id
    is_unchanged = (status.st_size, status.st_mtime_ns) == (stream.ended_size, stream.ended_ns)
    return is_same_file and is_unchanged and stream.is_settled


def _is_open_for_writing(descriptor: int) -> bool:
    """
    Return whether a process has a file open for writing; False if this cannot be determined.

    On Linux and local disks, a read lease is then refused. Only the owner of the file, or a process with `CAP_LEASE`,
    may request one.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        # Opening the file breaks the lease; the default signal would terminate this process, SIGURG is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False
