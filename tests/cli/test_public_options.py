"""The public names of every command. A change here breaks users' scripts and files: it needs a reason."""

from __future__ import annotations

import re

import pytest

from scrimp.cli import main
from scrimp.cli.commands import COMMANDS
from scrimp.cli.parse import flags_of, option, positionals_of
from scrimp.config import Config, leaves

CONFIG = """
--device --precision --backend
--run.dir --run.seed --run.rounding-seed
--data.source --data.mix --data.tokens --data.text-column --data.chat-template --data.tokenizer
--data.vocab-size --data.held-out
--data.mask-documents --data.no-mask-documents --data.cache
--model.preset --model.weights --model.kind --model.vocab-size --model.context --model.num-layers --model.width
--model.num-heads --model.num-kv-heads --model.ffn-width --model.rank --model.sparse-share
--model.capacity-factor
--adapter.rank --adapter.alpha --adapter.targets --adapter.base
--train.steps --train.sequence --train.batch-tokens --train.micro-batch --optimizer.name --optimizer.lr
--schedule.name --schedule.warmup-steps --schedule.final-lr-ratio --optimizer.weight-decay --optimizer.beta1
--optimizer.beta2 --optimizer.eps --optimizer.momentum --optimizer.embedding-lr-ratio
--optimizer.rank --optimizer.refresh-every --optimizer.low-rank-scale --optimizer.refactor-every
--optimizer.clip --objective.name --objective.teachers --objective.teacher-momentum --objective.teacher-weight
--objective.written --objective.written-tokens --objective.reference-losses --objective.excess-scale
--objective.z-loss
--train.parameters --optimizer.master-weights --optimizer.moments --optimizer.from-weights
--optimizer.no-from-weights --train.loss-chunk
--train.compile --train.deterministic --train.no-deterministic
--evaluation.every --evaluation.tokens --evaluation.precision
--checkpoint.every --checkpoint.keep-last --checkpoint.keep-every
--train.nonfinite-patience
--budget.device-memory --budget.host-memory --budget.fp4-flops --budget.step-seconds --budget.speedup
--budget.divergence --budget.saved-bytes
--layout.dp --layout.fsdp --layout.cp --layout.cp-method --layout.tp --layout.zero --layout.search --layout.no-search
--layout.gathered --layout.switch --layout.no-switch
--layout.pp --layout.virtual --layout.schedule --layout.stages --layout.ep --layout.etp --layout.backends
--outer.every --outer.lr --outer.momentum --outer.overlap --outer.no-overlap --outer.clip --outer.exchange
--outer.copies
--memory.activations --memory.weights --memory.gradients --memory.optimizer --memory.update
--memory.split
--snip.formats --snip.policy --snip.start --snip.first --snip.every --snip.at --snip.delay --snip.batches
--snip.gains --snip.loss-weight --snip.update-weight --snip.curvature-weight --snip.final-share
--snip.final-weight --snip.probe-every
"""

PUBLIC = {
    "train": f"[FILE] --resume --resume-from --restart --trust-code --plan {CONFIG}",
    "plan": f"[FILE] --out --hardware --model.shape --objective --tokens --days --explain "
    f"--what-if --json --report --save --statistics --simulate --batch --tune --ranks --target --trust-code {CONFIG}",
    "launch": "COMMAND --ranks --grace --restarts --min-ranks --copies",
    "prepare": "SRC OUT --text-column --conversations --chat-template --tokenizer --bpe-vocab-size --held-out "
    "--workers",
    "demonstrate": "SRC OUT --bank --count --by --tasks --model --device --seed --trust-code",
    "align": "SOURCE TARGET OUT",
    "verify": "PATH",
    "eval": "TARGET --data --tasks --checkpoints --beside --text-column --conversations --sequence --device "
    "--trust-code",
    "chat": "TARGET --system --chat-template --tokens --temperature --top-k --top-p --seed --device --trust-code",
    "generate": "TARGET --prompt --tokens --temperature --top-k --top-p --seed --device --trust-code",
    "choose-base": "TARGET --data --budget --formats --tokens --text-column --conversations --sequence --device",
    "export": "RUN OUT --adapter --trust-code",
    "export-precision": "SOURCE OUT --target --names --approximate",
    "export-layout": "SOURCE OUT --target --approximate",
    "report": "RUN",
    "score": "[STUDIES] --out --card",
    "study": "STUDY --out --seeds --hours --set --at-once --ray --dry-run --report --trust-code",
    "doctor": "--device --json --fresh --ranks",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_names_of_options_and_arguments_are_frozen(name: str, capsys) -> None:
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip("|│ ") for line in shown.split("\n")]
    # What begins a line of a box is an option with its other spellings; the rest explains it.
    options = {
        word
        for line in lines
        if re.match("--[a-z]", line)
        for word in re.findall(r"--[a-z][a-z0-9.-]+", line.split("   ")[0])
    }
    words = PUBLIC[name].split()
    positionals = " ".join(word for word in words if not word.startswith("--"))
    assert options == {word for word in words if word.startswith("--")}
    usage = lines[0].removeprefix(f"usage: scrimp {name} [-h] ").replace("[OPTIONS] ", "")
    assert usage.startswith(positionals)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_explains_mistakes_knows_the_same_names(name: str) -> None:
    known = flags_of(COMMANDS[name])
    options = {option(key) for key in known if key not in positionals_of(COMMANDS[name])}
    expected = {word for word in PUBLIC[name].split() if word.startswith("--") and ".no-" not in word}
    assert options == expected


def test_the_command_line_has_every_setting() -> None:
    assert {option(key) for key in leaves(Config)} == {word for word in CONFIG.split() if ".no-" not in word}
