"""What writes the inputs: good records at a steady rate, and bait between them; each feed in a thread of its own."""

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
from typing import Any, ClassVar, Final

from tests.e2e.files import COMPRESSIONS
from tests.e2e.test_hostile_names import NAMES
from tests.siege import bait
from tests.torture.application import Application, LogFile
from tests.torture.books import Books
from tests.torture.producing import Producer
from tests.torture.records import POISON, Record, Records

KEPT_S: Final = 60.0  # a file that is delivered; then it is deleted
_BAIT_SHARE: Final = 0.4  # of all turns
_BAIT_EVERY: Final = 10  # records of an archive
_TURN_S: Final = 0.1


class Rows(Records):
    """Records as rows of CSV; all of them are good, but for the poison."""

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
    One kind of input.

    Args:
        folder: For it alone.

    Attributes:
        pattern: Of its files.
        baits: How often each kind of bait was laid.
        bait_records: How many records those are; each of them becomes a dead letter.
        noted: How often something else happened.
        starved_s: The longest time for which the service got no good record of it although there were some.
    """

    name: ClassVar[str]
    pattern: ClassVar = "*"
    kind_of_records: ClassVar[type[Records]] = Records
    kinds: ClassVar[Mapping[str, Callable[[Random], bytes]]] = {}

    def __init__(self, folder: Path, number: int, books: Books, rng: Random, *, rate: float) -> None:
        super().__init__(number, books, rate=rate)
        self.folder = folder / self.name
        self.rng = rng
        self.baits: Counter[str] = Counter(dict.fromkeys(self.kinds, 0))
        self.bait_records = 0
        self.noted: Counter[str] = Counter()
        self.starved_s = 0.0
        self._seen = 0, time.monotonic()
        self._done: list[tuple[float, Path, list[int]]] = []

    def begin(self) -> None:
        self.folder.mkdir()

    def turn(self) -> None:
        """Do what is due; called again and again."""
        self.produce(self.due())
        self._note_starving()
        self._tidy_up()
        time.sleep(_TURN_S)

    def produce(self, count: int) -> None:
        """Write so many good records, and some bait."""

    def finish(self) -> None:
        """Write the rest of what is torn; no more comes."""

    def bait(self) -> bytes:
        """Make a piece of bait, or none."""
        if self.rng.random() > _BAIT_SHARE:
            return b""
        kind = self.rng.choice([*self.kinds])
        self.baits[kind] += 1
        self.bait_records += 1
        return self.kinds[kind](self.rng)

    def next_line(self) -> tuple[int, bytes]:
        number, record = self.next_record()
        return number, record.line

    def awaits(self, numbers: Sequence[int]) -> bool:
        """Return whether the service has yet to get some of these records."""
        return any(not self.has(number) and not self.make(number).rule for number in numbers)

    def put_away(self, path: Path, numbers: Sequence[int]) -> None:
        """Delete a file when it has long been delivered."""
        self._done.append((time.monotonic() + KEPT_S, path, [*numbers]))

    def _tidy_up(self) -> None:
        for each in [each for each in self._done if each[0] <= time.monotonic()]:
            _, path, numbers = each
            if not self.awaits(numbers):
                self._done.remove(each)
                for suffix in ("", *(f".{each}" for each in COMPRESSIONS)):  # by now, perhaps
                    path.with_name(path.name + suffix).unlink(missing_ok=True)

    def _note_starving(self) -> None:
        stored, now = self.books.stored[self.number], time.monotonic()
        if stored > self._seen[0] or not self.backlog:
            self._seen = stored, now
        self.starved_s = max(self.starved_s, now - self._seen[1])


class LogFeed(Feed, Application):
    """Log files that grow, with torn lines, and are rotated in every way."""

    name: ClassVar = "logs"
    pattern: ClassVar = "*.ndjson*"
    kinds: ClassVar = bait.LINES
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
            if file.numbers and (line := self.bait()):  # not as the first line, which tells the format
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
        self.noted[f"rotated: {how}"] += 1
        self.put_away(file.path.with_name(f"{file.path.name}.{self._rotations}"), numbers)


class _Whole(Feed):
    """Files of which one grows, and is left for the next one."""

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
            self._path = self.folder / f"{self._files:06}-{self.rng.choice(NAMES)}"
            self._until = time.monotonic() + self._FILE_S
            pieces = [self.head + self._good()]
        else:
            pieces = [self._good(is_first=False)]
        pieces += [self._good(is_first=False) for _ in range(count - 1)]
        if line := self.bait():
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
    """Files of CSV that grow."""

    name: ClassVar = "tables"
    kind_of_records: ClassVar = Rows
    kinds: ClassVar = bait.ROWS
    head: ClassVar = ",".join(bait.FIELDS).encode() + b"\n"

    def _between(self, line: bytes) -> bytes:
        return line if line.endswith(b"\n") else line + b"\n"


class ArrayFeed(_Whole):
    """Files that hold a JSON array, which grow."""

    name: ClassVar = "arrays"
    kind_of_records: ClassVar = Elements
    kinds: ClassVar = bait.VALUES
    head: ClassVar = b'{"EventType":"Acquisition","events":['
    foot: ClassVar = b"\n]}\n"

    def _between(self, line: bytes) -> bytes:
        return b",\n" + line


class ArchiveFeed(Feed):
    """Compressed files that are dropped whole, their windows as wide as may be."""

    name: ClassVar = "archives"
    kinds: ClassVar = bait.LINES
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
            if number % _BAIT_EVERY == 0 and (bad := self.bait()):
                data += bad + b"\n"
        suffix = self.rng.choice([*COMPRESSIONS])
        self._files += 1
        self.noted[f"archives: {suffix}"] += 1
        path = self.folder / f"{self._files:06}-{self.rng.choice(NAMES)}"
        new = self.folder.parent / "new"
        middle = data.index(b"\n") + 1
        new.write_bytes(
            b"".join(COMPRESSIONS[suffix](part) for part in (data[:middle], data[middle:]))
            if self.rng.random() < 0.3
            else bait.with_window(data, suffix, self.rng.choice([20, 22, 23, 26]))
        )
        new.rename(path)
        self.put_away(path, numbers)


class TrashFeed(Feed):
    """Files, and things that are none, in which nothing is good; nobody can tell how many records they hold."""

    name: ClassVar = "trash"
    pattern: ClassVar = "**"
    kinds: ClassVar = {**bait.FILES, **bait.THINGS}
    _FILE_S: ClassVar = 1.0
    _KEPT: ClassVar = 40

    def begin(self) -> None:
        super().begin()
        self._next_at = time.monotonic()
        self._deck: list[str] = []
        self._paths: list[Path] = []

    def due(self) -> int:
        return 0

    def produce(self, count: int) -> None:
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._FILE_S
        if not self._deck:
            self._deck = self.rng.sample([*self.kinds], len(self.kinds))
        kind = self._deck.pop()
        self.baits[kind] += 1
        path = self.folder / f"{sum(self.baits.values()):06}-{self.rng.choice(NAMES)}"
        if kind in bait.THINGS:
            bait.THINGS[kind](path)
        else:
            new = self.folder.parent / "new-trash"
            new.write_bytes(bait.FILES[kind](self.rng))
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
