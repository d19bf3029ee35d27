"""Answers that look like acceptance and are none, and waits that nobody should wait."""

from __future__ import annotations

import json

import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from shipper.delivery.verdicts import ANSWER_BYTES, Action, Answer, judge
from tests.fakes import ScriptedEndpoint, answer
from tests.stage.test_delivery import Delivery, batch

JSON = "application/json"


def accepted(body: bytes, content_type: str = JSON) -> bool:
    cut = Answer(status=202, content_type=content_type, retry_after="", body=body[:ANSWER_BYTES])
    return judge(cut).action is Action.ACCEPT


@pytest.mark.parametrize("refused", [1, 10, 500, 1000, 5000, 100_000])
def test_an_answer_that_names_refused_events_is_no_acceptance_however_long_it_is(refused: int):
    event = {"index": 0, "EventId": "0f8fad5b-d9cb-469f-a165-70867728950e", "field": "BTag", "message": "unknown"}
    for document in (
        {"accepted": 0, "duplicates": 0, "rejected": [event] * refused},
        {"rejected": [event] * refused, "accepted": 0},
    ):
        assert not accepted(json.dumps(document).encode())


@pytest.mark.parametrize("body", [b'{"accepted":3,"rejected":[{"index":0', b'{"rejected": [ {"index"'])
def test_an_answer_that_begins_to_name_refused_events_is_no_acceptance(body: bytes):
    assert not accepted(body)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", JSON),
        (b"", ""),
        (b"{}", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b'{"accepted":3,"duplicates":0,"rejected":[]}', JSON),
        (b'{"rejected":0}', JSON),
        (b'{"rejected":null}', JSON),
        (b"OK", "text/plain"),
        (b"\xff\xfe", "application/octet-stream"),
    ],
)
def test_an_answer_that_refuses_nothing_is_acceptance(body: bytes, content_type: str):
    assert accepted(body, content_type)


@pytest.mark.parametrize("status", [429, 503, 403, 401])
async def test_nobody_is_put_to_sleep_for_more_than_a_day(status: int):
    delivery = Delivery(ScriptedEndpoint([answer(status, "999999999")]))
    with capture_logs() as logs:
        async with delivery.running() as send:
            await send(batch())
            while not delivery.counts.retries:
                await anyio.lowlevel.checkpoint()
            delivery.stopping.set()
    waits = [entry["wait_seconds"] for entry in logs if entry["event"] == "retry_scheduled"]
    assert len(waits) == 1
    assert 600 <= waits[0] <= 86_400
