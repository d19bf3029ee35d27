"""Which files there are: names, globs and folders, expanded."""

from __future__ import annotations

import glob
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from heapq import nsmallest
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Final, NamedTuple

from shipper.model.records import shown
from shipper.model.units import several
from shipper.system.permissions import obstacle
from shipper.system.work import Piece, Stage, at_work, step

_OTHERS_MAX: Final = 10_000
_OTHERS_NAMED: Final = 2

Aside = Callable[[Stage, str, int], str]  # for an input and an offset: why it stands aside, empty if it does not


def nothing_aside(stage: Stage, source: str, offset: int = 0) -> str:
    """An `Aside` where nothing is known."""
    return ""


class Found(NamedTuple):
    """
    A file, or whatever else has a name that matches.

    Attributes:
        place: Device and inode.
        pattern: What it was found by.
    """

    name: str
    place: tuple[int, int]
    status: os.stat_result
    pattern: str

    @property
    def path(self) -> Path:
        return Path(self.name)


class Watched(NamedTuple):
    """
    Which folders to watch for changes.

    Attributes:
        is_deep: With all that is below them.
        left_out: Those in which a name is not UTF-8, which would end the watch of all.
    """

    folders: list[Path]
    is_deep: bool
    left_out: list[Path]


class Patterns:
    """
    Names, globs (`**` goes down) and folders.

    Args:
        include: What to find, in this order.
        exclude: What to leave out.
        own_directory: The state directory. What shipper writes itself is never an input, by whatever name.
        folder: What relative patterns are relative to; empty = the working directory.
        aside: Which patterns are not to be looked at.

    Attributes:
        include: Without those that stand aside.
        matches: How many files each pattern gave at the last look, whether another one had given them, too.
    """

    def __init__(
        self,
        include: Iterable[str],
        *,
        own_directory: Path,
        exclude: Sequence[str] = (),
        folder: str = "",
        aside: Aside = nothing_aside,
    ) -> None:
        patterns = [absolute(pattern, folder) for pattern in include]
        why_aside = {pattern: aside("find", pattern, 0) for pattern in patterns}
        self._aside = {pattern: f"looking for {shown(pattern)} {why}" for pattern, why in why_aside.items() if why}
        self.include = tuple(pattern for pattern in patterns if not why_aside[pattern])
        self._asks_aside = aside
        self._exclude = tuple(absolute(pattern, folder) for pattern in exclude)
        self._own_directory = own_directory
        self.matches: dict[str, int] = {}
        self._left_out: set[str] = set()  # patterns of which something was

    def replaced(self, include: Iterable[str], exclude: Sequence[str]) -> Patterns:
        """Make other patterns for the same state directory."""
        return Patterns(include, exclude=exclude, own_directory=self._own_directory, aside=self._asks_aside)

    def find(self) -> Iterator[Found]:
        """Look at the files that are there now, each name once."""
        own = _Own(self._own_directory)
        excluded = {path for pattern in self._exclude for path in expanded(pattern)}
        seen = dict.fromkeys(excluded, False)
        matches, left_out = dict.fromkeys(self.include, 0), set[str]()
        for pattern in self.include:
            with at_work(Piece("find", pattern, pattern)) as piece:
                for path in names(pattern):
                    piece.steps += 1
                    if path not in seen:
                        found = _found(path, pattern)
                        seen[path] = found is not None and not own.has(found)
                        if found is not None and seen[path]:
                            yield found
                        elif found is not None:
                            left_out.add(pattern)
                    matches[pattern] += seen[path]
                    if path in excluded:
                        left_out.add(pattern)
        self.matches, self._left_out = matches, left_out

    def unmatched(self) -> dict[str, str]:
        """Return patterns without a match, or that were skipped, each with a message."""
        nothing = [pattern for pattern, count in self.matches.items() if not count]
        return self._aside | {each: _why_nothing(each, is_left_out=each in self._left_out) for each in nothing}

    def naming(self, path: str) -> str | None:
        """Return the pattern that names a path, whether a file is there or not."""
        return next((pattern for pattern in self.include if _matches(path, pattern)), None)

    def is_left_out(self, path: str) -> bool:
        """Return whether a path is excluded, or lies in the state directory."""
        own = os.path.realpath(self._own_directory) + os.sep
        is_excluded = any(_matches(path, pattern) for pattern in self._exclude)
        return is_excluded or os.path.realpath(path).startswith(own)

    def watched(self) -> Watched:
        """Choose the folders to watch for changes. Blocks."""
        folders: dict[Path, bool] = {}
        for pattern in self.include:
            folder = fixed_folder(pattern)
            if os.path.isdir(folder):
                folders[folder] = folders.get(folder, False) or "**" in pattern or folder == Path(pattern)
        watched: list[Path] = []
        left_out: list[Path] = []
        for top, is_deep in folders.items():
            for name, below, files in os.walk(top):
                is_text = all(map(_is_text, (name, *below, *files)))
                (watched if is_text else left_out).append(Path(name))
                if not is_deep:
                    break
        if left_out:
            return Watched(watched, False, left_out)
        return Watched(list(folders), any(folders.values()), [])


def _is_text(name: str) -> bool:
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


def _found(path: str, pattern: str) -> Found | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # it has just gone, is a link to nowhere, or no name at all
        return None
    return None if stat.S_ISDIR(status.st_mode) else Found(path, (status.st_dev, status.st_ino), status, pattern)


