"""What an answer of success says of the events that were sent, put together from what was found in it. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from shipper.delivery.answer_counts import Counts
from shipper.delivery.answer_words import described


class Results(Struct, frozen=True):
    """
    Attributes:
        rejected: By the index of the event in the batch: what the service says.
        retried: Indexes of events that the service could not take for now.
        unnamed: How many more it refused, at least, without saying which.
        is_again: Some of those that it does not name, it could not take for now.
        denial: The field that says that all failed; empty if none does.
        status: The number that goes with it, as of HTTP; 0 if there is none.
        unclear: What was not understood, for a person, without any value of the answer.
        is_told: It says of single events, or by counts, what became of them.
    """

    rejected: dict[int, str] = {}
    retried: frozenset[int] = frozenset()
    unnamed: int = 0
    is_again: bool = False
    denial: str = ""
    status: int = 0
    unclear: str = ""
    is_told: bool = False


ALL_TAKEN: Final = Results()


class Findings:
    """
    What was found in one answer; the first thing that is not understood is kept.

    Args:
        events: How many were sent.

    Attributes:
        nameless, nameless_again: Errors that name no event, and those of them for which it is to be sent again.
        keyed_good: Events that are named as accepted by the name of a field.
        partial: The field that says that some failed.
        weak: The field that may say that all failed.
        is_positive: Something says that nothing failed.
    """

    def __init__(self, events: int) -> None:
        self.counts = Counts(events)
        self.rejected: dict[int, str] = {}
        self.retried: set[int] = set()
        self.nameless = 0
        self.nameless_again = 0
        self.keyed_good = 0
        self.partial: tuple[str, object] | None = None
        self.weak: tuple[str, object] | None = None
        self.is_positive = False
        self.denial = ""
        self.status = 0
        self.unclear = ""

    def note(self, index: int | None, words: str, *, is_again: bool) -> None:
        """
        Note an event that was not taken.

        Args:
            index: None if it is not named.
            words: What the service says of it.
            is_again: It is to be sent again.
        """
        if index is None:
            self.nameless_again += is_again
            self.nameless += not is_again
        elif is_again:
            self.retried.add(index)
        else:
            self.rejected.setdefault(index, words)

    def deny(self, name: str, value: object, number: int) -> None:
        """Note a field that says that all failed, and the number that goes with it; 0 if there is none."""
        if not self.denial:
            self.denial = described(name, value, number)
        self.status = self.status or number

    def note_unclear(self, name: str, value: object, why: str) -> None:
        """Note a field that is not understood."""
        if not self.unclear:
            self.unclear = f"{described(name, value)} {why}"

    def results(self, disbelieved: set[int]) -> Results:
        """
        Sum up what was found.

        Args:
            disbelieved: Events that were known by an index that is not to be believed.
        """
        self._disbelieve(disbelieved)
        self.retried.difference_update(self.rejected)
        named = len(self.rejected) + len(self.retried)
        counted = max(self.counts.refused, default=0)
        # If all failed, it is for another reason than what it says of events without naming them.
        unnamed = max(int(self.nameless > 0 and not self.denial), counted - named)
        is_refusing = bool(named or unnamed or self.nameless_again)
        if self.keyed_good:
            self.counts.taken.append(("", {}, self.keyed_good))
        if self.partial is not None and not (is_refusing or self.denial):
            self.note_unclear(*self.partial, "speaks of failure")
        if self.weak is not None and not (self.is_positive or self.counts.taken or self.denial):
            self.note_unclear(*self.weak, "may mean success or failure")
        is_told = is_refusing or self.counts.are_told
        if not self.unclear:
            self.unclear = self.counts.contradiction(
                named=named, unnamed=unnamed, nameless=self.nameless, nameless_again=self.nameless_again
            )
        return Results(
            rejected=self.rejected,
            retried=frozenset(self.retried),
            unnamed=unnamed,
            is_again=self.nameless_again > 0,
            denial=self.denial,
            status=self.status,
            unclear=self.unclear,
            is_told=is_told,
        )

    def _disbelieve(self, indexes: set[int]) -> None:
        for index in indexes:
            self.nameless += self.rejected.pop(index, None) is not None
            if index in self.retried:
                self.retried.remove(index)
                self.nameless_again += 1
