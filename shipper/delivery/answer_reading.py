"""
Read what a 2xx answer says about the events that were sent. No I/O.

The service documents no form of it, so the reading is a positive list: whatever could speak of failure has to be
understood, and counts have to add up to the batch; otherwise `Results.unclear` names what was not understood.
Refusals are known in these forms, each as the document itself or under a name such as `errors` or `rejected`:

    [{"index": 3, "EventId": "…", "message": "…"}]     by index, from 0, or by EventId; the EventId decides
    [3, 7]  ["…EventId…"]  {"3": "…"}  {"…EventId…": "…"}  {"events[3].IP": ["…"]}
    [{"EventId": "…", "status": 422, "error": "…"}]    a result for each event, named or in the order of the batch
    3                                                  a count, which names nobody
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from shipper.delivery.answer import Results
from shipper.delivery.answer_words import (
    Entries,
    Outcome,
    Role,
    TooMuchError,
    count_of,
    described,
    failure_of,
    is_code,
    is_of_field,
    is_yes,
    outcome_of,
    plain,
    role_of,
    said,
    speaks_of_failure,
    speaks_of_success,
    whole_number,
)

_STATUS_OF_AGAIN: Final = 503  # of words such as "throttled", which have no number
_OF_RECORDS: Final = {400, 409, 413, 415, 422}  # of an error that may lie in an event
_GOOD: Final = frozenset({Outcome.GOOD, Outcome.NONE})
_BAD: Final = frozenset({Outcome.BAD, Outcome.AGAIN})
_MESSAGES: Final = {"message", "msg", "text"}
_FLAGS: Final = {"ok", "valid", "isvalid", "ack"}


def read_results(document: object, events: int, event_ids: Callable[[], Sequence[str]]) -> Results:
    """
    Read what a document says of the events.

    Args:
        document: The answer's, decoded.
        events: How many were sent.
        event_ids: Of the events that were sent, in their order; asked for only if an EventId has to be found.
    """
    reader = _Reader(events, event_ids)
    try:
        reader.read(document)
    except (TooMuchError, RecursionError):  # what was decoded just so cannot be encoded again
        return Results(unclear="the answer is too long or nested too deep")
    return reader.results()


class _Reader:
    """Collects what a document says; the first thing that is not understood is kept."""

    def __init__(self, events: int, event_ids: Callable[[], Sequence[str]]) -> None:
        self._entries = Entries(events, event_ids)
        self._found = _Findings(events)
        self._events = events

    def results(self) -> Results:
        """Sum up what was read."""
        return self._found.results(self._entries.by_index if self._entries.has_wild_index else set())

    # The whole document ----------------------------------------------------------------------------------------------

    def read(self, document: object) -> None:
        if isinstance(document, dict):
            self._walk(document, 0)
        elif isinstance(document, list):
            self._read_results("", document, 0)
        elif isinstance(document, str):
            if speaks_of_failure(document, self._events):
                self._found.note_unclear("", document, "speaks of failure")
        elif document is False:
            self._found.deny("", document, 0)
        elif isinstance(document, int | float) and document is not True and document != self._events:
            self._found.note_unclear("", document, "is no number of events")

    def _walk(self, document: dict[str, Any], depth: int) -> None:
        """Read an object that speaks of the whole batch."""
        self._entries.go_down(depth)
        for name, value in document.items():
            self._entries.spend()
            index = self._entries.index_in(name) if self._entries.looks_like_key(name) else None
            if index is None:
                _READERS[role_of(name)](self, name, value, depth)
            else:
                self._read_keyed(name, index, value, depth)

    def _read_keyed(self, name: str, index: int, value: object, depth: int) -> None:
        """Read what stands under the index or EventId of an event."""
        if isinstance(value, dict):
            outcome, _ = self._entries.outcome_in(value, depth + 1)
        elif isinstance(value, list):
            outcome = Outcome.BAD if value else Outcome.NONE
        else:
            outcome, _ = outcome_of(value)
        if outcome in _BAD or (outcome is Outcome.UNKNOWN and is_of_field(name)):
            self._found.note(index, said(value), is_again=outcome is Outcome.AGAIN)
        elif outcome in _GOOD:
            self._found.keyed_good += 1
        else:
            self._found.note_unclear(name, value, "is not understood")

    def _read_status(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, dict):
            return self._walk(value, depth + 1)
        if isinstance(value, list):
            return self._read_results(name, value, depth)
        outcome, number = outcome_of(value, is_code=is_code(name))
        if outcome is Outcome.GOOD:
            self._found.is_positive = True
        elif outcome is Outcome.WEAK:
            self._found.weak = name, value
        elif outcome is Outcome.PARTIAL:
            self._found.partial = name, value
        elif outcome is Outcome.UNKNOWN:
            self._found.note_unclear(name, value, "is unknown")
        elif outcome is not Outcome.NONE:
            self._found.deny(name, value, number or (_STATUS_OF_AGAIN if outcome is Outcome.AGAIN else 0))

    def _read_denial(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, list):
            return self._read_refused(name, value, depth)
        outcome, number = failure_of(value)
        if outcome is Outcome.NONE:
            self._found.is_positive = True
            return
        self._found.deny(name, value, number or (_STATUS_OF_AGAIN if outcome is Outcome.AGAIN else 0))
        if isinstance(value, dict):
            self._walk(value, depth + 1)

    def _read_words(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, str):
            if speaks_of_failure(value, self._events):
                self._found.partial = name, value
            elif outcome_of(value)[0] is Outcome.GOOD:
                self._found.is_positive = True
            elif value and plain(name) in _MESSAGES and not speaks_of_success(value):
                self._found.weak = name, value
        else:
            self._read_other(name, value, depth)

    def _read_other(self, name: str, value: object, depth: int) -> None:
        """Read what is harmless as long as nothing in it speaks of failure."""
        if value is False and is_yes(name):
            self._found.deny(name, value, 0)
        if isinstance(value, str):
            if speaks_of_failure(value, self._events):
                self._found.partial = name, value
        elif isinstance(value, dict):
            self._walk(value, depth + 1)
        elif isinstance(value, list):
            self._entries.go_down(depth)
            for entry in value:
                self._entries.spend()
                index = None
                if isinstance(entry, dict):
                    outcome, _ = self._entries.outcome_in(entry, depth + 1)
                    if outcome not in _GOOD:
                        self._found.note_unclear(name, value, "is not understood")
                    index = self._entries.index_of(entry, depth + 1)
                elif entry:
                    index = self._entries.index_in(entry, is_id=True) if isinstance(entry, str) else None
                    self._read_other(name, entry, depth + 1)
                if index is not None:
                    self._found.note_unclear(name, value, "names events, and does not say why")

    def _read_harmless(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    def _skip(self, name: str, value: object, depth: int) -> None:
        pass

    # Counts ----------------------------------------------------------------------------------------------------------

    def _counted(self, name: str, value: object) -> int | None:
        number = count_of(value)
        is_number = isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())
        if number is None and is_number and not isinstance(value, bool):
            self._found.note_unclear(name, value, "is no number of events")
        return number

    def _read_total(self, name: str, value: object, depth: int) -> None:
        number = self._counted(name, value)
        if number is not None:
            self._found.counts.totals.append((name, value, number))
        elif isinstance(value, list):
            self._read_results(name, value, depth)
        else:
            self._read_other(name, value, depth)

    def _read_taken(self, name: str, value: object, depth: int) -> None:
        number = self._counted(name, value)
        if isinstance(value, bool):
            self._found.is_positive |= value
            if not value:
                self._found.deny(name, value, 0)
        elif number is not None and number <= 1 and (plain(name) in _FLAGS or name[:2] == "is"):
            self._read_status(name, bool(number), depth)
        elif number is not None:
            self._found.counts.taken.append((name, value, number))
        elif isinstance(value, list):
            self._read_results(name, value, depth, is_count=True)
        elif isinstance(value, str) and outcome_of(value)[0] in {Outcome.GOOD, Outcome.BAD, Outcome.AGAIN}:
            self._read_status(name, value, depth)
        else:
            self._read_other(name, value, depth)

    def _read_part(self, name: str, value: object, depth: int) -> None:
        number = len(value) if isinstance(value, list) else self._counted(name, value)
        if number is not None:
            self._found.counts.parts = (self._found.counts.parts or 0) + number
        elif value is False:
            self._found.weak = name, value
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    def _read_known(self, name: str, value: object, depth: int) -> None:
        number = len(value) if isinstance(value, list) else self._counted(name, value)
        if number is not None:
            self._found.counts.known += number
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    # Refusals --------------------------------------------------------------------------------------------------------

    def _read_refused(self, name: str, value: object, depth: int, *, is_again: bool = False) -> None:
        """Read what stands under a name that says that it was not taken."""
        number = count_of(value)
        if number is not None:
            self._found.is_positive |= number == 0
            if is_again:
                self._found.nameless_again += number
            else:
                self._found.counts.refused.append(number)
        elif not value or (isinstance(value, str) and failure_of(value)[0] is Outcome.NONE):
            self._found.is_positive = True
        elif value is True:
            self._found.partial = name, value
        elif isinstance(value, list):
            self._entries.go_down(depth)
            for entry in value:
                self._read_refusal(name, entry, depth + 1, is_again=is_again)
        elif isinstance(value, dict):
            self._read_refused_map(value, depth + 1, is_again=is_again)
        elif isinstance(value, str):
            self._found.note(self._entries.index_in(value, is_id=True), "", is_again=is_again)
        else:
            self._found.note_unclear(name, value, "is no number of events")

    def _read_unprocessed(self, name: str, value: object, depth: int) -> None:
        self._read_refused(name, value, depth, is_again=True)

    def _read_refused_map(self, entries: dict[str, Any], depth: int, *, is_again: bool) -> None:
        if (index := self._entries.index_of(entries, depth)) is not None:
            return self._found.note(index, said(entries), is_again=is_again)
        for name, value in entries.items():
            self._entries.spend()
            number = count_of(value)
            if value is None or value is False or value in ("", [], {}):
                continue
            if self._entries.looks_like_key(name) and (number is None or number > 0):
                outcome = self._entries.outcome_in(value, depth)[0] if isinstance(value, dict) else outcome_of(value)[0]
                self._found.note(
                    self._entries.index_in(name), said(value), is_again=is_again or outcome is Outcome.AGAIN
                )
            elif number is not None and role_of(name) in {Role.TOTAL, Role.REFUSED}:
                self._found.counts.refused.append(number)
            elif isinstance(value, list) and role_of(name) in {Role.RESULTS, Role.REFUSED}:
                self._read_refused(name, value, depth, is_again=is_again)
            else:
                self._found.note(None, "", is_again=is_again)

    def _read_refusal(self, name: str, entry: object, depth: int, *, is_again: bool) -> None:
        self._entries.spend()
        if isinstance(entry, dict):
            outcome, number = self._entries.outcome_in(entry, depth)
            if outcome is Outcome.GOOD:
                self._found.note_unclear(name, entry, "has an entry of success")
            index = self._entries.index_of(entry, depth)
            is_again |= outcome is Outcome.AGAIN
            if index is None and not is_again and 400 <= number < 500 and number not in _OF_RECORDS:
                self._found.deny(name, entry, number)
            else:
                self._found.note(index, said(entry), is_again=is_again)
        elif (place := whole_number(entry)) is not None:
            is_place = "code" not in plain(name)
            self._found.note(self._entries.believed(place) if is_place else None, "", is_again=is_again)
        elif isinstance(entry, str):
            self._found.note(self._entries.index_in(entry), "", is_again=is_again)
        else:
            self._found.note_unclear(name, entry, "is not understood")

    # A result for each event -----------------------------------------------------------------------------------------

    def _read_results(self, name: str, value: object, depth: int, *, is_count: bool = False) -> None:
        """Read a list with something for each event, or for each of some."""
        if not isinstance(value, list):
            return self._read_instead_of_results(name, value, depth)
        self._entries.go_down(depth)
        is_of_ids = plain(name).endswith("ids") or is_count
        found = [self._result_in(entry, depth + 1, is_of_ids=is_of_ids, is_count=is_count) for entry in value]
        is_in_order = len(found) == self._events and not self._entries.has_wild_index
        if is_in_order and all(index is None for _, index in found):
            found = [(outcome, index) for index, (outcome, _) in enumerate(found)]
        good: list[int | None] = []
        bad: set[int | None] = set()
        for (outcome, index), entry in zip(found, value, strict=True):
            if outcome in _GOOD:
                good.append(index)
            elif outcome in _BAD and not is_count:
                bad.add(index)
                self._found.note(index, said(entry), is_again=outcome is Outcome.AGAIN)
            else:
                self._found.note_unclear(name, value, "has an entry that is not understood")
        named = {index for index in good if index is not None}
        if named & bad:
            self._found.note_unclear(name, value, "contradicts itself")
        if good and (self._entries.has_stranger or (named and None in good)):
            self._found.note_unclear(name, value, "has an entry that names no event of the batch")
        if good or is_count:
            self._found.counts.taken.append((name, value, len(named) + good.count(None)))

    def _read_instead_of_results(self, name: str, value: object, depth: int) -> None:
        if value is False:
            self._found.note_unclear(name, value, "is not understood")
        elif (number := count_of(value)) is not None:
            self._found.counts.totals.append((name, value, number))
        else:
            self._read_other(name, value, depth)

    def _result_in(self, entry: object, depth: int, *, is_of_ids: bool, is_count: bool) -> tuple[Outcome, int | None]:
        self._entries.spend()
        if isinstance(entry, dict):
            return self._entries.outcome_in(entry, depth)[0], self._entries.index_of(entry, depth)
        if isinstance(entry, str) and (index := self._entries.index_in(entry, is_id=True)) is not None:
            return Outcome.NONE, index
        if is_of_ids and isinstance(entry, str | int) and not isinstance(entry, bool):
            return Outcome.NONE, self._entries.believed(entry) if is_count and isinstance(entry, int) else None
        outcome, _ = outcome_of(entry)
        return (Outcome.UNKNOWN if outcome in {Outcome.WEAK, Outcome.NONE} else outcome), None


_READERS: Final[dict[Role, Callable[[_Reader, str, Any, int], None]]] = {
    Role.HARMLESS: _Reader._read_harmless,
    Role.LINKS: _Reader._skip,
    Role.OTHER: _Reader._read_other,
    Role.WORDS: _Reader._read_words,
    Role.STATUS: _Reader._read_status,
    Role.RESULTS: _Reader._read_results,
    Role.TOTAL: _Reader._read_total,
    Role.TAKEN: _Reader._read_taken,
    Role.PART: _Reader._read_part,
    Role.KNOWN: _Reader._read_known,
    Role.REFUSED: _Reader._read_refused,
    Role.UNPROCESSED: _Reader._read_unprocessed,
    Role.DENIAL: _Reader._read_denial,
    Role.INDEX: _Reader._read_harmless,
}


# What was found -------------------------------------------------------------------------------------------------------


class _Findings:
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
        self.counts = _Counts(events)
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


class _Counts:
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
