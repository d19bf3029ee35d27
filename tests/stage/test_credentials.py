"""Credentials: tokens that are renewed in time by one request for all, key pairs, and secrets that are replaced."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from structlog.typing import EventDict
from trio.testing import MockClock

from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.delivery.credentials import Authorization, ClockSkew, Credentials, NoTokenError, TokenCache
from shipper.delivery.endpoint import NoAnswerError
from shipper.delivery.token_sources import Token, expiring
from shipper.model.errors import ConfigError
from tests.cases import each
from tests.stage.token_endpoint import (
    EPOCH,
    TokenEndpoint,
    answer,
    credentials,
    granted,
    in_virtual_time,
    jwt_like,
    password_grant,
)

DOWN = NoAnswerError("connect_error", "cannot connect to https://login.example.com")


def told(logs: list[EventDict], level: str = "warning") -> list[str]:
    return [each["event"] for each in logs if each["log_level"] == level]


async def use(used: Credentials, endpoint: TokenEndpoint, *, every_s: float, until_s: float) -> set[str]:
    """Authorise again and again, none of it with an expired token and none with a wait; returns the tokens."""
    tokens = set()
    while anyio.current_time() < until_s:
        before = anyio.current_time()
        token = (await used.authorize()).token
        assert before == anyio.current_time() or len(tokens) == 0, "it waited"
        assert anyio.current_time() < endpoint.ends_at[token], "it gave out an expired token"
        tokens.add(token)
        await anyio.sleep(every_s)
    return tokens


def beside_run(main: Callable[[Credentials, TokenEndpoint], Awaitable[None]], endpoint: TokenEndpoint) -> None:
    """Run in virtual time, with the task that keeps the token fresh."""

    async def all_of_it() -> None:
        used = credentials(endpoint)
        async with anyio.create_task_group() as group:
            group.start_soon(used.run)
            await main(used, endpoint)
            group.cancel_scope.cancel()

    in_virtual_time(all_of_it)


# --- ahead of expiry ---


def test_a_token_of_120_s_is_renewed_once_before_it_expires():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        async with anyio.create_task_group() as users:
            for _ in range(8):
                users.start_soon(lambda: use(used, endpoint, every_s=0.1, until_s=150))
        assert endpoint.called_at == [0, 90]
        assert used.token_expires_at == EPOCH + 90 + 120

    beside_run(main, TokenEndpoint(lifetime_s=120, latency_s=0.5))


def test_tokens_that_live_five_seconds_are_each_fetched_once_and_never_given_out_expired():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        tokens = await use(used, endpoint, every_s=0.01, until_s=59)
        assert len(tokens) == len(endpoint.called_at) == 16
        assert endpoint.called_at == pytest.approx([3.75 * n for n in range(16)])

    beside_run(main, TokenEndpoint(lifetime_s=5))


def test_without_the_background_task_a_token_is_fetched_when_the_last_one_is_over():
    async def main() -> None:
        endpoint = TokenEndpoint(lifetime_s=5)
        tokens = await use(credentials(endpoint), endpoint, every_s=0.01, until_s=59.99)
        assert len(tokens) == len(endpoint.called_at) == 12

    in_virtual_time(main)


def test_the_background_task_may_begin_late_and_does_not_fetch_twice():
    async def main() -> None:
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

    in_virtual_time(main)


def test_an_endpoint_that_gives_the_same_token_again_is_not_asked_over_and_over():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        with capture_logs() as logs:
            endpoint.mood = granted("the-same", expires_in=3600)
            await anyio.sleep(3600)
        assert told(logs) == []
        assert told(logs, "debug") == ["token_fetched"]
        asked_early = [moment for moment in endpoint.called_at if 3240 <= moment < 3600]
        assert 2 < len(asked_early) < 60

    beside_run(main, TokenEndpoint())


# --- one fetch for all ---


def test_64_refusals_at_once_make_one_fetch():
    async def main() -> None:
        endpoint = TokenEndpoint(latency_s=2)
        used = credentials(endpoint)
        refused = await used.authorize()
        renewed = []

        async def sender(number: int) -> None:
            await anyio.sleep(number / 16)  # some of them while the fetch is under way, some when it is over
            used.refuse_token(refused)
            renewed.append((await used.authorize()).token)

        async with anyio.create_task_group() as group:
            for number in range(64):
                group.start_soon(sender, number)
        assert renewed == ["token-2"] * 64
        assert len(endpoint.called_at) == 2

    in_virtual_time(main)


def test_64_callers_share_the_failure_of_one_fetch():
    async def main() -> None:
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
        assert len({id(error) for error in errors}) == 64, "each has an error of its own"
        assert {error.reason for error in errors} == {"token_endpoint"}
        assert (await used.authorize()).token == "token-2"

    in_virtual_time(main)


def test_a_cancelled_caller_does_not_take_the_fetch_from_the_others():
    async def main() -> None:
        endpoint = TokenEndpoint(latency_s=10)
        used = credentials(endpoint)
        tokens = []

        async def sender() -> None:
            tokens.append((await used.authorize()).token)

        async with anyio.create_task_group() as group:
            with anyio.move_on_after(5):
                group.start_soon(_wait_and_start, group, sender)
                await used.authorize()
        assert tokens == ["token-2"] * 3
        assert endpoint.called_at == [0, 5]

    in_virtual_time(main)


async def _wait_and_start(group: anyio.abc.TaskGroup, sender: Callable[[], Awaitable[None]]) -> None:
    await anyio.sleep(1)
    for _ in range(3):
        group.start_soon(sender)


# --- the endpoint is away ---


@pytest.mark.parametrize("mood", [None, DOWN, answer(503), answer(401, error="invalid_client")], ids=str)
def test_a_good_token_is_used_to_its_end_while_the_endpoint_fails(mood: Any):
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
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
        assert told(logs) == ["token_refresh_failed"]
        assert told(logs, "info") == ["token_recovered"]

    beside_run(main, TokenEndpoint())


@pytest.mark.parametrize("mood", [None, DOWN, answer(503)], ids=str)
def test_an_endpoint_that_is_away_from_the_start_is_asked_now_and_then(mood: Any):
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        endpoint.mood = mood
        with pytest.raises(NoTokenError) as caught:
            await used.authorize()
        assert caught.value.reason == "token_endpoint"
        with capture_logs() as logs:
            await anyio.sleep(3600)
        assert told(logs) == [], "it was told before"
        assert 30 < len(endpoint.called_at) < 240
        endpoint.mood = ""
        await anyio.sleep(100)
        assert (await used.authorize()).token.startswith("token-")

    beside_run(main, TokenEndpoint())


def test_the_backoff_of_a_second_episode_begins_anew():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        endpoint.mood = DOWN
        await anyio.sleep(600)
        endpoint.mood = ""
        await anyio.sleep(100)
        assert used.token_expires_at is not None
        recovered_at = used.token_expires_at - EPOCH - endpoint.lifetime_s
        endpoint.mood = DOWN
        await anyio.sleep(recovered_at + 910 - anyio.current_time())
        again = [moment for moment in endpoint.called_at if moment > recovered_at]
        assert again[0] == pytest.approx(recovered_at + 900)
        assert again[1] - again[0] <= 1
        assert again[2] - again[1] <= 2

    beside_run(main, TokenEndpoint(DOWN, lifetime_s=1000))


def test_the_background_task_waits_as_long_as_the_endpoint_asks_for():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        await anyio.sleep(1300)
        assert endpoint.called_at == [0, 600, 1200]

    throttled = answer(429, retry_after="600", error="temporarily_unavailable")
    beside_run(main, TokenEndpoint(throttled, throttled))


def test_a_fetch_by_a_caller_ends_the_wait_of_the_background_task():
    async def main(used: Credentials, endpoint: TokenEndpoint) -> None:
        await anyio.sleep(1)
        assert (await used.authorize()).token == "token-2"
        await use(used, endpoint, every_s=0.5, until_s=100)
        assert endpoint.called_at[:3] == [0, 1, 1 + 90]

    beside_run(main, TokenEndpoint(answer(429, retry_after="3600"), lifetime_s=120))


def test_a_new_reason_is_told_in_the_same_episode():
    async def main() -> None:
        used = credentials(TokenEndpoint(DOWN, DOWN, answer(401, error="invalid_client")))
        with capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(NoTokenError):
                    await used.authorize()
        reasons = [each["reason"] for each in logs if each["log_level"] == "warning"]
        assert reasons == ["token_endpoint", "token"]

    in_virtual_time(main)


# --- tokens from the settings ---


class HandClock:
    """A clock that only the test moves on; as a clock of the wall, it begins at `EPOCH`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def wall_time(self) -> float:
        return EPOCH + self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def by_hand(clock: HandClock, *, token: Secret | None = None, **changes: Any) -> Credentials:
    return credentials(token=token or LiteralSecret("a-token"), now=clock.now, wall_time=clock.wall_time, **changes)


