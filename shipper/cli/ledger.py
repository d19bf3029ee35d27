"""`shipper ledger`: what was accepted, by day or hour, brand, affiliate and media."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare, reader_may_leave, say
from shipper.cli.report.options import OptionalEndArgument, OptionalStartArgument
from shipper.cli.report.output import write
from shipper.config import Settings

if TYPE_CHECKING:
    from shipper.report.attributing import Attributed
    from shipper.report.ranges import DateRange
    from shipper.report.rows import FlatTable
    from shipper.state.ledger import LedgerRow
    from shipper.state.letters import Content, Letters

_REACH: Final = timedelta(days=2)  # a day of any zone begins and ends within a day of the one of UTC

TimezoneOption = Annotated[
    str, typer.Option("--timezone", metavar="ZONE", help="Whose days they are, such as Europe/Malta.")
]


def ledger(
    start: OptionalStartArgument = None,
    end: OptionalEndArgument = None,
    by: Annotated[Literal["day", "hour"], typer.Option("--by", help="One line per day or per hour.")] = "day",
    timezone: TimezoneOption = "UTC",
    form: Annotated[Literal["table", "csv", "json", "ndjson"], typer.Option("--format", help="The form.")] = "table",
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Show what the service accepted, by day, brand, affiliate and media (the digits of the BTag).

    Besides: duplicates that were skipped, and dead letters as far as their records can be read. Days are those of the
    records' Timestamps. It works beside a shipper that runs, and without one.

    Example: shipper ledger 2026-10-01 2026-10-31 --timezone Europe/Malta --format csv > october.csv
    """
    from shipper.report.days import days_of_zone
    from shipper.report.ledger_table import ledger_table

    only = _range(start, end)
    days = days_of_zone(timezone)
    settings = prepare(config, overrides, log_level, log_format)
    rows = read_rows(settings, only)
    letters = read_dead_letters(settings)
    table = ledger_table(rows, letters.counts, days=days, by=by, only=only)
    note = (
        f"unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read"
        if letters.unattributed
        else ""
    )
    with reader_may_leave():
        match form:
            case "table":
                _print(table, days.name, note)
            case "json":
                write(_json(table, days.name, letters.unattributed), None, form=form)
            case "csv" | "ndjson":
                from shipper.report.exports import to_csv, to_ndjson

                write(to_csv(table) if form == "csv" else to_ndjson(table), None, form=form)
                if note:
                    say(f"note: {note}")


def read_rows(settings: Settings, only: DateRange | None) -> list[LedgerRow]:
    """
    Read the ledger, with what lies on either side of a range as far as its days may reach in some zone.

    Raises:
        StateError: The state cannot be read.
    """
    from shipper.state.ledger import read_ledger
    from shipper.state.store import bring_state_up_to_date

    directory = settings.state.directory
    bring_state_up_to_date(directory)
    if only is None:
        return read_ledger(directory)
    try:
        first, last = only.start - _REACH, only.end + _REACH
    except OverflowError:  # at the ends of the calendar
        return read_ledger(directory)
    return read_ledger(directory, first.isoformat(), last.isoformat())


def read_dead_letters(settings: Settings) -> Attributed:
    """
    Count the dead letters by where the ledger would count them.

    Raises:
        StateError: The state cannot be read.
    """
    from shipper.report.attributing import Attributed, attribute
    from shipper.state.letters import open_letters

    letters = open_letters(settings.state.directory)
    if letters is None:
        return Attributed({})
    with closing(letters):
        return attribute(_contents(letters), settings.records, csv_delimiter=settings.input.csv_delimiter)


def _contents(letters: Letters) -> Iterator[Content]:
    from shipper.state.letters import EVERYTHING

    for letter_id in letters.ids(EVERYTHING):
        content = letters.content(letter_id)
        if content is not None:  # it was there a moment ago
            yield content


def _range(start: datetime | None, end: datetime | None) -> DateRange | None:
    from shipper.report.ranges import DateRange

    if start is None and end is None:
        return None
    if start is None or end is None:
        raise typer.BadParameter("give both START and END, or neither for all there is")
    if start > end:
        raise typer.BadParameter(f"START {start:%Y-%m-%d} is after END {end:%Y-%m-%d}")
    return DateRange(start.date(), end.date())


def _print(table: FlatTable, zone: str, note: str) -> None:
    """Print it for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shipper.report.ledger_table import totals_of
    from shipper.report.wording import clean

    if not table.rows:
        print("nothing is in the ledger" + (f"; {note}" if note else ""), flush=True)
        return
    totals = totals_of(table)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    names = len(table.columns) - len(totals)
    for column in table.columns[:names]:
        shown.add_column(column.name.removesuffix("_id").capitalize(), overflow="fold")
    for name in totals:
        shown.add_column(name.replace("_", " ").capitalize(), justify="right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(clean(str(value))) for value in row[:names]), *(f"{value:,}" for value in row[names:]))
    shown.add_section()
    shown.add_row("total", *[""] * (names - 1), *(f"{total:,}" for total in totals.values()), style="bold")
    console = Console()
    console.print(shown)
    console.print(Text(f"\nDays are those of {zone}." + (f" {note.capitalize()}." if note else ""), style="dim"))
    sys.stdout.flush()


def _json(table: FlatTable, zone: str, unattributed: int) -> bytes:
    from shipper.report.ledger_table import totals_of

    names = [column.name for column in table.columns]
    document = {
        "timezone": zone,
        "totals": {**totals_of(table), "unattributed_dead_letters": unattributed},
        "rows": [dict(zip(names, row, strict=True)) for row in table.rows],
    }
    return msgspec.json.encode(document) + b"\n"
