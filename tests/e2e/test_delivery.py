"""Delivery by the installed command, over real sockets: what a service refuses, limits, loses or asks to wait for."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from shipper.sandbox.options import CallLimit, Profile, Rejection, RetryAfter
from shipper.wire import BODY_HEAD, BODY_TAIL
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Shipper, changed, sandbox
from tests.e2e.fake_service import HANG, OK, RESET, STORE_AND_RESET, FakeService, Reply
from tests.e2e.files import told

QUICK = {"delivery.retry_initial_seconds": 0.02, "delivery.retry_max_seconds": 0.05}


def write(shipper: Shipper, lines: list[bytes], name: str = "events.ndjson") -> Path:
    path = shipper.folder / name
    path.write_bytes(b"".join(lines))
    return path


def poison(line: bytes) -> bytes:
    """Make a record of a country that only a strict sandbox knows to be none."""
    return changed(line, ConsumerCountry="QQ")


# Records that the service refuses ------------------------------------------------------------

RECORDS = 5_000


def as_lines(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    return b"".join(lines), [line[:-1] for line in lines]


def as_batch(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    raws = [line[:-1] for line in lines]
    return BODY_HEAD + b",\n ".join(raws) + BODY_TAIL, raws


def as_rows(lines: list[bytes]) -> tuple[bytes, list[bytes]]:
    """A CSV export whose country has another name, and its ids another spelling."""
    out = io.StringIO()
    for number, line in enumerate(lines):
        event = json.loads(line)
        event["EventId"] = event["EventId"].upper()
        event["land"] = event.pop("ConsumerCountry").lower()
        writer = csv.DictWriter(out, list(event), lineterminator="\n")
        if not number:
            writer.writeheader()
        writer.writerow(event)
    data = out.getvalue().encode()
    return data, data.splitlines()[1:]


@dataclass(frozen=True)
class Form:
    """
    How the input is written.

    Attributes:
        lay_out: Gives the input's content, and each record as it stands in there.
        packed: Makes the file of it.
    """

    lay_out: Callable[[list[bytes]], tuple[bytes, list[bytes]]]
    packed: Callable[[bytes], bytes] = bytes
    command: str = "backfill"
    settings: dict[str, object] = field(default_factory=dict)


FORMS = {
    "ndjson": Form(as_lines),
    "csv": Form(as_rows, settings={"records.mapping.ConsumerCountry": "land"}),
    "batch": Form(as_batch),
    "gzip": Form(as_lines, packed=gzip.compress),
    "pipe": Form(as_lines, command="pipe"),
}


@pytest.mark.parametrize("rejection", list(Rejection), ids=lambda rejection: rejection.value)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_exactly_the_records_that_the_service_refuses_are_dead_letters_and_are_replayed_once_it_takes_them(
    shipper: Shipper, sample: Sample, rng: Random, form: Form, rejection: Rejection
):
    guilty = {0, 1, RECORDS - 1, *rng.sample(range(RECORDS), 7)}
    lines = [poison(line) if index in guilty else line for index, line in enumerate(sample.lines[:RECORDS])]
    data, raws = form.lay_out(lines)
    file = write(shipper, [form.packed(data)], "events")
    settings = {**QUICK, **form.settings, "batch.max_events": 500, "delivery.concurrency": 4}
    with sandbox(profile=Profile.STRICT, rejection=rejection) as service:
        shipper.target = service.target
        if form.command == "pipe":
            result = shipper.pipe(data, settings=settings)
        else:
            result = shipper.backfill(file, settings=settings)
        assert (result.returncode, result.counts()) == (3, (RECORDS, RECORDS - len(guilty), len(guilty), 0, 0))
        service.assert_holds_exactly(sample.ids[index] for index in range(RECORDS) if index not in guilty)
        assert set(service.times_received().values()) == {1}, "nothing good was sent twice"
    letters = {letter.event_id: letter for letter in shipper.read_state().dead_letters}
    assert letters.keys() == {sample.ids[index] for index in guilty}
    for index in guilty:
        letter = letters[sample.ids[index]]
        start = data.index(raws[index])
        assert (letter.raw, letter.start_offset, letter.end_offset) == (raws[index], start, start + len(raws[index]))
        assert (letter.rule, letter.delivery) == ("rejected", "rejected")
        if rejection is Rejection.WHOLE:
            assert (letter.status, letter.message) == (400, "The batch was refused: an event of it is not valid.")
            assert 2 <= letter.attempts <= 40
        else:
            assert (letter.status, letter.attempts) == (202, 1)
            assert letter.message == "ConsumerCountry: must be a country of ISO 3166-1"

    with sandbox(profile=Profile.DOCUMENT) as service:
        shipper.target = service.target
        replayed = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings)
        assert (replayed.returncode, replayed.counts()) == (0, (len(guilty), len(guilty), 0, 0, 0))
        service.assert_holds_exactly(letters)
    assert shipper.read_state().dead_letters == ()


def test_a_letter_that_is_refused_again_stays_with_what_is_said_this_time(shipper: Shipper, sample: Sample):
    file = write(shipper, [*map(poison, sample.lines[:3]), *sample.lines[3:100]])
    with sandbox(profile=Profile.STRICT, rejection=Rejection.WHOLE) as service:
        shipper.target = service.target
        assert shipper.backfill(file, settings=QUICK).counts() == (100, 97, 3, 0, 0)
    before = shipper.read_state().dead_letters
    assert {letter.status for letter in before} == {400}
    with sandbox(profile=Profile.STRICT, rejection=Rejection.PARTIAL) as service:
        shipper.target = service.target
        result = shipper.run("dead-letters", "replay", "--summary", "json", settings=QUICK)
    assert (result.returncode, result.counts()) == (3, (3, 0, 3, 0, 0))
    after = shipper.read_state().dead_letters
    assert {letter.status for letter in after} == {202}
    assert [letter.attempts for letter in after] == [letter.attempts + 1 for letter in before]


def test_what_stands_around_a_refused_record_is_no_part_of_it(shipper: Shipper, sample: Sample):
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
    with sandbox(profile=Profile.STRICT, rejection=Rejection.WHOLE) as service:
        shipper.target = service.target
        result = shipper.backfill(write(shipper, pieces), settings={**QUICK, "input.format": "ndjson"})
        assert result.counts() == (10, 2, 8, 0, 0)
        service.assert_holds_exactly(sample.ids[10:12])
    letters = sorted(shipper.read_state().dead_letters, key=lambda letter: letter.start_offset)
    assert [letter.rule for letter in letters] == ["rejected", "json", *["rejected"] * 6]
    assert [letter.event_id for letter in letters if letter.event_id] == sample.ids[:7]
    assert [json.loads(letter.raw)["ConsumerCountry"] for letter in letters if letter.event_id] == ["QQ"] * 7
    for letter in letters:
        assert letter.raw == data[letter.start_offset : letter.end_offset]


def test_refused_records_whose_ids_are_derived_are_found_again(shipper: Shipper, sample: Sample):
    lines = [changed(line, EventId=...) for line in sample.lines[:1000]]
    guilty = [0, 400, 401, 999]
    for index in guilty:
        lines[index] = poison(lines[index])
    with sandbox(profile=Profile.STRICT, rejection=Rejection.WHOLE) as service:
        shipper.target = service.target
        result = shipper.backfill(write(shipper, lines), settings={**QUICK, "records.event_id": "derive"})
        assert (result.counts(), service.stored) == ((1000, 996, 4, 0, 0), 996)
    assert sorted(lines.index(letter.raw + b"\n") for letter in shipper.read_state().dead_letters) == guilty


def test_a_refusal_of_what_may_have_been_taken_before_is_ambiguous(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.plan(STORE_AND_RESET, Reply(status=409, body=b'{"message":"EventId is known"}'))
    assert shipper.backfill(write(shipper, sample.lines[:1]), settings=QUICK).counts() == (1, 0, 1, 0, 0)
    (letter,) = shipper.read_state().dead_letters
    assert (letter.delivery, letter.status, letter.attempts) == ("ambiguous", 409, 2)
    assert letter.message == "EventId is known"
    assert shipper.run("dead-letters", "export", "--delivery", "rejected").stdout == ""
    assert shipper.run("dead-letters", "export", "--delivery", "ambiguous").stdout.encode() == sample.lines[0]


def test_a_search_for_refused_records_that_is_killed_ends_with_each_of_them_in_one_letter(
    shipper: Shipper, sample: Sample, rng: Random
):
    guilty = set(rng.sample(range(3000), 30))
    lines = [poison(line) if index in guilty else line for index, line in enumerate(sample.lines[:3000])]
    file = write(shipper, lines)
    settings = {**QUICK, "batch.max_events": 100, "delivery.concurrency": 4, "state.commit_interval_seconds": 0.01}
    with sandbox(profile=Profile.STRICT, rejection=Rejection.WHOLE, latency_seconds=0.005) as service:
        shipper.target = service.target
        for _ in range(3):
            running = shipper.start("backfill", file, settings=settings)
            enough = service.counts()["requests"] + rng.randint(40, 90)  # of more than 300
            running.wait_until(lambda enough=enough: service.counts()["requests"] >= enough, "it is in the middle")
            running.kill()
        assert shipper.backfill(file, settings=settings).returncode == 3
        service.assert_holds_exactly(sample.ids[index] for index in range(3000) if index not in guilty)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (3000, 2970, 30)
    assert sorted(letter.event_id for letter in state.dead_letters) == sorted(sample.ids[index] for index in guilty)


# Sizes ------------------------------------------------------------


def test_a_service_that_takes_less_gets_everything_in_smaller_batches(shipper: Shipper, sample: Sample):
    limit = 50_000
    file = write(shipper, sample.lines[:RECORDS])
    with sandbox(max_body_bytes=limit) as service:
        shipper.target = service.target
        result = shipper.backfill(file, settings={**QUICK, "delivery.concurrency": 4})
        assert (result.returncode, result.counts()) == (0, (RECORDS, RECORDS, 0, 0, 0))
        assert service.times_received() == dict.fromkeys(sample.ids[:RECORDS], 1)
        requests = service.requests()
    learned = told(result, "batch_size_lowered")
    assert min(line["max_bytes"] for line in learned) >= limit / 2
    refused = [request for request in requests if request["status"] == 413]
    # Some 350 kB each: a batch is halved three times, and only those that were on their way by then.
    assert 3 <= len(refused) <= 4 * 7
    assert {request["status"] for request in requests[len(requests) // 2 :]} == {202}


def test_a_record_that_alone_is_too_large_is_a_dead_letter_and_its_neighbours_are_delivered(
    shipper: Shipper, sample: Sample
):
    lines = sample.lines[:1000]
    lines[400] = changed(lines[400], Username="x" * 60_000)
    with sandbox(max_body_bytes=50_000) as service:
        shipper.target = service.target
        result = shipper.backfill(write(shipper, lines), settings=QUICK)
        assert (result.returncode, result.counts()) == (3, (1000, 999, 1, 0, 0))
        service.assert_holds_exactly(set(sample.ids[:1000]) - {sample.ids[400]})
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.status, letter.delivery) == ("too_large", 413, "rejected")
    assert letter.message == "Request body is too large. The limit is 50000 bytes."
    assert letter.raw == lines[400][:-1]


# The brake ------------------------------------------------------------

REFUSAL = b'{"statusCode":%d,"message":"Field SignupSource is missing."}'


@pytest.mark.parametrize("status", [400, 413])
def test_a_service_that_refuses_everything_costs_no_more_letters_than_the_limit_and_the_next_run_delivers_the_rest(
    shipper: Shipper, fake: FakeService, sample: Sample, status: int
):
    shipper.target = fake.target
    fake.default = Reply(status=status, body=REFUSAL % status)
    file = write(shipper, sample.lines[:2000])
    settings = {**QUICK, "delivery.concurrency": 4, "delivery.poison_limit": 20, "batch.max_events": 100}
    result = shipper.backfill(file, settings={**settings, "delivery.give_up_after_seconds": 0.5})
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
    assert 0 < len(told(result, "record_rejected")) <= 20
    assert result.summary["dead_lettered"] <= 20
    for help_for_people in ("delivery.poison_limit", "20", "shipper dead-letters list", "run the same command again"):
        assert help_for_people in result.summary["message"]
    (paused,) = told(result, "delivery_paused")
    assert paused["reason"] == "systematic_rejection"

    fake.default = OK
    assert shipper.backfill(file, settings=settings).returncode == 0
    letters = {letter.event_id for letter in shipper.read_state().dead_letters}
    assert len(letters) <= 20
    assert Counter(fake.event_ids()) == Counter(set(sample.ids[:2000]) - letters)
    replayed = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings)
    assert replayed.counts() == (len(letters), len(letters), 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:2000])


def test_a_run_goes_on_by_itself_when_the_service_takes_records_again(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.default = Reply(status=422, body=REFUSAL % 422)
    file = write(shipper, sample.lines[:1000])
    settings = {**QUICK, "delivery.poison_limit": 5, "batch.max_events": 100, "input.include": f'["{file}"]'}
    running = shipper.start("run", settings=settings)
    running.wait_for("systematic_rejection")
    asked = fake.requests
    running.wait_until(lambda: fake.requests > asked + 3, "it goes on asking")
    fake.default = OK
    running.wait_until(lambda: len(fake.event_ids()) >= 995, "the rest is delivered")
    result = running.stop()
    assert result.returncode == 0
    letters = {letter.event_id for letter in shipper.read_state().dead_letters}
    assert len(letters) <= 5
    assert Counter(fake.event_ids()) == Counter(set(sample.ids[:1000]) - letters)
    assert "delivery_resumed" in result.stderr


# A bad day ------------------------------------------------------------


def test_events_survive_a_day_on_which_everything_fails_now_and_then(shipper: Shipper, sample: Sample, rng: Random):
    faults = [
        {"effect": "status", "status": 503},
        {"effect": "status", "status": 429},
        {"effect": "reset"},
        {"effect": "reset", "when": "after"},
        {"effect": "truncate"},
    ]
    for fault in faults:
        fault["probability"] = rng.uniform(0.01, 0.05)
    file = write(shipper, sample.lines[:20_000])
    with sandbox() as service:
        service.set_faults(*faults, seed=rng.randrange(10**6))
        shipper.target = service.target
        result = shipper.backfill(file, settings={**QUICK, "batch.max_events": 20, "delivery.concurrency": 8})
        applied = service.faults_applied()
        assert min(applied) > 0, "a fault did not happen"
        times = service.times_received()
    assert (result.returncode, result.counts()) == (0, (20_000, 20_000, 0, 0, 0))
    assert times.keys() == set(sample.ids[:20_000])
    repeats = sum(times.values()) - len(times)
    assert 0 < repeats <= 20 * sum(applied[3:]), "only what was stored while its answer was lost came again"
    assert result.summary["requests"] == result.summary["batches"] + sum(applied)


# A service that asks for a wait, and a stop ------------------------------------------------------------


@dataclass
class Sidecar:
    """
    `shipper run` on one file, against the service that misbehaves.

    Attributes:
        file: It holds the first lines of the sample.
    """

    shipper: Shipper
    fake: FakeService
    sample: Sample
    file: Path
    settings: dict[str, object]

    def write(self, count: int) -> None:
        """Let the file hold so many lines."""
        held = len(self.file.read_bytes().splitlines()) if self.file.exists() else 0
        with self.file.open("ab") as out:
            out.writelines(self.sample.lines[held:count])

    def start(self, **changes: object) -> Running:
        changed_settings = {key.replace("__", "."): value for key, value in changes.items()}
        return self.shipper.start("run", settings={**self.settings, **changed_settings})

    def holds(self, count: int) -> bool:
        return set(self.sample.ids[:count]) <= set(self.fake.event_ids())


@pytest.fixture
def sidecar(shipper: Shipper, fake: FakeService, sample: Sample) -> Sidecar:
    shipper.target = fake.target
    file = shipper.folder / "events.ndjson"
    settings = {
        **QUICK,
        "input.include": f'["{file}"]',
        "batch.max_events": 10,
        "batch.linger_seconds": 0.02,
        "delivery.concurrency": 8,
    }
    return Sidecar(shipper, fake, sample, file, settings)


@pytest.mark.parametrize(
    "throttle",
    [
        Reply(status=429, headers={"Retry-After": "1"}),
        Reply(status=403, body=b'{"message":"Out of call volume quota. Quota will be replenished in 00:00:01."}'),
    ],
    ids=["429", "quota"],
)
def test_nobody_sends_during_the_wait_that_one_answer_asked_for(sidecar: Sidecar, throttle: Reply):
    """Seven requests hang, so that when the eighth is throttled all that may be on their way have arrived."""
    fake = sidecar.fake
    fake.plan(*[HANG] * 7, throttle)
    sidecar.write(1000)
    running = sidecar.start()
    running.wait_for("delivery_paused")
    fake.release()
    running.wait_until(lambda: fake.requests > 8 and sidecar.holds(1000), "everything is delivered")
    assert running.stop().returncode == 0
    assert fake.arrived_at[8] - fake.arrived_at[7] >= 1
    assert Counter(fake.event_ids()) == Counter(sidecar.sample.ids[:1000])


def test_a_rate_limit_is_kept_although_the_clock_is_an_hour_off(shipper: Shipper, sample: Sample):
    """The date in `Retry-After` is measured by the answer's own."""
    limit = CallLimit(20, 1)
    file = write(shipper, sample.lines[:600])
    with sandbox(rate_limit=limit, retry_after=RetryAfter.DATE, clock_offset_seconds=3600) as service:
        shipper.target = service.target
        result = shipper.backfill(file, settings={**QUICK, "batch.max_events": 20, "delivery.concurrency": 4})
        assert (result.returncode, result.counts()) == (0, (600, 600, 0, 0, 0))
        throttled = service.requests(status=429)
        seconds = throttled[-1]["at"] - throttled[0]["at"]
    # In each of its windows at most those that were on their way are refused, and those that probe.
    assert len(throttled) <= 8 * (seconds + 1)
    assert told(result, "delivery_paused")[0]["reason"] == "throttled"
    assert [line["seconds"] > 3590 for line in told(result, "clock_skew")] == [True]


