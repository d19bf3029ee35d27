"""
Normalisation: writes what is unambiguous about a value in the wire form.

A normaliser takes a column (one field of many records) and returns a column. It changes what it is sure of and leaves
everything else as it is, however wrong: the rules judge it. `ABSENT` means that the field is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, tzinfo
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET

from shipper.codec.rules import ANY_TIME, FIELD_RULES, are_event_ids, are_ips, are_timestamps, plain_type

ABSENT: Final = UNSET

Column = list[Any]
Normalizer = Callable[[Column], Column]

_BLANKS: Final = " \t"
_MAPPED_PREFIX: Final = "::ffff:"
_UUID: Final = re.compile(
    r"(?:urn:uuid:)?(\{)?([0-9a-f]{8})(-?)([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{12})(?(1)\})"
)
_FRACTION: Final = re.compile(r"(?<=[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2})\.[0-9]+(?=$|[Zz+-])", re.MULTILINE)
_UTC: Final = re.compile(r"[+-]00:?00$", re.MULTILINE)
_DIGITS_MAX: Final = 30  # longer than any identifier, short enough to be converted at once
_NUMBER_END: Final = 10**_DIGITS_MAX
_NUMBERS: Final = re.compile(r"[0-9]{1,30}(?:\n[0-9]{1,30})*")

_instant: Final = msgspec.json.Decoder(datetime).decode


def normalizers(assume_timezone: str | None, *, relaxed: Collection[str]) -> Mapping[str, Normalizer]:
    """
    List the normalisers by field.

    Args:
        assume_timezone: IANA name of the zone of timestamps that name none; None leaves those as they are.
        relaxed: Rules that are reduced to the type of the field: what has that is right, and is left as it is.
    """
    zone = None
    if assume_timezone:
        from zoneinfo import ZoneInfo  # needed by few

        zone = ZoneInfo(assume_timezone)
    found: dict[str, Normalizer] = {
        "EventId": event_ids,
        "IP": ips,
        "Timestamp": partial(timestamps, zone=zone),
        "BTag": trimmed,
        "ConsumerID": integers,
        "ConsumerCountry": upper_case,
        "ConsumerCurrencyID": upper_case,
        "BrandID": integers,
        "CustomerCurrencyID": strings,
        "AffiliateID": strings_or_empty,
        "ConsumerState": upper_case_or_empty,
    }
    return {
        field: partial(_other_types, plain_type(field), normalizer) if FIELD_RULES[field] in relaxed else normalizer
        for field, normalizer in found.items()
    }


def _other_types(kind: type, normalizer: Normalizer, column: Column) -> Column:
    """Normalise the values that are not of a type."""
    pairs = zip(column, normalizer(column), strict=True)
    return [before if type(before) is kind else after for before, after in pairs]


def event_ids(column: Column) -> Column:
    """Lower-case; braces, `urn:uuid:` and 32 digits without dashes become 8-4-4-4-12."""
    try:
        lower = "\n".join(column).lower().split("\n")
    except TypeError:
        return list(map(_event_id, column))
    if set(map(len, lower)) == {36} and len(lower) == len(column) and are_event_ids(lower):
        return lower
    return list(map(_event_id, column))


def _event_id(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = _UUID.fullmatch(value.strip(_BLANKS).lower())
    return "-".join(found.group(2, 4, 5, 6, 7)) if found else value


def ips(column: Column) -> Column:
    """Blanks around it go; an IPv4 address mapped into IPv6 becomes IPv4."""
    try:
        if are_ips(column):
            return column
    except TypeError:
        pass
    return list(map(_ip, column))


def _ip(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    value = value.strip(_BLANKS)
    return value[len(_MAPPED_PREFIX) :] if value[: len(_MAPPED_PREFIX)].lower() == _MAPPED_PREFIX else value


def timestamps(column: Column, *, zone: tzinfo | None) -> Column:
    """
    An offset becomes UTC, a fraction is cut off.

    Args:
        zone: That of values without an offset; None leaves those as they are. Of two instants that a wall clock
            showed, the first one is taken; a time that it never showed is left as it is.
    """
    try:
        if set(map(len, column)) == {20} and are_timestamps(column, ANY_TIME):
            return column
        # Most columns have fractions and spellings of UTC, and nothing else, which whole texts can be rid of.
        plain = _UTC.sub("Z", _FRACTION.sub("", "\n".join(column))).split("\n")
        if set(map(len, plain)) == {20} and len(plain) == len(column) and are_timestamps(plain, ANY_TIME):
            return plain
    except TypeError:
        pass
    return [_timestamp(value, zone) for value in column]


def _timestamp(value: Any, zone: tzinfo | None) -> Any:
    if not isinstance(value, str):
        return value
    text = _FRACTION.sub("", value.strip(_BLANKS))
    try:
        found = _instant(msgspec.json.encode(text))
        if found.tzinfo is None:
            if zone is None:
                return value
            naive, found = found, found.replace(tzinfo=zone).astimezone(UTC)
            if found.astimezone(zone).replace(tzinfo=None) != naive:
                return value
        return f"{found.astimezone(UTC).isoformat()[:19]}Z"
    except (msgspec.MsgspecError, OverflowError, UnicodeError):
        return value


def integers(column: Column) -> Column:
    """A string of digits becomes the number."""
    kinds = set(map(type, column))
    if kinds == {int}:
        return column
    if kinds == {str}:
        joined = "\n".join(column)
        if joined.count("\n") == len(column) - 1 and _NUMBERS.fullmatch(joined):
            return list(map(int, column))
    return [int(value) if isinstance(value, str) and _is_number(value) else value for value in column]


def _is_number(text: str) -> bool:
    return text.isdigit() and text.isascii() and len(text) <= _DIGITS_MAX


def strings(column: Column) -> Column:
    """A whole number becomes its digits."""
    if set(map(type, column)) == {str}:
        return column
    return [str(value) if type(value) is int and abs(value) < _NUMBER_END else value for value in column]


def strings_or_empty(column: Column) -> Column:
    """A whole number becomes its digits; null and absence become the empty string."""
    return _or_empty(strings(column))


def upper_case(column: Column) -> Column:
    """Letters a-z become A-Z."""
    if set(map(type, column)) == {str}:
        joined = "\n".join(column)
        if joined.isascii() and joined.count("\n") == len(column) - 1:
            return joined.upper().split("\n")
    return [value.upper() if isinstance(value, str) and value.isascii() else value for value in column]


def upper_case_or_empty(column: Column) -> Column:
    """Letters a-z become A-Z; null and absence become the empty string."""
    return upper_case(_or_empty(column))


def _or_empty(column: Column) -> Column:
    return ["" if value is None or value is ABSENT else value for value in column]


def trimmed(column: Column) -> Column:
    """Blanks around it go."""
    return [value.strip(_BLANKS) if isinstance(value, str) else value for value in column]
