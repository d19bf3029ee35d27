"""`shipper ledger`: counts of accepted records by time, brand, affiliate and media."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import (
    OutputOption,
    SettingsOptions,
    confirm,
    format_option,
    prepare,
    readable_state,
    require_directory,
    say,
    several,
    tolerate_closed_stdout,
)
from shipper.cli.report.options import EndArgument, OptionalStartArgument, days_between
from shipper.cli.writing import capture, check_target, write
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from shipper.report.ledger import DeadLetterCounts
    from shipper.report.ranges import DateRange
    from shipper.report.rows import FlatTable

TimezoneOption = Annotated[
    str, option("ZONE", "Time zone in which the platform's days begin and end, such as Europe/Malta.")
]


def ledger(
    start: OptionalStartArgument = "",
    end: EndArgument = "",
    by: Annotated[
        Literal["hour", "day", "month", "brand", "affiliate", "media"],
        option(
            "WHAT",
            "hour, day or month: one line for each, per brand, affiliate and media; brand, affiliate or media: one "
            "line for each, over all days.",
        ),
    ] = "day",
    timezone: TimezoneOption = "UTC",
    form: Annotated[
        Literal["table", "csv", "json", "ndjson", "xlsx"], format_option("table, csv, json, ndjson or xlsx.")
    ] = "table",
    output: OutputOption = "",
    erase_affiliate: Annotated[
        str | None, option("ID", "Erase this AffiliateID; its counts are kept as (erased).")
    ] = None,
    yes: Annotated[bool, flag("Do not ask for confirmation before erasing.", "--yes")] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Show what the service accepted, by time, brand, affiliate and media (the digits of the BTag).

    Also shows skipped duplicates, and dead letters whose records can be parsed. A record counts for the day
    of its Timestamp. An AffiliateID that is not an identifier is shown as a hash. Works with and without a running
    shipper.

    Example: shipper ledger 2026-10 --by brand --format csv -o october.csv
    """
    from shipper.report.days import days_of_zone
    from shipper.report.exports import check_installed, to_csv, to_ndjson, to_xlsx
    from shipper.report.ledger import first_complete_day, ledger_table, read_dead_letters, read_range

    days = days_of_zone(timezone)
    period = days_between(start, end, days.today(time.time())) if start else None
    target = check_target(output, form)
    settings = prepare(options)
    check_installed(form)
    if erase_affiliate is not None:
        if period is not None:
            raise typer.BadParameter("--erase-affiliate erases all days; leave out START and END")
        _erase(require_directory(settings), erase_affiliate, yes=yes)
        return
    settings = readable_state(settings, has_ledger=True)
    rows = read_range(settings, period)
    letters = read_dead_letters(settings, period)
    table = ledger_table(rows, letters.counts, days=days, by=by, period=period)
    complete_from = first_complete_day(settings, days)
    notes = _notes(complete_from, period, letters)
    if not (settings.state.directory / "state.db").exists():
        notes.append(f"no shipper has used state.directory, {settings.state.directory}, yet")
    match form:
        case "table":
            data = capture(lambda console: _print(table, period, days.name, notes, console), target)
        case "json":
            data = _json(table, days.name, letters.unattributed, complete_from)
        case "csv":
            data = to_csv(table)
        case "ndjson":
            data = to_ndjson(table)
        case "xlsx":
            data = to_xlsx([table], created=datetime.fromtimestamp(time.time(), UTC))
    with tolerate_closed_stdout():
        write(data, target, form=form)
        for note in notes if form in {"csv", "ndjson", "xlsx"} else ():
            say(f"note: {note}")


def _notes(complete_from: date | None, period: DateRange | None, letters: DeadLetterCounts) -> list[str]:
    notes = []
    if complete_from is not None and (period is None or period.start < complete_from):
        notes.append(f"counts of days before {complete_from} have expired (state.ledger_retention_days)")
    if letters.unattributed:
        notes.append(f"unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read")
    return notes


def _erase(settings: Settings, affiliate_id: str, *, yes: bool) -> None:
    """Erase an AffiliateID, given in its original form or as shown."""
    from shipper.report.ledger import read_dead_letters
    from shipper.state.affiliates import ERASED, affiliate_namer, read_or_generate_key
    from shipper.state.directory import has_state, locked_directory
    from shipper.state.store import Store

    if affiliate_id in ("", ERASED):
        raise typer.BadParameter("--erase-affiliate needs an AffiliateID")
    directory = settings.state.directory
    if not has_state(directory):
        say(f"the ledger is empty: there is no state directory {directory}")
        return
    confirm("permanently erase this AffiliateID from the ledger? Its counts are kept as (erased).", yes=yes)
    with locked_directory(directory), closing(Store(directory)) as store:
        changed = store.erase_affiliate(affiliate_id)
    say(f"{several(changed, 'count')} of the ledger changed" if changed else "the ledger has no counts for it")
    name = affiliate_namer(read_or_generate_key(directory))(affiliate_id)
    letters = read_dead_letters(settings, None).counts
    if kept := sum(count for key, count in letters.items() if key[2] == name):
        have = several(kept, "dead letter still has", "dead letters still have")
        say(f"{have} it; to look at them: shipper dead-letters show ID; to delete them: shipper dead-letters purge ID")


def _print(table: FlatTable, period: DateRange | None, zone: str, notes: Sequence[str], console: Console) -> None:
    from rich.text import Text

    from shipper.report.formatting import clean
    from shipper.report.ledger import totals_of
    from shipper.report.table import cut, new_table

    if not table.rows:
        message = f"the ledger has nothing for {period}" if period else "the ledger is empty"
        console.print(Text("; ".join([message, *notes])), soft_wrap=True)
        return
    totals = totals_of(table)
    names = len(table.columns) - len(totals)
    shown = new_table(
        [column.name.removesuffix("_id").capitalize() for column in table.columns[:names]],
        [name.replace("_", " ").capitalize() for name in totals],
    )
    lines, left_out = cut(table.rows)
    for row in lines:
        shown.add_row(*(Text(clean(str(value))) for value in row[:names]), *(f"{value:,}" for value in row[names:]))
    shown.add_section()
    shown.add_row("total", *[""] * (names - 1), *(f"{total:,}" for total in totals.values()), style="bold")
    notes = [f"time zone of the days: {zone}", left_out, *notes]
    sentences = [f"{note[:1].upper()}{note[1:]}." for note in notes if note]
    console.print(shown)
    console.print(Text(f"\n{' '.join(sentences)}", style="dim"))


def _json(table: FlatTable, zone: str, unattributed: int, complete_from: date | None) -> bytes:
    from shipper.report.ledger import totals_of

    names = [column.name for column in table.columns]
    document = {
        "timezone": zone,
        "complete_from": complete_from,
        "totals": {**totals_of(table), "unattributed_dead_letters": unattributed},
        "rows": [dict(zip(names, row, strict=True)) for row in table.rows],
    }
    return msgspec.json.encode(document) + b"\n"
