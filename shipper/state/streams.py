"""Saved inputs: their identity, checkpoints, and parts that became unreachable."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from shipper.model.records import RECORD_GAP_BYTES, Head, Marker, Stream, StreamKind, digest
from shipper.state.schema import reading
from shipper.state.sqlite import fetch, translate_errors

_COLUMNS: Final = (
    *("stream_id", "kind", "path", "device", "inode", "compression", "size", "ended_size", "ended_ns"),
    *("is_rotated", "is_gone", "checkpoint", "head_bytes", "head_digest", "marker_bytes", "marker_digest"),
    "settled_until",
)
_SETTLED: Final = ("checkpoint", "marker_bytes", "marker_digest", "settled_until", "updated_at")
_MISTAKES_MAX: Final = 10_000


def _upsert(updated: Sequence[str]) -> str:
    """Return the statement that inserts a stream or updates some of its columns."""
    names = dict.fromkeys((*_COLUMNS, *_SETTLED))
    # A path is bytes and may not be UTF-8; it is stored as text for readability.
    values = ("CAST(:path AS TEXT)" if name == "path" else f":{name}" for name in names)
    return (
        f"INSERT INTO streams ({', '.join(names)}) VALUES ({', '.join(values)}) "
        f"ON CONFLICT (stream_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in updated)}"
    )


_IDENTITY: Final = [name for name in _COLUMNS[2:] if name not in _SETTLED]
_NOTE: Final = _upsert([*_IDENTITY, "settled_until"])
_SAVE: Final = _upsert([*_IDENTITY, *_SETTLED])
_READ: Final = f"SELECT {', '.join(_COLUMNS)} FROM streams".replace(" path,", " CAST(path AS BLOB),")


def read_started_patterns(db: sqlite3.Connection) -> dict[str, float]:
    """Read the patterns used by earlier runs, with the time of first use, seconds since the epoch."""
    rows = db.execute("SELECT CAST(pattern AS BLOB), started_at FROM started_patterns")
    return {os.fsdecode(pattern): started_at for pattern, started_at in rows}


def read_file_streams(directory: Path) -> list[Stream]:
    """Read the saved files of a state directory without its lock. Errors as for `reading`."""
    with reading(directory) as db:
        return StreamTable(db, directory / "state.db", nullcontext).load("file")


class StreamTable:
    """The streams of a state database; `transaction` begins a write transaction."""

    def __init__(
        self, db: sqlite3.Connection, path: Path, transaction: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._db = db
        self._path = path
        self._transaction = transaction

    def load(self, kind: StreamKind) -> list[Stream]:
        """Return the streams of one kind, oldest first."""
        rows = fetch(self._db, self._path, f"{_READ} WHERE kind = ? ORDER BY stream_id", (kind,))
        with translate_errors(self._path):
            streams = [_stream_of(dict(zip(_COLUMNS, row, strict=True))) for row in rows]
        self._load_mistakes({stream.stream_id: stream for stream in streams})
        return streams

    def _load_mistakes(self, streams: dict[int, Stream]) -> None:
        """
        Set the streams' mistakes to the rejections right before their checkpoints, from the newest dead letters.

        A process that resumes in the middle of an input with no valid records needs them to detect that.
        """
        starts = {stream_id: stream.checkpoint for stream_id, stream in streams.items()}
        with translate_errors(self._path):
            rows = self._db.execute(
                "SELECT stream_id, start_offset, end_offset, rule FROM dead_letters WHERE delivery = 'invalid' "
                "ORDER BY id DESC LIMIT ?",
                (_MISTAKES_MAX,),
            )
            for stream_id, start, end, rule in rows:
                if not 0 <= starts.get(stream_id, -1) - end < RECORD_GAP_BYTES:
                    break
                starts[stream_id] = start
                mistakes = streams[stream_id].mistakes
                mistakes[rule] = mistakes.get(rule, 0) + 1

    def newest_id(self) -> int:
        """Return the greatest stream id ever saved."""
        return int(fetch(self._db, self._path, "SELECT youngest_stream_id FROM totals")[0][0])

    def started_patterns(self) -> dict[str, float]:
        """Return the patterns used by earlier runs, with the time of first use, seconds since the epoch."""
        with translate_errors(self._path):
            return read_started_patterns(self._db)

    def save(self, stream: Stream, checkpoint: int, tail: bytes, now_s: float) -> None:
        """Save a stream within a transaction; `tail` is the last bytes before the checkpoint."""
        settled = {
            "checkpoint": checkpoint,
            "marker_bytes": len(tail),
            "marker_digest": digest(tail),
            "settled_until": stream.settled_until_with(checkpoint),
        }
        self._write(_SAVE, stream, {**settled, "updated_at": now_s})

    def _write(self, statement: str, stream: Stream, changes: dict[str, object]) -> None:
        self._db.execute(statement, _row_of(stream) | changes)
        if stream.inode:
            # The file was truncated or its inode reused: the older stream gives it up; a copy may still turn up for it.
            self._db.execute(
                "UPDATE streams SET device = 0, inode = 0 "
                "WHERE kind = ? AND device = ? AND inode = ? AND stream_id < ?",
                (stream.kind, stream.device, stream.inode, stream.stream_id),
            )
        self._db.execute("UPDATE totals SET youngest_stream_id = max(youngest_stream_id, ?)", (stream.stream_id,))

    def begin(self, streams: Iterable[tuple[Stream, bytes]], patterns: Iterable[str], now_s: float) -> None:
        """
        Save the checkpoints of streams that are not read from their beginning.

        Args:
            streams: With the last bytes before their checkpoints.
            patterns: Of `input.include`; files that match them later are read from their beginning.
        """
        with self._transaction():
            for stream, tail in streams:
                self.save(stream, stream.checkpoint, tail, now_s)
            self._db.executemany(
                "INSERT OR IGNORE INTO started_patterns VALUES (CAST(? AS TEXT), ?)",
                [(os.fsencode(pattern), now_s) for pattern in patterns],
            )

    def note(self, streams: Iterable[Stream], now_s: float) -> None:
        """Save the identity and size of streams, but not the checkpoint, which another thread may be updating."""
        with self._transaction():
            for stream in streams:
                self._write(_NOTE, stream, {"updated_at": now_s})

    def note_unreachable(self, streams: Iterable[Stream], now_s: float) -> list[tuple[Stream, int]]:
        """Save inputs that were gone before all was read; return the new ones with their unread bytes."""
        noted = []
        with self._transaction():
            for stream in streams:
                unread = stream.size - max(stream.checkpoint, stream.read_offset)
                added = self._db.execute(
                    "INSERT OR IGNORE INTO unreachable VALUES (?, ?, ?, ?)",
                    (stream.stream_id, stream.shown_path, unread, now_s),
                ).rowcount
                if added:
                    self._db.execute("UPDATE totals SET unreachable_bytes = unreachable_bytes + ?", (unread,))
                    noted.append((stream, unread))
        return noted

    def forget(self, stream_ids: Iterable[int]) -> None:
        """Delete streams whose input no longer exists; their dead letters and counts stay."""
        with self._transaction():
            self._db.executemany("DELETE FROM streams WHERE stream_id = ?", [(number,) for number in stream_ids])


def _row_of(stream: Stream) -> dict[str, object]:
    """Return the columns of a stream; attributes that another thread may replace are read once."""
    head, marker = stream.head, stream.marker
    row: dict[str, object] = {name: getattr(stream, name) for name in _COLUMNS if name in Stream.__struct_fields__}
    row |= {"checkpoint": marker.checkpoint, "marker_bytes": marker.length, "marker_digest": marker.digest}
    return row | {"head_bytes": head.length, "head_digest": head.digest, "path": os.fsencode(stream.path)}


def _stream_of(row: dict[str, Any]) -> Stream:
    head = Head(row.pop("head_bytes"), row.pop("head_digest"))
    marker = Marker(row.pop("checkpoint"), row.pop("marker_bytes"), row.pop("marker_digest"))
    row |= {"path": os.fsdecode(row["path"]), "is_rotated": bool(row["is_rotated"]), "is_gone": bool(row["is_gone"])}
    return Stream(**row, head=head, marker=marker)
