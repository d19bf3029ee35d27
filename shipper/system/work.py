"""
Registers what every thread is working on, so that a stuck thread can be detected.

A stage registers a work item before it begins: bytes to read, records to validate, a transaction. Waiting for the
service, for room or for input is not work. `Watchdog` compares the items with the clock.

Stuck places are remembered across starts, so that one place cannot block every start. Items that took longer than
`admin.stuck_seconds` are saved in `stuck.json` with the number of starts. A loop in C may hold the GIL, so that no
other thread can report it. For this case items are written to `at-work` before they begin, and `faulthandler`, which
does not need the GIL, writes a traceback. The next start reads both.
"""

from __future__ import annotations

import faulthandler
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import get_ident
from typing import Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shipper.system.files import GUARDED, read_json, replace_json

Stage = Literal["find", "open", "read", "validate", "deliver", "spool", "save"]

_STARTS_MAX: Final = 2  # an input that got stuck at one place in this many starts is skipped
_PLACES_MAX: Final = 100
_SLOT_BYTES: Final = 4096
_SLOTS: Final[dict[Stage, int]] = {"validate": 0, "read": _SLOT_BYTES}  # offsets in `at-work`
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC | GUARDED


class WorkItem(Struct, eq=False):
    stage: Stage
    path: str = ""  # a path or pattern, for messages
    source: str = ""  # key of the input, independent of its name; empty = none
    offset: int = 0  # where in the input the work begins
    end: int = 0  # upper bound of where it ends; 0 = unknown
    is_single: bool = False  # the item is a single record, and is written to `at-work`
    steps: int = 0  # progress in any unit; the work is not stuck while this grows


_items: Final[dict[int, WorkItem]] = {}  # by thread
_recorder: Callable[[WorkItem, bool], None] | None = None


@contextmanager
def at_work(item: WorkItem) -> Iterator[WorkItem]:
    """Register what this thread does inside, without awaiting. A nested item replaces the outer one meanwhile."""
    thread, outer = get_ident(), _items.get(get_ident())
    _items[thread] = item
    try:
        with recorded(item) if item.is_single or item.stage == "read" else nullcontext():
            yield item
    finally:
        if outer is None:
            del _items[thread]
        else:
            outer.steps += 1
            _items[thread] = outer


@contextmanager
def recorded(item: WorkItem) -> Iterator[None]:
    """Record an item for the next process; this costs a write, so cover many pieces with one item."""
    recorder = _recorder
    if recorder is not None:
        recorder(item, True)
    try:
        yield
    finally:
        if recorder is not None:
            recorder(item, False)


@contextmanager
def waiting() -> Iterator[None]:
    """Suspend this thread's work item while it waits for another thread or process."""
    thread = get_ident()
    outer = _items.pop(thread, None)
    try:
        yield
    finally:
        if outer is not None:
            outer.steps += 1
            _items[thread] = outer


def step() -> None:
    """Count one step of this thread's work item."""
    if (item := _items.get(get_ident())) is not None:
        item.steps += 1


def work_items() -> dict[int, WorkItem]:
    """Return the current work items by thread."""
    return _items.copy()


def set_recorder(recorder: Callable[[WorkItem, bool], None] | None) -> None:
    """Set the function called in the working thread: with True before a recorded item, with False after it."""
    global _recorder
    _recorder = recorder


# Stuck places, across starts -----------------------------------------------------------------------------------------

_Position = tuple[Stage, str, int, bool]


class StuckPlace(Struct, frozen=True):
    """A place where a process got stuck; fields as in `WorkItem`."""

    stage: Stage
    source: str
    offset: int = 0
    end: int = 0
    is_single: bool = False
    starts: int = 1

    @property
    def position(self) -> _Position:
        """What identifies the place across starts."""
        return self.stage, self.source, self.offset, self.is_single


