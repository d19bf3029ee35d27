"""Transcripts in the README and docs/sandbox.md: each command is executed and prints what is written there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.driver import SHIPPER, Shipper

ROOT = Path(__file__).parents[2]
END_OF_OUTPUT = "\x1e"
CURL = Path(__file__).with_name("curl.py")


class Step(NamedTuple):
    command: str
    output: str


def transcript(page: str) -> list[Step]:
    return [
        Step(re.sub(r"^> ?", "", command, flags=re.MULTILINE), output)
        for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)
        for command, output in re.findall(r"^\$ (.*\n(?:>.*\n)*)((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def expected(output: str) -> re.Pattern[str]:
    """Make a pattern of what is written: an ellipsis is anything, on a line of its own any lines."""
    return re.compile(re.escape(output.replace("\r", "")).replace("…", ".*?"), re.DOTALL)


class Shell:
    """A bash that is fed one command after the other."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        # Where there is no curl, a stand-in takes the few options that the pages use.
        (folder / "bin" / "curl").symlink_to(shutil.which("curl") or CURL)
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{folder / 'bin'}:{SHIPPER.parent}:{os.environ['PATH']}",
                "SHIPPER__STATE__DIRECTORY": str(folder / "state"),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{command}\nprintf '\\n{END_OF_OUTPUT}\\n'\n")
        self._process.stdin.flush()
        lines = []
        for line in self._process.stdout:
            if line.rstrip("\n") == END_OF_OUTPUT:
                break
            lines.append(line)
        return "".join(lines).replace("\r", "")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    running = Shell(tmp_path)
    yield running
    running.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def execute(steps: list[Step], shipper: Shipper, shell: Shell, tmp_path: Path) -> None:
    """Run each command and compare its output; sandboxes listen on free ports instead of the written ones."""
    ports = {port: str(free_port()) for port in re.findall(r"--port (\d+)", "".join(step.command for step in steps))}

    def moved(text: str) -> str:
        for written, free in ports.items():
            text = text.replace(written, free)
        return text

    for command, output in steps:
        words = moved(command).split()
        if words[0] == "shipper" and words[-1] == "&":
            config = tmp_path / f"{words[3]}.toml"
            running = shipper.start(*words[1:-1], "--write-config", config, configured=False, check=False)
            running.wait_until(config.exists, "the sandbox listens")
            continue
        said = shell.run(moved(command)).strip("\n")
        assert expected(output.strip("\n")).fullmatch(said), f"$ {command}\n{said}\n\ninstead of\n\n{output}"


def test_the_sandbox_answers_what_its_page_says(shipper: Shipper, shell: Shell, tmp_path: Path):
    steps = transcript((ROOT / "docs/sandbox.md").read_text())
    assert sum(step.command.startswith("shipper sandbox") for step in steps) == 2
    assert sum(step.output.startswith("{") for step in steps) >= 20
    execute(steps, shipper, shell, tmp_path)


def test_a_csv_file_is_delivered_by_the_steps_of_the_readme(shipper: Shipper, shell: Shell, tmp_path: Path):
    section = (ROOT / "README.md").read_text().partition("\n## Ship your own file\n")[2].partition("\n## ")[0]
    steps = transcript(section)
    assert {"config", "check", "validate", "backfill", "status"} <= {step.command.split()[1] for step in steps}
    execute(steps, shipper, shell, tmp_path)
