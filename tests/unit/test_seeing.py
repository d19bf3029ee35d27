"""Observability: charts, log limits, systemd notifications, and metrics."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
import structlog
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shipper.delivery.sender import DeliveryCounts
from shipper.model.errors import StateError
from shipper.pipeline.observer import _quantile as quantile
from shipper.status.admin.metrics import metrics_registry
from shipper.status.live import LIVE_FILE, Board, Live, LiveFile, Pause, read_live
from shipper.status.logs import configure_logs, set_level, take_left_out
from shipper.status.overview import Overview
from shipper.status.pauses import ADVICE
from shipper.status.systemd import Notifier
from tests.cases import each


class Clock:
    """A manual clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def live(**fields: object) -> Live:
    usual = {"version": "1", "process_id": 7, "command": "run", "phase": "running", "started_at": 1.0, "at": 2.0}
    return Live(**{**usual, **fields})  # type: ignore[arg-type]


ENCODED = msgspec.json.encode(live())


# The board --------------------------------------------------------------------------------------------------------


def test_the_charts_cover_half_an_hour_in_steps_of_two_seconds():
    board = Board()
    for second in range(4000):
        board.publish(live(at=1000.0 + second, requests={"202": 5 if second < 3000 else 6}, latency_p50_seconds=0.25))
    points = board.points(0)
    assert len(points) == 900
    assert [each.at for each in points][-2:] == [4996.0, 4998.0]
    assert [each.at for each in board.points(4994.0)] == [4996.0, 4998.0]
    answered = [each for each in points if each.latency_p50_seconds is not None]
    assert [each.at for each in answered] == [4000.0], "where no answer came there is no latency"


def test_a_clock_that_is_set_back_does_not_stop_the_charts():
    board = Board()
    for at in (1000.0, 1002.0, 500.0, 502.0):
        board.publish(live(at=at))
    assert [each.at for each in board.points(0)] == [1000.0, 1002.0, 500.0, 502.0]


# The log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(capsys: pytest.CaptureFixture[str]):
    """Real logs, with a manual clock."""
    before = structlog.get_config()
    clock = Clock()
    take_left_out()
    configure_logs("info", "json", now=clock)
    yield clock
    take_left_out()
    set_level("info")
    structlog.configure(**before)


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_repeated_log_lines_are_suppressed_and_counted(clock: Clock, capsys: pytest.CaptureFixture[str]):
    log = structlog.get_logger()
    for number in range(1000):
        log.warning("repeated_here", number=number)
    log.info("said_once")
    lines = written(capsys)
    assert [line["number"] for line in lines[:-1]] == list(range(10))
    assert lines[-1]["event"] == "said_once"
    clock.now += 30
    log.warning("repeated_here", number=1000)
    (line,) = written(capsys)
    assert (line["number"], line["left_out"]) == (1000, 990)
    log.warning("repeated_here")
    assert take_left_out() == {"repeated_here": 1}
    assert take_left_out() == {}
    assert written(capsys) == []


def test_a_day_of_repeats_is_some_thousand_lines(clock: Clock, capsys: pytest.CaptureFixture[str]):
    log = structlog.get_logger()
    for _ in range(86_400):
        log.error("goes_on_and_on")
        clock.now += 1
    assert 2880 <= len(written(capsys)) <= 2891


def test_the_level_can_be_changed_while_loggers_are_in_use(clock: Clock, capsys: pytest.CaptureFixture[str]):
    log = structlog.get_logger()
    log.debug("hidden")
    set_level("debug")
    for _ in range(100):
        log.debug("shown")
    set_level("error")
    log.warning("hidden")
    log.error("an_error")
    assert [line["event"] for line in written(capsys)] == [*["shown"] * 100, "an_error"]


# systemd ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.setblocking(False)
        yield path, listener


def messages(listener: socket.socket) -> list[list[str]]:
    received = []
    while True:
        try:
            received.append(listener.recv(4096).decode().splitlines())
        except BlockingIOError:
            return received


def test_systemd_is_notified_of_readiness_liveness_reload_and_stop(manager: tuple[Path, socket.socket]):
    path, listener = manager
    clock = Clock()
    notifier = Notifier({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "30000000"}, now=clock)

    def told(**fields: object) -> list[str]:
        notifier.notify(live(**fields))
        (message,) = messages(listener)
        return message

    quiet = "0 accepted, 0 dead-lettered, nothing behind."
    assert told(phase="starting") == ["WATCHDOG=1", f"STATUS=Starting. {quiet}"]
    words = "Everything written until 00:00:02Z is delivered. 1,234 accepted, 0 dead-lettered, nothing behind."
    assert told(accepted=1234) == ["WATCHDOG=1", "READY=1", f"STATUS={words}"]
    assert told() == ["WATCHDOG=1"]
    notifier.begin_reload()
    assert messages(listener) == [["RELOADING=1", f"MONOTONIC_USEC={int(clock.now * 1e6)}"]]
    assert told() == ["WATCHDOG=1"], "it is not over yet"
    notifier.end_reload()
    assert "READY=1" in told()
    clock.now += 10
    waiting = "Waiting: 0 records and 5 kB. Delivery resumes automatically once the cause is gone"
    counts = "0 accepted, 0 dead-lettered, 5 kB behind"
    pauses = [Pause("forbidden", "no", "ask", 1.0)]
    assert told(pauses=pauses, lag_bytes=5000) == ["WATCHDOG=1", f"STATUS=Paused: forbidden. {waiting}. {counts}."]
    assert "STOPPING=1" in told(phase="draining")
    assert told(phase="stopped") == ["WATCHDOG=1"], "it is told once"


