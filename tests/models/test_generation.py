"""Generation with a cache against full recomputation, and the rules of sampling."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from decoder_reference import FAMILIES, LLAMA, filled, packed_logits, weights_of

from scrimp.config import Sampling
from scrimp.errors import ConfigError, ModelError
from scrimp.models import generation
from scrimp.models.generation import cache_bytes, choose, generate, write_rows
from scrimp.models.model import Model

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9]


def greedy_by_recomputation(model: Model, count: int) -> list[int]:
    ids, weights = list(PROMPT), weights_of(model)
    for _ in range(count):
        logits = packed_logits(model.architecture, weights, torch.tensor([ids]), [0, len(ids)])
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_with_a_cache_equals_full_recomputation(family: str) -> None:
    model = filled(FAMILIES[family])
    assert list(generate(model, PROMPT, max_tokens=30)) == greedy_by_recomputation(model, 30)


def test_a_cache_that_grows_many_times_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(LLAMA)
    monkeypatch.setattr(generation, "CACHE_TOKENS", 4)
    assert list(generate(model, PROMPT, max_tokens=30)) == greedy_by_recomputation(model, 30)


def test_a_prompt_shorter_than_the_window_and_a_single_token_work() -> None:
    model = filled(FAMILIES["mistral"])
    ids = list(generate(model, [7], max_tokens=20))
    logits = packed_logits(model.architecture, weights_of(model), torch.tensor([[7, *ids[:-1]]]), [0, 20])
    assert ids == logits.argmax(-1).tolist()


def test_bf16_models_generate() -> None:
    assert len(list(generate(filled(LLAMA, dtype=torch.bfloat16), PROMPT, max_tokens=5))) == 5


def test_the_seed_decides_the_draws() -> None:
    model = filled(LLAMA)
    texts = [
        list(generate(model, PROMPT, max_tokens=20, sampling=Sampling(1.0, seed=seed))) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_what_is_agreed_upon_goes_on_and_not_what_was_chosen() -> None:
    model, others = filled(LLAMA), iter([11, 4, 27])
    ids = list(generate(model, PROMPT, max_tokens=4, agreed=lambda token: next(others, token)))
    assert ids[:3] == [11, 4, 27]
    logits = packed_logits(
        model.architecture, weights_of(model), torch.tensor([[*PROMPT, *ids[:3]]]), [0, 12]
    )
    assert ids[3] == int(logits[-1].argmax())


def test_an_end_token_ends_the_text_and_is_not_part_of_it() -> None:
    model = filled(LLAMA)
    whole = list(generate(model, PROMPT, max_tokens=30))
    end = whole[10]
    assert list(generate(model, PROMPT, max_tokens=30, end_ids=frozenset({end}))) == whole[: whole.index(end)]


def test_the_context_may_be_filled_but_not_passed() -> None:
    model = filled(LLAMA)
    assert len(list(generate(model, PROMPT, max_tokens=64 - 9))) == 55
    with pytest.raises(
        ModelError,
        match=r"got 9 \+ 56 tokens, expected at most 64 - ask for 55 or fewer new tokens, or shorten the prompt to 8",
    ):
        generate(model, PROMPT, max_tokens=56)


def test_bad_input_is_refused_before_the_first_token() -> None:
    model = filled(LLAMA)
    for prompt in ([], [61], [-1]):
        with pytest.raises(ModelError):
            generate(model, prompt, max_tokens=1)
    for sampling in (
        Sampling(temperature=-1.0),
        Sampling(top_k=-1),
        Sampling(top_p=0.0),
        Sampling(top_p=1.5),
    ):
        with pytest.raises(ConfigError):
            generate(model, PROMPT, max_tokens=1, sampling=sampling)
    with pytest.raises(ConfigError):
        generate(model, PROMPT, max_tokens=-1)


def draws(logits: list[float], temperature: float = 1.0, **cut: float) -> Counter[int]:
    generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature, **cut)  # type: ignore[arg-type]
    return Counter(choose(torch.tensor(logits), sampling, generator) for _ in range(2000))


LOGITS = [0.0, 2.0, 1.0, -1.0]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    counts = draws(LOGITS, temperature=0.5)
    for token, p in enumerate(torch.softmax(torch.tensor(LOGITS) / 0.5, 0).tolist()):
        assert abs(counts[token] / 2000 - p) < 0.03


@pytest.mark.slow
def test_top_k_and_top_p_keep_the_most_probable_tokens() -> None:
    assert set(draws(LOGITS, top_k=2)) == {1, 2}
    # Probabilities: .64, .24, .09, .03.
    assert set(draws(LOGITS, top_p=0.6)) == {1}
    assert set(draws(LOGITS, top_p=0.65)) == {1, 2}
    assert set(draws(LOGITS, top_p=0.9)) == {1, 2, 0}
    assert set(draws(LOGITS, top_k=3, top_p=0.95)) == {1, 2, 0}
    assert set(draws(LOGITS, temperature=0.0)) == {1}


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("closing_id", "cuts"), [(None, True), (5, True), (None, False)])
@pytest.mark.every(2)
def test_rows_are_drawn_from_the_mean_logits_of_whole_documents(
    family: str, closing_id: int | None, cuts: bool
) -> None:
    first = FAMILIES[family]
    models = [filled(first), filled(dataclasses.replace(first, num_layers=1))]
    rows = write_rows(
        models, 3, 24, entries=50, delimiter_id=7, closing_id=closing_id, cuts_documents=cuts,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    draws, ended = torch.Generator().manual_seed(0), 0
    for at in range(1, 24):
        p_RV = torch.softmax(torch.stack([_last_logits(models, row[:at], cuts) for row in rows]), dim=-1)
        drawn = torch.multinomial(p_RV, 1, generator=draws)[:, 0]
        if closing_id is not None:
            ends = rows[:, at - 1] == closing_id
            drawn[ends], ended = 7, ended + int(ends.sum())
        assert rows[:, at].tolist() == drawn.tolist()
    assert (rows[:, 0] == 7).all()
    assert closing_id is None or ended


def _last_logits(models: list[Model], row: torch.Tensor, cuts: bool) -> torch.Tensor:
    """The mean logits behind a row, of its last document alone where documents are cut."""
    start = int((row == 7).nonzero()[-1]) if cuts else 0
    ids = row[None, start:]
    each = [packed_logits(one.architecture, weights_of(one), ids, [0, ids.shape[1]])[-1] for one in models]
    return torch.stack(each)[:, :50].double().mean(0)


def test_what_the_cache_of_a_row_takes_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[generation._Cache] = []

    class Cache(generation._Cache):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(generation, "_Cache", Cache)
    model = filled(LLAMA)
    list(generate(model, PROMPT, max_tokens=20))
    held = [one for cache in made for one in (cache.keys, cache.values) if one is not None]
    assert sum(one.numel() * one.element_size() for one in held) == cache_bytes(LLAMA, 28, 4)
