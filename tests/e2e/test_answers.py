"""Answers and failures of the service: nothing is lost or altered, and no dead letter is unnecessary."""

from __future__ import annotations

import json
from collections import Counter
from email.message import Message
from pathlib import Path

import pytest

from tests.answer_bodies import EVENTS, SAMPLES
from tests.answer_bodies import Sample as AnswerSample
from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, Target
from tests.e2e.fake_service import HANG, RESET, STORE_AND_RESET, WEB_PAGE, FakeService, Reply
from tests.e2e.files import log_lines
from tests.e2e.surroundings import free_port

# One sender, so that the order of the requests is known.
ONE_SENDER = {
    "delivery.concurrency": 1,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.02,
    "batch.max_events": 100,
}
HASTY = {**ONE_SENDER, "delivery.give_up_after_seconds": 0.3}


def assert_nothing_set_aside(shipper: Shipper) -> None:
    state = shipper.read_state()
    assert (state.read, state.dead_letters, state.checkpoints) == (0, (), ())


# The fate of one request after the other, and the logged reason of its retry. Those that leave the connection open come
# last: a request that fails on a reused connection is retried without a log line.
PASSING_FAILURES = [
    (RESET, "read_error"),
    (STORE_AND_RESET, "read_error"),
    (Reply(fault="truncate"), "remote_protocol_error"),
    (HANG, "read_timeout"),
    (Reply(fault="stall"), "read_timeout"),
    (Reply(fault="trickle"), "read_timeout"),
    *((Reply(status=status), f"http_{status}") for status in (408, 500, 503)),
    (Reply(status=502, body=b"<html>Bad Gateway</html>", content_type="text/html"), "http_502"),
]


