"""`shipper run`, `pipe` and `backfill`: the three ways to ship."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from shipper.cli.common import (
    ListenOption,
    RateOption,
    SettingsOptions,
    parsed_time,
    plain,
    prepare,
    read_settings,
    require_directory,
    say,
    set_up_logs,
    several,
    with_settings_options,
)
from shipper.cli.shipping import SummaryForm, SummaryOption, ship, spool_of
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError, SourceError
from shipper.model.printable import printable
from shipper.system.addresses import check_listen_address
from shipper.system.permissions import obstacle

if TYPE_CHECKING:
    from shipper.pipeline import Source
    from shipper.pipeline.opening import OpenState
    from shipper.sources.completion import Completion
    from shipper.sources.identity import StreamBook
    from shipper.sources.tail import FollowedFiles

_MOST_DESCRIPTORS = 1024
_OTHER_DESCRIPTORS = 192  # connections here and there, the state, a file that is opened twice while it is identified
_BACKFILL_WAIT_S = 0.1


@with_settings_options
def run(
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="[PATTERN]...", help="Files, globs or folders, for input.include.")
    ] = None,
    *,
    options: SettingsOptions,
) -> None:
    """
    Follow the files of input.include as they grow and rotate, until SIGTERM or Ctrl-C.

    With input.kafka, be a member of a consumer group instead, without a state directory. The first signal ends reading
    and delivers what was read within delivery.drain_timeout_seconds; a second one ends at once. Nothing is lost either
    way. SIGHUP reads the settings again. Metrics, probes and a status page are served at admin.listen.

    Example: shipper run --config /etc/shipper/shipper.toml
    """

    file = options.file()

    def read() -> Settings:
        file.note_read()
        settings = read_settings(options, needs="intake", include=patterns)
        if not settings.input.include and settings.input.kafka is None:
            message = 'is missing: write include = ["/var/log/app/*.ndjson"] under [input], or [input.kafka]'
            raise ConfigError(message, key="input.include")
        return settings

    settings = read()
    set_up_logs(settings)
    if settings.input.kafka is not None:
        from shipper.cli.member import ship_as_member

        raise typer.Exit(ship_as_member("run", settings, listen=settings.admin.listen, read=read))
    followed: list[FollowedFiles] = []

    def source(state: OpenState) -> Source:
        from shipper.sources.completion import put_back_unfinished
        from shipper.sources.discovery import Patterns
        from shipper.sources.follower import Follower
        from shipper.sources.tail import FollowedFiles

        found = Patterns(
            settings.input.include,
            exclude=settings.input.exclude,
            own_directory=settings.state.directory,
            aside=state.stuck.aside,
        )
        put_back_unfinished(found.include)
        follower = Follower(
            found,
            _book(settings, state),
            state.store.streams,
            rotate_wait_s=settings.input.rotate_wait_seconds,
            wall_time=time.time,
            start=settings.input.start,
            completion=_completion(settings, state),
            max_open=_descriptors_for_files(),
        )
        followed.append(FollowedFiles(follower, found, poll_interval_s=settings.input.poll_interval_seconds))
        return followed[0]

    def apply(settings: Settings) -> None:
        from shipper.status.logs import set_level

        followed[0].reconfigure(settings.input)
        set_level(settings.log.level)

    listen = settings.admin.listen
    raise typer.Exit(ship("run", settings, source, is_one_shot=False, listen=listen, reload=(read, apply), file=file))


@with_settings_options
def pipe(
    summary: SummaryOption = "text",
    rate: RateOption = None,
    listen: ListenOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Ship standard input to its end.

    Input is kept in the state directory until it is delivered; the next `shipper pipe` first delivers what an earlier
    one left.

    Example: producer | shipper pipe --format json
    """
    if sys.stdin is None:
        raise SourceError("standard input is closed; give it a producer: producer | shipper pipe")
    file = options.file()
    settings = require_directory(prepare(options, needs="intake", rate=rate))
    check_listen_address(listen, key="--listen")

    def source(state: OpenState) -> Source:
        return spool_of(settings, state, sys.stdin.fileno())

    raise typer.Exit(ship("pipe", settings, source, form=summary, listen=listen, file=file))


