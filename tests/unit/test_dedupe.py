"""The dedupe window: it never forgets too early, never remembers what it did not admit, and stays bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.dedupe import DedupeWindow


def knows(window: DedupeWindow, event_id: str) -> bool:
    return window.is_unsettled(event_id) or window.is_accepted(event_id)


def test_a_repeated_id_is_not_admitted_whether_its_answer_is_there_or_not():
    window = DedupeWindow(10)
    assert window.admit(["a", "b"])
    assert not window.admit(["c", "a"])
    assert window.is_unsettled("a")
    assert not window.is_accepted("a")
    window.accept(["a"])
    assert not window.admit(["a"])
    assert window.is_accepted("a")
    assert not window.is_unsettled("a")


def test_a_refused_id_is_new_again():
    window = DedupeWindow(10)
    window.admit(["a", "b"])
    window.forget(["a"])
    assert window.admit(["a"])
    assert not window.admit(["b"])


def test_ids_that_came_with_a_repeated_one_are_not_remembered():
    window = DedupeWindow(10)
    window.admit(["a"])
    window.admit(["b", "a", "c"])
    assert not knows(window, "b")
    assert not knows(window, "c")
    assert window.admit(["b", "c"])


def test_an_id_that_stands_twice_in_one_admission_is_not_admitted():
    window = DedupeWindow(10)
    assert not window.admit(["a", "b", "a"])
    assert not knows(window, "a")
    assert not knows(window, "b")
    assert window.admit(["a", "b"])


def test_nothing_is_new_and_admitted():
    assert DedupeWindow(3).admit([])


def test_a_window_of_size_0_admits_everything_and_remembers_nothing():
    window = DedupeWindow(0)
    assert not window.is_on
    assert window.admit(["a", "a"])
    window.accept(["a"])
    assert window.admit(["a"])
    assert not knows(window, "a")


def test_exactly_the_last_ids_are_still_known_when_a_generation_ends():
    window = DedupeWindow(3)
    for each in "abcdef":
        assert window.admit([each])
        window.accept([each])
    assert [each for each in "abcdef" if window.is_accepted(each)] == list("abcdef"), "two generations of three"
    window.admit(["g"])
    window.accept(["g"])
    assert [each for each in "abcdefg" if window.is_accepted(each)] == list("defg")
    assert window.admit(["a"]), "it was forgotten"


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=4), st.booleans(), st.booleans()), max_size=60),
)
def test_against_a_list_of_everything(size: int, steps: list[tuple[list[int], bool, bool]]):
    window = DedupeWindow(size)
    unsettled: list[str] = []
    accepted: list[str] = []
    for numbers, is_answered, is_accepted in steps:
        ids = [str(number) for number in numbers]
        known = {*unsettled, *accepted[-size:]}
        if window.admit(ids):
            assert len(set(ids)) == len(ids)
            assert not set(ids) & known, "an id of the last ones was admitted again"
            unsettled += ids
        else:
            assert len(set(ids)) < len(ids) or set(ids) & {*unsettled, *accepted}, "nothing of it was there before"
        if is_answered and is_accepted:
            window.accept(unsettled)
            accepted += unsettled
            unsettled = []
        elif is_answered and unsettled:
            window.forget([unsettled.pop()])
        assert {each for each in map(str, range(41)) if window.is_unsettled(each)} == set(unsettled)
        remembered = {each for each in map(str, range(41)) if window.is_accepted(each)}
        assert set(accepted[-size:]) <= remembered <= set(accepted)
