"""run.json: one digest of what a run folder holds beside its checkpoints and decides what their weights mean.

Problem  The tokenizer says which row of the embedding a piece of text is. Two ids that change places in
         its file change every evaluation and export, and nothing else notices.
Method   When a run begins, run.json keeps a SHA-256 over all files of its tokenizer, the digest of its
         data, one for each file of the user's own code (`scrimp.user_code`), for the teachers of a distillation and
         for what they wrote, and a SHA-256 over them all. Every checkpoint carries that last one in its state, which
         its manifest covers: a tokenizer and a run.json that were changed together are noticed too.
         A lost run.json is computed again from the tokenizer and the data digest of a checkpoint, and is that of the
         run if it has the digest which that checkpoint carries, which it has not where teachers wrote. A run of an
         earlier version gets one when it is resumed.
Limits   Not covered: config.toml, which a checkpoint's copy is compared with when a run is resumed;
         plan.json, which its user may edit and which marks what was edited; logs, which grow.
Checked  tests/training/test_run_record.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from scrimp.data import Tokenizer, load_tokenizer
from scrimp.errors import CheckpointError
from scrimp.files import write_whole
from scrimp.json_files import read_json
from scrimp.training.run_state import RunState
from scrimp.user_code import MODEL_KIND

RUN: Final = "run.json"
VERSION: Final = 1
_RESTORE: Final = "restore it from a copy of the run"


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json."""

    scrimp_run: int
    tokenizer: str
    """SHA-256 over the files of the tokenizer."""
    data: str
    """The digest of the corpus. Checkpoints that carry the digest of this record have it as `data_digest`;
    those of earlier versions may hold an earlier form of it."""
    digest: str
    """SHA-256 over the rest."""
    written: str = ""
    """The digest of the text that teachers wrote for the run; empty: none."""
    code: dict[str, str] = field(default_factory=dict)
    """Dotted key of a setting that names the user's own code, or teachers, to the SHA-256 of their files."""

    @property
    def figures(self) -> dict[str, object]:
        """What the digest covers; without what there is none of, as in runs of earlier versions."""
        return {name: value for name, value in asdict(self).items() if name != "digest" and value}

    def refuse_other_code(self, now: dict[str, str]) -> None:
        """Raise CheckpointError unless the user's own code and the teachers, by dotted key, are those of the run."""
        for key in self.code | now:
            if self.code.get(key) != now.get(key):
                raise CheckpointError(
                    f"what {key} names has changed since the run began",
                    got=f"files with digest {now.get(key, 'none')[:12]}",
                    expected=self.code.get(key, "none")[:12],
                    do="put the files back, or start a new run with --model.weights",
                )

    def refuse_other_written(self, now: str) -> None:
        """Raise CheckpointError unless the text that teachers wrote is that of the run."""
        if now != self.written:
            raise CheckpointError(
                "the teachers have written another text than when the run began",
                got=f"digest {now[:12] or 'none'}, on a machine that computes otherwise",
                expected=self.written[:12] or "none",
                do="copy written-* from the cache of the machine on which the run began, or start a new run with "
                "--model.weights",
            )

    def refuse_other_kind(self, now: dict[str, str]) -> None:
        """The same of the model's kind alone: what eval, generate, chat and export run."""
        kind = {key: digest for key, digest in self.code.items() if key == MODEL_KIND}
        replace(self, code=kind).refuse_other_code(now)

    def refuse_other_tokenizer(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Raise CheckpointError unless the tokenizer that was read from `folder` is that of the run."""
        found = tokenizer_digest(tokenizer)
        if found != self.tokenizer:
            raise CheckpointError(
                f"the tokenizer in {folder} is not the one that the run began with",
                got=f"files with digest {found[:12]}",
                expected=self.tokenizer[:12],
                do="restore the folder from a copy of the run, or from its prepared corpus, which has the same",
            )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over the names and contents of all files that a tokenizer is read from."""
    files = json.dumps(sorted(tokenizer.files().items()))
    return hashlib.sha256(files.encode()).hexdigest()


def make_record(
    tokenizer: Tokenizer, data_digest: str, code: Mapping[str, str], written: str = ""
) -> RunRecord:
    """The record of a run with this tokenizer, these data, these digests of the user's own code, and the digest of what
    teachers wrote."""
    record = RunRecord(VERSION, tokenizer_digest(tokenizer), data_digest, "", written, dict(code))
    return replace(record, digest=_digest(record.figures))


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Write run.json; StorageError where that fails."""
    write_whole(run_dir / RUN, json.dumps(record.figures | {"digest": record.digest}, indent=1) + "\n")


def read_record(run_dir: Path) -> RunRecord | None:
    """The record of a run; None of a run that has none.

    Raises:
        CheckpointError: it is damaged, altered, or of a newer version.
    """
    path = run_dir / RUN
    if not path.exists():
        return None
    record = read_json(path, RunRecord, error=CheckpointError, do=_RESTORE, at_most=1 << 16)
    if record.scrimp_run != VERSION:
        do = "install the Scrimp that wrote it"
        raise CheckpointError(f"{path} has another version", got=record.scrimp_run, expected=VERSION, do=do)
    if record.digest != _digest(record.figures):
        raise CheckpointError(f"{path} is altered", got="figures that its digest does not cover", do=_RESTORE)
    return record


def checked_record(
    run_dir: Path, tokenizer: Path, state: RunState | None, code: Mapping[str, str] = MappingProxyType({})
) -> RunRecord | None:
    """The record of a run, compared with its tokenizer and with one of its checkpoints.

    Where run.json is missing, the record that the tokenizer and the checkpoint give, if it has the digest that the
    checkpoint carries; None if neither run.json nor such a digest is there.

    Args:
        tokenizer: its folder.
        state: the state of the checkpoint.
        code: digests of the user's own code that the run's settings name, for a record that is computed.

    Raises:
        CheckpointError: the tokenizer or run.json is not the one that the run began with, or run.json is
            missing and cannot be computed.
    """
    record = read_record(run_dir)
    is_missing = record is None
    has_tokenizer = (tokenizer / "tokenizer.json").is_file()
    if record is not None and has_tokenizer:
        record.refuse_other_tokenizer(load_tokenizer(tokenizer), tokenizer)
    carried = None if state is None else state.run_digest
    if state is None or carried is None:
        return record
    if record is None and has_tokenizer:
        record = make_record(load_tokenizer(tokenizer), state.data_digest, code)
    if record is None or record.digest != carried:
        problem = "is missing" if is_missing else "is not the one of the run's checkpoints"
        got = None if record is None else record.digest[:12]
        if is_missing:
            got = (
                f"no tokenizer in {tokenizer}"
                if record is None
                else f"another tokenizer in {tokenizer}, or text that teachers wrote"
            )
        raise CheckpointError(
            f"{run_dir / RUN} {problem}",
            got=got,
            expected=f"one with digest {carried[:12]}, which the checkpoint carries",
            do=f"restore it and {tokenizer.name}/ from a copy of the run",
        )
    return record


def _digest(figures: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
