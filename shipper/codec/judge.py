"""
The judge: separates valid records from invalid ones, and reports the rules that the latter break.

Every record passes the same decoder and the same column checks, so the result does not depend on the path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from shipper.codec.rules import (
    ANY_TIME,
    FIELD_RULES,
    FUTURE_TIMESTAMP,
    MESSAGES,
    Columns,
    column_checks,
    event_type,
    may_repeat_keys,
    repeats_key,
    why_not_real,
)
from shipper.config.settings import RecordsSettings
from shipper.model.records import Rejection, consumer_id_of
from shipper.model.wire import EVENT_ID_LENGTH

IS_MISSING: Final = " is missing"
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_NO_FAULTS: Final[Mapping[str, str]] = {}
_EVENT_ID: Final = re.compile(rb'"EventId"\s*:\s*"([0-9A-Fa-f-]{%d})"' % EVENT_ID_LENGTH)

_decode: Final = msgspec.json.Decoder().decode
decode_raw: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Records(NamedTuple):
    """Nonblank records, one item per record in each list."""

    offsets: list[int]
    raws: list[bytes]  # without separators
    wires: list[bytes]

    def select(self, indexes: Sequence[int]) -> Records:
        return Records._make([column[index] for index in indexes] for column in self)

    def reject(self, faults: Mapping[int, tuple[str, str]], rejections: list[Rejection]) -> Records:
        """Reject records by index, with a rule and a message, which may be empty; return the others."""
        if not faults:
            return self
        rejections += [self.rejection(index, rule, message) for index, (rule, message) in faults.items()]
        return self.select([index for index in range(len(self.raws)) if index not in faults])

    def rejection(self, index: int, rule: str, message: str = "", faults: Mapping[str, str] = _NO_FAULTS) -> Rejection:
        """Return the rejection of a record; the default message is that of the rule."""
        raw, offset = self.raws[index], self.offsets[index]
        event_id = _EVENT_ID.search(self.wires[index])
        return Rejection(
            start_offset=offset,
            end_offset=offset + len(raw),
            rule=rule,
            message=message or MESSAGES[rule],
            raw=raw,
            event_id=event_id[1].decode() if event_id else "",
            consumer_id=consumer_id_of(self.wires[index]),
            faults=faults,
        )


class Judge:
    """Applies the rules of the wire form, except relaxed ones."""

    def __init__(self, settings: RecordsSettings) -> None:
        self._checks = column_checks(settings.relax)
        self._is_strict = settings.mode == "strict"  # otherwise records with repeated keys have been rewritten
        self._has_zone = not self._is_strict and settings.assume_timezone is not None
        self._keeps_unknown = settings.unknown_fields == "keep"
        event = event_type(
            relaxed=settings.relax, statuses=settings.allowed_statuses, keeps_unknown=self._keeps_unknown
        )
        self._decode = msgspec.json.Decoder(event).decode
        self._types = {field.name: field.type for field in msgspec.structs.fields(event)}

    def validate(self, lines: Sequence[bytes], latest: str) -> Columns | None:
        """Check lines together, with times up to `latest`; return None if any of them is invalid."""
        text = b"".join(lines)
        try:
            if self._keeps_unknown:
                text.decode()  # the decoder does not check the fields it skips
            columns = Columns.of(list(map(self._decode, lines)))
        except DECODE_ERRORS:
            return None
        for check in self._checks:
            if not check.is_good(check.column_of(columns), latest):
                return None
        if may_repeat_keys(text, len(lines)) and any(may_repeat_keys(line, 1) and repeats_key(line) for line in lines):
            return None
        return columns

    def split(self, records: Records, latest: str, rejections: list[Rejection]) -> tuple[Records, Columns]:
        """Return the valid records; add the invalid ones to `rejections`."""
        good: list[int] = []
        events: list[Any] = []
        pending = [(0, len(records.wires))]
        while pending:
            start, end = pending.pop()
            wires = records.wires[start:end]
            columns = self.validate(wires, latest) if wires else None
            if columns:
                good += range(start, end)
                events += columns.events
            elif len(wires) == 1:
                rejections.append(self._explain(records, start, latest))
            elif wires:
                middle = (start + end) // 2
                pending += [(middle, end), (start, middle)]
        return records.select(good), Columns.of(events)

    def _explain(self, records: Records, index: int, latest: str) -> Rejection:
        """Return the rejection of a record, with all rules that it breaks; its rule is the first in field order."""
        wire = records.wires[index]
        try:
            wire.decode()
            self._decode(wire)
        except UnicodeDecodeError:
            return records.rejection(index, "encoding")
        except msgspec.ValidationError:
            pass  # the decoder reports only the first error
        except DECODE_ERRORS:
            return records.rejection(index, "json")
        document = document_in(wire)
        if document is None:
            return records.rejection(index, "json")
        if self._is_strict and repeats_key(wire):  # first, as it is unknown which value is meant
            return records.rejection(index, "repeated_key")
        faults = dict(self._faults_in(document, latest))
        return records.rejection(
            index, next(iter(faults)), _join_messages(faults), faults if len(faults) > 1 else _NO_FAULTS
        )

    def _faults_in(self, document: Mapping[str, object], latest: str) -> Iterator[tuple[str, str]]:
        for field, rule in FIELD_RULES.items():
            if field not in document:
                yield rule, f"{field}{IS_MISSING}"
            elif not self.is_good(field, document[field], latest):
                yield rule, self._timestamp_message(document[field]) if rule == "timestamp" else MESSAGES[rule]
        unknown = [name for name in document if name not in FIELD_RULES]
        if unknown and not self._keeps_unknown:
            # Names are not shown, as they may be misplaced values.
            names = (
                f"{MESSAGES['unknown_field']} (its name has {len(unknown[0]):,} characters)"
                if len(unknown) == 1
                else f"the object has {len(unknown):,} unknown fields"
            )
            yield "unknown_field", names

    def _timestamp_message(self, value: object) -> str:
        if self.is_good("Timestamp", value, ANY_TIME):
            return FUTURE_TIMESTAMP
        return why_not_real(value, has_zone=self._has_zone) or MESSAGES["timestamp"]

    def is_good(self, field: str, value: object, latest: str) -> bool:
        try:
            msgspec.convert(value, self._types[field])
        except msgspec.ValidationError:
            return False
        checks = (check.is_good for check in self._checks if check.rule == FIELD_RULES[field])
        return all(is_good([cast(str, value)], latest) for is_good in checks)


def is_future_timestamp(rejection: Rejection) -> bool:
    """Return whether a record was rejected because its Timestamp is too far ahead of this machine's clock."""
    return rejection.rule == "timestamp" and rejection.message == FUTURE_TIMESTAMP


def document_in(line: bytes) -> dict[str, Any] | None:
    """Decode a record; return None if it is not a JSON object. A value such as 1e400 stays a `Raw`."""
    try:
        line.decode()
        return {name: _value(raw) for name, raw in decode_raw(line).items()}
    except DECODE_ERRORS:
        return None


def _value(raw: msgspec.Raw) -> Any:
    try:
        return _decode(raw)
    except DECODE_ERRORS:
        return raw


def _join_messages(faults: Mapping[str, str]) -> str:
    """Join messages, combining those about missing fields."""
    missing = [message.removesuffix(IS_MISSING) for message in faults.values() if message.endswith(IS_MISSING)]
    others = [message for message in faults.values() if not message.endswith(IS_MISSING)]
    if len(missing) > 1:
        others.insert(0, f"{', '.join(missing[:-1])} and {missing[-1]} are missing")
    elif missing:
        others.insert(0, f"{missing[0]}{IS_MISSING}")
    return "; ".join(others)
