"""
Sample events as they are found in an operator's export: what `shipper sample --profile` writes instead of easy ones.

All is drawn from one seed. Addresses are of the network that is set aside for benchmarks (RFC 2544).

operator
    In order of time; the hours of the day are weighted. Brands, media and affiliates are Zipf-distributed: the one of
    rank r has a share of 1/r. A medium belongs to one affiliate and serves all brands; those of the first affiliate are
    the operator's own, without an AffiliateID. Places are weighted, with states in the US and Canada. 0.2 % of the
    records repeat an earlier ConsumerID, rather a recent one than an old one; 1 % of the user names are not plain
    ASCII, half of these are escaped; 3 % of the players are unverified.
sparse
    In no order, over all hours, 40 brands and 900,000 media alike, so that nearly each record has a ledger key of its
    own; the rest as in `operator`.
dirty
    `operator`; of each 2,000 records 200 have the keys in another order, 10 have to be normalised, 2 are invalid, and 1
    repeats the line of another.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import accumulate, islice
from random import Random
from typing import Any, Final, Protocol

import msgspec

# A step over a prime modulus visits every remainder once: unique, and in an order that looks like chance.
CONSUMER_BASE: Final = 1_000_000_000
CONSUMER_PRIME: Final = 999_999_937

BRANDS: Final = 25
MEDIA: Final = 3000
AFFILIATES: Final = 800
REPEATED_CONSUMERS: Final = 0.002
SPARSE_BRANDS: Final = 40
SPARSE_MEDIA: Final = 900_000

BLOCK: Final = 2000
"""In each so many dirty records there are exactly so many of each kind:"""
REORDERED: Final = 200
NORMALISED: Final = 10
INVALID: Final = 2
DUPLICATES: Final = 1

_HOUR_WEIGHTS: Final = (5, 4, 3, 2, 2, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 7, 8, 8, 8, 7, 6)  # UTC
_INSTANTS_PER_WEIGHT: Final = 720
_PLACES: Final = (  # weight, country, currency, the currency's identifier, state
    (9, "US", "USD", "8", "NJ"),
    (9, "US", "USD", "8", "PA"),
    (8, "US", "USD", "8", "MI"),
    (3, "US", "USD", "8", "CO"),
    (2, "US", "USD", "8", "CT"),
    (1, "US", "USD", "8", "WV"),
    (18, "GB", "GBP", "2", ""),
    (8, "CA", "CAD", "6", "ON"),
    (4, "CA", "CAD", "6", ""),
    (10, "DE", "EUR", "1", ""),
    (6, "SE", "SEK", "3", ""),
    (6, "FI", "EUR", "1", ""),
    (4, "NO", "NOK", "4", ""),
    (4, "DK", "DKK", "5", ""),
    (4, "IE", "EUR", "1", ""),
    (2, "ES", "EUR", "1", ""),
    (1, "MT", "EUR", "1", ""),
    (3, "NZ", "NZD", "7", ""),
)
_WORDS: Final = ("amber", "badger", "calm", "curlew", "dusty", "ermine", "falcon", "gecko", "hazel", "heron", "ibex")
_NAMES: Final = 1024
# As they stand in JSON; 10 of 1,024 names are about 1 %.
_RARE_NAMES: Final = (
    *("Zoë", "Jürgen", "Łukasz", "Ольга", "李娜🎰"),
    *(r"Zo\u00eb", r"J\u00fcrgen", r"\ud83c\udfb0", r"o\"neil", r"a\\b"),
)


class _Draws(Protocol):
    """What differs between the profiles."""

    def moment(self, index: int) -> str:
        """Draw the Timestamp of the record of this number, without its Z."""

    def source(self) -> tuple[int, int, str]:
        """Draw brand, medium, and affiliate."""


def operator_lines(count: int, rng: Random, end: date, days: int) -> Iterator[bytes]:
    """Yield the records of the days before `end`."""
    return _lines(count, rng, _Operator(count, rng, end, days))


def sparse_lines(count: int, rng: Random, end: date, days: int) -> Iterator[bytes]:
    """Yield the records of the days before `end`."""
    return _lines(count, rng, _Sparse(rng, end, days))


def dirty_lines(count: int, rng: Random, end: date, days: int) -> Iterator[bytes]:
    """Yield the records of the days before `end`; the first one of a block is clean, and is what is repeated."""
    lines = operator_lines(count, rng, end, days)
    changes = [_reorder] * REORDERED + [_normalisable] * NORMALISED + [_invalid] * INVALID
    while block := list(islice(lines, BLOCK)):
        positions = rng.sample(range(1, BLOCK), len(changes) + DUPLICATES)
        for position, change in zip(positions, changes, strict=False):
            if position < len(block):
                block[position] = change(block[position], rng)
        for position in positions[len(changes) :]:
            if position < len(block):
                block[position] = block[0]
        yield from block


class _Operator:
    def __init__(self, count: int, rng: Random, end: date, days: int) -> None:
        self._chance = rng.random
        self._days_per_record = days / max(count, 1)
        self._dates = _dates(end, days)
        self._clock = [
            _clock_time(hour * 3600 + instant * 3600 // (weight * _INSTANTS_PER_WEIGHT))
            for hour, weight in enumerate(_HOUR_WEIGHTS)
            for instant in range(weight * _INSTANTS_PER_WEIGHT)
        ]
        self._brands, self._media, affiliates = _zipf(BRANDS), _zipf(MEDIA), _zipf(AFFILIATES)
        # Each affiliate has a medium, and the large ones have the others.
        owners = [*range(AFFILIATES), *(bisect(affiliates, rng.random()) for _ in range(MEDIA - AFFILIATES))]
        rng.shuffle(owners)
        self._affiliates = [str(70_000 + owner) if owner else "" for owner in owners]

    def moment(self, index: int) -> str:
        day, part = divmod((index + self._chance()) * self._days_per_record, 1)
        return f"{self._dates[int(day)]}T{self._clock[int(part * len(self._clock))]}"

    def source(self) -> tuple[int, int, str]:
        medium = bisect(self._media, self._chance())
        return 101 + bisect(self._brands, self._chance()), 50_000 + medium, self._affiliates[medium]


class _Sparse:
    def __init__(self, rng: Random, end: date, days: int) -> None:
        self._below = rng.randrange
        self._dates = _dates(end, days)

    def moment(self, index: int) -> str:
        day, second = divmod(self._below(len(self._dates) * 86_400), 86_400)
        return f"{self._dates[day]}T{_clock_time(second)}"

    def source(self) -> tuple[int, int, str]:
        medium = self._below(SPARSE_MEDIA)
        return 101 + self._below(SPARSE_BRANDS), 100_000 + medium, str(70_000 + medium % AFFILIATES)


def _lines(count: int, rng: Random, draws: _Draws) -> Iterator[bytes]:
    place_weights = _cumulated([weight for weight, *_ in _PLACES])
    heads = [f'"ConsumerCountry":"{country}","ConsumerCurrencyID":"{currency}"' for _, country, currency, *_ in _PLACES]
    tails = [(f'"CustomerCurrencyID":"{number}"', f'"ConsumerState":"{state}"') for *_, number, state in _PLACES]
    names = [rng.choice(_WORDS) + rng.choice(("", ".", "_")) + rng.choice(_WORDS) for _ in range(_NAMES)]
    names[: len(_RARE_NAMES)] = _RARE_NAMES
    first, step = rng.randrange(CONSUMER_PRIME), rng.randrange(1, CONSUMER_PRIME)
    bits, chance, moment, source = rng.getrandbits, rng.random, draws.moment, draws.source
    for index in range(count):
        ids = f"{bits(256):064x}"  # 32 digits for the EventId, 32 for the tag
        picks = bits(48)
        brand, medium, affiliate = source()
        place = bisect(place_weights, chance())
        currency, state = tails[place]
        # One that came k records ago, small k as likely as large ones of another magnitude.
        turn = index - int(index ** chance()) if index and chance() < REPEATED_CONSUMERS else index
        yield (
            f'{{"EventId":"{ids[:8]}-{ids[8:12]}-4{ids[13:16]}-{"89ab"[picks & 3]}{ids[17:20]}-{ids[20:32]}",'
            f'"IP":"198.{18 + (picks >> 2 & 1)}.{picks >> 3 & 255}.{picks >> 11 & 255}",'
            f'"Timestamp":"{moment(index)}Z",'
            f'"BTag":"{medium}_{ids[32:]}",'
            f'"ConsumerID":{CONSUMER_BASE + (first + turn * step) % CONSUMER_PRIME},{heads[place]},'
            f'"Username":"{names[picks >> 19 & 1023]}{picks >> 29 & 8191}",'
            f'"BrandID":{brand},{currency},"ConsumerStatus":"{"Verified" if picks >> 42 & 31 else "Unverified"}",'
            f'"AffiliateID":"{affiliate}",{state}}}\n'
        ).encode()


def _reorder(line: bytes, rng: Random) -> bytes:
    """Write it as another program does, which sorts the keys."""
    return msgspec.json.encode(msgspec.json.decode(line), order="sorted") + b"\n"


def _set(field: str, change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return what changes the value of a field of a line."""

    def changed(line: bytes) -> bytes:
        event = msgspec.json.decode(line)
        event[field] = change(event[field])
        return msgspec.json.encode(event) + b"\n"

    return changed


