"""Tokens and keys from the settings: replaced files, repeated commands, and key pairs."""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from trio.testing import MockClock

from shipper.config.secrets import LiteralSecret, SecretReference
from shipper.delivery.credentials import Credentials, NoTokenError
from shipper.delivery.endpoint import NoAnswerError
from shipper.delivery.tokens import Token, TokenCache, expiring_token
from shipper.delivery.verdicts import Action
from shipper.model.errors import ConfigError
from tests.fakes import HandClock
from tests.stage.loops import in_virtual_time
from tests.stage.token_endpoint import (
    EPOCH,
    TokenEndpoint,
    answer,
    credentials,
    granted,
    jwt_like,
    logged,
    password_grant,
)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def by_hand(clock: HandClock, endpoint: TokenEndpoint | None = None, **changes: Any) -> Credentials:
    """Return credentials with a clock that the test advances; as a wall clock, it starts at `EPOCH`."""
    how = {"token": LiteralSecret("a-token"), **changes}
    return credentials(endpoint, now=clock, wall_time=lambda: EPOCH + clock(), **how)


def write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def file_at(path: Path) -> SecretReference:
    return SecretReference(file=str(path))


def reading(clock: HandClock, setting: str, path: Path) -> Credentials:
    """Return credentials whose token or subscription key is in a file."""
    return by_hand(clock, **({"token": file_at(path)} if setting == "token" else {"keys": [file_at(path)]}))


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


async def test_a_constant_token_is_used_even_after_refusals(clock: HandClock, monkeypatch: pytest.MonkeyPatch):
    token = jwt_like(EPOCH + clock() + 10)
    monkeypatch.setenv("TOKEN", token)
    used = by_hand(clock, token=SecretReference(env="TOKEN"))
    monkeypatch.setenv("TOKEN", "another")
    with capture_logs() as logs:
        for _ in range(3):
            authorization = await used.authorize()
            assert authorization == (token, "key-1")
            used.refuse_token(authorization)
        assert used.token_expires_at is None, "the refusal was not noted"
        await used.authorize()
        assert used.token_expires_at == EPOCH + 1010
        assert logged(logs) == []
        clock.now += 25
        for _ in range(3):
            assert (await used.authorize()).token == token
    assert [each["message"] for each in logs if each["log_level"] == "warning"] == [
        "the token in intake.token expired 15 s ago; the service will refuse it"
    ]


@in_virtual_time
async def test_a_constant_token_needs_no_background_task():
    used = credentials(token=LiteralSecret(jwt_like(EPOCH + 10)))
    async with anyio.create_task_group() as group:
        group.start_soon(used.run)
        await trio.testing.wait_all_tasks_blocked()
        assert used.token_expires_at == EPOCH + 10
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
        group.cancel_scope.cancel()


@pytest.mark.parametrize("setting", ["token", "subscription_key"])
async def test_a_replaced_file_is_read_within_a_second(clock: HandClock, tmp_path: Path, setting: str):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "secret", f"the-{name}")
    (tmp_path / "data").symlink_to("old")
    (tmp_path / "secret").symlink_to("data/secret")
    used = reading(clock, setting, tmp_path / "secret")
    assert getattr(await used.authorize(), setting) == "the-old"
    # As with mounted secrets: the directory behind a link changes atomically.
    (tmp_path / "data_tmp").symlink_to("new")
    os.rename(tmp_path / "data_tmp", tmp_path / "data")
    clock.now += 0.9
    assert getattr(await used.authorize(), setting) == "the-old", "the file was examined too early"
    clock.now += 0.1
    assert getattr(await used.authorize(), setting) == "the-new"


@pytest.mark.parametrize("setting", ["token", "subscription_key"])
async def test_a_file_is_read_at_once_after_a_refusal(clock: HandClock, tmp_path: Path, setting: str):
    file = tmp_path / "secret"
    write(file, "the-old")
    used = reading(clock, setting, file)
    refused = await used.authorize()
    write(file, "the-new")
    assert await used.authorize() == refused, "the file was read again within a second"
    if setting == "token":
        used.refuse_token(refused)
    else:
        assert not used.refuse_key(refused), "another token was reported"
    assert getattr(await used.authorize(), setting) == "the-new"


@pytest.mark.parametrize("trouble", ["gone", "empty", "unfit", "open"])
async def test_a_file_that_is_briefly_missing_is_reported_once_and_its_token_stays_in_use(
    clock: HandClock, tmp_path: Path, trouble: str
):
    file = tmp_path / "token"
    write(file, "the-token")
    used = by_hand(clock, token=file_at(file))
    refused = await used.authorize()
    with capture_logs() as logs:
        if trouble == "gone":
            file.unlink()
        else:
            write(file, {"empty": "", "unfit": "two\nlines", "open": "the-other"}[trouble])
            file.chmod(0o644 if trouble == "open" else 0o600)
        for _ in range(20):
            clock.now += 0.25
            assert await used.authorize() == refused
        assert logged(logs) == ["token_refresh_failed"]
        assert logged(logs, "debug") == ["token_refresh_failed"] * 4, "the file was not checked once per second"
        used.refuse_token(refused)
        for _ in range(2):
            with pytest.raises(NoTokenError, match=r"intake\.token: ") as caught:
                await used.authorize()
            assert caught.value.reason == "credentials"
        file.unlink(missing_ok=True)
        write(file, "the-new")
        assert (await used.authorize()).token == "the-new"
    assert logged(logs) == ["token_refresh_failed"]
    assert logged(logs, "info") == ["token_recovered"]


