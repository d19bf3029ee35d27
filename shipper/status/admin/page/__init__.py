"""
The status page of a running shipper: one HTML document that needs nothing else than `status` and `history` beside it.

Its script asks for both every two seconds, and draws. The policy that goes with the page allows this script, this style
and these two addresses, and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

_SCRIPTS = ("words.js", "elements.js", "charts.js", "headline.js", "head.js", "sections.js", "page.js")


@cache
def render() -> tuple[bytes, str]:
    """
    Make the page.

    Returns:
        The document, UTF-8, the same for every shipper; and the value of its `Content-Security-Policy` header.
    """
    style = _read("page.css")
    script = "".join(map(_read, _SCRIPTS))
    page = _read("page.html").replace("{style}", style).replace("{script}", script)
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",  # no text becomes markup, whatever the script does
    }
    return page.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
