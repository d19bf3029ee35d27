"""
No regular expression of the package can match the same bytes in many ways, as their syntax trees prove.

How often a search begins anew is not seen here; `test_bounds.py` counts it where the bytes are many.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import shipper
from shipper.model.framing import CsvRows
from tests.cases import each

_REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT}
_MANY = 100  # a repeat of fewer is a constant


def patterns_in(value: Any, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    value = getattr(value, "__self__", value)  # of a bound method
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict) and depth < 3:
        yield from patterns_in(list(value.values()), depth + 1)
    elif isinstance(value, list | tuple) and depth < 3:
        for each_one in value:
            yield from patterns_in(each_one, depth + 1)


def patterns_by_module() -> Iterator[tuple[str, re.Pattern[Any]]]:
    for module in pkgutil.walk_packages(shipper.__path__, "shipper."):
        if not module.name.endswith("__main__"):
            names = vars(importlib.import_module(module.name))
            for value in list(names.values()):
                if not isinstance(value, type(importlib)):
                    yield from ((module.name, pattern) for pattern in patterns_in(value))


def parts_of(node: Any) -> list[Any]:
    """Return the sequences that a node consists of."""
    code, argument = node
    if code in _REPEATS:
        return [argument[2]]
    if code is codes.SUBPATTERN:
        return [argument[3]]
    if code is codes.BRANCH:
        return list(argument[1])
    if code is codes.ATOMIC_GROUP:
        return [argument]
    return []


def may_be_empty(sequence: Iterable[Any]) -> bool:
    return all(
        code in {codes.AT, codes.ASSERT, codes.ASSERT_NOT, codes.GROUPREF, codes.GROUPREF_EXISTS}
        or (code in _REPEATS and (argument[0] == 0 or may_be_empty(argument[2])))
        or (code in {codes.SUBPATTERN, codes.BRANCH} and any(map(may_be_empty, parts_of((code, argument)))))
        for code, argument in sequence
    )


def is_one_character(node: Any) -> bool:
    return node[0] in {codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY}


def set_of(node: Any, flags: int) -> frozenset[int]:
    """Which of the first 256 characters a node of one character matches."""
    alone = compiler.compile(parser.SubPattern(parser.State(), [node]), flags)
    return frozenset(code for code in range(256) if alone.fullmatch(chr(code)))


def characters_at_edge(sequence: Iterable[Any], flags: int, *, is_end: bool, only_repeated: bool) -> frozenset[int]:
    """Which characters a sequence may begin or end with; of those only what is repeated without a limit, if asked."""
    found: frozenset[int] = frozenset()
    for node in reversed(list(sequence)) if is_end else sequence:
        code, argument = node
        if is_one_character(node):
            found |= frozenset() if only_repeated else set_of(node, flags)
        else:
            is_many = code in _REPEATS and argument[1] >= _MANY
            for part in parts_of(node):
                is_single = len(part) == 1 and is_one_character(part[0])
                repeated = only_repeated and not (is_many and is_single)
                found |= characters_at_edge(part, flags, is_end=is_end, only_repeated=repeated)
        if not may_be_empty([node]):
            break
    return found


def ambiguities(sequence: Iterable[Any], flags: int) -> Iterator[str]:
    """Name the repeats without a limit that share characters with a neighbour, or with their own next turn."""
    nodes = list(sequence)
    for index, node in enumerate(nodes):
        for part in parts_of(node):
            yield from ambiguities(part, flags)
        if node[0] not in _REPEATS or node[1][1] < _MANY or node[0] is codes.POSSESSIVE_REPEAT:
            continue
        body = node[1][2]
        if may_be_empty(body):
            yield "a repeat of what may be empty"
        at_end = characters_at_edge(body, flags, is_end=True, only_repeated=True)
        if at_end & characters_at_edge(body, flags, is_end=False, only_repeated=False):
            yield "a repeat within a repeat that shares its characters"
        at_end = characters_at_edge([node], flags, is_end=True, only_repeated=True)
        if at_end & characters_at_edge(nodes[index + 1 :], flags, is_end=False, only_repeated=True):
            yield "two repeats side by side that share characters"


def ambiguities_of(pattern: re.Pattern[Any]) -> list[str]:
    flags = pattern.flags & ~re.DEBUG
    return list(ambiguities(parser.parse(pattern.pattern, flags), flags))


@each(
    "written",
    [r"(a+)+b", r"(?:a*)*", r"a*a*b", r"\s*,?\s*x", r"(?:a|a+b?)*c", r"[^x]*\w*!", r"(?:\d+,?)*;", r"a*(b?a*)c"],
)
def test_patterns_that_match_in_many_ways_are_found(written: str):
    assert ambiguities_of(re.compile(written))


@each(
    "written",
    [r"(?:[0-9]+_[a-f]{32}\n)*", r'"[^"\\]*(?:\\.[^"\\]*)*"', r"\s*:\s*", r"a+b+", r"(?:a{1,9}b)*", r"(?:a++)*+"],
)
def test_patterns_that_match_in_one_way_are_not(written: str):
    assert not ambiguities_of(re.compile(written))


def test_no_pattern_of_the_package_matches_in_many_ways():
    found = {(module, pattern.pattern, pattern.flags): pattern for module, pattern in patterns_by_module()}
    rows = CsvRows(b"a,b\n", ",")
    for row in (rows._row, rows._partial_row):
        found["shipper.model.framing", row.pattern, row.flags] = row
    assert len(found) > 40, "the patterns are not found"
    ambiguous = {
        (module, str(written)): why
        for (module, written, _), pattern in found.items()
        if (why := ambiguities_of(pattern))
    }
    assert not ambiguous
