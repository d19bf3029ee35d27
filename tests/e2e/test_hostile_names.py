"""Hostile file names that look like log lines, options or patterns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.files import Tail, compress, copytruncate

FORGED = 'x.ndjson\n{"event":"delivery_paused","level":"error","reason":"forged"}'
NAMES = [
    FORGED,
    "clear\x1b[2J\x1b]0;title\x07.ndjson",
    "turned\u202e\u2066.ndjson",
    "carriage\rreturn.ndjson",
    "next\x85line\u2028.ndjson",
    "[red]markup[bold].ndjson",
    os.fsdecode(b"bytes\xff\xfe.ndjson"),
    "--set intake.base_url=http:x",
    "%s{0}$HOME`id`.ndjson",
    os.fsdecode(b"caf\xe9.ndjson"),
    "naïve →.ndjson",
    "-c.ndjson",
]
COMMANDS = ("\x1b", "\x07", "\r", "\x85", "\u2028", "\u202e", "\u2066")  # interpreted by a terminal


@pytest.fixture
def folder(shipper: Shipper, sample: Sample) -> Path:
    """Files with odd names, each with three good records and a refused one."""
    folder = shipper.folder / "logs"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        (folder / name).write_bytes(b"{}\n" + b"".join(sample.lines[index * 3 : index * 3 + 3]))
    return folder


def _check_text(text: str) -> None:
    """Assert that a text contains no control characters and no line forged by a name."""
    for command in COMMANDS:
        assert command not in text, repr(text)
    assert not any(line.startswith(('{"event":"delivery_paused"', 'ndjson"')) for line in text.split("\n")), text


def test_no_file_name_can_forge_a_log_line_or_move_the_cursor(
    shipper: Shipper, service: Service, sample: Sample, folder: Path
):
    """For files in a folder, for named files, and for the commands that show them."""
    count = len(NAMES)
    debug = ("--log-level", "debug", "--log-format")
    result = shipper.backfill(folder, *debug, "json")
    assert (result.returncode, result.counts()[:3]) == (3, (4 * count, 3 * count, count))
    _check_text(result.stderr)
    events = [json.loads(line)["event"] for line in result.stderr.splitlines() if line.startswith("{")]
    assert "delivery_paused" not in events

    for index, name in enumerate(NAMES, 3 * count):
        with (folder / name).open("ab") as out:
            out.write(b"{}\n" + sample.lines[index])
    result = shipper.backfill(*(folder / name for name in NAMES), *debug, "console")
    assert (result.returncode, result.counts()[:3]) == (3, (2 * count, count, count))
    _check_text(result.stderr)
    service.assert_holds_exactly(sample.ids[: 4 * count])

    for command in (["status", "--all"], ["dead-letters", "list"], ["dead-letters", "show", "1"], ["validate", "logs"]):
        result = shipper.run(*command)
        assert result.returncode in {0, 3}, result.stderr
        assert "ndjson" in result.stdout, command
        _check_text(result.stdout + result.stderr)


def test_a_pattern_may_follow_cycles_and_match_a_file_twice(shipper: Shipper, service: Service, sample: Sample):
    """Each file is read once, whatever path leads to it."""
    folder = shipper.folder / "logs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.ndjson").write_bytes(b"".join(sample.lines[:10]))
    (folder / "deep" / "b.ndjson").write_bytes(b"".join(sample.lines[10:20]))
    (folder / "deep" / "up").symlink_to("..")
    (folder / "deep" / "itself").symlink_to("itself")
    os.link(folder / "a.ndjson", folder / "deep" / "linked.ndjson")
    (folder / "soft.ndjson").symlink_to("deep/../a.ndjson")
    patterns = ["logs/**", "logs/deep/../*.ndjson", "logs/deep/up/deep/up/*.ndjson", "./logs/a.ndjson", folder]
    result = shipper.backfill(*patterns)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:20])


def test_folders_reachable_by_many_links_are_entered_once(shipper: Shipper, service: Service, sample: Sample):
    """Two links to parents in one folder create two to the power of forty paths of forty links."""
    folder = shipper.folder / "logs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.ndjson").write_bytes(b"".join(sample.lines[:10]))
    (folder / "deep" / "b.ndjson").write_bytes(b"".join(sample.lines[10:20]))
    for number in range(3):
        (folder / f"around{number}").symlink_to(".")
        (folder / "deep" / f"up{number}").symlink_to("..")
    settings = {"input.exclude": '["logs/**/*.gz"]'}
    result = shipper.backfill("logs/**", folder, "logs/**/*.ndjson", limit_s=60, settings=settings)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:20])
    paths = {path for _, _, path, _ in shipper.read_state().checkpoints}
    assert paths == {str(folder / "a.ndjson"), str(folder / "deep" / "b.ndjson")}, "found by the paths without links"


def test_a_name_that_looks_like_an_option_is_a_file_after_two_dashes(
    shipper: Shipper, service: Service, sample: Sample
):
    for number, name in enumerate(("--config", "-", "--set=batch.max_events=0")):
        (shipper.folder / name).write_bytes(sample.lines[number])
    arguments = ["--summary", "json", "--config", shipper.config, "--", "--config", "--set=batch.max_events=0", "./-"]
    result = shipper.run(
        "backfill", *arguments, configured=False, env={"SHIPPER__INTAKE__BASE_URL": service.target.base_url}
    )
    assert (result.returncode, result.counts()) == (0, (3, 3, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:3])


def test_a_file_with_a_name_that_is_not_utf_8_is_followed_rotated_moved_and_reported(
    shipper: Shipper, service: Service, sample: Sample
):
    """In a folder with such a name; renamed while the shipper is stopped."""
    tail = Tail(shipper, service, sample)
    folder = tail.folder / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    tail.file = folder / os.fsdecode(b"app\xff.ndjson")
    tail.append(0, 10, tail.file)
    include = "caf*/app*.ndjson"
    tail.pass_by(include, 10)
    tail.append(10, 20, tail.file)
    rotated = tail.file.rename(folder / os.fsdecode(b"app\xff.ndjson.1"))
    tail.append(20, 30, tail.file)
    assert shipper.run("status", "--until", "now").returncode == 4
    os.mkfifo(folder / os.fsdecode(b"app\xff.fifo"))
    tail.start([include, "caf*/*.fifo"], input__on_complete="delete", input__rotate_wait_seconds=0)
    tail.wait(30)
    tail.running.wait_until(lambda: not rotated.exists(), "it is moved")
    tail.running.wait_for("is not a regular file")
    result = tail.stop(30)
    assert "app\\\\xff.ndjson" in result.stderr
    for line in result.stderr.splitlines():
        json.loads(line)
    state = json.loads(shipper.run("status", "--json", "--all").stdout)
    name = str(shipper.folder / "logs/caf\\xe9/app\\xff.ndjson")
    assert sorted(each["path"] for each in state["state"]["streams"]) == [name, f"{name}.1"]


def test_reading_resumes_in_the_copy_and_the_archive_of_a_file_with_a_name_that_is_not_utf_8(
    shipper: Shipper, service: Service, sample: Sample
):
    tail = Tail(shipper, service, sample)
    tail.file = tail.folder / os.fsdecode(b"app\xff.log")
    tail.append(0, 10, tail.file)
    for number, suffix in enumerate(("1", "2.gz"), 1):
        tail.pass_by("app*.log", 20 * number - 10)
        tail.append(20 * number - 10, 20 * number, tail.file)
        copy = tail.folder / os.fsdecode(b"app\xff.log." + suffix.encode())
        copytruncate(tail.file, copy, sample.lines[20 * number : 20 * number + 10])
        if suffix.endswith(".gz"):
            compress(copy.rename(copy.with_suffix("")), "gz")
    tail.pass_by("app*.log", 50)
