"""The mistake counter: what it counts, and when the limit is exceeded."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from shipper.codec.rules import FUTURE_TIMESTAMP, MESSAGES
from shipper.model.records import EncodedChunk, Rejection, Span, Stream, StreamKind
from shipper.pipeline.packer import MistakeCounter

GOOD, FUTURE = "", "future"


def stream(number: int, kind: StreamKind = "file", **fields: object) -> Stream:
    return Stream(stream_id=number, kind=kind, path=f"{number}.ndjson", **fields)  # type: ignore[arg-type]


def piece(of: Stream, rules: Iterable[str]) -> EncodedChunk:
    """Make a piece of records, ten bytes each, by the rules that they break."""
    listed = list(rules)
    rejections = []
    for index, rule in enumerate(listed):
        rule, message = ("timestamp", FUTURE_TIMESTAMP) if rule == FUTURE else (rule, MESSAGES.get(rule))
        place = {"start_offset": 10 * index, "end_offset": 10 * index + 9}
        if rule:
            rejections.append(Rejection(**place, rule=rule, message=message, raw=b""))
    good = [10 * index for index, rule in enumerate(listed) if not rule]
    counts = {"read": len(listed), "unsettled": len(good), "rejections": rejections}
    span = Span(stream=of, start_offset=0, end_offset=10 * len(listed), tail=b"", **counts)
    content = {"lines": b"", "events": len(good), "consumer_ids": [], "has_new_event_ids": True}
    return EncodedChunk(span=span, **content, last_good=good[-1] if good else -1)


def settled(counter: MistakeCounter, of: Stream, rules: list[str], most: int = 1_000) -> int:
    """Pass records like the packer, and return how many are settled."""
    done = 0
    while done < len(rules):
        next_piece = piece(of, rules[done : done + min(most, counter.room(of))])
        if counter.excessive_run(next_piece):
            break
        counter.add(next_piece)
        done += next_piece.span.read
    return done


def test_it_stops_exactly_after_the_limit_however_the_records_are_split():
    rng, stopped = Random(4), 0
    for _ in range(300):
        limit, before, bad = rng.randrange(1, 30), rng.randrange(0, 40), rng.randrange(0, 60)
        rules = [rng.choice([GOOD, "ip"]) if limit > 1 else GOOD for _ in range(before)] + [GOOD] + ["json"] * bad
        done = settled(MistakeCounter(limit), stream(1), [*rules, GOOD], most=rng.randrange(1, 20))
        longest = max(map(len, "".join("x" if rule == "ip" else " " for rule in rules).split()), default=0)
        if longest <= limit:
            assert done == (len(rules) + 1 if bad <= limit else len(rules) - bad + limit)
            stopped += bad > limit
    assert stopped > 50


def test_a_busy_other_input_does_not_hide_refusals():
    counter, good, bad = MistakeCounter(100), stream(1), stream(2)
    for _ in range(10):
        assert settled(counter, good, [GOOD] * 50) == 50
        assert settled(counter, bad, ["json"] * 10) == 10
    assert settled(counter, bad, ["json"]) == 0
    assert settled(counter, good, [GOOD] * 50) == 50


def test_refusals_by_another_rule_are_counted_separately():
    counter = MistakeCounter(100)
    assert settled(counter, stream(1), ["json", "event_id", "json"] * 1_000) < 200


def test_few_bad_records_in_each_of_many_inputs_are_counted_together():
    counter = MistakeCounter(100)
    assert sum(settled(counter, stream(number), ["json"] * 5) for number in range(50)) == 100


def test_the_count_of_an_input_includes_refusals_before_its_checkpoint():
    begun = stream(1, mistakes={"json": 100})
    assert settled(MistakeCounter(100), begun, ["json"]) == 0
    assert settled(MistakeCounter(101), begun, ["json"] * 2) == 1
    counter = MistakeCounter(100)
    assert settled(counter, begun, [GOOD, *["json"] * 200]) == 101
    assert settled(MistakeCounter(0), begun, ["json"] * 500) == 500


def test_it_remembers_no_more_inputs_than_it_needs():
    counter = MistakeCounter(1_000_000)
    for number in range(5_000):
        settled(counter, stream(number), ["json"])
    assert len(counter._by_stream) == 1_000
    settled(counter, stream(4_999), [GOOD])
    assert len(counter._by_stream) == 999


def test_a_clock_is_suspected_when_nearly_all_records_come_from_the_future():
    def suspects(*pieces: list[str]) -> bool:
        counter = MistakeCounter(0)
        for each in pieces[:-1]:
            counter.add(piece(stream(1), each))
        return counter.suspicious_future(piece(stream(1), pieces[-1])) > 0

    assert suspects([FUTURE])
    assert suspects(*[[FUTURE]] * 20), "in a trickle, too"
    assert suspects([FUTURE] * 950 + [GOOD] * 50)
    assert not suspects([FUTURE, GOOD])
    assert not suspects([FUTURE] * 50 + [GOOD] * 50)
    assert not suspects([FUTURE] * 8, [GOOD])
    assert not suspects(["timestamp"] * 500), "no instants at all"
