"""Which names rotation gives to a file that had another one: `app.log.1`, `app.log-20261101.gz`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple

_SEPARATOR: Final = re.compile(r"[.-]")
# Numbers, dates and times in the ways in which rotators write them, and how the file was compressed since.
_NUMBER: Final = r"[.-]\d+(?:[-_.:T]\d+)*"
_COMPRESSED: Final = r"(?:\.(?:gz|zst|bz2|xz))?"
_SUFFIX: Final = re.compile(f"(?:{_NUMBER})?{_COMPRESSED}")
_LAST: Final = re.compile(f"{_NUMBER}(?P<extension>\\.[A-Za-z]\\w*)??{_COMPRESSED}")


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
