"""
The settings: every key with its type, bounds, default and description, and the rules between keys.

`load_settings` combines the layers: defaults < file < environment < `--set` < flags. `shipper.config.load` reads them,
`shipper.config.secrets` resolves secrets. Sections can also be created directly (`BatchSettings(max_events=10)`), but
then only the rules between keys are checked, not the bounds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from shipper.config.load import Entry, build, read_entries
from shipper.config.mapping import FIELDS, FieldSource, field_sources
from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.model.errors import ConfigError
from shipper.model.wire import EMPTY_BODY
from shipper.system.addresses import (
    check_address,
    check_host_names,
    check_listen_address,
    checked_base_url,
    is_loopback,
)

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
# Properties that affect positions, commits and membership, or that have their own keys.
_OWNED_PROPERTIES: Final = (
    "bootstrap", "metadata.broker.list", "group.", "client.id", "enable.", "auto.", "isolation", "transaction",
    "partition.assignment", "session.timeout", "security.protocol", "sasl.mechanism", "sasl.username", "sasl.oauth",
    "ssl.ca", "ssl.certificate", "ssl.key.", "queued.max", "debug", "plugin", "acks", "request.required",
)  # fmt: skip
# Properties whose values only a program can give to the client.
_PROGRAM_PROPERTY: Final = re.compile(r"_cb$|^(on_|logger$|default\.topic\.|delivery\.report\.)")
_SECRET_PROPERTY: Final = re.compile(r"password|secret|jaas|\.pem$")

RuleId = Literal[
    "event_id", "ip", "timestamp", "btag", "consumer_id", "brand_id", "country", "currency",
    "username", "customer_currency", "status", "affiliate_id", "state",
]  # fmt: skip


def about(description: str, *, example: Any = None, **limits: Any) -> Meta:
    """Return the `msgspec.Meta` of a key, with its description and limits."""
    return Meta(description=description, examples=None if example is None else [example], **limits)


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Base of all sections.

    `__post_init__` checks the rules between keys; the key of its `ConfigError` is relative to the section.
    """


class OAuth2Settings(Section, frozen=True):
    """Access tokens from a token endpoint."""

    token_url: Annotated[str, about("address of the token endpoint", example="https://login.example.com/token")]
    client_id: Annotated[str, about("client id", example="shipper")]
    client_secret: Annotated[Secret | None, about("client secret", example={"env": "CLIENT_SECRET"})] = None
    scope: Annotated[str, about("scopes to request, separated by spaces")] = ""
    grant: Annotated[Literal["client_credentials", "password"], about("grant type (RFC 6749)")] = "client_credentials"
    username: Annotated[str, about("user name for the password grant")] = ""
    password: Annotated[Secret | None, about("password for the password grant", example={"env": "PASSWORD"})] = None

    def __post_init__(self) -> None:
        if self.grant == "client_credentials" and self.client_secret is None:
            raise ConfigError('is missing: write client_secret = { env = "CLIENT_SECRET" }', key="client_secret")
        for key in ("username", "password"):
            if bool(getattr(self, key)) != (self.grant == "password"):
                fault = "is for the password grant" if getattr(self, key) else "is missing: the password grant needs it"
                raise ConfigError(f'{fault}; see oauth2.grant, which is "{self.grant}"', key=key)


