"""The example sidecar.toml with the example rotation and the real logrotate: no record is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, sandbox

CONFIG = Path(__file__).parents[2] / "config"
ROTATIONS = 35  # with each of the four variants below; more than are kept
BEHIND = 20  # rotations after which the shipper gets time to deliver everything; 30 are kept
QUICK = {
    "batch.linger_seconds": 0.02,
    "input.poll_interval_seconds": 0.1,
    "input.rotate_wait_seconds": 0.3,
    "state.commit_interval_seconds": 0.05,
}
WAYS = {
    "rename, delaycompress": {},  # the example unchanged
    "rename, compress": {"    delaycompress\n": ""},
    "copytruncate, delaycompress": {"    create 0640\n": "    copytruncate\n"},
    "copytruncate, compress": {"    create 0640\n": "    copytruncate\n", "    delaycompress\n": ""},
}


def adapted(path: Path, to: Path, replacements: dict[str, str]) -> Path:
    """Adapt an example as a user would."""
    text = path.read_text()
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, new)
    to.write_text(text)
    to.chmod(0o644)
    return to


class Place:
    """
    The application's folder, its rotation, and the shipper that follows it.

    Attributes:
        file: The current file.
        written: Number of lines of the sample written.
    """

    def __init__(self, shipper: Shipper, service: Service, sample: Sample, way: dict[str, str]) -> None:
        folder = shipper.folder / "accounts"
        folder.mkdir(mode=0o755)
        self.file = folder / "acquisitions.ndjson"
        self.written = 0
        self._lines = sample.lines
        self._shipper, self._service = shipper, service
        secrets = {"intake-key": service.target.subscription_key, "intake-token": service.target.token}
        for name, secret in secrets.items():
            (shipper.folder / name).write_text(secret)
            (shipper.folder / name).chmod(0o600)
        adapted(
            CONFIG / "sidecar.toml",
            shipper.config,
            {
                "https://intake.example.com": service.target.base_url,
                "/run/secrets/": f"{shipper.folder}/",
                "/var/log/accounts/": f"{folder}/",
                "/var/lib/shipper": str(shipper.state),
                "127.0.0.1:9464": "127.0.0.1:0",
            },
        )
        reopen = "systemctl kill --signal=HUP --kill-whom=main accounts.service"
        here = {"/var/log/accounts": str(folder), "0640 accounts accounts": "0640", reopen: "true"}
        self._rotation = adapted(
            CONFIG / "logrotate" / "acquisitions", shipper.folder / "rotation", {**here, "    notifempty\n": ""}
        )
        adapted(self._rotation, self._rotation, way)
        self._status = shipper.folder / "rotation.status"

    def start(self) -> Running:
        return self._shipper.start("run", settings=QUICK)

    def write(self, count: int) -> list[bytes]:
        lines = self._lines[self.written : self.written + count]
        self.written += count
        return lines

    def rotate(self) -> None:
        command = ["logrotate", "--force", "--state", self._status, self._rotation]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (result.returncode, result.stderr) == (0, "")

    def is_delivered(self) -> bool:
        return self._service.stored >= self.written


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("way", WAYS)
def test_many_rotations_with_starts_and_stops_in_between_lose_nothing(
    tmp_path: Path, sample: Sample, stack: ExitStack, rng: Random, way: str
):
    """A record may be sent twice after a kill; the application may write to a file after its rename."""
    if shutil.which("logrotate") is None:
        pytest.skip("logrotate is missing: apt-get install logrotate")
    service = stack.enter_context(sandbox())
    shipper = stack.enter_context(Shipper(tmp_path / "shipper", service.target))
    os.chmod(tmp_path / "shipper", 0o755)
    place = Place(shipper, service, sample, WAYS[way])
    running: Running | None = place.start()
    behind = starts = 0
    for _ in range(ROTATIONS):
        with place.file.open("ab", buffering=0) as out:
            for line in place.write(rng.randrange(5, 40)):
                out.write(line)
            place.rotate()
            if way == "rename, delaycompress":
                out.writelines(place.write(rng.randrange(3)))
        behind += 1
        if running is None and (rng.random() < 0.3 or behind > BEHIND):
            running = place.start()
            starts += 1
        if running is not None and behind > BEHIND:  # files that logrotate deletes unread are lost
            running.wait_until(place.is_delivered, "all is delivered", limit_s=30)
            behind = 0
        elif running is not None and rng.random() < 0.4:
            result = running.kill() if rng.random() < 0.5 else running.stop()
            assert result.returncode in {0, -9, -15}, result.stderr  # the last one if the stop came during startup
            running = None
    running = running or place.start()
    running.wait_until(place.is_delivered, "all is delivered", limit_s=30)
    assert running.stop().returncode == 0
    assert starts > 1, "it was stopped too rarely"
    service.assert_holds_exactly(sample.ids[: place.written])
    names = {path.name.removeprefix(place.file.name) for path in place.file.parent.iterdir()}
    assert {".30.gz", ".2.gz"} <= names, names
