"""
Reads the results of events from a 2xx answer. No I/O.

The service documents no format, so only known forms count: everything that could indicate a failure must be understood,
and counts must add up to the batch; otherwise `Results.unclear` describes what was not understood. Refusals are
recognised in these forms, as the document itself or under a name such as `errors` or `rejected`:

    [{"index": 3, "EventId": "…", "message": "…"}]     by index, from 0, or by EventId; the EventId decides
    [3, 7]  ["…EventId…"]  {"3": "…"}  {"…EventId…": "…"}  {"events[3].IP": ["…"]}
    [{"EventId": "…", "status": 422, "error": "…"}]    a result for each event, identified or in the order of the batch
    3                                                  a count, which identifies no events

Rows, lines and positions are not trusted, as they may start at 1; nor are any indexes of an answer if one is out of
range.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from shipper.delivery.answer import Results
from shipper.delivery.answer_words import (
    Field,
    Outcome,
    Role,
    count_of,
    describe_field,
    field_of,
    indicates_failure,
    indicates_success,
    is_flag,
    is_permission,
    outcome_of,
    outcome_of_field,
    whole_number,
)
from shipper.model.wire import EVENT_ID_LENGTH

_DEPTH_MAX: Final = 12
_VALUES_MIN: Final = 10_000  # of any answer, plus a number per event
_VALUES_PER_EVENT: Final = 64
_WORDS_MAX: Final = 4_096
_KEY_STARTS: Final = set("0123456789[$#/")
# 3, [3], events[3].IP, $.events[3], /events/3/IP; what follows a number must begin with a letter, unlike in an address.
_PATH: Final = re.compile(
    r"(?:\$\.|#?/)?(?:events[./]?)?\[?(\d{1,9})\]?(?:[./\[]['\"]?[A-Za-z_].*)?", re.ASCII | re.IGNORECASE
)
_PATH_FIELDS: Final = {"path", "field", "pointer", "loc", "location", "source", "property", "parameter", "target"}
_PATH_STEPS: Final = 8
_ROW_FIELDS: Final = {"row", "rownumber", "line", "linenumber", "position"}  # may start at 1
_MESSAGE_FIELDS: Final = {"message", "msg", "text"}
_REASONS: Final = ("message", "error", "reason", "description", "detail", "errors", "title", "errormessage", "msg")
_ERRORS: Final = {Role.REFUSED, Role.RETRIED, Role.ERROR}
_RESULTS: Final = {Role.RESULTS, Role.STATUS, Role.TOTAL, Role.ACCEPTED}
_IGNORED: Final = {Role.HARMLESS, Role.INDEX, Role.LINKS}
_COUNTED: Final = {*_ERRORS, *_RESULTS, Role.PART, Role.REPEATED} - {Role.ERROR, Role.STATUS}
_GOOD: Final = {Outcome.GOOD, Outcome.NONE}
_BAD: Final = {Outcome.BAD, Outcome.RETRY}
_RETRY_STATUS: Final = 503  # for words such as "throttled" without a number
_RECORD_STATUSES: Final = {400, 409, 413, 415, 422}  # errors that an event may cause


def read_results(document: object, events: int, event_ids: Callable[[], Sequence[str]]) -> Results:
    """Read the results of the events; `event_ids` is called only if an EventId must be looked up."""
    reader = _Reader(events, event_ids)
    try:
        reader.read(document)
    except (_TooLargeError, RecursionError):  # a deeply nested document may be decodable but not encodable
        return Results(unclear="the answer is too long or nested too deeply")
    return reader.results()


class _TooLargeError(Exception):
    """An answer has more values, or is nested deeper, than any real answer."""


class _Statement(NamedTuple):
    field: Field
    value: object
    number: int


class _Statements:
    """The statements about the batch, or about one event."""

    def __init__(self) -> None:
        self.by_outcome: dict[Outcome, _Statement] = {}  # the first field of each outcome, with the first status
        self.ids: set[int] = set()  # of events identified by EventId
        self.indexes: set[int | None] = set()  # of events identified by index; None = out of range
        self.has_unknown_id = False  # an EventId was not sent

    def note(self, outcome: Outcome, field: Field, value: object, number: int = 0) -> None:
        previous = self.by_outcome.get(outcome)
        if previous is None:
            self.by_outcome[outcome] = _Statement(field, value, number)
        elif number and not previous.number:
            self.by_outcome[outcome] = previous._replace(number=number)

    def of_event(self) -> tuple[Outcome, int]:
        """Return the outcome of one event, and its status."""
        statements = self.by_outcome
        bad, retry = statements.get(Outcome.BAD), statements.get(Outcome.RETRY)
        if Outcome.GOOD in statements and (bad or retry or Outcome.PARTIAL in statements):
            return Outcome.UNKNOWN, 0
        if retry and not (bad and bad.number):
            return Outcome.RETRY, retry.number
        if bad or Outcome.PARTIAL in statements:
            return Outcome.BAD, bad.number if bad else 0
        if Outcome.UNKNOWN in statements or Outcome.WEAK in statements:
            return Outcome.UNKNOWN, 0
        return (Outcome.GOOD if Outcome.GOOD in statements else Outcome.NONE), 0


class _Entry(NamedTuple):
    outcome: Outcome
    status: int = 0
    event: int | None = None  # index of the event; None = it identifies none of the batch


class _Reader:
    """
    Reads one answer.

    `_batch` contains statements about the whole batch, `_counts` counts by the role of their field. Single events are
    `_rejected` or `_retried`; errors that identify no event are only counted. `_by_index` contains the events that are
    identified only by index, which is not trusted if `_has_untrusted_index`.
    """

    def __init__(self, events: int, event_ids: Callable[[], Sequence[str]]) -> None:
        self._events = events
        self._event_ids = event_ids
        self._indexes: dict[str, int] | None = None
        self._values_left = _VALUES_MIN + _VALUES_PER_EVENT * events
        self._batch = _Statements()
        self._counts: defaultdict[Role, list[_Statement]] = defaultdict(list)
        self._rejected: dict[int, str] = {}
        self._retried: set[int] = set()
        self._unnamed = self._unnamed_retried = 0
        self._by_index: set[int] = set()
        self._has_unknown_id = False
        self._has_untrusted_index = False  # an index is out of range, or there is a row number
        self._unclear = ""

    def _count_value(self, depth: int) -> None:
        self._values_left -= 1
        if self._values_left < 0 or depth > _DEPTH_MAX:
            raise _TooLargeError

    def _set_unclear(self, field: Field, value: object, why: str) -> None:
        self._unclear = self._unclear or f"{describe_field(field, value)} {why}"

    def _add_refusal(self, index: int | None, reason: str, *, is_retried: bool) -> None:
        """Record an event that was not accepted; index None = unidentified."""
        if index is None:
            self._unnamed_retried += is_retried
            self._unnamed += not is_retried
        elif is_retried:
            self._retried.add(index)
        else:
            self._rejected.setdefault(index, reason)

    # The whole batch -------------------------------------------------------------------------------------------------

    def read(self, document: object) -> None:
        field = field_of("")
        if isinstance(document, dict):
            self._read_object(document, 0)
        elif isinstance(document, list):
            self._read_list(field, Role.RESULTS, document, 0)
        elif isinstance(document, str):
            if indicates_failure(document, self._events):
                self._set_unclear(field, document, "indicates a failure")
            elif document.strip() and not indicates_success(document):
                self._set_unclear(field, document, "is not understood")
        elif document is False:
            self._batch.note(Outcome.BAD, field, document)
        elif isinstance(document, int | float) and document is not True and document != self._events:
            self._set_unclear(field, document, "is not a number of events")

    def _read_object(self, document: dict[str, Any], depth: int) -> None:
        entries = []
        for name, value in document.items():
            self._count_value(depth)
            field = field_of(name)
            if _looks_like_key(name) and self._index_in(name) is not None:
                entries.append(_as_entry(name, value))
            elif field.role is Role.LINKS:
                pass
            elif isinstance(value, list) or (value == {} and field.role is Role.ACCEPTED):
                self._read_list(field, field.role, list(value), depth)
            elif not isinstance(value, dict):
                self._read_scalar(field, value)
            elif value and field.role in {Role.REFUSED, Role.RETRIED}:
                self._read_refusals_by_key(field, value, depth + 1)
            else:
                if field.role in _ERRORS:
                    self._batch.note(Outcome.BAD if value else Outcome.GOOD, field, value)
                self._read_object(value, depth + 1)
        if entries:
            self._read_list(field_of(""), Role.RESULTS, entries, depth)

    def _read_scalar(self, field: Field, value: object) -> None:
        role, count = field.role, count_of(value)
        if role in _COUNTED and not is_flag(field, value):
            if count is not None:
                return self._read_count(field, value, count)
            if _is_number(value) and role is not Role.RESULTS:
                return self._set_unclear(field, value, "is not a number of events")
        outcome, number = outcome_of_field(field, value, self._events)
        if role in {Role.REFUSED, Role.RETRIED} and outcome is not Outcome.NONE:
            if isinstance(value, str):
                return self._add_refusal(self._index_in(value, is_id=True), "", is_retried=role is Role.RETRIED)
            outcome = Outcome.PARTIAL
        elif role in {Role.REFUSED, Role.ERROR} and outcome is Outcome.NONE:
            outcome = Outcome.GOOD
        elif role is Role.MESSAGE and outcome is Outcome.NONE and isinstance(value, str):
            if outcome_of(value)[0] is Outcome.GOOD:
                outcome = Outcome.GOOD
            elif value and field.plain in _MESSAGE_FIELDS and not indicates_success(value):
                outcome = Outcome.WEAK
        elif value is False and role is Role.OTHER and is_permission(field):
            outcome = Outcome.BAD
        elif value is False and role in {Role.RESULTS, Role.PART}:
            outcome = Outcome.WEAK if role is Role.PART else Outcome.UNKNOWN
        if outcome is Outcome.UNKNOWN:
            self._set_unclear(field, value, "is unknown")
        elif outcome is not Outcome.NONE:
            self._batch.note(outcome, field, value, number)

    def _read_count(self, field: Field, value: object, count: int) -> None:
        if field.role is Role.RETRIED:
            self._unnamed_retried += count
        else:
            role = Role.TOTAL if field.role is Role.RESULTS else field.role
            self._counts[role].append(_Statement(field, value, count))
        if field.role is Role.REFUSED and count == 0:
            self._batch.note(Outcome.GOOD, field, value)

    # Lists -----------------------------------------------------------------------------------------------------------

    def _read_refusals_by_key(self, field: Field, entries: dict[str, Any], depth: int) -> None:
        """Read an object of events that were not accepted: a single one, many by index or EventId, or a count."""
        role = field.role
        if self._entry(entries, depth).event is not None:
            return self._read_list(field, role, [entries], depth)
        for name, value in entries.items():
            self._count_value(depth)
            inner, count = field_of(name), count_of(value)
            if value is None or value is False or value in ("", [], {}):
                continue
            if _looks_like_key(name) and count != 0:
                self._read_list(field, role, [_as_entry(name, value)], depth)
            elif count is not None and inner.role in {Role.TOTAL, Role.REFUSED}:
                self._counts[Role.REFUSED].append(_Statement(inner, value, count))
            elif isinstance(value, list) and inner.role in {Role.RESULTS, Role.REFUSED}:
                self._read_list(inner, role, value, depth)
            else:
                self._add_refusal(None, "", is_retried=role is Role.RETRIED)

    def _read_list(self, field: Field, role: Role, values: list[Any], depth: int) -> None:
        entries = self._elements(field, role, values, depth)
        if role in _RESULTS:
            self._read_results(field, values, entries)
        elif role in _ERRORS:
            if not values:
                self._batch.note(Outcome.GOOD, field, values)
            for entry, value in zip(entries, values, strict=True):
                self._read_error(field, role, entry, value)
        else:
            if role in {Role.PART, Role.REPEATED}:
                self._counts[role].append(_Statement(field, values, len(values)))
            for entry in entries:
                if entry.outcome not in _GOOD:
                    self._set_unclear(field, values, "is not understood")
                if entry.event is not None and role is not Role.REPEATED:
                    self._set_unclear(field, values, "names events without a reason")

    def _read_error(self, field: Field, role: Role, entry: _Entry, value: object) -> None:
        if entry.outcome is Outcome.GOOD:
            self._set_unclear(field, value, "has a successful entry")
        is_retried = role is Role.RETRIED or entry.outcome is Outcome.RETRY
        is_of_batch = 400 <= entry.status < 500 and entry.status not in _RECORD_STATUSES
        if entry.event is None and is_of_batch and not is_retried:
            self._batch.note(Outcome.BAD, field, value, entry.status)
        else:
            reason = _reason_in(value) if isinstance(value, dict) else ""
            self._add_refusal(entry.event, reason, is_retried=is_retried)

    def _read_results(self, field: Field, values: list[Any], entries: list[_Entry]) -> None:
        """Read a list of results of all or some events."""
        is_in_order = len(entries) == self._events and not self._has_untrusted_index
        if is_in_order and all(entry.event is None for entry in entries):
            entries = [entry._replace(event=index) for index, entry in enumerate(entries)]
        good: list[int | None] = []
        bad: set[int | None] = set()
        for entry, value in zip(entries, values, strict=True):
            if entry.outcome in _GOOD:
                good.append(entry.event)
            elif entry.outcome in _BAD and field.role is not Role.ACCEPTED:
                bad.add(entry.event)
                self._add_refusal(entry.event, _reason_in(value), is_retried=entry.outcome is Outcome.RETRY)
            else:
                self._set_unclear(field, values, "has an entry that is not understood")
        named = {index for index in good if index is not None}
        if named & bad:
            self._set_unclear(field, values, "contradicts itself")
        if good and (self._has_unknown_id or (named and None in good)):
            self._set_unclear(field, values, "has an entry for an event that is not in the batch")
        if good or field.role is Role.ACCEPTED:
            self._counts[Role.ACCEPTED].append(_Statement(field, values, len(named) + good.count(None)))

    def _elements(self, field: Field, role: Role, values: list[Any], depth: int) -> list[_Entry]:
        read = self._error if role in _ERRORS else self._result if role in _RESULTS else self._other
        entries = []
        for value in values:
            self._count_value(depth)
            is_object = isinstance(value, dict)
            entries.append(self._entry(value, depth + 1) if is_object else read(field, value, depth + 1))
        return entries

    def _error(self, field: Field, value: object, depth: int) -> _Entry:
        """Read an element of a list of refusals: an index, an EventId or a text."""
        number = whole_number(value)
        if number is not None:
            return _Entry(Outcome.BAD, event=self._untrusted_index(number) if "code" not in field.plain else None)
        if not isinstance(value, str):
            self._set_unclear(field, value, "is not understood")
        return _Entry(Outcome.BAD, event=self._index_in(value) if isinstance(value, str) else None)

    def _result(self, field: Field, value: object, depth: int) -> _Entry:
        """Read an element of a list of results: the EventId or index of an accepted event, an id, or a status."""
        index = self._index_in(value, is_id=True) if isinstance(value, str) else None
        is_accepted = field.role is Role.ACCEPTED
        is_id = (is_accepted or field.plain.endswith("ids")) and type(value) in {str, int}
        if is_accepted and type(value) is int:
            index = self._untrusted_index(value)
        if index is not None or is_id:
            return _Entry(Outcome.NONE, event=index)
        outcome, _ = outcome_of(value)
        return _Entry(Outcome.UNKNOWN if outcome in {Outcome.WEAK, Outcome.NONE} else outcome)

    def _other(self, field: Field, value: object, depth: int) -> _Entry:
        """Read an element that is harmless unless it indicates a failure."""
        if isinstance(value, list):
            self._read_list(field, Role.OTHER, value, depth)
        if not isinstance(value, str):
            return _Entry(Outcome.NONE)
        if indicates_failure(value, self._events):
            self._batch.note(Outcome.PARTIAL, field, value)
        return _Entry(Outcome.NONE, event=self._index_in(value, is_id=True))

    # One entry -------------------------------------------------------------------------------------------------------

    def _entry(self, value: dict[str, Any], depth: int) -> _Entry:
        statements = _Statements()
        self._collect(value.items(), depth, statements)
        outcome, status = statements.of_event()
        if statements.has_unknown_id:
            self._has_unknown_id = self._has_untrusted_index = True
            return _Entry(outcome, status)
        named = statements.ids or statements.indexes
        index = next(iter(named)) if len(named) == 1 else None
        if index is not None and not statements.ids:
            self._by_index.add(index)
        return _Entry(outcome, status, index)

    def _collect(
        self, fields: Iterable[tuple[str, Any]], depth: int, statements: _Statements, *, is_in_list: bool = False
    ) -> None:
        """Collect the statements of an entry, and its event; events in nested lists are others."""
        for name, value in fields:
            self._count_value(depth)
            field = field_of(name)
            if not is_in_list:
                self._collect_names(field, value, statements)
            is_container = isinstance(value, dict | list)
            if not is_container or (value and field.role in _ERRORS):
                outcome, number = outcome_of_field(field, value)
                if outcome is not Outcome.NONE:
                    statements.note(outcome, field, value, number)
            if isinstance(value, dict):
                self._collect(value.items(), depth + 1, statements, is_in_list=is_in_list)
            elif isinstance(value, list) and field.role not in _IGNORED:
                self._collect((("", item) for item in value), depth + 1, statements, is_in_list=True)

    def _collect_names(self, field: Field, value: object, statements: _Statements) -> None:
        number = whole_number(value)
        if isinstance(value, str):
            if (index := self._index_in(value, is_id=True)) is not None:
                statements.ids.add(index)
            elif field.plain == "eventid" and value:
                statements.has_unknown_id = True
            elif field.plain in _PATH_FIELDS and (path := _PATH.fullmatch(value)):
                statements.indexes.add(self._in_range(int(path[1])))
        elif isinstance(value, list) and field.plain in _PATH_FIELDS:
            statements.indexes.update([self._in_range(step) for step in value[:_PATH_STEPS] if type(step) is int][:1])
        elif number is not None and field.role is Role.INDEX:
            statements.indexes.add(self._in_range(number))
        elif number is not None and field.plain in _ROW_FIELDS:
            self._has_untrusted_index = True

    def _index_in(self, text: str, *, is_id: bool = False) -> int | None:
        """Return the index of the event that a text identifies by EventId or by index."""
        if len(text) == EVENT_ID_LENGTH:
            if self._indexes is None:
                self._indexes = {event_id: index for index, event_id in enumerate(self._event_ids())}
            if (index := self._indexes.get(text.lower())) is not None:
                return index
        if is_id or len(text) > _WORDS_MAX or not (path := _PATH.fullmatch(text)):
            return None
        return self._untrusted_index(int(path[1]))

    def _untrusted_index(self, number: int) -> int | None:
        """Return an index that no EventId confirms; None if it is out of range."""
        index = self._in_range(number)
        if index is not None:
            self._by_index.add(index)
        return index

    def _in_range(self, number: int) -> int | None:
        """Return an index, or None if it is out of range; then no index is trusted, as they may start at 1."""
        if 0 <= number < self._events:
            return number
        self._has_untrusted_index = True
        return None

    # Summary --------------------------------------------------------------------------------------------------------

    def results(self) -> Results:
        if self._has_untrusted_index:
            self._discard_untrusted_indexes()
        self._retried.difference_update(self._rejected)
        statements, refused, accepted = self._batch.by_outcome, self._numbers(Role.REFUSED), self._counts[Role.ACCEPTED]
        bad, retry = statements.get(Outcome.BAD), statements.get(Outcome.RETRY)
        failure = bad or retry
        named = len(self._rejected) + len(self._retried)
        # If everything failed, unidentified events do not count.
        unnamed = max(int(self._unnamed > 0 and not failure), max(refused, default=0) - named)
        is_refusing = bool(named or unnamed or self._unnamed_retried)
        partial, weak = statements.get(Outcome.PARTIAL), statements.get(Outcome.WEAK)
        if partial and not (is_refusing or failure):
            self._set_unclear(partial.field, partial.value, "indicates a failure")
        if weak and not (Outcome.GOOD in statements or accepted or failure):
            self._set_unclear(weak.field, weak.value, "may mean success or failure")
        return Results(
            rejected=self._rejected,
            retried=frozenset(self._retried),
            unnamed=unnamed,
            has_unnamed_retries=self._unnamed_retried > 0,
            failure=describe_field(*failure) if failure else "",
            status=(bad.number if bad else 0) or (retry.number or _RETRY_STATUS if retry else 0),
            unclear=self._unclear or self._contradiction(named, unnamed),
            has_event_results=is_refusing or bool(refused or accepted or self._counts[Role.PART]),
        )

    def _numbers(self, role: Role) -> list[int]:
        return [count.number for count in self._counts[role]]

    def _discard_untrusted_indexes(self) -> None:
        """Count events identified only by index as unidentified."""
        for index in self._by_index:
            self._unnamed += self._rejected.pop(index, None) is not None
            if index in self._retried:
                self._retried.remove(index)
                self._unnamed_retried += 1

    def _contradiction(self, named: int, unnamed: int) -> str:
        """Describe a count that does not add up; return "" if all do."""
        events, repeated = self._events, sum(self._numbers(Role.REPEATED))
        refused, parts = sum(self._numbers(Role.REFUSED)), self._counts[Role.PART]
        minimum = named + unnamed + (self._unnamed_retried > 0)
        maximum = max(named + self._unnamed + self._unnamed_retried, refused)  # several errors may be about one event
        if self._counts[Role.REFUSED] and named > refused:
            return f"it names {named} events as refused, and counts fewer"
        if max(minimum, repeated) > events:
            return f"its counts do not add up: {max(minimum, repeated)} of {events} events"
        accepted = self._counts[Role.ACCEPTED]
        if parts:
            accepted = [*accepted, parts[0]._replace(number=sum(self._numbers(Role.PART)))]
        for field, value, number in accepted:
            # Repeated events may be included in the accepted ones or not.
            remaining = events - number
            if not (minimum <= remaining <= maximum or minimum <= remaining - repeated <= maximum):
                return f"{describe_field(field, value)} does not add up: {number} of {events} events"
        for field, value, number in self._counts[Role.TOTAL]:
            if number != events:
                return f"{describe_field(field, value)} does not add up: {number} of {events} events"
        return ""


def _looks_like_key(name: str) -> bool:
    """Return whether a key may be the EventId or index of an event."""
    return len(name) == EVENT_ID_LENGTH or name[:1] in _KEY_STARTS or "[" in name


def _as_entry(key: str, value: object) -> dict[str, object]:
    """Make an entry from a value and its key, an index or EventId."""
    if isinstance(value, dict):
        return {**value, "pointer": key}
    if isinstance(value, list):
        return {"pointer": key, "errors": value}
    return {"pointer": key, "status": value, "message": value}


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value.isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reason_in(entry: object) -> str:
    """Return why an event was not accepted: field and message, or the whole entry as JSON."""
    if isinstance(entry, str):
        return entry[:_WORDS_MAX]
    if isinstance(entry, dict):
        fields = {field_of(name).plain: value for name, value in entry.items()}
        reason = next((fields[name] for name in _REASONS if isinstance(fields.get(name), str) and fields[name]), "")
        field = fields.get("field")
        if reason:
            return (f"{field}: {reason}" if isinstance(field, str) and field else reason)[:_WORDS_MAX]
    return msgspec.json.encode(entry).decode()[:_WORDS_MAX]
