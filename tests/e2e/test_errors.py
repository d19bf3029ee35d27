"""What goes wrong ends with the documented exit code and a message that says what to do; nothing is lost by it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, Target

HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}


@pytest.fixture
def file(shipper: Shipper, sample: Sample) -> Path:
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join(sample.lines[:300]))
    return path


def test_no_configuration_says_what_to_write(shipper: Shipper, file: Path):
    commands = (["run"], ["pipe"], ["backfill", file])
    for running in [shipper.start(*command, configured=False) for command in commands]:
        result = running.finish()
        assert (result.returncode, result.stdout) == (2, "")
        assert "[intake]" in result.stderr
        assert "base_url" in result.stderr
    assert not shipper.state.exists()


def test_run_without_files_to_follow_says_so(shipper: Shipper):
    result = shipper.run("run")
    assert result.returncode == 2
    assert "input.include" in result.stderr


def test_an_unknown_key_is_named_with_its_file_and_the_one_that_was_meant(shipper: Shipper, file: Path):
    shipper.config.write_text(shipper.config.read_text() + "[batch]\nmax_event = 5\n")
    result = shipper.backfill(file)
    assert (result.returncode, result.stdout) == (2, "")
    assert str(shipper.config) in result.stderr
    assert "batch.max_event:" in result.stderr
    assert "did you mean batch.max_events?" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[batch", "not valid TOML"),
        ('[batch]\nmax_events = "many"\n', "batch.max_events"),
        ("[batch]\nmax_events = 0\n", "at least 1"),
        ('[intake]\nbase_url = "http://intake.example.com"\n', "intake.base_url"),
        ('[intake]\nbase_url = "https://x"\nsubscription_key = { file = "/none" }\n', "intake.token"),
        ('[intake]\nbase_url = "https://x"\ntoken = { env = "NOT_SET" }\nsubscription_key = "k"\n', "NOT_SET"),
    ],
)
def test_a_wrong_configuration_is_told_in_words(shipper: Shipper, file: Path, text: str, words: str):
    shipper.config.write_text(text)
    result = shipper.run(
        "backfill",
        file,
        "--config",
        shipper.config,
        configured=False,
        settings={"state.directory": shipper.state},
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert str(shipper.config) in result.stderr or words == "NOT_SET"


WRONG_USAGE = [
    ["backfill", "missing.ndjson"],
    ["backfill", "events.ndjson", "none-*.ndjson"],
    ["backfill", "empty-folder"],
    ["backfill", "/dev/null/x"],
    ["backfill", "events.ndjson", "--summary", "yaml"],
    ["pipe", "--summary", ""],
    ["pipe", "--set", "batch.max_events"],
    ["validate", "missing.ndjson"],
    ["no-such-command"],
]


def test_wrong_usage_ends_with_2_and_sends_nothing(shipper: Shipper, service: Service, file: Path):
    (shipper.folder / "empty-folder").mkdir()
    started = [(arguments, shipper.start(*arguments)) for arguments in WRONG_USAGE]
    for arguments, running in started:
        result = running.finish()
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert result.stderr.strip(), arguments
        if arguments[0] in {"backfill", "validate"}:
            assert arguments[-1] in result.stderr
    assert service.counts()["requests"] == 0


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(shipper: Shipper, service: Service, file: Path):
    os.mkfifo(shipper.folder / "fifo.ndjson")
    result = shipper.backfill("fifo.ndjson", file, limit_s=10)
    assert result.returncode in {2, 4}
    assert "fifo.ndjson" in result.stderr


@pytest.mark.parametrize(
    ("command", "field", "key"),
    [("backfill", "subscription_key", "intake.subscription_key"), ("pipe", "token", "intake.token")],
)
def test_a_wrong_secret_is_named_and_everything_is_delivered_by_the_next_run(
    shipper: Shipper, service: Service, sample: Sample, file: Path, command: str, field: str, key: str
):
    right = shipper.target
    shipper.target = right._replace(**{field: "c0ffee.wrong.secret"})
    arguments = [command, *([file] if command == "backfill" else []), "--summary", "json"]
    with file.open("rb") as stdin:
        result = shipper.run(*arguments, settings=HASTY, stdin=stdin)
    assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300))
    assert key in result.stderr
    assert "give_up_after_seconds" in result.stderr
    assert "c0ffee" not in result.stderr + result.stdout
    assert shipper.read_state().read == 0
    assert service.stored == 0

    shipper.target = right
    again = shipper.run(*arguments)
    assert (again.returncode, again.counts()) == (0, (300, 300, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:300])
    assert service.received == 300


def test_a_service_that_is_not_there_is_named_and_everything_is_delivered_later(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = unused.getsockname()[1]
        shipper.target = Target(f"http://127.0.0.1:{port}", "key", "token")
        result = shipper.backfill(file, settings=HASTY)
    assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300))
    assert f"cannot connect to http://127.0.0.1:{port}" in result.stderr
    assert result.summary["retries"] > 0

    shipper.target = service.target
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)
    service.assert_holds_exactly(sample.ids[:300])


def test_a_name_that_does_not_exist_is_told(shipper: Shipper, file: Path):
    shipper.target = Target("https://intake.invalid", "key", "token")
    result = shipper.backfill(file, settings=HASTY)
    assert result.returncode == 4
    assert "intake.invalid is not found" in result.stderr


def test_a_second_shipper_is_turned_away_until_the_first_is_gone(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    holder = shipper.start("pipe", stdin=subprocess.PIPE, settings={"batch.linger_seconds": 0.01})
    holder.stdin.write(sample.lines[400])
    holder.stdin.flush()
    holder.wait_until(lambda: service.stored, "it holds the state directory and works")
    commands = (["backfill", file], ["pipe"], ["run", "--set", 'input.include=["*.ndjson"]'])
    for running in [shipper.start(*command) for command in commands]:
        result = running.finish()
        assert (result.returncode, result.stdout) == (5, "")
        assert str(holder.pid) in result.stderr
        assert str(shipper.state) in result.stderr
    assert not holder.has_ended
    assert shipper.run("validate", file).returncode == 0, "what saves nothing needs no lock"
    holder.kill()
    assert (shipper.state / "lock").exists()
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


@pytest.fixture(scope="module")
def good_state(_sandbox: Service, sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory to spoil copies of."""
    with Shipper(tmp_path_factory.mktemp("good") / "shipper", _sandbox.target) as shipper:
        assert shipper.pipe(sample.lines[0]).returncode == 0
        return shipper.state


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no database\n" * 500)


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE recipes (name TEXT); INSERT INTO recipes VALUES ('soup')")


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1000")


