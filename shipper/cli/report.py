"""`shipper report`: the affiliate daily report of one account and period."""

from __future__ import annotations

import sys
import time
from datetime import date, datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare, run_async
from shipper.config import Settings, require_endpoint
from shipper.errors import ReportError

if TYPE_CHECKING:
    from shipper.delivery.verdicts import Answer

_MAX_REPORT_BYTES = 64 << 20
_ATTEMPTS = 4
_LONGEST_WAIT_S = 30.0

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

    from shipper.report.document import read_report

    body = run_async(lambda: fetch_report(settings, account, start.date(), end.date()))
    document = read_report(body, account_id=account).report
    if form == "json":
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()
    else:
        from rich.console import Console

        from shipper.report.table import render_table

        render_table(document, Console())


async def fetch_report(settings: Settings, account: int, start: date, end: date) -> bytes:
    """
    Get the report's document as the service wrote it.

    Raises:
        ReportError: It could not be had; says what the service answered.
    """
    from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

    from shipper.delivery.credentials import Credentials, NoTokenError
    from shipper.delivery.endpoint import Endpoint, NoAnswerError, make_ssl_context, post_form
    from shipper.delivery.verdicts import Action, judge
    from shipper.report.client import report_path

    class _RetryError(ReportError):
        pass

    path = report_path(account, start, end)
    endpoint_settings = require_endpoint(settings, "report")
    ssl_context = make_ssl_context(endpoint_settings)
    endpoint = Endpoint(endpoint_settings, settings.delivery, section="report", ssl_context=ssl_context)
    credentials = Credentials(
        endpoint_settings,
        section="report",
        post_form=partial(
            post_form, endpoint=endpoint_settings, delivery=settings.delivery, ssl_context=ssl_context, section="report"
        ),
        wall_time=time.time,
        rng=Random(),
    )

    async def attempt() -> Answer:
        try:
            authorization = await credentials.authorize()
            answer = await endpoint.request(
                "GET", path, authorization=authorization, max_answer_bytes=_MAX_REPORT_BYTES
            )
        except (NoAnswerError, NoTokenError) as error:
            raise _RetryError(str(error)) from error
        if answer.status != 200:
            verdict = judge(answer, section="report")
            kind = _RetryError if verdict.action in {Action.RETRY, Action.THROTTLE} else ReportError
            raise kind(f"account {account}: {verdict.message}")
        return answer

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(_RetryError),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_random_exponential(multiplier=settings.delivery.retry_initial_seconds, max=_LONGEST_WAIT_S),
        reraise=True,
    )
    try:
        return (await retrying(attempt)).body
    finally:
        await endpoint.aclose()
