"""
The status page of a running shipper: a single HTML document.

Its script polls `status` and `history` every two seconds. The content security policy allows only the page's own
script, style and these two requests.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

_SCRIPTS = ("format.js", "elements.js", "charts.js", "head.js", "sections.js", "page.js")


@cache
def render() -> tuple[bytes, str]:
    """Return the page in UTF-8, the same for every shipper, and its `Content-Security-Policy`."""
    style = files("shipper.report").joinpath("page/base.css").read_text("utf-8") + _read("page.css")
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
