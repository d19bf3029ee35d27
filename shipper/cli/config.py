"""The commands `config init`, `show` and `schema`: all made from the settings' types, so no key can be forgotten."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shipper.cli.commands import App
from shipper.cli.common import ConfigOption, OutputOption, SetOption
from shipper.cli.examples import examples
from shipper.cli.writing import checked_target, write
from shipper.config.load import Written, read_written
from shipper.config.schema import Leaf, expectation, json_schema, leaves, section_in
from shipper.config.secrets import MASK, LiteralSecret, SecretReference
from shipper.config.settings import Settings, settings_from
from shipper.model.errors import ConfigError
from shipper.system.files import replace_file

# Written out instead of commented, so that the file shows at once what a first run needs.
_FIRST_STEPS = {
    "intake.base_url": "https://intake.example.com",
    "intake.subscription_key": SecretReference(env="INTAKE_KEY"),
    "intake.token": SecretReference(env="INTAKE_TOKEN"),
}

_HEAD = """\
# The settings of shipper: every key, commented out with its default.
# The environment (SHIPPER__BATCH__MAX_EVENTS=500) overrides this file, the command line (--set batch.max_events=500)
# overrides both. Secrets are references: { env = "NAME" } or { file = "/path" }, mode 0600.
"""


def init(
    path: Annotated[str, typer.Argument(hidden=True)] = "",
    output: OutputOption = "shipper.toml",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """
    Write a commented settings file with every key, its default and what it means.

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


def show(
    config: ConfigOption = None,
    overrides: SetOption = None,
    output: OutputOption = "",
) -> None:
    """
    Print the settings in effect as TOML, with the source of every key that was written somewhere.

    Secrets are not resolved: references stay references, a literal is shown as ***.

    Example: shipper config show --set batch.max_events=500
    """
    target = checked_target(output)
    written = read_written(Settings, config_path=config, environ=os.environ, overrides=overrides or ())
    write(effective_settings(settings_from(written, environ=os.environ), written).encode(), target, form="text")


def schema(output: OutputOption = "") -> None:
    """
    Print a JSON Schema of the settings file, with which editors complete and check it.

    Example: shipper config schema -o shipper.schema.json
    """
    write(f"{json.dumps(json_schema(Settings), indent=2)}\n".encode(), checked_target(output), form="json")


config_app = App("config", "Write and show settings.")
for command in (init, show, schema, examples):
    config_app.command()(command)


def commented_settings() -> str:
    """Make the file of `config init`: `# ` begins a sentence, `#` alone a key that can be switched on."""
    lines = [_HEAD]
    for section, keys in _by_section():
        # What has keys without defaults is all or nothing: of these, only the intake is needed.
        mark = "#" if section == "report" or section.endswith((".oauth2", ".kafka")) else ""
        lines += [f"# {_about(section)}", f"{mark}[{section}]"]
        for leaf in keys:
            mark = "" if leaf.key in _FIRST_STEPS else "#"
            value = _FIRST_STEPS.get(leaf.key, _example(leaf))
            lines += [f"# {_help(leaf)}", f"{mark}{leaf.key.rpartition('.')[2]} = {toml_value(value)}"]
        lines.append("")
    return "\n".join(lines)


def effective_settings(settings: Settings, written: Mapping[str, Written]) -> str:
    """Make the text of `config show`; a valid TOML document."""
    lines: list[str] = []
    for section, keys in _by_section():
        values = _section_values(settings, section)
        lines.append(f"[{section}]" if values is not None else f"# [{section}] is not written")
        for leaf in keys:
            name = leaf.key.rpartition(".")[2]
            value = None if values is None else getattr(values, name)
            if value is not None:
                origin = f"  # {written[leaf.key].source}" if leaf.key in written else ""
                lines.append(f"{name} = {toml_value(value)}{origin}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """
    Write one value as TOML, on one line.

    Args:
        value: Of a setting; a literal secret comes out as `"***"`.
    """
    match value:
        case LiteralSecret():
            return f'"{MASK}"'
        case SecretReference():
            program = value.command and (*value.command[:1], *(MASK for _ in value.command[1:]))  # may hold a secret
            given = (msgspec.structs.asdict(value) | {"command": program}).items()
            return toml_value({name: part for name, part in given if part not in (None, False)})
        case bool():
            return "true" if value else "false"
        case str() | Path():
            # A TOML string is a JSON string, except for DEL; half a surrogate pair has no place in either. What cannot
            # be seen is escaped, such as blanks of other widths, so that the text stays the same however it is shown.
            text = json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False)
            return "".join(each if each.isprintable() else _escaped(each) for each in text)
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            inner = ", ".join(f"{_toml_key(name)} = {toml_value(part)}" for name, part in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return repr(value)


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _by_section() -> Iterator[tuple[str, list[Leaf]]]:
    sections: dict[str, list[Leaf]] = {}
    for leaf in leaves(Settings):
        sections.setdefault(_above(leaf.key), []).append(leaf)
    yield from sections.items()


def _above(key: str) -> str:
    return key.rpartition(".")[0]


def _section_values(settings: Settings, section: str) -> Any:
    values: Any = settings
    for name in section.split("."):
        values = None if values is None else getattr(values, name)
    return values


def _about(section: str) -> str:
    """Describe a section by the description of its field if there is one, else by that of its type."""
    for field in msgspec.structs.fields(Settings):
        if field.name == section:
            words = Leaf(section, field.type, None, Settings).meta.description
            inner = section_in(field.type)
            text = words or (inner.__doc__ if inner else None) or ""
            return f"{text[:1].upper()}{text[1:].rstrip('.')}."
    return f"Part of {_above(section)}."


def _help(leaf: Leaf) -> str:
    bounds = leaf.bounds
    is_limited = leaf.choices or (bounds.ge, bounds.gt, bounds.le) != (None, None, None)
    detail = f" ({expectation(leaf)})" if is_limited else ""
    return f"{leaf.meta.description}{detail}"


def _example(leaf: Leaf) -> Any:
    """Return the value to show: the default, or an example where there is none."""
    if leaf.default is not None and leaf.default is not msgspec.NODEFAULT:
        return leaf.default
    example = (leaf.meta.examples or [""])[0]
    # Both endpoints have the same type, whose examples speak of the intake.
    text = json.dumps(example).replace("INTAKE", leaf.key.split(".")[0].upper())
    return json.loads(text.replace("intake", leaf.key.split(".")[0]))


def _write_private(path: Path, text: str, *, replace: bool) -> None:
    """
    Write a file of mode 0600.

    Raises:
        ConfigError: There is one already, or it cannot be written.
    """
    try:
        if replace:
            replace_file(path, text.encode())
        else:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(text.encode())
    except FileExistsError as exc:
        raise ConfigError("is there already; name another file, or replace it with --force", source=str(path)) from exc
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror or exc}", source=str(path)) from exc
