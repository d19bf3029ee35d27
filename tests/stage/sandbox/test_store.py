"""The store of the sandbox: its content, its file, and files that it refuses."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from random import Random

import msgspec
import pytest

from shipper.model import wire
from shipper.model.errors import ConfigError
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.store import EventStore, StoredEvent
from tests.stage.sandbox.driver import REPORT, Sandbox, changed, event_id, sample

UNUSABLE = "cannot be used as a store ({}); choose another file, or stop the sandbox that uses it"


def add(store: EventStore, events: list[bytes]) -> int:
    return store.add([(msgspec.json.decode(event, type=wire.ActivityEvent), msgspec.Raw(event)) for event in events])


def knowledge(store: EventStore) -> tuple[object, ...]:
    return (
        store.stored,
        store.duplicates,
        store.event_ids(),
        store.page(limit=10_000),
        sorted(store.registrations("0000", "9999")),
    )


# Content


def test_first_event_of_an_id_is_kept_and_later_ones_are_counted():
    one, two = sample(2)
    other = changed(one, Username="other")
    with EventStore() as store:
        assert add(store, [one, two]) == 2
        assert add(store, [other, two, other]) == 0
        assert (store.stored, store.duplicates) == (2, 3)
        assert store.get(event_id(one)) == StoredEvent(event_id(one), one, 3)
        assert store.get(event_id(two)) == StoredEvent(event_id(two), two, 2)
        assert store.get("absent") is None
        assert store.holds(event_id(one))
        assert store.holds(event_id(two))
        assert not store.holds("absent")
        assert not store.holds("")
        assert store.page(limit=1) == ([StoredEvent(event_id(one), one, 3)], 1)
        assert store.page(limit=1, after=1) == ([StoredEvent(event_id(two), two, 2)], None)
        assert store.page(limit=1, after=2) == ([], None)


@pytest.mark.parametrize("counts_repeats", [False, True])
def test_registrations_count_events_or_all_arrivals(counts_repeats):
    event = changed(sample(1)[0], BrandID=11, BTag="50121_" + "a" * 32, Timestamp="2026-03-05T23:59:59Z")
    elsewhere = changed(event, BrandID=12, Timestamp="2026-03-06T00:00:00Z")
    with EventStore(counts_repeats=counts_repeats) as store:
        add(store, [event, event])
        add(store, [elsewhere])
        found = sorted(store.registrations("2026-03-05", "2026-03-06"))
        expected = [("2026-03-05", 11, 50121, 2), ("2026-03-06", 12, 50121, 1)]
        assert found == (expected if counts_repeats else [("2026-03-05", 11, 50121, 1)])
        assert store.registrations("2026-03-07", "2026-03-08") == []


@pytest.mark.parametrize("counts_repeats", [False, True])
def test_store_agrees_with_a_small_model_before_and_after_a_restart(tmp_path, rng: Random, counts_repeats):
    pool = [changed(e, BrandID=i % 3 + 1, BTag=f"{i % 2}_{'a' * 32}") for i, e in enumerate(sample(40))]
    path = str(tmp_path / "events.db")
    first: dict[str, bytes] = {}
    times: Counter[str] = Counter()
    registered: Counter[tuple[str, int, int]] = Counter()
    store = EventStore(path, counts_repeats=counts_repeats)
    for step in range(60):
        batch = [changed(rng.choice(pool), Username=f"u{step}_{n}") for n in range(rng.randint(0, 5))]
        known = len(first)
        for event in batch:
            document = json.loads(event)
            if document["EventId"] not in first or counts_repeats:
                key = document["Timestamp"][:10], document["BrandID"], int(document["BTag"].partition("_")[0])
                registered[key] += 1
            first.setdefault(document["EventId"], event)
            times[document["EventId"]] += 1
        fresh = len(first) - known
        assert add(store, batch) == fresh
        if rng.random() < 0.1:
            store.close()
            store = EventStore(path, counts_repeats=counts_repeats)
        assert store.stored == len(first)
        assert store.duplicates == times.total() - len(first)
    with store:
        assert store.event_ids() == list(first)
        events, _ = store.page(limit=100)
        assert events == [StoredEvent(name, raw, times[name]) for name, raw in first.items()]
        assert {row[:3]: row.registered for row in store.registrations("0000", "9999")} == dict(registered)


def test_reset_forgets_everything_for_good(tmp_path):
    path = str(tmp_path / "events.db")
    one, two = sample(2)
    with EventStore(path) as store:
        empty = knowledge(store)
        add(store, [one, one])
        store.reset()
        assert knowledge(store) == empty
        assert add(store, [one, two]) == 2
        after = knowledge(store)
    with EventStore(path) as store:
        assert knowledge(store) == after
        store.reset()
    with EventStore(path) as store:
        assert knowledge(store) == empty


# A file


def test_sandbox_s_file_survives_a_restart_with_all_that_was_received(tmp_path):
    options = SandboxOptions(port=0, store_path=str(tmp_path / "events.db"), repeats="accept")
    events = sample(10)

    def seen(sandbox: Sandbox) -> tuple[object, ...]:
        counts = sandbox.counts()
        page = sandbox.control("GET", "events").json()
        return counts["events_stored"], counts["duplicates"], page, sandbox.ask("GET", REPORT).json()

    with Sandbox(options) as sandbox:
        sandbox.post(events)
        sandbox.post(events[:3])
        before = seen(sandbox)
    assert before[:2] == (10, 3)
    with Sandbox(options) as sandbox:
        assert seen(sandbox) == before
        assert sandbox.counts()["requests"] == 0  # the log contains only the requests of this run
        sandbox.post(events[:1])
        assert sandbox.control("GET", f"events/{event_id(events[0])}").json()["times_received"] == 3


def test_second_run_reports_everything_as_a_repeat(tmp_path):
    options = SandboxOptions(port=0, store_path=str(tmp_path / "events.db"))
    events = sample(10)
    for accepted in (10, 0):
        with Sandbox(options) as sandbox:
            assert sandbox.post(events).json() == {"accepted": accepted, "duplicates": 10 - accepted, "rejected": []}


def test_batch_is_on_disk_after_it_was_added(tmp_path):
    path, copy = tmp_path / "events.db", tmp_path / "copy.db"
    with EventStore(str(path)) as store:
        add(store, sample(5))
        for suffix in ("", "-wal"):  # as after a crash
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        with EventStore(str(copy)) as found:
            assert knowledge(found) == knowledge(store)


def test_file_and_its_companions_are_private(tmp_path):
    path = tmp_path / "events.db"
    before = os.umask(0)
    try:
        with EventStore(str(path)) as store:
            add(store, sample(1))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("is_new", [True, False])
def test_second_store_on_one_file_is_refused(tmp_path, is_new):
    path = str(tmp_path / "events.db")
    if not is_new:
        with EventStore(path) as store:
            add(store, sample(1))
    with EventStore(path) as store:
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                EventStore(path)
            assert str(caught.value) == f"{path}: {UNUSABLE.format('database is locked')}"
        add(store, sample(5))
        assert store.stored == 5
    with EventStore(path) as store:
        assert store.stored == 5


def test_stores_in_memory_are_independent():
    with EventStore() as one, EventStore() as other:
        add(one, sample(1))
        assert (one.stored, other.stored) == (1, 0)


# Files that are not a store


OLDER = "PRAGMA application_id = 0x53424F58; CREATE TABLE event (seq INTEGER PRIMARY KEY, event_id TEXT)"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("", "file is not a database"),
        ("CREATE TABLE theirs (id INTEGER)", "it is the database of another program"),
        (OLDER, "it is the database of another program"),
    ],
    ids=["text", "a foreign database", "a store from before it was a log"],
)
def test_foreign_file_is_named_and_left_unchanged(tmp_path, script, message):
    path = tmp_path / "theirs"
    if script:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(script)
    else:
        path.write_text("not a database, and longer than one header of SQLite would be" * 10)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            EventStore(str(path))
        assert str(caught.value) == f"{path}: {UNUSABLE.format(message)}"
        assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["absent/events.db", "folder", "file/events.db", "x" * 300])
def test_path_that_is_not_a_file_is_named(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    path = str(tmp_path / place)
    with pytest.raises(ConfigError, match="cannot be used as a store") as caught:
        EventStore(path)
    assert caught.value.source == path


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_file_is_named(tmp_path):
    path = tmp_path / "events.db"
    path.touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be used as a store"):
        EventStore(str(path))


def test_empty_file_becomes_a_store(tmp_path):
    path = tmp_path / "events.db"
    path.touch()
    with EventStore(str(path)) as store:
        add(store, sample(1))
    with EventStore(str(path)) as store:
        assert store.stored == 1


@pytest.mark.parametrize("damage", ["a batch is no JSON", "the end is missing", "the middle is overwritten"])
def test_damaged_store_is_refused_with_its_name(tmp_path, damage):
    path = tmp_path / "events.db"
    with EventStore(str(path)) as store:
        for first in range(0, 400, 100):
            add(store, sample(400)[first : first + 100])
    if damage == "a batch is no JSON":
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE batch SET body = x'00' WHERE seq = 2")
    else:
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(content[:half] if damage == "the end is missing" else content[:half] + bytes(half))
    with pytest.raises(ConfigError) as caught:
        EventStore(str(path))
    assert caught.value.source == str(path)
