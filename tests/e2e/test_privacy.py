"""No other user can read the state, and no log, message or file left behind contains personal data or secrets."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import stat
import zlib
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shipper.state.directory import locked_directory
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.test_reconcile import with_report
from tests.e2e.test_replay_and_purge import leave_in_spool
from tests.ledgers import read_ledger
from tests.tools import tool


def _modes(folder: Path) -> Iterator[tuple[str, int, bool]]:
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        yield str(path.relative_to(folder)), stat.S_IMODE(status.st_mode), stat.S_ISDIR(status.st_mode)


def test_only_the_owner_can_read_the_state_while_it_is_in_use(shipper: Shipper, fake: FakeService, sample: Sample):
    """Checked during the run, when all side files exist; the umask and the directory's mode are permissive."""
    fake.plan(Reply())
    fake.default = HANG
    shipper.state.mkdir(mode=0o755)
    shipper.state.chmod(0o755)
    settings = {"batch.max_events": 1, "delivery.concurrency": 1, "state.commit_interval_seconds": 0.01}
    running = shipper.open_pipe(b"broken\n" + sample.lines[0] + sample.lines[1], umask=0, settings=settings)
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
    running = shipper.open_pipe(
        sample.lines[0],
        prefix=[tool("prlimit"), "--core=unlimited:unlimited", "--"],
        env={"SHIPPER_DUMPABLE": "1"} if is_debugged else {},
    )
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
    file = shipper.write("events.ndjson", *_canary_lines(sample))
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


# What remains in files ----------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
EMAIL = "canary.bird@example.com"
PERSON = {"IP": "198.51.100.213", "Username": "canary_bird_4711", "AffiliateID": EMAIL, "Extra": "canary_token_0815"}
CONSUMER = 777_000_777


def of_person(line: bytes, **fields: object) -> bytes:
    return changed(line, **{**PERSON, **fields})


def kept(shipper: Shipper, *left_out: str) -> bytes:
    """Return all bytes in a shipper's files, with its compressed ledger decompressed."""
    found = b"".join(
        path.read_bytes() for path in shipper.folder.rglob("*") if path.is_file() and path.name not in left_out
    )
    with closing(sqlite3.connect(f"file:{shipper.state}/state.db?mode=ro", uri=True)) as db:
        return found + b"".join(zlib.decompress(data) for (data,) in db.execute("SELECT data FROM ledger_parts"))


def canaries_in(found: bytes, shipper: Shipper) -> list[str]:
    canaries = [*PERSON.values(), "canary", shipper.target.token, shipper.target.subscription_key]
    return [each for each in canaries if each.encode() in found]


def tables(shipper: Shipper) -> tuple[int, int]:
    with closing(sqlite3.connect(f"file:{shipper.state}/state.db?mode=ro", uri=True)) as db:
        (row,) = db.execute("SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM ledger_parts)")
        return row


def files_in_the_docs() -> set[str]:
    """Return the files and folders of the state directory in the documented table of retained data."""
    table = re.search(r"\| Where \| What \| Until .*?\n\n", (ROOT / "docs" / "security.md").read_text(), re.DOTALL)
    assert table
    cells = [row.split("|")[1] for row in table[0].split("\n") if row]
    return {name.removesuffix("/") for cell in cells for name in re.findall("`([^`]+)`", cell)}


@pytest.mark.parametrize("command", ["backfill", "pipe", "run"])
def test_no_file_contains_personal_data_or_secrets_after_delivery(
    shipper: Shipper, service: Service, sample: Sample, command: str
):
    """Half of the records have a unique AffiliateID, so that the ledger has both of its forms."""
    lines = [of_person(line, AffiliateID=f"canary.{at}@example.com") for at, line in enumerate(sample.lines[:600])]
    lines += [
        of_person(line, Timestamp="2026-10-01T12:00:00Z", BTag=f"5_{'0' * 32}") for line in sample.lines[600:1200]
    ]
    files = [shipper.folder / "sparse.ndjson", shipper.folder / "dense.ndjson"]
    for done, file in zip((600, 1200), files, strict=True):
        file.write_bytes(b"".join(lines[done - 600 : done]))
        if command == "pipe":
            assert shipper.pipe(file.read_bytes()).returncode == 0
        elif command == "run":
            running = shipper.start("run", "--log-level", "debug", settings={**QUICK, "input.include": f'["{file}"]'})
            running.wait_until(lambda done=done: shipper.read_state().accepted == done, "all")
            assert running.stop().returncode == 0
        else:
            assert shipper.run("backfill", file, "--log-level", "debug").returncode == 0
    assert shipper.read_state().accepted == service.stored == 1200
    assert min(tables(shipper)) > 0, "one form of the ledger is missing"
    rows = read_ledger(shipper.state)
    assert sum(row.accepted for row in rows) == 1200
    assert len({row.affiliate_id for row in rows}) == 601
    assert all(row.affiliate_id.startswith("hash:") for row in rows)
    assert canaries_in(kept(shipper, "sparse.ndjson", "dense.ndjson"), shipper) == []
    left = {path.name.removeprefix(".").removesuffix("-wal").removesuffix("-shm") for path in shipper.state.iterdir()}
    assert left - files_in_the_docs() == set()