def _half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _damaged_pages(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


def _nulls(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


def _table_missing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE totals")


@pytest.mark.parametrize(
    ("spoil", "command"),
    [
        (_garbage, "backfill"),
        (_foreign, "pipe"),
        (_newer, "run"),
        (_half, "pipe"),
        (_damaged_pages, "run"),
        (_damaged_pages, "pipe"),
        (_nulls, "backfill"),
        (_table_missing, "backfill"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.lstrip("_"),
)
def test_a_state_store_that_cannot_be_trusted_is_left_untouched(
    shipper: Shipper, service: Service, good_state: Path, file: Path, spoil: Callable[[Path], None], command: str
):
    shutil.copytree(good_state, shipper.state)
    database = shipper.state / "state.db"
    assert {path.name for path in shipper.state.iterdir()} == {"state.db", "lock", "spool", "live.json"}
    spoil(database)
    spoiled = database.read_bytes()
    service.reset()
    arguments = {"backfill": [file], "pipe": [], "run": ["--set", f'input.include=["{file}"]']}[command]
    with file.open("rb") as stdin:
        result = shipper.run(command, *arguments, check=False, limit_s=10, stdin=stdin)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert str(database) in result.stderr
    assert database.read_bytes() == spoiled
    assert service.counts()["requests"] == 0, "it must not begin from the start by itself"


def test_an_empty_state_store_is_a_new_one(shipper: Shipper, service: Service, file: Path):
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "state.db").touch()
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_a_state_directory_that_cannot_be_used_is_named(shipper: Shipper, file: Path):
    for place in (file, file / "below", Path("/proc/none")):
        result = shipper.backfill(file, settings={"state.directory": place})
        assert result.returncode == 2
        assert "state.directory" in result.stderr
        assert str(place) in result.stderr


def test_a_full_disk_is_told_and_nothing_is_lost(shipper: Shipper, service: Service, sample: Sample, file: Path):
    """A limit on the size of files stands for the disk."""
    assert shipper.backfill(file).returncode == 0
    shutil.copy(sample.path, file)
    limited = shipper.run("backfill", file, "--summary", "json", check=False, prefix=["prlimit", "--fsize=20000", "--"])
    assert limited.returncode not in {0, 3, -signal.SIGXFSZ}, limited.stderr
    result = shipper.backfill(file)
    assert result.returncode == 0
    service.assert_holds_exactly(sample.ids)
