"""The native scanner against the judge: scanned lines are accepted unchanged, and ordinary lines are scanned."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from shipper.codec.codec import Codec, _Scanned, find_repeats
from shipper.codec.dedupe import DedupeWindow, keys_of, split_keys
from shipper.codec.judge import Judge
from shipper.codec.rules import Columns, tally
from shipper.config.settings import RecordsSettings
from shipper.model.records import Chunk, Stream, event_id_of
from shipper.system.native import NATIVE
from tests.fuzz.engine import Target
from tests.fuzz.records import LINE_SEEDS, MUTATE
from tests.unit.test_codec import LATEST

_LIMIT: Final = 2_000
_STREAM: Final = Stream(stream_id=1, kind="file", path="x")
_MUCH_ROOM: Final = 0xFF
_CHUNK_LINES: Final = 100
_BYTES: Final = [bytes([each]) for each in b'09azAZ"\\,:{}[] \t\r\0\x7f\x80\xc3\xa9\xff-+.eT']
_JUDGE: Final = Judge(RecordsSettings(mode="strict"))
_ODD: Final = re.compile(rb'\\|"(?:ConsumerID|BrandID)"[ \t\r]*:[ \t\r]*[0-9]*[^0-9 \t\r,}]|"[0-9]{21,}_')


def judged(lines: list[bytes]) -> Columns | None:
    """Return the columns of all lines together; None unless the judge accepts all of them."""
    return _JUDGE.validate(lines, LATEST)


def check_scanner(data: bytes) -> object:
    """Check which lines of a chunk the scanner accepts, piece by piece."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0"
    room_events, room_bytes = 1 + head[0] % 7, 300 + 100 * (head[1] % 40)
    if head[0] == _MUCH_ROOM:
        room_events, room_bytes = 60, 1 << 16
    window = NATIVE.DedupeWindow(head[1] % 2)
    start, taken, left = 0, 0, 0
    known: set[bytes] = set()
    scan = NATIVE.scan(body)
    while start < len(body):
        found = _Scanned(*scan.take(body, start, room_events, room_bytes, _LIMIT, LATEST, window))
        if found.end == start:
            line = body[start:].partition(b"\n")[0]
            assert len(line) > room_bytes, "the scanner stopped although there was room"
            room_bytes += len(line)
            continue
        assert len(body[start : found.end].removesuffix(b"\n")) <= room_bytes
        lines: list[bytes] = []
        for begin, end, count in found.stretches:
            some = body[begin:end].split(b"\n")
            assert len(some) == count
            lines += some
        assert len(lines) + len(found.others) <= room_events
        if lines:
            columns = judged(lines)
            assert columns is not None, "the judge refuses a line that the scanner accepts"
            assert max(map(len, lines)) <= _LIMIT
            assert array("q", found.consumer_ids).tolist() == columns.consumer_ids
            assert found.repeats == find_repeats(columns.consumer_ids, b"\n".join(lines))
            assert dict(found.ledger.items()) == tally(columns)
            if window.is_on:
                ids = split_keys(found.keys)
                assert found.keys == keys_of(columns.event_ids)
                assert len({*ids, *known}) == len(ids) + len(known), "the scanner accepts a known EventId"
                known.update(ids)
        for begin, end in found.others:
            line = body[begin:end]
            alone = judged([line]) if len(line) <= _LIMIT else None
            is_known = alone is not None and window.is_on and keys_of(alone.event_ids) in known
            assert alone is None or is_known or _ODD.search(line), "the scanner skips an ordinary line"
        start, taken, left = found.end, taken + len(lines), left + len(found.others)
    return taken, left


def check_pieces(data: bytes) -> object:
    """Check that the native and the Python dedupe window give the same results."""
    head, _, body = data.partition(b"\n")
    room_events = 1 + (head + b"\0")[0] % 100
    if not body:
        return 0
    both = []
    for window in (NATIVE.DedupeWindow(1000), DedupeWindow(1000)):
        codec = Codec(RecordsSettings(), max_record_bytes=_LIMIT, window=window)
        chunk = Chunk(stream=_STREAM, start_offset=0, end_offset=len(body), data=body)
        lines: list[bytes] = []
        refused, counts, waiting, offset = [], [0, 0], [], 0
        while offset < len(body):
            piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=1 << 20, latest=LATEST)
            assert piece is not None
            span, fresh = piece.span, piece.events - piece.waits
            offset = span.end_offset
            some = piece.lines.split(b"\n")[: piece.events]
            assert len(some) == piece.events == len(piece.consumer_ids)
            assert span.event_keys == keys_of([event_id_of(line) for line in some])
            lines += some[:fresh]
            waiting += some[fresh:]
            places = [span.bounds_of(ordinal) for ordinal in range(piece.events)]
            assert all(0 <= begin < end <= len(body) and b"\n" not in body[begin:end] for begin, end in places)
            assert places[:fresh] == sorted(places[:fresh])
            refused += [(each.start_offset, each.end_offset, each.rule) for each in span.rejections]
            counts = [counts[0] + span.read, counts[1] + span.duplicates]
        both.append((lines, sorted(waiting), refused, counts))
    assert both[0] == both[1], "the native and the Python result differ"
    return len(both[0][0]), len(both[0][2]), len(both[0][1])


_ORDINARY: Final = [line.split(b'"') for seed in LINE_SEEDS for line in seed[3:].split(b"\n") if judged([line])]


def cross(rng: Random, data: bytes, pool: Sequence[bytes], *, odd: float = 1) -> bytes:
    """Return a hundred lines, each spliced at a quote from two others; in some, a byte is changed."""
    random = rng.random
    others = [line.split(b'"') for line in (data[3:] + b"\n" + pool[int(random() * len(pool))][3:]).split(b"\n")]
    made = []
    for _ in range(_CHUNK_LINES):
        second = _ORDINARY[int(random() * len(_ORDINARY))]
        some = others if random() < 0.2 * odd else _ORDINARY
        first = some[int(random() * len(some))]
        at = int(random() * len(second))
        line = b'"'.join(first[:at] + second[at:])
        if random() < 0.4 * odd:
            at = int(random() * len(line))
            line = line[:at] + _BYTES[int(random() * len(_BYTES))] + line[at + 1 :]
        made.append(line)
    return b"%b\n%b" % (bytes((_MUCH_ROOM, int(random() * 256))), b"\n".join(made))


TARGETS: Final = (
    (
        Target("scanner", check_scanner, LINE_SEEDS, MUTATE, share=2),
        Target("chunks", check_scanner, LINE_SEEDS, cross, share=0.2),
        Target("pieces", check_pieces, LINE_SEEDS, partial(cross, odd=0.1), share=0.05),
    )
    if NATIVE
    else ()
)
