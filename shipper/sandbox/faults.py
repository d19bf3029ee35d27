"""
Faults: which requests fail, and how.

A script is TOML or JSON; the first rule that matches a request is applied:

    seed = 7

    [[fault]]
    effect = "status"           # answer 503 to intake requests 5 to 9
    status = 503
    requests = "5-9"

    [[fault]]
    effect = "reset"            # reset every 7th connection after its batch was stored
    every = 7
    when = "after"
"""

from __future__ import annotations

import re
import tomllib
from codecs import BOM_UTF8
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from shipper.model.errors import ConfigError
from shipper.sandbox.options import Which

Operation = Literal["intake", "report", "token"]
OPERATIONS: Final[tuple[Operation, ...]] = ("intake", "report", "token")
Seconds = Annotated[float, Meta(ge=0, le=86_400)]

_RANGE: Final = re.compile(r"([0-9]{1,9})(-([0-9]{1,9})?)?")
_LAST: Final = 10**9


def ranges(text: str) -> list[tuple[int, int]]:
    """Parse ranges such as `"3,5-9,20-"` into pairs of first and last number; raise ValueError if they are invalid."""
    pairs = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a number or a range such as 5-9 or 5-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or _LAST)
        if not 1 <= first <= last:
            raise ValueError(f"{part!r} is empty; requests are counted from 1")
        pairs.append((first, last))
    return pairs


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="effect"):
    """The conditions of a rule; all must match. Requests are counted from 1, separately for each operation."""

    operation: Operation | Literal["any"] = "intake"
    requests: str = "1-"  # numbers and ranges, such as "3,5-9,20-"
    every: Annotated[int, Meta(ge=1)] = 1  # match every n-th request
    probability: Annotated[float, Meta(gt=0, le=1)] = 1.0  # applies once all other conditions match
    times: Annotated[int, Meta(ge=1)] | None = None  # at most
    # Before the request is handled, or after it was handled (and its batch stored), instead of the response.
    when: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        ranges(self.requests)


class Status(Fault, frozen=True, tag="status"):
    """Answer with a status and `message` in the gateway's error form."""

    status: Annotated[int, Meta(ge=200, le=599)]
    message: str = "The sandbox was configured to give this answer."
    retry_after: Annotated[str, Meta(pattern=r"^[ -~]*\Z", max_length=100)] = ""


class Html(Fault, frozen=True, tag="html"):
    """Answer 200 with an HTML page, like a proxy that requires a login."""


class Delay(Fault, frozen=True, tag="delay"):
    """Wait, then continue normally."""

    seconds: Seconds


class Hang(Fault, frozen=True, tag="hang"):
    """Never answer; wait until the client disconnects."""


class Reset(Fault, frozen=True, tag="reset"):
    """Reset the connection."""


class Truncate(Fault, frozen=True, tag="truncate"):
    """Send the head and half the body of the response, then close the connection."""

    when: Literal["after"] = "after"


class Drip(Fault, frozen=True, tag="drip"):
    """Send the response body byte by byte."""

    seconds: Seconds = 1.0  # between bytes
    when: Literal["after"] = "after"


class RotateKey(Fault, frozen=True, tag="rotate_key"):
    """Replace a subscription key with a new one, then continue normally."""

    key: Which = "primary"
    when: Literal["before"] = "before"


class Chance(Fault, frozen=True, tag="chance"):
    """Apply a random fault that a client must survive."""

    when: Literal["before"] = "before"


AnyFault = Status | Html | Delay | Hang | Reset | Truncate | Drip | RotateKey | Chance
EFFECTS: Final = tuple(sorted(kind.__struct_config__.tag for kind in AnyFault.__args__))

_CHANCES: Final[tuple[AnyFault, ...]] = (
    Status(status=500),
    Status(status=500, when="after"),
    Status(status=502, message="Bad gateway"),
    Status(status=503, retry_after="1"),
    Status(status=429, message="Rate limit is exceeded. Try again in 1 seconds.", retry_after="1"),
    Html(),
    Delay(seconds=0.5),
    Delay(seconds=0.5, when="after"),
    Reset(),
    Reset(when="after"),
    Truncate(),
    Drip(seconds=0.002),
)


class FaultScript(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules in order of precedence, and the seed for random choices."""

    seed: int = 1
    fault: list[AnyFault] = []


class FaultPlan:
    """The current script, and counts of requests and applied rules."""

    def __init__(self, script: FaultScript) -> None:
        self.load(script)

    def load(self, script: FaultScript) -> None:
        """Replace the script and reset the counts."""
        self.script = script
        self._ranges = [ranges(rule.requests) for rule in script.fault]
        self.restart()

    def restart(self) -> None:
        """Reset the counts and the random generator; keep the script."""
        self._rng = Random(self.script.seed)
        self.seen: Counter[Operation] = Counter(dict.fromkeys(OPERATIONS, 0))
        self.applied = [0] * len(self.script.fault)

    def pick(self, operation: Operation) -> AnyFault | None:
        """Count a request and return the fault to apply; None if no rule matches."""
        self.seen[operation] += 1
        number = self.seen[operation]
        for index, rule in enumerate(self.script.fault):
            if (
                rule.operation in {operation, "any"}
                and number % rule.every == 0
                and any(first <= number <= last for first, last in self._ranges[index])
                and (rule.times is None or self.applied[index] < rule.times)
                and (rule.probability == 1 or self._rng.random() < rule.probability)
            ):
                self.applied[index] += 1
                return self._rng.choice(_CHANCES) if isinstance(rule, Chance) else rule
        return None


def read_script(document: bytes, *, source: str, is_json: bool = False) -> FaultScript:
    """Parse a script; raise ConfigError with the position if it is invalid."""
    document = document.removeprefix(BOM_UTF8)
    try:
        if is_json:
            return msgspec.json.decode(document, type=FaultScript)
        return msgspec.convert(tomllib.loads(document.decode()), FaultScript)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # ValueError: TOML and UTF-8
        raise _script_error(error, source) from error


def load_script(path: Path) -> FaultScript:
    """Read a script from a file, JSON if its name ends in `.json`, otherwise TOML; errors as for `read_script`."""
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from error
    return read_script(document, source=str(path), is_json=path.suffix == ".json")


def read_rule(text: str, *, source: str) -> AnyFault:
    """Parse a rule such as `status status=503 requests=5-9`: effect, then attributes; raise ConfigError if invalid."""
    effect, *words = text.split() or [""]
    entries: dict[str, Any] = {"effect": effect}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in entries:
            raise ConfigError(f"{text!r}: {word!r} is not NAME=VALUE, or repeats a name", source=source)
        entries[name] = value
    try:
        rule: AnyFault = msgspec.convert(entries, AnyFault, strict=False)
    except msgspec.ValidationError as error:
        raise _script_error(error, f"{source} {text!r}") from error
    return rule


def _script_error(error: Exception, source: str) -> ConfigError:
    hint = f"; the effects are {', '.join(map(str, EFFECTS))}" if "effect" in str(error) else ""
    return ConfigError(f"is invalid: {error}{hint}", source=source)
