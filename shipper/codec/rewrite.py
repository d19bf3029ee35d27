"""
Rewrites records to the wire form: mapping, normalisation, and unknown fields.

Records are decoded together and rewritten column by column. Whatever cannot be rewritten is left unchanged. The rules
are applied to the result, so rewriting can correct a record but never make an invalid one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha1
from itertools import compress
from operator import and_, attrgetter, eq
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from shipper.codec.documents import EMPTY, Document, SourceMapping
from shipper.codec.judge import DECODE_ERRORS, decode_raw, document_in
from shipper.codec.normalize import ABSENT, Column, normalizers
from shipper.codec.rules import may_repeat_keys, repeats_key
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings
from shipper.model.wire import EVENT_TYPE, ActivityEvent

DERIVED_FROM: Final = ("BrandID", "ConsumerID")  # by default: a player is acquired once per brand

_NAMESPACE: Final = UUID("6f1d6b0e-6c7c-5d4b-9c1e-0f6f2a1f7a55")  # of derived EventIds; must never change
_EVENT_ID: Final = FIELDS.index("EventId")

_GETTERS: Final = [attrgetter(field) for field in FIELDS]
_LooseEvent: Final = msgspec.defstruct(
    "_LooseEvent", [(field, Any, ABSENT) for field in FIELDS], gc=False, forbid_unknown_fields=True
)

_decode: Final = msgspec.json.Decoder().decode
_decode_loose: Final = msgspec.json.Decoder(_LooseEvent).decode
_encoder: Final = msgspec.json.Encoder()


class Changes(Struct):
    """Counts of changes made to records."""

    # Number of records in which a field was changed, by field.
    normalized: Counter[str] = msgspec.field(default_factory=Counter)
    # Number of records with an unknown field, by its name.
    unknown: Counter[str] = msgspec.field(default_factory=Counter)
    # Number of records with a code that `values` does not list, by field.
    unlisted: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, other: Changes) -> None:
        self.normalized.update(other.normalized)
        self.unknown.update(other.unknown)
        self.unlisted.update(other.unlisted)


class Rewriter:
    """
    Rewrites records according to the settings.

    Attributes:
        is_needed: Whether records that are not in the wire form may be changed.
        is_mapping: Whether every record is rewritten, even if it looks like the wire form.
    """

    def __init__(self, settings: RecordsSettings) -> None:
        self._normalizes = settings.mode == "normalize"
        self._normalizers = normalizers(settings.assume_timezone, relaxed=settings.relax) if self._normalizes else {}
        self._drops_unknown = settings.unknown_fields == "drop"
        # If the rule is relaxed, an empty EventId is valid.
        self._no_event_id = (ABSENT, None) if "event_id" in settings.relax else EMPTY
        self._keeps_unknown = settings.unknown_fields == "keep"
        self._derived_from = (settings.event_id_fields or DERIVED_FROM) if settings.event_id == "derive" else ()
        self._source = SourceMapping(settings.field_sources)
        self.is_mapping = bool(settings.mapping)
        self.is_needed = bool(self._normalizers or self._derived_from or self._drops_unknown or self.is_mapping)

    def rewrite(self, lines: Sequence[bytes], changes: Changes) -> list[bytes]:
        """
        Rewrite 1..n JSON records, without newlines, to the wire form, as far as possible.

        Records that need no change or are not JSON objects are returned unchanged, byte for byte.
        """
        events = None if self.is_mapping else _loose_events(lines)
        if events is not None:
            return self._rewrite(lines, [list(map(get, events)) for get in _GETTERS], [], changes)
        documents = list(map(_document, lines))
        objects = [document for document in documents if document is not None]
        if not objects:
            return list(lines)
        is_object = [document is not None for document in documents]
        rewritten = iter(self._rewrite_documents(list(compress(lines, is_object)), objects, changes))
        return [next(rewritten) if is_one else line for line, is_one in zip(lines, is_object, strict=True)]

    def write(self, documents: Sequence[Document], changes: Changes) -> list[bytes]:
        """Encode 1..n documents of another format as lines of the wire form, as far as possible."""
        return self._rewrite_documents(None, documents, changes)

    def _rewrite_documents(
        self, lines: Sequence[bytes] | None, documents: Sequence[Document], changes: Changes
    ) -> list[bytes]:
        unknown_rows = self._rows_with_unknown(documents, changes)
        columns = self._source.columns(documents, changes.unlisted)
        if self._drops_unknown:
            return self._rewrite(lines, columns, unknown_rows, changes)
        encoded = self._rewrite(lines, columns, (), changes)
        for row in unknown_rows:
            original = _encoder.encode(documents[row]) if lines is None else lines[row]
            if encoded[row] is not original:
                encoded[row] = self._append_unknown(encoded[row], original)
        return encoded

    def _rewrite(
        self, lines: Sequence[bytes] | None, columns: list[Column], reduced_rows: Sequence[int], changes: Changes
    ) -> list[bytes]:
        """
        Normalise columns and encode them as lines.

        Args:
            lines: The original records if they are JSON; those that need no change are returned.
            columns: Of the wire fields, in order.
            reduced_rows: The rows with fields to drop.
        """
        is_same = [lines is not None and not self.is_mapping] * len(columns[0])
        for index, field in enumerate(FIELDS):
            if field in self._normalizers:
                normalized = self._normalizers[field](columns[index])
                if changed := _mark_changed(is_same, columns[index], normalized):
                    changes.normalized[field] += changed
                columns[index] = normalized
        if self._derived_from:
            derived = self._derive(columns)
            _mark_changed(is_same, columns[_EVENT_ID], derived)
            columns[_EVENT_ID] = derived
        for row in reduced_rows:
            is_same[row] = False
        if lines is not None:
            if repeats := self._mark_repeats(is_same, lines):
                changes.normalized["repeated_key"] += repeats
            if all(is_same):
                return list(lines)
        # The struct only defines the order; its types are checked when the line is validated.
        encoded = _encoder.encode_lines(list(map(ActivityEvent, *columns))).split(b"\n")[:-1]
        if lines is None or not any(is_same):
            return encoded
        return [line if same else new for line, new, same in zip(lines, encoded, is_same, strict=True)]

    def _mark_repeats(self, is_same: list[bool], lines: Sequence[bytes]) -> int:
        """
        Mark records with a repeated key as changed, so that they are encoded with its last value; return their number.

        In strict mode they stay unchanged, and are rejected later.
        """
        is_strict = not self._normalizes
        repeats = 0
        for row, line in enumerate(lines):
            # The cheap test is reliable only for valid records, and a rewritten one may have been invalid.
            if is_same[row] is not is_strict and (is_strict or may_repeat_keys(line, 1)) and repeats_key(line):
                is_same[row] = is_strict
                repeats += not is_strict
        return repeats

    def _rows_with_unknown(self, documents: Sequence[Document], changes: Changes) -> list[int]:
        """Return the rows with unknown fields, and count these."""
        unknown = set().union(*documents) - self._source.names
        if not unknown:
            return []
        for name in unknown:
            changes.unknown[name] += sum(name in document for document in documents)
        return [row for row, document in enumerate(documents) if not document.keys().isdisjoint(unknown)]

    def _append_unknown(self, encoded: bytes, line: bytes) -> bytes:
        """
        Append the unknown fields of the original record to the rewritten ones, byte for byte.

        An unmapped field with the name of a wire field cannot keep its name, which would then be repeated. It is
        dropped if unknown fields are kept; to be rejected, it gets another name.
        """
        fields = []
        for name, value in decode_raw(line).items():
            if name in FIELDS and name not in self._source.names and self._keeps_unknown:
                continue
            if name not in self._source.names:
                shown = f"{name} (not mapped)" if name in FIELDS else name
                fields.append(_encoder.encode(shown) + b":" + bytes(value))
        if encoded == b"{}":
            return b"{" + b",".join(fields) + b"}"
        return b",".join([encoded.removesuffix(b"}"), *fields]) + b"}"

    def _derive(self, columns: Sequence[Column]) -> Column:
        """Derive missing EventIds from the key fields; equal values result in equal ids."""
        keys = zip(*(columns[FIELDS.index(field)] for field in self._derived_from), strict=True)
        return [
            _derived_id(key) if event_id in self._no_event_id and not any(value in EMPTY for value in key) else event_id
            for event_id, key in zip(columns[_EVENT_ID], keys, strict=True)
        ]


def _mark_changed(is_same: list[bool], old: Column, new: Column) -> int:
    """Clear the marks of the rows in which two columns differ; return their number."""
    if new is old:
        return 0
    same = list(map(eq, old, new))
    changed = same.count(False)
    if changed:
        is_same[:] = map(and_, is_same, same)
    return changed


def _loose_events(lines: Sequence[bytes]) -> list[Any] | None:
    """Decode records with any values; return None if one is not a JSON object or has an unknown field."""
    try:
        return list(map(_decode_loose, lines))
    except DECODE_ERRORS:
        return None


def _document(line: bytes) -> dict[str, Any] | None:
    try:
        document = _decode(line)
    except DECODE_ERRORS:
        return document_in(line)
    return document if isinstance(document, dict) else None


def _derived_id(key: Sequence[Any]) -> str:
    name = _encoder.encode([EVENT_TYPE, *key])
    return str(UUID(bytes=sha1(_NAMESPACE.bytes + name, usedforsecurity=False).digest()[:16], version=5))
