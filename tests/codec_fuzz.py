"""Random and mutated records, and what must hold for any of them: for the tests and for the soak."""

from __future__ import annotations

import json
from random import Random
from typing import Final

import msgspec

from shipper.codec import Codec
from shipper.config import RecordsSettings
from shipper.framing import LINES, BatchElements, Framing, csv_rows
from shipper.records import Chunk, Stream
from shipper.wire import ActivityEvent

LATEST: Final = "2026-11-21T00:05:00Z"
LIMIT: Final = 4000
FIELDS: Final = ActivityEvent.__struct_fields__
BLANKS: Final = b" \t\r\n\0"

SETTINGS: Final = [
    RecordsSettings(),
    RecordsSettings(mode="strict"),
    RecordsSettings(mode="strict", unknown_fields="reject"),
    RecordsSettings(unknown_fields="keep"),
    RecordsSettings(unknown_fields="reject"),
    RecordsSettings(event_id="derive"),
    RecordsSettings(assume_timezone="Europe/Malta", allowed_statuses=("Verified",)),
    RecordsSettings(relax=("ip", "state", "event_id", "timestamp", "btag", "username", "consumer_id")),
    RecordsSettings(
        mapping={
            "IP": "a.b",
            "BTag": {"template": "{BTag}{x}"},
            "ConsumerStatus": {"from": "x", "values": {"1": "V"}, "default": "Z"},
            "AffiliateID": {"const": ""},
        },
    ),
]
# A window would make a verdict depend on what came before, which is its purpose.
CODECS: Final = [
    (settings, Codec(msgspec.structs.replace(settings, dedupe_window=0), max_record_bytes=LIMIT))
    for settings in SETTINGS
]
_VALUES: Final[list[object]] = [
    None, True, False, 0, -1, 1, 2**63, 2**63 - 1, 10**40, 1.5, 1e300, "", "a", " ", "gb", "GB", "gB1", "ß", "é", "\n",
    "a\nb", "\x00", "2026-01-01T00:00:00+02:00", "2026-01-01 00:00:00", "17", "007", "192.0.2.1", "::ffff:1.2.3.4",
    " 1.2.3.4 ", [], {}, [1, {"a": 2}], "\ud800", "x" * 5000,
]  # fmt: skip


def mutated(rng: Random, line: bytes) -> bytes:
    """Change a record: its values, its bytes, or nothing."""
    chance = rng.random()
    if chance < 0.3:
        return line
    if chance < 0.7:
        document = json.loads(line)
        for _ in range(rng.randint(1, 4)):
            field = rng.choice([*FIELDS, "x", "a", "Phone"])
            if rng.random() < 0.2:
                document.pop(field, None)
            else:
                document[field] = rng.choice(_VALUES)
        return json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    data = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice(b'"{}[],:\\\x00\xff0aZ \r')
    return bytes(data)


def encode(rng: Random, data: bytes, framing: Framing, codec: Codec) -> tuple[list[bytes], list[tuple]]:
    """Encode in pieces of any size; returns the good lines, and rule and raw bytes of the others."""
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=0, end_offset=len(data), data=data)
    good: list[bytes] = []
    refused: list[tuple] = []
    offset = 0
    while offset < len(data):
        room_events, room_bytes = rng.choice([1, 3, 50, 1000]), rng.choice([LIMIT, 50_000])
        piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=room_bytes, latest=LATEST)
        assert piece is not None, "a record alone always fits"
        span = piece.span
        assert (span.start_offset, offset < span.end_offset <= len(data)) == (offset, True)
        offset = span.end_offset
        lines = piece.lines.split(b"\n") if piece.lines else []
        assert len(lines) == len(piece.event_ids) == len(piece.consumer_ids) == span.unsettled <= room_events
        assert len(piece.lines) <= room_bytes
        assert span.records == len(lines) + len(span.rejections) + span.duplicates
        assert all(data[each.start_offset : each.end_offset] == each.raw for each in span.rejections)
        good += lines
        refused += [(each.rule, each.raw) for each in span.rejections]
    return good, refused


def try_some(rng: Random, samples: list[bytes]) -> int:
    """
    Hold the codec to its word on a few random records.

    Args:
        samples: Records in the wire form.
    Returns:
        How many records that were.
    """
    settings, codec = rng.choice(CODECS)
    lines = [mutated(rng, rng.choice(samples)).replace(b"\n", b"") for _ in range(rng.randint(1, 40))]
    together, refused_together = encode(rng, b"\n".join(lines) + rng.choice([b"\n", b""]), LINES, codec)
    alone: list[bytes] = []
    refused_alone: list[tuple] = []
    for line in lines:
        if line.strip(BLANKS):
            good, refused = encode(rng, line + b"\n", LINES, codec)
            alone += good
            refused_alone += refused
    assert refused_together == refused_alone, "a verdict depends on the neighbours"
    assert together == alone, "what is sent depends on the neighbours"
    if not settings.mapping:
        for line in set(together):
            assert encode(rng, line + b"\n", LINES, codec) == ([line], []), "what was sent would not be sent again"
    header = b",".join(field.encode() for field in FIELDS) + b"\n"
    rows = [_row(rng, samples) for _ in range(10)]
    encode(rng, header + b"".join(rows), csv_rows(header, is_whole=True) or LINES, codec)
    encode(rng, b"[" + b",".join(lines) + b"]", BatchElements(), codec)
    return len(lines)


def _row(rng: Random, samples: list[bytes]) -> bytes:
    if rng.random() < 0.3:
        return bytes(rng.choices(b'",\n\r;a1\xff', k=30)) + b"\n"
    values = [str(value) for value in json.loads(rng.choice(samples)).values()]
    if rng.random() < 0.5:
        values[rng.randrange(len(values))] = rng.choice(['"', '""', '"a\n"', "", "x,y", '"x,y"', "ß", "1" * 5000])
    return ",".join(values).encode() + b"\n"
