"""Fault scripts: parsing, and the requests that they match."""

from __future__ import annotations

from codecs import BOM_UTF8
from itertools import product
from pathlib import Path

import pytest

from shipper.model.errors import ConfigError
from shipper.sandbox import faults
from shipper.sandbox.faults import (
    EFFECTS,
    OPERATIONS,
    AnyFault,
    Chance,
    Delay,
    Drip,
    FaultPlan,
    FaultScript,
    Hang,
    Html,
    Operation,
    Reset,
    RotateKey,
    Status,
    Truncate,
    load_script,
    ranges,
    read_rule,
    read_script,
)
from tests.cases import each

LAST = 10**9


# Ranges


@each(
    ("text", "expected"),
    [
        *(("3", [(3, 3)]), ("5-9", [(5, 9)]), ("5-5", [(5, 5)]), ("20-", [(20, LAST)]), ("007", [(7, 7)])),
        *((" 3 , 5-9 ", [(3, 3), (5, 9)]), ("9,1-2", [(9, 9), (1, 2)])),
        ("3,5-9,20-", [(3, 3), (5, 9), (20, LAST)]),
        ("999999999", [(999_999_999, 999_999_999)]),
    ],
)
def test_ranges_are_pairs_of_first_and_last(text, expected):
    assert ranges(text) == expected


@each("text", ["x", "", ",", "1,", "-5", "1-2-3", "1 - 2", "1.5", "²", "1\n2", "1000000000", "+1"])
def test_invalid_range_is_refused_with_the_invalid_part(text):
    with pytest.raises(ValueError, match="is not a number or a range such as 5-9 or 5-"):
        ranges(text)


@pytest.mark.parametrize("text", ["0", "0-5", "9-5", "2,9-5"])
def test_empty_range_is_refused(text):
    part = text.split(",")[-1]
    with pytest.raises(ValueError, match=f"'{part}' is empty; requests are counted from 1"):
        ranges(text)


# One line


@each(
    ("text", "rule"),
    [
        ("reset", Reset()),
        ("  reset  when=after ", Reset(when="after")),
        ("status status=503", Status(status=503)),
        ("status status=429 retry_after=7 message=Slow", Status(status=429, retry_after="7", message="Slow")),
        ("status status=503 requests=5-9", Status(status=503, requests="5-9")),
        ("html operation=any every=7", Html(operation="any", every=7)),
        ("delay seconds=0.5 probability=0.25 times=3", Delay(seconds=0.5, probability=0.25, times=3)),
        ("delay seconds=1", Delay(seconds=1.0)),
        ("hang operation=token", Hang(operation="token")),
        ("truncate", Truncate()),
        ("truncate when=after", Truncate(when="after")),
        ("drip", Drip()),
        ("drip seconds=0", Drip(seconds=0.0)),
        ("rotate_key key=secondary requests=2", RotateKey(key="secondary", requests="2")),
        ("chance probability=1", Chance(probability=1.0)),
    ],
)
def test_rule_is_an_effect_and_its_conditions(text, rule):
    assert read_rule(text, source="--fault") == rule


@each(
    ("text", "place"),
    [
        *((text, "$.effect") for text in ("", "nonsense", "Reset")),
        ("status", "required field `status`"),
        *((f"status status={value}", "$.status") for value in ("x", "199", "600", "99999999999999999999999")),
        ("delay", "required field `seconds`"),
        *((f"delay seconds={value}", "$.seconds") for value in ("-1", "86401", "nan", "inf")),
        *((f"reset probability={value}", "$.probability") for value in ("nan", "0", "1.1")),
        *((f"reset every={value}", "$.every") for value in ("0", "1.5")),
        ("reset times=0", "$.times"),
        ("reset requests=0", "'0' is empty"),
        ("reset requests=x", "'x' is not a number"),
        ("reset operation=all", "$.operation"),
        ("reset when=during", "$.when"),
        *((f"{effect} when=before", "$.when") for effect in ("truncate", "drip")),
        *((f"{effect} when=after", "$.when") for effect in ("chance", "rotate_key")),
        ("rotate_key key=third", "$.key"),
        ("reset status=503", "unknown field `status`"),
        ("reset colour=red", "unknown field `colour`"),
        ("status status=503 retry_after=é", "$.retry_after"),
        ("reset effect=html", "'effect=html' is not NAME=VALUE, or repeats a name"),
        ("reset every=1 every=2", "'every=2' is not NAME=VALUE, or repeats a name"),
        ("reset every", "'every' is not NAME=VALUE, or repeats a name"),
        ("reset requests=1, 2", "'2' is not NAME=VALUE, or repeats a name"),
        ("reset =1", "unknown field ``"),
    ],
)
def test_invalid_rule_is_refused_with_its_text_and_position(text, place):
    with pytest.raises(ConfigError) as caught:
        read_rule(text, source="--fault")
    assert str(caught.value).startswith("--fault")
    assert repr(text) in str(caught.value)
    assert place in str(caught.value)
    assert str(caught.value).endswith(f"; the effects are {', '.join(EFFECTS)}") == (place == "$.effect")


