"""A short run of every fuzzer, and what the fuzzers themselves promise. `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shipper.system.native import NATIVE
from tests.conftest import SEED
from tests.fuzz.engine import Target, fuzz, write_failure
from tests.fuzz.mutation import mutator

_EXECUTIONS = 4_000
_MOST = 200  # of one target
# By name: to import the targets takes a fifth of a second, which every process that collects tests would spend.
_NAMES = (
    *("answers", "waits", "tokens", "records", "neighbours", "framing", "rows", "odd-rows", "archives", "bombs"),
    *("settings", "reports", "segments", "snapshot", "database", "requests"),
    *("conversations", "grants", "fetches", "handshakes"),
    *(("scanner", "chunks", "pieces") if NATIVE else ()),
)
_TIMED = ("slow",)  # which measures time: `make fuzz` alone runs it


def test_every_target_has_a_short_run():
    from tests.fuzz.targets import TARGETS

    assert sorted((*_NAMES, *_TIMED)) == sorted(TARGETS)


@pytest.mark.parametrize("name", _NAMES)
def test_what_must_hold_holds_for_hostile_input(name: str, tmp_path: Path):
    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    shares = sum(each.share for each in TARGETS.values())
    executions = max(2 * len(target.seeds), min(_MOST, round(_EXECUTIONS * target.share / shares)))
    found = fuzz(target, executions, SEED)
    assert not found.failures, "\n\n".join(write_failure(each, target, SEED, tmp_path) for each in found.failures)
    assert found.executions == executions
    assert found.kinds > 2, "the inputs all come to the same"


def _planted(data: bytes) -> object:
    assert b"\x00" not in data or b"[[" not in data, "planted"
    if b"}}" in data:
        raise KeyError("planted, too")
    return len(data) // 10


PLANTED = Target("planted", _planted, [b'{"a":[1,2,{"b":"c"}]}' * 5], mutator(words=[b"\0", b"[["]), share=1)


def test_what_does_not_hold_is_found_made_small_and_told_by_seed_and_literal(tmp_path: Path):
    found = fuzz(PLANTED, 5000, 7)
    assert sorted(failure.data for failure in found.failures) == [b"\0[[", b"}}"]
    for failure in found.failures:
        told = write_failure(failure, PLANTED, 7, tmp_path)
        (path,) = tmp_path.glob(f"planted-7-{failure.number}")
        assert path.read_bytes() == failure.data
        assert repr(failure.data) in told
        assert "seed 7" in told
        assert f"python -m tests.fuzz planted --input {path}" in told


def test_the_same_seed_makes_the_same_inputs_and_another_one_others():
    def inputs(seed: int) -> list[bytes]:
        made: list[bytes] = []
        fuzz(PLANTED._replace(check=made.append), 300, seed)
        return made

    assert inputs(7) == inputs(7)
    assert inputs(7)[1:] != inputs(8)[1:]
