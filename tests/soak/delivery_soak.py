"""
A minute without the service at 20,000 events a second, and a minute with tokens that live five seconds, for real:
`python -m tests.soak.delivery_soak [outage] [tokens]`, about five minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.rows import sample_file
from tests.e2e.driver import SHIPPER, Running, Service, Shipper, Target, wait_until

EVENTS = 2_000_000
RATE = 20_000
TICK_S = 0.1
OUTAGE_S = 60
TOKEN_LIFE_S = 5
TOKENS_S = 60
FULL_SPEED_S = 10  # within which it is back


class Writer(threading.Thread):
    """Appends sample events to a file at the rate, until there are no more or it is told to stop."""

    def __init__(self, sample: Path, path: Path) -> None:
        super().__init__(name="writer")
        self.written = 0
        self._sample, self._path = sample, path
        self._is_stopping = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        with self._sample.open("rb") as lines, self._path.open("ab") as file:
            while not self._is_stopping.wait(max(0.0, due - time.monotonic())):
                due += TICK_S
                block = [line for line, _ in zip(lines, range(int(RATE * TICK_S)), strict=False)]
                file.writelines(block)
                file.flush()
                self.written += len(block)

    def stop(self) -> int:
        self._is_stopping.set()
        self.join()
        return self.written


@contextmanager
def sandbox(folder: Path, *flags: str) -> Iterator[Service]:
    """A sandbox in a process of its own, that keeps nothing."""
    config = folder / "sandbox.toml"
    command = [SHIPPER, "sandbox", "--port", "0", "--blackhole", "--write-config", config, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_until(config.exists, "the sandbox has written its configuration")
        intake = tomllib.loads(config.read_text())["intake"]
        with Service(Target(intake["base_url"], intake["subscription_key"], intake["token"])) as service:
            yield service
    finally:
        process.terminate()
        process.wait(10)


def accepted(service: Service) -> int:
    return service.counts()["events_received"]


def rss_mib(running: Running) -> float:
    for line in Path(f"/proc/{running.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def watched(seconds: float, look: Callable[[], float]) -> list[float]:
    """Look twice a second."""
    seen = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen.append(look())
        time.sleep(0.5)
    return seen


def outage(folder: Path) -> None:
    """The memory stays flat, requests are few, nothing is lost, and it is back at full speed at once."""
    with sandbox(folder) as service, Shipper(folder / "shipper", service.target) as shipper:
        path = shipper.folder / "app.ndjson"
        path.touch()
        writer = Writer(sample_file(EVENTS), path)
        writer.start()
        running = shipper.start("run", settings={"input.include": f'["{path}"]'})
        wait_until(lambda: accepted(service) > 5 * RATE, "under way", limit_s=60)
        before = max(watched(5, lambda: rss_mib(running)))
        service.set_faults({"effect": "status", "status": 503})
        asked = len(service.requests(status=503))
        time.sleep(2)  # what was in flight
        held = accepted(service)
        during = max(watched(OUTAGE_S, lambda: rss_mib(running)))
        asked = len(service.requests(status=503)) - asked
        assert accepted(service) == held
        service.set_faults()
        recovered_at = time.monotonic()
        behind = writer.written - held
        wait_until(lambda: accepted(service) > held + 2 * RATE, "it is back", limit_s=60)
        back_s = time.monotonic() - recovered_at
        wait_until(lambda: writer.written - accepted(service) < RATE, "it has caught up", limit_s=300)
        caught_up_s = time.monotonic() - recovered_at
        after = rss_mib(running)
        written = writer.stop()
        wait_until(lambda: accepted(service) == written, "everything has arrived", limit_s=60)
        result = running.stop()
        assert result.returncode == 0, result.stderr[-2000:]
    print(
        f"outage of {OUTAGE_S} s at {RATE:,}/s: {written:,} written, {written:,} accepted; "
        f"{asked} requests meanwhile; RSS {before:.0f} MiB before, {during:.0f} during, {after:.0f} after; "
        f"{behind:,} behind, 40,000 of them {back_s:.1f} s after the service was back, all after {caught_up_s:.1f} s"
    )
    assert asked < OUTAGE_S
    assert during < before + 32, "it read on"
    assert back_s < FULL_SPEED_S


def tokens(folder: Path) -> None:
    """No event is lost and hardly a request refused, with one token request for each life of a token."""
    with (
        sandbox(folder, "--token-lifetime-seconds", str(TOKEN_LIFE_S)) as service,
        Shipper(folder / "shipper", service.target) as shipper,
    ):
        access = service.access()
        oauth2 = {
            f"intake.oauth2.{name}": access[name] for name in ("token_url", "client_id", "client_secret", "scope")
        }
        shipper.config.write_text(shipper.config.read_text().replace('token = { env = "INTAKE_TOKEN" }\n', ""))
        path = shipper.folder / "app.ndjson"
        path.touch()
        writer = Writer(sample_file(EVENTS), path)
        writer.start()
        running = shipper.start("run", settings={"input.include": f'["{path}"]', **oauth2})
        time.sleep(TOKENS_S)
        written = writer.stop()
        wait_until(lambda: accepted(service) == written, "everything has arrived", limit_s=60)
        refused = len(service.requests(status=401))
        asked = len(service.requests(operation="token"))
        result = running.stop()
        assert result.returncode == 0, result.stderr[-2000:]
        assert shipper.read_state().dead_letters == ()
    print(
        f"tokens of {TOKEN_LIFE_S} s for {TOKENS_S} s: {written:,} written and accepted, {refused} requests refused, "
        f"{asked} tokens asked for"
    )
    assert refused <= 2
    assert asked <= 2 * TOKENS_S / TOKEN_LIFE_S


def main() -> None:
    parts = {"outage": outage, "tokens": tokens}
    for name in sys.argv[1:] or parts:
        with tempfile.TemporaryDirectory(prefix="shipper-soak-") as folder:
            parts[name](Path(folder))


if __name__ == "__main__":
    main()
