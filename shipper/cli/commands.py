"""
Base classes for commands: groups of options, aliases of options, and suggestions for misspelt ones.

A command parameter whose type is a NamedTuple is a group of options, one for each field.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from shipper.model.printable import printable

C = TypeVar("C", bound=Callable[..., Any])

# typer has no public name for the base class of usage errors.
UsageError: Final = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
_UNBROKEN: Final = "\N{NON-BREAKING HYPHEN}"  # replaces hyphens while lines are wrapped
_FAR_BOUNDS: Final = re.compile(r"(; )?-?\d*<=x<=\d{9,}")  # hidden, as they only keep numbers storable


def option(metavar: str, text: str, *names: str, **extra: Any) -> Any:
    """Return an option with a value; by default it has the name of its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, **extra)


def flag(text: str, *names: str, **extra: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(*names, help=text, **extra)


class Command(TyperCommand):
    """
    A command whose help shows one name for each option, grouped by panel.

    Of several long names the first is shown; the others are aliases. The alias `--json` sets the value json.
    """

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._aliases: dict[str, Any] = {}
        for param in self.params:
            aliases = [name for name in param.opts if name.startswith("--")][1:]
            self._aliases |= dict.fromkeys(aliases, param)
            param.opts = [name for name in param.opts if name not in aliases]

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for name, param in self._aliases.items():
            if name == "--json":
                parser.add_option(obj=param, opts=[name], dest=param.name, action="store_const", const="json")
            else:
                parser.add_option(obj=param, opts=[name], dest=param.name)
        return parser

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage without hidden arguments, and without braces around required ones."""
        shown = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        return ["[OPTIONS]", *(piece.strip("{}") for param in shown for piece in param.get_usage_pieces(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := help_record(param, ctx):
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or default
                panels.setdefault(panel, []).append(record)
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows])
        formatter.buffer[:] = [text.replace(_UNBROKEN, "-") for text in formatter.buffer]


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return the usage and the description of an option or argument in help; None if it is hidden."""
    record = param.get_help_record(ctx)
    return record and (record[0], _FAR_BOUNDS.sub("", record[1]).replace("  []", ""))


class Commands(TyperGroup):
    """A group of commands whose help shows their first sentences in full."""

    groups: Mapping[str, Collection[str]] = {}  # by title; the rest is listed under "Commands"

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        grouped = {name for group in self.groups.values() for name in group}
        others = [name for name in names if name not in grouped]
        for title, group in [*self.groups.items(), ("Commands", others)]:
            commands = [(name, self.get_command(ctx, name)) for name in group]
            rows = [(name.ljust(12), _first_sentence(command.help)) for name, command in commands if command]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


class App(typer.Typer):
    """A group of commands; without a command, it shows its help."""

    def __init__(self, name: str, about: str, cls: type[TyperGroup] = Commands, **extra: Any) -> None:
        super().__init__(name=name, help=about, cls=cls, no_args_is_help=True, rich_markup_mode=None, **extra)

    def command(self, *args: Any, **extra: Any) -> Callable[[C], C]:
        register = super().command(*args, **{"cls": Command, **extra})
        return lambda function: register(_flatten_groups(function))


def _flatten_groups(command: C) -> C:
    """Return the command with separate parameters for the options of its groups."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not hasattr(group, "_fields"):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        for name, annotation in get_type_hints(group, include_extras=True).items():
            default = group._field_defaults.get(name, inspect.Parameter.empty)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

    @wraps(command)
    def run(**arguments: Any) -> Any:
        for name, group in groups.items():
            arguments[name] = group(**{field: arguments.pop(field) for field in group._fields})
        return command(**arguments)

    cast(Any, run).__signature__ = inspect.Signature(parameters)
    return cast(C, run)


@contextmanager
def clear_usage_errors() -> Iterator[None]:
    """Escape control characters in usage errors, and suggest the nearest option for a misspelt one."""
    try:
        yield
    except UsageError as error:
        error.message = printable(error.message, keep="\n\t")
        if nearest := getattr(error, "possibilities", None):  # nearest first
            error.message += f". Did you mean {nearest[0]}?"
            cast(Any, error).possibilities = None
        raise
