"""
The service's documents, field by field, in the wire form.

The types carry every rule that can be checked while decoding; what needs more than one look at a value
(the IP, BTag, EventId and Timestamp forms) is checked column by column in `codec.rules`.
"""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import product
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

INTAKE_PATH: Final = "/dim/v1/player/activities"
REPORT_PATH: Final = "/dpm/v1/dar/{account_id}/{start}/{end}"

EVENT_TYPE: Final = "Acquisition"
BODY_HEAD: Final = b'{"EventType":"Acquisition","events":['
BODY_TAIL: Final = b"]}"

EVENT_ID_LENGTH: Final = 36
TIMESTAMP_LENGTH: Final = 20

if TYPE_CHECKING:
    Letters2 = str
    Letters2OrEmpty = str
    Letters3 = str
else:

    class _OneOf:
        """A `Literal` whose thousands of values `typing` does not look through at each turn: a tenth of the start."""

        __origin__ = Literal

        def __init__(self, values: tuple[str, ...]) -> None:
            self.__args__ = values

    # Closed sets: msgspec looks a value up in a hash table and hands out one shared string, which is faster
    # than making a new string and testing it. All letter pairs and triples, as the service documents no list.
    _PAIRS = tuple(map("".join, product(ascii_uppercase, repeat=2)))
    Letters2 = _OneOf(_PAIRS)
    Letters2OrEmpty = _OneOf(("", *_PAIRS))
    Letters3 = _OneOf(tuple(map("".join, product(ascii_uppercase, repeat=3))))

# A figure has up to 30 digits before the point and 30 behind it; the default context would round the sum of two.
_EXACT: Final = Context(prec=64)

Identifier = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ReportedId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class ActivityEvent(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One player-acquisition event; 13 fields, in the document's order, always all present."""

    EventId: Annotated[str, Meta(min_length=EVENT_ID_LENGTH, max_length=EVENT_ID_LENGTH)]
    IP: str
    Timestamp: Annotated[str, Meta(min_length=TIMESTAMP_LENGTH, max_length=TIMESTAMP_LENGTH)]
    BTag: str
    ConsumerID: Identifier
    ConsumerCountry: Letters2
    ConsumerCurrencyID: Letters3
    Username: NonEmpty
    BrandID: Identifier
    CustomerCurrencyID: str
    ConsumerStatus: NonEmpty
    AffiliateID: str
    ConsumerState: Letters2OrEmpty


class ActivityBatch(Struct, frozen=True):
    """The body of one intake request."""

    EventType: str
    events: list[ActivityEvent]


class AmountPair(Struct, frozen=True, omit_defaults=True):
    """
    A figure and its adjustment; what their signs mean is not documented, so they stay apart.

    Here and below, what may be missing in a report is None: a figure, a name. Written again it stays missing.
    """

    result: Decimal | None = None
    adjustment: Decimal | None = None

    @property
    def total(self) -> Decimal | None:
        """`result + adjustment`, exact; a convenience for display, not a statement of the service."""
        return None if self.result is None or self.adjustment is None else _EXACT.add(self.result, self.adjustment)


class Conversions(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Clicks and what became of them."""

    clicks: Decimal | None = None
    qualified_conversions: AmountPair | None = None
    registrations: AmountPair | None = None


class DepositFigures(Struct, frozen=True, omit_defaults=True):
    """Distinct customers and the money they deposited."""

    customers: AmountPair | None = None
    amount: AmountPair | None = None


class Deposits(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Deposits of customers that deposited for the first time, and of the others."""

    new_depositing_customers: DepositFigures | None = None
    returning_depositing_customers: DepositFigures | None = None


class MarketingSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The figures of one marketing source under one brand."""

    id: ReportedId
    name: str | None = None
    reporting_currency: str | None = None
    exchange_rate: Decimal | None = None
    active_customers: AmountPair | None = None
    conversions: Conversions | None = None
    deposits: Deposits | None = None
    net_revenue: AmountPair | None = None
    rev_share: AmountPair | None = None
    cpa_revenue: AmountPair | None = None
    fees: AmountPair | None = None
    outgoing_balance: Decimal | None = None


class Brand(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One brand and its marketing sources."""

    id: ReportedId
    name: str | None = None
    marketing_sources: list[MarketingSource]


class ReportSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Whose report it is. The service misspells the account id's field; the attribute is spelled right."""

    affiliate_account_id: ReportedId = msgspec.field(name="affilaiteAccountId")
    affiliate_account_name: str | None = None
    operator_name: str | None = None


class ReportingPeriod(Struct, frozen=True):
    """Both ends as the service writes them: `YYYY-MM-DDThh:mm:ss`, no zone, hence not silently UTC."""

    start: str
    end: str


class DailyReport(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """
    The affiliate daily report.

    Money is `Decimal` with the scale that the service wrote. Times are kept as written: `reporting_time` has
    seven fractional digits, more than `datetime` holds.
    """

    id: str
    last_check_sum: str
    source: ReportSource
    reporting_time: str
    reporting_period: ReportingPeriod
    reporting_currency: str
    opening_balance: Decimal | None = None
    outgoing_balance: Decimal | None = None
    brands: list[Brand]


_REPORT_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


def encode_report(report: DailyReport) -> bytes:
    """
    Write a report as JSON with numbers where the service has numbers.

    Returns:
        UTF-8 JSON; every `Decimal` keeps its scale (`1234.5000`), and what is None is left out.
    """
    return _REPORT_ENCODER.encode(report)
