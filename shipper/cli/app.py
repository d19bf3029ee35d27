"""Which commands there are; one file per verb family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from shipper import __version__
from shipper.cli.check import check
from shipper.cli.config import config_app
from shipper.cli.dead_letters import dead_letters_app
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

_COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    *(demo, run, pipe, backfill, validate, check, status),
    *(ledger, reconcile),
    *(sandbox, sample),
)

for command in _COMMANDS:
    app.command()(command)
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
