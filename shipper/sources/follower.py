"""Finds files and follows them through rotation, truncation and deletion; each step blocks until it is done."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog
from msgspec.structs import replace

from shipper.model.errors import SourceError
from shipper.model.records import Backlog, Stream, shown
from shipper.sources.completion import KEEP, Completion, Outcome
from shipper.sources.content import OtherKindError
from shipper.sources.discovery import (
    FileId,
    FoundFile,
    Patterns,
    Signature,
    expand,
    file_id_of,
    signature_of,
    unescaped,
)
from shipper.sources.identity import StreamIndex, UndecidedError, folders_of, not_regular, set_path, status_at
from shipper.sources.open_files import OpenFile, OpenFiles
from shipper.sources.reader import StreamReader
from shipper.sources.register import StreamRegister, forget, forget_oldest_lost, report_unreachable, save_changes
from shipper.sources.siblings import Siblings, looks_like_generation, sibling_of
from shipper.system.work import WorkItem, at_work, step

log = structlog.get_logger("sources")

_COPYING_WAITS: Final = 10  # maximum duration of a copy, as a multiple of rotate_wait_s
_UNREADABLE_SHOWN: Final = 10
_QUIET_S: Final = 60.0  # a settled file that has not changed for this long is not opened


class _Refusal(NamedTuple):
    """Why a file cannot be opened."""

    message: str
    is_input: bool  # False = not a regular file, and matched only by a wildcard


class Follower:
    """
    Finds and follows files. All methods block; `now` is the time of any monotonic clock.

    A renamed or deleted file stays open until it was read to its end and has not grown for `rotate_wait_s`, as its
    writer may still have it open.

    Args:
        start: Where to begin files that exist when a pattern is first used.
        max_open: Maximum number of open files, apart from renamed ones. To open another one, the file that has been
            quiet longest is closed until it changes.

    Attributes:
        files: The open files, which also read new data.
        is_comparing: Whether a comparison of files is unfinished, so that the next scan should follow soon.
        backlog: As of the last scan.
    """

    def __init__(
        self,
        patterns: Patterns,
        index: StreamIndex,
        register: StreamRegister,
        *,
        rotate_wait_s: float,
        wall_time: Callable[[], float],
        start: Literal["beginning", "end"] = "beginning",
        completion: Completion = KEEP,
        max_open: int = 512,
    ) -> None:
        self._index = index
        self._register = register
        self._rotate_wait_s = rotate_wait_s
        self._wall_time = wall_time
        self._start = start
        self._completion = completion
        self._max_open = max_open
        self.files = OpenFiles(index, rotate_wait_s=rotate_wait_s, wall_time=wall_time)
        self._closed: dict[FileId, Signature] = {}  # files at their end that are closed until they change
        self._waiting = deque[FoundFile]()  # files without room as of the last scan
        self._refused: dict[Path, _Refusal] = {}
        self._search_until: dict[int, float] = {}  # until when lost streams are searched for
        self._unrelated: dict[FileId, Signature] = {}  # files that are none of the lost streams
        self._reopened: dict[FileId, Signature] = {}  # rotated files that were opened again
        self._unknown_since: dict[str, float | None] = {}  # since when files of unknown origin exist; None = logged
        self._followed_since: dict[str, float] = {}  # when patterns were first used, before this scan
        self._matched: set[str] = set()  # patterns that have matched a file
        self._dropped: set[int] = set()  # streams that no pattern has matched since a reload
        self._unmatched: list[Stream] = []  # streams with unsettled content that no pattern matches
        self._is_first_scan = True
        self._scanned_at: float | None = None  # start of the last completed scan, seconds since the epoch
        self._found_at = 0.0
        self._has_closed = False  # a deleted or renamed file was closed
        self.is_comparing = False
        self._unreachable_bytes = 0
        self.backlog = Backlog()
        self.replace_patterns(patterns)

    # Names ------------------------------------------------------------------------------------------------------------

    def replace_patterns(self, patterns: Patterns) -> None:
        """Replace the patterns as of the next scan."""
        self.patterns = patterns
        self._siblings = Siblings(patterns)
        self._has_new_patterns = True
        self.backlog = replace(self.backlog, has_scanned=False)

    def find(self) -> list[FoundFile]:
        """Find all files that match; pass them to `scan`."""
        self._found_at = self._wall_time()
        return list(self.patterns.find())

    def scan(self, found: Sequence[FoundFile], now: float) -> None:
        """Open new files, note renamed ones, and close and complete those read to their end."""
        with at_work(WorkItem("find", ", ".join(self.patterns.include))):
            self._scan(found, now)

    def _scan(self, found: Sequence[FoundFile], now: float) -> None:
        self.is_comparing = False
        self._waiting.clear()
        self.files.begin_scan()
        self._has_closed |= self.files.close_unusable()
        if self._has_new_patterns:
            self._followed_since = self._register.started_patterns()
        found = [*found, *self._find_generations(found, now)]
        present = {file.file_id for file in found}
        if self._has_new_patterns and not self._is_first_scan:
            self._close_unmatched(present)
        unknown = [file for file in found if not self._update_known(file, now)]
        is_new = any(file.new_since is not None for file in self.files)
        if unknown or is_new:
            self.files.restart_truncated(now)
        self._start_search(self._index.take_displaced(), now)
        has_left = self._has_closed or not self._closed.keys() <= present
        if unknown or is_new or self._search_until or self._has_new_patterns or has_left:
            self._identify(unknown, present, now)
        self._has_closed = False
        self._closed = {file_id: seen for file_id, seen in self._closed.items() if file_id in present}
        if self._refused:
            paths = {file.path for file in found}
            self._refused = {path: refusal for path, refusal in self._refused.items() if path in paths}
        for file in self.files:
            is_present = file.is_present = file.file_id in present
            if not is_present or file.may_end:
                self.files.check(file, now)
            self._finish(file, now, is_present=is_present)
        self.save()
        unmatched = self._index.unmatched(present) if self._has_new_patterns else self._unmatched
        self._unmatched = [
            stream
            for stream in unmatched
            if not (stream.file_id in present or self.files.at(stream.file_id))
            and (self.patterns.matching(stream.path) is None or self.patterns.is_excluded(stream.path))
            and status_at(stream.path, stream.file_id)
        ]
        self._scanned_at = self._found_at
        self.backlog = self._backlog(found, present)
        self._is_first_scan = self._has_new_patterns = False

    def _backlog(self, found: Sequence[FoundFile], present: set[FileId]) -> Backlog:
        unmatched = self.patterns.unmatched()
        self._matched.update(self.patterns.matches.keys() - unmatched.keys())
        # If delivered files are deleted or moved, it is normal that a pattern no longer matches any.
        may_be_empty = self._matched if self._completion.action != "keep" else set()
        messages = [message for pattern, message in unmatched.items() if pattern not in may_be_empty]
        unreadable = [refusal.message for refusal in self._refused.values() if refusal.is_input]
        unreadable += [file.error for file in self.files if file.error]
        unreadable += [
            f"no pattern matches {shown(stream.path)}, which was not read to its end"
            for stream in self._unmatched
            if stream.compression or stream.size > max(stream.checkpoint, stream.read_offset)
        ]
        backlog = Backlog(
            lag_bytes=self._lag_bytes(found, present),
            unreachable_bytes=self._unreachable_bytes,
            unmatched=messages,
            unreadable=unreadable[:_UNREADABLE_SHOWN],
            unreadable_count=len(unreadable),
            has_unopened=any(self._index.at(found.file_id) is None for found in self._waiting),
        )
        if not self.backlog.has_scanned:
            report = log.warning if messages or unreadable else log.info
            problems = {"unmatched": messages, "unreadable": backlog.unreadable}
            report(
                "inputs_found",
                patterns={shown(pattern): count for pattern, count in self.patterns.matches.items()},
                **{name: problem for name, problem in problems.items() if problem},
            )
        return backlog

    def _close_unmatched(self, present: set[FileId]) -> None:
        """Close the files that are still at their paths but no longer match a pattern."""
        for file in self.files:
            reader, stream = file.reader, file.reader.stream
            if file.file_id in present or stream.is_rotated or not status_at(reader.path, file.file_id):
                continue
            log.info("source_dropped", path=shown(reader.path), offset=reader.offset)
            if file.new_since is not None:
                self._index.drop(stream)  # nothing was read, and it may be a copy
            else:
                self._dropped.add(stream.stream_id)
            self.files.close(file)

    def _find_generations(self, found: Sequence[FoundFile], now: float) -> list[FoundFile]:
        """Find unseen generations of followed files; treat them as matched by the pattern until they are identified."""
        matched = [file.name for file in found]
        if self._is_first_scan:
            matched += self._index.known_paths()
        generations, unknown = self._siblings.find(matched, self._followed_since, self._found_at)
        self._log_unknown({file.name for file in unknown if self._is_undecided(file)}, now)
        beside = {file.file_id: file for file in (*generations, *unknown)}
        self._reopened = {file_id: seen for file_id, seen in self._reopened.items() if file_id in beside}
        for file_id, file in beside.items():
            seen = signature_of(file.status)
            if self._reopened.get(file_id) != seen and self._has_grown_after_it_was_closed(file):
                self._reopened[file_id] = seen  # an incomplete line at its end is no reason to open it again
                self._open_rotated(file.path, now)
        return [file for file in generations if self._is_undecided(file)]

    def _is_undecided(self, found: FoundFile) -> bool:
        if (file := self.files.at(found.file_id)) is not None:
            return file.new_since is not None
        stream = self._index.at(found.file_id)  # if its path differs, this file may reuse its inode
        return stream is None or stream.path != found.name

    def _has_grown_after_it_was_closed(self, found: FoundFile) -> bool:
        """Return whether a rotated file that no pattern matches has been written to again, or overwritten."""
        stream = None if self.files.at(found.file_id) or self._is_undecided(found) else self._index.at(found.file_id)
        if stream is None or stream.ended_size == found.status.st_size or stream.stream_id in self._dropped:
            return False
        return stream.is_rotated or self._is_generation(found.name)

    def _log_unknown(self, names: set[str], now: float) -> None:
        """Log files beside followed files that are not generations of them; each once, after `rotate_wait_s`."""
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in names}
        for name, since in self._unknown_since.items():
            if since is not None and now - since >= self._rotate_wait_s:
                log.warning("source_beside_unread", path=shown(name), hint="add it to input.include or input.exclude")
                self._unknown_since[name] = None

    def _is_generation(self, path: str) -> bool:
        folder, name = os.path.split(path)
        sibling = sibling_of(name, lambda original: self.patterns.matching(os.path.join(folder, original)) is not None)
        return sibling is not None and sibling.is_generation

    def _lag_bytes(self, found: Sequence[FoundFile], present: set[FileId]) -> int:
        lag = 0
        for file_id, status in {file.file_id: file.status for file in found}.items():
            stream = self._index.at(file_id)
            if stream is None:
                lag += status.st_size
            else:
                is_size_known = stream.compression or not self._index.has_changed(stream, status)
                lag += max(0, (stream.size if is_size_known else status.st_size) - stream.checkpoint)
        missing = [file.reader.stream for file in self.files if file.file_id not in present]
        return lag + sum(max(0, stream.size - stream.checkpoint) for stream in (*missing, *self._unmatched))

    def save(self, *, is_last: bool = False) -> None:
        """Save new paths, inodes and unsettled bytes; in the last save, also until when unchanged files are settled."""
        for file in self.files:
            stream = file.reader.stream
            if is_last and not self.files.is_ready(file):
                self.files.update_settled_until(file)
            if stream.size != file.saved_size and not stream.is_settled:
                self._index.save_later(stream)
            file.saved_size = stream.size
        save_changes(self._register, self._index, self._wall_time())

    def _identify(self, unknown: list[FoundFile], present: set[FileId], now: float) -> None:
        """Identify unknown files: new ones, and streams with another path or inode."""
        for stream in self._index.update_lost(present, [file.reader.stream for file in self.files]):
            if stream.stream_id not in self._dropped and not self._open_unmatched(Path(stream.path), now):
                self._complete(stream, is_matched=False)
        if self._is_first_scan:
            for stream in self._index.unsettled_rotated(present, self._is_generation):
                self._open_rotated(Path(stream.path), now)
            self._start_search(self._index.lost(), now)
        if self._has_new_patterns:
            self._apply_start(unknown)
        forget_oldest_lost(self._register, self._index)
        self._waiting.extend(unknown)
        self._open_waiting(now)
        new = [file for file in self.files if file.new_since is not None]
        # Originals before their copies, so that the copy is the one that waits.
        for file in sorted(new, key=lambda file: (file.file_id in present, bool(file.reader.content.compression))):
            self._decide(file, now, is_present=file.file_id in present)
        self._search_lost(present, now)

    def _update_known(self, found: FoundFile, now: float) -> bool:
        """Handle a file with the inode of a known stream; return False if it is not that stream's file."""
        file = self.files.at(found.file_id)
        if file is not None:
            self._update_name(file, found)
            if file.new_since is None and file.has_changed(found.status):
                self.files.wake(file)
            elif file.new_since is None and not self.files.is_ready(file):
                file.unchanged_at = self._found_at
            return True
        stream = self._index.at(found.file_id)
        if stream is None:
            return False
        seen = signature_of(found.status)
        if found.file_id not in self._closed and self._is_settled_and_quiet(stream, found):
            self._closed[found.file_id] = seen
        if self._closed.get(found.file_id) == seen:
            if stream.path != found.name and not status_at(stream.path, found.file_id):
                set_path(stream, found.name)
                self._index.save_later(stream)
            self._complete(stream, is_matched=True)
        else:
            was_closed = self._closed.pop(found.file_id, None) is not None
            if not self._make_room():
                self._waiting.append(found)
                return True
            self._try(found, now, self._open_in_place)
            if was_closed and (opened := self.files.at(found.file_id)) is not None:
                opened.unchanged_at = self._scanned_at
        return self._index.at(found.file_id) is not None

    def _is_settled_and_quiet(self, stream: Stream, found: FoundFile) -> bool:
        """Return whether an earlier run settled a file, so that it need not be opened; there may be thousands."""
        is_quiet = self._wall_time() - found.status.st_mtime > _QUIET_S
        return is_quiet and stream.path == found.name and not self._index.needs_reading(stream, found.status)

    def _update_name(self, file: OpenFile, found: FoundFile) -> None:
        reader = file.reader
        if found.name != file.name and not status_at(reader.path, found.file_id):
            log.info("source_renamed", path=shown(found.path), formerly=shown(reader.path))
            file.name = found.name
            reader.path = found.path
            set_path(reader.stream, found.name)

    def _try(self, found: FoundFile, now: float, action: Callable[[FoundFile, float], None]) -> None:
        """Try to open a file; log each failure once."""
        try:
            if found.is_special:
                raise not_regular(found.path)
            with self._index.opening(found.name, found.file_id):
                action(found, now)
            self._refused.pop(found.path, None)
        except (SourceError, OSError) as error:
            if FileNotFoundError in (type(error), type(error.__cause__)):
                return  # deleted or renamed since it was found
            if isinstance(error, OtherKindError):
                self._forget_unread(found)
            # Anything but a regular file is an input only if named explicitly: a wildcard may match a socket.
            refusal = _Refusal(shown(str(error)), not found.is_special or found.name == unescaped(found.pattern))
            if self._refused.get(found.path) != refusal:
                log.warning("source_refused", path=shown(found.path), error=refusal.message)
                self._refused[found.path] = refusal

    def _forget_unread(self, found: FoundFile) -> None:
        """Forget the stream of a refused file that was empty when it was first opened."""
        stream = self._index.at(found.file_id)
        if stream is not None and stream.path == found.name and not max(stream.checkpoint, stream.read_offset):
            forget(self._register, self._index, [stream])

    @property
    def is_crowded(self) -> bool:
        """Whether files wait for room."""
        return bool(self._waiting)

    def check(self, now: float) -> bool:
        """
        Schedule open files that have changed, and open files that wait for room.

        With many files this is faster than `scan`, which finds and identifies all of them.

        Returns:
            Whether the next check should follow at once, as files were opened and others still wait.
        """
        self._has_closed |= self.files.close_unusable()
        for file in self.files:
            self.files.check(file, now)
        waiting = len(self._waiting)
        if not waiting:
            return False
        with at_work(WorkItem("find", ", ".join(self.patterns.include))):
            known = set(self.files)
            self.files.begin_scan()
            self.files.restart_truncated(now)
            self._open_waiting(now)
            for file in self.files:
                if file not in known and file.new_since is not None:
                    self._decide(file, now, is_present=True, is_scan=False)
            self.save()
        return 0 < len(self._waiting) < waiting

    def _open_waiting(self, now: float) -> None:
        """Open files while there is room."""
        while self._waiting and self._make_room():
            found = self._waiting.popleft()
            self._closed.pop(found.file_id, None)
            self._try(found, now, self._open_in_place if self._index.at(found.file_id) else self._open_new)

    def _open_in_place(self, found: FoundFile, now: float) -> None:
        reader = self._index.open_in_place(found.path)
        if reader is not None:
            self._dropped.discard(reader.stream.stream_id)
            self._follow(reader, now)

    def _open_new(self, found: FoundFile, now: float) -> None:
        """Open a file that cannot be identified yet, such as an empty one."""
        reader = self._index.open_new(found.path, found.file_id)
        if reader is not None:
            self.files.add(OpenFile(reader, found.file_id, found.name, now, new_since=now))

    def _make_room(self) -> bool:
        """Make room for one more open file; return False if all are being read."""
        if len(self.files) >= self._max_open:
            closed = self.files.close_quietest()
            if closed is None:
                return False
            assert closed.signature is not None
            self._closed[closed.file_id] = closed.signature
        return True

    def _follow(self, reader: StreamReader, now: float) -> None:
        file_id = reader.stream.file_id
        if self.files.at(file_id):  # after the scan, the path was taken by a file that is open already
            reader.close()
            return
        file = OpenFile(reader, file_id, str(reader.path), now)
        self.files.add(file)
        self._begin_reading(file)

    def _begin_reading(self, file: OpenFile) -> None:
        self.files.wake(file)
        reader = file.reader
        log.info("source_opened", path=shown(reader.path), offset=reader.offset, size=reader.content.status().st_size)

    # New files --------------------------------------------------------------------------------------------------------

    def _decide(self, file: OpenFile, now: float, *, is_present: bool, is_scan: bool = True) -> None:
        """
        Begin to read a new file once it is decided whether it is a copy of another input.

        Args:
            is_scan: All files were found just now. Otherwise the decision on a file that looks like a copy waits for a
                scan, as its original may be gone.
        """
        status = file.reader.content.status()
        if file.new_since is None or not status.st_size:
            file.new_since = now
            return
        file.update(status, now)
        try:
            try:
                reader = self._index.decide(file.reader, may_wait=True)
            except UndecidedError as undecided:
                if not is_scan or self._is_gone(undecided.original):
                    return
                if is_present and self._may_be_a_copy(file, undecided, now):
                    return
                is_unmatched = not self.patterns.matching(file.name)
                if is_unmatched and self._is_copy(undecided.original, file) is not False:
                    return
                reader = self._index.decide(file.reader, may_wait=False)
        except SourceError:
            reader = file.reader  # reported when it is read
        except OSError as error:  # tried again at the next scan
            file.set_error(error)
            return
        file.new_since = file.signature = None
        file.reader = reader
        self._begin_reading(file)

    def _is_copy(self, original: Stream | None, file: OpenFile) -> bool | None:
        """Close an unmatched file if it is a settled copy of a present original; return None if it is undecided."""
        if original is None:
            return False
        opened = self.files.at(original.file_id)
        descriptor = None if opened is None else opened.reader.content.descriptor
        compared_bytes = sum(file.compared.values())
        is_copy = self._index.has_settled_copy(original, file.reader.content, file.compared, descriptor=descriptor)
        self.is_comparing |= sum(file.compared.values()) > compared_bytes  # so that the next scan continues soon
        if not is_copy:
            return is_copy
        file.reader = reader = self._index.decide(file.reader, may_wait=False)
        self._register.begin([(reader.stream, reader.skip_to_end())], [], self._wall_time())
        log.info("source_is_copy", path=shown(reader.path), of=original.shown_path)
        self.files.close(file)
        return True

    def _is_gone(self, original: Stream | None) -> bool:
        """Return whether an original is deleted or truncated, so that a file like it will prove to be its copy."""
        file = self.files.at(original.file_id) if original is not None else None
        if file is None or file.reader.stream is not original:
            return False
        return not file.reader.content.status().st_nlink or not file.reader.is_intact()

    def _may_be_a_copy(self, file: OpenFile, undecided: UndecidedError, now: float) -> bool:
        """Return whether to wait for a decision on a file that looks like another one."""
        assert file.new_since is not None
        waited_s = now - file.new_since
        if undecided.is_shorter:  # a copy in progress would grow
            return now - file.grew_at < self._rotate_wait_s and waited_s < _COPYING_WAITS * self._rotate_wait_s
        return waited_s < self._rotate_wait_s

    def _apply_start(self, unknown: list[FoundFile]) -> None:
        """Apply `start` to files that are older than their pattern; later ones are read from the beginning."""
        started = self._register.started_patterns()
        new_patterns = [pattern for pattern in self.patterns.include if pattern not in started]
        skipped = []
        if self._start == "end" and new_patterns:
            known_names = {name for pattern in started for name in expand(pattern)}
            for found in unknown:
                if found.pattern in new_patterns and found.name not in known_names:
                    skipped += self._skip_to_end(found)
        self._register.begin(skipped, new_patterns, self._wall_time())
        self._followed_since = self._register.started_patterns()

    def _skip_to_end(self, found: FoundFile) -> list[tuple[Stream, bytes]]:
        if found.is_special or not found.status.st_size:
            return []
        try:
            reader = self._index.open(found.path)
        except SourceError:
            return []  # reported when it is opened again
        try:
            return [] if reader.offset else [(reader.stream, reader.skip_to_end())]
        finally:
            reader.close()

    # Finished files ------------------------------------------------------------------------------------------------

    def _finish(self, file: OpenFile, now: float, *, is_present: bool) -> None:
        """Close a missing file, or complete a rotated one, once no process writes to it."""
        stream = file.reader.stream
        if is_present and not self._should_complete(stream, is_matched=True):
            return
        if now - file.grew_at < self._rotate_wait_s or not self.files.is_at_end(file):
            return
        is_deleted = not file.reader.content.status().st_nlink
        if not is_present and not is_deleted:
            self._index.find_renamed([stream], are_open=True)
        if self._should_complete(stream, is_matched=is_present):
            outcome = self._complete_settled(stream) if stream.is_settled else "unsettled"
            if outcome in {"written", "needed"} or not stream.is_settled:
                return  # it stays open until it is deleted
            is_present &= outcome not in {"completed", "done"}
        if not is_present:
            log.info("source_closed", path=stream.shown_path, offset=file.reader.offset)
            if is_deleted:
                self._index.release_file(stream)  # another file may get its inode at once
            self.files.close(file)
            self._has_closed = True

    def _should_complete(self, stream: Stream, *, is_matched: bool) -> bool:
        """
        Return whether to delete or move a file once it is settled: only if it was rotated.

        Args:
            is_matched: A pattern matches it, so it may be in use again unless its name is that of a generation.
        """
        is_rotated = stream.is_rotated and (not is_matched or looks_like_generation(os.path.basename(stream.path)))
        return self._completion.action != "keep" and is_rotated

    def _complete(self, stream: Stream, *, is_matched: bool) -> None:
        """Delete or move a rotated file if it is settled."""
        if self._should_complete(stream, is_matched=is_matched) and stream.is_settled:
            self._complete_settled(stream)

    def _complete_settled(self, stream: Stream) -> Outcome:
        outcome = self._completion.complete(stream)
        if outcome == "completed":
            self._index.mark_gone([stream])
        return outcome

    # Lost streams -----------------------------------------------------------------------------------------------------

    def _start_search(self, streams: Iterable[Stream], now: float) -> None:
        """Search for the files of lost streams for a while: a copy may be in progress."""
        for stream in streams:
            self._search_until[stream.stream_id] = now + self._rotate_wait_s

    def _search_lost(self, present: set[FileId], now: float) -> None:
        """Search the folders of lost streams for renamed, copied or compressed files, matched or not."""
        for folder in {folder for stream in self._searched_streams() for folder in folders_of(stream)}:
            try:
                with os.scandir(folder) as entries:
                    paths = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
            except OSError:
                continue
            for path in paths:
                self._try_unmatched(path, present, now)
        lost = self._searched_streams()
        expired = [stream for stream in lost if self._search_until[stream.stream_id] <= now]
        self._unreachable_bytes += report_unreachable(self._register, expired, self._wall_time())
        self._search_until = {
            stream.stream_id: until for stream in lost if (until := self._search_until[stream.stream_id]) > now
        }
        self._index.mark_gone(stream for stream in self._index.lost() if stream.stream_id not in self._search_until)
        if not self._search_until:
            self._unrelated.clear()

    def _searched_streams(self) -> list[Stream]:
        return [stream for stream in self._index.lost() if stream.stream_id in self._search_until]

    def _try_unmatched(self, path: Path, present: set[FileId], now: float) -> None:
        """Check whether an unmatched file is a lost stream; check it again only after it has changed."""
        step()
        with suppress(OSError):
            status = path.stat()
            file_id, seen = file_id_of(status), signature_of(status)
            if file_id in present or self.files.at(file_id) or self._unrelated.get(file_id) == seen:
                return
            known = self._index.at(file_id)
            if known is not None and not self._index.is_lost(known):  # the inode of a lost stream may have been reused
                return
            if not self._open_unmatched(path, now):
                self._unrelated[file_id] = seen

    def _open_rotated(self, path: Path, now: float) -> None:
        """Open a rotated file with data that an earlier run did not settle; a copy may have overwritten it since."""
        with suppress(SourceError, OSError):  # not reported, because it is not a configured input
            try:
                reader = self._index.open_known(path, may_be_copy=True)
            except UndecidedError as undecided:
                file_id = file_id_of(path.stat())
                if undecided.original is not None and (new := self._index.open_new(path, file_id)) is not None:
                    self.files.add(OpenFile(new, file_id, str(path), now, new_since=now))
                return
            if reader is not None:
                self._follow(reader, now)

    def _open_unmatched(self, path: Path, now: float) -> bool:
        """Open an unmatched file if it belongs to a known stream with unread data; return False if it does not."""
        try:
            reader = self._index.open_known(path)
        except UndecidedError:
            return True
        except (SourceError, OSError):  # not reported, because it is not a configured input
            return False
        if reader is not None:
            self._follow(reader, now)
        return reader is not None
