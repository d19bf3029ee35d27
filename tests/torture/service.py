"""The service: misbehaves on demand, and records deliveries in the journal."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from random import Random, SystemRandom
from typing import Final, NamedTuple, Self

import msgspec

from tests.e2e.fake_service import OK, RESET, FakeService, Reply, is_peer_gone
from tests.torture.journal import READ_TIMEOUT_S, Journal
from tests.torture.records import POISON

TOKEN_LIFE_S: Final = 20
_HANG_S: Final = 3 * READ_TIMEOUT_S
_EFFECT_LIMIT_S: Final = 20.0


@dataclass(eq=False)
class Misbehaviour:
    """
    What the service does instead of answering correctly.

    Attributes:
        stores: Whether it stores the events first.
        hangs: Whether it sends no answer.
        loses_answer: Whether the sender cannot know that they were stored.
        over_events: Smaller batches are answered correctly.
        hits: Number of requests affected.
    """

    reply: Reply = OK
    stores: bool = False
    hangs: bool = False
    loses_answer: bool = True
    over_events: int = 0
    hits: int = 0

    def pick(self) -> Misbehaviour | None:
        """Return what happens to a request; None = nothing."""
        return self


class Medley(Misbehaviour):
    """Applies one of several misbehaviours to a share of all requests."""

    _SHARE: Final = 0.3

    def __init__(self, several: Sequence[Misbehaviour], rng: Random) -> None:
        super().__init__()
        self._several = several
        self._rng = rng

    def pick(self) -> Misbehaviour | None:
        if self._rng.random() > self._SHARE:
            return None
        self.hits += 1
        return self._rng.choice(self._several)


class Shape(NamedTuple):
    """
    The form of an answer to a batch with refused events.

    Attributes:
        document: Creates the body from the EventIds of the batch, the poison among them, and those to send again.
        is_vague: Whether it does not name the poison, so that good events are sent again.
        again: Every n-th event must be sent again; 0 = none.
    """

    document: Callable[[list[str], set[int], set[int]], object]
    status: int = 202
    is_vague: bool = False
    again: int = 0


def _one_by_one(ids: list[str], poison: set[int], again: set[int]) -> object:
    """Return a result for each event, in alternating forms."""
    good, bad, later = (201, "accepted", "200"), (400, "denied", "422"), (503.0, "429", "unavailable")
    kinds = [bad if index in poison else later if index in again else good for index in range(len(ids))]
    return {"results": [{"EventId": ids[index], "status": kind[index % 3]} for index, kind in enumerate(kinds)]}


def _named(ids: list[str], poison: set[int], _: set[int]) -> object:
    rejected = [{"index": index, "EventId": ids[index], "message": "is not valid"} for index in sorted(poison)]
    return {"accepted": len(ids) - len(poison), "duplicates": 0, "rejected": rejected}


NAMED: Final = (
    Shape(_named),
    Shape(_one_by_one, status=207),
    Shape(lambda ids, poison, _: {"rejectedEventIds": [ids[index] for index in sorted(poison)]}),
    Shape(lambda ids, poison, _: {"errors": {f"events[{index}].IP": ["is not valid"] for index in poison}}),
    Shape(lambda ids, poison, _: [{"status": 400 if index in poison else 202} for index in range(len(ids))]),
)
VAGUE: Final = (
    Shape(lambda ids, poison, _: {"accepted": len(ids) - len(poison), "rejected": len(poison)}, is_vague=True),
    Shape(
        lambda _ids, poison, _: {"errors": [{"row": index + 1, "message": "bad"} for index in poison]}, is_vague=True
    ),
)
AGAIN: Final = (Shape(_one_by_one, status=207, again=3), Shape(_one_by_one, again=2))


class Batch(msgspec.Struct):
    EventType: str
    events: list[msgspec.Raw]


class TokenEndpoint(FakeService):
    """
    Issues tokens, and knows which are valid.

    Attributes:
        prefix: The prefix of all tokens.
        is_away: Whether it issues no tokens.
        failures: Number of failed token requests.
        refused: Number of requests to the service with an invalid token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.misbehaviour: Misbehaviour | None = None
        self.prefix = "token"
        self.is_away = False
        self.failures = self.refused = 0
        self._until: dict[str, float] = {}
        self._issued = 0

    def arrived(self, headers: Message, body: bytes) -> Reply:
        if self.is_away:
            self.failures += 1
            return Reply(status=503)
        if bad := self.misbehaviour and self.misbehaviour.pick():
            bad.hits += 1
            return bad.reply
        self._issued += 1
        token = f"{self.prefix}-{self._issued}"
        self._until[token] = time.monotonic() + TOKEN_LIFE_S
        granted = {"token_type": "Bearer", "expires_in": TOKEN_LIFE_S, "access_token": token}
        return Reply(status=200, body=json.dumps(granted).encode())

    def is_good(self, header: str | None) -> bool:
        is_good = self._until.get((header or "").removeprefix("Bearer "), 0.0) > time.monotonic()
        self.refused += not is_good
        return is_good

    def revoke(self) -> None:
        self._until = {}


