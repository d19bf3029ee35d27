"""A reader returns whole lines, and recognises its file."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from shipper.model.errors import SourceError
from shipper.model.records import Head, Marker, Stream, digest
from shipper.sources.content import Content
from shipper.sources.identity import StreamIndex
from shipper.sources.reader import READ_BYTES, StreamReader, compare

LIMIT = 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.log"


@pytest.fixture
def reader(file: Path):
    with closing(reader_of(file)) as reader:
        yield reader


def reader_of(file: Path, limit: int = LIMIT) -> StreamReader:
    file.touch()
    stream = Stream(stream_id=1, kind="file", path=str(file))
    return StreamReader(Content(os.open(file, os.O_RDONLY)), stream, file, max_record_bytes=limit)


def index_of(*streams: Stream, first_id: int = 1) -> StreamIndex:
    return StreamIndex(streams, count(first_id).__next__, max_record_bytes=LIMIT)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


def test_an_incomplete_line_waits_for_its_newline(file: Path, reader: StreamReader):
    for added, wanted in ((b"one\ntw", (b"one\n", 0, 4)), (b"o\n", (b"two\n", 4, 8))):
        append(file, added)
        chunk = reader.read(is_final=False)
        assert (chunk.data, chunk.start_offset, chunk.end_offset) == wanted
        assert reader.read(is_final=False) is None


def test_the_end_of_the_input_completes_the_last_line(file: Path, reader: StreamReader):
    append(file, b"one\ntw")
    first, second = reader.read(is_final=True), reader.read(is_final=True)
    assert (first.data, second.data, second.end_offset) == (b"one\n", b"tw", 6)
    assert reader.read(is_final=True) is None


def test_chunks_are_contiguous_and_bounded(file: Path, reader: StreamReader):
    lines = [b"%07d" % number * 100 + b"\n" for number in range(5000)]
    append(file, b"".join(lines))
    data, offset = b"", 0
    while chunk := reader.read(is_final=False):
        assert chunk.start_offset == offset
        assert len(chunk.data) <= READ_BYTES
        offset = chunk.end_offset
        data += chunk.data
    assert data == b"".join(lines)


@pytest.mark.parametrize("has_end", [True, False])
def test_a_line_that_is_never_a_record_is_skipped_by_position(file: Path, reader: StreamReader, has_end: bool):
    append(file, b"x" * (3 * READ_BYTES))
    assert reader.read(is_final=False) is None
    append(file, b"x" * READ_BYTES)
    assert reader.read(is_final=False) is None
    if has_end:
        append(file, b"x\nnext\n")
    skipped = reader.read(is_final=not has_end)
    assert (skipped.is_oversized, skipped.data) == (True, b"")
    assert (skipped.start_offset, skipped.end_offset) == (0, 4 * READ_BYTES + 2 * has_end)
    following = reader.read(is_final=True)
    assert (following.data if following else None) == (b"next\n" if has_end else None)


def test_a_long_line_is_read_whole_where_the_limit_allows_it(file: Path):
    line = b"y" * (2 * READ_BYTES) + b"\n"
    append(file, line + b"short\n")
    with closing(reader_of(file, 2 * READ_BYTES)) as reader:
        assert reader.read(is_final=False).data == line
        assert reader.read(is_final=False).data == b"short\n"


def test_the_head_grows_with_the_file_up_to_a_kibibyte(file: Path, reader: StreamReader):
    append(file, b"0123456789\n")
    reader.read(is_final=False)
    assert reader.stream.head == (11, digest(b"0123456789\n"))
    append(file, b"z" * 2000 + b"\n")
    reader.read(is_final=False)
    assert reader.stream.head == (1024, digest(file.read_bytes()[:1024]))


def known(path: Path, checkpoint: int) -> Stream:
    data, status = path.read_bytes(), path.stat()
    head, tail = data[: min(1024, checkpoint)], data[max(0, checkpoint - 64) : checkpoint]
    marks = {"head": Head(len(head), digest(head)), "marker": Marker(checkpoint, len(tail), digest(tail))}
    return Stream(stream_id=9, kind="file", path=str(path), device=status.st_dev, inode=status.st_ino, **marks)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (b"a\nb\nc\n", True),
        (b"a\nb\nc\nd\n", True),
        (b"a\nb\n", False),
        (b"", False),
        (b"x\nb\nc\n", False),
        (b"a\nb\nX\nmore and more\n", False),
    ],
    ids=["same", "grown", "shrunk", "empty", "other head", "other tail, regrown"],
)
def test_a_file_is_identified_by_its_bytes(file: Path, now: bytes, expected: bool):
    file.write_bytes(b"a\nb\nc\n")
    stream = known(file, 6)
    file.write_bytes(now)
    with file.open("rb") as opened:
        assert (compare(Content(opened.fileno()), stream) == "same") is expected
    reader = index_of(stream, first_id=10).open(file)
    reader.close()
    assert (reader.stream.stream_id, reader.offset) == ((9, 6) if expected else (10, 0))


def test_a_reopened_file_is_resumed_where_this_process_has_read(file: Path):
    file.write_bytes(b"a\nb\n")
    index = index_of()
    reader = index.open(file)
    reader.read(is_final=False)
    reader.close()
    again = index.open(file)
    again.close()
    assert (again.stream, again.offset) == (reader.stream, 4)


@pytest.mark.parametrize("is_its_own", [True, False], ids=["renamed", "inode given out again"])
def test_another_file_with_the_same_inode_is_not_a_renamed_stream(file: Path, tmp_path: Path, is_its_own: bool):
    file.write_bytes(b"a\nb\n")
    index = index_of()
    reader = index.open(file)
    reader.read(is_final=False)
    reader.note_head()
    reader.close()
    other = file.rename(tmp_path / "b.zst")
    if not is_its_own:
        other.write_bytes(b"another\n")  # keeps the inode
    renamed = [each.path for each in index.update_lost([])]
    names = ([str(other)], []) if is_its_own else ([], [str(file)])
    assert (renamed, [each.path for each in index.lost()]) == names


def test_an_unread_stream_is_found_only_under_a_rotated_name(file: Path, tmp_path: Path):
    """Its file was empty; any other file may have been given its inode since, as one that nobody has named."""
    index = index_of()
    file.write_bytes(b"")
    reader = index.open(file)
    reader.close()
    other = file.rename(tmp_path / "private.txt")
    index.update_lost([])
    assert [each.path for each in index.lost()] == [str(file)]
    other.rename(f"{file}.1")
    assert [each.path for each in index_of(reader.stream).update_lost([])] == [f"{file}.1"]


def test_a_file_that_is_not_regular_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SourceError, match="not a regular file"):
        index_of().open(tmp_path / "fifo")
    with pytest.raises(SourceError, match="cannot be read"):
        index_of().open(tmp_path / "nothing")


def test_reserved_space_filled_line_by_line_is_not_reread(file: Path, reader: StreamReader, monkeypatch):
    """Of NULs that were written, not left out: the file system cannot tell where data are."""
    reserved_bytes = 30 * READ_BYTES
    file.write_bytes(bytes(reserved_bytes))
    read_bytes = 0
    pread = reader.content.pread

    def counted(length: int, offset: int) -> bytes:
        nonlocal read_bytes
        data = pread(length, offset)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(reader.content, "pread", counted)
    for at in range(5, 105, 5):
        with file.open("r+b") as out:
            out.seek(at - 5)
            out.write(b"line\n")
        chunk = reader.read(is_final=False)
        assert (chunk.data, chunk.end_offset) == (b"line\n", at)
        assert reader.read(is_final=False) is None
        assert reader.is_intact()
    assert reserved_bytes < read_bytes < 5 * reserved_bytes
    with file.open("r+b") as out:
        out.seek(20 * READ_BYTES)
        out.write(b"far\n")
    data = b""
    while chunk := reader.read(is_final=False):
        data += chunk.data
    assert data.lstrip(b"\0") == b"far\n"


class SettledMeanwhile(Content):
    """A file of which more is settled, on the event loop, between two reads of the thread that compares it."""

    def __init__(self, descriptor: int, stream: Stream, data: bytes) -> None:
        super().__init__(descriptor)
        self._stream, self._data = stream, data

    def pread(self, length: int, offset: int) -> bytes:
        found = super().pread(length, offset)
        self._stream.move_checkpoint(len(self._data), self._data[-3:])
        return found


def test_a_file_is_the_same_though_its_checkpoint_moves_while_it_is_compared(file: Path):
    data = b"".join(b"%d\n" % number for number in range(1000))
    file.write_bytes(data)
    stream = known(file, 500)
    content = SettledMeanwhile(os.open(file, os.O_RDONLY), stream, data)
    assert compare(content, stream) == "same"
    assert stream.checkpoint == len(data), "it moved"
    content.close()
