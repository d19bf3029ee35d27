"""
Recognise inputs again after renaming, rotation, compression or copying.

Device and inode are the key while they last; the head and the marker before the checkpoint confirm it. A file at
another place is taken for a stream by these bytes alone, if the stream has lost its place: the copy that copytruncate
made, a rotated file that was compressed, a file that was moved to another disk. A copy of a file that still exists may
be about to replace it, so wait before treating it as a new input.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from shipper.model.errors import SourceError
from shipper.model.framing import CsvRows, Framing
from shipper.model.records import Head, Stream, digest, shown
from shipper.sources.content import Archive, Content, WideWindow, open_content
from shipper.sources.discovery import Aside, nothing_aside
from shipper.sources.reader import (
    HEAD_BYTES,
    NDJSON,
    READ_BYTES,
    TURN_BYTES,
    InputForm,
    Likeness,
    StreamReader,
    begins_alike,
    first_bytes,
    likeness,
)
from shipper.sources.siblings import is_generation_of, looks_like_generation
from shipper.system.permissions import DENIALS, obstacle
from shipper.system.work import Piece, at_work, step

log = structlog.get_logger("sources")

Place = tuple[int, int]  # device and inode

_NO_EVIDENCE = b"\0 \t\r\n"
_LIKENESSES_MAX: Final = 1000


class UndecidedError(SourceError):
    """
    It looks like a copy of another input; it is too early to tell what it will be.

    Attributes:
        original: What it looks like; None if too little is there to compare.
        is_shorter: It may be a copy that is still being made.
    """

    def __init__(self, original: Stream | None, *, is_shorter: bool) -> None:
        super().__init__("it is too early to tell which input it is")
        self.original = original
        self.is_shorter = is_shorter


class Absent(NamedTuple):
    """
    Streams whose file no longer is where it was.

    Attributes:
        renamed: Those that have another name in the same folder, which they now know.
        lost: The others, older ones first; another file may turn out to be one of them.
    """

    renamed: list[Stream]
    lost: list[Stream]


class StreamBook:
    """
    Knows which files are streams that were read before.

    Args:
        known: The file streams of the state store, older ones first.
        next_stream_id: Gives an id that was never given.
        max_record_bytes: The longest line that is a record.
        form: How records lie in the files.
        aside: Which files are not to be opened, or read no further.
    """

    def __init__(
        self,
        known: Iterable[Stream],
        next_stream_id: Callable[[], int],
        *,
        max_record_bytes: int,
        form: InputForm = NDJSON,
        aside: Aside = nothing_aside,
    ) -> None:
        self._aside = aside
        self._wide_window = WideWindow()
        self._likenesses: dict[tuple[object, ...], Likeness] = {}
        self._max_record_bytes = max_record_bytes
        self._form = form
        self._next_stream_id = next_stream_id
        self._streams = {stream.stream_id: stream for stream in known}  # but for the lost ones
        self._by_place = {stream.place: stream for stream in self._streams.values() if stream.inode}
        self._displaced: list[Stream] = []
        self._moved_streams: list[Stream] = []
        self._lost: dict[int, Stream] = {}
        self._lost_by_head: dict[Head, list[Stream]] = defaultdict(list)
        self._placed_by_head: dict[Head, list[Stream]] = {}  # as of the last look

    @contextmanager
    def opening(self, path: str | Path, place: Place) -> Iterator[None]:
        """
        Name what is at work while a file is looked at.

        Raises:
            SourceError: It stands aside.
        """
        source = f"{place[0]}:{place[1]}"
        if why := self._aside("open", source, 0):
            raise SourceError(f"looking at {path} {why}")
        with at_work(Piece("open", str(path), source)):
            yield

    @contextmanager
    def reading(self, reader: StreamReader) -> Iterator[None]:
        """As `opening`, while it is read on."""
        key = reader.stream.key
        if why := self._aside("read", key, reader.offset):
            raise SourceError(f"reading {reader.path} from byte {reader.offset} on {why}")
        with at_work(Piece("read", str(reader.path), key, reader.offset)):
            yield

    def at(self, place: Place) -> Stream | None:
        """Return the stream that was last seen at a place."""
        return self._by_place.get(place)

    def has_news(self, stream: Stream, status: os.stat_result) -> bool:
        """Return whether a file in its stream's place has to be opened: it has changed, or was not settled."""
        return self.has_changed(stream, status) or not stream.is_settled

    def has_changed(self, stream: Stream, status: os.stat_result) -> bool:
        """Return whether a file in its stream's place may hold more than when its end was reached."""
        return (status.st_size, status.st_mtime_ns) != (stream.ended_size, stream.ended_ns)

    def lose(self, present: Iterable[Place], open_streams: Iterable[Stream] = ()) -> Absent:
        """
        Find the streams whose file no longer is where it was.

        Args:
            present: Where files are.
            open_streams: Those that are being read, whether their file has a name or not.
        """
        there = set(present)
        for stream in [each for each in self._lost.values() if each.inode and each.place in there]:
            self._unlose(stream)
        being_read = {stream.stream_id: stream for stream in open_streams}
        missing = [
            stream
            for stream_id, stream in self._streams.items()
            if stream_id not in being_read and stream.place not in there and not _is_in_place(stream)
        ]
        # A new name is no loss: the place goes before what the bytes say.
        renamed = self.find_renamed(missing)
        renamed_ids = {stream.stream_id for stream in renamed}
        for stream in missing:
            if stream.stream_id not in renamed_ids:
                self._lost[stream.stream_id] = self._streams.pop(stream.stream_id)
                self._lost_by_head[stream.head].append(stream)
        self._placed_by_head = defaultdict(list)
        for stream in self._streams.values():
            self._placed_by_head[stream.head].append(stream)
        return Absent(renamed, self.lost())

    def _unlose(self, stream: Stream) -> None:
        self._streams[stream.stream_id] = self._lost.pop(stream.stream_id)
        if stream.is_gone:
            stream.is_gone = False
            self._moved_streams.append(stream)
        same_head = self._lost_by_head[stream.head]
        same_head.remove(stream)
        if not same_head:
            del self._lost_by_head[stream.head]
        # Another file of the same look may be a copy of it.
        self._placed_by_head.setdefault(stream.head, []).append(stream)

    def find_renamed(self, streams: Iterable[Stream], *, are_open: bool = False) -> list[Stream]:
        """
        Find those whose files have other names in the folders where they were, and note these names.

        Other bytes at the beginning tell of another file, which was given the inode of one that is gone.

        Args:
            are_open: They are held open, so that their inodes cannot have been given out again.
        """
        by_folder: dict[str, dict[Place, Stream]] = {}
        for stream in streams:
            if stream.inode:
                for folder in folders_of(stream):
                    by_folder.setdefault(folder, {})[stream.place] = stream
        renamed = {}
        for folder, by_place in by_folder.items():
            with suppress(OSError), os.scandir(folder) as entries:
                device = os.stat(folder).st_dev
                for entry in entries:
                    step()
                    known = by_place.get((device, entry.inode()))
                    if known is None or not entry.is_file(follow_symlinks=False):
                        continue
                    if are_open or _may_be(entry.path, known):
                        note_name(known, entry.path)
                        self._moved_streams.append(known)
                        renamed[known.stream_id] = known
        return list(renamed.values())

    def left(self, present: Iterable[Place], is_generation: Callable[[str], bool]) -> list[Stream]:
        """
        Find the streams that were renamed while an earlier run read them, and hold what is not settled: their files
        have the names by which they were seen last, but are not among those present.

        Args:
            is_generation: Whether a path is one that rotation gives to what is followed.
        """
        there = set(present)
        unnamed = [each for each in self._streams.values() if each.place not in there]
        rotated = [each for each in unnamed if each.is_rotated or is_generation(each.path)]
        return [stream for stream in rotated if self._has_rest(stream)]

    def _has_rest(self, stream: Stream) -> bool:
        try:
            status = os.stat(stream.path)
        except (OSError, ValueError):
            return False
        return _place_of(status) == stream.place and self.has_news(stream, status)

    def is_lost(self, stream: Stream) -> bool:
        """Return whether a stream is lost and has not been found again."""
        return stream.stream_id in self._lost

    def lost(self) -> list[Stream]:
        """Return the lost streams that have not been found again."""
        return list(self._lost.values())

    def take_displaced(self) -> list[Stream]:
        """Hand out, once, the streams that have lost their place to another one."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def take_moved(self) -> list[Stream]:
        """Hand out, once, the streams that have another name or place than before."""
        moved, self._moved_streams = self._moved_streams, []
        return moved

    def forget(self, streams: Iterable[Stream]) -> None:
        """Drop lost streams that will not come back."""
        for stream in streams:
            stream.is_gone = False  # or it would be saved again as one that was found
            self._unlose(stream)
            self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Drop a stream of which nothing was read."""
        del self._streams[stream.stream_id]
        if self._by_place.get(stream.place) is stream:
            del self._by_place[stream.place]

    def open(self, path: Path) -> StreamReader:
        """
        Open a file where it was left, or at its start if it is new.

        Raises:
            SourceError: It is not a regular file, or cannot be read.
        """
        reader = self._open(path, lambda content: self._identify(content, path) or self._begin(content, path))
        assert reader is not None
        return reader

    def open_new(self, path: Path) -> StreamReader:
        """Open a file that is in no stream's place, at its start; errors as for `open`."""
        reader = self._open(path, lambda content: self._begin(content, path))
        assert reader is not None
        return reader

    def decide(self, reader: StreamReader, *, may_wait: bool) -> StreamReader:
        """
        Find out whether a new file of which nothing was read is a stream that was lost.

        Args:
            may_wait: The caller comes again, should it be too early to tell.
        Returns:
            The reader to go on with; another one if it is a lost stream.
        Raises:
            SourceError: It cannot be read.
            UndecidedError: Only with `may_wait`.
        """
        descriptor = os.dup(reader.content.descriptor)
        try:
            content = open_content(descriptor, reader.path, self._wide_window)
            framing = self._framing_of(content)
            stream = self._moved(content, may_wait=may_wait)
            if stream is not None:
                self.drop(reader.stream)
                self._take_over(stream, content, reader.path)
            decided = self._reader(content, stream or reader.stream, reader.path, framing)
        except BaseException:
            os.close(descriptor)
            raise
        decided.stream.compression = content.compression
        with suppress(OSError, SourceError):  # told in its turn to be read
            decided.note_head()
        # Another new file of the same look may be a copy of it.
        self._placed_by_head.setdefault(decided.stream.head, []).append(decided.stream)
        reader.close()
        return decided

    def open_in_place(self, path: Path) -> StreamReader | None:
        """
        Open a file in the place of a stream where it was left; None if the stream has lost that place to it.

        Raises:
            SourceError: It cannot be read.
        """
        return self._open(path, lambda content: self._in_place(content, path))

    def open_known(self, path: Path) -> StreamReader | None:
        """
        Open a file if it is a known stream, and there is something in it that is not settled, or its end was not seen.

        Raises:
            SourceError: It cannot be read.
            UndecidedError: It is too early to tell.
        """

        def identify(content: Content) -> Stream | None:
            here = self.at(_place_of(content.status()))
            stream = self._identify(content, path, may_wait=True)
            if stream is None:
                return None
            is_unended = content.compression != "" and self.has_changed(stream, content.status())
            is_unended |= stream is here and stream.ended_size < 0
            return stream if is_unended or content.pread(1, max(stream.checkpoint, stream.read_offset)) else None

        return self._open(path, identify)

    def _open(self, path: Path, identify: Callable[[Content], Stream | None]) -> StreamReader | None:
        descriptor = _opened(path)
        try:
            content = open_content(descriptor, path, self._wide_window)
            framing = self._framing_of(content)
            stream = identify(content)
            if stream is not None:
                return self._reader(content, stream, path, framing)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def holds_all_of(self, stream: Stream, copy: Content, compared: dict[int, int]) -> bool | None:
        """
        Return whether a stream that is in its place begins with all that another file holds, and has it settled.

        Args:
            compared: By stream, how many bytes of the copy were found to be the same; brought up to date.
        Returns:
            None if that is too early to tell: it is not settled yet, or only a part has been compared.
        Raises:
            SourceError: One of them cannot be read.
        """
        with closing(open_content(_opened(Path(stream.path)), Path(stream.path))) as original:
            if _place_of(original.status()) != stream.place:
                return False
            if not copy.compression and stream.checkpoint < copy.size() <= original.size():
                return None
            offset = begun = compared.get(stream.stream_id, 0)
            while data := copy.pread(READ_BYTES, offset):
                if original.pread(len(data), offset) != data:
                    return False
                step()
                offset = compared[stream.stream_id] = offset + len(data)
                if offset - begun >= TURN_BYTES:
                    return None
            return offset <= stream.checkpoint or None if copy.is_ended() else False

    def known_paths(self) -> list[str]:
        """Return where the streams were seen last."""
        return [stream.path for stream in self._streams.values()]

    def begin_again(self, reader: StreamReader) -> StreamReader:
        """Begin a stream in a file that was truncated in place; the old one may live on in a copy."""
        descriptor = os.dup(reader.content.descriptor)
        try:
            content = open_content(descriptor, reader.path, self._wide_window)
            again = self._reader(content, self._begin(content, reader.path), reader.path)
            again.note_head()
        except BaseException:
            os.close(descriptor)
            raise
        reader.close()
        return again

    def _framing_of(self, content: Content) -> Framing | None:
        """Look at the first bytes of an archive, before it is read up to a checkpoint: there is no cheap way back."""
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

    def _identify(self, content: Content, path: Path, *, may_wait: bool = False) -> Stream | None:
        """Find the stream that an open file is; None if it is none that is known."""
        in_place = self._in_place(content, path)
        if in_place is not None:
            return in_place
        stream = self._moved(content, may_wait=may_wait)
        if stream is not None:
            self._take_over(stream, content, path)
        return stream

    def _take_over(self, stream: Stream, content: Content, path: Path) -> None:
        """Assign the place of a file to a lost stream."""
        log.info("source_found_again", path=shown(path), formerly=stream.shown_path, offset=stream.checkpoint)
        self._by_place.pop(stream.place, None)
        self._unlose(stream)
        place = _place_of(content.status())
        if (holder := self._by_place.get(place)) is not None:  # whose file was deleted, so that its inode was given out
            self._displace(holder)
        stream.device, stream.inode = place
        note_name(stream, str(path))
        stream.compression = content.compression
        stream.ended_size = stream.ended_ns = -1
        self._by_place[stream.place] = stream
        self._moved_streams.append(stream)

    def _in_place(self, content: Content, path: Path) -> Stream | None:
        """Find the stream that has its place here; None if it has lost it."""
        stream = self._by_place.get(_place_of(content.status()))
        if stream is None:
            return None
        if likeness(content, stream) != "same":
            tell = log.info if stream.is_settled else log.warning  # an inode is given out again, or something is lost
            tell("source_replaced", path=shown(path), checkpoint=stream.checkpoint, size=content.size())
            self._displace(stream)
            return None
        if stream.stream_id in self._lost:
            self._unlose(stream)
        if stream.path != str(path) and not _is_in_place(stream):
            note_name(stream, str(path))
        stream.path = str(path)
        return stream

    def _moved(self, content: Content, *, may_wait: bool) -> Stream | None:
        """Find the lost stream whose bytes these are."""
        if may_wait and len(first_bytes(content, HEAD_BYTES)) < HEAD_BYTES and not content.is_ended():
            raise UndecidedError(None, is_shorter=True)  # an archive that is being written
        header_bytes = self._header_bytes(content)
        candidates = _alike(content, self._lost_by_head, header_bytes)
        for stream in sorted(candidates, key=lambda each: -each.checkpoint):
            found = self._likeness(content, stream)
            if found == "same":
                return stream
            if found == "shorter" and may_wait:
                raise UndecidedError(stream, is_shorter=True)
        if may_wait:
            for stream in _alike(content, self._placed_by_head, header_bytes):
                found = self._likeness(content, stream)
                if found != "other":
                    raise UndecidedError(stream, is_shorter=found == "shorter")
        return None

    def _likeness(self, content: Content, known: Stream) -> Likeness:
        """Compare, but an archive only once: it is decompressed up to the checkpoint for it."""
        if not content.compression:
            return likeness(content, known)
        status = content.status()
        of = (*_place_of(status), status.st_size, status.st_mtime_ns, known.stream_id, known.marker, known.read_offset)
        if of not in self._likenesses:
            if len(self._likenesses) >= _LIKENESSES_MAX:
                self._likenesses.clear()
            self._likenesses[of] = likeness(content, known)
        return self._likenesses[of]

    def _header_bytes(self, content: Content) -> int:
        framing = self._form.framing_of(first_bytes(content, HEAD_BYTES), is_whole=True)
        return len(framing.header) if isinstance(framing, CsvRows) else 0

    def _begin(self, content: Content, path: Path) -> Stream:
        """Begin a stream at the start of a file."""
        place = _place_of(content.status())
        displaced = self._by_place.get(place)
        if displaced is not None:
            self._displace(displaced)
        stream = Stream(
            stream_id=self._next_stream_id(),
            kind="file",
            path=str(path),
            device=place[0],
            inode=place[1],
            compression=content.compression,
        )
        self._streams[stream.stream_id] = stream
        self._by_place[stream.place] = stream
        return stream

    def _displace(self, stream: Stream) -> None:
        """Take a stream's place from it; from now on it is lost."""
        if self._by_place.get(stream.place) is stream:
            del self._by_place[stream.place]
        stream.device = stream.inode = 0
        self._displaced.append(stream)
        self._moved_streams.append(stream)


