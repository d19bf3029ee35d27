"""
Standard input, made rewindable: what is read is appended to segments in the state directory, and shipped from there.

A segment is named after its stream id and holds lines as they came, or rows of CSV behind their header. From here on
it is a file like any other, with offsets and a checkpoint, so a crash loses nothing that was read. A segment is deleted
when its checkpoint has passed its end.
"""

from __future__ import annotations

import errno
import math
import os
import re
import select
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.crash_points import crash_point
from shipper.errors import DeliveryGaveUpError, StateUnwritableError
from shipper.records import Chunk, Stream
from shipper.sources.content import Plain
from shipper.sources.incoming import Incoming
from shipper.sources.reader import NDJSON, READ_BYTES, InputForm, StreamReader

log = structlog.get_logger("sources")

_SEGMENT: Final = re.compile(r"(\d+)\.(?:ndjson|([0-9a-f]{2})\.csv)")
_PUMP_BYTES: Final = 1 << 20
_PIPE_BYTES: Final = 1 << 20
_FULL_DISK: Final = {errno.ENOSPC, errno.EDQUOT}
_FULL_DISK_PAUSE_S: Final = 1.0
_RESERVE_BYTES: Final = 16 << 20  # of the disk, at most a quarter of it


@dataclass(eq=False)
class _Segment:
    """A file of the spool; `is_closed` when nothing will be appended, `is_read` when it was read to its end."""

    stream: Stream
    path: Path
    size: int
    form: InputForm = NDJSON
    is_closed: bool = False
    is_read: bool = False

    @property
    def is_settled(self) -> bool:
        return self.is_closed and self.stream.checkpoint >= self.size


