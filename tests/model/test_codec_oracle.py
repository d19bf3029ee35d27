"""The codec against an oracle that knows nothing of it: whole records, one by one, with the means of the library."""

from __future__ import annotations

import ipaddress
import json
import re
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec import FIELD_RULES, Codec
from shipper.codec.rules import are_btags, are_event_ids, are_ips, are_timestamps
from tests.fakes import strict_records
from tests.unit.test_codec import BTAG_HEX, LATEST, encode, event, good_lines, line

MAX_RECORD_BYTES = 1500


def codec() -> Codec:
    return Codec(strict_records(0), max_record_bytes=MAX_RECORD_BYTES)


# The oracle ----------------------------------------------------------------------------------------------------------


def _has_letters(value: Any, count: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[A-Z]{{{count}}}", value) is not None


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _is_ip(value: Any) -> bool:
    try:
        return isinstance(value, str) and str(ipaddress.IPv4Address(value)) == value
    except ValueError:
        return False


def _is_timestamp(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"(?a:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", value):
        return False
    try:
        instant = datetime.fromisoformat(value[:-1]).replace(tzinfo=UTC)
    except ValueError:
        return False
    return instant - datetime.fromisoformat(LATEST) <= timedelta(0)


GOOD_FIELD = {
    "EventId": lambda value: (
        isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value))
    ),
    "IP": _is_ip,
    "Timestamp": _is_timestamp,
    "BTag": lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9]+_[0-9a-fA-F]{32}", value)),
    "ConsumerID": _is_id,
    "ConsumerCountry": lambda value: _has_letters(value, 2),
    "ConsumerCurrencyID": lambda value: _has_letters(value, 3),
    "Username": lambda value: isinstance(value, str) and value != "",
    "BrandID": _is_id,
    "CustomerCurrencyID": lambda value: isinstance(value, str),
    "ConsumerStatus": lambda value: isinstance(value, str) and value != "",
    "AffiliateID": lambda value: isinstance(value, str),
    "ConsumerState": lambda value: value == "" or _has_letters(value, 2),
}


def bad_fields(document: dict[str, Any]) -> set[str]:
    """Name the fields that break their rule; `?` stands for a field too many."""
    bad = {field for field, is_good in GOOD_FIELD.items() if field not in document or not is_good(document[field])}
    return bad | ({"?"} if set(document) - set(GOOD_FIELD) else set())


# Almost valid records ------------------------------------------------------------------------------------------------

