"""Requests of other commands to a running shipper, over the control socket of its state directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shipper.system.control import REQUEST_BYTES, connect
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Result, Running, Service, Shipper, changed, wait_until
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.files import Tail, append, log_lines
from tests.e2e.operated import Admin, Manager
from tests.e2e.surroundings import Lockstep
from tests.e2e.test_crash_points import SAVES
from tests.e2e.test_replay_and_purge import REFUSE_ALL, bytes_on_disk, letters, refuse

LONG = {"delivery.retry_initial_seconds": 3600, "delivery.retry_max_seconds": 3600}


def retry(shipper: Shipper, **options: Any) -> Result:
    return shipper.run("retry", check=False, **options)


@contextmanager
def client(shipper: Shipper) -> Iterator[socket.socket]:
    with connect(shipper.state) as connection:
        connection.settimeout(30)
        yield connection


def answers(connection: socket.socket) -> list[dict[str, Any]]:
    """Return all answers up to the end of the connection."""
    with connection.makefile("rb") as lines, suppress(ConnectionError):
        return [json.loads(line) for line in lines]
    return []


def listening(running: Running, shipper: Shipper) -> Running:
    """Wait for the control socket of a process."""

    def listens() -> bool:
        with suppress(FileNotFoundError, ConnectionRefusedError), client(shipper):
            return True
        return False

    running.wait_until(listens, "the control socket")
    return running


# Retry --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [Reply(403), Reply(401), Reply(429, headers={"Retry-After": "3600"})],
    ids=lambda reply: str(reply.status),
)
def test_retry_ends_a_pause_at_once_and_reports_the_outcome(
    tail: Tail, shipper: Shipper, fake: FakeService, reply: Reply
):
    fake.default = reply
    tail.append(0, 10)
    running = tail.start(settings=LONG)
    running.wait_for("delivery_paused")
    before = fake.requests
    refused = retry(shipper)
    refused.assert_ended(4, f"process {running.pid} was paused (", "it is still paused (")
    assert fake.requests > before
    fake.default = Reply()
    accepted = retry(shipper)
    assert (accepted.returncode, accepted.stdout) == (0, "")
    assert "delivery has resumed" in accepted.stderr
    running.wait_until(lambda: len(fake.stored) == 1, "the batch")
    again = retry(shipper)
    again.assert_ended(0, f"process {running.pid} is not paused: there is nothing to retry")
    assert running.stop().returncode == 0


def test_retry_rereads_input_that_is_held_back(tail: Tail, shipper: Shipper, sample: Sample):
    append(tail.file, *[b"no record\n"] * 30, *sample.lines[:10])
    running = tail.start(settings={"records.mistake_limit": 20, "input.format": "ndjson"})
    running.wait_for("input_unlike_records")
    result = retry(shipper)
    result.assert_ended(4, "it is still paused (input_unlike_records)", "what to do: ")
    assert running.stop().returncode == 0


def test_retry_reports_that_the_settings_have_changed_and_how_to_reload_them(
    tail: Tail, shipper: Shipper, service: Service
):
    """A refused literal token is corrected in the file, which is read only on request."""
    tail.append(0, 10)
    right, base = service.target.token, shipper.config.read_text()
    tail.configure()
    shipper.config.write_text(shipper.config.read_text().replace('{ env = "INTAKE_TOKEN" }', '"wrong"'))
    running = tail.start(None, settings=LONG)
    reload = f"reload it: kill -HUP {running.pid}"
    running.wait_for("delivery_paused")
    before = retry(shipper)
    assert f"write a valid token as intake.token into {shipper.config}, then {reload}" in before.stderr
    assert "has changed" not in before.stderr
    shipper.config.write_text(shipper.config.read_text().replace('"wrong"', f'"{right}"').replace("app.ndj", "*.ndj"))
    changed_since = retry(shipper)
    assert changed_since.returncode == 4
    told = f"{shipper.config} has changed since process {running.pid} read it. For the new settings, {reload}"
    assert told in changed_since.stderr
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("delivery_resumed")
    tail.wait(10)
    assert "has changed" not in retry(shipper).stderr
    shipper.config.write_text(base.replace("INTAKE_TOKEN", "NOT_SET"))
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("reload_refused")
    assert "could not be reloaded" in retry(shipper).stderr
    assert running.stop().returncode == 0


def test_retry_says_that_a_backfill_cannot_reload_and_must_be_run_again(
    shipper: Shipper, fake: FakeService, file: Path
):
    fake.default = Reply(401)
    running = shipper.start("backfill", file, settings={**LONG, "delivery.fail_fast": False}, check=False)
    running.wait_for("delivery_paused")
    shipper.config.write_text(f"{shipper.config.read_text()}[log]\n")
    result = retry(shipper)
    assert "variable INTAKE_TOKEN, then run the same command again" in result.stderr
    assert "read it. For the new settings, run the same command again" in result.stderr
    fake.default = Reply()
    resumed = retry(shipper)
    assert (resumed.returncode, "delivery has resumed" in resumed.stderr) == (0, True), (
        "delivery resumes although the backfill then ends"
    )
    assert running.finish().returncode == 0


def test_retry_reports_that_no_shipper_is_running(shipper: Shipper):
    for _ in ("nothing is there", "a state without a process"):
        result = retry(shipper)
        result.assert_ended(2, f"no shipper is running on {shipper.state}")
        shipper.pipe(b"")
    group = retry(shipper, settings={"input.kafka": '{brokers=["127.0.0.1:9"],topics=["a"],group_id="g"}'})
    group.assert_ended(2, "input.kafka")


def test_a_second_shipper_on_the_same_state_directory_fails_with_advice(tail: Tail, shipper: Shipper, service: Service):
    """With its own state directory, it would ship the same records again."""
    tail.append(0, 10)
    tail.configure()
    running = tail.start(None)
    tail.wait(10)
    words = (
        "the files of its input.include. To ship others, extend input.include and reload it "
        f"(kill -HUP {running.pid}), or stop it first. Use another state.directory only for a pipe, or for files that "
        "no other shipper reads; otherwise they are shipped twice"
    )
    for arguments in (["backfill", tail.file], ["run"], ["pipe"]):
        result = shipper.run(*arguments, check=False)
        result.assert_ended(5, f"{shipper.state} is in use by another shipper (process {running.pid})", words)
    assert f"process {running.pid} uses it; a second shipper" in shipper.run("check", check=False).stdout
    assert running.stop().returncode == 0
    assert service.stored == 10


# Replay -------------------------------------------------------------------------------------------------------------


def assert_sums_up(counts: Mapping[str, Any]) -> None:
    assert counts["read"] == sum(counts[name] for name in ("accepted", "dead_lettered", "duplicates", "pending"))


def settled(shipper: Shipper) -> tuple[int, ...]:
    """Return the counts of the state after checking that they add up."""
    state = shipper.read_state()
    assert state.read == state.accepted + state.dead_lettered + state.duplicates
    assert state.dead_lettered == len(state.dead_letters) + state.purged
    return state.read, state.accepted, state.dead_lettered, state.duplicates


@pytest.mark.parametrize("form", ["text", "json"])
def test_replay_behaves_the_same_with_and_without_a_running_shipper(
    tail: Tail, shipper: Shipper, service: Service, sample: Sample, tmp_path: Path, form: str
):
    broken = [changed(sample.lines[20], BTag="?"), b"broken\n", b"x" * 3_000_000 + b"\n"]
    refuse(shipper, [*sample.lines[:20], *broken])
    alone = Shipper(tmp_path / "alone", service.target)
    shutil.copytree(shipper.state, alone.state)
    expected = letters(alone, "replay", "--summary", form)
    service.reset()
    running = listening(tail.start(check=False, settings=REFUSE_ALL), shipper)
    # The command's rules apply, although the running process has others.
    result = letters(shipper, "replay", "--summary", form)
    assert (result.returncode, expected.returncode) == (3, 3)
    service.assert_holds_exactly(sample.ids[:20])
    assert set(service.times_received().values()) == {1}
    if form == "json":
        assert result.counts() == (22, 20, 2, 0, 0)
        assert result.summary | {"seconds": 0} == expected.summary | {"seconds": 0}
    begun, *words = result.stderr.splitlines()
    assert begun == f"process {running.pid}, which is running, sends them"
    lines_alone = expected.stderr.replace(str(alone.state), str(shipper.state)).splitlines()
    words_alone = [line for line in lines_alone if not line.startswith("{")]
    assert all(len(log_lines(each, "record_refused")) == 2 for each in (expected, running)), "the sending process logs"
    lasted = re.compile(r"[0-9.]+ s, [0-9,]+ events/s")
    assert [lasted.sub("", line) for line in words] == [lasted.sub("", line) for line in words_alone]
    assert shipper.read_state() == alone.read_state()
    assert [(letter.id, letter.attempts) for letter in shipper.read_state().dead_letters] == [(21, 1), (22, 1), (23, 0)]
    again = letters(shipper, "replay", "--summary", "json")
    assert again.counts() == (2, 0, 2, 0, 0)
    assert running.stop().returncode == 0
    assert settled(shipper) == (23, 20, 3, 0)


def test_the_systemd_status_counts_the_dead_letters_that_are_kept_without_replayed_ones(
    tail: Tail, shipper: Shipper, tmp_path: Path
):
    shipper.shortened["shipper.status.systemd._STATUS_INTERVAL_S"] = 0.05
    manager = Manager(tmp_path / "notify")
    running = tail.start(settings=REFUSE_ALL, env=manager.env)

    def wait_to_hear(words: str) -> None:
        running.wait_until(lambda: any(words in line for line in manager.hear(0.1)), words)

    tail.append(0, 3)
    wait_to_hear("0 accepted, 3 dead letters kept")
    assert letters(shipper, "replay", "--limit", "2", check=False).returncode == 0
    wait_to_hear("2 accepted, 1 dead letter kept")
    assert letters(shipper, "purge", "--all", "--yes", check=False).returncode == 0
    wait_to_hear("2 accepted, 0 dead letters kept")
    assert running.stop().returncode == 0
    manager.close()
    assert shipper.run("status").stdout.splitlines()[0].endswith(" is delivered")


def test_input_and_admin_address_keep_working_during_a_replay(
    tail: Tail, shipper: Shipper, fake: FakeService, sample: Sample
):
    refuse(shipper, sample.lines[:100])
    fake.plan(*[Reply()] * 3, HANG)
    running = tail.start(settings={"batch.max_events": 10, "delivery.concurrency": 2}, check=False)
    admin = Admin(running)
    replaying = shipper.start("dead-letters", "replay", "--summary", "json", check=False)
    replaying.wait_until(lambda: fake.requests >= 4, "a hanging batch of letters")
    tail.append(100, 130)
    running.wait_until(lambda: fake.holds(sample.ids[100:130]), "the records of the input")
    assert not replaying.has_ended
    assert admin.get("/readyz").status_code == 200
    running.wait_until(lambda: "records: 130 read" in shipper.run("status").stdout, "each letter counts once")
    assert letters(shipper, "replay", check=False).returncode == 5, "one replay at a time"
    fake.release()
    result = replaying.finish()
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    assert sorted(fake.event_ids()) == sorted(sample.ids[:130]), "each is sent once"
    running.wait_until(lambda: shipper.read_state().accepted == 130, "all saved")
    assert_sums_up(admin.status()["live"])
    running.wait_until(lambda: admin.status()["live"]["read"] == 130, "letters count as read")
    assert running.stop().returncode == 0
    assert settled(shipper) == (130, 130, 0, 0)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_replay_ends_when_its_client_is_killed_and_the_shipper_keeps_running(
    tail: Tail, shipper: Shipper, fake: FakeService, sample: Sample, end: signal.Signals
):
    refuse(shipper, sample.lines[:100])
    fake.plan(*[Reply()] * 3)
    fake.default = Reply(status=403)
    settings = {"batch.max_events": 10, "delivery.concurrency": 1, "delivery.retry_max_seconds": 0.5}
    running = listening(tail.start(check=False, settings=settings), shipper)
    replaying = shipper.start("dead-letters", "replay", "--summary", "json", check=False)
    replaying.wait_until(
        lambda: shipper.read_state().accepted == 30 and fake.requests > 4, "three batches, and a pause"
    )
    replaying.process.send_signal(end)
    result = replaying.finish()
    if end == signal.SIGTERM:
        assert result.returncode == 4
        assert result.summary["outcome"] == "drained"
        assert result.counts()[1:4] == (30, 0, 0)
        assert result.counts()[4] >= 10
        assert_sums_up(result.summary)
    assert len(shipper.read_state().dead_letters) == 70
    fake.default = Reply()
    tail.append(100, 110)
    running.wait_until(lambda: fake.holds(sample.ids[100:110]), "records of the input")
    running.wait_until(lambda: letters(shipper, "replay", check=False).returncode == 0, "the rest after the release")
    assert running.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:110])
    assert settled(shipper) == (110, 110, 0, 0)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_replay_sends_what_is_left_after_the_shipper_was_stopped_during_a_replay(
    tail: Tail, shipper: Shipper, fake: FakeService, sample: Sample, end: signal.Signals
):
    refuse(shipper, sample.lines[:100])
    fake.plan(*[Reply()] * 4)
    fake.default = HANG
    settings = {"batch.max_events": 10, "delivery.concurrency": 1, "delivery.drain_timeout_seconds": 0.5}
    running = listening(tail.start(check=False, settings=settings), shipper)
    replaying = shipper.start("dead-letters", "replay", "--summary", "json", check=False)
    replaying.wait_until(lambda: shipper.read_state().accepted == 40 and fake.requests == 5, "four batches saved")
    running.process.send_signal(end)
    ended, result = running.finish(), replaying.finish()
    assert result.returncode == 4
    if end == signal.SIGTERM:
        assert ended.returncode == 4, "the hanging batch is pending"
        assert result.counts()[1] == 40
        assert_sums_up(result.summary)
    else:
        assert "the running shipper ended before it answered" in result.stderr
    assert len(shipper.read_state().dead_letters) == 60
    assert settled(shipper) == (100, 40, 60, 0)
    fake.release()
    wait_until(lambda: len(fake.stored) == 5, "the stopped process has no request in flight")

    sent = fake.requests
    fake.default = Reply()
    running = listening(tail.start(check=False, settings=settings), shipper)
    again = letters(shipper, "replay", "--summary", "json")
    assert (again.returncode, again.counts()) == (0, (60, 60, 0, 0, 0))
    assert len(fake.event_ids(fake.bodies[sent:])) == 60
    assert running.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:100])
    assert settled(shipper) == (100, 100, 0, 0)


@pytest.mark.parametrize("passing", [1, 2])
@pytest.mark.parametrize("point", SAVES)
def test_a_crash_while_a_replay_is_saved_loses_nothing_and_repeats_no_saved_letter(
    tail: Tail, shipper: Shipper, sample: Sample, lockstep: Lockstep, point: str, passing: int
):
    refuse(shipper, sample.lines[:40])
    settings = {"batch.max_events": 10, "delivery.concurrency": 1, "state.commit_interval_seconds": 0.001}
    running = listening(
        tail.start(check=False, settings=settings, env={"SHIPPER_CRASH_AT": f"{point}:{passing}"}), shipper
    )
    result = letters(shipper, "replay", check=False)
    assert result.returncode == 4
    assert running.finish().returncode == -signal.SIGKILL, "the crash point was not reached"
    before, sent = settled(shipper), set(lockstep.event_ids())
    assert before[:2] == (40, 40 - before[2])
    left = {letter.event_id for letter in shipper.read_state().dead_letters}
    assert set(sample.ids[:40]) - sent <= left, "lost"
    bodies = len(lockstep.bodies)
    lockstep.begin()
    tail.append(40, 50)
    running = listening(tail.start(check=False, settings=settings), shipper)
    again = letters(shipper, "replay", "--summary", "json", check=False)
    assert again.counts() == (len(left), len(left), 0, 0, 0)
    running.wait_until(lambda: shipper.read_state().read == 50, "the input")
    assert running.stop().returncode == 0
    assert settled(shipper) == (50, 50, 0, 0)
    assert sorted(lockstep.event_ids(lockstep.bodies[bodies:])) == sorted(left | set(sample.ids[40:50]))


@pytest.mark.early
def test_replay_gives_up_if_nothing_settles_and_the_shipper_keeps_running(
    tail: Tail, shipper: Shipper, fake: FakeService, sample: Sample
):
    refuse(shipper, sample.lines[:10])
    fake.default = Reply(status=403)
    running = listening(tail.start(check=False, settings={"delivery.give_up_after_seconds": 1}), shipper)
    tail.append(10, 20)
    running.wait_for("delivery_paused")
    result = letters(shipper, "replay", "--summary", "json")
    assert (result.returncode, result.counts()[1:4]) == (4, (0, 0, 0))
    assert "it is paused (forbidden)" in result.stderr
    assert "no letter was settled for 1 s" in result.stderr
    assert not running.has_ended
    fake.default = Reply()
    retry(shipper)
    running.wait_until(lambda: shipper.read_state().accepted == 10, "the input")
    result = letters(shipper, "replay", "--summary", "json")
    assert result.counts() == (10, 10, 0, 0, 0)
    assert running.stop().returncode == 0


def test_replay_refuses_unsupported_options_while_a_shipper_is_running(
    tail: Tail, shipper: Shipper, service: Service, sample: Sample
):
    refuse(shipper, sample.lines[:10])
    running = listening(tail.start(check=False), shipper)
    slow = letters(shipper, "replay", "--rate", "1")
    assert (slow.returncode, "leave out --rate" in slow.stderr) == (2, True)
    other = letters(shipper, "replay", env={"SHIPPER__INTAKE__BASE_URL": "http://127.0.0.1:9"})
    assert (other.returncode, "intake.base_url" in other.stderr) == (2, True)
    assert service.stored == 0
    none = letters(shipper, "replay", "--reason", "ip", "--summary", "json")
    assert (none.returncode, none.counts()) == (0, (0, 0, 0, 0, 0))
    assert running.stop().returncode == 0


# Purge --------------------------------------------------------------------------------------------------------------


def test_a_consumer_is_erased_while_a_shipper_keeps_running(tail: Tail, shipper: Shipper, sample: Sample):
    canary = {"ConsumerID": 777000777, "Username": "canary_bird"}
    unreadable = b'{"Username":"canary_bird", 777000777\n'
    refuse(shipper, [changed(sample.lines[0], **canary), *sample.lines[1:20], unreadable])
    running = listening(tail.start(check=False), shipper)
    erase = ("purge", "--consumer-id", "0777000777")
    asked = letters(shipper, *erase)
    asked.assert_ended(2, "erase 1 dead letter and 0 spooled records of consumer 777000777 without sending them?")
    assert bytes_on_disk(shipper.state).count(b"canary_bird") >= 2
    result = letters(shipper, *erase, "--yes")
    result.assert_ended(4, "consumer 777000777: 1 dead letter and 0 spooled records erased", "dead letter 21")
    assert bytes_on_disk(shipper.state).count(b"canary_bird") == 1
    assert letters(shipper, "purge", "21", "--yes").returncode == 0
    again = letters(shipper, *erase, "--yes")
    again.assert_ended(0, "0 dead letters and 0 spooled records erased")
    assert b"canary_bird" not in bytes_on_disk(shipper.state)
    assert b"777000777" not in bytes_on_disk(shipper.state)
    tail.append(30, 40)
    tail.wait(range(30, 40))
    assert running.stop().returncode == 0
    assert settled(shipper) == (31, 10, 21, 0)
    assert (shipper.read_state().purged, len(shipper.read_state().dead_letters)) == (2, 19)
    assert "777000777" not in running.stderr
    assert "canary" not in running.stderr


def test_erasing_a_consumer_is_refused_while_the_spool_is_read(
    tail: Tail, shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.default = HANG
    running = shipper.open_pipe(sample.lines[0], settings=QUICK)
    running.wait_until(lambda: fake.requests, "a request")
    running.kill()
    running = listening(tail.start(check=False), shipper)
    result = letters(shipper, "purge", "--consumer-id", "1", "--yes", check=False)
    result.assert_ended(5, f"process {running.pid}")
    fake.release()
    running.wait_until(lambda: shipper.read_state().accepted == 1, "what was spooled")
    running.wait_until(
        lambda: letters(shipper, "purge", "--consumer-id", "1", "--yes", check=False).returncode == 0, "an empty spool"
    )
    assert running.stop().returncode == 0


@pytest.mark.parametrize("command", ["retry", "dead-letters replay", "dead-letters purge --consumer-id 1 --yes"])
def test_a_request_to_a_suspended_shipper_ends_with_advice(tail: Tail, shipper: Shipper, command: str):
    running = listening(tail.start(check=False), shipper)
    shipper.shortened["shipper.cli.control._ACKNOWLEDGE_LIMIT_S"] = 0.3
    running.process.send_signal(signal.SIGSTOP)
    try:
        result = shipper.run(*command.split(), check=False)
    finally:
        running.process.send_signal(signal.SIGCONT)
    result.assert_ended(5, "does not react: it is suspended or stuck")
    assert running.stop().returncode in {0, 4}, "4: it was still starting"


# The socket ---------------------------------------------------------------------------------------------------------


def test_only_the_owner_can_use_the_socket_and_a_stale_socket_is_replaced(shipper: Shipper):
    running = listening(shipper.open_pipe(), shipper)
    place = shipper.state / "control"
    assert stat.S_IMODE(shipper.state.stat().st_mode) == 0o700
    assert place.stat().st_mode == stat.S_IFSOCK | 0o600
    running.kill()
    assert place.is_socket()
    assert retry(shipper).returncode == 2
    running = listening(shipper.open_pipe(), shipper)
    assert "nothing to retry" in retry(shipper).stderr
    assert running.end_input().returncode == 0
    assert not place.exists()


def test_a_state_directory_with_a_long_path_has_a_control_socket(shipper: Shipper):
    shipper.state = shipper.folder / ("long" * 30) / ("longer" * 30)
    settings = {"state.directory": str(shipper.state)}
    running = listening(shipper.open_pipe(settings=settings), shipper)
    assert "nothing to retry" in retry(shipper, settings=settings).stderr
    assert running.end_input().returncode == 0


def test_without_a_control_socket_shipping_works_and_one_warning_is_logged(shipper: Shipper, sample: Sample):
    (shipper.state / "control").mkdir(parents=True)
    running = shipper.open_pipe()
    running.wait_for("control_unavailable")
    result = retry(shipper)
    result.assert_ended(5, f"process {running.pid}")
    ended = running.end_input(*sample.lines[:10])
    assert ended.counts() == (10, 10, 0, 0, 0)
    assert ended.stderr.count("control_unavailable") == 1


# Hostile clients ----------------------------------------------------------------------------------------------------


def test_an_invalid_control_request_is_refused_with_a_message(shipper: Shipper):
    running = listening(shipper.open_pipe(), shipper)
    for sent, words in {
        b"\n": "invalid request",
        b"rubbish\n": "invalid request",
        b"[" * 50_000 + b"\n": "invalid request",
        b"\xff\xfe" * 100 + b"\n": "invalid request",
        b'{"protocol":1,"version":"0","command":7}\n': "invalid request",
        b'{"protocol":1,"version":"0","command":"erase everything"}\n': "lacks this command",
        b'{"protocol":99,"version":"9.9","command":"retry"}\n': "this is 9.9, which uses another protocol",
        b"x" * REQUEST_BYTES: "too long",
    }.items():
        with client(shipper) as connection:
            connection.sendall(sent)
            (answer,) = answers(connection)
        assert (answer["code"], words in answer["message"]) == (2, True), answer
    assert running.end_input().returncode == 0


def test_many_idle_control_connections_do_not_disturb_a_running_shipper(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    running = tail.start()
    admin = Admin(running)
    tail.wait(10)
    with ExitStack() as crowd:
        for number in range(100):
            connection = crowd.enter_context(client(shipper))
            with suppress(ConnectionError):
                connection.sendall((b"", b"{", b"x" * 1000)[number % 3])
        tail.deliver(10)
        assert admin.get("/healthz").status_code == 200
        assert len(os.listdir(f"/proc/{running.pid}/fd")) < 100, "it keeps all connections"
    running.wait_until(lambda: retry(shipper).returncode == 0, "a free place for a real client")
    assert "Traceback" not in running.stderr
    assert running.stop(limit_s=10).returncode == 0


def test_a_client_with_an_unfinished_request_is_disconnected_and_does_not_delay_shutdown(shipper: Shipper):
    shipper.shortened |= {"shipper.pipeline.control._REQUEST_LIMIT_S": 0.3}
    running = listening(shipper.open_pipe(), shipper)
    with client(shipper) as slow, client(shipper) as slower:
        slow.sendall(b'{"protocol":')
        assert answers(slow) == []
        assert answers(slower) == []
    with client(shipper) as slow:
        slow.sendall(b'{"protocol":')
        running.stdin.close()
        assert running.finish(limit_s=10).returncode == 0
