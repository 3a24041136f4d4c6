"""Conversations small enough to learn by heart, and a template for the bytes tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

FACTS = {
    "What is the capital of France?": "Paris.",
    "Who are you?": "I am Scrimp.",
    "What is two and two?": "Four.",
    "Which colour is the sky?": "Blue.",
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = [
    "--device=cpu",
    "--objective.name=sft",
    "--model.num-layers=2",
    "--model.width=64",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.ffn-width=128",
    "--train.sequence=128",
    "--train.batch-tokens=1024",
    "--optimizer.lr=5e-3",
]


def conversations(count: int = 60) -> list[list[dict[str, str]]]:
    """One or two of the facts each."""
    questions = list(FACTS)
    found = []
    for i in range(count):
        asked = [questions[i % 4]] + [questions[i // 3 % 4]] * (i % 3 == 0)
        found.append(
            [
                {"role": role, "content": text}
                for question in asked
                for role, text in (("user", question), ("assistant", FACTS[question]))
            ]
        )
    return found


def write_chats(folder: Path, count: int = 60) -> tuple[Path, Path]:
    """JSONL, and the template."""
    source, template = folder / "chats.jsonl", folder / "template.jinja"
    rows = [json.dumps({"messages": messages}) + "\n" for messages in conversations(count)]
    source.write_text("".join(rows), encoding="utf-8")
    template.write_text(TEMPLATE, encoding="utf-8")
    return source, template


def sft_flags(folder: Path, run_dir: Path, *more: str) -> list[str]:
    """The command line of a small run from scratch; the folder has the conversations."""
    return [
        "train",
        *SMALL,
        f"--data.source={folder / 'chats.jsonl'}",
        f"--data.chat-template={folder / 'template.jinja'}",
        "--data.tokenizer=bytes",
        f"--data.cache={folder / 'cache'}",
        f"--run.dir={run_dir}",
        *more,
    ]
