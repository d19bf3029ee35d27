"""Where the values of the wire fields come from: `records.mapping`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any, Final

from msgspec import Raw

from shipper.codec.normalize import ABSENT, Column
from shipper.config.mapping import FIELDS, FieldSource

Document = Mapping[str, Any]

NOTHING: Final = (ABSENT, None, "")


class SourceMapping:
    """
    Takes the columns of the wire form out of documents.

    Args:
        sources: Wire field -> where its value comes from; a field that is not in it comes from the field of its name.

    Attributes:
        names: Names of the fields of a document that are used; others are unknown fields.
    """

    def __init__(self, sources: Mapping[str, FieldSource]) -> None:
        found = [sources.get(field) or FieldSource(path=field) for field in FIELDS]
        self._columns = list(map(_column_of, found))
        self._tables = [
            (index, source) for index, source in enumerate(found) if source.values or source.default is not None
        ]
        used = [field for field in FIELDS if field not in sources]
        for source in sources.values():
            for path in source.paths:
                used += [path, path.partition(".")[0]]
        self.names = frozenset(used)

    def columns(self, documents: Sequence[Document], unlisted: Counter[str] | None = None) -> list[Column]:
        """
        Make one column for each wire field, in their order; `ABSENT` where a document has no value.

        Args:
            unlisted: Add up here, by field, the codes that stay as they are because `values` does not list them.
        """
        columns = [column_of(documents) for column_of in self._columns]
        for index, source in self._tables:
            if unlisted is not None and source.default is None:
                codes = (code_of(value) for value in columns[index] if value not in NOTHING)
                count, field = sum(code not in source.values for code in codes), FIELDS[index]
                unlisted[field] += count
            columns[index] = [_translated(value, source) for value in columns[index]]
        return columns


def _column_of(source: FieldSource) -> Callable[[Sequence[Document]], Column]:
    if source.const is not None:
        return lambda documents: [source.const] * len(documents)
    if source.template:
        return _template(source.template)
    return _path(source.path) if "." in source.path else partial(_field, source.path)


def _field(name: str, documents: Sequence[Document]) -> Column:
    return [document.get(name, ABSENT) for document in documents]


def _path(path: str) -> Callable[[Sequence[Document]], Column]:
    """Read `a.b`: a field of that very name, or else the field `b` of the object `a`."""
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


def _template(template: str) -> Callable[[Sequence[Document]], Column]:
    """Put values into a text; without one of them, or with one that is neither text nor whole number, it is absent."""
    parts = [(text, _path(name) if name else None) for text, name, _, _ in Formatter().parse(template)]

    def read(documents: Sequence[Document]) -> Column:
        found: list[Column] = [[""] * len(documents)]
        for text, values_of in parts:
            found.append([text] * len(documents))
            if values_of is not None:
                found.append(list(map(_as_text, values_of(documents))))
        return [ABSENT if None in row else "".join(row) for row in zip(*found, strict=True)]

    return read


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else None


def _translated(value: Any, source: FieldSource) -> Any:
    if value in NOTHING:
        return value if source.default is None else source.default
    if not source.values or isinstance(value, (list, dict, Raw)):
        return value
    code = value if isinstance(value, str) else code_of(value)
    return source.values.get(code, value if source.default is None else source.default)


def code_of(value: Any) -> str:
    """Return how a value is written where `values` lists it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
