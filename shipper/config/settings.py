"""
The settings: every key with its type, bounds, default and description, and the rules between keys.

`load_settings` is the way in: defaults < file < environment < `--set` < flags. `shipper.config.load`
reads the layers, `shipper.config.secrets` the secrets. The sections can also be built directly
(`BatchSettings(max_events=10)`), but then only the rules between keys are checked, not the bounds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from shipper.config.load import Written, build, read_written
from shipper.config.mapping import FIELDS, FieldSource, field_sources
from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.model.errors import ConfigError
from shipper.model.wire import BODY_HEAD, BODY_TAIL
from shipper.system.addresses import (
    check_address,
    check_host_names,
    check_listen_address,
    checked_base_url,
    is_loopback,
)

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
# What decides about positions, commits and membership; and what has a key of its own.
_OWNED_PROPERTIES: Final = (
    "bootstrap", "metadata.broker.list", "group.", "client.id", "enable.", "auto.", "isolation", "transaction",
    "partition.assignment", "session.timeout", "security.protocol", "sasl.mechanism", "sasl.username", "sasl.oauth",
    "ssl.ca", "ssl.certificate", "ssl.key.", "queued.max", "debug", "plugin", "acks", "request.required",
)  # fmt: skip
_SECRET_PROPERTY: Final = re.compile(r"password|secret|jaas|\.pem$")
ENVELOPE_BYTES: Final = len(BODY_HEAD) + len(BODY_TAIL)

RuleId = Literal[
    "event_id", "ip", "timestamp", "btag", "consumer_id", "brand_id", "country", "currency",
    "username", "customer_currency", "status", "affiliate_id", "state",
]  # fmt: skip


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Base of all sections.

    A rule between keys is checked in `__post_init__`, whose `ConfigError` has the key relative to the section.
    """


class OAuth2Settings(Section, frozen=True):
    """Access tokens from a token endpoint."""

    token_url: Annotated[
        str, Meta(description="address of the token endpoint", examples=["https://login.example.com/token"])
    ]
    client_id: Annotated[str, Meta(description="the client id", examples=["shipper"])]
    client_secret: Annotated[
        Secret | None, Meta(description="the client secret", examples=[{"env": "CLIENT_SECRET"}])
    ] = None
    scope: Annotated[str, Meta(description="scopes to request, separated by blanks")] = ""
    grant: Annotated[Literal["client_credentials", "password"], Meta(description="the grant type (RFC 6749)")] = (
        "client_credentials"
    )
    username: Annotated[str, Meta(description="user of the password grant")] = ""
    password: Annotated[
        Secret | None, Meta(description="password of the password grant", examples=[{"env": "PASSWORD"}])
    ] = None

    def __post_init__(self) -> None:
        if self.grant == "client_credentials" and self.client_secret is None:
            raise ConfigError('is missing: write client_secret = { env = "CLIENT_SECRET" }', key="client_secret")
        for key in ("username", "password"):
            if bool(getattr(self, key)) != (self.grant == "password"):
                what = (
                    "is missing: the password grant needs it"
                    if self.grant == "password"
                    else "is for the password grant"
                )
                raise ConfigError(f'{what}; see oauth2.grant, which is "{self.grant}"', key=key)


