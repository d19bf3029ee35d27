"""
The schema of the settings: keys, types, limits and descriptions, derived from the Structs.

Used by error messages, the commented file of `config init`, `config show` and `config schema`, so they always agree.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from shipper.config.secrets import Secret, SecretReference


class Leaf(NamedTuple):
    """A key of the settings: a field that is not a section."""

    key: str
    type: Any
    default: Any  # msgspec.NODEFAULT if the key is required
    section: type[Struct]

    @property
    def meta(self) -> msgspec.Meta:
        """The description and examples of the field; the outermost `Meta`."""
        arguments = get_args(self.type) if get_origin(self.type) is Annotated else ()
        return next((m for m in arguments if isinstance(m, msgspec.Meta) and m.description), msgspec.Meta())

    @property
    def bounds(self) -> msgspec.Meta:
        """The limits of the value: in the same `Meta`, or in that of the union's first member."""
        metas = [m for part in _members(self.type) for m in part if isinstance(m, msgspec.Meta)]
        return next((m for m in metas if (m.ge, m.gt, m.le, m.lt) != (None,) * 4), msgspec.Meta())

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal`, including one inside a list or a union."""
        return tuple(v for bare in _bare(self.type) if get_origin(bare) is Literal for v in get_args(bare))

    @property
    def is_secret(self) -> bool:
        return Secret in _bare(self.type)

    @property
    def is_list(self) -> bool:
        return any(get_origin(bare) is tuple for bare in _bare(self.type))

    @property
    def is_table(self) -> bool:
        """Whether keys below this one are allowed, as in `intake.token.env`."""
        return self.is_secret or any(get_origin(bare) is dict for bare in _bare(self.type))


@cache
def leaves(section: type[Struct]) -> tuple[Leaf, ...]:
    """Return all keys of a section and its subsections, in source order."""
    return tuple(_walk(section, ""))


def _walk(section: type[Struct], prefix: str) -> Iterator[Leaf]:
    for field in msgspec.structs.fields(section):
        key = prefix + field.name
        inner = section_in(field.type)
        if inner is None:
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            yield Leaf(key, field.type, default, section)
        else:
            yield from _walk(inner, f"{key}.")


def section_in(type_: Any) -> type[Struct] | None:
    """Return the section in a field's type: `EndpointSettings` for `EndpointSettings | None`."""
    return next((bare for bare in _bare(type_) if isinstance(bare, type) and issubclass(bare, Struct)), None)


def expectation(leaf: Leaf) -> str:
    """Describe the values of a key, such as `a whole number, at least 1, at most 256`."""
    bare = _bare(leaf.type)
    origins = [get_origin(type_) for type_ in bare]
    if leaf.is_secret:
        return "a secret"
    choices = [str(choice) or '""' for choice in leaf.choices]
    if leaf.is_list:
        if int in bare:
            return "a list of whole numbers, such as [1, 2]"
        return f"a list of {', '.join(choices)}" if choices else 'a list, such as ["a", "b"]'
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        dict: "a table",
    }
    parts = [kind for type_, kind in kinds.items() if type_ in bare or type_ in origins]
    parts[:1] = [part + _range(leaf.bounds) for part in parts[:1]]
    return ", or ".join([*parts, *([", ".join(choices)] if choices else [])])


def _range(bounds: msgspec.Meta) -> str:
    if bounds.gt is not None:
        low = f"more than {bounds.gt:g}"
    else:
        low = f"at least {bounds.ge}" if bounds.ge is not None else ""
    high = f"at most {bounds.le}" if bounds.le is not None else ""
    return "".join(f", {limit}" for limit in (low, high) if limit)


def _members(type_: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the members of a type with their annotations, from the outside in."""
    if get_origin(type_) is Annotated:
        inner, *annotations = get_args(type_)
        yield (None, *annotations)
        yield from _members(inner)
    elif get_origin(type_) in (Union, types.UnionType):
        for member in get_args(type_):
            yield from _members(member)
    else:
        yield (type_,)
        if get_origin(type_) is tuple:
            yield from _members(get_args(type_)[0])


def _bare(type_: Any) -> list[Any]:
    return [part[0] for part in _members(type_)]


def json_schema(root: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a settings file, without the relations between keys."""
    _, sections = msgspec.json.schema_components([root, SecretReference], schema_hook=_custom_schema)
    secret = sections[SecretReference.__name__]
    secret["oneOf"] = [{"required": [form]} for form in ("env", "file", "command")]
    schema = sections.pop(root.__name__)
    whole: dict[str, Any] = _without_null({**schema, "$defs": sections})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _custom_schema(type_: type) -> dict[str, Any]:
    """Describe secrets and paths, which msgspec does not support; its `schema_hook`."""
    if type_ is Path:
        return {"type": "string", "minLength": 1}
    if type_ is Secret:
        return {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{SecretReference.__name__}"}]}
    raise NotImplementedError(type_)


def _without_null(schema: Any) -> Any:
    """Remove null, which TOML does not have."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema if item != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    schema = {name: _without_null(part) for name, part in schema.items() if (name, part) != ("default", None)}
    if len(schema.get("anyOf", [])) == 1:
        (only,) = schema.pop("anyOf")
        schema = {**only, **schema}
    return schema
