"""A folder, a store, and followers that are driven by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from shipper.model.records import MARKER_BYTES, Checkpoint, Chunk, shown
from shipper.sources.discovery import Patterns
from shipper.sources.follower import Follower
from shipper.sources.identity import StreamBook
from shipper.state.store import Store
from shipper.status.overview import Overview, Present, look_at

ROTATE_WAIT_S = 5.0


def settle(store: Store, chunks: Iterable[Chunk], wall_time: float = 1.0) -> None:
    """Save chunks as if their records had all been accepted, the way the pipeline does it."""
    checkpoints = [
        Checkpoint(
            stream=chunk.stream,
            start_offset=chunk.start_offset,
            end_offset=chunk.end_offset,
            tail=chunk.data[-MARKER_BYTES:],
            read=1,
            accepted=1,
            duplicates=0,
            rejections=[],
        )
        for chunk in chunks
    ]
    store.save(checkpoints, wall_time)
    for checkpoint in checkpoints:
        checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)


class Bench:
    """Make it, then `start`; a second `start` is a new process, which knows what the store knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "logs"
        self.folder.mkdir()
        self.state = folder / "state"
        self.state.mkdir()
        self.store = Store(self.state)
        self.clock = count(1)
        self.wall_time = 1.0
        self.now = 0.0

    def patterns(self, *names: str) -> Patterns:
        return Patterns([str(self.folder / name) for name in names], own_directory=self.state)

    def start(self, *names: str, **changes: Any) -> Follower:
        self.names = names or ("*.log",)
        ids = count(self.store.streams.youngest_id() + 1)
        self.follower = Follower(
            self.patterns(*self.names),
            StreamBook(self.store.streams.known("file"), ids.__next__, max_record_bytes=1000),
            self.store.streams,
            rotate_wait_s=ROTATE_WAIT_S,
            wall_time=lambda: self.wall_time,
            **changes,
        )
        self.follower.look(self.follower.find(), 0.0)
        return self.follower

    def stop(self) -> None:
        self.follower.files.close_all()

    def rename_patterns(self, *names: str) -> None:
        """Change the settings, as SIGHUP does."""
        self.names = names
        self.follower.replace_patterns(self.patterns(*names))

    def write(self, name: str, data: bytes, *, mode: str = "ab") -> Path:
        path = self.folder / name
        with path.open(mode) as out:
            out.write(data)
        at = next(self.clock)
        os.utime(path, (at, at))  # no test depends on how finely the file system tells the time
        return path

    def look(self, now: float) -> list[Chunk]:
        """Look once, and read one turn."""
        self.follower.look(self.follower.find(), now)
        return self.follower.files.read(now)

    def read(self, now: float) -> bytes:
        return b"".join(chunk.data for chunk in self.look(now))

    def ship(self, *moments: float) -> bytes:
        """Look at some moments, and read and settle all there is."""
        shipped = []
        for now in moments:
            chunks = self.look(now)
            while self.follower.files.has_news:
                chunks += self.follower.files.read(now)
            settle(self.store, chunks, self.wall_time)
            shipped += [chunk.data for chunk in chunks]
        return b"".join(shipped)

    def status(self, at: float) -> Overview:
        """What `shipper status` finds."""
        found = self.patterns(*self.names).find()
        present = [Present(shown(each.path), *each.place, each.status.st_size) for each in found]
        overview = look_at(self.state, at, present)
        assert overview is not None
        return overview
