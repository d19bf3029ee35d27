"""A one-shot run with setup problems ends soon, says what to do, and loses nothing."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.certificates import context_of
from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Result, Shipper, Target, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.surroundings import Terminal
from tests.servers import Origin

# The default of `delivery.give_up_after_seconds` is 900, beyond the time limit of a test.
FAULTS = {
    "401": (Reply(status=401, body=b'{"message":"Unauthorized"}'), "the service refused the access token"),
    "404": (Reply(status=404), "the address was not found"),
}
UNKNOWN = Target("https://intake.invalid", "key", "token")


@pytest.fixture(autouse=True)
def _soon(shipper: Shipper) -> None:
    shipper.shortened |= {f"shipper.{module}.FAIL_FAST_S": 0.3 for module in ("delivery.gate", "pipeline.packer")}


def assert_ended_fast(result: Result, words: str) -> None:
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up"), result
    assert (result.summary["accepted"], result.summary["dead_lettered"]) == (0, 0)
    for each in (words, "nothing has been accepted yet", "shipper check --online", "delivery.fail_fast"):
        assert each in result.summary["message"]


@pytest.mark.parametrize(("reply", "words"), FAULTS.values(), ids=FAULTS)
def test_a_backfill_that_is_denied_access_ends_soon_and_the_next_one_delivers_everything(
    shipper: Shipper, fake: FakeService, file: Path, sample: Sample, reply: Reply, words: str
):
    fake.default = reply
    assert_ended_fast(shipper.backfill(file), words)
    assert not fake.stored
    fake.default = OK
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)
    assert sorted(fake.event_ids()) == sorted(sample.ids[:300])


WAY_OUT = (
    "What to do: set a valid {} in the environment variable {}, then run the same command again. To test it: shipper "
)


@pytest.mark.parametrize(
    ("reply", "begin", "remedy"),
    [
        (FAULTS["401"][0], "the service refused the access token (HTTP 401", WAY_OUT.format("token", "INTAKE_TOKEN")),
        (
            Reply(status=401, body=b'{"message":"Access denied due to invalid subscription key."}'),
            "the service refused the subscription key (HTTP 401",
            WAY_OUT.format("key", "INTAKE_KEY"),
        ),
        (
            Reply(status=403, body=b"The account of brisk_otter17 (192.0.2.7) is closed"),
            "the service denied access, or a firewall, as the answer is not JSON "
            '(HTTP 403: "The account of *** is closed")',
            "ask the service's operator to check",
        ),
    ],
    ids=["token", "key", "403"],
)
def test_the_first_line_names_the_cause_and_the_remedy(
    shipper: Shipper, fake: FakeService, file: Path, reply: Reply, begin: str, remedy: str
):
    fake.default = reply
    result = shipper.run("backfill", file)
    line = next(line for line in result.stderr.splitlines() if not line.startswith("{"))
    assert line.startswith(f"shipper: {begin}")
    assert remedy in line
    assert "Nothing is lost: the same command continues from here" in line
    assert "brisk_otter17" not in result.stderr
    assert "192.0.2.7" not in result.stderr


def test_an_unknown_host_or_an_untrusted_certificate_ends_a_backfill_soon(
    shipper: Shipper, fake: FakeService, file: Path
):
    right = shipper.target
    shipper.target = UNKNOWN
    assert_ended_fast(shipper.backfill(file), "the host of https://intake.invalid was not found")
    with Origin(context=context_of(trustme.CA(), "127.0.0.1")) as origin:
        shipper.target = Target(origin.url, *right[1:])
        assert_ended_fast(shipper.backfill(file), "see intake.ca_bundle")
    shipper.target = right
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_an_unusable_certificate_file_ends_the_command_at_startup(shipper: Shipper, file: Path):
    with Origin() as origin:
        shipper.target = Target(f"https://127.0.0.1:{origin.port}", "key", "token")
        result = shipper.run("backfill", file, settings={"intake.client_certificate": file})
    result.assert_ended(2, "client_certificate", str(file))
    assert origin.accepted == 0


def test_records_read_by_a_pipe_that_is_denied_access_are_delivered_by_the_next_one(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    """The producer keeps running; everything it wrote is in the spool."""
    fake.default = Reply(status=401)
    running = shipper.open_pipe(*sample.lines[:300])
    assert_ended_fast(running.finish(), "the service refused the access token")
    fake.default = OK
    assert shipper.pipe().counts() == (300, 300, 0, 0, 0)


def test_a_replay_that_is_denied_access_leaves_the_dead_letters_unchanged(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.default = Reply(status=400)
    one = {"batch.max_events": 1}
    file.write_bytes(b"".join(sample.lines[:3]))
    assert shipper.backfill(file, settings=one).returncode == 3
    fake.default = Reply(status=404)
    result = shipper.run("dead-letters", "replay", "--summary", "json")
    assert_ended_fast(result, "the address was not found")
    assert len(shipper.read_state().dead_letters) == 3
    fake.default = OK
    assert shipper.run("dead-letters", "replay").returncode == 0


def test_an_unknown_token_endpoint_ends_a_backfill_soon_but_an_unavailable_one_does_not(
    shipper: Shipper, fake: FakeService, file: Path
):
    def settings(host: str) -> None:
        shipper.use_oauth2(token_url=f"{host}/token", client_id="x", client_secret={"env": "INTAKE_TOKEN"})

    settings("https://login.invalid")
    assert_ended_fast(shipper.backfill(file), "check intake.oauth2.token_url")
    fake.default = Reply(status=404)
    settings(fake.target.base_url)
    assert_ended_fast(shipper.backfill(file), "no token endpoint was found at this address")
    fake.default = Reply(status=503)
    result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 0.5})
    assert "delivery.give_up_after_seconds" in result.summary["message"]


# A terminal -------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


def started_on(terminal: Terminal, shipper: Shipper, file: Path, **settings: object) -> subprocess.Popen[bytes]:
    words = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    return subprocess.Popen(
        [SHIPPER, "backfill", file, "--config", shipper.config, "--log-level", "error", *words],
        stderr=terminal.descriptor,
        stdin=subprocess.DEVNULL,
        cwd=shipper.folder,
        env={**shipper.environment(), "TERM": "xterm", "COLUMNS": "240"},
    )


def wait_for(terminal: Terminal, words: str) -> None:
    wait_until(lambda: words in terminal.text, words, limit_s=20)


def test_the_progress_bar_shows_the_reason_and_the_end_of_a_pause_and_ctrl_c_ends_it_at_once(
    shipper: Shipper, fake: FakeService, file: Path, terminal: Terminal
):
    fake.default = Reply(status=401)
    settings = {"delivery__fail_fast": "false", "delivery__retry_initial_seconds": 60}
    process = started_on(terminal, shipper, file, **settings)
    wait_for(terminal, "paused: the service refused the access token (HTTP 401); gives up at ")
    wait_for(terminal, "; Ctrl-C is safe: pending records are kept")
    asked = fake.requests
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 4  # `delivery.drain_timeout_seconds` is 25
    assert fake.requests <= asked + 1
    wait_for(terminal, "300 pending")


def test_ctrl_c_during_a_request_announces_that_a_second_one_stops_at_once(
    shipper: Shipper, fake: FakeService, file: Path, terminal: Terminal
):
    fake.default = HANG
    process = started_on(terminal, shipper, file)
    wait_until(lambda: fake.requests, "a request", limit_s=20)
    process.send_signal(signal.SIGINT)
    wait_for(terminal, "press Ctrl-C again to stop now")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 4
    fake.release()