def test_a_missing_notify_socket_is_ignored(tmp_path: Path):
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, {"NOTIFY_SOCKET": "@gone"}):
        notifier = Notifier(environ, now=Clock())
        notifier.notify(live())
        notifier.begin_reload()


# Metrics ----------------------------------------------------------------------------------------------------------


def unreadable() -> Overview:
    raise StateError("no")


def values(snapshot: Live) -> dict[str, float]:
    text = generate_latest(metrics_registry(lambda: snapshot, Overview)).decode()
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_the_values_of_the_snapshot():
    counts = DeliveryCounts()
    for seconds in (0.004, 0.005, 0.0051, 70.0):
        counts.note_request("202", seconds)
    records = {"read": 100, "accepted": 90, "dead_lettered": 4, "duplicates": 3, "pending": 3}
    latency = {"latency_counts": counts.latency_counts, "latency_total_seconds": counts.latency_total_s}
    by_name = {"dead_letters": {"ip": 3, "country": 1}, "requests": {"202": 9, "none": 1}, "retries": {"throttled": 1}}
    pauses = [Pause("forbidden", "", "", 1.0)]
    found = values(live(**records, **latency, **by_name, pauses=pauses, token_expires_at=5000.0))
    assert found["shipper_records_read_total"] == 100
    assert found["shipper_events_accepted_total"] == 90
    assert (found["shipper_dead_letters_total{ip}"], found["shipper_dead_letters_total{country}"]) == (3, 1)
    assert (found["shipper_duplicates_total"], found["shipper_pending_records"]) == (3, 3)
    assert found["shipper_requests_total{none}"] == 1
    buckets = {"bucket{0.005}": 2, "bucket{0.01}": 3, "bucket{60.0}": 3, "bucket{+Inf}": 4, "count": 4}
    assert {name: found[f"shipper_request_duration_seconds_{name}"] for name in buckets} == buckets
    assert {name: value for name, value in found.items() if name.startswith("shipper_paused")} == {
        f"shipper_paused{{{reason}}}": float(reason == "forbidden") for reason in ADVICE
    }
    assert found["shipper_dead_letters_total{too_large}"] == 0, "so that the first one is an increase"
    assert found["shipper_streams"] == 0
    assert found["shipper_token_expiry_timestamp_seconds"] == 5000
    assert "shipper_certificate_expiry_timestamp_seconds" not in found, "not known is not 0"
    assert found["process_resident_memory_bytes"] > 0


def test_before_the_first_snapshot_there_are_only_process_metrics():
    text = generate_latest(metrics_registry(lambda: None, unreadable)).decode()
    assert "process_cpu_seconds_total" in text
    assert "shipper_" not in text


def test_a_quantile_of_few_values_is_one_of_them():
    assert quantile([1.0], 0.95) == 1.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0


# The snapshot on disk ---------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_as_it_was_written_and_only_by_its_owner(tmp_path: Path):
    snapshot = live(pauses=[Pause("tls", "m", "a", 3.0, 4.0)], requests={"202": 1})
    file = LiveFile(tmp_path)
    for published in (live(), snapshot):
        file.update(published)
        file.write()
    assert read_live(tmp_path) == snapshot
    assert (tmp_path / LIVE_FILE).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [LIVE_FILE]


def test_an_unchanged_snapshot_is_written_only_every_half_minute(tmp_path: Path):
    file = LiveFile(tmp_path)
    for at in range(100, 200):
        file.update(live(at=at))
        file.write()
        written = read_live(tmp_path)
        assert written.at == at - (at - 100) % 30


def test_a_full_disk_for_the_snapshot_is_ignored(tmp_path: Path):
    file = LiveFile(tmp_path / "gone")
    file.update(live())
    file.write()
    assert read_live(tmp_path / "gone") is None, "it is missing"
    (tmp_path / "gone").mkdir()
    file.write()
    assert read_live(tmp_path / "gone") == live()


def test_a_snapshot_is_read_with_fields_of_a_later_version(tmp_path: Path):
    (tmp_path / LIVE_FILE).write_bytes(msgspec.json.encode({**msgspec.to_builtins(live()), "mood": {"of": ["later"]}}))
    assert read_live(tmp_path) == live()


@each(
    "content",
    [
        *(b"", b"{", b"[]", b"[1]", b'{"version":"1"}', b'{"version": 5}', b"\xff\xfe", b"\0" * 100),
        *(b"[" * 100_000, b'{"mood":' + b"[" * 100_000),
        *(ENCODED[:50], ENCODED[:-1], b" " * (2 << 20) + ENCODED),
        msgspec.json.encode({**msgspec.to_builtins(live()), "phase": "dreaming"}),
    ],
)
def test_a_snapshot_that_cannot_be_decoded_is_none(tmp_path: Path, content: bytes):
    (tmp_path / LIVE_FILE).write_bytes(content)
    assert read_live(tmp_path) is None


def test_a_folder_instead_of_the_snapshot_is_none(tmp_path: Path):
    (tmp_path / LIVE_FILE).mkdir()
    assert read_live(tmp_path) is None


def test_the_docs_have_advice_for_every_pause():
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    section = page.partition("\n## Pauses\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    assert {reason.strip(" `"): advice.strip() for reason, advice in rows} == ADVICE
