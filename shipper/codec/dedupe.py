"""
The dedupe window: which EventIds are in flight, and which were accepted lately, also by earlier runs.

An EventId is known by its key of 16 bytes. A million Python objects would take 100 MB, so the keys are stored one after
the other in slots, in the order in which they were added, and a hash table of plain arrays finds them: 30 bytes
each. Per event, one cell of the table is read and written; the rest runs in C, for a piece at a time.

The cell of a key is computed from its own bytes, which is cheap, and works for UUIDs of every version. Ids that are
constructed to share a cell would cost more and more: once a cell has too many keys, cells are computed from a keyed
hash that nobody can predict.
"""

from __future__ import annotations

import re
from array import array
from binascii import unhexlify
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import Final, cast

from shipper.model.records import Span
from shipper.system.native import NATIVE

KEY_BYTES: Final = 16
ADMITTED_MAX: Final = 1 << 14
"""Most keys that are admitted at a time."""
NO_KEY: Final = blake2b(b"", digest_size=KEY_BYTES).digest()
"""Stands where an event has an empty EventId."""

_CANONICAL: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_VOID, _UNSETTLED, _ACCEPTED = range(3)

# In the lowest bits of a cell: some bits of the one key that has it, or that several have it.
_TAG_BITS: Final = 6
_SEVERAL: Final = (1 << _TAG_BITS) - 1
_CELL_KEYS_MAX: Final = 32
_WORDS: Final = Struct("=4I")
_HASH: Final = Struct("=q8x")
_TAGS: Final = bytes(each % _SEVERAL for each in range(256))


def keys_of(event_ids: Sequence[str]) -> bytes:
    """Return the keys of EventIds that all have the canonical form, one behind the other."""
    joined = bytearray("".join(event_ids), "ascii")
    del joined[8::36], joined[12::35], joined[16::34], joined[20::33]  # the dashes
    return unhexlify(joined)


