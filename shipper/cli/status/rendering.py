"""A snapshot as text for people. Nothing here reads a clock or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shipper.cli.common import in_columns, several
from shipper.model.printable import printable
from shipper.model.units import iso, moment, size, span
from shipper.status.document import STREAMS_SHOWN
from shipper.status.headline import delivered, headline_of, notices, outcome_of
from shipper.status.live import Live
from shipper.status.overview import Overview, StreamState
from shipper.status.snapshot import Snapshot

LISTED: Final = STREAMS_SHOWN
_NAMED: Final = 10  # inputs that cannot be read


def report(seen: Snapshot, directory: Path, options: str = "", limit: int | None = LISTED) -> list[str]:
    """
    Write all of it in paragraphs, the most important sentence first.

    Args:
        options: What a command needs on its line to look at the same state, for a shell, with a space in front.
        limit: How many inputs to list; None = all.
    """
    to = f"; ships to: {printable(seen.live.destination)}" if seen.live and seen.live.destination else ""
    state = [f"state: {printable(str(directory))}{to}", *figures(seen)]
    paragraphs = [headline(seen), state, stream_lines(seen, limit), remains(seen, options)]
    return [line for paragraph in paragraphs if paragraph for line in ("", *paragraph)][1:]


def answer(seen: Snapshot, until: float, limit: int | None = LISTED, note: str = "") -> list[str]:
    """
    Write whether everything up to a moment is settled, and what stands in the way.

    Args:
        note: Comes after the answer.
    """
    notes = [note] if note else []
    if seen.is_delivered(until):
        kept = [f"for {several(seen.kept, 'dead letter')}"] if seen.kept else []
        exceptions = " and ".join([*kept, *(seen.running or seen).unmatched])
        but = f", but {exceptions}" if exceptions else ""
        yes = f"yes: everything that was written up to {iso(until)} is delivered{but}"
        return [yes, *notes, *unreachable(seen), *_not_read(seen)]
    lines = [f"no: it is not known that everything that was written up to {iso(until)} is settled", *notes]
    if seen.state is None or not seen.state.has_inputs:
        return [*lines, "  no input is known yet: nothing was shipped from here"]
    if until > seen.at:
        lines.append(f"  that is still to come, in {span(until - seen.at)}; it is {iso(seen.at)}")
    if seen.has_files_left:
        lines.append(
            "  not all files that it was given have been read to their ends; `backfill` them again if it ended"
        )
    if seen.is_spool_late(until):
        lines.append(f"  standard input: {_to_go(seen.state.spool.lag_bytes, seen)}")
    if late := seen.late_streams(until):
        lines.append(f"  {several(len(late), 'input')} {'stands' if len(late) == 1 else 'stand'} in the way:")
        lines += stream_table(late, seen, limit)
    return [*lines, *headline(seen), *unreachable(seen), *_not_read(seen)]


def compact(seen: Snapshot) -> str:
    """Return a snapshot as one line, for a log."""
    parts = [part.strip() for part in headline(seen)]
    if live := seen.running:
        parts += [_rate(live), f"{live.pending:,} pending"]
    parts += [_to_go(seen.lag_bytes, seen), f"{several(seen.kept, 'dead letter')} kept"]
    return f"{iso(seen.at)} {'; '.join(parts)}"


# Whether all is well ----------------------------------------------------------------------------------------------


def headline(seen: Snapshot) -> list[str]:
    """Write what it is paused for and what to do, whether it runs, and up to when everything is delivered."""
    live, more = seen.running, len(seen.troubles) - _NAMED
    troubles = [printable(words) for words in seen.troubles[:_NAMED]]
    troubles += [f"and {several(more, 'more input')} that cannot be read or found"] if more > 0 else []
    if live is not None:
        doing = {"starting": "starting", "draining": "draining, it reads no more,"}.get(live.phase, "running")
        engine = f", {printable(live.engine)}" if live.engine else ""
        which = f"({printable(live.command)}, process {live.process_id}{engine})"
        process = f"{doing} since {moment(live.started_at, seen.at)} {which}"
    elif seen.process_id is None:
        process = f"no shipper is running{_last_one(seen)}"
    else:
        process = f"process {seen.process_id} is running, and has not reported yet"
    line, now = f"{process}; {delivered(seen)}", headline_of(seen)
    if live is None:
        return [line, *(_pauses(seen) if seen.process_id is None else []), *troubles]
    return [*_pauses(seen), *troubles, line, *([now.text(seen.at)] if now.is_under_way else [])]


def _last_one(seen: Snapshot) -> str:
    live = seen.live
    if live is None:
        return ""
    ago, command = f"{span(seen.at - live.at)} ago", printable(live.command)
    if live.phase == "stopped":
        return f"; the last one ({command}) ended {ago}: {printable(outcome_of(live))}"
    return (
        f"; the last one ({command}, process {live.process_id}) was killed: it was last heard of {ago}, "
        "and what it had not saved is sent again at the next start"
    )


def _pauses(seen: Snapshot) -> list[str]:
    lines = []
    before = "" if seen.running else "at its end it was "
    for each in seen.live.pauses if seen.live else ():
        since = f"paused since {moment(each.since, seen.at)} ({printable(each.reason)})"
        probe = f"; tried again at {moment(each.next_probe_at, seen.at)}" if each.next_probe_at and not before else ""
        lines.append(f"{before}{since}: {printable(each.message)}{probe}")
        lines.append(f"  what to do: {printable(each.advice)}")
    return lines


# Figures ----------------------------------------------------------------------------------------------------------


def figures(seen: Snapshot) -> list[str]:
    """Return the counts, the rate, and what is about to expire."""
    live, lines = seen.running, []
    if seen.state is not None:
        lines.append(_accounting(seen.state, live.pending if live else 0))
    if live is not None:
        lines += [f"rate: {_rate(live)}", *map(printable, notices(live))]
    return [*lines, *(_expiry(name, seen) for name in seen.expiring)]


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
        p50, p95 = ((each or 0.0) * 1000 for each in (live.latency_p50_seconds, live.latency_p95_seconds))
        parts.append(f"latency {p50:,.0f} ms (95 %: {p95:,.0f} ms)")
    return ", ".join(parts)


def _expiry(name: str, seen: Snapshot) -> str:
    at: float = getattr(seen.live, f"{name}_expires_at")
    words = f"expires in {span(at - seen.at)}" if at > seen.at else f"expired {span(seen.at - at)} ago"
    return f"{name}: {words}, {iso(at)}"


# Inputs -----------------------------------------------------------------------------------------------------------


def stream_lines(seen: Snapshot, limit: int | None) -> list[str]:
    """List the inputs, the one with most lag first."""
    state = seen.state
    if state is None:
        return []
    behind = len(state.behind)
    lag = f", {behind:,} behind: {_to_go(state.lag_bytes, seen)}" if behind else ""
    return [f"inputs: {len(state.streams):,} known{lag}", *stream_table(state.streams, seen, limit)]


def stream_table(streams: Sequence[StreamState], seen: Snapshot, limit: int | None) -> list[str]:
    """
    Lay out inputs as columns; the last one, the path, is as long as it is.

    Args:
        streams: The one with most lag first.
    """
    if not streams or seen.state is None:
        return []
    listed = streams[:limit]
    gone = {each.stream_id for each in seen.unreachable_streams}
    etas = _etas(seen.state.streams, seen.bytes_per_second)
    rows: list[tuple[str, ...]] = [("delivered until", "settled", "to go", "behind", "ETA", "input")]
    rows += [_row(each, etas.get(each.path, "-"), seen, is_gone=each.stream_id in gone) for each in listed]
    lines = [f"  {line}" for line in in_columns(rows, str.rjust).split("\n")]
    return [*lines, *([f"  ... and {len(streams) - len(listed):,} more"] if len(streams) > len(listed) else [])]


def _row(stream: StreamState, eta: str, seen: Snapshot, *, is_gone: bool) -> tuple[str, ...]:
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
        printable(stream.path) + (f" ({', '.join(notes)})" if notes else ""),
    )


def _etas(streams: Sequence[StreamState], bytes_per_second: float) -> dict[str, str]:
    """
    Return by path how long each input takes; inputs take turns, so those with less to go are done first.

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


