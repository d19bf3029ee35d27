"""`shipper status` while a shipper is running or paused, and after its end or kill: what is delivered, what is not."""

from __future__ import annotations

import json
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from shipper.model.units import size
from shipper.state.directory import locked_directory
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, SHIPPER, Running, Service, Shipper, wait_until
from tests.e2e.files import Tail, append
from tests.e2e.surroundings import Terminal

FORBIDDEN = {"effect": "status", "status": 403}


@pytest.fixture(autouse=True)
def _without_faults(service: Service) -> Iterator[None]:
    yield
    service.set_faults()


def ask(shipper: Shipper, *arguments: str, code: int = 0, **settings: str) -> str:
    """Run `shipper status` and return its output; assert that stderr is empty."""
    result = shipper.run("status", *arguments, settings=settings)
    assert (result.returncode, result.stderr) == (code, ""), result.stdout
    return result.stdout


def is_delivered(shipper: Shipper, until: str, **settings: str) -> bool:
    result = shipper.run("status", "--until", until, settings=settings)
    assert result.returncode in {0, 4}, result.stderr
    assert result.stdout.startswith("yes: " if result.returncode == 0 else "no: ")
    return result.returncode == 0


def document(shipper: Shipper, *arguments: str) -> dict[str, Any]:
    return json.loads(ask(shipper, "--json", *arguments))


def now_iso() -> str:
    return datetime.now(UTC).isoformat()


def own_report(shipper: Shipper) -> dict[str, Any]:
    """Return the shipper's own report, written once a second; polling it is cheaper than running the command."""
    path = shipper.state / "live.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def paused(tail: Tail, service: Service, shipper: Shipper) -> Running:
    """Return a shipper that is paused because all requests after the first ones were refused."""
    tail.append(0, 100)
    running = tail.start()
    tail.wait(100)
    service.set_faults(FORBIDDEN)
    tail.append(100, 200)
    running.wait_until(
        lambda: own_report(shipper).get("pauses") and own_report(shipper)["pending"] == 100,
        "it reports the pause, and has read the rest",
    )
    return running


# No running shipper -----------------------------------------------------------------------------------------------


def test_status_without_a_state_reports_nothing_and_creates_nothing(shipper: Shipper):
    assert ask(shipper).startswith("no shipper is running; nothing has been read yet\n")
    text = ask(shipper, "--until", "now", code=4, **{"input.include": '["none.log"]'})
    assert ("nothing has been shipped from here" in text, "none.log: " in text) == (True, True)
    found = document(shipper)
    assert (found["process_id"], found["delivered_until"], found["live"], found["report"]) == (None, None, None, None)
    assert not shipper.state.exists()


def test_an_unfinished_state_of_a_starting_shipper_counts_as_none(shipper: Shipper):
    with locked_directory(shipper.state) as directory:
        sqlite3.connect(directory / "state.db").close()
        assert "nothing has been read yet" in shipper.run("status", check=False).stdout
        for command in (["ledger"], ["dead-letters", "list"]):
            assert shipper.run(*command, check=False).returncode == 0


def test_after_a_backfill_everything_is_delivered_until_the_file_grows(tail: Tail, shipper: Shipper):
    tail.append(0, 100)
    before = now_iso()
    assert shipper.run("backfill", tail.file).returncode == 0
    first, *others = ask(shipper).splitlines()
    assert first.startswith("no shipper is running; the last one (backfill) ended ")
    assert "ago: finished" in first
    assert "; everything written until " in first
    assert "records: 100 read = 100 accepted + 0 dead-lettered + 0 duplicates" in others
    assert any(line.endswith(str(tail.file)) for line in others)
    assert is_delivered(shipper, "now")
    tail.append(100, 110)
    text = ask(shipper, "--until", "now", code=4)
    grown = sum(map(len, tail.sample.lines[100:110]))
    assert str(tail.file) in text
    assert f"  {size(grown)}  " in text
    assert is_delivered(shipper, before)
    assert shipper.run("backfill", tail.file).returncode == 0
    assert is_delivered(shipper, "now")


