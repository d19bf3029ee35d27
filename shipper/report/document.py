"""Parses the service's answer into a report, with exact figures, a list of unknown fields, and merged sources."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct, inspect
from msgspec.structs import replace

from shipper.codec.rules import NESTING_MAX, may_nest_deeply, nests_deeply
from shipper.model import wire
from shipper.model.errors import ReportError
from shipper.report.changes import element_path
from shipper.report.metrics import METRICS

_MISSPELLED: Final = "affilaiteAccountId"
_CORRECT: Final = "affiliateAccountId"
_NOT_A_REPORT: Final = "the answer is not a daily report"
_TOO_DEEP: Final = f"{_NOT_A_REPORT}: it is nested deeper than {NESTING_MAX} levels"

# More than any amount of money needs. Without a limit, `1e999999999` would be valid, and a table print all its digits.
_DIGITS_MAX: Final = 30

_REPORT: Final = msgspec.json.Decoder(wire.DailyReport)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw] | None)
_LIST: Final = msgspec.json.Decoder(list[Raw])


class FetchedReport(Struct, frozen=True, kw_only=True):
    """
    A report and the answer that it was parsed from.

    Attributes:
        body: The unchanged answer, without a byte order mark, which JSON does not allow.
        unknown_fields: Unique paths of undocumented fields, `brands[].extra`; their values are only in the body.
        merged: Paths of the marketing sources that were listed more than once, see `merge_listings`.
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
    Parse the service's answer.

    Figures and names may be missing or null; the ids of the account, its brands and marketing sources may not. The
    name of the account's id may also be spelled correctly.

    Raises:
        ReportError: The body is not a report (not JSON, a web page, another document, a field twice in an object, a
            figure that is a string or out of range), or it is the report of another account.
    """
    body = body.removeprefix(BOM_UTF8)
    if body.lstrip()[:1] == b"<":
        raise ReportError("the answer is a web page, not a report; check the report's base_url")
    try:
        text = body.decode()  # the decoder does not validate the text that it skips
        report = _REPORT.decode(normalize_spelling(body))
    except msgspec.ValidationError as error:
        raise ReportError(f"{_NOT_A_REPORT}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"the answer is not JSON: {error}") from error
    except RecursionError:
        raise ReportError(_TOO_DEEP) from None
    # Code deeper in the stack must be able to decode and encode the document, too, including unknown fields.
    if may_nest_deeply(body, 0) and nests_deeply(body):
        raise ReportError(_TOO_DEEP)
    if report.source.affiliate_account_id != account_id:
        raise ReportError(
            f"account {account_id} was requested, but the report is for account {report.source.affiliate_account_id}"
        )
    json.loads(text, object_pairs_hook=_refuse_repeats, parse_int=str, parse_float=str)
    unknown: dict[str, None] = {}  # an ordered set
    _examine(body, REPORT_SHAPE, "$", unknown)
    report, merged = merge_listings(report)
    return FetchedReport(report=report, body=body, unknown_fields=tuple(unknown), merged=merged, fetched_at=fetched_at)


def _refuse_repeats(pairs: list[tuple[str, object]]) -> None:
    """Raise `ReportError` if an object has a field twice: decoders use the last value, but either may be right."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ReportError(f"{_NOT_A_REPORT}: an object contains {repeated!r:.80} more than once")


def normalize_spelling(body: bytes) -> bytes:
    """Replace the correct name of the account's id by the service's misspelled one; figures stay unchanged."""
    try:
        document = _OBJECT.decode(body) or {}
        source = _OBJECT.decode(document.get("source", b"null")) or {}
    except msgspec.ValidationError:
        return body  # the report's decoder reports the error
    if _MISSPELLED in source or _CORRECT not in source:
        return body
    source[_MISSPELLED] = source.pop(_CORRECT)
    return msgspec.json.encode({**document, "source": source})


class Shape(NamedTuple):
    """The shape of a documented value: the fields of an object, the item of a list, or a figure."""

    fields: Mapping[str, Shape] = MappingProxyType({})
    item: Shape | None = None
    is_figure: bool = False


