"""What the Kafka client raises, also while writing to the topics of a group."""

from __future__ import annotations

import fcntl
import os
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from shipper.cli.common import private_folder, state_on_disk
from shipper.config.settings import InputSettings, KafkaSettings, Settings
from shipper.kafka.client import ConnectionErrors, error_of, flush
from shipper.kafka.documents import Document, ledger_offsets, ledger_row, totals_row
from shipper.kafka.member_status import MemberStatus
from shipper.kafka.view import GroupView
from shipper.model.errors import StateError, StateInUseError, StateUnwritableError
from shipper.state.ledger import read_counts
from shipper.state.letters import EVERYTHING, count_letters, open_letters

SETTINGS = KafkaSettings(brokers=("127.0.0.1:1",), topics=("t",), group_id="g", security="plaintext")


class FailingProducer:
    def __init__(self, cause: Exception | None) -> None:
        self._cause = cause

    def flush(self, _: float) -> int:
        raise SystemError("flush returned a result with an exception set") from self._cause


def test_a_failure_of_the_client_is_a_fatal_error_also_if_its_reason_is_lost():
    fenced = KafkaException(KafkaError(KafkaError._FENCED, fatal=True))
    for cause, code in [(fenced, KafkaError._FENCED), (None, KafkaError._FATAL)]:
        with pytest.raises(KafkaException) as raised:
            flush(FailingProducer(cause), 1.0)  # type: ignore[arg-type]
        assert (error_of(raised.value).code(), error_of(raised.value).fatal()) == (code, True)


