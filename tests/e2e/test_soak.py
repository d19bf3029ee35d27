"""The soak for some seconds; and that it detects growth."""

from __future__ import annotations

import csv
import subprocess
import sys
from math import sin
from pathlib import Path
from random import Random
from subprocess import PIPE

import pytest

from tests.soak import life, writing
from tests.soak.flatness import CURVES, Curve, Look, judge, judge_all, table
from tests.soak.life import Plan, look_at_process, soak, write_csv
from tests.soak.service import Arrived, Trouble
from tests.soak.writing import BLOCK_LINES, SPOILED_EVERY, Blocks

MINUTES = 30
SECONDS = MINUTES * 60
MEMORY = CURVES[0]

LEAKING = """
import sys
kept = []
for line in sys.stdin:
    match sys.argv[1]:
        case "memory": kept.append(b"x" * (1 << 20))
        case "files": kept.append(open("/dev/null"))
    print("done", flush=True)
"""
LOOKS = 80


def curve(rng: Random, *, grows: float = 0.0, jump: float = 0.0, swings: float = 0.0, rests: float = 0.0):
    """Return a curve around 150 MiB for half an hour; `grows` is in MiB per hour, `rests` the level after warm-up."""
    for second in range(SECONDS):
        value = 150 + grows * second / 3600 + jump * (second > SECONDS * 0.6) + swings * sin(second / 7)
        yield float(second), value + rests * min(1.0, second / SECONDS * 4) + rng.gauss(0, 2)


@pytest.mark.parametrize(
    ("shape", "is_found"),
    [
        ({}, False),
        ({"swings": 30.0}, False),
        ({"rests": 100.0}, False),
        ({"jump": 30.0}, False),
        ({"grows": -100.0}, False),
        ({"grows": 5.0}, False),
        ({"grows": 80.0}, True),
        ({"grows": 150.0, "swings": 30.0, "rests": 100.0}, True),
    ],
    ids=["level", "swinging", "warming up", "one jump", "shrinking", "within the slack", "leaking", "all at once"],
)
def test_only_a_steadily_growing_curve_is_reported(rng: Random, shape: dict[str, float], is_found: bool):
    found = judge(MEMORY, list(curve(rng, **shape)), 0.0, SECONDS)
    assert found is not None
    assert found.grows is is_found, found
    assert found.verdict == ("GROWS" if is_found else "flat")


def test_informational_figures_may_grow(rng: Random):
    found = judge(Curve("records", "records", is_judged=False), list(curve(rng, grows=1000)), 0.0, SECONDS)
    assert found is not None
    assert (found.grows, found.verdict) == (False, "-")
    assert found.slope_per_hour == pytest.approx(1000, rel=0.1)


def watched(what: str) -> list[tuple[float, Look]]:
    """Measure from outside a process that leaks a piece at each step."""
    looks = []
    with subprocess.Popen([sys.executable, "-c", LEAKING, what], stdin=PIPE, stdout=PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step in range(LOOKS):
            process.stdin.write(b"step\n")
            assert process.stdout.readline() == b"done\n"
            looks.append((float(step), look_at_process(process.pid)))
        process.stdin.close()
    return looks


@pytest.mark.parametrize(
    ("what", "growing"), [("memory", "resident memory, MiB"), ("files", "open descriptors"), ("nothing", None)]
)
def test_a_leaking_process_is_detected_from_outside(what: str, growing: str | None):
    judgements = judge_all(watched(what), 0.0, LOOKS)
    assert [each.curve.title for each in judgements if each.grows] == ([growing] if growing else [])
    assert ("GROWS" in table(judgements)) is bool(growing)


def test_the_service_reports_missing_and_repeated_events():
    arrived = Arrived()
    block = b'"EventId":"1%07x-%04x-'
    body = b",".join(block % (7, line) for line in range(BLOCK_LINES))
    assert arrived.add(body[: len(body) // 2]) < BLOCK_LINES
    assert arrived.add(body) == BLOCK_LINES
    assert arrived.add(body) == BLOCK_LINES
    assert arrived.events == {"1": BLOCK_LINES}
    assert BLOCK_LINES < arrived.repeats < 2 * BLOCK_LINES


def test_each_event_of_the_writer_has_its_own_id():
    blocks = Blocks(writer=1)
    arrived, written = Arrived(), 0
    for _ in range(SPOILED_EVERY):
        block, what = blocks.next()
        written += what.records
        assert arrived.add(block) == block.count(b"\n") == what.records
    assert arrived.events == {"1": SPOILED_EVERY * BLOCK_LINES}
    assert arrived.repeats == written - SPOILED_EVERY * BLOCK_LINES == 1


def test_the_same_seed_produces_the_same_faults():
    first, second, other = (Trouble(seed, cycle_s=3600) for seed in (1, 1, 2))
    drawn = [[each.next() for _ in range(10_000)] for each in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {"", "503", "429", "slow", "reset", "stored_and_reset", "hang"}


@pytest.mark.early
def test_a_short_soak_accounts_for_all_events_and_writes_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Little load on any machine, and a rotation as soon as an event has arrived.
    monkeypatch.setitem(life._SETTINGS, "delivery.rate_limit_events_per_second", 10_000)
    monkeypatch.setitem(life._PIPE_SETTINGS, "spool.max_bytes", 4 << 20)
    monkeypatch.setitem(life._PIPE_SETTINGS, "spool.segment_bytes", 1 << 20)
    monkeypatch.setattr(writing, "FILE_BYTES", 1 << 20)
    seed = 6
    trouble = Trouble(seed, cycle_s=3600)
    assert any(trouble.next() for _ in range(10)), "with this seed, one of the first requests fails"
    plan = Plan(0.7, seed, cycle_s=0.5, look_s=0.1, gone_files=0, ahead=BLOCK_LINES)
    outcome = soak(plan, tmp_path / "soak", lambda line: None)
    assert [line.partition(":")[0] for line in outcome.account] == ["run", "pipe", "the service"]
    assert "rotations 0" not in outcome.account[0]
    assert not outcome.account[-1].endswith("failures {}"), "no fault occurred"
    judged = {curve.name for curve in CURVES if curve.is_judged}
    assert all(judged - {"log_kib_per_minute"} <= look.keys() for looks in outcome.looks.values() for _, look in looks)
    write_csv(outcome.looks, tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["part"] for row in rows} == {"run", "pipe"}
    assert all(float(row["rss_mib"]) > 10 for row in rows)
