"""
Normalisation: converts unambiguous values to the wire form.

A normaliser takes a column (one field of many records) and returns a column. It changes only unambiguous values and
leaves all others unchanged, even invalid ones, which the rules reject. `ABSENT` is a missing field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET

from shipper.codec.rules import ANY_TIME, FIELD_RULES, are_event_ids, are_ips, are_timestamps, plain_type
from shipper.model.wire import EVENT_ID_LENGTH

ABSENT: Final = UNSET

Column = list[Any]
Normalizer = Callable[[Column], Column]

_BLANKS: Final = " \t"
_MAPPED_PREFIX: Final = "::ffff:"
_UUID: Final = re.compile(
    r"(?:urn:uuid:)?(\{)?([0-9a-f]{8})(-?)([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{12})(?(1)\})"
)
_FRACTION: Final = re.compile(r"(?<=[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2})\.[0-9]+(?=$|[Zz+-])", re.MULTILINE)
_UTC: Final = re.compile(r"[+-]00(?::?00)?$", re.MULTILINE)
_HOURS: Final = re.compile(r"(?<=[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2})[+-][0-9]{2}$")  # an offset without minutes
_NUMBER: Final = re.compile(r"[0-9]{1,30}")  # longer than any identifier, short enough to be converted at once
_NUMBERS: Final = re.compile(rf"{_NUMBER.pattern}(?:\n{_NUMBER.pattern})*")
_NUMBER_END: Final = 10**30

_instant: Final = msgspec.json.Decoder(datetime).decode


def normalizers(assume_timezone: str | None, *, relaxed: Collection[str]) -> Mapping[str, Normalizer]:
    """
    Return the normalisers by field.

    Args:
        assume_timezone: IANA name of the zone of timestamps without an offset; None leaves those unchanged.
        relaxed: Rules reduced to the type of the field; values of this type are left unchanged.
    """
    zone = None
    if assume_timezone:
        from zoneinfo import ZoneInfo  # rarely needed

        zone = ZoneInfo(assume_timezone)
    by_field: dict[str, Normalizer] = {
        "EventId": event_ids,
        "IP": ips,
        "Timestamp": partial(timestamps, zone=zone),
        "BTag": partial(_of_texts, lambda value: value.strip(_BLANKS)),
        "ConsumerID": integers,
        "ConsumerCountry": upper_case,
        "ConsumerCurrencyID": upper_case,
        "BrandID": integers,
        "CustomerCurrencyID": strings,
        "AffiliateID": lambda column: strings(_or_empty(column)),
        "ConsumerState": lambda column: upper_case(_or_empty(column)),
    }
    return {
        field: partial(_other_types, plain_type(field), normalizer) if FIELD_RULES[field] in relaxed else normalizer
        for field, normalizer in by_field.items()
    }


def _other_types(kind: type, normalizer: Normalizer, column: Column) -> Column:
    pairs = zip(column, normalizer(column), strict=True)
    return [before if type(before) is kind else after for before, after in pairs]


def event_ids(column: Column) -> Column:
    """Convert to lower case and 8-4-4-4-12, from forms with braces, with `urn:uuid:` or without dashes."""
    with suppress(TypeError):
        lower = "\n".join(column).lower().split("\n")
        if set(map(len, lower)) == {EVENT_ID_LENGTH} and len(lower) == len(column) and are_event_ids(lower):
            return lower
    return _of_texts(_event_id, column)


def _of_texts(change: Callable[[str], str], column: Column) -> Column:
    """Apply a change to the strings in a column."""
    return [change(value) if isinstance(value, str) else value for value in column]


def _event_id(value: str) -> str:
    uuid = _UUID.fullmatch(value.strip(_BLANKS).lower())
    return "-".join(uuid.group(2, 4, 5, 6, 7)) if uuid else value


def ips(column: Column) -> Column:
    """Strip blanks, and convert IPv4-mapped IPv6 addresses to IPv4."""
    with suppress(TypeError):
        if are_ips(column):
            return column
    return _of_texts(_ip, column)


def _ip(value: str) -> str:
    value = value.strip(_BLANKS)
    return value[len(_MAPPED_PREFIX) :] if value[: len(_MAPPED_PREFIX)].lower() == _MAPPED_PREFIX else value


def timestamps(column: Column, *, zone: tzinfo | None) -> Column:
    """
    Convert to UTC and remove fractions of seconds.

    Args:
        zone: Zone of values without an offset; None leaves those unchanged. An ambiguous local time is the earlier of
            the two; a nonexistent one is left unchanged.
    """
    with suppress(TypeError):
        if set(map(len, column)) == {20} and are_timestamps(column, ANY_TIME):
            return column
        # Most columns have only fractions and variants of UTC, which can be replaced in the joined text.
        plain = _UTC.sub("Z", _FRACTION.sub("", "\n".join(column))).split("\n")
        if set(map(len, plain)) == {20} and len(plain) == len(column) and are_timestamps(plain, ANY_TIME):
            return plain
    return _of_texts(partial(_timestamp, zone=zone), column)


def _timestamp(value: str, *, zone: tzinfo | None) -> str:
    text = _HOURS.sub(r"\g<0>:00", _FRACTION.sub("", value.strip(_BLANKS)))
    try:
        instant = _instant(msgspec.json.encode(text))
        if instant.tzinfo is None:
            if zone is None:
                return value
            naive, instant = instant, instant.replace(tzinfo=zone).astimezone(UTC)
            if instant.astimezone(zone).replace(tzinfo=None) != naive:
                return value
        return f"{instant.astimezone(UTC).isoformat()[:19]}Z"
    except (msgspec.MsgspecError, OverflowError, UnicodeError):
        return value


def integers(column: Column) -> Column:
    """Convert strings of digits to numbers."""
    kinds = set(map(type, column))
    if kinds == {int}:
        return column
    if kinds == {str}:
        joined = "\n".join(column)
        if joined.count("\n") == len(column) - 1 and _NUMBERS.fullmatch(joined):
            return list(map(int, column))
    return [int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value for value in column]


def strings(column: Column) -> Column:
    """Convert whole numbers to strings."""
    if set(map(type, column)) == {str}:
        return column
    return [str(value) if type(value) is int and abs(value) < _NUMBER_END else value for value in column]


def upper_case(column: Column) -> Column:
    """Convert ASCII letters to upper case."""
    if set(map(type, column)) == {str}:
        joined = "\n".join(column)
        if joined.isascii() and joined.count("\n") == len(column) - 1:
            return joined.upper().split("\n")
    return _of_texts(lambda value: value.upper() if value.isascii() else value, column)


def _or_empty(column: Column) -> Column:
    """Convert null and absent values to empty strings."""
    return ["" if value is None or value is ABSENT else value for value in column]
