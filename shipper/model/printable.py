"""
Makes text from outside printable: the only place that decides which characters reach a terminal or a page. No I/O.

A text of a record, an answer, a report or a file's name may hold escapes that a terminal obeys, marks that turn text
around, line ends that make up lines of their own, and halves of surrogate pairs, which cannot be encoded.
"""

from __future__ import annotations

import json
from typing import Final

_JOINERS: Final = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"  # some scripts and pictures need them
_BYTES: Final = range(0xDC80, 0xDD00)  # what Python makes of bytes that are not UTF-8


def printable(text: str, *, keep: str = "") -> str:
    """
    Write out whatever is no visible character, as Python would; a newline and blanks of other widths become a blank.

    Args:
        keep: Characters to leave as they are, such as newlines in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(_written_out(each, keep) for each in text)


def _written_out(character: str, keep: str) -> str:
    if character.isprintable() or character in _JOINERS or character in keep:
        return character
    if character == "\n" or (character.isspace() and character not in "\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"):
        return " "
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def printable_json(document: str) -> str:
    """Escape what is no visible character within JSON, which stays the same document."""
    if document.isprintable():
        return document
    return "".join(each if each.isprintable() or each in "\r\n\t" else json.dumps(each)[1:-1] for each in document)