def _to_go(lag_bytes: int, seen: Snapshot) -> str:
    rate = seen.bytes_per_second
    return f"{size(lag_bytes)} to go" + (f", {span(lag_bytes / rate)} at {size(rate)}/s" if rate else "")


# What is kept, and what is lost -----------------------------------------------------------------------------------


def remains(seen: Snapshot, options: str = "") -> list[str]:
    """Return what spool and dead letters hold, and what could not be read."""
    state = seen.state
    if state is None:
        return []
    by_rule = ", ".join(f"{printable(rule)} {count:,}" for rule, count in state.dead_letters.items())
    letters = f"dead letters: {seen.kept:,} kept"
    if seen.kept:
        letters += f" ({by_rule}); look at them with: shipper dead-letters list{printable(options)}"
    if count := state.letters_without_record:
        letters += f"; of {count:,} only the position is known, and input.on_complete leaves their files alone"
    lines = [*_spool(seen, state), letters]
    window = state.dedupe_window
    if window.since is not None:
        since = moment(window.since, seen.at)
        lines.append(f"dedupe window: {several(window.event_ids, 'EventId')}, accepted since {since}")
    return [*lines, *unreachable(seen), *_not_read(seen)]


def _spool(seen: Snapshot, state: Overview) -> list[str]:
    spool = state.spool
    if not spool.segments:
        return []
    until = ""
    if spool.delivered_until is not None and spool.delivered_until < seen.at:
        until = f", delivered until {moment(spool.delivered_until, seen.at)}"
    return [f"spool: {several(spool.segments, 'segment')}, {size(spool.bytes)}, {_to_go(spool.lag_bytes, seen)}{until}"]


def unreachable(seen: Snapshot) -> list[str]:
    """List the inputs that were gone before they were read."""
    if seen.state is None or not seen.state.unreachable_bytes:
        return []
    inputs = seen.state.unreachable
    lost = f"{size(seen.state.unreachable_bytes)} of {several(len(inputs), 'input')}"
    named = (f"  {printable(each.path)}: {size(each.bytes)}, noticed {iso(each.noticed_at)}" for each in inputs)
    return [f"unreachable: {lost}, gone before they were read", *list(named)[-LISTED:]]


def _not_read(seen: Snapshot) -> list[str]:
    """List files beside inputs that no pattern matches."""
    if not seen.beside:
        return []
    names = [f"  {printable(name)}" for name in seen.beside[:LISTED]]
    count = several(len(seen.beside), "file")
    verbs = ("matches", "is") if len(seen.beside) == 1 else ("match", "are")
    return [
        f"{count} next to inputs {verbs[0]} no pattern and {verbs[1]} not read: add to input.include or input.exclude",
        *names,
    ]
