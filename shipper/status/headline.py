"""The answer to "is everything all right?", for the status page, the probes and `shipper status`."""

from __future__ import annotations

from typing import Final, Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from shipper.status.live import Live
from shipper.status.standing import StateNow
from shipper.status.units import several, size, span

_SETTLED_IN_S: Final = 10.0  # a process that has just started may not have looked at all of its inputs
_STILL_S: Final = 60.0
_FRESH_S: Final = 10.0
_OUTCOMES: Final = {
    "finished": "The input was read to its end.",
    "drained": "What had been read is settled; the next start goes on from there.",
    "aborted": "It was cut off; the next start reads again what is not settled.",
    "gave_up": "The service took nothing for too long; the next start goes on from there.",
}


class Headline(Struct, frozen=True, kw_only=True):
    """
    A state in words.

    Attributes:
        state: What it means; the page has a colour and a shape for each.
        title: Names it, and changes seldom.
        until: A moment that belongs into the title, before its last ` is `; seconds since the epoch.
        detail: Goes on after the title, with figures.
        sub: Explains it.
        is_open_line: Nothing waits but lines that have no end yet.
    """

    state: Literal["good", "busy", "warn", "bad", "paused", "off"]
    title: str
    until: float | None = None
    detail: str = ""
    sub: str = ""
    is_open_line: bool = False


