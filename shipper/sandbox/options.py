"""The options of a sandbox: everything that the service's documentation leaves open."""

from __future__ import annotations

import re
from math import isfinite
from typing import Final, Literal, NamedTuple, Self

from msgspec import Struct

from shipper.model.errors import ConfigError

IN_MEMORY: Final = ":memory:"

Profile = Literal["document", "strict"]
"""The rules that the service and its report follow: only the documented ones, or also publicly known ones."""

Rejection = Literal["partial", "whole"]
"""In a batch with an invalid event, only it is refused, and listed; or all events are, and it is not identified."""

AnswerShape = Literal["counts", "created", "empty", "no-content", "per-event"]
"""The response to an accepted batch: 202 or 201 with a document, 200 or 204 without, 207 with a result per event."""

Repeats = Literal["ignore", "reject", "accept"]
"""What to do with an EventId that was received before."""

Figures = Literal["received", "seeded"]
"""The report has zeros, or plausible figures that depend on a seed; registrations are always those received."""

RetryAfter = Literal["seconds", "date"]
"""The form of the Retry-After header."""

Which = Literal["primary", "secondary"]  # subscription key


class CallLimit(NamedTuple):
    """A maximum number of calls in a number of seconds."""

    calls: int
    seconds: int

    @classmethod
    def parse(cls, text: str, *, key: str) -> Self:
        """Parse `CALLS/SECONDS`; raise ConfigError if it is invalid or a number is 0."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        limit = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not all(limit):
            raise ConfigError(
                f"{text!r} is not CALLS/SECONDS with both above 0, such as 100/60", key=key, source="sandbox"
            )
        return limit


class SandboxOptions(Struct, frozen=True, kw_only=True):
    """All options. The default keys are public, as they only protect invented events on a loopback address."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0 = any free port
    account_id: int = 1001
    subscription_key: str = "sandbox-subscription-key"
    secondary_key: str = "sandbox-secondary-key"
    store_path: str = IN_MEMORY  # or the path of a SQLite file
    blackhole: bool = False  # only count events; store nothing
    profile: Profile = "document"
    rejection: Rejection = "partial"
    answer: AnswerShape = "counts"
    repeats: Repeats = "ignore"
    figures: Figures = "received"
    rate_limit: CallLimit | None = None  # above it: 429
    quota: CallLimit | None = None  # above it: 403
    retry_after: RetryAfter = "seconds"
    max_body_bytes: int = 2 * 1024 * 1024  # compressed and uncompressed; above it: 413
    accept_gzip: bool = False
    latency_seconds: float = 0.0  # delay before each response of the two operations
    jitter_seconds: float = 0.0  # maximum random addition to the delay
    token_lifetime_seconds: int = 3600  # of tokens from the token endpoint; the one printed at start is valid longer
    token_skew_seconds: float = 0.0  # the token endpoint's clock minus the service's
    token_limit: CallLimit = CallLimit(60, 60)  # calls to the token endpoint; above it: 429
    clock_offset_seconds: float = 0.0  # the service's clock minus the machine's
    seed: int = 1  # for all random choices

    def __post_init__(self) -> None:
        for name in ("subscription_key", "secondary_key"):
            key = getattr(self, name)
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ConfigError(
                    "must be non-empty printable ASCII without surrounding spaces", key=name, source="sandbox"
                )
        if self.subscription_key == self.secondary_key:
            raise ConfigError("must differ from subscription_key", key="secondary_key", source="sandbox")
        for name in ("latency_seconds", "jitter_seconds", "token_skew_seconds", "clock_offset_seconds"):
            if not isfinite(getattr(self, name)):
                raise ConfigError("must be a finite number", key=name, source="sandbox")
        if self.blackhole and self.store_path != IN_MEMORY:
            raise ConfigError("stores nothing; it cannot be combined with a store", key="blackhole", source="sandbox")
