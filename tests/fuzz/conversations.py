"""
Conversations over real sockets: a whole shipper, or a report client, with a peer that sends arbitrary answers.

An input contains the answers to the first requests of a batch. A single answer is sent twice: on a reused connection
and on a new one. Afterwards the peer answers correctly. So each record must be settled exactly once, and a hostile
answer may settle records only if another HTTP parser reads it in the same way.
"""

from __future__ import annotations

import json
import time
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import cache
from random import Random
from typing import Final

from shipper.delivery.credentials import Authorization
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError
from shipper.model.errors import ReportError
from shipper.report.client import ReportClient
from tests.answer_bodies import IDS, SAMPLES
from tests.fuzz.answers import BODIES, CANARY, DATES, GRANTS, HEADS, NAMES, check_acceptance
from tests.fuzz.engine import Target
from tests.fuzz.living import DELIVERY, Living, endpoint_at, loop, settings_for
from tests.fuzz.mutation import mutator
from tests.fuzz.peer import BETWEEN, CHUNKED, LENGTH, Peer, Reply, Script, read_with_http_client, script_of
from tests.report_documents import brand, entry
from tests.report_service import Asked, document

_NEXT: Final = b"\x1d"  # separates the answers of an input
_ANSWERS_MAX: Final = 6
_FOLLOWED: Final = 0.6
_REQUESTS_MAX: Final = 200  # time limit for settling the records of an input
_GOOD: Final = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_NO_TOKEN: Final = b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"
_TAKES_APART: Final = {*range(200, 300), 400, 409, 413, 415, 422}


class _Step:
    """A hostile answer: the number of events in its request, and how many were accepted and refused because of it."""

    def __init__(self, living: Living, script: Script, request: bytes) -> None:
        self._living = living
        self._script = script
        self.events = request.count(b'"EventId"')
        self.accepted, self.refused = -living.accepted, -living.refused
        self.has_ended = False

    def end(self) -> None:
        if not self.has_ended:
            self.accepted += self._living.accepted
            self.refused += self._living.refused
        self.has_ended = True

    def check(self) -> None:
        """Assert that another HTTP parser reads the answer in the same way."""
        if not (self.accepted or self.refused):
            return
        answer = read_with_http_client(self._script, "POST")
        if self.accepted:
            check_acceptance(answer, events=self.events, is_whole=self.accepted == self.events)
        assert answer.status in _TAKES_APART, "records were refused by an answer that refuses none"


class _Talk:
    """
    One input's conversation with a shipper.

    Args:
        scripts: The answers to its first requests.
    """

    def __init__(self, living: Living, scripts: Sequence[Script]) -> None:
        self.living = living
        self._scripts = iter(scripts)
        self.steps: list[_Step] = []
        self.reasons: list[str] = []
        self.requests = 0

    def answer(self, request: bytes) -> Reply:
        """Return the answers of the input, then good ones."""
        self.note()
        script = next(self._scripts, None)
        if script is None:
            return _GOOD
        self.steps.append(_Step(self.living, script, request))
        return script

    def note(self) -> None:
        """Record that the effects of the previous answer are complete."""
        self.requests += 1
        assert self.requests <= _REQUESTS_MAX, "a request is repeated endlessly"
        for step in self.steps:
            step.end()
        gate = self.living.gate
        assert CANARY not in gate.problem, "the message quotes the answer"
        assert gate.problem.isprintable()
        self.reasons.append(gate.reason)

    def outcome(self) -> object:
        """Check all steps after everything is settled, and return the outcome."""
        for step in self.steps:
            step.end()
            step.check()
        return (
            tuple(self.reasons[:4]),
            tuple((step.accepted, step.refused) for step in self.steps),
            min(self.requests, 10),
        )


# Answers to batches ---------------------------------------------------------------------------------------------------


class _Intake:
    """A service that answers batches with the input."""

    def __init__(self) -> None:
        self._talk: _Talk
        self._peer = Peer(lambda request: self._talk.answer(request))
        self._living = Living(lambda folder: settings_for(folder, endpoint_at(self._peer.port)))

    async def converse(self, data: bytes) -> object:
        await self._peer.listen()
        scripts = [script_of(each) for each in data.split(_NEXT)[:_ANSWERS_MAX]]
        self._talk = _Talk(self._living, scripts if len(scripts) > 1 else scripts * 2)
        await self._living.ship()
        return self._talk.outcome()


