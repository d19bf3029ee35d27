"""What sources save about inputs besides checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from shipper.model.errors import StateError
from shipper.model.records import Stream
from shipper.sources.identity import StreamBook

log = structlog.get_logger("sources")

_GONE_KEPT: Final = 10_000
_FORGOTTEN_TOGETHER: Final = 1_000


class StreamRegister(Protocol):
    """The part of the state store that is about streams."""

    def started_patterns(self) -> dict[str, float]:
        """Return which patterns were used before, and when each was first, seconds since the epoch."""

    def begin(self, streams: Iterable[tuple[Stream, bytes]], patterns: Iterable[str], now_s: float) -> None:
        """Save streams that do not begin at their beginning, with the last bytes before, and patterns as used."""

    def note(self, streams: Iterable[Stream], now_s: float) -> None:
        """Save where streams are and how much they hold, but not how far they are settled."""

    def note_unreachable(self, streams: Iterable[Stream], now_s: float) -> list[tuple[Stream, int]]:
        """Save which inputs are gone with something unread; gives back the new ones with the bytes of each."""

    def forget(self, stream_ids: Iterable[int]) -> None:
        """Drop streams for good."""


def tell_unreachable(register: StreamRegister, lost: Iterable[Stream], now_s: float) -> int:
    """Report once what is known to have been in inputs that cannot be found any more, and tell how many bytes."""
    unread = [stream for stream in lost if stream.size > max(stream.checkpoint, stream.read_offset)]
    noted = register.note_unreachable(unread, now_s) if unread else []
    for stream, count in noted:
        log.error(
            "source_unreachable", path=stream.shown_path, stream=stream.stream_id, offset=stream.checkpoint, bytes=count
        )
    return sum(count for _, count in noted)


def note_gone(register: StreamRegister, lost: Iterable[Stream], now_s: float) -> None:
    """Save which inputs were looked for and are nowhere: as nothing more can come of them, nobody waits for them."""
    gone = [stream for stream in lost if not stream.is_gone]
    for stream in gone:
        stream.is_gone = True
    try:
        if gone:
            register.note(gone, now_s)
    except StateError:  # the disk is full: it is told at the next look
        for stream in gone:
            stream.is_gone = False
        raise


def forget_oldest(register: StreamRegister, book: StreamBook, lost: Sequence[Stream]) -> None:
    """Keep so many streams of files that are gone, as one may be found again; forget the oldest beyond that."""
    settled = [stream for stream in lost if stream.is_settled]
    if len(settled) >= _GONE_KEPT + _FORGOTTEN_TOGETHER:
        forgotten = settled[:-_GONE_KEPT]
        register.forget([stream.stream_id for stream in forgotten])
        book.forget(forgotten)
        log.info("sources_forgotten", count=len(forgotten))