class EndpointSettings(Section, frozen=True):
    """An HTTP API behind a gateway: its address and its credentials."""

    base_url: Annotated[
        str, about("scheme, host, port and optionally the path of a gateway", example="https://intake.example.com")
    ]
    subscription_key: Annotated[
        Secret | None, about("subscription key of the gateway", example={"env": "INTAKE_KEY"})
    ] = None
    subscription_key_secondary: Annotated[
        Secret | None, about("second key, used when the first one is refused", example={"env": "INTAKE_KEY_2"})
    ] = None
    token: Annotated[Secret | None, about("access token", example={"file": "/run/secrets/intake-token"})] = None
    oauth2: Annotated[OAuth2Settings | None, about("token endpoint, instead of token")] = None
    allow_plaintext: Annotated[bool, about("allow http:// to other machines")] = False
    ca_bundle: Annotated[
        Path | None, about("certificates of trusted authorities (PEM)", example="/etc/ssl/certs/intake-ca.pem")
    ] = None
    client_certificate: Annotated[
        Path | None, about("client certificate (PEM); only presented to the service", example="/etc/shipper/client.pem")
    ] = None
    client_key: Annotated[
        Path | None, about("key of the client certificate (PEM)", example="/etc/shipper/client.key")
    ] = None
    tls_minimum_version: Annotated[Literal["1.2", "1.3"], about("oldest TLS version to accept")] = "1.2"
    proxy: Annotated[str | None, about("HTTP proxy for all requests", example="http://proxy.example.com:3128")] = None
    proxy_username: Annotated[str, about("user name for the proxy")] = ""
    proxy_password: Annotated[Secret | None, about("password for the proxy", example={"env": "PROXY_PASSWORD"})] = None

    def __post_init__(self) -> None:
        # The struct is not shared yet, so the normalised address can replace the original.
        base_url = checked_base_url(self.base_url, allow_plaintext=self.allow_plaintext)
        msgspec.structs.force_setattr(self, "base_url", base_url)
        if self.oauth2 is not None:
            if self.token is not None:
                raise ConfigError("cannot be combined with oauth2; remove one of them", key="token")
            check_address(self.oauth2.token_url, key="oauth2.token_url", allow_plaintext=self.allow_plaintext)
        if self.client_key is not None and self.client_certificate is None:
            raise ConfigError("needs client_certificate", key="client_key")
        if self.proxy is not None:
            check_address(self.proxy, key="proxy", allow_plaintext=True, allow_path=False)
        if isinstance(self.proxy_password, SecretReference) and self.proxy_password.command is not None:
            raise ConfigError("cannot come from a command; use env or file", key="proxy_password")
        if bool(self.proxy_username) != (self.proxy_password is not None) or (self.proxy_username and not self.proxy):
            raise ConfigError("needs proxy and proxy_password: set all three, or proxy alone", key="proxy_username")


class ReportSettings(EndpointSettings, frozen=True):
    """Where to fetch the daily report, and which records belong to its account."""

    media: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        about("marketing sources that belong to the reconciled account", example=[50121, 50377]),
    ] = ()
    accounts: Annotated[
        Path | None,
        about(
            "CSV file with the columns account, media, affiliate_id: which records belong to which account",
            example="/etc/shipper/accounts.csv",
        ),
    ] = None


