"""A snapshot as JSON: what `GET /status` answers, and what `shipper status --format json` prints."""

from __future__ import annotations

import shlex
from typing import Any, Final

from msgspec import to_builtins
from msgspec.structs import replace

from shipper.status.headline import headline_of, notices
from shipper.status.live import Live
from shipper.status.overview import Overview
from shipper.status.snapshot import Snapshot

STREAMS_SHOWN: Final = 20
_USUAL_DIRECTORY: Final = "/var/lib/shipper"


def document(seen: Snapshot, streams: int | None = STREAMS_SHOWN) -> dict[str, Any]:
    """
    Write a snapshot as what will be JSON.

    Args:
        streams: How many inputs to name; None = all.
    """
    return {
        "headline": to_builtins(headline_of(seen)),
        "summary": {
            "notices": notices(seen.live),
            "seconds_to_go": seen.seconds_to_go,
            "dead_letters_kept": seen.kept,
            "unreachable_bytes": seen.unreachable_bytes,
            "expiring": seen.expiring,
            "options": _options(seen.live),
        },
        "process_id": seen.process_id,
        "troubles": seen.troubles,
        "live": to_builtins(seen.live),
        "state": state_document(seen.state or Overview(), streams),
        "report": to_builtins(seen.report),
    }


def state_document(state: Overview, streams: int | None = STREAMS_SHOWN) -> dict[str, Any]:
    """Write what the state says; inputs, and those that were gone before they were read, are listed up to a limit."""
    shown = replace(state, streams=state.streams[:streams], unreachable=state.unreachable[-STREAMS_SHOWN:])
    numbers = {"stream_count": len(state.streams), "streams_behind": len(state.behind), "lag_bytes": state.lag_bytes}
    return {**to_builtins(shown), **numbers}


def _options(live: Live | None) -> str:
    """Return the options with which a command finds the same state, for a shell; empty for the usual place."""
    directory = live.state_directory if live else ""
    return "" if directory in {"", _USUAL_DIRECTORY} else shlex.join(["--set", f"state.directory={directory}"])
