"""Inputs that cost more than their size: a beginning, a piece that is repeated, and an end, at sizes that quadruple."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from shipper.addresses import host_of
from shipper.codec.codec import Codec
from shipper.codec.rules import ANY_TIME, nests_deeply, repeats_key
from shipper.config import RecordsSettings
from shipper.delivery.verdicts import Answer, judge
from shipper.delivery.waits import asked_wait_s
from shipper.framing import LINES, BatchElements, CsvRows, Framing, sniff
from shipper.records import Chunk, Stream
from shipper.sources.generations import looks_like_generation
from shipper.sources.incoming import Incoming
from shipper.sources.reader import InputForm
from shipper.state.schema import consumer_id_of
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator

_SIZES: Final = (8_192, 32_768)
_MOST_TIMES: Final = 10  # in proportion it would be four times, by the square sixteen
_NOTICED_S: Final = 0.05
_TRIES: Final = 4
_PIPED_BYTES: Final = 512
_NAME_BYTES: Final = 255


def _framed(framing: Framing, data: bytes) -> None:
    for _ in framing.frames(data[: framing.cut(data, is_final=False)], 0):
        pass
    for _ in framing.frames(data, 0):
        pass


def _piped(data: bytes, form: InputForm) -> None:
    incoming = Incoming(form, max_record_bytes=1 << 20)
    for start in range(0, len(data), _PIPED_BYTES):
        incoming.take(data[start : start + _PIPED_BYTES])


def _encoded(data: bytes, framing: Framing) -> None:
    codec = Codec(RecordsSettings(), max_record_bytes=len(data))
    chunk = Chunk(
        stream=Stream(stream_id=1, kind="file", path="x", framing=framing),
        start_offset=1,
        end_offset=1 + len(data),
        data=data,
    )
    offset = chunk.start_offset
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=100, room_bytes=10 * len(data), latest=ANY_TIME)
        assert piece is not None, "a record alone always fits"
        offset = piece.span.end_offset


def _answered(data: bytes, status: int) -> None:
    judge(Answer(status, "application/json", "", data), events=100)


_CSV: Final = CsvRows(b"a,b,c\n", ",")
_READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    lambda data: _framed(_CSV, data),
    lambda data: _framed(BatchElements(), data),
    lambda data: _piped(b"EventId,IP\n" + data, InputForm("csv")),
    lambda data: _piped(data, InputForm("auto")),
    lambda data: _encoded(data, LINES),
    lambda data: _encoded(data, _CSV),
    nests_deeply,
    lambda data: sniff(data, is_whole=True),
    lambda data: _answered(data, 200),
    lambda data: _answered(data, 400),
    lambda data: _answered(b'{"message":"%b"}' % data, 200),
    lambda data: asked_wait_s("", data.decode("latin-1"), date=data[:100].decode("latin-1"), wall_time=0.0),
    lambda data: looks_like_generation(data[:_NAME_BYTES].decode("latin-1")),
    lambda data: host_of(data.decode("latin-1")),
    consumer_id_of,
    repeats_key,
)


def _cost_s(read: Callable[[bytes], object], data: bytes) -> float:
    started = time.process_time()
    with suppress(ValueError, RecursionError):  # it is no text, for a reader that is given nothing else
        read(data)
    return time.process_time() - started


def check_cost(data: bytes) -> object:
    """An input four times as long costs about four times as much; what takes no time to speak of may cost anything."""
    head, _, body = data.partition(b"\n")
    begin, piece, end = [*body.split(b"\x1e"), b"", b""][:3]
    piece = piece or b"\n"
    number = (head + b"\0")[0] % len(_READERS)
    read = _READERS[number]
    few, many = (begin + (piece * size)[:size] + end for size in _SIZES)
    for _ in range(_TRIES):
        spent_s = _cost_s(read, many)
        if spent_s < _NOTICED_S or spent_s <= _MOST_TIMES * _cost_s(read, few):
            return number, int(spent_s * 1_000).bit_length()
    raise AssertionError(f"reader {number}: {spent_s:.3f} s for {len(many)} bytes")


_PIECES: Final = [
    *(b'a","\n', b'\\"', b'"', b'""\n', b"[1],", b"{],", b"{}", b'{"a":', b"[", b"]", b" ", b"\0", b"\n", b"; check "),
    *(
        b'"EventId" ',
        b'"ConsumerID": "',
        b"0",
        b"a b ",
        b"accepted 1 of 2 ",
        b"again ",
        b"1.",
        b"-2026",
        b"a.",
        b",",
        b"\t",
    ),
]
_SEEDS: Final = [bytes((number,)) + b"\n\x1e" + piece + b"\x1e" for number in range(len(_READERS)) for piece in _PIECES]

TARGETS: Final = (
    Target("slow", check_cost, _SEEDS, mutator(words=[*_PIECES, b"\x1e", b"\x1e\x1e", b'"x', b"\r\n"]), share=0.005),
)