def test_sigterm_during_a_backoff_delivers_what_was_read_if_the_service_is_back(sidecar: Sidecar):
    sidecar.fake.default = Reply(status=503)
    sidecar.write(50)
    an_hour = {"delivery__retry_initial_seconds": 3600, "delivery__retry_max_seconds": 3600}
    running = sidecar.start(delivery__concurrency=1, **an_hour)
    running.wait_for("retry_scheduled")
    sidecar.fake.default = OK
    assert running.stop(limit_s=20).returncode == 0
    assert sidecar.shipper.read_state().accepted == 50
    assert Counter(sidecar.fake.event_ids()) == Counter(sidecar.sample.ids[:50])


def test_sigterm_during_a_wait_that_was_asked_for_sends_nothing_and_ends_in_time(sidecar: Sidecar):
    fake = sidecar.fake
    fake.plan(OK, OK)
    fake.default = Reply(status=429, headers={"Retry-After": "600"})
    sidecar.write(200)
    running = sidecar.start(delivery__drain_timeout_seconds=0.5, delivery__concurrency=1)
    running.wait_for("delivery_paused")
    asked = fake.requests
    result = running.stop(limit_s=20)
    assert result.returncode == 4
    assert fake.requests == asked == 3
    assert sidecar.shipper.read_state().accepted == 20
    fake.default = OK
    running = sidecar.start()
    running.wait_until(lambda: sidecar.holds(200), "the rest is delivered")
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(sidecar.sample.ids[:200])


