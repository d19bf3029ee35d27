"""The commands `sandbox` and `sample`: what they print, what they refuse, and how they end."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from stat import S_IMODE

import httpx
import msgspec
import pytest

import shipper.cli
from shipper.cli.sandbox import _write_configuration
from shipper.cli.sandbox import sandbox as sandbox_command
from shipper.model import wire
from shipper.model.errors import ConfigError
from shipper.report.client import report_path
from shipper.report.document import read_report
from shipper.sandbox.faults import EFFECTS
from shipper.sandbox.options import IN_MEMORY, SandboxOptions
from shipper.sandbox.server import Access
from tests.stage.sandbox.driver import Sandbox

SHIPPER = [sys.executable, "-m", "shipper"]
get = partial(httpx.get, trust_env=False, verify=False)
Main = Callable[..., tuple[int, str, str]]


@contextmanager
def started(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a sandbox in a process of its own; all that it prints at the start comes with it."""
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


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Main]:
    """Run the command line in this process, for what ends before anything is served."""
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
        settings = tomllib.loads(text[text.index("[intake]") : text.index("# One event by hand")])
        written = tomllib.loads(file.read_text())
        assert written.pop("state") == {"directory": str(tmp_path / "shipper-state")}, "not that of one in earnest"
        assert written == settings
        assert S_IMODE(file.stat().st_mode) == 0o600
        base_url = settings["intake"]["base_url"]
        assert text.startswith(f"# The sandbox listens at {base_url} (Ctrl-C ends it).")

        # The printed requests, taken apart as a shell would, so that no curl is needed here.
        send, token, counts, index = (shlex.split(line) for line in text.splitlines() if line.startswith("curl"))
        given = dict(send[i + 1].split(": ", 1) for i, word in enumerate(send) if word == "-H")
        answer = httpx.post(send[2], headers=given, content=send[send.index("-d") + 1], trust_env=False)
        assert (answer.status_code, answer.json()) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = httpx.post(token[2], headers=form, content=token[token.index("-d") + 1], trust_env=False)
        assert answer.json()["token_type"] == "Bearer"
        fresh = {**given, "Authorization": f"Bearer {answer.json()['access_token']}"}
        assert get(counts[2]).json()["events_stored"] == 1
        assert len(get(index[2]).json()) > 10
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
        send, token, *_ = (shlex.split(line) for line in text.splitlines() if line.startswith("curl"))
        base_url = send[2].removesuffix(wire.INTAKE_PATH)
        faults = get(f"{base_url}/_sandbox/faults").json()
        assert faults["seed"] == 5
        assert [rule["effect"] for rule in faults["fault"]] == ["status", "delay", "chance"]
        assert (faults["fault"][2]["operation"], faults["fault"][2]["probability"]) == ("any", 0.01)
        httpx.delete(f"{base_url}/_sandbox/faults", trust_env=False)

        access = get(f"{base_url}/_sandbox/access").json()
        assert (access["subscription_key"], access["secondary_key"]) == ("one", "two")
        given = dict(send[i + 1].split(": ", 1) for i, word in enumerate(send) if word == "-H")
        content = send[send.index("-d") + 1].encode()
        post = partial(httpx.post, base_url + wire.INTAKE_PATH, headers=given, trust_env=False)
        assert post(content=content).status_code == 201
        assert post(content=content).status_code == 400  # a repeat, and the batch is refused as a whole
        assert post(content=content.ljust(501)).status_code == 413
        seeded = get(f"{base_url}/dpm/v1/dar/1001/2026-01-01/2026-01-31", headers=given)
        assert len(seeded.json()["brands"]) == 3
        refused = post(content=content)
        assert refused.status_code == 403
        assert refused.headers["Retry-After"].endswith(" GMT")
        assert post(content=content).status_code == 429
        offset = get(f"{base_url}/_sandbox/clock").json()["offset_seconds"]
        assert offset == -86_400
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        asked = [
            httpx.post(token[2], headers=form, content=token[token.index("-d") + 1], trust_env=False) for _ in range(2)
        ]
        assert (asked[0].json()["expires_in"], asked[1].status_code) == (77, 429)
        assert store.exists()