def write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


async def test_a_constant_token_is_given_out_whatever_becomes_of_it(clock: HandClock, monkeypatch: pytest.MonkeyPatch):
    token = jwt_like(clock.wall_time() + 10)
    monkeypatch.setenv("TOKEN", token)
    used = by_hand(clock, token=SecretReference(env="TOKEN"))
    monkeypatch.setenv("TOKEN", "another")
    with capture_logs() as logs:
        for _ in range(3):
            authorization = await used.authorize()
            assert authorization == (token, "key-1")
            used.refuse_token(authorization)
        assert used.token_expires_at is None, "it was refused"
        await used.authorize()
        assert used.token_expires_at == EPOCH + 1010
        assert told(logs) == []
        clock.now_s += 25
        for _ in range(3):
            assert (await used.authorize()).token == token
    assert [each["message"] for each in logs if each["log_level"] == "warning"] == [
        "the token in intake.token has expired 15 s ago; the service will refuse it"
    ]


def test_a_constant_token_gives_the_background_task_nothing_to_wait_for():
    async def main() -> None:
        used = credentials(token=LiteralSecret(jwt_like(EPOCH + 10)))
        async with anyio.create_task_group() as group:
            group.start_soon(used.run)
            await trio.testing.wait_all_tasks_blocked()
            assert used.token_expires_at == EPOCH + 10
            assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
            group.cancel_scope.cancel()

    in_virtual_time(main)


