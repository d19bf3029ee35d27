"""Siblings of matched files, and since when they count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Siblings
from tests.cases import each

SINCE = 1_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, age_s in (("a.log", 0), ("a.log.1", -5), ("a.log.2", 5), ("a.log.bak", -5)):
        (tmp_path / name).write_bytes(b"x\n")
        os.utime(tmp_path / name, (SINCE - age_s, SINCE - age_s))
    return tmp_path


@each(
    ("now_s", "expected"),
    [
        (SINCE + 9, {"a.log.1": True, "a.log.bak": False}),
        (SINCE - 99, {"a.log.1": True, "a.log.2": True, "a.log.bak": False}),  # the clock was put back
    ],
)
def test_files_written_since_their_pattern_is_followed_are_found(folder: Path, now_s: float, expected: dict[str, bool]):
    patterns = Patterns([str(folder / "a.log")], state_directory=folder / "state")
    for known in (["a.log"], ["a.log", "a.log.1"]):  # another file may have a name that was known at the start
        names = [str(folder / name) for name in known]
        generations, unknown = Siblings(patterns).find(names, {patterns.include[0]: SINCE}, now_s)
        assert {each.path.name: each in generations for each in (*generations, *unknown)} == expected
    assert Siblings(patterns).find([], {}, now_s) == ([], []), "nothing is followed yet"


def test_a_pattern_matches_the_paths_it_finds(folder: Path):
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("deep/b.log", "deep/er/c.log", ".hidden.log", "deep/er/d.txt"):
        (folder / name).touch()
    every = [path for path in folder.rglob("*") if path.is_file()]
    for pattern in ("*.log", "**/*.log", "deep/*", "deep/**", "a.log", "[ab].log*", "*/er/?.log", "deep"):
        patterns = Patterns([str(folder / pattern)], state_directory=folder / "state")
        found = {each.name for each in patterns.find()}
        assert {str(path) for path in every if patterns.matching(str(path))} >= found, pattern
        if pattern != "deep":
            assert {str(path) for path in every if patterns.matching(str(path))} == found, pattern
