"""
Where processes got stuck, remembered from one start to the next, so that no place stops all of them.

Pieces of work that took longer than `admin.stuck_seconds` are kept in `stuck.json`, with the number of starts. A loop
in C may hold the interpreter's lock, so that no other thread can report it; for this case each piece is noted in
`at-work` before it begins, and `faulthandler`, which needs no lock, writes a traceback. The next start finds both.
"""

from __future__ import annotations

import faulthandler
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from shipper.model.records import shown
from shipper.system.work import Piece, Stage, have_noted

log = structlog.get_logger("state")

_STARTS_MAX: Final = 2  # at which an input got stuck at one place, before it stands aside
_PLACES_MAX: Final = 100
_FILE_BYTES_MAX: Final = 1 << 20
_SLOT_BYTES: Final = 4096
_SLOTS: Final[dict[Stage, int]] = {"validate": 0, "read": _SLOT_BYTES}  # where they are in `at-work`
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Place(Struct, frozen=True):
    """Where a process got stuck; as in `Piece`."""

    stage: Stage
    source: str
    offset: int = 0
    end: int = 0
    is_single: bool = False
    starts: int = 1


class StuckPlaces:
    """
    The places of one state directory, whose lock the caller holds.

    Args:
        limit_s: What counts as stuck.

    Attributes:
        suspects: By input, where records are that kept an earlier process from coming to an end.
    """

    def __init__(self, directory: Path, *, limit_s: float) -> None:
        self.limit_s = limit_s
        self._directory = directory
        self._places = self._read()
        self._stuck_now: list[Place] = []
        self._notes = self._traceback = -1
        if (place := self._left_by_the_last()) is not None:
            self._count(place)
            log.error(
                "stuck_before", stage=place.stage, offset=place.offset, traceback=str(directory / "traceback.last")
            )
        self.suspects: dict[str, list[Place]] = defaultdict(list)
        for place in self._places:
            if place.stage == "validate":
                self.suspects[place.source].append(place)

    def __repr__(self) -> str:
        return f"<StuckPlaces {len(self._places)}>"

    def aside(self, stage: Stage, source: str, offset: int = 0) -> str:
        """Return why an input stands aside, as the end of a sentence; empty if it does not."""
        place = Place(stage, shown(source), offset)
        if not any(_is_same(each, place) and each.starts >= _STARTS_MAX for each in self._places):
            return ""
        return (
            f"did not come to an end within {self.limit_s:g} s (admin.stuck_seconds) at two starts, so it is left "
            "aside while this process runs; put it right, then stop and start again"
        )

    # What is remembered ----------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """Remember where this process is stuck."""
        if piece.source:
            place = _place_of(piece)
            self._stuck_now.append(place)
            self._count(place)

    def remove(self, piece: Piece) -> None:
        """Forget it: it has come to an end after all."""
        place = _place_of(piece)
        self._stuck_now = [each for each in self._stuck_now if not _is_same(each, place)]
        self._places = [each for each in self._places if not _is_same(each, place)]
        self._write()

    def _count(self, place: Place) -> None:
        known = [each.starts for each in self._places if _is_same(each, place)]
        others = [each for each in self._places if not _is_same(each, place)]
        self._places = [*others, replace(place, starts=sum(known) + 1)][-_PLACES_MAX:]
        self._write()

    def _read(self) -> list[Place]:
        try:
            with open(os.open(self._directory / "stuck.json", _READ), "rb") as file:
                return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=list[Place])
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return []

    def _write(self) -> None:
        """Write it at one stroke; on a full disk, the next start knows less."""
        path = self._directory / "stuck.json"
        with suppress(OSError):
            if not self._places:
                path.unlink(missing_ok=True)
                return
            temporary = self._directory / ".stuck.json"
            with open(os.open(temporary, _WRITE, 0o600), "wb") as file:
                file.write(msgspec.json.encode(self._places))
            temporary.replace(path)

    def _left_by_the_last(self) -> Place | None:
        """Return where the process before this one was when its interpreter stood still; None if it did not."""
        with suppress(OSError):
            if not (self._directory / "traceback").lstat().st_size:
                return None
            (self._directory / "traceback").replace(self._directory / "traceback.last")  # counted once, kept for people
            notes = os.open(self._directory / "at-work", _READ)
            try:
                for start in _SLOTS.values():  # records first: whoever reads waits for the lock within a piece
                    line = os.pread(notes, _SLOT_BYTES, start).partition(b"\n")[0].strip(b"\0")
                    with suppress(ValueError, msgspec.MsgspecError):
                        return msgspec.json.decode(line, type=Place)
            finally:
                os.close(notes)
        return None

    # While a process runs --------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """
        Note what is at work while this is entered.

        An orderly end forgets the places, so that a stop and a start try everything again; but not those at which
        this process is stuck.
        """
        with suppress(OSError):  # then only what other threads notice is remembered
            # Neither is closed: a thread that is stuck may still have its end noted.
            self._notes = os.open(self._directory / "at-work", _WRITE, 0o600)
            self._traceback = os.open(self._directory / "traceback", _WRITE | os.O_APPEND, 0o600)
            have_noted(self._note)
            self.tick()
        try:
            yield
        finally:
            have_noted(None)
            faulthandler.cancel_dump_traceback_later()
        self._places = [place for place in self._places if any(_is_same(place, each) for each in self._stuck_now)]
        self._write()

    def tick(self) -> None:
        """Restart the countdown of `faulthandler`: without a call within the limit, the interpreter is blocked."""
        if self._traceback >= 0:
            if os.fstat(self._traceback).st_size:  # it went on after all
                os.ftruncate(self._traceback, 0)
            faulthandler.dump_traceback_later(self.limit_s, file=self._traceback)

    def _note(self, piece: Piece, is_begun: bool) -> None:
        start = _SLOTS.get(piece.stage)
        if start is not None and piece.source:
            line = msgspec.json.encode(_place_of(piece)) if is_begun else b""
            with suppress(OSError):
                os.pwrite(self._notes, line[: _SLOT_BYTES - 1] + b"\n", start)


def _place_of(piece: Piece) -> Place:
    return Place(piece.stage, shown(piece.source), piece.offset, piece.end, piece.is_single)


def _is_same(one: Place, other: Place) -> bool:
    return replace(one, end=0, starts=1) == replace(other, end=0, starts=1)
