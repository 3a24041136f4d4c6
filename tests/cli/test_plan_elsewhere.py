"""`scrimp plan --hardware`: what it prints, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from scrimp.cli import main
from scrimp.cli.plan_tables import formats_text
from scrimp.config import preset
from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import config_from_architecture
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.software import software

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
SHAPE = (
    "layers = 4\nwidth = 512\nheads = 8\nkv_heads = 8\nhead_size = 64\nffn_width = 2048\nvocab_size = 32000\n"
)


def plan(*words: str) -> int:
    return main(["plan", *words])


def commands() -> list[str]:
    """Those of the page for other hardware, without the first words; tests/docs runs the others."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ scrimp plan ") for line in lines if "--hardware" in line]


def shown(command: str) -> str:
    """What the page shows below a command, up to the next one."""
    rest = PAGE.partition(f"$ scrimp plan {command}\n")[2].partition("```")[0]
    return rest.partition("$ ")[0]


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_page_print_what_it_shows(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert plan(*shlex.split(command)) == 0
    said = capsys.readouterr().out
    assert ("settings_tried" if "--json" in command else "settings tried") in said
    printed = [parts(line) for line in said.splitlines()]
    for line in shown(command).splitlines():
        words, numbers = parts(line)
        if words and words != "..." and "─" not in words:
            assert any(
                words == other and numbers == pytest.approx(found, rel=0.1, abs=2) for other, found in printed
            ), line


def parts(line: str) -> tuple[str, list[float]]:
    """A line's words, and its numbers: a page of yesterday's constants is close."""
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", line)
    words = " ".join(re.sub(r"\d[\d,]*(?:\.\d+)?", "#", line).split())
    return words, [float(number.replace(",", "")) for number in numbers]


def test_given_degrees_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan("--hardware", "8xh100", "--model.preset", "llama-3.1-8b", "--layout.tp=4", "--layout.pp=2") == 0
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if "zero" in line or "tp" in line]
    assert all("pp 2" in row and "tp 4" in row for row in rows if "tok/s" not in row and "split" not in row)


def test_a_shape_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shape.toml"
    file.write_text(SHAPE, encoding="utf-8")
    words = ["--hardware", "rtx4060ti", "--model.shape", str(file)]
    assert plan(*words, "--train.sequence=1024", "--train.batch-tokens=65536") == 0
    assert "one device" in capsys.readouterr().out
    assert plan(*words) == 2
    assert "give both" in capsys.readouterr().err
    file.write_text(SHAPE + "learned_positions = 512\n", encoding="utf-8")
    assert plan(*words, "--train.sequence=1024", "--train.batch-tokens=65536") == 2
    assert "longer than the model's table of positions" in capsys.readouterr().err


