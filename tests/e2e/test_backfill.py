"""`shipper backfill` reads files once, to their end."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from shipper.sources.discovery import FoundFile, Patterns
from tests.e2e import warm_start
from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, events_of
from tests.e2e.files import append

LARGE = 20_000  # more lines than are read ahead in batches of a hundred


def test_each_file_is_delivered_once_and_a_second_run_reads_only_appended_records(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    """Files named twice, matched by globs and in folders; empty files and blank lines contain no records."""
    folder = shipper.folder / "exports" / "deeper"
    for number in range(4):
        shipper.write(folder / f"{number}.ndjson", *sample.lines[number * 100 : number * 100 + 100])
    (folder / "empty.ndjson").touch()
    (folder / "blank.ndjson").write_bytes(b"\n \r\n\t\n")
    crlf = b"\xef\xbb\xbf" + b"".join(line.replace(b"\n", b"\r\n\r\n") for line in sample.lines[400:450]).rstrip()
    (folder / "crlf.ndjson").write_bytes(crlf)
    large = shipper.write("large.ndjson", *sample.lines[450:10_000])
    files = ["exports", "exports/**/*.ndjson", folder / "0.ndjson", folder / "[3].ndjson", large]
    first = shipper.backfill(*files, settings={"batch.max_bytes": 50_000, "input.max_record_bytes": 10_000})
    assert (first.returncode, first.counts()) == (0, (10_000, 10_000, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:10_000])
    assert service.received == 10_000
    assert 49_000 < max(request["body_bytes"] for request in service.requests()) <= 50_000
    for wanted in [0, 9999, *rng.sample(range(10_000), 20)]:
        assert service.event(sample.ids[wanted])["raw"].encode() + b"\n" == sample.lines[wanted]
    assert large.stat().st_size in [checkpoint for *_, checkpoint in shipper.read_state().checkpoints]

    append(folder / "0.ndjson", *sample.lines[10_000:10_020])
    (folder / "0.ndjson").rename(folder / "renamed.ndjson")
    second = shipper.backfill("exports", large)
    assert (second.returncode, second.counts()) == (0, (20, 20, 0, 0, 0))
    assert second.summary["requests"] == 1
    assert service.times_received() == dict.fromkeys(sample.ids[:10_020], 1)


def test_the_first_sigterm_drains_and_the_next_run_resumes(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.plan(HANG)
    file = shipper.write("large.ndjson", *sample.lines[:LARGE])
    settings = {"delivery.concurrency": 1, "batch.max_events": 100}
    running = shipper.start("backfill", file, "--summary", "json", settings=settings)
    running.wait_until(lambda: fake.requests, "a first request")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    fake.release()
    stopped = running.finish()
    read, accepted, *_, pending = stopped.counts()
    assert stopped.returncode == 4, "more remains to be read"
    assert stopped.summary["outcome"] == "drained"
    assert 0 < read == accepted < LARGE, "the first run must stop before the end"
    assert pending == 0

    rest = shipper.backfill(file)
    assert (rest.returncode, rest.counts()) == (0, (LARGE - read, LARGE - read, 0, 0, 0))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:LARGE]), "none is lost or sent twice"


def test_duplicates_are_counted_and_no_body_contains_an_event_or_a_consumer_twice(
    shipper: Shipper, fake: FakeService, sample: Sample, rng: Random
):
    lines = sample.lines[:3000]
    lines[::3] = [changed(line, ConsumerID=rng.choice((77, 78))) for line in lines[::3]]
    mixed = [(float(index), line) for index, line in enumerate(lines)]
    repeats = rng.sample(mixed, 500)
    # Records with the same EventId and other content are the same event, too.
    repeats[:100] = [(index, changed(line, Username="somebody_else")) for index, line in repeats[:100]]
    mixed += [(rng.uniform(index, len(lines)) + 0.5, line) for index, line in repeats]
    file = shipper.write("repeats.ndjson", *(line for _, line in sorted(mixed)))

    result = shipper.backfill(file, settings={"batch.max_events": 100})
    assert (result.returncode, result.counts()) == (0, (3500, 3000, 0, 500, 0))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:3000])
    for body in fake.bodies:
        for name in ("EventId", "ConsumerID"):
            values = [event[name] for event in events_of(body)]
            assert len(values) == len(set(values)), name
    held = sum(event["ConsumerID"] in {77, 78} for body in fake.bodies for event in events_of(body))
    assert held == 1000, "the case did not occur"


def test_an_oversized_line_takes_no_memory_and_affects_no_other_record(
    shipper: Shipper, service: Service, sample: Sample, tmp_path: Path
):
    lengths = [262_145, 999_900, 1_020_000, 1_048_575, 1_048_576, 1_048_577, 64_000_000]
    file = tmp_path / "long.ndjson"
    with file.open("wb") as out:
        for line, length in zip(sample.lines, lengths, strict=False):
            out.write(line + b"x" * length + b"\n")
        out.write(sample.lines[len(lengths)])
    good = len(lengths) + 1
    result = shipper.backfill(file, fresh=True)
    assert (result.returncode, result.counts()) == (3, (good + len(lengths), good, len(lengths), 0, 0))
    service.assert_holds_exactly(sample.ids[:good])
    state = shipper.read_state()
    assert state.rules == ["oversized"] * len(lengths)
    starts = []
    offset = 0
    for line, length in zip(sample.lines, lengths, strict=False):
        starts.append(offset + len(line))
        offset += len(line) + length + 1
    assert [letter.start_offset for letter in state.dead_letters] == starts
    assert result.peak_bytes < 150 << 20, "the line of 64 MB was held in memory"


def test_a_file_that_disappears_is_reported_and_the_others_are_delivered(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.plan(HANG)
    names = ["a.ndjson", "b.ndjson", "c.ndjson"]
    # The first file is larger than the read-ahead, so the second is not open yet when it is deleted.
    for name, start, end in zip(names, (0, LARGE, LARGE + 10), (LARGE, LARGE + 10, LARGE + 20), strict=True):
        shipper.write(name, *sample.lines[start:end])
    settings = {"delivery.concurrency": 1, "batch.max_events": 100}
    running = shipper.start("backfill", *names, "--summary", "json", settings=settings)
    running.wait_until(lambda: fake.requests, "a first request")
    (shipper.folder / "b.ndjson").unlink()
    fake.release()
    result = running.finish()
    result.assert_ended(4, "b.ndjson")
    assert result.counts() == (LARGE + 10, LARGE + 10, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:LARGE] + sample.ids[LARGE + 10 : LARGE + 20])


@pytest.mark.skipif(not warm_start.are_allowed(), reason="deletes the file in the process of the command")
@pytest.mark.parametrize(("options", "code"), [([], 4), (["--dry-run"], 2)])
def test_a_file_that_disappears_once_its_name_was_found_is_reported(
    options: list[str], code: int, shipper: Shipper, service: Service, sample: Sample, monkeypatch: pytest.MonkeyPatch
):
    """An application that writes under a temporary name renames the file at that moment."""
    files = [shipper.write(f"exports/{name}", sample.lines[0]) for name in ("a.ndjson", "b.ndjson.tmp")]
    found = Patterns.find

    def find(patterns: Patterns) -> Iterator[FoundFile]:
        yield from found(patterns)
        files[1].unlink(missing_ok=True)

    monkeypatch.setattr(Patterns, "find", find)
    result = shipper.run("backfill", "exports", "--since", "2020-01-01", *options, check=False)
    assert not files[1].exists()
    result.assert_ended(code, "b.ndjson.tmp", "No such file")
    service.assert_holds_exactly(sample.ids[: 0 if options else 1])


def test_again_is_refused_for_files(shipper: Shipper, service: Service, sample: Sample):
    """They would be skipped as read before, without a word about the option."""
    file = shipper.write("one.ndjson", sample.lines[0])
    result = shipper.run("backfill", file, "--again", "once", check=False)
    result.assert_ended(2, "--again is for kafka://")
    service.assert_holds_exactly([])


def test_startup_imports_nothing_that_the_command_does_not_need(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.write("one.ndjson", sample.lines[0])

    def loaded(*command: str | Path) -> set[str]:
        result = shipper.run(*command, env={"PYTHONPROFILEIMPORTTIME": "1"})
        names = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line]
        return {*names, *(name.partition(".")[0] for name in names)}

    for command in [("backfill", file), ("check",)]:
        assert {"shipper.delivery.connection", "typer"} <= (names := loaded(*command))
        assert not {"trio", "click", "rich.progress"} & names  # imported by libraries if installed
    service.assert_holds_exactly(sample.ids[:1])
    for command in [("backfill", "--help"), ("config", "show")]:
        assert not {"anyio", "sqlite3", "structlog", "rich"} & loaded(*command)


def own_csv(shipper: Shipper, sample: Sample, name: str = "own.csv", lines: slice = slice(10)) -> Path:
    """Write records under other column names."""
    path = shipper.folder / name
    events = [json.loads(line) for line in sample.lines[lines]]
    with path.open("w", newline="") as out:
        rows = csv.DictWriter(out, ["Customer" if each == "ConsumerID" else each for each in events[0]])
        rows.writeheader()
        for event in events:
            event["Customer"] = event.pop("ConsumerID")
            rows.writerow(event)
    return path


MENDED = {"records.mapping.ConsumerID": "Customer"}


def test_the_run_after_a_corrected_mapping_points_to_the_dead_letters(
    shipper: Shipper, service: Service, sample: Sample
):
    file = own_csv(shipper, sample)
    assert shipper.backfill(file).returncode == 3
    words = f"{file}: read before, with 10 dead letters; to resend: shipper dead-letters replay"
    for _ in range(2):
        result = shipper.backfill(file, settings=MENDED)
        assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0)), "the letters are from another run"
        assert result.summary["message"] == words
        assert words in result.stderr
    assert words in shipper.run("backfill", file, settings=MENDED).stderr
    assert shipper.run("dead-letters", "replay", settings=MENDED).returncode == 0
    service.assert_holds_exactly(sample.ids[:10])
    result = shipper.backfill(file, settings=MENDED)
    assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    assert result.summary["message"] == ""
    result = shipper.run("backfill", file, settings=MENDED)
    assert f"{file}: read before, with nothing new since" in result.stderr


def test_a_correction_that_keeps_the_length_of_a_file_is_referred_to_the_export(shipper: Shipper, sample: Sample):
    file = shipper.write("a.ndjson", *sample.lines[:50], changed(sample.lines[50], BrandID="x"), *sample.lines[51:100])
    assert shipper.backfill(file).returncode == 3
    file.write_bytes(file.read_bytes().replace(b'"x"', b"123"))
    result = shipper.backfill(file)
    assert "edit what shipper dead-letters export writes, and backfill that" in result.summary["message"]


@pytest.mark.parametrize("how", ["in place", "by a new file"])
def test_a_change_that_keeps_the_length_of_a_file_is_not_reported_as_nothing_new(
    shipper: Shipper, sample: Sample, how: str
):
    file = shipper.write("a.ndjson", *sample.lines[:100])
    assert shipper.backfill(file).returncode == 0
    data = file.read_bytes().replace(sample.lines[50], sample.lines[50].replace(b"Verified", b"verified"))
    if how == "by a new file":
        file.rename(shipper.folder / "old")
        (shipper.folder / "old").unlink()
    file.write_bytes(data)
    result = shipper.run("backfill", file)
    assert (
        f"{file}: read before, with nothing new since; changes that keep the length of a file are not noticed: to "
        "ship changed records, write them to another file"
    ) in result.stderr
    assert shipper.run("backfill", file).returncode == 0


@pytest.mark.parametrize("how", ["copied, as to another machine", "renamed", "renamed and touched"])
def test_a_settled_file_whose_folder_is_elsewhere_is_delivered_once_a_backfill_has_found_it(
    shipper: Shipper, sample: Sample, how: str
):
    before, after = shipper.folder / "before", shipper.folder / "after"
    shipper.write("before/a.ndjson", *sample.lines[:100])
    assert shipper.backfill("before/a.ndjson").returncode == 0
    if how.startswith("copied"):
        shutil.copytree(before, after)
        shutil.rmtree(before)
    else:
        before.rename(after)
    if how == "renamed and touched":
        os.utime(after / "a.ndjson", (1e9, 1e9))
    assert shipper.run("status", "--until", "now").returncode == 4, "nobody has looked for it"
    result = shipper.backfill("after/a.ndjson")
    assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    result = shipper.run("status", "--until", "now")
    assert (result.returncode, result.stdout[:4]) == (0, "yes:"), result.stdout
    assert "/before/" not in shipper.run("status").stdout


def test_a_single_dead_letter_of_an_earlier_run_is_mentioned_in_the_singular(shipper: Shipper, sample: Sample):
    file = own_csv(shipper, sample, lines=slice(1))
    assert shipper.backfill(file).returncode == 3
    words = f"{file}: read before, with 1 dead letter; to resend: shipper dead-letters replay"
    assert words in shipper.backfill(file, settings=MENDED).stderr


def test_dead_letters_of_earlier_runs_are_mentioned_for_files_that_have_grown_and_for_many_files(
    shipper: Shipper, sample: Sample
):
    own_csv(shipper, sample)
    own_csv(shipper, sample, "other.csv", slice(10, 20))
    assert shipper.backfill("own.csv", "other.csv").returncode == 3
    result = shipper.backfill("own.csv", "other.csv", settings=MENDED)
    assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    assert result.summary["message"] == (
        "2 files: read before, with 20 dead letters; to resend: shipper dead-letters replay"
    )
    grown = (shipper.folder / "own.csv").read_bytes()
    more = own_csv(shipper, sample, "more.csv", slice(20, 25)).read_bytes()
    shipper.write("own.csv", grown + more.partition(b"\n")[2])
    result = shipper.backfill("own.csv", settings=MENDED)
    assert (result.returncode, result.counts()) == (0, (5, 5, 0, 0, 0))
    assert result.summary["message"] == (
        f"{shipper.folder}/own.csv: read before, with 10 dead letters; to resend: shipper dead-letters replay"
    )
    result = shipper.backfill("more.csv")
    assert (result.returncode, result.counts()) == (3, (5, 0, 5, 0, 0))
    assert result.summary["message"] == "", "dead letters of this run are counted"
    shipper.write("good.ndjson", *sample.lines[30:40])
    result = shipper.backfill("good.ndjson")
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0)), "letters of other files are not counted"
