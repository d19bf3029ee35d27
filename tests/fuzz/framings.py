"""Framings: cuts do not change the records, and CSV rows are read as by the csv module."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from shipper.codec.documents import holds_rows, read_rows
from shipper.model.framing import LINES, BatchElements, CsvRows, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from shipper.sources.content import Compression, compression_of, is_partial_magic
from shipper.sources.reader import InputForm, StreamReader
from shipper.sources.stdin import SpoolFramer
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator
from tests.fuzz.oracle import BLANKS

_BOM: Final = b"\xef\xbb\xbf"
_DECODER: Final = json.JSONDecoder()
_WHITE: Final = re.compile(r"[ \t\r\n\0]*")
_FORMS: Final = [
    InputForm("auto", columns=frozenset({"name", "other"})),
    InputForm("ndjson"),
    InputForm("csv"),
    InputForm("batch"),
    InputForm("csv", ";"),
]


class Growing:
    """
    Content that is written up to an offset.

    Args:
        reserved_bytes: Size reserved by the writer; it is filled with data and does not grow.
    """

    compression: Compression = ""
    descriptor = -1

    def __init__(self, data: bytes, reserved_bytes: int = 0) -> None:
        self._data = data
        self._size = len(data) + reserved_bytes if reserved_bytes else 0
        self.end = 0

    def pread(self, length: int, offset: int) -> bytes:
        return self._data[: self.end].ljust(self._size, b"\0")[offset : offset + length]

    def size(self) -> int:
        return max(self.end, self._size)

    def status(self) -> os.stat_result:
        raise AssertionError

    def is_ended(self) -> bool:
        return True

    def is_intact(self) -> bool:
        return True

    def close(self) -> None: ...


def records_of(data: bytes, framing: Framing, *, is_first: bool, end: int | None = None) -> Iterator[bytes]:
    """Yield the records of a chunk that end before `end`, without whitespace, header and BOM."""
    start = 0
    if is_first:
        start = len(framing.header) if isinstance(framing, CsvRows) else len(_BOM) * data.startswith(_BOM)
    for frame in framing.frames(data, start):
        if end is not None and frame.end >= end:
            break
        record = data[frame.start : frame.end].strip(BLANKS)
        if record:
            yield record


def _cuts(data: bytes, seed: int) -> list[int]:
    """Return some or all offsets, including the end; they depend only on the seed."""
    if seed % 4 == 0 and len(data) < 100:
        return list(range(1, len(data) + 1))
    rng = Random(seed)
    return sorted({int(rng.random() * (len(data) + 1)) for _ in range(1 + seed % 5)} | {len(data)})


def check_framing(data: bytes) -> object:
    """Check that a growing file and a pipe yield the records of the complete input, wherever they are cut."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0"
    form = _FORMS[head[0] % len(_FORMS)]
    if compression_of(body) or is_partial_magic(body) or not body.strip(BLANKS):
        return "no text"
    if body.lstrip(BLANKS).startswith(_BOM) and not body.startswith(_BOM):
        return "a BOM after blanks"  # a pipe recognises it, because it ignores blanks before the input
    cuts = _cuts(body, head[1])
    whole = form.framing_of(body, is_whole=True)
    assert whole is not None
    if isinstance(whole, CsvRows) and _sound_csv_bytes(whole.header, whole, 0) <= len(whole.header):
        return "an invalid header or one of several lines"  # not recognised as a header
    if isinstance(whole, CsvRows) and (
        whole.repeated or whole.is_unreadable or whole.find_other_header(body, form.columns) >= 0
    ):
        return "a header that is refused"
    wanted = list(records_of(body, whole, is_first=True))
    chunks = _read_growing(body, form, cuts, reserved_bytes=head[1] % 3)
    assert [chunk.start_offset for chunk in chunks] == [0, *(chunk.end_offset for chunk in chunks)][: len(chunks)]
    assert not chunks or chunks[-1].end_offset == len(body.rstrip(b"\0")), "data is left unread"
    found = [
        record
        for chunk in chunks
        for record in records_of(chunk.data, chunk.stream.framing, is_first=not chunk.start_offset)
    ]
    piped = _read_piped(body, form, cuts)
    sound_bytes = len(body) + 1
    if isinstance(whole, BatchElements):
        sound_bytes = _sound_json_bytes(body)
        wanted = [_on_one_line(record) for record in wanted]
        found = [_on_one_line(record) for record in found]
    elif isinstance(whole, CsvRows):
        sound_bytes = _sound_csv_bytes(body, whole, len(whole.header))
    # After invalid data, the end of a record is undefined.
    count = len(list(records_of(body, whole, is_first=True, end=sound_bytes)))
    assert found[:count] == wanted[:count], "a growing file yields other records than a complete one"
    assert piped[:count] == wanted[:count], "a pipe yields other records than a file"
    return whole.format, form.format, min(len(wanted), 40), min(len(chunks), 10)


