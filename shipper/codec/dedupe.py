"""
The dedupe window: EventIds in flight, and EventIds accepted recently, in this run or an earlier one.

An EventId is represented by a key of 16 bytes. In both windows, the native one and the one here, an accepted key takes
about 40 bytes. Both use keyed hashes, so nobody can construct ids that collide.
"""

from __future__ import annotations

import re
from array import array
from binascii import unhexlify
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import compress, repeat
from operator import and_, ge, getitem
from struct import Struct
from typing import Final, cast

from shipper.model.records import Span
from shipper.system.native import NATIVE

KEY_BYTES: Final = 16
NO_KEY: Final = blake2b(b"", digest_size=KEY_BYTES).digest()
"""The key of an empty EventId, which is not an id and never in a window."""

_CANONICAL: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def keys_of(event_ids: Sequence[str]) -> bytes:
    """Return the concatenated keys of EventIds in canonical form."""
    joined = bytearray("".join(event_ids), "ascii")
    del joined[8::36], joined[12::35], joined[16::34], joined[20::33]  # the dashes
    return unhexlify(joined)


def key_of(event_id: str) -> bytes:
    """Return the key of any EventId: a UUID itself, or a hash of anything else."""
    if _CANONICAL.fullmatch(event_id):
        return keys_of([event_id])
    return blake2b(event_id.encode(), digest_size=KEY_BYTES).digest()


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    return _key_form(len(keys) // KEY_BYTES).unpack(keys)


@lru_cache(maxsize=8)
def _key_form(count: int) -> Struct:
    return Struct(f"{KEY_BYTES}s" * count)


class DedupeWindow:
    """
    Contains the unsettled keys, and the last `size` accepted keys.

    Accepted keys are numbered and stored in a ring. A table contains the number of the last key of each hash, and each
    key the distance to the previous one, so nothing has to be removed from the table when the ring overwrites a key.

    Args:
        size: 0 = the window is off; nothing may be admitted or accepted.
    """

    def __init__(self, size: int) -> None:
        self.is_on = size > 0
        self._size = size
        self._unsettled: set[bytes] = set()
        self._mask = (1 << (2 * size).bit_length()) - 1
        self._next = 1
        self._last = array("Q")  # by hash
        self._keys = bytearray()  # by place in the ring, as `_steps`
        self._steps = array("I")

    @property
    def _first(self) -> int:
        return max(1, self._next - self._size)

    def is_accepted(self, key: bytes) -> bool:
        return self._find(key) is not None

    def _find(self, key: bytes) -> int | None:
        """Return the place of a key in the ring."""
        first = self._first
        number = self._last[hash(key) & self._mask] if self._last else 0
        while number >= first:
            place = number % self._size
            if self._keys.startswith(key, KEY_BYTES * place):
                return place
            if not (step := self._steps[place]):
                return None
            number -= step
        return None

    def is_unsettled(self, key: bytes) -> bool:
        return key in self._unsettled

    def admit(self, keys: bytes) -> bool:
        """Add keys as unsettled if all are new and unique; otherwise add none and return False."""
        separate = split_keys(keys)
        new = set(separate)
        if len(new) < len(separate) or not self._unsettled.isdisjoint(new) or self._any_accepted(separate):
            return False
        self._unsettled |= new
        return True

    def _any_accepted(self, keys: Sequence[bytes]) -> bool:
        if not self._last:
            return False
        numbers = map(getitem, repeat(self._last), self._cells(keys))
        return any(map(self.is_accepted, compress(keys, map(ge, numbers, repeat(self._first)))))

    def _cells(self, keys: Iterable[bytes]) -> Iterator[int]:
        return map(and_, map(hash, keys), repeat(self._mask))

    def accept(self, keys: bytes) -> None:
        """Mark keys as accepted, whether admitted or not; the oldest are evicted first."""
        new = split_keys(keys)
        if not self._unsettled.issuperset(new):
            self.forget(keys)
            new = tuple(key for key in dict.fromkeys(new) if not self.is_accepted(key))
        self._unsettled.difference_update(new)
        for start in range(0, len(new), self._size):
            self._append(new[start : start + self._size])

    def _append(self, new: Sequence[bytes]) -> None:
        if not self._last:
            self._last = array("Q", bytes(8 * (self._mask + 1)))
        place = self._next % self._size
        if place + len(new) > self._size:
            end = self._size - place
            self._append(new[:end])
            self._append(new[end:])
            return
        if (missing := place + len(new) - len(self._steps)) > 0:
            self._keys += bytes(KEY_BYTES * missing)
            self._steps.frombytes(bytes(4 * missing))
        self._keys[KEY_BYTES * place : KEY_BYTES * (place + len(new))] = b"".join(new)
        last, steps, first = self._last, self._steps, self._first
        for number, cell in enumerate(self._cells(new), self._next):
            previous = last[cell]
            last[cell] = number
            steps[place] = number - previous if previous >= first else 0
            place += 1
        self._next += len(new)

    def forget(self, keys: bytes) -> None:
        """Forget unsettled keys, so that they count as new again."""
        self._unsettled.difference_update(split_keys(keys))

    def drop(self, keys: bytes) -> None:
        """Forget keys, unsettled or accepted."""
        self.forget(keys)
        for key in split_keys(keys):
            if (place := self._find(key)) is not None:
                self._keys[KEY_BYTES * place : KEY_BYTES * (place + 1)] = NO_KEY


def new_window(size: int) -> DedupeWindow:
    """Return a native window with the same methods if available, else a `DedupeWindow`."""
    return DedupeWindow(size) if NATIVE is None else cast(DedupeWindow, NATIVE.DedupeWindow(size))


def accept_events(window: DedupeWindow, span: Span, ordinals: Sequence[int]) -> None:
    """Mark the EventIds of a span's events as accepted; later records with them are duplicates."""
    if not window.is_on:
        return
    if isinstance(ordinals, range):
        keys = span.event_keys[KEY_BYTES * ordinals.start : KEY_BYTES * ordinals.stop]
    else:
        keys = b"".join([span.event_keys[KEY_BYTES * number : KEY_BYTES * (number + 1)] for number in ordinals])
    if NO_KEY in keys:
        keys = b"".join(key for key in split_keys(keys) if key != NO_KEY)
    window.accept(keys)
    span.accepted_keys += keys
