"""
Reads the layers of the settings, and converts the values to the types of the settings.

`read_entries` collects the values of all layers by dotted key. A later layer replaces the whole value of an earlier
one, so `{ env = … }` in the file and `{ file = … }` in the environment are not mixed. `build` converts each value to
the type of its field. The keys are those of the Structs passed in.
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
from shipper.system.files import stat_signature

ENVIRONMENT_PREFIX: Final = "SHIPPER__"
USUAL_FILES: Final = (Path("shipper.toml"), Path("/etc/shipper/shipper.toml"))

_OVERRIDE: Final = "--set"
_QUOTED: Final = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'""")

S = TypeVar("S", bound=Struct)


class Entry(NamedTuple):
    value: Any
    source: str
    is_text: bool = False  # from the environment or --set, where "10" may be a number


def read_entries(
    root: type[Struct],
    *,
    config_path: str | PathLike[str] | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Entry]:
    """Return the entries of all layers by dotted key, the last layer wins; raise `ConfigError` for unknown keys."""
    known = {leaf.key: leaf for leaf in leaves(root)}
    variables = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX))
    layers: list[list[tuple[str, Entry]]] = [
        _file_entries(config_path, environ),
        [_variable(name, environ[name], known) for name in variables],
        [_override(text) for text in overrides],
        [
            (key, Entry(msgspec.to_builtins(value, enc_hook=os.fspath), "command line"))
            for key, value in flags.items()
            if value is not None
        ],
    ]
    entries: dict[str, Entry] = {}
    for pairs in layers:
        layer: dict[str, Entry] = {}
        for pair_key, entry in pairs:
            for key, value in _flatten(pair_key, entry, known):
                previous = layer.get(key)
                if previous is not None and isinstance(previous.value, dict) and isinstance(value.value, dict):
                    value = value._replace(value=previous.value | value.value)  # `TOKEN__FILE`, and another key
                layer[key] = value
        entries |= layer
    return entries


