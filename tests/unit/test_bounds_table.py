"""
Each row of the table of bounds in `docs/security.md`: an input four times as long costs about four times as much.

What is counted is the lines of the package that run, its calls into C, and the bytes that a case says it has read. How
far a single match goes is proven of the patterns in `test_patterns.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count, product
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shipper
from shipper.codec.codec import Codec, find_repeats
from shipper.codec.rules import ANY_TIME, nests_deeply, repeats_key
from shipper.config.secrets import LiteralSecret
from shipper.config.settings import OAuth2Settings, RecordsSettings, load_settings
from shipper.delivery.answer import Answer
from shipper.delivery.connection import AnswerParser
from shipper.delivery.no_answer import HttpError
from shipper.delivery.oauth2 import OAuth2Source
from shipper.delivery.parts import halves
from shipper.delivery.tokens import NoTokenError
from shipper.delivery.verdicts import judge
from shipper.delivery.waits import requested_wait_s
from shipper.model.errors import ShipperError
from shipper.model.framing import LINES, BatchElements, CsvRows, Framing, csv_rows, sniff
from shipper.model.printable import printable, printable_json
from shipper.model.records import Batch, EncodedChunk, Span, Stream, consumer_id_of
from shipper.model.wire import BODY_HEAD, BODY_TAIL
from shipper.pipeline.batching import Batcher
from shipper.report.document import read_report
from shipper.report.exports import to_csv
from shipper.report.rows import ReportVersion, source_table
from shipper.sources.content import open_content
from shipper.sources.discovery import absolute, expand_glob
from shipper.sources.reader import READ_BYTES, InputForm, StreamReader
from shipper.sources.segments import form_of
from shipper.sources.siblings import looks_like_generation, sibling_of
from shipper.sources.stdin import SpoolFramer
from shipper.state.affiliates import affiliate_namer, are_identifiers
from shipper.state.letters import whole_number
from shipper.system.addresses import host_of
from tests.cases import each
from tests.unit.test_codec import chunk_of, pieces_of

PACKAGE = str(Path(shipper.__file__).parent)
TABLE = Path(__file__).parents[2] / "docs" / "security.md"
SIZE = 400  # bytes of the shorter input

NEW = count()

Run = Callable[[], object]
Case = Callable[[int], Run]


class Operations:
    """Counts the lines of the package that run while it is entered, and its calls of C functions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Operations:
        self._before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._note_call)
        sys.settrace(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])

    def _note(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self.count += event == "line"
        return self._note

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        self.count += event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE)


class Content:
    """A file in memory, up to an offset, that counts reads."""

    compression = ""
    descriptor = -1
    steps_left = float("inf")

    def __init__(self, data: bytes, end: int | None = None) -> None:
        self.data = data
        self.end = len(data) if end is None else end
        self.read_bytes = 0

    def pread(self, length: int, offset: int) -> bytes:
        found = self.data[offset : min(self.end, offset + length)]
        self.read_bytes += len(found)
        return found

    def size(self) -> int:
        return self.end

    def status(self) -> os.stat_result:
        raise AssertionError

    def is_ended(self) -> bool:
        return True

    is_intact = is_ended

    def close(self) -> None: ...


def of(read: Callable[[bytes], object], *pieces: bytes, begin: bytes = b"", end: bytes = b"") -> list[Case]:
    """Cases of an input that repeats one piece."""

    def case(piece: bytes) -> Case:
        return lambda size: lambda: read(begin + piece * ceil(size / len(piece)) + end)

    return [case(piece) for piece in pieces]


def framed(framing: Framing) -> Callable[[bytes], object]:
    return lambda data: (framing.cut(data, is_final=False), [*framing.frames(data, 0)])


def piped(form: InputForm, step: int = 16) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        framer = SpoolFramer(form, max_record_bytes=1 << 20)
        for start in range(0, len(data), step):
            framer.take(data[start : start + step])

    return read


def looked_at(form: InputForm, *, looks: int = 1) -> Callable[[bytes], int]:
    """Read a growing file, and return the number of bytes read."""

    def read(data: bytes) -> int:
        content = Content(data)
        stream = Stream(stream_id=1, kind="file", path="x")
        reader = StreamReader(content, stream, Path("x"), max_record_bytes=1 << 18, form=form)
        for look in range(1, looks + 1):
            content.end = len(data) * look // looks
            while reader.read(is_final=False) or reader.is_unfinished:
                pass
        return content.read_bytes

    return read


