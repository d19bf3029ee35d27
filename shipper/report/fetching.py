"""
Fetches the reports of several accounts and periods concurrently.

    parts = parts_of([1001, 1002], DateRange(date(2026, 10, 1), date(2026, 12, 31)), "month")
    async with ReportClient(…, concurrency=8) as client:
        outcome = await fetch_parts(client, parts, concurrency=8, use=lambda part, fetched: fetched.report)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import anyio

from shipper.model.errors import NoServiceError, ReportError
from shipper.model.units import several
from shipper.report.document import FetchedReport
from shipper.report.formatting import format_days
from shipper.report.ranges import Part

if TYPE_CHECKING:
    from shipper.report.client import ReportClient

T = TypeVar("T")


class Coverage(NamedTuple):
    """The requested reports, and those that could not be fetched."""

    requested: Sequence[Part] = ()
    missing: Sequence[Part] = ()

    def of(self, account: int) -> str:
        """Return `2 of 3 periods; September 2026 is missing`; empty if no report of the account is missing."""
        requested, missing = ([part for part in parts if part.account == account] for parts in self)
        if not missing:
            return ""
        days = ", ".join(format_days(*part.days) for part in missing)
        verb = "is" if len(missing) == 1 else "are"
        return f"{len(requested) - len(missing):,} of {several(len(requested), 'period')}; {days} {verb} missing"

    def lines(self) -> list[str]:
        """Return a line for each account with a missing report."""
        accounts = dict.fromkeys(part.account for part in self.missing)
        return [f"Incomplete: account {account}, {self.of(account)}." for account in accounts]


COMPLETE: Final = Coverage()


class Outcome(NamedTuple, Generic[T]):
    """The results of `use`, the errors, and the parts that were not requested, all in order."""

    reports: list[tuple[Part, T]]
    failed: list[tuple[Part, ReportError]]
    not_requested: list[Part]


async def fetch_parts(
    client: ReportClient,
    parts: Sequence[Part],
    *,
    concurrency: int,
    use: Callable[[Part, FetchedReport], T],
    on_done: Callable[[], None] = lambda: None,
) -> Outcome[T]:
    """
    Fetch all parts; after a `NoServiceError`, request no further ones.

    Args:
        concurrency: Maximum reports to fetch at the same time.
        use: Called with every report as it arrives, in any order; only its return value is kept.
        on_done: Called after every part, including failed ones.
    """
    waiting = iter(parts)  # shared by all workers
    reports: dict[Part, T] = {}
    failed: dict[Part, ReportError] = {}
    has_service = True

    async def work() -> None:
        nonlocal has_service
        for part in waiting:
            try:
                reports[part] = use(part, await client.fetch(part.account, *part.days))
            except ReportError as error:
                failed[part] = error
                has_service = has_service and not isinstance(error, NoServiceError)
            on_done()
            if not has_service:
                return

    async with anyio.create_task_group() as group:
        for _ in range(min(concurrency, len(parts))):
            group.start_soon(work)
    return Outcome(
        [(part, reports[part]) for part in parts if part in reports],
        [(part, failed[part]) for part in parts if part in failed],
        [part for part in parts if part not in reports and part not in failed],
    )
