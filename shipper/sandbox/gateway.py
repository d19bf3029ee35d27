"""The gateway in front of the sandbox's service: subscription key, access token, required headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import Final, NamedTuple

import jwt
import msgspec
from starlette.responses import Response

SUBSCRIPTION_KEY_HEADER: Final = "Ocp-Apim-Subscription-Key"
AUDIENCE: Final = "shipper-sandbox"
SECRET_MIN_BYTES: Final = 32  # RFC 7518 §3.2: an HS256 key is at least as long as the hash
TOKEN_LIFETIME_SECONDS: Final = 30 * 86_400

KEY_MISSING: Final = (
    "Access denied due to missing subscription key. "
    "Make sure to include subscription key when making requests to an API."
)
KEY_INVALID: Final = (
    "Access denied due to invalid subscription key. Make sure to provide a valid key for an active subscription."
)


class Refusal(NamedTuple):
    """An answer that is not the service's work: a status and the words of the body."""

    status: int
    message: str


class Claims(msgspec.Struct, frozen=True):
    """The claims that every token must carry, times in seconds since the epoch."""

    aud: str
    nbf: float
    exp: float


def json_response(content: object, status: int = 200) -> Response:
    """Answer with compact JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def refusal_response(refusal: Refusal) -> Response:
    """Answer in the gateway's error form, `{"statusCode": …, "message": …}`."""
    return json_response({"statusCode": refusal.status, "message": refusal.message}, refusal.status)


class Gateway:
    """
    Lets a request pass or says why not, in the order of a real gateway: key, token, headers.

    Args:
        subscription_key: The one key that is valid.
        token_secret: Signs and checks access tokens (HS256); at least 32 bytes.
        clock: Seconds since the epoch.
    """

    def __init__(self, *, subscription_key: str, token_secret: str, clock: Callable[[], float]) -> None:
        assert len(token_secret.encode()) >= SECRET_MIN_BYTES, "the token secret is too short for HS256"
        self._subscription_key = subscription_key.encode()
        self._token_secret = token_secret.encode()
        self._clock = clock

    def issue_token(self, lifetime_seconds: float = TOKEN_LIFETIME_SECONDS) -> str:
        """Sign an access token that is valid from now on."""
        now = int(self._clock())
        claims = {"sub": "shipper", "aud": AUDIENCE, "iat": now, "nbf": now, "exp": now + int(lifetime_seconds)}
        return jwt.encode(claims, self._token_secret, algorithm="HS256")

    def refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """
        Judge a request by its headers.

        Args:
            headers: Looked up without regard to case.
        Returns:
            None if the request may pass.
        """
        return self._judge_key(headers) or self._judge_token(headers) or _judge_headers(headers)

    def _judge_key(self, headers: Mapping[str, str]) -> Refusal | None:
        key = headers.get(SUBSCRIPTION_KEY_HEADER)
        if not key:
            return Refusal(401, KEY_MISSING)
        if not compare_digest(key.encode(), self._subscription_key):
            return Refusal(401, KEY_INVALID)
        return None

    def _judge_token(self, headers: Mapping[str, str]) -> Refusal | None:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return Refusal(401, "Unauthorized. Access token is missing.")
        try:
            # The times are checked below, against the clock that was given instead of the library's own.
            payload = jwt.decode(
                token.strip(),
                self._token_secret,
                algorithms=["HS256"],
                audience=AUDIENCE,
                options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
            claims = msgspec.convert(payload, Claims)
        except jwt.InvalidAudienceError:
            return Refusal(401, "Unauthorized. Access token is for another audience.")
        except (jwt.InvalidTokenError, msgspec.ValidationError):
            return Refusal(401, "Unauthorized. Access token is invalid.")
        now = self._clock()
        if now >= claims.exp:
            return Refusal(401, "Unauthorized. Access token has expired.")
        if now < claims.nbf:
            return Refusal(401, "Unauthorized. Access token is not valid yet.")
        return None


def _judge_headers(headers: Mapping[str, str]) -> Refusal | None:
    content_type = headers.get("Content-Type", "")
    if not content_type:
        return Refusal(400, "Header Content-Type: application/json is required.")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return Refusal(415, "Unsupported content type. Content-Type must be application/json.")
    directives = headers.get("Cache-Control", "").lower().split(",")
    if "no-cache" not in map(str.strip, directives):
        return Refusal(400, "Header Cache-Control: no-cache is required.")
    return None
