"""
Ships player-acquisition records to an affiliate platform's intake API, exactly accounted for.

Every complete input record is accepted by the service, stored in the dead letters with the reason, or pending after the
checkpoint. A crash may cause a delivery to be repeated with the same EventId; it never loses a record.

     sources ──Chunk──▶ codec ──EncodedChunk──▶ batching ──Batch──▶ delivery ──▶ settlement ──Checkpoint──▶ state.store
    (files, stdin)        └── rejected and duplicate records travel in their span ──┘            (one transaction)
        ▲                                                                                               │
        └──────────────── where to resume: read from the store at the next start only ──────────────────┘

Packages may import only from packages below them; those on one line do not import each other:

    cli, library                           the commands; `Shipper`; the only code that reads the wall clock
    pipeline, check                        starts and stops the stages; the network checks of `shipper check`
    status                                 a snapshot of the run: text, logs, metrics, probes and the status page
    report, kafka                          the daily report, compared with the state's ledger; a consumer group member
    sources, delivery, state, sandbox      the stages, and the service on loopback
    codec                                  validation rules, fast and slow path
    config                                 all settings, the layers they come from, and references to secrets
    system                                 the operating system: permissions, programs, addresses, sockets, watchdog
    model                                  the data types; they import nothing else
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shipper.model.version import __version__

if TYPE_CHECKING:
    from shipper.config.settings import load_settings
    from shipper.library import Shipper

__all__ = ["Shipper", "__version__", "load_settings"]


def __getattr__(name: str) -> object:
    """Import the public names lazily, so that the commands start faster."""
    if name == "Shipper":
        from shipper.library import Shipper

        return Shipper
    if name == "load_settings":
        from shipper.config.settings import load_settings

        return load_settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
