"""The sandbox conforms to its OpenAPI document: schemathesis sends it all kinds of requests over a real socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from shipper.sandbox.faults import FaultScript
from shipper.sandbox.faults import Status as StatusFault
from shipper.sandbox.options import AnswerShape, CallLimit, SandboxOptions
from shipper.sandbox.server import Access, sandbox_in_thread
from tests.conftest import SEED

if TYPE_CHECKING:  # importing it would cost every process that collects tests a fifth of a second
    from schemathesis import Case, Response
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events

NOW = 1_773_577_807.25  # 2026-03-15T12:30:07.25Z

RUN = {
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "positive_data_acceptance", "missing_required_header"),
    "ignored_auth",
}
LEFT_OUT = {
    "unsupported_method",  # the gateway intentionally answers 404 instead of 405: it knows operations, not resources
    "allow_header_conformance",  # belongs to 405
    # Nothing can be created and then read, changed or deleted through the two operations.
    "use_after_free",
    "ensure_resource_availability",
    "object_level_authorization",
}

OTHER_ANSWERS = {"counts": 202, "created": 201, "per-event": 207, "empty": 200, "no-content": 204}


class Exchange(NamedTuple):
    """A request of the run and its answer."""

    case: Case
    response: Response


class Run(NamedTuple):
    """
    The result of a schemathesis run.

    Attributes:
        failures: A text for each failed check, and for each error of schemathesis itself.
    """

    exchanges: list[Exchange]
    failures: list[str]

    def statuses(self, method: str) -> Counter[int]:
        return Counter(each.response.status_code for each in self.exchanges if each.case.method == method)


def drive(sandbox: Access, *, examples: int, is_thorough: bool = False) -> Run:
    """
    Run schemathesis on a sandbox.

    Args:
        examples: Number of random requests to each operation.
        is_thorough: Whether to also try each bound and each violation of every keyword.
    """
    import schemathesis
    from schemathesis.engine import from_schema

    document = httpx.get(f"{sandbox.base_url}/_sandbox/openapi.json", trust_env=False).json()
    schema = schemathesis.openapi.from_dict(
        without_formats(document), config=configuration(sandbox, examples, is_thorough)
    )
    schema.hook("map_body")(as_whole_numbers)
    schema.hook("map_path_parameters")(in_order)
    run = Run([], [])
    schema.hook("after_call")(lambda context, case, response: run.exchanges.append(Exchange(case, response)))
    for event in from_schema(schema).execute():
        run.failures.extend(failures_of(event))
    return run


def without_formats(node: Any) -> Any:
    """
    Remove every format that is implied by a pattern.

    Schemathesis would search for strings that match the pattern and not the format; there are none, and the search
    would take nine tenths of its run.
    """
    if isinstance(node, dict):
        implied = {"format"} if "pattern" in node else set()
        return {name: without_formats(value) for name, value in node.items() if name not in implied}
    return [without_formats(each) for each in node] if isinstance(node, list) else node


def configuration(sandbox: Access, examples: int, is_thorough: bool) -> SchemathesisConfig:
    from schemathesis.config import SchemathesisConfig

    return SchemathesisConfig.from_dict(
        {
            "seed": SEED,
            "base-url": sandbox.base_url,
            "auth": {
                "openapi": {
                    "AccessToken": {"bearer": sandbox.token},
                    "SubscriptionKey": {"api_key": sandbox.subscription_key},
                }
            },
            # OpenAPI cannot require this header for a request without a body.
            "operations": [{"include-method": "GET", "headers": {"Content-Type": "application/json"}}],
            "generation": {"max-examples": examples, "database": "none"},
            "phases": {"coverage": {"enabled": is_thorough}, "stateful": {"enabled": False}},
            "checks": {name: {"enabled": False} for name in LEFT_OUT},
            "continue-on-failure": True,
            "suppress-health-check": ["too_slow"],  # a busy machine must fail no test
        }
    )


def as_whole_numbers(context: object, body: Any) -> Any:
    """Write 7.0 as 7: both are integers in JSON Schema, only the latter in the sandbox."""
    if isinstance(body, dict):
        return {name: as_whole_numbers(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [as_whole_numbers(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


def in_order(context: object, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Make the range start before it ends, which a schema cannot require."""
    match path_parameters:
        case {"start_date": str(start), "end_date": str(end)}:
            return {**path_parameters, "start_date": min(start, end), "end_date": max(start, end)}
    return path_parameters


def failures_of(event: events.EngineEvent) -> Iterator[str]:
    """Yield the failures; a skipped operation counts as one."""
    from schemathesis.engine import Status, events

    if isinstance(event, events.NonFatalError):
        yield f"{event.label}: {event.value!r}"
    elif isinstance(event, events.FatalError):
        yield repr(event.exception)
    elif isinstance(event, events.SchemaAnalysisWarnings):
        yield from map(str, event.warnings)
    elif isinstance(event, events.ScenarioFinished) and event.status is not Status.SUCCESS:
        yield f"{event.label}: {event.status} in {event.phase}"
        for check in chain.from_iterable(event.recorder.checks.values()):
            if check.failure_info is not None:
                yield f"{event.label}: {check.name}: {check.failure_info.failure}\n{check.failure_info.code_sample}"


