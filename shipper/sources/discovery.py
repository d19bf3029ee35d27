"""Finds input files by name, glob or folder."""

from __future__ import annotations

import glob
import os
import re
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
from shipper.system.permissions import access_problem, can_access, link_problem
from shipper.system.work import Stage, WorkItem, at_work, step

_LISTED_MAX: Final = 10_000
_EXAMPLES: Final = 2
_ESCAPED: Final = re.compile(r"\[([*?[])\]")

FileId = tuple[int, int]  # device and inode
Signature = tuple[int, int]  # size and modification time in ns; an unchanged file keeps both
SkipReason = Callable[[Stage, str, int], str]  # takes an input and an offset; returns why it is skipped, or ""


def file_id_of(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def signature_of(status: os.stat_result) -> Signature:
    return status.st_size, status.st_mtime_ns


def never_skip(stage: Stage, source: str, offset: int = 0) -> str:
    """A `SkipReason` that skips nothing."""
    return ""


class FoundFile(NamedTuple):
    """A file, or anything else except a folder that can be listed, and the pattern that matches its name."""

    name: str
    status: os.stat_result
    pattern: str

    @property
    def path(self) -> Path:
        return Path(self.name)

    @property
    def file_id(self) -> FileId:
        return file_id_of(self.status)

    @property
    def is_special(self) -> bool:
        """Whether this is a pipe, a socket or a device; a folder may hide inputs."""
        return not (stat.S_ISREG(self.status.st_mode) or stat.S_ISDIR(self.status.st_mode))


class WatchedFolders(NamedTuple):
    """The folders to watch for changes."""

    folders: list[Path]
    is_recursive: bool  # including subfolders
    unwatchable: list[Path]  # contain a name that is not UTF-8, which would end the watch of all folders


class Patterns:
    """
    File names, globs (`**` matches any depth) and folders.

    Args:
        state_directory: Its files are never an input, whatever name or link leads to them.
        skip_reason: Patterns with a reason are not expanded.

    Attributes:
        matches: Number of files that each pattern matched at the last scan, even if another pattern matched them, too.
    """

    def __init__(
        self,
        include: Iterable[str],
        *,
        state_directory: Path,
        exclude: Sequence[str] = (),
        folder: str = "",
        skip_reason: SkipReason = never_skip,
    ) -> None:
        patterns = [absolute(pattern, folder) for pattern in include]
        reasons = {pattern: skip_reason("find", pattern, 0) for pattern in patterns}
        self._skipped = {pattern: f"looking for {shown(pattern)} {why}" for pattern, why in reasons.items() if why}
        self.include = tuple(pattern for pattern in patterns if not reasons[pattern])
        self._skip_reason = skip_reason
        self._exclude = tuple(absolute(pattern, folder) for pattern in exclude)
        self._state_directory = state_directory
        self.matches: dict[str, int] = {}
        self._had_excluded: set[str] = set()  # patterns with an excluded match

    def replace(self, include: Iterable[str], exclude: Sequence[str]) -> Patterns:
        """Return new patterns with the same state directory."""
        return Patterns(include, exclude=exclude, state_directory=self._state_directory, skip_reason=self._skip_reason)

    def find(self) -> Iterator[FoundFile]:
        """Find the files that exist now, each name once, then folders that wildcards match but cannot list."""
        own = _OwnFiles(self._state_directory)
        excluded = {path for pattern in self._exclude for path in expand_glob(pattern)}
        is_input = dict.fromkeys(excluded, False)
        matches, had_excluded = dict.fromkeys(self.include, 0), set[str]()
        closed: dict[str, str] = {}
        for pattern in self.include:
            with at_work(WorkItem("find", pattern, pattern)) as work:
                closed_by_pattern: set[str] = set()
                for path in expand(pattern, closed_by_pattern):
                    work.steps += 1
                    if path not in is_input:
                        found = _stat(path, pattern)
                        is_input[path] = found is not None and found not in own
                        if found is not None and is_input[path]:
                            yield found
                        elif found is not None:
                            had_excluded.add(pattern)
                    matches[pattern] += is_input[path]
                    if path in excluded:
                        had_excluded.add(pattern)
                closed |= dict.fromkeys(closed_by_pattern - excluded, pattern)
        for folder, pattern in closed.items():
            with suppress(OSError):  # just deleted
                yield FoundFile(folder, os.stat(folder), pattern)
        self.matches, self._had_excluded = matches, had_excluded

    def unmatched(self) -> dict[str, str]:
        """Return a message for each pattern that has no match or is skipped."""
        empty = [pattern for pattern, count in self.matches.items() if not count]
        return self._skipped | {
            pattern: _why_unmatched(pattern, had_excluded=pattern in self._had_excluded) for pattern in empty
        }

    def matching(self, path: str) -> str | None:
        """Return the pattern that matches a path, whether or not the file exists."""
        return next((pattern for pattern in self.include if _matches(path, pattern)), None)

    def is_excluded(self, path: str) -> bool:
        """Return whether a path is excluded or in the state directory."""
        state_directory = os.path.realpath(self._state_directory) + os.sep
        is_excluded = any(_matches(path, pattern) for pattern in self._exclude)
        return is_excluded or os.path.realpath(path).startswith(state_directory)

    def watched_folders(self) -> WatchedFolders:
        """Return the folders to watch for changes. Blocks."""
        tops: dict[Path, bool] = {}
        for pattern in self.include:
            folder = fixed_folder(pattern)
            if os.path.isdir(folder):
                tops[folder] = tops.get(folder, False) or "**" in pattern or folder == Path(unescaped(pattern))
        folders: list[Path] = []
        unwatchable: list[Path] = []
        for top, is_recursive in tops.items():
            for name, below, files in os.walk(top):
                is_text = all(map(_is_text, (name, *below, *files)))
                (folders if is_text else unwatchable).append(Path(name))
                if not is_recursive:
                    break
        if unwatchable:
            return WatchedFolders(folders, False, unwatchable)
        return WatchedFolders(list(tops), any(tops.values()), [])


def _is_text(name: str) -> bool:
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


def _stat(path: str, pattern: str) -> FoundFile | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # just deleted, a dangling link, or not a valid name
        return None
    return None if stat.S_ISDIR(status.st_mode) else FoundFile(path, status, pattern)


def _why_unmatched(pattern: str, *, had_excluded: bool) -> str:
    name = unescaped(pattern)
    message = f"no file matches {shown(name) or repr(name)}"
    with suppress(OSError, ValueError):
        folder = fixed_folder(pattern)
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        is_folder = os.path.isdir(folder)
        access = os.R_OK if is_folder and _has_wildcards(pattern) else os.X_OK
        if why := access_problem(existing, access) or link_problem(Path(name)):
            return f"{message}: {shown(why)}"
        if not is_folder:
            return f"{message}: there is no folder {shown(folder)}"
        if had_excluded:
            return f"{message}: matching files are excluded by input.exclude or are shipper's own"
        if os.path.dirname(name) == str(folder):
            return f"{message}: {_other_files(folder, name)}"
    return message


def _other_files(folder: Path, pattern: str) -> str:
    """Describe the files in the folder of a pattern that matches none of them, and what to do."""
    with os.scandir(folder) as entries:
        listed = [*islice(entries, _LISTED_MAX)]
    files = [entry.name for entry in listed if entry.name[0] != "." and not entry.is_dir()]
    if not files:
        return f"{shown(folder)} has no files yet"
    wanted = os.path.basename(pattern)
    nearest = nsmallest(_EXAMPLES, files, key=lambda name: (-_common_length(name, wanted), name))
    at_least = "at least " if len(listed) == _LISTED_MAX else ""
    count = at_least + several(len(files), "other file is", "other files are")
    such_as = " such as" if len(files) > len(nearest) else ""
    names = " and ".join(shown(Path(name)) for name in nearest)
    return f"{count} in {shown(folder)},{such_as} {names}; correct the pattern, or wait until a file matches it"


def _common_length(name: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))


