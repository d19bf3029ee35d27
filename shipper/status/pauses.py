"""The reasons for which delivery pauses, and what to do about each."""

from __future__ import annotations

from typing import Final

# A pause ends by itself once its cause is gone; nothing is lost meanwhile. Both texts are shown: `Pause.message` says
# what happened, and this what to do.
ADVICE: Final = {
    "unavailable": "the service or the network is down; there is nothing to do in shipper",
    "throttled": "send fewer requests: --rate, or a lower delivery.max_concurrency",
    "quota": "have the quota raised, or wait until it is replenished",
    "subscription_key": "put a valid key where intake.subscription_key points to; a changed file is read again",
    "token": "put a valid token where intake.token points to, or correct intake.oauth2; a changed file is read again",
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
