"""
Quotes what a service says, where operators read it: plain words, and no secret or personal data.

An error may repeat a token, a key, or a value of a record, in any form. So a word is shown only if it looks like one of
a language or is a small number, and is not known to belong to a person; the rest is masked.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from binascii import Error
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final
from unicodedata import normalize

import msgspec
from msgspec import Struct

from shipper.config.secrets import MASK
from shipper.delivery.credentials import Authorization

_CHARACTERS: Final = 160
_LOOKED_AT: Final = 2_000
# A word in lower case, with a capital or in capitals; or a number of a few digits, such as a status.
_PLAIN: Final = re.compile(r"(?:[^\W\d_]{1,20}(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]{1,8})?|[0-9]{1,4})")
_ERROR_WORDS: Final = {"invalid_token", "insufficient_scope", "invalid_request"}  # RFC 6750 §3.1
_BEFORE: Final = "\"'([<"
_BEHIND: Final = "\"')]>.,:;!?%"
_CUT_OFF: Final = ("...", "\N{HORIZONTAL ELLIPSIS}")  # a part of a secret, perhaps
_APOSTROPHE: Final = re.compile("['\N{RIGHT SINGLE QUOTATION MARK}]")
_STOPS: Final = {".", ",", ":"}
_TITLE: Final = re.compile(r"<title[^<>]*>([^<]*)", re.IGNORECASE)
# Claims of a token that name a person (OpenID Connect Core §5.1, and those of large identity platforms).
_CLAIMS: Final = ("sub", "name", "given_name", "family_name", "nickname", "preferred_username", "upn", "unique_name")


# Fields of a record that say nothing about who it is. Others, also unknown ones, may hold names.
_OF_NOBODY: Final = {
    *("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "CustomerCurrencyID", "ConsumerStatus", "ConsumerState")
}


class _Body(Struct):
    events: list[dict[str, Any]] = []


def quotation(said: str, authorization: Authorization, body: bytes = b"") -> str:
    """
    Return what may be quoted of a text.

    Args:
        said: By the service.
        authorization: What the request was sent with.
        body: Of the request, JSON; empty = it had no records.
    Returns:
        Some words on one line; empty if none may be quoted.
    """
    said = said[:_LOOKED_AT]
    if said.lstrip()[:1] == "<":  # a page: what it is about
        title = _TITLE.search(said)
        said = title[1] if title else ""
    try:
        hidden = {piece for value in _values(authorization, body) for word in value.split() for piece in _pieces(word)}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # then whose words they are is not known
        return ""
    shown: list[str] = []
    after_bearer = False
    for word in said.split():
        is_shown = not after_bearer and _is_plain(word) and hidden.isdisjoint(_pieces(word))
        after_bearer = "bearer" in _pieces(word)
        if not is_shown and shown and shown[-1].startswith(MASK):
            shown.pop()
        stop = word[len(word.rstrip(_BEHIND)) :]
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
    is_whole = not word.endswith(_CUT_OFF)
    return is_whole and bool(_PLAIN.fullmatch(core)) and (is_one_case or core.isdecimal())


def _values(authorization: Authorization, body: bytes) -> Iterator[str]:
    """Yield what must not be quoted, even if it consists of plain words."""
    yield from authorization
    yield from _claims(authorization.token)
    if body:
        for event in msgspec.json.decode(body, type=_Body).events:
            yield from (each for name, value in event.items() if name not in _OF_NOBODY for each in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    else:
        yield str(value)


def _claims(token: str) -> Iterator[str]:
    """Yield what a token says of a person, if it is a JWT."""
    with suppress(Error, ValueError, msgspec.MsgspecError, RecursionError):
        payload = token.split(".")[1:2]
        claims = msgspec.json.decode(urlsafe_b64decode("".join(payload) + "=="), type=dict[str, Any])
        yield from (str(claims[name]) for name in _CLAIMS if name in claims)


def _core(word: str) -> str:
    """Return a word without the punctuation around it."""
    return word.lstrip(_BEFORE).rstrip(_BEHIND)


def _pieces(word: str) -> list[str]:
    """Return what two words have in common that are the same but for case, punctuation, or an ending such as 's."""
    return _APOSTROPHE.split(normalize("NFKC", _core(word)).casefold())
