"""
The rules of the wire form: what each is called, what it says, and how a whole column is checked at once.

Half of the rules live in the types of `wire.ActivityEvent` and are checked while decoding. The checks here need
another look at the values. They take a column (one field of many records) because one call in C over a joined
column costs a tenth of a call per record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Annotated, Final, Literal, NamedTuple, cast, get_type_hints

import msgspec

from shipper.codec.columns import Columns
from shipper.model.wire import ActivityEvent

# Field -> rule id. Where dead letters, metrics and `shipper validate` speak of a rule, they use the id.
FIELD_RULES: Final = {
    "EventId": "event_id",
    "IP": "ip",
    "Timestamp": "timestamp",
    "BTag": "btag",
    "ConsumerID": "consumer_id",
    "ConsumerCountry": "country",
    "ConsumerCurrencyID": "currency",
    "Username": "username",
    "BrandID": "brand_id",
    "CustomerCurrencyID": "customer_currency",
    "ConsumerStatus": "status",
    "AffiliateID": "affiliate_id",
    "ConsumerState": "state",
}

MESSAGES: Final = {
    "json": "the line is not one JSON object",
    "encoding": "the line is not UTF-8",
    "csv": "the row is not CSV with as many values as the header",
    "oversized": "the line is longer than input.max_record_bytes",
    "stuck": "validating the record did not come to an end at earlier starts",
    "repeated_key": "the object names a field more than once",
    "unknown_field": "the object has a field that the wire form does not have",
    "event_id": "EventId must be a UUID in its canonical form: 8-4-4-4-12 lower-case hexadecimal digits",
    "ip": "IP must be an IPv4 address in dotted-decimal form, without leading zeros",
    "timestamp": "Timestamp must be a real instant written YYYY-MM-DDThh:mm:ssZ, not later than "
    "records.max_future_seconds from now",
    "btag": "BTag must be digits, an underscore and 32 hexadecimal digits",
    "consumer_id": "ConsumerID must be a whole number from 1 to 9223372036854775807",
    "country": "ConsumerCountry must be two letters A-Z",
    "currency": "ConsumerCurrencyID must be three letters A-Z",
    "username": "Username must be a non-empty string",
    "brand_id": "BrandID must be a whole number from 1 to 9223372036854775807",
    "customer_currency": "CustomerCurrencyID must be a string",
    "status": "ConsumerStatus must be a non-empty string",
    "affiliate_id": "AffiliateID must be a string (it may be empty)",
    "state": "ConsumerState must be two letters A-Z or empty",
}

FROM_THE_FUTURE: Final = "Timestamp is later than records.max_future_seconds from now, by this machine's clock"
ANY_TIME: Final = "9999-12-31T23:59:59Z"

# Far below the interpreter's own limit, which depends on who calls: the verdict on a record must not.
NESTING_MAX: Final = 200

# Of 13 names and 11 strings. Only a repeated key, an unknown field or an escape can add to those of a valid record.
_QUOTES: Final = 48
# A string without an end reaches to the end of the bytes, so that each quote is looked at once.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"{}[]"))
_DIGITS: Final = b"0123456789"
_TO_FIVE: Final = b"012345"
_HEX: Final = b"0123456789abcdef"
_DOT_TO_COMMA: Final = bytes.maketrans(b".", b",")
# Possessive, which costs a third less; nothing within is optional, so cpython#106052 does not concern it.
_BTAGS: Final = re.compile(r"(?:[0-9]++_[0-9a-fA-F]{32}\n)*+")
_ip = attrgetter("IP")
_octets: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=255)]])
_instants: Final = msgspec.json.Decoder(list[datetime])


def are_event_ids(column: Sequence[str]) -> bool:
    """Return whether each value, 36 characters long by its type, is a canonical lower-case UUID."""
    joined = "".join(column).encode()
    dashes = b"-" * len(column)
    return (
        joined[8::36] == dashes
        and joined[13::36] == dashes
        and joined[18::36] == dashes
        and joined[23::36] == dashes
        and joined.translate(None, _HEX) == dashes * 4
    )


def are_ips(column: Sequence[str]) -> bool:
    """
    Return whether each value is a dotted-decimal IPv4 address.

    Without their digits the joined values must be exactly `...,...,...`; then the octets are read as one JSON
    array of integers, which knows no leading zeros, blanks or signs.
    """
    joined = ",".join(column).encode()
    if joined.translate(None, _DIGITS) != b"...," * (len(column) - 1) + b"...":
        return False
    try:
        _octets.decode(b"[" + joined.translate(_DOT_TO_COMMA) + b"]")
    except msgspec.MsgspecError:
        return False
    return True


def are_timestamps(column: Sequence[str], latest: str) -> bool:
    """
    Return whether each value, 20 characters long by its type, is `YYYY-MM-DDThh:mm:ssZ`, real, and not after `latest`.

    Args:
        latest: The last instant allowed, in the same form, so that text compares like time.
    """
    joined = '","'.join(column).encode()
    if joined.translate(None, _DIGITS) != b'--T::Z","' * (len(column) - 1) + b"--T::Z":
        return False
    first, last = min(column), max(column)
    if first[:10] == last[:10] and _are_times(joined, len(column)):
        joined = last.encode()  # of one day, each is real if the last is
    try:
        _instants.decode(b'["' + joined + b'"]')
    except msgspec.MsgspecError:
        return False
    return last <= latest


def _are_times(joined: bytes, count: int) -> bool:
    """Return whether `Thh:mm:ssZ` stands at its place in each of `count` instants, with real minutes and seconds."""
    return (
        joined[10::23] == b"T" * count
        and joined[13::23] == joined[16::23] == b":" * count
        and joined[19::23] == b"Z" * count
        and not joined[14::23].translate(None, _TO_FIVE)
        and not joined[17::23].translate(None, _TO_FIVE)
    )


def are_btags(column: Sequence[str]) -> bool:
    """Return whether each value is `<digits>_<32 hexadecimal digits>`; the case is the producer's."""
    joined = "\n".join(column) + "\n"
    return _BTAGS.fullmatch(joined) is not None and joined.count("\n") == len(column)


