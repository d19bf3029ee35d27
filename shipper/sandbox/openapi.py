"""
The two operations of the service as an OpenAPI 3.1 document.

The service's own documentation says little about answers, limits and what is required. What the sandbox had to choose
is marked `x-sandbox-choice: true`, and what follows `CHOICE` in the description of such an object is the choice.

    python -m shipper.sandbox.openapi > config/openapi.json
"""

from __future__ import annotations

import json
import sys
from typing import Final

from shipper.model import wire

EXAMPLE_BASE_URL: Final = "http://127.0.0.1:8080"
CHOICE: Final = "Sandbox's choice:"

Document = dict[str, object]

_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_TIME: Final = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
# The format `date` is not enough: it has a year 0, which no calendar here has, and many validators do not assert it.
_YEAR: Final = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE: Final = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"

_RETRY_AFTER: Final = "^([0-9]+|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT)$"


def openapi_document(base_url: str) -> Document:
    """
    Describe both operations.

    Args:
        base_url: Where the service listens, without a slash at the end.
    Returns:
        A new document of plain dicts, lists, strings, numbers and booleans, in the order in which it is to be read.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Player activity intake and affiliate daily report",
            "version": "v1",
            "description": (
                "Takes batches of player activity events and reports an affiliate account's figures for a period, as "
                "the sandbox does it. What the service's documentation leaves open and the sandbox chose is marked "
                f'`x-sandbox-choice: true`; the description has it behind "{CHOICE}".'
            ),
        },
        "servers": [
            {
                "url": base_url,
                "description": (
                    "The sandbox serves both operations. The service itself has an address for production, one for a "
                    "lower environment with a label in its host name, and another address for the report."
                ),
            }
        ],
        "security": [{"AccessToken": [], "SubscriptionKey": []}],
        "paths": {
            wire.INTAKE_PATH: {"post": _submit_operation()},
            "/dpm/v1/dar/{affiliate_account_id}/{start_date}/{end_date}": {"get": _report_operation()},
        },
        "components": {
            "securitySchemes": _security_schemes(),
            "parameters": {"CacheControl": _cache_control()},
            "headers": {"RetryAfter": _retry_after()},
            "schemas": {
                "ActivityBatch": _activity_batch(),
                "ActivityEvent": _activity_event(),
                **_intake_answers(),
                "Error": _error_schema(),
                "DailyReport": _daily_report(),
                "ReportSource": _report_source(),
                "ReportingPeriod": _reporting_period(),
                "Brand": _brand(),
                "MarketingSource": _marketing_source(),
                "Conversions": _conversions(),
                "Deposits": _deposits(),
                "DepositFigures": _deposit_figures(),
                "AmountPair": _amount_pair(),
                "CountPair": _count_pair(),
            },
        },
    }


def openapi_bytes(base_url: str) -> bytes:
    """Write the document as indented JSON, UTF-8, a newline at the end; the same bytes every time."""
    return json.dumps(openapi_document(base_url), indent=2, ensure_ascii=False).encode() + b"\n"


def _described(description: str, *, choice: str = "", **keywords: object) -> Document:
    """
    Make an object of the document.

    Args:
        choice: What of it the sandbox chose; empty if all of it is documented by the service.
        keywords: The rest of the object.
    """
    if not choice:
        return {"description": description, **keywords}
    return {"description": f"{description} {CHOICE} {choice}", **keywords, "x-sandbox-choice": True}


def _ref(name: str, kind: str = "schemas") -> Document:
    return {"$ref": f"#/components/{kind}/{name}"}


def _object(description: str, properties: Document, *, choice: str = "all fields are always there.") -> Document:
    """Make the schema of an object of an answer, which has these fields and no others."""
    return _described(
        description,
        choice=choice,
        type="object",
        required=list(properties),
        additionalProperties=False,
        properties=properties,
    )


# Both operations


def _security_schemes() -> Document:
    return {
        "AccessToken": _described(
            "Header `Authorization: Bearer <ACCESS_TOKEN>` on every request; the token is a JWT. How it is obtained, "
            "how long it lives and what scopes it has is not documented.",
            choice="it is signed with HS256 and has `aud`, `nbf` and `exp`; it is printed at start, and "
            "`POST /oauth2/v2.0/token` gives out others.",
            type="http",
            scheme="bearer",
            bearerFormat="JWT",
        ),
        "SubscriptionKey": _described(
            "A subscription key, on every request beside the access token.",
            choice="a primary and a secondary key are valid at the same time, and each can be replaced.",
            type="apiKey",
            name="Ocp-Apim-Subscription-Key",
            **{"in": "header"},
        ),
    }


def _cache_control() -> Document:
    return _described(
        "On every request of both operations.",
        choice="without it the answer is 400. It may have further directives, in any case of letters.",
        name="Cache-Control",
        required=True,
        schema={"type": "string", "const": "no-cache"},
        **{"in": "header"},
    )


def _retry_after() -> Document:
    return _described(
        "When to try again.",
        choice="whole seconds, or an HTTP date if the sandbox was started so.",
        schema={"type": "string", "pattern": _RETRY_AFTER},
    )


def _error_schema() -> Document:
    return _object(
        "What every answer with a status from 400 on holds.",
        {
            "statusCode": _described("The status of the answer, again.", type="integer", minimum=400, maximum=599),
            "message": _described("What is wrong, in words for people.", type="string"),
        },
        choice="the documentation shows no errors at all.",
    )


def _error(status: int, when: str, *, can_say_when: bool = False) -> Document:
    answer = _described(
        "The request was refused.",
        choice=when,
        content={
            "application/json": {
                "schema": {**_ref("Error"), "properties": {"statusCode": {"const": status}}},
            }
        },
    )
    return {**answer, "headers": {"Retry-After": _ref("RetryAfter", "headers")}} if can_say_when else answer


def _common_errors() -> Document:
    return {
        "401": _error(
            401,
            "the subscription key is missing or not valid, or the access token is missing, not valid, not valid yet, "
            "expired or for another audience. The key is judged first.",
        ),
        "403": _error(
            403, "the call quota of the subscription, if there is one, is used up. Has Retry-After.", can_say_when=True
        ),
        "415": _error(
            415,
            "Content-Type is not `application/json`, or the request has a Content-Encoding, such as `gzip`, unless the "
            "sandbox was started to take that.",
        ),
        "429": _error(429, "calls come faster than the limit, if there is one. Has Retry-After.", can_say_when=True),
        "500": _error(500, "a bad day, only if the sandbox was told so."),
        "502": _error(502, "as 500."),
        "503": _error(503, "as 500; it may have Retry-After.", can_say_when=True),
        "504": _error(504, "as 500."),
    }


# The intake


def _submit_operation() -> Document:
    return {
        "operationId": "submitPlayerActivityEvents",
        "summary": "Submit player activity events",
        "description": (
            "Takes a batch of events of one type. Header `Content-Type: application/json` is required. What becomes of "
            f"an EventId that was sent before is not documented. {CHOICE} it is counted as a duplicate and keeps its "
            "first event; the sandbox can be started so that it refuses such an event, or accepts it anew."
        ),
        "x-sandbox-choice": True,
        "parameters": [_ref("CacheControl", "parameters")],
        "requestBody": _described(
            "The batch.",
            choice="at most 2 MiB unless it was started with another limit, uncompressed, any number of events.",
            required=True,
            content={
                "application/json": {
                    "schema": _ref("ActivityBatch"),
                    "examples": {
                        "batch": {"summary": "A batch of one event", "value": _BATCH_EXAMPLE},
                    },
                }
            },
        ),
        "responses": {
            "200": _described("Taken.", choice="no body; only if it was started so."),
            "201": _json_answer("Taken.", "the document of 202; only if it was started so.", "BatchOutcome"),
            "202": _json_answer(
                "Taken, as far as the events are valid.",
                "the default. Events that break a rule are named and the others are taken, unless it was started to "
                "refuse the whole batch for one of them (400).",
                "BatchOutcome",
                {
                    "taken": {"summary": "Both events are new", "value": _outcome_example(2)},
                    "partly": {"summary": "One of two was refused", "value": _outcome_example(1, _REFUSED_EXAMPLE)},
                },
            ),
            "204": _described("Taken.", choice="only if it was started so."),
            "207": _json_answer(
                "Taken, as far as the events are valid.",
                "a result for each event, in the order of the request; only if it was started so.",
                "EventResults",
                {"results": {"summary": "The second of two was refused", "value": _RESULTS_EXAMPLE}},
            ),
            "400": _error(
                400,
                "a required header is missing, or the body is not a batch, or an event of it is not valid and the "
                "sandbox was started so that this refuses the whole batch, or, in the strict profile, two events have "
                "the same EventId or ConsumerID.",
            ),
            "404": _error(404, "there is no such path, or not with this method."),
            "413": _error(413, "the body is larger than the limit."),
            **_common_errors(),
        },
    }


def _json_answer(description: str, choice: str, name: str, examples: Document | None = None) -> Document:
    media: Document = {"schema": _ref(name)}
    if examples:
        media["examples"] = examples
    return _described(description, choice=choice, content={"application/json": media})


def _activity_batch() -> Document:
    return _described(
        "Events of one type.",
        choice="both fields are required; others are ignored.",
        type="object",
        required=["EventType", "events"],
        properties={
            "EventType": _described(
                "Kind of the events. The one value shown is `Acquisition`.",
                choice="no other is taken.",
                type="string",
                const=wire.EVENT_TYPE,
            ),
            "events": _described(
                "The events of the batch.",
                choice="may be empty.",
                type="array",
                items=_ref("ActivityEvent"),
            ),
        },
    )


def _activity_event() -> Document:
    properties = {**_event_marks(), **_event_consumer(), **_event_affiliation()}
    return _described(
        "One event of one player. Which fields are required is not documented.",
        choice="all of them, and no others. A sandbox in the strict profile also asks for codes that ISO 3166-1 and "
        "ISO 4217 list, a state for the US and none elsewhere, no instant in the future, and no EventId or ConsumerID "
        "twice in a batch.",
        type="object",
        required=list(properties),
        additionalProperties=False,
        properties=properties,
    )


def _event_marks() -> Document:
    return {
        "EventId": _described(
            "Identifies the event: a UUID in canonical 8-4-4-4-12 form.",
            choice="lower-case only.",
            type="string",
            format="uuid",
            pattern=f"^{_UUID}$",
        ),
        "IP": _described(
            "The player's IPv4 address in dotted decimal.",
            choice="without leading zeros.",
            type="string",
            format="ipv4",
            pattern=rf"^{_OCTET}(\.{_OCTET}){{3}}$",
        ),
        "Timestamp": _described(
            "When it happened: ISO 8601, UTC, `YYYY-MM-DDThh:mm:ssZ`.",
            choice="an instant that exists, from the year 1 on, no leap second.",
            type="string",
            format="date-time",
            pattern=f"^{_DATE}T{_TIME}Z$",
        ),
        "BTag": _described(
            "Tracking tag: digits, an underscore, 32 hexadecimal characters.",
            choice="hexadecimal in either case; the digits are the id of the marketing source.",
            type="string",
            pattern="^[0-9]+_[0-9A-Fa-f]{32}$",
        ),
    }


def _event_consumer() -> Document:
    return {
        "ConsumerID": _identifier("Identifies the player."),
        "ConsumerCountry": _described(
            "The player's country, two letters.", choice="any two of A to Z.", type="string", pattern="^[A-Z]{2}$"
        ),
        "ConsumerCurrencyID": _described(
            "The player's currency, three letters.", choice="any three of A to Z.", type="string", pattern="^[A-Z]{3}$"
        ),
        "Username": _described("The player's user name.", choice="not empty.", type="string", minLength=1),
    }


def _event_affiliation() -> Document:
    return {
        "BrandID": _identifier("Identifies the brand."),
        "CustomerCurrencyID": _described(
            "Identifies a currency, as a string. How it relates to ConsumerCurrencyID is not documented.",
            choice="any string.",
            type="string",
        ),
        "ConsumerStatus": _described(
            "Status of the player. The one value shown is `Verified`.", choice="not empty.", type="string", minLength=1
        ),
        "AffiliateID": _described("Identifies the affiliate; may be empty.", type="string"),
        "ConsumerState": _described(
            "The player's region or state, two letters.",
            choice="any two of A to Z, or empty.",
            type="string",
            pattern="^([A-Z]{2})?$",
        ),
    }


def _identifier(description: str) -> Document:
    return _described(
        description,
        choice="1 to 2^63 - 1, written without fraction or exponent.",
        type="integer",
        format="int64",
        minimum=1,
        maximum=2**63 - 1,
    )


def _intake_answers() -> Document:
    rejected: Document = {
        "index": _described("Where the event stands in the batch, from 0.", type="integer", minimum=0),
        "EventId": _described("Its EventId; empty if it has none that is a string.", type="string"),
        "field": _described("The first field that breaks a rule; empty if it is none.", type="string"),
        "message": _described("The rule.", type="string"),
    }
    taken: Document = {
        "index": rejected["index"],
        "EventId": rejected["EventId"],
        "status": _described("It was taken.", const=202),
    }
    refused: Document = {
        **rejected,
        "status": _described("It breaks a rule (400), or was received before (409).", enum=[400, 409]),
    }
    undocumented = "the documentation shows no answer."
    return {
        "BatchOutcome": _object(
            "What became of a batch.",
            {
                "accepted": _described("New events.", type="integer", minimum=0),
                "duplicates": _described("Events whose EventId had been received before.", type="integer", minimum=0),
                "rejected": _described("Events that were refused.", type="array", items=_ref("RejectedEvent")),
            },
            choice=undocumented,
        ),
        "RejectedEvent": _object("An event that was refused.", rejected, choice=undocumented),
        "EventResults": _object(
            "What became of each event of a batch.",
            {
                "results": _described(
                    "One entry for each event.",
                    type="array",
                    items={"oneOf": [_ref("TakenResult"), _ref("RefusedResult")]},
                )
            },
            choice=undocumented,
        ),
        "TakenResult": _object("An event that was taken.", taken, choice=undocumented),
        "RefusedResult": _object("An event that was refused.", refused, choice=undocumented),
    }


# The report


def _report_operation() -> Document:
    return {
        "operationId": "getAffiliateDailyReport",
        "summary": "Get the affiliate daily report",
        "description": (
            "Reports the figures of one affiliate account for a range of days, by brand and marketing source. There is "
            "no request body, and still header `Content-Type: application/json` is required; OpenAPI cannot say so "
            "otherwise than in words."
        ),
        "parameters": [
            _path_parameter(
                "affiliate_account_id",
                "The account; equals `source.affilaiteAccountId` of the report.",
                "there is one account, 1001 unless it was started with another.",
                1001,
                type="integer",
                minimum=0,
            ),
            _path_parameter(
                "start_date",
                "First day of the range.",
                "from 0001-01-01 on.",
                "2026-03-01",
                type="string",
                format="date",
                pattern=f"^{_DATE}$",
            ),
            _path_parameter(
                "end_date",
                "Last day of the range.",
                "included, and not before `start_date`; in the strict profile in the same calendar month.",
                "2026-03-31",
                type="string",
                format="date",
                pattern=f"^{_DATE}$",
            ),
            _ref("CacheControl", "parameters"),
        ],
        "responses": {
            "200": _described(
                "The report.",
                choice="status 200.",
                content={
                    "application/json": {
                        "schema": _ref("DailyReport"),
                        "examples": {"report": {"summary": "One marketing source", "value": _REPORT_EXAMPLE}},
                    }
                },
            ),
            "400": _error(
                400, "a required header is missing, or the dates are no dates, or they are no range, start first."
            ),
            "404": _error(404, "there is no such account, or no such path, or not with this method."),
            **_common_errors(),
        },
    }


def _path_parameter(name: str, description: str, choice: str, example: object, **schema: object) -> Document:
    return _described(
        description, choice=choice, name=name, required=True, schema=schema, example=example, **{"in": "path"}
    )


def _daily_report() -> Document:
    return _object(
        "The figures of one affiliate account for a range of days.",
        {
            "id": _described(
                "UUID of the report.", choice="lower-case.", type="string", format="uuid", pattern=f"^{_UUID}$"
            ),
            "lastCheckSum": _described(
                "64 hexadecimal characters.",
                choice="lower-case; SHA-256 of all that the report says but its time.",
                type="string",
                pattern="^[0-9a-f]{64}$",
            ),
            "source": {**_ref("ReportSource"), "description": "Whose report it is."},
            "reportingTime": _described(
                "When it was made: ISO 8601, UTC, seven fractional digits, `Z` at the end.",
                type="string",
                format="date-time",
                pattern=rf"^{_DATE}T{_TIME}\.[0-9]{{7}}Z$",
            ),
            "reportingPeriod": {**_ref("ReportingPeriod"), "description": "The range."},
            "reportingCurrency": _described("Full name of the currency, not its code.", type="string"),
            "openingBalance": _money("Balance of the account before the range."),
            "outgoingBalance": _money("Balance of the account after it."),
            "brands": _described("One element for each brand.", type="array", items=_ref("Brand")),
        },
    )


def _report_source() -> Document:
    return _object(
        "Whose report it is.",
        {
            "affilaiteAccountId": _described("Identifies the account; the name is spelled so.", type="integer"),
            "affiliateAccountName": _described("Name of the account.", type="string"),
            "operatorName": _described("Name of the operator.", type="string"),
        },
    )


def _reporting_period() -> Document:
    return _object(
        "The range, `YYYY-MM-DDThh:mm:ss` without a zone.",
        {
            "start": _described(
                "Its start.", choice="the first second of the first day.", type="string", pattern=f"^{_DATE}T00:00:00$"
            ),
            "end": _described(
                "Its end.", choice="the last second of the last day.", type="string", pattern=f"^{_DATE}T23:59:59$"
            ),
        },
    )


def _brand() -> Document:
    return _object(
        "One brand and its marketing sources.",
        {
            "id": _described("Identifies the brand.", type="integer"),
            "name": _described("Its name.", type="string"),
            "marketingSources": _described(
                "One element for each marketing source.", type="array", items=_ref("MarketingSource")
            ),
        },
    )


def _marketing_source() -> Document:
    return _object(
        "The figures of one marketing source under one brand.",
        {
            "id": _described("Identifies the marketing source.", type="integer"),
            "name": _described("Its name; may be empty.", type="string"),
            "reportingCurrency": _described("Full name of the currency.", type="string"),
            "exchangeRate": _described("Four decimal places.", choice="always 1.", type="number", const=1),
            "activeCustomers": _pair("CountPair", "Customers who were active."),
            "conversions": {**_ref("Conversions"), "description": "Clicks and what became of them."},
            "deposits": {**_ref("Deposits"), "description": "Deposits by new and by returning customers."},
            "netRevenue": _pair("AmountPair", "Net revenue."),
            "revShare": _pair("AmountPair", "Earned as a share of the revenue."),
            "cpaRevenue": _pair("AmountPair", "Earned per acquisition."),
            "fees": _pair("AmountPair", "Fees."),
            "outgoingBalance": _money("Outgoing balance of this marketing source."),
        },
    )


def _conversions() -> Document:
    return _object(
        "Clicks and what became of them.",
        {
            "clicks": _described("Clicks.", choice="a whole number.", type="integer", minimum=0),
            "qualifiedConversions": _pair("CountPair", "Conversions that qualified."),
            "registrations": _pair("CountPair", "Registrations."),
        },
    )


def _deposits() -> Document:
    return _object(
        "Deposits by new and by returning customers.",
        {
            "newDepositingCustomers": {
                **_ref("DepositFigures"),
                "description": "Of customers who deposited for the first time.",
            },
            "returningDepositingCustomers": {**_ref("DepositFigures"), "description": "Of the other customers."},
        },
    )


def _deposit_figures() -> Document:
    return _object(
        "Customers and what they deposited.",
        {
            "customers": _pair("CountPair", "How many customers."),
            "amount": _pair("AmountPair", "How much money."),
        },
    )


def _amount_pair() -> Document:
    return _object(
        "A figure and its adjustment. What the two and their signs mean is not documented.",
        {
            "result": _money("The figure."),
            "adjustment": _money("Its adjustment."),
        },
    )


def _count_pair() -> Document:
    return _object(
        "An amount pair that counts something.",
        {
            "result": _described("The figure.", choice="a whole number, not below 0.", type="integer", minimum=0),
            "adjustment": _described("Its adjustment.", choice="a whole number.", type="integer"),
        },
    )


def _pair(name: str, description: str) -> Document:
    return {**_ref(name), "description": description}


def _money(description: str) -> Document:
    return _described(description, choice="always written with four decimal places.", type="number", multipleOf=0.0001)


# Examples

_BATCH_EXAMPLE: Final[Document] = {
    "EventType": wire.EVENT_TYPE,
    "events": [
        {
            "EventId": "c2ce6f44-7ed4-457b-be2f-eb89414c343c",
            "IP": "192.0.2.161",
            "Timestamp": "2026-03-15T10:38:36Z",
            "BTag": "50590_1027c4d1c386bbc4cd613e30d8f16adf",
            "ConsumerID": 1755450512,
            "ConsumerCountry": "US",
            "ConsumerCurrencyID": "USD",
            "Username": "eager_curlew5185",
            "BrandID": 13,
            "CustomerCurrencyID": "8",
            "ConsumerStatus": "Verified",
            "AffiliateID": "",
            "ConsumerState": "NJ",
        }
    ],
}
_REFUSED_EXAMPLE: Final[Document] = {
    "index": 1,
    "EventId": "63ca828d-d5f4-43b2-a4b0-6ce60741c7a8",
    "field": "IP",
    "message": "must be an IPv4 address in dotted-decimal form",
}
_RESULTS_EXAMPLE: Final[Document] = {
    "results": [
        {"index": 0, "EventId": "c2ce6f44-7ed4-457b-be2f-eb89414c343c", "status": 202},
        {**_REFUSED_EXAMPLE, "status": 400},
    ]
}
_REPORT_EXAMPLE: Final[Document] = {
    "id": "5ccc812e-be01-57ba-877d-beefc47df35d",
    "lastCheckSum": "1a0264bcffa9f9bd838f5732ea467197f9d60d9a48cff491c959275fad177358",
    "source": {
        "affilaiteAccountId": 1001,
        "affiliateAccountName": "Sandbox Affiliate",
        "operatorName": "Sandbox Operator",
    },
    "reportingTime": "2026-03-31T23:33:20.2500000Z",
    "reportingPeriod": {"start": "2026-03-01T00:00:00", "end": "2026-03-31T23:59:59"},
    "reportingCurrency": "Euro",
    "openingBalance": 1250.75,
    "outgoingBalance": 1361.838,
    "brands": [
        {
            "id": 11,
            "name": "Harbour Lights",
            "marketingSources": [
                {
                    "id": 50234,
                    "name": "",
                    "reportingCurrency": "Euro",
                    "exchangeRate": 1.0,
                    "activeCustomers": {"result": 12, "adjustment": 0},
                    "conversions": {
                        "clicks": 117,
                        "qualifiedConversions": {"result": 2, "adjustment": 0},
                        "registrations": {"result": 5, "adjustment": -1},
                    },
                    "deposits": {
                        "newDepositingCustomers": {
                            "customers": {"result": 2, "adjustment": 0},
                            "amount": {"result": 126.7824, "adjustment": 0.0},
                        },
                        "returningDepositingCustomers": {
                            "customers": {"result": 10, "adjustment": 0},
                            "amount": {"result": 919.4114, "adjustment": 0.0},
                        },
                    },
                    "netRevenue": {"result": 111.1836, "adjustment": 0.0},
                    "revShare": {"result": 33.355, "adjustment": 0.0},
                    "cpaRevenue": {"result": 80.0, "adjustment": 0.0},
                    "fees": {"result": -2.267, "adjustment": 0.0},
                    "outgoingBalance": 111.088,
                }
            ],
        }
    ],
}


def _outcome_example(accepted: int, *rejected: Document) -> Document:
    return {"accepted": accepted, "duplicates": 0, "rejected": list(rejected)}


if __name__ == "__main__":
    sys.stdout.buffer.write(openapi_bytes(EXAMPLE_BASE_URL))
