"""The report client: requests on real sockets, and waits in virtual time."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from datetime import date, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio
import pytest

from shipper.config.secrets import LiteralSecret
from shipper.config.settings import DeliverySettings, EndpointSettings, OAuth2Settings
from shipper.delivery.answer import Answer
from shipper.delivery.endpoint import NoAnswerError
from shipper.model import wire
from shipper.model.errors import ConfigError, NoServiceError, ReportError
from shipper.report import client as client_module
from shipper.report.client import ReportClient
from shipper.report.document import FetchedReport
from shipper.report.fetching import Outcome, fetch_parts
from shipper.report.ranges import DateRange, Part, parts_of
from tests.fakes import answer as answered
from tests.report_documents import brand, entry, report
from tests.report_service import Asked, Reply, ReportService, answer, cut_off, document, ok, refusal, token
from tests.servers import reset, stall
from tests.stage.endpoints import poll
from tests.stage.loops import in_virtual_time, on_each_loop

T = TypeVar("T")

START, END = date(2026, 10, 1), date(2026, 10, 31)
NAMED = "account 1001, 2026-10-01 to 2026-10-31: "
NO_KEY = refusal(401, "Access denied due to invalid subscription key. Make sure to provide a valid key.")


def endpoint(origin: ReportService, **changes: Any) -> EndpointSettings:
    fields = {"subscription_key": LiteralSecret("key-1"), "token": LiteralSecret("a-token"), **changes}
    return EndpointSettings(base_url=origin.url, **fields)


def client(origin: ReportService, *, patience_s: float = 0.0, concurrency: int = 4, **changes: Any) -> ReportClient:
    """Create a client; `changes` are keys of the section. By default there are no retries."""
    return ReportClient(
        endpoint(origin, **changes),
        DeliverySettings(retry_initial_seconds=0.01),
        concurrency=concurrency,
        give_up_after_s=patience_s,
        wall_time=time.time,
        rng=Random(1),
    )


async def refused(used: ReportClient) -> ReportError:
    with pytest.raises(ReportError) as caught:
        await used.fetch(1001, START, END)
    return caught.value


# As a library


@on_each_loop
async def test_example_in_the_docstring_works(origin: ReportService):
    code = re.search(r"\n\n((?: {4}.*\n)+)", client_module.__doc__ or "")
    assert code is not None
    settings = SimpleNamespace(report=endpoint(origin), delivery=DeliverySettings())
    names: dict[str, Any] = {"ReportClient": ReportClient, "settings": settings, "time": time}
    names |= {"Random": Random, "date": date}
    exec(f"async def example():\n{code[1]}    return october", names)
    october = await names["example"]()
    assert isinstance(october, FetchedReport)
    assert october.report.reporting_period.end == "2026-10-31T23:59:59"


@on_each_loop
async def test_report_is_requested_with_path_key_and_token_and_kept_byte_for_byte(origin: ReportService):
    body = document(Asked(1001, START, END, "", "")).replace(b"{", b"{ ", 1)
    origin.rule = lambda _: ok(body)
    async with client(origin) as used:
        fetched = await used.fetch(1001, START, END)
    assert fetched.body == body
    assert fetched.fetched_at == pytest.approx(time.time(), abs=60)
    assert origin.asked == [Asked(1001, START, END, "a-token", "key-1")]


async def test_several_fetches_share_the_connections(origin: ReportService):
    async with client(origin, concurrency=3) as used, anyio.create_task_group() as group:
        for day in range(20):
            group.start_soon(used.fetch, 1001, START, START + timedelta(days=day))
    assert len(origin.asked) == 20
    assert origin.accepted <= 3


@on_each_loop
async def test_cancelled_fetches_leave_no_connection_open(origin: ReportService):
    origin.rule = lambda _: stall
    async with client(origin, concurrency=3) as used:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(used.fetch, 1001, START, END)
            await poll(lambda: len(origin.asked) >= 3)
            group.cancel_scope.cancel()
        origin.rule = lambda _: None
        assert (await used.fetch(1001, START, END)).report, "the client is not usable afterwards"
    await poll(lambda: origin.open_connections == 0)
    assert origin.accepted == 4


@on_each_loop
async def test_cancelling_the_client_itself_leaves_no_connection_open(origin: ReportService):
    origin.rule = lambda _: stall
    with anyio.CancelScope() as scope:
        async with client(origin) as used, anyio.create_task_group() as group:
            group.start_soon(used.fetch, 1001, START, END)
            await poll(lambda: origin.asked)
            scope.cancel()
    assert scope.cancelled_caught
    await poll(lambda: origin.open_connections == 0)


def test_missing_secret_is_a_configuration_error(origin: ReportService):
    with pytest.raises(ConfigError, match=r"report\.token"):
        client(origin, token=LiteralSecret("with\nnewline"))


# Tokens and keys


@on_each_loop
async def test_refused_token_is_renewed_once_for_all(origin: ReportService):
    origin.rule = lambda asked: refusal(401, "expired") if asked.token == "token-1" else None
    settings = OAuth2Settings(token_url=f"{origin.url}/token", client_id="x", client_secret=LiteralSecret("a-secret"))
    async with client(origin, token=None, oauth2=settings) as used, anyio.create_task_group() as group:
        for account in range(1, 5):
            group.start_soon(used.fetch, account, START, END)
    assert len(origin.forms) == 2
    good = [asked.account for asked in origin.asked if asked.token == "token-2"]
    assert sorted(good) == [1, 2, 3, 4]


async def test_token_that_is_refused_again_fails_all_reports(origin: ReportService):
    origin.rule = lambda _: refusal(401, "JWT not present.")
    async with client(origin, patience_s=60) as used:
        error = await refused(used)
    assert isinstance(error, NoServiceError)
    assert str(error).startswith(f"{NAMED}the service refused the access token (HTTP 401")
    assert "; check report.token" in str(error)
    assert len(origin.asked) == 2


async def test_other_key_of_the_pair_replaces_a_refused_one(origin: ReportService):
    origin.rule = lambda asked: NO_KEY if asked.key == "key-1" else None
    async with client(origin, subscription_key_secondary=LiteralSecret("key-2")) as used:
        for _ in range(3):
            await used.fetch(1001, START, END)
    assert [asked.key for asked in origin.asked] == ["key-1", *["key-2"] * 3]


async def test_refused_key_without_another_fails_all_reports(origin: ReportService):
    origin.rule = lambda _: NO_KEY
    async with client(origin, patience_s=60) as used:
        error = await refused(used)
    assert isinstance(error, NoServiceError)
    assert str(error).endswith("; check report.subscription_key")


# Invalid answers


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal(400), "the service refuses this account or period; .*: --split month .HTTP 400"),
        (refusal(422), "the service refuses this account or period; .*HTTP 422"),
        (refusal(413), "the service refuses this account or period; .*HTTP 413"),
        (refusal(403), "denied access .HTTP 403.; check the permissions of the token and the subscription key"),
        (refusal(404), "or has no report for these days, or report.base_url is wrong .HTTP 404"),
        (refusal(405), "the method is not allowed at this address .HTTP 405.; check report.base_url"),
        (
            answer(302, headers={"Location": "/login"}),
            "the service redirects, which shipper does not follow .HTTP 302.; check report.base_url",
        ),
        (
            answer(308, headers={"Location": "https://u:p@login.example.com/x?y=1"}),
            "the service redirects to login.example.com, which shipper does not follow .HTTP 308.; check report.base",
        ),
        (answer(200, b"\x1f\x8b\x08"), "the answer is compressed .gzip., although the request does not ask for that"),
        (answer(200, b"\x0b\x02", headers={"Content-Encoding": "br"}), "the answer is compressed .br., although"),
        (answer(204), "the service answered 204 instead of a report"),
        (answer(202, b"{}"), "the service answered 202 instead of a report"),
        (ok(b"<html>Log in</html>", "text/html; charset=utf-8"), "the answer is a web page"),
        (ok(b"  <html>Log in</html>"), "the answer is a web page, not a report"),
        (ok(b""), "the answer is not JSON"),
        (ok(b'{"id":"x"'), "the answer is not JSON: Input data was truncated"),
        (ok(b'{"id":"x"}'), "the answer is not a daily report: Object missing required field `lastCheckSum`"),
        (ok(b"[]"), "the answer is not a daily report"),
        (ok(document(Asked(1002, START, END, "", ""))), "1001 was requested, but the report is for account 1002"),
        (refusal(429), "the service asks for fewer requests .*; it was requested once$"),
        (refusal(500), "the service answered 500; it was requested once$"),
        (refusal(503, Retry_After="60"), "the service answered 503; it asks to wait 60 s, which is too long"),
        (reset, "it was requested once$"),
        (cut_off, "it was requested once$"),
    ],
)
async def test_answer_without_a_report_is_an_error_with_account_and_period(
    origin: ReportService, reply: Reply, words: str
):
    origin.rule = lambda _: reply
    async with client(origin) as used:
        error = await refused(used)
        assert str(error).startswith(NAMED)
        assert re.search(words, str(error)), error
        assert error.__cause__ is None
        origin.rule = lambda _: None
        assert (await used.fetch(1001, START, END)).report, "the next report cannot be fetched"


async def test_answer_is_read_up_to_64_mib_and_then_refused(origin: ReportService):
    origin.rule = lambda _: ok(b"[" + b" " * (64 << 20) + b"]")
    async with client(origin) as used:
        assert str(await refused(used)) == f"{NAMED}the report is larger than 64 MiB"


async def test_large_report_is_read(origin: ReportService):
    brands = [brand(*(entry(number) for number in range(100)), number=number) for number in range(20)]
    body = wire.encode_report(report(*brands, start="2026-10-01", end="2026-10-31"))
    assert len(body) > 1_000_000
    origin.rule = lambda _: ok(body)
    async with client(origin) as used:
        assert (await used.fetch(1001, START, END)).body == body


# In virtual time


class Model:
    """
    Answers the requests of a client after a latency.

    Args:
        rule: Returns the answer by account and time; None = the report.
    """

    def __init__(
        self, rule: Callable[[int, float], Answer | NoAnswerError | None] = lambda *_: None, latency_s: float = 0.05
    ) -> None:
        self._rule = rule
        self._latency_s = latency_s
        self.asked: list[tuple[int, float]] = []
        self.in_flight = self.most_in_flight = 0

    async def request(self, method: str, path: str, **_: object) -> Answer:
        account, start, end = path.split("/")[-3:]
        self.asked.append((int(account), anyio.current_time()))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await anyio.sleep(self._latency_s)
        finally:
            self.in_flight -= 1
        reply = self._rule(int(account), anyio.current_time())
        if isinstance(reply, NoAnswerError):
            raise reply
        asked = Asked(int(account), date.fromisoformat(start), date.fromisoformat(end), "", "")
        return reply or Answer(200, "application/json", "", document(asked))

    async def aclose(self) -> None:
        pass

    @property
    def times(self) -> list[float]:
        return [at for _, at in self.asked]


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `main(client)` against a model; time starts at 0, and threads are not supported."""

    async def here(function: Callable[[], T]) -> T:
        return function()

    @in_virtual_time
    async def run(model: Model, main: Callable[[ReportClient], Awaitable[T]], **options: Any) -> T:
        monkeypatch.setattr(client_module, "run_sync", here)
        monkeypatch.setattr(client_module, "Endpoint", lambda *_, **__: model)
        fields = {"subscription_key": LiteralSecret("k"), "token": LiteralSecret("t"), **options.pop("section", {})}
        settings = EndpointSettings(base_url="https://report.example.com", **fields)
        used = ReportClient(settings, DeliverySettings(), wall_time=anyio.current_time, rng=Random(1), **options)
        async with used:
            return await main(used)

    return run


