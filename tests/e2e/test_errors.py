"""Errors end with the documented exit code and a message that says what to do, and lose nothing."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import HASTY, Service, Shipper
from tests.e2e.files import append


@pytest.mark.parametrize(
    ("configured", "settings", "words"),
    [
        (False, {}, "intake: is missing: write [intake] with base_url, subscription_key and token"),
        (True, {}, "input.include: is missing"),
        (True, {"input.include": "*", "intake.token.env": "NOT_SET"}, "NOT_SET"),
        (True, {"input.include": "*", "state.directory": "/proc/none"}, "state.directory: cannot use /proc/none"),
    ],
)
def test_a_missing_setting_is_named(shipper: Shipper, configured: bool, settings: dict[str, object], words: str):
    result = shipper.run("run", configured=configured, settings=settings)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert not (shipper.state / "state.db").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [(MemoryError(), "lower batch.max_bytes"), (RuntimeError("can't start new thread"), "TasksMax=")],
)
def test_a_run_without_enough_memory_or_threads_says_what_to_change_and_loses_nothing(
    error: Exception, words: str, shipper: Shipper, service: Service, file: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr("shipper.pipeline.batching.Batch", Mock(side_effect=error))
        result = shipper.backfill(file, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert words in result.stderr
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


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


def test_wrong_usage_exits_with_2_without_sending_or_reading(shipper: Shipper, service: Service, file: Path):
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


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(shipper: Shipper, file: Path):
    os.mkfifo(shipper.folder / "fifo.ndjson")
    result = shipper.backfill("fifo.ndjson", file)
    assert result.returncode in {2, 4}
    assert "fifo.ndjson" in result.stderr


def test_a_file_size_limit_is_reported_at_startup_and_nothing_is_lost(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    """A file size limit simulates a full disk without root; SIGXFSZ, which it sends, does not kill the process."""
    assert shipper.run("backfill", file).returncode == 0
    append(file, *sample.lines[300:3000])
    limited = shipper.backfill(file, prefix=["prlimit", "--fsize=20000", "--"], settings=HASTY)
    assert limited.returncode in {1, 4}, limited
    assert str(shipper.state) in limited.stderr
    assert shipper.backfill(file).returncode == 0
    service.assert_holds_exactly(sample.ids[:3000])
