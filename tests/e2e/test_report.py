"""`shipper report` as a process: where it writes to, what it draws, and how signals end it."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from shipper.model import wire
from shipper.report.ranges import period_of
from tests.e2e.driver import SHIPPER, Running, Shipper, Target, wait_until
from tests.report_documents import brand, entry, report
from tests.report_service import ReportService, document, ok, refusal
from tests.reporter import NO_PATIENCE, OCTOBER, QUARTER, Reporter, hook, keep, of_month
from tests.stage.servers import stall


@pytest.fixture
def origin() -> Iterator[ReportService]:
    """A service that answers as it is told."""
    with ReportService() as origin:
        yield origin


@pytest.fixture
def told(shipper: Shipper, origin: ReportService) -> Reporter:
    """It asks the service that answers as it is told."""
    return Reporter(shipper, Target(origin.url, "the-key", "the-token"))


def words(reporter: Reporter, *arguments: str) -> list[str | Path]:
    """Name the command and its configuration."""
    return [SHIPPER, "report", *arguments, "--config", reporter.folder / "settings.toml"]


def environment(reporter: Reporter) -> dict[str, str]:
    return {**os.environ, **reporter.environment, "INTAKE_KEY": "x", "INTAKE_TOKEN": "x", "TERM": "xterm"}


# Where it is written to


def test_document_is_exact(told: Reporter, origin: ReportService):
    body = b" " + of_month(10).replace(b",", b" ,\n")
    origin.rule = lambda _: ok(body)
    result = told.start("1001", *OCTOBER, "--format", "json").finish()
    assert (result.returncode, result.stdout.encode(), result.stderr) == (0, body, "")


def test_table_csv_and_page_are_those_that_are_made_in_this_process(told: Reporter):
    """Standard output has a second name."""
    csv = ("--format", "csv", "--output", "/dev/stdout")
    for options in ((), csv, ("--format", "html")):
        result = told.start("1001", *OCTOBER, *options).finish()
        assert (result.returncode, result.stderr) == (0, "")
        here = told.good("1001", *OCTOBER, *options[:2])
        assert _timeless(result.stdout) == _timeless(here), options


def _timeless(text: str) -> list[str]:
    """Leave out when it was fetched, and how lines end."""
    return re.sub(r"\d\d:\d\d(:\d\d)?", "", text).splitlines()


def test_workbook_may_go_to_a_pipe_if_that_is_said(told: Reporter):
    openpyxl = pytest.importorskip("openpyxl")
    command = words(told, "1001", *OCTOBER, "--format", "xlsx", "--output", "-")
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment(told), check=True)
    assert openpyxl.load_workbook(io.BytesIO(done.stdout)).sheetnames == ["sources", "accounts"]


def test_named_pipe_is_written_into(told: Reporter):
    path = told.folder / "pipe"
    os.mkfifo(path)
    running = told.start("1001", *OCTOBER, "--format", "ndjson", "--output", path)
    assert path.read_text().startswith('{"account_id":1001,')
    assert running.finish().returncode == 0
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("arguments", [("1001", *OCTOBER), ("fetch", "1001", *OCTOBER)])
def test_standard_output_that_cannot_be_written_is_told(told: Reporter, arguments: tuple[str, ...]):
    with open("/dev/full", "wb") as full:
        command = words(told, *arguments)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment(told))
    assert done.returncode == 1
    assert done.stderr == b"shipper: cannot write to standard output: No space left on device\n"


def test_answer_of_50_mb_is_shown(told: Reporter, origin: ReportService):
    brands = [brand(*(entry(number) for number in range(500)), number=number) for number in range(10)]
    made = wire.encode_report(report(*brands, start=OCTOBER[0], end=OCTOBER[1]))
    body = made[:-1] + b',"filling":"' + b"x" * (50_000_000 - len(made)) + b'"}'
    origin.rule = lambda _: ok(body)
    path = told.folder / "october.csv"
    assert told.start("1001", *OCTOBER, "--format", "csv", "--output", path).finish(limit_s=60).returncode == 0
    assert path.read_bytes().count(b"\n") == 5_001


def test_progress_is_shown_on_a_terminal_only(told: Reporter):
    command = words(told, "1001", *OCTOBER, "--split", "day", "--format", "csv")
    screen, terminal = pty.openpty()
    seen = bytearray()

    def watch() -> None:
        while True:
            try:
                data = os.read(screen, 65_536)
            except OSError:  # nobody has the terminal open any more
                return
            seen.extend(data)

    watching = threading.Thread(target=watch)
    watching.start()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, timeout=60, env=environment(told), check=True
    )
    os.close(terminal)
    watching.join(10)
    os.close(screen)
    assert done.stdout.count(b"\n") == 31 + 1
    assert b"/31" in seen
    assert b"reports" in seen


# Watching


def test_watch_tells_each_restatement_survives_an_outage_and_ends_with_ctrl_c(told: Reporter, origin: ReportService):
    running = told.start("watch", "1001", *OCTOBER, "--interval", "1", settings=NO_PATIENCE)
    _wait_for_looks(running, origin, 2)
    origin.rule = lambda _: refusal(500)
    running.wait_for("the service answered 500")
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    looks = len(origin.asked)
    _wait_for_looks(running, origin, looks + 2)
    running.process.send_signal(signal.SIGINT)
    result = running.finish()
    assert result.returncode == 0
    assert [line.split(": ")[1].split(",")[0] for line in result.stdout.splitlines()] == ["new", "restated"]


def _wait_for_looks(running: Running, origin: ReportService, count: int) -> None:
    running.wait_until(lambda: len(origin.asked) >= count, f"{count} looks", limit_s=30)


def test_watch_that_waits_for_answers_and_to_ask_again_ends_at_once(told: Reporter, origin: ReportService):
    origin.rule = lambda asked: stall if asked.start.month == 10 else refusal(503, Retry_After="60")
    running = told.start("watch", "1001", *QUARTER, "--split", "month", "--concurrency", "2")
    _wait_for_looks(running, origin, 2)
    result = running.stop()
    assert (result.returncode, result.stdout) == (0, "")


def test_hook_that_runs_when_a_signal_comes_may_finish(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    begun, may_end, ended = (told.folder / name for name in ("begun", "may_end", "ended"))
    command = hook(told.folder, f"touch {begun}\nwhile [ ! -e {may_end} ]; do sleep 0.02; done\ntouch {ended}")
    running = told.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(begun.exists, "the hook runs")
    running.process.send_signal(signal.SIGTERM)
    may_end.touch()
    assert running.finish().returncode == 0
    assert ended.exists()


def test_hook_that_does_not_end_by_itself_is_ended_after_the_signal(
    told: Reporter, origin: ReportService, shipper: Shipper
):
    shipper.shortened |= {"shipper.cli.report.watch._TELL_S": 0.3}
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    begun, ended = told.folder / "begun", told.folder / "ended"
    command = hook(told.folder, f"trap 'touch {ended}; exit 0' TERM\ntouch {begun}\nwhile :; do sleep 0.05; done")
    running = told.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(begun.exists, "the hook runs")
    assert running.stop().returncode == 0
    assert ended.exists()


def test_a_hook_whose_watch_was_killed_runs_again_in_the_next_one(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    log, may_end = told.folder / "hook.log", told.folder / "may_end"
    body = f"echo $$ >> {log}\nwhile [ ! -e {may_end} ]; do sleep 0.02; done"
    watch = ["watch", "1001", *OCTOBER, "--on-change", hook(told.folder, body)]
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    killed = told.start(*watch)
    killed.wait_until(log.exists, "the hook runs")
    killed.kill()
    may_end.touch()
    wait_until(lambda: not _runs(int(log.read_text())), "the first hook has ended")
    running = told.start(*watch, "--interval", "1")
    running.wait_until(lambda: len(log.read_text().splitlines()) == 2, "the hook runs again")
    _wait_for_looks(running, origin, len(origin.asked) + 2)
    assert running.stop().returncode == 0
    assert len(log.read_text().splitlines()) == 2


def test_a_hook_that_another_watch_is_running_is_not_run_as_well(told: Reporter, origin: ReportService):
    """As when looks overlap that are started every few minutes; that of another period is."""
    keep(told, of_month(10), of_month(11))
    log, may_end = told.folder / "hook.log", told.folder / "may_end"
    body = f"echo $REPORT_START >> {log}\nwhile [ $REPORT_START = 2026-10-01 -a ! -e {may_end} ]; do sleep 0.02; done"
    command = hook(told.folder, body)
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    first = told.start("watch", "1001", *OCTOBER, "--once", "--on-change", command)
    first.wait_until(log.exists, "the hook runs")
    second = told.start("watch", "1001", *QUARTER, "--split", "month", "--once", "--on-change", command).finish()
    assert (second.returncode, second.stderr) == (3, "")
    assert log.read_text().split() == ["2026-10-01", "2026-11-01"]
    may_end.touch()
    assert first.finish().returncode == 3
    assert told.good("watch", "1001", *OCTOBER, "--once", "--on-change", command)
    assert log.read_text().split() == ["2026-10-01", "2026-11-01"]


def test_what_a_hook_has_started_is_ended_with_it(told: Reporter, origin: ReportService, shipper: Shipper):
    shipper.shortened |= dict.fromkeys(
        (f"shipper.cli.report.watch.{name}" for name in ("_TELL_S", "_HOOK_ENDS_S")), 0.3
    )
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    begun, child = told.folder / "begun", told.folder / "child"
    body = f"trap '' TERM\nsh -c 'echo $$ > {child}; touch {begun}; exec sleep 1000'\nsleep 1000"
    running = told.start("watch", "1001", *OCTOBER, "--on-change", hook(told.folder, body))
    running.wait_until(begun.exists, "the hook runs")
    assert running.stop().returncode == 0
    wait_until(lambda: not _runs(int(child.read_text())), "what the hook has started has ended")


def _runs(process_id: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_hook_is_given_what_it_is_told_of_and_none_of_the_secrets(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    seen = told.folder / "seen"
    command = hook(told.folder, f"env > {seen}.new; mv {seen}.new {seen}")
    told.environment |= {"SOME_SECRET": "canary-4711", "LC_TIME": "C"}
    running = told.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(seen.exists, "the hook runs")
    assert running.stop().returncode == 0
    given = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert {"REPORT_ACCOUNT", "REPORT_START", "REPORT_END", "PATH", "HOME", "LC_TIME"} <= given.keys()
    assert not {name for name in given if name.startswith(("SHIPPER", "INTAKE", "SOME", "REPORT_KEY", "REPORT_TOKEN"))}


def test_what_was_restated_is_told_though_a_signal_comes_before_the_other_answers(
    told: Reporter, origin: ReportService
):
    keep(told, *map(of_month, (10, 11, 12)))
    log = told.folder / "hook.log"
    changed = {10: lambda asked: ok(document(asked, opening_balance=Decimal(1))), 11: lambda _: stall}
    origin.rule = lambda asked: changed[asked.start.month](asked)
    command = hook(told.folder, f"echo $REPORT_START >> {log}")
    watch = ["watch", "1001", *QUARTER, "--split", "month", "--concurrency", "1", "--on-change", command]
    running = told.start(*watch)
    _wait_for_looks(running, origin, 2)
    result = running.stop()
    assert result.returncode == 0
    assert [line.split(",")[1:3] for line in result.stdout.splitlines()] == [
        [" 2026-10-01 to 2026-10-31: restated", " 1 field differs; see: shipper report diff 1001 2026-10-01 2026-10-31"]
    ]
    assert log.read_text() == "2026-10-01\n"


# Periods


@pytest.mark.parametrize("word", ["yesterday", "last-month", "2026-10", "2026-10-07"])
def test_a_period_stands_for_start_and_end_wherever_they_do(
    word: str, told: Reporter, shipper: Shipper, origin: ReportService
):
    def meant() -> set[str]:
        days = period_of(word, datetime.now(UTC).date())
        assert days is not None
        return {str(days.start), str(days.end)}

    before = meant()
    for command in ([], ["fetch"], ["fetch"], ["watch", "--once"]):
        assert told(*command, "1001", word).returncode == 0, command
    days = {str(day) for asked in origin.asked for day in (asked.start, asked.end)}
    assert days in (before, meant(), before | meant()), "the day may have ended meanwhile"
    if before == meant():
        assert sorted(before)[0] in told.good("history", "1001", word)
        assert told("diff", "1001", word).returncode == 0
        assert "no report of account 1001 is kept" in told("history", "1001", "2025-01").stderr
    assert shipper.run("ledger", word, env=told.environment).returncode == 0
    refused = told("1001", "last-weak")
    assert (refused.returncode, "'last-weak' is not a date or a period, such as" in refused.stderr) == (2, True)
