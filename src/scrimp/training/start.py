"""What a run starts from: a configuration alone, or a run folder with its newest good checkpoint.

Everything that can be refused is refused here, before a step is taken. For a new run nothing has been
written by then, so bad input leaves no folder behind, nor does a host that does not give the memory of
the plan: it is taken here too. The folder is claimed afterwards. A run that is resumed is locked
first: which checkpoint is the newest must not change while it is chosen; and it takes its memory when
the plan in its folder has been read.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrimp import user_code
from scrimp.config import (
    Config,
    DataConfig,
    decided_anew,
    differences,
    flatten,
    for_ranks,
    load_config,
    may_change,
    replace_values,
    with_later_choices,
)
from scrimp.config.mixture import mix_text
from scrimp.data import Corpus, Mixture, load_tokenizer
from scrimp.data.sources import BUILT_IN, is_built_in
from scrimp.data.tokenizer import CHAT_TEMPLATE, SMALLEST_BPE
from scrimp.errors import CheckpointError, ConfigError, DataError, PlanError, typed
from scrimp.runtime.memory import HostRoom
from scrimp.training.checkpoint import Checkpoint, CheckpointStore
from scrimp.training.distillation import TEACHERS, digests_of_teachers, teachers_in
from scrimp.training.memory.host_room import take_host_room
from scrimp.training.precision.formats_in_plan import read_saved_cycle
from scrimp.training.precision.gemm_seconds import (
    fresh_times,
    shapes_of,
    wants_times,
)
from scrimp.training.precision.reachable import refuse_unreachable_speed
from scrimp.training.run_data import has_open_vocabulary, open_run_corpus, trains_tokenizer
from scrimp.training.run_folder import (
    CONFIG,
    TOKENIZER,
    chosen_values,
    config_to_resume,
    saved_config,
    settled,
    sign_of_checkpoints,
)
from scrimp.training.run_record import RunRecord, checked_record
from scrimp.training.run_state import RunState, read_state
from scrimp.training.setup import Decisions, decide
from scrimp.training.trained_weights import (
    Base,
    checkpoint_of,
    find_base,
    refuse_other_states,
    refuse_unusable_weights,
)
from scrimp.training.written_text import read_beside
from scrimp.world import ALONE, World

KEYWORDS = BUILT_IN | {"auto", "bytes", "bpe"}
"""Sources and tokenizers that are names, never paths."""


@dataclass(frozen=True)
class Start:
    """A run that is about to take its next step."""

    decisions: Decisions
    corpus: Corpus | Mixture
    checkpoint: Checkpoint | None = None
    """None begins at step 0."""
    record: RunRecord | None = None
    """What run.json says or, where it was lost, has to say; None of a run that has none yet."""
    source: Checkpoint | None = None
    """Checkpoint of another run; a new one begins with its weights and optimizer states (`optimizer.from_weights`)."""
    written: str = ""
    """The digest of what teachers wrote, which is read beside the corpus; empty: nothing."""
    base: Base | None = None
    """The weights that adapters stand beside; None without adapters."""
    room: HostRoom | None = None
    """Host memory that was taken for the plan, where it needs any."""
    given: frozenset[str] = frozenset()
    """Dotted keys that the user has written for this start of a run that is resumed."""
    by_user: frozenset[str] = frozenset()
    """Those of them that leave nothing to Scrimp."""
    ran_by: str = ""
    """What ran its GEMMs before, where that is something else now, on another device or as the user asks."""
    laid_before: str = ""
    """The layout of a run that is resumed, as its plan.json says it."""
    notes: list[str] = field(default_factory=list)
    """Checkpoints that were passed over, and why."""
    goes_back: bool = False
    """Whether the user has left newer checkpoints behind: they are set aside."""


def fresh_start(config: Config, world: World = ALONE, given: Collection[str] = frozenset()) -> Start:
    """Decide a new run and open its data.

    Args:
        world: the ranks of the run.
        given: dotted keys that the user wrote.
    """
    decisions = decided_before_data(anchored(config), world, given)
    decisions.backends()
    if decisions.config.model.weights is not None:
        refuse_unusable_weights(decisions.config.model.weights)
    refuse_other_states(decisions.config)
    _refuse_speed_out_of_reach(decisions)
    corpus = open_run_corpus(decisions.config, world)
    decisions = decisions.with_corpus(corpus)
    written = read_beside(decisions, corpus)
    room = take_host_room(decisions.memory, decisions.config, decisions.device)
    base = _base(decisions.config, None, world)
    return Start(
        decisions, corpus, source=_source(decisions.config, world), base=base, room=room, written=written
    )


def _base(config: Config, digest: str | None, world: World) -> Base | None:
    """The base of a run with adapters, one for all ranks; CheckpointError where it is not there.

    Args:
        digest: of the one that the run began with, if it did.
    """
    folder = config.model.weights
    if config.adapter.rank == 0 or folder is None:
        return None
    return world.once(
        "looking at the base model",
        lambda: find_base(folder, digest),
        write=lambda found: [str(found.folder), found.digest],
        read=lambda told: Base(Path(told[0]), told[1]),
    )


def _source(config: Config, world: World) -> Checkpoint | None:
    """The checkpoint that a run begins with where it takes an optimizer's states too: one for all of them, and for all
    ranks, though its run may go on."""
    folder = config.model.weights
    if folder is None or not config.optimizer.from_weights:
        return None
    return world.once(
        "choosing the checkpoint of model.weights",
        lambda: checkpoint_of(folder),
        write=lambda found: [found.step, str(found.folder)],
        read=lambda told: Checkpoint(told[0], Path(told[1])),
    )


def decided_before_data(config: Config, world: World, given: Collection[str]) -> Decisions:
    """A run that may fit, before time is spent on a corpus.

    One that is too large with all the entries that its tokenizer may get is refused here only if it is with the fewest
    too.
    """
    try:
        decisions = decide(config, world=world, given=given)
        decisions.refuse_misfit()
    except PlanError:
        if not (has_open_vocabulary(config) and trains_tokenizer(config)):
            raise
        decisions = decide(config, entries=SMALLEST_BPE, world=world, given=given)
        decisions.refuse_misfit()
        print(
            "with the largest vocabulary the run does not fit: the tokenizer is trained first, and then it is decided",
            file=sys.stderr,
        )
    return decisions


def _refuse_speed_out_of_reach(decisions: Decisions) -> None:
    """Refuse a budget in seconds that no formats keep on this device, before there is a folder to leave behind."""
    if not wants_times(decisions.config, decisions.device.torch_device.type):
        return

    def progress(label: str, done: int, total: int) -> None:
        print(f"timing GEMMs, {done} of {total}: {label} ...", file=sys.stderr, flush=True)

    times = fresh_times(decisions, progress)
    refuse_unreachable_speed(decisions.config, times, shapes_of(decisions))


def resumed_start(
    run_dir: Path,
    config: Config,
    given: Collection[str],
    *,
    from_step: int | None = None,
    may_restart: bool = False,
    world: World = ALONE,
) -> Start:
    """Go on with a run from its newest checkpoint that is whole and finite, or from step 0 where it has had none yet.

    Args:
        from_step: go on from the checkpoint of this step instead.
        may_restart: begin again at step 0 where no checkpoint can be used.
        world: the ranks of the run.

    Raises:
        CheckpointError: no checkpoint can be used, or it belongs to another model, configuration or
            corpus than the folder says.
    """
    saved, by_user = saved_config(run_dir), settled(anchored(config), given)
    config = for_ranks(config_to_resume(saved, anchored(config), given), world.size, given)
    config = decided_anew(config, saved, chosen_values(run_dir, saved).keys() - by_user)
    checkpoint, errors = _chosen_checkpoint(run_dir, from_step, world)
    if checkpoint is None and not may_restart:
        _refuse_to_restart(run_dir, errors)
    if checkpoint is not None:
        refuse_other_configuration(checkpoint, saved, run_dir)
    state = read_state(checkpoint) if checkpoint else None
    code = digests_of(config)
    record = checked_record(run_dir, run_dir / TOKENIZER, state, code)
    if record is not None:
        record.refuse_other_code(code)
    config = anchored(dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run_dir)))
    config = _with_own_tokenizer(config, run_dir)
    base = _base(config, state.base if state else None, world)
    source = _source(config, world) if checkpoint is None else None
    decisions = decide(config, architecture=state.architecture if state else None, world=world)
    if state is not None and config.is_planned:
        read_saved_cycle(state.precision)  # refused before anything is changed
    corpus = _own_corpus(decisions, state, record)
    _refuse_other_tokenizer(run_dir, record, corpus)
    decisions = decisions.with_corpus(corpus)
    written = read_beside(decisions, corpus)
    if record is not None:
        record.refuse_other_written(written)
    notes = [f"passed over: {error}" for error in errors]
    goes_back = from_step is not None or checkpoint is None
    return Start(
        decisions,
        corpus,
        checkpoint,
        record,
        source,
        written=written,
        base=base,
        given=frozenset(given),
        by_user=frozenset(by_user),
        notes=notes,
        goes_back=goes_back,
    )


def _refuse_other_tokenizer(run_dir: Path, record: RunRecord | None, corpus: Corpus | Mixture) -> None:
    """Refuse data of another tokenizer than the run's; one that was lost is got from the data, if it is the same."""
    folder = run_dir / TOKENIZER
    if not (folder / "tokenizer.json").is_file():
        if record is not None:
            record.refuse_other_tokenizer(corpus.tokenizer, corpus.folder / TOKENIZER)
    elif load_tokenizer(folder).digest != corpus.tokenizer.digest:
        raise CheckpointError(
            f"the tokenizer in {folder} is not the one of the run's data",
            do=f"restore it from a copy of the run, or from {corpus.folder / TOKENIZER}, which has the same",
        )


