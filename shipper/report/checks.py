"""
Checks of a report: findings about its figures, with the residual if two amounts differ.

The relation of the balances is not documented: they may or may not include the opening balance, and may or may not be
converted already. So an outgoing balance is wrong only if it does not match in any of these ways.

The account of a report needs no check: `read_report` rejects the report of another account.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, time, timedelta
from decimal import Context, Decimal, localcontext
from operator import mul, truediv
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shipper.model import wire
from shipper.model.units import several
from shipper.report.changes import diff, element_path
from shipper.report.currencies import is_same_currency
from shipper.report.document import FetchedReport
from shipper.report.formatting import clean
from shipper.report.metrics import CPA, FEES, METRICS, REV_SHARE
from shipper.report.ranges import DAY, DateRange, Part

Severity = Literal["warning", "note", "info"]
TOLERANCE: Final = Decimal("0.01")

_Entries = Sequence[tuple[str, wire.MarketingSource]]  # with their paths in the document

# Enough for exact sums and products of figures with 30 digits on either side of the decimal point.
_CONTEXT: Final = Context(prec=200)
_ROUNDING: Final = Decimal("0.0001")  # figures are rounded to four decimals
_RATE_ROUNDING: Final = Decimal("0.00005")
_DECIMALS_SHOWN: Final = Decimal("1e-12")  # of a quotient; far more than the service's figures have


class Finding(Struct, frozen=True, kw_only=True):
    """
    The result of a check.

    Attributes:
        check: Name of the check, such as `outgoing_balance_follows_from_figures`.
        severity: A `warning` needs attention; a `note` has a common cause; `info` is not a fault.
        where: Path in the document, `brands[id=11].marketingSources[id=50121]`; empty for the account.
        message: For humans, without the path.
        residual: `actual - expected`, if both are figures.
    """

    check: str
    severity: Severity
    where: str = ""
    message: str
    expected: Decimal | str | None = None
    actual: Decimal | str | None = None
    residual: Decimal | None = None

    def text(self, report: object) -> str:
        """Return the message with its path for a terminal; `report` names the report."""
        return clean(f"{report}:{f' {self.where}:' if self.where else ''} {self.message}")


def check_report(
    report: wire.DailyReport,
    *,
    requested: DateRange,
    earlier_version: wire.DailyReport | None = None,
    tolerance: Decimal = TOLERANCE,
) -> list[Finding]:
    """
    Check a report, and compare it with an earlier version, if given.

    Args:
        tolerance: Largest difference between equal amounts.
    Returns:
        One or two findings about the balances; only faults from the other checks.
    """
    entries = [
        (element_path(brand.id, entry.id), entry) for brand in report.brands for entry in brand.marketing_sources
    ]
    with localcontext(_CONTEXT):
        findings = [
            *check_period(report, requested),
            *_check_ids(report),
            *_check_currencies(report, entries),
            *_check_counts(entries),
            *_check_balances(report, [entry for _, entry in entries], tolerance),
        ]
        if earlier_version is not None:
            findings += _check_sum(report, earlier_version)
    return findings


class CheckedReport(NamedTuple):
    """A checked report; `head` is the report without brands, for comparison with adjacent periods."""

    part: Part
    head: wire.DailyReport
    findings: list[Finding]
    unknown_fields: tuple[str, ...]


def check_fetched(
    part: Part, fetched: FetchedReport, tolerance: Decimal = TOLERANCE, earlier_version: wire.DailyReport | None = None
) -> CheckedReport:
    """Check a report and the answer that it was parsed from."""
    message = "it is listed more than once; the listings were merged"
    findings = [_warning("sources_are_listed_once", message, where=where) for where in fetched.merged]
    findings += check_report(fetched.report, requested=part.days, earlier_version=earlier_version, tolerance=tolerance)
    return CheckedReport(part, replace(fetched.report, brands=[]), findings, fetched.unknown_fields)


def all_findings(
    reports: Sequence[CheckedReport], tolerance: Decimal, *, has_infos: bool
) -> list[tuple[Part, Finding]]:
    """
    Return the findings of reports, including comparisons of adjacent periods.

    Args:
        reports: Grouped by account, periods ascending.
        has_infos: Whether to include findings of severity `info`.
    """
    findings: list[tuple[Part, Finding]] = []
    for before, report in zip([None, *reports], reports, strict=False):
        part, report_findings = report.part, report.findings
        if before is not None and before.part.account == part.account and part.days.start - before.part.days.end == DAY:
            report_findings = [*report_findings, check_opening_balance(report.head, before.head, tolerance)]
        findings += [(part, finding) for finding in report_findings if has_infos or finding.severity != "info"]
    return findings


def check_period(report: wire.DailyReport, requested: DateRange) -> Iterator[Finding]:
    """Check that a report covers the requested days; yield at most one finding."""
    check, period = "period_is_as_requested", report.reporting_period
    stated = f"{period.start} to {period.end}"
    ends = _ends(report)
    if ends is None:
        yield _warning(check, f"the report's period, {stated}, is invalid", expected=str(requested), actual=stated)
        return
    start, end = ends
    is_covered = start <= datetime.combine(requested.start, time.min) and end.date() >= requested.end
    # The end may be the start or the end of the last day, or the start of the next one. A report that was made on the
    # last day may end at any time of it.
    rest = end - datetime.combine(requested.end, time.min)
    is_cut = timedelta(0) < rest < DAY - timedelta(minutes=1) and report.reporting_time[:10] > str(requested.end)
    if not is_covered or is_cut or start.date() < requested.start or rest > DAY:
        message = f"the report covers {stated}, but {requested} was requested"
        yield _warning(check, message, expected=str(requested), actual=stated)


def check_opening_balance(
    report: wire.DailyReport, previous: wire.DailyReport, tolerance: Decimal = TOLERANCE
) -> Finding:
    """Compare the balances of a report with the previous one; neither needs its brands."""
    check, claim = "opening_balance_is_previous", "the opening balance is the outgoing balance of the period before"
    before, ends = _ends(previous), _ends(report)
    # The previous period may end at the start or the end of its last day, or at the start of this one.
    if before is None or ends is None or not timedelta(0) <= ends[0] - before[1] <= DAY:
        message = (
            f"{claim}: cannot be checked, because that ends at {previous.reporting_period.end} "
            f"and this one begins at {report.reporting_period.start}"
        )
        return Finding(check=check, severity="info", message=message)
    with localcontext(_CONTEXT):
        finding = _compare(check, claim, previous.outgoing_balance, report.opening_balance, tolerance, severity="note")
    if finding.severity == "note":
        return replace(finding, message=f"{finding.message}; a payout in between explains this")
    return finding


def _check_ids(report: wire.DailyReport) -> Iterator[Finding]:
    check = "ids_are_unique"
    for brand_id in _duplicates(brand.id for brand in report.brands):
        yield _warning(check, f"brand {brand_id} is listed more than once", where=element_path(brand_id))
    for brand in report.brands:
        for source_id in _duplicates(entry.id for entry in brand.marketing_sources):
            where = element_path(brand.id, source_id)
            yield _warning(check, f"marketing source {source_id} is listed more than once in its brand", where=where)


def _duplicates(ids: Iterable[int]) -> list[int]:
    return [number for number, count in Counter(ids).items() if count > 1]


def _check_currencies(report: wire.DailyReport, entries: _Entries) -> Iterator[Finding]:
    """Find money that cannot be converted: in a currency other than the account's, without a positive rate."""
    paths = defaultdict[str | None, list[str]](list)
    for where, entry in entries:
        has_rate = entry.exchange_rate is not None and entry.exchange_rate > 0
        if not has_rate and not _is_in_own_currency(report, entry):
            paths[entry.reporting_currency].append(where)
    for currency, currency_paths in paths.items():
        yield _warning(
            "currencies_have_rates",
            f"{len(currency_paths)} marketing sources are in {currency or 'an unspecified currency'} without an "
            f"exchange rate; the report is in {report.reporting_currency}",
            where=currency_paths[0],
            expected=report.reporting_currency,
            actual=currency,
        )


