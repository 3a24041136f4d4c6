"""Devices by name, peaks and remembered rates on the machine at hand."""

import gc
import json
from pathlib import Path

import pytest
import torch
from distributed import spawn

from scrimp import timing
from scrimp.config import Config, base_architecture, resolve
from scrimp.errors import DeviceError
from scrimp.host_memory import host_memory_available
from scrimp.planner import Figures, Plan, build_plan, peak_of_recipe
from scrimp.planner.memory.placement import Placement
from scrimp.profiler import (
    MemoryMeter,
    device_peaks,
    peaks,
    recall_throughput,
    remember_throughput,
    resolve_device,
)
from scrimp.world import World


def make_plan() -> tuple[Plan, Config]:
    resolution = resolve(Config(), base_architecture(Config(), None), device_type="cpu")
    plan = build_plan(
        resolution.config,
        resolution.architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons={},
        placement=Placement.resident(resolution.architecture.num_layers),
        why="everything resident",
        predicted=Figures(),
    )
    return plan, resolution.config


def test_the_cpu_is_named_and_has_memory() -> None:
    device = resolve_device("cpu")
    assert device.is_host
    assert device.name
    assert 0 < device.available_bytes <= 2**50


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "CUDA"])
def test_a_device_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="not known"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_never_replaced_by_the_cpu() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").is_host