def test_a_hugging_face_folder_is_planned_for_by_its_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_from_architecture(preset("llama-3.1-8b"), dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    common = ("--hardware", "8xh100", "--layout.tp=4", "--layout.pp=2")
    assert plan(*common, "--model.weights", str(tmp_path)) == 0
    by_folder = capsys.readouterr().out
    assert plan(*common, "--model.preset", "llama-3.1-8b") == 0
    assert by_folder == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--hardware 8xh10", "did you mean"),
        ("--hardware rtx4060ti --model.preset llama-3.1-8b", "no layout of the model fits"),
        (
            "--hardware rtx4060ti --model.preset llama-3.1-8b",
            "--optimizer.master-weights False --optimizer.moments",
        ),
        ("--hardware 8xh100 --optimizer.name muon", "does not know optimizer.name muon"),
        ("--hardware 8xh100 --optimizer.name auto", "does not know optimizer.name auto"),
        ("--hardware h100 --model.rank 64 --model.sparse_share 0.03", "a sparse matrix"),
        ("--hardware 8xh100 --layout.tp=3", "no layout has these degrees"),
        ("--hardware 8xh100 --optimizer.lr=0.1", "does not ask for this"),
        ("--hardware 8xh100 --precision snip --budget.saved-bytes=0.5", "budget.saved_bytes"),
        ("--hardware 8xh100 --precision fp8,head=bf16", "one format for all blocks"),
        ("--hardware 8xh100 --train.sequence=100 --train.batch-tokens=250", "multiple of train.sequence"),
        ("--hardware 8xh100 --model.weights somewhere", "does not exist"),
        ("--hardware 8xh100 --model.weights . --save plan.json", "names a preset as it is"),
        ("--hardware 8xh100 --objective fastest", "--objective cannot take this value"),
        ("--hardware 8xh100 --objective smallest-cluster", "neither tokens nor days"),
        ("--hardware 8xh100 --objective smallest-cluster --tokens 1B", "no days"),
        ("--hardware 8xh100 --days 3", "nothing says what"),
        ("--hardware 8xh100 --tokens many", "--tokens is no number of tokens"),
        ("--hardware 8xh100 --tokens 0", "tokens are out of range"),
        ("--hardware 8xh100 --tokens 1B --days 0", "days are out of range"),
        ("--hardware 8xh100 --explain tp=8", "did you mean layout.tp"),
        ("--hardware 8xh100 --explain layout.tp", "--explain asks about a degree"),
        ("--hardware 8xh100 --explain layout.tp=0", "--explain asks about a degree"),
        ("--hardware 8xh100 --explain layout.tp=2,layout.tp=4", "--explain asks twice about a degree"),
        ("--tokens 15T", "--tokens is an option of a search on other hardware"),
        ("--what-if", "--what-if is an option of a search on other hardware"),
        ("--hardware 8xh100 --layout.tp=3", "tp 3 does not divide 8 devices of a node"),
        ("--hardware 9x8xh100 --model.preset llama-3.1-8b --layout.pp 1", "8x8xh100 and 16x8xh100"),
        (
            "--hardware rtx4060ti --model.preset llama-3.1-8b --budget.host-memory 1GB",
            "scrimp plan --hardware ",
        ),
        ("--hardware 8xh100 --objective largest-model --save x", "--save does not go with this"),
        ("--hardware 8xh100 --objective largest-model --simulate", "--simulate does not go with this"),
        ("--hardware 8xh100 --json --simulate", "--json does not go with this"),
        ("--hardware 8xh100 --report nowhere/x.html", "the folder of nowhere/x.html does not exist"),
        ("--hardware 8xh100 --save nowhere/x.json", "the folder of nowhere/x.json does not exist"),
        ("--hardware 8xh100 --layout.schedule zbv --layout.pp 1", "two stages on each of several ranks"),
        ("--hardware 8xh100 --out x", "--out is an option of a plan for this machine"),
        ("--hardware 8xh100 --target torchao", "--target is an option of a plan for this machine"),
        ("--hardware 8xh100 --ranks 2", "--ranks is an option of --tune"),
        ("--hardware 8xh100 --batch x", "--hardware does not go with --batch"),
        ("--batch x --save y", "--save is an option of a search on other hardware"),
        ("--batch x --out y", "--out is an option of a plan for this machine"),
        ("--tune 2 --json", "--json is an option of a search on other hardware"),
        ("--model.shape x", "--model.shape is an option of a search on other hardware"),
        ("--save x", "--save is an option of a search on other hardware"),
        (
            "--hardware rtx4060ti --model.preset llama-3-70b --layout.fsdp 1 --layout.tp 1 --layout.pp 1 "
            "--layout.cp 1",
            "more of these devices do not help",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words.split()) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_cluster_that_is_enough_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.preset", "qwen3-14b", "--train.sequence=4096", "--train.batch-tokens=393216"]
    assert plan("--hardware", "rtx4060ti", *words) == 2
    (name,) = re.findall(r"plan for `scrimp plan --hardware (\S+)`", capsys.readouterr().err)
    assert plan("--hardware", name, *words) == 0


@pytest.mark.parametrize(
    "words",
    [
        "--hardware rtx4060ti --model.preset llama-3.1-8b --train.sequence 4096 --train.batch-tokens 131072 "
        "--optimizer.master-weights False",
        "--hardware 8xl40s --model.preset llama-3.1-8b --memory.activations keep+offload "
        "--memory.optimizer device --train.sequence 8192 --train.batch-tokens 524288 --layout.cp 1",
    ],
)
@pytest.mark.every(2)
def test_host_memory_that_is_enough_is_enough(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words.split(), "--budget.host-memory=50GB") == 2
    said = capsys.readouterr().err
    assert "got      46.6 GiB of host memory" in said
    need = float(re.findall(r"expected ([\d.]+) GiB of host memory", said)[0])
    assert plan(*words.split(), f"--budget.host-memory={0.98 * need:.4f}GiB") == 2
    assert plan(*words.split(), f"--budget.host-memory={1.01 * need:.4f}GiB") == 0


def test_a_layout_that_only_the_host_has_no_room_for_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hardware 8xl40s --model.preset llama-3.1-8b --memory.activations keep+offload --memory.optimizer device"
    more = "--train.sequence 8192 --train.batch-tokens 524288 --budget.host-memory=50GB"
    assert plan(*words.split(), *more.split()) == 0
    said = capsys.readouterr().out
    assert "memory: the host has" in said
    assert "-" not in "".join(re.findall(r"memory: (\S+) GiB over", said))


TWO_KINDS = '[[nodes]]\nnode = "dgx-h100"\n[[nodes]]\nnode = "dgx-a100-80"\n'
HALF_A_NODE = 'name = "mine"\n[[nodes]]\nnode = "dgx-a100-80"\ndevices = 4\n'


@pytest.mark.parametrize(
    ("cluster", "words", "says"),
    [
        (TWO_KINDS, "--model.preset llama-3-70b --layout.tp 1 --layout.pp 1", "or a smaller model\n"),
        pytest.param(
            *(HALF_A_NODE, "--model.preset llama-3-70b", "plan with `count = 2` and `devices = 8` in "),
            marks=pytest.mark.slow,
        ),
        (HALF_A_NODE, "--layout.pp 3 --layout.tp 1", "have one: `count = 1` and `devices = 3` in "),
    ],
)
def test_a_cluster_of_a_file_is_told_what_its_file_would_say(
    cluster: str, words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster, encoding="utf-8")
    assert plan("--hardware", str(file), "--budget.host-memory=1GB", *words.split()) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "xa100-80" not in said[said.index("error:") :]  # a slow search says above what it searches


@pytest.mark.slow
def test_a_plan_for_another_size_than_its_file_is_shown_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, saved = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text(HALF_A_NODE, encoding="utf-8")
    words = ["--hardware", str(cluster), "--model.preset", "llama-3.2-1b", "--save", str(saved)]
    assert plan(*words, "--objective", "smallest-cluster", "--tokens", "1B", "--days", "1") == 2
    said = capsys.readouterr()
    assert "mine: a100-80" in said.out
    assert "write `count = 1` and `devices = 1` in " in said.err
    assert not saved.exists()
    monkeypatch.chdir(tmp_path)
    words[1] = "cluster.toml"
    assert plan(*words) == 0
    # As other folders find it.
    assert json.loads(saved.read_text(encoding="utf-8"))["hardware"] == str(cluster)


def test_states_for_the_host_and_a_pipeline_are_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "8xh100", "--model.preset", "llama-3.1-8b", "--memory.optimizer", "host"]
    assert plan(*words, "--explain", "layout.pp=2") == 0
    assert "states and activations live on the host without a pipeline" in " ".join(
        capsys.readouterr().out.split()
    )
    assert plan(*words, "--layout.pp", "2") == 2
    said = capsys.readouterr().err
    assert "states and activations live on the host without a pipeline alone" in said
    assert "the nearest that have one" not in said