def _is_in_own_currency(report: wire.DailyReport, entry: wire.MarketingSource) -> bool:
    return is_same_currency(entry.reporting_currency, report.reporting_currency)


def _check_counts(entries: _Entries) -> Iterator[Finding]:
    metrics = [metric for metric in METRICS if not metric.is_money]
    for where, entry in entries:
        for metric in metrics:
            figure = metric.figure(entry)
            for part, value in (("result", figure.result), ("adjustment", figure.adjustment)):
                if value is not None and value != value.to_integral_value():
                    message = f"{metric.title}: the {part} {value:f} is not a whole number"
                    yield _warning("counts_are_whole", message, where=where, actual=value)
            if figure.result is not None and figure.result < 0:
                message = f"{metric.title}: the result {figure.result:f} is below zero"
                yield _warning("counts_are_not_negative", message, where=where, actual=figure.result)


def _check_sum(report: wire.DailyReport, earlier: wire.DailyReport) -> Iterator[Finding]:
    if report.last_check_sum != earlier.last_check_sum:
        return
    changes = [change for change in diff(earlier, report) if change.is_figure]
    if changes:
        differing = several(len(changes), "field differs", "fields differ")
        message = f"{differing} from an earlier version with the same checksum"
        yield _warning("check_sum_tells_changes", message, where=changes[0].path)


