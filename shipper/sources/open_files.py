"""The followed files that are open, and how new data is read from them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from shipper.model.errors import SourceError
from shipper.model.records import Chunk, shown
from shipper.sources.content import Archive
from shipper.sources.identity import Place, StreamBook
from shipper.sources.reader import READ_BYTES, TURN_STEPS, StreamReader
from shipper.system.work import Piece, at_work, go_on_with

log = structlog.get_logger("sources")

_READ_TOGETHER_BYTES: Final = 1 << 21
_SHARE_BYTES_MIN: Final = 1 << 16  # of those, for each file that has news
_BEGINNING_BYTES: Final = 1 << 20  # of the content of an archive
_BEGINNING_STEPS: Final = 128  # of decompression in a turn, 2 MiB: it is not to be deep in an archive after it
_BEGINNING_TURNS: Final = 4  # after which a beginning takes long
_FURTHER_S: Final = 10.0  # that one is read on at least before another one has its turn

# Of an archive: it grows; it has been quiet, but another member may follow; it has left the place where it grew.
Ending = Literal["open", "quiet", "final"]
_Stage = Literal["new", "long", "further"]  # of an archive: at its beginning, still there after some turns, beyond it
Signature = tuple[int, int]  # size and time of the last change, in nanoseconds: what tells that a file has changed


def signature(status: os.stat_result) -> Signature:
    """Take from a file's status what tells that it has changed."""
    return status.st_size, status.st_mtime_ns


