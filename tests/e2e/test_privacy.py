"""No other user can read the state, and no log contains values of records or secrets."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.tools import tool


def _modes(folder: Path) -> Iterator[tuple[str, int, bool]]:
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        yield str(path.relative_to(folder)), stat.S_IMODE(status.st_mode), stat.S_ISDIR(status.st_mode)


def test_only_the_owner_can_read_the_state_while_it_is_in_use(shipper: Shipper, fake: FakeService, sample: Sample):
    """Checked during the run, when all side files exist; the umask and the directory's mode are permissive."""
    shipper.target = fake.target
    fake.plan(Reply())
    fake.default = HANG
    shipper.state.mkdir(mode=0o755)
    shipper.state.chmod(0o755)
    settings = {"batch.max_events": 1, "delivery.concurrency": 1, "state.commit_interval_seconds": 0.01}
    running = shipper.start("pipe", stdin=subprocess.PIPE, umask=0, settings=settings)
    running.stdin.write(b"broken\n" + sample.lines[0] + sample.lines[1])
    running.stdin.flush()
    running.wait_until(lambda: shipper.read_state().read == 2, "a first commit")
    modes = list(_modes(shipper.state))
    running.kill()
    names = {name for name, *_ in modes}
    assert {".", "lock", "spool", "state.db", "state.db-shm", "state.db-wal"} <= names
    assert any(name.startswith("spool/") for name in names), names
    assert [mode for mode in modes if mode[1] != (0o700 if mode[2] else 0o600)] == []


@pytest.mark.skipif(
    Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core", reason="core dumps are written elsewhere here"
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can raise the limit for core dumps")
@pytest.mark.parametrize("is_debugged", [False, True])
def test_an_aborted_process_leaves_no_core_dump(is_debugged: bool, shipper: Shipper, sample: Sample):
    """Other processes of the user cannot read its memory either."""
    running = shipper.start(
        "pipe",
        stdin=subprocess.PIPE,
        prefix=[tool("prlimit"), "--core=unlimited:unlimited", "--"],
        env={"SHIPPER_DUMPABLE": "1"} if is_debugged else {},
    )
    running.stdin.write(sample.lines[0])
    running.stdin.flush()
    running.wait_until(lambda: shipper.state.exists(), "the process has started")
    running.process.send_signal(signal.SIGABRT)
    assert running.process.wait(30) == -signal.SIGABRT
    cores = list(shipper.folder.glob("core*"))
    assert bool(cores) == is_debugged
    for core in cores:
        core.unlink()


CANARIES = {
    "IP": "198.51.100.213",
    "Username": "canary_bird_4711",
}


REJECTING = {"records.unknown_fields": "reject"}


def _canary_lines(sample: Sample) -> list[bytes]:
    """Return good, repeated and variously broken records, each with the canaries."""
    good = [changed(line, **CANARIES) for line in sample.lines[:40]]
    broken = [
        changed(good[0], EventId="not-a-uuid"),
        changed(good[1], IP=f"{CANARIES['IP']}.9"),
        changed(good[2], Timestamp="2999-01-01T00:00:00Z"),
        changed(good[3], BTag=CANARIES["Username"]),
        changed(good[4], ConsumerID=CANARIES["Username"]),
        changed(good[5], ConsumerCountry=CANARIES["Username"]),
        changed(good[6], Extra=CANARIES["Username"]),
        changed(good[7], **{CANARIES["Username"]: 1}),
        changed(good[8], BrandID=...),
        good[9][:-20] + b"\n",
        good[10][:60] + b"\xff" + good[10][60:],
        good[11].rstrip() * 2 + b"\n",
        changed(good[12], Username=CANARIES["Username"] * 20_000),
    ]
    return [*good, *good[:5], *broken]


def _secrets(shipper: Shipper) -> list[str]:
    return [shipper.target.token, shipper.target.subscription_key, *CANARIES.values()]


def assert_says_nothing(text: str, secrets: list[str]) -> None:
    assert [secret for secret in secrets if secret in text] == []


@pytest.mark.parametrize(("command", "log_format"), [("backfill", "json"), ("pipe", "console"), ("run", "json")])
def test_no_debug_log_contains_a_secret_an_address_or_a_user(
    shipper: Shipper, service: Service, sample: Sample, command: str, log_format: str
):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(_canary_lines(sample)))
    arguments = ["--log-level", "debug", "--log-format", log_format]
    with file.open("rb") as stdin:
        if command == "run":
            settings = {**REJECTING, "input.include": f'["{file}"]', "batch.linger_seconds": 0.01}
            running = shipper.start("run", *arguments, settings=settings)
            running.wait_until(lambda: service.stored == 40, "all good records")
            result = running.stop()
            assert result.returncode == 0
        else:
            paths = [file] if command == "backfill" else []
            result = shipper.run(command, *paths, *arguments, settings=REJECTING, stdin=stdin)
            assert result.returncode == 3
    assert "batch_sent" in result.stderr, "debug was not on"
    state = shipper.read_state()
    assert (state.accepted, state.dead_lettered, state.duplicates) == (40, 13, 5)
    secrets = _secrets(shipper)
    assert_says_nothing(result.stderr + result.stdout, secrets)
    assert_says_nothing("\n".join(os.fsdecode(path) for path in shipper.folder.rglob("*")), secrets)
    if log_format == "json":
        logged = [line for line in result.stderr.splitlines() if line.startswith("{")]
        assert all(json.loads(line)["event"] for line in logged)


@pytest.mark.parametrize(
    ("failures", "returncode"),
    [
        (
            [
                Reply(status=500, body=str(CANARIES).encode()),
                Reply(status=302, headers={"Location": "https://x.example.com/?token=fake-token"}),
                Reply(
                    status=401,
                    body=b'{"message":"token fake-token and subscription key fake-subscription-key are invalid"}',
                ),
            ],
            4,
        ),
        (
            [
                Reply(status=202, body=json.dumps({"rejected": [{"index": 0, "message": str(CANARIES)}]}).encode()),
                Reply(status=400, body=json.dumps({"message": f"Event 0: {CANARIES} is refused"}).encode()),
            ],
            3,
        ),
    ],
    ids=["quoting everything", "quoting records"],
)
def test_the_log_does_not_repeat_records_or_secrets_quoted_in_a_failure(
    shipper: Shipper, fake: FakeService, sample: Sample, failures: list[Reply], returncode: int
):
    shipper.target = fake.target
    fake.plan(*failures)
    fake.default = failures[-1]
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(_canary_lines(sample)))
    settings = {"delivery.give_up_after_seconds": 0.5, "delivery.retry_initial_seconds": 0.01, "batch.max_events": 20}
    result = shipper.backfill(file, "--log-level", "debug", settings={**settings, "delivery.concurrency": 1})
    assert result.returncode == returncode
    assert fake.requests > len(failures), "not every failure has occurred"
    assert_says_nothing(result.stderr + result.stdout, _secrets(shipper))
