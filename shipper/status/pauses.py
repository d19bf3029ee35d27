"""The reasons for which delivery pauses, and what to do about each."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from shipper.config.secrets import LiteralSecret, Secret, SecretReference
from shipper.config.settings import EndpointSettings

# For a refused secret, `advice_on` says only what fits.
_TAKEN_OVER: Final = (
    "a changed file is read again, a secret in the settings needs a reload (SIGHUP), an environment variable a restart"
)
# A pause ends by itself once its cause is gone; nothing is lost meanwhile. Both texts are shown: `Pause.message` says
# what happened, and this what to do.
ADVICE: Final = {
    "unavailable": "the service or the network is down; there is nothing to do in shipper",
    "throttled": "send fewer requests: --rate, or a lower delivery.max_concurrency",
    "quota": "have the quota raised, or wait until it is replenished",
    "subscription_key": f"put a valid key where intake.subscription_key comes from; {_TAKEN_OVER}",
    "token": f"put a valid token where intake.token comes from, or correct intake.oauth2; {_TAKEN_OVER}",
    "token_endpoint": "check the token endpoint; it is asked again automatically",
    "credentials": "correct the file or command that the named secret comes from, or the client id and secret",
    "forbidden": "have the service's operator check what the token and the subscription key are allowed to do",
    "not_found": "check intake.base_url, and whether there is a proxy in between",
    "redirect": "check intake.base_url: redirects are not followed",
    "html_answer": "check intake.base_url: a web page answers there, perhaps that of a proxy or a portal",
    "tls": "correct the named certificate problem: intake.ca_bundle, the host name, the expiry, the client certificate",
    "unexpected_answer": "check whether the service itself answers at intake.base_url",
    "unreadable_answer": "the answer is not a plain acceptance, and the message names what was not understood; ask "
    "the operator of the service, and check that the service itself answers at intake.base_url",
    "input_unlike_records": "shipper validate FILE shows what is wrong; correct records.mapping, or raise "
    "records.mistake_limit, and reload (SIGHUP), or remove the file and restart",
    "clock": "correct this machine's clock, for example with NTP; it is checked again automatically",
    "systematic_rejection": "shipper dead-letters list shows what the service says; correct the mapping, or raise "
    "delivery.poison_limit",
    "dead_letters_full": "shipper dead-letters list, then purge or replay; or raise state.dead_letter_max_bytes",
    "broker_unavailable": "the Kafka brokers or the network are down; there is nothing to do in shipper",
    "broker_forbidden": "have the brokers' operator grant the named right; it is tried again automatically",
    "input_gap": 'restore the records from a copy; or set input.kafka.on_gap = "continue" and reload (SIGHUP)',
    "state_unwritable": "make room on the disk of state.directory, or make it writable again",
}


class Renewal(NamedTuple):
    """
    How a process comes to use changed settings.

    Attributes:
        reload: What to do after a change of the settings file.
        restart: What to do after a change of what a process keeps for its life, such as its environment.
    """

    reload: str
    restart: str


def advice_on(reason: str, intake: EndpointSettings, renewal: Renewal) -> str:
    """Return what to do about a pause; if the service refuses a secret, where to change that one."""
    noun, secrets = _refused(reason, intake)
    ways = {key: _way(noun, key, secret, renewal) for key, secret in secrets.items() if secret is not None}
    if not ways:
        return ADVICE.get(reason, "")
    advice = "; ".join(ways.values() if len(ways) == 1 else (f"{key}: {way}" for key, way in ways.items()))
    if noun == "secret":
        return f"correct client_id, scope and grant of intake.oauth2, then {renewal.reload}; or {advice}"
    return advice


def _refused(reason: str, intake: EndpointSettings) -> tuple[str, dict[str, Secret | None]]:
    """Return what is refused if delivery pauses for a reason, and where it comes from, by key of the settings."""
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


def _way(noun: str, key: str, secret: Secret, renewal: Renewal) -> str:
    """Return how to replace a secret, and have the process use the new one."""
    if isinstance(secret, LiteralSecret):
        kind, _, rest = secret.source.partition(" ")
        if kind == "environment":
            return f"set a valid {noun} in the environment variable {rest}, then {renewal.restart}"
        if kind == "--set" or not secret.source:
            return f"give a valid {noun} as {key}, then {renewal.restart}"
        return f"write a valid {noun} as {key} into {Path(secret.source).absolute()}, then {renewal.reload}"
    assert isinstance(secret, SecretReference)
    if secret.env is not None:
        return f"set a valid {noun} in the environment variable {secret.env}, then {renewal.restart}"
    if secret.file is not None:
        return f"write a valid {noun} into {secret.file}, which is read again by itself"
    program = secret.command[0] if secret.command else ""
    return f"have {program} print a valid {noun}; it is run again by itself"
