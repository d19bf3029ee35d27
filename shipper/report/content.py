"""Hashes the content of a report: the same for two answers that differ only in ids and times of the request."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Raw

from shipper.report.document import REPORT_SHAPE, Shape, with_service_spelling

_OF_THE_REQUEST: Final = ("id", "reportingTime")  # documented: each request gets them anew
# Of fields that are not documented: names and values of what a request gets anew.
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
_SOMETHING: Final = "of the request"
_EXPONENT_DIGITS_MAX: Final = 2  # a documented figure has no more

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_SORTED: Final = msgspec.json.Encoder(order="sorted")


def content_hash(body: bytes) -> str:
    """
    Hash the content of a report, undocumented fields included.

    What does not count: `id` and `reportingTime` of the report; the order of fields, of brands and of marketing
    sources; how a figure is written (1e2 is 100.0000), how the account's id is spelt, and whether a documented field
    that says nothing is null or absent. Of an undocumented field that looks like one of the request (an id, a time)
    it counts only that it is there.

    Args:
        body: A report that could be read.
    Returns:
        64 hexadecimal characters.
    """
    document = _OBJECT.decode(with_service_spelling(body))
    for name in _OF_THE_REQUEST:
        document.pop(name, None)
    return _digest(document, REPORT_SHAPE)


def _digest(fields: dict[str, Raw], shape: Shape) -> str:
    try:
        return sha256(_SORTED.encode(_of_object(fields, shape))).hexdigest()
    except (RecursionError, UnicodeEncodeError):  # nested too deep, or half a character: compared as it is written
        return sha256(_SORTED.encode(fields)).hexdigest()


def _of_object(fields: dict[str, Raw], shape: Shape) -> dict[str, Any]:
    """Return an object as it counts; of a long list in it, one item at a time is taken apart."""
    lists: dict[str, Any] = {}
    plain: dict[str, Raw] = {}
    for name, raw in fields.items():
        item = shape.fields[name].item if name in shape.fields else None
        if item is None:
            plain[name] = raw
        else:
            lists[name] = sorted(_digest(_OBJECT.decode(each), item) for each in _LIST.decode(raw))
    values = json.loads(msgspec.json.encode(plain), parse_int=_number, parse_float=_number)
    return {**_said(values, shape), **lists}


def _said(values: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Leave out what says nothing."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = shape.fields.get(name)
        if inner is None:
            value = _lasting(value, name)
        elif inner.fields and isinstance(value, dict):
            value = _said(value, inner) or None
        if value is not None:
            found[name] = value
    return found


def _lasting(value: Any, name: str) -> Any:
    """Replace what a request gets anew in a field that is not documented."""
    match value:
        case dict():
            return {inner: _lasting(each, inner) for inner, each in value.items()}
        case list():
            return [_lasting(each, name) for each in value]
        case str() | Raw() if _REQUEST_NAME.search(name):
            return _SOMETHING
        case str() if _REQUEST_VALUE.fullmatch(value):
            return _SOMETHING
    return value


def _number(text: str) -> Raw:
    """Write a number in one way, as text: it may be of any size. With a large exponent it is left as it is."""
    if "e" in text or "E" in text:
        exponent = text.lower().partition("e")[2].lstrip("+-0")
        if len(exponent) > _EXPONENT_DIGITS_MAX:
            return Raw(text.lower().encode())
        text = f"{Decimal(text):f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return Raw(text.encode() if text.strip("-0") else b"0")
