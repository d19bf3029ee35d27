"""
Appends an input that can be read only once to segments in the state directory, and reads it from there.

The input is standard input or the embedding application. Its data is first written to a file, so a crash loses nothing
that was read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.config.settings import SpoolSettings
from shipper.model.errors import DeliveryGaveUpError, StateError
from shipper.model.framing import BLANKS
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, move_checkpoints
from shipper.sources.disk import NoSpaceError, check_disk, is_full
from shipper.sources.reader import NDJSON, InputForm, StreamReader
from shipper.sources.segments import Segment, Segments, open_segment
from shipper.sources.stdin import Input, StandardInput
from shipper.system.files import FULL_DISK
from shipper.system.work import WorkItem, at_work

log = structlog.get_logger("sources")

_FULL_DISK_PAUSE_S: Final = 1.0
_CLOSE_LIMIT_S: Final = 30.0
_THREADS: Final = 2  # a writer, and one that reads or deletes


class Spool:
    """
    Reads an input through segments.

    Args:
        source: The input, or the descriptor of standard input; None = only segments of an earlier process.
        known, next_stream_id, forget: As for `Segments`.
        form: Format of standard input.
        give_up_after_s: Maximum wait for disk space.
    """

    def __init__(
        self,
        directory: Path,
        source: Input | int | None,
        settings: SpoolSettings,
        *,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        forget: Callable[[Iterable[int]], None],
        max_record_bytes: int,
        wall_time: Callable[[], float],
        give_up_after_s: float = math.inf,
        form: InputForm = NDJSON,
    ) -> None:
        self._directory = directory
        self._max_record_bytes = max_record_bytes
        self._max_bytes = settings.max_bytes
        self._give_up_after_s = give_up_after_s
        self._wall_time = wall_time
        # Its own limiter: all default threads of an application may be waiting for these writes.
        self._run_sync = partial(run_sync, limiter=anyio.CapacityLimiter(_THREADS))
        self._changed = anyio.Event()
        self._is_full_logged = False
        self._ran_out_of_space = False
        self._full_since: float | None = None
        self._writing = threading.Lock()
        self.is_exhausted = False
        try:
            self._segments = Segments(directory, settings, known=known, next_stream_id=next_stream_id, forget=forget)
        except OSError as error:
            raise _spool_error(directory, f"cannot be opened ({error.strerror})") from error
        self._input: Input | None
        if isinstance(source, int):
            check_disk(directory)
            self._input = StandardInput(source, form, max_record_bytes=max_record_bytes)
        else:
            self._input = source

    @property
    def spooled_bytes(self) -> int:
        """Bytes of all segments on disk, including the settled parts of unsettled segments."""
        return self._segments.total_bytes

    def backlog(self) -> Backlog:
        return Backlog(
            lag_bytes=sum(segment.unsettled_bytes for segment in self._segments), spool_bytes=self.spooled_bytes
        )

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Spool the input to its end while sending the chunks of all segments."""
        try:
            async with anyio.create_task_group() as tasks:
                if self._input is not None:
                    tasks.start_soon(self._fill, self._input)
                await self._read_segments(chunks_tx)
        except Exception:
            try:
                await self._finish()
            except StateError as error:
                log.error("spool_unwritten", message=str(error))
            raise
        except BaseException:
            await self._finish()
            raise
        await self._finish()
        self.is_exhausted = self._input is None or not self._input.is_broken

    async def _finish(self) -> None:
        """Write and sync the rest; a stop does not wait longer for a disk that hangs."""
        try:
            with anyio.fail_after(_CLOSE_LIMIT_S, shield=True):
                await self._run_sync(self._finish_input, abandon_on_cancel=True)
        except TimeoutError:
            raise StateError(f"the spool {self._directory} could not be closed: its disk does not respond") from None
        except OSError as error:
            raise self._state_error(error) from error
        finally:
            if self._input is not None:
                self._input.note_finished()

    def _finish_input(self) -> None:
        with self._writing, at_work(WorkItem("spool", str(self._directory))):
            try:
                if self._input is not None:
                    self._input.finish(self._segments)
            finally:
                self._segments.close()

    # Input to segments ------------------------------------------------------------------------------------------

    async def _fill(self, source: Input) -> None:
        while not source.has_ended:
            await self._wait_for_space()
            if not self._segments.unwritten:
                await source.wait()
            try:
                await self._run_sync(self._move, source, anyio.current_time(), abandon_on_cancel=True)
            except NoSpaceError as error:
                self._log_full(str(error))
                self._ran_out_of_space = True
            except OSError as error:
                # After a failed sync, written data may be lost, and another sync may succeed nevertheless.
                if error.errno not in FULL_DISK or not self._segments.unwritten or self._segments.has_sync_failed:
                    raise self._state_error(error) from error
                self._log_full(str(error))
                self._ran_out_of_space = True
            else:
                self._full_since = None
                source.note_stored()
            self._wake()
            await self._delete_settled()  # no further save follows if a segment was settled before it was closed

    def _state_error(self, error: OSError) -> StateError:
        if self._segments.has_sync_failed:
            return StateError(
                f"the spool {self._directory} could not be synced to its disk ({error.strerror}), and another attempt "
                "would not show whether data is lost; check the disk, then start again to deliver the remaining data"
            )
        return _spool_error(self._directory, f"cannot be written ({error.strerror})")

    def _move(self, source: Input, now: float) -> None:
        with self._writing, at_work(WorkItem("spool", str(self._directory))):
            self._segments.append()  # bytes that could not be written earlier
            source.move(self._segments)
            if source.has_ended:
                self._segments.close()
            self._segments.sync_if_due(now)

    def _split_open_segment(self) -> None:
        with self._writing, suppress(NoSpaceError), at_work(WorkItem("spool", str(self._directory))):
            try:
                self._segments.split_open_segment()
            except OSError as error:
                if error.errno not in FULL_DISK or self._segments.has_sync_failed:
                    raise

    async def _wait_for_space(self) -> None:
        """Wait while the spool or the disk is full; the space reserved for the state lets the spool shrink."""
        while (is_disk_full := self._ran_out_of_space or is_full(self._directory)) or self._is_full:
            changed = self._changed
            if is_disk_full:
                self._log_full("little space is left on the disk")
                if self._full_since is None:
                    self._full_since = anyio.current_time()
                try:
                    await self._run_sync(self._split_open_segment)  # so that it is deleted once it is settled
                except OSError as error:
                    raise self._state_error(error) from error
            await self._delete_settled()
            if self._ran_out_of_space or is_full(self._directory) or self._is_full:
                with anyio.move_on_after(_FULL_DISK_PAUSE_S) as waiting:
                    await changed.wait()
                if not waiting.cancelled_caught:
                    self._full_since = None
            self._ran_out_of_space = False
            if self._full_since is not None and anyio.current_time() >= self._full_since + self._give_up_after_s:
                raise DeliveryGaveUpError(
                    f"for {self._give_up_after_s:g} s (delivery.give_up_after_seconds) there was too little space on "
                    f"the disk of {self._directory} to spool standard input; free some space, and run the same command "
                    "again"
                )
        self._is_full_logged = False

    @property
    def _is_full(self) -> bool:
        """Whether reading must wait until a closed segment is settled; the open one cannot be deleted."""
        return self.spooled_bytes >= self._max_bytes and any(segment.is_closed for segment in self._segments)

    def _log_full(self, reason: str) -> None:
        if not self._is_full_logged:
            log.warning("spool_disk_full", directory=str(self._directory), error=reason)
        self._is_full_logged = True

    def _wake(self) -> None:
        """Wake the tasks waiting for the spool to grow or shrink."""
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
            elif has_input_ended:
                return
            else:
                await changed.wait()

    async def _read_segment(self, segment: Segment, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        with closing(self._reader(segment, segment.stream)) as reader:
            while True:
                changed = self._changed
                is_closed = segment.is_closed
                segment.stream.note_end(segment.size, self._wall_time())
                try:
                    chunk = await self._run_sync(self._read, reader, is_closed)
                except OSError as error:
                    raise _spool_error(self._directory, f"cannot be read ({error.strerror})") from error
                if chunk is not None:
                    await chunks_tx.send(chunk)
                elif is_closed:
                    break
                else:
                    await changed.wait()
        segment.is_read = True

    def _read(self, reader: StreamReader, is_final: bool) -> Chunk | None:
        with at_work(WorkItem("read", str(reader.path), reader.stream.key, reader.offset)):
            return reader.read(is_final=is_final)

    def _reader(self, segment: Segment, stream: Stream) -> StreamReader:
        return open_segment(segment.path, stream, max_record_bytes=self._max_record_bytes)

    def count_unsettled(self) -> int:
        """Count the records after the checkpoints, read or not. Blocks."""
        count = 0
        for segment in self._segments:
            with closing(self._reader(segment, msgspec.structs.replace(segment.stream, read_offset=0))) as reader:
                while (chunk := reader.read(is_final=True)) is not None:
                    frames = reader.stream.framing.frames(chunk.data, 0)
                    count += chunk.is_oversized or sum(
                        bool(chunk.data[frame.start : frame.end].strip(BLANKS)) for frame in frames
                    )
        return count

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints, and delete the settled segments."""
        move_checkpoints(saved)
        if saved:
            self._full_since = None  # what is delivered will make room
        await self._delete_settled()

    async def _delete_settled(self) -> None:
        if settled := self._segments.take_settled():
            await self._run_sync(self._segments.delete, settled)
            self._wake()


def _spool_error(directory: Path, problem: str) -> StateError:
    return StateError(f"the spool {directory} {problem}; correct that and start again: its data is still there")
