"""The commands `sandbox` and `sample`: what they print, what they refuse, and how they end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from stat import S_IMODE
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

import shipper.cli
from shipper.cli.sandbox import Flags, _write_configuration
from shipper.model import wire
from shipper.model.errors import ConfigError
from shipper.report.client import report_path
from shipper.report.document import read_report
from shipper.sandbox.faults import EFFECTS
from shipper.sandbox.options import IN_MEMORY, SandboxOptions
from shipper.sandbox.server import Access

SHIPPER = [sys.executable, "-m", "shipper"]
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
get = partial(httpx.get, trust_env=False, verify=False)
Main = Callable[..., tuple[int, str, str]]


@contextmanager
def started(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a sandbox in its own process, and yield it with its initial output."""
    command = [*SHIPPER, "sandbox", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines: list[str] = []
            while not (lines and lines[-1].endswith("/_sandbox/\n")):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            yield process, "".join(lines)
        finally:
            process.kill()


class Printed(NamedTuple):
    """A request that is printed as a curl command."""

    url: str
    headers: dict[str, str]
    content: str

    def post(self, **changes: Any) -> httpx.Response:
        sent = {"headers": self.headers, "content": self.content, **changes}
        return httpx.post(self.url, trust_env=False, **sent)


def printed(text: str) -> list[Printed]:
    """Return the printed requests, split as by a shell, so that no curl is needed here."""
    found = []
    for words in (shlex.split(line) for line in text.splitlines() if line.startswith("curl")):
        headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
        found.append(Printed(words[2], headers, words[words.index("-d") + 1] if "-d" in words else ""))
    return found


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Main]:
    """Run a command in this process that ends before it serves anything."""
    before = os.umask(0o077)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shipper", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            shipper.cli.main()
        return ended.value.code, *capsys.readouterr()

    yield run
    os.umask(before)


# The command serves


def test_the_configuration_names_a_folder_of_any_name(tmp_path):
    folder = tmp_path / 'dice \N{GAME DIE}, \x7f and "quotes"'
    folder.mkdir()
    with started("--write-config", folder / "shipper.toml") as (process, _):
        written = tomllib.loads((folder / "shipper.toml").read_text())
        assert written["state"] == {"directory": str(folder / "shipper-state")}
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_what_it_prints_until_a_signal(tmp_path, stop):
    file = tmp_path / "shipper.toml"
    with started("--account-id", "7", "--write-config", file) as (process, text):
        settings = tomllib.loads(text[text.index("[intake]") : text.index("# Send an event by hand")])
        written = tomllib.loads(file.read_text())
        assert written.pop("state") == {"directory": str(tmp_path / "shipper-state")}, "not separate"
        assert written == settings
        assert S_IMODE(file.stat().st_mode) == 0o600
        base_url = settings["intake"]["base_url"]
        assert text.startswith(f"# The sandbox listens at {base_url} (Ctrl-C ends it).")

        send, token, counts, index = printed(text)
        answer = send.post()
        assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
        answer = token.post(headers=FORM)
        assert answer.json()["token_type"] == "Bearer"
        fresh = {**send.headers, "Authorization": f"Bearer {answer.json()['access_token']}"}
        assert get(counts.url).json()["events_stored"] == 1
        assert len(get(index.url).json()) > 10
        day = datetime.now(UTC).date()
        answer = get(settings["report"]["base_url"] + report_path(7, day, day), headers=fresh)
        assert read_report(answer.content, account_id=7)

        process.send_signal(stop)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def test_flags_reach_the_service(tmp_path):
    script = tmp_path / "faults.json"
    script.write_text('{"seed":5,"fault":[{"effect":"status","status":418,"requests":"3"}]}')
    flags = ["--profile", "strict", "--rejection", "whole", "--answer", "created", "--repeats", "reject"]
    flags += ["--figures", "seeded", "--rate-limit", "5/100", "--quota", "4/100", "--retry-after", "date"]
    flags += ["--max-body-bytes", "500", "--accept-gzip", "--token-lifetime-seconds", "77", "--token-limit", "1/100"]
    flags += ["--clock-offset-seconds", "-86400", "--subscription-key", "one", "--secondary-key", "two"]
    flags += ["--faults", str(script), "--fault", "delay seconds=0 requests=9", "--chaos", "0.01", "--seed", "9"]
    store = tmp_path / "events.db"
    with started(*flags, "--store", store) as (_, text):
        send, token, *_ = printed(text)
        base_url = send.url.removesuffix(wire.INTAKE_PATH)
        faults = get(f"{base_url}/_sandbox/faults").json()
        assert faults["seed"] == 5
        assert [rule["effect"] for rule in faults["fault"]] == ["status", "delay", "chance"]
        assert (faults["fault"][2]["operation"], faults["fault"][2]["probability"]) == ("any", 0.01)
        httpx.delete(f"{base_url}/_sandbox/faults", trust_env=False)

        access = get(f"{base_url}/_sandbox/access").json()
        assert (access["subscription_key"], access["secondary_key"]) == ("one", "two")
        assert send.post().status_code == 201
        assert send.post().status_code == 400  # a repeat, so the whole batch is refused
        assert send.post(content=send.content.ljust(501)).status_code == 413
        seeded = get(f"{base_url}/dpm/v1/dar/1001/2026-01-01/2026-01-31", headers=send.headers)
        assert len(seeded.json()["brands"]) == 3
        refused = send.post()
        assert refused.status_code == 403
        assert refused.headers["Retry-After"].endswith(" GMT")
        assert send.post().status_code == 429
        assert get(f"{base_url}/_sandbox/clock").json()["offset_seconds"] == -86_400
        assert token.post(headers=FORM).json()["expires_in"] == 77
        assert token.post(headers=FORM).status_code == 429
        assert store.exists()


