"""TLS to the service: trusted certificates, client certificates and their files, on all event loops."""

from __future__ import annotations

import datetime
import gc
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trustme

from shipper.config.settings import EndpointSettings
from shipper.delivery.endpoint import ConnectionSettings, Endpoint
from shipper.delivery.no_answer import Progress, Route, Stage, no_answer
from shipper.model.errors import ConfigError
from tests.certificates import VERSIONS, context_of, demanding
from tests.servers import BannerListener, ClosingListener, Listener, Origin, Proxy, SilentListener, close, stall
from tests.stage.endpoints import DELIVERY, endpoint, failure, poll, post, reaching
from tests.stage.loops import on_each_loop


@on_each_loop
async def test_a_trusted_certificate_is_accepted_and_the_connection_kept(ca: Path, server_context: ssl.SSLContext):
    async with reaching(context=server_context, ca_bundle=ca) as (used, origin):
        assert (await post(used)).body == b"{}"
        assert (await post(used)).body == b"{}"
    assert (origin.accepted, len(origin.requests)) == (1, 2)


@on_each_loop
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("unknown", "unable to get local issuer certificate; see intake.ca_bundle"),
        ("host", "IP address mismatch"),
        ("expired", "certificate has expired"),
        ("name", "Hostname mismatch, certificate is not valid for 'localhost'"),
    ],
)
async def test_an_untrusted_certificate_is_a_setup_fault_and_nothing_is_sent(
    authority: trustme.CA, ca: Path, fault: str, words: str
):
    context = {
        "unknown": lambda: context_of(trustme.CA(), "127.0.0.1"),
        "host": lambda: context_of(authority, "127.0.0.2"),
        "expired": lambda: context_of(authority, "127.0.0.1", not_after=datetime.datetime(2001, 1, 1)),
        "name": lambda: context_of(authority, "intake.example.com"),
    }[fault]()
    with Origin(context=context) as origin:
        url = f"https://localhost:{origin.port}" if fault == "name" else origin.url
        async with endpoint(url, ca_bundle=ca) as used:
            for _ in range(2):
                error = await failure(used)
                assert (error.cause, error.is_stale, error.was_sent) == ("tls", False, False)
                assert f"the certificate of {url} is not trusted" in str(error)
                assert words in str(error)
    assert (origin.accepted, origin.requests) == (2, [])


@on_each_loop
@pytest.mark.parametrize("is_shown", [False, True], ids=["missing", "unknown"])
@pytest.mark.parametrize("version", ["1.2", "1.3"])
async def test_a_missing_or_unknown_client_certificate_is_a_setup_fault(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, version: str, is_shown: bool
):
    """In TLS 1.3 the client learns this only while it waits for the answer to its first request."""
    context = demanding(context_of(authority, "127.0.0.1"), trustme.CA() if is_shown else authority, version)
    shown = client.one if is_shown else None
    async with reaching(context=context, ca_bundle=ca, client_certificate=shown) as (used, origin):
        for _ in range(2):
            error = await failure(used)
            assert (error.cause, error.is_stale, error.was_sent) == ("tls", False, False)
            assert "see intake.client_certificate" in str(error)
    assert len(origin.handshake_errors) == 2
    assert is_shown or set(origin.handshake_errors) == {"PEER_DID_NOT_RETURN_A_CERTIFICATE"}
    assert origin.requests == []


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_refused_client_has_certainly_sent_nothing_only_on_a_new_connection(is_reused: bool):
    progress = Progress(Stage.ANSWER, is_reused=is_reused)
    alert = ssl.SSLError(1, "tlsv13 alert certificate required")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    error = no_answer(alert, Route("https://127.0.0.1:9", "", "intake", 1, 1), progress)
    assert (error.cause, error.was_sent) == ("tls", is_reused)


