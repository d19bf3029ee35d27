"""The status is a warning while an input is missing or unreadable, or if no record was accepted."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed
from tests.e2e.files import Tail, append, where_permissions_hold
from tests.e2e.operated import Admin

ALL_DELIVERED = "Everything written is delivered"
ALL_WRITTEN = "everything written"


def headline(admin: Admin) -> tuple[str, str]:
    """Return the state and the text of the headline on the status page."""
    said = admin.status()["headline"] or {"state": "", "title": "", "detail": "", "sub": ""}
    return said["state"], f"{said['title']}{said['detail']}. {said['sub']}"


def status_of(shipper: Shipper) -> str:
    result = shipper.run("status")
    assert result.returncode == 0, result
    return result.stdout


def logged(running: Running, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in running.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def assert_warned(running: Running, shipper: Shipper, words: str, *, metric: str, count: int = 1) -> None:
    """Assert that page, probe, status and log give the same warning, and that none says that all is delivered."""
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[0] == "warn", "a warning")
    assert words.partition("; ")[0] in headline(admin)[1].replace("No file", "no file")
    assert ALL_DELIVERED not in headline(admin)[1]
    answer = admin.get("/readyz")
    assert (answer.status_code, answer.text.startswith("ready, but ")) == (200, True)
    assert words in answer.text
    assert admin.metrics()[metric] == count
    said = status_of(shipper)
    assert words in said
    assert ALL_WRITTEN not in said
    (found,) = logged(running, "inputs_found")
    assert found["level"] == "warning"
    assert any(words in each for each in found.get("unmatched", []) + found.get("unreadable", []))
    document = json.loads(shipper.run("status", "--json").stdout)
    assert any(words in each for each in document["troubles"])


def assert_well(running: Running, shipper: Shipper) -> None:
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[1].startswith(ALL_DELIVERED), "everything is delivered")
    assert headline(admin)[0] == "good"
    assert admin.get("/readyz").text == "ready\n"
    for metric in ("shipper_inputs_unreadable", "shipper_patterns_unmatched"):
        assert admin.metrics()[metric] == 0
    assert f"{ALL_WRITTEN} until" in status_of(shipper)


def test_a_pattern_without_files_is_reported_until_a_file_matches(tail: Tail, shipper: Shipper):
    tail.configure()
    running = tail.start(None)
    words = f"no file matches {tail.file}"
    assert_warned(running, shipper, words, metric="shipper_patterns_unmatched")
    assert logged(running, "inputs_found")[0]["patterns"] == {str(tail.file): 0}
    tail.deliver(10)
    assert_well(running, shipper)
    assert running.stop().returncode == 0
    tail.file.unlink()
    assert words in status_of(shipper), "even when no shipper is running"


def test_the_warning_explains_why_no_file_matches(tail: Tail, shipper: Shipper):
    closed = tail.folder / "closed"
    closed.mkdir(mode=0)
    named = tail.folder / "named"
    named.mkdir()
    for name in ("a", "events.ndjson", "events.txt", ".hidden"):
        (named / name).touch()
    (shipper.folder / "link").symlink_to("unmounted")
    denied = "permission denied; it belongs to user 0, group 0 (mode 0000)"
    patterns = {
        f"{tail.folder}/nowhere/deep/*.ndjson": f": there is no folder {tail.folder}/nowhere/deep",
        f"{closed}/*.ndjson": f": {closed} cannot be read: {denied}",
        f"{closed}/below/*": f": {closed} cannot be entered: {denied}",
        f"{tail.folder}/*.csv": f": {tail.folder} has no files yet",
        f"{named}/events*.csv": f": 3 other files are in {named}, such as events.ndjson and events.txt; correct the ",
        f"{named}/a": ": matching files are excluded by input.exclude or are shipper's own",
        "below/*.csv": f": there is no folder {shipper.folder}/below",
        "link/*.csv": f": {shipper.folder}/link is a symbolic link to unmounted, which cannot be used (No such file",
    }
    settings = {"input.include": json.dumps(list(patterns)), "input.exclude": f"{named}/a"}
    running = tail.start(None, settings=settings, prefix=where_permissions_hold())
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[0] == "warn", "a warning")
    assert admin.metrics()["shipper_patterns_unmatched"] == len(patterns)
    unmatched = admin.status()["live"]["unmatched"]
    for words, (pattern, why) in zip(unmatched, patterns.items(), strict=True):
        assert words.startswith(f"no file matches {shipper.folder / pattern}{why}")
    checked = shipper.run("check", settings=settings, prefix=where_permissions_hold()).stdout
    assert all(words in checked for words in unmatched)
    assert running.stop().returncode == 0


def test_an_unreadable_file_is_reported_until_it_can_be_read(tail: Tail, shipper: Shipper, service: Service):
    tail.append(0, 10)
    tail.file.chmod(0)
    running = tail.start(prefix=where_permissions_hold())
    (shipper.folder / "link").symlink_to("unmounted")
    denied = "permission denied; it belongs to user 0, group 0 (mode 0000), and this process runs as user 0"
    words = f"{tail.file} cannot be read: {denied}"
    assert_warned(running, shipper, words, metric="shipper_inputs_unreadable")
    assert service.stored == 0
    assert running.stop().returncode == 0
    said = status_of(shipper)
    assert f"at its end, {words}" in said, "the stopped shipper could not read it, though root can"
    assert ALL_WRITTEN not in said
    running = tail.start(prefix=where_permissions_hold())
    tail.file.chmod(0o600)
    tail.wait(10)
    assert_well(running, shipper)
    assert running.stop().returncode == 0


def test_a_broken_archive_is_reported_though_everything_before_the_damage_is_delivered(
    tail: Tail, shipper: Shipper, sample: Sample
):
    """Its decompressed size is unknown, so no lag shows that records are missing."""
    whole = gzip.compress(b"".join(sample.lines[:2000]))
    tail.file.write_bytes(whole[:-2000] + b"broken" * 10 + whole[-2000:])
    running = tail.start()
    admin = Admin(running)
    running.wait_until(lambda: admin.metrics().get("shipper_inputs_unreadable") == 1, "the warning")
    running.wait_until(lambda: headline(admin)[0] == "warn", "a warning")
    assert str(tail.file) in headline(admin)[1]
    assert str(tail.file) in admin.get("/readyz").text
    assert ALL_WRITTEN not in status_of(shipper)
    assert running.stop().returncode == 0


def test_a_socket_that_matches_a_wildcard_is_not_reported_as_an_unreadable_input(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tail.folder / "s"))
        running = tail.start("*")
        tail.wait(10)
        running.wait_for("source_refused")
        assert_well(running, shipper)
        assert running.stop().returncode == 0


def test_everything_is_not_reported_as_delivered_if_no_record_was_accepted(
    tail: Tail, shipper: Shipper, sample: Sample
):
    bad = [changed(line, IP="nowhere") for line in sample.lines[:10]]
    append(tail.file, *bad)
    running = tail.start()
    admin = Admin(running)
    running.wait_until(lambda: admin.status()["state"]["dead_lettered"] == 10, "the dead letters are saved")
    running.wait_until(lambda: headline(admin)[0] == "warn", "a warning")
    running.wait_until(lambda: "None of the records" in headline(admin)[1], "the reason")
    assert headline(admin)[1].startswith("None of the records read was accepted: 10 dead letters")
    running.wait_until(lambda: admin.status()["live"]["lag_bytes"] == 0, "no lag")
    said = status_of(shipper)
    assert "none of the records read was accepted: 10 dead letters" in said
    assert "is delivered" not in said
    assert running.stop().returncode == 0
    assert "none of the records read was accepted: 10 dead letters" in status_of(shipper)
    assert shipper.run("dead-letters", "purge", "--all", "--yes").returncode == 0
    said = status_of(shipper)
    assert "none of the records read was accepted: 10 dead letters" in said, "even after the dead letters were purged"


def test_the_log_begins_with_the_files_that_match_the_patterns(tail: Tail):
    tail.append(0, 10)
    tail.append(10, 20, "b.ndjson")
    running = tail.start(["*.ndjson", "a*"])
    tail.wait(20)
    (found,) = logged(running, "inputs_found")
    assert found["level"] == "info"
    counts = {f"{tail.folder}/*.ndjson": 2, f"{tail.folder}/a*": 1}
    assert found["patterns"] == counts, "a file that matches two patterns counts for both"
    assert running.stop().returncode == 0
