"""Search for inputs whose cost is not proportional to their size: a prefix, a repeated piece, and a suffix."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from decimal import Decimal
from typing import Any, Final, cast
from zlib import crc32

from msgspec.structs import replace

from shipper.codec.codec import Codec
from shipper.codec.rules import ANY_TIME, nests_deeply, repeats_key
from shipper.config.secrets import LiteralSecret
from shipper.config.settings import OAuth2Settings, RecordsSettings, load_settings
from shipper.delivery.answer import Answer
from shipper.delivery.connection import AnswerParser
from shipper.delivery.no_answer import HttpError
from shipper.delivery.oauth2 import OAuth2Source
from shipper.delivery.tokens import NoTokenError
from shipper.delivery.verdicts import judge
from shipper.delivery.waits import requested_wait_s
from shipper.model import wire
from shipper.model.errors import ShipperError
from shipper.model.framing import LINES, BatchElements, CsvRows, Framing, sniff
from shipper.model.printable import printable
from shipper.model.records import Chunk, Stream, consumer_id_of
from shipper.report.checks import check_report
from shipper.report.document import read_report
from shipper.report.exports import to_csv
from shipper.report.ranges import DateRange
from shipper.report.rows import ReportVersion, source_table
from shipper.sources.reader import InputForm
from shipper.sources.siblings import looks_like_generation
from shipper.sources.stdin import SpoolFramer
from shipper.system.addresses import host_of
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator
from tests.report_documents import report

# Each input is tried in one or two small sizes. Two large sizes follow if the cost grows too fast, if it exceeds that
# of all previous inputs, and for a small sample of the others.
_SMALL: Final = (32, 128)
_SIZES: Final = (4_096, 16_384)
_ONE_OF: Final = 16_384
_MORE_EXPENSIVE: Final = 1.2
_SUSPICIOUS_TIMES: Final = 6
_SPARE_S: Final = 30e-6
_MOST_TIMES: Final = 10  # linear growth costs four times as much, quadratic growth sixteen times
_NOTICED_S: Final = 0.05
_TRIES: Final = 4
_PIECES_OF_PIPE: Final = 64
_NAME_BYTES: Final = 255


def _framed(framing: Framing, data: bytes) -> None:
    for _ in framing.frames(data[: framing.cut(data, is_final=False)], 0):
        pass
    for _ in framing.frames(data, 0):
        pass


def _piped(data: bytes, form: InputForm) -> None:
    framer = SpoolFramer(form, max_record_bytes=1 << 20)
    step = max(1, len(data) // _PIECES_OF_PIPE) if len(data) < _SIZES[0] else _PIECES_OF_PIPE
    for start in range(0, len(data), step):
        framer.take(data[start : start + step])


def _encoded(data: bytes, framing: Framing, codec: Codec) -> None:
    chunk = Chunk(
        stream=Stream(stream_id=1, kind="file", path="x", framing=framing),
        start_offset=1,
        end_offset=1 + len(data),
        data=data,
    )
    offset = chunk.start_offset
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=100, room_bytes=1 << 20, latest=ANY_TIME)
        assert piece is not None, "a single record does not fit"
        offset = piece.span.end_offset


_codecs: Final = [
    Codec(settings, max_record_bytes=1 << 18)
    for settings in (
        RecordsSettings(),
        RecordsSettings(unknown_fields="keep"),
        RecordsSettings(mode="strict", unknown_fields="reject"),
        RecordsSettings(event_id="derive"),
    )
]


def _answered(data: bytes, status: int) -> None:
    judge(Answer(status, "application/json", "", data), events=100)


def _received(data: bytes) -> None:
    """Read an answer in small pieces."""
    answer = AnswerParser()
    for start in range(0, len(data), _PIECES_OF_PIPE):
        answer.feed(data[start : start + _PIECES_OF_PIPE])


_source: Final = OAuth2Source(
    OAuth2Settings(token_url="https://login.example.com/token", client_id="x", client_secret=LiteralSecret("x")),
    key="intake.oauth2",
    post_form=lambda _url, _form: cast("Any", None),
    now=lambda: 1_000.0,
    wall_time=lambda: 1_700_000_000.0,
)


def _token(data: bytes, status: int = 200) -> None:
    answer = Answer(status, "application/json", data[:60].decode("latin-1"), data, date=data[:100].decode("latin-1"))
    _source._token(answer, 1_000.0, 1_700_000_000.0)


def _reported(data: bytes) -> None:
    fetched = read_report(data, account_id=1001)
    days = DateRange(date(2026, 1, 1), date(2026, 1, 31))
    check_report(fetched.report, requested=days)
    to_csv(source_table([ReportVersion(fetched.report)]))


def _configured(overrides: list[str]) -> None:
    load_settings(config_path="/dev/null", environ={}, overrides=overrides)


_DOCUMENT: Final = wire.encode_report(replace(report(), opening_balance=Decimal(4711)))
_CSV: Final = CsvRows(b"a,b,c\n", ",")
_EVENTS: Final = CsvRows(b"EventId,IP,Timestamp,BTag,ConsumerID\n", ",")
_KEY: Final = "input.include"
_READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    lambda data: _framed(_CSV, data),
    lambda data: _framed(BatchElements(), data),
    lambda data: _piped(b"EventId,IP\n" + data, InputForm("csv")),
    lambda data: _piped(data, InputForm("auto")),
    lambda data: _encoded(data, LINES, _codecs[0]),
    lambda data: _encoded(data, _CSV, _codecs[0]),
    nests_deeply,
    lambda data: sniff(data, is_whole=True),
    lambda data: _answered(data, 200),
    lambda data: _answered(data, 400),
    lambda data: _answered(b'{"message":"%b"}' % data, 200),
    lambda data: requested_wait_s("", data.decode("latin-1"), date=data[:100].decode("latin-1"), wall_time=0.0),
    lambda data: looks_like_generation(data[:_NAME_BYTES].decode("latin-1")),
    lambda data: host_of(data.decode("latin-1")),
    consumer_id_of,
    repeats_key,
    lambda data: _piped(data, InputForm("batch")),
    lambda data: _encoded(data, BatchElements(), _codecs[1]),
    lambda data: _encoded(data, LINES, _codecs[2]),
    lambda data: _encoded(data, _EVENTS, _codecs[3]),
    _received,
    lambda data: _received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data),
    _token,
    lambda data: _token(data, 400),
    lambda data: _token(b'{"access_token":"' + data + b'"}'),
    lambda data: _token(b'{"access_token":"x","expires_in":' + data + b"}"),
    lambda data: requested_wait_s(data.decode("latin-1"), "", date="", wall_time=0.0),
    lambda data: _reported(data),
    lambda data: _reported(_DOCUMENT.replace(b"4711", data)),
    lambda data: _reported(_DOCUMENT.replace(b"Example Operator", data)),
    lambda data: _reported(_DOCUMENT.replace(b"[]", b"[" + data + b"]")),
    lambda data: printable(data.decode("utf-8", "surrogateescape")),
    lambda data: _configured([f"{_KEY}={data.decode('latin-1')}"]),
    lambda data: _configured([f"{data.decode('latin-1')}=1"]),
)


def _cost_s(read: Callable[[bytes], object], data: bytes) -> float:
    started = time.process_time()
    with suppress(ValueError, RecursionError, ShipperError, NoTokenError, HttpError):
        read(data)  # not text, but this reader takes only text
    return time.process_time() - started


_most_s: Final[dict[int, float]] = {}  # by reader
_least_s: Final[dict[int, float]] = {}
_tried: Final[set[tuple[int, bytes, bytes]]] = set()


def check_cost(data: bytes) -> object:
    """Check that an input four times as long costs about four times as much, unless its cost is negligible."""
    head, _, body = data.partition(b"\n")
    begin, piece, end = [*body.split(b"\x1e"), b"", b""][:3]
    piece = piece or b"\n"
    number = (head + b"\0")[0] % len(_READERS)
    read = _READERS[number]

    def of_size(size: int) -> bytes:
        return begin + (piece * (size // len(piece) + 1))[:size] + end

    small = of_size(_SMALL[1])
    spent_s = _cost_s(read, small)
    kind = number, begin[-2:], piece
    is_odd = kind not in _tried and _is_odd(number, spent_s, tiny := of_size(_SMALL[0]))
    if is_odd:  # exclude chance
        spent_s = min(spent_s, _cost_s(read, small), _cost_s(read, small))
        is_odd = _is_odd(number, spent_s, tiny)
    if is_odd or crc32(data) % _ONE_OF == 1:
        _check_growth(number, *map(of_size, _SIZES))
        _tried.add(kind)
        _most_s[number] = max(spent_s, _most_s.get(number, 0.0))
    return number, int(spent_s * 1_000_000).bit_length()


def _is_odd(number: int, spent_s: float, tiny: bytes) -> bool:
    """Return whether an input is more expensive than all previous ones, or much more than a smaller one."""
    if spent_s > _MORE_EXPENSIVE * _most_s.get(number, 0.0):
        return True
    if spent_s <= _SUSPICIOUS_TIMES * _least_s.get(number, 0.0) + _SPARE_S:
        return False
    least_s = _cost_s(_READERS[number], tiny)
    _least_s[number] = min(least_s, _least_s.get(number, least_s))
    return spent_s > _SUSPICIOUS_TIMES * least_s + _SPARE_S


def _check_growth(number: int, few: bytes, many: bytes) -> None:
    read = _READERS[number]
    for _ in range(_TRIES):
        spent_s = _cost_s(read, many)
        if spent_s < _NOTICED_S or spent_s <= _MOST_TIMES * _cost_s(read, few):
            return
    raise AssertionError(f"reader {number}: {spent_s:.3f} s for {len(many)} bytes")


PIECES: Final = [
    *(b'a","\n', b'\\"', b'"', b'""\n', b"[1],", b"{],", b"{}", b'{"a":', b"[", b"]", b" ", b"\0", b"\n", b"; check "),
    *(b'"EventId" ', b'"ConsumerID": "', b"0", b"a b ", b"accepted 1 of 2 ", b"again ", b"1.", b"-2026", b"a.", b","),
    b"\t",
]
_SEEDS: Final = [bytes((number,)) + b"\n\x1e" + piece + b"\x1e" for number in range(len(_READERS)) for piece in PIECES]

TARGETS: Final = (
    Target("slow", check_cost, _SEEDS, mutator(words=[*PIECES, b"\x1e", b"\x1e\x1e", b'"x', b"\r\n"]), share=5),
)
