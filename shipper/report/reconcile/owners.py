"""
Determines the account that an accepted record belongs to.

In this order: the account to which the settings assign its media; the account whose reports name its media; the account
of its AffiliateID. If reports of several accounts name the media, the AffiliateID decides between them, otherwise the
lowest account number. Other records are unassigned.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from shipper.model.errors import ConfigError
from shipper.model.records import LedgerKey

_Key = TypeVar("_Key", int, str)

_COLUMNS: Final = ("account", "media", "affiliate_id")


class Claim(NamedTuple):
    """The owner of records, None if they are unassigned, and all accounts with a claim on them."""

    owner: int | None
    claimants: frozenset[int]


class Owners(NamedTuple):
    """
    The data that determines owners.

    Attributes:
        media, affiliates: The accounts of media and AffiliateIDs in the settings.
        named: The media in the reports of an account, by account.
    """

    media: Mapping[int, int] = MappingProxyType({})
    affiliates: Mapping[str, int] = MappingProxyType({})
    named: Mapping[int, frozenset[int]] = MappingProxyType({})

    def with_named(self, account: int, media: Iterable[int]) -> Owners:
        """Add media named by an account's reports; the account becomes known even if there are none."""
        before = self.named.get(account, frozenset())
        return self._replace(named={**self.named, account: before | frozenset(media)})


class Claims:
    def __init__(self, owners: Owners) -> None:
        self._media = owners.media
        accounts = {*owners.named, *owners.media.values(), *owners.affiliates.values()}
        self._affiliates = {**{str(account): account for account in accounts}, **owners.affiliates}
        self._naming: dict[int, set[int]] = {}
        for account, named_media in owners.named.items():
            for media in named_media:
                self._naming.setdefault(media, set()).add(account)
        self._claims: dict[tuple[str, str], Claim] = {}

    def of(self, key: LedgerKey) -> Claim:
        """Return the claim on the records of a ledger key."""
        claim = self._claims.get(key[2:])
        if claim is None:
            claim = self._claims[key[2:]] = self._claim(key[2], int(key[3]) if key[3] else None)
        return claim

    def _claim(self, affiliate_id: str, media: int | None) -> Claim:
        assigned = None if media is None else self._media.get(media)
        naming = set() if media is None else self._naming.get(media, set())
        affiliate = self._affiliates.get(affiliate_id)
        claimants = frozenset(naming) | {account for account in (assigned, affiliate) if account is not None}
        if assigned is not None:
            return Claim(assigned, claimants)
        if naming and affiliate not in naming:
            return Claim(min(naming), claimants)
        return Claim(affiliate, claimants)


def read_owners(path: Path) -> Owners:
    """Read owners from CSV; raise `ConfigError` with the line number if a row is invalid."""
    media: dict[int, int] = {}
    affiliates: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = ";" if ";" in file.readline() else ","
            file.seek(0)
            rows = csv.DictReader(file, strict=True, delimiter=delimiter)
            if tuple(filter(None, rows.fieldnames or ())) != _COLUMNS:
                raise _invalid(path, 1, f"the first line is not {','.join(_COLUMNS)}")
            for row in rows:
                if not any(row.values()):
                    continue
                try:
                    account = _number("account", row["account"])
                    if row["media"]:
                        _assign(media, _number("media", row["media"]), account)
                    if row["affiliate_id"]:
                        # As in the ledger's CSV, where an apostrophe precedes a minus sign.
                        _assign(affiliates, re.sub("^'(?=-)", "", row["affiliate_id"]), account)
                    if not row["media"] and not row["affiliate_id"]:
                        raise ValueError("it has neither media nor affiliate_id")
                except ValueError as error:
                    raise _invalid(path, rows.line_num, str(error)) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}", key="report.accounts") from error
    return Owners(media, affiliates)


def _assign(owners: dict[_Key, int], key: _Key, account: int) -> None:
    owner = owners.setdefault(key, account)
    if owner != account:
        raise ValueError(f"it assigns {key} to account {account}, but an earlier line to account {owner}")


def _number(name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise ValueError(f"its {name} is not a number")
    return int(text)


def _invalid(path: Path, line: int, message: str) -> ConfigError:
    return ConfigError(f"{str(path)!r}, line {line}: {message}", key="report.accounts")
