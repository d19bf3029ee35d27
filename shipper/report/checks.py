"""
Checks of a report: what can be asked of its figures, as findings with what is left over.

Nothing of it is documented, so how the balances hang together are hypotheses: each is told to hold or not. Whether the
report is of the account that was asked for is no question here: it could not have been read otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, time, timedelta
from decimal import Context, Decimal, localcontext
from itertools import product
from typing import Final

from msgspec.structs import replace

from shipper.model import wire
from shipper.model.units import several
from shipper.report.balances import Entries, check_balances
from shipper.report.changes import diff, place
from shipper.report.currencies import is_same_currency
from shipper.report.findings import Finding, comparison
from shipper.report.metrics import METRICS
from shipper.report.ranges import DateRange

TOLERANCE: Final = Decimal("0.01")

_DAY: Final = timedelta(days=1)
# Room for exact sums and products of figures with 30 digits on either side of the point.
_CONTEXT: Final = Context(prec=200)


def check_report(
    report: wire.DailyReport,
    *,
    requested: DateRange,
    earlier_version: wire.DailyReport | None = None,
    tolerance: Decimal = TOLERANCE,
) -> list[Finding]:
    """
    Check a report by itself, and against an earlier version of it, if one is given.

    Args:
        requested: The days that were asked for.
        earlier_version: What was fetched before for the same account and days.
        tolerance: Up to here, two amounts are the same.
    Returns:
        Of each hypothesis on balances one finding, and a warning if none of those hold that would do; of the other
        checks what is wrong, 0..n findings.
    """
    entries = [(place(brand.id, entry.id), entry) for brand in report.brands for entry in brand.marketing_sources]
    with localcontext(_CONTEXT):
        findings = [
            *check_period(report, requested),
            *_ids(report),
            *_currencies(report, entries),
            *_counts(entries),
            *check_balances(report, entries, tolerance),
        ]
        if earlier_version is not None:
            findings += _check_sum(report, earlier_version)
    return findings


def check_merged(places: Iterable[str]) -> list[Finding]:
    """Warn of marketing sources that the report lists more than once, and that were put together."""
    words = "it is listed more than once; what one listing lacks was taken from another"
    return [_warning("sources_are_listed_once", words, where=where) for where in places]


def check_period(report: wire.DailyReport, requested: DateRange) -> Iterator[Finding]:
    """Check that a report is of the days that were asked for; yields at most one finding."""
    check, period = "period_is_as_requested", report.reporting_period
    stated = f"{period.start} to {period.end}"
    ends = _ends(report)
    if ends is None:
        yield _warning(check, f"the report's period, {stated}, is no period", expected=str(requested), actual=stated)
        return
    start, end = ends
    is_covered = start <= datetime.combine(requested.start, time.min) and end.date() >= requested.end
    # The end may be the last moment of the last day or the first one of the next day.
    is_wider = start.date() < requested.start or end - datetime.combine(requested.end, time.min) > _DAY
    if not is_covered or is_wider:
        message = f"the report is of {stated}, {requested} was asked for"
        yield _warning(check, message, expected=str(requested), actual=stated)


def _ids(report: wire.DailyReport) -> Iterator[Finding]:
    check = "ids_are_unique"
    for brand_id in _repeated(brand.id for brand in report.brands):
        yield _warning(check, f"brand {brand_id} is there more than once", where=place(brand_id))
    for brand in report.brands:
        for source_id in _repeated(entry.id for entry in brand.marketing_sources):
            where = place(brand.id, source_id)
            yield _warning(check, f"marketing source {source_id} is there more than once in its brand", where=where)


def _repeated(ids: Iterable[int]) -> list[int]:
    return [each for each, times in Counter(ids).items() if times > 1]


def _currencies(report: wire.DailyReport, entries: Entries) -> Iterator[Finding]:
    """Find money that cannot be converted: in another currency than the account's, without a rate above 0."""
    places = defaultdict[str | None, list[str]](list)
    for where, entry in entries:
        has_rate = entry.exchange_rate is not None and entry.exchange_rate > 0
        if not has_rate and not is_same_currency(entry.reporting_currency, report.reporting_currency):
            places[entry.reporting_currency].append(where)
    for currency, found in places.items():
        yield _warning(
            "currencies_have_rates",
            f"{len(found)} marketing sources are in {currency or 'a currency that is not given'} without an exchange "
            f"rate, the report is in {report.reporting_currency}",
            where=found[0],
            expected=report.reporting_currency,
            actual=currency,
        )


def _counts(entries: Entries) -> Iterator[Finding]:
    for (where, entry), metric in product(entries, [metric for metric in METRICS if not metric.is_money]):
        figure = metric.figure(entry)
        for part, value in (("result", figure.result), ("adjustment", figure.adjustment)):
            if value is not None and value != value.to_integral_value():
                message = f"{metric.title}: the {part} {value:f} is not whole"
                yield _warning("counts_are_whole", message, where=where, actual=value)
        if figure.result is not None and figure.result < 0:
            message = f"{metric.title}: the result {figure.result:f} is below zero"
            yield _warning("counts_are_not_negative", message, where=where, actual=figure.result)


def check_opening_balance(
    report: wire.DailyReport, previous: wire.DailyReport, tolerance: Decimal = TOLERANCE
) -> Finding:
    """Check a report against the one before it, by itself; neither needs to have its brands any more."""
    check, claim = "opening_balance_is_previous", "the opening balance is the outgoing balance of the period before"
    before, ends = _ends(previous), _ends(report)
    # The period before may end at the first or the last moment of its last day, or at this one's first.
    if before is None or ends is None or not timedelta(0) <= ends[0] - before[1] <= _DAY:
        message = (
            f"{claim}: cannot be told, as that ends at {previous.reporting_period.end} "
            f"and this begins at {report.reporting_period.start}"
        )
        return Finding(check=check, severity="info", message=message)
    with localcontext(_CONTEXT):
        found = comparison(check, claim, previous.outgoing_balance, report.opening_balance, tolerance, if_not="note")
    if found.severity == "note":
        return replace(found, message=f"{found.message}; a payout between the two does that")
    return found


def _check_sum(report: wire.DailyReport, earlier: wire.DailyReport) -> Iterator[Finding]:
    is_same = report.last_check_sum == earlier.last_check_sum
    changes = [change for change in diff(earlier, report) if change.is_figure] if is_same else []
    if changes:
        differing = several(len(changes), "field differs", "fields differ")
        message = f"{differing} from an earlier version with the same checksum"
        yield _warning("check_sum_tells_changes", message, where=changes[0].path)


def _ends(report: wire.DailyReport) -> tuple[datetime, datetime] | None:
    """Read the period, without its zone if it has one after all; None if it is no period."""
    period = report.reporting_period
    try:
        start, end = (datetime.fromisoformat(each).replace(tzinfo=None) for each in (period.start, period.end))
    except ValueError:
        return None
    return (start, end) if start <= end else None


def _warning(
    check: str, message: str, *, where: str = "", expected: str | None = None, actual: Decimal | str | None = None
) -> Finding:
    return Finding(check=check, severity="warning", where=where, message=message, expected=expected, actual=actual)
