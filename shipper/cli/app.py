"""The commands of the command line; one module per verb."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, Final

import typer

from shipper.cli.commands import App, Commands, clear_usage_errors
from shipper.model.version import __version__

_GROUPS: Final = {
    "Ship": {
        "run": "shipper.cli.ship:run",
        "pipe": "shipper.cli.ship:pipe",
        "backfill": "shipper.cli.ship:backfill",
        "retry": "shipper.cli.control:retry",
    },
    "Inspect": {"status": "shipper.cli.status:status", "dead-letters": "shipper.cli.dead_letters:dead_letters_app"},
    "Finance": {
        "report": "shipper.cli.report:report_app",
        "ledger": "shipper.cli.ledger:ledger",
        "reconcile": "shipper.cli.reconcile:reconcile",
    },
    "Set up": {
        "config": "shipper.cli.config:config_app",
        "check": "shipper.cli.check:check",
        "validate": "shipper.cli.validate:validate",
        "mapping": "shipper.cli.mapping:mapping_app",
    },
    "Try out": {
        "demo": "shipper.cli.demo:demo",
        "sandbox": "shipper.cli.sandbox:sandbox",
        "sample": "shipper.cli.sample:sample",
    },
}
_COMMANDS: Final = {name: target for group in _GROUPS.values() for name, target in group.items()}


class _Commands(Commands):
    groups = _GROUPS

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with clear_usage_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with clear_usage_errors():
            return super().invoke(ctx)


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the application; if `arguments` begin with a command, only that one is imported, in a third less time."""
    app = App(
        "shipper",
        "Ship player-acquisition records to an affiliate platform's intake API, exactly accounted for.",
        _Commands,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    first = arguments[0] if arguments else ""
    for name in [first] if first in _COMMANDS else () if first == "--version" else _COMMANDS:
        command = resolve_name(_COMMANDS[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command()(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from shipper.system.native import ENGINE

        print(f"shipper {__version__} ({ENGINE})")
        raise typer.Exit


def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
