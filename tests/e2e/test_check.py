"""`shipper check`: each setting and each step to the service is named, with what is wrong; nothing is written."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from random import Random

import httpx
import pytest
import trustme

from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.tokens import TokenIssuer
from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Result, Service, Shipper, Target
from tests.e2e.fake_service import HANG, RESET, WEB_PAGE, FakeService, Reply
from tests.stage.servers import Listener, Origin, Proxy, stall

WRONG = "c0ffee.wrong.secret"
KEYS = ("fake-subscription-key", "fake-token")
SECRETS = ["PROXYPASSWORD", "sandbox-client-secret", "sandbox-secondary-key", WRONG]
GOOD = {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "ok", "route": "ok", "key": "ok", "token": "ok"}
EMPTY_BATCH = b'{"EventType":"Acquisition","events":[]}'


@dataclass
class Checked:
    """What was found out, and the exit code."""

    code: int
    items: list[dict[str, str]]

    def results(self, section: str = "intake") -> dict[str, str]:
        """The steps to an endpoint, without the clock."""
        prefix = f"{section}:"
        found = [(item["name"].removeprefix(prefix), item["result"]) for item in self.items if prefix in item["name"]]
        assert len(found) == len(dict(found)), found
        return {step: result for step, result in found if step != "clock"}

    def what(self, name: str, result: str = "") -> str:
        """What is said of one thing."""
        (what,) = (i["what"] for i in self.items if i["name"] == name and result in {"", i["result"]})
        return what

    def failed(self) -> list[str]:
        return [item["name"] for item in self.items if item["result"] == "fail"]


def assert_no_secret(shipper: Shipper, result: Result) -> None:
    secrets = [*SECRETS, shipper.target.subscription_key, shipper.target.token]
    assert not [secret for secret in secrets if secret in result.stdout + result.stderr]


def check(shipper: Shipper, *arguments: str, **options: object) -> Checked:
    result = shipper.run("check", "--json", *arguments, **options)
    assert_no_secret(shipper, result)
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.returncode
    assert {item["result"] for item in document["items"]} <= {"ok", "note", "fail"}
    return Checked(result.returncode, document["items"])


def online(shipper: Shipper, *arguments: str, **options: object) -> Checked:
    return check(shipper, "--online", *arguments, **options)


# The good case --------------------------------------------------------------------------------------------------------


def test_a_good_setting_up_is_good_in_every_step_and_nothing_is_written(shipper: Shipper, service: Service):
    checked = online(shipper)
    assert (checked.code, checked.failed(), checked.results()) == (0, [], GOOD)
    assert "the batch was empty, so that nothing was written" in checked.what("intake:route")
    assert "environment variable INTAKE_TOKEN; it expires in 29 days" in checked.what("intake:credentials")
    assert "no more than 2 s" in checked.what("intake:clock", "ok")
    assert (service.counts()["requests"], service.counts()["events_received"]) == (1, 0)
    assert not shipper.state.exists()


def test_without_online_nothing_is_sent(shipper: Shipper, service: Service):
    checked = check(shipper)
    assert (checked.code, checked.results()) == (0, {})
    assert "environment variable INTAKE_KEY" in checked.what("intake.subscription_key", "ok")
    assert "INTAKE_TOKEN; it expires in 29 days" in checked.what("intake.token", "ok")
    assert str(shipper.config) in checked.what("configuration", "ok")
    assert "2 from the environment" in checked.what("configuration")
    assert service.counts()["requests"] == 0
    assert not shipper.state.exists()


def test_for_people_each_thing_is_a_line_with_aligned_columns(shipper: Shipper, service: Service):
    document = online(shipper)
    settings = {"intake.subscription_key_secondary.env": "INTAKE_KEY"}
    for options in ({}, {"settings": settings}):
        result = shipper.run("check", "--online", **options)
        assert_no_secret(shipper, result)
        assert (result.returncode, result.stderr) == (0, "")
        lines = result.stdout.splitlines()
        rows = [re.fullmatch(r"(ok|note|fail) +([a-z._:-]+)  +(\S.*)", line) for line in lines]
        assert all(rows), result.stdout
        assert len({row.start(3) for row in rows}) == 1
        if not options:
            assert [row.group(2) for row in rows] == [item["name"] for item in document.items]


def test_a_terminal_gets_colours(shipper: Shipper, service: Service):
    primary, secondary = os.openpty()
    environment = {**shipper.environment(), "TERM": "xterm-256color", "INTAKE_TOKEN": WRONG}
    with subprocess.Popen(
        [SHIPPER, "check", "--online", "--config", shipper.config],
        stdout=secondary,
        env=environment,
        cwd=shipper.folder,
        stdin=subprocess.DEVNULL,
    ) as process:
        os.close(secondary)
        shown = b""
        try:
            while part := os.read(primary, 65_536):
                shown += part
        except OSError:  # the other end is closed
            pass
        assert process.wait(20) == 4
    os.close(primary)
    assert re.search(rb"\x1b\[[0-9;]*32mok", shown)
    assert re.search(rb"\x1b\[[0-9;]*31mfail\x1b\[0m  intake:token", shown)


def test_a_reader_that_has_enough_is_no_error(shipper: Shipper):
    line = f"set -o pipefail; '{SHIPPER}' check --config '{shipper.config}' | head -c 5"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=20, env=shipper.environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ok   ", b"")


@pytest.mark.parametrize(
    "settings", [{}, {"delivery.compression": "gzip"}, {"delivery.traceparent": "false"}], ids=["", "gzip", "no trace"]
)
def test_the_request_is_one_of_those_that_ship(
    shipper: Shipper, fake: FakeService, sample: Sample, settings: dict[str, object]
):
    shipper.target = fake.target
    (shipper.folder / "events.ndjson").write_bytes(sample.lines[0])
    assert shipper.backfill("events.ndjson", settings=settings).returncode == 0
    assert online(shipper, settings=settings).results() == GOOD
    shipped, asked = (_constant(headers) for headers in fake.headers)
    assert asked == shipped
    body = fake.bodies[1]
    assert (gzip.decompress(body) if settings.get("delivery.compression") else body) == EMPTY_BATCH


def _constant(headers: Message) -> list[tuple[str, str]]:
    """Headers in their order, without what differs from request to request."""
    return [(name, "" if name in {"traceparent", "Content-Length"} else value) for name, value in headers.items()]


# What the service answers ---------------------------------------------------------------------------------------------

QUOTING = b'{"message":"fake-token fake-subscription-key"}'
NO_KEY = b'{"message":"Access denied due to invalid subscription key. It is fake-subscription-key."}'
WAIT = {"Retry-After": "7"}
UP_TO_SERVICE = {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "ok"}


@pytest.mark.parametrize(
    ("reply", "verdict", "code", "words"),
    [
        *((Reply(status=status, body=QUOTING), GOOD, 0, "") for status in (200, 400, 409, 413, 415, 422)),
        (Reply(status=401, body=NO_KEY), {"key": "fail"}, 4, "intake.subscription_key (HTTP 401"),
        (Reply(status=401, body=QUOTING), {"token": "fail"}, 4, "intake.token (HTTP 401"),
        (Reply(status=403), {"route": "ok", "key": "ok", "permission": "fail"}, 4, "allowed to do (HTTP 403)"),
        (Reply(status=403, headers=WAIT), {"key": "ok", "service": "note"}, 0, "asks for a wait of 7 s"),
        (Reply(status=429, headers=WAIT), {"key": "ok", "service": "note"}, 0, "asks for a wait of 7 s"),
        (Reply(status=429, body=QUOTING), {"key": "ok", "service": "note"}, 0, "fewer requests (HTTP 429)"),
        *((Reply(status=status), {"route": "fail"}, 4, "check intake.base_url") for status in (302, 404, 405)),
        (WEB_PAGE, {"route": "fail"}, 4, "a web page answered"),
        *((Reply(status=s, body=QUOTING), {"service": "fail"}, 4, f"{s}") for s in (408, 500, 501, 503, 418)),
        (RESET, {"service": "fail"}, 4, "no answer from"),
        (Reply(fault="truncate"), {"service": "fail"}, 4, "no answer from"),
        (HANG, {"service": "fail"}, 4, "within 0.3 s; see delivery.read_timeout_seconds"),
    ],
    ids=lambda value: f"{value.status}{value.fault}" if isinstance(value, Reply) else "",
)
def test_each_answer_is_told_of_what_it_is_about(
    shipper: Shipper, fake: FakeService, reply: Reply, verdict: dict[str, str], code: int, words: str
):
    shipper.target = fake.target
    fake.default = reply
    settings = {"delivery.read_timeout_seconds": 0.3} if reply is HANG else {}
    checked = online(shipper, settings=settings)
    assert (checked.code, checked.results()) == (code, UP_TO_SERVICE | verdict)
    name = next((name for name in reversed(verdict) if verdict[name] != "ok"), "route")
    assert words in checked.what(f"intake:{name}")
    assert fake.bodies == [EMPTY_BATCH]


def test_compression_that_is_refused_is_a_remark(shipper: Shipper, service: Service):
    checked = online(shipper, settings={"delivery.compression": "gzip"})
    assert (checked.code, checked.results()) == (0, {**GOOD, "compression": "note"})
    assert "delivery.compression" in checked.what("intake:compression")


@pytest.mark.parametrize("field", ["subscription_key", "token"])
def test_a_wrong_secret_is_told_from_the_other_one(shipper: Shipper, service: Service, field: str):
    shipper.target = shipper.target._replace(**{field: WRONG})
    checked = online(shipper)
    step = {"subscription_key": "key", "token": "token"}[field]
    assert (checked.code, checked.results()) == (4, {**UP_TO_SERVICE, step: "fail"})
    assert f"check intake.{field}" in checked.what(f"intake:{step}")
    assert service.counts()["events_received"] == 0


@pytest.mark.parametrize("second", ["right", "wrong", "missing"])
def test_a_second_key_is_tried_and_told_by_itself(shipper: Shipper, service: Service, second: str):
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
    assert "check intake.subscription_key (" in checked.what("intake:key")
    assert (service.counts()["requests"], service.counts()["events_received"]) == (2, 0)


def token_of(since_s: float, *, lifetime_s: float) -> str:
    """A token such as the sandbox gives out, from another moment than now on."""
    return TokenIssuer(SandboxOptions(), clock=lambda: time.time() + since_s, rng=Random(1)).issue(lifetime_s)


def test_an_expired_token_is_told_with_its_age(shipper: Shipper, service: Service):
    shipper.target = shipper.target._replace(token=token_of(-3 * 86_400 - 120, lifetime_s=60))
    offline = check(shipper)
    assert offline.code == 0
    assert "it has expired 3 days ago" in offline.what("intake.token", "note")
    checked = online(shipper)
    assert (checked.code, checked.results()) == (4, {**UP_TO_SERVICE, "credentials": "note", "token": "fail"})
    assert "it has expired 3 days ago" in checked.what("intake:credentials")
    assert "it has expired 3 days ago" in checked.what("intake:token")


@contextmanager
def clock_off(service: Service, seconds: float) -> Iterator[None]:
    """The clock of the sandbox is ahead."""
    url = f"{service.target.base_url}/_sandbox/clock"
    httpx.put(url, json={"offset_seconds": seconds}, trust_env=False).raise_for_status()
    try:
        yield
    finally:
        httpx.put(url, json={"offset_seconds": 0}, trust_env=False).raise_for_status()


@pytest.mark.parametrize(
    ("offset_s", "result", "words", "token"),
    [
        (30, "note", "ahead of", "ok"),
        (-30, "note", "behind", "ok"),
        (3600, "fail", "ahead of", "ok"),
        (-86_400, "fail", "behind", "fail"),
    ],
)
def test_a_clock_that_is_off_is_told(
    shipper: Shipper, service: Service, offset_s: float, result: str, words: str, token: str
):
    shipper.target = shipper.target._replace(token=token_of(-3600, lifetime_s=7200 + 3600))
    with clock_off(service, offset_s):
        checked = online(shipper)
    assert f"{words} this machine's" in checked.what("intake:clock", result)
    assert checked.code == (4 if result == "fail" else 0)
    assert checked.results()["token"] == token
    if token == "fail":
        assert "the clocks may be why" in checked.what("intake:token")
    if result == "fail":
        assert "tokens may be refused" in checked.what("intake:clock")


# The way to the service -----------------------------------------------------------------------------------------------


def test_a_service_that_is_not_there_is_told_and_the_token_all_the_same(shipper: Shipper):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        shipper.target = Target(f"http://127.0.0.1:{unused.getsockname()[1]}", *KEYS)
        checked = online(shipper)
    assert (checked.code, checked.results()) == (4, {"dns": "ok", "connect": "fail", "credentials": "ok"})
    assert "Connection refused; check intake.base_url" in checked.what("intake:connect")


def test_a_name_that_does_not_exist_is_told(shipper: Shipper):
    shipper.target = Target("https://intake.invalid", *KEYS)
    checked = online(shipper)
    assert (checked.code, checked.results()) == (4, {"dns": "fail", "credentials": "ok"})
    assert "intake.invalid is not found" in checked.what("intake:dns")
    assert "check intake.base_url" in checked.what("intake:dns")


def test_a_name_is_told_with_its_addresses(shipper: Shipper, service: Service):
    shipper.target = shipper.target._replace(base_url=shipper.target.base_url.replace("127.0.0.1", "localhost"))
    checked = online(shipper)
    assert checked.code == 0
    assert re.search(r"localhost is .*\b127\.0\.0\.1\b", checked.what("intake:dns"))
    assert re.search(r"IPv4 in \d+ ms", checked.what("intake:connect"))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return {"intake.ca_bundle": path}


def context_of(authority: trustme.CA, *hosts: str, days: float = 90.5) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    authority.issue_cert(*hosts, not_after=end.replace(tzinfo=None)).configure_cert(context)
    return context


def test_a_certificate_is_told_with_its_names_its_authority_and_its_end(
    shipper: Shipper, authority: trustme.CA, trusting: dict[str, object]
):
    for days, result in ((90.5, "ok"), (20.5, "note")):
        with Origin(context=context_of(authority, "127.0.0.1", "intake.example.com", days=days)) as origin:
            shipper.target = Target(origin.url, *KEYS)
            checked = online(shipper, settings=trusting)
        assert (checked.code, checked.results()) == (0, {**GOOD, "tls": result})
        what = checked.what("intake:tls")
        assert what.startswith("TLS 1.3; the certificate is for ")
        assert "intake.example.com" in what
        assert f"by trustme v{trustme.__version__}, and expires in {int(days)} days" in what
        assert len(origin.requests) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("unknown", "unable to get local issuer certificate; see intake.ca_bundle"),
        ("host", "IP address mismatch, certificate is not valid for '127.0.0.1'; check the host in intake.base_url"),
        ("expired", "certificate has expired; it has to be renewed there"),
        ("1.2", "does not accept this client"),
        ("1.3", "see intake.client_certificate"),
    ],
)
def test_what_is_wrong_with_tls_is_named_and_nothing_is_sent(
    shipper: Shipper, authority: trustme.CA, trusting: dict[str, object], fault: str, words: str
):
    host, days = "127.0.0.2" if fault == "host" else "127.0.0.1", -1 if fault == "expired" else 90
    context = context_of(trustme.CA() if fault == "unknown" else authority, host, days=days)
    if fault in {"1.2", "1.3"}:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        context.maximum_version = ssl.TLSVersion.TLSv1_2 if fault == "1.2" else ssl.TLSVersion.TLSv1_3
    with Origin(context=context) as origin:
        shipper.target = Target(origin.url, *KEYS)
        checked = online(shipper, settings=trusting)
    assert_tls_fails(checked, words)
    assert origin.requests == []


def assert_tls_fails(checked: Checked, words: str) -> None:
    """And nothing else; the token is looked at all the same."""
    assert checked.code == 4
    assert checked.failed() == ["intake:tls"]
    assert words in checked.what("intake:tls", "fail")
    assert checked.what("intake:credentials", "ok")


@pytest.mark.parametrize(
    ("greeting", "words"),
    [(b"220 mail.example.com ESMTP\r\n", "perhaps nothing there speaks TLS"), (b"", "nothing within 0.3 s")],
)
def test_a_server_that_does_not_speak_tls_is_told(shipper: Shipper, greeting: bytes, words: str):
    class Server(Listener):
        def handle(self, connection: socket.socket) -> None:
            connection.sendall(greeting)
            stall(connection)

    with Server() as server:
        shipper.target = Target(f"https://127.0.0.1:{server.port}", *KEYS)
        assert_tls_fails(online(shipper, settings={"delivery.connect_timeout_seconds": 0.3}), words)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_a_proxy_is_a_step_of_its_own(
    shipper: Shipper, authority: trustme.CA, trusting: dict[str, object], is_tls: bool
):
    user = {"intake.proxy_username": "the-proxy-user", "intake.proxy_password.env": "PROXY"}
    context = context_of(authority, "127.0.0.1") if is_tls else None
    with Origin(context=context) as origin:
        shipper.target = Target(origin.url, *KEYS)
        with Proxy(user="the-proxy-user", password="PROXYPASSWORD") as proxy:
            settings = {**trusting, **user, "intake.proxy": proxy.url}
            checked = online(shipper, settings=settings, env={"PROXY": "PROXYPASSWORD"})
            assert (checked.code, checked.results()) == (0, GOOD)
            assert "the proxy's work" in checked.what("intake:dns")
            assert f"the proxy {proxy.url} is reachable" in checked.what("intake:connect")
            assert ("leads on to 127.0.0.1" in checked.what("intake:connect")) is is_tls
            assert len(origin.requests) == 1

            refused = online(shipper, settings=settings, env={"PROXY": "PROXYPASSWORD-2"})
        assert refused.code == 4
        assert f"the proxy {proxy.url} asks for a user and password" in refused.what("intake:connect", "fail")
        gone = online(shipper, settings=settings, env={"PROXY": "PROXYPASSWORD"})
        assert (gone.code, gone.results()) == (4, {"dns": "ok", "connect": "fail", "credentials": "ok"})
        assert f"the proxy {proxy.url} cannot be used" in gone.what("intake:connect")
    assert len(origin.requests) == 1


# Where secrets come from ----------------------------------------------------------------------------------------------


@pytest.fixture
def granted(shipper: Shipper, service: Service) -> Shipper:
    """A shipper that gets its tokens from the sandbox's token endpoint."""
    shipper.config.write_text(
        shipper.config.read_text().replace('token = { env = "INTAKE_TOKEN" }\n', "")
        + "[intake.oauth2]\n"
        + f'token_url = "{service.target.base_url}/oauth2/v2.0/token"\n'
        + 'client_id = "sandbox-client"\nscope = "api://shipper-sandbox/.default"\n'
        + 'client_secret = { env = "CLIENT_SECRET" }\n'
    )
    return shipper


