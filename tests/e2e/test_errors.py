"""What goes wrong ends with the documented exit code and a message that says what to do; nothing is lost by it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper, Target

HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}


def test_no_configuration_says_what_to_write(shipper: Shipper):
    result = shipper.run("run", configured=False)
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
    ("command", "text", "words"),
    [
        ("validate", "[batch", "not valid TOML"),
        ("validate", '[batch]\nmax_events = "many"\n', "batch.max_events"),
        ("validate", "[batch]\nmax_events = 0\n", "at least 1"),
        ("validate", '[intake]\nbase_url = "http://intake.example.com"\n', "intake.base_url"),
        (
            "backfill",
            '[intake]\nbase_url = "https://x"\ntoken = { env = "NOT_SET" }\nsubscription_key = "k"\n',
            "NOT_SET",
        ),
    ],
)
def test_a_wrong_configuration_is_told_in_words(shipper: Shipper, file: Path, command: str, text: str, words: str):
    shipper.config.write_text(text)
    settings = {"state.directory": shipper.state}
    result = shipper.run(command, file, "--config", shipper.config, configured=False, settings=settings)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert str(shipper.config) in result.stderr or words == "NOT_SET"


WRONG_USAGE = [
    ["validate", "missing.ndjson"],
    ["validate", "events.ndjson", "none-*.ndjson"],
    ["validate", "empty-folder"],
    ["validate", "/dev/null/x"],
    ["backfill", "events.ndjson", "missing.ndjson"],
    ["backfill", "events.ndjson", "--summary", "yaml"],
    ["pipe", "--set", "batch.max_events"],
    ["no-such-command"],
]


def test_wrong_usage_ends_with_2_and_sends_and_reads_nothing(shipper: Shipper, service: Service, file: Path):
    (shipper.folder / "empty-folder").mkdir()
    for arguments in WRONG_USAGE:
        with file.open("rb") as stdin:
            result = shipper.run(*arguments, stdin=stdin)
            assert os.lseek(stdin.fileno(), 0, os.SEEK_CUR) == 0, arguments
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert result.stderr.strip(), arguments
        if arguments[0] in {"backfill", "validate"}:
            assert arguments[-1] in result.stderr
    assert service.counts()["requests"] == 0


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(shipper: Shipper, service: Service, file: Path):
    os.mkfifo(shipper.folder / "fifo.ndjson")
    result = shipper.backfill("fifo.ndjson", file)
    assert result.returncode in {2, 4}
    assert "fifo.ndjson" in result.stderr


def test_what_keeps_all_of_it_from_being_delivered_is_named_and_the_next_run_delivers_everything(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    """A wrong secret, a service that is not there, and a name that does not exist."""

    def assert_pending(target: Target, words: str) -> Result:
        shipper.target = target
        result = shipper.backfill(file, settings=HASTY)
        assert (result.returncode, result.counts()) == (4, (300, 0, 0, 0, 300)), words
        assert words in result.stderr
        assert "give_up_after_seconds" in result.stderr
        assert "c0ffee" not in result.stderr + result.stdout
        assert shipper.read_state().read == 0
        return result

    assert_pending(service.target._replace(subscription_key="c0ffee.wrong.secret"), "intake.subscription_key")
    assert service.stored == 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = unused.getsockname()[1]
        away = Target(f"http://127.0.0.1:{port}", "key", "token")
        result = assert_pending(away, f"cannot connect to http://127.0.0.1:{port}")
    assert result.summary is not None
    assert result.summary["retries"] > 0
    assert_pending(Target("https://intake.invalid", "key", "token"), "intake.invalid is not found")

    shipper.target = service.target
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:300], 1)


def test_a_state_directory_that_cannot_be_used_is_named(shipper: Shipper, file: Path):
    result = shipper.backfill(file, settings={"state.directory": "/proc/none"})
    assert result.returncode == 2
    assert "state.directory" in result.stderr
    assert "/proc/none" in result.stderr


@pytest.mark.skipif(not shutil.which("prlimit"), reason="there is no prlimit")
def test_a_start_whose_files_may_not_grow_is_told_and_nothing_is_lost(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    """A limit on the size of files stands for a full disk, for everybody; its signal kills nobody."""
    assert shipper.run("backfill", file).returncode == 0
    with file.open("ab") as out:
        out.writelines(sample.lines[300:3000])
    limited = shipper.backfill(file, prefix=["prlimit", "--fsize=20000", "--"], settings=HASTY)
    assert limited.returncode in {1, 4}, limited
    assert str(shipper.state) in limited.stderr
    assert shipper.backfill(file).returncode == 0
    service.assert_holds_exactly(sample.ids[:3000])
