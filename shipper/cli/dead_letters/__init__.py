"""`shipper dead-letters list|show|export|replay|purge`: look at refused records, send them again, or delete them."""

from __future__ import annotations

import typer

from shipper.cli.common import Commands
from shipper.cli.dead_letters.looking import export, show, show_list
from shipper.cli.dead_letters.purge import purge
from shipper.cli.dead_letters.replay import replay

__all__ = ["dead_letters_app"]

dead_letters_app = typer.Typer(
    name="dead-letters",
    help="List refused records, send them again, or delete them.",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
)
dead_letters_app.command("list")(show_list)
for command in (show, export, replay, purge):
    dead_letters_app.command()(command)