# What it refuses


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rate-limit x", "sandbox: --rate-limit: 'x' is not CALLS/SECONDS with both above 0, such as 100/60"),
        ("--quota 1", "--quota: '1' is not CALLS/SECONDS"),
        ("--token-limit 1/1/1", "--token-limit: '1/1/1' is not CALLS/SECONDS"),
        ("--fault nonsense", "--fault 'nonsense': is invalid: Invalid value 'nonsense' - at `$.effect`"),
        ("--fault ''", "--fault ''"),
        ("--fault reset --fault 'status status=99'", "--fault 'status status=99': is invalid: "),
        ("--fault 'status 503'", "--fault: 'status 503': '503' is not NAME=VALUE"),
        ("--faults absent.toml", "absent.toml: cannot be read: No such file or directory"),
        ("--faults .", ".: cannot be read: Is a directory"),
        ("--faults broken.toml", "broken.toml: is invalid: "),
        ("--faults broken.json", "broken.json: is invalid: "),
        ("--faults unknown.toml", "unknown.toml: is invalid: Invalid value 'explode' - at `$.fault[0].effect`"),
        ("--latency-seconds nan", "sandbox: latency_seconds: must be a finite number"),
        ("--chaos nan", "chaos"),
        ("--chaos 1.5", "--chaos"),
        ("--latency-seconds -1", "--latency-seconds"),
        ("--max-body-bytes 0", "--max-body-bytes"),
        ("--token-lifetime-seconds 0", "--token-lifetime-seconds"),
        ("--account-id 0", "--account-id"),
        ("--port 65536", "--port"),
        ("--port TAKEN", "is in use by another program; choose another port"),
        ("--profile lax", "'document', 'strict'"),
        ("--store events.db --blackhole", "sandbox: blackhole: stores nothing; it cannot be combined with a store"),
        ("--store .", "cannot be used as a store ([Errno 21]"),
        ("--store broken.toml", "file is not a database"),
        ("--subscription-key a --secondary-key a", "sandbox: secondary_key: must differ from subscription_key"),
        ("--secondary-key ' a'", "sandbox: secondary_key: must be non-empty printable ASCII"),
        ("--host 0.0.0.0", "sandbox: host: '0.0.0.0' is not a loopback address"),
        ("--write-config absent/shipper.toml", "absent/shipper.toml: --output: cannot be written: "),
        ("--write-config theirs.toml", "exists and was not written by the sandbox; move it or choose another file"),
        ("surplus", "surplus"),
        ("--unknown", "--unknown"),
    ],
)
def test_bad_flag_ends_the_command_with_one_message(main: Main, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[[")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "unknown.toml").write_text('[[fault]]\neffect = "explode"')
    (tmp_path / "theirs.toml").write_text("[intake]\n")
    files = sorted(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = flags.replace("TAKEN", str(taken.getsockname()[1]))
        code, out, err = main("sandbox", "--port", "0", *shlex.split(flags))
    assert (code, out) == (2, "")
    assert message in err
    own = [line for line in err.splitlines() if line.startswith(("shipper: ", "Error: "))]
    assert len(own) == 1, err
    assert err.startswith("Usage: ") or err == f"{own[0]}\n"
    assert sorted(tmp_path.iterdir()) == files


def test_help_names_every_flag_and_every_effect(main: Main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = main("sandbox", "--help")
    assert (code, err) == (0, "")
    for name in Flags._fields:
        assert f"--{name.replace('_', '-')}" in out
    for effect in EFFECTS:
        assert re.search(rf"\b{effect}\b", out)
    assert "\b" not in out


def test_command_overwrites_only_its_own_configuration(tmp_path):
    file = tmp_path / "shipper.toml"
    for port in (1, 2):
        _write_configuration(file, Access(f"http://127.0.0.1:{port}", "key", "token"))
        assert tomllib.loads(file.read_text())["intake"]["base_url"] == f"http://127.0.0.1:{port}"
    file.write_text("[intake]\n")
    with pytest.raises(ConfigError, match="was not written by the sandbox"):
        _write_configuration(file, Access("http://127.0.0.1:3", "key", "token"))
    assert file.read_text() == "[intake]\n"
    assert list(tmp_path.iterdir()) == [file]


def test_command_keeps_a_changed_configuration_and_says_how_to_continue(tmp_path):
    file = tmp_path / "shipper.toml"
    _write_configuration(file, Access("http://127.0.0.1:1", "key", "token"))
    mine = file.read_text() + '[records.mapping]\nUsername = "login"\n'
    file.write_text(mine)
    with started("--output", file) as (process, text):
        assert f"{file}\n# was changed after a sandbox wrote it" in text
        assert "delete it and restart the sandbox" in text
        assert tomllib.loads(text[: text.index("# Send an event by hand")])["intake"].keys() == {
            *("base_url", "subscription_key", "token")
        }
        process.terminate()
        assert process.wait(10) == 0
    assert file.read_text() == mine
    file.unlink()
    assert "written to" in _write_configuration(file, Access("http://127.0.0.1:2", "key", "token"))


def test_command_defaults_are_those_of_the_options():
    defaults = Flags._field_defaults
    options = SandboxOptions()
    shared = [name for name in defaults if hasattr(options, name)]
    for name in shared:
        expected = getattr(options, name)
        assert defaults[name] == ("/".join(map(str, expected)) if name == "token_limit" else expected), name
    others = {"output": None, "verbose": False, "store": None, "faults": None, "fault": None, "chaos": 0.0}
    assert {name: default for name, default in defaults.items() if name not in shared} == others
    assert {field for field in options.__struct_fields__ if field not in defaults} == {"store_path"}
    assert options.store_path == IN_MEMORY


# Samples


def test_sample_command_writes_events_of_past_days():
    run = subprocess.run([*SHIPPER, "sample", "--count", "5000", "--seed", "3", "--days", "2"], capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
    events = [msgspec.json.decode(line, type=wire.ActivityEvent) for line in run.stdout.splitlines()]
    assert len(events) == 5000
    assert max(event.Timestamp for event in events) < datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_sample_command_is_silent_if_its_reader_exits():
    command = [*SHIPPER, "sample", "--count", "200000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b'{"EventId"')
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("module", ["shipper.cli.sandbox", "shipper.cli.sample"])
def test_import_of_the_commands_does_not_load_the_server(module):
    heavy = {"starlette", "uvicorn", "jwt", "sqlite3", "shipper.sandbox.server", "shipper.sandbox.app"}
    # Modules that are already loaded belong to tools, such as coverage.
    code = f"import sys; own = set(sys.modules); import {module}; print(*sorted({heavy!r} & set(sys.modules) - own))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "")
