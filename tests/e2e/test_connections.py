"""Connections of the command: the service moves, or uses TLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import trustme

from tests.certificates import asking, context_of, demanding
from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper, Target
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.surroundings import site_of
from tests.servers import Origin

ONE_SENDER = {
    "delivery.concurrency": 1,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.02,
    "batch.max_events": 10,
    "batch.linger_seconds": 0,
}
KEYS = ("fake-subscription-key", "fake-token")


# The service moves ----------------------------------------------------------------------------------------------------

# asyncio resolves names with Python's function, uvloop with its own.
SITE = """
import os
import socket

import uvloop

def address_of(host):
    name = host.decode() if isinstance(host, bytes) else host
    with open(os.environ["TEST_HOSTS"]) as file:
        address = dict(line.split() for line in file).get(name, host)
    if address == "nowhere":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return address

find, find_with_uvloop = socket.getaddrinfo, uvloop.Loop.getaddrinfo

def getaddrinfo(host, *args, **options):
    return find(address_of(host), *args, **options)

async def getaddrinfo_with_uvloop(self, host, *args, **options):
    return await find_with_uvloop(self, address_of(host), *args, **options)

socket.getaddrinfo = getaddrinfo
uvloop.Loop.getaddrinfo = getaddrinfo_with_uvloop
"""


@dataclass
class Move:
    """Two services on the same port of two addresses, and the hosts file that selects one."""

    old: FakeService
    new: FakeService
    hosts: Path
    env: dict[str, str]

    def point_to(self, service: FakeService) -> None:
        name = self.hosts.with_suffix(".new")
        name.write_text(f"intake.test {urlsplit(service.target.base_url).hostname}\n")
        name.replace(self.hosts)


@pytest.fixture
def move(shipper: Shipper, fake: FakeService, tmp_path: Path) -> Iterator[Move]:
    port = urlsplit(fake.target.base_url).port
    env = {**site_of(tmp_path, SITE), "TEST_HOSTS": str(tmp_path / "hosts")}
    with FakeService(port, host="127.0.0.2") as new:
        move = Move(fake, new, tmp_path / "hosts", env)
        move.point_to(fake)
        shipper.target = Target(f"http://intake.test:{port}", *KEYS)
        yield move


@pytest.mark.parametrize("old_reply", [Reply(status=503), HANG], ids=["503", "black hole"])
def test_everything_is_delivered_to_a_service_that_moves_and_connections_are_kept_until_their_maximum_age(
    shipper: Shipper, move: Move, sample: Sample, old_reply: Reply
):
    settings = {
        **ONE_SENDER,
        "intake.allow_plaintext": "true",
        "delivery.fail_fast": "false",
        "delivery.connection_max_age_seconds": 0.5 if old_reply.status == 503 else 86_400,
        "delivery.read_timeout_seconds": 0.5 if old_reply is HANG else 60,
    }
    move.hosts.write_text("intake.test nowhere\n")
    parts = [sample.lines[start : start + 10] for start in range(0, 50, 10)]
    running = shipper.open_pipe(*parts.pop(0), settings=settings, env=move.env)
    running.wait_for('"reason":"unknown_host"')
    running.wait_for("was not found: Name or service not known")
    assert "the host of http://intake.test:" in running.stderr
    move.point_to(move.old)
    running.wait_until(lambda: move.old.answered == 1, "the old address is used")
    if old_reply is HANG:
        move.point_to(move.new)
        running.feed(*parts.pop(0))
        running.wait_until(lambda: move.old.answered == 2, "a working connection below the maximum age is kept")
    kept = move.old.answered
    move.old.default = old_reply
    running.feed(*parts.pop(0))
    running.wait_until(lambda: move.old.requests > kept, "the old address receives the next batch")
    move.point_to(move.new)
    running.wait_until(lambda: move.new.answered == 1, "the new address is used")
    asked = move.old.requests
    running.feed(*parts.pop(0))
    running.wait_until(lambda: move.new.answered == 2, "the next batch is accepted")
    result = running.end_input()
    fed = 50 - 10 * len(parts)
    assert (result.returncode, result.counts()) == (0, (fed, fed, 0, 0, 0))
    assert move.old.requests == asked, "the old address was used again"
    assert move.old.event_ids() == sample.ids[: 10 * kept]
    assert move.new.event_ids() == sample.ids[10 * kept : fed]


# TLS ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def origin(authority: trustme.CA) -> Iterator[Origin]:
    """A TLS service that requires a client certificate."""
    with Origin(context=demanding(context_of(authority, "127.0.0.1"), authority, "1.3")) as origin:
        yield origin


def test_an_unusable_certificate_file_ends_the_command_at_startup(shipper: Shipper, origin: Origin, file: Path):
    shipper.target = Target(origin.url, *KEYS)
    result = shipper.run("backfill", file, settings={"intake.client_certificate": file})
    result.assert_ended(2, "client_certificate", str(file))
    assert origin.accepted == 0


def test_a_client_certificate_is_sent_to_the_service_but_not_to_the_token_endpoint(
    shipper: Shipper, origin: Origin, authority: trustme.CA, ca: Path, client: SimpleNamespace, file: Path
):
    token = b'{"token_type":"Bearer","expires_in":3600,"access_token":"the-token"}'
    granted = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(token) + token
    with Origin(granted, context=asking(context_of(authority, "127.0.0.1"), authority)) as endpoint:
        secret = {"env": "CLIENT_SECRET"}
        shipper.use_oauth2(token_url=f"{endpoint.url}/token", client_id="shipper", client_secret=secret)
        shipper.target = Target(origin.url, *KEYS)
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