class EndpointSettings(Section, frozen=True):
    """An HTTP API behind a gateway: its address and what it asks for."""

    base_url: Annotated[
        str,
        Meta(
            description="scheme, host, port and perhaps the path of a gateway", examples=["https://intake.example.com"]
        ),
    ]
    subscription_key: Annotated[
        Secret | None, Meta(description="the subscription key of the gateway", examples=[{"env": "INTAKE_KEY"}])
    ] = None
    subscription_key_secondary: Annotated[
        Secret | None,
        Meta(description="a second key, used when the first is refused", examples=[{"env": "INTAKE_KEY_2"}]),
    ] = None
    token: Annotated[
        Secret | None, Meta(description="the access token", examples=[{"file": "/run/secrets/intake-token"}])
    ] = None
    oauth2: Annotated[OAuth2Settings | None, Meta(description="a token endpoint, instead of token")] = None
    allow_plaintext: Annotated[bool, Meta(description="allow http:// to other hosts than this one")] = False
    ca_bundle: Annotated[
        Path | None,
        Meta(description="certificates of trusted authorities, PEM", examples=["/etc/ssl/certs/intake-ca.pem"]),
    ] = None
    client_certificate: Annotated[
        Path | None,
        Meta(
            description="client certificate, PEM; presented to the service only", examples=["/etc/shipper/client.pem"]
        ),
    ] = None
    client_key: Annotated[
        Path | None, Meta(description="key of the client certificate, PEM", examples=["/etc/shipper/client.key"])
    ] = None
    tls_minimum_version: Annotated[Literal["1.2", "1.3"], Meta(description="oldest TLS version to accept")] = "1.2"
    proxy: Annotated[
        str | None, Meta(description="HTTP proxy for all requests", examples=["http://proxy.example.com:3128"])
    ] = None
    proxy_username: Annotated[str, Meta(description="user name for the proxy")] = ""
    proxy_password: Annotated[
        Secret | None, Meta(description="password for the proxy", examples=[{"env": "PROXY_PASSWORD"}])
    ] = None

    def __post_init__(self) -> None:
        # Nobody else holds the struct yet, so the tidy form can take the place of the written one.
        base_url = checked_base_url(self.base_url, allow_plaintext=self.allow_plaintext)
        msgspec.structs.force_setattr(self, "base_url", base_url)
        if self.oauth2 is not None:
            if self.token is not None:
                raise ConfigError("cannot be combined with oauth2; remove one of them", key="token")
            check_address(self.oauth2.token_url, key="oauth2.token_url", allow_plaintext=self.allow_plaintext)
        if self.client_key is not None and self.client_certificate is None:
            raise ConfigError("needs client_certificate", key="client_key")
        if self.proxy is not None:
            check_address(self.proxy, key="proxy", allow_plaintext=True, is_whole=False)
        if isinstance(self.proxy_password, SecretReference) and self.proxy_password.command is not None:
            raise ConfigError("cannot come from a command; use env or file", key="proxy_password")
        if bool(self.proxy_username) != (self.proxy_password is not None) or (self.proxy_username and not self.proxy):
            raise ConfigError("needs proxy and proxy_password: set all three, or proxy alone", key="proxy_username")


class ReportSettings(EndpointSettings, frozen=True):
    """Where the daily report is fetched from, and which records belong to its account."""

    media: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="marketing sources that belong to the reconciled account", examples=[[50121, 50377]]),
    ] = ()
    accounts: Annotated[
        Path | None,
        Meta(
            description="CSV file with the columns account, media, affiliate_id: which records belong to which account",
            examples=["/etc/shipper/accounts.csv"],
        ),
    ] = None


