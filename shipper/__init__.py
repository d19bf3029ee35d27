"""
Ships player-acquisition records to an affiliate platform's intake API, exactly accounted for.

Every complete input record is accepted by the service, or in the dead letters with its reason, or pending behind the
checkpoint. A crash may repeat a delivery, with the same EventId; it never loses a record.

     sources ──Chunk──▶ codec ──EncodedChunk──▶ batching ──Batch──▶ delivery ──▶ settlement ──Checkpoint──▶ state.store
    (files, stdin)        └── rejected and duplicate records travel in their span ──┘            (one transaction)
        ▲                                                                                               │
        └──────────────── where to resume: only at the next start, through the store ───────────────────┘

Where to look; imports go down this list only, and the packages of one line do not import each other:

    cli, library                           the commands; `Shipper`; the only code that reads the wall clock
    pipeline, check                        the stages, wired and stopped; the network checks of `shipper check`
    status                                 a snapshot of the run; its wording, logs, metrics, probes and page
    kafka                                  a member of a consumer group: its source, and its store in the brokers
    report                                 the daily report, fetched through delivery, compared with the state's ledger
    sources, delivery, state, sandbox      the stages, and the service on loopback
    codec                                  rules, fast and slow path
    config                                 every key, where it may be written, and references to secrets
    system                                 the machine: permissions, programs, addresses and sockets, threads at work
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
    """Import what applications use when it is asked for, so that the commands start without it."""
    if name == "Shipper":
        from shipper.library import Shipper

        return Shipper
    if name == "load_settings":
        from shipper.config.settings import load_settings

        return load_settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
