"""The commands: what each takes, and the one call that it makes into the other rooms; those on a trained model apart.

A command is a frozen dataclass: its fields are its arguments, their docstrings its help. `execute`
imports what it calls, so that `scrimp --help` and a mistyped option never wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from scrimp.cli.model_commands import Chat, ChooseBase, Evaluate, Export, Generate
from scrimp.cli.plan_options import refuse_options_of_others
from scrimp.config import (
    RANGES,
    Config,
    Range,
    check_device,
    check_range,
)
from scrimp.launchers import GRACE_S

_COUNT = Range(1, 2**31 - 1)


class Command(Protocol):
    """One command with its arguments."""

    def execute(self, given: frozenset[str]) -> int:
        """Do it; returns the exit code. `given` holds the dotted keys that the user set."""
        ...


@dataclass(frozen=True)
class Train:
    """Train a model as the configuration says: defaults, then FILE, then the options given here."""

    file: Positional[Path | None] = None
    """TOML file with the same settings as the options below, or recipe:NAME. Without one: the defaults. With
    [[stages]] of settings in it, runs one after another, each from the weights of the one before."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the newest checkpoint in run.dir that is whole and finite."""
    resume_from: int | None = None
    """Go on from the checkpoint of this step instead; newer ones are set aside, as checkpoints/left-step-*."""
    restart: FlagCreatePairsOff[bool] = False
    """With --resume: begin again at step 0 where no checkpoint can be used. The run's earlier logs are dropped."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code that settings name as FILE.py:NAME. No file can say this: it is given with each command."""
    plan: Path | None = None
    """Train by a plan of the search that was saved, on the hardware that it is for."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.training import train

        if self.resume_from is not None:
            check_range("--resume-from", self.resume_from, _COUNT)
        config, seconds = self.config, None
        if self.plan is not None:
            from scrimp.cli.planned_run import by_plan

            resumes = self.resume or self.resume_from is not None
            config, given, seconds = by_plan(config, self.plan, given, resumes=resumes)
        return train(
            config,
            resume=self.resume,
            resume_from=self.resume_from,
            restart=self.restart,
            given=given,
            planned_seconds=seconds,
        ).exit_code


@dataclass(frozen=True)
class Plan:
    """Show what a run would take, and start nothing: parameters, FLOPs, bytes, tokens/s if measured.

    With --precision snip --model.weights RUN: measure the run's newest checkpoint, and show the formats that this
    gives.
    """

    file: Positional[Path | None] = None
    """TOML file with the same settings as the options below, or recipe:NAME. Without one: the defaults."""
    out: Path | None = None
    """Write the measured plan of precision here, as JSON."""
    hardware: str | None = None
    """Find the fastest layouts on hardware that is not here: h100, 8xh100, 128x8xh100, or a TOML file of a
    node or a cluster."""
    shape: Annotated[Path | None, arg(name="model.shape")] = None
    """With --hardware: a TOML file of the model's shape, instead of a preset."""
    objective: Literal["step-time", "cost", "smallest-cluster", "longest-context", "largest-model"] = (
        "step-time"
    )
    """With --hardware: the fastest step, and so the most tokens a day; the cheapest tokens; the fewest of these
    devices that train --tokens in --days; the longest sequence or the largest model of this shape that fits."""
    tokens: str | None = None
    """With --hardware: tokens of the whole training, as 15T, and what they cost."""
    days: float | None = None
    """With --tokens: days that they may take."""
    explain: str | None = None
    """With --hardware: why not this, as layout.tp=8, beside the best plan."""
    what_if: FlagCreatePairsOff[bool] = False
    """With --hardware: the best plan with one more node, a slower link, half the batch, twice the memory."""
    json: FlagCreatePairsOff[bool] = False
    """With --hardware: print the answer as JSON."""
    report: Path | None = None
    """With --hardware: write the answer as a page, with the pipeline's timeline and memory by stage."""
    save: Path | None = None
    """With --hardware: write the best plan here, as the line of JSON that --batch reads and export-layout exports."""
    statistics: Path | None = None
    """With --hardware and --precision snip: statistics of the model that scrimp.measure wrote; what a format spoils is
    read from them."""
    simulate: FlagCreatePairsOff[bool] = False
    """With --hardware: count the best plan's memory on a fake process group of that many ranks, in this process."""
    batch: Path | None = None
    """Predict seconds and bytes of settings for any hardware, one a line of JSON, and print one answer a line."""
    tune: int | None = None
    """Try so many short runs of this configuration here, in folders that are thrown away: which train.micro_batch,
    memory.activations and, with --ranks, layout is fastest, of those that it leaves open."""
    ranks: int | None = None
    """With --tune: processes of this machine, a rank each. Unset: those of the layout's degrees."""
    target: Literal["scrimp", "torchao", "transformer-engine"] = "scrimp"
    """Plan within what this trainer runs, so that export-precision can say all of it."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code that settings name as FILE.py:NAME. No file can say this: it is given with each command."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)

    def execute(self, given: frozenset[str]) -> int:
        refuse_options_of_others(self)
        if self.batch is not None:
            from scrimp.cli.predict_lines import predict_lines

            return predict_lines(self.batch, given)
        if self.hardware is not None:
            from scrimp.cli.plan_elsewhere import plan_elsewhere
            from scrimp.cli.plan_question import Ask

            names = (one.name for one in fields(Ask))
            ask = Ask(**{name: getattr(self, name) for name in names})
            return plan_elsewhere(ask, self.config, given)
        if self.tune is not None:
            check_range("--tune", self.tune, Range(1, 10_000))
            if self.ranks is not None:
                check_range("--ranks", self.ranks, Range(1, 4096))
            from scrimp.cli.plan_tune import plan_tune

            return plan_tune(self.config, given, self.tune, self.ranks, trusts=self.trust_code)
        from scrimp.cli.dry_run import dry_run

        dry_run(self.config, given, self.out, None if self.target == "scrimp" else self.target)
        return 0


@dataclass(frozen=True)
class Prepare:
    """Turn text into token shards. Interrupted, it continues after the last finished shard."""

    src: Positional[str]
    """stdlib, or a package of it, as stdlib:email; copy or label-maps:KIND, tasks; a text, JSONL or Parquet
    file (also .gz, .zst); a folder of them; a saved datasets folder; or hf:OWNER/NAME."""
    out: Positional[Path]
    """Folder for the shards."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text; of conversations, messages unless another is named."""
    conversations: FlagCreatePairsOff[bool] = False
    """The source holds conversations: rows of messages, for training with objective.name sft."""
    chat_template: Path | None = None
    """Jinja file that writes conversations. Unset: the tokenizer's own template."""
    tokenizer: str = "bpe"
    """bytes; bpe (trained on the corpus); or a folder with a tokenizer.json."""
    bpe_vocab_size: int = 4096
    """Vocabulary of a BPE trained on the corpus."""
    held_out: float | Path = 0.02
    """Share of the text kept for evaluation, in documents chosen by a hash of their text; or a file
    (or another source) to evaluate on. Of a saved data set with a validation split: 0, or that split."""
    workers: int | None = None
    """Documents encoded at a time. Unset, or not fewer than there are cores: all cores."""

    def execute(self, given: frozenset[str]) -> int:
        check_range("--bpe-vocab-size", self.bpe_vocab_size, RANGES["data.vocab_size"])
        if not isinstance(self.held_out, Path):
            check_range("--held-out", self.held_out, RANGES["data.held_out"])
        if self.workers is not None:
            check_range("--workers", self.workers, Range(1, 1024))
        from scrimp.data import CorpusSpec, prepare

        spec = CorpusSpec(
            source=self.src,
            text_column=self.text_column,
            conversations=self.conversations,
            chat_template=self.chat_template,
            tokenizer=self.tokenizer,
            bpe_vocab_size=self.bpe_vocab_size,
            held_out=self.held_out,
        )
        print(f"token shards: {prepare(spec, self.out, workers=self.workers)}")
        return 0


