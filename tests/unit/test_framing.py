"""Framing: cuts do not change the records, no partial record is returned, and any delimiter survives a crash."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.config.settings import SpoolSettings, load_settings
from shipper.model.errors import ConfigError, SourceError
from shipper.model.framing import LINES, WIRE_COLUMNS, BatchElements, CsvRows, ElementScan, Framing, csv_rows, sniff
from shipper.sources.reader import InputForm
from shipper.sources.segments import Segments, form_of
from shipper.sources.stdin import SpoolFramer
from tests.cases import each

BATCH = BatchElements()
CSV = CsvRows(b"a,b,c\n", ",")


def records(framing: Framing, data: bytes) -> list[bytes]:
    return [data[frame.start : frame.end] for frame in framing.frames(data, 0)]


def in_two(framing: Framing, data: bytes, at: int) -> list[bytes]:
    """Read what had been written by some moment, then the rest."""
    cut = framing.cut(data[:at], is_final=False)
    return records(framing, data[:cut]) + records(framing, data[cut:])


def assert_cuts_do_not_matter(framing: Framing, data: bytes) -> None:
    whole = records(framing, data)
    for at in range(len(data) + 1):
        parts = in_two(framing, data, at)
        assert [part for part in parts if part] == [record for record in whole if record], at


@each(
    ("data", "expected"),
    [
        (b'[{"a":1},{"b":[{}]}]', [b'{"a":1}', b'{"b":[{}]}']),
        (b'{"EventType":"Acquisition","events":[{"a":"]}"}\n, {"b":"\\""} ]}\n', [b'{"a":"]}"}', b'{"b":"\\""}']),
        (b'{"events":[{"a":1}],"EventType":"Acquisition"}', [b'{"a":1}']),
        (b'[]\n{"events":[]}[{"a":1}]', [b'{"a":1}']),
        (b'[1,"x,]",null,{"a":1},[2]]', [b"1", b'"x,]"', b"null", b'{"a":1}', b"[2]"]),
        (b'[{"a":1},{"b":', [b'{"a":1}', b'{"b":']),
        (b'{"EventType":"Deposit","events":[{"a":1}]}', [b'{"EventType":"Deposit","events":[{"a":1}]}']),
        (b"", []),
        (b" \n", []),
    ],
)
def test_elements_of_batches(data: bytes, expected: list[bytes]):
    assert records(BATCH, data) == expected


@each(
    ("data", "expected"),
    [
        (b"1,2,3\n4,5,6\n", [b"1,2,3", b"4,5,6"]),
        (b"1,2,3\r\n4,5,6", [b"1,2,3\r", b"4,5,6"]),
        (b'1,"2\n2","3 ""q"""\n4,5,6\n', [b'1,"2\n2","3 ""q"""', b"4,5,6"]),
        (b'1,5" pipe,3\n4,5,6\n', [b'1,5" pipe,3', b"4,5,6"]),
        (b'1,"open,3\n4,5,6\n', [b'1,"open,3', b"4,5,6"]),
        (b'1,"a"b,3\n4,5,6\n', [b'1,"a"b,3', b"4,5,6"]),
        (b"\n\n1,2,3\n", [b"", b"", b"1,2,3"]),
    ],
)
def test_rows_of_csv(data: bytes, expected: list[bytes]):
    assert records(CSV, data) == expected


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest_of_a_file():
    data = b'1,"open,3\n' + b"4,5,6\n" * 60_000
    assert CSV.cut(data[:100_000], is_final=False) == 0
    assert CSV.cut(data, is_final=False) == len(data)
    assert len(records(CSV, data)) == 60_001


_cells = st.text(st.sampled_from('ab",\n; é'), max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(_cells, _cells, _cells), min_size=1, max_size=5))
def test_rows_of_a_csv_writer_are_read_wherever_they_are_cut(rows: Sequence[tuple[str, ...]]):
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    data = out.getvalue().encode()
    found = [next(csv.reader([record.decode()], strict=True), []) for record in records(CSV, data)]
    assert found == [list(row) for row in rows]
    assert_cuts_do_not_matter(CSV, data)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}[],: \n'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab}", max_size=2), inner, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(st.text("ab{", min_size=1, max_size=2), _values, min_size=1, max_size=3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(_objects, max_size=3), min_size=1, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_events_of_batches_are_read_wherever_the_file_is_cut(
    batches: list[list[dict]], indent: int | None, has_envelope: bool
):
    texts = [
        json.dumps({"EventType": "Acquisition", "events": batch} if has_envelope else batch, indent=indent)
        for batch in batches
    ]
    data = "\n".join(texts).encode()
    assert [json.loads(record) for record in records(BATCH, data)] == [event for batch in batches for event in batch]
    assert_cuts_do_not_matter(BATCH, data)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60) | st.text(st.sampled_from('{}[]",\n\\a1: '), max_size=60).map(str.encode))
