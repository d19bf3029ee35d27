"""Normalisers by column: independent of neighbours, idempotent, and without guesses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from shipper.codec.normalize import ABSENT, normalizers
from tests.cases import each

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
