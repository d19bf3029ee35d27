"""
Makes external text printable. The only module that decides which characters reach a terminal or a page.

Records, answers, reports and file names may contain terminal escapes, marks that change the text direction, line breaks
that forge lines, and halves of surrogate pairs, which cannot be encoded.
"""

from __future__ import annotations

import json
from typing import Final

_JOINERS: Final = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"  # needed by some scripts and emoji
_BYTES: Final = range(0xDC80, 0xDD00)  # Python's surrogate escapes for bytes that are not UTF-8


def printable(text: str, *, keep: str = "") -> str:
    """Escape invisible characters as Python does; newlines and other spaces become a space, unless to `keep`."""
    if text.isprintable():
        return text
    return "".join(_escape(character, keep) for character in text)


def _escape(character: str, keep: str) -> str:
    if character.isprintable() or character in _JOINERS or character in keep:
        return character
    if character == "\n" or (character.isspace() and character not in "\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"):
        return " "
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Escape what the encoding of a stream lacks, as in JSON; an error handler for `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def printable_json(document: str) -> str:
    """Escape invisible characters in JSON without changing its meaning."""
    if document.isprintable():
        return document
    return "".join(
        character if character.isprintable() or character in "\r\n\t" else json.dumps(character)[1:-1]
        for character in document
    )
