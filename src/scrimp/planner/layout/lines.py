"""Settings as lines of JSON, and what is predicted of each: `scrimp plan --batch`.

One setting a line, one answer a line, in their order; a line that is wrong is answered with its error, and the others
all the same. docs/planner.md shows a line and its answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from scrimp.config import OWN_PRESETS, PRESETS, Range, check_range, nearest_word, preset
from scrimp.config.architecture import Architecture
from scrimp.config.pipeline import V_SHAPED
from scrimp.config.resolved import ResolvedLayout
from scrimp.config.schema import ContextMethod
from scrimp.errors import ConfigError, ScrimpError
from scrimp.json_files import decode_json
from scrimp.models import spec_of
from scrimp.models.shapes import ModelShape, ModelSizes, sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_activations import NAMED
from scrimp.planner.layout.block_choices import has_room_as_planned
from scrimp.planner.layout.degree_checks import check_degrees
from scrimp.planner.layout.execution import Execution, check_execution, usual_execution
from scrimp.planner.layout.kernels import FLASH_2, TORCH
from scrimp.planner.layout.pass_orders import SCHEDULES
from scrimp.planner.layout.predict import Prediction, predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Offload, Setting
from scrimp.planner.layout.shape_files import check_shape, read_shape
from scrimp.planner.layout.software import OWN, Software, in_states, software, software_for
from scrimp.planner.layout.stage_memory import RankBytes, peak_bytes
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.precision import GEMMS, RECIPES

RECOMPUTATIONS = (NONE, SELECTIVE, FULL)
PRECISIONS = ("fp16", *RECIPES)
_DO = "see docs/planner.md for a complete line"


@dataclass(frozen=True, kw_only=True)
class LayoutLine:
    """Degrees; those that are not named are 1."""

    dp: int = 1
    fsdp: int = 1
    zero: int | None = None
    """None: 3 among ranks of fsdp; those of dp are copies."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_method: str = "zigzag"
    ep: int = 1
    etp: int = 1
    virtual: int = 1
    schedule: str = "auto"
    stages: str | None = None
    sequence_parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting."""

    model: str | ModelShape
    """A preset, a file of a shape, or a shape itself."""
    hardware: str
    sequence: int
    global_batch: int
    micro_batch: int
    layout: LayoutLine = field(default_factory=LayoutLine)
    recompute: str | int = "none"
    recompute_parts: tuple[str, ...] = ()
    """What selective recomputation makes again; empty: what the software's does."""
    offload: Offload = field(default_factory=Offload)
    precision: str = "bf16"
    blocks: tuple[BlockPlan, ...] = ()
    """What each block does, which then stands for `recompute` and what leaves of activations."""
    software: str = "scrimp"
    states: StateFormats = field(default_factory=StateFormats)
    """In which formats Scrimp keeps weights and moments."""
    attention_kernel: str = ""
    """torch: that of rows without documents whose sums may come in any order, of Scrimp; empty: the software's own."""
    execution: Execution | None = None
    """What users of Megatron set beside the layout: graphs, how tokens travel to experts; None: what most do."""
    id: str | int | None = None
    """The user's own, which the answer has too."""


def answer_line(text: str, *, where: str) -> dict[str, Any]:
    """What is predicted of a line, or its error.

    Args:
        where: name of the file and number of the line.
    """
    named: dict[str, Any] = {}
    try:
        line = decode_json(text, Line, origin=where, error=ConfigError, do=_DO)
        named = {} if line.id is None else {"id": line.id}
        json.loads(text, object_pairs_hook=_each_once)
        return named | answer(setting_of(line))
    except ScrimpError as error:
        return named | {"error": str(error) if where in str(error) else f"{where}: {error}"}


