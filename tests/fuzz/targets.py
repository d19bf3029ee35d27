"""All targets, by name."""

from __future__ import annotations

from typing import Final

from tests.fuzz import (
    answers,
    archives,
    conversations,
    framings,
    records,
    reports,
    requests,
    scanner,
    settings,
    slow,
    state,
)
from tests.fuzz.engine import Target

_MODULES: Final = (
    answers,
    records,
    scanner,
    framings,
    archives,
    settings,
    reports,
    state,
    requests,
    conversations,
    slow,
)
TARGETS: Final[dict[str, Target]] = {target.name: target for module in _MODULES for target in module.TARGETS}