def test_sigterm_waits_for_answers_that_are_on_their_way(sidecar: Sidecar):
    fake = sidecar.fake
    fake.plan(*[HANG] * 8)
    sidecar.write(80)
    running = sidecar.start()
    running.wait_until(lambda: fake.requests == 8, "all are on their way")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    assert not running.has_ended
    assert sidecar.shipper.read_state().accepted == 0
    fake.release()
    assert running.finish().returncode == 0
    assert sidecar.shipper.read_state().accepted == 80
    assert Counter(fake.event_ids()) == Counter(sidecar.sample.ids[:80])


@pytest.mark.parametrize("signals", [1, 2], ids=["the time is over", "a second signal"])
def test_requests_that_are_cut_off_by_a_stop_are_sent_again_and_no_others(sidecar: Sidecar, signals: int):
    """They hang at the service, which takes them after all: that is where repeats come from."""
    fake = sidecar.fake
    fake.plan(*[OK] * 8, HANG, OK, OK, *[HANG] * 7)
    sidecar.write(250)
    running = sidecar.start(
        delivery__drain_timeout_seconds=0.3 if signals == 1 else 3600, state__commit_interval_seconds=0.02
    )
    running.wait_until(lambda: fake.requests == 18, "all hang")
    running.process.send_signal(signal.SIGTERM)
    if signals == 2:
        running.wait_for("drain_started")
        running.process.send_signal(signal.SIGTERM)
    result = running.finish()
    assert result.returncode == 4
    state = sidecar.shipper.read_state()
    assert 0 < state.accepted <= 100
    fake.release()
    running = sidecar.start()
    running.wait_until(lambda: sidecar.holds(250), "everything is delivered")
    assert running.stop().returncode == 0
    times = Counter(fake.event_ids())
    assert times.keys() == set(sidecar.sample.ids[:250])
    assert {times[sent] for sent in sidecar.sample.ids[: state.accepted]} == {1}, "what was settled came again"
    assert max(times.values()) == 2
    assert sum(times.values()) <= 250 + 8 * 10 + 100 - state.accepted


