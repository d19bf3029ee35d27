"""Records with other names of fields: `mapping suggest` and `validate` write a mapping, with which they are shipped."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import pytest

from shipper.cli.config import toml_value
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
    assert "it looks like 'Aaaaa'" in checked.stdout, "the form of what stands in the file"
    assert "Malta" not in checked.stdout
    assert "normalized" not in checked.stdout, "what is counted there was delivered"
    shown = shipper.run("validate", path, "--show-values")
    assert "it is '10.0.0.300'" in shown.stdout
    assert "it is 'Malta'" in shown.stdout
    assert shipper.backfill(path).counts() == (1, 0, 1, 0, 0)
    listed = json.loads(shipper.run("dead-letters", "list", "--format", "json").stdout.splitlines()[0])
    assert "ConsumerCountry must be" in listed["message"]
    assert "IP must be" in listed["message"]


# What is still open ---------------------------------------------------------------------------------------------------

LOCAL = {
    "player_id": "2000001",
    "registered_at": "2026-03-01 14:05:09",
    "ip": "192.0.2.7",
    "click": "50121_0123456789abcdef0123456789abcdef",
    "login": "brisk_heron",
    "country": "Malta",
    "currency": "Euro",
    "brand": "Casino Royal",
    "status": "Verified",
}
IN_USE = {
    "ConsumerID": "player_id",
    "Timestamp": "registered_at",
    "IP": "ip",
    "BTag": "click",
    "Username": "login",
    "ConsumerCountry": {"from": "country", "values": {"malta": "MT"}},
    "ConsumerCurrencyID": {"from": "currency", "values": {"Euro": "Euros"}},
    "CustomerCurrencyID": {"from": "currency", "values": {"euro": "1"}},
    "BrandID": "brand",
    "ConsumerStatus": "status",
}


def local_export(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(LOCAL), delimiter=";")
        writer.writeheader()
        writer.writerows(LOCAL | row for row in rows)
    return path


def mapping_in_use(**changes: object) -> dict[str, object]:
    return {"records.mapping": toml_value({**IN_USE, **changes})}


def test_what_a_setting_mends_is_said_and_a_mapping_in_use_is_not_suggested_again(shipper: Shipper):
    odd = 'New\N{NO-BREAK SPACE}"Z"\\\N{SOFT HYPHEN}'
    countries = [{"country": name} for name in ("Malta", "Deutschland", "Malta", odd, "MALTA", "Eire", "Malta")]
    path = local_export(shipper.folder / "export.csv", *countries)
    hidden = shipper.run("validate", path, settings=mapping_in_use())
    assert not any(f"{value}'" in hidden.stdout for value in ("Malta", "Deutschland", "Casino Royal"))
    assert "[records.mapping]\n" not in hidden.stdout, "it is in use"
    assert 'set in [records]: event_id = "derive"' in hidden.stdout
    assert 'set their zone in [records]: assume_timezone = "Europe/Malta"' in hidden.stdout
    assert "to map 5 codes, complete the line that shipper validate --show-values prints" in hidden.stdout
    assert hidden.stdout.count("  ... and 2 more\n") == 5, "five of seven are listed"

    shown = shipper.run("validate", path, "--show-values", settings=mapping_in_use()).stdout
    assert "it is 'Malta' (byte" in shown
    assert "it is 'Euro', which values turns into 'Euros' (byte" in shown
    lines = [line for line in shown.splitlines() if line.startswith(("  ConsumerCountry = ", "  BrandID = "))]
    pasted = tomllib.loads("\n".join(lines))
    codes = dict.fromkeys(["Malta", "Deutschland", odd, "MALTA", "Eire"], "...")
    assert pasted == {
        "ConsumerCountry": {"from": "country", "values": {"malta": "MT", **codes}},
        "BrandID": {"from": "brand", "values": {"Casino Royal": "..."}},
    }

    for source in pasted.values():
        source["values"] = {code: "MT" if code != "Casino Royal" else 11 for code in source["values"]}
    mended = mapping_in_use(**pasted, ConsumerCurrencyID={"from": "currency", "values": {"Euro": "EUR"}})
    settings = {**mended, "records.event_id": "derive", "records.assume_timezone": "Europe/Malta"}
    good = shipper.run("validate", path, settings=settings)
    assert good.returncode == 0, good
    assert "codes that values does not list, and that stay as they are: CustomerCurrencyID 7" in good.stdout


def test_a_column_that_the_mapping_in_use_does_not_name_is_suggested_alone(shipper: Shipper):
    path = local_export(shipper.folder / "export.csv", {})
    in_use = {field: source for field, source in IN_USE.items() if field not in {"Username", "BrandID"}}
    in_use["ConsumerStatus"] = "Status"
    checked = shipper.run("validate", path, settings={"records.mapping": toml_value(in_use)}).stdout
    assert "add to [records.mapping]:\n\nUsername = " in checked
    assert 'Username = "login"\nBrandID = { from = "brand", values = {} }  # by its name; list its codes: ' in checked
    assert 'ConsumerStatus = "status"' in checked
    assert "records.mapping names columns that are missing: Status (did you mean 'status'?)" in checked
    assert "ConsumerID = " not in checked


@pytest.mark.parametrize(
    ("record", "settings", "words"),
    [
        ({"EventId": "17"}, {}, 'EventId = { const = "" }'),
        ({"EventId": "17"}, {"records.mapping": '{EventId="EventId"}'}, "leave EventId out of [records.mapping]"),
        ({"EventId": ""}, {}, 'set in [records]: event_id = "derive"'),
        ({"Timestamp": "01.03.2026 14:05:09"}, {}, "a time is read in the form 2026-03-01 14:05:09 alone"),
        ({"Username": "\xe9"}, {}, "iconv -f WINDOWS-1252"),
        ({"extra": 1}, {"records.unknown_fields": "reject"}, 'unknown_fields = "drop"'),
        ({"ConsumerStatus": "x"}, {"records.allowed_statuses": '["ok"]'}, 'records.allowed_statuses = ["ok"]'),
    ],
)
def test_each_finding_that_a_setting_mends_names_it(
    shipper: Shipper, sample: Sample, record: dict[str, object], settings: dict[str, object], words: str
):
    path = shipper.folder / "events.ndjson"
    path.write_text(json.dumps(json.loads(sample.lines[0]) | record, ensure_ascii=False), encoding="latin-1")
    checked = shipper.run("validate", path, settings=settings)
    assert (checked.returncode, words in checked.stdout) == (3, True), checked
    found = json.loads(shipper.run("validate", path, "--format", "json", settings=settings).stdout)
    assert any(words in line for broken in found["rules"].values() for line in broken["advice"]), found
    mend = {"records.event_id": "derive", "records.mapping": '{EventId={const=""}}'}
    if "const" in words:
        assert shipper.run("validate", path, settings=mend).returncode == 0


def test_of_what_is_no_record_no_field_is_said_to_be_missing(shipper: Shipper):
    path = shipper.folder / "events.ndjson"
    path.write_text("broken\n")
    checked = shipper.run("validate", path, settings={"records.mapping": '{IP="ip"}'})
    assert (checked.returncode, "NAME" in checked.stdout) == (3, False), checked


def test_what_stands_in_the_way_of_a_computed_event_id_is_said(shipper: Shipper, sample: Sample):
    path = shipper.folder / "events.ndjson"
    record = json.loads(sample.lines[0])
    del record["EventId"], record["BrandID"]
    path.write_text(json.dumps(record))
    settings = {"records.event_id": "derive", "records.mapping": '{IP="IP"}'}
    checked = shipper.run("validate", path, settings=settings).stdout
    assert 'to read it from another column or field, add to [records.mapping]: BrandID = "NAME"' in checked
    assert "it is computed from BrandID and ConsumerID, of which something is missing" in checked


def test_a_column_of_many_values_is_not_taken_for_codes(shipper: Shipper):
    rows = [{"country": f"a_login_{number}"} for number in range(60)]
    path = local_export(shipper.folder / "export.csv", *rows)
    shown = shipper.run("validate", path, "--show-values", settings=mapping_in_use()).stdout
    assert "more than 50 different values: are these codes, or is it another column?" in shown
    assert "a_login_9'" not in shown


def test_values_of_a_mapping_are_compared_exactly(shipper: Shipper, fake: FakeService):
    rows = [{"country": name} for name in ("Malta", "malta", " Malta", "MT", "mt")]
    path = local_export(shipper.folder / "export.csv", *rows)
    ok = {"from": "currency", "values": {"Euro": "EUR"}}
    mapping = mapping_in_use(
        ConsumerCountry={"from": "country", "values": {"Malta": "DE"}},
        ConsumerCurrencyID=ok,
        BrandID={"const": 11},
        EventId={"template": "{country}"},
    )
    settings = {
        **mapping,
        "records.assume_timezone": "Europe/Malta",
        "records.relax": "event_id",
        "batch.unique_consumers": "false",
    }
    assert shipper.backfill(path, settings=settings).counts() == (5, 3, 2, 0, 0)
    countries = [event["ConsumerCountry"] for body in fake.stored for event in events_of(body)]
    assert countries == ["DE", "MT", "MT"], "what is not listed is normalised as ever"


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
