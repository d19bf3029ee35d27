"""The credentials of one endpoint: an access token, and one of a pair of subscription keys."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Literal, NamedTuple

import anyio
import structlog

from shipper.config.secrets import MASK
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.oauth2 import OAuth2Source, PostForm
from shipper.delivery.token_sources import NoTokenError, SecretSource, Token, TokenSource
from shipper.delivery.verdicts import Action
from shipper.delivery.waits import epoch_s, full_jitter_s

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
_RETRY_INITIAL_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0


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
        Return the credentials for the next request, at once while the token is good.

        Raises:
            NoTokenError: There is no token or key, and none could be fetched.
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
        Note what an answer says of the credentials.

        Returns:
            Whether it is worth sending the same again at once, with other credentials.
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
        Note that the service refuses the token: the next `authorize` fetches another.

        Args:
            refused: What the request was sent with; nothing happens if the token is another one by now.
        """
        self._token.refuse(refused.token)

    def refuse_key(self, refused: Authorization) -> bool:
        """
        Note that the gateway refuses the subscription key, and switch to the other one of the pair.

        Args:
            refused: What the request was sent with; nothing is switched if the key is another one by now.
        Returns:
            Whether the current key was not refused since the last acceptance, and is worth trying.
        """
        self._refused_keys.add(refused.subscription_key)
        key = self._keys[self._index]
        if key.last_value == refused.subscription_key:
            key.refuse(refused.subscription_key)  # it may have been replaced when its turn comes again
            self._switch_key()
        return self._keys[self._index].last_value not in self._refused_keys

    def note_accepted(self) -> None:
        """Note that a request was accepted: no key is known to be bad."""
        self._refused_keys.clear()

    def _switch_key(self) -> None:
        if len(self._keys) == 1:
            return
        self._index = 1 - self._index
        key = self._keys[self._index]
        # While both are refused they alternate, which is logged once.
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
    """Make the credentials of an endpoint; arguments and errors as above."""

    async def post(url: str, fields: dict[str, str]) -> Answer:
        from shipper.delivery.forms import post_form  # needed by some

        return await post_form(
            url, fields, endpoint=endpoint, delivery=delivery, ssl_context=ssl_context, section=section
        )

    return Credentials(endpoint, section=section, post_form=post, now=now, wall_time=wall_time, rng=rng)


