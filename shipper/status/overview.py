"""Reads a state directory, whether a shipper is running or not. Nothing here writes."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from shipper.model.records import DeliveryClass, shown
from shipper.state.accepted_ids import Window, window_of
from shipper.state.letters import EVERYTHING, Letters, kept_by_rule
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood
from shipper.state.streams import read_started_patterns

_LETTERS: Final = 10  # the newest ones
_RECENT: Final = 1_000  # letters that are looked through for the newest one of each input
_Place = tuple[int, int]  # device and inode
_Seen = tuple[int, int]  # size and time of the last change, in nanoseconds


class _Row(NamedTuple):
    """A file as the table of streams has it."""

    stream_id: int
    path: bytes  # it need not be UTF-8
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


class Present(NamedTuple):
    """A file to ship, whether it is known as an input yet or not."""

    path: str
    device: int
    inode: int
    size: int
    changed_ns: int = 0


class NewestLetter(Struct, frozen=True):
    """The newest dead letter of an input: `rule` is why it was refused, `last_at` when, seconds since the epoch."""

    id: int
    rule: str
    last_at: float


class StreamState(Struct, frozen=True):
    """
    How far an input is settled.

    Attributes:
        stream_id: 0 = a file that is there and was not looked at by any shipper yet.
        size: Bytes of content that are known to exist.
        checkpoint: Bytes that are settled and saved; 0 if what they were was cut off, and the file has others now.
        lag_bytes: What is in between. That of an archive that is not read to its end is not known, and less here.
        compression: Empty = not compressed.
        updated_at: When the checkpoint was saved, seconds since the epoch.
        delivered_until: All that was written to it up to then is settled; the moment of this look if all of it is.
            None = not known.
        newest_dead_letter: None = it has none among the newest thousand of all inputs.
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
    What is kept of standard input: segments, their bytes, and how many of these are not settled.

    Attributes:
        delivered_until: All that was read from standard input up to then is settled; as for a stream.
    """

    segments: int = 0
    bytes: int = 0
    lag_bytes: int = 0
    delivered_until: float | None = None


class UnreachableInput(Struct, frozen=True):
    """An input that was gone before it was read to its end, and how much of it is known to be missing."""

    stream_id: int
    path: str
    bytes: int
    noticed_at: float


class LetterBrief(Struct, frozen=True, kw_only=True):
    """
    A dead letter in brief.

    Attributes:
        offset: Where the record begins in its input, bytes.
        message: What is wrong, if that was found here; empty for the service's words, which may quote a record.
        last_at: When it was refused last, seconds since the epoch.
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
    The state at one moment; counts are of all time, and `read == accepted + dead_lettered + duplicates`, as what is
    pending lies behind.

    Attributes:
        at: That moment, seconds since the epoch.
        purged: Of `dead_lettered`, how many were deleted, by `dead-letters purge` or for their age.
        streams: The one with most lag first.
        dead_letters: How many are kept, by rule.
        letters_without_record: Of those that are kept, how many tell but where their record stands in its input.
        unreachable_bytes: Of all inputs, ever.
        dedupe_window: How far the EventIds reach back that later runs know.
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
    newest_dead_letters: list[LetterBrief] = []
    unreachable_bytes: int = 0
    unreachable: list[UnreachableInput] = []
    dedupe_window: Window = Window()

    @property
    def has_inputs(self) -> bool:
        """Whether any input was read yet, or is known."""
        return bool(self.streams or self.spool.segments or self.read)

    @property
    def kept(self) -> int:
        return sum(self.dead_letters.values())

    @property
    def lag_bytes(self) -> int:
        """Of all files."""
        return sum(each.lag_bytes for each in self.streams)

    def is_whole(self, part: StreamState | SpoolState) -> bool:
        """Return whether all of an input or of the spool is settled, as of this look."""
        return part.delivered_until == self.at

    @property
    def behind(self) -> list[StreamState]:
        """The streams that are not settled to their end, the one with most lag first."""
        return [each for each in self.streams if not self.is_whole(each)]

    @property
    def delivered_until(self) -> float | None:
        """All that was written to all inputs up to then is settled; None = not known, or there is no input yet."""
        if not self.has_inputs:
            return None
        return earliest([*(each.delivered_until for each in self.streams), self.spool.delivered_until])


