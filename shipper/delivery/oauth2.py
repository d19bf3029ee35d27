"""Gets access tokens from a token endpoint, with the password and client credentials grants (RFC 6749 §4.3, §4.4)."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import msgspec

from shipper.config.secrets import MAX_SECRET_BYTES, Secret, check_secret, fetch_secret
from shipper.config.settings import OAuth2Settings
from shipper.delivery.answer import Answer
from shipper.delivery.no_answer import SETUP_CAUSES, NoAnswerError
from shipper.delivery.tokens import LIFETIME_MAX_S, NoTokenError, Reason, Token, expiring_token, expiry_claim
from shipper.delivery.waits import requested_wait_s
from shipper.model.errors import ConfigError

PostForm = Callable[[str, dict[str, str]], Awaitable[Answer]]

_LIMIT_S: Final = 30.0
_UNKNOWN_LIFETIME_S: Final = 300.0
_FIT: Final = re.compile(r"[\x21-\x7e]+")
_ERROR_WORD: Final = re.compile(r"[a-z_]{3,40}")
_NUMBER: Final = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_TRANSIENT: Final = {"temporarily_unavailable", "server_error", "slow_down"}
# The settings to check, by error code. An answer's description of the error is never shown: it may quote the request.
_ADVICE: Final = {
    "invalid_client": "{0}.client_id and {0}.client_secret",
    "invalid_grant": "{0}.username and {0}.password",
    "unauthorized_client": "{0}.client_id and {0}.grant",
    "invalid_scope": "{0}.scope",
    "unsupported_grant_type": "{0}.grant",
    "invalid_request": "{0}.client_id, {0}.scope and {0}.grant",
}


class OAuth2Source:
    """
    Requests tokens from a token endpoint.

    Args:
        key: Dotted name of the settings table, such as `intake.oauth2`.
    Raises:
        ConfigError: The client secret or the password is missing or invalid.
    """

    interval_s = math.inf

    def __init__(
        self,
        settings: OAuth2Settings,
        *,
        key: str,
        post_form: PostForm,
        now: Callable[[], float],
        wall_time: Callable[[], float],
    ) -> None:
        self.key = key
        self._settings = settings
        self._post_form = post_form
        self._now = now
        self._wall_time = wall_time
        for name, secret in self._secrets():
            check_secret(secret, key=f"{key}.{name}", is_for_header=False)

    def _secrets(self) -> list[tuple[str, Secret]]:
        named = [("client_secret", self._settings.client_secret), ("password", self._settings.password)]
        return [(name, secret) for name, secret in named if secret is not None]

    async def fetch(self) -> Token:
        """Request a token; its lifetime counts from the time of the request."""
        try:
            form = await self._form()
            since, wall_since = self._now(), self._wall_time()
            with anyio.fail_after(_LIMIT_S):
                answer = await self._post_form(self._settings.token_url, form)
        except ConfigError as error:
            raise NoTokenError("credentials", str(error)) from None
        except TimeoutError:
            message = f"the token endpoint did not answer within {_LIMIT_S:g} s; check {self.key}.token_url"
            raise NoTokenError("token_endpoint", message) from None
        except NoAnswerError as error:
            raise NoTokenError(
                "token_endpoint",
                f"{error}; check {self.key}.token_url",
                is_setup_problem=error.cause in SETUP_CAUSES,
            ) from None
        return self._token(answer, since, wall_since)

    async def _form(self) -> dict[str, str]:
        """Build the request; its secrets are read each time, because they may have been replaced."""
        settings = self._settings
        form = {"grant_type": settings.grant, "client_id": settings.client_id}
        if settings.scope:
            form["scope"] = settings.scope
        if settings.username:
            form["username"] = settings.username
        for name, secret in self._secrets():
            form[name] = await fetch_secret(secret, key=f"{self.key}.{name}", is_for_header=False)
        return form

    def _token(self, answer: Answer, since: float, wall_since: float) -> Token:
        document = _document(answer.body)
        if not 200 <= answer.status < 300:
            raise self._refusal(answer, document)
        if answer.compression:
            raise self._nonsense(f"is compressed ({answer.compression}), although the request does not ask for that")
        value, token_type = document.get("access_token"), document.get("token_type", "Bearer")
        if not isinstance(value, str) or not value:
            raise self._nonsense("has no token")
        if not isinstance(token_type, str) or token_type.lower() != "bearer":
            raise self._nonsense("has a token type other than Bearer")
        if len(value) > MAX_SECRET_BYTES or not _FIT.fullmatch(value):
            raise self._nonsense("has a token that is not valid in a header")
        lifetime_s = _expires_in(document) or _claimed_lifetime_s(value, wall_since) or _UNKNOWN_LIFETIME_S
        if since + lifetime_s <= self._now():
            raise self._nonsense("took longer than the token is valid")
        return expiring_token(value, lifetime_s, since=since, wall_since=wall_since, is_sure=True)

    def _nonsense(self, what: str) -> NoTokenError:
        return NoTokenError("token_endpoint", f"the token endpoint's answer {what}; check {self.key}.token_url")

    def _refusal(self, answer: Answer, document: dict[str, Any]) -> NoTokenError:
        word = document.get("error")
        error = word if isinstance(word, str) and _ERROR_WORD.fullmatch(word) else ""
        reason: Reason = "token_endpoint"
        is_found = True
        if error in _ADVICE:
            reason = "token"
            what = f"the token endpoint refuses the request; check {self._advice(error)}"
        elif error in _TRANSIENT or answer.status in {408, 425, 429} or answer.status >= 500:
            what = "the token endpoint is temporarily unable to issue tokens"
        elif error or answer.status in {401, 403}:
            reason = "token"
            what = f"the token endpoint refuses the request; check the settings under {self.key}"
        elif answer.redirects_to and 300 <= answer.status < 400:
            is_found = False
            what = f"the token endpoint redirects to {answer.redirects_to}, which shipper does not follow"
            what += f"; check {self.key}.token_url"
        else:
            is_found = False
            what = f"no token endpoint was found at this address; check {self.key}.token_url"
        wait_s = requested_wait_s(answer.retry_after, "", date=answer.date, wall_time=self._wall_time())
        details = _details(answer, error, document)
        is_setup_problem = reason == "token" or not is_found
        return NoTokenError(reason, f"{what} ({details})", wait_s, is_setup_problem=is_setup_problem)

    def _advice(self, error: str) -> str:
        if error == "invalid_grant" and self._settings.grant != "password":
            error = "invalid_client"
        return _ADVICE[error].format(self.key)


def _document(body: bytes) -> dict[str, Any]:
    """Decode an answer; return an empty dict if it is not a JSON object."""
    try:
        document = msgspec.json.decode(body.removeprefix(BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _expires_in(document: dict[str, Any]) -> float | None:
    """Return the lifetime in seconds, which some endpoints write as text; None if it is missing or invalid."""
    written = document.get("expires_in")
    if isinstance(written, str) and _NUMBER.fullmatch(written):
        written = float(written)
    if isinstance(written, bool) or not isinstance(written, int | float) or not 0 < written < math.inf:
        return None
    return float(min(written, LIFETIME_MAX_S))  # in this order, as an int may be too large for a float


def _claimed_lifetime_s(token: str, wall_since: float) -> float | None:
    expiry = expiry_claim(token)
    return expiry - wall_since if expiry is not None and expiry > wall_since else None


def _details(answer: Answer, error: str, document: dict[str, Any]) -> str:
    """Return the status, error code and request ids, for support; they cannot contain secrets."""
    details = [f"HTTP {answer.status}", error]
    if answer.compression:
        details.append(f"unreadable, as it is compressed: {answer.compression}")
    for name in ("trace_id", "correlation_id"):
        value = document.get(name)
        if isinstance(value, str) and _UUID.fullmatch(value):
            details.append(f"{name} {value}")
    return ", ".join(filter(None, details))