async def one(used: ReportClient) -> FetchedReport:
    return await used.fetch(1001, START, END)


async def refused_after_s(used: ReportClient) -> tuple[ReportError, float]:
    """Return the error of a fetch, and after how long it was raised."""
    began = anyio.current_time()
    return await refused(used), anyio.current_time() - began


def days_of(*accounts: int, days: int = 30) -> Callable[[ReportClient], Awaitable[Outcome[Part]]]:
    """Fetch a number of days of several accounts, four at a time."""
    parts = parts_of(accounts, DateRange(START, START + timedelta(days=days - 1)), "day")

    async def main(used: ReportClient) -> Outcome[Part]:
        return await fetch_parts(used, parts, concurrency=4, use=lambda part, _: part)

    return main


def no_answer(cause: str = "connect_error") -> NoAnswerError:
    return NoAnswerError(cause, "nobody answers")


def script(*replies: Answer | NoAnswerError) -> Callable[[int, float], Answer | NoAnswerError | None]:
    """Give these answers one after the other, then reports."""
    left = list(replies)
    return lambda *_: left.pop(0) if left else None


def test_temporary_failures_are_retried(virtual):
    model = Model(script(answered(500), no_answer(), answered(503), answered(429), answered(408), answered(502)))
    assert virtual(model, one).report
    assert len(model.asked) == 7
    assert model.times[-1] < 120


