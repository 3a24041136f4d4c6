"""Advice can be typed as it stands: every option and setting that a message names exists where it is said."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import scrimp
from scrimp.cli import main
from scrimp.cli.advice import in_words_of
from scrimp.cli.commands import COMMANDS, Prepare
from scrimp.cli.parse import flags_of, option
from scrimp.config import Config, leaves
from scrimp.errors import DataError
from scrimp.precision import parse_rules

SOURCE = Path(scrimp.__file__).parent
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_.-]*[a-z0-9])")
CALL = re.compile(r"scrimp ([a-z-]+)((?:(?!scrimp )[^`;])*)")
KEY = re.compile(r"(?<![\w./-])((?:run|data|model|train|budget|memory|snip)\.[a-z_0-9]+)(?![\w(])")
OF_OTHER_PROGRAMS = {
    "master-port",
    "ulimit",
    "decompress",
    "long",
    "te-precision-config-file",
    "account",
    "partition",
    "module",
    "config",
    "pipeline_model_parallel_layout",
    "use_megatron_fsdp",
    "recompute_modules",
    "head",
    "help",
    "version",
}
OF_ONE_COMMAND = {
    "cli/chat.py": "chat",
    "cli/demonstrate.py": "demonstrate",
    "cli/doctor.py": "doctor",
    "cli/base_formats.py": "choose-base",
    "cli/eval_options.py": "eval",
    "cli/eval_tasks.py": "eval",
    "cli/export.py": "export-precision",
    "config/sampling.py": "generate",
    "models/huggingface/adapter_files.py": "export",
    "export/layer_names.py": "export-precision",
    "export/layout_file.py": "export-layout",
    "cli/launch.py": "launch",
    "cli/launch_copies.py": "launch",
    "optim/copies.py": "launch",
    "optim/copy_rounds.py": "launch",
    "config/layout.py": "launch",
    "cli/study.py": "study",
    "tasks/built_in.py": "eval",
    "study/estimate.py": "study",
    "study/on_ray.py": "study",
    "study/variants.py": "study",
}
OF_SEVERAL_COMMANDS = {
    "cli/commands.py",
    "cli/model_commands.py",
    "cli/advice.py",
    "cli/entry.py",
    "cli/ranks.py",
    "cli/trained.py",
    "training/finish.py",
}
HOLE = "{}"


@functools.cache
def options(command: str) -> set[str]:
    names = {option(key)[2:] for key in flags_of(COMMANDS[command])}
    switched_off = {
        name.rpartition(".")[0] + ".no-" + name.rpartition(".")[2] for name in names if "." in name
    }
    return names | switched_off


@functools.cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def texts() -> Iterator[tuple[str, str]]:
    """File and text of every string that is no docstring in files that name options; what is filled in later is {}."""
    for path in (path for path, text in sources().items() if "--" in text):
        nodes = list(ast.walk(ast.parse(sources()[path])))
        inside, docstrings = set(), set()
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                inside.update(id(part) for part in ast.walk(node) if part is not node)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings.add(id(node.value))
        name, left_out = path.relative_to(SOURCE).as_posix(), docstrings | inside
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                yield name, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                yield name, node.value


def test_every_option_in_a_message_exists_in_its_command() -> None:
    seen = 0
    everywhere = set().union(*(options(command) for command in COMMANDS))
    for file, text in texts():
        rest = text
        for call in CALL.finditer(text):
            if call[1] in COMMANDS:
                for flag in FLAG.findall(call[2]):
                    assert flag in options(call[1]) | OF_OTHER_PROGRAMS, f"{file}: {text}"
                    seen += 1
                rest = rest.replace(call[0], "")
        flags = FLAG.findall(rest)
        if not flags:
            continue
        known = options(OF_ONE_COMMAND.get(file, "train")) | options("plan")
        if file in OF_SEVERAL_COMMANDS:
            known = everywhere
        for flag in flags:
            assert flag in known | OF_OTHER_PROGRAMS, f"{file}: {text}"
            seen += 1
    assert seen > 50, "the harvest finds the messages"


def test_every_setting_in_advice_exists() -> None:
    known, found = leaves(Config), 0
    for path in (path for path, text in sources().items() if "do=" in text or "expected=" in text):
        for node in ast.walk(ast.parse(sources()[path])):
            if not (isinstance(node, ast.keyword) and node.arg in ("do", "expected")):
                continue
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    for key in KEY.findall(part.value):
                        assert key in known, f"{path.name}: {part.value}"
                        found += 1
    assert found > 40, "the harvest finds the advice"


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("column", [None, "body"])
def test_prepare_names_its_own_options(
    column: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "one"}\n{"title": "two"}\n', encoding="utf-8")
    words = ["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "out")]
    text = refused(words + ([] if column is None else ["--text-column", column]), capsys)
    assert "--text-column" in text
    assert not KEY.search(text.replace(str(tmp_path), ""))
    assert main([*words, "--text-column", "title", "--tokenizer", "bytes"]) == 0


def test_prepare_says_how_to_hold_nothing_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("1", encoding="utf-8")
    words = ["prepare", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert "set --held-out to 0" in refused(words, capsys)
    assert main([*words, "--held-out", "0"]) == 0


def test_prepare_of_shards_and_of_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one document", encoding="utf-8")
    out = str(tmp_path / "out")
    assert main(["prepare", str(tmp_path / "a.txt"), out, "--tokenizer", "bytes", "--held-out", "0"]) == 0
    capsys.readouterr()
    assert f"`scrimp train --data.source {out}`" in refused(["prepare", out, str(tmp_path / "again")], capsys)
    assert "the spelling of SRC" in refused(["prepare", str(tmp_path / "absent"), out + "2"], capsys)


def test_an_error_keeps_its_kind_and_what_is_a_command_line() -> None:
    error = DataError(
        "data.text_column is wrong",
        got="model.data.text_column",
        do="set --data.text-column, data.held_out, or run `scrimp train --data.text-column x`; see optimizer.lr",
    )
    said = in_words_of("prepare", Prepare, error)
    assert said is error
    assert said.what == "--text-column is wrong"
    assert said.got == "model.data.text_column"
    assert (
        said.do
        == "set --text-column, --held-out, or run `scrimp train --data.text-column x`; see optimizer.lr"
    )


@pytest.mark.parametrize(
    ("rules", "advice"),
    [
        ("fp8,*.wgrad", "*.wgrad=bf16"),
        ("fp8,wgrad", "*.wgrad=bf16"),
        ("fp8,blocks.0.*", "blocks.0.*=bf16"),
        ("fp8,bf16", "*=bf16"),
        ("fp8,fp8/fp8/bf16", "*=fp8/fp8/bf16"),
        ("fp8,bf61", "*=bf16"),
    ],
)
def test_advice_on_half_a_rule_is_a_rule(rules: str, advice: str) -> None:
    with pytest.raises(scrimp.errors.ConfigError) as wrong:
        parse_rules(rules)
    assert (wrong.value.do or "").removesuffix("?").endswith(advice)
    parse_rules(f"fp8,{advice}")


def test_a_base_is_not_moved_before_another() -> None:
    for rules, advice in (("*.wgrad=bf16,snip", "write snip first"), ("fp8,snip", "leave fp8 or snip out")):
        with pytest.raises(scrimp.errors.ConfigError) as wrong:
            parse_rules(rules)
        assert wrong.value.do == advice
