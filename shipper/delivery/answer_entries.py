"""
What one entry of an answer says: which event it is about, and what became of it. Pure.

An event is named by its EventId, or by its index from 0. Rows, lines and positions may be counted from 1 and are not
believed; nor is any index of an answer in which one is out of range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from shipper.delivery.answer_words import (
    Outcome,
    Role,
    count_of,
    failure_of,
    is_code,
    outcome_of,
    plain,
    role_of,
    speaks_of_failure,
    whole_number,
)

_DEPTH_MAX: Final = 12
_VALUES_MIN: Final = 10_000  # looked at of any answer, and more for each event of the batch
_VALUES_PER_EVENT: Final = 64
_WORDS_MAX: Final = 4_096
_SAID: Final = ("message", "error", "reason", "description", "detail", "errors", "title", "errormessage", "msg")
_ID_LENGTH: Final = 36
_PLACES: Final = {"path", "field", "pointer", "loc", "location", "source", "property", "parameter", "target"}
_PLACE_STEPS: Final = 8
_ROWS: Final = {"row", "rownumber", "line", "linenumber", "position"}  # may be counted from 1
_SILENT: Final = frozenset({Role.LINKS, Role.HARMLESS, Role.INDEX})
_FAILING: Final = frozenset({Role.REFUSED, Role.DENIAL, Role.UNPROCESSED})
_CLEAR: Final = frozenset({Outcome.GOOD, Outcome.BAD, Outcome.AGAIN})
_RETRYABLE: Final = {"retryable", "isretryable"}
_KEY_STARTS: Final = set("0123456789[$#/")
# 3, [3], events[3].IP, $.events[3], /events/3/IP; what follows a number must begin with a letter, unlike in an address.
_IN_PATH: Final = re.compile(
    r"(?:\$\.|#?/)?(?:events[./]?)?\[?(\d{1,9})\]?(?P<field>[./\[]['\"]?[A-Za-z_].*)?", re.ASCII | re.IGNORECASE
)


class TooMuchError(Exception):
    """An answer has more values, or deeper ones, than any that speaks of its batch."""


class Entries:
    """
    Reads the entries of one answer, and bounds how much of it is read.

    Args:
        events: How many were sent.
        event_ids: Of the events that were sent, in their order; asked for only if an EventId has to be found.

    Attributes:
        by_index: The events that are known by their index alone.
        has_stranger: An EventId was named that was not sent.
        has_wild_index: An index is out of range, or a row was named: no index is to be believed.
    """

    def __init__(self, events: int, event_ids: Callable[[], Sequence[str]]) -> None:
        self._events = events
        self._event_ids = event_ids
        self._indexes: dict[str, int] | None = None
        self._values_left = _VALUES_MIN + _VALUES_PER_EVENT * events
        self.by_index: set[int] = set()
        self.has_stranger = False
        self.has_wild_index = False

    def spend(self) -> None:
        """
        Count a value that is looked at.

        Raises:
            TooMuchError: There were too many.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise TooMuchError

    def go_down(self, depth: int) -> None:
        """
        Look into an object or a list.

        Raises:
            TooMuchError: It is nested too deep.
        """
        if depth > _DEPTH_MAX:
            raise TooMuchError

    def outcome_in(self, entry: dict[str, Any], depth: int) -> tuple[Outcome, int]:
        """Return what an object says of one event, and the number of its status."""
        seen: dict[Outcome, int] = {}
        self._collect(entry, depth, seen)
        bad, again = seen.get(Outcome.BAD), seen.get(Outcome.AGAIN)
        if Outcome.GOOD in seen and (bad is not None or again is not None or Outcome.PARTIAL in seen):
            return Outcome.UNKNOWN, 0
        if again is not None and not bad:
            return Outcome.AGAIN, again
        if bad is not None or Outcome.PARTIAL in seen:
            return Outcome.BAD, bad or 0
        if Outcome.UNKNOWN in seen or Outcome.WEAK in seen:
            return Outcome.UNKNOWN, 0
        return (Outcome.GOOD if Outcome.GOOD in seen else Outcome.NONE), 0

    def _collect(self, entry: dict[str, Any], depth: int, seen: dict[Outcome, int]) -> None:
        """Note what each field says; words that speak of failure count as `PARTIAL`."""
        self.go_down(depth)
        for name, value in entry.items():
            self.spend()
            role = role_of(name)
            if role in _SILENT and not isinstance(value, dict):
                if value is True and plain(name) in _RETRYABLE:
                    seen.setdefault(Outcome.AGAIN, 0)
                continue
            number: int | None
            if role in _FAILING:
                outcome, number = failure_of(value)
                if role is Role.UNPROCESSED and outcome is Outcome.BAD:
                    outcome = Outcome.AGAIN
                if isinstance(value, dict):
                    self._collect(value, depth + 1, seen)
                elif isinstance(value, list):
                    self._collect_all(value, depth + 1, seen)
            elif isinstance(value, dict):
                self._collect(value, depth + 1, seen)
                continue
            elif isinstance(value, list):
                self._collect_all(value, depth + 1, seen)
                continue
            elif role is Role.STATUS:
                outcome, number = outcome_of(value, is_code=is_code(name))
            elif role is Role.TAKEN:
                outcome, number = _flag(value), 0
            elif role is Role.KNOWN and value is True:
                outcome, number = Outcome.GOOD, 0
            elif isinstance(value, str) and speaks_of_failure(value):
                outcome, number = Outcome.PARTIAL, 0
            else:
                continue
            seen[outcome] = seen.get(outcome, 0) or number

    def _collect_all(self, values: list[Any], depth: int, seen: dict[Outcome, int]) -> None:
        self.go_down(depth)
        for value in values:
            self.spend()
            if isinstance(value, dict):
                self._collect(value, depth + 1, seen)
            elif isinstance(value, list):
                self._collect_all(value, depth + 1, seen)
            elif isinstance(value, str) and speaks_of_failure(value):
                seen.setdefault(Outcome.PARTIAL, 0)

    # Which event is meant --------------------------------------------------------------------------------------------

    def index_of(self, entry: dict[str, Any], depth: int) -> int | None:
        """Find which event an object is about; None if it does not say, or names none of the batch."""
        ids: set[int] = set()
        places: list[int | None] = []
        if not self._gather(entry, depth, ids, places):
            return None
        if ids:
            return next(iter(ids)) if len(ids) == 1 else None
        index = places[0] if len(set(places)) == 1 else None
        if index is not None:
            self.by_index.add(index)
        return index

    def _gather(self, entry: dict[str, Any], depth: int, ids: set[int], places: list[int | None]) -> bool:
        """Collect the events that an object names; False if it names one that was not sent."""
        self.go_down(depth)
        for name, value in entry.items():
            if isinstance(value, str):
                if (index := self.index_in(value, is_id=True)) is not None:
                    ids.add(index)
                elif plain(name) == "eventid" and value:
                    self.has_stranger = self.has_wild_index = True
                    return False
                elif plain(name) in _PLACES and (found := _IN_PATH.fullmatch(value)):
                    places.append(self._in_range(int(found[1])))
            elif isinstance(value, dict):
                if not self._gather(value, depth + 1, ids, places):
                    return False
            elif isinstance(value, list) and plain(name) in _PLACES:
                places += [self._in_range(step) for step in value[:_PLACE_STEPS] if type(step) is int][:1]
            elif (number := whole_number(value)) is not None:
                if role_of(name) is Role.INDEX:
                    places.append(self._in_range(number))
                elif plain(name) in _ROWS:
                    self.has_wild_index = True
        return True

    def looks_like_key(self, name: str) -> bool:
        """Return whether a name may be the EventId or index of an event."""
        return len(name) == _ID_LENGTH or name[:1] in _KEY_STARTS or "[" in name

    def index_in(self, name: str, *, is_id: bool = False) -> int | None:
        """Find the event that a text names by its EventId, or by its place in the batch."""
        if len(name) == _ID_LENGTH:
            if self._indexes is None:
                self._indexes = {event_id: index for index, event_id in enumerate(self._event_ids())}
            if (index := self._indexes.get(name.lower())) is not None:
                return index
        if is_id or len(name) > _WORDS_MAX or not (found := _IN_PATH.fullmatch(name)):
            return None
        return self.believed(int(found[1]))

    def believed(self, number: int) -> int | None:
        """Return an index that nothing else confirms; None if it is out of range."""
        index = self._in_range(number)
        if index is not None:
            self.by_index.add(index)
        return index

    def _in_range(self, number: int) -> int | None:
        """Return an index; None if it is out of range: then none is believed, as they may be counted from 1."""
        if 0 <= number < self._events:
            return number
        self.has_wild_index = True
        return None


def _flag(value: object) -> Outcome:
    """Return what a field of one event says that tells whether it was taken, such as `true`, `"false"` or 0."""
    number = int(value) if isinstance(value, bool) else count_of(value)
    if number is not None:
        return Outcome.BAD if number == 0 else Outcome.GOOD if number == 1 else Outcome.NONE
    outcome, _ = outcome_of(value)
    return outcome if outcome in _CLEAR else Outcome.NONE


def is_of_field(name: str) -> bool:
    """Return whether a name is the path to a field of an event, such as `events[3].IP`."""
    found = _IN_PATH.fullmatch(name)
    return found is not None and bool(found["field"])


def said(entry: object) -> str:
    """Put together what is said of one event: its field and the words, or all of it as JSON."""
    if isinstance(entry, str):
        return entry[:_WORDS_MAX]
    if isinstance(entry, dict):
        fields = {plain(name): value for name, value in entry.items()}
        words = next((fields[name] for name in _SAID if isinstance(fields.get(name), str) and fields[name]), "")
        field = fields.get("field")
        if words:
            return (f"{field}: {words}" if isinstance(field, str) and field else words)[:_WORDS_MAX]
    return msgspec.json.encode(entry).decode()[:_WORDS_MAX]
