"""The corpus of records (tests/corpus): each one alone, among good ones, and among clean ones gets its verdict."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from shipper.codec import FIELD_RULES, MESSAGES, Codec
from shipper.config import RecordsSettings
from shipper.records import Chunk, Rejection, Stream

CORPUS = Path(__file__).parents[1] / "corpus"
LATEST = "2026-11-21T00:05:00Z"
LIMIT = 3000
FIELDS = {
    "EventId": "0f8fad5b-d9cb-469f-a165-70867728950e",
    "IP": "192.0.2.1",
    "Timestamp": "2026-03-01T14:05:09Z",
    "BTag": "50121_0123456789abcdef0123456789abcdef",
    "ConsumerID": 2000001,
    "ConsumerCountry": "GB",
    "ConsumerCurrencyID": "GBP",
    "Username": "brisk_heron",
    "BrandID": 11,
    "CustomerCurrencyID": "2",
    "ConsumerStatus": "Verified",
    "AffiliateID": "",
    "ConsumerState": "",
}
DERIVED = "00000000-0000-0000-0000-000000000000"  # stands for any; that it is always the same one is another test


class Case(NamedTuple):
    """
    Attributes:
        sent: What leaves, exactly; None if nothing does.
        rule: That refuses it; empty if it is sent or is no record.
    """

    claim: str
    settings: RecordsSettings
    line: bytes
    sent: bytes | None
    rule: str


def record(**changes: Any) -> bytes:
    document = {**FIELDS, **changes}
    return msgspec.json.encode({name: value for name, value in document.items() if value is not ...})


def settings(text: str) -> RecordsSettings:
    return msgspec.convert({"dedupe_window": 0, **tomllib.loads(f"x = {{ {text} }}")["x"]}, RecordsSettings)


NORMALIZE, STRICT = settings(""), settings('mode = "strict", unknown_fields = "reject"')


def value_cases() -> Iterator[Case]:
    for line in (CORPUS / "values.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        found = re.fullmatch(r"(\w+) (.*) (ok|!!|-> (.*))", line)
        assert found, line
        field, value, outcome, normal = found.groups()
        # As it is written in the corpus, so that a number keeps its form.
        raw = record(**{field: ...}) if value == "absent" else record(**{field: msgspec.Raw(value.encode())})
        mended = record(**{field: json.loads(normal)}) if normal else None
        is_good = outcome == "ok"
        rule = "" if is_good else FIELD_RULES[field]
        yield Case(line, NORMALIZE, raw, raw if is_good else mended, "" if mended else rule)
        yield Case(f"strict: {line}", STRICT, raw, raw if is_good else None, rule)


def line_cases() -> Iterator[Case]:
    current = NORMALIZE
    for text in (CORPUS / "lines.txt").read_text().splitlines():
        if not text or text.startswith("#"):
            continue
        if text.startswith("["):
            current = settings(text[1:-1])
            continue
        claim, written, outcome = (part.strip() for part in re.split(r" ::(?= |$)", text))
        good = record()
        replaced = {"GOOD": good, "OPEN": good[:-1], "REST": good[1:], "LONG": b"x" * LIMIT, "DEEP": b"[" * 1100}
        line = written.encode("latin-1").decode("unicode_escape").encode("latin-1")
        for name, data in replaced.items():
            line = line.replace(name.encode(), data)
        is_refused = outcome.startswith("!!")
        sent = line if outcome == "ok" else _expected(outcome[3:]) if outcome.startswith("->") else None
        yield Case(claim, current, line, sent, outcome[3:] if is_refused else "")


def _expected(text: str) -> bytes:
    """Read `GOOD/FIELD=VALUE…` or `GOOD+"extra":…`."""
    head, plus, extra = text.partition("+")
    changes = dict(part.split("=", 1) for part in head.split("/")[1:])
    made = record(**{name: json.loads(value) for name, value in changes.items()})
    return made[:-1] + b"," + extra.encode().decode("unicode_escape").encode() + b"}" if plus else made


CASES = [*value_cases(), *line_cases()]


def encode(lines: list[bytes], how: RecordsSettings, *, start: int = 5000) -> tuple[list[bytes], list[Rejection]]:
    data = b"".join(line + b"\n" for line in lines)
    stream = Stream(stream_id=1, kind="file", path="x")
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    codec = Codec(how, max_record_bytes=LIMIT)
    piece = codec.encode(chunk, start, room_events=100, room_bytes=1 << 20, latest=LATEST)
    assert piece is not None
    assert piece.span.end_offset == chunk.end_offset
    good = piece.lines.split(b"\n") if piece.lines else []
    assert piece.span.records == len(good) + len(piece.span.rejections)
    return good, piece.span.rejections


def good_line(number: int, how: RecordsSettings, *, is_sloppy: bool = False) -> bytes:
    """A record that is good whatever the settings, or one that mode normalize has to put right."""
    more: dict[str, Any] = {}
    if how.mapping.get("IP") == "client_ip":
        more = {"IP": ..., "client_ip": "192.0.2.9"}
    elif how.mapping:
        click = "0123456789abcdef0123456789abcdef"
        more = {"client": {"ip": "192.0.2.9"}, "media": 5, "click": click, "land": "GB"}
    state = None if is_sloppy and how.mode == "normalize" else ""
    return record(EventId=f"0f8fad5b-d9cb-469f-a165-{number:012x}", ConsumerID=number + 1, ConsumerState=state, **more)


def assert_verdict(case: Case, before: list[bytes], after: list[bytes]) -> None:
    good, rejections = encode([*before, case.line, *after], case.settings)
    alone, _ = encode([*before, *after], case.settings) if before or after else ([], [])
    assert good[: len(before)] + good[len(good) - len(after) :] == alone, "a neighbour suffered"
    sent = good[len(before) : len(good) - len(after)]
    if case.rule:
        (rejection,) = rejections
        assert (rejection.rule, sent) == (case.rule, [])
        assert rejection.rule in MESSAGES
        assert rejection.raw == case.line.lstrip(b"\0")
        assert rejection.start_offset == 5000 + sum(len(line) + 1 for line in before)
        assert rejection.end_offset == rejection.start_offset + len(rejection.raw)
    else:
        assert rejections == []
        if case.sent is not None and b"DERIVED" in case.sent:
            (line,) = sent
            derived = json.loads(line)["EventId"]
            assert json.loads(line) == {**FIELDS, "EventId": derived}
            assert derived != FIELDS["EventId"]
        else:
            assert sent == ([] if case.sent is None else [case.sent])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.claim[:60])
def test_each_record_of_the_corpus_gets_its_verdict(case: Case):
    clean = [good_line(number, case.settings) for number in range(6)]
    sloppy = [good_line(number, case.settings, is_sloppy=True) for number in range(6)]
    assert_verdict(case, [], [])
    assert_verdict(case, clean[:3], clean[3:])
    assert_verdict(case, sloppy[:3], sloppy[3:])


@pytest.mark.parametrize("case", [case for case in CASES if case.sent is not None], ids=lambda case: case.claim[:60])
def test_what_leaves_would_leave_again_as_it_is(case: Case):
    if case.settings.mapping or b"DERIVED" in (case.sent or b""):
        return  # a mapping reads another form than it writes
    assert encode([case.sent or b""], case.settings) == ([case.sent], [])


def test_the_corpus_is_large_and_hits_every_rule():
    assert len(CASES) > 400
    hit = {case.rule for case in CASES}
    assert set(MESSAGES) - {"csv"} <= hit  # rows have their own corpus, the framing's


def test_a_derived_id_is_the_same_for_the_same_player_and_no_other():
    how = settings('event_id = "derive"')

    def derived(**changes: Any) -> str:
        (line,), _ = encode([record(EventId=..., **changes)], how)
        return json.loads(line)["EventId"]

    assert derived() == derived(Username="another", Timestamp="2026-03-02T00:00:00Z") == derived(ConsumerID="2000001")
    assert len({derived(), derived(ConsumerID=5), derived(BrandID=5)}) == 3
    by_time = settings('event_id = "derive", event_id_fields = ["BrandID", "ConsumerID", "Timestamp"]')
    (line,), _ = encode([record(EventId=...)], by_time)
    assert json.loads(line)["EventId"] != derived()
