"""
Followed files against a model, up to the saved checkpoint. The real follower, codec, acks and store process files that
are rotated, copied and truncated, compressed, moved and deleted, with crashes at any moment and partial saves.

A *life* is the data written to a file since it was created or truncated; it continues in a copy or archive of the file.
It is read from its start without gaps and overlaps, and a restart resumes exactly at the saved checkpoint. Each line is
unique. A line is owed unless the shipper cannot read it: its file left the glob before the shipper could know it, or
was deleted before it was open. Everything is driven step by step, and time is a number, so that no test waits.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import event, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from shipper.codec.codec import Codec
from shipper.model.records import Batch, Chunk, Span, Stream
from shipper.pipeline.settlement import Acks
from shipper.sandbox.samples import sample_lines
from shipper.sources.discovery import Patterns
from shipper.sources.follower import Follower
from shipper.sources.identity import StreamIndex
from shipper.state.store import Store
from tests.fakes import strict_records

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ROTATE_WAIT_S = 5.0
MAX_RECORD_BYTES = 3000
READ_BYTES = 1000  # small, so that few lines make many chunks, and some are longer than a read
LATEST = "2026-11-21T00:00:00Z"
EVENTS = [line.rstrip() for line in sample_lines(4000, seed=7, end=datetime(2026, 11, 20, tzinfo=UTC))]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": partial(gzip.compress, mtime=0),
    "zstd": zstd.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
# These also decompress only the start of an archive.
DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": lambda part: zlib.decompressobj(31).decompress(part),
    "zstd": lambda part: zstd.ZstdDecompressor().decompress(part),
    "bzip2": lambda part: bz2.BZ2Decompressor().decompress(part),
    "xz": lambda part: lzma.LZMADecompressor().decompress(part),
}
LONG = {"l": READ_BYTES, "o": MAX_RECORD_BYTES}
MOST_LIVES = 7
BANNER = b"# " + b"=" * 1200  # files with the same head are distinguished by the bytes before the checkpoint


@dataclass(eq=False)
class Line:
    """
    A line and its expected and actual results.

    Attributes:
        end: Its end offset in the life, with the newline; 0 = the line is incomplete.
        is_valid: Whether it is delivered; otherwise it becomes a dead letter.
        is_owed: Whether it has to arrive.
        allowed: Maximum number of deliveries: one, plus one for each crash before they were saved.
        delivered: Number of deliveries to the service.
        dead: Number of dead letters of it.
        is_given_up: Whether it was reported as unreachable.
    """

    raw: bytes
    start: int
    is_valid: bool
    end: int = 0
    is_owed: bool = True
    allowed: int = 1
    delivered: int = 0
    dead: int = 0
    is_given_up: bool = False

    @property
    def is_settled(self) -> bool:
        return bool(self.delivered if self.is_valid else self.dead)


@dataclass(eq=False)
class Life:
    """
    Attributes:
        path: Where the file is; None = deleted.
        deleted_at: Where it was when it was deleted.
        disk_bytes: How much of the content is on disk.
        is_copy: Whether the file is a copy of the one that was written.
        is_held: Whether the shipper has the file open, or will search for it.
        may_sleep: Whether the shipper need not open it, because nothing was new when it started.
        may_double: Whether the shipper cannot know that two files are the same, so that lines may be delivered twice.
        brief_copies: The paths of copies that were deleted at once.
        inodes: Those under which the shipper may know the content.
        has_banner: Whether it starts with the same banner as others.
        read_at: How far this process has read.
        saved_at: The checkpoint on disk.
    """

    number: int
    path: Path | None
    deleted_at: Path | None = None
    is_matched: bool = True
    is_written: bool = True
    content: bytes = b""
    disk_bytes: int = 0
    lines: list[Line] = field(default_factory=list)
    written_at: float = 0.0
    compression: str = ""
    is_copy: bool = False
    is_held: bool = False
    is_missed: bool = False  # whether a look has missed it since it left the glob
    may_sleep: bool = False
    may_double: bool = False
    brief_copies: set[str] = field(default_factory=set)
    inodes: set[int] = field(default_factory=set)
    has_banner: bool = False
    read_at: int = 0
    saved_at: int = 0

    @property
    def torn(self) -> Line | None:
        return self.lines[-1] if self.lines and not self.lines[-1].end else None

    @property
    def whole(self) -> list[Line]:
        return [line for line in self.lines if line.end]

    def is_held_now(self, has_scanned: bool) -> bool:
        """Return whether the shipper has the file open or will search for it, as for all known files at its start."""
        return self.is_held or (not has_scanned and self.read_at > 0)

    def leave(self, *, after: int) -> None:
        """Lines after an offset are out of reach, so they are not owed."""
        for line in self.lines:
            if (line.end or line.start + 1) > after:
                line.is_owed = False


class Witness:
    """The streams of the store; intercepts reports of unreachable data."""

    def __init__(self, store: Store, note: Callable[[Stream, int], None]) -> None:
        self._streams = store.streams
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def note_unreachable(self, streams: Iterable[Stream], now_s: float) -> list[tuple[Stream, int]]:
        noted = self._streams.note_unreachable(streams, now_s)
        for stream, unread in noted:
            self._note(stream, unread)
        return noted


class Sources(RuleBasedStateMachine):
    """
    Some events are left out, because they deliver lines more often than `allowed`, although none is lost: lines written
    between copy and truncation are read, a copy is seen when it is shorter than the head, and a copy leaves the glob
    before it is identified.
    """

    happened: ClassVar[Counter[str]] = Counter()

    max_open = 512
    may_leave = True  # files may leave the glob, and may be deleted
    may_be_copied = True  # files may also be compressed, and may have the same head
    has_long_lines = False
    reuses_inodes = False  # a new file may get the inode of a deleted one; then examples are not exactly repeatable

    def __init__(self) -> None:
        super().__init__()
        self.context = ExitStack()
        for name in ("reader.READ_BYTES", "open_files.READ_BYTES", "open_files._CHUNK_BYTES_MIN"):
            self.context.enter_context(patch(f"shipper.sources.{name}", READ_BYTES))
        self.deleted = self.context.enter_context(ExitStack())
        self.logs = self.context.enter_context(capture_logs())
        self.root = Path(tempfile.mkdtemp(prefix="shipper-sources-"))
        self.folder = self.root / "logs"
        self.folder.mkdir()
        self.now = 1_000_000.0
        self.ticks = count(1)
        self.events = iter(EVENTS)
        self.lives: list[Life] = []
        self.by_raw: dict[bytes, Line] = {}
        self.fragments: Counter[tuple[bytes, int, int]] = Counter()
        self.streams: dict[int, Life] = {}
        self.letters_seen = 0
        self.given_up: list[str] = []
        self.steps: list[str] = []
        self.is_started = False

    def tell(self, what: str) -> None:
        event(what)
        self.happened[what] += 1

    # The shipper ------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.state = self.root / "state0"
        self.state.mkdir()
        self.start()

    def start(self) -> None:
        self.store = Store(self.state)
        self.acks = Acks()
        self.codec = Codec(strict_records(0), max_record_bytes=MAX_RECORD_BYTES)
        self.in_flight: list[tuple[Span, list[Line]]] = []
        known = self.store.streams.load("file")
        ids = {stream.stream_id for stream in known}
        self.streams = {stream_id: life for stream_id, life in self.streams.items() if stream_id in ids}
        self.has_scanned = False
        for life in self.lives:
            life.read_at = life.saved_at
        next_id = count(self.store.streams.newest_id() + 1).__next__
        self.index = StreamIndex(known, next_id, max_record_bytes=MAX_RECORD_BYTES)
        self.follower = Follower(
            Patterns([str(self.folder / "*.log")], state_directory=self.state),
            self.index,
            Witness(self.store, self.note_unreachable),
            rotate_wait_s=ROTATE_WAIT_S,
            wall_time=lambda: self.now,
            max_open=self.max_open,
        )
        self.is_started = True

    def note_unreachable(self, stream: Stream, unread: int) -> None:
        self.tell("reported as unreachable")
        life = self.streams.get(stream.stream_id)  # None = it was never read
        for line in life.whole if life is not None else []:
            if stream.size - unread <= line.start and line.end <= stream.size:
                line.is_given_up = True
                self.check_given_up(line)

    @staticmethod
    def check_given_up(line: Line) -> None:
        # The shipper does not know of deliveries that were not saved before a crash.
        is_known = line.allowed == 1 and line.is_settled
        assert not (line.is_given_up and is_known), "reported as unreachable although delivered"

    def teardown(self) -> None:
        is_failing = sys.exc_info()[0] is not None
        try:
            if self.is_started and not is_failing:
                self.in_the_end_everything_has_arrived()
        finally:
            if self.is_started:
                self.follower.files.close_all()
                self.store.close()
            self.context.close()
            shutil.rmtree(self.root)

    def do_look(self) -> None:
        self.follower.scan(self.follower.find(), self.now)
        for life in self.lives:
            if life.path is not None and life.is_matched and life.disk_bytes:
                if not self.has_scanned:
                    life.is_copy = False  # there is no original any more
                if not life.is_copy and not life.may_sleep and self.max_open > MOST_LIVES:
                    life.is_held = True
                if not life.is_copy:
                    life.inodes.add(life.path.stat().st_ino)
            elif not life.is_matched:
                life.is_missed = True
                if life.is_held_now(self.has_scanned):
                    life.is_held = True
        self.has_scanned = True
        self.note_logs()

    def do_read(self, rounds: int = 1) -> bool:
        """Read and check chunks; return whether there were any."""
        chunks = [chunk for _ in range(rounds) for chunk in self.follower.files.read(self.now)]
        for chunk in chunks:
            self.take(chunk)
        self.note_logs()
        return bool(chunks)

    def note_logs(self) -> None:
        for entry in self.logs:
            match entry["event"]:
                case "source_found_again":
                    life = next((each for each in self.lives if str(each.path) == entry["path"]), None)
                    kind = "an archive" if life is not None and life.compression else "a copy"
                    self.tell(f"found again in {kind}")
                case "source_truncated" | "source_replaced":
                    self.tell("truncation seen")
                case "source_refused" | "source_unreadable":
                    raise AssertionError(entry)
        self.logs.clear()

    def take(self, chunk: Chunk) -> None:
        life = self.life_of(chunk)
        span = life.content[chunk.start_offset : chunk.end_offset]
        assert span.endswith(b"\n") or life.compression, "a chunk ends within a line"
        if chunk.is_oversized:
            self.tell("line too long")
            assert chunk.data == b""
            assert span.count(b"\n") == 1 or life.compression
            assert len(span) > MAX_RECORD_BYTES + 1, "a line is oversized although it fits"
        else:
            assert chunk.data == span
        if not life.may_double:
            assert chunk.start_offset == life.read_at, f"life {life.number}: there is a gap or an overlap"
        if chunk.start_offset and chunk.start_offset == life.saved_at and life.is_copy:
            self.tell(f"read on in {'an archive' if chunk.stream.compression else 'a copy'}")
        life.read_at = chunk.end_offset
        offset = chunk.start_offset
        while offset < chunk.end_offset:
            encoded = self.codec.encode(chunk, offset, room_events=3, room_bytes=1 << 20, latest=LATEST)
            offset = encoded.span.end_offset
            self.acks.open(encoded.span, 0.0)
            lines = [self.by_raw[raw] for raw in encoded.lines.split(b"\n") if raw]
            assert len(lines) == encoded.span.unsettled
            for start in range(0, len(lines), 2):
                self.in_flight.append((encoded.span, lines[start : start + 2]))

    def life_of(self, chunk: Chunk) -> Life:
        life = self.streams.get(chunk.stream.stream_id)
        if life is None or not self.is_of(chunk, life):
            assert life is None, "a stream contains two lives"
            alike = [each for each in self.lives if self.is_of(chunk, each)]
            # Several if only a banner or the first byte of an incomplete line was read.
            path = chunk.stream.path
            life = max(reversed(alike), key=lambda each: (str(each.path) == path, str(each.deleted_at) == path))
            self.streams[chunk.stream.stream_id] = life
        return life

    @staticmethod
    def is_of(chunk: Chunk, life: Life) -> bool:
        """Return whether a chunk may belong to a life; of an oversized line only the position is known."""
        start, end = chunk.start_offset, chunk.end_offset
        if not chunk.is_oversized:
            return life.content[start:end] == chunk.data
        return any(
            line.start == start and end in {line.end or len(life.content), life.disk_bytes} for line in life.lines
        )

    def accept(self, units: list[tuple[Span, list[Line]]]) -> None:
        for unit in units:
            self.in_flight.remove(unit)
            for line in unit[1]:
                self.deliver(line)
        parts = [(span, range(len(lines))) for span, lines in units]
        self.acks.accept(Batch(number=1, body=b"", events=sum(len(each) for _, each in parts), parts=parts))

    def deliver(self, line: Line) -> None:
        line.delivered += 1
        assert line.is_valid
        assert line.delivered <= line.allowed or self.may_double(line), "delivered twice"
        self.check_given_up(line)

    def may_double(self, line: Line) -> bool:
        return any(life.may_double and line in life.lines for life in self.lives)

    @rule()
    def save(self) -> None:
        checkpoints = self.acks.take()
        saved = self.store.save(checkpoints, self.now)
        assert saved.done == checkpoints
        for checkpoint in checkpoints:
            checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)
        self.note_letters()
        for checkpoint in checkpoints:
            life = self.streams[checkpoint.stream.stream_id]
            life.saved_at = max(life.saved_at, checkpoint.end_offset)
            passed = [line for line in life.whole if line.end <= checkpoint.end_offset]
            assert all(line.is_settled for line in passed), "a checkpoint has passed an unsettled record"
        totals = self.store.totals()
        assert totals.read == totals.accepted + totals.dead_lettered + totals.duplicates
        assert (totals.dead_lettered,) == self.store._db.execute("SELECT count(*) FROM dead_letters").fetchone()

    def note_letters(self) -> None:
        rows = self.store._db.execute(
            "SELECT id, stream_id, start_offset, raw FROM dead_letters WHERE id > ? ORDER BY id", (self.letters_seen,)
        ).fetchall()
        for number, stream_id, start, raw in rows:
            self.letters_seen = number
            if raw == BANNER:
                continue
            line = self.by_raw.get(raw)
            if not raw:  # of an oversized line only the position is known
                line = next(each for each in self.streams[stream_id].lines if each.start == start)
            if line is None:  # the end of an archive also ends a line
                life = self.streams[stream_id]
                assert life.compression
                assert life.content.startswith(raw, start)
                self.fragments[raw, life.number, start] += 1
                assert self.fragments[raw, life.number, start] == 1 or life.may_double
            else:
                assert not line.is_valid
                line.dead += 1
                assert line.dead == 1 or self.may_double(line), "in the dead letters twice"
                self.check_given_up(line)

    def end_process(self) -> None:
        """Forget unsaved deliveries, and what cannot be found on disk any more."""
        self.follower.files.close_all()
        for life in self.lives:
            for line in life.lines:
                if line.end > life.saved_at or not line.end:
                    line.allowed = max(line.allowed, line.delivered + 1)
            is_known = life.path is not None and (life.is_matched or life.saved_at > 0)
            life.leave(after=max(life.saved_at, life.disk_bytes if is_known else 0))
            life.is_held = False
            life.may_sleep = not life.whole or life.saved_at >= life.whole[-1].end

    def do_crash(self, lost_answers: list[tuple[Span, list[Line]]]) -> None:
        for _, lines in lost_answers:
            for line in lines:
                self.deliver(line)
        if any(line.delivered and line.end > life.saved_at for life in self.lives for line in life.lines):
            self.tell("crash with unsaved settlements")
        self.end_process()
        # What a killed process leaves: the database and its write-ahead log as they are.
        left = self.root / f"state{next(self.ticks)}"
        shutil.copytree(self.state, left)
        self.store.close()
        self.state = left
        self.start()

    @rule()
    def restart(self) -> None:
        self.accept(list(self.in_flight))
        self.save()
        self.end_process()
        self.store.close()
        self.start()

    # Actions of the shipper -------------------------------------------------------------------------------------------

    SECONDS = st.sampled_from([0.0, 0.5, 1.0, 4.0, 6.0, 70.0])

    @rule(data=st.data(), seconds=SECONDS, rounds=st.sampled_from([1, 0, 2, 4]), is_saved=st.booleans())
    def ship(self, data: st.DataObject, seconds: float, rounds: int, is_saved: bool) -> None:
        self.now += seconds
        self.do_look()
        self.do_read(rounds)
        self.accept(self.some_in_flight(data))
        if is_saved:
            self.save()

    @rule(seconds=st.sampled_from([0.0, 1.0]))
    def read_on(self, seconds: float) -> None:
        self.now += seconds
        self.follower.check(self.now)
        self.do_read()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def settle_some(self, data: st.DataObject) -> None:
        self.accept(self.some_in_flight(data))

    def some_in_flight(self, data: st.DataObject) -> list[tuple[Span, list[Line]]]:
        if not self.in_flight:
            return []
        which = data.draw(st.sampled_from(["all", "none", "some", "the later half"]), label="settled")
        if which == "some":
            picked = data.draw(st.sets(st.integers(0, len(self.in_flight) - 1), max_size=5), label="which")
            return [self.in_flight[each] for each in picked]
        return self.in_flight[{"all": 0, "none": len(self.in_flight)}.get(which, len(self.in_flight) // 2) :]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.do_crash(self.some_in_flight(data))

    @invariant()
    def every_record_is_accounted_for_and_few_files_are_open(self) -> None:
        self.happened["step"] += 1
        if self.is_started:
            assert len(self.follower.files) <= self.max_open
            totals = self.acks.totals
            assert totals.read == totals.accepted + totals.dead_lettered + totals.duplicates + totals.pending
            assert totals.pending == sum(len(lines) for _, lines in self.in_flight)

    @rule()
    def in_the_end_everything_has_arrived(self) -> None:
        quiet = 0
        for number in range(60):
            self.now += ROTATE_WAIT_S + 1
            self.do_look()
            quiet += 1
            while self.do_read():
                quiet = 0
            self.accept(list(self.in_flight))
            self.save()
            if number >= 13 and (quiet > len(self.lives) or self.max_open > MOST_LIVES):
                break
        for life in self.lives:
            for line in life.whole:
                assert line.is_settled or not line.is_owed, f"life {life.number}: the line at {line.start} is lost"
                self.tell("line owed" if line.is_owed else "line not owed")
                self.check_given_up(line)
        assert self.acks.open_spans == 0
        in_glob = {path.stat().st_ino for path in self.folder.glob("*.log")}
        is_closed = {file.file_id[1] for file in self.follower.files} <= in_glob
        assert is_closed or self.may_be_copied, "a file that left the glob is still open"
        for life in self.lives:
            if life.path is not None and life.is_matched:
                life.is_copy = False
                life.is_held = not life.may_sleep
        gone = [life for life in self.lives if life.path is None]
        self.lives = [life for life in self.lives if life not in gone or life in self.streams.values()]

    # The writer -------------------------------------------------------------------------------------------------------

    def unlink(self, path: Path) -> None:
        if not self.reuses_inodes:
            self.deleted.enter_context(path.open("rb"))
        path.unlink()

    def touch(self, path: Path) -> None:
        at = int(self.now * 10**9) + next(self.ticks) * 1000
        os.utime(path, ns=(at, at))  # do not depend on the time resolution of the file system

    def append(self, life: Life, data: bytes) -> None:
        if any(file.new_since is not None and file.name in life.brief_copies for file in self.follower.files):
            # The undecided copy, which is named like a rotated file, becomes shorter than what is read of the original.
            # If the original is truncated before the copy is found to be settled, the copy is read as a new file.
            life.may_double = True
            self.tell("grew beside an undecided copy")
        with life.path.open("ab") as out:
            out.write(data)
        life.content += data
        life.disk_bytes = len(life.content)
        life.written_at = self.now
        life.may_sleep = False
        if life.is_copy:
            life.is_held = False  # it may not be identified yet
        self.touch(life.path)

    def new_line(self, life: Life, kind: str) -> Line:
        raw = next(self.events)
        if kind == "i":
            raw = raw.replace(b'"IP":', b'"ip":')
        elif kind in LONG and (kind == "l" or self.has_long_lines):
            raw = raw.replace(b'"Username":"', b'"Username":"' + b"x" * LONG[kind])
        line = Line(raw, len(life.content), kind in "vl" or (kind == "o" and not self.has_long_lines))
        life.lines.append(line)
        self.by_raw[raw] = line
        return line

    def end_torn(self, life: Life) -> None:
        line = life.torn
        if line is not None:
            self.append(life, line.raw[len(life.content) - line.start :] + b"\n")
            line.end = len(life.content)

    def write_lines(self, life: Life, kinds: str) -> None:
        self.end_torn(life)
        for kind in kinds:
            if kind == "-":
                if life.content:
                    self.append(life, b" \n")
                continue
            line = self.new_line(life, kind)
            self.append(life, line.raw + b"\n")
            line.end = len(life.content)

    def new_life(self, path: Path) -> Life:
        path.touch(exist_ok=True)
        self.touch(path)
        life = Life(next(self.ticks), path)
        self.lives.append(life)
        return life

    def new_path(self, data: st.DataObject, *, is_matched: bool) -> Path:
        name = f"{data.draw(st.sampled_from('az'), label='name')}{next(self.ticks)}"
        return self.folder / (f"{name}.log" if is_matched else f"{name}.log.1")

    def on_disk(self, *, also: Callable[[Life], bool]) -> list[Life]:
        return [life for life in self.lives if life.path is not None and also(life)]

    def written(self) -> list[Life]:
        return self.on_disk(also=lambda life: life.is_written and life.is_matched)

    def draw(self, data: st.DataObject, lives: list[Life]) -> Life:
        return lives[data.draw(st.integers(0, len(lives) - 1), label="life")]

    # Valid, invalid and blank lines, lines longer than a read, and oversized lines.
    KINDS = st.text("vvvvvvii--ll", min_size=1, max_size=10) | st.text("vlo", min_size=1, max_size=4)

    @precondition(lambda self: len(self.on_disk(also=bool)) < MOST_LIVES)
    @rule(kinds=KINDS)
    def make_file(self, kinds: str) -> None:
        self.write_lines(self.new_life(self.folder / f"m{next(self.ticks)}.log"), kinds)

    @precondition(lambda self: self.may_be_copied and not any(life.has_banner for life in self.lives))
    @rule(kinds=KINDS)
    def make_file_with_banner(self, kinds: str) -> None:
        life = self.new_life(self.folder / f"m{next(self.ticks)}.log")
        self.write_banner(life)
        self.write_lines(life, kinds)

    def write_banner(self, life: Life) -> None:
        life.has_banner = True
        self.append(life, BANNER + b"\n")

    @precondition(lambda self: self.with_banner())
    @rule(data=st.data(), kinds=KINDS)
    def truncate_and_begin_alike(self, data: st.DataObject, kinds: str) -> None:
        life = self.draw(data, self.with_banner())
        path = life.path
        life.leave(after=life.read_at)
        self.vanish(life)
        os.truncate(path, 0)
        young = self.new_life(path)
        young.is_held = life.is_held
        self.write_banner(young)
        self.write_lines(young, kinds)
        self.tell("truncated and begun alike")

    def with_banner(self) -> list[Life]:
        """Files that cannot be confused with another one with the same banner, as more than the banner was saved."""
        return [life for life in self.written() if life.has_banner and len(BANNER) + 64 < life.saved_at]

    @precondition(lambda self: self.written())
    @rule(data=st.data(), kinds=KINDS)
    def write(self, data: st.DataObject, kinds: str) -> None:
        self.write_lines(self.draw(data, self.written()), kinds)

    @precondition(lambda self: self.written())
    @rule(data=st.data(), kind=st.sampled_from("vio"), part=st.sampled_from([1, 20, 200, 1000]))
    def write_torn(self, data: st.DataObject, kind: str, part: int) -> None:
        life = self.draw(data, self.written())
        self.end_torn(life)
        line = self.new_line(life, kind)
        self.append(life, line.raw[:part])

    # Renaming, truncating, deleting -----------------------------------------------------------------------------------

    def decided(self) -> list[Life]:
        return self.on_disk(also=lambda life: not life.is_matched or not life.is_copy)

    def rotatable(self) -> list[Life]:
        return [life for life in self.decided() if life.is_matched]

    @precondition(lambda self: self.rotatable())
    @rule(data=st.data(), is_matched=st.booleans(), is_made_again=st.booleans(), kinds=KINDS)
    def rotate(self, data: st.DataObject, is_matched: bool, is_made_again: bool, kinds: str) -> None:
        life = self.draw(data, self.rotatable())
        old = life.path
        is_matched = is_matched or not self.may_leave
        life.path = old.rename(self.new_path(data, is_matched=is_matched))
        life.is_matched, life.is_missed = is_matched, False
        if not is_matched and not life.is_held_now(self.has_scanned):
            life.leave(after=life.read_at)
        if is_made_again and life.is_written:
            self.write_lines(self.new_life(old), kinds)
        life.is_written = False
        self.tell(f"rotated {'within' if is_matched else 'out of'} the glob")

    @precondition(lambda self: self.late_writers())
    @rule(data=st.data(), kinds=KINDS)
    def write_late(self, data: st.DataObject, kinds: str) -> None:
        self.write_lines(self.draw(data, self.late_writers()), kinds)

    def late_writers(self) -> list[Life]:
        """Rotated files that are in the glob or must still be open."""

        def is_open(life: Life) -> bool:
            is_whole = life.disk_bytes == len(life.content) and not life.is_copy and not life.compression
            is_late = not life.is_missed or self.now - life.written_at < ROTATE_WAIT_S
            is_open = life.is_matched or (life.is_held and is_late)
            return not life.is_written and is_whole and is_open

        return self.on_disk(also=is_open)

    @precondition(lambda self: self.on_disk(also=lambda life: not life.is_matched and not life.is_copy))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        life = self.draw(data, self.on_disk(also=lambda life: not life.is_matched and not life.is_copy))
        life.path = life.path.rename(self.new_path(data, is_matched=True))
        life.is_matched = True
        life.is_held = False  # it may have been closed meanwhile

    @precondition(lambda self: self.may_leave and self.decided())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        life = self.draw(data, self.decided())
        self.unlink(life.path)
        life.deleted_at = life.path
        if life.is_copy or life.compression or not life.is_held or not life.is_matched:
            life.leave(after=life.read_at)
        self.vanish(life)

    def vanish(self, life: Life) -> None:
        life.path, life.disk_bytes, life.is_matched, life.is_written = None, 0, False, False

    def truncatable(self) -> list[Life]:
        return [life for life in self.written() if life.content and not life.is_copy and not life.has_banner]

    @precondition(lambda self: self.truncatable())
    @rule(data=st.data(), kinds=KINDS, is_regrown=st.booleans(), is_half_read=st.booleans())
    def truncate(self, data: st.DataObject, kinds: str, is_regrown: bool, is_half_read: bool) -> None:
        life = self.draw(data, self.truncatable())
        if is_half_read:
            self.write_lines(life, "vvvvvv")
            self.do_look()
            self.do_read()
        life.leave(after=life.read_at)
        path = life.path
        self.vanish(life)
        os.truncate(path, 0)
        young = self.new_life(path)
        young.is_held = life.is_held
        self.write_lines(young, kinds if is_regrown else "")

    # Copies and archives ----------------------------------------------------------------------------------------------

    def interlude(self, data: st.DataObject, life: Life) -> None:
        """Let the shipper act while a copy is written or exists beside its original."""
        # It cannot recognise the copy of a file of which it has read nothing: both would be new files.
        actions = ["nothing", "read", "settle", "save", "restart", "crash"] + ["look", "look and read"] * 2
        action = data.draw(st.sampled_from(actions), label="interlude")
        match action:
            case "look" | "look and read" if life.read_at:
                self.now += data.draw(st.sampled_from([0.0, 0.5]), label="seconds")
                self.do_look()
                if action == "look and read":
                    self.do_read()
                self.tell("looked at a copy beside the original")
            case "read":
                self.follower.check(self.now)
                self.do_read()
            case "settle":
                self.accept(self.some_in_flight(data))
            case "save":
                self.save()
            case "restart":
                self.restart()
            case "crash":
                self.do_crash(self.some_in_flight(data))

    def make_copy(self, data: st.DataObject, life: Life, path: Path, compression: str = "") -> None:
        """Write a copy or an archive beside the original, possibly with looks in between."""
        status = life.path.stat()
        if not life.brief_copies.isdisjoint([*self.index.known_paths(), *(each.path for each in self.index.lost())]):
            self.tell("copied again after a deleted copy")
        blob = COMPRESS[compression](life.content[: life.disk_bytes])
        part = data.draw(st.sampled_from([0, 8, len(blob) // 2, len(blob) - 1]), label="part")
        seen = len(DECOMPRESS[compression](blob[:part]))
        if 0 < seen < min(life.disk_bytes, 1024) or (part == 8 and compression == "bzip2"):  # its magic has 10 bytes
            part = 0
        with path.open("wb") as out:
            inode = os.fstat(out.fileno()).st_ino
            if inode in life.inodes:
                self.tell("copy with the inode of another one")
            life.inodes.add(inode)
            for some in (blob[:part], blob[part:]):
                out.write(some)
                out.flush()
                self.touch(path)
                self.interlude(data, life)
        if data.draw(st.booleans(), label="keeps the time"):
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))

    @precondition(lambda self: self.may_be_copied and self.truncatable())
    @rule(data=st.data(), is_matched=st.booleans(), missed=st.text("vi", max_size=2), kinds=st.text("vi-", max_size=5))
    def copytruncate(self, data: st.DataObject, is_matched: bool, missed: str, kinds: str) -> None:
        life = self.draw(data, self.truncatable())
        path, copied = life.path, life.content
        copy = self.new_path(data, is_matched=is_matched)
        self.make_copy(data, life, copy)
        if missed:
            self.write_lines(life, missed)
        is_known = life.read_at > 0
        was_held = life.is_held
        life.leave(after=max(life.read_at, len(copied)))
        life.path, life.disk_bytes, life.is_matched, life.is_written = copy, len(copied), is_matched, False
        life.is_copy, life.is_held = True, is_known
        if not is_matched and not is_known:
            life.leave(after=0)
        os.truncate(path, 0)
        young = self.new_life(path)
        young.is_held = was_held
        self.write_lines(young, kinds)
        self.tell(f"copytruncate, the copy {'in' if is_matched else 'outside'} the glob")

    @precondition(lambda self: self.movable())
    @rule(data=st.data())
    def copy_for_a_moment(self, data: st.DataObject) -> None:
        """Make a copy and delete it at once."""
        life = self.draw(data, self.movable())
        copy = self.new_path(data, is_matched=False)
        self.make_copy(data, life, copy)
        life.brief_copies.add(str(copy))
        self.unlink(copy)
        self.tell("copied for a moment")

    def replace(self, life: Life, path: Path, *, is_matched: bool) -> None:
        """Move a life to another file."""
        is_held = life.is_held_now(self.has_scanned)
        if is_matched and self.has_scanned and not life.read_at:
            life.may_double = True  # it may be open, but its content is unknown
            self.tell("may double")
        if not is_matched and not is_held:
            life.leave(after=life.read_at)
        life.path, life.is_matched = path, is_matched
        life.is_copy, life.is_held = True, is_held

    def rotated(self) -> list[Life]:
        return [life for life in self.copied() if not life.is_written]

    @precondition(lambda self: self.rotated())
    @rule(data=st.data(), compression=st.sampled_from(sorted(COMPRESS)[1:]), is_matched=st.booleans())
    def compress(self, data: st.DataObject, compression: str, is_matched: bool) -> None:
        life = self.draw(data, self.rotated())
        plain = life.path
        archive = self.new_path(data, is_matched=is_matched)
        self.make_copy(data, life, archive, compression)
        self.unlink(plain)
        self.replace(life, archive, is_matched=is_matched)
        life.compression = compression
        self.tell(f"compressed {'within' if is_matched else 'out of'} the glob")

    def movable(self) -> list[Life]:
        return [life for life in self.copied() if not life.is_copy]

    def copied(self) -> list[Life]:
        if not self.may_be_copied:
            return []
        return self.on_disk(also=lambda life: bool(life.content) and not life.compression and not life.has_banner)

    @precondition(lambda self: self.movable())
    @rule(data=st.data(), where=st.sampled_from(["same name", "glob", "outside"]))
    def move_by_copy(self, data: st.DataObject, where: str) -> None:
        life = self.draw(data, self.movable())
        path = life.path
        copy = self.new_path(data, is_matched=where == "glob")
        self.make_copy(data, life, copy)
        self.unlink(path)
        if where == "same name":
            copy.rename(path)
            self.replace(life, path, is_matched=life.is_matched)
        else:
            self.replace(life, copy, is_matched=where == "glob")
            life.is_written = life.is_written and where == "glob"
        self.tell(f"moved by copying: {where}")


class SourcesWithLongLines(Sources):
    """Lines may be too long for memory; only their position is kept, so they do not identify copies."""

    has_long_lines = True
    may_be_copied = False


class CrowdedSources(SourcesWithLongLines):
    """There are more files than may be open. No file leaves the glob, because it might never have been opened."""

    max_open = 2
    may_leave = False


@pytest.mark.parametrize(("machine", "examples"), [(Sources, 12), (SourcesWithLongLines, 15), (CrowdedSources, 8)])
def test_lives_of_files(machine: type[Sources], examples: int):
    """Simulate the same lives every time; `make lives` tries others."""
    how = settings(max_examples=examples, stateful_step_count=30, deadline=None, database=None)
    seed(1)(get_state_machine_test(machine, settings=how))()
