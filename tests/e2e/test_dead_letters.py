"""Records that break a rule are kept with reason and position, and delay no other record."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper, changed
from tests.e2e.files import log_lines


def _broken_input(sample: Sample) -> tuple[list[bytes], dict[int, tuple[str, bytes]]]:
    """Return 1,000 lines, and the rule and bytes of the three broken ones by index."""
    lines = sample.lines[:1000]
    broken = {
        123: ("json", lines[123][:200] + b"\n"),
        500: ("ip", changed(lines[500], IP="256.1.2.3")),
        999: ("btag", changed(lines[999], BTag=...)),
    }
    for index, (_, line) in broken.items():
        lines[index] = line
    return lines, broken


def test_broken_lines_are_reported_by_validate_and_become_dead_letters_while_other_lines_are_accepted(
    shipper: Shipper, service: Service, sample: Sample
):
    lines, broken = _broken_input(sample)
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(lines))
    for path, stdin, name in ((file, None, str(file)), ("-", file, "standard input")):
        with open(stdin or "/dev/null", "rb") as opened:
            result = shipper.run("validate", path, stdin=opened)
        assert result.returncode == 3
        named = re.findall(rf"^  {re.escape(name)}:(\d+): .*\(byte (\d+)\)$", result.stdout, re.MULTILINE)
        wanted = [(str(index + 1), str(sum(map(len, lines[:index])))) for index in broken]
        assert sorted(named) == sorted(wanted), result.stdout
        assert all(f"{rule}: 1" in result.stdout for rule, _ in broken.values())
    assert service.counts()["requests"] == 0
    assert not shipper.state.exists(), "validate created a state directory"

    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (1000, 997, 3, 0, 0)), "validate moved the checkpoint"
    service.assert_holds_exactly(set(sample.ids[:1000]) - {sample.ids[index] for index in broken})
    letters = shipper.read_state().dead_letters
    starts = {index: sum(map(len, lines[:index])) for index in broken}
    assert [(letter.path, letter.rule, letter.start_offset, letter.end_offset, letter.raw) for letter in letters] == [
        (str(file), rule, starts[index], starts[index] + len(line) - 1, line[:-1])
        for index, (rule, line) in broken.items()
    ]


# The log --------------------------------------------------------------------------------------------------------------


def shipped(shipper: Shipper, command: str, data: bytes, letters: int) -> Result:
    """Ship all the bytes with a command."""
    file = shipper.folder / "events.ndjson"
    file.write_bytes(data)
    if command == "backfill":
        return shipper.backfill(file)
    if command == "pipe":
        return shipper.pipe(data)
    running = shipper.start("run", file)
    running.wait_until(lambda: len(shipper.read_state().dead_letters) == letters, "all letters are saved")
    return running.stop()


@pytest.mark.parametrize("command", ["run", "pipe", "backfill"])
def test_the_warning_about_a_refused_record_contains_none_of_its_values(
    shipper: Shipper, service: Service, sample: Sample, command: str
):
    odd = changed(sample.lines[1], IP="198.51.100.777", ConsumerCountry="Freedonia")
    result = shipped(shipper, command, sample.lines[0] + odd + b"broken\n" + sample.lines[2], letters=2)
    first, second = log_lines(result, "record_refused")
    assert (first["level"], first["rules"], first["offset"]) == ("warning", ["ip", "country"], len(sample.lines[0]))
    assert re.match("IP must be .*; ConsumerCountry must be two letters A-Z", first["message"])
    assert (second["rules"], second["offset"]) == (["json"], len(sample.lines[0] + odd))
    letters = shipper.read_state().dead_letters
    assert [each["path"] for each in (first, second)] == [each.path for each in letters]
    record = json.loads(odd)
    assert not any(str(record[field]) in result.stderr for field in ("IP", "ConsumerCountry", "Username", "EventId"))
    service.assert_holds_exactly([sample.ids[0], sample.ids[2]])


def test_a_run_without_errors_logs_no_warning_and_many_refused_records_cause_few_warnings(
    shipper: Shipper, service: Service, sample: Sample
):
    assert "warning" not in shipped(shipper, "backfill", b"".join(sample.lines[:300]), letters=0).stderr
    good = shipper.run("validate", "events.ndjson")
    assert (good.returncode, "300 records: 300 good" in good.stdout) == (0, True)
    result = shipped(shipper, "pipe", b"".join(changed(line, IP="x") for line in sample.lines[300:800]), letters=500)
    warnings = log_lines(result, "record_refused")
    assert len(warnings) == 10
    (left_out,) = log_lines(result, "lines_left_out")
    assert left_out["record_refused"] == 500 - len(warnings)


def test_a_dead_letter_refused_again_by_a_rule_is_logged_with_its_id(
    shipper: Shipper, service: Service, sample: Sample
):
    shipped(
        shipper, "backfill", b"".join([*sample.lines[:3], b"broken\n", changed(sample.lines[3], IP="x")]), letters=2
    )
    replayed = shipper.run("dead-letters", "replay")
    assert [(each["letter"], each["rules"]) for each in log_lines(replayed, "record_refused")] == [
        (1, ["json"]),
        (2, ["ip"]),
    ]
