"""Holds the counts of an answer against the number of events that were sent. Pure."""

from __future__ import annotations

from shipper.delivery.answer_words import described


class Counts:
    """
    All counts of one answer.

    Args:
        events: How many were sent.

    Attributes:
        taken: Each count of what was accepted, by the name and value of its field.
        totals: Each count of what arrived, likewise.
        parts: The sum of what was new and what was not, of what was accepted; None if it does not say.
        known: How many the service had before.
        refused: Each count of what was refused.
    """

    def __init__(self, events: int) -> None:
        self._events = events
        self.taken: list[tuple[str, object, int]] = []
        self.totals: list[tuple[str, object, int]] = []
        self.parts: int | None = None
        self.known = 0
        self.refused: list[int] = []

    @property
    def are_told(self) -> bool:
        """Whether it counts what became of the events."""
        return bool(self.taken or self.refused or self.parts is not None)

    def contradiction(self, *, named: int, unnamed: int, nameless: int, nameless_again: int) -> str:
        """
        Return what does not add up; empty if all does.

        Args:
            named: Events that the answer names as not taken.
            unnamed: How many more were not taken, at least.
            nameless, nameless_again: Errors that name no event; several may be of one event.
        """
        events, known = self._events, self.known
        least = named + unnamed + (nameless_again > 0)
        most = max(named + nameless + nameless_again, sum(self.refused))
        if self.refused and named > sum(self.refused):
            return f"it names {named} events as refused, and counts fewer"
        if max(least, known) > events:
            return f"its counts do not add up: {max(least, known)} of {events} events"
        taken = self.taken if self.parts is None else [*self.taken, ("created", self.parts, self.parts)]
        for name, value, number in taken:
            # Those that it had before may be counted among the accepted ones, or beside them.
            left = events - number
            if not (least <= left <= most or least <= left - known <= most):
                return f"{described(name, value)} does not add up: {number} of {events} events"
        for name, value, number in self.totals:
            if number != events:
                return f"{described(name, value)} does not add up: {number} of {events} events"
        return ""