@dataclass(eq=False)
class OpenFile:
    """
    A file that is followed.

    Attributes:
        name: Where it was found last.
        grew_at: When it was seen to have changed last.
        signature: As it was then.
        is_ready: Whether it waits for its turn to be read.
        ending: Of an archive, what was taken for sure about its end when it was read last.
        new_since: Since when it waits to be told from a copy of another input; None if it does not, or no more.
        noted_size: What was remembered of its size.
        unchanged_at: The last look, seconds since the epoch, at which nothing had come since it was read to its end.
        is_to_note: Whether up to when it is settled has to be remembered, too.
        compared: As for `StreamBook.holds_all_of`.
        unfinished_turns: How many turns of an archive have ended before their work, since one came to its end.
        trouble: Why the last attempt to read it failed, in words.
    """

    reader: StreamReader
    place: Place
    name: str
    grew_at: float
    signature: Signature | None = None
    is_ready: bool = False
    ending: Ending = "open"
    new_since: float | None = None
    noted_size: int = 0
    unchanged_at: float | None = None
    is_to_note: bool = False
    compared: dict[int, int] = field(default_factory=dict)
    unfinished_turns: int = 0
    trouble: str = ""

    def note_trouble(self, error: OSError) -> None:
        """Set why it could not be read, in words."""
        self.trouble = shown(f"{self.reader.path} cannot be read: {error.strerror}")

    def note_unchanged(self) -> None:
        """If all of it is settled, it was so at the last look, too, as nothing had come by then."""
        stream = self.reader.stream
        if self.unchanged_at is not None and stream.is_settled:
            stream.settled_until = self.unchanged_at
            self.is_to_note = True

    def has_changed(self, status: os.stat_result) -> bool:
        """Return whether it has to be read, by its status now."""
        return signature(status) != self.signature

    def note_change(self, status: os.stat_result, now: float) -> None:
        """Remember what it looks like now, if that is new."""
        if self.has_changed(status):
            self.signature, self.grew_at = signature(status), now

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left to read, also of what has come since the last look."""
        status = self.reader.content.status()
        if self.new_since is not None:
            return status.st_size == 0
        return not self.is_ready and not self.has_changed(status)


class _Archives:
    """
    Which archives are decompressed: one of each stage, or very many would take all the memory.

    So a small one waits neither for a large one to its end, nor for one whose beginning takes long, such as very many
    members in which there is nothing. Further on, that of which least was read goes first, and one that makes room is
    decompressed again from its beginning when its turn comes; so it makes room no sooner than it has read on for as
    long as that took. The chosen ones get the turns of all that wait.
    """

    def __init__(self) -> None:
        self._chosen: dict[_Stage, OpenFile] = {}
        # Of the one further on: when and where it was chosen, and since when it reads on from there.
        self._chosen_at = 0.0
        self._position = 0
        self._reads_on_since: float | None = None

    def choose(self, ready: Iterable[OpenFile], now: float) -> None:
        """Choose among the files that have news."""
        waiting: dict[_Stage, list[OpenFile]] = {"new": [], "long": [], "further": []}
        for file in ready:
            if isinstance(file.reader.content, Archive):
                waiting[_stage(file)].append(file)
        for stage, files in waiting.items():
            chosen = self._chosen.get(stage)
            if not files:
                if chosen is not None and chosen in waiting[_stage(chosen)]:
                    del self._chosen[stage]  # it has left this stage, and waits for its turn as others do
            elif chosen not in files or (stage == "further" and self._makes_room(chosen, now)):
                self._replace(files, stage, now)

    def _makes_room(self, file: OpenFile, now: float) -> bool:
        if self._reads_on_since is None and _position(file) > self._position:
            self._reads_on_since = now
        since = self._reads_on_since
        return since is not None and now >= since + max(_FURTHER_S, since - self._chosen_at)

    def _replace(self, files: list[OpenFile], stage: _Stage, now: float) -> None:
        file = files[0]
        if stage == "further":
            file = min(files, key=_position)
            self._chosen_at, self._position, self._reads_on_since = now, _position(file), None
        before, self._chosen[stage] = self._chosen.get(stage), file
        if before is not None and before not in self._chosen.values():
            before.reader.content.rest()

    def in_turn(self, file: OpenFile) -> OpenFile | None:
        """Return which archive is read in the turn of one: those that wait leave theirs to the chosen one."""
        if file in self._chosen.values():
            return file
        file.reader.content.rest()
        stage = _stage(file)
        chosen = self._chosen.get(stage)
        return chosen if chosen is not None and chosen.is_ready and _stage(chosen) == stage else None


def _stage(file: OpenFile) -> _Stage:
    if _position(file) >= _BEGINNING_BYTES:
        return "further"
    return "long" if file.unfinished_turns > _BEGINNING_TURNS else "new"


def _position(file: OpenFile) -> int:
    """Return up to where an archive was read, or was searched for the end of a line."""
    return max(file.reader.offset, file.reader.content.size())


class OpenFiles:
    """
    The open files by their places; a busy one and a quiet one take turns to be read, a chunk each.

    Args:
        book: Begins a file again that was truncated.
        max_open: How many files to hold open.
        rotate_wait_s: When an archive is called quiet.
        wall_time: Seconds since the epoch.
    """

    def __init__(
        self, book: StreamBook, *, max_open: int, rotate_wait_s: float, wall_time: Callable[[], float]
    ) -> None:
        self._book = book
        self._max_open = max_open
        self._rotate_wait_s = rotate_wait_s
        self._wall_time = wall_time
        self._files: dict[Place, OpenFile] = {}
        self._ready: deque[OpenFile] = deque()
        self._archives = _Archives()
        self._quiet: list[OpenFile] | None = None  # which may be closed for others at this look, the quietest last

    def __repr__(self) -> str:
        return f"<OpenFiles {len(self._files)}, {len(self._ready)} with news>"

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(list(self._files.values()))

    def at(self, place: Place) -> OpenFile | None:
        """Return the open file at a place."""
        return self._files.get(place)

    def add(self, file: OpenFile) -> None:
        """Add a file, even beyond the limit: a renamed one would be lost."""
        self._files[file.place] = file

    def close(self, file: OpenFile) -> None:
        """Close a file and forget it."""
        del self._files[file.place]
        file.reader.close()

    def close_all(self) -> None:
        """Close all files."""
        for file in self:
            self.close(file)
        self._ready.clear()

    # Room ---------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether one has to be closed before another is opened."""
        return len(self._files) >= self._max_open

    def begin_look(self) -> None:
        """See anew which of them are quiet."""
        self._quiet = None

    def close_quietest(self) -> OpenFile | None:
        """Close the one that has been at its end for longest, and give it; None if none is at its end."""
        if self._quiet is None:
            quiet = [file for file in self if not file.is_ready]
            self._quiet = sorted(quiet, key=lambda each: each.grew_at, reverse=True)
        while self._quiet:
            file = self._quiet.pop()
            if self._files.get(file.place) is file and file.is_at_its_end:
                file.signature = file.signature or signature(file.reader.content.status())
                self.close(file)
                return file
        return None

    # News ---------------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `read` has something to do."""
        return bool(self._ready)

    def wake(self, file: OpenFile) -> None:
        """Schedule a file to be read in its turn."""
        if not file.is_ready:
            file.is_ready = True
            self._ready.append(file)

    def touch(self, paths: Iterable[str]) -> bool:
        """Read files that are reported as changed; return False if one of them is not open, or may be a copy."""
        by_path = {str(file.reader.path): file for file in self._files.values()}
        touched = [by_path.get(path) for path in paths]
        for file in touched:
            if file is not None:
                self.wake(file)
        return all(file is not None and file.new_since is None for file in touched)

    def check_all(self, now: float) -> None:
        """Read all files that have changed, reported or not."""
        with at_work(Piece("open")):
            for file in self._files.values():
                go_on_with(Piece("open", file.name, file.reader.stream.key))
                self._check(file, now)

    def check(self, file: OpenFile, now: float) -> None:
        """Read a file if it has changed."""
        with at_work(Piece("open", file.name, file.reader.stream.key)):
            self._check(file, now)

    def _check(self, file: OpenFile, now: float) -> None:
        if file.new_since is None and (
            file.has_changed(file.reader.content.status()) or self._ending(file, now) != file.ending
        ):
            self.wake(file)

    def note_truncations(self, now: float) -> None:
        """Find out which were truncated, so that a copy of what they hold now is known for one."""
        for file in self._files.values():
            with suppress(OSError, SourceError):  # told in its turn to be read
                status = file.reader.content.status()
                if file.new_since is None and file.has_changed(status) and not file.reader.is_intact():
                    self._begin_again(file, status)
                    file.note_change(status, now)
                    self.wake(file)

    def _begin_again(self, file: OpenFile, status: os.stat_result) -> None:
        path, offset = shown(file.reader.path), file.reader.offset
        log.warning("source_truncated", path=path, offset=offset, size=status.st_size)
        file.reader = self._book.begin_again(file.reader)

    def _ending(self, file: OpenFile, now: float) -> Ending:
        if not file.reader.content.compression or now - file.grew_at < self._rotate_wait_s:
            return "open"
        has_left = file.reader.stream.is_rotated or not file.reader.content.status().st_nlink
        return "final" if has_left else "quiet"

    # Reading ------------------------------------------------------------------------------------------------------

    def read(self, now: float) -> list[Chunk]:
        """
        Read the next chunk of each file that has news, in turn, as long as they are a few MiB together.

        The more files there are, the smaller are the chunks: beside a slow service, a small file would wait for a MiB
        of each large one.
        """
        share = _READ_TOGETHER_BYTES // max(1, len(self._ready))
        length = max(_SHARE_BYTES_MIN, min(share, READ_BYTES))
        chunks: list[Chunk] = []
        read_bytes = 0
        has_chosen = False
        for _ in range(len(self._ready)):
            if read_bytes >= _READ_TOGETHER_BYTES:
                break
            file = self._ready.popleft()
            is_ready, file.is_ready = file.is_ready, False
            if not is_ready or self._files.get(file.place) is not file or file.new_since is not None:
                continue  # it has ended in the turn of another one, is closed, or it is not its turn yet
            in_turn: OpenFile | None = file
            if isinstance(file.reader.content, Archive):
                if not has_chosen:
                    self._archives.choose([file, *(each for each in self._ready if each.is_ready)], now)
                    has_chosen = True
                in_turn = self._archives.in_turn(file)
            if in_turn is not file:
                self.wake(file)
            if in_turn is None:
                continue
            chunk = self._try_to_read(in_turn, now, length)
            if chunk is not None:
                chunks.append(chunk)
                read_bytes += len(chunk.data)
            elif not in_turn.reader.is_unfinished:
                in_turn.is_ready = False
                has_chosen = False  # the next small archive need not wait for the next look at all files
        return chunks

    def _try_to_read(self, file: OpenFile, now: float, length: int) -> Chunk | None:
        """Read a chunk of a file; None at its end, or if it cannot be read for now."""
        try:
            with self._book.reading(file.reader):
                return self._read_one(file, now, length)
        except OSError as error:
            log.warning("source_unreadable", path=shown(file.reader.path), error=str(error))
            file.signature = None  # so that the next check tries again
            file.note_trouble(error)
        except SourceError as error:
            log.error("source_unreadable", path=shown(file.reader.path), error=str(error))
            file.trouble = shown(str(error))
        return None

    def _read_one(self, file: OpenFile, now: float, length: int) -> Chunk | None:
        wall_time = self._wall_time()
        status = file.reader.content.status()
        if file.has_changed(status):
            if not file.reader.is_intact():
                self._begin_again(file, status)
            else:
                file.note_unchanged()
            file.note_change(status, now)
        file.ending = self._ending(file, now)
        reader = file.reader
        reader.note_size(status, wall_time)
        steps = _BEGINNING_STEPS
        if reader.content.compression and _stage(file) == "further":
            steps, length = TURN_STEPS, READ_BYTES  # it reads on alone, and not for long
        is_final, is_quiet = file.ending == "final", file.ending != "open"
        chunk = reader.read(is_final=is_final, is_quiet=is_quiet, turn_steps=steps, length=length)
        file.trouble = ""
        file.unfinished_turns = file.unfinished_turns + 1 if reader.is_unfinished else 0
        if reader.is_unfinished:
            self.wake(file)
        elif chunk is None or (not reader.content.compression and reader.offset >= status.st_size):
            ended_before = reader.stream.ended_ns
            reader.note_end(status, wall_time)
            # The end may be found long after the last checkpoint was saved: of an archive, or before NULs.
            is_end_inside = bool(reader.content.compression) or reader.offset < status.st_size
            file.is_to_note |= is_end_inside and reader.stream.ended_ns != ended_before
        else:
            self.wake(file)
        return chunk
