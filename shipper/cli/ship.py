"""`shipper run`, `pipe` and `backfill`: the three ways to ship."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import structlog
import typer

from shipper.cli import load_http_client
from shipper.cli.common import (
    ListenOption,
    RateOption,
    SettingsOptions,
    on_one_line,
    prepare,
    print_json,
    read_settings,
    reader_may_leave,
    run_async,
    say,
    set_up_logs,
    several,
    with_settings_options,
)
from shipper.cli.signals import STOP_SIGNALS, received_signals
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError, SourceError
from shipper.model.records import shown
from shipper.status.logs import is_json, set_level
from shipper.system.addresses import check_listen_address
from shipper.system.memory import keep_memory_released
from shipper.system.permissions import obstacle

if TYPE_CHECKING:
    from shipper.pipeline import Pipeline, Source, Summary
    from shipper.pipeline.opening import OpenState
    from shipper.sources.completion import Completion
    from shipper.sources.identity import StreamBook
    from shipper.sources.once import FilesOnce, ReadBefore
    from shipper.sources.spool import Spool
    from shipper.sources.tail import FollowedFiles
    from shipper.status.board import Board
    from shipper.status.live import Live

log = structlog.get_logger("cli")

SummaryOption = Annotated[
    str, typer.Option("--summary", metavar="FORM", help="text (to stderr) or json (last line of stdout).")
]

WorkersOption = Annotated[
    str, typer.Option("--workers", metavar="N", help="Processes that share the work, or auto: one per core.")
]

_REDRAW_S = 0.2
_WORKERS_MAX = 256
_WORKER_BYTES = 1 << 25  # for less, another process is not worth its start
_MOST_DESCRIPTORS = 1024
_OTHER_DESCRIPTORS = 192  # connections here and there, the state, a file that is opened twice while it is identified


@with_settings_options
def run(*, options: SettingsOptions) -> None:
    """
    Follow the files of input.include as they grow and rotate, until SIGTERM or Ctrl-C.

    The first signal ends reading and delivers what was read within delivery.drain_timeout_seconds; a second one ends
    at once. Nothing is lost either way. SIGHUP reads the settings again. Metrics, probes and a status page are served
    at admin.listen.

    Example: shipper run --config /etc/shipper/shipper.toml
    """

    def read() -> Settings:
        settings = read_settings(options, needs="intake")
        if not settings.input.include:
            message = 'is missing: write include = ["/var/log/app/*.ndjson"] under [input]'
            raise ConfigError(message, key="input.include")
        return settings

    settings = read()
    set_up_logs(settings)
    followed: list[FollowedFiles] = []

    def source(state: OpenState) -> Source:
        from shipper.sources.discovery import Patterns
        from shipper.sources.follower import Follower
        from shipper.sources.tail import FollowedFiles

        patterns = Patterns(
            settings.input.include,
            exclude=settings.input.exclude,
            own_directory=settings.state.directory,
            aside=state.stuck.aside,
        )
        _put_back_unfinished(patterns.include)
        follower = Follower(
            patterns,
            _book(settings, state),
            state.store.streams,
            rotate_wait_s=settings.input.rotate_wait_seconds,
            wall_time=time.time,
            start=settings.input.start,
            completion=_completion(settings, state),
            max_open=_descriptors_for_files(),
        )
        followed.append(FollowedFiles(follower, patterns, poll_interval_s=settings.input.poll_interval_seconds))
        return followed[0]

    def apply(settings: Settings) -> None:
        followed[0].reconfigure(settings.input)
        set_level(settings.log.level)

    listen = settings.admin.listen
    raise typer.Exit(ship("run", settings, source, is_one_shot=False, form="text", listen=listen, reload=(read, apply)))


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

    Example: producer | shipper pipe --summary json
    """
    form = checked_form(summary)
    if sys.stdin is None:
        raise SourceError("standard input is closed; give it a producer: producer | shipper pipe")
    settings = prepare(options, needs="intake", rate=rate)
    check_listen_address(listen, key="--listen")

    def source(state: OpenState) -> Source:
        return _spool(settings, state, sys.stdin.fileno())

    raise typer.Exit(ship("pipe", settings, source, is_one_shot=True, form=form, listen=listen))


