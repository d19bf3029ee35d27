"""
Secrets in the settings: references that are resolved when used, or masked literals.

    token = { env = "INTAKE_TOKEN" }                    an environment variable
    token = { file = "/run/secrets/intake-token" }      a file that only its owner can read
    token = { command = ["print-token", "intake"] }     a program that prints it; no shell is involved
    token = "…"                                         the secret itself; works, with a warning

This module never shows a secret: not in a `repr`, an error or a traceback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from subprocess import DEVNULL
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from shipper.model.errors import ConfigError
from shipper.system.programs import minimal_environment, signal_group

MAX_SECRET_BYTES: Final = 65_536
COMMAND_LIMIT_S: Final = 30.0
MASK: Final = "***"

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A variable, path or program is shown in errors unless it could be the secret itself, in the wrong place.
_VARIABLE_SHOWN: Final = re.compile(r"(?![A-F0-9_]{12})[A-Z_][A-Z0-9_]{0,63}")
_PATH_SHOWN: Final = re.compile(r"[~/.][^=]*")
_PROGRAM_SHOWN: Final = re.compile(r"(?![a-f0-9]{12})[a-z][a-z0-9_.-]{0,31}")
_CREDENTIALS: Final = "/run/credentials/"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FORMS: Final = 'a table such as { env = "NAME" } or { file = "/path" }'


class Secret:
    """Base of both forms. A plain class, so that msgspec passes every form to `decode_secret`."""

    __slots__ = ()


@dataclass(frozen=True, repr=False)
class LiteralSecret(Secret):
    """A literal secret in the settings; its source is the path of a file, an environment variable or a flag."""

    _value: str
    source: str = field(default="", compare=False)

    def reveal(self) -> str:
        """Return the secret; only for `resolve_secret`."""
        return self._value

    def __repr__(self) -> str:
        return f"LiteralSecret({MASK})"


class SecretReference(Secret, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The location of a secret; exactly one of `env`, `file` and `command`."""

    env: Annotated[str, Meta(description="environment variable")] | None = None
    file: Annotated[str, Meta(description="file, mode 0600 or stricter")] | None = None
    command: Annotated[tuple[str, ...], Meta(description="program that prints it, with its arguments")] | None = None
    allow_group_readable: Annotated[bool, Meta(description="accept a file that its group can read")] = False

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.env, self.file, self.command)) != 1:
            raise ValueError(f"a secret must have exactly one of env, file and command: {_FORMS}")
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            # Not shown, as it may be the secret itself, which must not appear in logs.
            raise ValueError("env must be the name of an environment variable, not the secret")
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError('command must be a program and its arguments, such as ["print-token", "intake"]')
        if self.allow_group_readable and self.file is None:
            raise ValueError("allow_group_readable applies only to file")

    def shown(self) -> dict[str, object]:
        """Return the fields that are set; arguments of a command, and names that could be the secret, are masked."""
        fields: dict[str, object] = {}
        if self.env is not None:
            fields["env"] = self.env if _VARIABLE_SHOWN.fullmatch(self.env) else MASK
        if self.file is not None:
            fields["file"] = self.file if _PATH_SHOWN.fullmatch(self.file) else MASK
        if self.command is not None:
            program, *arguments = self.command
            fields["command"] = [program if _is_program_shown(program) else MASK, *(MASK for _ in arguments)]
        return fields | ({"allow_group_readable": True} if self.allow_group_readable else {})


def decode_secret(raw: object) -> Secret:
    """Convert a string or a table to a secret; the message of a `ValueError` does not show the value."""
    if isinstance(raw, Secret):
        return raw
    if isinstance(raw, str):
        return LiteralSecret(raw)
    if not isinstance(raw, Mapping):
        raise ValueError(f"a secret must be {_FORMS}")
    if any(name not in SecretReference.__struct_fields__ for name in raw):
        raise ValueError(f"unknown key for a secret: expected {_FORMS}")
    try:
        return msgspec.convert(raw, SecretReference, strict=False)  # text from the environment: "true"
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc).replace("$.", "")) from None


