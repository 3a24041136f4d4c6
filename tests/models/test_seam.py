"""Nothing outside of `scrimp.models` knows what a kind of decoder calls its layers, or how it is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import scrimp
from scrimp.models import all_kinds

ROOT = Path(scrimp.__file__).parent
MODELS = ROOT / "models"
WORDS = {
    part for kind in all_kinds() for name in kind.names_elsewhere for part in (name, name.rpartition(".")[2])
}
ORDINARY = {"out", "down", "router"}
"""Words of everybody's; rules keep routers, whoever's they are, in high precision as they do the head."""
KNOWS = re.compile(
    rf"(?<![\w-])({'|'.join(map(re.escape, sorted(WORDS - ORDINARY)))})(?![\w-])"
    r"|\bDecoder\b|\bswiglu\b|\bgeglu\b|^blocks\.$"
)
MAY_KNOW = re.compile(
    "|".join([*map(re.escape, WORDS - ORDINARY), "Decoder", "swiglu", "geglu", r"blocks\."])
)
"""To find the few files that need be parsed."""
ALLOWED = {
    "config/activations.py": "levels of recomputation have names of their own, which plans hold",
}


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names and texts of a module, but for docstrings, with their lines."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.lineno, node.name


def test_no_other_room_names_a_kinds_layers() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in sorted(ROOT.rglob("*.py"))
        if MODELS not in file.parents and str(file.relative_to(ROOT)) not in ALLOWED
        if MAY_KNOW.search(text := file.read_text(encoding="utf-8"))
        for line, word in words_of(ast.parse(text))
        if KNOWS.search(word)
    ]
    assert not found, "\n".join(found)


def test_what_is_allowed_is_needed_and_what_is_forbidden_is_seen() -> None:
    for name in ALLOWED:
        words = words_of(ast.parse((ROOT / name).read_text(encoding="utf-8")))
        assert any(KNOWS.search(word) for _, word in words), name
    source = "blocks = f'blocks.{i}.x'\ny = model.attention.qkv\n"
    assert [word for _, word in words_of(ast.parse(source)) if KNOWS.search(word)] == ["qkv", "blocks."]