class KafkaSettings(Section, frozen=True):
    """A consumer group that is read instead of files; needs the extra `kafka`."""

    brokers: Annotated[
        tuple[str, ...], Meta(description="addresses to begin with, host:port", examples=[["kafka-1.example.com:9093"]])
    ]
    topics: Annotated[tuple[str, ...], Meta(description="names of the topics to read", examples=[["acquisitions"]])]
    group_id: Annotated[
        str,
        Meta(min_length=1, description="name of the consumer group, the same for all members", examples=["shipper"]),
    ]
    group_instance_id: Annotated[
        str, Meta(description="static membership: a name that only this member has; empty = none")
    ] = ""
    group_protocol: Annotated[
        Literal["classic", "consumer"],
        Meta(description="classic: cooperative-sticky; consumer: KIP-848, brokers from 4.0"),
    ] = "classic"
    session_timeout_seconds: Annotated[
        float,
        Meta(ge=0, le=1800, description="classic: a member is removed after so long without a sign of life; 0 = 45"),
    ] = 0.0
    revoke_wait_seconds: Annotated[
        float, Meta(ge=0, le=60, description="how long records of a partition that is revoked may still settle")
    ] = 5.0
    start: Annotated[
        Literal["beginning", "end", "stop"],
        Meta(description="where a partition begins of which the group has no offset; stop: not at all"),
    ] = "beginning"
    on_gap: Annotated[
        Literal["stop", "continue"],
        Meta(description="stop reading a partition whose next records are gone, or continue behind them"),
    ] = "stop"
    tombstones: Annotated[
        Literal["dead_letter", "skip"], Meta(description="what becomes of messages without a value")
    ] = "dead_letter"
    dead_letter_topic: Annotated[str, Meta(description="compacted topic; empty = group_id.dead-letters")] = ""
    ledger_topic: Annotated[str, Meta(description="compacted topic; empty = group_id.ledger")] = ""
    max_fetched_bytes: Annotated[
        int, Meta(ge=1_048_576, le=1_073_741_824, description="memory for messages that were fetched and not read")
    ] = 8_388_608
    security: Annotated[Literal["tls", "plaintext"], Meta(description="how brokers are connected to")] = "tls"
    allow_plaintext: Annotated[bool, Meta(description="allow plaintext to other hosts than this one")] = False
    ca_bundle: Annotated[
        Path | None,
        Meta(description="certificates of trusted authorities, PEM", examples=["/etc/ssl/certs/kafka-ca.pem"]),
    ] = None
    client_certificate: Annotated[
        Path | None, Meta(description="client certificate, PEM", examples=["/etc/shipper/kafka.pem"])
    ] = None
    client_key: Annotated[
        Path | None, Meta(description="key of the client certificate, PEM", examples=["/etc/shipper/kafka.key"])
    ] = None
    sasl_mechanism: Annotated[
        Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"],
        Meta(description="how to authenticate; empty = not"),
    ] = ""
    username: Annotated[str, Meta(description="user for SASL")] = ""
    password: Annotated[
        Secret | None, Meta(description="password for SASL", examples=[{"file": "/run/secrets/kafka"}])
    ] = None
    token: Annotated[
        Secret | None,
        Meta(
            description="for OAUTHBEARER: a JWT with an expiry, fetched again before it",
            examples=[{"command": ["get-token", "kafka"]}],
        ),
    ] = None
    client: Annotated[
        dict[str, str | int | bool],
        Meta(description="other properties of librdkafka, without secrets", examples=[{"client.rack": "eu-west-1a"}]),
    ] = {}

    def __post_init__(self) -> None:
        for key in ("brokers", "topics"):
            if not all(getattr(self, key)) or not getattr(self, key):
                raise ConfigError("must name at least one, and no empty name", key=key)
        if pattern := next((topic for topic in self.topics if not _TOPIC.fullmatch(topic)), ""):
            raise ConfigError(f"{pattern!r} is not the name of a topic; patterns are not supported", key="topics")
        self._check_security()
        if self.group_protocol == "consumer" and self.session_timeout_seconds:
            raise ConfigError(
                'is for group_protocol = "classic"; with "consumer", the brokers decide', key="session_timeout_seconds"
            )
        for name in self.client:
            if name.startswith(_OWNED_PROPERTIES):
                raise ConfigError("is shipper's own business: remove it", key=f"client.{name}")
            if _SECRET_PROPERTY.search(name):
                raise ConfigError("would be a secret in the settings, which is not supported", key=f"client.{name}")

    def _check_security(self) -> None:
        remote = [each for each in self.brokers if not is_loopback(each.rpartition(":")[0].strip("[]"))]
        if self.security == "plaintext" and remote and not self.allow_plaintext:
            raise ConfigError(
                f'"plaintext" would send records in clear text to {remote[0]}; use "tls", or, if the way there is '
                "protected otherwise, set allow_plaintext = true",
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
            raise ConfigError("has a token, and no username and password", key="sasl_mechanism")

    @property
    def letters(self) -> str:
        """The topic of the dead letters."""
        return self.dead_letter_topic or f"{self.group_id}.dead-letters"

    @property
    def ledger(self) -> str:
        """The topic of the ledger."""
        return self.ledger_topic or f"{self.group_id}.ledger"


class InputSettings(Section, frozen=True):
    """Which files are read, and how."""

    include: Annotated[tuple[str, ...], Meta(description="globs of the files to read")] = ()
    exclude: Annotated[tuple[str, ...], Meta(description="globs of files to skip")] = ()
    format: Annotated[
        Literal["auto", "ndjson", "csv", "batch"],
        Meta(description="format of the input; auto: detected from the first bytes of each file"),
    ] = "auto"
    csv_delimiter: Annotated[
        str, Meta(max_length=1, description="delimiter of CSV; empty = detected from the header")
    ] = ""
    start: Annotated[
        Literal["beginning", "end"],
        Meta(description="where `run` begins in files that exist when their pattern is first used; else beginning"),
    ] = "beginning"
    max_record_bytes: Annotated[
        int, Meta(ge=1, le=67_108_864, description="maximum size of a record; a longer one becomes a dead letter")
    ] = 262_144
    poll_interval_seconds: Annotated[float, Meta(gt=0, le=3600, description="interval between checks of the files")] = (
        1.0
    )
    rotate_wait_seconds: Annotated[
        float, Meta(ge=0, le=86_400, description="how long a renamed file is watched for late writes")
    ] = 5.0
    on_complete: Annotated[
        Literal["keep", "delete", "move"],
        Meta(description="what to do with a file whose records are all settled; in `run`, once it was rotated"),
    ] = "keep"
    completed_directory: Annotated[
        Path | None, Meta(description="where on_complete = move moves files", examples=["/var/log/app/shipped"])
    ] = None
    kafka: Annotated[KafkaSettings | None, Meta(description="a consumer group to read instead of files")] = None

    def __post_init__(self) -> None:
        if not self.csv_delimiter.isascii() or self.csv_delimiter in {'"', "\r", "\n", "\0"}:
            raise ConfigError(
                f"{self.csv_delimiter!r} is not a delimiter: it must be one ASCII character other than a quote or a "
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
        Meta(description="normalize: correct unambiguous deviations; strict: send as read, or refuse"),
    ] = "normalize"
    relax: Annotated[tuple[RuleId, ...], Meta(description="rules to reduce to a check of the field's type")] = ()
    unknown_fields: Annotated[
        Literal["drop", "reject", "keep"], Meta(description="what to do with a field that the service does not know")
    ] = "drop"
    event_id: Annotated[
        Literal["require", "derive"],
        Meta(description="require: a record without EventId becomes a dead letter; derive: compute it"),
    ] = "require"
    event_id_fields: Annotated[
        tuple[str, ...], Meta(description="fields from which an EventId is derived; empty = BrandID, ConsumerID")
    ] = ()
    dedupe_window: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000_000,
            description="number of accepted EventIds to remember for recognising duplicates; 0 = off",
        ),
    ] = 1_000_000
    mistake_limit: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000_000,
            description="number of consecutive records that break the same rule after which the input is held back; "
            "0 = never",
        ),
    ] = 1_000
    max_future_seconds: Annotated[
        int, Meta(ge=0, le=86_400 * 366, description="how far in the future a Timestamp may be")
    ] = 300
    assume_timezone: Annotated[
        str | None, Meta(description="time zone of Timestamps without one", examples=["Europe/Malta"])
    ] = None
    mapping: Annotated[
        dict[str, Any],
        Meta(
            description="source of each field: a path, or a table",
            examples=[{"IP": "client.ip", "ConsumerStatus": {"const": "Verified"}}],
        ),
    ] = {}
    allowed_statuses: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...], Meta(description="valid ConsumerStatus values; [] = all")
    ] = ()

    def __post_init__(self) -> None:
        _ = self.field_sources
        if self.assume_timezone is not None:
            _check_timezone(self.assume_timezone)
        for field in self.event_id_fields:
            if field not in FIELDS or field == "EventId":
                raise ConfigError(
                    f"{field!r} is not a field to derive an EventId from; there are {', '.join(FIELDS[1:])}",
                    key="event_id_fields",
                )
        if self.event_id_fields and self.event_id != "derive":
            raise ConfigError('needs records.event_id = "derive"', key="event_id_fields")

    @property
    def field_sources(self) -> dict[str, FieldSource]:
        """The parsed mapping."""
        return field_sources(self.mapping)

    @property
    def passes_wire_form(self) -> bool:
        """Whether each record in the strict wire form is valid, and sent as it stands."""
        return not (self.relax or self.allowed_statuses or self.mapping or self.unknown_fields == "keep")