class Counts(Protocol):
    """What became of records."""

    @property
    def read(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def dead_lettered(self) -> int: ...
    @property
    def duplicates(self) -> int: ...


def headline_of(live: Live, state: StateNow) -> Headline:
    """Put into words how a shipper stands that answers itself."""
    if live.phase == "stopped":
        return _stopped(live, state)
    is_draining = live.phase == "draining"
    if live.pauses:
        why = f": {live.pauses[0].reason}" if len(live.pauses) == 1 else f" for {len(live.pauses)} reasons"
        title = f"{'Draining, but paused' if is_draining else 'Paused'}{why.replace('_', ' ')}"
        sub = f"{_waiting(live)} Delivery goes on by itself once the cause is gone."
        return Headline(state="paused", title=title, sub=sub)
    if is_draining:
        sub = "It was asked to stop, reads no more, and settles what it has read."
        return Headline(
            state="busy", title="Draining", detail=f", {several(live.pending, 'record')} to settle", sub=sub
        )
    if live.phase == "starting" or not live.has_looked:
        return Headline(state="busy", title="Starting" if live.phase == "starting" else "Looking for its inputs")
    return _troubled(live, state) if live.troubles else _running(live, state)


def exceptions(lost_bytes: int, kept: int) -> str:
    """Return what everything is delivered but for; empty if for nothing."""
    gone = [f"{size(lost_bytes)} that were gone before they were read"] if lost_bytes else []
    everything = [*gone, *([several(kept, "dead letter")] if kept else [])]
    return f", but for {' and '.join(everything)}" if everything else ""


def unaccepted(live: Live | None, state: Counts) -> str:
    """Return what became of all records if none was accepted: of this process, or ever if it has read none."""
    counts: Counts = live if live is not None and live.read else state
    parts = [
        *([several(counts.dead_lettered, "dead letter")] if counts.dead_lettered else []),
        *([several(counts.duplicates, "duplicate")] if counts.duplicates else []),
    ]
    return " and ".join(parts) if not counts.accepted else ""


def open_line_bytes(live: Live, lost_bytes: int) -> int:
    """Return the bytes of lines that have no end yet, where nothing else waits; 0 if something does."""
    if live.phase != "running" or live.pauses or live.troubles or lost_bytes:
        return 0
    has_looked = live.at - live.started_at >= _SETTLED_IN_S
    is_at_work = live.pending or live.settled_bytes_per_second > 0 or live.oldest_unsettled_seconds is not None
    return live.lag_bytes if has_looked and not is_at_work else 0


def _troubled(live: Live, state: StateNow) -> Headline:
    """Something is no input that should be one: that is no state in which all is well, whatever became of the rest."""
    first, *others = live.troubles
    what, _, why = first.partition(": ")
    why, _, more = why.partition("; ")
    sentences = [f"{_begun(words)}." for words in (more, *others) if words]
    if live.lag_bytes or live.pending:
        sentences.append(_waiting(live))
    elif not live.read and not state.read:
        sentences.append("Nothing was read yet.")
    elif not unaccepted(live, state):
        sentences.append(f"Everything else that was written is delivered{_but(live, state)}.")
    return Headline(state="warn", title=_begun(what), detail=f": {why}" if why else "", sub=" ".join(sentences))


def _begun(words: str) -> str:
    return words[:1].upper() + words[1:]


def _running(live: Live, state: StateNow) -> Headline:
    left, rate = live.lag_bytes, live.settled_bytes_per_second
    oldest = live.oldest_unsettled_seconds or 0.0
    but = _but(live, state)
    well: Literal["good", "warn"] = "warn" if but else "good"
    open_bytes = open_line_bytes(live, _lost_bytes(live, state))
    is_done = not left and not live.pending
    if (is_done or open_bytes) and (instead := unaccepted(live, state)):
        title = "None of the records that were read was accepted"
        return Headline(state="warn", title=title, detail=f": {instead}", is_open_line=bool(open_bytes))
    if is_done:
        return Headline(state=well, title="Everything that was written is delivered", until=live.at, detail=but)
    if open_bytes:
        title, detail = "Everything up to the last whole line is delivered", f"{but}; {size(left)} {_OPEN}"
        return Headline(state=well, title=title, detail=detail, is_open_line=True)
    headline = Headline(state="busy", title="Delivering", sub=_waiting(live))
    if not rate > 0 and oldest >= _STILL_S:
        return replace(headline, state="warn", title="No progress", detail=f" for {span(oldest)}")
    if oldest < _FRESH_S and rate > 0 and left / rate < _FRESH_S:
        state_now = "warn" if unaccepted(live, state) else well
        detail = f", delivering {live.accepted_per_second:,.0f}/s{but}"
        return replace(headline, state=state_now, title="Up to date", detail=detail)
    total = live.total_bytes
    percent = min(100, int(100 * live.settled_bytes / total)) if total else 100
    behind = f"{size(left)} behind" if total is None else f"{percent} % of {size(total)}"
    wait = f", about {span(left / rate)} to go" if rate > 0 else ""
    return replace(headline, detail=f", {behind}{wait}")


_OPEN: Final = "are a line that has no end yet"


def _stopped(live: Live, state: StateNow) -> Headline:
    kept = sum(state.dead_letters.values())
    letters = f", with {several(live.dead_lettered, 'dead letter')}" if live.dead_lettered else ""
    if not letters and kept:
        letters = f"; {several(kept, 'dead letter')} kept"
    end: Literal["good", "warn", "off"] = "off" if live.outcome != "finished" else "warn" if letters else "good"
    is_bad = live.pending or live.outcome in {"aborted", "gave_up"}
    left = f" Not settled: {several(live.pending, 'record')}." if live.pending else ""
    return Headline(
        state="bad" if is_bad else end,
        title=f"Stopped: {live.outcome.replace('_', ' ') or 'no outcome'}",
        detail=letters,
        sub=f"{_OUTCOMES.get(live.outcome, '')}{left}",
    )


def _waiting(live: Live) -> str:
    oldest = live.oldest_unsettled_seconds
    since = f", the oldest for {span(oldest)}" if live.pending and oldest is not None else ""
    return f"{several(live.pending, 'record')} and {size(live.lag_bytes)} wait{since}."


def _lost_bytes(live: Live, state: StateNow) -> int:
    return max(state.unreachable_bytes, live.unreachable_bytes)


def _but(live: Live, state: StateNow) -> str:
    return exceptions(_lost_bytes(live, state), sum(state.dead_letters.values()))
