"""The native scanner against the judge: what it takes passes as it stands, and what is ordinary is taken."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from shipper.codec.codec import Codec, repeats_in
from shipper.codec.columns import Columns, tally
from shipper.codec.dedupe import DedupeWindow, keys_of
from shipper.codec.judge import SEPARATOR, Judge
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
    """Return what the judge makes of lines, all together; None if it does not take each of them."""
    return _JUDGE.validate(b"[" + SEPARATOR.join(lines) + SEPARATOR + b"null]", len(lines), LATEST)


def check_scanner(data: bytes) -> object:
    """Scan a chunk from each line on that the scanner has left."""
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
        events, end, slot, keys, consumer_ids, repeats, ledger, is_stopped = scan.take(
            body, start, room_events, room_bytes, _LIMIT, LATEST, window
        )
        lines = body[start:end].removesuffix(b"\n").split(b"\n") if events else []
        assert len(lines) == events <= room_events
        if lines:
            columns = judged(lines)
            assert columns is not None, "the judge does not take what the scanner takes"
            assert max(map(len, lines)) <= _LIMIT
            assert sum(map(len, lines)) + events - 1 <= room_bytes
            assert array("q", consumer_ids).tolist() == columns.consumer_ids
            assert repeats == [
                (ordinal, start + begin, start + finish)
                for ordinal, begin, finish in repeats_in(columns.consumer_ids, b"\n".join(lines))
            ]
            assert dict(ledger.items()) == tally(columns)
            if window.is_on:
                ids = [keys[at : at + 16] for at in range(0, len(keys), 16)]
                assert keys == keys_of(columns.event_ids)
                assert len({*ids, *known}) == len(ids) + len(known), "a known EventId is taken"
                known.update(ids)
                assert slot >= 0
        start, taken = end, taken + events
        if events == room_events and not is_stopped:
            continue
        line = body[start:].partition(b"\n")[0]
        if start < len(body) and is_stopped:
            left += 1
            alone = judged([line]) if len(line) <= _LIMIT else None
            is_known = alone is not None and window.is_on and keys_of(alone.event_ids) in known
            assert alone is None or is_known or _ODD.search(line), "what is ordinary is not taken"
        elif start < len(body) and not events:
            assert len(line) > room_bytes or room_events == 0, "there is room for one more"
            room_bytes += len(line)
            continue
        if not is_stopped:
            continue
        start = min(start + len(line) + 1, len(body))
    return taken, left


def check_pieces(data: bytes) -> object:
    """Encode a chunk with the native window and with the one in Python: the same is good, refused and repeated."""
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
            counts = [counts[0] + span.records, counts[1] + span.duplicates]
        both.append((lines, sorted(waiting), refused, counts))
    assert both[0] == both[1], "not the same is sent, refused or counted"
    return len(both[0][0]), len(both[0][2]), len(both[0][1])


_ORDINARY: Final = [line.split(b'"') for seed in LINE_SEEDS for line in seed[3:].split(b"\n") if judged([line])]


def cross(rng: Random, data: bytes, pool: Sequence[bytes], *, odd: float = 1) -> bytes:
    """Make a chunk of a hundred lines, each of two others that are joined at a quote; in some, change a byte."""
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
