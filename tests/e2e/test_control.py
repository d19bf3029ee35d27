"""What other commands ask a running shipper for, over the control socket of its state directory."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shipper.system.control import REQUEST_BYTES, connected
from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Running, Service, Shipper
from tests.e2e.fake_service import FakeService, Reply
from tests.e2e.operated import Admin, Start
from tests.e2e.test_follow import append, wait_for_events

LONG = {"delivery.retry_initial_seconds": 3600, "delivery.retry_max_seconds": 3600}


def retry(shipper: Shipper, **options: Any) -> Result:
    return shipper.run("retry", check=False, **options)


@contextmanager
def client(shipper: Shipper) -> Iterator[socket.socket]:
    with connected(shipper.state) as connection:
        connection.settimeout(30)
        yield connection


def answers(connection: socket.socket) -> list[dict[str, Any]]:
    """Return all answers, once the other end is closed."""
    with connection.makefile("rb") as lines, suppress(ConnectionError):
        return [json.loads(line) for line in lines]
    return []


def wait_for_socket(running: Running, shipper: Shipper) -> None:
    def listens() -> bool:
        with suppress(FileNotFoundError, ConnectionRefusedError), client(shipper):
            return True
        return False

    running.wait_until(listens, "its control socket")


# Retry --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [Reply(403), Reply(401), Reply(429, headers={"Retry-After": "3600"})],
    ids=lambda reply: str(reply.status),
)
def test_a_retry_ends_a_pause_at_once_and_tells_what_came_of_it(
    start: Start, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample, reply: Reply
):
    shipper.target = fake.target
    fake.default = reply
    append(folder / "a.ndjson", sample.lines[:10])
    running = start(settings=LONG)
    running.wait_for("delivery_paused")
    before = fake.requests
    refused = retry(shipper)
    assert refused.returncode == 4
    assert f"process {running.pid} was paused (" in refused.stderr
    assert "it is still paused (" in refused.stderr
    assert fake.requests > before
    fake.default = Reply()
    accepted = retry(shipper)
    assert (accepted.returncode, accepted.stdout) == (0, "")
    assert "delivery has resumed" in accepted.stderr
    running.wait_until(lambda: len(fake.stored) == 1, "the batch")
    again = retry(shipper)
    assert again.returncode == 0
    assert f"process {running.pid} is not paused: there is nothing to retry" in again.stderr
    assert running.stop().returncode == 0


def test_a_retry_ends_a_backoff_of_an_hour(
    start: Start, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.plan(Reply(status=503))
    append(folder / "a.ndjson", sample.lines[:10])
    running = start(settings=LONG)
    running.wait_for("retry_scheduled")
    assert retry(shipper).returncode == 0
    running.wait_until(lambda: len(fake.stored) == 1, "the batch")
    assert running.stop().returncode == 0


def test_a_retry_looks_again_at_input_that_is_held_back(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    append(folder / "a.ndjson", [*[b"no record\n"] * 30, *sample.lines[:10]])
    running = start(settings={"records.mistake_limit": 20, "input.format": "ndjson"})
    running.wait_for("input_unlike_records")
    result = retry(shipper)
    assert result.returncode == 4
    assert "it is still paused (input_unlike_records)" in result.stderr
    assert "what to do: " in result.stderr
    assert running.stop().returncode == 0


def test_without_a_shipper_a_retry_says_so(shipper: Shipper, service: Service):
    for _ in ("nothing is there", "a state without a process"):
        result = retry(shipper)
        assert result.returncode == 2
        assert f"no shipper runs on {shipper.state}" in result.stderr
        shipper.pipe(b"")
    group = retry(shipper, settings={"input.kafka": '{brokers=["127.0.0.1:9"],topics=["a"],group_id="g"}'})
    assert group.returncode == 2
    assert "input.kafka" in group.stderr


# The socket ---------------------------------------------------------------------------------------------------------


def test_the_socket_is_its_owners_alone_goes_with_the_process_and_what_a_kill_leaves_is_taken_over(
    shipper: Shipper, service: Service
):
    running = shipper.start("pipe", stdin=subprocess.PIPE)
    wait_for_socket(running, shipper)
    place = shipper.state / "control"
    assert stat.S_IMODE(shipper.state.stat().st_mode) == 0o700
    assert place.stat().st_mode == stat.S_IFSOCK | 0o600
    running.kill()
    assert place.is_socket()
    assert retry(shipper).returncode == 2
    running = shipper.start("pipe", stdin=subprocess.PIPE)
    wait_for_socket(running, shipper)
    assert "nothing to retry" in retry(shipper).stderr
    running.stdin.close()
    assert running.finish().returncode == 0
    assert not place.exists()


def test_a_state_directory_with_a_long_path_has_a_socket_too(shipper: Shipper, service: Service):
    shipper.state = shipper.folder / ("long" * 30) / ("longer" * 30)
    settings = {"state.directory": str(shipper.state)}
    running = shipper.start("pipe", stdin=subprocess.PIPE, settings=settings)
    wait_for_socket(running, shipper)
    assert "nothing to retry" in retry(shipper, settings=settings).stderr
    running.stdin.close()
    assert running.finish().returncode == 0


def test_where_there_can_be_no_socket_it_ships_all_the_same_and_warns_once(
    shipper: Shipper, service: Service, sample: Sample
):
    (shipper.state / "control").mkdir(parents=True)
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE)
    running.wait_for("control_unavailable")
    result = retry(shipper)
    assert result.returncode == 5
    assert f"process {running.pid}" in result.stderr
    running.stdin.write(b"".join(sample.lines[:10]))
    running.stdin.close()
    ended = running.finish()
    assert ended.counts() == (10, 10, 0, 0, 0)
    assert ended.stderr.count("control_unavailable") == 1


# Clients that mean harm ---------------------------------------------------------------------------------------------


def test_what_is_no_request_is_refused_in_words(shipper: Shipper, service: Service):
    running = shipper.start("pipe", stdin=subprocess.PIPE)
    wait_for_socket(running, shipper)
    for sent, words in {
        b"\n": "no request",
        b"rubbish\n": "no request",
        b"[" * 50_000 + b"\n": "no request",
        b"\xff\xfe" * 100 + b"\n": "no request",
        b'{"protocol":1,"version":"0","command":7}\n': "no request",
        b'{"protocol":1,"version":"0","command":"erase everything"}\n': "cannot do that",
        b'{"protocol":99,"version":"9.9","command":"retry"}\n': "this is 9.9, which cannot talk to it",
        b"x" * REQUEST_BYTES: "too long",
    }.items():
        with client(shipper) as connection:
            connection.sendall(sent)
            (answer,) = answers(connection)
        assert (answer["code"], words in answer["message"]) == (2, True), answer
    running.stdin.close()
    assert running.finish().returncode == 0


def test_a_crowd_that_asks_for_nothing_costs_a_running_shipper_nothing(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    append(folder / "a.ndjson", sample.lines[:10])
    running = start()
    admin = Admin(running)
    wait_for_events(running, service, sample.ids[:10])
    with ExitStack() as crowd:
        for number in range(100):
            connection = crowd.enter_context(client(shipper))
            with suppress(ConnectionError):
                connection.sendall((b"", b"{", b"x" * 1000)[number % 3])
        append(folder / "a.ndjson", sample.lines[10:20])
        wait_for_events(running, service, sample.ids[:20])
        assert admin.get("/healthz").status_code == 200
        assert len(os.listdir(f"/proc/{running.pid}/fd")) < 100, "it keeps them all"
    running.wait_until(lambda: retry(shipper).returncode == 0, "room for one that means it")
    assert "Traceback" not in running.stderr
    assert running.stop(limit_s=10).returncode == 0


def test_one_who_never_ends_his_request_is_cut_off_and_holds_up_no_end(shipper: Shipper, service: Service):
    running = shipper.start("pipe", stdin=subprocess.PIPE)
    wait_for_socket(running, shipper)
    with client(shipper) as slow, client(shipper) as slower:
        slow.sendall(b'{"protocol":')
        assert answers(slow) == []
        assert answers(slower) == []
    with client(shipper) as slow:
        slow.sendall(b'{"protocol":')
        running.stdin.close()
        assert running.finish(limit_s=10).returncode == 0
