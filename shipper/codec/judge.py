"""
The judge: tells good records from bad ones, all at once if it can, and names the rule that a bad one breaks.

Every record passes the same decoder and the same column checks, so the verdict does not depend on the path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import Any, Final, NamedTuple, cast

import msgspec

from shipper.codec.columns import Columns
from shipper.codec.rules import (
    ANY_TIME,
    FIELD_RULES,
    FROM_THE_FUTURE,
    MESSAGES,
    column_checks,
    event_type,
    may_repeat_keys,
    repeats_key,
)
from shipper.config.settings import RecordsSettings
from shipper.model.records import Rejection

SEPARATOR: Final = b",null,\n"
NO_FAULTS: Final[Mapping[str, str]] = {}

IS_MISSING: Final = " is missing"

_FIELD_IN_MESSAGE: Final = re.compile(r"`\$\.(\w+)`$|required field `(\w+)`$")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `[^`]*`)?\Z", re.DOTALL)
_EVENT_ID: Final = re.compile(rb'"EventId"\s*:\s*"([0-9A-Fa-f-]{36})"')
_CONSUMER_ID: Final = re.compile(rb'"ConsumerID"\s*:\s*"?([0-9]{1,30})\b')
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_decode: Final = msgspec.json.Decoder().decode
decode_raw: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_skip: Final = msgspec.json.Decoder(msgspec.Raw).decode


class Records(NamedTuple):
    """
    Records that are not blank, one item each in every list.

    Attributes:
        offsets: In the stream.
        raws: As they came, without their separators.
        wires: As they are to be sent, should they keep the rules.
    """

    offsets: list[int]
    raws: list[bytes]
    wires: list[bytes]

    def only(self, indexes: Sequence[int]) -> Records:
        """Pick some of them."""
        offsets, raws, wires = self
        return Records(
            [offsets[index] for index in indexes],
            [raws[index] for index in indexes],
            [wires[index] for index in indexes],
        )

    def refused(self, index: int, rule: str, message: str = "", faults: Mapping[str, str] = NO_FAULTS) -> Rejection:
        """Refuse one of them; without a message, with the rule's own words."""
        raw, offset = self.raws[index], self.offsets[index]
        event_id, consumer_id = _EVENT_ID.search(self.wires[index]), _CONSUMER_ID.search(self.wires[index])
        return Rejection(
            start_offset=offset,
            end_offset=offset + len(raw),
            rule=rule,
            message=message or MESSAGES[rule],
            raw=raw,
            event_id=event_id[1].decode() if event_id else "",
            consumer_id=consumer_id[1].decode() if consumer_id else "",
            faults=faults,
        )


class Parted(NamedTuple):
    """
    The good ones of some records.

    Attributes:
        lines: As they are to be sent, joined by newlines.
        starts, ends: In the stream, of each as it came.
    """

    lines: bytes
    columns: Columns
    starts: list[int]
    ends: list[int]


