"""`shipper status` for people: the first sentence, figures, inputs, the one-line form, and --until."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from msgspec.structs import replace
from rich.console import Console

from shipper.cli.common import parse_time
from shipper.cli.status import view
from shipper.cli.status.text import (
    answer_until,
    figures,
    first_lines,
    group_lines,
    one_line,
    report,
    storage_lines,
    stream_lines,
    stream_table,
)
from shipper.kafka.offsets import GroupStatus
from shipper.model.group import PartitionState
from shipper.model.units import iso, moment, size, span
from shipper.status.live import Live, Pause
from shipper.status.overview import Overview, SpoolState, StreamState, UnreachableInput
from shipper.status.snapshot import Snapshot
from tests.cases import each

NOW = 1_792_504_800.0  # 2026-10-20T14:00:00Z
FORBIDDEN = Pause("forbidden", "HTTP 403: no", "have it checked", NOW - 100, NOW + 20)


def live(**fields: Any) -> Live:
    usual = {"version": "1", "process_id": 7, "command": "run", "phase": "running", "started_at": NOW - 7200, "at": NOW}
    return Live(**{**usual, **fields})


def stream(number: int = 1, lag: int = 0, **fields: Any) -> StreamState:
    usual = StreamState(number, f"/log/{number}", 1000, 1000 - lag, lag, "", NOW, NOW - 60 if lag else NOW)
    return replace(usual, **fields)


def look(*streams: StreamState, process_id: int | None = 7, says: Live | None = None, **fields: Any) -> Snapshot:
    usual = {"read": 10, "accepted": 7, "dead_lettered": 2, "duplicates": 1, "spool": SpoolState(delivered_until=NOW)}
    overview = Overview(at=NOW, streams=sorted(streams, key=lambda each: -each.lag_bytes), **{**usual, **fields})
    return Snapshot(at=NOW, process_id=process_id, live=says, state=overview)


def test_without_problems_the_first_sentence_says_until_when_everything_is_delivered():
    assert first_lines(look(stream(1), stream(2), says=live())) == [
        "running since 12:00:00Z (run, process 7); everything written until 14:00:00Z is delivered"
    ]
    (line,) = first_lines(look(stream(1), stream(2, 5), says=live()))
    assert line.endswith("everything written until 13:59:00Z is delivered")


def test_refused_records_change_the_first_sentence_and_its_colour():
    def drawn_in(seen: Snapshot) -> str:
        return str(view(seen, 80, 24).renderables[0].style)

    for count, words in ((1, "1 dead letter"), (1200, "1,200 dead letters")):
        refused = look(stream(1), says=live(), dead_letters={"ip": count})
        (line,) = first_lines(refused)
        assert line.endswith(f"; everything written until 14:00:00Z is delivered, except {words}")
        assert drawn_in(refused) == "yellow"
    gone = look(stream(1), says=live(), dead_letters={"ip": 1}, unreachable_bytes=5)
    assert first_lines(gone)[0].endswith("except 5 B that were gone before they were read and 1 dead letter")
    assert drawn_in(look(stream(1), says=live())) == "green"
    assert drawn_in(look(stream(1), says=live(pauses=[FORBIDDEN]), dead_letters={"ip": 1})) == "red"


@each(
    "changes",
    [
        *({"pending": 1}, {"settled_bytes_per_second": 1.0}, {"oldest_unsettled_seconds": 0.0}, {"phase": "draining"}),
        *({"pauses": [FORBIDDEN]}, {"started_at": NOW - 9}, {"lag_bytes": 9}, {"lag_bytes": 11}),
    ],
)
def test_other_waiting_data_is_not_reported_as_an_incomplete_line(changes: dict[str, Any]):
    says = live(lag_bytes=10)
    assert look(stream(1, 10), says=says).open_line_bytes == 10
    assert look(stream(1, 10), says=replace(says, **changes)).open_line_bytes == 0
    for others in ({"process_id": None}, {"unreachable_bytes": 1}):
        assert look(stream(1, 10), says=says, **others).open_line_bytes == 0


def test_the_process_and_its_reloaded_settings_are_described():
    says = live(destination="https://intake.example", reload_error="[log] level: no", restart_needed=["a.b", "c.d"])
    lines = report(look(stream(), says=says), Path("/state"))
    assert lines[lines.index("") + 1] == "state: /state; ships to: https://intake.example"
    assert "The settings could not be reloaded, and are unchanged: [log] level: no." in lines
    assert "Changed settings that take effect at the next start: a.b, c.d." in lines
    paragraphs = "\n".join(lines).split("\n\n")
    assert [paragraph.split(" ")[0] for paragraph in paragraphs] == ["running", "state:", "inputs:", "dead"]
    assert not any("ettings" in line for line in report(look(stream(), says=live()), Path("/state")))
    assert not any("ettings" in line for line in report(look(stream(), process_id=None, says=says), Path("/state")))


def test_a_running_shipper_that_no_longer_reports_is_pointed_out_first():
    """As on a full disk, where it cannot store the pause either."""
    seen = look(stream(1, 5), says=live(at=NOW - 90, accepted_per_second=750.0, pending=3))
    lines = first_lines(seen)
    assert lines[0].startswith("Process 7 has not reported for 90 s: it hangs, or cannot write to its state")
    assert "shipper retry" in lines[1]
    assert lines[2].startswith("running since 12:00:00Z")
    assert len(lines) == 3, "what it last said about its progress is not shown"
    assert lines[0] in answer_until(seen, NOW)
    assert lines[0] in one_line(seen)
    for says in (live(at=NOW - 50), live(at=NOW + 90)):
        assert "has not reported" not in one_line(look(stream(1, 5), says=says))
    assert "has not reported" not in one_line(look(stream(1, 5), process_id=None, says=live(at=NOW - 90)))


def test_a_pause_comes_first_with_what_to_do_about_it():
    lines = first_lines(look(stream(1, 5), says=live(pauses=[FORBIDDEN])))
    assert lines[:2] == [
        "paused since 13:58:20Z (forbidden): HTTP 403: no; next attempt at 14:00:20Z",
        "  what to do: have it checked",
    ]
    assert lines[2].startswith("running since 12:00:00Z")
    line, *_ = first_lines(look(stream(1, 5), says=live(phase="draining")))
    assert line.startswith("draining (no longer reading), running since 12:00:00Z"), "not draining since its start"


@each(
    ("says", "words"),
    [
        (None, "no shipper is running; everything"),
        (live(phase="stopped", outcome="drained", at=NOW - 3 * 3600), "the last one (run) ended 3 h ago: drained"),
        (live(phase="stopped", outcome="finished", at=NOW - 5), "ended 5 s ago: finished: the input was read to its"),
        (live(phase="stopped", outcome="of tomorrow"), "ended 0 s ago: of tomorrow"),
        (live(at=NOW - 600), "(run, process 7) was killed: its last report was 10 min ago"),
    ],
)
def test_the_end_of_a_stopped_shipper_is_described(says: Live | None, words: str):
    (line,) = first_lines(look(stream(), process_id=None, says=says))
    assert line.startswith("no shipper is running")
    assert words in line


def test_the_pause_of_an_ended_shipper_is_still_shown():
    says = live(phase="stopped", outcome="gave_up", pauses=[FORBIDDEN])
    lines = first_lines(look(stream(1, 5), process_id=None, says=says))
    assert lines[1:] == [
        "at its end: paused since 13:58:20Z (forbidden): HTTP 403: no",
        "  what to do: have it checked",
    ]


def test_a_snapshot_of_another_process_is_ignored():
    seen = look(stream(1, 500), process_id=8, says=live(settled_bytes_per_second=10.0, pauses=[FORBIDDEN]))
    (line,) = first_lines(seen)
    assert line.startswith("process 8 is running, but has not reported yet")
    assert seen.bytes_per_second == 0
    assert "rate" not in "".join(figures(seen))


def test_unread_files_are_not_reported_as_delivered():
    for process_id in (7, None):
        seen = look(stream(), process_id=process_id, says=live(command="backfill", total_bytes=500))
        assert "not all files have been read to the end" in "".join(first_lines(seen))
        assert "not all files have been read to the end" in "".join(answer_until(seen, NOW - 1e6))
        assert not seen.is_delivered(NOW - 1e6)
        assert seen.delivered_until is None
        assert look(stream(), process_id=process_id, says=live(has_unopened=True)).delivered_until is None
    assert look(stream(), says=live(total_bytes=500, input_ended=True)).delivered_until == NOW


def test_lost_bytes_do_not_delay_delivery_but_are_named():
    gone = UnreachableInput(2, "/log/2", 300, NOW - 50)
    seen = look(stream(1), stream(2, 300), says=live(), unreachable=[gone], unreachable_bytes=300)
    (line,) = first_lines(seen)
    assert line.endswith("until 14:00:00Z is delivered, except 300 B that were gone before they were read")
    assert seen.delivered_until == NOW - 60
    assert storage_lines(seen)[-2:] == [
        "unreachable: 300 B of 1 input, gone before they were read",
        "  /log/2: 300 B, noticed 2026-10-20T13:59:10Z",
    ]
    assert stream_table(seen.state.behind, seen, limit=9)[1].endswith("/log/2 (gone before it was read)")


def test_unknown_or_missing_delivery_is_reported():
    assert first_lines(Snapshot(at=NOW)) == ["no shipper is running; nothing has been read yet"]
    assert first_lines(look(read=0)) == ["process 7 is running, but has not reported yet; nothing has been read yet"]
    unknown, spool = stream(1, 5, delivered_until=None), SpoolState(1, 5000, 1200, None)
    for seen, words in (
        (look(unknown, says=live()), "1 input is"),
        (look(spool=spool, says=live()), "standard input is"),
        (look(unknown, spool=spool, says=live()), "1 input and standard input are"),
    ):
        (line,) = first_lines(seen)
        assert line.endswith(f"; {words} behind, since an unknown time")


def test_the_totals_add_up_with_records_pending_in_the_process():
    assert figures(look())[0] == "records: 10 read = 7 accepted + 2 dead-lettered + 1 duplicate"
    assert figures(look(purged=1))[0] == "records: 10 read = 7 accepted + 2 dead-lettered (1 purged) + 1 duplicate"
    pending = live(pending=1, ever_read=13)
    assert figures(look(says=pending))[0].endswith("13 read = 7 accepted + 2 dead-lettered + 1 duplicate + 3 pending")
    # They were saved after the process took its snapshot.
    assert figures(look(says=pending, read=13, accepted=10))[0] == (
        "records: 13 read = 10 accepted + 2 dead-lettered + 1 duplicate"
    )
    assert "pending" not in figures(look(says=pending, read=14, accepted=11))[0]
    assert "pending" not in figures(look(process_id=None, says=live(pending=3)))[0]


def test_the_rate_is_that_of_the_running_process():
    latency = {"latency_p50_seconds": 0.02, "latency_p95_seconds": 0.0814}
    says = live(accepted_per_second=1234.4, in_flight=3, concurrency_limit=8, **latency)
    assert figures(look(says=says))[1] == (
        "rate: 1,234 records/s accepted, 3 of 8 requests in flight, latency 20 ms (95 %: 81 ms)"
    )
    assert len(figures(look(process_id=None, says=says))) == 1


@each(
    ("fields", "line"),
    [
        ({"token_expires_at": NOW + 301}, None),
        ({"token_expires_at": NOW + 299}, "token: expires in 4 min, 2026-10-20T14:04:59Z"),
        ({"token_expires_at": NOW - 180}, "token: expired 3 min ago, 2026-10-20T13:57:00Z"),
        ({"certificate_expires_at": NOW + 8 * 86_400}, None),
        ({"certificate_expires_at": NOW + 6 * 86_400 + 5}, "certificate: expires in 6 days, 2026-10-26T14:00:05Z"),
    ],
)
def test_a_near_or_past_expiry_is_shown(fields: dict[str, float], line: str | None):
    assert figures(look(says=live(**fields)))[2:] == ([line] if line else [])


def test_inputs_are_listed_with_estimates_that_consider_their_turns():
    seen = look(stream(1), stream(2, 100), stream(3, 700), says=live(settled_bytes_per_second=2.0))
    assert stream_lines(seen, limit=20) == [
        "inputs: 3 known, 2 behind: 800 B to go, 6 min at 2 B/s",
        "  delivered until        settled  to go  behind    ETA  input",
        "        13:59:00Z  300 B of 1 kB  700 B    60 s  6 min  /log/3",
        "        13:59:00Z  900 B of 1 kB  100 B    60 s  100 s  /log/2",
        "        14:00:00Z   1 kB of 1 kB    0 B       -      -  /log/1",
    ]


def test_there_is_no_estimate_while_paused_or_without_progress():
    for says in (live(settled_bytes_per_second=2.0, pauses=[FORBIDDEN]), live()):
        lines = stream_lines(look(stream(2, 100), says=says), limit=20)
        assert lines[0] == "inputs: 1 known, 1 behind: 100 B to go"
        assert lines[2].split() == ["13:59:00Z", *("900", "B", "of", "1", "kB"), "100", "B", "60", "s", "-", "/log/2"]


def test_beyond_the_limit_inputs_are_counted():
    seen = look(*(stream(n, n) for n in range(1, 26)))
    lines = stream_lines(seen, limit=20)
    assert [line.rpartition("/")[2] for line in lines[2:-1]] == [str(n) for n in range(25, 5, -1)]
    assert lines[-1] == "  ... and 5 more"
    assert len(stream_lines(seen, limit=None)) == 27


def test_unknown_values_of_an_input_are_not_invented():
    archive = stream(3, 0, compression="gzip", delivered_until=None)
    new = stream(0, 1000, path="/log/new", delivered_until=None)
    rows = stream_table([new, archive], look(new, archive, says=live(settled_bytes_per_second=1.0)), limit=9)
    assert rows[1].split()[:2] == ["not", "known"]
    assert rows[1].endswith("/log/new (not examined yet)")
    assert "1 kB of ?" in rows[2]
    assert rows[2].endswith("?       -       -  /log/3 (gzip)")


def test_no_control_sequence_is_written():
    evil = "/log/\x1b[2J\nx"
    says = live(command="\x1b", pauses=[Pause("\x1b", "\x1b\n", "\x1b", NOW)])
    gone = UnreachableInput(1, evil, 5, NOW)
    seen = look(stream(path=evil), says=says, unreachable=[gone], unreachable_bytes=5, dead_letters={"\x1b": 1})
    text = "\n".join([*report(seen, Path(evil)), one_line(seen)])
    assert "\x1b" not in text
    assert text.count("\\x1b[2J x") == 3


def test_the_spool_and_the_dead_letters_are_shown_with_the_command_to_inspect_them():
    spool = SpoolState(2, 5000, 1200, NOW - 60)
    seen = look(spool=spool, dead_letters={"ip": 1200, "country": 3}, says=live(settled_bytes_per_second=100.0))
    kept = "dead letters: 1,203 kept (ip 1,200, country 3); list them with: shipper dead-letters list"
    assert storage_lines(seen) == [
        "spool: 2 segments, 5 kB, 1.2 kB to go, 12 s at 100 B/s, delivered until 13:59:00Z",
        kept,
    ]
    assert storage_lines(seen, " --config 'a b'")[1] == f"{kept} --config 'a b'"
    assert storage_lines(look(spool=replace(spool, segments=1)))[0].startswith("spool: 1 segment, ")
    assert storage_lines(look()) == ["dead letters: 0 kept"], "there is no spool"


def test_the_one_line_status_has_the_key_figures():
    says = live(accepted_per_second=5.0, pending=4, lag_bytes=900, settled_bytes_per_second=9.0)
    assert one_line(look(stream(1, 100), says=says, dead_letters={"ip": 2})) == (
        "2026-10-20T14:00:00Z running since 12:00:00Z (run, process 7); everything written until 13:59:00Z is "
        "delivered, except 2 dead letters; Delivering, 900 B behind, about 100 s to go; 5 records/s accepted, "
        "0 of 0 requests in flight; 4 pending; "
        "900 B to go, 100 s at 9 B/s; 2 dead letters kept"
    )
    paused = one_line(look(stream(1, 100), says=live(pauses=[FORBIDDEN])))
    assert "paused since 13:58:20Z (forbidden): HTTP 403: no" in paused
    assert "what to do: have it checked" in paused
    assert "\n" not in paused
    assert one_line(Snapshot(at=NOW)).startswith(
        "2026-10-20T14:00:00Z no shipper is running; nothing has been read yet"
    )


def drawn(seen: Snapshot, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view(seen, width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (200, 15)])
def test_the_display_fills_and_fits_a_terminal(width: int, height: int):
    seen = look(*(stream(n, n, path=f"/log/{n:03}-" + "x" * 300) for n in range(1, 100)), says=live(pauses=[FORBIDDEN]))
    lines = drawn(seen, width, height)
    assert len(lines) < height
    assert len(lines) >= height - 2 or sum("/log/" in line for line in lines) == 20
    assert max(map(len, lines)) <= width
    assert sum("/log/" in line for line in lines) == sum("xx" in line for line in lines) > 3, "a row is one line"


def test_a_small_terminal_still_shows_the_input_that_is_most_behind():
    lines = drawn(look(stream(1, 1), stream(2, 2), says=live()), 70, 3)
    assert [line.rpartition("/log/")[2] for line in lines if "/log/" in line] == ["2"]


@each(
    ("count", "words"),
    [
        *((0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1000, "1 kB"), (1234, "1.23 kB"), (99_960, "100 kB")),
        *((96_500_000, "96.5 MB"), (999_600_000, "1 GB"), (2e18, "2,000 PB"), (-5, "-5 B"), (0.4, "0.4 B")),
    ],
)
def test_bytes_have_three_figures_and_a_unit(count: float, words: str):
    assert size(count) == words


@each(
    ("seconds", "words"),
    [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (3e5, "3 days")],
)
def test_a_length_of_time_has_one_unit(seconds: float, words: str):
    assert span(seconds) == words


def test_a_time_includes_its_day_unless_that_is_today():
    assert moment(NOW - 3600, NOW) == "13:00:00Z"
    assert moment(NOW - 86_400, NOW) == "2026-10-19T14:00:00Z"
    assert iso(NOW + 0.999) == "2026-10-20T14:00:00Z", "no later than it was"
    for absurd in (1e300, -1e300, float("nan"), float("inf")):
        assert iso(absurd) == moment(absurd, NOW) == "at no time"


def test_a_snapshot_with_absurd_values_is_shown():
    says = live(at=-1e300, started_at=1e300, lag_bytes=-5, settled_bytes_per_second=1e-300, token_expires_at=-1e300)
    for process_id in (7, None):
        seen = look(stream(1, 5), process_id=process_id, says=says)
        assert report(seen, Path("/state"))
        assert one_line(seen)
    assert msgspec.json.encode(says)


# --until ------------------------------------------------------------------------------------------------------------


@each(
    ("text", "seconds"),
    [
        *((text, NOW) for text in ("now", "2026-10-20T14:00:00Z", "2026-10-20T16:00+02:00", "2026-10-20 14:00")),
        ("2026-10-20T14:00:00.5Z", NOW + 0.5),
        ("2026-10-19", NOW - 14 * 3600),
        ("2026-10-20", NOW + 10 * 3600),
    ],
)
def test_a_time_is_read_as_utc_and_a_date_as_its_end(text: str, seconds: float):
    assert parse_time(text, is_end=True, now=NOW) == seconds


@each("text", ["", "14:00", "yesterday", "2026-13-01", "2026-10-20T25:00Z", "9999-12-31", "1e9", "NOW"])
def test_an_invalid_time_is_refused_with_examples(text: str):
    with pytest.raises(typer.BadParameter, match="is not a time, such as 2026-11-01T12:30:00Z"):
        parse_time(text, is_end=True, now=NOW)


def test_everything_is_delivered_if_each_input_and_the_spool_is():
    seen = look(stream(1), stream(2, 100), spool=SpoolState(1, 10, 5, NOW - 30))
    assert seen.is_delivered(NOW - 60)
    assert answer_until(seen, NOW - 60) == ["yes: everything written up to 2026-10-20T13:59:00Z is delivered"]
    refused = look(stream(1), dead_letters={"ip": 2})
    assert answer_until(refused, NOW) == [
        "yes: everything written up to 2026-10-20T14:00:00Z is delivered, except 2 dead letters"
    ]
    assert not seen.is_delivered(NOW - 59)
    assert look(stream(1), stream(2)).is_delivered(NOW)


@each("until", [NOW, NOW - 30, NOW - 1e9])
def test_an_input_of_unknown_state_is_not_delivered(until: float):
    seen = look(stream(1), stream(2, 100, delivered_until=None))
    assert not seen.is_delivered(until)
    assert [each.stream_id for each in seen.late_streams(until)] == [2]
    assert not look(stream(1), spool=SpoolState(1, 10, 5, None)).is_delivered(until)
    assert not Snapshot(at=NOW).is_delivered(until)
    assert not look(read=0).is_delivered(until), "no inputs are known"


def test_a_future_time_is_not_delivered_and_no_input_is_blamed():
    seen = look(stream(1))
    assert (seen.is_delivered(NOW + 7200), seen.late_streams(NOW + 7200)) == (False, [])
    assert answer_until(seen, NOW + 7200)[1] == "  that is 2 h in the future; it is now 2026-10-20T14:00:00Z"


def test_a_group_that_is_behind_says_where_to_look_or_what_to_start():
    partition = PartitionState(topic="t", partition=3, offset=5, end=12, lag_records=7, delivered_until=NOW - 60)
    usual = GroupStatus(at=NOW, group="g", state="stable", members=2, partitions=[partition], dead_letters=0)
    late = replace(usual, until=NOW - 30, late=["t/3"])
    first, advice, group, *_ = group_lines(late)
    unconfirmed = "no: cannot confirm that everything written up to 2026-10-20T13:59:30Z is settled"
    assert first == f"{unconfirmed}; not confirmed for t/3"
    assert advice == "  if delivery pauses, only the members know why: see their status page, /readyz, or log"
    assert group == "group g: stable, 2 members, 1 partition (1 without a member), 7 records behind"
    first, now, group, *_ = group_lines(replace(late, until=NOW + 7200))
    assert first == "no: cannot confirm that everything written up to 2026-10-20T16:00:00Z is settled"
    assert (now, group[:5]) == ("  that is 2 h in the future; it is now 2026-10-20T14:00:00Z", "group")
    start = "no member is running; to start one: shipper run"
    assert group_lines(replace(late, members=0))[1:3] == [group.replace("stable, 2", "stable, 0"), start]
    assert start not in group_lines(usual)
    advice = "dead letters: 1 kept; list them with: shipper dead-letters list --config a.toml"
    assert advice in group_lines(replace(usual, dead_letters=1), " --config a.toml")
    assert start not in group_lines(replace(usual, members=0, partitions=[replace(partition, lag_records=0)]))


def test_obstacles_are_listed_with_reason_and_advice():
    unknown, late = stream(3, 700, delivered_until=None), stream(4, 5, delivered_until=NOW - 1)
    paused = {"says": live(pauses=[FORBIDDEN]), "spool": SpoolState(1, 10, 7, None)}
    seen = look(stream(1), stream(2, 100), unknown, late, **paused)
    lines = answer_until(seen, NOW - 30)
    text = "\n".join(lines)
    assert lines[0] == "no: cannot confirm that everything written up to 2026-10-20T13:59:30Z is settled"
    assert "  standard input: 7 B to go" in lines
    assert "  2 inputs are not settled up to then:" in lines
    assert [line.rpartition("/log/")[2] for line in lines if "/log/" in line] == ["3", "2"]
    assert "paused since 13:58:20Z (forbidden): HTTP 403: no" in text
    assert "what to do: have it checked" in text


def test_the_number_of_inputs_named_is_limited_by_default():
    seen = look(*(stream(n, n) for n in range(1, 31)))
    few, all_of_them = (answer_until(seen, NOW, limit) for limit in (20, None))
    assert sum("/log/" in line for line in few) == 20
    assert "  ... and 10 more" in few
    assert sum("/log/" in line for line in all_of_them) == 30


@pytest.mark.parametrize(("until", "is_delivered"), [(NOW - 61, True), (NOW, False)])
def test_lost_data_is_reported_with_any_answer(until: float, is_delivered: bool):
    lost: dict[str, Any] = {"unreachable": [UnreachableInput(2, "/log/2", 300, NOW)], "unreachable_bytes": 300}
    seen = look(stream(1), stream(2, 300), **lost)
    assert seen.is_delivered(until) is is_delivered
    assert "unreachable: 300 B of 1 input, gone before they were read" in answer_until(seen, until)
