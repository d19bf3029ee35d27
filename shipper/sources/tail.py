"""Follows growing files: decides when to scan for them."""

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
from shipper.sources.discovery import Patterns, WatchedFolders
from shipper.sources.follower import Follower
from shipper.sources.reader import Turns

if TYPE_CHECKING:
    from watchfiles._rust_notify import RustNotify

log = structlog.get_logger("sources")

_SCAN_SHARE: Final = 150  # scans may take 1/150 of the time
_SCAN_PAUSE_MAX_S: Final = 10.0  # even if a scan takes long, as on a busy machine
_TOUCHED_SHARE: Final = 20  # 1/20 if the kernel reports changes of files that are not open
_DEBOUNCE_MS: Final = 40
# How often the watcher polls the kernel; it returns after two polls. Polling more often would cost more.
_STEP_MS: Final = 8
_QUIET_STEP_MS: Final = 100
_QUIET_AFTER_S: Final = 10.0
_WATCH_MS: Final = 5000
_CLOSE_LIMIT_S: Final = 30.0
_MODIFIED: Final = 2  # of the kinds of changes that watchfiles reports


class FollowedFiles:
    """Follows growing files until it is cancelled."""

    is_exhausted = False  # the input has no end

    def __init__(self, follower: Follower, *, poll_interval_s: float) -> None:
        self._follower = follower
        self._poll_interval_s = poll_interval_s
        self._next_patterns: Patterns | None = None
        self._scan_at = self._check_at = self._may_scan_at = 0.0
        self._touched: set[str] = set()
        self._have_names_changed = False
        self._wake = anyio.Event()
        self._stop_watching = anyio.Event()
        self._quiet_at = 0.0
        self._turns = Turns()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks as they appear; ends only by cancellation."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_watching)
                try:
                    await self._follow(chunks_tx)
                finally:
                    self._stop_watching.set()  # ends the watcher's thread, which cannot be cancelled
        finally:
            with anyio.move_on_after(_CLOSE_LIMIT_S, shield=True):
                await run_sync(self._close, abandon_on_cancel=True)

    def _close(self) -> None:
        """Save the streams. Runs in a thread, so that a slow disk does not block a stop."""
        if not self._turns.end():
            return
        with suppress(StateError):  # the saved state remains that of the last scan
            self._follower.save(is_last=True)
        self._follower.files.close_all()

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints; the next scan completes files."""
        move_checkpoints(saved)

    def backlog(self) -> Backlog:
        return self._follower.backlog

    def reconfigure(self, settings: InputSettings) -> None:
        """Replace the patterns as of the next scan; unmatched files are not read further unless they were rotated."""
        self._next_patterns = self._follower.patterns.replace(settings.include, settings.exclude)
        self._scan_at = 0.0
        self._wake.set()

    async def _follow(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        files = self._follower.files
        while True:
            self._wake = wake = anyio.Event()
            touched, self._touched = self._touched, set()
            have_names_changed, self._have_names_changed = self._have_names_changed, False
            now = anyio.current_time()
            if not files.touch(touched) or have_names_changed:
                self._scan_at = min(self._scan_at, max(now, self._may_scan_at))
            await self._scan_if_due()
            if files.has_ready:
                for chunk in await self._turns.call(files.read, now):
                    await self._send(chunks_tx, chunk)
                if not files.has_ready and self._follower.is_crowded:
                    self._check_at = now  # what was read to its end makes room
            if not files.has_ready:
                with anyio.move_on_at(min(self._scan_at, self._check_at)):
                    await wake.wait()

    async def _send(self, chunks_tx: MemoryObjectSendStream[Chunk], chunk: Chunk) -> None:
        """Send a chunk; while waiting, as in an outage, open new files before they are rotated away."""
        try:
            chunks_tx.send_nowait(chunk)
        except anyio.WouldBlock:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_scanning)
                await chunks_tx.send(chunk)
                tasks.cancel_scope.cancel()

    async def _keep_scanning(self) -> None:
        while True:
            await anyio.sleep_until(min(self._scan_at, self._check_at))
            await self._scan_if_due()

    async def _scan_if_due(self) -> None:
        """Scan for files, or only check open and waiting ones, if it is time."""
        follower, now = self._follower, anyio.current_time()
        if now >= self._scan_at:
            self._apply_new_patterns()
            found = await self._turns.call(follower.find)
            took_s = anyio.current_time() - now
            self._may_scan_at = now + _TOUCHED_SHARE * took_s
            with suppress(StateUnwritableError):  # the next save reports it, and the next scan tries again
                await self._turns.call(follower.scan, found, now)
            rest_s = min(_SCAN_SHARE * took_s, _SCAN_PAUSE_MAX_S)
            pause_s = 0 if follower.is_comparing else max(self._poll_interval_s, rest_s)
            self._scan_at = now if self._next_patterns is not None else now + pause_s
            self._check_at = now + self._poll_interval_s
        elif now >= self._check_at:
            should_go_on = await self._turns.call(follower.check, now)
            self._check_at = now if should_go_on else now + self._poll_interval_s

    def _apply_new_patterns(self) -> None:
        if self._next_patterns is not None:
            self._follower.replace_patterns(self._next_patterns)
            self._next_patterns = None
            self._stop_watching.set()

    # Watching ---------------------------------------------------------------------------------------------------------

    async def _keep_watching(self) -> None:
        """Watch the folders of the patterns, which may be replaced."""
        while True:
            self._stop_watching = stop = anyio.Event()
            await self._watch(stop)
            await stop.wait()

    async def _watch(self, stop: anyio.Event) -> None:
        """Wake `_follow` when the kernel reports a change; if that is unavailable, polling suffices."""
        previous: WatchedFolders | None = None
        while True:
            watched = await run_sync(self._follower.patterns.watched_folders, abandon_on_cancel=True)
            if watched.unwatchable and (previous is None or watched.unwatchable != previous.unwatchable):
                log.warning(
                    "watch_unavailable",
                    folders=[os.fsencode(folder).decode(errors="backslashreplace") for folder in watched.unwatchable],
                    error="contains a name that is not UTF-8",
                    poll_interval_seconds=self._poll_interval_s,
                )
            if not watched.folders:
                return
            try:
                await self._listen(watched, stop)
                return
            except Exception as error:  # polling continues in any case
                if watched == previous:
                    log.warning("watch_unavailable", error=str(error), poll_interval_seconds=self._poll_interval_s)
                    return
            previous = watched  # possibly a new name that is not UTF-8: try again without its folder

    async def _listen(self, watched: WatchedFolders, stop: anyio.Event) -> None:
        with _watcher(watched) as watcher:
            while not stop.is_set():
                is_quiet = anyio.current_time() >= self._quiet_at
                step_ms = _QUIET_STEP_MS if is_quiet else _STEP_MS
                changed = await run_sync(partial(watcher.watch, _DEBOUNCE_MS, step_ms, _WATCH_MS, stop))
                if isinstance(changed, set):
                    self._quiet_at = anyio.current_time() + _QUIET_AFTER_S
                    self._touched.update(path for _, path in changed)
                    self._have_names_changed |= any(kind != _MODIFIED for kind, _ in changed)
                    self._wake.set()


def _watcher(watched: WatchedFolders) -> RustNotify:
    from watchfiles._rust_notify import RustNotify  # `awatch` would not poll less often when idle

    return RustNotify(
        [str(folder) for folder in watched.folders],
        debug=False,
        force_polling=False,
        poll_delay_ms=int(_WATCH_MS),
        recursive=watched.is_recursive,
        ignore_permission_denied=True,
    )
