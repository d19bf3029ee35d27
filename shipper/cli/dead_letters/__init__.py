"""`shipper dead-letters list|show|export|replay|purge`: look at refused records, send them again, or delete them."""

from __future__ import annotations

from shipper.cli.commands import App
from shipper.cli.dead_letters.listing import export, show, show_list
from shipper.cli.dead_letters.purge import purge
from shipper.cli.dead_letters.replay import replay

__all__ = ["dead_letters_app"]

dead_letters_app = App("dead-letters", "List, export, resend or delete refused records.")
dead_letters_app.command("list")(show_list)
for command in (show, export, replay, purge):
    dead_letters_app.command()(command)