# Compression ------------------------------------------------------------


@pytest.mark.parametrize("accept_gzip", [True, False])
def test_bodies_are_compressed_for_a_service_that_understands_it(shipper: Shipper, sample: Sample, accept_gzip: bool):
    lines = [*sample.lines[:4000], poison(sample.lines[4000]), *sample.lines[4001:RECORDS]]
    settings = {**QUICK, "delivery.compression": "gzip", "delivery.concurrency": 4, "batch.max_events": 100}
    with sandbox(profile=Profile.STRICT, rejection=Rejection.WHOLE, accept_gzip=accept_gzip) as service:
        shipper.target = service.target
        result = shipper.backfill(write(shipper, lines), settings=settings)
        assert (result.returncode, result.counts()) == (3, (RECORDS, RECORDS - 1, 1, 0, 0))
        service.assert_holds_exactly(set(sample.ids[:RECORDS]) - {sample.ids[4000]})
        refused = len(service.requests(status=415))
    assert [letter.raw for letter in shipper.read_state().dead_letters] == [lines[4000][:-1]]
    told_refusals = told(result, "compression_refused")
    if accept_gzip:
        assert (refused, told_refusals) == (0, [])
    else:
        assert 1 <= refused <= 4, "only those that were on their way"
        assert len(told_refusals) == 1


