"""The dedupe window: which EventIds were seen lately."""

from __future__ import annotations


class DedupeWindow:
    """
    Remembers at least the last `size` EventIds, exactly, in bounded memory.

    Two generations: the young one is filled up to `size`, then it becomes the old one and the old one is forgotten.
    So between `size` and twice `size` ids are known (about 100 bytes each), and forgetting costs nothing per id.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: set[str] = set()
        self._old: set[str] = set()

    def has_any(self, event_ids: set[str]) -> bool:
        """Tell whether one of the ids was seen."""
        return not (event_ids.isdisjoint(self._young) and event_ids.isdisjoint(self._old))

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._young or event_id in self._old

    def add(self, event_ids: set[str]) -> None:
        """Remember the ids; with size 0 the window is off."""
        if not self._size:
            return
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()
        self._young |= event_ids
