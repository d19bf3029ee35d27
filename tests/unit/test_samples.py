"""Sample events are valid, formatted like msgspec, and reproducible by seed."""

from __future__ import annotations

import ipaddress
import re
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from uuid import UUID

import msgspec
import pytest

from shipper.model import wire
from shipper.sandbox.samples import BRANDS, MARKETING_SOURCES, sample_lines
from tests.cases import each

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


def test_same_arguments_give_the_same_bytes():
    assert list(sample_lines(100, seed=7, end=END)) == list(sample_lines(100, seed=7, end=END))


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


def test_lines_have_about_the_size_of_real_ones():
    lines = list(sample_lines(1000, end=END))
    assert 300 <= sum(map(len, lines)) / len(lines) <= 400


def test_zero_records_can_be_requested():
    assert list(sample_lines(0, end=END)) == []


@pytest.mark.parametrize(
    "wrong",
    [{"end": datetime(2026, 1, 1)}, {"end": END, "days": 0}, {"end": END, "count": -1}],
)
def test_invalid_arguments_raise_at_once(wrong):
    with pytest.raises(AssertionError):
        sample_lines(wrong.pop("count", 1), **wrong)