_intake: Final = cache(_Intake)


def check_answer(data: bytes) -> object:
    """Check that each record is settled once, and only accepted by an answer that accepts it."""
    return loop().run(_intake().converse(data))


# Answers of a token endpoint ------------------------------------------------------------------------------------------


class _Tokens:
    """A service that refuses the first token, and a token endpoint that answers with the input."""

    def __init__(self) -> None:
        self._talk: _Talk
        self._script: Script
        self._hostile = 0
        self._granted = 0
        self._used: list[str] = []
        self._intake = Peer(self._answer)
        self._endpoint = Peer(self._grant)
        self._living = Living(
            lambda folder: settings_for(folder, endpoint_at(self._intake.port, token_port=self._endpoint.port))
        )

    def _answer(self, request: bytes) -> Reply:
        self._talk.note()
        self._used.append(request.partition(b"Bearer ")[2].partition(b"\r\n")[0].decode("latin-1"))
        return _NO_TOKEN if len(self._used) == 1 else _GOOD

    def _grant(self, request: bytes) -> Reply:
        self._talk.note()
        if self._hostile and self._used:
            self._hostile -= 1
            return self._script
        self._granted += 1
        body = b'{"access_token":"good-%d","token_type":"Bearer","expires_in":3600}' % self._granted
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def converse(self, data: bytes) -> object:
        await self._intake.listen()
        await self._endpoint.listen()
        self._script = script_of(data)
        self._talk = _Talk(self._living, [])
        self._used, self._hostile = [], 1
        await self._living.ship()
        return (*self._talk.reasons[:4], self._check_token(self._used[-1]), min(self._talk.requests, 10))

    def _check_token(self, token: str) -> bool:
        """Assert that the token in use was granted, and return whether the input granted it."""
        if token in {f"good-{number}" for number in range(self._granted + 1)}:
            return False
        assert token.isascii()
        assert token.isprintable()
        answer = read_with_http_client(self._script, "POST")
        assert 200 <= answer.status < 300
        assert json.loads(answer.body)["access_token"] == token
        return True


_tokens: Final = cache(_Tokens)


def check_grant(data: bytes) -> object:
    """Check that only granted tokens are used, and that delivery pauses without a token."""
    return loop().run(_tokens().converse(data))


# Answers to a report client and to a TLS client ----------------------------------------------------------------------

_DAYS: Final = (date(2026, 10, 1), date(2026, 10, 31))
_REPORT: Final = document(Asked(1001, *_DAYS, "", ""))
_GOOD_REPORT: Final = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(_REPORT), _REPORT)


class _Reports:
    """A service that returns one report, and then the input."""

    def __init__(self) -> None:
        self._replies: Iterator[Reply]
        self._script: Script
        self._peer = Peer(lambda _: next(self._replies, self._script))

    async def converse(self, data: bytes) -> object:
        await self._peer.listen()
        self._script = script_of(data)
        self._replies = iter([_GOOD_REPORT])
        endpoint = endpoint_at(self._peer.port)
        async with ReportClient(
            endpoint, DELIVERY, concurrency=1, give_up_after_s=0, wall_time=time.time, rng=Random(1)
        ) as client:
            while True:
                with suppress(ReportError):  # a busy machine may exceed the time limit
                    await client.fetch(1001, *_DAYS)
                    break
            return await self._outcome(client), await self._outcome(client)

    async def _outcome(self, client: ReportClient) -> object:
        try:
            fetched = await client.fetch(1001, *_DAYS)
        except ReportError as error:
            return _message(error).partition(": ")[2].partition("`")[0][:30]
        answer = read_with_http_client(self._script, "GET")
        assert (answer.status, answer.body.removeprefix(BOM_UTF8)) == (200, fetched.body)
        return len(fetched.unknown_fields), len(fetched.report.brands)


def _message(error: Exception) -> str:
    text = str(error)
    assert CANARY not in text
    assert text.isprintable()
    assert len(text) < 1_000
    return text