def earliest(moments: Iterable[float | None]) -> float | None:
    """Return the earliest moment; None if one of them is not known, or if there are none."""
    known = list(moments)
    return None if None in known else min((each for each in known if each is not None), default=None)


def look_at(directory: Path, at: float = 0.0, present: Iterable[Present] = ()) -> Overview | None:
    """
    Read the state; the caller need not hold the lock.

    Args:
        at: The time, seconds since the epoch, taken before; for those who want to know what was delivered until when.
        present: The files that are to be shipped; they tell of inputs that no shipper has looked at yet, and of those
            that were renamed while none was running.
    Returns:
        None if there is no state yet.
    Raises:
        StateError: As for `Store`.
    """
    db = open_for_reading(directory)
    if db is None:
        return None
    with closing(db), understood(directory / "state.db"):
        db.execute("BEGIN")  # so that all of it is of one moment
        totals = db.execute(
            "SELECT read, accepted, dead_lettered, duplicates, purged, dead_letter_bytes, unreachable_bytes FROM totals"
        ).fetchone()
        return Overview(
            at=at,
            read=totals[0],
            accepted=totals[1],
            dead_lettered=totals[2],
            duplicates=totals[3],
            purged=totals[4],
            dead_letter_bytes=totals[5],
            unreachable_bytes=totals[6],
            streams=_stream_states(db, at, present),
            spool=_spool_state(db, directory / "spool", at),
            dead_letters=kept_by_rule(db),
            letters_without_record=db.execute("SELECT count(*) FROM dead_letters WHERE length(raw) = 0").fetchone()[0],
            newest_dead_letters=_newest_letters(db, directory / "state.db"),
            dedupe_window=window_of(db),
            unreachable=[
                UnreachableInput(*row)
                for row in db.execute("SELECT stream_id, path, bytes, noticed_at FROM unreachable ORDER BY noticed_at")
            ],
        )


def followed_since(directory: Path) -> dict[str, float]:
    """
    Read since when each pattern is followed, seconds since the epoch; none if there is no state yet.

    Raises:
        StateError: As for `Store`.
    """
    db = open_for_reading(directory)
    if db is None:
        return {}
    with closing(db), understood(directory / "state.db"):
        return read_started_patterns(db)


# Files ------------------------------------------------------------------------------------------------------------


def _stream_states(db: sqlite3.Connection, at: float, present: Iterable[Present]) -> list[StreamState]:
    there = {(each.device, each.inode): each for each in present}
    newest = _newest_by_stream(db)
    states = []
    folders: dict[str, dict[_Place, str]] = {}
    for row in map(_Row._make, db.execute(f"SELECT {_COLUMNS} FROM streams WHERE kind = 'file'")):
        path, place = os.fsdecode(row.path), (row.device, row.inode)
        found = there.pop(place, None)
        now = (found.size, found.changed_ns) if found else _seen(path, place)
        if now is None and row.inode:
            now = _seen_beside(path, place, folders)
        states.append(_stream_state(row, found.path if found else shown(path), now, at, newest.get(row.stream_id)))
    states += [StreamState(0, each.path, each.size, 0, each.size, "", 0.0) for each in there.values() if each.size]
    states.sort(key=lambda each: (-each.lag_bytes, each.delivered_until == at, -each.updated_at))
    return states


