"""From raw lines to validated events: rules, the fast path over whole chunks, the slow path line by line."""

from __future__ import annotations

from shipper.codec.codec import Codec, first_record
from shipper.codec.columns import Columns, tally
from shipper.codec.dedupe import DedupeWindow, accept_events, key_of, new_window, refuse_event, split_keys
from shipper.codec.judge import is_from_the_future
from shipper.codec.rules import FIELD_RULES, MESSAGES, latest_timestamp

__all__ = [
    "FIELD_RULES",
    "MESSAGES",
    "Codec",
    "Columns",
    "DedupeWindow",
    "accept_events",
    "first_record",
    "is_from_the_future",
    "key_of",
    "latest_timestamp",
    "new_window",
    "refuse_event",
    "split_keys",
    "tally",
]
