"""What a request to one endpoint is authorised with: an access token and one of a pair of subscription keys."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

import anyio
import structlog

from shipper.config.secrets import MASK
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.oauth2 import OAuth2Source, PostForm
from shipper.delivery.token_cache import TokenCache
from shipper.delivery.token_sources import NoTokenError, SecretSource, TokenSource
from shipper.delivery.verdicts import Action
from shipper.delivery.waits import epoch_s

__all__ = [
    "SKEW_TOLD_S",
    "Authorization",
    "ClockSkew",
    "Credentials",
    "NoTokenError",
    "PostForm",
    "credentials_of",
]

log = structlog.get_logger("delivery")

SKEW_TOLD_S: Final = 60.0
_SKEW_UNSURE_S: Final = 2.0  # a date has whole seconds, and the answer took its time
_KEY_COMMAND_PAUSE_S: Final = 10.0


class Authorization(NamedTuple):
    """The two secrets of a request; neither is shown."""

    token: str
    subscription_key: str

    def __repr__(self) -> str:
        return f"Authorization({MASK})"


class Credentials:
    """
    The credentials of one endpoint, shared by all who send to it.

    Args:
        settings: With a subscription key, and a token or `oauth2`.
        section: The settings' section, `intake` or `report`, for messages.
        post_form: Sends a form to the token endpoint.
        now: The clock that does not jump.
        wall_time: Seconds since the epoch.
    Raises:
        ConfigError: A secret's variable, file or program is missing, or what is there is unfit.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        section: str,
        post_form: PostForm,
        now: Callable[[], float] = anyio.current_time,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        source: TokenSource
        if settings.oauth2 is not None:
            source = OAuth2Source(
                settings.oauth2, key=f"{section}.oauth2", post_form=post_form, now=now, wall_time=wall_time
            )
        else:
            assert settings.token is not None, "require_endpoint was not asked"
            source = SecretSource(settings.token, key=f"{section}.token", now=now, wall_time=wall_time)
        self._token = TokenCache(source, noun="token", now=now, rng=rng)
        assert settings.subscription_key is not None, "require_endpoint was not asked"
        pair = {
            f"{section}.subscription_key": settings.subscription_key,
            f"{section}.subscription_key_secondary": settings.subscription_key_secondary,
        }
        sources = [
            SecretSource(secret, key=key, pause_s=_KEY_COMMAND_PAUSE_S, now=now, wall_time=wall_time)
            for key, secret in pair.items()
            if secret is not None
        ]
        self._keys = [TokenCache(each, noun="key", now=now, rng=rng) for each in sources]
        self._index = 0
        self._refused_keys: set[str] = set()  # since the last acceptance

    def __repr__(self) -> str:
        return f"<Credentials {self._token} {self._keys[self._index]}>"

    @property
    def token_expires_at(self) -> float | None:
        """When the token expires, seconds since the epoch; None if there is none, or that is not known."""
        return self._token.wall_expires_at

    async def run(self) -> None:
        """Keep the token fresh ahead of its expiry until this is cancelled; without it, `authorize` fetches."""
        await self._token.run()

    async def authorize(self) -> Authorization:
        """
        Give what the next request is to be sent with, at once while the token is good.

        Raises:
            NoTokenError: There is no token or key, and none could be had just now.
        """
        token = await self._token.get()
        key = self._keys[self._index]
        try:
            return Authorization(token, await key.get())
        except NoTokenError:
            if self._keys[self._index] is key:  # and not switched by another caller
                self._switch_key()
            raise

    def learn(self, action: Action, used: Authorization) -> bool:
        """
        Take note of what an answer says of the authorization.

        Returns:
            Whether it makes sense to send the same again at once, with another one.
        """
        if action is Action.RENEW_TOKEN:
            self.refuse_token(used)
            return True
        if action is Action.CHANGE_KEY:
            return self.refuse_key(used)
        if action in {Action.ACCEPT, Action.BISECT, Action.HALVE}:
            self.note_accepted()
        return False

    def refuse_token(self, refused: Authorization) -> None:
        """
        The service does not take the token: have the next `authorize` fetch another.

        Args:
            refused: What the request was sent with; nothing happens if the token is another one by now.
        """
        self._token.refuse(refused.token)

    def refuse_key(self, refused: Authorization) -> bool:
        """
        The gateway does not take the subscription key: switch to the other one of the pair.

        Args:
            refused: What the request was sent with; nothing is switched if the key is another one by now.
        Returns:
            Whether the key is now one that was not refused since the last acceptance, so that it is worth trying.
        """
        self._refused_keys.add(refused.subscription_key)
        key = self._keys[self._index]
        if key.last_value == refused.subscription_key:
            key.refuse(refused.subscription_key)  # it may have been replaced when its turn comes again
            self._switch_key()
        return self._keys[self._index].last_value not in self._refused_keys

    def note_accepted(self) -> None:
        """A request went through, so no key is known to be bad."""
        self._refused_keys.clear()

    def _switch_key(self) -> None:
        if len(self._keys) == 1:
            return
        self._index = 1 - self._index
        key = self._keys[self._index]
        # While both are refused they take turns, which need not be told each time.
        tell = log.debug if key.last_value in self._refused_keys else log.warning
        tell("key_switched", key=key.name)


def credentials_of(
    endpoint: EndpointSettings,
    delivery: DeliverySettings,
    *,
    section: str,
    ssl_context: ssl.SSLContext | None,
    now: Callable[[], float] = anyio.current_time,
    wall_time: Callable[[], float],
    rng: Random,
) -> Credentials:
    """Make the credentials of an endpoint whose tokens come the way its requests go; arguments and errors as above."""

    async def post(url: str, fields: dict[str, str]) -> Answer:
        from shipper.delivery.forms import post_form  # needed by some

        return await post_form(
            url, fields, endpoint=endpoint, delivery=delivery, ssl_context=ssl_context, section=section
        )

    return Credentials(endpoint, section=section, post_form=post, now=now, wall_time=wall_time, rng=rng)


class ClockSkew:
    """How far the service's clock is from ours, told when it is so far that it may be why tokens are refused."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._told_s = 0.0

    def __repr__(self) -> str:
        return f"<ClockSkew {self.seconds:+.0f} s>"

    def note(self, date_header: str, wall_time: float) -> None:
        """
        Measure the skew by an answer.

        Args:
            date_header: `Date`, in any of the three forms of HTTP; what is no date is passed over.
            wall_time: Our clock when the answer came, seconds since the epoch.
        """
        server_time = epoch_s(date_header)
        if server_time is None:
            return
        skew_s = server_time - wall_time
        self.seconds = skew_s if abs(skew_s) > _SKEW_UNSURE_S else 0.0
        if abs(self.seconds) <= SKEW_TOLD_S:
            if self._told_s:
                log.info("clock_skew_over", seconds=round(self.seconds))
            self._told_s = 0.0
        elif not self._told_s or abs(self.seconds - self._told_s) > SKEW_TOLD_S:
            self._told_s = self.seconds
            where = "ahead of" if skew_s > 0 else "behind"
            message = f"the service's clock is {abs(skew_s):.0f} s {where} this machine's; check the time of both"
            log.warning("clock_skew", seconds=round(skew_s), message=message)
