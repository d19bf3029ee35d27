"""The native scanner against the judge: what it takes passes as it stands, and what is ordinary is taken."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from random import Random
from typing import Final

from shipper.codec.codec import repeats_in
from shipper.codec.columns import Columns, tally
from shipper.codec.dedupe import keys_of
from shipper.codec.judge import SEPARATOR, Judge
from shipper.config.settings import RecordsSettings
from shipper.system.native import NATIVE
from tests.fuzz.engine import Target
from tests.fuzz.records import LINE_SEEDS, MUTATE
from tests.unit.test_codec import LATEST

_LIMIT: Final = 2_000
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


_ORDINARY: Final = [line.split(b'"') for seed in LINE_SEEDS for line in seed[3:].split(b"\n") if judged([line])]


def cross(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Make a chunk of a hundred lines, each of two others that are joined at a quote; in many, change a byte."""
    random = rng.random
    others = [line.split(b'"') for line in (data[3:] + b"\n" + pool[int(random() * len(pool))][3:]).split(b"\n")]
    made = []
    for _ in range(_CHUNK_LINES):
        second = _ORDINARY[int(random() * len(_ORDINARY))]
        some = others if random() < 0.2 else _ORDINARY
        first = some[int(random() * len(some))]
        at = int(random() * len(second))
        line = b'"'.join(first[:at] + second[at:])
        if random() < 0.4:
            at = int(random() * len(line))
            line = line[:at] + _BYTES[int(random() * len(_BYTES))] + line[at + 1 :]
        made.append(line)
    return b"%b\n%b" % (bytes((_MUCH_ROOM, int(random() * 256))), b"\n".join(made))


TARGETS: Final = (
    (
        Target("scanner", check_scanner, LINE_SEEDS, MUTATE, share=2),
        Target("chunks", check_scanner, LINE_SEEDS, cross, share=0.2),
    )
    if NATIVE
    else ()
)
