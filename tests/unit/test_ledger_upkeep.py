"""Whose names the ledger keeps, and for how long: hashes, erasure, retention."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import zlib
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shipper.model.errors import StateError
from shipper.model.records import LedgerKey
from shipper.state.affiliates import ERASED, KEY_FILE, are_identifiers, counted_as, read_key
from shipper.state.ledger import kept_from, read_ledger
from shipper.state.store import Store
from tests.cases import each
from tests.unit.test_ledger import checkpoint, kept, names_of, spread, tables

EMAIL = "canary.bird@example.com"
OF_PERSON: LedgerKey = ("2026-10-01T22", 11, EMAIL, "50121")
OF_NUMBER: LedgerKey = ("2026-10-01T22", 11, "70012", "50121")
DAY_S = 86_400.0


def of_person(keys: dict[LedgerKey, int]) -> dict[LedgerKey, int]:
    return {(hour, brand, EMAIL, media): count for (hour, brand, _, media), count in keys.items()}


def everything(directory: Path) -> bytes:
    """All bytes of all files, and the parts of the ledger as they are without compression."""
    found = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    with closing(sqlite3.connect(directory / "state.db")) as db:
        parts = db.execute("SELECT data FROM ledger_parts").fetchall()
    return found + b"".join(zlib.decompress(data) for (data,) in parts)


def counts(directory: Path, affiliate_id: str) -> tuple[int, int, int]:
    """Cells, accepted and duplicates of an affiliate."""
    rows = [row for row in read_ledger(directory) if row.affiliate_id == affiliate_id]
    return len(rows), sum(row.accepted for row in rows), sum(row.duplicates for row in rows)


# Names


@each("affiliate_id", ["", "70012", "aff-7.b_C", "x" * 64])
def test_an_identifier_is_counted_under_itself(affiliate_id: str):
    assert counted_as(bytes(32))(affiliate_id) == affiliate_id
    assert are_identifiers([affiliate_id, "1"])


@each("affiliate_id", [EMAIL, "Jane Doe", "x" * 65, "a\0b", "7\n", "ä", "\u0661", "\ud800", "hash:", "hash:0", "(x)"])
def test_anything_else_is_counted_under_a_hash_that_needs_the_key(affiliate_id: str):
    named, other = counted_as(bytes(32)), counted_as(b"\1" * 32)
    assert re.fullmatch("hash:[0-9a-f]{16}", named(affiliate_id))
    assert named(affiliate_id) != other(affiliate_id)
    assert not are_identifiers(["1", affiliate_id])


@given(st.text() | st.from_regex(r"(hash:)?[0-9a-f]{15,17}"), st.text())
def test_a_name_is_named_by_itself_and_tells_texts_apart(first: str, second: str):
    named = counted_as(bytes(32))
    assert named(named(first)) == named(first)
    assert named(ERASED) == ERASED
    assert (named(first) == named(second)) == (first == second)
    assert are_identifiers([first]) <= (named(first) == first)


@pytest.mark.parametrize("keys", [{OF_PERSON: 1}, of_person(spread(0, 1000))], ids=["in place", "appended"])
def test_the_ledger_keeps_no_name_of_a_person_and_adds_its_counts_up(tmp_path: Path, keys: dict[LedgerKey, int]):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {**keys, OF_NUMBER: 1}, repeated=keys, duplicates=len(keys))], 1.0)
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(20, keys)], 2.0)
    assert any(tables(tmp_path))
    assert counts(tmp_path, names_of(tmp_path)(EMAIL)) == (len(keys), 2 * len(keys), len(keys))
    assert kept(tmp_path)[OF_NUMBER] == (1, 0)
    assert EMAIL.encode() not in everything(tmp_path)


# The key


def test_the_key_is_made_once_for_its_owner_alone_and_is_no_part_of_the_database(tmp_path: Path):
    umask = os.umask(0)
    try:
        Store(tmp_path).close()
    finally:
        os.umask(umask)
    key = (tmp_path / KEY_FILE).read_bytes()
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    with capture_logs() as logs, closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {OF_PERSON: 1})], 1.0)
    assert (tmp_path / KEY_FILE).read_bytes() == key == read_key(tmp_path)
    assert len(key) == 32
    assert logs == []
    assert key not in (tmp_path / "state.db").read_bytes()
    (tmp_path / "other").mkdir()
    Store(tmp_path / "other").close()
    assert read_key(tmp_path / "other") != key


def test_a_key_that_was_lost_is_made_anew_with_a_warning_and_no_count_is_lost(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {OF_PERSON: 1})], 1.0)
    before = names_of(tmp_path)(EMAIL)
    (tmp_path / KEY_FILE).unlink()
    with capture_logs() as logs, closing(Store(tmp_path)) as store:
        store.save([checkpoint(20, {OF_PERSON: 2})], 2.0)
    assert [entry["event"] for entry in logs] == ["ledger_key_lost"]
    after = names_of(tmp_path)(EMAIL)
    assert before != after
    assert (counts(tmp_path, before), counts(tmp_path, after)) == ((1, 1, 0), (1, 2, 0))


@each("damaged", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_key_is_left_as_it_is_and_named(tmp_path: Path, damaged: bytes):
    (tmp_path / KEY_FILE).write_bytes(damaged)
    with pytest.raises(StateError, match=re.escape(str(tmp_path / KEY_FILE))):
        Store(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == damaged


def test_a_link_in_the_place_of_the_key_is_not_followed(tmp_path: Path):
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="symbolic link"):
        Store(tmp_path)


# Erasure


@pytest.mark.parametrize("name", [EMAIL, "jane.doe"])
def test_an_erased_affiliate_leaves_its_counts_without_its_name(tmp_path: Path, name: str):
    sparse = {(hour, brand, name, media): 1 for hour, brand, _, media in spread(0, 1000)}
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {("2026-10-01T22", 11, name, "1"): 2, OF_NUMBER: 1})], 1.0)
        store.save([checkpoint(20, {**sparse, **spread(0, 1000)})], 2.0)
        assert tables(tmp_path) == (2, 1)
        named = names_of(tmp_path)(name)
        assert store.erase_affiliate("nobody@example.com") == 0
        assert store.erase_affiliate(name if name == EMAIL else named) == 1001
        assert store.erase_affiliate(name) == 0
        assert counts(tmp_path, named) == (0, 0, 0)
        assert counts(tmp_path, ERASED) == (1001, 1002, 0)
        # Another one is added up with it, where hour, brand and media are the same.
        store.save([checkpoint(30, {("2026-10-01T22", 11, "jane.roe", "1"): 5})], 3.0)
        assert store.erase_affiliate("jane.roe") == 1
        assert counts(tmp_path, ERASED) == (1001, 1007, 0)
    assert counts(tmp_path, "70012") == (1, 1, 0)
    assert counts(tmp_path, "") == (1000, 1000, 0)
    found = everything(tmp_path)
    assert [text for text in (name, named, "jane.roe") if text.encode() in found] == []


def test_cells_of_one_part_that_are_erased_are_added_up(tmp_path: Path):
    first, second = (
        {(hour, brand, name, media): 1 for hour, brand, _, media in spread(0, 200)} for name in (EMAIL, "x@y.example")
    )
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {**first, **second}, repeated=first, duplicates=200)], 1.0)
        assert tables(tmp_path) == (0, 1)
        assert [store.erase_affiliate(name) for name in (EMAIL, "x@y.example")] == [200, 200]
    assert counts(tmp_path, ERASED) == (200, 400, 200)


def test_nothing_is_called_erased_while_a_part_cannot_be_read(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, of_person(spread(0, 1000)))], 1.0)
        with closing(sqlite3.connect(tmp_path / "state.db")) as db, db:
            db.execute("UPDATE ledger_parts SET data = x'00'")
        with pytest.raises(StateError, match="damaged"):
            store.erase_affiliate(EMAIL)


# Retention


def at(day: str) -> float:
    return datetime.fromisoformat(f"{day}T00:30:00+00:00").timestamp()


def expired(store: Store, today: str, days: int) -> list[int]:
    """What each step of a look deletes."""
    found = []
    while count := store.expire_ledger(at(today) - days * DAY_S, at(today)):
        found.append(count)
    return found


def in_days(first: int, last: int, keys: int) -> dict[LedgerKey, int]:
    """So many keys in each hour of some days of October."""
    return {
        (f"2026-10-{day:02}T{hour:02}", 11, "", str(media)): 1
        for day in range(first, last + 1)
        for hour in range(24)
        for media in range(keys)
    }


@pytest.mark.parametrize("is_sparse", [False, True])
def test_days_past_the_retention_are_deleted_a_few_at_a_time_and_none_else(tmp_path: Path, is_sparse: bool):
    with closing(Store(tmp_path)) as store:
        for day in (1, 4, 7):
            found = in_days(day, day + 2, 40)
            store.save([checkpoint(day, found if is_sparse else dict.fromkeys(found, 100))], 1.0)
        assert tables(tmp_path) == ((0, 3) if is_sparse else (9 * 24 * 40, 0))
        assert expired(store, "2026-10-11", 6) == [], "it was not past its retention a day ago"
        assert kept_from(tmp_path) == ""
        steps = expired(store, "2026-10-12", 6)
        assert sum(steps) == 4 * 24 * 40
        assert max(steps) <= 3 * 24 * 40
        assert len(steps) > 1
    assert {row.hour[:10] for row in read_ledger(tmp_path)} == {f"2026-10-{day:02}" for day in range(5, 10)}
    assert sum(row.accepted for row in read_ledger(tmp_path)) == 5 * 24 * 40 * (1 if is_sparse else 100)
    assert kept_from(tmp_path) == "2026-10-05"


def test_a_clock_that_has_jumped_deletes_nothing(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(1, in_days(1, 9, 1))], 1.0)
        for today in ("2026-10-09", "2036-10-10", "2026-10-10", "2026-10-11"):
            assert expired(store, today, 30) == []
        assert (tables(tmp_path), kept_from(tmp_path)) == ((9 * 24, 0), "")
        assert sum(expired(store, "2026-11-03", 30)) == 0, "as of the last look, none was past its retention"
        assert sum(expired(store, "2026-11-05", 30)) == 3 * 24
        assert kept_from(tmp_path) == "2026-10-04"


def test_a_longer_retention_brings_nothing_back_and_what_is_gone_stays_known(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(1, in_days(1, 9, 1))], 1.0)
        assert expired(store, "2026-10-10", 3) == []
        assert sum(expired(store, "2026-10-11", 3)) == 6 * 24
        assert expired(store, "2026-10-13", 300) == []
        assert kept_from(tmp_path) == "2026-10-07"


def test_a_damaged_part_goes_when_all_of_its_hours_do(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(1, in_days(1, 9, 40))], 1.0)
        with closing(sqlite3.connect(tmp_path / "state.db")) as db, db:
            db.execute("UPDATE ledger_parts SET data = x'00'")
        assert expired(store, "2026-10-10", 3) == []
        assert expired(store, "2026-10-11", 3) == [1]
        assert expired(store, "2026-10-12", 3) == [1]
        with pytest.raises(StateError, match="a part of its ledger is damaged"):
            read_ledger(tmp_path, "2026-10-08")
        assert expired(store, "2026-10-20", 3) == [1], "of the day that the last look has found"
        assert expired(store, "2026-10-21", 3) == [1]
    assert read_ledger(tmp_path) == []
