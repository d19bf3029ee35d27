"""Delivery by the installed command, over real sockets, to a service that refuses, limits, loses or delays."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Self

import pytest

from shipper.model.wire import BODY_HEAD, BODY_TAIL
from shipper.sandbox.options import Rejection
from tests.e2e.conftest import Sample
from tests.e2e.driver import DeadLetter, Shipper, changed, sandbox
from tests.e2e.fake_service import HANG, OK, STORE_AND_RESET, FakeService, Reply
from tests.e2e.files import Tail, log_lines

QUICK = {"delivery.retry_initial_seconds": 0.02, "delivery.retry_max_seconds": 0.05}


def poison(line: bytes) -> bytes:
    """Return the record with a country that only a strict sandbox refuses."""
    return changed(line, ConsumerCountry="QQ")


# Records that the service refuses ------------------------------------------------------------

RECORDS = 800


def as_lines(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    return b"".join(lines), [line[:-1] for line in lines]


def as_batch(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    raws = [line[:-1] for line in lines]
    return BODY_HEAD + b",\n ".join(raws) + BODY_TAIL, raws


def as_rows(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    """Return a CSV export with other spellings of ids and countries."""
    out = io.StringIO()
    for number, line in enumerate(lines):
        event = json.loads(line)
        event["EventId"] = event["EventId"].upper()
        event["ConsumerCountry"] = event["ConsumerCountry"].lower()
        writer = csv.DictWriter(out, list(event), lineterminator="\n")
        if not number:
            writer.writeheader()
        writer.writerow(event)
    data = out.getvalue().encode()
    return data, data.splitlines()[1:]


@dataclass(frozen=True)
class Input:
    """
    A file or piped input with some refused records.

    Attributes:
        data: Its decompressed content.
        raws: The bytes of the refused records by id.
        good: The ids of the other records.
    """

    data: bytes
    raws: dict[str, bytes]
    good: list[str]

    @classmethod
    def of(
        cls, sample: Sample, start: int, rng: Random, lay_out: Callable[[list[bytes]], tuple[bytes, list[bytes]]]
    ) -> Self:
        guilty = {0, 1, RECORDS - 1, *rng.sample(range(2, RECORDS - 1), 3)}
        lines, ids = (all_of[start : start + RECORDS] for all_of in (sample.lines, sample.ids))
        data, raws = lay_out([poison(line) if index in guilty else line for index, line in enumerate(lines)])
        good = [ids[index] for index in range(RECORDS) if index not in guilty]
        return cls(data, {ids[index]: raws[index] for index in guilty}, good)


def assert_letters(letters: Iterable[DeadLetter], inputs: Mapping[str, Input], rejection: Rejection) -> None:
    """Assert that each refused record of these inputs, keyed by file name, is in one letter, and nothing else."""
    found = {letter.event_id: letter for letter in letters}
    assert found.keys() == {event_id for each in inputs.values() for event_id in each.raws}
    for name, each in inputs.items():
        for event_id, raw in each.raws.items():
            letter, start = found[event_id], each.data.index(raw)
            assert (letter.raw, letter.start_offset, letter.end_offset) == (raw, start, start + len(raw)), name
            assert (letter.rule, letter.delivery) == ("rejected", "rejected")
            if rejection == "whole":
                assert (letter.status, letter.message) == (400, "The batch was refused: it contains an invalid event.")
                assert 2 <= letter.attempts <= 40
            else:
                assert letter.status == 202
                assert letter.message == "ConsumerCountry: must be an ISO 3166-1 country code"


@pytest.mark.parametrize("rejection", ["partial", "whole"])
def test_exactly_the_refused_records_become_dead_letters_in_every_input_format(
    shipper: Shipper, sample: Sample, rng: Random, rejection: Rejection
):
    """Letters refused again in a replay are kept with the new message; accepted ones are deleted."""
    forms = {"lines": as_lines, "rows.csv": as_rows, "batch": as_batch, "lines.gz": as_lines, "pipe": as_lines}
    inputs = {
        name: Input.of(sample, number * RECORDS, rng, lay_out) for number, (name, lay_out) in enumerate(forms.items())
    }
    files = [shipper.write(name, each.data) for name, each in inputs.items() if name != "pipe"]
    shipper.write("lines.gz", gzip.compress(inputs["lines.gz"].data))
    settings = {**QUICK, "batch.max_events": 300, "delivery.concurrency": 4}
    with sandbox(profile="strict", rejection=rejection) as service:
        shipper.target = service.target
        result = shipper.backfill(*files, settings=settings)
        assert (result.returncode, result.counts()) == (3, (4 * RECORDS, 4 * RECORDS - 24, 24, 0, 0))
        result = shipper.pipe(inputs["pipe"].data, settings=settings)
        assert (result.returncode, result.counts()) == (3, (RECORDS, RECORDS - 6, 6, 0, 0))
        service.assert_holds_exactly(event_id for each in inputs.values() for event_id in each.good)
        assert set(service.times_received().values()) == {1}, "a good record was sent twice"
    before = shipper.read_state().dead_letters
    assert_letters(before, inputs, rejection)
    if rejection == "partial":
        assert {letter.attempts for letter in before} == {1}
        return

    with sandbox(profile="strict", rejection="partial") as service:
        shipper.target = service.target
        again = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings)
    assert (again.returncode, again.counts()) == (3, (30, 0, 30, 0, 0))
    after = shipper.read_state().dead_letters
    assert_letters(after, inputs, "partial")
    assert [letter.attempts for letter in after] == [letter.attempts + 1 for letter in before]

    with sandbox(profile="document") as service:
        shipper.target = service.target
        replayed = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings)
        assert (replayed.returncode, replayed.counts()) == (0, (30, 30, 0, 0, 0))
        service.assert_holds_exactly(letter.event_id for letter in before)
    assert shipper.read_state().dead_letters == ()


def test_a_refused_record_is_kept_without_the_bytes_around_it(shipper: Shipper, sample: Sample):
    bad = [poison(line).rstrip() for line in sample.lines[:7]]
    pieces = [
        b"\xef\xbb\xbf" + bad[0] + b"\r\n",
        b"\r\n \n" + sample.lines[10] + b"broken\n",
        b"   " + bad[1] + b"  \n",
        b"\0" * 5000 + bad[2] + b"\n",
        bad[3].replace(b'"IP": "', b'"IP": " ') + b"\n",
        changed(bad[4], EventId="{" + sample.ids[4].upper() + "}"),
        changed(bad[5], Extra=[1]) + sample.lines[11],
        bad[6],
    ]
    data = b"".join(pieces)
    with sandbox(profile="strict", rejection="whole") as service:
        shipper.target = service.target
        result = shipper.backfill(shipper.write("events.ndjson", *pieces), settings={**QUICK, "input.format": "ndjson"})
        assert result.counts() == (10, 2, 8, 0, 0)
        service.assert_holds_exactly(sample.ids[10:12])
    letters = sorted(shipper.read_state().dead_letters, key=lambda letter: letter.start_offset)
    assert [letter.rule for letter in letters] == ["rejected", "json", *["rejected"] * 6]
    assert [letter.event_id for letter in letters if letter.event_id] == sample.ids[:7]
    assert [json.loads(letter.raw)["ConsumerCountry"] for letter in letters if letter.event_id] == ["QQ"] * 7
    for letter in letters:
        assert letter.raw == data[letter.start_offset : letter.end_offset]


def test_refused_records_with_derived_ids_are_located(shipper: Shipper, sample: Sample):
    lines = [changed(line, EventId=...) for line in sample.lines[:1000]]
    guilty = [0, 400, 401, 999]
    for index in guilty:
        lines[index] = poison(lines[index])
    with sandbox(profile="strict", rejection="whole") as service:
        shipper.target = service.target
        result = shipper.backfill(
            shipper.write("events.ndjson", *lines), settings={**QUICK, "records.event_id": "derive"}
        )
        assert (result.counts(), service.stored) == ((1000, 996, 4, 0, 0), 996)
    assert sorted(lines.index(letter.raw + b"\n") for letter in shipper.read_state().dead_letters) == guilty


def test_a_refusal_of_a_record_that_may_have_been_stored_is_ambiguous(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.plan(STORE_AND_RESET, Reply(status=409, body=b'{"message":"EventId is known"}'))
    assert shipper.backfill(shipper.write("events.ndjson", *sample.lines[:1]), settings=QUICK).counts() == (
        1,
        0,
        1,
        0,
        0,
    )
    (letter,) = shipper.read_state().dead_letters
    assert (letter.delivery, letter.status, letter.attempts) == ("ambiguous", 409, 2)
    assert letter.message == "EventId is known"
    assert letter.raw == sample.lines[0][:-1]


def test_each_refused_record_is_in_one_dead_letter_after_a_kill_during_the_search_for_them(
    shipper: Shipper, sample: Sample, rng: Random
):
    guilty = set(rng.sample(range(2000), 20))
    lines = [poison(line) if index in guilty else line for index, line in enumerate(sample.lines[:2000])]
    file = shipper.write("events.ndjson", *lines)
    settings = {**QUICK, "batch.max_events": 100, "delivery.concurrency": 4, "state.commit_interval_seconds": 0.01}
    with sandbox(profile="strict", rejection="whole", latency_seconds=0.005) as service:
        shipper.target = service.target
        for _ in range(2):
            running = shipper.start("backfill", file, settings=settings)
            enough = service.counts()["requests"] + rng.randint(40, 90)  # of more than 200
            running.wait_until(lambda enough=enough: service.counts()["requests"] >= enough, "the search is under way")
            running.kill()
        assert shipper.backfill(file, settings=settings).returncode == 3
        service.assert_holds_exactly(sample.ids[index] for index in range(2000) if index not in guilty)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (2000, 1980, 20)
    assert sorted(letter.event_id for letter in state.dead_letters) == sorted(sample.ids[index] for index in guilty)


# Too many mistakes ----------------------------------------------------

REFUSAL = b'{"statusCode":%d,"message":"Field SignupSource is missing."}'


def test_dead_letters_are_limited_if_the_service_refuses_everything_and_the_rest_is_delivered_later(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    """By the next run, or by the same run once the service accepts records again."""
    file = shipper.write("events.ndjson", *sample.lines[:2000])
    settings = {**QUICK, "delivery.concurrency": 4, "delivery.poison_limit": 20, "batch.max_events": 100}
    fake.default = Reply(status=400, body=REFUSAL % 400)
    result = shipper.backfill(file, settings={**settings, "delivery.give_up_after_seconds": 0.5})
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
    assert 0 < len(log_lines(result, "record_rejected")) <= 20
    assert result.summary["dead_lettered"] <= 20
    for help_for_people in ('"Field *** is missing."', "delivery.poison_limit is 20", "run the same command again"):
        assert help_for_people in result.summary["message"]
    (paused,) = log_lines(result, "delivery_paused")
    assert paused["reason"] == "systematic_rejection"
    before = len(shipper.read_state().dead_letters)

    fake.default = Reply(status=413, body=REFUSAL % 413)
    running = shipper.start("backfill", file, "--summary", "json", settings=settings)
    running.wait_for("delivery_paused")
    asked = fake.requests
    running.wait_until(lambda: fake.requests > asked + 3, "it keeps asking")
    fake.default = OK
    result = running.finish()
    result.assert_ended(3, "delivery_resumed")
    letters = {letter.event_id for letter in shipper.read_state().dead_letters}
    assert 0 < len(letters) <= before + 20
    assert Counter(fake.event_ids()) == Counter(set(sample.ids[:2000]) - letters)
    replayed = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings)
    assert replayed.counts() == (len(letters), len(letters), 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:2000])


# A bad day ------------------------------------------------------------


def test_no_event_is_lost_when_every_kind_of_failure_occurs(shipper: Shipper, sample: Sample, rng: Random):
    faults = [
        {"effect": "status", "status": 503},
        {"effect": "status", "status": 429},
        {"effect": "reset"},
        {"effect": "reset", "when": "after"},
        {"effect": "truncate"},
    ]
    for fault in faults:
        fault["probability"] = rng.uniform(0.05, 0.1)
    file = shipper.write("events.ndjson", *sample.lines[:6000])
    with sandbox() as service:
        service.set_faults(*faults, seed=rng.randrange(10**6))
        shipper.target = service.target
        result = shipper.backfill(file, settings={**QUICK, "batch.max_events": 20, "delivery.concurrency": 8})
        applied = service.faults_applied()
        assert min(applied) > 0, "a fault did not occur"
        times = service.times_received()
    assert (result.returncode, result.counts()) == (0, (6000, 6000, 0, 0, 0))
    assert times.keys() == set(sample.ids[:6000])
    repeats = sum(times.values()) - len(times)
    assert 0 < repeats <= 20 * sum(applied[3:]), "only stored events whose answer was lost are sent again"
    assert result.summary["requests"] == result.summary["batches"] + sum(applied)


# A service that asks for a wait, and a stop ------------------------------------------------------------


def test_only_requests_aborted_by_a_stop_are_sent_again(tail: Tail, shipper: Shipper, fake: FakeService):
    """Requests are aborted by the drain timeout and by a second signal. A third stop waits for requests in flight."""
    ids = tail.ids(400)
    tail.append(0, 400)
    settings = {**QUICK, "batch.max_events": 10, "delivery.concurrency": 8}
    asked, saved = 0, 0
    for drain_s in (0.3, 3600):
        fake.plan(*[OK] * 8, HANG, OK, OK, *[HANG] * 7)
        settings |= {"delivery.drain_timeout_seconds": drain_s, "state.commit_interval_seconds": 0.02}
        running = tail.start(settings=settings)
        running.wait_until(lambda asked=asked: fake.requests == asked + 18, "all requests hang")
        running.process.send_signal(signal.SIGTERM)
        if drain_s == 3600:
            running.wait_for("drain_started")
            running.process.send_signal(signal.SIGTERM)
        result = running.finish()
        assert result.returncode == 4
        assert ("drain_aborted" in result.stderr) == (drain_s == 3600)
        sent = fake.event_ids(fake.bodies[asked:])
        assert len(sent) == len(set(sent)) == 180
        assert set(sent).isdisjoint(ids[:saved]), "settled events were sent again"
        accepted = shipper.read_state().accepted
        assert saved < accepted <= saved + 100
        asked, saved = fake.requests, accepted

    fake.plan(*[HANG] * 8)
    running = tail.start(settings=settings)
    running.wait_until(lambda: fake.requests == asked + 8, "all requests are in flight")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    tail.append(400, 410)
    assert not running.has_ended
    assert shipper.read_state().accepted == saved
    fake.release()
    assert running.finish().returncode == 0
    assert shipper.read_state().accepted == len(ids)
    assert Counter(fake.event_ids(fake.bodies[asked:])) == Counter(ids[saved:])
    assert set(fake.event_ids()) == set(ids)


# Rate ------------------------------------------------------------


def test_retries_and_concurrent_senders_stay_within_the_rate_and_each_request_has_its_own_trace_id(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.plan(*[OK, OK, Reply(status=503)] * 5, *(Reply(status=status) for status in (401, 400, 413)))
    rate = 2500
    settings = {**QUICK, "batch.max_events": 50, "delivery.concurrency": 8}
    settings["delivery.rate_limit_events_per_second"] = rate
    result = shipper.backfill(
        shipper.write("events.ndjson", *sample.lines[:2500]), "--log-level", "debug", settings=settings
    )
    assert (result.returncode, result.counts()) == (0, (2500, 2500, 0, 0, 0))
    assert fake.requests >= 58, "retries count, too"
    seconds = fake.arrived_at[-1] - fake.arrived_at[0]
    assert len(fake.event_ids(fake.bodies[:-1])) / seconds <= rate * 1.1
    traces = [headers["traceparent"] for headers in fake.headers]
    assert len(set(traces)) == len(traces)
    for trace in traces:
        assert re.fullmatch("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01", trace)
    logged = log_lines(result, "batch_sent")
    assert sorted(line["traceparent"] for line in logged) == sorted(traces)
    assert Counter(line["status"] for line in logged)[202] == len(fake.stored)
