"""A reconciliation for a terminal, a spreadsheet and a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from textwrap import wrap
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shipper.model.units import several
from shipper.report.exports import to_xlsx
from shipper.report.ranges import DateRange, joined
from shipper.report.reconcile.rows import Elsewhere, Reconciliation, Row, Zone
from shipper.report.reconcile.words import (
    NOT_BEGUN,
    OF_OTHERS,
    STATUSES,
    Names,
    coverage,
    headlines,
    left_out,
    remarks,
    said_of,
    span_of,
    totals_of,
)
from shipper.report.rows import Column, FlatTable, Value
from shipper.report.table import new_table
from shipper.report.wording import number, with_sign

_JSON: Final = msgspec.json.Encoder(decimal_format="number")
_STYLES: Final = {"unexplained": "bold red", "explained": "", "provisional": "yellow", "agrees": "dim"}
_TABLE_WIDTH: Final = 110  # of a terminal; the words need the room
_INDENT: Final = "    "
_FIGURES: Final = ("Accepted", "Reported", "Difference", "Dead\nletters")
COLUMNS: Final = (
    Column("account_id", "integer"),
    Column("period_start", "text"),
    Column("period_end", "text"),
    Column("brand_id", "integer"),
    Column("brand_name", "text"),
    Column("source_id", "integer"),
    Column("source_name", "text"),
    Column("accepted", "integer"),
    Column("contested", "integer"),
    Column("result", "count"),
    Column("adjustment", "count"),
    Column("reported", "count"),
    Column("difference", "count"),
    Column("dead_letters", "integer"),
    Column("unexplained", "count"),
    Column("unjudged", "count"),
    Column("taken_back", "count"),
    Column("status", "text"),
    Column("explanation", "text"),
    Column("verdict", "text"),
    Column("is_alarmed", "flag"),
    Column("timezone", "text"),
)
_WHOLE: Final = 3  # columns at the end that say the same of every row


def flat_table(found: Reconciliation, *, shows_elsewhere: bool) -> FlatTable:
    """
    Make one row per period, brand and marketing source, and after them those of what could not be compared.

    What is unassigned has a row per period, brand and source, each hole has one, and so has a period of nothing;
    the days that have not begun have one together. The verdict of the whole stands in every row.

    Args:
        shows_elsewhere: Add what is of other accounts.
    """
    rows = list(_compared(found))
    for each in left_out(found, shows_elsewhere=shows_elsewhere):
        brand, source = each.pair or (None, None)
        place = (*_place(found.account, each.days), brand, None, source, None)
        rows.append((*place, each.accepted, each.contested, *[None] * 8, each.why, each.words))
    whole = found.verdict, found.is_alarmed, found.days.name
    return FlatTable("reconciliation", COLUMNS, [(*row, *whole) for row in rows])


def _compared(found: Reconciliation) -> Iterator[tuple[Value, ...]]:
    names = Names(found)
    for row in found.rows:
        yield (
            *_place(found.account, row.days),
            *(row.pair.brand, names.brand_name(row.pair), row.pair.source, names.source_name(row.pair)),
            *(row.accepted, row.contested, row.result, row.adjustment, row.reported, row.difference),
            *(row.dead_letters, row.unexplained, row.unjudged, row.taken_back, row.status, said_of(row)),
        )
    for days in sorted({period.days for period in found.periods} - {row.days for row in found.rows}):
        yield *_place(found.account, days), *[None] * 4, 0, 0, *[None] * 8, "agrees", "nothing on either side"


def to_json(found: Reconciliation, notes: Sequence[str], *, shows_elsewhere: bool) -> bytes:
    span = span_of(found)
    names = [column.name for column in COLUMNS[1:-_WHOLE]]
    others = [each for each in found.elsewhere if each.owner is not None]
    elsewhere: dict[str, Any] = {"accepted": sum(each.accepted for each in others)}
    if shows_elsewhere:
        elsewhere["rows"] = [_as_json(each) for each in others]
    unassigned = [_as_json(each) for each in found.elsewhere if each.owner is None]
    document = {
        "account_id": found.account,
        "start": span.start,
        "end": span.end,
        "timezone": found.days.name,
        "verdict": found.verdict,
        "is_alarmed": found.is_alarmed,
        "is_complete": found.is_complete,
        "periods": {"compared": len(found.periods), "asked": len(found.periods) + len(found.holes)},
        "judged": _ranges(found.judged),
        "not_yet_judged": [
            *({**each, "reason": "recent"} for each in _ranges(found.recent)),
            *({**each, "reason": "not over"} for each in _ranges(found.unfinished)),
            *({**each, "reason": NOT_BEGUN} for each in _ranges([found.later.days] if found.later else [])),
        ],
        "run_again_on": found.again_on,
        "not_compared": [
            {"start": hole.days.start, "end": hole.days.end, "reason": hole.reason, "accepted": hole.accepted}
            for hole in found.holes
        ],
        "headlines": headlines(found),
        "rows_by_status": {status: found.count(status) for status in STATUSES},
        "totals": totals_of(found.rows)._asdict(),
        "unassigned": {"accepted": found.unassigned, "rows": unassigned},
        "contested": found.contested,
        "day_boundary": found.zone and _zone(found.zone),
        "of_other_accounts": elsewhere,
        "findings": [
            {"start": period.days.start, "end": period.days.end, **asdict(finding)}
            for period in found.periods
            for finding in period.findings
        ],
        "notes": [*remarks(found, shows_elsewhere=shows_elsewhere), *notes],
        "rows": [dict(zip(names, row[1:], strict=False)) for row in _compared(found)],
    }
    return _JSON.encode(document) + b"\n"


def to_workbook(found: Reconciliation, notes: Sequence[str], *, shows_elsewhere: bool, created: datetime) -> bytes:
    """
    Write a workbook: a sheet with the verdict, the totals and the notes, and one with a row per line.

    Raises:
        ReportError: As of `to_xlsx`.
    """
    said = [("", line) for line in headlines(found)]
    totals = [(f"{name}{_mark(found)}", value) for name, value in totals_of(found.rows)._asdict().items()]
    counts = [("unassigned", found.unassigned), ("contested by another account", found.contested)]
    rest = [("note", each) for each in [*remarks(found, shows_elsewhere=shows_elsewhere), *notes]]
    facts: list[tuple[Value, ...]] = [
        ("verdict", found.verdict),
        *said,
        ("account", found.account),
        ("days", str(span_of(found))),
        ("time zone", found.days.name),
        *totals,
        *counts,
        *rest,
    ]
    columns = Column("what", "text"), Column("value", "text")
    tables = [FlatTable("verdict", columns, facts), flat_table(found, shows_elsewhere=shows_elsewhere)]
    return to_xlsx(tables, created=created)


def print_table(found: Reconciliation, notes: Sequence[str], console: Console, *, shows_all: bool) -> None:
    """
    Print the verdict, what differs and the totals; where there is no room for a table, two lines for each row of it.

    Args:
        shows_all: Print also what agrees and what is of other accounts.
    """
    names = Names(found)
    account = f"Account {found.account}"
    console.print(Text(account if names.account == account else f"{account}  {names.account}", style="bold"))
    console.print(Text(f"Registrations of {span_of(found)}, by days of {found.days.name}\n"))
    is_calm = found.verdict in {"agree", "nothing to compare", "explained"} and not found.is_alarmed
    for headline in headlines(found):
        console.print(Text(headline, style="bold" if is_calm else "bold red"))
    console.print()
    shown = [_line(row, names) for row in found.rows if shows_all or row.difference]
    agreeing = len(found.rows) - len(shown)
    for each in left_out(found, shows_elsewhere=shows_all):
        is_others = each.why == OF_OTHERS
        words = each.words if is_others else f"{each.why}: {each.words}"
        has_count = each.accepted or each.why != NOT_BEGUN
        accepted = [Text(f"{each.accepted:,}" if has_count else ""), *[Text()] * (len(_FIGURES) - 1)]
        shown.append(_Line(names.place(each.days, each.pair), accepted, words, "dim" if is_others else "yellow"))
    totals = totals_of(found.rows)
    figures = _figures(totals.accepted, totals.reported, totals.adjustment, totals.difference, totals.dead_letters)
    shown.append(_Line((f"total{_mark(found)}", "", ""), figures, found.verdict, "bold"))
    if console.width < _TABLE_WIDTH:
        for line in shown:
            console.print(_in_two_lines(line, console.width))
    else:
        console.print(_table(shown))
    if agreeing:
        agree = several(agreeing, "further line agrees", "further lines agree")
        console.print(Text(f"\n{agree}; --all also lists what agrees.", style="dim"))
    for note in [*remarks(found, shows_elsewhere=shows_all), *notes]:
        console.print(Text(f"- {note}"))


class _Line(NamedTuple):
    """A line of the table: where, the figures in the order of their titles, and what is said of it."""

    place: tuple[str, str, str]
    figures: list[Text]
    words: str
    style: str


def _line(row: Row, names: Names) -> _Line:
    reported = None if row.result is None else row.reported
    figures = _figures(row.accepted, reported, row.adjustment, row.difference, row.dead_letters)
    return _Line(names.place(row.days, row.pair), figures, said_of(row) or row.status, _STYLES[row.status])


def _table(lines: Sequence[_Line]) -> Table:
    table = new_table(("Period", "Brand", "Source"), _FIGURES)
    table.add_column("What explains it", overflow="fold", vertical="top", ratio=1)
    for line in lines:
        table.add_row(*map(Text, line.place), *line.figures, Text(line.words), style=line.style)
    return table


def _in_two_lines(line: _Line, width: int) -> Text:
    figures = zip(_FIGURES, line.figures, strict=True)
    parts = [f"{title.lower()} {figure.plain}".replace("\n", " ") for title, figure in figures if figure.plain]
    first = "  ".join(filter(None, line.place))
    second = ": ".join(filter(None, [", ".join(parts), line.words]))
    wrapped = wrap(second, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    return Text("\n".join([first, *wrapped]), style=line.style)


def _figures(
    accepted: Decimal | int,
    reported: Decimal | None,
    adjustment: Decimal | None,
    difference: Decimal,
    dead_letters: Decimal | int,
) -> list[Text]:
    """Write the figures of a line; an adjustment stands under the figure that includes it."""
    counted = Text("" if reported is None else number(reported))
    if adjustment:
        counted.append(f"\nincl. adj {with_sign(number(adjustment), adjustment)}", style="yellow")
    counts = Text(f"{accepted:,}"), Text(f"{dead_letters:,}" if dead_letters else "")
    return [counts[0], counted, Text(with_sign(number(difference), difference)), counts[1]]


def _place(account: int, days: DateRange) -> tuple[Value, ...]:
    return account, days.start.isoformat(), days.end.isoformat()


def _mark(found: Reconciliation) -> str:
    """Mark a total that is not of all periods."""
    return f" ({coverage(found)})" if not found.is_complete else ""


def _ranges(days: Iterable[DateRange]) -> list[dict[str, Any]]:
    return [{"start": each.start, "end": each.end} for each in joined(days)]


def _zone(zone: Zone) -> dict[str, Any]:
    return {"timezones": [clock.option for clock in zone.clocks], "moved": zone.moved, "chance": zone.chance}


def _as_json(each: Elsewhere) -> dict[str, Any]:
    return {
        "period_start": each.days.start,
        "period_end": each.days.end,
        "brand_id": each.pair.brand,
        "source_id": each.pair.source,
        "accepted": each.accepted,
        "account_id": each.owner,
        "contested": each.contested,
    }