_NORMALISABLE: Final = (
    _set("EventId", str.upper),
    _set("Timestamp", lambda value: value[:-1] + ".250Z"),
    _set("Timestamp", lambda value: value[:-1] + "+00:00"),
    _set("ConsumerID", str),
    _set("ConsumerCountry", str.lower),
    _set("BrandID", str),
    _set("CustomerCurrencyID", int),
    _set("AffiliateID", lambda _: None),
)
_INVALID: Final = (
    _set("IP", lambda _: "2001:db8::7"),
    _set("Timestamp", lambda value: value[:-1]),  # in which zone?
    _set("BTag", lambda value: value.partition("_")[0]),
    _set("ConsumerID", lambda _: 0),
    _set("Username", lambda _: ""),
    lambda line: line[: len(line) // 2] + b"\n",  # a writer that was killed
    lambda line: line.replace(b'"Username":"', b'"Username":"\xeb'),  # Latin-1
)


def _normalisable(line: bytes, rng: Random) -> bytes:
    return rng.choice(_NORMALISABLE)(line)


def _invalid(line: bytes, rng: Random) -> bytes:
    return rng.choice(_INVALID)(line)


def _dates(end: date, days: int) -> list[str]:
    return [(end - timedelta(days=before)).isoformat() for before in range(days, 0, -1)]


def _clock_time(second: int) -> str:
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"


def _zipf(count: int) -> list[float]:
    return _cumulated([1 / rank for rank in range(1, count + 1)])


def _cumulated(weights: list[float] | list[int]) -> list[float]:
    """Return the shares up to each but the last, in which `bisect` finds what a number from 0 to 1 stands for."""
    total = sum(weights)
    return [weight / total for weight in accumulate(weights)][:-1]