def test_effects_are_those_of_the_rules():
    assert EFFECTS == ("chance", "delay", "drip", "hang", "html", "reset", "rotate_key", "status", "truncate")


# A script

TOML = b"""
seed = 7

[[fault]]
effect = "status"
status = 503
requests = "5-9"

[[fault]]
effect = "reset"
every = 7
when = "after"
"""
JSON = b"""{"seed":7,"fault":[
    {"effect":"status","status":503,"requests":"5-9"},
    {"effect":"reset","every":7,"when":"after"}
]}"""
SCRIPT = FaultScript(seed=7, fault=[Status(status=503, requests="5-9"), Reset(every=7, when="after")])


def test_script_is_toml_or_json_and_may_begin_with_a_byte_order_mark(tmp_path: Path):
    assert read_script(TOML, source="it") == SCRIPT
    assert read_script(JSON, source="it", is_json=True) == SCRIPT
    for name, document in product(("a.toml", "a.json", "a"), (b"", BOM_UTF8)):
        (tmp_path / name).write_bytes(document + (JSON if name == "a.json" else TOML))
        assert load_script(tmp_path / name) == SCRIPT


def test_script_in_the_module_docstring_is_valid():
    text = "".join(line.removeprefix("    ") for line in faults.__doc__.splitlines(True) if line.startswith("    "))
    assert read_script(text.encode(), source="docstring") == SCRIPT


def test_empty_script_has_no_rules():
    assert read_script(b"", source="it") == read_script(b"{}", source="it", is_json=True) == FaultScript()


@each(
    ("document", "place"),
    [
        (b"[[", ""),
        (b"seed = 1\n]", "line 2"),
        (b"\xff", "byte 0xff"),
        (b"x = 1", "unknown field `x`"),
        (b"seed = 1.5", "$.seed"),
        (b"fault = 3", "$.fault"),
        (b"[fault]\neffect = 'reset'", "$.fault"),
        (b"[[fault]]", "`effect` - at `$.fault[0]`"),
        (b"[[fault]]\neffect = 'reset'\n[[fault]]\neffect = 'x'", "$.fault[1].effect"),
        (b"[[fault]]\neffect = 'reset'\nevery = '7'", "$.fault[0].every"),
        (b"[[fault]]\neffect = 'reset'\nrequests = 7", "$.fault[0].requests"),
        (b"[[fault]]\neffect = 'delay'\nseconds = nan", "$.fault[0].seconds"),
        (b"[[fault]]\neffect = 'delay'\nseconds = inf", "$.fault[0].seconds"),
        (b"[[fault]]\neffect = 'reset'\nprobability = nan", "$.fault[0].probability"),
        (b"[[fault]]\neffect = 'reset'\nwhen = 2026-03-01", "$.fault[0].when"),
        (b'[[fault]]\neffect = "status"\nstatus = 503\nretry_after = "1\\n"', "$.fault[0].retry_after"),
        (b"seed = " + b"1" * 5000, ""),
        (b"seed = 2026-02-30", ""),
        (b"x = " + b"[" * 5000, ""),
    ],
)
def test_invalid_toml_is_refused_with_its_position(document, place):
    with pytest.raises(ConfigError) as caught:
        read_script(document, source="faults.toml")
    assert str(caught.value).startswith("faults.toml: is invalid: ")
    assert place in str(caught.value)