def _ends(report: wire.DailyReport) -> tuple[datetime, datetime] | None:
    """Return start and end of the stated period without time zones; None if it is invalid."""
    period = report.reporting_period
    try:
        start, end = (datetime.fromisoformat(text).replace(tzinfo=None) for text in (period.start, period.end))
    except ValueError:
        return None
    return (start, end) if start <= end else None


# Balances


class _Total(NamedTuple):
    """A sum, None if a figure is missing, and its maximum error from rounded figures and rates."""

    amount: Decimal | None
    slack: Decimal

    def plus(self, other: Decimal | None) -> _Total:
        return self._replace(amount=_sum([self.amount, other]))


def _check_balances(
    report: wire.DailyReport, entries: Sequence[wire.MarketingSource], tolerance: Decimal
) -> Iterator[Finding]:
    if any(not entry.exchange_rate and not _is_in_own_currency(report, entry) for entry in entries):
        return
    has_rates = any(entry.exchange_rate not in (None, 1) for entry in entries)
    opening, conversions = report.opening_balance, (None, mul, truediv) if has_rates else (None,)
    revenues = [_total([(_revenue(entry), entry) for entry in entries], convert, tolerance) for convert in conversions]
    balances = [
        _total([(entry.outgoing_balance, entry) for entry in entries], convert, tolerance) for convert in conversions
    ]
    figures = _compare_nearest(
        "outgoing_balance_follows_from_figures",
        "the account's outgoing balance is its opening balance plus the revenue share, CPA and fees of its marketing "
        "sources",
        report.outgoing_balance,
        [revenue.plus(opening) for revenue in revenues],
    )
    sources = _compare_nearest(
        "outgoing_balance_follows_from_sources",
        "the account's outgoing balance is the sum of its marketing sources' outgoing balances, with or without the "
        "account's opening balance",
        report.outgoing_balance,
        [*balances, *(balance.plus(opening) for balance in balances)],
    )
    yield figures
    if entries and (figures.severity == "info" or figures.residual != sources.residual):
        yield sources


def _total(
    amounts: Sequence[tuple[Decimal | None, wire.MarketingSource]],
    convert: Callable[[Decimal, Decimal], Decimal] | None,
    tolerance: Decimal,
) -> _Total:
    """Add up amounts of marketing sources; `convert(amount, rate)` returns an amount in the account's currency."""
    slack = max(tolerance, _ROUNDING * len(amounts))
    converted = []
    for amount, entry in amounts:
        rate = entry.exchange_rate
        if convert and amount is not None:
            amount = convert(amount, rate) if rate else None
            if amount and rate and rate != 1:
                slack += abs(amount) * _RATE_ROUNDING / abs(rate)
        converted.append(amount)
    return _Total(_sum(converted), slack)


def _compare_nearest(check: str, claim: str, actual: Decimal | None, expected: Iterable[_Total]) -> Finding:
    """Compare an amount with the nearest of several; return a warning if none is equal."""
    known = [(total.amount, total.slack) for total in expected if total.amount is not None]
    if actual is None or not known:
        return _compare(check, claim, None, actual, TOLERANCE, severity="warning")
    amount, slack = min(known, key=lambda total: (abs(actual - total[0]) > total[1], abs(actual - total[0])))
    return _compare(check, claim, amount, actual, slack, severity="warning")


def _revenue(entry: wire.MarketingSource) -> Decimal | None:
    return _sum(metric.figure(entry).total for metric in (REV_SHARE, CPA, FEES))


def _sum(amounts: Iterable[Decimal | None]) -> Decimal | None:
    total = Decimal(0)
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


# Findings


def _compare(
    check: str, claim: str, expected: Decimal | None, actual: Decimal | None, tolerance: Decimal, *, severity: Severity
) -> Finding:
    """Return a finding about whether two amounts are equal; `severity` applies if they are not."""
    if expected is None or actual is None:
        message = f"{claim}: cannot be checked, because a figure is missing"
        return Finding(check=check, severity="info", message=message)
    residual = actual - expected
    holds = abs(residual) <= tolerance
    return Finding(
        check=check,
        severity="info" if holds else severity,
        message=f"{claim}: {'holds' if holds else f'off by {_round(residual):,f}'}",
        expected=_round(expected),
        actual=_round(actual),
        residual=_round(residual),
    )


def _warning(
    check: str, message: str, *, where: str = "", expected: str | None = None, actual: Decimal | str | None = None
) -> Finding:
    return Finding(check=check, severity="warning", where=where, message=message, expected=expected, actual=actual)


def _round(value: Decimal) -> Decimal:
    """Round to twelve decimals if there are more."""
    exponent = value.as_tuple().exponent
    return value.quantize(_DECIMALS_SHOWN) if isinstance(exponent, int) and exponent < -12 else value
