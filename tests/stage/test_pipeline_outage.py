"""The whole pipeline during an outage in virtual time: reading waits, nothing is lost, and the log stays small."""

from __future__ import annotations

import json
import signal
from collections import Counter
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog
from trio.lowlevel import current_clock
from trio.testing import MockClock

from shipper.config.secrets import LiteralSecret
from shipper.config.settings import BatchSettings, DeliverySettings, EndpointSettings, Settings, StateSettings
from shipper.delivery.endpoint import NoAnswerError
from shipper.model.records import Chunk, Stream
from shipper.pipeline.pipeline import Pipeline
from shipper.state.store import Store
from shipper.status.logs import configure_logs, take_left_out
from tests.fakes import answer
from tests.stage.loops import in_virtual_time
from tests.stage.pipelines import NOW_S, Source, at_once, running
from tests.stage.service_model import Reply, Request, ServiceModel, _Endpoint, event_id

RATE = 2_000
RECORDS = 8 * RATE
CHUNK = 200
BATCH = 100
GONE_AT, BACK_AT = 1.0, 1_201.0


def line(number: int) -> bytes:
    """Return a valid record; all have the same length."""
    return (
        b'{"EventId":"%b","IP":"192.0.2.1","Timestamp":"2026-11-20T12:30:00Z","BTag":"660123_%032x","ConsumerID":%d,'
        b'"ConsumerCountry":"GB","ConsumerCurrencyID":"GBP","Username":"quiet_heron","BrandID":7,'
        b'"CustomerCurrencyID":"1","ConsumerStatus":"Verified","AffiliateID":"","ConsumerState":""}\n'
    ) % (event_id(number).encode(), number, 10**9 + number)


LINE_BYTES = len(line(0))


