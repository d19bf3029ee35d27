"""What `records.mapping` can say: for each wire field, where its value comes from."""

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
    """
    Where the value of a field comes from: one of `path`, `const` and `template`.

    Attributes:
        path: A field of the source; dots lead into objects.
        const: The value itself.
        template: A text with paths in braces, `{aff}_{click}`.
        values: What takes the place of which value; others stay as they are, unless there is a default.
        default: For a value that is absent, null or empty, or not among `values`.
    """

    path: str = msgspec.field(name="from", default="")
    const: str | int | None = None
    template: str = ""
    values: dict[str, str | int] = {}
    default: str | int | None = None

    @property
    def paths(self) -> list[str]:
        """All fields of the source that are read."""
        if self.template:
            return [name for _, name, _, _ in Formatter().parse(self.template) if name]
        return [self.path] if self.path else []


def field_sources(mapping: Mapping[str, Any]) -> dict[str, FieldSource]:
    """
    Read a mapping.

    Raises:
        ConfigError: The key is `mapping.FIELD`.
    """
    return {field: _field_source(field, written) for field, written in mapping.items()}


def _field_source(field: str, written: Any) -> FieldSource:
    key = f"mapping.{field}"
    if field not in FIELDS:
        close = difflib.get_close_matches(field, FIELDS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(FIELDS)}"
        raise ConfigError(f"is not a field of the wire form{hint}", key=key)
    try:
        source = msgspec.convert({"from": written} if isinstance(written, str) else written, FieldSource)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f'cannot be understood: {error}; write "path.to.field", or a table with from, const or template, '
            "and with values or default",
            key=key,
        ) from None
    present = {"from": source.path != "", "const": source.const is not None, "template": source.template != ""}
    given = [name for name, is_present in present.items() if is_present]
    if len(given) != 1:
        raise ConfigError(f"needs one of from, const and template, and has {' and '.join(given) or 'none'}", key=key)
    if source.const is not None and (source.values or source.default is not None):
        raise ConfigError("const cannot be combined with values or default", key=key)
    if "" in source.values:
        raise ConfigError('values are not looked at for an empty value: write default = "…" for it', key=key)
    if isinstance(source.const, int) and not -_INTEGER_MAX <= source.const <= _INTEGER_MAX:
        raise ConfigError(f"const {source.const} is out of range: whole numbers go up to {_INTEGER_MAX}", key=key)
    _check_template(source.template, key)
    for path in source.paths:
        if not all(path.split(".")):
            raise ConfigError(f"{path!r} has an empty name between its dots", key=key)
    return source


def _check_template(template: str, key: str) -> None:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"template {template!r} is broken: {error}; double a brace that stands for itself", key=key
        ) from None
    for _, name, form, conversion in parts:
        if name == "" or form or conversion:
            raise ConfigError(f"template {template!r} may hold only names in braces, such as {{click_id}}", key=key)
    if template and not any(name for _, name, _, _ in parts):
        raise ConfigError(f"template {template!r} names no field; write const instead", key=key)