class ColumnCheck(NamedTuple):
    """How a field is checked beyond its type: the rule, the field's column, and the test of it."""

    rule: str
    column_of: Callable[[Columns], Sequence[str]]
    is_good: Callable[[Sequence[str], str], bool]  # with the last instant allowed


def column_checks(relaxed: Collection[str]) -> list[ColumnCheck]:
    """List the checks of the fields whose rule is not relaxed."""
    checks = [
        ColumnCheck("event_id", attrgetter("event_ids"), lambda column, _: are_event_ids(column)),
        ColumnCheck("ip", lambda columns: list(map(_ip, columns.events)), lambda column, _: are_ips(column)),
        ColumnCheck("timestamp", attrgetter("timestamps"), are_timestamps),
        ColumnCheck("btag", attrgetter("b_tags"), lambda column, _: are_btags(column)),
    ]
    return [check for check in checks if check.rule not in relaxed]


def event_type(*, relaxed: Collection[str], statuses: Collection[str], keeps_unknown: bool) -> type[ActivityEvent]:
    """
    Make the type by which events are decoded: `ActivityEvent`, or a likeness of it.

    Args:
        relaxed: Rules that are reduced to the plain type of the field.
        statuses: The only values of ConsumerStatus; empty for any.
        keeps_unknown: Whether an event may have more fields.
    """
    if not relaxed and not statuses and not keeps_unknown:
        return ActivityEvent
    strict = get_type_hints(ActivityEvent, include_extras=True)
    types = {field: plain_type(field) if rule in relaxed else strict[field] for field, rule in FIELD_RULES.items()}
    if statuses:
        types["ConsumerStatus"] = Literal[tuple(statuses)]
    made = msgspec.defstruct(
        "RelaxedEvent", list(types.items()), frozen=True, gc=False, forbid_unknown_fields=not keeps_unknown
    )
    return cast(type[ActivityEvent], made)


def plain_type(field: str) -> type:
    """Return the type that a relaxed field still must have."""
    return int if field in {"ConsumerID", "BrandID"} else str


def latest_timestamp(now_s: float, max_future_seconds: float) -> str:
    """Write the last instant that a Timestamp may name; `now_s` in seconds since the epoch."""
    latest = datetime.fromtimestamp(now_s, UTC) + timedelta(seconds=max_future_seconds)
    return latest.strftime("%Y-%m-%dT%H:%M:%SZ")


def may_repeat_keys(data: bytes, records: int) -> bool:
    """Return cheaply whether a key may stand twice in one of `records` that are otherwise valid; False is certain."""
    quotes = data.count(b'"')
    if quotes != _QUOTES * records and b"\\\\" not in data:  # no backslash is a value: behind one, a quote ends nothing
        quotes -= data.count(b'\\"')
    return quotes != _QUOTES * records


def repeats_key(record: bytes) -> bool:
    """Return whether a valid JSON text is an object that names a field twice, however it is spelled."""
    return record.lstrip()[:1] == b"{" and bool(_repeats(record.decode()))


def _is_repeated(pairs: list[tuple[str, object]]) -> bool:
    return len({name for name, _ in pairs}) < len(pairs)


# Of the objects within an object, it sees only what this function made of them; numbers may be of any length.
_repeats: Final = json.JSONDecoder(object_pairs_hook=_is_repeated, parse_int=str, parse_float=str).decode


def may_nest_deeply(data: bytes, objects: int) -> bool:
    """Return whether one of many records may be nested too deep; a cheap test. `objects` is the number of records."""
    return data.count(b"{") + data.count(b"[") >= objects + NESTING_MAX


def nests_deeply(record: bytes) -> bool:
    """Return whether objects and arrays lie in one another deeper than permitted."""
    depth = 0
    for bracket in _STRING.sub(b"", record).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"{[" else -1
        if depth > NESTING_MAX:
            return True
    return False
