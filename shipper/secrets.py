"""
Secrets as the settings hold them: references that are resolved when they are used, or a masked literal.

    token = { env = "INTAKE_TOKEN" }                    an environment variable
    token = { file = "/run/secrets/intake-token" }      a file that only its owner can read
    token = "…"                                         the secret itself; works, with a warning

Nothing in this module shows a secret: not in a `repr`, not in an error, not in a traceback's message.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from shipper.errors import ConfigError

MAX_SECRET_BYTES: Final = 65_536
MASK: Final = "***"

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FORMS: Final = 'a table such as { env = "NAME" } or { file = "/path" }'


class Secret:
    """Base of the two forms. A plain class, so that msgspec hands every form to `decode_secret`."""

    __slots__ = ()


class LiteralSecret(Secret):
    """A secret that stands in the settings themselves."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the secret; only `resolve_secret` should have to ask."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralSecret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"LiteralSecret({MASK})"


class SecretReference(Secret, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a secret is to be found; exactly one of `env`, `file` and `command`."""

    env: Annotated[str, Meta(description="name of an environment variable")] | None = None
    file: Annotated[str, Meta(description="path of a file, mode 0600 or stricter")] | None = None
    command: Annotated[tuple[str, ...], Meta(description="program and arguments that print it")] | None = None
    allow_group_readable: Annotated[bool, Meta(description="accept a file that its group can read")] = False

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.env, self.file, self.command)) != 1:
            raise ValueError(f"a secret has exactly one of env, file and command: {_FORMS}")
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            # Not shown: somebody who writes the secret itself in this place must not find it in a log.
            raise ValueError("env must be the name of an environment variable, not the secret")
        if self.allow_group_readable and self.file is None:
            raise ValueError("allow_group_readable belongs to file")


def decode_secret(raw: object) -> Secret:
    """
    Make a secret from what was written: a string or a table.

    Raises:
        ValueError: It is neither, or not exactly one form. The message does not show what was written.
    """
    if isinstance(raw, Secret):
        return raw
    if isinstance(raw, str):
        return LiteralSecret(raw)
    if not isinstance(raw, Mapping):
        raise ValueError(f"a secret is {_FORMS}")
    unknown = [str(name) for name in raw if name not in SecretReference.__struct_fields__]
    if unknown:
        raise ValueError(f"a secret has no key {unknown[0]!r}: expected {_FORMS}")
    try:
        return msgspec.convert(raw, SecretReference, strict=False)  # text from the environment: "true"
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc).replace("$.", "")) from None


def resolve_secret(secret: Secret, *, key: str, environ: Mapping[str, str] | None = None) -> str:
    """
    Fetch a secret from where it is kept, now.

    Args:
        secret: The setting.
        key: The setting's dotted name, for errors.
        environ: Environment variables; those of the process by default.
    Returns:
        The secret, without trailing line ends; fit for a header: Latin-1, no control characters, not empty.
    Raises:
        ConfigError: The variable or file is missing, the file is open to others, or the value is unfit.
    """
    if isinstance(secret, LiteralSecret):
        return _fit_for_a_header(secret.reveal(), "the literal", key)
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        value = (os.environ if environ is None else environ).get(secret.env)
        if value is None:
            raise ConfigError(f"environment variable {secret.env} is not set", key=key)
        return _fit_for_a_header(value, f"environment variable {secret.env}", key)
    if secret.file is not None:
        value = _read_private(secret.file, secret.allow_group_readable, key)
        return _fit_for_a_header(value, secret.file, key)
    raise ConfigError("command is not available yet; use env or file", key=key)


def _read_private(path: str, allow_group_readable: bool, key: str) -> str:
    """Read a secret's file after a look at the mode of exactly the file that was opened."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer, perhaps for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file", key=key)
            _check_mode(path, stat.S_IMODE(mode), allow_group_readable, key)
            with open(descriptor, "rb", closefd=False) as file:  # `open` would leak the descriptor of a directory
                raw = file.read(MAX_SECRET_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(f"cannot read {path!r}: {reason}", key=key) from exc
    if len(raw) > MAX_SECRET_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SECRET_BYTES} bytes: not a secret", key=key)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", key=key) from None  # the cause holds the bytes


def _check_mode(path: str, mode: int, allow_group_readable: bool, key: str) -> None:
    if mode & 0o007:
        raise ConfigError(f"{path} is open to every user (mode {mode:04o}); run: chmod 600 {path}", key=key)
    if mode & 0o020 or (mode & 0o040 and not allow_group_readable):
        raise ConfigError(
            f"{path} is open to its group (mode {mode:04o}); run: chmod 600 {path}, "
            "or, if the group may read it, set allow_group_readable = true beside file",
            key=key,
        )


def _fit_for_a_header(value: str, origin: str, key: str) -> str:
    value = value.rstrip("\r\n")
    if not value:
        raise ConfigError(f"{origin} is empty", key=key)
    # Checked here, as the HTTP library would put the offending value into its error.
    if _CONTROL.search(value):
        raise ConfigError(f"the secret from {origin} holds a control character or line break", key=key)
    if value != value.strip():
        raise ConfigError(f"the secret from {origin} begins or ends with a blank", key=key)
    if not all(ord(character) < 256 for character in value):
        raise ConfigError(f"the secret from {origin} holds a character outside Latin-1", key=key)
    return value
