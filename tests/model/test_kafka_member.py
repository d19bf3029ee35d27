"""A member of a consumer group with events in any order: no offset passes an unsettled record, and the totals agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from anyio.from_thread import BlockingPortal

from shipper.config.settings import KafkaSettings
from shipper.kafka.documents import Metadata, TotalsRow
from shipper.kafka.member import Member
from shipper.kafka.store import TransactionStore
from shipper.pipeline.pipeline import Pipeline
from tests.conftest import SEED
from tests.fakes import OK, answer
from tests.model.kafka_broker import (
    TOPIC,
    TOPIC_ID,
    Outcome,
    Row,
    TinyAdmin,
    TinyBroker,
    TinyConsumer,
    TinyProducer,
    TinyQuery,
)
from tests.stage.pipelines import NOW_S, settings
from tests.unit.test_codec import line

TRIALS = 20
PARTITIONS = 2
GROUP = KafkaSettings(
    brokers=("localhost:9",),
    topics=(TOPIC,),
    group_id="g",
    group_instance_id="1",
    revoke_wait_seconds=0.01,
    security="plaintext",
)
REFUSED_BY_SERVICE = 7  # one of so many


def value(number: int) -> bytes:
    return line(number, ConsumerID=number + 1)


def number_in(data: bytes) -> int | None:
    """Return the number of a good record, or None for a bad one."""
    return None if data.startswith(b"bad") else int(json.loads(data)["EventId"][-12:], 16)


def is_refused(number: int) -> bool:
    return number % REFUSED_BY_SERVICE == REFUSED_BY_SERVICE - 1


class Service:
    """Answers requests when the test says so."""

    certificate_expires_at: float | None = None

    def __init__(self) -> None:
        self.accepted: Counter[int] = Counter()
        self.waiting: list[tuple[list[int], anyio.Event]] = []

    async def request(self, method: str, path: str, body: bytes, **_: object) -> Any:
        numbers = [int(event["EventId"][-12:], 16) for event in json.loads(body)["events"]]
        answered = anyio.Event()
        self.waiting.append((numbers, answered))
        await answered.wait()
        if any(map(is_refused, numbers)):
            return answer(400, body=b'{"message": "no"}')
        return OK

    async def aclose(self) -> None:
        pass

    def answer(self, at: int) -> None:
        if self.waiting:
            numbers, answered = self.waiting.pop(at % len(self.waiting))
            if not any(map(is_refused, numbers)):
                self.accepted.update(numbers)
            answered.set()


class SteppedMember(Member):
    """Polls when the test says so."""

    def attach(self, portal: BlockingPortal, pipeline: Any) -> None:
        self._link.portal, self._link.pipeline, self._is_reading = portal, pipeline, True
        self.assignment.subscribe()


class World:
    """A broker, a service, and a member that may be killed and restarted."""

    member: SteppedMember
    pipeline: Pipeline

    def __init__(self) -> None:
        self.broker = TinyBroker(PARTITIONS)
        self.service = Service()
        self._numbers = count()
        self._sessions = count()
        self._stack = AsyncExitStack()
        self._counts: Counter[str] = Counter()
        self._ticks = count(0, 100)  # a clock on which every time limit expires at once

    async def begin(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        now = partial(next, self._ticks)
        self.member = SteppedMember(GROUP, max_record_bytes=2000, now=now, wall_time=lambda: NOW_S)
        store = TransactionStore(GROUP, "g-1", self.member, max_record_bytes=2000, now=now)
        quick = settings(senders=2, batch_max_events=2, batch_linger_seconds=0.001)
        state = msgspec.structs.replace(quick.state, commit_interval_seconds=3600.0)
        own = msgspec.structs.replace(quick, state=state)
        self.pipeline = Pipeline(own, self.member, store, is_one_shot=False, wall_time=lambda: NOW_S, rng=Random(1))
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        portal = await self._stack.enter_async_context(BlockingPortal())
        self._stack.callback(tasks.cancel_scope.cancel)
        self.member.attach(portal, self.pipeline)
        tasks.start_soon(self.pipeline.run)
        await anyio.sleep(0.001)

    def counts(self) -> Counter[str]:
        """Return the events that occurred, to prove the coverage of the test."""
        self._counts.update({"handed over": self.pipeline.settlement.handed_over, **self.member.status.transactions})
        self._counts["letters"] += len(self.broker.tables[GROUP.letters])
        self._counts["duplicates"] += self.pipeline.totals.duplicates
        return self._counts

    async def crash(self) -> None:
        self.counts()
        self.broker.cut_off()
        self.service.waiting.clear()
        await self.begin()

    async def end(self) -> None:
        self.broker.cut_off()
        await self._stack.aclose()

    def append(self, partition: int, kind: str) -> None:
        log = self.broker.logs[partition]
        if kind == "bad":
            log.append(b"bad %d" % next(self._numbers))
        elif kind == "repeated" and any(number_in(data) is not None for data in log):
            log.append(next(data for data in reversed(log) if number_in(data) is not None))
        else:
            log.append(value(next(self._numbers)))

    def other_reads(self, partition: int, records: int) -> None:
        """Let the other member settle some records of one of its partitions in its own session."""
        broker = self.broker
        if broker.owners[partition] != "other":
            return
        start = broker.committed.get(partition, (0, ""))[0]
        own = broker.logs[partition][start : start + records]
        letters = 0
        for offset, data in enumerate(own, start):
            number = number_in(data)
            if number is None or is_refused(number):
                letters += 1
                broker.tables[GROUP.letters][f"{TOPIC_ID}/{partition}/{offset}"] = Row(data, {})
            else:
                self.service.accepted[number] += 1
        if own:
            broker.committed[partition] = start + len(own), Metadata(TOPIC_ID).text()
            totals = TotalsRow(
                read=len(own), accepted=len(own) - letters, dead_lettered=letters, duplicates=0, unreachable=0,
                topic=TOPIC, version=1, group="g", offset=start + len(own),
            )  # fmt: skip
            key = f"{TOPIC_ID}/{partition}/other{next(self._sessions)}/totals"
            broker.tables[GROUP.ledger][key] = Row(msgspec.json.encode(totals), {})

    async def turn(self) -> None:
        await anyio.to_thread.run_sync(self.member._poll_once)
        await anyio.sleep(0.002)

    # Invariants -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the state of the broker agrees with the accepted records."""
        broker = self.broker
        assert not broker.violations
        letters, passed = set(broker.tables[GROUP.letters]), 0
        for partition, (committed, _) in broker.committed.items():
            passed += committed
            for offset, data in enumerate(broker.logs[partition][:committed]):
                key, number = f"{TOPIC_ID}/{partition}/{offset}", number_in(data)
                if number is None or is_refused(number):
                    assert key in letters, f"{key} was passed without a dead letter"
                    letters.remove(key)
                else:
                    assert self.service.accepted[number], f"{key} was passed but not accepted"
        assert not letters, "there are dead letters of records that were not passed"
        totals: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        for key, row in broker.tables[GROUP.ledger].items():
            if key.endswith("/totals"):
                session = msgspec.json.decode(row.value, type=TotalsRow)
                totals.update(
                    read=session.read, accepted=session.accepted, dead_lettered=session.dead_lettered,
                    duplicates=session.duplicates,
                )  # fmt: skip
                if "/other" in key:
                    rows.update(accepted=session.accepted)
            else:
                rows.update(json.loads(row.value))
        assert totals["read"] == passed
        assert totals["read"] == totals["accepted"] + totals["dead_lettered"] + totals["duplicates"]
        assert totals["dead_lettered"] == len(broker.tables[GROUP.letters])
        assert (rows["accepted"], rows["duplicates"]) == (totals["accepted"], totals["duplicates"])

    async def finish(self) -> None:
        """Assign all partitions to the member, and let it settle everything."""
        broker = self.broker
        broker.outcome = "ok"
        for _ in range(300):
            if all(broker.committed.get(at, (0, ""))[0] == len(log) for at, log in enumerate(broker.logs)):
                break
            for partition in range(PARTITIONS):
                broker.assign(partition)
            await self.turn()
            while self.service.waiting:
                self.service.answer(0)
                await anyio.sleep(0.001)
            await self.pipeline.save()
        else:
            raise AssertionError(f"no progress beyond {broker.committed}: {self.pipeline!r}")


