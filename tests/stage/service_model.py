"""A service and its senders in virtual time: hours of an outage pass in milliseconds."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from shipper.config.settings import DeliverySettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization, ClockSkew
from shipper.delivery.endpoint import NoAnswerError
from shipper.delivery.gate import Gate
from shipper.delivery.sender import DeliveryCounts, Sender, SharedState
from shipper.model.records import Batch, BatchResult, Chunk, Refusal, Span, Stream
from shipper.model.wire import BODY_HEAD, BODY_TAIL
from tests.fakes import OK, FixedCredentials, answer
from tests.stage.loops import in_virtual_time

Reply = Answer | NoAnswerError
UNTIL_IT_RECOVERS = 1_000.0


def event_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def batch_of(numbers: Iterable[int], *, number: int = 1, events_before: int = 0, padding: int = 0) -> Batch:
    """Return a batch of events that contain little more than their ids."""
    lines = [
        b'{"EventId":"%b","ConsumerID":%d,"x":"%b"}' % (event_id(n).encode(), n + 1, b"x" * padding) for n in numbers
    ]
    stream, data = Stream(stream_id=1, kind="file", path="x"), b"\n".join([*lines, b""])
    span = Span(
        stream=stream,
        start_offset=0,
        end_offset=1,
        tail=b"",
        read=len(lines),
        unsettled=len(lines),
        chunk=Chunk(stream=stream, start_offset=0, end_offset=len(data), data=data),
        stretches=[(0, len(data))],
    )
    body = BODY_HEAD + b",".join(lines) + BODY_TAIL
    parts = [(span, range(len(lines)))]
    return Batch(number=number, events_before=events_before, body=body, events=len(lines), parts=parts)


def numbers_in(body: bytes) -> list[int]:
    return [int(event["EventId"][-12:]) for event in json.loads(body)["events"]]


class Request:
    """A request as seen by the service."""

    def __init__(
        self, sender: int, body: bytes, authorization: Authorization, encoding: str, traceparent: str, in_flight: int
    ) -> None:
        self.at = anyio.current_time()
        self.traceparent = traceparent
        self.sender = sender
        self.body = gzip.decompress(body) if encoding == "gzip" else body
        self.authorization = authorization
        self.encoding = encoding
        self.in_flight = in_flight

    @property
    def numbers(self) -> list[int]:
        return numbers_in(self.body)


class ServiceModel:
    """
    Answers after a latency; records what it accepts.

    Attributes:
        judge: Returns the answer to a request; None = an acceptance.
        latency_of: Returns the latency of a request in seconds.
        stored: Number of acceptances by event.
        most_in_flight: Maximum number of concurrent requests.
    """

    def __init__(self, judge: Callable[[Request], Reply | None] = lambda _: None, *, latency_s: float = 0.05) -> None:
        self.judge = judge
        self.latency_s = latency_s
        self.latency_of: Callable[[Request], float] = lambda _: latency_s
        self.requests: list[Request] = []
        self.stored: Counter[int] = Counter()
        self.in_flight = 0

    async def handle(
        self, sender: int, body: bytes, authorization: Authorization, encoding: str, traceparent: str
    ) -> Answer:
        self.in_flight += 1
        request = Request(sender, body, authorization, encoding, traceparent, self.in_flight)
        self.requests.append(request)
        try:
            await anyio.sleep(self.latency_of(request))
            reply = self.judge(request)
        finally:
            self.in_flight -= 1
        if isinstance(reply, NoAnswerError):
            raise reply
        if reply is None:
            self.stored.update(request.numbers)
        return OK if reply is None else reply

    def requests_between(self, start: float, end: float = inf) -> list[Request]:
        return [request for request in self.requests if start < request.at < end]


class _Endpoint:
    certificate_expires_at: float | None = None

    def __init__(self, service: ServiceModel, index: int) -> None:
        self._service = service
        self._index = index

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        authorization: Authorization,
        traceparent: str,
        encoding: str,
        max_answer_bytes: int,
    ) -> Answer:
        return await self._service.handle(self._index, body, authorization, encoding, traceparent)

    async def aclose(self) -> None:
        pass


class Delivery:
    """
    Senders that deliver to a model.

    Attributes:
        settled: The numbers of the events settled as accepted.
        refused: The events that were refused for good, with the reasons.
    """

    def __init__(
        self,
        service: ServiceModel,
        *,
        senders: int = 1,
        give_up_after_s: float | None = None,
        other_keys: int = 0,
        seed: int = 1,
        **changes: Any,
    ) -> None:
        self.service = service
        settings = DeliverySettings(**{"concurrency": senders, **changes})
        rng = Random(seed)
        self.gate = Gate(settings, give_up_after_s=give_up_after_s, rng=rng)
        self.counts = DeliveryCounts()
        self.settled: Counter[int] = Counter()
        self.refused: dict[int, Refusal] = {}
        self.credentials = FixedCredentials(other_keys=other_keys)
        shared = SharedState(
            gate=self.gate,
            credentials=self.credentials,
            settings=settings,
            counts=self.counts,
            skew=ClockSkew(),
            rng=rng,
            wall_time=lambda: 1_800_000_000.0,
        )
        self._senders = [Sender(_Endpoint(service, index), shared, index) for index in range(settings.senders)]  # type: ignore[arg-type]

    async def _settle(self, settled_rx: MemoryObjectReceiveStream[BatchResult]) -> None:
        with settled_rx:
            async for settled in settled_rx:
                if settled.accepted is not None:
                    self.settled.update(numbers_in(settled.accepted.body))
                for batch, refusal in settled.refused:
                    (number,) = numbers_in(batch.body)
                    assert number not in self.refused
                    self.refused[number] = refusal

    async def deliver(self, batches: Sequence[Batch]) -> None:
        """Deliver all batches in order; every event must be settled once."""
        await self.run(batches)
        wanted = {number for batch in batches for number in numbers_in(batch.body)}
        assert set(self.settled) | set(self.refused) == wanted
        assert not set(self.settled) & set(self.refused)
        assert set(self.settled.values()) <= {1}

    async def run(self, batches: Sequence[Batch]) -> None:
        """Deliver batches in order."""
        batches_tx, batches_rx = anyio.create_memory_object_stream[Batch](0)
        settled_tx, settled_rx = anyio.create_memory_object_stream[BatchResult](len(self._senders))
        async with anyio.create_task_group() as group:
            group.start_soon(self._settle, settled_rx)
            with batches_rx, settled_tx:
                for sender in self._senders:
                    group.start_soon(sender.run, batches_rx.clone(), settled_tx.clone())
            async with batches_tx:
                for batch in batches:
                    await batches_tx.send(batch)


def numbered(count: int, *, events: int = 10) -> list[Any]:
    return [batch_of(range(events * n, events * (n + 1)), number=n + 1) for n in range(count)]


def script(*replies: Reply | None) -> Callable[[Request], Reply | None]:
    """Give these answers one after the other, then accept."""
    left = list(replies)
    return lambda _: left.pop(0) if left else None


def until(end: float, reply: Reply | Callable[[], Reply]) -> Callable[[Request], Reply | None]:
    """Give this answer until a time, then accept."""
    return lambda request: (reply() if callable(reply) else reply) if request.at < end else None


def no_answer(cause: str = "read_timeout", **flags: Any) -> NoAnswerError:
    return NoAnswerError(cause, "no answer", **flags)


@in_virtual_time
async def run(delivery: Callable[[], Delivery], batches: list[Any]) -> Delivery:
    """Create and run a delivery."""
    made = delivery()
    await made.deliver(batches)
    return made


def refuses(poison: set[int], status: int = 400, words: str = "IP is bad") -> Callable[[Request], Reply | None]:
    """Refuse a whole batch if it contains poison, without naming it."""
    body = b'{"statusCode":%d,"message":"%b"}' % (status, words.encode())
    return lambda request: answer(status, body=body) if poison & set(request.numbers) else None
