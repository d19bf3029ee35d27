"""
Following files against a small model: whatever is done to them, each complete line arrives once and in order.

The tailer is driven step by step (`_discover`, `_read_round`), so that no test has to wait for it. A line that was
appended and then truncated away before a look is out of anybody's reach; the model truncates only what was read.
"""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shipper.model.records import Marker, Stream, digest
from shipper.sources.discovery import Patterns
from shipper.sources.follower import Follower
from shipper.sources.identity import StreamBook

ROTATE_WAIT_S = 5.0


class NoRegister:
    """Remembers nothing."""

    def started_patterns(self) -> dict[str, float]:
        return set()

    def begin(self, streams: object, patterns: object, now_s: float) -> None: ...
    def note(self, streams: object, now_s: float) -> None: ...
    def note_unreachable(self, streams: object, now_s: float) -> list[tuple[Stream, int]]:
        return []

    def forget(self, stream_ids: object) -> None: ...


class Following(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shipper-tail-"))
        self.live = self.folder / "app.log"
        self.numbers = count(1)
        self.ids = count(1)
        self.rotations = 0
        self.now = 1000.0
        self.torn = b""
        self.expected: list[bytes] = []
        self.got: list[bytes] = []
        self.checkpoints: dict[int, Stream] = {}

    def teardown(self) -> None:
        self.follower_stops()
        shutil.rmtree(self.folder)

    def follower_stops(self) -> None:
        self.follower.files.close_all()

    @initialize()
    def start(self) -> None:
        self.live.touch()
        self.restart_from({})

    def restart_from(self, known: dict[int, Stream]) -> None:
        by_inode = {(stream.device, stream.inode): stream for _, stream in sorted(known.items())}
        book = StreamBook(by_inode.values(), self.ids.__next__, max_record_bytes=10_000)
        self.follower = Follower(
            Patterns([str(self.live), f"{self.live}.*"], own_directory=self.folder / "state"),
            book,
            NoRegister(),
            rotate_wait_s=ROTATE_WAIT_S,
            wall_time=lambda: 1.0,
        )
        self.follower.look(self.follower.find(), self.now)

    def append(self, data: bytes) -> None:
        with self.live.open("ab") as out:
            out.write(data)

    @rule(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=5))
    def write(self, sizes: list[int]) -> None:
        for size in sizes:
            rest = b"%d %s" % (next(self.numbers), b"x" * size)
            self.append(rest + b"\n")
            self.expected.append(self.torn + rest)
            self.torn = b""

    @rule(size=st.integers(1, 90))
    def write_torn(self, size: int) -> None:
        self.append(b"y" * size)
        self.torn += b"y" * size

    @rule()
    def rotate_by_rename(self) -> None:
        if self.torn:  # a writer ends its line before it goes
            self.write([0])
        self.rotations += 1
        self.live.rename(self.folder / f"app.log.{self.rotations}")
        self.live.touch()

    @precondition(lambda self: self.got == self.expected and not self.torn)
    @rule(is_regrown=st.booleans())
    def truncate_in_place(self, is_regrown: bool) -> None:
        size = self.live.stat().st_size
        with self.live.open("r+b") as out:
            out.truncate(0)
        while is_regrown and self.live.stat().st_size <= size:
            self.write([40])

    @rule(rounds=st.integers(1, 3), seconds=st.sampled_from([0.0, 1.0, 20.0]))
    def look(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self.now += seconds
            self.follower.look(self.follower.find(), self.now)
            for chunk in self.follower.files.read(self.now):
                assert chunk.data.endswith(b"\n")
                self.got += chunk.data.splitlines()
                # As if it were settled and saved at once: the row that the store would hold.
                tail = chunk.data[-64:]
                self.checkpoints[chunk.stream.stream_id] = Stream(
                    stream_id=chunk.stream.stream_id,
                    kind="file",
                    path=chunk.stream.path,
                    device=chunk.stream.device,
                    inode=chunk.stream.inode,
                    head=chunk.stream.head,
                    marker=Marker(chunk.end_offset, len(tail), digest(tail)),
                )

    @rule()
    def stop_and_start(self) -> None:
        self.follower_stops()
        self.restart_from(self.checkpoints)

    @rule()
    def everything_arrives(self) -> None:
        self.look(2, 1.0)
        # Lines of a rotated file and of its successor come from two streams; each keeps its own order.
        assert sorted(self.got) == sorted(self.expected), "each complete line once"
        numbers = [int(raw.lstrip(b"y").split()[0]) for raw in self.got]
        assert len(set(numbers)) == len(numbers)
        self.got = list(self.expected)


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
