"""The lane of exports."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.e2e.driver import Result
from tests.e2e.files import COMPRESSIONS
from tests.torture.journal import BACKLOG_MAX, Process
from tests.torture.lanes import Lane

_FOREIGN_LINES = 5_000


class BackfillLane(Lane):
    """Plain and compressed exports that `shipper backfill` ships again and again, like a cron job."""

    name: ClassVar = "backfill"
    good_ends: ClassVar = frozenset({0, 3})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._folder = self.shipper.folder / "exports"
        self._folder.mkdir()
        self._size = self.rng.randrange(100, 400)
        self._exports = 0
        self._is_shipped = True
        self._drops = 0
        self._foreign: set[bytes] = set()
        self._foreign_path = self._folder
        self._completion = self.rng.choice(["keep", "delete"])

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "input.on_complete": self._completion}

    def arguments(self) -> Sequence[str | Path]:
        return ["backfill", self._folder, "--summary", "json", "--listen", "127.0.0.1:0"]

    def produce(self) -> None:
        """Do nothing: `tend` writes the exports."""

    def finish_producing(self) -> None:
        self._due_at = float("inf")

    def tend(self) -> None:
        if self.running is not None and self.running.has_ended:
            result = self.finish()
            if result.returncode not in self.good_ends:
                self.note_own_end(result)
        if self.running is None:
            if self.due_exports():
                self.export()
            if not self._has_nothing_to_do():
                self.start()

    def _has_nothing_to_do(self) -> bool:
        return self.running is None and (self._is_shipped or not any(self._folder.iterdir()))

    def due_exports(self) -> bool:
        now = time.monotonic()
        if self.backlog > BACKLOG_MAX or now < self._due_at:
            return False
        self._due_at = now + self._size / self._rate
        return True

    def after_end(self, result: Result, process: Process) -> None:
        self._is_shipped = result.returncode in self.good_ends

    def drop_foreign(self, *, limit_s: float) -> bool:
        """Add a log file of another program to the exports; return whether shipper has stopped because of it."""
        self._drops += 1
        self._foreign = {
            b"level=info drop=%d request=%d path=/health took=%d ms" % (self._drops, number, number % 97)
            for number in range(_FOREIGN_LINES)
        }
        path = self.shipper.folder / f"other-{self._drops:03}.log"
        path.write_bytes(b"".join(line + b"\n" for line in sorted(self._foreign)))
        self._is_shipped = False
        self._foreign_path = path.rename(self._folder / path.name)
        is_refused = self.rest_until(lambda: not self._foreign, limit_s=limit_s)
        if not is_refused:
            self.end_by(signal.SIGTERM)
            self._take_foreign_away()
        return is_refused

    def note_own_end(self, result: Result) -> None:
        is_held_back = result.summary is not None and "records.mistake_limit" in result.summary["message"]
        if not (self._foreign and is_held_back):
            super().note_own_end(result)
            return
        assert (result.returncode, result.summary["outcome"]) == (4, "gave_up"), result
        assert str(self._foreign_path) in result.summary["message"]
        self._take_foreign_away()

    def _take_foreign_away(self) -> None:
        """Remove the file, and expect the few dead letters of its lines."""
        found = [each for each in self.shipper.read_state().dead_letters if each.path == str(self._foreign_path)]
        limit = self._chosen["records.mistake_limit"]
        assert isinstance(limit, int)
        assert len(found) <= limit, f"{len(found)} dead letters of a file without records"
        assert {each.raw for each in found} <= self._foreign
        self.letters.update((each.raw, "json") for each in found)
        self.counts["letters of foreign files"] += len(found)
        self.removed.add(str(self._foreign_path))
        if found:  # otherwise the file may not have been opened
            self.taken_away.add(str(self._foreign_path))
        self._foreign_path.unlink()
        self._foreign = set()

    def export(self) -> None:
        """Write one or two files elsewhere and move them in."""
        self._is_shipped = False
        for _ in range(self.rng.choice([1, 1, 2])):
            self._exports += 1
            made = [self.next_record() for _ in range(self._size)]
            data = b"".join(record.line for _, record in made)
            suffix = self.rng.choice(["", *COMPRESSIONS])
            path = self.shipper.folder / (f"{self._exports:06}.ndjson" + f".{suffix}" * bool(suffix))
            path.write_bytes(COMPRESSIONS[suffix](data) if suffix else data[: -1 if self.rng.random() < 0.5 else None])
            path.rename(self._folder / path.name)
            self.latest = max(number for number, record in made if not record.rule)

    def is_alive(self) -> bool:
        self.tend()
        return super().is_alive()

    def close(self) -> Result:
        """Ship the remaining exports and a last one."""
        assert self.rest_until(self._has_nothing_to_do, limit_s=120), "exports remain"
        self.export()
        self.start()
        return self.finish()
