"""Follows files as they grow: when to look, and what wakes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.config.settings import InputSettings
from shipper.model.errors import StateError, StateUnwritableError
from shipper.model.records import Backlog, Checkpoint, Chunk, move_checkpoints
from shipper.sources.discovery import Patterns, Watched
from shipper.sources.follower import Follower
from shipper.sources.turns import Turns

if TYPE_CHECKING:
    from watchfiles._rust_notify import RustNotify

log = structlog.get_logger("sources")

_LOOK_SHARE: Final = 150  # looks at all names may take one part in so many of the time
_LOOK_PAUSE_MAX_S: Final = 10.0  # even if a look took long, as on a busy machine
_TOLD_SHARE: Final = 20  # and this, if the kernel says that something has changed that is not open
_NAMED: Final = 10  # files that cannot be read
_DEBOUNCE_MS: Final = 40
# Between two looks whether the kernel has said anything; it is told after two of them. Shorter would cost more.
_STEP_MS: Final = 8
_QUIET_STEP_MS: Final = 100
_QUIET_AFTER_S: Final = 10.0
_WATCH_MS: Final = 5000
_LEAVE_LIMIT_S: Final = 30.0


class FollowedFiles:
    """
    Follows growing files until it is cancelled.

    Args:
        poll_interval_s: How often to look for new files, and for growth that nothing announced.
    """

    is_exhausted = False  # there is no end to reach

    def __init__(self, follower: Follower, patterns: Patterns, *, poll_interval_s: float) -> None:
        self._follower = follower
        self._patterns = patterns
        self._poll_interval_s = poll_interval_s
        self._next_patterns: Patterns | None = None
        self._look_at = self._check_at = self._may_look_at = 0.0
        self._touched: set[str] = set()
        self._wake = anyio.Event()
        self._stop_watching = anyio.Event()
        self._quiet_at = 0.0
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"<FollowedFiles {self._follower!r}>"

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks as they appear; ends only by cancellation."""
        try:
            async with anyio.create_task_group() as side:
                side.start_soon(self._keep_watching)
                try:
                    await self._follow(chunks_tx)
                finally:
                    self._stop_watching.set()  # ends the watcher's thread, which no cancellation reaches
        finally:
            with anyio.move_on_after(_LEAVE_LIMIT_S, shield=True):
                await run_sync(self._leave, abandon_on_cancel=True)

    def _leave(self) -> None:
        """Note how things stand, which may take as long as the disk does; in a thread, so that a stop goes on."""
        if not self._turns.end():
            return
        with suppress(StateError):  # then it is as old as the last look
            self._follower.note(is_last=True)
        self._follower.files.close_all()

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints; files are completed when they are looked at."""
        move_checkpoints(saved)

    def backlog(self) -> Backlog:
        """Return what was not settled at the last look."""
        follower = self._follower
        return Backlog(
            lag_bytes=follower.lag_bytes,
            unreachable_bytes=follower.unreachable_bytes,
            unmatched=follower.unmatched,
            unreadable=follower.unreadable[:_NAMED],
            unreadable_count=len(follower.unreadable),
            is_known=follower.has_looked,
        )

    def reconfigure(self, settings: InputSettings) -> None:
        """
        Follow the files of other patterns from the next look on.

        What is named no more is read no further, but for files that were renamed; named again, it goes on there.
        """
        self._next_patterns = self._patterns.replaced(settings.include, settings.exclude)
        self._look_at = 0.0
        self._wake.set()

    async def _follow(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        follower = self._follower
        while True:
            self._wake = wake = anyio.Event()
            touched, self._touched = self._touched, set()
            now = anyio.current_time()
            if not follower.files.touch(touched):
                self._look_at = min(self._look_at, max(now, self._may_look_at))
            await self._look_if_due()
            if follower.files.has_news:
                for chunk in await self._turns.call(follower.files.read, now):
                    await self._send(chunks_tx, chunk)
            if not follower.files.has_news:
                with anyio.move_on_at(min(self._look_at, self._check_at)):
                    await wake.wait()

    async def _send(self, chunks_tx: MemoryObjectSendStream[Chunk], chunk: Chunk) -> None:
        """Send a chunk; while it has to wait, as in an outage, files go on being held before they are rotated away."""
        try:
            chunks_tx.send_nowait(chunk)
        except anyio.WouldBlock:
            async with anyio.create_task_group() as side:
                side.start_soon(self._keep_looking)
                await chunks_tx.send(chunk)
                side.cancel_scope.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await anyio.sleep_until(min(self._look_at, self._check_at))
            await self._look_if_due()

    async def _look_if_due(self) -> None:
        """Look at all names, or only at the files that are open, if it is time for that."""
        follower, now = self._follower, anyio.current_time()
        if now >= self._look_at:
            self._replace_patterns()
            found = await self._turns.call(follower.find)
            took_s = anyio.current_time() - now
            self._may_look_at = now + _TOLD_SHARE * took_s
            with suppress(StateUnwritableError):  # the next save tells, and the next look comes
                await self._turns.call(follower.look, found, now)
            rest_s = min(_LOOK_SHARE * took_s, _LOOK_PAUSE_MAX_S)
            pause_s = 0 if follower.is_crowded else max(self._poll_interval_s, rest_s)
            self._look_at = now if self._next_patterns is not None else now + pause_s
            self._check_at = now + self._poll_interval_s
        elif now >= self._check_at:
            await self._turns.call(follower.files.check_all, now)
            self._check_at = now + self._poll_interval_s

    def _replace_patterns(self) -> None:
        if self._next_patterns is not None:
            self._patterns, self._next_patterns = self._next_patterns, None
            self._follower.replace_patterns(self._patterns)
            self._stop_watching.set()

    async def _keep_watching(self) -> None:
        """Watch the folders of the patterns, and others once there are others."""
        while True:
            self._stop_watching = stop = anyio.Event()
            await self._watch(stop)
            await stop.wait()

    async def _watch(self, stop: anyio.Event) -> None:
        """End the wait when the kernel reports a change; where it cannot, polling suffices."""
        before: Watched | None = None
        while True:
            watched = await run_sync(self._patterns.watched, abandon_on_cancel=True)
            if watched.left_out and (before is None or watched.left_out != before.left_out):
                log.warning(
                    "watch_unavailable",
                    folders=[os.fsencode(folder).decode(errors="backslashreplace") for folder in watched.left_out],
                    error="a name in there is not UTF-8",
                    poll_interval_seconds=self._poll_interval_s,
                )
            if not watched.folders:
                return
            try:
                await self._listen(watched, stop)
                return
            except Exception as error:  # whatever the watcher has to say, the poll goes on
                if watched == before:
                    log.warning("watch_unavailable", error=str(error), poll_interval_seconds=self._poll_interval_s)
                    return
            before = watched  # a name may have come that it cannot read: once more, without that folder

    async def _listen(self, watched: Watched, stop: anyio.Event) -> None:
        with _watcher(watched) as watcher:
            while not stop.is_set():
                is_quiet = anyio.current_time() >= self._quiet_at
                step_ms = _QUIET_STEP_MS if is_quiet else _STEP_MS
                changed = await run_sync(partial(watcher.watch, _DEBOUNCE_MS, step_ms, _WATCH_MS, stop))
                if isinstance(changed, set):
                    self._quiet_at = anyio.current_time() + _QUIET_AFTER_S
                    self._touched.update(path for _, path in changed)
                    self._wake.set()


def _watcher(watched: Watched) -> RustNotify:
    """Make what waits for changes in folders, and in those below them if one is to be watched so."""
    from watchfiles._rust_notify import RustNotify  # its `awatch` looks for changes as often at rest as at work

    return RustNotify(
        [str(folder) for folder in watched.folders],
        debug=False,
        force_polling=False,
        poll_delay_ms=int(_WATCH_MS),
        recursive=watched.is_deep,
        ignore_permission_denied=True,
    )
