"""Settings from a file, the environment and the command line are valid, or an error names the key."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from shipper.config.schema import leaves
from shipper.config.settings import Settings, load_settings
from shipper.model.errors import ConfigError
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator

_CANARY: Final = "canary4711"  # stands for a secret
_KEYS: Final = [leaf.key for leaf in leaves(Settings)]
_SECRETS: Final = [leaf.key for leaf in leaves(Settings) if leaf.is_secret]
# The keys of secrets; the value of any other key is not a secret.
_NAMES: Final = "|".join(key.rpartition(".")[2] for key in _SECRETS)
_AS_SECRET: Final = re.compile(rf'(?m)^(?:SHIPPER__|--set )?[\w.]*(?i:{_NAMES})\s*=\s*"?{_CANARY}"?$')


@cache
def _memory() -> int:
    return os.memfd_create("settings")


def check_settings(data: bytes) -> object:
    """Check that the result is valid settings or a `ConfigError` with the key, and that neither shows a secret."""
    text, environment, overrides, *_ = [*data.split(b"\x1e", 2), b"", b""]
    os.ftruncate(_memory(), 0)
    os.pwrite(_memory(), text, 0)
    path = Path(f"/proc/self/fd/{_memory()}")
    environ = dict(
        pair for line in environment.decode("utf-8", "replace").split("\n") if len(pair := line.split("=", 1)) == 2
    )
    written = data.decode("utf-8", "replace").replace("\x1e", "\n")
    hides = _CANARY not in _AS_SECRET.sub("", written)
    try:
        settings = load_settings(
            config_path=path,
            environ=environ,
            overrides=[
                line.removeprefix("--set ") for line in overrides.decode("utf-8", "replace").split("\n") if line
            ],
        )
    except ConfigError as error:
        return _check_error(error, hides=hides)
    assert not (hides and _CANARY in repr(settings)), "the settings show a secret"
    _check_bounds(settings)
    return tuple(sorted({type(value).__name__ for value in msgspec.structs.astuple(settings)})), settings.intake is None


def _check_error(error: ConfigError, *, hides: bool) -> str:
    assert error.key or error.source, "the error does not name the key"
    assert error.message
    assert not (hides and _CANARY in f"{error} {error.__cause__!r}"), "the error shows a secret"
    return re.sub(r"\d+", "0", error.message)[:50]


def _check_bounds(settings: Settings) -> None:
    assert 1 <= settings.delivery.senders <= 256
    assert settings.delivery.retry_initial_seconds <= settings.delivery.retry_max_seconds
    assert 1 <= settings.spool.segment_bytes <= settings.spool.max_bytes
    assert settings.input.max_record_bytes < settings.batch.max_bytes
    assert settings.state.directory.is_absolute()
    assert len(settings.input.csv_delimiter.encode()) <= 1, "a delimiter must be a single character"
    for section in msgspec.structs.astuple(settings):
        values: tuple[Any, ...] = msgspec.structs.astuple(section) if section is not None else ()
        assert all(math.isfinite(value) for value in values if isinstance(value, float))


_FILES: Final = [path.read_bytes() for path in sorted((Path(__file__).parents[2] / "config").glob("*.toml"))]
_TOML: Final = (
    b'[intake]\nbase_url = "https://intake.example.com"\nsubscription_key = "%(c)b"\ntoken = "%(c)b"\n\x1e\x1e',
    b'[intake]\nbase_url = "https://intake.example.com"\n[intake.oauth2]\ntoken_url = "https://l.example.com/t"\n'
    b'client_id = "a"\nclient_secret = "%(c)b"\n\x1e\x1e',
    b'[report]\nbase_url = "http://127.0.0.1:80"\ntoken = { command = ["a", "b"] }\nproxy = "http://p.example.com:1"\n'
    b'proxy_username = "u"\nproxy_password = { env = "X" }\n\x1e\x1e',
    b'[records]\nmode = "strict"\nrelax = ["ip"]\nevent_id = "derive"\nevent_id_fields = ["IP"]\n'
    b'assume_timezone = "UTC"\n'
    b'[records.mapping]\nIP = "a.b"\nBTag = { template = "{a}_{b}" }\nUsername = { const = 7 }\n\x1e\x1e',
    b"\x1eSHIPPER__BATCH__MAX_EVENTS=500\nSHIPPER__INTAKE__BASE_URL=https://x.example.com\nSHIPPER__INTAKE__TOKEN=%(c)b"
    b'\nSHIPPER__INPUT__INCLUDE=["a", "b"]\x1e--set delivery.concurrency=adaptive\n--set batch.linger_seconds=1e3',
    b"\x1eSHIPPER__INTAKE__TOKEN__FILE=/a\nSHIPPER__INTAKE__TOKEN__ALLOW_GROUP_READABLE=true"
    b"\x1e--set admin.listen=[::1]:80",
    b'\x1e\x1e--set intake.token=%(c)b\n--set intake.base_url="x"\n'
    b'--set records.mapping.IP={ from = "a", values = { UK = "GB" } }',
)
_SEEDS: Final = [
    *(text % {b"c": _CANARY.encode()} for text in _TOML),
    *(text + b"\x1e\x1e" for text in _FILES if len(text) < 1500),
]
_VALUES: Final = (
    *("true", "0", "-1", "1e400", "nan", "inf", "9" * 40, "0x10", "1_000", '""', '"x"', "''", "[]", "[[]]", "{}"),
    "{ env = 1 }",
    *('{ file = "/x" }', "2026-01-01", '"adaptive"', '"http://x"', '"https://u:p@x"', '"[::1]:80"'),
    *('"127.0.0.1:99999"', '"~"'),
    *('"{"', '"{a!r}"', '"../../etc/passwd"', '"\\u0000"', '["ip", "ip"]', '"Europe/../x"', "1e-300", '"\u0663"'),
    *('"\\t"', '";"'),
)

TARGETS: Final = (
    Target(
        "settings",
        check_settings,
        _SEEDS,
        mutator(
            words=[
                *(b"\n" + key.rpartition(".")[2].encode() + b" = " for key in _KEYS),
                *(b"\n--set " + key.encode() + b"=" + value.encode() for key in _KEYS for value in _VALUES[:12]),
                *(b"\nSHIPPER__" + key.upper().replace(".", "__").encode() + b"=" for key in _KEYS),
                *(value.encode() + b"\n" for value in _VALUES * 4),
                *(b"\n[" + key.rpartition(".")[0].encode() + b"]\n" for key in _KEYS),
                *(b"\x1e", b"\n", b'"""', b"'''", b"[[input]]", b"[", b"# ", b"a.b.c = 1\n", b"\xff", b"\xef\xbb\xbf"),
                b"\\",
            ]
        ),
        share=0.2,
    ),
)
