"""Tokens and keys: they expire, are replaced and refused while the command runs, and are never shown."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import unquote_plus

import pytest
import trustme

from shipper.sandbox.options import CallLimit
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, Target, changed, sandbox
from tests.e2e.fake_service import OK, FakeService, Reply
from tests.e2e.files import told
from tests.stage.servers import Origin, Proxy

# Probes come soon, but not so often that an endpoint's patience ends.
QUICK = {"delivery.retry_initial_seconds": 0.1, "delivery.retry_max_seconds": 0.3}
MANY_CALLS = CallLimit(100_000, 60)


def replace(path: Path, secret: str) -> Path:
    """Put a secret into a file at one stroke, as agents do that keep secrets fresh."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(secret + "\n")
    new.chmod(0o600)
    new.replace(path)
    return path


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def use_oauth2(shipper: Shipper, access: Mapping[str, Any], **changes: str) -> None:
    """Have the configuration get tokens from an endpoint; a value in `changes` is TOML."""
    secret = replace(shipper.folder / "client-secret", access["client_secret"])
    entries = {
        "token_url": f'"{access["token_url"]}"',
        "client_id": f'"{access["client_id"]}"',
        "client_secret": f'{{ file = "{secret}" }}',
        "scope": f'"{access["scope"]}"',
        **changes,
    }
    shipper.config.write_text(
        '[intake]\nbase_url = "http://127.0.0.1:9"\nsubscription_key = { env = "INTAKE_KEY" }\n[intake.oauth2]\n'
        + "".join(f"{key} = {value}\n" for key, value in entries.items())
        + f'[state]\ndirectory = "{shipper.state}"\n'
    )


class Sidecar:
    """`shipper run` on one file that is written bit by bit."""

    def __init__(self, shipper: Shipper, sample: Sample, *arguments: str, **settings: object) -> None:
        self._file = shipper.folder / "events.ndjson"
        self._file.touch()
        self._sample = sample
        self._written = 0
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        self.running: Running = shipper.start(
            "run",
            *arguments,
            settings={
                **QUICK,
                "input.include": f'["{self._file}"]',
                "input.poll_interval_seconds": 0.05,
                "batch.linger_seconds": 0.01,
                "batch.max_events": 10,
                "delivery.concurrency": 4,
                **changes,
            },
        )

    @property
    def ids(self) -> list[str]:
        """Of what was written."""
        return self._sample.ids[: self._written]

    def write(self, count: int = 10) -> None:
        with self._file.open("ab") as out:
            out.writelines(self._sample.lines[self._written : self._written + count])
        self._written += count

    def deliver(self, service: Service | FakeService, count: int = 10) -> None:
        """Write some lines and wait until all that was written is delivered."""
        self.write(count)
        self.wait(service)

    def wait(self, service: Service | FakeService) -> None:
        self.running.wait_until(lambda: set(self.ids) <= set(service.event_ids()), "all is delivered", limit_s=20)

    def stop(self) -> None:
        """Stop; nothing is pending, and nothing is a dead letter."""
        assert self.running.stop().returncode == 0


def assert_no_loss(shipper: Shipper, records: int) -> None:
    state = shipper.read_state()
    assert (state.accepted, state.dead_lettered) == (records, 0)


# Tokens from an endpoint ----------------------------------------------------------------------------------------------

LIFETIME_S = 3
REFRESH_S = 2.25  # a quarter of such a life is kept in reserve


