"""
Secrets as the settings hold them: references that are resolved when they are used, or a masked literal.

    token = { env = "INTAKE_TOKEN" }                    an environment variable
    token = { file = "/run/secrets/intake-token" }      a file that only its owner can read
    token = { command = ["print-token", "intake"] }     a program that prints it; no shell is involved
    token = "…"                                         the secret itself; works, with a warning

Nothing in this module shows a secret: not in a `repr`, not in an error, not in a traceback's message.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from subprocess import DEVNULL
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from shipper.model.errors import ConfigError
from shipper.system.programs import signal_group, small_environment

MAX_SECRET_BYTES: Final = 65_536
COMMAND_LIMIT_S: Final = 30.0
MASK: Final = "***"

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What stands for a secret is named when it is missing, unless it might be the secret, in the wrong place.
_VARIABLE_SHOWN: Final = re.compile(r"(?![A-F0-9_]{12})[A-Z_][A-Z0-9_]{0,63}")
_PATH_SHOWN: Final = re.compile(r"[~/.][^=]*")
_PROGRAM_SHOWN: Final = re.compile(r"(?![a-f0-9]{12})[a-z][a-z0-9_.-]{0,31}")
_CREDENTIALS: Final = "/run/credentials/"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FORMS: Final = 'a table such as { env = "NAME" } or { file = "/path" }'


class Secret:
    """Base of the two forms. A plain class, so that msgspec hands every form to `decode_secret`."""

    __slots__ = ()


class LiteralSecret(Secret):
    """
    A secret that is written in the settings themselves.

    Attributes:
        source: Where it was written: a file's path, an environment variable, a flag; empty = not known.
    """

    __slots__ = ("_value", "source")

    def __init__(self, value: str, source: str = "") -> None:
        self._value = value
        self.source = source

    def reveal(self) -> str:
        """Return the secret; for `resolve_secret` alone."""
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
        if self.command is not None and not (self.command and self.command[0]):
            raise ValueError('command is a program and its arguments, such as ["print-token", "intake"]')
        if self.allow_group_readable and self.file is None:
            raise ValueError("allow_group_readable is for file only")


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
    if any(name not in SecretReference.__struct_fields__ for name in raw):
        raise ValueError(f"a secret has no such key: expected {_FORMS}")
    try:
        return msgspec.convert(raw, SecretReference, strict=False)  # text from the environment: "true"
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc).replace("$.", "")) from None


def resolve_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> str:
    """
    Fetch a secret from where it is kept, now.

    Args:
        secret: The setting; the form `command` is for `fetch_secret`.
        key: The setting's dotted name, for errors.
        is_for_header: It is to be sent in a header, whose characters are those of Latin-1.
    Returns:
        The secret, without trailing line ends; no control characters, no blanks around it, not empty.
    Raises:
        ConfigError: The variable or file is missing, the file is open to others or belongs to another user than this
            one and root, or the value is unfit.
    """
    if isinstance(secret, LiteralSecret):
        return _checked(secret.reveal(), "the literal", key, is_for_header)
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        value = os.environ.get(secret.env)
        if value is None:
            name = secret.env if _VARIABLE_SHOWN.fullmatch(secret.env) else _masked(secret.env)
            raise ConfigError(f"environment variable {name} is not set", key=key)
        return _checked(value, f"environment variable {secret.env}", key, is_for_header)
    if secret.file is not None:
        value = _read_private(secret.file, secret.allow_group_readable, key)
        return _checked(value, secret.file, key, is_for_header)
    raise ConfigError("command is not available here; use env or file", key=key)


def check_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> None:
    """Raise the `ConfigError` that fetching would raise, as far as it can be told without running a command."""
    if not isinstance(secret, SecretReference) or secret.command is None:
        resolve_secret(secret, key=key, is_for_header=is_for_header)
    elif shutil.which(secret.command[0]) is None:
        program = secret.command[0]
        is_shown = _PATH_SHOWN.fullmatch(program) or _PROGRAM_SHOWN.fullmatch(program)
        program = repr(program) if is_shown else _masked(program)
        raise ConfigError(f"program {program} cannot be found or run", key=key)


async def fetch_secret(secret: Secret, *, key: str, is_for_header: bool = True) -> str:
    """
    Fetch a secret of any form without holding up the event loop; otherwise as `resolve_secret`.

    Raises:
        ConfigError: A command is missing, fails, takes longer than 30 s, or prints no secret. What it printed, and its
            arguments, are not shown.
    """
    import anyio.to_thread  # whoever awaits has it already; commands that do not await start sooner without

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
        raise ConfigError(f"cannot run {program!r}: {reason}", key=key) from None
    if exit_code != 0:
        hint = _outside_unit(secret) or "run it by hand to see why"
        raise ConfigError(f"{program} failed with exit code {exit_code}; {hint}", key=key)
    origin = f"the output of {program}"
    return _checked(_text(output, origin, key), origin, key, is_for_header)


async def _run(command: Sequence[str], key: str) -> tuple[bytes, int]:
    """Run a program to its end; returns what it printed, and its exit code."""
    import anyio

    with anyio.CancelScope(shield=True):  # what has been started by then would be nobody's
        # A session of its own, so that what it started can be ended with it; its complaints may hold secrets, too.
        process = await anyio.open_process(
            command, stdin=DEVNULL, stderr=DEVNULL, env=small_environment(os.environ), start_new_session=True
        )
    assert process.stdout is not None
    output = b""
    async with process:
        try:
            async for part in process.stdout:
                output += part
                if len(output) > MAX_SECRET_BYTES:
                    raise ConfigError(f"{command[0]} printed more than {MAX_SECRET_BYTES} bytes: not a secret", key=key)
            return output, await process.wait()
        finally:
            signal_group(process, signal.SIGKILL)


def _read_private(path: str, allow_group_readable: bool, key: str) -> str:
    """Read a secret's file after checking the mode of exactly the file that was opened."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer, perhaps for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a regular file", key=key)
            _check_mode(path, stat.S_IMODE(status.st_mode), allow_group_readable, key)
            if not allow_group_readable:
                _check_owner(path, status.st_uid, key)
            with open(descriptor, "rb", closefd=False) as file:  # `open` would leak the descriptor of a directory
                raw = file.read(MAX_SECRET_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        name = repr(path) if _PATH_SHOWN.fullmatch(path) else _masked(path)
        hint = _outside_unit(SecretReference(file=path))
        # The cause names the file.
        raise ConfigError(f"cannot read {name}: {reason}{'; ' if hint else ''}{hint}", key=key) from None
    if len(raw) > MAX_SECRET_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SECRET_BYTES} bytes: not a secret", key=key)
    return _text(raw, path, key)


