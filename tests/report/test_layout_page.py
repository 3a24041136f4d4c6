"""The page of a plan: what its pictures and tables say is what the answer says."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_browser import CHROMIUM, drive, visit
from test_page import Tags

from scrimp.cli import main

WORDS = [
    *("plan", "--hardware", "2x8xh100", "--model.preset", "llama-3.2-1b", "--train.sequence", "4096"),
    *("--train.batch-tokens", "524288", "--layout.pp", "4", "--precision", "fp8_tensor", "--tokens", "15T"),
    *("--json", "--what-if", "--explain", "layout.tp=4"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A page, and the JSON of the same answer."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*WORDS, "--report", str(file)]) == 0
    return file.read_text(encoding="utf-8"), json.loads(said.getvalue())


def rects(text: str, kind: str) -> list[tuple[dict[str, str], str]]:
    """Boxes of a class, with their titles."""
    found = re.findall(rf'<rect class="({kind} [\w]+)" ([^>]*)><title>([^<]*)</title>', text)
    return [
        (dict(re.findall(r'(\w+)="([^"]*)"', words)) | {"class": name}, title) for name, words, title in found
    ]


def test_every_pass_is_drawn_where_it_runs(page: tuple[str, dict[str, Any]]) -> None:
    text, answer = page
    best = answer["best"][0]
    layout = best["layout"]
    boxes = rects(text, "pass")
    drawn = min(3 * layout["pp"], answer["question"]["global_batch"] // best["micro_batch"])
    assert len(boxes) == 2 * layout["pp"] * layout["virtual"] * drawn
    by_rank: dict[str, list[tuple[float, float]]] = {}
    for box, _ in boxes:
        by_rank.setdefault(box["y"], []).append((float(box["x"]), float(box["x"]) + float(box["width"])))
    assert len(by_rank) == layout["pp"]
    for spans in by_rank.values():
        spans.sort()
        assert all(one[1] <= other[0] + 0.02 for one, other in itertools.pairwise(spans))
        assert spans[-1][1] <= 1000.01
    titles = [title for _, title in boxes]
    assert sum(title.startswith("forward") for title in titles) == len(titles) / 2
    assert any(title.startswith(f"backward of micro-batch {drawn - 1}, stage 0:") for title in titles)


def test_bars_are_as_long_as_their_bytes(page: tuple[str, dict[str, Any]]) -> None:
    text, answer = page
    ranks = [one["peak_bytes"] for one in answer["best"][0]["stages"]]
    boxes = rects(text, "bytes")
    assert len(boxes) == sum(len(one) for one in ranks)
    sizes = [size for one in ranks for size in one.values()]
    widths = [float(box["width"]) for box, _ in boxes]
    scale = sum(widths) / sum(sizes)
    assert widths == pytest.approx([size * scale for size in sizes], abs=0.02)
    assert [box["class"].split()[1] for box, _ in boxes[: len(ranks[0])]] == list(ranks[0])
    assert 'class="limit"' in text


def test_every_block_has_a_cell_in_its_format(page: tuple[str, dict[str, Any]]) -> None:
    text, answer = page
    boxes = rects(text, "cell")
    assert len(boxes) == answer["question"]["layers"]
    assert {box["class"] for box, _ in boxes} == {"cell fp8"}
    assert sorted(int(re.findall(r"block (\d+)", title)[0]) for _, title in boxes) == list(range(16))
    assert "Formats are given, not chosen" in text


def test_the_tables_are_those_of_the_answer(page: tuple[str, dict[str, Any]]) -> None:
    text, answer = page
    for one in answer["losers"]:
        assert one["why"] in text
    for one in answer["what_if"]:
        assert one["change"] in text
    assert f"{answer['best'][0]['days']:,.3g} days" in text
    assert answer["hardware"]["nodes"][0]["device_sha256"][:12] in text
    assert "price_per_hour" in text, "what is estimated is named"
    assert answer["explain"]["asked"] == "tp 4"
    for cause in answer["explain"]["seconds"]:
        assert f">{cause.replace('_', ' ')}</th>" in text


def test_the_page_is_whole_and_loads_nothing(page: tuple[str, dict[str, Any]]) -> None:
    text, _ = page
    tags = Tags(text)
    names = [name for name, _ in tags.found]
    assert names.count("svg") == 4
    assert not {"script", "img", "link", "iframe"} & set(names)
    assert not re.search(r"https?://", text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src &#x27;sha256-{digest}&#x27;" in text or f"style-src 'sha256-{digest}'" in text
    assert not [
        attrs for _, attrs in tags.found if "style" in attrs or any(key.startswith("on") for key in attrs)
    ]


def test_a_page_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    file.write_text("mine", encoding="utf-8")
    assert main([*WORDS, "--report", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: no Chromium on this machine (apt install chromium)")
def test_a_browser_draws_all_of_it_under_its_policy(page: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    text, _ = page
    file = tmp_path / "plan.html"
    file.write_text(text, encoding="utf-8")
    seen = visit(file, tmp_path)
    assert seen.console == []
    assert seen.urls == []
    script = """
        const boxes = [...document.querySelectorAll('svg rect')];
        seen.shown = boxes.filter((box) => box.getBoundingClientRect().height > 0).length;
        seen.fills = [...new Set(boxes.map((box) => getComputedStyle(box).fill))].length;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
    """
    drawn = drive(file, tmp_path, script, "--window-size=1200,900")
    assert drawn["shown"] == text.count("<rect ")
    # Seven kinds of bytes, two of passes, five parts of a step, some of them alike, and one format.
    assert drawn["fills"] >= 7
    assert drawn["wide"]
