"""The codec: whole chunks of records, against an oracle, and against themselves where the settings ask for more."""

from __future__ import annotations

import json
from collections import deque
from datetime import UTC, datetime
from typing import Final

import msgspec

from shipper.codec import MESSAGES, Codec
from shipper.config.settings import RecordsSettings
from shipper.model.framing import LINES, BatchElements, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from shipper.sandbox.samples import sample_lines
from shipper.state.ledger import added
from tests.corpus import ENTRIES
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator
from tests.fuzz.oracle import BLANKS, FIELDS, expected
from tests.unit.test_codec import LATEST

_LIMIT: Final = 2_000
_ORACLE: Final = [
    RecordsSettings(),
    RecordsSettings(mode="strict", unknown_fields="reject"),
    RecordsSettings(unknown_fields="reject"),
    RecordsSettings(unknown_fields="keep"),
    RecordsSettings(mode="strict"),
]
_OTHERS: Final = [
    RecordsSettings(event_id="derive"),
    RecordsSettings(event_id="derive", event_id_fields=("Username", "IP"), unknown_fields="keep"),
    RecordsSettings(assume_timezone="Europe/Malta", allowed_statuses=("Verified",)),
    RecordsSettings(relax=("ip", "state", "event_id", "timestamp", "btag", "username", "consumer_id")),
    RecordsSettings(relax=("country", "currency", "status", "affiliate_id"), mode="strict", unknown_fields="keep"),
    RecordsSettings(
        mapping={
            "IP": "a.b",
            "BTag": {"template": "{BTag}{x}"},
            "ConsumerStatus": {"from": "x", "values": {"1": "V"}, "default": "Z"},
            "AffiliateID": {"const": ""},
        },
    ),
    RecordsSettings(mapping={"Username": "x", "IP": "IP"}, unknown_fields="keep"),
    RecordsSettings(mapping={"Username": {"template": "{x}{{{a.b}"}, "BrandID": {"const": 7}}, unknown_fields="reject"),
]


def _codec(settings: RecordsSettings) -> Codec:
    # A window would make a verdict depend on what came before, which is its purpose.
    return Codec(msgspec.structs.replace(settings, dedupe_window=0), max_record_bytes=_LIMIT)


_CODECS: Final = {id(settings): _codec(settings) for settings in [*_ORACLE, *_OTHERS]}


def encode(
    data: bytes, settings: RecordsSettings, *, framing: Framing = LINES, room: int = 1000, start: int = 5000
) -> tuple[list[bytes], list[tuple[str, bytes]]]:
    """Encode a chunk piece by piece; gives what is sent, and rule and bytes of what is refused."""
    codec = _CODECS[id(settings)]
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    good: list[bytes] = []
    refused: list[tuple[str, bytes]] = []
    offset = start
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room, room_bytes=max(_LIMIT, room * 200), latest=LATEST)
        assert piece is not None, "a record alone always fits"
        span = piece.span
        assert span.start_offset == offset < span.end_offset <= chunk.end_offset
        offset = span.end_offset
        lines = piece.lines.split(b"\n") if piece.lines else []
        assert len(lines) == len(piece.event_ids) == len(piece.consumer_ids) == span.unsettled <= room
        assert len(piece.lines) <= max(_LIMIT, room * 200)
        assert span.records == len(lines) + len(span.rejections) + span.duplicates
        assert added(span.ledger).total() <= len(lines)
        for each in span.rejections:
            assert data[each.start_offset - start : each.end_offset - start] == each.raw
            assert each.rule in MESSAGES
        good += lines
        refused += [(each.rule, each.raw) for each in span.rejections]
    return good, refused