@dataclass(frozen=True)
class Demonstrate:
    """Put the nearest labelled examples of a bank before each question: conversations to train and evaluate on.

    The answers of examples have weight 0: what is learnt, or measured, is the answer to the question itself.
    """

    src: Positional[Path]
    """JSONL of rows {"question": ..., "answer": ...}, each with its "task" where tasks are told apart."""
    out: Positional[Path]
    """New file, NAME.jsonl."""
    bank: Path | None = None
    """JSONL of the same form, from which examples are chosen. Unset: SRC; never the same question."""
    count: int = 4
    """Examples before each question; fewer where no more fit."""
    by: Literal["bm25", "embedding", "random", "none"] = "bm25"
    """bm25: by the words of questions; embedding: by the cosine of their mean hidden states in --model; random; none:
    the questions alone."""
    tasks: Literal["any", "same", "other"] = "any"
    """Whose examples: those of any task, of the question's own, or of others alone."""
    model: Path | None = None
    """With --by embedding: a run folder, one of its checkpoints, or a Hugging Face model folder."""
    device: str = "auto"
    """With --by embedding: auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """With --by random: another one is another draw."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code of a run whose model is a kind of its own."""

    def execute(self, given: frozenset[str]) -> int:
        check_range("--count", self.count, _COUNT)
        check_range("--seed", self.seed, RANGES["run.seed"])
        check_device(self.device, "--device")
        from scrimp.cli.demonstrate import demonstrate, refuse_options_of_others

        refuse_options_of_others(self, given)
        return demonstrate(self)