_WEIGHTS = {
    "append": 8, "turn": 8, "answer": 6, "save": 4, "save in a turn": 2, "assign": 3, "other": 2, "revoke": 1,
    "outcome": 1, "lose": 0.4, "crash": 0.3,
}  # fmt: skip
_OUTCOMES: tuple[Outcome, ...] = (
    "abortable", "doubt-committed", "doubt-aborted", "moved", "moved-late", "fenced", "fenced-late"
)  # fmt: skip


def actions_of(rng: Random) -> list[tuple[Any, ...]]:
    """Draw the actions of a run; most let the member work."""
    names = rng.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=120)
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "append": lambda: (rng.randrange(PARTITIONS), rng.choice(["good", "good", "good", "bad", "repeated"])),
        "answer": lambda: (rng.randrange(4),),
        "assign": lambda: (rng.randrange(PARTITIONS),),
        "revoke": lambda: (rng.randrange(PARTITIONS),),
        "other": lambda: (rng.randrange(PARTITIONS), rng.randint(1, 4)),
        "outcome": lambda: (rng.choice(_OUTCOMES),),
    }
    return [(name, *arguments.get(name, tuple)()) for name in names]


async def play(actions: list[tuple[Any, ...]]) -> Counter[str]:
    world = World()
    done: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        broker = world.broker
        patch.setattr("shipper.kafka.member.Consumer", lambda _: TinyConsumer(broker))
        patch.setattr("shipper.kafka.member.AdminClient", lambda _: TinyAdmin(broker))
        patch.setattr("shipper.kafka.offsets.Consumer", lambda _: TinyQuery(broker))
        patch.setattr("shipper.kafka.assignment.ledger_offsets", lambda _: ({}, set()))
        patch.setattr("shipper.kafka.store.Producer", lambda _: TinyProducer(broker))
        patch.setattr("shipper.pipeline.senders.Endpoint", lambda *_, **__: world.service)
        await world.begin()
        try:
            for name, *arguments in actions:
                done[name] += 1
                match name:
                    case "append":
                        world.append(*arguments)
                    case "assign":
                        done["assigned"] += broker.assign(*arguments)
                    case "revoke":
                        done["revoked"] += broker.revoke(*arguments)
                    case "lose":
                        broker.lose()
                    case "other":
                        world.other_reads(*arguments)
                    case "turn":
                        await world.turn()
                    case "answer":
                        world.service.answer(*arguments)
                        await anyio.sleep(0.001)
                    case "save":
                        before = dict(broker.committed)
                        await world.pipeline.save()
                        done["saved"] += broker.committed != before
                    case "save in a turn":
                        broker.commit_s = 0.003
                        async with anyio.create_task_group() as group:
                            group.start_soon(world.pipeline.save)
                            await anyio.sleep(0.001)
                            await world.turn()
                        broker.commit_s = 0.0
                    case "outcome":
                        broker.outcome = arguments[0]
                    case "crash":
                        await world.crash()
                world.check()
            await world.finish()
            world.check()
        finally:
            await world.end()
        done.update(world.counts())
    return done


def test_no_offset_passes_an_unsettled_record_and_the_totals_agree():
    seen: Counter[str] = Counter()
    for trial in range(TRIALS):
        try:
            seen.update(anyio.run(play, actions_of(Random(f"{SEED} member {trial}"))))
        except BaseException as error:
            error.add_note(f"SHIPPER_TEST_SEED={SEED}, trial {trial}")
            raise
    print(f"SHIPPER_TEST_SEED={SEED}: {dict(seen)}")
    needed = {"assigned", "revoked", "saved", "handed over", "aborted", "in_doubt", "letters", "duplicates"}
    assert min(seen[name] for name in needed) >= 3, seen