@pytest.mark.parametrize("setting", ["token", "subscription_key"])
async def test_a_file_that_is_replaced_is_read_within_a_second(clock: HandClock, tmp_path: Path, setting: str):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "secret", f"the-{name}")
    (tmp_path / "data").symlink_to("old")
    (tmp_path / "secret").symlink_to("data/secret")
    reference = SecretReference(file=str(tmp_path / "secret"))
    used = by_hand(clock, **({"token": reference} if setting == "token" else {"keys": [reference]}))
    assert getattr(await used.authorize(), setting) == "the-old"
    # As it is done for a mounted secret: the directory that a link leads to changes in one step.
    (tmp_path / "data_tmp").symlink_to("new")
    os.rename(tmp_path / "data_tmp", tmp_path / "data")
    clock.now_s += 0.9
    assert getattr(await used.authorize(), setting) == "the-old", "not looked at yet"
    clock.now_s += 0.1
    assert getattr(await used.authorize(), setting) == "the-new"


@pytest.mark.parametrize("setting", ["token", "subscription_key"])
async def test_a_file_is_read_at_once_after_a_refusal(clock: HandClock, tmp_path: Path, setting: str):
    file = tmp_path / "secret"
    write(file, "the-old")
    used = by_hand(clock, **({"token": _file(file)} if setting == "token" else {"keys": [_file(file)]}))
    refused = await used.authorize()
    status = file.stat()
    write(file, "the-new")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # nothing seems to have changed
    clock.now_s += 10
    assert await used.authorize() == refused
    if setting == "token":
        used.refuse_token(refused)
    else:
        assert not used.refuse_key(refused), "there is no other"
    assert getattr(await used.authorize(), setting) == "the-new"


def _file(path: Path) -> SecretReference:
    return SecretReference(file=str(path))