def test_a_token_endpoint_is_asked(granted: Shipper, service: Service):
    checked = online(granted, env={"CLIENT_SECRET": "sandbox-client-secret"})
    assert (checked.code, checked.results()) == (0, GOOD)
    what = checked.what("intake:credentials")
    assert f"from the token endpoint {service.target.base_url}/oauth2/v2.0/token; it expires in 59 minutes" in what
    assert "CLIENT_SECRET" in checked.what("intake.oauth2.client_secret", "ok")


def test_a_token_endpoint_that_refuses_is_told_with_the_way_out(granted: Shipper, service: Service):
    checked = online(granted, env={"CLIENT_SECRET": WRONG})
    assert (checked.code, checked.results()) == (
        4,
        {"dns": "ok", "connect": "ok", "tls": "ok", "credentials": "fail"},
    )
    assert "intake.oauth2.client_secret (HTTP 401, invalid_client" in checked.what("intake:credentials")
    assert service.counts()["requests"] == 0


def test_a_token_of_the_endpoint_that_is_refused_is_not_blamed_on_a_setting_that_is_not_there(
    granted: Shipper, service: Service, fake: FakeService
):
    granted.target = fake.target
    fake.default = Reply(status=401, body=QUOTING)
    checked = online(granted, env={"CLIENT_SECRET": "sandbox-client-secret"})
    assert checked.failed() == ["intake:token"]
    assert "check intake.oauth2, its scope above all" in checked.what("intake:token")


