"""`shipper dead-letters purge`: deletes dead letters for good, or erases all that is kept of a consumer."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shipper.cli.asking import conversation, running_shipper
from shipper.cli.common import (
    SettingsOptions,
    confirm,
    copied_state,
    prepare,
    say,
    several,
    with_settings_options,
)
from shipper.cli.dead_letters.selecting import (
    DeliveryOption,
    PathOption,
    ReasonOption,
    SinceOption,
    by_rule,
    no_such_letters,
    none_found,
    opened,
    selection_of,
)
from shipper.config.settings import KafkaSettings, Settings
from shipper.model.errors import DeliveryGaveUpError, StateInUseError

if TYPE_CHECKING:
    from shipper.state.letters import Selection

_NAMED_MAX = 100
_LEFT_TO_DO = 4  # the exit code


@with_settings_options
def purge(
    ids: Annotated[
        list[int] | None, typer.Argument(metavar="[ID]...", help="Only these, as `dead-letters list` shows them.")
    ] = None,
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Only those refused more than DAYS ago.")
    ] = None,
    consumer_id: Annotated[
        str | None,
        typer.Option("--consumer-id", metavar="ID", help="Erase this consumer, also in the spool."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Delete dead letters for good. They stay counted. Works while a shipper runs; with --consumer-id, beside `run` alone.

    --consumer-id erases the records with this ConsumerID. A record that cannot be read and contains the number is
    listed and kept, with exit code 4. The ledger has no ConsumerIDs; to erase an AffiliateID that is a name or an
    address, use: shipper ledger --erase-affiliate.

    Example: shipper dead-letters purge --older-than 90
    """
    selection = selection_of(reason, since, path, delivery, older_than)
    has_filter = selection != selection_of()
    if consumer_id is not None:
        if has_filter or everything or ids:
            raise typer.BadParameter(
                "--consumer-id erases everything that is kept of a consumer; it cannot be combined with filters"
            )
        consumer_id = _checked_number(consumer_id)
    elif ids:
        if has_filter or everything:
            raise typer.BadParameter("IDs cannot be combined with filters; leave out one of them")
    elif not has_filter and not everything:
        raise typer.BadParameter("choose which ones, for example with --older-than 90, or give --all")
    elif has_filter and everything:
        raise typer.BadParameter("--all cannot be combined with filters; leave out one of them")
    settings = prepare(options)
    if settings.input.kafka is not None and consumer_id is not None:
        _erase_of_group(settings, settings.input.kafka, consumer_id, yes=yes)
    elif settings.input.kafka is not None:
        _purge_of_group(settings, settings.input.kafka, selection, ids or [], yes=yes)
    elif consumer_id is not None:
        _erase(settings, consumer_id, yes=yes)
    else:
        _purge(settings, selection, ids or [], yes=yes)


def _checked_number(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 40):
        raise typer.BadParameter(f"{text!r} is not a ConsumerID, which is a whole number")
    return str(int(text))


def _purge(settings: Settings, selection: Selection, named: list[int], *, yes: bool) -> None:
    from shipper.state.store import Store

    with opened(settings) as letters:
        ids = letters.ids(selection) if letters else []
        if named:
            if missing := sorted(set(named).difference(ids)):
                raise no_such_letters(missing, ids)
            ids = sorted(set(named))
        counts = letters.count_by_rule(selection) if letters and not named else {}
    if not ids:
        say(none_found(selection))
        return
    which = f" ({by_rule(counts)})" if counts else ""
    confirm(f"delete {several(len(ids), 'dead letter')} for good{which}?", yes=yes)
    store = Store(settings.state.directory)
    try:
        say(f"{several(store.purge(ids), 'dead letter')} deleted")
    finally:
        store.close()


def _purge_of_group(
    settings: Settings, kafka: KafkaSettings, selection: Selection, named: list[int], *, yes: bool
) -> None:
    if named:
        raise typer.BadParameter("the IDs of a group's dead letters are new at each look; choose by what they are of")
    with copied_state(settings, kafka) as (view, copied):
        with opened(copied) as letters:
            assert letters is not None
            found = letters.newest(selection, sys.maxsize)
            counts = letters.count_by_rule(selection)
        if not found:
            say(none_found(selection))
            return
        confirm(f"delete {several(len(found), 'dead letter')} for good ({by_rule(counts)})?", yes=yes)
        view.delete(found)
    say(f"{several(len(found), 'dead letter')} deleted; their bytes go when the brokers compact {kafka.letters}")


