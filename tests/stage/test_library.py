"""The shipper in an application: records accepted by `send` are on disk, and every failure is raised."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import anyio
import anyio.from_thread
import anyio.lowlevel
import msgspec
import pytest
import structlog

from shipper import Shipper
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError, ShipperError, SourceError, StateError, StateInUseError
from shipper.model.records import Summary
from shipper.model.wire import ActivityEvent, AmountPair
from shipper.sources import spool as spool_module
from shipper.state.store import Store
from tests.fakes import failing
from tests.servers import ACCEPTED, Origin
from tests.stage.loops import on_each_loop
from tests.stage.pipelines import settings, until
from tests.unit.test_codec import event, line

LIMIT = 2000
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture(autouse=True)
def _application_has_logs() -> Iterator[None]:
    """Configure logs, because otherwise the first shipper would."""
    structlog.configure()
    yield
    structlog.reset_defaults()


class Bench:
    """A state directory, and a service that accepts everything unless held."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self._takes = threading.Event()
        self._takes.set()
        self.origin = Origin(self._reply)

    def _reply(self, connection: socket.socket) -> None:
        self._takes.wait(30)
        connection.sendall(ACCEPTED)

    def hold(self) -> None:
        """Stop the service from answering."""
        self._takes.clear()

    def release(self) -> None:
        self._takes.set()

    def settings(self, url: str = "", **changes: Any) -> Settings:
        senders = {"delivery_concurrency": "adaptive", "delivery_max_concurrency": 8}
        state = {"state_directory": self.state, "state_commit_interval_seconds": 0.01}
        return settings(url or self.origin.url, **{"batch_linger_seconds": 0.01, **senders, **state, **changes})

    def shipper(self, **changes: Any) -> Shipper:
        return Shipper(self.settings(**changes))

    def spooled(self) -> bytes:
        """The lines in the spool; delivered segments may be deleted meanwhile."""
        while True:
            with suppress(FileNotFoundError):
                return b"".join(path.read_bytes() for path in sorted((self.state / "spool").iterdir()))

    def delivered(self) -> list[str]:
        """The EventIds received by the service."""
        bodies = [request.partition(b"\r\n\r\n")[2] for request in self.origin.requests]
        return [each["EventId"] for body in bodies for each in json.loads(body)["events"]]

    def dead_letters(self) -> dict[str, bytes]:
        """The refused records, by rule."""
        store = Store(self.state)
        try:
            return dict(iter(store._db.execute("SELECT rule, raw FROM dead_letters")))
        finally:
            store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    with bench.origin:
        yield bench
        bench.release()


def record(number: int) -> dict[str, Any]:
    return json.loads(line(number, ConsumerID=number + 1))


def ids(numbers: range) -> list[str]:
    return [record(number)["EventId"] for number in numbers]


def counts(shipper: Shipper) -> tuple[int, int, int, int, int]:
    """Return `read, accepted, dead_lettered, duplicates, pending`, which must add up."""
    summary = shipper.summary
    assert isinstance(summary, Summary)
    assert summary.read == summary.accepted + summary.dead_lettered + summary.duplicates + summary.pending
    return summary.read, summary.accepted, summary.dead_lettered, summary.duplicates, summary.pending


# Sending ----------------------------------------------------------------------------------------------------------


@on_each_loop
async def test_send_accepts_a_record_in_each_of_its_forms(bench: Bench):
    shipper = bench.shipper()
    async with shipper:
        await shipper.send(record(0))
        await shipper.send(MappingProxyType(record(1)))
        await shipper.send(line(2, ConsumerID=3))
        await shipper.send(line(3, ConsumerID=4) + b"\n")
        await shipper.send(line(4, ConsumerID=5).decode() + "\r\n")
        await shipper.send(msgspec.convert(record(5), ActivityEvent))
        await shipper.send(record(0))
    assert counts(shipper) == (7, 6, 0, 1, 0)
    assert shipper.summary.outcome == "finished"
    assert shipper.totals.accepted == 6

    assert sorted(bench.delivered()) == ids(range(6))
    assert bench.spooled() == b""


