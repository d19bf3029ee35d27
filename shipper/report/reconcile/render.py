"""A reconciliation as terminal output, table, workbook and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any, Final, NamedTuple, get_args

import msgspec
from msgspec.structs import asdict
from rich.console import Console
from rich.text import Text

from shipper.model.units import several
from shipper.report.exports import to_xlsx
from shipper.report.formatting import number, with_sign
from shipper.report.ranges import DateRange, join_ranges
from shipper.report.reconcile.model import Excluded, Names, Reconciliation, Row, Status, Totals
from shipper.report.reconcile.summary import coverage, headlines, reasons_of, remarks
from shipper.report.rows import Column, FlatTable, Value
from shipper.report.table import cut, new_table

_JSON: Final = msgspec.json.Encoder(decimal_format="number")
_STYLES: Final = {"unexplained": "bold red", "explained": "", "provisional": "yellow", "agrees": "dim"}
_TABLE_WIDTH: Final = 110  # minimum width of a terminal for a table, as the reasons are long
_INDENT: Final = "    "
_FIGURES: Final = ("Accepted", "Reported", "Difference", "Dead\nletters")
_PLACE_COLUMNS: Final = (
    Column("account_id", "integer"),
    Column("period_start", "text"),
    Column("period_end", "text"),
    Column("brand_id", "integer"),
    Column("brand_name", "text"),
    Column("source_id", "integer"),
    Column("source_name", "text"),
)
_FIGURE_COLUMNS: Final = (
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
)
_NO_FIGURES: Final = (None,) * (len(_FIGURE_COLUMNS) - 3)  # all but accepted, contested and status
_OVERALL_COLUMNS: Final = (  # the same in every row
    Column("verdict", "text"),
    Column("is_alarmed", "flag"),
    Column("timezone", "text"),
)
_ROW_COLUMNS: Final = (*_PLACE_COLUMNS, *_FIGURE_COLUMNS, Column("explanation", "text"))


def flat_table(result: Reconciliation) -> FlatTable:
    """Return a row for every period, brand and marketing source, also empty ones, and for excluded records."""
    rows = list(_compared(result))
    for records in result.listed:
        brand, source = records.pair or (None, None)
        place = (*_place(result.account, records.days), brand, None, source, None)
        rows.append((*place, records.accepted, records.contested, *_NO_FIGURES, records.kind, records.reason))
    overall = result.verdict, result.is_alarmed, result.days.name
    return FlatTable("reconciliation", (*_ROW_COLUMNS, *_OVERALL_COLUMNS), [(*row, *overall) for row in rows])


def _compared(result: Reconciliation) -> Iterator[tuple[Value, ...]]:
    names = Names(result)
    for row in result.rows:
        pair = row.pair
        yield (
            *_place(result.account, row.days),
            *(pair.brand, names.brand_name(pair), pair.source, names.source_name(pair)),
            *(getattr(row, column.name) for column in _FIGURE_COLUMNS),
            reasons_of(row),
        )
    for days in sorted({period.days for period in result.periods} - {row.days for row in result.rows}):
        yield *_place(result.account, days), *[None] * 4, 0, 0, *_NO_FIGURES, "agrees", "nothing on either side"


def _place(account: int, days: DateRange) -> tuple[Value, ...]:
    return account, days.start.isoformat(), days.end.isoformat()


def to_json(result: Reconciliation, notes: Sequence[str]) -> bytes:
    names = [column.name for column in _ROW_COLUMNS]
    others = result.of_kind("of another account")
    others_document: dict[str, Any] = {"accepted": sum(records.accepted for records in others)}
    if result.lists_all:
        others_document["rows"] = list(map(_records_as_json, others))
    document = {
        "account_id": result.account,
        **_days_as_json(result.span),
        "timezone": result.days.name,
        "verdict": result.verdict,
        "is_alarmed": result.is_alarmed,
        "is_complete": not result.not_compared,
        "periods": {"compared": len(result.periods), "asked": len(result.periods) + len(result.not_compared)},
        "judged": list(map(_days_as_json, join_ranges(result.judged))),
        "not_yet_judged": [
            {**_days_as_json(days), "reason": reason}
            for reason, periods in result.waiting.items()
            for days in join_ranges(periods)
        ],
        "run_again_on": result.judgeable_on,
        "not_compared": [
            {**_days_as_json(period.days), "reason": period.reason, "accepted": period.accepted}
            for period in result.not_compared
        ],
        "headlines": headlines(result),
        "rows_by_status": {status: result.count(status) for status in get_args(Status)},
        "totals": result.totals._asdict(),
        "unassigned": {
            "accepted": result.unassigned,
            "rows": list(map(_records_as_json, result.of_kind("unassigned"))),
        },
        "contested": result.contested,
        "day_boundary": result.zone
        and {
            "timezones": [zone.option for zone in result.zone.zones],
            "moved": result.zone.moved,
            "chance": result.zone.chance,
        },
        "of_other_accounts": others_document,
        "findings": [
            {**_days_as_json(period.days), **asdict(finding)}
            for period in result.periods
            for finding in period.findings
        ],
        "notes": [*remarks(result), *notes],
        "rows": [dict(zip(names[1:], row[1:], strict=True)) for row in _compared(result)],
    }
    return _JSON.encode(document) + b"\n"


def _days_as_json(days: DateRange) -> dict[str, Any]:
    return {"start": days.start, "end": days.end}


def _records_as_json(records: Excluded) -> dict[str, Any]:
    assert records.pair is not None
    return {
        "period_start": records.days.start,
        "period_end": records.days.end,
        "brand_id": records.pair.brand,
        "source_id": records.pair.source,
        "accepted": records.accepted,
        "account_id": records.owner,
        "contested": records.contested,
    }


def to_workbook(result: Reconciliation, notes: Sequence[str], *, created: datetime) -> bytes:
    """Return a workbook with a sheet of verdict, totals and notes, and a sheet of rows."""
    facts: list[tuple[Value, ...]] = [
        ("verdict", result.verdict),
        *(("", line) for line in headlines(result)),
        ("account", result.account),
        ("days", str(result.span)),
        ("time zone", result.days.name),
        *((f"{name}{_mark(result)}", value) for name, value in result.totals._asdict().items()),
        ("unassigned", result.unassigned),
        ("contested by another account", result.contested),
        *(("note", note) for note in [*remarks(result), *notes]),
    ]
    columns = Column("what", "text"), Column("value", "text")
    tables = [FlatTable("verdict", columns, facts), flat_table(result)]
    return to_xlsx(tables, created=created)


def print_table(result: Reconciliation, notes: Sequence[str], console: Console) -> None:
    """Print verdict, differences and totals; as paragraphs if the terminal is too narrow for a table."""
    account = f"Account {result.account}"
    console.print(Text(account if result.name == account else f"{account}  {result.name}", style="bold"))
    console.print(Text(f"Registrations of {result.span}, with days in {result.days.name}\n"))
    is_ok = result.verdict in {"agree", "nothing to compare", "explained"} and not result.is_alarmed
    for headline in headlines(result):
        console.print(Text(headline, style="bold" if is_ok else "bold red"))
    console.print()
    *listed, total = _lines(result)
    shown, left_out = cut(listed)
    _print_lines([*shown, total], console)
    if left_out:
        console.print(Text(f"\n{left_out}.", style="dim"))
    if not result.lists_all and (agreeing := result.count("agrees")):
        lines = several(agreeing, "further line agrees", "further lines agree")
        console.print(Text(f"\n{lines}; --all lists them, too.", style="dim"))
    for note in [*remarks(result), *notes]:
        console.print(Text(f"- {note}"))


class _Line(NamedTuple):
    """A line of the table; the figures are in the order of `_FIGURES`."""

    place: tuple[str, str, str]
    figures: list[Text]
    text: str
    style: str


def _lines(result: Reconciliation) -> Iterator[_Line]:
    names = Names(result)
    for row in result.rows:
        if result.lists_all or row.difference:
            place = str(row.days), *names.labels(row.pair)
            figures = _figures(row, has_report=row.result is not None)
            yield _Line(place, figures, reasons_of(row) or row.status, _STYLES[row.status])
    for records in result.listed:
        place = str(records.days), *names.labels(records.pair)
        has_count = records.accepted or records.kind != "not begun"
        accepted = [Text(f"{records.accepted:,}" if has_count else ""), *[Text()] * (len(_FIGURES) - 1)]
        if records.kind == "of another account":
            yield _Line(place, accepted, records.reason, "dim")
        else:
            yield _Line(place, accepted, f"{records.kind}: {records.reason}", "yellow")
    yield _Line((f"total{_mark(result)}", "", ""), _figures(result.totals), result.verdict, "bold")


def _figures(figures: Row | Totals, *, has_report: bool = True) -> list[Text]:
    """Format the figures of a line; an adjustment is below the figure that includes it."""
    reported = Text(number(figures.reported) if has_report else "")
    if figures.adjustment:
        adjustment = with_sign(number(figures.adjustment), figures.adjustment)
        reported.append(f"\nincl. adj {adjustment}", style="yellow")
    return [
        Text(f"{figures.accepted:,}"),
        reported,
        Text(with_sign(number(figures.difference), figures.difference)),
        Text(f"{figures.dead_letters:,}" if figures.dead_letters else ""),
    ]


def _print_lines(lines: Iterable[_Line], console: Console) -> None:
    if console.width < _TABLE_WIDTH:
        for line in lines:
            console.print(_paragraph(line, console.width))
        return
    table = new_table(("Period", "Brand", "Source"), _FIGURES)
    table.add_column("Explanation", overflow="fold", vertical="top", ratio=1)
    for line in lines:
        table.add_row(*map(Text, line.place), *line.figures, Text(line.text), style=line.style)
    console.print(table)


def _paragraph(line: _Line, width: int) -> Text:
    figures = zip(_FIGURES, line.figures, strict=True)
    parts = [f"{title.lower()} {figure.plain}".replace("\n", " ") for title, figure in figures if figure.plain]
    first = "  ".join(filter(None, line.place))
    second = ": ".join(filter(None, [", ".join(parts), line.text]))
    wrapped = wrap(second, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
    return Text("\n".join([first, *wrapped]), style=line.style)


def _mark(result: Reconciliation) -> str:
    """Return a mark for totals that lack periods; empty if none is missing."""
    return f" ({coverage(result)})" if result.not_compared else ""