def _erase(settings: Settings, consumer_id: str, *, yes: bool) -> None:
    """Erase what is kept of a consumer, and what an interrupted attempt left."""
    from shipper.pipeline.erasure import Erasure
    from shipper.state.directory import locked_directory
    from shipper.state.store import Store

    directory = settings.state.directory
    if not directory.exists():
        say(f"nothing is kept of consumer {consumer_id}, as there is no state directory {directory}")
        return
    spooled = several(0, "spooled record")
    try:
        with locked_directory(directory), closing(Store(directory)) as store:
            erasure = Erasure(settings, store, consumer_id)
            found = erasure.find()
            spooled = several(len(found.places), "spooled record")
            if found.letters or found.places:
                _confirm_erasure(consumer_id, len(found.letters), spooled, yes=yes)
            purged, doubtful = erasure.erase(found), found.doubtful
    except StateInUseError:
        purged, doubtful = _ask_to_erase(settings, consumer_id, spooled, yes=yes)
    say(f"consumer {consumer_id}: {several(purged, 'dead letter')} and {spooled} erased")
    _end_with_doubtful(
        doubtful,
        "to turn those of the spool into dead letters: shipper pipe < /dev/null; to look at dead letters: shipper "
        "dead-letters show ID; to delete them: shipper dead-letters purge ID",
    )


def _confirm_erasure(consumer_id: str, letters: int, spooled: str, *, yes: bool) -> None:
    confirm(
        f"erase consumer {consumer_id}: {several(letters, 'dead letter')} and {spooled}, which will not be sent?",
        yes=yes,
    )


def _ask_to_erase(settings: Settings, consumer_id: str, spooled: str, *, yes: bool) -> tuple[int, list[str]]:
    """Have a running shipper erase the letters; return how many there were, and those that are doubtful."""
    from shipper.pipeline.control import Erased, EraseRequest

    erased = Erased(0, [])
    for is_confirmed in (False, True):
        if (client := running_shipper(settings.state.directory)) is None:
            raise DeliveryGaveUpError("the running shipper has ended meanwhile; run the same command again")
        request = EraseRequest(consumer_id=consumer_id, records=settings.records, is_confirmed=is_confirmed)
        code, content = conversation(client, "erase", request)
        if code:
            raise typer.Exit(code)
        erased = msgspec.json.decode(content, type=Erased)
        if erased.letters and not is_confirmed:
            _confirm_erasure(consumer_id, erased.letters, spooled, yes=yes)
    return erased.letters, erased.doubtful


def _erase_of_group(settings: Settings, kafka: KafkaSettings, consumer_id: str, *, yes: bool) -> None:
    """Erase a consumer's dead letters in the brokers."""
    from shipper.pipeline.erasure import Erasure
    from shipper.state.store import Store

    with copied_state(settings, kafka) as (view, copied):
        with closing(Store(copied.state.directory)) as store:
            every = {each.id: each for each in store.letters.newest(selection_of(), sys.maxsize)}
            named = {each.id: f"{each.path}, offset {each.start_offset}" for each in every.values()}
            found = Erasure(copied, store, consumer_id, named.__getitem__).find()
        letters = several(len(found.letters), "dead letter")
        if found.letters:
            confirm(f"erase consumer {consumer_id}: {letters}?", yes=yes)
            view.delete(every[each] for each in found.letters)
    when = f"; their bytes go when the brokers compact {kafka.letters}" if found.letters else ""
    say(f"consumer {consumer_id}: {letters} erased{when}")
    advice = "to look at them: shipper dead-letters list; to delete them: shipper dead-letters purge, with filters"
    _end_with_doubtful(found.doubtful, advice)


def _end_with_doubtful(doubtful: list[str], advice: str) -> None:
    if not doubtful:
        return
    say(
        f"{several(len(doubtful), 'record')} more cannot be read and contain the number; they may be somebody "
        "else's, so they are kept:"
    )
    for each in doubtful[:_NAMED_MAX]:
        say(f"  {each}")
    if len(doubtful) > _NAMED_MAX:
        say(f"  ... and {len(doubtful) - _NAMED_MAX:,} more")
    say(advice)
    raise typer.Exit(_LEFT_TO_DO)