class KafkaSettings(Section, frozen=True):
    """A consumer group to read instead of files; needs the extra `kafka`."""

    brokers: Annotated[tuple[str, ...], about("bootstrap addresses, host:port", example=["kafka-1.example.com:9093"])]
    topics: Annotated[tuple[str, ...], about("topics to read", example=["acquisitions"])]
    group_id: Annotated[str, about("consumer group; the same for all members", min_length=1, example="shipper")]
    group_instance_id: Annotated[str, about("static membership: a name that only this member uses; empty = none")] = ""
    group_protocol: Annotated[
        Literal["classic", "consumer"], about("classic: cooperative-sticky; consumer: KIP-848, brokers from 4.0")
    ] = "classic"
    session_timeout_seconds: Annotated[
        float, about("classic: time without heartbeats after which a member is removed; 0 = 45", ge=0, le=1800)
    ] = 0.0
    revoke_wait_seconds: Annotated[float, about("time for records of a revoked partition to settle", ge=0, le=60)] = 5.0
    start: Annotated[
        Literal["beginning", "end", "stop"],
        about("where to start in partitions that the group has not read; stop: do not read them"),
    ] = "beginning"
    on_gap: Annotated[
        Literal["stop", "continue"],
        about("when the next records of a partition are gone: stop reading it, or continue after them"),
    ] = "stop"
    tombstones: Annotated[Literal["dead_letter", "skip"], about("what to do with messages without a value")] = (
        "dead_letter"
    )
    dead_letter_topic: Annotated[str, about("compacted topic for dead letters; empty = group_id.dead-letters")] = ""
    ledger_topic: Annotated[str, about("compacted topic for the ledger; empty = group_id.ledger")] = ""
    max_fetched_bytes: Annotated[
        int, about("memory for messages that are fetched but not processed", ge=1_048_576, le=1_073_741_824)
    ] = 8_388_608
    security: Annotated[Literal["tls", "plaintext"], about("how to connect to the brokers")] = "tls"
    allow_plaintext: Annotated[bool, about("allow plaintext to other machines")] = False
    ca_bundle: Annotated[
        Path | None, about("certificates of trusted authorities (PEM)", example="/etc/ssl/certs/kafka-ca.pem")
    ] = None
    client_certificate: Annotated[Path | None, about("client certificate (PEM)", example="/etc/shipper/kafka.pem")] = (
        None
    )
    client_key: Annotated[
        Path | None, about("key of the client certificate (PEM)", example="/etc/shipper/kafka.key")
    ] = None
    sasl_mechanism: Annotated[
        Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"], about("authentication; empty = none")
    ] = ""
    username: Annotated[str, about("user name for SASL")] = ""
    password: Annotated[Secret | None, about("password for SASL", example={"file": "/run/secrets/kafka"})] = None
    token: Annotated[
        Secret | None,
        about(
            "for OAUTHBEARER: a JWT with an expiry, renewed before it expires",
            example={"command": ["get-token", "kafka"]},
        ),
    ] = None
    client: Annotated[
        dict[str, str | int | bool],
        about("other properties of librdkafka, without secrets", example={"client.rack": "eu-west-1a"}),
    ] = {}

    def __post_init__(self) -> None:
        for key in ("brokers", "topics"):
            if not all(getattr(self, key)) or not getattr(self, key):
                raise ConfigError("must have at least one entry, and no empty ones", key=key)
        if len(set(self.topics)) < len(self.topics):
            raise ConfigError("names a topic twice", key="topics")
        written = ("dead_letter_topic", self.letters), ("ledger_topic", self.ledger)
        for key, topic in (*(("topics", topic) for topic in self.topics), *written):
            if not _TOPIC.fullmatch(topic):
                advice = "patterns are not supported" if key == "topics" else "choose another one"
                raise ConfigError(f"{topic!r} is not the name of a topic; {advice}", key=key)
        for key, topic in written:
            if topic in self.topics:
                raise ConfigError(f"{topic} would be read and written; choose another topic for one of them", key=key)
        if self.letters == self.ledger:
            raise ConfigError("is the topic of the dead letters; choose another one", key="ledger_topic")
        self._check_security()
        if self.group_protocol == "consumer" and self.session_timeout_seconds:
            raise ConfigError(
                'is for group_protocol = "classic"; with "consumer", the brokers decide', key="session_timeout_seconds"
            )
        for name in self.client:
            if name.startswith(_OWNED_PROPERTIES):
                raise ConfigError("is set by shipper itself; remove it", key=f"client.{name}")
            if _PROGRAM_PROPERTY.search(name):
                raise ConfigError("is not supported; remove it", key=f"client.{name}")
            if _SECRET_PROPERTY.search(name):
                raise ConfigError("would be a literal secret, which is not supported", key=f"client.{name}")

    def _check_security(self) -> None:
        remote = [broker for broker in self.brokers if not is_loopback(broker.rpartition(":")[0].strip("[]"))]
        if self.security == "plaintext" and remote and not self.allow_plaintext:
            raise ConfigError(
                f'"plaintext" would send records in clear text to {remote[0]}; use "tls", or set '
                "allow_plaintext = true if the connection is protected in another way",
                key="security",
            )
        if (self.client_key is None) != (self.client_certificate is None):
            raise ConfigError("needs both client_certificate and client_key", key="client_certificate")
        if (self.sasl_mechanism == "OAUTHBEARER") != (self.token is not None):
            raise ConfigError('belongs to sasl_mechanism = "OAUTHBEARER": set both, or none', key="token")
        has_all = bool(self.sasl_mechanism and self.username and self.password is not None)
        if not has_all and (self.username or self.password is not None or (self.sasl_mechanism and not self.token)):
            raise ConfigError("needs username and password: set all three, or none", key="sasl_mechanism")
        if has_all and self.token is not None:
            raise ConfigError("uses a token; remove username and password", key="sasl_mechanism")

    @property
    def letters(self) -> str:
        """The topic of the dead letters."""
        return self.dead_letter_topic or f"{self.group_id}.dead-letters"

    @property
    def ledger(self) -> str:
        """The topic of the ledger."""
        return self.ledger_topic or f"{self.group_id}.ledger"