def test_tokens_that_live_three_seconds_are_renewed_in_time_under_load(
    shipper: Shipper, sample: Sample, tmp_path: Path
):
    """Two at a time, one for each grant; a token of the sandbox may live up to a second less than it says."""
    records, rate = 8_000, 1000
    with sandbox(token_lifetime_seconds=LIFETIME_S, token_limit=MANY_CALLS) as service:
        access = service.access()
        with Shipper(tmp_path / "other", service.target) as other:
            shipper.target = service.target
            use_oauth2(shipper, access)
            password = replace(other.folder / "password", access["password"])
            use_oauth2(
                other,
                access,
                grant='"password"',
                username=f'"{access["username"]}"',
                password=f'{{ file = "{password}" }}',
            )
            settings = {**QUICK, "batch.max_events": 50, "delivery.concurrency": 4}
            settings["delivery.rate_limit_events_per_second"] = rate
            file = write(tmp_path / "a.ndjson", sample.lines[:records])
            other_file = write(tmp_path / "b.ndjson", sample.lines[records : 2 * records])
            both = [
                each.start("backfill", path, "--summary", "json", settings=settings)
                for each, path in ((shipper, file), (other, other_file))
            ]
            results = [running.finish() for running in both]
        for result in results:
            assert (result.returncode, result.counts()) == (0, (records, records, 0, 0, 0))
        service.assert_holds_exactly(sample.ids[: 2 * records])
        requests = service.requests()
    tokens = [request for request in requests if request["operation"] == "token"]
    refused = [request for request in requests if request["status"] == 401]
    seconds = requests[-1]["at"] - requests[0]["at"]
    assert {token["status"] for token in tokens} == {200}
    assert seconds > 2 * LIFETIME_S
    assert 2 * (seconds // LIFETIME_S) <= len(tokens) <= 2 * (seconds / REFRESH_S + 2) + len(refused)
    assert len(refused) <= 4 * len(tokens), "at most the senders' requests of one moment"
    assert sum(result.summary["retries"] for result in results) == len(refused)


def test_while_the_endpoint_is_away_a_token_is_used_to_its_end_and_then_delivery_waits(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    """The endpoint says that a token lives for six seconds; the service would take it for longer."""
    token = {"token_type": "Bearer", "expires_in": 6, "access_token": service.target.token}
    fake.default = granted = Reply(status=200, body=json.dumps(token).encode())
    use_oauth2(shipper, {**service.access(), "token_url": fake.target.base_url})
    sidecar = Sidecar(shipper, sample)
    sidecar.deliver(service)
    fake.default = Reply(status=503)
    sidecar.running.wait_for("token_refresh_failed")
    failed = told(sidecar.running, "token_refresh_failed")[0]
    assert (failed["reason"], failed["has_token"]) == ("token_endpoint", True)
    while "delivery_paused" not in sidecar.running.stderr:
        sidecar.write(1)
        sidecar.running.wait_until(
            lambda: service.stored == len(sidecar.ids) or "delivery_paused" in sidecar.running.stderr,
            "delivered or paused",
        )
    assert service.stored > 10, "the token was not used to its end"
    assert [line["reason"] for line in told(sidecar.running, "delivery_paused")] == ["token_endpoint"]
    fake.default = granted
    sidecar.wait(service)
    sidecar.deliver(service)
    sidecar.stop()
    assert service.requests(status=401) == []
    assert service.times_received() == dict.fromkeys(sidecar.ids, 1)
    assert "token_recovered" in sidecar.running.stderr
    assert_no_loss(shipper, len(sidecar.ids))


@pytest.mark.parametrize(
    "fault",
    [{"effect": "status", "status": 429, "retry_after": "1"}, {"effect": "html"}, {"effect": "reset"}],
    ids=["429", "html", "reset"],
)
def test_without_a_token_delivery_waits_for_the_endpoint(shipper: Shipper, sample: Sample, fault: dict[str, Any]):
    with sandbox(token_limit=MANY_CALLS) as service:
        service.set_faults({"operation": "token", **fault})
        shipper.target = service.target
        use_oauth2(shipper, service.access())
        sidecar = Sidecar(shipper, sample)
        sidecar.write()
        sidecar.running.wait_until(lambda: len(service.requests(operation="token")) > 2, "it goes on asking")
        assert [line["reason"] for line in told(sidecar.running, "delivery_paused")] == ["token_endpoint"]
        assert service.requests(operation="intake") == []
        service.set_faults()
        sidecar.wait(service)
        sidecar.stop()
    assert_no_loss(shipper, 10)


def test_a_wrong_client_secret_is_named_and_its_replacement_is_taken_without_a_restart(
    shipper: Shipper, sample: Sample
):
    with sandbox(token_limit=MANY_CALLS) as service:
        shipper.target = service.target
        access = service.access()
        use_oauth2(shipper, {**access, "client_secret": "wrong"})
        sidecar = Sidecar(shipper, sample)
        sidecar.write()
        sidecar.running.wait_for("delivery_paused")
        (paused,) = told(sidecar.running, "delivery_paused")
        assert paused["reason"] == "token"
        assert "intake.oauth2.client_secret" in paused["message"]
        assert service.stored == 0
        replace(shipper.folder / "client-secret", access["client_secret"])
        sidecar.wait(service)
        sidecar.stop()
    assert_no_loss(shipper, 10)


# Tokens that are replaced by others -----------------------------------------------------------------------------------


class Doorkeeper:
    """Has the service take one token only."""

    def __init__(self, fake: FakeService, token: str) -> None:
        self.token = token
        self._fake = fake
        fake.default = self._judge

    def _judge(self) -> Reply:
        is_good = self._fake.headers[-1]["Authorization"] == f"Bearer {self.token}"
        return OK if is_good else Reply(status=401, body=b'{"message":"Unauthorized. Access token is invalid."}')

    @property
    def refused(self) -> int:
        return self._fake.requests - len(self._fake.stored)


def test_a_token_file_that_is_replaced_in_time_costs_no_refusal(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    door = Doorkeeper(fake, "token-0")
    file = replace(shipper.folder / "token", "token-0")
    sidecar = Sidecar(shipper, sample, intake__token=f'{{ file = "{file}" }}')
    for number in range(1, 4):
        sidecar.deliver(fake)
        fake.default = OK  # for a while, both are good
        replace(file, f"token-{number}")
        while fake.headers[-1]["Authorization"] != f"Bearer token-{number}":
            sidecar.deliver(fake, 1)
        door = Doorkeeper(fake, f"token-{number}")
    sidecar.deliver(fake)
    sidecar.stop()
    assert door.refused == 0
    assert_no_loss(shipper, len(sidecar.ids))
    assert len(fake.event_ids()) == len(sidecar.ids)


def test_a_token_file_that_is_replaced_too_late_pauses_delivery_until_then(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    door = Doorkeeper(fake, "token-0")
    file = replace(shipper.folder / "token", "token-0")
    sidecar = Sidecar(shipper, sample, intake__token=f'{{ file = "{file}" }}')
    sidecar.deliver(fake)
    door.token = "token-1"
    sidecar.write(100)
    sidecar.running.wait_for("delivery_paused")
    assert [line["reason"] for line in told(sidecar.running, "delivery_paused")] == ["token"]
    refused = door.refused
    sidecar.running.wait_until(lambda: door.refused > refused + 3, "it goes on asking")
    replace(file, "token-1")
    sidecar.wait(fake)
    sidecar.stop()
    assert_no_loss(shipper, 110)
    assert len(fake.event_ids()) == 110


def test_a_token_command_is_run_again_when_its_token_is_refused(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    door = Doorkeeper(fake, "token-0")
    token, runs = shipper.folder / "token", shipper.folder / "runs"
    program = shipper.folder / "give-token"
    program.write_text(f"#!/bin/sh\necho run >> {runs}\ncat {token}\n")
    program.chmod(0o700)
    sidecar = Sidecar(shipper, sample, intake__token=f'{{ command = ["{program}"] }}')
    sidecar.write()
    sidecar.running.wait_for("delivery_paused")
    assert [line["reason"] for line in told(sidecar.running, "delivery_paused")] == ["credentials"]
    assert fake.requests == 0
    replace(token, "token-0")
    sidecar.wait(fake)
    before = len(runs.read_text().splitlines())
    for number in range(1, 4):
        replace(token, f"token-{number}")
        door.token = f"token-{number}"
        sidecar.deliver(fake, 50)
    sidecar.stop()
    assert len(runs.read_text().splitlines()) == before + 3, "once for each token that was refused"
    assert len(told(sidecar.running, "delivery_paused")) == 1
    assert_no_loss(shipper, 160)


# Subscription keys ----------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(shipper: Shipper) -> Iterator[Service]:
    """A sandbox whose keys may be rotated; the shipper knows both, from files."""
    with sandbox() as service:
        shipper.target = service.target
        access = service.access()
        replace(shipper.folder / "primary", access["subscription_key"])
        replace(shipper.folder / "secondary", access["secondary_key"])
        yield service


def of_keys(shipper: Shipper) -> dict[str, object]:
    return {
        "intake__subscription_key": f'{{ file = "{shipper.folder}/primary" }}',
        "intake__subscription_key_secondary": f'{{ file = "{shipper.folder}/secondary" }}',
    }


def test_keys_that_are_rotated_one_after_the_other_stop_nothing(shipper: Shipper, keys: Service, sample: Sample):
    sidecar = Sidecar(shipper, sample, **of_keys(shipper))
    sidecar.deliver(keys)
    for which in ("primary", "secondary", "primary"):
        new = keys.rotate_key(which)
        sidecar.deliver(keys, 50)
        replace(shipper.folder / which, new)
    sidecar.stop()
    assert told(sidecar.running, "delivery_paused") == []
    assert len(told(sidecar.running, "key_switched")) == 3
    assert len(keys.requests(status=401)) >= 3
    assert keys.times_received() == dict.fromkeys(sidecar.ids, 1)
    assert_no_loss(shipper, 160)


@pytest.mark.parametrize("mended", ["primary", "secondary"])
def test_when_both_keys_are_refused_delivery_waits_until_one_of_the_files_is_written_anew(
    shipper: Shipper, keys: Service, sample: Sample, mended: str
):
    sidecar = Sidecar(shipper, sample, **of_keys(shipper))
    sidecar.deliver(keys)
    new = {which: keys.rotate_key(which) for which in ("primary", "secondary")}
    sidecar.write(100)
    sidecar.running.wait_for("delivery_paused")
    (paused,) = told(sidecar.running, "delivery_paused")
    assert paused["reason"] == "subscription_key"
    assert "intake.subscription_key" in paused["message"]
    refused = len(keys.requests(status=401))
    sidecar.running.wait_until(lambda: len(keys.requests(status=401)) > refused + 3, "it goes on asking")
    replace(shipper.folder / mended, new[mended])
    sidecar.wait(keys)
    sidecar.stop()
    assert keys.times_received() == dict.fromkeys(sidecar.ids, 1)
    assert_no_loss(shipper, 110)


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
PROXY = TOKEN + 'proxy = "$proxy"\nproxy_username = "x"\nproxy_password = { env = "PROXY_PASSWORD" }\n'
OAUTH2 = (
    '[intake.oauth2]\ntoken_url = "$fake"\nclient_id = "x"\nclient_secret = { env = "CLIENT_SECRET" }\n'
    'grant = "password"\nusername = "x"\npassword = { env = "PASSWORD" }\n'
)


@dataclass(frozen=True)
class Failure:
    """
    A way to fail.

    Attributes:
        says: What the log says of it, so that it was this failure.
        status: Of the answer.
        quoted_as: The field of the answer that holds all that was sent.
        address: Where the service is; as in `intake`, `$fake` and so on stand for addresses and folders.
        intake: Its section, but for address and keys.
    """

    says: str
    status: int = 202
    quoted_as: str = "message"
    address: str = "$fake"
    intake: str = TOKEN


FAILURES = {
    "400": Failure('"status":400', status=400),
    "401": Failure('"reason":"token"', status=401),
    "403": Failure('"reason":"forbidden"', status=403),
    "404": Failure('"reason":"not_found"', status=404),
    "413": Failure('"rule":"too_large"', status=413),
    "429": Failure('"reason":"throttled"', status=429),
    "500": Failure('"reason":"http_500"', status=500),
    "302": Failure('"reason":"redirect"', status=302),
    "no http": Failure('"reason":"remote_protocol_error"', status=99),
    "no tls": Failure("wrong version number", address="https://$fake_host"),
    "certificate": Failure('"reason":"tls"', address="$origin"),
    "no service": Failure('"reason":"connect_error"', address="http://127.0.0.1:9"),
    "proxy": Failure('"reason":"proxy"', address="$origin", intake=PROXY),
    "oauth2 400": Failure('"reason":"token"', status=400, quoted_as="error_description", intake=OAUTH2),
    "oauth2 500": Failure('"reason":"token_endpoint"', status=500, quoted_as="error", intake=OAUTH2),
    "oauth2 token": Failure("no header can carry", status=200, quoted_as="access_token", intake=OAUTH2),
    "oauth2 type": Failure("another type", status=200, quoted_as="token_type", intake=OAUTH2),
    "command": Failure("failed with exit code 7", intake=COMMAND),
}


def quoting(fake: FakeService, failure: Failure) -> Callable[[], Reply]:
    """Answer with all that was sent, and more, as services do that are being debugged."""

    def reply() -> Reply:
        everything = " ".join(SECRETS.values())
        quoted = f"{fake.headers[-1]} {unquote_plus(fake.bodies[-1].decode())} {everything}"
        document = {"error": "invalid_client", "access_token": "x", failure.quoted_as: quoted}
        headers = {"Location": f"https://x.example.com/{everything}", "WWW-Authenticate": everything}
        return Reply(failure.status, json.dumps(document).encode(), headers=headers)

    return reply


def assert_shows_nothing(text: str) -> None:
    canaries = [*SECRETS.values(), *PERSONAL.values()]
    assert [canary for canary in canaries if canary in text] == []


@pytest.fixture(scope="module")
def tls() -> ssl.SSLContext:
    """For a service whose certificate nobody knows."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def canaries(shipper: Shipper, sample: Sample) -> Path:
    """Records, and a program, with much to hide."""
    program = shipper.folder / "complaining"
    program.write_text("#!/bin/sh\nenv; env >&2; exit 7\n")
    program.chmod(0o700)
    return write(shipper.folder / "events.ndjson", [changed(line, **PERSONAL) for line in sample.lines[:5]])


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_no_failure_shows_a_secret_or_whom_a_record_is_about(
    shipper: Shipper, fake: FakeService, canaries: Path, tls: ssl.SSLContext, failure: Failure
):
    fake.default = quoting(fake, failure)
    settings = {**QUICK, "delivery.give_up_after_seconds": 0.3, "delivery.concurrency": 1}
    with Origin(context=tls) as origin, Proxy(user="x", password="another one") as proxy:
        url = fake.target.base_url
        places = {"fake": url, "fake_host": url.removeprefix("http://"), "folder": shipper.folder}
        places |= {"origin": origin.url, "proxy": proxy.url}
        shipper.target = Target(Template(failure.address).substitute(places), "", "")
        shipper.config.write_text(
            f'[intake]\nbase_url = "http://x"\n{KEYS}{Template(failure.intake).substitute(places)}'
            f'[state]\ndirectory = "{shipper.state}"\n'
        )
        running = shipper.start("backfill", canaries, "--log-level", "debug", settings=settings, env=SECRETS)
        command = Path(f"/proc/{running.pid}/cmdline")
        running.wait_until(command.read_text, "it is executed")
        words = command.read_text()
        result = running.finish()
    assert result.returncode in {3, 4}
    assert failure.says in result.stderr
    shown = shipper.run("config", "show", settings=settings, env=SECRETS)
    assert shown.returncode == 0
    assert "backfill" in words
    names = "\n".join(os.fsdecode(path) for path in shipper.folder.rglob("*"))
    for text in (result.stdout, result.stderr, shown.stdout, shown.stderr, words, names):
        assert_shows_nothing(text)


def test_a_defect_shows_where_it_is_and_nothing_that_it_held(shipper: Shipper, service: Service, canaries: Path):
    """Something is broken in the middle of a request, whose record and secrets all frames hold."""
    site = shipper.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import httpx\n\nasync def handle(self, request):\n    return request.headers + request\n\n"
        "httpx.AsyncHTTPTransport.handle_async_request = handle\n"
    )
    env = {**SECRETS, "PYTHONPATH": str(site)}
    running = shipper.start("backfill", canaries, "--log-level", "debug", env=env, check=False)
    assert running.process.wait(20) == 1
    assert "Traceback" in running.stderr
    assert "TypeError" in running.stderr
    assert_shows_nothing(running.stderr)