class _OwnFiles:
    """shipper's own files: those of the state directory, including hard links elsewhere, and its log."""

    def __init__(self, directory: Path) -> None:
        self._prefix = os.path.realpath(directory) + os.sep
        self._file_ids = {
            file_id_of(status)
            for folder, _, files in os.walk(directory)
            for status in _statuses(os.path.join(folder, name) for name in files)
        }
        # Standard output and error, if they are files.
        self._file_ids |= {file_id_of(status) for status in _statuses((1, 2)) if stat.S_ISREG(status.st_mode)}
        self._folders: dict[str, bool] = {}

    def __contains__(self, found: FoundFile) -> bool:
        if found.file_id in self._file_ids:
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
    """Make a pattern independent of the working directory."""
    if not pattern or os.path.isabs(pattern):
        return pattern
    return os.path.join(glob.escape(folder or os.getcwd()), pattern)


def unescaped(pattern: str) -> str:
    """Return the name that a pattern stands for, if it has no wildcards but escaped ones."""
    return _ESCAPED.sub(r"\1", pattern)


def _has_wildcards(pattern: str) -> bool:
    return glob.has_magic(_ESCAPED.sub("", pattern))


def _matches(path: str, pattern: str) -> bool:
    name = unescaped(pattern)
    if path == name or (name and path.startswith(name.rstrip(os.sep) + os.sep) and os.path.isdir(name)):
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


