"""Which files a pattern finds, and which names belong to rotated files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Sibling, Siblings, is_generation_of, looks_like_generation, sibling_of
from tests.cases import each


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def found(folder: Path, *patterns: str, exclude: tuple[str, ...] = ()) -> list[str]:
    include, left_out = ([str(folder / pattern) for pattern in those] for those in (patterns, exclude))
    files = Patterns(include, state_directory=folder / "state", exclude=left_out).find()
    return [str(file.path.relative_to(folder)) for file in files]


def test_names_globs_and_folders_are_found_once_and_the_state_directory_never(tmp_path: Path):
    make(tmp_path, "a.log", "b.log", "sub/c.log", "sub/deep/d.log", "state/spool/1.log")
    assert found(tmp_path, "a.log", "*.log") == ["a.log", "b.log"]
    assert found(tmp_path, "**/*.log") == ["a.log", "b.log", "sub/c.log", "sub/deep/d.log"]
    assert found(tmp_path, "sub") == ["sub/c.log", "sub/deep/d.log"]
    assert found(tmp_path, "*.log", exclude=("b*",)) == ["a.log"]
    for pattern in ("nothing.log", "nothing*.log", "state/spool/1.log"):
        assert found(tmp_path, pattern) == []


@each("name", ["*.log", "app-[0-9].log", "app-?.log", "[ab]pp-1.log"])
def test_a_file_named_like_a_pattern_does_not_hide_the_files_that_the_pattern_matches(tmp_path: Path, name: str):
    """As the shell creates one for `> *.log` where no file matches yet."""
    folder = make(tmp_path / name.encode().hex(), name, "app-1.log")
    assert set(found(folder, name)) == {name, "app-1.log"}


def test_a_folder_named_like_a_pattern_does_not_hide_the_files_that_the_pattern_matches(tmp_path: Path):
    make(tmp_path, "*/below.log", "app.log")
    assert set(found(tmp_path, "*")) == {"*/below.log", "app.log"}


def test_files_and_folders_with_brackets_in_their_names_are_found(tmp_path: Path):
    make(tmp_path, "exports [1]/app.log", "app [1].log")
    assert found(tmp_path, "exports [1]") == ["exports [1]/app.log"]
    assert found(tmp_path, "app [1].log") == ["app [1].log"]


@each(
    ("pattern", "found"),
    [
        ("x.log", ["x.log"]),
        ("*.log", ["x.log"]),
        ("x[2].txt", ["x[2].txt"]),
        ("sub", ["sub/y.log"]),
        ("**/*.log", ["sub/y.log", "x.log"]),
        ("later.log", []),
    ],
)
def test_a_relative_pattern_means_files_of_the_current_folder_whatever_its_name(
    tmp_path: Path, pattern: str, found: list[str]
):
    folder = tmp_path / "a[1]*b"
    make(folder, "x.log", "x.log.1", "sub/y.log", "x[2].txt", "../a1b/x.log", "../a1b/later.log")
    (folder / "x.log.1").write_text("x\n")
    patterns = Patterns([pattern], state_directory=folder / "state", folder=str(folder))
    names = [match.name for match in patterns.find()]
    assert names == [str(folder / name) for name in found]
    assert found or str(folder / pattern) in patterns.unmatched()[patterns.include[0]]
    assert patterns.watched_folders().folders[0] == (folder / "sub" if pattern == "sub" else folder)
    generations, _ = Siblings(patterns).find(names, dict.fromkeys(patterns.include, 0.0), 1e10)
    assert [file.name for file in generations] == ([f"{folder}/x.log.1"] if "x.log" in found else [])


# Siblings -------------------------------------------------------------------------------------------------------------


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
    make(folder, "deep/b.log", "deep/er/c.log", ".hidden.log", "deep/er/d.txt")
    every = [path for path in folder.rglob("*") if path.is_file()]
    for pattern in ("*.log", "**/*.log", "deep/*", "deep/**", "a.log", "[ab].log*", "*/er/?.log", "deep"):
        patterns = Patterns([str(folder / pattern)], state_directory=folder / "state")
        found = {each.name for each in patterns.find()}
        matched = {str(path) for path in every if patterns.matching(str(path))}
        assert matched >= found if pattern == "deep" else matched == found, pattern


# Generations ----------------------------------------------------------------------------------------------------------


APPENDED = [
    *("a.log.1", "a.log.12", "a.log-20261101", "a.log.2026-11-01", "a.log-2026110114", "a.log-20261101-1793577600"),
    *("a.log.1.gz", "a.log-20261101.zst", "a.log.2026-11-01_14-00-00", "a.log.2026-11-01T14:00:00.xz", "a.log.bz2"),
]
BEFORE_THE_EXTENSION = ["a-20261101.log", "a.1.log", "a-20261101.log.gz", "a.2026-11-01.0.log", "a.1"]
NEITHER = [
    *("a.log", "a.log.bak", "a.log.tmp", "a.log~", ".a.log.swp", "a.log.1.part", "a.logs", "a.log.", "a.log-"),
    "b.log.1",
]


def test_rotators_append_a_number_or_a_date_or_put_it_before_the_extension():
    for name in APPENDED + BEFORE_THE_EXTENSION:
        assert is_generation_of(name, "a.log"), name
        assert looks_like_generation(name), name
    for name in NEITHER:
        assert not is_generation_of(name, "a.log"), name
    assert not is_generation_of("a-1.csv", "a.log")


@each("name", APPENDED)
def test_a_name_followed_by_a_number_is_a_generation(name: str):
    assert sibling_of(name, {"a.log"}.__contains__) == Sibling("a.log", is_generation=True)


def test_a_name_with_another_suffix_is_an_unknown_sibling_and_other_names_are_none():
    for name in ("a.log.bak", "a.log.tmp", "a.log.1.part", "a.log-", *BEFORE_THE_EXTENSION[:-1]):
        assert sibling_of(name, {"a.log"}.__contains__) == Sibling("a.log", is_generation=False), name
    for name in ("a.log", "a.log~", "a.logs", "a.1", "a-1.csv", ".a.log.swp", "b.log.1"):
        assert sibling_of(name, {"a.log"}.__contains__) is None, name
    rotated = "@400000006b0b7cc028836044.s"  # by multilog, svlogd or s6-log
    assert sibling_of(rotated, {"current"}.__contains__) == Sibling("current", is_generation=True)
    assert sibling_of(rotated, {"a.log"}.__contains__) is None
    assert sibling_of("a-2.log.1", {"a", "a-2.log"}.__contains__) == Sibling("a-2.log", is_generation=True)


def test_a_name_of_many_parts_is_checked_fast():
    assert sibling_of("a" + ".1-" * 80 + "x", {"b"}.__contains__) is None
    assert not looks_like_generation("a" + "1.1-" * 60 + "x")
