"""The OpenAPI document is complete and correct compared with the documentation of the service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from shipper.model import wire
from shipper.sandbox.samples import sample_lines
from tests.cases import each

CHOICE = "Sandbox's choice:"
DOCUMENT: dict[str, Any] = json.loads(files("shipper.sandbox").joinpath("openapi.json").read_bytes())
INTAKE = DOCUMENT["paths"][wire.INTAKE_PATH]["post"]
REPORT = DOCUMENT["paths"]["/dpm/v1/dar/{affiliate_account_id}/{start_date}/{end_date}"]["get"]
EVENT = json.loads(next(sample_lines(1, end=datetime(2026, 3, 15, tzinfo=UTC))))


class ActivityBatch(msgspec.Struct):
    EventType: str
    events: list[wire.ActivityEvent]


def objects(node: object = DOCUMENT) -> Iterator[dict[str, Any]]:
    """Yield every object of the document; what stands in an example is none of its own."""
    if isinstance(node, dict):
        yield node
        for name, value in node.items():
            if name != "examples":
                yield from objects(value)
    elif isinstance(node, list):
        for value in node:
            yield from objects(value)


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference; what stands beside it stays."""
    found: Any = DOCUMENT
    for name in node.get("$ref", "#").split("/")[1:]:
        found = found[name]
    return {**found, **node} if "$ref" in node else node


def validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]}, validate_formats=True)


EVENTS = validator({"$ref": "#/components/schemas/ActivityEvent"})


def test_document_is_openapi():
    from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR  # takes a while, for whoever collects tests

    OPENAPI_31_VALIDATOR.validate(DOCUMENT)


@each("name", DOCUMENT["components"]["schemas"])
def test_schemas_are_valid(name):
    jsonschema_rs.Draft202012Validator(
        {**DOCUMENT["components"]["schemas"][name], "components": DOCUMENT["components"]}
    )


def test_every_reference_resolves_and_every_component_is_used():
    used = {node["$ref"] for node in objects() if "$ref" in node}
    assert all(resolved({"$ref": name}) for name in used)
    there = {
        f"#/components/{kind}/{name}"
        for kind, components in DOCUMENT["components"].items()
        for name in components
        if kind != "securitySchemes"
    }
    assert used == there
    assert DOCUMENT["security"] == [{name: [] for name in DOCUMENT["components"]["securitySchemes"]}]


# What the service documents


