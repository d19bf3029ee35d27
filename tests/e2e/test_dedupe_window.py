"""An EventId is counted once across runs and restarts, within the dedupe window."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, changed
from tests.e2e.fake_service import FakeService, Reply
from tests.e2e.files import Tail
from tests.ledgers import read_ledger


def counted(shipper: Shipper) -> tuple[int, int]:
    """Return the numbers of accepted records and duplicates in the ledger."""
    rows = read_ledger(shipper.state)
    return sum(row.accepted for row in rows), sum(row.duplicates for row in rows)


def test_two_backfills_of_overlapping_exports_count_each_event_id_once(
    shipper: Shipper, service: Service, sample: Sample
):
    first = shipper.backfill(shipper.write("first.ndjson", *sample.lines[:10]))
    assert (first.returncode, first.counts()) == (0, (10, 10, 0, 0, 0))
    second = shipper.backfill(shipper.write("second.ndjson", *sample.lines[6:14]))
    assert (second.returncode, second.counts()) == (0, (8, 4, 0, 4, 0))
    assert counted(shipper) == (14, 4)
    service.assert_holds_exactly(sample.ids[:14])
    assert service.counts()["duplicates"] == 0, "known events were sent again"


def test_an_event_accepted_through_one_command_is_a_duplicate_in_another(
    shipper: Shipper, service: Service, sample: Sample
):
    assert shipper.pipe(*sample.lines[:300]).counts() == (300, 300, 0, 0, 0)
    again = shipper.backfill(shipper.write("again.ndjson", *sample.lines[:400]))
    assert (again.returncode, again.counts()) == (0, (400, 100, 0, 300, 0))
    assert counted(shipper) == (400, 300)
    assert shipper.pipe(*sample.lines[200:500]).counts() == (300, 100, 0, 200, 0)
    assert counted(shipper) == (500, 500)
    assert service.counts()["duplicates"] == 0


def test_a_restarted_run_knows_the_events_accepted_before(tail: Tail, shipper: Shipper, service: Service):
    for read, start in ((50, 0), (100, 30)):
        tail.append(start, start + 50, f"app.ndjson.{start}")
        tail.start().wait_until(lambda read=read: shipper.read_state().read == read, "everything is settled")
        assert tail.running.stop().returncode == 0
    assert counted(shipper) == (80, 20)
    service.assert_holds_exactly(tail.ids(80))


def test_a_refused_record_is_sent_when_a_later_run_reads_it_again(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = lambda: Reply(status=422, body=b"no") if b"refuse this" in fake.bodies[-1] else Reply()
    bad = changed(sample.lines[0], Username="refuse this one")
    one = {"delivery.concurrency": 1}
    assert shipper.pipe(bad + b"".join(sample.lines[1:10]), settings=one).counts() == (10, 9, 1, 0, 0)
    assert shipper.pipe(*sample.lines[:10], settings=one).counts() == (10, 1, 0, 9, 0)
    assert counted(shipper) == (10, 9)
    assert sorted(fake.event_ids()) == sorted(sample.ids[:10]), "the corrected record was not sent"


def test_replay_sends_every_dead_letter_and_counts_each_once(shipper: Shipper, fake: FakeService, sample: Sample):
    bad = [changed(line, ConsumerState="XXX") for line in sample.lines[:3]]
    assert shipper.pipe(*bad, *sample.lines[1:10]).counts() == (12, 9, 3, 0, 0)
    replayed = shipper.run(
        "dead-letters", "replay", "--summary", "json", settings={"records.relax": ["state"], "batch.max_events": 2}
    )
    assert (replayed.returncode, replayed.counts()) == (0, (3, 3, 0, 0, 0))
    assert counted(shipper) == (10, 2), "two of them had been accepted before"
    assert shipper.pipe(*sample.lines[:10]).counts() == (10, 0, 0, 10, 0), "a replayed event was not remembered"


def test_ids_that_are_not_uuids_are_remembered_across_runs_and_an_empty_id_is_not(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    settings = {"records.relax": ["event_id"], "records.mode": "strict"}
    lines = [changed(line, EventId=name) for line, name in zip(sample.lines, ["", "one", "ONE", "é"], strict=False)]
    lines.append(sample.lines[5])
    assert shipper.pipe(*lines, settings=settings).counts() == (5, 5, 0, 0, 0)
    assert shipper.pipe(*lines, settings=settings).counts() == (5, 1, 0, 4, 0)
    assert shipper.pipe(sample.lines[5]).counts() == (1, 0, 0, 1, 0), "unknown to the strict rule"


def test_without_a_window_no_id_is_remembered_and_earlier_ids_are_forgotten(shipper: Shipper, sample: Sample):
    data = b"".join(sample.lines[:10])
    assert shipper.pipe(data).counts() == (10, 10, 0, 0, 0)
    assert shipper.pipe(data, settings={"records.dedupe_window": 0}).counts() == (10, 10, 0, 0, 0)
    assert shipper.pipe(data).counts() == (10, 10, 0, 0, 0), "the id was remembered across a run without a window"
    assert len(list((shipper.state / "accepted_ids").iterdir())) == 1


def test_the_window_keeps_at_least_the_configured_number_of_ids_and_few_more(shipper: Shipper, sample: Sample):
    size = 5000
    settings = {"records.dedupe_window": size}
    for start in range(0, 24_000, 4000):
        shipper.pipe(*sample.lines[start : start + 4000], settings=settings)
    kept = sum(path.stat().st_size for path in (shipper.state / "accepted_ids").iterdir()) // 16
    assert size <= kept <= size + 8000
    with closing(sqlite3.connect(shipper.state / "state.db")) as db:
        assert db.execute("SELECT sum(bytes) FROM accepted_ids").fetchone()[0] == 16 * kept
    lines = sample.lines[24_000 - size : 24_000]
    assert shipper.pipe(*lines, settings=settings).counts() == (size, 0, 0, size, 0)
    assert shipper.pipe(*sample.lines[:100], settings=settings).counts() == (100, 100, 0, 0, 0)


def test_a_run_works_without_id_files_that_are_missing_or_invalid(shipper: Shipper, sample: Sample):
    data = b"".join(sample.lines[:10])
    folder = shipper.state / "accepted_ids"
    for harm in (lambda path: path.write_bytes(b"x" * 35), lambda path: path.symlink_to("/dev/zero"), lambda _: None):
        shipper.pipe(data)
        for path in folder.iterdir():
            path.unlink()
            harm(path)
        assert "dedupe window: 10 EventIds" not in shipper.run("status").stdout
        result = shipper.pipe(data)
        assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
        assert "accepted_ids_lost" in result.stderr
        result = shipper.pipe(data)
        assert result.counts() == (10, 0, 0, 10, 0)
        assert "accepted_ids_lost" not in result.stderr, "it is said once"
        for path in folder.iterdir():
            path.unlink()


def test_nothing_is_committed_while_ids_cannot_be_written(shipper: Shipper, sample: Sample):
    shipper.pipe(sample.lines[0])
    folder = shipper.state / "accepted_ids"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_bytes(b"")
    settings = {"delivery.give_up_after_seconds": 1}
    result = shipper.pipe(*sample.lines[1:10], settings=settings)
    assert (result.returncode, result.counts()) == (4, (9, 0, 0, 0, 9))
    assert "accepted_ids cannot be written" in result.stderr
    folder.unlink()
    assert shipper.pipe(b"").counts() == (9, 9, 0, 0, 0)
    assert counted(shipper) == (10, 0)


def test_status_reports_how_far_back_the_window_reaches(shipper: Shipper, sample: Sample):
    shipper.pipe(*sample.lines[:10])
    shipper.pipe(*sample.lines[5:20])
    window = json.loads(shipper.run("status", "--json").stdout)["state"]["dedupe_window"]
    assert window["event_ids"] == 20
    assert window["since"] > 0
    assert "dedupe window: 20 EventIds, accepted since " in shipper.run("status").stdout