def test_brokers_that_only_close_the_connection_may_expect_what_is_not_configured():
    errors = ConnectionErrors()
    errors(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    said = errors.describe(SETTINGS, KafkaError(KafkaError._TIMED_OUT))
    assert "check input.kafka.brokers; if they expect TLS, set input.kafka.security" in said
    assert "; if they expect a login, set input.kafka.sasl_mechanism" in said


def test_brokers_that_refuse_a_certificate_are_not_said_to_be_down():
    """With TLS 1.3, the client learns of it after the handshake."""
    alert = "h: Receive failed: error:0A000416:SSL routines::ssl/tls alert certificate unknown: SSL alert number 46"
    errors, status = ConnectionErrors(), MemberStatus(SETTINGS, wall_time=lambda: 1.0)
    for error in (KafkaError(KafkaError._ALL_BROKERS_DOWN), KafkaError(KafkaError._TRANSPORT, alert)):
        errors(error)
        status.note_error(error)
    check = "(_SSL): the brokers refuse this client; check input.kafka.ca_bundle and input.kafka.client_certificate"
    assert (errors.is_refused, errors.describe(SETTINGS, KafkaError(KafkaError._TIMED_OUT))) == (
        True,
        f"{alert} {check}",
    )
    first, _ = status.state([], is_paused=False).obstacles
    restart = "new certificates are used once this member is restarted"
    assert (first.reason, first.message) == ("broker_forbidden", f"{alert} {check}; {restart}")


def letter(first_at: int, partition: int, offset: int) -> Document:
    fields = {"offset": offset, "rule": "ip", "message": "bad", "status": 0, "delivery": "invalid", "attempts": 0}
    fields |= {"first_at": first_at, "topic": "t", "partition": partition, "group": "g"}
    headers = [(f"shipper.{name}", str(value).encode()) for name, value in fields.items()]
    return Document(f"id/{partition}/{offset}", b"{}", headers)


def test_a_start_without_offsets_keeps_only_totals_of_a_long_ledger(monkeypatch: pytest.MonkeyPatch):
    totals = {"read": 1, "accepted": 1, "dead_lettered": 0, "duplicates": 0, "unreachable": 0}

    def ledger(*_: object, **__: object) -> Iterator[Document]:
        for session in range(200):
            for hour in range(100):
                key = f"2026-01-01T{hour % 24:02}", hour, "a", ""
                yield ledger_row(f"id/0/{session}", key, (1, 0))
            yield totals_row(f"id/0/{session}", totals, topic="t", group="g", offset=session)
        yield Document("id/0/199/totals", None)

    monkeypatch.setattr("shipper.kafka.documents.read_documents", ledger)
    tracemalloc.start()
    try:
        assert ledger_offsets(SETTINGS) == ({("id", 0): 198}, {"t"})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "20,000 counts are not kept"
    finally:
        tracemalloc.stop()


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> dict[str, Iterable[Document]]:
    """What the brokers return: documents by topic."""
    contents: dict[str, Iterable[Document]] = {SETTINGS.letters: (), SETTINGS.ledger: ()}
    monkeypatch.setattr("shipper.kafka.view.read_documents", lambda _, topic, **__: iter(contents[topic]))
    return contents


def test_letters_are_ordered_by_time_and_position(topics: dict[str, Iterable[Document]], tmp_path: Path):
    written = [letter(2, 0, 7), letter(2, 1, 5), letter(1, 0, 11), letter(2, 0, 9), letter(1, 0, 10), letter(2, 0, 8)]
    older, deleted = letter(3, 1, 5), letter(3, 1, 6)
    topics[SETTINGS.letters] = [older, deleted, *written, deleted.deletion(), Document("others", b"x")]
    view = GroupView(SETTINGS, tmp_path)
    with closing(open_letters(tmp_path)) as letters:
        newest = [(one.first_at, one.path, one.start_offset) for one in letters.newest(EVERYTHING, 5)]
        assert len(letters.ids(EVERYTHING)) == len(written)
    assert newest == [(2, "t/1", 5), (2, "t/0", 9), (2, "t/0", 8), (2, "t/0", 7), (1, "t/0", 11)]
    assert view.skipped == {(SETTINGS.letters, ""): 1}


def test_a_copy_of_many_letters_and_counts_needs_little_memory(topics: dict[str, Iterable[Document]], tmp_path: Path):
    topics[SETTINGS.letters] = (letter(number, 0, number)._replace(value=b"x" * 20_000) for number in range(500))
    counts = {"read": 5000, "accepted": 5000, "dead_lettered": 0, "duplicates": 0, "unreachable": 0}
    rows = (ledger_row("id/0/s", ("2026-01-01T00", number, "a", ""), (1, 0)) for number in range(20_000))
    topics[SETTINGS.ledger] = chain(rows, [totals_row("id/0/s", counts, topic="t", group="g", offset=1)])
    tracemalloc.start()
    try:
        GroupView(SETTINGS, tmp_path, has_ledger=True)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20, "the letters have 10 MB, the counts 12 MB"
    finally:
        tracemalloc.stop()
    assert sum(row.accepted for row in read_counts(tmp_path)) == 20_000
    assert count_letters(tmp_path) == 500


class FencedProducer:
    """A client that another one ends during a transaction: calls fail first, and a callback tells the reason later."""

    def __init__(self, view: GroupView) -> None:
        self._view = view
        self._has_failed = False

    def begin_transaction(self) -> None:
        pass

    def produce(self, *_: Any, **__: Any) -> None:
        self._has_failed = True
        raise KafkaException(KafkaError(KafkaError._FATAL, "Local: Fatal error"))

    def poll(self, _: float) -> None:
        if self._has_failed:
            self._view._note_error(KafkaError(KafkaError._FENCED, "fenced", fatal=True))


def test_a_replay_that_is_ended_while_it_writes_says_that_another_one_has_started(
    topics: dict[str, Iterable[Document]], tmp_path: Path
):
    topics[SETTINGS.letters] = [letter(1, 0, 1)]
    view = GroupView(SETTINGS, tmp_path)
    view._producer = FencedProducer(view)  # type: ignore[assignment]
    with pytest.raises(StateInUseError, match="another replay or purge of group g has started"):
        view.delete([1])


@pytest.mark.usefixtures("topics")
def test_a_replay_has_more_time_than_a_member_as_it_may_write_millions_of_letters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    created: list[dict[str, Any]] = []
    producer = SimpleNamespace(init_transactions=lambda _: None, poll=lambda _: None)
    monkeypatch.setattr("shipper.kafka.view.Producer", lambda properties: created.append(properties) or producer)
    GroupView(SETTINGS, tmp_path, max_record_bytes=1)
    assert created[0]["transaction.timeout.ms"] >= 60_000


def test_a_copy_without_room_says_how_to_make_some(monkeypatch: pytest.MonkeyPatch):
    def copy(*_: object, **__: object) -> None:
        raise StateUnwritableError("full") from OSError("database or disk is full")

    monkeypatch.setattr("shipper.kafka.view.GroupView", copy)
    kafka = Settings(input=InputSettings(kafka=SETTINGS))
    with pytest.raises(StateError, match=r"full\); make room there, or .* TMPDIR"), state_on_disk(kafka):
        pass
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)  # none is writable
    with pytest.raises(StateError, match=r"No usable temporary directory .* TMPDIR"), state_on_disk(kafka):
        pass


def test_the_copies_of_killed_commands_are_deleted_but_none_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("shipper-view-killed", "shipper-view-used", "shipper-view-new", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.db").touch()
        os.utime(tmp_path / name, None if name == "shipper-view-new" else (0, 0))
    (tmp_path / "shipper-view-link").symlink_to(tmp_path / "others")
    used = os.open(tmp_path / "shipper-view-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    with private_folder() as folder:
        left = {path.name for path in tmp_path.iterdir()} - {folder.name}
        assert left == {"shipper-view-used", "shipper-view-new", "shipper-view-link", "others"}
        os.utime(folder, (0, 0))
        with private_folder():
            assert folder.exists()
    assert not folder.exists()
    os.close(used)
