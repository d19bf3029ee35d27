"""An overview of a state directory, read with or without a running shipper."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from shipper.model.records import DeliveryClass, shown
from shipper.state.accepted_ids import Window, window_of
from shipper.state.letters import EVERYTHING, Letters, letter_counts
from shipper.state.schema import reading
from shipper.state.streams import read_started_patterns

if TYPE_CHECKING:
    from shipper.sources.discovery import FoundFile

_LETTERS: Final = 10
_RECENT: Final = 1_000  # letters searched for the newest one of each input
_TOTALS: Final = "read, accepted, dead_lettered, duplicates, purged, dead_letter_bytes, unreachable_bytes"
_FileId = tuple[int, int]  # device and inode
_Stat = tuple[int, int]  # size, and time of the last change in nanoseconds


class _Row(NamedTuple):
    """A file in the table of streams."""

    stream_id: int
    path: bytes  # may not be UTF-8
    device: int
    inode: int
    size: int
    checkpoint: int
    compression: str
    ended_size: int
    ended_ns: int
    updated_at: float
    settled_until: float | None
    is_gone: int


_COLUMNS: Final = ", ".join(_Row._fields).replace("path", "CAST(path AS BLOB)")


class NewestLetter(Struct, frozen=True):
    """The newest dead letter of an input; `last_at` is when it was rejected, seconds since the epoch."""

    id: int
    rule: str
    last_at: float


class StreamState(Struct, frozen=True):
    """
    The progress of an input.

    Attributes:
        stream_id: 0 = a file that no shipper has opened yet.
        checkpoint: Bytes settled and saved; 0 if the file was truncated below that and has new content.
        lag_bytes: Difference of the two; too small for an archive that has not been read to its end.
        delivered_until: Everything written to it up to this time is settled; the time of the overview if all of it is.
            None = unknown.
        newest_dead_letter: None = none among the newest thousand of all inputs.
    """

    stream_id: int
    path: str
    size: int
    checkpoint: int
    lag_bytes: int
    compression: str
    updated_at: float
    delivered_until: float | None = None
    newest_dead_letter: NewestLetter | None = None


class SpoolState(Struct, frozen=True):
    """
    The spool of standard input: number of segments, their bytes, and unsettled bytes.

    Attributes:
        delivered_until: Everything read from standard input up to this time is settled; see `StreamState`.
    """

    segments: int = 0
    bytes: int = 0
    lag_bytes: int = 0
    delivered_until: float | None = None


class UnreachableInput(Struct, frozen=True):
    """An input that disappeared before it was read to its end, and its unread bytes."""

    stream_id: int
    path: str
    bytes: int
    noticed_at: float


class LetterSummary(Struct, frozen=True, kw_only=True):
    """
    A summary of a dead letter.

    Attributes:
        offset: Byte offset of the record in its input.
        message: Empty if the message is the service's, which may quote a record.
    """

    id: int
    rule: str
    path: str
    offset: int
    event_id: str
    status: int
    delivery: DeliveryClass
    last_at: float
    message: str


class Overview(Struct, frozen=True, kw_only=True):
    """
    The state at one time. Counts are all-time; `read == accepted + dead_lettered + duplicates`, as only records before
    the checkpoints count.

    Attributes:
        purged: Those of `dead_lettered` that were deleted, by `dead-letters purge` or because of their age.
        streams: Sorted by lag, largest first.
        dead_letters: Stored dead letters by rule.
        letters_without_record: Stored dead letters with only the position of their record.
        unreachable_bytes: Of all inputs, ever.
        dedupe_window: The EventIds remembered for later runs.
    """

    at: float = 0.0
    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    purged: int = 0
    streams: list[StreamState] = []
    spool: SpoolState = SpoolState()
    dead_letters: dict[str, int] = {}
    dead_letter_bytes: int = 0
    letters_without_record: int = 0
    newest_dead_letters: list[LetterSummary] = []
    unreachable_bytes: int = 0
    unreachable: list[UnreachableInput] = []
    dedupe_window: Window = Window()

    @property
    def has_inputs(self) -> bool:
        """Whether any input is known or was ever read."""
        return bool(self.streams or self.spool.segments or self.read)

    @property
    def kept(self) -> int:
        """Number of stored dead letters."""
        return sum(self.dead_letters.values())

    @property
    def lag_bytes(self) -> int:
        """Lag of all files."""
        return sum(stream.lag_bytes for stream in self.streams)

    @property
    def total_lag_bytes(self) -> int:
        """Lag of all files and standard input."""
        return self.lag_bytes + self.spool.lag_bytes

    @property
    def behind(self) -> list[StreamState]:
        """The streams not settled to their end, largest lag first."""
        return [stream for stream in self.streams if stream.delivered_until != self.at]

    @property
    def delivered_until(self) -> float | None:
        """Everything written to all inputs up to this time is settled; None = unknown, or there is no input yet."""
        if not self.has_inputs:
            return None
        return earliest([*(stream.delivered_until for stream in self.streams), self.spool.delivered_until])


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest time; None if one is unknown, or if there are none."""
    all_times = list(times)
    return None if None in all_times else min((time for time in all_times if time is not None), default=None)


