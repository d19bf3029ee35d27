"""Checks everything between this machine and an endpoint, step by step; nothing is written there."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final, Literal

import anyio
from msgspec import Struct

from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.connection import Connection, Reached, Server, server_at
from shipper.delivery.credentials import (
    SKEW_TOLD_S,
    Authorization,
    ClockSkew,
    Credentials,
    NoTokenError,
    credentials_of,
)
from shipper.delivery.endpoint import Endpoint, NoAnswerError, compressed, make_ssl_context, new_traceparent
from shipper.delivery.quoting import quotation
from shipper.delivery.tls import words
from shipper.delivery.verdicts import UNREADABLE, Action, Verdict, judge
from shipper.model.errors import ConfigError
from shipper.model.units import several, span
from shipper.model.wire import BODY_HEAD, BODY_TAIL, INTAKE_PATH
from shipper.system.addresses import is_address, is_loopback

_ANSWER_BYTES: Final = 64 << 20  # as much as a report may have
_NO_ROUTE: Final = {"not_found", "redirect", "html_answer"}
_CERTIFICATE_NOTE_DAYS: Final = 21
_NAMES_SHOWN: Final = 3

Result = Literal["ok", "note", "fail"]  # `note`: not wrong, but worth knowing


class Item(Struct, frozen=True):
    """
    One finding.

    Attributes:
        name: A setting, such as `intake.token`, or a step to the service, such as `intake:tls`.
        what: For a person; never a secret.
    """

    result: Result
    name: str
    what: str


class Probe(Struct, frozen=True):
    """
    A request that shows what the service makes of route, key and token, and writes nothing.

    Attributes:
        remark: Told with the answer.
        or_else: What else to look at if nothing is there.
    """

    method: str
    path: str
    body: bytes = b""
    remark: str = ""
    or_else: str = ""


EMPTY_BATCH: Final = Probe(
    "POST", INTAKE_PATH, BODY_HEAD + BODY_TAIL, remark="the batch was empty, so that nothing was written"
)


class Checkup:
    """
    Connects to one endpoint as a sender does, and reports each step.

    Args:
        section: The settings' section, `intake` or `report`.
        tell: Called with each item as soon as it is known.
        now: The clock that does not jump.
        wall_time: Seconds since the epoch.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        tell: Callable[[Item], None],
        now: Callable[[], float] = anyio.current_time,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        self._endpoint = endpoint
        self._delivery = delivery
        self._section = section
        self._tell_item = tell
        self._now = now
        self._wall_time = wall_time
        self._rng = rng
        self._skew = ClockSkew()
        self._date = ""

    def _tell(self, result: Result, step: str, what: str) -> None:
        self._tell_item(Item(result, f"{self._section}:{step}", what))

    # The way there ----------------------------------------------------------------------------------------------------

    async def reach(self) -> bool:
        """Look the name up, connect, and agree on TLS; returns whether a request makes sense."""
        server = server_at(self._endpoint.base_url)
        if not await self._look_up(server):
            return False
        try:
            connection = Connection(
                self._endpoint.base_url, self._endpoint, self._delivery, section=self._section, ssl_context=None
            )
        except ConfigError as error:
            self._tell("fail", "connect" if "proxy" in error.key else "tls", str(error))
            return False
        try:
            self._tell_reached(await connection.connect(), server)
            self._tell_tls(await connection.secure(), server)
        except NoAnswerError as error:
            is_unreachable = error.step == "connect" and error.cause != "proxy" and not error.is_tls
            advice = f"; check {self._section}.base_url, and firewalls on the way" if is_unreachable else ""
            self._tell("fail", error.step, f"{error}{advice}")
            return False
        finally:
            await connection.aclose()
        return True

    async def _look_up(self, server: Server) -> bool:
        """Look the name up and report all addresses; the connection does its own lookup."""
        host = server.host
        if self._endpoint.proxy is not None:
            self._tell("ok", "dns", f"{host} is not looked up here: the proxy does that")
            return True
        if is_address(host):
            self._tell("ok", "dns", f"{host} is an IP address, so no lookup is needed")
            return True
        limit_s = self._delivery.connect_timeout_seconds
        try:
            with anyio.fail_after(limit_s):
                found = await anyio.getaddrinfo(host, server.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = words(error) if isinstance(error, OSError) else "it is not a valid host name"
            if isinstance(error, TimeoutError):
                why = f"no answer within {limit_s:g} s"
            advice = f"check {self._section}.base_url, and how this machine looks names up"
            self._tell("fail", "dns", f"{host} is not found: {why}; {advice}")
            return False
        self._tell("ok", "dns", f"{host} is {', '.join(dict.fromkeys(str(address[0]) for *_, address in found))}")
        return True

    def _tell_reached(self, reached: Reached, server: Server) -> None:
        took = f"{1000 * reached.seconds:.0f} ms"
        if self._endpoint.proxy is None:
            self._tell("ok", "connect", f"IPv{6 if ':' in reached.address else 4} in {took}")
            return
        connects = f", and connects to {server.host}, port {server.port}" if server.is_tls else ""
        self._tell("ok", "connect", f"the proxy {self._endpoint.proxy} is reachable, in {took}{connects}")

    def _tell_tls(self, tls: ssl.SSLObject | None, server: Server) -> None:
        if tls is None:
            is_here = is_loopback(server.host)
            what = "none: base_url begins with http://" + ("" if is_here else ", so key and token go in clear text")
            self._tell("ok" if is_here else "note", "tls", what)
            return
        result, certificate = certificate_words(tls.getpeercert(), self._wall_time())
        self._tell(result, "tls", f"{(tls.version() or '').replace('v', ' ')}; {certificate}")

    # The request ------------------------------------------------------------------------------------------------------

    async def ask(self, probe: Probe | None) -> None:
        """
        Get the credentials, and send a request; once more if the key is refused and there is a second one.

        Args:
            probe: None = nothing is sent.
        """
        try:
            ssl_context = make_ssl_context(self._endpoint, self._section)
            endpoint = Endpoint(self._endpoint, self._delivery, section=self._section, ssl_context=ssl_context)
            credentials = self._credentials(ssl_context)
            authorization = await credentials.authorize()
        except ConfigError as error:
            self._tell("fail", "credentials", str(error))
            return
        except NoTokenError as error:
            self._tell("fail", "credentials", error.message)
            return
        result, life = life_words(credentials.token_expires_at, self._wall_time())
        self._tell(result, "credentials", f"the token comes from {self._token_origin()}{life}")
        if probe is None:
            return
        try:
            verdict = await self._sent(probe, endpoint, authorization)
            if verdict is not None:
                self._tell_verdict(verdict, probe, credentials.token_expires_at)
                if verdict.action is Action.CHANGE_KEY and credentials.refuse_key(authorization):
                    await self._try_second_key(probe, endpoint, credentials)
                self._tell_clock()
        finally:
            await endpoint.aclose()

    async def _try_second_key(self, probe: Probe, endpoint: Endpoint, credentials: Credentials) -> None:
        try:
            authorization = await credentials.authorize()
        except NoTokenError as error:
            self._tell("fail", "second-key", error.message)
            return
        verdict = await self._sent(probe, endpoint, authorization)
        if verdict is not None:
            self._tell_verdict(verdict, probe, credentials.token_expires_at, key="second-key")

    def _credentials(self, ssl_context: ssl.SSLContext | None) -> Credentials:
        return credentials_of(
            self._endpoint,
            self._delivery,
            section=self._section,
            ssl_context=ssl_context,
            now=self._now,
            wall_time=self._wall_time,
            rng=self._rng,
        )

    def _token_origin(self) -> str:
        if self._endpoint.oauth2 is not None:
            return f"the token endpoint {self._endpoint.oauth2.token_url}"
        assert self._endpoint.token is not None
        return origin_of(self._endpoint.token)

    async def _sent(self, probe: Probe, endpoint: Endpoint, authorization: Authorization) -> Verdict | None:
        """Send the request; None if there was no answer, and that is told."""
        is_compressed = bool(probe.body) and self._delivery.compression == "gzip"
        try:
            answer = await endpoint.request(
                probe.method,
                probe.path,
                compressed(probe.body) if is_compressed else probe.body,
                authorization=authorization,
                traceparent=self._traceparent() if probe.body else "",
                encoding="gzip" if is_compressed else "",
                max_answer_bytes=_ANSWER_BYTES,
            )
        except NoAnswerError as error:
            self._tell("fail", error.step, str(error))
            return None
        wall_time = self._wall_time()
        self._date = answer.date
        self._skew.note(answer.date, wall_time)
        events = 0 if probe.body else None
        quote = partial(quotation, authorization=authorization)
        verdict = judge(answer, events=events, section=self._section, wall_time=wall_time, quote=quote)
        if is_compressed and verdict.status in {400, 415}:
            what = f"the service may not understand compressed bodies (HTTP {verdict.status})"
            self._tell("note", "compression", f"{what}; see delivery.compression")
        return verdict

    def _traceparent(self) -> str:
        """Make a header such as every attempt to ship has."""
        if not self._delivery.traceparent:
            return ""
        return new_traceparent(self._rng)

    # What an answer means ---------------------------------------------------------------------------------------------

    def _tell_verdict(self, verdict: Verdict, probe: Probe, expires_at: float | None, key: str = "key") -> None:
        is_forbidden = verdict.reason == "forbidden"
        is_refused = verdict.action in {Action.BISECT, Action.HALVE}
        # An empty batch may well be refused; then it was looked at. A report is there, or is not.
        is_denied = bool(probe.body) and verdict.reason == UNREADABLE
        if probe.body:
            is_taken = is_refused or is_denied or verdict.action is Action.ACCEPT
        else:
            is_taken = verdict.action is Action.ACCEPT and verdict.status == 200
        request = f"{probe.method} {probe.path}"
        if is_taken or is_forbidden:
            remark = f"; {probe.remark}" if is_taken or probe.body else ""
            self._tell("ok", "route", f"{request} leads to the service (HTTP {verdict.status}){remark}")
        if is_taken or is_forbidden or verdict.action is Action.THROTTLE:
            self._tell("ok", key, "the subscription key is accepted")
        if is_taken:
            self._tell("ok", "token", "the access token is accepted")
            if is_denied:
                self._tell("note", "service", f"{verdict.message}; the answer to records may be another one")
        elif is_forbidden:
            self._tell("fail", "permission", verdict.message)
        elif verdict.action is Action.CHANGE_KEY:
            name = f"{self._section}.subscription_key"
            self._tell("fail", key, verdict.message.replace(name, name if key == "key" else f"{name}_secondary"))
        elif verdict.action is Action.RENEW_TOKEN:
            self._tell("fail", "token", self._refused_token(verdict, expires_at))
        elif verdict.action is Action.THROTTLE:
            wait = "" if verdict.retry_after_s is None else f"; it asks for a wait of {verdict.retry_after_s:g} s"
            self._tell("note", "service", f"{verdict.message}{wait}")
        elif verdict.action is Action.ACCEPT:
            self._tell("fail", "service", f"{request}: the service answered {verdict.status} instead of a report")
        elif is_refused:
            self._tell("fail", "service", f"the service refuses {request} (HTTP {verdict.status})")
        elif verdict.reason in _NO_ROUTE:
            self._tell("fail", "route", f"{request}: {verdict.message}{probe.or_else}")
        else:
            self._tell("fail", "service", verdict.message)

    def _refused_token(self, verdict: Verdict, expires_at: float | None) -> str:
        either = f"{self._section}.token or {self._section}.oauth2"
        one = (
            f"{self._section}.token"
            if self._endpoint.oauth2 is None
            else f"{self._section}.oauth2, its scope above all"
        )
        what = verdict.message.replace(either, one)
        result, life = life_words(expires_at, self._wall_time())
        return what + (life if result == "note" else "") + ("; the clocks may be why" if self._skew.seconds else "")

    def _tell_clock(self) -> None:
        skew_s = self._skew.seconds
        what = f"the service's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        if not self._date:
            self._tell("note", "clock", "the service does not say what time it is")
        elif not skew_s:
            self._tell("ok", "clock", "the service's clock is no more than 2 s from this machine's")
        elif abs(skew_s) <= SKEW_TOLD_S:
            self._tell("note", "clock", what)
        else:
            self._tell("fail", "clock", f"{what}, and tokens may be refused for that; check the time of both")


def origin_of(secret: Secret) -> str:
    """Describe where a secret is kept."""
    if isinstance(secret, LiteralSecret):
        return "the settings themselves"
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        return f"the environment variable {secret.env}"
    # The arguments of a program are not shown: they may say more than they should.
    return f"the file {secret.file}" if secret.command is None else f"the program {secret.command[0]}"


def life_words(expires_at: float | None, wall_time: float) -> tuple[Result, str]:
    """
    Return when a token expires, as the end of a sentence; empty if that is not known.

    Args:
        expires_at, wall_time: Seconds since the epoch.
    """
    if expires_at is None:
        return "ok", ""
    left_s = expires_at - wall_time
    left = span(abs(left_s))
    return ("ok", f"; it expires in {left}") if left_s > 0 else ("note", f"; it expired {left} ago")


def certificate_words(certificate: Any, wall_time: float) -> tuple[Result, str]:
    """
    Describe whose a certificate is, by whom, and until when.

    Args:
        certificate: In the form of `SSLSocket.getpeercert`.
        wall_time: Seconds since the epoch.
    """
    subject, issuer = ({kind: value for ((kind, value), *_) in certificate.get(of, ())} for of in ("subject", "issuer"))
    names = [value for _, value in certificate.get("subjectAltName", ())] or [subject.get("commonName", "nobody")]
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    by = issuer.get("organizationName") or issuer.get("commonName") or "an authority without a name"
    days = int((ssl.cert_time_to_seconds(certificate["notAfter"]) - wall_time) // 86_400)
    what = f"the certificate is for {shown}, by {by}, and expires in {several(days, 'day')}"
    return ("ok", what) if days >= _CERTIFICATE_NOTE_DAYS else ("note", f"{what}: it has to be renewed there")