class TokenCache:
    """
    Keeps one token or key fresh: fetched by one caller at a time, ahead of its expiry, and again once it was refused.

    Args:
        noun: For the names of log events.
        now: The clock that does not jump.
    Attributes:
        name: The setting's dotted name.
        last_value: The last token that was fetched, refused or not; empty if there was none.
    """

    def __init__(
        self, source: TokenSource, *, noun: Literal["token", "key"], now: Callable[[], float], rng: Random
    ) -> None:
        self.name = source.key
        self.last_value = ""
        self._source = source
        self._noun = noun
        self._now = now
        self._rng = rng
        self._token: Token | None = None
        self._fetching = anyio.Lock()
        self._fetches = 0  # that had a result
        self._last_error: NoTokenError | None = None
        self._ended_at = -math.inf  # the last fetch
        self._look_at = math.inf
        self._refresh_at = -math.inf  # when the token is due
        self._try_at = -math.inf  # when `run` fetches, which is later if the last fetch was in vain
        self._try_changed = anyio.Event()
        self._vain_fetches = 0
        self._told_reason = ""
        self._has_told_expiry = False

    def __repr__(self) -> str:
        return f"<TokenCache {self.name} {'failing' if self._told_reason else 'good' if self._token else 'empty'}>"

    @property
    def wall_expires_at(self) -> float | None:
        """When the token expires, seconds since the epoch; None if there is none, or that is not known."""
        return None if self._token is None else self._token.wall_expires_at

    async def get(self) -> str:
        """
        Return the token, at once while it is good.

        Raises:
            NoTokenError: There is none, and fetching it failed.
        """
        now = self._now()
        if self._token is not None and now >= self._look_at:
            self._look_at = now + self._source.look_interval_s
            with suppress(NoTokenError):  # logged; the current token is still good
                await self._fetch()
        while (token := self._good_token()) is None:
            await self._fetch()
        if not self._has_told_expiry and token.expires_at is not None and self._now() >= token.expires_at:
            self._log_expiry(self._now() - token.expires_at)
        return token.value

    def refuse(self, value: str) -> None:
        """Forget the token if it is the one that was refused, but not within the pause of its source."""
        is_current = self._token is not None and self._token.value == value
        if is_current and self._now() >= self._ended_at + self._source.pause_s:
            self._token = None

    async def run(self) -> None:
        """Fetch a successor whenever one is due, until this is cancelled."""
        while True:
            wait_s = self._try_at - self._now()
            if wait_s > 0:
                try_changed = self._try_changed
                with anyio.move_on_after(wait_s):
                    await try_changed.wait()
            else:
                with suppress(NoTokenError):  # logged, and tried again later
                    await self._fetch()

    def _good_token(self) -> Token | None:
        token = self._token
        if token is None or token.expires_at is None or token.is_used_when_expired or self._now() < token.expires_at:
            return token
        return None

    def _log_expiry(self, ago_s: float) -> None:
        self._has_told_expiry = True
        log.warning(
            self._event("expired"),
            message=f"the {self._noun} in {self.name} expired {ago_s:.0f} s ago; the service will refuse it",
        )

    async def _fetch(self) -> None:
        """
        Fetch, or wait for the fetch that is under way.

        Raises:
            NoTokenError: It failed.
        """
        fetches = self._fetches
        async with self._fetching:
            if self._fetches == fetches:
                await self._fetch_now()
            elif self._last_error is not None:
                raise _copy(self._last_error)

    async def _fetch_now(self) -> None:
        left_s = self._ended_at + self._source.pause_s - self._now()
        if self._last_error is not None and left_s > 0:
            raise _copy(self._last_error, retry_after_s=left_s)
        try:
            self._note_token(await self._source.fetch(afresh=self._token is None))
        except NoTokenError as error:
            self._note_error(error)
            raise

    def _note_token(self, token: Token) -> None:
        now = self._ended_at = self._now()
        self._fetches += 1
        self._look_at = now + self._source.look_interval_s
        if self._told_reason:
            log.info(self._event("recovered"), key=self.name)
        self._told_reason, self._last_error = "", None
        # An unchanged token keeps the time at which it is due.
        if self._token is None or self._token.value != token.value:
            self._refresh_at = math.inf if token.refresh_at is None else token.refresh_at
        self._token = token
        if token.value != self.last_value:
            self.last_value, self._has_told_expiry = token.value, False
            expires_in_s = None if token.expires_at is None else round(token.expires_at - now, 3)
            log.debug(self._event("fetched"), key=self.name, expires_in_seconds=expires_in_s)
        if self._refresh_at > now:
            self._vain_fetches = 0
            self._set_try_at(self._refresh_at)
        else:
            self._set_try_at(now + self._backoff_s())

    def _note_error(self, error: NoTokenError) -> None:
        now = self._ended_at = self._now()
        self._fetches += 1
        self._last_error = error
        backoff_s = self._backoff_s()
        wait_s = backoff_s if error.retry_after_s is None else error.retry_after_s
        self._set_try_at(now + max(wait_s, self._source.pause_s))
        tell = log.debug if self._told_reason == error.reason else log.warning
        self._told_reason = error.reason
        tell(
            self._event("refresh_failed"),
            key=self.name,
            reason=error.reason,
            message=error.message,
            has_token=self._good_token() is not None,
        )

    def _backoff_s(self) -> float:
        self._vain_fetches += 1
        return full_jitter_s(self._vain_fetches, initial_s=_RETRY_INITIAL_S, max_s=_RETRY_MAX_S, rng=self._rng)

    def _event(self, what: str) -> str:
        return f"{self._noun}_{what}"

    def _set_try_at(self, moment: float) -> None:
        self._try_at = moment
        self._try_changed.set()
        self._try_changed = anyio.Event()


def _copy(error: NoTokenError, *, retry_after_s: float | None = None) -> NoTokenError:
    """Copy an error for each waiter: one that several tasks raise would collect the tracebacks of all."""
    return NoTokenError(
        error.reason,
        error.message,
        retry_after_s or error.retry_after_s,
        is_set_up_fault=error.is_set_up_fault,
    )


class ClockSkew:
    """The difference between the service's clock and ours; logged when it may be why tokens are refused."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._told_s = 0.0

    def __repr__(self) -> str:
        return f"<ClockSkew {self.seconds:+.0f} s>"

    def note(self, date_header: str, wall_time: float) -> None:
        """
        Measure the skew by an answer.

        Args:
            date_header: `Date`, in any of the three forms of HTTP; anything else is ignored.
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
