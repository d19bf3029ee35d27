"""The headline of the status page, where it is not as simple as it seems; the page itself is tested in a browser."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from shipper.status.headline import Headline
from shipper.status.headline import headline_of as headline_of_snapshot
from shipper.status.live import Live, Pause
from shipper.status.overview import Overview, StreamState
from shipper.status.snapshot import Snapshot
from tests.cases import each

NOW = 1_792_504_800.0
LIVE = Live(
    version="1", process_id=7, command="run", phase="running", started_at=NOW - 7200, at=NOW, read=9, accepted=9
)
NO_MATCH = "no file matches /data/*.ndjson"
NO_ENTRY = "/data/app.ndjson cannot be read: permission denied; it belongs to user 0"


def state(**fields: Any) -> Overview:
    return Overview(at=NOW, **fields)


def headline_of(live: Live, state: Overview) -> Headline:
    """Put into words how a shipper stands whose state agrees with it."""
    behind = StreamState(1, "/data/app.ndjson", live.lag_bytes, 0, live.lag_bytes, "", NOW)
    whole = replace(state, streams=[behind] if live.lag_bytes else [])
    return headline_of_snapshot(Snapshot(at=live.at, process_id=live.process_id, live=live, state=whole))


def test_what_has_not_looked_for_its_inputs_yet_is_not_green():
    assert headline_of(LIVE, state()).state == "good"
    found = headline_of(replace(LIVE, has_looked=False), state())
    assert (found.state, found.title) == ("busy", "Looking for its inputs")


@each(
    ("changes", "title", "detail", "sub"),
    [
        (
            {"unmatched": [NO_MATCH], "read": 0, "accepted": 0},
            "No file matches /data/*.ndjson",
            "",
            "Nothing was read yet.",
        ),
        (
            {"unmatched": [NO_MATCH]},
            "No file matches /data/*.ndjson",
            "",
            "Everything else that was written is delivered.",
        ),
        (
            {"unreadable": [NO_ENTRY], "unreadable_count": 3, "unmatched": [NO_MATCH], "lag_bytes": 500},
            "/data/app.ndjson cannot be read",
            ": permission denied",
            "It belongs to user 0. 2 more files cannot be read. No file matches /data/*.ndjson. "
            "0 records and 500 B wait.",
        ),
        (
            {"unreadable": [NO_ENTRY], "accepted": 0, "dead_lettered": 9},
            "/data/app.ndjson cannot be read",
            ": permission denied",
            "It belongs to user 0.",
        ),
    ],
)
def test_an_input_that_is_not_there_or_cannot_be_read_is_the_headline(
    changes: dict[str, Any], title: str, detail: str, sub: str
):
    found = headline_of(replace(LIVE, **changes), state())
    assert (found.state, found.title, found.detail, found.sub) == ("warn", title, detail, sub)


def test_a_pause_and_the_end_come_before_inputs_that_cannot_be_read():
    troubled = replace(LIVE, unreadable=[NO_ENTRY], unreadable_count=1)
    assert headline_of(replace(troubled, pauses=[Pause("token", "", "", NOW)]), state()).state == "paused"
    assert headline_of(replace(troubled, phase="draining"), state()).state == "busy"
    assert headline_of(replace(troubled, phase="stopped", outcome="drained"), state()).state == "off"


def test_bytes_of_a_file_that_cannot_be_read_are_not_taken_for_a_line_without_an_end():
    waits = replace(LIVE, lag_bytes=10)
    assert headline_of(waits, state()).is_open_line
    assert not headline_of(replace(waits, unreadable=[NO_ENTRY], unreadable_count=1), state()).is_open_line


@each(
    ("live", "counts", "detail"),
    [
        ({"accepted": 0, "dead_lettered": 9}, {}, ": 9 dead letters"),
        ({"accepted": 0, "dead_lettered": 8, "duplicates": 1}, {}, ": 8 dead letters and 1 duplicate"),
        ({"accepted": 0, "duplicates": 9}, {}, ": 9 duplicates"),
        ({"accepted": 0, "dead_lettered": 9}, {"read": 99, "accepted": 90, "dead_lettered": 9}, ": 9 dead letters"),
        ({"accepted": 0, "read": 0}, {"read": 9, "dead_lettered": 9}, ": 9 dead letters"),
        ({"accepted": 0, "dead_lettered": 9, "lag_bytes": 5}, {}, ": 9 dead letters"),
    ],
)
def test_where_none_of_some_records_was_accepted_nothing_is_called_delivered(
    live: dict[str, Any], counts: dict[str, int], detail: str
):
    found = headline_of(replace(LIVE, **live), state(**counts))
    assert (found.state, found.title, found.detail) == (
        "warn",
        "None of the records that were read was accepted",
        detail,
    )


@pytest.mark.parametrize("accepted", [0, 9])
def test_what_is_nearly_done_is_green_only_if_something_was_accepted(accepted: int):
    busy = replace(LIVE, lag_bytes=5, settled_bytes_per_second=9.0, accepted=accepted, dead_lettered=9 - accepted)
    found = headline_of(busy, state())
    assert (found.title, found.state) == ("Up to date", "good" if accepted else "warn")


def test_an_end_without_a_record_is_not_green_while_dead_letters_are_kept():
    ended = replace(LIVE, phase="stopped", outcome="finished", read=0, accepted=0)
    assert headline_of(ended, state()).state == "good"
    found = headline_of(ended, state(dead_letters={"ip": 10}))
    assert (found.state, found.title + found.detail) == ("warn", "Stopped: finished; 10 dead letters kept")


@pytest.mark.parametrize(
    ("kept", "detail"),
    [(3, ", with 3 dead letters"), (9, ", with 3 dead letters"), (1, ", with 1 dead letter"), (0, "")],
)
def test_letters_that_were_replayed_or_purged_are_none_of_an_end_any_more(kept: int, detail: str):
    ended = replace(LIVE, phase="stopped", outcome="finished", read=9, accepted=6, dead_lettered=3)
    assert headline_of(ended, state(dead_letters={"ip": kept})).detail == detail
