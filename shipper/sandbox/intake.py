"""The intake operation of the sandbox: takes a batch apart and judges every event by rules of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from shipper.model import wire
from shipper.sandbox.gateway import Refusal
from shipper.sandbox.iso import COUNTRIES, CURRENCIES, US_STATES

# Written apart from the shipper's own rules, on purpose: what one side gets wrong the other is to notice.
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMS: Final = {
    "EventId": (
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "must be a UUID in canonical form, lower-case 8-4-4-4-12",
    ),
    "IP": (rf"{_OCTET}(?:\.{_OCTET}){{3}}", "must be an IPv4 address in dotted-decimal form"),
    "Timestamp": (
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z",
        "must be a UTC date-time of the form YYYY-MM-DDThh:mm:ssZ",
    ),
    "BTag": (r"[0-9]+_[0-9A-Fa-f]{32}", "must be digits, an underscore and 32 hexadecimal characters"),
}
_PATTERNS: Final = {field: (re.compile(form), message) for field, (form, message) in _FORMS.items()}
# A column is the values of one field, each with a newline behind it.
_COLUMNS: Final = [(attrgetter(field), re.compile(f"(?:{form}\n)*")) for field, (form, _) in _FORMS.items()]
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# msgspec names the field at the end ("- at `$.IP`"), or in the middle if the field itself is missing or unknown.
_NAMED_FIELD: Final = re.compile(r"field `([^`]*)`|`\$\.(\w+)")


class RejectedEvent(Struct, frozen=True):
    """One event that was refused: its place in the batch, its id as far as it has one, and why."""

    index: int
    EventId: str
    field: str
    message: str


class BrokenRule(NamedTuple):
    """What is wrong with an event: its first field that breaks a rule, and the rule."""

    field: str
    message: str


REPEATED: Final = BrokenRule("EventId", "has been received before")


class Intake(NamedTuple):
    """
    A batch, sorted: every event of the request is in one of the two lists.

    Attributes:
        body: A batch as JSON that holds `events` and nothing else.
        indexes: Where each of `events` stood in the request.
    """

    body: bytes
    events: list[wire.ActivityEvent]
    indexes: Sequence[int]
    rejected: list[RejectedEvent]


class _Envelope(Struct, frozen=True):
    EventType: str
    events: list[Raw]


class _Identified(Struct, frozen=True):
    EventId: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_BATCH: Final = msgspec.json.Decoder(wire.ActivityBatch)
_EVENT: Final = msgspec.json.Decoder(wire.ActivityEvent)
_INSTANTS: Final = msgspec.json.Decoder(list[datetime])
_IDENTIFIED: Final = msgspec.json.Decoder(_Identified)

Judge = Callable[[wire.ActivityEvent], BrokenRule | None]


def read_batch(
    body: bytes, *, is_strict: bool, now_seconds: float, is_known: Callable[[str], bool] | None = None
) -> Intake | Refusal:
    """
    Parse the body of an intake request.

    The usual batch is decoded and checked column by column; only if that fails are its events judged one by one.

    Args:
        body: The request's body as it came.
        is_strict: Hold the public rules, too.
        now_seconds: The service's time, seconds since the epoch.
        is_known: Tells whether an EventId was received before, if that is a fault.
    Returns:
        The events, or a refusal (400) of the whole request if it is not a batch of acquisitions.
    """
    try:
        batch = _BATCH.decode(body)
    except _UNREADABLE:
        batch = None
    now = f"{datetime.fromtimestamp(now_seconds, UTC):%Y-%m-%dT%H:%M:%SZ}" if is_strict else ""
    if (
        batch is not None
        and batch.EventType == wire.EVENT_TYPE
        and _have_the_form(batch.events)
        and not any(judge(event) for judge in _judges(now, is_known) for event in batch.events)
    ):
        intake = Intake(body, batch.events, range(len(batch.events)), [])
        return (_public_refusal(intake.events) if is_strict else None) or intake
    return _read_singly(body, [broken_form, *_judges(now, is_known)], is_strict=is_strict)


def _judges(now: str, is_known: Callable[[str], bool] | None) -> list[Judge]:
    """List what is asked beyond the documented form; for one pass over a batch."""
    judges: list[Judge] = [partial(broken_public_rule, now=now)] if now else []
    return [*judges, _judge_of_repeats(is_known)] if is_known is not None else judges


def _judge_of_repeats(is_known: Callable[[str], bool]) -> Judge:
    """Refuse what was received before, in another request or in front of it in this one."""
    seen: dict[str, wire.ActivityEvent] = {}

    def judge(event: wire.ActivityEvent) -> BrokenRule | None:
        return REPEATED if is_known(event.EventId) or seen.setdefault(event.EventId, event) is not event else None

    return judge


def _read_singly(body: bytes, judges: Sequence[Judge], *, is_strict: bool) -> Intake | Refusal:
    try:
        envelope = _ENVELOPE.decode(body)
    except _UNREADABLE as error:
        return Refusal(400, f"The body is not a batch of events: {error}")
    if envelope.EventType != wire.EVENT_TYPE:
        return Refusal(400, f"EventType must be {wire.EVENT_TYPE}.")
    events: list[wire.ActivityEvent] = []
    indexes: list[int] = []
    rejected: list[RejectedEvent] = []
    for index, raw in enumerate(envelope.events):
        try:
            event = _EVENT.decode(raw)
        except _UNREADABLE as error:
            broken: BrokenRule | None = BrokenRule(_named_field(error), str(error))
        else:
            broken = next(filter(None, (judge(event) for judge in judges)), None)
        if broken is None:
            events.append(event)
            indexes.append(index)
        else:
            rejected.append(RejectedEvent(index, _event_id_of(raw), broken.field, broken.message))
    taken = wire.BODY_HEAD + b",".join(bytes(envelope.events[index]) for index in indexes) + wire.BODY_TAIL
    return (_public_refusal(events) if is_strict else None) or Intake(taken, events, indexes, rejected)


def _have_the_form(events: list[wire.ActivityEvent]) -> bool:
    if not events:
        return True
    for value_of, column in _COLUMNS:
        text = "\n".join(map(value_of, events)) + "\n"
        if text.count("\n") != len(events) or column.fullmatch(text) is None:
            return False
    try:
        _INSTANTS.decode('["' + '","'.join([event.Timestamp for event in events]) + '"]')
    except msgspec.ValidationError:
        return False
    return True


def broken_form(event: wire.ActivityEvent) -> BrokenRule | None:
    """Find the first field whose value has not the documented form."""
    for field, (pattern, message) in _PATTERNS.items():
        if pattern.fullmatch(getattr(event, field)) is None:
            return BrokenRule(field, message)
    try:
        _INSTANTS.decode(f'["{event.Timestamp}"]')
    except msgspec.ValidationError:
        return BrokenRule("Timestamp", "must be an instant that exists")
    return None


def broken_public_rule(event: wire.ActivityEvent, *, now: str) -> BrokenRule | None:
    """
    Find the first field that breaks a rule which is publicly known, though not documented by the service.

    Args:
        now: The service's time in the form of a Timestamp.
    """
    if event.Timestamp > now:
        return BrokenRule("Timestamp", "must not be in the future")
    if event.ConsumerCountry not in COUNTRIES:
        return BrokenRule("ConsumerCountry", "must be a country of ISO 3166-1")
    if event.ConsumerCurrencyID not in CURRENCIES:
        return BrokenRule("ConsumerCurrencyID", "must be a currency of ISO 4217")
    if event.ConsumerCountry != "US":
        return BrokenRule("ConsumerState", "must be empty outside the US") if event.ConsumerState else None
    if event.ConsumerState not in US_STATES:
        return BrokenRule("ConsumerState", "must be a state of the US, as the country is US")
    return None


def _public_refusal(events: list[wire.ActivityEvent]) -> Refusal | None:
    """Refuse a batch that names an event or a customer twice; a repeat of another request's is no concern here."""
    for field in ("EventId", "ConsumerID"):
        if len(set(map(attrgetter(field), events))) < len(events):
            return Refusal(400, f"Two events of the batch have the same {field}.")
    return None


def _event_id_of(raw: Raw) -> str:
    try:
        return _IDENTIFIED.decode(raw).EventId
    except _UNREADABLE:
        return ""


def _named_field(error: Exception) -> str:
    found = _NAMED_FIELD.search(str(error))
    return (found[1] or found[2]) if found else ""
