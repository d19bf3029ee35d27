"""The intake operation of the sandbox: takes a batch apart and judges every event by rules of its own."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from shipper import wire
from shipper.sandbox.gateway import Refusal
from shipper.sandbox.store import NewEvent, marketing_source_of

# Written apart from the shipper's own rules, on purpose: what one side gets wrong the other is to notice.
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMS: Final = {
    "EventId": (
        re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        "must be a UUID in canonical form, lower-case 8-4-4-4-12",
    ),
    "IP": (re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}"), "must be an IPv4 address in dotted-decimal form"),
    "Timestamp": (
        re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"),
        "must be a UTC date-time of the form YYYY-MM-DDThh:mm:ssZ",
    ),
    "BTag": (re.compile(r"[0-9]+_[0-9A-Fa-f]{32}"), "must be digits, an underscore and 32 hexadecimal characters"),
}
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# msgspec names the field at the end ("- at `$.IP`"), or in the middle if the field itself is missing or unknown.
_NAMED_FIELD: Final = re.compile(r"field `([^`]*)`|`\$\.(\w+)")


class RejectedEvent(Struct, frozen=True):
    """One event that was refused: its place in the batch, its id as far as it has one, and why."""

    index: int
    EventId: str
    field: str
    message: str


class Intake(NamedTuple):
    """A batch, sorted: every event of the request is in one of the two lists."""

    events: list[NewEvent]
    rejected: list[RejectedEvent]


class _Envelope(Struct, frozen=True):
    EventType: str
    events: list[Raw]


class _Identified(Struct, frozen=True):
    EventId: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_BATCH: Final = msgspec.json.Decoder(wire.ActivityBatch)
_EVENT: Final = msgspec.json.Decoder(wire.ActivityEvent)
_IDENTIFIED: Final = msgspec.json.Decoder(_Identified)


def read_batch(body: bytes) -> Intake | Refusal:
    """
    Take the body of an intake request apart.

    The usual batch is decoded at one go; only if that fails are its events judged one by one.

    Args:
        body: The request's body as it came.
    Returns:
        The events, or a refusal (400) of the whole request if it is not a batch of acquisitions.
    """
    try:
        envelope = _ENVELOPE.decode(body)
    except _UNREADABLE as error:
        return Refusal(400, f"The body is not a batch of events: {error}")
    if envelope.EventType != wire.EVENT_TYPE:
        return Refusal(400, f"EventType must be {wire.EVENT_TYPE}.")
    try:
        events = _BATCH.decode(body).events
    except _UNREADABLE:
        return _read_singly(envelope.events)
    if any(map(_form_fault, events)):
        return _read_singly(envelope.events)
    return Intake(list(map(_new_event, events, envelope.events)), [])


def _read_singly(raws: list[Raw]) -> Intake:
    intake = Intake([], [])
    for index, raw in enumerate(raws):
        try:
            event = _EVENT.decode(raw)
        except _UNREADABLE as error:
            field, message = _named_field(error), str(error)
        else:
            fault = _form_fault(event)
            if fault is None:
                intake.events.append(_new_event(event, raw))
                continue
            field, message = fault
        intake.rejected.append(RejectedEvent(index, _event_id_of(raw), field, message))
    return intake


def _form_fault(event: wire.ActivityEvent) -> tuple[str, str] | None:
    """Find the first field whose value has the wrong form; None if there is no such field."""
    for field, (pattern, message) in _FORMS.items():
        if pattern.fullmatch(getattr(event, field)) is None:
            return field, message
    try:
        datetime.fromisoformat(event.Timestamp)
    except ValueError:
        return "Timestamp", "must be an instant that exists"
    return None


def _new_event(event: wire.ActivityEvent, raw: Raw) -> NewEvent:
    return NewEvent(event.EventId, event.Timestamp[:10], event.BrandID, marketing_source_of(event.BTag), bytes(raw))


def _event_id_of(raw: Raw) -> str:
    try:
        return _IDENTIFIED.decode(raw).EventId
    except _UNREADABLE:
        return ""


def _named_field(error: Exception) -> str:
    found = _NAMED_FIELD.search(str(error))
    return (found[1] or found[2]) if found else ""
