"""Validates records and converts them to events: the rules, a fast path for whole chunks, a slow path by line."""

from __future__ import annotations

from shipper.codec.codec import Codec, first_record
from shipper.codec.dedupe import DedupeWindow, accept_events, key_of, new_window, split_keys
from shipper.codec.judge import is_future_timestamp
from shipper.codec.rules import FIELD_RULES, MESSAGES, Columns, latest_timestamp, tally

__all__ = [
    "FIELD_RULES",
    "MESSAGES",
    "Codec",
    "Columns",
    "DedupeWindow",
    "accept_events",
    "first_record",
    "is_future_timestamp",
    "key_of",
    "latest_timestamp",
    "new_window",
    "split_keys",
    "tally",
]
