"""Markup from Python: all text is escaped, so that nothing from outside becomes a tag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from html import escape
from importlib.resources import files
from typing import Final

from shipper.report.wording import clean

# Not even a name with markup that slipped through could load or run anything.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_VOID: Final = {"meta", "rect", "circle", "line"}


class Html(str):
    """Markup that is complete and escaped; every other text is taken for text."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """
    Make an element of HTML or SVG.

    Args:
        name: Of the element.
        children: Elements and text; None is nothing.
        attributes: `class_` is `class`, `stroke_width` is `stroke-width`; None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(clean(_plain(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def document(title: str, *body: str | None, style: str = "") -> str:
    """
    Make a page of HTML that needs nothing else: no network, no script, no other file.

    Args:
        style: More of it, behind the style that all pages share.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{files(__package__).joinpath('page.css').read_text('utf-8')}{style}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def header(kind: str, title: str, span: str, facts: Mapping[str, str], *, lines: Iterable[Html] = ()) -> Html:
    """
    Make the head of a page.

    Args:
        facts: By name; those that are empty are left out.
        lines: What comes before the facts.
    """
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


def sub(words: str) -> Html:
    """Make a paragraph of secondary text."""
    return tag("p", words, class_="sub")


def table(title: str, head: Iterable[Html], bodies: Iterable[Html], *, is_card: bool = True) -> Html:
    """
    Make a table that scrolls by itself where it is wider than the page.

    Args:
        title: Its caption, for those who cannot see it.
        head: 1..n rows.
        bodies: 1..n elements `tbody`.
        is_card: Whether it stands by itself, and not in a frame.
    """
    caption = tag("caption", title, class_="unseen")
    return tag(
        "div",
        tag("table", caption, tag("thead", *head), *bodies),
        class_="card scroll" if is_card else "scroll",
        tabindex=0,
        role="region",
        aria_label=title,
    )


def join(children: Iterable[str | None]) -> Html:
    """Put elements and text one after the other."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(clean(child), quote=False)
            for child in children
            if child is not None
        )
    )


def _plain(value: str | float) -> str:
    """Write coordinates with as many decimals as can be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def data(value: Decimal, text: str, **attributes: str | None) -> Html:
    """Show a figure; the element's value is the exact one, whatever the text makes of it."""
    return tag("data", minus(text), value=f"{value:f}", **attributes)


def minus(text: str) -> str:
    """Put the sign in the place of the hyphen: it is as wide as a plus, and no line breaks after it."""
    return text.replace("-", "\N{MINUS SIGN}")
