"""
Which account an accepted record belongs to.

In this order: the account that the settings give its media; the account whose report has named its media; the account
that its AffiliateID stands for. If reports of several accounts named the media, the AffiliateID decides between them,
else the least number does. A record that nothing of this applies to is unassigned.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from shipper.model.errors import ConfigError
from shipper.model.records import LedgerKey

_Key = TypeVar("_Key", int, str)

_COLUMNS: Final = ("account", "media", "affiliate_id")
_NOBODY: Final[frozenset[int]] = frozenset()


class Claim(NamedTuple):
    """
    Whose a record is.

    Attributes:
        owner: None if it is unassigned.
        claimants: All accounts that something speaks for.
    """

    owner: int | None
    claimants: frozenset[int]


class Owners(NamedTuple):
    """
    What is known of whose records are whose.

    Attributes:
        media: The accounts that the settings give marketing sources to.
        affiliates: The same of AffiliateIDs.
        named: By account, the media that its reports have named.
    """

    media: Mapping[int, int] = MappingProxyType({})
    affiliates: Mapping[str, int] = MappingProxyType({})
    named: Mapping[int, frozenset[int]] = MappingProxyType({})

    def naming(self, account: int, media: Iterable[int]) -> Owners:
        """Add what a report of an account names; the account is known from then on also if that is nothing."""
        return self._replace(named={**self.named, account: self.named.get(account, _NOBODY) | frozenset(media)})

    def giving(self, account: int, media: Iterable[int]) -> Owners:
        """Add media that the settings give to an account."""
        return self._replace(media={**self.media, **dict.fromkeys(media, account)})

    def claims(self) -> Claims:
        """Prepare for many records."""
        return Claims(self)


class Claims:
    """Finds the owner of records."""

    def __init__(self, owners: Owners) -> None:
        self._media = owners.media
        accounts = {*owners.named, *owners.media.values(), *owners.affiliates.values()}
        self._affiliates = {**{str(account): account for account in accounts}, **owners.affiliates}
        self._naming: dict[int, set[int]] = {}
        for account, media in owners.named.items():
            for each in media:
                self._naming.setdefault(each, set()).add(account)
        self._found: dict[tuple[str, str], Claim] = {}

    def of(self, key: LedgerKey) -> Claim:
        """Return who owns the records of a key of the ledger."""
        found = self._found.get(key[2:])
        if found is None:
            found = self._found[key[2:]] = self._claim(key[2], int(key[3]) if key[3] else None)
        return found

    def _claim(self, affiliate_id: str, media: int | None) -> Claim:
        given = None if media is None else self._media.get(media)
        naming = set() if media is None else self._naming.get(media, set())
        affiliate = self._affiliates.get(affiliate_id)
        claimants = frozenset(naming) | frozenset(each for each in (given, affiliate) if each is not None)
        if given is not None:
            return Claim(given, claimants)
        if naming:
            return Claim(affiliate if affiliate in naming else min(naming), claimants)
        return Claim(affiliate, claimants)


def read_owners(path: Path) -> Owners:
    """
    Read whose records are whose from CSV with the columns account, media and affiliate_id.

    A row gives the account a media, an AffiliateID, or both.

    Raises:
        ConfigError: The file cannot be read, or a row is none; names its line.
    """
    media: dict[int, int] = {}
    affiliates: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            if tuple(rows.fieldnames or ()) != _COLUMNS:
                raise _wrong(path, 1, f"the first line is not {','.join(_COLUMNS)}")
            for row in rows:
                account = _number(path, rows.line_num, "account", row["account"])
                if row["media"]:
                    number = _number(path, rows.line_num, "media", row["media"])
                    _give(path, rows.line_num, media, number, account)
                if row["affiliate_id"]:
                    _give(path, rows.line_num, affiliates, row["affiliate_id"], account)
                if not row["media"] and not row["affiliate_id"]:
                    raise _wrong(path, rows.line_num, "it has neither media nor affiliate_id")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}", key="report.accounts") from error
    return Owners(media, affiliates)


def _give(path: Path, line: int, given: dict[_Key, int], key: _Key, account: int) -> None:
    before = given.setdefault(key, account)
    if before != account:
        raise _wrong(path, line, f"it gives {key} to account {account}, an earlier line to account {before}")


def _number(path: Path, line: int, name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise _wrong(path, line, f"its {name} is not a number")
    return int(text)


def _wrong(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{str(path)!r}, line {line}: {what}", key="report.accounts")