def _on_one_line(record: bytes) -> bytes:
    return record.replace(b"\n", b"\r").strip(BLANKS)


def _sound_json_bytes(body: bytes) -> int:
    """Return the length of the leading valid JSON values; more than the length of the data if all are valid."""
    skipped = len(_BOM) if body.startswith(_BOM) else 0
    text = body[skipped:].decode("utf-8", "surrogateescape")
    at = 0
    try:
        while (at := _WHITE.match(text, at).end()) < len(text):
            _, at = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return skipped + len(text[: error.pos].encode("utf-8", "surrogateescape"))
    except RecursionError:
        return 0
    return len(body) + 1


def _sound_csv_bytes(body: bytes, rows: CsvRows, at: int) -> int:
    """Return the length of the leading rows valid by RFC 4180, quotes only in quoted values; otherwise as for JSON."""
    mark = re.escape(rows.delimiter.encode())
    value = rb'(?:"[^"]*(?:""[^"]*)*"|[^"\n%b]*)' % mark
    row = re.compile(rb"%b(?:%b%b)*\r?(?:\n|$)" % (value, mark, value))
    while at < len(body):
        found = row.match(body, at)
        if found is None:
            return at
        at = found.end()
    return len(body) + 1


def _read_growing(body: bytes, form: InputForm, cuts: list[int], *, reserved_bytes: int) -> list[Chunk]:
    content = Growing(body, reserved_bytes)
    reader = StreamReader(
        content, Stream(stream_id=1, kind="file", path="x"), Path("x"), max_record_bytes=1 << 20, form=form
    )
    chunks = []
    for content.end in cuts:
        assert reader.is_intact()
        while chunk := reader.read(is_final=content.end == len(body)):
            assert chunk.end_offset > chunk.start_offset
            chunks.append(chunk)
    return chunks


def _read_piped(body: bytes, form: InputForm, cuts: list[int]) -> list[bytes]:
    framer = SpoolFramer(form, max_record_bytes=1 << 20)
    kept = b""
    for start, end in zip([0, *cuts], cuts, strict=False):
        kept += framer.take(body[start:end], is_final=end == len(body))
        if framer.header:
            assert framer.header + kept == body[:end], "rows read from a pipe are only in memory"
            whole = len(kept) - framer.open_bytes
            rows = CsvRows(framer.header, framer.delimiter)
            if end == len(body):
                assert whole == len(kept), "the end of the input does not end the last row"
            elif _sound_csv_bytes(kept, rows, 0) > len(kept):
                assert rows.cut(kept[:whole], is_final=False) == whole, "complete data ends within a row"
    framing = CsvRows(framer.header, framer.delimiter) if framer.header else LINES
    return list(records_of(framer.header + kept, framing, is_first=True))


