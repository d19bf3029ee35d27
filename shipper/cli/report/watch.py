"""`shipper report watch`: fetches reports repeatedly and runs a command for each that was restated."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import AsyncIterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import typer

from shipper.cli.common import (
    SettingsOptions,
    prepare,
    run_async,
    say,
    with_settings_options,
)
from shipper.cli.report.fetching import open_client, print_failures
from shipper.cli.report.keeping import Kept, due_for_hook, in_words, keep, opened
from shipper.cli.report.options import (
    AccountsFileOption,
    AccountsOption,
    ConcurrencyOption,
    RequestRateOption,
    SplitOption,
    WordsArgument,
    selected,
)
from shipper.cli.writing import write_lines
from shipper.system.programs import signal_group, small_environment

if TYPE_CHECKING:
    from shipper.report.client import ReportClient
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.history import History


_JITTER: Final = 0.1  # of the interval, up and down: watchers that were started together drift apart
_TELL_S: Final = 5.0  # after a signal, for the commands that are still to be run
_HOOK_ENDS_S: Final = 1.0
_AGAIN: Final = "it runs again at the next fetch"


@with_settings_options
def watch(
    words: WordsArgument,
    accounts: AccountsOption = None,
    accounts_file: AccountsFileOption = "",
    split: SplitOption = "month",
    interval: Annotated[
        float,
        typer.Option("--interval", min=1, metavar="SECONDS", help="Seconds between two fetches, varied by a tenth."),
    ] = 3600.0,
    on_change: Annotated[
        str,
        typer.Option(
            "--on-change",
            metavar="COMMAND",
            help="Run for each restated report, without a shell; REPORT_ACCOUNT, REPORT_START and REPORT_END are set. "
            "If it fails, it runs again at the next fetch.",
        ),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Fetch once: exit with 3 if anything was restated since the last time.")
    ] = False,
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    *,
    options: SettingsOptions,
) -> None:
    """
    Fetch reports repeatedly until SIGTERM or Ctrl-C, keep every version, and report restatements.

    What cannot be fetched is listed, and fetched again the next time.

    Example: shipper report watch 1001 last-month --on-change ./restated.sh
    """
    parts = selected(words, accounts, accounts_file, split)
    hook = _checked_hook(on_change)
    settings = prepare(options, needs="report")
    with opened(settings) as history:

        async def run() -> int:
            async with open_client(settings, concurrency=min(concurrency, len(parts)), rate=rate) as client:
                watcher = Watcher(client, history, parts, hook, concurrency)
                return await (watcher.look() if once else watcher.run(interval))

        raise typer.Exit(run_async(run))


def _checked_hook(command: str) -> list[str]:
    """Split a command line as a shell would, and check that it can be run; empty if there is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{command!r} is not a command: {error}", param_hint="--on-change") from None
    if words and shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no command {words[0]!r}", param_hint="--on-change")
    return words


class Watcher:
    """
    Asks for all parts, and once more after a while.

    What was restated is told even if a signal comes first: it is kept by then, so the next look would not find it new.
    The command runs at each look until it has succeeded for the latest version, whichever command kept that one; what
    was restated before it was begun is not its concern.
    """

    def __init__(
        self, client: ReportClient, history: History, parts: Sequence[Part], hook: Sequence[str], concurrency: int
    ) -> None:
        self._client = client
        self._history = history
        self._parts = parts
        self._hook = hook
        self._concurrency = concurrency
        self._looking = anyio.CancelScope()
        self._telling = anyio.CancelScope(shield=True)
        self._tell_until = math.inf
        for part in parts if hook else ():
            history.begin_hook(part.account, *part.days)

    async def run(self, interval_s: float) -> int:
        """Watch until a signal comes; return the exit code."""
        rng = Random()
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as group:
                group.start_soon(self._stop_at_signal, signals)
                with self._looking:
                    while True:
                        await self.look(is_quiet=True)
                        await anyio.sleep(interval_s * rng.uniform(1 - _JITTER, 1 + _JITTER))
                group.cancel_scope.cancel()
        return 0

    async def _stop_at_signal(self, signals: AsyncIterable[signal.Signals]) -> None:
        async for _ in signals:
            self._tell_until = self._telling.deadline = anyio.current_time() + _TELL_S
            self._looking.cancel()

    async def look(self, *, is_quiet: bool = False) -> int:
        """
        Ask for all parts once.

        Args:
            is_quiet: Leave out those that are unchanged.
        Returns:
            The exit code if that was all.
        """
        from shipper.report.fetching import fetch_parts

        found: list[Kept] = []

        def use(part: Part, fetched: FetchedReport) -> None:
            found.append(keep(self._history, part, fetched))

        try:
            outcome = await fetch_parts(self._client, self._parts, concurrency=self._concurrency, use=use)
        finally:
            found.sort(key=lambda kept: self._parts.index(kept.part))
            write_lines(in_words(kept) for kept in found if not is_quiet or kept.status != "unchanged")
            has_run = await self._run_due_hooks()
        if print_failures(outcome):
            return 1
        return 3 if not has_run or any(kept.status == "restated" for kept in found) else 0

    async def _run_due_hooks(self) -> bool:
        """Run the command for every part that is due; return whether it succeeded each time."""
        has_run = True
        with anyio.CancelScope(shield=True, deadline=self._tell_until) as self._telling:
            for part in self._parts if self._hook else ():
                if due_for_hook(self._history, part) is not None:
                    has_run = await self._run_due_hook(part) and has_run
        return has_run

    async def _run_due_hook(self, part: Part) -> bool:
        """Run the command for a part, unless another process does; return False if it failed."""
        with self._history.hook_turn(part.account, *part.days) as is_free:
            version = due_for_hook(self._history, part) if is_free else None  # as it is now
            if version is None:
                return True
            has_run = await self._run_hook(part)
            if has_run:
                self._history.end_hook(version)
            return has_run

    async def _run_hook(self, part: Part) -> bool:
        start, end = map(str, part.days)
        names = {"REPORT_ACCOUNT": str(part.account), "REPORT_START": start, "REPORT_END": end}
        try:
            process = await anyio.open_process(
                self._hook,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                env=small_environment(os.environ) | names,
                start_new_session=True,
            )
        except OSError as error:
            say(f"shipper: {self._hook[0]} cannot be run: {error.strerror}; {_AGAIN}")
            return False
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                signal_group(process, signal.SIGTERM)
                with anyio.move_on_after(_HOOK_ENDS_S, shield=True):
                    await process.wait()
                signal_group(process, signal.SIGKILL)
            await process.aclose()
        if code:
            say(f"shipper: {self._hook[0]} ended with {code} for {part}; {_AGAIN}")
        return not code
