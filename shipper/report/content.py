"""Hashes the content of a report; answers that differ only in ids and times of the request have the same hash."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Raw

from shipper.report.document import REPORT_SHAPE, Shape, normalize_spelling

_REQUEST_FIELDS: Final = ("id", "reportingTime")  # documented: differ in every answer
# Names and values of undocumented fields that differ in every answer.
_REQUEST_NAME: Final = re.compile(
    r"(request|correlation|operation|activity|invocation|session|trace|span)-?_?(id|guid|uuid|identifier|number|key)$"
    r"|^(trace-?_?(parent|state)|timestamp|elapsed|duration|took)(-?_?(ms|s|millis|seconds|milliseconds))?$",
    re.IGNORECASE,
)
_REQUEST_VALUE: Final = re.compile(
    r"\{?[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}\}?"
    r"|[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
    r"|[0-9a-f]{32,128}"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?",
    re.IGNORECASE,
)
_EXPONENT_DIGITS_MAX: Final = 2  # enough for documented figures

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_SORTED: Final = msgspec.json.Encoder(order="sorted")


def content_hash(body: bytes) -> str:
    """
    Return the hash of a report's content including undocumented fields, as 64 hexadecimal characters.

    These do not affect it: `id` and `reportingTime` of the report; the order of fields, brands and marketing sources;
    the notation of figures (1e2 equals 100.0000); the spelling of the name of the account's id; and whether an empty
    documented field is null or absent. For an undocumented field that looks like an id or a time of the request, only
    its presence counts, not its value.
    """
    document = _OBJECT.decode(normalize_spelling(body))
    for name in _REQUEST_FIELDS:
        document.pop(name, None)
    return _digest(document, REPORT_SHAPE)


def _digest(fields: dict[str, Raw], shape: Shape) -> str:
    try:
        return sha256(_SORTED.encode(_normalized(fields, shape))).hexdigest()
    except (RecursionError, UnicodeEncodeError):  # nested too deep, or a lone surrogate: hash the original text
        return sha256(_SORTED.encode(fields)).hexdigest()


def _normalized(fields: dict[str, Raw], shape: Shape) -> dict[str, Any]:
    """Return the content of an object; documented lists become digests, so that only one item is decoded at a time."""
    lists: dict[str, Any] = {}
    others: dict[str, Raw] = {}
    for name, raw in fields.items():
        item = shape.fields[name].item if name in shape.fields else None
        if item is None:
            others[name] = raw
        else:
            lists[name] = sorted(_digest(_OBJECT.decode(entry), item) for entry in _LIST.decode(raw))
    values = json.loads(msgspec.json.encode(others), parse_int=_number, parse_float=_number)
    return {**_drop_empty(values, shape), **lists}


def _drop_empty(values: dict[str, Any], shape: Shape) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        inner = shape.fields.get(name)
        if inner is None:
            value = _mask_request_values(value, name)
        elif inner.fields and isinstance(value, dict):
            value = _drop_empty(value, inner) or None
        if value is not None:
            result[name] = value
    return result


def _mask_request_values(value: Any, name: str) -> Any:
    """Replace values of an undocumented field that differ in every answer."""
    match value:
        case dict():
            return {inner: _mask_request_values(item, inner) for inner, item in value.items()}
        case list():
            return [_mask_request_values(item, name) for item in value]
        case str() | Raw() if _REQUEST_NAME.search(name):
            return "of the request"
        case str() if _REQUEST_VALUE.fullmatch(value):
            return "of the request"
    return value


@lru_cache(4096)  # most figures are zero or small
def _number(text: str) -> Raw:
    """Return a number in a single notation, unless its exponent is large."""
    if "e" in text or "E" in text:
        exponent = text.lower().partition("e")[2].lstrip("+-0")
        if len(exponent) > _EXPONENT_DIGITS_MAX:
            return Raw(text.lower().encode())
        text = f"{Decimal(text):f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return Raw(text.encode() if text.strip("-0") else b"0")