def test_no_bytes_are_lost_or_block_a_framing(data: bytes):
    for framing in (LINES, CSV, BATCH):
        frames = list(framing.frames(data, 0))
        assert all(a.end <= b.start for a, b in pairwise(frames))
        assert all(frame.start <= frame.end <= frame.cut <= len(data) for frame in frames)
        assert 0 <= framing.cut(data, is_final=False) <= framing.cut(data, is_final=True) == len(data)


def envelope_of(*numbers: int) -> bytes:
    return b'{"EventType":"Acquisition","events":[%b]}\n' % b",".join(map(element_of, numbers))


def element_of(number: int) -> bytes:
    return b'{"EventId":"%d","IP":"a\\"b"}' % number


def scanned(data: bytes, step: int) -> list[bytes]:
    scan, pending, found = ElementScan(), bytearray(), list[bytes]()
    for start in range(0, len(data), step):
        pending += data[start : start + step]
        found += [bytes(pending[frame.start : frame.end]) for frame in scan.frames(pending, is_final=False)]
        del pending[: scan.consume()]
    return found + [bytes(pending[frame.start : frame.end]) for frame in scan.frames(pending, is_final=True)]


@pytest.mark.parametrize("before", [b"", envelope_of(1)])
def test_an_envelope_torn_anywhere_costs_no_element_of_the_next_envelopes(before: bytes):
    torn, between = envelope_of(2, 3), {len(envelope_of()) - 3, len(envelope_of(2)) - 2}
    for length in range(len(torn)):
        data = before + torn[:length] + b"\n" + envelope_of(4, 5) + envelope_of(6)
        found = records(BATCH, data)
        # After a comma or an opening bracket, the next line may be an element.
        wanted = [6] if length in between else [4, 5, 6]
        assert found[-len(wanted) :] == [*map(element_of, wanted)], torn[:length]
        assert found == scanned(data, 1) == scanned(data, 7)
        assert BATCH.cut(data, is_final=False) == data.rfind(b"]")


def test_other_lines_between_arrays_are_elements():
    lines = [b"INFO started", b'{"EventId":"7"}', b'{"EventType":"Other","events":[{}]}']
    data = envelope_of(1) + b"".join(line + b"\n" + envelope_of(2) for line in lines)
    found = records(BATCH, data)
    assert found == [element_of(1), *(text for line in lines for text in (line, element_of(2)))]
    assert found == scanned(data, 1)


NO_HEADERS = [
    *("[INFO] started\n", "[2026-11-01 10:00:00] started\n", "2026-11-01 10:00:00, INFO, Brand, ok\n", "not json\n"),
    *("straße,größe\n", "Hello, IP\n", "Export started, please wait\n", "IP, \n", "IP,IP\n", "a,a\n", "1,2,3\n"),
    *("a,,c\n", '"EventId":"x","IP":"192.0.2.1"}\n'),
]


@each(
    ("head", "is_whole", "expected"),
    [
        *((head, False, None) for head in (b"", b"\0\0", b'{"EventId":"x"', b'{"EventType":"Acquisition",\n', b" \n[")),
        (b"EventId,IP", False, None),
        *((head, True, "ndjson") for head in (b"", b'{"EventId":"x"}', b'{"EventType":"Acquisition",\n')),
        *((head, False, "ndjson") for head in (b'{"EventId":"x"}\n', b'\xef\xbb\xbf{"EventId":1}\n')),
        (b'{"EventType":"Acquisition",\n"EventId":1', False, "ndjson"),
        (b'{"EventType":"Acquisition","events":[', False, "batch"),
        *((b"[ \n", True, "batch"), (b"[ \n{", False, "batch"), (b"[]", False, "batch")),
        *((b"EventId,IP\n", False, "csv"), (b'"EVENTID";"ip";;""\r\n', False, "csv")),
        *(("straße,IP,Username,größe\n".encode(), False, "csv"), (b"IP,IP,Username\n", False, "csv")),
        *((head.encode(), False, "ndjson") for head in NO_HEADERS),
        *((head, False, "ndjson") for head in (b"[" + b" " * 65_536, b"\xff\xfe\0{\n")),
    ],
)
def test_the_format_is_detected_from_the_first_bytes(head: bytes, is_whole: bool, expected: str | None):
    assert sniff(head, is_whole=is_whole) == expected


def test_a_header_is_recognised_by_known_columns():
    columns = {"straße".casefold(), "größe".casefold()}
    assert sniff("Straße,Größe\n".encode(), is_whole=False, columns=columns) == "csv"
    assert sniff("Straße^Größe\n".encode(), is_whole=False, columns=columns, delimiter="^") == "csv"
    assert sniff(b"EventId,IP\n", is_whole=False, columns=columns) == "ndjson"


@each(
    ("header", "repeated"),
    [(b"a,b,a\n", (1, 3)), (b"a,,b,\n", None), (b"a, b ,c,b\n", (2, 4)), (b"a,A\n", None), (b"\n", None)],
)
def test_two_columns_of_one_name_are_found(header: bytes, repeated: tuple[int, int] | None):
    assert CsvRows(header, ",").repeated == repeated