# Rate ------------------------------------------------------------


def test_the_rate_is_never_exceeded_by_retries_or_by_many_senders(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.plan(*[OK, OK, Reply(status=503), RESET] * 5)
    rate = 1000
    settings = {**QUICK, "batch.max_events": 50, "delivery.concurrency": 8}
    settings["delivery.rate_limit_events_per_second"] = rate
    result = shipper.backfill(write(shipper, sample.lines[:2500]), settings=settings)
    assert (result.returncode, result.counts()) == (0, (2500, 2500, 0, 0, 0))
    assert fake.requests >= 60, "retries count, too"
    seconds = fake.arrived_at[-1] - fake.arrived_at[0]
    assert len(fake.event_ids(fake.bodies[:-1])) / seconds <= rate * 1.1


# Traces ------------------------------------------------------------


def test_each_request_has_a_trace_of_its_own_by_which_the_log_names_it(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.plan(OK, Reply(status=503), Reply(status=401), Reply(status=400), Reply(status=413))
    settings = {**QUICK, "batch.max_events": 20, "delivery.concurrency": 4}
    result = shipper.backfill(write(shipper, sample.lines[:400]), "--log-level", "debug", settings=settings)
    assert (result.returncode, result.counts()) == (0, (400, 400, 0, 0, 0))
    traces = [headers["traceparent"] for headers in fake.headers]
    assert len(set(traces)) == len(traces) > 20
    for trace in traces:
        assert re.fullmatch("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01", trace)
    logged = told(result, "batch_sent")
    assert sorted(line["traceparent"] for line in logged) == sorted(traces)
    assert Counter(line["status"] for line in logged)[202] == len(fake.stored)
