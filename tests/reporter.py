"""`shipper report` with the settings of one service, in its own process or in this one."""

from __future__ import annotations

import json
from calendar import monthrange
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shipper.report.document import read_report
from shipper.report.history import History
from shipper.report.ranges import DateRange, Part
from tests.e2e.driver import Result, Running, Shipper, Target
from tests.report_service import Asked, ReportService, document

OCTOBER = ("2026-10-01", "2026-10-31")
QUARTER = ("2026-10-01", "2026-12-31")
NO_PATIENCE = {"delivery.give_up_after_seconds": 0}


class Reporter:
    """
    The command with its own configuration.

    Attributes:
        folder: Its working directory.
        state: Its state directory.
    """

    def __init__(self, shipper: Shipper, target: Target) -> None:
        self._shipper = shipper
        self.folder = shipper.folder
        self.state = shipper.state
        self.environment = {"REPORT_KEY": target.subscription_key, "REPORT_TOKEN": target.token}
        with shipper.config.open("a") as file:
            file.write(
                f'[report]\nbase_url = "{target.base_url}"\n'
                'subscription_key = { env = "REPORT_KEY" }\ntoken = { env = "REPORT_TOKEN" }\n'
            )

    def start(self, *arguments: str | Path, **options: Any) -> Running:
        """Start `shipper report ARGUMENTS`."""
        return self._shipper.start("report", *arguments, check=False, env=self.environment, **options)

    def __call__(self, *arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> Result:
        """Run `shipper report ARGUMENTS` in this process."""
        environment = {**self.environment, **(env or {})}
        return self._shipper.run("report", *arguments, env=environment, **options)

    def good(self, *arguments: str | Path, **options: Any) -> str:
        """Run it in this process, expect success, and return its output."""
        result = self(*arguments, **options)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout


@pytest.fixture
def origin() -> Iterator[ReportService]:
    """A report service whose answers a rule decides."""
    with ReportService() as origin:
        yield origin


@pytest.fixture
def reporter(shipper: Shipper, origin: ReportService) -> Reporter:
    return Reporter(shipper, Target(origin.url, "the-key", "the-token"))


def of_month(month: int, **changes: object) -> bytes:
    """Make the report of a month of 2026."""
    days = (date(2026, month, day) for day in (1, monthrange(2026, month)[1]))
    return document(Asked(1001, *days, "", ""), **changes)


def keep(reporter: Reporter, *bodies: bytes) -> None:
    """Save reports in the history as if they had been fetched one after the other."""
    with closing(History(reporter.state)) as history:
        for number, body in enumerate(bodies):
            period = json.loads(body)["reportingPeriod"]
            days = DateRange(*(date.fromisoformat(period[name][:10]) for name in ("start", "end")))
            fetched_at = 1_700_000_000.0 + number
            history.add(Part(1001, days), read_report(body, account_id=1001, fetched_at=fetched_at))


def hook(folder: Path, body: str) -> str:
    """Write a program to run on a change; return its command line."""
    path = folder / "a hook.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return f"'{path}' '$HOME;' x"