NEAR: dict[str, st.SearchStrategy[Any]] = {
    "EventId": st.uuids().map(str)
    | st.uuids().map(lambda each: str(each).upper())
    | st.text("0a-", min_size=35, max_size=37),
    "IP": st.lists(st.integers(-1, 257).map(str) | st.sampled_from(["", "00", "1 "]), min_size=3, max_size=5).map(
        ".".join
    ),
    "Timestamp": st.datetimes(datetime(1999, 1, 1), datetime(2027, 1, 1)).map(lambda each: f"{each:%Y-%m-%dT%H:%M:%SZ}")
    | st.datetimes().map(datetime.isoformat)
    | st.from_regex(r"\A20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-6][0-9]:[0-6][0-9]Z\Z"),
    "BTag": st.from_regex(r"\A[0-9]{0,3}[_-]?[0-9a-gA-G]{31,33}\n?\Z") | st.just(f"7_{BTAG_HEX}"),
    "ConsumerID": st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1, 2**63 - 1, 2**63]),
    "ConsumerCountry": st.text("ABZaz1 É", max_size=3),
    "ConsumerCurrencyID": st.text("ABZaz1 É", max_size=4),
    "Username": st.text(max_size=5),
    "BrandID": st.integers(-1, 2) | st.booleans() | st.sampled_from([1.0, 2**63 - 1, 2**64]),
    "CustomerCurrencyID": st.text(max_size=5) | st.integers(),
    "ConsumerStatus": st.text(max_size=5),
    "AffiliateID": st.text(max_size=5) | st.none(),
    "ConsumerState": st.text("ABZaz1 É", max_size=3),
}
ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.lists(st.none(), max_size=2)
    | st.just({"a": 1})
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A good record in which up to two fields got another value, and perhaps one is missing or too many."""
    document = event(ConsumerID=draw(st.integers(1, 2**63 - 1)))
    for field in draw(st.lists(st.sampled_from(sorted(NEAR)), max_size=2)):
        document[field] = draw(NEAR[field] | NEAR[field] | ANYTHING)
    match draw(st.integers(0, 9)):
        case 0:
            del document[draw(st.sampled_from(sorted(document)))]
        case 1:
            document[draw(st.text(max_size=5))] = draw(ANYTHING)
        case 2:
            items = list(document.items())
            draw(st.randoms(use_true_random=False)).shuffle(items)
            document = dict(items)
        case _:
            pass
    return document


@settings(max_examples=40, deadline=None)
@given(
    st.lists(documents(), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", "\t: ")]),
)
def test_whole_records_get_the_verdict_of_an_independent_oracle(
    records: list[dict[str, Any]], ensure_ascii: bool, separators: tuple[str, str]
):
    lines = [json.dumps(each, ensure_ascii=ensure_ascii, separators=separators).encode() for each in records]
    verdicts = [bad_fields(each) for each in records]
    pieces = encode(b"\n".join(lines) + b"\n", codec=codec())
    assert good_lines(pieces) == [raw for raw, bad in zip(lines, verdicts, strict=True) if not bad]
    refused = [rejection for piece in pieces for rejection in piece.span.rejections]
    expected = [(raw, bad) for raw, bad in zip(lines, verdicts, strict=True) if bad]
    assert [rejection.raw for rejection in refused] == [raw for raw, _ in expected]
    for rejection, (_, bad) in zip(refused, expected, strict=True):
        broken = {FIELD_RULES.get(field, "unknown_field") for field in bad}
        assert rejection.rule in broken
        assert set(rejection.faults or [rejection.rule]) == broken


# Columns -------------------------------------------------------------------------------------------------------------

NASTY = {
    are_ips: st.one_of(NEAR["IP"], st.text("0129.,- []", max_size=9), st.just("192.0.2.1")),
    are_btags: st.one_of(NEAR["BTag"], st.text("1_a\n", max_size=6), st.just(f"7_{BTAG_HEX}\n8_{BTAG_HEX}")),
    are_event_ids: st.one_of(st.uuids().map(str), st.text("0a-G\u0660", min_size=36, max_size=36)),
    lambda column: are_timestamps(column, LATEST): st.one_of(
        st.datetimes(datetime(1, 1, 1), datetime(2027, 1, 1)).map(lambda each: f"{each:%Y-%m-%dT%H:%M:%SZ}".zfill(20)),
        st.times().map(lambda each: f"2026-11-10T{each:%H:%M:%S}Z"),
        st.text("01256:", min_size=8, max_size=8).map(lambda each: f"2026-11-10T{each}Z"),
        st.text('01-T:Z",', min_size=20, max_size=20),
        st.sampled_from(
            [
                '1-2-3T4:5:Z","--T::Z',
                "20261110123000202611",
                "2026-02-30T00:00:00Z",
                *("2026-11-10T1:230:00Z", "2026-11-10T12:3:000Z", "2026-11-10T12:300:0Z", "2026-11-10T12:30:0Z0"),
                *("2026-11-1T012:30:00Z", "2026-11-10T24:00:00Z", "2026-11-10T12:60:00Z", "2026-11-10T12:30:60Z"),
            ]
        ),
    ),
}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(NASTY)).flatmap(
        lambda check: st.tuples(st.just(check), st.lists(NASTY[check], min_size=1, max_size=5))
    )
)
def test_a_column_is_good_if_and_only_if_each_of_its_values_is(case: tuple[Any, list[str]]):
    check, column = case
    assert check(column) == all(check([value]) for value in column)


# Volume --------------------------------------------------------------------------------------------------------------


def spoil(raw: bytes, other: bytes, rng: Random) -> bytes:
    """Do one of the things to a line that files have suffered."""
    at, to = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    match rng.randrange(9):
        case 0:
            return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        case 1:
            return raw[:at]
        case 2:
            return raw[:at] + raw[to:]
        case 3:
            return raw[:at] + other[rng.randrange(len(other) + 1) :]
        case 4:
            return raw + rng.choice([b"", b",", b" ", b",null,"]) + other
        case 5:
            return raw[:at] + b"\n" + raw[at + rng.randrange(2) :]
        case 6:
            return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :] if at < len(raw) else raw + b"}"
        case 7:
            return raw[at:to] * 2 + raw[to:]
        case _:
            return rng.choice([b"", b"\r", b" ", b"null", b"{}", b"\0" * 9, b"x" * (MAX_RECORD_BYTES + 1)])


@pytest.mark.long
def test_thousands_of_spoiled_lines_get_the_verdicts_that_each_gets_alone(rng: Random):
    total = 0
    while total < 6_000:
        spoiled_in_100 = rng.choice([0, 1, 5, 30, 90])
        lines = [line(number, Username="u" * rng.randrange(1, 60), ConsumerID=number + 1) for number in range(300)]
        for number in range(len(lines)):
            if rng.randrange(100) < spoiled_in_100:
                lines[number] = spoil(lines[number], rng.choice(lines), rng)
        data = b"\n".join(lines)
        pieces = encode(
            data + b"\n",
            start=1,
            codec=codec(),
            room_events=rng.choice([1, 7, 100, 1000]),
            room_bytes=rng.choice([2000, 9000, 1 << 20]),
        )
        good: list[bytes] = []
        rules: list[str] = []
        records = 0
        for raw in data.split(b"\n"):
            (piece,) = encode(raw + b"\n", start=1, codec=codec())
            good += good_lines([piece])
            rules += [rejection.rule for rejection in piece.span.rejections]
            records += piece.span.records
            total += 1
        assert good_lines(pieces) == good
        assert [rejection.rule for piece in pieces for rejection in piece.span.rejections] == rules
        assert sum(piece.span.records for piece in pieces) == records == len(good) + len(rules)
        if good:
            assert len(json.loads(b"[" + b",".join(good) + b"]")) == len(good)