def fields_of(kind: Any, schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Walk a wire type and its schema side by side; yield path, type and schema of each field of the type."""
    schema = resolved(schema)
    if isinstance(kind, msgspec.inspect.ListType):
        yield from fields_of(kind.item_type, schema["items"], path)
    elif isinstance(kind, msgspec.inspect.StructType):
        assert set(schema["properties"]) == {field.encode_name for field in kind.fields}, path
        assert set(schema["required"]) == set(schema["properties"]), path
        for field in kind.fields:
            property_ = resolved(schema["properties"][field.encode_name])
            yield f"{path}.{field.encode_name}", field.type, property_
            yield from fields_of(field.type, property_, f"{path}.{field.encode_name}")


@pytest.mark.parametrize(
    ("kind", "media"),
    [
        (ActivityBatch, INTAKE["requestBody"]["content"]["application/json"]),
        (wire.DailyReport, REPORT["responses"]["200"]["content"]["application/json"]),
    ],
)
def test_every_field_of_the_wire_is_described(kind, media):
    fields = list(fields_of(msgspec.inspect.type_info(kind), media["schema"]))
    assert len(fields) > 14
    for path, type_, schema in fields:
        assert schema["description"], path
        assert ("object" if isinstance(type_, msgspec.inspect.StructType) else schema["type"]) == schema["type"], path


@pytest.mark.parametrize("operation", [INTAKE, REPORT])
def test_every_header_of_the_service_is_required(operation):
    parameters = {resolved(each)["name"]: resolved(each) for each in operation["parameters"]}
    assert parameters["Cache-Control"]["required"]
    assert parameters["Cache-Control"]["schema"]["const"] == "no-cache"
    assert "Content-Type: application/json" in operation["description"]
    assert "security" not in operation
    token, key = DOCUMENT["components"]["securitySchemes"].values()
    assert (token["type"], token["scheme"], token["bearerFormat"]) == ("http", "bearer", "JWT")
    assert (key["type"], key["in"], key["name"]) == ("apiKey", "header", "Ocp-Apim-Subscription-Key")


def test_path_parameters_are_those_of_the_path():
    names = [each["name"] for each in REPORT["parameters"] if each.get("in") == "path"]
    (path,) = (path for path, item in DOCUMENT["paths"].items() if item.get("get") is REPORT)
    assert re.findall(r"\{(\w+)\}", path) == names
    assert re.sub(r"\{\w+\}", "", path) == re.sub(r"\{\w+\}", "", wire.REPORT_PATH)


@pytest.mark.parametrize(
    ("operation", "successes", "more"),
    [(INTAKE, {"200", "201", "202", "204", "207"}, {"413"}), (REPORT, {"200"}, set())],
)
def test_every_answer_is_documented_and_all_errors_have_one_form(operation, successes, more):
    errors = {"400", "401", "403", "404", "415", "429", "500", "502", "503", "504"} | more
    assert set(operation["responses"]) == successes | errors
    for status in errors:
        answer = resolved(operation["responses"][status])
        check = validator(answer["content"]["application/json"]["schema"])
        assert check.is_valid({"statusCode": int(status), "message": "why"})
        assert not check.is_valid({"statusCode": 418, "message": "why"})
        assert ("headers" in answer) == (status in {"403", "429", "503"})


# What the sandbox chose


def test_configurable_choices_are_marked_and_described():
    marked = [node for node in objects() if "x-sandbox-choice" in node]
    assert all(node["x-sandbox-choice"] is True for node in marked)
    told = [node for node in objects() if CHOICE in str(node.get("description", "")) and "title" not in node]
    assert marked == told
    answers = [resolved(answer) for each in (INTAKE, REPORT) for answer in each["responses"].values()]
    assert all(answer["x-sandbox-choice"] for answer in answers)


# Examples


def examples() -> Iterator[tuple[dict[str, Any], object]]:
    for node in objects():
        if "schema" in node:
            yield from ((node["schema"], each["value"]) for each in node.get("examples", {}).values())
            if "example" in node:
                yield node["schema"], node["example"]


def test_examples_conform_to_their_schemas():
    found = list(examples())
    assert len(found) >= 8
    for schema, value in found:
        validator(schema).validate(value)


def test_report_example_adds_up():
    (example,) = REPORT["responses"]["200"]["content"]["application/json"]["examples"].values()
    report = msgspec.convert(json.loads(json.dumps(example["value"]), parse_float=str), wire.DailyReport, strict=False)
    sources = [source for brand in report.brands for source in brand.marketing_sources]
    assert report.outgoing_balance == report.opening_balance + sum(source.outgoing_balance for source in sources)
    for source in sources:
        assert source.outgoing_balance == source.rev_share.total + source.cpa_revenue.total + source.fees.total


def test_sample_events_conform_to_the_schema():
    for line in sample_lines(200, end=datetime(2026, 3, 15, tzinfo=UTC)):
        EVENTS.validate(json.loads(line))


AT_A_BOUND: dict[str, list[Any]] = {
    "Timestamp": [
        *("2024-02-29T23:59:59Z", "2000-02-29T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"),
    ],
    "IP": ["0.0.0.0", "255.255.255.255"],
    "ConsumerState": [""],
    "AffiliateID": [""],
    "ConsumerID": [2**63 - 1],
    "BTag": ["0_" + "aF" * 16],
}
REFUSED: dict[str, list[Any]] = {
    "EventId": [EVENT["EventId"].upper(), EVENT["EventId"].replace("-", "")],
    "Timestamp": [
        *("1900-02-29T00:00:00Z", "2026-02-29T00:00:00Z", "2026-04-31T00:00:00Z", "0000-01-01T00:00:00Z"),
        *("2026-03-01T24:00:00Z", "2026-03-01T23:59:60Z", "2026-03-01T00:00:00+00:00", "2026-03-01T00:00:00.0Z"),
    ],
    "IP": ["192.0.2.256", "192.0.2.01"],
    "BTag": ["_" + "a" * 32, "1_" + "a" * 31],
    "ConsumerID": [0, 2**63, "1"],
    "BrandID": [1.5],
    "ConsumerCountry": ["gb"],
    "ConsumerCurrencyID": ["EURO"],
    "ConsumerState": ["N"],
    "Username": [""],
    "ConsumerStatus": [""],
    "CustomerCurrencyID": [None],
    "Surname": ["unasked"],
}


@each(("field", "value"), [(field, value) for field, values in AT_A_BOUND.items() for value in values])
def test_event_at_a_bound_conforms_to_the_schema(field, value):
    EVENTS.validate({**EVENT, field: value})


@each(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_event_refused_by_the_intake_violates_the_schema(field, value):
    assert not EVENTS.is_valid({**EVENT, field: value})


@each("field", EVENT)
def test_event_without_a_field_violates_the_schema(field):
    assert not EVENTS.is_valid({name: value for name, value in EVENT.items() if name != field})