def misspelt_variables(root: type[Struct], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with single instead of double underscores, and their correct names."""
    if not any(name.startswith("SHIPPER_") for name in environ):
        return {}  # the usual case; listing the keys takes a while
    intended = {f"SHIPPER_{leaf.key.replace('.', '_').upper()}": leaf.key for leaf in leaves(root)}
    names = sorted(intended.keys() & environ.keys())
    return {name: ENVIRONMENT_PREFIX + intended[name].upper().replace(".", "__") for name in names}


class SettingsFile:
    """The settings file of a process, to detect changes since it was read; `path` is None if there is no file."""

    def __init__(self, config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> None:
        candidates = _candidates(config_path, environ)
        self.path = next((path.absolute() for path in candidates if os.path.isfile(path)), None)
        self.note_read()

    def note_read(self) -> None:
        """Call this before the file is read."""
        self._signature = stat_signature(self.path) if self.path else None

    def has_changed(self) -> bool:
        """Return whether the file exists and has changed since it was read. Blocks."""
        signature = stat_signature(self.path) if self.path else None
        return signature is not None and signature != self._signature


def _candidates(config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> Sequence[Path]:
    named = config_path if config_path is not None else environ.get("SHIPPER_CONFIG")
    return [Path(named)] if named else USUAL_FILES


def _file_entries(config_path: str | PathLike[str] | None, environ: Mapping[str, str]) -> list[tuple[str, Entry]]:
    candidates = _candidates(config_path, environ)
    is_named = candidates is not USUAL_FILES
    for path in candidates:
        try:
            text = path.read_text("utf-8-sig")
            tables = tomllib.loads(text)
        except (FileNotFoundError, NotADirectoryError) as exc:
            if not is_named:
                continue
            raise ConfigError("the file does not exist", source=str(path)) from exc
        except OSError as exc:
            is_inaccessible = isinstance(exc, PermissionError) and not os.path.lexists(path)
            if is_inaccessible and not is_named and not path.is_absolute():
                continue  # this user cannot access the current folder, as after sudo -u
            raise ConfigError(f"cannot be read: {exc.strerror or exc}", source=str(path.absolute())) from exc
        except UnicodeDecodeError as exc:
            # Not chained: the error contains the text, which may include a secret.
            raise ConfigError(f"is not UTF-8 text (byte {exc.start})", source=str(path)) from None
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"is not valid TOML: {exc}", source=str(path)) from None
        return [(key, Entry(value, str(path))) for key, value in tables.items()]
    return []


def _unquote(text: str, source: str) -> Entry:
    """Parse a quoted TOML string; leave any other text unchanged."""
    if _QUOTED.fullmatch(text):
        with suppress(ValueError):
            text = tomllib.loads(f"value = {text}")["value"]
    return Entry(text, source, is_text=True)


def _variable(name: str, text: str, known: Mapping[str, Leaf]) -> tuple[str, Entry]:
    key = name.removeprefix(ENVIRONMENT_PREFIX).replace("__", ".")
    parent, _, field = key.rpartition(".")
    leaf = known.get(parent.lower())
    is_field = leaf is not None and leaf.is_table and not leaf.is_secret  # of `records.mapping`, such as ConsumerID
    return f"{parent.lower()}.{field}" if is_field else key.lower(), _unquote(text, f"environment {name}")


def _override(text: str) -> tuple[str, Entry]:
    key, equals, value = text.partition("=")
    if not equals:
        # The text is not shown, as it may be a secret without its key.
        raise ConfigError("expected section.key=value, for example --set batch.max_events=500", source=_OVERRIDE)
    key = key.strip()
    return key, _unquote(value, f"{_OVERRIDE} {key}=…")


def _flatten(key: str, entry: Entry, known: Mapping[str, Leaf]) -> Iterator[tuple[str, Entry]]:
    """Yield the known keys in an entry with their values; raise for unknown keys."""
    parent, _, name = key.rpartition(".")
    is_override = entry.source.startswith(_OVERRIDE)
    if key in known:
        yield key, _parse_inline(entry, known[key])
    elif any(other.startswith(f"{key}.") for other in known):
        table = _parse_inline(entry, None).value
        if not isinstance(table, dict):
            raise ConfigError("is a section, not a key; set the keys in it", key=key, source=entry.source)
        for inner, value in table.items():
            yield from _flatten(f"{key}.{inner}", entry._replace(value=value), known)
    elif secret := next((leaf for leaf in known.values() if leaf.is_secret and key.startswith(f"{leaf.key}.")), None):
        if is_override:
            entry = entry._replace(source=f"{_OVERRIDE} {secret.key}=…")  # the rest may be the secret
        yield secret.key, entry._replace(value={key.removeprefix(f"{secret.key}."): _parse_inline(entry, secret).value})
    elif parent in known and known[parent].is_table:
        yield parent, entry._replace(value={name: _parse_inline(entry, known[parent]).value})
    else:
        suggestion = _suggestion(key, known)
        is_section = any(other.startswith(f"{key.partition('.')[0]}.") for other in known)
        if is_override and not suggestion and not is_section:
            # A secret without its key may look like a key, as Base64 may end with equals signs.
            raise ConfigError("unknown key (not shown, because it could be a secret)", source=_OVERRIDE)
        raise ConfigError(f"unknown key{suggestion}", key=key, source=entry.source)


def _parse_inline(entry: Entry, leaf: Leaf | None) -> Entry:
    """Parse a text that is an array or an inline table; leave any other entry unchanged."""
    if not entry.is_text or not isinstance(entry.value, str) or not entry.value:
        return entry
    if leaf is not None and leaf.is_list and not entry.value.startswith("["):
        return entry._replace(value=[entry.value])
    if leaf is not None and not leaf.is_list and not leaf.is_table:
        return entry  # such as `listen`: "[::1]:9464" is an address
    if not entry.value.startswith(("[", "{")):
        return entry
    try:
        (value,) = tomllib.loads(f"value = {entry.value}").values()
    except (ValueError, RecursionError):
        key = leaf.key if leaf else ""
        raise ConfigError("looks like a TOML array or table, but is invalid", key=key, source=entry.source) from None
    return entry._replace(value=value)


def _suggestion(key: str, known: Mapping[str, Leaf]) -> str:
    """Suggest a key with a similar name in the same section, or with the same name elsewhere."""
    parent, dot, name = key.rpartition(".")
    neighbours = {other.removeprefix(parent + dot).split(".")[0] for other in known if other.startswith(parent + dot)}
    close = [parent + dot + other for other in difflib.get_close_matches(name, sorted(neighbours), n=1)]
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    nearest = close or elsewhere or difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def build(root: type[S], entries: Mapping[str, Entry]) -> S:
    """Convert and check entries, then the rules between keys; raise `ConfigError` with the first invalid key."""
    values = {leaf.key: _convert(leaf, entries[leaf.key]) for leaf in leaves(root) if leaf.key in entries}
    try:
        return _build_section(root, "", values)
    except ConfigError as exc:
        raise ConfigError(exc.message, key=exc.key, source=_source_of(exc, entries)) from None


def _source_of(error: ConfigError, entries: Mapping[str, Entry]) -> str:
    """Return the source of the entry that caused an error."""
    # A key below a table, such as `records.mapping.IP`, belongs to the table's entry.
    for key, entry in entries.items():
        if f"{error.key}.".startswith(f"{key}."):
            return entry.source
    # A rule between two keys names both: if the first has its default, the second has an entry.
    # A missing key is missing in a section with other entries.
    section = error.key.rpartition(".")[0] + "."
    mentioned = (entry.source for key, entry in entries.items() if key in error.message)
    beside = (entry.source for key, entry in entries.items() if key.startswith(section))
    return next(mentioned, next(beside, ""))


def _build_section(section: type[S], prefix: str, values: Mapping[str, Any]) -> S:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        key = prefix + field.name
        inner = section_in(field.type)
        if inner is None and key in values:
            arguments[field.name] = values[key]
        elif inner is not None and any(name.startswith(key + ".") for name in values):
            arguments[field.name] = _build_section(inner, key + ".", values)
        elif field.required:
            raise ConfigError("is missing, and has no default", key=key)
    try:
        return section(**arguments)
    except ConfigError as exc:
        raise ConfigError(exc.message, key=prefix + exc.key) from None


def _convert(leaf: Leaf, entry: Entry) -> Any:
    try:
        value = msgspec.convert(entry.value, leaf.type, strict=not entry.is_text, dec_hook=decode_custom)
    except msgspec.ValidationError as exc:
        raise ConfigError(_describe_error(leaf, entry, str(exc)), key=leaf.key, source=entry.source) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{value} is not a finite number", key=leaf.key, source=entry.source)
    if isinstance(value, Path) and os.path.expanduser(entry.value).startswith("~/"):
        # Not a folder of that name, which would depend on the current one.
        problem = f"{entry.value}: the home directory of this user is unknown; write the path without ~"
        raise ConfigError(problem, key=leaf.key, source=entry.source)
    if isinstance(value, LiteralSecret):
        return LiteralSecret(value.reveal(), entry.source)
    return value


def decode_custom(type_: type, value: Any) -> Any:
    """Convert secrets and paths, which msgspec does not support; its `dec_hook`."""
    if type_ is Secret:
        return decode_secret(value)
    if type_ is Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError("expected a path")
        # Absolute, for messages and in case the working directory changes.
        return Path(os.path.expanduser(value)).absolute()
    raise NotImplementedError(type_)


def _describe_error(leaf: Leaf, entry: Entry, problem: str) -> str:
    """Describe an invalid value and the allowed ones, without showing a secret."""
    if leaf.is_secret:
        return problem
    shown = entry.value if entry.is_text else repr(entry.value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
    close = difflib.get_close_matches(str(entry.value), map(str, leaf.choices), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{shown}: expected {expectation(leaf)}{hint}"
