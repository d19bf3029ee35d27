"""Tokens and keys that expire, are refused or are replaced while a command runs; no output contains a secret."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote_plus

import pytest
import trustme

from shipper.sandbox.options import CallLimit
from tests.certificates import asking, context_of, demanding
from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, Target, changed, sandbox
from tests.e2e.fake_service import OK, FakeService, Reply
from tests.e2e.files import Tail, log_lines
from tests.e2e.surroundings import site_of
from tests.servers import Origin, Proxy

# Frequent probes, but not so frequent that an endpoint throttles them.
QUICK = {"delivery.retry_initial_seconds": 0.1, "delivery.retry_max_seconds": 0.3}
MANY_CALLS = CallLimit(100_000, 60)


def replace(path: Path, secret: str) -> Path:
    """Replace a secret file atomically, as agents that rotate secrets do."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(secret + "\n")
    new.chmod(0o600)
    new.replace(path)
    return path


# Many small requests.
BUSY = {**QUICK, "batch.linger_seconds": 0.01, "batch.max_events": 10, "delivery.concurrency": 4}


def assert_no_loss(shipper: Shipper, records: int) -> None:
    state = shipper.read_state()
    assert (state.accepted, state.dead_lettered) == (records, 0)


# Tokens from an endpoint ----------------------------------------------------------------------------------------------


def test_delivery_waits_without_a_token_until_the_endpoint_works_and_the_client_secret_is_correct(
    tail: Tail, shipper: Shipper
):
    """For every fault of the endpoint; then a wrong secret is named, and its replacement used without a restart."""
    faults: list[dict[str, Any]] = [
        {"effect": "status", "status": 429, "retry_after": "1"},
        {"effect": "html"},
        {"effect": "reset"},
    ]
    with sandbox(token_limit=MANY_CALLS) as service:
        service.set_faults({"operation": "token", **faults[0]})
        shipper.target = service.target
        access = service.access()
        secret = replace(shipper.folder / "client-secret", "wrong")
        entries = {key: access[key] for key in ("token_url", "client_id", "scope")}
        shipper.use_oauth2(**entries, client_secret={"file": str(secret)})
        tail.service = service
        tail.append(0, 10)
        running = tail.start(settings=BUSY)
        for fault in faults:
            service.set_faults({"operation": "token", **fault})
            running.wait_until(lambda: service.faults_applied()[0] > 2, f"it keeps asking: {fault}")
        assert [line["reason"] for line in log_lines(running, "delivery_paused")] == ["token_endpoint"]
        service.set_faults()
        running.wait_until(lambda: len(log_lines(running, "delivery_paused")) == 2, "the secret is refused")
        paused = log_lines(running, "delivery_paused")[1]
        assert paused["reason"] == "token"
        assert "intake.oauth2.client_secret" in paused["message"]
        assert service.requests(operation="intake") == []
        replace(secret, access["client_secret"])
        tail.wait(10)
        assert running.stop().returncode == 0
    assert_no_loss(shipper, 10)


# A token in a file ----------------------------------------------------------------------------------------------------


def test_a_token_file_replaced_in_time_avoids_refusals_and_one_replaced_late_ends_a_pause(
    tail: Tail, shipper: Shipper, fake: FakeService
):
    valid = {"Bearer token-0"}
    unauthorized = Reply(status=401, body=b'{"message":"Unauthorized. Access token is invalid."}')
    fake.default = lambda: OK if fake.headers[-1]["Authorization"] in valid else unauthorized
    tail.service = fake
    file = replace(shipper.folder / "token", "token-0")
    running = tail.start(settings={**BUSY, "intake.token": f'{{ file = "{file}" }}'})
    tail.deliver(10)
    valid.add("Bearer token-1")
    replace(file, "token-1")
    while fake.headers[-1]["Authorization"] != "Bearer token-1":
        tail.deliver(1)
    valid.remove("Bearer token-0")
    tail.deliver(10)
    assert len(fake.stored) == fake.requests, "a token was refused"

    valid.clear()
    tail.append(tail.written, tail.written + 100)
    running.wait_for("delivery_paused")
    assert [line["reason"] for line in log_lines(running, "delivery_paused")] == ["token"]
    refused = fake.requests
    running.wait_until(lambda: fake.requests > refused + 3, "it keeps asking")
    valid.add("Bearer token-2")
    replace(file, "token-2")
    tail.wait(tail.written)
    assert running.stop().returncode == 0
    assert_no_loss(shipper, tail.written)
    assert len(fake.event_ids()) == tail.written


