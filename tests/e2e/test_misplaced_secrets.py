"""No message shows a secret given in the wrong place on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.driver import Shipper

SECRETS = (
    "deadbeefdeadbeef0123456789abcdef",
    "DEADBEEF0123456789ABCDEF",
    "S3cr3t/KEY+9x==",
    "Hunter2!",
    "Zx9.Yy8-Ww7_Vv6",
)
PLACES = (
    *("intake.token.env={}", 'intake.token={{ env = "{}" }}', "intake.subscription_key.env={}"),
    *("intake.token.file={}", 'intake.token={{ file = "{}" }}', "intake.oauth2.client_secret.file={}"),
    *('intake.token.command=["{}"]', "intake.token.{}=1", 'intake.token={{ {} = "x" }}', 'intake.token={{ "{}" = 1 }}'),
    *(
        "intake.proxy=http://user:{}@proxy.example:3128",
        "intake.proxy={}",
        "intake.base_url={}",
        "intake.oauth2.token_url={}",
    ),
    *("intake.base_url=https://user:{}@intake.example", "intake.base_url=https://intake.example/?code={}"),
    *(
        "{}",
        "{}=",
        "={}",
        "{}={}",
        "intake={}",
        "intake.token=[{}",
        'intake.token={{ file = "{}"',
        "intake.token=[1, 2, '{}']",
    ),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_the_wrong_place_is_not_shown(secret: str, shipper: Shipper, tmp_path: Path):
    (tmp_path / "none.ndjson").touch()
    for place in PLACES:
        written = place.format(secret, secret)
        result = shipper.run("backfill", tmp_path / "none.ndjson", "--set", written, check=False)
        shown = result.stdout + result.stderr
        assert result.returncode == 2, (written, shown)
        if ".command=" in place:  # the only command that runs a program that cannot be found
            shown += shipper.run("check", "--set", written, check=False).stdout
        assert secret not in shown, (written, shown)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("intake.token.env=INTAKE_TOKN", "INTAKE_TOKN"),
        ("intake.token.file=/run/secrets/intake-token", "/run/secrets/intake-token"),
        ("intake.token.file=./token", "./token"),
        ('intake.token.command=["print-token", "x"]', "print-token"),
        ("intake.tokn=x", "did you mean intake.token?"),
        ("batch.colour=x", "batch.colour"),
        ("intak.base_url=x", "did you mean intake.base_url?"),
    ],
)
def test_a_mistyped_word_is_shown(written: str, named: str, shipper: Shipper, tmp_path: Path):
    (tmp_path / "none.ndjson").touch()
    result = shipper.run("backfill", tmp_path / "none.ndjson", "--set", written, check=False)
    assert result.returncode == 2
    assert named in result.stderr