def test_secrets_are_looked_at_where_they_are_kept(shipper: Shipper, service: Service):
    secret = shipper.folder / "token"
    secret.write_text(f"{shipper.target.token}\n")
    secret.chmod(0o644)
    unset = {"intake.subscription_key": '{ env = "NOT_THERE" }'}
    file = {"intake.token": f'{{ file = "{secret}" }}'}
    checked = online(shipper, settings={**unset, **file})
    assert checked.code == 2
    assert checked.failed() == ["intake.subscription_key", "intake.token", "intake:credentials"]
    assert "NOT_THERE is not set" in checked.what("intake.subscription_key")
    assert f"chmod 600 {secret}" in checked.what("intake.token")
    assert checked.results()["tls"] == "ok", "the way to the service is looked at all the same"
    assert service.counts()["requests"] == 0

    secret.chmod(0o600)
    for where, settings in {
        f"the file {secret}": file,
        "the program cat": {"intake.token": f'{{ command = ["cat", "{secret}"] }}'},
        "the settings themselves": {"intake.token": shipper.target.token},
    }.items():
        checked = online(shipper, settings=settings)
        assert (checked.code, checked.results()) == (0, GOOD)
        assert f"from {where}; it expires in 29 days" in checked.what("intake:credentials")
        assert "it expires in 29 days" in checked.what("intake.token", "note" if "settings" in where else "ok")

    checked = check(shipper, settings={"intake.token": '{ command = ["false"] }'})
    assert (checked.code, checked.failed()) == (2, ["intake.token"])
    assert "false failed with exit code 1" in checked.what("intake.token")


