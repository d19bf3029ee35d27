"""HTML generation that escapes all text, so that untrusted text cannot become markup."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from html import escape
from importlib.resources import files
from typing import Final

from shipper.report.formatting import clean

# Even markup in a name that was not escaped could not load or run anything.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_VOID: Final = {"meta", "rect", "circle", "line"}


class Html(str):
    """Escaped markup; other strings are treated as text."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return an HTML or SVG element; `class_` becomes `class`, `stroke_width` `stroke-width`; None is omitted."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(_attribute(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{attribute_text}/>")
    return Html(f"<{name}{attribute_text}>{_join(children)}</{name}>")


def _join(children: Iterable[str | None]) -> str:
    return "".join(
        child if isinstance(child, Html) else escape(clean(child), quote=False)
        for child in children
        if child is not None
    )


def _attribute(value: str | float) -> str:
    """Format an attribute; coordinates get at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def document(title: str, *body: str | None) -> str:
    """Return a self-contained HTML page, without scripts, network access or other files."""
    style = "".join(files(__package__).joinpath(name).read_text("utf-8") for name in ("base.css", "page.css"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def header(kind: str, title: str, span: str, facts: Mapping[str, str], *, lines: Iterable[Html] = ()) -> Html:
    """Return the header of a page: titles, lines, and the facts that are not empty."""
    return tag(
        "header",
        tag("p", kind, class_="kind"),
        tag("h1", tag("bdi", title)),
        tag("p", span, class_="span"),
        *lines,
        tag("dl", *(tag("div", tag("dt", name), tag("dd", tag("bdi", fact))) for name, fact in facts.items() if fact)),
    )


def section(title: str, *parts: Html | None) -> Html:
    return tag("section", tag("h2", title), *parts)


def secondary(text: str) -> Html:
    """Return a paragraph of secondary text."""
    return tag("p", text, class_="sub")


def table(title: str, head: Iterable[Html], bodies: Iterable[Html], *, is_card: bool = True) -> Html:
    """Return a table that scrolls if it is wider than the page; the title is for screen readers."""
    caption = tag("caption", title, class_="unseen")
    return tag(
        "div",
        tag("table", caption, tag("thead", *head), *bodies),
        class_="card scroll" if is_card else "scroll",
        tabindex=0,
        role="region",
        aria_label=title,
    )


def plain_table(
    title: str, columns: Iterable[str], rows: Iterable[Html], *, texts: Collection[str], is_card: bool = True
) -> Html:
    """Return a table with one row of titles; the columns in `texts` are aligned to the left."""
    heads = [tag("th", name, scope="col", class_="text" if name in texts else None) for name in columns]
    return table(title, [tag("tr", *heads)], [tag("tbody", *rows)], is_card=is_card)


def data(value: Decimal, text: str, **attributes: str | None) -> Html:
    """Return a figure as text; the element's `value` attribute is exact."""
    return tag("data", with_minus_signs(text), value=f"{value:f}", **attributes)


def with_minus_signs(text: str) -> str:
    """Replace hyphens by minus signs, which are as wide as a plus and prevent line breaks."""
    return text.replace("-", "\N{MINUS SIGN}")
