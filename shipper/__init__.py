"""
Ships player-acquisition records to an affiliate platform's intake API, exactly accounted for.

Every complete input record is accepted by the service, or in the dead letters with its reason, or pending behind the
checkpoint. A crash may repeat a delivery, with the same EventId; it never loses a record.

     sources ──Chunk──▶ codec ──EncodedChunk──▶ batching ──Batch──▶ delivery ──▶ state.acks ──Checkpoint──▶ state.store
    (files, stdin)        └── rejected and duplicate records travel in their span ──┘            (one transaction)
        ▲                                                                                               │
        └──────────────── where to resume: only at the next start, through the store ───────────────────┘

Where to look; imports go down this list only, and the packages of one line do not import each other:

    cli         the commands; the only place that prints, exits and reads the clock of the wall
    pipeline    wires the stages; stop and drain; the summary
    report      the daily report: fetched through delivery, compared with the ledger of the state
    sources, delivery, state, sandbox            the stages, and the service on loopback
    codec, batching                              rules, fast and slow path; when a batch closes
    config      every key; `settings_sources` reads them, `settings_schema` knows their types, `secrets`, `addresses`
    records, wire, errors                        the values that flow; the service's documents; what goes wrong
    telemetry   open to all
"""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
