"""The advice of a pause for a refused secret depends on the source of the secret."""

from __future__ import annotations

from pathlib import Path

from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.config.settings import EndpointSettings, OAuth2Settings, load_settings, require_endpoint
from shipper.status.pauses import ADVICE, ReloadAdvice, advice_on
from tests.cases import each

BASE = "https://intake.example.com"
RENEWAL = ReloadAdvice("reload it", "restart it")
FILE = SecretReference(file="/run/secret")


def intake(**fields: object) -> EndpointSettings:
    return EndpointSettings(**{"base_url": BASE, "subscription_key": FILE, "token": FILE, **fields})


@each(
    ("secret", "advice"),
    [
        (FILE, "write a valid {} into /run/secret; it is read automatically"),
        (
            SecretReference(command=("print-it", "argument")),
            "make print-it print a valid {}; it is run again automatically",
        ),
        (SecretReference(env="NAME"), "set a valid {} in the environment variable NAME, then restart it"),
        (
            LiteralSecret("hidden", "/etc/shipper.toml"),
            "write a valid {} as intake.{key} into /etc/shipper.toml, then reload it",
        ),
        (
            LiteralSecret("hidden", "environment SHIPPER__A"),
            "set a valid {} in the environment variable SHIPPER__A, then restart it",
        ),
        (LiteralSecret("hidden", "--set x=…"), "pass a valid {} as intake.{key}, then restart it"),
        (LiteralSecret("hidden"), "pass a valid {} as intake.{key}, then restart it"),
    ],
)
def test_the_advice_fits_where_the_refused_secret_comes_from(secret: Secret, advice: str):
    for reason, key, noun in (("token", "token", "token"), ("subscription_key", "subscription_key", "key")):
        settings = intake(**{key: secret})
        assert advice_on(reason, settings, RENEWAL) == advice.format(noun, key=key)


def test_each_of_two_keys_is_named():
    advice = advice_on("subscription_key", intake(subscription_key_secondary=SecretReference(env="B")), RENEWAL)
    assert advice == (
        "intake.subscription_key: write a valid key into /run/secret; it is read automatically; "
        "intake.subscription_key_secondary: set a valid key in the environment variable B, then restart it"
    )


def test_advice_names_settings_and_secret_of_the_token_endpoint():
    oauth2 = OAuth2Settings(token_url=f"{BASE}/token", client_id="x", client_secret=FILE)
    assert advice_on("token", intake(token=None, oauth2=oauth2), RENEWAL) == (
        "correct client_id, scope and grant of intake.oauth2, then reload it; "
        "or write a valid secret into /run/secret; it is read automatically"
    )


def test_other_reasons_have_the_advice_of_the_table():
    assert advice_on("forbidden", intake(), RENEWAL) == ADVICE["forbidden"]
    assert advice_on("no such", intake(), RENEWAL) == ""


def test_a_literal_secret_has_a_source_that_does_not_affect_equality(tmp_path: Path):
    file = tmp_path / "shipper.toml"
    file.write_text(f'[intake]\nbase_url = "{BASE}"\nsubscription_key = "a"\ntoken = "b"\n')
    variables = {"SHIPPER__INTAKE__TOKEN": "b"}
    plain, other = (load_settings(config_path=file, environ=each) for each in ({}, variables))
    sources = [
        (each.subscription_key.source, each.token.source)
        for each in (require_endpoint(plain, "intake"), require_endpoint(other, "intake"))
    ]
    assert sources == [(str(file), str(file)), (str(file), "environment SHIPPER__INTAKE__TOKEN")]
    assert plain.intake == other.intake
