"""What a host runs of a plan: as planned, or named; the nearest, by brute force."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.export.fit import Host, Inexpressible, Triple, compute_of, fit, nearest, summarise
from scrimp.precision import RECIPES, LinearPrecision

QUANTIZED = [name for name in RECIPES if name not in ("bf16", "fp32")]
TRIPLES = st.tuples(*[st.sampled_from(["bf16", *QUANTIZED])] * 3)
HOSTS = st.lists(TRIPLES, max_size=12, unique=True).map(lambda runs: [*runs, ("bf16", "bf16", "bf16")])


def host(runs: list[Triple]) -> Host:
    return Host("the host", runs, "no {}".format)


def linear(triple: Triple, saved: str = "bf16") -> LinearPrecision:
    return LinearPrecision(*triple, saved)


@examples(300)
@given(planned=TRIPLES, runs=HOSTS)
def test_the_nearest_never_has_fewer_bits_and_none_is_nearer(planned: Triple, runs: list[Triple]) -> None:
    chosen = nearest(planned, runs)

    def more(triple: Triple) -> list[int]:
        return [RECIPES[have].bits - RECIPES[want].bits for have, want in zip(triple, planned, strict=True)]

    allowed = [triple for triple in runs if all(bits >= 0 for bits in more(triple))]
    least = min(sum(more(triple)) for triple in allowed)
    closest = [triple for triple in allowed if sum(more(triple)) == least]
    changes = {triple: sum(a != b for a, b in zip(triple, planned, strict=True)) for triple in closest}
    assert chosen == next(triple for triple in closest if changes[triple] == min(changes.values()))
    assert chosen == planned or planned not in runs


@examples(300)
@given(plan=st.lists(TRIPLES, min_size=1, max_size=6), runs=HOSTS, approximate=st.booleans())
def test_what_runs_is_planned_or_named_gemm_by_gemm(
    plan: list[Triple], runs: list[Triple], approximate: bool
) -> None:
    precisions = {f"layer.{i}": linear(triple) for i, triple in enumerate(plan)}
    chosen, left_out = fit(precisions, host(runs), compute="bf16", approximate=approximate)
    named = {(entry.layer, entry.gemm): (entry.recipe, entry.instead) for entry in left_out}
    assert len(named) == len(left_out)
    differing = {}
    for (layer, triple), planned in zip(chosen.items(), plan, strict=True):
        assert triple == planned if planned in runs else triple in runs
        assert approximate or planned in runs or triple == ("bf16", "bf16", "bf16")
        for gemm, want, have in zip(("fprop", "dgrad", "wgrad"), planned, triple, strict=True):
            if want != have:
                differing[layer, gemm] = (want, have)
    assert named == differing
    assert all(entry.why for entry in left_out)


def test_unquantized_gemms_are_in_the_plans_working_type() -> None:
    assert compute_of({"a": linear(("fp8", "fp32", "fp32"))}) == "fp32"
    assert compute_of({"a": linear(("fp8", "fp8", "fp8"))}) == "bf16"
    mixed = {"a": linear(("fp32", "fp32", "fp32"), "fp32"), "b": linear(("bf16", "bf16", "bf16"))}
    assert compute_of(mixed) == "bf16"
    chosen, left_out = fit(mixed, host([("bf16", "bf16", "bf16")]), compute="bf16")
    assert chosen["a"] == ("bf16", "bf16", "bf16")
    assert {(entry.layer, entry.gemm) for entry in left_out} == {
        ("a", gemm) for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert "working type" in left_out[0].why


@pytest.mark.parametrize(
    ("saved", "is_named"),
    [
        ("bf16", False),
        ("fp32", False),
        ("recompute", False),
        ("fp8", False),
        ("fp8_row", True),
        ("nvfp4", True),
    ],
)
def test_a_saved_input_is_named_where_wgrad_would_read_other_numbers(saved: str, is_named: bool) -> None:
    triple = ("fp8", "fp8", "fp8")
    _, left_out = fit({"a": linear(triple, saved)}, host([triple]), compute="bf16")
    assert [(entry.gemm, entry.recipe) for entry in left_out] == ([("saved", saved)] if is_named else [])


def test_a_layer_that_cannot_be_quantized_is_left_and_says_why() -> None:
    triple = ("fp8", "fp8", "fp8")
    special = Host("the host", [triple, ("bf16", "bf16", "bf16")], str, {"head": "it is another class"})
    chosen, left_out = fit({"head": linear(triple)}, special, compute="bf16", approximate=True)
    assert chosen["head"] == ("bf16", "bf16", "bf16")
    assert {entry.why for entry in left_out} == {"it is another class"}


def test_a_summary_has_one_line_for_layers_that_share_their_fate() -> None:
    left_out = [
        Inexpressible(f"blocks.{i}.down", gemm, "fp4", "bf16", "none")
        for i in range(9)
        for gemm in ("fprop", "wgrad")
    ]
    layers = [entry.layer for entry in left_out]
    assert summarise(left_out, layers) == [
        "blocks.*.down: fprop fp4, wgrad fp4 planned, bf16 runs: none",
    ]
    (line,) = summarise(
        left_out, [*layers, "blocks.9.down"]
    )  # the tenth runs as planned: no glob means the nine
    assert line.partition(":")[0] == ", ".join(dict.fromkeys(layers))
    (short,) = summarise(left_out, [*layers, "blocks.9.down"], most=2)
    assert short.startswith("blocks.0.down, blocks.1.down, ... (9 globs): ")


@examples(100)
@given(plan=st.lists(TRIPLES, min_size=1, max_size=8), runs=HOSTS)
def test_a_summary_says_all_that_is_left_out_and_nothing_else(plan: list[Triple], runs: list[Triple]) -> None:
    precisions = {f"blocks.{i}.down": linear(triple) for i, triple in enumerate(plan)}
    _, left_out = fit(precisions, host(runs), compute="bf16")
    told = set()
    for line in summarise(left_out, precisions):
        globs, _, rest = line.partition(": ")
        planned, _, runs_and_why = rest.partition(" planned, ")
        instead, _, why = runs_and_why.partition(" runs: ")
        for layer in precisions:
            if any(fnmatchcase(layer, glob) for glob in globs.split(", ")):
                told |= {(layer, *one.split(" "), instead, why) for one in planned.split(", ")}
    assert told == {(one.layer, one.gemm, one.recipe, one.instead, one.why) for one in left_out}


@pytest.mark.parametrize("precisions", [{}, {"a": "fp8"}, {"a": linear(("fp8", "fp9", "fp8"))}])
def test_what_is_no_plan_is_refused(precisions: dict[str, LinearPrecision]) -> None:
    with pytest.raises(PlanError):
        fit(precisions, host([("bf16", "bf16", "bf16")]), compute="bf16")
