"""Transcripts in the README and docs/sandbox.md: each command is executed and prints the documented output."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from shipper.sandbox.faults import EFFECTS, AnyFault
from tests.e2e.driver import SHIPPER, Shipper
from tests.e2e.surroundings import free_port

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
    """Return a pattern for the documented output: an ellipsis matches anything, alone on a line any lines."""
    return re.compile(re.escape(output.replace("\r", "")).replace("…", ".*?"), re.DOTALL)


class Shell:
    """A bash that executes one command after the other."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        # Without curl, a substitute supports the few options that the pages use.
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


def execute(steps: list[Step], shipper: Shipper, shell: Shell, tmp_path: Path) -> None:
    """Run each command and compare its output; sandboxes listen on free ports instead of the documented ones."""
    ports = {port: str(free_port()) for port in re.findall(r"--port (\d+)", "".join(step.command for step in steps))}

    def moved(text: str) -> str:
        for written, free in ports.items():
            text = text.replace(written, free)
        return text

    for command, output in steps:
        words = shlex.split(moved(command).replace("\\\n", ""))
        if words[0] == "shipper" and words[-1] == "&":
            config = tmp_path / f"{words[3]}.toml"
            running = shipper.start(*words[1:-1], "--write-config", config, configured=False, check=False)
            running.wait_until(config.exists, "the sandbox listens")
            continue
        said = shell.run(moved(command)).strip("\n")
        assert expected(output.strip("\n")).fullmatch(said), f"$ {command}\n{said}\n\ninstead of\n\n{output}"


def test_the_sandbox_answers_as_documented(shipper: Shipper, shell: Shell, tmp_path: Path):
    steps = transcript((ROOT / "docs/sandbox.md").read_text())
    assert sum(step.command.startswith("shipper sandbox") for step in steps) == 3
    assert sum(step.output.startswith("{") for step in steps) >= 20
    execute(steps, shipper, shell, tmp_path)


def test_the_page_of_the_sandbox_names_every_fault_and_its_parameters():
    section = (ROOT / "docs/sandbox.md").read_text().partition("\n## Faults\n")[2].partition("\n## ")[0]
    rules = re.findall(r"--fault '(\w+)(.*?)'", section.partition("one argument")[2])
    assert sorted(effect for effect, _ in rules) == list(EFFECTS)
    named = set(re.findall(r"`(\w+)`", section))
    fields = {name for kind in get_args(AnyFault) for name in kind.__struct_fields__}
    assert fields | set(EFFECTS) <= named
    used = {word.partition("=")[0] for _, words in rules for word in words.split()}
    assert used == fields


def test_the_steps_in_the_readme_deliver_a_csv_file(shipper: Shipper, shell: Shell, tmp_path: Path):
    section = (ROOT / "README.md").read_text().partition("\n## Ship your own file\n")[2].partition("\n## ")[0]
    steps = transcript(section)
    assert {"config", "check", "validate", "backfill", "status"} <= {step.command.split()[1] for step in steps}
    execute(steps, shipper, shell, tmp_path)
