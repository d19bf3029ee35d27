"""The reasons for which delivery pauses, and what to do about each."""

from __future__ import annotations

from typing import Final

# A pause ends by itself once its cause is gone; nothing is lost meanwhile. Both texts are shown: `Pause.message` says
# what happened, and this what to do.
ADVICE: Final = {
    "unavailable": "the service or the way to it is down; there is nothing to do here",
    "throttled": "send fewer requests: --rate, or a lower delivery.max_concurrency",
    "quota": "have the quota raised, or wait until it is replenished",
    "subscription_key": "put a valid key where intake.subscription_key points to; a file is read again by itself",
    "token": "put a valid token where intake.token points to, or mend intake.oauth2; a file is read again by itself",
    "token_endpoint": "look at the token endpoint; it is asked again by itself",
    "credentials": "mend the file or command that the named secret comes from, or the client id and secret",
    "forbidden": "have the service's operator check what the token and the subscription key are allowed to do",
    "not_found": "check intake.base_url, and whether a proxy stands in between",
    "redirect": "check intake.base_url: redirects are not followed",
    "html_answer": "check intake.base_url: a web page answers there, a proxy's or a portal's perhaps",
    "tls": "mend the certificate problem that is named: intake.ca_bundle, the host name, the expiry, the client's own",
    "unexpected_answer": "check whether it is the service at all that answers at intake.base_url",
    "unreadable_answer": "the answer is no plain acceptance: the message names what was not understood; ask who runs "
    "the service, and check that it is the service that answers at intake.base_url",
    "input_unlike_records": "shipper validate FILE shows what is wrong; then mend records.mapping, or raise "
    "records.mistake_limit, and reload (SIGHUP), or take the file away and restart",
    "clock": "set this machine's clock, such as by NTP; it is looked at again by itself",
    "systematic_rejection": "see what the service says: shipper dead-letters list; then mend the mapping, or raise "
    "delivery.poison_limit",
    "dead_letters_full": "shipper dead-letters list, then purge or replay; or raise state.dead_letter_max_bytes",
    "state_unwritable": "make room on the disk of state.directory, or make it writable again",
}