class TwoGpus:
    """torch.cuda of a machine with two GPUs, as far as resolving and timing see it; work runs on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: list[int] = []
        self.waited: list[torch.device] = []
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "mem_get_info": lambda index: ((10, 100), (50, 100))[index],
            "get_device_name": lambda index: f"GPU {index}",
            "set_device": self.current.append,
            "synchronize": self.waited.append,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("name", ["cuda:1", "auto"])
def test_the_gpu_of_a_run_is_the_current_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = TwoGpus(monkeypatch)
    assert resolve_device(name).torch_device == torch.device("cuda", 1)
    assert gpus.current == [1]


def test_a_peak_is_measured_by_products_in_a_row_and_waits_for_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus, events, gpu = TwoGpus(monkeypatch), [], torch.device("cuda", 1)
    real_mm, real_randn, cpu_generator = torch.mm, torch.randn, torch.Generator

    def mm(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        events.append("product")
        return real_mm(*args, **named)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "Generator", lambda device: cpu_generator())
    monkeypatch.setattr(
        torch, "randn", lambda *size, generator, device: real_randn(*size, generator=generator)
    )
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: (gpus.waited.append(device), events.append("wait"))
    )
    monkeypatch.setitem(peaks.SIZES, "cuda", 16)
    rates = device_peaks(gpu, "a GPU whose products are counted")
    assert set(gpus.waited) == {gpu}
    rounds = "".join("w" if event == "wait" else "p" for event in events).strip("w").split("w")
    counts = [len(products) for products in rounds if products]
    first_of_fp32, first_of_bf16 = 0, counts.index(1, 1)  # which warm up
    assert counts[first_of_fp32] == 1
    assert {*counts[1:first_of_bf16], *counts[first_of_bf16 + 1 :]} == {peaks.IN_A_ROW["cuda"]}
    assert set(rates.flops_per_s) == {"fp32", "bf16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_auto_takes_the_gpu_where_there_is_one() -> None:
    assert resolve_device("auto").torch_device.type == "cuda"
    with pytest.raises(DeviceError, match="not there"):
        resolve_device("cuda:99")


def test_spec_sheets_are_used_for_known_names_and_measurements_otherwise() -> None:
    known = device_peaks(torch.device("cpu"), "NVIDIA H100 80GB HBM3")
    assert known["bf16"] == 989.4e12
    assert "spec sheet" in known.origin
    measured = device_peaks(torch.device("cpu"), "some CPU")
    assert set(measured.flops_per_s) == {"fp32", "bf16"}
    assert "measured" in measured.origin


def test_a_measured_peak_is_the_work_of_a_product_by_the_fastest_round_and_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that only products move: 3 rounds of each format, however slow, after one product that loads."""
    now, products = [0.0], []
    seconds = iter([9.0, 2.0, 1.0, 4.0, 9.0, 0.5, 3.0, 7.0])

    def take(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        products.append(arguments[0].dtype)
        now[0] += next(seconds)
        return arguments[0]

    monkeypatch.setitem(peaks.SIZES, "cpu", 64)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", take)
    measured = device_peaks(torch.device("cpu"), "a CPU by a clock")
    assert measured["fp32"] == 2 * 64**3 / 1.0
    assert measured["bf16"] == 2 * 64**3 / 0.5
    assert products == [torch.float32] * 4 + [torch.bfloat16] * 4
    assert device_peaks(torch.device("cpu"), "a CPU by a clock") is measured
    assert len(products) == 8


@pytest.mark.slow
def test_the_process_has_grown_by_an_allocation_that_is_gone_and_nothing_from_before() -> None:
    gc.collect()  # what other tests left must not be given back meanwhile
    before = torch.ones(2**26)  # 256 MiB that do not count
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.process_growth_bytes() < 2**24
    block = torch.ones(2**25)
    size = block.nbytes
    del block
    assert 0.98 * size < meter.process_growth_bytes() < 1.2 * size
    assert meter.process_peak_bytes() >= before.nbytes + size
    assert meter.peak_device_bytes() is None  # no step was counted
    assert host_memory_available() > 0


def test_a_measured_rate_is_remembered_for_equal_runs_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan, config = make_plan()
    assert recall_throughput(plan, config) is None
    remember_throughput(plan, config, 1234.5)
    assert recall_throughput(plan, config) == 1234.5
    other = Config(precision="bf16", train=config.train)
    assert recall_throughput(plan, other) is None
    (tmp_path / "scrimp" / "throughput.json").write_text("{broken", encoding="utf-8")
    assert recall_throughput(plan, config) is None
    remember_throughput(plan, config, 2.0)
    assert json.loads((tmp_path / "scrimp" / "throughput.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_card_is_known_by_whole_words(name: str, spec: str) -> None:
    assert device_peaks(torch.device("cpu"), name).origin == f"spec sheet of the {spec}, dense"


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_a_card_of_another_kind_is_measured(name: str) -> None:
    assert "measured" in device_peaks(torch.device("cpu"), name).origin


# Architecture of each card, and the narrow widths that its tensor cores have.
NARROW = {
    "A100": frozenset(),
    "RTX 3090": frozenset(),
    **dict.fromkeys(["L4", "L40S", "RTX 4090"], frozenset({"fp8"})),
    **dict.fromkeys(["H100", "H100 PCIe", "H100 NVL", "H200", "GH200"], frozenset({"fp8"})),
    **dict.fromkeys(["B200", "RTX 5090"], frozenset({"fp8", "fp4"})),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_card_has_the_narrow_rates_of_its_tensor_cores(name: str) -> None:
    peaks = device_peaks(torch.device("cpu"), f"NVIDIA {name}")
    assert set(peaks.flops_per_s) - {"fp32", "bf16", "int8"} == NARROW[name]
    # GeForce's rates with fp32 sums are half of the units', those with int32 sums are not.
    if name != "B200":
        assert peaks["int8"] / peaks["bf16"] == pytest.approx(4 if "RTX" in name else 2, rel=0.03)
    if "fp8" in NARROW[name]:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.02)
    if "fp4" in NARROW[name]:
        assert 1.9 < peaks["fp4"] / peaks["fp8"] < 4.1
    assert peaks["bf16"] > peaks["fp32"]


@pytest.mark.parametrize(
    ("name", "recipe", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H100 80GB HBM3", "fp4", 1978.9e12),
        ("NVIDIA H100 80GB HBM3", "nvfp4", 989.4e12),
        ("NVIDIA L40S", "mxfp8", 362e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", 312e12),
        ("NVIDIA B200", "mxfp4", 9000e12),
        ("NVIDIA B200", "mxfp8", 4500e12),
        ("NVIDIA GeForce RTX 5090", "nvfp4", 1676e12),
    ],
)
def test_a_recipe_has_a_rate_on_every_card(name: str, recipe: str, rate: float) -> None:
    assert peak_of_recipe(device_peaks(torch.device("cpu"), name), recipe) == rate


def shared(rank: int) -> str:
    """What two ranks are told that name one device."""
    with pytest.raises(DeviceError) as told:
        resolve_device("cuda:0", World.current())
    return told.value.what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_on_one_device_are_refused_by_name(tmp_path: Path) -> None:
    assert spawn(2, shared, tmp_path) == ["ranks 0 and 1 share a CUDA device"] * 2
