"""`shipper report watch`: asks for reports again and again, and tells when one was restated."""

from __future__ import annotations

import shlex
import shutil
from typing import Annotated

import typer

from shipper.cli.common import (
    SettingsOptions,
    prepare,
    run_async,
    with_settings_options,
)
from shipper.cli.report.gathering import open_client
from shipper.cli.report.keeping import opened
from shipper.cli.report.options import (
    AccountsFileOption,
    AccountsOption,
    ConcurrencyOption,
    RequestRateOption,
    SplitOption,
    WordsArgument,
    selected,
)


@with_settings_options
def watch(
    words: WordsArgument,
    accounts: AccountsOption = None,
    accounts_file: AccountsFileOption = "",
    split: SplitOption = "month",
    interval: Annotated[
        float, typer.Option("--interval", min=1, metavar="SECONDS", help="How long to wait, give or take a tenth.")
    ] = 3600.0,
    on_change: Annotated[
        str,
        typer.Option(
            "--on-change",
            metavar="COMMAND",
            help="Run for each restated report, without a shell; REPORT_ACCOUNT, REPORT_START and REPORT_END are set. "
            "If it fails, it runs again at the next look.",
        ),
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Ask once: exit with 3 if anything was restated since the last time.")
    ] = False,
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    *,
    options: SettingsOptions,
) -> None:
    """
    Fetch reports again and again until SIGTERM or Ctrl-C, keep every version, and tell when one was restated.

    What cannot be had is told and asked for again the next time.

    Example: shipper report watch 1001 2026-10-01 2026-10-31 --interval 900 --on-change './restated.sh'
    """
    from shipper.cli.report.watcher import Watcher

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
    """Take a command line apart, as a shell would, and see that it can be run; empty if there is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{command!r} is no command: {error}", param_hint="--on-change") from None
    if words and shutil.which(words[0]) is None:
        raise typer.BadParameter(f"there is no command {words[0]!r}", param_hint="--on-change")
    return words
