"""The dedupe window, in Python and native: it remembers the last accepted keys and all unsettled ones."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from shipper.codec.dedupe import NO_KEY, DedupeWindow, key_of, keys_of
from shipper.system.native import NATIVE

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
A, B, C = (bytes([each]) * 16 for each in b"abc")
UNKNOWN, UNSETTLED, ACCEPTED = range(3)


@pytest.fixture(params=["pure", "native"])
def new(request: pytest.FixtureRequest) -> Any:
    if request.param == "pure":
        return DedupeWindow
    if NATIVE is None:
        pytest.skip("the native extension is not installed or is disabled")
    return NATIVE.DedupeWindow


def state_of(window: DedupeWindow, key: bytes) -> int:
    return UNSETTLED if window.is_unsettled(key) else ACCEPTED if window.is_accepted(key) else UNKNOWN


def test_a_uuid_is_its_own_key_and_other_ids_have_a_derived_one():
    assert keys_of([UUID, UUID.replace("0", "1")]) == key_of(UUID) + key_of(UUID.replace("0", "1"))
    assert key_of(UUID).hex() == UUID.replace("-", "")
    others = ["one", "ONE", UUID.upper(), UUID.replace("-", ""), f"{UUID}\n", "é", "0" * 36]
    assert len({key_of(each) for each in [UUID, *others]}) == len(others) + 1
    assert {len(key_of(each)) for each in others} == {16}
    assert key_of("") == NO_KEY


def test_a_repeated_key_is_not_admitted_before_or_after_its_answer(new: Any):
    window = new(10)
    assert window.admit(A + B)
    assert not window.admit(C + A)
    assert [state_of(window, each) for each in (A, B, C)] == [UNSETTLED, UNSETTLED, UNKNOWN]
    window.accept(A)
    assert not window.admit(A)
    assert [state_of(window, each) for each in (A, B)] == [ACCEPTED, UNSETTLED]


def test_a_refused_key_is_new_again(new: Any):
    window = new(10)
    window.admit(A + B)
    window.forget(A)
    assert window.admit(A)
    assert not window.admit(B)


def test_dropped_keys_are_new_again_even_if_they_were_accepted(new: Any):
    window = new(10)
    window.accept(A + B)
    window.admit(C)
    window.drop(A + C)
    assert [state_of(window, each) for each in (A, B, C)] == [UNKNOWN, ACCEPTED, UNKNOWN]
    assert window.admit(A + C)


@pytest.mark.parametrize("repeated", [A, B], ids=["a known one", "one of them"])
def test_keys_passed_with_a_repeated_one_are_not_admitted(new: Any, repeated: bytes):
    window = new(10)
    window.admit(A)
    assert not window.admit(B + repeated + C)
    assert [state_of(window, each) for each in (B, C)] == [UNKNOWN, UNKNOWN]
    assert window.admit(B + C)


def test_a_disabled_window_remembers_nothing(new: Any):
    window = new(0)
    assert not window.is_on
    assert state_of(window, A) == UNKNOWN


def test_keys_accepted_in_earlier_runs_are_loaded_up_to_the_size_of_the_window(new: Any):
    window, random = new(50_000), Random(1)
    keys = [random.randbytes(16) for _ in range(200_000)]
    window.accept(b"".join(keys))
    assert all(map(window.is_accepted, keys[-50_000:]))
    assert not any(map(window.is_accepted, keys[:150_000]))
    assert not window.admit(random.randbytes(16) + keys[-1])


@pytest.mark.parametrize("seed", range(16))
def test_the_window_agrees_with_a_model(new: Any, seed: int):
    """A small window and few keys: every corner is turned many times."""
    random = Random(seed)
    size = random.randint(8, 40)
    window = new(size)
    pool = random.choice([60, 400])
    unsettled: set[bytes] = set()
    order: list[bytes | None] = []  # accepted keys, the oldest first; None = dropped since

    def draw() -> list[bytes]:
        return [random.randint(0, pool).to_bytes(2) * 8 for _ in range(random.randint(1, 4))]

    for _ in range(400):
        keys = draw()
        joined = b"".join(keys)
        match random.choice(["admit", "admit", "admit", "accept", "accept", "accept any", "forget", "drop"]):
            case "admit":
                is_new = len(set(keys)) == len(keys) and unsettled.union(order).isdisjoint(keys)
                assert window.admit(joined) == is_new
                unsettled |= set(keys) if is_new else set()
            case "accept" | "accept any" as action:
                if action == "accept":
                    keys = random.sample(sorted(unsettled), min(4, len(unsettled)))
                elif not set(order[: len(keys)]).isdisjoint(keys):
                    continue  # whether one is remembered that is forgotten for another one does not matter
                window.accept(b"".join(keys))
                unsettled -= set(keys)
                order += [key for key in dict.fromkeys(keys) if key not in order]
                del order[:-size]
            case "forget":
                window.forget(joined)
                unsettled -= set(keys)
            case "drop":
                window.drop(joined)
                unsettled -= set(keys)
                order = [None if key in keys else key for key in order]
        for key in (*draw(), *keys):
            expected = UNSETTLED if key in unsettled else ACCEPTED if key in order else UNKNOWN
            assert state_of(window, key) == expected
