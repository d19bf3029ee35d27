"""`shipper report watch`: fetches reports repeatedly and runs a command when one is restated."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import AsyncIterable, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import SettingsOptions, prepare, run_async, say
from shipper.cli.report.common import open_client, open_history, print_failures
from shipper.cli.report.options import PartsOptions, RequestOptions
from shipper.cli.report.versions import describe
from shipper.cli.writing import write_lines
from shipper.model.errors import ReportError
from shipper.system.programs import minimal_environment, signal_group

if TYPE_CHECKING:
    from shipper.report.client import ReportClient
    from shipper.report.document import FetchedReport
    from shipper.report.history import Comparison, History
    from shipper.report.ranges import Part


_JITTER: Final = 0.1  # of the interval, up and down, so that watchers started together spread out
_DRAIN_S: Final = 5.0  # for due hooks after a signal
_HOOK_STOP_S: Final = 1.0
_HOOK_RETRIED: Final = "it runs again after the next fetch"


def watch(
    selection: PartsOptions,
    interval: Annotated[float, option("SECONDS", "Seconds between fetches, varied by 10 %.", min=1)] = 3600.0,
    on_change: Annotated[
        str,
        option(
            "COMMAND",
            "Command to run for each restated report, without a shell; REPORT_ACCOUNT, REPORT_START and REPORT_END are "
            "set. If it fails, it runs again after the next fetch.",
        ),
    ] = "",
    once: Annotated[
        bool, flag("Fetch once: exit with 3 if anything was restated since the last time.", "--once")
    ] = False,
    *,
    requests: RequestOptions,
    options: SettingsOptions,
) -> None:
    """
    Fetch reports repeatedly until SIGTERM or Ctrl-C, store every version, and report restatements.

    Periods such as yesterday or this-month are determined at each fetch, by the date in UTC.
    Reports that cannot be fetched are listed, and fetched again the next time.

    Example: shipper report watch 1001 last-month --on-change ./restated.sh
    """
    select = selection.selector()
    select()  # raise before the settings are read
    hook = _parse_hook(on_change)
    settings = prepare(options, needs="report")
    with open_history(settings) as history:

        async def run() -> int:
            async with open_client(settings, requests, reports=requests.concurrency) as client:
                watcher = Watcher(client, history, select, hook, requests.concurrency)
                return await (watcher.fetch() if once else watcher.run(interval))

        raise typer.Exit(run_async(run))


def _parse_hook(command: str) -> list[str]:
    """Split a command line as a shell does, and check that the command exists; empty if there is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{command!r} is not a command: {error}", param_hint="--on-change") from None
    if words and shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no command {words[0]!r}", param_hint="--on-change")
    return words


class Watcher:
    """
    Fetches the selected parts repeatedly.

    Restatements are reported even if a signal arrives first: they are already stored, so the next fetch would not
    report them. The hook of a report runs at every fetch until it has succeeded for the latest version, even if another
    command stored that version, and even if the part is no longer selected; restatements from before the watch do not
    run it.
    """

    def __init__(
        self,
        client: ReportClient,
        history: History,
        select: Callable[[], Sequence[Part]],
        hook: Sequence[str],
        concurrency: int,
    ) -> None:
        self._client = client
        self._history = history
        self._select = select
        self._hook = hook
        self._concurrency = concurrency
        self._fetch_scope = anyio.CancelScope()
        self._hook_scope = anyio.CancelScope(shield=True)
        self._hooks_deadline = math.inf
        self._failed: Sequence[Part] = ()  # whose hook failed

    async def run(self, interval_s: float) -> int:
        """Fetch until a stop signal; return the exit code."""
        rng = Random()
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as group:
                group.start_soon(self._stop_at_signal, signals)
                with self._fetch_scope:
                    while True:
                        await self.fetch(is_quiet=True)
                        await anyio.sleep(interval_s * rng.uniform(1 - _JITTER, 1 + _JITTER))
                group.cancel_scope.cancel()
        return 0

    async def _stop_at_signal(self, signals: AsyncIterable[signal.Signals]) -> None:
        async for _ in signals:
            self._hooks_deadline = self._hook_scope.deadline = anyio.current_time() + _DRAIN_S
            self._fetch_scope.cancel()

    async def fetch(self, *, is_quiet: bool = False) -> int:
        """Fetch the parts once, print changed reports, or all, and run due hooks; return the exit code."""
        from shipper.report.fetching import fetch_parts

        try:
            parts = self._select()
        except typer.BadParameter as error:  # such as of yesterday and a fixed END
            raise ReportError(f"no days are left to watch: {error.message}") from None
        for part in parts if self._hook else ():
            self._history.begin_hook(part)
        reports: dict[Part, Comparison] = {}

        def use(part: Part, fetched: FetchedReport) -> None:
            reports[part] = self._history.add_and_compare(part, fetched)

        try:
            outcome = await fetch_parts(self._client, parts, concurrency=self._concurrency, use=use)
        finally:
            write_lines(
                describe(part, reports[part])
                for part in parts
                if part in reports and not (is_quiet and reports[part].status == "unchanged")
            )
            succeeded = await self._run_due_hooks(parts)
        if print_failures(outcome):
            return 1
        return 3 if not succeeded or any(comparison.status == "restated" for comparison in reports.values()) else 0

    async def _run_due_hooks(self, parts: Sequence[Part]) -> bool:
        """Run the hook for all reports that it is due for; return whether it always succeeded."""
        with anyio.CancelScope(shield=True, deadline=self._hooks_deadline) as self._hook_scope:
            self._failed = [
                part
                for part in (dict.fromkeys((*self._failed, *parts)) if self._hook else ())
                if self._history.due_for_hook(part) is not None and not await self._run_due_hook(part)
            ]
        return not self._failed

    async def _run_due_hook(self, part: Part) -> bool:
        """Run the hook of a report unless another process does; return False if it failed."""
        with self._history.hook_lock(part) as is_free:
            version = self._history.due_for_hook(part) if is_free else None  # check again under the lock
            if version is None:
                return True
            succeeded = await self._run_hook(part)
            if succeeded:
                self._history.end_hook(version)
            return succeeded

    async def _run_hook(self, part: Part) -> bool:
        start, end = map(str, part.days)
        variables = {"REPORT_ACCOUNT": str(part.account), "REPORT_START": start, "REPORT_END": end}
        try:
            process = await anyio.open_process(
                self._hook,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                env=minimal_environment(os.environ) | variables,
                start_new_session=True,
            )
        except OSError as error:
            say(f"shipper: {self._hook[0]} cannot be run: {error.strerror}; {_HOOK_RETRIED}")
            return False
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                signal_group(process, signal.SIGTERM)
                with anyio.move_on_after(_HOOK_STOP_S, shield=True):
                    await process.wait()
                signal_group(process, signal.SIGKILL)
            await process.aclose()
        if code:
            say(f"shipper: {self._hook[0]} ended with {code} for {part}; {_HOOK_RETRIED}")
        return not code
