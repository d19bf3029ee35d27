"""Mutate inputs: bytes, words with a meaning for the reader, and JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import msgspec

_INTERESTING: Final = b"\0\x01\t\n\r \"'+,-./0129:;<=AEZ[\\]_ae{|}~\x7f\x80\xbf\xc2\xed\xef\xff"
_LONGEST: Final = 4096
_VALUES: Final[tuple[object, ...]] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63 - 1, 2**63, 10**30, 0.5, -0.0, 1e15, 1e300),
    *("", " ", "0", "1", "-1", "1.5", "1e9", "true", "null", "a", "ß", "é\u0301", "\u202e", "\x00", "\x1b[2J", "a\nb"),
    *("x" * 300, [], {}, [[]], [{}], {"": None}, [0, 1, 2], {"a": {"b": [1]}}),
)

Mutate = Callable[[Random, bytes, Sequence[bytes]], bytes]


def mutator(*, words: Sequence[bytes] = (), values: Sequence[object] = (), names: Sequence[str] = ()) -> Mutate:
    """
    Return a function that changes an input slightly.

    Args:
        words: Strings with a meaning for the reader, inserted anywhere.
        values, names: Inserted into JSON lines, in addition to generally interesting values.
    Returns:
        A function of a random generator, an input, and other inputs to take pieces from.
    """
    all_values = [*_VALUES, *values]

    def mutate(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        for _ in range(_times(rng)):
            if names and rng.random() < 0.6:
                data = _with_json_changed(rng, data, all_values, names)
            else:
                data = _with_bytes_changed(rng, data, words, others)
        return data[:_LONGEST] if len(data) > 2 * _LONGEST else data

    return mutate


def _times(rng: Random) -> int:
    times = 1
    while times < 8 and rng.random() < 0.4:
        times += 1
    return times


def _below(rng: Random, end: int) -> int:
    return int(rng.random() * end)  # four times as fast as `randrange`


def _with_bytes_changed(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    at = _below(rng, len(data) + 1)
    to = min(len(data), at + _below(rng, 1 << _below(rng, 7)))
    match _below(rng, 10):
        case 0:
            return data[:at] + bytes((_INTERESTING[_below(rng, len(_INTERESTING))],)) + data[at + 1 :]
        case 1:
            return data[:at] + bytes((_below(rng, 256),)) + data[at + 1 :]
        case 2:
            return data[:at] + data[to:]
        case 3:
            return data[:to] + data[at:]
        case 4:
            return data[:at]
        case 5:
            return data[:at] + data[at:to] * (2 + _below(rng, 40)) + data[to:]
        case 6 | 7 if words:
            return data[:at] + words[_below(rng, len(words))] + data[to if rng.random() < 0.5 else at :]
        case 8:
            other = others[_below(rng, len(others))]
            return data[:at] + other[_below(rng, len(other) + 1) :]
        case _:
            return data[:at] + bytes((data[at] ^ 1 << _below(rng, 8),)) + data[at + 1 :] if at < len(data) else data


def _with_json_changed(rng: Random, data: bytes, values: Sequence[object], names: Sequence[str]) -> bytes:
    """Change a value in one of the lines, if it is JSON."""
    lines = data.split(b"\n")
    index = _below(rng, len(lines))
    if not lines[index].startswith((b"{", b"[")):
        index = next((at for at, line in enumerate(lines) if line.startswith((b"{", b"["))), -1)
    if index < 0:
        return data
    try:
        document = msgspec.json.decode(lines[index])
        lines[index] = msgspec.json.encode(_changed(rng, document, values, names))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return data
    return b"\n".join(lines)


def _changed(rng: Random, node: Any, values: Sequence[object], names: Sequence[str]) -> Any:
    if rng.random() < 0.7 and isinstance(node, dict | list) and node:
        key = list(node)[_below(rng, len(node))] if isinstance(node, dict) else _below(rng, len(node))
        node[key] = _changed(rng, node[key], values, names)
        return node
    value = values[_below(rng, len(values))]
    name = names[_below(rng, len(names))]
    match _below(rng, 7):
        case 0 if isinstance(node, dict) and node:
            del node[list(node)[_below(rng, len(node))]]
            return node
        case 1 | 2 if isinstance(node, dict):
            return {**node, name: value}
        case 3 if isinstance(node, list):
            return [*node, value, *node[:1]]
        case 4:
            return [node]
        case 5:
            return {name: node}
        case _:
            return value
