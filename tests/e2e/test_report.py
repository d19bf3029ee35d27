"""`shipper report` as a process: its output, its progress display, and how signals end it."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from shipper.model import wire
from shipper.report.ranges import parse_period
from tests.e2e.driver import FAKETIME, SHIPPER, Running, Shipper, wait_until, with_clock
from tests.e2e.surroundings import Terminal
from tests.report_documents import brand, entry, report
from tests.report_service import ReportService, document, ok, refusal
from tests.reporter import NO_PATIENCE, OCTOBER, QUARTER, Reporter, hook, keep, of_month
from tests.servers import stall


def words(reporter: Reporter, *arguments: str) -> list[str | Path]:
    """Return the command and the options for its configuration."""
    return [SHIPPER, "report", *arguments, "--config", reporter.folder / "settings.toml"]


def environment(reporter: Reporter) -> dict[str, str]:
    return {**os.environ, **reporter.environment, "INTAKE_KEY": "x", "INTAKE_TOKEN": "x", "TERM": "xterm"}


# Output


def test_the_command_prints_every_format_as_rendered_in_this_process(reporter: Reporter):
    """Standard output is also named by its path."""
    csv = ("--format", "csv", "--output", "/dev/stdout")
    for options in ((), csv, ("--format", "html"), ("--format", "json")):
        result = reporter.start("1001", *OCTOBER, *options).finish()
        assert (result.returncode, result.stderr) == (0, "")
        here = reporter.good("1001", *OCTOBER, *options[:2])
        assert _timeless(result.stdout) == _timeless(here), options


def _timeless(text: str) -> list[str]:
    """Remove the time of fetching and normalize line ends."""
    return re.sub(r"\d\d:\d\d(:\d\d)?", "", text).splitlines()


def test_a_workbook_is_written_to_a_pipe_on_request(reporter: Reporter):
    openpyxl = pytest.importorskip("openpyxl")
    command = words(reporter, "1001", *OCTOBER, "--format", "xlsx", "--output", "-")
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment(reporter), check=True)
    assert openpyxl.load_workbook(io.BytesIO(done.stdout)).sheetnames == ["sources", "accounts"]


def test_a_report_is_written_to_a_named_pipe(reporter: Reporter):
    path = reporter.folder / "pipe"
    os.mkfifo(path)
    running = reporter.start("1001", *OCTOBER, "--format", "ndjson", "--output", path)
    assert path.read_text().startswith('{"account_id":1001,')
    assert running.finish().returncode == 0
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("arguments", [("1001", *OCTOBER), ("fetch", "1001", *OCTOBER)])
def test_an_unwritable_standard_output_is_an_error(reporter: Reporter, arguments: tuple[str, ...]):
    with open("/dev/full", "wb") as full:
        command = words(reporter, *arguments)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment(reporter))
    assert done.returncode == 1
    assert done.stderr == b"shipper: cannot write to standard output: No space left on device\n"


def test_an_answer_of_20_mb_is_shown(reporter: Reporter, origin: ReportService):
    brands = [brand(*(entry(number) for number in range(500)), number=number) for number in range(10)]
    made = wire.encode_report(report(*brands, start=OCTOBER[0], end=OCTOBER[1]))
    body = made[:-1] + b',"filling":"' + b"x" * (20_000_000 - len(made)) + b'"}'
    origin.rule = lambda _: ok(body)
    path = reporter.folder / "october.csv"
    assert reporter.start("1001", *OCTOBER, "--format", "csv", "--output", path).finish(limit_s=60).returncode == 0
    assert path.read_bytes().count(b"\n") == 5_001


def test_progress_is_shown_on_a_terminal_only(reporter: Reporter):
    command = words(reporter, "1001", *OCTOBER, "--split", "day", "--format", "csv")
    with Terminal() as terminal:
        pipes = {"stdout": subprocess.PIPE, "stderr": terminal.descriptor}
        done = subprocess.run(command, **pipes, timeout=60, env=environment(reporter), check=True)
    assert done.stdout.count(b"\n") == 31 + 1
    assert b"/31" in terminal.shown
    assert b"reports" in terminal.shown


# Watching


def restate_october(reporter: Reporter, origin: ReportService) -> None:
    """Change the report since it was fetched, so that a hook runs."""
    keep(reporter, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))


def test_watch_reports_restatements_survives_an_outage_and_ends_on_ctrl_c(reporter: Reporter, origin: ReportService):
    running = reporter.start("watch", "1001", *OCTOBER, "--interval", "1", settings=NO_PATIENCE)
    _wait_for_polls(running, origin, 1)
    origin.rule = lambda _: refusal(500)
    running.wait_for("the service answered 500")
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    looks = len(origin.asked)
    _wait_for_polls(running, origin, looks + 2)
    running.process.send_signal(signal.SIGINT)
    result = running.finish()
    assert result.returncode == 0
    assert [line.split(": ")[1].split(",")[0] for line in result.stdout.splitlines()] == ["new", "restated"]


def _wait_for_polls(running: Running, origin: ReportService, count: int) -> None:
    running.wait_until(lambda: len(origin.asked) >= count, f"{count} polls", limit_s=30)


def test_watch_ends_at_once_while_waiting_for_an_answer_or_the_next_poll(reporter: Reporter, origin: ReportService):
    origin.rule = lambda asked: stall if asked.start.month == 10 else refusal(503, Retry_After="60")
    running = reporter.start("watch", "1001", *QUARTER, "--split", "month", "--concurrency", "2")
    _wait_for_polls(running, origin, 2)
    result = running.stop()
    assert (result.returncode, result.stdout) == (0, "")


def test_a_hook_running_at_a_signal_may_finish(reporter: Reporter, origin: ReportService):
    restate_october(reporter, origin)
    begun, may_end, ended = (reporter.folder / name for name in ("begun", "may_end", "ended"))
    command = hook(reporter.folder, f"touch {begun}\nwhile [ ! -e {may_end} ]; do sleep 0.02; done\ntouch {ended}")
    running = reporter.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(begun.exists, "the hook runs")
    running.process.send_signal(signal.SIGTERM)
    may_end.touch()
    assert running.finish().returncode == 0
    assert ended.exists()


def test_a_hook_that_does_not_end_is_terminated_after_the_signal(
    reporter: Reporter, origin: ReportService, shipper: Shipper
):
    shipper.shortened |= {"shipper.cli.report.watch._DRAIN_S": 0.3}
    restate_october(reporter, origin)
    begun, ended = reporter.folder / "begun", reporter.folder / "ended"
    command = hook(reporter.folder, f"trap 'touch {ended}; exit 0' TERM\ntouch {begun}\nwhile :; do sleep 0.05; done")
    running = reporter.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(begun.exists, "the hook runs")
    assert running.stop().returncode == 0
    assert ended.exists()


def test_a_hook_runs_again_in_the_next_watch_if_its_watch_was_killed(reporter: Reporter, origin: ReportService):
    keep(reporter, of_month(10))
    log, may_end = reporter.folder / "hook.log", reporter.folder / "may_end"
    body = f"echo $$ >> {log}\nwhile [ ! -e {may_end} ]; do sleep 0.02; done"
    watch = ["watch", "1001", *OCTOBER, "--on-change", hook(reporter.folder, body)]
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    killed = reporter.start(*watch)
    killed.wait_until(log.exists, "the hook runs")
    killed.kill()
    may_end.touch()
    wait_until(lambda: not _runs(int(log.read_text())), "the first hook has ended")
    running = reporter.start(*watch, "--interval", "1")
    running.wait_until(lambda: len(log.read_text().splitlines()) == 2, "the hook runs again")
    _wait_for_polls(running, origin, len(origin.asked) + 2)
    assert running.stop().returncode == 0
    assert len(log.read_text().splitlines()) == 2


def test_two_watches_do_not_run_the_same_hook_at_the_same_time(reporter: Reporter, origin: ReportService):
    """As with overlapping watches from cron; the hook for another period is run."""
    keep(reporter, of_month(10), of_month(11))
    log, may_end = reporter.folder / "hook.log", reporter.folder / "may_end"
    body = f"echo $REPORT_START >> {log}\nwhile [ $REPORT_START = 2026-10-01 -a ! -e {may_end} ]; do sleep 0.02; done"
    command = hook(reporter.folder, body)
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    first = reporter.start("watch", "1001", *OCTOBER, "--once", "--on-change", command)
    first.wait_until(log.exists, "the hook runs")
    second = reporter.start("watch", "1001", *QUARTER, "--split", "month", "--once", "--on-change", command).finish()
    assert (second.returncode, second.stderr) == (3, "")
    assert log.read_text().split() == ["2026-10-01", "2026-11-01"]
    may_end.touch()
    assert first.finish().returncode == 3
    assert reporter.good("watch", "1001", *OCTOBER, "--once", "--on-change", command)
    assert log.read_text().split() == ["2026-10-01", "2026-11-01"]


def test_child_processes_of_a_hook_are_terminated_with_it(reporter: Reporter, origin: ReportService, shipper: Shipper):
    shipper.shortened |= dict.fromkeys(
        (f"shipper.cli.report.watch.{name}" for name in ("_DRAIN_S", "_HOOK_STOP_S")), 0.3
    )
    restate_october(reporter, origin)
    begun, child = reporter.folder / "begun", reporter.folder / "child"
    body = f"trap '' TERM\nsh -c 'echo $$ > {child}; touch {begun}; exec sleep 1000'\nsleep 1000"
    running = reporter.start("watch", "1001", *OCTOBER, "--on-change", hook(reporter.folder, body))
    running.wait_until(begun.exists, "the hook runs")
    assert running.stop().returncode == 0
    wait_until(lambda: not _runs(int(child.read_text())), "the child process has ended")


@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
def test_watch_of_yesterday_continues_with_the_next_day(reporter: Reporter, origin: ReportService):
    """A hook that failed for a day is still run again, although the report of that day is no longer fetched."""
    log, may_succeed = reporter.folder / "hook.log", reporter.folder / "may_succeed"
    _set_clock(reporter, 11)
    command = hook(reporter.folder, f"echo $REPORT_START >> {log}\ntest -e {may_succeed}")
    running = reporter.start("watch", "1001", "yesterday", "--interval", "1", "--on-change", command)
    _wait_for_polls(running, origin, 1)
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(asked.start.day)))
    running.wait_until(lambda: "ended with 1" in running.stderr, "the hook fails")
    _set_clock(reporter, 12)
    running.wait_until(lambda: origin.asked[-1].start.day == 11, "the report of the next day is fetched", limit_s=20)
    may_succeed.touch()
    _wait_for_polls(running, origin, len(origin.asked) + 2)
    result = running.stop()
    assert result.returncode == 0
    assert [line.split(", ")[1] for line in result.stdout.splitlines()] == [
        "2026-11-10: new",
        "2026-11-10: restated",
        "2026-11-11: new",
    ]
    assert log.read_text().split() == ["2026-11-10"] * (1 + result.stderr.count("ended with 1 for account 1001"))


@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
def test_watch_ends_when_its_days_are_over(reporter: Reporter, origin: ReportService):
    _set_clock(reporter, 11)
    running = reporter.start("watch", "1001", "yesterday", "2026-11-10", "--interval", "1")
    _wait_for_polls(running, origin, 1)
    _set_clock(reporter, 12)
    result = running.finish()
    assert (result.returncode, result.stdout) == (1, "account 1001, 2026-11-10: new\n")
    assert result.stderr == "shipper: no days are left to watch: START yesterday is after END 2026-11-10\n"


def _set_clock(reporter: Reporter, day: int) -> None:
    """Let it be noon of a day in November for the command, now or from its start."""
    clock = reporter.folder / "clock"
    reporter.environment |= with_clock(clock)
    ahead = datetime(2026, 11, day, 12, tzinfo=UTC) - datetime.now(UTC)
    clock.write_text(f"{ahead.total_seconds():+.0f}\n")


def _runs(process_id: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_hook_receives_the_report_but_no_secrets(reporter: Reporter, origin: ReportService):
    restate_october(reporter, origin)
    seen = reporter.folder / "seen"
    command = hook(reporter.folder, f"env > {seen}.new; mv {seen}.new {seen}")
    reporter.environment |= {"SOME_SECRET": "canary-4711", "LC_TIME": "C"}
    running = reporter.start("watch", "1001", *OCTOBER, "--on-change", command)
    running.wait_until(seen.exists, "the hook runs")
    assert running.stop().returncode == 0
    given = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert {"REPORT_ACCOUNT", "REPORT_START", "REPORT_END", "PATH", "HOME", "LC_TIME"} <= given.keys()
    assert not {name for name in given if name.startswith(("SHIPPER", "INTAKE", "SOME", "REPORT_KEY", "REPORT_TOKEN"))}


def test_restatements_are_reported_though_a_signal_arrives_before_the_other_answers(
    reporter: Reporter, origin: ReportService
):
    keep(reporter, *map(of_month, (10, 11, 12)))
    log = reporter.folder / "hook.log"
    changed = {10: lambda asked: ok(document(asked, opening_balance=Decimal(1))), 11: lambda _: stall}
    origin.rule = lambda asked: changed[asked.start.month](asked)
    command = hook(reporter.folder, f"echo $REPORT_START >> {log}")
    watch = ["watch", "1001", *QUARTER, "--split", "month", "--concurrency", "1", "--on-change", command]
    running = reporter.start(*watch)
    _wait_for_polls(running, origin, 2)
    result = running.stop()
    assert result.returncode == 0
    assert [line.split(",")[1:3] for line in result.stdout.splitlines()] == [
        [" 2026-10-01 to 2026-10-31: restated", " 1 field differs; see: shipper report diff 1001 2026-10-01 2026-10-31"]
    ]
    assert log.read_text() == "2026-10-01\n"


# Periods


@pytest.mark.parametrize("word", ["yesterday", "last-month", "2026-10", "2026-10-07"])
def test_a_period_replaces_start_and_end_in_every_command(
    word: str, reporter: Reporter, shipper: Shipper, origin: ReportService
):
    def meant() -> set[str]:
        days = parse_period(word, datetime.now(UTC).date())
        assert days is not None
        return {str(days.start), str(days.end)}

    before = meant()
    for command in ([], ["fetch"], ["fetch"], ["watch", "--once"]):
        assert reporter(*command, "1001", word).returncode == 0, command
    days = {str(day) for asked in origin.asked for day in (asked.start, asked.end)}
    assert days in (before, meant(), before | meant()), "the day may have changed meanwhile"
    if before == meant():
        assert sorted(before)[0] in reporter.good("history", "1001", word)
        assert reporter("diff", "1001", word).returncode == 0
        assert "no report of account 1001 is stored" in reporter("history", "1001", "2025-01").stderr
    assert shipper.run("ledger", word, env=reporter.environment).returncode == 0
    refused = reporter("1001", "last-weak")
    assert (refused.returncode, "'last-weak' is not a date or a period, such as" in refused.stderr) == (2, True)
