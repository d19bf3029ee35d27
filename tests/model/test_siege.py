"""Tests of the siege: its checks find problems, its answers are no acceptances, and its hostile records are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from shipper.codec.codec import Codec
from shipper.codec.rules import ANY_TIME
from shipper.config.settings import RecordsSettings
from shipper.delivery.answer import Answer
from shipper.delivery.verdicts import Action, judge
from shipper.model.framing import LINES, BatchElements, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from tests.conftest import SEED
from tests.e2e.driver import State
from tests.siege import checking, hostile
from tests.siege.answers import INTAKE, OF_BATCHES
from tests.siege.canaries import KEY, NETWORK, SECRET, TOKEN
from tests.siege.feeds import CsvFeed, Feed, LogFeed, TrashFeed
from tests.siege.visitors import Seen
from tests.torture.checking import losses, unseen
from tests.torture.journal import Journal, Process
from tests.torture.records import NAMES

_WRITTEN = 2_000
_CSV = csv_rows(",".join(hostile.FIELDS).encode() + b"\n", is_whole=True)


@pytest.fixture
def feeds(tmp_path: Path) -> list[Feed]:
    """Two feeds whose written records have all arrived, and one of trash."""
    kinds: list[type[Feed]] = [LogFeed, CsvFeed, TrashFeed]
    journal = Journal(kind.kind_of_records(SEED, number) for number, kind in enumerate(kinds))
    made = [kind(tmp_path, number, journal, Random(SEED), rate=1) for number, kind in enumerate(kinds)]
    for feed in made[:2]:
        records = [feed.next_record()[1] for _ in range(_WRITTEN)]
        journal.store([record for record in records if not record.rule], Process(KEY, 1))
        feed.hostile_records = 30
    return made


def _state(feeds: list[Feed]) -> State:
    good, bad = checking.written(feeds)
    return State(read=good + bad, accepted=good, dead_lettered=bad, purged=bad)


def test_the_checks_find_no_problem_if_all_is_well(feeds: list[Feed], tmp_path: Path):
    assert sum(feed.owed for feed in feeds) > 3_900
    assert any(feed.letters for feed in feeds)
    seen = Seen(probes=3)
    seen.look_for_canaries("/status", b'{"paused":["token"],"address":"127.0.0.1:9464"}')
    assert not [
        *(*losses(feeds), *checking.starved(feeds), *checking.accounts(feeds, _state(feeds))),
        *(*checking.memory(150 << 20), *checking.health(seen), *checking.pages(seen), *checking.cores([tmp_path])),
        *checking.shown("the log", b'{"event":"batch_sent","address":"http://127.0.0.1:1"}\n'),
        *unseen({"answers": Counter(floods=1)}),
    ]


def test_a_lost_good_record_is_found(feeds: list[Feed]):
    lost = next(number for number in range(_WRITTEN) if not feeds[1].make(number).rule)
    del feeds[1].journal.first[feeds[1].make(lost).key]
    event_id = feeds[1].make(lost).event["EventId"]
    assert losses(feeds) == [f"tables: 1 of {feeds[1].owed} lost: {lost} ({event_id})"]


def test_a_starved_feed_is_found(feeds: list[Feed]):
    feeds[0].starved_s = checking.STARVED_MAX_S + 1
    assert checking.starved(feeds) == ["logs: no good record arrived for 61 s although some were pending"]


@pytest.mark.parametrize(
    "changes",
    [
        {"read": 1},
        {"read": 1, "accepted": 1},
        {"duplicates": 1},
        {"read": -1, "accepted": -1},
        {"read": -1, "dead_lettered": -1, "purged": -1},
        {"purged": -1},
    ],
    ids=str,
)
def test_totals_that_differ_from_the_written_records_are_found(feeds: list[Feed], changes: dict[str, int]):
    state = _state(feeds)
    assert checking.accounts(feeds, replace(state, **{name: getattr(state, name) + by for name, by in changes.items()}))


def test_an_unexpected_dead_letter_is_found_if_there_is_no_trash(feeds: list[Feed]):
    state = _state(feeds)
    more = replace(state, read=state.read + 1, dead_lettered=state.dead_lettered + 1, purged=state.purged + 1)
    assert not checking.accounts(feeds, more)
    assert checking.accounts(feeds[:2], more)


def test_too_much_memory_is_found():
    assert checking.memory((200 << 20) + 4096) == ["peak memory was 200 MiB, more than 200"]


def test_a_probe_without_a_200_and_a_lack_of_probes_are_found():
    assert checking.health(Seen(probes=9, unhealthy=["503 at 1.0 s"])) == [
        "1 of 9 probes did not get a 200: 503 at 1.0 s"
    ]
    assert checking.health(Seen()) == ["/healthz was never probed"]


@pytest.mark.parametrize("canary", [KEY, SECRET, f"{TOKEN}-17", f"{NETWORK}7", *(f"{name}17" for name in NAMES)])
@pytest.mark.parametrize("form", ["{}", "\x1b[31m{}", '"{}"'])
def test_a_canary_is_found_in_every_output(canary: str, form: str):
    text = form.format(canary)
    seen = Seen()
    for where, data in (("/", text.encode()), ("/status", repr(text).encode())):
        seen.look_for_canaries(where, data)
    assert len(checking.pages(seen)) == 2
    assert any("shows" in found for found in checking.shown("the log", text.encode()))


@pytest.mark.parametrize("command", ["\x1b[2J", "\x9b", "\r", "\u202e", "\u2028", "\0"])
def test_a_terminal_control_sequence_is_found(command: str):
    assert checking.shown("the log", f"a name{command}\n".encode())


def test_a_core_is_found(tmp_path: Path):
    (tmp_path / "core.4711").touch()
    assert checking.cores([tmp_path]) == [f"a core: {tmp_path / 'core.4711'}"]


def test_a_wrong_answer_and_an_event_that_never_happened_are_found():
    seen = Seen(wrong=["a host of others was answered"] * 2)
    assert checking.pages(seen) == ["2 times: a host of others was answered"]
    assert unseen({"answers": Counter(floods=0, heads=1)}) == ["never happened: answers: floods"]


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 41])
def test_no_hostile_answer_is_an_acceptance(events: int):
    """Otherwise the siege itself would lose records. Invalid or truncated HTTP is never an acceptance."""
    judged = 0
    for reply in (reply for replies in (*INTAKE.values(), *OF_BATCHES.values()) for reply in replies):
        if reply.wire is None and not reply.fault:
            answer = Answer(reply.status, reply.content_type, reply.headers.get("Retry-After", ""), reply.body)
            verdict = judge(answer, events=events, wall_time=0.0)
            assert verdict.action is not Action.ACCEPT, reply
            assert (verdict.retry_after_s or 0.0) <= 1.0, reply
            judged += 1
    assert judged > 20


# Hostile records ------------------------------------------------------------------------------------------------------


def _verdicts(data: bytes, framing: Framing) -> tuple[int, int]:
    """Return the numbers of records that the codec accepts and refuses."""
    codec = Codec(RecordsSettings(), max_record_bytes=1 << 18)
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=1, end_offset=1 + len(data), data=data)
    good, refused, offset = 0, 0, 1
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=100, room_bytes=1 << 20, latest=ANY_TIME)
        good, refused, offset = good + len(piece.event_ids), refused + len(piece.span.rejections), piece.span.end_offset
    return good, refused


@pytest.mark.parametrize(
    ("kinds", "framing", "between"),
    [(hostile.LINES, LINES, b"\n"), (hostile.ROWS, _CSV, b"\n"), (hostile.VALUES, BatchElements(), b",\n")],
    ids=["lines", "rows", "values"],
)
def test_each_hostile_record_is_one_refused_record(kinds: dict, framing: Framing, between: bytes):
    """Otherwise the totals could not be checked."""
    rng = Random(SEED)
    for kind, make in kinds.items():
        pieces = [make(rng) for _ in range(3)]
        data = between.join([*pieces, b""]) if between == b"\n" else between + between.join(pieces)
        assert _verdicts(data, framing) == (0, 3), kind