@pytest.mark.parametrize("key", ["ca_bundle", "client_certificate"])
def test_certificates_that_cannot_be_used_are_a_wrong_setting(shipper: Shipper, key: str):
    shipper.target = Target("https://127.0.0.1:9", *KEYS)
    checked = check(shipper, settings={f"intake.{key}": shipper.config})
    assert (checked.code, checked.failed()) == (2, [f"intake.{key}"])
    assert str(shipper.config) in checked.what(f"intake.{key}")


# The report -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reporting(shipper: Shipper, service: Service) -> Shipper:
    """A shipper with a report's endpoint, too."""
    shipper.config.write_text(
        f'{shipper.config.read_text()}[report]\nbase_url = "{service.target.base_url}"\n'
        'subscription_key = { env = "INTAKE_KEY" }\ntoken = { env = "INTAKE_TOKEN" }\n'
    )
    return shipper


def test_a_report_is_asked_for_by_its_account(reporting: Shipper, service: Service):
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


def test_only_one_endpoint_is_looked_at_if_that_is_asked_for(reporting: Shipper, shipper: Shipper):
    checked = online(reporting, "--only", "intake")
    assert (checked.code, checked.results(), checked.results("report")) == (0, GOOD, {})
    assert not [item for item in checked.items if item["name"].startswith("report")]


