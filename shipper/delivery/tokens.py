"""Caches tokens and keys and refreshes them, from secrets in the settings or from other sources."""

from __future__ import annotations

import copy
import math
from base64 import urlsafe_b64decode
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Literal, Protocol, TypeVar

import anyio
import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from shipper.config.secrets import LiteralSecret, Secret, SecretReference, check_secret, fetch_secret, resolve_secret
from shipper.delivery.waits import full_jitter_s
from shipper.model.errors import ConfigError

log = structlog.get_logger("delivery")

T = TypeVar("T")

LIFETIME_MAX_S: Final = 10 * 366 * 86_400.0  # longer lifetimes are mistakes, and could overflow a timer
_FILE_INTERVAL_S: Final = 1.0
_MARGIN_S: Final = 60.0
_RETRY_INITIAL_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0

Reason = Literal["token_endpoint", "token", "credentials"]


class NoTokenError(Exception):
    """
    No token or key is available for a request.

    Attributes:
        reason: `token_endpoint` = it is unavailable or its answer is invalid; `token` = it refuses the request;
            `credentials` = a secret cannot be read.
        message: What happened and what to do, for users; contains no secrets.
        retry_after_s: The wait that the token endpoint asked for, seconds; None = none.
        is_setup_problem: The problem must be fixed by a person; retrying does not help.
    """

    def __init__(
        self, reason: Reason, message: str, retry_after_s: float | None = None, is_setup_problem: bool | None = None
    ) -> None:
        super().__init__(reason, message, retry_after_s, is_setup_problem)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.is_setup_problem = reason != "token_endpoint" if is_setup_problem is None else is_setup_problem

    def __str__(self) -> str:
        return self.message


class Token(Struct, frozen=True):
    """A token or key and its lifetime, as far as known."""

    value: str
    expires_at: float | None = None  # on the monotonic clock
    refresh_at: float | None = None  # when to fetch a successor, on the same clock; None = never
    wall_expires_at: float | None = None  # the same as `expires_at`, seconds since the epoch
    # The expiry is only claimed by the token itself, and our clock may be wrong, so leave the decision to the service.
    is_used_when_expired: bool = True

    def __repr__(self) -> str:
        return f"Token(***, expires_at={self.expires_at})"


class TokenSource(Protocol):
    key: str  # dotted name of the setting, for messages
    interval_s: float  # how often to check for a replacement of a valid token; infinite = never

    async def fetch(self) -> Token:
        """Fetch the current token; raise `NoTokenError` if there is none."""


class TokenCache:
    """Caches one token or key; fetches a new one before it expires and after it is refused, one fetch at a time."""

    def __init__(
        self, source: TokenSource, *, noun: Literal["token", "key"], now: Callable[[], float], rng: Random
    ) -> None:
        self.name = source.key
        self.last_value = ""  # the last token that was fetched, even if it was refused
        self._source = source
        self._noun = noun
        self._now = now
        self._rng = rng
        self._token: Token | None = None
        self._fetching = anyio.Lock()
        self._fetches = 0  # completed fetches, including failed ones
        self._attempts = 0  # consecutive fetches that returned no token, or one that is due for a refresh
        self._last_error: NoTokenError | None = None
        self._recheck_at = math.inf
        self._due_at = -math.inf  # when `run` fetches
        self._rescheduled = anyio.Event()
        self._has_logged_expiry = False

    @property
    def wall_expires_at(self) -> float | None:
        """When the token expires, seconds since the epoch; None if there is no token or its expiry is not known."""
        return None if self._token is None else self._token.wall_expires_at

    async def get(self) -> str:
        """Return the token, from the cache if it is still good; raise `NoTokenError` if fetching one fails."""
        if self._token is not None and self._now() >= self._recheck_at:
            self._recheck_at = self._now() + self._source.interval_s
            with suppress(NoTokenError):  # logged; the current token is still good
                await self._fetch()
        while (token := self._good_token()) is None:
            await self._fetch()
        if not self._has_logged_expiry and token.expires_at is not None and self._now() >= token.expires_at:
            self._has_logged_expiry = True
            ago_s = self._now() - token.expires_at
            message = f"the {self._noun} in {self.name} expired {ago_s:.0f} s ago; the service will refuse it"
            log.warning(self._event("expired"), message=message)
        return token.value

    def refuse(self, value: str) -> None:
        """Discard the cached token if its value is the one that was refused."""
        if self._token is not None and self._token.value == value:
            self._token = None

    async def run(self) -> None:
        """Refresh the token whenever it is due, until cancelled."""
        while True:
            if self._now() >= self._due_at:
                with suppress(NoTokenError):  # logged, and retried later
                    await self._fetch()
            else:
                rescheduled = self._rescheduled
                with anyio.move_on_after(self._due_at - self._now()):
                    await rescheduled.wait()

    def _good_token(self) -> Token | None:
        token = self._token
        if token is None or token.expires_at is None or token.is_used_when_expired or self._now() < token.expires_at:
            return token
        return None

    async def _fetch(self) -> None:
        """Fetch a token, or wait for the fetch in progress; raise `NoTokenError` if it fails."""
        fetches = self._fetches
        async with self._fetching:
            if self._fetches == fetches:
                try:
                    self._note_token(await self._source.fetch())
                except NoTokenError as error:
                    self._note_error(error)
                    raise
            elif self._last_error is not None:
                raise copy.copy(self._last_error)  # otherwise it would accumulate the tracebacks of all waiters

    def _note_token(self, token: Token) -> None:
        now = self._now()
        self._fetches += 1
        self._recheck_at = now + self._source.interval_s
        if self._last_error is not None:
            self._last_error = None
            log.info(self._event("recovered"), key=self.name)
        if token.value != self.last_value:
            self.last_value, self._has_logged_expiry = token.value, False
            expires_in_s = None if token.expires_at is None else round(token.expires_at - now, 3)
            log.debug(self._event("fetched"), key=self.name, expires_in_seconds=expires_in_s)
        self._token = token
        due_at = math.inf if token.refresh_at is None else token.refresh_at
        if due_at > now:
            self._attempts = 0
        self._schedule(due_at if due_at > now else now + self._backoff_s())

    def _note_error(self, error: NoTokenError) -> None:
        self._fetches += 1
        backoff_s = self._backoff_s()
        self._schedule(self._now() + (backoff_s if error.retry_after_s is None else error.retry_after_s))
        is_logged = self._last_error is not None and self._last_error.reason == error.reason
        self._last_error = error
        (log.debug if is_logged else log.warning)(
            self._event("refresh_failed"),
            key=self.name,
            reason=error.reason,
            message=error.message,
            has_token=self._good_token() is not None,
        )

    def _event(self, name: str) -> str:
        return f"{self._noun}_{name}"

    def _backoff_s(self) -> float:
        self._attempts += 1
        return full_jitter_s(self._attempts, initial_s=_RETRY_INITIAL_S, max_s=_RETRY_MAX_S, rng=self._rng)

    def _schedule(self, moment: float) -> None:
        self._due_at = moment
        self._rescheduled.set()
        self._rescheduled = anyio.Event()