class Intake(FakeService):
    """The route for batches; poison is refused with its batch, or in the form of `shape`."""

    def __init__(self, journal: Journal, tokens: TokenEndpoint, port: int) -> None:
        super().__init__(port)
        self.misbehaviour: Misbehaviour | None = None
        self.shape: Shape | None = None
        self.shaped = 0
        self._journal = journal
        self._tokens = tokens
        self._mine = threading.local()

    def connected(self, connection: socket.socket) -> None:
        super().connected(connection)
        self._mine.connection = connection
        self._mine.delivery = None

    def disconnected(self, connection: socket.socket) -> None:
        super().disconnected(connection)
        if self._mine.delivery is not None:
            self._mine.delivery.is_given_up = True

    def arrived(self, headers: Message, body: bytes) -> Reply:
        self._mine.delivery = None
        reply = self._reply(headers, body)
        with self._journal.lock:
            self._journal.requests[0 if reply.fault in {"reset", "store_and_reset"} else reply.status] += 1
        return reply

    def done(self) -> None:
        super().done()
        delivery = self._mine.delivery
        if delivery is not None and delivery.doubt == "no answer" and not is_peer_gone(self._mine.connection):
            delivery.doubt = ""

    def _reply(self, headers: Message, body: bytes) -> Reply:
        bad = self.misbehaviour and self.misbehaviour.pick()
        raws = msgspec.json.decode(body, type=Batch).events
        if bad is None or len(raws) <= bad.over_events:
            return self._handle(headers, raws)
        if not bad.stores:
            bad.hits += 1
            return self._hang() if bad.hangs else bad.reply
        reply = self._handle(headers, raws)
        delivery = self._mine.delivery
        if delivery is None:
            return reply
        if bad.loses_answer:
            delivery.doubt = "answer lost"
        bad.hits += 1
        return self._hang() if bad.hangs else bad.reply

    def _handle(self, headers: Message, raws: list[msgspec.Raw]) -> Reply:
        """Answer a batch correctly."""
        if not self._tokens.is_good(headers["Authorization"]):
            return _refusal(401, "Unauthorized. Access token has expired.")
        found = [self._journal.read(bytes(raw)) for raw in raws]
        poison = {index for index, record in enumerate(found) if record is not None and record.rule == POISON}
        shape = self.shape
        if poison and shape is None:
            self._journal.bisects += len(found) > 1
            return _refusal(400, "An event is not valid.")
        again = set(range(0, len(found), shape.again)) - poison if shape and shape.again and len(found) > 1 else set()
        process = self._journal.processes[headers["Ocp-Apim-Subscription-Key"]]
        taken = [record for index, record in enumerate(found) if record is not None and index not in poison | again]
        delivery = self._mine.delivery = self._journal.store(taken, process)
        if shape is None or not poison | again:
            return Reply(body=json.dumps({"accepted": len(taken), "duplicates": 0, "rejected": []}).encode())
        self.shaped += 1
        if shape.is_vague:
            delivery.doubt = "answer vague"
        ids = [record.event["EventId"] if record else "" for record in found]
        return Reply(status=shape.status, body=json.dumps(shape.document(ids, poison, again)).encode())

    def _hang(self) -> Reply:
        until = time.monotonic() + _HANG_S
        while not (self.is_closing or is_peer_gone(self._mine.connection) or time.monotonic() > until):
            time.sleep(0.05)
        return RESET


def _refusal(status: int, message: str) -> Reply:
    return Reply(status=status, body=json.dumps({"statusCode": status, "message": message}).encode())


def _port_for_good() -> int:
    """Find a port that the system does not assign while nothing listens on it."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = SystemRandom().randrange(10_000, first_given)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Service:
    """
    The intake, which can be restarted on the same port, and the token endpoint.

    Attributes:
        intake: The current server.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.tokens = TokenEndpoint()
        self._port = _port_for_good()
        self.intake = Intake(journal, self.tokens, self._port)
        self.base_url = self.intake.target.base_url
        self.token_url = f"{self.tokens.target.base_url}/token"

    def __enter__(self) -> Self:
        self.tokens.__enter__()
        self.intake.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.intake.__exit__()
        self.tokens.__exit__()

    def misbehave(self, misbehaviour: Misbehaviour, *, seconds: float, times: int = 1) -> bool:
        """Misbehave for a minimum time and number of requests; return whether a request was affected."""
        self.intake.misbehaviour = misbehaviour
        begin, passed = time.monotonic(), 0.0
        while passed < _EFFECT_LIMIT_S and (passed < seconds or misbehaviour.hits < times):
            time.sleep(0.01)
            passed = time.monotonic() - begin
        self.intake.misbehaviour = None
        return misbehaviour.hits > 0

    def restart(self, *, pause_s: float) -> bool:
        """Close the port and all connections, and restart with the stored events."""
        old = self.intake
        had_requests = sum(self.journal.requests.values()) > 0
        old.__exit__()
        time.sleep(pause_s)
        self.intake = Intake(self.journal, self.tokens, self._port)
        self.intake.__enter__()
        return had_requests