@pytest.mark.parametrize("trouble", ["gone", "empty", "unfit", "open"])
async def test_a_file_that_is_away_for_a_moment_is_told_once_and_its_token_goes_on(
    clock: HandClock, tmp_path: Path, trouble: str
):
    file = tmp_path / "token"
    write(file, "the-token")
    used = by_hand(clock, token=_file(file))
    refused = await used.authorize()
    with capture_logs() as logs:
        if trouble == "gone":
            file.unlink()
        else:
            write(file, {"empty": "", "unfit": "two\nlines", "open": "the-other"}[trouble])
            file.chmod(0o644 if trouble == "open" else 0o600)
        for _ in range(20):
            clock.now_s += 0.25
            assert await used.authorize() == refused
        assert told(logs) == ["token_refresh_failed"]
        assert told(logs, "debug") == ["token_refresh_failed"] * 4, "it is looked at once a second"
        used.refuse_token(refused)
        for _ in range(2):
            with pytest.raises(NoTokenError, match=r"intake\.token: ") as caught:
                await used.authorize()
            assert caught.value.reason == "credentials"
        file.unlink(missing_ok=True)
        write(file, "the-new")
        assert (await used.authorize()).token == "the-new"
    assert told(logs) == ["token_refresh_failed"]
    assert told(logs, "info") == ["token_recovered"]


def test_what_is_missing_at_the_start_is_an_error_of_the_settings(clock: HandClock):
    missing = [
        (SecretReference(env="NOT_SET"), "environment variable NOT_SET is not set"),
        (SecretReference(file="/nowhere"), "No such file"),
        (SecretReference(command=("no-such-program",)), "program 'no-such-program' cannot be found or run"),
    ]
    for secret, says in missing:
        with pytest.raises(ConfigError, match=rf"intake\.token: .*{says}"):
            by_hand(clock, token=secret)
        with pytest.raises(ConfigError, match=rf"intake\.subscription_key: .*{says}"):
            by_hand(clock, keys=[secret])
        with pytest.raises(ConfigError, match=rf"intake\.subscription_key_secondary: .*{says}"):
            by_hand(clock, keys=[LiteralSecret("key-1"), secret])


# --- commands ---


class Program:
    """A program that prints the text of a file, and counts its runs."""

    def __init__(self, directory: Path) -> None:
        self._text = directory / "text"
        self._runs = directory / "runs"
        self._runs.touch()
        self.secret = SecretReference(command=("sh", "-c", f"echo >> '{self._runs}'; . '{self._text}'"))

    @property
    def runs(self) -> int:
        return len(self._runs.read_text())

    def prints(self, text: str) -> None:
        self._text.write_text(f"echo '{text}'")

    def fails(self) -> None:
        self._text.write_text("exit 7")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    program = Program(tmp_path)
    program.prints("printed-1")
    return program


async def test_a_command_is_run_when_it_is_needed_and_again_after_a_refusal(clock: HandClock, program: Program):
    used = by_hand(clock, token=program.secret)
    assert program.runs == 0
    for _ in range(3):
        assert (await used.authorize()).token == "printed-1"
        clock.now_s += 1000
    assert program.runs == 1
    refused = await used.authorize()
    program.prints("printed-2")
    async with anyio.create_task_group() as group:
        for _ in range(64):
            used.refuse_token(refused)
            group.start_soon(used.authorize)
    assert (await used.authorize()).token == "printed-2"
    assert program.runs == 2


async def test_a_failing_command_leaves_the_last_token_until_that_is_refused(clock: HandClock, program: Program):
    used = by_hand(clock, token=program.secret)
    refused = await used.authorize()
    program.fails()
    assert await used.authorize() == refused
    used.refuse_token(refused)
    with pytest.raises(NoTokenError, match=r"intake\.token: sh failed with exit code 7") as caught:
        await used.authorize()
    assert caught.value.reason == "credentials"


async def test_a_command_that_fails_at_the_start_is_run_again_by_the_next_call(clock: HandClock, program: Program):
    program.fails()
    used = by_hand(clock, token=program.secret)
    with pytest.raises(NoTokenError):
        await used.authorize()
    program.prints("printed")
    assert (await used.authorize()).token == "printed"


