"""What a state directory says of all inputs, read beside a shipper that runs, or without one. Nothing here writes."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from msgspec import Struct

from shipper.records import StreamKind
from shipper.state.schema import open_for_reading, understood


class StreamState(Struct, frozen=True):
    """
    How far an input is settled.

    Attributes:
        size: Bytes of content that are known to exist.
        checkpoint: Bytes that are settled and saved.
        lag_bytes: What is in between.
        compression: Empty = not compressed.
        updated_at: When the checkpoint was saved, seconds since the epoch.
    """

    stream_id: int
    path: str
    size: int
    checkpoint: int
    lag_bytes: int
    compression: str
    updated_at: float


class SpoolState(Struct, frozen=True):
    """What is kept of standard input: segments, their bytes, and how many of these are not settled."""

    segments: int = 0
    bytes: int = 0
    lag_bytes: int = 0


class UnreachableInput(Struct, frozen=True):
    """An input that was gone before it was read to its end, and how much of it is known to be missing."""

    stream_id: int
    path: str
    bytes: int
    noticed_at: float


class Overview(Struct, frozen=True, kw_only=True):
    """
    The state at one moment; `read == accepted + dead_lettered + duplicates`, as what is pending lies behind.

    Attributes:
        dead_letters: How many are kept, by rule.
        unreachable_bytes: Of all inputs, ever.
    """

    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    streams: list[StreamState] = []
    spool: SpoolState = SpoolState()
    dead_letters: dict[str, int] = {}
    dead_letter_bytes: int = 0
    unreachable_bytes: int = 0
    unreachable: list[UnreachableInput] = []


def look_at(directory: Path) -> Overview | None:
    """
    Read the state; the caller need not hold the lock.

    Returns:
        None if there is no state, or if its tables are to be made or brought up to date first.
    Raises:
        StateError: As for `Store`.
    """
    db = open_for_reading(directory)
    if db is None:
        return None
    with closing(db), understood(directory / "state.db"):
        db.execute("BEGIN")  # so that all of it is of one moment
        totals = db.execute(
            "SELECT read, accepted, dead_lettered, duplicates, dead_letter_bytes, unreachable_bytes FROM totals"
        ).fetchone()
        inputs: dict[StreamKind, list[StreamState]] = {"file": [], "spool": []}
        for kind, device, inode, *row in db.execute(
            "SELECT kind, device, inode, stream_id, path, size, checkpoint, compression, updated_at FROM streams "
            "ORDER BY stream_id"
        ):
            inputs[kind].append(_stream_state((device, inode), *row))
        return Overview(
            read=totals[0],
            accepted=totals[1],
            dead_lettered=totals[2],
            duplicates=totals[3],
            dead_letter_bytes=totals[4],
            unreachable_bytes=totals[5],
            streams=inputs["file"],
            spool=_spool_state(directory / "spool", {each.stream_id: each.checkpoint for each in inputs["spool"]}),
            dead_letters=dict(
                db.execute("SELECT rule, count(*) AS n FROM dead_letters GROUP BY rule ORDER BY n DESC, rule")
            ),
            unreachable=[
                UnreachableInput(*row)
                for row in db.execute("SELECT stream_id, path, bytes, noticed_at FROM unreachable ORDER BY noticed_at")
            ],
        )


def _stream_state(
    place: tuple[int, int],
    stream_id: int,
    path: str,
    size: int,
    checkpoint: int,
    compression: str,
    updated_at: float,
) -> StreamState:
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) == place and not compression:
            size = status.st_size
    except OSError:
        pass  # it is somewhere else, or gone: what was seen last has to do
    size = max(size, checkpoint)
    return StreamState(stream_id, path, size, checkpoint, size - checkpoint, compression, updated_at)


def _spool_state(spool: Path, checkpoints: dict[int, int]) -> SpoolState:
    sizes = {path.name: path.stat().st_size for path in spool.glob("[0-9]*")}
    lag = sum(size - checkpoints.get(int(name.partition(".")[0]), 0) for name, size in sizes.items())
    return SpoolState(len(sizes), sum(sizes.values()), lag)