def expand(pattern: str, closed: set[str] | None = None) -> list[str]:
    """
    Expand a pattern; return a name without wildcards even if no such file exists. `closed` is as for `expand_glob`.

    A name with wildcards is also a pattern: a shell that redirects to `*.log` may have created such a file.
    """
    name = unescaped(pattern)
    paths = {*expand_glob(pattern, closed)} if _has_wildcards(pattern) else set[str]()
    if os.path.isdir(name):
        paths.update(expand_glob(os.path.join(glob.escape(name), "**"), closed))
    elif not _has_wildcards(pattern) or os.path.exists(name):
        paths.add(name)
    return sorted(paths)


def expand_glob(pattern: str, closed: set[str] | None = None) -> Iterator[str]:
    """
    Expand as `glob` does, but enter each folder once per `**`: links to parent folders would multiply the paths.

    Args:
        closed: Receives the folders that wildcards match but that this process may not list or enter.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        if closed is not None and glob.has_magic(os.path.dirname(pattern)):
            folders = (folder.rstrip(os.sep) for folder in glob.iglob(os.path.join(os.path.dirname(pattern), "")))
            closed.update(folder for folder in folders if not can_access(folder, os.R_OK | os.X_OK))
        yield from glob.iglob(pattern)
        return
    index = parts.index("**")
    top, rest = os.sep.join([*parts[:index], ""]), os.sep.join(dropwhile("**".__eq__, parts[index:])) or "*"
    for folder in _folders_below(glob.iglob(top) if glob.has_magic(top) else [top], closed):
        yield from expand_glob(os.path.join(glob.escape(folder), rest), closed)


def _folders_below(tops: Iterable[str], closed: set[str] | None) -> Iterator[str]:
    """Yield these folders and all below, each once; follow links only to folders that are not reached otherwise."""
    entered: set[FileId] = set()
    queue, linked = deque(tops), deque[str]()
    while queue or linked:
        step()
        folder = (queue or linked).popleft()
        if closed is not None and os.path.isdir(folder) and not can_access(folder, os.R_OK | os.X_OK):
            closed.add(folder.rstrip(os.sep))
        with suppress(OSError, ValueError):  # just deleted, cannot be listed, or not a valid name
            file_id = file_id_of(os.stat(folder or os.curdir))
            if file_id in entered:
                continue
            entered.add(file_id)
            with os.scandir(folder or os.curdir) as entries:
                subfolders = sorted((entry for entry in entries if _is_entered(entry)), key=lambda entry: entry.name)
            for entry in subfolders:
                (linked if entry.is_symlink() else queue).append(os.path.join(folder, entry.name))
            yield folder


def _is_entered(entry: os.DirEntry[str]) -> bool:
    """Return whether `**` enters a folder."""
    try:
        return not entry.name.startswith(".") and entry.is_dir()
    except OSError:  # a link to itself
        return False


def fixed_folder(pattern: str) -> Path:
    """Return the deepest folder of a pattern that is named without wildcards."""
    folder = pattern if os.path.isdir(unescaped(pattern)) else os.path.dirname(pattern)
    while _has_wildcards(folder):
        folder = os.path.dirname(folder)
    return Path(unescaped(folder))
