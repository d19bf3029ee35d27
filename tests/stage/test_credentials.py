"""Tokens from a token endpoint: renewal in time, one request for all callers, and failures of the endpoint."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from shipper.delivery.credentials import Authorization, ClockSkew, Credentials, NoTokenError
from shipper.delivery.endpoint import NoAnswerError
from tests.cases import each
from tests.stage.loops import in_virtual_time
from tests.stage.token_endpoint import EPOCH, TokenEndpoint, answer, credentials, granted, logged

DOWN = NoAnswerError("connect_error", "cannot connect to https://login.example.com")


async def use(used: Credentials, endpoint: TokenEndpoint, *, every_s: float, until_s: float) -> set[str]:
    """Authorise repeatedly, without expired tokens and without waits; return the tokens."""
    tokens = set()
    while anyio.current_time() < until_s:
        before = anyio.current_time()
        token = (await used.authorize()).token
        assert before == anyio.current_time() or len(tokens) == 0, "a call waited"
        assert anyio.current_time() < endpoint.ends_at[token], "an expired token was used"
        tokens.add(token)
        await anyio.sleep(every_s)
    return tokens


@asynccontextmanager
async def renewing(endpoint: TokenEndpoint) -> AsyncIterator[tuple[Credentials, TokenEndpoint]]:
    """Run the background task that renews the token."""
    used = credentials(endpoint)
    async with anyio.create_task_group() as group:
        group.start_soon(used.run)
        yield used, endpoint
        group.cancel_scope.cancel()


# --- ahead of expiry ---


@in_virtual_time
async def test_a_token_of_120_s_is_renewed_once_before_it_expires():
    async with renewing(TokenEndpoint(lifetime_s=120, latency_s=0.5)) as (used, endpoint):
        async with anyio.create_task_group() as users:
            for _ in range(8):
                users.start_soon(lambda: use(used, endpoint, every_s=0.1, until_s=150))
        assert endpoint.called_at == [0, 90]
        assert used.token_expires_at == EPOCH + 90 + 120


@in_virtual_time
async def test_tokens_that_expire_in_five_seconds_are_each_fetched_once_and_never_used_expired():
    async with renewing(TokenEndpoint(lifetime_s=5)) as (used, endpoint):
        tokens = await use(used, endpoint, every_s=0.01, until_s=59)
        assert len(tokens) == len(endpoint.called_at) == 16
        assert endpoint.called_at == pytest.approx([3.75 * n for n in range(16)])


@in_virtual_time
async def test_without_the_background_task_a_token_is_fetched_when_the_last_one_has_expired():
    endpoint = TokenEndpoint(lifetime_s=5)
    tokens = await use(credentials(endpoint), endpoint, every_s=0.01, until_s=59.99)
    assert len(tokens) == len(endpoint.called_at) == 12


@in_virtual_time
async def test_a_background_task_that_starts_late_does_not_fetch_again():
    endpoint = TokenEndpoint(latency_s=1)
    used = credentials(endpoint)
    assert used.token_expires_at is None
    async with anyio.create_task_group() as group:
        group.start_soon(used.authorize)
        await anyio.sleep(0.5)
        group.start_soon(used.run)
        await anyio.sleep(100)
        assert endpoint.called_at == [0]
        assert (await used.authorize()).token == "token-1"
        group.cancel_scope.cancel()


@in_virtual_time
async def test_an_endpoint_that_returns_the_same_token_is_not_asked_repeatedly():
    async with renewing(TokenEndpoint()) as (_, endpoint):
        with capture_logs() as logs:
            endpoint.mood = granted("the-same", expires_in=3600)
            await anyio.sleep(3600)
        assert logged(logs) == []
        assert logged(logs, "debug") == ["token_fetched"]
        assert endpoint.called_at == [0, 3240]


# --- one fetch for all ---


@in_virtual_time
async def test_64_simultaneous_refusals_cause_one_fetch():
    endpoint = TokenEndpoint(latency_s=2)
    used = credentials(endpoint)
    refused = await used.authorize()
    renewed = []

    async def sender(number: int) -> None:
        await anyio.sleep(number / 16)  # some of them during the fetch, some after it
        used.refuse_token(refused)
        renewed.append((await used.authorize()).token)

    async with anyio.create_task_group() as group:
        for number in range(64):
            group.start_soon(sender, number)
    assert renewed == ["token-2"] * 64
    assert len(endpoint.called_at) == 2


@in_virtual_time
async def test_64_callers_share_the_failure_of_one_fetch():
    endpoint = TokenEndpoint(DOWN, latency_s=2)
    used = credentials(endpoint)
    errors = []

    async def sender() -> None:
        try:
            await used.authorize()
        except NoTokenError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(64):
            group.start_soon(sender)
    assert len(endpoint.called_at) == 1
    assert len({id(error) for error in errors}) == 64, "callers share an error object"
    assert {error.reason for error in errors} == {"token_endpoint"}
    assert (await used.authorize()).token == "token-2"


@in_virtual_time
async def test_a_cancelled_caller_does_not_cancel_the_shared_fetch():
    endpoint = TokenEndpoint(latency_s=10)
    used = credentials(endpoint)
    tokens = []

    async def sender() -> None:
        await anyio.sleep(1)
        tokens.append((await used.authorize()).token)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(sender)
        with anyio.move_on_after(5):
            await used.authorize()
    assert tokens == ["token-2"] * 3
    assert endpoint.called_at == [0, 5]


# --- the endpoint fails ---


@pytest.mark.parametrize("mood", [None, DOWN, answer(503), answer(401, error="invalid_client")], ids=str)
@in_virtual_time
async def test_a_valid_token_is_used_until_it_expires_while_the_endpoint_fails(mood: Any):
    async with renewing(TokenEndpoint()) as (used, endpoint):
        assert (await used.authorize()).token == "token-1"
        endpoint.mood = mood
        with capture_logs() as logs:
            assert await use(used, endpoint, every_s=1, until_s=3600) == {"token-1"}
            failures = len(endpoint.called_at) - 1
            assert 2 < failures < 60
            with pytest.raises(NoTokenError):
                await used.authorize()
            endpoint.mood = ""
            await anyio.sleep(100)
            assert (await used.authorize()).token.startswith("token-")
        assert logged(logs) == ["token_refresh_failed"]
        assert next(entry for entry in logs if entry["event"] == "token_refresh_failed")["has_token"]
        assert logged(logs, "info") == ["token_recovered"]


@pytest.mark.parametrize("mood", [None, DOWN, answer(503)], ids=str)
@in_virtual_time
async def test_an_endpoint_that_fails_from_the_start_is_retried_with_backoff(mood: Any):
    async with renewing(TokenEndpoint()) as (used, endpoint):
        endpoint.mood = mood
        with pytest.raises(NoTokenError) as caught:
            await used.authorize()
        assert caught.value.reason == "token_endpoint"
        with capture_logs() as logs:
            await anyio.sleep(3600)
        assert logged(logs) == [], "the failure was already reported"
        assert 30 < len(endpoint.called_at) < 240
        endpoint.mood = ""
        await anyio.sleep(100)
        assert (await used.authorize()).token.startswith("token-")


@in_virtual_time
async def test_the_backoff_restarts_with_a_second_outage():
    async with renewing(TokenEndpoint(DOWN, lifetime_s=1000)) as (used, endpoint):
        endpoint.mood = DOWN
        await anyio.sleep(600)
        endpoint.mood = ""
        await anyio.sleep(100)
        recovered_at = used.token_expires_at - EPOCH - endpoint.lifetime_s
        endpoint.mood = DOWN
        await anyio.sleep(recovered_at + 910 - anyio.current_time())
        again = [moment for moment in endpoint.called_at if moment > recovered_at]
        assert again[0] == pytest.approx(recovered_at + 900)
        assert again[1] - again[0] <= 1
        assert again[2] - again[1] <= 2


@in_virtual_time
async def test_the_background_task_waits_as_long_as_the_endpoint_requests():
    throttled = answer(429, retry_after="600", error="temporarily_unavailable")
    async with renewing(TokenEndpoint(throttled, throttled)) as (_, endpoint):
        await anyio.sleep(1300)
        assert endpoint.called_at == [0, 600, 1200]


@in_virtual_time
async def test_a_fetch_by_a_caller_ends_the_wait_of_the_background_task():
    async with renewing(TokenEndpoint(answer(429, retry_after="3600"), lifetime_s=120)) as (used, endpoint):
        await anyio.sleep(1)
        assert (await used.authorize()).token == "token-2"
        await use(used, endpoint, every_s=0.5, until_s=100)
        assert endpoint.called_at[:3] == [0, 1, 1 + 90]


@in_virtual_time
async def test_a_new_reason_is_reported_in_the_same_outage():
    used = credentials(TokenEndpoint(DOWN, DOWN, answer(401, error="invalid_client")))
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(NoTokenError):
                await used.authorize()
    reasons = [each["reason"] for each in logs if each["log_level"] == "warning"]
    assert reasons == ["token_endpoint", "token"]


# --- the clock ---


@pytest.fixture
def local_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("local_zone")
def test_the_skew_is_read_from_all_three_forms_of_a_date():
    at = 784_111_777.0
    for date in ("Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"):
        skew = ClockSkew()
        skew.note(date, at - 30)
        assert skew.seconds == 30
        skew.note(date, at + 1.9)
        assert skew.seconds == 0


@each("date", ["", "yesterday", "Sun, 06 Nov 99999999 08:49:37 GMT", "0", "\x00", "1,2"])
def test_an_invalid_date_is_ignored(date: str):
    skew = ClockSkew()
    skew.note("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_747.0)
    skew.note(date, 5.0)
    assert skew.seconds == 30


def test_a_skew_is_reported_again_when_it_grows_and_when_it_ends():
    date, at = "Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777.0
    skew = ClockSkew()
    with capture_logs() as logs:
        for skew_s in (59, 61, 65, 121, 122, 60, 3, -61, -100):
            skew.note(date, at - skew_s)
            assert skew.seconds == skew_s
    assert [(each["event"], each["seconds"]) for each in logs] == [
        ("clock_skew", 61),
        ("clock_skew", 122),
        ("clock_skew_over", 60),
        ("clock_skew", -61),
    ]
    assert "122 s ahead of" in logs[1]["message"]
    assert "61 s behind" in logs[3]["message"]


def test_an_authorization_is_a_pair():
    authorization = Authorization(token="t", subscription_key="k")
    assert authorization == ("t", "k")
    assert repr(authorization) == "Authorization(***)"
    assert math.isfinite(hash(authorization))
