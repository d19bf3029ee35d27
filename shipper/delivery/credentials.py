"""The credentials of one endpoint: an access token, and one of a pair of subscription keys."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

import anyio
import structlog

from shipper.config.secrets import MASK
from shipper.delivery.answer import Answer
from shipper.delivery.connection import ConnectionSettings
from shipper.delivery.oauth2 import OAuth2Source, PostForm
from shipper.delivery.tokens import NoTokenError, SecretSource, TokenCache, TokenSource
from shipper.delivery.verdicts import Action
from shipper.delivery.waits import epoch_s

__all__ = ["SKEW_REPORTED_S", "Authorization", "ClockSkew", "Credentials", "NoTokenError"]

log = structlog.get_logger("delivery")

SKEW_REPORTED_S: Final = 60.0
_SKEW_UNSURE_S: Final = 2.0  # accuracy of the measurement: dates have whole seconds, and answers take time


class Authorization(NamedTuple):
    """The secrets of a request."""

    token: str
    subscription_key: str

    def __repr__(self) -> str:
        return f"Authorization({MASK})"


class Credentials:
    """
    The credentials of one endpoint, shared by all its senders.

    Args:
        settings: Must contain a subscription key, and a token or `oauth2`.
        post_form: Sends a form to the token endpoint; None = over a new connection.
    Raises:
        ConfigError: The variable, file or program of a secret is missing, or the secret is invalid.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        post_form: PostForm | None = None,
        now: Callable[[], float] = anyio.current_time,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        async def post(url: str, fields: dict[str, str]) -> Answer:
            from shipper.delivery.forms import post_form  # imported here because it is rarely needed

            return await post_form(url, fields, settings)

        endpoint, section = settings.endpoint, settings.section
        source: TokenSource
        if endpoint.oauth2 is not None:
            key = f"{section}.oauth2"
            source = OAuth2Source(endpoint.oauth2, key=key, post_form=post_form or post, now=now, wall_time=wall_time)
        else:
            assert endpoint.token is not None, "require_endpoint was not asked"
            source = SecretSource(endpoint.token, key=f"{section}.token", now=now, wall_time=wall_time)
        self._token = TokenCache(source, noun="token", now=now, rng=rng)
        assert endpoint.subscription_key is not None, "require_endpoint was not asked"
        pair = {
            f"{section}.subscription_key": endpoint.subscription_key,
            f"{section}.subscription_key_secondary": endpoint.subscription_key_secondary,
        }
        sources = [
            SecretSource(secret, key=key, now=now, wall_time=wall_time)
            for key, secret in pair.items()
            if secret is not None
        ]
        self._keys = [TokenCache(source, noun="key", now=now, rng=rng) for source in sources]
        self._index = 0
        self._refused_keys: set[str] = set()  # since the last acceptance

    @property
    def token_expires_at(self) -> float | None:
        """When the token expires, seconds since the epoch; None if there is no token or its expiry is not known."""
        return self._token.wall_expires_at

    async def run(self) -> None:
        """Refresh the token before it expires, until cancelled; optional, as `authorize` fetches one if needed."""
        await self._token.run()

    async def authorize(self) -> Authorization:
        """Return the credentials for the next request, mostly cached; raise `NoTokenError` if there are none."""
        token = await self._token.get()
        key = self._keys[self._index]
        try:
            return Authorization(token, await key.get())
        except NoTokenError:
            if self._keys[self._index] is key:  # no other caller has switched already
                self._switch_key()
            raise

    def note_answer(self, action: Action, used: Authorization) -> bool:
        """Note the verdict on an answer; return whether to resend the request at once, with other credentials."""
        if action is Action.RENEW_TOKEN:
            self.refuse_token(used)
            return True
        if action is Action.CHANGE_KEY:
            return self.refuse_key(used)
        if action in {Action.ACCEPT, Action.BISECT, Action.HALVE}:
            self._refused_keys.clear()
        return False

    def refuse_token(self, refused: Authorization) -> None:
        """Discard the token of a request, which the service refused; the next `authorize` fetches another."""
        self._token.refuse(refused.token)

    def refuse_key(self, refused: Authorization) -> bool:
        """Discard a refused key and switch to the other one; return whether that was not refused, too."""
        self._refused_keys.add(refused.subscription_key)
        key = self._keys[self._index]
        if key.last_value == refused.subscription_key:
            key.refuse(refused.subscription_key)  # read it again next time, because it may have been replaced
            self._switch_key()
        return self._keys[self._index].last_value not in self._refused_keys

    def _switch_key(self) -> None:
        if len(self._keys) == 1:
            return
        self._index = 1 - self._index
        key = self._keys[self._index]
        # While both are refused, they alternate; log this only once.
        (log.debug if key.last_value in self._refused_keys else log.warning)("key_switched", key=key.name)


class ClockSkew:
    """The difference between the service's clock and ours; logged if it is large enough to make tokens invalid."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._logged_s = 0.0

    def note(self, date_header: str, wall_time: float) -> None:
        """Measure the skew from the `Date` of an answer, if valid, and when it arrived by our clock."""
        server_time = epoch_s(date_header)
        if server_time is None:
            return
        skew_s = server_time - wall_time
        self.seconds = skew_s if abs(skew_s) > _SKEW_UNSURE_S else 0.0
        if abs(self.seconds) <= SKEW_REPORTED_S:
            if self._logged_s:
                log.info("clock_skew_over", seconds=round(self.seconds))
            self._logged_s = 0.0
        elif not self._logged_s or abs(self.seconds - self._logged_s) > SKEW_REPORTED_S:
            self._logged_s = self.seconds
            where = "ahead of" if skew_s > 0 else "behind"
            message = f"the service's clock is {abs(skew_s):.0f} s {where} this machine's; check both clocks"
            log.warning("clock_skew", seconds=round(skew_s), message=message)
