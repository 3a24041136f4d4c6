"""The README tells the truth: its configuration is valid, its commands run, its facts are counted."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import scrimp
from scrimp.cli import main
from scrimp.config import PRESETS, MemoryConfig, load_config, preset
from scrimp.config.activations import LEVELS, OFFLOAD
from scrimp.config.snip import BUDGETS, POLICIES
from scrimp.models import spec_of
from scrimp.precision import RECIPES, parse_rules, storage_bytes

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALLER = [
    "--device=cpu",
    "--model.num-layers=1",
    "--model.width=32",
    "--model.num-heads=2",
    "--model.num-kv-heads=2",
    "--model.ffn-width=64",
    "--data.vocab-size=512",
    "--train.steps=3",
    "--train.sequence=32",
    "--train.batch-tokens=128",
]
"""What makes a run of the README small enough for a test."""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert found, f"the README has no {language} block"
    return found[1]


def test_the_configuration_of_the_readme_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(block("toml"), encoding="utf-8")
    config = load_config(file)
    assert config.run.dir == Path("runs/mine")
    assert config.train.steps == 200


def test_every_command_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my.toml").write_text(block("toml"), encoding="utf-8")
    paragraphs = (f"The {number}th paragraph says {number * number}.\n\n" for number in range(4000))
    (tmp_path / "corpus.txt").write_text("".join(paragraphs), encoding="utf-8")
    lines = [line.removeprefix("$ ") for line in block("console").splitlines()]
    assert len(lines) >= 10
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "scrimp"
        if words[0] in ("train", "plan") and not {"--resume", "--model.weights"} & set(words):
            shards = any("shards" in word for word in words)
            words += [flag for flag in SMALLER if not (shards and "vocab-size" in flag)]
        if words[0] == "prepare":
            words += ["--bpe-vocab-size=512"]
        assert main(words) == 0, f"{line}\n{capfd.readouterr().err}"
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "mine" / "report.html").exists()


def test_the_names_in_the_python_of_the_readme_are_public() -> None:
    code = block("python")
    compile(code, "README.md", "exec")
    names = re.findall(r"scrimp\.(\w+)", code)
    assert len(names) >= 5
    assert set(names) <= set(scrimp.__all__)


def test_the_number_of_presets_is_right() -> None:
    stated = re.search(r"(\d+) presets", README)
    assert stated
    assert int(stated[1]) == len(PRESETS)


def test_the_two_make_lines_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target} " in README
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        *(
            f"docs/{name}.md"
            for name in ("architecture", "evaluation", "precision", "snip", "memory", "lab-log")
        ),
    ],
)
def test_links_and_packages_in_the_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / name).parent.joinpath(target).exists(), target
    for package in re.findall(r"`scrimp\.(?!json`)([a-z_.]+)`", text):  # scrimp.json is a file
        parts = package.split(".")
        # A name is a package, a module, or something that a module defines.
        places = [
            ROOT / "src" / "scrimp" / "/".join(parts[:size]) for size in (len(parts), len(parts) - 1) if size
        ]
        is_exported = package in scrimp.__all__
        assert is_exported or any(place.is_dir() or place.with_suffix(".py").exists() for place in places), (
            package
        )
    for script in re.findall(r"benchmarks/\w+\.py", text):
        assert (ROOT / script).exists(), script


def test_no_document_waits_for_its_figures() -> None:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        assert "@@" not in path.read_text(encoding="utf-8"), path


def test_every_test_that_a_docstring_names_exists() -> None:
    missing = []
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"tests/[\w/]+\.py", text)
        for first, more in re.findall(r"(tests/[\w/]+/)\w+\.py((?:[,;] (?:and )?\w+\.py)+)", text):
            named += [first + name for name in re.findall(r"\w+\.py", more)]
        missing += [f"{path.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_example_of_the_precision_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    assert example
    exec(compile(example[1], "docs/precision.md", "exec"), {})
    size, error = capsys.readouterr().out.split()
    assert int(size) == storage_bytes((64, 256), "e2m1", "nvfp4")
    assert 0.08 < float(re.sub(r"[^\d.]", "", error)) < 0.11


def test_the_precision_guide_names_every_recipe_and_its_rules_are_valid() -> None:
    guide = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        assert f"`{recipe}`" in guide
    rules = re.search(r"```\n(fp8 .*?)```", guide, flags=re.DOTALL)
    assert rules
    layers = spec_of(preset("llama-3m")).origins
    for line in rules[1].splitlines():
        assert parse_rules(line.split()[0]).assign(layers)


SNIP_GUIDE = (ROOT / "docs" / "snip.md").read_text(encoding="utf-8")


def test_the_library_example_of_the_snip_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", SNIP_GUIDE, flags=re.DOTALL)
    assert example
    exec(compile(example[1], "docs/snip.md", "exec"), {"__name__": "guide"})
    share, *formats = re.findall(r"[\w.]+", capsys.readouterr().out)
    assert float(share) >= 0.75
    assert set(formats) <= {"fp8", "nvfp4"}


@pytest.mark.slow
def test_every_command_of_the_snip_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paragraphs = (f"The {number}th paragraph says {number * number}.\n\n" for number in range(4000))
    (tmp_path / "corpus.txt").write_text("".join(paragraphs), encoding="utf-8")
    found = re.search(r"```console\n(.*?)```", SNIP_GUIDE, flags=re.DOTALL)
    assert found
    for line in found[1].splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "scrimp"
        if words[0] in ("train", "plan") and "--model.weights" not in words:
            words += [*SMALLER, "--data.source=corpus.txt"]
        assert main(words) == 0, f"{line}\n{capfd.readouterr().err}"
    assert "config" in (tmp_path / "te.yaml").read_text(encoding="utf-8")


def test_the_snip_guide_names_every_budget_and_policy() -> None:
    for name in (*(f"budget.{budget}" for budget in BUDGETS), *POLICIES):
        assert name in SNIP_GUIDE, name


MEMORY_GUIDE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_command_of_the_memory_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paragraphs = (f"The {number}th paragraph says {number * number}.\n\n" for number in range(4000))
    (tmp_path / "corpus.txt").write_text("".join(paragraphs), encoding="utf-8")
    found = re.search(r"```console\n(.*?)```", MEMORY_GUIDE, flags=re.DOTALL)
    assert found
    for line in found[1].splitlines():
        words = shlex.split(line.removeprefix("$ scrimp "))
        assert main([*words, *SMALLER, "--data.source=corpus.txt"]) == 0, line


def test_the_memory_guide_names_every_choice() -> None:
    settings = [f"memory.{field.name}" for field in dataclasses.fields(MemoryConfig)]
    for name in (*LEVELS, OFFLOAD, *settings):
        assert f"`{name}`" in MEMORY_GUIDE, name
