"""The journal: the records of each producer, and the deliveries to the service by each process."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tests.torture.records import POISON, Record, Records

READ_TIMEOUT_S: Final = 4.0  # of the shippers
BACKLOG_MAX: Final = 15_000  # producers wait above it, because everything must be delivered in the end


@dataclass(eq=False)
class Process:
    """
    A shipper that was started.

    Attributes:
        tag: Sent with each request.
        is_dirty: It ended without saving all settled records, so the next process repeats some.
        stalls: When it was stopped by SIGSTOP, as pairs of start and end.
    """

    tag: str
    number: int
    is_dirty: bool = False
    met_full_disk: bool = False
    met_failed_fsync: bool = False
    stalls: list[tuple[float, float]] = field(default_factory=list)

    def was_stalled(self, start: float, end: float) -> bool:
        return any(begin <= end and start <= until for begin, until in self.stalls)


@dataclass(eq=False, slots=True)
class Delivery:
    """
    A request of which at least some events were stored.

    Attributes:
        doubt: Why the sender may not know that they were stored; empty if it received the answer in time.
        is_given_up: The sender closed the connection after the request, possibly because of a timeout.
    """

    process: Process
    at: float
    doubt: str = "no answer"
    is_given_up: bool = False

    def may_be_repeated_by(self, process: Process) -> str:
        """Return why a process may send these events again; empty = it may not."""
        own = self.process
        if process.number < own.number:
            return "crash"  # the request was still in flight when its sender was killed
        if self.doubt:
            return self.doubt
        if process.number != own.number and own.is_dirty:
            return "crash"
        if process is own and self.is_given_up:
            return "answer late"
        return "hold" if own.was_stalled(self.at - READ_TIMEOUT_S, self.at + READ_TIMEOUT_S) else ""


class Journal:
    """The stored events and their requests; outlives the server."""

    def __init__(self, records: Iterable[Records]) -> None:
        self.records = [*records]
        self.processes: dict[str, Process] = {}
        self.first: dict[int, Delivery] = {}
        self.repeats: dict[int, list[Delivery]] = {}
        self.stored = [0] * len(self.records)  # distinct events, by producer
        self.bisects = 0
        self.requests: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def read(self, raw: bytes) -> Record | None:
        """Return the record of an event, or None if the event is not as expected."""
        try:
            event = msgspec.json.decode(raw)
            record = self.records[int(event["EventId"][9:13], 16)].of_event_id(event["EventId"])
        except (ValueError, IndexError, KeyError, TypeError):
            record, event = None, None
        if record is None:
            self.wrong.append(f"invented: {raw!r}")
        elif (raw != record.raw) if record.is_verbatim else (_canonical(event) != _canonical(record.event)):
            self.wrong.append(f"altered: {raw!r} instead of {record.event!r}")
        elif record.rule not in {"", POISON}:
            self.wrong.append(f"sent although it breaks the rule {record.rule}: {raw!r}")
        else:
            return record
        return None

    def store(self, records: Iterable[Record], process: Process) -> Delivery:
        delivery = Delivery(process, time.monotonic())
        with self.lock:
            for record in records:
                if record.key in self.first:
                    self.repeats.setdefault(record.key, []).append(delivery)
                else:
                    self.first[record.key] = delivery
                    self.stored[record.key >> 40] += 1
        return delivery

    def reasons(self) -> tuple[Counter[str], list[tuple[int, str]]]:
        """Return the reasons for repeated deliveries, and the repeats without a reason."""
        reasons: Counter[str] = Counter()
        unexplained = []
        for key, repeats in self.repeats.items():
            deliveries = [self.first[key], *repeats]
            for number, later in enumerate(repeats, 1):
                each = [earlier.may_be_repeated_by(later.process) for earlier in deliveries[:number]]
                if all(each):
                    reasons[each[-1]] += 1
                else:
                    unexplained.append((key, f"{deliveries[each.index('')].process.tag}, then {later.process.tag}"))
        return reasons, unexplained


def _canonical(event: Any) -> str:
    return json.dumps(event, sort_keys=True)


class Producer:
    """
    One source of records; the service keeps the journal.

    Args:
        number: The index of its records in the journal.
        rate: Records per second.

    Attributes:
        written: Number of records created so far.
        owed: Number of records that the service must get.
        letters: The rule of each record that must become a dead letter, by its bytes.
        latest: Number of the last completely written record that the service must get.
        counts: Number of occurrences, by kind of event.
    """

    name: str

    def __init__(self, number: int, journal: Journal, *, rate: float) -> None:
        self.number = number
        self.journal = journal
        self.written = self.owed = 0
        self.letters: dict[bytes, str] = {}
        self.latest = -1
        self.counts: Counter[str] = Counter()
        self._rate = rate
        self._due_at = 0.0

    @property
    def backlog(self) -> int:
        """Number of owed records, written or about to be, that the service does not have."""
        return self.owed - self.journal.stored[self.number]

    def has(self, number: int) -> bool:
        """Return whether the service has a record."""
        return self.journal.records[self.number].key(number) in self.journal.first

    def is_missing(self, number: int) -> bool:
        """Return whether the service must get a record and does not have it."""
        return not self.has(number) and not self.make(number).rule

    def make(self, number: int) -> Record:
        return self.journal.records[self.number].make(number)

    def next_record(self) -> tuple[int, Record]:
        """Create the next record; return its number and the record."""
        number = self.written
        record = self.make(number)
        if record.rule:
            self.letters[record.raw] = record.rule
        else:
            self.owed += 1
        self.written += 1
        return number, record

    def due(self) -> int:
        """Return the number of records to write now, according to the rate."""
        now = time.monotonic()
        if self.backlog > BACKLOG_MAX:
            self._due_at = now
            return 0
        self._due_at = max(self._due_at, now - 1)
        count = int((now - self._due_at) * self._rate)
        self._due_at += count / self._rate
        return count
