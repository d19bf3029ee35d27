"""The shipper within an application: what `send` has taken is on disk, and nothing that goes wrong is kept quiet."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
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
from shipper.config.secrets import LiteralSecret
from shipper.config.settings import (
    BatchSettings,
    DeliverySettings,
    EndpointSettings,
    InputSettings,
    Settings,
    SpoolSettings,
    StateSettings,
)
from shipper.model.errors import ConfigError, ShipperError, SourceError, StateError, StateInUseError
from shipper.model.wire import ActivityEvent, AmountPair
from shipper.pipeline import Summary
from shipper.sources import spool as spool_module
from shipper.state.store import Store
from tests.stage.loops import LOOPS, Run, runner
from tests.stage.servers import ACCEPTED, Origin, Reply
from tests.unit.test_codec import event, line

LIMIT = 2000
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, limit_s=30)


@pytest.fixture(autouse=True)
def _application_has_logs() -> Iterator[None]:
    """Otherwise the first shipper would set up the logs of this process."""
    structlog.configure()
    yield
    structlog.reset_defaults()


class Bench:
    """A state directory, and a service that takes everything as soon as it is let."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self._takes = threading.Event()
        self._takes.set()
        self.origin = Origin(self._reply)

    def _reply(self, connection: socket.socket) -> None:
        self._takes.wait(30)
        connection.sendall(ACCEPTED)

    def hold(self) -> None:
        """Let the service answer nothing."""
        self._takes.clear()

    def release(self) -> None:
        self._takes.set()

    def settings(self, url: str = "", **changes: Any) -> Settings:
        def of(section: str, **defaults: Any) -> dict[str, Any]:
            own = {key.removeprefix(section): value for key, value in changes.items() if key.startswith(section)}
            return {**defaults, **own}

        return Settings(
            intake=EndpointSettings(
                base_url=url or self.origin.url, subscription_key=LiteralSecret("k"), token=LiteralSecret("t")
            ),
            input=InputSettings(max_record_bytes=LIMIT),
            batch=BatchSettings(**of("batch_", linger_seconds=0.01)),
            delivery=DeliverySettings(
                **of("delivery_", max_concurrency=8, retry_initial_seconds=0.001, retry_max_seconds=0.002)
            ),
            state=StateSettings(directory=self.state, commit_interval_seconds=0.01),
            spool=SpoolSettings(**of("spool_")),
        )

    def shipper(self, **changes: Any) -> Shipper:
        return Shipper(self.settings(**changes))

    def spooled(self) -> bytes:
        """What stands in the spool, of which what is delivered may be deleted meanwhile."""
        while True:
            with suppress(FileNotFoundError):
                return b"".join(path.read_bytes() for path in sorted((self.state / "spool").iterdir()))

    def delivered(self) -> list[str]:
        """The EventIds that reached the service."""
        bodies = [request.partition(b"\r\n\r\n")[2] for request in self.origin.requests]
        return [each["EventId"] for body in bodies for each in json.loads(body)["events"]]

    def dead_letters(self) -> dict[str, bytes]:
        """The refused records by rule."""
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
    """`read, accepted, dead_lettered, duplicates, pending`, which have to add up."""
    summary = shipper.summary
    assert isinstance(summary, Summary)
    assert summary.read == summary.accepted + summary.dead_lettered + summary.duplicates + summary.pending
    return summary.read, summary.accepted, summary.dead_lettered, summary.duplicates, summary.pending


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await anyio.sleep(0.001)


# Sending ----------------------------------------------------------------------------------------------------------


def test_a_record_may_be_given_in_each_of_its_forms(bench: Bench, run: Run):
    async def main() -> None:
        shipper = bench.shipper()
        async with shipper:
            await shipper.send(record(0))
            await shipper.send(MappingProxyType(record(1)))
            await shipper.send(line(2, ConsumerID=3))
            await shipper.send(line(3, ConsumerID=4) + b"\n")
            await shipper.send(line(4, ConsumerID=5).decode() + "\r\n")
            await shipper.send(msgspec.convert(record(5), ActivityEvent))
        assert counts(shipper) == (6, 6, 0, 0, 0)
        assert shipper.summary.outcome == "finished"
        assert shipper.totals.accepted == 6

    run(main)
    assert sorted(bench.delivered()) == ids(range(6))
    assert bench.spooled() == b""