class GrowingFile(Source):
    """A source that grows by `RATE` records per second up to `RECORDS`; `sent` counts records."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.sent = stream.checkpoint // LINE_BYTES

    async def run(self, chunks_tx: Any) -> None:
        while self.sent < RECORDS:
            end = min(self.sent + CHUNK, RECORDS)
            await anyio.sleep_until(end / RATE)  # when it is written
            data = b"".join(map(line, range(self.sent, end)))
            await chunks_tx.send(
                Chunk(stream=self.stream, start_offset=self.sent * LINE_BYTES, end_offset=end * LINE_BYTES, data=data)
            )
            self.sent = end
        self.is_exhausted = True


class Outage:
    """
    A service with an outage, and its pipeline.

    Attributes:
        most_unsettled: Maximum number of records held by the pipeline.
    """

    def __init__(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, reply: Reply, *, back_at: float = BACK_AT, **delivery: Any
    ) -> None:
        self.store = store
        self.is_one_shot = False
        self._back_at = back_at
        self.service = ServiceModel(self._judge)
        self._reply = reply
        self.settings = Settings(
            intake=EndpointSettings(
                base_url="http://127.0.0.1:9", subscription_key=LiteralSecret("k"), token=LiteralSecret("t")
            ),
            batch=BatchSettings(max_events=BATCH),
            delivery=DeliverySettings(**delivery),
            state=StateSettings(commit_interval_seconds=10),  # checks every half second would be most of the work
        )
        self.most_unsettled = 0
        monkeypatch.setattr("shipper.pipeline.settlement.run_sync", at_once)
        monkeypatch.setattr("shipper.pipeline.senders.Endpoint", lambda *_, **__: _Endpoint(self.service, 0))

    def begin(self) -> Pipeline:
        """Create a pipeline that resumes at the saved state."""
        (stream,) = self.store.streams.load("file") or [Stream(stream_id=1, kind="file", path="x")]
        self.source = GrowingFile(stream)
        self.pipeline = Pipeline(
            self.settings,
            self.source,
            self.store,
            is_one_shot=self.is_one_shot,
            wall_time=lambda: NOW_S + anyio.current_time(),
            rng=Random(1),
        )
        return self.pipeline

    def _judge(self, request: Request) -> Reply | None:
        self.most_unsettled = max(self.most_unsettled, self.source.sent - self.pipeline.totals.accepted)
        return self._reply if GONE_AT <= request.at < self._back_at else None


@pytest.mark.parametrize(
    ("reply", "senders"),
    [
        pytest.param(answer(503), {"max_concurrency": 64}, id="503, 64 adaptive"),
        pytest.param(
            NoAnswerError("connect_error", "no answer", was_sent=False), {"concurrency": 8}, id="no connection, 8"
        ),
    ],
)
@in_virtual_time
async def test_an_outage_of_twenty_minutes_costs_no_memory_few_requests_and_no_record(
    store: Store, monkeypatch: pytest.MonkeyPatch, reply: Reply, senders: dict[str, Any]
):
    outage = Outage(store, monkeypatch, reply, **senders)
    sent: list[int] = []

    async def watch() -> None:
        for moment in (GONE_AT + 60, BACK_AT - 1):
            await anyio.sleep_until(moment)
            sent.append(outage.source.sent)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        summary = await outage.begin().run()
    assert (summary.outcome, summary.accepted, summary.pending) == ("finished", RECORDS, 0)
    # Batches at the senders, queued and at the packer; then chunks, queued before it and at the source.
    count = outage.settings.delivery.senders
    assert outage.most_unsettled <= (count + 8 + 2) * BATCH + 4 * CHUNK
    assert sent[0] == sent[1] < RECORDS, "reading did not wait"

    probes = outage.service.requests_between(GONE_AT + 10, BACK_AT)
    assert 240 < len(probes) < 830, "not one request per 2.5 s on average"
    assert {probe.in_flight for probe in probes} == {1}

    assert set(outage.service.stored.values()) == {1}
    assert len(outage.service.stored) == store.totals().accepted == RECORDS
    assert outage.service.requests[-1].at < BACK_AT + 10, "full speed did not return within ten seconds"


@in_virtual_time
async def test_the_whole_pipeline_observes_a_requested_wait_of_minutes(store: Store, monkeypatch: pytest.MonkeyPatch):
    outage = Outage(store, monkeypatch, answer(429, "200"), concurrency=8)
    assert (await outage.begin().run()).accepted == RECORDS
    assert 5 <= len(outage.service.requests_between(GONE_AT + 10, BACK_AT)) <= 7
    assert set(outage.service.stored.values()) == {1}
    assert len(outage.service.stored) == RECORDS


@in_virtual_time
async def test_time_for_which_the_process_was_suspended_does_not_make_it_give_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    outage = Outage(store, monkeypatch, answer(503))
    outage.is_one_shot = True
    outage.service.judge = lambda request: answer(403) if request.at < 600 else None
    async with anyio.create_task_group() as group:
        group.start_soon(suspend, 2.0, 3600.0)
        summary = await outage.begin().run()
    assert (summary.outcome, summary.accepted) == ("finished", RECORDS)


async def suspend(at: float, seconds: float) -> None:
    """Let time pass without any task, as if the process got SIGSTOP and later SIGCONT."""
    await anyio.sleep_until(at)
    clock = current_clock()
    assert isinstance(clock, MockClock)
    clock.jump(seconds)


@in_virtual_time
async def test_a_stop_in_the_middle_of_the_outage_ends_in_time_and_the_next_start_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    outage = Outage(store, monkeypatch, answer(503), concurrency=8)
    stopped_at = GONE_AT + 600
    async with running(outage.begin(), limit_s=stopped_at + 30) as run:
        await anyio.sleep_until(stopped_at)
        run.signal(signal.SIGTERM)
    assert anyio.current_time() < stopped_at + 30
    assert (run.summary.outcome, run.summary.exit_code(is_one_shot=False)) == ("aborted", 4)
    assert run.summary.read == run.summary.accepted + run.summary.pending
    assert 0 < store.totals().accepted < RECORDS
    assert (await outage.begin().run()).outcome == "finished"
    assert store.totals().accepted == len(outage.service.stored) == RECORDS
    hurried = outage.service.requests_between(stopped_at, stopped_at + 25)
    assert 10 < len(hurried) < 200, "requests were not sent one at a time"
    assert {request.in_flight for request in hurried} == {1}


@pytest.fixture
def real_logs():
    before = structlog.get_config()
    take_left_out()
    configure_logs("info", "json", now=anyio.current_time)
    structlog.configure(cache_logger_on_first_use=False)  # otherwise the loggers would keep this after the test
    yield
    take_left_out()
    structlog.configure(**before)


@pytest.mark.usefixtures("real_logs")
@in_virtual_time
async def test_an_outage_of_an_hour_is_logged_every_30_s_with_its_reason(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("shipper.pipeline.observer.SNAPSHOT_INTERVAL_S", 10.0)  # rarely, so that it is cheap
    outage = Outage(store, monkeypatch, answer(503), back_at=3_600.0, concurrency=8)
    assert (await outage.begin().run()).accepted == RECORDS
    assert len(outage.service.requests) > 650, "delivery was not retried throughout"
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    events = Counter(line["event"] for line in lines)
    assert events["self_report"] == pytest.approx(3_600 / 30, rel=0.01)
    assert (events["delivery_paused"], events["delivery_resumed"]) == (1, 1)
    assert sum(events.values()) < events["self_report"] + 100, events
    assert {line.get("paused") for line in lines if line["event"] == "self_report"} == {"unavailable"}
