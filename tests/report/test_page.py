"""The page as text: complete, safe, small, and written whole or not at all."""

import json
import re
from html.parser import HTMLParser

import pytest
from fake_run import metrics, plan, write_lines, write_run

from scrimp.errors import StorageError
from scrimp.precision import GEMMS, RECIPES
from scrimp.report import write_report
from scrimp.report.plan_section import formats, plan_section
from scrimp.report.read_run import RunRecord, read_run
from scrimp.report.sections import configuration, event_table

EVIL = [
    "<script>document.title='ran'</script>", "</style></title></pre><img src=x onerror=\"document.title='ran'\">",
    "\"'><svg onload=alert(1)>", "a & b &lt; c", "\x00\x01\x1b[31m", "\u202eoverride\u2066", "\ud800\udfff lone",
    "🦔" * 50, "long" * 30_000, "$title ${style} $$", "]]>", "javascript:alert(1)",
]  # fmt: skip


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def write_evil_run(folder):
    """Every place that takes text from outside gets all of EVIL."""
    write_run(folder, 12)
    text = " ".join(EVIL)
    decisions = plan()
    for key in ("gemms", "blocks", "states", "budget", "layout"):
        decisions[key][text] = {
            "fprop": text,
            "activations": text,
            "weights": text,
            "reason": text,
            "saved": text,
        }
    decisions["fingerprint"] = {text: text, "device": text}
    decisions["predicted"][text] = 1.0
    (folder / "plan.json").write_text(json.dumps(decisions))
    printable = (
        text.encode("utf-8", "replace").decode().replace("\x00", "").replace("\x1b", "").replace("\x01", "")
    )
    config = (folder / "config.toml").read_text() + f"{json.dumps(text)} = {json.dumps(text)} # {printable}\n"
    (folder / "config.toml").write_text(config, encoding="utf-8")
    events = [
        {
            "kind": kind,
            "step": 5,
            "time": text,
            "reason": text,
            "prompt": text,
            "text": text + text,
            text: text,
        }
        for kind in ("start", "resume", "plan", "sample", "signal", text)
    ]
    write_lines(folder / "events.jsonl", events)
    return folder


def test_the_page_is_whole(tmp_path):
    path = write_report(write_run(tmp_path / "run", 200))
    assert path == tmp_path / "run" / "report.html"
    page = Tags(path.read_text(encoding="utf-8"))
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    charts = {name for name in ids if name.startswith("chart-")}
    names = {"loss", "lr", "grad-norm", "throughput", "utilisation", "memory", "data-wait"}
    assert charts == {f"chart-{name}" for name in names}
    for words in (
        "held-out loss",
        "MFU, full form",
        "device, predicted",
        "Prompt: ",
        "blocks 0 to 4",
        "torch",
    ):
        assert words in page.text


def test_nothing_is_loaded_from_anywhere(tmp_path):
    page = Tags(write_report(write_evil_run(tmp_path / "run")).read_text(encoding="utf-8"))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "a"} & {
        tag for tag, _ in page.found
    }
    attributes = {name for _, found in page.found for name in found}
    assert not {name for name in attributes if name.startswith("on")}
    assert not attributes & {"src", "href", "style", "srcset", "action", "xlink:href"}
    assert "http:" not in page.text.replace("http-equiv", "")


def test_the_policy_names_the_two_inline_parts_by_hash(tmp_path):
    text = write_report(write_run(tmp_path / "run", 5)).read_text(encoding="utf-8")
    policy = next(found["content"] for tag, found in Tags(text).found if "http-equiv" in found)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    assert text.count("<script>") == text.count("<style>") == 1


