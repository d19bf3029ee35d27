"""
Reads the layers of the settings, and converts the values to the settings' types.

Two steps. `read_written` collects the values of all layers by dotted key; a later layer replaces the whole value
of an earlier one, so that `{ env = … }` in the file and `{ file = … }` in the environment do not mix.
`build` converts each value to the type of its field and names, for every error, the key and its source.
This module knows no key: the Structs that are passed in define them.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from shipper.config.schema import Leaf, expectation, leaves, section_in
from shipper.config.secrets import LiteralSecret, Secret, decode_secret
from shipper.model.errors import ConfigError
from shipper.system.files import identity_of

ENVIRONMENT_PREFIX: Final = "SHIPPER__"
USUAL_FILES: Final = (Path("shipper.toml"), Path("/etc/shipper/shipper.toml"))

_OVERRIDE: Final = "--set"
_QUOTED: Final = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")

S = TypeVar("S", bound=Struct)


class Written(NamedTuple):
    """A value as it was written, and where."""

    value: Any
    source: str
    is_text: bool = False  # from the environment or --set: "10" is a number if the field is one


# --- what was written ---


def read_written(
    root: type[Struct],
    *,
    config_path: str | PathLike[str] | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Written]:
    """
    Collect every key that was written anywhere; of several sources the last wins.

    Returns:
        Dotted key -> value and source; no defaults.
    Raises:
        ConfigError: A file cannot be read, or a key does not exist.
    """
    known = {leaf.key: leaf for leaf in leaves(root)}
    layers: list[list[tuple[tuple[str, ...], Written]]] = [
        _file_entries(config_path, environ),
        [
            (
                tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")),
                _text(value, f"environment {name}"),
            )
            for name, value in sorted(environ.items())
            if name.startswith(ENVIRONMENT_PREFIX)
        ],
        [_override(text) for text in overrides],
        [
            (tuple(key.split(".")), Written(msgspec.to_builtins(value, enc_hook=os.fspath), "command line"))
            for key, value in flags.items()
            if value is not None
        ],
    ]
    written: dict[str, Written] = {}
    for entries in layers:
        layer: dict[str, Written] = {}
        for path, entry in entries:
            for key, value in _flatten(path, entry, known):
                layer[key] = _joined(layer.get(key), value)
        written |= layer
    return written


def misspelt_variables(root: type[Struct], environ: Mapping[str, str]) -> dict[str, str]:
    """Find variables whose names lack underscores: what is set, and the name by which it would be read."""
    if not any(name.startswith("SHIPPER_") for name in environ):
        return {}  # most often; the keys take a while
    meant = {f"SHIPPER_{leaf.key.replace('.', '_').upper()}": leaf.key for leaf in leaves(root)}
    found = {name: meant[name] for name in sorted(meant.keys() & environ.keys())}
    return {name: ENVIRONMENT_PREFIX + key.upper().replace(".", "__") for name, key in found.items()}


class SettingsFile:
    """
    The settings file of a process, to find out whether it has changed since the process read it.

    Attributes:
        path: Absolute; None = there is none.
    """

    def __init__(self, config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> None:
        found = (path.absolute() for path in _candidates(config_path, environ) if os.path.isfile(path))
        self.path = next(found, None)
        self._seen: tuple[int, ...] | None = None
        self.note_read()

    def note_read(self) -> None:
        """Note that it is about to be read."""
        self._seen = identity_of(self.path) if self.path else None

    def has_changed(self) -> bool:
        """Return whether it has changed since it was read, and is there. Blocks."""
        now = identity_of(self.path) if self.path else None
        return now is not None and now != self._seen


def _named(config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> str | PathLike[str] | None:
    """Return the settings file that somebody has named; None if the usual ones are looked for."""
    return config_path if config_path is not None else environ.get("SHIPPER_CONFIG") or None


def _candidates(config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> Sequence[Path]:
    named = _named(config_path, environ)
    return USUAL_FILES if named is None else [Path(named)]


def _file_entries(
    config_path: str | PathLike[str] | None, environ: Mapping[str, str]
) -> list[tuple[tuple[str, ...], Written]]:
    named = _named(config_path, environ)
    for path in _candidates(config_path, environ):
        try:
            text = path.read_text("utf-8-sig")
            tables = tomllib.loads(text)
        except (FileNotFoundError, NotADirectoryError) as exc:
            if named is None:
                continue
            raise ConfigError("the file does not exist", source=str(path)) from exc
        except OSError as exc:
            is_closed = isinstance(exc, PermissionError) and not os.path.lexists(path)
            if named is None and is_closed and not path.is_absolute():
                continue  # the current folder is closed to this user, as after sudo -u in that of another one
            raise ConfigError(f"cannot be read: {exc.strerror or exc}", source=str(path.absolute())) from exc
        except UnicodeDecodeError as exc:
            # Not chained: the error holds the text, in which a secret may stand.
            raise ConfigError(f"is not UTF-8 text (byte {exc.start})", source=str(path)) from None
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"is not valid TOML: {exc}", source=str(path)) from None
        return [((key,), Written(value, str(path))) for key, value in tables.items()]
    return []


def _text(text: str, source: str) -> Written:
    """Read a TOML string in quotes; all other texts stay as they are."""
    if _QUOTED.fullmatch(text):
        with suppress(ValueError):
            text = tomllib.loads(f"value = {text}")["value"]
    return Written(text, source, is_text=True)


def _override(text: str) -> tuple[tuple[str, ...], Written]:
    key, equals, value = text.partition("=")
    if not equals:
        # The text is not shown: it may be a secret whose key was forgotten.
        raise ConfigError("expected section.key=value, for example --set batch.max_events=500", source=_OVERRIDE)
    key = key.strip()
    return tuple(key.split(".")), _text(value, f"{_OVERRIDE} {key}=…")


def _flatten(path: tuple[str, ...], entry: Written, known: Mapping[str, Leaf]) -> Iterator[tuple[str, Written]]:
    """Break a written value down to leaves, and refuse keys that do not exist."""
    key = ".".join(path)
    if key in known:
        yield key, _parsed(entry, known[key])
    elif any(name.startswith(key + ".") for name in known):
        table = _parsed(entry, None).value
        if not isinstance(table, dict):
            raise ConfigError("is a section: expected keys below it", key=key, source=entry.source)
        for name, value in table.items():
            yield from _flatten((*path, name), entry._replace(value=value), known)
    elif secret := next((each for each in known.values() if each.is_secret and key.startswith(f"{each.key}.")), None):
        if entry.source.startswith(_OVERRIDE):
            entry = entry._replace(source=f"{_OVERRIDE} {secret.key}=…")  # what follows may be the secret
        name = key.removeprefix(f"{secret.key}.")
        yield secret.key, entry._replace(value={name: _parsed(entry, secret).value})
    elif len(path) > 1 and (owner := known.get(".".join(path[:-1]))) and owner.is_table:
        yield owner.key, entry._replace(value={path[-1]: _parsed(entry, owner).value})
    else:
        suggestion = _suggestion(path, known)
        if entry.source.startswith(_OVERRIDE) and not (
            suggestion or any(name.startswith(f"{path[0]}.") for name in known)
        ):
            # Base64 ends with equals signs: a secret whose key was forgotten looks like a key.
            raise ConfigError("there is no such key as the one given, which is not shown", source=_OVERRIDE)
        raise ConfigError(f"there is no such key{suggestion}", key=key, source=entry.source)


def _parsed(entry: Written, leaf: Leaf | None) -> Written:
    """Read a text that is an array or an inline table; all other texts stay as they are."""
    holds_structure = leaf is None or leaf.is_list or leaf.is_table  # not `listen`: "[::1]:9464" is an address
    if leaf is not None and leaf.is_list and entry.is_text and entry.value and not str(entry.value).startswith("["):
        return entry._replace(value=[entry.value])
    if not (entry.is_text and isinstance(entry.value, str) and entry.value.startswith(("[", "{")) and holds_structure):
        return entry
    try:
        (value,) = tomllib.loads(f"value = {entry.value}").values()
    except (ValueError, RecursionError):
        raise ConfigError(
            "looks like a TOML array or table, but is not valid",
            key=leaf.key if leaf else "",
            source=entry.source,
        ) from None
    return entry._replace(value=value)


def _joined(earlier: Written | None, later: Written) -> Written:
    """Join two entries of one layer for one key: `TOKEN__FILE` and `TOKEN__ALLOW_GROUP_READABLE`."""
    if earlier is not None and isinstance(earlier.value, dict) and isinstance(later.value, dict):
        return later._replace(value=earlier.value | later.value)
    return later


def _suggestion(path: tuple[str, ...], known: Mapping[str, Leaf]) -> str:
    """Find what was probably meant: a neighbour with a similar name, or the same name elsewhere."""
    above = "".join(f"{part}." for part in path[:-1])
    neighbours = {name.removeprefix(above).split(".")[0] for name in known if name.startswith(above)}
    close = difflib.get_close_matches(path[-1], sorted(neighbours), n=1)
    if close:
        return f"; did you mean {above}{close[0]}?"
    elsewhere = [name for name in known if name.rpartition(".")[2] == path[-1]]
    elsewhere = elsewhere or difflib.get_close_matches(".".join(path), known, n=1)
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""


# --- what it means ---


def build(root: type[S], written: Mapping[str, Written]) -> S:
    """
    Convert what was written and check it, each value alone and then all together.

    Args:
        root: The struct of all sections.
        written: From `read_written`.
    Raises:
        ConfigError: With the key and the source of the first value that is wrong.
    """
    values: dict[str, Any] = {}
    for leaf in leaves(root):
        if leaf.key in written:
            values[leaf.key] = _converted(leaf, written[leaf.key])
    try:
        return _built(root, "", values)
    except ConfigError as exc:
        raise ConfigError(exc.message, key=exc.key, source=_culprit(exc, written)) from None


def _culprit(error: ConfigError, written: Mapping[str, Written]) -> str:
    """Find the source of an error that was raised without one."""
    # A key below a table, such as `records.mapping.IP`, was written with the table.
    for key, entry in written.items():
        if f"{error.key}.".startswith(f"{key}."):
            return entry.source
    # A rule between two keys names both: if the first is a default, the second was written.
    # A key that is missing is missing in a section of which something else was written.
    section = error.key.rpartition(".")[0] + "."
    mentioned = (entry.source for key, entry in written.items() if key in error.message)
    beside = (entry.source for key, entry in written.items() if key.startswith(section))
    return next(mentioned, next(beside, ""))


def _built(section: type[S], prefix: str, values: Mapping[str, Any]) -> S:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        key = prefix + field.name
        inner = section_in(field.type)
        if inner is None and key in values:
            arguments[field.name] = values[key]
        elif inner is not None and any(name.startswith(key + ".") for name in values):
            arguments[field.name] = _built(inner, key + ".", values)
        elif field.required:
            raise ConfigError("is missing, and has no default", key=key)
    try:
        return section(**arguments)
    except ConfigError as exc:
        raise ConfigError(exc.message, key=prefix + exc.key) from None


def _converted(leaf: Leaf, entry: Written) -> Any:
    try:
        value = msgspec.convert(entry.value, leaf.type, strict=not entry.is_text, dec_hook=decode_custom)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explained(leaf, entry, str(exc)), key=leaf.key, source=entry.source) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{value} is not a finite number", key=leaf.key, source=entry.source)
    if isinstance(value, LiteralSecret):
        return LiteralSecret(value.reveal(), entry.source)
    return value


def decode_custom(type_: type, value: Any) -> Any:
    """Convert to the types that msgspec does not know, secrets and paths; its `dec_hook`."""
    if type_ is Secret:
        return decode_secret(value)
    if type_ is Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError("expected a path")
        # Absolute, so that messages say all and a later change of directory changes nothing.
        return Path(os.path.expanduser(value)).absolute()
    raise NotImplementedError(type_)


def _explained(leaf: Leaf, entry: Written, problem: str) -> str:
    """Describe what is wrong with a value and which values are allowed, without showing a secret."""
    if leaf.is_secret:
        return problem
    shown = entry.value if entry.is_text else repr(entry.value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    close = difflib.get_close_matches(str(entry.value), map(str, leaf.choices), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{shown}: expected {expectation(leaf)}{hint}"
