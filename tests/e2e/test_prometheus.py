"""A real Prometheus scrapes a running shipper with the example's configuration, and its rules raise alerts."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, wait_until
from tests.e2e.files import append, wait_for_events
from tests.e2e.operated import Admin, Start
from tests.tools import assert_content, run, tool

EXAMPLES = Path(__file__).parents[2] / "config/prometheus"


class Prometheus:
    def __init__(self, directory: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
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
    prometheus: list[Prometheus], tmp_path: Path, start: Start, folder: Path, service: Service, sample: Sample
):
    assert_content(run(tool("promtool"), "check", "rules", EXAMPLES / "alerts.yml"))
    append(folder / "a.ndjson", [*sample.lines[:10], b"{}\n"])
    running = start(settings={"delivery.retry_max_seconds": 0.5})
    wait_for_events(running, service, sample.ids[:10])
    text = Admin(running).get("/metrics").text
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    server = Prometheus(tmp_path, Admin(running).address.removeprefix("http://"))
    prometheus.append(server)
    wait_until(lambda: server.value("shipper_events_accepted_total") == 10, "a scrape", limit_s=30)
    assert "ShipperPaused" not in server.firing()

    service.set_faults({"effect": "status", "status": 403})
    append(folder / "a.ndjson", sample.lines[10:20])
    wait_until(lambda: "ShipperPaused" in server.firing(), "an alert", limit_s=30)
    alert = server.firing()["ShipperPaused"]
    assert (alert["reason"], alert["job"]) == ("forbidden", "shipper")
    assert "shipper check --online" in alert["description"]

    service.set_faults()
    wait_for_events(running, service, sample.ids[:20])
    wait_until(lambda: "ShipperPaused" not in server.firing(), "the end of the alert", limit_s=30)
    assert running.stop().returncode == 0
    wait_until(lambda: "ShipperDown" in server.firing(), "another alert", limit_s=30)
