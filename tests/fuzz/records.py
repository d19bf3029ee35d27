"""The codec: chunks of records against an oracle, and against each record alone."""

from __future__ import annotations

import json
from collections import deque
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from shipper.codec.codec import Codec
from shipper.codec.rules import MESSAGES
from shipper.config.settings import RecordsSettings
from shipper.model.framing import LINES, BatchElements, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from shipper.sandbox.samples import sample_lines
from shipper.state.ledger import sum_tallies
from tests.corpus import ENTRIES
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator
from tests.fuzz.oracle import BLANKS, FIELDS, expected
from tests.unit.test_codec import LATEST

LIMIT: Final = 2_000
ORACLE_SETTINGS: Final = [
    RecordsSettings(),
    RecordsSettings(mode="strict", unknown_fields="reject"),
    RecordsSettings(unknown_fields="reject"),
    RecordsSettings(unknown_fields="keep"),
    RecordsSettings(mode="strict"),
]
OTHER_SETTINGS: Final = [
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


class Judged(NamedTuple):
    """
    A record and its verdict.

    Attributes:
        start: Its offset.
        rule: The rule reported as broken; empty if the record is sent.
        data: The bytes sent or refused.
        broken: All rules that it breaks.
    """

    start: int
    rule: str
    data: bytes
    broken: frozenset[str] = frozenset()


_codecs: Final[dict[int, Codec]] = {}


def _codec(settings: RecordsSettings) -> Codec:
    if id(settings) not in _codecs:
        # No dedupe window: it would make a verdict depend on earlier records.
        _codecs[id(settings)] = Codec(msgspec.structs.replace(settings, dedupe_window=0), max_record_bytes=LIMIT)
    return _codecs[id(settings)]


def judge(
    data: bytes, settings: RecordsSettings, *, framing: Framing = LINES, room: int = 1000, start: int = 5000
) -> list[Judged]:
    """Encode a chunk piece by piece, and return its records in order."""
    codec, room_bytes = _codec(settings), max(LIMIT, room * 200)
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    judged: list[Judged] = []
    offset = start
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room, room_bytes=room_bytes, latest=LATEST)
        assert piece is not None, "a single record does not fit"
        span = piece.span
        assert span.start_offset == offset < span.end_offset <= chunk.end_offset
        offset = span.end_offset
        lines = piece.lines.split(b"\n") if piece.lines else []
        assert len(lines) == len(piece.event_ids) == len(piece.consumer_ids) == span.unsettled <= room
        assert len(piece.lines) <= room_bytes
        assert span.read == len(lines) + len(span.rejections) + span.duplicates
        assert sum_tallies(span.ledger).total() <= len(lines)
        judged += [Judged(start + span.bounds_of(ordinal)[0], "", line) for ordinal, line in enumerate(lines)]
        for refused in span.rejections:
            assert data[refused.start_offset - start : refused.end_offset - start] == refused.raw
            assert refused.rule in MESSAGES
            broken = frozenset(refused.faults or [refused.rule])
            judged.append(Judged(refused.start_offset, refused.rule, refused.raw, broken))
    return sorted(judged)


def check_verdicts(data: bytes, settings: RecordsSettings, room: int) -> list[Judged]:
    """Assert that each record is sent or refused once, as the oracle expects."""
    judged = judge(data, settings, room=room)
    left = deque(judged)
    for line in data.split(b"\n"):
        record = line.lstrip(b"\0")
        if not line.strip(BLANKS):
            continue
        assert left, "a record is neither sent nor refused"
        _, rule, found, broken = left.popleft()
        wanted = expected(record, is_normalizing=settings.mode == "normalize", unknown=settings.unknown_fields)
        if len(record) > LIMIT:
            assert (rule, found) == ("oversized", record)
        elif rule == "oversized":  # added fields make it longer
            assert len(record) > LIMIT - 250
            assert found == record
        elif rule:
            assert found == record
            assert rule in wanted.rules
            assert broken <= wanted.rules
            assert broken == wanted.rules or wanted.rules >= {"json"}
        elif wanted.is_as_it_came:
            assert found == record
        else:
            assert wanted.document is not None, f"the record breaks {set(wanted.rules)}"
            _check_rewritten(found, wanted.document, has_extras=settings.unknown_fields == "keep")
    assert not left, "there are more verdicts than records"
    return judged


def _check_rewritten(line: bytes, document: dict[str, object], *, has_extras: bool) -> None:
    written = json.loads(line)
    assert written == document
    assert list(written)[: len(FIELDS)] == list(FIELDS)
    plain = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    assert has_extras or line.count(b" ") == plain.count(" "), "a sent record contains whitespace"


def check_alone(data: bytes, settings: RecordsSettings, room: int) -> list[Judged]:
    """Assert that each line gets the same verdict as alone, and that a sent record is valid input."""
    judged = judge(data, settings, room=room)
    alone: list[Judged] = []
    start = 5000
    for line in data.split(b"\n"):
        if line.strip(BLANKS):
            alone += judge(line, settings, start=start)
        start += len(line) + 1
    assert judged == alone, "a verdict depends on neighbours"
    assert len(judged) == sum(bool(line.strip(BLANKS)) for line in data.split(b"\n"))
    for line in [each.data for each in judged if not each.rule]:
        names = [name for name, _ in json.loads(line, object_pairs_hook=lambda pairs: pairs)]
        assert len(set(names)) == len(names)
        assert set(names) >= set(FIELDS) if settings.unknown_fields == "keep" else set(names) == set(FIELDS)
        if not settings.mapping:
            assert [each[1:3] for each in judge(line, settings)] == [("", line)], "a sent record is not valid input"
    return judged


def _outcome(judged: list[Judged]) -> object:
    return sum(not each.rule for each in judged), "".join(sorted({each.rule for each in judged}))


def check_records(data: bytes) -> object:
    """Check a chunk against the oracle."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0"
    settings = ORACLE_SETTINGS[head[0] % len(ORACLE_SETTINGS)]
    return head[0] % len(ORACLE_SETTINGS), _outcome(check_verdicts(body, settings, 1 + head[1] % 7))


def check_neighbours(data: bytes) -> object:
    """Check that verdicts do not depend on neighbours with any settings, and that other framings do not raise."""
    head, _, body = data.partition(b"\n")
    head += b"\0\0\0"
    settings = OTHER_SETTINGS[head[0] % len(OTHER_SETTINGS)]
    judged = check_alone(body, settings, 1 + head[1] % 7)
    lines = [line for line in body.split(b"\n") if line.strip(BLANKS)]
    match head[2] % 3:
        case 1:
            judge(b"[" + b",".join(lines) + b"]", settings, framing=BatchElements(), start=0)
        case 2:
            rows = csv_rows(lines[0] if lines else b"", is_whole=True)
            assert rows is not None
            judge(b"\n".join(lines), settings, framing=rows, start=0)
    return head[0] % len(OTHER_SETTINGS), head[2] % 3, _outcome(judged)


_SAMPLES: Final = [line.rstrip() for line in sample_lines(40, seed=1, end=datetime(2026, 11, 20, tzinfo=UTC))]
_LINES: Final = [entry.line for entry in ENTRIES if len(entry.line) < LIMIT]
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
        *("gb", "ss", "\u017f\u017f", "2026-01-01T00:00:00+02:00", "2026-01-01 00:00:00", "2026-01-01t01:02:03.5z"),
        "17",
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
