"""The dedupe window: it never forgets too early, never remembers what it did not admit, and stays bounded."""

from __future__ import annotations

from random import Random

import pytest

from shipper.codec import dedupe
from shipper.codec.dedupe import ADMITTED_MAX, NO_KEY, DedupeWindow, key_of, keys_of

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
A, B, C = (bytes([each]) * 16 for each in b"abc")
UNKNOWN, UNSETTLED, ACCEPTED = range(3)


def state_of(window: DedupeWindow, key: bytes) -> int:
    return UNSETTLED if window.is_unsettled(key) else ACCEPTED if window.is_accepted(key) else UNKNOWN


def accepted(window: DedupeWindow, *keys: bytes) -> None:
    slot = window.admit(b"".join(keys))
    assert slot is not None
    assert window.accept(slot, range(len(keys)))


def test_a_uuid_is_its_own_key_and_any_other_id_has_one():
    assert keys_of([UUID, UUID.replace("0", "1")]) == key_of(UUID) + key_of(UUID.replace("0", "1"))
    assert key_of(UUID).hex() == UUID.replace("-", "")
    others = ["one", "ONE", UUID.upper(), UUID.replace("-", ""), f"{UUID}\n", "é", "0" * 36]
    assert len({key_of(each) for each in [UUID, *others]}) == len(others) + 1
    assert {len(key_of(each)) for each in others} == {16}
    assert key_of("") == NO_KEY


def test_a_repeated_key_is_not_admitted_whether_its_answer_is_there_or_not():
    window = DedupeWindow(10)
    slot = window.admit(A + B)
    assert slot is not None
    assert window.admit(C + A) is None
    assert [state_of(window, each) for each in (A, B, C)] == [UNSETTLED, UNSETTLED, UNKNOWN]
    assert window.accept(slot, [0])
    assert window.admit(A) is None
    assert [state_of(window, each) for each in (A, B)] == [ACCEPTED, UNSETTLED]


def test_a_refused_key_is_new_again():
    window = DedupeWindow(10)
    window.admit(A + B)
    window.forget(A)
    assert window.admit(A) is not None
    assert window.admit(B) is None


def test_dropped_keys_are_new_again_also_if_they_were_accepted():
    window = DedupeWindow(10)
    accepted(window, A, B)
    window.admit(C)
    window.drop(A + C)
    assert [state_of(window, each) for each in (A, B, C)] == [UNKNOWN, ACCEPTED, UNKNOWN]
    assert window.admit(A + C) is not None


def test_keys_that_are_taken_back_are_new_again_and_cost_no_room():
    window, random = DedupeWindow(10), Random(3)
    accepted(window, A)
    for _ in range(10):
        keys = random.randbytes(16 * ADMITTED_MAX)
        slot = window.admit(keys)
        assert slot is not None
        window.take_back(slot, keys)
    assert [state_of(window, each) for each in (A, keys[:16], keys[-16:])] == [ACCEPTED, UNKNOWN, UNKNOWN]
    slot = window.admit(keys)
    assert slot is not None
    assert window.admit(B) is not None
    window.take_back(slot, keys)
    assert [state_of(window, each) for each in (A, B, keys[:16])] == [ACCEPTED, UNSETTLED, UNKNOWN]


def test_keys_that_came_with_a_repeated_one_are_not_remembered():
    window = DedupeWindow(10)
    window.admit(A)
    assert window.admit(B + A + C) is None
    assert [state_of(window, each) for each in (B, C)] == [UNKNOWN, UNKNOWN]
    assert window.admit(B + C) is not None


def test_a_key_that_stands_twice_in_one_admission_is_not_admitted():
    window = DedupeWindow(10)
    assert window.admit(A + B + A) is None
    assert [state_of(window, each) for each in (A, B)] == [UNKNOWN, UNKNOWN]
    assert window.admit(A + B) is not None


def test_a_window_that_is_off_knows_nothing():
    window = DedupeWindow(0)
    assert not window.is_on
    assert state_of(window, A) == UNKNOWN


def test_what_earlier_runs_got_accepted_is_known_as_far_as_it_fits():
    window, random = DedupeWindow(50_000), Random(1)
    keys = [random.randbytes(16) for _ in range(200_000)]
    window.remember(b"".join(keys))
    assert all(map(window.is_accepted, keys[-50_000:]))
    assert not any(map(window.is_accepted, keys[:100_000]))
    assert window.admit(random.randbytes(16) + keys[-1]) is None


