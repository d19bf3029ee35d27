"""
The name of an AffiliateID in the ledger: identifiers are kept, anything else is replaced by a keyed hash.

An AffiliateID is free text, so it may be a person's name or address. Without the key, which is in its own file beside
the database, the text cannot be recovered from a hash, not even by trying all texts.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection
from hashlib import blake2b
from pathlib import Path
from typing import Final

import structlog

from shipper.model.errors import StateError
from shipper.state.sqlite import check_files, translate_errors
from shipper.system.files import GUARDED, replace_file

log = structlog.get_logger("state")

KEY_FILE: Final = "ledger.key"
ERASED: Final = "(erased)"
"""Replaces erased AffiliateIDs."""
OTHER: Final = "(other)"
"""Replaces AffiliateIDs that are not identifiers, as they may be names, in the ledger of a consumer group."""

NameAffiliate = Callable[[str], str]
"""Returns the name of an AffiliateID in the ledger; returns such a name unchanged."""

_KEY_BYTES: Final = 32
_HASH_BYTES: Final = 8  # a million AffiliateIDs have a collision with a probability of 1 in 40 million
_IDENTIFIER_MAX: Final = 64
_WITHOUT_MARKS: Final = str.maketrans("", "", "._-")
_is_ledger_name: Final = re.compile(
    rf"[0-9A-Za-z._-]{{0,{_IDENTIFIER_MAX}}}|hash:[0-9a-f]{{{2 * _HASH_BYTES}}}|{re.escape(ERASED)}|{re.escape(OTHER)}"
).fullmatch


def are_identifiers(affiliate_ids: Collection[str]) -> bool:
    """Return whether all are identifiers or empty; cheap for thousands."""
    letters = "".join(affiliate_ids).translate(_WITHOUT_MARKS)
    longest = max(map(len, affiliate_ids), default=0)
    return longest <= _IDENTIFIER_MAX and letters.isascii() and (letters.isalnum() or not letters)


def affiliate_namer(key: bytes) -> NameAffiliate:
    """Return the function that names AffiliateIDs in the ledger of this key."""

    def name(affiliate_id: str) -> str:
        if _is_ledger_name(affiliate_id):
            return affiliate_id
        encoded = affiliate_id.encode("utf-8", "surrogatepass")
        return f"hash:{blake2b(encoded, digest_size=_HASH_BYTES, key=key).hexdigest()}"

    return name


def read_key(directory: Path) -> bytes | None:
    """Read the key of a state directory; None if there is none."""
    path = directory / KEY_FILE
    with translate_errors(path):
        check_files(path)
        try:
            with open(os.open(path, os.O_RDONLY | GUARDED), "rb") as file:
                key = file.read(_KEY_BYTES + 1)
        except FileNotFoundError:
            return None
    if len(key) != _KEY_BYTES:
        raise StateError(
            f"{path} is damaged: a key has {_KEY_BYTES} bytes. It was left unchanged: restore it from a copy, or "
            "remove it: the ledger then keeps counts under old hashes but no longer recognises their AffiliateIDs"
        )
    return key


def read_or_generate_key(directory: Path) -> bytes:
    """Read the key without creating its file; without a key, no hash is in use yet, so any key works."""
    return read_key(directory) or secrets.token_bytes(_KEY_BYTES)


def ensure_key(directory: Path, *, is_expected: bool) -> bytes:
    """Read the key, or create it (0600) if it is missing; log a warning then if one `is_expected`."""
    if (key := read_key(directory)) is not None:
        return key
    path = directory / KEY_FILE
    key = secrets.token_bytes(_KEY_BYTES)
    with translate_errors(path):
        replace_file(path, key)
    if is_expected:
        log.warning(
            "ledger_key_lost",
            path=str(path),
            message="a new one was created: the ledger keeps counts under old hashes but no longer recognises "
            "their AffiliateIDs",
        )
    return key
