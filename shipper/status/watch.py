"""Detects, from another thread, a stage that does not finish a piece of work, or an event loop that is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import structlog

from shipper.model.printable import printable
from shipper.status.board import Board
from shipper.system.work import Piece, Stage, pieces

log = structlog.get_logger("watch")

_INTERVAL_S: Final = 1.0
_LOOKS: Final = 4  # at least, before something counts as stuck
_SIGNS_S: Final = 5.0  # the event loop gives a sign of life once a second, later on a busy machine
_WORDS: Final[dict[Stage, str]] = {
    "find": "looking for files by {path}",
    "open": "looking at {path}",
    "read": "reading {path} from byte {offset} on",
    "validate": "validating records of {path} from byte {offset} on",
    "deliver": "preparing or judging a request with records of {path} from byte {offset} on",
    "spool": "writing standard input to {path}",
    "save": "saving to {path}",
}


class Places(Protocol):
    """Remembers for the next start what got stuck."""

    def add(self, piece: Piece) -> None: ...
    def remove(self, piece: Piece) -> None: ...
    def tick(self) -> None:
        """Called at each look."""


class Watch:
    """
    Looks at the pieces of work, from a thread of its own.

    Time is counted in looks, so that a process that was stopped or a machine that slept is not taken for stuck.

    Args:
        limit_s: How long a piece may take.
        now: A clock that does not jump, seconds.

    Attributes:
        stuck: What does not come to an end, in words; empty while all is well.
    """

    def __init__(self, board: Board, *, limit_s: float, now: Callable[[], float], places: Places | None = None) -> None:
        self._board = board
        self._limit_s = limit_s
        self._interval_s = min(_INTERVAL_S, limit_s / _LOOKS)
        self._now = now
        self._places = places
        self._looked_at = now()
        self._busy: dict[int, tuple[object, int, float]] = {}  # by thread; 0 = the event loop
        self._told: dict[int, Piece] = {}
        self._ending = threading.Event()
        self.stuck = ""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look once a second, from a thread, until the block ends."""
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(self._interval_s)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self.look()

    def look(self) -> None:
        """Look once; log what got stuck since the last look, and what no longer is."""
        now = self._now()
        step_s, self._looked_at = min(now - self._looked_at, 2 * self._interval_s), now
        before, at_work = self._busy, {thread: (piece, piece.steps) for thread, piece in pieces().items()}
        self._busy = {}
        for thread, (each, steps) in {0: (self._board.live, 0), **at_work}.items():
            known, known_steps, seconds = before.get(thread, (None, -1, 0.0))
            is_same = known is each and known_steps == steps
            self._busy[thread] = each, steps, seconds + step_s if is_same else 0.0
        limits = {0: self._limit_s + _SIGNS_S}
        stuck = {thread: busy for thread, busy in self._busy.items() if busy[2] >= limits.get(thread, self._limit_s)}
        found = {thread: piece for thread, (piece, _, _) in stuck.items() if isinstance(piece, Piece)}
        longest_s = max((seconds for _, _, seconds in stuck.values()), default=0.0)
        words = "; ".join(map(_words, found.values())) or ("the event loop has not turned" if stuck else "")
        self.stuck = words and f"{words}, for {longest_s:.0f} s"
        self._tell(found)
        if self._places is not None:
            self._places.tick()

    def _tell(self, found: dict[int, Piece]) -> None:
        told, self._told = self._told, found
        for piece in found.values():
            if piece not in told.values():
                if self._places is not None:
                    self._places.add(piece)
                where = {"path": printable(piece.path), "offset": piece.offset}
                log.error("stuck", stage=piece.stage, **where, seconds=round(self._limit_s, 3), message=_words(piece))
        for piece in told.values():
            if piece not in found.values():
                if self._places is not None:
                    self._places.remove(piece)
                log.warning("stuck_over", stage=piece.stage, path=printable(piece.path), offset=piece.offset)


def _words(piece: Piece) -> str:
    return _WORDS[piece.stage].format(path=printable(piece.path), offset=piece.offset)
