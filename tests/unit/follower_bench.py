"""A folder, a store, and followers that are driven step by step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from shipper.config.settings import load_settings
from shipper.model.records import MARKER_BYTES, Checkpoint, Chunk
from shipper.sources.discovery import Patterns
from shipper.sources.follower import Follower
from shipper.sources.identity import StreamIndex
from shipper.state.store import Store
from shipper.status.overview import Overview
from shipper.status.snapshot import Snapshot, take_snapshot

ROTATE_WAIT_S = 5.0


def lines(first: int, last: int) -> bytes:
    return b"".join(b'{"n":%06d}\n' % number for number in range(first, last))


def settle(store: Store, chunks: Iterable[Chunk], wall_time: float = 1.0) -> None:
    """Save chunks as if all their records had been accepted, like the pipeline."""
    checkpoints = []
    for chunk in chunks:
        place = {"stream": chunk.stream, "start_offset": chunk.start_offset, "end_offset": chunk.end_offset}
        counts = {"read": 1, "accepted": 1, "duplicates": 0, "rejections": []}
        checkpoints.append(Checkpoint(**place, **counts, tail=chunk.data[-MARKER_BYTES:]))
    store.save(checkpoints, wall_time)
    for checkpoint in checkpoints:
        checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)


class Bench:
    """Create it, then call `start`; a second `start` is a new process with the saved state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "logs"
        self.folder.mkdir()
        self.state = folder / "state"
        self.state.mkdir()
        self.store = Store(self.state)
        self.clock = count(1)
        self.wall_time = 1.0
        self.now = 0.0
        self.is_started = False

    def patterns(self, *names: str) -> Patterns:
        return Patterns([str(self.folder / name) for name in names], state_directory=self.state)

    def start(self, *names: str, **changes: Any) -> Follower:
        self.names = names or ("*.log",)
        self.changes = changes
        self.create(*self.names, **changes)
        self.is_started = True
        self.follower.scan(self.follower.find(), 0.0)
        return self.follower

    def create(self, *names: str, **changes: Any) -> Follower:
        """Create the follower without a first look."""
        ids = count(self.store.streams.newest_id() + 1)
        self.follower = Follower(
            self.patterns(*names),
            StreamIndex(self.store.streams.load("file"), ids.__next__, max_record_bytes=1000),
            self.store.streams,
            wall_time=lambda: self.wall_time,
            **{"rotate_wait_s": ROTATE_WAIT_S, **changes},
        )
        return self.follower

    def stop(self) -> None:
        self.follower.files.close_all()

    def restart(self, *names: str, **changes: Any) -> Follower:
        self.stop()
        return self.start(*(names or self.names), **changes)

    @contextmanager
    def stopped(self, is_stopped: bool = True) -> Iterator[None]:
        """Be stopped meanwhile, or not."""
        if is_stopped:
            self.stop()
        yield
        if is_stopped:
            self.start(*self.names, **self.changes)

    def rename_patterns(self, *names: str) -> None:
        """Change the patterns, like SIGHUP."""
        self.names = names
        self.follower.replace_patterns(self.patterns(*names))

    def write(self, name: str, data: bytes, *, mode: str = "ab") -> Path:
        path = self.folder / name
        with path.open(mode) as out:
            out.write(data)
        at = next(self.clock)
        os.utime(path, (at, at))  # do not depend on the time resolution of the file system
        return path

    def look(self, now: float) -> list[Chunk]:
        """Look once, and read one turn."""
        self.follower.scan(self.follower.find(), now)
        return self.follower.files.read(now)

    def read(self, now: float) -> bytes:
        return b"".join(chunk.data for chunk in self.look(now))

    def ship(self, *moments: float) -> bytes:
        """Look at these times, and read and settle everything."""
        shipped = []
        for now in moments:
            chunks = self.look(now)
            while self.follower.files.has_ready:
                chunks += self.follower.files.read(now)
            settle(self.store, chunks, self.wall_time)
            shipped += [chunk.data for chunk in chunks]
        return b"".join(shipped)

    def snapshot(self, at: float) -> Snapshot:
        """What `shipper status` finds."""
        include = [str(self.folder / name) for name in self.names]
        flags = {"input.include": include, "state.directory": str(self.state)}
        return take_snapshot(load_settings(config_path=None, environ={}, flags=flags), at)

    def status(self, at: float) -> Overview:
        return self.snapshot(at).state

    def is_delivered(self, until: float) -> bool:
        return self.snapshot(until).is_delivered(until)