def note_name(stream: Stream, path: str) -> None:
    """
    Note that a stream's file was renamed, and whether that is a rotation.

    It is none if a folder was renamed or the file was put back by its name; nor if it looks like a generation of a
    file that it never was, as where an application numbers the files that it writes.
    """
    before, after = os.path.basename(stream.path), os.path.basename(path)
    if after != before and (is_generation_of(after, before) or not looks_like_generation(after)):
        stream.is_rotated = True
    stream.path = path


def _opened(path: Path) -> int:
    try:
        # O_NONBLOCK: a FIFO would otherwise hold the open until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO that nobody reads
            raise not_regular(path) from error
        denied = obstacle(path, os.R_OK) if error.errno in DENIALS else ""
        raise SourceError(denied or f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def not_regular(path: Path) -> SourceError:
    return SourceError(f"{path} is not a regular file; a stream goes through `shipper pipe`")


def _may_be(path: str, stream: Stream) -> bool:
    """Return whether the file in a stream's place can be its own; an unreadable file counts as such."""
    if not stream.head.length:  # nothing is known of its bytes, so the name has to do
        return is_generation_of(os.path.basename(path), os.path.basename(stream.path))
    try:
        descriptor = _opened(Path(path))
    except SourceError:
        return True
    try:
        return begins_alike(open_content(descriptor, Path(path)), stream)
    except (SourceError, OSError):
        return True
    finally:
        os.close(descriptor)


def _is_in_place(stream: Stream) -> bool:
    """Return whether a stream's file still has the name by which it was seen last."""
    step()
    try:
        status = os.stat(stream.path)
    except (OSError, ValueError):
        return False
    return _place_of(status) == stream.place


def folders_of(stream: Stream) -> set[str]:
    """Return the folders where a stream's file may have other names: that of its name, and that of a link's target."""
    folder = os.path.dirname(stream.path) or "."
    return {folder, os.path.dirname(os.path.realpath(stream.path))} if os.path.islink(stream.path) else {folder}


def _place_of(status: os.stat_result) -> Place:
    return status.st_dev, status.st_ino


def _alike(content: Content, by_head: dict[Head, list[Stream]], header_bytes: int) -> list[Stream]:
    """Find the streams that begin as a file does; blanks, NULs and a header of CSV alone are no evidence."""
    lengths = {length for length, _ in by_head}
    head = first_bytes(content, HEAD_BYTES) if lengths else b""
    found = []
    for length in sorted(lengths, reverse=True):
        is_header = length <= header_bytes and length < HEAD_BYTES
        if length <= len(head) and not is_header and head[:length].strip(_NO_EVIDENCE):
            found += by_head.get(Head(length, digest(head[:length])), [])
    return found
