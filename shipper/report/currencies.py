"""
Names of currencies and their ISO 4217 codes.

Reports contain the names of currencies. The names in `currencies.txt` are the English ones of Unicode's CLDR, those of
ISO 4217, irregular plurals, and a few other unambiguous names. Names shared by two current currencies are not listed.
"""

from __future__ import annotations

import unicodedata
from importlib.resources import files
from typing import Final

_POINTS: Final = ".'\N{RIGHT SINGLE QUOTATION MARK}\N{MODIFIER LETTER TURNED COMMA}"


def _key(name: str) -> str:
    """Normalize case, accents, points, apostrophes, `&` and blanks."""
    text = unicodedata.normalize("NFKD", name.replace("&", " and ")).casefold()
    letters = (letter for letter in text if not unicodedata.combining(letter) and letter not in _POINTS)
    return " ".join("".join(letters).split())


_LINES: Final = files(__package__).joinpath("currencies.txt").read_text("utf-8").splitlines()
_NAMES_BY_CODE: Final = {line[:3]: line[4:].split("; ") for line in _LINES}
_CODES_BY_KEY: Final = {
    _key(name): code
    for code, names in _NAMES_BY_CODE.items()
    for name in (code, *names, *(f"{name}s" for name in names))
}


def currency_code(name: str | None) -> str | None:
    """Return the ISO 4217 code of a name, singular or plural and in any case, or of a code; None if unknown."""
    return _CODES_BY_KEY.get(_key(name or ""))


def is_same_currency(one: str | None, other: str) -> bool:
    """Return whether two names certainly mean the same currency."""
    if one is None:
        return False
    return one.casefold() == other.casefold() or currency_code(one) == (currency_code(other) or "")
