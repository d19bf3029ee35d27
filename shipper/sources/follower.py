"""Finding the files that are followed, through rotation, truncation and deletion; step by step."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog

from shipper.model.errors import SourceError
from shipper.model.records import Stream, shown
from shipper.sources.completion import KEEP, Completion, Outcome
from shipper.sources.discovery import Found, Patterns, names
from shipper.sources.identity import Place, StreamBook, UndecidedError, folders_of, not_regular, note_name
from shipper.sources.open_files import OpenFile, OpenFiles, Signature, signature
from shipper.sources.reader import StreamReader
from shipper.sources.register import StreamRegister, forget_oldest, note_gone, tell_unreachable
from shipper.sources.siblings import Siblings, looks_like_generation, sibling_of
from shipper.system.work import Piece, at_work, step

log = structlog.get_logger("sources")

_COPYING_WAITS: Final = 10  # times rotate_wait_s: a copy may take so long to be made
_TOLD: Final = 10  # files that cannot be read, by name
_QUIET_S: Final = 60.0  # a settled file that has not changed for so long need not be opened to be sure of it


class _Refused(NamedTuple):
    """A name that matches, and cannot be opened; `is_input`: it should be."""

    words: str
    is_input: bool


class Follower:
    """
    Finds files and follows them wherever they go. All calls block; `now` is of any clock that does not go backwards.

    A file that was renamed or deleted stays open until its end was seen and it has not grown for `rotate_wait_s`, as
    its writer may still have it open.

    Args:
        start: Where a file begins that is there when a pattern is used for the first time.
        max_open: Most files to hold open, renamed ones aside. Beyond it, the one that has been quiet longest is closed
            until it changes.
        wall_time: Seconds since the epoch.

    Attributes:
        files: Those that are open; what is new in them is read there.
        is_crowded: Whether files wait for others to be read to their end.
        lag_bytes: Known to exist and not settled, as of the last look.
        unreachable_bytes: Known to be unread in files that turned out to be gone.
        has_looked: Whether there was a look at all names of the patterns of now.
        unmatched, unreadable: Which patterns have no file, and which files cannot be read, in words.
    """

    def __init__(
        self,
        patterns: Patterns,
        book: StreamBook,
        register: StreamRegister,
        *,
        rotate_wait_s: float,
        wall_time: Callable[[], float],
        start: Literal["beginning", "end"] = "beginning",
        completion: Completion = KEEP,
        max_open: int = 512,
    ) -> None:
        self._patterns = patterns
        self._book = book
        self._register = register
        self._rotate_wait_s = rotate_wait_s
        self._start = start
        self._completion = completion
        self._siblings = Siblings(patterns)
        self._followed_since: dict[str, float] = {}  # the patterns that were used before this look
        self._beside: set[Place] = set()  # of files that no pattern names, and that are still to be told from copies
        self._unknown: dict[str, float | None] = {}  # since when names are there that nobody knows; None = told
        self._wall_time = wall_time
        self.files = OpenFiles(book, max_open=max_open, rotate_wait_s=rotate_wait_s, wall_time=wall_time)
        self._asleep: dict[Place, Signature] = {}  # of files that are at their end and closed
        self._sought: dict[int, float] = {}  # streams without a place, and how long they are looked for
        self._others: dict[Place, Signature] = {}  # of files that are none of those
        self._refused: dict[Path, _Refused] = {}
        self._matched: set[str] = set()  # patterns that have had a file
        self._dropped: set[int] = set()  # streams that no pattern names any more, since the settings were read again
        self._is_first_look = True
        self._looked_at: float | None = None  # at all names, seconds since the epoch; before that, the look before
        self._finding_at = 0.0
        self._has_left = False  # a file was closed as it had gone
        self._has_new_patterns = True
        self.is_crowded = False
        self.lag_bytes = 0
        self.unreachable_bytes = 0
        self.has_looked = False
        self.unmatched: list[str] = []
        self.unreadable: list[str] = []

    def __repr__(self) -> str:
        return f"<Follower {self.files!r}>"

    # Names --------------------------------------------------------------------------------------------------------

    def replace_patterns(self, patterns: Patterns) -> None:
        """Look for other names from now on."""
        self._patterns = patterns
        self._siblings = Siblings(patterns)
        self._has_new_patterns = True
        self.has_looked = False

    def find(self) -> list[Found]:
        """Look at all names."""
        self._finding_at = self._wall_time()
        return list(self._patterns.find())

    def look(self, found: Sequence[Found], now: float) -> None:
        """Open what is new among what was found, note what was renamed, close and complete what is done with."""
        with at_work(Piece("find", ", ".join(self._patterns.include))):
            self._look(found, now)

    def _look(self, found: Sequence[Found], now: float) -> None:
        self.is_crowded = False
        self.files.begin_look()
        if self._has_new_patterns:
            self._followed_since = self._register.started_patterns()
        found = [*found, *self._find_beside(found, now)]
        present = {each.place for each in found}
        if self._has_new_patterns and not self._is_first_look:
            self._close_unnamed(present)
        unknown = [each for each in found if not self._look_at_known(each, now)]
        is_new = any(file.new_since is not None for file in self.files)
        if unknown or is_new:
            self.files.note_truncations(now)
        self._seek(self._book.take_displaced(), now)
        has_left = self._has_left or not self._asleep.keys() <= present
        if unknown or is_new or self._sought or self._has_new_patterns or has_left:
            self._identify(unknown, present, now)
        self._has_left = False
        self._asleep = {place: seen for place, seen in self._asleep.items() if place in present}
        if self._refused:
            named = {each.path for each in found}
            self._refused = {path: error for path, error in self._refused.items() if path in named}
        for file in self.files:
            is_present = file.place in present
            if not is_present or file.reader.content.compression:
                self.files.check(file, now)
            self._leave(file, now, is_present=is_present)
        self.note()
        self.lag_bytes = self._lag_bytes(found, present)
        self._looked_at = self._finding_at
        self._note_troubles()
        self._is_first_look = self._has_new_patterns = False

    def _note_troubles(self) -> None:
        """Put into words what keeps inputs from being read; replaced as a whole, as another thread reads it."""
        unmatched = self._patterns.unmatched()
        self._matched.update(self._patterns.matches.keys() - unmatched.keys())
        # Where files are taken away once they are delivered, it is as it should be that none is left.
        is_emptied = self._completion.action != "keep"
        self.unmatched = [words for name, words in unmatched.items() if not (is_emptied and name in self._matched)]
        self.unreadable = [each.words for each in self._refused.values() if each.is_input]
        self.unreadable += [file.trouble for file in self.files if file.trouble]
        if not self.has_looked:
            self.has_looked = True
            tell = log.warning if self.unmatched or self.unreadable else log.info
            patterns = {shown(name): count for name, count in self._patterns.matches.items()}
            notes = {"unmatched": self.unmatched, "unreadable": self.unreadable[:_TOLD]}
            tell("inputs_found", patterns=patterns, **{name: each for name, each in notes.items() if each})

    def _close_unnamed(self, present: set[Place]) -> None:
        """Close the files that are where they were, but which no pattern names any more."""
        for file in self.files:
            if file.place in present or file.reader.stream.is_rotated or not _is_at(file.reader.path, file.place):
                continue
            log.info("source_dropped", path=shown(file.reader.path), offset=file.reader.offset)
            if file.new_since is not None:
                self._book.drop(file.reader.stream)  # nothing was read of it, and it may be a copy
            else:
                self._dropped.add(file.reader.stream.stream_id)
            self.files.close(file)

    def _find_beside(self, found: Sequence[Found], now: float) -> list[Found]:
        """Find what rotation has made of followed files unseen; until each is known, it is as if a pattern named it."""
        names = [each.name for each in found]
        if self._is_first_look:
            names += self._book.known_paths()
        beside = self._siblings.find(names, self._followed_since, self._finding_at)
        generations = [each.found for each in beside if each.is_generation and self._is_undecided(each.found)]
        # One that has just gone again is still to be told from a copy.
        held = {file.place for file in self.files if file.new_since is not None}
        self._beside = {each.place for each in generations} | (self._beside & held)
        self._log_unknown({each.found.name for each in beside if not each.is_generation}, now)
        return generations

    def _is_undecided(self, found: Found) -> bool:
        file = self.files.at(found.place)
        if file is not None:
            return file.new_since is not None
        stream = self._book.at(found.place)  # of another name, it may have left its inode to this file
        return stream is None or stream.path != found.name

    def _log_unknown(self, names: set[str], now: float) -> None:
        """Log once each file that has been next to followed files for a while and is no generation of them."""
        self._unknown = {name: self._unknown.get(name, now) for name in names}
        for name, since in self._unknown.items():
            if since is not None and now - since >= self._rotate_wait_s:
                log.warning("source_beside_unread", path=shown(name), hint="name it in input.include or input.exclude")
                self._unknown[name] = None

    def _is_generation(self, path: str) -> bool:
        folder, name = os.path.split(path)
        sibling = sibling_of(name, lambda each: self._patterns.naming(os.path.join(folder, each)) is not None)
        return sibling is not None and sibling.is_generation

    def _lag_bytes(self, found: Sequence[Found], present: set[Place]) -> int:
        lag = 0
        for each in {each.place: each for each in found}.values():
            stream = self._book.at(each.place)
            if stream is None:
                lag += each.status.st_size
            else:
                is_size_known = stream.compression or not self._book.has_changed(stream, each.status)
                lag += max(0, (stream.size if is_size_known else each.status.st_size) - stream.checkpoint)
        gone = (file.reader.stream for file in self.files if file.place not in present)
        return lag + sum(max(0, stream.size - stream.checkpoint) for stream in gone)

    def note(self, *, is_last: bool = False) -> None:
        """
        Have remembered what the checkpoints do not say: other places, and what is there and not settled yet.

        Args:
            is_last: Also up to when those are settled that have not changed since.
        """
        streams = {stream.stream_id: stream for stream in self._book.take_moved()}
        for file in self.files:
            stream = file.reader.stream
            if is_last and not file.is_ready:
                file.note_unchanged()
            if file.is_to_note or (stream.size != file.noted_size and not stream.is_settled):
                streams[stream.stream_id] = stream
            file.noted_size, file.is_to_note = stream.size, False
        if streams:
            self._register.note(streams.values(), self._wall_time())

    def _identify(self, unknown: list[Found], present: set[Place], now: float) -> None:
        """Find out which files are new, and which are streams that were known under other names or in other places."""
        absent = self._book.lose(present, [file.reader.stream for file in self.files])
        for stream in absent.renamed:
            if stream.stream_id in self._dropped:
                continue
            if not self._open_stray(Path(stream.path), now):
                self._complete(stream, is_named=False)
        if self._is_first_look:
            for stream in self._book.left(present, self._is_generation):
                self._open_stray(Path(stream.path), now)
            self._seek(absent.lost, now)
        if self._has_new_patterns:
            self._begin_at_ends(unknown)
        forget_oldest(self._register, self._book, absent.lost)
        for each in unknown:
            self._try(each, now, self._open_in_place if self._book.at(each.place) else self._open_new)
        new = [file for file in self.files if file.new_since is not None]
        # An original goes before what is made of it, so that it is the copy that waits.
        for file in sorted(new, key=lambda each: (each.place in present, bool(each.reader.content.compression))):
            self._decide(file, now, is_present=file.place in present)
        self._find_strays(present, now)

    def _look_at_known(self, found: Found, now: float) -> bool:
        """Deal with a file in the place of a stream; False if it is none, or has taken the place."""
        file = self.files.at(found.place)
        if file is not None:
            self._note_name(file, found)
            if file.new_since is None and file.has_changed(found.status):
                self.files.wake(file)
            elif file.new_since is None and not file.is_ready:
                file.unchanged_at = self._finding_at
            return True
        stream = self._book.at(found.place)
        if stream is None:
            return False
        seen = signature(found.status)
        if found.place not in self._asleep and self._is_old_news(stream, found):
            self._asleep[found.place] = seen
        if self._asleep.get(found.place) == seen:
            self._complete(stream, is_named=True)
        else:
            was_asleep = found.place in self._asleep
            self._try(found, now, self._open_in_place)
            if was_asleep and (opened := self.files.at(found.place)) is not None:
                opened.unchanged_at = self._looked_at
        return self._book.at(found.place) is not None

    def _is_old_news(self, stream: Stream, found: Found) -> bool:
        """Return whether an earlier run has settled a file, so that it need not be opened; there may be thousands."""
        is_quiet = self._wall_time() - found.status.st_mtime > _QUIET_S
        return is_quiet and stream.path == str(found.path) and not self._book.has_news(stream, found.status)

    def _note_name(self, file: OpenFile, found: Found) -> None:
        reader = file.reader
        if found.name != file.name and not _is_at(reader.path, found.place):
            log.info("source_renamed", path=shown(found.path), formerly=shown(reader.path))
            file.name = found.name
            reader.path = found.path
            note_name(reader.stream, found.name)

    def _try(self, found: Found, now: float, action: Callable[[Found, float], None]) -> None:
        """Open a file in some way; tell once why that cannot be done."""
        try:
            if not stat.S_ISREG(found.status.st_mode):
                raise not_regular(found.path)
            with self._book.opening(found.name, found.place):
                action(found, now)
            self._refused.pop(found.path, None)
        except FileNotFoundError:
            return
        except (SourceError, OSError) as error:
            # What is no file is an input only by its own name: a wildcard may well meet a socket.
            refused = _Refused(shown(str(error)), stat.S_ISREG(found.status.st_mode) or found.name == found.pattern)
            if self._refused.get(found.path) != refused:
                log.warning("source_refused", path=shown(found.path), error=refused.words)
                self._refused[found.path] = refused

    def _open_in_place(self, found: Found, now: float) -> None:
        if self._has_room(found):
            reader = self._book.open_in_place(found.path)
            if reader is not None:
                self._dropped.discard(reader.stream.stream_id)
                self._follow(reader, now)

    def _open_new(self, found: Found, now: float) -> None:
        """Keep a file open until it can be identified; an empty one cannot yet."""
        if self._has_room(found):
            reader = self._book.open_new(found.path)
            self.files.add(OpenFile(reader, reader.stream.place, found.name, now, new_since=now))

    def _decide(self, file: OpenFile, now: float, *, is_present: bool) -> None:
        """Begin to read a file that may be a copy of another input, once that can be told."""
        status = file.reader.content.status()
        if file.new_since is None or not status.st_size:
            file.new_since = now
            return
        file.note_change(status, now)
        try:
            try:
                reader = self._book.decide(file.reader, may_wait=True)
            except UndecidedError as undecided:
                if self._is_leaving(undecided.original) or (is_present and self._may_be_a_copy(file, undecided, now)):
                    return
                if file.place in self._beside and self._is_copy(undecided.original, file) is not False:
                    return
                reader = self._book.decide(file.reader, may_wait=False)
        except SourceError:
            reader = file.reader  # reported again when it is read
        except OSError as error:  # such as no descriptor left; decided at the next look
            file.note_trouble(error)
            return
        file.new_since = file.signature = None
        file.reader = reader
        self.files.wake(file)
        self._log_opened(reader)

    def _is_copy(self, original: Stream | None, file: OpenFile) -> bool | None:
        """Release a file that no pattern names if its original is in place and contains all of it; None = later."""
        compared_before = sum(file.compared.values())
        is_copy = original is not None and self._book.holds_all_of(original, file.reader.content, file.compared)
        self.is_crowded |= sum(file.compared.values()) > compared_before  # the rest comes at the next look, soon
        if original is None or not is_copy:
            return is_copy
        reader = self._book.decide(file.reader, may_wait=False)
        self._register.begin([(reader.stream, reader.skip_to_end())], [], self._wall_time())
        file.reader = reader
        log.info("source_is_copy", path=shown(reader.path), of=original.shown_path)
        self.files.close(file)
        return True

    def _is_leaving(self, original: Stream | None) -> bool:
        """Return whether a file is only read to its end, so that a lookalike will turn out to be the same file."""
        file = self.files.at(original.place) if original is not None else None
        if file is None or file.reader.stream is not original:
            return False
        return not file.reader.content.status().st_nlink or not file.reader.is_intact()

    def _may_be_a_copy(self, file: OpenFile, undecided: UndecidedError, now: float) -> bool:
        """Return whether to wait until a file that looks like another one can be told from it."""
        assert file.new_since is not None
        waited_s = now - file.new_since
        if undecided.is_shorter:  # one that does not grow any more is not being made
            return now - file.grew_at < self._rotate_wait_s and waited_s < _COPYING_WAITS * self._rotate_wait_s
        return waited_s < self._rotate_wait_s

    def _has_room(self, found: Found) -> bool:
        """Return whether one more file may be opened; if not, this file comes first at the next look."""
        if self.files.is_full:
            closed = self.files.close_quietest()
            if closed is None:
                self.is_crowded = True  # all of them are being read
                return False
            assert closed.signature is not None
            self._asleep[closed.place] = closed.signature
        self._asleep.pop(found.place, None)
        return True

    def _follow(self, reader: StreamReader, now: float) -> None:
        place = reader.stream.place
        if self.files.at(place):  # between the look at the name and its opening another file was put there
            reader.close()
            return
        file = OpenFile(reader, place, str(reader.path), now)
        self.files.add(file)
        self.files.wake(file)
        self._log_opened(reader)

    def _log_opened(self, reader: StreamReader) -> None:
        log.info("source_opened", path=shown(reader.path), offset=reader.offset, size=reader.content.status().st_size)

    def _leave(self, file: OpenFile, now: float, *, is_present: bool) -> None:
        """Close a file that has gone, and complete one that was rotated away, once nobody writes to it any more."""
        stream = file.reader.stream
        if is_present and not self._is_to_complete(stream, is_named=True):
            return
        if now - file.grew_at < self._rotate_wait_s or not file.is_at_its_end:
            return
        if not is_present and file.reader.content.status().st_nlink:
            self._book.find_renamed([stream], are_open=True)
        if self._is_to_complete(stream, is_named=is_present):
            outcome = self._complete_settled(stream) if stream.is_settled else "unsettled"
            if outcome in {"written", "needed"} or not stream.is_settled:
                return  # it stays open until it goes
            is_present &= outcome not in {"put_away", "done"}
        if not is_present:
            log.info("source_closed", path=stream.shown_path, offset=file.reader.offset)
            self.files.close(file)
            self._has_left = True

    def _is_to_complete(self, stream: Stream, *, is_named: bool) -> bool:
        """
        Return whether a file is to be put away once it is settled: it was seen to leave its name in a rotation.

        Args:
            is_named: A pattern names it: so it may be live again, unless its name is one that rotation gives.
        """
        is_rotated = stream.is_rotated and (not is_named or looks_like_generation(os.path.basename(stream.path)))
        return self._completion.action != "keep" and is_rotated

    def _complete(self, stream: Stream, *, is_named: bool) -> None:
        """Delete or move a file that is to be put away, if it is settled."""
        if self._is_to_complete(stream, is_named=is_named) and stream.is_settled:
            self._complete_settled(stream)

    def _complete_settled(self, stream: Stream) -> Outcome:
        outcome = self._completion.complete(stream)
        if outcome == "put_away":
            note_gone(self._register, [stream], self._wall_time())
        return outcome

    def _begin_at_ends(self, unknown: list[Found]) -> None:
        """Save where files begin that were there before their pattern; what comes later begins at its beginning."""
        started = self._register.started_patterns()
        new_patterns = [pattern for pattern in self._patterns.include if pattern not in started]
        begun = []
        if self._start == "end" and new_patterns:
            known_names = {name for pattern in started for name in names(pattern)}
            for found in unknown:
                if found.pattern in new_patterns and str(found.path) not in known_names:
                    begun += self._begun_at_end(found)
        self._register.begin(begun, new_patterns, self._wall_time())
        self._followed_since = self._register.started_patterns()

    def _begun_at_end(self, found: Found) -> list[tuple[Stream, bytes]]:
        if not stat.S_ISREG(found.status.st_mode) or not found.status.st_size:
            return []
        try:
            reader = self._book.open(found.path)
        except SourceError:
            return []  # told when its turn comes
        try:
            return [] if reader.offset else [(reader.stream, reader.skip_to_end())]
        finally:
            reader.close()

    # Streams that have lost their place ---------------------------------------------------------------------------

    def _seek(self, streams: Iterable[Stream], now: float) -> None:
        """Look for the rest of streams that have lost their place, for a while: a copy may still be being made."""
        for stream in streams:
            self._sought[stream.stream_id] = now + self._rotate_wait_s

    def _find_strays(self, present: set[Place], now: float) -> None:
        """Look for lost streams beside where they were, whatever the patterns say: renamed, copied, compressed."""
        lost = [stream for stream in self._book.lost() if stream.stream_id in self._sought]
        for folder in {folder for stream in lost for folder in folders_of(stream)}:
            try:
                with os.scandir(folder) as entries:
                    strays = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
            except OSError:
                continue
            for path in strays:
                self._try_stray(path, present, now)
        lost = [stream for stream in self._book.lost() if stream.stream_id in self._sought]
        given_up = [stream for stream in lost if self._sought[stream.stream_id] <= now]
        self.unreachable_bytes += tell_unreachable(self._register, given_up, self._wall_time())
        still = {stream.stream_id for stream in lost} - {stream.stream_id for stream in given_up}
        self._sought = {stream_id: until for stream_id, until in self._sought.items() if stream_id in still}
        gone = [stream for stream in self._book.lost() if stream.stream_id not in still]
        note_gone(self._register, gone, self._wall_time())
        if not self._sought:
            self._others.clear()

    def _try_stray(self, path: Path, present: set[Place], now: float) -> None:
        """Look once, until it changes, whether a file that no pattern names is a stream that is sought."""
        step()
        with suppress(OSError):
            status = path.stat()
            place, seen = (status.st_dev, status.st_ino), signature(status)
            if place in present or self.files.at(place) or self._others.get(place) == seen:
                return
            known = self._book.at(place)
            if known is not None and not self._book.is_lost(known):  # a lost one may have left its inode to this file
                return
            if not self._open_stray(path, now):
                self._others[place] = seen

    def _open_stray(self, path: Path, now: float) -> bool:
        """Open a file that no pattern names if it is a stream with something unread; False if it is none."""
        try:
            reader = self._book.open_known(path)
        except UndecidedError:
            return True
        except (SourceError, OSError):  # nobody has named it, so nobody has to be told
            return False
        if reader is not None:
            self._follow(reader, now)
        return reader is not None


def _is_at(path: Path, place: Place) -> bool:
    """Return whether a name still points at a file: a hard link is no rename."""
    try:
        there = path.stat()
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == place
