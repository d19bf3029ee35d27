"""Nothing is green without cause: no input is there or can be read, or no record was accepted."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed
from tests.e2e.files import where_permissions_hold
from tests.e2e.operated import Admin, Start
from tests.e2e.test_follow import append, wait_for_events


def headline(admin: Admin) -> tuple[str, str]:
    """State and words of the status page."""
    said = admin.status()["headline"] or {"state": "", "title": "", "detail": "", "sub": ""}
    return said["state"], f"{said['title']}{said['detail']}. {said['sub']}"


def status_of(shipper: Shipper) -> str:
    result = shipper.run("status")
    assert result.returncode == 0, result
    return result.stdout


def logged(running: Running, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in running.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def assert_told(running: Running, shipper: Shipper, words: str, *, metric: str, count: int = 1) -> None:
    """The same words everywhere, amber and ready; nowhere that all is well."""
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[0] == "warn", "amber")
    assert words.partition("; ")[0] in headline(admin)[1].replace("No file", "no file")
    assert "Everything that was" not in headline(admin)[1]
    answer = admin.get("/readyz")
    assert (answer.status_code, answer.text.startswith("ready, but ")) == (200, True)
    assert words in answer.text
    assert admin.metrics()[metric] == count
    said = status_of(shipper)
    assert words in said
    assert "everything that was written" not in said
    (found,) = logged(running, "inputs_found")
    assert found["level"] == "warning"
    assert any(words in each for each in found.get("unmatched", []) + found.get("unreadable", []))
    document = json.loads(shipper.run("status", "--json").stdout)
    assert any(words in each for each in document["troubles"])


def assert_well(running: Running, shipper: Shipper) -> None:
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[1].startswith("Everything that was written is delivered"), "all is well")
    assert headline(admin)[0] == "good"
    assert admin.get("/readyz").text == "ready\n"
    for metric in ("shipper_inputs_unreadable", "shipper_patterns_unmatched"):
        assert admin.metrics()[metric] == 0
    assert "everything that was written until" in status_of(shipper)


def test_a_pattern_that_no_file_matches_is_told_until_there_is_one(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    running = start()
    words = f"no file matches {folder}/a.ndjson"
    assert_told(running, shipper, words, metric="shipper_patterns_unmatched")
    assert logged(running, "inputs_found")[0]["patterns"] == {f"{folder}/a.ndjson": 0}
    append(folder / "a.ndjson", sample.lines[:10])
    wait_for_events(running, service, sample.ids[:10])
    assert_well(running, shipper)
    assert running.stop().returncode == 0
    (folder / "a.ndjson").unlink()
    assert words in status_of(shipper), "also when no shipper is running"


def test_the_words_say_why_no_file_matches(start: Start, folder: Path, shipper: Shipper):
    closed = folder / "closed"
    closed.mkdir(mode=0)
    named = folder / "named"
    named.mkdir()
    for name in ("a", "events.ndjson", "events.txt", ".hidden"):
        (named / name).touch()
    denied = "permission denied; it belongs to user 0, group 0 (mode 0000)"
    patterns = {
        f"{folder}/nowhere/deep/*.ndjson": f": there is no folder {folder}/nowhere/deep",
        f"{closed}/*.ndjson": f": {closed} cannot be read: {denied}",
        f"{closed}/below/*": f": {closed} cannot be entered: {denied}",
        f"{folder}/*.csv": f": no file is in {folder} yet",
        f"{named}/events*.csv": f": 3 other files are in {named}, such as events.ndjson and events.txt; correct the ",
        f"{named}/a": ": what would is left out, by input.exclude or as shipper's own file",
        "below/*.csv": f": there is no folder {shipper.folder}/below",
    }
    settings = {"input.include": json.dumps(list(patterns)), "input.exclude": f"{named}/a"}
    running = start(settings=settings, prefix=where_permissions_hold())
    admin = Admin(running)
    running.wait_until(lambda: headline(admin)[0] == "warn", "amber")
    assert admin.metrics()["shipper_patterns_unmatched"] == len(patterns)
    unmatched = admin.status()["live"]["unmatched"]
    for words, (pattern, why) in zip(unmatched, patterns.items(), strict=True):
        assert words.startswith(f"no file matches {shipper.folder / pattern}{why}")
    checked = shipper.run("check", settings=settings, prefix=where_permissions_hold()).stdout
    assert all(words in checked for words in unmatched)
    assert running.stop().returncode == 0


def test_a_file_that_cannot_be_read_is_told_until_it_can(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    file = folder / "a.ndjson"
    append(file, sample.lines[:10])
    file.chmod(0)
    running = start(prefix=where_permissions_hold())
    words = f"{file} cannot be read: permission denied; it belongs to user 0, group 0 (mode 0000), and this is user 0"
    assert_told(running, shipper, words, metric="shipper_inputs_unreadable")
    assert service.stored == 0
    assert running.stop().returncode == 0
    said = status_of(shipper)
    assert f"at its end, {words}" in said, "root may read it, and the shipper that has ended could not"
    assert "everything that was written" not in said
    running = start(prefix=where_permissions_hold())
    file.chmod(0o600)
    wait_for_events(running, service, sample.ids[:10])
    assert_well(running, shipper)
    assert running.stop().returncode == 0


def test_an_archive_that_is_broken_is_told_though_all_before_is_delivered(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    """How much it holds is not known, so that no lag shows that something is missing."""
    whole = gzip.compress(b"".join(sample.lines[:2000]))
    (folder / "a.ndjson").write_bytes(whole[:-2000] + b"broken" * 10 + whole[-2000:])
    running = start()
    admin = Admin(running)
    running.wait_until(lambda: admin.metrics().get("shipper_inputs_unreadable") == 1, "it is told")
    running.wait_until(lambda: headline(admin)[0] == "warn", "amber")
    assert f"{folder}/a.ndjson" in headline(admin)[1]
    assert f"{folder}/a.ndjson" in admin.get("/readyz").text
    assert "everything that was" not in status_of(shipper)
    assert running.stop().returncode == 0


def test_a_socket_that_a_wildcard_meets_is_no_input_that_is_missing(
    start: Start, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    append(folder / "a.ndjson", sample.lines[:10])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        running = start(settings={"input.include": json.dumps([f"{folder}/*"])})
        wait_for_events(running, service, sample.ids[:10])
        running.wait_for("source_refused")
        assert_well(running, shipper)
        assert running.stop().returncode == 0


def test_where_no_record_was_accepted_nothing_says_that_everything_is_delivered(
    start: Start, folder: Path, shipper: Shipper, sample: Sample
):
    bad = [changed(line, IP="nowhere") for line in sample.lines[:10]]
    append(folder / "a.ndjson", bad)
    running = start()
    admin = Admin(running)
    running.wait_until(lambda: admin.status()["state"]["dead_lettered"] == 10, "they are dead letters")
    running.wait_until(lambda: headline(admin)[0] == "warn", "amber")
    running.wait_until(lambda: "None of the records" in headline(admin)[1], "and why")
    assert headline(admin)[1].startswith("None of the records that were read was accepted: 10 dead letters")
    running.wait_until(lambda: admin.status()["live"]["lag_bytes"] == 0, "nothing waits")
    said = status_of(shipper)
    assert "none of the records that were read was accepted: 10 dead letters" in said
    assert "is delivered" not in said
    assert running.stop().returncode == 0
    assert "none of the records that were read was accepted: 10 dead letters" in status_of(shipper)
    assert shipper.run("dead-letters", "purge", "--all", "--yes").returncode == 0
    said = status_of(shipper)
    assert "none of the records that were read was accepted: 10 dead letters" in said, "though none is kept"


def test_the_first_words_of_the_log_say_what_the_patterns_match(
    start: Start, folder: Path, service: Service, sample: Sample
):
    append(folder / "a.ndjson", sample.lines[:10])
    append(folder / "b.ndjson", sample.lines[10:20])
    patterns = [f"{folder}/*.ndjson", f"{folder}/a*"]
    running = start(settings={"input.include": json.dumps(patterns)})
    wait_for_events(running, service, sample.ids[:20])
    (found,) = logged(running, "inputs_found")
    assert found["level"] == "info"
    assert found["patterns"] == {patterns[0]: 2, patterns[1]: 1}, (
        "a file that two of them match is no lack of the second"
    )
    assert running.stop().returncode == 0
