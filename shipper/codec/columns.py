"""Events as columns: what is done to many of them at once, and in C, is done to one field of all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

_event_id = attrgetter("EventId")
_timestamp = attrgetter("Timestamp")
_b_tag = attrgetter("BTag")
_consumer_id = attrgetter("ConsumerID")


class Columns(NamedTuple):
    """Decoded events, and those of their fields that more than one stage looks at; one item for each in every list."""

    events: Sequence[Any]
    event_ids: list[str]
    timestamps: list[str]
    b_tags: list[str]
    consumer_ids: list[int]

    @classmethod
    def of(cls, events: Sequence[Any]) -> Columns:
        """
        Take decoded events apart.

        Raises:
            AttributeError: One of them is no event.
        """
        return cls(
            events,
            list(map(_event_id, events)),
            list(map(_timestamp, events)),
            list(map(_b_tag, events)),
            list(map(_consumer_id, events)),
        )