class InputSettings(Section, frozen=True):
    """Which files to read, and how."""

    include: Annotated[tuple[str, ...], about("globs of files to read")] = ()
    exclude: Annotated[tuple[str, ...], about("globs of files to skip")] = ()
    format: Annotated[
        Literal["auto", "ndjson", "csv", "batch"],
        about("format of the input; auto: detected from the first bytes of each file"),
    ] = "auto"
    csv_delimiter: Annotated[str, about("delimiter of CSV, one character; empty = detected from the header")] = ""
    start: Annotated[
        Literal["beginning", "end"],
        about("where `run` starts in files that exist when their pattern is first used; other files: beginning"),
    ] = "beginning"
    max_record_bytes: Annotated[
        int, about("maximum size of a record; a longer one becomes a dead letter", ge=1, le=67_108_864)
    ] = 262_144
    poll_interval_seconds: Annotated[float, about("interval at which files are checked", gt=0, le=3600)] = 1.0
    rotate_wait_seconds: Annotated[
        float, about("how long to watch a renamed file for late writes", ge=0, le=86_400)
    ] = 5.0
    on_complete: Annotated[
        Literal["keep", "delete", "move"],
        about("what to do with a file once all its records are settled; `run` also waits until it is rotated"),
    ] = "keep"
    completed_directory: Annotated[
        Path | None, about("target of on_complete = move", example="/var/log/app/shipped")
    ] = None
    kafka: Annotated[KafkaSettings | None, about("Kafka consumer group to read instead of files")] = None

    def __post_init__(self) -> None:
        delimiter = self.csv_delimiter
        if len(delimiter) > 1 or not delimiter.isascii() or delimiter in {'"', "\r", "\n", "\0"}:
            raise ConfigError(
                f"{delimiter!r} is not a delimiter: it must be one ASCII character other than a quote or a "
                'line break, such as ";"',
                key="csv_delimiter",
            )
        if self.on_complete == "move" and self.completed_directory is None:
            raise ConfigError(
                'is missing: input.on_complete is "move"; write completed_directory = "/path" under [input]',
                key="completed_directory",
            )
        if self.kafka is not None and self.include:
            raise ConfigError("cannot be combined with input.kafka; remove one of them", key="include")


