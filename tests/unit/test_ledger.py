"""The ledger: saved with the checkpoints, summed by the days of any zone; names and retention."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shipper.config.settings import RecordsSettings
from shipper.model.errors import ConfigError, StateError
from shipper.model.records import Checkpoint, LedgerKey, Stream
from shipper.report.days import OFFSETS, days_of_offset, days_of_zone, zone_of_offset
from shipper.report.ledger import By, count_dead_letters, ledger_table, totals_of
from shipper.report.ranges import DateRange
from shipper.state.affiliates import ERASED, KEY_FILE, NameAffiliate, affiliate_namer, are_identifiers, read_key
from shipper.state.ledger import LedgerRow, kept_from
from shipper.state.letters import Content
from shipper.state.store import Store
from tests.cases import each
from tests.ledgers import read_ledger
from tests.unit.test_codec import MISSING, event

KEY: LedgerKey = ("2026-10-01T22", 11, "", "50121")
OTHER: LedgerKey = ("2026-10-02T00", 12, "70012", "50234")


def checkpoint(end: int, ledger: dict[LedgerKey, int], **changes: Any) -> Checkpoint:
    stream = Stream(stream_id=1, kind="file", path="/a", compression=changes.pop("compression", ""))
    accepted = sum(ledger.values())
    changes["repeated"] = [changes.pop("repeated", {})]
    fields = {"read": accepted, "accepted": accepted, "duplicates": 0, "rejections": [], "tail": b"", **changes}
    return Checkpoint(stream=stream, end_offset=end, ledger=[ledger], **fields)


def names_of(directory: Path) -> NameAffiliate:
    key = read_key(directory)
    return affiliate_namer(key)


def kept(directory: Path) -> dict[LedgerKey, tuple[int, int]]:
    return {
        (row.hour, row.brand_id, row.affiliate_id, row.media): (row.accepted, row.duplicates)
        for row in read_ledger(directory)
    }


# Keeping it


def test_a_save_that_fails_counts_nothing(store: Store, tmp_path: Path):
    assert read_ledger(tmp_path / "nowhere") == []
    store.save([checkpoint(10, {KEY: 3})], 1.0)
    with pytest.raises(StateError):
        store.save([checkpoint(20, {KEY: 2}), checkpoint(30, {OTHER: 1}, compression=None)], 2.0)
    assert kept(tmp_path) == {KEY: (3, 0)}
    assert store.totals().accepted == 3
    store.save([checkpoint(20, {KEY: 2})], 2.0)
    assert kept(tmp_path) == {KEY: (5, 0)}


def sql(directory: Path, statement: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(directory / "state.db")) as db, db:
        return db.execute(statement, values).fetchall()


def tables(directory: Path) -> tuple[int, int]:
    """Count what was added up in place, and what was appended."""
    (row,) = sql(directory, "SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM ledger_parts)")
    return row


def spread(first: int, keys: int) -> dict[LedgerKey, int]:
    """So many keys with one event each."""
    return {(f"2026-10-{1 + n % 28:02}T{n % 24:02}", 11, "", str(n)): 1 for n in range(first, first + keys)}


def test_many_keys_of_few_events_are_appended_and_few_keys_are_added_up_in_place(store: Store, tmp_path: Path):
    store.save([checkpoint(10, spread(0, 1000))], 1.0)
    assert tables(tmp_path) == (0, 1)
    store.save([checkpoint(20, dict.fromkeys(spread(0, 1000), 100), repeated=spread(0, 5))], 2.0)
    assert tables(tmp_path) == (1000, 1)
    store.save([checkpoint(30, spread(500, 1000), repeated=spread(900, 200))], 3.0)
    assert tables(tmp_path) == (1000, 2)


def test_keys_that_recur_in_later_saves_are_moved_to_the_table(store: Store, tmp_path: Path):
    def save(first: int, keys: int, times: int) -> tuple[int, int]:
        for _ in range(times):
            store.save([checkpoint(10, spread(first, keys), repeated=spread(first, 3))], 1.0)
        return tables(tmp_path)

    assert save(0, 300, 15) == (0, 15)
    assert save(0, 300, 1) == (300, 0)
    assert save(0, 300, 20) == (300, 4)
    assert {(row.accepted, row.duplicates) for row in read_ledger(tmp_path)} == {(36, 36), (36, 0)}
    for first in range(1000, 30_000, 1000):  # keys that do not recur
        save(first, 300, 1)
    assert tables(tmp_path) == (300, 33)


def test_a_damaged_part_of_the_ledger_prevents_no_save(store: Store, tmp_path: Path):
    for number in range(16):
        sql(tmp_path, "UPDATE ledger_parts SET data = x'00' WHERE id = 7")
        store.save([checkpoint(number, spread(0, 300))], 1.0)
    assert tables(tmp_path) == (0, 16)


KEYS = st.tuples(
    st.sampled_from(["2026-10-01T22", "2026-10-02T00", "2026-11-01T05"]),
    st.sampled_from([1, 2**63 - 1]),
    st.sampled_from(["", "70012", "a\0b", 'ä"\\', "\U0001f3b2"]),
    st.sampled_from(["", "1", "99999999999999999999"]),
)
COUNTS = st.dictionaries(KEYS, st.integers(0, 3), max_size=6)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=6),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from(["", "2026-10-02", "2026-10-02T00"]),
    st.sampled_from(["~", "2026-11", "2026-11-01T05"]),
)
def test_the_ledger_answers_alike_however_the_counts_are_kept(
    saves: list[tuple[dict[LedgerKey, int], ...]], appended_from: int, start: str, end: str
):
    """From one key on all are appended, from three on some, and from a thousand on nearly none."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        patch.setattr("shipper.state.ledger._APPENDED_KEYS_MIN", appended_from)
        patch.setattr("shipper.state.ledger._LATEST_PARTS", 2)
        patch.setattr("shipper.state.ledger._EVENTS_PER_KEY", 2)
        with closing(Store(directory)) as store:
            for number, (first, second, repeated) in enumerate(saves):
                store.save([checkpoint(2 * number, first), checkpoint(2 * number + 1, second, repeated=repeated)], 1.0)
        expected: dict[LedgerKey, tuple[int, int]] = {}
        named = names_of(directory)
        for first, second, repeated in saves:
            for key in first.keys() | second.keys() | repeated.keys():
                name = (*key[:2], named(key[2]), key[3])
                before = expected.get(name, (0, 0))
                expected[name] = before[0] + first.get(key, 0) + second.get(key, 0), before[1] + repeated.get(key, 0)
        found = read_ledger(directory, start, end)
    counted = {key: counts for key, counts in expected.items() if any(counts) and start <= key[0] < end}
    assert found == [LedgerRow(*key, *counted[key]) for key in sorted(counted)]


