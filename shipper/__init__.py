"""
Ships player-acquisition records to an affiliate platform's intake API, exactly accounted for.

Every complete input record is accepted by the service, or in the dead letters with its reason, or pending behind the
checkpoint. A crash may repeat a delivery, with the same EventId; it never loses a record.

     sources ──Chunk──▶ codec ──EncodedChunk──▶ batching ──Batch──▶ delivery ──▶ state.acks ──Checkpoint──▶ state.store
    (files, stdin)        └── rejected and duplicate records travel in their span ──┘            (one transaction)
        ▲                                                                                               │
        └──────────────── where to resume: only at the next start, through the store ───────────────────┘

Where to look; imports go down this list only, and the packages of one line do not import each other:

    cli, library                                 the commands; `Shipper`, for applications; the only clocks of the wall
    admin       the status page, metrics and probes of a running shipper
    pipeline    wires the stages; stop and drain; the summary
    report      the daily report: fetched through delivery, compared with the ledger of the state
    sources, delivery, state, sandbox            the stages, and the service on loopback
    codec, batching                              rules, fast and slow path; when a batch closes
    config      every key; `settings_sources` reads them, `settings_schema` knows their types
    serving     a socket, and a server in a thread, for the sandbox and the admin address
    secrets, addresses                           references to secrets; addresses and names of hosts
    programs                                     what the programs that settings name are given, and how they are ended
    records, wire, errors                        the values that flow; the service's documents; what goes wrong
    printable                                    text from outside, as people may see it
    telemetry   open to all: logs, and the snapshot that a running shipper makes of itself every second
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shipper.config import load_settings
    from shipper.library import Shipper

__all__ = ["Shipper", "__version__", "load_settings"]

__version__: Final = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what applications use when it is asked for, so that the commands start without it."""
    if name == "Shipper":
        from shipper.library import Shipper

        return Shipper
    if name == "load_settings":
        from shipper.config import load_settings

        return load_settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