def encoded(framing: Framing = LINES, *, room_bytes: int = 1 << 20, **settings: Any) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        codec = Codec(RecordsSettings(**settings), max_record_bytes=1 << 18)
        chunk = chunk_of(data, start=1, framing=framing)
        room = {"room_events": 10_000, "room_bytes": room_bytes}
        deque(pieces_of(codec, chunk, **room, latest=ANY_TIME), maxlen=0)

    return read


def answered(status: int = 200) -> Callable[[bytes], object]:
    return lambda data: judge(Answer(status, "application/json", "", data), events=10)


def received(data: bytes) -> None:
    answer = AnswerParser()
    for start in range(0, len(data), 16):
        answer.feed(data[start : start + 16])


def token(data: bytes) -> None:
    """Let a token endpoint give this answer."""
    source = OAuth2Source(
        OAuth2Settings(token_url="https://login.example.com/token", client_id="x", client_secret=LiteralSecret("x")),
        key="intake.oauth2",
        post_form=None,  # type: ignore[arg-type]
        now=lambda: 0.0,
        wall_time=lambda: 0.0,
    )
    source._token(Answer(200, "application/json", "", data), 0.0, 0.0)


def event(**changes: object) -> bytes:
    """An event with some values replaced."""
    values = {**json.loads(EVENT), **changes}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def text(data: bytes) -> str:
    return data.decode("latin-1")


