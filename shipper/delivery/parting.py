"""Takes batches apart: an event of a body is found as exactly the bytes that were sent. Pure."""

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
    """What an event is known and counted by."""

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
    """Part a batch of at least two events in the middle."""
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
