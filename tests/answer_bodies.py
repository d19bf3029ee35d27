"""The bodies in `answer_bodies.toml` of successful answers, and what each body means."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

EVENTS: Final = 3
IDS: Final = tuple(f"0f8fad5b-d9cb-469f-a165-70867728950{digit}" for digit in range(EVENTS))

_MEANING: Final = re.compile(
    r"(?:(?P<status>\d{3}): )?(?:(?P<whole>accepted|apart|later|paused)"
    r"|(?:refused (?P<refused>\d(?: \d)*))?(?:, )?(?:again (?P<again>\d(?: \d)*))?)"
)
_PLACE: Final = re.compile(r"@(\d)")


class Sample(NamedTuple):
    """
    A body and what it means for each event.

    Attributes:
        whole: Outcome of the batch: `accepted`, `apart`, `later`, `paused`, or `parts` for the two below.
        refused, again: Events that become dead letters, and events that are sent again; the others are accepted.
    """

    shape: str
    status: int
    text: str
    whole: str
    refused: frozenset[int]
    again: frozenset[int]

    @property
    def body(self) -> bytes:
        return self.with_ids(IDS)

    def with_ids(self, ids: tuple[str, ...]) -> bytes:
        """Return the body with the EventIds of a batch."""
        return _PLACE.sub(lambda found: ids[int(found[1])], self.text).encode()


def _samples() -> list[Sample]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["shape"]
    return [
        _sample(table["is"], meaning, text)
        for table in tables
        for meaning, texts in table.items()
        if meaning != "is"
        for text in texts
    ]


def _sample(shape: str, meaning: str, text: str) -> Sample:
    found = _MEANING.fullmatch(meaning)
    assert found, meaning
    refused, again = (frozenset(map(int, (found[name] or "").split())) for name in ("refused", "again"))
    return Sample(shape, int(found["status"] or 200), text, found["whole"] or "parts", refused, again)


SAMPLES: Final = _samples()
