"""The dedupe window: which EventIds were seen lately."""

from __future__ import annotations

from collections.abc import Iterable


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
        self.is_on = size > 0

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._young or event_id in self._old

    def forget(self, event_ids: Iterable[str]) -> None:
        """Forget ids, so that they are new when they come again."""
        self._young.difference_update(event_ids)
        self._old.difference_update(event_ids)

    def admit(self, event_ids: list[str]) -> bool:
        """
        Remember the ids if each of them is new and stands once; otherwise remember none of them.

        Returns:
            Whether they were all new. A window of size 0 finds everything new and remembers nothing.
        """
        if not self.is_on:
            return True
        if not (self._young.isdisjoint(event_ids) and self._old.isdisjoint(event_ids)):
            return False
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()
        before = len(self._young)
        self._young.update(event_ids)
        if len(self._young) == before + len(event_ids):
            return True
        self._young.difference_update(event_ids)
        return False
