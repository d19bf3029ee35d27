"""
Reads what an answer of success says of the events that were sent. Pure.

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

from shipper.delivery.answer_entries import Entries, TooMuchError, is_of_field, said
from shipper.delivery.answer_words import (
    Outcome,
    Role,
    count_of,
    failure_of,
    is_code,
    is_yes,
    outcome_of,
    plain,
    role_of,
    speaks_of_failure,
    speaks_of_success,
    whole_number,
)
from shipper.delivery.results import ALL_TAKEN, Findings, Results

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
    if document is None or document == {}:
        return ALL_TAKEN
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
        self._found = Findings(events)
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
