"""`shipper run`, `pipe` and `backfill`: ship growing files, standard input, or complete files."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec.structs import replace

from shipper.cli.commands import flag, option
from shipper.cli.common import (
    RATE_KEY,
    RateOption,
    SettingsOptions,
    parse_time,
    plain,
    prepare,
    read_settings,
    refuse_topic,
    require_directory,
    say,
    set_up_logs,
    several,
)
from shipper.cli.shipping import SummaryOption, ship
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError, SourceError
from shipper.model.printable import printable
from shipper.system.addresses import check_listen_address
from shipper.system.permissions import access_problem

if TYPE_CHECKING:
    from shipper.pipeline.opening import OpenState
    from shipper.sources.completion import Completion
    from shipper.sources.discovery import FoundFile
    from shipper.sources.identity import StreamIndex
    from shipper.sources.joined import Source
    from shipper.sources.tail import FollowedFiles

_DESCRIPTORS_MAX = 1024
_OTHER_DESCRIPTORS = 256  # two for each connection, the state, files opened twice while they are identified
_OTHER_DESCRIPTORS_MIN = 56  # with few connections
_BACKFILL_WAIT_S = 0.1


class OneShotOptions(NamedTuple):
    """The options of commands that end with their input."""

    summary: SummaryOption = "text"
    rate: RateOption = None
    listen: Annotated[str, option("HOST:PORT", "Serve metrics, probes and the status page at this address.")] = ""


class TimeRange(NamedTuple):
    """The options that select a part of the input."""

    since: Annotated[
        str | None,
        option("TIME", "Only files changed, or messages written, since this time (ISO 8601, UTC by default)."),
    ] = None
    until: Annotated[
        str | None,
        option(
            "TIME",
            "Only files changed, or messages written, before this time (ISO 8601, UTC by default); a date means its "
            "end.",
        ),
    ] = None
    again: Annotated[
        str,
        option(
            "NAME",
            "With kafka://: send everything again. A second run with the same NAME continues where the first one "
            "stopped.",
        ),
    ] = ""

    def times(self) -> tuple[float | None, float | None]:
        """Return start and end, seconds since the epoch, None = no limit; raise `BadParameter` if it is empty."""
        first = None if self.since is None else parse_time(self.since)
        last = None if self.until is None else parse_time(self.until, is_end=True)
        if first is not None and last is not None and first >= last:
            raise typer.BadParameter(f"--since {self.since} is not before --until {self.until}; correct one of them")
        return first, last


def run(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN]...", help="Files, globs or folders; replaces input.include."),
    ] = None,
    *,
    options: SettingsOptions,
) -> None:
    """
    Follow the files of input.include as they grow and rotate, until SIGTERM or Ctrl-C.

    With input.kafka, join a consumer group instead, without a state directory. The first signal stops reading and
    delivers what was read within delivery.drain_timeout_seconds; a second one exits at once. Nothing is lost either
    way. SIGHUP reloads the settings. Metrics, probes and a status page are served at admin.listen.

    Example: shipper run --config /etc/shipper/shipper.toml
    """

    file = options.file()

    def read() -> Settings:
        file.note_read()
        settings = read_settings(options, needs="intake", flags={"input.include": patterns or None})
        if not settings.input.include and settings.input.kafka is None:
            message = 'is missing: write include = ["/var/log/app/*.ndjson"] under [input], or [input.kafka]'
            raise ConfigError(message, key="input.include")
        return settings

    settings = read()
    set_up_logs(settings)
    if settings.input.kafka is not None:
        from shipper.cli.member import ship_as_member

        raise typer.Exit(ship_as_member("run", settings, listen=settings.admin.listen, read=read))
    sources: list[FollowedFiles] = []

    def source(state: OpenState) -> Source:
        from shipper.sources.completion import restore_unfinished
        from shipper.sources.discovery import Patterns
        from shipper.sources.follower import Follower
        from shipper.sources.tail import FollowedFiles

        inputs = Patterns(
            settings.input.include,
            exclude=settings.input.exclude,
            state_directory=settings.state.directory,
            skip_reason=state.stuck.skip_reason,
        )
        restore_unfinished(inputs.include)
        follower = Follower(
            inputs,
            stream_index(settings, state),
            state.store.streams,
            rotate_wait_s=settings.input.rotate_wait_seconds,
            wall_time=time.time,
            start=settings.input.start,
            completion=_completion(settings, state),
            max_open=_descriptors_for_files(),
        )
        sources.append(FollowedFiles(follower, poll_interval_s=settings.input.poll_interval_seconds))
        return sources[0]

    def apply(settings: Settings) -> None:
        from shipper.status.logs import set_level

        sources[0].reconfigure(settings.input)
        set_level(settings.log.level)

    listen = settings.admin.listen
    raise typer.Exit(ship("run", settings, source, is_one_shot=False, listen=listen, reload=(read, apply), file=file))


def pipe(one_shot: OneShotOptions, *, options: SettingsOptions) -> None:
    """
    Ship standard input to its end.

    Input is stored in the state directory until it is delivered; the next `shipper pipe` first delivers what the last
    one left.

    Example: producer | shipper pipe --format json
    """
    if sys.stdin is None:
        raise SourceError("standard input is closed; give it a producer: producer | shipper pipe")
    file = options.file()
    settings = require_directory(prepare(options, needs="intake", flags={RATE_KEY: one_shot.rate}))
    check_listen_address(one_shot.listen, key="--listen")

    def source(state: OpenState) -> Source:
        return state.spool(settings, sys.stdin.fileno(), wall_time=time.time)

    raise typer.Exit(ship("pipe", settings, source, form=one_shot.summary, listen=one_shot.listen, file=file))


def backfill(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, globs or folders; or kafka://TOPIC[/PARTITION[:START-END]]."),
    ],
    one_shot: OneShotOptions,
    time_range: TimeRange,
    dry_run: Annotated[
        bool,
        flag(
            "Show what would be read and validate it; with kafka://, show only the offsets. Send and save nothing.",
            "--dry-run",
        ),
    ] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Ship files, or parts of Kafka topics, to their end. The next run continues where the last one stopped.

    Example: shipper backfill 'exports/*.ndjson' --format json
    """
    from shipper.sources.completion import restore_unfinished

    if dry_run and one_shot.summary == "json":
        raise typer.BadParameter("--dry-run sends nothing, so it has no summary; leave out --format json")
    file = options.file()
    settings = prepare(options, needs=None if dry_run else "intake", flags={RATE_KEY: one_shot.rate})
    check_listen_address(one_shot.listen, key="--listen")
    if any(path.startswith("kafka://") for path in paths):
        raise typer.Exit(_backfill_topics(settings, paths, one_shot, time_range, is_dry_run=dry_run))
    settings = require_directory(settings)
    if not dry_run:
        restore_unfinished(paths)
    if time_range.again:
        raise typer.BadParameter("--again is for kafka://; files that were read to their end are not read again")
    files = _filter_by_time(expand_paths(paths, settings), time_range)
    if dry_run:
        raise typer.Exit(_dry_run(files, settings))

    def source(state: OpenState) -> Source:
        from shipper.sources.once import FilesOnce

        return FilesOnce(
            [file.path for file in files],
            stream_index(settings, state),
            state.store.streams,
            wall_time=time.time,
            completion=_completion(settings, state),
        )

    raise typer.Exit(ship("backfill", settings, source, form=one_shot.summary, listen=one_shot.listen, file=file))


