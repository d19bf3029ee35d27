"""Settings: layers, bounds, rules between keys, secrets, and the commands `config init` and `config show`."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from shipper.cli import config as cli
from shipper.config.load import USUAL_FILES, decode_custom
from shipper.config.schema import expectation, leaves
from shipper.config.secrets import SecretReference, resolve_secret
from shipper.config.settings import (
    BatchSettings,
    DeliverySettings,
    EndpointSettings,
    Settings,
    default_state_directory,
    literal_secrets,
    load_settings,
    require_endpoint,
)
from shipper.model.errors import ConfigError
from tests.cases import each

EXAMPLES = sorted((Path(__file__).parents[2] / "config").glob("*.toml"))
CANARY = "canary-4f1d"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shipper.config.load.USUAL_FILES", (USUAL_FILES[0], tmp_path / "etc/shipper.toml"))
    for name in [name for name in os.environ if name.startswith(("SHIPPER_", "XDG_STATE_HOME"))]:
        monkeypatch.delenv(name)


def load(
    toml: str | None = None,
    environ: dict[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    flags: dict[str, Any] | None = None,
) -> Settings:
    path = None
    if toml is not None:
        path = Path("given.toml")
        path.write_text(toml, encoding="utf-8")
    return load_settings(config_path=path, environ=environ or {}, overrides=overrides, flags=flags)


def refused(*args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_code == 2
    return caught.value


def intake(more: str) -> str:
    return f'[intake]\nbase_url = "https://h"\n{more}'


def oauth2(more: str, *, token: str = "", url: str = "https://t/x") -> str:
    return intake(f'{token}\n[intake.oauth2]\ntoken_url = "{url}"\nclient_id = "c"\n{more}')


def kafka(more: str, *, topics: str = '["events"]') -> str:
    return f'[input.kafka]\nbrokers = ["k:9093"]\ntopics = {topics}\ngroup_id = "g"\n{more}'


# --- layers ---


def test_settings_without_a_source_are_the_defaults() -> None:
    settings = load(environ={"HOME": "/home/x", "XDG_STATE_HOME": "/state"})
    assert settings.intake is None
    assert settings.report is None
    assert settings.batch == BatchSettings()
    assert settings.delivery.senders == 64
    assert settings.state.directory == Path("/state/shipper")


def test_every_layer_overrides_the_one_below_it() -> None:
    toml = "[batch]\nmax_events = 1\nmax_bytes = 900001\nlinger_seconds = 1.5\nunique_consumers = false"
    environ = {
        "SHIPPER__BATCH__MAX_EVENTS": "2",
        "SHIPPER__BATCH__MAX_BYTES": "900002",
        "SHIPPER__BATCH__LINGER_SECONDS": "2.5",
    }
    overrides = ("batch.max_events=3", "batch.max_bytes=900003")
    batch = load(toml, environ, overrides, {"batch.max_events": 4, "batch.max_bytes": None}).batch
    assert batch == BatchSettings(max_events=4, max_bytes=900_003, linger_seconds=2.5, unique_consumers=False)


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert load(overrides=("batch.max_events=3", "batch.max_events=5")).batch.max_events == 5


def test_a_higher_layer_replaces_the_whole_secret() -> None:
    toml = intake('token = { file = "/f", allow_group_readable = true }')
    assert load(toml, {"SHIPPER__INTAKE__TOKEN__ENV": "NAME"}).intake.token == SecretReference(env="NAME")


def test_one_layer_may_set_a_secret_in_several_keys() -> None:
    environ = {
        "SHIPPER__INTAKE__BASE_URL": "https://h",
        "SHIPPER__INTAKE__TOKEN__FILE": "/f",
        "SHIPPER__INTAKE__TOKEN__ALLOW_GROUP_READABLE": "true",
    }
    assert load(environ=environ).intake.token == SecretReference(file="/f", allow_group_readable=True)


@each(
    ("override", "expected"),
    [
        ("input.include=['a*', \"b\"]", ("a*", "b")),
        ("input.include=[]", ()),
        ('state.directory="0123"', "0123"),
        ("state.directory='a\\b'", "a\\b"),
        ('state.directory="a \\"b\\""', 'a "b"'),
        ('state.directory="a" and "b"', '"a" and "b"'),
        ('state.directory="a', '"a'),
        ('input.include="a*"', ("a*",)),
        ("state.directory=0123", "0123"),
        ("admin.listen=[::1]:9464", "[::1]:9464"),
        ("batch.unique_consumers=false", False),
        ("delivery.concurrency=3", 3),
        ("batch.linger_seconds=2", 2.0),
        ("log={level='debug'}", "debug"),
    ],
)
def test_text_is_converted_to_the_type_of_its_key(override: str, expected: object) -> None:
    settings = load(overrides=(override,))
    section, _, name = override.split("=")[0].partition(".")
    value = getattr(getattr(settings, section), name or "level")
    assert (value.name if isinstance(value, Path) else value) == expected


def test_a_variable_may_hold_a_string_in_quotes() -> None:
    assert load(environ={"SHIPPER__STATE__DIRECTORY": '"/tmp/x"'}).state.directory == Path("/tmp/x")
    assert load(environ={"SHIPPER__LOG__LEVEL": "'debug'"}).log.level == "debug"


def test_a_variable_names_a_mapped_field_as_it_is_written() -> None:
    environ = {"SHIPPER__RECORDS__MAPPING__ConsumerID": "player_no", "SHIPPER__records__mapping__IP": "ip"}
    assert load(environ=environ).records.mapping.keys() == {"ConsumerID", "IP"}


@each("written", ["9464", "127.0.0.1", ":9464", "http://127.0.0.1:9464", "h:99999", "h:1/", "u@h:1"])
def test_an_address_to_listen_on_has_host_and_port(written: str) -> None:
    error = refused(overrides=(f"admin.listen={written}",))
    assert error.key == "admin.listen"
    assert written in error.message
    assert "HOST:PORT" in error.message


def test_flags_may_hold_paths() -> None:
    settings = load(flags={"input.include": [Path("a"), "b"], "state.directory": Path("s")})
    assert settings.input.include == ("a", "b")
    assert settings.state.directory == Path.cwd() / "s"


# --- the file ---


def test_the_file_is_found_in_the_usual_places_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/shipper.toml").write_text("[batch]\nmax_events = 1")
    assert load().batch.max_events == 1
    Path("shipper.toml").write_text("[batch]\nmax_events = 2")
    assert load().batch.max_events == 2
    Path("named.toml").write_text("[batch]\nmax_events = 3")
    assert load(environ={"SHIPPER_CONFIG": "named.toml"}).batch.max_events == 3
    assert load("[batch]\nmax_events = 4", {"SHIPPER_CONFIG": "named.toml"}).batch.max_events == 4


def test_a_named_file_must_exist_and_its_path_may_be_a_text() -> None:
    Path("named.toml").write_text("[batch]\nmax_events = 3")
    for path in ("named.toml", Path("named.toml"), os.path.join(os.getcwd(), "named.toml")):
        assert load_settings(config_path=path, environ={}).batch.max_events == 3
    for path in ("gone.toml", Path("gone.toml")):
        with pytest.raises(ConfigError, match=r"gone\.toml: the file does not exist"):
            load_settings(config_path=path, environ={})
    assert refused(environ={"SHIPPER_CONFIG": "none.toml"}).source == "none.toml"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "directory" in refused(environ={"SHIPPER_CONFIG": str(tmp_path)}).message


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_default_file_is_an_error() -> None:
    Path("shipper.toml").touch(0o000)
    assert str(refused()) == f"{Path('shipper.toml').absolute()}: cannot be read: Permission denied"


def test_broken_toml_names_file_and_line() -> None:
    error = refused("[batch]\nmax_events = \n")
    assert error.source == "given.toml"
    assert "line 2" in error.message


def test_a_file_that_is_not_text_is_refused_without_showing_it() -> None:
    Path("shipper.toml").write_bytes(f'token = "{CANARY}\xe9"'.encode("latin-1"))
    error = refused()
    assert "UTF-8" in error.message
    assert CANARY not in repr((error, error.__cause__))


def test_a_byte_order_mark_is_ignored() -> None:
    assert load("\ufeff[batch]\nmax_events = 7").batch.max_events == 7


# --- what is wrong, where, and what to do ---


NO_ZONES = ["Europe/Vallletta", "", "+02:00", "../../../etc/passwd", "/etc/passwd", "Europe"]
RECORDS = [
    ("mode = 'normalise'", "mode", "did you mean normalize?"),
    ("mode = true", "mode", "expected"),
    ("relax = 'ip'", "relax", "expected a list"),
    ("relax = ['IP']", "relax", "'IP'"),
    ("relax = ['json']", "relax", "json"),
    ("relax = [1]", "relax", "expected a list"),
    ("unknown_fields = 'ignore'", "unknown_fields", "drop"),
    ("unknown_fields = []", "unknown_fields", "expected"),
    ("event_id = 'make'", "event_id", "derive"),
    ("event_id_fields = ['BrandId']", "event_id_fields", "'BrandId' is not a field"),
    ("event_id_fields = ['EventId']", "event_id_fields", "'EventId' is not a field"),
    ("event_id_fields = ['IP', '']", "event_id_fields", "'' is not a field"),
    ("event_id_fields = 'IP'", "event_id_fields", "expected a list"),
    ("dedupe_window = -1", "dedupe_window", "at least 0"),
    ("dedupe_window = 1.5", "dedupe_window", "whole number"),
    ("max_future_seconds = -1", "max_future_seconds", "at least 0"),
    ("max_future_seconds = '300'", "max_future_seconds", "whole number"),
    *((f"assume_timezone = '{zone}'", "assume_timezone", "not a known time zone") for zone in NO_ZONES),
    ("assume_timezone = 2", "assume_timezone", "expected"),
    ("allowed_statuses = ['']", "allowed_statuses", "expected"),
    ("allowed_statuses = 'Verified'", "allowed_statuses", "expected a list"),
    ("allowed_statuses = [1]", "allowed_statuses", "expected a list"),
    ("mapping = 'IP'", "mapping", "expected"),
    ("mapping = ['IP']", "mapping", "expected"),
    ("mapping.Ip = 'ip'", "mapping.Ip", "did you mean IP?"),
    ("mapping.IP = { from = 'a', values = { '' = 'b' } }", "mapping.IP", "use default"),
    ("mapping.ConsumerID = { const = 9223372036854775808 }", "mapping.ConsumerID", "out of range"),
    ("mapping.IP = { from = 'ip', values = { a = 1979-05-27 } }", "mapping.IP", "is invalid"),
    ("event_id_fields = ['IP']", "event_id_fields", 'needs records.event_id = "derive"'),
    ("map = { IP = 'ip' }", "map", "did you mean records."),
    ("assume_zone = 'UTC'", "assume_zone", "unknown key"),
]
KAFKA = [
    ("security = 'plaintext'", "security", "would send records in clear text to k:9093"),
    ("sasl_mechanism = 'PLAIN'", "sasl_mechanism", "needs username and password"),
    ("sasl_mechanism = 'OAUTHBEARER'", "token", "belongs to sasl_mechanism"),
    ("group_protocol = 'consumer'\nsession_timeout_seconds = 9", "session_timeout_seconds", "is for group_protocol"),
    ("client = { 'enable.auto.commit' = true }", "client.enable.auto.commit", "is set by shipper itself"),
    ("client = { stats_cb = 'x' }", "client.stats_cb", "is not supported"),
    ("client = { 'default.topic.config' = 'x' }", "client.default.topic.config", "is not supported"),
    ("client = { 'ssl.key.password' = 'x' }", "client.ssl.key.password", "is set by shipper itself"),
    ("client = { 'ssl.keystore.password' = 'x' }", "client.ssl.keystore.password", "a literal secret"),
    ("client_key = '/k'", "client_certificate", "needs both"),
]


@each(
    ("toml", "key", "says"),
    [
        ("[batch]\nmax_events = 0", "batch.max_events", "0: expected a whole number, at least 1"),
        ("[batch]\nmax_events = true", "batch.max_events", "True: expected a whole number"),
        ("[batch]\nmax_events = '10'", "batch.max_events", "'10': expected a whole number"),
        ("[batch]\nlinger_seconds = nan", "batch.linger_seconds", "nan"),
        ("[batch]\nlinger_seconds = 1979-05-27", "batch.linger_seconds", "expected a number"),
        ("[delivery]\nretry_max_seconds = inf", "delivery.retry_max_seconds", "inf"),
        ("[delivery]\nconcurrency = 257", "delivery.concurrency", "at most 256"),
        ("[delivery]\nconcurrency = 'adaptiv'", "delivery.concurrency", "did you mean adaptive?"),
        ("[log]\nlevel = 'warn'", "log.level", "did you mean warning?"),
        ("[input]\ninclude = 'a'", "input.include", "expected a list"),
        ("[input]\ninclude = [1]", "input.include", "expected a list"),
        ("[state]\ndirectory = ''", "state.directory", "expected a path"),
        ("[batch]\nmax_event = 1", "batch.max_event", "did you mean batch.max_events?"),
        ("[log]\nmax_events = 1", "log.max_events", "did you mean batch.max_events?"),
        ("[bacth]\nmax_events = 1", "bacth", "did you mean batch?"),
        ("max_events = 1", "max_events", "did you mean batch.max_events?"),
        ("xyzzy = 1", "xyzzy", "unknown key"),
        ("batch = 1", "batch", "is a section"),
        ("[[batch]]\nmax_events = 1", "batch", "is a section"),
        ("[intake]\nallow_plaintext = true", "intake.base_url", "is missing"),
        (f"[intake]\nbase_url = 'https://user:{CANARY}@h'", "intake.base_url", "must not contain credentials"),
        ("[input]\nmax_record_bytes = 1000000", "batch.max_bytes", "1000039"),
        ("[delivery]\nretry_max_seconds = 0.25", "delivery.retry_initial_seconds", "0.25"),
        ("[spool]\nmax_bytes = 100", "spool.segment_bytes", "spool.max_bytes"),
        (oauth2(""), "intake.oauth2.client_secret", "is missing"),
        (oauth2("grant = 'password'\nusername = 'u'"), "intake.oauth2.password", "the password grant needs it"),
        (oauth2("grant = 'password'\npassword = 'p'"), "intake.oauth2.username", "the password grant needs it"),
        (oauth2("client_secret = 's'\nusername = 'u'"), "intake.oauth2.username", "is for the password grant"),
        (oauth2("client_secret = 's'", url="http://t/x"), "intake.oauth2.token_url", "in clear text"),
        (oauth2("client_secret = 's'", url="https://u:p@t"), "intake.oauth2.token_url", "must not contain credentials"),
        (oauth2("client_secret = 's'", token="token = 't'"), "intake.token", "cannot be combined with oauth2"),
        (intake("client_key = '/k'"), "intake.client_key", "needs client_certificate"),
        (intake(f"proxy = 'http://u:{CANARY}@p:1'"), "intake.proxy", "use proxy_username"),
        (intake("proxy = 'socks5://p:1'"), "intake.proxy", "does not begin with"),
        (intake("proxy = 'http://p:1'\nproxy_username = 'u'"), "intake.proxy_username", "set all three"),
        (intake("proxy_username = 'u'\nproxy_password = 'p'"), "intake.proxy_username", "set all three"),
        (f"[input]\ninclude = ['a']\n{kafka('')}", "input.include", "cannot be combined with input.kafka"),
        (kafka("", topics="[]"), "input.kafka.topics", "must have at least one entry"),
        (kafka("dead_letter_topic = 'a'\n", topics="['a']"), "input.kafka.dead_letter_topic", "a would be read and"),
        (kafka("", topics="['b', 'g.ledger']"), "input.kafka.ledger_topic", "g.ledger would be read and"),
        (kafka("ledger_topic = 'g.dead-letters'\n"), "input.kafka.ledger_topic", "is the topic of the dead letters"),
        (kafka("", topics="['events.*']"), "input.kafka.topics", "'events.*' is not the name of a topic; patterns"),
        (kafka("", topics="['a', 'b', 'a']"), "input.kafka.topics", "names a topic twice"),
        (kafka("ledger_topic = 'a:b'"), "input.kafka.ledger_topic", "'a:b' is not the name of a topic; choose another"),
        *((kafka(written), f"input.kafka.{key}", says) for written, key, says in KAFKA),
        *((f"[records]\n{written}", f"records.{key}", says) for written, key, says in RECORDS),
    ],
)
def test_an_error_names_key_source_and_limit(toml: str, key: str, says: str) -> None:
    error = refused(toml)
    assert (error.key, error.source) == (key, "given.toml")
    assert says in error.message
    assert "\n" not in error.message
    assert CANARY not in str(error)


def test_the_source_of_an_error_is_the_layer_that_wrote_it() -> None:
    assert refused(environ={"SHIPPER__BATCH__MAX_EVENTS": "0"}).source == "environment SHIPPER__BATCH__MAX_EVENTS"
    assert refused(environ={"SHIPPER__BATHC": "0"}).source == "environment SHIPPER__BATHC"
    assert refused("[batch]\nmax_events = 5", overrides=("batch.max_events=0",)).source == "--set batch.max_events=…"
    assert refused(flags={"batch.max_events": 0}).source == "command line"
    # The rule is broken by the one that was written, although its error names the other key.
    error = refused(environ={"SHIPPER__INPUT__MAX_RECORD_BYTES": "2000000"})
    assert (error.key, error.source) == ("batch.max_bytes", "environment SHIPPER__INPUT__MAX_RECORD_BYTES")


def test_the_largest_batch_may_be_just_the_longest_record_and_its_envelope() -> None:
    assert load(overrides=("input.max_record_bytes=961", "batch.max_bytes=1000")).batch.max_bytes == 1000
    assert "1001" in refused(overrides=("input.max_record_bytes=962", "batch.max_bytes=1000")).message


def test_an_override_without_a_value_is_refused_without_showing_it() -> None:
    assert CANARY not in str(refused(overrides=(CANARY,)))


def test_rules_hold_for_sections_that_are_built_directly() -> None:
    with pytest.raises(ConfigError, match="retry_max_seconds"):
        DeliverySettings(retry_initial_seconds=2, retry_max_seconds=1)


def test_all_keys_decode() -> None:
    grant = "client_secret = 's'\ngrant = 'password'\nusername = 'u'\npassword = 'p'\n"
    records = "[records]\nmode = 'normalize'\nrelax = ['ip']\nmapping = { IP = 'ip' }\n"
    toml = oauth2(grant, token="subscription_key = { command = ['get', 'key'] }") + records
    toml += "[delivery]\nconcurrency = 'adaptive'\nmax_concurrency = 5"
    settings = msgspec.convert(tomllib.loads(toml), Settings, dec_hook=decode_custom)
    assert settings.delivery.senders == 5
    assert literal_secrets(settings) == ["intake.oauth2.client_secret", "intake.oauth2.password"]


# --- records ---


def test_valid_values_of_records_are_read_from_the_file_the_environment_and_overrides() -> None:
    toml = """
        [records]
        relax = ["ip", "state"]
        event_id = "derive"
        event_id_fields = ["BrandID", "Timestamp"]
        assume_timezone = "Europe/Malta"
        [records.mapping]
        IP = "client.ip"
        ConsumerStatus = { const = "Verified" }
        BTag = { template = "{media}_{click}" }
    """
    environ = {"SHIPPER__RECORDS__UNKNOWN_FIELDS": "keep", "SHIPPER__RECORDS__ALLOWED_STATUSES": "['Verified']"}
    records = load(toml, environ, ("records.mode=strict", "records.dedupe_window=0")).records
    assert (records.mode, records.unknown_fields, records.event_id) == ("strict", "keep", "derive")
    assert (records.relax, records.allowed_statuses) == (("ip", "state"), ("Verified",))
    assert (records.dedupe_window, records.assume_timezone) == (0, "Europe/Malta")
    assert records.event_id_fields == ("BrandID", "Timestamp")
    assert {field: source.paths for field, source in records.field_sources.items()} == {
        "IP": ["client.ip"],
        "ConsumerStatus": [],
        "BTag": ["media", "click"],
    }


def test_an_error_in_records_names_the_layer_that_wrote_it() -> None:
    error = refused(environ={"SHIPPER__RECORDS__ASSUME_TIMEZONE": "Mars/Olympus"})
    assert (error.key, error.source) == ("records.assume_timezone", "environment SHIPPER__RECORDS__ASSUME_TIMEZONE")
    assert refused(overrides=("records.mapping={Ip='ip'}",)).source == "--set records.mapping=…"


# --- addresses ---


@each(
    ("written", "kept"),
    [
        ("https://intake.example.com", "https://intake.example.com"),
        ("https://intake.example.com:8443/", "https://intake.example.com:8443"),
        ("HTTPS://intake.example.com", "https://intake.example.com"),
        ("https://h/a%20b/ä/", "https://h/a%20b/%C3%A4"),
        ("http://localhost:1/", "http://localhost:1"),
        ("http://127.8.8.8", "http://127.8.8.8"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_is_kept_without_its_trailing_slash(written: str, kept: str) -> None:
    assert EndpointSettings(base_url=written).base_url == kept


@each(
    "written",
    [
        *("", "intake.example.com", "ftp://h", "https://", "https://h?x=1", "https://h#", "https://h:99999"),
        *("https://h h", "https://h\n", "https://[::1", "https://[::1::2]", "https://1.2.3.999"),
        *("https://\u0378.example.com", "http://intake.example.com", "http://10.0.0.1"),
        *("http://127.0.0.1.example.com", "http://localhost.example.com"),
    ],
)
def test_an_invalid_address_is_refused(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EndpointSettings(base_url=written)
    assert caught.value.key == "base_url"


def test_plaintext_to_elsewhere_must_be_allowed() -> None:
    assert EndpointSettings(base_url="http://gateway.internal", allow_plaintext=True).base_url == (
        "http://gateway.internal"
    )


def test_settings_required_by_a_command_are_named() -> None:
    with pytest.raises(ConfigError, match="intake: is missing"):
        require_endpoint(load(), "intake")
    with pytest.raises(ConfigError, match=r"intake\.token: is missing"):
        require_endpoint(load(intake('subscription_key = { env = "K" }')), "intake")
    settings = load(oauth2("client_secret = 's'", token="subscription_key = 'k'"))
    assert require_endpoint(settings, "intake").oauth2 is not None, "tokens may come from a token endpoint instead"


# --- secrets ---


def written_secret(value: str, *, mode: int = 0o600) -> Path:
    path = Path("secret")
    path.write_bytes(value.encode())
    path.chmod(mode)
    return path


@each(
    ("reference", "says"),
    [
        (SecretReference(env="NOT_SET"), "environment variable NOT_SET is not set"),
        (SecretReference(file="gone"), "No such file"),
        (SecretReference(file="."), "not a regular file"),
        (SecretReference(file="nul\0"), "null"),
        (SecretReference(file="pipe"), "not a regular file"),  # without waiting for a writer
        (SecretReference(command=("x",)), "not available here"),
    ],
)
def test_an_unavailable_secret_is_reported_with_key_and_source(reference: SecretReference, says: str) -> None:
    if not Path("pipe").exists():
        os.mkfifo("pipe", 0o600)
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_secret(reference, key="intake.token")
    assert caught.value.key == "intake.token"


@each(
    ("mode", "is_allowed", "is_refused"),
    [
        *((0o600, False, False), (0o400, False, False), (0o640, False, True), (0o640, True, False)),
        *((0o620, True, True), (0o604, True, True), (0o644, False, True)),
    ],
)
def test_a_secret_that_others_can_read_is_refused(mode: int, is_allowed: bool, is_refused: bool) -> None:
    words = rf"mode {mode:04o}\); run: chmod 600 secret"
    check_secret_file(written_secret("value", mode=mode), is_allowed, words if is_refused else "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
@each(
    ("owner", "mode", "is_allowed", "is_refused"),
    [
        (0, 0o600, False, False),
        (65_534, 0o600, False, True),
        (65_534, 0o400, False, True),
        (65_534, 0o640, True, False),
    ],
)
def test_a_secret_that_another_user_could_replace_is_refused(
    owner: int, mode: int, is_allowed: bool, is_refused: bool
) -> None:
    path = written_secret("value", mode=mode)
    os.chown(path, owner, -1)
    words = r"secret belongs to user 65534, .* run: chown 0 secret, .*allow_group_read"
    check_secret_file(path, is_allowed, words if is_refused else "")


def check_secret_file(path: Path, is_allowed: bool, refusal: str) -> None:
    reference = SecretReference(file=str(path), allow_group_readable=is_allowed)
    if not refusal:
        assert resolve_secret(reference, key="k") == "value"
        return
    with pytest.raises(ConfigError, match=refusal):
        resolve_secret(reference, key="k")


@each(
    "unfit",
    [b"", b"\n", b"a\nb", b"a\tb", b"a\x7f", b"a\xc2\x85", b" a", b"a ", "a€".encode(), b"a\xff", b"x" * 70_000],
)
def test_a_secret_that_is_invalid_in_a_header_is_refused_without_showing_it(unfit: bytes) -> None:
    path = written_secret("")
    path.write_bytes(unfit.replace(b"a", CANARY.encode()))
    with pytest.raises(ConfigError) as caught:
        resolve_secret(SecretReference(file=str(path)), key="k")
    assert caught.value.key == "k"
    assert CANARY not in repr((caught.value, caught.value.__cause__))


@each(
    "toml",
    [
        "token = {}",
        f"token = {{ env = '{CANARY}' }}",  # the secret itself in the place of the variable's name
        "token = { env = 'A', file = '/b' }",
        "token = { evn = 'A' }",
        "token = { env = 5 }",
        "token = { env = 'A', allow_group_readable = true }",
        f"token = ['{CANARY}']",
        "token = 12345678",
    ],
)
def test_a_malformed_secret_is_refused_without_showing_it(toml: str) -> None:
    error = refused(intake(toml))
    assert (error.key, error.source) == ("intake.token", "given.toml")
    assert CANARY not in str(error)
    assert "12345678" not in str(error)


def test_a_literal_secret_is_never_shown_and_causes_a_warning() -> None:
    settings = load(intake(f'token = "{CANARY}"\nsubscription_key = {{ env = "K" }}'))
    assert CANARY not in f"{settings!r}{settings}"
    assert literal_secrets(settings) == ["intake.token"]
    for text in (f"{{{CANARY}", f"[{CANARY}"):
        assert CANARY not in str(refused(environ={"SHIPPER__INTAKE__TOKEN": text}))


# --- state directory ---


def test_the_state_directory_depends_on_who_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_state_directory({"HOME": "/home/x"}) == Path("/home/x/.local/state/shipper")
    assert default_state_directory({"HOME": "/home/x", "XDG_STATE_HOME": "/s"}) == Path("/s/shipper")
    assert default_state_directory({"HOME": "/home/x", "XDG_STATE_HOME": "rel"}) == Path("/home/x/.local/state/shipper")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_directory({"HOME": "/root"}) == Path("/var/lib/shipper")


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert load(overrides=("state.directory=~/s",)).state.directory == Path("/home/x/s")


def test_a_user_without_a_home_directory_gets_no_folder_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, as for a user without an entry
    assert default_state_directory({}) == Path("/var/lib/shipper")
    with pytest.raises(ConfigError, match="home directory of this user is unknown"):
        load(overrides=("state.directory=~/s",))


# --- the types as documentation ---


def test_every_key_is_described() -> None:
    for leaf in leaves(Settings):
        assert leaf.meta.description, leaf.key
        assert expectation(leaf), leaf.key
        assert leaf.section.__doc__, leaf.key


def test_every_default_is_a_valid_value() -> None:
    for leaf in leaves(Settings):
        if leaf.default is not msgspec.NODEFAULT and not isinstance(leaf.default, Path) and leaf.default is not None:
            assert msgspec.convert(leaf.default, leaf.type, dec_hook=lambda _, value: value) == leaf.default, leaf.key


# --- commands ---


def run(*arguments: str, **options: Any) -> Any:
    app = typer.Typer()
    for command in (cli.init, cli.show, cli.schema):
        app.command()(command)
    return CliRunner().invoke(app, arguments, **options)


def test_init_writes_a_private_file_and_never_replaces_one() -> None:
    assert run("init").exit_code == 0
    path = Path("shipper.toml")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("mine")
    result = run("init")
    assert isinstance(result.exception, ConfigError)
    assert "--force" in str(result.exception)
    assert path.read_text() == "mine"
    assert run("init", "--force").exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert load().intake is not None
    assert [entry.name for entry in Path().iterdir()] == ["shipper.toml"]


def test_init_says_why_it_cannot_write() -> None:
    for arguments in (["init", "gone/x.toml"], ["init", "gone/x.toml", "--force"]):
        error = run(*arguments).exception
        assert isinstance(error, ConfigError)
        assert str(error) == "gone/x.toml: cannot be written: No such file or directory"


def test_init_writes_every_key_and_all_of_them_can_be_uncommented() -> None:
    text = run("init", "-").stdout
    assert load(text).batch == BatchSettings()
    everything = re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)
    # Tokens come from one place, and a user goes with a password: what is left out is the other one of two.
    for left_out in (
        r"^(token|password|proxy_password) = .*$",
        r"^\[(\w+\.oauth2|input\.kafka)\]\n(#.*\n|\w+ = .*\n)*|^proxy_password = .*$",
    ):
        switched_on = load(re.sub(left_out, "", everything, flags=re.MULTILINE))
        assert (switched_on.report.token is None) == (switched_on.report.oauth2 is not None)
        assert (switched_on.input.kafka is None) == ("kafka" in left_out)
        assert switched_on.batch == BatchSettings()
    written = set(_keys_in(tomllib.loads(everything)))
    assert written == {leaf.key for leaf in leaves(Settings)}


def _keys_in(document: dict[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        is_section = not prefix or name in {"oauth2", "kafka"}
        yield from _keys_in(value, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]  # type: ignore[arg-type]


def test_show_prints_toml_with_sources_and_without_secrets() -> None:
    Path("given.toml").write_text(
        f'[intake]\nbase_url = "https://h/"\ntoken = "{CANARY}"\n[input]\ninclude = ["a \\"b\\" \\\\ \\u007f"]\n'
    )
    environ = {"SHIPPER__INTAKE__SUBSCRIPTION_KEY__ENV": "KEY_NAME"}
    arguments = ["show", "--config", "given.toml", "--set", "batch.max_events=5"]
    output = run(*arguments, env=environ).stdout
    shown = tomllib.loads(output)
    assert CANARY not in output
    assert shown["intake"]["token"] == "***"
    assert shown["intake"]["subscription_key"] == {"env": "KEY_NAME"}
    assert shown["input"]["include"] == ['a "b" \\ \x7f']
    assert "report" not in shown
    lines = output.splitlines()
    assert 'base_url = "https://h"  # given.toml' in lines
    assert "max_events = 5  # --set batch.max_events=…" in lines
    assert 'subscription_key = { env = "KEY_NAME" }  # environment SHIPPER__INTAKE__SUBSCRIPTION_KEY__ENV' in lines
    assert 'format = "auto"' in lines


@each(
    ("reference", "shown"),
    [
        ('{ env = "INTAKE_TOKEN" }', {"env": "INTAKE_TOKEN"}),
        ('{ env = "eyJhbGciOiJIUzI1NiJ9" }', {"env": "***"}),
        ('{ file = "/run/secrets/token", allow_group_readable = true }', None),
        ('{ file = "./token" }', None),
        ('{ file = "eyJhbGciOiJIUzI1NiJ9.e30.Zm9v" }', {"file": "***"}),
        ('{ command = ["print-token", "intake"] }', {"command": ["print-token", "***"]}),
        ('{ command = ["eyJhbGciOiJIUzI1NiJ9.e30.Zm9v"] }', {"command": ["***"]}),
    ],
)
def test_show_masks_a_name_that_could_be_the_secret_itself(reference: str, shown: dict[str, object] | None) -> None:
    Path("given.toml").write_text(f'[intake]\nbase_url = "https://h"\ntoken = {reference}\n')
    output = run("show", "--config", "given.toml").stdout
    assert tomllib.loads(output)["intake"]["token"] == (shown or tomllib.loads(f"a = {reference}")["a"])


def test_the_output_of_show_can_be_loaded() -> None:
    output = run("show", "--set", "log.level=debug").stdout
    assert load(output) == load(overrides=("log.level=debug",))


# --- schema ---


@pytest.fixture
def schema() -> Any:
    return json.loads(run("schema").stdout)


def test_the_schema_accepts_every_example_and_every_key_of_the_commented_file(schema: Any) -> None:
    documents = [tomllib.loads(path.read_text()) for path in sorted(EXAMPLES[0].parent.rglob("*.toml"))]
    assert {"backfill", "pipe", "sidecar"} <= {path.stem for path in EXAMPLES}
    assert len(documents) >= 5
    text = run("init", "-").stdout
    documents += [tomllib.loads(text), tomllib.loads(re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE))]
    for document in documents:
        jsonschema_rs.validate(schema, document)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[batch]\nmax_evnts = 5", "batch"),
        ("[batch]\nmax_events = 0", "batch/max_events"),
        ('[delivery]\nconcurrency = "many"', "delivery/concurrency"),
        ("[delivery]\nconcurrency = 0", "delivery/concurrency"),
        (intake('token = { env = "A", file = "b" }'), "intake/token"),
        (intake("token = {}"), "intake/token"),
        ("[nowhere]\n", ""),
    ],
)
def test_the_schema_refuses_what_the_decoder_refuses(text: str, place: str, schema: Any) -> None:
    document = tomllib.loads(text)
    (error, *_) = jsonschema_rs.validator_for(schema).iter_errors(document)
    assert "/".join(map(str, error.instance_path)) == place
    refused(text)


def test_the_schema_has_no_null_and_describes_every_key(schema: Any) -> None:
    assert "null" not in json.dumps(schema)
    for section in schema["$defs"].values():
        assert all("description" in key for key in section["properties"].values()), section["title"]