def _own_corpus(decisions: Decisions, state: RunState | None, record: RunRecord | None) -> Corpus | Mixture:
    """The corpus that a run began with, by its newest checkpoint and by run.json."""
    digests = [] if state is None else [state.data_digest]
    digests += [] if record is None else [record.data]
    corpus = open_run_corpus(decisions.config, decisions.world, digest=digests[0] if digests else None)
    for digest in digests:
        if not corpus.is_that_of(digest):
            instead = " with --model.weights" if state else ""
            raise CheckpointError(
                "the data are not those that the run was trained on",
                got=f"shards with digest {corpus.digest[:12]}",
                expected=digest[:12],
                do=f"restore the source and the tokenizer, or start a new run{instead}",
            )
    return corpus


def _chosen_checkpoint(
    run_dir: Path, from_step: int | None, world: World
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, and what is wrong with the newer ones; verified by one rank."""
    store = CheckpointStore(run_dir, keep_last=1, keep_every=0)

    def choose() -> tuple[Checkpoint | None, list[str]]:
        if from_step is None:
            checkpoint, errors = store.latest(finite=True)
            return checkpoint, [str(error) for error in errors]
        checkpoint = store.at(from_step)
        checkpoint.refuse_not_finite(do="choose an older one, or leave --resume-from out")
        return checkpoint, []

    def write(found: tuple[Checkpoint | None, list[str]]) -> Any:
        checkpoint, errors = found
        return None if checkpoint is None else [checkpoint.step, str(checkpoint.folder)], errors

    def read(told: Any) -> tuple[Checkpoint | None, list[str]]:
        place, errors = told
        return None if place is None else Checkpoint(place[0], Path(place[1])), errors

    return world.once("choosing a checkpoint", choose, write=write, read=read)


def _refuse_to_restart(run_dir: Path, errors: list[str]) -> None:
    """Refuse to begin at step 0 again where a run has been further."""
    again = f"begin again at step 0 with {typed('train', '--run.dir', run_dir, '--resume', '--restart')}"
    if errors:
        raise CheckpointError(
            f"no checkpoint of {run_dir} can be used",
            got="; ".join(errors),
            do=f"restore one from a copy, or {again}; nothing was changed",
        )
    sign = sign_of_checkpoints(run_dir)
    if sign is not None:
        raise CheckpointError(
            f"the checkpoints of {run_dir} are gone",
            got=sign,
            expected="a folder in checkpoints/",
            do=f"put them back, or {again}, which drops its logs; nothing was changed",
        )


def anchored(config: Config) -> Config:
    """Paths from the root, so that the saved configuration works from any folder."""
    data, model = config.data, config.model
    data = dataclasses.replace(
        data,
        source=_anchored_name(data.source),
        mix=_anchored_mix(data),
        tokenizer=_anchored_name(data.tokenizer),
        held_out=data.held_out
        if not isinstance(data.held_out, Path)
        else Path(_anchored_name(str(data.held_out))),
        chat_template=None if data.chat_template is None else data.chat_template.expanduser().absolute(),
        cache=None if data.cache is None else data.cache.expanduser().absolute(),
    )
    weights = None if model.weights is None else model.weights.expanduser().absolute()
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(model, weights=weights))
    if teachers := [str(one.absolute()) for one in teachers_in(config.objective)]:
        _refuse_commas(TEACHERS, teachers)
        config = replace_values(config, {TEACHERS: ",".join(teachers)})
    code = user_code.code_in(flatten(config))
    return replace_values(config, {key: user_code.anchored(value) for key, value in code.items()})


def digests_of(config: Config) -> dict[str, str]:
    """SHA-256 of what settings name and a run has no copy of: the user's own code, teachers; by dotted key."""
    return user_code.digests(flatten(config)) | digests_of_teachers(config)


def _anchored_mix(data: DataConfig) -> str | None:
    """The mixture with anchored names, and its weights as shares, so that what means the same reads the same."""
    if not data.mixed:
        return None
    sources = [dataclasses.replace(one, name=_anchored_name(one.name)) for one in data.mixed]
    _refuse_commas("data.mix", [one.name for one in sources])
    return mix_text(sources)


def _refuse_commas(key: str, paths: Sequence[str]) -> None:
    """Refuse paths that cannot stand in a list with commas."""
    for path in paths:
        if "," in path:
            raise ConfigError(
                f"{key} names what lies in a folder whose name has a comma",
                got=path,
                expected="paths without commas, which stand between them",
                do="rename the folder",
            )


def _anchored_name(name: str) -> str:
    if name in KEYWORDS or is_built_in(name) or name.startswith("hf:"):
        return name
    try:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name
    except (RuntimeError, OSError) as error:  # ~ of a user who does not exist; a name that is too long
        raise DataError(f"{name[:80]} cannot be a path", got=error, do="write the path out") from None


def refuse_other_configuration(checkpoint: Checkpoint, saved: Config, run_dir: Path) -> None:
    """The folder's config.toml must be the one that the checkpoint was made with."""
    then = with_later_choices(load_config(checkpoint.folder / CONFIG))
    # A tokenizer may lie elsewhere by now; that it is the same one, the digest of the data says.
    free = may_change(saved) | {"data.tokenizer", "data.chat_template"}
    changed = {key: pair for key, pair in differences(then, saved).items() if key not in free}
    if changed:
        raise CheckpointError(
            f"{run_dir / CONFIG} is not the configuration of {checkpoint.folder.name}",
            got="; ".join(
                f"{key} = {new} (the checkpoint has {old})" for key, (old, new) in sorted(changed.items())
            ),
            do=f"put {checkpoint.folder / CONFIG} back, or start a new run with --model.weights {run_dir}",
        )


def _with_own_tokenizer(config: Config, run_dir: Path) -> Config:
    """Use the run's copy of its tokenizer, and of its chat template, where what they came from is gone."""
    name, template = config.data.tokenizer, config.data.chat_template
    own_template = run_dir / TOKENIZER / CHAT_TEMPLATE
    if template is not None and not template.exists() and own_template.is_file():
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, chat_template=own_template)
        )
    if name in KEYWORDS or Path(name).exists():
        return config
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, tokenizer=str(run_dir / TOKENIZER))
    )