@on_each_loop
async def test_a_uuid_a_datetime_and_values_of_subclasses_are_written_as_text_and_values_of_the_base(bench: Bench):
    event_id, noon = UUID(record(0)["EventId"]), datetime(2026, 1, 31, 12, 30)
    zoned = noon.replace(tzinfo=timezone(timedelta(hours=2)))
    text, number, moment = (type("Special", (base,), {"__str__": lambda _: "?"}) for base in (str, int, datetime))
    special = {text("Username"): text("null"), "BrandID": number(7), "Timestamp": moment(2026, 1, 31, tzinfo=UTC)}
    async with bench.shipper() as shipper:
        await shipper.send({**record(0), "EventId": event_id, "Timestamp": zoned})
        await shipper.send({**record(1), "Timestamp": noon})
        await shipper.send({**record(2), **special})
    assert counts(shipper) == (3, 2, 1, 0, 0)
    assert sorted(bench.delivered()) == [str(event_id), record(2)["EventId"]]
    (letter,) = bench.dead_letters().items()
    assert (letter[0], json.loads(letter[1])["Timestamp"]) == ("timestamp", "2026-01-31T12:30:00")


@on_each_loop
async def test_a_record_is_in_the_spool_when_send_returns(bench: Bench):
    bench.hold()
    async with bench.shipper() as shipper:
        for number in range(20):
            await shipper.send(line(number))
            assert bench.spooled() == b"".join(line(each) + b"\n" for each in range(number + 1))
        await shipper.send_many(line(number) for number in range(20, 40))
        assert bench.spooled() == b"".join(line(each) + b"\n" for each in range(40))
        assert shipper.totals.accepted == 0
        bench.release()


