"""
Generates sample events, deterministic for a seed, and fast enough for benchmarks.

IP addresses are in the network reserved for benchmarks (RFC 2544), so none belongs to a real machine.

easy
    Spread evenly over the period, oldest first; three brands, five media and few affiliates.
operator
    Like an operator's export, oldest first; the hours of the day are weighted. Brands, media and affiliates are
    Zipf-distributed: rank r has a weight of 1/r. A medium belongs to one affiliate and serves all brands; the media of
    the first affiliate are the operator's own, without an AffiliateID. 0.2 % of the records repeat an earlier, usually
    recent ConsumerID; 1 % of the user names are not ASCII, half of them escaped; 3 % of the players are unverified.
sparse
    In no order, uniform over all hours, 40 brands and 900,000 media, so almost every record has its own ledger key;
    otherwise like `operator`.
dirty
    Like `operator`, but of every 2,000 records, 200 have their keys in another order, 10 need normalisation, 2 are
    invalid, and 1 repeats another line.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import accumulate, islice, zip_longest
from random import Random
from typing import Any, Final, Literal

import msgspec

BRANDS: Final = {11: "Harbour Lights", 12: "Northern Tern", 13: "Paper Moon"}
MARKETING_SOURCES: Final = (50121, 50234, 50377, 50418, 50590)

# Steps modulo a prime visit every remainder once, so ids are unique and appear to be random.
CONSUMER_BASE: Final = 1_000_000_000
CONSUMER_PRIME: Final = 999_999_937

OPERATOR_BRANDS: Final = 25
MEDIA: Final = 3000
AFFILIATES: Final = 800
REPEATED_CONSUMERS: Final = 0.002
SPARSE_BRANDS: Final = 40
SPARSE_MEDIA: Final = 900_000

BLOCK: Final = 2000
"""Number of `dirty` records that contain exactly the following number of each kind."""
REORDERED: Final = 200
NORMALISED: Final = 10
INVALID: Final = 2
DUPLICATES: Final = 1

_HOUR_WEIGHTS: Final = (5, 4, 3, 2, 2, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 7, 8, 8, 8, 7, 6)  # UTC
_INSTANTS_PER_WEIGHT: Final = 720
# Weight, country, currency, the currency's identifier, state.
_PLACES: Final[tuple[tuple[int, str, str, str, str], ...]] = (
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
# As written in JSON; 10 of 1,024 names are about 1 %.
_RARE_NAMES: Final = (
    *("Zoë", "Jürgen", "Łukasz", "Ольга", "李娜🎰"),
    *(r"Zo\u00eb", r"J\u00fcrgen", r"\ud83c\udfb0", r"o\"neil", r"a\\b"),
)

SampleProfile = Literal["easy", "operator", "sparse", "dirty"]

DAYS: Final = {"easy": 30, "operator": 730, "sparse": 365, "dirty": 730}


def sample_lines(
    count: int, *, seed: int = 1, end: datetime, days: int | None = None, profile: SampleProfile = "easy"
) -> Iterator[bytes]:
    """
    Yield `count` invented events.

    The same arguments give the same bytes. In the profile `easy`, EventIds depend only on the seed: another `end` or
    `days` changes the Timestamps, but not the ids.

    Args:
        count: Number of events, 0..999,999,937; within that, every ConsumerID of the profile `easy` is unique.
        end: Aware datetime; no event is later. Profiles other than `easy` end with the day (UTC) before it.
        days: Length of the period that ends at `end`, at least 1; None = `DAYS` of the profile.
    Yields:
        One line of NDJSON with its newline, about 350 bytes; in the profile `easy`, exactly as msgspec encodes a
        `wire.ActivityEvent`.
    Raises:
        AssertionError: `end` is naive, `days` < 1, or `count` is out of range.
    """
    days = DAYS[profile] if days is None else days
    assert end.tzinfo is not None, "end must be aware"
    assert days >= 1, days
    assert 0 <= count <= CONSUMER_PRIME, count
    end, rng = end.astimezone(UTC).replace(microsecond=0), Random(seed)
    if profile == "easy":
        return _lines(count, rng, _Easy(count, rng, end, days), is_varied=False)
    if profile == "sparse":
        return _lines(count, rng, _Sparse(rng, end.date(), days), is_varied=True)
    lines = _lines(count, rng, _Operator(count, rng, end.date(), days), is_varied=True)
    return _dirty(lines, rng) if profile == "dirty" else lines


class _Easy:
    def __init__(self, count: int, rng: Random, end: datetime, days: int) -> None:
        self._chance, self._bits = rng.random, rng.getrandbits
        self._stride = days * 86_400 / max(count, 1)
        start = end - timedelta(days=days)
        self._first_second = start.hour * 3600 + start.minute * 60 + start.second
        self._dates = _dates(end.date() + timedelta(days=1), days + 1)
        self._brands = list(BRANDS)

    def moment(self, index: int) -> str:
        """Draw the Timestamp of a record, without its Z."""
        day, second = divmod(self._first_second + int((index + self._chance()) * self._stride), 86_400)
        return f"{self._dates[day]}T{_clock_time(second)}"

    def source(self) -> tuple[int, int, str]:
        """Draw brand, medium, and affiliate."""
        picks = self._bits(24)
        medium = MARKETING_SOURCES[(picks >> 3) % len(MARKETING_SOURCES)]
        return self._brands[(picks >> 13) % len(self._brands)], medium, "70012" if picks & 7 == 0 else ""


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
        self._brands, self._media, affiliates = _zipf(OPERATOR_BRANDS), _zipf(MEDIA), _zipf(AFFILIATES)
        # Each affiliate has one medium; the large affiliates have the others.
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


def _lines(count: int, rng: Random, draws: _Easy | _Operator | _Sparse, *, is_varied: bool) -> Iterator[bytes]:
    places = [place for place in _PLACES if is_varied or place[1] != "CA"]  # not every service knows its states
    place_weights = _cumulated([weight for weight, *_ in places])
    heads = [f'"ConsumerCountry":"{country}","ConsumerCurrencyID":"{currency}"' for _, country, currency, *_ in places]
    tails = [(f'"CustomerCurrencyID":"{number}"', f'"ConsumerState":"{state}"') for *_, number, state in places]
    names = [rng.choice(_WORDS) + rng.choice(("", ".", "_")) + rng.choice(_WORDS) for _ in range(_NAMES)]
    repeated = REPEATED_CONSUMERS if is_varied else 0.0
    statuses = ["Unverified" if is_varied else "Verified", *["Verified"] * 31]
    if is_varied:
        names[: len(_RARE_NAMES)] = _RARE_NAMES
    first, step = rng.randrange(CONSUMER_PRIME), rng.randrange(1, CONSUMER_PRIME)
    bits, chance, moment, source = rng.getrandbits, rng.random, draws.moment, draws.source
    for index in range(count):
        ids = f"{bits(256):064x}"  # 32 digits for the EventId, 32 for the tag
        picks = bits(48)
        brand, medium, affiliate = source()
        place = bisect(place_weights, chance())
        currency, state = tails[place]
        # k records ago, log-uniform: all magnitudes of k are equally likely.
        turn = index - int(index ** chance()) if index and chance() < repeated else index
        yield (
            f'{{"EventId":"{ids[:8]}-{ids[8:12]}-4{ids[13:16]}-{"89ab"[picks & 3]}{ids[17:20]}-{ids[20:32]}",'
            f'"IP":"198.{18 + (picks >> 2 & 1)}.{picks >> 3 & 255}.{picks >> 11 & 255}",'
            f'"Timestamp":"{moment(index)}Z",'
            f'"BTag":"{medium}_{ids[32:]}",'
            f'"ConsumerID":{CONSUMER_BASE + (first + turn * step) % CONSUMER_PRIME},{heads[place]},'
            f'"Username":"{names[picks >> 19 & 1023]}{picks >> 29 & 8191}",'
            f'"BrandID":{brand},{currency},"ConsumerStatus":"{statuses[picks >> 42 & 31]}",'
            f'"AffiliateID":"{affiliate}",{state}}}\n'
        ).encode()


def _dirty(lines: Iterator[bytes], rng: Random) -> Iterator[bytes]:
    """Change and repeat records in each block; the first record stays unchanged, as it is the one to repeat."""
    changes: list[Callable[[], Callable[[bytes], bytes]]] = [
        *[lambda: _reorder] * REORDERED,
        *[partial(rng.choice, _NORMALISABLE)] * NORMALISED,
        *[partial(rng.choice, _INVALID)] * INVALID,
    ]
    while block := list(islice(lines, BLOCK)):
        positions = rng.sample(range(1, BLOCK), len(changes) + DUPLICATES)
        for position, change in zip_longest(positions, changes):
            if position < len(block):
                block[position] = change()(block[position]) if change else block[0]
        yield from block


def _reorder(line: bytes) -> bytes:
    """Sort the keys, as another program might."""
    return msgspec.json.encode(msgspec.json.decode(line), order="sorted") + b"\n"


def _set(field: str, change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return a function that changes a field of a line."""

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
    _set("Timestamp", lambda value: value[:-1]),  # no time zone
    _set("BTag", lambda value: value.partition("_")[0]),
    _set("ConsumerID", lambda _: 0),
    _set("Username", lambda _: ""),
    lambda line: line[: len(line) // 2] + b"\n",  # as after a killed writer
    lambda line: line.replace(b'"Username":"', b'"Username":"\xeb'),  # Latin-1
)


def _dates(end: date, days: int) -> list[str]:
    return [(end - timedelta(days=before)).isoformat() for before in range(days, 0, -1)]


def _clock_time(second: int) -> str:
    return f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"


def _zipf(count: int) -> list[float]:
    return _cumulated([1 / rank for rank in range(1, count + 1)])


def _cumulated(weights: list[float] | list[int]) -> list[float]:
    """Return cumulative shares without the last, so that `bisect` maps a number from 0 to 1 to an index."""
    total = sum(weights)
    return [weight / total for weight in accumulate(weights)][:-1]
