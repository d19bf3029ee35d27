"""Parses records as documents, and extracts the values of the wire fields: rows of CSV, and `records.mapping`."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from string import Formatter
from typing import Any, Final

from msgspec import Raw

from shipper.codec.judge import document_in
from shipper.codec.normalize import ABSENT, Column
from shipper.config.mapping import FIELDS, FieldSource, is_nested
from shipper.model.framing import CsvRows, Framing

csv.field_size_limit(2**31 - 1)  # the settings limit the length of records

Document = Mapping[str, Any]

EMPTY: Final = (ABSENT, None, "")


def read_rows(raws: Sequence[bytes], framing: CsvRows) -> tuple[list[dict[str, str]], dict[int, tuple[str, str]]]:
    """Parse nonblank rows of CSV; return documents of strings and, by index, rule and message of invalid rows."""
    if framing.repeated:
        first, second = framing.repeated
        fault = "csv", f"the columns {first} and {second} of the header have the same name"
        return [], dict.fromkeys(range(len(raws)), fault)
    names = framing.names
    with suppress(UnicodeDecodeError, csv.Error):
        if any(b"\n" in raw for raw in raws):
            raise csv.Error  # each of them is examined below
        rows = list(csv.reader([raw.decode() for raw in raws], delimiter=framing.delimiter, strict=True))
        if list(map(len, rows)) == [len(names)] * len(raws):
            return [dict(zip(names, row, strict=True)) for row in rows], {}
    documents: list[dict[str, str]] = []
    faults: dict[int, tuple[str, str]] = {}
    for index, raw in enumerate(raws):
        try:
            rows = list(csv.reader([raw.decode()], delimiter=framing.delimiter, strict=True))
        except UnicodeDecodeError:
            faults[index] = "encoding", "the row is not UTF-8"
        except csv.Error as error:
            faults[index] = "csv", f"the row is not CSV: {error}"
        else:
            row = rows[0] if len(rows) == 1 else []
            if any(holds_rows(value, framing) for value in row):
                faults[index] = "csv", "a quoted value contains another row; is a quote missing or too many?"
            elif len(row) == len(names):
                documents.append(dict(zip(names, row, strict=True)))
            else:
                faults[index] = "csv", f"the row has {len(row)} values, the header has {len(names)}"
    return documents, faults


def holds_rows(value: str, framing: CsvRows) -> bool:
    """Return whether a value has newlines, and the delimiters of as many rows: it was opened by a stray quote."""
    return value.count(framing.delimiter) >= value.count("\n") * max(1, len(framing.names) - 1) and "\n" in value


def read_document(raw: bytes, framing: Framing) -> Mapping[str, Any]:
    """Parse a record without mapping it; return an empty document if that fails."""
    if isinstance(framing, CsvRows):
        documents, _ = read_rows([raw], framing)
        return documents[0] if documents else {}
    return document_in(raw.replace(b"\n", b"\r")) or {}


class SourceMapping:
    """
    Extracts the columns of the wire form from documents.

    Args:
        sources: The sources of wire fields; by default the field with the same name.

    Attributes:
        names: The used fields of a document; all others are unknown fields.
    """

    def __init__(self, sources: Mapping[str, FieldSource]) -> None:
        self._sources = [sources.get(field) or FieldSource(path=field) for field in FIELDS]
        self._readers = list(map(_reader_of, self._sources))
        paths = [path for source in self._sources for path in source.paths]
        self.names = frozenset([*paths, *(path.partition(".")[0] for path in paths if is_nested(path))])

    def columns(self, documents: Sequence[Document], unlisted: Counter[str] | None = None) -> list[Column]:
        """Return a column for each wire field, `ABSENT` = no value; count codes that `values` lacks in `unlisted`."""
        columns = [read(documents) for read in self._readers]
        for field, column, source in zip(FIELDS, columns, self._sources, strict=True):
            if source.values or source.default is not None:
                count = _translate(column, source)
                if count and unlisted is not None:
                    unlisted[field] += count
        return columns


def _reader_of(source: FieldSource) -> Callable[[Sequence[Document]], Column]:
    if source.const is not None:
        return lambda documents: [source.const] * len(documents)
    if source.template:
        return _template_reader(source.template)
    return _path_reader(source.path)


def _path_reader(path: str) -> Callable[[Sequence[Document]], Column]:
    """Return a reader of `a.b`: the field with this name, or else the field `b` of the object `a`."""
    if not is_nested(path):
        return lambda documents: [document.get(path, ABSENT) for document in documents]
    steps = path.split(".")

    def value_of(document: Any) -> Any:
        if path in document:
            return document[path]
        for step in steps:
            if not isinstance(document, dict) or step not in document:
                return ABSENT
            document = document[step]
        return document

    return lambda documents: list(map(value_of, documents))


def _template_reader(template: str) -> Callable[[Sequence[Document]], Column]:
    """Return a reader of a template; the result is `ABSENT` unless all its values are strings or whole numbers."""
    parts = [(text, _path_reader(name) if name else None) for text, name, _, _ in Formatter().parse(template)]

    def read(documents: Sequence[Document]) -> Column:
        columns: list[Column] = [[""] * len(documents)]
        for text, values_of in parts:
            columns.append([text] * len(documents))
            if values_of is not None:
                columns.append(list(map(_as_text, values_of(documents))))
        return [ABSENT if None in row else "".join(row) for row in zip(*columns, strict=True)]

    return read


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else None


def _translate(column: Column, source: FieldSource) -> int:
    """Replace the values of a column according to the source; return the number of unlisted codes."""
    unlisted = 0
    for row, value in enumerate(column):
        if type(value) is str and value in source.values:
            column[row] = source.values[value]
        elif value in EMPTY:
            column[row] = value if source.default is None else source.default
        elif source.values:
            code = "" if isinstance(value, (list, dict, Raw)) else code_text(value)  # none of these is empty
            if code in source.values:
                column[row] = source.values[code]
            elif source.default is None:
                unlisted += 1
            elif code:
                column[row] = source.default
    return unlisted


def code_text(value: Any) -> str:
    """Return a value as `values` would list it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
