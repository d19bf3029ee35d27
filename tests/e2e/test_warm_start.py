"""A command forked from a process that has imported it looks like a started one to the system."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import warm_start
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Shipper
from tests.e2e.files import open_files, where_permissions_hold
from tests.tools import tool

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.environ.get("SHIPPER_TEST_STARTS") == "real", reason="all starts are real"
)
ALIKE = (
    *("PPid", "NSpgid", "NSsid", "Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)


def without_numbers(name: str) -> str:
    """Return the name of a file or pipe without numbers that differ between runs."""
    return re.sub(r"\d+", "N", name)


def look(running: Running, state: Path) -> dict[str, object]:
    """Return the kernel's data about a process, except its arguments, environment and memory."""
    proc = Path(f"/proc/{running.pid}")
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    return {
        **{name: status[name] for name in ALIKE},
        "streams": [without_numbers(os.readlink(proc / "fd" / str(number))) for number in range(3)],
        # Files in the state directory are opened and closed during the work.
        "files": [without_numbers(name) for name in open_files(running) if not name.startswith(f"{state}/")],
        "folder": os.readlink(proc / "cwd"),
        "program": os.readlink(proc / "exe"),
        "limits": (proc / "limits").read_text(),
    }


@pytest.mark.parametrize(
    "prefix", [list, lambda: ["prlimit", "--nofile=100", "--"], where_permissions_hold], ids=["", "prlimit", "setpriv"]
)
def test_a_warm_process_has_the_same_properties_as_a_started_one(
    shipper: Shipper, sample: Sample, prefix: Callable[[], list[str]]
):
    if words := prefix():
        tool(words[0])
    looks = []
    for fresh in (True, False):
        running = shipper.open_pipe(settings=QUICK, fresh=fresh, prefix=words)
        assert isinstance(running.process, warm_start.Process) is not fresh
        running.feed(sample.lines[len(looks)])
        running.wait_until(lambda: shipper.read_state().accepted == len(looks) + 1, "it is working")
        looks.append(look(running, shipper.state))
        running.kill()
    assert looks[0] == looks[1]


def test_a_warm_process_reports_its_exit_code_or_signal(shipper: Shipper):
    assert shipper.start("validate", "nowhere").finish().returncode == 2
    running = shipper.open_pipe()
    running.wait_until((shipper.state / "lock").exists, "it has started")
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(0.01)
    running.process.terminate()
    assert running.process.wait(20) in {0, 4}
    running = shipper.open_pipe(check=False)
    running.process.send_signal(signal.SIGKILL)
    assert running.process.wait() == -signal.SIGKILL


def test_a_start_that_depends_on_the_environment_is_real(shipper: Shipper):
    for env in ({"PYTHONDEVMODE": "1"}, {"LC_ALL": "C"}, {"SSL_CERT_FILE": "/dev/null"}):
        running = shipper.start("status", env=env)
        assert isinstance(running.process, subprocess.Popen)
        running.finish()
