"""Foreign text in printable form."""

from __future__ import annotations

import json
import sys
import unicodedata
from functools import cache

import pytest

from shipper.model.printable import printable, printable_json

JOINERS = "\u200c\u200d"


@cache
def every_character() -> str:
    return "".join(map(chr, range(sys.maxunicode + 1)))


@cache
def obeyed() -> set[str]:
    return {each for each in every_character() if unicodedata.category(each)[0] in "CZ"} - {" ", *JOINERS}


def is_visible(text: str) -> bool:
    """Return whether no terminal obeys it, and every encoder takes it; also characters that are not yet assigned."""
    return obeyed().isdisjoint(text)


def test_no_control_character_reaches_a_terminal():
    shown = printable(every_character())
    assert is_visible(shown)
    shown.encode()
    assert is_visible(printable(every_character()[:0x3000], keep="\n\t").replace("\n", "").replace("\t", ""))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe ☕ 日本 \N{FAMILY}\u200d\u200cx", "Größe ☕ 日本 \N{FAMILY}\u200d\u200cx"),
        ("a\x1b[2J\x9b\u202eb\0", r"a\x1b[2J\x9b\u202eb\x00"),
        ("two\nlines\rand\ttabs\x85\u2028", r"two lines\rand\ttabs\x85\u2028"),
        ("wide\u00a0\u3000blanks", "wide  blanks"),
        ("caf\udce9 \ud800", r"caf\xe9 \ud800"),
        ("", ""),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_json_stays_the_same_document():
    text = every_character().encode(errors="ignore").decode()
    shown = printable_json(json.dumps([text], ensure_ascii=False))
    assert is_visible(shown)
    assert json.loads(shown) == [text]
