"""Operates a running shipper: queries its admin address, and plays systemd."""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.driver import Running


class Admin:
    """The admin address of a running shipper."""

    def __init__(self, running: Running) -> None:
        running.wait_for("admin_listening")
        found = re.search(r'"address":"(http://[^"]+)"', running.stderr)
        assert found
        self.address = found[1]

    def get(self, path: str, *, limit_s: float = 10) -> httpx.Response:
        # Plain HTTP needs no certificates, and loading them takes time.
        return httpx.get(self.address + path, trust_env=False, verify=False, timeout=limit_s)

    def status(self) -> dict[str, Any]:
        answer = self.get("/status")
        assert answer.status_code == 200
        return answer.json()

    def metrics(self) -> dict[str, float]:
        return {
            sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
        }

    def totals(self) -> dict[str, float]:
        """Return the metrics by name, without `shipper_` and `_total`; sum over labels."""
        totals: defaultdict[str, float] = defaultdict(float)
        for line in self.get("/metrics", limit_s=60).text.splitlines():  # the machine may be busy
            if not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                totals[key.partition("{")[0].removeprefix("shipper_").removesuffix("_total")] += float(value)
        return totals


class Manager:
    """Plays systemd for a service with a watchdog."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "60000000"}

    def hear(self, limit_s: float) -> list[str]:
        """Return the lines received until none arrives for `limit_s`; stop after ten seconds."""
        self._socket.settimeout(limit_s)
        lines: list[str] = []
        for _ in range(10):
            try:
                lines += self._socket.recv(4096).decode().splitlines()
            except TimeoutError:
                break
        return lines

    def close(self) -> None:
        self._socket.close()
