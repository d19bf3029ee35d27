"""A run of a pipeline in the state directory, for `run`, `pipe`, `backfill` and `dead-letters replay`; its summary."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec

from shipper.cli.common import format_option, print_json, reader_may_leave, run_async, say, several
from shipper.cli.signals import STOP_SIGNALS, received_signals
from shipper.config.settings import Settings
from shipper.model.errors import StateInUseError
from shipper.model.printable import printable
from shipper.model.records import shown
from shipper.system.memory import keep_memory_released

if TYPE_CHECKING:
    from shipper.cli.showing import Showing
    from shipper.config.load import SettingsFile
    from shipper.pipeline import Pipeline, Source, Summary
    from shipper.pipeline.opening import OpenState
    from shipper.pipeline.settlement import StateStore
    from shipper.sources.once import FilesOnce, ReadBefore
    from shipper.sources.spool import Spool
    from shipper.state.stuck import Place
    from shipper.status.board import Board
    from shipper.status.live import Live

SummaryForm = Literal["text", "json"]
SummaryOption = Annotated[
    SummaryForm, format_option("Of the summary: text (to stderr) or json (last line of stdout).", "--summary")
]

_REDRAW_S = 0.2
_QUOTATION: Final = re.compile(r': "[^"]*"(?=\))')  # of the service; there is no room for it beside a progress bar
_NOT_TWICE: Final = (
    "Another state.directory is for files that no other shipper reads: it does not know what was shipped, and files "
    "that both read are shipped twice"
)
# By command, where `shipper run` holds the state directory.
_INSTEAD: Final = {
    "run": f"For more files, extend that and reload it: kill -HUP {{}}; or stop it first. {_NOT_TWICE}",
    "backfill": f"Put the files where that matches, or stop it first. {_NOT_TWICE}",
    "pipe": "Have the producer write to a file that this matches, or give the pipe a state.directory of its own",
}


def ship(
    command: str,
    settings: Settings,
    make_source: Callable[[OpenState], Source],
    *,
    is_one_shot: bool = True,
    form: SummaryForm = "text",
    listen: str = "",
    reload: tuple[Callable[[], Settings], Callable[[Settings], None]] | None = None,
    file: SettingsFile | None = None,
) -> int:
    """
    Run a pipeline in the state directory and print the summary.

    Args:
        make_source: Called once this process holds the state directory.
        listen: The admin address; empty = none.
        reload: For SIGHUP: what reads the settings, and what applies those that are no business of the pipeline.
        file: Where the settings are from, made before they were read.
    Returns:
        The exit code.
    Raises:
        StateInUseError: Another process holds the directory.
    """
    from shipper.cli.showing import showing
    from shipper.pipeline.control import controlled
    from shipper.sources.joined import Joined
    from shipper.sources.once import FilesOnce
    from shipper.sources.spool import Spool

    with (
        _own_state(command, settings) as state,
        showing(listen, state.directory, state.stuck, settings.admin) as shown,
    ):
        youngest_letter = state.store.letters.youngest_id()
        source = make_source(state)
        files = source if isinstance(source, FilesOnce) else None
        if not isinstance(source, Spool) and state.has_spool:
            # An earlier `pipe` has left something; there may never be another one.
            source = Joined([spool_of(settings, state), source])
        run = Run(command, settings, source, state.store, shown, is_one_shot=is_one_shot, reload=reload)
        attach = partial(controlled, settings=settings, state=state, file=file)
        summary, reasons = run_async(lambda: run.run(suspects=state.stuck.suspects, files=files, attach=attach))
        before = list({each.stream.stream_id: each for each in files.read_before}.values()) if files else []
        if before and youngest_letter and not summary.message:
            kept = state.store.letters.count_by_stream(youngest_letter)
            if left := sum(kept.get(each.stream.stream_id, 0) for each in before):
                summary = msgspec.structs.replace(summary, message=_left_before(before, left))
    if form == "json" or not has_logged_end(command, settings, summary):
        tell(summary, reasons, settings, form)
        if before and not summary.message and not summary.read and form == "text":
            say(f"{_read_before(before)}, and nothing new is in {'it' if len(before) == 1 else 'them'}")
    return summary.exit_code(is_one_shot=is_one_shot)


@contextmanager
def _own_state(command: str, settings: Settings) -> Iterator[OpenState]:
    """
    Take the state directory of the settings.

    Raises:
        StateInUseError: Another process holds it; what to do depends on what that one ships.
    """
    from shipper.pipeline.opening import opened_state

    with ExitStack() as stack:
        try:
            state = stack.enter_context(opened_state(settings))
        except StateInUseError as error:
            raise (_beside_run(command, settings.state.directory) or error) from None
        yield state


def _beside_run(command: str, directory: Path) -> StateInUseError | None:
    """Return what to do instead of a second shipper if the other one is `shipper run`."""
    from shipper.state.directory import holder_of
    from shipper.status.live_file import read_live

    live = read_live(directory)
    if live is None or live.command != "run" or live.process_id != holder_of(directory) or command not in _INSTEAD:
        return None
    instead = _INSTEAD[command].format(live.process_id)
    return StateInUseError(
        f"{directory} is in use by another shipper (process {live.process_id}): `shipper run`, which ships what its "
        f"input.include matches. {instead}"
    )


class Run(NamedTuple):
    """
    One run of a pipeline, whatever its source and its store are.

    Attributes:
        reload: As for `ship`.
    """

    command: str
    settings: Settings
    source: Source
    store: StateStore
    shown: Showing
    is_one_shot: bool = True
    reload: tuple[Callable[[], Settings], Callable[[Settings], None]] | None = None

    async def run(
        self,
        *,
        suspects: Mapping[str, Sequence[Place]] | None = None,
        files: FilesOnce | None = None,
        attach: Callable[[Pipeline], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> tuple[Summary, dict[str, int]]:
        """
        Run it to its end.

        Args:
            files: Draw the progress of these on a terminal.
            attach: Entered around the run, with the pipeline.
        Returns:
            The summary, and how many records broke which rule.
        """
        import anyio

        from shipper.pipeline import Pipeline, Reloading

        notifier, reload = self.shown.notifier, self.reload
        pipeline = Pipeline(
            self.settings,
            self.source,
            self.store,
            is_one_shot=self.is_one_shot,
            wall_time=time.time,
            rng=Random(),
            command=self.command,
            publish=self.shown.publish,
            reloading=Reloading(notifier.note_reload, notifier.note_reloaded, *reload) if reload else None,
            suspects=suspects,
        )
        signals = received_signals(*STOP_SIGNALS, *([signal.SIGHUP] if reload else []))
        async with anyio.create_task_group() as side:
            side.start_soon(self.shown.keep_current)
            side.start_soon(keep_memory_released)
            if files is not None and sys.stderr.isatty():
                side.start_soon(_draw_progress, files, pipeline, self.shown.board)
            async with attach(pipeline):
                summary = await pipeline.run(signals)
            side.cancel_scope.cancel()
        return summary, pipeline.dead_letter_reasons


def has_logged_end(command: str, settings: Settings, summary: Summary, **more: object) -> bool:
    """Log how a `run` ended if its log holds nothing but JSON; returns whether it was logged."""
    import structlog

    from shipper.status.logs import is_json

    if command != "run" or not is_json(settings.log.format):
        return False
    structlog.get_logger("cli").info("ended", **msgspec.structs.asdict(summary), **more)
    return True


def spool_of(settings: Settings, state: OpenState, descriptor: int | None = None) -> Spool:
    """Open the spool; without a descriptor of standard input, to deliver what an earlier run left in it."""
    from shipper.sources.reader import input_form

    return state.spool(
        settings,
        descriptor,
        wall_time=time.time,
        form=input_form(settings),
        give_up_after_s=settings.delivery.give_up_after_seconds,
    )


# Progress ---------------------------------------------------------------------------------------------------------


async def _draw_progress(source: FilesOnce, pipeline: Pipeline, board: Board) -> None:
    """Keep a progress bar on stderr: bytes settled of all, events accepted, rate, time left, and why it halts."""
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
                halt = _halt(board.live)
                progress.update(task, completed=settled, accepted=accepted, rate=rate, halt=halt, refresh=True)


def _halt(live: Live | None) -> str:
    """Return why a run halts, when it gives up, and what Ctrl-C does; empty while it goes on."""
    if live is None:
        return ""
    messages = [_QUOTATION.sub("", pause.message).partition("; ")[0] for pause in live.pauses[:1]]
    parts = [f"paused: {printable(message)}" for message in messages]
    if live.phase == "draining":
        return "; ".join(["stopping", *parts, "press Ctrl-C again to end now"])
    if not parts:
        return ""
    ends = [pause.gives_up_at for pause in live.pauses if pause.gives_up_at is not None]
    at = [f"gives up at {time.strftime('%H:%M:%S', time.localtime(min(ends)))}"] if ends else []
    return "; ".join([*parts, *at, "Ctrl-C keeps what is pending"])


# Summary ----------------------------------------------------------------------------------------------------------


def tell(summary: Summary, reasons: dict[str, int], settings: Settings, form: SummaryForm) -> None:
    """Print a summary of a run in the state directory."""
    if form == "json":
        with reader_may_leave():
            print_json(msgspec.json.encode(summary))
        if summary.message:
            say(_message(summary))
    else:
        say(in_words(summary, reasons, f"{settings.state.directory}/state.db"))


def _message(summary: Summary) -> str:
    return f"shipper: {printable(summary.message)}"


def in_words(summary: Summary, reasons: dict[str, int], place: str) -> str:
    """Write a summary for a person, what ended it early first; `place` is where the dead letters are."""
    rate = f", {summary.accepted / summary.seconds:,.0f} events/s" if summary.accepted and summary.seconds else ""
    lines = [
        f"{summary.outcome}: {several(summary.read, 'record')} read, {summary.accepted:,} accepted "
        f"in {several(summary.batches, 'batch', 'batches')}, {summary.seconds:.1f} s{rate} ({summary.engine})"
    ]
    if summary.dead_lettered:
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in sorted(reasons.items()))
        lines.append(
            f"{summary.dead_lettered:,} refused and kept as dead letters in {place}: {by_rule}"
            f"{'; look at them with: shipper dead-letters list' if place.endswith('.db') else ''}"
        )
    if summary.duplicates:
        lines.append(f"{summary.duplicates:,} skipped: their EventId was accepted before")
    if summary.pending:
        lines.append(f"{summary.pending:,} pending: they are sent when the same command runs again")
    if summary.message:
        lines.insert(0 if summary.outcome == "gave_up" else len(lines), _message(summary))
    return "\n".join(lines)


def _left_before(files: Sequence[ReadBefore], letters: int) -> str:
    whose = "its" if len(files) == 1 else "their"
    are = "is a dead letter" if letters == 1 else "are dead letters"
    return f"{_read_before(files)}; {letters:,} of {whose} records {are}: shipper dead-letters replay"


def _read_before(files: Sequence[ReadBefore]) -> str:
    in_part = any(each.has_grown for each in files)
    if len(files) == 1:
        return f"{printable(shown(files[0].path))} was read {'in part' if in_part else 'to its end'} before"
    return f"{len(files):,} files were read {'in part or ' if in_part else ''}to their ends before"
