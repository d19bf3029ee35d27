"""The other commands, as used by newcomers and scripts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from shipper.cli.app import command_line
from shipper.cli.common import tolerate_closed_stdout
from shipper.model.errors import ShipperError
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, SHIPPER, Service, Shipper, changed
from tests.e2e.fake_service import FakeService, events_of
from tests.e2e.files import Tail, append
from tests.e2e.surroundings import small_disk, unread_bytes
from tests.e2e.test_reconcile import with_report


def test_demo_needs_no_settings_and_leaves_no_files(shipper: Shipper, tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    result = shipper.run("demo", "--events", "2000", configured=False, env={"TMPDIR": str(temporary)}, check=False)
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    assert "2,000 read = 2,000 accepted + 0 dead letters + 0 duplicates + 0 pending" in text
    assert "The same file again: 0 read" in text
    assert "generates from them: 2,000 registrations" in text
    assert list(temporary.iterdir()) == []
    assert not shipper.state.exists()


def test_demo_names_a_full_folder_for_temporary_files(shipper: Shipper, tmp_path: Path):
    with small_disk(tmp_path / "disk", 1 << 17) as disk:
        full = shipper.run("demo", configured=False, env={"TMPDIR": str(disk.path)}, check=False)
        assert (full.returncode, list(disk.path.iterdir())) == (1, [])
    assert re.search(rf"{disk.path}/.* \(.*No space left on device.* TMPDIR", full.stderr)


def test_a_full_disk_leaves_no_empty_files_behind(shipper: Shipper, tmp_path: Path):
    with small_disk(tmp_path / "disk", 1 << 17) as disk:
        disk.fill()
        before = list(disk.path.iterdir())
        for words in (["config", "init", "-o"], ["sandbox", "--port", "0", "--store"]):
            refused = shipper.run(*words, str(disk.path / "new"), configured=False, check=False)
            assert (refused.returncode, list(disk.path.iterdir())) == (2, before), words


def test_a_slow_reader_gets_all_output_despite_an_interrupted_write(shipper: Shipper):
    arguments = ["config", "schema"]
    whole = shipper.run(*arguments, configured=False).stdout.encode()
    environment = shipper.environment() | {"PYTHONUNBUFFERED": "1"}
    read_end, write_end = os.pipe()
    room = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    with (
        subprocess.Popen([SHIPPER, *arguments], stdout=write_end, env=environment) as process,
        open(read_end, "rb") as output,
    ):
        os.close(write_end)
        while unread_bytes(read_end) < room:
            assert process.poll() is None
            time.sleep(0.01)
        # Interrupt the blocked write.
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        process.send_signal(signal.SIGCONT)
        seen = output.read()
    assert process.returncode == 0
    assert seen == whole
    assert len(whole) > room


@pytest.mark.parametrize("command", ["sample --count 1000", "report 1001 {0} {0} --format json", "check"])
def test_a_reader_that_closes_the_pipe_early_is_no_error(shipper: Shipper, service: Service, command: str):
    report = {f"SHIPPER__REPORT__{name.upper()}": value for name, value in service.target._asdict().items()}
    done = shipper.shell(f"set -o pipefail; shipper {command.format('2026-01-01')} | head -c 5", **report)
    words = [text for text in done.stderr.decode().splitlines() if "literal_secret" not in text]
    assert (done.returncode, words, len(done.stdout)) == (0, [], 5)


@pytest.mark.parametrize("command", ["config schema", "config init -"])
def test_a_reader_that_closes_the_pipe_before_the_first_byte_is_not_an_error(command: str):
    theirs, ours = os.pipe()
    os.close(theirs)
    done = subprocess.run([SHIPPER, *command.split()], stdout=ours, stderr=subprocess.PIPE, timeout=20)
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")


def test_work_is_completed_though_the_reader_of_the_summary_has_gone(
    shipper: Shipper, service: Service, sample: Sample
):
    shipper.write("events.ndjson", *sample.lines[:100])
    done = shipper.shell("shipper backfill events.ndjson --summary json | true; echo ${PIPESTATUS[0]}")
    assert done.stdout.strip() == b"0"
    assert b"Traceback" not in done.stderr
    service.assert_holds_exactly(sample.ids[:100])
    assert shipper.read_state().accepted == 100


def test_report_shows_what_was_shipped(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.write("events.ndjson", *sample.lines[:500])
    assert shipper.run("backfill", file).returncode == 0
    with_report(shipper, service)
    today = datetime.now(UTC).date()
    period = [str(today - timedelta(days=31)), str(today)]

    period += ["--split", "none"]
    table = shipper.run("report", "1001", *period)
    assert table.returncode == 0
    assert "Sandbox Affiliate" in table.stdout
    # The column after the clicks in the first table, which has a row per brand.
    totals = re.findall(r"total +0 +([0-9,]+) ", table.stdout)[:3]
    assert sum(int(total.replace(",", "")) for total in totals) == 500

    exact = shipper.run("report", "1001", *period, "--format", "json")
    assert exact.returncode == 0
    document = json.loads(exact.stdout)
    assert document["source"]["affilaiteAccountId"] == 1001
    registered = sum(
        source["conversions"]["registrations"]["result"]
        for brand in document["brands"]
        for source in brand["marketingSources"]
    )
    assert registered == 500

    refused = shipper.run("report", "1001", *reversed(period[:2]))
    refused.assert_ended(2, "is after END")


def test_the_json_summary_is_the_last_line_of_stdout_and_the_text_summary_goes_to_stderr(
    shipper: Shipper, sample: Sample
):
    file = shipper.write("events.ndjson", *sample.lines[:10])
    text = shipper.run("backfill", file)
    assert (text.returncode, text.stdout) == (0, "")
    assert "10 accepted" in text.stderr
    form = shipper.run("backfill", file, "--summary", "json")
    assert form.stdout.endswith("}\n")
    names = ["read", "accepted", "dead_lettered", "duplicates", "pending", "batches", "requests", "retries", "seconds"]
    assert set(names) <= set(form.summary)


@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_other_libraries_can_share_the_standard_streams(shipper: Shipper, is_unbuffered: bool):
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stderr);"
        "from shipper.cli import prepare_process; prepare_process();"
        "logging.error('from another library'); print('a part', end=''); print('still there', file=sys.__stderr__)"
    )
    environment = shipper.environment() | ({"PYTHONUNBUFFERED": "1"} if is_unbuffered else {})
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "a part")
    assert ended.stderr == "ERROR:root:from another library\nstill there\n"


def test_logs_do_not_load_rich_but_reports_can():
    code = (
        "import sys; from shipper.cli import prepare_process; prepare_process();"
        "import structlog; print(structlog.get_logger is not None, 'rich' in sys.modules); import rich; print(rich)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr == ""
    assert ended.stdout.startswith("True False\n<module 'rich'")


def test_logging_resumes_once_a_full_pipe_is_read_again():
    code = (
        "import os, sys; from shipper.system.stderr import ForgivingStderr; err = ForgivingStderr();"
        "os.set_blocking(2, False); [print('x' * 99, file=err, flush=True) for _ in range(2000)];"
        "print(flush=True); input(); print('read again', file=err, flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.readline()
        room = unread_bytes(process.stderr)
        assert 0 < room < 200_000, "the pipe was not full"
        os.read(process.stderr.fileno(), room)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stderr.read().endswith(b"read again\n")
    assert process.returncode == 0


# Arguments and options --------------------------------------------------------------------------------------------


def test_help_lists_the_commands_in_groups_with_complete_sentences(shipper: Shipper):
    shown = shipper.run("--help", configured=False).stdout
    titles = [line.rstrip(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options", "Ship", "Inspect", "Finance", "Set up", "Try out"]
    assert shown.count("...") == 1, "of the usage"
    assert max(map(len, shown.splitlines())) <= 80
    for words in (["help", "dead-letters", "replay"], ["dead-letters", "replay", "-h"]):
        text = shipper.run(*words, configured=False).stdout
        assert text.startswith("Usage: shipper dead-letters replay [OPTIONS]\n")
        assert all(option in text for option in ("--config", "--set", "--log-level", "--log-format"))


def test_run_accepts_a_pattern_as_argument_and_a_bare_word_as_a_list(tail: Tail, shipper: Shipper, fake: FakeService):
    ways = [([tail.folder / "*.ndjson"], {}), ([], {"input.include": f"{tail.folder}/*"})]
    for count, (arguments, settings) in enumerate(ways):
        tail.append(20 * count, 20 * count + 20)
        running = shipper.start("run", *arguments, settings={**QUICK, **settings})
        running.wait_until(lambda count=count: len(fake.stored) > count, "the records are sent")
        running.stop()
    assert shipper.read_state().accepted == 40


def test_a_dry_run_of_backfill_sends_and_saves_nothing(shipper: Shipper, fake: FakeService, sample: Sample):
    file = shipper.write("a.ndjson", *sample.lines[:10])
    rehearsed = shipper.run("backfill", file, "--dry-run", check=False)
    assert (rehearsed.returncode, "10 records: 10 good" in rehearsed.stdout) == (0, True), rehearsed
    assert not shipper.state.exists()
    assert shipper.backfill(file).counts() == (10, 10, 0, 0, 0)
    before = len(fake.bodies)
    append(file, sample.lines[10] + b"{}\n")
    state = (shipper.state / "state.db").read_bytes()
    rehearsed = shipper.run("backfill", file, "--dry-run", check=False)
    assert f"{file}: from byte {len(b''.join(sample.lines[:10])):,} of" in rehearsed.stdout
    assert (rehearsed.returncode, "2 records: 1 good, 1 break a rule" in rehearsed.stdout) == (3, True), rehearsed
    assert f"{file}:12: " in rehearsed.stdout
    assert (shipper.state / "state.db").read_bytes() == state
    assert len(fake.bodies) == before


def test_files_modified_outside_the_period_are_skipped(shipper: Shipper, fake: FakeService, sample: Sample):
    for number, day in enumerate(("2026-09-30", "2026-10-01", "2026-10-31", "2026-11-01")):
        file = shipper.write(f"{number}.ndjson", sample.lines[number])
        changed_at = datetime.fromisoformat(f"{day}T12:00:00+00:00").timestamp()
        os.utime(file, (changed_at, changed_at))
    result = shipper.backfill(shipper.folder / "*.ndjson", "--since", "2026-10-01", "--until", "2026-10-31")
    assert result.counts() == (2, 2, 0, 0, 0)
    assert "2 files left out: not changed since 2026-10-01 until 2026-10-31" in result.stderr
    assert [event["EventId"] for body in fake.stored for event in events_of(body)] == sample.ids[1:3]


def test_a_period_without_a_moment_in_it_is_refused(shipper: Shipper, sample: Sample):
    shipper.write("a.ndjson", sample.lines[0])
    for until in ("2026-10-01", "2026-10-02T00:00Z"):
        for path in (shipper.folder / "a.ndjson", "kafka://acquisitions"):
            settings = (
                {}
                if path != "kafka://acquisitions"
                else {"input.kafka.brokers": "127.0.0.1:1", "input.kafka.topics": "a", "input.kafka.group_id": "g"}
            )
            result = shipper.run(
                "backfill", path, "--since", "2026-10-02", "--until", until, check=False, settings=settings
            )
            assert (result.returncode, "is not before" in result.stderr) == (2, True), result


def test_the_base_url_may_contain_a_path(shipper: Shipper, fake: FakeService, sample: Sample):
    file = shipper.write("a.ndjson", sample.lines[0])
    result = shipper.backfill(file, settings={"intake.base_url": f"{shipper.target.base_url}/gateway-ä/eu/"})
    assert result.counts() == (1, 1, 0, 0, 0)
    assert fake.paths == ["/gateway-%C3%A4/eu/dim/v1/player/activities"]


def test_a_variable_with_too_few_underscores_is_reported(shipper: Shipper):
    variable = {"SHIPPER_BATCH_MAX_EVENTS": "7"}
    for result in (shipper.run("check", env=variable).stdout, shipper.run("pipe", data=b"", env=variable).stderr):
        assert "SHIPPER_BATCH_MAX_EVENTS" in result
        assert "did you mean SHIPPER__BATCH__MAX_EVENTS?" in result


def test_all_commands_share_the_options_format_and_output_and_older_spellings_still_work(
    shipper: Shipper, sample: Sample
):
    file = shipper.write("a.ndjson", b"".join(sample.lines[:3]) + changed(sample.lines[3], IP="none") + b"{}\n")
    for spelling in ("--format", "--summary"):
        printed = json.loads(shipper.run("backfill", file, spelling, "json", check=False).stdout)
        assert printed["dead_lettered"] == (2 if spelling == "--format" else 0), printed
    for command in ("status", "check"):
        new, old = (
            json.loads(shipper.run(command, *options, check=False).stdout)
            for options in (["--format", "json"], ["--json"])
        )
        assert new.keys() == old.keys(), command
        refused = shipper.run(command, "--format", "csv", check=False)
        assert (refused.returncode, "'--format'" in refused.stderr, "--json" in refused.stderr) == (2, True, False)

    letters = shipper.run("dead-letters", "export").stdout
    shipper.run("dead-letters", "export", "-o", "letters.ndjson")
    assert (shipper.folder / "letters.ndjson").read_text() == letters != ""
    assert (shipper.folder / "letters.ndjson").stat().st_mode & 0o777 == 0o600
    for words in (["config", "schema"], ["config", "show"], ["sample", "-n", "3"], ["config", "init"]):
        shipper.run(*words, "--output", "written", configured=words[1] == "show")
        to_stdout = ["-o", "-"] if words[1] == "init" else []
        printed = shipper.run(*words, *to_stdout, configured=words[1] == "show").stdout
        assert (shipper.folder / "written").read_text() == printed != "", words
        (shipper.folder / "written").unlink()
    assert shipper.run("config", "init", "-", configured=False).stdout == printed
    refused = shipper.run("sample", "-o", "absent/file", configured=False, check=False)
    assert (refused.returncode, "there is no directory" in refused.stderr) == (2, True)
    full = shipper.run("sample", "-o", "/dev/full", configured=False, check=False)
    assert (full.returncode, full.stderr) == (1, "shipper: cannot write '/dev/full': No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["status", "--until", ""], ["dead-letters", "purge", "--reason", "", "--yes"]),
        *(["dead-letters", "export", "--path", ""], ["dead-letters", "list", "--since", ""]),
        ["dead-letters", "purge", "--consumer-id", "", "--yes"],
    ],
)
def test_an_empty_value_as_of_an_unset_variable_selects_nothing(shipper: Shipper, arguments: list[str]):
    assert shipper.run(*arguments, check=False).returncode == 2


def test_a_name_that_the_encoding_lacks_is_escaped(shipper: Shipper, sample: Sample):
    name = "\N{GREEK SMALL LETTER PI}\N{FAMILY}\u00e9.ndjson"
    shipper.write(name, *sample.lines[:10], b"{}\n")
    shipper.run("backfill", name, check=False)
    for command in (["status"], ["dead-letters", "list"], ["dead-letters", "show", "1"], ["status", "--json"]):
        shown = shipper.run(*command, prefix=["env", "PYTHONIOENCODING=ascii"], check=False)
        assert shown.returncode == 0, shown.stderr
        assert json.dumps(name)[1:-1] in shown.stdout
    assert json.loads(shown.stdout)["state"]["streams"][0]["path"] == str(shipper.folder / name)
    undecoded = shipper.run("check", "--json", "--set", f"state.directory={shipper.folder}/\udcff")
    assert f"{shipper.folder}/\\xff" in {i["what"].split(" does")[0] for i in json.loads(undecoded.stdout)["items"]}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["status"], ["sample"], ["backfill", "a.ndjson", "--format", "json"]]
)
def test_a_standard_output_that_cannot_be_written_is_an_error(shipper: Shipper, sample: Sample, arguments: list[str]):
    shipper.write("a.ndjson", *sample.lines[:10])
    result = shipper.run(
        *arguments,
        configured=arguments[0] not in {"--help", "--version", "sample"},
        prefix=["sh", "-c", 'exec "$0" "$@" > /dev/full'],
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.endswith("shipper: cannot write to standard output: No space left on device\n")


def test_an_output_longer_than_a_buffer_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(ShipperError, match="cannot write to standard output"), tolerate_closed_stdout():
            print("x" * 100_000, flush=True)


def test_an_error_about_a_misspelt_name_suggests_the_nearest(shipper: Shipper, sample: Sample):
    file = shipper.write("a.ndjson", *(changed(line, IP="none") for line in sample.lines[:2]))
    assert shipper.backfill(file).counts() == (2, 0, 2, 0, 0)
    (first, last) = (letter.id for letter in shipper.read_state().dead_letters)
    for words, nearest in (
        (["backfil"], "Did you mean 'backfill'?"),
        (["dead-letters", "lst"], "Did you mean 'list'?"),
        (["status", "--formt", "json"], "No such option: --formt. Did you mean --format?"),
        (["dead-letters", "show", str(last + 7)], f"no dead letter {last + 7}; nearest: {last}; all: shipper dead-"),
        (["dead-letters", "purge", "--yes", "0"], f"no dead letter 0; nearest: {first}; all: "),
    ):
        refused = shipper.run(*words, check=False)
        assert (refused.returncode, nearest in refused.stderr) == (2, True), (words, refused.stderr)
    listed = shipper.run("dead-letters", "list", "--reason", "ipp")
    assert listed.stdout == "no dead letters match; did you mean --reason ip?\n"
    shipper.run("dead-letters", "purge", "--yes", str(first))
    assert "\n1 dead letter: ip 1\n" in shipper.run("dead-letters", "list", "-n", "5").stdout
    rehearsed = shipper.run("dead-letters", "replay", "-n", "1", "--dry-run", "--set", "records.relax=ip", check=False)
    assert rehearsed.stdout == "1 dead letter would be sent, 0 would fail again\n"


def _commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, *words, name)


def test_help_of_every_command_has_an_example_and_fits_into_80_columns_without_truncation(shipper: Shipper):
    for words in _commands(typer.main.get_command(command_line())):
        result = shipper.run(*words, "--help", configured=False, env={"COLUMNS": "80"})
        shown = result.stdout
        assert (result.returncode, result.stderr) == (0, ""), words
        assert "Usage: shipper" in shown
        assert "Example: " in shown or "Commands:" in shown or not words, (words, shown)
        assert max(map(len, shown.splitlines())) <= 80, (words, shown)
        assert not re.search(r"[a-z ]\.\.\.\s", shown.partition("\n")[2]), (words, shown)
        assert not re.search(r"<\w[\w ]*>|--json|--summary|--write-config|\d{9}", shown), (words, shown)
        assert not re.search(r"\w-$|[{}]", shown, re.MULTILINE), (words, shown)