def counts(sandbox: Access) -> dict[str, int]:
    return httpx.get(f"{sandbox.base_url}/_sandbox/counts", trust_env=False).json()


@pytest.fixture(scope="module", autouse=True)
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.mark.long
def test_every_check_of_schemathesis_is_run_or_excluded_for_a_reason():
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    assert RUN.isdisjoint(LEFT_OUT)
    assert set(CHECKS.get_all_names()) == RUN | LEFT_OUT


@pytest.mark.long
def test_sandbox_conforms_to_its_document_in_every_answer_shape():
    # Its status tells whether a whole batch is valid, which schemathesis also knows.
    options = SandboxOptions(port=0, rejection="whole", figures="seeded")
    with sandbox_in_thread(options, clock=lambda: NOW) as (sandbox, _):
        run = drive(sandbox, examples=10, is_thorough=True)
        assert counts(sandbox)["requests"] > 100
        assert counts(sandbox)["events_stored"] > 0
        assert counts(sandbox)["rejected"] > 50
    assert not run.failures, "\n".join(run.failures)
    intake, report = run.statuses("POST"), run.statuses("GET")
    assert intake[202] > 5
    assert intake[400] > 50
    assert {401, 404, 415} <= intake.keys()
    assert report[200] > 2
    assert {400, 401, 404} <= report.keys()

    # All in one test, because the run is expensive and would be repeated in each test process.
    posted = [each for each in run.exchanges if has_reached_the_intake(each)]
    refused = [each for each in posted if each.response.status_code == 400]
    some = [each for each in posted if each.response.status_code == 202] + refused[::8]
    for shape, status in OTHER_ANSWERS.items():
        check_other_answers(some, shape, status)


def check_other_answers(posted: list[Exchange], shape: AnswerShape, status: int) -> None:
    """Send the same batches to a sandbox with another answer shape, which must also be documented."""
    from schemathesis.specs.openapi import checks

    conformance = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    with (
        sandbox_in_thread(SandboxOptions(port=0, answer=shape), clock=lambda: NOW) as (sandbox, _),
        httpx.Client(base_url=sandbox.base_url, trust_env=False) as client,
    ):
        answers = [again(client, each) for each in posted]
        assert counts(sandbox)["rejected"] > 7
    for each, answer in zip(posted, answers, strict=True):
        each.case.validate_response(answer, checks=conformance)
        assert is_refusal(answer) == (each.response.status_code >= 400), shape
    assert {answer.status_code for answer in answers if answer.is_success} == {status}, shape


@pytest.mark.parametrize(
    ("limit", "status", "form"),
    [pytest.param("rate_limit", 429, "date", marks=pytest.mark.long), ("quota", 403, "seconds")],
)
def test_limits_are_answered_as_documented(limit, status, form):
    options = SandboxOptions(port=0, retry_after=form, **{limit: CallLimit(3, 60)})
    with sandbox_in_thread(options, clock=lambda: NOW) as (sandbox, _):
        run = drive(sandbox, examples=6)
    assert not run.failures, "\n".join(run.failures)
    for method in ("POST", "GET"):
        answers = [each.response for each in run.exchanges if each.case.method == method]
        assert {"retry-after" in answer.headers for answer in answers if answer.status_code == status} == {True}


@pytest.mark.long
def test_an_undocumented_answer_is_detected():
    script = FaultScript(fault=[StatusFault(status=418, operation="any", requests="3-")])
    with sandbox_in_thread(SandboxOptions(port=0), script, clock=lambda: NOW) as (sandbox, _):
        run = drive(sandbox, examples=6)
    for method in ("POST", "GET"):
        assert any(text.startswith(method) and "status_code_conformance" in text for text in run.failures)


def has_reached_the_intake(exchange: Exchange) -> bool:
    """Return whether a batch passed the gateway, which checks the body last."""
    headers = exchange.response.request.headers
    is_batch = (exchange.case.method, headers.get("Cache-Control")) == ("POST", "no-cache")
    return is_batch and exchange.response.status_code in {202, 400}


def again(client: httpx.Client, exchange: Exchange) -> httpx.Response:
    request = exchange.response.request
    headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
    return client.request(request.method, request.path_url, headers=headers, content=request.body)


def is_refusal(answer: httpx.Response) -> bool:
    """Return whether an answer accepts less than the whole batch."""
    if answer.is_error:
        return True
    document = answer.json() if answer.content else {}
    return bool(document.get("rejected")) or any(each["status"] != 202 for each in document.get("results", ()))
