"""Hostile reports: each is shown or rejected with a message, and none takes unbounded memory."""

from __future__ import annotations

import gzip
import socket
from contextlib import closing
from datetime import date
from itertools import cycle
from pathlib import Path

import pytest

from shipper.report.history import History
from shipper.report.ranges import DateRange, Part
from tests.cases import each
from tests.e2e.driver import Result, Shipper
from tests.report_documents import brand, entry
from tests.report_service import Reply, ReportService, answer, ok
from tests.reporter import NO_PATIENCE, OCTOBER, Reporter, of_month

DIGITS = b"9" * 5_000
GOOD = of_month(10)
PART = Part(1001, DateRange(date(2026, 10, 1), date(2026, 10, 31)))
BALANCE = b'"openingBalance":'
ACCOUNT = b'"affilaiteAccountId":1001'
NAME = b'"operatorName":"'
FIGURES = (
    *(DIGITS, b"-" + DIGITS, b"0." + DIGITS, b"1e999999", b"-1e-999999", b"1e" + DIGITS, b"0e99999", b"NaN"),
    *(b"-Infinity", b'"1.5"', b'"NaN"', b"1e", b"01", b"true", b"[]", b"{}"),
)
FORMS = ("table", "csv", "html")
MEMORY_BYTES = 500 << 20  # for a report of 64 MiB, the maximum, and its parsed form


def with_balance(figure: bytes) -> bytes:
    head, _, rest = GOOD.partition(BALANCE)
    return head + BALANCE + figure + b"," + rest.partition(b",")[2]


def nested(depth: int) -> bytes:
    """Return a report with a deeply nested unknown field."""
    return b'{"x":' + b"[" * depth + b"]" * depth + b"," + GOOD[1:]


