"""The way to an endpoint's door, gone as the senders go it and looked at step by step: name, connection, TLS."""

from __future__ import annotations

import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSAttribute, TLSStream

from shipper.config.secrets import resolve_secret
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.no_answer import NoAnswerError, Way, no_answer
from shipper.delivery.progress import Progress, Stage
from shipper.delivery.tls import is_https, tls_context, without_client_certificate, words
from shipper.model.errors import ConfigError
from shipper.system.addresses import is_loopback

Result = Literal["ok", "note", "fail"]  # `note`: not wrong, but worth knowing

CERTIFICATE_NOTE_DAYS: Final = 21
_HEAD_BYTES: Final = 65_536
_NAMES_SHOWN: Final = 3
_FAMILIES: Final = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
_CUT_OFF: Final = (OSError, anyio.EndOfStream, anyio.BrokenResourceError)
_NO_HEAD: Final = (anyio.IncompleteRead, anyio.DelimiterNotFound)
# The verification's codes for a certificate that is not for now, and for one of another host.
_OUT_OF_TIME: Final = {9, 10}
_OTHER_HOST: Final = {62, 64}


class Reach:
    """
    Looks at the way to one endpoint.

    Args:
        section: The settings' section, `intake` or `report`.
        tell: Called with result, step (`dns`, `connect`, `tls`) and what was found, as soon as it is known.
        now: The clock that does not jump.
        wall_time: Seconds since the epoch.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        tell: Callable[[Result, str, str], None],
        now: Callable[[], float] = anyio.current_time,
        wall_time: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._section = section
        self._tell = tell
        self._now = now
        self._wall_time = wall_time
        self._host, self._port = _host_and_port(endpoint.base_url)
        self._limit_s = delivery.connect_timeout_seconds
        self._way = Way(endpoint.base_url, endpoint.proxy or "", section, self._limit_s, delivery.read_timeout_seconds)

    async def look(self) -> bool:
        """Look the name up, connect, and agree on TLS; tells whether a request makes sense."""
        async with AsyncExitStack() as opened:
            if self._endpoint.proxy is None:
                addresses = await self._look_up()
                stream = await self._connect(addresses, opened) if addresses else None
            else:
                self._tell("ok", "dns", f"{self._host} is not looked up here: that is the proxy's work")
                stream = await self._connect_through_proxy(opened)
            return stream is not None and await self._agree_on_tls(stream)

    # Names and connections --------------------------------------------------------------------------------------------

    async def _look_up(self) -> dict[str, list[str]]:
        """Return the addresses by family; empty if there are none."""
        with suppress(ValueError):
            family = f"IPv{ip_address(self._host).version}"
            self._tell("ok", "dns", f"{self._host} is an address, and no name to be looked up")
            return {family: [self._host]}
        addresses: dict[str, list[str]] = {}
        try:
            with anyio.fail_after(self._limit_s):
                found = await anyio.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = words(error) if isinstance(error, OSError) else "no name looks like that"
            if isinstance(error, TimeoutError):
                why = f"no answer within {self._limit_s:g} s"
            advice = f"check {self._section}.base_url, and how this machine looks names up"
            self._tell("fail", "dns", f"{self._host} is not found: {why}; {advice}")
            return {}
        for family_number, *_, address in found:
            of_family = addresses.setdefault(_FAMILIES.get(family_number, "other"), [])
            if address[0] not in of_family:
                of_family.append(address[0])
        self._tell("ok", "dns", f"{self._host} is {', '.join(map(', '.join, addresses.values()))}")
        return addresses

    async def _connect(self, addresses: dict[str, list[str]], opened: AsyncExitStack) -> ByteStream | None:
        """Try each family; give a connection of one that works."""
        stream: ByteStream | None = None
        told: list[str] = []
        result: Result = "ok"
        for family, candidates in addresses.items():
            began_at = self._now()
            try:
                with anyio.fail_after(self._limit_s):
                    stream = await opened.enter_async_context(await _connected(candidates, self._port))
            except OSError as error:
                result = "note"
                told.append(f"{family}: {self._no_answer(error, Stage.CONNECT)}")
            else:
                told.append(f"{family} in {self._ms_since(began_at)}")
        if stream is None:
            result = "fail"
            told.append(f"check {self._section}.base_url, and firewalls on the way")
        self._tell(result, "connect", "; ".join(told))
        return stream

    def _ms_since(self, moment: float) -> str:
        return f"{1000 * (self._now() - moment):.0f} ms"

    # Proxies ----------------------------------------------------------------------------------------------------------

    async def _connect_through_proxy(self, opened: AsyncExitStack) -> ByteStream | None:
        host, port = _host_and_port(self._way.proxy)
        began_at = self._now()
        stage = Stage.CONNECT
        try:
            with anyio.fail_after(self._limit_s):
                stream: ByteStream = await opened.enter_async_context(await anyio.connect_tcp(host, port))
                what = f"the proxy {self._way.proxy} is reachable, in {self._ms_since(began_at)}"
                if is_https(self._way.proxy):
                    stream = await self._encrypted(stream, host, without_client_certificate(self._endpoint))
            if is_https(self._way.address):
                stage = Stage.TUNNEL
                with anyio.fail_after(self._way.read_s):
                    await self._open_tunnel(stream)
                what += f", and leads on to {self._host}, port {self._port}"
        except ConfigError as error:
            self._tell("fail", "connect", str(error))
        except (*_CUT_OFF, *_NO_HEAD) as error:
            self._tell("fail", "connect", str(self._no_answer(error, stage, is_at_proxy=True)))
        else:
            self._tell("ok", "connect", what)
            return stream
        return None

    async def _open_tunnel(self, stream: ByteStream) -> None:
        target = f"{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        head = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self._endpoint.proxy_password is not None:
            password = resolve_secret(self._endpoint.proxy_password, key=f"{self._section}.proxy_password")
            user = f"{self._endpoint.proxy_username}:{password}".encode()
            head.append(f"Proxy-Authorization: Basic {b64encode(user).decode()}")
        await stream.send("\r\n".join([*head, "", ""]).encode())
        answer = await BufferedByteReceiveStream(stream).receive_until(b"\r\n\r\n", _HEAD_BYTES)
        status = answer[:12].decode("latin-1").partition(" ")[2]
        if not status.startswith("2"):
            raise _RefusedByProxyError(status)

    # TLS --------------------------------------------------------------------------------------------------------------

    async def _agree_on_tls(self, stream: ByteStream) -> bool:
        if not is_https(self._way.address):
            is_here = is_loopback(self._host)
            what = "none: base_url begins with http://" + ("" if is_here else ", so key and token go in clear text")
            self._tell("ok" if is_here else "note", "tls", what)
            return True
        try:
            with anyio.fail_after(self._limit_s):
                encrypted = await self._encrypted(stream, self._host, self._endpoint)
        except ConfigError as error:
            self._tell("fail", "tls", str(error))
            return False
        except _CUT_OFF as error:
            told = self._no_answer(error, Stage.HANDSHAKE)
            self._tell("fail", "tls", f"{told}{_way_out(error, self._section, is_tls=told.is_tls)}")
            return False
        version = encrypted.extra(TLSAttribute.tls_version).replace("v", " ")
        result, certificate = certificate_words(encrypted.extra(TLSAttribute.peer_certificate), self._wall_time())
        self._tell(result, "tls", f"{version}; {certificate}")
        return True

    async def _encrypted(self, stream: ByteStream, host: str, endpoint: EndpointSettings) -> TLSStream:
        context = tls_context(endpoint, self._section)
        return await TLSStream.wrap(stream, hostname=host, ssl_context=context, standard_compatible=False)

    def _no_answer(self, error: BaseException, stage: Stage, *, is_at_proxy: bool = False) -> NoAnswerError:
        """Explain an error in the words that shipping has for it."""
        progress = Progress(has_proxy=bool(self._way.proxy))
        progress.stage, progress.is_at_proxy = stage, is_at_proxy
        if isinstance(error, _RefusedByProxyError):
            kind = "proxy_error"
        elif isinstance(error, _NO_HEAD):
            kind = "remote_protocol_error"
        else:
            kind = "connect_timeout" if isinstance(error, TimeoutError) and not error.errno else "connect_error"
        return no_answer(kind, error, self._way, progress)


class _RefusedByProxyError(OSError):
    """A proxy does not open the way; its text is the status."""


async def _connected(addresses: list[str], port: int) -> SocketStream:
    """
    Connect to the first address where somebody listens.

    Raises:
        OSError: Of the last one, if nobody does.
    """
    for address in addresses[:-1]:
        with suppress(OSError):
            return await anyio.connect_tcp(address, port)
    return await anyio.connect_tcp(addresses[-1], port)


def _host_and_port(address: str) -> tuple[str, int]:
    url = urlsplit(address)
    return url.hostname or "", url.port or (443 if is_https(address) else 80)


def _way_out(error: BaseException, section: str, *, is_tls: bool) -> str:
    """Return advice for a failed handshake, where the explanation gives none."""
    code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else 0
    if code in _OUT_OF_TIME:
        return "; it has to be renewed there, unless it is this machine's clock that is wrong"
    if code in _OTHER_HOST:
        return f"; check the host in {section}.base_url"
    return "" if is_tls or isinstance(error, TimeoutError) else "; perhaps nothing there speaks TLS"


def certificate_words(certificate: Any, wall_time: float) -> tuple[Result, str]:
    """
    Say whose a certificate is, by whom, and until when.

    Args:
        certificate: In the form of `SSLSocket.getpeercert`.
        wall_time: Seconds since the epoch.
    """
    subject, issuer = ({kind: value for ((kind, value), *_) in certificate.get(of, ())} for of in ("subject", "issuer"))
    names = [value for _, value in certificate.get("subjectAltName", ())] or [subject.get("commonName", "nobody")]
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    by = issuer.get("organizationName") or issuer.get("commonName") or "an authority without a name"
    days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - wall_time) // 86_400)
    what = f"the certificate is for {shown}, by {by}, and expires in {days} days"
    return ("ok", what) if days >= CERTIFICATE_NOTE_DAYS else ("note", f"{what}: it has to be renewed there")
