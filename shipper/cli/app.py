"""Which commands there are; one file per verb family."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Final

import typer

from shipper import __version__

_COMMANDS: Final = {
    "demo": "shipper.cli.demo:demo",
    "run": "shipper.cli.ship:run",
    "pipe": "shipper.cli.ship:pipe",
    "backfill": "shipper.cli.ship:backfill",
    "validate": "shipper.cli.validate:validate",
    "check": "shipper.cli.check:check",
    "status": "shipper.cli.status:status",
    "ledger": "shipper.cli.ledger:ledger",
    "reconcile": "shipper.cli.reconcile:reconcile",
    "sandbox": "shipper.cli.sandbox:sandbox",
    "sample": "shipper.cli.sample:sample",
    "report": "shipper.cli.report:report_app",
    "config": "shipper.cli.config:config_app",
    "dead-letters": "shipper.cli.dead_letters:dead_letters_app",
}


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """
    Make the command line.

    Args:
        arguments: What it will be called with. If they begin with a command it gets that one alone, as loading all of
            them takes a seventh of the start.
    """
    app = typer.Typer(
        name="shipper",
        help="Ship player-acquisition records to an affiliate platform's intake API, exactly accounted for.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    for name in [name for name in arguments[:1] if name in _COMMANDS] or _COMMANDS:
        command = resolve_name(_COMMANDS[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command()(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shipper {__version__}")
        raise typer.Exit


def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
