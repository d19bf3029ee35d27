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
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Service, Shipper, Target, wait_until
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


def test_files_renamed_and_compressed_by_logrotate_are_delivered_once(
    tmp_path: Path, shipper: Shipper, service: Service, sample: Sample
):
    logrotate = tool("logrotate")
    folder = tmp_path / "accounts"
    folder.mkdir(mode=0o755)
    file = folder / "acquisitions.ndjson"
    reopen = "systemctl kill --signal=HUP --kill-whom=main accounts.service"
    path = rotation(
        "acquisitions", {"/var/log/accounts": str(folder), "0640 accounts accounts": "0640", reopen: "true"}, tmp_path
    )
    waits = {"input.rotate_wait_seconds": 0.5, "input.poll_interval_seconds": 0.1, "batch.linger_seconds": 0.02}
    settings = {"input.include": f'["{file}*"]', "admin.listen": "", **waits}
    running = shipper.start("run", settings=settings)
    for start in range(0, 400, 100):
        with file.open("ab") as out:
            out.writelines(sample.lines[start : start + 50])
            if start:
                rotated = run(logrotate, "--force", "--state", tmp_path / "state", path)
                assert_content(rotated)
            out.writelines(sample.lines[start + 50 : start + 100])  # into the renamed file
        running.wait_until(lambda end=start + 100: service.stored == end, f"{start + 100} events")
    names = sorted(entry.name for entry in folder.iterdir())
    assert names == [file.name, *(f"{file.name}.{number}" for number in ("1", "2.gz", "3.gz"))]
    assert running.stop().returncode == 0
    assert service.received == 400


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


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