def test_a_uuid_and_a_datetime_are_written_as_their_text(bench: Bench, run: Run):
    event_id, noon = UUID(record(0)["EventId"]), datetime(2026, 1, 31, 12, 30)
    zoned = noon.replace(tzinfo=timezone(timedelta(hours=2)))

    async def main() -> None:
        async with bench.shipper() as shipper:
            await shipper.send({**record(0), "EventId": event_id, "Timestamp": zoned})
            await shipper.send({**record(1), "Timestamp": noon})
        assert counts(shipper) == (2, 1, 1, 0, 0)

    run(main)
    assert bench.delivered() == [str(event_id)]
    (letter,) = bench.dead_letters().items()
    assert (letter[0], json.loads(letter[1])["Timestamp"]) == ("timestamp", "2026-01-31T12:30:00")


def test_what_was_sent_stands_in_the_spool_when_send_returns(bench: Bench, run: Run):
    async def main() -> None:
        bench.hold()
        async with bench.shipper() as shipper:
            for number in range(20):
                await shipper.send(line(number))
                assert bench.spooled() == b"".join(line(each) + b"\n" for each in range(number + 1))
            await shipper.send_many(line(number) for number in range(20, 40))
            assert bench.spooled() == b"".join(line(each) + b"\n" for each in range(40))
            assert shipper.totals.accepted == 0
            bench.release()

    run(main)


def test_tasks_that_send_at_a_time_keep_their_order_and_share_a_write(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
):
    true_write, pieces = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        pieces.append(bytes(data))
        return true_write(descriptor, data)

    async def main() -> None:
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

    run(main)
    assert len(pieces) < 50, "each record had a write of its own"


def test_a_record_with_a_wrong_field_is_a_dead_letter_and_no_error(bench: Bench, run: Run):
    async def main() -> None:
        async with bench.shipper() as shipper:
            await shipper.send({**record(0), "ConsumerCountry": "Nowhere"})
            await shipper.send(b"[1, 2]")
            await shipper.send("no JSON at all")
            await shipper.send({})
            await shipper.send(record(1))
        assert counts(shipper) == (5, 1, 4, 0, 0)

    run(main)
    letters = bench.dead_letters()
    assert json.loads(letters["country"])["ConsumerCountry"] == "Nowhere"
    assert b"no JSON at all" in letters.values()


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
    "name of bytes": ({**record(0), b"secret": 1}, TypeError, "a name in the record is a bytes"),
    "name that is a number": ({**record(0), "more": {1: 2}}, TypeError, "a name in the record is a int"),
    "NaN within": ({**record(0), "ConsumerID": float("nan")}, ValueError, "not finite"),
    "infinity deep within": ({**record(0), "more": [{"deep": float("inf")}]}, ValueError, "not finite"),
    "surrogate within": ({**record(0), "Username": "secret \ud800"}, ValueError, "not valid Unicode"),
    "surrogate": ("secret \ud800", ValueError, "not valid Unicode"),
    "itself within": (WITHIN_ITSELF, ValueError, "nested"),
    "two lines": (line() + b"\n" + line(), ValueError, "more than one line"),
    "line and blank line": (b"secret\n\n", ValueError, "more than one line"),
    "blanks": (b" \t\r\n", ValueError, "blank"),
    "nothing": ("", ValueError, "blank"),
    "long dict": ({**record(0), "Username": "secret" * 1000}, ValueError, "input.max_record_bytes, which is 2,000"),
    "long line": (b"x" * (LIMIT + 1), ValueError, "takes 2,001 bytes"),
}


