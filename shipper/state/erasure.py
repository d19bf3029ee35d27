"""Erasing one consumer's records from the spool, in place: the offsets of all others stay what they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shipper.errors import StateError
from shipper.state.letters import whole_number
from shipper.state.schema import consumer_id_of

_BLANK: Final = b" "


def spooled_records(spool: Path, consumer_id: str) -> int:
    """Count the records of a consumer in the spool; the caller holds the lock."""
    return sum(len(list(_lines_of(segment, consumer_id))) for segment in _segments(spool))


def erase_spooled(spool: Path, consumer_id: str) -> int:
    """
    Overwrite the records of a consumer with blanks, and force that to the disk.

    A blank line is no record, so what was not delivered yet will not be. The caller holds the lock.

    Returns:
        How many records.
    Raises:
        StateError: A segment cannot be written.
    """
    erased = 0
    for segment in _segments(spool):
        try:
            with segment.open("r+b") as file:
                for start, end in list(_lines_of(segment, consumer_id)):
                    file.seek(start)
                    file.write(_BLANK * (end - start))
                    erased += 1
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StateError(f"{segment} cannot be written ({error.strerror}); run the same command again") from error
    return erased


def _segments(spool: Path) -> list[Path]:
    return sorted(spool.glob("[0-9]*"))


def _lines_of(segment: Path, consumer_id: str) -> Iterator[tuple[int, int]]:
    """Find the consumer's lines; a line whose consumer cannot be read is one if it holds the number."""
    number = whole_number(consumer_id)
    offset = 0
    with segment.open("rb") as file:
        for line in file:
            if number.search(line) and consumer_id_of(line) in {consumer_id, ""}:
                yield offset, offset + len(line.rstrip(b"\r\n"))
            offset += len(line)
