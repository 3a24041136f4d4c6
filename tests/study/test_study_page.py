"""The page of a study: what it shows is what the results say, and nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources

from fakes import rows_for, study_of
from test_results import LOSSES

from scrimp.study.page import build_page
from scrimp.study.results import results_of


def test_the_page_has_curves_intervals_pairs_and_verdicts() -> None:
    study = study_of(head='about = "<b>Which?</b>"\nmatters = 0.05')
    rows = rows_for(study, LOSSES | {"c": [3.3, None, 2.9]})
    page = build_page(results_of(study, rows))
    assert page == build_page(results_of(study, rows))
    assert "&lt;b&gt;Which?&lt;/b&gt;" in page
    assert "<b>Which" not in page
    assert "lower by 0.4933" in page
    assert '<span class="state open">' in page
    assert '<span class="state finished">' in build_page(results_of(study, rows_for(study, LOSSES)))
    assert "cannot tell" in page
    assert "c, seed 1, failed: it broke" in page
    charts = [json.loads(found.replace("&quot;", '"')) for found in re.findall(r'data-chart="([^"]*)"', page)]
    assert [[one["name"] for one in chart["series"]] for chart in charts] == [
        list("abc"),
        list("bc"),
        list("abc"),
    ]
    assert page.count('class="pair"') == 3 + 2
    assert page.count('class="interval"') == 2
    assert "<td>-0.500</td>" in page


def test_the_page_loads_nothing_and_names_its_script() -> None:
    study = study_of()
    page = build_page(results_of(study, rows_for(study, LOSSES)))
    for element in ("style", "script"):
        (body,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in page
    assert not re.search(r'(?:src|href)="', page)


def test_the_picture_marks_what_its_table_says() -> None:
    study = study_of()
    page = build_page(results_of(study, rows_for(study, LOSSES)))
    lanes = re.findall(
        r'<g class="(\w+)">.*?<line y1="[\d.]+" y2="[\d.]+" class="interval" x1="([\d.]+)" x2="([\d.]+)"',
        page,
    )
    zero = float(re.findall(r'<line x1="([\d.]+)" x2="[\d.]+" y1="0" [^>]*class="zero"', page)[0])
    assert [lane[0] for lane in lanes] == ["lower", "cannot"]
    assert float(lanes[0][1]) < float(lanes[0][2]) < zero
    assert float(lanes[1][1]) < zero < float(lanes[1][2])


def test_a_page_of_a_study_that_has_only_begun() -> None:
    study = study_of()
    page = build_page(results_of(study, rows_for(study, {"a": [3.0]})))
    assert "There is no pair of runs yet." in page
    assert "cannot tell: no pair of runs yet" in page


def test_the_page_says_which_interval_was_taken() -> None:
    study = study_of(seeds=7, head='interval = "bootstrap"\nall_together = true')
    losses = {"a": [3.0] * 7, "b": [3.1, 3.3, 3.2, 3.2, 3.6, 3.1, 3.2], "c": [3.0, 3.3]}
    page = build_page(results_of(study, rows_for(study, losses)))
    assert "97.5%, bootstrap" in page
    assert page.count("(t)</td>") == 1
    study = study_of()
    assert "<dd>95%, t</dd>" in build_page(results_of(study, rows_for(study, LOSSES)))


def test_the_page_says_where_batches_or_steps_differ() -> None:
    def page(settings: str) -> str:
        study = study_of("ab", tail=f'[[variants]]\nname = "c"\n{settings}\n')
        return build_page(results_of(study, rows_for(study, LOSSES)))

    assert "<dd>the same for all runs of a seed</dd>" in page("optimizer.lr = 0.1")
    assert "Of the same batches" in page("optimizer.lr = 0.1")
    assert "not the same: train.batch_tokens" in page("train.batch_tokens = 512")
    assert "Of the same batches" not in page("train.batch_tokens = 512")
    assert "as large as each model asks for" in page("model.width = 64")
    assert "the number of steps differs" in page("train.steps = 16")


def test_a_page_of_more_variants_than_colours() -> None:
    study = study_of("abcdefghijkl", seeds=2)
    page = build_page(results_of(study, rows_for(study, {name: [3.0, 3.1] for name in "abcdefghijkl"})))
    assert "the same" in page
    assert '"kind":"dashed"' in page.replace("&quot;", '"')


def test_colours_can_be_read() -> None:
    css = resources.files("scrimp.study").joinpath("page.css").read_text()
    page = resources.files("scrimp.report").joinpath("page.css").read_text()
    for number in (0, 1):
        mine = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[number]
        ground = re.search(r"--page: (#\w{6})", re.findall(r":root \{(.*?)\}", page, re.DOTALL)[number])
        assert ground is not None
        for colour in re.findall(r"--c\d: (#\w{6})", mine):
            assert _contrast(colour, ground[1]) >= 4.5


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)
