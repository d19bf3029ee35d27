"""
The rules of the wire form: their ids, their messages, and checks of whole columns.

Half of the rules are expressed by the types of `wire.ActivityEvent` and checked while decoding. The checks here take a
column (one field of many records), because one call in C for a joined column costs a tenth of a call per record.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, cast, get_type_hints

import msgspec

from shipper.model.records import LedgerKey
from shipper.model.wire import ActivityEvent

# Field -> rule id, as in dead letters, metrics and `shipper validate`.
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
    "csv": "the row is not valid CSV, or its number of values differs from the header",
    "oversized": "the line is longer than input.max_record_bytes",
    "stuck": "validating the record did not finish in earlier runs",
    "repeated_key": "the object contains a field more than once",
    "unknown_field": "the object has an unknown field",
    "event_id": "EventId must be a UUID in its canonical form: 8-4-4-4-12 lower-case hexadecimal digits",
    "ip": "IP must be an IPv4 address in dotted-decimal form, without leading zeros",
    "timestamp": "Timestamp must be a real time in the form YYYY-MM-DDThh:mm:ssZ, at most records.max_future_seconds "
    "in the future",
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

FUTURE_TIMESTAMP: Final = "Timestamp is more than records.max_future_seconds in the future, by this machine's clock"
_NO_DATE: Final = "Timestamp has a date that does not exist in the calendar"
_NO_TIME: Final = "Timestamp has a time of day that does not exist; the last one is 23:59:59"
_SKIPPED_TIME: Final = (
    "Timestamp is a local time that does not exist in records.assume_timezone, because the clocks skipped it; write it "
    "in UTC or with its offset"
)
ANY_TIME: Final = "9999-12-31T23:59:59Z"

# Far below the interpreter's limit, which depends on the call stack: the validity of a record must not.
NESTING_MAX: Final = 200

_TIME_PARTS: Final = re.compile(
    r"[ \t]*([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?"
    r"([Zz]|[+-][0-9]{2}:?[0-9]{2})?[ \t]*"
)
# Of 13 names and 11 strings. A valid record has more only with a repeated key, an unknown field or an escape.
_QUOTES: Final = 48
# An unterminated string extends to the end of the bytes, so that each quote is read once.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"{}[]"))
_DIGITS: Final = b"0123456789"
_TO_FIVE: Final = b"012345"
_HEX: Final = b"0123456789abcdef"
_DOT_TO_COMMA: Final = bytes.maketrans(b".", b",")
# Possessive, which is a third faster; nothing within is optional, so cpython#106052 does not apply.
_BTAGS: Final = re.compile(r"(?:[0-9]++_[0-9a-fA-F]{32}\n)*+")
_hour: Final = itemgetter(slice(0, 13))
_media: Final = itemgetter(slice(0, -33))  # the part before `_` and 32 digits
_is_hour: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d", re.ASCII).fullmatch
_is_media: Final = re.compile(r"\d{0,20}", re.ASCII).fullmatch
_BRAND_ID_MAX: Final = 2**63 - 1  # for the state database
_octets: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=255)]])
_instants: Final = msgspec.json.Decoder(list[datetime])


class Columns(NamedTuple):
    """Decoded events, and the fields used by several stages; one item per event in each list."""

    events: Sequence[Any]
    event_ids: list[str]
    timestamps: list[str]
    b_tags: list[str]
    consumer_ids: list[int]

    @classmethod
    def of(cls, events: Sequence[Any]) -> Columns:
        fields = ("EventId", "Timestamp", "BTag", "ConsumerID")
        event_ids, timestamps, b_tags, consumer_ids = (list(map(attrgetter(field), events)) for field in fields)
        return cls(events, event_ids, timestamps, b_tags, consumer_ids)

    def of_field(self, field: str) -> list[Any]:
        return list(map(attrgetter(field), self.events))


def tally(columns: Columns) -> dict[LedgerKey, int]:
    """Count events by ledger key; those without a valid hour or brand are omitted, invalid media become ""."""
    hours, media = map(_hour, columns.timestamps), map(_media, columns.b_tags)
    counts = Counter(zip(hours, columns.of_field("BrandID"), columns.of_field("AffiliateID"), media, strict=True))
    if (
        all(map(_is_hour, {key[0] for key in counts}))
        and all(map(_is_media, {key[3] for key in counts}))
        and all(abs(brand_id) <= _BRAND_ID_MAX for brand_id in {key[1] for key in counts})
    ):
        return counts
    corrected: Counter[LedgerKey] = Counter()
    for (hour, brand_id, affiliate_id, digits), count in counts.items():
        if _is_hour(hour) and abs(brand_id) <= _BRAND_ID_MAX:
            corrected[hour, brand_id, affiliate_id, digits if _is_media(digits) else ""] += count
    return corrected


def are_event_ids(column: Sequence[str]) -> bool:
    """Return whether each value, whose type ensures 36 characters, is a canonical lower-case UUID."""
    joined = "".join(column).encode()
    dashes = b"-" * len(column)
    has_dashes = joined[8::36] == joined[13::36] == joined[18::36] == joined[23::36] == dashes
    return has_dashes and joined.translate(None, _HEX) == dashes * 4


def are_ips(column: Sequence[str]) -> bool:
    """
    Return whether each value is a dotted-decimal IPv4 address.

    Without digits, the joined values must be exactly `...,...,...`. Then the octets are parsed as a JSON array of
    integers, which does not allow leading zeros, blanks or signs.
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
    """Return whether each value, of 20 characters, is a real UTC time up to `latest`, which has the same form."""
    joined = '","'.join(column).encode()
    if joined.translate(None, _DIGITS) != b'--T::Z","' * (len(column) - 1) + b"--T::Z":
        return False
    first, last = min(column), max(column)
    if first[:10] == last[:10] and _are_times(joined, len(column)):
        joined = last.encode()  # on the same day, all are real if the last one is
    try:
        _instants.decode(b'["' + joined + b'"]')
    except msgspec.MsgspecError:
        return False
    return last <= latest


