"""Keeps one token or key fresh: fetched by one caller at a time, ahead of its expiry, and again once it was refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Literal

import anyio
import structlog

from shipper.delivery.token_sources import NoTokenError, Token, TokenSource
from shipper.delivery.waits import full_jitter_s

log = structlog.get_logger("delivery")

_RETRY_INITIAL_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0


class _Fetch:
    """A fetch under way: all who want a token wait for its end. Without an error and a token, it was cancelled."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.error: NoTokenError | None = None


class TokenCache:
    """
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
        self._fetch_under_way: _Fetch | None = None
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
        Give the token, at once while it is good.

        Raises:
            NoTokenError: There is none, and the fetch that was under way, or that this call began, failed.
        """
        now = self._now()
        if self._token is not None and now >= self._look_at:
            self._look_at = now + self._source.look_interval_s
            with suppress(NoTokenError):  # told; the token we have is still good
                await self._fetch()
        while (token := self._good_token()) is None:
            await self._fetch()
        if not self._has_told_expiry and token.expires_at is not None and self._now() >= token.expires_at:
            self._tell_expiry(self._now() - token.expires_at)
        return token.value

    def refuse(self, value: str) -> None:
        """Forget the token if it is the one that was refused; not so soon that its source would be overrun."""
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
                with suppress(NoTokenError):  # told, and tried again later
                    await self._fetch()

    def _good_token(self) -> Token | None:
        token = self._token
        if token is None or token.expires_at is None or token.is_used_when_expired or self._now() < token.expires_at:
            return token
        return None

    def _tell_expiry(self, ago_s: float) -> None:
        self._has_told_expiry = True
        log.warning(
            self._event("expired"),
            message=f"the {self._noun} in {self.name} has expired {ago_s:.0f} s ago; the service will refuse it",
        )

    async def _fetch(self) -> None:
        """
        Fetch, or wait for the fetch that is under way.

        Raises:
            NoTokenError: It failed.
        """
        if self._fetch_under_way is not None:
            fetch = self._fetch_under_way
            await fetch.ended.wait()
            if fetch.error is not None:
                raise _copy(fetch.error)
            return
        left_s = self._ended_at + self._source.pause_s - self._now()
        if self._last_error is not None and left_s > 0:
            raise _copy(self._last_error, retry_after_s=left_s)
        fetch = self._fetch_under_way = _Fetch()
        try:
            self._note_token(await self._source.fetch(afresh=self._token is None))
        except NoTokenError as error:
            fetch.error = error
            self._note_error(error)
            raise
        finally:
            self._fetch_under_way = None
            fetch.ended.set()

    def _note_token(self, token: Token) -> None:
        now = self._ended_at = self._now()
        self._look_at = now + self._source.look_interval_s
        if self._told_reason:
            log.info(self._event("recovered"), key=self.name)
        self._told_reason, self._last_error = "", None
        # The same one again is due when it was due before, however short its life has become by now.
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
    """Make an error of the waiter's own: one that several tasks raise would collect the tracebacks of all."""
    return NoTokenError(
        error.reason,
        error.message,
        retry_after_s or error.retry_after_s,
        is_set_up_fault=error.is_set_up_fault,
    )