NO_REPORTS: dict[str, Reply] = {
    **{f"a figure of {figure[:12].decode()}": ok(with_balance(figure)) for figure in FIGURES},
    "an id of 5,000 digits": ok(GOOD.replace(ACCOUNT, ACCOUNT[:-4] + DIGITS)),
    "an id with an exponent": ok(GOOD.replace(ACCOUNT, ACCOUNT + b"e0")),
    "brackets": ok(b"[" * 200_000),
    "braces": ok(b'{"a":' * 200_000),
    **{f"nested {depth} deep": ok(nested(depth)) for depth in range(850, 1_000, 25)},
    "nested too deep": ok(nested(100_000)),
    "a lone surrogate": ok(GOOD.replace(NAME, NAME + b"\\ud800")),
    "not UTF-8": ok(GOOD.replace(NAME, NAME + b"\xff")),
    "zeros": ok(bytes(200_000)),
    "compressed": answer(200, gzip.compress(GOOD), headers={"Content-Encoding": "gzip"}),
    "a brand that is a number": ok(GOOD.replace(b'"brands":[', b'"brands":[1,')),
    "two reports": ok(GOOD + GOOD),
    "half a report": ok(GOOD[: len(GOOD) // 2]),
    "a text": ok(b'"report"'),
    "nothing": ok(b""),
    "a page": ok(GOOD, "text/html"),
    "another success status": answer(202, GOOD),
    "a retry after years": answer(429, headers={"Retry-After": "9" * 400}),
    "an invalid status": b"HTTP/1.1 " + DIGITS + b" x\r\n\r\n",
}
ODD_REPORTS: dict[str, Reply] = {
    "a repeated field": ok(GOOD.replace(BALANCE, b'"openingBalance":2.5,' + BALANCE)),
    "no date": ok(GOOD.replace(b'"2026-10-31T', b'"9999-99-99T')),
    "the year 0": ok(GOOD.replace(b'"2026-10-01T', b'"0000-00-00T')),
    "the year 9999": ok(GOOD.replace(b'"2026-10-31T', b'"9999-12-31T')),
    "no time": ok(GOOD.replace(b'"reportingTime":"', b'"reportingTime":"\\u0000+99999999')),
    "a long text": ok(GOOD.replace(NAME, NAME + b"x" * 200_000)),
    "another type": ok(GOOD, "image/png"),
    "50 sources": ok(of_month(10, brands=[brand(*(entry(number) for number in range(50)))])),
    "a source 20 times": ok(of_month(10, brands=[brand(*(entry() for _ in range(10)))] * 2)),
    "ids that are not positive": ok(of_month(10, brands=[brand(entry(0), entry(-(2**63)), number=-1)])),
    "nested 100 deep": ok(nested(100)),
}


@pytest.fixture
def reporter(shipper: Shipper, reporter: Reporter, file: Path) -> Reporter:
    """A reporter whose shipper has shipped records and whose history has a valid report."""
    assert shipper.run("backfill", file).returncode == 0
    reporter.good("fetch", "1001", *OCTOBER)
    return reporter


def reconciled(reporter: Reporter, shipper: Shipper, *options: str) -> Result:
    arguments = ("reconcile", "1001", *OCTOBER, "--split", "none", *options)
    return shipper.run(*arguments, settings=NO_PATIENCE, env=reporter.environment)


def assert_one_error(result: Result, what: str) -> None:
    """Assert that the error is one readable line without text from the answer."""
    result.assert_ended(1, "account 1001, 2026-10-01 to 2026-10-31: ")
    assert len(result.stderr) < 2_000, (what, result.stderr[:1000])


@each(("what", "command"), zip(NO_REPORTS, cycle(["show", "fetch", "watch", "reconcile"]), strict=False))
def test_an_invalid_report_is_an_error_in_every_command_and_is_not_saved(
    what: str, command: str, reporter: Reporter, origin: ReportService, shipper: Shipper
):
    """Each report is tested with one of the commands, which share the parser."""
    origin.rule = lambda _: NO_REPORTS[what]
    settings = {"delivery.give_up_after_seconds": 0, "delivery.retry_initial_seconds": 0.01}
    if command == "reconcile":
        result = reconciled(reporter, shipper)
    else:
        words = {"show": ("1001", *OCTOBER), "watch": ("watch", "1001", *OCTOBER, "--once")}
        result = reporter(*words.get(command, (command, "1001", *OCTOBER)), settings=settings)
    assert_one_error(result, what)
    with closing(History(reporter.state)) as history:
        assert len(history.versions(PART)) == 1, "the report was saved"


@each("what", ODD_REPORTS)
def test_an_odd_report_is_shown_or_rejected_with_a_message(
    what: str, reporter: Reporter, origin: ReportService, shipper: Shipper
):
    origin.rule = lambda _: ODD_REPORTS[what]
    for form in FORMS:
        result = reporter("1001", *OCTOBER, "--format", form, "--checks")
        assert result.returncode in {0, 1}, (form, result)
        assert result.returncode == 0 or not result.stdout
    for command in (("fetch", "1001", *OCTOBER), ("diff", "1001", *OCTOBER)):
        assert reporter(*command).returncode in {0, 1, 3}, command
    assert reconciled(reporter, shipper, "--format", "json").returncode in {0, 1, 3, 4, 6}


def endless(head: bytes, piece: bytes, total: int) -> Reply:
    """Reply with a document of this size."""

    def reply(connection: socket.socket) -> None:
        block = piece * (65_536 // len(piece) + 1)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total + head)
        left = total - len(head)
        while left > 0:
            connection.sendall(block[:left])
            left -= len(block)

    return reply


LARGE = 64 << 20
LARGE_REPORTS: dict[str, Reply] = {
    "200 MB": endless(b'{"x":"', b"x", 200_000_000),
    "objects": endless(b"[", b"{},", LARGE),
    "an error of digits": lambda connection: connection.sendall(
        b"HTTP/1.1 500 x\r\nContent-Length: %d\r\n\r\n" % LARGE + b"[" + b"1," * (LARGE // 2)
    ),
}


@pytest.mark.parametrize("what", LARGE_REPORTS)
def test_memory_is_bounded_for_every_answer(what: str, reporter: Reporter, origin: ReportService):
    origin.rule = lambda _: LARGE_REPORTS[what]
    running = reporter.start("1001", *OCTOBER, "--format", "json", settings=NO_PATIENCE, fresh=True)
    result = running.finish(limit_s=60)
    assert_one_error(result, what)
    assert result.peak_bytes < MEMORY_BYTES
