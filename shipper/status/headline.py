"""The answer to "is everything all right?", for the status page, `/status` and `shipper status`."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from shipper.model.units import moment, several, size, span
from shipper.status.live import Live
from shipper.status.snapshot import Snapshot

_STILL_S: Final = 60.0
_FRESH_S: Final = 10.0
_NO_PROGRESS: Final = "No progress"
_UP_TO_DATE: Final = "Up to date"
_OUTCOMES: Final = {
    "finished": "The input was read to its end.",
    "drained": "What had been read is settled; the next start goes on from there.",
    "aborted": "It was cut off; the next start reads again what is not settled.",
    "gave_up": "The service accepted nothing for too long; the next start goes on from there.",
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

    @property
    def is_under_way(self) -> bool:
        """Whether the process is at work, and the rest is a matter of time."""
        return self.state == "busy" or self.title in {_NO_PROGRESS, _UP_TO_DATE}

    def text(self, now: float) -> str:
        """Return title and detail as one line."""
        if self.until is None:
            return self.title + self.detail
        what, _, is_done = self.title.rpartition(" is ")
        return f"{what} until {moment(self.until, now)} is {is_done}{self.detail}"


def headline_of(seen: Snapshot) -> Headline:
    """Return the headline of a snapshot."""
    live = seen.running
    if seen.stuck:
        sub = f"{_begun(seen.stuck)}. The liveness probe fails, so that a supervisor restarts shipper."
        return Headline(state="bad", title="Stuck", sub=sub)
    if live is None:
        return _absent(seen)
    if live.phase == "stopped":
        return _stopped(seen, live)
    is_draining = live.phase == "draining"
    if live.pauses:
        why = f": {live.pauses[0].reason}" if len(live.pauses) == 1 else f" for {len(live.pauses)} reasons"
        title = f"{'Draining, but paused' if is_draining else 'Paused'}{why.replace('_', ' ')}"
        sub = f"{_waiting(live)} Delivery goes on by itself once the cause is gone."
        return Headline(state="paused", title=title, sub=sub)
    if is_draining:
        detail = f", {several(live.pending, 'record')} to settle"
        sub = "It was asked to stop: it reads no more and settles what it has read."
        return Headline(state="busy", title="Draining", detail=detail, sub=sub)
    if live.phase == "starting" or not live.has_looked:
        return Headline(state="busy", title="Starting" if live.phase == "starting" else "Looking for its inputs")
    if live.troubles:
        return _troubled(seen, live)
    is_done = not live.behind and not live.pending
    return _delivered(seen, live.at if is_done else None) or _delivering(seen, live)


def delivered(seen: Snapshot) -> str:
    """Return up to when everything is delivered, as far as the state knows."""
    state = seen.state
    if state is None:
        return "there is no state yet"
    if not state.has_inputs:
        return "nothing was read yet"
    if seen.has_files_left:
        return f"not all files are read to the end{_exceptions(seen)}"
    if found := _delivered(seen, seen.reachable_until, "Everything else" if seen.troubles else "Everything"):
        text = found.text(seen.at)
        return text[:1].lower() + text[1:]
    names = [several(len(state.behind), "input")] if state.behind else []
    names += ["standard input"] if state.spool.lag_bytes else []
    verb = "is" if len(state.behind) + (state.spool.lag_bytes > 0) == 1 else "are"
    return f"{' and '.join(names)} {verb} not delivered to the end, and it is not known until when{_exceptions(seen)}"


def outcome_of(live: Live) -> str:
    """Return how a process ended, in words."""
    words = _OUTCOMES.get(live.outcome, "").rstrip(".")
    return live.outcome.replace("_", " ") + (f": {words[:1].lower()}{words[1:]}" if words else "")


def notices(live: Live | None) -> list[str]:
    """Return what came of the last reload of the settings."""
    if live is None:
        return []
    refused, later = live.reload_error, ", ".join(live.restart_needed)
    return [
        *([f"The settings could not be read again, and stay as they were: {refused}."] if refused else []),
        *([f"Settings that changed, and take effect at the next start: {later}."] if later else []),
    ]


def _exceptions(seen: Snapshot) -> str:
    """Return the exceptions to "everything is delivered"; empty = none."""
    lost, kept = seen.unreachable_bytes, seen.kept
    gone = [f"{size(lost)} that were gone before they were read"] if lost else []
    everything = [*gone, *([several(kept, "dead letter")] if kept else [])]
    return f", but for {' and '.join(everything)}" if everything else ""


def _unaccepted(seen: Snapshot) -> str:
    """Return what became of all records if none was accepted: of this process, or ever if it has read none."""
    counts = seen.live if seen.live is not None and seen.live.read else seen.state
    if counts is None or counts.accepted:
        return ""
    parts = [
        *([several(counts.dead_lettered, "dead letter")] if counts.dead_lettered else []),
        *([several(counts.duplicates, "duplicate")] if counts.duplicates else []),
    ]
    return " and ".join(parts)


def _absent(seen: Snapshot) -> Headline:
    live = seen.live
    if seen.process_id is not None:
        return Headline(state="busy", title="It has not reported yet")
    if live is None:
        return Headline(state="off", title="No shipper is running")
    if live.phase == "stopped":
        return _stopped(seen, live)
    detail = f", last heard of {span(seen.at - live.at)} ago"
    return Headline(state="bad", title="Killed", detail=detail, sub="What it had not saved is sent again.")


def _stopped(seen: Snapshot, live: Live) -> Headline:
    own = min(live.dead_lettered, seen.kept) if seen.state else live.dead_lettered  # others were replayed or purged
    letters = f", with {several(own, 'dead letter')}" if own else ""
    if not letters and seen.kept:
        letters = f"; {several(seen.kept, 'dead letter')} kept"
    state: Literal["good", "warn", "off", "bad"] = "warn" if letters or seen.troubles else "good"
    if live.pending or live.outcome in {"aborted", "gave_up"}:
        state = "bad"
    elif live.outcome != "finished":
        state = "off"
    left = f" Not settled: {several(live.pending, 'record')}." if live.pending else ""
    return Headline(
        state=state,
        title=f"Stopped: {live.outcome.replace('_', ' ') or 'no outcome'}",
        detail=letters,
        sub=f"{_OUTCOMES.get(live.outcome, '')}{left}",
    )


def _troubled(seen: Snapshot, live: Live) -> Headline:
    """Return the headline of a shipper that cannot read some of its inputs."""
    first, *others = live.troubles
    what, _, why = first.partition(": ")
    why, _, more = why.partition("; ")
    sentences = [f"{_begun(words)}." for words in (more, *others) if words]
    if live.lag_bytes or live.pending:
        sentences.append(_waiting(live))
    elif not live.read and not (seen.state and seen.state.read):
        sentences.append("Nothing was read yet.")
    elif not _unaccepted(seen):
        sentences.append(f"Everything else that was written is delivered{_exceptions(seen)}.")
    return Headline(state="warn", title=_begun(what), detail=f": {why}" if why else "", sub=" ".join(sentences))


def _delivered(seen: Snapshot, until: float | None, what: str = "Everything") -> Headline | None:
    """Return the headline of a shipper that has nothing left to deliver up to a moment; None if it has."""
    open_bytes = seen.open_line_bytes
    if until is None and not open_bytes:
        return None
    if instead := _unaccepted(seen):
        title = "None of the records that were read was accepted"
        return Headline(state="warn", title=title, detail=f": {instead}", is_open_line=bool(open_bytes))
    but = _exceptions(seen)
    well: Literal["good", "warn"] = "warn" if but else "good"
    if open_bytes:
        title, detail = f"{what} up to the last whole line is delivered", f"{size(open_bytes)} are a line that has no"
        return Headline(state=well, title=title, detail=f"{but}; {detail} end yet", is_open_line=True)
    return Headline(state=well, title=f"{what} that was written is delivered", until=until, detail=but)


def _delivering(seen: Snapshot, live: Live) -> Headline:
    left, rate, total = live.lag_bytes, live.settled_bytes_per_second, live.total_bytes
    oldest = live.oldest_unsettled_seconds or 0.0
    sub = _waiting(live)
    if not rate > 0 and oldest >= _STILL_S:
        return Headline(state="warn", title=_NO_PROGRESS, detail=f" for {span(oldest)}", sub=sub)
    if oldest < _FRESH_S and rate > 0 and left / rate < _FRESH_S:
        but = _exceptions(seen)
        detail = f", delivering {live.accepted_per_second:,.0f}/s{but}"
        return Headline(state="warn" if but or _unaccepted(seen) else "good", title=_UP_TO_DATE, detail=detail, sub=sub)
    if live.group is not None:
        return Headline(state="busy", title="Delivering", detail=f", {live.behind or 'nothing'} behind", sub=sub)
    percent = min(100, int(100 * live.settled_bytes / total)) if total else 100
    behind = f"{size(left)} behind" if total is None else f"{percent} % of {size(total)}"
    wait = f", about {span(left / rate)} to go" if rate > 0 else ""
    return Headline(state="busy", title="Delivering", detail=f", {behind}{wait}", sub=sub)


def _waiting(live: Live) -> str:
    oldest = live.oldest_unsettled_seconds
    since = f", the oldest for {span(oldest)}" if live.pending and oldest is not None else ""
    also = "" if live.group is not None else f" and {size(live.lag_bytes)}"
    return f"{several(live.pending, 'record')}{also} wait{since}."


def _begun(words: str) -> str:
    return words[:1].upper() + words[1:]
