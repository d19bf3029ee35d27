"""How a shipper stands, for people. All of this is text made of a look; nothing here reads a clock or a file."""

from __future__ import annotations

from typing import Final

from shipper.cli.common import on_one_line, several
from shipper.cli.status.inputs import remaining, stream_lines
from shipper.cli.status.look import Look
from shipper.status.headline import exceptions
from shipper.status.live import Live
from shipper.status.overview import Overview, SpoolState
from shipper.status.standing import STREAMS_SHOWN
from shipper.status.units import iso, moment, size, span

LISTED: Final = STREAMS_SHOWN

_NAMED: Final = 10  # inputs that cannot be read
_TOKEN_NEAR_S: Final = 600
_CERTIFICATE_NEAR_S: Final = 7 * 86_400
_ENDS: Final = {
    "finished": "finished: its input was read to the end",
    "drained": "drained: it was asked to end, and settled what it had read",
    "aborted": "aborted: it was cut off; what was pending is sent again at the next start",
    "gave_up": "gave up: the service took nothing for too long; the next start goes on",
}


def report(seen: Look, directory: str, *, shows_all: bool = False) -> list[str]:
    """Write all of it in paragraphs, the most important sentence first."""
    to = f"; ships to: {on_one_line(seen.live.destination)}" if seen.live and seen.live.destination else ""
    paragraphs = [
        headline(seen),
        [f"state: {on_one_line(directory)}{to}", *figures(seen)],
        stream_lines(seen, limit=None if shows_all else LISTED),
        remains(seen),
    ]
    return [line for paragraph in paragraphs if paragraph for line in ("", *paragraph)][1:]


# Whether all is well ----------------------------------------------------------------------------------------------


def headline(seen: Look) -> list[str]:
    """Say whether it runs and delivers, up to when everything is delivered, and what to do."""
    troubles = [on_one_line(words) for words in (*seen.troubles[:_NAMED], *_more(seen.troubles))]
    if seen.process_id is None:
        first = f"no shipper is running{_last_one(seen)}; {_delivered(seen)}"
        return [first, *_pauses(seen, "at its end it was "), *troubles]
    live = seen.running
    if live is None:
        first = f"process {seen.process_id} is running, and has said nothing of itself yet; {_delivered(seen)}"
        return [first, *troubles]
    doing = {"starting": "starting", "draining": "draining, it reads no more,"}.get(live.phase, "running")
    since = f"{doing} since {moment(live.started_at, seen.at)} ({on_one_line(live.command)}, process {live.process_id})"
    return [*_pauses(seen), *troubles, f"{since}; {_delivered(seen)}"]


def _more(troubles: list[str]) -> list[str]:
    more = len(troubles) - _NAMED
    return [f"and {several(more, 'more input')} that cannot be read or found"] if more > 0 else []


def _last_one(seen: Look) -> str:
    live = seen.live
    if live is None:
        return ""
    ago, command = f"{span(seen.at - live.at)} ago", on_one_line(live.command)
    if live.phase == "stopped":
        return f"; the last one ({command}) ended {ago}: {_ENDS.get(live.outcome, on_one_line(live.outcome))}"
    return (
        f"; the last one ({command}, process {live.process_id}) was killed: it was heard of {ago} last, "
        "and what it had not saved is sent again at the next start"
    )


def _pauses(seen: Look, before: str = "") -> list[str]:
    lines = []
    for each in seen.live.pauses if seen.live else ():
        since = f"paused since {moment(each.since, seen.at)} ({on_one_line(each.reason)})"
        probe = f"; tried again at {moment(each.next_probe_at, seen.at)}" if each.next_probe_at and not before else ""
        lines.append(f"{before}{since}: {on_one_line(each.message)}{probe}")
        lines.append(f"  what to do: {on_one_line(each.advice)}")
    return lines


def _delivered(seen: Look) -> str:
    """Say up to when everything is delivered."""
    overview = seen.overview
    if overview is None:
        return "there is no state yet"
    if not overview.has_inputs:
        return "nothing was read yet"
    until = seen.reachable_until
    but = exceptions(overview.unreachable_bytes, sum(overview.dead_letters.values()))
    if seen.has_files_left:
        return f"not all files that were named to it are read to their ends{but}"
    if (seen.open_line_bytes or until is not None) and seen.unaccepted:
        return f"none of the records that were read was accepted: {seen.unaccepted}"
    if seen.open_line_bytes:
        rest = f"{size(seen.open_line_bytes)} are a line that has no end yet"
        return f"everything up to the last whole line is delivered{but}; {rest}"
    if until is not None:
        what = "everything else" if seen.troubles else "everything"
        return f"{what} that was written until {moment(until, seen.at)} is delivered{but}"
    return f"{_behind(overview)} not delivered to the end, and it is not known until when{but}"


def _behind(overview: Overview) -> str:
    names = [several(len(overview.behind), "input")] if overview.behind else []
    names += ["standard input"] if overview.spool.lag_bytes else []
    count = len(overview.behind) + (overview.spool.lag_bytes > 0)
    return f"{' and '.join(names)} {'is' if count == 1 else 'are'}"


# Figures ----------------------------------------------------------------------------------------------------------