@dataclass(frozen=True)
class Align:
    """Find which sentences of two documents, one a translation of the other, belong together: by the two alone."""

    source: Positional[Path]
    """Text in one language, in UTF-8."""
    target: Positional[Path]
    """The same in the other one."""
    out: Positional[Path]
    """New JSONL file of pairs: source, target, score from 0 to 1, and text, which data.source reads."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.data.parallel_text import mine, refuse_out, write_pairs

        refuse_out(self.out)
        mined = mine(self.source, self.target)
        write_pairs(mined, self.out)
        print(
            f"{self.out}: {len(mined.kept):,} pairs of {len(mined.source):,} and {len(mined.target):,} sentences; "
            f"{mined.found - len(mined.kept):,} more were left out for their lengths or their language"
        )
        return 0


@dataclass(frozen=True)
class Verify:
    """Check all of a corpus, a run, a checkpoint or an exported model, and name the newest sound checkpoint."""

    path: Positional[Path]
    """Its folder; what it is is told by its files."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.training import verify_path

        words, is_sound = verify_path(self.path)
        print(words)
        return 0 if is_sound else 2


@dataclass(frozen=True)
class ExportPrecision:
    """Write a run's precision plan as a file for torchao, or for Transformer Engine in Megatron."""

    source: Positional[Path]
    """Run folder, its plan.json, or a plan that `scrimp plan --out` wrote."""
    out: Positional[Path]
    """New file."""
    target: Literal["torchao", "transformer-engine"]
    """torchao: Python with convert(model). transformer-engine: YAML for --te-precision-config-file."""
    names: Literal["scrimp", "huggingface", "megatron"] = "huggingface"
    """Whose names the layers have there."""
    approximate: FlagCreatePairsOff[bool] = False
    """What cannot be said runs in the nearest formats of no fewer bits, instead of bf16; each change is listed."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.cli.export import export_to_file

        return export_to_file(self.source, self.out, self.target, self.names, approximate=self.approximate)


@dataclass(frozen=True)
class ExportLayout:
    """Write a plan for other hardware as a configuration of TorchTitan, or as flags of Megatron-Bridge."""

    source: Positional[Path]
    """Plan that `scrimp plan --hardware ... --save` wrote."""
    out: Positional[Path]
    """New file."""
    target: Literal["torchtitan", "megatron-bridge"]
    """torchtitan: Python with a configuration, scrimp_plan. megatron-bridge: a shell script with flags."""
    approximate: FlagCreatePairsOff[bool] = False
    """What the trainer cannot be told is left to what is nearest; each change is listed. Else it is refused."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.cli.export_layout import export_layout_to_file

        return export_layout_to_file(self.source, self.out, self.target, approximate=self.approximate)


@dataclass(frozen=True)
class Report:
    """Write a run's report.html: one page with curves, memory, configuration and samples."""

    run: Positional[Path]
    """Run folder."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.report import write_report

        print(write_report(self.run))
        return 0


@dataclass(frozen=True)
class StudyCommand:
    """Compare variants of a run over seeds, on the same data in the same order: intervals, and a verdict for each.

    What was interrupted goes on where it stopped. Runs that fail are tried again by the next call.
    """

    study: Positional[str]
    """A TOML file; the name of a study that ships; recipe:NAME; or a folder of results, to make its page again."""
    out: Path | None = None
    """Folder of the results. Unset: studies/ and the study's name."""
    seeds: int | None = None
    """So many seeds instead of the file's: its own first, then further ones."""
    hours: float | None = None
    """As many seeds as so many hours have room for, by first steps; two at least."""
    set: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A setting of the runs as KEY=VALUE, in the place of the file's, such as model.weights=FOLDER or
    budget.fp4_flops=0.9; once for each. Where variants have it, in those; else in all runs; trunk.KEY=VALUE in the
    trunk."""
    at_once: int | None = None
    """Most runs at once. Unset: as many as memory and cores allow; runs that are timed go alone."""
    ray: str | None = None
    """Run on the machines of a Ray cluster: its address, auto, or local for one on this machine."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Show the runs, their hours and the smallest difference that they can see, and run nothing but first steps."""
    report: FlagCreatePairsOff[bool] = False
    """Make the page again from the rows that there are."""
    trust_code: FlagCreatePairsOff[bool] = False
    """Run the code that settings name as FILE.py:NAME. No file can say this: it is given with each command."""

    def execute(self, given: frozenset[str]) -> int:
        if self.seeds is not None:
            check_range("--seeds", self.seeds, Range(1, 10_000))
        if self.hours is not None:
            check_range("--hours", self.hours, Range(0, 10_000, above=True))
        if self.at_once is not None:
            check_range("--at-once", self.at_once, Range(1, 10_000))
        from scrimp.cli.study import study

        return study(self)


