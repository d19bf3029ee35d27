"""Requests to a token endpoint, and the interpretation of its answers."""

from __future__ import annotations

from codecs import BOM_UTF8
from random import Random
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from shipper.config.secrets import LiteralSecret, SecretReference
from shipper.config.settings import OAuth2Settings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import NoTokenError
from shipper.delivery.endpoint import NoAnswerError
from shipper.delivery.oauth2 import OAuth2Source
from shipper.delivery.tokens import Token
from shipper.model.errors import ConfigError
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.tokens import CLIENT_ID, CLIENT_SECRET, DEFAULT_SCOPE, PASSWORD, USERNAME, TokenIssuer
from tests.cases import each
from tests.stage.loops import in_virtual_time
from tests.stage.token_endpoint import (
    EPOCH,
    TokenEndpoint,
    answer,
    credentials,
    granted,
    jwt_like,
    oauth2,
    password_grant,
)

TRACE = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


async def fetch(
    item: Answer | NoAnswerError | None, settings: OAuth2Settings | None = None, latency_s: float = 0.0
) -> Token:
    """Fetch from an endpoint that gives this answer, with a fixed wall clock."""
    source = OAuth2Source(
        settings or oauth2(),
        key="intake.oauth2",
        post_form=TokenEndpoint(item, latency_s=latency_s),
        now=anyio.current_time,
        wall_time=lambda: EPOCH,
    )
    return await source.fetch()


async def refusal(item: Answer | NoAnswerError | None, settings: OAuth2Settings | None = None) -> NoTokenError:
    with pytest.raises(NoTokenError) as caught:
        await fetch(item, settings)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "grant", "more"),
    [
        (oauth2(), "client_credentials", {"client_secret": "the-client-secret", "scope": "api://x/.default"}),
        (
            password_grant(scope="openid x", password=LiteralSecret("pässwörd €")),
            "password",
            {"client_secret": "the-client-secret", "scope": "openid x", "username": "a-user", "password": "pässwörd €"},
        ),
        (password_grant(scope="", client_secret=None), "password", {"username": "a-user", "password": "a-password"}),
    ],
    ids=["client_credentials", "password", "password of a public client"],
)
async def test_both_grants_send_these_fields_and_no_others(settings: OAuth2Settings, grant: str, more: dict[str, str]):
    endpoint = TokenEndpoint()
    await credentials(endpoint, settings=settings).authorize()
    assert endpoint.forms == [{"grant_type": grant, "client_id": "the-client", **more}]


@each(
    ("written", "lifetime_s"),
    [
        ({"expires_in": 3599}, 3599),
        ({"expires_in": "3599"}, 3599),
        ({"expires_in": 12.5}, 12.5),
        ({"expires_in": 10**40}, 10 * 366 * 86_400),
        ({"access_token": jwt_like(EPOCH + 700), "expires_in": 3599}, 3599),
        ({"access_token": jwt_like(EPOCH + 700), "expires_in": None}, 700),
        ({"access_token": jwt_like(EPOCH - 700), "expires_in": None}, 300),
        ({"access_token": jwt_like(True), "expires_in": None}, 300),
        ({"access_token": jwt_like("soon"), "expires_in": None}, 300),
        ({"access_token": "a.%%%.b", "expires_in": None}, 300),
        *[({"expires_in": nonsense}, 300) for nonsense in (None, "soon", "", "-1", "1e3", "٣", True, -1, 0, [5], {})],
    ],
)
@in_virtual_time
async def test_the_lifetime_is_parsed_leniently_and_counts_from_the_request(written: Any, lifetime_s: float):
    await anyio.sleep(1000)
    token = await fetch(granted(**written), latency_s=3)
    assert anyio.current_time() == 1003
    assert token.expires_at == pytest.approx(1000 + lifetime_s)
    assert token.wall_expires_at == pytest.approx(EPOCH + lifetime_s)
    assert not token.is_used_when_expired


@pytest.mark.parametrize(("lifetime_s", "margin_s"), [(3600, 360), (600, 60), (300, 60), (120, 30), (5, 1.25)], ids=str)
async def test_a_token_is_renewed_well_before_it_expires(lifetime_s: float, margin_s: float):
    token = await fetch(granted(expires_in=lifetime_s))
    assert token.expires_at - token.refresh_at == pytest.approx(margin_s)


@in_virtual_time
async def test_a_token_that_has_already_expired_is_refused():
    with pytest.raises(NoTokenError, match="took longer than the token is valid") as caught:
        await fetch(granted(expires_in=5), latency_s=5)
    assert caught.value.reason == "token_endpoint"