# Subscription keys ----------------------------------------------------------------------------------------------------


def test_rotating_one_key_stops_nothing_and_rotating_both_pauses_until_a_key_file_is_replaced(
    tail: Tail, shipper: Shipper
):
    with sandbox() as service:
        tail.service = service
        shipper.target = service.target
        access = service.access()
        primary = replace(shipper.folder / "primary", access["subscription_key"])
        secondary = replace(shipper.folder / "secondary", access["secondary_key"])
        keys = {"": primary, "_secondary": secondary}
        files = {f"intake.subscription_key{which}": f'{{ file = "{file}" }}' for which, file in keys.items()}
        running = tail.start(settings={**BUSY, **files})
        tail.deliver(10)
        for file in (primary, secondary, primary):
            new = service.rotate_key(file.name)
            tail.deliver(50)
            replace(file, new)
        assert log_lines(running, "delivery_paused") == []
        assert len(log_lines(running, "key_switched")) == 3
        assert len(service.requests(status=401)) >= 3

        for times, mended in enumerate((primary, secondary), 1):
            new_keys = {file: service.rotate_key(file.name) for file in (primary, secondary)}
            tail.append(tail.written, tail.written + 100)
            running.wait_until(lambda n=times: len(log_lines(running, "delivery_paused")) == n, "it pauses")
            paused = log_lines(running, "delivery_paused")[-1]
            assert paused["reason"] == "subscription_key"
            assert "intake.subscription_key" in paused["message"]
            refused = len(service.requests(status=401))
            running.wait_until(
                lambda refused=refused: len(service.requests(status=401)) > refused + 3, "it keeps asking"
            )
            replace(mended, new_keys[mended])
            tail.wait(tail.written)
        assert running.stop().returncode == 0
        assert service.times_received() == dict.fromkeys(tail.ids(tail.written), 1)
    assert_no_loss(shipper, 360)


# A client certificate -----------------------------------------------------------------------------------------------


def test_a_client_certificate_is_sent_to_the_service_but_not_to_the_token_endpoint(
    shipper: Shipper, authority: trustme.CA, ca: Path, client: SimpleNamespace, file: Path
):
    demands = demanding(context_of(authority, "127.0.0.1"), authority, "1.3")
    token = b'{"token_type":"Bearer","expires_in":3600,"access_token":"the-token"}'
    granted = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(token) + token
    asks = asking(context_of(authority, "127.0.0.1"), authority)
    with Origin(context=demands) as origin, Origin(granted, context=asks) as endpoint:
        secret = {"env": "CLIENT_SECRET"}
        shipper.use_oauth2(token_url=f"{endpoint.url}/token", client_id="shipper", client_secret=secret)
        shipper.target = Target(origin.url, "fake-subscription-key", "fake-token")
        settings = {"intake.ca_bundle": ca, "intake.client_certificate": client.one}
        options = {"settings": settings, "env": {"CLIENT_SECRET": "the-client-secret"}}
        result = shipper.backfill(file, **options)
        asked = len(endpoint.requests)
        check = shipper.run("check", "--online", **options)
    assert (result.returncode, result.counts()) == (0, (300, 300, 0, 0, 0)), result.stderr
    assert check.returncode == 0, check.stdout
    assert asked > 0
    assert len(endpoint.clients) > asked, "`check` contacts the endpoint, too"
    assert set(endpoint.clients) == {""}
    assert set(origin.clients) == {"the-client"}


