"""Events as columns, and their counts for the ledger: work on one field of many events at once runs in C."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from shipper.model.records import LedgerKey

_event_id = attrgetter("EventId")
_timestamp = attrgetter("Timestamp")
_b_tag = attrgetter("BTag")
_consumer_id = attrgetter("ConsumerID")
_brand_id = attrgetter("BrandID")
_affiliate_id = attrgetter("AffiliateID")
_hour = itemgetter(slice(0, 13))
_media = itemgetter(slice(0, -33))  # what is in front of `_` and 32 digits
_is_hour: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d", re.ASCII).fullmatch
_BRAND_ID_MAX: Final = 2**63 - 1  # that the state can hold
_is_media: Final = re.compile(r"\d{0,20}", re.ASCII).fullmatch


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


def tally(columns: Columns) -> dict[LedgerKey, int]:
    """Count events; what a relaxed rule let pass without an hour or a brand is not counted, without digits as none."""
    found = Counter(
        zip(
            map(_hour, columns.timestamps),
            map(_brand_id, columns.events),
            map(_affiliate_id, columns.events),
            map(_media, columns.b_tags),
            strict=True,
        )
    )
    if (
        all(map(_is_hour, {key[0] for key in found}))
        and all(map(_is_media, {key[3] for key in found}))
        and all(map(_is_brand_id, {key[1] for key in found}))
    ):
        return found
    put_right: Counter[LedgerKey] = Counter()
    for (hour, brand_id, affiliate_id, media), count in found.items():
        if _is_hour(hour) and _is_brand_id(brand_id):
            put_right[hour, brand_id, affiliate_id, media if _is_media(media) else ""] += count
    return put_right


def _is_brand_id(number: int) -> bool:
    return abs(number) <= _BRAND_ID_MAX