def _backfill_topics(
    settings: Settings, addresses: list[str], one_shot: OneShotOptions, time_range: TimeRange, *, is_dry_run: bool
) -> int:
    """Ship parts of topics; return the exit code."""
    kafka = settings.input.kafka
    if kafka is None:
        raise ConfigError("is missing; kafka:// needs its brokers and its group", key="input.kafka")
    from shipper.cli.member import NO_MESSAGES, ship_as_member
    from shipper.kafka.client import missing_topic
    from shipper.kafka.offsets import parse_addresses

    selection = parse_addresses(addresses, *time_range.times(), time_range.again)
    kafka = selection.settings(kafka)
    if is_dry_run:
        for (topic, partition), offsets in sorted(selection.ranges(kafka).items()):
            print(f"{topic}/{partition}: offsets {offsets.start:,} to {offsets.stop:,}")
        if selection.is_empty:
            print(NO_MESSAGES)
        print(f"\nNothing was sent or saved. The run would use the group {kafka.group_id}", flush=True)
        return 0
    # All input exists already: a batch that is not full immediately is the last one.
    batch = replace(settings.batch, linger_seconds=min(settings.batch.linger_seconds, _BACKFILL_WAIT_S))
    settings = replace(settings, input=replace(settings.input, kafka=kafka), batch=batch)
    try:
        return ship_as_member("backfill", settings, listen=one_shot.listen, selection=selection, form=one_shot.summary)
    except ConfigError as error:
        if error.key != "input.kafka.topics":
            raise
        # These topics are arguments, not settings.
        advice = missing_topic(is_input=True, is_argument=True)
        raise SourceError(error.message.replace(missing_topic(is_input=True), advice)) from None


