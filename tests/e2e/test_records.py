"""What is odd about a record: it leaves as the rules say or is a dead letter as it came, and no other one suffers."""

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
    """Refuse each request that holds a certain user name."""
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


def test_no_content_of_a_refused_record_ends_the_run(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = refusing(fake)
    odd = [with_unknown(refused(line), value) for line, value in zip(sample.lines, ODD_VALUES, strict=False)]
    good = [with_unknown(line, value) for line, value in zip(sample.lines[10:], ODD_VALUES, strict=False)]
    lines = [line for pair in zip(odd, good, strict=True) for line in pair]
    result = shipper.pipe(b"".join(lines), settings={**ONE_SENDER, "records.unknown_fields": "keep"})
    assert result.returncode == 3, result.stderr
    assert result.counts() == (10, 5, 5, 0, 0)
    assert [letter.raw + b"\n" for letter in shipper.read_state().dead_letters] == odd


# Fields that are named twice ------------------------------------------------------------------------------------------


def repeating(line: bytes) -> bytes:
    """A record with a second address and a second EventId in front of the good ones."""
    return b'{"\\u0049P":"garbage", "EventId" : "00000000-0000-4000-8000-000000000000",' + line.lstrip(b"{")


FORMS = {"lines": b"", "array": b"["}


@pytest.mark.parametrize("form", FORMS)
def test_a_field_named_twice_leaves_once_with_its_last_value(
    shipper: Shipper, fake: FakeService, sample: Sample, form: str
):
    lines = [repeating(line) if number % 2 else line for number, line in enumerate(sample.lines[:20])]
    data = b"".join(lines) if form == "lines" else b"[" + b",".join(lines) + b"]"
    assert shipper.pipe(data).counts() == (20, 20, 0, 0, 0)
    (body,) = fake.stored
    assert (body.count(b'"EventId"'), body.count(b'"IP"'), body.count(b"garbage")) == (20, 20, 0)
    assert events_of(body) == [json.loads(line) for line in sample.lines[:20]]


@pytest.mark.parametrize("form", FORMS)
def test_a_field_named_twice_is_refused_in_strict_mode_and_replayed_in_the_other_one(
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
