"""
Detect an input that is refused almost entirely for one reason, before it fills the dead letters. No I/O.

There are two such reasons. An input may contain something else than records: another program's log, wrong column
names. Or this machine's clock is behind, so that good records seem to come from the future; `hold` asks the service for
the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from operator import attrgetter
from typing import Final, NamedTuple

from shipper.codec import is_from_the_future
from shipper.model.records import EncodedChunk, Stream

_FUTURE_MIN: Final = 20  # records from the future that are too many for an accident
_FUTURE_SHARE: Final = 9  # so many of them for one that is not
_STREAMS_MAX: Final = 1_000
_NO_LIMIT: Final = 1 << 62


class Mistakes(NamedTuple):
    """
    Refusals by one rule with no good record between them.

    Attributes:
        is_of_one: They are of one input.
    """

    rule: str
    records: int
    is_of_one: bool


class Brake:
    """
    Counts the refusals of the codec that have no good record between them.

    They count for each input by itself, so that a busy one beside it hides nothing, and for all of them together, so
    that many small ones are noticed, too. What is replayed is no input: it makes no more dead letters.

    Args:
        limit: Refusals by one rule that are believed; 0 = all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: Counter[str] = Counter()
        self._by_stream: dict[int, Counter[str]] = {}
        self._future = self._present = 0

    def __repr__(self) -> str:
        return f"<Brake {dict(self._all)} of {self._limit}>"

    @property
    def is_watching(self) -> bool:
        """Whether a good record would change anything."""
        return bool(self._all or self._by_stream or self._future)

    def room(self, stream: Stream) -> int:
        """Return how many records may be looked at together, so that no more than the limit become dead letters."""
        if not self._limit or stream.kind == "replay":
            return _NO_LIMIT
        if not (self._all or self._by_stream or stream.mistakes):
            return self._limit
        most = max(max(counts.values(), default=0) for counts in (self._all, self._of(stream)))
        return max(1, self._limit - most)

    def mistakes(self, piece: EncodedChunk) -> Mistakes | None:
        """Return the refusals before a piece that would be one too many by the same rule; None if it may be settled."""
        stream, rejections = piece.span.stream, piece.span.rejections
        if not self._limit or stream.kind == "replay" or not rejections or piece.last_good >= 0:
            return None
        rule = rejections[0].rule
        own, together = self._of(stream)[rule], self._all[rule]
        if max(own, together) < self._limit:
            return None
        return Mistakes(rule, max(own, together), is_of_one=own >= self._limit)

    def seems_late(self, piece: EncodedChunk) -> int:
        """Return how many records seem to come from the future, if that is nearly all of many; else 0."""
        if piece.span.stream.kind == "replay":
            return 0
        future, present = self._times_with(piece)
        return future if future >= max(_FUTURE_MIN, _FUTURE_SHARE * present) else 0

    def note(self, piece: EncodedChunk) -> None:
        """Count a piece that is to be settled."""
        stream, rejections = piece.span.stream, piece.span.rejections
        if stream.kind == "replay":
            return
        self._future, self._present = self._times_with(piece)
        own = self._of(stream)
        if piece.last_good >= 0:
            self._all.clear()
            own.clear()
            rejections = rejections[bisect_right(rejections, piece.last_good, key=attrgetter("start_offset")) :]
        rules = [rejection.rule for rejection in rejections]
        self._all.update(rules)
        own.update(rules)
        self._keep(stream, own)

    def trust_the_clock(self) -> None:
        """Forget what seemed to come from the future, as it does."""
        self._future = self._present = 0

    def _times_with(self, piece: EncodedChunk) -> tuple[int, int]:
        """Count records from the future and others, as far as they are worth counting."""
        future = sum(map(is_from_the_future, piece.span.rejections))
        present = piece.span.records - len(piece.span.rejections)
        return (0, 0) if present > future else (self._future + future, self._present + present)

    def _of(self, stream: Stream) -> Counter[str]:
        found = self._by_stream.get(stream.stream_id)
        return Counter(stream.mistakes) if found is None else found

    def _keep(self, stream: Stream, counts: Counter[str]) -> None:
        self._by_stream.pop(stream.stream_id, None)
        if counts or stream.mistakes:
            self._by_stream[stream.stream_id] = counts
        if len(self._by_stream) > _STREAMS_MAX:
            del self._by_stream[next(iter(self._by_stream))]  # the one that was noted longest ago