class RecordsSettings(Section, frozen=True):
    """Which records are valid, and how they are normalised."""

    mode: Annotated[
        Literal["normalize", "strict"],
        about("normalize: correct unambiguous deviations; strict: send as read, or refuse"),
    ] = "normalize"
    relax: Annotated[tuple[RuleId, ...], about("rules to reduce to a check of the field's type")] = ()
    unknown_fields: Annotated[
        Literal["drop", "reject", "keep"], about("what to do with fields that the service does not know")
    ] = "drop"
    event_id: Annotated[
        Literal["require", "derive"], about("require: records without EventId become dead letters; derive: compute it")
    ] = "require"
    event_id_fields: Annotated[
        tuple[str, ...], about("fields from which to derive EventIds; empty = BrandID, ConsumerID")
    ] = ()
    dedupe_window: Annotated[
        int, about("number of accepted EventIds to remember, to recognise duplicates; 0 = off", ge=0, le=100_000_000)
    ] = 1_000_000
    mistake_limit: Annotated[
        int,
        about(
            "hold the input back after this many consecutive records that break the same rule; 0 = never",
            ge=0,
            le=1_000_000_000,
        ),
    ] = 1_000
    max_future_seconds: Annotated[int, about("how far in the future a Timestamp may be", ge=0, le=86_400 * 366)] = 300
    assume_timezone: Annotated[str | None, about("time zone of Timestamps without one", example="Europe/Malta")] = None
    mapping: Annotated[
        dict[str, Any],
        about(
            "source of each field: a path or a table",
            example={"IP": "client.ip", "ConsumerStatus": {"const": "Verified"}},
        ),
    ] = {}
    allowed_statuses: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...], about("valid ConsumerStatus values; [] = all")
    ] = ()

    def __post_init__(self) -> None:
        _ = self.field_sources
        if self.assume_timezone is not None:
            from shipper.config.zones import time_zone  # needed by few

            time_zone(self.assume_timezone, key="assume_timezone")
        for field in self.event_id_fields:
            if field not in FIELDS or field == "EventId":
                raise ConfigError(
                    f"{field!r} is not a field to derive an EventId from; choose from {', '.join(FIELDS[1:])}",
                    key="event_id_fields",
                )
        if self.event_id_fields and self.event_id != "derive":
            raise ConfigError('needs records.event_id = "derive"', key="event_id_fields")

    @property
    def field_sources(self) -> dict[str, FieldSource]:
        return field_sources(self.mapping)

    @property
    def passes_wire_form(self) -> bool:
        """Whether every record in the strict wire form is valid and sent unchanged."""
        return not (self.relax or self.allowed_statuses or self.mapping or self.unknown_fields == "keep")


class BatchSettings(Section, frozen=True):
    """When a batch is sent: when it reaches the first of the three limits."""

    max_events: Annotated[int, about("events per request", ge=1, le=1_000_000)] = 1000
    max_bytes: Annotated[int, about("bytes per request, uncompressed", ge=1, le=268_435_456)] = 1_000_000
    linger_seconds: Annotated[
        float, about("send an incomplete batch when its first event is this old", ge=0, le=3600)
    ] = 1.0
    unique_consumers: Annotated[bool, about("at most one event per ConsumerID in a batch")] = True


class DeliverySettings(Section, frozen=True):
    """How batches are sent, and what happens when the service refuses them or is unavailable."""

    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Literal["adaptive"],
        about("requests in flight; adaptive: as many as the service can handle"),
    ] = "adaptive"
    max_concurrency: Annotated[int, about("upper limit of adaptive concurrency", ge=1, le=256)] = 64
    connect_timeout_seconds: Annotated[float, about("time limit for opening a connection", gt=0, le=600)] = 10.0
    read_timeout_seconds: Annotated[float, about("time limit for an answer", gt=0, le=3600)] = 60.0
    connection_max_age_seconds: Annotated[
        float, about("maximum age of a connection, so that DNS changes take effect", gt=0, le=86_400)
    ] = 300.0
    retry_initial_seconds: Annotated[float, about("upper limit of the first backoff", gt=0, le=3600)] = 0.5
    retry_max_seconds: Annotated[float, about("upper limit of every backoff", gt=0, le=86_400)] = 60.0
    give_up_after_seconds: Annotated[
        float, about("one-shot commands end if nothing is accepted for this long", ge=0, le=31_536_000)
    ] = 900.0
    fail_fast: Annotated[
        bool,
        about(
            "one-shot commands end within 10 s if the setup is wrong (token, key, address, TLS, unknown host, password "
            "of a proxy) and nothing was accepted; `run` never does"
        ),
    ] = True
    poison_limit: Annotated[int, about("consecutive refused records at which delivery pauses", ge=1, le=1_000_000)] = 50
    rate_limit_events_per_second: Annotated[float, about("maximum number of events per second; 0 = no limit", ge=0)] = (
        0.0
    )
    drain_timeout_seconds: Annotated[
        float, about("time limit for settling records after a stop signal", ge=0, le=86_400)
    ] = 25.0
    drain: Annotated[
        Literal["input", "until_idle"],
        about("when to end reading after a stop signal; input: at once; until_idle: when no new input arrives"),
    ] = "input"
    drain_idle_seconds: Annotated[
        float, about("with drain = until_idle: time without new input after which reading ends", gt=0, le=3600)
    ] = 5.0
    traceparent: Annotated[bool, about("send a traceparent header with each attempt")] = True
    compression: Annotated[Literal["none", "gzip"], about("Content-Encoding of requests")] = "none"

    def __post_init__(self) -> None:
        if self.retry_initial_seconds > self.retry_max_seconds:
            raise ConfigError(
                f"{self.retry_initial_seconds:g} is more than delivery.retry_max_seconds, "
                f"which is {self.retry_max_seconds:g}",
                key="retry_initial_seconds",
            )

    @property
    def senders(self) -> int:
        """Number of senders to start: the fixed concurrency, or the maximum of the adaptive one."""
        return self.concurrency if isinstance(self.concurrency, int) else self.max_concurrency