def _are_times(joined: bytes, count: int) -> bool:
    """Return whether each of `count` times has the form `Thh:mm:ssZ` with valid minutes and seconds."""
    return (
        joined[10::23] == b"T" * count
        and joined[13::23] == joined[16::23] == b":" * count
        and joined[19::23] == b"Z" * count
        and not joined[14::23].translate(None, _TO_FIVE)
        and not joined[17::23].translate(None, _TO_FIVE)
    )


def are_btags(column: Sequence[str]) -> bool:
    """Return whether each value is `<digits>_<32 hexadecimal digits>` in either case."""
    joined = "\n".join(column) + "\n"
    return _BTAGS.fullmatch(joined) is not None and joined.count("\n") == len(column)


class ColumnCheck(NamedTuple):
    """A check of a field beyond its type: the rule, the field's column, and the test."""

    rule: str
    column_of: Callable[[Columns], Sequence[str]]
    is_good: Callable[[Sequence[str], str], bool]  # the second argument is the latest valid time


def column_checks(relaxed: Collection[str]) -> list[ColumnCheck]:
    """Return the checks of the rules that are not relaxed."""
    checks = [
        ColumnCheck("event_id", attrgetter("event_ids"), lambda column, _: are_event_ids(column)),
        ColumnCheck("ip", lambda columns: columns.of_field("IP"), lambda column, _: are_ips(column)),
        ColumnCheck("timestamp", attrgetter("timestamps"), are_timestamps),
        ColumnCheck("btag", attrgetter("b_tags"), lambda column, _: are_btags(column)),
    ]
    return [check for check in checks if check.rule not in relaxed]


def event_type(*, relaxed: Collection[str], statuses: Collection[str], keeps_unknown: bool) -> type[ActivityEvent]:
    """
    Return the type for decoding events: `ActivityEvent` or a relaxed variant.

    Args:
        relaxed: Rules reduced to the plain type of the field.
        statuses: The valid values of ConsumerStatus; empty = any.
        keeps_unknown: Whether an event may have more fields.
    """
    if not relaxed and not statuses and not keeps_unknown:
        return ActivityEvent
    strict = get_type_hints(ActivityEvent, include_extras=True)
    types = {field: plain_type(field) if rule in relaxed else strict[field] for field, rule in FIELD_RULES.items()}
    if statuses:
        types["ConsumerStatus"] = Literal[tuple(statuses)]
    relaxed_event = msgspec.defstruct(
        "RelaxedEvent", list(types.items()), frozen=True, gc=False, forbid_unknown_fields=not keeps_unknown
    )
    return cast(type[ActivityEvent], relaxed_event)


def plain_type(field: str) -> type:
    """Return the type that a relaxed field must still have."""
    return int if field in {"ConsumerID", "BrandID"} else str


def why_not_real(value: object, *, has_zone: bool) -> str:
    """Explain why a refused Timestamp, as normalised, is not an instant; empty if its form is wrong."""
    parts = _TIME_PARTS.fullmatch(value) if isinstance(value, str) else None
    if parts is None:
        return ""
    year, month, day, hour, minute, second = map(int, parts.groups()[:6])
    try:
        date(year, month, day)
    except ValueError:
        return _NO_DATE
    if hour > 23 or minute > 59 or second > 59:
        return _NO_TIME
    return _SKIPPED_TIME if has_zone and not parts[7] and 1 < year < 9999 else ""


def latest_timestamp(now_s: float, max_future_seconds: float) -> str:
    """Return the latest valid Timestamp; `now_s` in seconds since the epoch."""
    latest = datetime.fromtimestamp(now_s, UTC) + timedelta(seconds=max_future_seconds)
    return latest.strftime("%Y-%m-%dT%H:%M:%SZ")


def may_repeat_keys(data: bytes, records: int) -> bool:
    """Return whether one of `records` otherwise valid records may repeat a key; a cheap test, False is certain."""
    quotes = data.count(b'"')
    if quotes != _QUOTES * records and b"\\\\" not in data:  # without escaped backslashes, `\"` never ends a string
        quotes -= data.count(b'\\"')
    return quotes != _QUOTES * records


def repeats_key(record: bytes) -> bool:
    """Return whether a valid JSON text is an object with a repeated key, in any spelling."""
    return record.lstrip()[:1] == b"{" and bool(_repeats(record.decode()))


def _is_repeated(pairs: list[tuple[str, object]]) -> bool:
    return len({name for name, _ in pairs}) < len(pairs)


# Nested objects are already replaced by this function's results; numbers may have any length.
_repeats: Final = json.JSONDecoder(object_pairs_hook=_is_repeated, parse_int=str, parse_float=str).decode


def may_nest_deeply(data: bytes, objects: int) -> bool:
    """Return whether one of `objects` records may be nested too deeply; a cheap test."""
    return data.count(b"{") + data.count(b"[") >= objects + NESTING_MAX


def nests_deeply(record: bytes) -> bool:
    """Return whether objects and arrays are nested deeper than `NESTING_MAX`."""
    depth = 0
    for bracket in _STRING.sub(b"", record).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"{[" else -1
        if depth > NESTING_MAX:
            return True
    return False
