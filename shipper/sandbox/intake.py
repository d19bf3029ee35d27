"""The sandbox's intake operation: parses a batch and validates every event."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from shipper.model import wire
from shipper.sandbox.gateway import Refusal
from shipper.sandbox.iso import COUNTRIES, CURRENCIES, US_STATES

# Deliberately independent of the shipper's rules, so that a mistake in either is noticed.
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
_ALL_FORMS: Final = re.compile("\n".join(form for form, _ in _FORMS.values()))  # no pattern matches a newline
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# msgspec names the field at the end ("- at `$.IP`"), or in the middle if it is missing or unknown.
_NAMED_FIELD: Final = re.compile(r"field `([^`]*)`|`\$\.(\w+)")


class RejectedEvent(Struct, frozen=True):
    """A rejected event: its index in the batch, its EventId or "", and the reason."""

    index: int
    EventId: str
    field: str
    message: str


class BrokenRule(NamedTuple):
    """The first field of an event that breaks a rule, and the reason."""

    field: str
    message: str


REPEATED: Final = BrokenRule("EventId", "has been received before")


class Intake(NamedTuple):
    """The accepted and rejected events of a batch; the indexes are those of the request."""

    accepted: dict[int, tuple[wire.ActivityEvent, Raw]]
    rejected: list[RejectedEvent]


class _Envelope(Struct, frozen=True):
    EventType: str
    events: list[Raw]


class _Identified(Struct, frozen=True):
    EventId: str


ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
EVENT: Final = msgspec.json.Decoder(wire.ActivityEvent)
_INSTANT: Final = msgspec.json.Decoder(datetime)
_IDENTIFIED: Final = msgspec.json.Decoder(_Identified)

Judge = Callable[[wire.ActivityEvent], BrokenRule | None]


def read_batch(
    body: bytes, *, is_strict: bool, now_seconds: float, is_known: Callable[[str], bool] | None = None
) -> Intake | Refusal:
    """
    Parse the body of an intake request, and validate each event.

    Args:
        is_strict: Whether to enforce the public rules, too.
        is_known: Returns whether an EventId was received before; None = accept repeated EventIds.
    Returns:
        The events, or the refusal of the whole request if it is not a valid batch.
    """
    try:
        envelope = ENVELOPE.decode(body)
    except _UNREADABLE as error:
        return Refusal(400, f"The body is not a batch of events: {error}")
    if envelope.EventType != wire.EVENT_TYPE:
        return Refusal(400, f"EventType must be {wire.EVENT_TYPE}.")
    now = f"{datetime.fromtimestamp(now_seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    judges: list[Judge] = [broken_form]
    if is_strict:
        judges.append(partial(broken_public_rule, now=now))
    if is_known is not None:
        judges.append(_judge_of_repeats(is_known))
    intake = Intake({}, [])
    for index, raw in enumerate(envelope.events):
        try:
            event = EVENT.decode(raw)
        except _UNREADABLE as error:
            broken: BrokenRule | None = BrokenRule(_named_field(error), str(error))
        else:
            broken = next(filter(None, (judge(event) for judge in judges)), None)
        if broken is None:
            intake.accepted[index] = event, raw
        else:
            intake.rejected.append(RejectedEvent(index, _event_id_of(raw), broken.field, broken.message))
    return (_public_refusal([event for event, _ in intake.accepted.values()]) if is_strict else None) or intake


def _judge_of_repeats(is_known: Callable[[str], bool]) -> Judge:
    """Return a judge that rejects an EventId received in an earlier request or earlier in this one."""
    seen: set[str] = set()

    def judge(event: wire.ActivityEvent) -> BrokenRule | None:
        if is_known(event.EventId) or event.EventId in seen:
            return REPEATED
        seen.add(event.EventId)
        return None

    return judge


def broken_form(event: wire.ActivityEvent) -> BrokenRule | None:
    """Return the first field whose value does not have the documented form."""
    if _ALL_FORMS.fullmatch(f"{event.EventId}\n{event.IP}\n{event.Timestamp}\n{event.BTag}") is None:
        for field, (form, message) in _FORMS.items():
            if re.fullmatch(form, getattr(event, field)) is None:
                return BrokenRule(field, message)
    try:
        _INSTANT.decode(f'"{event.Timestamp}"')
    except msgspec.ValidationError:
        return BrokenRule("Timestamp", "must be a valid date and time")
    return None


def broken_public_rule(event: wire.ActivityEvent, *, now: str) -> BrokenRule | None:
    """Return the first field that breaks a rule that is publicly known but not documented by the service."""
    if event.Timestamp > now:
        return BrokenRule("Timestamp", "must not be in the future")
    if event.ConsumerCountry not in COUNTRIES:
        return BrokenRule("ConsumerCountry", "must be an ISO 3166-1 country code")
    if event.ConsumerCurrencyID not in CURRENCIES:
        return BrokenRule("ConsumerCurrencyID", "must be an ISO 4217 currency code")
    if event.ConsumerCountry != "US":
        return BrokenRule("ConsumerState", "must be empty outside the US") if event.ConsumerState else None
    if event.ConsumerState not in US_STATES:
        return BrokenRule("ConsumerState", "must be a US state, because the country is US")
    return None


def _public_refusal(events: list[wire.ActivityEvent]) -> Refusal | None:
    """Refuse a batch with a duplicate EventId or ConsumerID; other requests are not considered."""
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
    match = _NAMED_FIELD.search(str(error))
    return (match[1] or match[2]) if match else ""
