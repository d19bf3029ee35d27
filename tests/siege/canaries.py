"""What must be shown nowhere: secrets, and what records hold of people; and how to find it in any output."""

from __future__ import annotations

import re
from typing import Final

from tests.torture.records import NAMES

KEY: Final = "canary-key-2d41f9"
SECRET: Final = "canary-secret-7be03a"
TOKEN: Final = "canary-token"  # and a number
NETWORK: Final = "192.0.2."  # of all records


def _in_any_writing(name: str) -> bytes:
    """Make a pattern for a name as text, JSON, a literal of Python, HTML, or one of them within another."""
    special = {'"': rb'(?:\\*"|&quot;|&#34;)', "\\": rb"\\+", "\n": rb"(?:\n|\\+n)"}

    def of(each: str) -> bytes:
        if each.isascii():
            return special.get(each) or re.escape(each.encode())
        return rb"(?:%b|(?i:\\+u%04x|\\+x%02x))" % (each.encode(), ord(each), ord(each))

    return b"".join(map(of, name))


_CANARY: Final = re.compile(
    b"|".join(map(_in_any_writing, (KEY, SECRET, TOKEN, *NAMES))) + rb"|(?<![0-9.])192\.0\.2\.[0-9]"
)
# What a terminal obeys, or takes for the end of a line; the bytes of C1 controls stand within other characters, too.
_COMMAND: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def canaries_in(data: bytes) -> set[str]:
    """Return the canaries in an output."""
    return {found.decode() for found in _CANARY.findall(data)}


def commands_in(data: bytes) -> set[str]:
    """Return what a terminal that shows an output would obey."""
    return set(_COMMAND.findall(data.decode("utf-8", "backslashreplace")))
