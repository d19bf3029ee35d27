"""What sources save about streams besides checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from shipper.model.errors import StateError
from shipper.model.records import Stream
from shipper.sources.identity import StreamIndex

log = structlog.get_logger("sources")

_LOST_MAX: Final = 10_000
_FORGOTTEN_MIN: Final = 1_000


class StreamRegister(Protocol):
    """The part of the state store that sources use: the `StreamTable`, which describes the methods."""

    def started_patterns(self) -> dict[str, float]: ...
    def begin(self, streams: Iterable[tuple[Stream, bytes]], patterns: Iterable[str], now_s: float) -> None: ...
    def note(self, streams: Iterable[Stream], now_s: float) -> None: ...
    def note_unreachable(self, streams: Iterable[Stream], now_s: float) -> list[tuple[Stream, int]]: ...
    def forget(self, stream_ids: Iterable[int]) -> None: ...


def report_unreachable(register: StreamRegister, lost: Iterable[Stream], now_s: float) -> int:
    """Log each lost input with unread data once; return the number of newly reported bytes."""
    unread = [stream for stream in lost if stream.size > max(stream.checkpoint, stream.read_offset)]
    noted = register.note_unreachable(unread, now_s) if unread else []
    for stream, count in noted:
        log.error(
            "source_unreachable", path=stream.shown_path, stream=stream.stream_id, offset=stream.checkpoint, bytes=count
        )
    return sum(count for _, count in noted)


def save_changes(register: StreamRegister, index: StreamIndex, now_s: float) -> None:
    """Save the streams that have changed, apart from their checkpoints; after an error, the next call tries again."""
    changed = index.take_unsaved()
    try:
        if changed:
            register.note(changed, now_s)
    except StateError:
        for stream in changed:
            index.save_later(stream)
        raise


def forget(register: StreamRegister, index: StreamIndex, streams: Sequence[Stream]) -> None:
    """Forget streams for good."""
    register.forget([stream.stream_id for stream in streams])
    for stream in streams:
        index.drop(stream)


def forget_oldest_lost(register: StreamRegister, index: StreamIndex) -> None:
    """Forget the oldest of too many lost streams; the others are kept, as their files may be found again."""
    settled = [stream for stream in index.lost() if stream.is_settled]
    if len(settled) >= _LOST_MAX + _FORGOTTEN_MIN:
        oldest = settled[:-_LOST_MAX]
        forget(register, index, oldest)
        log.info("sources_forgotten", count=len(oldest))