def resolve_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> str:
    """
    Resolve a secret now, except the form `command`, which needs `fetch_secret`.

    Args:
        key: The dotted key of the setting, for errors.
        is_for_header: The secret is sent in a header, so it must be Latin-1.
    Returns:
        The secret without trailing line breaks; not empty, without control characters and surrounding whitespace. A
        token does not begin with `Bearer`.
    Raises:
        ConfigError: The variable or file does not exist, the file is accessible to others or does not belong to this
            user or root, or the value is invalid.
    """
    if isinstance(secret, LiteralSecret):
        return _validate(secret.reveal(), "the literal", key, is_for_header)
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        value = os.environ.get(secret.env)
        if value is None:
            name = secret.env if _VARIABLE_SHOWN.fullmatch(secret.env) else _mask(secret.env)
            raise ConfigError(f"environment variable {name} is not set", key=key)
        return _validate(value, f"environment variable {secret.env}", key, is_for_header)
    if secret.file is not None:
        value = _read_private(secret.file, secret.allow_group_readable, key)
        return _validate(value, secret.file, key, is_for_header)
    raise ConfigError("command is not available here; use env or file", key=key)


def check_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> None:
    """Raise the `ConfigError` of `fetch_secret`, as far as possible without running a command."""
    if not isinstance(secret, SecretReference) or secret.command is None:
        resolve_secret(secret, key=key, is_for_header=is_for_header)
    elif shutil.which(secret.command[0]) is None:
        raise ConfigError(f"program {_shown_program(secret.command[0])} cannot be found or executed", key=key)


async def fetch_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> str:
    """
    Resolve a secret of any form without blocking the event loop; otherwise as `resolve_secret`.

    Raises:
        ConfigError: Also if a command does not exist, fails, takes longer than 30 s, or prints no secret. Its arguments
            and output are not shown.
    """
    import anyio.to_thread  # imported lazily, so that other commands start faster

    if not isinstance(secret, SecretReference) or secret.env is not None:
        return resolve_secret(secret, key=key, is_for_header=is_for_header)
    if secret.command is None:
        return await anyio.to_thread.run_sync(partial(resolve_secret, secret, key=key, is_for_header=is_for_header))
    program = secret.command[0]
    try:
        with anyio.fail_after(COMMAND_LIMIT_S):
            output, exit_code = await _run(secret.command, key)
    except TimeoutError:
        raise ConfigError(f"{program} did not end within {COMMAND_LIMIT_S:g} s", key=key) from None
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the arguments
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else type(exc).__name__
        raise ConfigError(f"cannot run {_shown_program(program)}: {reason}", key=key) from None
    if exit_code != 0:
        hint = _systemd_hint(secret) or "run it by hand to see why"
        raise ConfigError(f"{program} failed with exit code {exit_code}; {hint}", key=key)
    origin = f"the output of {program}"
    return _validate(_decode(output, origin, key), origin, key, is_for_header)


async def _run(command: Sequence[str], key: str) -> tuple[bytes, int]:
    """Run a program; return its output and exit code."""
    import anyio

    with anyio.CancelScope(shield=True):  # otherwise a cancellation could lose the new process
        # In a new session, so that its children can be killed, too. Its stderr may contain secrets.
        process = await anyio.open_process(
            command, stdin=DEVNULL, stderr=DEVNULL, env=minimal_environment(os.environ), start_new_session=True
        )
    assert process.stdout is not None
    output = b""
    async with process:
        try:
            async for part in process.stdout:
                output += part
                if len(output) > MAX_SECRET_BYTES:
                    raise ConfigError(
                        f"{command[0]} printed more than {MAX_SECRET_BYTES} bytes, too much for a secret", key=key
                    )
            return output, await process.wait()
        finally:
            signal_group(process, signal.SIGKILL)


