"""`shipper dead-letters replay`: sends dead letters once more."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import msgspec
import typer
from msgspec.structs import replace as replaced

from shipper.cli.asking import conversation, running_shipper
from shipper.cli.common import (
    RateOption,
    SettingsOptions,
    copied_state,
    prepare,
    readable_state,
    several,
    with_settings_options,
)
from shipper.cli.dead_letters.selecting import (
    DeliveryOption,
    PathOption,
    ReasonOption,
    SinceOption,
    opened,
    selection_of,
    warn_of_cut_letters,
)
from shipper.cli.shipping import SummaryForm, SummaryOption, ship, tell
from shipper.config.settings import KafkaSettings, Settings, require_endpoint
from shipper.model.errors import StateInUseError

if TYPE_CHECKING:
    from shipper.pipeline import Source
    from shipper.pipeline.opening import OpenState
    from shipper.state.letters import Letters, Selection

_EXAMPLES_PER_RULE = 5


@with_settings_options
def replay(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Send at most N.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent and what would fail.")] = False,
    summary: SummaryOption = "text",
    rate: RateOption = None,
    *,
    options: SettingsOptions,
) -> None:
    """
    Send dead letters again, oldest first, with the present settings. Accepted ones are deleted.

    What fails again stays, with its new reason. A further run, also after a crash, continues with the rest. All of them
    are sent, even several with one EventId: the later one may be the corrected one. Beside `shipper run`, that process
    sends them.

    Example: shipper dead-letters replay --reason ip --set records.relax=ip
    """
    if dry_run and summary == "json":
        raise typer.BadParameter("--dry-run sends nothing, so it has no summary; leave out --format json")
    selection = selection_of(reason, since, path, delivery)
    settings = prepare(options, needs=None if dry_run else "intake", rate=rate)
    if dry_run:
        raise typer.Exit(_rehearse(readable_state(settings), selection, limit))
    if settings.input.kafka is not None:
        raise typer.Exit(_replay_of_group(settings, settings.input.kafka, selection, limit, summary))
    try:
        code = ship("dead-letters replay", settings, _replayed(settings, selection, limit), form=summary)
    except StateInUseError:
        if (client := running_shipper(settings.state.directory)) is None:
            raise
        if rate is not None:
            client.close()
            raise typer.BadParameter("a running shipper sends them at its own rate; leave out --rate") from None
        code = _ask(client, settings, selection, limit, summary)
    rest = _code_of_rest(settings, selection)
    raise typer.Exit(code or rest)


def _ask(client: socket, settings: Settings, selection: Selection, limit: int | None, form: SummaryForm) -> int:
    """Have a running shipper replay; returns the exit code."""
    from shipper.pipeline.control import Replayed, ReplayRequest

    destination = require_endpoint(settings, "intake").base_url
    request = ReplayRequest(selection=selection, limit=limit, records=settings.records, destination=destination)
    code, content = conversation(client, "replay", request)
    replayed = msgspec.json.decode(content, type=Replayed | None)
    if replayed is None:  # it was refused
        raise typer.Exit(code)
    tell(replayed.summary, replayed.reasons, settings, form)
    return code


def _code_of_rest(settings: Settings, selection: Selection) -> int:
    with opened(settings) as letters:
        is_some_left = letters is not None and warn_of_cut_letters(letters, selection)
    return 3 if is_some_left else 0


def _replay_of_group(
    settings: Settings, kafka: KafkaSettings, selection: Selection, limit: int | None, summary: SummaryForm
) -> int:
    """Replay in a copy of what the brokers keep, and write back to them what has changed."""
    with copied_state(settings, kafka) as (view, copied):
        view.begin_replay(settings.input.max_record_bytes)
        code = ship("dead-letters replay", copied, _replayed(copied, selection, limit), form=summary)
        view.write_back(f"replay-{uuid4()}")
        rest = _code_of_rest(copied, selection)
    return code or rest


def _replayed(settings: Settings, selection: Selection, limit: int | None) -> Callable[[OpenState], Source]:
    """Return what makes the source once the lock is held."""

    def source(state: OpenState) -> Source:
        from shipper.sources.replay import Replay
        from shipper.state.letters import open_letters

        letters = open_letters(settings.state.directory)
        assert letters is not None, "the store has just made it"
        ids = state.store.letters.ids(replaced(selection, is_whole=True), limit)
        return Replay(letters, ids, state.next_stream_id, csv_delimiter=settings.input.csv_delimiter)

    return source


def _rehearse(settings: Settings, selection: Selection, limit: int | None) -> int:
    """Check the letters without sending them; return the exit code."""
    failed: dict[str, list[str]] = {}
    sent = 0
    is_some_left = False
    with opened(settings) as letters:
        if letters is not None:
            ids = letters.ids(replaced(selection, is_whole=True), limit)
            sent = _judge(settings, letters, ids, failed)
            is_some_left = warn_of_cut_letters(letters, selection)
    count = sum(map(len, failed.values()))
    print(f"{several(sent, 'dead letter')} would be sent, {count:,} would fail again")
    for rule, examples in sorted(failed.items()):
        print(f"\n{rule}: {len(examples):,}")
        print("\n".join(f"  {example}" for example in examples[:_EXAMPLES_PER_RULE]))
        if len(examples) > _EXAMPLES_PER_RULE:
            print(f"  ... and {len(examples) - _EXAMPLES_PER_RULE:,} more")
    return 3 if failed or is_some_left else 0


def _judge(settings: Settings, letters: Letters, ids: list[int], failed: dict[str, list[str]]) -> int:
    """Run letters through the codec; add those that fail to `failed`, by rule, and return how many are good."""
    from shipper.codec import Codec, latest_timestamp
    from shipper.model.records import ReplayStream
    from shipper.sources.replay import Replay

    codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
    latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
    source = Replay(letters, ids, itertools.count(1).__next__, csv_delimiter=settings.input.csv_delimiter)
    good = 0
    for chunk in source.chunks():
        assert isinstance(chunk.stream, ReplayStream)
        for piece in codec.encode_all(chunk, room_bytes=settings.batch.max_bytes, latest=latest):
            good += piece.span.unsettled
            for each in piece.span.rejections:
                words = f"dead letter {chunk.stream.letter_at(each.start_offset)}: {each.message}"
                failed.setdefault(each.rule, []).append(words)
    return good