def test_no_file_contains_personal_data_after_an_erasure(shipper: Shipper, fake: FakeService, sample: Sample):
    """In letters with the service's messages, in the spool, in the ledger, and in the report history."""
    quoting = json.dumps({"rejected": [{"index": 0, "message": str(PERSON)}]}).encode()
    fake.plan(Reply(), Reply(status=202, body=quoting))
    settings = {"batch.max_events": 1, "delivery.concurrency": 1}
    first = [of_person(line, ConsumerID=CONSUMER) for line in sample.lines[:3]]
    shipper.write("events.ndjson", *first[:2], changed(first[2], IP=PERSON["Username"]))
    result = shipper.run("backfill", "events.ndjson", "--summary", "json", settings=settings)
    assert result.counts() == (3, 1, 2, 0, 0)
    (shipper.folder / "events.ndjson").unlink()
    leave_in_spool(shipper, fake, of_person(sample.lines[3], ConsumerID=CONSUMER), sample.lines[4])
    assert canaries_in(kept(shipper), shipper) == [*PERSON.values(), "canary"], "the case did not occur"

    erased = shipper.run("dead-letters", "purge", "--consumer-id", str(CONSUMER), "--yes")
    erased.assert_ended(0, "2 dead letters and 1 spooled record erased")
    assert canaries_in(kept(shipper), shipper) == []
    assert shipper.pipe().counts() == (1, 1, 0, 0, 0)

    (before,) = (row for row in read_ledger(shipper.state) if row.affiliate_id.startswith("hash:"))
    named = shipper.run("ledger", "--erase-affiliate", EMAIL, "--yes")
    assert (named.returncode, named.stdout) == (0, "")
    assert "1 count of the ledger changed" in named.stderr
    assert before.affiliate_id.encode() not in kept(shipper)
    after = next(row for row in read_ledger(shipper.state) if row.affiliate_id == "(erased)")
    assert (after.hour, after.media, after.accepted) == (before.hour, before.media, before.accepted)
    assert canaries_in(kept(shipper), shipper) == []