# Never shown ----------------------------------------------------------------------------------------------------------

SECRETS = {
    "INTAKE_TOKEN": "canary-token-3f9a",
    "INTAKE_KEY": "canary-key-77b1",
    "INTAKE_KEY_2": "canary-other-key-08c2",
    "CLIENT_SECRET": "canary-client-secret-5d4e",
    "PASSWORD": "canary-password-9a01",
    "PROXY_PASSWORD": "canary-proxy-password-c3d6",
}
PERSONAL = {"IP": "198.51.100.213", "Username": "canary_bird_4711"}
KEYS = 'subscription_key = { env = "INTAKE_KEY" }\nsubscription_key_secondary = { env = "INTAKE_KEY_2" }\n'
TOKEN = 'token = { env = "INTAKE_TOKEN" }\n'
COMMAND = 'token = { command = ["$folder/complaining"] }\n'
PROXY = 'proxy = "$proxy"\nproxy_username = "x"\nproxy_password = { env = "PROXY_PASSWORD" }\n'
OAUTH2 = (
    '[intake.oauth2]\ntoken_url = "$fake"\nclient_id = "x"\nclient_secret = { env = "CLIENT_SECRET" }\n'
    'grant = "password"\nusername = "x"\npassword = { env = "PASSWORD" }\n'
)


@dataclass(frozen=True)
class Failures:
    """
    A sequence of failures in one run.

    Attributes:
        answers: For each failure: text expected in the log, status of the answer, and its field that quotes the
            request. The last one repeats until the command gives up.
        says: Other texts expected in the log.
        address: Address of the service; here and in `intake`, `$fake` etc. stand for addresses and folders.
        intake: Its section without address and keys.
    """

    answers: tuple[tuple[str, int, str], ...] = ()
    says: str = ""
    address: str = "$fake"
    intake: str = TOKEN


FAILURES = {
    "answers": Failures(
        (
            ('"reason":"http_500"', 500, "message"),
            ('"reason":"remote_protocol_error"', 99, "message"),
            ('"reason":"throttled"', 429, "message"),
            ('"status":400', 400, "message"),
            ('"rule":"too_large"', 413, "message"),
            ('"rule":"rejected"', 202, "rejected"),
            ('"reason":"forbidden"', 403, "message"),
            ('"reason":"redirect"', 302, "message"),
            ('"reason":"not_found"', 404, "message"),
            ('"reason":"token"', 401, "message"),
        ),
        says="failed with exit code 7",
        intake=COMMAND,
    ),
    "oauth2": Failures(
        (
            ('"reason":"token_endpoint"', 500, "error"),
            ("not valid in a header", 200, "access_token"),
            ("other than Bearer", 200, "token_type"),
            ('"reason":"token"', 400, "error_description"),
        ),
        intake=OAUTH2,
    ),
    "no tls": Failures(says="wrong version number", address="https://$fake_host"),
    "certificate": Failures(says='"reason":"tls"', address="$origin"),
    "proxy": Failures(says='"reason":"credentials"', address="$origin", intake=TOKEN + PROXY),
}


def quoting(fake: FakeService, failures: Failures) -> Callable[[], Reply]:
    """Quote the whole request and more in the answer, as services in debug mode do."""
    left = [*failures.answers]

    def reply() -> Reply:
        _, status, field = left.pop(0) if len(left) > 1 else left[0]
        everything = " ".join(SECRETS.values())
        quoted = f"{fake.headers[-1]} {unquote_plus(fake.bodies[-1].decode())} {everything}"
        told = [{"index": 0, "message": quoted}] if field == "rejected" else quoted
        document = {"error": "invalid_client", "access_token": "x", field: told}
        headers = {"Location": f"https://x.example.com/{everything}", "WWW-Authenticate": everything}
        return Reply(status, json.dumps(document).encode(), headers=headers)

    return reply


