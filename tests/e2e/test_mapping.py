"""Records with other names of fields: `mapping suggest` and `validate` write a mapping, with which they are shipped."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper
from tests.e2e.fake_service import FakeService, events_of

pytestmark = pytest.mark.usefixtures("ships_to_fake")

NAMES = {
    "EventId": "event_uuid",
    "IP": "Consumer IP",
    "Timestamp": "registered_at",
    "BTag": "x1",
    "ConsumerID": "player_id",
    "ConsumerCountry": "Country Code",
    "ConsumerCurrencyID": "currency",
    "Username": "login",
    "BrandID": "brand",
    "CustomerCurrencyID": "customer_currency",
    "ConsumerStatus": "account status",
    "AffiliateID": "affiliate",
    "ConsumerState": "state",
}
RECORDS = 50


def export(path: Path, sample: Sample) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow([*NAMES.values(), "newsletter"])
        for line in sample.lines[:RECORDS]:
            writer.writerow([*json.loads(line).values(), "yes"])
    return path


def test_an_export_with_other_names_is_shipped_with_the_mapping_that_is_suggested(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    path = export(shipper.folder / "export.csv", sample)
    suggested = shipper.run("mapping", "suggest", path)
    assert suggested.returncode == 0, suggested
    assert 'BTag = "x1"  # a guess, by the form of its values' in suggested.stdout
    assert suggested.stdout.splitlines()[-1] == "# not used, see records.unknown_fields: newsletter"
    checked = shipper.run("validate", path)
    assert (checked.returncode, suggested.stdout.strip() in checked.stdout) == (3, True), checked
    written = [f'{field} = "{name}"' for field, name in NAMES.items()]
    assert all(each in suggested.stdout for each in written)
    settings = {"records.mapping": f"{{{', '.join(written)}}}"}
    assert shipper.run("validate", path, settings=settings).returncode == 0
    assert shipper.backfill(path, settings=settings).counts() == (RECORDS, RECORDS, 0, 0, 0)
    assert [event for body in fake.stored for event in events_of(body)] == [
        json.loads(line) for line in sample.lines[:RECORDS]
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{}\n".encode("utf-16"), "it is UTF-16"),
        (b"<!DOCTYPE html>\n<html>\n", "it is a page of HTML"),
        (b'{\n "IP": "192.0.2.1"\n}\n', "its objects stand on several lines"),
        (b"1,2,3\n4,5,6\n", "is the first row a header?"),
    ],
)
def test_a_file_that_holds_no_records_is_called_what_it_is(shipper: Shipper, data: bytes, words: str):
    path = shipper.folder / "export.ndjson"
    path.write_bytes(data)
    checked = shipper.run("validate", path)
    assert (checked.returncode, words in checked.stdout) == (3, True), checked


def test_values_may_be_names_of_columns_and_are_not_shown(shipper: Shipper):
    path = shipper.folder / "export.csv"
    path.write_text("brisk_otter,192.0.2.77\ncalm_heron,192.0.2.78\n")
    suggested = shipper.run("mapping", "suggest", path)
    assert (suggested.returncode, "is the first row of CSV a header?" in suggested.stderr) == (2, True), suggested
    for result in (suggested, shipper.run("validate", path)):
        assert "otter" not in result.stdout + result.stderr
        assert "192.0.2" not in result.stdout + result.stderr


def test_each_broken_rule_is_counted_and_values_are_shown_only_if_asked(shipper: Shipper, sample: Sample):
    record = json.loads(sample.lines[0]) | {"IP": "10.0.0.300", "ConsumerCountry": "Malta"}
    path = shipper.folder / "events.ndjson"
    path.write_text(json.dumps(record))
    checked = shipper.run("validate", path)
    assert "\nip: 1\n" in checked.stdout
    assert "\ncountry: 1\n" in checked.stdout
    assert "it looks like 'AAAAA'" in checked.stdout
    assert "Malta" not in checked.stdout
    assert "normalized" not in checked.stdout, "what is counted there was delivered"
    shown = shipper.run("validate", path, "--show-values")
    assert "it is '10.0.0.300'" in shown.stdout
    assert shipper.backfill(path).counts() == (1, 0, 1, 0, 0)
    listed = json.loads(shipper.run("dead-letters", "list", "--format", "json").stdout.splitlines()[0])
    assert "ConsumerCountry must be" in listed["message"]
    assert "IP must be" in listed["message"]


def test_whatever_the_names_are_the_mapping_is_toml(shipper: Shipper, sample: Sample):
    names = ['"ip" \\', "player id\n[x]", "country\u2028\U0001f40e", "login\x7f", "a.b"]
    record = dict(zip(names, ["192.0.2.1", 5, "GB", "x", 1], strict=True))
    path = shipper.folder / "events.ndjson"
    path.write_text(json.dumps(record) + "\n")
    suggested = shipper.run("mapping", "suggest", path)
    mapping = tomllib.loads(suggested.stdout)["records"]["mapping"]
    assert set(mapping.values()) == {names[0], names[1], names[2], names[3]}, suggested


def test_no_more_than_the_beginning_of_a_file_is_read(shipper: Shipper):
    path = shipper.folder / "events.ndjson"
    with path.open("wb") as out:
        for number in range(100):
            name = b"brand_id" if number > 50 else b"note"
            out.write(b'{"player_id":%d,"%b":"%b"}\n' % (number + 1, name, b"7" * (1 << 19)))
    suggested = shipper.run("mapping", "suggest", path)
    assert 'ConsumerID = "player_id"' in suggested.stdout
    assert "brand_id" not in suggested.stdout