def test_a_personal_affiliate_id_is_shown_as_a_hash_whether_accepted_or_refused(shipper: Shipper, sample: Sample):
    place = {"Timestamp": "2026-10-01T12:00:00Z", "BTag": f"5_{'0' * 32}", "BrandID": 7, "AffiliateID": EMAIL}
    lines = [changed(line, **place) for line in sample.lines[:3]]
    lines += [changed(lines[0], IP="nowhere"), changed(sample.lines[4], **{**place, "AffiliateID": "aff-70012"})]
    shipper.write("events.ndjson", *lines)
    assert shipper.run("backfill", "events.ndjson", "--summary", "json").counts() == (5, 4, 1, 0, 0)
    shown = {form: shipper.run("ledger", "--format", form) for form in ("table", "csv", "json", "ndjson")}
    for form, result in shown.items():
        assert EMAIL not in result.stdout + result.stderr, form
        assert "aff-70012" in result.stdout
    rows = {row["affiliate_id"]: row for row in json.loads(shown["json"].stdout)["rows"]}
    hashed = next(name for name in rows if name.startswith("hash:"))
    assert rows.keys() == {hashed, "aff-70012"}
    assert (rows[hashed]["accepted"], rows[hashed]["dead_letters"]) == (3, 1)
    assert hashed in shown["csv"].stdout
    for name, words in ((EMAIL, "1 dead letter still has it"), ("aff-70012", "1 count of the ledger changed")):
        erased = shipper.run("ledger", "--erase-affiliate", name, "--yes")
        assert (words in erased.stderr, "dead letter" in erased.stderr) == (True, name == EMAIL), erased


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--erase-affiliate", ""], "needs an AffiliateID"),
        (["--erase-affiliate", "x"], "--yes"),
        (["--erase-affiliate", "x", "2026-10-01", "2026-10-02"], "START and END"),
    ],
)
def test_an_invalid_erasure_is_refused(shipper: Shipper, sample: Sample, arguments: list[str], words: str):
    shipper.write("events.ndjson", changed(sample.lines[0], AffiliateID="x"))
    assert shipper.run("backfill", "events.ndjson").returncode == 0
    result = shipper.run("ledger", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert [row.affiliate_id for row in read_ledger(shipper.state)] == ["x"]
    with locked_directory(shipper.state):
        assert shipper.run("ledger", "--erase-affiliate", "x", "--yes").returncode == 5


def test_counts_past_their_retention_are_deleted_and_their_days_not_compared(
    shipper: Shipper, service: Service, sample: Sample
):
    with_report(shipper, service)
    today = datetime.now(UTC).date()
    old, young = today - timedelta(days=20), today - timedelta(days=5)
    lines = [
        changed(line, Timestamp=f"{young if at % 2 else old}T12:00:00Z") for at, line in enumerate(sample.lines[:60])
    ]
    shipper.write("events.ndjson", *lines)
    settings = {"state.ledger_retention_days": 10}
    result = shipper.run("backfill", "events.ndjson", "--summary", "json", settings=settings)
    assert result.counts() == (60, 60, 0, 0, 0)
    days = (old.isoformat(), young.isoformat())
    assert shipper.run("reconcile", "1001", *days).returncode == 0
    for is_day_later in (False, True):
        if is_day_later:
            with closing(sqlite3.connect(shipper.state / "state.db")) as db, db:
                day_before = (today - timedelta(days=11)).isoformat()
                assert db.execute("UPDATE ledger_expiry SET looked_at = looked_at - 86400, due = ?", (day_before,))
        running = shipper.open_pipe(settings=settings)
        if is_day_later:
            running.wait_for("ledger_expired")
        result = running.end_input()
        left = {row.hour[:10] for row in read_ledger(shipper.state)}
        assert left == ({young.isoformat()} if is_day_later else {old.isoformat(), young.isoformat()})
    assert shipper.read_state().accepted == 60
    from_day = (today - timedelta(days=11)).isoformat()

    cut = shipper.run("reconcile", "1001", *days, "--format", "json")
    found = json.loads(cut.stdout)
    assert (cut.returncode, found["verdict"], found["is_complete"]) == (1, "incomplete", False)
    assert [hole["end"] for hole in found["not_compared"]] == [
        (old + timedelta(days=day)).isoformat() for day in range(9)
    ]
    assert "their counts have expired (state.ledger_retention_days)" in found["not_compared"][0]["reason"]
    whole = shipper.run("reconcile", "1001", from_day, young.isoformat())
    assert whole.returncode == 0, whole.stdout
    assert shipper.run("reconcile", "1001", str(old), str(old)).returncode == 1, "nothing is left to compare"
    assert "state.ledger_retention_days" in shipper.run("ledger").stdout
    assert json.loads(shipper.run("ledger", "--format", "json").stdout)["complete_from"] == from_day
    assert "state.ledger_retention_days" not in shipper.run("ledger", from_day, young.isoformat()).stdout
    malta = shipper.run("reconcile", "1001", from_day, young.isoformat(), "--timezone", "Europe/Malta")
    assert malta.returncode == 1, "its first day began before"


# Secrets in the wrong place on the command line ---------------------------------------------------------------------


SECRETS = (
    "deadbeefdeadbeef0123456789abcdef",
    "DEADBEEF0123456789ABCDEF",
    "S3cr3t/KEY+9x==",
    "Hunter2!",
    "Zx9.Yy8-Ww7_Vv6",
)
PLACES = (
    *("intake.token.env={}", 'intake.token={{ env = "{}" }}', "intake.subscription_key.env={}"),
    *("intake.token.file={}", 'intake.token={{ file = "{}" }}', "intake.oauth2.client_secret.file={}"),
    *('intake.token.command=["{}"]', "intake.token.{}=1", 'intake.token={{ {} = "x" }}', 'intake.token={{ "{}" = 1 }}'),
    *(
        "intake.proxy=http://user:{}@proxy.example:3128",
        "intake.proxy={}",
        "intake.base_url={}",
        "intake.oauth2.token_url={}",
    ),
    *("intake.base_url=https://user:{}@intake.example", "intake.base_url=https://intake.example/?code={}"),
    *(
        "{}",
        "{}=",
        "={}",
        "{}={}",
        "intake={}",
        "intake.token=[{}",
        'intake.token={{ file = "{}"',
        "intake.token=[1, 2, '{}']",
    ),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_the_wrong_place_is_not_shown(secret: str, shipper: Shipper, tmp_path: Path):
    (tmp_path / "none.ndjson").touch()
    for place in PLACES:
        written = place.format(secret, secret)
        result = shipper.run("backfill", tmp_path / "none.ndjson", "--set", written, check=False)
        shown = result.stdout + result.stderr
        assert result.returncode == 2, (written, shown)
        if ".command=" in place:  # the only command that runs a program that cannot be found
            shown += shipper.run("check", "--set", written, check=False).stdout
        assert secret not in shown, (written, shown)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("intake.token.env=INTAKE_TOKN", "INTAKE_TOKN"),
        ("intake.token.file=/run/secrets/intake-token", "/run/secrets/intake-token"),
        ("intake.token.file=./token", "./token"),
        ('intake.token.command=["print-token", "x"]', "print-token"),
        ("intake.tokn=x", "did you mean intake.token?"),
        ("batch.colour=x", "batch.colour"),
        ("intak.base_url=x", "did you mean intake.base_url?"),
    ],
)
def test_a_mistyped_word_is_shown(written: str, named: str, shipper: Shipper, tmp_path: Path):
    (tmp_path / "none.ndjson").touch()
    result = shipper.run("backfill", tmp_path / "none.ndjson", "--set", written, check=False)
    result.assert_ended(2, named)
