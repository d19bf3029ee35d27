"""The transcripts in docs/sandbox.md: each command is executed and says what is written there."""

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

PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"
END_OF_OUTPUT = "\x1e"
CURL = Path(__file__).with_name("curl.py")


class Step(NamedTuple):
    command: str
    output: str


def transcript() -> list[Step]:
    return [
        Step(re.sub(r"^> ?", "", command, flags=re.MULTILINE), output)
        for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for command, output in re.findall(r"^\$ (.*\n(?:>.*\n)*)((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def expected(output: str) -> re.Pattern[str]:
    """Make a pattern of what is written: an ellipsis is anything, on a line of its own any lines."""
    return re.compile(re.escape(output.replace("\r", "")).replace("…", ".*?"), re.DOTALL)


class Shell:
    """A bash that is fed one command after the other."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        # Where there is no curl, a stand-in takes the few options that the page uses.
        (folder / "bin" / "curl").symlink_to(shutil.which("curl") or CURL)
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env={**os.environ, "PATH": f"{folder / 'bin'}:{SHIPPER.parent}:{os.environ['PATH']}"},
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


def test_the_page_says_what_the_sandbox_answers(shipper: Shipper, shell: Shell, tmp_path: Path):
    steps = transcript()
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
    assert len(ports) == 2
    assert sum(step.output.startswith("{") for step in steps) >= 20
