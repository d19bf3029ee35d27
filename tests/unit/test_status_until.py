"""`shipper status --until`: yes or no, and what stands in the way."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from shipper.cli.common import parsed_time
from shipper.cli.status.rendering import answer
from shipper.status.overview import SpoolState, UnreachableInput
from shipper.status.snapshot import Snapshot
from tests.cases import each
from tests.unit.test_status import FORBIDDEN, NOW, live, look, stream


@each(
    ("text", "seconds"),
    [
        ("now", NOW),
        ("2026-10-20T14:00:00Z", NOW),
        ("2026-10-20T16:00+02:00", NOW),
        ("2026-10-20 14:00", NOW),
        ("2026-10-20T14:00:00.5Z", NOW + 0.5),
        ("2026-10-19", NOW - 14 * 3600),
        ("2026-10-20", NOW + 10 * 3600),
    ],
)
def test_a_time_is_read_as_utc_and_a_date_as_its_end(text: str, seconds: float):
    assert parsed_time(text, is_end=True, now=NOW) == seconds


@each("text", ["", "14:00", "yesterday", "2026-13-01", "2026-10-20T25:00Z", "9999-12-31", "1e9", "NOW"])
def test_what_is_no_time_is_refused_with_examples(text: str):
    with pytest.raises(typer.BadParameter, match="is not a time, such as 2026-11-01T12:30:00Z"):
        parsed_time(text, is_end=True, now=NOW)


def test_everything_is_delivered_if_each_input_and_the_spool_is_up_to_then():
    seen = look(stream(1), stream(2, 100), spool=SpoolState(1, 10, 5, NOW - 30))
    assert seen.is_delivered(NOW - 60)
    assert answer(seen, NOW - 60) == ["yes: everything that was written up to 2026-10-20T13:59:00Z is delivered"]
    refused = look(stream(1), dead_letters={"ip": 2})
    assert answer(refused, NOW) == [
        "yes: everything that was written up to 2026-10-20T14:00:00Z is delivered, but for 2 dead letters"
    ]
    assert not seen.is_delivered(NOW - 59)
    assert look(stream(1), stream(2)).is_delivered(NOW)


@pytest.mark.parametrize("until", [NOW, NOW - 30, NOW - 1e9])
def test_what_is_not_known_is_not_delivered(until: float):
    seen = look(stream(1), stream(2, 100, delivered_until=None))
    assert not seen.is_delivered(until)
    assert [each.stream_id for each in seen.late_streams(until)] == [2]
    assert not look(stream(1), spool=SpoolState(1, 10, 5, None)).is_delivered(until)
    assert not Snapshot(at=NOW).is_delivered(until)
    assert not look(read=0).is_delivered(until), "no input is known"


def test_a_time_that_is_still_to_come_is_not_delivered_and_no_input_is_blamed():
    seen = look(stream(1))
    assert (seen.is_delivered(NOW + 7200), seen.late_streams(NOW + 7200)) == (False, [])
    assert answer(seen, NOW + 7200)[1] == "  that is still to come, in 2 h; it is 2026-10-20T14:00:00Z"


def test_what_stands_in_the_way_is_named_with_why_and_what_to_do():
    seen = look(
        stream(1),
        stream(2, 100),
        stream(3, 700, delivered_until=None),
        stream(4, 5, delivered_until=NOW - 1),
        says=live(pauses=[FORBIDDEN]),
        spool=SpoolState(1, 10, 7, None),
    )
    lines = answer(seen, NOW - 30)
    text = "\n".join(lines)
    assert lines[0] == "no: it is not known that everything that was written up to 2026-10-20T13:59:30Z is settled"
    assert "  standard input: 7 B to go" in lines
    assert "  2 inputs stand in the way:" in lines
    assert [line.rpartition("/log/")[2] for line in lines if "/log/" in line] == ["3", "2"]
    assert "paused since 13:58:20Z (forbidden): HTTP 403: no" in text
    assert "what to do: have it checked" in text


def test_only_so_many_inputs_are_named_unless_all_are_asked_for():
    seen = look(*(stream(n, n) for n in range(1, 31)))
    few, all_of_them = (answer(seen, NOW, limit) for limit in (20, None))
    assert sum("/log/" in line for line in few) == 20
    assert "  ... and 10 more" in few
    assert sum("/log/" in line for line in all_of_them) == 30


@pytest.mark.parametrize("process_id", [7, None])
def test_files_that_were_named_to_a_backfill_that_has_not_got_to_them_stand_in_the_way(process_id: int | None):
    seen = look(stream(), process_id=process_id, says=live(command="backfill", total_bytes=5))
    assert not seen.is_delivered(NOW - 1e6)
    assert "not all files are read to the end" in "\n".join(answer(seen, NOW - 1e6))


@pytest.mark.parametrize(("until", "is_delivered"), [(NOW - 61, True), (NOW, False)])
def test_what_is_lost_is_told_whatever_the_answer_is(until: float, is_delivered: bool):
    lost: dict[str, Any] = {"unreachable": [UnreachableInput(2, "/log/2", 300, NOW)], "unreachable_bytes": 300}
    seen = look(stream(1), stream(2, 300), **lost)
    assert seen.is_delivered(until) is is_delivered
    assert "unreachable: 300 B of 1 input, gone before they were read" in answer(seen, until)
