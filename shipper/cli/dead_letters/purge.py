"""`shipper dead-letters purge`: deleted for good, or all that is kept of a consumer erased."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare, say
from shipper.cli.dead_letters.selecting import (
    DeliveryOption,
    PathOption,
    ReasonOption,
    SinceOption,
    by_rule,
    none_found,
    opened,
    selection_of,
)
from shipper.config import Settings

if TYPE_CHECKING:
    from shipper.state.letters import Selection


def purge(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = "",
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Only those refused before that.")
    ] = None,
    consumer_id: Annotated[
        str | None,
        typer.Option("--consumer-id", metavar="ID", help="Erase this consumer, in the spool, too."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Delete dead letters for good. They stay counted. Works while a shipper runs, except for --consumer-id.

    Example: shipper dead-letters purge --older-than 90
    """
    selection = selection_of(reason, since, path, delivery, older_than)
    has_filter = selection != selection_of()
    if consumer_id is not None:
        if has_filter or everything:
            raise typer.BadParameter("--consumer-id erases all that is kept of a consumer, so it goes with no filter")
        consumer_id = _checked_number(consumer_id)
    elif not has_filter and not everything:
        raise typer.BadParameter("name which ones, such as --older-than 90, or say --all")
    elif has_filter and everything:
        raise typer.BadParameter("--all goes with no filter; leave out one of them")
    settings = prepare(config, overrides, log_level, log_format)
    if consumer_id is not None:
        _erase(settings.state.directory, consumer_id, yes=yes)
    else:
        _purge(settings, selection, yes=yes)


def _checked_number(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 40):
        raise typer.BadParameter(f"{text!r} is no ConsumerID, which is a whole number")
    return str(int(text))


def _purge(settings: Settings, selection: Selection, *, yes: bool) -> None:
    from shipper.state.store import Store

    with opened(settings) as letters:
        counts = letters.count_by_rule(selection) if letters else {}
        ids = letters.ids(selection) if letters else []
    if not ids:
        say(none_found(selection))
        return
    _confirm(f"delete {len(ids):,} dead letters for good ({by_rule(counts)})?", yes=yes)
    store = Store(settings.state.directory)
    try:
        say(f"{store.purge(ids):,} dead letters deleted")
    finally:
        store.close()


def _erase(directory: Path, consumer_id: str, *, yes: bool) -> None:
    """Erase what is kept of a consumer; also looks for what an earlier try that was cut off has left."""
    from shipper.state.directory import locked_directory
    from shipper.state.erasure import erase_spooled, spooled_records
    from shipper.state.store import Store

    if not directory.exists():
        say(f"nothing is kept of consumer {consumer_id}, as there is no state directory {directory}")
        return
    with locked_directory(directory):
        store = Store(directory)
        try:
            known, unknown = store.letters.of_consumer(consumer_id)
            spooled = spooled_records(directory / "spool", consumer_id)
            if known or unknown or spooled:
                _confirm(
                    f"erase consumer {consumer_id}: {len(known):,} dead letters, {len(unknown):,} more that hold the "
                    f"number and whose consumer is unknown, {spooled:,} records in the spool, which will not be sent?",
                    yes=yes,
                )
            erased = erase_spooled(directory / "spool", consumer_id)
            purged = store.purge([*known, *unknown])
            store.scrub()
        finally:
            store.close()
    say(f"consumer {consumer_id}: {purged:,} dead letters and {erased:,} spooled records erased")


def _confirm(question: str, *, yes: bool) -> None:
    """Go on only with a yes; ends the command otherwise."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise typer.BadParameter(f"{question} There is nobody to ask; say --yes")
    if not typer.confirm(question, err=True):
        say("nothing was deleted")
        raise typer.Exit(0)