def test_requested_waits_are_observed(virtual):
    model = Model(script(answered(503, "40"), answered(429, "50")))
    assert virtual(model, one).report
    first, second, third = model.times
    assert second - first >= 40
    assert third - second >= 50


def test_throttling_only_slows_all_requests(virtual):
    model = Model(script(*[answered(429, "30")] * 4))
    outcome = virtual(model, days_of(1001, 1002))
    assert len(outcome.reports) == 60
    assert len(model.asked) == 64
    assert [at for at in model.times if 0.1 < at < 30] == [], "a request was sent before the wait was over"


def test_report_fails_when_the_patience_is_over(virtual):
    model = Model(lambda *_: answered(500))
    error, seconds = virtual(model, refused_after_s, give_up_after_s=60.0)
    assert str(error) == f"{NAMED}the service answered 500; it was requested {len(model.asked)} times within 60 s"
    assert 60 <= seconds <= 66
    assert len(model.asked) > 10


def test_unknown_host_fails_within_seconds_unless_there_was_an_answer_before(virtual):
    async def after_a_report(used: ReportClient) -> tuple[ReportError, float]:
        await one(used)
        return await refused_after_s(used)

    never = Model(lambda *_: no_answer("unknown_host"))
    error, seconds = virtual(never, refused_after_s)
    assert isinstance(error, NoServiceError)
    assert 5 <= seconds < 10
    later = Model(lambda *_: no_answer("unknown_host") if len(later.asked) > 1 else None)
    error, seconds = virtual(later, after_a_report)
    assert seconds >= 120