def test_only_inputs_that_were_read_or_are_named_can_count_as_undelivered(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    assert shipper.run("backfill", tail.file).returncode == 0
    told = "  only inputs that were read before are checked; "
    pattern = json.dumps([f"{tail.folder}/*"])
    assert len(ask(shipper, "--until", "now", **{"input.include": pattern}).splitlines()) == 1
    beside = json.dumps([f"{tail.folder}/*", f"{tail.folder}/none/*.ndjson"])
    (answer,) = ask(shipper, "--until", "now", **{"input.include": beside}).splitlines()
    assert answer.startswith("yes: ")
    assert f" is delivered; but no file matches {tail.folder}/none/*.ndjson: there is no folder" in answer
    new = tail.append(10, 20, "app.ndjson.new")  # it is no configured input
    answer, line = ask(shipper, "--until", "now").splitlines()
    assert answer.startswith("yes: ")
    assert line == f"{told}{shipper.config}: input.include is missing"
    state = {"state.directory": str(shipper.state)}
    result = shipper.run("status", "--until", "now", configured=False, settings=state)
    assert result.stdout.splitlines()[1] == f"{told}no settings file was found, and input.include is missing"
    text = ask(shipper, "--until", "now", code=4, **{"input.include": pattern})
    assert f"{new} (not examined yet)" in text
    assert str(tail.file) + "\n" not in text


def test_the_suggested_command_finds_the_same_dead_letters_and_contains_no_secret(tail: Tail, shipper: Shipper):
    tail.file.write_bytes(b"no record\n")
    assert shipper.run("backfill", tail.file).returncode == 3
    given = {"state.directory": str(shipper.state), "intake.base_url": "http://127.0.0.1:9", "intake.token": "hush"}
    result = shipper.run("status", configured=False, settings=given)
    (line,) = [each for each in result.stdout.splitlines() if each.startswith("dead letters: 1 kept")]
    command = line.partition("list them with: ")[2]
    assert command == f"shipper dead-letters list --set state.directory={shipper.state}"
    assert f"list --config {shipper.config}" in ask(shipper)
    listed = shipper.run(*shlex.split(command)[1:], configured=False)
    assert (listed.returncode, str(tail.file) in listed.stdout) == (0, True)


def test_invalid_times_intervals_and_combinations_of_options_are_refused(shipper: Shipper):
    for arguments in (["--until", "noon"], ["--until", "now", "--watch"], ["--watch", "--interval", "0"]):
        result = shipper.run("status", *arguments)
        assert (result.returncode, result.stdout) == (2, "")


# A running shipper ------------------------------------------------------------------------------------------------


def test_status_begins_with_the_reason_of_a_pause_and_the_remedy(tail: Tail, service: Service, shipper: Shipper):
    before = now_iso()
    running = paused(tail, service, shipper)
    lines = ask(shipper).splitlines()
    assert lines[0].startswith("paused since ")
    assert "(forbidden): " in lines[0]
    assert lines[1].startswith("  what to do: ")
    assert f"(run, process {running.pid}, " in lines[2]
    assert any(line.startswith("records: ") and line.endswith("+ 100 pending") for line in lines)
    assert is_delivered(shipper, before)
    text = ask(shipper, "--until", "now", code=4)
    assert str(tail.file) in text
    assert "(forbidden): " in text
    found = document(shipper)
    assert found["process_id"] == found["live"]["process_id"] == running.pid
    service.set_faults()
    running.wait_until(lambda: shipper.read_state().accepted == 200, "it resumes", limit_s=30)
    running.wait_until(lambda: is_delivered(shipper, "now"), "the status changes")
    service.assert_holds_exactly(tail.ids(200))
    running.wait_until(lambda: not own_report(shipper)["pauses"], "it reports that it resumed")
    last = own_report(shipper)["last_pause"]
    assert (last["reason"], last["since"] < last["until"]) == ("forbidden", True)
    assert ask(shipper).startswith("running since ")
    assert running.stop().returncode == 0
    ended = ask(shipper)
    assert "; the last one (run) ended " in ended
    assert "ago: drained" in ended


def test_a_killed_shipper_is_not_reported_as_running(tail: Tail, service: Service, shipper: Shipper):
    running = paused(tail, service, shipper)
    running.kill()
    lines = ask(shipper).splitlines()
    assert lines[0].startswith(f"no shipper is running; the last one (run, process {running.pid}) was killed: ")
    assert lines[1].startswith("at its end: paused since ")
    assert not is_delivered(shipper, "now")
    assert document(shipper)["process_id"] is None


def test_status_until_succeeds_only_once_the_service_has_everything_written_by_then(
    tail: Tail, service: Service, shipper: Shipper
):
    """While records are written continuously, and the service is slow and sometimes fails."""
    service.set_faults(
        {"effect": "delay", "seconds": 0.2}, {"effect": "status", "status": 503, "probability": 0.2}, seed=3
    )
    tail.append(0, 10)
    running = tail.start()
    running.wait_until(lambda: shipper.read_state().read, "a state exists")
    denied = 0
    for start in range(10, 90, 20):
        tail.append(start, start + 10)
        until = now_iso()
        tail.append(start + 10, start + 20, f"app.ndjson.{start}")
        deadline = time.monotonic() + 30
        while not is_delivered(shipper, until, **{"input.include": json.dumps([f"{tail.folder}/*"])}):
            denied += 1
            assert time.monotonic() < deadline
            time.sleep(0.03)
        held = set(service.event_ids())
        assert [number for number, each in enumerate(tail.ids(start + 10)) if each not in held] == []
    assert denied, "every answer was an immediate yes"
    assert running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(90))