@dataclass(frozen=True)
class Score:
    """Rank the submissions of finished studies by the steps that they took to the studies' targets: time to result.

    Each study is a workload, or a held-out variant of one. Ratios, performance profiles and scores are AlgoPerf's.
    """

    studies: Positional[tuple[Path, ...]]
    """Folders of results, each of a study with figure = "steps_to_target"."""
    out: Path = Path("score.html")
    """The page."""
    card: str | None = None
    """Predict seconds to the targets on a card that need not be here, such as h100 or b200."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.cli.score import score

        return score(self.studies, self.out, self.card)


@dataclass(frozen=True)
class Doctor:
    """Try every recipe and back end on a device: works, wrong, slower than bf16, or not available, and why.

    The report is kept for this device, driver and versions; training takes the fastest that works.

    With --ranks, on several processes: how fast the links between them are.
    """

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: FlagCreatePairsOff[bool] = False
    """Print the report as JSON."""
    fresh: FlagCreatePairsOff[bool] = False
    """Measure again, even if a report is kept."""
    ranks: FlagCreatePairsOff[bool] = False
    """Measure the links between ranks instead, about 20 s: scrimp launch --ranks 4 doctor --ranks. Kept for these
    hosts and devices; scrimp plan and scrimp train say by it which order of ranks is best."""

    def execute(self, given: frozenset[str]) -> int:
        check_device(self.device, "--device")
        if self.ranks:
            from scrimp.cli.doctor_ranks import show_links

            return show_links(self.device, as_json=self.json)
        from scrimp.cli.doctor import show_doctor

        return show_doctor(self.device, as_json=self.json, fresh=self.fresh)


@dataclass(frozen=True)
class Launch:
    """Run a command on several processes of this machine, a rank each: scrimp launch --ranks 4 train FILE.toml.

    Its exit code is that of the first rank that failed. For several nodes: torchrun, or srun.
    """

    command: Positional[str]
    """The command, with its own options after it: train ..."""
    ranks: int
    """Processes; on CUDA one for each device."""
    grace: float = GRACE_S
    """Seconds that ranks have to write their last checkpoint after a signal, or where one failed, before they are
    killed."""
    restarts: int = 0
    """How often ranks are started again after one was lost: the run goes on from its newest checkpoint."""
    min_ranks: int | None = None
    """With --restarts: go on with fewer processes, so many at least, without one that was lost twice."""
    copies: int = 1
    """Copies of the model, each a job of so many ranks: where one is lost, the others go on without a restart.
    They exchange every --outer.every steps; --restarts counts for each copy."""

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.cli.launch import launch_command

        check_range("--ranks", self.ranks, Range(1, 4096))
        check_range("--grace", self.grace, Range(1, 7 * 86400))
        check_range("--copies", self.copies, Range(1, 4096))
        check_range("--restarts", self.restarts, Range(0, 2**31 - 1))
        if self.min_ranks is not None:
            check_range("--min-ranks", self.min_ranks, Range(1, self.ranks))
        return launch_command(self)


COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "launch": Launch,
    "plan": Plan,
    "prepare": Prepare,
    "demonstrate": Demonstrate,
    "align": Align,
    "verify": Verify,
    "eval": Evaluate,
    "generate": Generate,
    "chat": Chat,
    "choose-base": ChooseBase,
    "export": Export,
    "export-precision": ExportPrecision,
    "export-layout": ExportLayout,
    "report": Report,
    "study": StudyCommand,
    "score": Score,
    "doctor": Doctor,
}
"""By the words that call them, in the order of the help."""
