"""What a sandbox is started with: every choice where the service's documentation leaves one."""

from __future__ import annotations

import re
from enum import Enum
from math import isfinite
from typing import Final, Literal, NamedTuple, Self

from msgspec import Struct

from shipper.model.errors import ConfigError

IN_MEMORY: Final = ":memory:"
SECRET_MIN_BYTES: Final = 32  # RFC 7518 §3.2: an HS256 key is at least as long as the hash


class Profile(Enum):
    """Which rules the service and its report hold."""

    DOCUMENT = "document"  # what the service's documentation says, and no more
    STRICT = "strict"  # also what is publicly known of such services


class Rejection(Enum):
    """What an event that breaks a rule does to its batch."""

    PARTIAL = "partial"  # the others are taken, and the answer names it
    WHOLE = "whole"  # nothing is taken, and the answer does not say which it was


class AnswerShape(Enum):
    """How the intake says that it took a batch."""

    COUNTS = "counts"  # 202 with a document
    CREATED = "created"  # 201 with the same document
    EMPTY = "empty"  # 200 without a body
    NO_CONTENT = "no-content"  # 204
    PER_EVENT = "per-event"  # 207 with a result for each event


class Repeats(Enum):
    """What becomes of an EventId that was received before."""

    IGNORE = "ignore"
    REJECT = "reject"
    ACCEPT = "accept"


class Figures(Enum):
    """Where the report's figures come from, apart from the registrations, which are always those received."""

    RECEIVED = "received"  # they are zero
    SEEDED = "seeded"  # invented, plausible, and the same for the same seed


class RetryAfter(Enum):
    """The form of the header."""

    SECONDS = "seconds"
    DATE = "date"


Which = Literal["primary", "secondary"]  # of the two subscription keys


class CallLimit(NamedTuple):
    """So many calls within so many seconds."""

    calls: int
    seconds: int

    @classmethod
    def parse(cls, text: str, *, key: str) -> Self:
        """
        Read `CALLS/SECONDS`.

        Raises:
            ConfigError: It has another form, or one of the numbers is 0.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        limit = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not all(limit):
            raise ConfigError(
                f"{text!r} is not CALLS/SECONDS with both above 0, such as 100/60", key=key, source="sandbox"
            )
        return limit


class SandboxOptions(Struct, frozen=True, kw_only=True):
    """
    Everything that can be chosen.

    The secrets have defaults that anyone can read here: they keep nothing but a service on loopback that holds
    invented events, and a token outlives a restart.

    Args:
        port: 0 means any free port.
        store_path: A SQLite file, or `IN_MEMORY`.
        blackhole: Count what arrives and keep nothing.
        rate_limit: Above it the answer is 429; None is no limit.
        quota: Above it the answer is 403; None is no quota.
        max_body_bytes: Of a request, compressed and not; above it the answer is 413.
        latency_seconds: Wait before each answer of the two operations.
        jitter_seconds: Up to so much is added to it.
        token_lifetime_seconds: Of the tokens that the token endpoint gives out; the one printed at start lives long.
        token_skew_seconds: How far the clock of the token endpoint is ahead of the service's.
        token_limit: Calls to the token endpoint; above it the answer is 429.
        clock_offset_seconds: How far the service's clock is ahead of the machine's.
        seed: For everything that is left to chance.
    Raises:
        ConfigError: A value is out of its bounds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    account_id: int = 1001
    account_name: str = "Sandbox Affiliate"
    operator_name: str = "Sandbox Operator"
    subscription_key: str = "sandbox-subscription-key"
    secondary_key: str = "sandbox-secondary-key"
    token_secret: str = "a-secret-only-for-sandbox-tokens-on-loopback"
    store_path: str = IN_MEMORY
    blackhole: bool = False
    profile: Profile = Profile.DOCUMENT
    rejection: Rejection = Rejection.PARTIAL
    answer: AnswerShape = AnswerShape.COUNTS
    repeats: Repeats = Repeats.IGNORE
    figures: Figures = Figures.RECEIVED
    rate_limit: CallLimit | None = None
    quota: CallLimit | None = None
    retry_after: RetryAfter = RetryAfter.SECONDS
    max_body_bytes: int = 2 * 1024 * 1024
    accept_gzip: bool = False
    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    token_lifetime_seconds: int = 3600
    token_skew_seconds: float = 0.0
    token_limit: CallLimit = CallLimit(60, 60)
    clock_offset_seconds: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("subscription_key", "secondary_key"):
            key = getattr(self, name)
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError("must be printable ASCII, not empty, no blanks around it", key=name, source="sandbox")
        if self.subscription_key == self.secondary_key:
            raise ConfigError("must differ from subscription_key", key="secondary_key", source="sandbox")
        for name in ("latency_seconds", "jitter_seconds", "token_skew_seconds", "clock_offset_seconds"):
            if not isfinite(getattr(self, name)):
                raise ConfigError("must be a finite number", key=name, source="sandbox")
        if len(self.token_secret.encode()) < SECRET_MIN_BYTES:
            raise ConfigError(f"must have at least {SECRET_MIN_BYTES} bytes", key="token_secret", source="sandbox")
        if self.blackhole and self.store_path != IN_MEMORY:
            raise ConfigError("keeps nothing; leave out either it or the store", key="blackhole", source="sandbox")
