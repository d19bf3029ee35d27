"""The reasons for pauses of delivery, and what to do about them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.config.settings import EndpointSettings

# Generic advice; `advice_on` returns specific advice for a rejected secret.
_HOW_APPLIED: Final = (
    "changed files are read automatically, secrets in the settings need a reload (SIGHUP), environment variables a "
    "restart"
)
# What to do, by reason. A pause ends by itself once its cause is gone; nothing is lost meanwhile. `Pause.message` says
# what happened.
ADVICE: Final = {
    "unavailable": (
        "the service or the network is down; shipper retries automatically; if it accepts small requests, a proxy may "
        "answer 502 or 504 to large ones: lower batch.max_events"
    ),
    "throttled": "send fewer requests: --rate, or a lower delivery.max_concurrency",
    "quota": "raise the quota, or wait until it is renewed",
    "subscription_key": f"provide a valid intake.subscription_key; {_HOW_APPLIED}",
    "token": f"provide a valid intake.token, or correct intake.oauth2; {_HOW_APPLIED}",
    "token_endpoint": "check the token endpoint; shipper retries automatically",
    "credentials": "correct the file or command of the named secret, or the client id and secret; for a proxy, its "
    "user name and password, and restart",
    "forbidden": "ask the service's operator to check the permissions of the token and the subscription key; if other "
    "batches are accepted, a firewall may block the text of a record",
    "not_found": "check intake.base_url, and whether a proxy intercepts requests",
    "redirect": "check intake.base_url: redirects are not followed",
    "html_answer": "check intake.base_url; a proxy or a portal may have answered instead of the service",
    "tls": "fix the certificate problem: check intake.ca_bundle, host name, expiry, client certificate; "
    "changed files are read automatically",
    "unexpected_answer": "check that the service itself answers at intake.base_url",
    "unreadable_answer": "the message says which part of the answer was not understood; check that the service itself "
    "answers at intake.base_url, and ask its operator",
    "input_unlike_records": "run shipper validate FILE or, for Kafka messages, shipper dead-letters list, to see what "
    "is wrong; correct records.mapping or raise records.mistake_limit, and reload (SIGHUP); or remove the file and "
    "restart",
    "clock": "correct this machine's clock, for example with NTP; shipper checks it automatically",
    "systematic_rejection": "the message quotes the service; correct the mapping or, if the records themselves are "
    "wrong, raise delivery.poison_limit, so that they become dead letters; then restart",
    "too_large": "ask the operators of the service, and of a proxy or firewall before it, for a larger limit of "
    "request bodies; if the records themselves are too large, raise delivery.poison_limit, so that they become "
    "dead letters, and restart",
    "dead_letters_full": "purge or replay dead letters (shipper dead-letters list), or raise "
    "state.dead_letter_max_bytes and restart",
    "broker_unavailable": "the Kafka brokers or the network are down; shipper retries automatically",
    "broker_forbidden": "grant the named permission, or change what the message names; shipper retries automatically",
    "input_gap": 'see the message; to continue after missing records, set input.kafka.on_gap = "continue" and reload '
    "(SIGHUP), and write them to the topic again, if there is a copy",
    "state_unwritable": "make room on the disk of state.directory, or make it writable again",
}


class ReloadAdvice(NamedTuple):
    """
    How to make a process use changed settings.

    Attributes:
        reload: What to do after a change of the settings file.
        restart: What to do after a change that only a new process sees, such as of its environment.
    """

    reload: str
    restart: str


def advice_on(reason: str, intake: EndpointSettings, reload_advice: ReloadAdvice) -> str:
    """Return what to do about a pause; for a rejected secret, where to change it."""
    noun, secrets = _rejected_secrets(reason, intake)
    steps = {
        key: _how_to_replace(noun, key, secret, reload_advice) for key, secret in secrets.items() if secret is not None
    }
    if not steps:
        return ADVICE.get(reason, "")
    advice = "; ".join(steps.values() if len(steps) == 1 else (f"{key}: {step}" for key, step in steps.items()))
    if noun == "secret":
        return f"correct client_id, scope and grant of intake.oauth2, then {reload_advice.reload}; or {advice}"
    return advice


def _rejected_secrets(reason: str, intake: EndpointSettings) -> tuple[str, dict[str, Secret | None]]:
    """Return the kind of secret that is rejected when delivery pauses for a reason, and the secrets by setting."""
    if reason == "subscription_key":
        return "key", {
            "intake.subscription_key": intake.subscription_key,
            "intake.subscription_key_secondary": intake.subscription_key_secondary,
        }
    if reason != "token":
        return "", {}
    if intake.oauth2 is None:
        return "token", {"intake.token": intake.token}
    return "secret", {
        "intake.oauth2.client_secret": intake.oauth2.client_secret,
        "intake.oauth2.password": intake.oauth2.password,
    }


def _how_to_replace(noun: str, key: str, secret: Secret, reload_advice: ReloadAdvice) -> str:
    if isinstance(secret, LiteralSecret):
        kind, _, rest = secret.source.partition(" ")
        if kind == "environment":
            return f"set a valid {noun} in the environment variable {rest}, then {reload_advice.restart}"
        if kind == "--set" or not secret.source:
            return f"pass a valid {noun} as {key}, then {reload_advice.restart}"
        return f"write a valid {noun} as {key} into {Path(secret.source).absolute()}, then {reload_advice.reload}"
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        return f"set a valid {noun} in the environment variable {secret.env}, then {reload_advice.restart}"
    if secret.file is not None:
        return f"write a valid {noun} into {secret.file}; it is read automatically"
    program = secret.command[0] if secret.command else ""
    return f"make {program} print a valid {noun}; it is run again automatically"
