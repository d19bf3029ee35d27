"""The dedupe window: which EventIds are on their way, and which were accepted lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class DedupeWindow:
    """
    Knows the EventIds that are unsettled, and remembers at least the last `size` that were accepted, exactly.

    The accepted ones are two generations: the young one is filled up to `size`, then it becomes the old one and the old
    one is forgotten. So between `size` and twice `size` ids are known (about 100 bytes each), and forgetting costs
    nothing per id. An empty id is none: it is never known.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._unsettled: set[str] = set()
        self._young: set[str] = set()
        self._old: set[str] = set()
        self.is_on = size > 0

    def is_accepted(self, event_id: str) -> bool:
        return event_id in self._young or event_id in self._old

    def is_unsettled(self, event_id: str) -> bool:
        return event_id in self._unsettled

    def admit(self, event_ids: Sequence[str]) -> bool:
        """
        Take the ids as unsettled if each of them is new and stands once; otherwise take none of them.

        Args:
            event_ids: None of them is empty.
        Returns:
            Whether they were all new. A window of size 0 finds everything new and remembers nothing.
        """
        if not self.is_on:
            return True
        unsettled = self._unsettled
        if not all(known.isdisjoint(event_ids) for known in (unsettled, self._young, self._old)):
            return False
        before = len(unsettled)
        unsettled.update(event_ids)
        if len(unsettled) == before + len(event_ids):
            return True
        unsettled.difference_update(event_ids)
        return False

    def accept(self, event_ids: Sequence[str]) -> None:
        """Remember ids as accepted."""
        if not self.is_on:
            return
        self._unsettled.difference_update(event_ids)
        if len(self._young) >= self._size:
            self._old, self._young = self._young, set()
        self._young.update(event_ids)
        self._young.discard("")  # of events that came under other settings

    def forget(self, event_ids: Iterable[str]) -> None:
        """Forget ids that are unsettled, so that they are new when they come again."""
        self._unsettled.difference_update(event_ids)