# What it refuses


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rate-limit x", "sandbox: --rate-limit: 'x' is not CALLS/SECONDS with both above 0, such as 100/60"),
        ("--rate-limit 0/60", "--rate-limit: '0/60' is not CALLS/SECONDS"),
        ("--rate-limit ''", "--rate-limit: '' is not CALLS/SECONDS"),
        ("--quota 1", "--quota: '1' is not CALLS/SECONDS"),
        ("--quota ''", "--quota: '' is not CALLS/SECONDS"),
        ("--token-limit 1/1/1", "--token-limit: '1/1/1' is not CALLS/SECONDS"),
        ("--fault nonsense", "--fault 'nonsense': cannot be understood: Invalid value 'nonsense' - at `$.effect`"),
        ("--fault ''", "--fault ''"),
        ("--fault reset --fault 'status status=99'", "--fault 'status status=99': cannot be understood: "),
        ("--fault 'status 503'", "--fault: 'status 503': '503' is not NAME=VALUE"),
        ("--faults absent.toml", "absent.toml: cannot be read: No such file or directory"),
        ("--faults .", ".: cannot be read: Is a directory"),
        ("--faults broken.toml", "broken.toml: cannot be understood: "),
        ("--faults broken.json", "broken.json: cannot be understood: "),
        (
            "--faults unknown.toml",
            "unknown.toml: cannot be understood: Invalid value 'explode' - at `$.fault[0].effect`",
        ),
        ("--latency-seconds nan", "sandbox: latency_seconds: must be a finite number"),
        ("--jitter-seconds nan", "sandbox: jitter_seconds: must be a finite number"),
        ("--token-skew-seconds nan", "sandbox: token_skew_seconds: must be a finite number"),
        ("--clock-offset-seconds nan", "sandbox: clock_offset_seconds: must be a finite number"),
        ("--chaos nan", "chaos"),
        ("--chaos 1.5", "--chaos"),
        ("--latency-seconds -1", "--latency-seconds"),
        ("--max-body-bytes 0", "--max-body-bytes"),
        ("--token-lifetime-seconds 0", "--token-lifetime-seconds"),
        ("--account-id 0", "--account-id"),
        ("--port 65536", "--port"),
        ("--profile lax", "'document', 'strict'"),
        ("--store events.db --blackhole", "sandbox: blackhole: keeps nothing; leave out either it or the store"),
        ("--store .", "cannot open the store: "),
        ("--subscription-key a --secondary-key a", "sandbox: secondary_key: must differ from subscription_key"),
        ("--subscription-key ''", "sandbox: subscription_key: must be printable ASCII, not empty"),
        ("--secondary-key ' a'", "sandbox: secondary_key: must be printable ASCII, not empty"),
        ("--host 0.0.0.0", "sandbox: host: '0.0.0.0' is not a loopback address"),
        ("--write-config absent/shipper.toml", "absent/shipper.toml: --output: cannot be written: "),
        ("--write-config theirs.toml", "is there already and is not the sandbox's own; move it or name another file"),
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
    code, out, err = main("sandbox", "--port", "0", *shlex.split(flags))
    assert (code, out) == (2, "")
    assert message in err
    own = [line for line in err.splitlines() if line.startswith(("shipper: ", "Error: "))]
    assert len(own) == 1, err
    assert err.startswith("Usage: ") or err == f"{own[0]}\n"
    assert sorted(tmp_path.iterdir()) == files


def test_taken_port_ends_the_command_with_one_message(main: Main, sandbox: Sandbox):
    code, out, err = main("sandbox", "--port", sandbox.port)
    place = f"shipper: sandbox: port: 127.0.0.1:{sandbox.port}"
    expected = f"{place} is in use by another program; choose another port, 0 takes any free one\n"
    assert (code, out, err) == (2, "", expected)


