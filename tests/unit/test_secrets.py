"""Secrets: from commands, without a shell and never shown; what to do when one is refused; and their reloading."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from msgspec.structs import replace

from shipper.config import secrets
from shipper.config.secrets import LiteralSecret, Secret, SecretReference, check_secret, decode_secret, fetch_secret
from shipper.config.settings import EndpointSettings, OAuth2Settings, Settings, load_settings
from shipper.model.errors import ConfigError
from shipper.pipeline.reload import reload_settings
from shipper.status.pauses import ADVICE, ReloadAdvice, advice_on
from tests.cases import each

CANARY = "Zx9-unmistakable"


def command(*words: str) -> SecretReference:
    return SecretReference(command=words)


def script(text: str) -> SecretReference:
    return command("sh", "-c", text)


async def refused(secret: Secret) -> str:
    """Fetch an unavailable secret; return the message, which must not show the secret."""
    with pytest.raises(ConfigError) as caught:
        await fetch_secret(secret, key="intake.token")
    assert caught.value.key == "intake.token"
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


async def test_a_secret_of_every_form_can_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SOME_SECRET", "from env")
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("from file\n")
    assert await fetch_secret(LiteralSecret("literal"), key="k") == "literal"
    assert await fetch_secret(SecretReference(env="SOME_SECRET"), key="k") == "from env"
    assert await fetch_secret(SecretReference(file=str(file)), key="k") == "from file"
    assert await fetch_secret(command("printf", "from command\r\n"), key="k") == "from command"


async def test_a_byte_order_mark_before_a_secret_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Windows editors and shells write one at the start of files."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("from file\r\n", "utf-8-sig")
    assert await fetch_secret(SecretReference(file=str(file)), key="k") == "from file"
    assert await fetch_secret(command("cat", str(file)), key="k") == "from file"


async def test_the_arguments_are_passed_unchanged_and_without_a_shell():
    assert await fetch_secret(command("echo", "$HOME;*", "a  b"), key="k") == "$HOME;* a  b"


async def test_a_command_has_no_standard_input(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "COMMAND_LIMIT_S", 5)
    reading, writing = os.pipe()
    saved = os.dup(0)
    try:
        os.dup2(reading, 0)
        assert await fetch_secret(script("cat; echo end"), key="k") == "end"
    finally:
        os.dup2(saved, 0)
        for descriptor in (reading, writing, saved):
            os.close(descriptor)


async def test_a_command_may_write_any_amount_to_stderr(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "COMMAND_LIMIT_S", 5)
    assert await fetch_secret(script("yes no | head -c 1000000 >&2; echo end"), key="k") == "end"


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (script(f"echo {CANARY}; echo {CANARY} >&2; exit 3"), "sh failed with exit code 3"),
        (script(f"echo {CANARY} >&2"), "the output of sh is empty"),
        (script(f"printf '{CANARY}\\n\\nx'"), "control character or line break"),
        (script(f"printf '{CANARY}\\377'"), "the output of sh is not UTF-8 text"),
        *((command("echo", f"{scheme} {CANARY}"), "remove this word") for scheme in ("Bearer", "bearer")),
        (script(f"yes {CANARY}"), "sh printed more than 65536 bytes"),
        (script(f"yes {CANARY} | head -c 65537"), "sh printed more than 65536 bytes"),
        (command("no-such-program", CANARY), "cannot run 'no-such-program': No such file"),
        (command("/", CANARY), "cannot run '/': Permission denied"),
        (command("echo", f"{CANARY}\0"), "cannot run 'echo': ValueError"),
    ],
)
async def test_an_error_of_a_command_has_the_reason_and_shows_no_output(secret: Secret, says: str):
    assert says in await refused(secret)


async def test_an_error_for_a_credential_outside_its_unit_tells_how_to_run_a_command_within_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The tool of systemd fails with exit code 1 and no other information."""
    program = tmp_path / "systemd-creds"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    file = "/run/credentials/shipper.service/intake-key"
    run = (
        "one -p LoadCredential= for each secret: systemd-run --pty --uid=shipper -p SupplementaryGroups=adm "
        "-p LoadCredential={0}:/etc/credstore/{0} /usr/local/bin/shipper check -c /etc/shipper/shipper.toml --online"
    )
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    for secret, name in (
        (command(str(program), "cat", "intake-key"), "intake-key"),
        (command(str(program), "cat", CANARY), "NAME"),
        (SecretReference(file=file), "intake-key"),
    ):
        words = await refused(secret)
        assert "$CREDENTIALS_DIRECTORY is not set" in words
        assert words.endswith(run.format(name))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    words = await refused(command(str(program), "cat", "intake-key"))
    assert words.endswith("failed with exit code 1; the unit needs LoadCredential=intake-key")


