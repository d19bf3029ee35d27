"""Each check of the siege finds what it is for, and each piece of bait is what it is said to be."""

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
from tests.siege import bait, checking
from tests.siege.answers import INTAKE, OF_BATCHES
from tests.siege.canaries import KEY, NETWORK, SECRET, TOKEN
from tests.siege.feeds import CsvFeed, Feed, LogFeed, TrashFeed
from tests.siege.visitors import Seen
from tests.torture.books import Books, Process
from tests.torture.records import NAMES

_WRITTEN = 2_000
_CSV = csv_rows(",".join(bait.FIELDS).encode() + b"\n", is_whole=True)


@pytest.fixture
def feeds(tmp_path: Path) -> list[Feed]:
    """Two feeds that have written records, all of which the service has, and one of trash."""
    books = Books(SEED, 3)
    kinds: list[type[Feed]] = [LogFeed, CsvFeed, TrashFeed]
    made = [kind(tmp_path, number, books, Random(SEED), rate=1) for number, kind in enumerate(kinds)]
    for feed in made[:2]:
        books.records[feed.number] = feed.kind_of_records(SEED, feed.number)
        records = [feed.next_record()[1] for _ in range(_WRITTEN)]
        books.store([record for record in records if not record.rule], Process(KEY, 1))
        feed.bait_records = 30
    return made


def _state(feeds: list[Feed]) -> State:
    good, bad = checking.written(feeds)
    return State(read=good + bad, accepted=good, dead_lettered=bad, purged=bad)


def test_what_holds_is_not_complained_of(feeds: list[Feed], tmp_path: Path):
    assert sum(feed.owed for feed in feeds) > 3_900
    assert any(feed.letters for feed in feeds)
    seen = Seen(probes=3)
    seen.look_for_canaries("/status", b'{"paused":["token"],"address":"127.0.0.1:9464"}')
    assert not [
        *(*checking.losses(feeds), *checking.starved(feeds), *checking.accounts(feeds, _state(feeds))),
        *(*checking.memory(150 << 20), *checking.health(seen), *checking.pages(seen), *checking.cores([tmp_path])),
        *checking.shown("the log", b'{"event":"batch_sent","address":"http://127.0.0.1:1"}\n'),
        *checking.unseen({"answers": Counter(floods=1)}),
    ]


def test_a_good_record_that_the_service_has_not_is_found(feeds: list[Feed]):
    lost = next(number for number in range(_WRITTEN) if not feeds[1].make(number).rule)
    del feeds[1].books.first[feeds[1].make(lost).key]
    assert checking.losses(feeds) == [f"tables: 1 of {feeds[1].owed} good records lost, such as [{lost}]"]


def test_a_feed_of_which_nothing_arrives_is_found(feeds: list[Feed]):
    feeds[0].starved_s = checking.STARVED_MAX_S + 1
    assert checking.starved(feeds) == ["logs: for 61 s no good record arrived although there were some"]


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
def test_an_account_that_is_not_what_was_written_is_found(feeds: list[Feed], changes: dict[str, int]):
    state = _state(feeds)
    assert checking.accounts(feeds, replace(state, **{name: getattr(state, name) + by for name, by in changes.items()}))


def test_a_dead_letter_too_many_is_found_where_there_is_no_trash(feeds: list[Feed]):
    state = _state(feeds)
    more = replace(state, read=state.read + 1, dead_lettered=state.dead_lettered + 1, purged=state.purged + 1)
    assert not checking.accounts(feeds, more)
    assert checking.accounts(feeds[:2], more)


def test_too_much_memory_is_found():
    assert checking.memory((200 << 20) + 4096) == ["it held 200 MiB, more than 200"]


def test_a_probe_without_a_200_is_found_and_so_is_that_nobody_asked():
    assert checking.health(Seen(probes=9, unhealthy=["503 at 1.0 s"])) == ["1 of 9 probes got no 200: 503 at 1.0 s"]
    assert checking.health(Seen()) == ["nobody asked for /healthz"]


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
def test_what_a_terminal_obeys_is_found(command: str):
    assert checking.shown("the log", f"a name{command}\n".encode())


def test_a_core_is_found(tmp_path: Path):
    (tmp_path / "core.4711").touch()
    assert checking.cores([tmp_path]) == [f"a core: {tmp_path / 'core.4711'}"]


def test_what_a_client_should_not_get_and_what_never_happened_are_found():
    seen = Seen(wrong=["a host of others was answered"] * 2)
    assert checking.pages(seen) == ["2 times: a host of others was answered"]
    assert checking.unseen({"answers": Counter(floods=0, heads=1)}) == ["never happened: answers: floods"]


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 41])
def test_no_hostile_answer_is_an_acceptance(events: int):
    """Or records would be lost by the siege itself. What is not HTTP, or cut off, is none by its nature."""
    judged = 0
    for reply in (reply for replies in (*INTAKE.values(), *OF_BATCHES.values()) for reply in replies):
        if reply.wire is None and not reply.fault:
            answer = Answer(reply.status, reply.content_type, reply.headers.get("Retry-After", ""), reply.body)
            verdict = judge(answer, events=events, wall_time=0.0)
            assert verdict.action is not Action.ACCEPT, reply
            assert (verdict.retry_after_s or 0.0) <= 1.0, reply
            judged += 1
    assert judged > 20


# Bait -----------------------------------------------------------------------------------------------------------------


def _verdicts(data: bytes, framing: Framing) -> tuple[int, int]:
    """Return how many records are good and how many are refused, by the codec."""
    codec = Codec(RecordsSettings(), max_record_bytes=1 << 18)
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=1, end_offset=1 + len(data), data=data)
    good, refused, offset = 0, 0, 1
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=100, room_bytes=1 << 20, latest=ANY_TIME)
        assert piece is not None
        good, refused, offset = good + len(piece.event_ids), refused + len(piece.span.rejections), piece.span.end_offset
    return good, refused


@pytest.mark.parametrize(
    ("kinds", "framing", "between"),
    [(bait.LINES, LINES, b"\n"), (bait.ROWS, _CSV, b"\n"), (bait.VALUES, BatchElements(), b",\n")],
    ids=["lines", "rows", "values"],
)
def test_each_piece_of_bait_is_one_record_that_is_refused(kinds: dict, framing: Framing, between: bytes):
    """Or the accounts would say nothing."""
    rng = Random(SEED)
    for kind, make in kinds.items():
        pieces = [make(rng) for _ in range(3)]
        data = between.join([*pieces, b""]) if between == b"\n" else between + between.join(pieces)
        assert _verdicts(data, framing) == (0, 3), kind
