"""Rules for precision: read, written, and given to layers; against a second reading of the grammar."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import ConfigError
from scrimp.precision import (
    HIGH_PRECISION,
    RECIPES,
    RECOMPUTE,
    SAVED_CHOICES,
    InputOrigin,
    LinearPrecision,
    PrecisionRules,
    parse_rules,
)

ORIGINS: dict[str, InputOrigin] = {
    "attention.qkv": "made",
    "attention.out": "kept",
    "mlp.gate_up": "made",
    "mlp.down": "made",
}
NAMES = tuple(ORIGINS)
LAYERS: dict[str, InputOrigin] = {
    **{f"blocks.{block}.{name}": origin for block in range(12) for name, origin in ORIGINS.items()},
    "head": "alone",
}
GEMMS = ("fprop", "dgrad", "wgrad")


def assigned(text: str) -> dict[str, LinearPrecision]:
    return parse_rules(text).assign(LAYERS)


def reasons(text: str) -> dict[str, str]:
    return {layer: choice.reason for layer, choice in parse_rules(text).assign(LAYERS).items()}


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_rules(text).assign(LAYERS)
    return str(caught.value)


def test_a_recipe_alone_is_for_the_blocks_and_the_head_stays_in_the_compute_format() -> None:
    choices = assigned("fp8")
    assert choices["head"] == LinearPrecision("bf16", "bf16", "bf16", "bf16")
    assert choices["blocks.3.mlp.down"] == LinearPrecision("fp8", "fp8", "fp8", "fp8")
    assert choices["blocks.3.attention.out"] == LinearPrecision("fp8", "fp8", "fp8", "bf16")


@pytest.mark.parametrize("name", HIGH_PRECISION)
def test_a_high_precision_is_the_same_everywhere(name: str) -> None:
    assert set(assigned(name).values()) == {LinearPrecision.of(name)}
    assert set(reasons(name).values()) == {f"precision {name}"}


@pytest.mark.parametrize(
    ("text", "compute"),
    [
        ("fp32", "fp32"),
        ("fp32/fp32/fp32", "fp32"),
        ("bf16", "bf16"),
        ("fp4", "bf16"),
        ("fp32/fp8/fp8", "bf16"),
    ],
)
def test_activations_are_fp32_only_on_a_base_of_fp32(text: str, compute: str) -> None:
    assert parse_rules(text).compute == compute
    assert parse_rules(f"{text},blocks.0.*=nvfp4,head=mxfp8").compute == compute


def test_quantized_blocks_in_an_fp32_run_save_and_head_compute_in_fp32() -> None:
    choices = assigned("fp32,*.wgrad=fp8,*.mlp.down.wgrad=bf16")
    assert choices["blocks.0.mlp.gate_up"] == LinearPrecision("fp32", "fp32", "fp8", "fp8")
    assert choices["blocks.0.attention.out"].saved == "fp32"
    assert choices["blocks.0.mlp.down"].saved == "fp32"
    assert choices["head"] == LinearPrecision.of("fp32")


@pytest.mark.parametrize(
    ("text", "layer", "expected"),
    [
        ("fp8/fp4/bf16", "blocks.1.mlp.down", "fp8 fp4 bf16 bf16"),
        ("fp8,*.wgrad=bf16", "blocks.1.mlp.down", "fp8 fp8 bf16 bf16"),
        ("fp8,*.wgrad=fp4", "blocks.1.mlp.down", "fp8 fp8 fp4 fp4"),
        ("fp8,blocks.1.*=bf16", "blocks.1.mlp.down", "bf16 bf16 bf16 bf16"),
        ("fp8,blocks.1.*=bf16", "blocks.11.mlp.down", "fp8 fp8 fp8 fp8"),
        ("fp8,blocks.[0-3].*=bf16/fp8/fp8", "blocks.3.mlp.down", "bf16 fp8 fp8 fp8"),
        ("fp8,blocks.?.*=bf16", "blocks.11.mlp.down", "fp8 fp8 fp8 fp8"),
        ("bf16,*.mlp.*=fp8", "blocks.1.attention.qkv", "bf16 bf16 bf16 bf16"),
        ("bf16,*.mlp.*=fp8", "blocks.1.mlp.down", "fp8 fp8 fp8 fp8"),
        ("bf16,*=fp8", "head", "bf16 bf16 bf16 bf16"),
        ("bf16,*.wgrad=fp8", "head", "bf16 bf16 bf16 bf16"),
        ("bf16,head=fp8", "head", "fp8 fp8 fp8 fp8"),
        ("bf16,head=fp8", "blocks.1.mlp.down", "bf16 bf16 bf16 bf16"),
        ("bf16,head.wgrad=fp8", "head", "bf16 bf16 fp8 fp8"),
        ("bf16,head*=fp8", "head", "fp8 fp8 fp8 fp8"),
        ("fp8,*.saved=bf16", "blocks.1.mlp.down", "fp8 fp8 fp8 bf16"),
        ("fp8,*.saved=bf16,blocks.1.*=fp4", "blocks.1.mlp.down", "fp4 fp4 fp4 bf16"),
        ("fp8,*.attention.out.saved=fp8", "blocks.1.attention.out", "fp8 fp8 fp8 fp8"),
        ("bf16,*.mlp.down.saved=fp8", "blocks.1.mlp.down", "bf16 bf16 bf16 fp8"),
        ("bf16,*.mlp.down.saved=recompute", "blocks.1.mlp.down", "bf16 bf16 bf16 recompute"),
        (
            "bf16,*.saved=recompute,*.attention.out.saved=bf16",
            "blocks.1.mlp.gate_up",
            "bf16 bf16 bf16 recompute",
        ),
        (" fp8 , *.wgrad = bf16 ", "blocks.1.mlp.down", "fp8 fp8 bf16 bf16"),
    ],
)
def test_rules_say_what_they_look_like(text: str, layer: str, expected: str) -> None:
    assert assigned(text)[layer] == LinearPrecision(*expected.split())


def test_reasons_name_the_rules_that_decided() -> None:
    given_rules = reasons("fp8,*.mlp.*=fp4,*.wgrad=bf16,blocks.0.*=bf16,head=fp8")
    assert given_rules["blocks.1.attention.qkv"] == "precision fp8; rule `*.wgrad=bf16`"
    assert given_rules["blocks.1.mlp.down"] == "rule `*.mlp.*=fp4`; rule `*.wgrad=bf16`"
    assert given_rules["blocks.0.mlp.down"] == "rule `blocks.0.*=bf16`"
    assert given_rules["head"] == "rule `head=fp8`"
    alone = reasons("nvfp4")
    assert alone["head"] == "the head stays in bf16"
    assert alone["blocks.1.attention.out"] == "precision nvfp4; attention keeps its output anyway"


def test_without_a_base_the_rules_wait_for_one() -> None:
    for text in ("auto", "auto,*.wgrad=bf16", "*.wgrad=bf16"):
        rules = parse_rules(text)
        assert rules.base is None
        with pytest.raises(ConfigError, match="precision is still open"):
            rules.assign(LAYERS)
        assert rules.with_base("fp8").assign(LAYERS)
    assert str(parse_rules("*.wgrad=bf16").with_base("fp8")) == "fp8,*.wgrad=bf16"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["empty rule"]),
        (" , ", ["empty rule"]),
        ("fp8,", ["empty rule", "comma"]),
        ("fp8,,*.wgrad=bf16", ["empty rule", "comma"]),
        ("bf61", ["'bf61'", "auto", "did you mean bf16?"]),
        ("atuo", ["did you mean auto?"]),
        ("FP8", ["'FP8'", "did you mean fp8?"]),
        ("zzz", ["'zzz'", ", ".join(RECIPES)]),
        ("fp8,*.wgrad=nvpf4", ["`*.wgrad=nvpf4`", "did you mean nvfp4?"]),
        ("*=auto", ["unknown recipe", "'auto'"]),
        ("fp8/auto/fp8", ["unknown recipe", "'auto'"]),
        ("fp8/bf16", ["neither one format nor three", "fprop/dgrad/wgrad"]),
        ("fp8/fp8/fp8/fp8", ["neither one format nor three"]),
        ("fp8/", ["unknown recipe", "''"]),
        ("fp8,bf16", ["`bf16`", "not the first rule", "*=bf16"]),
        ("*.wgrad=bf16,fp8", ["`fp8`", "not the first rule"]),
        ("fp8,auto", ["not the first rule"]),
        ("fp8,=bf16", ["no usable pattern"]),
        ("fp8,blocks 0=bf16", ["no usable pattern", "'blocks 0'"]),
        ("fp8,a=b=bf16", ["no usable pattern", "'a=b'"]),
        ("fp8,wgrad=bf16", ["names no layer", "*.wgrad=bf16"]),
        ("fp8,saved=bf16", ["names no layer", "*.saved=bf16"]),
        ("fp8,*.wgrad=bf16/bf16/bf16", ["several formats", "one name for wgrad", "leave .wgrad out"]),
        ("fp8,*.wgrad=recompute", ["unknown recipe", "'recompute'"]),
        ("fp8,*.saved=recomptue", ["did you mean recompute?"]),
        ("fp8,*.saved=recompute", ["blocks.0.attention.out", "`*.saved=recompute`", "mlp.down"]),
        ("fp8,head.saved=recompute", ["input of head", "`head.saved=recompute`"]),
        ("fp8,*.mlp.donw=bf16", ["`*.mlp.donw=bf16`", "matches no layer", "blocks.0-11.mlp.down", "head"]),
        ("fp8,*.mlp.donw.wgrad=bf16", ["matches no layer", "'*.mlp.donw'"]),
        ("fp8,blocks.12.*=bf16", ["matches no layer", "blocks.0-11.attention.qkv"]),
        ("fp8,BLOCKS.*=bf16", ["matches no layer"]),
        ("fp8,[h]ead=bf16", ["matches no layer", "start with `head`"]),
        ("fp8,*.wg*=bf16", ["matches no layer"]),
        ("fp8,headless=bf16", ["matches no layer"]),
    ],
)
def test_every_mistake_is_named(text: str, parts: list[str]) -> None:
    message = refusal(text)
    assert message.startswith("precision")
    for part in parts:
        assert part in message


def test_many_kinds_of_layers_are_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules("fp8,x=bf16").assign({f"{letter}.proj": "alone" for letter in "abcdefghijkl"})
    assert "h.proj and 4 more" in str(caught.value)


GLOBS = st.sampled_from(
    [
        "*",
        "blocks.*",
        "*.mlp.*",
        "*.down",
        "blocks.0.*",
        "blocks.1?.*",
        "blocks.[2-5].attention.*",
        "head",
    ]
)
FORMATS = st.sampled_from(list(RECIPES)) | st.lists(
    st.sampled_from(list(RECIPES)), min_size=3, max_size=3
).map("/".join)
ONE = st.tuples(GLOBS, st.sampled_from(GEMMS), st.sampled_from(list(RECIPES))).map(
    "{0[0]}.{0[1]}={0[2]}".format
)
SAVED = st.tuples(GLOBS, st.sampled_from([name for name in SAVED_CHOICES if name != RECOMPUTE])).map(
    "{0[0]}.saved={0[1]}".format
)
ALL = st.tuples(GLOBS, FORMATS).map("{0[0]}={0[1]}".format)
RULES = st.lists(ALL | ONE | SAVED, max_size=5)
BASES = st.just("auto") | FORMATS


@given(BASES, RULES)
def test_rules_read_back_as_they_were_written(base: str, rules: list[str]) -> None:
    read = parse_rules(",".join([base, *rules]))
    assert parse_rules(str(read)) == read
    assert len(read.rules) == len(rules)
    assert (read.base is None) == (base == "auto")
    if base == "auto" and rules:
        assert parse_rules(",".join(rules)) == read


def second_reading(base: str, rules: list[str], layer: str) -> dict[str, str]:
    """What the grammar says, setting by setting from the last rule backwards, with regular expressions."""
    is_fp32 = set(base.split("/")) == {"fp32"}
    compute = "fp32" if is_fp32 else "bf16"
    found = {}
    for index, setting in enumerate((*GEMMS, "saved")):
        for rule in reversed(rules):
            pattern, formats = rule.split("=")
            head, _, last = pattern.rpartition(".")
            names = formats.split("/")
            if last in (*GEMMS, "saved"):
                glob, value = head, formats if last == setting else None
            else:
                glob, value = pattern, None if setting == "saved" else names[index % len(names)]
            expression = re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")
            expression = expression.replace(r"\[", "[").replace(r"\]", "]").replace(r"\-", "-")
            may = layer != "head" or pattern.startswith("head")
            if value is not None and may and re.fullmatch(expression, layer):
                found[setting] = value
                break
        else:
            names = base.split("/")
            if setting != "saved":
                found[setting] = compute if layer == "head" else names[index % len(names)]
    if "saved" not in found:
        is_plain = found["wgrad"] in ("fp32", "bf16") or layer.endswith("attention.out")
        found["saved"] = compute if is_plain else found["wgrad"]
    return found


@given(FORMATS, RULES)
def test_the_last_rule_that_names_a_setting_decides_it(base: str, rules: list[str]) -> None:
    for layer, choice in assigned(",".join([base, *rules])).items():
        formats = {name: value for name, value in vars(choice).items() if name != "reason"}
        assert formats == second_reading(base, rules, layer)


@given(FORMATS, RULES, st.sampled_from(GEMMS), st.sampled_from(list(RECIPES)))
def test_a_rule_at_the_end_wins_over_all_before(base: str, rules: list[str], gemm: str, name: str) -> None:
    before = assigned(",".join([base, *rules]))
    after = assigned(",".join([base, *rules, f"*.{gemm}={name}"]))
    for layer in list(LAYERS)[:-1]:
        assert after[layer].gemm(gemm) == name
        others = [other for other in GEMMS if other != gemm]
        assert [after[layer].gemm(other) for other in others] == [
            before[layer].gemm(other) for other in others
        ]
    assert after["head"] == before["head"]


@given(st.text(st.sampled_from("fp8bf16auto.*=,/[]- headwgradsaved"), max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        rules = parse_rules(text)
        rules.with_base("bf16").assign(LAYERS)
    except ConfigError:
        return  # any other exception fails
    assert isinstance(rules, PrecisionRules)
    assert parse_rules(str(rules)) == rules
