"""Many reports at once in virtual time: failures are named, the others are returned, no request is wasted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.model.errors import NoServiceError, ReportError, StateError
from shipper.report.document import FetchedReport, read_report
from shipper.report.fetching import Outcome, fetch_parts
from shipper.report.ranges import DateRange, Part, parts_of
from tests.report_service import Asked, document
from tests.stage.loops import in_virtual_time

START = date(2026, 1, 1)
PARTS = parts_of([1001, 1002], DateRange(START, date(2026, 1, 10)), "day")


class Fetcher:
    """Answers after a latency; fails on request."""

    def __init__(self, *, latency_s: Callable[[Part], float] = lambda _: 1.0, failures: dict[Part, ReportError] = {}):  # noqa: B006
        self._latency_s = latency_s
        self._failures = failures
        self.asked: list[Part] = []
        self.in_flight = self.most_in_flight = 0

    async def fetch(self, account_id: int, start: date, end: date) -> FetchedReport:
        part = Part(account_id, DateRange(start, end))
        self.asked.append(part)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await anyio.sleep(self._latency_s(part))
        finally:
            self.in_flight -= 1
        if part in self._failures:
            raise self._failures[part]
        return read_report(document(Asked(account_id, start, end, "", "")), account_id=account_id)


@in_virtual_time
async def fetched(fetcher: Fetcher, parts: list[Part] = PARTS, concurrency: int = 4) -> tuple[Outcome[Part], float]:
    """Fetch reports; return their accounts and days, and the duration."""

    def whose(part: Part, made: FetchedReport) -> Part:
        period = made.report.reporting_period
        days = DateRange(date.fromisoformat(period.start[:10]), date.fromisoformat(period.end[:10]))
        return Part(made.report.source.affiliate_account_id, days)

    started_at = anyio.current_time()
    outcome = await fetch_parts(fetcher, parts, concurrency=concurrency, use=whose)
    return outcome, anyio.current_time() - started_at


# Which ones


def test_parts_are_ordered_by_unique_account_and_day():
    assert [str(part) for part in parts_of([7, 5, 7], DateRange(START, date(2026, 2, 2)), "month")] == [
        "account 7, 2026-01-01 to 2026-01-31",
        "account 7, 2026-02-01 to 2026-02-02",
        "account 5, 2026-01-01 to 2026-01-31",
        "account 5, 2026-02-01 to 2026-02-02",
    ]


def test_range_is_one_part_unless_split():
    assert parts_of([7], DateRange(START, date(2027, 3, 4))) == [Part(7, DateRange(START, date(2027, 3, 4)))]


# How


def test_reports_are_in_the_order_of_the_parts_whatever_the_order_of_the_answers(rng: Random):
    outcome, _ = fetched(Fetcher(latency_s=lambda _: rng.uniform(0, 10)))
    assert [part for part, _ in outcome.reports] == PARTS
    assert [whose for _, whose in outcome.reports] == PARTS
    assert (outcome.failed, outcome.not_requested) == ([], [])


@pytest.mark.parametrize(("concurrency", "seconds"), [(1, 20), (4, 5), (20, 1), (64, 1)])
def test_number_of_requests_in_flight_is_limited(concurrency: int, seconds: float):
    fetcher = Fetcher()
    _, took_s = fetched(fetcher, concurrency=concurrency)
    assert fetcher.most_in_flight == min(concurrency, len(PARTS))
    assert took_s == pytest.approx(seconds)


def test_slow_report_does_not_hold_up_the_others():
    fetcher = Fetcher(latency_s=lambda part: 15 if part == PARTS[0] else 1)
    _, took_s = fetched(fetcher, concurrency=2)
    assert took_s == pytest.approx(17)


def test_failed_part_is_named_and_the_others_are_returned():
    failures = {PARTS[3]: ReportError("no"), PARTS[11]: ReportError("neither")}
    outcome, _ = fetched(Fetcher(failures=failures))
    assert outcome.failed == list(failures.items())
    assert [part for part, _ in outcome.reports] == [part for part in PARTS if part not in failures]
    assert outcome.not_requested == []


def test_no_further_part_is_started_if_all_reports_would_fail():
    fetcher = Fetcher(failures={part: NoServiceError("away") for part in PARTS})
    outcome, took_s = fetched(fetcher)
    assert fetcher.asked == PARTS[:4]
    assert [part for part, _ in outcome.failed] == PARTS[:4]
    assert outcome.not_requested == PARTS[4:]
    assert took_s == pytest.approx(1)


def test_reports_in_flight_are_waited_for():
    fetcher = Fetcher(latency_s=lambda part: 1 + PARTS.index(part), failures={PARTS[0]: NoServiceError("away")})
    outcome, _ = fetched(fetcher)
    assert [part for part, _ in outcome.reports] == PARTS[1:4]
    assert outcome.not_requested == PARTS[4:]


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "bad", "away"]), max_size=20),
    latencies=st.lists(st.integers(0, 5), min_size=20, max_size=20),
    concurrency=st.integers(1, 6),
)
def test_each_part_is_a_report_failed_or_skipped(kinds: list[str], latencies: list[int], concurrency: int):
    parts = PARTS[: len(kinds)]
    errors = {"bad": ReportError, "away": NoServiceError}
    failures = {part: errors[kind](kind) for part, kind in zip(parts, kinds, strict=True) if kind in errors}
    fetcher = Fetcher(latency_s=lambda part: latencies[parts.index(part)], failures=failures)
    outcome, _ = fetched(fetcher, parts, concurrency)
    found = [[part for part, _ in outcome.reports], [part for part, _ in outcome.failed], outcome.not_requested]
    assert sorted(part for kind in found for part in kind) == parts
    assert all(kind == sorted(kind) for kind in found)
    assert not set(found[0]) & failures.keys()
    assert set(found[1]) <= failures.keys()
    assert sorted(fetcher.asked) == sorted(found[0] + found[1])
    assert bool(found[2]) <= ("away" in kinds)


@in_virtual_time
async def test_progress_counts_each_part_including_failed_ones():
    done = []
    fetcher = Fetcher(failures={PARTS[0]: ReportError("no")})
    await fetch_parts(fetcher, PARTS, concurrency=3, use=lambda part, made: None, on_done=lambda: done.append(1))
    assert len(done) == len(PARTS)


@in_virtual_time
async def test_error_in_the_caller_ends_the_fetching():
    def use(part: Part, made: FetchedReport) -> None:
        raise StateError("the disk is full")

    fetcher = Fetcher()
    with pytest.raises(ExceptionGroup) as caught:
        await fetch_parts(fetcher, PARTS, concurrency=4, use=use)
    assert caught.group_contains(StateError)
    assert len(fetcher.asked) < len(PARTS)
