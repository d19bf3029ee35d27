"""Valid and invalid options of the sandbox."""

from __future__ import annotations

import pytest

from shipper.model.errors import ConfigError
from shipper.sandbox.options import IN_MEMORY, SandboxOptions
from tests.cases import each

PRINTABLE = "must be non-empty printable ASCII without surrounding spaces"
FINITE = "must be a finite number"


@each(
    ("wrong", "key", "message"),
    [
        ({"subscription_key": ""}, "subscription_key", PRINTABLE),
        ({"subscription_key": "ключ"}, "subscription_key", PRINTABLE),
        ({"subscription_key": "a\nb"}, "subscription_key", PRINTABLE),
        ({"subscription_key": "a\x7f"}, "subscription_key", PRINTABLE),
        ({"subscription_key": " a"}, "subscription_key", PRINTABLE),
        ({"secondary_key": ""}, "secondary_key", PRINTABLE),
        ({"secondary_key": "a "}, "secondary_key", PRINTABLE),
        ({"subscription_key": "same", "secondary_key": "same"}, "secondary_key", "must differ from subscription_key"),
        ({"blackhole": True, "store_path": "events.db"}, "blackhole", "stores nothing"),
        *[
            ({name: value}, name, FINITE)
            for name in ("latency_seconds", "jitter_seconds", "token_skew_seconds", "clock_offset_seconds")
            for value in (float("nan"), float("inf"), float("-inf"))
        ],
    ],
)
def test_invalid_options_are_refused_by_name(wrong, key, message):
    with pytest.raises(ConfigError) as caught:
        SandboxOptions(**wrong)
    assert (caught.value.key, caught.value.source) == (key, "sandbox")
    assert message in str(caught.value)


@each(
    "right",
    [
        {},
        {"subscription_key": "a b"},
        {"subscription_key": "~!\"'\\"},
        {"blackhole": True},
        {"blackhole": True, "store_path": IN_MEMORY},
        {"token_skew_seconds": -1e9, "clock_offset_seconds": -1e9},
    ],
)
def test_options_at_their_bounds_are_accepted(right):
    options = SandboxOptions(**right)
    assert {name: getattr(options, name) for name in right} == right