def read_overview(directory: Path, at: float = 0.0, files: Iterable[FoundFile] = ()) -> Overview:
    """
    Read the state of a directory without its lock.

    Args:
        at: The time before this call, seconds since the epoch; only needed for `delivered_until`.
        files: The files matched by `input.include`, some of which may be new or renamed since a shipper was running.
    Raises:
        StateError: As for `Store`.
    """
    with reading(directory) as db:
        totals = db.execute(f"SELECT {_TOTALS} FROM totals").fetchone()
        gone = db.execute("SELECT stream_id, path, bytes, noticed_at FROM unreachable ORDER BY noticed_at")
        return Overview(
            at=at,
            **dict(zip(_TOTALS.split(", "), totals, strict=True)),
            streams=_stream_states(db, at, files),
            spool=_spool_state(db, directory / "spool", at),
            dead_letters=letter_counts(db),
            letters_without_record=db.execute("SELECT count(*) FROM dead_letters WHERE length(raw) = 0").fetchone()[0],
            newest_dead_letters=_newest_letters(db, directory / "state.db"),
            dedupe_window=window_of(db, directory),
            unreachable=[UnreachableInput(*row) for row in gone],
        )


def started_patterns(directory: Path) -> dict[str, float]:
    """Read when the patterns were first used, seconds since the epoch. Errors as for `Store`."""
    with reading(directory) as db:
        return read_started_patterns(db)


# Files ------------------------------------------------------------------------------------------------------------


def _stream_states(db: sqlite3.Connection, at: float, files: Iterable[FoundFile]) -> list[StreamState]:
    new_files = {file.file_id: file for file in files}
    newest = _newest_by_stream(db)
    states = []
    folders: dict[str, dict[_FileId, str]] = {}
    for row in map(_Row._make, db.execute(f"SELECT {_COLUMNS} FROM streams WHERE kind = 'file'")):
        path, file_id = os.fsdecode(row.path), (row.device, row.inode)
        file = new_files.pop(file_id, None)
        now = (file.status.st_size, file.status.st_mtime_ns) if file else _stat_file(path, file_id)
        if now is None and row.inode:
            now = _stat_renamed(path, file_id, folders)
        states.append(_stream_state(row, shown(file.path if file else path), now, at, newest.get(row.stream_id)))
    unread = [(shown(file.path), file.status.st_size) for file in new_files.values()]
    states += [StreamState(0, path, size, 0, size, "", 0.0) for path, size in unread if size]
    states.sort(key=lambda state: (-state.lag_bytes, state.delivered_until == at, -state.updated_at))
    return states


