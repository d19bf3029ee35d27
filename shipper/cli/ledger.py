"""`shipper ledger`: what was accepted, by time, brand, affiliate and media."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from shipper.cli.common import (
    OutputOption,
    SettingsOptions,
    confirm,
    format_option,
    prepare,
    readable_state,
    reader_may_leave,
    require_directory,
    say,
    several,
    with_settings_options,
)
from shipper.cli.report.options import EndArgument, OptionalStartArgument, days_between
from shipper.cli.writing import checked_target, printed, write
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from shipper.report.days import Days
    from shipper.report.ledger_table import Attributed
    from shipper.report.ranges import DateRange
    from shipper.report.rows import FlatTable
    from shipper.state.ledger import LedgerRow
    from shipper.state.letters import Content, Letters

_REACH: Final = timedelta(days=2)  # a day of any zone begins and ends within a day of the one of UTC

TimezoneOption = Annotated[
    str,
    typer.Option(
        "--timezone",
        metavar="ZONE",
        help="Zone in which the platform ends its days, such as Europe/Malta. A record counts for its day there.",
    ),
]


@with_settings_options
def ledger(
    start: OptionalStartArgument = "",
    end: EndArgument = "",
    by: Annotated[
        Literal["hour", "day", "month", "brand", "affiliate", "media"],
        typer.Option(
            "--by",
            metavar="WHAT",
            help="hour, day or month: one line for each and brand, affiliate and media; brand, affiliate or media: "
            "one line for each.",
        ),
    ] = "day",
    timezone: TimezoneOption = "UTC",
    form: Annotated[
        Literal["table", "csv", "json", "ndjson", "xlsx"], format_option("table, csv, json, ndjson or xlsx.")
    ] = "table",
    output: OutputOption = "",
    erase_affiliate: Annotated[
        str | None,
        typer.Option(
            "--erase-affiliate", metavar="ID", help="Erase this AffiliateID; its counts are kept as (erased)."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before an erasure.")] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Show what the service accepted, by time, brand, affiliate and media (the digits of the BTag).

    Also shows skipped duplicates, and dead letters as far as their records can be read. Days are those of the records'
    Timestamps. An AffiliateID that is not an identifier is shown as a hash. Works with and without a running shipper.

    Example: shipper ledger 2026-10 --by brand --format csv -o october.csv
    """
    from shipper.report.days import days_of_zone
    from shipper.report.exports import check_installed
    from shipper.report.ledger_table import ledger_table

    days = days_of_zone(timezone)
    only = days_between(start, end, days.today(time.time())) if start else None
    target = checked_target(output, form)
    settings = prepare(options)
    check_installed(form)
    if erase_affiliate is not None:
        if only is not None:
            raise typer.BadParameter("--erase-affiliate erases on all days; leave out START and END")
        _erase(require_directory(settings), erase_affiliate, yes=yes)
        return
    settings = readable_state(settings)
    rows = read_rows(settings, only)
    letters = read_dead_letters(settings)
    table = ledger_table(rows, letters.counts, days=days, by=by, only=only)
    complete_from = first_complete_day(settings, days)
    notes = _notes(complete_from, only, letters)
    with reader_may_leave():
        match form:
            case "table":
                write(printed(lambda console: _print(table, only, days.name, notes, console), target), target)
            case "json":
                write(_json(table, days.name, letters.unattributed, complete_from), target, form=form)
            case _:
                write(_exported(table, form), target, form=form)
                for note in notes:
                    say(f"note: {note}")


def _notes(complete_from: date | None, only: DateRange | None, letters: Attributed) -> list[str]:
    notes = []
    if complete_from is not None and (only is None or only.start < complete_from):
        notes.append(f"counts of days before {complete_from} are past their retention (state.ledger_retention_days)")
    if letters.unattributed:
        notes.append(f"unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read")
    return notes


def first_complete_day(settings: Settings, days: Days) -> date | None:
    """
    Return the first day of which no counts were deleted for their age; None if none were at all.

    Read it after what it is to be said of.

    Raises:
        StateError: The state cannot be read.
    """
    from shipper.state.ledger import kept_from

    start = kept_from(settings.state.directory)
    if not start:
        return None
    first = date.fromisoformat(start)
    day = date.fromisoformat(days.day_of(f"{first}T00"))
    is_cut = days.day_of(f"{first - timedelta(days=1)}T23") == str(day)
    return day + timedelta(days=1) if is_cut else day


