"""What a sender has in hand: a batch, or a part of one that had to be taken apart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shipper.delivery.parting import halves, merged
from shipper.model.records import Batch


class Parcel(Struct, eq=False):
    """
    A batch, or what is left of it, on its way.

    Attributes:
        attempts: How often its events were sent.
        is_ambiguous: An attempt had no answer that tells whether it was taken.
        sibling: The other part of a batch that was refused: if this one is accepted, the guilty record is in there.
        is_suspect: It is, so that it need not be sent as a whole.
        is_refused: It was one record, which is a dead letter now.
        is_plain: It is not compressed, as its compression may be what the service refuses.
    """

    batch: Batch
    attempts: int = 0
    is_ambiguous: bool = False
    sibling: Parcel | None = None
    is_suspect: bool = False
    is_refused: bool = False
    is_plain: bool = False

    def parted(self, batches: Sequence[Batch]) -> list[Parcel]:
        """Make parcels of its parts."""
        return [Parcel(batch, self.attempts, self.is_ambiguous) for batch in batches]

    def halved(self, *, is_refused: bool) -> list[Parcel]:
        """Make two parcels of it; `is_refused`: one of them must hold a record that is refused."""
        first, second = self.parted(halves(self.batch))
        first.sibling = second if is_refused else None
        return [first, second]


def merged_parcel(parcels: Sequence[Parcel]) -> Parcel:
    """Make one parcel of what is left of a batch."""
    return Parcel(
        merged([parcel.batch for parcel in parcels]),
        max(parcel.attempts for parcel in parcels),
        any(parcel.is_ambiguous for parcel in parcels),
    )
