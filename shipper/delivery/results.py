"""
What an answer of success says of the events that were sent. Pure.

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

from msgspec import Struct

from shipper.delivery.answer_counts import Counts
from shipper.delivery.answer_entries import Entries, TooMuchError, is_of_field, said
from shipper.delivery.answer_words import (
    Outcome,
    Role,
    count_of,
    described,
    failure_of,
    is_code,
    outcome_of,
    plain,
    role_of,
    speaks_of_failure,
    whole_number,
)

_STATUS_OF_AGAIN: Final = 503  # of words such as "throttled", which have no number
_OF_RECORDS: Final = {400, 409, 413, 415, 422}  # of an error that may lie in an event
_FLAGS: Final = {"ok", "valid", "isvalid", "ack"}


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
    except TooMuchError:
        return Results(unclear="the answer is too long or nested too deep")
    return reader.results()


class _Reader:
    """Collects what a document says; the first thing that is not understood is kept."""

    def __init__(self, events: int, event_ids: Callable[[], Sequence[str]]) -> None:
        self._entries = Entries(events, event_ids)
        self._counts = Counts(events)
        self._events = events
        self._rejected: dict[int, str] = {}
        self._retried: set[int] = set()
        self._nameless = 0
        self._nameless_again = 0
        self._keyed_good = 0
        self._partial: tuple[str, object] | None = None  # says that some failed
        self._weak: tuple[str, object] | None = None  # may say that all failed
        self._is_positive = False
        self._denial = ""
        self._status = 0
        self._unclear = ""

    # The whole document ----------------------------------------------------------------------------------------------

    def read(self, document: object) -> None:
        if isinstance(document, dict):
            self._walk(document, 0)
        elif isinstance(document, list):
            self._read_results("", document, 0)
        elif isinstance(document, str):
            if speaks_of_failure(document):
                self._note_unclear("", document, "speaks of failure")
        elif document is False:
            self._deny("", document, 0)
        elif isinstance(document, int | float) and document is not True and document != self._events:
            self._note_unclear("", document, "is no number of events")

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
        if outcome in {Outcome.BAD, Outcome.AGAIN} or (outcome is Outcome.UNKNOWN and is_of_field(name)):
            self._note(index, said(value), is_again=outcome is Outcome.AGAIN)
        elif outcome in {Outcome.GOOD, Outcome.NONE}:
            self._keyed_good += 1
        else:
            self._note_unclear(name, value, "is not understood")

    def _read_status(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, dict):
            return self._walk(value, depth + 1)
        if isinstance(value, list):
            return self._read_results(name, value, depth)
        outcome, number = outcome_of(value, is_code=is_code(name))
        if outcome is Outcome.GOOD:
            self._is_positive = True
        elif outcome is Outcome.WEAK:
            self._weak = name, value
        elif outcome is Outcome.PARTIAL:
            self._partial = name, value
        elif outcome is Outcome.UNKNOWN:
            self._note_unclear(name, value, "is unknown")
        elif outcome is not Outcome.NONE:
            self._deny(name, value, number or (_STATUS_OF_AGAIN if outcome is Outcome.AGAIN else 0))

    def _read_denial(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, list):
            return self._read_refused(name, value, depth)
        outcome, number = failure_of(value)
        if outcome is Outcome.NONE:
            self._is_positive = True
            return
        self._deny(name, value, number or (_STATUS_OF_AGAIN if outcome is Outcome.AGAIN else 0))
        if isinstance(value, dict):
            self._walk(value, depth + 1)

    def _read_words(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, str):
            if speaks_of_failure(value):
                self._partial = name, value
            elif outcome_of(value)[0] is Outcome.GOOD:
                self._is_positive = True
        else:
            self._read_other(name, value, depth)

    def _read_other(self, name: str, value: object, depth: int) -> None:
        """Read what is harmless as long as nothing in it speaks of failure."""
        if isinstance(value, str):
            if speaks_of_failure(value):
                self._partial = name, value
        elif isinstance(value, dict):
            self._walk(value, depth + 1)
        elif isinstance(value, list):
            self._entries.go_down(depth)
            for entry in value:
                self._entries.spend()
                if isinstance(entry, dict):
                    outcome, _ = self._entries.outcome_in(entry, depth + 1)
                    if outcome not in {Outcome.GOOD, Outcome.NONE}:
                        self._note_unclear(name, value, "is not understood")
                elif entry:
                    self._read_other(name, entry, depth + 1)

    def _read_harmless(self, name: str, value: object, depth: int) -> None:
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    def _skip(self, name: str, value: object, depth: int) -> None:
        pass

    # Counts ----------------------------------------------------------------------------------------------------------

    def _counted(self, name: str, value: object) -> int | None:
        number = count_of(value)
        if number is None and isinstance(value, int | float) and not isinstance(value, bool):
            self._note_unclear(name, value, "is no number of events")
        return number

    def _read_total(self, name: str, value: object, depth: int) -> None:
        number = self._counted(name, value)
        if number is not None:
            self._counts.totals.append((name, value, number))
        elif isinstance(value, list):
            self._read_results(name, value, depth)
        else:
            self._read_other(name, value, depth)

    def _read_taken(self, name: str, value: object, depth: int) -> None:
        number = self._counted(name, value)
        if isinstance(value, bool):
            self._is_positive |= value
            if not value:
                self._deny(name, value, 0)
        elif number is not None and number <= 1 and (plain(name) in _FLAGS or name[:2] == "is"):
            self._read_status(name, bool(number), depth)
        elif number is not None:
            self._counts.taken.append((name, value, number))
        elif isinstance(value, list):
            self._read_results(name, value, depth, is_count=True)
        elif isinstance(value, str) and outcome_of(value)[0] in {Outcome.GOOD, Outcome.BAD, Outcome.AGAIN}:
            self._read_status(name, value, depth)
        else:
            self._read_other(name, value, depth)

    def _read_part(self, name: str, value: object, depth: int) -> None:
        number = len(value) if isinstance(value, list) else self._counted(name, value)
        if number is not None:
            self._counts.parts = (self._counts.parts or 0) + number
        elif value is False:
            self._weak = name, value
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    def _read_known(self, name: str, value: object, depth: int) -> None:
        number = len(value) if isinstance(value, list) else self._counted(name, value)
        if number is not None:
            self._counts.known += number
        if isinstance(value, dict | list):
            self._read_other(name, value, depth)

    # Refusals --------------------------------------------------------------------------------------------------------

    def _read_refused(self, name: str, value: object, depth: int, *, is_again: bool = False) -> None:
        """Read what stands under a name that says that it was not taken."""
        number = count_of(value)
        if number is not None:
            self._is_positive |= number == 0
            if is_again:
                self._nameless_again += number
            else:
                self._counts.refused.append(number)
        elif not value or (isinstance(value, str) and failure_of(value)[0] is Outcome.NONE):
            self._is_positive = True
        elif value is True:
            self._partial = name, value
        elif isinstance(value, list):
            self._entries.go_down(depth)
            for entry in value:
                self._read_refusal(name, entry, depth + 1, is_again=is_again)
        elif isinstance(value, dict):
            self._read_refused_map(value, depth + 1, is_again=is_again)
        elif isinstance(value, str):
            self._note(None, "", is_again=is_again)
        else:
            self._note_unclear(name, value, "is no number of events")

    def _read_unprocessed(self, name: str, value: object, depth: int) -> None:
        self._read_refused(name, value, depth, is_again=True)

    def _read_refused_map(self, entries: dict[str, Any], depth: int, *, is_again: bool) -> None:
        self._entries.go_down(depth)
        for name, value in entries.items():
            self._entries.spend()
            number = count_of(value)
            if value is None or value is False or value in ("", [], {}):
                continue
            if self._entries.looks_like_key(name) and (number is None or number > 0):
                outcome = self._entries.outcome_in(value, depth)[0] if isinstance(value, dict) else outcome_of(value)[0]
                self._note(self._entries.index_in(name), said(value), is_again=is_again or outcome is Outcome.AGAIN)
            elif number is not None and role_of(name) in {Role.TOTAL, Role.REFUSED}:
                self._counts.refused.append(number)
            elif isinstance(value, list) and role_of(name) in {Role.RESULTS, Role.REFUSED}:
                self._read_refused(name, value, depth, is_again=is_again)
            else:
                self._note(None, "", is_again=is_again)

    def _read_refusal(self, name: str, entry: object, depth: int, *, is_again: bool) -> None:
        self._entries.spend()
        if isinstance(entry, dict):
            outcome, number = self._entries.outcome_in(entry, depth)
            if outcome is Outcome.GOOD:
                self._note_unclear(name, entry, "has an entry of success")
            index = self._entries.index_of(entry, depth)
            is_again |= outcome is Outcome.AGAIN
            if index is None and not is_again and 400 <= number < 500 and number not in _OF_RECORDS:
                self._deny(name, entry, number)
            else:
                self._note(index, said(entry), is_again=is_again)
        elif (place := whole_number(entry)) is not None:
            self._note(self._entries.believed(place), "", is_again=is_again)
        elif isinstance(entry, str):
            self._note(self._entries.index_in(entry), "", is_again=is_again)
        else:
            self._note_unclear(name, entry, "is not understood")

    def _note(self, index: int | None, words: str, *, is_again: bool) -> None:
        if index is None:
            self._nameless_again += is_again
            self._nameless += not is_again
        elif is_again:
            self._retried.add(index)
        else:
            self._rejected.setdefault(index, words)

    # A result for each event -----------------------------------------------------------------------------------------

    def _read_results(self, name: str, value: object, depth: int, *, is_count: bool = False) -> None:
        """Read a list with something for each event, or for each of some."""
        if not isinstance(value, list):
            return self._read_instead_of_results(name, value, depth)
        self._entries.go_down(depth)
        is_of_ids = plain(name).endswith("ids") or is_count
        found = [self._result_in(entry, depth + 1, is_of_ids=is_of_ids) for entry in value]
        is_in_order = len(found) == self._events and not self._entries.has_wild_index
        if is_in_order and all(index is None for _, index in found):
            found = [(outcome, index) for index, (outcome, _) in enumerate(found)]
        good: list[int | None] = []
        bad: set[int | None] = set()
        for (outcome, index), entry in zip(found, value, strict=True):
            if outcome in {Outcome.GOOD, Outcome.NONE}:
                good.append(index)
            elif outcome in {Outcome.BAD, Outcome.AGAIN} and not is_count:
                bad.add(index)
                self._note(index, said(entry), is_again=outcome is Outcome.AGAIN)
            else:
                self._note_unclear(name, value, "has an entry that is not understood")
        named = {index for index in good if index is not None}
        if named & bad:
            self._note_unclear(name, value, "contradicts itself")
        if good or is_count:
            self._counts.taken.append((name, value, len(named) + good.count(None)))

    def _read_instead_of_results(self, name: str, value: object, depth: int) -> None:
        if value is False:
            self._note_unclear(name, value, "is not understood")
        elif (number := count_of(value)) is not None:
            self._counts.totals.append((name, value, number))
        else:
            self._read_other(name, value, depth)

    def _result_in(self, entry: object, depth: int, *, is_of_ids: bool) -> tuple[Outcome, int | None]:
        self._entries.spend()
        if isinstance(entry, dict):
            return self._entries.outcome_in(entry, depth)[0], self._entries.index_of(entry, depth)
        if isinstance(entry, str) and (index := self._entries.index_in(entry, is_id=True)) is not None:
            return Outcome.NONE, index
        if is_of_ids and isinstance(entry, str | int):
            return Outcome.NONE, None
        outcome, _ = outcome_of(entry)
        return (Outcome.UNKNOWN if outcome in {Outcome.WEAK, Outcome.NONE} else outcome), None

    # What comes of it ------------------------------------------------------------------------------------------------

    def _deny(self, name: str, value: object, number: int) -> None:
        if not self._denial:
            self._denial = described(name, value, number)
        self._status = self._status or number

    def _note_unclear(self, name: str, value: object, why: str) -> None:
        if not self._unclear:
            self._unclear = f"{described(name, value)} {why}"

    def results(self) -> Results:
        if self._entries.has_wild_index:
            self._disbelieve_indexes()
        self._retried.difference_update(self._rejected)
        named = len(self._rejected) + len(self._retried)
        counted = max(self._counts.refused, default=0)
        # If all failed, it is for another reason than what it says of events without naming them.
        unnamed = max(int(self._nameless > 0 and not self._denial), counted - named)
        is_refusing = bool(named or unnamed or self._nameless_again)
        if self._keyed_good:
            self._counts.taken.append(("", {}, self._keyed_good))
        if self._partial is not None and not (is_refusing or self._denial):
            self._note_unclear(*self._partial, "speaks of failure")
        if self._weak is not None and not (self._is_positive or self._counts.taken or self._denial):
            self._note_unclear(*self._weak, "may mean success or failure")
        is_told = is_refusing or self._counts.are_told
        if not self._unclear:
            self._unclear = self._counts.contradiction(
                named=named, unnamed=unnamed, nameless=self._nameless, nameless_again=self._nameless_again
            )
        return Results(
            rejected=self._rejected,
            retried=frozenset(self._retried),
            unnamed=unnamed,
            is_again=self._nameless_again > 0,
            denial=self._denial,
            status=self._status,
            unclear=self._unclear,
            is_told=is_told,
        )

    def _disbelieve_indexes(self) -> None:
        for index in self._entries.by_index:
            self._nameless += self._rejected.pop(index, None) is not None
            if index in self._retried:
                self._retried.remove(index)
                self._nameless_again += 1


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
