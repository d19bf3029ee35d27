"""`producer | shipper pipe`."""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final

from tests.e2e.driver import Result
from tests.e2e.surroundings import spooled, unread_bytes
from tests.torture.journal import Process
from tests.torture.lanes import Lane
from tests.torture.records import Record

_PIPE_BYTES: Final = 1 << 20
_FED_BYTES: Final = 1 << 19  # at most in the pipe, so that a write is read as a whole
_IN_HAND: Final = "taken from the pipe by a process that was killed before it kept them"
_IN_HAND_WITHOUT_ROOM: Final = f"{_IN_HAND}, and that had met a full disk"


class PipeLane(Lane):
    """
    `producer | shipper pipe`; the pipe survives a crash, because the producer holds its other end.

    As after a broken pipe, the producer writes again what a killed process had read from the pipe and not stored. That
    must be no more than its last read.
    """

    name: ClassVar = "pipe"
    good_ends: ClassVar = frozenset({0, 3})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read_end, self._write_end = os.pipe()
        fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._lock = Lock()
        self._again: deque[int] = deque()
        self._fed: deque[tuple[int, int, int]] = deque()  # number, start and end, in bytes of this process's input
        self._fed_bytes = 0
        self._rest = b""  # of an incomplete line
        self._cut: set[int] = set()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        os.close(self._read_end)
        if self._write_end >= 0:
            os.close(self._write_end)

    def arguments(self) -> Sequence[str | Path]:
        return ["pipe", "--summary", "json", "--listen", "127.0.0.1:0"]

    def options(self) -> dict[str, Any]:
        return {"stdin": self._read_end}

    def produce(self) -> None:
        with self._lock:
            if unread_bytes(self._read_end) > _FED_BYTES or not (count := self.due()):
                return
            self._feed(min(count, 200), is_torn=self.rng.random() < 0.3)

    def finish_producing(self) -> None:
        while self._rest or self._again:
            with self._lock:
                if unread_bytes(self._read_end) < _FED_BYTES:
                    self._feed(min(len(self._again), 200), is_torn=False)
            time.sleep(0.01)

    def _feed(self, count: int, *, is_torn: bool) -> None:
        data, self._rest = self._rest, b""
        for left in reversed(range(count)):
            number, record = self._next()
            begin = self._fed_bytes + len(data)
            self._fed.append((number, begin, begin + len(record.line)))
            data += record.line
            if not record.rule:
                self.latest = number
            if is_torn and not left:
                cut = self.rng.randrange(1, len(record.line) // 2)
                data, self._rest = data[:-cut], data[-cut:]
        os.write(self._write_end, data)
        self._fed_bytes += len(data)

    def _next(self) -> tuple[int, Record]:
        if self._again:
            number = self._again.popleft()
            return number, self.make(number)
        return self.next_record()

    def after_end(self, result: Result, process: Process) -> None:
        """Take back what is left in the pipe, and what was read from it and not stored."""
        with self._lock:
            taken = self._fed_bytes
            while unread := unread_bytes(self._read_end):
                taken -= len(os.read(self._read_end, unread))
            again, in_hand = [], []
            kept = self._kept()
            for number, begin, end in self._fed:
                is_kept = self.has(number) or self.make(number).raw in kept
                if taken < end and not is_kept:  # a line without its newline is complete and may be stored
                    again.append(number)
                    if begin < taken:
                        self._cut.add(number)
                elif not is_kept:
                    in_hand.append(number)
                else:
                    assert not in_hand, (
                        f"records {in_hand} of the pipe were lost, but the later record {number} was stored"
                    )
            in_hand_bytes = sum(len(self.make(number).line) for number in in_hand)
            assert in_hand_bytes <= _PIPE_BYTES, f"{in_hand_bytes} bytes were read from the pipe and not stored"
            self.counts[_IN_HAND] += len(in_hand)
            self.counts[_IN_HAND_WITHOUT_ROOM] += len(in_hand) * process.met_full_disk
            self._cut.update(in_hand)
            self._again.extendleft(reversed([*in_hand, *again]))
            self._fed.clear()
            self._fed_bytes, self._rest = 0, b""

    def _kept(self) -> set[bytes]:
        lines = (line for _, content in spooled(self.shipper) for line in content.split(b"\n"))
        return {line.rstrip(b"\r") for line in lines} | {each.raw for each in self.shipper.read_state().dead_letters}

    def close(self) -> Result:
        os.close(self._write_end)
        self._write_end = -1  # otherwise leaving the context might close another file that got the number
        return self.finish()

    def torn_letters(self, letters: Sequence[bytes]) -> list[bytes]:
        lines = [self.make(number).line for number in self._cut]
        return [letter for letter in letters if any(line.startswith(letter) for line in lines)]
