"""`shipper report`: the affiliate daily report of one account and period."""

from __future__ import annotations

import sys
import time
from datetime import date, datetime
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare, run_async
from shipper.config import Settings, require_endpoint

if TYPE_CHECKING:
    from shipper.report.document import FetchedReport

_Day = Annotated[datetime, typer.Argument(formats=["%Y-%m-%d"], help="A day, YYYY-MM-DD; both ends are included.")]


def report(
    account: Annotated[int, typer.Argument(min=1, help="The affiliate account's number.")],
    start: _Day,
    end: _Day,
    form: Annotated[
        str, typer.Option("--format", metavar="FORM", help="table, or json: the exact document.")
    ] = "table",
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Fetch the affiliate daily report and show it.

    Example: shipper report 1001 2026-10-01 2026-10-31 --format json > october.json
    """
    if form not in {"table", "json"}:
        raise typer.BadParameter(f"{form!r} is not a form of report; there are: table, json")
    settings = prepare(config, overrides, log_level, log_format, needs="report")

    fetched = run_async(lambda: fetch_report(settings, account, start.date(), end.date()))
    if form == "json":
        sys.stdout.buffer.write(fetched.body)
        sys.stdout.buffer.flush()
    else:
        from rich.console import Console

        from shipper.report.table import render_table

        render_table(fetched.report, Console())


async def fetch_report(settings: Settings, account: int, start: date, end: date) -> FetchedReport:
    """
    Get one report.

    Raises:
        ReportError: It could not be had; says what the service answered.
    """
    from shipper.report.client import ReportClient

    endpoint = require_endpoint(settings, "report")
    async with ReportClient(endpoint, settings.delivery, wall_time=time.time, rng=Random()) as client:
        return await client.fetch(account, start, end)
