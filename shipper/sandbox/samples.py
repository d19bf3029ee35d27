"""Sample events: invented, deterministic for a seed, fast enough to fill a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from random import Random
from typing import Final

from shipper.sandbox.profiles import CONSUMER_BASE, CONSUMER_PRIME, dirty_lines, operator_lines, sparse_lines

# Addresses that are set aside for examples (RFC 5737), so that a sample never names a real machine.
NETWORKS: Final = ("192.0.2", "198.51.100", "203.0.113")
BRANDS: Final = {11: "Harbour Lights", 12: "Northern Tern", 13: "Paper Moon"}
MARKETING_SOURCES: Final = (50121, 50234, 50377, 50418, 50590)

# country, currency, the currency's identifier; US stands once per state, so that states are as common as countries.
_PLACES: Final = (
    ("GB", "GBP", "2"),
    ("IE", "EUR", "1"),
    ("DE", "EUR", "1"),
    ("FI", "EUR", "1"),
    ("SE", "SEK", "3"),
    ("NO", "NOK", "4"),
    ("DK", "DKK", "5"),
    ("CA", "CAD", "6"),
    ("NZ", "NZD", "7"),
)
_STATES: Final = ("NJ", "PA", "MI", "CO")
_ADJECTIVES: Final = ("amber", "brisk", "calm", "dusty", "eager", "fuzzy", "gentle", "hazel")
_ANIMALS: Final = ("badger", "curlew", "dormouse", "ermine", "falcon", "gecko", "heron", "ibex")

_DAY_SECONDS: Final = 86_400


class SampleProfile(StrEnum):
    """Which kind of records; `profiles.py` says what is in those that are not easy."""

    EASY = "easy"
    OPERATOR = "operator"
    SPARSE = "sparse"
    DIRTY = "dirty"


DAYS: Final = {
    SampleProfile.EASY: 30,
    SampleProfile.OPERATOR: 730,
    SampleProfile.SPARSE: 365,
    SampleProfile.DIRTY: 730,
}
_LINES: Final = {
    SampleProfile.OPERATOR: operator_lines,
    SampleProfile.SPARSE: sparse_lines,
    SampleProfile.DIRTY: dirty_lines,
}


def sample_lines(
    count: int,
    *,
    seed: int = 1,
    end: datetime,
    days: int | None = None,
    profile: SampleProfile = SampleProfile.EASY,
) -> Iterator[bytes]:
    """
    Yield `count` invented events.

    The same arguments give the same bytes. Of the profile `easy`, EventIds depend on the seed alone: another `end` or
    `days` moves the timestamps and leaves the ids.

    Args:
        count: Events, 0..999,999,937; up to there every ConsumerID is unique.
        seed: Any integer.
        end: Aware instant; no event is younger. Profiles other than `easy` end with the day (UTC) before it.
        days: Length of the period that ends at `end`, at least 1; None is `DAYS` of the profile.
        profile: `easy` are spread evenly over the period, oldest first; they have three brands, five media and hardly
            any affiliates.
    Yields:
        One line of NDJSON with its newline, about 350 bytes: of the profile `easy` exactly what msgspec writes for a
        `wire.ActivityEvent`.
    Raises:
        AssertionError: `end` is naive, `days` < 1 or `count` out of range; a caller's bug.
    """
    days = DAYS[profile] if days is None else days
    assert end.tzinfo is not None, "end must be aware"
    assert days >= 1, days
    assert 0 <= count <= CONSUMER_PRIME, count
    end = end.astimezone(UTC).replace(microsecond=0)
    if profile is SampleProfile.EASY:
        return _easy_lines(count, Random(seed), end, days)
    return _LINES[profile](count, Random(seed), end.date(), days)


def _easy_lines(count: int, rng: Random, end: datetime, days: int) -> Iterator[bytes]:
    # Everything that has few values is formatted beforehand; the loop only draws, picks and joins.
    addresses = [f"{network}.{host}" for network in NETWORKS for host in range(1, 255)]
    names = [f"{adjective}_{animal}" for adjective in _ADJECTIVES for animal in _ANIMALS]
    places = _place_texts()
    tails = _tail_texts()
    brands = list(BRANDS)
    start = end - timedelta(days=days)
    dates = [(start + timedelta(days=day)).strftime("%Y-%m-%d") for day in range(days + 1)]
    minutes = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in range(60)]
    seconds = [f":{second:02}Z" for second in range(60)]
    first_second = start.hour * 3600 + start.minute * 60 + start.second
    stride = days * _DAY_SECONDS / max(count, 1)

    consumer = rng.randrange(CONSUMER_PRIME)
    step = rng.randrange(1, CONSUMER_PRIME)
    bits, chance = rng.getrandbits, rng.random
    for index in range(count):
        ids = f"{bits(256):064x}"  # 32 digits for the EventId, 32 for the tag
        picks = bits(64)
        day, second_of_day = divmod(first_second + int((index + chance()) * stride), _DAY_SECONDS)
        minute, second = divmod(second_of_day, 60)
        consumer = (consumer + step) % CONSUMER_PRIME
        place = (picks >> 24) % len(places)
        yield (
            f'{{"EventId":"{ids[:8]}-{ids[8:12]}-4{ids[13:16]}-{"89ab"[picks & 3]}{ids[17:20]}-{ids[20:32]}",'
            f'"IP":"{addresses[(picks >> 2) % len(addresses)]}",'
            f'"Timestamp":"{dates[day]}T{minutes[minute]}{seconds[second]}",'
            f'"BTag":"{MARKETING_SOURCES[(picks >> 14) % len(MARKETING_SOURCES)]}_{ids[32:]}",'
            f'"ConsumerID":{CONSUMER_BASE + consumer},{places[place]},'
            f'"Username":"{names[(picks >> 32) & 63]}{(picks >> 38) & 8191}",'
            f'"BrandID":{brands[(picks >> 52) % len(brands)]},'
            f"{tails[(picks >> 54) & 7][place]}\n"
        ).encode()


def _place_texts() -> list[str]:
    pairs = [(country, currency) for country, currency, _ in _PLACES] + [("US", "USD")] * len(_STATES)
    return [f'"ConsumerCountry":"{country}","ConsumerCurrencyID":"{currency}"' for country, currency in pairs]


def _tail_texts() -> list[list[str]]:
    """Make the end of the line: eight rows, of which one has an AffiliateID, each by place."""
    ends = [(number, "") for _, _, number in _PLACES] + [("8", state) for state in _STATES]
    return [
        [
            f'"CustomerCurrencyID":"{number}","ConsumerStatus":"Verified","AffiliateID":"{affiliate}",'
            f'"ConsumerState":"{state}"}}'
            for number, state in ends
        ]
        for affiliate in ("", "", "", "", "", "", "", "70012")
    ]
