"""`scrimp verify`: says what a folder is, checks what it holds, and names the newest sound checkpoint.

Problem  What decides a result lies in many files, and each reader checks what it reads. Before a folder is
         copied, archived or gone on with, one wants to know that all of it is as it was written.
Method   A folder is told by the file that every folder of its kind has. Each part is then read by the code
         that would use it, and every byte that has a checksum is compared with it; numbers of weights are
         looked through for NaN and infinity, whatever a manifest says. Nothing is written.
Limits   Without checksums (a model of another tool, folders of earlier versions) less can be checked: it
         says so. Reports, TensorBoard files and the plans of earlier steps are not looked at. config.toml
         and plan.json may be edited on purpose: of these it says whether they can be used, and what was
         edited. A checksum tells accidents from good data; it is no signature.
Checked  tests/training/test_verify.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scrimp.config import load_config
from scrimp.data import load_tokenizer, verify
from scrimp.data.corpus_manifest import read_manifest as read_corpus
from scrimp.errors import CheckpointError, ScrimpError
from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.load import stream_weights
from scrimp.planner import Plan
from scrimp.report.records import read_jsonl
from scrimp.training import tensor_files
from scrimp.training.checkpoint import Checkpoint, CheckpointStore, not_finite_error
from scrimp.training.checkpoint_manifest import MANIFEST, read_manifest, verify_files
from scrimp.training.export_seal import SEAL, read_seal
from scrimp.training.metrics import EVENTS, METRICS
from scrimp.training.precision.formats_in_plan import read_saved_cycle
from scrimp.training.run_folder import CHECKPOINTS, CONFIG, PLAN, TOKENIZER, saved_config
from scrimp.training.run_record import RUN, RunRecord, checked_record, read_record
from scrimp.training.run_state import read_state
from scrimp.training.start import refuse_other_configuration
from scrimp.training.trained_weights import base_of

CORPUS, MODEL = "corpus.json", "config.json"


@dataclass
class Findings:
    """What was checked, in order."""

    title: str
    rows: list[tuple[bool, str, str]] = field(default_factory=list)
    """Whether it is sound, its name, and what is to be said of it."""
    last: str = ""
    """The line after the rows."""
    has_checksums: bool = True
    """Whether every file that must not change has a checksum to compare it with."""

    @property
    def ok(self) -> bool:
        """Whether everything is sound."""
        return all(ok for ok, _, _ in self.rows)

    def check(self, name: str, look: Callable[[], str]) -> bool:
        """Add a row: what `look` answers, or its ScrimpError."""
        try:
            self.rows.append((True, name, look()))
        except ScrimpError as error:
            self.rows.append((False, name, str(error)))
        return self.rows[-1][0]

    def __str__(self) -> str:
        width = max((len(name) for _, name, _ in self.rows), default=0)
        rows = [f"  {'ok ' if ok else 'BAD'}  {name:<{width}}  {words}" for ok, name, words in self.rows]
        count = sum(not ok for ok, _, _ in self.rows)
        sound = "everything is sound" if self.has_checksums else "what can be checked is sound"
        end = sound if self.ok else f"{count} of {len(self.rows)} are not sound"
        return "\n".join([self.title, *rows, *([self.last] if self.last else []), end])


def verify_path(path: Path) -> tuple[str, bool]:
    """What is to be said of a folder, and whether all of it is sound.

    Raises:
        ScrimpError: it is nothing that can be verified, or cannot be read at all.
    """
    if (path / CORPUS).is_file():
        report = verify(path)
        has_digest = read_corpus(path, check=False).written_digest is not None
        limit = (
            "" if has_digest or not report.ok else f"\nwhat can be checked is sound: {CORPUS} has no digest"
        )
        return f"corpus {report}{limit}", report.ok
    kinds = {MANIFEST: _of_checkpoint, CONFIG: _of_run, MODEL: _of_export}
    for name, look in kinds.items():
        if (path / name).is_file():
            found = look(path)
            return str(found), found.ok
    raise CheckpointError(
        f"{path} is nothing that can be verified",
        got="a folder with none of these"
        if path.is_dir()
        else "a file"
        if path.exists()
        else "nothing there",
        expected=f"a folder with {CORPUS} (a corpus), {CONFIG} (a run), {MANIFEST} (a checkpoint) or {MODEL} (a model)",
    )


def _of_checkpoint(folder: Path) -> Findings:
    found = Findings(f"checkpoint {folder}")
    found.check("files", lambda: _whole(Checkpoint(read_manifest(folder).step, folder)))
    return found


def _whole(checkpoint: Checkpoint) -> str:
    """Check a checkpoint to its last number, and describe it."""
    checkpoint.verify()
    manifest = read_manifest(checkpoint.folder)
    names = tensor_files.not_finite(checkpoint.tensors())
    if names:
        raise not_finite_error(checkpoint.folder, names, do="use an older checkpoint")
    state = read_state(checkpoint)
    beside = f", beside {base_of(checkpoint, state).folder}" if state.architecture.adapter else ""
    if load_config(checkpoint.folder / CONFIG).is_planned:
        read_saved_cycle(state.precision)
    Plan.read(checkpoint.folder / PLAN)
    size = sum(record.bytes for record in manifest.files.values())
    skipped = f", {manifest.skipped_steps:,} steps skipped" if manifest.skipped_steps else ""
    return f"step {checkpoint.step:,}: {len(manifest.files)} files, {size:,} bytes, all numbers finite{skipped}{beside}"


def _of_run(run_dir: Path) -> Findings:
    found = Findings(f"run {run_dir}")
    found.check(CONFIG, lambda: f"{load_config(run_dir / CONFIG).train.steps:,} steps")
    found.check(PLAN, lambda: _plan(run_dir))
    found.check(TOKENIZER, lambda: _tokenizer(run_dir))
    found.check(RUN, lambda: _record(run_dir))
    checkpoints = CheckpointStore(run_dir, keep_last=1, keep_every=0).candidates()
    for log, unit in ((METRICS, "steps"), (EVENTS, "events")):
        found.check(log, functools.partial(_log, run_dir / log, unit, has_checkpoints=bool(checkpoints)))
    sound, gone = None, 0
    for checkpoint in checkpoints:
        if found.check(checkpoint.folder.name, functools.partial(_of_this_run, checkpoint, run_dir)):
            sound = checkpoint
        elif not checkpoint.folder.exists():  # the run is training, and has removed it meanwhile
            found.rows.pop()
            gone += 1
    if gone == len(checkpoints):
        found.rows.append((False, CHECKPOINTS, "no checkpoint"))
    found.has_checksums = (run_dir / RUN).is_file()
    found.last = f"newest sound checkpoint: {sound.folder if sound else 'none'}"
    return found


def _log(path: Path, unit: str, *, has_checkpoints: bool) -> str:
    if has_checkpoints and not path.exists():
        raise CheckpointError(f"{path} is missing", do="restore it from a copy; the run goes on without it")
    return f"{len(read_jsonl(path)):,} {unit}"


def _plan(run_dir: Path) -> str:
    plan = Plan.read(run_dir / PLAN)
    return f"edited since it was written: {', '.join(plan.edited)}" if plan.edited else "as it was written"


def _tokenizer(run_dir: Path) -> str:
    tokenizer = load_tokenizer(run_dir / TOKENIZER)
    record = read_record(run_dir)
    if record is None:
        return f"{tokenizer.vocab_size:,} entries; no {RUN} to compare it with"
    record.refuse_other_tokenizer(tokenizer, run_dir / TOKENIZER)
    return f"{tokenizer.vocab_size:,} entries, the files that the run began with"


def _record(run_dir: Path) -> str:
    record = read_record(run_dir)
    if record is None:
        return "missing; the next --resume writes it if the checkpoints are sound"
    return f"data with digest {record.data[:12]}"


def _of_this_run(checkpoint: Checkpoint, run_dir: Path) -> str:
    words = _whole(checkpoint)
    record = checked_record(run_dir, run_dir / TOKENIZER, read_state(checkpoint))
    if record is not None:
        _refuse_other_data(checkpoint, record)
    refuse_other_configuration(checkpoint, saved_config(run_dir), run_dir)
    return words


def _refuse_other_data(checkpoint: Checkpoint, record: RunRecord) -> None:
    """Refuse a checkpoint that saw other data than the run; one of an earlier version may name them in another form."""
    state = read_state(checkpoint)
    if state.run_digest is not None and state.data_digest != record.data:
        raise CheckpointError(
            f"{checkpoint.folder} was trained on other data than its run",
            got=f"data with digest {state.data_digest[:12]}",
            expected=f"{record.data[:12]}, as {RUN} says",
            do="use an older checkpoint",
        )


def _of_export(folder: Path) -> Findings:
    found = Findings(f"model {folder}")
    found.check(SEAL, lambda: _sealed(folder))
    found.has_checksums = (folder / SEAL).is_file()
    found.check(MODEL, lambda: f"{spec_of(read_architecture(folder)).parameters:,} parameters")
    found.check("weights", lambda: _weights(folder))
    found.check("tokenizer.json", lambda: f"{load_tokenizer(folder).vocab_size:,} entries")
    return found


def _sealed(folder: Path) -> str:
    seal = read_seal(folder)
    if seal is None:
        return "not there: no checksums to compare with"
    verify_files(folder, seal.files, do="export the run again")
    return f"step {seal.step:,}: {len(seal.files)} files, every checksum matches"


def _weights(folder: Path) -> str:
    names, count = [], 0
    for name, tensor in stream_weights(read_architecture(folder), folder):
        count += 1
        if not tensor_files.is_finite(tensor):
            names.append(name)
    if names:
        raise not_finite_error(folder, names, do="export an older checkpoint, or download the model again")
    return f"{count:,} tensors of the model, all numbers finite"
