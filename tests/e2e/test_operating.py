"""A long-running shipper: admin address, Prometheus, SIGHUP, shutdown, and notifications to systemd."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, wait_until
from tests.e2e.files import Tail, append
from tests.e2e.operated import Admin
from tests.e2e.surroundings import free_port
from tests.tools import assert_content, run, tool

# The admin address ------------------------------------------------------------------------------------------------


def test_the_admin_address_reports_the_state_without_personal_data(
    tail: Tail, shipper: Shipper, service: Service, sample: Sample
):
    bad = sample.lines[20].replace(b'"ConsumerCountry":"', b'"ConsumerCountry":"x')
    append(tail.file, *sample.lines[:20], bad, sample.lines[0])
    running = tail.start()
    admin = Admin(running)
    tail.wait(20)
    running.wait_until(lambda: admin.metrics().get("shipper_commits_total", 0) > 0, "a visible commit")
    metrics = admin.metrics()
    assert metrics["shipper_records_read_total"] == 22
    assert metrics["shipper_events_accepted_total"] == 20
    assert sum(value for name, value in metrics.items() if name.startswith("shipper_dead_letters_total")) == 1
    assert metrics["shipper_duplicates_total"] == 1
    assert metrics["shipper_pending_records"] == 0
    assert metrics["shipper_request_duration_seconds_count"] == metrics["shipper_requests_total{202}"]
    running.wait_until(lambda: admin.metrics()["shipper_lag_bytes"] == 0, "no lag")

    running.wait_until(lambda: admin.status()["state"]["read"] == 22, "the saved state")
    status = admin.status()
    assert status["live"]["process_id"] == running.pid
    assert status["live"]["read"] == 22
    assert (status["state"]["read"], status["state"]["accepted"]) == (22, 20)
    (stream,) = status["state"]["streams"]
    assert (stream["path"], stream["lag_bytes"]) == (str(tail.file), 0)
    (letter,) = status["state"]["newest_dead_letters"]
    assert letter["path"] == str(tail.file)
    assert stream["newest_dead_letter"] == {name: letter[name] for name in ("id", "rule", "last_at")}
    assert status["report"] is None

    assert (admin.get("/healthz").status_code, admin.get("/readyz").text) == (200, "ready\n")
    moments = admin.get("/history").json()
    assert moments
    assert all(len(moment) == 7 for moment in moments)
    assert admin.get(f"/history?since={moments[-1][0]}").json() in ([], admin.get("/history").json()[len(moments) :])
    assert admin.get("/history?since=soon").status_code == 400
    page = admin.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert admin.get("/nowhere").status_code == 404
    shown = "".join(admin.get(path).text for path in ("/", "/status", "/metrics", "/history", "/readyz", "/healthz"))
    for field in (b"IP", b"Username", b"BTag"):
        value = re.search(rb'"%s":"([^"]+)"' % field, bad)
        assert value
        assert value[1].decode() not in shown
    assert service.target.token not in shown
    assert service.target.subscription_key not in shown
    assert running.stop().returncode == 0
    assert (shipper.state / "live.json").stat().st_mode & 0o777 == 0o600


def test_a_shipper_is_unready_but_healthy_while_the_service_denies_access(tail: Tail, service: Service):
    service.set_faults({"effect": "status", "status": 403})
    tail.append(0, 10)
    running = tail.start(settings={"delivery.retry_max_seconds": 0.5})
    admin = Admin(running)
    running.wait_until(lambda: admin.get("/readyz").status_code == 503, "unready")
    running.wait_until(lambda: "forbidden" in admin.get("/readyz").text, "unready, with the reason")
    assert admin.get("/healthz").status_code == 200
    assert admin.metrics()["shipper_paused{forbidden}"] == 1
    (pause,) = admin.status()["live"]["pauses"]
    assert pause["reason"] == "forbidden"
    assert pause["advice"]
    tail.append(10, 20)
    running.wait_until(
        lambda: admin.metrics()["shipper_lag_bytes"] == tail.file.stat().st_size,
        "lines written during a pause count as lag",
    )
    service.set_faults()
    tail.wait(20)
    running.wait_until(lambda: admin.get("/readyz").status_code == 200, "ready")
    assert admin.metrics()["shipper_paused{forbidden}"] == 0
    assert running.stop().returncode == 0


def test_an_address_in_use_is_an_error_that_names_the_key(tail: Tail):
    tail.append(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = tail.start(settings={"admin.listen": address}).finish()
    result.assert_ended(2, address, "admin.listen", "in use")


def test_one_shot_commands_listen_only_on_a_configured_address(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    for command in (["pipe"], ["backfill", tail.file]):
        for listen in ([], ["--listen", "127.0.0.1:0"]):
            with tail.file.open("rb") as stdin:
                result = shipper.run(*command, *listen, stdin=stdin)
            assert result.returncode == 0, result.stderr
            assert ("admin_listening" in result.stderr) == bool(listen), command
    assert shipper.run("pipe", "--listen", "nowhere").returncode == 2


# SIGHUP -----------------------------------------------------------------------------------------------------------


def test_sighup_reports_a_bad_file_and_applies_globs_level_and_rate_of_a_good_one_without_repeats(
    tail: Tail, service: Service, sample: Sample
):
    tail.append(0, 10)
    tail.append(10, 20, "b.ndjson")
    tail.configure()
    running = tail.start(None)
    tail.wait(10)
    for number, (text, words) in enumerate(
        [
            ("[batch]\nmax_evnts = 5\n", "did you mean batch.max_events?"),
            ("[broken\n", "is not valid TOML"),
            ('[log]\nlevel = "loud"\n', "log.level"),
        ]
    ):
        tail.configure("*.ndjson", text)
        running.process.send_signal(signal.SIGHUP)
        running.wait_for(words)
        assert running.stderr.count("reload_refused") == number + 1
    tail.append(50, 60)
    tail.wait([*range(10), *range(50, 60)])
    assert service.stored == 20, "a bad file changes nothing"

    tail.configure("*.ndjson", '[log]\nlevel = "debug"\n[delivery]\nrate_limit_events_per_second = 5000\n')
    running.process.send_signal(signal.SIGHUP)
    tail.wait(20)
    running.wait_for("batch_sent")
    assert "delivery.rate_limit_events_per_second" in running.stderr
    tail.append(20, 30)
    tail.wait(30)

    tail.configure("b.ndjson")
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("source_dropped")
    tail.append(30, 40)
    tail.append(40, 50, "b.ndjson")
    tail.wait([*range(30), *range(40, 60)])
    assert service.stored == 50, "a file that no longer matches is not read"

    tail.configure("*.ndjson")
    running.process.send_signal(signal.SIGHUP)
    tail.wait(60)
    assert running.stop().returncode == 0
    assert service.times_received() == dict.fromkeys(sample.ids[:60], 1)


def test_sighup_reloads_credentials_and_ends_a_pause(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    good, shipper.target = shipper.target, shipper.target._replace(subscription_key="wrong")
    running = tail.start()
    running.wait_for("delivery_paused")
    key = tail.folder / "key"
    key.touch(mode=0o600)
    key.write_text(good.subscription_key)
    text = shipper.config.read_text().replace('{ env = "INTAKE_KEY" }', f'{{ file = "{key}" }}')
    report = '[report]\nbase_url = "https://report.example.com"\n'  # not used by a running shipper
    shipper.config.write_text(text.replace("[state]", f"allow_plaintext = true\n{report}[state]"))
    running.process.send_signal(signal.SIGHUP)
    tail.wait(10)
    running.wait_for("restart_needed")
    assert '"changed":["intake.subscription_key"]' in running.stderr
    assert '"keys":["intake.allow_plaintext"]' in running.stderr
    assert good.subscription_key not in running.stderr
    assert running.stop().returncode == 0


# An outage --------------------------------------------------------------------------------------------------------


def test_files_rotated_and_deleted_during_an_outage_are_held_open(tail: Tail, service: Service):
    """A pause stops reading, but not polling: a file that exists only for a moment is held open."""
    service.set_faults({"effect": "status", "status": 503})
    tail.append(0, 5)
    running = tail.start(settings={"batch.max_events": 1, "delivery.retry_max_seconds": 0.5})
    running.wait_for("delivery_paused")
    for number in range(1, 6):
        tail.file.rename(tail.folder / "gone")
        tail.append(number * 10, number * 10 + 10)
        running.wait_until(
            lambda seen=number + 1: running.stderr.count("source_opened") == seen, "the new file is held"
        )
        (tail.folder / "gone").unlink()
    service.set_faults()
    tail.wait([*range(5), *range(10, 60)])
    assert running.stop().returncode == 0


# Stopping ---------------------------------------------------------------------------------------------------------


def test_until_idle_reads_until_the_application_has_ended(tail: Tail):
    tail.append(0, 10)
    running = tail.start(settings={"delivery.drain": "until_idle", "delivery.drain_idle_seconds": 1.5})
    tail.wait(10)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    for _ in range(4):
        tail.deliver(10)
    result = running.finish()
    result.assert_ended(0, '"is_idle":true')


def test_until_idle_stops_reading_in_time_to_deliver_the_records_read(tail: Tail):
    tail.append(0, 10)
    drain = {"delivery.drain": "until_idle", "delivery.drain_idle_seconds": 60, "delivery.drain_timeout_seconds": 2.5}
    running = tail.start(settings=drain)
    tail.wait(10)
    running.process.send_signal(signal.SIGTERM)
    result = running.finish()
    result.assert_ended(0, '"is_idle":false')


# systemd ----------------------------------------------------------------------------------------------------------


def test_systemd_is_notified_of_readiness_reload_watchdog_and_stop(tail: Tail, sample: Sample):
    tail.append(0, 10)
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"\0shipper-test-{os.getpid()}"
        manager.bind(name)
        manager.setblocking(False)

        def hear(line: str) -> bool:
            try:
                while True:
                    heard.extend(manager.recv(4096).decode().splitlines())
            except BlockingIOError:
                return line in heard

        running = tail.start(env={"NOTIFY_SOCKET": f"@{name[1:]}", "WATCHDOG_USEC": "30000000"})
        running.wait_until(lambda: hear("READY=1"), "ready")
        tail.wait(10)
        heard.clear()
        running.wait_until(lambda: hear("WATCHDOG=1"), "life")
        running.process.send_signal(signal.SIGHUP)
        running.wait_until(lambda: hear("RELOADING=1"), "a reload")
        running.wait_until(lambda: hear("READY=1"), "the end of the reload")
        assert running.stop().returncode == 0
        wait_until(lambda: hear("STOPPING=1"), "a stop")
    assert not any(each in "".join(heard) for each in sample.ids[:10])


# Prometheus ---------------------------------------------------------------------------------------------------------


EXAMPLES = Path(__file__).parents[2] / "config/prometheus"


class Prometheus:
    def __init__(self, directory: Path, target: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        settings = (EXAMPLES / "prometheus.yml").read_text().replace("127.0.0.1:9464", target)
        (directory / "prometheus.yml").write_text(re.sub(r"_interval: \d+s", "_interval: 200ms", settings))
        rules = re.sub(r"for: \w+", "for: 0s", (EXAMPLES / "alerts.yml").read_text())
        (directory / "alerts.yml").write_text(rules)
        self._log = (directory / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={self.address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **query: str) -> Any:
        try:
            url = f"http://{self.address}/api/v1/{path}"
            answer = httpx.get(url, params=query, trust_env=False, verify=False, timeout=10)
        except httpx.TransportError:
            return None  # not started yet
        return answer.json()["data"] if answer.status_code == 200 else None

    def firing(self) -> dict[str, dict[str, str]]:
        found = self.ask("alerts")
        return {
            alert["labels"]["alertname"]: alert["labels"] | alert["annotations"]
            for alert in (found["alerts"] if found else [])
            if alert["state"] == "firing"
        }

    def value(self, query: str) -> float | None:
        found = self.ask("query", query=query)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._log.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[list[Prometheus]]:
    started: list[Prometheus] = []
    tool("prometheus")
    yield started
    for each in started:
        each.end()


def test_metrics_pass_the_linter_and_an_alert_fires_while_the_service_denies_access(
    prometheus: list[Prometheus], tmp_path: Path, tail: Tail, service: Service, sample: Sample
):
    assert_content(run(tool("promtool"), "check", "rules", EXAMPLES / "alerts.yml"))
    append(tail.file, *sample.lines[:10], b"{}\n")
    running = tail.start(settings={"delivery.retry_max_seconds": 0.5})
    tail.wait(10)
    text = Admin(running).get("/metrics").text
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    server = Prometheus(tmp_path, Admin(running).address.removeprefix("http://"))
    prometheus.append(server)
    wait_until(lambda: server.value("shipper_events_accepted_total") == 10, "a scrape", limit_s=30)
    assert "ShipperPaused" not in server.firing()

    service.set_faults({"effect": "status", "status": 403})
    tail.append(10, 20)
    wait_until(lambda: "ShipperPaused" in server.firing(), "an alert", limit_s=30)
    alert = server.firing()["ShipperPaused"]
    assert (alert["reason"], alert["job"]) == ("forbidden", "shipper")
    assert "shipper check --online" in alert["description"]

    service.set_faults()
    tail.wait(20)
    wait_until(lambda: "ShipperPaused" not in server.firing(), "the end of the alert", limit_s=30)
    assert running.stop().returncode == 0
    wait_until(lambda: "ShipperDown" in server.firing(), "another alert", limit_s=30)
