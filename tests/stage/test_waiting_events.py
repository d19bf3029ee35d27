"""A record with the EventId of an unanswered one waits for that answer, whatever the packer does meanwhile."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from shipper.delivery.answer import Answer
from shipper.model.records import Chunk
from shipper.pipeline import settlement
from shipper.pipeline.pipeline import Pipeline
from tests.fakes import OK, answer
from tests.stage.pipelines import Maker, Source, running, until
from tests.unit.test_codec import line

REFUSED = answer(400)
OF_ONE = b"".join(line(1, ConsumerID=consumer) + b"\n" for consumer in range(1, 5))
OTHER = line(2, ConsumerID=9) + b"\n"


class Service:
    """Answers the first request on demand, with one of its answers after the other, then with 202."""

    certificate_expires_at = None

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked = anyio.Event()
        self.go = anyio.Event()
        self.consumers: list[list[int]] = []

    async def request(self, method: str, path: str, body: bytes = b"", **_: Any) -> Answer:
        self.consumers.append([event["ConsumerID"] for event in msgspec.json.decode(body)["events"]])
        self.asked.set()
        await self.go.wait()
        await anyio.lowlevel.checkpoint()
        return self.answers.pop(0) if self.answers else OK

    async def aclose(self) -> None: ...


def make_for(make: Maker, service: Service, source: Source) -> Pipeline:
    return make(source, endpoints=repeat(service), senders=2, batch_linger_seconds=0.0, is_one_shot=True)


async def ship(make: Maker, service: Service, *chunks: bytes, is_open: bool) -> Pipeline:
    """Ship; the first answer comes when everything is read. An open input ends when everything is settled."""
    source = Source(chunks, is_followed=is_open)
    pipeline = make_for(make, service, source)
    records = sum(chunk.count(b"\n") for chunk in chunks)
    async with running(pipeline):
        await service.asked.wait()
        await until(lambda: pipeline.totals.read == records)
        assert pipeline.totals.pending == records
        service.go.set()
        if is_open:
            await until(lambda: not pipeline.totals.pending)
            source.closed.set()
    assert source.stream.checkpoint == source.size
    return pipeline


@pytest.mark.parametrize("ticks", range(12))
async def test_a_record_read_at_the_moment_of_the_answer_is_not_lost(make: Maker, ticks: int):
    class FedAtTheAnswer(Source):
        async def run(self, chunks_tx: Any) -> None:
            send = chunks_tx.send

            async def send_at_the_answer(chunk: Chunk) -> None:
                if chunk.start_offset:
                    await service.go.wait()
                    for _ in range(ticks):
                        await anyio.lowlevel.checkpoint()
                await send(chunk)

            chunks_tx.send = send_at_the_answer
            await super().run(chunks_tx)

    service = Service(OK)
    source = FedAtTheAnswer([OF_ONE, OTHER])
    pipeline = make_for(make, service, source)
    async with running(pipeline):
        await until(lambda: pipeline.totals.read == 4)
        service.go.set()
    assert (pipeline.totals.accepted, pipeline.totals.duplicates) == (2, 3)
    assert source.stream.checkpoint == source.size


@pytest.mark.parametrize("is_open", [True, False])
async def test_after_an_acceptance_the_others_are_duplicates_and_never_sent(make: Maker, is_open: bool):
    service = Service(OK)
    pipeline = await ship(make, service, OF_ONE, is_open=is_open)
    assert service.consumers == [[1]]
    assert (pipeline.totals.accepted, pipeline.totals.duplicates) == (1, 3)


@pytest.mark.parametrize("is_open", [True, False])
async def test_after_a_refusal_the_next_record_is_sent_and_the_others_wait_for_its_answer(make: Maker, is_open: bool):
    service = Service(REFUSED, REFUSED, OK)
    pipeline = await ship(make, service, OF_ONE, is_open=is_open)
    assert service.consumers == [[1], [2], [3]], "the records were not sent in order"
    totals = pipeline.totals
    assert (totals.accepted, totals.dead_lettered, totals.duplicates) == (1, 2, 1)


async def test_a_later_record_does_not_overtake_a_waiting_one_which_delays_no_other(make: Maker):
    service = Service(REFUSED, OK)
    middle = len(OF_ONE) // 2
    pipeline = await ship(make, service, OF_ONE[:middle], OTHER, OF_ONE[middle:], is_open=True)
    assert service.consumers == [[1], [9], [2]]
    assert (pipeline.totals.accepted, pipeline.totals.dead_lettered, pipeline.totals.duplicates) == (2, 1, 2)


async def test_waiting_records_may_fill_the_whole_room(make: Maker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 4_000)
    service = Service(OK)
    source = Source([OF_ONE, OTHER])
    pipeline = make_for(make, service, source)
    async with running(pipeline):
        await service.asked.wait()
        await until(lambda: pipeline.totals.read == 2)
        service.go.set()
    assert (pipeline.totals.accepted, pipeline.totals.duplicates) == (2, 3)