class BatchSettings(Section, frozen=True):
    """When a batch closes: first of the three limits."""

    max_events: Annotated[int, Meta(ge=1, le=1_000_000, description="events per request")] = 1000
    max_bytes: Annotated[int, Meta(ge=1, le=268_435_456, description="bytes per request, uncompressed")] = 1_000_000
    linger_seconds: Annotated[
        float, Meta(ge=0, le=3600, description="age of its first event at which an incomplete batch is sent")
    ] = 1.0
    unique_consumers: Annotated[bool, Meta(description="at most one event per ConsumerID in a batch")] = True


class DeliverySettings(Section, frozen=True):
    """How batches are sent, and what happens when the service refuses them or is unavailable."""

    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Literal["adaptive"],
        Meta(description="requests in flight; adaptive: as many as the service handles well"),
    ] = "adaptive"
    max_concurrency: Annotated[int, Meta(ge=1, le=256, description="upper limit of adaptive concurrency")] = 64
    connect_timeout_seconds: Annotated[float, Meta(gt=0, le=600, description="time limit for opening a connection")] = (
        10.0
    )
    read_timeout_seconds: Annotated[float, Meta(gt=0, le=3600, description="time limit for an answer")] = 60.0
    connection_max_age_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="maximum age of a connection, so that DNS changes take effect")
    ] = 300.0
    retry_initial_seconds: Annotated[float, Meta(gt=0, le=3600, description="upper limit of the first backoff")] = 0.5
    retry_max_seconds: Annotated[float, Meta(gt=0, le=86_400, description="upper limit of every backoff")] = 60.0
    give_up_after_seconds: Annotated[
        float, Meta(ge=0, le=31_536_000, description="one-shot modes end after this time without an acceptance")
    ] = 900.0
    fail_fast: Annotated[
        bool,
        Meta(
            description="one-shot modes end within 10 s if the set-up is wrong (token, key, address, TLS, unknown "
            "host) and nothing was accepted; `run` never does"
        ),
    ] = True
    poison_limit: Annotated[
        int, Meta(ge=1, le=1_000_000, description="consecutive refused records at which delivery pauses")
    ] = 50
    rate_limit_events_per_second: Annotated[
        float, Meta(ge=0, description="maximum number of events per second; 0 = no limit")
    ] = 0.0
    drain_timeout_seconds: Annotated[
        float, Meta(ge=0, le=86_400, description="time limit for settling what was read, after a stop signal")
    ] = 25.0
    drain: Annotated[
        Literal["input", "until_idle"],
        Meta(description="input: a stop ends reading at once; until_idle: when no new input arrives"),
    ] = "input"
    drain_idle_seconds: Annotated[
        float,
        Meta(gt=0, le=3600, description="time without new input after which reading ends, for drain = until_idle"),
    ] = 5.0
    traceparent: Annotated[bool, Meta(description="send a traceparent header with every attempt")] = True
    compression: Annotated[Literal["none", "gzip"], Meta(description="Content-Encoding of requests")] = "none"

    def __post_init__(self) -> None:
        if self.retry_initial_seconds > self.retry_max_seconds:
            raise ConfigError(
                f"{self.retry_initial_seconds:g} is more than delivery.retry_max_seconds, "
                f"which is {self.retry_max_seconds:g}",
                key="retry_initial_seconds",
            )

    @property
    def senders(self) -> int:
        """How many senders to start: the fixed concurrency, or the upper end of the adaptive one."""
        return self.concurrency if isinstance(self.concurrency, int) else self.max_concurrency