def _each_once(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that an object has twice, of which a reader would take the last."""
    names = Counter(name for name, _ in pairs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError("a key is there twice", got=", ".join(twice), do="keep one of them")


def answer(setting: Setting) -> dict[str, Any]:
    """Seconds and bytes of a setting, as a line of JSON has them."""
    return as_answer(setting, predict(setting), peak_bytes(setting))


def as_answer(setting: Setting, prediction: Prediction, memory: Sequence[RankBytes]) -> dict[str, Any]:
    """A prediction and the peaks of its ranks, as a line of JSON has them."""
    return {
        "step_seconds": prediction.step_seconds,
        "tokens_per_second_per_device": prediction.tokens_per_second_per_device,
        "fits": has_room_as_planned(setting, memory),
        "seconds": prediction.seconds,
        "stages": [
            {
                "peak_bytes": {name: round(size) for name, size in one.categories.items()},
                "moment": one.moment,
            }
            for one in memory
        ],
    }


def line_of(setting: Setting, model: str | ModelShape, hardware: str) -> Line:
    """The line that says a setting: reading it gives the setting again.

    Args:
        model: as a line names that of the setting.
        hardware: the same.
    """
    assert not setting.formats, "a line says formats block by block"
    layout = setting.layout
    degrees = {
        field.name: getattr(layout, field.name) for field in fields(LayoutLine) if hasattr(layout, field.name)
    }
    degrees["virtual"] = layout.virtual or 1
    if layout.zero == 3 or (_is_of_copies(layout.dp, layout.shards) and layout.zero == 2):
        degrees["zero"] = None  # 3; a line that says 2 or 3 of copies alone is read as fsdp
    return Line(
        model=model,
        hardware=hardware,
        sequence=setting.sequence,
        global_batch=setting.global_batch,
        micro_batch=setting.micro_batch,
        layout=LayoutLine(**degrees, sequence_parallel=setting.sequence_parallel),
        recompute=setting.recompute,
        recompute_parts=setting.recompute_parts,
        offload=setting.offload,
        precision=setting.precision,
        blocks=setting.blocks,
        software=setting.software.name,
        states=setting.software.states,
        attention_kernel=_other_kernel(setting.software),
        execution=None if setting.execution == _usual(setting) else setting.execution,
    )


def _other_kernel(found: Software) -> str:
    """The kernel of attention, where it is not that of the program's file."""
    is_own = found.attention_kernel == software(found.name).attention_kernel
    return "" if is_own else found.attention_kernel


def _usual(setting: Setting) -> Execution:
    return usual_execution(
        setting.software.name, setting.model, setting.cluster, setting.layout, setting.recompute
    )


def line_text(line: Line) -> str:
    """A line of JSON, without what its defaults say."""

    def written(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            pairs = ((one, getattr(value, one.name)) for one in fields(value))
            return {one.name: written(found) for one, found in pairs if not _is_default(one, found)}
        return [written(one) for one in value] if isinstance(value, tuple) else value

    return json.dumps(written(line))


def _is_default(one: Field[Any], value: Any) -> bool:
    if one.default_factory is not MISSING:
        return bool(value == one.default_factory())
    return one.default is not MISSING and bool(value == one.default)


def setting_of(line: Line) -> Setting:
    """The setting that a line says.

    Raises:
        ConfigError: a name, a file or a degree is wrong.
        PlanError: the parts do not fit one another.
    """
    check_line(line)
    layout, model = sharded(line.layout), _sizes(read_model(line.model))
    _check_blocks_of(line, model)
    found = Setting(
        model=model,
        cluster=load_hardware(line.hardware),
        sequence=line.sequence,
        global_batch=line.global_batch,
        micro_batch=line.micro_batch,
        layout=ResolvedLayout(
            dp=layout.dp,
            fsdp=layout.fsdp,
            zero=3 if layout.zero is None else layout.zero,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            cp_method=layout.cp_method,  # type: ignore[arg-type]
            ep=layout.ep,
            etp=layout.etp,
            virtual=_virtual(layout),
            schedule=layout.schedule,  # type: ignore[arg-type]
            stages=layout.stages,
        ),
        software=_software(line),
        recompute=line.recompute,
        recompute_parts=line.recompute_parts,
        offload=line.offload,
        precision=line.precision,
        blocks=line.blocks,
        sequence_parallel=layout.sequence_parallel,
    )
    check_degrees(found)
    return replace(found, execution=_usual(found) if line.execution is None else line.execution)


def sizes_of_line(line: Line) -> ModelSizes:
    """The model that a line names.

    Raises:
        ConfigError: there is none, or its file is wrong.
    """
    return _sizes(read_model(line.model))


def _software(line: Line) -> Software:
    """The program that a line names, with the states and the kernel of attention that it asks for."""
    found = in_states(software_for(line.software, line.precision, line.layout.schedule), line.states)
    kernel = line.attention_kernel
    if kernel in ("", found.attention_kernel):
        return found
    if found.name not in OWN or kernel not in (FLASH_2, TORCH):
        raise ConfigError(
            f"attention_kernel {kernel} is not one of software {found.name}",
            expected=f"{FLASH_2} or {TORCH}" if found.name in OWN else found.attention_kernel,
            do="leave it out for the software's own",
        )
    return replace(found, attention_kernel=kernel)


def sharded(layout: LayoutLine) -> LayoutLine:
    """ZeRO's stages 2 and 3 of data-parallel ranks that nothing else shares are those of ranks that share all."""
    if _is_of_copies(layout.dp, layout.fsdp * layout.cp) and layout.zero in (2, 3):
        return replace(layout, fsdp=layout.dp, dp=1)
    return layout


def _is_of_copies(dp: int, shards: int) -> bool:
    return dp > 1 and shards == 1


def _virtual(layout: LayoutLine) -> int:
    """Stages of a rank; those of a V need not be named."""
    return 2 if layout.schedule in V_SHAPED else layout.virtual


def check_line(line: Line, *, has_pp: bool = True) -> None:
    """Refuse what no setting has.

    Args:
        has_pp: whether `layout.pp` is the line's; else a search decides it.

    Raises:
        ConfigError: by the key.
    """
    counts = {name: getattr(line, name) for name in ("sequence", "global_batch", "micro_batch")}
    degrees = ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "virtual")
    counts |= {f"layout.{name}": getattr(line.layout, name) for name in degrees}
    for key, value in counts.items():
        check_range(key, value, Range(1, 10**9))
    if line.layout.zero is not None:
        check_range("layout.zero", line.layout.zero, Range(0, 3))
    check_range("offload.activation_layers", line.offload.activation_layers, Range(0, 10**6))
    if isinstance(line.recompute, int):
        check_range("recompute", line.recompute, Range(0, 10**6))
    _check_blocks(line)
    check_execution(line.execution or Execution(), line.software)
    _check_parts(line)
    _check_v(line, has_pp)
    words = {
        "recompute": (line.recompute, RECOMPUTATIONS),
        "precision": (line.precision, PRECISIONS),
        "layout.schedule": (line.layout.schedule, ("auto", *SCHEDULES)),
        "layout.cp_method": (line.layout.cp_method, get_args(ContextMethod)),
    }
    for key, (word, known) in words.items():
        if isinstance(word, str) and word not in known:
            near = nearest_word(word, known)
            raise ConfigError(
                f"{key} is not known",
                got=word,
                expected=f"one of {', '.join(known)}",
                do=f"did you mean {near}?" if near else _DO,
            )


def _check_v(line: Line, has_pp: bool) -> None:
    """Refuse what ranks do not carry out beside a schedule that goes there and back."""
    layout, leaves = line.layout, any(one.offload for one in line.blocks)
    if layout.schedule not in V_SHAPED:
        return
    reasons = (
        (layout.pp == 1 and has_pp, "layout.pp 1", "a pipeline: layout.pp above 1"),
        (layout.virtual > 2, f"layout.virtual {layout.virtual}", "2 stages on each rank"),
        (line.offload != Offload() or leaves, "offload", "everything on the device"),
        (line.execution not in (None, Execution()), "execution", "no graphs and no fused experts"),
    )
    for applies, got, expected in reasons:
        if applies:
            raise ConfigError(
                f"layout.schedule {layout.schedule} is not carried out beside this",
                got=got,
                expected=expected,
                do="change it, or choose layout.schedule interleaved",
            )


def _check_parts(line: Line) -> None:
    wrong = [name for name in line.recompute_parts if name not in NAMED]
    has_selective = line.recompute == SELECTIVE or any(one.recompute == SELECTIVE for one in line.blocks)
    if wrong or (line.recompute_parts and not has_selective):
        raise ConfigError(
            "recompute_parts are not what selective recomputation makes again",
            got=f"recompute {line.recompute}, parts {', '.join(line.recompute_parts)}",
            expected=f"recompute selective, parts of {', '.join(NAMED)}",
            do=_DO,
        )


def _check_blocks(line: Line) -> None:
    for number, one in enumerate(line.blocks):
        wrong = [name for _, name in one.formats if name not in PRECISIONS]
        if one.recompute not in RECOMPUTATIONS or wrong:
            raise ConfigError(
                f"blocks[{number}] says what no block does",
                got=", ".join(wrong) or one.recompute,
                expected=f"recompute of {', '.join(RECOMPUTATIONS)}; formats of {', '.join(PRECISIONS)}",
            )


def _check_blocks_of(line: Line, model: ModelSizes) -> None:
    """Refuse plans of other blocks than the model's, or of more."""
    numbers = {"recompute": line.recompute, "offload.activation_layers": line.offload.activation_layers}
    for key, number in numbers.items():
        if isinstance(number, int) and number > len(model.blocks):
            raise ConfigError(
                f"{key} is more blocks than the model has",
                got=f"{number:,}",
                expected=f"at most {len(model.blocks):,}, of each rank",
            )
    if line.blocks and len(line.blocks) != len(model.blocks):
        raise ConfigError(
            "blocks are not those of the model",
            got=f"{len(line.blocks):,} blocks",
            expected=f"{len(model.blocks):,}, or none",
        )
    for number, (plan, block) in enumerate(zip(line.blocks, model.blocks, strict=False)):
        known = [f"{linear.name}.{gemm}" for linear in block.linears for gemm in GEMMS]
        for product, _ in plan.formats:
            if product not in known:
                near = nearest_word(product, known)
                raise ConfigError(
                    f"blocks[{number}] has no such product",
                    got=product,
                    expected=f"one of {', '.join(known)}",
                    do=f"did you mean {near}?" if near else None,
                )


@lru_cache
def _sizes(model: ModelShape | Architecture) -> ModelSizes:
    return model.sizes if isinstance(model, ModelShape) else sizes_of(spec_of(model))


def read_model(model: str | ModelShape) -> ModelShape | Architecture:
    """The model that a line names: a shape, a file of one, or a preset.

    Raises:
        ConfigError: there is none of this name, or the file is wrong.
    """
    if isinstance(model, ModelShape):
        check_shape(model)
        return model
    if model.endswith(".toml"):
        return read_shape(Path(model))
    names = [*OWN_PRESETS, *PRESETS]
    if model not in names:
        near = nearest_word(model, names)
        raise ConfigError(
            f"model {model} is not known",
            expected="a preset, a file of a shape (.toml), or a shape",
            do=f"did you mean {near}?" if near else f"name one of {', '.join(names)}",
        )
    return preset(model)
