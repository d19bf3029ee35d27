"""`shipper report`: shows the affiliate daily report, stores its versions, and watches it."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

from shipper.cli.commands import App
from shipper.cli.report.show import show
from shipper.cli.report.versions import diff, fetch, history
from shipper.cli.report.watch import watch

_DEFAULT: Final = "show"


class _ReportGroup(TyperGroup):
    """A group that runs the default command unless the first argument names another one."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands.keys() - {_DEFAULT}:
            return super().make_context(info_name, args, parent, **extra)
        return self.commands[_DEFAULT].make_context(info_name, args, parent, **extra)


report_app = App("report", "Fetch the affiliate daily report and show it.", _ReportGroup)
report_app.command(_DEFAULT)(show)
for command in (fetch, history, diff, watch):
    report_app.command()(command)
