"""`shipper dead-letters purge`: permanently deletes dead letters, or erases a consumer's data."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, NoReturn

import msgspec
import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import SettingsOptions, confirm, prepare, say, several, state_on_disk
from shipper.cli.control import connect_to_running, send_request
from shipper.cli.dead_letters.selection import (
    Filters,
    empty_message,
    find_letters,
    format_counts,
    group_names,
    letters_in,
    unknown_ids,
)
from shipper.config.settings import KafkaSettings, Settings
from shipper.model.errors import DeliveryGaveUpError, StateInUseError
from shipper.state.letters import EVERYTHING, Selection

_NAMED_MAX = 100
_UNFINISHED = 4  # exit code


def purge(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Only these IDs, as shown by `dead-letters list`.")
    ] = None,
    *,
    filters: Filters,
    older_than: Annotated[float | None, option("DAYS", "Only those refused more than DAYS ago.", min=0)] = None,
    consumer_id: Annotated[str | None, option("ID", "Erase everything about this consumer, also in the spool.")] = None,
    everything: Annotated[bool, flag("All dead letters.", "--all")] = False,
    yes: Annotated[bool, flag("Do not ask for confirmation.", "--yes")] = False,
    options: SettingsOptions,
) -> None:
    """
    Permanently delete dead letters. They remain counted. This works while shipper is running (--consumer-id: only with
    `shipper run`).

    --consumer-id erases the records with this ConsumerID. A record that cannot be parsed but contains the number is
    listed and kept, and the exit code is 4. The ledger has no ConsumerIDs; to erase an AffiliateID that is a name or
    an address, use: shipper ledger --erase-affiliate.

    Example: shipper dead-letters purge --older-than 90
    """
    selection = filters.selection(older_than)
    has_filter = selection != EVERYTHING
    if consumer_id is not None and (has_filter or everything or ids):
        raise typer.BadParameter(
            "--consumer-id erases everything stored about a consumer; it cannot be combined with filters"
        )
    if ids and (has_filter or everything):
        raise typer.BadParameter("IDs cannot be combined with filters; leave out one of them")
    if has_filter and everything:
        raise typer.BadParameter("--all cannot be combined with filters; leave out one of them")
    if consumer_id is not None:
        _erase(prepare(options), _parse_number(consumer_id), yes=yes)
    elif ids or has_filter or everything:
        _purge(prepare(options), selection, list(dict.fromkeys(ids or ())), yes=yes)
    else:
        raise typer.BadParameter("select dead letters, for example with --older-than 90, or use --all")


def _parse_number(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 40):
        raise typer.BadParameter(f"{text!r} is not a ConsumerID, which is a whole number")
    return str(int(text))


def _purge(settings: Settings, selection: Selection, chosen: list[str], *, yes: bool) -> None:
    from shipper.state.store import Store

    with state_on_disk(settings, is_writer=True) as (on_disk, view):
        with letters_in(on_disk) as letters:
            ids = letters.ids(selection)
            if chosen:
                found, missing = find_letters(letters, chosen, is_group=view is not None)
                if missing:
                    raise unknown_ids(missing, ids)
                ids = sorted(set(found))
            counts = letters.count_by_rule(selection)
        if not ids:
            say(empty_message(selection))
            return
        rules = "" if chosen else f" ({format_counts(counts)})"
        count = len(ids)
        confirm(f"permanently delete {several(count, 'dead letter')}{rules}?", yes=yes)
        if view is not None:
            view.delete(ids)
        else:
            with closing(Store(on_disk.state.directory)) as store:
                count = store.purge(ids)
    say(f"{several(count, 'dead letter')} deleted{_compaction_note(settings.input.kafka, count)}")


def _compaction_note(kafka: KafkaSettings | None, count: int) -> str:
    if kafka is None or not count:
        return ""
    return f"; {'its' if count == 1 else 'their'} bytes remain until the brokers compact {kafka.letters}"


# Erasing a consumer ---------------------------------------------------------------------------------------------------


def _erase(settings: Settings, consumer_id: str, *, yes: bool) -> None:
    """Erase a consumer's data, including what an interrupted attempt left."""
    from shipper.pipeline.erasure import Erasure
    from shipper.state.directory import has_state, locked_directory
    from shipper.state.store import Store

    if settings.input.kafka is not None:
        _erase_in_brokers(settings, settings.input.kafka, consumer_id, yes=yes)
        return
    directory = settings.state.directory
    if not has_state(directory):
        say(f"nothing is stored about consumer {consumer_id}: there is no state directory {directory}")
        return
    spooled = several(0, "spooled record")
    try:
        with locked_directory(directory), closing(Store(directory)) as store:
            erasure = Erasure(settings, store, consumer_id)
            data = erasure.find()
            spooled = several(len(data.spooled), "spooled record")
            if data.letters or data.spooled:
                _confirm_erasure(consumer_id, len(data.letters), spooled, yes=yes)
            purged, doubtful = erasure.erase(data), data.doubtful
    except StateInUseError:
        purged, doubtful = _request_erasure(settings, consumer_id, spooled, yes=yes)
    say(f"consumer {consumer_id}: {several(purged, 'dead letter')} and {spooled} erased")
    if doubtful:
        _report_doubtful(
            doubtful,
            "to turn those of the spool into dead letters: shipper pipe < /dev/null; to look at dead letters: shipper "
            "dead-letters show ID; to delete them: shipper dead-letters purge ID",
        )


