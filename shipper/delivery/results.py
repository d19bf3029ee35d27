"""
What an answer says of single events: read leniently, as the service documents no form of it. Pure.

Known forms, each as the document itself or under a name such as `errors`, `rejected`, `failed_records` or `results`:

    [{"index": 3, "EventId": "…", "message": "…"}]     by index, from 0, or by EventId; the EventId decides
    [3, 7]  ["…EventId…"]  {"3": "…"}  {"…EventId…": "…"}  {"events[3].IP": ["…"]}
    [{"EventId": "…", "status": 422, "error": "…"}]    a result for each event, good ones included
    3                                                  a count, which names nobody
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

_WORDS_MAX: Final = 4_096
_REJECTED: Final = (
    "rejected", "errors", "failed", "failed_records", "failures", "invalid", "rejected_events", "failed_events",
    "rejectedevents", "failedevents", "failedrecords", "rejectedcount", "rejected_count", "failedcount", "failed_count",
)  # fmt: skip
_EACH: Final = ("results", "items", "events", "responses")
_INDEX: Final = ("index", "row", "position")
_ID: Final = ("eventid", "event_id", "id", "insert_id")
_WORDS: Final = ("message", "error", "reason", "description", "detail", "errors", "title")
_BAD: Final = {"rejected", "refused", "error", "failed", "failure", "invalid"}
_IN_PATH: Final = re.compile(
    r"(?:events)?\[?(\d{1,9})\]?(?:[.\[].*)?", re.ASCII | re.IGNORECASE
)  # 3, [3], events[3].IP
_RETRIED: Final = {408, 425, 429}


class Results(Struct, frozen=True):
    """
    Attributes:
        rejected: By the index of the event in the batch: what the service says.
        retried: Indexes of events that the service could not take for now.
        unnamed: How many more it refused without saying which.
    """

    rejected: dict[int, str] = {}
    retried: frozenset[int] = frozenset()
    unnamed: int = 0


ALL_TAKEN: Final = Results()


def read_results(document: object, event_ids: Callable[[], Sequence[str]]) -> Results:
    """
    Find the events that were not taken.

    Args:
        document: The answer's, decoded.
        event_ids: Of the events that were sent, in their order; asked for only if an EventId or index has to be found.
    Returns:
        `ALL_TAKEN`, the very object, if the document says nothing of single events.
    """
    reading = _Reading(event_ids)
    if isinstance(document, list):
        reading.read_each(document)
    elif isinstance(document, dict):
        lowered = {str(name).lower(): value for name, value in document.items()}
        for name in _REJECTED:
            if name in lowered:
                reading.read_rejected(lowered[name])
        for name in _EACH:
            if isinstance(lowered.get(name), list):
                reading.read_each(lowered[name])
    return reading.results()


class _Reading:
    def __init__(self, event_ids: Callable[[], Sequence[str]]) -> None:
        self._event_ids = event_ids
        self._indexes: dict[str, int] | None = None
        self._rejected: dict[int, str] = {}
        self._retried: set[int] = set()
        self._nameless = 0
        self._counted = 0
        self._has_results = False

    def results(self) -> Results:
        unnamed = max(self._nameless, self._counted - len(self._rejected))
        if not (self._rejected or self._retried or unnamed > 0 or self._has_results):
            return ALL_TAKEN
        return Results(self._rejected, frozenset(self._retried), max(0, unnamed))

    def read_rejected(self, value: object) -> None:
        """Read what stands under a name that says that it was rejected."""
        if isinstance(value, bool):
            return
        if isinstance(value, int):
            self._counted = max(self._counted, value)
        elif isinstance(value, dict):
            for name, words in value.items():
                self._reject(_index_in(name), name, _said(words))
        elif isinstance(value, list):
            for entry in value:
                self._read_rejection(entry)
        elif isinstance(value, str) and value:
            self._nameless += 1

    def read_each(self, entries: list[Any]) -> None:
        """Read a list that may hold a result for each event, the good ones included."""
        for entry in entries:
            if not isinstance(entry, dict):
                continue
            lowered = {str(name).lower(): value for name, value in entry.items()}
            status = lowered.get("status", lowered.get("statuscode", lowered.get("code")))
            if not _is_result(lowered, status):
                continue
            self._has_results = True
            if _is_good(lowered, status):
                continue
            index = self._index_of(lowered)
            if index is not None and isinstance(status, int) and (status >= 500 or status in _RETRIED):
                self._retried.add(index)
            else:
                self._note(index, _said(entry))

    def _read_rejection(self, entry: object) -> None:
        if isinstance(entry, dict):
            lowered = {str(name).lower(): value for name, value in entry.items()}
            self._note(self._index_of(lowered), _said(entry))
        else:
            self._reject(entry, entry, "")

    def _reject(self, index: object, event_id: object, words: str) -> None:
        self._note(self._index_of({"index": index, "eventid": event_id}), words)

    def _note(self, index: int | None, words: str) -> None:
        if index is None:
            self._nameless += 1
        else:
            self._rejected.setdefault(index, words)

    def _index_of(self, entry: dict[str, Any]) -> int | None:
        """Find which event is meant; None if it is none of the batch."""
        if self._indexes is None:
            self._indexes = {event_id: index for index, event_id in enumerate(self._event_ids())}
        for event_id in _values(entry, _ID):
            if isinstance(event_id, str) and (index := self._indexes.get(event_id.lower())) is not None:
                return index
        for index in _values(entry, _INDEX):
            if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(self._indexes):
                return index
        return None


def _values(entry: dict[str, Any], names: Sequence[str]) -> Iterator[Any]:
    return (entry[name] for name in names if name in entry)


def _index_in(name: object) -> int | None:
    found = _IN_PATH.fullmatch(name.removeprefix("$.")) if isinstance(name, str) else None
    return int(found[1]) if found else None


def _is_result(entry: dict[str, Any], status: object) -> bool:
    is_told = status is not None or any(isinstance(entry.get(name), bool) for name in ("success", "accepted", "ok"))
    return is_told or bool(entry.get("error") or entry.get("errors"))


def _is_good(entry: dict[str, Any], status: object) -> bool:
    if any(entry.get(name) is False for name in ("success", "accepted", "ok")):
        return False
    if isinstance(status, int) and not isinstance(status, bool):
        return status < 400
    if isinstance(status, str):
        return int(status) < 400 if status.isascii() and status.isdigit() else status.lower() not in _BAD
    return not (entry.get("error") or entry.get("errors"))


def _said(entry: object) -> str:
    """Put together what is said of one event: its field and the words, or all of it as JSON."""
    if isinstance(entry, str):
        return entry[:_WORDS_MAX]
    if isinstance(entry, dict):
        lowered = {str(name).lower(): value for name, value in entry.items()}
        words = next((value for value in _values(lowered, _WORDS) if isinstance(value, str) and value), "")
        field = lowered.get("field")
        if words:
            return (f"{field}: {words}" if isinstance(field, str) and field else words)[:_WORDS_MAX]
    return msgspec.json.encode(entry).decode()[:_WORDS_MAX]
