"""Checks the connection to an endpoint step by step, without writing anything there."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final

import anyio
from msgspec import Struct

from shipper.check import Item, Result
from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.connection import Connection, Peer, Server, server_at
from shipper.delivery.credentials import SKEW_REPORTED_S, Authorization, ClockSkew, Credentials, NoTokenError
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError, compress, new_traceparent
from shipper.delivery.no_answer import SETUP_CAUSES
from shipper.delivery.quoting import quotation
from shipper.delivery.tls import os_error_text
from shipper.delivery.verdicts import UNREADABLE, Action, Verdict, judge
from shipper.model.errors import ConfigError
from shipper.model.units import several, span
from shipper.model.wire import EMPTY_BODY, INTAKE_PATH
from shipper.system.addresses import is_address, is_loopback

_ANSWER_BYTES: Final = 64 << 20  # as much as a report may have
_ROUTE_ERRORS: Final = {"not_found", "redirect", "html_answer"}
_CERTIFICATE_NOTE_DAYS: Final = 21
_NAMES_SHOWN: Final = 3


class Probe(Struct, frozen=True):
    """A request that tests route, key and token without writing anything."""

    method: str
    path: str
    body: bytes = b""
    remark: str = ""  # added to a successful result
    hint: str = ""  # added if the path is not found

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


EMPTY_BATCH: Final = Probe("POST", INTAKE_PATH, EMPTY_BODY, remark="the batch was empty, so nothing was written")


class Checkup:
    """
    Connects to an endpoint as a sender does, and reports every step.

    Args:
        section: Section of the settings, `intake` or `report`.
        report: Called with every result as soon as it is known.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        report: Callable[[Item], None],
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        self._endpoint = endpoint
        self._delivery = delivery
        self._section = section
        self._connection = ConnectionSettings(endpoint, delivery, section)
        self._report_item = report
        self._wall_time = wall_time
        self._rng = rng
        self._skew = ClockSkew()
        self._date = ""

    def _report(self, result: Result, step: str, what: str) -> None:
        self._report_item(Item(result, f"{self._section}:{step}", what))

    # Connection -------------------------------------------------------------------------------------------------------

    async def connect(self) -> bool:
        """Resolve the name, connect, and set up TLS; return whether a request makes sense."""
        server = server_at(self._endpoint.base_url)
        if not await self._look_up(server):
            return False
        try:
            connection = Connection(self._connection)
        except ConfigError as error:
            self._report("fail", "connect" if "proxy" in error.key else "tls", str(error))
            return False
        try:
            self._report_connect(await connection.connect(), server)
            self._report_tls(await connection.secure(), server)
        except NoAnswerError as error:
            is_unreachable = error.step == "connect" and error.cause not in {"proxy", *SETUP_CAUSES}
            advice = f"; check {self._section}.base_url and firewalls" if is_unreachable else ""
            self._report("fail", error.step, f"{error}{advice}")
            return False
        finally:
            await connection.aclose()
        return True

    async def _look_up(self, server: Server) -> bool:
        """Resolve the name and report all addresses; the connection resolves it again."""
        host = server.host
        if self._endpoint.proxy is not None:
            self._report("ok", "dns", f"the proxy resolves {host}")
            return True
        if is_address(host):
            self._report("ok", "dns", f"{host} is an IP address, so no lookup is needed")
            return True
        limit_s = self._delivery.connect_timeout_seconds
        try:
            with anyio.fail_after(limit_s):
                addresses = await anyio.getaddrinfo(host, server.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = os_error_text(error) if isinstance(error, OSError) else "it is not a valid host name"
            if isinstance(error, TimeoutError):
                reason = f"no answer within {limit_s:g} s"
            advice = f"check {self._section}.base_url and the name resolution of this machine"
            self._report("fail", "dns", f"{host} cannot be resolved: {reason}; {advice}")
            return False
        found = ", ".join(dict.fromkeys(str(address[0]) for *_, address in addresses))
        self._report("ok", "dns", f"{host} resolves to {found}")
        return True

    def _report_connect(self, reached: Peer, server: Server) -> None:
        took = f"{1000 * reached.seconds:.0f} ms"
        if self._endpoint.proxy is None:
            self._report("ok", "connect", f"IPv{6 if ':' in reached.address else 4} in {took}")
            return
        connects = f", and connects to {server.host}, port {server.port}" if server.is_tls else ""
        self._report("ok", "connect", f"the proxy {self._endpoint.proxy} is reachable, in {took}{connects}")

    def _report_tls(self, tls: ssl.SSLObject | None, server: Server) -> None:
        if tls is not None:
            result, certificate = describe_certificate(tls.getpeercert(), self._wall_time())
            self._report(result, "tls", f"{(tls.version() or '').replace('v', ' ')}; {certificate}")
        elif is_loopback(server.host):
            self._report("ok", "tls", "none: base_url begins with http://")
        else:
            self._report("note", "tls", "none: base_url begins with http://, so key and token are sent in clear text")

    # Request ----------------------------------------------------------------------------------------------------------

    async def request(self, probe: Probe | None) -> None:
        """Get the credentials and, with a probe, send it; if the key is rejected, try the second one, too."""
        try:
            endpoint = Endpoint(self._connection)
            credentials = Credentials(self._connection, wall_time=self._wall_time, rng=self._rng)
            authorization = await credentials.authorize()
        except (ConfigError, NoTokenError) as error:
            self._report("fail", "credentials", str(error) if isinstance(error, ConfigError) else error.message)
            return
        if self._endpoint.oauth2 is not None:
            origin = f"the token endpoint {self._endpoint.oauth2.token_url}"
        else:
            assert self._endpoint.token is not None
            origin = describe_origin(self._endpoint.token)
        result, expiry = describe_expiry(credentials.token_expires_at, self._wall_time())
        self._report(result, "credentials", f"the token comes from {origin}{expiry}")
        if probe is None:
            return
        try:
            verdict = await self._send(probe, endpoint, authorization)
            if verdict is not None:
                self._report_verdict(verdict, probe, credentials.token_expires_at)
                if verdict.action is Action.CHANGE_KEY and credentials.refuse_key(authorization):
                    await self._try_second_key(probe, endpoint, credentials)
                self._report_clock()
        finally:
            await endpoint.aclose()

    async def _try_second_key(self, probe: Probe, endpoint: Endpoint, credentials: Credentials) -> None:
        try:
            authorization = await credentials.authorize()
        except NoTokenError as error:
            self._report("fail", "second-key", error.message)
            return
        verdict = await self._send(probe, endpoint, authorization)
        if verdict is not None:
            self._report_verdict(verdict, probe, credentials.token_expires_at, key="second-key")

    async def _send(self, probe: Probe, endpoint: Endpoint, authorization: Authorization) -> Verdict | None:
        """Send the request; report an error and return None if there is no answer."""
        is_compressed = bool(probe.body) and self._delivery.compression == "gzip"
        is_traced = bool(probe.body) and self._delivery.traceparent
        try:
            answer = await endpoint.request(
                probe.method,
                probe.path,
                compress(probe.body) if is_compressed else probe.body,
                authorization=authorization,
                traceparent=new_traceparent(self._rng) if is_traced else "",
                encoding="gzip" if is_compressed else "",
                max_answer_bytes=_ANSWER_BYTES,
            )
        except NoAnswerError as error:
            self._report("fail", error.step, str(error))
            return None
        wall_time = self._wall_time()
        self._date = answer.date
        self._skew.note(answer.date, wall_time)
        events = 0 if probe.body else None
        quote = partial(quotation, authorization=authorization)
        verdict = judge(answer, events=events, section=self._section, wall_time=wall_time, quote=quote)
        if probe.body and verdict.action is Action.ACCEPT and not answer.body.strip():
            message = "the answer is empty, and web servers may send such answers for any address"
            self._report("note", "answer", f"{message}; check that the service has the first records that you send")
        if is_compressed and verdict.status in {400, 415}:
            message = f"the service may not support compressed bodies (HTTP {verdict.status})"
            self._report("note", "compression", f"{message}; see delivery.compression")
        return verdict

    def _report_verdict(self, verdict: Verdict, probe: Probe, expires_at: float | None, key: str = "key") -> None:
        action = verdict.action
        is_forbidden = verdict.reason == "forbidden"
        is_rejected = action in {Action.BISECT, Action.HALVE}
        is_unreadable = bool(probe.body) and verdict.reason == UNREADABLE
        if probe.body:
            is_processed = is_rejected or is_unreadable or action is Action.ACCEPT  # it may reject an empty batch
        else:
            is_processed = action is Action.ACCEPT and verdict.status == 200
        if is_processed or is_forbidden:
            remark = f"; {probe.remark}" if is_processed or probe.body else ""
            self._report("ok", "route", f"{probe} reaches the service (HTTP {verdict.status}){remark}")
        if is_processed or is_forbidden or action is Action.THROTTLE:
            self._report("ok", key, "the subscription key is accepted")
        if is_processed:
            self._report("ok", "token", "the access token is accepted")
            if is_unreadable:
                self._report("note", "service", f"{verdict.message}; the answer to real records may differ")
        elif is_forbidden:
            self._report("fail", "permission", verdict.message)
        elif action is Action.CHANGE_KEY:
            name = f"{self._section}.subscription_key"
            self._report("fail", key, verdict.message.replace(name, name if key == "key" else f"{name}_secondary"))
        elif action is Action.RENEW_TOKEN:
            self._report("fail", "token", self._token_problem(verdict, expires_at))
        elif action is Action.THROTTLE:
            wait = "" if verdict.retry_after_s is None else f"; it asks to wait {verdict.retry_after_s:g} s"
            self._report("note", "service", f"{verdict.message}{wait}")
        elif action is Action.ACCEPT:
            self._report("fail", "service", f"{probe}: the service answered {verdict.status} instead of a report")
        elif is_rejected:
            self._report("fail", "service", f"the service refuses {probe} (HTTP {verdict.status})")
        elif verdict.reason in _ROUTE_ERRORS:
            self._report("fail", "route", f"{probe}: {verdict.message}{probe.hint}")
        else:
            self._report("fail", "service", verdict.message)

    def _token_problem(self, verdict: Verdict, expires_at: float | None) -> str:
        token, oauth2 = f"{self._section}.token", f"{self._section}.oauth2"
        setting = token if self._endpoint.oauth2 is None else f"{oauth2}, especially its scope"
        message = verdict.message.replace(f"{token} or {oauth2}", setting)
        result, expiry = describe_expiry(expires_at, self._wall_time())
        clock = "; perhaps a clock is wrong" if self._skew.seconds else ""
        return message + (expiry if result == "note" else "") + clock

    def _report_clock(self) -> None:
        skew_s = self._skew.seconds
        message = f"the service's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        if not self._date:
            self._report("note", "clock", "the service does not send its time")
        elif not skew_s:
            self._report("ok", "clock", "the clocks of the service and this machine differ by at most 2 s")
        elif abs(skew_s) <= SKEW_REPORTED_S:
            self._report("note", "clock", message)
        else:
            self._report("fail", "clock", f"{message}, so tokens may be refused; check both clocks")


def describe_origin(secret: Secret) -> str:
    """Describe where a secret comes from."""
    if isinstance(secret, LiteralSecret):
        return "the settings"
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        return f"the environment variable {secret.env}"
    # The arguments of a program are not shown: they may contain secrets.
    return f"the file {secret.file}" if secret.command is None else f"the program {secret.command[0]}"


def describe_expiry(expires_at: float | None, wall_time: float) -> tuple[Result, str]:
    """Describe a token's expiry as the end of a sentence; empty if unknown. Times are seconds since the epoch."""
    if expires_at is None:
        return "ok", ""
    left_s = expires_at - wall_time
    left = span(abs(left_s))
    return ("ok", f"; it expires in {left}") if left_s > 0 else ("note", f"; it expired {left} ago")


def describe_certificate(certificate: Any, wall_time: float) -> tuple[Result, str]:
    """Describe subject, issuer and expiry of a certificate as returned by `SSLSocket.getpeercert`."""
    subject, issuer = ({kind: value for ((kind, value), *_) in certificate.get(of, ())} for of in ("subject", "issuer"))
    names = [value for _, value in certificate.get("subjectAltName", ())] or [subject.get("commonName", "nobody")]
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    by = issuer.get("organizationName") or issuer.get("commonName") or "an unnamed authority"
    days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - wall_time) // 86_400)
    text = f"the certificate is for {shown}, by {by}, and expires in {several(days, 'day')}"
    return ("ok", text) if days >= _CERTIFICATE_NOTE_DAYS else ("note", f"{text}; renew it on the service")
