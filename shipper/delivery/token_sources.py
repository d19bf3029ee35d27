"""Sources of tokens and keys: secrets that may be replaced where they are kept. `oauth2` is the other source."""

from __future__ import annotations

import binascii
import math
from base64 import urlsafe_b64decode
from collections.abc import Callable
from typing import Final, Literal, Protocol

import anyio.to_thread
import msgspec
from msgspec import Struct

from shipper.config.secrets import Secret, SecretReference, check_secret, fetch_secret, resolve_secret
from shipper.model.errors import ConfigError
from shipper.system.files import identity_of

_FILE_LOOK_INTERVAL_S: Final = 1.0
_MARGIN_S: Final = 60.0
LIFETIME_MAX_S: Final = 10 * 366 * 86_400.0  # a number beyond it is a mistake, and no clock could wait for it

Reason = Literal["token_endpoint", "token", "credentials"]


class NoTokenError(Exception):
    """
    There is no token or key to send a request with.

    Attributes:
        reason: `token_endpoint`: it is away or answers nonsense; `token`: it refuses what it was asked with;
            `credentials`: a secret cannot be had from where it is kept.
        message: What happened and what to do, for a person; never a secret.
        retry_after_s: The wait that was asked for, seconds; None if none was.
        is_set_up_fault: Somebody has to put something right; waiting alone is of no use.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        retry_after_s: float | None = None,
        *,
        is_set_up_fault: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.is_set_up_fault = reason != "token_endpoint" if is_set_up_fault is None else is_set_up_fault


class Token(Struct, frozen=True):
    """
    A token or key, with what is known of its life.

    Attributes:
        expires_at: On the clock that does not jump; None if it is not known.
        refresh_at: When a successor should be fetched, on the same clock; None = never.
        wall_expires_at: The same as `expires_at`, seconds since the epoch.
        is_used_when_expired: Its expiry is its own claim, measured by a clock that may be wrong: the service decides.
    """

    value: str
    expires_at: float | None = None
    refresh_at: float | None = None
    wall_expires_at: float | None = None
    is_used_when_expired: bool = True

    def __repr__(self) -> str:
        return f"Token(***, expires_at={self.expires_at})"


class TokenSource(Protocol):
    """
    Attributes:
        key: The setting's dotted name, for messages.
        look_interval_s: How often to look for a replacement although the token is good; infinite = never.
        pause_s: Minimum time between two fetches.
    """

    key: str
    look_interval_s: float
    pause_s: float

    async def fetch(self, *, afresh: bool) -> Token:
        """
        Fetch the current token.

        Args:
            afresh: Read the secret again even if it seems unchanged, as the last one is of no use, or there was none.
        Raises:
            NoTokenError: There is none.
        """


def expiring(value: str, lifetime_s: float, *, since: float, wall_since: float, is_sure: bool) -> Token:
    """
    Make a token of limited life.

    Args:
        lifetime_s: Seconds; not positive if it is over already.
        since: The moment from which the lifetime counts, on the clock that does not jump.
        wall_since: The same moment, seconds since the epoch.
        is_sure: Whether it must not be used after its end.
    """
    lifetime_s = min(lifetime_s, LIFETIME_MAX_S)
    # The quarter is for tokens that live for seconds: they are not to be refreshed all the time.
    margin_s = min(max(_MARGIN_S, 0.1 * lifetime_s), lifetime_s / 4)
    return Token(value, since + lifetime_s, since + lifetime_s - margin_s, wall_since + lifetime_s, not is_sure)


class _Claims(Struct):
    exp: float | None = None


def expiry_claim(token: str) -> float | None:
    """
    Read when a token claims to expire; nothing is verified, and nothing else is read.

    Returns:
        Seconds since the epoch; None if it does not say so in the form of a JWT (RFC 7519).
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        payload = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        expiry = msgspec.json.decode(payload, type=_Claims).exp
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return expiry if expiry is not None and math.isfinite(expiry) and expiry > 0 else None


class SecretSource:
    """
    A secret of the settings as a source: constant, a file that may be replaced, or a command that is run again.

    Args:
        key: The setting's dotted name.
        pause_s: The least time between two runs of a command.
        now, wall_time: The clock that does not jump; seconds since the epoch.
    Raises:
        ConfigError: The variable, file or program is missing, or what is there is unfit.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        key: str,
        pause_s: float = 0.0,
        now: Callable[[], float],
        wall_time: Callable[[], float],
    ) -> None:
        self.key = key
        self._secret = secret
        self._file = secret.file if isinstance(secret, SecretReference) else None
        self._is_command = isinstance(secret, SecretReference) and secret.command is not None
        self.look_interval_s = _FILE_LOOK_INTERVAL_S if self._file is not None else math.inf
        self.pause_s = pause_s if self._is_command else 0.0
        self._now = now
        self._wall_time = wall_time
        self._seen: tuple[int, ...] | None = None
        self._value = ""
        if self._is_command:
            check_secret(secret, key=key)
        else:
            self._value = resolve_secret(secret, key=key)

    def __repr__(self) -> str:
        return f"<SecretSource {self.key}>"

    async def fetch(self, *, afresh: bool) -> Token:
        """Read the file if it has changed, or run the command; a constant stays what it was at the start."""
        try:
            if self._is_command:
                self._value = await fetch_secret(self._secret, key=self.key)
            elif self._file is not None:
                await anyio.to_thread.run_sync(self._read_if_changed, self._file, afresh)
        except ConfigError as error:
            raise NoTokenError("credentials", str(error)) from None
        return self._token()

    def _read_if_changed(self, path: str, afresh: bool) -> None:
        seen = identity_of(path)  # before reading: what changes in between is read once more
        if afresh or seen is None or seen != self._seen:
            self._value = resolve_secret(self._secret, key=self.key)
            self._seen = seen

    def _token(self) -> Token:
        expiry, now, wall_now = expiry_claim(self._value), self._now(), self._wall_time()
        if expiry is None:
            return Token(self._value)
        token = expiring(self._value, expiry - wall_now, since=now, wall_since=wall_now, is_sure=False)
        is_constant = self._file is None and not self._is_command
        return msgspec.structs.replace(token, refresh_at=None) if is_constant else token