def _stat_file(path: str, file_id: _FileId) -> _Stat | None:
    """Return the size and time of a file; None if it is not at this path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_size, status.st_mtime_ns) if (status.st_dev, status.st_ino) == file_id else None


def _stat_renamed(path: str, file_id: _FileId, folders: dict[str, dict[_FileId, str]]) -> _Stat | None:
    """Return the size and time of a file that was renamed within its folder; None if it is not there."""
    folder = os.path.dirname(path) or "."
    if folder not in folders:
        folders[folder] = {}
        with suppress(OSError), os.scandir(folder) as entries:
            device = os.stat(folder).st_dev
            folders[folder] = {(device, entry.inode()): entry.path for entry in entries}
    return _stat_file(folders[folder].get(file_id, ""), file_id)


def _stream_state(row: _Row, path: str, now: _Stat | None, at: float, newest: NewestLetter | None) -> StreamState:
    size, checkpoint = row.size, row.checkpoint
    size_now = now[0] if now else None
    if row.compression:
        # An archive's content size is known once its end was reached, or if it was a plain file before.
        has_ended = size_now in {None, row.ended_size} if row.ended_size >= 0 else checkpoint == size > 0
        is_settled = has_ended and checkpoint >= size
    else:
        is_truncated = size_now is not None and size_now < checkpoint
        if size_now is not None and now != (row.ended_size, row.ended_ns):  # its content may end before NULs
            size, checkpoint = size_now, 0 if is_truncated else checkpoint
        is_settled = checkpoint >= size and not is_truncated  # a copy may contain unread data from before
    # A missing file may have grown before it disappeared, or exist elsewhere, unless a search has failed.
    is_settled = is_settled and bool(now or row.is_gone)
    size = max(size, checkpoint)
    until = row.settled_until
    if until is not None and until > at:
        until = None  # the clock was set back since
    return StreamState(
        stream_id=row.stream_id,
        path=path,
        size=size,
        checkpoint=checkpoint,
        lag_bytes=size - checkpoint,
        compression=row.compression,
        updated_at=row.updated_at,
        delivered_until=at if is_settled else until,
        newest_dead_letter=newest,
    )


# Standard input ---------------------------------------------------------------------------------------------------


def _spool_state(db: sqlite3.Connection, spool: Path, at: float) -> SpoolState:
    rows = db.execute("SELECT stream_id, checkpoint, settled_until FROM streams WHERE kind = 'spool'")
    saved: Mapping[int, tuple[int, float | None]] = {stream_id: rest for stream_id, *rest in rows}
    count = total = lag = 0
    until: float | None = at
    closed_at: float | None = None  # last write to the previous segment
    for path in sorted(path for path in spool.glob("[0-9]*") if path.name.partition(".")[0].isdecimal()):
        try:
            status = path.lstat()
        except FileNotFoundError:  # settled, and just deleted by a running shipper
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        checkpoint, settled_until = saved.get(int(path.name.partition(".")[0]), (0, None))
        if not lag and checkpoint < status.st_size:
            # Everything read before this segment began is in earlier ones, which are settled.
            until = max((time for time in (settled_until, closed_at) if time is not None), default=None)
        count, total, lag = count + 1, total + status.st_size, lag + status.st_size - checkpoint
        closed_at = status.st_mtime
    return SpoolState(count, total, lag, until)


# Dead letters -----------------------------------------------------------------------------------------------------


def _newest_by_stream(db: sqlite3.Connection) -> dict[int, NewestLetter]:
    """Return the newest letter of each stream among the recent ones; there is no index to find others."""
    newest: dict[int, NewestLetter] = {}
    query = "SELECT stream_id, id, rule, last_at FROM dead_letters ORDER BY id DESC LIMIT ?"
    for stream_id, *letter in db.execute(query, [_RECENT]):
        newest.setdefault(stream_id, NewestLetter(*letter))
    return newest


def _newest_letters(db: sqlite3.Connection, path: Path) -> list[LetterSummary]:
    return [
        LetterSummary(
            id=letter.id,
            rule=letter.rule,
            path=letter.path,
            offset=letter.start_offset,
            event_id=letter.event_id,
            status=letter.status,
            delivery=letter.delivery,
            last_at=letter.last_at,
            message=letter.message if letter.delivery == "invalid" else "",
        )
        for letter in Letters(db, path).newest(EVERYTHING, _LETTERS)
    ]