@pytest.mark.slow
def test_why_not_is_answered_with_a_plan_or_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "4xh100", "--model.preset", "llama-3.2-1b"]
    assert plan(*words, "--explain", "layout.tp=4") == 0
    said = capsys.readouterr().out
    assert "tp 4: seconds of a step" in said
    assert "tp 4: bytes of the fullest rank" in said
    assert "why not" not in said
    assert plan(*words, "--explain", "layout.pp=3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no layout has pp 3: pp 3 does not divide 4 devices; pp can be 1, 2, 4" in said
    assert plan(*words, "--explain", "layout.tp=1") == 0
    assert "the best plan has tp 1" in capsys.readouterr().out
    assert plan(*words, "--train.sequence=131072", "--explain", "train.micro_batch=64") == 0
    said = capsys.readouterr().out
    assert "micro_batch 64: " in said


def test_the_share_of_4_bits_is_said_of_formats_of_4_bits() -> None:
    asked = Question(
        model=sizes_of(spec_of(preset("llama-3m"))),
        cluster=load_hardware("8xb200"),
        sequence=512,
        global_batch=8,
        software=software("scrimp"),
    )

    def text(*names: str, **more: Any) -> str:
        formats = FormatBudget(names=names, share=0.5, **more)
        return formats_text(dataclasses.replace(asked, formats=formats))

    assert text("mxfp8", "nvfp4") == "mxfp8 and at most 50% in nvfp4"
    assert text("mxfp8", "fp8", "nvfp4") == "mxfp8, fp8 and at most 50% in nvfp4"
    assert text("bf16", "fp8") == "bf16, fp8"
    profile: Any = object()
    harm = "mxfp8, nvfp4; harm at most "
    assert (
        text("mxfp8", "nvfp4", statistics=profile) == f"{harm}that of SNIP's plan with 50% of FLOPs in 4 bits"
    )
    by_share = text("mxfp8", "nvfp4", statistics=profile, divergence=0.3)
    assert by_share == f"{harm}30% of that of all in the lowest format"


def test_days_and_price_of_all_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hardware", "2xh100", "--model.preset", "llama-3.2-1b", "--layout.fsdp=2", "--tokens"]
    texts = []
    for tokens in ("1.5T", "1,500,000,000,000"):
        assert plan(*words, tokens) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    (days, dollars) = re.findall(r"1.50T tokens: ([\d,.]+) days and \$([\d,]+)", texts[0])[0]
    per_day = 24 * 2 * 2.95
    assert float(dollars.replace(",", "")) == pytest.approx(float(days.replace(",", "")) * per_day, rel=0.01)


SMALL = "--hardware 4xh100 --model.preset llama-3m --train.sequence=512 --train.batch-tokens=32768"


def test_a_saved_plan_is_predicted_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert plan(*SMALL.split(), "--save", str(file)) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if "fsdp" in line or "one dev" in line)
    assert plan("--batch", str(file)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert f"{answer['step_seconds']:.3g}" in shown
    assert plan(*SMALL.split(), "--save", str(file)) == 2
    assert "exists already" in capsys.readouterr().err
    assert plan(*SMALL.split(), "--model.width=128", "--save", str(tmp_path / "other")) == 2
    assert "names a preset as it is" in capsys.readouterr().err


def test_a_plan_says_what_order_costs_and_is_another_one_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SMALL.replace("llama-3m", "llama-3.2-1b").replace("512", "2048") + " --layout.fsdp=4"
    both = ("--train.no-deterministic", "--data.no-mask-documents")
    held = "attention held to FlashAttention-2: +"
    said, seconds = [], []
    for number, words in enumerate(((), both[:1], both)):
        file = tmp_path / f"{number}.json"
        assert plan(*small.split(), *words, "--save", str(file)) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
        assert plan("--batch", str(file)) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_seconds"])
        assert json.loads(file.read_text()).get("attention_kernel") == ("torch" if words == both else None)
    assert held in said[0]
    assert f"without: {' '.join(both)}" in said[0]
    assert held in said[1], "torch has no other kernel for documents"
    assert "attention by torch's choice, not FlashAttention-2: -" in said[2]
    assert seconds[0] == seconds[1] > seconds[2]
    assert plan(*small.replace("h100", "a100-80").split()) == 0
    assert "FlashAttention-2" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_plan_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SMALL.split(), "--layout.pp=2", "--simulate") == 0
    printed = capsys.readouterr().out
    assert "rank 1 of 2" in printed
    assert "rank 2 of 2" in printed
    assert plan(*SMALL.split(), "--layout.fsdp=4", "--layout.zero=3", "--simulate") == 0
    printed = capsys.readouterr().out
    weights = next(line for line in printed.splitlines() if line.startswith(" weights"))
    predicted, counted, _ = map(float, re.findall(r"([\d.]+) MiB", weights))
    # What is gathered does not all live at once.
    assert 0.8 < predicted / counted < 1.3, weights
    shape = tmp_path / "shape.toml"
    shape.write_text(SHAPE, encoding="utf-8")
    assert plan("--hardware", "4xh100", "--model.shape", str(shape), "--simulate") == 2
    assert "a shape cannot be simulated" in capsys.readouterr().err