def _seen(path: str, place: _Place) -> _Seen | None:
    """Look at a file; None if it is somewhere else, or gone: then what was seen last has to do."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_size, status.st_mtime_ns) if (status.st_dev, status.st_ino) == place else None


def _seen_beside(path: str, place: _Place, folders: dict[str, dict[_Place, str]]) -> _Seen | None:
    """Look at a file that was renamed in its folder since a shipper looked at it last; None = it is gone."""
    folder = os.path.dirname(path) or "."
    if folder not in folders:
        folders[folder] = {}
        with suppress(OSError), os.scandir(folder) as entries:
            device = os.stat(folder).st_dev
            folders[folder] = {(device, entry.inode()): entry.path for entry in entries}
    return _seen(folders[folder].get(place, ""), place)


def _stream_state(row: _Row, path: str, now: _Seen | None, at: float, newest: NewestLetter | None) -> StreamState:
    size, checkpoint, ended = row.size, row.checkpoint, (row.ended_size, row.ended_ns)
    size_now = now[0] if now else None
    if row.compression:
        # How much an archive holds is known once its end was reached; what was a plain file has a size from then.
        has_ended = size_now in {None, row.ended_size} if row.ended_size >= 0 else checkpoint == size > 0
        is_whole = has_ended and checkpoint >= size
    else:
        is_cut = size_now is not None and size_now < checkpoint
        if size_now is not None and now != ended:  # its content may end before NULs
            size, checkpoint = size_now, 0 if is_cut else checkpoint
        is_whole = checkpoint >= size and not is_cut  # a copy may hold what was there and was not read
    # What cannot be looked at may have grown before it went, or live on elsewhere; unless that was looked for in vain.
    is_whole = is_whole and bool(now or row.is_gone)
    size = max(size, checkpoint)
    until = row.settled_until
    if until is not None and until > at:
        until = None  # by a clock that was put back since
    return StreamState(
        stream_id=row.stream_id,
        path=path,
        size=size,
        checkpoint=checkpoint,
        lag_bytes=size - checkpoint,
        compression=row.compression,
        updated_at=row.updated_at,
        delivered_until=at if is_whole else until,
        newest_dead_letter=newest,
    )


# Standard input ---------------------------------------------------------------------------------------------------


def _spool_state(db: sqlite3.Connection, spool: Path, at: float) -> SpoolState:
    rows = db.execute("SELECT stream_id, checkpoint, settled_until FROM streams WHERE kind = 'spool'")
    saved: Mapping[int, tuple[int, float | None]] = {stream_id: rest for stream_id, *rest in rows}
    count = total = lag = 0
    until: float | None = at
    closed_at: float | None = None  # when the segment before was written to last
    for path in sorted(path for path in spool.glob("[0-9]*") if path.name.partition(".")[0].isdecimal()):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a running shipper has just deleted it, as it is settled
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        checkpoint, settled_until = saved.get(int(path.name.partition(".")[0]), (0, None))
        if not lag and checkpoint < status.st_size:
            # What was read before this segment was begun lies in earlier ones, which are settled.
            until = max((each for each in (settled_until, closed_at) if each is not None), default=None)
        count, total, lag = count + 1, total + status.st_size, lag + status.st_size - checkpoint
        closed_at = status.st_mtime
    return SpoolState(count, total, lag, until)


# Dead letters -----------------------------------------------------------------------------------------------------


def _newest_by_stream(db: sqlite3.Connection) -> dict[int, NewestLetter]:
    """Return the newest letter of each stream, among those of late: there is no index by which to find others."""
    newest: dict[int, NewestLetter] = {}
    query = "SELECT stream_id, id, rule, last_at FROM dead_letters ORDER BY id DESC LIMIT ?"
    for stream_id, *letter in db.execute(query, [_RECENT]):
        newest.setdefault(stream_id, NewestLetter(*letter))
    return newest


def _newest_letters(db: sqlite3.Connection, path: Path) -> list[LetterBrief]:
    return [
        LetterBrief(
            id=each.id,
            rule=each.rule,
            path=each.path,
            offset=each.start_offset,
            event_id=each.event_id,
            status=each.status,
            delivery=each.delivery,
            last_at=each.last_at,
            message=each.message if each.delivery == "invalid" else "",
        )
        for each in Letters(db, path).newest(EVERYTHING, _LETTERS)
    ]
