"""Records that break a rule: kept with reason and position, and no neighbour is held up."""

from __future__ import annotations

import re

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, changed, event_id


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


def test_broken_lines_become_dead_letters_and_their_neighbours_are_accepted(
    shipper: Shipper, service: Service, sample: Sample
):
    lines, broken = _broken_input(sample)
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(lines))
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (1000, 997, 3, 0, 0))
    service.assert_holds_exactly(set(sample.ids[:1000]) - {sample.ids[index] for index in broken})

    letters = shipper.read_state().dead_letters
    found = [(letter.rule, letter.start_offset, letter.end_offset, letter.raw) for letter in letters]
    wanted = []
    for index, (rule, line) in broken.items():
        start = sum(map(len, lines[:index]))
        wanted.append((rule, start, start + len(line) - 1, line[:-1]))
    assert found == wanted
    assert {letter.path for letter in letters} == {str(file)}

    again = shipper.backfill(file)
    assert (again.returncode, again.counts()) == (0, (0, 0, 0, 0, 0))
    assert shipper.read_state().dead_lettered == 3


def test_validate_names_the_same_lines_and_sends_nothing(shipper: Shipper, service: Service, sample: Sample):
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

    file.write_bytes(b"".join(sample.lines[:1000]))
    good = shipper.run("validate", file)
    assert good.returncode == 0
    assert "1,000 good" in good.stdout


def test_validate_does_not_move_the_checkpoint_of_a_backfill(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:100]))
    assert shipper.run("validate", file).returncode == 0
    assert shipper.backfill(file).counts() == (100, 100, 0, 0, 0)


def test_input_that_is_nearly_all_broken_moves_the_checkpoint(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"not json\n" * 50 + sample.lines[0] + b"[]\n" * 49)
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (100, 1, 99, 0, 0))
    again = shipper.backfill(file)
    assert (again.returncode, again.counts()) == (0, (0, 0, 0, 0, 0))
    service.assert_holds_exactly([event_id(sample.lines[0])])


def test_bytes_that_are_no_text_are_kept_as_they_came(shipper: Shipper, service: Service, sample: Sample):
    odd = [
        b"\xff\xfe\x00{",
        b'{"EventId":"\xc3\x28"}',
        sample.lines[1].rstrip().replace(b'"Username":"', b'"Username":"\xe9'),
    ]
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"\n".join([*odd, sample.lines[0]]))
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (4, 1, 3, 0, 0))
    assert [letter.raw for letter in shipper.read_state().dead_letters] == odd
    service.assert_holds_exactly(sample.ids[:1])