def test_refusal_of_a_process_has_neither_traceback_nor_output():
    run = subprocess.run([*SHIPPER, "sandbox", "--rate-limit", "x"], capture_output=True, text=True)
    expected = "shipper: sandbox: --rate-limit: 'x' is not CALLS/SECONDS with both above 0, such as 100/60\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", expected)


def test_help_names_every_flag_and_every_effect(main: Main, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = main("sandbox", "--help")
    assert (code, err) == (0, "")
    for name in inspect.signature(sandbox_command).parameters:
        assert f"--{name.replace('_', '-')}" in out
    for effect in EFFECTS:
        assert re.search(rf"\b{effect}\b", out)
    assert "\b" not in out


def test_command_writes_its_own_configuration_anew_and_no_other(tmp_path):
    file = tmp_path / "shipper.toml"
    for port in (1, 2):
        _write_configuration(file, Access(f"http://127.0.0.1:{port}", "key", "token"))
        assert tomllib.loads(file.read_text())["intake"]["base_url"] == f"http://127.0.0.1:{port}"
    file.write_text("[intake]\n")
    with pytest.raises(ConfigError, match="not the sandbox's own"):
        _write_configuration(file, Access("http://127.0.0.1:3", "key", "token"))
    assert file.read_text() == "[intake]\n"
    assert list(tmp_path.iterdir()) == [file]


def test_command_leaves_a_configuration_as_it_is_that_was_changed_since_and_says_how_to_go_on(tmp_path):
    file = tmp_path / "shipper.toml"
    _write_configuration(file, Access("http://127.0.0.1:1", "key", "token"))
    mine = file.read_text() + '[records.mapping]\nUsername = "login"\n'
    file.write_text(mine)
    with started("--output", file) as (process, text):
        assert f"{file}\n# was changed since a sandbox wrote it, and is left as it is" in text
        assert "delete it and start the sandbox again" in text
        assert tomllib.loads(text[: text.index("# One event by hand")])["intake"].keys() == {
            *("base_url", "subscription_key", "token")
        }
        process.terminate()
        assert process.wait(10) == 0
    assert file.read_text() == mine
    file.unlink()
    assert "written to" in _write_configuration(file, Access("http://127.0.0.1:2", "key", "token"))


def test_command_has_the_defaults_of_the_options():
    defaults = {name: parameter.default for name, parameter in inspect.signature(sandbox_command).parameters.items()}
    options = SandboxOptions()
    shared = [name for name in defaults if hasattr(options, name)]
    for name in shared:
        expected = getattr(options, name)
        assert defaults[name] == ("/".join(map(str, expected)) if name == "token_limit" else expected), name
    others = {"output": None, "verbose": False, "store": None, "faults": None, "fault": None, "chaos": 0.0}
    assert {name: default for name, default in defaults.items() if name not in shared} == others
    without_flag = {"account_name", "operator_name", "token_secret", "store_path"}
    assert {field for field in options.__struct_fields__ if field not in defaults} == without_flag
    assert options.store_path == IN_MEMORY


# Samples


def test_sample_command_writes_events_of_the_days_before_today():
    run = subprocess.run([*SHIPPER, "sample", "--count", "5000", "--seed", "3", "--days", "2"], capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
    events = [msgspec.json.decode(line, type=wire.ActivityEvent) for line in run.stdout.splitlines()]
    assert len(events) == 5000
    assert max(event.Timestamp for event in events) < datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_sample_command_is_quiet_when_its_reader_leaves():
    command = [*SHIPPER, "sample", "--count", "200000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b'{"EventId"')
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("module", ["shipper.cli.sandbox", "shipper.cli.sample"])
def test_import_of_the_commands_does_not_load_the_server(module):
    heavy = {"starlette", "uvicorn", "jwt", "sqlite3", "shipper.sandbox.server", "shipper.sandbox.app"}
    # What is there already is the tools' own, such as those that measure coverage.
    code = f"import sys; own = set(sys.modules); import {module}; print(*sorted({heavy!r} & set(sys.modules) - own))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "")
