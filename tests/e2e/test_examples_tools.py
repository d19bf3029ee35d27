"""The examples of config/ checked with the programs that they are for: systemd, logrotate, compose and others."""

from __future__ import annotations

import getpass
import grp
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
import yaml

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Running, Service, Shipper, Target, sandbox, wait_until
from tests.e2e.surroundings import free_port
from tests.tools import assert_content, run, tool

CONFIG = Path(__file__).parents[2] / "config"
COMPOSE = CONFIG / "container/compose.yaml"
UNITS = ["shipper.service", "shipper-backfill.service", "shipper-backfill.timer"]

# systemd ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with the path of an existing program, which systemd checks."""
    for name in UNITS:
        text = (CONFIG / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/usr/local/bin/shipper", str(SHIPPER)))
    return tmp_path


def test_systemd_finds_no_fault_in_the_units(units: Path):
    result = run(tool("systemd-analyze"), "verify", "--man=no", *(units / name for name in UNITS))
    assert (result.returncode, result.stdout) == (0, "")


def test_systemd_reports_an_unknown_directive(units: Path):
    unit = units / "shipper.service"
    unit.write_text(unit.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    assert "TimeoutStopSecs" in run(tool("systemd-analyze"), "verify", "--man=no", unit).stdout


@pytest.mark.parametrize("name", UNITS[:2])
def test_systemd_rates_the_confinement_of_each_unit_as_ok(name: str, units: Path):
    result = run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=20", "--no-pager", units / name)
    assert_content(result)


@pytest.mark.parametrize("name", UNITS[:2])
def test_a_unit_writes_no_core_dump_and_its_watchdog_sends_a_signal_before_it_kills(name: str):
    lines = (CONFIG / "systemd" / name).read_text().splitlines()
    assert {"LimitCORE=0", "PrivateUsers=yes", "ProcSubset=pid"} <= set(lines)
    assert ("WatchdogSignal=SIGTERM" in lines) == any(line.startswith("WatchdogSec=") for line in lines)


# logrotate --------------------------------------------------------------------------------------------------------


def rotation(name: str, replacements: Mapping[str, str], folder: Path) -> Path:
    text = (CONFIG / "logrotate" / name).read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.conf"
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize(("name", "owner"), [("acquisitions", "accounts accounts"), ("shipper", "shipper shipper")])
def test_logrotate_accepts_the_rotation(name: str, owner: str, tmp_path: Path):
    logrotate = tool("logrotate")
    here = f"{getpass.getuser()} {grp.getgrgid(os.getegid()).gr_name}"
    path = rotation(name, {owner: here}, tmp_path)
    result = run(logrotate, "--debug", "--state", tmp_path / "state", path)
    assert_content(result)
    assert "error" not in result.stdout
    assert "rotating pattern: /var/log/" in result.stdout


# Kubernetes -------------------------------------------------------------------------------------------------------


def test_a_manifest_matches_the_schemas_of_the_oldest_and_newest_supported_kubernetes():
    validate = tool("kubernetes-validate")
    oldest = {CONFIG / "kubernetes/sidecar.yaml": "1.29", CONFIG / "kubernetes/cronjob.yaml": "1.31"}
    for path, least in oldest.items():
        assert f"Kubernetes {least} or newer" in path.read_text()
        assert_content(run(validate, "--strict", "--kubernetes-version", least, path))
    assert_content(run(validate, "--strict", *oldest, CONFIG / "kubernetes/kafka-deployment.yaml"))


def test_the_schemas_reject_a_misspelt_field(tmp_path: Path):
    validate = tool("kubernetes-validate")
    text = (CONFIG / "kubernetes/sidecar.yaml").read_text()
    (tmp_path / "bad.yaml").write_text(text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    result = run(validate, "--strict", tmp_path / "bad.yaml")
    assert result.returncode != 0
    assert "terminationGraceSeconds" in result.stdout


# Containers -------------------------------------------------------------------------------------------------------


def test_hadolint_finds_no_fault_in_the_containerfile():
    result = run(tool("hadolint"), CONFIG / "container/Containerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_hadolint_reports_an_image_without_a_version(tmp_path: Path):
    text = (CONFIG / "container/Containerfile").read_text()
    (tmp_path / "Containerfile").write_text(text.replace("python:3.13-slim", "python"))
    assert "DL3006" in run(tool("hadolint"), tmp_path / "Containerfile").stdout


def test_a_container_of_the_compose_example_can_write_only_to_its_volumes_and_has_limits():
    for name, service in yaml.safe_load(COMPOSE.read_text())["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["tmpfs"] == ["/tmp"], name
        assert service["user"].split(":")[0] not in {"0", "root"}, name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert not service.get("privileged"), name
        assert not [volume for volume in service["volumes"] if "docker.sock" in volume], name


def compose_command() -> list[str]:
    docker = shutil.which("docker")
    if docker and run(docker, "compose", "version").returncode == 0:
        return [docker, "compose"]
    return [tool("docker-compose")]


def test_compose_accepts_the_example():
    result = run(*compose_command(), "--file", COMPOSE, "--profile", "monitoring", "config", "--quiet")
    assert (result.returncode, result.stdout) == (0, "")


def test_the_compose_example_delivers_what_its_application_writes(tmp_path: Path):
    """The containers' commands run as processes that share a folder instead of a volume."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    port = free_port()
    environment = {
        name: value.replace("/var/lib/shipper", str(tmp_path)).replace("0.0.0.0:9464", f"127.0.0.1:{port}")
        for name, value in services["shipper"]["environment"].items()
    }
    environment["SHIPPER__DELIVERY__DRAIN_IDLE_SECONDS"] = "1"
    sandbox_command = ["0" if word == "8080" else word for word in services["sandbox"]["command"]]
    application_command = [word.replace("$$", "$") for word in services["application"]["command"]]
    with started([SHIPPER, *sandbox_command], tmp_path):
        wait_until(lambda: is_healthy(services["sandbox"], tmp_path), "the sandbox is up")
        intake = tomllib.loads((tmp_path / "shipper.toml").read_text())["intake"]
        with (
            Service(Target(intake["base_url"], intake["subscription_key"], intake["token"])) as service,
            started([SHIPPER, *services["shipper"]["command"]], tmp_path, environment) as shipper,
        ):
            with started([*services["application"]["entrypoint"], *application_command], tmp_path):
                wait_until(lambda: listens(port), "the address of shipper accepts connections")
                wait_until(lambda: is_healthy(services["shipper"], tmp_path, {":9464": f":{port}"}), "shipper is up")
                wait_until(lambda: service.stored >= 200, "events arrive")
            shipper.terminate()
            assert shipper.wait(30) == 0
            written = (tmp_path / "records/acquisitions.ndjson").read_bytes()
            assert service.stored == written.count(b"\n")


def listens(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(service: Mapping, folder: Path, replacements: Mapping[str, str] = {}) -> bool:
    kind, program, *arguments = service["healthcheck"]["test"]
    assert kind == "CMD"
    for old, new in replacements.items():
        arguments = [argument.replace(old, new) for argument in arguments]
    return run(sys.executable if program == "python" else program, *arguments, cwd=folder).returncode == 0


@contextmanager
def started(
    command: list[str | Path], folder: Path, environment: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; at the end, kill it and its children."""
    kept = {"PATH": f"{SHIPPER.parent}:{os.environ['PATH']}", "HOME": str(folder)}
    with (folder / f"{len(list(folder.glob('*.log')))}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**kept, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


# Rotation by logrotate with the example sidecar.toml ----------------------------------------------------------------


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