class StateSettings(Section, frozen=True):
    """Where the state is stored between runs."""

    directory: Annotated[Path, about("checkpoints, dead letters and spool; one directory per running shipper")] = (
        msgspec.field(default_factory=lambda: default_state_directory(os.environ))
    )
    commit_interval_seconds: Annotated[
        float, about("maximum interval between commits of the state; much data is committed earlier", ge=0.001, le=60)
    ] = 0.5
    dead_letter_max_bytes: Annotated[
        int, about("maximum size of the dead letters; delivery pauses when it is reached", ge=1)
    ] = 1_073_741_824
    dead_letter_retention_days: Annotated[
        float, about("age at which dead letters are deleted; 0 = never", ge=0, le=36_500)
    ] = 0.0
    ledger_retention_days: Annotated[
        float, about("age at which the ledger's counts of a day are deleted; 0 = never", ge=0, le=36_500)
    ] = 0.0


class SpoolSettings(Section, frozen=True):
    """Where standard input is stored until it is settled."""

    max_bytes: Annotated[int, about("maximum size of the spool; reading waits when it is reached", ge=1)] = (
        1_073_741_824
    )
    segment_bytes: Annotated[int, about("size of a segment file", ge=1)] = 16_777_216
    fsync: Annotated[Literal["always", "interval", "never"], about("when to sync segments to disk")] = "interval"
    fsync_interval_seconds: Annotated[float, about("sync interval for fsync = interval", gt=0, le=3600)] = 1.0

    def __post_init__(self) -> None:
        if self.segment_bytes > self.max_bytes:
            raise ConfigError(
                f"{self.segment_bytes} is more than spool.max_bytes, which is {self.max_bytes}", key="segment_bytes"
            )


