"""A reconciliation for a terminal, a spreadsheet and a program."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shipper.report.ranges import DateRange
from shipper.report.reconcile_rows import Elsewhere, Reconciliation, Row
from shipper.report.reconcile_words import STATUS_WORDS, Names, remarks, said_of, span_of, totals_of, verdict
from shipper.report.rows import Column, FlatTable, Value
from shipper.report.wording import number, with_sign

_JSON: Final = msgspec.json.Encoder(decimal_format="number")
_STYLES: Final = {"unexplained": "bold red", "explained": "", "provisional": "yellow", "agrees": "dim"}
_TABLE_WIDTH: Final = 110  # of a terminal; the words need the room
_FIGURES: Final = ("Accepted", "Reported", "Difference", "Dead\nletters")
_NOT_HERE: Final = "not in this account's report"
COLUMNS: Final = (
    Column("account_id", "integer"),
    Column("period_start", "text"),
    Column("period_end", "text"),
    Column("brand_id", "integer"),
    Column("brand_name", "text"),
    Column("source_id", "integer"),
    Column("source_name", "text"),
    Column("accepted", "integer"),
    Column("result", "count"),
    Column("adjustment", "count"),
    Column("reported", "count"),
    Column("difference", "count"),
    Column("dead_letters", "integer"),
    Column("unexplained", "count"),
    Column("status", "text"),
    Column("explanation", "text"),
)


def flat_table(found: Reconciliation, *, shows_elsewhere: bool) -> FlatTable:
    """
    Make one row per period, brand and marketing source.

    Args:
        shows_elsewhere: Add what is not in this account's report; nothing is reported of it.
    """
    names = Names(found)
    rows: list[tuple[Value, ...]] = [
        (
            *_place(found.account, row.days, row.pair.brand, names.brand_name(row.pair)),
            *(row.pair.source, names.source_name(row.pair), row.accepted, row.result, row.adjustment, row.reported),
            *(row.difference, row.dead_letters, row.unexplained, row.status, said_of(row)),
        )
        for row in found.rows
    ]
    if shows_elsewhere:
        rows += [
            (
                *_place(found.account, each.days, each.pair.brand, names.brand_name(each.pair)),
                *(each.pair.source, None, each.accepted, None, None, None, None, None, None, _NOT_HERE, None),
            )
            for each in found.elsewhere
        ]
    return FlatTable("reconciliation", COLUMNS, rows)


def to_json(found: Reconciliation, notes: Sequence[str], *, shows_elsewhere: bool) -> bytes:
    """Write everything as one object."""
    span = span_of(found)
    names = [column.name for column in COLUMNS[1:]]
    rows = [dict(zip(names, row[1:], strict=True)) for row in flat_table(found, shows_elsewhere=False).rows]
    elsewhere: dict[str, Any] = {"accepted": sum(each.accepted for each in found.elsewhere)}
    if shows_elsewhere:
        elsewhere["rows"] = [
            {
                "period_start": each.days.start,
                "period_end": each.days.end,
                "brand_id": each.pair.brand,
                "source_id": each.pair.source,
                "accepted": each.accepted,
            }
            for each in found.elsewhere
        ]
    document = {
        "account_id": found.account,
        "start": span.start,
        "end": span.end,
        "timezone": found.days.name,
        "is_explained": found.is_explained,
        "verdict": verdict(found),
        "rows_by_status": {status: found.count(status) for status in STATUS_WORDS},
        "totals": totals_of(found.rows)._asdict(),
        "day_boundary": {"fitting_utc_offsets_hours": found.offsets, "explains": found.is_boundary},
        "not_in_this_report": elsewhere,
        "notes": [*remarks(found, shows_elsewhere=shows_elsewhere), *notes],
        "rows": rows,
    }
    return _JSON.encode(document) + b"\n"


def print_table(found: Reconciliation, notes: Sequence[str], console: Console, *, shows_all: bool) -> None:
    """
    Print what differs, the totals and the verdict; where there is no room for a table, two lines for each row of it.

    Args:
        shows_all: Print also what agrees and what is not in this account's report.
    """
    names = Names(found)
    console.print(Text(f"Account {found.account}  {names.account}", style="bold"))
    console.print(Text(f"Registrations of {span_of(found)}, in days of {found.days.name}\n"))
    shown = [_line(row, names) for row in found.rows if shows_all or row.difference]
    agreeing = len(found.rows) - len(shown)
    if shows_all:
        shown += [_line_elsewhere(each, names) for each in found.elsewhere]
    totals = totals_of(found.rows)
    figures = _figures(totals.accepted, totals.result, totals.adjustment, totals.difference, totals.dead_letters)
    shown.append(_Line(("total", "", ""), figures, "", "bold"))
    if console.width < _TABLE_WIDTH:
        for line in shown:
            console.print(_in_two_lines(line))
    else:
        console.print(_table(shown))
    if agreeing:
        console.print(Text(f"\n{agreeing:,} further lines agree; --all shows them.", style="dim"))
    console.print(Text(f"\n{verdict(found)}", style="bold" if found.is_explained else "bold red"))
    for note in [*remarks(found, shows_elsewhere=shows_all), *notes]:
        console.print(Text(f"- {note}"))


class _Line(NamedTuple):
    """A line of the table: where, the figures in the order of their titles, and what is said of it."""

    place: tuple[str, str, str]
    figures: list[Text]
    words: str
    style: str


def _line(row: Row, names: Names) -> _Line:
    figures = _figures(row.accepted, row.result, row.adjustment, row.difference, row.dead_letters)
    place = str(row.days), names.brand(row.pair), names.source(row.pair)
    return _Line(place, figures, said_of(row) or STATUS_WORDS[row.status], _STYLES[row.status])


def _line_elsewhere(each: Elsewhere, names: Names) -> _Line:
    place = str(each.days), names.brand(each.pair), names.source(each.pair)
    return _Line(place, [Text(f"{each.accepted:,}"), *[Text()] * 3], _NOT_HERE, "dim")


def _table(lines: Sequence[_Line]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    for title in ("Period", "Brand", "Source"):
        table.add_column(title, overflow="fold", vertical="top")
    for title in _FIGURES:
        table.add_column(title, justify="right", no_wrap=True, vertical="top")
    table.add_column("What explains it", overflow="fold", vertical="top", ratio=1)
    for line in lines:
        table.add_row(*map(Text, line.place), *line.figures, Text(line.words), style=line.style)
    return table


def _in_two_lines(line: _Line) -> Text:
    figures = zip(_FIGURES, line.figures, strict=True)
    parts = [f"{title.lower()} {figure.plain}".replace("\n", " ") for title, figure in figures if figure.plain]
    first = "  ".join(filter(None, line.place))
    second = ", ".join(parts) + (f": {line.words}" if line.words else "")
    return Text(f"{first}\n    {second}", style=line.style)


def _figures(
    accepted: Decimal | int,
    result: Decimal | None,
    adjustment: Decimal | None,
    difference: Decimal,
    dead_letters: Decimal | int,
) -> list[Text]:
    """Write the figures of a line; an adjustment stands under its result."""
    reported = Text("" if result is None else number(result))
    if adjustment:
        reported.append(f"\nadj {with_sign(number(adjustment), adjustment)}", style="yellow")
    counts = Text(f"{accepted:,}"), Text(f"{dead_letters:,}" if dead_letters else "")
    return [counts[0], reported, Text(with_sign(number(difference), difference)), counts[1]]


def _place(account: int, days: DateRange, brand: int, brand_name: str) -> tuple[Value, ...]:
    return account, days.start.isoformat(), days.end.isoformat(), brand, brand_name
