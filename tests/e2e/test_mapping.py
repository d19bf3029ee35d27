"""Records with other field names: `mapping suggest` and `validate` print a mapping that ships them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from shipper.cli.config import toml_value
from tests.cases import each
from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, changed
from tests.e2e.fake_service import FakeService, events_of
from tests.e2e.surroundings import csv_of, documents

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


def test_an_export_with_other_column_names_is_shipped_with_the_suggested_mapping(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    events = documents(sample.lines[:RECORDS])
    rows = [{NAMES[field]: value for field, value in event.items()} | {"newsletter": "yes"} for event in events]
    path = shipper.write("export.csv", csv_of(rows, delimiter=";"))
    suggested = shipper.run("mapping", "suggest", path)
    assert suggested.returncode == 0, suggested
    assert 'BTag = "x1"  # guessed from its values' in suggested.stdout
    assert suggested.stdout.splitlines()[-1] == "# not used, see records.unknown_fields: newsletter"
    checked = shipper.run("validate", path)
    assert (checked.returncode, suggested.stdout.strip() in checked.stdout) == (3, True), checked
    written = [f'{field} = "{name}"' for field, name in NAMES.items()]
    assert all(each in suggested.stdout for each in written)
    settings = {"records.mapping": f"{{{', '.join(written)}}}"}
    assert shipper.run("validate", path, settings=settings).returncode == 0
    assert shipper.backfill(path, settings=settings).counts() == (RECORDS, RECORDS, 0, 0, 0)
    assert [event for body in fake.stored for event in events_of(body)] == events


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{}\n".encode("utf-16"), "it is UTF-16"),
        (b"<!DOCTYPE html>\n<html>\n", "it is an HTML page"),
        (b'{\n "IP": "192.0.2.1"\n}\n', "its objects span several lines"),
        (b'{"data":[{"IP":"192.0.2.1"}]}', "its records are in an array; write one per line: jq -c '.data[]'"),
        (b'{"data":[' + b'{"IP":"192.0.2.1"},' * 20_000 + b"{}]}", "jq -c '.data[]'"),
        (b'{\n "data": [\n  {\n   "IP": "192.0.2.1"\n  }\n ]\n}\n', "one per line: jq -c '.data[]'"),
        (b"sep=,\nEventId,IP,BTag\n1,2,3\n", "delete the lines before the header"),
        (b"Players of May\n\nEventId;IP;BTag\n1;2;3\n", "delete the lines before the header"),
        (b"\xef\xbb\xbfsep=;\r\nEventId;IP;BTag\r\n1;2;3\r\n", "delete the lines before the header"),
        (b'{"IP":"192.0.2.1"},\n' * 2, "its lines end with commas"),
        (b'{"a":{"b":1},\n"c":2}\n', "its objects span several lines"),
        (b'2026-03-01T14:05:09Z INFO {"IP":"192.0.2.1"}\n', "its lines have text before the object"),
        (b'{"time":"now","log":"{\\"IP\\":\\"192.0.2.1\\"}\\n"}\n' * 2, "one per line: jq -r '.log'"),
        (b"\x7fELF\x02\0\xff\n", "it is not text"),
        (b"1,2,3\n4,5,6\n", "is the first row a header?"),
        pytest.param(b"1,2,1\n4,5,6\n", "is the first row a header?", id="values twice"),
        pytest.param(b",".join([b"%d" % n for n in range(1001)]) + b"\n7\n", "is the first row a header?", id="wide"),
    ],
)
def test_a_file_without_records_is_described(shipper: Shipper, data: bytes, words: str):
    checked = shipper.run("validate", shipper.write("export.ndjson", data))
    assert (checked.returncode, words in checked.stdout) == (3, True), checked


def test_values_that_may_have_been_taken_for_column_names_are_not_shown(shipper: Shipper):
    path = shipper.write("export.csv", b"brisk_otter,192.0.2.77\ncalm_heron,192.0.2.78\n")
    suggested = shipper.run("mapping", "suggest", path)
    assert (suggested.returncode, "is the first row a header?" in suggested.stderr) == (2, True), suggested
    checked = shipper.run("validate", path, settings={"input.format": "csv"})
    assert (checked.returncode, "is the first row a header?" in checked.stdout) == (3, True), checked
    assert "unknown fields" not in checked.stdout
    for result in (suggested, checked, shipper.run("validate", path)):
        assert "otter" not in result.stdout + result.stderr
        assert "192.0.2" not in result.stdout + result.stderr


def test_each_broken_rule_is_counted_and_values_are_shown_only_on_request(shipper: Shipper, sample: Sample):
    record = json.loads(sample.lines[0]) | {"IP": "10.0.0.300", "ConsumerCountry": "Malta"}
    path = shipper.write("events.ndjson", json.dumps(record).encode())
    checked = shipper.run("validate", path)
    assert "\nip: 1\n" in checked.stdout
    assert "\ncountry: 1\n" in checked.stdout
    assert "it looks like 'Aaaaa'" in checked.stdout, "the format of the value in the file"
    assert "Malta" not in checked.stdout
    assert "normalized" not in checked.stdout, "only delivered records are counted there"
    shown = shipper.run("validate", path, "--show-values")
    assert "it is '10.0.0.300'" in shown.stdout
    assert "it is 'Malta'" in shown.stdout
    assert shipper.backfill(path).counts() == (1, 0, 1, 0, 0)
    listed = json.loads(shipper.run("dead-letters", "list", "--format", "json").stdout.splitlines()[0])
    assert "ConsumerCountry must be" in listed["message"]
    assert "IP must be" in listed["message"]


# Open findings --------------------------------------------------------------------------------------------------------

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


def local_export(shipper: Shipper, *rows: dict[str, str]) -> Path:
    return shipper.write("export.csv", csv_of([LOCAL | row for row in rows], delimiter=";"))


def mapping_in_use(**changes: object) -> dict[str, object]:
    return {"records.mapping": toml_value({**IN_USE, **changes})}


def test_settings_that_correct_records_are_suggested_and_a_mapping_in_use_is_not(shipper: Shipper):
    odd = 'New\N{NO-BREAK SPACE}"Z"\\\N{SOFT HYPHEN}'
    countries = [{"country": name} for name in ("Malta", "Deutschland", "Malta", odd, "MALTA", "Eire", "Malta")]
    path = local_export(shipper, *countries)
    hidden = shipper.run("validate", path, settings=mapping_in_use())
    assert not any(f"{value}'" in hidden.stdout for value in ("Malta", "Deutschland", "Casino Royal"))
    assert "[records.mapping]\n" not in hidden.stdout, "a mapping is in use"
    assert 'set in [records]: event_id = "derive"' in hidden.stdout
    assert 'set their time zone in [records]: assume_timezone = "Europe/Malta"' in hidden.stdout
    assert "to map 5 codes, complete the line that shipper validate --show-values prints" in hidden.stdout
    assert hidden.stdout.count("  ... and 2 more\n") == 5, "five of seven are listed"

    shown = shipper.run("validate", path, "--show-values", settings=mapping_in_use()).stdout
    assert "it is 'Malta' (byte" in shown
    assert "it is 'Euro', which `values` translates to 'Euros' (byte" in shown
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
    unlisted = "codes that `values` does not list, sent unchanged: CustomerCurrencyID 7"
    assert f"{unlisted}; --show-values names them" in good.stdout
    assert "'Euro'" not in good.stdout
    named = shipper.run("validate", path, "--show-values", settings=settings).stdout
    assert f"{unlisted}\n  CustomerCurrencyID: 'Euro'\n" in named + "\n"


def test_only_columns_missing_from_the_mapping_in_use_are_suggested(shipper: Shipper):
    path = local_export(shipper, {})
    in_use = {field: source for field, source in IN_USE.items() if field not in {"Username", "BrandID"}}
    in_use["ConsumerStatus"] = "Status"
    checked = shipper.run("validate", path, settings={"records.mapping": toml_value(in_use)}).stdout
    assert "add to [records.mapping]:\n\nUsername = " in checked
    assert (
        'Username = "login"\nBrandID = { from = "brand", values = {} }  # matched by name; list its codes: ' in checked
    )
    assert 'ConsumerStatus = "status"' in checked
    assert "records.mapping names columns that are missing: Status (did you mean 'status'?)" in checked
    assert "ConsumerID = " not in checked


@pytest.mark.parametrize(
    ("record", "settings", "words"),
    [
        ({"EventId": "17"}, {}, 'EventId = { const = "" }'),
        ({"EventId": "17"}, {"records.mapping": '{EventId="EventId"}'}, "leave EventId out of [records.mapping]"),
        ({"EventId": ""}, {}, 'set in [records]: event_id = "derive"'),
        ({"Timestamp": "01.03.2026 14:05:09"}, {}, "times must have the form 2026-03-01 14:05:09"),
        ({"Username": "\xe9"}, {}, "iconv -f WINDOWS-1252"),
        ({"extra": 1}, {"records.unknown_fields": "reject"}, 'unknown_fields = "drop"'),
        ({"ConsumerStatus": "x"}, {"records.allowed_statuses": '["ok"]'}, 'records.allowed_statuses = ["ok"]'),
    ],
)
def test_each_finding_names_the_setting_that_corrects_it(
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


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_csv_without_a_known_header_and_other_encodings_are_recognised(shipper: Shipper, encoding: str):
    rows = f"{';'.join(LOCAL.values())}\n".replace("Malta", "C\xf4te").encode(encoding) * 3
    shipper.write("export.csv", rows)
    advice = "iconv -f WINDOWS-1252 -t UTF-8" if encoding == "latin-1" else 'set input.format = "csv"'
    for checked in (
        shipper.run("validate", "-", data=rows),
        shipper.run("validate", shipper.folder / "export.csv"),
    ):
        assert advice in checked.stdout.splitlines()[2], checked
    shipped = shipper.run("pipe", data=rows)
    assert ("CSV needs a header" in shipped.stderr) == (encoding == "utf-8"), shipped


@pytest.mark.parametrize("rows", ["EventId;IP;IP\n1;2;3\n", "EventId;IP;BTag\n1;2;3;\n"])
def test_a_known_header_is_not_reported_as_unknown(shipper: Shipper, rows: str):
    path = shipper.write("export.csv", rows.encode())
    assert "no column has a known name" in shipper.run("validate", "-", data=b"1;2;3\n4;5;6\n").stdout
    for checked in (shipper.run("validate", "-", data=rows.encode()), shipper.run("validate", path)):
        assert checked.returncode != 0, checked
        assert "no column has a known name" not in checked.stdout + checked.stderr


LATIN = ";".join([*LOCAL, "br\xefsk"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LATIN.encode("latin-1"), "it is not UTF-8; convert it, for example: iconv -f WINDOWS-1252"),
        (LATIN.encode("utf-16"), "iconv -f UTF-16"),
        (LATIN.encode("utf-16-le"), "iconv -f UTF-16"),
        ("\n".join(map(",".join, [LOCAL, LOCAL.values()])).encode("utf-16"), "iconv -f UTF-16"),
        (b"EventId,IP\n", "it has no records"),
    ],
    ids=["latin-1", "utf-16", "utf-16-le", "ASCII in utf-16", "only a header"],
)
def test_suggest_says_why_it_suggests_nothing(shipper: Shipper, data: bytes, words: str):
    suggested = shipper.run("mapping", "suggest", shipper.write("export.csv", data))
    assert (suggested.returncode, words in suggested.stderr) == (2, True), suggested
    assert "no field has a known name" not in suggested.stderr


def test_texts_for_a_missing_value_are_reported_unless_they_are_translated(shipper: Shipper, sample: Sample):
    texts = ["\\N", "NULL", "NULL", "70012.0", "a\\tb", "70012", "Nullah"]
    lines = [changed(line, AffiliateID=text) for line, text in zip(sample.lines, texts, strict=False)]
    path = shipper.write("events.ndjson", *lines)
    words = "AffiliateID: doubtful texts are sent unchanged, see docs/records.md: "
    assert f"{words}\\N 1, NULL 2, .0 1, \\ 1\n" in f"{shipper.run('validate', path).stdout}\n"
    translated = {"records.mapping": '{AffiliateID={from="AffiliateID",values={NULL="","\\\\N"=""}}}'}
    assert f"{words}.0 1, \\ 1\n" in shipper.run("validate", path, settings=translated).stdout


def test_times_that_do_not_exist_are_reported_as_such(shipper: Shipper):
    times = ["2026-03-29 02:30:00", "2026-02-30 12:00:00", "2026-02-28 24:00:00"]
    path = local_export(shipper, *({"registered_at": time} for time in times))
    checked = shipper.run("validate", path, settings={**mapping_in_use(), "records.assume_timezone": "Europe/Malta"})
    for words in ("in records.assume_timezone, because the clocks", "a date that does not", "a time of day that does"):
        assert words in checked.stdout
    assert "times must have the form" not in checked.stdout


def test_no_field_is_reported_missing_from_a_line_that_is_no_record(shipper: Shipper):
    path = shipper.write("events.ndjson", b"broken\n")
    checked = shipper.run("validate", path, settings={"records.mapping": '{IP="ip"}'})
    assert (checked.returncode, "NAME" in checked.stdout) == (3, False), checked


def test_obstacles_to_a_derived_event_id_are_reported(shipper: Shipper, sample: Sample):
    path = shipper.folder / "events.ndjson"
    record = json.loads(sample.lines[0])
    del record["EventId"], record["BrandID"]
    path.write_text(json.dumps(record))
    settings = {"records.event_id": "derive", "records.mapping": '{IP="IP"}'}
    checked = shipper.run("validate", path, settings=settings).stdout
    assert 'to read it from another column or field, add to [records.mapping]: BrandID = "NAME"' in checked
    assert "it is computed from BrandID and ConsumerID, but at least one of them is missing" in checked


def test_a_column_with_many_values_is_not_suggested_as_codes(shipper: Shipper):
    rows = [{"country": f"a_login_{number}"} for number in range(60)]
    path = local_export(shipper, *rows)
    shown = shipper.run("validate", path, "--show-values", settings=mapping_in_use()).stdout
    assert "more than 50 different values: is this the right column?" in shown
    assert "a_login_9'" not in shown


def test_values_in_a_mapping_are_compared_exactly(shipper: Shipper, fake: FakeService):
    rows = [{"country": name} for name in ("Malta", "malta", " Malta", "MT", "mt")]
    path = local_export(shipper, *rows)
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
    assert countries == ["DE", "MT", "MT"], "unlisted values are normalized as usual"


def test_the_suggested_mapping_is_valid_toml_for_all_names(shipper: Shipper):
    names = ['"ip" \\', "player id\n[x]", "country\u2028\U0001f40e", "login\x7f", "a.b"]
    record = dict(zip(names, ["192.0.2.1", 5, "GB", "x", 1], strict=True))
    path = shipper.write("events.ndjson", (json.dumps(record) + "\n").encode())
    suggested = shipper.run("mapping", "suggest", path)
    mapping = tomllib.loads(suggested.stdout)["records"]["mapping"]
    assert set(mapping.values()) == {names[0], names[1], names[2], names[3]}, suggested


def test_names_with_dots_are_suggested_and_unreachable_ones_are_listed(shipper: Shipper):
    path = shipper.folder / "events.ndjson"
    record = {"Player No.": 5, "client.ip": "192.0.2.1", "": 1, "a.b": {"brand": 2}, "c": {"d.e": 3, "login": "x"}}
    path.write_text(json.dumps(record) + "\n")
    suggested = shipper.run("mapping", "suggest", path).stdout
    assert 'IP = "client.ip"' in suggested
    assert 'ConsumerID = "Player No."' in suggested
    assert 'Username = "c.login"' in suggested
    assert suggested.splitlines()[-1] == (
        "# left out, as a name is empty or has a dot in an object; rename them: '', 'a.b.brand', 'c.d.e'"
    )


def test_a_column_whose_name_ends_in_a_dot_can_be_mapped(shipper: Shipper):
    path = local_export(shipper, {"brand": "11", "currency": "EUR"})
    path.write_text(path.read_text().replace("player_id", "No."))
    settings = mapping_in_use(
        ConsumerID="No.",
        ConsumerCountry={"const": "MT"},
        ConsumerCurrencyID="currency",
        CustomerCurrencyID={"const": "1"},
    )
    settings |= {"records.event_id": "derive", "records.assume_timezone": "Europe/Malta"}
    assert shipper.backfill(path, settings=settings).counts() == (1, 1, 0, 0, 0)
    wrong = {**settings, **mapping_in_use(ConsumerID="No..")}
    assert "names columns that are missing: No.." in shipper.run("validate", path, settings=wrong).stdout


@each(
    ("time", "words"),
    [
        (LOCAL["registered_at"], "its times have no offset: set records.assume_timezone"),
        ("01.03.2026 14:05", "write its times as 2026-03-01 14:05:09"),
        ("3/1/2026 2:05 PM", "write its times as 2026-03-01 14:05:09"),
    ],
)
def test_times_of_another_form_are_recognised_by_their_values(shipper: Shipper, time: str, words: str):
    path = local_export(shipper, {"registered_at": time})
    path.write_text(path.read_text().replace("registered_at", "angelegt"))
    suggested = shipper.run("mapping", "suggest", path).stdout
    assert f'Timestamp = "angelegt"  # guessed from its values; {words}' in suggested


def test_only_the_beginning_of_a_file_is_read(shipper: Shipper):
    path = shipper.folder / "events.ndjson"
    with path.open("wb") as out:
        for number in range(40):
            name = b"brand_id" if number > 36 else b"note"
            out.write(b'{"player_id":%d,"%b":"%b"}\n' % (number + 1, name, b"7" * (1 << 19)))
    suggested = shipper.run("mapping", "suggest", path)
    assert 'ConsumerID = "player_id"' in suggested.stdout
    assert "brand_id" not in suggested.stdout


@each("command", [["validate"], ["mapping", "suggest"]])
def test_a_topic_is_refused_with_the_way_to_read_it(command: list[str], shipper: Shipper):
    shipper.run(*command, "kafka://t/0:1-2").assert_ended(2, "copy some messages of the topic into one")