def _read_private(path: str, allow_group_readable: bool, key: str) -> str:
    """Read a secret from a file after checking the mode of the opened file."""
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a regular file", key=key)
            _check_access(path, status, allow_group_readable, key)
            with open(descriptor, "rb", closefd=False) as file:  # `open` would leak the descriptor of a directory
                raw = file.read(MAX_SECRET_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        name = repr(path) if _PATH_SHOWN.fullmatch(path) else _mask(path)
        hint = _systemd_hint(SecretReference(file=path))
        # Not chained, as the cause shows the path.
        raise ConfigError(f"cannot read {name}: {reason}{'; ' if hint else ''}{hint}", key=key) from None
    if len(raw) > MAX_SECRET_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SECRET_BYTES} bytes, too much for a secret", key=key)
    return _decode(raw, path, key)


def _systemd_hint(secret: SecretReference) -> str:
    """Return what to do if a secret is a credential of a systemd unit; "" otherwise."""
    program, *arguments = secret.command or ("",)
    if os.path.basename(program) == "systemd-creds":
        name = arguments[-1] if arguments else ""
    elif (secret.file or "").startswith(_CREDENTIALS):
        name = os.path.basename(secret.file or "")
    else:
        return ""
    name = name if _PROGRAM_SHOWN.fullmatch(name) else "NAME"
    if os.environ.get("CREDENTIALS_DIRECTORY"):
        return f"the unit needs LoadCredential={name}"
    return (
        "the credentials of a systemd unit exist only inside it ($CREDENTIALS_DIRECTORY is not set here). Run this "
        "command in a unit with the same group (here adm), and one -p LoadCredential= for each secret: systemd-run "
        f"--pty --uid=shipper -p SupplementaryGroups=adm -p LoadCredential={name}:/etc/credstore/{name} "
        "/usr/local/bin/shipper check -c /etc/shipper/shipper.toml --online"
    )


def _is_program_shown(program: str) -> bool:
    return bool(_PATH_SHOWN.fullmatch(program) or _PROGRAM_SHOWN.fullmatch(program))


def _shown_program(program: str) -> str:
    return repr(program) if _is_program_shown(program) else _mask(program)


def _mask(written: str) -> str:
    return f"{MASK} ({len(written):,} characters, not shown because they could be the secret itself)"


def _decode(raw: bytes, origin: str, key: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # Windows editors write a byte-order mark
    except UnicodeDecodeError:
        raise ConfigError(f"{origin} is not UTF-8 text", key=key) from None  # the cause contains the bytes


def _check_access(path: str, status: os.stat_result, allow_group_readable: bool, key: str) -> None:
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if mode & 0o007:
        raise ConfigError(f"{path} is accessible to all users (mode {mode:04o}); run: chmod 600 {path}", key=key)
    if mode & 0o020 or (mode & 0o040 and not allow_group_readable):
        raise ConfigError(
            f"{path} is accessible to its group (mode {mode:04o}); run: chmod 600 {path}, "
            "or, if the group should read it, set allow_group_readable = true beside file",
            key=key,
        )
    if status.st_uid not in {0, user} and not allow_group_readable:
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could replace the secret, not to user {user}; run: chown "
            f"{user} {path}, or, if that user should provide it to a group, set allow_group_readable = true beside "
            "file",
            key=key,
        )


def _validate(value: str, origin: str, key: str, is_for_header: bool) -> str:
    value = value.rstrip("\r\n")
    if not value:
        raise ConfigError(f"{origin} is empty", key=key)
    # Checked here, as the HTTP library's error would contain the value.
    if _CONTROL.search(value):
        raise ConfigError(f"the secret from {origin} contains a control character or line break", key=key)
    if value != value.strip():
        raise ConfigError(f"the secret from {origin} begins or ends with whitespace", key=key)
    if key.endswith("token") and value.lower().startswith("bearer "):
        raise ConfigError(f"the secret from {origin} begins with Bearer, which shipper adds; remove this word", key=key)
    if is_for_header and not all(ord(character) < 256 for character in value):
        raise ConfigError(f"the secret from {origin} contains a character outside Latin-1", key=key)
    return value