@pytest.mark.parametrize(
    ("commands", "is_hung"),
    [("sleep 1000; true", True), ("sleep 1000 & echo secret", True), ("sleep 1000 >/dev/null & echo secret", False)],
    ids=["hung", "with the output open", "without the output"],
)
async def test_a_hung_command_and_processes_left_by_one_are_killed(
    commands: str, is_hung: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Also after the command itself has ended, so that its process id is nobody's any more."""
    monkeypatch.setattr(secrets, "COMMAND_LIMIT_S", 0.5)
    os.mkfifo(fifo := tmp_path / "fifo")
    # The shell and its children hold the pipe open for writing: its end tells that all are gone.
    left = script(f"exec 3<>{fifo}; {commands}")
    if is_hung:
        assert "sh did not end within 0.5 s" in await refused(left)
    else:
        assert await fetch_secret(left, key="k") == "secret"
    with anyio.fail_after(20):
        while _has_writer(fifo):
            await anyio.sleep(0.01)


async def test_a_command_gets_a_minimal_environment_without_secrets(monkeypatch: pytest.MonkeyPatch):
    kept = {"HOME": "/h", "LANG": "C", "LC_TIME": "C", "TZ": "UTC", "TMPDIR": "/t", "CREDENTIALS_DIRECTORY": "/c"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    for name in ("INTAKE_KEY", "SHIPPER__INTAKE__TOKEN", "NOTIFY_SOCKET", "LCX"):
        monkeypatch.setenv(name, CANARY)
    output = await fetch_secret(script("env | tr '\\n' ' '; echo ."), key="k")
    assert CANARY not in output
    given = dict(word.split("=", 1) for word in output.split() if "=" in word)
    assert kept.items() <= given.items()
    assert given["PATH"] == os.environ["PATH"]
    assert await fetch_secret(command("env", "MORE=more", "sh", "-c", "echo $MORE"), key="k") == "more"


def _has_writer(fifo: Path) -> bool:
    """Return whether any process has a pipe open for writing."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 1) != b""  # nothing, if its end was reached
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("is_started", [False, True], ids=["while it starts", "while it runs"])
async def test_a_cancelled_command_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_started: bool):
    os.mkfifo(fifo := tmp_path / "fifo")
    runs = anyio.Event()
    open_process = anyio.open_process

    async def opened(*arguments: Any, **options: Any) -> anyio.abc.Process:
        process = await open_process(*arguments, **options)
        while not _has_writer(fifo):
            await anyio.sleep(0.01)
        runs.set()
        if not is_started:
            group.cancel_scope.cancel()
            await anyio.lowlevel.checkpoint()
        return process

    monkeypatch.setattr(anyio, "open_process", opened)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fetch_secret(script(f"exec 3<>{fifo}; sleep 1000; true"), key="k"))
            await runs.wait()
            group.cancel_scope.cancel()
        while _has_writer(fifo):
            await anyio.sleep(0.01)


def test_a_missing_program_is_found_without_running_anything(tmp_path: Path):
    program = tmp_path / "program"
    with pytest.raises(ConfigError, match=r"intake\.token: program '.*/program' cannot be found or executed"):
        check_secret(command(str(program)), key="intake.token")
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o700)
    check_secret(command(str(program)), key="intake.token")
    with pytest.raises(ConfigError, match=r"intake\.token: environment variable NOT_SET is not set"):
        check_secret(SecretReference(env="NOT_SET"), key="intake.token")


@pytest.mark.parametrize("words", [[], [""], ["", "x"]])
def test_a_command_without_a_program_is_refused(words: list[str]):
    with pytest.raises(ValueError, match="command must be a program and its arguments"):
        decode_secret({"command": words})


async def test_a_secret_for_a_body_may_contain_any_characters():
    password = "pässwörd €"
    assert await fetch_secret(LiteralSecret(password), key="k", is_for_header=False) == password
    assert await fetch_secret(command("echo", password), key="k", is_for_header=False) == password
    with pytest.raises(ConfigError, match="outside Latin-1"):
        await fetch_secret(command("echo", password), key="k")


# Advice ---------------------------------------------------------------------------------------------------------------


BASE = "https://intake.example.com"
RENEWAL = ReloadAdvice("reload it", "restart it")
FILE = SecretReference(file="/run/secret")


def intake(**fields: object) -> EndpointSettings:
    return EndpointSettings(**{"base_url": BASE, "subscription_key": FILE, "token": FILE, **fields})


@each(
    ("secret", "advice"),
    [
        (FILE, "write a valid {} into /run/secret; it is read automatically"),
        (command("print-it", "argument"), "make print-it print a valid {}; it is run again automatically"),
        (SecretReference(env="NAME"), "set a valid {} in the environment variable NAME, then restart it"),
        (LiteralSecret("x", "/etc/x.toml"), "write a valid {} as intake.{key} into /etc/x.toml, then reload it"),
        (LiteralSecret("x", "environment A"), "set a valid {} in the environment variable A, then restart it"),
        (LiteralSecret("x", "--set x=…"), "pass a valid {} as intake.{key}, then restart it"),
        (LiteralSecret("x"), "pass a valid {} as intake.{key}, then restart it"),
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
    plain, other = (load_settings(config_path=file, environ=each).intake for each in ({}, variables))
    assert (plain.subscription_key.source, plain.token.source) == (str(file), str(file))
    assert (other.subscription_key.source, other.token.source) == (str(file), "environment SHIPPER__INTAKE__TOKEN")
    assert plain == other


# Reload ---------------------------------------------------------------------------------------------------------------


INTAKE = EndpointSettings(base_url="https://one.example.com", subscription_key="key", token="token")
OLD = Settings(intake=INTAKE)


@each(
    ("changes", "changed", "deferred"),
    [
        ({"token": "new"}, ["intake.token"], []),
        ({"proxy": "http://proxy.example.com"}, [], ["intake.proxy"]),
        # A token for another address must not be sent to this one.
        ({"base_url": "https://two.example.com", "token": "new"}, [], ["intake.base_url", "intake.token"]),
    ],
)
def test_new_credentials_apply_at_once_unless_the_address_changes(
    changes: dict[str, str], changed: list[str], deferred: list[str]
):
    reload = reload_settings(OLD, replace(OLD, intake=replace(INTAKE, **changes)))
    assert (reload.changed, reload.deferred) == (changed, deferred)
    applied = {name: value for name, value in changes.items() if f"intake.{name}" in changed}
    assert reload.settings.intake == replace(INTAKE, **applied)
