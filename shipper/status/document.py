"""The JSON document of a snapshot, for `GET /status` and `shipper status --format json`."""

from __future__ import annotations

import shlex
from typing import Any, Final

from msgspec import to_builtins
from msgspec.structs import replace

from shipper.status.headline import headline_of, notices
from shipper.status.live import Live
from shipper.status.snapshot import Snapshot

STREAMS_SHOWN: Final = 20
_DEFAULT_DIRECTORY: Final = "/var/lib/shipper"


def document(snapshot: Snapshot, streams: int | None = STREAMS_SHOWN) -> dict[str, Any]:
    """Return a snapshot as builtin types, with at most that many `streams`; None = all."""
    state = snapshot.state
    is_member = snapshot.live is not None and snapshot.live.group is not None  # whose state is that of the group
    listed = replace(state, streams=state.streams[:streams], unreachable=state.unreachable[-STREAMS_SHOWN:])
    return {
        "headline": to_builtins(headline_of(snapshot)),
        "summary": {
            "notices": notices(snapshot.live),
            "seconds_to_go": snapshot.seconds_to_go,
            "dead_letters_kept": None if is_member else state.kept,
            "unreachable_bytes": snapshot.unreachable_bytes,
            "expiring": snapshot.expiring,
            "options": _options(snapshot.live),
        },
        "process_id": snapshot.process_id,
        "troubles": snapshot.troubles,
        "live": to_builtins(snapshot.live),
        "state": None
        if is_member
        else {
            **to_builtins(listed),
            "stream_count": len(state.streams),
            "streams_behind": len(state.behind),
            "lag_bytes": state.lag_bytes,
        },
        "report": to_builtins(snapshot.report),
    }


def _options(live: Live | None) -> str:
    """Return the shell-quoted options that select the same state directory; empty for the default one."""
    directory = live.state_directory if live else ""
    return "" if directory in {"", _DEFAULT_DIRECTORY} else shlex.join(["--set", f"state.directory={directory}"])
