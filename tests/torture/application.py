"""The lane of log files: `shipper run`, and the application that writes and rotates the files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, ClassVar, Final

from tests.e2e.files import COMPRESSIONS, compress, copytruncate, log_lines
from tests.torture.journal import Producer
from tests.torture.lanes import Lane

_FILES: Final = ("app", "web", "api")
_LATE_S: Final = 0.6  # from a rotation to the last write to the old file; less than `input.rotate_wait_seconds`


class LogFile:
    """
    A log file with partially written lines.

    Attributes:
        numbers: The records completely written since the file was created or truncated.
        rest: The unwritten part of the last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers: list[int] = []
        self.rest = b""
        self._torn = -1

    def append(self, producer: Producer, count: int, rng: Random) -> None:
        """Append records, the last one possibly incomplete."""
        data = self.take_rest()
        for left in reversed(range(count)):
            number, record = producer.next_record()
            data += record.line
            if not left and rng.random() < 0.5:
                cut = rng.randrange(1, len(record.line))
                data, self.rest = data[:-cut], data[-cut:]
                self._torn = number
            else:
                self.numbers.append(number)
        self.write(data)

    def take_rest(self) -> bytes:
        rest, self.rest = self.rest, b""
        if rest:
            self.numbers.append(self._torn)
        return rest

    def finish_line(self) -> None:
        self.write(self.take_rest())

    def begin(self) -> None:
        self.path.touch()

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as out:
            out.write(data)


class Application(Producer):
    """An application that writes and rotates files in a folder; all calls must come from one thread."""

    def _begin_in(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._rotations = 0
        self._chores: list[tuple[float, Callable[[], object]]] = []

    def _do_chores(self, now: float) -> None:
        for chore in [each for each in self._chores if each[0] <= now]:
            self._chores.remove(chore)
            chore[1]()

    def is_in_flight(self, file: LogFile) -> bool:
        """Return whether records of a file have not arrived at the service."""
        return any(map(self.is_missing, file.numbers))

    def do_soon(self, chore: Callable[[], object]) -> Event:
        """Have the thread of the application call a function; return an event that is set afterwards."""
        is_done = Event()
        self._chores.append((0.0, lambda: (chore(), is_done.set())))
        return is_done

    def _rotated(self, file: LogFile, *, has_date: bool = False) -> Path:
        self._rotations += 1
        self.counts["rotations"] += 1
        self.counts["rotations in flight"] += self.is_in_flight(file)
        suffix = f"-20261101-{self._rotations:06}" if has_date else f".{self._rotations}"
        return file.path.with_name(f"{file.path.name}{suffix}")

    def rename(self, file: LogFile, rng: Random, *, suffix: str = "") -> bool:
        """Rename a file; write the rest of its last line a little later, and then compress it."""
        if not file.path.exists():
            return False
        new = self._rotated(file)
        old = LogFile(file.path.rename(new))
        old.rest, file.rest = file.rest, b""
        file.numbers.clear()
        file.write(b"")
        late = time.monotonic() + rng.uniform(0, _LATE_S)
        self._chores.append((late, old.finish_line))
        if suffix:
            self._chores.append((late + rng.uniform(0, 2), lambda: compress(new, suffix)))
        return True

    def rotate_in_a_burst(self, file: LogFile, rng: Random) -> bool:
        """Create and rename files faster than shipper looks, or while it does not run."""
        if not file.path.exists():
            return False
        file.finish_line()
        for _ in range(rng.randrange(2, 5)):
            self._rotate_briefly(file, rng)
        return True

    def _rotate_briefly(self, file: LogFile, rng: Random, *, has_date: bool = False) -> Path:
        for _ in range(rng.randrange(1, 20)):
            number, record = self.next_record()
            file.numbers.append(number)
            file.write(record.line)
        new = file.path.rename(self._rotated(file, has_date=has_date))
        file.numbers.clear()
        file.begin()
        return new

    def copy_and_truncate(self, file: LogFile, rng: Random, *, suffix: str = "") -> bool:
        """Copy a file and truncate it; the copy stays in the same folder."""
        if not file.path.exists():
            return False
        file.finish_line()
        new = self._rotated(file)
        copytruncate(file.path, new)
        file.numbers.clear()
        if suffix:
            self._chores.append((time.monotonic() + rng.uniform(0, 2), lambda: compress(new, suffix)))
        return True


class RunLane(Application, Lane):
    """`shipper run` on the files of a folder."""

    name: ClassVar = "run"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begin_in(self.shipper.folder / "logs")
        self.files = [LogFile(self.folder / f"{name}.ndjson") for name in _FILES]
        self.writing_rng = Random(self.rng.random())
        # With the rotated files, or only the written names, so that shipper must find the rotated files itself.
        self._include = json.dumps([f"{self.folder}/{self.rng.choice(['*.ndjson*', '*.ndjson'])}"])

    def __enter__(self) -> RunLane:
        """Wait until shipper has looked at its patterns: files that disappear earlier need not be delivered."""
        super().__enter__()
        self.start()
        assert self.running is not None
        running = self.running
        running.wait_until(lambda: log_lines(running, "inputs_found"), "the first look is over", limit_s=60)
        return self

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "input.include": self._include}

    def arguments(self) -> Sequence[str | Path]:
        return ["run"]

    # The application and its rotator, in one thread -------------------------------------------------------------------

    def produce(self) -> None:
        self._do_chores(time.monotonic())
        count, rng = self.due(), self.writing_rng
        for file in rng.sample(self.files, len(self.files)):
            share = min(count, rng.randrange(1 + 2 * count // len(self.files)))
            if share:
                file.append(self, share, rng)
                count -= share
        self._note_latest()

    def finish_producing(self) -> None:
        self._do_chores(float("inf"))
        for file in self.files:
            file.finish_line()
        self._note_latest()

    def _note_latest(self) -> None:
        newest = (number for file in self.files for number in file.numbers[-3:])
        self.latest = max((number for number in newest if not self.make(number).rule), default=self.latest)

    def rotate_while_stopped(self, rng: Random) -> None:
        """Rename the current file and one to four new files; compress some of them at once."""
        file, has_date = rng.choice(self.files), rng.random() < 0.5
        file.begin()
        file.finish_line()
        for _ in range(1 + rng.randrange(1, 5)):
            new = self._rotate_briefly(file, rng, has_date=has_date)
            if rng.random() < 0.3:
                compress(new, rng.choice([*COMPRESSIONS]))

    def truncate_when_read(self, file: LogFile, rng: Random) -> bool:
        """Truncate a file without a copy after all of it is settled, because unread data would be lost."""
        file.finish_line()
        if not file.numbers or not self._is_settled(file.path):
            return False
        with file.path.open("r+b") as out:
            out.truncate(0)
        file.numbers.clear()
        return True

    def _is_settled(self, path: Path) -> bool:
        streams, size = self._streams(), path.stat().st_size
        return any(each["path"] == str(path) and each["checkpoint"] == each["size"] == size for each in streams)

    def has_found_all_inputs(self) -> bool:
        return all(each["stream_id"] for each in self._streams())

    def _streams(self) -> list[dict[str, Any]]:
        """Return the progress of each file as shown by `status`."""
        status = self.shipper.run("status", "--json", "--all", check=False, settings=self.settings())
        return json.loads(status.stdout)["state"]["streams"] if status.returncode == 0 else []