class LogSettings(Section, frozen=True):
    """Diagnostics, on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], about("lowest level to log")] = "info"
    format: Annotated[Literal["auto", "json", "console"], about("auto: console on a terminal, else JSON lines")] = (
        "auto"
    )


class AdminSettings(Section, frozen=True):
    """Metrics, health and status over HTTP, while `shipper run` runs."""

    listen: Annotated[str, about("host:port to listen on; empty = off", example="127.0.0.1:9464")] = "127.0.0.1:9464"

    hosts: Annotated[
        tuple[str, ...],
        about(
            "host names that requests may use, in addition to localhost, IP addresses and that of `admin.listen`",
            example=["shipper.monitoring.svc"],
        ),
    ] = ()

    stuck_seconds: Annotated[
        float,
        about("time on one piece of work after which a stage counts as stuck, and `/healthz` fails", ge=0.5, le=3600),
    ] = 30.0

    def __post_init__(self) -> None:
        check_listen_address(self.listen, key="listen")
        check_host_names(self.hosts, key="hosts")


class Settings(Section, frozen=True):
    """All sections. `intake` and `report` are None unless one of their keys is set."""

    intake: Annotated[EndpointSettings | None, about("where to send events")] = None
    report: Annotated[ReportSettings | None, about("where to fetch the daily report")] = None
    input: InputSettings = msgspec.field(default_factory=InputSettings)
    records: RecordsSettings = msgspec.field(default_factory=RecordsSettings)
    batch: BatchSettings = msgspec.field(default_factory=BatchSettings)
    delivery: DeliverySettings = msgspec.field(default_factory=DeliverySettings)
    state: StateSettings = msgspec.field(default_factory=StateSettings)
    spool: SpoolSettings = msgspec.field(default_factory=SpoolSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)
    admin: AdminSettings = msgspec.field(default_factory=AdminSettings)

    def __post_init__(self) -> None:
        # Otherwise the longest record would not fit into any request.
        min_bytes = self.input.max_record_bytes + len(EMPTY_BODY)
        if self.batch.max_bytes < min_bytes:
            raise ConfigError(
                f"{self.batch.max_bytes} is too small for the longest record; the minimum is {min_bytes}: "
                f"input.max_record_bytes, which is {self.input.max_record_bytes}, + {len(EMPTY_BODY)} for the envelope",
                key="batch.max_bytes",
            )


def load_settings(
    *,
    config_path: str | PathLike[str] | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """
    Load the settings from all layers; a later layer overrides an earlier one.

    Args:
        config_path: Path of the file; None = the usual places, where it is optional.
        environ: Environment variables: `SHIPPER__SECTION__KEY`, `SHIPPER_CONFIG`, `XDG_STATE_HOME`, `HOME`.
        overrides: Strings `section.key=value`, from `--set`.
        flags: Values of flags by dotted key; None = the flag was not used.
    Raises:
        ConfigError: The first error, with its key and source.
    """
    entries = read_entries(Settings, config_path=config_path, environ=environ, overrides=overrides, flags=flags or {})
    return build_settings(entries, environ=environ)


def build_settings(entries: Mapping[str, Entry], *, environ: Mapping[str, str]) -> Settings:
    """Build the settings from the entries of all layers."""
    if "state.directory" not in entries:
        # Not in the caller's `entries`, which contain no defaults.
        entries = {**entries, "state.directory": Entry(default_state_directory(environ), source="default")}
    return build(Settings, entries)


def default_state_directory(environ: Mapping[str, str]) -> Path:
    """
    Return the default state directory.

    It is `$XDG_STATE_HOME/shipper`; else `~/.local/state/shipper`, or `/var/lib/shipper` for root and users without a
    home directory.
    """
    base = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore a relative path
        return Path(base, "shipper")
    home = environ.get("HOME") or os.path.expanduser("~")
    if os.geteuid() == 0 or home == "~":  # unknown, as for a user of a container without an entry in its passwd file
        return Path("/var/lib/shipper")
    return Path(home, ".local/state/shipper")


def require_endpoint(settings: Settings, section: Literal["intake", "report"]) -> EndpointSettings:
    """Return an endpoint section with address, key and token; raise `ConfigError` if something is missing."""
    endpoint: EndpointSettings | None = getattr(settings, section)
    if endpoint is None:
        raise ConfigError(
            f"is missing: write [{section}] with base_url, subscription_key and token (or oauth2); `shipper config "
            "init` writes a template",
            key=section,
        )
    for key in ("subscription_key", "token"):
        if getattr(endpoint, key) is None and not (key == "token" and endpoint.oauth2):
            name = f"{section}_{key}".upper()
            raise ConfigError(f'is missing: write {key} = {{ env = "{name}" }}', key=f"{section}.{key}")
    return endpoint


def secrets_in(section: Section, prefix: str = "") -> Iterator[tuple[str, Secret]]:
    """Yield the key and the value of each secret in a section and the sections in it."""
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Secret):
            yield f"{prefix}{name}", value
        elif isinstance(value, Section):
            yield from secrets_in(value, f"{prefix}{name}.")


def literal_secrets(settings: Settings) -> list[str]:
    """Return the keys of literal secrets, except those of endpoints on this machine."""
    endpoints = {"intake.": settings.intake, "report.": settings.report}
    local = tuple(key for key, at in endpoints.items() if at and is_loopback(urlsplit(at.base_url).hostname or ""))
    literal = [key for key, secret in secrets_in(settings) if isinstance(secret, LiteralSecret)]
    return [key for key in literal if not key.startswith(local)]
