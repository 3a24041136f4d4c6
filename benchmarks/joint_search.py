"""One search over formats, memory and layout, against the three decided one after the other.

Method    20 cases (`joint_cases.jsonl`, committed before any was run): a model, hardware, a batch, two formats and the
          share of the blocks' FLOPs that may run in 4 bits, which is the quality that both sides have.

          Formats first   Products go to 4 bits in the order of their FLOPs, the same in every block, until the share is
                          used. Then memory: where all devices shard (FSDP), the dynamic program decides what blocks
                          keep, which states leave for the host, and the micro-batch. Then the layout and micro-batch
                          that are fastest with these formats and with this share of blocks for each choice of memory
                          in every stage.
          One search      `planner.layout.search`.

          The gain is the predicted seconds of the first over those of the second, less 1.
Constants Every constant of hardware and software files is moved by -15 % and by +15 %, one after the other; both plans
          stay, and are priced again. A share stops at 1.
Limits    Both sides are predicted by one model: the gain is what deciding together is worth where the model is right.
Run       python benchmarks/joint_search.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from environment import RESULTS, facts, markdown_table, write_pair

from scrimp.config import PRESETS, preset
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError
from scrimp.json_files import as_typed
from scrimp.models import spec_of
from scrimp.models.shapes import ModelShape, ModelSizes, sizes_of
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_choices import Blocks
from scrimp.planner.layout.block_menus import Formats, Quality
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import OWN_ON_HOST, Question, layouts, micro_batches
from scrimp.planner.layout.search import search
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.software import software
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.summary import blocks_text, low_share
from scrimp.precision import GEMMS

HERE = Path(__file__).parent
CASES = HERE / "joint_cases.jsonl"
MOVED = 0.15
GOLDEN = 0.618033988749895


@dataclass(frozen=True)
class Gain:
    """Both plans of a case."""

    case: dict[str, Any]
    first: Setting
    joint: Setting
    seconds: float
    """That the search took."""

    def of(self, changed: Callable[[Setting], Setting] = lambda setting: setting) -> float:
        """The gain, in a world that differs."""
        first, joint = (predict(changed(one)).step_seconds for one in (self.first, self.joint))
        return first / joint - 1.0


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = facts("numpy")
    gains = []
    for line in CASES.read_text(encoding="utf-8").splitlines():
        gains.append(solved(json.loads(line)))
        print(f"{gains[-1].case['model']} on {gains[-1].case['hardware']}: {gains[-1].of():+.1%}", flush=True)
    moves = {name: statistics.median(one.of(change) for one in gains) for name, change in constants()}
    record |= {
        "median": statistics.median(one.of() for one in gains),
        "moved": moves,
        "cases": [one.case | {"gain": one.of(), "search_seconds": one.seconds} for one in gains],
    }
    text = page(gains, moves)
    path = write_pair(options.out, f"{options.date}-joint-search", record, text)
    print(text[: text.index("| case")])
    print(path)


def solved(case: dict[str, Any]) -> Gain:
    """Both plans."""
    model = sizes(case["model"])
    formats = FormatBudget(names=tuple(case["formats"]), share=float(case["share"]))
    question = Question(
        model=model,
        cluster=load_hardware(case["hardware"]),
        sequence=case["sequence"],
        global_batch=case["global_batch"],
        software=software("scrimp"),
        precision=formats.base,
        formats=formats,
    )
    start = time.perf_counter()
    joint = search(question, keep=1).best[0].setting
    seconds = time.perf_counter() - start
    return Gain(case, formats_first(question, formats.quality(model)), joint, seconds)


def sizes(name: str) -> ModelSizes:
    """A preset, or a shape of the published models."""
    if name in PRESETS:
        return sizes_of(spec_of(preset(name)))
    shapes = tomllib.loads((HERE / "published" / "shapes.toml").read_text(encoding="utf-8"))
    return as_typed(shapes[name], ModelShape, origin=name, error=ConfigError, do="").sizes


def formats_first(question: Question, quality: Quality) -> Setting:
    """Formats, then memory, then the layout."""
    formats = low_formats(question.model, quality)
    kept = memory_of(question)
    order = sorted(range(len(formats)), key=lambda at: at * GOLDEN % 1.0)
    # Neighbours get the same proportions of every choice, whatever the stages are.
    choices = sorted(kept.blocks, key=lambda one: (one.recompute, one.offload, one.gathered))
    plans = dict(zip(order, choices, strict=True))
    blocks = tuple(dataclasses.replace(plans[at], formats=own) for at, own in enumerate(formats))
    found = []
    for layout in layouts(question):
        if layout.pp > 1 and kept.offload.optimizer:
            continue
        for micro_batch in micro_batches(question, layout):
            one = dataclasses.replace(kept, layout=layout, micro_batch=micro_batch, blocks=blocks)
            if max(rank.total for rank in peak_bytes(one)) > question.device.memory_bytes:
                break
            found.append(one)
    return min(found, key=lambda one: predict(one).step_seconds)


def low_formats(model: ModelSizes, quality: Quality) -> list[Formats]:
    """Formats of every block: products in 4 bits, those of most FLOPs first, until the share is used."""
    low = next(name for name in quality.formats if name != quality.base)
    taken: list[dict[str, str]] = [{} for _ in model.blocks]
    rest = quality.limit
    products = [
        (-linear.parameters_per_token, number, f"{linear.name}.{gemm}", linear.name, gemm)
        for number, block in enumerate(model.blocks)
        for linear in block.linears
        for gemm in GEMMS
    ]
    for _, number, product, linear, gemm in sorted(
        products, key=lambda one: (one[0], one[2], one[1] * GOLDEN % 1.0)
    ):
        harm = quality.harm(number, linear, gemm, low)
        if harm <= rest * (1 + 1e-9):
            taken[number][product] = low
            rest -= harm
    return [tuple(sorted(one.items())) for one in taken]


def memory_of(question: Question) -> Setting:
    """Where all devices shard one copy: what is kept, what leaves, and the micro-batch."""
    devices, found = question.cluster.devices, []
    readers = next(
        one for one in range(devices, 0, -1) if devices % one == 0 and question.global_batch % one == 0
    )
    layout = ResolvedLayout(dp=1, fsdp=readers, zero=3, tp=devices // readers)
    for offload in OWN_ON_HOST:
        for micro_batch in micro_batches(question, layout):
            one = Setting(
                model=question.model,
                cluster=question.cluster,
                sequence=question.sequence,
                global_batch=question.global_batch,
                micro_batch=micro_batch,
                layout=layout,
                software=question.software,
                precision=question.precision,
                offload=offload,
            )
            solved = Blocks(one, None).solve()
            if solved is None:
                break
            found.append(solved)
        if found:
            break
    return min(found, key=lambda one: predict(one).step_seconds)


def constants() -> Iterator[tuple[str, Callable[[Setting], Setting]]]:
    """Every constant, moved down and up."""
    some = load_hardware("8xb200").groups[0].node
    paths = [("device", *path) for path in numbers(some.device)] + [
        path for path in numbers(some) if path[0] in ("link", "host_op_seconds")
    ]
    for path in paths:
        for factor in (1.0 - MOVED, 1.0 + MOVED):
            yield f"{'.'.join(path)} x {factor:.2f}", _with_node(path, factor)
    for field in dataclasses.fields(software("scrimp")):
        if isinstance(getattr(software("scrimp"), field.name), float):
            for factor in (1.0 - MOVED, 1.0 + MOVED):
                yield f"software.{field.name} x {factor:.2f}", _with_software(field.name, factor)


def numbers(thing: Any) -> Iterator[tuple[str, ...]]:
    """Paths to all floats of nested dataclasses that the seconds of a step follow from."""
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if dataclasses.is_dataclass(value) and field.name != "device":
            yield from ((field.name, *rest) for rest in numbers(value))
        elif isinstance(value, float | int) and field.name not in (
            "price_per_hour",
            "power_watts",
            "memory_bytes",
        ):
            yield (field.name,)


def scaled(thing: Any, path: tuple[str, ...], factor: float) -> Any:
    """With one number multiplied; shares stop at 1, whole numbers stay whole."""
    name, *rest = path
    value = getattr(thing, name)
    if rest:
        return dataclasses.replace(thing, **{name: scaled(value, tuple(rest), factor)})
    if value is None:
        return thing
    new = value * factor
    if "achieved" in name or (isinstance(value, float) and value <= 1.0 < new):
        new = min(1.0, new)
    return dataclasses.replace(thing, **{name: round(new) if isinstance(value, int) else new})


def _with_node(path: tuple[str, ...], factor: float) -> Callable[[Setting], Setting]:
    def change(setting: Setting) -> Setting:
        groups = tuple(
            dataclasses.replace(group, node=scaled(group.node, path, factor))
            for group in setting.cluster.groups
        )
        return dataclasses.replace(setting, cluster=dataclasses.replace(setting.cluster, groups=groups))

    return change


def _with_software(name: str, factor: float) -> Callable[[Setting], Setting]:
    def change(setting: Setting) -> Setting:
        return dataclasses.replace(setting, software=scaled(setting.software, (name,), factor))

    return change


def page(gains: list[Gain], moves: dict[str, float]) -> str:
    """The result as Markdown."""
    values = [one.of() for one in gains]
    worst = sorted(moves.items(), key=lambda one: one[1])[:8]
    rows = [
        (
            f"{one.case['model']}, {one.case['hardware']}, s {one.case['sequence']}, batch {one.case['global_batch']}, "
            f"{one.case['share']:.0%} of FLOPs in {one.case['formats'][1]}, else {one.case['formats'][0]}",
            described(one.first),
            described(one.joint),
            f"{one.of():+.1%}",
            f"{one.seconds:.1f}",
        )
        for one in gains
    ]
    lines = [
        "# One search against formats first, then memory, then layout",
        "",
        "Predicted; method and limits: the docstring of `benchmarks/joint_search.py`.",
        "",
        f"Median gain of {len(gains)} cases {statistics.median(values):.1%}, least {min(values):.1%}, largest "
        f"{max(values):.1%}. With one constant moved by 15 % the median is at least {worst[0][1]:.1%} "
        f"({worst[0][0]}; {len(moves)} moves).",
        "",
        *markdown_table(["case", "formats first", "one search", "gain", "search, s"], rows),
        "",
        "The moves with the least median gain:",
        "",
        *markdown_table(["constant", "median gain"], [(name, f"{value:.2%}") for name, value in worst]),
        "",
    ]
    return "\n".join(lines)


def described(setting: Setting) -> str:
    """A plan in a few words."""
    layout = setting.layout
    words = [
        f"{name} {getattr(layout, name)}"
        for name in ("pp", "fsdp", "cp", "tp", "ep")
        if getattr(layout, name) > 1
    ] or ["one device"]
    if layout.fsdp > 1:
        words.append(f"zero {layout.zero}")
    if (layout.virtual or 1) > 1:
        words.append(f"virtual {layout.virtual}")
    host = [
        name for name in ("optimizer", "master", "gradients", "weights") if getattr(setting.offload, name)
    ]
    if host:
        words.append("host: " + ", ".join(host))
    plain = dataclasses.replace(
        setting, blocks=tuple(dataclasses.replace(one, formats=()) for one in setting.blocks)
    )
    return (
        f"{' '.join(words)}; micro-batch {setting.micro_batch}; {blocks_text(plain)}; "
        f"{low_share(setting):.0%} in 4 bits; {predict(setting).step_seconds:.3g} s"
    )


if __name__ == "__main__":
    main()