class StateSettings(Section, frozen=True):
    """Where the state is kept between two runs."""

    directory: Annotated[
        Path, Meta(description="checkpoints, dead letters and spool; one directory per running shipper")
    ] = msgspec.field(default_factory=lambda: default_state_directory(os.environ))
    commit_interval_seconds: Annotated[
        float,
        Meta(
            ge=0.001,
            le=60,
            description="maximum interval between commits of the state; a large amount is saved earlier",
        ),
    ] = 0.5
    dead_letter_max_bytes: Annotated[
        int, Meta(ge=1, description="quota of the dead letters; when it is reached, delivery pauses")
    ] = 1_073_741_824
    dead_letter_retention_days: Annotated[
        float, Meta(ge=0, le=36_500, description="age at which dead letters are deleted; 0 = never")
    ] = 0.0
    ledger_retention_days: Annotated[
        float, Meta(ge=0, le=36_500, description="age at which the ledger's counts of a day are deleted; 0 = never")
    ] = 0.0


class SpoolSettings(Section, frozen=True):
    """Where standard input is kept until it is settled."""

    max_bytes: Annotated[
        int, Meta(ge=1, description="maximum size of the spool; when it is reached, reading waits")
    ] = 1_073_741_824
    segment_bytes: Annotated[int, Meta(ge=1, description="size of a segment file")] = 16_777_216
    fsync: Annotated[
        Literal["always", "interval", "never"], Meta(description="when segments are synchronised to the disk")
    ] = "interval"
    fsync_interval_seconds: Annotated[float, Meta(gt=0, le=3600, description="interval for fsync = interval")] = 1.0

    def __post_init__(self) -> None:
        if self.segment_bytes > self.max_bytes:
            raise ConfigError(
                f"{self.segment_bytes} is more than spool.max_bytes, which is {self.max_bytes}", key="segment_bytes"
            )


