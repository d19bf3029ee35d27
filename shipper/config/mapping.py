"""Parses `records.mapping`: for each wire field, the source of its value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from string import Formatter
from typing import Any, Final

import msgspec
from msgspec import Struct

from shipper.model.errors import ConfigError
from shipper.model.wire import ActivityEvent

FIELDS: Final = ActivityEvent.__struct_fields__

_INTEGER_MAX: Final = 2**63 - 1


class FieldSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a field's value: exactly one of `path`, `const` and `template`."""

    path: str = msgspec.field(name="from", default="")  # a field of the record; dots lead into objects, see `is_nested`
    const: str | int | None = None
    template: str = ""  # a text with paths in braces, such as `{aff}_{click}`
    # Replacements by value; other values are kept, or replaced by the default if there is one.
    values: dict[str, str | int] = {}
    default: str | int | None = None  # used for a value that is absent, null, empty or not in `values`

    @property
    def paths(self) -> list[str]:
        """All fields of the record that are read."""
        if self.template:
            return [name for _, name, _, _ in Formatter().parse(self.template) if name]
        return [self.path] if self.path else []


def is_nested(path: str) -> bool:
    """Return whether a path can lead into objects; one with an empty name between its dots is the name of a field."""
    return "." in path and all(path.split("."))


def field_sources(mapping: Mapping[str, Any]) -> dict[str, FieldSource]:
    """Parse a mapping; raise `ConfigError` with the key `mapping.FIELD`."""
    return {field: _field_source(field, value) for field, value in mapping.items()}


def _field_source(field: str, value: Any) -> FieldSource:
    key = f"mapping.{field}"
    if field not in FIELDS:
        close = difflib.get_close_matches(field, FIELDS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else f"; the fields are {', '.join(FIELDS)}"
        raise ConfigError(f"is not a field of the wire form{hint}", key=key)
    try:
        source = msgspec.convert({"from": value} if isinstance(value, str) else value, FieldSource)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f'is invalid: {error}; expected "path.to.field", or a table with from, const or template, '
            "and optionally values and default",
            key=key,
        ) from None
    present = {"from": source.path != "", "const": source.const is not None, "template": source.template != ""}
    present_names = [name for name, is_present in present.items() if is_present]
    if len(present_names) != 1:
        raise ConfigError(
            f"needs exactly one of from, const and template; it has {' and '.join(present_names) or 'none'}", key=key
        )
    if source.const is not None and (source.values or source.default is not None):
        raise ConfigError("const cannot be combined with values or default", key=key)
    if "" in source.values:
        raise ConfigError('values does not apply to an empty value; use default = "…" for it', key=key)
    if isinstance(source.const, int) and not -_INTEGER_MAX <= source.const <= _INTEGER_MAX:
        raise ConfigError(f"const {source.const} is out of range: the maximum is {_INTEGER_MAX}", key=key)
    _check_template(source.template, key)
    return source


def _check_template(template: str, key: str) -> None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template {template!r} is invalid: {error}; write literal braces twice", key=key) from None
    for _, name, form, conversion in parts:
        if name == "" or form or conversion:
            raise ConfigError(f"template {template!r} may contain only names in braces, such as {{click_id}}", key=key)
    if template and not any(name for _, name, _, _ in parts):
        raise ConfigError(f"template {template!r} contains no field; use const instead", key=key)
