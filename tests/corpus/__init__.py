"""
Records, and the expected result for each, as data that is easy to review. `base.toml` explains the format.

Expected lines are put together from texts, without a decoder or encoder.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from shipper.config.settings import RecordsSettings

Mode = Literal["normalize", "strict"]
Tokens = dict[str, str]

_BASE: Final = tomllib.loads(Path(__file__).with_name("base.toml").read_text("utf-8"))
_RECORD: Final[Tokens] = _BASE["record"]
_MARK: Final = re.compile(r"⟨(?:hex (?P<hex>[0-9a-f ]+?)|(?P<text>[^⟩]*?))(?: \* (?P<times>[0-9]+))?⟩")
_KEYS: Final = {
    *("with", "without", "length", "line", "at_start", "records", "max_record_bytes", "neighbour"),
    *("as_it_came", "becomes", "breaks", "says", "blank", "strict", "shows"),
}

LATEST: Final[str] = _BASE["latest"]


class Outcome(NamedTuple):
    """The expected result for a line: it is sent as `line`, or breaks `rule`; with neither, it is not a record."""

    line: bytes | None = None
    rule: str = ""
    says: str = ""


class Neighbour(NamedTuple):
    """A good record, as read and as sent."""

    line: bytes
    becomes: bytes


class Entry:
    """An entry of the corpus."""

    def __init__(self, subject: str, name: str, table: dict[str, Any]) -> None:
        assert set(table) <= _KEYS, (name, set(table) - _KEYS)
        assert ("as_it_came" in table) + ("becomes" in table) + ("breaks" in table) + ("blank" in table) == 1, name
        assert "strict" in table or "becomes" not in table, f"{name}: strict?"
        self.name = f"{subject}: {name}"
        self._table = table
        self.rule: str = table.get("breaks", "")
        self.shows: str = table.get("shows", "")
        self.max_record_bytes: int = table.get("max_record_bytes", _BASE["max_record_bytes"])
        self.is_at_start = bool(table.get("at_start"))
        self.line, self._pad = self._made()

    def __repr__(self) -> str:
        return self.name

    def records(self, mode: Mode) -> RecordsSettings:
        """Return the settings of the entry, parsed as from a configuration file."""
        written = {"mode": mode, "dedupe_window": 0, **self._table.get("records", {})}
        return msgspec.convert(written, RecordsSettings)

    def outcome(self, mode: Mode) -> Outcome:
        table = self._table
        strict = table.get("strict", "same") if mode == "strict" else "same"
        if strict == "as it came" or (strict == "same" and "as_it_came" in table):
            return Outcome(self.line)
        if strict != "same":
            return Outcome(rule=strict)
        if "becomes" in table:
            return Outcome(_bytes(_object(_RECORD | table["becomes"]).replace("⟨pad⟩", self._pad)))
        return Outcome(rule=self.rule, says=table.get("says", ""))

    def neighbours(self, first: int, count: int) -> list[Neighbour]:
        """Return good records with other EventIds; none if no record is good with the settings of the entry."""
        written = self._table.get("neighbour", {})
        if written.get("none"):
            return []
        made = []
        for number in range(first, first + count):
            own = _RECORD | {"EventId": f'"a0000000-0000-4000-8000-{number:012x}"'}
            comes = {
                field: token
                for field, token in (own | written.get("with", {})).items()
                if field not in written.get("without", ())
            }
            made.append(Neighbour(_bytes(_object(comes)), _bytes(_object(own | written.get("becomes", {})))))
        return made

    def _made(self) -> tuple[bytes, str]:
        fields = {
            field: token
            for field, token in (_RECORD | self._table.get("with", {})).items()
            if field not in self._table.get("without", ())
        }
        pad = ""
        if length := self._table.get("length"):
            pad = "x" * (length - len(_bytes(_object(fields | {"Username": '""'}))))
            fields["Username"] = f'"{pad}"'
        record = _object(fields)
        line = self._table.get("line", "⟨record⟩")
        return _bytes(line.replace("⟨record⟩", record).replace("⟨inner⟩", record[1:-1])), pad


def _object(fields: Tokens) -> str:
    return "{" + ",".join(f'"{name}":{token}' for name, token in fields.items()) + "}"


def _bytes(text: str) -> bytes:
    made = b""
    at = 0
    for mark in _MARK.finditer(text):
        piece = bytes.fromhex(mark["hex"]) if mark["hex"] else mark["text"].encode()
        assert mark["hex"] or mark["times"], mark[0]
        made += text[at : mark.start()].encode() + piece * int(mark["times"] or 1)
        at = mark.end()
    return made + text[at:].encode()


def _read() -> list[Entry]:
    return [
        Entry(path.stem, name, table)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        if path.stem != "base"
        for name, table in tomllib.loads(path.read_text("utf-8")).items()
    ]


ENTRIES: Final = _read()
