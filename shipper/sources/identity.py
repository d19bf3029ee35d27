"""
Recognises inputs after renaming, rotation, compression or copying.

A stream is found by device and inode, and confirmed by the head of the file and the marker before the checkpoint. If
the file of a stream is gone, these bytes alone identify a file with another inode: a copy made by copytruncate, a
rotated file that was compressed, a file moved to another disk. A copy of a file that still exists may be about to
replace it, so the decision whether it is a new input is delayed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from shipper.model.errors import SourceError
from shipper.model.framing import BLANKS, Framing
from shipper.model.records import Head, Stream, digest, shown
from shipper.sources.content import Archive, Content, open_content, refuse_other_kinds
from shipper.sources.discovery import FileId, SkipReason, file_id_of, never_skip, signature_of
from shipper.sources.reader import (
    HEAD_BYTES,
    NDJSON,
    READ_BYTES,
    TURN_BYTES,
    InputForm,
    Likeness,
    StreamReader,
    begins_alike,
    compare,
    first_bytes,
)
from shipper.sources.siblings import is_generation_of, looks_like_generation
from shipper.system.permissions import DENIALS, access_problem
from shipper.system.work import WorkItem, at_work, step

log = structlog.get_logger("sources")

_LIKENESSES_MAX: Final = 1000


class UndecidedError(SourceError):
    """
    A file looks like a copy of another input, but cannot be identified yet.

    Attributes:
        original: The stream it resembles; None if there are too few bytes to compare.
        is_shorter: The copy may still be in progress.
    """

    def __init__(self, original: Stream | None, *, is_shorter: bool) -> None:
        super().__init__("the input cannot be identified yet")
        self.original = original
        self.is_shorter = is_shorter


class StreamIndex:
    """
    Maps files to streams. Methods that open a file raise `SourceError` if it cannot be read.

    Args:
        known: The file streams of the state store, older ones first.
        skip_reason: Files with a reason are not opened, or not read any further.
    """

    def __init__(
        self,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        *,
        max_record_bytes: int,
        form: InputForm = NDJSON,
        skip_reason: SkipReason = never_skip,
    ) -> None:
        self._next_stream_id = next_stream_id
        self._max_record_bytes = max_record_bytes
        self._form = form
        self._skip_reason = skip_reason
        self._streams = {stream.stream_id: stream for stream in known}  # without lost ones
        self._lost: dict[int, Stream] = {}
        self._by_file_id = {stream.file_id: stream for stream in self._streams.values() if stream.inode}
        self._by_head: dict[Head, list[Stream]] = {}  # as of the last scan, including lost ones
        self._head_lengths: set[int] = set()  # its keys' lengths; there may be 100,000 keys
        self._sort_by_head()
        self._likenesses: dict[tuple[object, ...], Likeness] = {}
        self._displaced: list[Stream] = []
        self._unsaved: dict[int, Stream] = {}

    @contextmanager
    def opening(self, path: str | Path, file_id: FileId) -> Iterator[None]:
        """Register opening a file as work; raise `SourceError` if it is skipped."""
        source = f"{file_id[0]}:{file_id[1]}"
        if why := self._skip_reason("open", source, 0):
            raise SourceError(f"opening {path} {why}")
        with at_work(WorkItem("open", str(path), source)):
            yield

    @contextmanager
    def reading(self, reader: StreamReader) -> Iterator[None]:
        """Like `opening`, but for reading a file."""
        key = reader.stream.key
        if why := self._skip_reason("read", key, reader.offset):
            raise SourceError(f"reading {reader.path} from byte {reader.offset} on {why}")
        with at_work(WorkItem("read", str(reader.path), key, reader.offset)):
            yield

    # Streams ----------------------------------------------------------------------------------------------------------

    def at(self, file_id: FileId) -> Stream | None:
        """Return the stream whose file was last seen with a device and inode."""
        return self._by_file_id.get(file_id)

    def needs_reading(self, stream: Stream, status: os.stat_result) -> bool:
        """Return whether a stream's file must be opened: it has changed or is not settled."""
        return self.has_changed(stream, status) or not stream.is_settled

    def has_changed(self, stream: Stream, status: os.stat_result) -> bool:
        """Return whether a stream's file may have grown since its end was reached."""
        return signature_of(status) != (stream.ended_size, stream.ended_ns)

    def known_paths(self) -> list[str]:
        """Return the last known path of each stream."""
        return [stream.path for stream in self._streams.values()]

    def lost(self) -> list[Stream]:
        """Return the streams whose file is gone, older losses first; a new file may turn out to be one of them."""
        return list(self._lost.values())

    def is_lost(self, stream: Stream) -> bool:
        return stream.stream_id in self._lost

    def update_lost(self, present: Iterable[FileId], open_streams: Iterable[Stream] = ()) -> list[Stream]:
        """
        Mark the streams as lost whose file is neither at its path nor elsewhere in its folder.

        Args:
            present: The files that were found.
            open_streams: The streams being read, even if their files are deleted.
        Returns:
            Streams whose file was renamed within its folder; their paths are updated.
        """
        present = set(present)
        for stream in [lost for lost in self._lost.values() if lost.inode and lost.file_id in present]:
            self._recover(stream)
        open_ids = {stream.stream_id for stream in open_streams}
        missing = [
            stream
            for stream_id, stream in self._streams.items()
            if stream_id not in open_ids
            and stream.file_id not in present
            and status_at(stream.path, stream.file_id) is None
        ]
        # A renamed file is not lost: its inode is better evidence than its bytes.
        renamed = self.find_renamed(missing)
        renamed_ids = {stream.stream_id for stream in renamed}
        for stream in missing:
            if stream.stream_id not in renamed_ids:
                self._lost[stream.stream_id] = self._streams.pop(stream.stream_id)
        self._sort_by_head()
        return renamed

    def _sort_by_head(self) -> None:
        self._by_head = defaultdict(list)
        for stream in (*self._lost.values(), *self._streams.values()):
            self._by_head[stream.head].append(stream)
        self._head_lengths = {length for length, _ in self._by_head}

    def _recover(self, stream: Stream) -> None:
        self._streams[stream.stream_id] = self._lost.pop(stream.stream_id)
        if stream.is_gone:
            stream.is_gone = False
            self.save_later(stream)

    def find_renamed(self, streams: Iterable[Stream], *, are_open: bool = False) -> list[Stream]:
        """
        Return the streams whose files were renamed within their folders, and update their paths.

        A file with different bytes at the beginning is another one, which reuses the inode of a deleted file.

        Args:
            are_open: The files are open, so their inodes cannot have been reused.
        """
        by_folder: dict[str, dict[FileId, Stream]] = {}
        for stream in streams:
            if stream.inode:
                for folder in folders_of(stream):
                    by_folder.setdefault(folder, {})[stream.file_id] = stream
        renamed = {}
        for folder, by_file_id in by_folder.items():
            with suppress(OSError), os.scandir(folder) as entries:
                device = os.stat(folder).st_dev
                for entry in entries:
                    step()
                    known = by_file_id.get((device, entry.inode()))
                    if known is None or not entry.is_file(follow_symlinks=False):
                        continue
                    if are_open or _may_belong(entry.path, known):
                        set_path(known, entry.path)
                        self.save_later(known)
                        renamed[known.stream_id] = known
        return list(renamed.values())

    def unsettled_rotated(self, present: Iterable[FileId], is_generation: Callable[[str], bool]) -> list[Stream]:
        """
        Return the rotated streams that an earlier run did not settle; no pattern matches them, but their files exist.

        Args:
            is_generation: Returns whether rotation may have given a followed file this path.
        """
        others = self._unmatched(present)
        return self._unread([stream for stream in others if stream.is_rotated or is_generation(stream.path)])

    def unmatched(self, present: Iterable[FileId]) -> list[Stream]:
        """Return the streams that are not settled as far as known, whose files exist but match no pattern."""
        others = self._unmatched(present)
        return self._unread([stream for stream in others if stream.compression or not stream.is_settled])

    def _unmatched(self, present: Iterable[FileId]) -> list[Stream]:
        present = set(present)
        return [stream for stream in self._streams.values() if stream.file_id not in present]

    def _unread(self, streams: Iterable[Stream]) -> list[Stream]:
        """Return the streams whose files exist and must be read."""
        statuses = ((stream, status_at(stream.path, stream.file_id)) for stream in streams)
        return [stream for stream, status in statuses if status and self.needs_reading(stream, status)]

    def take_displaced(self) -> list[Stream]:
        """Return the streams whose files were truncated or whose inodes were reused, each once."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def save_later(self, stream: Stream) -> None:
        """Mark a stream as changed, apart from its checkpoint; `take_unsaved` returns it."""
        self._unsaved[stream.stream_id] = stream

    def take_unsaved(self) -> list[Stream]:
        return [self._unsaved.pop(stream_id) for stream_id in list(self._unsaved)]

    def mark_gone(self, streams: Iterable[Stream]) -> None:
        """Note that inputs were not found again, so that nothing keeps waiting for them."""
        for stream in streams:
            if not stream.is_gone:
                stream.is_gone = True
                self.save_later(stream)

    def drop(self, stream: Stream) -> None:
        """Forget a stream that was not read, or that is permanently lost."""
        self.release_file(stream)
        for streams in (self._streams, self._lost, self._unsaved):
            streams.pop(stream.stream_id, None)

    def release_file(self, stream: Stream) -> None:
        """Detach a stream from its file, which is deleted or belongs to another stream."""
        if self.at(stream.file_id) is stream:
            del self._by_file_id[stream.file_id]
        stream.device = stream.inode = 0
        self.save_later(stream)

    def _displace(self, stream: Stream) -> None:
        """Detach a stream from its file, which belongs to another stream now."""
        self.release_file(stream)
        self._displaced.append(stream)

    # Opening ----------------------------------------------------------------------------------------------------------

    def open(self, path: Path) -> StreamReader:
        """Open a file at its checkpoint, or at its start if it is new."""
        reader = self._open(path, lambda content: self._identify(content, path) or self._new_stream(content, path))
        assert reader is not None
        return reader

    def open_in_place(self, path: Path) -> StreamReader | None:
        """Open a stream's file at its checkpoint; return None if it is another file with the same inode."""
        return self._open(path, lambda content: self._in_place(content, path))

    def open_known(self, path: Path, *, may_be_copy: bool = False) -> StreamReader | None:
        """
        Open a file if it is a known stream that is not settled or whose end was not reached; otherwise return None.

        Raises:
            UndecidedError: The file cannot be identified yet.
        """

        def identify(content: Content) -> Stream | None:
            previous = self.at(file_id_of(content.status()))
            stream = self._identify(content, path, may_wait=True, may_be_copy=may_be_copy)
            if stream is None:
                return None
            has_more = content.compression != "" and self.has_changed(stream, content.status())
            has_more |= stream is previous and stream.ended_size < 0
            return stream if has_more or content.pread(1, max(stream.checkpoint, stream.read_offset)) else None

        return self._open(path, identify)

    def _open(self, path: Path, identify: Callable[[Content], Stream | None]) -> StreamReader | None:
        descriptor = open_file(path)
        try:
            content = open_content(descriptor, path)
            refuse_other_kinds(first_bytes(content, HEAD_BYTES), path)
            framing = self._framing_of(content)
            stream = identify(content)
            if stream is not None:
                return self._reader(content, stream, path, framing)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def open_new(self, path: Path, file_id: FileId) -> StreamReader | None:
        """Open an unknown file as a new stream; return None if the path has since become that of another file."""

        def identify(content: Content) -> Stream | None:
            return self._new_stream(content, path) if file_id_of(content.status()) == file_id else None

        return self._open(path, identify)

    def decide(self, reader: StreamReader, *, may_wait: bool) -> StreamReader:
        """
        Check whether a new file, not yet read, belongs to a lost stream.

        Args:
            may_wait: Raise if the file cannot be identified yet; the caller tries again later.
        Returns:
            The reader to use instead of the one passed.
        Raises:
            UndecidedError: Only with `may_wait`.
        """
        content = open_content(reader.content.descriptor, reader.path)
        framing = self._framing_of(content)
        stream = self._find_lost(content, may_wait=may_wait)
        if stream is not None:
            self.drop(reader.stream)
            self._take_over(stream, content, reader.path)
        decided = self._reader(content, stream or reader.stream, reader.path, framing)
        decided.stream.compression = content.compression
        with suppress(OSError, SourceError):  # reported when it is read
            decided.note_head()
        # Another new file with the same head may be a copy of it.
        self._by_head.setdefault(decided.stream.head, []).append(decided.stream)
        self._head_lengths.add(decided.stream.head.length)
        return decided

    def begin_again(self, reader: StreamReader) -> StreamReader:
        """Return a new reader for a file that was truncated in place; the old stream may continue in a copy."""
        content = open_content(reader.content.descriptor, reader.path)
        again = self._reader(content, self._new_stream(content, reader.path), reader.path)
        again.note_head()
        return again

    def _framing_of(self, content: Content) -> Framing | None:
        """Detect the framing of an archive before it is read up to the checkpoint: going back is expensive."""
        if not content.compression:
            return None
        head = first_bytes(content, READ_BYTES)
        return self._form.framing_of(head, is_whole=len(head) == READ_BYTES)  # another member may follow

    def _reader(self, content: Content, stream: Stream, path: Path, framing: Framing | None = None) -> StreamReader:
        if isinstance(content, Archive) and not stream.checkpoint:
            content.forget()
        return StreamReader(
            content, stream, path, max_record_bytes=self._max_record_bytes, form=self._form, framing=framing
        )

    def _new_stream(self, content: Content, path: Path) -> Stream:
        file_id = file_id_of(content.status())
        if (displaced := self.at(file_id)) is not None:
            self._displace(displaced)
        stream = Stream(
            stream_id=self._next_stream_id(),
            kind="file",
            path=str(path),
            device=file_id[0],
            inode=file_id[1],
            compression=content.compression,
        )
        self._streams[stream.stream_id] = self._by_file_id[file_id] = stream
        return stream

    # Comparing --------------------------------------------------------------------------------------------------------

    def _identify(
        self, content: Content, path: Path, *, may_wait: bool = False, may_be_copy: bool = False
    ) -> Stream | None:
        """Return the known stream of an open file, or None."""
        stream = self._in_place(content, path, may_be_copy=may_be_copy)
        if stream is None and (stream := self._find_lost(content, may_wait=may_wait)) is not None:
            self._take_over(stream, content, path)
        return stream

    def _in_place(self, content: Content, path: Path, *, may_be_copy: bool = False) -> Stream | None:
        """
        Return the stream with the device and inode of an open file, or None if its bytes differ.

        Args:
            may_be_copy: Also return None if the file seems to be a copy of another one. Otherwise this is done only if
                it has another name than the stream's file, as it may have the inode of a deleted copy.
        """
        stream = self.at(file_id_of(content.status()))
        if stream is None:
            return None
        is_renamed = stream.path != str(path) and status_at(stream.path, stream.file_id) is None
        if compare(content, stream) != "same" or self._may_be_another(content, stream, is_renamed=is_renamed):
            report = log.info if stream.is_settled else log.warning  # either the inode was reused, or data is lost
            report("source_replaced", path=shown(path), checkpoint=stream.checkpoint, size=content.size())
            self._displace(stream)
            return None
        if (may_be_copy or is_renamed) and self._find_original(content, stream, self._alike(content)) is not None:
            self._displace(stream)
            return None
        if stream.stream_id in self._lost:
            self._recover(stream)
        if stream.path != str(path):
            self.save_later(stream)
        if is_renamed:
            set_path(stream, str(path))
        stream.path = str(path)
        return stream

    def _may_be_another(self, content: Content, stream: Stream, *, is_renamed: bool) -> bool:
        """
        Return whether a file may only have the inode of a stream's file that was deleted.

        That is so if it is compressed in another way, as renaming does not compress; or if nothing was read, so that
        there are no bytes to compare. If it is the same file after all, another stream reads it from its start.
        """
        if is_renamed and content.compression != stream.compression:
            return True  # its bytes alone identify it
        is_unread = not (stream.head.length or stream.checkpoint or stream.read_offset)
        return is_unread and (is_renamed or stream.stream_id in self._lost)

    def _find_lost(self, content: Content, *, may_wait: bool) -> Stream | None:
        """Return the lost stream that a file is a copy of, or None."""
        if may_wait and len(first_bytes(content, HEAD_BYTES)) < HEAD_BYTES and not content.is_ended():
            raise UndecidedError(None, is_shorter=True)  # the archive is still being written
        alike = self._alike(content)
        lost = [stream for stream in alike if stream.stream_id in self._lost]
        for stream in sorted(lost, key=lambda stream: (-stream.checkpoint, stream.is_settled)):
            likeness = self._likeness(content, stream)
            if likeness == "same":
                if may_wait and (undecided := self._find_original(content, stream, alike)) is not None:
                    raise undecided
                return stream
            if likeness == "shorter" and may_wait:
                raise UndecidedError(stream, is_shorter=True)
        if may_wait:
            for stream in alike:
                if stream.stream_id in self._streams and (likeness := self._likeness(content, stream)) != "other":
                    raise UndecidedError(stream, is_shorter=likeness == "shorter")
        return None

    def _find_original(self, content: Content, known: Stream, alike: list[Stream]) -> UndecidedError | None:
        """
        Return an error if a file that continues a settled stream may be a copy of another such file that still exists.

        If the settled stream was itself a copy, its file is not continued: its original and the next copy are longer.
        """
        if not known.is_settled or not content.pread(1, known.checkpoint):
            return None
        for stream in alike:
            is_candidate = stream is not known and stream.stream_id in self._streams and not stream.compression
            if is_candidate and stream.checkpoint >= known.checkpoint:
                likeness = self._likeness(content, stream)
                if likeness != "other" and _may_be_original(stream, content, known, default=likeness == "same"):
                    return UndecidedError(stream, is_shorter=likeness == "shorter")
        return None

    def _alike(self, content: Content) -> list[Stream]:
        """Return the streams that begin like a file; whitespace, NULs or a CSV header alone do not count."""
        if not self._by_head:
            return []
        head = first_bytes(content, HEAD_BYTES)
        framing = self._form.framing_of(head, is_whole=True)
        header_bytes = len(framing.header) if framing else 0
        alike = []
        for length in sorted(self._head_lengths, reverse=True):
            is_header = length <= header_bytes and length < HEAD_BYTES
            if length <= len(head) and not is_header and head[:length].strip(BLANKS):
                alike += self._by_head.get(Head(length, digest(head[:length])), [])
        return alike

    def _likeness(self, content: Content, known: Stream) -> Likeness:
        """Compare a file with a stream; cache the result for archives, which are decompressed up to the checkpoint."""
        if not content.compression:
            return compare(content, known)
        status = content.status()
        key = (file_id_of(status), signature_of(status), known.stream_id, known.marker, known.read_offset)
        if key not in self._likenesses:
            if len(self._likenesses) >= _LIKENESSES_MAX:
                self._likenesses.clear()
            self._likenesses[key] = compare(content, known)
        return self._likenesses[key]

    def _take_over(self, stream: Stream, content: Content, path: Path) -> None:
        """Assign a file to a lost stream."""
        log.info("source_found_again", path=shown(path), formerly=stream.shown_path, offset=stream.checkpoint)
        self.release_file(stream)
        self._recover(stream)
        file_id = file_id_of(content.status())
        if (holder := self.at(file_id)) is not None:  # its file was deleted, and the inode was reused
            self._displace(holder)
        stream.device, stream.inode = file_id
        set_path(stream, str(path))
        stream.compression = content.compression
        stream.ended_size = stream.ended_ns = -1
        stream.forget_end()
        self._by_file_id[file_id] = stream
        self.save_later(stream)

    def has_settled_copy(
        self, stream: Stream, copy: Content, compared: dict[int, int], *, descriptor: int | None = None
    ) -> bool | None:
        """
        Return whether a file is a copy of the beginning of a stream's file and that part is settled.

        Args:
            compared: Bytes of the copy compared so far, by stream; updated.
            descriptor: Of the stream's file if it is open, because it may have been renamed.
        Returns:
            None if it is undecided: some bytes are not settled or not compared yet.
        """
        path = Path(stream.path)
        opened = open_file(path) if descriptor is None else os.dup(descriptor)
        with closing(open_content(opened, path)) as original:
            original.is_independent = True
            if file_id_of(original.status()) != stream.file_id:
                return False
            if not copy.compression and stream.checkpoint < copy.size() <= original.size():
                return None
            offset = start = compared.get(stream.stream_id, 0)
            while data := copy.pread(READ_BYTES, offset):
                if original.pread(len(data), offset) != data:
                    return False
                step()
                offset = compared[stream.stream_id] = offset + len(data)
                if offset - start >= TURN_BYTES:
                    return None
            if not copy.is_ended():
                return False
            return True if offset <= stream.checkpoint else None


