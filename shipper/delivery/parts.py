"""Splits and merges batches; the bytes of an event never change. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from shipper.model.records import Batch, Span
from shipper.model.wire import BODY_HEAD, BODY_TAIL


class SentEvent(Struct):
    """The fields of an event that identify it or by which it is counted."""

    EventId: str
    ConsumerID: int
    Timestamp: str = ""
    BTag: str = ""
    BrandID: int = 0
    AffiliateID: str = ""


class _Sent(Struct):
    events: list[SentEvent]


class _Raws(Struct):
    events: list[Raw]


_EVENT: Final = msgspec.json.Decoder(SentEvent)
_SENT: Final = msgspec.json.Decoder(_Sent)
_RAWS: Final = msgspec.json.Decoder(_Raws)


def sent_events(batch: Batch) -> list[SentEvent]:
    return _SENT.decode(batch.body).events


def event_ids(batch: Batch) -> list[str]:
    return [event.EventId for event in sent_events(batch)]


def sent_event(batch: Batch) -> SentEvent:
    """Decode the only event of a batch."""
    (event,) = sent_events(batch)
    return event


def event_in(line: bytes) -> SentEvent:
    """Decode an event in wire form."""
    return _EVENT.decode(line)


def halves(batch: Batch) -> list[Batch]:
    """Split a batch of at least two events in the middle."""
    assert batch.events > 1
    middle = batch.events // 2
    return parts(batch, [range(middle), range(middle, batch.events)])


def parts(batch: Batch, indexes: Sequence[Sequence[int]]) -> list[Batch]:
    """Make a batch of each non-empty group of events, given as indexes in ascending order."""
    raws = _RAWS.decode(batch.body).events
    places = _places(batch)
    assert len(raws) == batch.events
    return [_batch(batch, group, raws, places) for group in indexes if group]


def _places(batch: Batch) -> list[tuple[Span, int]]:
    return [(span, ordinal) for span, ordinals in batch.parts for ordinal in ordinals]


def without_released(batch: Batch) -> Batch | None:
    """Return a batch without the events of streams that went to another process; None if no event is left."""
    if not any(span.stream.is_released for span, _ in batch.parts):
        return batch
    kept = [index for index, (span, _) in enumerate(_places(batch)) if not span.stream.is_released]
    return next(iter(parts(batch, [kept])), None)


def merge_batches(batches: Sequence[Batch]) -> Batch:
    return replace(
        batches[0],
        body=BODY_HEAD + b",".join(batch.body[len(BODY_HEAD) : -len(BODY_TAIL)] for batch in batches) + BODY_TAIL,
        events=sum(batch.events for batch in batches),
        parts=[part for batch in batches for part in batch.parts],
    )


def _batch(batch: Batch, indexes: Sequence[int], raws: list[Raw], places: list[tuple[Span, int]]) -> Batch:
    # Spans are compared by identity, because they define no equality.
    runs = groupby((places[index] for index in indexes), key=itemgetter(0)) if places else ()
    return replace(
        batch,
        body=BODY_HEAD + b",".join(bytes(raws[index]) for index in indexes) + BODY_TAIL,
        events=len(indexes),
        parts=[(span, [ordinal for _, ordinal in run]) for span, run in runs],
    )


class OutgoingBatch(Struct, eq=False):
    """A batch being delivered, or the unsettled part of one."""

    batch: Batch
    attempts: int = 0  # number of times its events were sent
    is_ambiguous: bool = False  # the service may have accepted it in an attempt without a clear answer
    accepted_before: int = 0  # batches accepted before it was first sent, or split; of a single event, before it failed
    failures: int = 0  # since it was split
    sibling: OutgoingBatch | None = None  # the other half of a refused batch; suspect if this one is accepted
    is_suspect: bool = False  # known to contain a bad record; split it before sending
    is_refused: bool = False  # a single record, which has become a dead letter
    is_uncompressed: bool = False  # sent uncompressed, because the service may have refused the compression

    def split(self, batches: Sequence[Batch]) -> list[OutgoingBatch]:
        return [OutgoingBatch(batch, self.attempts, self.is_ambiguous, self.accepted_before) for batch in batches]

    def halve(self, *, is_refused: bool) -> list[OutgoingBatch]:
        """Split in the middle; `is_refused` = one of the halves contains a bad record."""
        first, second = self.split(halves(self.batch))
        first.sibling = second if is_refused else None
        return [first, second]


def merge_outgoing(unsettled: Sequence[OutgoingBatch]) -> OutgoingBatch:
    """Merge the unsettled parts of one batch."""
    return OutgoingBatch(
        merge_batches([outgoing.batch for outgoing in unsettled]),
        max(outgoing.attempts for outgoing in unsettled),
        any(outgoing.is_ambiguous for outgoing in unsettled),
        max(outgoing.accepted_before for outgoing in unsettled),
    )
