"""The simulated gateway: checks subscription key, rate and quota, access token, headers and body."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from email.utils import formatdate
from hmac import compare_digest
from math import ceil
from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shipper.sandbox.clock import CallWindow
from shipper.sandbox.options import SandboxOptions, Which
from shipper.sandbox.tokens import TokenIssuer

SUBSCRIPTION_KEY_HEADER: Final = "Ocp-Apim-Subscription-Key"

KEY_MISSING: Final = (
    "Access denied due to missing subscription key. "
    "Make sure to include subscription key when making requests to an API."
)
KEY_INVALID: Final = (
    "Access denied due to invalid subscription key. Make sure to provide a valid key for an active subscription."
)

_GZIP_WINDOW: Final = 31  # zlib's code for a gzip header


class Refusal(NamedTuple):
    status: int
    message: str
    retry_after: str = ""  # value of the header


NOT_FOUND: Final = Refusal(404, "Resource not found")


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def refusal_response(refusal: Refusal) -> Response:
    """Return a response in the gateway's error form, `{"statusCode": …, "message": …}`."""
    response = json_response({"statusCode": refusal.status, "message": refusal.message}, refusal.status)
    if refusal.retry_after:
        response.headers["Retry-After"] = refusal.retry_after
    return response


async def bounded_body(request: Request, max_bytes: int) -> bytes | None:
    """Read a body; stop and return None once it exceeds the limit."""
    declared = request.headers.get("Content-Length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)


class Gateway:
    """Checks requests in the order of a real gateway: key, rate, quota, token, headers, body."""

    def __init__(self, options: SandboxOptions, *, tokens: TokenIssuer, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._options = options
        self._first_keys: dict[Which, str] = {"primary": options.subscription_key, "secondary": options.secondary_key}
        self._rotations = 0
        self.keys = dict(self._first_keys)
        self.rate = CallWindow(options.rate_limit, clock)
        self.quota = CallWindow(options.quota, clock)

    def rotate_key(self, which: Which) -> str:
        """Replace a key, which becomes invalid, and return the new one."""
        self._rotations += 1
        self.keys[which] = f"{self._first_keys[which]}-{self._rotations + 1}"
        return self.keys[which]

    def refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Check the headers, a case-insensitive mapping; return None if they are accepted."""
        return (
            self._judge_key(headers)
            or self._judge_calls()
            or self._judge_token(headers)
            or self._judge_headers(headers)
        )

    async def read_body(self, request: Request) -> bytes | Refusal:
        """Read and decompress the body of a request whose headers were accepted."""
        body = await bounded_body(request, self._options.max_body_bytes)
        if body is None:
            return self._too_large()
        return self._inflate(body) if _encoding(request.headers) == "gzip" else body

    def _judge_key(self, headers: Mapping[str, str]) -> Refusal | None:
        key = headers.get(SUBSCRIPTION_KEY_HEADER)
        if not key:
            return Refusal(401, KEY_MISSING)
        if not any(compare_digest(key.encode(), valid.encode()) for valid in self.keys.values()):
            return Refusal(401, KEY_INVALID)
        return None

    def _judge_calls(self) -> Refusal | None:
        """Enforce the subscription's limits, which both keys and both operations share."""
        wait = ceil(self.rate.admit())
        if wait:
            message = f"Rate limit is exceeded. Try again in {wait} seconds."
            return Refusal(429, message, self._retry_after_in(wait))
        wait = ceil(self.quota.admit())
        if wait:
            minutes, seconds = divmod(wait, 60)
            hours, minutes = divmod(minutes, 60)
            message = f"Out of call volume quota. Quota will be replenished in {hours:02}:{minutes:02}:{seconds:02}."
            return Refusal(403, message, self._retry_after_in(wait))
        return None

    def _retry_after_in(self, seconds: int) -> str:
        if self._options.retry_after == "seconds":
            return str(seconds)
        return formatdate(ceil(self._clock()) + seconds, usegmt=True)

    def _judge_token(self, headers: Mapping[str, str]) -> Refusal | None:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return Refusal(401, "Unauthorized. Access token is missing.")
        fault = self._tokens.fault(token.strip())
        return Refusal(401, f"Unauthorized. Access token {fault}.") if fault else None

    def _judge_headers(self, headers: Mapping[str, str]) -> Refusal | None:
        content_type = headers.get("Content-Type", "")
        if not content_type:
            return Refusal(400, "Header Content-Type: application/json is required.")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, "Unsupported content type. Content-Type must be application/json.")
        directives = headers.get("Cache-Control", "").lower().split(",")
        if "no-cache" not in map(str.strip, directives):
            return Refusal(400, "Header Cache-Control: no-cache is required.")
        if _encoding(headers) not in {"identity", "gzip" if self._options.accept_gzip else "identity"}:
            return Refusal(415, "Unsupported content encoding. The body must be sent as it is, without compression.")
        return None

    def _inflate(self, body: bytes) -> bytes | Refusal:
        inflater, limit = zlib.decompressobj(_GZIP_WINDOW), self._options.max_body_bytes
        try:
            plain = inflater.decompress(body, limit + 1)
        except zlib.error:
            return Refusal(400, "The body is not valid gzip.")
        if len(plain) > limit:
            return self._too_large()
        if not inflater.eof or inflater.unused_data:
            return Refusal(400, "The body is not one complete gzip stream.")
        return plain

    def _too_large(self) -> Refusal:
        return Refusal(413, f"Request body is too large. The limit is {self._options.max_body_bytes} bytes.")


def _encoding(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Encoding", "").strip().lower() or "identity"
