"""The ledger and the report, from the records to the verdict: lost records are found and reported."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import httpx
import pytest

from shipper.model.wire import BODY_HEAD, BODY_TAIL, INTAKE_PATH
from shipper.sandbox.samples import sample_lines
from tests.conftest import SEED
from tests.e2e.driver import Result, Service, Shipper, changed, sandbox
from tests.e2e.fake_service import FakeService
from tests.ledgers import read_ledger

OCTOBER = ("2025-10-01", "2025-10-31")
EVENTS = 3_000
_PAGE = 10_000

Key = tuple[str, int, str, str]


def place(line: bytes) -> Key:
    """Compute independently where the ledger counts an event."""
    event = json.loads(line)
    return event["Timestamp"][:13], event["BrandID"], event["AffiliateID"], event["BTag"].split("_")[0]


def places(lines: Iterable[bytes]) -> Counter[Key]:
    return Counter(map(place, lines))


@cache
def lines_of_october() -> list[bytes]:
    return list(sample_lines(EVENTS, seed=SEED, end=datetime(2025, 11, 1, tzinfo=UTC), days=31))


@cache
def identifiers() -> list[str]:
    """Identifiers of persons, which must not be shown."""
    events = map(json.loads, lines_of_october()[:20])
    return [str(event[name]) for event in events for name in ("Username", "IP", "ConsumerID", "EventId")]


@pytest.fixture
def october() -> list[bytes]:
    return lines_of_october()


def with_report(shipper: Shipper, service: Service) -> None:
    """Use the report of this service, wherever events are sent."""
    shipper.config.write_text(
        f'{shipper.config.read_text()}[report]\nbase_url = "{service.target.base_url}"\n'
        f'subscription_key = "{service.target.subscription_key}"\ntoken = "{service.target.token}"\n'
    )


@pytest.fixture
def reporting(shipper: Shipper, service: Service) -> Shipper:
    with_report(shipper, service)
    return shipper


@pytest.fixture(scope="module")
def shipped_october(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shipper, Service]]:
    """A shipper that has shipped October, and its service, for tests that ship nothing more."""
    with (
        sandbox() as service,
        Shipper(tmp_path_factory.mktemp("shipped_october") / "shipper", service.target) as shipper,
    ):
        with_report(shipper, service)
        assert ship(shipper, lines_of_october()).counts() == (EVENTS, EVENTS, 0, 0, 0)
        yield shipper, service


def post(service: Service, lines: Iterable[bytes]) -> None:
    """Post events to the service that the shipper does not know."""
    headers = {
        "Authorization": f"Bearer {service.target.token}",
        "Ocp-Apim-Subscription-Key": service.target.subscription_key,
        "Content-Type": "application/json",
        "Cache-Control": "no-cache",
    }
    url, body = f"{service.target.base_url}{INTAKE_PATH}", BODY_HEAD + b",".join(lines) + BODY_TAIL
    httpx.post(url, content=body, headers=headers, trust_env=False, verify=False, timeout=10).raise_for_status()


def ship(shipper: Shipper, lines: Iterable[bytes], **options: Any) -> Result:
    """Deliver lines in this process."""
    file = shipper.write(f"{len(list(shipper.folder.glob('*.ndjson')))}.ndjson", *lines)
    return shipper.run("backfill", file, "--summary", "json", **options)


def reconcile(shipper: Shipper, *options: str, days: tuple[str, ...] = OCTOBER, account: int = 1001) -> Result:
    return show(shipper, "reconcile", str(account), *days, *options)


def show(shipper: Shipper, *arguments: str, **options: Any) -> Result:
    """Run a command that shows figures, and assert that it shows no identifier of a person in any format."""
    result = shipper.run(*arguments, **options)
    assert not [each for each in identifiers() if each in result.stdout + result.stderr]
    return result


def compared(shipper: Shipper, *options: str, **where: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the document."""
    result = reconcile(shipper, "--format", "json", *options, **where)
    assert result.returncode in {0, 1, 3, 4, 6}, result.stderr
    return result.returncode, json.loads(result.stdout)


