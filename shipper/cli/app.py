"""Which commands there are; one file per verb family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from shipper import __version__
from shipper.cli import config as config_commands
from shipper.cli import dead_letters
from shipper.cli.check import check
from shipper.cli.demo import demo
from shipper.cli.ledger import ledger
from shipper.cli.reconcile import reconcile
from shipper.cli.report import report_app
from shipper.cli.sample import sample
from shipper.cli.sandbox import sandbox
from shipper.cli.ship import backfill, pipe, run
from shipper.cli.status import status
from shipper.cli.validate import validate

app = typer.Typer(
    name="shipper",
    help="Ship player-acquisition records to an affiliate platform's intake API, exactly accounted for.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(name="config", help="Write and look at settings.", no_args_is_help=True, rich_markup_mode=None)
dead_letters_app = typer.Typer(
    name="dead-letters",
    help="Look at the records that were refused, send them once more, or delete them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    *(demo, run, pipe, backfill, validate, check, status),
    *(ledger, reconcile),
    *(sandbox, sample),
)
_CONFIG_COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    *(config_commands.init, config_commands.show, config_commands.schema),
)
_DEAD_LETTERS_COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "list": dead_letters.show_list,
    "show": dead_letters.show,
    "export": dead_letters.export,
    "replay": dead_letters.replay,
    "purge": dead_letters.purge,
}

for command in _COMMANDS:
    app.command()(command)
for command in _CONFIG_COMMANDS:
    config_app.command()(command)
for name, command in _DEAD_LETTERS_COMMANDS.items():
    dead_letters_app.command(name)(command)
app.add_typer(report_app)
app.add_typer(config_app)
app.add_typer(dead_letters_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shipper {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