class _Handshakes:
    """A peer that answers a TLS handshake with the input."""

    def __init__(self) -> None:
        self._script: Script
        self._peer = Peer(lambda _: self._script, is_plain=True)
        self._context = ConnectionSettings(endpoint_at(1, scheme="https"), DELIVERY, "intake").service_context

    async def converse(self, data: bytes) -> object:
        await self._peer.listen()
        self._script = script_of(data)
        settings = ConnectionSettings(endpoint_at(self._peer.port, scheme="https"), DELIVERY, "intake")
        settings.service_context = self._context  # creating a context costs more than a conversation
        used = Endpoint(settings)
        try:
            answer = await used.request("POST", "/", b"{}", authorization=Authorization("t", "k"), max_answer_bytes=9)
        except NoAnswerError as error:
            return error.cause, _message(error)
        finally:
            await used.aclose()
        raise AssertionError(f"an answer was accepted without TLS: {answer}")


_reports: Final = cache(_Reports)
_handshakes: Final = cache(_Handshakes)


def check_report(data: bytes) -> object:
    """Check that the result is exactly the report that was sent, or an error."""
    return loop().run(_reports().converse(data))


def check_handshake(data: bytes) -> object:
    """Check that nothing is sent to a peer that is not authenticated."""
    return loop().run(_handshakes().converse(data))


# Samples --------------------------------------------------------------------------------------------------------------


def _http(status: bytes, body: bytes = b"", *headers: bytes, end: bytes = b"close") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Type: application/json", *headers]
    return end + b"\n" + b"\r\n".join(lines) + b"\r\n" + LENGTH + b"\r\n" + body