@pytest.mark.parametrize("token_type", ["Bearer", "bearer", "BEARER"])
async def test_the_type_of_a_token_may_be_written_in_any_case(token_type: str):
    assert (await fetch(granted("it", token_type=token_type))).value == "it"


async def test_a_byte_order_mark_before_the_answer_is_ignored():
    plain = granted("it")
    assert (await fetch(replace(plain, body=BOM_UTF8 + plain.body))).value == "it"


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (granted(token_type="mac"), "other than Bearer"),
        (granted(token_type=None), "other than Bearer"),
        (granted("Zx9 blank"), "not valid in a header"),
        (granted("Zx9\r\nX: y"), "not valid in a header"),
        (granted("Zx9€"), "not valid in a header"),
        (granted("Zx9" * 30_000), "not valid in a header"),
        (granted(""), "has no token"),
        (granted(**{"access_token": ["Zx9"]}), "has no token"),
        (answer(200), "has no token"),
        (Answer(200, "text/html", "", b"<html>Zx9</html>"), "has no token"),
        (Answer(200, "application/json", "", b'["Zx9"]'), "has no token"),
        (Answer(200, "application/json", "", b"[" * 100_000), "has no token"),
        (Answer(200, "application/json", "", b'{"access_token": "Zx9\xff"}'), "has no token"),
        (Answer(204, "", "", b""), "has no token"),
        (Answer(200, "application/json", "", b"\x1f\x8b\x08Zx9"), "is compressed (gzip), although"),
        (Answer(200, "application/json", "", b"Zx9", encoding="br"), "is compressed (br), although"),
        (Answer(400, "application/json", "", b"Zx9", encoding="br"), "(HTTP 400, unreadable, as it is compressed: br)"),
        (Answer(301, "", "", b"", redirects_to="login.example.com"), "redirects to login.example.com, which"),
    ],
    ids=lambda value: "" if isinstance(value, Answer) else value,
)
async def test_an_answer_without_a_usable_token_is_an_error_that_does_not_quote_it(item: Answer, says: str):
    error = await refusal(item)
    assert (error.reason, error.retry_after_s) == ("token_endpoint", None)
    assert says in error.message
    assert "check intake.oauth2.token_url" in error.message
    assert "Zx9" not in error.message


CLIENT = "check intake.oauth2.client_id and intake.oauth2.client_secret"
USER = "check intake.oauth2.username and intake.oauth2.password"
UNABLE = "temporarily unable to issue tokens"


@pytest.mark.parametrize(
    ("status", "error", "reason", "says"),
    [
        (401, "invalid_client", "token", CLIENT),
        (400, "invalid_client", "token", CLIENT),
        (400, "invalid_grant", "token", CLIENT),
        (400, "unauthorized_client", "token", "check intake.oauth2.client_id and intake.oauth2.grant"),
        (400, "invalid_scope", "token", "check intake.oauth2.scope"),
        (400, "unsupported_grant_type", "token", "check intake.oauth2.grant"),
        (400, "invalid_request", "token", "intake.oauth2.client_id, intake.oauth2.scope and intake.oauth2.grant"),
        (500, "invalid_client", "token", CLIENT),
        (400, "something_else", "token", "the settings under intake.oauth2 (HTTP 400, something_else)"),
        (400, "Zx9 with blanks", "token_endpoint", "check intake.oauth2.token_url (HTTP 400)"),
        (401, ["Zx9"], "token", "the settings under intake.oauth2 (HTTP 401)"),
        (400, "temporarily_unavailable", "token_endpoint", f"{UNABLE} (HTTP 400, temporarily_unavailable)"),
        (429, "temporarily_unavailable", "token_endpoint", UNABLE),
        (429, None, "token_endpoint", UNABLE),
        (500, None, "token_endpoint", UNABLE),
        (503, "server_error", "token_endpoint", UNABLE),
        (404, None, "token_endpoint", "check intake.oauth2.token_url (HTTP 404)"),
        (302, None, "token_endpoint", "check intake.oauth2.token_url (HTTP 302)"),
    ],
)
async def test_the_error_field_decides_and_the_message_names_the_setting(
    status: int, error: object, reason: str, says: str
):
    caught = await refusal(answer(status, error=error, error_description="Zx9", trace_id="Zx9", correlation_id=["Zx9"]))
    assert caught.reason == reason
    assert says in caught.message
    assert "Zx9" not in caught.message


