"""Write good records at a steady rate, mixed with hostile ones; each feed in its own thread."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, ClassVar, Final

from tests.campaign import Shuffled
from tests.e2e.files import COMPRESSIONS
from tests.e2e.test_surroundings import ODD_NAMES
from tests.siege import hostile
from tests.torture.application import Application, LogFile
from tests.torture.journal import Journal, Producer
from tests.torture.records import POISON, Record, Records

KEPT_S: Final = 60.0  # how long a delivered file is kept
_HOSTILE_SHARE: Final = 0.4  # of turns that write a hostile record
_HOSTILE_EVERY: Final = 10  # records in an archive
_TURN_S: Final = 0.1


class Rows(Records):
    """Records as CSV rows; all of them are good except the poison."""

    def make(self, number: int) -> Record:
        record = super().make(number)
        return Record(
            record.key, self.write(record.event), record.event, False, record.rule if record.rule == POISON else ""
        )

    def write(self, event: Mapping[str, Any]) -> bytes:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow(event.values())
        return out.getvalue().encode()


class Elements(Rows):
    """Records as elements of a JSON array."""

    def write(self, event: Mapping[str, Any]) -> bytes:
        return json.dumps(event).encode()


class Feed(Producer):
    """
    One kind of input, in its own folder.

    Attributes:
        pattern: Glob of its files.
        hostile_counts: Number of hostile records or files written, by kind.
        hostile_records: Number of hostile records; each of them becomes a dead letter.
        starved_s: The longest time without a good record at the service although some were pending.
    """

    name: ClassVar[str]
    pattern: ClassVar = "*"
    kind_of_records: ClassVar[type[Records]] = Records
    kinds: ClassVar[Mapping[str, Callable[[Random], bytes]]] = {}

    def __init__(self, folder: Path, number: int, journal: Journal, rng: Random, *, rate: float) -> None:
        super().__init__(number, journal, rate=rate)
        self.folder = folder / self.name
        self.rng = rng
        self.hostile_counts: Counter[str] = Counter(dict.fromkeys(self.kinds, 0))
        self.hostile_records = 0
        self.starved_s = 0.0
        self._seen = 0, time.monotonic()
        self._done: list[tuple[float, Path, list[int]]] = []

    def begin(self) -> None:
        self.folder.mkdir()

    def run(self, is_over: Event) -> None:
        while not is_over.wait(_TURN_S):
            self.produce(self.due())
            self._note_starving()
            self._tidy_up()
        self.finish()

    def produce(self, count: int) -> None:
        """Write `count` good records, and some hostile ones."""

    def finish(self) -> None:
        """Complete partial lines and files at the end."""

    def hostile_record(self) -> bytes:
        """Return a hostile record, or nothing."""
        if self.rng.random() > _HOSTILE_SHARE:
            return b""
        kind = self.rng.choice([*self.kinds])
        self.hostile_counts[kind] += 1
        self.hostile_records += 1
        return self.kinds[kind](self.rng)

    def next_line(self) -> tuple[int, bytes]:
        number, record = self.next_record()
        return number, record.line

    def put_away(self, path: Path, numbers: Sequence[int]) -> None:
        """Delete a file some time after it was delivered."""
        self._done.append((time.monotonic() + KEPT_S, path, [*numbers]))

    def _tidy_up(self) -> None:
        for each in [each for each in self._done if each[0] <= time.monotonic()]:
            _, path, numbers = each
            if not any(map(self.is_missing, numbers)):
                self._done.remove(each)
                for suffix in ("", *(f".{each}" for each in COMPRESSIONS)):  # it may have been compressed since
                    path.with_name(path.name + suffix).unlink(missing_ok=True)

    def _note_starving(self) -> None:
        stored, now = self.journal.stored[self.number], time.monotonic()
        if stored > self._seen[0] or not self.backlog:
            self._seen = stored, now
        self.starved_s = max(self.starved_s, now - self._seen[1])


class LogFeed(Feed, Application):
    """Growing log files with partially written lines, rotated in every way."""

    name: ClassVar = "logs"
    pattern: ClassVar = "*.ndjson*"
    kinds: ClassVar = hostile.LINES
    _ROTATION_S: ClassVar = 8.0

    def begin(self) -> None:
        self._begin_in(self.folder)
        self.files = [LogFile(self.folder / f"{name}.ndjson") for name in ("app", "web\x1b[2J", "näme")]
        self._rotate_at = time.monotonic() + self._ROTATION_S

    def produce(self, count: int) -> None:
        self._do_chores(time.monotonic())
        shares = Counter(self.rng.choices(range(len(self.files)), k=count))
        for index, share in shares.items():
            file = self.files[index]
            file.finish_line()
            if file.numbers and (line := self.hostile_record()):  # not as the first line, which determines the format
                file.write(line + b"\n")
            file.append(self, share, self.rng)
        if time.monotonic() > self._rotate_at:
            self._rotate_at = time.monotonic() + self._ROTATION_S
            self._rotate(self.rng.choice(self.files))

    def finish(self) -> None:
        self._do_chores(float("inf"))
        for file in self.files:
            file.finish_line()

    def _rotate(self, file: LogFile) -> None:
        file.finish_line()
        if not file.numbers:
            return
        how, numbers = self.rng.choice(["copied", "renamed", *COMPRESSIONS]), [*file.numbers]
        if how == "copied":
            self.copy_and_truncate(file, self.rng)
        else:
            self.rename(file, self.rng, suffix=how if how in COMPRESSIONS else "")
        self.counts[f"rotated: {how}"] += 1
        self.put_away(file.path.with_name(f"{file.path.name}.{self._rotations}"), numbers)


class _Whole(Feed):
    """Files that grow one after the other."""

    _FILE_S: ClassVar = 12.0
    head: ClassVar = b""
    foot: ClassVar = b""

    def begin(self) -> None:
        super().begin()
        self._path: Path | None = None
        self._numbers: list[int] = []
        self._until = 0.0
        self._files = 0

    def produce(self, count: int) -> None:
        if not count:
            return
        if self._path is None:
            self._files += 1
            self._path = self.folder / f"{self._files:06}-{self.rng.choice(ODD_NAMES)}"
            self._until = time.monotonic() + self._FILE_S
            pieces = [self.head + self._good()]
        else:
            pieces = [self._good(is_first=False)]
        pieces += [self._good(is_first=False) for _ in range(count - 1)]
        if line := self.hostile_record():
            pieces.insert(self.rng.randrange(1, len(pieces) + 1), self._between(line))
        with self._path.open("ab") as out:
            out.write(b"".join(pieces))
        if time.monotonic() > self._until:
            self.finish()

    def finish(self) -> None:
        if self._path is not None:
            with self._path.open("ab") as out:
                out.write(self.foot)
            self.put_away(self._path, self._numbers)
            self._path, self._numbers = None, []

    def _good(self, *, is_first: bool = True) -> bytes:
        number, line = self.next_line()
        self._numbers.append(number)
        return line if is_first else self._between(line)

    def _between(self, line: bytes) -> bytes:
        raise NotImplementedError


class CsvFeed(_Whole):
    """Growing CSV files."""

    name: ClassVar = "tables"
    kind_of_records: ClassVar = Rows
    kinds: ClassVar = hostile.ROWS
    head: ClassVar = ",".join(hostile.FIELDS).encode() + b"\n"

    def _between(self, line: bytes) -> bytes:
        return line if line.endswith(b"\n") else line + b"\n"


class ArrayFeed(_Whole):
    """Growing files that contain a JSON array."""

    name: ClassVar = "arrays"
    kind_of_records: ClassVar = Elements
    kinds: ClassVar = hostile.VALUES
    head: ClassVar = b'{"EventType":"Acquisition","events":['
    foot: ClassVar = b"\n]}\n"

    def _between(self, line: bytes) -> bytes:
        return b",\n" + line


class ArchiveFeed(Feed):
    """Compressed files that appear complete, with windows of up to the allowed size."""

    name: ClassVar = "archives"
    kinds: ClassVar = hostile.LINES
    _FILE_S: ClassVar = 4.0

    def begin(self) -> None:
        super().begin()
        self._next_at = time.monotonic()
        self._count = self._files = 0

    def produce(self, count: int) -> None:
        self._count += count
        if self._count and time.monotonic() > self._next_at:
            self._next_at = time.monotonic() + self._FILE_S
            self._drop(self._count)
            self._count = 0

    def finish(self) -> None:
        if self._count:
            self._drop(self._count)

    def _drop(self, count: int) -> None:
        numbers, data = [], b""
        for _ in range(count):
            number, line = self.next_line()
            numbers.append(number)
            data += line
            if number % _HOSTILE_EVERY == 0 and (bad := self.hostile_record()):
                data += bad + b"\n"
        suffix = self.rng.choice([*COMPRESSIONS])
        self._files += 1
        self.counts[f"archives: {suffix}"] += 1
        path = self.folder / f"{self._files:06}-{self.rng.choice(ODD_NAMES)}"
        new = self.folder.parent / "new"
        middle = data.index(b"\n") + 1
        new.write_bytes(
            b"".join(COMPRESSIONS[suffix](part) for part in (data[:middle], data[middle:]))
            if self.rng.random() < 0.3
            else hostile.with_window(data, suffix, self.rng.choice([20, 22, 23, 26]))
        )
        new.rename(path)
        self.put_away(path, numbers)


class TrashFeed(Feed):
    """Files and other directory entries without good records; the number of records in them is unknown."""

    name: ClassVar = "trash"
    pattern: ClassVar = "**"
    kinds: ClassVar = {**hostile.FILES, **hostile.THINGS}
    _FILE_S: ClassVar = 1.0
    _KEPT: ClassVar = 40

    def begin(self) -> None:
        super().begin()
        self._next_at = time.monotonic()
        self._kinds = Shuffled(self.kinds, self.rng)
        self._paths: list[Path] = []

    def due(self) -> int:
        return 0

    def produce(self, count: int) -> None:
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._FILE_S
        kind = self._kinds.next()
        self.hostile_counts[kind] += 1
        path = self.folder / f"{sum(self.hostile_counts.values()):06}-{self.rng.choice(ODD_NAMES)}"
        if kind in hostile.THINGS:
            hostile.THINGS[kind](path)
        else:
            new = self.folder.parent / "new-trash"
            new.write_bytes(hostile.FILES[kind](self.rng))
            new.rename(path)
        self._paths.append(path)
        if len(self._paths) > self._KEPT:
            _remove(self._paths.pop(0))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


ALL: Final[Mapping[type[Feed], float]] = {LogFeed: 0.4, CsvFeed: 0.2, ArrayFeed: 0.2, ArchiveFeed: 0.2, TrashFeed: 0.0}
