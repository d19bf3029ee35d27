"""Input other than the wire form: CSV exports, nested JSON, whole batches, sloppy values."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tarfile
import zlib
from collections import Counter
from pathlib import Path
from random import Random
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, changed, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService, events_of
from tests.e2e.files import Tail, append, compress, copytruncate, log_lines
from tests.e2e.surroundings import csv_of, documents

CONFIG = Path(__file__).parents[2] / "config"
FULL = {"batch.max_events": 500, "batch.linger_seconds": 5, "delivery.concurrency": 1}


def stored(service: Service, event_id: str) -> dict:
    return json.loads(service.event(event_id)["raw"])


def unclosed(lines: list[bytes], at: int) -> bytes:
    """Return the records as CSV; the quote before one of the names is never closed."""
    rows = documents(lines)
    rows[at]["Username"] = "@"
    return csv_of(rows).replace(b"@", b'"otter')


def example(shipper: Shipper, name: str) -> Path:
    """Copy an example of config/ with the test's service instead of the example's."""
    text = (CONFIG / name).read_text().replace('base_url = "https://intake.example.com"\n', "base_url = '$'\n")
    assert "'$'" in text
    text = text.replace("$", shipper.target.base_url) + f'\n[state]\ndirectory = "{shipper.state}"\n'
    return shipper.write(name, text.encode())


def run(shipper: Shipper, *arguments: str | Path, config: Path, **options):
    return shipper.run(*arguments, "--config", config, "--summary", "json", configured=False, **options)


def test_the_example_ships_a_csv_export_and_a_bad_row_is_replayed_after_the_mapping_is_corrected(
    shipper: Shipper, service: Service, sample: Sample
):
    countries = {"GB": "United Kingdom", "IE": "Ireland", "DE": "Germany"}
    rows = []
    for number, event in enumerate(documents(sample.lines[:300])):
        media, click = event["BTag"].split("_")
        rows.append(
            {
                "player_uuid": event["EventId"].upper(),
                "registered_at": f"2026-01-15 {number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}",
                "ip": event["IP"],
                "click_id": click,
                "media_id": media,
                "player_id": event["ConsumerID"],
                "login": event["Username"],
                "country": countries.get(event["ConsumerCountry"], "Malta"),
                "cur": event["ConsumerCurrencyID"].lower(),
                "brand": "seaside",
                "verified": number % 2,
            }
        )
    rows[7]["country"] = "Freedonia"
    file = shipper.write("players.csv", csv_of(rows, delimiter=";"))
    config = example(shipper, "csv-export.toml")
    result = run(shipper, "backfill", file, config=config)
    assert (result.returncode, result.counts()) == (3, (300, 299, 1, 0, 0))
    event = stored(service, sample.ids[0])
    original = json.loads(sample.lines[0])
    assert event["Timestamp"] == "2026-01-14T23:00:00Z", "Malta is an hour ahead of UTC in winter"
    assert (event["BTag"], event["ConsumerStatus"], event["BrandID"]) == (original["BTag"], "Unverified", 11)
    assert (event["ConsumerID"], event["CustomerCurrencyID"]) == (original["ConsumerID"], "0")
    (letter,) = shipper.read_state().dead_letters
    assert letter.rule == "country"
    assert letter.raw == file.read_bytes().split(b"\n")[8]
    unmended = run(shipper, "dead-letters", "replay", config=config)
    assert (unmended.returncode, unmended.counts()) == (3, (1, 0, 1, 0, 0))
    config.write_text(config.read_text().replace('"Malta" = "MT"', '"Malta" = "MT", "Freedonia" = "FR"'))
    replayed = run(shipper, "dead-letters", "replay", config=config)
    assert (replayed.returncode, replayed.counts()) == (0, (1, 1, 0, 0, 0))
    assert stored(service, sample.ids[7])["ConsumerCountry"] == "FR"
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (300, 300, 0) == (300, service.stored, 0)


def test_the_example_ships_nested_json_without_ids_and_derives_the_same_ids_again(
    shipper: Shipper, service: Service, sample: Sample
):
    def nested(event: dict) -> bytes:
        state = {"state": event["ConsumerState"].lower() or None}
        document = {
            "player": {
                "id": event["ConsumerID"],
                "login": event["Username"],
                "home": {"country": event["ConsumerCountry"].lower(), **state},
            },
            "at": event["Timestamp"].replace("Z", ".999+00:00"),
            "from": {"ip": f"::ffff:{event['IP']}", "tag": event["BTag"]},
            "brand": event["BrandID"],
            "wallet": {
                "currency": event["ConsumerCurrencyID"].lower(),
                "currency_no": int(event["CustomerCurrencyID"]),
            },
            "kyc": True,
        }
        return json.dumps(document).encode() + b"\n"

    events = documents(sample.lines[:300])
    data = b"".join(map(nested, events))
    files = [shipper.folder / name for name in ("first.ndjson", "second.ndjson")]  # the same records in another file
    for file in files:
        file.write_bytes(data)
    result = run(shipper, "backfill", *files, config=example(shipper, "nested-json.toml"))
    assert (result.returncode, result.counts()) == (0, (600, 300, 0, 300, 0))
    for event_id, event in zip(service.event_ids(), events, strict=True):
        assert stored(service, event_id) == {**event, "EventId": event_id, "AffiliateID": ""}


def test_csv_and_json_batches_resume_after_a_kill(shipper: Shipper, fake: FakeService, sample: Sample, rng: Random):
    """Each file exceeds a read of 1 MiB; batches have any size and are compact or indented."""
    rows = documents(sample.lines[:8000])
    for row in rows[::100]:
        row["Username"] = 'two\nlines, and "quotes"'
    shipper.write("1.csv", csv_of(rows))
    events, parts = documents(sample.lines[8000:16_000]), []
    while events:
        count = rng.randint(1, 3000)
        some, events = events[:count], events[count:]
        envelope = rng.choice([{"EventType": "Acquisition", "events": some}, {"events": some}, some])
        parts.append(json.dumps(envelope, indent=rng.choice([None, 2])))
    (shipper.folder / "2.json").write_text("\n".join(parts))
    files = ("1.csv", "2.json")
    for taken, first, last in ((10, 4000, 8000), (15, 9000, 16_000)):
        fake.plan(*[OK] * taken)
        fake.default = HANG
        hung_at = fake.requests + taken + 1
        running = shipper.start("backfill", *files, settings=FULL)
        running.wait_until(
            lambda hung_at=hung_at: fake.requests == hung_at and len(fake.event_ids()) == shipper.read_state().accepted,
            "some records are settled",
        )
        running.kill()
        assert first < shipper.read_state().accepted < last, "it was not killed in the middle of a file"
    fake.default = OK
    left = 16_000 - shipper.read_state().accepted
    result = shipper.backfill(*files)
    assert (result.returncode, result.counts()) == (0, (left, left, 0, 0, 0))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:16_000])
    named = set(sample.ids[:8000:100])
    names = [event["Username"] for body in fake.stored for event in events_of(body) if event["EventId"] in named]
    assert names == ['two\nlines, and "quotes"'] * 80


def test_each_file_of_a_folder_is_read_in_its_own_format_and_a_bad_record_is_kept_byte_for_byte(
    shipper: Shipper, service: Service, sample: Sample
):
    lines = sample.lines[:40]
    for bad in (15, 35):
        lines[bad] = changed(lines[bad], IP="192.0.2.256")
    rows = documents(lines)
    data = {
        "a.ndjson": b"".join(lines[:10]),
        "b.csv": b"\xef\xbb\xbf" + csv_of(rows[10:20], delimiter="\t"),
        "c.json": json.dumps({"EventType": "Acquisition", "events": rows[20:30]}).encode(),
        "d.json": b"[" + b",".join(line.rstrip() for line in lines[30:]) + b"]",
        "e.empty": b"",
    }
    for name, content in data.items():
        shipper.write(f"mixed/{name}", content)
    result = shipper.backfill("mixed")
    assert (result.returncode, result.counts()) == (3, (40, 38, 2, 0, 0))
    service.assert_holds_exactly(sample.ids[:15] + sample.ids[16:35] + sample.ids[36:40])
    letters = {Path(os.fsdecode(letter.path)).name: letter for letter in shipper.read_state().dead_letters}
    assert letters.keys() == {"b.csv", "d.json"}
    for name, letter in letters.items():
        assert letter.rule == "ip", name
        assert data[name][letter.start_offset : letter.end_offset] == letter.raw
        assert b"192.0.2.256" in letter.raw


def test_rows_appended_to_a_followed_csv_are_shipped_with_its_header(tail: Tail, sample: Sample):
    text = csv_of(documents(sample.lines[:30])).splitlines(keepends=True)
    append(tail.file, text[0][:20])
    running = tail.start()
    for start, end in ((0, 1), (1, 11), (11, 21)):
        append(tail.file, b"".join(text[start:end])[20 if start == 0 else 0 :])
        tail.wait(end - 1)
    assert running.stop().returncode == 0
    append(tail.file, *text[21:])
    tail.pass_by("app.ndjson*", 30)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_batch_file_counts_as_delivered_and_is_deleted_after_its_rotation(
    tail: Tail, sample: Sample, indent: int | None
):
    def envelope(start: int, end: int) -> bytes:
        batch = {"EventType": "Acquisition", "events": documents(sample.lines[start:end])}
        return json.dumps(batch, indent=indent).encode() + b"\n"

    append(tail.file, envelope(0, 3))
    running = tail.start(input__rotate_wait_seconds=0.5, input__on_complete="delete")
    tail.wait(3)
    append(tail.file, envelope(3, 5))
    tail.wait(5)
    running.wait_until(lambda: tail.status_of_now() == 0, "everything is delivered")
    rotated = tail.file.rename(tail.folder / "app.ndjson.1")
    append(tail.file, envelope(5, 7))
    running.wait_until(lambda: not rotated.exists(), "the rotated file is deleted")
    tail.wait(7)
    tail.stop(7)


def test_rows_after_an_unclosed_quote_in_a_rotated_file_are_read_though_its_rotation_was_not_seen(
    tail: Tail, sample: Sample
):
    (tail.folder / "app.ndjson.1").write_bytes(unclosed(sample.lines[:30], 10))
    others = [number for number in range(30) if number != 10]
    tail.start(input__rotate_wait_seconds=0.5)
    tail.wait(others)
    tail.stop(others, dead_lettered=1)


def test_a_row_is_waited_for_in_a_file_that_got_its_old_name_back(tail: Tail, sample: Sample):
    rows = documents(sample.lines[:6])
    rows[4]["Username"] = "two\nlines"
    data = csv_of(rows)
    middle = data.index(b"two\n") + len(b"two\n")
    append(tail.file, data[:middle])
    running = tail.start(["app.ndjson", "other.ndjson.1"], input__rotate_wait_seconds=0.3)
    tail.wait(4)
    away = tail.file.rename(tail.folder / "app.ndjson.bak")
    running.wait_until(lambda: log_lines(running, "source_closed", away), "it was renamed")
    away.rename(tail.file)
    (tail.folder / "other.ndjson.1").write_bytes(unclosed(sample.lines[10:20], 0))
    tail.wait([*range(4), *range(11, 20)])  # so the first file was quiet for as long
    append(tail.file, data[middle:])
    tail.wait([*range(6), *range(11, 20)])
    tail.stop([*range(6), *range(11, 20)], dead_lettered=1)


@pytest.mark.parametrize("rotation", ["rename", "delete", "copytruncate", "gzip"])
def test_an_unclosed_quote_delays_the_rows_after_it_until_the_file_is_rotated(
    tail: Tail, service: Service, sample: Sample, rotation: str
):
    tail.file.write_bytes(unclosed(sample.lines[:30], 10))
    running = tail.start(input__rotate_wait_seconds=0.5)
    tail.wait(10)
    running.wait_until(lambda: tail.status_of_now() != 0, "the rest counts as undelivered")
    rotated = tail.folder / "app.ndjson.1"
    if rotation == "copytruncate":
        copytruncate(tail.file, rotated)
    elif rotation == "gzip":
        compress(tail.file, "gz", rotated)
    else:
        tail.file.rename(rotated)
    append(tail.file, csv_of(documents(sample.lines[30:35])))
    if rotation == "delete":
        rotated.unlink()
    others = [number for number in range(35) if number != 10]
    tail.wait(others)
    running.wait_until(lambda: tail.status_of_now() == 0, "everything is delivered")
    tail.stop(others, dead_lettered=1)
    service.assert_holds_exactly(tail.ids(others))


def test_rows_after_an_unclosed_quote_in_a_file_rotated_while_stopped_are_delivered(tail: Tail, sample: Sample):
    tail.file.write_bytes(unclosed(sample.lines[:30], 10))
    tail.pass_by("app.ndjson", 10)
    tail.file.rename(tail.folder / "app.ndjson.1")
    tail.file.write_bytes(csv_of(documents(sample.lines[30:35])))
    others = [number for number in range(35) if number != 10]
    tail.start("app.ndjson", input__rotate_wait_seconds=0.5)
    tail.wait(others)
    tail.stop(others, dead_lettered=1)


def test_sloppy_values_are_normalized_and_unknown_fields_dropped(shipper: Shipper, service: Service, sample: Sample):
    def sloppy(line: bytes) -> bytes:
        event = json.loads(line)
        return changed(
            line,
            EventId="{" + event["EventId"].upper() + "}",
            IP=f" {event['IP']}",
            Timestamp=event["Timestamp"].replace("Z", ".5+00:00"),
            ConsumerID=str(event["ConsumerID"]),
            ConsumerCountry=event["ConsumerCountry"].lower(),
            CustomerCurrencyID=int(event["CustomerCurrencyID"]),
            AffiliateID=event["AffiliateID"] or None,
            Phone="+44 20 7946 0000",
        )

    file = shipper.write("sloppy.ndjson", *map(sloppy, sample.lines[:100]))
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    for line in sample.lines[:100:10]:
        event = json.loads(line)
        assert stored(service, event["EventId"]) == event
    found = shipper.run("validate", file, "--format", "json", check=False)
    assert "7946" not in found.stdout
    findings = json.loads(found.stdout)
    assert findings["unknown_fields"] == {"Phone": 100}
    assert findings["normalized"]["EventId"] == 100


def test_a_file_that_is_neither_csv_nor_json_batch_is_refused_with_a_remedy(shipper: Shipper, sample: Sample):
    deposits = {"EventType": "Deposit", "events": documents(sample.lines[:5000])}
    file = shipper.write("deposits.json", json.dumps(deposits).encode())
    result = shipper.backfill(file, settings={"input.format": "batch"})
    result.assert_ended(4, "is input.format correct?")


def test_blank_lines_before_the_header_are_skipped(shipper: Shipper, service: Service, sample: Sample):
    rows = [",".join(map(str, json.loads(line).values())) for line in sample.lines[:20]]
    header = ",".join(json.loads(sample.lines[0]))
    bad = rows[3].replace(rows[3][:8], "not-an-id", 1)
    data = b"\xef\xbb\xbf\r\n  \r\n" + "\n".join([header, *rows[:3], bad, *rows[4:], ""]).encode()
    shipper.write("rows.csv", data)
    assert shipper.backfill("rows.csv").counts() == (20, 19, 1, 0, 0)
    assert shipper.pipe(data).counts() == (20, 0, 1, 19, 0)
    assert shipper.run("dead-letters", "replay", "--summary", "json").counts() == (2, 0, 2, 0, 0)
    service.assert_holds_exactly(sample.ids[:3] + sample.ids[4:20])


@pytest.mark.parametrize("form", ["auto", "csv"])
def test_a_header_with_a_repeated_column_is_refused_and_the_column_named(
    shipper: Shipper, service: Service, sample: Sample, form: str
):
    """The meaning is ambiguous; a file waits to be corrected, and piped input becomes dead letters."""
    names = [*json.loads(sample.lines[0]), "IP", "", ""]
    rows = "".join(",".join([*map(str, event.values()), "192.0.2.7,,\n"]) for event in documents(sample.lines[:3]))
    file = shipper.write("a.csv", (",".join(names) + "\n" + rows).encode())
    number = names.index("IP") + 1
    words = f"the columns {number} and 14 of the header have the same name"
    settings = {"input.format": form}
    checked = shipper.run("validate", file, settings=settings)
    checked.assert_ended(2, f"{words} (IP)")
    result = shipper.backfill(file, settings=settings)
    assert (result.returncode, result.counts()) == (4, (0, 0, 0, 0, 0))
    assert f"{words} (IP)" in result.stderr
    piped = shipper.pipe(file.read_bytes(), settings=settings)
    assert (piped.returncode, piped.counts()) == (3, (3, 0, 3, 0, 0))
    assert {(letter.rule, letter.message) for letter in shipper.read_state().dead_letters} == {("csv", words)}
    assert service.stored == 0

    file.write_text(",".join(names).replace(",IP,,", ",Note,,") + "\n" + rows)
    assert shipper.backfill(file, settings=settings).counts() == (3, 3, 0, 0, 0)


def test_rows_after_a_header_in_another_order_are_not_read(shipper: Shipper, service: Service, sample: Sample):
    """Two exports were joined: the values would arrive in the wrong fields, such as AffiliateID in Username."""
    first, *others = documents(sample.lines[:3])
    joined = csv_of([first]) + b"\xef\xbb\xbf" + csv_of(others, columns=list(reversed(first)))
    file = shipper.write("joined.csv", joined)
    words = "is a header with other columns or in another order"
    at = len(csv_of([first]))
    shipper.run("validate", file).assert_ended(2, f"the line at byte {at} {words}")
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (4, (1, 1, 0, 0, 0))
    assert f"the line at byte {at} {words}" in result.stderr
    shipper.pipe(joined).assert_ended(2, f"standard input: a line {words}")

    moved = shipper.write("moved.csv", joined[at:])
    assert shipper.backfill(moved).counts() == (3, 2, 0, 1, 0), "with the row that `pipe` had stored"
    service.assert_holds_exactly(sample.ids[:3])


def test_csv_whose_lines_end_with_cr_alone_is_not_taken_for_a_header(shipper: Shipper, sample: Sample):
    data = csv_of(documents(sample.lines[:3])).replace(b"\n", b"\r")
    csv = {"input.format": "csv"}
    words = "its lines end with CR alone; convert them: tr"
    result = shipper.backfill(shipper.write("rows.csv", data), settings=csv)
    assert (result.returncode, words in result.stderr) == (4, True), result
    shipper.pipe(data, settings=csv).assert_ended(2, f"standard input: {words}")
    assert words in shipper.run("validate", "rows.csv").stdout
    assert shipper.pipe(b"\xef\xbb\xbf\n \r\n", settings=csv).counts() == (0, 0, 0, 0, 0), "no header either"


@pytest.mark.parametrize("name", ["a.log.zip", "a.log.tar", "a.log.tar.gz", "a.log.lzma", "a.log.Z", "a.log.deflate"])
def test_an_archive_that_cannot_be_read_is_refused_and_its_lines_are_no_records(
    shipper: Shipper, service: Service, sample: Sample, name: str
):
    """The log of the day was rotated into it, so records in it would be missing although all is accounted for."""
    file = shipper.write("a.log", *sample.lines[:50])
    match name:
        case "a.log.zip":
            with ZipFile(shipper.folder / name, "w", ZIP_DEFLATED) as archive:
                archive.write(file)
        case "a.log.tar" | "a.log.tar.gz":
            with tarfile.open(shipper.folder / name, "w:gz" if name.endswith("gz") else "w") as archive:
                archive.add(file)
        case "a.log.lzma":
            shipper.write(name, lzma.compress(file.read_bytes(), lzma.FORMAT_ALONE))
        case "a.log.Z":
            shipper.write(name, b"\x1f\x9d\x90\x7b\n\n")
        case _:
            shipper.write(name, zlib.compress(file.read_bytes()))
    shipper.write("a.log", *sample.lines[50:53])
    words = "it is not text, but an archive"
    for form in ("auto", "ndjson"):
        shipper.run("validate", name, settings={"input.format": form}).assert_ended(2, words)
    result = shipper.backfill("a.log*")
    assert (result.returncode, result.counts(), words in result.stderr) == (4, (3, 3, 0, 0, 0), True), result
    piped = "standard input is compressed" if name.endswith("gz") else f"standard input: {words}"
    shipper.pipe((shipper.folder / name).read_bytes()).assert_ended(2, piped)
    service.assert_holds_exactly(sample.ids[50:53])


def test_a_header_that_takes_much_memory_is_refused_but_one_with_many_columns_is_not(shipper: Shipper, sample: Sample):
    """The header stays in memory as long as the file exists."""
    (event,) = documents(sample.lines[:1])
    file = shipper.folder / "a.csv"
    for more, length, is_fine in ((987, 9, True), (988, 9, False), (100, 1000, False)):
        names = [*event, *(f"{number:0{length}}" for number in range(more))]
        file.write_text(",".join(names) + "\n" + ",".join([*map(str, event.values()), *([""] * more)]) + "\n")
        result = shipper.backfill(file, settings={"input.format": "csv"})
        assert result.counts() == (is_fine, is_fine, 0, 0, 0)
        assert ("the header has 1,001 columns in" in result.stderr) == (more == 988)
        assert ("the header has 113 columns in" in result.stderr) == (length == 1000)
        if not is_fine:  # the format of an archive is detected elsewhere
            archive = file.with_suffix(".csv.gz")
            archive.write_bytes(gzip.compress(file.read_bytes()))
            result = shipper.backfill(archive, settings={"input.format": "csv"})
            assert result.counts() == (0, 0, 0, 0, 0)
            assert "the header has 1" in result.stderr


def test_a_new_file_with_the_same_header_as_an_old_one_is_read(tail: Tail, shipper: Shipper, sample: Sample):
    """Daily exports have the same header, and a day may have no rows."""
    header, *rows = csv_of(documents(sample.lines[:10])).splitlines(keepends=True)
    monday, tuesday = tail.folder / "monday.csv", tail.folder / "tuesday.csv"
    monday.write_bytes(header)
    tail.start("*.csv").wait_for("source_opened")
    wait_until(lambda: shipper.read_state().checkpoints, "the header is read")
    tail.running.stop()
    monday.rename(shipper.folder / "taken-away.csv")
    tuesday.write_bytes(header + b"".join(rows))
    running = tail.start("*.csv")
    tail.wait(10)
    assert tail.stop(10).stderr.count("source_found_again") == 0
    assert running.stderr.count("source_opened") == 1
