"""Detects, from another thread, a stage that is stuck or an event loop that is blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from shipper.model.printable import printable
from shipper.status.live import Board
from shipper.system.work import Stage, StuckPlaces, WorkItem, work_items

log = structlog.get_logger("watch")

_INTERVAL_S: Final = 1.0
_CHECKS_MIN: Final = 4  # before work counts as stuck
_SNAPSHOT_S: Final = 5.0  # the event loop takes a snapshot every second, later on a busy machine
_MESSAGES: Final[dict[Stage, str]] = {
    "find": "looking for files that match {path}",
    "open": "opening {path}",
    "read": "reading {path} from byte {offset}",
    "validate": "validating records of {path} from byte {offset}",
    "deliver": "building a request with records of {path} from byte {offset}, or processing its answer",
    "spool": "writing standard input to {path}",
    "save": "saving to {path}",
}


class Watchdog:
    """
    Checks the work items of all threads from its own thread.

    It counts time in checks, so that a stopped process or a sleeping machine does not count as stuck.

    Attributes:
        stuck: Description of stuck work; empty if there is none.
    """

    def __init__(
        self, board: Board, *, limit_s: float, now: Callable[[], float], places: StuckPlaces | None = None
    ) -> None:
        self._board = board
        self._limit_s = limit_s
        self._interval_s = min(_INTERVAL_S, limit_s / _CHECKS_MIN)
        self._now = now
        self._places = places
        self._checked_at = now()
        self._busy: dict[int, tuple[object, int, float]] = {}  # by thread; 0 = the event loop
        self._reported: dict[int, WorkItem] = {}
        self._ending = threading.Event()
        self.stuck = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check once a second, in a thread, until the context ends."""
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(self._interval_s)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self.check()

    def check(self) -> None:
        """Check once; log items that got stuck since the last check, and those that no longer are."""
        now = self._now()
        step_s, self._checked_at = min(now - self._checked_at, 2 * self._interval_s), now
        before, items = self._busy, {thread: (item, item.steps) for thread, item in work_items().items()}
        self._busy = {}
        for thread, (item, steps) in {0: (self._board.live, 0), **items}.items():
            last_item, last_steps, seconds = before.get(thread, (None, -1, 0.0))
            is_same = last_item is item and last_steps == steps
            self._busy[thread] = item, steps, seconds + step_s if is_same else 0.0
        limits = {0: self._limit_s + _SNAPSHOT_S}
        stuck = {thread: busy for thread, busy in self._busy.items() if busy[2] >= limits.get(thread, self._limit_s)}
        stuck_items = {thread: item for thread, (item, _, _) in stuck.items() if isinstance(item, WorkItem)}
        longest_s = max((seconds for _, _, seconds in stuck.values()), default=0.0)
        message = "; ".join(map(_message, stuck_items.values())) or ("the event loop is blocked" if stuck else "")
        self.stuck = message and f"{message}, for {longest_s:.0f} s"
        self._report(stuck_items)
        if self._places is not None:
            self._places.tick()

    def _report(self, stuck: dict[int, WorkItem]) -> None:
        before, self._reported = self._reported, stuck
        for item in stuck.values():
            if item not in before.values():
                if self._places is not None:
                    self._places.add(item)
                where = {"path": printable(item.path), "offset": item.offset}
                log.error("stuck", stage=item.stage, **where, seconds=round(self._limit_s, 3), message=_message(item))
        for item in before.values():
            if item not in stuck.values():
                if self._places is not None:
                    self._places.remove(item)
                log.warning("stuck_over", stage=item.stage, path=printable(item.path), offset=item.offset)


def _message(item: WorkItem) -> str:
    return _MESSAGES[item.stage].format(path=printable(item.path), offset=item.offset)
