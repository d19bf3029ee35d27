"""A one-shot run whose set-up is wrong from the start ends soon, says what to do, and loses nothing."""

from __future__ import annotations

import os
import pty
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import trustme

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Result, Shipper, Target
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.stage.servers import Origin

pytestmark = pytest.mark.usefixtures("ships_to_fake")

# The default of `delivery.give_up_after_seconds` is 900: a test that waited for it would fail for its own limit.
FAULTS = {
    "401": (Reply(status=401, body=b'{"message":"Unauthorized"}'), "the service refused the access token"),
    "404": (Reply(status=404), "nothing is there"),
}
UNKNOWN = Target("https://intake.invalid", "key", "token")


@pytest.fixture(autouse=True)
def _soon(shipper: Shipper) -> None:
    shipper.shortened |= {f"shipper.{module}.FAIL_FAST_S": 0.3 for module in ("delivery.gate", "pipeline.hold")}


def assert_ended_fast(result: Result, words: str) -> None:
    assert result.summary is not None
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up"), result
    assert (result.summary["accepted"], result.summary["dead_lettered"]) == (0, 0)
    for each in (words, "nothing was accepted yet", "shipper check --online", "delivery.fail_fast"):
        assert each in result.summary["message"]


@pytest.mark.parametrize(("reply", "words"), FAULTS.values(), ids=FAULTS)
def test_a_backfill_that_is_not_let_in_ends_soon_and_the_next_one_delivers_everything(
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
    ("reply", "begin", "way_out"),
    [
        (FAULTS["401"][0], "the service refused the access token (HTTP 401", WAY_OUT.format("token", "INTAKE_TOKEN")),
        (
            Reply(status=401, body=b'{"message":"Access denied due to invalid subscription key."}'),
            "the service refused the subscription key (HTTP 401",
            WAY_OUT.format("key", "INTAKE_KEY"),
        ),
        (
            Reply(status=403, body=b"The account of brisk_otter17 (192.0.2.7) is closed"),
            'the service denied access (HTTP 403: "The account of *** is closed")',
            "have the service's operator check",
        ),
    ],
    ids=["token", "key", "403"],
)
def test_the_first_line_names_what_is_refused_and_the_way_out(
    shipper: Shipper, fake: FakeService, file: Path, reply: Reply, begin: str, way_out: str
):
    fake.default = reply
    result = shipper.run("backfill", file)
    line = next(line for line in result.stderr.splitlines() if not line.startswith("{"))
    assert line.startswith(f"shipper: {begin}")
    assert way_out in line
    assert "Nothing is lost: the same command goes on from here" in line
    assert "brisk_otter17" not in result.stderr
    assert "192.0.2.7" not in result.stderr


def test_an_unknown_host_and_a_certificate_that_nobody_trusts_end_a_backfill_soon(
    shipper: Shipper, fake: FakeService, file: Path
):
    right = shipper.target
    shipper.target = UNKNOWN
    assert_ended_fast(shipper.backfill(file), "the host of https://intake.invalid is not found")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with Origin(context=context) as origin:
        shipper.target = Target(origin.url, *right[1:])
        assert_ended_fast(shipper.backfill(file), "certificate")
    shipper.target = right
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_what_a_pipe_that_is_not_let_in_has_read_is_delivered_by_the_next_one(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    """The producer does not end by itself; all that it wrote is in the spool."""
    fake.default = Reply(status=401)
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE)
    running.stdin.write(b"".join(sample.lines[:300]))
    running.stdin.flush()
    assert_ended_fast(running.finish(), "the service refused the access token")
    fake.default = OK
    assert shipper.pipe().counts() == (300, 300, 0, 0, 0)


def test_dead_letters_whose_replay_is_not_let_in_stay_what_they_are(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    fake.default = Reply(status=400)
    one = {"batch.max_events": 1}
    file.write_bytes(b"".join(sample.lines[:3]))
    assert shipper.backfill(file, settings=one).returncode == 3
    fake.default = Reply(status=404)
    result = shipper.run("dead-letters", "replay", "--summary", "json")
    assert_ended_fast(result, "nothing is there")
    assert len(shipper.read_state().dead_letters) == 3
    fake.default = OK
    assert shipper.run("dead-letters", "replay").returncode == 0


def test_a_token_endpoint_that_does_not_exist_ends_a_backfill_soon_and_one_that_is_away_does_not(
    shipper: Shipper, fake: FakeService, file: Path
):
    def settings(host: str) -> None:
        shipper.config.write_text(
            f'[intake]\nbase_url = "http://x"\nsubscription_key = {{ env = "INTAKE_KEY" }}\n[intake.oauth2]\n'
            f'token_url = "{host}/token"\nclient_id = "x"\nclient_secret = {{ env = "INTAKE_TOKEN" }}\n'
            f'[state]\ndirectory = "{shipper.state}"\n'
        )

    settings("https://login.invalid")
    assert_ended_fast(shipper.backfill(file), "check intake.oauth2.token_url")
    fake.default = Reply(status=404)
    settings(fake.target.base_url)
    assert_ended_fast(shipper.backfill(file), "there is no token endpoint at this address")
    fake.default = Reply(status=503)
    result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 0.5})
    assert "delivery.give_up_after_seconds" in result.summary["message"]


# A terminal -------------------------------------------------------------------------------------------------------


class Terminal:
    """A wide terminal that keeps what is shown on it."""

    def __init__(self) -> None:
        self._primary, self.secondary = pty.openpty()
        self._shown = b""
        self._thread = Thread(target=self._read)
        self._thread.start()

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode(errors="replace"))

    def _read(self) -> None:
        with suppress(OSError):  # nobody has the other end any more
            while data := os.read(self._primary, 65_536):
                self._shown += data

    def close(self) -> None:
        os.close(self.secondary)
        self._thread.join(10)
        os.close(self._primary)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def started_on(terminal: Terminal, shipper: Shipper, file: Path, **settings: object) -> subprocess.Popen[bytes]:
    words = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    return subprocess.Popen(
        [SHIPPER, "backfill", file, "--config", shipper.config, "--log-level", "error", *words],
        stderr=terminal.secondary,
        stdin=subprocess.DEVNULL,
        cwd=shipper.folder,
        env={**shipper.environment(), "TERM": "xterm", "COLUMNS": "240"},
    )


def wait_for(terminal: Terminal, words: str) -> None:
    until = time.monotonic() + 20
    while words not in terminal.text:
        assert time.monotonic() < until, (words, terminal.text[-2000:])
        time.sleep(0.02)


def test_the_progress_bar_says_why_it_stands_still_until_when_and_ctrl_c_ends_at_once(
    shipper: Shipper, fake: FakeService, file: Path, terminal: Terminal
):
    fake.default = Reply(status=401)
    settings = {"delivery__fail_fast": "false", "delivery__retry_initial_seconds": 60}
    process = started_on(terminal, shipper, file, **settings)
    wait_for(terminal, "paused: the service refused the access token (HTTP 401); gives up at ")
    wait_for(terminal, "; Ctrl-C keeps what is pending")
    asked = fake.requests
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 4  # `delivery.drain_timeout_seconds` is 25
    assert fake.requests <= asked + 1
    wait_for(terminal, "300 pending")


def test_a_ctrl_c_with_a_request_in_flight_says_that_another_one_ends_at_once(
    shipper: Shipper, fake: FakeService, file: Path, terminal: Terminal
):
    fake.default = HANG
    process = started_on(terminal, shipper, file)
    until = time.monotonic() + 20
    while not fake.requests:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    wait_for(terminal, "press Ctrl-C again to end now")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 4
    fake.release()
