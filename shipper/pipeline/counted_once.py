"""Count an EventId once if two workers delivered it at the same time."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from shipper.codec import Codec, Columns, key_of, new_window, split_keys, tally
from shipper.codec.rules import ANY_TIME
from shipper.config.settings import Settings
from shipper.delivery.parts import event_in
from shipper.model.records import Checkpoint, Chunk, LedgerKey


class CountedOnce:
    """
    Knows the EventIds that any worker of a run got accepted.

    Each worker knows those of earlier runs and its own, so an EventId that it reports repeats only if another worker
    delivered it at the same time.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._window = new_window(settings.records.dedupe_window)

    def part(self, chunk: Chunk, part: Checkpoint) -> Checkpoint:
        """Return what a worker reports of the beginning of what is left of a chunk; what repeats is a duplicate."""
        known = set(self._window.accept_all(part.keys)) if self._window.is_on else set()
        if not known:
            return part
        keys = self._ledger_keys(chunk, part, known)
        return replace(
            part,
            accepted=part.accepted - len(known),
            duplicates=part.duplicates + len(known),
            ledger=Counter(part.ledger) - keys,
            repeated=Counter(part.repeated) + keys,
            keys=b"".join(key for key in split_keys(part.keys) if key not in known),
        )

    def _ledger_keys(self, chunk: Chunk, part: Checkpoint, wanted: set[bytes]) -> Counter[LedgerKey]:
        """Look the records up as they came, and return what the ledger counts them by."""
        codec = Codec(
            replace(self._settings.records, dedupe_window=0), max_record_bytes=self._settings.input.max_record_bytes
        )
        found: Counter[LedgerKey] = Counter()
        missing = set(wanted)
        for piece in codec.encode_all(
            chunk, room_bytes=self._settings.batch.max_bytes, latest=ANY_TIME, start_offset=part.start_offset
        ):
            for event_id, line in zip(piece.event_ids, piece.lines.split(b"\n"), strict=bool(piece.events)):
                if (key := key_of(event_id)) in missing:
                    missing.remove(key)
                    found.update(tally(Columns.of([event_in(line)])))
            if not missing or piece.span.end_offset >= part.end_offset:
                break
        return found