@each("document", [b"", b"{", b"[]", b"null", b"{} {}", b'{"seed":"\xff"}', b'{"a":' * 100_000])
def test_bad_json_is_refused(document):
    with pytest.raises(ConfigError, match=r"^it: is invalid: "):
        read_script(document, source="it", is_json=True)


def test_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file or directory"):
        load_script(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_script(tmp_path)


# The plan


def picks(plan: FaultPlan, count: int, operation: Operation = "intake") -> list[AnyFault | None]:
    return [plan.pick(operation) for _ in range(count)]


def numbers(rule: AnyFault, count: int = 12) -> list[int]:
    found = picks(FaultPlan(FaultScript(fault=[rule])), count)
    assert {fault for fault in found if fault is not None} <= {rule}
    return [number for number, fault in enumerate(found, 1) if fault is not None]


@each(
    ("rule", "expected"),
    [
        (Reset(), list(range(1, 13))),
        (Reset(requests="3,5-7,11-"), [3, 5, 6, 7, 11, 12]),
        (Reset(requests="100-"), []),
        (Reset(every=5), [5, 10]),
        (Reset(every=1), list(range(1, 13))),
        (Reset(every=13), []),
        (Reset(times=2), [1, 2]),
        (Reset(every=3, requests="4-", times=2), [6, 9]),
        (Reset(probability=1.0), list(range(1, 13))),
        (Reset(operation="any", every=6), [6, 12]),
        (Reset(operation="report"), []),
    ],
)
def test_rule_matches_if_all_its_conditions_hold(rule, expected):
    assert numbers(rule) == expected


def test_first_matching_rule_is_used_and_counted():
    one, two = Status(status=500, requests="2-3"), Status(status=503, times=2)
    plan = FaultPlan(FaultScript(fault=[one, two]))
    assert picks(plan, 6) == [two, one, one, two, None, None]
    assert plan.applied == [2, 2]


def test_each_operation_is_counted_separately():
    rule = Reset(operation="any", requests="2")
    plan = FaultPlan(FaultScript(fault=[rule]))
    assert (plan.seen, plan.applied) == (dict.fromkeys(OPERATIONS, 0), [0])
    order: list[Operation] = ["intake", "report", "report", "token", "intake", "token", "intake"]
    assert [plan.pick(operation) for operation in order] == [None, None, rule, None, rule, rule, None]
    assert plan.seen == {"intake": 3, "report": 2, "token": 2}
    assert plan.applied == [3]


def test_random_faults_depend_only_on_the_seed():
    def drawn(seed: int) -> list[int]:
        plan = FaultPlan(FaultScript(seed=seed, fault=[Reset(probability=0.3)]))
        return [number for number, fault in enumerate(picks(plan, 200), 1) if fault]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 30 < len(drawn(1)) < 90


def test_probability_applies_only_to_requests_that_meet_the_other_conditions():
    rare, often = Reset(every=10, probability=0.5), Reset(probability=0.5)
    rarely = [fault is not None for fault in picks(FaultPlan(FaultScript(fault=[rare])), 200)][9::10]
    assert rarely == [fault is not None for fault in picks(FaultPlan(FaultScript(fault=[often])), 20)]


def test_restart_and_load_reset_the_plan():
    script = FaultScript(seed=3, fault=[Reset(probability=0.5, times=20)])
    plan = FaultPlan(script)
    first = picks(plan, 50)
    plan.restart()
    assert plan.seen["intake"] == 0
    assert picks(plan, 50) == first
    plan.load(script)
    assert picks(plan, 50) == first
    plan.load(FaultScript())
    assert picks(plan, 50) == [None] * 50


def test_random_faults_include_every_fault_that_a_client_can_survive():
    plan = FaultPlan(FaultScript(seed=2, fault=[Chance()]))
    found = picks(plan, 500)
    assert {type(fault) for fault in found} == {Status, Html, Delay, Reset, Truncate, Drip}
    assert {fault.status for fault in found if isinstance(fault, Status)} == {429, 500, 502, 503}
    assert {fault.when for fault in found if isinstance(fault, Reset)} == {"before", "after"}
    assert plan.applied == [500]
    again = FaultPlan(FaultScript(seed=2, fault=[Chance()]))
    assert picks(again, 500) == found
