"""Records whose content is a function of seed, lane and number, so that each can be recreated for a comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Final

POISON: Final = "rejected"  # the rule of a record that the service refuses

_ODD_SHARE: Final = 0.1  # must be normalised by shipper
_INVALID_SHARE: Final = 0.004
_POISON_SHARE: Final = 0.003
_COUNTRIES: Final = ["GB", "DE", "SE", "NO", "MT"]
NAMES: Final = ["brisk_otter", "søvnig_gås", "плут", "猫", 'q"uote\\d', "line\nend"]


@dataclass(frozen=True, slots=True)
class Record:
    """
    Attributes:
        key: Identifies lane and number.
        line: The written line, with its newline.
        event: The event that the service must get.
        is_verbatim: Whether the service must get the record byte for byte.
        rule: The rule by which it becomes a dead letter; empty = it is delivered.
    """

    key: int
    line: bytes
    event: dict[str, Any]
    is_verbatim: bool
    rule: str

    @property
    def raw(self) -> bytes:
        return self.line.rstrip(b"\r\n")


class Records:
    """The records of one seed and lane."""

    def __init__(self, seed: int, lane: int) -> None:
        self.lane = lane
        self._seed = seed

    def key(self, number: int) -> int:
        return self.lane << 40 | number

    def make(self, number: int) -> Record:
        rng = Random(f"{self._seed} {self.lane} {number}")
        event = {
            "EventId": f"{self._seed % (1 << 32):08x}-{self.lane:04x}-4000-8000-{number:012x}",
            "IP": f"192.0.2.{rng.randrange(256)}",
            "Timestamp": f"2024-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}T{rng.randrange(24):02}:15:30Z",
            "BTag": f"{rng.randrange(50_000, 60_000)}_{rng.getrandbits(128):032x}",
            "ConsumerID": (self.lane + 1) * 10**9 + number,
            "ConsumerCountry": rng.choice(_COUNTRIES),
            "ConsumerCurrencyID": "EUR",
            "Username": f"{rng.choice(NAMES)}{rng.randrange(10**6)}",
            "BrandID": rng.randrange(11, 15),
            "CustomerCurrencyID": str(rng.randrange(1, 9)),
            "ConsumerStatus": "Verified",
            "AffiliateID": rng.choice(["", "70012"]),
            "ConsumerState": "",
        }
        fate = rng.random()
        if fate < _POISON_SHARE:
            return self._record(number, event, event, rule=POISON)
        if fate < _POISON_SHARE + _INVALID_SHARE:
            return self._invalid(number, event, rng)
        if fate < _POISON_SHARE + _INVALID_SHARE + _ODD_SHARE:
            return self._odd(number, event, rng)
        return self._record(number, event, event)

    def of_event_id(self, event_id: str) -> Record | None:
        """Return the record that has an EventId; None if the EventId is not of this seed and lane."""
        record = self.make(int(event_id[24:], 16))
        return record if record.event["EventId"] == event_id else None

    def _record(
        self,
        number: int,
        written: dict[str, Any],
        event: dict[str, Any],
        *,
        rule: str = "",
        end: bytes = b"\n",
        is_verbatim: bool = True,
    ) -> Record:
        line = json.dumps(written, separators=(",", ":"), ensure_ascii=number % 2 == 0).encode() + end
        return Record(self.key(number), line, event, is_verbatim, rule)

    def _odd(self, number: int, event: dict[str, Any], rng: Random) -> Record:
        changes: dict[str, Any] = rng.choice(
            [
                {"ConsumerCountry": event["ConsumerCountry"].lower()},
                {"EventId": event["EventId"].replace("-", "")},
                {"IP": f"::ffff:{event['IP']}"},
                {"ConsumerID": str(event["ConsumerID"])},
                {"AffiliateID": None} if not event["AffiliateID"] else {"AffiliateID": int(event["AffiliateID"])},
                {"Timestamp": event["Timestamp"].replace("Z", "+00:00")},
                {"Comment": "not for the service"},
                {},
            ]
        )
        end = b"\n" if changes else b"\r\n"
        return self._record(number, {**event, **changes}, event, end=end, is_verbatim=not changes)

    def _invalid(self, number: int, event: dict[str, Any], rng: Random) -> Record:
        ways: list[tuple[str, dict[str, Any]]] = [
            ("country", {"ConsumerCountry": "Atlantis"}),
            ("ip", {"IP": "192.0.2.256"}),
            ("timestamp", {"Timestamp": "2024-02-30T00:00:00Z"}),
            ("consumer_id", {"ConsumerID": 0}),
            ("event_id", {"EventId": event["EventId"][:30] + "z" + event["EventId"][31:]}),
            ("json", {}),
            ("encoding", {}),
        ]
        rule, changes = rng.choice(ways)
        record = self._record(number, {**event, **changes}, event, rule=rule)
        line = record.line
        if rule == "json":
            line = line[: rng.randrange(60, 150)] + b"\n"
        elif rule == "encoding":
            line = line.replace(b'"Verified"', b'"Verif\xffed"')
        return Record(record.key, line, event, True, rule)
