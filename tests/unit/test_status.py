"""`shipper status` for people: the sentence at the top, the figures, the table of inputs, the line for logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from shipper.cli.status.rendering import compact, figures, headline, remains, report, stream_lines, stream_table
from shipper.cli.status.watching import view
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
    usual = {
        "stream_id": number,
        "path": f"/log/{number}",
        "size": 1000,
        "checkpoint": 1000 - lag,
        "lag_bytes": lag,
        "compression": "",
        "updated_at": NOW,
        "delivered_until": NOW - 60 if lag else NOW,
    }
    return StreamState(**{**usual, **fields})


def look(*streams: StreamState, process_id: int | None = 7, says: Live | None = None, **fields: Any) -> Snapshot:
    usual = {"read": 10, "accepted": 7, "dead_lettered": 2, "duplicates": 1, "spool": SpoolState(delivered_until=NOW)}
    overview = Overview(at=NOW, streams=sorted(streams, key=lambda each: -each.lag_bytes), **{**usual, **fields})
    return Snapshot(at=NOW, process_id=process_id, live=says, state=overview)


def test_where_all_is_well_the_first_sentence_says_until_when_everything_is_delivered():
    assert headline(look(stream(1), stream(2), says=live())) == [
        "running since 12:00:00Z (run, process 7); everything that was written until 14:00:00Z is delivered"
    ]
    (line,) = headline(look(stream(1), stream(2, 5), says=live()))
    assert line.endswith("everything that was written until 13:59:00Z is delivered")


def test_records_that_were_refused_are_excepted_in_the_first_sentence_and_its_colour():
    def drawn_in(seen: Snapshot) -> str:
        return str(view(seen, 80, 24).renderables[0].style)

    for count, words in ((1, "1 dead letter"), (1200, "1,200 dead letters")):
        refused = look(stream(1), says=live(), dead_letters={"ip": count})
        (line,) = headline(refused)
        assert line.endswith(f"; everything that was written until 14:00:00Z is delivered, but for {words}")
        assert drawn_in(refused) == "yellow"
    gone = look(stream(1), says=live(), dead_letters={"ip": 1}, unreachable_bytes=5)
    assert headline(gone)[0].endswith("but for 5 B that were gone before they were read and 1 dead letter")
    assert drawn_in(look(stream(1), says=live())) == "green"
    assert drawn_in(look(stream(1), says=live(pauses=[FORBIDDEN]), dead_letters={"ip": 1})) == "red"


OPEN = live(lag_bytes=10)


def test_a_last_line_that_has_no_end_is_told_as_what_it_is():
    (line,) = headline(look(stream(1, 10), says=OPEN))
    assert line.endswith("; everything up to the last whole line is delivered; 10 B are a line that has no end yet")
    (line,) = headline(look(stream(1, 10), says=OPEN, dead_letters={"ip": 2}))
    assert line.endswith("is delivered, but for 2 dead letters; 10 B are a line that has no end yet")


@each(
    "changes",
    [
        {"pending": 1},
        {"settled_bytes_per_second": 1.0},
        {"oldest_unsettled_seconds": 0.0},
        {"pauses": [FORBIDDEN]},
        {"phase": "draining"},
        {"started_at": NOW - 9},
        {"lag_bytes": 9},
        {"lag_bytes": 11},
    ],
)
def test_what_waits_for_another_reason_is_not_taken_for_a_line_without_an_end(changes: dict[str, Any]):
    assert "whole line" not in "".join(headline(look(stream(1, 10), says=replace(OPEN, **changes))))
    for others in ({"process_id": None}, {"unreachable_bytes": 1}):
        assert "whole line" not in "".join(headline(look(stream(1, 10), says=OPEN, **others)))


def test_which_shipper_it_is_and_what_became_of_its_settings_is_told():
    says = live(destination="https://intake.example", reload_error="[log] level: no", restart_needed=["a.b", "c.d"])
    lines = report(look(stream(), says=says), Path("/state"))
    assert lines[lines.index("") + 1] == "state: /state; ships to: https://intake.example"
    assert "The settings could not be read again, and stay as they were: [log] level: no." in lines
    assert "Settings that changed, and take effect at the next start: a.b, c.d." in lines
    assert not any("ettings" in line for line in report(look(stream(), says=live()), Path("/state")))
    assert not any("ettings" in line for line in report(look(stream(), process_id=None, says=says), Path("/state")))


def test_a_report_has_paragraphs():
    text = "\n".join(report(look(stream(), says=live()), Path("/state")))
    begins = [each.split(" ")[0] for each in text.split("\n\n")]
    assert begins == ["running", "state:", "inputs:", "dead"]


def test_a_pause_comes_first_with_what_to_do_about_it():
    lines = headline(look(stream(1, 5), says=live(pauses=[FORBIDDEN])))
    assert lines[:2] == [
        "paused since 13:58:20Z (forbidden): HTTP 403: no; tried again at 14:00:20Z",
        "  what to do: have it checked",
    ]
    assert lines[2].startswith("running since 12:00:00Z")


@each(
    ("says", "words"),
    [
        (None, "no shipper is running; everything"),
        (live(phase="stopped", outcome="drained", at=NOW - 3 * 3600), "the last one (run) ended 3 h ago: drained"),
        (live(phase="stopped", outcome="finished", at=NOW - 5), "ended 5 s ago: finished: the input was read to its"),
        (live(phase="stopped", outcome="of tomorrow"), "ended 0 s ago: of tomorrow"),
        (live(at=NOW - 600), "(run, process 7) was killed: it was last heard of 10 min ago"),
    ],
)
def test_of_a_shipper_that_does_not_run_its_end_is_told(says: Live | None, words: str):
    (line,) = headline(look(stream(), process_id=None, says=says))
    assert line.startswith("no shipper is running")
    assert words in line


def test_what_a_shipper_that_has_ended_paused_for_is_still_told():
    says = live(phase="stopped", outcome="gave_up", pauses=[FORBIDDEN])
    lines = headline(look(stream(1, 5), process_id=None, says=says))
    assert lines[1:] == [
        "at its end it was paused since 13:58:20Z (forbidden): HTTP 403: no",
        "  what to do: have it checked",
    ]


def test_what_another_process_says_is_not_taken_for_that_of_the_one_that_runs():
    seen = look(stream(1, 500), process_id=8, says=live(settled_bytes_per_second=10.0, pauses=[FORBIDDEN]))
    (line,) = headline(seen)
    assert line.startswith("process 8 is running, and has not reported yet")
    assert seen.bytes_per_second == 0
    assert "rate" not in "".join(figures(seen))


def test_files_that_were_named_and_not_read_yet_are_not_taken_for_delivered():
    for process_id in (7, None):
        seen = look(stream(), process_id=process_id, says=live(command="backfill", total_bytes=500))
        assert "not all files are read to the end" in "".join(headline(seen))
        assert seen.delivered_until is None
    assert look(stream(), says=live(total_bytes=500, input_ended=True)).delivered_until == NOW


def test_bytes_that_are_lost_hold_the_sentence_back_no_more_but_are_named_in_it():
    gone = UnreachableInput(2, "/log/2", 300, NOW - 50)
    seen = look(stream(1), stream(2, 300), says=live(), unreachable=[gone], unreachable_bytes=300)
    (line,) = headline(seen)
    assert line.endswith("until 14:00:00Z is delivered, but for 300 B that were gone before they were read")
    assert seen.delivered_until == NOW - 60
    assert remains(seen)[-2:] == [
        "unreachable: 300 B of 1 input, gone before they were read",
        "  /log/2: 300 B, noticed 2026-10-20T13:59:10Z",
    ]
    assert stream_table(seen.state.behind, seen, limit=9)[1].endswith("/log/2 (gone before it was read)")


def test_without_a_state_or_an_input_it_says_so():
    empty = Snapshot(at=NOW)
    assert headline(empty) == ["no shipper is running; there is no state yet"]
    assert report(empty, Path("/state")) == [*headline(empty), "", "state: /state"]
    assert headline(look(read=0)) == ["process 7 is running, and has not reported yet; nothing was read yet"]
    (line,) = headline(look(stream(1, 5, delivered_until=None), says=live()))
    assert line.endswith("1 input is not delivered to the end, and it is not known until when")
    spool = SpoolState(1, 5000, 1200, None)
    (line,) = headline(look(spool=spool, says=live()))
    assert line.endswith("standard input is not delivered to the end, and it is not known until when")
    (line,) = headline(look(stream(1, 5, delivered_until=None), spool=spool, says=live()))
    assert line.endswith("1 input and standard input are not delivered to the end, and it is not known until when")


def test_the_accounts_hold_with_what_is_pending_in_the_process():
    assert figures(look())[0] == "records: 10 read = 7 accepted + 2 dead-lettered + 1 duplicate"
    assert figures(look(purged=1))[0] == "records: 10 read = 7 accepted + 2 dead-lettered (1 purged) + 1 duplicate"
    assert figures(look(says=live(pending=3)))[0].endswith(
        "13 read = 7 accepted + 2 dead-lettered + 1 duplicate + 3 pending"
    )
    assert "pending" not in figures(look(process_id=None, says=live(pending=3)))[0]


def test_the_rate_is_that_of_the_process_that_runs():
    says = live(
        accepted_per_second=1234.4,
        in_flight=3,
        concurrency_limit=8,
        latency_p50_seconds=0.02,
        latency_p95_seconds=0.0814,
    )
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
def test_an_expiry_is_told_when_it_is_near_or_past(fields: dict[str, float], line: str | None):
    assert figures(look(says=live(**fields)))[2:] == ([line] if line else [])


def test_inputs_are_listed_with_how_long_they_take_as_they_take_turns():
    seen = look(stream(1), stream(2, 100), stream(3, 700), says=live(settled_bytes_per_second=2.0))
    assert stream_lines(seen, limit=20) == [
        "inputs: 3 known, 2 behind: 800 B to go, 6 min at 2 B/s",
        "  delivered until        settled  to go  behind    ETA  input",
        "        13:59:00Z  300 B of 1 kB  700 B    60 s  6 min  /log/3",
        "        13:59:00Z  900 B of 1 kB  100 B    60 s  100 s  /log/2",
        "        14:00:00Z   1 kB of 1 kB    0 B       -      -  /log/1",
    ]


def test_there_is_no_time_to_tell_while_it_is_paused_or_stands_still():
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


def test_what_is_not_known_of_an_input_is_not_made_up():
    archive = stream(3, 0, compression="gzip", delivered_until=None)
    new = stream(0, 1000, path="/log/new", delivered_until=None)
    rows = stream_table([new, archive], look(new, archive, says=live(settled_bytes_per_second=1.0)), limit=9)
    assert rows[1].split()[:2] == ["not", "known"]
    assert rows[1].endswith("/log/new (not looked at yet)")
    assert "1 kB of ?" in rows[2]
    assert rows[2].endswith("?       -       -  /log/3 (gzip)")


def test_nothing_that_a_terminal_would_obey_is_written():
    evil = "/log/\x1b[2J\nx"
    says = live(command="\x1b", pauses=[Pause("\x1b", "\x1b\n", "\x1b", NOW)])
    gone = UnreachableInput(1, evil, 5, NOW)
    seen = look(stream(path=evil), says=says, unreachable=[gone], unreachable_bytes=5, dead_letters={"\x1b": 1})
    text = "\n".join([*report(seen, Path(evil)), compact(seen)])
    assert "\x1b" not in text
    assert text.count("\\x1b[2J x") == 3


def test_the_spool_and_the_dead_letters_are_told_with_the_command_to_look():
    spool = SpoolState(2, 5000, 1200, NOW - 60)
    seen = look(spool=spool, dead_letters={"ip": 1200, "country": 3}, says=live(settled_bytes_per_second=100.0))
    kept = "dead letters: 1,203 kept (ip 1,200, country 3); look at them with: shipper dead-letters list"
    assert remains(seen) == [
        "spool: 2 segments, 5 kB, 1.2 kB to go, 12 s at 100 B/s, delivered until 13:59:00Z",
        kept,
    ]
    assert remains(seen, " --config 'a b'")[1] == f"{kept} --config 'a b'"
    assert remains(look(spool=replace(spool, segments=1)))[0].startswith("spool: 1 segment, ")
    assert remains(look()) == ["dead letters: 0 kept"], "there is no spool"


def test_a_line_for_a_log_holds_what_matters():
    says = live(accepted_per_second=5.0, pending=4, lag_bytes=900, settled_bytes_per_second=9.0)
    assert compact(look(stream(1, 100), says=says, dead_letters={"ip": 2})) == (
        "2026-10-20T14:00:00Z running since 12:00:00Z (run, process 7); everything that was written until 13:59:00Z is "
        "delivered, but for 2 dead letters; Delivering, 900 B behind, about 100 s to go; 5 records/s accepted, "
        "0 of 0 requests in flight; 4 pending; "
        "900 B to go, 100 s at 9 B/s; 2 dead letters kept"
    )
    paused = compact(look(stream(1, 100), says=live(pauses=[FORBIDDEN])))
    assert "paused since 13:58:20Z (forbidden): HTTP 403: no" in paused
    assert "what to do: have it checked" in paused
    assert "\n" not in paused
    assert compact(Snapshot(at=NOW)).startswith("2026-10-20T14:00:00Z no shipper is running; there is no state yet")


def drawn(seen: Snapshot, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view(seen, width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (200, 15)])
def test_what_is_drawn_fills_a_terminal_and_fits_it(width: int, height: int):
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


def test_a_moment_names_its_day_unless_that_is_today():
    assert moment(NOW - 3600, NOW) == "13:00:00Z"
    assert moment(NOW - 86_400, NOW) == "2026-10-19T14:00:00Z"
    assert iso(NOW + 0.999) == "2026-10-20T14:00:00Z", "no later than it was"
    for absurd in (1e300, -1e300, float("nan"), float("inf")):
        assert iso(absurd) == moment(absurd, NOW) == "at no time"


def test_nobody_is_hurt_by_a_snapshot_that_says_absurd_things():
    says = live(at=-1e300, started_at=1e300, lag_bytes=-5, settled_bytes_per_second=1e-300, token_expires_at=-1e300)
    for process_id in (7, None):
        seen = look(stream(1, 5), process_id=process_id, says=says)
        assert report(seen, Path("/state"))
        assert compact(seen)
    assert msgspec.json.encode(says)
