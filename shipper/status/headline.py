"""The headline of a snapshot, for the status page, `/status` and `shipper status`."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from shipper.model.group import GroupState
from shipper.model.units import moment, several, size, span
from shipper.status.live import Live
from shipper.status.overview import Overview
from shipper.status.snapshot import Snapshot

_NO_PROGRESS_S: Final = 60.0
_FRESH_S: Final = 10.0
_NO_PROGRESS: Final = "No progress"
_UP_TO_DATE: Final = "Up to date"
_OUTCOMES: Final = {
    "finished": "The input was read to its end.",
    "drained": "All records that were read are settled; the next start continues from there.",
    "aborted": "It was interrupted; the next start reads unsettled records again.",
    "gave_up": "Delivery could not continue; the next start resumes from there.",
}

State = Literal["good", "busy", "warn", "bad", "paused", "off"]


class Headline(Struct, frozen=True, kw_only=True):
    """
    The state in a sentence.

    Attributes:
        state: Selects a colour and a mark on the page.
        title: Names the state; rarely changes.
        until: A time to insert into the title, before its last ` is `; seconds since the epoch.
        detail: Continues the title, with numbers.
        sub: Explanation.
        is_open_line: Only incomplete lines are waiting.
    """

    state: State
    title: str
    until: float | None = None
    detail: str = ""
    sub: str = ""
    is_open_line: bool = False

    @property
    def is_under_way(self) -> bool:
        """Whether the process is delivering normally."""
        return self.state == "busy" or self.title in {_NO_PROGRESS, _UP_TO_DATE}

    def text(self, now: float) -> str:
        """Return title and detail as one line."""
        if self.until is None:
            return self.title + self.detail
        subject, _, is_done = self.title.rpartition(" is ")
        return f"{subject} until {moment(self.until, now)} is {is_done}{self.detail}"


def headline_of(snapshot: Snapshot) -> Headline:
    live = snapshot.running
    if snapshot.stuck:
        sub = f"{_capitalized(snapshot.stuck)}. The liveness probe fails, so a supervisor can restart shipper."
        return Headline(state="bad", title="Stuck", sub=sub)
    if live is None:
        return _absent(snapshot)
    if live.phase == "stopped":
        return _stopped(snapshot, live)
    if snapshot.is_silent:
        title = f"Process {live.process_id} has not reported for {span(snapshot.at - live.at)}"
        detail = ": it hangs, or cannot write to its state directory"
        sub = "Run shipper retry, which asks the process why delivery pauses; its log says the same."
        return Headline(state="bad", title=title, detail=detail, sub=sub)
    is_draining = live.phase == "draining"
    if live.pauses:
        reason = f": {live.pauses[0].reason}" if len(live.pauses) == 1 else f" for {len(live.pauses)} reasons"
        title = f"{'Draining, but paused' if is_draining else 'Paused'}{reason.replace('_', ' ')}"
        resumes = "Delivery resumes automatically once the cause is gone."
        if any(pause.reason == "input_unlike_records" for pause in live.pauses):
            resumes = "Records are held back until this is corrected."
        sub = f"{_waiting(live)} {resumes}"
        return Headline(state="paused", title=title, sub=sub)
    if is_draining:
        detail = f", {several(live.pending, 'record')} to settle"
        sub = "It is stopping: it settles the records that it has read, and reads no more."
        return Headline(state="busy", title="Draining", detail=detail, sub=sub)
    if live.phase == "starting" or not live.has_scanned:
        return Headline(state="busy", title="Starting" if live.phase == "starting" else "Looking for inputs")
    if live.troubles:
        return _troubled(snapshot, live)
    is_done = not live.behind and not live.pending
    if live.group is not None:
        return _member(snapshot, live, live.group, is_done=is_done)
    return _delivered(snapshot, live.at if is_done else None) or _delivering(snapshot, live)


def describe_delivered(snapshot: Snapshot) -> str:
    """Describe until when everything is delivered, according to the state."""
    state = snapshot.state
    if not state.has_inputs:
        return "nothing has been read yet"
    if snapshot.has_files_left:
        return f"not all files have been read to the end{_exceptions(snapshot, '; also not delivered: ')}"
    subject = "Everything else" if snapshot.troubles else "Everything"
    if headline := _delivered(snapshot, snapshot.reachable_until, subject):
        text = headline.text(snapshot.at)
        return text[:1].lower() + text[1:]
    names = [several(len(state.behind), "input")] if state.behind else []
    names += ["standard input"] if state.spool.lag_bytes else []
    verb = "is" if len(state.behind) + (state.spool.lag_bytes > 0) == 1 else "are"
    others = _exceptions(snapshot, "; also not delivered: ")
    return f"{' and '.join(names)} {verb} behind, since an unknown time{others}"


def describe_outcome(live: Live) -> str:
    text = _OUTCOMES.get(live.outcome, "").rstrip(".")
    return live.outcome.replace("_", " ") + (f": {text[:1].lower()}{text[1:]}" if text else "")


def notices(live: Live | None) -> list[str]:
    """Return sentences about the last reload of the settings."""
    if live is None:
        return []
    error, deferred = live.reload_error, ", ".join(live.restart_needed)
    return [
        *([f"The settings could not be reloaded, and are unchanged: {error}."] if error else []),
        *([f"Changed settings that take effect at the next start: {deferred}."] if deferred else []),
    ]


def _exceptions(snapshot: Snapshot, prefix: str = ", except ") -> str:
    """Describe the exceptions to "everything is delivered" after a prefix; empty = none."""
    gone, group = "", _group(snapshot)
    if snapshot.unreachable_bytes:
        gone = f"{size(snapshot.unreachable_bytes)} that were gone before they were read"
    elif group is not None and group.unreachable_records:
        gone = f"{several(group.unreachable_records, 'record')} deleted unread"
    letters = several(_kept(snapshot), "dead letter") if _kept(snapshot) else ""
    if letters and group:
        letters += " of this process"
    exceptions = " and ".join(filter(None, [gone, letters]))
    return prefix + exceptions if exceptions else ""


def _group(snapshot: Snapshot) -> GroupState | None:
    return snapshot.live.group if snapshot.live else None


def _kept(snapshot: Snapshot) -> int:
    """Return the number of stored dead letters; of a group member, of those that it has written."""
    return snapshot.live.dead_lettered if snapshot.live and snapshot.live.group else snapshot.state.kept


def _unaccepted(snapshot: Snapshot) -> str:
    """Describe all records if none was accepted, now or before; otherwise empty."""
    counts = _counts(snapshot)
    if counts.accepted or not counts.dead_lettered:
        return ""
    letters = several(counts.dead_lettered, "dead letter")
    return f"{letters} and {several(counts.duplicates, 'duplicate')}" if counts.duplicates else letters


def _counts(snapshot: Snapshot) -> Live | Overview:
    """Return the counts of the process or, if it has read nothing, of the state."""
    return snapshot.live if snapshot.live is not None and snapshot.live.read else snapshot.state


def _all_duplicates(snapshot: Snapshot) -> str:
    """Return a suffix for the case that all records read were duplicates; empty if they were not."""
    counts = _counts(snapshot)
    if counts.accepted or counts.dead_lettered or not counts.duplicates:
        return ""
    return f"; all {several(counts.duplicates, 'record')} read were duplicates"


def _absent(snapshot: Snapshot) -> Headline:
    live = snapshot.live
    if snapshot.process_id is not None:
        return Headline(state="busy", title="No report yet")
    if live is None:
        return Headline(state="off", title="No shipper is running")
    if live.phase == "stopped":
        return _stopped(snapshot, live)
    detail = f", last report {span(snapshot.at - live.at)} ago"
    return Headline(state="bad", title="Killed", detail=detail, sub="Unsaved records are sent again.")


def _stopped(snapshot: Snapshot, live: Live) -> Headline:
    kept = _kept(snapshot)
    from_this_run = min(live.dead_lettered, kept)  # some may have been replayed or purged
    letters = f", with {several(from_this_run, 'dead letter')}" if from_this_run else ""
    if not letters and kept:
        letters = f"; {several(kept, 'dead letter')} kept"
    if live.pending or live.outcome in {"aborted", "gave_up"}:
        state: State = "bad"
    elif live.outcome != "finished":
        state = "off"
    else:
        state = "warn" if letters or snapshot.troubles else "good"
    left = f" Not settled: {several(live.pending, 'record')}." if live.pending else ""
    return Headline(
        state=state,
        title=f"Stopped: {live.outcome.replace('_', ' ') or 'no outcome'}",
        detail=letters,
        sub=f"{_OUTCOMES.get(live.outcome, '')}{left}",
    )


def _troubled(snapshot: Snapshot, live: Live) -> Headline:
    """Return the headline of a shipper that cannot read some inputs."""
    first, *others = live.troubles
    title, _, reason = first.partition(": ")
    reason, _, more = reason.partition("; ")
    sentences = [f"{_capitalized(text)}." for text in (more, *others) if text]
    if live.lag_bytes or live.pending:
        sentences.append(_waiting(live))
    elif not live.read and not snapshot.state.read:
        sentences.append("Nothing has been read yet.")
    elif not _unaccepted(snapshot):
        sentences.append(f"Everything else is delivered{_exceptions(snapshot)}.")
    detail = f": {reason}" if reason else ""
    return Headline(state="warn", title=_capitalized(title), detail=detail, sub=" ".join(sentences))


def _member(snapshot: Snapshot, live: Live, group: GroupState, *, is_done: bool) -> Headline:
    """Return the headline of a group member, which knows the ends of its partitions only as of a query."""
    if not group.partitions:
        sub = "The group is rebalancing, or other members own all partitions."
        return Headline(state="busy", title="No partition is assigned to this member", sub=sub)
    until = group.delivered_until if is_done and _is_current(live) else None
    return _delivered(snapshot, until) or _delivering(snapshot, live)


def _is_current(live: Live) -> bool:
    """Return whether a group member has recently seen the ends of all its partitions, and settled up to them."""
    until = live.group.delivered_until if live.group else None
    return until is not None and live.at - until < _FRESH_S


def _delivered(snapshot: Snapshot, until: float | None, subject: str = "Everything") -> Headline | None:
    """Return the headline if everything up to a time is delivered; otherwise None."""
    open_bytes = snapshot.open_line_bytes
    if until is None and not open_bytes:
        return None
    if counts := _unaccepted(snapshot):
        title = "None of the records read was accepted"
        return Headline(state="warn", title=title, detail=f": {counts}", is_open_line=bool(open_bytes))
    exceptions = _exceptions(snapshot)
    state: State = "warn" if exceptions else "good"
    exceptions += _all_duplicates(snapshot)
    if open_bytes:
        title = f"{subject} up to the last complete line is delivered"
        detail = f"{exceptions}; {size(open_bytes)} belong to an incomplete line"
        return Headline(state=state, title=title, detail=detail, is_open_line=True)
    place = " to this member's partitions" if _group(snapshot) else ""
    return Headline(state=state, title=f"{subject} written{place} is delivered", until=until, detail=exceptions)


def _delivering(snapshot: Snapshot, live: Live) -> Headline:
    left, rate, total = live.lag_bytes, live.settled_bytes_per_second, live.total_bytes
    is_settling, is_current = rate > 0, True
    if live.group is not None:
        left, rate, is_current = live.group.lag_records, live.accepted_per_second, _is_current(live)
    oldest = live.oldest_unsettled_seconds or 0.0
    sub = _waiting(live)
    if not is_settling and oldest >= _NO_PROGRESS_S:
        return Headline(state="warn", title=_NO_PROGRESS, detail=f" for {span(oldest)}", sub=sub)
    if is_current and oldest < _FRESH_S and rate > 0 and left / rate < _FRESH_S:
        exceptions = _exceptions(snapshot)
        detail = f", delivering {live.accepted_per_second:,.0f}/s{exceptions}"
        state: State = "warn" if exceptions or _unaccepted(snapshot) else "good"
        return Headline(state=state, title=_UP_TO_DATE, detail=detail, sub=sub)
    wait = f", about {span(left / rate)} to go" if left and rate > 0 else ""
    if live.group is not None:
        behind = f", {live.behind} behind{wait}" if live.behind else ""
        return Headline(state="busy", title="Delivering", detail=behind, sub=sub)
    percent = min(100, int(100 * live.settled_bytes / total)) if total else 100
    behind = f"{size(left)} behind" if total is None else f"{percent} % of {size(total)}"
    return Headline(state="busy", title="Delivering", detail=f", {behind}{wait}", sub=sub)


def _waiting(live: Live) -> str:
    oldest = live.oldest_unsettled_seconds
    since = f", the oldest for {span(oldest)}" if live.pending and oldest is not None else ""
    if live.group is None:
        return f"Waiting: {several(live.pending, 'record')} and {size(live.lag_bytes)}{since}."
    return f"Waiting: {several(max(live.pending, live.group.lag_records), 'record')}{since}."


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
