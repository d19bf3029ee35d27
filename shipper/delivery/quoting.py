"""
Quotes error texts of the service for operators, without secrets and personal data.

An error may repeat a token, a key, or a value of a record, in any form. Therefore only ordinary words and small numbers
that do not occur in the request are shown, and no numbers about records but those of impersonal fields; everything else
is masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from unicodedata import normalize

import msgspec
from msgspec import Struct

from shipper.config.secrets import MASK
from shipper.delivery.credentials import Authorization
from shipper.delivery.tokens import jwt_claims

_CHARACTERS: Final = 160
_SCANNED_CHARACTERS: Final = 2_000
# A word, or a number of up to four digits, such as a status.
_PLAIN: Final = re.compile(r"(?:[^\W\d_]{1,20}(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]{1,8})?|[0-9]{1,4})")
_ERROR_WORDS: Final = {"invalid_token", "insufficient_scope", "invalid_request"}  # RFC 6750 §3.1
_OPENING: Final = "\"'([<"
_CLOSING: Final = "\"')]>.,:;!?%"
_ELLIPSES: Final = ("...", "\N{HORIZONTAL ELLIPSIS}")  # the word may be the beginning of a secret
_LETTERS: Final = re.compile(r"[^\W\d_]{3,}")
_APOSTROPHE: Final = re.compile("['\N{RIGHT SINGLE QUOTATION MARK}]")
_STOPS: Final = {".", ",", ":"}
_TITLE: Final = re.compile(r"<title[^<>]*>([^<]*)", re.IGNORECASE)
# Token claims that identify a person (OpenID Connect Core §5.1, and those of large identity platforms).
_CLAIMS: Final = ("sub", "name", "given_name", "family_name", "nickname", "preferred_username", "upn", "unique_name")


# Fields of a record that contain no personal data. All others may, including unknown ones.
_IMPERSONAL_FIELDS: Final = {
    *("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "CustomerCurrencyID", "ConsumerStatus", "ConsumerState")
}


class _Body(Struct):
    events: list[dict[str, Any]] = []


def quotation(statement: str, authorization: Authorization, body: bytes = b"") -> str:
    """
    Return the part of a text that may be quoted, with the rest masked.

    Args:
        body: The body of the request, JSON; empty = it had no records.
    Returns:
        Words on one line; empty if none may be quoted.
    """
    statement = statement[:_SCANNED_CHARACTERS]
    if statement.lstrip()[:1] == "<":  # a web page: use its title
        title = _TITLE.search(statement)
        statement = title[1] if title else ""
    try:
        events = msgspec.json.decode(body, type=_Body).events if body else []
        values = [*_values(authorization, events)]
        hidden = {piece for value in values for word in value.split() for piece in (*_pieces(word), *_words(word))}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the values to hide are not known
        return ""
    numbers = {str(event.get(name)) for event in events for name in _IMPERSONAL_FIELDS}
    shown: list[str] = []
    after_bearer = False
    for word in statement.split():
        is_plain = _is_plain(word) and (not body or not _core(word).isdecimal() or _core(word) in numbers)
        is_shown = not after_bearer and is_plain and hidden.isdisjoint(_pieces(word))
        after_bearer = "bearer" in _pieces(word)
        if not is_shown and shown and shown[-1].startswith(MASK):
            shown.pop()
        stop = word[len(word.rstrip(_CLOSING)) :]
        shown.append(word if is_shown else MASK + (stop if stop in _STOPS else ""))
    if not any(word[-1:].isalpha() or word[:1].isalpha() for word in shown):
        return ""
    text = " ".join(shown).replace('"', "'").replace(";", ",")
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS].rpartition(' ')[0]} …"


def _is_plain(word: str) -> bool:
    core = _core(word)
    if core in _ERROR_WORDS:
        return True
    is_one_case = core.islower() or core.isupper() or (core[:1].isupper() and core[1:].islower())
    is_whole = not word.endswith(_ELLIPSES)
    return is_whole and bool(_PLAIN.fullmatch(core)) and (is_one_case or core.isdecimal())


def _values(authorization: Authorization, events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the values that must not be quoted, even if they consist of ordinary words."""
    yield from authorization
    claims = jwt_claims(authorization.token, dict[str, Any]) or {}
    yield from (str(claims[name]) for name in _CLAIMS if name in claims)
    for event in events:
        yield from (text for name, value in event.items() if name not in _IMPERSONAL_FIELDS for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    else:
        yield str(value)


def _core(word: str) -> str:
    """Return a word without the punctuation around it."""
    return word.lstrip(_OPENING).rstrip(_CLOSING)


def _words(word: str) -> list[str]:
    """Return the words of at least three letters in a value, such as a user name in another spelling."""
    return _LETTERS.findall(normalize("NFKC", word).casefold())


def _pieces(word: str) -> list[str]:
    """Return the parts of a word for comparison: without case and punctuation, and split at apostrophes."""
    return _APOSTROPHE.split(normalize("NFKC", _core(word)).casefold())
