"""How the endpoint comes to its connections and parts with them: TLS, proxies, names, ages; on all event loops."""

from __future__ import annotations

import datetime
import gc
import logging
import socket
import ssl
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from shipper.config.secrets import LiteralSecret, SecretReference
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization
from shipper.delivery.endpoint import Endpoint, NoAnswerError, make_ssl_context
from shipper.delivery.forms import post_form
from shipper.delivery.no_answer import Progress, Stage, Way, no_answer
from shipper.model.errors import ConfigError
from shipper.model.version import __version__
from tests.stage.loops import LOOPS, Run, runner
from tests.stage.servers import ACCEPTED, Listener, Origin, Proxy, Reply, close, head_and_close, reset, stall

DELIVERY = DeliverySettings(connect_timeout_seconds=5.0, read_timeout_seconds=5.0)
AUTHORIZATION = Authorization("the-token", "the-key")


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, limit_s=20)


@asynccontextmanager
async def endpoint(
    url: str, *, delivery: dict[str, Any] | None = None, now: Callable[[], float] = anyio.current_time, **changes: Any
) -> AsyncIterator[Endpoint]:
    """`changes` are keys of the section, `delivery` those of that section."""
    settings = EndpointSettings(base_url=url, allow_plaintext=True, **changes)
    used = Endpoint(
        settings,
        msgspec.structs.replace(DELIVERY, **(delivery or {})),
        section="intake",
        ssl_context=make_ssl_context(settings, "intake"),
        now=now,
    )
    try:
        with anyio.fail_after(20):
            yield used
    finally:
        await used.aclose()


async def post(used: Endpoint) -> Answer:
    return await used.request("POST", "/x", b"[1]", authorization=AUTHORIZATION, max_answer_bytes=1000)


async def failure(used: Endpoint) -> NoAnswerError:
    with pytest.raises(NoAnswerError) as caught:
        await post(used)
    return caught.value


async def poll(condition: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.001)


# TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(scope="module")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    return context_of(authority, "127.0.0.1", "::1")


def context_of(authority: trustme.CA, *hosts: str, **options: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*hosts, **options).configure_cert(context)
    return context


def demanding(context: ssl.SSLContext, authority: trustme.CA, version: str) -> ssl.SSLContext:
    """Have a server ask for a client's certificate, and speak only one version of TLS."""
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = VERSIONS[version]
    return context


def asking(context: ssl.SSLContext, authority: trustme.CA) -> ssl.SSLContext:
    """Have a server ask for a client's certificate, and do without."""
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@pytest.fixture(scope="module")
def client(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A client's certificate: `pair` of certificate and key, and both in `one` file."""
    folder = tmp_path_factory.mktemp("client")
    leaf = authority.issue_cert("client@example.com", common_name="the-client")
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    leaf.private_key_and_cert_chain_pem.write_to_path(str(folder / "one.pem"))
    key = load_pem_private_key(leaf.private_key_pem.bytes(), None)
    sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    (folder / "sealed.pem").write_bytes(sealed)
    return SimpleNamespace(
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
        one=folder / "one.pem",
        sealed=folder / "sealed.pem",
    )


def test_a_trusted_certificate_is_accepted_and_its_connection_kept(run: Run, ca: Path, server_context: ssl.SSLContext):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            assert (await post(used)).body == b"{}"
            assert (await post(used)).body == b"{}"

    with Origin(context=server_context) as origin:
        run(main)
    assert (origin.accepted, len(origin.requests)) == (1, 2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("unknown", "unable to get local issuer certificate; see intake.ca_bundle"),
        ("host", "IP address mismatch"),
        ("expired", "certificate has expired"),
    ],
)
def test_a_certificate_that_is_not_accepted_is_a_fault_of_the_set_up_and_nothing_is_sent(
    run: Run, authority: trustme.CA, ca: Path, fault: str, words: str
):
    context = {
        "unknown": lambda: context_of(trustme.CA(), "127.0.0.1"),
        "host": lambda: context_of(authority, "127.0.0.2"),
        "expired": lambda: context_of(authority, "127.0.0.1", not_after=datetime.datetime(2001, 1, 1)),
    }[fault]()

    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            for _ in range(2):
                error = await failure(used)
                assert (error.cause, error.is_tls, error.is_stale, error.was_sent) == ("tls", True, False, False)
                assert f"the certificate of {origin.url} is not accepted" in str(error)
                assert words in str(error)

    with Origin(context=context) as origin:
        run(main)
    assert (origin.accepted, origin.requests) == (2, [])


