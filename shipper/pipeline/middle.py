"""What stands between the source and the settlement, seen from the pipeline."""

from __future__ import annotations

from typing import Protocol

from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec import Struct

from shipper.records import Chunk
from shipper.telemetry.live import Pause


class Figures(Struct, kw_only=True):
    """What it says of itself, as in a `Live` snapshot."""

    batches: int = 0
    requests: dict[str, int] = {}
    retries: dict[str, int] = {}
    latency_p50_seconds: float | None = None
    latency_p95_seconds: float | None = None
    latency_counts: list[int] = []
    latency_total_seconds: float = 0.0
    in_flight: int = 0
    concurrency_limit: int = 0
    token_expires_at: float | None = None
    certificate_expires_at: float | None = None
    pauses: list[Pause] = []


class Middle(Protocol):
    """
    Attributes:
        waits_for_input_since: Nothing has come since then, on the event loop's clock; None while something is at work.
        pending: Records that were read, are not settled, and stand in no span of this process.
    """

    @property
    def waits_for_input_since(self) -> float | None: ...

    @property
    def pending(self) -> int: ...

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

    def figures(self, wall_now: float) -> Figures:
        """Say how it stands."""