@each(
    ("data", "start"),
    [
        (b"1,2,3\nb,a,c\n", 6),
        (b'\xef\xbb\xbf"b", c ,a\r\n', 0),
        (b"c,b,a", 0),
        (b"a,b,c\n1,c,a\nc,a\nb,a,c,d\n", -1),
    ],
)
def test_a_header_in_another_order_is_found(data: bytes, start: int):
    assert CSV.find_other_header(data) == start


@each(
    ("line", "is_header"),
    [
        (b"EventId,IP,ConsumerCurrencyID", True),
        (b"click,IP,ConsumerCurrencyID", True),
        (b"CustomerID,ip,Username", True),
        (b"EventId", False),
        (b"CLICK,ip,CustomerID", False),  # the columns are the same
        (b"click,note,CustomerID", False),
        (b"click,4,CustomerID", False),
    ],
)
def test_a_header_with_other_known_columns_is_found(line: bytes, is_header: bool):
    rows = CsvRows(b"click,IP,CustomerID\n", ",")
    known = WIRE_COLUMNS | {"click", "customerid"}
    assert rows.find_other_header(b"1,2,3\n" + line + b"\n4,5,6\n", known) == (6 if is_header else -1)


@each("cut", range(1, 40))
def test_another_header_is_found_wherever_a_pipe_tears_it(cut: int):
    data = b"EventId,IP,Username\n1,2,3\nUsername,EventId,IP\n4,5,6\n"
    framer = SpoolFramer(InputForm("csv"), max_record_bytes=1 << 20)
    taken = framer.take(data[:cut]) + framer.take(data[cut:])
    assert b"4,5,6" not in taken
    with pytest.raises(SourceError, match="is a header with other columns or in another order"):
        framer.take(b"", is_final=True)


@each(
    ("head", "delimiter", "names"),
    [
        (b"a,b\n1,2\n", "", ["a", "b"]),
        (b"a;b,c;d\n", "", ["a", "b,c", "d"]),
        (b"a\tb\r\n", "", ["a", "b"]),
        (b"a|b\n", "", ["a", "b"]),
        (b"a;b,c\n", ",", ["a;b", "c"]),
        (b'\xef\xbb\xbf"a b", c \n', "", ["a b", "c"]),
        (b"only\n", "", ["only"]),
        (b"\na,b\n", "", ["a", "b"]),
        (b"\xef\xbb\xbf \r\n\t\n\na;b\r\n", "", ["a", "b"]),
    ],
)
def test_columns_and_delimiter_are_read_from_the_header(head: bytes, delimiter: str, names: list[str]):
    rows = csv_rows(head, is_whole=False, delimiter=delimiter)
    assert rows.names == names
    assert head.startswith(rows.header)
    assert rows.header.splitlines()[-1].strip(b"\xef\xbb\xbf")
    assert head.removeprefix(rows.header) in (b"", b"1,2\n", b"c;d\n"), "the rows follow"


def test_an_incomplete_header_is_waited_for():
    for head in (b"a,b", b"\n\n", b"\na,b"):
        assert csv_rows(head, is_whole=False) is None
    assert csv_rows(b"a,b", is_whole=True).names == ["a", "b"]


def test_unpickled_lines_are_the_same_object():
    assert pickle.loads(pickle.dumps(LINES)) is LINES


# Spooled rows ---------------------------------------------------------------------------------------------------------


def _segments(directory: Path) -> Segments:
    settings = SpoolSettings(segment_bytes=1000, fsync="never")
    return Segments(directory, settings, known=[], next_stream_id=count(1).__next__, forget=lambda _: None)


def test_every_delimiter_is_refused_by_its_key_or_survives_a_crash(tmp_path: Path):
    kept: list[str] = []
    refusals: set[str] = set()
    for number in [*range(0x101), 0x2028, 0x20AC, 0x1F600]:
        delimiter = chr(number)
        try:
            settings = load_settings(config_path=None, environ={}, flags={"input.csv_delimiter": delimiter})
        except ConfigError as error:
            refusals.add(error.key)
            continue
        directory = tmp_path / str(number)
        segments = _segments(directory)
        segments.header, segments.delimiter = f"IP{delimiter}BTag\n".encode(), settings.input.csv_delimiter
        segments.append(f"1{delimiter}2\n".encode())
        segments.close()
        (found,) = _segments(directory)
        form = form_of(found.path)
        assert (form.format, form.csv_delimiter) == ("csv", delimiter)
        kept.append(delimiter)
    assert refusals == {"input.csv_delimiter"}
    assert {",", ";", "\t", "|", " ", "#"} <= set(kept)


def test_a_file_with_a_foreign_name_is_no_segment(tmp_path: Path):
    for name in ("1.ff.csv", "1.c2a7.csv", "1.2.csv", "\u0661.ndjson", "1\u0662.ndjson", "1.ndjson.bak", "1.2C.csv"):
        (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    assert len(_segments(tmp_path)) == 0
    assert len(list(tmp_path.iterdir())) == 7
