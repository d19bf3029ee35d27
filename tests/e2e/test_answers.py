"""What the service answers, or fails to: nothing is lost, nothing altered, nothing set aside without need."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, Target, event_ids
from tests.e2e.fake_service import HANG, RESET, STORE_AND_RESET, WEB_PAGE, FakeService, Reply

# One sender, so that requests come in an order that can be written down.
ONE_SENDER = {
    "delivery.concurrency": 1,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.02,
    "batch.max_events": 100,
}
HASTY = {**ONE_SENDER, "delivery.give_up_after_seconds": 0.3}


@pytest.fixture
def shipper(shipper: Shipper, fake: FakeService) -> Shipper:
    shipper.target = fake.target
    return shipper


@pytest.fixture
def file(shipper: Shipper, sample: Sample) -> Path:
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join(sample.lines[:300]))
    return path


def assert_nothing_set_aside(shipper: Shipper) -> None:
    state = shipper.read_state()
    assert (state.read, state.dead_letters, state.checkpoints) == (0, (), ())


@pytest.mark.parametrize(
    "failures",
    [
        [Reply(status=status) for status in (408, 429, 500, 503)],
        [Reply(status=502, body=b"<html>Bad Gateway</html>", content_type="text/html")] * 2,
        [RESET] * 2,
        [STORE_AND_RESET] * 2,
    ],
    ids=["statuses", "502 html", "reset", "stored and reset"],
)
def test_a_passing_failure_is_tried_again_with_the_same_bytes(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path, failures: list[Reply]
):
    fake.plan(*failures)
    result = shipper.backfill(file, settings=ONE_SENDER)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert (result.summary["batches"], result.summary["retries"]) == (3, len(failures))
    assert result.summary["requests"] == fake.requests == 3 + len(failures)
    assert len(set(fake.bodies[: len(failures) + 1])) == 1, "a retry is the same request"
    assert fake.event_ids(fake.bodies[len(failures) :]) == sample.ids[:300]
    assert b"".join(sample.lines[:100]).replace(b"\n", b",")[:-1] in fake.bodies[0], "the events were altered"
    stored = Counter(fake.event_ids())
    assert set(stored) == set(sample.ids[:300])
    repeated = {name for name, count in stored.items() if count > 1}
    assert repeated == (set(sample.ids[:100]) if STORE_AND_RESET in failures else set())


def test_retry_after_is_waited_for(shipper: Shipper, fake: FakeService, file: Path):
    fake.plan(Reply(status=429, headers={"Retry-After": "1"}))
    result = shipper.backfill(file, settings=ONE_SENDER)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    # Its own backoff would be over in a fiftieth of that.
    assert fake.arrived_at[1] - fake.arrived_at[0] >= 1


def test_a_long_retry_after_drops_nothing(shipper: Shipper, fake: FakeService, sample: Sample, file: Path):
    """The wait is cut short by giving up, and the records stay pending."""
    fake.default = Reply(status=429, headers={"Retry-After": "86400"})
    result = shipper.backfill(file, settings=HASTY, limit_s=10)
    assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300))
    assert fake.requests <= 2
    assert_nothing_set_aside(shipper)
    fake.default = Reply()
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (WEB_PAGE, "html_answer"),
        (Reply(status=403), "forbidden"),
        (Reply(status=302, headers={"Location": "https://login.example.com/"}), "redirect"),
        (Reply(status=401, body=b'{"statusCode":401,"message":"invalid subscription key"}'), "subscription_key"),
        (Reply(status=401), "token"),
        (Reply(status=207), "unreadable_answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.status),
)
def test_a_refusal_pauses_and_ends_by_itself_when_the_service_is_right_again(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path, refusal: Reply, reason: str
):
    fake.default = refusal
    running = shipper.start("backfill", file, "--summary", "json", settings=ONE_SENDER)
    running.wait_until(lambda: fake.requests >= 4, "it goes on asking")
    assert not running.has_ended
    assert len(set(fake.bodies)) == 1, "one sender knocks with its batch"
    assert running.stderr.count("delivery_paused") == 1
    assert f'"reason":"{reason}"' in running.stderr
    fake.default = Reply()
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert "delivery_resumed" in result.stderr
    assert Counter(fake.event_ids(set(fake.stored))) == Counter(sample.ids[:300])


def test_while_it_is_paused_one_request_at_a_time_knocks(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = Reply(status=403)
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:2000]))
    running = shipper.start("backfill", file, "--summary", "json", settings={**ONE_SENDER, "delivery.concurrency": 8})
    running.wait_until(lambda: fake.requests >= 30, "it goes on asking")
    # The first eight may have been on their way when the first was refused; then the senders take turns.
    counts = Counter(fake.bodies)
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) <= 2
    fake.default = Reply()
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (2000, 2000, 0, 0, 0))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:2000])


@pytest.mark.parametrize(
    ("command", "refusal"),
    [("backfill", Reply(status=404)), ("pipe", WEB_PAGE), ("backfill", RESET), ("pipe", Reply(status=503))],
    ids=["404", "html", "reset", "503"],
)
def test_a_service_that_never_accepts_leaves_everything_pending(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path, refusal: Reply, command: str
):
    fake.default = refusal
    arguments = [command, *([file] if command == "backfill" else []), "--summary", "json"]
    with file.open("rb") as stdin:
        result = shipper.run(*arguments, settings=HASTY, stdin=stdin)
    assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300))
    assert result.summary["outcome"] == "gave_up"
    assert result.summary["message"] in result.stderr
    assert_nothing_set_aside(shipper)

    fake.default = Reply()
    again = shipper.run(*arguments)
    assert (again.returncode, again.counts()) == (0, (300, 300, 0, 0, 0))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_what_was_accepted_before_it_gave_up_is_not_sent_again(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.plan(Reply(), Reply())
    fake.default = Reply(status=503)
    result = shipper.backfill(file, settings=HASTY)
    assert (result.returncode, result.counts()) == (4, (300, 200, 0, 0, 100))
    fake.default = Reply()
    assert shipper.backfill(file).counts() == (100, 100, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_a_service_that_does_not_answer_is_tried_again_after_the_read_timeout(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.plan(HANG, HANG)
    result = shipper.backfill(file, settings={**ONE_SENDER, "delivery.read_timeout_seconds": 0.2})
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert result.summary["retries"] == 2
    assert "read_timeout" in result.stderr
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]


def test_an_answer_cut_short_is_no_acceptance(shipper: Shipper, fake: FakeService, sample: Sample, file: Path):
    fake.plan(Reply(fault="truncate"), Reply(fault="truncate"))
    result = shipper.backfill(file, settings=ONE_SENDER)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert result.summary["retries"] == 2
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]


@pytest.mark.parametrize("fault", ["stall", "trickle"])
def test_an_answer_that_never_ends_holds_nobody_up(shipper: Shipper, fake: FakeService, file: Path, fault: str):
    fake.plan(Reply(fault=fault))
    result = shipper.backfill(file, settings={**ONE_SENDER, "delivery.read_timeout_seconds": 0.3}, limit_s=15)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert result.summary["retries"] == 1


def test_sigterm_during_a_backoff_tries_once_more_and_ends_in_time(shipper: Shipper, fake: FakeService, file: Path):
    fake.default = Reply(status=503, headers={"Retry-After": "86400"})
    settings = {**ONE_SENDER, "delivery.drain_timeout_seconds": 1.2}
    running = shipper.start("backfill", file, "--summary", "json", settings=settings)
    running.wait_for("retry_scheduled")
    before = fake.requests
    started = time.monotonic()
    result = running.stop(limit_s=15)
    assert time.monotonic() - started < 10
    assert fake.requests > before, "it did not try again"
    assert (result.returncode, result.summary["outcome"]) == (4, "aborted")
    assert result.counts() == (300, 0, 0, 0, 300)
    assert_nothing_set_aside(shipper)


def test_sigterm_during_a_backoff_delivers_if_the_service_is_back(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.plan(Reply(status=503, headers={"Retry-After": "86400"}))
    running = shipper.start("backfill", file, "--summary", "json", settings=ONE_SENDER)
    running.wait_for("retry_scheduled")
    result = running.stop(limit_s=15)
    assert result.counts() == (300, 300, 0, 0, 0)
    assert result.returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_requests_carry_the_documented_headers_and_no_others(shipper: Shipper, fake: FakeService, file: Path):
    assert (
        shipper.backfill(file, env={"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}).returncode
        == 0
    )
    headers = {name.lower(): value for name, value in fake.headers[0].items()}
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers.pop("traceparent"))
    assert headers.pop("host") == fake.target.base_url.removeprefix("http://")
    assert int(headers.pop("content-length")) == len(fake.bodies[0])
    assert headers.pop("user-agent").startswith("shipper/")
    assert headers == {
        "content-type": "application/json",
        "cache-control": "no-cache",
        "authorization": f"Bearer {fake.target.token}",
        "ocp-apim-subscription-key": fake.target.subscription_key,
    }


def test_no_body_is_larger_than_allowed(shipper: Shipper, fake: FakeService, sample: Sample, file: Path):
    settings = {"batch.max_bytes": 20_000, "input.max_record_bytes": 10_000}
    result = shipper.backfill(file, settings=settings)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0))
    assert max(map(len, fake.bodies)) <= 20_000
    assert min(sorted(map(len, fake.bodies))[1:]) > 19_000, "the room was not used"
    assert sorted(event_ids(sample.lines[:300])) == sorted(fake.event_ids())


@pytest.mark.parametrize(
    "reply", [Reply(headers={"Connection": "close"}), Reply(fault="close")], ids=["told", "untold"]
)
def test_an_idle_connection_that_the_service_closed_is_no_failure(
    shipper: Shipper, fake: FakeService, sample: Sample, reply: Reply
):
    """The connection is closed between two batches; the next is delivered without anybody's notice."""
    fake.default = reply
    settings = {"batch.linger_seconds": 0, "delivery.concurrency": 1}
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    for index in range(5):
        running.stdin.write(sample.lines[index])
        running.stdin.flush()
        running.wait_until(lambda count=index + 1: fake.answered == count and not fake.connections, "accepted, closed")
    running.stdin.close()
    result = running.finish()
    assert (result.returncode, result.counts(), result.summary["retries"]) == (0, (5, 5, 0, 0, 0), 0)


def test_an_answer_before_the_body_was_read_is_a_failure_like_others(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.plan(Reply(fault="early"), Reply(fault="early"))
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:20_000]))
    settings = {**ONE_SENDER, "batch.max_events": 20_000, "batch.max_bytes": 10_000_000}
    result = shipper.backfill(file, settings=settings)
    assert (result.returncode, result.counts()) == (0, (20_000, 20_000, 0, 0, 0))
    assert result.summary["retries"] == 2
    assert Counter(fake.event_ids()) == Counter(sample.ids[:20_000])


def test_a_service_that_comes_up_later_gets_everything(shipper: Shipper, sample: Sample, file: Path):
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
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