class Judge:
    """
    Judges by the rules of the wire form, as far as the settings have not relaxed them.

    The fast way decodes many lines in one call. `,null,` stands behind each line, and the lot is decoded as one JSON
    array of events and nulls. A null cannot stand inside an object, and the newline is kept, so it cannot stand inside
    a string: an object over two lines fails, and two objects on one line give a wrong count. So each line is proven to
    be one event by itself, and any lines may be joined by commas into a body. Only an array could reach over two lines,
    and no field of an event is one; where unknown fields are kept and there may be one, each line is decoded alone.
    """

    def __init__(self, settings: RecordsSettings) -> None:
        self._checks = column_checks(settings.relax)
        self._is_strict = settings.mode == "strict"  # otherwise such a record has been rewritten
        self._keeps_unknown = settings.unknown_fields == "keep"
        event = event_type(
            relaxed=settings.relax,
            statuses=settings.allowed_statuses,
            keeps_unknown=self._keeps_unknown,
        )
        self._decode_array = msgspec.json.Decoder(list[event | None]).decode  # type: ignore[valid-type]
        self._decode_line = msgspec.json.Decoder(event).decode
        self._types = {field.name: field.type for field in msgspec.structs.fields(event)}

    def validate(self, array: bytes, count: int, latest: str) -> Columns | None:
        """
        Check the array made of `count` lines; None if anything at all is wrong with any of them.

        Each line gives at least one item, each separator one null, and one null ends the array. So exactly
        `2 * count + 1` items means exactly one item a line.

        Args:
            array: `[line,null,\\nline,null,\\n ... null]`.
            latest: Last instant that a Timestamp may name.
        """
        try:
            if self._keeps_unknown:
                array.decode()  # the decoder does not look into the fields that it passes over
            if self._keeps_unknown and may_reach_over_lines(array, count + 1):
                columns = Columns.of(list(map(self._decode_line, _lines_of(array))))
            else:
                items = self._decode_array(array)
                columns = Columns.of(items[:-1:2])
                if len(items) != 2 * count + 1:
                    return None
        except (*DECODE_ERRORS, AttributeError):  # AttributeError: a line that reads `null`
            return None
        for check in self._checks:
            if not check.is_good(check.column_of(columns), latest):
                return None
        if may_repeat_keys(array, count) and any(
            may_repeat_keys(line, 1) and repeats_key(line) for line in _lines_of(array)
        ):
            return None
        return columns

    def part(self, records: Records, latest: str, rejections: list[Rejection]) -> Parted:
        """Part the good records from the bad ones, which are added to `rejections`."""
        good: list[bytes] = []
        starts: list[int] = []
        ends: list[int] = []
        events: list[Any] = []
        waiting = [(0, len(records.wires))]
        while waiting:
            start, end = waiting.pop()
            wires = records.wires[start:end]
            valid = wires and self.validate(b"[" + SEPARATOR.join(wires) + SEPARATOR + b"null]", len(wires), latest)
            if valid:
                good += wires
                starts += records.offsets[start:end]
                ends += map(add, records.offsets[start:end], map(len, records.raws[start:end]))
                events += valid.events
            elif len(wires) == 1:
                rejections.append(self._explain(records, start, latest))
            elif wires:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
        return Parted(b"\n".join(good), Columns.of(events), starts, ends)

    def _explain(self, records: Records, index: int, latest: str) -> Rejection:
        """Find the rules that a record breaks."""
        wire = records.wires[index]
        try:
            wire.decode()
            event = self._decode_line(wire)
        except UnicodeDecodeError:
            return records.refused(index, "encoding")
        except msgspec.ValidationError as error:
            # The decoder stops at the first fault, and may not have come to what makes it no JSON at all.
            if not _is_json(wire):
                return records.refused(index, "json")
            if self._is_strict and repeats_key(wire):
                return records.refused(index, "repeated_key")
            return self._refused(records, index, latest, *_rule_of(str(error)))
        except DECODE_ERRORS:
            return records.refused(index, "json")
        if self._is_strict and repeats_key(wire):  # before the rules of fields: which value is meant is not known
            return records.refused(index, "repeated_key")
        columns = Columns.of([event])
        for check in self._checks:
            if not check.is_good(check.column_of(columns), latest):
                is_late = check.rule == "timestamp" and check.is_good(check.column_of(columns), ANY_TIME)
                return self._refused(records, index, latest, check.rule, FROM_THE_FUTURE if is_late else "")
        raise AssertionError("a line was refused that breaks no rule")

    def _refused(self, records: Records, index: int, latest: str, rule: str, message: str) -> Rejection:
        """Refuse a record by the rule that was found first; its message names all others that the record breaks."""
        faults = {rule: message or MESSAGES[rule]}
        if (document := document_in(records.wires[index])) is not None:
            faults |= {other: words for other, words in self._faults_in(document, latest) if other != rule}
        return records.refused(index, rule, _told(faults), faults if len(faults) > 1 else NO_FAULTS)

    def _faults_in(self, document: Mapping[str, object], latest: str) -> Iterator[tuple[str, str]]:
        for field, rule in FIELD_RULES.items():
            if field not in document:
                yield rule, f"{field}{IS_MISSING}"
            elif not self._is_kept(field, document[field], latest):
                yield rule, MESSAGES[rule]
        unknown = [name for name in document if name not in FIELD_RULES]
        if unknown and not self._keeps_unknown:
            yield "unknown_field", _unknown_field(unknown)

    def _is_kept(self, field: str, value: object, latest: str) -> bool:
        try:
            msgspec.convert(value, self._types[field])
        except msgspec.ValidationError:
            return False
        checks = (check.is_good for check in self._checks if check.rule == FIELD_RULES[field])
        return all(is_good([cast(str, value)], latest) for is_good in checks)


def may_reach_over_lines(data: bytes, brackets: int) -> bool:
    """
    Return whether a value may go on behind a `SEPARATOR`; False is certain if every record decodes as an object.

    Args:
        brackets: How many brackets and braces open if no record has one within it.
    """
    return data.count(b"{") + data.count(b"[") != brackets


def _lines_of(array: bytes) -> list[bytes]:
    """Take the array apart again: no line has a newline in it."""
    return array[1 : -len(SEPARATOR + b"null]")].split(SEPARATOR)


def is_from_the_future(rejection: Rejection) -> bool:
    """Return whether a record was refused because its Timestamp is too far ahead of this machine's clock."""
    return rejection.rule == "timestamp" and rejection.message == FROM_THE_FUTURE


def document_in(line: bytes) -> dict[str, Any] | None:
    """
    Decode a record; None if it is no JSON object.

    A value that only JSON can hold, such as 1e400, stays as it is, a `Raw`.
    """
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


def _is_json(line: bytes) -> bool:
    """Return whether it is JSON, also if its numbers are out of range here."""
    try:
        _skip(line)
    except DECODE_ERRORS:
        return False
    return True


def _told(faults: Mapping[str, str]) -> str:
    """Put what is wrong into one message; the fields that are missing together."""
    missing = [words.removesuffix(IS_MISSING) for words in faults.values() if words.endswith(IS_MISSING)]
    others = [words for words in faults.values() if not words.endswith(IS_MISSING)]
    if len(missing) > 1:
        others.insert(0, f"{', '.join(missing[:-1])} and {missing[-1]} are missing")
    elif missing:
        others.insert(0, f"{missing[0]}{IS_MISSING}")
    return "; ".join(others)


def _unknown_field(names: Sequence[str]) -> str:
    """Name unknown fields by their lengths alone: whoever writes values in their place must not find them in a log."""
    if len(names) > 1:
        return f"the object has {len(names):,} fields that the wire form does not have"
    return f"{MESSAGES['unknown_field']} (its name has {len(names[0]):,} characters)"


def _rule_of(message: str) -> tuple[str, str]:
    """Translate the decoder's message into a rule and our words; the decoder's may quote a value."""
    if found := _UNKNOWN_FIELD.match(message):
        return "unknown_field", _unknown_field([found[1]])
    if found := _FIELD_IN_MESSAGE.search(message):
        if found[2]:
            return FIELD_RULES[found[2]], f"{found[2]}{IS_MISSING}"
        return FIELD_RULES[found[1]], ""
    return "json", ""