def test_a_report_alone_is_enough_and_a_missing_endpoint_that_was_named_is_not(shipper: Shipper, service: Service):
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


def test_a_wrong_configuration_is_the_one_thing_told(shipper: Shipper):
    shipper.config.write_text(shipper.config.read_text() + "[batch]\nmax_event = 5\n")
    checked = online(shipper)
    assert (checked.code, checked.failed(), len(checked.items)) == (2, ["configuration"], 1)
    assert f"{shipper.config}: batch.max_event: there is no such key" in checked.what("configuration")


def test_an_endpoint_that_is_not_whole_is_told_and_reached_all_the_same(shipper: Shipper, service: Service):
    text = shipper.config.read_text()
    shipper.config.write_text(text.replace('token = { env = "INTAKE_TOKEN" }\n', ""))
    checked = online(shipper)
    assert (checked.code, checked.failed()) == (2, ["intake.token"])
    assert checked.results() == {"dns": "ok", "connect": "ok", "tls": "ok"}
    shipper.config.write_text(text.partition("[state]")[0].partition("[intake]")[0])
    nothing = check(shipper, "--config", str(shipper.config), configured=False)
    assert (nothing.code, nothing.failed()) == (2, ["intake"])
    assert service.counts()["requests"] == 0


def test_the_process_that_holds_the_state_is_named(shipper: Shipper, service: Service):
    holder = shipper.start("pipe", stdin=subprocess.PIPE)
    holder.wait_until((shipper.state / "state.db").exists, "it holds the state directory")
    checked = online(shipper)
    assert (checked.code, checked.results()) == (0, GOOD)
    assert f"process {holder.pid} holds it" in checked.what("state.directory", "note")
    assert not holder.has_ended
    holder.stdin.close()
    assert holder.finish().returncode == 0
    assert "note" not in [item["result"] for item in check(shipper).items if item["name"] == "state.directory"]


