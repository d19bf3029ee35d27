"""A short run of each fuzz target, and tests of the fuzzer itself. `make fuzz` is the long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shipper.system.native import NATIVE
from tests.conftest import SEED
from tests.fuzz.engine import Target, fuzz, write_failure
from tests.fuzz.mutation import mutator

_EXECUTIONS = 4_000
_MOST = 200  # of one target, which runs all of its seeds and half of this mutated, at least
# Names, because importing the targets would cost every process that collects tests a fifth of a second.
_NAMES = (
    *("answers", "waits", "tokens", "records", "neighbours", "framing", "rows", "odd-rows", "archives", "bombs"),
    *("settings", "reports", "segments", "snapshot", "database", "requests"),
    *("conversations", "grants", "fetches", "handshakes"),
    *(("scanner", "chunks", "pieces") if NATIVE else ()),
)
_TIMED = ("slow",)  # measures time, so only `make fuzz` runs it


def test_every_target_has_a_short_run():
    from tests.fuzz.__main__ import TARGETS

    assert sorted((*_NAMES, *_TIMED)) == sorted(TARGETS)


@pytest.mark.parametrize("name", _NAMES)
def test_no_hostile_input_breaks_an_invariant(name: str, tmp_path: Path):
    from tests.fuzz.__main__ import TARGETS

    target = TARGETS[name]
    shares = sum(each.share for each in TARGETS.values())
    seeds = len(target.seeds)
    executions = max(seeds + min(seeds, _MOST // 2), min(_MOST, round(_EXECUTIONS * target.share / shares)))
    report = fuzz(target, executions, SEED)
    assert not report.failures, "\n\n".join(write_failure(each, target, SEED, tmp_path) for each in report.failures)
    assert report.executions == executions
    assert report.kinds > 2, "all inputs have the same outcome"


def _planted(data: bytes) -> object:
    assert b"\x00" not in data or b"[[" not in data, "planted"
    if b"}}" in data:
        raise KeyError("planted as well")
    return len(data) // 10


PLANTED = Target("planted", _planted, [b'{"a":[1,2,{"b":"c"}]}' * 5], mutator(words=[b"\0", b"[["]), share=1)


def test_even_a_short_run_tries_all_seeds_of_a_target_and_as_many_mutations():
    from tests.fuzz.__main__ import executions_of

    small = PLANTED._replace(seeds=[b"x"] * 50, share=0.001)
    assert executions_of([PLANTED, small], 1_000) == [999, 100]


def test_a_failure_is_shrunk_and_reported_with_its_seed_and_input(tmp_path: Path):
    report = fuzz(PLANTED, 5000, 7)
    assert sorted(failure.data for failure in report.failures) == [b"\0[[", b"}}"]
    for failure in report.failures:
        message = write_failure(failure, PLANTED, 7, tmp_path)
        (path,) = tmp_path.glob(f"planted-7-{failure.number}")
        assert path.read_bytes() == failure.data
        assert repr(failure.data) in message
        assert "seed 7" in message
        assert f"python -m tests.fuzz planted --input {path}" in message


def test_the_same_seed_generates_the_same_inputs_and_another_seed_others():
    def inputs(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        fuzz(PLANTED._replace(check=seen.append), 300, seed)
        return seen

    assert inputs(7) == inputs(7)
    assert inputs(7)[1:] != inputs(8)[1:]