def key_of(event_id: str) -> bytes:
    """Return the key of an EventId of any form: what it says, if that is a UUID; `NO_KEY` if it is empty."""
    if _CANONICAL.fullmatch(event_id):
        return keys_of([event_id])
    return blake2b(event_id.encode(), digest_size=KEY_BYTES).digest()


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    """Return each of the keys that stand one behind the other."""
    return _key_form(len(keys) // KEY_BYTES).unpack(keys)


@lru_cache(maxsize=8)
def _key_form(count: int) -> Struct:
    return Struct(f"{KEY_BYTES}s" * count)


@lru_cache(maxsize=8)
def _mask(cells_count: int, count: int) -> int:
    """Return the bits of so many cells, one behind the other."""
    return int.from_bytes(array("I", [cells_count - 1]).tobytes() * count, "little")


class DedupeWindow:
    """
    Knows, exactly, the keys that are unsettled, and those that were accepted of the last `size` that were admitted.

    Slots are counted, and stand in a ring in which the youngest overwrites the oldest.

    Args:
        size: 0 = the window is off; nothing may be admitted.
        numbers_max: Slots are counted anew before this; at least four times the size of the ring.
    """

    def __init__(self, size: int, *, numbers_max: int = 0) -> None:
        self.is_on = size > 0
        self._capacity = size + 3 * ADMITTED_MAX  # some are left out: at its end, and by keys that were not all new
        self._table = array("I" if self._capacity < 1 << 24 else "Q")  # by cell: its youngest slot, and a tag
        self._numbers_max = numbers_max or 1 << (8 * self._table.itemsize - _TAG_BITS)
        self._keys = bytearray()  # these three by the place of a slot in the ring
        self._states = bytearray()
        self._before = array("I")  # how far back the slot is that had its cell before; 0 = none had
        self._oldest = self._next = 1
        self._renumbered = 0  # what slots that were given out are greater by
        self._stuck: set[bytes] = set()  # unsettled, though their slots are overwritten
        self._cells_count = 1 << (3 * self._capacity // 2).bit_length()
        self._is_hashed = self._is_crowded = False

    # Looking ----------------------------------------------------------------------------------------------------

    def is_accepted(self, key: bytes) -> bool:
        return self._state(key) == _ACCEPTED

    def is_unsettled(self, key: bytes) -> bool:
        return self._state(key) == _UNSETTLED

    def _state(self, key: bytes) -> int:
        if key in self._stuck:
            return _UNSETTLED
        place = self._find(key)
        return _VOID if place is None else self._states[place]

    def _find(self, key: bytes) -> int | None:
        """Find the place of a key that is unsettled or accepted."""
        if not self._table:
            return None
        place = self._find_from(self._table[self._cell(key)] >> _TAG_BITS, key)
        if self._is_crowded:
            self._part_cells()
        return place

    def _find_from(self, slot: int, key: bytes) -> int | None:
        """Go through the slots of one cell, from the youngest on."""
        passed = 0
        while slot >= self._oldest:
            place = slot % self._capacity
            if self._states[place] and self._keys.startswith(key, KEY_BYTES * place):
                return place
            if not (step := self._before[place]):
                break
            slot -= step
            passed += 1
            if passed > _CELL_KEYS_MAX:
                self._is_crowded = not self._is_hashed
        return None

    def _cell(self, key: bytes) -> int:
        """Return the cell of one key, the same as `_cells` does."""
        first, _, _, second = _WORDS.unpack(key)
        if self._is_hashed:
            first, second, _, _ = _WORDS.unpack(_HASH.pack(hash(key)))
        cell: int = (first ^ second) & (self._cells_count - 1)
        return cell

    def _cells(self, keys: bytes) -> tuple[array[int], bytes]:
        """Return the cell and the tag of each key."""
        count = len(keys) // KEY_BYTES
        if self._is_hashed:
            hashes = Struct(f"{count}q").pack(*map(hash, split_keys(keys)))  # that differ from process to process
            words = array("I", hashes)
            first, second = words[::2], words[1::2]
        else:
            words = array("I", keys)  # the first and the last one: what differs in UUIDs of any version
            first, second = words[::4], words[3::4]
        mixed = int.from_bytes(first.tobytes(), "little") ^ int.from_bytes(second.tobytes(), "little")
        cells = (mixed & _mask(self._cells_count, count)).to_bytes(first.itemsize * count, "little")
        return array("I", cells), second.tobytes()[::4].translate(_TAGS)

    # Admitting --------------------------------------------------------------------------------------------------

    def admit(self, keys: bytes) -> int | None:
        """
        Take keys as unsettled if each of them is new and stands once; otherwise take none of them.

        Args:
            keys: One behind the other, at most `ADMITTED_MAX`.
        Returns:
            The slot of the first one, the others follow; None if they were not all new.
        """
        return self._insert(keys, _UNSETTLED)

    def remember(self, keys: bytes) -> None:
        """Take keys as accepted, as many as there are; the last ones are remembered longest."""
        for start in range(0, len(keys), KEY_BYTES * ADMITTED_MAX):
            self._insert(keys[start : start + KEY_BYTES * ADMITTED_MAX], _ACCEPTED)

    def _insert(self, keys: bytes, state: int) -> int | None:
        """Write keys into slots and cells; unsettled ones only if all of them are new."""
        count = len(keys) // KEY_BYTES
        first = self._room(count)
        if state == _UNSETTLED and self._stuck and not self._stuck.isdisjoint(split_keys(keys)):
            return None
        place = first % self._capacity
        self._keys[KEY_BYTES * place : KEY_BYTES * (place + count)] = keys
        self._states[place : place + count] = bytes((state,)) * count
        self._before[place : place + count] = array("I", bytes(self._before.itemsize * count))
        self._next = first + count
        known_at = self._index(first, keys, must_be_new=state == _UNSETTLED)
        if known_at is None:
            return first + self._renumbered
        self._take_back(first, keys[: KEY_BYTES * known_at])
        return None

    def _index(self, first: int, keys: bytes, *, must_be_new: bool) -> int | None:
        """Write the cells of keys in slots from `first` on; stop at one that is known, and return its index."""
        cells, tags = self._cells(keys)
        table, before, capacity = self._table, self._before, self._capacity
        floor = self._oldest << _TAG_BITS
        slots = range(first << _TAG_BITS, (first + len(cells)) << _TAG_BITS, 1 << _TAG_BITS)
        for cell, tag, numbered in zip(cells, tags, slots, strict=True):
            value = numbered + tag
            if (old := table[cell]) >= floor:
                slot, older = numbered >> _TAG_BITS, old >> _TAG_BITS
                if must_be_new and ((old ^ value) & _SEVERAL == 0 or old & _SEVERAL == _SEVERAL):
                    index: int = slot - first
                    if self._find_from(older, keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]) is not None:
                        return index
                    if self._is_crowded:
                        self._next = first
                        self._part_cells()
                        self._next = first + len(cells)
                        return self._index(first, keys, must_be_new=must_be_new)
                before[slot % capacity] = slot - older
                value |= _SEVERAL
            table[cell] = value
        return None

    def _take_back(self, first: int, keys: bytes) -> None:
        """Undo what was done for the keys in the last slots."""
        cells, _ = self._cells(keys)
        for slot, cell in zip(range(first + len(cells) - 1, first - 1, -1), reversed(cells), strict=True):
            step = self._before[slot % self._capacity]
            self._table[cell] = (slot - step) << _TAG_BITS | _SEVERAL if step else 0
        place, count = first % self._capacity, self._next - first
        self._states[place : place + count] = bytes(count)
        self._next = first

    def _room(self, count: int) -> int:
        """Return the first of some slots that lie together in the ring; what is there is forgotten."""
        assert 0 < count <= ADMITTED_MAX
        if not self._table:
            self._table = array(self._table.typecode, [0]) * self._cells_count
        if self._next + 2 * ADMITTED_MAX >= self._numbers_max:
            self._renumber()
        place = self._next % self._capacity
        if place + count > self._capacity:
            self._forget_places(place, self._capacity)
            self._next += self._capacity - place
            place = 0
        self._forget_places(place, place + count)
        self._oldest = max(self._oldest, self._next + count - self._capacity)
        if (missing := place + count - len(self._states)) > 0:
            self._states += bytes(missing)
            self._keys += bytes(KEY_BYTES * missing)
            self._before.frombytes(bytes(self._before.itemsize * missing))
        return self._next

    def _forget_places(self, start: int, end: int) -> None:
        """Forget what is in some places of the ring; what is unsettled there is known on."""
        end = min(end, len(self._states))
        place = self._states.find(_UNSETTLED, start, end)
        while place >= 0:
            self._stuck.add(bytes(self._keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]))
            place = self._states.find(_UNSETTLED, place + 1, end)
        if start < end:
            self._states[start:end] = bytes(end - start)

    def _renumber(self) -> None:
        """Count slots from the beginning of the ring again, before their numbers have no room in a cell."""
        shift = (self._oldest - 1) // self._capacity * self._capacity
        assert shift > 0
        self._oldest -= shift
        self._next -= shift
        self._renumbered += shift
        self._index_again()

    def _part_cells(self) -> None:
        """Use hashes from now on, which spread crowded cells."""
        self._is_hashed, self._is_crowded = True, False
        self._index_again()

    def _index_again(self) -> None:
        """Write the cells of all keys anew."""
        self._table[:] = array(self._table.typecode, [0]) * self._cells_count
        self._before[:] = array("I", bytes(self._before.itemsize * len(self._before)))
        turn = (self._oldest // self._capacity + 1) * self._capacity
        for start, end in ((self._oldest, min(self._next, turn)), (turn, self._next)):  # of the ring, its end first
            for slot in range(start, end, ADMITTED_MAX):
                place = slot % self._capacity
                count = min(end - slot, ADMITTED_MAX, len(self._states) - place)
                keys = bytes(self._keys[KEY_BYTES * place : KEY_BYTES * (place + count)])
                if keys:
                    self._index(slot, keys, must_be_new=False)

    # Settling ---------------------------------------------------------------------------------------------------

    def accept(self, slot: int, ordinals: Sequence[int]) -> bool:
        """
        Remember keys as accepted that were admitted together, by their places behind the first one's slot.

        Returns:
            Whether that could be done; False = their slots are overwritten, and each is to be accepted by itself.
        """
        slot -= self._renumbered
        if slot < self._oldest:
            return False
        place = slot % self._capacity
        if isinstance(ordinals, range):
            start, end = place + ordinals.start, place + ordinals.stop
            self._states[start:end] = bytes((_ACCEPTED,)) * (end - start)
        else:
            for ordinal in ordinals:
                self._states[place + ordinal] = _ACCEPTED
        return True

    def accept_one(self, key: bytes) -> None:
        """Remember a key as accepted, wherever it is; also one that was not admitted."""
        place = self._find(key)
        if place is not None:
            self._states[place] = _ACCEPTED
        else:
            self._stuck.discard(key)
            self.remember(key)

    def take_back(self, slot: int, keys: bytes) -> None:
        """Forget keys that were admitted together; no room is lost for what was admitted last."""
        count = len(keys) // KEY_BYTES
        first = slot - self._renumbered
        if first + count == self._next:
            self._take_back(first, keys)
        else:
            for key in split_keys(keys):
                self.forget(key)

    def forget(self, key: bytes) -> None:
        """Forget a key that is unsettled, so that it is new when it comes again."""
        self._stuck.discard(key)
        place = self._find(key)
        if place is not None and self._states[place] == _UNSETTLED:
            self._states[place] = _VOID

    def drop(self, keys: bytes) -> None:
        """Forget keys, whether they are unsettled or accepted, as many as there are."""
        for key in split_keys(keys):
            self._stuck.discard(key)
            while (place := self._find(key)) is not None:  # what was remembered may stand more than once
                self._states[place] = _VOID


def new_window(size: int) -> DedupeWindow:
    """Return a window; the native one, which has the same methods, if there is one."""
    return DedupeWindow(size) if NATIVE is None else cast(DedupeWindow, NATIVE.DedupeWindow(size))


def accept_events(window: DedupeWindow, span: Span, ordinals: Sequence[int]) -> None:
    """Remember the EventIds of events of a span as accepted; later records with one of them are duplicates."""
    if not window.is_on:
        return
    if span.slot >= 0:
        is_all = KEY_BYTES * span.fresh == len(span.event_keys)
        fresh = ordinals if is_all else [ordinal for ordinal in ordinals if ordinal < span.fresh]
        if window.accept(span.slot, fresh):
            ordinals = () if is_all else [ordinal for ordinal in ordinals if ordinal >= span.fresh]
    for ordinal in ordinals:
        key = span.event_keys[KEY_BYTES * ordinal : KEY_BYTES * (ordinal + 1)]
        if key != NO_KEY:
            window.accept_one(key)
            if ordinal >= span.fresh:
                span.keys += key


def refuse_event(window: DedupeWindow, span: Span, event_id: str) -> None:
    """Forget the EventId of an event of a span: the next record that has it may be a corrected one."""
    key = key_of(event_id)
    for start in range(0, len(span.keys), KEY_BYTES):
        if span.keys.startswith(key, start):
            span.keys = span.keys[:start] + span.keys[start + KEY_BYTES :]
            break
    window.forget(key)
