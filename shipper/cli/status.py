"""`shipper status`: how far the inputs are settled, and what stands in the way."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shipper.cli.common import (
    ConfigOption,
    LogFormatOption,
    LogLevelOption,
    SetOption,
    plain,
    prepare,
    reader_may_leave,
)

if TYPE_CHECKING:
    from shipper.state.overview import Overview

_INPUTS_SHOWN = 20


def status(
    json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Show how far each input is settled, the spool, the dead letters, and what could not be reached any more.

    It works beside a shipper that runs, and without one.

    Example: shipper status --json
    """
    from shipper.state.directory import holder_of
    from shipper.state.overview import Overview, look_at
    from shipper.state.store import bring_state_up_to_date

    settings = prepare(config, overrides, log_level, log_format)
    directory = settings.state.directory
    overview = look_at(directory)
    if overview is None and (directory / "state.db").exists():
        bring_state_up_to_date(directory)
        overview = look_at(directory)
    holder = holder_of(directory)
    with reader_may_leave():
        if json:
            document = {"process_id": holder, **msgspec.to_builtins(overview or Overview())}
            print(msgspec.json.encode(document).decode(), flush=True)
        else:
            running = f"process {holder} is running" if holder else "no shipper is running"
            lines = _lines(overview) if overview else ["there is no state yet"]
            print("\n".join([f"{directory}: {running}", *lines]), flush=True)


def _lines(overview: Overview) -> list[str]:
    """Write it for a person."""
    lines = [
        f"records: {overview.read:,} read and settled: {overview.accepted:,} accepted, "
        f"{overview.dead_lettered:,} dead-lettered, {overview.duplicates:,} duplicates"
    ]
    behind = sorted((each for each in overview.streams if each.lag_bytes), key=lambda each: -each.lag_bytes)
    lag = sum(each.lag_bytes for each in behind)
    lines.append(f"inputs: {len(overview.streams):,} known, {len(behind):,} of them with {lag:,} bytes to go")
    lines += [
        f"  {plain(each.path)}: {each.checkpoint:,} of {each.size:,} bytes, {each.lag_bytes:,} to go"
        for each in behind[:_INPUTS_SHOWN]
    ]
    if len(behind) > _INPUTS_SHOWN:
        lines.append(f"  ... and {len(behind) - _INPUTS_SHOWN:,} more")
    spool = overview.spool
    lines.append(f"spool: {spool.segments:,} segments, {spool.bytes:,} bytes, {spool.lag_bytes:,} to go")
    by_rule = ", ".join(f"{rule} {count:,}" for rule, count in overview.dead_letters.items())
    kept = sum(overview.dead_letters.values())
    lines.append(f"dead letters: {kept:,} kept" + (f" ({by_rule}); shipper dead-letters list" if kept else ""))
    lines.append(
        f"unreachable: {overview.unreachable_bytes:,} bytes of {len(overview.unreachable):,} inputs that were gone "
        "before they were read"
    )
    for each in overview.unreachable[-_INPUTS_SHOWN:]:
        noticed = datetime.fromtimestamp(each.noticed_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines.append(f"  {plain(each.path)}: {each.bytes:,} bytes, noticed {noticed}")
    return lines