def test_wait_that_exceeds_the_patience_is_not_started(virtual):
    error, seconds = virtual(Model(lambda *_: answered(403, "3600")), refused_after_s)
    assert isinstance(error, NoServiceError)
    assert str(error).startswith(f"{NAMED}the quota of the subscription is used up (HTTP 403)")
    assert str(error).endswith("; it asks to wait 3600 s, which is too long")
    assert seconds < 1


@pytest.mark.parametrize("reply", [answered(500), no_answer("read_error")])
def test_failing_account_does_not_affect_the_others(virtual, reply: Answer | NoAnswerError):
    model = Model(lambda account, _: reply if account == 1002 else None)
    outcome = virtual(model, days_of(1001, 1002, 1003, days=1))
    assert [part.account for part, _ in outcome.reports] == [1001, 1003]
    assert [part.account for part, _ in outcome.failed] == [1002]
    assert outcome.not_requested == []


def test_failing_report_is_given_up_while_others_continue(virtual):
    model = Model(lambda account, _: answered(500) if account == 1 else None, latency_s=10)
    outcome = virtual(model, days_of(*range(1, 101), days=1))
    assert len(outcome.reports) == 99
    asked_at = [at for account, at in model.asked if account == 1]
    assert 110 < max(asked_at) < 180
    assert max(model.times) > 200