def set_path(stream: Stream, path: str) -> None:
    """
    Update the path of a renamed file, and note whether the renaming is a rotation.

    It is not if only a folder was renamed, if the file got its old name back, or if the new name looks like a
    generation of another file, as with applications that number their files.
    """
    old, new = os.path.basename(stream.path), os.path.basename(path)
    if new != old and (is_generation_of(new, old) or not looks_like_generation(new)):
        stream.is_rotated = True
    stream.path = path


def open_file(path: Path) -> int:
    """Open a regular file for reading."""
    try:
        # O_NONBLOCK: opening a FIFO would otherwise block until it has a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
            raise not_regular(path) from error
        denied = access_problem(path, os.R_OK) if error.errno in DENIALS else ""
        raise SourceError(denied or f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def not_regular(path: Path) -> SourceError:
    denied = access_problem(path, os.R_OK)
    return SourceError(denied or f"{path} is not a regular file; use `shipper pipe` for a stream")


def folders_of(stream: Stream) -> set[str]:
    """Return the folders where a stream's file may have been renamed: that of its path, and that of a link's target."""
    folder = os.path.dirname(stream.path) or "."
    return {folder, os.path.dirname(os.path.realpath(stream.path))} if os.path.islink(stream.path) else {folder}


def _may_belong(path: str, stream: Stream) -> bool:
    """Return whether a file with a stream's inode may be that stream's file; True if it is unreadable."""
    if not stream.head.length:  # its bytes are unknown, so compare names
        return is_generation_of(os.path.basename(path), os.path.basename(stream.path))
    try:
        with closing(open_content(open_file(Path(path)), Path(path))) as content:
            return begins_alike(content, stream)
    except (SourceError, OSError):
        return True


def _may_be_original(stream: Stream, copy: Content, known: Stream, *, default: bool) -> bool:
    """Return whether a stream's file continues a known one and is as long as a copy; `default` if it is gone."""
    path = Path(stream.path)
    try:
        with closing(open_content(open_file(path), path)) as original:
            if file_id_of(original.status()) != stream.file_id:
                return default
            is_long_enough = bool(copy.compression) or copy.size() <= original.size()
            return is_long_enough and compare(original, known) == "same"
    except (SourceError, OSError):
        return default


def status_at(path: str | Path, file_id: FileId) -> os.stat_result | None:
    """Return the status of a file if a path still leads to it, or None; a hard link is not a rename."""
    step()
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status if file_id_of(status) == file_id else None