class SecretSource:
    """
    Reads a secret of the settings: a constant, a file that may be replaced, or the output of a command.

    Raises:
        ConfigError: The variable, file or program is missing, or the secret is invalid.
    """

    def __init__(self, secret: Secret, *, key: str, now: Callable[[], float], wall_time: Callable[[], float]) -> None:
        check_secret(secret, key=key)
        if isinstance(secret, SecretReference) and secret.env is not None:
            secret = LiteralSecret(resolve_secret(secret, key=key))  # constant from now on
        self.key = key
        self.interval_s = _FILE_INTERVAL_S if isinstance(secret, SecretReference) and secret.file else math.inf
        self._secret = secret
        self._now = now
        self._wall_time = wall_time

    async def fetch(self) -> Token:
        """Read the file, run the command, or return the constant."""
        try:
            value = await fetch_secret(self._secret, key=self.key)
        except ConfigError as error:
            raise NoTokenError("credentials", str(error)) from None
        expiry, now, wall_now = expiry_claim(value), self._now(), self._wall_time()
        if expiry is None:
            return Token(value)
        token = expiring_token(value, expiry - wall_now, since=now, wall_since=wall_now, is_sure=False)
        return replace(token, refresh_at=None) if isinstance(self._secret, LiteralSecret) else token


def expiring_token(value: str, lifetime_s: float, *, since: float, wall_since: float, is_sure: bool) -> Token:
    """
    Make a token with a limited lifetime.

    Args:
        lifetime_s: Seconds; zero or negative if the token has expired.
        is_sure: Whether the token must not be used after it has expired.
    """
    lifetime_s = min(lifetime_s, LIFETIME_MAX_S)
    # A quarter at most, so that tokens valid for seconds are not refreshed constantly.
    margin_s = min(max(_MARGIN_S, 0.1 * lifetime_s), lifetime_s / 4)
    return Token(value, since + lifetime_s, since + lifetime_s - margin_s, wall_since + lifetime_s, not is_sure)


class _Claims(Struct):
    exp: float | None = None


def expiry_claim(token: str) -> float | None:
    """Return the `exp` claim of a JWT (RFC 7519), seconds since the epoch, or None; the signature is not verified."""
    claims = jwt_claims(token, _Claims) if token.count(".") == 2 else None
    expiry = claims.exp if claims else None
    return expiry if expiry is not None and math.isfinite(expiry) and expiry > 0 else None


def jwt_claims(token: str, type: type[T]) -> T | None:
    """Decode the claims of a JWT, even of one without a signature; return None if it is none."""
    with suppress(IndexError, ValueError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(urlsafe_b64decode(token.split(".")[1] + "=="), type=type)
    return None