def _outside_unit(secret: SecretReference) -> str:
    """Return what to do if a secret is a credential of a systemd unit; else nothing."""
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
        "the credentials of a systemd unit exist only inside it ($CREDENTIALS_DIRECTORY is not set here). Run this in "
        "a unit with the group of that one (here adm), and one -p LoadCredential= for each secret: systemd-run --pty "
        f"--uid=shipper -p SupplementaryGroups=adm -p LoadCredential={name}:/etc/credstore/{name} "
        "/usr/local/bin/shipper check -c /etc/shipper/shipper.toml --online"
    )


def _masked(written: str) -> str:
    return f"{MASK} ({len(written):,} characters, not shown, as they could be the secret itself)"


def _text(raw: bytes, origin: str, key: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # Windows puts a byte order mark before what it saves
    except UnicodeDecodeError:
        raise ConfigError(f"{origin} is not UTF-8 text", key=key) from None  # the cause holds the bytes


def _check_mode(path: str, mode: int, allow_group_readable: bool, key: str) -> None:
    if mode & 0o007:
        raise ConfigError(f"{path} is open to every user (mode {mode:04o}); run: chmod 600 {path}", key=key)
    if mode & 0o020 or (mode & 0o040 and not allow_group_readable):
        raise ConfigError(
            f"{path} is open to its group (mode {mode:04o}); run: chmod 600 {path}, "
            "or, if the group may read it, set allow_group_readable = true beside file",
            key=key,
        )


def _check_owner(path: str, owner: int, key: str) -> None:
    user = os.geteuid()
    if owner not in {0, user}:
        raise ConfigError(
            f"{path} belongs to user {owner}, who could replace the secret, and this is user {user}; "
            f"run: chown {user} {path}, or, if that user is to write it for a group that may read it, "
            "set allow_group_readable = true beside file",
            key=key,
        )


def _checked(value: str, origin: str, key: str, is_for_header: bool) -> str:
    value = value.rstrip("\r\n")
    if not value:
        raise ConfigError(f"{origin} is empty", key=key)
    # Checked here, as the HTTP library would put the offending value into its error.
    if _CONTROL.search(value):
        raise ConfigError(f"the secret from {origin} holds a control character or line break", key=key)
    if value != value.strip():
        raise ConfigError(f"the secret from {origin} begins or ends with a blank", key=key)
    if is_for_header and not all(ord(character) < 256 for character in value):
        raise ConfigError(f"the secret from {origin} holds a character outside Latin-1", key=key)
    return value
