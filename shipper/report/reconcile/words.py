"""A reconciliation in words: names, verdict, and what is said of each row and of the whole; all forms say the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import groupby
from typing import Final, NamedTuple

from shipper.model.units import several
from shipper.report.metrics import difference as minus
from shipper.report.metrics import plus
from shipper.report.ranges import DateRange, joined
from shipper.report.reconcile.rows import NOTHING, Elsewhere, Pair, Reconciliation, Row, Status, Zone
from shipper.report.wording import clean, named, number, with_sign

STATUSES: Final[tuple[Status, ...]] = ("agrees", "explained", "provisional", "unexplained")
NOT_COMPARED: Final = "not compared"
NOT_BEGUN: Final = "not begun"
UNASSIGNED: Final = "unassigned"
OF_OTHERS: Final = "of another account"
_NO_MEDIA: Final = "no media"
_CASES_SHOWN: Final = 10**9
_RECORDS_ARE: Final = ("accepted record is", "accepted records are")
_NAMED_MAX: Final = 5  # marketing sources that a sentence names


class Totals(NamedTuple):
    """
    Of all rows together.

    Attributes:
        missing: What is unexplained and missing from the report.
        surplus: What is unexplained and the report has more.
        unjudged: What time may still explain.
        taken_back: What the platform took back of what it had counted; 0 or less.
        contested: How many of the accepted records another account claims, too.
    """

    accepted: Decimal
    result: Decimal
    adjustment: Decimal
    reported: Decimal
    difference: Decimal
    dead_letters: Decimal
    unexplained: Decimal
    missing: Decimal
    surplus: Decimal
    unjudged: Decimal
    taken_back: Decimal
    contested: Decimal


class Names:
    """The names of brands and marketing sources; the latest report's count."""

    def __init__(self, found: Reconciliation) -> None:
        latest = found.periods[-1].report.source.affiliate_account_name if found.periods else ""
        self.account = clean(latest) or f"Account {found.account}"
        self._brands: dict[int, str] = {}
        self._sources: dict[Pair, str] = {}
        for period in found.periods:
            for brand in period.report.brands:
                self._brands[brand.id] = brand.name or ""
                self._sources |= {Pair(brand.id, entry.id): entry.name or "" for entry in brand.marketing_sources}

    def place(self, days: DateRange, pair: Pair | None) -> tuple[str, str, str]:
        """Return period, brand and marketing source, each with number and name; empty = all."""
        return str(days), self.brand(pair) if pair else "", self.source(pair) if pair else ""

    def brand_name(self, pair: Pair) -> str:
        return self._brands.get(pair.brand, "")

    def source_name(self, pair: Pair) -> str:
        return self._sources.get(pair, "")

    def brand(self, pair: Pair) -> str:
        """Number and name."""
        return named(pair.brand, self.brand_name(pair))

    def source(self, pair: Pair) -> str:
        """Number and name."""
        return _NO_MEDIA if pair.source is None else named(pair.source, self.source_name(pair))


def span_of(found: Reconciliation) -> DateRange:
    """Return the days from the first period to the last."""
    holes = [*found.holes, *([found.later] if found.later else ())]
    days = [*(period.days for period in found.periods), *(hole.days for hole in holes)]
    return DateRange(min(each.start for each in days), max(each.end for each in days))


def totals_of(rows: Iterable[Row]) -> Totals:
    """Add up rows, exactly."""
    totals = Totals(*[NOTHING] * len(Totals._fields))
    for row in rows:
        figures = Totals(
            Decimal(row.accepted),
            row.result or NOTHING,
            row.adjustment or NOTHING,
            row.reported,
            row.difference,
            Decimal(row.dead_letters),
            row.unexplained,
            max(NOTHING, row.unexplained.copy_negate()),
            max(NOTHING, row.unexplained),
            row.unjudged,
            row.taken_back,
            Decimal(row.contested),
        )
        totals = Totals(*map(plus, totals, figures))
    return totals


def coverage(found: Reconciliation) -> str:
    """Return `2 of 3 periods`, to be said beside every total; empty if every period was compared."""
    count = len(found.periods) + len(found.holes)
    return "" if found.is_complete else f"{len(found.periods):,} of {several(count, 'period')}"


def headlines(found: Reconciliation) -> list[str]:
    """Return the lines at the top of every form, the verdict first."""
    return [
        f"Verdict: {found.verdict}. {' '.join(_verdict(found))}",
        *_compared(found),
        *_waiting(found),
        *_alarm(found),
        *_holes(found),
        *_unassigned(found),
    ]