def _confirm_erasure(consumer_id: str, letters: int, spooled: str, *, yes: bool) -> None:
    confirm(
        f"erase {several(letters, 'dead letter')} and {spooled} of consumer {consumer_id} without sending them?",
        yes=yes,
    )


def _request_erasure(settings: Settings, consumer_id: str, spooled: str, *, yes: bool) -> tuple[int, list[str]]:
    """Make a running shipper erase the letters; return their number, and descriptions of doubtful ones."""
    from shipper.pipeline.control import EraseRequest, EraseResult

    result = EraseResult(0, [])
    for is_confirmed in (False, True):
        if (client := connect_to_running(settings.state.directory)) is None:
            raise DeliveryGaveUpError("the running shipper has ended; run the same command again")
        request = EraseRequest(consumer_id=consumer_id, records=settings.records, is_confirmed=is_confirmed)
        code, content = send_request(client, "erase", request)
        if code:
            raise typer.Exit(code)
        result = msgspec.json.decode(content, type=EraseResult)
        if result.letters and not is_confirmed:
            _confirm_erasure(consumer_id, result.letters, spooled, yes=yes)
    return result.letters, result.doubtful


def _erase_in_brokers(settings: Settings, kafka: KafkaSettings, consumer_id: str, *, yes: bool) -> None:
    from shipper.pipeline.erasure import Erasure
    from shipper.state.store import Store

    with state_on_disk(settings, is_writer=True) as (on_disk, view):
        assert view is not None
        with closing(Store(on_disk.state.directory)) as store:
            data = Erasure(on_disk, store, consumer_id, group_names(store.letters).__getitem__).find()
        letters = several(len(data.letters), "dead letter")
        if data.letters:
            confirm(f"erase consumer {consumer_id}: {letters}?", yes=yes)
            view.delete(data.letters)
    say(f"consumer {consumer_id}: {letters} erased{_compaction_note(kafka, len(data.letters))}")
    if data.doubtful:
        advice = "to look at them: shipper dead-letters show ID; to delete them: shipper dead-letters purge ID"
        _report_doubtful(data.doubtful, advice)


def _report_doubtful(doubtful: list[str], advice: str) -> NoReturn:
    say(
        f"{several(len(doubtful), 'more record')} cannot be parsed but contain the number; they may belong to "
        "somebody else, so they are kept:"
    )
    for name in doubtful[:_NAMED_MAX]:
        say(f"  {name}")
    if len(doubtful) > _NAMED_MAX:
        say(f"  ... and {len(doubtful) - _NAMED_MAX:,} more")
    say(advice)
    raise typer.Exit(_UNFINISHED)