@pytest.mark.parametrize("fixed", [range(4, 12), range(12)], ids=["made", "the same but at the end"])
def test_ids_that_are_made_to_share_a_cell_cost_little(fixed: range):
    """They are made so that what a cell is made of is the same in each."""
    window, random = DedupeWindow(100_000), Random(4)

    def made(count: int) -> bytes:
        varied = bytes(0 if place in fixed else each for place, each in enumerate(random.randbytes(16)))
        return b"".join(varied[:4] + number.to_bytes(8, "big") + varied[:4] for number in range(count))

    others = random.randbytes(16 * 10_000)
    accepted(window, *[others[start : start + 16] for start in range(0, len(others), 16)])
    keys = made(10_000)
    passed = 0
    find = window._find_from

    def counted(slot: int, key: bytes) -> int | None:
        nonlocal passed
        passed += 1
        return find(slot, key)

    window._find_from = counted  # type: ignore[method-assign]
    slot = window.admit(keys)
    assert slot is not None
    assert window._is_hashed
    assert passed < 1000
    assert window.admit(keys[16:32]) is None
    assert window.accept(slot, range(10_000))
    assert all(window.is_accepted(each[start : start + 16]) for each in (keys, others) for start in range(0, 16000, 16))


def test_a_million_keys_take_little_memory():
    window, random = DedupeWindow(1_000_000), Random(2)
    for _ in range(80):
        window.remember(random.randbytes(16 * ADMITTED_MAX))
    arrays = (window._table, window._keys, window._states, window._before)
    assert sum(memoryview(each).nbytes for each in arrays) < 35_000_000


@pytest.mark.parametrize("seed", range(16))
def test_against_a_list_of_everything(monkeypatch: pytest.MonkeyPatch, seed: int):
    """A small ring, few cells, few numbers: every corner is turned many times."""
    most = 8
    monkeypatch.setattr(dedupe, "ADMITTED_MAX", most)
    random = Random(seed)
    size = random.randint(1, 40)
    window = DedupeWindow(size, numbers_max=4 * (size + 3 * most) + 20)
    if seed % 2:  # many keys in a cell
        window._cells_count = 16
    pool = random.choice([60, 400])
    states: dict[bytes, int] = {}
    admitted: list[bytes] = []  # in their order; those that were accepted after they had been overwritten, once more
    on_their_way: list[tuple[list[bytes], int]] = []

    def accept(keys: list[bytes], slot: int) -> None:
        late = set(window._stuck)
        if not window.accept(slot, range(len(keys))):
            for key in keys:
                window.accept_one(key)
        for key in keys:
            states[key] = ACCEPTED
            admitted.extend([key] if key in late else [])

    for _ in range(400):
        action = random.random()
        recent = set(admitted[-size:])
        if action < 0.6:
            keys = [random.randint(0, pool).to_bytes(2) * 8 for _ in range(random.randint(1, most))]
            may_be_known = any(states.get(key) for key in keys) or len(set(keys)) < len(keys)
            is_known = any(states.get(key) == UNSETTLED or (states.get(key) and key in recent) for key in keys)
            slot = window.admit(b"".join(keys))
            if slot is None:
                assert may_be_known
            else:
                assert not is_known
                assert len(set(keys)) == len(keys)
                states |= dict.fromkeys(keys, UNSETTLED)
                admitted += keys
                on_their_way.append((keys, slot))
        elif action < 0.65:
            keys = [random.randint(9000, 9100).to_bytes(2) * 8 for _ in range(random.randint(1, 20))]
            window.remember(b"".join(keys))
            states |= dict.fromkeys(keys, ACCEPTED)
            admitted += keys
        elif on_their_way and action < 0.9:
            accept(*on_their_way.pop(random.randrange(len(on_their_way))))
        elif action > 0.97:
            keys = random.sample(list(states), min(3, len(states)))
            window.drop(b"".join(keys))
            states |= dict.fromkeys(keys, UNKNOWN)
            on_their_way = [each for each in on_their_way if not set(keys) & set(each[0])]
        elif on_their_way:
            keys, _ = on_their_way.pop(random.randrange(len(on_their_way)))
            for key in keys:
                window.forget(key)
                states[key] = UNKNOWN
        recent = set(admitted[-size:])
        for key in random.sample(list(states), min(8, len(states))):
            state, found = states[key], state_of(window, key)
            assert found == state or (state == ACCEPTED and found == UNKNOWN and key not in recent)
    assert window._renumbered, "the numbers of slots did not come to their end"
