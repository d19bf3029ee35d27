"""
The files of the spool: lines as they came, or rows of CSV behind their header. All calls block.

A segment is named after its stream id. Once written, it is a file like any other, with offsets and a checkpoint, so
a crash loses nothing of it. It is deleted when its checkpoint has passed its end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import structlog

from shipper.model.errors import ConfigError, StateUnwritableError
from shipper.model.records import Stream
from shipper.sources.reader import NDJSON, READ_BYTES, InputForm
from shipper.sources.room import left_for_state, reserve
from shipper.system.crash_points import crash_point

log = structlog.get_logger("sources")

_SPARE: Final = "spare"  # what the next segment is made of, with room of its own
_LEAST_READ_BYTES: Final = 1 << 16  # of segments that are smaller still, room is kept for the first two
_NO_DIRECTORY_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # a file system that has no use for it
_NAME: Final = re.compile(r"(\d+)\.(?:ndjson|([0-7][0-9a-f])\.csv)", re.ASCII)


@dataclass(eq=False)
class Segment:
    """
    One file.

    Attributes:
        size: Bytes that it holds.
        whole_bytes: Up to where it holds whole records, as far as this process has written it.
        is_closed: Nothing will be appended.
        is_read: It was read to its end.
    """

    stream: Stream
    path: Path
    form: InputForm
    size: int = 0
    whole_bytes: int = 0
    is_closed: bool = False
    is_read: bool = False

    @property
    def is_settled(self) -> bool:
        return self.is_closed and self.stream.checkpoint >= self.size

    @property
    def unsettled_bytes(self) -> int:
        return max(0, self.size - self.stream.checkpoint)


class Segments:
    """
    The segments of one directory: what an earlier process left, and those that are written now.

    One worker thread writes while the event loop looks at them and takes away what is settled.

    Args:
        directory: Made (0700) if need be.
        known: The spool streams of the state store; those without a segment are done.
        next_stream_id: Gives an id that was never given.
        forget: Called with the ids of streams whose segment was deleted.
        segment_bytes: When a segment is full.
        fsync: When appended bytes are forced to disk; they survive a crash of the process in any case.

    Attributes:
        is_doubtful: What was written could not be forced to disk. The kernel reports that once and takes the bytes for
            written, so another try would prove nothing: nothing more is written.
        unwritten: What was to be appended and did not fit yet.
        header: What each segment has to begin with, with its newline; empty unless it is CSV.
        delimiter: Between the values of CSV.
    """

    def __init__(
        self,
        directory: Path,
        *,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        forget: Callable[[Iterable[int]], None],
        segment_bytes: int,
        fsync: Literal["always", "interval", "never"],
        fsync_interval_s: float,
    ) -> None:
        self._directory = directory
        self._next_stream_id = next_stream_id
        self._forget = forget
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._fsync_interval_s = fsync_interval_s
        self._synced_at = 0.0
        self._output = self._spare = -1
        self._spare_bytes = self._reserved_end = 0  # room of the spare file, and end of that of the open segment
        self._is_new = False  # its name may not be on the disk yet
        self._open_bytes = 0
        self._failure: OSError | None = None
        self.unwritten = b""
        self.header = b""
        self.delimiter = ""
        if directory.is_symlink():
            raise ConfigError(
                f"{directory} is a symbolic link, and what it leads to may be somebody else's; put a folder in its "
                "place, with the segments in it, or name another directory",
                key="state.directory",
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._drop_spare()
        self._all = self._recover({stream.stream_id: stream for stream in known})

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def total_bytes(self) -> int:
        """Bytes on disk that are not settled, or whose segment is not."""
        return sum(segment.size for segment in self._all)

    @property
    def is_doubtful(self) -> bool:
        return self._failure is not None

    @property
    def ends_torn(self) -> bool:
        """Whether the rest of the last line has to come before the segment can be closed."""
        return self._output >= 0 and self._all[-1].whole_bytes < self._all[-1].size

    def _recover(self, known: dict[int, Stream]) -> list[Segment]:
        """Take over what an earlier process wrote and did not settle."""
        segments = []
        found = segments_in(self._directory)
        settled = list(known.keys() - found.keys())
        for stream_id, path in sorted(found.items()):
            stream = known.get(stream_id) or Stream(stream_id=stream_id, kind="spool", path=str(path))
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                log.warning(
                    "spool_file_refused", path=str(path), error="not a regular file, and not created by shipper"
                )
                continue
            size = status.st_size
            if stream.checkpoint >= size:  # the crash came between the commit and the deletion
                path.unlink()
                settled.append(stream_id)
            else:
                segments.append(Segment(stream, path, form_of(path), size, size, is_closed=True))
        self._forget(settled)
        if unsettled := sum(segment.unsettled_bytes for segment in segments):
            log.info("spool_recovered", segments=len(segments), unsettled_bytes=unsettled)
        return segments

    # Appending --------------------------------------------------------------------------------------------------

    def read_bytes(self) -> int:
        """Return how much may be read at a time: little on a small disk, and no more than the next segment takes."""
        return max(_LEAST_READ_BYTES, min(READ_BYTES, self._segment_bytes, left_for_state(self._directory) // 8))

    def reserve(self, length: int) -> None:
        """
        Keep room for what is read next, before it is read.

        Args:
            length: Bytes at most, without a header.
        Raises:
            NoRoomError: The disk has none.
            OSError: Another fault of the disk.
        """
        length += len(self.header)
        size = self._all[-1].size if self._output >= 0 else 0
        if self._output >= 0 and self._reserved_end < size + length:
            reserve(self._output, size, 2 * length)
            self._reserved_end = size + 2 * length
        if self._output < 0 or size + length >= self._segment_bytes:
            self._keep_spare(length)

    def _keep_spare(self, length: int) -> None:
        """Preallocate the file that becomes the next segment."""
        if self._spare < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._spare = os.open(self._directory / _SPARE, flags, 0o600)
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
        Append what did not fit before, and this; a segment that is full ends behind a record.

        Args:
            open_bytes: Of CSV, how many of the last bytes belong to a row whose end has not come; None = as before.
                A newline tells nothing there, as it may stand in quotes.
        Raises:
            OSError: Such as on a full disk; the rest is kept in `unwritten`.
        """
        self._raise_if_doubtful()
        self.unwritten += data
        if open_bytes is not None:
            self._open_bytes = open_bytes
        while self.unwritten:
            if self._output < 0:
                self._open()
            segment = self._all[-1]
            piece = self.unwritten
            room = max(0, self._segment_bytes - segment.size)
            end = 0
            if len(piece) > room:
                if self.header:
                    rows_end = len(piece) - self._open_bytes
                    end = max(0, rows_end) if segment.size + rows_end > len(self.header) else 0  # no header alone
                else:
                    end = piece.rfind(b"\n", 0, room) + 1 or piece.find(b"\n") + 1
                piece = piece[:end] or piece
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
            if end and written == len(piece):
                self._close_segment()

    def _open(self) -> None:
        self._output, segment = self._create()
        self._all.append(segment)
        self.unwritten = self.header + self.unwritten

    def _create(self) -> tuple[int, Segment]:
        """Make the file of a segment, of the spare one if there is one."""
        stream_id = self._next_stream_id()
        suffix = f"{self.delimiter.encode().hex()}.csv" if self.header else "ndjson"
        path = self._directory / f"{stream_id:012d}.{suffix}"
        if self._spare >= 0:
            os.rename(self._directory / _SPARE, path)
            output, self._spare, self._reserved_end = self._spare, -1, self._spare_bytes
        else:
            output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._reserved_end = 0
        self._is_new = True
        return output, Segment(Stream(stream_id=stream_id, kind="spool", path=str(path)), path, form_of(path))

    def sync_if_due(self, now: float) -> None:
        """Force what was appended to disk, as often as is asked for."""
        if self._fsync == "always" or (self._fsync == "interval" and now - self._synced_at >= self._fsync_interval_s):
            self._sync()
            self._synced_at = now

    def _sync(self) -> None:
        self._raise_if_doubtful()
        if self._output >= 0 and self._fsync != "never":
            try:
                os.fdatasync(self._output)
                if self._is_new:
                    _sync_directory(self._directory)
                    self._is_new = False
            except OSError as error:
                self._failure = error
                raise

    def _raise_if_doubtful(self) -> None:
        if self._failure is not None:
            raise self._failure

    def drop_torn_line(self) -> None:
        """Take back the part of a last line whose rest will not come, and forget the rest; nobody has read it."""
        self.unwritten = b""
        if self.ends_torn:
            segment = self._all[-1]
            os.ftruncate(self._output, segment.whole_bytes)
            segment.size = segment.whole_bytes

    def part(self) -> None:
        """
        Close the open segment so that it can be deleted once it is settled; a torn record moves to the next one.

        Raises:
            NoRoomError: The torn record has no room there; the segment stays open.
            OSError: Another fault of the disk.
        """
        if self._output < 0:
            return
        segment = self._all[-1]
        torn_bytes = segment.size - segment.whole_bytes
        if not torn_bytes:
            self._close_segment()
        elif segment.whole_bytes > len(self.header) and torn_bytes < READ_BYTES:
            self._move_torn(segment, os.pread(self._output, torn_bytes, segment.whole_bytes))

    def _move_torn(self, segment: Segment, torn: bytes) -> None:
        """Write the torn record into a segment of its own, then cut it off: a crash between has it twice, not never."""
        self._keep_spare(len(self.header) + len(torn))
        before = self._output
        output, after = self._create()
        try:
            self._output = output
            data = self.header + torn
            while data:
                data = data[os.write(output, data) :]
            self._sync()
        except BaseException:
            os.close(output)
            after.path.unlink(missing_ok=True)
            self._output, self._reserved_end = before, 0
            raise
        os.ftruncate(before, segment.whole_bytes)
        os.close(before)
        segment.size = segment.whole_bytes
        segment.is_closed = True
        after.size, after.whole_bytes = len(self.header) + len(torn), len(self.header)
        self._all.append(after)

    def close(self) -> None:
        """Append nothing more."""
        try:
            self._close_segment()
        finally:
            self._drop_spare()

    def _close_segment(self) -> None:
        if self._output >= 0:
            self._sync()
            segment = self._all[-1]
            if self._reserved_end > segment.size:
                os.ftruncate(self._output, segment.size)  # the room that was kept is free again
            os.close(self._output)
            self._output = -1
            segment.is_closed = True

    # Deleting ---------------------------------------------------------------------------------------------------

    def take_settled(self) -> list[Segment]:
        """Remove the settled segments from the list and return them. Does not block."""
        settled = [segment for segment in self._all if segment.is_settled]
        for segment in settled:  # in place: the worker thread that writes appends to this list
            self._all.remove(segment)
        return settled

    def delete(self, segments: Sequence[Segment]) -> None:
        """Delete segments that were taken."""
        for segment in segments:
            crash_point("spool.delete")
            segment.path.unlink(missing_ok=True)
        crash_point("spool.deleted")
        with suppress(StateUnwritableError):  # the next start forgets them
            self._forget([segment.stream.stream_id for segment in segments])


def _sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def youngest_segment_id(directory: Path) -> int:
    """Return the greatest stream id of the segments; 0 if there are none."""
    return max(segments_in(directory), default=0)


def segments_in(directory: Path) -> dict[int, Path]:
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("[0-9]*"))
    return {int(match[1]): path for match, path in found if match}


def form_of(path: Path) -> InputForm:
    """Return the framing of a segment, by its name."""
    found = _NAME.fullmatch(path.name)
    return InputForm("csv", bytes.fromhex(found[2]).decode()) if found and found[2] else NDJSON
