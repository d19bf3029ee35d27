"""
The dedupe window: which EventIds are on their way, and which were accepted lately, also by earlier runs.

An EventId is known by its key of 16 bytes. A million Python objects would take 100 MB, so the keys stand one behind
the other in slots, in the order in which they were admitted, and a hash table of plain arrays finds them: 30 bytes
each. What is done for every event is to look into one cell of the table, and to write it; the rest runs in C, for a
piece at a time.
"""

from __future__ import annotations

import re
from array import array
from binascii import unhexlify
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import or_
from struct import Struct
from typing import Final

KEY_BYTES: Final = 16
ADMITTED_MAX: Final = 1 << 14
"""Most keys that are admitted at a time."""

_CANONICAL: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_VOID, _UNSETTLED, _ACCEPTED = range(3)

# In the lowest bits of a cell: some bits of the hash of the one key that has it, or that several have it.
_TAG_BITS: Final = 6
_SEVERAL: Final = (1 << _TAG_BITS) - 1
_TAGS: Final = bytes(each % _SEVERAL for each in range(256))


def keys_of(event_ids: Sequence[str]) -> bytes:
    """Return the keys of EventIds that all have the canonical form, one behind the other."""
    return unhexlify("".join(event_ids).encode().translate(None, b"-"))


def key_of(event_id: str) -> bytes:
    """Return the key of an EventId of any form: what it says, if that is a UUID; empty if it is empty."""
    if _CANONICAL.fullmatch(event_id):
        return keys_of([event_id])
    return blake2b(event_id.encode(), digest_size=KEY_BYTES).digest() if event_id else b""


@lru_cache(maxsize=8)
def _forms(count: int) -> tuple[Struct, Struct, Struct]:
    """Return the forms of so many keys, hashes and cells."""
    return Struct(f"{KEY_BYTES}s" * count), Struct(f"<{count}q"), Struct(f"<{count}I")


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
        bits = (3 * self._capacity // 2).bit_length()
        self._cells_count = 1 << bits
        self._columns = [
            (column, bytes(each & ((1 << min(8, bits - 8 * column)) - 1) for each in range(256)))
            for column in range(-(-bits // 8))
        ]

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
        (cell,), _ = self._cells([key])
        return self._find_from(self._table[cell] >> _TAG_BITS, key)

    def _find_from(self, slot: int, key: bytes) -> int | None:
        """Go through the slots of one cell, from the youngest on."""
        while slot >= self._oldest:
            place = slot % self._capacity
            if self._states[place] and self._keys.startswith(key, KEY_BYTES * place):
                return place
            if not (step := self._before[place]):
                break
            slot -= step
        return None

    def _cells(self, keys: Sequence[bytes]) -> tuple[Sequence[int], bytes]:
        """Return the cell and the tag of each key, of its hash: that differs from process to process."""
        _, hashes, cells = _forms(len(keys))
        raw = hashes.pack(*map(hash, keys))
        columns = bytearray(4 * len(keys))
        for column, kept in self._columns:
            columns[column::4] = raw[column::8].translate(kept)
        return cells.unpack(columns), raw[7::8].translate(_TAGS)

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
        each = _forms(count)[0].unpack(keys)
        first = self._room(count)
        if state == _UNSETTLED and self._stuck and not self._stuck.isdisjoint(each):
            return None
        place = first % self._capacity
        self._keys[KEY_BYTES * place : KEY_BYTES * (place + count)] = keys
        self._states[place : place + count] = bytes((state,)) * count
        self._before[place : place + count] = array("I", bytes(self._before.itemsize * count))
        self._next = first + count
        known_at = self._index(first, each, must_be_new=state == _UNSETTLED)
        if known_at is None:
            return first + self._renumbered
        self._take_back(first, each[:known_at])
        return None

    def _index(self, first: int, each: Sequence[bytes], *, must_be_new: bool) -> int | None:
        """Write the cells of keys in slots from `first` on; stop at one that is known, and return its index."""
        cells, tags = self._cells(each)
        table, before, capacity = self._table, self._before, self._capacity
        floor = self._oldest << _TAG_BITS
        slots = range(first << _TAG_BITS, (first + len(each)) << _TAG_BITS, 1 << _TAG_BITS)
        for cell, value in zip(cells, map(or_, slots, tags), strict=True):
            if (old := table[cell]) >= floor:
                slot, older = value >> _TAG_BITS, old >> _TAG_BITS
                if must_be_new and ((old ^ value) & _SEVERAL == 0 or old & _SEVERAL == _SEVERAL):
                    index: int = slot - first
                    if self._find_from(older, each[index]) is not None:
                        return index
                before[slot % capacity] = slot - older
                value |= _SEVERAL
            table[cell] = value
        return None

    def _take_back(self, first: int, each: Sequence[bytes]) -> None:
        """Undo what was done for the keys in the last slots."""
        for index, cell in reversed(list(enumerate(self._cells(each)[0] if each else ()))):
            slot = first + index
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
        self._table = array(self._table.typecode, [0]) * self._cells_count
        self._before = array("I", bytes(self._before.itemsize * len(self._before)))
        for start in (self._oldest, self._capacity):  # up to the end of the ring, and from its beginning on
            end = min(self._next, start // self._capacity * self._capacity + self._capacity)
            for slot in range(start, end, ADMITTED_MAX):
                place = slot % self._capacity
                count = min(end - slot, ADMITTED_MAX, len(self._states) - place)
                keys = self._keys[KEY_BYTES * place : KEY_BYTES * (place + count)]
                if count > 0:
                    self._index(slot, _forms(count)[0].unpack(keys), must_be_new=False)

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

    def accept_all(self, keys: bytes) -> list[bytes]:
        """Remember keys as accepted, as many as there are; returns those that were known already."""
        known = []
        for start in range(0, len(keys), KEY_BYTES * ADMITTED_MAX):
            some = keys[start : start + KEY_BYTES * ADMITTED_MAX]
            count = len(some) // KEY_BYTES
            if (slot := self.admit(some)) is not None:
                self.accept(slot, range(count))
                continue
            for key in _forms(count)[0].unpack(some):
                if self.is_accepted(key):
                    known.append(key)
                else:
                    self.accept_one(key)
        return known

    def take_back(self, slot: int, keys: bytes) -> None:
        """Forget keys that were admitted together; no room is lost for what was admitted last."""
        each = _forms(len(keys) // KEY_BYTES)[0].unpack(keys)
        first = slot - self._renumbered
        if first + len(each) == self._next:
            self._take_back(first, each)
        else:
            for key in each:
                self.forget(key)

    def forget(self, key: bytes) -> None:
        """Forget a key that is unsettled, so that it is new when it comes again."""
        self._stuck.discard(key)
        place = self._find(key)
        if place is not None and self._states[place] == _UNSETTLED:
            self._states[place] = _VOID
