"""Bytes that attack cost in proportion to their number; what is counted is bytes looked at, not time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shipper.codec import rules
from tests.cases import each


@given(st.binary(max_size=60) | st.text(st.sampled_from('"\\a{['), max_size=60).map(str.encode))
def test_each_quote_is_tried_once_when_strings_are_left_out(record: bytes):
    assert b'"' not in rules._STRING.sub(b"", record), "a quote was tried in vain, up to the end of the record"


@each("piece", [b'\\"', b'"\\', b"\\", b'"', b'"a', b'{"', b'["\\"'])
def test_strings_without_an_end_hide_the_brackets_within_them_alone(piece: bytes):
    opened: Any = b"[" * (rules.NESTING_MAX + 1)
    assert rules.nests_deeply(opened + b'"' + piece * 500)
    assert not rules.nests_deeply(b'"' + opened)
