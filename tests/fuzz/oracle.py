"""The expected verdict on a record, without any code of the codec."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final, NamedTuple

from shipper.codec.rules import FIELD_RULES
from tests.unit.test_codec import LATEST

BLANKS: Final = b" \t\r\n\0"
NESTING_MAX: Final = 200

_EVENT_ID: Final = re.compile(
    r"(?:urn:uuid:)?(\{)?([0-9a-f]{8})(-?)([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{4})\3([0-9a-f]{12})(\})?"
)
_TIMESTAMP: Final = re.compile(
    r"(?a:(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.\d+)?(?:([Zz])|([+-])(\d\d)(?::?(\d\d))?))"
)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_filled(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_ip(value: Any) -> bool:
    try:
        return isinstance(value, str) and str(ipaddress.IPv4Address(value)) == value
    except ValueError:
        return False


def _is_timestamp(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"(?a:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", value):
        return False
    try:
        return datetime.fromisoformat(value) <= datetime.fromisoformat(LATEST)
    except ValueError:
        return False


_IS_GOOD: Final[dict[str, Callable[[Any], bool]]] = {
    "EventId": _matches("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "IP": _is_ip,
    "Timestamp": _is_timestamp,
    "BTag": _matches("[0-9]+_[0-9a-fA-F]{32}"),
    "ConsumerID": _is_number,
    "ConsumerCountry": _matches("[A-Z]{2}"),
    "ConsumerCurrencyID": _matches("[A-Z]{3}"),
    "Username": _is_filled,
    "BrandID": _is_number,
    "CustomerCurrencyID": _is_text,
    "ConsumerStatus": _is_filled,
    "AffiliateID": _is_text,
    "ConsumerState": _matches("([A-Z]{2})?"),
}
FIELDS: Final = tuple(_IS_GOOD)


class Expected(NamedTuple):
    """
    Attributes:
        is_as_it_came: Whether it is sent byte for byte; otherwise as `document`, with its fields in this order.
        rules: The rules that may be reported as broken; without a document, the record is refused.
    """

    document: dict[str, Any] | None = None
    is_as_it_came: bool = False
    rules: frozenset[str] = frozenset()


def expected(record: bytes, *, is_normalizing: bool, unknown: str) -> Expected:
    """
    Return the expected result for a record without surrounding whitespace.

    Args:
        unknown: How to treat unknown fields: drop, reject, keep.
    """
    repeated: set[str] = set()
    document = read(record, repeated)
    if isinstance(document, str):
        return Expected(rules=frozenset({document, "json"}))  # invalid UTF-8 is not JSON either
    known = {name: document[name] for name in FIELDS if name in document}
    if is_normalizing:
        known = _normalized(known)
    extra = {name: value for name, value in document.items() if name not in FIELDS}
    bad = {FIELD_RULES[field] for field, is_good in _IS_GOOD.items() if field not in known or not is_good(known[field])}
    if extra and unknown == "reject":
        bad.add("unknown_field")
    if repeated and not is_normalizing:
        return Expected(rules=frozenset({"repeated_key"}))
    if bad:
        return Expected(rules=frozenset(bad))
    wire = {field: known[field] for field in FIELDS} | (extra if unknown == "keep" else {})
    is_same = all(_is_same(document.get(field), known[field]) for field in FIELDS) and not (extra and unknown == "drop")
    return Expected(wire, is_same and not repeated)


def read(record: bytes, repeated: set[str]) -> dict[str, Any] | str:
    """
    Parse a JSON object, keeping the last value of a repeated name; return the broken rule if it is not one.

    Args:
        repeated: Receives the repeated names at the top level.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in found]
        repeated.clear()  # the top level comes last
        repeated.update(name for name in names if names.count(name) > 1)
        if repeated:
            json.dumps(found, ensure_ascii=False).encode()  # also raises for values hidden by a repeated name
        return dict(found)

    try:
        text = record.decode()
    except UnicodeDecodeError:
        return "encoding"
    try:
        document = json.loads(text, parse_constant=_refuse, object_pairs_hook=pairs)
        json.dumps(document, ensure_ascii=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        return "json"
    return document if isinstance(document, dict) and _depth(document) <= NESTING_MAX else "json"


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _depth(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + max(map(_depth, node.values()), default=0)
    return 1 + max(map(_depth, node), default=0) if isinstance(node, list) else 0


def _is_same(before: object, after: object) -> bool:
    return type(before) is type(after) and before == after


def _normalized(known: dict[str, Any]) -> dict[str, Any]:
    made = dict(known)
    for field, value in known.items():
        text = value.strip(" \t") if isinstance(value, str) else None
        if field == "EventId" and text is not None:
            made[field] = _event_id(text.lower()) or value
        elif field == "IP" and text is not None:
            made[field] = text[7:] if text[:7].lower() == "::ffff:" else text
        elif field == "Timestamp" and text is not None:
            made[field] = _timestamp(text) or value
        elif field == "BTag" and text is not None:
            made[field] = text
        elif field in {"ConsumerID", "BrandID"} and isinstance(value, str) and re.fullmatch("[0-9]{1,30}", value):
            made[field] = int(value)
        elif field in {"ConsumerCountry", "ConsumerCurrencyID", "ConsumerState"} and isinstance(value, str):
            made[field] = value.upper() if value.isascii() else value
        elif field in {"CustomerCurrencyID", "AffiliateID"} and type(value) is int and abs(value) < 10**30:
            made[field] = str(value)
    for field in ("AffiliateID", "ConsumerState"):
        if made.get(field) is None:
            made[field] = ""
    return made


def _event_id(text: str) -> str | None:
    found = _EVENT_ID.fullmatch(text)
    if found is None or bool(found[1]) != bool(found[8]):
        return None
    return "-".join(found.group(2, 4, 5, 6, 7))


def _timestamp(text: str) -> str | None:
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        return None
    try:
        naive = datetime.fromisoformat(f"{found[1]}T{found[2]}")
        zone = UTC
        if not found[3]:
            hours, minutes = int(found[5]), int(found[6] or 0)
            if hours > 23 or minutes > 59:
                return None
            offset = timedelta(hours=hours, minutes=minutes)
            zone = timezone(-offset if found[4] == "-" else offset)
        return f"{naive.replace(tzinfo=zone).astimezone(UTC).isoformat()[:19]}Z"
    except (ValueError, OverflowError):
        return None
