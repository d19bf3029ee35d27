"""`--until`: whether everything up to a moment is settled, and what stands in the way."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import typer
from msgspec import Struct

from shipper.cli.common import several
from shipper.cli.status.inputs import remaining, stream_table
from shipper.cli.status.look import Look
from shipper.cli.status.rendering import LISTED, headline, not_read, unreachable
from shipper.status.overview import StreamState
from shipper.status.units import iso, span

EXIT_NOT_YET = 4


def moment_of(text: str, now: float) -> float:
    """
    Read a time: ISO 8601, UTC unless it names another zone; a date alone is its end; or `now`.

    Returns:
        Seconds since the epoch.
    Raises:
        typer.BadParameter: It is none.
    """
    if text == "now":
        return now
    try:
        try:
            whole = datetime.combine(date.fromisoformat(text) + timedelta(days=1), datetime.min.time(), UTC)
        except ValueError:
            whole = datetime.fromisoformat(text)
        return (whole if whole.tzinfo else whole.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time, such as 2026-11-01T12:30:00Z, 2026-11-01 (its end, UTC) or now"
        ) from None


class Answer(Struct, frozen=True, kw_only=True):
    """
    Whether everything that was written up to a moment is settled: it is, if none of the others says otherwise.

    Attributes:
        until: The moment, seconds since the epoch.
        has_inputs: Whether any input is known at all.
        is_over: Whether nothing can be written before the moment any more.
        has_files_left: See `Look`.
        is_spool_behind: Something that was read from standard input by then may not be settled.
        streams: Those of which something that was written by then may not be settled.
    """

    until: float
    has_inputs: bool
    is_over: bool
    has_files_left: bool
    is_spool_behind: bool
    streams: list[StreamState]

    @property
    def is_delivered(self) -> bool:
        is_held_up = self.has_files_left or self.is_spool_behind or self.streams
        return self.has_inputs and self.is_over and not is_held_up


def answer_of(seen: Look, until: float) -> Answer:
    """Tell whether everything that was written up to a moment is settled."""

    def is_late(delivered_until: float | None) -> bool:
        return delivered_until is None or delivered_until < min(until, seen.at)

    overview = seen.overview
    return Answer(
        until=until,
        has_inputs=overview is not None and overview.has_inputs,
        is_over=until <= seen.at,
        has_files_left=seen.has_files_left,
        is_spool_behind=overview is not None and is_late(overview.spool.delivered_until),
        streams=[each for each in overview.streams if is_late(each.delivered_until)] if overview else [],
    )


def answer_lines(answer: Answer, seen: Look, *, shows_all: bool = False) -> list[str]:
    """Write the answer for a person."""
    moment = iso(answer.until)
    if answer.is_delivered:
        kept = sum(seen.overview.dead_letters.values()) if seen.overview else 0
        but = f", but for {several(kept, 'dead letter')}" if kept else ""
        return [
            f"yes: everything that was written up to {moment} is delivered{but}",
            *unreachable(seen),
            *not_read(seen),
        ]
    lines = [f"no: it is not known that everything that was written up to {moment} is settled"]
    if not answer.has_inputs:
        return [*lines, "  no input is known yet: nothing was shipped from here"]
    if not answer.is_over:
        lines.append(f"  that is still to come, in {span(answer.until - seen.at)}; it is {iso(seen.at)}")
    if answer.has_files_left:
        lines.append(
            "  not all files that it was given have been read to their ends; `backfill` them again if it ended"
        )
    if answer.is_spool_behind and seen.overview:
        lines.append(f"  standard input: {remaining(seen.overview.spool.lag_bytes, seen)}")
    if answer.streams:
        count = len(answer.streams)
        lines.append(f"  {count:,} inputs stand in the way:" if count > 1 else "  1 input stands in the way:")
        lines += stream_table(answer.streams, seen, limit=None if shows_all else LISTED)
    return [*lines, *headline(seen), *unreachable(seen), *not_read(seen)]
