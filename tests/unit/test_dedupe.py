"""The dedupe window: it never forgets too early, never remembers what it did not admit, and stays bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.dedupe import DedupeWindow


def test_a_repeated_id_is_not_admitted():
    window = DedupeWindow(10)
    assert window.admit(["a", "b"])
    assert not window.admit(["c", "a"])
    assert "a" in window


def test_ids_that_came_with_a_repeated_one_are_not_remembered():
    window = DedupeWindow(10)
    window.admit(["a"])
    window.admit(["b", "a", "c"])
    assert "b" not in window
    assert "c" not in window
    assert window.admit(["b", "c"])


def test_an_id_that_stands_twice_in_one_admission_is_not_admitted():
    window = DedupeWindow(10)
    assert not window.admit(["a", "b", "a"])
    assert "a" not in window
    assert "b" not in window
    assert window.admit(["a", "b"])


def test_nothing_is_new_and_admitted():
    assert DedupeWindow(3).admit([])


def test_a_window_of_size_0_admits_everything_and_remembers_nothing():
    window = DedupeWindow(0)
    assert not window.is_on
    assert window.admit(["a", "a"])
    assert window.admit(["a"])
    assert "a" not in window


def test_exactly_the_last_ids_are_still_known_when_a_generation_ends():
    window = DedupeWindow(3)
    for each in "abcdef":
        assert window.admit([each])
    assert [each for each in "abcdef" if each in window] == list("abcdef"), "two generations of three"
    window.admit(["g"])
    assert [each for each in "abcdefg" if each in window] == list("defg")
    assert window.admit(["a"]), "it was forgotten"


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=60))
def test_against_a_list_of_everything(size: int, admissions: list[list[int]]):
    window = DedupeWindow(size)
    admitted: list[str] = []
    for numbers in admissions:
        ids = [str(number) for number in numbers]
        last = admitted[-size:]
        if window.admit(ids):
            assert len(set(ids)) == len(ids)
            assert not set(ids) & set(last), "an id of the last ones was admitted again"
            admitted += ids
        else:
            assert len(set(ids)) < len(ids) or set(ids) & set(admitted), "nothing of it was there before"
        assert all(each in window for each in admitted[-size:])
        known = {each for each in map(str, range(41)) if each in window}
        assert known <= set(admitted)
        assert len(known) <= 2 * (size + 3), "twice the size, and what was admitted together"
