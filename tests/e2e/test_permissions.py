"""Files without permission: the shipper names their owner, and never advises giving up a state for that."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.document import read_report
from shipper.report.history import History
from shipper.report.ranges import DateRange, Part
from shipper.system.permissions import access_problem
from tests.e2e import warm_start
from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Shipper
from tests.e2e.files import append, permissions_hold, where_permissions_hold
from tests.report_documents import brand, entry, report
from tests.tools import tool

SOMEBODY = 65534
STATE_FILES = ("state.db", "state.db-wal", "state.db-shm", "lock", "spool")


def without_privilege(shipper: Shipper, command: str, *words: str | Path, **options: Any) -> Result:
    """
    Run a command to which file permissions apply.

    Commands that create a state need a process: they ask the kernel for permissions that a thread cannot drop
    temporarily.
    """
    if command in {"pipe", "backfill"} or not warm_start.are_allowed():
        return shipper.run(command, *words, prefix=where_permissions_hold(), check=False, **options)
    with permissions_hold():
        return shipper.run(command, *words, check=False, **options)


@pytest.fixture
def used(shipper: Shipper, sample: Sample) -> Path:
    """A partly shipped file."""
    file = shipper.write("events.ndjson", *sample.lines[:10])
    assert shipper.run("backfill", file).returncode == 0
    return file


@pytest.mark.parametrize("name", ["", *STATE_FILES])
def test_moving_the_state_away_is_not_advised_if_it_belongs_to_another_user(
    name: str, shipper: Shipper, sample: Sample, used: Path
):
    """If the state were moved away, everything would be read and sent again, only because of a file mode."""
    place = shipper.state / name
    if name.endswith(("-wal", "-shm")):
        place.touch()
    (shipper.state / "spool").mkdir(exist_ok=True)
    kept = (shipper.state / "state.db").read_bytes()
    mode = 0o700 if place.is_dir() else 0o600
    place.chmod(mode)
    os.chown(place, SOMEBODY, SOMEBODY)
    for command in (["pipe"], ["backfill", used], ["status"], ["dead-letters", "list"]):
        result = without_privilege(shipper, *command)
        said = result.stdout + result.stderr
        assert "move" not in said
        assert "sent again" not in said
        is_needed = name not in {"lock", "spool"} or command[0] in {"pipe", "backfill"}
        if is_needed:
            assert result.returncode in {1, 2}, (command, result)
            assert f"it belongs to user {SOMEBODY}, group {SOMEBODY} (mode {mode:04o})" in said, (command, said)
            assert "this process runs as user 0" in said
            assert str(place) in said
    os.chown(place, 0, 0)
    assert (shipper.state / "state.db").read_bytes() == kept
    append(used, *sample.lines[10:20])
    assert shipper.backfill(used).counts() == (10, 10, 0, 0, 0), "it resumes at its position"


def test_a_folder_beside_the_database_is_named_with_its_owner(shipper: Shipper, used: Path):
    place = shipper.state / "accepted_ids"
    os.chown(place, SOMEBODY, SOMEBODY)
    said = without_privilege(shipper, "status").stderr
    assert f"{place} cannot be read and written: permission denied; it belongs to user {SOMEBODY}" in said


def test_moving_the_report_history_away_is_not_advised_if_it_belongs_to_another_user(shipper: Shipper):
    shipper.state.mkdir(mode=0o700)
    place = shipper.state / "reports.db"
    place.touch(mode=0o600)
    os.chown(place, SOMEBODY, SOMEBODY)
    result = without_privilege(shipper, "report", "history", "1001")
    assert result.returncode in {1, 2}
    assert "move" not in result.stderr
    assert f"{place} cannot be read and written: permission denied; it belongs to user {SOMEBODY}" in result.stderr


def test_a_folder_in_which_no_state_can_be_created_is_named_with_its_owner(shipper: Shipper):
    above = shipper.folder / "above"
    above.mkdir(mode=0o755)
    os.chown(above, SOMEBODY, SOMEBODY)
    settings = {"state.directory": above / "deep" / "state"}
    result = without_privilege(shipper, "pipe", settings=settings)
    result.assert_ended(
        2,
        "state.directory",
        f"{above} cannot be written: permission denied; it belongs to user {SOMEBODY}, group {SOMEBODY} (mode 0755)",
    )
    assert list(above.iterdir()) == []


def test_an_inaccessible_parent_of_the_state_directory_is_named(shipper: Shipper, used: Path):
    above = shipper.folder / "above"
    above.mkdir()
    shipper.state.rename(above / "state")
    above.chmod(0)
    settings = {"state.directory": above / "state"}
    erase = ["dead-letters", "purge", "--consumer-id", "1", "--yes"]
    others = (["retry"], ["dead-letters", "replay"], erase, ["ledger", "--erase-affiliate", "1", "--yes"])
    for command in (["pipe"], ["status"], ["dead-letters", "list"], *others):
        result = without_privilege(shipper, *command, settings=settings)
        assert result.returncode in {1, 2}, (command, result)
        assert (
            f"{above} cannot be entered: permission denied; it belongs to user 0, group 0 (mode 0000)" in result.stderr
        ), command
        assert "nothing has been read yet" not in result.stdout


def test_a_state_on_a_read_only_file_system_can_be_looked_at(shipper: Shipper, used: Path):
    """As in a mounted backup; no process has left a log in it."""
    tool("mount")
    if subprocess.run([tool("unshare"), "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    days = DateRange(date(2026, 10, 1), date(2026, 10, 31))
    with closing(History(shipper.state)) as history:
        for at, amount in ((1.0, "7.5"), (2.0, "10.5")):
            made = replace(report(brand(entry())), opening_balance=Decimal(amount))
            body = wire.encode_report(made)
            history.add(Part(1001, days), read_report(body, account_id=1001, fetched_at=at))
    for path in [*shipper.state.glob("*.db-*")]:
        path.unlink()
    before = {path: path.read_bytes() for path in shipper.state.iterdir() if path.is_file()}
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    reports = ["report", "history", "1001"], ["report", "diff", "1001", "2026-10"]
    for command in (["status"], ["ledger"], ["dead-letters", "list"], *reports):
        shown = shipper.run(*command, prefix=["unshare", "-rm", "sh", "-c", mount, str(shipper.state)])
        assert (shown.returncode, shown.stderr) == (0, "")
        assert ("10" in shown.stdout) == (command[0] != "dead-letters")
    assert {path: path.read_bytes() for path in shipper.state.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("command", ["backfill", "validate"])
def test_an_unreadable_file_is_named_with_its_owner(command: str, shipper: Shipper, used: Path):
    denied = "permission denied; it belongs to user 0, group 0 (mode 0000), and this process runs as user 0, group 0"
    closed = shipper.folder / "closed"
    closed.mkdir()
    (closed / "events.ndjson").touch()
    for place, named, words in (
        (used, used, f"{used} cannot be read: {denied}"),
        (closed, f"{closed}/*.ndjson", f"no file matches {closed}/*.ndjson: {closed} cannot be read: {denied}"),
        (closed, f"{closed}/events.ndjson", f"no file matches {closed}/events.ndjson: {closed} cannot be entered: "),
        (closed, "**/events.ndjson", f"{closed} cannot be read: {denied}"),
        (closed, "*/events.ndjson", f"{closed} cannot be read: {denied}"),
        (closed, str(shipper.folder), f"{closed} cannot be read: {denied}"),
        (used, "closed/a/b.ndjson", f"no file matches {closed}/a/b.ndjson: there is no folder {closed}/a"),
    ):
        mode = place.stat().st_mode
        place.chmod(0)
        result = without_privilege(shipper, command, named)
        place.chmod(mode)
        result.assert_ended(2, words)


def test_nothing_is_delivered_for_sure_while_a_folder_below_a_pattern_cannot_be_listed(shipper: Shipper, used: Path):
    closed = shipper.folder / "closed"
    closed.mkdir(mode=0)
    settings: dict[str, object] = {"input.include": "**/*.ndjson"}
    for exclude, code in (["none"], 4), ([str(closed)], 0):
        answer = without_privilege(shipper, "status", "--until", "now", settings={**settings, "input.exclude": exclude})
        assert (answer.returncode, f"{closed} cannot be read: permission" in answer.stdout) == (code, code == 4), answer


# An invalid configuration -----------------------------------------------------------------------------------------

UNSET = '{env="NOT_SET"}'
NO_TOKEN = {"intake.token": UNSET}
NO_REPORT = {"report.base_url": "http://127.0.0.1:9", "report.subscription_key": "k", "report.token": UNSET}
PERIOD = ["1001", "2026-01-01", "2026-01-02"]
FOREIGN = "198.51.100.1:9"  # not an address of this machine


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (["backfill", "events.ndjson"], NO_TOKEN),
        (["backfill", "events.ndjson"], {"intake.token": '{file="/nowhere/token"}'}),
        (["backfill", "events.ndjson"], {"intake.base_url": "https://127.0.0.1:9", "intake.ca_bundle": "/nowhere"}),
        (["backfill", "events.ndjson", "--listen", FOREIGN], {}),
        (["pipe"], {"intake.subscription_key": UNSET}),
        (["pipe", "--listen", FOREIGN], {}),
        (["run"], {"input.include": '["*.ndjson"]', "admin.listen": FOREIGN}),
        (["run"], {"input.include": '["*.ndjson"]', **NO_TOKEN}),
        (["dead-letters", "replay"], NO_TOKEN),
        (["report", *PERIOD], NO_REPORT),
        (["report", "fetch", *PERIOD], NO_REPORT),
        (["report", "watch", "--once", *PERIOD], NO_REPORT),
        (["reconcile", *PERIOD], NO_REPORT),
    ],
)
def test_a_command_with_an_invalid_configuration_creates_nothing(
    command: list[str], settings: dict[str, str], shipper: Shipper, sample: Sample
):
    shipper.write("events.ndjson", *sample.lines[:10])
    base = {"intake.base_url": shipper.target.base_url, **settings, "state.directory": shipper.folder / "a/b/state"}
    before = sorted(shipper.folder.iterdir())
    result = shipper.run(*command, settings=base, check=False)
    assert result.returncode == 2, result
    assert sorted(shipper.folder.iterdir()) == before


def test_an_existing_state_is_kept_when_the_configuration_is_invalid(shipper: Shipper, used: Path):
    for directory in (shipper.state, shipper.folder / "empty"):
        directory.mkdir(mode=0o700, exist_ok=True)
        result = shipper.run("backfill", used, settings={"state.directory": directory, "intake.token": '{env="NO"}'})
        assert result.returncode == 2
        assert directory.exists()
    assert shipper.read_state().accepted == 10


def test_a_default_settings_file_in_an_inaccessible_folder_is_skipped_and_an_unreadable_one_is_named(
    shipper: Shipper, tmp_path_factory: pytest.TempPathFactory
):
    def status() -> Result:
        settings = {"state.directory": tmp_path_factory.getbasetemp() / "no-state-here"}
        options: dict[str, Any] = {"configured": False, "settings": settings, "check": False, "fresh": True}
        return shipper.run("status", prefix=where_permissions_hold(), **options)

    file = shipper.folder / "shipper.toml"
    file.touch(0)
    refused = status()
    refused.assert_ended(2, f"{file}: cannot be read: Permission denied")
    mode = shipper.folder.stat().st_mode
    shipper.folder.chmod(0)
    try:
        skipped = status()
    finally:
        shipper.folder.chmod(mode)
    assert (skipped.returncode, skipped.stderr) == (0, "")
    assert "nothing has been read yet" in skipped.stdout


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_path_below_a_file_is_no_question_of_permissions(shipper: Shipper, mode: int):
    file = shipper.write("file")
    file.chmod(mode)
    status = shipper.run("status", settings={"state.directory": file / "state"})
    status.assert_ended(2, f"{file} is not a directory; name another directory")
    assert access_problem(file / "events.ndjson") == f"{file} is not a directory"


@pytest.mark.parametrize("access", [os.R_OK, os.R_OK | os.W_OK])
def test_a_file_that_is_gone_has_no_permission_problem_if_it_is_only_to_be_read(access: int, tmp_path: Path):
    """The user of a shipper can often read the folder of its inputs, but not write to it."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    with permissions_hold():
        assert bool(access_problem(folder / "gone.ndjson", access)) == bool(access & os.W_OK)