@on_each_loop
@pytest.mark.parametrize("is_announced", [False, True], ids=["cut", "announced"])
async def test_the_end_of_the_connection_ends_an_answer_only_if_tls_announces_it(
    ca: Path, server_context: ssl.SSLContext, is_announced: bool
):
    """Otherwise the rest of the answer may have been cut off, such as "with errors"."""

    def reply(connection: ssl.SSLSocket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\naccepted")
        if is_announced:
            connection.settimeout(1)
            with suppress(OSError):
                connection.unwrap()  # sends the alert, and waits for the client's
        else:
            close(connection)

    async with reaching(reply, context=server_context, ca_bundle=ca) as (used, _):
        if is_announced:
            assert (await post(used)).body == b"accepted"
            return
        error = await failure(used)
        assert (error.cause, error.is_stale) == ("remote_protocol_error", False)
        assert "the connection was closed before the answer was complete" in str(error)


@pytest.mark.parametrize("files", [("certificate", "key"), ("one", None)], ids=["two files", "one file"])
@pytest.mark.parametrize("version", ["1.2", "1.3"])
async def test_the_client_certificate_is_sent(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, version: str, files: tuple[str, str | None]
):
    certificate, key = files
    shown = {"client_certificate": getattr(client, certificate), "client_key": getattr(client, key) if key else None}
    context = demanding(context_of(authority, "127.0.0.1"), authority, version)
    async with reaching(context=context, ca_bundle=ca, **shown) as (used, origin):
        assert (await post(used)).status == 202
    assert origin.peers == ["the-client"]


async def test_a_renewed_client_certificate_is_read_again(authority: trustme.CA, ca: Path, tmp_path: Path):
    def write(signer: trustme.CA) -> None:
        leaf = signer.issue_cert("client@example.com", common_name="the-client")
        path.write_bytes(leaf.private_key_pem.bytes() + b"".join(each.bytes() for each in leaf.cert_chain_pems))

    path = tmp_path / "client.pem"
    write(trustme.CA())
    context = demanding(context_of(authority, "127.0.0.1"), authority, "1.2")
    async with reaching(context=context, ca_bundle=ca, client_certificate=path) as (used, _):
        assert (await failure(used)).cause == "tls"
        write(authority)
        assert (await post(used)).status == 202
        path.write_bytes(b"half of a ")
        await used.aclose()
        assert (await post(used)).status == 202, "the last usable certificate stays in use"


async def test_a_changed_ca_bundle_is_read_again(ca: Path, server_context: ssl.SSLContext, tmp_path: Path):
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    async with reaching(context=server_context, ca_bundle=path) as (used, _):
        assert "see intake.ca_bundle" in str(await failure(used))
        path.write_bytes(ca.read_bytes())
        assert (await post(used)).status == 202


async def test_an_older_tls_version_than_permitted_is_a_setup_fault(authority: trustme.CA, ca: Path):
    context = context_of(authority, "127.0.0.1")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Origin(context=context) as origin:
        async with endpoint(origin.url, ca_bundle=ca, tls_minimum_version="1.3") as used:
            error = await failure(used)
        assert (error.cause, error.was_sent) == ("tls", False)
        assert "see intake.tls_minimum_version" in str(error)
        async with endpoint(origin.url, ca_bundle=ca) as used:
            assert (await post(used)).status == 202
    assert len(origin.requests) == 1


@on_each_loop
@pytest.mark.parametrize(
    ("peer", "cause"),
    [(BannerListener, "connect_error"), (ClosingListener, "connect_error"), (SilentListener, "connect_timeout")],
)
async def test_a_handshake_that_fails_for_another_reason_is_a_temporary_fault(
    ca: Path, peer: type[Listener], cause: str
):
    with peer() as server:
        url = f"https://127.0.0.1:{server.port}"
        async with endpoint(url, ca_bundle=ca, delivery={"connect_timeout_seconds": 0.2}) as used:
            error = await failure(used)
    assert (error.cause, error.was_sent) == (cause, False)


@on_each_loop
@pytest.mark.parametrize("is_behind_proxy", [False, True], ids=["direct", "behind a proxy"])
async def test_a_cancelled_handshake_leaves_no_connection_and_a_usable_endpoint(
    ca: Path, server_context: ssl.SSLContext, is_behind_proxy: bool
):
    class Slow(Origin):
        def _encrypted(self, connection: socket.socket) -> ssl.SSLSocket:
            if self.accepted == 1:
                begun.append(connection.recv(1))
                stall(connection)
                raise ConnectionAbortedError
            return super()._encrypted(connection)

    begun: list[bytes] = []
    with Proxy() as tunnel, Slow(context=server_context) as origin:
        gc.disable()  # it must not be closed by garbage collection
        try:
            proxy = {"proxy": tunnel.url} if is_behind_proxy else {}
            async with endpoint(origin.url, ca_bundle=ca, **proxy) as used:
                async with anyio.create_task_group() as group:
                    group.start_soon(post, used)
                    await poll(lambda: begun)
                    group.cancel_scope.cancel()
                await poll(lambda: origin.closed)
                assert (await post(used)).status == 202
        finally:
            gc.enable()
    assert len(origin.requests) == 1


# Files of certificates -----------------------------------------------------------------------------------------------


def context_for(**changes: Any) -> ssl.SSLContext:
    settings = EndpointSettings(base_url="https://intake.example.com", **changes)
    return ConnectionSettings(settings, DELIVERY, "intake").service_context


def test_an_invalid_ca_bundle_is_a_configuration_error(tmp_path: Path):
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
        ("text", None, "client_certificate", "text contains no certificate in PEM form"),
        ("certificate", None, "client_certificate", "contains no private key in PEM form.* set client_key"),
        ("broken", "key", "client_key", "the certificate in .*broken is damaged"),
        ("certificate", "absent", "client_key", "absent cannot be read: No such file or directory"),
        ("certificate", "text", "client_key", "text contains no private key in PEM form"),
        ("certificate", "broken", "client_key", "the key in .*broken or .* is damaged"),
        ("broken", None, "client_certificate", "broken is damaged"),
        ("certificate", "other", "client_key", "other does not belong to the certificate in .*certificate.pem"),
        ("certificate", "sealed", "client_key", "encrypted key.*openssl pkey -in KEY -out NEW_KEY"),
    ],
)
def test_an_unusable_client_certificate_is_a_configuration_error(
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


def test_only_https_addresses_need_a_context():
    def is_made(base_url: str, proxy: str | None = None) -> bool:
        settings = ConnectionSettings(EndpointSettings(base_url=base_url, proxy=proxy), DELIVERY, "intake")
        Endpoint(settings)
        return "service_context" in vars(settings)

    assert not is_made("http://127.0.0.1:9")
    assert not is_made("http://127.0.0.1:9", "http://127.0.0.1:8")
    assert is_made("https://127.0.0.1:9")
    assert is_made("http://127.0.0.1:9", "HTTPS://127.0.0.1:8")


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_the_minimum_tls_version_comes_from_the_settings(version: Any):
    assert context_for(tls_minimum_version=version).minimum_version is VERSIONS[version]
