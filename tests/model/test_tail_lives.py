"""
Several followed files and a real store against a model: rotation in and out of the glob, truncation, deletion, late
writes, torn and endless lines, saves of any part, restarts, few open files.

What is written between two truncations is a *life* of a file. A life is read from its beginning without a gap and
without an overlap, as offsets tell; a restart goes back exactly to what was saved. The tailer is driven step by step
and time is a number, so that no test waits.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shipper.model.records import Chunk
from shipper.sources import reader as reader_module
from shipper.sources.discovery import Patterns
from shipper.sources.follower import Follower
from shipper.sources.identity import StreamBook
from shipper.state.store import Store
from tests.unit.test_following import settle

ROTATE_WAIT_S = 5.0
READ_BYTES = 256  # small, so that few bytes make many chunks and lines that are longer than a read
FOREVER = range(200)


@dataclass(eq=False)
class Life:
    """What was written into a file since it was made or truncated."""

    number: int
    path: Path | None  # None = deleted, or truncated since
    inode: int
    written_at: float
    content: bytes = b""
    read_at: int = 0
    saved_at: int = 0
    is_owed: bool = True  # its whole lines have to arrive, all of them
    has_been_open: bool = False
    is_matched: bool = True  # by the glob
    has_been_missed: bool = False  # at a look, since it left the glob
    chunks: list[Chunk] = field(default_factory=list)  # read and not saved

    @property
    def lines_end(self) -> int:
        return self.content.rfind(b"\n") + 1


class Lives(RuleBasedStateMachine):
    max_open = 512
    may_leave = True

    def __init__(self) -> None:
        super().__init__()
        self.true_read_bytes = reader_module.READ_BYTES
        reader_module.READ_BYTES = READ_BYTES  # type: ignore[misc]
        self.root = Path(tempfile.mkdtemp(prefix="shipper-lives-"))
        self.folder = self.root / "logs"
        self.folder.mkdir()
        (self.root / "state").mkdir()
        self.now = 1000.0
        self.ticks = count(1)
        self.numbers = count(1)
        self.lives: list[Life] = []
        self.store = Store(self.root / "state")
        self.max_line_bytes = 0
        self.follower: Follower

    def teardown(self) -> None:
        reader_module.READ_BYTES = self.true_read_bytes  # type: ignore[misc]
        self.close_files()
        self.store.close()
        shutil.rmtree(self.root)

    @initialize(max_record_bytes=st.sampled_from([100, 400]))
    def begin(self, max_record_bytes: int) -> None:
        self.max_record_bytes = max_record_bytes
        self.start()

    def start(self) -> None:
        book = StreamBook(
            self.store.streams.known("file"),
            count(self.store.streams.youngest_id() + 1).__next__,
            max_record_bytes=self.max_record_bytes,
        )
        self.follower = Follower(
            Patterns([str(self.folder / "*.log")], own_directory=self.root / "state"),
            book,
            self.store.streams,
            rotate_wait_s=ROTATE_WAIT_S,
            wall_time=lambda: 1.0,
            max_open=self.max_open,
        )

    def close_files(self) -> None:
        self.follower.files.close_all()

    # The writer -----------------------------------------------------------------------------------------------------

    def write(self, life: Life, data: bytes) -> None:
        assert life.path is not None
        with life.path.open("ab") as out:
            out.write(data)
        life.content += data
        life.written_at = self.now
        self.touch(life.path)

    def touch(self, path: Path) -> None:
        at = next(self.ticks)
        os.utime(path, (at, at))  # how finely a file system tells the time is not what is tested

    def lines(self, life: Life, sizes: list[int]) -> bytes:
        return b"".join(b"%d:%d %s\n" % (life.number, len(life.content), b"x" * size) for size in sizes)

    def new_life(self, path: Path) -> Life:
        life = Life(next(self.numbers), path, path.stat().st_ino, self.now)
        self.lives.append(life)
        return life

    def matched(self) -> list[Life]:
        return [life for life in self.lives if life.path is not None and life.is_matched]

    def draw(self, data: Any, lives: list[Life]) -> Life:
        return data.draw(st.sampled_from(lives).map(lambda life: life), label="life")  # type: ignore[no-any-return]

    SIZES = st.lists(st.one_of(st.integers(0, 60), st.sampled_from([90, 110, 240, 300, 390, 500, 900])), max_size=4)

    @precondition(lambda self: len(self.matched()) < 6)
    @rule(sizes=SIZES)
    def make_file(self, sizes: list[int]) -> None:
        path = self.folder / f"{next(self.ticks)}.log"
        path.touch()
        life = self.new_life(path)
        self.write(life, self.lines(life, sizes))

    @precondition(lambda self: self.matched())
    @rule(data=st.data(), sizes=SIZES)
    def append(self, data: st.DataObject, sizes: list[int]) -> None:
        life = self.draw(data, self.matched())
        self.write(life, self.lines(life, sizes))

    @precondition(lambda self: self.matched())
    @rule(data=st.data(), size=st.sampled_from([1, 20, 120, 300]))
    def append_torn(self, data: st.DataObject, size: int) -> None:
        self.write(self.draw(data, self.matched()), b"t" * size)

    @precondition(lambda self: self.matched())
    @rule(data=st.data(), sizes=SIZES)
    def truncate_in_place(self, data: st.DataObject, sizes: list[int]) -> None:
        life = self.draw(data, self.matched())
        path = life.path
        assert path is not None
        life.path, life.is_owed = None, False
        os.truncate(path, 0)
        self.touch(path)
        young = self.new_life(path)
        self.write(young, self.lines(young, sizes))

    @precondition(lambda self: self.may_leave and self.matched())
    @rule(data=st.data())
    def rename_out_of_the_glob(self, data: st.DataObject) -> None:
        life = self.draw(data, self.matched())
        assert life.path is not None
        life.path = life.path.rename(life.path.with_suffix(f".{next(self.ticks)}"))
        life.is_matched, life.has_been_missed = False, False
        life.is_owed = life.has_been_open

    @precondition(lambda self: self.matched())
    @rule(data=st.data())
    def rename_within_the_glob(self, data: st.DataObject) -> None:
        life = self.draw(data, self.matched())
        assert life.path is not None
        life.path = life.path.rename(life.path.with_suffix(f".{next(self.ticks)}.log"))

    @precondition(lambda self: self.late_writers())
    @rule(data=st.data(), sizes=SIZES)
    def write_late(self, data: st.DataObject, sizes: list[int]) -> None:
        life = self.draw(data, self.late_writers())
        self.write(life, self.lines(life, sizes))

    def late_writers(self) -> list[Life]:
        """Files that left the glob and have to be open still."""
        return [
            life
            for life in self.lives
            if life.path is not None
            and not life.is_matched
            and life.is_owed
            and (not life.has_been_missed or self.now - life.written_at < ROTATE_WAIT_S)
        ]

    @precondition(lambda self: self.away())
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        life = self.draw(data, self.away())
        assert life.path is not None
        life.path = life.path.rename(self.folder / f"back{next(self.ticks)}.log")
        life.is_matched = life.is_owed = True
        life.has_been_open = False  # it may have been closed since

    def away(self) -> list[Life]:
        return [life for life in self.lives if life.path is not None and not life.is_matched]

    @precondition(lambda self: self.may_leave and self.matched())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        life = self.draw(data, self.matched())
        assert life.path is not None
        life.path.unlink()
        life.path, life.is_matched = None, False
        life.is_owed = life.has_been_open

    # The tailer -----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 60.0]), rounds=st.integers(1, 3))
    def look(self, seconds: float, rounds: int) -> None:
        self.discover_and_read(seconds, rounds)

    def discover_and_read(self, seconds: float, rounds: int) -> int:
        self.now += seconds
        self.follower.look(self.follower.find(), self.now)
        for life in self.lives:
            if self.max_open >= 512 and life.is_matched and life.path is not None:
                life.has_been_open = True
            life.has_been_missed = life.has_been_missed or not life.is_matched
        return sum(self.read() for _ in range(rounds))

    def read(self) -> int:
        chunks = self.follower.files.read(self.now)
        for chunk in chunks:
            life = self.life_of(chunk)
            assert chunk.start_offset == life.read_at, f"life {life.number}: neither a gap nor an overlap"
            span = life.content[chunk.start_offset : chunk.end_offset]
            assert span.endswith(b"\n"), "whole lines"
            if chunk.is_oversized:
                assert chunk.data == b""
                assert len(span) > max(READ_BYTES, self.max_record_bytes + 1), "it would have fitted"
                assert span.count(b"\n") == 1
            else:
                assert chunk.data == span
            life.read_at = chunk.end_offset
            life.chunks.append(chunk)
        return len(chunks)

    def life_of(self, chunk: Chunk) -> Life:
        """Find the youngest life in the chunk's file: what was truncated away can no longer be read."""
        return max((life for life in self.lives if life.inode == chunk.stream.inode), key=lambda life: life.number)

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        saved: list[Chunk] = []
        for life in self.lives:
            if life.chunks:
                many = data.draw(st.integers(0, len(life.chunks)), label="chunks saved")
                now_saved, life.chunks = life.chunks[:many], life.chunks[many:]
                saved += now_saved
                if now_saved:
                    life.saved_at = now_saved[-1].end_offset
        settle(self.store, saved)

    @rule()
    def stop_and_start(self) -> None:
        self.close_files()
        self.store.close()
        for life in self.lives:
            life.chunks.clear()
            life.read_at = life.saved_at
            if not life.is_matched:  # found again by its inode if it is known and has a rest
                life.is_owed = life.path is not None and 0 < life.saved_at < len(life.content)
            life.has_been_open = life.has_been_open and life.is_owed and not life.is_matched
        self.store = Store(self.root / "state")
        self.start()

    @invariant()
    def few_files_are_open(self) -> None:
        assert len(self.follower.files) <= self.max_open

    @rule()
    def in_the_end_everything_has_arrived(self) -> None:
        quiet = 0
        for _ in FOREVER:
            quiet = 0 if self.discover_and_read(0.0, 1) else quiet + 1
            if quiet > len(self.lives):
                break
        else:
            raise AssertionError("there is no end")
        for life in self.lives:
            if life.is_owed:
                assert life.read_at == life.lines_end, f"life {life.number}: {life.path}"

    @rule()
    def what_has_left_is_closed_in_the_end(self) -> None:
        self.in_the_end_everything_has_arrived()
        self.look(100.0, 1)
        self.look(100.0, 1)
        matched = {life.inode for life in self.matched()}
        assert {file.place[1] for file in self.follower.files} <= matched


class LivesInACrowd(Lives):
    """Fewer files may be open than there are; what leaves before it could be opened is out of reach, so none leaves."""

    max_open = 2
    may_leave = False


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestLivesInACrowd = LivesInACrowd.TestCase
TestLivesInACrowd.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


class _First:
    """Stands in for what hypothesis draws: the first life, or one chunk."""

    def __init__(self, *drawn: Any) -> None:
        self.drawn = list(drawn)

    def draw(self, *_: Any, **__: Any) -> Any:
        return self.drawn.pop(0)


def test_what_was_read_but_not_saved_of_a_file_that_left_the_glob_is_read_again_after_a_crash():
    lives = Lives()
    try:
        lives.begin(100)
        lives.make_file([0])
        lives.in_the_end_everything_has_arrived()
        (life,) = lives.lives
        lives.append(_First(life), [0])
        lives.rename_out_of_the_glob(_First(life))
        lives.save(_First(1))
        lives.what_has_left_is_closed_in_the_end()
        assert life.saved_at < life.read_at == len(life.content), "there is something to be lost"
        lives.stop_and_start()
        assert life.is_owed
        lives.in_the_end_everything_has_arrived()
    finally:
        lives.teardown()