class LogSettings(Section, frozen=True):
    """Diagnostics, on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="lowest level to log")] = "info"
    format: Annotated[
        Literal["auto", "json", "console"], Meta(description="auto: console on a terminal, else JSON lines")
    ] = "auto"


class AdminSettings(Section, frozen=True):
    """Metrics, health and status over HTTP, while `shipper run` runs."""

    listen: Annotated[str, Meta(description="host:port to listen on; empty = off", examples=["127.0.0.1:9464"])] = (
        "127.0.0.1:9464"
    )

    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="host names that requests may use, besides localhost, IP addresses and that of `admin.listen`",
            examples=[["shipper.monitoring.svc"]],
        ),
    ] = ()

    stuck_seconds: Annotated[
        float,
        Meta(
            ge=0.5, le=3600, description="time on one piece of work after which a stage is stuck, and `/healthz` fails"
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_listen_address(self.listen, key="listen")
        check_host_names(self.hosts, key="hosts")


class Settings(Section, frozen=True):
    """All sections. `intake` and `report` are None until one of their keys is written."""

    intake: Annotated[EndpointSettings | None, Meta(description="where events are sent")] = None
    report: Annotated[ReportSettings | None, Meta(description="where the daily report comes from")] = None
    input: InputSettings = msgspec.field(default_factory=InputSettings)
    records: RecordsSettings = msgspec.field(default_factory=RecordsSettings)
    batch: BatchSettings = msgspec.field(default_factory=BatchSettings)
    delivery: DeliverySettings = msgspec.field(default_factory=DeliverySettings)
    state: StateSettings = msgspec.field(default_factory=StateSettings)
    spool: SpoolSettings = msgspec.field(default_factory=SpoolSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)
    admin: AdminSettings = msgspec.field(default_factory=AdminSettings)

    def __post_init__(self) -> None:
        # Otherwise the largest permitted record would fit into no request and could never leave.
        least = self.input.max_record_bytes + ENVELOPE_BYTES
        if self.batch.max_bytes < least:
            raise ConfigError(
                f"{self.batch.max_bytes} is too small for the longest record: it takes {least}, "
                f"which is input.max_record_bytes {self.input.max_record_bytes} + {ENVELOPE_BYTES} around it",
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
    Read the settings from everywhere they can be written, the later source going before the earlier one.

    Args:
        config_path: The file that was named; None = the usual places, where there need not be one.
        environ: Environment variables: `SHIPPER__SECTION__KEY`, `SHIPPER_CONFIG`, `XDG_STATE_HOME`, `HOME`.
        overrides: Texts `section.key=value`, from `--set`.
        flags: Values of flags by dotted key; None as a value = the flag was not given.
    Raises:
        ConfigError: The first thing that is wrong, with its key and where it was written.
    """
    written = read_written(Settings, config_path=config_path, environ=environ, overrides=overrides, flags=flags or {})
    return settings_from(written, environ=environ)


