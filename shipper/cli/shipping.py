"""Runs a pipeline for `run`, `pipe`, `backfill` and `dead-letters replay`, with progress bar and summary."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec.structs import replace

from shipper.cli.common import format_option, print_json, run_async, say, several, tolerate_closed_stdout
from shipper.cli.signals import receive_signals, signals_of_pipeline
from shipper.config.settings import Settings
from shipper.model.errors import StateInUseError
from shipper.model.printable import printable
from shipper.model.records import shown
from shipper.system.memory import trim_heap_periodically

if TYPE_CHECKING:
    from shipper.cli.publishing import Publisher
    from shipper.config.load import SettingsFile
    from shipper.model.records import Summary
    from shipper.pipeline.opening import OpenState
    from shipper.pipeline.pipeline import Pipeline
    from shipper.pipeline.settlement import StateStore
    from shipper.sources.joined import Source
    from shipper.sources.once import FilesOnce, ReadBefore
    from shipper.status.live import Board, Live
    from shipper.system.work import StuckPlace

SummaryForm = Literal["text", "json"]
SummaryOption = Annotated[
    SummaryForm, format_option("Format of the summary: text (to stderr) or json (last line of stdout).", "--summary")
]
# Reads the settings, and applies those that do not concern the pipeline.
Reload = tuple[Callable[[], Settings], Callable[[Settings], None]]

_REDRAW_S: Final = 0.2
_QUOTATION: Final = re.compile(r': "[^"]*"(?=\))')  # of the service; too long for a progress bar
_UNNOTICED: Final = "changes that keep the length of a file are not noticed"


def ship(
    command: str,
    settings: Settings,
    make_source: Callable[[OpenState], Source],
    *,
    is_one_shot: bool = True,
    form: SummaryForm = "text",
    listen: str = "",
    reload: Reload | None = None,
    file: SettingsFile | None = None,
    topic: str = "",
) -> int:
    """
    Run a pipeline in the state directory, print the summary, and return the exit code.

    Args:
        make_source: Called once this process holds the state directory.
        reload: Functions for SIGHUP; None = it is not handled.
        file: The settings file, created before the settings were read.
        topic: Where the dead letters are, if the directory is a temporary copy.
    Raises:
        StateInUseError: Another process holds the directory.
    """
    from shipper.cli.publishing import publishing
    from shipper.pipeline.control import control_server
    from shipper.sources.joined import JoinedSource
    from shipper.sources.once import FilesOnce
    from shipper.sources.spool import Spool

    with (
        _lock_state(settings) as state,
        publishing(listen, state.directory, state.stuck, settings.admin) as publisher,
    ):
        newest_letter = state.store.letters.newest_id()
        source = make_source(state)
        files = source if isinstance(source, FilesOnce) else None
        if not isinstance(source, Spool) and state.has_spool:
            # Deliver what an earlier `pipe` left in the spool, as no other `pipe` may follow.
            source = JoinedSource([state.spool(settings, None, wall_time=time.time), source])
        summary, reasons = run_async(
            lambda: run_pipeline(
                command,
                settings,
                source,
                state.store,
                publisher,
                is_one_shot=is_one_shot,
                reload=reload,
                suspects=state.stuck.suspects,
                files=files,
                attach=partial(control_server, settings=settings, state=state, file=file),
            )
        )
        read_before = list({item.stream.stream_id: item for item in files.read_before}.values()) if files else []
        if read_before and newest_letter and not summary.message:
            counts = state.store.letters.count_by_stream(newest_letter)
            if letters := sum(counts.get(item.stream.stream_id, 0) for item in read_before):
                summary = replace(summary, message=_read_before_message(read_before, letters))
    if form == "json" or not has_logged_end(command, settings, summary):
        print_summary(summary, reasons, settings, form, topic)
        if read_before and not summary.message and not summary.read and form == "text":
            say(_read_before_message(read_before, 0))
    return summary.exit_code(is_one_shot=is_one_shot)


@contextmanager
def _lock_state(settings: Settings) -> Iterator[OpenState]:
    """Lock and open the state directory; if `shipper run` holds it, raise `StateInUseError` with specific advice."""
    from shipper.pipeline.opening import open_state
    from shipper.state.directory import lock_holder
    from shipper.status.live import read_live

    directory = settings.state.directory
    try:
        with open_state(settings) as state:
            yield state
    except StateInUseError:
        live = read_live(directory)
        if live is None or live.command != "run" or live.process_id != lock_holder(directory):
            raise
        raise StateInUseError(
            f"{directory} is in use by another shipper (process {live.process_id}): `shipper run`, which ships the "
            "files of its input.include. To ship others, extend input.include and reload it "
            f"(kill -HUP {live.process_id}), or stop it first. Use another state.directory only for a pipe, or for "
            "files that no other shipper reads; otherwise they are shipped twice"
        ) from None


async def run_pipeline(
    command: str,
    settings: Settings,
    source: Source,
    store: StateStore,
    publisher: Publisher,
    *,
    is_one_shot: bool,
    reload: Reload | None = None,
    suspects: Mapping[str, Sequence[StuckPlace]] | None = None,
    files: FilesOnce | None = None,
    attach: Callable[[Pipeline], AbstractAsyncContextManager[object]] = nullcontext,
) -> tuple[Summary, dict[str, int]]:
    """
    Run a pipeline to its end, with any source and store.

    Args:
        suspects: Places of records that earlier processes got stuck on, by input.
        files: Source whose progress to show on a terminal; None = show none.
        attach: Returns a context manager to enter during the run.
    Returns:
        The summary, and the number of dead letters by rule.
    """
    import anyio

    from shipper.pipeline.pipeline import Pipeline
    from shipper.pipeline.reload import ReloadHooks

    notifier = publisher.notifier
    pipeline = Pipeline(
        settings,
        source,
        store,
        is_one_shot=is_one_shot,
        wall_time=time.time,
        rng=Random(),
        command=command,
        publish=publisher.publish,
        reload_hooks=ReloadHooks(notifier.begin_reload, notifier.end_reload, *reload) if reload else None,
        suspects=suspects,
    )
    signals = receive_signals(*signals_of_pipeline(can_reload=reload is not None))
    async with anyio.create_task_group() as side:
        side.start_soon(publisher.keep_current)
        side.start_soon(trim_heap_periodically)
        if files is not None and sys.stderr.isatty():
            side.start_soon(_draw_progress, files, pipeline, publisher.board)
        async with attach(pipeline):
            summary = await pipeline.run(signals)
        side.cancel_scope.cancel()
    return summary, pipeline.settlement.acks.reasons


# Progress ---------------------------------------------------------------------------------------------------------


async def _draw_progress(source: FilesOnce, pipeline: Pipeline, board: Board) -> None:
    """Show a progress bar on stderr: share of settled bytes, accepted events, rate, time left, and pauses."""
    import anyio
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[accepted]:,} accepted, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[notice]}", markup=False),
    )
    started_at = anyio.current_time()
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("", total=source.total_bytes, accepted=0, rate=0.0, notice="")
        while True:
            try:
                await anyio.sleep(_REDRAW_S)
            finally:  # once more at the end
                accepted = pipeline.totals.accepted
                rate = accepted / max(anyio.current_time() - started_at, 1e-9)
                settled = source.total_bytes - source.backlog().lag_bytes
                notice = _progress_notice(board.live)
                progress.update(task, completed=settled, accepted=accepted, rate=rate, notice=notice, refresh=True)


def _progress_notice(live: Live | None) -> str:
    """Describe why a run is paused, when it gives up, and what Ctrl-C does; empty while it is delivering."""
    if live is None:
        return ""
    messages = [_QUOTATION.sub("", pause.message).partition("; ")[0] for pause in live.pauses[:1]]
    parts = [f"paused: {printable(message)}" for message in messages]
    if live.phase == "draining":
        return "; ".join(["stopping", *parts, "press Ctrl-C again to stop now"])
    if not parts:
        return ""
    ends = [pause.gives_up_at for pause in live.pauses if pause.gives_up_at is not None]
    at = [f"gives up at {time.strftime('%H:%M:%S', time.localtime(min(ends)))}"] if ends else []
    return "; ".join([*parts, *at, "Ctrl-C is safe: pending records are kept"])


# Summary ----------------------------------------------------------------------------------------------------------


def has_logged_end(command: str, settings: Settings, summary: Summary, **more: object) -> bool:
    """Log the summary of `run` if its logs are JSON; return whether it was logged."""
    import structlog

    from shipper.status.logs import is_json

    if command != "run" or not is_json(settings.log.format):
        return False
    structlog.get_logger("cli").info("ended", **msgspec.structs.asdict(summary), **more)
    return True


def print_summary(
    summary: Summary, reasons: dict[str, int], settings: Settings, form: SummaryForm, topic: str = ""
) -> None:
    """Print a summary of a run in the state directory; `topic` as in `ship`."""
    if form == "text":
        place = f"the topic {topic}" if topic else f"{settings.state.directory}/state.db"
        say(summary_text(summary, reasons, place))
        return
    with tolerate_closed_stdout():
        print_json(msgspec.json.encode(summary))
    if summary.message:
        say(f"shipper: {printable(summary.message)}")


def summary_text(summary: Summary, reasons: dict[str, int], place: str) -> str:
    """Return a summary as text, beginning with the reason if the run gave up; `place` has the dead letters."""
    rate = f", {summary.accepted / summary.seconds:,.0f} events/s" if summary.accepted and summary.seconds else ""
    lines = [
        f"{summary.outcome}: {several(summary.read, 'record')} read, {summary.accepted:,} accepted "
        f"in {several(summary.batches, 'batch', 'batches')}, {summary.seconds:.1f} s{rate} ({summary.engine})"
    ]
    if summary.dead_lettered:
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in sorted(reasons.items()))
        advice = "list them with: shipper dead-letters list"
        lines.append(f"{summary.dead_lettered:,} refused and stored as dead letters in {place}: {by_rule}; {advice}")
    if place.endswith(".db") and reasons.get("json", 0) == summary.dead_lettered == summary.read > 0:
        lines.append(
            "no record was a JSON object; CSV needs a header and, if that has no known or mapped columns, "
            "--set input.format=csv"
        )
    if summary.duplicates:
        lines.append(f"{summary.duplicates:,} skipped as duplicates: their EventId was accepted before")
    if summary.pending:
        lines.append(f"{summary.pending:,} pending: run the same command again to send them")
    if summary.message:
        message = f"shipper: {printable(summary.message)}"
        lines.insert(0 if summary.outcome == "gave_up" else len(lines), message)
    return "\n".join(lines)


def _read_before_message(files: Sequence[ReadBefore], letters: int) -> str:
    """Describe files that earlier runs read, and what to do about their dead letters and changes."""
    names = printable(shown(files[0].path)) if len(files) == 1 else f"{len(files):,} files"
    is_rewritten = any(file.is_rewritten for file in files)
    if letters:
        message = (
            f"{names}: read before, with {several(letters, 'dead letter')}; to resend: shipper dead-letters replay"
        )
        correct = f"; to correct records, edit what shipper dead-letters export writes, and backfill that; {_UNNOTICED}"
        return message + (correct if is_rewritten else "")
    hint = f"; {_UNNOTICED}: to ship changed records, write them to another file" if is_rewritten else ""
    return f"{names}: read before, with nothing new since{hint}"