@on_each_loop
async def test_concurrent_sends_keep_their_order_and_share_a_write(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    true_write, pieces = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        pieces.append(bytes(data))
        return true_write(descriptor, data)

    bench.hold()
    async with bench.shipper() as shipper:

        async def send_three(first: int) -> None:
            for number in range(first, first + 3):
                await shipper.send(line(number))

        monkeypatch.setattr(os, "write", write)
        async with anyio.create_task_group() as group:
            for task in range(100):
                group.start_soon(send_three, 3 * task)
        monkeypatch.undo()
        lines = bench.spooled().splitlines()
        assert sorted(lines) == sorted(line(number) for number in range(300))
        for task in range(100):
            places = [lines.index(line(number)) for number in range(3 * task, 3 * task + 3)]
            assert places == sorted(places)
        bench.release()

    assert len(pieces) < 50, "each record was written separately"


@on_each_loop
async def test_a_record_with_an_invalid_field_is_a_dead_letter_and_no_error(bench: Bench):
    async with bench.shipper() as shipper:
        await shipper.send({**record(0), "ConsumerCountry": "Nowhere"})
        await shipper.send(b"[1, 2]")
        await shipper.send(b"\x1f\x8b\x08 no archive")
        await shipper.send("no JSON at all")
        await shipper.send({})
        await shipper.send(ActivityEvent(**{**event(), "BTag": "none"}))
        await shipper.send(record(1))
    assert counts(shipper) == (7, 1, 6, 0, 0)

    letters = bench.dead_letters()
    assert json.loads(letters["country"])["ConsumerCountry"] == "Nowhere"
    assert b"no JSON at all" in letters.values()
    assert json.loads(letters["btag"])["BTag"] == "none", "an event object created by hand was not validated"


@dataclass
class Point:
    x: int = 0


WITHIN_ITSELF: dict[str, Any] = {}
WITHIN_ITSELF["x"] = WITHIN_ITSELF

NO_RECORDS: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([record(0)], TypeError, "a list is not a record"),
    "None": (None, TypeError, "a NoneType is not a record"),
    "NaN": (float("nan"), TypeError, "a float is not a record"),
    "bytearray": (bytearray(line()), TypeError, "a bytearray is not a record"),
    "object within": ({**record(0), "ConsumerState": object()}, TypeError, "is a object, which JSON cannot represent"),
    "bytes within": ({**record(0), "Username": b"secret"}, TypeError, "is a bytes"),
    "bytes deep within": ({**record(0), "more": [{"deep": (b"secret",)}]}, TypeError, "is a bytes"),
    "bytearray within": ({**record(0), "Username": bytearray(b"secret")}, TypeError, "is a bytearray"),
    "memoryview within": ({**record(0), "Username": memoryview(b"secret")}, TypeError, "is a memoryview"),
    "bytes in a mapping": (MappingProxyType({**record(0), "Username": b"secret"}), TypeError, "is a bytes"),
    "bytes in an event": (ActivityEvent(**{**event(), "Username": b"secret"}), TypeError, "is a bytes"),
    "Decimal within": ({**record(0), "BrandID": Decimal(7)}, TypeError, "is a Decimal"),
    "date within": ({**record(0), "Timestamp": date(2026, 1, 31)}, TypeError, "is a date,"),
    "time within": ({**record(0), "Timestamp": time(12, 30)}, TypeError, "is a time,"),
    "timedelta within": ({**record(0), "Timestamp": timedelta(1)}, TypeError, "is a timedelta"),
    "set within": ({**record(0), "more": {1}}, TypeError, "is a set"),
    "Enum within": ({**record(0), "ConsumerStatus": Enum("Status", ["secret"])(1)}, TypeError, "is a Status"),
    "dataclass within": ({**record(0), "more": Point()}, TypeError, "is a Point"),
    "struct within": ({**record(0), "more": AmountPair()}, TypeError, "is a AmountPair"),
    "raw JSON within": ({**record(0), "more": msgspec.Raw(b"1\n2")}, TypeError, "is a Raw"),
    "name of bytes": ({**record(0), b"secret": 1}, TypeError, "a key of the record is a bytes"),
    "name that is a number": ({**record(0), 1: 2}, TypeError, "a key of the record is a int"),
    "number as a name within": ({**record(0), "more": {1: 2}}, TypeError, "a key of the record is a int"),
    "NaN within": ({**record(0), "ConsumerID": float("nan")}, ValueError, "not finite"),
    "infinity deep within": ({**record(0), "more": [{"deep": float("inf")}]}, ValueError, "not finite"),
    "surrogate within": ({**record(0), "Username": "secret \ud800"}, ValueError, "not valid Unicode"),
    "surrogate": ("secret \ud800", ValueError, "not valid Unicode"),
    "itself within": (WITHIN_ITSELF, ValueError, "nested"),
    "two lines": (line() + b"\n" + line(), ValueError, "the record contains a newline"),
    "line and blank line": (b"secret\n\n", ValueError, "the record contains a newline"),
    "blanks": (b" \t\r\n", ValueError, "blank"),
    "nothing": ("", ValueError, "blank"),
    "long dict": ({**record(0), "Username": "secret" * 1000}, ValueError, "input.max_record_bytes, which is 2,000"),
    "long line": (b"x" * (LIMIT + 1), ValueError, "takes 2,001 bytes"),
}


@pytest.mark.parametrize("name", NO_RECORDS)
async def test_a_value_that_cannot_be_a_record_is_refused_at_once(bench: Bench, name: str):
    wrong, error, says = NO_RECORDS[name]
    async with bench.shipper() as shipper:
        with pytest.raises(error, match=says) as caught:
            await shipper.send(wrong)
        with pytest.raises(error, match=says):
            await shipper.send_many([record(1), wrong])
        chain = [caught.value, caught.value.__cause__]
        assert "secret" not in repr(chain)
        assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert counts(shipper) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("wrong", ["text", b"bytes", record(0)], ids=["str", "bytes", "dict"])
async def test_send_many_refuses_a_single_record(bench: Bench, wrong: Any):
    async with bench.shipper() as shipper:
        with pytest.raises(TypeError, match="use send for one record"):
            await shipper.send_many(wrong)


async def test_send_refuses_oversized_and_null_records(bench: Bench):
    longest = {**record(0), "Username": ""}
    longest["Username"] = "x" * (LIMIT - len(msgspec.json.encode(longest)))
    async with bench.shipper() as shipper:
        await shipper.send(longest)
        await shipper.send({**record(1), "Username": "null"})
        await shipper.send({**record(2), "Username": None})
    assert counts(shipper) == (3, 2, 1, 0, 0)
    assert sorted(bench.delivered()) == ids(range(2))