def settings_from(written: Mapping[str, Written], *, environ: Mapping[str, str]) -> Settings:
    """Build the settings from what was written; the second half of `load_settings`."""
    if "state.directory" not in written:
        # Not part of `written`: a default was not written by anybody.
        written = {**written, "state.directory": Written(default_state_directory(environ), source="default")}
    return build(Settings, written)


def _check_timezone(name: str) -> None:
    from shipper.config.zones import time_zone  # needed by few

    time_zone(name, key="assume_timezone")


def default_state_directory(environ: Mapping[str, str]) -> Path:
    """
    Choose where state is kept when nothing is written.

    Returns:
        `$XDG_STATE_HOME/shipper`; else `/var/lib/shipper` for root, `~/.local/state/shipper` for others.
    """
    base = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        return Path(base, "shipper")
    if os.geteuid() == 0:
        return Path("/var/lib/shipper")
    return Path(environ.get("HOME") or os.path.expanduser("~"), ".local/state/shipper")


def require_endpoint(settings: Settings, section: Literal["intake", "report"]) -> EndpointSettings:
    """
    Return a section that a command cannot do without, with address, key and token present.

    Raises:
        ConfigError: Names what is missing and how to write it.
    """
    endpoint: EndpointSettings | None = getattr(settings, section)
    if endpoint is None:
        raise ConfigError(
            f"is missing: write [{section}] with base_url, subscription_key and token (or oauth2); `shipper config "
            "init` writes a file to start from",
            key=section,
        )
    for key in ("subscription_key", "token"):
        if getattr(endpoint, key) is None and not (key == "token" and endpoint.oauth2):
            name = f"{section}_{key}".upper()
            raise ConfigError(f'is missing: write {key} = {{ env = "{name}" }}', key=f"{section}.{key}")
    return endpoint


def literal_secrets(settings: Settings) -> list[str]:
    """Return the keys of secrets that are written in the settings themselves, but for what stays on this machine."""
    found: list[str] = []

    def visit(section: Struct, prefix: str) -> None:
        for name in section.__struct_fields__:
            value = getattr(section, name)
            if isinstance(value, LiteralSecret):
                found.append(f"{prefix}{name}")
            elif isinstance(value, Section) and not (
                isinstance(value, EndpointSettings) and is_loopback(urlsplit(value.base_url).hostname or "")
            ):
                visit(value, f"{prefix}{name}.")

    visit(settings, "")
    return found