def _erase(settings: Settings, affiliate_id: str, *, yes: bool) -> None:
    """Erase an AffiliateID, as it came or as it is shown."""
    from shipper.state.affiliates import ERASED
    from shipper.state.directory import locked_directory
    from shipper.state.store import Store

    if affiliate_id in ("", ERASED):
        raise typer.BadParameter("--erase-affiliate needs an AffiliateID")
    directory = settings.state.directory
    if not directory.exists():
        say(f"nothing is counted, as there is no state directory {directory}")
        return
    confirm("erase this AffiliateID from the ledger for good? Its counts stay, without it.", yes=yes)
    with locked_directory(directory), closing(Store(directory)) as store:
        changed = store.erase_affiliate(affiliate_id)
    say(f"{several(changed, 'count')} of the ledger changed" if changed else "the ledger has no counts for it")


def read_rows(settings: Settings, only: DateRange | None) -> list[LedgerRow]:
    """
    Read the ledger, with what lies on either side of a range as far as its days may reach in some zone.

    Raises:
        StateError: The state cannot be read.
    """
    from shipper.state.ledger import read_ledger

    directory = settings.state.directory
    if only is None:
        return read_ledger(directory)
    try:
        first, last = only.start - _REACH, only.end + _REACH
    except OverflowError:  # at the ends of the calendar
        return read_ledger(directory)
    return read_ledger(directory, first.isoformat(), last.isoformat())


def read_dead_letters(settings: Settings, deliveries: Sequence[str] = ("",)) -> Attributed:
    """
    Count the dead letters by where the ledger would count them.

    Args:
        deliveries: Only those of these delivery classes; empty = any.
    Raises:
        StateError: The state cannot be read.
    """
    from shipper.report.ledger_table import Attributed, attribute
    from shipper.state.affiliates import counted_as, read_or_draw_key
    from shipper.state.letters import open_letters

    letters = open_letters(settings.state.directory)
    if letters is None:
        return Attributed({})
    with closing(letters):
        names = counted_as(read_or_draw_key(settings.state.directory))
        contents = _contents(letters, deliveries)
        return attribute(contents, settings.records, names, csv_delimiter=settings.input.csv_delimiter)


def _contents(letters: Letters, deliveries: Sequence[str]) -> Iterator[Content]:
    from shipper.state.letters import Selection

    for delivery in deliveries:
        for letter_id in letters.ids(Selection(delivery=delivery)):
            content = letters.content(letter_id)
            if content is not None:  # it was there a moment ago
                yield content


def _exported(table: FlatTable, form: Literal["csv", "ndjson", "xlsx"]) -> bytes:
    from shipper.report.exports import to_csv, to_ndjson, to_xlsx

    match form:
        case "csv":
            return to_csv(table)
        case "ndjson":
            return to_ndjson(table)
        case "xlsx":
            return to_xlsx([table], created=datetime.fromtimestamp(time.time(), UTC))


def _print(table: FlatTable, only: DateRange | None, zone: str, notes: Sequence[str], console: Console) -> None:
    from rich.text import Text

    from shipper.report.ledger_table import totals_of
    from shipper.report.table import new_table
    from shipper.report.wording import clean

    if not table.rows:
        nothing = f"nothing is in the ledger of {only}" if only else "nothing is in the ledger"
        console.print(Text("; ".join([nothing, *notes])), soft_wrap=True)
        return
    totals = totals_of(table)
    names = len(table.columns) - len(totals)
    shown = new_table(
        [column.name.removesuffix("_id").capitalize() for column in table.columns[:names]],
        [name.replace("_", " ").capitalize() for name in totals],
    )
    for row in table.rows:
        shown.add_row(*(Text(clean(str(value))) for value in row[:names]), *(f"{value:,}" for value in row[names:]))
    shown.add_section()
    shown.add_row("total", *[""] * (names - 1), *(f"{total:,}" for total in totals.values()), style="bold")
    said = [f"Days are in time zone {zone}.", *(f"{note[:1].upper()}{note[1:]}." for note in notes)]
    console.print(shown)
    console.print(Text(f"\n{' '.join(said)}", style="dim"))


def _json(table: FlatTable, zone: str, unattributed: int, complete_from: date | None) -> bytes:
    from shipper.report.ledger_table import totals_of

    names = [column.name for column in table.columns]
    document = {
        "timezone": zone,
        "complete_from": complete_from,
        "totals": {**totals_of(table), "unattributed_dead_letters": unattributed},
        "rows": [dict(zip(names, row, strict=True)) for row in table.rows],
    }
    return msgspec.json.encode(document) + b"\n"
