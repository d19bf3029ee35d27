"""A reconciliation as sentences: headlines, remarks, and the reasons of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from shipper.model.units import several
from shipper.report.formatting import number, with_sign
from shipper.report.metrics import minus
from shipper.report.ranges import DateRange, join_ranges
from shipper.report.reconcile.model import Reconciliation, Row, Totals, ZoneFit, totals_of

_CASES_SHOWN: Final = 10**9
_RECORDS_ARE: Final = ("accepted record is", "accepted records are")
_NAMED_MAX: Final = 5  # marketing sources named in a sentence


def coverage(result: Reconciliation) -> str:
    """Return `2 of 3 periods`, to show beside totals; empty if all periods were compared."""
    count = len(result.periods) + len(result.not_compared)
    return f"{len(result.periods):,} of {several(count, 'period')}" if result.not_compared else ""


def headlines(result: Reconciliation) -> list[str]:
    """Return the lines at the top of all formats, verdict first."""
    return [
        f"Verdict: {result.verdict}. {' '.join(_verdict(result))}",
        *_totals(result),
        *_waiting(result),
        *_taken_back(result),
        *_not_compared(result),
        *_ownership(result),
    ]


def _verdict(result: Reconciliation) -> Iterator[str]:
    totals = result.totals
    match result.verdict:
        case "agree":
            yield "The report and the ledger agree."
        case "nothing to compare":
            yield f"{_nothing(result)}."
        case "not yet judged" if result.periods and result.is_empty:
            yield f"{_nothing(result)} so far."
        case "not yet judged" if not result.judged:
            yield "No day can be judged yet."
        case "not yet judged":
            yield "There are no unexplained differences in the days that can be judged."
        case "explained":
            yield "All differences are explained."
        case "incomplete":
            yield "Not everything could be compared; the rest has no unexplained differences."
    if totals.missing:
        records = "record is" if totals.missing == 1 else "records are"
        yield f"{number(totals.missing)} accepted {records} missing from the report's registrations."
    if totals.surplus:
        registrations = "registration" if totals.surplus == 1 else "registrations"
        yield f"The report has {number(totals.surplus)} more {registrations} than were accepted."
    if result.zone:
        yield _zone(result, result.zone)


def _nothing(result: Reconciliation) -> str:
    if not result.dead_letters:
        return "Nothing was sent and nothing is reported"
    records = several(result.dead_letters, "record was", "records were")
    pronoun = "it was" if result.dead_letters == 1 else "they were"
    return f"{records} refused after {pronoun} sent, nothing was accepted and nothing is reported"


def _zone(result: Reconciliation, fit: ZoneFit) -> str:
    first, *others = (f"{zone.name} (--timezone {zone.option})" for zone in fit.zones)
    also = f", and also with days in {', '.join(others)}" if others else ""
    is_shown = fit.chance * _CASES_SHOWN >= 1
    odds = f"1 of {int(1 / fit.chance):,}" if is_shown else f"less than 1 of {_CASES_SHOWN:,}"
    return (
        f"The report does not use days in {result.days.name}: with days in {first}, all differences disappear{also}. "
        f"{several(fit.moved, 'record then counts', 'records then count')} for another day; a zone would match by "
        f"coincidence in {odds} cases."
    )


def _totals(result: Reconciliation) -> Iterator[str]:
    """Yield the totals, with the parts of the difference if there are several."""
    if not result.periods:
        return
    totals = result.totals
    parts = {
        "missing": totals.missing.copy_negate(),
        "too many": totals.surplus,
        "not yet judged": totals.unjudged,
        "explained": minus(minus(totals.difference, totals.unexplained), totals.unjudged),
    }
    listed = [f"{with_sign(number(amount), amount)} {name}" for name, amount in parts.items() if amount]
    days = _days(period.days for period in result.periods)
    composition = f" ({', '.join(listed)})" if len(listed) > 1 else ""
    yield f"Total {days}: {_figures(totals)}{composition}."


def _waiting(result: Reconciliation) -> Iterator[str]:
    """Yield the judged days, the others with reasons, and when to run it again."""
    if not result.not_yet_judged:
        return
    if result.judged and len(result.judged) < len(result.periods):
        judged = set(result.judged)
        totals = totals_of(row for row in result.rows if row.days in judged)
        yield f"Judged {_days(result.judged)}: {_figures(totals)}."
    texts = {"recent": f"ended less than {several(result.settle_days, 'day')} ago"}
    waiting = [(_days(periods), texts.get(reason, reason)) for reason, periods in result.waiting.items() if periods]
    listed = ", ".join(f"{days} ({reason})" for days, reason in waiting)
    again = f" Run it again on {result.judgeable_on} or later." if result.judgeable_on else ""
    yield f"Not yet judged: {listed}.{again}"


def _days(days: Iterable[DateRange]) -> str:
    return ", ".join(map(str, join_ranges(days)))


def _figures(totals: Totals) -> str:
    difference = with_sign(number(totals.difference), totals.difference)
    return f"accepted {number(totals.accepted)}, reported {number(totals.reported)}, difference {difference}"


def _taken_back(result: Reconciliation) -> Iterator[str]:
    totals = result.totals
    if totals.taken_back:
        count = totals.taken_back.copy_negate()
        share = f" ({count / totals.accepted:.1%} of what was accepted)" if totals.accepted else ""
        label = "Alarm" if result.is_alarmed else "Taken back"
        registrations = "registration" if count == 1 else "registrations"
        yield (
            f"{label}: the platform took back {number(count)} {registrations}{share}, "
            "by restating or adjusting its report."
        )


def _not_compared(result: Reconciliation) -> Iterator[str]:
    for reason, group in groupby(result.not_compared, key=lambda period: period.reason):
        periods = list(group)
        days = _days(period.days for period in periods)
        records = several(sum(period.accepted for period in periods), *_RECORDS_ARE)
        yield f"{coverage(result)}; not compared: {days}, because {reason}. {records} in these days."


def _ownership(result: Reconciliation) -> Iterator[str]:
    if result.unassigned:
        sources = dict.fromkeys(records.pair.source for records in result.of_kind("unassigned") if records.pair)
        names = ["no media" if source is None else f"marketing source {source}" for source in sources]
        more = f" and {len(names) - _NAMED_MAX:,} more" if len(names) > _NAMED_MAX else ""
        yield (
            f"Unassigned: {several(result.unassigned, *_RECORDS_ARE)} of {', '.join(names[:_NAMED_MAX])}{more}, which "
            "never appeared in a report. Assign them to an account with report.media or report.accounts, or fetch the "
            "reports of other accounts."
        )
    if result.contested:
        yield (
            f"Contested: {several(result.contested, *_RECORDS_ARE)} claimed by account {result.account} and another "
            "one, by media and AffiliateID; they count for the account of the media."
        )


def remarks(result: Reconciliation) -> list[str]:
    """Return further remarks, one sentence each."""
    sentences = []
    totals = result.totals
    if totals.missing and totals.surplus:
        sentences.append(
            "Some days lack records and others have too many. If the report uses another time zone than "
            f"{result.days.name}, set it with --timezone."
        )
    if others := sum(records.accepted for records in result.of_kind("of another account")):
        hint = "" if result.lists_all else "; --all lists them"
        sentences.append(f"{several(others, *_RECORDS_ARE)} of other accounts{hint}.")
    return [*sentences, *findings(result)]


def findings(result: Reconciliation) -> Iterator[str]:
    """Yield the findings of the reports, one for each check, from the first period that has it."""
    by_check: dict[str, list[str]] = {}
    for period in result.periods:
        for finding in period.findings:
            by_check.setdefault(finding.check, []).append(finding.text(period.days))
    for texts in by_check.values():
        yield texts[0] + (f" (and {len(texts) - 1:,} more)" if len(texts) > 1 else "")


def reasons_of(row: Row) -> str:
    """Return the explanations of a row's difference."""
    reasons = []
    if row.unjudged:
        reasons.append("not yet judged: the days ended only recently")
    if row.missing:
        reasons.append(f"unexplained: {number(row.missing)} missing from the report")
    if row.surplus:
        reasons.append(f"unexplained: {number(row.surplus)} too many in the report")
    reasons += [explanation.text for explanation in row.explanations]
    if row.result is None:
        reasons.append("the report has no figure")
    if row.contested:
        reasons.append(f"contested: {row.contested:,} of the accepted records")
    if not row.accepted:
        reasons.append("nothing was accepted")
    return "; ".join(reasons) if row.difference else ""
