"""`shipper check`: each setting and each step to the service is listed with its problem; no request is wasted."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
import trustme

from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.tokens import TokenIssuer
from tests.certificates import VERSIONS, context_of, demanding
from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper, Target, sandbox
from tests.e2e.fake_service import HANG, RESET, WEB_PAGE, FakeService, Reply
from tests.report_service import answer, cut_off
from tests.servers import REPORTED, BannerListener, Origin, Proxy, SilentListener
from tests.servers import Reply as Told

WRONG = "c0ffee.wrong.secret"
KEYS = ("fake-subscription-key", "fake-token")
SECRETS = ["PROXYPASSWORD", "sandbox-client-secret", "sandbox-secondary-key", WRONG]
GOOD = {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "ok", "route": "ok", "key": "ok", "token": "ok"}
EMPTY_BATCH = b'{"EventType":"Acquisition","events":[]}'


@dataclass
class Checked:
    """The results and the exit code."""

    code: int
    items: list[dict[str, str]]

    def results(self, section: str = "intake") -> dict[str, str]:
        """The results of the steps to an endpoint, except the clock."""
        prefix = f"{section}:"
        found = [(item["name"].removeprefix(prefix), item["result"]) for item in self.items if prefix in item["name"]]
        assert len(found) == len(dict(found)), found
        return {step: result for step, result in found if step != "clock"}

    def what(self, name: str, result: str = "") -> str:
        """The result of one step."""
        (what,) = (i["what"] for i in self.items if i["name"] == name and result in {"", i["result"]})
        return what

    def failed(self) -> list[str]:
        return [item["name"] for item in self.items if item["result"] == "fail"]


def assert_no_secret(shipper: Shipper, result: Result) -> None:
    secrets = [*SECRETS, shipper.target.subscription_key, shipper.target.token]
    assert not [secret for secret in secrets if secret in result.stdout + result.stderr]


def check(shipper: Shipper, *arguments: str, **options: Any) -> Checked:
    result = shipper.run("check", "--json", *arguments, **options)
    assert_no_secret(shipper, result)
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.returncode
    assert {item["result"] for item in document["items"]} <= {"ok", "note", "fail"}
    return Checked(result.returncode, document["items"])


def online(shipper: Shipper, *arguments: str, **options: Any) -> Checked:
    return check(shipper, "--online", *arguments, **options)


def report_at(url: str) -> dict[str, object]:
    """Settings of a second endpoint, checked together with the first one and with the same secrets."""
    keys = {"report.subscription_key.env": "INTAKE_KEY", "report.token.env": "INTAKE_TOKEN"}
    return {"report.base_url": url, **keys}


# The good case --------------------------------------------------------------------------------------------------------


def test_a_correct_setup_passes_every_step_and_nothing_is_written(shipper: Shipper, service: Service):
    shipper.target = shipper.target._replace(base_url=shipper.target.base_url.replace("127.0.0.1", "localhost"))
    checked = online(shipper)
    assert (checked.code, checked.failed(), checked.results()) == (0, [], GOOD)
    assert "the batch was empty, so nothing was written" in checked.what("intake:route")
    assert "environment variable INTAKE_TOKEN; it expires in 29 days" in checked.what("intake:credentials")
    assert "by at most 2 s" in checked.what("intake:clock", "ok")
    assert re.search(r"localhost resolves to .*\b127\.0\.0\.1\b", checked.what("intake:dns"))
    assert re.search(r"IPv4 in \d+ ms", checked.what("intake:connect"))
    assert (service.counts()["requests"], service.counts()["events_received"]) == (1, 0)
    assert not [item for item in checked.items if item["name"] == "service"]
    assert not shipper.state.exists()


def test_without_online_nothing_is_sent(shipper: Shipper, service: Service):
    checked = check(shipper)
    assert (checked.code, checked.results()) == (0, {})
    assert "environment variable INTAKE_KEY" in checked.what("intake.subscription_key", "ok")
    assert "INTAKE_TOKEN; it expires in 29 days" in checked.what("intake.token", "ok")
    assert "was not contacted" in checked.what("service", "note")
    assert "--online" in checked.what("service")
    assert str(shipper.config) in checked.what("configuration", "ok")
    assert "2 from the environment" in checked.what("configuration")
    assert service.counts()["requests"] == 0
    assert not shipper.state.exists()


# Answers of the service -----------------------------------------------------------------------------------------------

QUOTING = b'{"message":"accepted: fake-token fake-subscription-key"}'
DENIALS = (b'{"success":false,"message":"no events"}', b"No events")
NO_KEY = b'{"message":"Access denied due to invalid subscription key. It is fake-subscription-key."}'
UNPAID = b'{"message":"no rights for fake-token fake-subscription-key 192.0.2.7: the bill is open"}'
WAIT = {"Retry-After": "7"}
UP_TO_SERVICE = {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "ok"}


class Case(NamedTuple):
    """
    An answer and its expected report.

    Attributes:
        words: The message of the last failed step, or of the route.
    """

    reply: Reply | Told
    verdict: dict[str, str]
    words: str = ""

    @property
    def name(self) -> str:
        if isinstance(self.reply, Reply):
            return f"{self.reply.status}{self.reply.fault}{'quoted' if self.reply.body == UNPAID else ''}"
        return self.reply[9:12].decode() if isinstance(self.reply, bytes) else "cut_off"


INTAKE = [
    *(Case(Reply(status=status, body=QUOTING), GOOD) for status in (200, 400, 409, 413, 415, 422)),
    *(Case(Reply(status=200, body=body), {**GOOD, "service": "note"}, "may differ") for body in DENIALS),
    Case(
        Reply(status=401, body=NO_KEY),
        {"key": "fail"},
        '(HTTP 401: "Access denied due to invalid subscription key"); check intake.subscription_key',
    ),
    Case(Reply(status=401, body=QUOTING), {"token": "fail"}, "); check intake.token"),
    Case(
        Reply(status=403),
        {"route": "ok", "key": "ok", "permission": "fail"},
        "access (HTTP 403); check the permissions of the token",
    ),
    Case(Reply(status=401, body=UNPAID), {"token": "fail"}, '(HTTP 401: "no rights for ***: the bill is open")'),
    Case(
        Reply(status=403, body=UNPAID),
        {"route": "ok", "key": "ok", "permission": "fail"},
        '(HTTP 403: "no rights for ***: the bill is open")',
    ),
    Case(Reply(status=200, body=b" "), {**GOOD, "answer": "note"}, "for any address"),
    Case(Reply(status=403, headers=WAIT), {"key": "ok", "service": "note"}, "asks to wait 7 s"),
    Case(Reply(status=429, headers=WAIT), {"key": "ok", "service": "note"}, "asks to wait 7 s"),
    Case(Reply(status=404), {"route": "fail"}, "check intake.base_url"),
    Case(WEB_PAGE, {"route": "fail"}, "the answer is a web page"),
    Case(Reply(status=500, body=QUOTING), {"service": "fail"}, "500"),
    Case(RESET, {"service": "fail"}, "no answer from"),
    Case(HANG, {"service": "fail"}, "within 0.3 s; see delivery.read_timeout_seconds"),
]
REPORT = [
    Case(answer(204), {"service": "fail"}, "the service answered 204 instead of a report"),
    Case(answer(400), {"service": "fail"}, "the service refuses GET /dpm/v1/dar/1001/"),
    Case(answer(403), {"route": "ok", "key": "ok", "permission": "fail"}, "access (HTTP 403); check the permissions"),
    *(Case(answer(status), {"route": "fail"}, "check report.base_url") for status in (302, 405)),
    Case(answer(429, QUOTING), {"key": "ok", "service": "note"}, "fewer requests (HTTP 429)"),
    *(Case(answer(status, QUOTING), {"service": "fail"}, f"{status}") for status in (408, 418, 501, 503)),
    Case(cut_off, {"service": "fail"}, "no answer from"),
]


@pytest.mark.parametrize(
    ("intake", "report"),
    list(zip_longest(INTAKE, REPORT)),
    ids=lambda case: case.name if case else "",
)
def test_each_answer_is_reported_for_the_step_that_it_concerns(
    shipper: Shipper, fake: FakeService, intake: Case, report: Case | None
):
    """With two endpoints at once if there are two answers."""
    fake.default = intake.reply
    settings = {"delivery.read_timeout_seconds": 0.3} if intake.reply is HANG else {}
    with Origin(*([report.reply] if report else ())) as origin:
        if report:
            settings |= report_at(origin.url)
        checked = online(shipper, "--account", "1001", settings=settings)
    wanted = {"intake": intake, **({"report": report} if report else {})}
    assert {section: checked.results(section) for section in wanted} == {
        section: UP_TO_SERVICE | case.verdict for section, case in wanted.items()
    }
    assert checked.code == (4 if any("fail" in case.verdict.values() for case in wanted.values()) else 0)
    for section, case in wanted.items():
        name = next((name for name in reversed(case.verdict) if case.verdict[name] != "ok"), "route")
        assert case.words in checked.what(f"{section}:{name}")
    assert fake.bodies == [EMPTY_BATCH]
    assert len(origin.requests) == (1 if report else 0)


def test_refused_compression_is_a_remark(shipper: Shipper):
    checked = online(shipper, settings={"delivery.compression": "gzip"})
    assert (checked.code, checked.results()) == (0, {**GOOD, "compression": "note"})
    assert "delivery.compression" in checked.what("intake:compression")


def test_a_wrong_key_is_distinguished_from_a_wrong_token(shipper: Shipper, service: Service):
    wrong = {"intake.subscription_key.env": "WRONG", "report.token.env": "WRONG"}
    settings = {**report_at(service.target.base_url), **wrong}
    checked = online(shipper, "--account", "1001", settings=settings, env={"WRONG": WRONG})
    assert checked.code == 4
    for section, step, key in (("intake", "key", "subscription_key"), ("report", "token", "token")):
        assert checked.results(section) == {**UP_TO_SERVICE, step: "fail"}
        assert f"check {section}.{key}" in checked.what(f"{section}:{step}")
    assert service.counts()["events_received"] == 0


@pytest.mark.parametrize("second", ["right", "wrong", "missing"])
def test_a_second_key_is_tried_and_reported_separately(shipper: Shipper, service: Service, second: str):
    shipper.target = shipper.target._replace(subscription_key=WRONG)
    keys = {"right": {"SECOND": "sandbox-secondary-key"}, "wrong": {"SECOND": f"{WRONG}.2"}, "missing": {}}[second]
    checked = online(shipper, settings={"intake.subscription_key_secondary.env": "SECOND"}, env=keys)
    if second == "missing":
        assert checked.code == 2
        assert "SECOND is not set" in checked.what("intake.subscription_key_secondary", "fail")
        return
    expected = GOOD | {"key": "fail", "second-key": "ok"}
    if second == "wrong":
        expected = {**UP_TO_SERVICE, "key": "fail", "second-key": "fail"}
        assert "check intake.subscription_key_secondary" in checked.what("intake:second-key")
    assert (checked.code, checked.results()) == (4, expected)
    assert checked.what("intake:key").endswith("check intake.subscription_key")
    assert (service.counts()["requests"], service.counts()["events_received"]) == (2, 0)


def token_of(since_s: float, *, lifetime_s: float) -> str:
    """A token like those of the sandbox, issued at another time."""
    return TokenIssuer(SandboxOptions(), clock=lambda: time.time() + since_s, rng=Random(1)).issue(lifetime_s)


def test_an_expired_token_is_reported_with_its_age(shipper: Shipper):
    shipper.target = shipper.target._replace(token=token_of(-3 * 86_400 - 120, lifetime_s=60))
    offline = check(shipper)
    assert offline.code == 0
    assert "it expired 3 days ago" in offline.what("intake.token", "note")
    checked = online(shipper)
    assert (checked.code, checked.results()) == (4, {**UP_TO_SERVICE, "credentials": "note", "token": "fail"})
    assert "it expired 3 days ago" in checked.what("intake:credentials")
    assert "it expired 3 days ago" in checked.what("intake:token")


@contextmanager
def clock_off(service: Service, seconds: float) -> Iterator[None]:
    """Shift the clock of the sandbox."""
    url = f"{service.target.base_url}/_sandbox/clock"
    httpx.put(url, json={"offset_seconds": seconds}, trust_env=False, verify=False).raise_for_status()
    try:
        yield
    finally:
        httpx.put(url, json={"offset_seconds": 0}, trust_env=False, verify=False).raise_for_status()


@pytest.mark.parametrize(
    ("ahead_s", "behind_s", "result", "token"), [(30, 30, "note", "ok"), (3600, 86_400, "fail", "fail")]
)
def test_a_wrong_clock_is_reported(
    shipper: Shipper, service: Service, ahead_s: float, behind_s: float, result: str, token: str
):
    """One service is ahead; the other one is so far behind that the token is not valid yet."""
    shipper.target = shipper.target._replace(token=token_of(-3600, lifetime_s=7200 + 3600))
    with clock_off(service, ahead_s), sandbox(clock_offset_seconds=-behind_s) as late:
        checked = online(shipper, "--account", "1001", settings=report_at(late.target.base_url))
    assert checked.code == (4 if result == "fail" else 0)
    for section, words in (("intake", "ahead of"), ("report", "behind")):
        what = checked.what(f"{section}:clock", result)
        assert f"{words} this machine's" in what
        assert ("tokens may be refused" in what) is (result == "fail")
    assert (checked.results()["token"], checked.results("report")["token"]) == ("ok", token)
    if token == "fail":
        assert "perhaps a clock is wrong" in checked.what("report:token")


# The connection to the service ----------------------------------------------------------------------------------------


def test_an_unreachable_service_and_an_unknown_name_are_reported_and_the_token_is_still_checked(shipper: Shipper):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening, so that no other process gets the port
        shipper.target = Target(f"http://127.0.0.1:{unused.getsockname()[1]}", *KEYS)
        checked = online(shipper, settings=report_at("https://report.invalid"))
    assert (checked.code, checked.results()) == (4, {"dns": "ok", "connect": "fail", "credentials": "ok"})
    assert "Connection refused; check intake.base_url" in checked.what("intake:connect")
    assert checked.results("report") == {"dns": "fail", "credentials": "ok"}
    assert "report.invalid cannot be resolved" in checked.what("report:dns")
    assert "check report.base_url" in checked.what("report:dns")


@pytest.fixture(scope="module")
def trusting(ca: Path) -> dict[str, object]:
    return {"intake.ca_bundle": ca, "report.ca_bundle": ca}


def in_days(days: float) -> datetime.datetime:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)).replace(tzinfo=None)


def test_a_certificate_is_reported_with_its_names_its_authority_and_its_expiry(
    shipper: Shipper, authority: trustme.CA, trusting: dict[str, object]
):
    names = ("127.0.0.1", "intake.example.com")
    far, near = (context_of(authority, *names, not_after=in_days(days)) for days in (90.5, 20.5))
    with Origin(context=far) as intake, Origin(REPORTED, context=near) as report:
        shipper.target = Target(intake.url, *KEYS)
        checked = online(shipper, "--account", "1001", settings={**report_at(report.url), **trusting})
    assert checked.code == 0
    for section, origin, days, result in (("intake", intake, 90, "ok"), ("report", report, 20, "note")):
        assert checked.results(section) == {**GOOD, "tls": result}
        what = checked.what(f"{section}:tls")
        assert what.startswith("TLS 1.3; the certificate is for ")
        assert "intake.example.com" in what
        assert f"by trustme v{trustme.__version__}, and expires in {days} days" in what
        assert len(origin.requests) == 1


TLS_FAULTS = {
    "unknown": "unable to get local issuer certificate; see {}.ca_bundle",
    "expired": "certificate has expired; renew it on the service",
    "1.2": "does not accept this client",
    "1.3": "see {}.client_certificate",
}


@pytest.mark.parametrize(("intake", "report"), [("expired", "1.3"), ("1.2", "unknown")])
def test_a_tls_problem_is_named_and_nothing_is_sent(
    shipper: Shipper, authority: trustme.CA, trusting: dict[str, object], intake: str, report: str
):
    """With two endpoints at once."""
    with with_fault(authority, intake) as first, with_fault(authority, report) as second:
        shipper.target = Target(first.url, *KEYS)
        checked = online(shipper, "--account", "1001", settings={**report_at(second.url), **trusting})
    assert_tls_fails(checked, [TLS_FAULTS[intake].format("intake"), TLS_FAULTS[report].format("report")])
    assert first.requests == second.requests == []


def with_fault(authority: trustme.CA, fault: str) -> Origin:
    """A server to which nothing can be sent."""
    issuer = trustme.CA() if fault == "unknown" else authority
    context = context_of(issuer, "127.0.0.1", not_after=in_days(-1 if fault == "expired" else 90))
    return Origin(context=demanding(context, authority, fault) if fault in VERSIONS else context)


def assert_tls_fails(checked: Checked, words: Sequence[str]) -> None:
    """Assert that only the TLS step fails, and that the tokens are still checked."""
    assert checked.code == 4
    assert checked.failed() == ["intake:tls", "report:tls"]
    for section, each in zip(("intake", "report"), words, strict=True):
        assert each in checked.what(f"{section}:tls", "fail")
        assert checked.what(f"{section}:credentials", "ok")


def test_a_server_without_tls_is_reported(shipper: Shipper):
    with BannerListener() as mail, SilentListener() as mute:
        shipper.target = Target(f"https://127.0.0.1:{mail.port}", *KEYS)
        settings = {**report_at(f"https://127.0.0.1:{mute.port}"), "delivery.connect_timeout_seconds": 0.5}
        assert_tls_fails(online(shipper, settings=settings), ["perhaps it does not use TLS", "within 0.5 s"])


def test_a_proxy_is_a_separate_step(shipper: Shipper, authority: trustme.CA, trusting: dict[str, object]):
    """In front of a server without TLS, and of one with TLS."""

    def look(password: str) -> Checked:
        return online(shipper, "--account", "1001", settings=settings, env={"PROXY": password})

    sections = ("intake", "report")
    with Origin() as plain, Origin(REPORTED, context=context_of(authority, "127.0.0.1")) as encrypted:
        shipper.target = Target(plain.url, *KEYS)
        settings = {**report_at(encrypted.url), **trusting}
        with Proxy(user="the-proxy-user", password="PROXYPASSWORD") as proxy:
            for each in sections:
                user = {f"{each}.proxy_username": "the-proxy-user", f"{each}.proxy_password.env": "PROXY"}
                settings |= {**user, f"{each}.proxy": proxy.url}
            checked = look("PROXYPASSWORD")
            assert (checked.code, [checked.results(each) for each in sections]) == (0, [GOOD, GOOD])
            for each in sections:
                assert "the proxy resolves" in checked.what(f"{each}:dns")
                assert f"the proxy {proxy.url} is reachable" in checked.what(f"{each}:connect")
                assert ("connects to 127.0.0.1" in checked.what(f"{each}:connect")) is (each == "report")
            assert (len(plain.requests), len(encrypted.requests)) == (1, 1)

            refused = look("PROXYPASSWORD-2")
        gone = look("PROXYPASSWORD")
    assert (refused.code, gone.code) == (4, 4)
    for each in sections:
        message = f"the proxy {proxy.url} requires a valid user name and password"
        assert message in refused.what(f"{each}:connect", "fail")
        assert gone.results(each) == {"dns": "ok", "connect": "fail", "credentials": "ok"}
        assert f"the proxy {proxy.url} cannot be used" in gone.what(f"{each}:connect")
    assert (len(plain.requests), len(encrypted.requests)) == (1, 1)


# Sources of secrets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def granted(shipper: Shipper, service: Service) -> Shipper:
    """A shipper that gets its tokens from the token endpoint of the sandbox."""
    access = {"client_id": "sandbox-client", "scope": "api://shipper-sandbox/.default"}
    token_url = f"{service.target.base_url}/oauth2/v2.0/token"
    shipper.use_oauth2(token_url=token_url, client_secret={"env": "CLIENT_SECRET"}, **access)
    return shipper


def test_a_token_is_requested_from_the_token_endpoint(granted: Shipper, service: Service):
    checked = online(granted, env={"CLIENT_SECRET": "sandbox-client-secret"})
    assert (checked.code, checked.results()) == (0, GOOD)
    what = checked.what("intake:credentials")
    assert f"from the token endpoint {service.target.base_url}/oauth2/v2.0/token; it expires in 59 min" in what
    assert "CLIENT_SECRET" in checked.what("intake.oauth2.client_secret", "ok")


def test_a_refusal_of_the_token_endpoint_is_reported_with_a_solution(granted: Shipper, service: Service):
    checked = online(granted, env={"CLIENT_SECRET": WRONG})
    assert (checked.code, checked.results()) == (
        4,
        {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "fail"},
    )
    assert "intake.oauth2.client_secret (HTTP 401, invalid_client" in checked.what("intake:credentials")
    assert service.counts()["requests"] == 0


def test_a_refused_token_of_the_endpoint_is_not_blamed_on_a_missing_setting(granted: Shipper, fake: FakeService):
    fake.default = Reply(status=401, body=QUOTING)
    checked = online(granted, env={"CLIENT_SECRET": "sandbox-client-secret"})
    assert checked.failed() == ["intake:token"]
    assert "check intake.oauth2, especially its scope" in checked.what("intake:token")


def test_secrets_are_checked_at_their_sources(shipper: Shipper, service: Service):
    secret = shipper.write("token", f"{shipper.target.token}\n".encode())
    secret.chmod(0o644)
    unset = {"intake.subscription_key": '{ env = "NOT_THERE" }'}
    file = {"intake.token": f'{{ file = "{secret}" }}'}
    report = report_at(service.target.base_url)
    del report["report.token.env"]
    checked = online(shipper, settings={**unset, **file, **report, "report.token": '{ command = ["false"] }'})
    assert checked.code == 2
    of_the_intake = ["intake.subscription_key", "intake.token", "intake:credentials"]
    assert checked.failed() == [*of_the_intake, "report.token", "report:credentials"]
    assert "NOT_THERE is not set" in checked.what("intake.subscription_key")
    assert f"chmod 600 {secret}" in checked.what("intake.token")
    assert "false failed with exit code 1" in checked.what("report.token")
    assert checked.results()["tls"] == "ok", "the connection is not checked"
    assert service.counts()["requests"] == 0

    secret.chmod(0o600)
    cat = {"report.token": f'{{ command = ["cat", "{secret}"] }}'}
    checked = online(shipper, "--account", "1001", settings={**file, **report, **cat})
    assert (checked.code, checked.results(), checked.results("report")) == (0, GOOD, GOOD)
    for section, where in (("intake", f"the file {secret}"), ("report", "the program cat")):
        assert f"from {where}; it expires in 29 days" in checked.what(f"{section}:credentials")
        assert "it expires in 29 days" in checked.what(f"{section}.token", "ok")
    checked = online(shipper, settings={"intake.token": shipper.target.token})
    assert (checked.code, checked.results()) == (0, GOOD)
    assert "from the settings; it expires in 29 days" in checked.what("intake:credentials")
    assert "it expires in 29 days" in checked.what("intake.token", "note")


def test_unusable_certificates_are_a_configuration_error(shipper: Shipper):
    shipper.target = Target("https://127.0.0.1:9", *KEYS)
    keys = ["intake.ca_bundle", "report.client_certificate"]
    settings = {**report_at("https://127.0.0.1:9"), **dict.fromkeys(keys, shipper.config)}
    checked = check(shipper, settings=settings)
    assert (checked.code, checked.failed()) == (2, keys)
    assert all(str(shipper.config) in checked.what(key) for key in keys)


# The report -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reporting(shipper: Shipper, service: Service) -> Shipper:
    """A shipper that also has a report endpoint."""
    shipper.config.write_text(
        f'{shipper.config.read_text()}[report]\nbase_url = "{service.target.base_url}"\n'
        'subscription_key = { env = "INTAKE_KEY" }\ntoken = { env = "INTAKE_TOKEN" }\n'
    )
    return shipper


def test_a_report_is_requested_for_its_account(reporting: Shipper, service: Service):
    checked = online(reporting, "--account", "1001")
    assert (checked.code, checked.results(), checked.results("report")) == (0, GOOD, GOOD)
    day = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    assert f"/dpm/v1/dar/1001/{day}/{day}" in checked.what("report:route")

    unknown = online(reporting, "--only", "report", "--account", "77")
    assert (unknown.code, unknown.results()) == (4, {})
    assert unknown.results("report") == {**UP_TO_SERVICE, "route": "fail"}
    assert "or there is no account 77" in unknown.what("report:route")
    assert not [item for item in unknown.items if item["name"].startswith("intake")]

    nameless = online(reporting, "--only", "report")
    assert (nameless.code, nameless.results("report")) == (0, {**UP_TO_SERVICE, "route": "note"})
    assert "--account" in nameless.what("report:route")
    assert nameless.items[-1]["name"] == "report:route"
    assert service.counts()["events_received"] == 0


def test_only_one_endpoint_is_checked_on_request(reporting: Shipper):
    checked = online(reporting, "--only", "intake")
    assert (checked.code, checked.results(), checked.results("report")) == (0, GOOD, {})
    assert not [item for item in checked.items if item["name"].startswith("report")]


def test_a_report_endpoint_alone_is_enough_but_a_requested_endpoint_must_exist(shipper: Shipper, service: Service):
    text = shipper.config.read_text().replace("[intake]", "[report]")
    shipper.config.write_text(text.replace("http://127.0.0.1:9", service.target.base_url))
    options = {"configured": False, "settings": {"state.directory": shipper.state}}
    checked = check(shipper, "--config", str(shipper.config), **options)
    assert checked.code == 0
    assert "nothing can be shipped" in checked.what("intake", "note")
    checked = check(shipper, "--config", str(shipper.config), "--only", "intake", **options)
    assert (checked.code, checked.failed()) == (2, ["intake"])
    result = shipper.run("check", "--only", "both")
    assert (result.returncode, result.stdout) == (2, "")
    assert "both" in result.stderr


# This machine ---------------------------------------------------------------------------------------------------------


def test_only_an_invalid_configuration_is_reported(shipper: Shipper):
    shipper.config.write_text(shipper.config.read_text() + "[batch]\nmax_event = 5\n")
    checked = online(shipper)
    assert (checked.code, checked.failed(), len(checked.items)) == (2, ["configuration"], 1)
    assert f"{shipper.config}: batch.max_event: unknown key" in checked.what("configuration")


def test_an_incomplete_endpoint_is_reported_and_still_connected_to(shipper: Shipper, service: Service):
    text = shipper.config.read_text()
    shipper.config.write_text(text.replace('token = { env = "INTAKE_TOKEN" }\n', ""))
    checked = online(shipper)
    assert (checked.code, checked.failed()) == (2, ["intake.token"])
    assert checked.results() == {"dns": "ok", "connect": "ok", "tls": "ok"}
    shipper.config.write_text(text.partition("[state]")[0].partition("[intake]")[0])
    nothing = check(shipper, "--config", str(shipper.config), configured=False)
    assert (nothing.code, nothing.failed()) == (2, ["intake"])
    assert service.counts()["requests"] == 0


def test_an_unusable_state_directory_is_reported_and_left_unchanged(shipper: Shipper):
    file, link = shipper.config, shipper.folder / "link"
    link.symlink_to("unmounted")
    no_target = f"{link} is a symbolic link to unmounted, which cannot be used (No such file or directory); create"
    for place, words in (
        *((file, f"{file} "), (file / "below", f"{file / 'below'} ")),
        *((link, no_target), (link / "below", no_target)),
    ):
        settings = {"state.directory": place, "input.include": "*.ndjson"}
        checked = check(shipper, settings=settings, check=False)
        assert (checked.code, checked.failed()) == (2, ["state.directory"])
        assert words in checked.what("state.directory")
        refused = shipper.run("run", settings=settings)
        assert (refused.returncode, words in refused.stderr) == (2, True)
    shipper.state.mkdir(mode=0o755)
    shipper.state.chmod(0o755)
    assert "mode 0755" in check(shipper).what("state.directory", "note")
    assert shipper.state.stat().st_mode & 0o777 == 0o755
    assert list(shipper.state.iterdir()) == []


def test_a_state_directory_on_a_file_system_without_locks_is_reported_as_by_a_start(
    shipper: Shipper, service: Service, sample: Sample, monkeypatch: pytest.MonkeyPatch
):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = shipper.write("sample.ndjson", *sample.lines[:10])
    before = sorted(shipper.folder.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", flock)
        checked = check(shipper)
        refused = shipper.backfill(path, check=False)
    assert (checked.code, checked.failed()) == (2, ["state.directory"])
    what = checked.what("state.directory")
    assert f"cannot lock {shipper.state}/lock (No locks available)" in what
    assert what in refused.stderr
    assert sorted(shipper.folder.rglob("*")) == before
    assert check(shipper).code == 0


def test_a_state_directory_of_another_user_is_a_remark(shipper: Shipper):
    if os.geteuid():
        pytest.skip("only root can change the owner of a directory")
    shipper.state.mkdir(mode=0o700)
    os.chown(shipper.state, 65_534, 65_534)
    checked = check(shipper)
    assert checked.code == 0
    assert "belongs to user 65534, group 65534 (mode 0700), and this process runs as user 0" in checked.what(
        "state.directory", "note"
    )


def test_input_and_disk_are_checked(shipper: Shipper):
    for name in ("a.ndjson", "b.ndjson", "c.log", "c.txt"):
        (shipper.folder / name).touch()
    settings = {"input.include": '["*.ndjson", "[a-b].*", "*.log", "none-*"]', "input.exclude": '["b.*"]'}
    checked = check(shipper, settings=settings)
    assert checked.code == 0
    assert "2 files match" in checked.what("input.include", "ok")
    assert "none-*" in checked.what("input.include", "note")
    assert "GB free" in checked.what("state.disk", "ok")
    wide = check(shipper, settings={"spool.max_bytes": 10**18})
    assert wide.code == 0
    assert "is empty" in wide.what("input.include", "note")
    assert "spool.max_bytes" in wide.what("state.disk", "note")
