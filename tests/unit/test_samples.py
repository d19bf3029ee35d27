"""Sample events are valid, formatted like msgspec, and reproducible by seed; the profiles are as documented."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from itertools import pairwise
from typing import get_args
from uuid import UUID

import msgspec
import pytest

from shipper.codec.codec import Codec
from shipper.codec.dedupe import accept_events
from shipper.codec.rules import latest_timestamp
from shipper.config.settings import RecordsSettings
from shipper.model import wire
from shipper.sandbox.samples import (
    AFFILIATES,
    BLOCK,
    BRANDS,
    DAYS,
    DUPLICATES,
    INVALID,
    MARKETING_SOURCES,
    MEDIA,
    NORMALISED,
    OPERATOR_BRANDS,
    REORDERED,
    SampleProfile,
    sample_lines,
)
from tests.cases import each
from tests.unit.test_codec import chunk_of

END = datetime(2026, 3, 15, 12, 30, 7, 999_999, tzinfo=UTC)
FIELDS = list(wire.ActivityEvent.__struct_fields__)


def sample(count: int = 3000, **kwargs) -> list[wire.ActivityEvent]:
    kwargs.setdefault("end", END)
    return [msgspec.json.decode(line, type=wire.ActivityEvent) for line in sample_lines(count, **kwargs)]


def when(event: wire.ActivityEvent) -> datetime:
    return datetime.fromisoformat(event.Timestamp)


@each("seed", [0, 1, 2, -5, 10**30])
def test_lines_equal_what_msgspec_writes(seed):
    for line in sample_lines(500, seed=seed, end=END):
        event = msgspec.json.decode(line, type=wire.ActivityEvent)
        assert msgspec.json.encode(event) + b"\n" == line
        assert list(msgspec.json.decode(line)) == FIELDS


def test_another_period_keeps_the_event_ids():
    moved = sample(100, end=END + timedelta(days=400), days=3)
    assert [event.EventId for event in moved] == [event.EventId for event in sample(100)]


def test_another_seed_shares_no_event_id():
    assert not {event.EventId for event in sample(seed=1)} & {event.EventId for event in sample(seed=2)}


def test_event_ids_are_unique_version_4_uuids():
    ids = [event.EventId for event in sample()]
    assert len(set(ids)) == len(ids)
    for text in ids:
        uuid = UUID(text)
        assert (str(uuid), uuid.version, uuid.variant) == (text, 4, "specified in RFC 4122")


@pytest.mark.parametrize("seed", range(20))
def test_consumers_are_unique(seed):
    consumers = {event.ConsumerID for event in sample(1000, seed=seed)}
    assert len(consumers) == 1000


def test_addresses_are_set_aside_for_benchmarks():
    network = ipaddress.ip_network("198.18.0.0/15")
    assert all(ipaddress.ip_address(event.IP) in network for event in sample())


def test_tags_carry_known_marketing_sources():
    tags = [event.BTag for event in sample()]
    assert all(re.fullmatch(r"[0-9]+_[0-9a-f]{32}", tag) for tag in tags)
    assert {int(tag.split("_")[0]) for tag in tags} == set(MARKETING_SOURCES)


@pytest.mark.parametrize("count", [1, 2, 3000])
@pytest.mark.parametrize("days", [1, 30])
def test_timestamps_fill_the_period_in_order_and_never_pass_its_end(count, days):
    times = [when(event) for event in sample(count, days=days)]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert END.replace(microsecond=0) - timedelta(days=days) <= times[0]
    assert times[-1] <= END
    stride = timedelta(days=days) / count
    assert all(later - earlier <= 2 * stride + timedelta(seconds=1) for earlier, later in pairwise(times))


def test_end_in_another_zone_is_the_same_instant():
    elsewhere = END.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert list(sample_lines(10, end=elsewhere)) == list(sample_lines(10, end=END))


def test_values_vary_where_reports_and_rules_need_it():
    events = sample()
    assert {event.BrandID for event in events} == set(BRANDS)
    assert len({event.ConsumerCountry for event in events}) >= 5
    assert len({event.ConsumerCurrencyID for event in events}) >= 5
    assert {event.ConsumerStatus for event in events} == {"Verified"}
    assert all(bool(event.ConsumerState) == (event.ConsumerCountry == "US") for event in events)
    with_affiliate = sum(event.AffiliateID != "" for event in events)
    assert 0 < with_affiliate < len(events) / 2


@each("wrong", [{"end": datetime(2026, 1, 1)}, {"end": END, "days": 0}, {"end": END, "count": -1}])
def test_invalid_arguments_raise_at_once(wrong):
    with pytest.raises(AssertionError):
        sample_lines(**{"count": 1, **wrong})


# Profiles -------------------------------------------------------------------------------------------------------------


BLOCKS = 10
COUNT = BLOCKS * BLOCK
PROFILES = EASY, OPERATOR, SPARSE, DIRTY = get_args(SampleProfile)


@cache
def lines(profile: SampleProfile, count: int = COUNT) -> list[bytes]:
    return list(sample_lines(count, end=END, profile=profile))


@cache
def events(profile: SampleProfile) -> list[wire.ActivityEvent]:
    return [msgspec.json.decode(line, type=wire.ActivityEvent) for line in lines(profile)]


def judged(profile: SampleProfile) -> dict[str, int]:
    codec, found = Codec(RecordsSettings(), max_record_bytes=1 << 18), Counter[str]()
    chunk, latest = chunk_of(b"".join(lines(profile))), latest_timestamp(END.timestamp(), 0)
    for piece in codec.encode_all(chunk, room_bytes=1 << 20, latest=latest):
        accept_events(codec.window, piece.span, range(piece.events - piece.waits))
        found["good"] += piece.events - piece.waits
        found["invalid"] += len(piece.span.rejections)
        found["duplicates"] += piece.span.duplicates + piece.waits
    return {**found, "normalised": sum(codec.changes.normalized.values())}


@each("profile", PROFILES)
def test_same_arguments_give_the_same_bytes(profile):
    again = sample_lines(1000, end=END + timedelta(hours=0 if profile is EASY else 3), profile=profile)
    assert list(again) == lines(profile, 1000)
    assert list(sample_lines(1000, end=END, profile=profile, seed=2)) != lines(profile, 1000)


@each("profile", PROFILES)
def test_the_number_of_records_is_as_requested(profile):
    for count in (0, 1, BLOCK - 1, BLOCK + 1):
        assert len(list(sample_lines(count, end=END, profile=profile))) == count


@each("profile", [EASY, OPERATOR, SPARSE])
def test_all_records_are_in_the_wire_form(profile):
    assert judged(profile) == {"good": COUNT, "invalid": 0, "duplicates": 0, "normalised": 0}
    assert all(list(msgspec.json.decode(line)) == FIELDS for line in lines(profile)[:1000])
    assert 300 <= sum(map(len, lines(profile))) / COUNT <= 400


@each("profile", [OPERATOR, SPARSE])
def test_timestamps_are_within_the_whole_days_before_the_end(profile):
    times = [datetime.fromisoformat(event.Timestamp) for event in events(profile)]
    first = END.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=DAYS[profile])
    assert first <= min(times) < first + timedelta(days=1)
    assert END.date() - timedelta(days=1) == max(times).date()
    assert {time.hour for time in times} == set(range(24))
    assert all(earlier <= later for earlier, later in pairwise(times)) == (profile is OPERATOR)


def test_shares_of_an_operator_are_unequal():
    found = events(OPERATOR)
    brands = Counter(event.BrandID for event in found)
    media = Counter(event.BTag.partition("_")[0] for event in found)
    affiliates = Counter(event.AffiliateID for event in found)
    assert len(brands) == OPERATOR_BRANDS
    assert 0.6 * MEDIA < len(media) <= MEDIA  # the small ones are rarer than one in this sample
    assert 0.5 * AFFILIATES < len(affiliates) <= AFFILIATES
    assert 0.2 < max(brands.values()) / COUNT < 0.3
    assert 0.1 < max(media.values()) / COUNT < 0.15
    assert 0 < affiliates[""] < COUNT
    assert len({(event.BTag.partition("_")[0], event.AffiliateID) for event in found}) == len(media)


def test_users_of_an_operator_are_varied():
    found = events(OPERATOR)
    names = [line.partition(b'"Username":"')[2].partition(b'","BrandID"')[0] for line in lines(OPERATOR)]
    rare = [name for name in names if not name.isascii() or b"\\" in name]
    assert 0.005 < len(rare) / COUNT < 0.015
    assert 0.3 < sum(b"\\" in name for name in rare) / len(rare) < 0.7
    assert 0.001 < 1 - len({event.ConsumerID for event in found}) / COUNT < 0.003
    assert {event.ConsumerStatus for event in found} == {"Verified", "Unverified"}
    states = Counter(event.ConsumerState for event in found)
    assert {"", "NJ", "PA", "MI", "CO", "ON"} < set(states)
    assert states["NJ"] > states["CO"]


def test_each_sparse_record_has_its_own_ledger_key():
    keys = {
        (event.Timestamp[:13], event.BrandID, event.AffiliateID, event.BTag.partition("_")[0])
        for event in events(SPARSE)
    }
    assert len(keys) > 0.999 * COUNT


def test_the_share_of_dirty_records_is_as_documented():
    assert judged(DIRTY) == {
        "good": BLOCKS * (BLOCK - INVALID - DUPLICATES),
        "invalid": BLOCKS * INVALID,
        "duplicates": BLOCKS * DUPLICATES,
        "normalised": BLOCKS * NORMALISED,
    }
    reordered = [line for line in lines(DIRTY) if line.startswith(b'{"AffiliateID"')]
    assert len(reordered) == BLOCKS * REORDERED