def _verdict(found: Reconciliation) -> Iterator[str]:
    totals = totals_of(found.rows)
    match found.verdict:
        case "agree":
            yield "The report and the ledger agree."
        case "nothing to compare":
            yield f"{_nothing(found)}."
        case "not yet judged" if found.periods and found.is_empty:
            yield f"{_nothing(found)} so far."
        case "not yet judged" if not found.judged:
            yield "No day can be judged yet."
        case "not yet judged":
            yield "In what can be judged, nothing is unexplained."
        case "explained":
            yield "All differences are explained."
        case "incomplete":
            yield "Not everything could be compared; in the rest nothing is unexplained."
    if totals.missing:
        records = "record is" if totals.missing == 1 else "records are"
        yield f"{number(totals.missing)} accepted {records} missing from the report's registrations."
    if totals.surplus:
        registrations = "registration" if totals.surplus == 1 else "registrations"
        yield f"The report has {number(totals.surplus)} {registrations} more than were accepted."
    if zone := found.zone:
        yield _zone(found, zone)


def _nothing(found: Reconciliation) -> str:
    if not found.dead_letters:
        return "Nothing was sent and nothing is reported"
    were = several(found.dead_letters, "record was", "records were")
    they = "it was" if found.dead_letters == 1 else "they were"
    return f"{were} refused after {they} sent, nothing was accepted and nothing is reported"


def _compared(found: Reconciliation) -> Iterator[str]:
    """Say what the totals are; what the difference is made of, if of more than one thing."""
    if not found.periods:
        return
    totals = totals_of(found.rows)
    explained = minus(minus(totals.difference, totals.unexplained), totals.unjudged)
    parts = {
        "missing": totals.missing.copy_negate(),
        "too many": totals.surplus,
        "not yet judged": totals.unjudged,
        "explained": explained,
    }
    made_of = [f"{_signed(amount)} {what}" for what, amount in parts.items() if amount]
    taken_apart = f" ({', '.join(made_of)})" if len(made_of) > 1 else ""
    days = _listed(period.days for period in found.periods)
    yield f"Total {days}: {_figures(totals)}{taken_apart}."


def _waiting(found: Reconciliation) -> Iterator[str]:
    """Say which days are judged, which are not and why, and when to ask again."""
    if not found.not_yet_judged:
        return
    days = several(found.settle_days, "day")
    waiting = {
        f"ended less than {days} ago": found.recent,
        "not over": found.unfinished,
        NOT_BEGUN: [found.later.days] if found.later else [],
    }
    listed = [f"{_listed(periods)} ({why})" for why, periods in waiting.items() if periods]
    if found.judged and found.judged != [period.days for period in found.periods]:
        judged = set(found.judged)
        totals = totals_of(row for row in found.rows if row.days in judged)
        yield f"Judged {_listed(found.judged)}: {_figures(totals)}."
    again = f" Run it again on {found.again_on} or later." if found.again_on else ""
    yield f"Not yet judged: {', '.join(listed)}.{again}"


def _listed(days: Iterable[DateRange]) -> str:
    return ", ".join(map(str, joined(days)))


def _figures(totals: Totals) -> str:
    accepted, reported = number(totals.accepted), number(totals.reported)
    return f"accepted {accepted}, reported {reported}, difference {_signed(totals.difference)}"


def _signed(amount: Decimal) -> str:
    return with_sign(number(amount), amount)


def _zone(found: Reconciliation, zone: Zone) -> str:
    first, *others = (f"{clock.name} (--timezone {clock.option})" for clock in zone.clocks)
    also = f", and as well with those of {', '.join(others)}" if others else ""
    return (
        f"The report's days are not those of {found.days.name}: with those of {first} all differences vanish{also}. "
        f"{several(zone.moved, 'record counts', 'records count')} on another day then; by chance a zone "
        f"fits in {_odds(zone.chance)} cases."
    )


def _odds(chance: float) -> str:
    """Write a small chance as one of so many."""
    return f"less than 1 of {_CASES_SHOWN:,}" if chance * _CASES_SHOWN < 1 else f"1 of {int(1 / chance):,}"


def _alarm(found: Reconciliation) -> Iterator[str]:
    totals = totals_of(found.rows)
    if totals.taken_back:
        count = totals.taken_back.copy_negate()
        share = f" ({count / totals.accepted:.1%} of what was accepted)" if totals.accepted else ""
        what = "Alarm" if found.is_alarmed else "Taken back"
        registrations = "registration" if count == 1 else "registrations"
        yield (
            f"{what}: the platform took back {number(count)} {registrations}{share}, "
            "by restating its report or by adjustments."
        )