def test_text_from_outside_stays_text(tmp_path):
    text = write_report(write_evil_run(tmp_path / "run")).read_text(encoding="utf-8")
    page = Tags(text)
    assert [tag for tag, _ in page.found if tag in ("script", "style")] == ["style", "script"]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", text)
    assert "<script>document.title='ran'</script>" in page.text
    assert "more characters" in page.text
    assert len(text) < 1_000_000


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    folder = write_run(tmp_path / "run", 40)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_run_that_died_early_has_a_page(tmp_path, steps):
    folder = write_run(tmp_path / "run", 300, finished=False)
    write_lines(folder / "metrics.jsonl", metrics(300)[:steps])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    text = write_report(folder).read_text(encoding="utf-8")
    assert "not finished" in text
    assert f"{steps} of 300" in text or steps == 0


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"[]", b"{}", b'{"kind": [], "step": {}, "train": 7}\n{}']
)
def test_one_file_alone_and_damaged_gives_a_page(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert write_report(tmp_path).stat().st_size > 5_000


def test_a_run_without_any_finite_loss_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", 60)
    write_lines(
        folder / "metrics.jsonl", [{"step": step, "loss": None, "skipped": True} for step in range(1, 61)]
    )
    assert "Nothing was recorded" in write_report(folder).read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 3)
    before = sorted(path.name for path in folder.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_report(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def run_record(**fields):
    return RunRecord(**{"folder": None, "name": "run", "columns": {}, **fields})


def test_reasons_are_read_from_the_comments_of_the_configuration():
    text = 'a = "x # no comment"  # why a\n# above\nb = 1\n[t.u]\nc = \'#\' # why c\nodd line\nd = "q\\"#" # why d\n'
    rows = re.findall(r"<tr>.*?</tr>", str(configuration(run_record(config_text=text))))
    cells = [re.sub(r"<[^>]*>", "|", row) for row in rows[1:]]
    assert "|a|" in cells[0]
    assert "x # no comment" in cells[0]
    assert "why a" in cells[0]
    assert "above" in cells[1]
    assert "why c" in cells[2]
    assert "odd line" in cells[3]
    assert "why d" in cells[4]


def test_many_events_are_cut_and_say_so():
    events = [{"kind": "checkpoint", "step": step} for step in range(500)] + [{"kind": "finish", "step": 500}]
    table = str(event_table(run_record(events=events)))
    assert table.count("<tr>") == 1 + 30 + 1
    assert "470 more events" in table
    assert "<b>500</b> checkpoint" in table


def test_equal_blocks_share_a_row_and_unequal_ones_do_not(tmp_path):
    section = str(plan_section(read_run(write_run(tmp_path / "run", 3))))
    assert "blocks 0 to 4" in section
    assert "block 5" in section
    assert "24 of 25" in section
    assert "difference" in section
    assert "+11.6%" in section


def test_formats_are_one_label_or_three():
    same = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16", "saved": "bf16"}
    assert str(formats(same)).count("fmt bf16") == 1
    mixed = {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16", "saved": "fp8"}
    assert re.findall(r"fmt (\w+)", str(formats(mixed))) == ["fp4", "fp8", "bf16"]
    assert "saves fp8" in str(formats(mixed))
    assert "saves {&#x27;fp8&#x27;: " in str(formats(same | {"saved": {"fp8": ["of a damaged plan"]}}))


def test_recipes_have_the_colour_of_their_width():
    shown = {
        name: re.findall(r"fmt (\w+)", str(formats(dict.fromkeys(GEMMS, name) | {"saved": name})))[0]
        for name in RECIPES
    }
    assert shown == {
        **{name: name for name in ("fp32", "bf16", "fp8", "fp4")},
        **dict.fromkeys(("fp8_tensor", "fp8_row", "mxfp8", "int8", "int8_fallback", "int8_hadamard"), "fp8"),
        **dict.fromkeys(("nvfp4", "mxfp4"), "fp4"),
    }
    assert "fmt other" in str(formats(dict.fromkeys(GEMMS, "int4")))


def test_a_recomputed_input_is_said_to_be_recomputed():
    choice = str(formats({"fprop": "fp8_row", "dgrad": "fp8_row", "wgrad": "bf16", "saved": "recompute"}))
    assert "recomputes its input" in choice
    assert "saves" not in choice


def test_rules_of_precision_can_break_behind_their_commas(tmp_path):
    folder = write_run(tmp_path / "run", 3)
    text = (folder / "config.toml").read_text(encoding="utf-8")
    text = text.replace('precision = "fp32"', 'precision = "fp8,*.wgrad=bf16, blocks.0.*=bf16"')
    (folder / "config.toml").write_text(text, encoding="utf-8")
    page = Tags(write_report(folder).read_text(encoding="utf-8"))
    assert "fp8, *.wgrad=bf16, blocks.0.*=bf16" in page.text
    assert (
        "fp8,*.wgrad=bf16, blocks.0.*=bf16" in page.text
    )  # the configuration itself, as it stands in the file