def test_a_command_is_run_again_ahead_of_what_its_token_says_of_its_end(program: Program):
    clock = MockClock()  # stands still but for the jumps below: programs run in real time

    async def until(condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up_at
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        used = credentials(token=program.secret)
        program.prints(jwt_like(EPOCH + 1000))
        async with anyio.create_task_group() as group:
            group.start_soon(used.run)
            await until(lambda: used.token_expires_at == EPOCH + 1000)
            program.prints(jwt_like(EPOCH + 2000))
            clock.jump(890)
            await trio.testing.wait_all_tasks_blocked()
            assert program.runs == 1
            clock.jump(15)
            await until(lambda: used.token_expires_at == EPOCH + 2000)
            assert program.runs == 2
            group.cancel_scope.cancel()

    trio.run(main, clock=clock)


class OldTokens:
    """A source whose tokens have expired when they come, by our clock at least."""

    key = "intake.token"
    look_interval_s = math.inf
    pause_s = 0.0
    fetches = 0

    async def fetch(self, *, afresh: bool) -> Token:
        self.fetches += 1
        return expiring(f"{self.fetches}", -5000, since=anyio.current_time(), wall_since=EPOCH, is_sure=False)


def test_tokens_that_seem_old_are_used_and_their_source_is_not_asked_over_and_over(rng: Random):
    async def main() -> None:
        source = OldTokens()
        cache = TokenCache(source, noun="token", now=anyio.current_time, rng=rng)
        async with anyio.create_task_group() as group:
            group.start_soon(cache.run)
            for _ in range(3600):
                await anyio.sleep(1)
                assert await cache.get() == f"{source.fetches}"
            assert 30 < source.fetches < 240
            group.cancel_scope.cancel()

    in_virtual_time(main)


# --- key pairs ---

PAIR = [LiteralSecret("key-1"), LiteralSecret("key-2")]


async def test_a_refused_key_gives_way_to_the_other_one_and_back(clock: HandClock):
    used = by_hand(clock, keys=PAIR)
    first = await used.authorize()
    with capture_logs() as logs:
        assert [used.refuse_key(first) for _ in range(64)] == [True] * 64, "one switch, and all may try again"
        second = await used.authorize()
        assert second.subscription_key == "key-2"
        used.note_accepted()
        assert used.refuse_key(second), "the first was not refused since"
        assert (await used.authorize()).subscription_key == "key-1"
    switches = [(each["log_level"], each["key"]) for each in logs if each["event"] == "key_switched"]
    assert switches == [("warning", "intake.subscription_key_secondary"), ("warning", "intake.subscription_key")]


async def test_two_refused_keys_take_turns_but_are_not_worth_trying_at_once(clock: HandClock):
    used = by_hand(clock, keys=PAIR)
    keys, worth = [], []
    with capture_logs() as logs:
        for _ in range(6):
            authorization = await used.authorize()
            keys.append(authorization.subscription_key)
            worth.append(used.refuse_key(authorization))
    assert keys == ["key-1", "key-2"] * 3
    assert worth == [True, False, False, False, False, False]
    assert told(logs) == ["key_switched"], "the turns are not told"


async def test_a_single_key_stays(clock: HandClock):
    used = by_hand(clock)
    for _ in range(3):
        authorization = await used.authorize()
        assert authorization.subscription_key == "key-1"
        assert not used.refuse_key(authorization)


async def test_two_equal_keys_are_one(clock: HandClock):
    used = by_hand(clock, keys=[LiteralSecret("key-1"), LiteralSecret("key-1")])
    used.refuse_key(await used.authorize())
    assert not used.refuse_key(await used.authorize())


async def test_a_replaced_key_is_worth_trying_when_its_turn_comes(clock: HandClock, tmp_path: Path):
    write(tmp_path / "key", "key-1")
    used = by_hand(clock, keys=[_file(tmp_path / "key"), LiteralSecret("key-2")])
    used.refuse_key(await used.authorize())
    write(tmp_path / "key", "key-3")
    assert not used.refuse_key(await used.authorize()), "it is not known yet that the first was replaced"
    assert (await used.authorize()).subscription_key == "key-3"


async def test_a_key_by_command_is_asked_for_every_ten_seconds_at_most(clock: HandClock, program: Program):
    used = by_hand(clock, keys=[program.secret])
    refused = await used.authorize()
    program.prints("printed-2")
    for _ in range(10):
        used.refuse_key(refused)
        assert await used.authorize() == refused
        clock.now_s += 0.99
    assert program.runs == 1
    clock.now_s += 1
    used.refuse_key(refused)
    assert (await used.authorize()).subscription_key == "printed-2"
    assert program.runs == 2


async def test_a_failing_key_command_is_left_in_peace_for_ten_seconds(clock: HandClock, program: Program):
    program.fails()
    used = by_hand(clock, keys=[program.secret])
    for wait_s in (None, 10, 6):
        with pytest.raises(NoTokenError, match=r"intake\.subscription_key: sh failed") as caught:
            await used.authorize()
        assert (caught.value.reason, caught.value.retry_after_s) == ("credentials", wait_s)
        clock.now_s += 0 if wait_s is None else 4
    assert program.runs == 1
    program.prints("printed")
    clock.now_s += 2
    assert (await used.authorize()).subscription_key == "printed"


async def test_a_key_that_cannot_be_had_gives_way_to_the_other_one(clock: HandClock, program: Program):
    program.fails()
    used = by_hand(clock, keys=[program.secret, LiteralSecret("key-2")])
    with pytest.raises(NoTokenError):
        await used.authorize()
    assert (await used.authorize()).subscription_key == "key-2"


# --- nothing is shown ---

CANARY = "Zx9unmistakable"


def assert_hidden(*things: object) -> None:
    for thing in things:
        text = f"{thing!r} {thing}"
        if isinstance(thing, BaseException):
            text += "".join(traceback.format_exception(thing))
            for linked in (thing.__cause__, thing.__context__):
                text += "" if linked is None else f"{linked!r} {vars(linked)}"
        assert CANARY not in text, f"a {type(thing).__name__} shows a secret"


@pytest.mark.parametrize("kind", ["oauth2", "constant", "file", "command"])
async def test_no_secret_is_in_a_log_a_repr_or_an_error(clock: HandClock, tmp_path: Path, program: Program, kind: str):
    program.prints(f"{CANARY}-printed")
    file = tmp_path / "secret"
    write(file, f"{CANARY}-file")
    constant = LiteralSecret(f"{CANARY}-constant")
    secret = {"file": _file(file), "command": program.secret}.get(kind, constant)
    script = [
        granted(f"{CANARY}.{CANARY}.{CANARY}"),
        granted(f"{CANARY}\n"),
        granted(CANARY, token_type=CANARY),
        answer(400, retry_after=CANARY, error=CANARY, error_description=CANARY, trace_id=CANARY),
        answer(401, error="invalid_client", error_description=CANARY, correlation_id=f"{CANARY}"),
        NoAnswerError("read_timeout", "no answer"),
    ]
    settings = password_grant(username=CANARY, password=secret, client_secret=secret, client_id=CANARY, scope=CANARY)
    endpoint = TokenEndpoint(*script)
    endpoint.mood = granted(f"{CANARY}-granted")
    used = credentials(
        endpoint,
        settings=settings,
        token=None if kind == "oauth2" else secret,
        keys=[secret, constant],
        now=clock.now,
        wall_time=clock.wall_time,
    )
    errors: list[object] = []
    with capture_logs() as logs:
        for turn in range(12):
            clock.now_s += 20
            if turn == 8:
                write(file, f"{CANARY}\n{CANARY}")
                program.prints(f"{CANARY}\n{CANARY}")
            if turn == 10:
                file.write_bytes(CANARY.encode() + b"\xff")
                program.fails()
            try:
                authorization = await used.authorize()
            except NoTokenError as error:
                errors.append(error)
                continue
            assert CANARY in authorization.token
            assert CANARY in authorization.subscription_key
            used.refuse_token(authorization)
            used.refuse_key(authorization)
            assert_hidden(authorization)
    assert len(logs) > 1
    assert errors or kind == "constant"
    own = [each for each in gc.get_objects() if str(type(each).__module__).startswith("shipper.delivery.")]
    assert used in own
    assert_hidden(logs, *errors, *own, Token(CANARY))


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
def test_what_is_no_date_changes_nothing(date: str):
    skew = ClockSkew()
    skew.note("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_747.0)
    skew.note(date, 5.0)
    assert skew.seconds == 30


def test_a_skew_is_told_once_again_when_it_grows_and_when_it_is_over():
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
