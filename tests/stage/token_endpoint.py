"""A token endpoint for tests of credentials, with helpers."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import anyio
import msgspec
from structlog.typing import EventDict

from shipper.config.secrets import LiteralSecret, Secret
from shipper.config.settings import DeliverySettings, EndpointSettings, OAuth2Settings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Credentials
from shipper.delivery.endpoint import ConnectionSettings, NoAnswerError

EPOCH = 1_700_000_000.0
TOKEN_URL = "https://login.example.com/token"


def wall_time() -> float:
    return EPOCH + anyio.current_time()


def answer(status: int = 200, retry_after: str = "", **document: Any) -> Answer:
    return Answer(status, "application/json", retry_after, msgspec.json.encode(document))


def granted(token: str = "a-token", **changes: Any) -> Answer:
    return answer(**{"token_type": "Bearer", "expires_in": 3600, "access_token": token} | changes)


def jwt_like(exp: object, header: str = "e30") -> str:
    """Return an unsigned token with an expiry."""
    return f"{header}.{urlsafe_b64encode(msgspec.json.encode({'exp': exp, 'sub': 'x'})).decode().rstrip('=')}.c2ln"


def logged(logs: list[EventDict], level: str = "warning") -> list[str]:
    return [entry["event"] for entry in logs if entry["log_level"] == level]


class TokenEndpoint:
    """
    Issues numbered tokens, or follows a script: an answer, an error, or `None` for no answer.

    Attributes:
        called_at: The times of the requests.
        ends_at: The expiry of each token, `lifetime_s` after the request.
        mood: What it does after the script, like an item of the script; "" = a token.
    """

    def __init__(
        self, *script: Answer | NoAnswerError | None, lifetime_s: float = 3600, latency_s: float = 0.0
    ) -> None:
        self.script = list(script)
        self.lifetime_s = lifetime_s
        self.latency_s = latency_s
        self.mood: Answer | NoAnswerError | str | None = ""
        self.called_at: list[float] = []
        self.forms: list[dict[str, str]] = []
        self.ends_at: dict[str, float] = {}
        self.is_busy = False

    async def __call__(self, url: str, form: dict[str, str]) -> Answer:
        assert url == TOKEN_URL
        assert not self.is_busy, "two requests at the same time"
        self.is_busy = True
        try:
            return await self._answer(form)
        finally:
            self.is_busy = False

    async def _answer(self, form: dict[str, str]) -> Answer:
        asked_at = anyio.current_time()
        self.called_at.append(asked_at)
        self.forms.append(form)
        item = self.script.pop(0) if self.script else self.mood
        if item is None:
            await anyio.sleep_forever()
        await anyio.sleep(self.latency_s)
        if isinstance(item, NoAnswerError):
            raise item
        if isinstance(item, Answer):
            return item
        token = f"token-{len(self.called_at)}"
        self.ends_at[token] = asked_at + self.lifetime_s
        return granted(token, expires_in=self.lifetime_s)


def oauth2(**changes: Any) -> OAuth2Settings:
    return OAuth2Settings(
        **{
            "token_url": TOKEN_URL,
            "client_id": "the-client",
            "client_secret": LiteralSecret("the-client-secret"),
            "scope": "api://x/.default",
        }
        | changes
    )


def password_grant(**changes: Any) -> OAuth2Settings:
    return oauth2(**{"grant": "password", "username": "a-user", "password": LiteralSecret("a-password")} | changes)


def credentials(
    endpoint: TokenEndpoint | Callable[..., Any] | None = None,
    *,
    keys: Sequence[Secret] = (LiteralSecret("key-1"),),
    token: Secret | None = None,
    settings: OAuth2Settings | None = None,
    now: Callable[[], float] = anyio.current_time,
    wall_time: Callable[[], float] = wall_time,
    rng: Random | None = None,
) -> Credentials:
    """Return credentials with tokens from an endpoint, or with the one passed."""
    endpoint_settings = EndpointSettings(
        base_url="https://intake.example.com",
        subscription_key=keys[0],
        subscription_key_secondary=keys[1] if len(keys) > 1 else None,
        token=token,
        oauth2=(settings or oauth2()) if token is None else None,
    )
    return Credentials(
        ConnectionSettings(endpoint_settings, DeliverySettings(), "intake"),
        post_form=endpoint or TokenEndpoint(),
        now=now,
        wall_time=wall_time,
        rng=rng or Random(1),
    )