def figures(seen: Look) -> list[str]:
    """Write what is counted, how fast it goes, and what is about to expire."""
    lines = []
    live, overview = seen.running, seen.overview
    if overview is not None:
        lines.append(_accounting(overview, live.pending if live else 0))
    if live is not None:
        lines.append(f"rate: {_rate(live)}")
        lines += _settings(live)
    if seen.live is not None:
        if live is not None:
            lines += _expiry("token", live.token_expires_at, seen.at, _TOKEN_NEAR_S)
        lines += _expiry("certificate", seen.live.certificate_expires_at, seen.at, _CERTIFICATE_NEAR_S)
    return lines


def _settings(live: Live) -> list[str]:
    """Tell what became of the last attempt to read the settings again."""
    later = ", ".join(live.restart_needed)
    parts = [
        *([f"could not be read again, and stay as they were: {live.reload_error}"] if live.reload_error else []),
        *([f"changed, and take effect at the next start: {later}"] if later else []),
    ]
    return [f"settings: {on_one_line('; '.join(parts))}"] if parts else []


def _accounting(overview: Overview, pending: int) -> str:
    parts = [
        f"{overview.accepted:,} accepted",
        f"{overview.dead_lettered:,} dead-lettered",
        several(overview.duplicates, "duplicate"),
        *([f"{pending:,} pending"] if pending else []),
    ]
    return f"records: {overview.read + pending:,} read = {' + '.join(parts)}"


def _rate(live: Live) -> str:
    parts = [
        f"{live.accepted_per_second:,.0f} records/s accepted",
        f"{live.in_flight:,} of {live.concurrency_limit:,} requests in flight",
    ]
    if live.latency_p50_seconds is not None:
        parts.append(f"latency {_latency(live)}")
    return ", ".join(parts)


def _latency(live: Live) -> str:
    p50, p95 = ((each or 0.0) * 1000 for each in (live.latency_p50_seconds, live.latency_p95_seconds))
    return f"{p50:,.0f} ms (95 %: {p95:,.0f} ms)"


def _expiry(what: str, expires_at: float | None, now: float, near_s: float) -> list[str]:
    if expires_at is None or expires_at >= now + near_s:
        return []
    left_s = expires_at - now
    words = f"expires in {span(left_s)}" if left_s > 0 else f"expired {span(-left_s)} ago"
    return [f"{what}: {words}, {iso(expires_at)}"]


# What is kept, and what is lost -----------------------------------------------------------------------------------


def remains(seen: Look) -> list[str]:
    """Write what the spool and the dead letters hold, and what could not be read any more."""
    overview = seen.overview
    if overview is None:
        return []
    kept = sum(overview.dead_letters.values())
    by_rule = ", ".join(f"{on_one_line(rule)} {count:,}" for rule, count in overview.dead_letters.items())
    command = f"shipper dead-letters list{on_one_line(seen.options)}"
    letters = f"dead letters: {kept:,} kept" + (f" ({by_rule}); look at them with: {command}" if kept else "")
    if count := overview.letters_without_record:
        letters += f"; of {count:,} only the position is known, and input.on_complete leaves their files alone"
    return [*_spool(overview.spool, seen), letters, *_window(overview, seen), *unreachable(seen), *not_read(seen)]


def _window(overview: Overview, seen: Look) -> list[str]:
    window = overview.dedupe_window
    if window.since is None:
        return []
    return [f"dedupe window: {several(window.event_ids, 'EventId')}, accepted since {moment(window.since, seen.at)}"]


def _spool(spool: SpoolState, seen: Look) -> list[str]:
    if not spool.segments:
        return []
    until = ""
    if spool.delivered_until is not None and spool.delivered_until < seen.at:
        until = f", delivered until {moment(spool.delivered_until, seen.at)}"
    left = remaining(spool.lag_bytes, seen)
    return [f"spool: {several(spool.segments, 'segment')}, {size(spool.bytes)}, {left}{until}"]


def unreachable(seen: Look) -> list[str]:
    """Tell of the inputs that were gone before they were read."""
    overview = seen.overview
    if overview is None or not overview.unreachable_bytes:
        return []
    inputs = overview.unreachable
    lost = f"{size(overview.unreachable_bytes)} of {several(len(inputs), 'input')}"
    return [
        f"unreachable: {lost}, gone before they were read",
        *(
            f"  {on_one_line(each.path)}: {size(each.bytes)}, noticed {iso(each.noticed_at)}"
            for each in inputs[-LISTED:]
        ),
    ]


def not_read(seen: Look) -> list[str]:
    """Name what lies beside inputs and is not read, as nobody knows what it is."""
    if not seen.beside:
        return []
    names = [f"  {on_one_line(name)}" for name in seen.beside[:LISTED]]
    return [
        f"not read, as nothing names it: {several(len(seen.beside), 'file')} beside inputs; name them in "
        "input.include, or in input.exclude",
        *names,
    ]


# A line -----------------------------------------------------------------------------------------------------------


def compact(seen: Look) -> str:
    """Write it as one line, for a log."""
    live, overview = seen.running, seen.overview or Overview()
    parts = [part.strip() for part in headline(seen)]
    if live is not None:
        parts += [_rate(live), f"{live.pending:,} pending"]
    parts += [remaining(seen.lag_bytes, seen), f"{several(sum(overview.dead_letters.values()), 'dead letter')} kept"]
    return f"{iso(seen.at)} {'; '.join(parts)}"
