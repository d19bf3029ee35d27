"""The daily report as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shipper.model import wire
from shipper.model.units import several
from shipper.report.fetching import COMPLETE, Coverage
from shipper.report.formatting import SEVERAL_CURRENCIES, clean, currency, figure, money, with_sign
from shipper.report.metrics import METRICS, Metric, sum_of
from shipper.report.rows import (
    Line,
    ReportVersion,
    are_disjoint,
    by_account,
    lines_of,
    lines_over,
    share_currency,
    shows_currency,
)

T = TypeVar("T")

LINES_MAX: Final = 10_000  # of a table; laying out a line takes about a millisecond and 10 KB
_NAME_SHARE: Final = 6  # a name gets a sixth of the width, and is folded if it is longer
_NAME_CELLS: Final = range(10, 25)
_MARK: Final = "*"  # marks totals with missing periods
_CELL_EXTRA: Final = 3  # one blank on either side, one between columns


def render_tables(fetched: Iterable[ReportVersion], console: Console, coverage: Coverage = COMPLETE) -> None:
    """
    Print reports by account: a header and a table for each period, and sums over the periods.

    Figures are never truncated: columns that do not fit follow in another table with the same names. An adjustment is
    printed below its result; missing figures are empty. A brand with several marketing sources ends with a total of
    the additive figures, which excludes customers and balances.
    """
    accounts = by_account(fetched)
    for line in coverage.lines():
        console.print(Text(f"{line}\n", style="bold red"))
    for periods in accounts:
        for item in periods:
            console.print(_head(item))
            console.print()
            _print_lines(lines_of(item.report), METRICS, item.report.reporting_currency, console)
        if len(periods) > 1:
            _print_sum(periods, console, coverage.of(periods[0].report.source.affiliate_account_id))
    if accounts:
        console.print(Text("NDC, RDC: new and returning depositing customers.", style="dim"))


def new_table(names: Iterable[str], figures: Iterable[str], name_cells: int | None = None) -> Table:
    """Return a table without rows: columns of names, which may be folded, and columns of figures, which may not."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    for title in names:
        table.add_column(title, overflow="fold", max_width=name_cells, vertical="top")
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True, vertical="top")
    return table


def cut(lines: Sequence[T]) -> tuple[Sequence[T], str]:
    """Return the lines that a table shows, and a note on the others; empty if there are none."""
    left_out = len(lines) - LINES_MAX
    return lines[:LINES_MAX], f"{several(left_out, 'more line')}; --format csv has all" if left_out > 0 else ""


def _print_sum(periods: Sequence[ReportVersion], console: Console, covered: str) -> None:
    """Print the sums over several periods of an account; `covered` is `Coverage.of` the account."""
    if not are_disjoint(periods):
        console.print(Text("The periods overlap, so their figures are not added up.\n", style="dim"))
        return
    latest = periods[-1].report
    first, last = periods[0].report.reporting_period.start, latest.reporting_period.end
    account = latest.source.affiliate_account_id
    scope = f"{_MARK} {covered}" if covered else f"all {len(periods)} periods"
    console.print(Text(f"Account {account}, {scope}, {clean(first)} to {clean(last)}\n", style="bold"))
    has_money = share_currency(periods)
    metrics = [metric for metric in METRICS if metric.is_additive and (has_money or not metric.is_money)]
    mark = f" {_MARK}" if covered else ""
    _print_lines(lines_over(periods), metrics, latest.reporting_currency, console, mark)
    if not has_money:
        console.print(Text(f"{SEVERAL_CURRENCIES}\n", style="dim"))
    console.print(Text("Customers are counted per period and not added up.\n", style="dim"))


def _print_lines(
    lines: list[Line], metrics: Sequence[Metric], reporting_currency: str, console: Console, mark: str = ""
) -> None:
    if not lines:
        console.print(Text("No brand has figures in this period.\n", style="dim"))
        return
    names = _names(lines, reporting_currency, mark)
    cells = {metric.name: [_cell(metric, sum_of(metric, line.entries)) for line in lines] for metric in metrics}
    name_cells = min(max(console.width // _NAME_SHARE, _NAME_CELLS[0]), _NAME_CELLS[-1])
    names_width = sum(min(name_cells, _width(title, values)) + _CELL_EXTRA for title, values in names.items())
    next_brands = [*(line.brand for line in lines[1:]), None]
    for group in _groups(metrics, cells, console.width - names_width):
        table = new_table(names, [metric.short_title for metric in group], name_cells)
        for index, line in enumerate(lines):
            table.add_row(
                *(values[index] for values in names.values()),
                *(cells[metric.name][index] for metric in group),
                style=None if line.kind == "source" else "bold",
                end_section=line.brand != next_brands[index],
            )
        console.print(table)
        console.print()


def _names(lines: list[Line], reporting_currency: str, mark: str) -> dict[str, list[Text]]:
    """Return the leading columns: brands without repetition, sources, and currencies if they are needed."""
    brands = []
    previous = None
    for line in lines:
        brand = f"all brands{mark}" if line.kind == "account" else line.brand if line.brand != previous else ""
        brands.append(Text(brand, style="bold"))
        previous = line.brand
    names = {
        "Brand": brands,
        "Source": [Text(f"total{mark}" if line.kind == "brand" else line.source) for line in lines],
    }
    if shows_currency(lines, reporting_currency):
        names["Currency"] = [Text(line.currency) for line in lines]
    return names


def _head(item: ReportVersion) -> Table:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    report = item.report
    source, stated = report.source, report.reporting_period
    lines = {
        "Account": f"{source.affiliate_account_id}  {clean(source.affiliate_account_name)}",
        "Operator": clean(source.operator_name),
        "Period": f"{clean(stated.start)} to {clean(stated.end)}",
        "Currency": currency(report.reporting_currency),
        "Opening balance": "" if report.opening_balance is None else money(report.opening_balance),
        "Outgoing balance": "" if report.outgoing_balance is None else money(report.outgoing_balance),
        "Generated at": clean(report.reporting_time),
        "Fetched at": clean(item.fetched_at),
        "Restated": "figures differ from those fetched earlier" if item.is_restated else "",
    }
    for label, value in lines.items():
        if value:
            head.add_row(label, Text(value, style="bold" if label == "Account" else ""))
    return head


def _cell(metric: Metric, value: wire.AmountPair) -> Text:
    text = Text()
    if value.result is not None:
        text.append(figure(metric, value.result), style="" if value.result else "dim")
    if value.adjustment:
        adjustment = f"adj {with_sign(figure(metric, value.adjustment), value.adjustment)}"
        text.append(adjustment if value.result is None else f"\n{adjustment}", style="yellow")
    return text


def _groups(metrics: Sequence[Metric], cells: dict[str, list[Text]], width: int) -> list[list[Metric]]:
    """Distribute the columns, in order, over as few tables as possible; each has at least one."""
    groups: list[list[Metric]] = []
    room = 0
    for metric in metrics:
        needed = _width(metric.short_title, cells[metric.name]) + _CELL_EXTRA
        if not groups or needed > room:
            groups.append([])
            room = width
        groups[-1].append(metric)
        room -= needed
    return groups


def _width(title: str, cells: Iterable[Text]) -> int:
    texts = (title, *(cell.plain for cell in cells))
    return max(cell_len(line) for text in texts for line in (text.splitlines() or [""]))
