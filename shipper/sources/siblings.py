"""
Finds siblings of the files that patterns match: generations rotated between two scans, and unknown files.

Rotation appends to the name of a file: `app.log.1`, `app.log-20261101.gz`. Log writers of the daemontools family rename
`current` to a time.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from shipper.sources.discovery import FoundFile, Patterns, unescaped
from shipper.system.work import step

_CLOCK_STEP_S: Final = 2.0  # the coarsest modification time of a file system
_SEPARATOR: Final = re.compile(r"[.-]")
# Numbers, dates and times in the formats of log rotators, and the suffixes of compressed files.
_NUMBER: Final = r"[.-]\d+(?:[-_.:T]\d+)*"
_COMPRESSED: Final = r"(?:\.(?:gz|zst|bz2|xz))?"
_SUFFIX: Final = re.compile(f"(?:{_NUMBER})?{_COMPRESSED}")
_LAST: Final = re.compile(f"{_NUMBER}(?P<extension>\\.[A-Za-z]\\w*)??{_COMPRESSED}")
_TAI64N: Final = re.compile(r"@[0-9a-f]{24}\.[su]")  # what `current` is renamed to by multilog, svlogd and s6-log


class Siblings:
    """
    Finds `NAME.*`, `NAME-*`, names with a number before the extension, and `@TIME.s`, beside matched files.

    It lists a folder only if it has changed. A file created and rotated between two scans, or while shipper is stopped,
    is never seen as `NAME`.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._folders = {unescaped(os.path.dirname(pattern)) for pattern in patterns.include}
        self._matched: set[str] = set()
        # By folder: its modification time, and path, pattern and is_generation of each sibling.
        self._listed: dict[str, tuple[int, list[tuple[str, str, bool]]]] = {}

    def find(
        self, matched: Iterable[str], since: Mapping[str, float], now_s: float
    ) -> tuple[list[FoundFile], list[FoundFile]]:
        """
        Find siblings written since their pattern was first used, with the pattern of the original name.

        Args:
            matched: The names that the patterns match now, or matched before.
            since: When each pattern was first used, seconds since the epoch; patterns not in it are skipped.
        Returns:
            Generations, which contain records of the same application; and unknown files.
        """
        new = set(matched) - self._matched
        self._matched |= new
        self._folders.update(map(os.path.dirname, new))
        generations: list[FoundFile] = []
        unknown: list[FoundFile] = []
        for folder in sorted(self._folders):
            for path, pattern, is_generation in self._list(folder, now_s):
                step()
                if pattern in since and (status := _status_if_written(path, since[pattern], now_s)):
                    (generations if is_generation else unknown).append(FoundFile(path, status, pattern))
        return generations, unknown

    def _list(self, folder: str, now_s: float) -> list[tuple[str, str, bool]]:
        try:
            changed_ns = os.stat(folder or ".").st_mtime_ns
            previous = self._listed.get(folder)
            if previous is not None and previous[0] == changed_ns:
                return previous[1]
            siblings = [sibling for name in os.listdir(folder or ".") if (sibling := self._sibling(folder, name))]
        except (OSError, ValueError):
            return []
        # A folder that changed just now may change again without a new modification time.
        self._listed[folder] = (changed_ns if now_s - changed_ns / 1e9 > _CLOCK_STEP_S else -1, siblings)
        return siblings

    def _sibling(self, folder: str, name: str) -> tuple[str, str, bool] | None:
        step()
        path = os.path.join(folder, name)
        if self._patterns.matching(path) or self._patterns.is_excluded(path):
            return None
        sibling = sibling_of(name, lambda original: bool(self._patterns.matching(os.path.join(folder, original))))
        if sibling is None:
            return None
        return path, self._patterns.matching(os.path.join(folder, sibling.name)) or "", sibling.is_generation


def _status_if_written(path: str, since_s: float, now_s: float) -> os.stat_result | None:
    """Return the status of a nonempty regular file written since then; otherwise None."""
    with suppress(OSError):
        status = os.lstat(path)
        # If `since_s` is in the future, the clock has been set back, and no file counts as older.
        is_older = status.st_mtime <= since_s - _CLOCK_STEP_S <= now_s
        if stat.S_ISREG(status.st_mode) and status.st_size > 0 and not is_older:
            return status
    return None


class Sibling(NamedTuple):
    """The original name of a sibling, and whether the sibling is a rotated generation of it."""

    name: str
    is_generation: bool


def is_generation_of(name: str, original: str) -> bool:
    """Return whether rotation may rename `original` to `name`; the number may be before the extension."""
    stem, extension = os.path.splitext(original)
    match = _LAST.fullmatch(name, len(stem)) if name.startswith(stem) else None
    return _has_suffix(name, original) or (match is not None and match["extension"] in {None, extension})


def looks_like_generation(name: str) -> bool:
    """Return whether a name is that of a rotated file."""
    return bool(_TAI64N.fullmatch(name)) or any(
        _SUFFIX.fullmatch(name, separator.start()) or _LAST.fullmatch(name, separator.start())
        for separator in _SEPARATOR.finditer(name)
        if separator.start()
    )


def _has_suffix(name: str, original: str) -> bool:
    if original == "current" and _TAI64N.fullmatch(name):
        return True
    return len(name) > len(original) and name.startswith(original) and bool(_SUFFIX.fullmatch(name, len(original)))


def sibling_of(name: str, is_original: Callable[[str], bool]) -> Sibling | None:
    """
    Find the original of a name of the form `NAME.*` or `NAME-*`, preferably one that it is a generation of.

    A number before the extension proves nothing: `app-2.log` may be a generation, or the file of another application.
    """
    if _TAI64N.fullmatch(name):
        return Sibling("current", is_generation=True) if is_original("current") else None
    prefixes = [name[: separator.start()] for separator in _SEPARATOR.finditer(name)]
    numbered = [(prefix, match) for prefix in prefixes if (match := _LAST.fullmatch(name, len(prefix)))]
    prefixes += [prefix + match["extension"] for prefix, match in numbered if prefix and match["extension"]]
    originals = [prefix for prefix in prefixes if is_original(prefix)]
    for original in originals:
        if _has_suffix(name, original):
            return Sibling(original, is_generation=True)
    return Sibling(originals[-1], is_generation=False) if originals else None