def differing(document: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {
        (row["period_start"], row["brand_id"], row["source_id"]): row for row in document["rows"] if row["difference"]
    }


def ledger(shipper: Shipper) -> Counter[Key]:
    return Counter(
        {(row.hour, row.brand_id, row.affiliate_id, row.media): row.accepted for row in read_ledger(shipper.state)}
    )


def stored(service: Service) -> Counter[Key]:
    """Return the service's events, each once, counted by their place in the ledger."""
    found: Counter[Key] = Counter()
    after: int | None = 0
    while after is not None:
        query = {"limit": _PAGE, "after": after}
        page = httpx.get(
            f"{service.target.base_url}/_sandbox/events", params=query, trust_env=False, verify=False
        ).json()
        found.update(place(event["raw"]) for event in page["events"])
        after = page["next"]
    return found


# The ledger is correct


def test_the_ledger_has_exactly_the_events_of_the_service(shipper: Shipper, october: list[bytes]):
    """Records refused by a rule, refused individually in a 202, and duplicates are not accepted."""
    with sandbox(profile="strict", rejection="partial") as service:
        shipper.target = service.target
        refused_here = [changed(line, IP="nowhere") for line in october[:5]]
        refused_there = [changed(line, ConsumerCountry="ZZ") for line in october[5:12]]
        result = ship(shipper, [*refused_here, *refused_there, *october[12:], *october[12:20], b"broken\n"])
        assert result.counts() == (EVENTS + 9, EVENTS - 12, 13, 8, 0)
        assert ledger(shipper) == stored(service) == places(october[12:])
    found = read_ledger(shipper.state)
    repeated = places(october[12:20])
    assert {
        (row.hour, row.brand_id, row.affiliate_id, row.media): row.duplicates for row in found if row.duplicates
    } == (repeated)
    shown = json.loads(show(shipper, "ledger", "--format", "json").stdout)
    assert shown["totals"] == {
        "accepted": EVENTS - 12,
        "duplicates": 8,
        "dead_letters": 12,
        "unattributed_dead_letters": 1,
    }


def test_only_accepted_records_of_a_split_batch_are_counted(shipper: Shipper, october: list[bytes]):
    with sandbox(profile="strict", rejection="whole") as service:
        shipper.target = service.target
        bad = {40, 41, 300, 700}
        lines = [changed(line, ConsumerCountry="ZZ") if at in bad else line for at, line in enumerate(october[:800])]
        assert ship(shipper, lines).counts() == (800, 796, 4, 0, 0)
        assert max(request["status"] for request in service.requests(operation="intake")) == 400
        assert ledger(shipper) == stored(service) == places(o for at, o in enumerate(october[:800]) if at not in bad)


def test_a_replay_counts_accepted_records(shipper: Shipper, service: Service, october: list[bytes]):
    refused = ship(shipper, october[:50], settings={"records.allowed_statuses": '["None such"]'})
    assert refused.counts() == (50, 0, 50, 0, 0)
    assert not ledger(shipper)
    before = json.loads(show(shipper, "ledger", "--format", "json").stdout)
    assert (before["totals"]["accepted"], before["totals"]["dead_letters"]) == (0, 50)
    replayed = shipper.run("dead-letters", "replay", "--summary", "json")
    assert replayed.counts() == (50, 50, 0, 0, 0)
    assert ledger(shipper) == stored(service) == places(october[:50])
    after = json.loads(show(shipper, "ledger", "--format", "json").stdout)
    assert (after["totals"]["accepted"], after["totals"]["dead_letters"]) == (50, 0)


def test_a_killed_shipper_counts_nothing_twice(shipper: Shipper, service: Service, october: list[bytes]):
    file = shipper.write("events.ndjson", *october)
    settings = {"batch.max_events": 50, "state.commit_interval_seconds": 0.3, "delivery.concurrency": 2}
    for kills in range(1, 3):
        running = shipper.start("backfill", file, "--rate", "2000", settings=settings)
        part = kills * EVENTS // 4

        def is_ahead(enough: int = part) -> bool:
            return enough <= shipper.read_state().accepted < service.stored

        # Kill it when the service has events beyond the checkpoint; they are sent again.
        running.wait_until(is_ahead, "the service to be ahead")
        running.kill()
        assert sum(ledger(shipper).values()) == shipper.read_state().accepted < EVENTS
    assert shipper.run("backfill", file).returncode == 0
    assert max(service.times_received().values()) > 1, "nothing was sent twice, so the case did not occur"
    assert ledger(shipper) == stored(service) == places(october)


# The command `ledger`


def test_ledger_groups_events_by_days_of_a_time_zone(shipped_october: tuple[Shipper, Service], october: list[bytes]):
    shipper, _ = shipped_october
    result = show(shipper, "ledger", *OCTOBER, "--timezone", "Etc/GMT-2", "--format", "csv")
    found: Counter[tuple[str, str, str, str]] = Counter()
    for row in csv.DictReader(io.StringIO(result.stdout)):
        found[row["day"], row["brand_id"], row["affiliate_id"], row["media"]] += int(row["accepted"])
    expected: Counter[tuple[str, str, str, str]] = Counter()
    for (hour, brand, affiliate, media), count in places(october).items():
        day = (datetime.fromisoformat(f"{hour}:00") + timedelta(hours=2)).date().isoformat()
        if OCTOBER[0] <= day <= OCTOBER[1]:
            expected[day, str(brand), affiliate, media] += count
    assert found == expected
    assert 0 < sum(expected.values()) < EVENTS
    by_hour = show(shipper, "ledger", *OCTOBER, "--by", "hour", "--format", "ndjson").stdout.splitlines()
    assert sum(json.loads(line)["accepted"] for line in by_hour) == EVENTS
    table = show(shipper, "ledger", *OCTOBER).stdout
    assert f"{EVENTS:,}" in table.splitlines()[-3]
    assert show(shipper, "ledger", "2025-10").stdout == table
    by_brand = json.loads(show(shipper, "ledger", "2025-10", "--by", "brand", "--format", "json").stdout)["rows"]
    of_brands: Counter[int] = Counter()
    for (_, brand, _), count in by_day(october).items():
        of_brands[brand] += count
    assert {row["brand_id"]: row["accepted"] for row in by_brand} == of_brands
    openpyxl = pytest.importorskip("openpyxl")
    arguments = ("--by", "media", "--format", "xlsx", "-o", "media.xlsx")
    assert show(shipper, "ledger", "2025-10", *arguments).returncode == 0
    sheet = openpyxl.load_workbook(shipper.folder / "media.xlsx").active
    assert [cell.value for cell in sheet[1]] == ["media", "accepted", "duplicates", "dead_letters"]
    assert sum(row[1] for row in sheet.iter_rows(min_row=2, values_only=True)) == EVENTS


def test_ledger_refuses_unusable_zones_and_days(shipper: Shipper, shipped_october: tuple[Shipper, Service]):
    unused = f"no shipper has used state.directory, {shipper.state}, yet"
    assert show(shipper, "ledger").stdout == f"the ledger is empty; {unused}\n"
    assert show(shipper, "ledger", "--format", "csv").stderr == f"note: {unused}\n"
    shipper, _ = shipped_october
    for arguments, words in {
        ("--timezone", "Asia/Kolkata"): "counts by whole UTC hours",
        (
            "--timezone",
            "Europe/Mlata",
        ): "not a known time zone; did you mean Europe/Malta? Use a name from the IANA database",
        ("2025-13",): "'2025-13' is not a date or a period",
        ("2025-10-02", "2025-10-01"): "is after END",
    }.items():
        result = show(shipper, "ledger", *arguments)
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert words in " ".join(result.stderr.split())
    assert show(shipper, "ledger", "2999-12").stdout == "the ledger has nothing for 2999-12-01 to 2999-12-31\n"


def test_ledger_works_while_a_shipper_is_running(shipper: Shipper, october: list[bytes]):
    settings = {"state.commit_interval_seconds": 0.05}
    running = shipper.open_pipe(*october[:100], settings=settings)
    running.wait_until(lambda: shipper.read_state().accepted == 100, "a checkpoint")
    shown = show(shipper, "ledger", "--format", "json")
    assert json.loads(shown.stdout)["totals"]["accepted"] == 100
    assert running.end_input().returncode == 0


# The command `reconcile`


def test_a_month_agrees_with_its_report_until_a_day_is_restated(
    shipped_october: tuple[Shipper, Service], october: list[bytes]
):
    shipper, service = shipped_october
    splits = ("day", "month", "none")
    of_splits = {split: compared(shipper, "--split", split) for split in splits}
    found = {split: (code, each["verdict"], differing(each)) for split, (code, each) in of_splits.items()}
    assert found == dict.fromkeys(splits, (0, "agree", {}))
    for _, each in of_splits.values():
        assert each["headlines"] == [
            "Verdict: agree. The report and the ledger agree.",
            f"Total 2025-10-01 to 2025-10-31: accepted {EVENTS:,}, reported {EVENTS:,}, difference 0.",
        ]
        assert each["totals"]["accepted"] == each["totals"]["reported"] == EVENTS
        assert {(row["brand_id"], row["source_id"]) for row in each["rows"]} == {key[1:] for key in by_day(october)}
    table = show(shipper, "reconcile", "1001", *OCTOBER)
    assert (table.returncode, table.stdout) == (0, reconcile(shipper).stdout)
    assert "\nVerdict: agree. The report and the ledger agree.\n" in table.stdout

    day = {"start": "2025-10-09", "end": "2025-10-09"}
    httpx.post(f"{service.target.base_url}/_sandbox/restatements", json=day, trust_env=False).raise_for_status()
    code, restated = compared(shipper)
    assert (code, restated["verdict"], restated["is_alarmed"]) == (6, "explained", True)
    rows = differing(restated)
    assert rows.keys() == {key for key in by_day(october) if key[0] == "2025-10-09"}
    for row in rows.values():
        assert row["explanation"].startswith(f"restated: the report had {row['accepted']} before")
        assert (row["result"], row["adjustment"], row["status"]) == (row["accepted"], -1, "explained")
    taken_back = -restated["totals"]["taken_back"]
    assert taken_back == len(rows) > 0
    assert restated["headlines"][2].startswith(f"Alarm: the platform took back {taken_back} registrations (")
    assert compared(shipper, "--alarm-below", "-5%")[0] == 0


def by_day(lines: Iterable[bytes]) -> Counter[tuple[str, int, int]]:
    return Counter((hour[:10], brand, int(media)) for hour, brand, _, media in map(place, lines))


def test_seven_events_lost_by_the_service_are_reported(reporting: Shipper, service: Service, october: list[bytes]):
    lost, others = october[1000:1007], [*october[:1000], *october[1007:]]
    assert ship(reporting, others).returncode == 0
    service.set_faults({"effect": "status", "status": 202})
    try:
        assert ship(reporting, lost).counts() == (7, 7, 0, 0, 0)
    finally:
        service.set_faults()
    assert service.stored == EVENTS - 7

    code, found = compared(reporting)
    assert (code, found["verdict"]) == (3, "differences")
    assert found["totals"]["missing"] == 7
    assert {key: -row["unexplained"] for key, row in differing(found).items()} == by_day(lost)
    table = reconcile(reporting)
    assert table.returncode == 3
    assert "7 accepted records are missing from the report" in table.stdout
    page = reporting.folder / "october.html"
    result = reconcile(reporting, "--all", "--format", "html", "--output", str(page))
    assert (result.returncode, result.stdout) == (3, "")
    assert "7 accepted records are missing" in page.read_text()
    assert not [each for each in identifiers() if each in page.read_text()]
    assert "Traceback" not in result.stderr


def test_a_report_in_days_of_another_time_zone_is_detected(
    reporting: Shipper, service: Service, fake: FakeService, october: list[bytes]
):
    """The platform counts by its own clock: it gets the same events with times of that clock."""
    assert ship(reporting, october).returncode == 0

    def by_its_clock(line: bytes) -> bytes:
        moment = datetime.fromisoformat(json.loads(line)["Timestamp"]) + timedelta(hours=2)
        return changed(line, Timestamp=moment.strftime("%Y-%m-%dT%H:%M:%SZ"))

    post(service, map(by_its_clock, october))
    assert service.stored == EVENTS
    code, found = compared(reporting)
    assert found["day_boundary"]["timezones"] == ["Etc/GMT-2"]
    assert found["day_boundary"]["moved"] > 20
    assert len(differing(found)) > 10
    assert (code, found["verdict"]) == (0, "explained")
    assert "UTC+2 (--timezone Etc/GMT-2), all differences disappear" in found["headlines"][0]
    code, found = compared(reporting, "--timezone", "Etc/GMT-2")
    assert (code, differing(found)) == (0, {})


@pytest.mark.parametrize("is_there", [False, True], ids=["no directory", "only reports in it"])
def test_state_directory_without_a_ledger_is_an_error_and_not_an_agreement(
    reporting: Shipper, service: Service, is_there: bool
):
    """A wrong directory has no ledger, like that of a shipper that lost everything."""
    days = ("2025-10-01", "2025-10-02")
    if is_there:
        assert show(reporting, "report", "fetch", "1001", *days).returncode == 0
    before = sorted(reporting.state.iterdir()) if is_there else None
    asked = len(service.requests(operation="report"))
    result = reconcile(reporting, days=days)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"state.directory: {reporting.state} has no ledger" in " ".join(result.stderr.split())
    assert len(service.requests(operation="report")) == asked
    assert (sorted(reporting.state.iterdir()) if reporting.state.exists() else None) == before


def test_the_notes_mention_deleted_dead_letters_and_records_from_before_the_ledger(
    reporting: Shipper, october: list[bytes]
):
    assert ship(reporting, [*october[:100], b"{}\n"]).returncode == 3
    assert reporting.run("dead-letters", "purge", "--all", "--yes").returncode == 0
    assert ship(reporting, october[:8]).counts() == (8, 0, 0, 8, 0)
    with sqlite3.connect(reporting.state / "state.db") as db:  # as if past their retention
        db.executescript("DELETE FROM ledger; DELETE FROM ledger_parts")
    db.close()
    assert ship(reporting, october[100:200]).returncode == 0
    code, found = compared(reporting)
    assert (code, found["totals"]["surplus"]) == (3, 100)
    assert [note.partition(",")[0] for note in found["notes"]] == [
        "1 dead letter of any day was deleted; if the service had received the record",
        "100 records were accepted before the ledger begins",
    ]


def test_the_notes_mention_records_that_are_uncounted_or_may_be_of_another_account(
    reporting: Shipper, fake: FakeService, october: list[bytes]
):
    lines = [changed(october[0], Timestamp="1 October"), changed(october[1], BrandID=2**63)]
    lines.append(changed(october[2], AffiliateID="1001"))
    assert ship(reporting, lines, settings={"records.relax": '["timestamp", "brand_id"]'}).counts() == (3, 3, 0, 0, 0)
    _, found = compared(reporting, "--set", "records.relax=timestamp")
    assert (found["totals"]["missing"], found["totals"]["surplus"]) == (1, 0)
    assert found["notes"][0].startswith("2 records were accepted before the ledger begins, or with a relaxed Timestamp")
    assert found["notes"][1].startswith("1 missing record counts for this account only by AffiliateID")


def test_without_a_report_nothing_is_compared(shipped_october: tuple[Shipper, Service]):
    shipper, service = shipped_october
    service.set_faults({"effect": "status", "status": 404, "operation": "report"})
    try:
        result = reconcile(shipper, days=("2025-10-01", "2025-10-02"))
        assert (result.returncode, result.stdout) == (1, "")
        assert "the report does not exist" in result.stderr
    finally:
        service.set_faults()
    result = reconcile(shipper, account=7)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "shipper: account 7, 2025-10-01 to 2025-10-31: the report does not exist: the account is unknown"
    )
    result = reconcile(shipper, "--timezone", "Asia/Kolkata")
    assert (result.returncode, result.stdout) == (2, "")
    assert "whole UTC hours" in result.stderr
    assert reconcile(shipper, days=("2025-10-02", "2025-10-01")).returncode == 2
