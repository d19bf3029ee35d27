"""What counts as stuck, and how the next start reacts."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from shipper.codec.codec import Codec
from shipper.config.settings import RecordsSettings
from shipper.model.framing import LINES, BatchElements, CsvRows, Framing
from shipper.model.records import Stream
from shipper.state.sqlite import transaction
from shipper.status.live import Board, Live
from shipper.status.watchdog import Watchdog
from shipper.system.work import StuckPlaces, WorkItem, at_work, recorded, waiting, work_items
from tests.cases import each
from tests.unit.test_codec import chunk_of

LIMIT_S = 10.0
READ, FIND = WorkItem("read", "/in/a.ndjson", "1:2", 70), WorkItem("find", "/in/*")


class Looks:
    """A watch whose clock is set by hand, and a snapshot before each look unless the event loop stands still."""

    def __init__(self, places: StuckPlaces | None = None) -> None:
        self.now = 100.0
        self.board = Board()
        self.watch = Watchdog(self.board, limit_s=LIMIT_S, now=lambda: self.now, places=places)

    def __call__(self, seconds: int, *, turns: bool = True) -> str:
        """Look once a second."""
        for _ in range(seconds):
            self.now += 1.0
            if turns:
                self.board.publish(Live(version="1", process_id=7, command="run", phase="running", started_at=1, at=2))
            self.watch.check()
        return self.watch.stuck


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_piece_of_work_beyond_the_limit_is_stuck_and_reported_once(looks: Looks):
    with capture_logs() as logs:
        with at_work(READ):
            assert looks(10) == ""
            assert looks(1) == "reading /in/a.ndjson from byte 70, for 10 s"
            assert looks(20) == "reading /in/a.ndjson from byte 70, for 30 s"
        assert looks(1) == ""
        looks(5)
    assert [line["event"] for line in logs] == ["stuck", "stuck_over"]
    assert (logs[0]["path"], logs[0]["offset"]) == ("/in/a.ndjson", 70)


def test_many_consecutive_pieces_of_work_are_not_stuck(looks: Looks):
    for _ in range(40):
        with at_work(WorkItem("read", "/in/a.ndjson", "1:2", 70)):
            assert looks(1) == ""


def test_work_that_advances_in_steps_or_nested_pieces_is_not_stuck(looks: Looks):
    with at_work(WorkItem("find", "/in/*")) as piece:
        for _ in range(20):
            piece.steps += 1
            assert looks(1) == ""
        for _ in range(20):
            with at_work(WorkItem("open", "/in/a")):
                pass
            assert looks(1) == ""
        assert looks(10) == "looking for files that match /in/*, for 10 s"


def test_a_wait_within_some_work_is_not_stuck(looks: Looks):
    with at_work(FIND):
        with waiting():
            assert looks(30) == ""
        assert looks(10) == ""
        assert looks(1) == "looking for files that match /in/*, for 10 s"


def test_a_transaction_that_waits_for_another_process_is_not_stuck(looks: Looks, tmp_path: Path):
    path = tmp_path / "x.db"
    begun = threading.Event()

    def save(db: sqlite3.Connection) -> None:
        with closing(db), at_work(FIND):
            begun.set()
            with transaction(db, path):
                pass

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        thread = threading.Thread(target=save, args=[db])
        thread.start()
        assert begun.wait(10)
        while work_items():
            pass
        assert looks(30) == ""
        other.execute("COMMIT")
        thread.join(60)


def test_work_of_another_thread_is_watched(looks: Looks):
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        with at_work(READ):
            begun.set()
            over.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    stuck = looks(11)
    over.set()
    thread.join(10)
    assert stuck.startswith("reading /in/a.ndjson")
    assert looks(1) == ""


def test_a_blocked_event_loop_is_stuck(looks: Looks):
    looks(1)
    assert looks(14, turns=False) == ""
    assert looks(2, turns=False).startswith("the event loop is blocked")
    assert looks(1) == ""


def test_a_process_that_was_stopped_or_a_machine_that_slept_is_not_stuck(looks: Looks):
    with at_work(READ):
        looks(2)
        looks.now += 3600
        assert looks(1) == ""


def test_a_name_is_shown_in_printable_form(looks: Looks):
    with at_work(WorkItem("read", "/in/\x1b[2J\udcff", "1:2")):
        assert looks(11) == r"reading /in/\x1b[2J\xff from byte 0, for 10 s"


# From one start to the next ---------------------------------------------------------------------------------------


def start(folder: Path) -> StuckPlaces:
    return StuckPlaces(folder, limit_s=LIMIT_S)


def test_an_input_is_skipped_after_two_starts_stuck_at_the_same_place(tmp_path: Path):
    for expected in (False, False, True):
        places = start(tmp_path)
        assert bool(places.skip_reason("read", "1:2", 70)) is expected
        assert not places.skip_reason("read", "1:2", 71)
        assert not places.skip_reason("read", "1:3", 70)
        assert not places.skip_reason("open", "1:2", 70)
        places.add(READ)


def test_work_that_ends_after_all_is_forgotten(tmp_path: Path):
    for _ in range(2):  # processes that are stuck, which others notice, and killed
        places = start(tmp_path)
        places.add(READ)
    places.remove(READ)
    assert not start(tmp_path).skip_reason("read", "1:2", 70)


def test_an_orderly_end_forgets_all_places_except_where_it_is_stuck(tmp_path: Path):
    for _ in range(2):
        places = start(tmp_path)
        places.add(READ)
        places.add(WorkItem("find", "/x/*", "/x/*"))
    places = start(tmp_path)
    with places.recording():
        places.add(READ)
    later = start(tmp_path)
    assert later.skip_reason("read", "1:2", 70)
    assert not later.skip_reason("find", "/x/*")
    with later.recording():
        pass
    assert not (tmp_path / "stuck.json").exists()


def killed_in(folder: Path, *items: WorkItem, traceback: str) -> None:
    """Leave the files of a process that was blocked within work items and killed."""
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyboardInterrupt))
        places = start(folder)
        stack.enter_context(places.recording())
        for item in items:
            stack.enter_context(recorded(item))
        for name in ("at-work", "traceback"):
            (folder / f"{name}.kept").write_bytes((folder / name).read_bytes())
        raise KeyboardInterrupt
    (folder / "at-work.kept").rename(folder / "at-work")
    (folder / "traceback.kept").unlink()
    (folder / "traceback").write_text(traceback)


VALIDATE = WorkItem("validate", "/in/a.ndjson", "1:2", 70, 900)


def test_a_frozen_interpreter_leaves_its_place_and_it_counts_once(tmp_path: Path):
    killed_in(tmp_path, READ, VALIDATE, traceback="Timeout!")
    with capture_logs() as logs:
        (place,) = start(tmp_path).suspects["1:2"]
    assert (place.offset, place.end, place.is_single, place.starts) == (70, 900, False, 1)
    assert [(line["event"], line["stage"], line["offset"]) for line in logs] == [("stuck_before", "validate", 70)]
    assert start(tmp_path).suspects["1:2"] == [place]


def test_work_is_still_watched_if_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("faulthandler.dump_traceback_later", Mock(side_effect=RuntimeError("unable to start")))
    places = start(tmp_path)
    with places.recording():
        places.tick()


def test_a_kill_during_advancing_work_does_not_count(tmp_path: Path):
    killed_in(tmp_path, READ, VALIDATE, traceback="")
    places = start(tmp_path)
    assert not places.suspects
    assert not (tmp_path / "stuck.json").exists()


@each("content", [b"", b"{", b"[1]", b'[{"stage":"nonsense","source":"x"}]', b"\xff" * 5000, b"[" * 100_000])
def test_an_invalid_list_of_places_is_ignored(tmp_path: Path, content: bytes):
    for name in ("stuck.json", "at-work", "traceback"):
        (tmp_path / name).write_bytes(content)
    assert not start(tmp_path).suspects


def test_a_pipe_or_link_instead_of_its_files_is_not_followed_and_does_not_block(tmp_path: Path):
    state = tmp_path / "state"
    state.mkdir()
    other = tmp_path / "other"
    other.write_text("somebody's")
    os.mkfifo(state / "stuck.json")
    (state / "at-work").symlink_to(other)
    os.mkfifo(state / "traceback")
    places = start(state)
    with places.recording(), at_work(VALIDATE):
        places.add(READ)
    assert other.read_text() == "somebody's"


# A record that is refused unseen ----------------------------------------------------------------------------------

FRAMINGS: dict[str, tuple[Framing, bytes, list[bytes]]] = {
    "lines": (LINES, b"\n \n{one\n\n{two}\n", [b"{one", b"{two}"]),
    "csv": (CsvRows(b"a,b\n", ","), b'"1\n1",2\n3,4\n', [b'"1\n1",2', b"3,4"]),
    "batch": (BatchElements(), b'[{"a":[1]}, 2 ]', [b'{"a":[1]}', b"2"]),
}


@each("framing", list(FRAMINGS))
def test_exactly_the_next_record_is_rejected_unread(framing: str):
    how, data, records = FRAMINGS[framing]
    origin = 1000
    chunk = chunk_of(data, start=origin, framing=how)
    codec = Codec(RecordsSettings(), max_record_bytes=10_000)
    offset, refused = origin, []
    while offset < chunk.end_offset:
        span = codec.reject_unread(chunk, offset).span
        assert (span.start_offset, span.unsettled, span.read) == (offset, 0, len(span.rejections))
        offset = span.end_offset
        refused += span.rejections
    assert [each.raw for each in refused] == records
    assert {each.rule for each in refused} == {"stuck"}
    assert [data[each.start_offset - origin : each.end_offset - origin] for each in refused] == records


def test_a_name_that_is_not_utf8_is_stored_like_any_other(tmp_path: Path):
    """Of a stream whose inode another one has, the name is all that tells it from others."""
    stream = Stream(stream_id=1, kind="file", path=os.fsdecode(b"/in/caf\xe9.ndjson"))
    pattern = os.fsdecode(b"/in/caf\xe9*")
    for _ in range(2):
        places = StuckPlaces(tmp_path, limit_s=LIMIT_S)
        with places.recording():
            piece = WorkItem("validate", stream.path, stream.key, 7, 9)
            with recorded(piece):
                assert b"caf\\xe9" in (tmp_path / "at-work").read_bytes().replace(b"\\\\", b"\\")
            places.add(piece)
            places.add(WorkItem("find", pattern, pattern))
    places = StuckPlaces(tmp_path, limit_s=LIMIT_S)
    assert [(place.offset, place.end, place.starts) for place in places.suspects[stream.key]] == [(7, 9, 2)]
    assert places.skip_reason("find", pattern)