@pytest.mark.early
def test_a_request_is_retried_with_the_same_bytes_after_a_transient_failure(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.plan(*(reply for reply, _ in PASSING_FAILURES), Reply(status=429, headers={"Retry-After": "1"}))
    # A trickling answer may take both together, plus two reads.
    settings = {**ONE_SENDER, "delivery.read_timeout_seconds": 1, "delivery.connect_timeout_seconds": 1}
    result = shipper.backfill(file, "--log-level", "debug", settings=settings)
    failures = len(PASSING_FAILURES) + 1
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert (result.summary["batches"], result.summary["retries"]) == (3, failures)
    assert result.summary["requests"] == fake.requests == 3 + failures
    reasons = [line["reason"] for line in log_lines(result, "retry_scheduled")]
    assert reasons == [*(reason for _, reason in PASSING_FAILURES), "throttled"]
    assert len(set(fake.bodies[: failures + 1])) == 1, "a retry is the same request"
    assert fake.event_ids(fake.bodies[failures:]) == sample.ids[:300]
    assert b"".join(sample.lines[:100]).replace(b"\n", b",")[:-1] in fake.bodies[0], "the events were altered"
    # Hanging requests and requests reset after storing were received at least twice.
    stored = Counter(fake.event_ids())
    assert set(stored) == set(sample.ids[:300])
    assert {name for name, count in stored.items() if count > 1} == set(sample.ids[:100])
    # The backoff would be a fiftieth of the wait requested by the last answer.
    assert fake.arrived_at[failures] - fake.arrived_at[failures - 1] >= 1


REFUSALS = [
    (WEB_PAGE, "html_answer"),
    (Reply(status=403), "forbidden"),
    (Reply(status=302, headers={"Location": "https://login.example.com/"}), "redirect"),
    (Reply(status=401, body=b'{"statusCode":401,"message":"invalid subscription key"}'), "subscription_key"),
    (Reply(status=401), "token"),
    (Reply(status=207), "unreadable_answer"),
]


def test_a_refusal_pauses_delivery_until_the_service_recovers(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    """Each batch is refused for a different reason, until its fourth attempt."""
    for refusal, _ in REFUSALS:
        fake.plan(*[refusal] * 4, Reply())
    result = shipper.backfill(file, settings={**ONE_SENDER, "batch.max_events": 50})
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    reasons = [line["reason"] for line in log_lines(result, "delivery_paused")]
    assert reasons == [reason for _, reason in REFUSALS], "each is logged once"
    assert len(log_lines(result, "delivery_resumed")) == len(REFUSALS)
    for number, (_, reason) in enumerate(REFUSALS):
        assert len(set(fake.bodies[5 * number : 5 * number + 5])) == 1, reason
    assert fake.requests == 5 * len(REFUSALS)
    assert Counter(fake.event_ids(set(fake.stored))) == Counter(sample.ids[:300])


class SampleService(FakeService):
    """Answers the first request for each batch with the next sample, and accepts the batch when it is sent again."""

    def __init__(self, samples: list[AnswerSample]) -> None:
        super().__init__()
        self.sent: list[tuple[AnswerSample, tuple[str, ...]]] = []
        self._samples = samples
        self._seen: set[str] = set()

    def arrived(self, headers: Message, body: bytes) -> Reply:
        super().arrived(headers, body)
        ids = tuple(self.event_ids([body]))
        if self._seen.intersection(ids):
            return Reply()
        self._seen.update(ids)
        sample = self._samples[len(self.sent)]
        self.sent.append((sample, ids))
        return Reply(sample.status, sample.with_ids(ids))


def test_every_form_of_a_successful_answer_is_understood_and_nothing_is_accepted_on_a_guess(
    shipper: Shipper, sample: Sample
):
    events = EVENTS * len(SAMPLES)
    file = shipper.write("events.ndjson", *sample.lines[:events])
    settings = {**ONE_SENDER, "batch.max_events": EVENTS, "batch.unique_consumers": False}
    with SampleService(SAMPLES) as service:
        shipper.target = service.target
        result = shipper.backfill(file, settings=settings, limit_s=120)
    refused = {ids[index] for answer, ids in service.sent for index in answer.refused}
    again = {ids[index] for answer, ids in service.sent for index in answer.again}
    again.update(
        event_id for answer, ids in service.sent if answer.whole in {"apart", "later", "paused"} for event_id in ids
    )
    assert len(service.sent) == len(SAMPLES)
    assert (result.returncode, result.counts()) == (3, (events, events - len(refused), len(refused), 0, 0))
    letters = {json.loads(letter.raw)["EventId"] for letter in shipper.read_state().dead_letters}
    assert letters == refused
    sent = Counter(service.event_ids(service.bodies))
    assert {event_id for event_id, count in sent.items() if count > 1} == again, "settled events were sent again"
    assert sent.total() == events + len(again)
    reasons = Counter(line["reason"] for line in log_lines(result, "delivery_paused"))
    assert reasons["unreadable_answer"] >= 10, "repeated log lines are counted, not written"
    assert set(reasons) <= {"unreadable_answer", "html_answer", "throttled"}


def test_records_stay_pending_while_the_service_refuses_them_and_after_a_long_retry_after(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    """Giving up ends the wait early. Events accepted before are not sent again."""
    for refusal in (Reply(status=404), Reply(status=429, headers={"Retry-After": "86400"})):
        fake.default = refusal
        result = shipper.backfill(file, settings=HASTY, limit_s=10)
        assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300)), refusal
        assert result.summary["outcome"] == "gave_up"
        assert result.summary["message"] in result.stderr
        assert_nothing_set_aside(shipper)
    fake.plan(Reply(), Reply())
    fake.default = RESET
    result = shipper.backfill(file, settings=HASTY)
    assert (result.returncode, result.counts()) == (4, (300, 200, 0, 0, 100))
    fake.default = Reply()
    assert shipper.backfill(file).counts() == (100, 100, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_everything_is_delivered_to_a_service_that_starts_later(shipper: Shipper, sample: Sample, file: Path):
    port = free_port()
    shipper.target = Target(f"http://127.0.0.1:{port}", "key", "token")
    settings = {
        "input.include": f'["{file}"]',
        "delivery.retry_initial_seconds": 0.05,
        "delivery.retry_max_seconds": 0.1,
    }
    running = shipper.start("run", settings=settings)
    running.wait_for("cannot connect")
    with FakeService(port) as late:
        running.wait_until(lambda: len(late.event_ids()) == 300, "all events")
        assert running.stop().returncode == 0
        assert Counter(late.event_ids()) == Counter(sample.ids[:300])


@pytest.mark.parametrize("key", ["success", "false", "stored", "3", "t"])
def test_an_answer_keeps_its_meaning_if_it_happens_to_contain_a_secret(
    key: str, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target._replace(subscription_key=key, token="t")
    file = shipper.write("three.ndjson", *sample.lines[:3])
    fake.default = Reply(status=200, body=b'{"success":false,"stored":0,"test":true}')
    denied = shipper.run("backfill", file, "--summary", "json", settings=HASTY)
    assert (denied.returncode, denied.summary["accepted"], denied.summary["pending"]) == (4, 0, 3)
    fake.default = Reply(status=200, body=b'{"success":true,"stored":3,"rejected":[]}')
    taken = shipper.run("backfill", file, "--summary", "json", settings=HASTY)
    assert (taken.returncode, taken.summary["accepted"]) == (0, 3)