def test_a_secret_missing_at_the_start_is_a_configuration_error(clock: HandClock):
    missing = [
        (SecretReference(env="NOT_SET"), "environment variable NOT_SET is not set"),
        (SecretReference(file="/nowhere"), "No such file"),
        (SecretReference(command=("no-such-program",)), "program 'no-such-program' cannot be found or executed"),
    ]
    for secret, says in missing:
        with pytest.raises(ConfigError, match=rf"intake\.token: .*{says}"):
            by_hand(clock, token=secret)
        with pytest.raises(ConfigError, match=rf"intake\.subscription_key: .*{says}"):
            by_hand(clock, keys=[secret])
        with pytest.raises(ConfigError, match=rf"intake\.subscription_key_secondary: .*{says}"):
            by_hand(clock, keys=[LiteralSecret("key-1"), secret])


async def test_a_command_is_run_when_it_is_needed_and_again_after_a_refusal(clock: HandClock, program: Program):
    used = by_hand(clock, token=program.secret)
    assert program.runs == 0
    for _ in range(3):
        assert (await used.authorize()).token == "printed-1"
        clock.now += 1000
    assert program.runs == 1
    refused = await used.authorize()
    program.prints("printed-2")
    async with anyio.create_task_group() as group:
        for _ in range(64):
            used.refuse_token(refused)
            group.start_soon(used.authorize)
    assert (await used.authorize()).token == "printed-2"
    assert program.runs == 2


async def test_the_last_token_of_a_failing_command_is_used_until_it_is_refused(clock: HandClock, program: Program):
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


def test_a_command_is_run_again_before_its_token_expires(program: Program):
    clock = MockClock()  # advances only by the steps below: programs run in real time

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
    """A source whose tokens have already expired by our clock."""

    key = "intake.token"
    interval_s = math.inf
    fetches = 0

    async def fetch(self) -> Token:
        self.fetches += 1
        return expiring_token(f"{self.fetches}", -5000, since=anyio.current_time(), wall_since=EPOCH, is_sure=False)


@in_virtual_time
async def test_tokens_that_seem_expired_are_used_and_their_source_is_not_asked_repeatedly(rng: Random):
    source = OldTokens()
    cache = TokenCache(source, noun="token", now=anyio.current_time, rng=rng)
    async with anyio.create_task_group() as group:
        group.start_soon(cache.run)
        for _ in range(3600):
            await anyio.sleep(1)
            assert await cache.get() == f"{source.fetches}"
        assert 30 < source.fetches < 240
        group.cancel_scope.cancel()


# --- key pairs ---

PAIR = [LiteralSecret("key-1"), LiteralSecret("key-2")]


async def test_a_refused_key_is_replaced_by_the_other_one_and_back(clock: HandClock):
    used = by_hand(clock, keys=PAIR)
    first = await used.authorize()
    with capture_logs() as logs:
        assert [used.refuse_key(first) for _ in range(64)] == [True] * 64, "the key was switched more than once"
        second = await used.authorize()
        assert second.subscription_key == "key-2"
        used.note_answer(Action.ACCEPT, second)
        assert used.refuse_key(second), "the first key was refused again"
        assert (await used.authorize()).subscription_key == "key-1"
    switches = [(each["log_level"], each["key"]) for each in logs if each["event"] == "key_switched"]
    assert switches == [("warning", "intake.subscription_key_secondary"), ("warning", "intake.subscription_key")]


async def test_two_refused_keys_alternate_but_do_not_justify_an_immediate_retry(clock: HandClock):
    used = by_hand(clock, keys=PAIR)
    keys, worth = [], []
    with capture_logs() as logs:
        for _ in range(6):
            authorization = await used.authorize()
            keys.append(authorization.subscription_key)
            worth.append(used.refuse_key(authorization))
    assert keys == ["key-1", "key-2"] * 3
    assert worth == [True, False, False, False, False, False]
    assert logged(logs) == ["key_switched"], "alternating keys are logged"


async def test_a_single_key_is_never_replaced(clock: HandClock):
    used = by_hand(clock)
    for _ in range(3):
        authorization = await used.authorize()
        assert authorization.subscription_key == "key-1"
        assert not used.refuse_key(authorization)


async def test_two_equal_keys_count_as_one(clock: HandClock):
    used = by_hand(clock, keys=PAIR[:1] * 2)
    used.refuse_key(await used.authorize())
    assert not used.refuse_key(await used.authorize())


async def test_a_replaced_key_justifies_a_retry_when_its_turn_comes(clock: HandClock, tmp_path: Path):
    write(tmp_path / "key", "key-1")
    used = by_hand(clock, keys=[file_at(tmp_path / "key"), LiteralSecret("key-2")])
    used.refuse_key(await used.authorize())
    write(tmp_path / "key", "key-3")
    assert not used.refuse_key(await used.authorize()), "the replacement was noticed too early"
    assert (await used.authorize()).subscription_key == "key-3"


async def test_a_key_by_command_is_fetched_again_after_a_refusal(clock: HandClock, program: Program):
    used = by_hand(clock, keys=[program.secret])
    refused = await used.authorize()
    program.prints("printed-2")
    assert await used.authorize() == refused
    used.refuse_key(refused)
    assert (await used.authorize()).subscription_key == "printed-2"
    assert program.runs == 2


async def test_an_unavailable_key_is_replaced_by_the_other_one(clock: HandClock, program: Program):
    program.fails()
    used = by_hand(clock, keys=[program.secret, LiteralSecret("key-2")])
    with pytest.raises(NoTokenError):
        await used.authorize()
    assert (await used.authorize()).subscription_key == "key-2"


# --- secrets are not shown ---

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
    secret = {"file": file_at(file), "command": program.secret}.get(kind, constant)
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
    token = None if kind == "oauth2" else secret
    used = by_hand(clock, endpoint, settings=settings, token=token, keys=[secret, constant])
    errors: list[object] = []
    with capture_logs() as logs:
        for turn in range(12):
            clock.now += 20
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
