"""
From what a producer writes to the wire form: normalisation and what becomes of unknown fields.

Records are decoded together and rewritten column by column. Whatever cannot be rewritten is passed on as it is: the
rules judge the result, so rewriting can correct a record and never lets a bad one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha1
from itertools import compress
from operator import and_, attrgetter, eq
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from shipper.codec.judge import DECODE_ERRORS, SEPARATOR, decode_raw, document_in, may_reach_over_lines
from shipper.codec.mapping import NOTHING, Document, SourceMapping
from shipper.codec.normalize import ABSENT, Column, normalizers
from shipper.codec.rules import may_repeat_keys, repeats_key
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings
from shipper.model.wire import EVENT_TYPE, ActivityEvent

DERIVED_FROM: Final = ("BrandID", "ConsumerID")  # unless the settings say otherwise: a player is acquired once a brand

_NAMESPACE: Final = UUID("6f1d6b0e-6c7c-5d4b-9c1e-0f6f2a1f7a55")  # of derived EventIds; never to be changed
_EVENT_ID: Final = FIELDS.index("EventId")
_APART_MIN: Final = 16

_GETTERS: Final = [attrgetter(field) for field in FIELDS]
_LooseEvent: Final = msgspec.defstruct(
    "_LooseEvent", [(field, Any, ABSENT) for field in FIELDS], gc=False, forbid_unknown_fields=True
)

_decode: Final = msgspec.json.Decoder().decode
_decode_loose: Final = msgspec.json.Decoder(_LooseEvent).decode
_decode_loose_array: Final = msgspec.json.Decoder(list[_LooseEvent | None]).decode  # type: ignore[valid-type]
_encoder: Final = msgspec.json.Encoder()


class Changes(Struct):
    """
    What rewriting did to records.

    Attributes:
        normalized: How many records had which field changed.
        unknown: How many records had which unknown field.
        unlisted: How many records had, for which field, a code that `values` does not list; if that is noted.
    """

    normalized: Counter[str] = msgspec.field(default_factory=Counter)
    unknown: Counter[str] = msgspec.field(default_factory=Counter)
    unlisted: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, other: Changes) -> None:
        """Count what another one counted, too."""
        for counts, others in (
            (self.normalized, other.normalized),
            (self.unknown, other.unknown),
            (self.unlisted, other.unlisted),
        ):
            for name, count in others.items():
                counts[name] += count


class Rewriter:
    """
    Rewrites records as the settings say.

    Args:
        notes_unlisted: Whether to note `Changes.unlisted`.

    Attributes:
        is_needed: Whether there is anything to do with a record that is not in the wire form.
        is_mapping: Whether every record is rewritten, also one that looks like the wire form.
    """

    def __init__(self, settings: RecordsSettings, *, notes_unlisted: bool = False) -> None:
        self._notes_unlisted = notes_unlisted
        self._normalizes = settings.mode == "normalize"
        self._normalizers = normalizers(settings.assume_timezone, relaxed=settings.relax) if self._normalizes else {}
        self._drops = settings.unknown_fields == "drop"
        # An empty EventId that a relaxed rule lets pass is one.
        self._no_event_id = (ABSENT, None) if "event_id" in settings.relax else NOTHING
        self._keeps = settings.unknown_fields == "keep"
        self._derived_from = (settings.event_id_fields or DERIVED_FROM) if settings.event_id == "derive" else ()
        self._source = SourceMapping(settings.field_sources)
        self.is_mapping = bool(settings.mapping)
        self.is_needed = bool(self._normalizers or self._derived_from or self._drops or self.is_mapping)

    def rewrite(self, lines: Sequence[bytes], changes: Changes) -> list[bytes]:
        """
        Write records in the wire form as far as that can be done.

        Args:
            lines: 1..n records, JSON, without newlines.
            changes: Is added to.
        Returns:
            Lines in the same order; a record that needs no change, or is no JSON object, as it came, byte for byte.
        """
        counted = Changes()
        try:
            written = self._rewrite_lines(lines, counted)
        except RecursionError:  # a value is nested almost too deep to be read, and too deep for what comes then
            if len(lines) == 1:
                return list(lines)
            return [self.rewrite([line], changes)[0] for line in lines]
        changes.add(counted)
        return written

    def _rewrite_lines(self, lines: Sequence[bytes], changes: Changes) -> list[bytes]:
        events = None if self.is_mapping else _loose_events(lines)
        if events is not None:
            return self._rewrite(lines, [list(map(get, events)) for get in _GETTERS], [], changes)
        documents = _documents(lines)
        if documents is not None:
            return self._rewrite_documents(lines, documents, changes)
        if len(lines) > _APART_MIN:  # mostly it is one of many that cannot be read
            middle = len(lines) // 2
            return self._rewrite_lines(lines[:middle], changes) + self._rewrite_lines(lines[middle:], changes)
        singles = list(map(document_in, lines))
        is_object = [document is not None for document in singles]
        objects = [document for document in singles if document is not None]
        if not objects:
            return list(lines)
        mended = iter(self._rewrite_documents(list(compress(lines, is_object)), objects, changes))
        return [next(mended) if is_one else line for line, is_one in zip(lines, is_object, strict=True)]

    def write(self, documents: Sequence[Document], changes: Changes) -> list[bytes]:
        """Write documents that came in another form, 1..n, as lines of the wire form as far as that can be done."""
        return self._rewrite_documents(None, documents, changes)

    def _rewrite_documents(
        self, lines: Sequence[bytes] | None, documents: Sequence[Document], changes: Changes
    ) -> list[bytes]:
        extras = self._extras(documents, changes)
        columns = self._source.columns(documents, changes.unlisted if self._notes_unlisted else None)
        written = self._rewrite(lines, columns, extras, changes)
        if lines is None and extras and not self._drops:
            for row in extras:
                written[row] = self._with_extras(written[row], _encoder.encode(documents[row]))
        return written

    def _rewrite(
        self, lines: Sequence[bytes] | None, columns: list[Column], extras: Sequence[int], changes: Changes
    ) -> list[bytes]:
        """
        Write columns as lines.

        Args:
            lines: The records as they came, if they came as JSON.
            columns: Of the wire fields, in their order.
            extras: The rows that have unknown fields.
        """
        is_same = [lines is not None and not self.is_mapping] * len(columns[0])
        for index, field in enumerate(FIELDS):
            if field in self._normalizers:
                after = self._normalizers[field](columns[index])
                if changed := _mark_changed(is_same, columns[index], after):
                    changes.normalized[field] += changed
                columns[index] = after
        if self._derived_from:
            after = self._derive(columns)
            _mark_changed(is_same, columns[_EVENT_ID], after)
            columns[_EVENT_ID] = after
        if self._drops:
            for row in extras:
                is_same[row] = False
        if lines is not None:
            if repeats := self._mark_repeats(is_same, lines):
                changes.normalized["repeated_key"] += repeats
            if all(is_same):
                return list(lines)
        # The struct only gives the order: what its types say is checked when the line is validated.
        written = _encoder.encode_lines(list(map(ActivityEvent, *columns))).split(b"\n")[:-1]
        if lines is None:
            return written
        if any(is_same):
            written = [line if same else new for line, new, same in zip(lines, written, is_same, strict=True)]
        if not self._drops:
            for row in extras:
                if not is_same[row]:
                    written[row] = self._with_extras(written[row], lines[row])
        return written

    def _mark_repeats(self, is_same: list[bool], lines: Sequence[bytes]) -> int:
        """
        See to it that a key that stands twice leaves once, or not at all; returns how many rows are written for it.

        Of what a decoder gives, the last value counts. In strict mode such a record stays as it came, to be refused.
        """
        is_strict = not self._normalizes
        found = 0
        for row, line in enumerate(lines):
            # What stays as it came is judged so that the cheap test is certain; of what is rewritten, anything may be.
            if is_same[row] is not is_strict and (is_strict or may_repeat_keys(line, 1)) and repeats_key(line):
                is_same[row] = is_strict
                found += not is_strict
        return found

    def _extras(self, documents: Sequence[Document], changes: Changes) -> list[int]:
        """Find the records that have unknown fields, and count those."""
        unknown = set().union(*documents) - self._source.names
        if not unknown:
            return []
        for name in unknown:
            changes.unknown[name] += sum(name in document for document in documents)
        return [row for row, document in enumerate(documents) if not document.keys().isdisjoint(unknown)]

    def _with_extras(self, written: bytes, line: bytes) -> bytes:
        """
        Put the unknown fields of a record as it came behind the rewritten ones, byte for byte.

        A field that has the name of a wire field whose value comes from elsewhere cannot be kept under its name, which
        would then stand there twice; and if it is to be refused, it needs another name for that.
        """
        extras = []
        for name, value in decode_raw(line).items():
            if name in FIELDS and name not in self._source.names and self._keeps:
                continue
            if name not in self._source.names:
                shown = f"{name} (not mapped)" if name in FIELDS else name
                extras.append(_encoder.encode(shown) + b":" + bytes(value))
        if written == b"{}":
            return b"{" + b",".join(extras) + b"}"
        return b",".join([written.removesuffix(b"}"), *extras]) + b"}"

    def _derive(self, columns: Sequence[Column]) -> Column:
        """Make an EventId where there is none, the same for the same values of the key fields."""
        keys = zip(*(columns[FIELDS.index(field)] for field in self._derived_from), strict=True)
        return [
            _derived_id(key)
            if event_id in self._no_event_id and not any(value in NOTHING for value in key)
            else event_id
            for event_id, key in zip(columns[_EVENT_ID], keys, strict=True)
        ]


def _mark_changed(is_same: list[bool], before: Column, after: Column) -> int:
    """Clear the marks of the rows in which two columns differ; returns how many rows that are."""
    if after is before:
        return 0
    same = list(map(eq, before, after))
    changed = same.count(False)
    if changed:
        is_same[:] = map(and_, is_same, same)
    return changed


def _loose_events(lines: Sequence[bytes]) -> list[ActivityEvent] | None:
    """Decode records at one go, whatever their values; None if one is no JSON object or has an unknown field."""
    return _decoded(_decode_loose_array, _decode_loose, lines, _LooseEvent)


def _documents(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """Decode records at one go; None if not every one of them is a JSON object."""
    return _decoded(_decode, _decode, lines, dict)


def _decoded(
    decode_array: Callable[[bytes], Any], decode_one: Callable[[bytes], Any], lines: Sequence[bytes], kind: type
) -> list[Any] | None:
    """Decode each line alone if a value may reach over two of them; all at one go costs less."""
    joined = SEPARATOR.join(lines)
    try:
        if may_reach_over_lines(joined, len(lines)):
            records = list(map(decode_one, lines))
        else:
            items = decode_array(b"[" + joined + SEPARATOR + b"null]")
            records = items[:-1:2] if len(items) == 2 * len(lines) + 1 else []
    except DECODE_ERRORS:
        return None
    return records if set(map(type, records)) == {kind} else None


def _derived_id(key: Sequence[Any]) -> str:
    name = _encoder.encode([EVENT_TYPE, *key])
    return str(UUID(bytes=sha1(_NAMESPACE.bytes + name, usedforsecurity=False).digest()[:16], version=5))
