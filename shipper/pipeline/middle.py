"""The stages between the source and the settlement, seen from the pipeline."""

from __future__ import annotations

from typing import Protocol

from anyio.streams.memory import MemoryObjectReceiveStream

from shipper.model.records import Chunk
from shipper.status.live import Live


class Middle(Protocol):
    """
    Attributes:
        waits_for_input_since: Nothing has come since then, on the event loop's clock; None while something is at work.
        pending: Records that were read, are not settled, and stand in no span of this process.
        is_stuck: Delivery pauses, and no request is in flight whose answer could be waited for.
    """

    @property
    def waits_for_input_since(self) -> float | None: ...

    @property
    def pending(self) -> int: ...

    @property
    def is_stuck(self) -> bool: ...

    def open(self) -> None:
        """
        Make ready.

        Raises:
            ConfigError: A secret, certificate or key cannot be used.
        """

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> None:
        """
        Settle chunks until there are no more.

        Raises:
            DeliveryGaveUpError: The service accepted nothing for too long.
        """

    def hurry(self) -> None:
        """A stop was asked for: wait for nothing that can be done without."""

    def seen(self, live: Live) -> Live:
        """Add what there is to see of this stage to a snapshot; its pauses come first."""