def _shape_of(kind: inspect.Type) -> Shape:
    if isinstance(kind, inspect.UnionType):
        (kind,) = (option for option in kind.types if not isinstance(option, inspect.NoneType))
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: _shape_of(field.type) for field in kind.fields}
        if _MISSPELLED in fields:
            fields[_CORRECT] = fields[_MISSPELLED]
        return Shape(fields=fields)
    if isinstance(kind, inspect.ListType):
        return Shape(item=_shape_of(kind.item_type))
    return Shape(is_figure=isinstance(kind, inspect.DecimalType))


REPORT_SHAPE: Final = _shape_of(inspect.type_info(wire.DailyReport))


def _examine(raw: Raw | bytes, shape: Shape, path: str, unknown: dict[str, None]) -> None:
    """
    Collect unknown fields, and check figures: the decoder accepts strings, even `"NaN"`, and any exponent.

    Only one path from the root is decoded at a time, so that a large document is in memory only once, as its text.
    """
    if shape.item is not None:
        for index, item in enumerate(_LIST.decode(raw)):
            _examine(item, shape.item, f"{path}[{index}]", unknown)
    elif shape.fields:
        for name, value in (_OBJECT.decode(raw) or {}).items():
            field = shape.fields.get(name)
            if field is not None and field.is_figure:
                _check_figure(bytes(value), path, name)
            elif field is not None:
                _examine(value, field, f"{path}.{name}", unknown)
            else:
                parent = re.sub(r"\[\d+\]", "[]", path)
                unknown[f"{parent}.{name}".removeprefix("$.")] = None


def _check_figure(text: bytes, path: str, name: str) -> None:
    if text.startswith(b'"'):
        raise ReportError(f"{_NOT_A_REPORT}: {path}.{name} is a string, not a number")
    if len(text) <= _DIGITS_MAX and b"e" not in text and b"E" not in text:
        return
    value = Decimal(text.decode())
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or value.adjusted() >= _DIGITS_MAX or exponent < -_DIGITS_MAX:
        raise ReportError(
            f"{_NOT_A_REPORT}: {path}.{name} is out of range, with more than {_DIGITS_MAX} digits before or after the "
            "decimal point"
        )


def merge_listings(report: wire.DailyReport) -> tuple[wire.DailyReport, tuple[str, ...]]:
    """
    Merge multiple listings of a marketing source, unless their figures conflict.

    Otherwise, a source listed once with and once without figures would have no sum.

    Returns:
        The report, and the paths of the merged sources.
    """
    first_listings: dict[tuple[int, int], tuple[list[wire.MarketingSource], int]] = {}
    paths: dict[str, None] = {}  # an ordered set
    brands: list[wire.Brand] = []
    for brand in report.brands:
        entries: list[wire.MarketingSource] = []
        for entry in brand.marketing_sources:
            listed, index = first_listings.setdefault((brand.id, entry.id), (entries, len(entries)))
            is_first = listed is entries and index == len(entries)
            merged = None if is_first else _merge(listed[index], entry)
            if merged is None:
                entries.append(entry)
            else:
                listed[index] = merged
                paths[element_path(brand.id, entry.id)] = None
        brands.append(replace(brand, marketing_sources=entries))
    return (replace(report, brands=brands), tuple(paths)) if paths else (report, ())


def _merge(one: wire.MarketingSource, other: wire.MarketingSource) -> wire.MarketingSource | None:
    """Merge two listings; return None if both have the same figure, or money in two currencies."""
    for metric in METRICS:
        first, second = metric.figure(one), metric.figure(other)
        if None not in (first.result, second.result) or None not in (first.adjustment, second.adjustment):
            return None
    if not _has_money(one):
        one, other = other, one
    if _has_money(other) and (one.reporting_currency, one.exchange_rate) != (
        other.reporting_currency,
        other.exchange_rate,
    ):
        return None
    return _fill(one, other)  # type: ignore[no-any-return]


def _has_money(entry: wire.MarketingSource) -> bool:
    figures = [metric.figure(entry) for metric in METRICS if metric.is_money]
    return any(figure.result is not None or figure.adjustment is not None for figure in figures)


def _fill(value: Any, other: Any) -> Any:
    """Fill missing or empty values of a listing from another one."""
    if isinstance(value, Struct) and isinstance(other, Struct):
        fields = {name: _fill(getattr(value, name), getattr(other, name)) for name in value.__struct_fields__}
        return replace(value, **fields)
    return other if value is None or value == "" else value