def check_rows(data: bytes) -> object:
    """Check that rows written by the csv module are read back unchanged, wherever they are cut."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0\0"
    mark = ",;\t|"[head[0] % 4]
    table = [[cell.decode("utf-8", "replace") for cell in row.split(b"\x1f")] for row in body.split(b"\x1e")]
    table = [row[:12] for row in table[:20]]  # larger tables are slow and show nothing new
    width = len(table[0])
    names = [f"c{index}" for index in range(width)]
    table = [(row + [""] * width)[:width] for row in table]
    if not head[1] % 2:  # the module writes these unquoted and cannot read them back
        table = [[cell.replace("\r", "") for cell in row] for row in table]
    out = io.StringIO()
    writer = csv.writer(
        out,
        delimiter=mark,
        quoting=(csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[head[1] % 2],
        lineterminator=("\n", "\r\n")[head[1] // 2 % 2],
    )
    writer.writerows([names, *table])
    written = out.getvalue().encode()
    rows = csv_rows(written, is_whole=True, delimiter=mark)
    assert rows is not None
    raws = []
    start = 0
    for end in _cuts(written, head[2]):
        cut = rows.cut(written[start:end], is_final=end == len(written))
        raws += [written[start:][frame.start : frame.end] for frame in rows.frames(written[start : start + cut], 0)]
        start += cut
    assert start == len(written)
    if not any(holds_rows(cell, rows) for row in table for cell in row):
        assert read_rows(raws[1:], rows) == ([dict(zip(names, row, strict=True)) for row in table], {})
    return width, len(table), head[1] % 4, any(chr(34) in cell for row in table for cell in row)


def check_odd_rows(data: bytes) -> object:
    """Check that each row gets the verdict of the csv module, independent of its neighbours."""
    header, _, body = data.partition(b"\n")
    rows = csv_rows(header + b"\n", is_whole=True)
    assert rows is not None
    raws = [body[frame.start : frame.end] for frame in rows.frames(body, 0)]
    assert b"".join(raws).replace(b"\n", b"") == body.replace(b"\n", b""), "bytes belong to no row or to two rows"
    raws = [raw for raw in raws if raw.strip(BLANKS)]
    documents, faults = read_rows(raws, rows)
    assert len(documents) + len(faults) == len(raws)
    if rows.repeated:
        assert {rule for rule, _ in faults.values()} <= {"csv"}

        return "a repeated column"
    verdicts = []
    readable = iter(documents)
    for index, raw in enumerate(raws):
        row = None if index in faults else next(readable)
        verdicts.append(faults[index][0] if index in faults else "")
        try:
            (alone,) = csv.reader([raw.decode()], delimiter=rows.delimiter, strict=True)
        except UnicodeDecodeError:
            assert verdicts[-1] == "encoding"
        except (csv.Error, ValueError):
            assert verdicts[-1] == "csv"
        else:
            is_row = len(alone) == len(rows.names) and not any(holds_rows(cell, rows) for cell in alone)
            assert row == dict(zip(rows.names, alone, strict=True)) if is_row else verdicts[-1] == "csv"
    return len(rows.names), "".join(sorted(set(verdicts))), min(len(raws), 20)


_OBJECTS: Final = (b'{"a":1}', b'{"a":"x\\"y"}', b'{"a":{"b":[1,2]}}', b'{"a":"]"}', b"17", b'"s"', b"[1]", b"null")
TEXTS: Final = (
    b"\n".join(_OBJECTS), b"\n\n".join(_OBJECTS) + b"\n", b"\r\n".join(_OBJECTS), b"[" + b",".join(_OBJECTS) + b"]",
    b"[\n  " + b",\n  ".join(_OBJECTS) + b"\n]\n",
    b'{"EventType":"Acquisition","events":[' + b",".join(_OBJECTS) + b"]}",
    b'{"events":[{"a":1}],"EventType":"Acquisition"}{"EventType":"Acquisition","events":[{"a":2}]}', b"[{}][{}]\n[{}]",
    b'{\n  "EventType": "Acquisition",\n  "events": [\n    {"a": 1},\n    {"a": 2}\n  ]\n}\n',
    _BOM + b'{"a":1}\n{"a":2}',
    b'name,other\n1,2\n"a\nb",3\n"x""y","z"\n', b"name;other\r\n1;2\r\n", _BOM + b'name,other\n1,"2"\n', b'{"a":\n1}\n',
    b"\0\0\0" + b'{"a":1}\n', b"name,other\n1,\"2\n3,4\n", b'name,other\na"b,"c\nd"e,"f"\n', b"name\tother\n\t\n",
)  # fmt: skip
WORDS: Final = [
    *(b'"', b'""', b'"\n"', b",", b";", b"\r\n", b"\n", b"\r", b"\t", b"\0", b"[", b"]", b"{", b"}", b"\\", b'\\"'),
    b"],[",
    *(b'{"EventType":"Acquisition","events":[', b'"EventType":"Acquisition"', b"]}", _BOM, b"\xff", b"a,b\n", b"\n\n"),
    b" ",
    *(b'"a\nb"', b"\x1e", b"\x1f", b'x"y', b'"x"y'),
]

TARGETS: Final = (
    Target(
        "framing",
        check_framing,
        [bytes((form, number * 3)) + b"\n" + text for form in range(len(_FORMS)) for number, text in enumerate(TEXTS)],
        mutator(words=WORDS),
        share=4,
    ),
    Target(
        "rows",
        check_rows,
        [bytes((number, number, number)) + b'\na\x1fb\x1ec,d\x1f"e\x1e\n\x1f\r\x1e;\x1f |\t' for number in range(12)],
        mutator(words=WORDS),
        share=1.5,
    ),
    Target(
        "odd-rows",
        check_odd_rows,
        [text for text in TEXTS if text.startswith(b"name")],
        mutator(words=WORDS),
        share=7,
    ),
)
