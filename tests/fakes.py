"""Fakes for the edges of the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from shipper.config.settings import RecordsSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization, Credentials
from shipper.delivery.endpoint import NoAnswerError


def strict_records(dedupe_window: int = 0) -> RecordsSettings:
    """Settings with which a record is sent unchanged or not at all."""
    return RecordsSettings(mode="strict", unknown_fields="reject", dedupe_window=dedupe_window)


OK = Answer(status=202, content_type="application/json", retry_after="", body=b"{}")


def answer(status: int, retry_after: str = "", body: bytes = b"") -> Answer:
    return Answer(status=status, content_type="application/json", retry_after=retry_after, body=body)


def failing(code: int) -> Callable[..., Any]:
    """Return a system call that always fails with this error."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class HandClock:
    """A clock that only the test advances."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class ScriptedEndpoint:
    """
    Answers with the next item of a script; after the last, with 202.

    An item is an answer, an error, or an event to wait for, after which the request is accepted.
    """

    certificate_expires_at: float | None = None

    def __init__(self, script: Sequence[Answer | NoAnswerError | anyio.Event] = ()) -> None:
        self.script = list(script)
        self.bodies: list[bytes] = []
        self.is_closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        authorization: Authorization,
        traceparent: str = "",
        encoding: str = "",
        max_answer_bytes: int,
    ) -> Answer:
        assert (method, path) == ("POST", "/dim/v1/player/activities")
        self.bodies.append(body)
        await anyio.lowlevel.checkpoint()
        item = self.script.pop(0) if self.script else OK
        if isinstance(item, NoAnswerError):
            raise item
        if isinstance(item, anyio.Event):
            await item.wait()
            return OK
        return item

    async def aclose(self) -> None:
        self.is_closed = True


class FixedCredentials(Credentials):
    """
    Provides numbered tokens and keys; each refusal advances to the next.

    Args:
        other_keys: Number of keys after the first.
    """

    def __init__(self, *, other_keys: int = 0) -> None:
        self.other_keys = other_keys
        self.tokens = 1
        self.keys = 1
        self._refused_keys = set()

    def __repr__(self) -> str:
        return f"<FixedCredentials token-{self.tokens} key-{self.keys}>"

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def authorize(self) -> Authorization:
        return Authorization(token=f"token-{self.tokens}", subscription_key=f"key-{self.keys}")

    def refuse_token(self, refused: Authorization) -> None:
        self.tokens += refused.token == f"token-{self.tokens}"

    def refuse_key(self, refused: Authorization) -> bool:
        if refused.subscription_key != f"key-{self.keys}":
            return True
        self.keys += self.keys <= self.other_keys
        return refused.subscription_key != f"key-{self.keys}"