def test_a_certificate_for_another_name_is_told_with_the_name(run: Run, authority: trustme.CA, ca: Path):
    async def main() -> None:
        async with endpoint(f"https://localhost:{origin.port}", ca_bundle=ca) as used:
            error = await failure(used)
        assert (error.cause, error.is_tls) == ("tls", True)
        assert "Hostname mismatch, certificate is not valid for 'localhost'" in str(error)

    with Origin(context=context_of(authority, "intake.example.com")) as origin:
        run(main)
    assert origin.requests == []


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_a_client_without_the_certificate_that_the_server_asks_for_is_a_fault_of_the_set_up(
    run: Run, authority: trustme.CA, ca: Path, version: str
):
    """In TLS 1.3 the client hears of it only when it waits for the answer to its first request."""

    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            for _ in range(2):
                error = await failure(used)
                assert (error.cause, error.is_tls, error.is_stale, error.was_sent) == ("tls", True, False, False)
                assert "see intake.client_certificate" in str(error)

    context = demanding(context_of(authority, "127.0.0.1"), authority, version)
    with Origin(context=context) as origin:
        run(main)
    assert origin.handshake_errors == ["PEER_DID_NOT_RETURN_A_CERTIFICATE"] * 2
    assert origin.requests == []


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_a_client_certificate_that_the_server_does_not_know_is_a_fault_of_the_set_up(
    run: Run, authority: trustme.CA, ca: Path, client: SimpleNamespace, version: str
):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, client_certificate=client.one) as used:
            error = await failure(used)
            assert (error.cause, error.is_tls, error.was_sent) == ("tls", True, False)
            assert "see intake.client_certificate" in str(error)

    context = demanding(context_of(authority, "127.0.0.1"), authority, version)
    other = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(other)
    context = demanding(other, trustme.CA(), version)
    with Origin(context=context) as origin:
        run(main)
    assert (len(origin.handshake_errors), origin.requests) == (1, [])


@pytest.mark.parametrize("is_reused", [False, True])
def test_only_on_a_new_connection_a_refused_client_has_certainly_sent_nothing(is_reused: bool):
    progress = Progress(Stage.ANSWER, is_reused=is_reused)
    alert = ssl.SSLError(1, "tlsv13 alert certificate required")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    error = no_answer(alert, Way("https://127.0.0.1:9", "", "intake", 1, 1), progress)
    assert (error.cause, error.is_tls, error.was_sent) == ("tls", True, is_reused)


@pytest.mark.parametrize("files", [("certificate", "key"), ("one", None)], ids=["two files", "one file"])
@pytest.mark.parametrize("version", ["1.2", "1.3"])
async def test_a_client_shows_its_certificate(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, version: str, files: tuple[str, str | None]
):
    certificate, key = files
    shown = {"client_certificate": getattr(client, certificate), "client_key": getattr(client, key) if key else None}
    with Origin(context=demanding(context_of(authority, "127.0.0.1"), authority, version)) as origin:
        async with endpoint(origin.url, ca_bundle=ca, **shown) as used:
            assert (await post(used)).status == 202
    assert origin.peers == ["the-client"]


async def test_an_older_version_of_tls_than_permitted_is_a_fault_of_the_set_up(authority: trustme.CA, ca: Path):
    context = context_of(authority, "127.0.0.1")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Origin(context=context) as origin:
        async with endpoint(origin.url, ca_bundle=ca, tls_minimum_version="1.3") as used:
            error = await failure(used)
        assert (error.cause, error.is_tls, error.was_sent) == ("tls", True, False)
        assert "see intake.tls_minimum_version" in str(error)
        async with endpoint(origin.url, ca_bundle=ca) as used:
            assert (await post(used)).status == 202
    assert len(origin.requests) == 1


