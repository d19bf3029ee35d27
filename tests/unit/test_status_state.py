"""The contents of a state directory: until when each input is settled, and the resulting document."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shipper.model.records import Checkpoint, Rejection, Stream
from shipper.sources.discovery import FoundFile
from shipper.state.store import Store
from shipper.status.document import document
from shipper.status.overview import Overview, SpoolState, StreamState, read_overview
from shipper.status.snapshot import Snapshot

AT = 1000.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "a.ndjson"
    path.parent.mkdir()
    path.write_bytes(b"x" * 100)
    return path


def known(store: Store, path: Path, settled: int, *, stream_id: int = 1, until: float | None = None, **fields: Any):
    """Save up to where an input is settled, like its source."""
    status = path.stat() if path.exists() else None
    usual = {
        "kind": "file",
        "path": str(path),
        "device": status.st_dev if status else 5,
        "inode": status.st_ino if status else stream_id,
        "size": status.st_size if status else 100,
        "settled_until": until,
    }
    rejections = fields.pop("rejections", [])
    stream = Stream(stream_id=stream_id, mark=(settled, until), **{**usual, **fields})
    counts = {"read": 1, "accepted": 1, "duplicates": 0}
    store.save([Checkpoint(stream=stream, end_offset=settled, rejections=rejections, tail=b"", **counts)], now_s=1.0)


def overview(directory: Path, *present: Path) -> Overview:
    looked = [FoundFile(str(path), path.stat(), "") for path in present]
    return read_overview(directory, AT, looked)


def only(directory: Path, *present: Path) -> StreamState:
    (stream,) = overview(directory, *present).streams
    return stream


# Files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_settled_to_its_end_is_delivered_until_now(store: Store, file: Path, tmp_path: Path):
    known(store, file, 100, until=3.0)
    assert (only(tmp_path).delivered_until, only(tmp_path).lag_bytes) == (AT, 0)
    assert overview(tmp_path).behind == []


@pytest.mark.parametrize("until", [3.0, None])
def test_an_unsettled_file_is_delivered_until_its_settled_until(
    store: Store, file: Path, tmp_path: Path, until: float | None
):
    known(store, file, 60, until=until)
    assert (only(tmp_path).delivered_until, only(tmp_path).lag_bytes) == (until, 40)
    assert overview(tmp_path).delivered_until == until
    known(store, file, 100, until=5.0)
    file.write_bytes(b"x" * 101)
    assert (only(tmp_path).delivered_until, only(tmp_path).lag_bytes) == (5.0, 1)


def test_a_missing_file_is_delivered_until_its_settled_until_while_it_is_searched(
    store: Store, file: Path, tmp_path: Path
):
    """It may have grown before it went, or live on in an archive."""
    known(store, file, 100, until=4.0)
    known(store, file.with_name("other"), 60, stream_id=2, until=3.0)
    file.unlink()

    def by_id() -> dict[int, float | None]:
        return {each.stream_id: each.delivered_until for each in overview(tmp_path).streams}

    assert by_id() == {1: 4.0, 2: 3.0}
    streams = store.streams.load("file")
    for stream in streams:
        stream.is_gone = True
    store.streams.note(streams, 5.0)
    assert by_id() == {1: AT, 2: 3.0}


def test_a_truncated_file_is_not_delivered(store: Store, file: Path, tmp_path: Path):
    """Even if it is empty: a copy may contain unread data."""
    known(store, file, 100, until=3.0)
    file.write_bytes(b"y" * 30)
    assert only(tmp_path) == StreamState(1, str(file), 30, 0, 30, "", 1.0, 3.0)
    file.write_bytes(b"")
    assert only(tmp_path).delivered_until == 3.0


def test_an_unknown_file_is_not_delivered(store: Store, file: Path, tmp_path: Path):
    known(store, file, 100)
    new, empty = file.with_name("new"), file.with_name("empty")
    new.write_bytes(b"new")
    empty.touch()
    first, second = overview(tmp_path, file, new, empty).streams
    assert (first.stream_id, first.path, first.lag_bytes, first.delivered_until) == (0, str(new), 3, None)
    assert second.delivered_until == AT
    assert overview(tmp_path, file, new).delivered_until is None


def test_a_file_renamed_while_stopped_is_followed(store: Store, file: Path, tmp_path: Path):
    known(store, file, 100, until=3.0)
    renamed = file.rename(file.with_name("a.ndjson.1"))
    renamed.write_bytes(b"x" * 150)
    assert only(tmp_path) == StreamState(1, str(file), 150, 100, 50, "", 1.0, 3.0)
    assert only(tmp_path, renamed) == StreamState(1, str(renamed), 150, 100, 50, "", 1.0, 3.0)


@pytest.mark.parametrize(
    ("fields", "is_whole"),
    [
        ({"size": 0}, False),  # not at its end: only there it is known how much it holds
        ({"size": 500}, True),  # it was a plain file before
        ({"size": 900}, False),
        ({"size": 500, "ended_size": 100}, True),
        ({"size": 500, "ended_size": 99}, False),  # it has grown since
        ({"size": 400}, False),
    ],
)
def test_an_archive_is_delivered_only_if_its_end_was_reached(
    store: Store, file: Path, tmp_path: Path, fields: dict[str, int], *, is_whole: bool
):
    known(store, file, 500, compression="gzip", **fields)
    assert only(tmp_path).delivered_until == (AT if is_whole else None)
    assert only(tmp_path, file).delivered_until == (AT if is_whole else None)


def test_the_stream_with_most_pending_bytes_comes_first(store: Store, tmp_path: Path):
    for number, settled in enumerate((100, 20, 70, 100), 1):
        known(store, tmp_path / str(number), settled, stream_id=number, is_gone=True)
    found = overview(tmp_path)
    assert [each.lag_bytes for each in found.streams] == [80, 30, 0, 0]
    assert [each.lag_bytes for each in found.behind] == [80, 30]
    assert found.lag_bytes == 110


# Standard input ---------------------------------------------------------------------------------------------------


def spooled(directory: Path, number: int, size: int, written_at: float) -> Path:
    path = directory / "spool" / f"{number:012d}.ndjson"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (written_at, written_at))
    return path


def test_a_settled_spool_is_delivered_until_now(store: Store, tmp_path: Path):
    assert overview(tmp_path).spool == SpoolState(0, 0, 0, AT)
    known(store, spooled(tmp_path, 1, 10, 1.0), 10, kind="spool")
    assert overview(tmp_path).spool == SpoolState(1, 10, 0, AT)


def test_data_before_the_first_unsettled_segment_is_delivered(store: Store, tmp_path: Path):
    known(store, spooled(tmp_path, 1, 10, 50.0), 10, kind="spool", until=4.0)
    spooled(tmp_path, 2, 10, 60.0)
    spooled(tmp_path, 3, 10, 70.0)
    assert overview(tmp_path).spool == SpoolState(3, 30, 20, 50.0)
    known(store, spooled(tmp_path, 2, 10, 60.0), 4, kind="spool", stream_id=2, until=55.0)
    assert overview(tmp_path).spool == SpoolState(3, 30, 16, 55.0)


def test_delivery_is_unknown_without_a_settled_segment(store: Store, tmp_path: Path):
    spooled(tmp_path, 1, 10, 50.0)
    assert overview(tmp_path).spool == SpoolState(1, 10, 10, None)
    assert overview(tmp_path).delivered_until is None


# The document -----------------------------------------------------------------------------------------------------


def test_the_document_is_bounded_and_quotes_no_answer(store: Store, tmp_path: Path):
    answers = [("invalid", 0), ("rejected", 422), ("ambiguous", 400)] * 5
    rejections = [
        Rejection(start_offset=n, end_offset=n + 1, rule="ip", message=f"m{n}", raw=b"{}", delivery=how, status=code)
        for n, (how, code) in enumerate(answers)
    ]
    for number in range(1, 31):
        known(store, tmp_path / str(number), number, stream_id=number, rejections=rejections if number == 1 else [])
    written = document(Snapshot(at=AT, state=read_overview(tmp_path, AT)))
    assert written["live"] is None
    state = written["state"]
    assert [each["lag_bytes"] for each in state["streams"]] == list(range(99, 79, -1))
    assert (state["stream_count"], state["streams_behind"]) == (30, 30)
    assert state["dead_letters"] == {"ip": 15}
    newest = state["newest_dead_letters"]
    assert [(each["id"], each["delivery"], each["message"]) for each in newest[:3]] == [
        (15, "ambiguous", ""),
        (14, "rejected", ""),
        (13, "invalid", "m12"),
    ]
    assert len(newest) == 10
    assert set(newest[0]) == {*"id rule path offset event_id status delivery last_at message".split()}
    everything = document(Snapshot(at=AT, state=read_overview(tmp_path, AT)), None)["state"]["streams"]
    named = {each["stream_id"]: each["newest_dead_letter"] for each in everything}
    assert named.pop(1) == {name: newest[0][name] for name in ("id", "rule", "last_at")}
    assert set(named.values()) == {None}

    counts = {"at", "read", "accepted", "dead_lettered", "duplicates", "unreachable_bytes", "unreachable"}
    inputs = {"streams", "stream_count", "streams_behind", "lag_bytes", "spool", "dedupe_window"}
    letters = {"dead_letters", "dead_letter_bytes", "letters_without_record", "newest_dead_letters", "purged"}
    assert set(state) == counts | inputs | letters


def test_without_a_state_there_is_an_empty_document(tmp_path: Path):
    assert read_overview(tmp_path, AT) == Overview(at=AT, spool=SpoolState(delivered_until=AT))
    state = document(Snapshot(at=AT))["state"]
    assert (state["read"], state["streams"], state["newest_dead_letters"]) == (0, [], [])
    assert list(tmp_path.iterdir()) == []
