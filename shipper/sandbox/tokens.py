"""
Access tokens: issuing them at a token endpoint, and validating them for the gateway.

The endpoint behaves like the OAuth 2.0 endpoints of large identity platforms (RFC 6749 §4.3, §4.4, §5), with the same
error fields and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hmac import compare_digest
from math import ceil
from random import Random
from typing import Final, NamedTuple
from uuid import UUID

import jwt
import msgspec

from shipper.sandbox.clock import CallWindow
from shipper.sandbox.options import SandboxOptions

TOKEN_PATH: Final = "/oauth2/v2.0/token"
AUDIENCE: Final = "api://shipper-sandbox"
DEFAULT_SCOPE: Final = f"{AUDIENCE}/.default"

# Public, like the default subscription key: they only give access to a sandbox.
CLIENT_ID: Final = "sandbox-client"
CLIENT_SECRET: Final = "sandbox-client-secret"
USERNAME: Final = "sandbox-user"
PASSWORD: Final = "sandbox-password"
TOKEN_SECRET: Final = "a-secret-only-for-sandbox-tokens-on-loopback"  # fixed, so that tokens survive a restart

STATIC_LIFETIME_SECONDS: Final = 30 * 86_400
_RETRY_AFTER_MIN_SECONDS: Final = 60


class TokenAnswer(NamedTuple):
    """A response of the token endpoint; the document is JSON."""

    status: int
    document: dict[str, object]
    headers: dict[str, str]


class _Claims(msgspec.Struct, frozen=True):
    """The required claims of a token; times are seconds since the epoch."""

    aud: str
    nbf: float
    exp: float


class _GrantError(Exception):
    def __init__(self, status: int, error: str, code: int, words: str) -> None:
        super().__init__(words)
        self.status, self.error, self.code, self.words = status, error, code, words


class TokenIssuer:
    """Signs and validates tokens (HS256); `rng` generates the ids in error documents."""

    def __init__(self, options: SandboxOptions, *, clock: Callable[[], float], rng: Random) -> None:
        self._lifetime_seconds = options.token_lifetime_seconds
        self._skew_seconds = options.token_skew_seconds
        self._clock = clock
        self._rng = rng
        self.calls = CallWindow(options.token_limit, clock)

    def issue(self, lifetime_seconds: float = STATIC_LIFETIME_SECONDS, *, skew_seconds: float = 0.0) -> str:
        """Return a token that is valid from now on, by a clock that is `skew_seconds` ahead."""
        now = int(self._clock() + skew_seconds)
        claims = {"sub": CLIENT_ID, "aud": AUDIENCE, "iat": now, "nbf": now, "exp": now + int(lifetime_seconds)}
        return jwt.encode(claims, TOKEN_SECRET, algorithm="HS256")

    def fault(self, token: str) -> str:
        """Return why a token is refused; empty if it is valid."""
        try:
            # The times are checked below against `self._clock`; the library would use the machine's.
            payload = jwt.decode(
                token,
                TOKEN_SECRET,
                algorithms=["HS256"],
                audience=AUDIENCE,
                options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
            claims = msgspec.convert(payload, _Claims)
        except jwt.InvalidAudienceError:
            return "is for another audience"
        except (jwt.InvalidTokenError, msgspec.ValidationError):
            return "is invalid"
        now = self._clock()
        if now >= claims.exp:
            return "has expired"
        if now < claims.nbf:
            return "is not valid yet"
        return ""

    def grant(self, form: Mapping[str, str]) -> TokenAnswer:
        """Answer a token request; `form` has the decoded fields of its body."""
        no_store = {"Cache-Control": "no-store", "Pragma": "no-cache"}
        wait = self.calls.admit()
        try:
            if wait:
                raise _GrantError(
                    429, "temporarily_unavailable", 90055, "Tenant request rate limit exceeded; try again later."
                )
            self._check(form)
        except _GrantError as error:
            headers = {"Retry-After": str(max(ceil(wait), _RETRY_AFTER_MIN_SECONDS))} if wait else {}
            return TokenAnswer(error.status, self._error_document(error), no_store | headers)
        token = self.issue(self._lifetime_seconds, skew_seconds=self._skew_seconds)
        lifetime = self._lifetime_seconds
        document = {"token_type": "Bearer", "expires_in": lifetime, "ext_expires_in": lifetime, "access_token": token}
        return TokenAnswer(200, document, no_store)

    def _check(self, form: Mapping[str, str]) -> None:
        grant_type = _field(form, "grant_type")
        if grant_type not in {"client_credentials", "password"}:
            raise _GrantError(
                400, "unsupported_grant_type", 70003, f"The app requested an unsupported grant type {grant_type!r}."
            )
        if _field(form, "client_id") != CLIENT_ID:
            raise _GrantError(400, "unauthorized_client", 700016, "Application was not found in the directory.")
        secret = form.get("client_secret", "")
        if not secret:
            words = "The request body must contain the following parameter: 'client_assertion' or 'client_secret'."
            raise _GrantError(401, "invalid_client", 7000218, words)
        if not _is_same(secret, CLIENT_SECRET):
            raise _GrantError(401, "invalid_client", 7000215, "Invalid client secret provided.")
        _check_scope(_field(form, "scope"), grant_type)
        if grant_type == "password":
            user, password = _field(form, "username"), _field(form, "password")
            if user != USERNAME or not _is_same(password, PASSWORD):
                words = "Error validating credentials due to invalid username or password."
                raise _GrantError(400, "invalid_grant", 50126, words)

    def _error_document(self, error: _GrantError) -> dict[str, object]:
        trace_id, correlation_id = (str(UUID(int=self._rng.getrandbits(128), version=4)) for _ in range(2))
        timestamp = f"{datetime.fromtimestamp(self._clock(), UTC):%Y-%m-%d %H:%M:%SZ}"
        return {
            "error": error.error,
            "error_description": (
                f"AADSTS{error.code}: {error.words} Trace ID: {trace_id} Correlation ID: {correlation_id} "
                f"Timestamp: {timestamp}"
            ),
            "error_codes": [error.code],
            "timestamp": timestamp,
            "trace_id": trace_id,
            "correlation_id": correlation_id,
        }


def _field(form: Mapping[str, str], name: str) -> str:
    value = form.get(name, "")
    if not value:
        words = f"The request body must contain the following parameter: '{name}'."
        raise _GrantError(400, "invalid_request", 900144, words)
    return value


def _check_scope(scope: str, grant_type: str) -> None:
    """Check a scope: `RESOURCE/PERMISSION`, or `RESOURCE/.default` for client credentials."""
    resource, _, permission = scope.split()[0].rpartition("/") if scope.split() else ("", "", "")
    if not resource or not permission or (grant_type == "client_credentials" and permission != ".default"):
        words = f"The provided value for the input parameter 'scope' is not valid. Use {DEFAULT_SCOPE}."
        raise _GrantError(400, "invalid_scope", 1002012 if grant_type == "client_credentials" else 70011, words)
    if resource != AUDIENCE:
        raise _GrantError(400, "invalid_resource", 500011, "The resource principal was not found in the tenant.")


def _is_same(given: str, expected: str) -> bool:
    return compare_digest(given.encode(), expected.encode())
