"""Strings that no output may show, secrets and personal data of records, and how to find them."""

from __future__ import annotations

import re
from typing import Final

from tests.torture.records import NAMES

KEY: Final = "canary-key-2d41f9"
SECRET: Final = "canary-secret-7be03a"
TOKEN: Final = "canary-token"  # followed by a number
NETWORK: Final = "192.0.2."  # of all records


def _in_any_writing(name: str) -> bytes:
    """Return a pattern for a name as text, JSON, Python literal, HTML, or a nesting of them."""
    special = {'"': rb'(?:\\*"|&quot;|&#34;)', "\\": rb"\\+", "\n": rb"(?:\n|\\+n)"}

    def of(each: str) -> bytes:
        if each.isascii():
            return special.get(each) or re.escape(each.encode())
        return rb"(?:%b|(?i:\\+u%04x|\\+x%02x))" % (each.encode(), ord(each), ord(each))

    return b"".join(map(of, name))


_CANARY: Final = re.compile(
    b"|".join(map(_in_any_writing, (KEY, SECRET, TOKEN, *NAMES))) + rb"|(?<![0-9.])192\.0\.2\.[0-9]"
)
# Control characters and line separators; the bytes of C1 controls also occur within other characters.
_COMMAND: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def canaries_in(data: bytes) -> set[str]:
    """Return the canaries found in an output."""
    return {found.decode() for found in _CANARY.findall(data)}


def commands_in(data: bytes) -> set[str]:
    """Return the control sequences in an output that a terminal would execute."""
    return set(_COMMAND.findall(data.decode("utf-8", "backslashreplace")))
