"""Names of rotated files, and their originals."""

from __future__ import annotations

from shipper.sources.siblings import Sibling, is_generation_of, looks_like_generation, sibling_of
from tests.cases import each

APPENDED = [
    *("a.log.1", "a.log.12", "a.log-20261101", "a.log.2026-11-01", "a.log-2026110114", "a.log-20261101-1793577600"),
    *("a.log.1.gz", "a.log-20261101.zst", "a.log.2026-11-01_14-00-00", "a.log.2026-11-01T14:00:00.xz", "a.log.bz2"),
]
BEFORE_THE_EXTENSION = ["a-20261101.log", "a.1.log", "a-20261101.log.gz", "a.2026-11-01.0.log", "a.1"]
NEITHER = [
    "a.log",
    "a.log.bak",
    "a.log.tmp",
    "a.log~",
    ".a.log.swp",
    "a.log.1.part",
    "a.logs",
    "a.log.",
    "a.log-",
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
    for name in ("a.log.bak", "a.log.tmp", "a.log.1.part", "a.log-"):
        assert sibling_of(name, {"a.log"}.__contains__) == Sibling("a.log", is_generation=False), name
    for name in ("a.log", "a.log~", "a.logs", "a-20261101.log", ".a.log.swp", "b.log.1"):
        assert sibling_of(name, {"a.log"}.__contains__) is None, name
    assert sibling_of("a-2.log.1", {"a", "a-2.log"}.__contains__) == Sibling("a-2.log", is_generation=True)


def test_a_name_of_many_parts_is_checked_fast():
    assert sibling_of("a" + ".1-" * 80 + "x", {"b"}.__contains__) is None
    assert not looks_like_generation("a" + "1.1-" * 60 + "x")