class Greeter(Listener):
    """Speaks first, and no TLS."""

    def handle(self, connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.com ESMTP\r\n\r\n")
        stall(connection)


class Door(Listener):
    """Ends every connection at once."""

    def handle(self, connection: socket.socket) -> None:
        pass


class Mute(Listener):
    """Says nothing."""

    def handle(self, connection: socket.socket) -> None:
        stall(connection)


@pytest.mark.parametrize(
    ("peer", "cause"), [(Greeter, "connect_error"), (Door, "connect_error"), (Mute, "connect_timeout")]
)
def test_a_handshake_that_fails_for_another_reason_than_the_set_up_passes(
    run: Run, ca: Path, peer: type[Listener], cause: str
):
    async def main() -> None:
        async with endpoint(
            f"https://127.0.0.1:{server.port}", ca_bundle=ca, delivery={"connect_timeout_seconds": 0.2}
        ) as used:
            error = await failure(used)
        assert (error.cause, error.is_tls, error.was_sent) == (cause, False, False)

    with peer() as server:
        run(main)


@pytest.mark.parametrize("is_behind_proxy", [False, True], ids=["direct", "behind a proxy"])
def test_a_cancelled_handshake_leaves_no_connection_and_a_usable_endpoint(
    run: Run, ca: Path, server_context: ssl.SSLContext, is_behind_proxy: bool
):
    class Slow(Origin):
        def _encrypted(self, connection: socket.socket) -> ssl.SSLSocket:
            if self.accepted == 1:
                begun.append(connection.recv(1))
                stall(connection)
                raise ConnectionAbortedError
            return super()._encrypted(connection)

    async def main() -> None:
        proxy = {"proxy": tunnel.url} if is_behind_proxy else {}
        async with endpoint(origin.url, ca_bundle=ca, **proxy) as used:
            async with anyio.create_task_group() as group:
                group.start_soon(post, used)
                await poll(lambda: begun)
                group.cancel_scope.cancel()
            await poll(lambda: origin.closed)
            assert (await post(used)).status == 202

    begun: list[bytes] = []
    with Proxy() as tunnel, Slow(context=server_context) as origin:
        gc.disable()  # it is not the collection of garbage that closes it
        try:
            run(main)
        finally:
            gc.enable()
    assert len(origin.requests) == 1


# Files of certificates -----------------------------------------------------------------------------------------------


def context_for(**changes: Any) -> ssl.SSLContext | None:
    return make_ssl_context(EndpointSettings(base_url="https://intake.example.com", **changes), "intake")


def test_a_bundle_of_authorities_that_is_none_is_a_wrong_setting(tmp_path: Path):
    (tmp_path / "empty.pem").touch()
    (tmp_path / "text.pem").write_bytes(b"hello")
    (tmp_path / "folder.pem").mkdir()
    for name in ("empty.pem", "text.pem", "folder.pem", "absent.pem"):
        with pytest.raises(ConfigError, match=name) as caught:
            context_for(ca_bundle=tmp_path / name)
        assert caught.value.key == "intake.ca_bundle"


@pytest.mark.parametrize(
    ("certificate", "key", "wrong_key", "words"),
    [
        ("absent", None, "client_certificate", "absent cannot be read: No such file or directory"),
        ("folder", None, "client_certificate", "folder cannot be read: Is a directory"),
        ("text", None, "client_certificate", "text holds no certificate in PEM form"),
        ("certificate", None, "client_certificate", "holds no private key in PEM form.* write client_key"),
        ("broken", "key", "client_key", "the certificate in .*broken is damaged"),
        ("certificate", "absent", "client_key", "absent cannot be read: No such file or directory"),
        ("certificate", "text", "client_key", "text holds no private key in PEM form"),
        ("certificate", "broken", "client_key", "the key in .*broken or .* is damaged"),
        ("broken", None, "client_certificate", "broken is damaged"),
        ("certificate", "other", "client_key", "other is not that of the certificate in .*certificate.pem"),
        ("certificate", "sealed", "client_key", "encrypted key.*openssl pkey -in KEY -out NEW_KEY"),
    ],
)
def test_a_client_certificate_that_cannot_be_used_is_a_wrong_setting(
    client: SimpleNamespace, tmp_path: Path, certificate: str, key: str | None, wrong_key: str, words: str
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_bytes(b"hello")
    (tmp_path / "broken").write_bytes(
        b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
        b"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"
    )
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(str(tmp_path / "other"))
    found = {name: getattr(client, name, tmp_path / name) for name in (certificate, key or "one")}
    with pytest.raises(ConfigError, match=words) as caught:
        context_for(client_certificate=found[certificate], client_key=found[key] if key else None)
    assert caught.value.key == f"intake.{wrong_key}"


def test_only_addresses_that_are_https_need_a_context():
    def is_made(base_url: str, proxy: str | None = None) -> bool:
        return make_ssl_context(EndpointSettings(base_url=base_url, proxy=proxy), "intake") is not None

    assert not is_made("http://127.0.0.1:9")
    assert not is_made("http://127.0.0.1:9", "http://127.0.0.1:8")
    assert is_made("https://127.0.0.1:9")
    assert is_made("http://127.0.0.1:9", "HTTPS://127.0.0.1:8")


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_the_oldest_version_of_tls_is_what_the_settings_say(version: Any):
    context = context_for(tls_minimum_version=version)
    assert context is not None
    assert context.minimum_version is VERSIONS[version]


# Connections that end ------------------------------------------------------------------------------------------------


@contextmanager
def origin_with(is_tls: bool, server_context: ssl.SSLContext, *replies: Reply) -> Iterator[Origin]:
    with Origin(*replies, context=server_context if is_tls else None) as origin:
        yield origin


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("trouble", [close, reset])
def test_a_kept_connection_that_ends_instead_of_an_answer_is_stale_once(
    run: Run, ca: Path, server_context: ssl.SSLContext, is_tls: bool, trouble: Reply
):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            await post(used)
            await post(used)
            error = await failure(used)
            assert error.cause in {"remote_protocol_error", "read_error"}
            assert (error.is_stale, error.was_sent, error.is_tls) == (True, True, False)
            assert not (await failure(used)).is_stale, "a new connection had no time to grow stale"
            assert (await post(used)).status == 202

    with origin_with(is_tls, server_context, ACCEPTED, ACCEPTED, trouble, trouble, ACCEPTED) as origin:
        run(main)
    assert (len(origin.requests), origin.accepted) == (5, 3)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_an_answer_that_has_begun_is_not_stale(run: Run, ca: Path, server_context: ssl.SSLContext, is_tls: bool):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            await post(used)
            await post(used)
            error = await failure(used)
            assert (error.cause, error.is_stale, error.was_sent) == ("remote_protocol_error", False, True)

    with origin_with(is_tls, server_context, ACCEPTED, ACCEPTED, head_and_close) as origin:
        run(main)
    assert (len(origin.requests), origin.accepted) == (3, 1)


def test_a_kept_connection_that_falls_silent_is_not_stale(run: Run):
    async def main() -> None:
        async with endpoint(origin.url, delivery={"read_timeout_seconds": 0.2}) as used:
            await post(used)
            error = await failure(used)
            assert (error.cause, error.is_stale) == ("read_timeout", False)

    with Origin(ACCEPTED, stall) as origin:
        run(main)


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_error(
    run: Run, ca: Path, server_context: ssl.SSLContext, is_tls: bool
):
    def answer_and_close(connection: socket.socket) -> None:
        connection.sendall(ACCEPTED)
        close(connection)

    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            for number in range(1, 4):
                assert (await post(used)).status == 202
                await poll(lambda number=number: origin.closed == number)

    with origin_with(is_tls, server_context, answer_and_close) as origin:
        run(main)
    assert (len(origin.requests), origin.accepted) == (3, 3)


async def test_an_error_of_another_time_is_not_taken_for_this_ones(authority: trustme.CA, ca: Path):
    """A request that is made while an error is being handled has that one as its context."""
    with (
        Origin(context=context_of(trustme.CA(), "127.0.0.1")) as unknown,
        Origin(close) as origin,
    ):
        async with endpoint(unknown.url, ca_bundle=ca) as first, endpoint(origin.url) as second:
            try:
                await post(first)
            except NoAnswerError as earlier:
                is_tls, other = earlier.is_tls, await failure(second)
    assert is_tls
    assert (other.cause, other.is_tls) == ("remote_protocol_error", False)


# Names, addresses and ages -------------------------------------------------------------------------------------------


class Names:
    """Stands in for the system's lookup of names; other names are looked up as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.lookups = 0
        self.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._lookup)

    def _lookup(self, host: str | bytes | None, port: Any, *args: Any, **options: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else host or ""
        if name not in self.addresses:
            return self._real(host, port, *args, **options)
        self.lookups += 1
        if not self.addresses[name]:
            raise self.error
        return [entry for address in self.addresses[name] for entry in self._real(address, port, *args, **options)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@contextmanager
def old_and_new(names: Names, *replies: Reply) -> Iterator[tuple[Origin, Origin]]:
    """Two services on one port of two addresses; the name leads to the old one."""
    with Origin(*replies) as old, Origin(host="127.0.0.2", port=old.port) as new:
        names.addresses["intake.test"] = [old.host]
        yield old, new


@pytest.mark.parametrize("cause", ["age", "idleness"])
async def test_a_connection_that_is_old_or_was_idle_is_renewed_and_the_name_looked_up_again(names: Names, cause: str):
    clock = Clock()
    steps, max_age_s = ((50, 50, 50, 50, 50, 49, 1), 300) if cause == "age" else ((59, 59, 59, 60), 86_400)
    with old_and_new(names) as (old, new):
        async with endpoint(
            f"http://intake.test:{old.port}", now=clock, delivery={"connection_max_age_seconds": max_age_s}
        ) as used:
            await post(used)
            names.addresses["intake.test"] = [new.host]
            for step in steps[:-1]:
                clock.time += step
                await post(used)
            assert (old.accepted, len(old.requests), new.requests) == (1, len(steps), [])
            clock.time += steps[-1]
            await post(used)
            await post(used)
            await poll(lambda: old.closed)
    assert (len(old.requests), len(new.requests), new.accepted) == (len(steps), 2, 1)
    assert names.lookups == 2


async def test_a_failure_has_the_name_looked_up_again(names: Names):
    with old_and_new(names, ACCEPTED, stall) as (old, new):
        async with endpoint(f"http://intake.test:{old.port}", delivery={"read_timeout_seconds": 0.2}) as used:
            await post(used)
            names.addresses["intake.test"] = [new.host]
            assert (await failure(used)).cause == "read_timeout"
            await post(used)
    assert (len(old.requests), len(new.requests)) == (2, 1)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("number", "words", "cause"),
    [
        (socket.EAI_NONAME, "Name or service not known", "unknown_host"),
        (socket.EAI_AGAIN, "Temporary failure in name resolution", "name_lookup"),
    ],
)
def test_a_name_that_does_not_exist_is_told_from_a_name_server_that_is_away(
    names: Names, backend: str, number: int, words: str, cause: str
):
    async def main() -> None:
        async with endpoint("http://intake.test:9") as used:
            error = await failure(used)
        assert (error.cause, error.is_tls, error.was_sent) == (cause, False, False)
        assert str(error) == f"the host of http://intake.test:9 is not found: {words}"

    names.error = socket.gaierror(number, words)
    names.addresses["intake.test"] = []
    anyio.run(main, backend=backend)
    assert names.lookups


def test_a_name_that_cannot_be_one_is_not_found(run: Run):
    async def main() -> None:
        for host in ("intake..example", "x" * 64 + ".example"):
            async with endpoint(f"https://{host}") as used:
                error = await failure(used)
            assert (error.cause, error.was_sent) == ("unknown_host", False)

    run(main)


def ipv6_or_skip() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address ::1")


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
def test_an_ipv6_address_is_as_good(run: Run, ca: Path, server_context: ssl.SSLContext, is_tls: bool):
    ipv6_or_skip()

    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            assert (await post(used)).status == 202

    with Origin(host="::1", context=server_context if is_tls else None) as origin:
        assert "[::1]" in origin.url
        run(main)
    assert f"Host: [::1]:{origin.port}".encode() in origin.requests[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_name_with_several_addresses_is_reached_at_the_one_where_somebody_listens(
    names: Names, host: str, backend: str
):
    ipv6_or_skip()

    async def main() -> None:
        async with endpoint(f"http://localhost:{origin.port}") as used:
            assert (await post(used)).status == 202
        async with endpoint(f"http://localhost:{free}") as used:
            error = await failure(used)
        assert str(error) == f"cannot connect to http://localhost:{free}: Connection refused"

    names.addresses["localhost"] = ["::1", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        free = nobody.getsockname()[1]
    with Origin(host=host) as origin:
        anyio.run(main, backend=backend)
    assert len(origin.requests) == 1
    assert names.lookups == 2


# Proxies -------------------------------------------------------------------------------------------------------------

USER, PASSWORD = "proxy-user", "proxy-p\xe4ssword"
ACCESS: dict[str, Any] = {"proxy_username": USER, "proxy_password": LiteralSecret(PASSWORD)}


def is_clean(text: str) -> bool:
    return USER not in text and PASSWORD not in text and "roxy-auth" not in text.lower()


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("is_proxy_tls", [False, True], ids=["http proxy", "https proxy"])
def test_a_proxy_is_used_and_its_password_does_not_get_beyond_it(
    run: Run,
    ca: Path,
    server_context: ssl.SSLContext,
    is_tls: bool,
    is_proxy_tls: bool,
    caplog: pytest.LogCaptureFixture,
):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url, **ACCESS) as used:
            assert (await post(used)).body == b"{}"
            assert (await post(used)).body == b"{}"
            assert is_clean(repr(used))

    caplog.set_level(logging.DEBUG)
    with (
        Origin(context=server_context if is_tls else None) as origin,
        Proxy(user=USER, password=PASSWORD, context=server_context if is_proxy_tls else None) as proxy,
    ):
        run(main)
    if is_tls:
        (head,) = proxy.heads
        assert head.startswith(f"CONNECT 127.0.0.1:{origin.port} HTTP/1.1\r\n".encode())
        assert b"the-token" not in head
        assert b"the-key" not in head
        assert origin.accepted == 1
    else:
        assert [head.split(b"\r\n")[0] for head in proxy.heads] == [f"POST {origin.url}/x HTTP/1.1".encode()] * 2
    assert all(head.lower().count(b"proxy-authorization:") == 1 for head in proxy.heads)
    assert proxy.accepted == 1
    assert len(origin.requests) == 2
    names = sorted(line.split(b":")[0] for line in origin.requests[0].split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    assert names == [
        b"Authorization", b"Cache-Control", b"Content-Length", b"Content-Type", b"Host", b"Ocp-Apim-Subscription-Key",
        b"User-Agent",
    ]  # fmt: skip
    assert is_clean(caplog.text)


@pytest.mark.parametrize("is_service_plain", [False, True], ids=["https", "http"])
def test_a_proxy_that_asks_for_a_certificate_is_not_shown_the_one_for_the_service(
    run: Run, authority: trustme.CA, ca: Path, client: SimpleNamespace, is_service_plain: bool
):
    async def main() -> None:
        shown = {"ca_bundle": ca, "client_certificate": client.one}
        async with endpoint(origin.url, proxy=proxy.url, **shown) as used:
            assert (await post(used)).status == 202

    context = None if is_service_plain else demanding(context_of(authority, "127.0.0.1"), authority, "1.3")
    asks = asking(context_of(authority, "127.0.0.1"), authority)
    with Origin(context=context) as origin, Proxy(context=asks) as proxy:
        run(main)
    assert proxy.clients == [""]
    assert origin.clients == ([] if is_service_plain else ["the-client"])


async def test_the_password_of_a_proxy_is_read_from_where_it_is_kept(monkeypatch: pytest.MonkeyPatch):
    secret = SecretReference(env="PROXY_PASSWORD")
    with Origin() as origin, Proxy(user="a", password="b") as proxy:
        with pytest.raises(ConfigError, match=r"^intake\.proxy_password: environment variable PROXY_PASSWORD"):
            async with endpoint(origin.url, proxy=proxy.url, proxy_username="a", proxy_password=secret):
                pass
        monkeypatch.setenv("PROXY_PASSWORD", "b")
        async with endpoint(origin.url, proxy=proxy.url, proxy_username="a", proxy_password=secret) as used:
            assert (await post(used)).status == 202


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("access", [{}, ACCESS], ids=["no password", "wrong password"])
def test_a_proxy_that_asks_for_another_password_has_not_passed_on_anything(
    run: Run,
    ca: Path,
    server_context: ssl.SSLContext,
    is_tls: bool,
    access: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url, **access) as used:
            for _ in range(2):
                error = await failure(used)
                assert (error.cause, error.is_tls, error.is_stale, error.was_sent) == ("proxy", False, False, False)
                assert f"the proxy {proxy.url} asks for" in str(error)
                assert "see intake.proxy_username" in str(error)
                assert is_clean("".join(traceback.format_exception_only(error)).replace("intake.proxy_username", ""))
                assert error.__cause__ is None or is_clean(repr(error.__cause__).replace("Proxy Auth", ""))

    caplog.set_level(logging.DEBUG)
    with (
        origin_with(is_tls, server_context) as origin,
        Proxy(user="another", password="another") as proxy,
    ):
        run(main)
    assert len(proxy.heads) == 2
    assert origin.accepted == 0
    assert USER not in caplog.text
    assert PASSWORD not in caplog.text


def test_a_proxy_that_refuses_the_way_is_named(run: Run, ca: Path, server_context: ssl.SSLContext):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            error = await failure(used)
        assert (error.cause, error.was_sent) == ("proxy", False)
        assert str(error) == (
            f"the proxy {proxy.url} refuses the way to {origin.url} with status 502; see intake.proxy"
        )

    with Origin(context=server_context) as origin, Proxy(refusal=502) as proxy:
        run(main)
    assert origin.accepted == 0


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_a_proxy_that_is_not_there_is_named(names: Names, ca: Path, server_context: ssl.SSLContext, is_tls: bool):
    names.addresses["proxy.test"] = []
    with Origin() as nobody:
        pass
    with origin_with(is_tls, server_context) as origin:
        for url, words in (
            (nobody.url, "Connection refused"),
            ("http://proxy.test:3128", "Name or service not known"),
        ):
            async with endpoint(origin.url, ca_bundle=ca, proxy=url) as used:
                error = await failure(used)
            assert (error.cause, error.was_sent) == ("proxy", False)
            assert str(error) == f"the proxy {url} cannot be used: {words}; see intake.proxy"
    assert origin.accepted == 0


@pytest.mark.parametrize(
    ("peer", "words"),
    [(Door, "closed|reset"), (Mute, r"delivery\.read_timeout_seconds"), (Greeter, "not HTTP")],
)
def test_a_proxy_that_does_not_do_its_work_is_named(
    run: Run, ca: Path, server_context: ssl.SSLContext, peer: type[Listener], words: str
):
    async def main() -> None:
        async with endpoint(
            origin.url,
            ca_bundle=ca,
            proxy=f"http://127.0.0.1:{proxy.port}",
            delivery={"read_timeout_seconds": 0.2},
        ) as used:
            for _ in range(2):
                with pytest.raises(NoAnswerError, match=words) as caught:
                    await post(used)
                assert (caught.value.cause, caught.value.is_stale, caught.value.was_sent) == ("proxy", False, False)
                assert f"the proxy http://127.0.0.1:{proxy.port}" in str(caught.value)

    with Origin(context=server_context) as origin, peer() as proxy:
        run(main)
    assert proxy.accepted == 2


def test_a_proxys_certificate_that_is_not_accepted_is_told_from_the_services(
    run: Run, ca: Path, server_context: ssl.SSLContext
):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            error = await failure(used)
        assert (error.cause, error.is_tls, error.was_sent) == ("tls", True, False)
        assert f"the certificate of the proxy {proxy.url} is not accepted" in str(error)

    with (
        Origin(context=server_context) as origin,
        Proxy(context=context_of(trustme.CA(), "127.0.0.1")) as proxy,
    ):
        run(main)
    assert (proxy.heads, origin.accepted) == ([], 0)


def test_a_services_certificate_that_is_not_accepted_is_told_through_a_proxy_and_more_than_once(run: Run, ca: Path):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            for _ in range(3):
                error = await failure(used)
                assert (error.cause, error.is_tls, error.was_sent) == ("tls", True, False)
                assert f"the certificate of {origin.url} is not accepted" in str(error)

    with Origin(context=context_of(trustme.CA(), "127.0.0.1")) as origin, Proxy() as proxy:
        run(main)
    assert (origin.accepted, origin.requests) == (3, [])


def test_a_tunnel_grows_stale_as_any_connection(run: Run, ca: Path, server_context: ssl.SSLContext):
    async def main() -> None:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            await post(used)
            error = await failure(used)
            assert (error.is_stale, error.was_sent) == (True, True)
            await post(used)

    with Origin(ACCEPTED, close, ACCEPTED, context=server_context) as origin, Proxy() as proxy:
        run(main)
    assert (len(proxy.heads), len(origin.requests)) == (2, 3)


# Forms ---------------------------------------------------------------------------------------------------------------

FORM = {"grant_type": "client_credentials", "client_secret": "a secret & a h\xe4lf"}


async def send_form(url: str, base_url: str = "http://127.0.0.1:9", **changes: Any) -> Answer:
    settings = EndpointSettings(base_url=base_url, **changes)
    return await post_form(
        url,
        FORM,
        endpoint=settings,
        delivery=DELIVERY,
        ssl_context=make_ssl_context(settings, "intake"),
        section="report",
    )


async def test_a_form_is_posted_over_a_connection_of_its_own():
    with Origin() as origin:
        answer = await send_form(f"{origin.url}/tenant/token")
        await poll(lambda: origin.closed)
    assert (answer.status, answer.body) == (202, b"{}")
    head, _, body = origin.requests[0].partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /tenant/token HTTP/1.1"
    assert sorted(headers) == sorted(
        [
            f"Host: 127.0.0.1:{origin.port}",
            "Content-Type: application/x-www-form-urlencoded",
            "Accept: application/json",
            f"User-Agent: shipper/{__version__}",
            f"Content-Length: {len(body)}",
        ]
    )
    assert body == b"grant_type=client_credentials&client_secret=a+secret+%26+a+h%C3%A4lf"


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["to http", "to https"])
@pytest.mark.parametrize("has_proxy", [False, True], ids=["direct", "proxy"])
async def test_a_form_goes_to_http_and_https_whatever_the_service_speaks(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, base_url: str, is_tls: bool, has_proxy: bool
):
    context = asking(context_of(authority, "127.0.0.1"), authority) if is_tls else None
    with Origin(context=context) as origin, Proxy(user=USER, password=PASSWORD) as proxy:
        through = {"proxy": proxy.url, **ACCESS} if has_proxy else {}
        answer = await send_form(origin.url, base_url, ca_bundle=ca, client_certificate=client.one, **through)
    assert answer.status == 202
    assert len(proxy.heads) == has_proxy
    assert origin.peers == [""] * is_tls


async def test_a_token_endpoint_that_demands_a_certificate_is_told_from_a_service_that_does(
    authority: trustme.CA, ca: Path, client: SimpleNamespace
):
    context = demanding(context_of(authority, "127.0.0.1"), authority, "1.3")
    with Origin(context=context) as origin, pytest.raises(NoAnswerError, match="only the service is shown") as caught:
        await send_form(origin.url, ca_bundle=ca, client_certificate=client.one)
    assert (caught.value.cause, caught.value.is_tls) == ("tls", True)
    assert origin.clients == []


async def test_a_form_finds_no_more_trust_than_a_request(server_context: ssl.SSLContext):
    with (
        Origin(context=server_context) as origin,
        pytest.raises(NoAnswerError, match=r"see report\.ca_bundle") as caught,
    ):
        await send_form(f"{origin.url}/token")
    assert (caught.value.cause, caught.value.is_tls) == ("tls", True)
    assert origin.requests == []


async def test_an_answer_to_a_form_is_read_up_to_64_kib():
    with Origin(b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000) as origin:
        assert len((await send_form(origin.url)).body) == 65_536


async def test_a_form_waits_for_an_answer_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shipper.delivery.forms._LIMIT_S", 0.2)
    with Origin(stall) as origin:
        with pytest.raises(NoAnswerError, match=r"within 0\.2 s") as caught:
            await send_form(origin.url)
        await poll(lambda: origin.closed)
    assert (caught.value.cause, caught.value.was_sent) == ("read_timeout", True)
    assert "secret" not in "".join(traceback.format_exception_only(caught.value))