@pytest.mark.parametrize(
    "damaged",
    [
        *(lambda data: data[: len(data) // 2], lambda data: data[:-1], lambda data: b"", lambda data: b"\0" * 100),
        lambda data: zlib.compress(b"\xc1" * 100),
        lambda data: zlib.compress(msgspec.msgpack.encode([["2026-10-01T00"], [1], [""], ["1"], [1], []])),
        lambda data: zlib.compress(msgspec.msgpack.encode([["2026-10-01T00"], ["1"], [""], ["1"], [1], [0]])),
        lambda data: zlib.compress(b"\x96\x91\xa1\xff" + b"\x90" * 5),
    ],
)
def test_a_damaged_part_of_the_ledger_is_reported(store: Store, tmp_path: Path, damaged: Callable[[bytes], bytes]):
    store.save([checkpoint(10, spread(0, 1000))], 1.0)
    ((data,),) = sql(tmp_path, "SELECT data FROM ledger_parts")
    sql(tmp_path, "UPDATE ledger_parts SET data = ?", damaged(data))
    with pytest.raises(StateError, match="a part of its ledger is damaged"):
        read_ledger(tmp_path)


def test_two_processes_read_beside_one_that_writes(store: Store, tmp_path: Path):
    code = (
        "import sys, pathlib\nfrom tests.ledgers import read_ledger\n"
        "print('ready', flush=True)\nseen = []\n"
        "while not seen or seen[-1] < 100:\n"
        "    rows = read_ledger(pathlib.Path(sys.argv[1]))\n"
        "    assert len({row.accepted for row in rows}) == 1, rows\n"  # both keys: of one transaction
        "    seen.append(rows[0].accepted)\n"
        "assert seen == sorted(seen)\nprint(len(seen))\n"
    )
    store.save([checkpoint(1, {KEY: 1, OTHER: 1})], 1.0)
    words = [sys.executable, "-c", code, str(tmp_path)]
    readers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert all(reader.stdout and reader.stdout.readline() == "ready\n" for reader in readers)
        for number in range(2, 101):
            store.save([checkpoint(number, {KEY: 1, OTHER: 1})], 1.0)
        outputs = [reader.communicate(timeout=30)[0] for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert [reader.returncode for reader in readers] == [0, 0]
    assert all(int(output) > 0 for output in outputs)


# Days


def test_an_hour_belongs_to_the_day_of_its_zone():
    assert days_of_zone("UTC").day_of("2026-10-01T22") == "2026-10-01"
    assert days_of_zone("Europe/Malta").day_of("2026-10-01T22") == "2026-10-02", "summer, two hours ahead"
    assert days_of_zone("Europe/Malta").day_of("2026-12-01T22") == "2026-12-01", "winter, one hour ahead"
    assert days_of_zone("America/New_York").day_of("2026-10-01T03") == "2026-09-30"
    assert days_of_zone("Europe/Malta").hour_of("2026-10-01T22") == "2026-10-02T00+02:00"
    assert days_of_zone("UTC").hour_of("2026-10-01T22") == "2026-10-01T22Z"


@each("hours", OFFSETS)
def test_the_zone_that_is_named_for_an_offset_has_that_offset(hours: int):
    named, made = days_of_zone(zone_of_offset(hours)), days_of_offset(hours)
    for hour in range(24):
        text = f"2026-10-02T{hour:02}"
        assert named.day_of(text) == made.day_of(text)
        assert named.hour_of(text) == made.hour_of(text)


@pytest.mark.parametrize(
    ("zone", "hour", "words"),
    [
        ("Asia/Kolkata", "2026-10-01T00", "5 h 30 min ahead of UTC"),
        ("America/St_Johns", "2026-12-01T00", "3 h 30 min behind UTC"),
        ("Australia/Lord_Howe", "2026-07-01T00", "10 h 30 min ahead of UTC"),
    ],
)
def test_a_zone_with_a_fractional_hour_offset_is_refused_with_the_reason(zone: str, hour: str, words: str):
    with pytest.raises(ConfigError, match="whole UTC hours") as caught:
        days_of_zone(zone).day_of(hour)
    assert zone in str(caught.value)
    assert words in str(caught.value)
    assert days_of_zone("Australia/Lord_Howe").day_of("2026-12-31T20") == "2027-01-01", "in summer it is whole hours"


@each(
    ("name", "meant"),
    [
        *(("Europe/Mlata", "Europe/Malta"), ("europe/malta", "Europe/Malta"), ("Malta", "Europe/Malta")),
        *(("New York", "America/New_York"), ("Europe/Stokholm", "Europe/Stockholm"), ("utc", "UTC")),
        *(("UTC+2", "Etc/GMT-2"), ("+02:00", "Etc/GMT-2"), ("-05", "Etc/GMT+5"), ("UTC+0", "UTC")),
    ],
)
def test_the_intended_zone_is_suggested(name: str, meant: str):
    with pytest.raises(ConfigError, match="not a known time zone") as caught:
        days_of_zone(name)
    assert f"; did you mean {meant}? " in str(caught.value)


@each("name", ["Mars/Olympus", "", "../etc/passwd", "\0", "CEST", "PST", "BST"])
def test_no_zone_is_suggested_for_a_dissimilar_name_or_an_abbreviation(name: str):
    with pytest.raises(ConfigError, match=r"not a known time zone\. Use a name from the IANA .*UTC or Europe/Malta"):
        days_of_zone(name)


def test_an_hour_beyond_the_calendar_belongs_to_its_stated_day():
    assert days_of_zone("Europe/Malta").day_of("2026-02-30T99") == "2026-02-30"
    assert days_of_offset(14).day_of("9999-12-31T23") == "9999-12-31"


# Dead letters


def letter(**changes: Any) -> Content:
    return Content(b"", json.dumps(event(**changes)).encode())


def where(content: Content, *, csv_delimiter: str = "", **settings: Any) -> LedgerKey | None:
    records = msgspec.convert(settings, RecordsSettings)
    found = count_dead_letters([content], records, affiliate_namer(bytes(32)), csv_delimiter=csv_delimiter)
    assert sum(found.counts.values()) + found.unattributed == 1
    return next(iter(found.counts), None)


def test_a_dead_letter_is_counted_where_the_ledger_would_count_it():
    place = ("2026-11-20T12", 7, "", "660123")
    assert where(letter(IP="nowhere")) == place
    assert where(letter(BTag="660123_broken", BrandID="7")) == place
    assert where(letter(Timestamp="2026-11-20T14:30:00.5+02:00", AffiliateID=MISSING)) == place
    assert where(letter(AffiliateID=70012)) == ("2026-11-20T12", 7, "70012", "660123")
    assert where(letter(Timestamp="2026-11-20 13:30:00"), assume_timezone="Europe/Malta") == place


def test_a_dead_letter_is_read_by_the_mapping_and_as_csv():
    place = ("2026-11-20T12", 7, "", "660123")
    mapped = {"at": "2026-11-20T12:30:00Z", "tag": {"media": "660123"}, "brand": 7}
    mapping = {"Timestamp": "at", "BTag": {"template": "{tag.media}_{click}", "default": "660123_"}, "BrandID": "brand"}
    assert where(Content(b"", json.dumps(mapped).encode()), mapping=mapping) == place
    header, row = b"Timestamp;BrandID;BTag\n", b"2026-11-20T12:30:00Z;7;660123_x\n"
    assert where(Content(header, row)) == place
    assert where(Content(header, row), csv_delimiter=";") == place
    assert where(Content(header, b"2026-11-20T12:30:00Z;7\n")) is None


def test_dead_letters_are_counted_for_their_hours_in_any_order_of_their_headers():
    row = Content(b"Timestamp;BrandID;BTag\n", b"2026-11-20T12:30:00Z;7;660123_x\n")
    later = letter(Timestamp="2026-11-21T00:00:00Z")
    contents = [letter(), row, row, letter(), later, Content(b"", b"broken"), *[letter()] * 100]
    hours = "2026-11-20T12", "2026-11-21T00"
    found = count_dead_letters(contents, RecordsSettings(), affiliate_namer(bytes(32)), hours=hours)
    assert found == ({("2026-11-20T12", 7, "", "660123"): 104}, 1)


@each(
    "content",
    [
        *(Content(b"", raw) for raw in (b"", b"broken", b"[]", b"\xff", b"null", b"[" * 5000)),
        Content(b"a,b\n", b""),
        *(letter(**{name: MISSING}) for name in ("Timestamp", "BrandID", "BTag")),
        letter(Timestamp="yesterday"),
        letter(BrandID=True),
        letter(BTag="_"),
        letter(BTag=5),
    ],
)
def test_a_dead_letter_that_cannot_be_read_is_unattributed(content: Content):
    assert where(content) is None


# Table


ROWS = [LedgerRow(*KEY, 3, 1), LedgerRow("2026-10-01T21", *KEY[1:], 2, 0), LedgerRow(*OTHER, 5, 0)]


def test_hours_become_days_of_a_zone_within_a_range():
    malta = days_of_zone("Europe/Malta")
    table = ledger_table(ROWS, {KEY: 4}, days=malta, by="day", period=None)
    assert table.rows == [
        ("2026-10-01", 11, "", "50121", 2, 0, 0),
        ("2026-10-02", 11, "", "50121", 3, 1, 4),
        ("2026-10-02", 12, "70012", "50234", 5, 0, 0),
    ]
    assert totals_of(table) == {"accepted": 10, "duplicates": 1, "dead_letters": 4}
    only = DateRange(date(2026, 10, 2), date(2026, 10, 2))
    assert ledger_table(ROWS, {KEY: 4}, days=malta, by="day", period=only).rows == table.rows[1:]
    by_hour = ledger_table(ROWS, {}, days=malta, by="hour", period=only)
    assert [row[0] for row in by_hour.rows] == ["2026-10-02T00+02:00", "2026-10-02T02+02:00"]
    assert by_hour.columns[0].name == "hour"
    by_month = ledger_table(ROWS, {KEY: 4}, days=malta, by="month", period=None)
    assert by_month.rows == [("2026-10", 11, "", "50121", 5, 1, 4), ("2026-10", 12, "70012", "50234", 5, 0, 0)]


@each(
    ("by", "names", "rows"),
    [
        ("brand", "brand_id", [(11, 5, 1, 4), (12, 5, 0, 0)]),
        ("affiliate", "affiliate_id", [("", 5, 1, 4), ("70012", 5, 0, 0)]),
        ("media", "media", [("50121", 5, 1, 4), ("50234", 5, 0, 0)]),
    ],
)
def test_ledger_by_brand_affiliate_or_media_adds_all_times(by: By, names: str, rows: list[tuple[object, ...]]):
    table = ledger_table(ROWS, {KEY: 4}, days=days_of_zone("UTC"), by=by, period=None)
    assert [column.name for column in table.columns] == [names, "accepted", "duplicates", "dead_letters"]
    assert table.rows == rows


@given(st.lists(st.tuples(st.integers(0, 71), st.integers(1, 9)), max_size=40), st.sampled_from(OFFSETS))
def test_no_count_is_lost_between_hours_and_days(counts: list[tuple[int, int]], hours: int):
    rows = [
        LedgerRow(f"2026-10-{1 + hour // 24:02}T{hour % 24:02}", 11, "", "1", count, 0)
        for hour, count in Counter(dict(counts)).items()
    ]
    for by in ("hour", "day", "month"):
        table = ledger_table(rows, {}, days=days_of_offset(hours), by=by, period=None)
        assert totals_of(table)["accepted"] == sum(row.accepted for row in rows)
        assert [row[0] for row in table.rows] == sorted({str(row[0]) for row in table.rows})


# Whose names it keeps, and for how long -------------------------------------------------------------------------------


EMAIL = "canary.bird@example.com"
OF_PERSON: LedgerKey = ("2026-10-01T22", 11, EMAIL, "50121")
OF_NUMBER: LedgerKey = ("2026-10-01T22", 11, "70012", "50121")
DAY_S = 86_400.0


def of_person(keys: dict[LedgerKey, int], name: str = EMAIL) -> dict[LedgerKey, int]:
    return {(hour, brand, name, media): count for (hour, brand, _, media), count in keys.items()}


def everything(directory: Path) -> bytes:
    """All bytes of all files, and the parts of the ledger as they are without compression."""
    found = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    return found + b"".join(zlib.decompress(data) for (data,) in sql(directory, "SELECT data FROM ledger_parts"))


def counts(directory: Path, affiliate_id: str) -> tuple[int, int, int]:
    """Return an affiliate's numbers of cells, accepted records and duplicates."""
    rows = [row for row in read_ledger(directory) if row.affiliate_id == affiliate_id]
    return len(rows), sum(row.accepted for row in rows), sum(row.duplicates for row in rows)


# Names


@each("affiliate_id", ["", "70012", "aff-7.b_C", "x" * 64])
def test_an_identifier_is_counted_under_itself(affiliate_id: str):
    assert affiliate_namer(bytes(32))(affiliate_id) == affiliate_id
    assert are_identifiers([affiliate_id, "1"])


@each("affiliate_id", [EMAIL, "Jane Doe", "x" * 65, "a\0b", "7\n", "ä", "\u0661", "\ud800", "hash:", "hash:0", "(x)"])
def test_anything_else_is_counted_under_a_hash_that_needs_the_key(affiliate_id: str):
    named, other = affiliate_namer(bytes(32)), affiliate_namer(b"\1" * 32)
    assert re.fullmatch("hash:[0-9a-f]{16}", named(affiliate_id))
    assert named(affiliate_id) != other(affiliate_id)
    assert not are_identifiers(["1", affiliate_id])


@given(st.text() | st.from_regex(r"(hash:)?[0-9a-f]{15,17}"), st.text())
def test_hashing_a_name_is_idempotent_and_distinguishes_texts(first: str, second: str):
    named = affiliate_namer(bytes(32))
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


@pytest.mark.usefixtures("unmasked")
def test_the_key_is_created_once_as_a_private_file_outside_the_database(tmp_path: Path):
    Store(tmp_path).close()
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


def test_a_lost_key_is_recreated_with_a_warning_and_no_count_is_lost(tmp_path: Path):
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
def test_a_damaged_key_is_named_and_left_unchanged(tmp_path: Path, damaged: bytes):
    (tmp_path / KEY_FILE).write_bytes(damaged)
    with pytest.raises(StateError, match=re.escape(str(tmp_path / KEY_FILE))):
        Store(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == damaged


def test_a_link_instead_of_the_key_is_not_followed(tmp_path: Path):
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="symbolic link"):
        Store(tmp_path)


# Erasure


@pytest.mark.parametrize("name", [EMAIL, "jane.doe"])
def test_an_erased_affiliate_leaves_its_counts_without_its_name(tmp_path: Path, name: str):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(10, {("2026-10-01T22", 11, name, "1"): 2, OF_NUMBER: 1})], 1.0)
        store.save([checkpoint(20, {**of_person(spread(0, 1000), name), **spread(0, 1000)})], 2.0)
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


def test_cells_of_one_part_that_are_erased_are_added_up(store: Store, tmp_path: Path):
    first, second = of_person(spread(0, 200)), of_person(spread(0, 200), "x@y.example")
    store.save([checkpoint(10, {**first, **second}, repeated=first, duplicates=200)], 1.0)
    assert tables(tmp_path) == (0, 1)
    assert [store.erase_affiliate(name) for name in (EMAIL, "x@y.example")] == [200, 200]
    assert counts(tmp_path, ERASED) == (200, 400, 200)


def test_nothing_is_reported_as_erased_while_a_part_is_unreadable(store: Store, tmp_path: Path):
    store.save([checkpoint(10, of_person(spread(0, 1000)))], 1.0)
    sql(tmp_path, "UPDATE ledger_parts SET data = x'00'")
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
def test_only_days_past_the_retention_are_deleted_a_few_at_a_time(store: Store, tmp_path: Path, is_sparse: bool):
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


def test_a_clock_that_has_jumped_deletes_nothing(store: Store, tmp_path: Path):
    store.save([checkpoint(1, in_days(1, 9, 1))], 1.0)
    for today in ("2026-10-09", "2036-10-10", "2026-10-10", "2026-10-11"):
        assert expired(store, today, 30) == []
    assert (tables(tmp_path), kept_from(tmp_path)) == ((9 * 24, 0), "")
    assert sum(expired(store, "2026-11-03", 30)) == 0, "as of the last look, none was past its retention"
    assert sum(expired(store, "2026-11-05", 30)) == 3 * 24
    assert kept_from(tmp_path) == "2026-10-04"


def test_a_longer_retention_restores_nothing_and_deleted_days_stay_known(store: Store, tmp_path: Path):
    store.save([checkpoint(1, in_days(1, 9, 1))], 1.0)
    assert expired(store, "2026-10-10", 3) == []
    assert sum(expired(store, "2026-10-11", 3)) == 6 * 24
    assert expired(store, "2026-10-13", 300) == []
    assert kept_from(tmp_path) == "2026-10-07"


def test_a_damaged_part_is_deleted_with_the_last_of_its_hours(store: Store, tmp_path: Path):
    store.save([checkpoint(1, in_days(1, 9, 40))], 1.0)
    sql(tmp_path, "UPDATE ledger_parts SET data = x'00'")
    assert expired(store, "2026-10-10", 3) == []
    assert expired(store, "2026-10-11", 3) == [1]
    assert expired(store, "2026-10-12", 3) == [1]
    with pytest.raises(StateError, match="a part of its ledger is damaged"):
        read_ledger(tmp_path, "2026-10-08")
    assert expired(store, "2026-10-20", 3) == [1], "of the day that the last look has found"
    assert expired(store, "2026-10-21", 3) == [1]
    assert read_ledger(tmp_path) == []
