"""The native extension: which lines the scanner accepts and skips, and the same sums as in Python."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.codec.codec import Codec, _Scanned
from shipper.codec.dedupe import DedupeWindow, accept_events, key_of
from shipper.codec.rules import Columns, tally
from shipper.config.settings import RecordsSettings
from shipper.delivery.parts import event_in
from shipper.kafka.stream import _lines
from shipper.model.records import LedgerKey
from shipper.state.ledger import _Sums, sum_tallies
from shipper.system.native import NATIVE
from tests.cases import each
from tests.unit.test_codec import LATEST, LIMIT, chunk_of, encode, good_lines, line, pieces_of

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native extension is not installed or is disabled")

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def scan(data: bytes, *, start: int = 0, events: int = 1000, room_bytes: int = 1 << 20, window: Any = None) -> _Scanned:
    window = window or NATIVE.DedupeWindow(0)
    return _Scanned(*NATIVE.scan(data).take(data, start, events, room_bytes, LIMIT, LATEST, window))


def reordered(raw: bytes) -> bytes:
    first, _, rest = raw[1:-1].partition(b",")
    return b"{" + rest + b"," + first + b"}"


def test_ordinary_lines_are_scanned_together():
    lines = [
        line(1),
        reordered(line(2)),
        line(3).replace(b":", b" :\t").replace(b",", b" , ").replace(b" :\t30 :\t", b":30:") + b"\r",
        line(4, Username='é"\\\n\u2028🐴'),
        line(5, Username="@@").replace(b"@@", rb"\u00e9\ud83d\udc34\/"),
        line(6, ConsumerID=2**63 - 1, AffiliateID="é", ConsumerState="NJ"),
    ]
    data = b"\n".join(lines)
    for end in (b"", b"\n"):
        found = scan(data + end)
        assert (found.stretches, found.others, found.end) == ([(0, len(data), 6)], [], len(data + end))
        repeats = [(ordinal, data[begin:finish]) for ordinal, begin, finish in found.repeats]
        assert repeats == list(enumerate(lines))[1:5]
        assert memoryview(found.consumer_ids).cast("q").tolist() == [event_in(each).ConsumerID for each in lines]
        assert dict(found.ledger.items()) == tally(Columns.of(list(map(event_in, lines))))


@each(
    "raw",
    [
        *(line(IP="01.2.3.4"), line(ConsumerID=2**63), line(ConsumerID=0), line(BrandID=1.0)),
        *(line(Username="@").replace(b"@", letter) for letter in (b"", rb"\ud800", b"\xff", b"\x01", b"x" * LIMIT)),
        *(line(Timestamp=f"{time}:00:00Z") for time in ("2026-02-29T00", "2026-11-20T24", "9026-11-20T12")),
        *(line(EventId=UUID.upper()), line(BTag="1" * 21 + "_" + "a" * 32)),
        line(AffiliateID="a/b").replace(b"/", rb"\/"),
        *(line()[:-1] + b',"x":1}', line()[:-1] + b',"IP":"192.0.2.1"}', line().replace(b',"ConsumerState":""', b"")),
        *(b"\0" + line(), line() + line(), b"", b"{}", b"null"),
    ],
)
def test_it_skips_a_line_that_is_not_ordinary(raw: bytes):
    before = len(line(1)) + 1
    behind = before + len(raw) + 1
    found = scan(line(1) + b"\n" + raw + b"\n" + line(2))
    assert found.stretches == [(0, before - 1, 1), (behind, behind + len(line(2)), 1)]
    assert found.others == [(before, behind - 1)]


def test_it_keeps_within_the_room():
    data = b"\n".join([line(1), b"{}", line(3)])
    ends = [len(line(1)) + 1, len(line(1)) + 4, len(data)]
    assert [scan(data, events=count).end for count in (1, 2, 3)] == ends
    assert [scan(data, room_bytes=end - 1).end for end in (*ends[:2], len(data) + 1)] == ends
    assert [scan(data, room_bytes=end - 2).end for end in ends] == [0, *ends[:2]]
    assert scan(data, start=ends[1]).stretches == [(ends[1], len(data), 1)]


def test_it_skips_a_known_event_id():
    window = NATIVE.DedupeWindow(100)
    length = len(line()) + 1
    data = b"\n".join([line(1), line(2), line(1), line(3)])
    found = scan(data, window=window)
    assert found.stretches == [(0, 2 * length - 1, 2), (3 * length, 4 * length - 1, 1)]
    assert found.others == [(2 * length, 3 * length - 1)]
    assert found.keys == b"".join(key_of(event_in(line(number)).EventId) for number in (1, 2, 3))
    again = scan(data, window=window)
    assert (again.stretches, len(again.others)) == ([], 4)


SOME_LINES = st.tuples(
    st.sampled_from(["good"] * 12 + ["normalised", "normalised", "longer", "invalid", "late", "blank", "hole", "cut"]),
    st.integers(1, 60),
)


def some_line(kind: str, number: int) -> bytes:
    match kind:
        case "normalised":
            return line(number, ConsumerID=str(number), ConsumerCountry="gb")
        case "longer":
            return line(number, IP="192.0.2.1").replace(b',"ConsumerState":""', b"").replace(b',"AffiliateID":""', b"")
        case "invalid":
            return line(number, IP="somewhere")
        case "late":
            return line(number, Timestamp="9026-11-20T12:00:00Z")
        case "blank":
            return b" " * (number % 3)
        case "hole":
            return b"\0\0" + line(number)
        case "cut":
            return line(number)[:-1]
    return line(number, ConsumerID=1 + number % 40)


class Settled(NamedTuple):
    """What was sent and counted; `accepted_repeats`: duplicates of records that were accepted before."""

    sent: list[bytes]
    rejections: list[tuple[int, str]]
    duplicates: int
    counts: Counter[LedgerKey]
    accepted_repeats: int


def settled(codec: Codec, data: bytes, **room: int) -> Settled:
    """Encode, let each piece be accepted when the next one but one is encoded, and check what each says of itself."""
    sent: list[bytes] = []
    rejections: list[tuple[int, str]] = []
    counts: Counter[LedgerKey] = Counter()
    accepted_repeats, waiting, open_pieces = 0, 0, []
    for piece in pieces_of(codec, chunk_of(data), **room):
        span = piece.span
        lines = piece.lines.split(b"\n") if piece.events else []
        assert len(lines) == piece.events <= room["room_events"]
        assert len(piece.lines) <= room["room_bytes"]
        assert list(piece.consumer_ids) == [event_in(each).ConsumerID for each in lines]
        keys = b"".join(key_of(event_in(each).EventId) for each in lines)
        assert span.event_keys == (keys if codec.window.is_on else b"")
        assert span.read == piece.events + len(span.rejections) + span.duplicates
        fresh = piece.events - piece.waits
        starts = []
        for ordinal, wire in enumerate(lines):
            begin, end = span.bounds_of(ordinal)
            starts.append(begin)
            (alone,) = encode(data[begin:end], codec=Codec(RecordsSettings(dedupe_window=0), max_record_bytes=LIMIT))
            assert alone.lines == wire
        assert starts == sorted(starts[:fresh]) + sorted(starts[fresh:])
        rejections += [(each.start_offset, each.rule) for each in span.rejections]
        accepted_repeats += span.duplicates
        open_pieces.append(piece)
        if len(open_pieces) > 2:
            oldest = open_pieces.pop(0)
            accept_events(codec.window, oldest.span, range(oldest.events - oldest.waits))
        sent += lines[:fresh]
        waiting += piece.waits  # duplicates if the first is accepted
        counts.update(tally(Columns.of(list(map(event_in, lines[:fresh])))))
        claimed: Counter[LedgerKey] = Counter()
        for part in span.ledger:
            claimed.update(dict(part.items()))
        assert claimed == tally(Columns.of(list(map(event_in, lines))))
    return Settled(sent, rejections, accepted_repeats + waiting, counts, accepted_repeats)


def test_native_and_python_agree_on_mixed_lines():
    repeats: list[int] = []

    @given(st.lists(SOME_LINES, max_size=80), st.integers(1, 60), st.integers(1000, 40_000), st.sampled_from([0, 1000]))
    def agree(kinds: list[tuple[str, int]], room_events: int, room_bytes: int, size: int) -> None:
        # Again after all pieces with it may be accepted.
        data = b"\n".join([some_line(kind, number) for kind, number in 2 * kinds])
        results = []
        for window in (DedupeWindow(size), NATIVE.DedupeWindow(size)):
            codec = Codec(RecordsSettings(dedupe_window=size), max_record_bytes=LIMIT, window=window)
            room = max(1, min(room_events, len(kinds) // 3))  # for several pieces, of which the first are accepted
            results.append(settled(codec, data, room_events=room, room_bytes=room_bytes + LIMIT))
        assert results[0][:4] == results[1][:4]
        repeats.append(results[0].accepted_repeats)

    agree()
    assert any(repeats), "no record repeats one that was accepted before"


def test_lines_that_are_not_ordinary_keep_their_order():
    lines = [line(number) for number in range(100)]
    others = [line(number, ConsumerCountry="gb") for number in range(200, 203)]
    start, middle = [*lines[:40], others[0], *lines[40:70]], [line(99), others[1], *lines[70:80], others[2]]
    mixed = [*start, b"no record", *middle, *lines[80:]]
    (piece,) = encode(b"\n".join(mixed), codec=Codec(RecordsSettings(), max_record_bytes=LIMIT))
    assert good_lines([piece]) == [raw.replace(b'"gb"', b'"GB"') for raw in (*start, *middle, *lines[80:])]
    assert (piece.waits, [each.rule for each in piece.span.rejections]) == (1, ["json"])


KEYS = st.tuples(
    st.sampled_from(["2026-10-01T22", "2026-10-02T00", "2026-11-01T05"]),
    st.sampled_from([1, 127, 128, 65_536, -1, 2**63 - 1]),
    st.sampled_from(["", "70012", "a" * 64, "Z.z_-9"]),
    st.sampled_from(["", "1", "99999999999999999999"]),
)
COUNTED = st.dictionaries(KEYS, st.integers(0, 70_000), max_size=6)


@given(st.lists(COUNTED, max_size=5), st.lists(COUNTED, max_size=3), st.data())
def test_native_and_python_add_up_the_same_counts(
    accepted: list[dict[LedgerKey, int]], repeated: list[dict[LedgerKey, int]], data: st.DataObject
):
    counted = Counter({key: count for counts in accepted for key, count in counts.items() if count})
    for key in data.draw(st.lists(st.sampled_from(sorted(counted)), max_size=4) if counted else st.just([])):
        if counted[key]:
            counted[key] -= 1
            accepted = [*accepted, {key: -1}]
    native = NATIVE.add_up(accepted, repeated)
    pure = _Sums(accepted, repeated, lambda name: name)
    assert (len(native), native.total()) == (len(pure), pure.total())
    assert not len(pure) or native.hours() == pure.hours()
    both = [sorted(zip(*msgspec.msgpack.decode(sums.columns()), strict=True)) for sums in (native, pure)]
    assert both[0] == both[1]
    again = NATIVE.add_up([native, *accepted], [])
    assert dict(again.items()) == sum_tallies([dict(native.items()), *accepted])


@each("affiliate_id", ["J. Doe", "é", "\ud800", "a" * 65, "hash:0123456789abcdef"])
def test_an_affiliate_that_is_no_identifier_is_left_to_python(affiliate_id: str):
    assert NATIVE.add_up([{("2026-10-01T22", 1, affiliate_id, "1"): 1}], []) is None


def test_it_adds_up_what_the_scanner_counted():
    data = b"\n".join(line(number) for number in range(1, 9))
    counted = scan(data).ledger
    assert dict(NATIVE.add_up([counted, counted], []).items()) == {key: 2 * count for key, count in counted.items()}


PLAIN = [b"{}", b'{"a":1}', b"{"]


@each("other", [None, b"", b"[]", b" {}", b"\0{}", BOM_UTF8 + b"{}", b"{\n}", b'{"long":1}'])
def test_it_joins_only_plain_lines_of_messages(monkeypatch: pytest.MonkeyPatch, other: bytes | None):
    longest = len(PLAIN[1])
    joined = NATIVE.join_lines(PLAIN, longest)
    assert NATIVE.join_lines([*PLAIN, other], longest) is None
    monkeypatch.setattr("shipper.kafka.stream.NATIVE", None)
    assert (*joined, {}) == _lines(PLAIN, longest)