@with_settings_options
def backfill(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, globs or folders; or kafka://TOPIC[/PARTITION[:OFFSET-END]]."),
    ],
    summary: SummaryOption = "text",
    rate: RateOption = None,
    listen: ListenOption = "",
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Only what was written or changed since an ISO date or time, UTC."
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--until",
            metavar="TIME",
            help="Only what was written or changed until an ISO date or time, UTC; a date means the end of that day.",
        ),
    ] = "",
    again: Annotated[
        str,
        typer.Option(
            "--again",
            metavar="NAME",
            help="With kafka://: send once more what was sent already. The same NAME again goes on where that stopped.",
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read, and check it; send and save nothing.")
    ] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Ship files, or parts of the topics of input.kafka, to their end. A further run continues where the last one stopped.

    Example: shipper backfill 'exports/*.ndjson' --format json
    """
    from shipper.sources.completion import put_back_unfinished

    if dry_run and summary == "json":
        raise typer.BadParameter("--dry-run sends nothing, so it has no summary; leave out --format json")
    file = options.file()
    settings = prepare(options, needs=None if dry_run else "intake", rate=rate)
    check_listen_address(listen, key="--listen")
    if any(path.startswith("kafka://") for path in paths):
        raise typer.Exit(
            _backfill_topics(settings, paths, since, until, again, summary, listen=listen, is_dry_run=dry_run)
        )
    settings = require_directory(settings)
    if not dry_run:
        put_back_unfinished(paths)
    files = _changed_within(named_files(paths, settings), since, until)
    if dry_run:
        raise typer.Exit(_rehearse(files, settings))

    def source(state: OpenState) -> Source:
        from shipper.sources.once import FilesOnce

        return FilesOnce(
            files,
            _book(settings, state),
            state.store.streams,
            wall_time=time.time,
            completion=_completion(settings, state),
        )

    raise typer.Exit(ship("backfill", settings, source, form=summary, listen=listen, file=file))


def _backfill_topics(
    settings: Settings,
    addresses: list[str],
    since: str,
    until: str,
    again: str,
    form: SummaryForm,
    *,
    listen: str,
    is_dry_run: bool,
) -> int:
    """Ship parts of topics; return the exit code."""
    kafka = settings.input.kafka
    if kafka is None:
        raise ConfigError("is missing: it says which brokers and which group kafka:// is about", key="input.kafka")
    from shipper.cli.member import ship_as_member
    from shipper.kafka.ranges import wanted

    first = parsed_time(since) if since else None
    what = wanted(addresses, first, parsed_time(until, is_end=True) if until else None, again)
    kafka = what.settings(kafka)
    if is_dry_run:
        for (topic, partition), offsets in sorted(what.ranges(kafka).items()):
            print(f"{topic}/{partition}: offsets {offsets.start:,} to {offsets.stop:,}")
        print(f"\nNothing was sent or saved. Group {kafka.group_id} reads it", flush=True)
        return 0
    # All that is to be read is there: a batch that is not full at once is the last one.
    batch = replace(settings.batch, linger_seconds=min(settings.batch.linger_seconds, _BACKFILL_WAIT_S))
    interval_s = min(settings.state.commit_interval_seconds, _BACKFILL_WAIT_S)
    state = replace(settings.state, commit_interval_seconds=interval_s)
    settings = replace(settings, input=replace(settings.input, kafka=kafka), batch=batch, state=state)
    return ship_as_member("backfill", settings, listen=listen, wanted=what, form=form)


def _changed_within(files: list[Path], since: str, until: str) -> list[Path]:
    """Leave out the files that were last changed outside of a period, and say how many."""
    first = parsed_time(since) if since else -math.inf
    last = parsed_time(until, is_end=True) if until else math.inf
    within = [path for path in files if first <= path.stat().st_mtime < last]
    if left := len(files) - len(within):
        say(f"{several(left, 'file')} left out: not changed {_period(since, until)}")
    return within


def _period(since: str, until: str) -> str:
    return " ".join([f"since {since}"] * bool(since) + [f"until {until}"] * bool(until))


def _rehearse(files: list[Path], settings: Settings) -> int:
    """Check what would be read of files, from where it was read before; return the exit code."""
    from shipper.cli.findings import Check, chunks_of_file
    from shipper.model.records import shown
    from shipper.state.streams import known_streams

    check = Check(settings)
    known = known_streams(settings.state.directory)
    for path in files:
        chunks, offset, lines = chunks_of_file(path, settings, known)
        size = path.stat().st_size
        what = f"from byte {offset:,} of {size:,}" if offset else several(size, "byte")
        print(f"{printable(shown(path))}: {what}")
        check.add(shown(path), chunks, lines_before=lines)
    print(f"\nNothing was sent or saved. {plain(check.in_words())}", flush=True)
    return 3 if check.findings.failed else 0


def named_files(paths: Iterable[str], settings: Settings) -> list[Path]:
    """
    Expand the paths of a command line, oldest file first.

    Raises:
        SourceError: A name, glob or folder gives no file, or a file cannot be read.
    """
    from shipper.sources.discovery import Found, Patterns

    found: dict[Path, Found] = {}
    for path in paths:
        patterns = Patterns([path], own_directory=settings.state.directory)
        files = {each.path: each for each in patterns.find()}
        if not files:
            is_own = Path(path).resolve().is_relative_to(settings.state.directory.resolve()) and os.path.exists(path)
            own = f"{path}: lies in the state directory, which is never read"
            raise SourceError(own if is_own else next(iter(patterns.unmatched().values())))
        found |= files
    for each in found.values():
        if why := obstacle(each.path, os.R_OK):
            raise SourceError(why)
    return sorted(found, key=lambda path: (found[path].status.st_mtime_ns, path))


def _descriptors_for_files() -> int:
    """Raise the limit of descriptors; return how many of them are for inputs."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(hard, _MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - min(_OTHER_DESCRIPTORS, soft // 2))


def _book(settings: Settings, state: OpenState) -> StreamBook:
    from shipper.sources.identity import StreamBook
    from shipper.sources.reader import input_form

    return StreamBook(
        state.store.streams.known("file"),
        state.next_stream_id,
        max_record_bytes=settings.input.max_record_bytes,
        form=input_form(settings),
        aside=state.stuck.aside,
    )


def _completion(settings: Settings, state: OpenState) -> Completion:
    from shipper.sources.completion import Completion

    needs_input = state.store.letters.needs_input
    return Completion(settings.input.on_complete, settings.input.completed_directory, is_needed=needs_input)
