"""
The files of the spool: unchanged lines, or rows of CSV after their header. All calls block.

A segment is named after its stream id. It has offsets and a checkpoint like any input file, so a crash loses none of
its data. It is deleted once its checkpoint reaches its end.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from shipper.config.settings import SpoolSettings
from shipper.model.errors import ConfigError, StateUnwritableError
from shipper.model.records import Stream
from shipper.sources.content import Content
from shipper.sources.disk import reserve, state_reserve_bytes
from shipper.sources.reader import NDJSON, READ_BYTES, InputForm, StreamReader
from shipper.system.crash_points import crash_point
from shipper.system.files import sync_directory

log = structlog.get_logger("sources")

_SPARE: Final = "spare"  # becomes the next segment; space is reserved for it
_READ_BYTES_MIN: Final = 1 << 16
_NAME: Final = re.compile(r"(\d+)\.(?:ndjson|([0-7][0-9a-f])\.csv)", re.ASCII)


@dataclass(eq=False)
class Segment:
    """A file of the spool."""

    stream: Stream
    path: Path
    size: int = 0
    whole_bytes: int = 0  # end of its last complete record, as written by this process
    is_closed: bool = False  # nothing will be appended
    is_read: bool = False  # read to its end

    @property
    def is_settled(self) -> bool:
        return self.is_closed and self.stream.checkpoint >= self.size

    @property
    def unsettled_bytes(self) -> int:
        return max(0, self.size - self.stream.checkpoint)


class Segments:
    """
    The segments of one directory, including those of earlier processes.

    One worker thread writes, while the event loop reads the list and removes settled segments from it.

    Args:
        directory: Created (0700) if necessary.
        known: The spool streams of the state store; those without a segment are settled.
        forget: Called with the ids of streams whose segment was deleted.

    Attributes:
        has_sync_failed: A sync has failed, so nothing more is written: the kernel reports this once and then counts the
            bytes as written, so another sync would prove nothing.
        unwritten: Bytes that could not be appended yet.
        header: The CSV header that begins each segment, with a newline; empty for other formats.
    """

    def __init__(
        self,
        directory: Path,
        settings: SpoolSettings,
        *,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        forget: Callable[[Iterable[int]], None],
    ) -> None:
        self._directory = directory
        self._next_stream_id = next_stream_id
        self._forget = forget
        self._segment_bytes = settings.segment_bytes
        self._fsync = settings.fsync
        self._fsync_interval_s = settings.fsync_interval_seconds
        self._synced_at = 0.0
        self._output = self._spare = -1
        self._spare_bytes = self._reserved_end = 0  # of the spare file, and of the open segment
        self._is_name_unsynced = False  # of the open segment
        self._open_bytes = 0
        self._failure: OSError | None = None
        self.unwritten = b""
        self.header = b""
        self.delimiter = ""
        if directory.is_symlink():
            raise ConfigError(
                f"{directory} is a symbolic link, whose target may belong to another user; replace it with a folder "
                "that contains the segments, or use another directory",
                key="state.directory",
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._drop_spare()
        self._segments = self._recover({stream.stream_id: stream for stream in known})

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments on disk, including the settled parts of unsettled segments."""
        return sum(segment.size for segment in self._segments)

    @property
    def has_sync_failed(self) -> bool:
        return self._failure is not None

    def _recover(self, known: dict[int, Stream]) -> list[Segment]:
        """Return the unsettled segments of earlier processes, and delete the settled ones."""
        segments = []
        paths = segments_in(self._directory)
        settled = list(known.keys() - paths.keys())
        for stream_id, path in sorted(paths.items()):
            stream = known.get(stream_id) or Stream(stream_id=stream_id, kind="spool", path=str(path))
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                log.warning(
                    "spool_file_refused", path=str(path), error="not a regular file, and not created by shipper"
                )
            elif stream.checkpoint >= status.st_size:  # crashed between commit and deletion
                path.unlink()
                settled.append(stream_id)
            else:
                segments.append(Segment(stream, path, status.st_size, status.st_size, is_closed=True))
        self._forget(settled)
        if unsettled := sum(segment.unsettled_bytes for segment in segments):
            log.info("spool_recovered", segments=len(segments), unsettled_bytes=unsettled)
        return segments

    # Appending --------------------------------------------------------------------------------------------------------

    def read_bytes(self) -> int:
        """Return the maximum size of a read: small on a small disk, and at most a segment."""
        return max(_READ_BYTES_MIN, min(READ_BYTES, self._segment_bytes, state_reserve_bytes(self._directory) // 8))

    def reserve(self, length: int) -> None:
        """Reserve space for `length` more bytes besides the header, or raise `NoSpaceError`."""
        length += len(self.header)
        size = self._segments[-1].size if self._output >= 0 else 0
        if self._output >= 0 and self._reserved_end < size + length:
            reserve(self._output, size, 2 * length)
            self._reserved_end = size + 2 * length
        if self._output < 0 or size + length >= self._segment_bytes:
            self._reserve_spare(length)

    def _reserve_spare(self, length: int) -> None:
        if self._spare < 0:
            self._spare = _new_file(self._directory / _SPARE)
            self._spare_bytes = 0
        if self._spare_bytes < length:
            reserve(self._spare, 0, 2 * length)
            self._spare_bytes = 2 * length

    def _drop_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            (self._directory / _SPARE).unlink(missing_ok=True)

    def append(self, data: bytes = b"", *, open_bytes: int | None = None) -> None:
        """
        Append unwritten bytes and `data`; a full segment is closed at the end of a record.

        Args:
            open_bytes: For CSV, how many of the last bytes belong to an incomplete row; None = unchanged. A newline
                does not prove the end of a row, because it may be quoted.
        Raises:
            OSError: Such as a full disk; the rest stays in `unwritten`.
        """
        self._raise_if_doubtful()
        self.unwritten += data
        if open_bytes is not None:
            self._open_bytes = open_bytes
        while self.unwritten:
            if self._output < 0:
                self._output, segment = self._create()
                self._segments.append(segment)
                self.unwritten = self.header + self.unwritten
            segment = self._segments[-1]
            end = self._end_of(segment)
            piece = self.unwritten[:end] if end else self.unwritten
            crash_point("spool.append")
            written = os.write(self._output, piece)
            crash_point("spool.appended")
            if self.header:
                whole_bytes = segment.size + len(self.unwritten) - self._open_bytes
                if whole_bytes <= segment.size + written:
                    segment.whole_bytes = whole_bytes
            elif newline := piece.rfind(b"\n", 0, written) + 1:
                segment.whole_bytes = segment.size + newline
            segment.size += written
            self.unwritten = self.unwritten[written:]
            if end and written == end:
                self._close_segment()

    def _end_of(self, segment: Segment) -> int:
        """Return how many of the unwritten bytes complete a segment; 0 if it continues after them."""
        data = self.unwritten
        left = max(0, self._segment_bytes - segment.size)
        if len(data) <= left:
            return 0
        if not self.header:
            return data.rfind(b"\n", 0, left) + 1 or data.find(b"\n") + 1
        rows_end = len(data) - self._open_bytes
        has_rows = segment.size + rows_end > len(self.header)  # a segment must not consist of the header only
        return max(0, rows_end) if has_rows else 0

    def _create(self) -> tuple[int, Segment]:
        """Create the file of a segment, or use the spare one."""
        stream_id = self._next_stream_id()
        suffix = f"{self.delimiter.encode().hex()}.csv" if self.header else "ndjson"
        path = self._directory / f"{stream_id:012d}.{suffix}"
        if self._spare >= 0:
            os.rename(self._directory / _SPARE, path)
            output, self._spare, self._reserved_end = self._spare, -1, self._spare_bytes
        else:
            output, self._reserved_end = _new_file(path), 0
        self._is_name_unsynced = True
        return output, Segment(Stream(stream_id=stream_id, kind="spool", path=str(path)), path)

    def sync_if_due(self, now: float) -> None:
        """Sync appended data to disk, as often as configured."""
        if self._fsync == "always" or (self._fsync == "interval" and now - self._synced_at >= self._fsync_interval_s):
            self._sync()
            self._synced_at = now

    def _sync(self) -> None:
        self._raise_if_doubtful()
        if self._output >= 0 and self._fsync != "never":
            try:
                os.fdatasync(self._output)
                if self._is_name_unsynced:
                    sync_directory(self._directory)
                    self._is_name_unsynced = False
            except OSError as error:
                self._failure = error
                raise

    def _raise_if_doubtful(self) -> None:
        if self._failure is not None:
            raise self._failure

    def drop_torn_line(self) -> None:
        """Remove an incomplete last line, which has not been read, and the unwritten bytes."""
        self.unwritten = b""
        if self._output >= 0:
            segment = self._segments[-1]
            os.ftruncate(self._output, segment.whole_bytes)
            segment.size = segment.whole_bytes

    def split_open_segment(self) -> None:
        """Close the open segment, so that it can be deleted once settled; a torn record moves to the next, or stays."""
        if self._output < 0:
            return
        segment = self._segments[-1]
        torn_bytes = segment.size - segment.whole_bytes
        if not torn_bytes:
            self._close_segment()
        elif segment.whole_bytes > len(self.header) and torn_bytes < READ_BYTES:
            self._move_torn(segment, os.pread(self._output, torn_bytes, segment.whole_bytes))

    def _move_torn(self, segment: Segment, torn: bytes) -> None:
        """Copy the torn record into a new segment, then truncate the old one: a crash may duplicate it, not lose it."""
        data = self.header + torn
        self._reserve_spare(len(data))
        old_output = self._output
        output, new = self._create()
        try:
            self._output = output
            while new.size < len(data):
                new.size += os.write(output, data[new.size :])
            self._sync()
        except BaseException:
            os.close(output)
            new.path.unlink(missing_ok=True)
            self._output, self._reserved_end = old_output, 0
            raise
        os.ftruncate(old_output, segment.whole_bytes)
        os.close(old_output)
        segment.size = segment.whole_bytes
        segment.is_closed = True
        new.whole_bytes = len(self.header)
        self._segments.append(new)

    def close(self) -> None:
        """Close the open segment; `append` must not be called afterwards."""
        try:
            self._close_segment()
        finally:
            self._drop_spare()

    def _close_segment(self) -> None:
        if self._output >= 0:
            self._sync()
            segment = self._segments[-1]
            if self._reserved_end > segment.size:
                os.ftruncate(self._output, segment.size)  # frees reserved space
            output, self._output = self._output, -1  # closed even if closing fails
            os.close(output)
            segment.is_closed = True

    # Deleting ---------------------------------------------------------------------------------------------------------

    def take_settled(self) -> list[Segment]:
        """Remove the settled segments from the list and return them. Does not block."""
        settled = [segment for segment in self._segments if segment.is_settled]
        for segment in settled:  # in place, as the writing thread appends to this list
            self._segments.remove(segment)
        return settled

    def delete(self, segments: Sequence[Segment]) -> None:
        """Delete segments that `take_settled` returned."""
        for segment in segments:
            crash_point("spool.delete")
            segment.path.unlink(missing_ok=True)
        crash_point("spool.deleted")
        with suppress(StateUnwritableError):  # the next start forgets them
            self._forget([segment.stream.stream_id for segment in segments])


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def open_segment(path: Path, stream: Stream, *, max_record_bytes: int) -> StreamReader:
    content = Content(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return StreamReader(content, stream, path, max_record_bytes=max_record_bytes, form=form_of(path))


def newest_segment_id(directory: Path) -> int:
    """Return the greatest stream id of the segments; 0 if there are none."""
    return max(segments_in(directory), default=0)


def segments_in(directory: Path) -> dict[int, Path]:
    """Return the paths of the segments by stream id."""
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.glob("[0-9]*"))
    return {int(match[1]): path for match, path in matches if match}


def form_of(path: Path) -> InputForm:
    """Return the format of a segment by its name."""
    match = _NAME.fullmatch(path.name)
    return InputForm("csv", bytes.fromhex(match[2]).decode()) if match and match[2] else NDJSON
