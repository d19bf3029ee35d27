"""Dead letters are listed, replayed and deleted; and a reached quota."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Result, Service, Shipper, Target, changed, event_ids, wait_until
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.surroundings import csv_of, spooled

REFUSE_ALL = {"records.allowed_statuses": '["None such"]'}
ZERO = (0, 0, 0, 0, 0)


def refuse(
    shipper: Shipper, lines: list[bytes], name: str = "events.ndjson", *, also: Mapping[str, list[bytes]] | None = None
) -> Path:
    """Make dead letters of good lines with a setting that refuses them all."""
    contents = {shipper.folder / each: content for each, content in {name: lines, **(also or {})}.items()}
    for file, content in contents.items():
        file.write_bytes(b"".join(content))
    result = shipper.backfill(*contents, settings=REFUSE_ALL)
    count = sum(map(len, contents.values()))
    assert (result.returncode, result.counts()) == (3, (count, 0, count, 0, 0))
    return shipper.folder / name


def letters(shipper: Shipper, command: str, *arguments: str | Path, **options: Any) -> Result:
    """Run `shipper dead-letters COMMAND`."""
    return shipper.run("dead-letters", command, *arguments, **options)


def leave_in_spool(shipper: Shipper, fake: FakeService, *lines: bytes, **settings: object) -> None:
    """Kill a pipe that waits for the answer to its first request."""
    fake.default = HANG
    asked = fake.requests
    running = shipper.open_pipe(*lines, settings={**QUICK, **settings})
    running.wait_until(lambda: fake.requests > asked, "a request")
    running.kill()
    fake.release()
    fake.default = Reply()


@pytest.mark.parametrize("action", ["delete", "move"])
def test_a_file_with_the_only_copy_of_a_refused_record_is_kept_until_the_letter_is_purged(
    shipper: Shipper, sample: Sample, action: str
):
    file, other = shipper.folder / "a.ndjson", shipper.folder / "b.ndjson"
    file.write_bytes(sample.lines[0] + b"x" * 3_000_000 + b"\n")
    other.write_bytes(sample.lines[1] + b"broken\n")
    settings = {"input.on_complete": action, "input.completed_directory": str(shipper.folder / "done")}
    if action == "delete":
        del settings["input.completed_directory"]
    for number in range(2):
        result = shipper.backfill(file, *[other][number:], settings=settings)
        assert result.counts() == ((4, 2, 2, 0, 0) if number == 0 else ZERO)
        assert file.exists()
        assert result.stderr.count("source_needed") == 1
        assert not other.exists(), "its dead letter contains the record"
    status = shipper.run("status").stdout
    assert "stored without the record: 1 (input.on_complete keeps their files)" in status
    letters(shipper, "purge", "--reason", "oversized", "--yes")
    assert shipper.backfill(file, settings=settings).counts() == ZERO
    assert not file.exists()
    assert (shipper.folder / "done" / "a.ndjson").exists() == (action == "move")


# Replay -------------------------------------------------------------------------------------------------------------


def test_a_replay_sends_the_selected_letters_once_under_the_current_rules(
    shipper: Shipper, service: Service, sample: Sample
):
    broken = [changed(sample.lines[20], BTag="?"), b"broken\n", b"x" * 3_000_000 + b"\n"]
    refuse(shipper, sample.lines[:10], "a.ndjson", also={"b.ndjson": [*sample.lines[10:20], *broken]})
    assert service.stored == 0
    checkpoints = shipper.read_state().checkpoints

    rehearsal = letters(shipper, "replay", "--dry-run")
    assert rehearsal.returncode == 3
    assert "20 dead letters would be sent, 2 would fail again" in rehearsal.stdout
    assert "dead letter 21: " in rehearsal.stdout
    assert "1 dead letter was too long to be stored completely" in rehearsal.stderr
    assert service.counts()["requests"] == 0

    some = ("--path", "*/b.ndjson", "--reason", "status", "--limit", "3")
    result = letters(shipper, "replay", *some, "--summary", "json")
    assert (result.returncode, result.counts()) == (0, (3, 3, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[10:13])
    for none in (["--delivery", "rejected"], ["--since", "2999-01-01"]):
        assert letters(shipper, "list", *none).stdout == "no dead letters match\n"
        for command in (["replay", "--dry-run"], ["replay"], ["export"]):
            result = letters(shipper, *command, *none)
            assert (result.returncode, result.stderr.splitlines()[0]) == (0, "no dead letters match")

    result = letters(shipper, "replay")
    result.assert_ended(3, "17 accepted", "1 dead letter was too long to be stored completely")
    service.assert_holds_exactly(sample.ids[:20])
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered, state.purged) == (23, 20, 3, 0)
    left = [(letter.id, letter.rule, letter.attempts) for letter in state.dead_letters]
    assert left == [(21, "btag", 1), (22, "json", 1), (23, "oversized", 0)]
    again = letters(shipper, "replay", "--summary", "json")
    assert (again.returncode, again.counts()) == (3, (2, 0, 2, 0, 0))
    assert set(service.times_received().values()) == {1}
    assert shipper.read_state().checkpoints == checkpoints

    exported = letters(shipper, "export", "--reason", "oversized")
    assert (exported.returncode, exported.stdout) == (0, "")
    assert "1 dead letter was too long to be stored completely" in exported.stderr
    assert json.loads(letters(shipper, "show", "23", "--format", "json").stdout)["record"] is None
    shown = letters(shipper, "show", "23").stdout
    assert "dead letter 23" in shown
    assert "3,000,0" not in shown


def test_the_replay_after_a_kill_or_stop_sends_what_is_left(shipper: Shipper, fake: FakeService, sample: Sample):
    refuse(shipper, sample.lines[:100])
    fake.plan(*[Reply()] * 4)
    fake.default = HANG
    settings = {"batch.max_events": 10, "delivery.concurrency": 1, "state.commit_interval_seconds": 0.01}
    running = shipper.start("dead-letters", "replay", settings=settings)
    running.wait_until(lambda: shipper.read_state().accepted == 40 and fake.requests == 5, "four batches saved")
    running.kill()
    assert len(shipper.read_state().dead_letters) == 60
    fake.release()
    wait_until(lambda: len(fake.stored) == 5, "the killed replay has no request in flight")

    fake.plan(*[Reply()] * 2)
    fake.default = Reply(status=503)
    settings["delivery.drain_timeout_seconds"] = 0.2
    running = shipper.start("dead-letters", "replay", "--summary", "json", settings=settings)
    running.wait_until(lambda: fake.requests > 8, "the third batch is refused again")
    result = running.stop()
    assert result.returncode == 4
    assert result.counts()[1] == 20
    assert len(shipper.read_state().dead_letters) == 40

    fake.default = Reply()
    sent = fake.requests
    result = letters(shipper, "replay", "--summary", "json", settings=settings)
    assert (result.returncode, result.counts()) == (0, (40, 40, 0, 0, 0))
    assert len(fake.event_ids(fake.bodies[sent:])) == 40
    times = Counter(fake.event_ids())
    assert times.keys() == set(sample.ids[:100])
    assert times.total() == 110, "only the batch in flight at the kill was sent twice"


def test_a_replay_is_refused_while_a_pipe_is_running(shipper: Shipper, sample: Sample):
    refuse(shipper, sample.lines[:3])
    running = shipper.open_pipe()
    running.wait_until(lambda: "" != (shipper.state / "lock").read_text() == f"{running.pid}\n", "the lock")
    result = letters(shipper, "replay", check=False)
    result.assert_ended(5, f"process {running.pid}")
    assert letters(shipper, "purge", "--consumer-id", "1", "--yes", check=False).returncode == 5
    assert letters(shipper, "list", check=False).stdout.count("status") >= 3
    assert len(letters(shipper, "export", check=False).stdout.splitlines()) == 3
    assert "dead letter 2\n" in letters(shipper, "show", "2", check=False).stdout
    assert "3 dead letters would be sent" in letters(shipper, "replay", "--dry-run", check=False).stdout
    running.feed(*sample.lines[10:20])
    running.wait_until(lambda: shipper.read_state().accepted == 10, "events during the replay")
    assert letters(shipper, "purge", "--all", "--yes", check=False).returncode == 0
    assert running.end_input(b"broken\n").returncode == 3
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered, state.purged) == (14, 10, 4, 3)
    told = shipper.run("status").stdout
    assert "records: 14 read = 10 accepted + 4 dead-lettered (3 purged) + 0 duplicates" in told
    assert json.loads(shipper.run("status", "--format", "json").stdout)["state"]["purged"] == 3


# Quota --------------------------------------------------------------------------------------------------------------


def test_the_rest_of_a_pipe_stopped_at_the_quota_is_left_to_the_next_start(
    shipper: Shipper, service: Service, sample: Sample
):
    settings = {"state.dead_letter_max_bytes": 1200, "batch.max_events": 1, "input.format": "ndjson"}
    running = shipper.open_pipe(b"broken\n" * 3 + b"".join(sample.lines[:5]), settings=settings)
    running.wait_for("dead_letters_full")
    last = sample.lines[4]
    running.wait_until(lambda: any(last in content for _, content in spooled(shipper)), "everything is spooled")
    result = running.stop()
    assert (result.returncode, shipper.read_state().dead_lettered) == (4, 2)
    assert result.counts()[4] > 0, "nothing was pending"
    # Records sent while an earlier one had no room are not settled, and are sent again.
    again = shipper.pipe()
    assert (again.returncode, again.counts()[2:]) == (3, (1, 0, 0))
    service.assert_holds_exactly(sample.ids[:5])
    state = shipper.read_state()
    assert (state.read, state.accepted, len(state.dead_letters)) == (8, 5, 3), "each is counted once"
    assert spooled(shipper) == []


# Purge --------------------------------------------------------------------------------------------------------------


def bytes_on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_purge_removes_letters_from_the_disk_and_a_consumer_from_letters_and_spool(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    canary = {"ConsumerID": 777000777, "Username": "canary_bird"}
    refuse(
        shipper,
        [changed(sample.lines[0], **canary), *sample.lines[1:50], b'{"Username":"canary_bird", 777000777\n'],
    )
    leave_in_spool(shipper, fake, changed(sample.lines[60], **canary), sample.lines[61], b"777000777 canary_bird\n")
    assert bytes_on_disk(shipper.state).count(b"canary_bird") >= 4

    result = letters(shipper, "purge", "--consumer-id", "0777000777", "--yes")
    result.assert_ended(
        4,
        "1 dead letter and 1 spooled record erased",
        "2 more records cannot be parsed but contain the number",
        "dead letter 51",
        "byte",
    )
    assert "canary_bird" not in result.stderr
    assert bytes_on_disk(shipper.state).count(b"canary_bird") == 2

    fake.stored.clear()
    assert shipper.pipe().counts() == (2, 1, 1, 0, 0)  # as the message advises
    assert fake.event_ids() == event_ids([sample.lines[61]])
    assert letters(shipper, "purge", "51", "52", "99", "--yes").returncode == 2
    assert "2 dead letters deleted" in letters(shipper, "purge", "51", "52", "--yes").stderr
    again = letters(shipper, "purge", "--consumer-id", "777000777", "--yes")
    again.assert_ended(0, "0 dead letters and 0 spooled records erased")
    assert b"canary_bird" not in bytes_on_disk(shipper.state)
    assert b"777000777" not in bytes_on_disk(shipper.state)
    assert (shipper.read_state().purged, len(shipper.read_state().dead_letters)) == (3, 49)

    name = json.loads(sample.lines[1])["Username"].encode()
    assert name in bytes_on_disk(shipper.state)
    assert "49 dead letters deleted" in letters(shipper, "purge", "--older-than", "0", "--yes").stderr
    assert name not in bytes_on_disk(shipper.state)


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_an_erasure_spares_other_records_that_contain_the_number(
    shipper: Shipper, fake: FakeService, sample: Sample, form: str
):
    """In an address, a time, a brand or a name; with the framing of the segment and the mapping."""
    others = [
        changed(sample.lines[1], ConsumerID=7, IP="192.0.2.11"),
        changed(sample.lines[2], ConsumerID=8, Timestamp="2026-10-01T11:11:11Z"),
        changed(sample.lines[3], ConsumerID=9, BrandID=11),
        changed(sample.lines[4], ConsumerID=10, Username="11", CustomerCurrencyID="11"),
        changed(sample.lines[5], ConsumerID=111),
    ]
    lines = [changed(sample.lines[0], ConsumerID=11, Username="canary_bird"), *others]
    events = [json.loads(line) for line in lines]
    settings = {}
    if form == "csv":
        settings["records.mapping"] = '{ConsumerID="player"}'
        events = [{**event, "player": event["ConsumerID"], "ConsumerID": 11} for event in events]
    data = csv_of(events) if form == "csv" else b"".join(lines)
    leave_in_spool(shipper, fake, data, **settings)
    assert [content for _, content in spooled(shipper)] == [data]
    result = letters(shipper, "purge", "--consumer-id", "11", "--yes", settings=settings)
    result.assert_ended(0, "0 dead letters and 1 spooled record erased")
    assert b"canary_bird" not in bytes_on_disk(shipper.state)
    fake.stored.clear()
    assert shipper.pipe(settings=settings).counts() == (5, 5, 0, 0, 0)
    assert fake.event_ids() == event_ids(others)


# Inspection ---------------------------------------------------------------------------------------------------------


def personal(line: bytes) -> bytes:
    return changed(line, Username="canary_bird", IP="198.51.100.213")


@pytest.fixture(scope="module")
def kept(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipper]:
    """A shipper with 31 dead letters, for read-only tests."""
    nowhere = Target("http://127.0.0.1:9", "no-key", "no-token")
    with Shipper(tmp_path_factory.mktemp("kept") / "shipper", nowhere) as shipper:
        refuse(shipper, [*map(personal, sample.lines[:30]), b"canary_bird\x1b[31m\xff\n"])
        yield shipper


def test_letters_are_listed_without_their_contents(kept: Shipper, sample: Sample):
    file = kept.folder / "events.ndjson"
    first = personal(sample.lines[0])
    listed = letters(kept, "list")
    rows = listed.stdout.splitlines()
    assert rows[0].split() == ["id", "time", "rule", "file:offset", "EventId", "message"]
    assert [int(row.split()[0]) for row in rows[1:21]] == list(range(31, 11, -1))
    assert f"{file}:{len(first)}" not in listed.stdout
    assert rows[-1] == "20 of 31 dead letters: status 30, encoding 1"
    as_json = letters(kept, "list", "--format", "json", "--limit", "100", "--reason", "status")
    documents = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [document["event_id"] for document in documents] == sample.ids[:30][::-1]
    assert documents[-1]["start_offset"] == 0
    for output in (listed.stdout, as_json.stdout, listed.stderr, as_json.stderr):
        assert "canary_bird" not in output
        assert "198.51.100" not in output
    assert letters(kept, "list", "--reason", "ip").stdout == "no dead letters match\n"

    shown = letters(kept, "show", "31", "1").stdout
    assert "canary_bird\\x1b[31m\\xff\n" in shown
    assert first.decode() in shown
    assert shown.index("dead letter 31") < shown.index("dead letter 1\n")
    as_json = letters(kept, "show", "31", "1", "--format", "json").stdout
    last, first_shown = [json.loads(line) for line in as_json.splitlines()]
    assert (last["id"], last["rule"]) == (31, "encoding")
    assert (last["header"], last["record"]) == ("", "canary_bird\x1b[31m\\xff")
    assert first_shown.pop("record") == first.decode().rstrip()
    assert first_shown == documents[-1] | {"header": ""}, "the row in the list"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["purge"], "--all"),
        (["purge", "--all", "--reason", "ip"], "--all cannot be combined with filters"),
        (["purge", "1", "--reason", "ip"], "IDs cannot be combined with filters"),
        (["purge", "1", "99", "--yes"], "no dead letter 99"),
        (["purge", "1"], "Error: --yes is missing, and there is no terminal to ask on: permanently delete 1 dead"),
        (["purge", "--all"], "--yes"),
        (["purge", "--consumer-id", "12x", "--yes"], "whole number"),
        (["purge", "--consumer-id", "12", "--reason", "ip", "--yes"], "cannot be combined with filters"),
        (["list", "--since", "yesterday"], "2026-11-01"),
        (["list", "--delivery", "lost"], "ambiguous"),
        (["list", "--format", "xml"], "json"),
        (["list", "--limit", "0"], "--limit"),
        (["replay", "--dry-run", "--summary", "json"], "--dry-run"),
        (["show", "99"], "no dead letter 99"),
        (["show", "x"], "x"),
    ],
)
def test_invalid_arguments_are_refused(kept: Shipper, arguments: list[str], words: str):
    before = kept.read_state()
    result = letters(kept, *arguments)
    assert result.returncode == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert len(before.dead_letters) == 31
    assert kept.read_state() == before


def test_an_export_returns_the_original_bytes_and_its_reader_may_stop_early(shipper: Shipper, sample: Sample):
    """The output exceeds the capacity of a pipe, so the writer sees that the reader has stopped: no error."""
    lines = [*sample.lines[:1000], b"\xff\xfe\x00{\n", b"\x1b]0;x\x07\n"]
    refuse(shipper, lines)

    def bash(command: str, then: str) -> bytes:
        done = shipper.shell(f"shipper dead-letters {command} {then}")
        assert (done.returncode, done.stderr) == (0, b""), command
        return done.stdout

    bash("export", "> whole")
    assert (shipper.folder / "whole").read_bytes() == b"".join(lines)
    for command, head in (
        ("export", lines[0][:10]),
        ("list --format json --limit 5000", b'{"id":1002'),
        ("show $(seq 1 1000)", b"dead lette"),
    ):
        assert bash(command, "| head -c 10; echo ${PIPESTATUS[0]}") == head + b"0\n", command


def test_exported_csv_rows_can_be_corrected_and_shipped(shipper: Shipper, service: Service, sample: Sample):
    names = list(json.loads(sample.lines[0]))
    table = io.StringIO(newline="")
    rows = csv.DictWriter(table, names, lineterminator="\r\n")
    rows.writeheader()
    for line in sample.lines[:6]:
        rows.writerow(json.loads(line) | {"ConsumerCountry": "GBR", "Username": "two\nlines"})
    (shipper.folder / "a.csv").write_text(table.getvalue(), newline="")
    shipper.write("b.ndjson", b"broken\n" * 2)
    assert shipper.backfill("a.csv", "b.ndjson").counts() == (8, 0, 8, 0, 0)
    both = letters(shipper, "export")
    assert (both.returncode, both.stdout) == (2, "")
    assert "2 forms" in both.stderr
    assert letters(shipper, "export", "--path", "*.ndjson").stdout == "broken\n" * 2
    choices = re.findall(r"--like (\d+)", both.stderr)
    found = [letters(shipper, "export", "--like", choice).stdout.encode() for choice in choices]
    assert sorted(found, key=len) == [b"broken\n" * 2, table.getvalue().encode()]

    done = shipper.shell("shipper dead-letters export --path '*.csv' | sed 's/GBR/GB/' > mended.csv")
    assert done.returncode == 0, done
    assert (shipper.folder / "mended.csv").read_bytes().count(b'"two\nlines"') == 6
    assert shipper.backfill("mended.csv").counts() == (6, 6, 0, 0, 0)
    assert service.holds(sample.ids[:6])


def test_the_commands_show_nothing_without_a_state(shipper: Shipper):
    listed = letters(shipper, "list")
    assert (listed.returncode, listed.stdout) == (0, "no dead letters\n")
    exported = letters(shipper, "export")
    assert (exported.returncode, exported.stdout, exported.stderr) == (0, "", "no dead letters\n")
    assert letters(shipper, "show", "1").returncode == 2
    assert letters(shipper, "purge", "--all", "--yes").stderr == "no dead letters\n"
    assert "nothing is stored" in letters(shipper, "purge", "--consumer-id", "5", "--yes").stderr
    assert letters(shipper, "replay", "--dry-run").returncode == 0
    assert not shipper.state.exists()
    result = letters(shipper, "replay", "--summary", "json")
    assert (result.returncode, result.counts()) == (0, ZERO)
