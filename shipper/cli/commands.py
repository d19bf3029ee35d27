"""How commands and their options look: groups in help, older spellings, and what a misspelt option may have meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from shipper.model.printable import printable

C = TypeVar("C", bound=Callable[..., Any])

# The library has no public name for what its errors of usage have in common.
_UsageError: Final = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
_UNBROKEN: Final = "\N{NON-BREAKING HYPHEN}"  # stands in for a hyphen, after which a line would end
_FAR_BOUNDS: Final = re.compile(r"(; )?-?\d*<=x<=\d{9,}")  # they only keep numbers within what can be stored


class Command(TyperCommand):
    """
    A command whose options have one spelling in help and errors, and stand there by panel.

    Of several long spellings of an option the first one is shown; the others are older ones, which still work. `--json`
    among them means json.
    """

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._older: dict[str, Any] = {}
        for param in self.params:
            older = [spelling for spelling in param.opts if spelling.startswith("--")][1:]
            self._older |= dict.fromkeys(older, param)
            param.opts = [spelling for spelling in param.opts if spelling not in older]

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for spelling, param in self._older.items():
            if spelling == "--json":
                parser.add_option(obj=param, opts=[spelling], dest=param.name, action="store_const", const="json")
            else:
                parser.add_option(obj=param, opts=[spelling], dest=param.name)
        return parser

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Leave out arguments that are an older spelling, and braces around what is required."""
        shown = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        return ["[OPTIONS]", *(piece.strip("{}") for param in shown for piece in param.get_usage_pieces(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := help_record(param, ctx):
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).append(record)
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows])
        formatter.buffer[:] = [text.replace(_UNBROKEN, "-") for text in formatter.buffer]


def help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """Return how help shows an option or argument and what it says of it; None if it is hidden."""
    record = param.get_help_record(ctx)
    return record and (record[0], _FAR_BOUNDS.sub("", record[1]).replace("  []", ""))


class Commands(TyperGroup):
    """Commands whose first sentences are shown in full."""

    groups: Mapping[str, Collection[str]] = {}  # by title; what is in none stands under "Commands"

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
    """A group of commands, or all of them; without one of them, its help is shown."""

    def __init__(self, name: str, about: str, cls: type[TyperGroup] = Commands, **extra: Any) -> None:
        super().__init__(name=name, help=about, cls=cls, no_args_is_help=True, rich_markup_mode=None, **extra)

    def command(self, *args: Any, **extra: Any) -> Callable[[C], C]:
        return super().command(*args, **{"cls": Command, **extra})


@contextmanager
def clear_usage_errors() -> Iterator[None]:
    """Escape control characters in usage errors, and name the option that is nearest to a misspelt one."""
    try:
        yield
    except _UsageError as error:
        error.message = printable(error.message, keep="\n\t")
        if nearest := getattr(error, "possibilities", None):  # the nearest one first
            error.message += f". Did you mean {nearest[0]}?"
            cast(Any, error).possibilities = None
        raise
