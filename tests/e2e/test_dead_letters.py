"""Records that break a rule: kept with reason and position, and no neighbour is held up."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper, changed
from tests.e2e.files import told


def _broken_input(sample: Sample) -> tuple[list[bytes], dict[int, tuple[str, bytes]]]:
    """1,000 lines, and by index the three that are broken: rule and bytes."""
    lines = sample.lines[:1000]
    broken = {
        123: ("json", lines[123][:200] + b"\n"),
        500: ("ip", changed(lines[500], IP="256.1.2.3")),
        999: ("btag", changed(lines[999], BTag=...)),
    }
    for index, (_, line) in broken.items():
        lines[index] = line
    return lines, broken


def test_broken_lines_are_named_by_validate_become_dead_letters_and_their_neighbours_are_accepted(
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
    assert not shipper.state.exists(), "validate left a state directory"

    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (1000, 997, 3, 0, 0)), "validate has moved the checkpoint"
    service.assert_holds_exactly(set(sample.ids[:1000]) - {sample.ids[index] for index in broken})
    letters = shipper.read_state().dead_letters
    starts = {index: sum(map(len, lines[:index])) for index in broken}
    assert [(letter.path, letter.rule, letter.start_offset, letter.end_offset, letter.raw) for letter in letters] == [
        (str(file), rule, starts[index], starts[index] + len(line) - 1, line[:-1])
        for index, (rule, line) in broken.items()
    ]


def test_validate_finds_good_records_good(shipper: Shipper, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:1000]))
    good = shipper.run("validate", file)
    assert good.returncode == 0
    assert "1,000 good" in good.stdout


def test_input_that_is_nearly_all_broken_and_no_text_is_kept_as_it_came_and_moves_the_checkpoint(
    shipper: Shipper, service: Service, sample: Sample
):
    odd = [
        b"\xff\xfe\x00{",
        b'{"EventId":"\xc3\x28"}',
        sample.lines[1].rstrip().replace(b'"Username":"', b'"Username":"\xe9'),
    ]
    broken = [b"not json"] * 50 + odd + [b"[]"] * 46
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"\n".join([*broken[:60], sample.lines[0].rstrip(), *broken[60:]]))
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (100, 1, 99, 0, 0))
    assert [letter.raw for letter in shipper.read_state().dead_letters] == broken
    again = shipper.backfill(file)
    assert (again.returncode, again.counts()) == (0, (0, 0, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:1])


# The log --------------------------------------------------------------------------------------------------------------


def shipped(shipper: Shipper, command: str, data: bytes, letters: int) -> Result:
    """Ship bytes by a command, to the end of the bytes."""
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
def test_a_refused_record_is_a_warning_that_has_no_value_of_it(
    shipper: Shipper, service: Service, sample: Sample, command: str
):
    odd = changed(sample.lines[1], IP="198.51.100.777", ConsumerCountry="Freedonia")
    result = shipped(shipper, command, sample.lines[0] + odd + b"broken\n" + sample.lines[2], letters=2)
    first, second = told(result, "record_refused")
    assert (first["level"], first["rules"], first["offset"]) == ("warning", ["country", "ip"], len(sample.lines[0]))
    assert first["message"].startswith("ConsumerCountry must be two letters A-Z; IP must be")
    assert (second["rules"], second["offset"]) == (["json"], len(sample.lines[0] + odd))
    letters = shipper.read_state().dead_letters
    assert [each["path"] for each in (first, second)] == [each.path for each in letters]
    record = json.loads(odd)
    assert not any(str(record[field]) in result.stderr for field in ("IP", "ConsumerCountry", "Username", "EventId"))
    service.assert_holds_exactly([sample.ids[0], sample.ids[2]])


def test_a_good_run_warns_of_nothing_and_many_refused_records_are_a_few_warnings(
    shipper: Shipper, service: Service, sample: Sample
):
    assert "warning" not in shipped(shipper, "backfill", b"".join(sample.lines[:300]), letters=0).stderr
    result = shipped(shipper, "pipe", b"".join(changed(line, IP="x") for line in sample.lines[300:800]), letters=500)
    warnings = told(result, "record_refused")
    assert len(warnings) == 10
    (left_out,) = told(result, "lines_left_out")
    assert left_out["record_refused"] == 500 - len(warnings)


def test_a_letter_that_a_rule_refuses_again_is_named_by_its_number(shipper: Shipper, service: Service, sample: Sample):
    shipped(
        shipper, "backfill", b"".join([*sample.lines[:3], b"broken\n", changed(sample.lines[3], IP="x")]), letters=2
    )
    replayed = shipper.run("dead-letters", "replay")
    assert [(each["letter"], each["rules"]) for each in told(replayed, "record_refused")] == [
        (1, ["json"]),
        (2, ["ip"]),
    ]
