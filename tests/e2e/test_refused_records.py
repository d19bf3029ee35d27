"""Records that the service refuses: each is a dead letter as it came, whatever is in it, and blocks no other one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, changed
from tests.e2e.fake_service import FakeService, Reply

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