def test_failing_account_of_many_parts_costs_the_patience_once(virtual):
    """The parts in flight are retried, each further one is requested once."""
    model = Model(lambda account, _: answered(500) if account == 1001 else None)
    outcome = virtual(model, days_of(1001, 1002))
    assert len(outcome.failed) == 30
    assert len(outcome.reports) == 30
    assert outcome.not_requested == []
    assert min(at for account, at in model.asked if account == 1002) < 140


@pytest.mark.parametrize("reply", [no_answer(), no_answer("read_timeout"), answered(429)])
def test_unavailable_service_is_not_asked_for_the_rest(virtual, reply: Answer | NoAnswerError):
    model = Model(lambda *_: reply)
    outcome = virtual(model, days_of(*range(1, 100)))
    assert outcome.reports == []
    assert len(outcome.failed) <= 4
    assert len(outcome.not_requested) >= 99 * 30 - 4
    assert {account for account, _ in model.asked} == {1}
    assert 120 <= max(model.times) < 200


def test_service_that_recovers_in_time_is_asked_for_everything(virtual):
    model = Model(lambda _, at: None if at > 100 else no_answer())
    outcome = virtual(model, days_of(1001))
    assert len(outcome.reports) == 30
    assert max(model.times) < 120


def test_patience_restarts_with_each_outage(virtual):
    model = Model(lambda _, at: no_answer() if at % 200 < 100 else None, latency_s=10)
    outcome = virtual(model, days_of(1001, 1002))
    assert len(outcome.reports) == 60
    assert max(model.times) > 200


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_requests_are_in_flight_than_allowed(virtual, concurrency: int):
    model = Model()

    async def main(used: ReportClient) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(one, used)

    virtual(model, main, concurrency=concurrency)
    assert model.most_in_flight == concurrency
    assert len(model.asked) == 40


def test_no_more_requests_are_sent_per_second_than_allowed(virtual):
    model = Model()
    outcome = virtual(model, days_of(1001), requests_per_second=2.0)
    assert len(outcome.reports) == 30
    gaps = [later - earlier for earlier, later in zip(model.times, model.times[1:], strict=False)]
    assert min(gaps) >= 0.499


def test_unavailable_token_endpoint_is_waited_for(virtual, monkeypatch: pytest.MonkeyPatch):
    async def post_form(*_: object, **__: object) -> Answer:
        body = token("a-token").partition(b"\r\n\r\n")[2]
        return Answer(200, "application/json", "", body) if anyio.current_time() > 30 else answered(503)

    monkeypatch.setattr("shipper.delivery.forms.post_form", post_form)
    oauth2 = OAuth2Settings(token_url="https://login.example.com/", client_id="x", client_secret=LiteralSecret("y"))
    model = Model()
    assert virtual(model, one, section={"token": None, "oauth2": oauth2}).report
    assert len(model.asked) == 1
    assert model.times[0] > 30


async def test_a_wait_of_an_hour_requested_by_one_answer_does_not_apply_to_the_others(origin: ReportService):
    later = refusal(429, Retry_After="3600")
    origin.rule = lambda asked: later if asked.start == START else refusal(503)
    parts = parts_of([1001], DateRange(START, START + timedelta(days=1)), "day")
    with anyio.fail_after(20):
        async with client(origin, patience_s=0.5) as used:
            outcome = await fetch_parts(used, parts, concurrency=2, use=lambda part, fetched: None)
    assert [part for part, _ in outcome.failed] == parts
    assert all(isinstance(error, NoServiceError) for _, error in outcome.failed[:1])