def of_values(fields: Iterable[str], *pieces: str) -> list[Case]:
    """Cases of an event with one long value."""

    def case(field: str, piece: str) -> Case:
        return lambda size: lambda: encoded()(event(**{field: piece * (size // len(piece))}))

    return [case(field, piece) for field, piece in product(fields, pieces)]


def deferred(size: int) -> Run:
    """Close a batch for which as many events of one consumer wait as one of them may hold."""
    events = size // 10
    batcher = Batcher(max_events=events, max_bytes=1 << 30, linger_s=1.0)
    stream = Stream(stream_id=1, kind="file", path="x")
    span = Span(stream=stream, start_offset=0, end_offset=9, tail=b"", read=events, unsettled=events)
    lines = b"\n".join(b'{"EventId":"%036d"}' % number for number in range(events))
    ids = {"consumer_ids": [1] * events, "has_new_event_ids": True, "repeats": find_repeats([1] * events, lines)}
    batcher.add(EncodedChunk(span=span, lines=lines, events=events, **ids), 0.0)
    return batcher.take


def halved(size: int) -> Run:
    """Split a batch until its last event is alone."""
    events = size // 10
    batch = Batch(number=1, body=BODY_HEAD + b",".join([EVENT] * events) + BODY_TAIL, events=events, parts=[])

    def run() -> None:
        left = batch
        while left.events > 1:
            left = halves(left)[-1]

    return run


def archived(members: Callable[[int], bytes]) -> Case:
    def prepare(size: int) -> Run:
        descriptor = os.memfd_create("archive")
        os.write(descriptor, members(size // 20))
        content = open_content(descriptor, Path("x.gz"))

        def run() -> None:
            content.pread(READ_BYTES, 0)
            content.close()

        return run

    return prepare


def overridden(data: bytes) -> None:
    load_settings(config_path="/dev/null", environ={}, overrides=[text(data)])


def reported(data: bytes) -> None:
    to_csv(source_table([ReportVersion(read_report(data, account_id=1).report)]))


EVENT = (
    b'{"EventId":"0f6f2a1f-7a55-4b3c-9d1e-2b7c8d9e0f11","IP":"203.0.113.7","Timestamp":"2026-01-02T03:04:05Z",'
    b'"BTag":"1_00112233445566778899aabbccddeeff","ConsumerID":7,"ConsumerCountry":"DE","ConsumerCurrencyID":"EUR",'
    b'"Username":"x","BrandID":1,"CustomerCurrencyID":"978","ConsumerStatus":"Verified","AffiliateID":"","ConsumerState":""}'
)
HEAD = b"HTTP/1.1 200 OK\r\n"
CSV = CsvRows(b"a,b,c\n", ",")
AUTO, ROWS, ARRAYS = InputForm("auto"), InputForm("csv"), InputForm("batch")
OPEN = (b"[", b"[ ", b"{", b'{"a":', b'"', b'"a', b'\\"', b"0", b"0 ", b"[0", b" ", b"}", b"]", b"{],", b"[],", b"{},")
STRAY = (b'a","\n', b'"\n', b'""\n', b'"a""\n', b'","\n', b'"a"b\n', b',"', b'""', b"\n", b",", b'x","y\n')
LINES_OF = (b"\n", b" \n", b"\0", b"\0\n", b"x\n", b"{}\n", b"[", b'{"a":', b'"', b'\\"', b"\r", b"\xff\n")
CASES: dict[str, list[Case]] = {
    "One look at a file": [
        case for form in (AUTO, ROWS, ARRAYS) for case in of(looked_at(form), *LINES_OF, b"[0", b'"\n')
    ],
    "A line without an end": of(looked_at(AUTO, looks=8), b"x", b" ", b'{"a":', begin=b"{}\n"),
    "Trailing NULs of a file": of(looked_at(AUTO, looks=8), b"\0", begin=b"{}\n"),
    "Lines": [*of(framed(LINES), *LINES_OF), *of(encoded(), b"\n", b" \n", b"\0", b"\0\n", b"\r")],
    "Rows of CSV": [*of(framed(CSV), *STRAY), *of(framed(CSV), *STRAY, begin=b'"\n', end=b'"x')],
    "A row of CSV that comes in pieces": of(piped(ROWS), *STRAY, begin=b'EventId,IP\n"'),
    "Elements of an array": [
        case for begin in (b"[", b"", b'{"events":[') for case in of(framed(BatchElements()), *OPEN, begin=begin)
    ],
    "An element that comes in pieces": [
        case for begin in (b"[", b"[[", b"[{} ", b'["') for case in of(piped(ARRAYS), *OPEN, begin=begin)
    ],
    "An element that a file does not end yet": of(looked_at(ARRAYS), *OPEN, begin=b"[["),
    "Format and header of an input": [
        *of(lambda data: sniff(data, is_whole=True), *LINES_OF, *STRAY, b"EventId,"),
        *of(lambda data: csv_rows(data, is_whole=True), b"a,", b",", b'"', b"a;", b"\t"),
        *of(piped(AUTO), *LINES_OF, begin=b"{"),
    ],
    "Nesting of a record": of(nests_deeply, *OPEN, b"\\"),
    "Columns of a batch": [
        *of_values(("Timestamp", "BTag", "IP", "EventId", "ConsumerID"), "0", "1.", "-"),
        *of_values(["Timestamp"], "T00:00:00.0", "2026-01-02T03:04:05.0", "+00:00"),
        *of_values(["Username"], "\\", "\n", "\x00"),
        *of(encoded(), EVENT.replace(b"05Z", b"05.000+00:00") + b"\n", EVENT.replace(b"0f6f", b"0F6F") + b"\n"),
        *of(encoded(mode="strict"), EVENT + b"\n"),
    ],
    "Separating good records from bad ones": [
        *of(encoded(), b"x\n", b"[]\n", EVENT + b"\nx\n", EVENT + b"\n" + EVENT.replace(b"203", b"999") + b"\n"),
        *of(encoded(CSV), b"1,2,3\n", b"1,2\n", b'"\n'),
    ],
    "Rewritten records that do not fit into a batch": of(
        encoded(room_bytes=2_000, unknown_fields="drop"), EVENT.replace(b'"ConsumerState":""', b'"Username":""') + b"\n"
    ),
    "Repeated keys": of(
        repeats_key, b'"a":1,', b'"a":{"a":1,"a":2},', b'"a":[{"b":1,"b":1}],', begin=b"{", end=b'"a":1}'
    ),
    "Records of one consumer, or one EventId": [deferred],
    "A refused batch": [halved],
    "Names in the state directory": of(lambda data: form_of(Path("/x", text(data)[:255])), b"1", b"1.", b"0.ndjson"),
    "Compressed files": [
        archived(lambda many: EMPTY_MEMBER * many),
        archived(lambda many: EMPTY_MEMBER + b"\0" * many),
    ],
    "Body of an answer": of(received, b"x", begin=HEAD + b"Content-Length: 99999\r\n\r\n"),
    "Framing of an answer: headers (also of 1xx answers), chunk sizes, trailers": [
        *of(received, b"X: 1\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\nA: b\r\n\r\n", b"X"),
        *of(received, b"1\r\nx\r\n", b"0", b"1;a=b\r\nx\r\n", begin=HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        *of(received, b"X: 1\r\n", begin=HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"),
    ],
    "Values in an answer": [
        case
        for status in (200, 207, 400)
        for case in of(answered(status), b"[", b"1,", b"{},", b'{"index":1},', b'"3",', b'{"a":', begin=b"[", end=b"1]")
    ],
    "Names in an answer": [
        *of(answered(), b"a", b"rejected", b"0", b"_", begin=b'{"', end=b'":1}'),
        lambda size: lambda: answered()(json.dumps({f"n{next(NEW)}": 1 for number in range(size // 10)}).encode()),
    ],
    "Texts in an answer": [
        case
        for begin, end in ((b'{"message":"', b'"}'), (b'[{"message":"', b'"}]'), (b'["', b'"]'), (b"", b""))
        for case in of(answered(), b"a b ", b"accepted 1 of 2 ", b"no ", b"0 0 ", begin=begin, end=end)
    ],
    "`Retry-After` and waits in words": [
        *of(lambda data: requested_wait_s(text(data), "", date="", wall_time=0.0), b"0", b"1.", b" ", b"Sun, ", b"1:"),
        *of(lambda data: requested_wait_s("", text(data), date="", wall_time=0.0), b"again ", b"retry 1:", b"wait  "),
        *of(lambda data: requested_wait_s("", text(data), date="", wall_time=0.0), b"0"),
        *of(lambda data: requested_wait_s("", "", date=text(data), wall_time=0.0), b"0 ", b"Sun, 1 Jan ", b"-"),
        *of(lambda data: requested_wait_s("", "", date=text(data), wall_time=0.0), b"(", b"+1 "),
    ],
    "Names of files": [
        *of(lambda data: looks_like_generation(text(data)[:255]), b"-1", b".1", b"-2026", b".gz", b"1", b"-1_1"),
        *of(lambda data: sibling_of(text(data)[:255], lambda _: True), b"-1", b".1", b"-2026", b".gz"),
    ],
    "Names and patterns on the command line": of(
        lambda data: [*expand_glob(absolute(text(data), "/"))], b"a", b"*", b"[", b"/"
    ),
    "`Host` of a request": of(lambda data: host_of(text(data)), b"a", b"a.", b"[", b"1:", b":"),
    "ConsumerID of a dead letter": [
        *of(consumer_id_of, b'"ConsumerID": ', b'"ConsumerID":"', b'"ConsumerID":1.', begin=b'{"ConsumerID":'),
        *of(consumer_id_of, b" ", b"0", begin=b'{"ConsumerID":'),
        *of(lambda data: whole_number("17").search(data), b"0", b"1", b"17", b"00 "),
    ],
    "AffiliateIDs in the ledger": of(
        lambda data: (are_identifiers([text(data)]), affiliate_namer(b"k" * 32)(text(data))), b"a", b".", b" ", b"\xff"
    ),
    "A token answer": [
        *of(token, *OPEN),
        *of(token, b"x", b"x.", b".", b"e30", b"=", begin=b'{"access_token":"', end=b'"}'),
        *of(token, b"0", b"9", begin=b'{"access_token":"x","expires_in":1', end=b"}"),
        *of(token, b"0", b"1.", begin=b'{"access_token":"x","expires_in":"', end=b'"}'),
        *of(token, b"a", b"_", begin=b'{"error":"', end=b'"}'),
    ],
    "A report": [
        *of(reported, *OPEN),
        *of(reported, b"0", begin=b'{"openingBalance":1', end=b"}"),
        *of(reported, b'{"id":1,"marketingSources":[]},', b"{},", b"[", begin=b'{"brands":[', end=b"{}]}"),
        *of(reported, b'"a":1,', b'"a":{},', begin=b"{", end=b'"b":1}'),
    ],
    "Text that is shown": [
        case
        for show in (printable, printable_json)
        for case in of(lambda data, show=show: show(text(data)), b"\x1b", b"a", b"\n")
    ],
    "Settings: files, environment, command line": [
        *of(overridden, b"a", b"a.", b"=", b"["),
        *of(overridden, b"a", b"info", b"[", b'"', begin=b"log.level="),
    ],
}
EMPTY_MEMBER = bytes.fromhex("1f8b080000000000000303000000000000000000")
BY_OPERATOR = {"Patterns of files"}  # which nobody else can write


def done(run: Run) -> object:
    # It may be no text, for a reader that is given nothing else.
    with suppress(ValueError, RecursionError, ShipperError, NoTokenError, HttpError):
        return run()
    return None


def operations(run: Run) -> int:
    with Operations() as operations:
        found = done(run)
    return operations.count + (found if type(found) is int else 0)


@pytest.mark.long
@each(("what", "prepare"), [(what, case) for what, cases in CASES.items() for case in cases])
def test_an_input_four_times_as_long_costs_about_four_times_as_much(what: str, prepare: Case):
    done(prepare(SIZE))  # what is made once, such as a cache
    few, many = (operations(prepare(SIZE * times)) for times in (1, 4))
    assert few > 0, "nothing is counted"
    assert many <= 5 * few + 500, f"{few}, then {many} operations"


def test_each_row_of_the_table_has_cases_that_grow():
    table = TABLE.read_text().partition("\n| What | Where | Bound |\n")[2]
    rows = re.findall(r"^\| (.+?) \| `", table, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 30
    assert set(rows) == CASES.keys() | BY_OPERATOR