class StuckPlaces:
    """
    The stuck places of one state directory, whose lock the caller holds.

    Args:
        limit_s: Time without progress that counts as stuck.

    Attributes:
        suspects: By input, the places of records that got an earlier process stuck.
    """

    def __init__(self, directory: Path, *, limit_s: float) -> None:
        self.limit_s = limit_s
        self._directory = directory
        self._file = directory / "stuck.json"
        self._places = {place.position: place for place in read_json(self._file, list[StuckPlace]) or ()}
        self._stuck_now: set[_Position] = set()
        self._records = self._traceback = -1
        if (place := self._read_previous_hang()) is not None:
            import structlog  # every command loads this module, and few have logs

            self._count(place)
            structlog.get_logger("state").error(
                "stuck_before", stage=place.stage, offset=place.offset, traceback=str(directory / "traceback.last")
            )
        self.suspects: dict[str, list[StuckPlace]] = defaultdict(list)
        for place in self._places.values():
            if place.stage == "validate":
                self.suspects[place.source].append(place)

    def skip_reason(self, stage: Stage, source: str, offset: int = 0) -> str:
        """Return why an input is skipped, as the end of a sentence; empty if it is not."""
        from shipper.model.records import shown

        place = self._places.get(StuckPlace(stage, shown(source), offset).position)
        if place is None or place.starts < _STARTS_MAX:
            return ""
        return (
            f"did not finish within {self.limit_s:g} s (admin.stuck_seconds) at two starts, so it is skipped "
            "while this process runs; correct the cause, then stop and start again"
        )

    def add(self, item: WorkItem) -> None:
        """Remember that this process is stuck at an item."""
        if item.source:
            place = _place_of(item)
            self._stuck_now.add(place.position)
            self._count(place)

    def remove(self, item: WorkItem) -> None:
        """Forget an item that has finished after all."""
        position = _place_of(item).position
        self._stuck_now.discard(position)
        self._places.pop(position, None)
        self._write()

    def _count(self, place: StuckPlace) -> None:
        previous = self._places.pop(place.position, None)
        self._places[place.position] = replace(place, starts=previous.starts + 1 if previous else 1)
        if len(self._places) > _PLACES_MAX:
            del self._places[next(iter(self._places))]
        self._write()

    def _write(self) -> None:
        """Replace `stuck.json`; on a full disk, keep the old one."""
        with suppress(OSError):
            if self._places:
                replace_json(self._file, list(self._places.values()))
            else:
                self._file.unlink(missing_ok=True)

    def _read_previous_hang(self) -> StuckPlace | None:
        """Return where the interpreter of the previous process was blocked; None if it was not."""
        with suppress(OSError):
            if not (self._directory / "traceback").lstat().st_size:
                return None
            (self._directory / "traceback").replace(self._directory / "traceback.last")  # count it once, keep the text
            records = os.open(self._directory / "at-work", os.O_RDONLY | GUARDED)
            try:
                for start in _SLOTS.values():  # validation first: a reader may just have been waiting for the GIL
                    line = os.pread(records, _SLOT_BYTES, start).partition(b"\n")[0].strip(b"\0")
                    with suppress(ValueError, msgspec.MsgspecError):
                        return msgspec.json.decode(line, type=StuckPlace)
            finally:
                os.close(records)
        return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """
        Record work items until the context ends.

        An orderly end forgets all places except those where this process is stuck, so that a restart tries everything
        again.
        """
        with suppress(OSError):  # then only hangs seen by other threads are remembered
            # Neither file is closed: a stuck thread may still record its end.
            self._records = os.open(self._directory / "at-work", _WRITE, 0o600)
            self._traceback = os.open(self._directory / "traceback", _WRITE | os.O_APPEND, 0o600)
            set_recorder(self._record)
            self.tick()
        try:
            yield
        finally:
            set_recorder(None)
            faulthandler.cancel_dump_traceback_later()
        self._places = {position: place for position, place in self._places.items() if position in self._stuck_now}
        self._write()

    def tick(self) -> None:
        """Restart `faulthandler`'s countdown; call it more often than `limit_s`."""
        if self._traceback >= 0:
            if os.fstat(self._traceback).st_size:  # the interpreter has recovered
                os.ftruncate(self._traceback, 0)
            with suppress(RuntimeError):  # no thread can be started; the next tick tries again
                faulthandler.dump_traceback_later(self.limit_s, file=self._traceback)

    def _record(self, item: WorkItem, is_beginning: bool) -> None:
        start = _SLOTS.get(item.stage)
        if start is not None and item.source:
            line = msgspec.json.encode(_place_of(item)) if is_beginning else b""
            with suppress(OSError):
                os.pwrite(self._records, line[: _SLOT_BYTES - 1] + b"\n", start)


def _place_of(item: WorkItem) -> StuckPlace:
    from shipper.model.records import shown

    return StuckPlace(item.stage, shown(item.source), item.offset, item.end, item.is_single)
