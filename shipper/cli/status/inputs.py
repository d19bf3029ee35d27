"""The inputs as a table: how far each is settled, what is to go, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence

from shipper.cli.common import on_one_line
from shipper.cli.status.look import Look
from shipper.status.overview import StreamState
from shipper.status.units import moment, size, span


def stream_lines(seen: Look, limit: int | None) -> list[str]:
    """List the inputs, the one with most lag first."""
    overview = seen.overview
    if overview is None:
        return []
    behind = len(overview.behind)
    lag = f", {behind:,} behind: {remaining(overview.lag_bytes, seen)}" if behind else ""
    return [f"inputs: {len(overview.streams):,} known{lag}", *stream_table(overview.streams, seen, limit=limit)]


def remaining(lag_bytes: int, seen: Look) -> str:
    """Say how much is to go, and how long that takes if nothing else is done."""
    rate = seen.bytes_per_second
    return f"{size(lag_bytes)} to go" + (f", {span(lag_bytes / rate)} at {size(rate)}/s" if rate else "")


def stream_table(streams: Sequence[StreamState], seen: Look, *, limit: int | None) -> list[str]:
    """
    Lay out inputs as columns; the last one, the path, is as long as it is.

    Args:
        streams: The one with most lag first.
    """
    if not streams or seen.overview is None:
        return []
    listed = streams[:limit]
    gone = {each.stream_id for each in seen.unreachable_streams}
    etas = _etas(seen.overview.streams, seen.bytes_per_second)
    rows: list[tuple[str, ...]] = [("delivered until", "settled", "to go", "behind", "ETA", "input")]
    rows += [_row(each, etas.get(each.path, "-"), seen, is_gone=each.stream_id in gone) for each in listed]
    more = [f"  ... and {len(streams) - len(listed):,} more"] if len(streams) > len(listed) else []
    return [*_columns(rows), *more]


def _row(stream: StreamState, eta: str, seen: Look, *, is_gone: bool) -> tuple[str, ...]:
    until = stream.delivered_until
    is_whole = until == seen.at
    is_open_ended = stream.compression and not is_whole  # nobody knows how much an archive holds
    notes = [
        *(["not looked at yet"] if not stream.stream_id else []),
        *(["gone before it was read"] if is_gone else []),
        *([stream.compression] if stream.compression else []),
    ]
    return (
        "not known" if until is None else moment(until, seen.at),
        f"{size(stream.checkpoint)} of " + ("?" if is_open_ended else size(stream.size)),
        "?" if is_open_ended else size(stream.lag_bytes),
        "-" if is_whole or until is None else span(seen.at - until),
        "-" if is_whole or is_gone or is_open_ended else eta,
        on_one_line(stream.path) + (f" ({', '.join(notes)})" if notes else ""),
    )


def _etas(streams: Sequence[StreamState], bytes_per_second: float) -> dict[str, str]:
    """
    Tell by path how long each input takes; inputs take turns, so those with less to go are done first.

    Args:
        streams: The one with most lag first.
    """
    if not bytes_per_second:
        return {}
    etas = {}
    others = sum(each.lag_bytes for each in streams)  # of those that have no more to go than this one
    for count, each in enumerate(streams):
        etas[each.path] = span((count * each.lag_bytes + others) / bytes_per_second)
        others -= each.lag_bytes
    return etas


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  " + "  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]