# A spool or a disk that is full -----------------------------------------------------------------------------------


@on_each_loop
async def test_send_waits_while_the_spool_is_full(bench: Bench):
    sent = 0
    bench.hold()
    limits = {"spool_max_bytes": 20_000, "spool_segment_bytes": 5_000}
    async with bench.shipper(**limits, batch_max_events=5, delivery_concurrency=1) as shipper:

        async def send() -> None:
            nonlocal sent
            for number in range(200):
                await shipper.send(record(number))
                sent += 1

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await until(lambda: len(bench.spooled()) >= 20_000)
            with anyio.move_on_after(0.05):
                await until(lambda: sent >= 100)
            assert len(bench.spooled()) <= 20_000 + len(line()) + 10
            assert sent < 100
            bench.release()
    assert counts(shipper) == (200, 200, 0, 0, 0)
    assert sent == 200


@on_each_loop
async def test_a_send_cancelled_while_waiting_for_room_writes_nothing(bench: Bench):
    bench.hold()
    async with bench.shipper(spool_max_bytes=1, spool_segment_bytes=1) as shipper:
        await shipper.send(record(0))
        for number in (1, 2, 3):
            with anyio.move_on_after(0.01) as scope:
                await shipper.send(record(number))
            assert scope.cancelled_caught
        bench.release()
        await shipper.send(record(4))
    assert counts(shipper) == (2, 2, 0, 0, 0)
    assert bench.delivered() == [*ids(range(1)), *ids(range(4, 5))]


