"""Who writes records at a rate, and knows which of them the service has."""

from __future__ import annotations

import time
from typing import Final

from tests.torture.books import Books
from tests.torture.records import Record

BACKLOG_MAX: Final = 15_000  # then the producer waits, as everything has to be delivered in the end


class Producer:
    """
    One source of records, whose books the service keeps.

    Args:
        number: Of its records in the books.
        rate: Records a second.

    Attributes:
        written: How many records were made for it so far.
        owed: How many of them the service has to get.
        letters: The records that must become dead letters, by their bytes, with the rule.
        latest: Number of the last one that was wholly written and that the service has to get.
    """

    def __init__(self, number: int, books: Books, *, rate: float) -> None:
        self.number = number
        self.books = books
        self.written = self.owed = 0
        self.letters: dict[bytes, str] = {}
        self.latest = -1
        self._rate = rate
        self._due_at = 0.0

    @property
    def backlog(self) -> int:
        """How many records are written, or about to be, that the service has to get and has not."""
        return self.owed - self.books.stored[self.number]

    def has(self, number: int) -> bool:
        """Return whether the service has a record."""
        return self.books.records[self.number].key(number) in self.books.first

    def make(self, number: int) -> Record:
        return self.books.records[self.number].make(number)

    def next_record(self) -> tuple[int, Record]:
        """Make one that was not made before; its number, too."""
        number = self.written
        record = self.make(number)
        if record.rule:
            self.letters[record.raw] = record.rule
        else:
            self.owed += 1
        self.written += 1
        return number, record

    def due(self) -> int:
        """Return how many records are to be written now, by the rate."""
        now = time.monotonic()
        if self.backlog > BACKLOG_MAX:
            self._due_at = now
            return 0
        self._due_at = max(self._due_at, now - 1)
        count = int((now - self._due_at) * self._rate)
        self._due_at += count / self._rate
        return count
