"""Odd records are sent as the rules say or become dead letters unchanged, and affect no other record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper, changed
from tests.e2e.fake_service import FakeService, Reply, events_of
from tests.e2e.files import log_lines

REFUSED = b"refuse this one"
ONE_SENDER = {"delivery.concurrency": 1}


def refusing(fake: FakeService, status: int = 422) -> Callable[[], Reply]:
    """Return a reply that refuses requests containing a certain user name."""
    return lambda: Reply(status=status, body=b"no") if REFUSED in fake.bodies[-1] else Reply()


def refused(line: bytes, **fields: object) -> bytes:
    return changed(line, Username=REFUSED.decode(), **fields)


def with_unknown(line: bytes, value: bytes) -> bytes:
    return line.rstrip()[:-1] + b',"unknown":' + value + b"}\n"


ODD_VALUES = [
    b"1e400",
    b"-" + b"9" * 5000,
    b'{"EventId":"x","unknown":[1,null,{"ConsumerID":1e999}]}',
    b"[" * 150 + b"]" * 150,
    rb'"\ud83d\udc34 \"EventId\":\"y\""',
]


def test_no_refused_record_ends_the_run(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = refusing(fake)
    odd = [with_unknown(refused(line), value) for line, value in zip(sample.lines, ODD_VALUES, strict=False)]
    good = [with_unknown(line, value) for line, value in zip(sample.lines[10:], ODD_VALUES, strict=False)]
    lines = [line for pair in zip(odd, good, strict=True) for line in pair]
    result = shipper.pipe(*lines, settings={**ONE_SENDER, "records.unknown_fields": "keep"})
    assert result.returncode == 3, result.stderr
    assert result.counts() == (10, 5, 5, 0, 0)
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == odd


# Repeated fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_repeated_field_is_refused_in_strict_mode_and_replayed_in_normal_mode(
    shipper: Shipper, fake: FakeService, sample: Sample, form: str
):
    repeating = b'{"\\u0049P":"garbage", "EventId" : "00000000-0000-4000-8000-000000000000",'
    lines = [repeating + line[1:] if number % 2 else line for number, line in enumerate(sample.lines[:20])]
    path = shipper.write("events.json", b"".join(lines) if form == "lines" else b"[" + b",".join(lines) + b"]")
    strict = {"records.mode": "strict"}
    checked = shipper.run("validate", path, "--format", "json", settings=strict)
    assert (checked.returncode, json.loads(checked.stdout)["rules"]["repeated_key"]["count"]) == (3, 10)
    checked = shipper.run("validate", path, "--format", "json")
    assert (checked.returncode, json.loads(checked.stdout)["normalized"]) == (0, {"repeated_key": 10})
    result = shipper.backfill(path, settings=strict)
    assert result.counts() == (20, 10, 10, 0, 0)
    assert shipper.read_state().rules == ["repeated_key"] * 10
    assert fake.stored[0].count(b"EventId") == 10
    replayed = shipper.run("dead-letters", "replay", "--summary", "json")
    assert replayed.counts() == (10, 10, 0, 0, 0)
    assert (fake.stored[1].count(b"EventId"), b"garbage" in fake.stored[1]) == (10, False)


# Records with the same EventId ----------------------------------------------------------------------------------------


def named(fake: FakeService) -> Callable[[], Reply]:
    """Return a successful answer that lists the events with a certain user name as refused."""

    def reply() -> Reply:
        events = events_of(fake.bodies[-1])
        guilty = [event["EventId"] for event in events if event["Username"] == REFUSED.decode()]
        rejected = [{"EventId": event_id, "message": "no"} for event_id in guilty]
        answer = {"accepted": len(events) - len(guilty), "duplicates": 0, "rejected": rejected}
        return Reply(body=json.dumps(answer).encode())

    return reply


@pytest.mark.parametrize("status", [400, 409, 422, 413, 202])
def test_a_corrected_record_is_sent_after_a_refused_one_with_the_same_event_id(
    shipper: Shipper, fake: FakeService, sample: Sample, status: int
):
    fake.default = refusing(fake, status) if status != 202 else named(fake)
    good, others = sample.lines[0], sample.lines[1:10]
    bad = refused(good)
    lines = [bad, *others, good, bad, good]  # the last one repeats an accepted record, and so does the other
    result = shipper.pipe(*lines, settings=ONE_SENDER)
    assert (result.returncode, result.counts()) == (3, (13, 10, 1, 2, 0))
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == [bad]
    sent = [event for body in fake.stored for event in events_of(body) if event["Username"] != REFUSED.decode()]
    assert sorted(event["EventId"] for event in sent) == sorted(sample.ids[:10])


def test_records_with_one_event_id_are_sent_until_one_is_accepted(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = refusing(fake)
    bad = [refused(sample.lines[0], ConsumerID=number) for number in range(1, 6)]
    path = shipper.write("events.ndjson", *bad[:3], sample.lines[0], *bad[3:], sample.lines[1])
    result = shipper.backfill(path, settings={"delivery.concurrency": 4, "batch.max_events": 2})
    assert result.counts() == (7, 2, 3, 2, 0)
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == bad[:3]
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (3, 0, 3, 0, 0)


def test_a_replay_sends_every_letter_even_several_with_one_event_id(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.default = Reply(status=422, body=b"no")
    bad, good = refused(sample.lines[0]), sample.lines[0]
    for each in (bad, good):
        assert shipper.pipe(each).counts() == (1, 0, 1, 0, 0)
    fake.default = refusing(fake)
    dry = shipper.run("dead-letters", "replay", "--dry-run")
    assert "2 dead letters would be sent, 0 would fail again" in dry.stdout
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (2, 1, 1, 0, 0)
    assert fake.event_ids() == sample.ids[:1]
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == [bad]
    fake.default = Reply()
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (1, 1, 0, 0, 0)
    assert shipper.read_state().dead_letters == ()


# Newlines within records ----------------------------------------------------------------------------------------------


def test_a_newline_within_a_value_is_invalid_and_one_between_values_is_whitespace(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    spread = json.dumps(json.loads(sample.lines[0]), indent=1).encode()
    broken = sample.lines[1].rstrip().replace(b'"Username":"', b'"Username":"x\n')
    path = shipper.write("events.json", b"[" + spread + b",\n" + broken + b"]")
    assert shipper.backfill(path).counts() == (2, 1, 1, 0, 0)
    assert fake.event_ids() == sample.ids[:1]
    assert [(letter.rule, letter.raw) for letter in shipper.read_state().dead_letters] == [("json", broken)]
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (1, 0, 1, 0, 0)
    fake.default = Reply(status=422, body=b"no")
    other = json.dumps(json.loads(sample.lines[2]), indent=1).encode()
    shipper.write("other.json", b"[" + other + b"]")
    assert shipper.backfill(shipper.folder / "other.json").counts() == (1, 0, 1, 0, 0)
    fake.default = Reply()
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (2, 1, 1, 0, 0)


# Records that break a rule ------------------------------------------------------------------------------------------


def test_broken_lines_are_reported_by_validate_and_become_dead_letters_while_other_lines_are_accepted(
    shipper: Shipper, service: Service, sample: Sample
):
    lines = sample.lines[:1000]
    broken = {
        123: ("json", lines[123][:200] + b"\n"),
        500: ("ip", changed(lines[500], IP="256.1.2.3")),
        999: ("btag", changed(lines[999], BTag=...)),
    }
    for index, (_, line) in broken.items():
        lines[index] = line
    file = shipper.write("events.ndjson", *lines)
    for path, stdin, name in ((file, None, str(file)), ("-", file, "standard input")):
        with open(stdin or "/dev/null", "rb") as opened:
            result = shipper.run("validate", path, stdin=opened)
        assert result.returncode == 3
        named = re.findall(rf"^  {re.escape(name)}:(\d+): .*\(byte (\d+)\)$", result.stdout, re.MULTILINE)
        wanted = [(str(index + 1), str(sum(map(len, lines[:index])))) for index in broken]
        assert sorted(named) == sorted(wanted), result.stdout
        assert all(f"{rule}: 1" in result.stdout for rule, _ in broken.values())
    assert service.counts()["requests"] == 0
    assert not shipper.state.exists(), "validate created a state directory"

    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (1000, 997, 3, 0, 0)), "validate moved the checkpoint"
    service.assert_holds_exactly(set(sample.ids[:1000]) - {sample.ids[index] for index in broken})
    letters = shipper.read_state().dead_letters
    starts = {index: sum(map(len, lines[:index])) for index in broken}
    assert [(letter.path, letter.rule, letter.start_offset, letter.end_offset, letter.raw) for letter in letters] == [
        (str(file), rule, starts[index], starts[index] + len(line) - 1, line[:-1])
        for index, (rule, line) in broken.items()
    ]


# The log --------------------------------------------------------------------------------------------------------------


def shipped(shipper: Shipper, command: str, data: bytes, letters: int) -> Result:
    """Ship all the bytes with a command."""
    file = shipper.write("events.ndjson", data)
    if command == "backfill":
        return shipper.backfill(file)
    if command == "pipe":
        return shipper.pipe(data)
    running = shipper.start("run", file)
    running.wait_until(lambda: len(shipper.read_state().dead_letters) == letters, "all letters are saved")
    return running.stop()


@pytest.mark.parametrize("command", ["run", "pipe", "backfill"])
def test_the_warning_about_a_refused_record_contains_none_of_its_values(
    shipper: Shipper, service: Service, sample: Sample, command: str
):
    odd = changed(sample.lines[1], IP="198.51.100.777", ConsumerCountry="Freedonia")
    result = shipped(shipper, command, sample.lines[0] + odd + b"broken\n" + sample.lines[2], letters=2)
    first, second = log_lines(result, "record_refused")
    assert (first["level"], first["rules"], first["offset"]) == ("warning", ["ip", "country"], len(sample.lines[0]))
    assert re.match("IP must be .*; ConsumerCountry must be two letters A-Z", first["message"])
    assert (second["rules"], second["offset"]) == (["json"], len(sample.lines[0] + odd))
    letters = shipper.read_state().dead_letters
    assert [each["path"] for each in (first, second)] == [each.path for each in letters]
    record = json.loads(odd)
    assert not any(str(record[field]) in result.stderr for field in ("IP", "ConsumerCountry", "Username", "EventId"))
    service.assert_holds_exactly([sample.ids[0], sample.ids[2]])


def test_a_run_without_errors_logs_no_warning_and_many_refused_records_cause_few_warnings(
    shipper: Shipper, sample: Sample
):
    assert "warning" not in shipped(shipper, "backfill", b"".join(sample.lines[:300]), letters=0).stderr
    good = shipper.run("validate", "events.ndjson")
    assert (good.returncode, "300 records: 300 good" in good.stdout) == (0, True)
    result = shipped(shipper, "pipe", b"".join(changed(line, IP="x") for line in sample.lines[300:800]), letters=500)
    warnings = log_lines(result, "record_refused")
    assert len(warnings) == 10
    (left_out,) = log_lines(result, "lines_left_out")
    assert left_out["record_refused"] == 500 - len(warnings)


def test_a_dead_letter_refused_again_by_a_rule_is_logged_with_its_id(shipper: Shipper, sample: Sample):
    shipped(
        shipper, "backfill", b"".join([*sample.lines[:3], b"broken\n", changed(sample.lines[3], IP="x")]), letters=2
    )
    replayed = shipper.run("dead-letters", "replay")
    assert [(each["letter"], each["rules"]) for each in log_lines(replayed, "record_refused")] == [
        (1, ["json"]),
        (2, ["ip"]),
    ]
