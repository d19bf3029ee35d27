"""
Files beside those that the patterns name: generations that were rotated between two looks, and unknown files.

Rotation names a file after the one that it was: `app.log.1`, `app.log-20261101.gz`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from shipper.sources.discovery import Found, Patterns
from shipper.system.work import step

_CLOCK_STEP_S: Final = 2.0  # so coarsely a file system may tell the time
_SEPARATOR: Final = re.compile(r"[.-]")
# Numbers, dates and times in the ways in which rotators write them, and how the file was compressed since.
_NUMBER: Final = r"[.-]\d+(?:[-_.:T]\d+)*"
_COMPRESSED: Final = r"(?:\.(?:gz|zst|bz2|xz))?"
_SUFFIX: Final = re.compile(f"(?:{_NUMBER})?{_COMPRESSED}")
_LAST: Final = re.compile(f"{_NUMBER}(?P<extension>\\.[A-Za-z]\\w*)??{_COMPRESSED}")


class Beside(NamedTuple):
    """
    A file that no pattern names, and that was written to since a name that it begins with is followed.

    Attributes:
        found: With the pattern that names the other one.
        is_generation: Its name is what rotation makes of the other one: it holds records of the same application.
    """

    found: Found
    is_generation: bool


class Siblings:
    """
    Looks for `NAME.*` and `NAME-*` beside what patterns name; into a folder only if that has changed.

    A file that is begun and rotated away between two looks, or while shipper is stopped, is never seen as `NAME`.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._folders = {os.path.dirname(pattern) for pattern in patterns.include}
        self._names: set[str] = set()
        self._listed: dict[str, tuple[int, list[tuple[str, str, bool]]]] = {}

    def find(self, named: Iterable[str], since: Mapping[str, float], now_s: float) -> list[Beside]:
        """
        Look for files beside.

        Args:
            named: What the patterns name now, or named before.
            since: When each of the patterns was first used, seconds since the epoch; others are left out.
            now_s: The time, seconds since the epoch.
        """
        fresh = set(named) - self._names
        self._names |= fresh
        self._folders.update(map(os.path.dirname, fresh))
        return [beside for folder in sorted(self._folders) for beside in self._in(folder, since, now_s)]

    def _in(self, folder: str, since: Mapping[str, float], now_s: float) -> Iterator[Beside]:
        for path, pattern, is_generation in self._list(folder, now_s):
            step()
            with suppress(OSError):
                status = os.lstat(path)
                is_to_see = stat.S_ISREG(status.st_mode) and status.st_size > 0 and pattern in since
                # A beginning that is still to come was told by a clock that was put back: it leaves nothing out.
                is_younger = is_to_see and not status.st_mtime <= since[pattern] - _CLOCK_STEP_S <= now_s
                if is_younger:
                    yield Beside(Found(path, (status.st_dev, status.st_ino), status, pattern), is_generation)

    def _list(self, folder: str, now_s: float) -> list[tuple[str, str, bool]]:
        """List path, pattern and whether it is a generation, of what is beside; as before if nothing has changed."""
        try:
            changed_ns = os.stat(folder or ".").st_mtime_ns
            before = self._listed.get(folder)
            if before is not None and before[0] == changed_ns:
                return before[1]
            listed = [each for name in os.listdir(folder or ".") if (each := self._beside(folder, name))]
        except (OSError, ValueError):
            return []
        # What was changed just now may change again within the same step of its clock.
        self._listed[folder] = (changed_ns if now_s - changed_ns / 1e9 > _CLOCK_STEP_S else -1, listed)
        return listed

    def _beside(self, folder: str, name: str) -> tuple[str, str, bool] | None:
        step()
        path = os.path.join(folder, name)
        if path in self._names or self._patterns.naming(path) or self._patterns.is_left_out(path):
            return None
        sibling = sibling_of(name, lambda original: bool(self._patterns.naming(os.path.join(folder, original))))
        if sibling is None:
            return None
        return path, self._patterns.naming(os.path.join(folder, sibling.name)) or "", sibling.is_generation


class Sibling(NamedTuple):
    """
    A name that begins with another one.

    Attributes:
        name: The other one.
        is_generation: Whether it is what rotation makes of it; if not, nobody knows what it is.
    """

    name: str
    is_generation: bool


def is_generation_of(name: str, original: str) -> bool:
    """Return whether rotation gives this name to what had the original one; the number may go before its extension."""
    stem, extension = os.path.splitext(original)
    before = _LAST.fullmatch(name, len(stem)) if name.startswith(stem) else None
    return _is_appended(name, original) or (before is not None and before["extension"] in {None, extension})


def looks_like_generation(name: str) -> bool:
    """Return whether this is the name of some rotated file."""
    return any(
        _SUFFIX.fullmatch(name, each.start()) or _LAST.fullmatch(name, each.start())
        for each in _SEPARATOR.finditer(name)
        if each.start()
    )


def _is_appended(name: str, original: str) -> bool:
    return len(name) > len(original) and name.startswith(original) and bool(_SUFFIX.fullmatch(name, len(original)))


def sibling_of(name: str, is_original: Callable[[str], bool]) -> Sibling | None:
    """
    Find the name that another one begins with, `NAME.*` or `NAME-*`; a generation of one goes before all else.

    A number before the extension is no evidence here: `app-2.log` may well be the file of another application.

    Args:
        is_original: Whether a name is one that is looked for.
    """
    originals = [name[: each.start()] for each in _SEPARATOR.finditer(name) if is_original(name[: each.start()])]
    for original in originals:
        if _is_appended(name, original):
            return Sibling(original, is_generation=True)
    return Sibling(originals[-1], is_generation=False) if originals else None