def _why_nothing(pattern: str, *, is_left_out: bool) -> str:
    words = f"no file matches {shown(pattern) or repr(pattern)}"
    with suppress(OSError, ValueError):
        folder = fixed_folder(pattern)
        there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
        is_whole = os.path.isdir(folder)
        if why := obstacle(there, os.R_OK if is_whole and glob.has_magic(pattern) else os.X_OK):
            return f"{words}: {shown(why)}"
        if not is_whole:
            return f"{words}: there is no folder {shown(folder)}"
        if is_left_out:
            return f"{words}: what would is left out, by input.exclude or as shipper's own file"
        if os.path.dirname(pattern) == str(folder):
            return f"{words}: {_others(folder, pattern)}"
    return words


def _others(folder: Path, pattern: str) -> str:
    """Return which files are beside where a pattern looks for some, and what to do."""
    with os.scandir(folder) as entries:
        some = [*islice(entries, _OTHERS_MAX)]
    found = [entry.name for entry in some if entry.name[0] != "." and not entry.is_dir()]
    if not found:
        return f"no file is in {shown(folder)} yet"
    wanted = os.path.basename(pattern)
    nearest = nsmallest(_OTHERS_NAMED, found, key=lambda name: (-_alike(name, wanted), name))
    least = "at least " if len(some) == _OTHERS_MAX else ""
    count = least + several(len(found), "other file is", "other files are")
    such_as = " such as" if len(found) > len(nearest) else ""
    names = " and ".join(shown(Path(name)) for name in nearest)
    return f"{count} in {shown(folder)},{such_as} {names}; correct the pattern, or wait until a file matches it"


def _alike(name: str, wanted: str) -> int:
    """Return how many characters two names begin with are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, wanted, strict=False)))


class _Own:
    """What shipper writes itself: its state directory, also what is linked to from elsewhere, and its own log."""

    def __init__(self, directory: Path) -> None:
        self._prefix = os.path.realpath(directory) + os.sep
        self._places = {
            (status.st_dev, status.st_ino)
            for folder, _, files in os.walk(directory)
            for status in _statuses(os.path.join(folder, name) for name in files)
        }
        # Standard output and error, if they are kept in files.
        self._places |= {(status.st_dev, status.st_ino) for status in _statuses((1, 2)) if stat.S_ISREG(status.st_mode)}
        self._folders: dict[str, bool] = {}

    def has(self, found: Found) -> bool:
        if found.place in self._places:
            return True
        folder = os.path.dirname(found.name)
        if folder not in self._folders:
            self._folders[folder] = (os.path.realpath(folder) + os.sep).startswith(self._prefix)
        return self._folders[folder]


def _statuses(files: Iterable[str | int]) -> Iterator[os.stat_result]:
    for file in files:
        with suppress(OSError):
            yield os.stat(file)


def absolute(pattern: str, folder: str) -> str:
    """Make a pattern one that means the same in any working directory."""
    if not pattern or os.path.isabs(pattern):
        return pattern
    folder = folder or os.getcwd()
    return os.path.join(glob.escape(folder) if glob.has_magic(pattern) else folder, pattern)


def _matches(path: str, pattern: str) -> bool:
    if path == pattern or (pattern and path.startswith(pattern.rstrip(os.sep) + os.sep) and os.path.isdir(pattern)):
        return True
    return glob.has_magic(pattern) and _parts_match(path.split(os.sep), pattern.split(os.sep))


def _parts_match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], patterns[0]) and _parts_match(parts[1:], patterns[1:])


def names(pattern: str) -> list[str]:
    """Expand a pattern; a name without wildcards is given back even if nothing is there."""
    if os.path.isdir(pattern):
        return sorted({*expanded(os.path.join(glob.escape(pattern), "**"))})
    if glob.has_magic(pattern) and not os.path.exists(pattern):
        return sorted({*expanded(pattern)})
    return [pattern]


def expanded(pattern: str) -> Iterator[str]:
    """Expand as `glob` does, but enter no folder twice for one `**`: links that lead upwards multiply their ways."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    top, rest = os.sep.join([*parts[:at], ""]), os.sep.join(dropwhile("**".__eq__, parts[at:])) or "*"
    for folder in _folders_below(glob.iglob(top) if glob.has_magic(top) else [top]):
        yield from expanded(os.path.join(glob.escape(folder), rest))


def _folders_below(tops: Iterable[str]) -> Iterator[str]:
    """Find these folders and those below, each once; by links only what is not there without."""
    entered: set[tuple[int, int]] = set()
    waiting, linked = deque(tops), deque[str]()
    while waiting or linked:
        step()
        folder = (waiting or linked).popleft()
        with suppress(OSError, ValueError):  # it has just gone, must not be looked into, or is no name at all
            status = os.stat(folder or os.curdir)
            place = status.st_dev, status.st_ino
            if place in entered:
                continue
            entered.add(place)
            with os.scandir(folder or os.curdir) as entries:
                below = sorted((each for each in entries if _is_open(each)), key=lambda each: each.name)
            for entry in below:
                (linked if entry.is_symlink() else waiting).append(os.path.join(folder, entry.name))
            yield folder


def _is_open(entry: os.DirEntry[str]) -> bool:
    """Return whether `**` enters it."""
    try:
        return not entry.name.startswith(".") and entry.is_dir()
    except OSError:  # a link to itself
        return False


def fixed_folder(pattern: str) -> Path:
    """Return the deepest folder that a pattern names without wildcards."""
    folder = pattern if os.path.isdir(pattern) else os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return Path(folder)
