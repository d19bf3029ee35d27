"""The commands `config init`, `show` and `schema`, generated from the types of the settings."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shipper.cli.commands import App, flag
from shipper.cli.common import ConfigOption, OutputOption, SetOption
from shipper.cli.examples import examples
from shipper.cli.writing import check_target, write
from shipper.config.load import Entry, read_entries
from shipper.config.schema import Leaf, expectation, json_schema, leaves, section_in
from shipper.config.secrets import MASK, LiteralSecret, SecretReference
from shipper.config.settings import Settings, build_settings
from shipper.model.errors import ConfigError
from shipper.system.files import replace_file

# Not commented out, so that the file shows what a first run needs.
_FIRST_STEPS = {
    "intake.base_url": "https://intake.example.com",
    "intake.subscription_key": SecretReference(env="INTAKE_KEY"),
    "intake.token": SecretReference(env="INTAKE_TOKEN"),
}

_HEAD = """\
# All settings of shipper, commented out, with their defaults.
# The environment (SHIPPER__BATCH__MAX_EVENTS=500) overrides this file, the command line (--set batch.max_events=500)
# overrides both. Secrets are references: { env = "NAME" } or { file = "/path" }, mode 0600.
"""


def init(
    path: Annotated[str, typer.Argument(hidden=True)] = "",
    output: OutputOption = "shipper.toml",
    force: Annotated[bool, flag("Overwrite an existing file.", "--force")] = False,
) -> None:
    """
    Write a commented settings file with every key, its default and its meaning.

    Only its owner can read the file (mode 0600), because it may contain secrets.

    Example: shipper config init -o /etc/shipper/shipper.toml
    """
    text = commented_settings()
    file = path or output
    if file == "-":
        write(text.encode(), None, form="text")
        return
    _write_private(Path(file), text, replace=force)
    print(f"wrote {file}; next: fill in [intake], then check it with: shipper check --online", file=sys.stderr)


def show(config: ConfigOption = None, overrides: SetOption = None, output: OutputOption = "") -> None:
    """
    Print the settings in effect as TOML, with the source of every key that was set.

    Secrets are not resolved: references are shown as such; literals, and names that could be a secret, as ***.

    Example: shipper config show --set batch.max_events=500
    """
    target = check_target(output)
    entries = read_entries(Settings, config_path=config, environ=os.environ, overrides=overrides or ())
    write(effective_settings(build_settings(entries, environ=os.environ), entries).encode(), target, form="text")


def schema(output: OutputOption = "") -> None:
    """
    Print a JSON Schema of the settings file, for completion and validation in editors.

    Example: shipper config schema -o shipper.schema.json
    """
    write(f"{json.dumps(json_schema(Settings), indent=2)}\n".encode(), check_target(output), form="json")


config_app = App("config", "Write and show settings.")
for command in (init, show, schema, examples):
    config_app.command()(command)


def commented_settings() -> str:
    """Return the file of `config init`: `# ` begins a sentence, `#` alone a key that can be uncommented."""
    lines = [_HEAD]
    for section, keys in _by_section().items():
        # Sections that have keys without defaults are optional, except for the intake.
        mark = "#" if section == "report" or section.endswith((".oauth2", ".kafka")) else ""
        lines += [f"# {_describe_section(section)}", f"{mark}[{section}]"]
        for leaf in keys:
            mark = "" if leaf.key in _FIRST_STEPS else "#"
            value = _FIRST_STEPS.get(leaf.key, _example(leaf))
            lines += [f"# {_help(leaf)}", f"{mark}{leaf.key.rpartition('.')[2]} = {toml_value(value)}"]
        lines.append("")
    return "\n".join(lines)


def effective_settings(settings: Settings, entries: Mapping[str, Entry]) -> str:
    """Return the output of `config show`, a valid TOML document."""
    lines: list[str] = []
    for section, keys in _by_section().items():
        values: Any = settings
        for name in section.split("."):
            values = values and getattr(values, name)
        lines.append(f"[{section}]" if values is not None else f"# [{section}] is not set")
        for leaf in keys:
            name = leaf.key.rpartition(".")[2]
            value = None if values is None else getattr(values, name)
            if value is not None:
                origin = f"  # {entries[leaf.key].source}" if leaf.key in entries else ""
                lines.append(f"{name} = {toml_value(value)}{origin}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Return the value of a setting as TOML on one line; a literal secret becomes `"***"`."""
    match value:
        case LiteralSecret():
            return f'"{MASK}"'
        case SecretReference():
            return toml_value(value.shown())
        case bool():
            return "true" if value else "false"
        case str() | Path():
            # A TOML string is a JSON string, except for DEL; lone surrogates are invalid in both. Invisible characters,
            # such as special spaces, are escaped, so that copying the text does not change it.
            text = json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False)
            return "".join(character if character.isprintable() else _escape(character) for character in text)
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            keys = [name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name) for name in value]
            inner = ", ".join(f"{key} = {toml_value(part)}" for key, part in zip(keys, value.values(), strict=True))
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return repr(value)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"


def _by_section() -> dict[str, list[Leaf]]:
    sections: dict[str, list[Leaf]] = {}
    for leaf in leaves(Settings):
        sections.setdefault(leaf.key.rpartition(".")[0], []).append(leaf)
    return sections


def _describe_section(section: str) -> str:
    """Return the description of a section's field or, without one, the docstring of its type."""
    outer: type[msgspec.Struct] = Settings
    text = ""
    for name in section.split("."):
        (field,) = (field for field in msgspec.structs.fields(outer) if field.name == name)
        inner = section_in(field.type)
        assert inner is not None
        text = Leaf(section, field.type, None, outer).meta.description or inner.__doc__ or ""
        outer = inner
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _help(leaf: Leaf) -> str:
    bounds = leaf.bounds
    is_limited = leaf.choices or (bounds.ge, bounds.gt, bounds.le) != (None, None, None)
    detail = f" ({expectation(leaf)})" if is_limited else ""
    return f"{leaf.meta.description}{detail}"


def _example(leaf: Leaf) -> Any:
    """Return the default or, without one, an example."""
    if leaf.default is not None and leaf.default is not msgspec.NODEFAULT:
        return leaf.default
    example = (leaf.meta.examples or [""])[0]
    # Both endpoints have the same type, and its examples are written for the intake.
    text = json.dumps(example).replace("INTAKE", leaf.key.split(".")[0].upper())
    return json.loads(text.replace("intake", leaf.key.split(".")[0]))


def _write_private(path: Path, text: str, *, replace: bool) -> None:
    """Write a file with mode 0600; raise `ConfigError` if it exists already or cannot be written."""
    if not replace and os.path.lexists(path):
        raise ConfigError("already exists; choose another file, or overwrite it with --force", source=str(path))
    try:
        replace_file(path, text.encode())
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror or exc}", source=str(path)) from exc
