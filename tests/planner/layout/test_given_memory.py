"""A search over layouts whose memory is given, beside every setting predicted alone; and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B

from scrimp.cli import main
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.search import search
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Offload
from scrimp.planner.layout.software import software
from scrimp.planner.layout.stage_memory import peak_bytes

SMALL = dataclasses.replace(LLAMA_8B, layers=8)


def question(
    activations: str | None = None, offload: Offload | None = None, hardware: str = "4xl40s"
) -> Question:
    return Question(
        model=SMALL.sizes,
        cluster=load_hardware(hardware),
        sequence=4096,
        global_batch=16,
        software=software("scrimp"),
        memory=GivenMemory(activations, offload),
    )


@pytest.mark.parametrize("text", ["keep", "norms", "block", "keep,0-3=block"])
@pytest.mark.every(3)
def test_the_best_is_the_fastest_of_all_that_fit_as_given(text: str) -> None:
    asked = question(text, Offload())
    blocks = asked.memory.blocks(8)
    seconds = []
    for layout in layouts(asked):
        for micro_batch in micro_batches(asked, layout):
            one = dataclasses.replace(setting_of(asked, layout, micro_batch), blocks=blocks)
            if all(rank.total <= one.memory_bytes for rank in peak_bytes(one)):
                seconds.append(predict(one).step_seconds)
    found = search(asked, keep=3)
    assert [one.seconds for one in found.best] == pytest.approx(sorted(seconds)[:3])
    assert all(one.setting.blocks == blocks for one in found.best)
    assert found.tried - found.too_large == len(seconds)


def test_what_is_given_is_no_faster_than_what_is_searched() -> None:
    free = search(question()).best[0].seconds
    assert free <= min(search(question(text)).best[0].seconds for text in ("keep", "norms", "block")) * 1.0001


def test_states_that_are_given_are_where_they_are_given() -> None:
    away = Offload(optimizer=True, master=True)
    for text in (None, "block"):
        found = search(question(text, away)).best
        assert found
        assert all(one.setting.offload == away and one.setting.layout.pp == 1 for one in found)


def test_activations_that_are_given_to_the_host_leave_no_pipeline() -> None:
    asked = question("keep,7=keep+offload", hardware="2xh100")
    assert search(asked).best
    assert search(dataclasses.replace(asked, given={"pp": 2})).tried == 0


def test_states_leave_where_a_layout_fits_in_no_other_way() -> None:
    like = question("block", hardware="rtx4060ti")
    model = dataclasses.replace(SMALL, vocab_size=32000).sizes
    found = search(dataclasses.replace(like, model=model)).best
    assert found
    assert all(one.setting.offload.optimizer for one in found)


def test_levels_have_their_names() -> None:
    plans = GivenMemory("norms,0=keep+offload,1=block").blocks(3)
    assert [(one.recompute, one.offload) for one in plans] == [
        (NONE, True),
        (FULL, False),
        (SELECTIVE, False),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory.activations=qkv"], "does not know what blocks would do"),
        (["--memory.activations=block+offload"], "does not know what blocks would do"),
        (["--memory.optimizer=3"], "moves all blocks' states or none"),
        (["--memory.activations=block", "--precision=snip"], "memory.activations beside precision snip"),
        (["--memory.update=cpu"], "does not ask for this"),
    ],
)
def test_what_is_not_predicted_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--hardware=8xh100", "--model.preset=llama-3.1-8b", *words]) == 2
    assert says in capsys.readouterr().err