def test_undelivered_input_of_a_pipe_counts_as_undelivered(service: Service, shipper: Shipper, sample: Sample):
    service.set_faults(FORBIDDEN)
    running = shipper.open_pipe(*sample.lines[:10], settings=QUICK)
    running.wait_until(lambda: own_report(shipper).get("pauses"), "it is paused")
    size_read = size(sum(map(len, sample.lines[:10])))
    assert f"standard input: {size_read} to go" in ask(shipper, "--until", "now", code=4)
    service.set_faults()
    running.wait_until(lambda: shipper.read_state().accepted == 10, "it resumes", limit_s=30)
    running.wait_until(lambda: is_delivered(shipper, "now"), "the status changes")
    assert set(service.event_ids()) == set(sample.ids[:10])
    assert running.end_input().returncode == 0


def test_an_incomplete_last_line_does_not_count_as_ongoing_delivery(tail: Tail, service: Service, shipper: Shipper):
    tail.append(0, 10)
    append(tail.file, tail.sample.lines[10][:-1])
    shipper.shortened |= {"shipper.pipeline.observer._RATE_WINDOW_S": 0.5, "shipper.status.snapshot._STARTUP_S": 0.5}
    running = tail.start()
    tail.wait(10)
    told = f"delivered; {size(len(tail.sample.lines[10]) - 1)} belong to an incomplete line"
    running.wait_until(lambda: told in ask(shipper), "the rate of the last ten seconds is zero")
    assert f"ships to: {service.target.base_url}" in ask(shipper)
    append(tail.file, b"\n")
    running.wait_until(lambda: shipper.read_state().accepted == 11, "the line is complete")
    running.wait_until(lambda: is_delivered(shipper, "now"), "the status changes")
    assert "incomplete line" not in ask(shipper)
    service.assert_holds_exactly(tail.ids(11))
    assert running.stop().returncode == 0


# For programs -----------------------------------------------------------------------------------------------------


def test_the_document_lists_the_inputs_most_behind_or_all_of_them(tail: Tail, shipper: Shipper):
    for number in range(25):
        tail.append(number, number + 1, f"app.ndjson.{number}")
    assert shipper.run("backfill", tail.folder).returncode == 0
    found = document(shipper)
    names = {"headline", "summary", "process_id", "delivered_until", "troubles", "beside", "live", "state", "report"}
    assert set(found) == names
    assert found["live"]["outcome"] == "finished"
    assert time.time() - 60 < found["delivered_until"] < time.time()
    assert (len(found["state"]["streams"]), found["state"]["stream_count"]) == (20, 25)
    assert "  ... and 5 more" in ask(shipper)
    assert "more" not in ask(shipper, "--all")
    asked = document(shipper, "--all", "--until", "2026-01-01")
    assert len(asked["state"]["streams"]) == 25
    assert (asked["until"], asked["is_delivered"]) == (datetime(2026, 1, 2, tzinfo=UTC).timestamp(), True)


# Watching ---------------------------------------------------------------------------------------------------------


def watching(shipper: Shipper, *arguments: str, count: int = 3) -> list[str]:
    """Watch until there are `count` lines, end with Ctrl-C, and return the lines."""
    command = [SHIPPER, "status", "--watch", "--interval", "0.2", *arguments, "--config", shipper.config]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=shipper.environment(), text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(count)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    return [line.rstrip("\n") for line in lines] + rest.splitlines()


def test_watch_prints_lines_without_a_terminal(tail: Tail, service: Service, shipper: Shipper):
    running = paused(tail, service, shipper)
    lines = watching(shipper, count=8)
    assert all("; what to do: " in line and "(forbidden): " in line for line in lines)
    assert len({line.split(" ")[0] for line in lines}) > 1, "each line has a time"
    found = [json.loads(line) for line in watching(shipper, "--json")]
    assert {each["process_id"] for each in found} == {running.pid}


def test_watch_redraws_in_place_on_a_terminal_and_restores_the_cursor(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    assert shipper.run("backfill", tail.file).returncode == 0
    text = drawn(shipper)
    assert text.count("no shipper is running") >= 3
    assert "\x1b[1A" in text, "it redraws in place"
    assert "\x1b[?1049h" not in text, "it uses no alternate screen"
    assert "\x1b[2J" not in text, "it clears nothing"
    assert "Traceback" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is restored"


def drawn(shipper: Shipper) -> str:
    """Watch in a narrow terminal until three redraws, end with Ctrl-C, and return all output."""
    command = [SHIPPER, "status", "--watch", "--interval", "0.1", "--config", shipper.config]
    environment = {**shipper.environment(), "TERM": "xterm-256color", "COLUMNS": "60", "LINES": "24"}
    with (
        Terminal() as terminal,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=terminal.descriptor, stderr=terminal.descriptor, env=environment
        ) as process,
    ):
        wait_until(lambda: terminal.shown.count(b"no shipper is running") >= 3, "three redraws", limit_s=20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    return terminal.shown.decode()
