"""HTML that is safe by construction.

Problem  A page shows text from corpora, names and paths. One forgotten escape is a hole.
Method   `tag` builds elements. A child that is a plain `str` is always escaped; only
         `Markup`, which `tag` itself returns, goes in as it is. Before escaping, `visible`
         replaces what a browser would hide, reorder or choke on (control characters,
         bidirectional overrides, lone surrogates) by something that can be seen.
Limits   Right-to-left text is not touched, only the invisible characters that reorder what
         follows; the style sheet isolates every quoted text so that none leaks out.
Checked  tests/report/test_html.py; tests/report/test_browser.py in headless Chromium
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

_VOID: Final = frozenset({"br", "hr", "input", "meta", "rect"})
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0d\x0e-\x1f\x7f-\x9f"  # control characters but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks and overrides
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # separators, BOM, annotations, tags
    "\ud800-\udfff\ufffe\uffff]"  # lone surrogates, noncharacters
)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None


def visible(text: str) -> str:
    """`text` with every hidden character shown: NUL as ␀, an override as ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda match: _picture(ord(match[0])), text.replace("\r\n", "\n"))


def escape(text: object, limit: int | None = None) -> Markup:
    """Any value as HTML text, also good inside quotes; cut after `limit` characters, and says so."""
    raw = text if isinstance(text, str) else str(text)
    shown = raw if limit is None else cut(raw, limit)
    return Markup(html.escape(visible(shown), quote=True))


def cut(text: object, limit: int) -> str:
    """At most `limit` characters of a text, and how many more there were."""
    raw = text if isinstance(text, str) else str(text)
    rest = len(raw) - limit
    return raw if rest <= 0 else f"{raw[:limit]} … ({rest:,} more characters)"


def tag(element: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """One element. `class_` and `for_` lose their underscore, `data_x` becomes `data-x`.

    An attribute that is None or False is left out, one that is True has no value.
    """
    words = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        words.append(label if value is True else f'{label}="{escape(value)}"')
    opening = " ".join(words)
    if element in _VOID and not children:
        return Markup(f"<{opening}>") if element in {"br", "hr", "input", "meta"} else Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{join(children)}</{element}>")


def join(children: Iterable[Child]) -> Markup:
    """Children side by side: Markup as it is, None left out, all else escaped."""
    parts = (child if isinstance(child, Markup) else escape(child) for child in children if child is not None)
    return Markup("".join(parts))


def wide(*content: Child) -> Markup:
    """A table that may be wider than the page, in a box that scrolls."""
    return tag("div", *content, class_="wide", tabindex="0", role="region", aria_label="table")


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if 0xD800 <= code <= 0xDFFF or code in (0xFFFE, 0xFFFF):
        return "\ufffd"
    return f"⟨U+{code:04X}⟩"