def _holes(found: Reconciliation) -> Iterator[str]:
    for reason, group in groupby(found.holes, key=lambda hole: hole.reason):
        holes = list(group)
        accepted = sum(hole.accepted for hole in holes)
        days = _listed(hole.days for hole in holes)
        records = several(accepted, *_RECORDS_ARE)
        yield f"{coverage(found)}; not compared: {days}, as {reason}. {records} of these days."


def _unassigned(found: Reconciliation) -> Iterator[str]:
    if found.unassigned:
        yield (
            f"Unassigned: {several(found.unassigned, *_RECORDS_ARE)} of {_sources(found)}, which no report has ever "
            "named. Say whose they are with report.media or report.accounts, or fetch the reports of other accounts."
        )
    if found.contested:
        yield (
            f"Contested: {several(found.contested, *_RECORDS_ARE)} claimed by account {found.account} and another one, "
            "by their media and their AffiliateID; they count where the media belongs."
        )


def _sources(found: Reconciliation) -> str:
    places = dict.fromkeys(each.pair.source for each in found.elsewhere if each.owner is None)
    names = [_NO_MEDIA if source is None else f"marketing source {source}" for source in places]
    more = f" and {len(names) - _NAMED_MAX:,} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


def remarks(found: Reconciliation, *, shows_elsewhere: bool) -> list[str]:
    """Return further remarks, one sentence each."""
    said = []
    if found.count("unexplained") and {row.unexplained > 0 for row in found.rows if row.unexplained} == {True, False}:
        said.append(
            "Some days lack records and others have too many. If the days of the report are those of another time zone "
            f"than {found.days.name}, name it with --timezone."
        )
    others = sum(each.accepted for each in found.elsewhere if each.owner is not None)
    if others:
        how = "" if shows_elsewhere else "; --all lists them"
        said.append(f"{several(others, *_RECORDS_ARE)} of other accounts{how}.")
    return [*said, *findings(found)]


def findings(found: Reconciliation) -> Iterator[str]:
    """Yield what is wrong in the reports; each check once, with the first period that it is true of."""
    told: dict[str, list[str]] = {}
    for period in found.periods:
        for finding in period.findings:
            told.setdefault(finding.check, []).append(finding.text(period.days))
    for said in told.values():
        yield said[0] + (f" (and {len(said) - 1:,} more)" if len(said) > 1 else "")


class LeftOut(NamedTuple):
    """
    Accepted records that have no part in the comparison.

    Attributes:
        pair: None = of all brands.
        contested: How many of them another account claims, too; None = not counted.
        why: One of `NOT_COMPARED`, `NOT_BEGUN`, `UNASSIGNED` and `OF_OTHERS`.
        words: Why, for a reader.
    """

    days: DateRange
    pair: Pair | None
    accepted: int
    contested: int | None
    why: str
    words: str


def left_out(found: Reconciliation, *, shows_elsewhere: bool) -> list[LeftOut]:
    """
    List the accepted records that have no part in the comparison, by why they have none.

    Args:
        shows_elsewhere: Add what is of other accounts.
    """
    unassigned = [_left_out(each) for each in found.elsewhere if each.owner is None]
    holes = [LeftOut(hole.days, None, hole.accepted, None, NOT_COMPARED, hole.reason) for hole in found.holes]
    others = [_left_out(each) for each in found.elsewhere if each.owner is not None]
    later = found.later and LeftOut(found.later.days, None, found.later.accepted, None, NOT_BEGUN, found.later.reason)
    return [*unassigned, *holes, *([later] if later else ()), *(others if shows_elsewhere else ())]


def _left_out(each: Elsewhere) -> LeftOut:
    why, words = UNASSIGNED, "no report has ever named this source"
    if each.owner is not None:
        why, words = OF_OTHERS, f"of account {each.owner}"
        words += f"; {each.contested:,} of them contested" if each.contested else ""
    return LeftOut(each.days, each.pair, each.accepted, each.contested, why, words)


def said_of(row: Row) -> str:
    """Return what explains the difference of a row."""
    return "; ".join(_said_of(row))


def _said_of(row: Row) -> Iterator[str]:
    if not row.difference:
        return
    if row.unjudged:
        yield "not yet judged: the days have not been over for long"
    if row.unexplained:
        count = number(row.unexplained.copy_abs())
        yield f"unexplained: {count} missing from the report" if row.unexplained < 0 else f"unexplained: {count} more"
    yield from (explanation.words for explanation in row.explanations)
    if row.result is None:
        yield "the report has no figure for it"
    if row.contested:
        yield f"contested: {row.contested:,} of the accepted records"
    if not row.accepted:
        yield "nothing was accepted for it"