def _filter_by_time(files: list[FoundFile], time_range: TimeRange) -> list[FoundFile]:
    """Return the files last changed in a time range; print how many were left out."""
    first, last = time_range.times()
    end = math.inf if last is None else last
    changed = [file for file in files if (first or -math.inf) <= file.status.st_mtime < end]
    if left := len(files) - len(changed):
        since = f" since {time_range.since}" if time_range.since else ""
        until = f" until {time_range.until}" if time_range.until else ""
        say(f"{several(left, 'file')} left out: not changed{since}{until}")
    return changed


def _dry_run(files: list[FoundFile], settings: Settings) -> int:
    """Validate the unread parts of files; return the exit code."""
    from shipper.cli.findings import Validation, chunks_of_file
    from shipper.model.records import shown
    from shipper.state.streams import read_file_streams

    validation = Validation(settings)
    known = read_file_streams(settings.state.directory)
    for file in files:
        chunks, offset, lines = chunks_of_file(file.path, settings, known)
        size = file.status.st_size
        part = f"from byte {offset:,} of {size:,}" if offset else several(size, "byte")
        print(f"{printable(shown(file.path))}: {part}")
        validation.add(shown(file.path), chunks, lines_before=lines)
    print(f"\nNothing was sent or saved. {plain(validation.text())}", flush=True)
    return 3 if validation.findings.failed else 0


def expand_paths(paths: Iterable[str], settings: Settings) -> list[FoundFile]:
    """Return the matching files, oldest first; raise `SourceError` if a path has none, or one cannot be read."""
    from shipper.sources.discovery import Patterns

    files: dict[Path, FoundFile] = {}
    for path in paths:
        refuse_topic(path)
        patterns = Patterns([path], state_directory=settings.state.directory)
        matches = list(patterns.find())
        if not matches:
            if os.path.exists(path) and Path(path).resolve().is_relative_to(settings.state.directory.resolve()):
                raise SourceError(f"{path}: is in the state directory, which is never read")
            raise SourceError(next(iter(patterns.unmatched().values())))
        files |= {match.path: match for match in matches}
    for file in files.values():
        if problem := access_problem(file.path, os.R_OK):
            raise SourceError(problem)
    return sorted(files.values(), key=lambda file: (file.status.st_mtime_ns, file.path))


def _descriptors_for_files() -> int:
    """Raise the limit of file descriptors; return how many inputs may use."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(hard, _DESCRIPTORS_MAX) if hard != resource.RLIM_INFINITY else _DESCRIPTORS_MAX
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - min(_OTHER_DESCRIPTORS, max(soft // 2, _OTHER_DESCRIPTORS_MIN)))


def stream_index(settings: Settings, state: OpenState) -> StreamIndex:
    """Return the index of the files in a state."""
    from shipper.sources.identity import StreamIndex
    from shipper.sources.reader import input_form

    return StreamIndex(
        state.store.streams.load("file"),
        state.next_stream_id,
        max_record_bytes=settings.input.max_record_bytes,
        form=input_form(settings),
        skip_reason=state.stuck.skip_reason,
    )


def _completion(settings: Settings, state: OpenState) -> Completion:
    from shipper.sources.completion import Completion

    needs_input = state.store.letters.needs_input
    return Completion(settings.input.on_complete, settings.input.completed_directory, is_needed=needs_input)
