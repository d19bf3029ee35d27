"""Snapshots and the status of consumer groups as text. Nothing here reads a clock or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shipper.cli.common import in_columns, several
from shipper.model.printable import printable
from shipper.model.units import iso, moment, size, span
from shipper.status.document import STREAMS_SHOWN
from shipper.status.headline import describe_delivered, describe_outcome, headline_of, notices
from shipper.status.live import Live
from shipper.status.overview import Overview, StreamState
from shipper.status.snapshot import Snapshot

if TYPE_CHECKING:
    from shipper.kafka.offsets import GroupStatus

LISTED: Final = STREAMS_SHOWN
_TROUBLES_SHOWN: Final = 10


def report(snapshot: Snapshot, directory: Path, options: str = "", limit: int | None = LISTED) -> list[str]:
    """
    Return the full report in paragraphs, the most important sentence first.

    Args:
        options: Shell-quoted options that select the same state, with a leading space.
        limit: Maximum number of inputs to list; None = all.
    """
    live = snapshot.live
    destination = f"; ships to: {printable(live.destination)}" if live and live.destination else ""
    state = [f"state: {printable(str(directory))}{destination}", *figures(snapshot)]
    inputs, storage = stream_lines(snapshot, limit), storage_lines(snapshot, options)
    return [*first_lines(snapshot), "", *state, "", *inputs, "", *storage]


def answer_until(snapshot: Snapshot, until: float, limit: int | None = LISTED, note: str = "") -> list[str]:
    """Return whether everything up to a time is settled, then `note`, and what is not settled."""
    notes = [note] if note else []
    if snapshot.is_delivered(until):
        letters = f", except {several(snapshot.state.kept, 'dead letter')}" if snapshot.state.kept else ""
        unmatched = " and ".join((snapshot.running or snapshot).unmatched)
        but = f"; but {unmatched}" if unmatched else ""
        yes = f"yes: everything written up to {iso(until)} is delivered{letters}{but}"
        return [yes, *notes, *unreachable_lines(snapshot), *_unmatched_lines(snapshot)]
    lines = [f"no: cannot confirm that everything written up to {iso(until)} is settled", *notes]
    if not snapshot.state.has_inputs:
        lines.append("  no inputs are known yet: nothing has been shipped from here")
    lines += _future_lines(until, snapshot.at)
    if snapshot.has_files_left:
        lines.append("  not all files have been read to the end; if the last command has ended, run it again")
    if snapshot.is_spool_late(until):
        lines.append(f"  standard input: {_to_go(snapshot.state.spool.lag_bytes, snapshot)}")
    if late := snapshot.late_streams(until):
        lines.append(f"  {several(len(late), 'input is', 'inputs are')} not settled up to then:")
        lines += stream_table(late, snapshot, limit)
    return [*lines, *first_lines(snapshot), *unreachable_lines(snapshot), *_unmatched_lines(snapshot)]


def _future_lines(until: float, now: float) -> list[str]:
    return [f"  that is {span(until - now)} in the future; it is now {iso(now)}"] if until > now else []


def one_line(snapshot: Snapshot) -> str:
    """Return a snapshot as one line, for a log."""
    parts = [part.strip() for part in first_lines(snapshot)]
    if live := snapshot.running:
        parts += [_rate(live), f"{live.pending:,} pending"]
    parts += [_to_go(snapshot.lag_bytes, snapshot), f"{several(snapshot.state.kept, 'dead letter')} kept"]
    return f"{iso(snapshot.at)} {'; '.join(parts)}"


# First lines ------------------------------------------------------------------------------------------------------


def first_lines(snapshot: Snapshot) -> list[str]:
    """Return a missing report, pauses with advice, troubles, the process, and until when everything is delivered."""
    live, more = snapshot.running, len(snapshot.troubles) - _TROUBLES_SHOWN
    troubles = [printable(message) for message in snapshot.troubles[:_TROUBLES_SHOWN]]
    troubles += [f"and {several(more, 'more input')} that cannot be read or found"] if more > 0 else []
    if live is not None:
        phase = {"starting": "starting", "draining": "draining (no longer reading), running"}.get(live.phase, "running")
        engine = f", {printable(live.engine)}" if live.engine else ""
        identity = f"({printable(live.command)}, process {live.process_id}{engine})"
        process = f"{phase} since {moment(live.started_at, snapshot.at)} {identity}"
    elif snapshot.process_id is None:
        process = f"no shipper is running{_describe_last_run(snapshot)}"
    else:
        process = f"process {snapshot.process_id} is running, but has not reported yet"
    line, now = f"{process}; {describe_delivered(snapshot)}", headline_of(snapshot)
    if live is None:
        return [line, *(_pauses(snapshot) if snapshot.process_id is None else []), *troubles]
    silence = [now.text(snapshot.at), f"  what to do: {now.sub}"] if snapshot.is_silent else []
    return [*silence, *_pauses(snapshot), *troubles, line, *([now.text(snapshot.at)] if now.is_under_way else [])]


def _describe_last_run(snapshot: Snapshot) -> str:
    live = snapshot.live
    if live is None:
        return ""
    ago, command = f"{span(snapshot.at - live.at)} ago", printable(live.command)
    if live.phase == "stopped":
        return f"; the last one ({command}) ended {ago}: {printable(describe_outcome(live))}"
    return (
        f"; the last one ({command}, process {live.process_id}) was killed: its last report was {ago}; unsaved records "
        "are sent again at the next start"
    )


def _pauses(snapshot: Snapshot) -> list[str]:
    lines = []
    prefix = "" if snapshot.running else "at its end: "
    for pause in snapshot.live.pauses if snapshot.live else ():
        since = f"paused since {moment(pause.since, snapshot.at)} ({printable(pause.reason)})"
        probe = (
            f"; next attempt at {moment(pause.next_probe_at, snapshot.at)}"
            if pause.next_probe_at and not prefix
            else ""
        )
        lines.append(f"{prefix}{since}: {printable(pause.message)}{probe}")
        lines.append(f"  what to do: {printable(pause.advice)}")
    return lines


# Figures ----------------------------------------------------------------------------------------------------------


def figures(snapshot: Snapshot) -> list[str]:
    """Return the counts, the rate, and imminent expiries."""
    live = snapshot.running
    # The state is newer than the process's snapshot, and may have been saved in between.
    pending = max(0, live.ever_read - snapshot.state.read) if live else 0
    lines = [_accounting(snapshot.state, pending)]
    if live is not None:
        lines += [f"rate: {_rate(live)}", *map(printable, notices(live))]
    return [*lines, *(_expiry(name, snapshot) for name in snapshot.expiring)]


def _accounting(state: Overview, pending: int) -> str:
    parts = [
        f"{state.accepted:,} accepted",
        f"{state.dead_lettered:,} dead-lettered" + (f" ({state.purged:,} purged)" if state.purged else ""),
        several(state.duplicates, "duplicate"),
        *([f"{pending:,} pending"] if pending else []),
    ]
    return f"records: {state.read + pending:,} read = {' + '.join(parts)}"


def _rate(live: Live) -> str:
    parts = [
        f"{live.accepted_per_second:,.0f} records/s accepted",
        f"{live.in_flight:,} of {live.concurrency_limit:,} requests in flight",
    ]
    if live.latency_p50_seconds is not None:
        p50, p95 = ((seconds or 0.0) * 1000 for seconds in (live.latency_p50_seconds, live.latency_p95_seconds))
        parts.append(f"latency {p50:,.0f} ms (95 %: {p95:,.0f} ms)")
    return ", ".join(parts)


def _expiry(name: str, snapshot: Snapshot) -> str:
    at: float = getattr(snapshot.live, f"{name}_expires_at")
    when = f"expires in {span(at - snapshot.at)}" if at > snapshot.at else f"expired {span(snapshot.at - at)} ago"
    return f"{name}: {when}, {iso(at)}"


# Inputs -----------------------------------------------------------------------------------------------------------


def stream_lines(snapshot: Snapshot, limit: int | None) -> list[str]:
    """List the inputs, largest lag first."""
    streams, behind = snapshot.state.streams, len(snapshot.state.behind)
    lag = f", {behind:,} behind: {_to_go(snapshot.state.lag_bytes, snapshot)}" if behind else ""
    return [f"inputs: {len(streams):,} known{lag}", *stream_table(streams, snapshot, limit)]


def stream_table(streams: Sequence[StreamState], snapshot: Snapshot, limit: int | None) -> list[str]:
    """Format inputs, which are sorted by lag, as a table."""
    if not streams:
        return []
    listed = streams[:limit]
    gone = {stream.stream_id for stream in snapshot.unreachable_streams}
    etas = _etas(snapshot.state.streams, snapshot.bytes_per_second)
    rows: list[tuple[str, ...]] = [("delivered until", "settled", "to go", "behind", "ETA", "input")]
    rows += [_row(stream, etas.get(stream.path, "-"), snapshot, is_gone=stream.stream_id in gone) for stream in listed]
    lines = [f"  {line}" for line in in_columns(rows, str.rjust).split("\n")]
    return [*lines, *([f"  ... and {len(streams) - len(listed):,} more"] if len(streams) > len(listed) else [])]


def _row(stream: StreamState, eta: str, snapshot: Snapshot, *, is_gone: bool) -> tuple[str, ...]:
    until = stream.delivered_until
    is_settled = until == snapshot.at
    has_unknown_size = stream.compression and not is_settled  # of the content of an archive
    notes = [
        *(["not examined yet"] if not stream.stream_id else []),
        *(["gone before it was read"] if is_gone else []),
        *([stream.compression] if stream.compression else []),
    ]
    return (
        "not known" if until is None else moment(until, snapshot.at),
        f"{size(stream.checkpoint)} of " + ("?" if has_unknown_size else size(stream.size)),
        "?" if has_unknown_size else size(stream.lag_bytes),
        "-" if is_settled or until is None else span(snapshot.at - until),
        "-" if is_settled or is_gone or has_unknown_size else eta,
        printable(stream.path) + (f" ({', '.join(notes)})" if notes else ""),
    )


def _etas(streams: Sequence[StreamState], bytes_per_second: float) -> dict[str, str]:
    """Return the time left by path; of inputs that are sorted by lag, largest first, the smallest end first."""
    if not bytes_per_second:
        return {}
    etas = {}
    remaining = sum(stream.lag_bytes for stream in streams)  # of this input and those with a smaller lag
    for count, stream in enumerate(streams):
        etas[stream.path] = span((count * stream.lag_bytes + remaining) / bytes_per_second)
        remaining -= stream.lag_bytes
    return etas


def _to_go(lag_bytes: int, snapshot: Snapshot) -> str:
    rate = snapshot.bytes_per_second
    return f"{size(lag_bytes)} to go" + (f", {span(lag_bytes / rate)} at {size(rate)}/s" if rate else "")


# Spool, dead letters, unreachable inputs --------------------------------------------------------------------------


def storage_lines(snapshot: Snapshot, options: str = "") -> list[str]:
    """Describe spool, dead letters and dedupe window, and inputs that were not read."""
    state, lines = snapshot.state, []
    spool = state.spool
    if spool.segments:
        until = spool.delivered_until
        since = f", delivered until {moment(until, snapshot.at)}" if until is not None and until < snapshot.at else ""
        content = f"{several(spool.segments, 'segment')}, {size(spool.bytes)}, {_to_go(spool.lag_bytes, snapshot)}"
        lines.append(f"spool: {content}{since}")
    letters = f"dead letters: {state.kept:,} kept"
    if state.kept:
        by_rule = ", ".join(f"{printable(rule)} {count:,}" for rule, count in state.dead_letters.items())
        letters += f" ({by_rule}); list them with: shipper dead-letters list{printable(options)}"
    if count := state.letters_without_record:
        letters += f"; stored without the record: {count:,} (input.on_complete keeps their files)"
    lines.append(letters)
    window = state.dedupe_window
    if window.since is not None:
        since = moment(window.since, snapshot.at)
        lines.append(f"dedupe window: {several(window.event_ids, 'EventId')}, accepted since {since}")
    return [*lines, *unreachable_lines(snapshot), *_unmatched_lines(snapshot)]


def unreachable_lines(snapshot: Snapshot) -> list[str]:
    """List inputs that disappeared before they were read."""
    if not snapshot.state.unreachable_bytes:
        return []
    inputs = snapshot.state.unreachable
    lost = f"{size(snapshot.state.unreachable_bytes)} of {several(len(inputs), 'input')}"
    lines = [f"  {printable(item.path)}: {size(item.bytes)}, noticed {iso(item.noticed_at)}" for item in inputs]
    return [f"unreachable: {lost}, gone before they were read", *lines[-LISTED:]]


def _unmatched_lines(snapshot: Snapshot) -> list[str]:
    """List files next to inputs that no pattern matches."""
    if not snapshot.beside:
        return []
    names = [f"  {printable(name)}" for name in snapshot.beside[:LISTED]]
    count = several(len(snapshot.beside), "file")
    verbs = ("matches", "is", "it") if len(snapshot.beside) == 1 else ("match", "are", "them")
    return [
        f"{count} next to inputs {verbs[0]} no pattern and {verbs[1]} not read; add {verbs[2]} to input.include or "
        "input.exclude",
        *names,
    ]


# A consumer group -------------------------------------------------------------------------------------------------


def group_lines(snapshot: GroupStatus, options: str = "") -> list[str]:
    """Return whether everything up to the requested time is settled, and the progress of every partition."""
    lines = []
    letters = f", except {several(snapshot.dead_letters, 'dead letter')}" if snapshot.dead_letters else ""
    if snapshot.dead_letters is None:
        letters = ", except dead letters, whose number is unknown"
    if snapshot.until is not None and snapshot.is_delivered:
        lines.append(f"yes: everything written up to {iso(snapshot.until)} is delivered{letters}")
    elif snapshot.until is not None:
        is_future = snapshot.until > snapshot.at
        late = f"; not confirmed for {', '.join(snapshot.late)}" if snapshot.late and not is_future else ""
        lines.append(f"no: cannot confirm that everything written up to {iso(snapshot.until)} is settled{late}")
        lines += _future_lines(snapshot.until, snapshot.at)
        if snapshot.late and snapshot.members and not is_future:
            lines.append("  if delivery pauses, only the members know why: see their status page, /readyz, or log")
    orphans = sum(f"{item.topic}/{item.partition}" not in snapshot.owners for item in snapshot.partitions)
    without = f" ({orphans:,} without a member)" if orphans else ""
    lines.append(
        f"group {snapshot.group}: {snapshot.state}, {several(snapshot.members, 'member')}, "
        f"{several(len(snapshot.partitions), 'partition')}{without}, {several(snapshot.lag_records, 'record')} behind"
    )
    if snapshot.lag_records and not snapshot.members:
        lines.append("no member is running; to start one: shipper run")
    if snapshot.dead_letters is None:
        lines.append(snapshot.problem)
    else:
        how = f"; list them with: shipper dead-letters list{options}" if snapshot.dead_letters else ""
        lines.append(f"dead letters: {snapshot.dead_letters:,} kept{how}")
    rows = [["Partition", "Settled to", "End", "Lag", "Delivered until", "Member"]]
    for item in snapshot.partitions:
        settled = "none" if item.offset is None else f"{item.offset:,}"
        until = "not known" if item.delivered_until is None else iso(item.delivered_until)
        name = f"{item.topic}/{item.partition}"
        owner = snapshot.owners.get(name, "none")
        rows.append([name, settled, f"{item.end or 0:,}", f"{item.lag_records:,}", until, owner])
    return [*lines, "", in_columns(rows), *(item.message for item in snapshot.partitions if item.message)]
