"""
What is saved of inputs: how to recognise each again, how far it is settled, and which part became unreachable.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, Final

from shipper.model.records import Head, Marker, Stream, StreamKind, digest
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood

_COLUMNS: Final = (
    *("stream_id", "kind", "path", "device", "inode", "compression", "size", "ended_size", "ended_ns"),
    *("is_rotated", "is_gone", "checkpoint", "head_bytes", "head_digest", "marker_bytes", "marker_digest"),
    "settled_until",
)
_SETTLED: Final = ("checkpoint", "marker_bytes", "marker_digest", "settled_until", "updated_at")


_MISTAKES_MAX: Final = 10_000
_BETWEEN_BYTES: Final = 16  # between two records that stand beside each other; too few for a third one


def _written(name: str) -> str:
    """Write the value of a column; a path is bytes, which need not be UTF-8, and stands as text for who looks."""
    return "CAST(:path AS TEXT)" if name == "path" else f":{name}"


def _upsert(updated: Sequence[str]) -> str:
    """Write the statement that adds a stream, or updates some columns of it."""
    names = dict.fromkeys((*_COLUMNS, *_SETTLED))
    return (
        f"INSERT INTO streams ({', '.join(names)}) VALUES ({', '.join(map(_written, names))}) "
        f"ON CONFLICT (stream_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in updated)}"
    )


_IDENTITY: Final = [name for name in _COLUMNS[2:] if name not in _SETTLED]
_NOTE: Final = _upsert([*_IDENTITY, "settled_until"])
_SAVE: Final = _upsert([*_IDENTITY, *_SETTLED])


def _read(name: str) -> str:
    """Write what reads a column: of a path its bytes."""
    return "CAST(path AS BLOB)" if name == "path" else name


def read_started_patterns(db: sqlite3.Connection) -> dict[str, float]:
    """Read the patterns for which a run has begun, and when."""
    rows = db.execute("SELECT CAST(pattern AS BLOB), started_at FROM started_patterns")
    return {os.fsdecode(pattern): started_at for pattern, started_at in rows}


def known_streams(directory: Path) -> list[Stream]:
    """
    Read the files that a state directory knows, also beside a shipper that runs; none if there is no state yet.

    Raises:
        StateError: The database cannot be read.
    """
    db = open_for_reading(directory)
    if db is None:
        return []
    with closing(db):
        return StreamTable(db, directory / "state.db", nullcontext).known("file")


class StreamTable:
    """
    The streams of a state database.

    Args:
        transaction: Does all of what is within, or nothing.
    """

    def __init__(
        self, db: sqlite3.Connection, path: Path, transaction: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._db = db
        self._path = path
        self._transaction = transaction

    def known(self, kind: StreamKind) -> list[Stream]:
        """Read the streams of one kind, older ones first."""
        with understood(self._path):
            columns = ", ".join(map(_read, _COLUMNS))
            rows = self._db.execute(f"SELECT {columns} FROM streams WHERE kind = ? ORDER BY stream_id", (kind,))
            streams = [_stream_of(dict(zip(_COLUMNS, row, strict=True))) for row in rows]
        self._note_mistakes({stream.stream_id: stream for stream in streams})
        return streams

    def _note_mistakes(self, streams: dict[int, Stream]) -> None:
        """
        Note of each stream what was refused right before its checkpoint, as its newest dead letters tell.

        So a process that goes on in the middle of an input that is unlike records knows it.
        """
        starts = {stream_id: stream.checkpoint for stream_id, stream in streams.items()}
        with understood(self._path):
            rows = self._db.execute(
                "SELECT stream_id, start_offset, end_offset, rule FROM dead_letters WHERE delivery = 'invalid' "
                "ORDER BY id DESC LIMIT ?",
                (_MISTAKES_MAX,),
            )
            for stream_id, start, end, rule in rows:
                if not 0 <= starts.get(stream_id, -1) - end < _BETWEEN_BYTES:
                    break
                starts[stream_id] = start
                mistakes = streams[stream_id].mistakes
                mistakes[rule] = mistakes.get(rule, 0) + 1

    def youngest_id(self) -> int:
        """Return the greatest stream id that was ever saved."""
        with understood(self._path):
            return int(self._db.execute("SELECT youngest_stream_id FROM totals").fetchone()[0])

    def save(self, stream: Stream, checkpoint: int, tail: bytes, now_s: float) -> None:
        """Write a stream within a transaction; `tail` are the last bytes before the checkpoint."""
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
            # The file was truncated, or its inode was given to another one: the older stream may live on in a copy.
            self._db.execute(
                "UPDATE streams SET device = 0, inode = 0 "
                "WHERE kind = ? AND device = ? AND inode = ? AND stream_id < ?",
                (stream.kind, stream.device, stream.inode, stream.stream_id),
            )
        self._db.execute("UPDATE totals SET youngest_stream_id = max(youngest_stream_id, ?)", (stream.stream_id,))

    def begin(self, streams: Iterable[tuple[Stream, bytes]], patterns: Iterable[str], now_s: float) -> None:
        """
        Save where streams begin that are not read from their beginning.

        Args:
            streams: Each with the last bytes before its checkpoint.
            patterns: Of `input.include`: what they match from now on is read from its beginning.
        """
        with self._transaction():
            for stream, tail in streams:
                self.save(stream, stream.checkpoint, tail, now_s)
            self._db.executemany(
                "INSERT OR IGNORE INTO started_patterns VALUES (CAST(? AS TEXT), ?)",
                [(os.fsencode(pattern), now_s) for pattern in patterns],
            )

    def note(self, streams: Iterable[Stream], now_s: float) -> None:
        """
        Save where streams are and how much they hold.

        A checkpoint that is saved stays what it is: another thread may just be moving it.
        """
        with self._transaction():
            for stream in streams:
                self._write(_NOTE, stream, {"updated_at": now_s})

    def started_patterns(self) -> dict[str, float]:
        """Return the patterns for which a run has begun before, and when, seconds since the epoch."""
        with understood(self._path):
            return read_started_patterns(self._db)

    def note_unreachable(self, streams: Iterable[Stream], now_s: float) -> list[tuple[Stream, int]]:
        """
        Note inputs that are gone with something unread.

        Returns:
            Those that were not noted before, with the bytes that are known to be out of reach.
        """
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
        """Drop streams whose input no longer exists; their dead letters and counts stay."""
        with self._transaction():
            self._db.executemany("DELETE FROM streams WHERE stream_id = ?", [(each,) for each in stream_ids])


def _row_of(stream: Stream) -> dict[str, object]:
    """Return the columns of a stream; what another thread may replace is taken as it is now, and once."""
    head, marker = stream.head, stream.marker
    row: dict[str, object] = {name: getattr(stream, name) for name in _COLUMNS if name in Stream.__struct_fields__}
    row |= {"checkpoint": marker.checkpoint, "marker_bytes": marker.length, "marker_digest": marker.digest}
    return row | {"head_bytes": head.length, "head_digest": head.digest, "path": os.fsencode(stream.path)}


def _stream_of(row: dict[str, Any]) -> Stream:
    head = Head(row.pop("head_bytes"), row.pop("head_digest"))
    marker = Marker(row.pop("checkpoint"), row.pop("marker_bytes"), row.pop("marker_digest"))
    row |= {"path": os.fsdecode(row["path"]), "is_rotated": bool(row["is_rotated"]), "is_gone": bool(row["is_gone"])}
    return Stream(**row, head=head, marker=marker)
