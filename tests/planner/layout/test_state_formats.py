"""Bytes of states and of their updates, against the optimizer's own account and counts of its operators."""

import dataclasses
import importlib
import json

import pytest
import torch
from torch import nn

import scrimp
from scrimp.config import OptimizerConfig, TrainConfig
from scrimp.errors import ConfigError
from scrimp.optim import AdamW
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.planner.layout.lines import answer_line, line_of, line_text, setting_of
from scrimp.planner.layout.software import in_states, software
from scrimp.planner.layout.state_formats import MOMENTS, StateFormats, states_of
from scrimp.profiler.counted_step import KernelCounter

ALL = [StateFormats(moments=moments, masters=masters) for moments in MOMENTS for masters in (True, False)]
LINE = {
    "model": "llama-3.1-8b",
    "hardware": "rtx4060ti",
    "sequence": 4096,
    "global_batch": 32,
    "micro_batch": 1,
    "recompute": "full",
    "offload": {"optimizer": True, "gradients": True, "weights": True},
}


@pytest.mark.parametrize("states", ALL, ids=lambda one: one.name)
def test_bytes_are_those_of_the_optimizers_account(states):
    said = in_states(software("scrimp"), states)
    own = AdamWMemory("bf16", states.masters, states.moments)
    weight = torch.empty(256, 512, dtype=torch.bfloat16)
    assert said.state_bytes * weight.numel() == own.state_bytes({"weight": weight})
    assert said.held_gradient_bytes == own.sums("cuda").dtype.itemsize


@pytest.mark.slow  # torch's FLOP counter imports Triton
@pytest.mark.parametrize("states", ALL, ids=lambda one: one.name)
def test_updates_are_those_that_are_counted(states, monkeypatch):
    def by_kernel(weight, gradient, moments, *_):
        """On a GPU one kernel is given these tensors, of which it changes all but the gradient."""
        own = [weight, *moments.tensors().values()]
        counter.kernel([gradient, *own], own)

    updates = importlib.import_module("scrimp.optim.update")  # the package has a function of this name
    monkeypatch.setattr(updates, "_takes_kernel", lambda *_: True)
    monkeypatch.setattr(updates, "update_by_kernel", by_kernel)
    weight = nn.Parameter(torch.randn(1024, 1024).bfloat16())
    settings = dataclasses.replace(OptimizerConfig(), master_weights=states.masters, moments=states.moments)
    optimizer, found = AdamW({"weight": weight}, settings), []
    for _ in range(2):
        with KernelCounter() as counter:
            passes = []
            for _ in range(2):
                (weight * 1.0).sum().backward()
                passes.append(counter.take().moved)
            norm = optimizer.gradient_norm()
            optimizer.clip(norm, norm / 2)
            optimizer.step(0.01)
            found.append((passes[1] - passes[0], counter.take().moved))
        optimizer.zero_grad()
    said = in_states(software("scrimp"), states)
    if states.masters:  # without them a kernel adds on a GPU, and what is counted is a CPU's operators
        first = 6.0  # a first gradient is made a sum in fp32
        assert found[1][0] / weight.numel() == pytest.approx(said.gradient_sum_bytes - first, rel=0.01)
    assert found[1][1] / weight.numel() == pytest.approx(said.optimizer_bytes, rel=0.01)


def test_fused_updates_read_and_write_each_number_once():
    usual, least = (in_states(software("scrimp"), one) for one in (StateFormats(), ALL[-1]))
    assert usual == software("scrimp")  # 46 bytes, which are counted
    assert StateFormats(moments="fp32").update_bytes + StateFormats().clip_bytes == usual.optimizer_bytes
    assert StateFormats().sum_bytes == usual.gradient_sum_bytes
    assert least.optimizer_bytes == 2 * MOMENTS["8bit"] + 2 + 2 + 2 + 2
    assert least.gradient_sum_bytes == 6.0


def answered(**changes):
    found = answer_line(json.dumps(LINE | changes), where="a line")
    assert "error" not in found
    return found


def test_what_stays_of_embedding_and_head_is_their_states():
    """Weights, sums of gradients and states of 1.05 billion parameters, 18 bytes each, or 8."""
    ends = 2 * 128_256 * 4096 + 4096
    for states, each in (({}, 18.0), ({"masters": False}, 8.0)):
        offload = {"optimizer": True, "master": not states, "gradients": True, "weights": True}
        found = answered(states=states, offload=offload)["stages"][0]["peak_bytes"]
        block = 218_112_000
        blocks = 2 * block * (each - found_states(states))
        held = found["weights"] + found["gradients"] + found["optimizer"]
        assert held == pytest.approx(ends * each + blocks, rel=1e-3)


def found_states(states):
    return StateFormats(**states).moment_bytes + StateFormats(**states).master_bytes


def test_states_of_less_make_room_and_take_less_time():
    usual, least = answered(), answered(states={"masters": False, "moments": "8bit"})
    assert peak(least) < peak(usual) - 8e9
    assert least["seconds"]["optimizer"] < usual["seconds"]["optimizer"]


def peak(answer):
    return sum(answer["stages"][0]["peak_bytes"].values())


def test_a_saved_line_keeps_them():
    line = line_of(setting_of_line(states={"moments": "bf16"}), "llama-3.1-8b", "rtx4060ti")
    assert json.loads(line_text(line))["states"] == {"moments": "bf16"}
    assert setting_of(line).software.states == StateFormats(moments="bf16")


def setting_of_line(**changes):
    from scrimp.json_files import decode_json
    from scrimp.planner.layout.lines import Line

    text = json.dumps(LINE | changes)
    return setting_of(decode_json(text, Line, origin="a line", error=ConfigError, do=None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"states": {"moments": "bf61"}}, "did you mean bf16"),
        (
            {"states": {"masters": False}, "software": "megatron"},
            "states are those that software megatron has",
        ),
    ],
)
def test_what_no_program_keeps_is_refused(changes, words):
    assert words in answer_line(json.dumps(LINE | changes), where="a line")["error"]


def test_a_search_refuses_parameters_and_optimizers_that_it_does_not_know():
    assert states_of(TrainConfig(parameters="bf16"), OptimizerConfig()).are_usual
    for train, optimizer in (
        (TrainConfig(parameters="fp32"), OptimizerConfig()),
        (TrainConfig(), OptimizerConfig(name="muon")),
    ):
        with pytest.raises(ConfigError, match="does not know"):
            states_of(train, optimizer)


def test_an_8b_model_fits_16_gb_where_its_states_take_less():
    def best(**settings):
        settings |= {"budget.host_memory": "192GB"}
        ask = {"model": "llama-3.1-8b", "hardware": "rtx4060ti", "sequence": 4096, "global_batch": 32}
        return scrimp.search(**ask, settings=settings).plans

    assert not best()
    assert best(**{"optimizer.master_weights": False})[0].fits