def assert_shows_nothing(text: str) -> None:
    canaries = [*SECRETS.values(), *PERSONAL.values()]
    assert [canary for canary in canaries if canary in text] == []


@pytest.fixture(scope="module")
def tls() -> ssl.SSLContext:
    """For a service with an untrusted certificate."""
    return context_of(trustme.CA(), "127.0.0.1")


@pytest.fixture
def canaries(shipper: Shipper, sample: Sample) -> Path:
    """Records with personal data, and a program that fails once and prints secrets."""
    script = f'#!/bin/sh\nif mkdir "$0.failed"; then env; env >&2; exit 7; fi\necho {SECRETS["INTAKE_TOKEN"]}\n'
    shipper.write("complaining", script.encode()).chmod(0o700)
    return shipper.write("events.ndjson", *[changed(line, **PERSONAL) for line in sample.lines[:5]])


@pytest.mark.early
@pytest.mark.parametrize("failures", FAILURES.values(), ids=FAILURES)
def test_no_failure_reveals_a_secret_or_personal_data(
    shipper: Shipper, fake: FakeService, canaries: Path, tls: ssl.SSLContext, failures: Failures
):
    fake.default = quoting(fake, failures)
    settings = {
        **QUICK,
        "delivery.give_up_after_seconds": 5 if failures.answers else 0.3,
        "delivery.concurrency": 1,
        "batch.max_events": 1,
        "delivery.retry_max_seconds": 0.1,
    }
    with Origin(context=tls) as origin, Proxy(user="x", password="another one") as proxy:
        url = fake.target.base_url
        places = {"fake": url, "fake_host": url.removeprefix("http://"), "folder": shipper.folder}
        places |= {"origin": origin.url, "proxy": proxy.url}
        shipper.target = Target(Template(failures.address).substitute(places), "", "")
        shipper.config.write_text(
            f'[intake]\nbase_url = "http://x"\n{KEYS}{Template(failures.intake).substitute(places)}'
            f'[state]\ndirectory = "{shipper.state}"\n'
        )
        debug = ["--log-level", "debug"]
        running = shipper.start("backfill", canaries, *debug, settings=settings, env=SECRETS, fresh=True)
        command = Path(f"/proc/{running.pid}/cmdline")
        running.wait_until(command.read_text, "it is executed")
        words = command.read_text()
        result = running.finish()
    assert result.returncode in {3, 4}
    for says in (failures.says, *(says for says, *_ in failures.answers)):
        assert says in result.stderr
    assert "backfill" in words
    names = "\n".join(os.fsdecode(path) for path in shipper.folder.rglob("*"))
    for text in (result.stdout, result.stderr, words, names):
        assert_shows_nothing(text)


def test_the_settings_are_shown_without_secrets(shipper: Shipper):
    intake = PROXY.replace("$proxy", "http://127.0.0.1:9") + OAUTH2.replace("$fake", "https://x.example.com")
    for access in (TOKEN, intake):
        shipper.config.write_text(f'[intake]\nbase_url = "https://x"\n{KEYS}{access}')
        shown = shipper.run("config", "show", env=SECRETS)
        assert shown.returncode == 0
        assert "subscription_key" in shown.stdout
        assert_shows_nothing(shown.stdout + shown.stderr)


def test_an_internal_error_is_logged_with_its_location_but_without_data(shipper: Shipper, canaries: Path):
    """An error occurs during a request, when all frames hold its record and secrets."""
    code = (
        "from shipper.delivery.connection import Connection\n\n"
        "async def exchange(self, request, *rest):\n    return request + self\n\n"
        "Connection._exchange = exchange\n"
    )
    env = SECRETS | site_of(shipper.folder, code)
    running = shipper.start("backfill", canaries, "--log-level", "debug", env=env, check=False)
    assert running.process.wait(20) == 1
    assert "Traceback" in running.stderr
    assert "TypeError" in running.stderr
    assert_shows_nothing(running.stderr)