@with_settings_options
def backfill(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, globs or folders.")],
    summary: SummaryOption = "text",
    workers: WorkersOption = "1",
    rate: RateOption = None,
    listen: ListenOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Ship files to their end. A further run continues where the last one stopped.

    Example: shipper backfill 'exports/*.ndjson' --summary json
    """
    form = checked_form(summary)
    settings = prepare(options, needs="intake", rate=rate)
    check_listen_address(listen, key="--listen")
    _put_back_unfinished(paths)
    files = named_files(paths, settings)
    count = checked_workers(workers, files)

    def source(state: OpenState) -> Source:
        from shipper.sources.once import FilesOnce

        return FilesOnce(
            files,
            _book(settings, state),
            state.store.streams,
            wall_time=time.time,
            completion=_completion(settings, state),
        )

    raise typer.Exit(ship("backfill", settings, source, is_one_shot=True, form=form, listen=listen, workers=count))


def checked_workers(workers: str, files: Iterable[Path]) -> int:
    """
    Check a value of `--workers`.

    Args:
        files: What is to be shipped; `auto` starts no more processes than are worth their start.
    """
    if workers == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with suppress(OSError):
            return max(1, min(cores, sum(path.stat().st_size for path in files) // _WORKER_BYTES))
        return cores
    if not (workers.isascii() and workers.isdigit() and 1 <= int(workers) <= _WORKERS_MAX):
        raise typer.BadParameter(f"--workers is {workers!r}; it is a number from 1 to {_WORKERS_MAX}, or auto")
    return int(workers)


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
    """Ask for as many descriptors as this process may have; return how many of them are for inputs."""
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


def _put_back_unfinished(paths: Iterable[str]) -> None:
    from shipper.sources.completion import put_back_unfinished

    put_back_unfinished(paths)


def _completion(settings: Settings, state: OpenState) -> Completion:
    from shipper.sources.completion import Completion

    needs_input = state.store.letters.needs_input
    return Completion(settings.input.on_complete, settings.input.completed_directory, is_needed=needs_input)


def _spool(settings: Settings, state: OpenState, descriptor: int | None) -> Spool:
    from shipper.sources.reader import input_form

    form = input_form(settings)
    patience_s = settings.delivery.give_up_after_seconds
    return state.spool(settings, descriptor, wall_time=time.time, form=form, give_up_after_s=patience_s)


def checked_form(form: str) -> Literal["text", "json"]:
    """Check a value of `--summary`."""
    if form not in {"text", "json"}:
        raise typer.BadParameter(f"{form!r} is not a form of summary; there are: text, json")
    return "json" if form == "json" else "text"


def ship(
    command: str,
    settings: Settings,
    make_source: Callable[[OpenState], Source],
    *,
    is_one_shot: bool,
    form: Literal["text", "json"],
    listen: str = "",
    reload: tuple[Callable[[], Settings], Callable[[Settings], None]] | None = None,
    workers: int = 1,
) -> int:
    """
    Run a pipeline in the state directory and print the summary.

    Args:
        make_source: Called once the state directory is this process's.
        listen: The admin address; empty = none.
        reload: For SIGHUP: what reads the settings, and what applies them beside the pipeline.
        workers: Processes that share the work; 1 = this one does it.
    Returns:
        The exit code.
    Raises:
        StateInUseError: Another process holds the directory.
    """
    import anyio

    load_http_client()
    from shipper.cli.showing import showing
    from shipper.pipeline import Pipeline, Reloading, Workers
    from shipper.pipeline.opening import opened_state
    from shipper.sources.joined import Joined
    from shipper.sources.once import FilesOnce
    from shipper.sources.spool import Spool

    with (
        opened_state(settings) as state,
        showing(listen, state.directory, state.stuck, hosts=settings.admin.hosts) as shown,
    ):
        letters = state.store.letters
        youngest_letter = letters.youngest_id()
        main = source = make_source(state)
        if not isinstance(source, Spool) and state.has_spool:
            # An earlier `pipe` has left something; there may never be another one.
            source = Joined([_spool(settings, state, None), source])

        async def run_pipeline() -> tuple[Summary, dict[str, int]]:
            notifier = shown.notifier
            reloading = Reloading(notifier.note_reload, notifier.note_reloaded, *reload) if reload else None
            pipeline = Pipeline(
                settings,
                source,
                state.store,
                is_one_shot=is_one_shot,
                wall_time=time.time,
                rng=Random(),
                command=command,
                publish=shown.publish,
                reloading=reloading,
                workers=Workers(workers, (sys.executable, "-m", "shipper.cli.worker")) if workers > 1 else None,
                suspects=state.stuck.suspects,
            )
            numbers = [*STOP_SIGNALS, *([signal.SIGHUP] if reload else [])]
            async with anyio.create_task_group() as side:
                side.start_soon(shown.file.keep_written)
                side.start_soon(keep_memory_released)
                if sys.stderr.isatty() and isinstance(main, FilesOnce):
                    side.start_soon(_draw_progress, main, pipeline, shown.board)
                summary = await pipeline.run(received_signals(*numbers))
                side.cancel_scope.cancel()
            return summary, pipeline.dead_letter_reasons

        summary, reasons = run_async(run_pipeline)
        before = (
            list({each.stream.stream_id: each for each in main.read_before}.values())
            if isinstance(main, FilesOnce)
            else []
        )
        kept = letters.count_by_stream(youngest_letter) if before and youngest_letter else {}
        left = sum(kept.get(each.stream.stream_id, 0) for each in before)
        if left and not summary.message:
            summary = msgspec.structs.replace(summary, message=left_before(before, left))
    if command == "run" and is_json(settings.log.format):
        log.info("ended", **msgspec.structs.asdict(summary))  # nothing but JSON stands in such a log
    else:
        _print_summary(summary, reasons, settings.state.directory, form)
        if before and not summary.read and not summary.message and form == "text":
            say(f"{read_before(before)}, and nothing new is in {'it' if len(before) == 1 else 'them'}")
    return summary.exit_code(is_one_shot=is_one_shot)


def left_before(files: Sequence[ReadBefore], letters: int) -> str:
    """Return a sentence that names the dead letters of files that an earlier run has read."""
    whose = "its" if len(files) == 1 else "their"
    are = "is a dead letter" if letters == 1 else "are dead letters"
    return f"{read_before(files)}; {letters:,} of {whose} records {are}: shipper dead-letters replay"


def read_before(files: Sequence[ReadBefore]) -> str:
    """Return words for how far files were read by an earlier run."""
    in_part = any(each.has_grown for each in files)
    if len(files) == 1:
        return f"{on_one_line(shown(files[0].path))} was read {'in part' if in_part else 'to its end'} before"
    return f"{len(files):,} files were read {'in part or' if in_part else ''} to their ends before".replace("  ", " ")


async def _draw_progress(source: FilesOnce, pipeline: Pipeline, board: Board) -> None:
    """Keep a progress bar on stderr: bytes settled of all, events accepted, rate, time left; why it stands still."""
    import anyio
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[accepted]:,} accepted, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[halt]}", markup=False),
    )
    started_at = anyio.current_time()
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("", total=source.total_bytes, accepted=0, rate=0.0, halt="")
        while True:
            try:
                await anyio.sleep(_REDRAW_S)
            finally:  # once more at the end
                accepted = pipeline.totals.accepted
                rate = accepted / max(anyio.current_time() - started_at, 1e-9)
                settled = source.total_bytes - source.backlog().lag_bytes
                halt = halted(board.live)
                progress.update(task, completed=settled, accepted=accepted, rate=rate, halt=halt, refresh=True)


def halted(live: Live | None) -> str:
    """Return why a run does not get on, when it gives up, and what Ctrl-C does; empty while it does get on."""
    if live is None:
        return ""
    parts = [f"paused: {on_one_line(pause.message).partition('; ')[0]}" for pause in live.pauses[:1]]
    if live.phase == "draining":
        return "; ".join(["stopping", *parts, "press Ctrl-C again to end now"])
    if not parts:
        return ""
    ends = [pause.gives_up_at for pause in live.pauses if pause.gives_up_at is not None]
    at = [f"gives up at {time.strftime('%H:%M:%S', time.localtime(min(ends)))}"] if ends else []
    return "; ".join([*parts, *at, "Ctrl-C keeps what is pending"])


def _print_summary(summary: Summary, reasons: dict[str, int], state: Path, form: Literal["text", "json"]) -> None:
    if form == "json":
        with reader_may_leave():
            print_json(msgspec.json.encode(summary))
    else:
        say(in_words(summary, reasons, state))
    if summary.message:
        say(f"shipper: {on_one_line(summary.message)}")


def in_words(summary: Summary, reasons: dict[str, int], state: Path) -> str:
    """Write a summary for a person."""
    rate = summary.accepted / summary.seconds if summary.seconds else 0.0
    read = several(summary.read, "record")
    parts = [
        f"{summary.outcome}: {read} read, {summary.accepted:,} accepted "
        f"in {several(summary.batches, 'batch', 'batches')}, {summary.seconds:.1f} s, {rate:,.0f} events/s"
    ]
    if summary.dead_lettered:
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in sorted(reasons.items()))
        parts.append(
            f"{summary.dead_lettered:,} refused and kept as dead letters in {state}/state.db: {by_rule}; "
            "look at them with: shipper dead-letters list"
        )
    if summary.duplicates:
        parts.append(f"{summary.duplicates:,} skipped: their EventId was accepted before")
    if summary.pending:
        parts.append(f"{summary.pending:,} pending: they are sent when the same command runs again")
    return "\n".join(parts)
