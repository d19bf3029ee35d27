"""How the endpoint opens, keeps and renews connections, on all event loops."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from shipper.delivery.endpoint import NoAnswerError
from tests.certificates import context_of
from tests.fakes import HandClock
from tests.servers import ACCEPTED, Origin, Reply, after, close, reset, skip_without_ipv6, stall
from tests.stage.endpoints import Names, endpoint, failure, poll, post, reaching
from tests.stage.loops import on_each_loop, on_loops


@on_each_loop
@pytest.mark.parametrize("trouble", [close, reset])
async def test_a_kept_connection_that_closes_without_an_answer_is_stale_once(
    ca: Path, context: ssl.SSLContext | None, trouble: Reply
):
    replies = (ACCEPTED, ACCEPTED, trouble, trouble, ACCEPTED)
    async with reaching(*replies, context=context, ca_bundle=ca) as (used, origin):
        await post(used)
        await post(used)
        error = await failure(used)
        assert error.cause in {"remote_protocol_error", "read_error"}
        assert (error.is_stale, error.was_sent, error.cause == "tls") == (True, True, False)
        assert not (await failure(used)).is_stale, "a new connection was stale"
        assert (await post(used)).status == 202
    assert (len(origin.requests), origin.accepted) == (5, 3)


@on_each_loop
async def test_a_connection_with_a_partial_answer_is_not_stale(ca: Path, context: ssl.SSLContext | None):
    partial = after(b"HTTP/1.1 202 Acc", close)
    async with reaching(ACCEPTED, ACCEPTED, partial, context=context, ca_bundle=ca) as (used, origin):
        await post(used)
        await post(used)
        error = await failure(used)
        assert (error.cause, error.is_stale, error.was_sent) == ("remote_protocol_error", False, True)
    assert (len(origin.requests), origin.accepted) == (3, 1)


@on_each_loop
async def test_a_kept_connection_that_falls_silent_is_not_stale():
    async with reaching(ACCEPTED, stall, delivery={"read_timeout_seconds": 0.2}) as (used, _):
        await post(used)
        error = await failure(used)
        assert (error.cause, error.is_stale) == ("read_timeout", False)


@on_each_loop
async def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_error(
    ca: Path, context: ssl.SSLContext | None
):
    async with reaching(after(ACCEPTED, close), context=context, ca_bundle=ca) as (used, origin):
        for number in range(1, 4):
            assert (await post(used)).status == 202
            await poll(lambda number=number: origin.closed == number)
    assert (len(origin.requests), origin.accepted) == (3, 3)


async def test_an_earlier_error_is_not_attributed_to_a_later_request(ca: Path):
    """A request made while an error is handled has that error as its context."""
    untrusted = context_of(trustme.CA(), "127.0.0.1")
    async with reaching(context=untrusted, ca_bundle=ca) as (first, _), reaching(close) as (second, _):
        try:
            await post(first)
        except NoAnswerError as earlier:
            cause, other = earlier.cause, await failure(second)
    assert cause == "tls"
    assert other.cause == "remote_protocol_error"


# Names, addresses and ages -------------------------------------------------------------------------------------------


@contextmanager
def old_and_new(names: Names, *replies: Reply) -> Iterator[tuple[Origin, Origin]]:
    """Two services on the same port of two addresses; the name resolves to the old one."""
    with Origin(*replies) as old, Origin(host="127.0.0.2", port=old.port) as new:
        names.addresses["intake.test"] = [old.host]
        yield old, new


@pytest.mark.parametrize("cause", ["age", "idleness"])
async def test_an_old_or_idle_connection_is_renewed_and_the_name_resolved_again(names: Names, cause: str):
    clock = HandClock()
    steps, max_age_s = ((50, 50, 50, 50, 50, 49, 1), 300) if cause == "age" else ((59, 59, 59, 60), 86_400)
    with old_and_new(names) as (old, new):
        async with endpoint(
            f"http://intake.test:{old.port}", now=clock, delivery={"connection_max_age_seconds": max_age_s}
        ) as used:
            await post(used)
            names.addresses["intake.test"] = [new.host]
            for step in steps[:-1]:
                clock.now += step
                await post(used)
            assert (old.accepted, len(old.requests), new.requests) == (1, len(steps), [])
            clock.now += steps[-1]
            await post(used)
            await post(used)
            await poll(lambda: old.closed)
    assert (len(old.requests), len(new.requests), new.accepted) == (len(steps), 2, 1)
    assert names.lookups == 2


async def test_the_name_is_resolved_again_after_a_failure(names: Names):
    with old_and_new(names, ACCEPTED, stall) as (old, new):
        async with endpoint(f"http://intake.test:{old.port}", delivery={"read_timeout_seconds": 0.2}) as used:
            await post(used)
            names.addresses["intake.test"] = [new.host]
            assert (await failure(used)).cause == "read_timeout"
            await post(used)
    assert (len(old.requests), len(new.requests)) == (2, 1)


@on_loops("asyncio", "trio")  # uvloop has its own lookup
@pytest.mark.parametrize(
    ("number", "words", "cause"),
    [
        (socket.EAI_NONAME, "Name or service not known", "unknown_host"),
        (socket.EAI_AGAIN, "Temporary failure in name resolution", "name_lookup"),
    ],
)
async def test_an_unknown_name_is_distinguished_from_an_unavailable_name_server(
    names: Names, number: int, words: str, cause: str
):
    names.error = socket.gaierror(number, words)
    names.addresses["intake.test"] = []
    async with endpoint("http://intake.test:9") as used:
        error = await failure(used)
    assert (error.cause, error.was_sent) == (cause, False)
    assert str(error) == f"the host of http://intake.test:9 was not found: {words}"
    assert names.lookups


@on_each_loop
async def test_an_invalid_name_is_not_found():
    for host in ("intake..example", "x" * 64 + ".example"):
        async with endpoint(f"https://{host}") as used:
            error = await failure(used)
        assert (error.cause, error.was_sent) == ("unknown_host", False)


@on_each_loop
async def test_an_ipv6_address_works(ca: Path, context: ssl.SSLContext | None):
    skip_without_ipv6()
    with Origin(host="::1", context=context) as origin:
        assert "[::1]" in origin.url
        async with endpoint(origin.url, ca_bundle=ca) as used:
            assert (await post(used)).status == 202
    assert f"Host: [::1]:{origin.port}".encode() in origin.requests[0]


@on_loops("asyncio", "trio")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_name_with_several_addresses_is_reached_at_the_listening_one(names: Names, host: str):
    skip_without_ipv6()
    names.addresses["localhost"] = ["::1", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        free = nobody.getsockname()[1]
    with Origin(host=host) as origin:
        async with endpoint(f"http://localhost:{origin.port}") as used:
            assert (await post(used)).status == 202
        async with endpoint(f"http://localhost:{free}") as used:
            error = await failure(used)
        assert str(error) == f"cannot connect to http://localhost:{free}: Connection refused"
    assert len(origin.requests) == 1
    assert names.lookups == 2
