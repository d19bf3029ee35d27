"""Splits batches and merges what is left of them; the bytes of an event never change. No I/O."""

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
    """The fields by which an event is identified and counted."""

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
    """Read the events, in the order of the body."""
    return _SENT.decode(batch.body).events


def event_ids(batch: Batch) -> list[str]:
    """Read the EventIds, in the order of the body."""
    return [event.EventId for event in sent_events(batch)]


def sent_event(batch: Batch) -> SentEvent:
    """Read the one event of a batch."""
    (event,) = sent_events(batch)
    return event


def event_in(line: bytes) -> SentEvent:
    """Read an event as it is to be sent."""
    return _EVENT.decode(line)


def halves(batch: Batch) -> list[Batch]:
    """Split a batch of at least two events in the middle."""
    assert batch.events > 1
    middle = batch.events // 2
    return parts(batch, [range(middle), range(middle, batch.events)])


def parts(batch: Batch, indexes: Sequence[Sequence[int]]) -> list[Batch]:
    """
    Make a batch of each group of events.

    Args:
        indexes: Which events, in ascending order; a group without any makes no batch.
    """
    raws = _RAWS.decode(batch.body).events
    places = [(span, ordinal) for span, ordinals in batch.parts for ordinal in ordinals]
    assert len(raws) == batch.events
    return [_batch(batch, group, raws, places) for group in indexes if group]


def merged(batches: Sequence[Batch]) -> Batch:
    """Put parts of one batch together again."""
    return replace(
        batches[0],
        body=BODY_HEAD + b",".join(batch.body[len(BODY_HEAD) : -len(BODY_TAIL)] for batch in batches) + BODY_TAIL,
        events=sum(batch.events for batch in batches),
        parts=[part for batch in batches for part in batch.parts],
    )


def _batch(batch: Batch, indexes: Sequence[int], raws: list[Raw], places: list[tuple[Span, int]]) -> Batch:
    # `groupby` compares by identity: a span has no equality of its own.
    runs = groupby((places[index] for index in indexes), key=itemgetter(0)) if places else ()
    return replace(
        batch,
        body=BODY_HEAD + b",".join(bytes(raws[index]) for index in indexes) + BODY_TAIL,
        events=len(indexes),
        parts=[(span, [ordinal for _, ordinal in run]) for span, run in runs],
    )


class Parcel(Struct, eq=False):
    """
    A batch, or what is left of it, on its way.

    Attributes:
        attempts: How often its events were sent.
        is_ambiguous: An attempt had no answer that tells whether it was taken.
        sibling: The other part of a batch that was refused: if this one is accepted, the guilty record is in there.
        is_suspect: Known to hold the record that is refused; split it before sending.
        is_refused: It was one record, which is a dead letter now.
        is_plain: It is not compressed, as its compression may be what the service refuses.
    """

    batch: Batch
    attempts: int = 0
    is_ambiguous: bool = False
    sibling: Parcel | None = None
    is_suspect: bool = False
    is_refused: bool = False
    is_plain: bool = False

    def parted(self, batches: Sequence[Batch]) -> list[Parcel]:
        """Make parcels of its parts."""
        return [Parcel(batch, self.attempts, self.is_ambiguous) for batch in batches]

    def halved(self, *, is_refused: bool) -> list[Parcel]:
        """Make two parcels of it; `is_refused`: one of them must hold a record that is refused."""
        first, second = self.parted(halves(self.batch))
        first.sibling = second if is_refused else None
        return [first, second]


def merged_parcel(parcels: Sequence[Parcel]) -> Parcel:
    """Make one parcel of what is left of a batch."""
    return Parcel(
        merged([parcel.batch for parcel in parcels]),
        max(parcel.attempts for parcel in parcels),
        any(parcel.is_ambiguous for parcel in parcels),
    )
