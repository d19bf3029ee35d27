"""
How a shipper stands: what it says of itself, and what its state says, as one document.

It is what `GET /status` answers and what `shipper status --json` prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct

from shipper.model.records import DeliveryClass
from shipper.state.accepted_ids import Window
from shipper.state.letters import EVERYTHING, DeadLetter, open_letters
from shipper.status.live import Live
from shipper.status.overview import Overview, SpoolState, StreamState, UnreachableInput, look_at

STREAMS_SHOWN: Final = 20

_LETTERS_SHOWN: Final = 10


class NewestLetter(Struct, frozen=True, kw_only=True):
    """
    A dead letter in brief.

    Attributes:
        offset: Where the record begins in its input, bytes.
        message: What is wrong, if that was found here; empty for the service's words, which may quote a record.
        last_at: When it was refused last, seconds since the epoch.
    """

    id: int
    rule: str
    path: str
    offset: int
    event_id: str
    status: int
    delivery: DeliveryClass
    last_at: float
    message: str


class StateNow(Struct, frozen=True, kw_only=True):
    """
    What the state says, in brief; counts are of all time.

    Attributes:
        streams: Those with most lag.
        stream_count, streams_behind: Of all, and of those that are not settled to their end.
        lag_bytes: Of all files.
        dead_letters: How many are kept, by rule.
        letters_without_record: How many of them tell but where their record stands in its input.
        unreachable: Inputs that were gone before they were read, the last ones noticed; `unreachable_bytes` is of all.
        dedupe_window: How far the EventIds reach back that later runs know.
    """

    read: int
    accepted: int
    dead_lettered: int
    duplicates: int
    streams: list[StreamState]
    stream_count: int
    streams_behind: int
    lag_bytes: int
    spool: SpoolState
    dead_letters: dict[str, int]
    dead_letter_bytes: int
    letters_without_record: int
    newest_dead_letters: list[NewestLetter]
    unreachable_bytes: int
    unreachable: list[UnreachableInput]
    dedupe_window: Window = Window()


class Standing(Struct, frozen=True):
    """
    How a shipper stands.

    Attributes:
        live: What it says of itself; None if it never did.
    """

    live: Live | None
    state: StateNow


def state_now(directory: Path, at: float) -> StateNow:
    """
    Tell what a state directory says; the caller need not hold the lock.

    Args:
        at: The time, seconds since the epoch.
    Raises:
        StateError: As for `Store`.
    """
    return in_brief(look_at(directory, at) or Overview(), newest_letters(directory))


def in_brief(overview: Overview, letters: list[NewestLetter], streams: int | None = STREAMS_SHOWN) -> StateNow:
    """
    Sum up what the state says.

    Args:
        letters: The newest ones.
        streams: How many to name; None = all.
    """
    return StateNow(
        read=overview.read,
        accepted=overview.accepted,
        dead_lettered=overview.dead_lettered,
        duplicates=overview.duplicates,
        streams=overview.streams[:streams],
        stream_count=len(overview.streams),
        streams_behind=len(overview.behind),
        lag_bytes=overview.lag_bytes,
        spool=overview.spool,
        dead_letters=overview.dead_letters,
        dead_letter_bytes=overview.dead_letter_bytes,
        letters_without_record=overview.letters_without_record,
        newest_dead_letters=letters,
        unreachable_bytes=overview.unreachable_bytes,
        unreachable=overview.unreachable[-STREAMS_SHOWN:],
        dedupe_window=overview.dedupe_window,
    )


def newest_letters(directory: Path) -> list[NewestLetter]:
    """Describe the newest dead letters, newest first; errors as for `open_letters`."""
    letters = open_letters(directory)
    if letters is None:
        return []
    try:
        return [_brief(each) for each in letters.newest(EVERYTHING, _LETTERS_SHOWN)]
    finally:
        letters.close()


def _brief(letter: DeadLetter) -> NewestLetter:
    return NewestLetter(
        id=letter.id,
        rule=letter.rule,
        path=letter.path,
        offset=letter.start_offset,
        event_id=letter.event_id,
        status=letter.status,
        delivery=letter.delivery,
        last_at=letter.last_at,
        message=letter.message if letter.delivery == "invalid" else "",
    )
