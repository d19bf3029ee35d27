"""Mappings: where values are found, which source fields count as used, and invalid settings."""

from __future__ import annotations

from typing import Any

import pytest

from shipper.codec.documents import SourceMapping
from shipper.codec.normalize import ABSENT
from shipper.config.mapping import FIELDS, field_sources
from shipper.model.errors import ConfigError
from tests.cases import each


def mapped(field: str, written: Any, *documents: dict[str, Any]) -> list[Any]:
    """The values that the mapping reads for one wire field from some documents."""
    return SourceMapping(field_sources({field: written})).columns(documents)[FIELDS.index(field)]


@each(
    ("written", "document", "value"),
    [
        *(("a", {"a": 1}, 1), ("a", {"a": None}, None), ("a", {}, ABSENT)),
        *(("a.b", {"a": {"b": 1}}, 1), ("a.b", {"a.b": 2, "a": {"b": 1}}, 2)),
        *(("a.b", {"a": value}, ABSENT) for value in ({}, "b", ["b"], None)),
        ("a.b.c", {"a": {"b.c": 1}}, ABSENT),
        ("a.b.c", {"a": {"b": {"c": {"d": 1}}}}, {"d": 1}),
        ("a.0", {"a": [1]}, ABSENT),
        ("a b", {"a b": 1}, 1),
        ("No.", {"No.": 1, "No": {"": 2}}, 1),
        ("No.", {"No": {"": 2}}, ABSENT),
        (".", {".": 1}, 1),
        ({"template": "{No.}/{a}"}, {"No.": 1, "a": 2}, "1/2"),
        ({"from": "a", "values": {"x": "y"}}, {"a": "x"}, "y"),
        ({"from": "a", "values": {"x": "y"}}, {"a": "X"}, "X"),
        ({"from": "a", "values": {"1": "y"}}, {"a": 1}, "y"),
        ({"from": "a", "values": {"true": "y"}}, {"a": True}, "y"),
        ({"from": "a", "values": {"1": "y"}}, {"a": True}, True),
        ({"from": "a", "values": {"None": "y"}}, {"a": None}, None),
        ({"from": "a", "values": {"x": "y"}}, {"a": ["x"]}, ["x"]),
        ({"from": "a", "values": {"x": "y"}, "default": "z"}, {"a": "q"}, "z"),
        ({"from": "a", "values": {"x": "y"}, "default": "z"}, {}, "z"),
        *(({"from": "a", "default": "z"}, {"a": value}, value) for value in ("q", 0, False)),
        *(({"from": "a", "default": "z"}, {"a": value}, "z") for value in ("", None)),
        *(({"from": "a", "default": value}, {}, value) for value in (0, "")),
        ({"from": "a.b", "default": "z"}, {"a": 1}, "z"),
        *(({"const": value}, {"IP": "x"}, value) for value in ("c", 0, "")),
        ({"template": "{a}_{b}"}, {"a": 1, "b": "x"}, "1_x"),
        ({"template": "{a.b}"}, {"a": {"b": "x"}}, "x"),
        ({"template": "{a}{a}"}, {"a": "x"}, "xx"),
        ({"template": "{{{a}}}"}, {"a": "x"}, "{x}"),
        ({"template": "{a}"}, {"a": "{b}", "b": "x"}, "{b}"),
        ({"template": "{a}"}, {"a": ""}, ""),
        ({"template": "{a}_{b}"}, {"a": 1}, ABSENT),
        *(({"template": "{a}"}, {"a": value}, ABSENT) for value in (None, True, 1.5)),
        ({"template": "{a}", "default": "z"}, {}, "z"),
        ({"template": "{a}", "values": {"x": "y"}}, {"a": "x"}, "y"),
    ],
)
def test_a_value_is_found_or_absent(written: Any, document: dict[str, Any], value: Any):
    (found,) = mapped("IP", written, document)
    assert (type(found), found) == (type(value), value)
    assert mapped("IP", written, {}, document, {})[1] == value


def test_an_unmapped_field_is_read_from_the_field_of_the_same_name():
    columns = SourceMapping(field_sources({"IP": "ip"})).columns([{field: field for field in FIELDS}, {}])
    assert columns == [[field if field != "IP" else ABSENT, ABSENT] for field in FIELDS]


@each(
    ("mapping", "used", "unused"),
    [
        ({}, set(FIELDS), {"x"}),
        ({"IP": "ip"}, {"ip"}, {"IP"}),
        ({"IP": "client.ip"}, {"client", "client.ip"}, {"IP", "ip"}),
        ({"IP": {"template": "{a}.{b.c}"}}, {"a", "b"}, {"IP", "c"}),
        ({"IP": {"const": "x"}}, {"BTag"}, {"IP"}),
        ({"IP": "BTag", "BTag": "IP"}, {"IP", "BTag"}, set()),
    ],
)
def test_only_mapped_fields_count_as_known(mapping: dict[str, Any], used: set[str], unused: set[str]):
    names = SourceMapping(field_sources(mapping)).names
    assert used <= names
    assert not unused & names


REFUSED: list[tuple[str, Any, str]] = [
    ("Ip", "a", "did you mean IP?"),
    ("xyzzy", "a", "the fields are EventId, IP"),
    *(("IP", written, "has none") for written in ("", {}, {"default": "x"})),
    *(("IP", written, "is invalid") for written in (5, None, ["a"])),
    ("IP", {"form": "a"}, "form"),
    ("IP", {"from": 5}, "$.from"),
    ("IP", {"from": "a", "const": "b"}, "from and const"),
    ("IP", {"from": "a", "template": "{b}"}, "from and template"),
    ("IP", {"const": "a", "template": "{b}"}, "const and template"),
    ("IP", {"const": "a", "default": "b"}, "const cannot be combined with"),
    ("IP", {"const": "a", "values": {"b": "c"}}, "const cannot be combined with"),
    *(("IP", {"const": value}, "$.const") for value in (1.5, True)),
    *(("IP", {"from": "a", "values": values}, "$.values") for values in ({"b": 1.5}, ["b"])),
    ("IP", {"from": "a", "default": []}, "$.default"),
    *(("IP", {"template": text}, "write literal braces twice") for text in ("{", "a}", "{a{b}}")),
    *(("IP", {"template": text}, "only names in braces") for text in ("{}", "{a!r}", "{a:>3}")),
    *(("IP", {"template": text}, "use const instead") for text in ("plain", "{{a}}")),
]


@each(("field", "written", "says"), REFUSED)
def test_a_nonsensical_mapping_is_refused_by_its_key(field: str, written: Any, says: str):
    with pytest.raises(ConfigError) as caught:
        field_sources({"BTag": "btag", field: written})
    assert caught.value.key == f"mapping.{field}"
    assert says in caught.value.message
    assert "\n" not in caught.value.message
