"""Odd records are sent as the rules say or become dead letters unchanged, and affect no other record."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, changed
from tests.e2e.fake_service import FakeService, Reply, events_of

REFUSED = b"refuse this one"
ONE_SENDER = {"delivery.concurrency": 1}


@pytest.fixture
def shipper(shipper: Shipper, fake: FakeService) -> Shipper:
    shipper.target = fake.target
    return shipper


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
    result = shipper.pipe(b"".join(lines), settings={**ONE_SENDER, "records.unknown_fields": "keep"})
    assert result.returncode == 3, result.stderr
    assert result.counts() == (10, 5, 5, 0, 0)
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == odd


# Repeated fields ------------------------------------------------------------------------------------------------------


def repeating(line: bytes) -> bytes:
    """Return a record with another address and EventId before the correct ones."""
    return b'{"\\u0049P":"garbage", "EventId" : "00000000-0000-4000-8000-000000000000",' + line.lstrip(b"{")


FORMS = {"lines": b"", "array": b"["}


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_field_is_sent_once_with_its_last_value(
    shipper: Shipper, fake: FakeService, sample: Sample, form: str
):
    lines = [repeating(line) if number % 2 else line for number, line in enumerate(sample.lines[:20])]
    data = b"".join(lines) if form == "lines" else b"[" + b",".join(lines) + b"]"
    assert shipper.pipe(data).counts() == (20, 20, 0, 0, 0)
    (body,) = fake.stored
    assert (body.count(b'"EventId"'), body.count(b'"IP"'), body.count(b"garbage")) == (20, 20, 0)
    assert events_of(body) == [json.loads(line) for line in sample.lines[:20]]


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_field_is_refused_in_strict_mode_and_replayed_in_normal_mode(
    shipper: Shipper, fake: FakeService, sample: Sample, form: str
):
    lines = [repeating(line) if number % 2 else line for number, line in enumerate(sample.lines[:20])]
    path = shipper.folder / "events.json"
    path.write_bytes(b"".join(lines) if form == "lines" else b"[" + b",".join(lines) + b"]")
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

BY_STATUS = [400, 409, 422, 413]


def named(fake: FakeService) -> Callable[[], Reply]:
    """Return a successful answer that lists the events with a certain user name as refused."""

    def reply() -> Reply:
        events = events_of(fake.bodies[-1])
        guilty = [event["EventId"] for event in events if event["Username"] == REFUSED.decode()]
        rejected = [{"EventId": event_id, "message": "no"} for event_id in guilty]
        answer = {"accepted": len(events) - len(guilty), "duplicates": 0, "rejected": rejected}
        return Reply(body=json.dumps(answer).encode())

    return reply


def corrected_ids(fake: FakeService) -> list[str]:
    """Return the events stored by the service, without those it listed as refused."""
    return [
        str(event["EventId"])
        for body in fake.stored
        for event in events_of(body)
        if event["Username"] != REFUSED.decode()
    ]


@pytest.mark.parametrize("status", [*BY_STATUS, 202])
def test_a_corrected_record_is_sent_after_a_refused_one_with_the_same_event_id(
    shipper: Shipper, fake: FakeService, sample: Sample, status: int
):
    fake.default = refusing(fake, status) if status != 202 else named(fake)
    good, others = sample.lines[0], sample.lines[1:10]
    bad = refused(good)
    lines = [bad, *others, good, bad, good]  # the last one repeats an accepted record, and so does the other
    result = shipper.pipe(b"".join(lines), settings=ONE_SENDER)
    assert (result.returncode, result.counts()) == (3, (13, 10, 1, 2, 0))
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == [bad]
    assert sorted(corrected_ids(fake)) == sorted(sample.ids[:10])


def test_records_with_one_event_id_are_sent_until_one_is_accepted(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = refusing(fake)
    bad = [refused(sample.lines[0], ConsumerID=number) for number in range(1, 6)]
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join([*bad[:3], sample.lines[0], *bad[3:], sample.lines[1]]))
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
    path = shipper.folder / "events.json"
    path.write_bytes(b"[" + spread + b",\n" + broken + b"]")
    assert shipper.backfill(path).counts() == (2, 1, 1, 0, 0)
    assert fake.event_ids() == sample.ids[:1]
    assert [(letter.rule, letter.raw) for letter in shipper.read_state().dead_letters] == [("json", broken)]
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (1, 0, 1, 0, 0)
    fake.default = Reply(status=422, body=b"no")
    other = json.dumps(json.loads(sample.lines[2]), indent=1).encode()
    (shipper.folder / "other.json").write_bytes(b"[" + other + b"]")
    assert shipper.backfill(shipper.folder / "other.json").counts() == (1, 0, 1, 0, 0)
    fake.default = Reply()
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (2, 1, 1, 0, 0)
