"""
Many reports at once, of several accounts and periods: those that cannot be fetched are listed.

    parts = parts_of([1001, 1002], date(2026, 10, 1), date(2026, 12, 31), "month")
    async with ReportClient(…, concurrency=8) as client:
        outcome = await fetch_parts(client, parts, concurrency=8, use=lambda part, fetched: fetched.report)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import anyio

from shipper.model import wire
from shipper.model.errors import NoServiceError, ReportError
from shipper.model.units import several
from shipper.report.document import FetchedReport
from shipper.report.ranges import DateRange, Split, split_range
from shipper.report.wording import period

T = TypeVar("T")


class Part(NamedTuple):
    """A report to fetch."""

    account: int
    days: DateRange

    def __str__(self) -> str:
        return f"account {self.account}, {self.days}"


class Fetcher(Protocol):
    """What fetches one report, such as a `ReportClient`."""

    async def fetch(self, account_id: int, start: date, end: date) -> FetchedReport: ...


class Outcome(NamedTuple, Generic[T]):
    """
    What became of the parts; each is in one of the three.

    Attributes:
        reports: What was made of each report, in the order of the parts.
        failed: Why there is none, in the order of the parts; the error names the part.
        left_out: They were not asked for, as the service lets nobody in or is away; a failure says how.
    """

    reports: list[tuple[Part, T]]
    failed: list[tuple[Part, ReportError]]
    left_out: list[Part]


def parts_of(accounts: Iterable[int], start: date, end: date, split: Split = "none") -> list[Part]:
    """
    List the reports to fetch: account by account, the periods of each ascending.

    Args:
        accounts: One that is there twice counts once.
        start: First day.
        end: Last day, included.
        split: Where a range is cut.
    Raises:
        ReportError: `start` is after `end`.
    """
    days = split_range(start, end, split)
    return [Part(account, each) for account in dict.fromkeys(accounts) for each in days]


async def fetch_parts(
    client: Fetcher,
    parts: Sequence[Part],
    *,
    concurrency: int,
    use: Callable[[Part, FetchedReport], T],
    on_done: Callable[[], None] = lambda: None,
) -> Outcome[T]:
    """
    Fetch all parts, so many at a time.

    Args:
        client: Each failure of its own is a `ReportError`; after a `NoServiceError` no further part is begun.
        use: Called with each report as soon as it is there, not in the order of the parts; what it returns is kept,
            the report by itself is not.
        on_done: Called after each part, failed ones included.
    """
    waiting = iter(enumerate(parts))  # shared, so that each part goes to the fetch that is free
    reports: dict[int, tuple[Part, T]] = {}
    failed: dict[int, tuple[Part, ReportError]] = {}
    has_service = True

    async def work() -> None:
        nonlocal has_service
        for index, part in waiting:
            try:
                reports[index] = part, use(part, await client.fetch(part.account, *part.days))
            except ReportError as error:
                failed[index] = part, error
                has_service = has_service and not isinstance(error, NoServiceError)
            on_done()
            if not has_service:
                return

    async with anyio.create_task_group() as group:
        for _ in range(min(concurrency, len(parts))):
            group.start_soon(work)
    left_out = [part for index, part in enumerate(parts) if index not in reports and index not in failed]
    return Outcome(_in_order(reports), _in_order(failed), left_out)


def _in_order(found: dict[int, T]) -> list[T]:
    return [found[index] for index in sorted(found)]


class Coverage(NamedTuple):
    """
    Attributes:
        asked: All that were asked for.
        missing: Those that could not be fetched, in their order.
    """

    asked: Sequence[Part] = ()
    missing: Sequence[Part] = ()

    def of(self, account: int) -> str:
        """Return `2 of 3 periods; September 2026 is missing`; empty if nothing is."""
        missing = [part for part in self.missing if part.account == account]
        if not missing:
            return ""
        asked = Counter(part.account for part in self.asked)[account]
        days = ", ".join(map(_days, missing))
        are = "is" if len(missing) == 1 else "are"
        return f"{asked - len(missing):,} of {several(asked, 'period')}; {days} {are} missing"

    def lines(self) -> list[str]:
        """Return what is missing, one line for each account that lacks something."""
        return [f"Incomplete: account {each}, {self.of(each)}." for each in _accounts(self.missing)]

    def as_json(self) -> list[dict[str, Any]]:
        """List what is missing."""
        return [{"account_id": part.account, "start": part.days.start, "end": part.days.end} for part in self.missing]


WHOLE: Final = Coverage()


def _days(part: Part) -> str:
    start, end = part.days
    return period(wire.ReportingPeriod(f"{start}T00:00:00", f"{end}T23:59:59"))


def _accounts(parts: Iterable[Part]) -> list[int]:
    return list(dict.fromkeys(part.account for part in parts))
