"""The daily report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shipper import wire

_NAME_SHARE: Final = 6  # a name takes a sixth of the width, longer ones are folded: the figures need the room
_NAME_CELLS: Final = range(10, 25)
_CELL_EXTRA: Final = 3  # one blank on either side, one between columns


@dataclass(frozen=True)
class _Column:
    """
    One figure of a marketing source.

    A sum over marketing sources makes sense where `is_additive`: a customer may have come through two of them, and a
    balance is no flow.
    """

    title: str
    figure: Callable[[wire.MarketingSource], wire.AmountPair | Decimal]
    is_money: bool = True
    is_additive: bool = True


_COLUMNS: Final = (
    _Column("Regis-\ntrations", lambda entry: entry.conversions.registrations, is_money=False),
    _Column("Clicks", lambda entry: entry.conversions.clicks, is_money=False),
    _Column("NDC", lambda entry: _new(entry).customers, is_money=False, is_additive=False),
    _Column("RDC", lambda entry: _returning(entry).customers, is_money=False, is_additive=False),
    _Column("Deposits\nof NDC", lambda entry: _new(entry).amount),
    _Column("Deposits\nof RDC", lambda entry: _returning(entry).amount),
    _Column("Net\nrevenue", lambda entry: entry.net_revenue),
    _Column("Revenue\nshare", lambda entry: entry.rev_share),
    _Column("CPA", lambda entry: entry.cpa_revenue),
    _Column("Fees", lambda entry: entry.fees),
    _Column("Outgoing\nbalance", lambda entry: entry.outgoing_balance, is_additive=False),
)


@dataclass(frozen=True)
class _Row:
    """One line of the table: its two names and a cell for every column of `_COLUMNS`."""

    brand: str
    source: str
    cells: tuple[Text, ...]
    is_total: bool = False
    ends_brand: bool = False


def render_table(report: wire.DailyReport, console: Console) -> None:
    """
    Print a report: a head, then one row per brand and marketing source.

    A figure is never cut: what does not fit side by side follows in a further table that begins with the same names.
    An adjustment stands under its result if there is one. A brand of several marketing sources ends with a total of
    the figures that may be added; customers and balances may not.
    """
    console.print(_head(report))
    console.print()
    rows = list(chain.from_iterable(map(_brand_rows, report.brands)))
    if not rows:
        console.print(Text("No brand has figures in this period.", style="dim"))
        return
    name_cells = min(max(console.width // _NAME_SHARE, _NAME_CELLS[0]), _NAME_CELLS[-1])
    for columns in _groups(rows, console.width, name_cells):
        console.print(_table(rows, columns, name_cells))
        console.print()
    console.print(Text("NDC, RDC: new and returning depositing customers.", style="dim"))


def _head(report: wire.DailyReport) -> Table:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    source, period = report.source, report.reporting_period
    lines = {
        "Account": f"{source.affiliate_account_id}  {_clean(source.affiliate_account_name)}",
        "Operator": _clean(source.operator_name),
        "Period": f"{_clean(period.start)} to {_clean(period.end)}",
        "Currency": _clean(report.reporting_currency),
        "Opening balance": _money(report.opening_balance),
        "Outgoing balance": _money(report.outgoing_balance),
        "Made at": _clean(report.reporting_time),
    }
    for label, value in lines.items():
        head.add_row(label, Text(value, style="bold" if label == "Account" else ""))
    return head


def _brand_rows(brand: wire.Brand) -> Iterator[_Row]:
    name = _named(brand.id, brand.name)
    entries = brand.marketing_sources
    for index, entry in enumerate(entries):
        cells = tuple(_cell(column, column.figure(entry)) for column in _COLUMNS)
        yield _Row(name if index == 0 else "", _named(entry.id, entry.name), cells, ends_brand=len(entries) == 1)
    if len(entries) > 1:
        yield _Row("", "total", tuple(_total(column, entries) for column in _COLUMNS), is_total=True, ends_brand=True)


def _total(column: _Column, entries: list[wire.MarketingSource]) -> Text:
    currencies = {(entry.reporting_currency, entry.exchange_rate) for entry in entries}
    if not column.is_additive or (column.is_money and len(currencies) > 1):
        return Text("")
    figures = [_pair(column.figure(entry)) for entry in entries]
    return _cell(
        column,
        wire.AmountPair(
            sum((figure.result for figure in figures), Decimal(0)),
            sum((figure.adjustment for figure in figures), Decimal(0)),
        ),
    )


def _cell(column: _Column, figure: wire.AmountPair | Decimal) -> Text:
    pair, written = _pair(figure), _money if column.is_money else _number
    text = Text(written(pair.result), style="" if pair.result else "dim")
    if pair.adjustment:
        sign = "+" if pair.adjustment > 0 else ""
        text.append(f"\nadj {sign}{written(pair.adjustment)}", style="yellow")
    return text


def _groups(rows: list[_Row], width: int, name_cells: int) -> list[list[int]]:
    """Deal the columns out to as few tables as fit the width, in their order; each takes at least one."""
    names_width = sum(
        min(name_cells, max(map(cell_len, (title, *names)))) + _CELL_EXTRA
        for title, names in (("Brand", [row.brand for row in rows]), ("Source", [row.source for row in rows]))
    )
    groups: list[list[int]] = []
    room = 0
    for index, column in enumerate(_COLUMNS):
        lines = column.title.splitlines() + [line for row in rows for line in row.cells[index].plain.splitlines()]
        needed = max(map(cell_len, lines)) + _CELL_EXTRA
        if not groups or needed > room:
            groups.append([])
            room = width - names_width
        groups[-1].append(index)
        room -= needed
    return groups


def _table(rows: list[_Row], columns: list[int], name_cells: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold")
    for title in ("Brand", "Source"):
        table.add_column(title, overflow="fold", max_width=name_cells, vertical="top")
    for index in columns:
        table.add_column(_COLUMNS[index].title, justify="right", no_wrap=True, vertical="top")
    for row in rows:
        table.add_row(
            Text(row.brand, style="bold"),
            Text(row.source),
            *(row.cells[index] for index in columns),
            style="bold" if row.is_total else None,
            end_section=row.ends_brand,
        )
    return table


def _new(entry: wire.MarketingSource) -> wire.DepositFigures:
    return entry.deposits.new_depositing_customers


def _returning(entry: wire.MarketingSource) -> wire.DepositFigures:
    return entry.deposits.returning_depositing_customers


def _pair(figure: wire.AmountPair | Decimal) -> wire.AmountPair:
    return wire.AmountPair(figure, Decimal(0)) if isinstance(figure, Decimal) else figure


def _money(amount: Decimal) -> str:
    """Write an amount with the decimals that the service wrote, and thousands apart."""
    return f"{amount:,f}"


def _number(count: Decimal) -> str:
    """Write a count; `12.0000` is twelve."""
    return f"{int(count):,}" if count == count.to_integral_value() else f"{count:,f}"


def _named(number: int, name: str) -> str:
    return f"{number}  {_clean(name)}".rstrip()


def _clean(text: str) -> str:
    """Take out what a terminal would obey instead of show; the names come from outside."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