class FullDisk:
    """A disk that accepts half of a write, and then nothing until there is room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = threading.Event()
        self.refusals = 0
        self._write = os.write
        monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room.is_set():
            return self._write(descriptor, data)
        self.refusals += 1
        if self.refusals > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data[: len(data) // 2])


@on_each_loop
async def test_send_waits_while_the_disk_is_full_and_a_cancelled_one_leaves_no_partial_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    disk = FullDisk(monkeypatch)
    async with bench.shipper() as shipper:
        async with anyio.create_task_group() as group:
            group.start_soon(shipper.send, record(0))
            await until(lambda: disk.refusals > 3)
            assert 0 < len(bench.spooled()) < len(line())
            group.cancel_scope.cancel()
        with anyio.move_on_after(0.01) as scope:
            await shipper.send(record(1))
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(shipper.send, record(2))
            group.start_soon(shipper.send_many, [record(3), record(4)])
            await anyio.lowlevel.checkpoint()
            disk.room.set()
    assert counts(shipper) == (4, 4, 0, 0, 0), "the partial record was completed"
    assert sorted(bench.delivered()) == [*ids(range(1)), *ids(range(2, 5))]


@on_each_loop
async def test_a_disk_that_stays_full_leaves_no_partial_line(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    errors: list[BaseException] = []
    disk = FullDisk(monkeypatch)
    hasty = bench.shipper(delivery_drain_timeout_seconds=0.05)
    async with anyio.create_task_group() as group, hasty as shipper:

        async def send() -> None:
            try:
                await shipper.send_many([record(0), record(1), record(2)])
            except ShipperError as error:
                errors.append(error)

        group.start_soon(send)
        await until(lambda: disk.refusals > 3)
        assert not bench.spooled().endswith(b"\n")
    (error,) = errors
    assert "is closed" in str(error)
    assert bench.spooled() == b"" or bench.spooled().endswith(b"\n")
    disk.room.set()
    async with bench.shipper() as shipper:
        await shipper.send(record(3))
    assert counts(shipper)[2:] == (0, 0, 0), "a partial line became a dead letter"
    assert bench.delivered()[-1] == record(3)["EventId"]


@on_each_loop
async def test_a_thread_pool_full_of_waiting_sends_does_not_block_writing(bench: Bench):
    async with bench.shipper() as shipper:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 2
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(anyio.to_thread.run_sync, anyio.from_thread.run, shipper.send, record(number))
    assert counts(shipper) == (20, 20, 0, 0, 0)


# The end of the block ---------------------------------------------------------------------------------------------


@on_each_loop
async def test_records_that_cannot_be_delivered_in_time_are_pending_after_the_block(bench: Bench):
    bench.hold()
    first = bench.shipper(delivery_drain_timeout_seconds=0.05, delivery_concurrency=1, batch_max_events=10)
    async with first:
        await first.send_many(record(number) for number in range(2000))
    assert counts(first) == (2000, 0, 0, 0, 2000), "unread records are not pending"
    assert first.totals.read < 2000
    assert first.summary.outcome == "aborted"
    bench.release()
    async with bench.shipper() as second:
        await second.send(record(2000))
    assert counts(second) == (2001, 2001, 0, 0, 0)
    assert sorted(set(bench.delivered())) == ids(range(2001))


@on_each_loop
async def test_leaving_the_block_retries_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """Neither a backoff of an hour nor the drain timeout is waited out."""
    monkeypatch.setattr("shipper.delivery.gate._LONGEST_WAIT_WHILE_STOPPING_S", 0.05)
    patient = dict.fromkeys(["retry_initial_seconds", "retry_max_seconds", "drain_timeout_seconds"], 3600.0)
    changes = {f"delivery_{key}": value for key, value in patient.items()}
    with Origin(*[UNAVAILABLE] * 6, ACCEPTED) as origin:
        async with bench.shipper(url=origin.url, delivery_concurrency=1, **changes) as shipper:
            await shipper.send(record(0))
            await until(lambda: origin.requests)
        assert counts(shipper) == (1, 1, 0, 0, 0)


@on_each_loop
@pytest.mark.parametrize("how", ["exception", "cancellation"])
async def test_a_block_left_by_an_exception_is_drained(bench: Bench, how: str):
    class OwnError(Exception): ...

    shipper = bench.shipper()
    if how == "exception":
        with pytest.raises(OwnError):
            async with shipper:
                await shipper.send(record(0))
                raise OwnError
    else:
        with anyio.CancelScope() as scope:
            async with shipper:
                await shipper.send(record(0))
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
    assert counts(shipper) == (1, 1, 0, 0, 0)
    assert bench.delivered() == ids(range(1))


@on_each_loop
async def test_cancelling_the_entry_of_a_block_releases_the_state(bench: Bench):
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with bench.shipper():
            raise AssertionError("entered")
    async with bench.shipper() as shipper:
        await shipper.send(record(0))
    assert counts(shipper) == (1, 1, 0, 0, 0)


async def test_a_second_cancellation_of_an_asyncio_task_aborts_the_drain(bench: Bench):
    bench.hold()
    shipper = bench.shipper(delivery_drain_timeout_seconds=3600.0)

    async def main() -> None:
        async with shipper:
            await shipper.send(record(0))
            await anyio.sleep_forever()

    task = asyncio.create_task(main())
    await until(lambda: bench.origin.requests)
    task.cancel()
    with pytest.raises(SourceError, match="is closed"):
        while True:
            await shipper.send(record(1))
            await anyio.lowlevel.checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shipper.summary is None
    bench.release()
    async with bench.shipper() as second:
        pass
    assert record(0)["EventId"] in bench.delivered()
    assert counts(second)[4] == 0


@on_each_loop
async def test_send_raises_before_and_after_the_block(bench: Bench):
    shipper = bench.shipper()
    with pytest.raises(SourceError, match="was not entered"):
        await shipper.send(record(0))
    assert (shipper.summary, shipper.pause, shipper.totals.read) == (None, None, 0)
    async with shipper:
        pass
    for send in (shipper.send(record(0)), shipper.send_many([record(0)])):
        with pytest.raises(SourceError, match="is closed"):
            await send
    with pytest.raises(SourceError, match="create another one"):
        async with shipper:
            pass
    assert counts(shipper) == (0, 0, 0, 0, 0)
    assert bench.spooled() == b""


@on_each_loop
async def test_a_send_that_waits_for_room_raises_when_the_block_ends(bench: Bench):
    bench.hold()
    hasty = bench.shipper(delivery_drain_timeout_seconds=0.05, spool_max_bytes=1, spool_segment_bytes=1)
    async with anyio.create_task_group() as group, hasty as shipper:
        await shipper.send(record(0))

        async def send() -> None:
            with pytest.raises(SourceError, match="is closed"):
                await shipper.send(record(1))

        group.start_soon(send)
        await anyio.lowlevel.checkpoint()
    assert counts(shipper) == (1, 0, 0, 0, 1)


# Failures ---------------------------------------------------------------------------------------------------------


@on_each_loop
async def test_a_state_directory_in_use_is_an_error_on_entering(bench: Bench):
    async with bench.shipper() as first:
        with pytest.raises(StateInUseError, match="in use by another shipper"):
            async with bench.shipper():
                raise AssertionError("entered")
        await first.send(record(0))
    assert counts(first) == (1, 1, 0, 0, 0)


@on_each_loop
async def test_a_missing_setting_is_an_error_on_entering(bench: Bench):
    nowhere = msgspec.structs.replace(bench.settings(), intake=None)
    with pytest.raises(ConfigError, match="intake: is missing"):
        async with Shipper(nowhere):
            raise AssertionError("entered")
    assert not bench.state.exists(), "files were created despite a configuration error"
    bench.state.mkdir(mode=0o700)
    (bench.state / "state.db").write_bytes(b"something else entirely, and long enough to be a database's head")
    with pytest.raises(StateError, match=r"state\.db"):
        async with bench.shipper():
            raise AssertionError("entered")


@on_each_loop
@pytest.mark.parametrize("seen_by", ["send", "block", "another error"])
async def test_an_unwritable_state_raises_from_the_block(bench: Bench, monkeypatch: pytest.MonkeyPatch, seen_by: str):
    failed = threading.Event()

    def save(self: Store, *_: object) -> None:
        failed.set()
        raise StateError("the disk is on fire")

    monkeypatch.setattr(Store, "save", save)
    shipper = bench.shipper()
    with pytest.raises(KeyError if seen_by == "another error" else StateError) as caught:
        async with shipper:
            await shipper.send(record(0))
            await until(failed.is_set)
            if seen_by == "another error":
                raise KeyError
            while seen_by == "send":
                await shipper.send(record(1))
    assert seen_by == "another error" or str(caught.value) == "the disk is on fire"
    assert shipper.summary is None
    with pytest.raises(StateError, match="on fire"):
        await shipper.send(record(2))
    monkeypatch.undo()
    async with bench.shipper() as second:
        pass
    assert counts(second)[4] == 0, "the state was not released, or records are lost"
    assert record(0)["EventId"] in bench.delivered()


@on_each_loop
@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("write", errno.EIO, "cannot be written (Input/output error)"),
        ("fdatasync", errno.ENOSPC, "could not be synced to its disk (No space left on device)"),
    ],
)
async def test_a_failed_write_or_fsync_raises_from_send(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, code: int, words: str
):
    """Even if the disk has room again: a second fsync does not restore what the first one lost."""
    with pytest.raises(StateError, match=re.escape(words)):
        async with bench.shipper(spool_fsync="always") as shipper:
            monkeypatch.setattr(os, call, failing(code))
            await shipper.send(record(0))
            raise AssertionError("taken")


@on_each_loop
async def test_an_application_can_start_with_a_full_spool(bench: Bench):
    limits = {"spool_max_bytes": 4096, "spool_segment_bytes": 1024, "delivery_drain_timeout_seconds": 0.1}
    bench.hold()
    async with bench.shipper(**limits) as shipper:
        with anyio.move_on_after(0.5) as full:
            for number in itertools.count():
                await shipper.send(record(number))
        assert full.cancelled_caught
    with anyio.fail_after(5):
        async with bench.shipper(**limits):
            pass


async def test_the_reason_of_a_pause_is_available(bench: Bench):
    with Origin(UNAVAILABLE) as origin:
        async with bench.shipper(url=origin.url, delivery_drain_timeout_seconds=0.0) as shipper:
            assert shipper.pause is None
            await shipper.send(record(0))
            await until(lambda: shipper.pause)
            assert shipper.pause.reason == "unavailable"
            assert "503" in shipper.pause.message
    assert counts(shipper) == (1, 0, 0, 0, 1)
