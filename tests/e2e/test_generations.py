"""Generations that no pattern names and nobody saw by their name: begun and rotated away between two looks."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.driver import Service, Shipper
from tests.e2e.files import Tail, compress, copytruncate, told

NAME = "app.ndjson"


def numbered(path: Path, generation: int) -> None:
    """`rotate`: each is renamed to the next number."""
    for number in range(generation, 0, -1):
        old = path.with_name(f"{path.name}.{number}")
        if old.exists():
            old.rename(path.with_name(f"{path.name}.{number + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))


def dated(path: Path, generation: int) -> None:
    """`dateext`"""
    path.rename(path.with_name(f"{path.name}-2026110{generation}"))


def compressed(path: Path, generation: int) -> None:
    numbered(path, generation)
    compress(path.with_name(f"{path.name}.1"), "gz", path.with_name(f"{path.name}.{generation}0.gz"))


def copied(path: Path, generation: int) -> None:
    copytruncate(path, path.with_name(f"{path.name}-2026110{generation}"))


ROTATIONS = [numbered, dated, compressed, copied]


@pytest.mark.parametrize(
    ("rotate", "when"), [*((rotate, "stopped") for rotate in ROTATIONS), (numbered, "held"), (copied, "held")]
)
def test_what_is_begun_and_rotated_away_unseen_is_read_once(tail: Tail, rotate: Callable[[Path, int], None], when: str):
    """Several generations come and go between two looks, of which each has records of its own; and what comes later."""
    tail.append(0, 10)
    tail.start(NAME, input__rotate_wait_seconds=0.5)
    tail.wait(10)

    def rotate_several_times() -> None:
        for generation in range(1, 5):
            tail.append(10 * generation, 10 * generation + 10)
            rotate(tail.file, generation)
        tail.append(50, 60)

    if when == "stopped":
        tail.stop(10)
        rotate_several_times()
        tail.start(NAME, input__rotate_wait_seconds=0.5)
    else:
        with tail.held():
            rotate_several_times()
    tail.wait(60)
    tail.append(60, 70)
    tail.wait(70)
    tail.stop(70)
    tail.append(70, 80)
    tail.pass_by(NAME, 80)


def test_the_names_are_found_beside_what_a_glob_names_also_where_nothing_has_the_name_now(tail: Tail):
    """The application has not begun its next file."""
    (tail.folder / "a").mkdir()
    live = tail.append(0, 10, "a/acquisitions-1.ndjson")
    tail.pass_by("*/acquisitions*.ndjson", 10)
    tail.append(10, 20, live)
    live.rename(f"{live}.2")
    tail.append(20, 30, live)
    live.rename(f"{live}.1")
    tail.pass_by("*/acquisitions*.ndjson", 30)


def test_what_is_no_generation_is_named_and_never_read_and_what_is_excluded_or_was_there_before_is_not_even_named(
    tail: Tail, shipper: Shipper
):
    tail.append(1000, 1010, f"{NAME}.7")  # before anybody followed the name
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
        lambda: {line["path"] for line in told(running, "source_beside_unread")} == unread, "they are named"
    )
    tail.append(10, 20)
    tail.wait(20)
    tail.stop(20)
    assert len(told(running, "source_beside_unread")) == len(unread), "each once"
    options = ("--set", f'input.include=["{tail.file}"]', "--set", f"input.exclude={settings['input__exclude']}")
    result = shipper.run("status", "--until", "now", *options)
    assert result.returncode == 0, result.stdout
    assert "3 files next to inputs match no pattern" in result.stdout
    assert {name for name in unread if name in result.stdout} == unread
    assert f"{NAME}.tmp" not in result.stdout


def test_a_copy_that_stays_beside_its_original_is_not_read_beside_it(tail: Tail, shipper: Shipper):
    """logrotate's `copy`: plain and compressed; when the original is truncated after all, its rest is read there."""
    tail.append(0, 300)
    running = tail.start(NAME, input__rotate_wait_seconds=0.2)
    tail.wait(300)
    copy = Path(shutil.copy(tail.file, tail.folder / f"{NAME}.1"))
    running.wait_until(lambda: told(running, "source_is_copy", copy), "it is known as a copy")
    archive = compress(Path(shutil.copy(tail.file, tail.folder / "to-be")), "gz", tail.folder / f"{NAME}.2.gz")
    running.wait_until(lambda: told(running, "source_is_copy", archive), "the archive, too")
    tail.append(300, 310)
    tail.wait(310)
    tail.stop(310)
    assert shipper.run("status", "--until", "now", "--set", f'input.include=["{tail.file}"]').returncode == 0
    tail.append(310, 320)
    tail.pass_by(NAME, 320)


