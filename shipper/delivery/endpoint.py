"""
One connection to the service, through httpx's transport: the only place that knows the HTTP library.

The transport is used without the client around it. So nothing is there that we would have to switch off: no
redirects, no cookies, no proxies from the environment, no headers beside the documented ones.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final

import anyio
import httpx

from shipper import __version__
from shipper.config import DeliverySettings, EndpointSettings
from shipper.delivery.verdicts import Answer
from shipper.errors import ConfigError
from shipper.secrets import resolve_secret

# Below the four minutes after which a gateway's load balancer silently forgets an idle connection.
_KEEPALIVE_S: Final = 60.0


class NoAnswerError(Exception):
    """
    There was no answer, or not the whole of it; what became of the request is unknown.

    Attributes:
        cause: One word, such as `connect_error` or `read_timeout`.
        is_tls: The certificate was not accepted: a fault of the set-up, not of the moment.
    """

    def __init__(self, cause: str, message: str, *, is_tls: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.is_tls = is_tls


def make_ssl_context(endpoint: EndpointSettings) -> ssl.SSLContext | None:
    """
    Make the context that all connections to an endpoint share; making one costs more than a request.

    Returns:
        None for a plain http address.
    Raises:
        ConfigError: The CA bundle cannot be read.
    """
    if not endpoint.base_url.startswith("https:"):
        return None
    try:
        return ssl.create_default_context(cafile=endpoint.ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{endpoint.ca_bundle} cannot be used: {error}", key="ca_bundle") from error


class Endpoint:
    """
    Sends one request after the other over one connection.

    Args:
        section: The settings' section, `intake` or `report`, for errors.
        now: Seconds on a clock that does not jump.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        ssl_context: ssl.SSLContext | None,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        assert endpoint.token is not None, "require_endpoint was not asked"
        assert endpoint.subscription_key is not None, "require_endpoint was not asked"
        self._base_url = endpoint.base_url
        self._urls: dict[str, httpx.URL] = {}
        self._headers = httpx.Headers(
            [
                (b"Content-Type", b"application/json"),
                (b"Cache-Control", b"no-cache"),
                (
                    b"Authorization",
                    b"Bearer " + resolve_secret(endpoint.token, key=f"{section}.token").encode("latin-1"),
                ),
                (
                    b"Ocp-Apim-Subscription-Key",
                    resolve_secret(endpoint.subscription_key, key=f"{section}.subscription_key").encode("latin-1"),
                ),
                (b"User-Agent", f"shipper/{__version__}".encode()),
            ]
        )
        self._timeouts = {
            "connect": delivery.connect_timeout_seconds,
            "read": delivery.read_timeout_seconds,
            "write": delivery.read_timeout_seconds,
            "pool": delivery.connect_timeout_seconds,
        }
        self._limit_s = delivery.connect_timeout_seconds + 2 * delivery.read_timeout_seconds
        self._max_age_s = delivery.connection_max_age_seconds
        self._ssl_context = ssl_context
        self._now = now
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._opened_at = 0.0

    def __repr__(self) -> str:
        return f"<Endpoint {self._base_url}>"

    async def request(self, method: str, path: str, body: bytes = b"", *, max_answer_bytes: int) -> Answer:
        """
        Send a request and read the answer.

        Args:
            max_answer_bytes: The body is read up to here; a longer one costs the connection.
        Raises:
            NoAnswerError: Anything between the name lookup and the last byte of the answer went wrong.
        """
        transport = await self._renewed_transport()
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self._base_url + path)
        request = httpx.Request(
            method,
            url,
            headers=self._headers,
            content=body or None,
            extensions={"timeout": self._timeouts},
        )
        try:
            # The transport's timeouts are for each read: an answer that trickles would pass them for ever.
            with anyio.fail_after(self._limit_s):
                response = await transport.handle_async_request(request)
            try:
                with anyio.fail_after(self._timeouts["read"]):
                    answer_body = await _read_up_to(response, max_answer_bytes)
            finally:
                await response.aclose()
        except TimeoutError as error:
            await self.aclose()
            message = f"no whole answer from {self._base_url} within {self._timeouts['read']:g} s"
            raise NoAnswerError("read_timeout", message) from error
        except httpx.TransportError as error:
            raise NoAnswerError(_snake(error), _words(error, self._base_url), is_tls=_is_tls(error)) from error
        return Answer(
            status=response.status_code,
            content_type=response.headers.get("content-type", "").partition(";")[0].strip().lower(),
            retry_after=response.headers.get("retry-after", ""),
            body=answer_body,
        )

    async def _renewed_transport(self) -> httpx.AsyncHTTPTransport:
        """Give the transport; a new one from time to time, so that the service's address is looked up again."""
        if self._transport is not None and self._now() - self._opened_at < self._max_age_s:
            return self._transport
        await self.aclose()
        self._transport = httpx.AsyncHTTPTransport(
            verify=self._ssl_context or False,  # False only where there is no TLS: a plain address
            trust_env=False,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S),
        )
        self._opened_at = self._now()
        return self._transport

    async def aclose(self) -> None:
        """Close the connection; the next request opens one again."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            await transport.aclose()


async def _read_up_to(response: httpx.Response, max_bytes: int) -> bytes:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    parts: list[bytes] = []
    size = 0
    async for part in response.stream:
        parts.append(part)
        size += len(part)
        if size >= max_bytes:
            break
    return b"".join(parts)[:max_bytes]


def _snake(error: Exception) -> str:
    """`ConnectTimeout` -> `connect_timeout`: the causes are the library's class names, in the metrics' spelling."""
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _words(error: Exception, base_url: str) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"cannot connect to {base_url}: {reason}"
    return f"no answer from {base_url}: {reason}"


def _is_tls(error: BaseException) -> bool:
    """Tell whether a certificate was refused; the reason may stand in the chain or only in the text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return "CERTIFICATE_VERIFY_FAILED" in str(error)
