"""The command lines of shipper in the examples of config/: each is run with other paths."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Running, Service, Shipper, changed
from tests.e2e.files import append
from tests.tools import assert_content, run, tool

CONFIG = Path(__file__).parents[2] / "config"
CRONTAB = CONFIG / "cron/shipper-backfill"


class Place:
    """
    The test's replacement for the paths of the examples below /etc, /var and /run.

    Attributes:
        folder: The folder of the input files.
        environment: Overrides the example's settings: the test's service and state, no port, no waits.
    """

    def __init__(self, shipper: Shipper, service: Service) -> None:
        self.state = shipper.state
        self.root = shipper.folder
        self.folder = shipper.folder / "records"
        self.folder.mkdir()
        access = service.access()
        self._secrets = {
            "intake-key": service.target.subscription_key,
            "intake-token": service.target.token,
            "client-secret": access["client_secret"],
        }
        self._oauth2 = {
            "SHIPPER__INTAKE__OAUTH2__TOKEN_URL": access["token_url"],
            "SHIPPER__INTAKE__OAUTH2__CLIENT_ID": access["client_id"],
            "SHIPPER__INTAKE__OAUTH2__SCOPE": access["scope"],
        }
        self.environment = shipper.environment() | {
            "PATH": f"{SHIPPER.parent}:{os.environ['PATH']}",
            "SHIPPER__STATE__DIRECTORY": str(self.state),
            "SHIPPER__INPUT__INCLUDE": f'["{self.folder}/*.ndjson"]',
            "SHIPPER__ADMIN__LISTEN": "",
            "SHIPPER__DELIVERY__DRAIN_IDLE_SECONDS": "0.5",
            "SHIPPER__INPUT__POLL_INTERVAL_SECONDS": "0.1",
            "SHIPPER__BATCH__LINGER_SECONDS": "0.02",
        }

    def secrets(self, mode: int) -> Path:
        folder = self.root / "secrets"
        folder.mkdir()
        for name, secret in self._secrets.items():
            (folder / name).write_text(f"{secret}\n")
            (folder / name).chmod(mode)
        return folder

    def credentials(self) -> None:
        """Provide the credentials that LoadCredential= provides."""
        tool("systemd-creds")
        self.environment |= self._oauth2 | {"CREDENTIALS_DIRECTORY": str(self.secrets(0o400))}

    def settings(self, text: str) -> str:
        path = self.root / "example.toml"
        path.write_text(text)
        return str(path)

    def in_place(self, text: str, settings: str) -> str:
        """Replace the paths in a part of a command line."""
        paths = {
            "/etc/shipper/shipper.toml": settings,
            "/etc/shipper/backfill.toml": settings,
            "/usr/local/bin/shipper": str(SHIPPER),
            "/var/spool/acquisitions": str(self.folder),
        }
        for old, new in paths.items():
            text = text.replace(old, new)
        return str(self.folder) if text == "/exports" else text


class Example(NamedTuple):
    """A runnable command line."""

    command: list[str]
    environment: dict[str, str]


@pytest.fixture
def place(shipper: Shipper, service: Service) -> Place:
    return Place(shipper, service)


def unit_line(name: str, directive: str) -> list[str]:
    lines = re.findall(rf"^{directive}=-?(.*)$", (CONFIG / "systemd" / name).read_text(), re.MULTILINE)
    return shlex.split(lines[0])


def of_systemd(place: Place, name: str, directive: str = "ExecStart") -> Example:
    place.credentials()
    for line in re.findall(r"^Environment=(.*)$", (CONFIG / "systemd" / name).read_text(), re.MULTILINE):
        variable, _, value = line.partition("=")
        place.environment[variable] = value.replace("%S", str(place.root))
    settings = place.settings((CONFIG / "systemd/shipper.toml").read_text())
    words = [place.in_place(word, settings) for word in unit_line(name, directive)]
    return Example(words, place.environment)


def of_kubernetes(place: Place, name: str) -> Example:
    documents = {
        document["kind"]: document for document in yaml.safe_load_all((CONFIG / "kubernetes" / name).read_text())
    }
    (text,) = documents["ConfigMap"]["data"].values()
    settings = place.settings(text.replace("/run/secrets/shipper", str(place.secrets(0o440))))
    if "CronJob" in documents:
        (container,) = documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    else:
        (container,) = documents["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    words = [place.in_place(word, settings) for word in container["args"]]
    return Example([str(SHIPPER), *words], place.environment)


def cron_fields() -> tuple[dict[str, str], list[str]]:
    """Return the variables of the crontab and the fields of its line: five for the time, user, command."""
    lines = [line for line in CRONTAB.read_text().splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines[:-1])
    return variables, lines[-1].split(maxsplit=6)


def of_cron(place: Place) -> Example:
    variables, fields = cron_fields()
    text = (CONFIG / "backfill.toml").read_text().replace("/etc/shipper", str(place.secrets(0o600)))
    command = place.in_place(fields[6], place.settings(text))
    environment = place.environment | {
        "FIRST": variables["FIRST"].replace("/var/lib/shipper/backfill", str(place.state))
    }
    return Example([variables["SHELL"], "-c", command.replace(r"\%", "%")], environment)


BACKFILLS: dict[str, Callable[[Place], Example]] = {
    "systemd": lambda place: of_systemd(place, "shipper-backfill.service"),
    "kubernetes": lambda place: of_kubernetes(place, "cronjob.yaml"),
    "cron": of_cron,
}
RUNS: dict[str, Callable[[Place], Example]] = {
    "systemd": lambda place: of_systemd(place, "shipper.service"),
    "kubernetes": lambda place: of_kubernetes(place, "sidecar.yaml"),
}


@pytest.mark.parametrize("name", BACKFILLS)
def test_a_backfill_ships_the_folder(name: str, place: Place, service: Service, sample: Sample):
    """The tests of cron below also check that nothing is sent twice."""
    (place.folder / "a.ndjson").write_bytes(b"".join(sample.lines[:100]))
    (place.folder / "b.ndjson").write_bytes(b"".join(sample.lines[100:150]))
    example = BACKFILLS[name](place)
    result = run(*example.command, env=example.environment)
    assert_content(result)
    service.assert_holds_exactly(sample.ids[:150])
    if name == "cron":
        assert result.stdout == "", "nothing is mailed after a successful night"


@pytest.mark.parametrize("name", RUNS)
def test_a_follower_ships_until_stopped_and_a_sidecar_also_ships_lines_written_after_the_signal(
    name: str, place: Place, service: Service, sample: Sample
):
    place.environment["SHIPPER__DELIVERY__DRAIN_IDLE_SECONDS"] = "2"
    example = RUNS[name](place)
    is_sidecar = name == "kubernetes"
    running = Running(list(example.command), place.state, place.root, env=example.environment)
    try:
        for start in (0, 100, 200)[: 2 + is_sidecar]:
            if start == 200:
                running.process.terminate()
                running.wait_for("drain_started")
            append(place.folder / "acquisitions.ndjson", *sample.lines[start : start + 100])
            running.wait_until(lambda end=start + 100: service.stored == end, f"{start + 100} events")
        result = running.finish() if is_sidecar else running.stop()
    finally:
        running.end()
    assert result.returncode == 0
    service.assert_holds_exactly(sample.ids[: 300 if is_sidecar else 200])


# systemd ----------------------------------------------------------------------------------------------------------


def test_the_check_before_startup_finds_the_credentials(place: Place):
    example = of_systemd(place, "shipper.service", "ExecStartPre")
    result = run(*example.command, env=example.environment)
    assert_content(result)
    for key in ("intake.subscription_key", "intake.oauth2.client_secret"):
        assert re.search(rf"^ok +{re.escape(key)} ", result.stdout, re.MULTILINE), result.stdout


def test_a_reload_with_invalid_settings_is_refused_though_credentials_are_absent(place: Place):
    settings = Path(place.settings((CONFIG / "systemd/shipper.toml").read_text()))
    shell, option, line = unit_line("shipper.service", "ExecReload")
    line = place.in_place(line, str(settings))
    environment = {name: value for name, value in place.environment.items() if not name.startswith("SHIPPER__")}
    assert_content(run(shell, option, line, env=environment))
    settings.write_text(settings.read_text().replace("[delivery]", "[delivery]\nconcurency = 3"))
    result = run(shell, option, line, env=environment)
    assert result.returncode == 2
    assert "concurency" in result.stdout


# cron -------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock as another process."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_cron_accepts_the_crontab(tmp_path: Path):
    variables, fields = cron_fields()
    assert set(variables) == {"SHELL", "PATH", "MAILTO", "FIRST"}
    assert not re.search(r"(?<!\\)%", fields[6]), "cron replaces it with a newline"
    (tmp_path / "crontab").write_text(" ".join([*fields[:5], fields[6]]) + "\n")  # a user's crontab has no user field
    result = run(tool("crontab"), "-n", tmp_path / "crontab")
    if "usage" in result.stdout:
        pytest.skip("this crontab cannot check a file without installing it")
    assert_content(result)


def test_cron_mails_the_exit_code_and_the_output(place: Place, service: Service, sample: Sample):
    bad = changed(sample.lines[0], ConsumerCountry="GBR")
    (place.folder / "a.ndjson").write_bytes(bad + b"".join(sample.lines[1:10]))
    example = of_cron(place)
    result = run(*example.command, env=example.environment)
    assert result.stdout.startswith("exit code 3\n")
    assert "country 1" in result.stdout
    again = run(*example.command, env=example.environment)
    assert (again.returncode, again.stdout, service.received) == (0, "", 9), "nothing is sent twice"


def test_only_the_owner_of_the_state_can_silently_block_the_cron_job():
    """Any user could hold a lock on a file that every user can open, as in /run/lock or /tmp."""
    _, fields = cron_fields()
    assert "flock" not in fields[6]
    paths = {word for word in fields[6].split() if word.startswith("/")}
    assert paths == {"/etc/shipper/backfill.toml", "/var/spool/acquisitions"}


def test_cron_mails_an_overlap_only_from_the_second_consecutive_time(place: Place, service: Service, sample: Sample):
    (place.folder / "a.ndjson").write_bytes(b"".join(sample.lines[:10]))
    example = of_cron(place)
    night = partial(run, *example.command, env=example.environment)
    with locked(place.state / "lock"):
        first = night()
        assert (first.returncode, first.stdout) == (0, "")
        for _ in range(2):
            mail = night().stdout
            assert mail.startswith("exit code 5\n")
            assert f"{place.state} is in use by another shipper" in mail
    assert service.stored == 0
    again = night()
    assert (again.returncode, again.stdout, service.stored) == (0, "", 10), "the next night ships the rest"
    with locked(place.state / "lock"):
        assert night().stdout == "", "the overlaps are no longer consecutive"


def test_cron_mails_another_failure_at_once_even_after_an_overlap(place: Place, sample: Sample):
    (place.folder / "a.ndjson").write_bytes(changed(sample.lines[0], ConsumerCountry="GBR"))
    example = of_cron(place)
    with locked(place.state / "lock"):
        assert run(*example.command, env=example.environment).stdout == ""
    assert run(*example.command, env=example.environment).stdout.startswith("exit code 3\n")
    with locked(place.state / "lock"):
        assert run(*example.command, env=example.environment).stdout == ""


def test_the_marker_of_an_overlap_lies_where_only_the_owner_of_the_state_can_write():
    variables, _ = cron_fields()
    (directory,) = re.findall(r'^directory = "([^"]+)"', (CONFIG / "backfill.toml").read_text(), re.MULTILINE)
    assert variables["FIRST"].rpartition("/")[0] == directory
