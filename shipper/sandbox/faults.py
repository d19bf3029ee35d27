"""
Faults: which request goes wrong, and how.

A script is TOML or JSON; the first rule that fits a request is applied to it:

    seed = 7

    [[fault]]
    effect = "status"           # requests 5 to 9 of the intake answer 503
    status = 503
    requests = "5-9"

    [[fault]]
    effect = "reset"            # every 7th is cut off after its batch was stored
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
# Before the request is looked at, or after it was handled (and its batch stored), in place of the answer.
When = Literal["before", "after"]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]

_RANGE: Final = re.compile(r"([0-9]{1,9})(-([0-9]{1,9})?)?")
_LAST: Final = 10**9


def ranges(text: str) -> list[tuple[int, int]]:
    """
    Read `"3,5-9,20-"` as pairs of first and last number, both included.

    Raises:
        ValueError: It has another form, or a range is empty.
    """
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a number or a range such as 5-9 or 5-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or _LAST)
        if not 1 <= first <= last:
            raise ValueError(f"{part!r} is empty; requests are counted from 1")
        found.append((first, last))
    return found


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="effect"):
    """
    When a rule fits: what is given must all hold. Requests are counted from 1, for each operation by itself.

    Args:
        requests: Numbers and ranges, such as `"3,5-9,20-"`.
        every: Each request whose number it divides.
        probability: Of each request that the others let through.
        times: At most so often.
    """

    operation: Operation | Literal["any"] = "intake"
    requests: str = "1-"
    every: Annotated[int, Meta(ge=1)] = 1
    probability: Annotated[float, Meta(gt=0, le=1)] = 1.0
    times: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        ranges(self.requests)


class Status(Fault, frozen=True, tag="status"):
    """Answer with a status; the body is the gateway's, with `message`."""

    status: Annotated[int, Meta(ge=200, le=599)]
    message: str = "The sandbox was told to answer so."
    retry_after: Annotated[str, Meta(pattern=r"^[ -~]*\Z", max_length=100)] = ""
    when: When = "before"


class Html(Fault, frozen=True, tag="html"):
    """Answer 200 with a web page, as a proxy that wants a login."""

    when: When = "before"


class Delay(Fault, frozen=True, tag="delay"):
    """Wait, then go on."""

    seconds: Seconds
    when: When = "before"


class Hang(Fault, frozen=True, tag="hang"):
    """Do not answer for as long as the client waits."""

    when: When = "before"


class Reset(Fault, frozen=True, tag="reset"):
    """Reset the connection."""

    when: When = "before"


class Truncate(Fault, frozen=True, tag="truncate"):
    """Send the head and half the body of the answer, then close the connection."""

    when: Literal["after"] = "after"


class Drip(Fault, frozen=True, tag="drip"):
    """Send the answer's body byte by byte."""

    seconds: Seconds = 1.0  # between two bytes
    when: Literal["after"] = "after"


class RotateKey(Fault, frozen=True, tag="rotate_key"):
    """Make a subscription key invalid and a new one in its place, then go on."""

    key: Which = "primary"
    when: Literal["before"] = "before"


class Chance(Fault, frozen=True, tag="chance"):
    """Any of a number of faults that a client must survive."""

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
    """Rules in the order in which they are tried, and the seed for those that depend on chance."""

    seed: int = 1
    fault: list[AnyFault] = []


class FaultPlan:
    """The script in force and how far it has got."""

    def __init__(self, script: FaultScript) -> None:
        self.load(script)

    def load(self, script: FaultScript) -> None:
        """Put a script in force; requests are counted from 1 again."""
        self.script = script
        self._ranges = [ranges(rule.requests) for rule in script.fault]
        self.restart()

    def restart(self) -> None:
        """Begin with the same script again."""
        self._rng = Random(self.script.seed)
        self.seen: Counter[Operation] = Counter(dict.fromkeys(OPERATIONS, 0))
        self.applied = [0] * len(self.script.fault)

    def pick(self, operation: Operation) -> AnyFault | None:
        """Count a request and choose what goes wrong with it; None if nothing does."""
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
    """
    Read a script.

    Raises:
        ConfigError: It is neither TOML nor JSON, or says what no rule can say; names the place.
    """
    document = document.removeprefix(BOM_UTF8)
    try:
        if is_json:
            return msgspec.json.decode(document, type=FaultScript)
        return msgspec.convert(tomllib.loads(document.decode()), FaultScript)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # those of TOML and UTF-8 are ValueErrors
        raise _script_error(error, source) from error


def load_script(path: Path) -> FaultScript:
    """
    Read a script from a file: JSON if its name ends in `.json`, else TOML.

    Raises:
        ConfigError: As `read_script`, or the file cannot be read.
    """
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from error
    return read_script(document, source=str(path), is_json=path.suffix == ".json")


def read_rule(text: str, *, source: str) -> AnyFault:
    """
    Read one rule from a line such as `status status=503 requests=5-9`: the effect, then what it depends on.

    Raises:
        ConfigError: It says what no rule can say.
    """
    effect, *words = text.split() or [""]
    entries: dict[str, Any] = {"effect": effect}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in entries:
            raise ConfigError(f"{text!r}: {word!r} is not NAME=VALUE with a name of its own", source=source)
        entries[name] = value
    try:
        rule: AnyFault = msgspec.convert(entries, AnyFault, strict=False)
    except msgspec.ValidationError as error:
        raise _script_error(error, f"{source} {text!r}") from error
    return rule


def _script_error(error: Exception, source: str) -> ConfigError:
    hint = f"; effects are {', '.join(map(str, EFFECTS))}" if "effect" in str(error) else ""
    return ConfigError(f"cannot be understood: {error}{hint}", source=source)
