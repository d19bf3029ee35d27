"""`shipper report`: the affiliate daily report itself, and the verbs that keep its versions and watch it."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

from shipper.cli.commands import App
from shipper.cli.report.fetching import fetch_report
from shipper.cli.report.show import show
from shipper.cli.report.versions import diff, fetch, history
from shipper.cli.report.watch import watch

__all__ = ["fetch_report", "report_app"]

_PLAIN: Final = "show"


class _ReportGroup(TyperGroup):
    """A group whose own arguments are those of the plain command, unless the first of them names a verb."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands.keys() - {_PLAIN}:
            return super().make_context(info_name, args, parent, **extra)
        return self.commands[_PLAIN].make_context(info_name, args, parent, **extra)


report_app = App("report", "Fetch the affiliate daily report and show it.", _ReportGroup)
report_app.command(_PLAIN)(show)
for command in (fetch, history, diff, watch):
    report_app.command()(command)
