"""Every kind of file that Scrimp reads, made by real runs, and what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mutations import BYTES, STRUCTURAL, Change, of_json_lines, of_safetensors
from tiny_run import flags, scrimp, write_corpus

from scrimp.config import Config, load_config
from scrimp.data import load_tokenizer
from scrimp.data.corpus import Corpus
from scrimp.errors import DeviceError, PlanError
from scrimp.files import read_bounded
from scrimp.gemm.doctor_report import STATUSES, DoctorReport, Measurement, Surroundings
from scrimp.integrations.recent_batches import RecentBatches
from scrimp.json_files import read_json
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.precision import GEMMS
from scrimp.profiler.gemm_table import GemmTimes
from scrimp.profiler.links_report import CollectiveRate, RankLinks, RankPlace, slow_links_text
from scrimp.profiler.throughput import recall_throughput
from scrimp.report import read_jsonl
from scrimp.report.read_run import read_run
from scrimp.study.conduct import rows_of
from scrimp.study.definition import load_study
from scrimp.study.estimate import PROBES, Probe, kept_probes
from scrimp.study.looks import LOOKS, read_looks
from scrimp.study.page import build_page
from scrimp.study.results import results_of
from scrimp.study.rows import Curve, Row, append_row, digest_of
from scrimp.training import checkpoint_manifest
from scrimp.training.checkpoint import Checkpoint
from scrimp.training.precision import gemm_seconds as step_times
from scrimp.training.run_state import read_state
from scrimp.training.tensor_files import describe
from scrimp.training.trained_weights import architecture_of_weights, open_target

Load = Callable[[Path], object]


@dataclass(frozen=True)
class Loader:
    """One file, below the folder of material, and the call that reads it; the call is given that folder."""

    file: str
    load: Load
    changes: dict[str, Change]
    words: tuple[str, ...] = ()
    """A command that reads it, with {} for the folder."""


def make_material(folder: Path) -> list[Loader]:
    """Write every kind of file into `folder`."""
    run = folder / "run"
    made = scrimp(*flags(write_corpus(folder), run, "--train.steps=2"))
    assert made.returncode == 0, made.stderr
    made = scrimp("export", str(run), str(folder / "model"))
    assert made.returncode == 0, made.stderr
    made = scrimp("prepare", str(folder / "corpus.txt"), str(folder / "corpus"), "--tokenizer", "bytes")
    assert made.returncode == 0, made.stderr
    _shard_model(folder)
    _write_small_files(folder)
    (checkpoint,) = (path.relative_to(folder) for path in (run / "checkpoints").glob("step-*"))
    return _loaders(str(checkpoint))


def _loaders(checkpoint: str) -> list[Loader]:
    step, everything = checkpoint, STRUCTURAL | BYTES
    lines = {name: of_json_lines(change) for name, change in STRUCTURAL.items()} | BYTES
    header = {name: of_safetensors(change) for name, change in everything.items()} | BYTES
    generate = ("generate", "--prompt", "def", "--tokens", "1")
    of_run, of_model = (*generate, "{}/run"), (*generate, "{}/model")

    def in_header(key: str) -> dict[str, Change]:
        return {name: of_safetensors(change, key) for name, change in everything.items()} | BYTES

    return [
        Loader("corpus/corpus.json", lambda at: Corpus(at / "corpus"), everything, ("verify", "{}/corpus")),
        Loader("run/plan.json", _read_plan, everything, ("report", "{}/run")),
        Loader("run/metrics.jsonl", _read_lines("metrics.jsonl"), lines, ("report", "{}/run")),
        Loader("run/events.jsonl", _read_lines("events.jsonl"), lines, ("report", "{}/run")),
        Loader("run/config.toml", lambda at: load_config(at / "run/config.toml"), BYTES, of_run),
        Loader(f"{step}/manifest.json", lambda at: checkpoint_manifest.verify(at / step), everything, of_run),
        Loader(f"{step}/state.json", _read_state, everything, of_run),
        Loader(f"{step}/model.safetensors.index.json", lambda at: describe(at / step), everything, of_run),
        Loader("model/config.json", _read_model, everything, of_model),
        Loader("model/model.safetensors.index.json", _read_model, everything, of_model),
        Loader("model/one.safetensors", _read_model, header, of_model),
        Loader("model/tokenizer.json", _read_tokenizer, everything, of_model),
        Loader("model/tokenizer_config.json", _read_tokenizer, everything, of_model),
        Loader("precision.json", lambda at: PrecisionPlan.read(at / "precision.json"), everything,
               ("export-precision", "{}/precision.json", "{}/out.py", "--target", "torchao")),
        Loader("profile.safetensors", _read_profile, in_header("scrimp_profile")),
        Loader("batches.safetensors", _read_batches, in_header("scrimp_batches")),
        Loader("doctor.json", _read_doctor, everything),
        Loader("links.json", _read_links, everything),
        Loader("gemm_table.json", _read_table, everything),
        Loader("gemm_times.json", _read_times, everything),
        Loader("cache/scrimp/throughput.json", _recall, everything),
        Loader("study/rows.jsonl", _read_study, lines, ("study", "{}/study")),
        Loader("study/study.toml", _read_study, BYTES, ("study", "{}/study")),
        Loader("study/looks.json", _read_study, everything, ("study", "{}/study")),
        Loader("study/probes.json", lambda at: kept_probes(at / "study"), everything),
    ]  # fmt: skip


def _write_study(folder: Path) -> None:
    folder.mkdir()
    variants = "".join(f'[[variants]]\nname = "{name}"\n' for name in "ab")
    (folder / "study.toml").write_text(f"seeds = 2\n[settings]\ntrain.steps = 8\n{variants}")
    for variant in "ab":
        for seed in (0, 1):
            curve = Curve(steps=[4.0, 8.0], values=[3.0, None])
            figures = {"held_out_loss": 2.5 + seed / 3, "training_loss": None}
            append_row(
                folder,
                Row(
                    variant=variant,
                    seed=seed,
                    steps=8,
                    digest=digest_of({"train.steps": 8, "run.seed": seed}),
                    figures=figures,
                    training=curve,
                    held_out=curve,
                    data="b",
                    seconds=1.5,
                    environment={"torch": "2"},
                ),
            )
    probe = Probe(
        startup_seconds=1.0,
        step_seconds=0.5,
        host_bytes=9,
        device_bytes=0,
        micro_batch=4,
        threads=1,
        data="b",
    )
    (folder / LOOKS).write_text(json.dumps({"b": [{"steps": 8, "seeds": [0, 1]}]}))
    (folder / PROBES).write_text(json.dumps({"c": asdict(probe)}))


def _read_study(folder: Path) -> object:
    folder /= "study"
    study = load_study(str(folder / "study.toml"))
    return build_page(results_of(study, rows_of(study, folder), read_looks(folder)))


def _shard_model(folder: Path) -> None:
    """The exported model as an index with one file, as larger models are stored."""
    model = folder / "model"
    (model / "model.safetensors").rename(model / "one.safetensors")
    with open(model / "one.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = {name: "one.safetensors" for name in header if name != "__metadata__"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _write_small_files(folder: Path) -> None:
    from profiles import names, profile

    from scrimp.planner.precision import Budget, Question, make_plan

    measured = profile(names(2), ("fp8", "nvfp4"), batches=2)
    measured.write(folder / "profile.safetensors")
    make_plan(Question(measured, Budget(fp4_flops=0.6)), step=12).write(folder / "precision.json")
    batches = RecentBatches(2)
    for _ in range(2):
        batches.add({"ids": torch.arange(6), "flag": True, "scale": 0.5, "none": None})
        batches.end_step()
    batches.write(folder / "batches.safetensors")
    rows = tuple(
        Measurement("fp8", gemm, "triton", status, "x", 0.1, 1.0, 2.0, "a")
        for gemm in GEMMS
        for status in STATUSES
    )
    report = DoctorReport(Surroundings("a", "b", "c", "d", "e"), "a", rows)
    (folder / "doctor.json").write_text(report.to_json())
    matrix = ((0.0, 1.5, 9.5), (1.5, 0.0, 9.0), (9.5, 9.0, 0.0))
    places = tuple(RankPlace("a", "b", rank) for rank in range(3))
    rates = (CollectiveRate("all-gather", 8, 0.5, 1.0),)
    (folder / "links.json").write_text(RankLinks("a", "b", places, False, matrix, matrix, rates).to_json())

    def figures(value: Any) -> Any:
        return {
            shape: {gemm: dict.fromkeys(("bf16", "fp8"), value) for gemm in GEMMS}
            for shape in ((8, 4), (4, 8))
        }

    table = GemmTimes("a", 64, figures(0.5), figures(0.1), figures("torch"), frozenset(["fp8"]))
    (folder / "gemm_table.json").write_text(table.to_json())
    step_times.keep_times(folder, step_times.StepTimes(table, 1, 0.25))
    _write_study(folder / "study")
    rates = folder / "cache/scrimp/throughput.json"
    rates.parent.mkdir(parents=True, exist_ok=True)
    rates.write_text(json.dumps({"a | b": 10.5, "c | d": 7}))


def _read_plan(at: Path) -> None:
    read_run(at / "run")
    plan = Plan.read(at / "run/plan.json")
    plan.check_runnable(plan, "plan.json", dict.fromkeys(plan.gemms, "made"))
    Plan.from_json(plan.to_json())


def _read_lines(name: str) -> Load:
    def read(at: Path) -> None:
        read_run(at / "run")
        read_jsonl(at / "run" / name)

    return read


def _read_state(at: Path) -> None:
    (folder,) = (at / "run/checkpoints").glob("step-*")
    read_state(Checkpoint(2, folder))


def _read_model(at: Path) -> None:
    architecture_of_weights(at / "model")


def _read_tokenizer(at: Path) -> None:
    tokenizer = load_tokenizer(at / "model")
    tokenizer.decode(tokenizer.encode_prompt("def f(x):"))
    tokenizer.encode("é")
    open_target(at / "model")


def _read_profile(at: Path) -> None:
    PrecisionProfile.read(at / "profile.safetensors")


def _read_batches(at: Path) -> None:
    RecentBatches(2).read(at / "batches.safetensors", torch.device("cpu"))


def _read_links(at: Path) -> None:
    content = read_bounded(at / "links.json", error=DeviceError, do="", at_most=2**24)
    links = RankLinks.from_json(content)
    slow_links_text(links.bandwidth)
    links.in_order(links.places[::-1])


def _read_doctor(at: Path) -> None:
    content = read_bounded(at / "doctor.json", error=DeviceError, do="", at_most=2**24)
    report = DoctorReport.from_json(content)
    for gemm in GEMMS:
        report.order("fp8", gemm)
    for measurement in report.measurements:
        str(measurement.speedup)


def _read_table(at: Path) -> None:
    times = GemmTimes.from_json(read_bounded(at / "gemm_table.json", error=PlanError, do="", at_most=2**24))
    times.table(list(times.seconds), [])


def _read_times(at: Path) -> None:
    kept = read_json(at / step_times.FILE, step_times._Kept, error=PlanError, do="", at_most=2**24)
    GemmTimes.from_json(bytes(kept.table))


def _recall(at: Path) -> None:
    plan = Plan.read(at / "run/plan.json")
    recall_throughput(plan, Config())