def check_records(data: bytes) -> object:
    """Every line is accounted for once, and what is sent and what is refused is what the oracle says."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0"
    settings, room = _ORACLE[head[0] % len(_ORACLE)], 1 + head[1] % 7
    records = [line.lstrip(b"\0") for line in body.split(b"\n") if line.strip(BLANKS)]
    good, refused = encode(body, settings, room=room)
    sent, denied = deque(good), deque(refused)
    for record in records:
        wanted = expected(record, is_normalizing=settings.mode == "normalize", unknown=settings.unknown_fields)
        if len(record) > _LIMIT:
            assert denied.popleft() == ("oversized", record)
        elif len(record) > _LIMIT - 250 and denied and denied[0] == ("oversized", record):
            denied.popleft()  # with the fields that are added, it is longer
        elif wanted.document is None or (denied and denied[0][1] == record and denied[0][0] in wanted.rules):
            rule, raw = denied.popleft()
            assert (raw, rule in wanted.rules) == (record, True), (rule, wanted.rules)
        elif wanted.is_as_it_came:
            assert sent.popleft() == record
        else:
            _check_rewritten(sent.popleft(), wanted.document, has_extras=settings.unknown_fields == "keep")
    assert not sent, "more is sent than there is"
    assert not denied, "more is refused than there is"
    return head[0] % len(_ORACLE), len(good), "".join(sorted({rule for rule, _ in refused}))


def _check_rewritten(line: bytes, document: dict[str, object], *, has_extras: bool) -> None:
    written = json.loads(line)
    assert written == document
    assert list(written)[: len(FIELDS)] == list(FIELDS)
    plain = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    assert has_extras or line.count(b" ") == plain.count(" "), "there are blanks in it"


def check_neighbours(data: bytes) -> object:
    """Whatever the settings and the format: a verdict does not depend on neighbours, and what is sent is final."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0\0"
    settings = _OTHERS[head[0] % len(_OTHERS)]
    lines = [line for line in body.split(b"\n") if line.strip(BLANKS)]
    good, refused = encode(body, settings, room=1 + head[1] % 7)
    alone = [encode(line, settings) for line in lines]
    assert refused == [each for _, bad in alone for each in bad], "a verdict depends on the neighbours"
    assert good == [each for fine, _ in alone for each in fine], "what is sent depends on the neighbours"
    assert len(good) + len(refused) == len(lines)
    if not settings.mapping:
        for line in good:
            assert encode(line, settings) == ([line], []), "what was sent would not be sent again"
    match head[2] % 3:
        case 1:
            encode(b"[" + b",".join(lines) + b"]", settings, framing=BatchElements(), start=0)
        case 2:
            rows = csv_rows(lines[0] if lines else b"", is_whole=True)
            assert rows is not None
            encode(b"\n".join(lines), settings, framing=rows, start=0)
    return head[0] % len(_OTHERS), head[2] % 3, len(good), "".join(sorted({rule for rule, _ in refused}))


_SAMPLES: Final = [line.rstrip() for line in sample_lines(40, seed=1, end=datetime(2026, 11, 20, tzinfo=UTC))]
_LINES: Final = [entry.line for entry in ENTRIES if len(entry.line) < _LIMIT]
_CSV: Final = b"\n".join(
    [",".join(FIELDS).encode(), *(",".join(map(str, json.loads(line).values())).encode() for line in _SAMPLES[:3])]
)
LINE_SEEDS: Final = [bytes((number % 40, number % 11, 0)) + b"\n" + line for number, line in enumerate(_LINES)] + [
    bytes((number, number)) + b"\n" + b"\n".join(_SAMPLES[number * 5 : number * 5 + 5]) for number in range(8)
]
MUTATE: Final = mutator(
    words=[
        *(b"\r", b"\n", b"\n\n", b"\0", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"1e400", b"NaN", b'","', b"},{"),
        *(
            b"null",
            b"[" * 201,
            b"]" * 201,
            b'{"a":' * 100,
            b"x" * 900,
            b",null,\n",
            _SAMPLES[0],
            b"\n" + _SAMPLES[1] + b"\n",
        ),
    ],
    values=[
        *(
            "gb",
            "ss",
            "\u017f\u017f",
            "2026-01-01T00:00:00+02:00",
            "2026-01-01 00:00:00",
            "2026-01-01t01:02:03.5z",
            "17",
        ),
        *("007", "192.0.2.1", "::ffff:1.2.3.4", "\t1.2.3.4 ", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"),
        *("2026-02-29T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T00:00:60Z", "2016-12-31T23:59:60Z", "x" * 1900),
        *(
            "{0F8FAD5B-D9CB-469F-A165-70867728950E}",
            "urn:uuid:0f8fad5b-d9cb-469f-a165-70867728950e",
            "\u0661\u0662",
            "\uff11\uff17",
        ),
        *(
            "0f8fad5bd9cb469fa16570867728950e",
            "{urn:uuid:0f8fad5b-d9cb-469f-a165-70867728950e}",
            "1_" + "aF" * 16,
            10**29,
        ),
    ],
    names=[*FIELDS, *FIELDS, "x", "a", "Phone", "eventid", "EventId "],
)

TARGETS: Final = (
    Target("records", check_records, LINE_SEEDS, MUTATE, share=3),
    Target("neighbours", check_neighbours, [*LINE_SEEDS, b"\0\0\2\n" + _CSV], MUTATE, share=2),
)
