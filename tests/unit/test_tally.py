"""The counts of the ledger, by hour, brand, affiliate and media."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shipper.codec.rules import Columns, tally
from shipper.delivery.parts import SentEvent
from shipper.model.wire import ActivityEvent
from tests.unit.test_codec import event


def made(**changes: object) -> ActivityEvent:
    return ActivityEvent(**event(**changes))


def test_events_are_counted_by_hour_brand_affiliate_and_media():
    events = [
        made(Timestamp="2026-11-20T12:30:00Z", BrandID=7, AffiliateID="", BTag="660123_" + "0" * 32),
        made(Timestamp="2026-11-20T12:59:59Z", BrandID=7, AffiliateID="", BTag="660123_" + "1" * 32),
        made(Timestamp="2026-11-20T13:00:00Z", BrandID=7, AffiliateID="", BTag="660123_" + "1" * 32),
        made(Timestamp="2026-11-20T13:00:00Z", BrandID=8, AffiliateID="x", BTag="1_" + "1" * 32),
    ]
    assert tally(Columns.of(events)) == {
        ("2026-11-20T12", 7, "", "660123"): 2,
        ("2026-11-20T13", 7, "", "660123"): 1,
        ("2026-11-20T13", 8, "x", "1"): 1,
    }
    assert tally(Columns.of([])) == {}


def test_events_accepted_by_relaxed_rules_are_counted_without_missing_fields():
    strange = [made(BTag="somebody@example.com" * 3), made(BTag=""), made(BTag="_" * 40), made(BTag="9" * 80)]
    assert tally(Columns.of(strange)) == {("2026-11-20T12", 7, "", ""): 4}
    uncounted = [made(Timestamp="yesterday"), made(Timestamp=""), made(BrandID=2**63), made(BrandID=-(2**70))]
    assert tally(Columns.of(uncounted)) == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from(["", "a"]), st.integers(0, 99)), max_size=60
    )
)
def test_every_event_is_counted_once(fields: list[tuple[int, int, str, int]]):
    events = [
        made(Timestamp=f"2026-11-20T1{hour}:00:00Z", BrandID=brand, AffiliateID=affiliate, BTag=f"{media}_{'0' * 32}")
        for hour, brand, affiliate, media in fields
    ]
    assert tally(Columns.of(events)) == Counter(
        (f"2026-11-20T1{hour}", brand, affiliate, str(media)) for hour, brand, affiliate, media in fields
    )


def test_a_sent_event_is_counted_like_the_event_read():
    read = made(Timestamp="2026-11-20T12:30:00Z", AffiliateID="x")
    sent = msgspec.convert(msgspec.to_builtins(read), SentEvent)
    assert tally(Columns.of([sent])) == tally(Columns.of([read])) != {}
