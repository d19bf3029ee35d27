"""`shipper dead-letters replay`: sends dead letters again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import msgspec
import typer
from msgspec.structs import replace

from shipper.cli.commands import flag, option
from shipper.cli.common import RATE_KEY, RateOption, SettingsOptions, prepare, readable_state, several, state_on_disk
from shipper.cli.control import connect_to_running, send_request
from shipper.cli.dead_letters.selection import Filters, group_names, letters_in, report_empty, warn_about_truncated
from shipper.cli.shipping import SummaryForm, SummaryOption, print_summary, ship
from shipper.config.settings import Settings, require_endpoint
from shipper.model.errors import StateInUseError
from shipper.state.letters import Letters, Selection, open_letters

if TYPE_CHECKING:
    from shipper.pipeline.opening import OpenState
    from shipper.sources.joined import Source

_EXAMPLES_PER_RULE = 5


def replay(
    filters: Filters,
    limit: Annotated[int | None, option("N", "Send at most N.", "--limit", "-n", min=1)] = None,
    dry_run: Annotated[
        bool, flag("Show what would be sent and what would fail, but send nothing.", "--dry-run")
    ] = False,
    summary: SummaryOption = "text",
    rate: RateOption = None,
    *,
    options: SettingsOptions,
) -> None:
    """
    Send dead letters again, oldest first, with the current settings. Accepted ones are deleted.

    A letter that fails again is kept, with the new reason. The next run, even after a crash, continues with the rest.
    All letters are sent, even several with one EventId, because a later one may be a correction. If `shipper run` is
    running, that process sends them.

    Example: shipper dead-letters replay --reason ip --set records.relax=ip
    """
    if dry_run and summary == "json":
        raise typer.BadParameter("--dry-run sends nothing, so it has no summary; leave out --format json")
    selection = filters.selection()
    settings = prepare(options, needs=None if dry_run else "intake", flags={RATE_KEY: rate})
    if dry_run:
        is_group = settings.input.kafka is not None
        raise typer.Exit(_dry_run(readable_state(settings), selection, limit, is_group=is_group))
    with state_on_disk(settings, is_writer=True) as (on_disk, view):
        with letters_in(on_disk) as letters:
            report_empty(letters, selection)
        if view is not None:  # replay a copy, and write changes back to the brokers
            assert settings.input.kafka is not None
            with view.replaying(f"replay-{uuid4()}"):
                code = _ship(on_disk, selection, limit, summary, settings.input.kafka.letters)
        else:
            try:
                code = _ship(settings, selection, limit, summary)
            except StateInUseError:
                if (client := connect_to_running(settings.state.directory)) is None:
                    raise
                code = _request_replay(client, settings, selection, limit, summary, rate)
        with letters_in(on_disk) as letters:
            has_truncated = warn_about_truncated(letters, selection)
    raise typer.Exit(code or (3 if has_truncated else 0))


def _ship(settings: Settings, selection: Selection, limit: int | None, form: SummaryForm, topic: str = "") -> int:
    def source(state: OpenState) -> Source:
        from shipper.sources.replay import Replay

        ids = state.store.letters.ids(replace(selection, is_whole=True), limit)
        letters = open_letters(settings.state.directory)
        return Replay(
            letters,
            ids,
            state.next_stream_id,
            csv_delimiter=settings.input.csv_delimiter,
            name_letter=group_names(letters).__getitem__ if topic else int,
        )

    return ship("dead-letters replay", settings, source, form=form, topic=topic)


def _request_replay(
    client: socket, settings: Settings, selection: Selection, limit: int | None, form: SummaryForm, rate: float | None
) -> int:
    """Make a running shipper replay the letters; return the exit code."""
    from shipper.pipeline.control import ReplayRequest, ReplayResult

    if rate is not None:
        client.close()
        raise typer.BadParameter("the running shipper uses its own rate; leave out --rate") from None
    destination = require_endpoint(settings, "intake").base_url
    request = ReplayRequest(selection=selection, limit=limit, records=settings.records, destination=destination)
    code, content = send_request(client, "replay", request)
    result = msgspec.json.decode(content, type=ReplayResult | None)
    if result is None:  # the request was refused
        raise typer.Exit(code)
    print_summary(result.summary, result.reasons, settings, form)
    return code


def _dry_run(settings: Settings, selection: Selection, limit: int | None, *, is_group: bool) -> int:
    """Validate the letters without sending them; return the exit code."""
    with letters_in(settings) as letters:
        report_empty(letters, selection)
        ids = letters.ids(replace(selection, is_whole=True), limit)
        valid, failed = _validate(settings, letters, ids, group_names(letters).__getitem__ if is_group else int)
        has_truncated = warn_about_truncated(letters, selection)
    count = sum(map(len, failed.values()))
    print(f"{several(valid, 'dead letter')} would be sent, {count:,} would fail again")
    for rule, messages in sorted(failed.items()):
        print(f"\n{rule}: {len(messages):,}")
        print("\n".join(f"  {message}" for message in messages[:_EXAMPLES_PER_RULE]))
        if len(messages) > _EXAMPLES_PER_RULE:
            print(f"  ... and {len(messages) - _EXAMPLES_PER_RULE:,} more")
    return 3 if failed or has_truncated else 0


def _validate(
    settings: Settings, letters: Letters, ids: list[int], name_letter: Callable[[int], int | str]
) -> tuple[int, dict[str, list[str]]]:
    """Run letters through the codec; return the number of valid ones, and messages for the others by rule."""
    from shipper.codec.codec import Codec
    from shipper.codec.rules import latest_timestamp
    from shipper.model.records import ReplayStream
    from shipper.sources.replay import Replay

    codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
    latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
    source = Replay(letters, ids, itertools.count(1).__next__, csv_delimiter=settings.input.csv_delimiter)
    valid = 0
    failed: dict[str, list[str]] = {}
    for chunk in source.chunks():
        assert isinstance(chunk.stream, ReplayStream)
        for encoded in codec.encode_all(chunk, room_bytes=settings.batch.max_bytes, latest=latest):
            valid += encoded.span.unsettled
            for rejection in encoded.span.rejections:
                letter = name_letter(chunk.stream.letter_at(rejection.start_offset))
                message = f"dead letter {letter}: {rejection.message}"
                failed.setdefault(rejection.rule, []).append(message)
    return valid, failed