@pytest.mark.parametrize("name", NO_RECORDS)
async def test_what_cannot_be_a_record_is_refused_at_once(bench: Bench, name: str):
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
async def test_one_record_is_not_taken_for_many(bench: Bench, wrong: Any):
    async with bench.shipper() as shipper:
        with pytest.raises(TypeError, match="for one record there is send"):
            await shipper.send_many(wrong)


async def test_the_longest_record_and_none_that_says_null_are_refused_by_send(bench: Bench):
    longest = {**record(0), "Username": ""}
    longest["Username"] = "x" * (LIMIT - len(msgspec.json.encode(longest)))
    async with bench.shipper() as shipper:
        await shipper.send(longest)
        await shipper.send({**record(1), "Username": "null"})
        await shipper.send({**record(2), "Username": None})
    assert counts(shipper) == (3, 2, 1, 0, 0)
    assert sorted(bench.delivered()) == ids(range(2))


# A spool or a disk that is full -----------------------------------------------------------------------------------


def test_send_waits_while_the_spool_is_full(bench: Bench, run: Run):
    sent = 0

    async def main() -> None:
        nonlocal sent
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

    run(main)
    assert sent == 200


def test_a_send_that_is_cancelled_while_it_waits_for_room_was_never_made(bench: Bench, run: Run):
    async def main() -> None:
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

    run(main)
    assert bench.delivered() == [*ids(range(1)), *ids(range(4, 5))]


class FullDisk:
    """A disk on which the spool writes half of what it is to write, and then nothing until there is room."""

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


