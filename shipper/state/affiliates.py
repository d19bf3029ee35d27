"""
The ledger's key of an AffiliateID: an identifier as it came, anything else as a keyed hash.

An AffiliateID is free text, so it may be somebody's name or address. Without the key, which is in its own file
beside the database, nobody can find the text of a hash, not even by trying all texts.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final

import structlog

from shipper.model.errors import StateError
from shipper.state.sqlite import check_files, understood

log = structlog.get_logger("state")

KEY_FILE: Final = "ledger.key"
ERASED: Final = "(erased)"
"""Where what was counted under an erased AffiliateID is counted."""
OTHER: Final = "(other)"
"""Where members of a consumer group count AffiliateIDs that are no identifiers: they may be somebody's name."""

CountedAs = Callable[[str], str]
"""Returns under what an AffiliateID is counted; what it returns is counted under itself."""

_KEY_BYTES: Final = 32
_HASH_BYTES: Final = 8  # of a million AffiliateIDs, two have the same hash with a chance of 1 in 40 million
_IDENTIFIER_MAX: Final = 64
_WITHOUT_MARKS: Final = str.maketrans("", "", "._-")
_is_kept: Final = re.compile(
    rf"[0-9A-Za-z._-]{{0,{_IDENTIFIER_MAX}}}|hash:[0-9a-f]{{{2 * _HASH_BYTES}}}|{re.escape(ERASED)}|{re.escape(OTHER)}"
).fullmatch


def are_identifiers(affiliate_ids: Collection[str]) -> bool:
    """Return whether all of them are identifiers, or empty; cheap for thousands."""
    letters = "".join(affiliate_ids).translate(_WITHOUT_MARKS)
    longest = max(map(len, affiliate_ids), default=0)
    return longest <= _IDENTIFIER_MAX and letters.isascii() and (letters.isalnum() or not letters)


def counted_as(key: bytes) -> CountedAs:
    """Return what names the AffiliateIDs in the ledger that this key belongs to."""
    return partial(_counted_as, key)


def _counted_as(key: bytes, affiliate_id: str) -> str:
    if _is_kept(affiliate_id):
        return affiliate_id
    encoded = affiliate_id.encode("utf-8", "surrogatepass")
    return f"hash:{blake2b(encoded, digest_size=_HASH_BYTES, key=key).hexdigest()}"


def read_key(directory: Path) -> bytes | None:
    """
    Read the key of a state directory.

    Returns:
        None if there is none.
    Raises:
        StateError: It cannot be read, or is none.
    """
    path = directory / KEY_FILE
    with understood(path):
        check_files(path)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                key = file.read(_KEY_BYTES + 1)
        except FileNotFoundError:
            return None
    if len(key) != _KEY_BYTES:
        raise StateError(
            f"{path} is damaged: a key has {_KEY_BYTES} bytes. It was left as it is: put it back from a copy; or "
            "remove it, then what the ledger has counted under a hash stays counted, and is not recognised any more"
        )
    return key


def read_or_draw_key(directory: Path) -> bytes:
    """Read the key, for a command that only reads; where there is none, nothing is counted under it."""
    return read_key(directory) or secrets.token_bytes(_KEY_BYTES)


def ensure_key(directory: Path, *, is_expected: bool) -> bytes:
    """
    Read the key, or make it (0600) if there is none yet.

    Args:
        is_expected: Whether there was one, so that a warning is due if it is gone.
    Raises:
        StateError: It cannot be read or made, or is none.
    """
    if (key := read_key(directory)) is not None:
        return key
    path, temporary = directory / KEY_FILE, directory / f".{KEY_FILE}"
    key = secrets.token_bytes(_KEY_BYTES)
    with understood(path):
        check_files(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    if is_expected:
        log.warning(
            "ledger_key_lost",
            path=str(path),
            message="a new one was made: what the ledger has counted under a hash of an AffiliateID stays counted, "
            "and is not recognised any more",
        )
    return key
