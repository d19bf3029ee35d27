"""Senders, their gate and the endpoint: what is accepted is settled once, and nothing else is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest
import respx

from shipper.config import DeliverySettings, EndpointSettings
from shipper.delivery.endpoint import Endpoint, NoAnswerError
from shipper.delivery.gate import Gate
from shipper.delivery.sender import DeliveryCounts, Sender
from shipper.errors import DeliveryGaveUpError
from shipper.records import Batch
from shipper.secrets import LiteralSecret
from tests.fakes import ScriptedEndpoint, answer

QUICK = DeliverySettings(retry_initial_seconds=0.001, retry_max_seconds=0.002)


def batch(number: int = 1) -> Batch:
    return Batch(number=number, body=b"body %d" % number, events=1, parts=[])


class Delivery:
    """Some senders over scripted endpoints; `settled` holds the numbers of the batches in the order of settlement."""

    def __init__(self, *endpoints: ScriptedEndpoint, give_up_after_s: float | None = None) -> None:
        self.settled: list[int] = []
        self.gate = Gate()
        self.counts = DeliveryCounts()
        self.stopping = anyio.Event()
        self.settings = QUICK
        self.endpoints = endpoints
        self.give_up_after_s = give_up_after_s

    @asynccontextmanager
    async def running(self, *, fail_after_s: float = 5) -> AsyncIterator[Callable[[Batch], Any]]:
        tx, rx = anyio.create_memory_object_stream[Batch](0)
        with anyio.fail_after(fail_after_s):
            async with anyio.create_task_group() as group:
                with rx:
                    for endpoint in self.endpoints:
                        sender = Sender(
                            endpoint,  # type: ignore[arg-type]
                            self.gate,
                            lambda each: self.settled.append(each.number),
                            self.counts,
                            self.settings,
                            give_up_after_s=self.give_up_after_s,
                            stopping=self.stopping,
                            rng=Random(1),
                        )
                        group.start_soon(sender.run, rx.clone())
                async with tx:
                    yield tx.send


async def test_a_batch_is_settled_once_after_as_many_attempts_as_it_takes():
    endpoint = ScriptedEndpoint([answer(503), NoAnswerError("read_timeout", "x"), answer(500), answer(429, "0")])
    delivery = Delivery(endpoint)
    async with delivery.running() as send:
        await send(batch())
    assert delivery.settled == [1]
    assert endpoint.bodies == [b"body 1"] * 5
    assert (delivery.counts.batches, delivery.counts.requests, delivery.counts.retries) == (1, 5, 4)
    assert endpoint.is_closed


async def test_a_refusal_settles_nothing_and_goes_on_by_itself_when_it_is_over():
    endpoint = ScriptedEndpoint([answer(401), answer(403), answer(400)])
    delivery = Delivery(endpoint)
    async with delivery.running() as send:
        await send(batch(1))
        await send(batch(2))
    assert delivery.settled == [1, 2]
    assert endpoint.bodies == [b"body 1"] * 4 + [b"body 2"]
    assert delivery.gate.reason == ""


async def test_one_pause_holds_the_other_senders_and_one_of_them_probes():
    recovered = anyio.Event()
    prober, other = ScriptedEndpoint([answer(404), recovered]), ScriptedEndpoint()
    delivery = Delivery(prober, other)
    async with delivery.running() as send:
        await send(batch(1))
        while len(prober.bodies) < 2:
            await anyio.lowlevel.checkpoint()
        assert delivery.gate.reason == "not_found"
        await send(batch(2))
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert other.bodies == [], "it is held at the gate"
        recovered.set()
    assert sorted(delivery.settled) == [1, 2]
    assert other.bodies == [b"body 2"]


async def test_a_one_shot_run_gives_up_in_the_end_and_settles_nothing():
    endpoint = ScriptedEndpoint([answer(503)] * 100_000)
    delivery = Delivery(endpoint, give_up_after_s=0.05)
    with pytest.raises(ExceptionGroup) as caught:
        async with delivery.running() as send:
            await send(batch())
    assert caught.group_contains(DeliveryGaveUpError, match="stays pending")
    assert delivery.settled == []
    assert len(endpoint.bodies) > 1


async def test_a_long_wait_is_not_longer_than_the_patience():
    delivery = Delivery(ScriptedEndpoint([answer(503, "3600")] * 9), give_up_after_s=0.05)
    with pytest.raises(ExceptionGroup) as caught:
        async with delivery.running() as send:
            await send(batch())
    assert caught.group_contains(DeliveryGaveUpError)


async def test_a_stop_wakes_a_sender_from_its_backoff():
    endpoint = ScriptedEndpoint([answer(503, "3600")])
    delivery = Delivery(endpoint)
    async with delivery.running(fail_after_s=20) as send:
        await send(batch())
        while not delivery.counts.retries:
            await anyio.lowlevel.checkpoint()
        delivery.stopping.set()
    assert delivery.settled == [1]


def endpoint(base_url: str = "http://127.0.0.1:9", **changes: Any) -> Endpoint:
    now = changes.pop("now", anyio.current_time)
    settings = EndpointSettings(
        base_url=base_url, subscription_key=LiteralSecret("the-key"), token=LiteralSecret("the-token")
    )
    return Endpoint(settings, msgspec.structs.replace(QUICK, **changes), section="intake", ssl_context=None, now=now)


@respx.mock
async def test_the_documented_headers_are_sent_and_no_others():
    route = respx.post("http://127.0.0.1:9/x").mock(
        return_value=httpx.Response(202, json={}, headers={"Retry-After": "7", "Content-Type": "Text/HTML; charset=x"})
    )
    used = endpoint()
    got = await used.request("POST", "/x", b"[1]", max_answer_bytes=100)
    await used.aclose()
    assert (got.status, got.retry_after, got.content_type, got.body) == (202, "7", "text/html", b"{}")
    request = route.calls.last.request
    assert request.content == b"[1]"
    agent = request.headers.pop("user-agent")
    assert agent.startswith("shipper/")
    assert dict(request.headers) == {
        "host": "127.0.0.1:9",
        "content-type": "application/json",
        "cache-control": "no-cache",
        "authorization": "Bearer the-token",
        "ocp-apim-subscription-key": "the-key",
        "content-length": "3",
    }


@respx.mock
async def test_an_endless_answer_is_read_up_to_the_limit():
    respx.get("http://127.0.0.1:9/x").mock(return_value=httpx.Response(200, content=b"z" * 5000))
    used = endpoint()
    assert (await used.request("GET", "/x", max_answer_bytes=10)).body == b"z" * 10
    await used.aclose()


@respx.mock
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (httpx.ConnectError("refused"), "connect_error"),
        (httpx.ReadTimeout("slow"), "read_timeout"),
        (httpx.RemoteProtocolError("cut"), "remote_protocol_error"),
    ],
)
async def test_every_failure_of_the_transport_is_no_answer(error: Exception, cause: str):
    respx.post("http://127.0.0.1:9/x").mock(side_effect=error)
    used = endpoint()
    with pytest.raises(NoAnswerError, match=r"127\.0\.0\.1:9") as caught:
        await used.request("POST", "/x", b"", max_answer_bytes=10)
    await used.aclose()
    assert (caught.value.cause, caught.value.is_tls) == (cause, False)


async def test_a_connection_is_kept_and_renewed_when_it_is_old():
    connections = 0

    async def handle(stream: anyio.abc.SocketStream) -> None:
        nonlocal connections
        connections += 1
        async with stream:
            while True:
                try:
                    await stream.receive()
                except anyio.EndOfStream:
                    return
                await stream.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    clock = [0.0]
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handle)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        used = endpoint(f"http://127.0.0.1:{port}", connection_max_age_seconds=300.0, now=lambda: clock[0])
        for at in (0.0, 10.0, 299.0):
            clock[0] = at
            await used.request("GET", "/", max_answer_bytes=10)
        assert connections == 1
        clock[0] = 300.0
        await used.request("GET", "/", max_answer_bytes=10)
        assert connections == 2
        await used.aclose()
        group.cancel_scope.cancel()
