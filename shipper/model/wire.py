"""
The service's documents in the wire form.

The types express every rule that can be checked while decoding; the formats of IP, BTag, EventId and Timestamp are
checked column by column in `codec.rules`.
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
EMPTY_BODY: Final = BODY_HEAD + BODY_TAIL

EVENT_ID_LENGTH: Final = 36
TIMESTAMP_LENGTH: Final = 20

if TYPE_CHECKING:
    Letters2 = str
    Letters2OrEmpty = str
    Letters3 = str
else:

    class _OneOf:
        """A `Literal` without the checks of `typing`, which take a tenth of the start-up for thousands of values."""

        __origin__ = Literal

        def __init__(self, values: tuple[str, ...]) -> None:
            self.__args__ = values

    # Literals: msgspec looks a value up in a hash table and returns a shared string, which is faster than creating and
    # testing a new one. They contain all letter pairs and triples, as the service documents no list.
    _PAIRS = tuple(map("".join, product(ascii_uppercase, repeat=2)))
    Letters2 = _OneOf(_PAIRS)
    Letters2OrEmpty = _OneOf(("", *_PAIRS))
    Letters3 = _OneOf(tuple(map("".join, product(ascii_uppercase, repeat=3))))

# A figure has up to 30 digits before and 30 after the point; the default context would round sums.
_EXACT: Final = Context(prec=64)

Identifier = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ReportedId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class ActivityEvent(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A player-acquisition event: 13 mandatory fields, in the order of the document."""

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


class AmountPair(Struct, frozen=True, omit_defaults=True):
    """
    A figure and its adjustment; kept separate, as the meaning of their signs is not documented.

    Here and below, None is a figure or name that is missing in the report; encoding omits it again.
    """

    result: Decimal | None = None
    adjustment: Decimal | None = None

    @property
    def total(self) -> Decimal | None:
        """`result + adjustment`, exact; for display only, as the service does not state it."""
        return None if self.result is None or self.adjustment is None else _EXACT.add(self.result, self.adjustment)


class Conversions(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Clicks and their conversions."""

    clicks: Decimal | None = None
    qualified_conversions: AmountPair | None = None
    registrations: AmountPair | None = None


class DepositFigures(Struct, frozen=True, omit_defaults=True):
    """Distinct customers and their total deposits."""

    customers: AmountPair | None = None
    amount: AmountPair | None = None


class Deposits(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Deposits of first-time and of returning depositors."""

    new_depositing_customers: DepositFigures | None = None
    returning_depositing_customers: DepositFigures | None = None


class MarketingSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The figures of a marketing source of a brand."""

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
    """A brand and its marketing sources."""

    id: ReportedId
    name: str | None = None
    marketing_sources: list[MarketingSource]


class ReportSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The account of a report. The service misspells the field of the account id; the attribute does not."""

    affiliate_account_id: ReportedId = msgspec.field(name="affilaiteAccountId")
    affiliate_account_name: str | None = None
    operator_name: str | None = None


class ReportingPeriod(Struct, frozen=True):
    """Start and end as the service writes them: `YYYY-MM-DDThh:mm:ss`, without a zone, so not assumed to be UTC."""

    start: str
    end: str


class DailyReport(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """
    The affiliate daily report.

    Money is `Decimal` with the scale of the service. Times are strings: `reporting_time` has seven fractional digits,
    more than `datetime` supports.
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
    """Encode a report as JSON; every `Decimal` keeps its scale, as the service's `1234.5000`, and None is omitted."""
    return _REPORT_ENCODER.encode(report)
