"""Escaping: what goes in as text never becomes markup and never reorders what stands around it."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.report.html import Markup, escape, join, tag, visible


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


NASTY = [
    "<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "\"' onload=\"x", "&amp; &lt; &",
    "]]><!-- -->", "\x00\x01\x1b[31m\x7f\x85", "safe\u202egnp.exe", "\ud800 lone", "\ufeff\u2066x", "🦔" * 3,
    "x" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_text_stays_text(text):
    seen = Reader(tag("p", text, title=text))
    assert seen.tags == ["p"]
    assert seen.text == visible(text)
    assert seen.attributes == [("title", visible(text))]


@given(st.text(st.characters(codec=None)))
def test_any_text_survives_and_can_be_encoded(text):
    seen = Reader(tag("b", text))
    assert seen.tags == ["b"]
    assert seen.text == visible(text)
    assert len(str(escape(text)).encode("utf-8")) >= 0


@pytest.mark.parametrize(
    "hidden", ["\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ud83d", "\u2028", "\U000e0041"]
)
def test_hidden_characters_are_shown(hidden):
    assert hidden not in visible(f"a{hidden}b")
    assert len(visible(f"a{hidden}b")) >= 3


def test_ordinary_text_is_untouched():
    text = "Zwölf Boxkämpfer\tjagen\nהעברית 👩\u200d🚀 ﷽"
    assert visible(text) == text


def test_a_cut_says_how_much_is_missing():
    assert escape("a" * 1200, 200) == "a" * 200 + " … (1,000 more characters)"


def test_only_markup_is_not_escaped():
    assert join([Markup("<b>"), "<b>", None, 3]) == "<b>&lt;b&gt;3"
    assert tag("input", checked=True, hidden=False, data_x=None) == "<input checked>"