def test_a_state_directory_that_cannot_be_used_is_told_and_not_touched(shipper: Shipper):
    for place in (shipper.config, shipper.config / "below"):
        checked = check(shipper, settings={"state.directory": place}, check=False)
        assert (checked.code, checked.failed()) == (2, ["state.directory"])
        assert str(place) in checked.what("state.directory")
    shipper.state.mkdir(mode=0o755)
    shipper.state.chmod(0o755)
    assert "mode 0755" in check(shipper).what("state.directory", "note")
    assert shipper.state.stat().st_mode & 0o777 == 0o755
    assert list(shipper.state.iterdir()) == []
    shipper.state.chmod(0o700)
    assert check(shipper).what("state.directory", "ok")


def test_a_state_directory_of_somebody_else_is_a_remark(shipper: Shipper):
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    shipper.state.mkdir(mode=0o700)
    os.chown(shipper.state, 65_534, 65_534)
    checked = check(shipper)
    assert checked.code == 0
    assert "belongs to user 65534 (mode 0700), and this is user 0" in checked.what("state.directory", "note")


def test_what_the_modes_forbid_is_told(shipper: Shipper):
    prefix: list[str] = []
    if not os.geteuid():
        if not shutil.which("setpriv"):
            pytest.skip("there is no setpriv")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
    shipper.state.mkdir(mode=0o500)
    closed = shipper.folder / "closed.ndjson"
    closed.touch(mode=0o000)
    settings = {"input.include": f'["{closed}"]'}
    checked = check(shipper, settings=settings, prefix=prefix, check=False)
    assert (checked.code, checked.failed()) == (2, ["state.directory", "input.include"])
    assert "mode 0500" in checked.what("state.directory")
    assert str(closed) in checked.what("input.include", "fail")
    below = {"state.directory": shipper.state / "deeper" / "still"}
    checked = check(shipper, settings=below, prefix=prefix, check=False)
    assert checked.failed() == ["state.directory"]
    assert f"cannot be made in {shipper.state}" in checked.what("state.directory")


def test_input_and_disk_are_looked_at(shipper: Shipper, sample: Sample):
    for name in ("a.ndjson", "b.ndjson", "c.log", "c.txt"):
        (shipper.folder / name).write_bytes(sample.lines[0])
    settings = {"input.include": '["*.ndjson", "[a-b].*", "*.log", "none-*"]', "input.exclude": '["b.*"]'}
    checked = check(shipper, settings=settings)
    assert checked.code == 0
    assert "2 files match" in checked.what("input.include", "ok")
    assert "none-*" in checked.what("input.include", "note")
    assert "names no files" in check(shipper).what("input.include", "note")
    assert "GB free" in checked.what("state.disk", "ok")
    wide = check(shipper, settings={"spool.max_bytes": 10**18})
    assert wide.code == 0
    assert "spool.max_bytes" in wide.what("state.disk", "note")
