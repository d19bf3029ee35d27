"""Parses the service's answer into a report: typed, figures exact, unknown fields listed."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct, inspect

from shipper.codec.rules import NESTING_MAX, may_nest_deeply, nests_deeply
from shipper.model import wire
from shipper.model.errors import ReportError
from shipper.report.merging import merged

_MISSPELT: Final = "affilaiteAccountId"
_SPELT_RIGHT: Final = "affiliateAccountId"
_NOT_A_REPORT: Final = "the answer is not a daily report"
_TOO_DEEP: Final = f"{_NOT_A_REPORT}: it is nested deeper than {NESTING_MAX} levels"

# Far beyond any amount of money. Without a bound `1e999999999` would be a valid number, and a table would write it out.
_DIGITS_MAX: Final = 30

_REPORT: Final = msgspec.json.Decoder(wire.DailyReport)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw] | None)
_LIST: Final = msgspec.json.Decoder(list[Raw])


class FetchedReport(Struct, frozen=True, kw_only=True):
    """
    A report and what it was read from.

    Attributes:
        report: What it says; a marketing source that is listed more than once is put together, see `merging`.
        body: The answer as it came, to the byte; a byte order mark before it, which JSON does not have, is left out.
        unknown_fields: Paths of the fields that are not documented, `brands[].extra`; each once, however often it is
            there. Their values are in the body alone.
        merged: Places of the marketing sources that were put together.
        fetched_at: Seconds since the epoch; None if that is not known.
    """

    report: wire.DailyReport
    body: bytes
    unknown_fields: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    fetched_at: float | None = None

    def __repr__(self) -> str:
        return f"<FetchedReport of account {self.report.source.affiliate_account_id}, {len(self.body)} bytes>"


def read_report(body: bytes, *, account_id: int, fetched_at: float | None = None) -> FetchedReport:
    """
    Read the service's answer.

    Args:
        body: The answer's body; `source.affilaiteAccountId` may also be spelt right. Figures and names may be missing
            or null, the ids of the account, its brands and marketing sources may not.
        account_id: The account that was asked for.
        fetched_at: When the answer came, seconds since the epoch.
    Raises:
        ReportError: The body is not the report (not JSON, a web page, another document, a figure that is written as a
            string or is out of range), or it is the report of another account.
    """
    body = body.removeprefix(BOM_UTF8)
    if body.lstrip()[:1] == b"<":
        raise ReportError("the answer is a web page, not a report; check the report's base_url")
    try:
        body.decode()  # the decoder does not look into what it passes over
        report = _REPORT.decode(with_service_spelling(body))
    except msgspec.ValidationError as error:
        raise ReportError(f"{_NOT_A_REPORT}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"the answer is not JSON: {error}") from error
    except RecursionError:
        raise ReportError(_TOO_DEEP) from None
    _check_nesting(body)
    if report.source.affiliate_account_id != account_id:
        raise ReportError(
            f"account {account_id} was requested, the report is of account {report.source.affiliate_account_id}"
        )
    unknown: dict[str, None] = {}  # a set that keeps the order
    _examine(body, REPORT_SHAPE, "$", unknown)
    report, places = merged(report)
    return FetchedReport(report=report, body=body, unknown_fields=tuple(unknown), merged=places, fetched_at=fetched_at)


def _check_nesting(body: bytes) -> None:
    """
    See that a document that could be decoded here can be decoded again, and encoded, further down the stack.

    Raises:
        ReportError: It is nested too deep, be it in a field that nobody knows.
    """
    if may_nest_deeply(body, 0) and nests_deeply(body):
        raise ReportError(_TOO_DEEP)


def with_service_spelling(body: bytes) -> bytes:
    """Put the misspelt name in the place of the right one; figures stay as they are written, not read as floats."""
    try:
        document = _OBJECT.decode(body) or {}
        source = _OBJECT.decode(document.get("source", b"null")) or {}
    except msgspec.ValidationError:
        return body  # the decoder of the report says where it is wrong
    if _MISSPELT in source or _SPELT_RIGHT not in source:
        return body
    source[_MISSPELT] = source.pop(_SPELT_RIGHT)
    return msgspec.json.encode({**document, "source": source})


class Shape(NamedTuple):
    """What is known of a value: the fields of an object, the item of a list, or whether it is a figure."""

    fields: Mapping[str, Shape] = MappingProxyType({})
    item: Shape | None = None
    is_figure: bool = False


def _shape_of(kind: inspect.Type) -> Shape:
    if isinstance(kind, inspect.UnionType):
        (kind,) = (option for option in kind.types if not isinstance(option, inspect.NoneType))
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: _shape_of(field.type) for field in kind.fields}
        if _MISSPELT in fields:
            fields[_SPELT_RIGHT] = fields[_MISSPELT]
        return Shape(fields=fields)
    if isinstance(kind, inspect.ListType):
        return Shape(item=_shape_of(kind.item_type))
    return Shape(is_figure=isinstance(kind, inspect.DecimalType))


REPORT_SHAPE: Final = _shape_of(inspect.type_info(wire.DailyReport))


def _examine(raw: Raw | bytes, shape: Shape, path: str, unknown: dict[str, None]) -> None:
    """
    Go through the text of a document that could be decoded, for what the decoder does not tell.

    It takes strings for figures, `"NaN"` too, takes any exponent, and passes over fields that it does not know. Only
    one way down from the root is held at a time: a large document is there once, as its text.

    Raises:
        ReportError: A figure is a string or out of range.
    """
    if shape.is_figure:
        _check_figure(bytes(raw), path)
    elif shape.item is not None:
        for index, item in enumerate(_LIST.decode(raw)):
            _examine(item, shape.item, f"{path}[{index}]", unknown)
    elif shape.fields:
        for name, value in (_OBJECT.decode(raw) or {}).items():
            if name in shape.fields:
                _examine(value, shape.fields[name], f"{path}.{name}", unknown)
            else:
                place = re.sub(r"\[\d+\]", "[]", path)
                unknown[f"{place}.{name}".removeprefix("$.")] = None


def _check_figure(text: bytes, path: str) -> None:
    if text.startswith(b'"'):
        raise ReportError(f"{_NOT_A_REPORT}: {path} is a string, not a number")
    if len(text) <= _DIGITS_MAX and b"e" not in text and b"E" not in text:
        return
    value = Decimal(text.decode())
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or value.adjusted() >= _DIGITS_MAX or exponent < -_DIGITS_MAX:
        raise ReportError(
            f"{_NOT_A_REPORT}: {path} is out of range, with more than {_DIGITS_MAX} digits before or behind the point"
        )
