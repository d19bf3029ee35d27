"""Records as an application has them, written as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from types import NoneType
from typing import Final
from uuid import UUID

import msgspec
from msgspec import structs

from shipper.model.wire import ActivityEvent

Record = Mapping[str, object] | ActivityEvent | bytes | str

_BLANKS: Final = b" \t\r\n\0"
_PIECE_BYTES: Final = 1 << 20
_PLAIN: Final = frozenset({str, int, float, bool, NoneType})
_SIMPLE: Final = (str, int, float, datetime, UUID)  # the last two have a text that every reader of JSON knows


def line_of(record: Record, max_bytes: int) -> bytes:
    """
    Write a record as a line. No message quotes a value of the record.

    Returns:
        With its newline.
    Raises:
        TypeError: It is no record, or has a value that JSON has no form for.
        ValueError: It cannot be written as one line, or is longer than `max_bytes`.
    """
    line = _json(record) if isinstance(record, Mapping | ActivityEvent) else _text(record)
    if len(line) > max_bytes:
        raise ValueError(
            f"the record takes {len(line):,} bytes, more than input.max_record_bytes, which is {max_bytes:,}"
        )
    return line + b"\n"


def _json(record: Mapping[str, object] | ActivityEvent) -> bytes:
    try:
        document = structs.asdict(record) if isinstance(record, ActivityEvent) else dict(record)
        if not _PLAIN.issuperset(chain(map(type, document.values()), map(type, document))):
            _check(document)
        line = msgspec.json.encode(document)
        if b"null" in line:  # which is also what a number that JSON does not have is written as
            json.dumps(msgspec.to_builtins(document, str_keys=True), allow_nan=False)
    except UnicodeEncodeError:
        raise ValueError("a text of the record has half of a surrogate pair in it, so it is no Unicode") from None
    except RecursionError:
        raise ValueError("the record is nested too deeply, or within itself") from None
    except ValueError:
        raise ValueError("a number of the record is not finite (NaN or infinity), which JSON cannot say") from None
    return line


def _check(value: object) -> None:
    """
    Raise for a value that JSON has no form for, also where the encoder has one, such as base64 for bytes.

    Raises:
        TypeError: There is one in it.
    """
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"a name in the record is a {type(name).__name__}; the names of JSON are str")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _check(each)
    elif value is not None and not isinstance(value, _SIMPLE):
        raise TypeError(
            f"a value of the record is a {type(value).__name__}, which JSON has no form for: give str, int, float, "
            "bool, None, list, dict, datetime or UUID"
        )


def _text(record: bytes | str) -> bytes:
    if not isinstance(record, bytes | str):
        raise TypeError(
            f"a {type(record).__name__} is no record: give a dict, an ActivityEvent, or a line of JSON as bytes or str"
        )
    try:
        line = record.encode() if isinstance(record, str) else record
    except UnicodeEncodeError:
        raise ValueError("the line has half of a surrogate pair in it, so it is no Unicode") from None
    line = line.removesuffix(b"\n")
    if b"\n" in line:
        raise ValueError(
            "there is a newline in the record, so it is more than one line; for several there is send_many"
        )
    if not line.strip(_BLANKS):
        raise ValueError("the line is blank, so it is no record")
    return line


def pieces_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines to pieces that are written in one go."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)
