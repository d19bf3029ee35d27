"""The brake: what is counted, and when it is too much."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from shipper.codec import MESSAGES
from shipper.codec.rules import FROM_THE_FUTURE
from shipper.model.records import EncodedChunk, Rejection, Span, Stream, StreamKind
from shipper.pipeline.hold import Brake

GOOD, FUTURE = "", "future"


def stream(number: int, kind: StreamKind = "file", **fields: object) -> Stream:
    return Stream(stream_id=number, kind=kind, path=f"{number}.ndjson", **fields)  # type: ignore[arg-type]


def piece(of: Stream, rules: Iterable[str]) -> EncodedChunk:
    """Make a piece of records, ten bytes each, by the rules that they break."""
    listed = list(rules)
    rejections = [
        Rejection(
            start_offset=10 * index,
            end_offset=10 * index + 9,
            rule="timestamp" if rule == FUTURE else rule,
            message=FROM_THE_FUTURE if rule == FUTURE else MESSAGES[rule],
            raw=b"",
        )
        for index, rule in enumerate(listed)
        if rule
    ]
    good = [10 * index for index, rule in enumerate(listed) if not rule]
    span = Span(
        stream=of,
        start_offset=0,
        end_offset=10 * len(listed),
        tail=b"",
        records=len(listed),
        unsettled=len(good),
        rejections=rejections,
    )
    return EncodedChunk(
        span=span,
        lines=b"",
        events=len(good),
        consumer_ids=[],
        has_new_event_ids=True,
        last_good=good[-1] if good else -1,
    )


def settled(brake: Brake, of: Stream, rules: list[str], most: int = 1_000) -> int:
    """Offer records as the packer does; returns how many are settled."""
    done = 0
    while done < len(rules):
        next_piece = piece(of, rules[done : done + min(most, brake.room(of))])
        if brake.mistakes(next_piece):
            break
        brake.note(next_piece)
        done += next_piece.span.records
    return done


def test_it_stops_exactly_behind_the_limit_however_the_records_are_cut():
    rng, stopped = Random(4), 0
    for _ in range(300):
        limit, before, bad = rng.randrange(1, 30), rng.randrange(0, 40), rng.randrange(0, 60)
        rules = [rng.choice([GOOD, "ip"]) if limit > 1 else GOOD for _ in range(before)] + [GOOD] + ["json"] * bad
        done = settled(Brake(limit), stream(1), [*rules, GOOD], most=rng.randrange(1, 20))
        longest = max(map(len, "".join("x" if rule == "ip" else " " for rule in rules).split()), default=0)
        if longest <= limit:
            assert done == (len(rules) + 1 if bad <= limit else len(rules) - bad + limit)
            stopped += bad > limit
    assert stopped > 50


def test_a_busy_input_beside_it_hides_nothing():
    brake, good, bad = Brake(100), stream(1), stream(2)
    for _ in range(10):
        assert settled(brake, good, [GOOD] * 50) == 50
        assert settled(brake, bad, ["json"] * 10) == 10
    assert settled(brake, bad, ["json"]) == 0
    assert settled(brake, good, [GOOD] * 50) == 50


def test_refusals_by_another_rule_between_hide_nothing_and_count_by_themselves():
    brake = Brake(100)
    assert settled(brake, stream(1), ["json", "event_id", "json"] * 1_000) < 200


def test_many_inputs_of_a_few_bad_records_each_are_noticed_together():
    brake = Brake(100)
    assert sum(settled(brake, stream(number), ["json"] * 5) for number in range(50)) == 100


def test_an_input_goes_on_with_what_was_refused_before_its_checkpoint():
    begun = stream(1, mistakes={"json": 100})
    assert settled(Brake(100), begun, ["json"]) == 0
    assert settled(Brake(101), begun, ["json"] * 2) == 1
    brake = Brake(100)
    assert settled(brake, begun, [GOOD, *["json"] * 200]) == 101
    assert settled(Brake(0), begun, ["json"] * 500) == 500


def test_what_is_replayed_knows_no_limit():
    assert settled(Brake(10), stream(1, kind="replay"), ["json"] * 500) == 500


def test_it_remembers_no_more_inputs_than_it_needs():
    brake = Brake(1_000_000)
    for number in range(5_000):
        settled(brake, stream(number), ["json"])
    assert len(brake._by_stream) == 1_000
    settled(brake, stream(4_999), [GOOD])
    assert len(brake._by_stream) == 999


def test_a_clock_is_suspected_when_nearly_all_of_many_records_come_from_the_future():
    def suspects(*pieces: list[str]) -> bool:
        brake = Brake(0)
        for each in pieces[:-1]:
            brake.note(piece(stream(1), each))
        return brake.seems_late(piece(stream(1), pieces[-1])) > 0

    assert suspects([FUTURE] * 20)
    assert suspects(*[[FUTURE]] * 20), "in a trickle, too"
    assert suspects([FUTURE] * 950 + [GOOD] * 50)
    assert not suspects([FUTURE] * 19)
    assert not suspects([FUTURE] * 50 + [GOOD] * 50)
    assert not suspects([FUTURE] * 19, [GOOD], [FUTURE])
    assert not suspects(["timestamp"] * 500), "no instants at all"
