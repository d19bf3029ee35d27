"""Values of records: found by a mapping, normalised by column without guesses, and counted for the ledger."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.codec.documents import SourceMapping
from shipper.codec.normalize import ABSENT, normalizers
from shipper.codec.rules import Columns, tally
from shipper.config.mapping import FIELDS, field_sources
from shipper.delivery.parts import SentEvent
from shipper.model.errors import ConfigError
from shipper.model.wire import ActivityEvent
from tests.cases import each
from tests.unit.test_codec import event


def mapped(field: str, written: Any, *documents: dict[str, Any]) -> list[Any]:
    """The values that the mapping reads for one wire field from some documents."""
    return SourceMapping(field_sources({field: written})).columns(documents)[FIELDS.index(field)]


@each(
    ("written", "document", "value"),
    [
        *(("a", {"a": 1}, 1), ("a", {"a": None}, None), ("a", {}, ABSENT)),
        *(("a.b", {"a": {"b": 1}}, 1), ("a.b", {"a.b": 2, "a": {"b": 1}}, 2)),
        *(("a.b", {"a": value}, ABSENT) for value in ({}, "b", ["b"], None)),
        ("a.b.c", {"a": {"b.c": 1}}, ABSENT),
        ("a.b.c", {"a": {"b": {"c": {"d": 1}}}}, {"d": 1}),
        ("a.0", {"a": [1]}, ABSENT),
        ("a b", {"a b": 1}, 1),
        ("No.", {"No.": 1, "No": {"": 2}}, 1),
        ("No.", {"No": {"": 2}}, ABSENT),
        (".", {".": 1}, 1),
        ({"template": "{No.}/{a}"}, {"No.": 1, "a": 2}, "1/2"),
        ({"from": "a", "values": {"x": "y"}}, {"a": "x"}, "y"),
        ({"from": "a", "values": {"x": "y"}}, {"a": "X"}, "X"),
        ({"from": "a", "values": {"1": "y"}}, {"a": 1}, "y"),
        ({"from": "a", "values": {"true": "y"}}, {"a": True}, "y"),
        ({"from": "a", "values": {"1": "y"}}, {"a": True}, True),
        ({"from": "a", "values": {"None": "y"}}, {"a": None}, None),
        ({"from": "a", "values": {"x": "y"}}, {"a": ["x"]}, ["x"]),
        ({"from": "a", "values": {"x": "y"}, "default": "z"}, {"a": "q"}, "z"),
        ({"from": "a", "values": {"x": "y"}, "default": "z"}, {}, "z"),
        *(({"from": "a", "default": "z"}, {"a": value}, value) for value in ("q", 0, False)),
        *(({"from": "a", "default": "z"}, {"a": value}, "z") for value in ("", None)),
        *(({"from": "a", "default": value}, {}, value) for value in (0, "")),
        ({"from": "a.b", "default": "z"}, {"a": 1}, "z"),
        *(({"const": value}, {"IP": "x"}, value) for value in ("c", 0, "")),
        ({"template": "{a}_{b}"}, {"a": 1, "b": "x"}, "1_x"),
        ({"template": "{a.b}"}, {"a": {"b": "x"}}, "x"),
        ({"template": "{a}{a}"}, {"a": "x"}, "xx"),
        ({"template": "{{{a}}}"}, {"a": "x"}, "{x}"),
        ({"template": "{a}"}, {"a": "{b}", "b": "x"}, "{b}"),
        ({"template": "{a}"}, {"a": ""}, ""),
        ({"template": "{a}_{b}"}, {"a": 1}, ABSENT),
        *(({"template": "{a}"}, {"a": value}, ABSENT) for value in (None, True, 1.5)),
        ({"template": "{a}", "default": "z"}, {}, "z"),
        ({"template": "{a}", "values": {"x": "y"}}, {"a": "x"}, "y"),
    ],
)
def test_a_value_is_found_or_absent(written: Any, document: dict[str, Any], value: Any):
    (found,) = mapped("IP", written, document)
    assert (type(found), found) == (type(value), value)
    assert mapped("IP", written, {}, document, {})[1] == value


def test_an_unmapped_field_is_read_from_the_field_of_the_same_name():
    columns = SourceMapping(field_sources({"IP": "ip"})).columns([{field: field for field in FIELDS}, {}])
    assert columns == [[field if field != "IP" else ABSENT, ABSENT] for field in FIELDS]


@each(
    ("mapping", "used", "unused"),
    [
        ({}, set(FIELDS), {"x"}),
        ({"IP": "ip"}, {"ip"}, {"IP"}),
        ({"IP": "client.ip"}, {"client", "client.ip"}, {"IP", "ip"}),
        ({"IP": {"template": "{a}.{b.c}"}}, {"a", "b"}, {"IP", "c"}),
        ({"IP": {"const": "x"}}, {"BTag"}, {"IP"}),
        ({"IP": "BTag", "BTag": "IP"}, {"IP", "BTag"}, set()),
    ],
)
def test_only_mapped_fields_count_as_known(mapping: dict[str, Any], used: set[str], unused: set[str]):
    names = SourceMapping(field_sources(mapping)).names
    assert used <= names
    assert not unused & names


REFUSED: list[tuple[str, Any, str]] = [
    ("Ip", "a", "did you mean IP?"),
    ("xyzzy", "a", "the fields are EventId, IP"),
    *(("IP", written, "has none") for written in ("", {}, {"default": "x"})),
    *(("IP", written, "is invalid") for written in (5, None, ["a"])),
    ("IP", {"form": "a"}, "form"),
    ("IP", {"from": 5}, "$.from"),
    ("IP", {"from": "a", "const": "b"}, "from and const"),
    ("IP", {"from": "a", "template": "{b}"}, "from and template"),
    ("IP", {"const": "a", "template": "{b}"}, "const and template"),
    ("IP", {"const": "a", "default": "b"}, "const cannot be combined with"),
    ("IP", {"const": "a", "values": {"b": "c"}}, "const cannot be combined with"),
    *(("IP", {"const": value}, "$.const") for value in (1.5, True)),
    *(("IP", {"from": "a", "values": values}, "$.values") for values in ({"b": 1.5}, ["b"])),
    ("IP", {"from": "a", "default": []}, "$.default"),
    *(("IP", {"template": text}, "write literal braces twice") for text in ("{", "a}", "{a{b}}")),
    *(("IP", {"template": text}, "only names in braces") for text in ("{}", "{a!r}", "{a:>3}")),
    *(("IP", {"template": text}, "use const instead") for text in ("plain", "{{a}}")),
]


@each(("field", "written", "says"), REFUSED)
def test_a_nonsensical_mapping_is_refused_by_its_key(field: str, written: Any, says: str):
    with pytest.raises(ConfigError) as caught:
        field_sources({"BTag": "btag", field: written})
    assert caught.value.key == f"mapping.{field}"
    assert says in caught.value.message
    assert "\n" not in caught.value.message


# Normalisers ----------------------------------------------------------------------------------------------------------


NORMALIZERS = normalizers("Europe/Malta", relaxed=())
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
BTAG = "660123_0123456789abcdef0123456789abcdef"
NO_TEXTS: list[Any] = [ABSENT, None, True, False, 1.5, [], {}, ["GB"], {"a": "gb"}]
ODD_TEXTS = [
    *("", " ", "\n", "a\nb", "\0", "é", "ß", "\uff27\uff22", "٣"),
    *("x" * 5000, "1" * 5000, "null", '"', "\\", ",", "{,"),
]

# Field -> the value, and what it becomes.
PUT_RIGHT: dict[str, dict[Any, Any]] = {
    "EventId": {UUID.upper(): UUID, f"{{{UUID}}}": UUID, f"urn:uuid:{UUID}": UUID, UUID.replace("-", ""): UUID},
    "IP": {" 1.2.3.4\t": "1.2.3.4", "::ffff:1.2.3.4": "1.2.3.4", "::FFFF:1.2.3.4": "1.2.3.4"},
    "Timestamp": {
        "2026-11-20T14:30:00+02:00": "2026-11-20T12:30:00Z",
        "2026-11-20T12:30:00.999999999Z": "2026-11-20T12:30:00Z",
        "2026-11-20T12:30:00+0000": "2026-11-20T12:30:00Z",
        "2026-11-20 12:30:00z": "2026-11-20T12:30:00Z",
        "2026-11-20T13:30:00": "2026-11-20T12:30:00Z",
    },
    "BTag": {f" {BTAG}\t": BTAG},
    "ConsumerID": {"17": 17, "007": 7, "0": 0, "9223372036854775808": 2**63},
    "ConsumerCountry": {"gb": "GB", "gBr": "GBR"},
    "ConsumerCurrencyID": {"eur": "EUR"},
    "BrandID": {"17": 17},
    "CustomerCurrencyID": {8: "8", -8: "-8", 0: "0", 2**64: str(2**64)},
    "AffiliateID": {70012: "70012", None: "", ABSENT: ""},
    "ConsumerState": {"nj": "NJ", None: "", ABSENT: ""},
}
LEFT_ALONE: dict[str, list[Any]] = {
    "EventId": [UUID, f"({UUID})", f"{{{UUID}", UUID[:-1], f"{UUID}\n{UUID}", UUID.replace("-", "", 1), 5],
    "IP": ["1.2.3.4", "1.2.3.4.5", "01.2.3.4", "::1", "2001:db8::1", "1.2.3.4\n5.6.7.8", "1.2.3.4,5.6.7.8", 5],
    "Timestamp": [
        *("2026-11-20T12:30:00Z", "2026-11-20T24:00:00Z", "2026-11-20T23:59:60Z", "2026-02-29T00:00:00"),
        *("2026-03-29T02:30:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
        *("2026-11-20T12:30:00.5.5Z", "2026-11-20T12:30.5:00Z", "2026-11-20T12:30:00+02:00.5"),
        *("2026-11-20T12:30:00Z\n2026-11-20T12:30:00Z", 5),
    ],
    "BTag": [BTAG, f"{BTAG}\n", f"\u00a0{BTAG}", 5],
    "ConsumerID": [
        *(17, -1, 2**70, "-17", "+17", " 17", "1_7", "17.0", "1e3", "1\n2", "17\n", "\n17", "²", "\uff11\uff17"),
    ],
    "ConsumerCountry": ["GB", "GB\nFR", "ﬁ", "\u0131", 5],
    "ConsumerCurrencyID": ["EUR", "€", 5],
    "BrandID": [17, "1\n2", "17 "],
    "CustomerCurrencyID": ["8", "", 8.0],
    "AffiliateID": ["", "8", 8.0],
    "ConsumerState": ["", "NJ", "ß", 5],
}


def values_of(field: str) -> list[Any]:
    return [*PUT_RIGHT[field], *PUT_RIGHT[field].values(), *LEFT_ALONE[field], *NO_TEXTS, *ODD_TEXTS]


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


each_field = pytest.mark.parametrize("field", NORMALIZERS)


@each_field
def test_only_unambiguous_values_are_normalised(field: str):
    absent_is_empty = field in {"AffiliateID", "ConsumerState"}
    left_alone = [
        value for value in [*LEFT_ALONE[field], *NO_TEXTS] if not (absent_is_empty and value in (None, ABSENT))
    ]
    for value, normal in [*PUT_RIGHT[field].items(), *zip(left_alone, left_alone, strict=True)]:
        assert same(NORMALIZERS[field]([value])[0], normal), value


@each_field
def test_a_value_is_normalised_independent_of_its_neighbours(field: str):
    normalizer, values = NORMALIZERS[field], values_of(field)
    alone = [normalizer([value])[0] for value in values]
    for (first, second), normal in zip(product(values, repeat=2), product(alone, repeat=2), strict=True):
        assert all(map(same, normalizer([first, second]), normal)), (first, second)
    column = values * 3
    assert all(map(same, normalizer(column), alone * 3))
    assert all(left is right for left, right in zip(column, values * 3, strict=True)), "what was given is not changed"
    assert all(map(same, normalizer(alone), alone)), "twice is once"


def test_each_field_except_two_has_a_normaliser():
    assert set(NORMALIZERS) == set(PUT_RIGHT) == set(LEFT_ALONE)
    assert not set(NORMALIZERS) & {"Username", "ConsumerStatus"}


@each(
    ("field", "rule", "value", "normal"),
    [
        ("IP", "ip", " 1.2.3.4", " 1.2.3.4"),
        ("EventId", "event_id", UUID.upper(), UUID.upper()),
        ("Timestamp", "timestamp", "2026-11-20T12:30:00.5Z", "2026-11-20T12:30:00.5Z"),
        ("ConsumerState", "state", "nj", "nj"),
        ("ConsumerState", "state", None, ""),
        ("ConsumerID", "consumer_id", "017", 17),
        ("AffiliateID", "affiliate_id", 5, "5"),
    ],
)
def test_a_relaxed_rule_leaves_values_of_the_type_unchanged(field: str, rule: str, value: Any, normal: Any):
    assert normalizers(None, relaxed=[rule])[field]([value]) == [normal]


def test_a_naive_time_is_the_first_instant_at_which_the_wall_clock_showed_it():
    # By another way than the normaliser's: from UTC to the wall clock, every half an hour of a year.
    zone = ZoneInfo("Europe/Malta")
    timestamps = NORMALIZERS["Timestamp"]
    first: dict[str, str] = {}
    begin = datetime(2025, 12, 31, tzinfo=UTC)
    for half_hours in range(2 * 24 * 367):
        instant = begin + timedelta(minutes=30 * half_hours)
        shown = instant.astimezone(zone).strftime("%Y-%m-%dT%H:%M:%S")
        first.setdefault(shown, instant.strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert timestamps(list(first)) == list(first.values())
    every = [(datetime(2026, 1, 1) + timedelta(minutes=30 * count)).isoformat() for count in range(2 * 24 * 365)]
    never = [shown for shown in every if shown not in first]
    assert len(never) == 2
    assert timestamps(never) == never


# Counts ---------------------------------------------------------------------------------------------------------------


def activity(**changes: object) -> ActivityEvent:
    return ActivityEvent(**event(**changes))


def test_events_are_counted_by_hour_brand_affiliate_and_media():
    events = [
        activity(Timestamp="2026-11-20T12:30:00Z", BrandID=7, AffiliateID="", BTag="660123_" + "0" * 32),
        activity(Timestamp="2026-11-20T12:59:59Z", BrandID=7, AffiliateID="", BTag="660123_" + "1" * 32),
        activity(Timestamp="2026-11-20T13:00:00Z", BrandID=7, AffiliateID="", BTag="660123_" + "1" * 32),
        activity(Timestamp="2026-11-20T13:00:00Z", BrandID=8, AffiliateID="x", BTag="1_" + "1" * 32),
    ]
    assert tally(Columns.of(events)) == {
        ("2026-11-20T12", 7, "", "660123"): 2,
        ("2026-11-20T13", 7, "", "660123"): 1,
        ("2026-11-20T13", 8, "x", "1"): 1,
    }
    assert tally(Columns.of([])) == {}


def test_events_accepted_by_relaxed_rules_are_counted_without_missing_fields():
    strange = [
        activity(BTag="somebody@example.com" * 3),
        activity(BTag=""),
        activity(BTag="_" * 40),
        activity(BTag="9" * 80),
    ]
    assert tally(Columns.of(strange)) == {("2026-11-20T12", 7, "", ""): 4}
    uncounted = [
        activity(Timestamp="yesterday"),
        activity(Timestamp=""),
        activity(BrandID=2**63),
        activity(BrandID=-(2**70)),
    ]
    assert tally(Columns.of(uncounted)) == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from(["", "a"]), st.integers(0, 99)), max_size=60
    )
)
def test_every_event_is_counted_once(fields: list[tuple[int, int, str, int]]):
    events = [
        activity(
            Timestamp=f"2026-11-20T1{hour}:00:00Z", BrandID=brand, AffiliateID=affiliate, BTag=f"{media}_{'0' * 32}"
        )
        for hour, brand, affiliate, media in fields
    ]
    assert tally(Columns.of(events)) == Counter(
        (f"2026-11-20T1{hour}", brand, affiliate, str(media)) for hour, brand, affiliate, media in fields
    )


def test_a_sent_event_is_counted_like_the_event_read():
    read = activity(Timestamp="2026-11-20T12:30:00Z", AffiliateID="x")
    sent = msgspec.convert(msgspec.to_builtins(read), SentEvent)
    assert tally(Columns.of([sent])) == tally(Columns.of([read])) != {}