def test_a_generation_that_was_read_half_goes_on_after_a_restart(tail: Tail, service: Service):
    tail.append(0, 10)
    tail.pass_by(NAME, 10)
    tail.append(10, 20)
    dated(tail.file, 1)
    tail.append(20, 30)
    dated(tail.file, 2)
    tail.append(30, 40)
    settings = {"batch__max_events": 1, "delivery__concurrency": 1}
    service.set_faults({"effect": "status", "status": 503, "requests": "6-"})
    running = tail.start(NAME, **settings)
    running.wait_until(lambda: service.stored == 15, "some of it")
    running.kill()
    service.set_faults()
    running = tail.start(NAME, **settings)
    tail.wait(40)
    assert running.stop().returncode == 0


# What is said of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_nobody_says_that_what_was_rotated_unseen_is_delivered(
    tail: Tail, shipper: Shipper, rotate: Callable[[Path, int], None]
):
    include = ("--set", f'input.include=["{tail.file}"]')
    tail.append(0, 10)
    tail.pass_by(NAME, 10)
    assert shipper.run("status", "--until", "now", *include).returncode == 0
    tail.append(10, 20)
    rotate(tail.file, 1)
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.append(20, 30)
    rotate(tail.file, 2)
    tail.file.touch()
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.start(NAME, input__rotate_wait_seconds=0.2)
    tail.wait(30)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "and then somebody says so"
    )
    tail.stop(30)
    assert shipper.run("status", "--until", "now", *include).returncode == 0


def test_a_file_that_was_compressed_while_nothing_ran_stands_in_the_way_until_it_was_looked_at(
    tail: Tail, shipper: Shipper
):
    include = ("--set", f'input.include=["{tail.folder}/*.ndjson"]')
    tail.append(0, 10)
    tail.pass_by("*.ndjson", 10)
    tail.append(10, 20)
    compress(tail.file, "gz", tail.folder / "2026-11-01.gz")
    result = shipper.run("status", "--until", "now", *include)
    assert (result.returncode, NAME in result.stdout) == (4, True), result.stdout
    tail.start("*.ndjson", input__rotate_wait_seconds=0.2)
    tail.wait(20)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "it was looked at"
    )
    tail.stop(20)


def forget_the_ends(shipper: Shipper) -> None:
    """What is left by a process that ended after the last record was settled, and before it looked for more."""
    with sqlite3.connect(shipper.state / "state.db") as db:
        db.execute("UPDATE streams SET ended_size = -1, ended_ns = -1, settled_until = NULL")
        db.execute("UPDATE streams SET size = 0 WHERE compression != ''")


def test_an_archive_that_was_settled_but_not_seen_to_end_is_delivered_once_it_was_looked_at(
    tail: Tail, shipper: Shipper
):
    include = ("--set", f'input.include=["{tail.file}"]')
    tail.append(0, 10)
    tail.pass_by(NAME, 10)
    for generation in (1, 2):
        tail.append(10 * generation, 10 * generation + 10)
        compressed(tail.file, generation)
    tail.pass_by(NAME, 30)
    forget_the_ends(shipper)
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.start(NAME)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "they were looked at"
    )
    tail.stop(30)


def test_a_rotated_file_that_was_settled_but_not_seen_to_end_is_put_away_after_a_restart(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    tail.start(NAME, input__on_complete="delete")
    tail.wait(10)
    old = tail.file.rename(tail.folder / f"{NAME}.1")
    tail.append(10, 20)
    tail.wait(20)
    tail.stop(20)
    forget_the_ends(shipper)
    tail.start(NAME, input__on_complete="delete", input__rotate_wait_seconds=0.2)
    tail.running.wait_until(lambda: not old.exists(), "it is deleted")
    tail.stop(20)
    assert tail.file.exists()


def test_a_file_that_is_gone_stands_in_the_way_until_somebody_has_looked_for_it(tail: Tail, shipper: Shipper):
    """By `run`, which looks for its bytes in the folder, or by `backfill`, where no other name begins so."""
    for number, name in enumerate(("a.ndjson", "b.ndjson", "c.ndjson")):
        tail.append(10 * number, 10 * number + 10, name)
    tail.pass_by("*.ndjson", 30)
    include = ("--set", f'input.include=["{tail.folder}/*.ndjson"]')
    (tail.folder / "a.ndjson").unlink()
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.start("*.ndjson", input__rotate_wait_seconds=0.2)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "it was looked for"
    )
    tail.stop(30)
    (tail.folder / "b.ndjson").rename(shipper.folder / "away")
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    assert shipper.backfill(tail.folder / "c.ndjson").counts() == (0, 0, 0, 0, 0)
    assert shipper.run("status", "--until", "now", *include).returncode == 0


def test_relative_patterns_mean_the_same_wherever_it_is_asked(tail: Tail, shipper: Shipper):
    """A file that is not read yet stands in the way, known to it or not."""
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
