"""Generations that match no pattern and were created and rotated away between two polls."""

from __future__ import annotations

import os

from tests.e2e.driver import Shipper
from tests.e2e.files import Tail, log_lines

NAME = "app.ndjson"


def test_files_other_than_generations_are_never_read_and_are_reported_unless_excluded_or_older(
    tail: Tail, shipper: Shipper
):
    tail.append(1000, 1010, f"{NAME}.7")  # before the name was followed
    os.utime(tail.folder / f"{NAME}.7", (1e9, 1e9))
    tail.append(0, 10)
    settings = {"input__rotate_wait_seconds": 0.2, "input__exclude": f'["{tail.folder}/*.tmp", "{tail.folder}/*-9"]'}
    tail.pass_by(NAME, 10, **settings)
    for number, name in enumerate(("bak", "tmp", "1.part", "old"), 101):
        tail.append(10 * number, 10 * number + 10, f"{NAME}.{name}")
    tail.append(1100, 1110, f"{NAME}-9")
    tail.append(1200, 1210, "other.ndjson.1")
    (tail.folder / f"{NAME}.empty").touch()
    running = tail.start(NAME, **settings)
    unread = {str(tail.folder / f"{NAME}.{name}") for name in ("bak", "1.part", "old")}
    running.wait_until(
        lambda: {line["path"] for line in log_lines(running, "source_beside_unread")} == unread,
        "the files are reported",
    )
    tail.append(10, 20)
    tail.wait(20)
    tail.stop(20)
    assert len(log_lines(running, "source_beside_unread")) == len(unread), "each is reported once"
    options = ("--set", f'input.include=["{tail.file}"]', "--set", f"input.exclude={settings['input__exclude']}")
    result = shipper.run("status", "--until", "now", *options)
    assert result.returncode == 0, result.stdout
    assert "3 files next to inputs match no pattern" in result.stdout
    assert {name for name in unread if name in result.stdout} == unread
    assert f"{NAME}.tmp" not in result.stdout


def test_a_deleted_file_counts_as_undelivered_until_a_command_has_searched_for_it(tail: Tail, shipper: Shipper):
    """By `run`, which searches the folder for its bytes, or by `backfill`, where no other file begins alike."""
    for number, name in enumerate(("a.ndjson", "b.ndjson", "c.ndjson")):
        tail.append(10 * number, 10 * number + 10, name)
    tail.pass_by("*.ndjson", 30)
    include = ("--set", f'input.include=["{tail.folder}/*.ndjson"]')
    (tail.folder / "a.ndjson").unlink()
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.start("*.ndjson", input__rotate_wait_seconds=0.2)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "the search is complete"
    )
    tail.stop(30)
    (tail.folder / "b.ndjson").rename(shipper.folder / "away")
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    assert shipper.backfill(tail.folder / "c.ndjson").counts() == (0, 0, 0, 0, 0)
    assert shipper.run("status", "--until", "now", *include).returncode == 0


def test_relative_patterns_mean_the_same_in_every_working_directory(tail: Tail, shipper: Shipper):
    """An unread file counts as undelivered, whether or not it is known."""
    settings = {"input.include": '["logs/*.ndjson"]'}
    tail.append(0, 10)
    running = shipper.start("run", settings={**settings, "batch.linger_seconds": 0.02})
    running.wait_until(lambda: tail._service.stored == 10, "it is delivered")
    assert running.stop().returncode == 0
    elsewhere = shipper.folder / "elsewhere"
    elsewhere.mkdir()

    def asked_elsewhere() -> int:
        shipper.folder, home = elsewhere, shipper.folder
        try:
            return shipper.run("status", "--until", "now", settings=settings).returncode
        finally:
            shipper.folder = home

    assert asked_elsewhere() == 0
    tail.append(10, 20)
    assert asked_elsewhere() == 4
    running = shipper.start("run", settings={**settings, "batch.linger_seconds": 0.02})
    running.wait_until(lambda: tail._service.stored == 20, "it is delivered")
    assert running.stop().returncode == 0
    assert asked_elsewhere() == 0
    tail.append(20, 30, "new.ndjson")
    assert asked_elsewhere() == 4