async def test_a_refused_user_is_distinguished_from_a_refused_client():
    assert USER in (await refusal(answer(400, error="invalid_grant"), password_grant())).message
    assert CLIENT in (await refusal(answer(400, error="invalid_client"), password_grant())).message


async def test_the_ids_of_an_error_are_reported():
    caught = await refusal(answer(401, error="invalid_client", trace_id=TRACE, correlation_id=f"{TRACE} Zx9"))
    assert caught.message.endswith(f"(HTTP 401, invalid_client, trace_id {TRACE})")


@pytest.mark.parametrize(("retry_after", "wait_s"), [("60", 60), ("", None), ("99999999", 3600), ("soon", None)])
async def test_the_wait_requested_by_the_endpoint_is_passed_on(retry_after: str, wait_s: float | None):
    assert (await refusal(answer(429, retry_after=retry_after))).retry_after_s == wait_s


async def test_no_answer_is_a_fault_of_the_endpoint():
    error = await refusal(NoAnswerError("connect_error", "cannot connect to https://login.example.com"))
    assert (error.reason, error.retry_after_s) == ("token_endpoint", None)
    assert error.message == "cannot connect to https://login.example.com; check intake.oauth2.token_url"


@in_virtual_time
async def test_a_hung_endpoint_is_abandoned_after_half_a_minute():
    error = await refusal(None)
    assert anyio.current_time() == 30
    assert error.reason == "token_endpoint"
    assert "did not answer within 30 s" in error.message


def test_missing_secrets_of_the_client_are_found_at_the_start():
    for name in ("client_secret", "password"):
        with pytest.raises(ConfigError, match=rf"intake\.oauth2\.{name}: environment variable NOT_SET is not set"):
            credentials(settings=password_grant(**{name: SecretReference(env="NOT_SET")}))
        with pytest.raises(ConfigError, match=rf"intake\.oauth2\.{name}: program .* cannot be found or executed"):
            credentials(settings=password_grant(**{name: SecretReference(command=("no-such-program",))}))


async def test_the_secrets_of_the_client_are_read_again_for_each_request(tmp_path: Any):
    file = tmp_path / "secret"
    file.touch(0o600)
    endpoint = TokenEndpoint()
    file.write_text("old")
    secrets = {
        "client_secret": SecretReference(file=str(file)),
        "password": SecretReference(command=("cat", str(file))),
    }
    used = credentials(endpoint, settings=password_grant(**secrets))
    used.refuse_token(await used.authorize())
    file.write_text("new")
    used.refuse_token(await used.authorize())
    file.unlink()
    with pytest.raises(NoTokenError, match=r"intake\.oauth2\.client_secret: cannot read") as caught:
        await used.authorize()
    assert caught.value.reason == "credentials"
    sent = [(form["client_secret"], form["password"]) for form in endpoint.forms]
    assert sent == [("old", "old"), ("new", "new")]


@pytest.mark.parametrize("grant", ["client_credentials", "password"])
async def test_the_sandbox_grants_tokens_and_reports_errors(grant: Any, rng: Random):
    issuer = TokenIssuer(SandboxOptions(), clock=lambda: EPOCH, rng=rng)

    async def post_form(url: str, form: dict[str, str]) -> Answer:
        given = issuer.grant(form)
        return answer(given.status, given.headers.get("Retry-After", ""), **given.document)

    user = {"username": USERNAME, "password": LiteralSecret(PASSWORD)} if grant == "password" else {}
    settings = oauth2(
        grant=grant, client_id=CLIENT_ID, client_secret=LiteralSecret(CLIENT_SECRET), scope=DEFAULT_SCOPE, **user
    )
    used = credentials(post_form, settings=settings, wall_time=lambda: EPOCH)
    token = (await used.authorize()).token
    assert issuer.fault(token) == ""
    assert used.token_expires_at == EPOCH + 3600

    wrong = replace(settings, client_secret=LiteralSecret("x"))
    words = r"client_secret \(HTTP 401, invalid_client, trace_id .*, correlation_id .*\)"
    with pytest.raises(NoTokenError, match=words):
        await credentials(post_form, settings=wrong).authorize()
    for _ in range(60):
        issuer.grant({})
    with pytest.raises(NoTokenError, match="HTTP 429") as caught:
        await credentials(post_form, settings=settings).authorize()
    assert (caught.value.reason, caught.value.retry_after_s) == ("token_endpoint", 60)
