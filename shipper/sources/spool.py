"""
Makes input that can be read only once rewindable: appends it to segments in the state directory, shipped from there.

An `Input` is standard input, or the application that embeds the shipper. Its data is written to a file before
anything else, so a crash loses nothing that was read.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.model.errors import DeliveryGaveUpError, StateError
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, move_checkpoints
from shipper.sources.content import Plain
from shipper.sources.incoming import Incoming
from shipper.sources.reader import NDJSON, InputForm, StreamReader
from shipper.sources.room import FULL_DISK, NoRoomError, check_disk, is_full
from shipper.sources.segments import Segment, Segments
from shipper.sources.stdin import StandardInput
from shipper.system.work import Piece, at_work

log = structlog.get_logger("sources")

_FULL_DISK_PAUSE_S: Final = 1.0
_LEAVE_LIMIT_S: Final = 30.0
_THREADS: Final = 2  # one writes, one reads or deletes
_BLANKS: Final = b" \t\r\n\0"


class Input(Protocol):
    """
    What fills a spool.

    Attributes:
        has_ended: There is nothing more to move.
        is_broken: It ended because it could not be read.
    """

    @property
    def has_ended(self) -> bool: ...
    @property
    def is_broken(self) -> bool: ...

    async def wait(self) -> None:
        """Wait until there is something to move, or the end."""

    def move(self, segments: Segments) -> None:
        """
        Append what there is; called in a worker thread, which it must not keep waiting.

        Raises:
            NoRoomError: Nothing was taken, as there is no place for it.
            OSError: From `Segments.append`.
        """

    def note_kept(self) -> None:
        """What was moved stands in the segments, forced to disk if that is asked for."""

    def leave(self, segments: Segments) -> None:
        """Come to an end at once: append what must not be lost, if there is room; called in a worker thread."""

    def note_left(self) -> None:
        """`leave` has ended, or did not in time."""


class Spool:
    """
    Ships an input through segments.

    Args:
        directory: Of the segments; made (0700) if need be.
        origin: The input, or the descriptor of standard input; None = only what an earlier process left.
        form: How records lie in standard input.
        known: The spool streams of the state store; those without a segment are done.
        next_stream_id: Gives an id that was never given.
        max_bytes: When so much waits on disk, reading waits.
        fsync: When appended bytes are forced to disk; they survive a crash of the process in any case.
        wall_time: Seconds since the epoch.
        give_up_after_s: How long to wait for room on the disk.
        forget: Called in a worker thread with the ids of streams whose segment was deleted.
    """

    def __init__(
        self,
        directory: Path,
        origin: Input | int | None,
        *,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        forget: Callable[[Iterable[int]], None],
        max_record_bytes: int,
        max_bytes: int,
        segment_bytes: int,
        fsync: Literal["always", "interval", "never"],
        fsync_interval_s: float,
        wall_time: Callable[[], float],
        give_up_after_s: float = math.inf,
        form: InputForm = NDJSON,
    ) -> None:
        self._directory = directory
        self._max_record_bytes = max_record_bytes
        self._max_bytes = max_bytes
        self._give_up_after_s = give_up_after_s
        self._wall_time = wall_time
        # Of its own: the threads of an application may all wait for what is written here.
        self._run_sync = partial(run_sync, limiter=anyio.CapacityLimiter(_THREADS))
        self._changed = anyio.Event()
        self._is_told_full = False
        self._lacks_room = False
        self._full_since: float | None = None
        self._writing = threading.Lock()
        self.is_exhausted = False
        self._segments = Segments(
            directory,
            known=known,
            next_stream_id=next_stream_id,
            forget=forget,
            segment_bytes=segment_bytes,
            fsync=fsync,
            fsync_interval_s=fsync_interval_s,
        )
        if isinstance(origin, int):
            check_disk(directory)
        self._input = (
            StandardInput(origin, Incoming(form, max_record_bytes=max_record_bytes))
            if isinstance(origin, int)
            else origin
        )

    def __repr__(self) -> str:
        return f"<Spool {len(self._segments)} segments, {self.spooled_bytes} bytes>"

    @property
    def spooled_bytes(self) -> int:
        """Bytes on disk that are not settled, or whose segment is not."""
        return self._segments.total_bytes

    def backlog(self) -> Backlog:
        return Backlog(
            lag_bytes=sum(segment.unsettled_bytes for segment in self._segments), spool_bytes=self.spooled_bytes
        )

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Spool the input to its end while sending the chunks of all segments."""
        try:
            async with anyio.create_task_group() as both:
                if self._input is not None:
                    both.start_soon(self._fill, self._input)
                await self._read_segments(chunks_tx)
        except Exception:
            try:
                await self._leave()
            except StateError as error:
                log.error("spool_unwritten", message=str(error))
            raise
        except BaseException:
            await self._leave()
            raise
        await self._leave()
        self.is_exhausted = self._input is None or not self._input.is_broken

    async def _leave(self) -> None:
        """Write what is left to be written, and force it to disk; a stop does not hang on a disk that does."""
        try:
            with anyio.fail_after(_LEAVE_LIMIT_S, shield=True):
                await self._run_sync(self._end, abandon_on_cancel=True)
        except TimeoutError:
            raise StateError(f"the spool {self._directory} could not be closed: its disk does not respond") from None
        except OSError as error:
            raise self._failed(error) from error
        finally:
            if self._input is not None:
                self._input.note_left()

    def _end(self) -> None:
        with self._writing, at_work(Piece("spool", str(self._directory))):
            try:
                if self._input is not None:
                    self._input.leave(self._segments)
            finally:
                self._segments.close()

    # Input to segments ------------------------------------------------------------------------------------------

    async def _fill(self, source: Input) -> None:
        while not source.has_ended:
            await self._wait_for_room()
            if not self._segments.unwritten:
                await source.wait()
            try:
                await self._run_sync(self._move, source, anyio.current_time(), abandon_on_cancel=True)
            except NoRoomError as error:
                self._log_full(str(error))
                self._lacks_room = True
            except OSError as error:
                # What was written and could not be forced to disk may be gone: there is nothing to try again.
                if error.errno not in FULL_DISK or not self._segments.unwritten or self._segments.is_doubtful:
                    raise self._failed(error) from error
                self._log_full(str(error))
                self._lacks_room = True
            else:
                self._full_since = None
                source.note_kept()
            self._tell()

    def _failed(self, error: OSError) -> StateError:
        if self._segments.is_doubtful:
            return StateError(
                f"the spool {self._directory} could not be synchronised to its disk ({error.strerror}), and another "
                "try would prove nothing; check the disk, then start again: what it still holds is delivered"
            )
        return StateError(
            f"the spool {self._directory} cannot be written ({error.strerror}); correct that and start again: what "
            "was kept is still there"
        )

    def _move(self, source: Input, now: float) -> None:
        with self._writing, at_work(Piece("spool", str(self._directory))):
            self._segments.append()  # what did not fit before
            source.move(self._segments)
            if source.has_ended:
                self._segments.close()
            self._segments.sync_if_due(now)

    def _part(self) -> None:
        with self._writing, suppress(NoRoomError), at_work(Piece("spool", str(self._directory))):
            try:
                self._segments.part()
            except OSError as error:
                if error.errno not in FULL_DISK or self._segments.is_doubtful:
                    raise

    async def _wait_for_room(self) -> None:
        """Wait while the spool or the disk is full; the state needs a little room to let the spool shrink."""
        while (is_disk_full := self._lacks_room or is_full(self._directory)) or self._is_full:
            changed = self._changed
            if is_disk_full:
                self._log_full("little room is left on the disk")
                if self._full_since is None:
                    self._full_since = anyio.current_time()
                try:
                    await self._run_sync(self._part)  # so that it is deleted once it is settled
                except OSError as error:
                    raise self._failed(error) from error
            await self.after_save(())  # what was settled before its segment was closed had no save to follow
            if self._lacks_room or is_full(self._directory) or self._is_full:
                with anyio.move_on_after(_FULL_DISK_PAUSE_S) as waiting:
                    await changed.wait()
                if not waiting.cancelled_caught:
                    self._full_since = None
            self._lacks_room = False
            if self._full_since is not None and anyio.current_time() >= self._full_since + self._give_up_after_s:
                raise DeliveryGaveUpError(
                    f"for {self._give_up_after_s:g} s (delivery.give_up_after_seconds) there was too little room on "
                    f"the disk of {self._directory} to keep standard input; make room, and run the same command again"
                )
        self._is_told_full = False

    @property
    def _is_full(self) -> bool:
        """Whether reading has to wait for a segment to be settled; the open one cannot be, so it is no reason."""
        return self.spooled_bytes >= self._max_bytes and any(segment.is_closed for segment in self._segments)

    def _log_full(self, reason: str) -> None:
        if not self._is_told_full:
            log.warning("spool_disk_full", directory=str(self._directory), error=reason)
        self._is_told_full = True

    def _tell(self) -> None:
        """Wake tasks that wait for the spool to grow or to shrink."""
        self._changed.set()
        self._changed = anyio.Event()

    # Segments to chunks -----------------------------------------------------------------------------------------

    async def _read_segments(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        while True:
            changed = self._changed
            has_input_ended = self._input is None or self._input.has_ended
            segment = next((segment for segment in self._segments if not segment.is_read), None)
            if segment is not None:
                await self._read_segment(segment, chunks_tx)
                segment.is_read = True
            elif has_input_ended:
                return
            else:
                await changed.wait()

    async def _read_segment(self, segment: Segment, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        reader = self._reader(segment, segment.stream)
        try:
            while True:
                changed = self._changed
                is_closed = segment.is_closed
                segment.stream.note_end(segment.size, self._wall_time())
                chunk = await self._run_sync(self._read, reader, is_closed)
                if chunk is not None:
                    await chunks_tx.send(chunk)
                elif is_closed:
                    return
                else:
                    await changed.wait()
        finally:
            reader.close()

    def _read(self, reader: StreamReader, is_final: bool) -> Chunk | None:
        with at_work(Piece("read", str(reader.path), reader.stream.key, reader.offset)):
            return reader.read(is_final=is_final)

    def _reader(self, segment: Segment, stream: Stream) -> StreamReader:
        return StreamReader(
            Plain(os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)),
            stream,
            segment.path,
            max_record_bytes=self._max_record_bytes,
            form=segment.form,
        )

    def count_unsettled(self) -> int:
        """Count the records behind the checkpoints, those included that nobody has read yet. Blocks."""
        count = 0
        for segment in self._segments:
            reader = self._reader(segment, msgspec.structs.replace(segment.stream, read_offset=0))
            try:
                while (chunk := reader.read(is_final=True)) is not None:
                    frames = reader.stream.framing.frames(chunk.data, 0)
                    count += chunk.is_oversized or sum(
                        bool(chunk.data[frame.start : frame.end].strip(_BLANKS)) for frame in frames
                    )
            finally:
                reader.close()
        return count

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints; delete the segments that are settled, and make room for more."""
        move_checkpoints(saved)
        if settled := self._segments.take_settled():
            await self._run_sync(self._segments.delete, settled)
            self._tell()