def test_send_waits_while_the_disk_is_full_and_a_cancelled_one_tears_no_line(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
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
        assert counts(shipper) == (4, 4, 0, 0, 0), "the half of a record was made whole"

    run(main)
    assert sorted(bench.delivered()) == [*ids(range(1)), *ids(range(2, 5))]


def test_a_disk_that_stays_full_to_the_end_leaves_no_torn_line(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
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
        assert "has ended" in str(error)
        assert bench.spooled() == b"" or bench.spooled().endswith(b"\n")
        disk.room.set()
        async with bench.shipper() as shipper:
            await shipper.send(record(3))
        assert counts(shipper)[2:] == (0, 0, 0), "a torn line would be a dead letter"

    run(main)
    assert bench.delivered()[-1] == record(3)["EventId"]


def test_threads_that_all_wait_for_send_do_not_keep_it_from_writing(bench: Bench, run: Run):
    async def main() -> None:
        async with bench.shipper() as shipper:
            anyio.to_thread.current_default_thread_limiter().total_tokens = 2
            async with anyio.create_task_group() as group:
                for number in range(20):
                    send = shipper.send
                    group.start_soon(anyio.to_thread.run_sync, anyio.from_thread.run, send, record(number))
        assert counts(shipper) == (20, 20, 0, 0, 0)

    run(main)


# The end of the block ---------------------------------------------------------------------------------------------


def test_leaving_the_block_leaves_pending_what_cannot_be_delivered_in_time(bench: Bench, run: Run):
    async def main() -> None:
        bench.hold()
        first = bench.shipper(delivery_drain_timeout_seconds=0.05, delivery_concurrency=1, batch_max_events=10)
        async with first:
            await first.send_many(record(number) for number in range(2000))
        assert counts(first) == (2000, 0, 0, 0, 2000), "also what was not even read is pending"
        assert first.totals.read < 2000
        assert first.summary.outcome == "aborted"
        bench.release()
        async with bench.shipper() as second:
            await second.send(record(2000))
        assert counts(second) == (2001, 2001, 0, 0, 0)

    run(main)
    assert sorted(set(bench.delivered())) == ids(range(2001))


def test_leaving_hurries_a_service_that_is_slow_to_be_asked_again(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """A backoff of an hour is not waited out, nor does the drain last as long as it may."""
    monkeypatch.setattr("shipper.delivery.gate._LONGEST_WAIT_WHILE_STOPPING_S", 0.05)
    replies: list[Reply] = [UNAVAILABLE] * 6 + [ACCEPTED]

    async def main() -> None:
        with Origin(*replies) as origin:
            hour = {"retry_initial_seconds": 3600.0, "retry_max_seconds": 3600.0, "drain_timeout_seconds": 3600.0}
            changes = {f"delivery_{key}": value for key, value in hour.items()}
            async with bench.shipper(url=origin.url, delivery_concurrency=1, **changes) as shipper:
                await shipper.send(record(0))
                await until(lambda: origin.requests)
            assert counts(shipper) == (1, 1, 0, 0, 0)

    run(main)


@pytest.mark.parametrize("how", ["exception", "cancellation"])
def test_a_block_that_is_left_in_haste_is_drained_all_the_same(bench: Bench, run: Run, how: str):
    class OwnError(Exception): ...

    async def main() -> None:
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

    run(main)
    assert bench.delivered() == ids(range(1))


def test_a_block_that_is_cancelled_while_it_is_entered_gives_the_state_back(bench: Bench, run: Run):
    async def main() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with bench.shipper():
                raise AssertionError("entered")
        async with bench.shipper() as shipper:
            await shipper.send(record(0))
        assert counts(shipper) == (1, 1, 0, 0, 0)

    run(main)


async def test_a_second_cancellation_of_an_asyncio_task_cuts_the_drain_off(bench: Bench):
    bench.hold()
    shipper = bench.shipper(delivery_drain_timeout_seconds=3600.0)

    async def main() -> None:
        async with shipper:
            await shipper.send(record(0))
            await anyio.sleep_forever()

    task = asyncio.create_task(main())
    await until(lambda: bench.origin.requests)
    task.cancel()
    with pytest.raises(SourceError, match="has ended"):
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


def test_nothing_is_taken_before_the_block_nor_after_it(bench: Bench, run: Run):
    async def main() -> None:
        shipper = bench.shipper()
        with pytest.raises(SourceError, match="has not begun"):
            await shipper.send(record(0))
        assert (shipper.summary, shipper.pause, shipper.totals.read) == (None, None, 0)
        async with shipper:
            pass
        for send in (shipper.send(record(0)), shipper.send_many([record(0)])):
            with pytest.raises(SourceError, match="has ended"):
                await send
        with pytest.raises(SourceError, match="create another one"):
            async with shipper:
                pass
        assert counts(shipper) == (0, 0, 0, 0, 0)

    run(main)
    assert bench.spooled() == b""


def test_a_send_that_waits_for_room_when_the_block_ends_is_told(bench: Bench, run: Run):
    async def main() -> None:
        bench.hold()
        hasty = bench.shipper(delivery_drain_timeout_seconds=0.05, spool_max_bytes=1, spool_segment_bytes=1)
        async with anyio.create_task_group() as group, hasty as shipper:
            await shipper.send(record(0))

            async def send() -> None:
                with pytest.raises(SourceError, match="has ended"):
                    await shipper.send(record(1))

            group.start_soon(send)
            await anyio.lowlevel.checkpoint()
        assert counts(shipper) == (1, 0, 0, 0, 1)

    run(main)


# What goes wrong --------------------------------------------------------------------------------------------------


def test_a_state_directory_in_use_is_an_error_on_entering(bench: Bench, run: Run):
    async def main() -> None:
        async with bench.shipper() as first:
            with pytest.raises(StateInUseError, match="in use by another shipper"):
                async with bench.shipper():
                    raise AssertionError("entered")
            await first.send(record(0))
        assert counts(first) == (1, 1, 0, 0, 0)

    run(main)


def test_a_setting_that_is_missing_is_an_error_on_entering(bench: Bench, run: Run):
    async def main() -> None:
        settings = msgspec.structs.replace(bench.settings(), intake=None)
        with pytest.raises(ConfigError, match="intake: is missing"):
            async with Shipper(settings):
                raise AssertionError("entered")
        assert not bench.state.exists(), "what fails on its configuration creates nothing"
        bench.state.mkdir(mode=0o700)
        (bench.state / "state.db").write_bytes(b"something else entirely, and long enough to be a database's head")
        with pytest.raises(StateError, match=r"state\.db"):
            async with bench.shipper():
                raise AssertionError("entered")

    run(main)


@pytest.mark.parametrize("seen_by", ["send", "block", "another error"])
def test_a_state_that_cannot_be_written_comes_out(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch, seen_by: str
):
    failed = threading.Event()

    def save(self: Store, *_: object) -> None:
        failed.set()
        raise StateError("the disk is on fire")

    async def main() -> None:
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
        assert counts(second)[4] == 0, "the state was given back, and nothing of it is lost"

    monkeypatch.setattr(Store, "save", save)
    run(main)
    assert record(0)["EventId"] in bench.delivered()


def test_a_disk_that_cannot_be_written_comes_out_of_send(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch):
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main() -> None:
        with pytest.raises(StateError, match=r"spool cannot be written \(Input/output error\)"):
            async with bench.shipper() as shipper:
                monkeypatch.setattr(os, "write", write)
                await shipper.send(record(0))
                raise AssertionError("taken")

    run(main)


def test_what_could_not_be_forced_to_disk_is_not_taken_for_kept(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """Not even if the disk has room again: what the first failure lost, a second try does not bring back."""

    def fdatasync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        with pytest.raises(StateError, match="No space left"):
            async with bench.shipper(spool_fsync="always") as shipper:
                monkeypatch.setattr(os, "fdatasync", fdatasync)
                await shipper.send(record(0))
                raise AssertionError("taken")

    run(main)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_could_not_be_forced_to_disk_once_is_not_told_as_kept_by_a_later_success(
    bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch, code: int
):
    """The kernel tells of a lost write once."""
    real, calls, kept = os.fdatasync, itertools.count(1), []

    def fdatasync(descriptor: int) -> None:
        if next(calls) == 3:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    async def main() -> None:
        with pytest.raises(StateError):
            async with bench.shipper(spool_fsync="always", delivery_drain_timeout_seconds=0.5) as shipper:
                for number in range(4):
                    await shipper.send(record(number))
                    kept.append(number)

    bench.hold()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    run(main)
    assert kept == [0, 1]


def test_a_full_spool_does_not_keep_an_application_from_starting(bench: Bench, run: Run):
    limits = {"spool_max_bytes": 4096, "spool_segment_bytes": 1024, "delivery_drain_timeout_seconds": 0.1}

    async def fill() -> None:
        async with bench.shipper(**limits) as shipper:
            with anyio.move_on_after(0.5) as full:
                for number in itertools.count():
                    await shipper.send(record(number))
            assert full.cancelled_caught

    async def start_again() -> None:
        with anyio.fail_after(5):
            async with bench.shipper(**limits):
                pass

    bench.hold()
    run(fill)
    run(start_again)


async def test_why_nothing_is_delivered_can_be_asked(bench: Bench):
    with Origin(UNAVAILABLE) as origin:
        async with bench.shipper(url=origin.url, delivery_drain_timeout_seconds=0.0) as shipper:
            assert shipper.pause is None
            await shipper.send(record(0))
            await until(lambda: shipper.pause)
            assert shipper.pause.reason == "unavailable"
            assert "503" in shipper.pause.message
    assert counts(shipper) == (1, 0, 0, 0, 1)


def test_an_event_of_the_wire_is_judged_like_any_other(bench: Bench, run: Run):
    """Built by hand, it has not been checked by anything."""

    async def main() -> None:
        async with bench.shipper() as shipper:
            await shipper.send(ActivityEvent(**{**event(), "BTag": "none"}))
        assert counts(shipper) == (1, 0, 1, 0, 0)

    run(main)
    assert list(bench.dead_letters()) == ["btag"]