class Spool:
    """
    Ships standard input through segments.

    Args:
        directory: Made (0700) if need be.
        descriptor: Standard input: a pipe, a terminal, a socket or a file; None = only what an earlier process left.
        form: How records lie in it.
        known: The spool streams of the state store; those without a segment are done.
        next_stream_id: Gives an id that was never given.
        max_bytes: When so much waits on disk, reading waits.
        fsync: When appended bytes are forced to disk; they survive a crash of the process in any case.
        give_up_after_s: How long to wait for room on the disk.
        forget: Called in a worker thread with the ids of streams whose segment was deleted.
    """

    def __init__(
        self,
        directory: Path,
        descriptor: int | None,
        *,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        forget: Callable[[Iterable[int]], None],
        max_record_bytes: int,
        max_bytes: int,
        segment_bytes: int,
        fsync: Literal["always", "interval", "never"],
        fsync_interval_s: float,
        give_up_after_s: float = math.inf,
        form: InputForm = NDJSON,
    ) -> None:
        self._directory = directory
        self._input = descriptor
        self._incoming = Incoming(form, max_record_bytes=max_record_bytes)
        self._next_stream_id = next_stream_id
        self._forget = forget
        self._max_record_bytes = max_record_bytes
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._fsync_interval_s = fsync_interval_s
        self._give_up_after_s = give_up_after_s
        self._synced_at = 0.0
        self._changed = anyio.Event()
        self._output = -1
        self._unwritten = b""
        self._has_input_ended = descriptor is None
        self._is_input_broken = False
        self._is_told_full = False
        self._ends_torn = False
        self.is_exhausted = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._segments = self._recover({stream.stream_id: stream for stream in known})

    def __repr__(self) -> str:
        return f"<Spool {len(self._segments)} segments, {self.spooled_bytes} bytes>"

    @property
    def spooled_bytes(self) -> int:
        """Bytes on disk that are not settled, or whose segment is not."""
        return sum(segment.size for segment in self._segments)

    @property
    def _is_full(self) -> bool:
        """Whether reading has to wait for a segment to be settled; the open one cannot be, so it is no reason."""
        return self.spooled_bytes >= self._max_bytes and any(segment.is_closed for segment in self._segments)

    def _recover(self, known: dict[int, Stream]) -> list[_Segment]:
        """Take over what an earlier process read and did not settle."""
        segments = []
        settled = list(known.keys() - _segments_in(self._directory).keys())
        for stream_id, path in sorted(_segments_in(self._directory).items()):
            stream = known.get(stream_id) or Stream(stream_id=stream_id, kind="spool", path=str(path))
            found = _SEGMENT.fullmatch(path.name)
            form = InputForm("csv", bytes.fromhex(found[2]).decode()) if found and found[2] else NDJSON
            size = path.stat().st_size
            if stream.checkpoint >= size:  # the crash came between the commit and the deletion
                path.unlink()
                settled.append(stream_id)
            else:
                segments.append(_Segment(stream, path, size, form, is_closed=True))
        self._forget(settled)
        if unsettled := sum(segment.size - segment.stream.checkpoint for segment in segments):
            log.info("spool_recovered", segments=len(segments), unsettled_bytes=unsettled)
        return segments

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Spool the input to its end while sending the chunks of all segments."""
        try:
            async with anyio.create_task_group() as both:
                both.start_soon(self._fill)
                await self._read_segments(chunks_tx)
        finally:
            self._unwritten += self._incoming.take_rest()
            with suppress(OSError):
                self._write()
            self._close_segment()
            if self._unwritten:
                log.error("spool_unwritten", lost_bytes=len(self._unwritten), reason="the disk is full")
        self.is_exhausted = not self._is_input_broken

    # Input to segments ------------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        if self._input is None:
            return
        can_wait = not stat.S_ISREG(os.fstat(self._input).st_mode)
        if can_wait:
            _widen_pipe(self._input)
        while not self._has_input_ended:
            await self._wait_for_room()
            if can_wait and not self._unwritten:
                try:
                    await anyio.wait_readable(self._input)
                except PermissionError:  # a device that cannot be waited for, such as /dev/null
                    can_wait = False
            pump = partial(self._pump, self._input, can_wait=can_wait, now=anyio.current_time())
            try:
                await run_sync(pump)
            except OSError as error:
                if error.errno not in _FULL_DISK:
                    raise
                self._tell_full(str(error))
                await anyio.sleep(_FULL_DISK_PAUSE_S)
            self._tell()

    async def _wait_for_room(self) -> None:
        """Wait while the spool or the disk is full; the state needs a little room to let the spool shrink."""
        waits_since = anyio.current_time()
        while (is_disk_full := self._is_disk_full()) or self._is_full:
            changed = self._changed
            if is_disk_full:
                self._tell_full("little room is left on the disk")
                if self._ends_torn:
                    return  # the rest of that line has to come before the segment can be closed
                await run_sync(self._close_segment)  # so that it is deleted once it is settled
            await self.after_save()  # what was settled before its segment was closed had no save to follow
            if self._is_disk_full() or self._is_full:
                with anyio.move_on_after(_FULL_DISK_PAUSE_S) as waiting:
                    await changed.wait()
                if not waiting.cancelled_caught:
                    waits_since = anyio.current_time()
            if is_disk_full and anyio.current_time() >= waits_since + self._give_up_after_s:
                raise DeliveryGaveUpError(
                    f"for {self._give_up_after_s:g} s (delivery.give_up_after_seconds) there was too little room on "
                    f"the disk of {self._directory} to keep standard input; make room, and run the same command again"
                )
        self._is_told_full = False

    def _is_disk_full(self) -> bool:
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize < min(_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 4)

    def _tell_full(self, reason: str) -> None:
        if not self._is_told_full:
            log.warning("spool_disk_full", directory=str(self._directory), error=reason)
        self._is_told_full = True

    def _tell(self) -> None:
        """Wake whoever waits for the spool to grow or to shrink."""
        self._changed.set()
        self._changed = anyio.Event()

    def _pump(self, source: int, *, can_wait: bool, now: float) -> None:
        """Move what there is to read, but at most `_PUMP_BYTES`, so that a thread never hangs in a read."""
        self._write()
        readable = select.poll()
        if can_wait:
            readable.register(source, select.POLLIN)
        moved = 0
        while moved < _PUMP_BYTES and (not can_wait or readable.poll(0)):
            try:
                data = os.read(source, READ_BYTES)
            except OSError as error:
                log.error("source_unreadable", path="standard input", error=error.strerror)
                self._is_input_broken, data = True, b""
            if not data:
                self._unwritten = self._incoming.take(b"", is_final=True)  # the end of the input ends its last record
                self._write()
                self._close_segment()
                self._has_input_ended = True
                return
            moved += len(data)
            self._unwritten = self._incoming.take(data, ends_whole=self._is_told_full)
            self._write()
            if self._is_told_full:
                break  # there may be room for this much, and no more
        if self._fsync == "always" or (self._fsync == "interval" and now - self._synced_at >= self._fsync_interval_s):
            self._sync()
            self._synced_at = now

    def _write(self) -> None:
        """Append the unwritten bytes; a segment that is full ends behind a record."""
        while self._unwritten:
            if self._output < 0:
                self._open_segment()
            segment = self._segments[-1]
            piece = self._unwritten
            room = max(0, self._segment_bytes - segment.size)
            end = 0
            if len(piece) > room:
                # Of CSV these are whole rows, and a newline among them may stand in quotes.
                is_cut = not self._incoming.header
                end = (piece.rfind(b"\n", 0, room) + 1 or piece.find(b"\n") + 1) if is_cut else len(piece)
                piece = piece[:end] or piece
            crash_point("spool.append")
            written = os.write(self._output, piece)
            crash_point("spool.appended")
            segment.size += written
            self._ends_torn = not piece.endswith(b"\n", 0, written)
            self._unwritten = self._unwritten[written:]
            if end and written == len(piece):
                self._close_segment()

    def _open_segment(self) -> None:
        stream_id = self._next_stream_id()
        header, delimiter = self._incoming.header, self._incoming.delimiter
        suffix = f"{delimiter.encode().hex()}.csv" if header else "ndjson"
        path = self._directory / f"{stream_id:012d}.{suffix}"
        self._output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        stream = Stream(stream_id=stream_id, kind="spool", path=str(path))
        self._segments.append(_Segment(stream, path, 0, InputForm("csv", delimiter) if header else NDJSON))
        self._unwritten = header + self._unwritten

    def _sync(self) -> None:
        if self._output >= 0 and self._fsync != "never":
            os.fdatasync(self._output)

    def _close_segment(self) -> None:
        if self._output >= 0:
            self._sync()
            os.close(self._output)
            self._output = -1
            self._segments[-1].is_closed = True

    # Segments to chunks -----------------------------------------------------------------------------------------

    async def _read_segments(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        while True:
            changed = self._changed
            has_input_ended = self._has_input_ended
            segment = next((segment for segment in self._segments if not segment.is_read), None)
            if segment is not None:
                await self._read_segment(segment, chunks_tx)
                segment.is_read = True
            elif has_input_ended:
                return
            else:
                await changed.wait()

    async def _read_segment(self, segment: _Segment, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        reader = StreamReader(
            Plain(descriptor),
            segment.stream,
            segment.path,
            max_record_bytes=self._max_record_bytes,
            form=segment.form,
        )
        try:
            while True:
                changed = self._changed
                is_closed = segment.is_closed
                chunk = await run_sync(partial(reader.read, is_final=is_closed))
                if chunk is not None:
                    await chunks_tx.send(chunk)
                elif is_closed:
                    return
                else:
                    await changed.wait()
        finally:
            reader.close()

    async def after_save(self) -> None:
        """Delete the segments that are settled, and make room for more."""
        settled = [segment for segment in self._segments if segment.is_settled]
        if settled:
            for segment in settled:  # in place: the worker thread that reads the input appends to this list
                self._segments.remove(segment)
            await run_sync(self._delete, settled)
            self._tell()

    def _delete(self, segments: list[_Segment]) -> None:
        for segment in segments:
            crash_point("spool.delete")
            segment.path.unlink(missing_ok=True)
        crash_point("spool.deleted")
        with suppress(StateUnwritableError):  # the next start forgets them
            self._forget([segment.stream.stream_id for segment in segments])


def _widen_pipe(descriptor: int) -> None:
    """Ask for a larger pipe: fewer turns between the producer and us. Refused or no pipe: no matter."""
    import fcntl

    with suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def youngest_segment_id(directory: Path) -> int:
    """Tell the greatest stream id among the segments; 0 if there are none."""
    return max(_segments_in(directory), default=0)


def _segments_in(directory: Path) -> dict[int, Path]:
    found = ((_SEGMENT.fullmatch(path.name), path) for path in directory.glob("[0-9]*"))
    return {int(match[1]): path for match, path in found if match}