_CHUNKS: Final = b"HTTP/1.1 202 x\r\n" + CHUNKED + b"\r\n"
_RAW_CHUNKS: Final = b"HTTP/1.1 202 x\r\nTransfer-Encoding: chunked\r\n\r\n"
_FRAMED: Final = (
    *(end + b"\n" + _CHUNKS + b'{"accepted":' + BETWEEN + b"3}" for end in (b"keep", b"close", b"reset", b"hold")),
    *(b"close\nHTTP/1.1 202 x\r\n%b\r\n{}" % each for each in (b"", LENGTH + LENGTH, LENGTH + CHUNKED)),
    b"close\nHTTP/1.0 202 x\r\n\r\nOK",
    b"keep\nHTTP/1.1 100 Continue\r\n\r\n" + BETWEEN + b"HTTP/1.1 103 x\r\nLink: </a>\r\n\r\n" + _GOOD,
    b"keep\nHTTP/1.1 101 x\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
    b"keep\n" + _GOOD + BETWEEN + _GOOD,
    b"close\n" + _RAW_CHUNKS + b"2;a=b\r\n{}\r\n0\r\nX-More: y\r\n\r\n",
    b"close\n" + _RAW_CHUNKS + b"ffffffffffffffff\r\n{}\r\n",
    b"close\n", b"reset\n", b"hold\nHTTP/1.1 202", b"reset\nHTTP/1.1 202 x\r\n\r\n{}",
    b"close\n\x16\x03\x01\x00\x05\x01\x00", b"close\nHTTP/1.1 202 x\nContent-Length: 2\n\n{}",
    b"close\nHTTP/1.1 202 x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    b"close\nHTTP/1.1 202 x\r\nX: " + b"y" * 3_000 + b"\r\n \r\nfolded\r\n\r\n{}",
)  # fmt: skip
_FLOODS: Final = (
    b"flood\nHTTP/1.1 100 Continue\r\n\r\n",
    b"flood\nHTTP/1.1 202 x\r\n" + BETWEEN + b"X: y\r\n",
    b"flood\n" + _RAW_CHUNKS + b"2\r\n{}\r\n0\r\n" + BETWEEN + b"X-More: y\r\n",
    b"flood\n" + _RAW_CHUNKS + b"2;" + BETWEEN + b"x",
    b"flood\nHTTP/1.1 202 x\r\n\r\n" + BETWEEN + b" " * 100,
)
_STATUSES: Final = (
    *(head.partition(b"|")[0] + b" x" for head in HEADS),
    *(b"000 x", b"099", b"199 x", b"299 x", b"600 x", b"999 x", b"9999 x", b"20", b"-20 x"),
)
_WORDS: Final = (
    *(_NEXT, BETWEEN, LENGTH, CHUNKED, _GOOD, _RAW_CHUNKS, b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b":", b"\t"),
    b"\0",
    *(b"HTTP/1.1 %b\r\n" % status for status in _STATUSES),
    *(b"keep\n", b"hold\n", b"reset\n", b"0\r\n", b"0\r\n\r\n", b"2\r\n{}\r\n", b"-1\r\n", b";x=y", b"1_0", b"+2"),
    b"0x2",
    *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    *(b"Content-Length: %b\r\n" % each for each in (b"-1", b"2", b"9" * 30, b"1, 2", b"2, 2", b"")),
    *(b"Transfer-Encoding: %b\r\n" % each for each in (b"chunked", b"gzip", b"gzip, chunked", b"identity", b"x")),
    *(b"Content-Encoding: gzip\r\n", b"\x1f\x8b\x08\0\0\0\0\0", b"Content-Type: text/html\r\n", b"\xef\xbb\xbf"),
    *(b"Retry-After: %b\r\n" % each for each in (b"1", b"-1", b"1e9", b"0." + b"0" * 300, *DATES)),
    *(b"Date: %b\r\n" % each for each in DATES),
    *(b"WWW-Authenticate: Bearer\r\n", b"Location: http://127.0.0.1/\r\n", b"Set-Cookie: a=b\r\n", CANARY.encode()),
    *(b"[" * 900, b'{"a":' * 900, b"9" * 500, b'{"0":' + b"[" * 930 + b"]" * 930 + b"}", b"\x1b[2J", b"\xff"),
)
_ANSWERS: Final = [
    *(_http(b"202 x", body) for body in BODIES),
    *(_http(b"422 x", body) for body in BODIES),
    *(_http(status) for status in _STATUSES),
    *(_http(b"503 x", b"", b"Retry-After: " + each) for each in DATES),
    *(_http(b"%d x" % sample.status, sample.body, end=b"keep") for sample in SAMPLES[::16]),
    *_FRAMED,
    *_FLOODS,
]
_GRANTED: Final = [
    *(_http(b"200 x", grant) for grant in GRANTS),
    *(_http(b"%b x" % status, b'{"error":"invalid_client"}') for status in (b"400", b"401", b"429", b"503", b"302")),
    _http(b"400 x", b'{"error":"%b","error_description":"%b"}' % (CANARY.encode(), CANARY.encode())),
    *(_http(b"200 x", b'{"access_token":"x","expires_in":%b}' % each) for each in (b"1e-9", b"0.2", b"1e400", b"-1")),
    *_FRAMED,
    *_FLOODS[:3],
]
_REPORTED: Final = [
    _http(b"200 x", _REPORT, end=b"keep"),
    _http(b"200 x", document(Asked(1001, *_DAYS, "", ""), brands=[brand(entry(), entry(9, name=CANARY))])),
    *(_http(b"200 x", body) for body in BODIES[:6]),
    *(_http(status, _REPORT) for status in _STATUSES),
    *_FRAMED,
    *_FLOODS[:3],
]
_TLS: Final = [
    *(b"close\n" + each for each in (b"", b"\x15\x03\x03\0\x02\x02\x28", b"\x15\x03\x01\0\x02\x02\x46", _GOOD)),
    b"close\n\x16\x03\x03\0\x2a\x02\0\0\x26\x03\x03" + bytes(32) + b"\0\x13\x01\0",
    b"reset\n\x16\x03\x03", b"hold\n\x16\x03\x03\x40\0", b"flood\n\x17\x03\x03\0\x01x",
    b"flood\n\x14\x03\x03\0\x01\x01",
]  # fmt: skip
_mutate: Final = mutator(
    words=[*_WORDS, *BODIES], values=[*IDS, IDS[0].upper(), CANARY, 3, 4, 200, 422, 503, 10**18, 1e300], names=NAMES
)


def _mutate_talk(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate an answer, and usually append other answers unchanged."""
    data = _mutate(rng, data, others)
    while rng.random() < _FOLLOWED and data.count(_NEXT) < _ANSWERS_MAX - 1:
        data += _NEXT + others[int(rng.random() * len(others))]
    return data


TARGETS: Final = (
    Target("conversations", check_answer, _ANSWERS, _mutate_talk, share=0.5),
    Target("grants", check_grant, _GRANTED, _mutate, share=0.2),
    Target("fetches", check_report, _REPORTED, _mutate, share=0.2),
    Target("handshakes", check_handshake, _TLS, mutator(words=[b"\x15\x03\x03", b"\x16\x03\x03", _GOOD]), share=0.1),
)
