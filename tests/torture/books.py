"""The books: what the service was sent, by which process, and whether that can know that it arrived."""

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


@dataclass(eq=False)
class Process:
    """
    A shipper that was started.

    Attributes:
        tag: Sent with each of its requests.
        is_dirty: It ended without having saved all that was settled, so the next one repeats some.
        stalls: When it was held, as pairs of begin and end.
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
    A request whose events were stored, all or some of them.

    Attributes:
        doubt: Why the sender may not know that they were; empty if it was told in time.
        is_given_up: The sender closed the connection after it, as it does when time is up, be the answer there or not.
    """

    process: Process
    at: float
    doubt: str = "no answer"
    is_given_up: bool = False

    def may_be_repeated_by(self, process: Process) -> str:
        """Return why a later process, or the same one, may send these events once more; empty = it may not."""
        own = self.process
        if self.doubt:
            return self.doubt
        if process.number != own.number and own.is_dirty:
            return "crash"
        if process is own and self.is_given_up:
            return "answer late"
        return "hold" if own.was_stalled(self.at - READ_TIMEOUT_S, self.at + READ_TIMEOUT_S) else ""


class Books:
    """What was stored, in what requests; lives longer than the server."""

    def __init__(self, seed: int, lanes: int) -> None:
        self.records = [Records(seed, lane) for lane in range(lanes)]
        self.processes: dict[str, Process] = {}
        self.first: dict[int, Delivery] = {}
        self.repeats: dict[int, list[Delivery]] = {}
        self.stored = [0] * lanes  # different ones, by lane
        self.bisects = 0
        self.requests: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def read(self, raw: bytes) -> Record | None:
        """Find what an event was made from, and compare; None if it is wrong."""
        try:
            event = msgspec.json.decode(raw)
            records = self.records[int(event["EventId"][9:13], 16)]
            record = records.of_event_id(event["EventId"])
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
        """Return why events were delivered more than once, and which of them without a reason."""
        reasons: Counter[str] = Counter()
        unexplained = []
        for key, repeats in self.repeats.items():
            deliveries = [self.first[key], *repeats]
            for count, later in enumerate(repeats, 1):
                found = [_reason(earlier, later) for earlier in deliveries[:count]]
                if all(found):
                    reasons[found[-1]] += 1
                else:
                    unexplained.append((key, f"{deliveries[found.index('')].process.tag}, then {later.process.tag}"))
        return reasons, unexplained


def _reason(earlier: Delivery, later: Delivery) -> str:
    if later.process.number < earlier.process.number:
        return "crash"  # on its way still when its sender was killed
    return earlier.may_be_repeated_by(later.process)


def _canonical(event: Any) -> str:
    return json.dumps(event, sort_keys=True)
