"""Resolving rules: policies, the text of every problem, all problems at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.layouts import LayoutError, LayoutMap, TensorLayout, resolve
from spmdkit.layouts.problems import nearest_path
from spmdkit.layouts.sizes import counted


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


PARAMS = {
    "embed": array(1000, 64),
    "blocks": [{"query": array(64, 64), "norm": array(64)} for _ in range(3)],
    "head": array(64, 1002, dtype="bfloat16"),
}


def make_rules(mesh, match="fullmatch", **layouts) -> LayoutMap:
    rules = LayoutMap(mesh, match=match)
    for key, axes in layouts.items():
        rules[key] = axes
    return rules


@pytest.fixture
def rules(canonical) -> LayoutMap:
    """One right rule for each parameter."""
    right = {"embed": ("fsdp", None), ".*/query": (None, "fsdp"), ".*/norm": (None,), "head": ("fsdp", None)}
    return make_rules(canonical, **right)


def problems_of(*arguments, **options) -> tuple[str, ...]:
    with pytest.raises(LayoutError) as error:
        resolve(*arguments, **options)
    assert all(problem in str(error.value) for problem in error.value.problems)
    return error.value.problems


def test_gives_every_parameter_its_layout(canonical, rules):
    table = resolve(PARAMS, canonical, rules=rules, required_axes=("fsdp", "tensor"))
    row = table.row("blocks/1/query")
    assert (row.rule, row.layout, row.bytes_per_device) == (".*/query", TensorLayout((None, "fsdp"), canonical), 4096)
    assert table.row("head").bytes_per_device == 64 * 1002 * 2 // 4
    assert jax.tree.structure(table.layouts) == jax.tree.structure(PARAMS)


def test_takes_arrays_and_empty_layouts(canonical):
    rules = make_rules(canonical, w=("fsdp", None), v=())
    table = resolve({"w": np.ones((4, 2)), "v": array(3, 5)}, canonical, rules=rules)
    assert table.row("w").bytes_per_device == 16
    assert table.row("v").layout.shard_shape((3, 5)) == (3, 5)


def test_a_default_lays_out_the_rest(canonical):
    def default(path, leaf):
        return TensorLayout(("fsdp", *(None for _ in leaf.shape[1:])), canonical), f"fsdp on dim 0 of {path}"

    table = resolve(PARAMS, canonical, rules=make_rules(canonical, head=(None, None)), default=default)
    assert table.row("head").rule == "head"  # a rule goes first
    assert table.row("blocks/0/norm").rule == "fsdp on dim 0 of blocks/0/norm"
    assert table.row("blocks/0/norm").bytes_per_device == 64


# Unmatched parameters


def test_large_unmatched_parameters_are_an_error(canonical, rules):
    del rules["embed"]
    [problem] = problems_of(PARAMS, canonical, rules=rules, unmatched_floor_bytes=1024)
    assert problem.startswith(
        "'embed' of shape (1000, 64) matches no rule, so every device would hold all of its 250 KiB"
    )
    assert "layouts.unmatched_floor = 1 KiB" in problem
    assert problem.endswith("Add a rule to layouts.rules, or set layouts.unmatched to warn or replicate.")


def test_the_floor_counts_itself(canonical):
    assert len(problems_of({"w": array(256)}, canonical, unmatched_floor_bytes=1024)) == 1
    [row] = resolve({"w": array(255)}, canonical, unmatched_floor_bytes=1024).rows
    assert row.rule == "replicated: no rule, under 1 KiB"
    assert row.bytes_per_device == row.bytes_global


def test_unmatched_parameters_may_be_replicated(canonical):
    table = resolve(PARAMS, canonical, unmatched="replicate", unmatched_floor_bytes=0)
    assert {row.rule for row in table.rows} == {"replicated: no rule"}
    warning = r"No rule matches 2 large parameters, .* holds all of embed, head\. Add rules"
    with pytest.warns(UserWarning, match=warning):
        table = resolve(PARAMS, canonical, unmatched="warn", unmatched_floor_bytes=100_000)
    assert table.row("embed").layout.used_axes == ()


# Rules


@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        (
            {".*/quary": (None, "fsdp")},
            {},
            "Rule '.*/quary' matches no parameter. The nearest path is 'blocks/0/query'. Correct the rule or remove it "
            "from layouts.rules.",
        ),
        (
            {".*query": ("fsdp", None)},  # once for all layers
            {},
            "'blocks/{0..2}/query' of shape (64, 64) is matched by 2 rules, '.*/query' and '.*query'. Make the rules "
            "more specific, or set layouts.match to first.",
        ),
        (
            {},
            {"required_axes": ("data", "fsdp", "tensor")},
            "Mesh axis 'data' of size 2 splits no parameter, so groups of 2 devices would hold the same. Name it in a "
            "rule of layouts.rules, or set strategy.data to 1.",
        ),
    ],
    ids=["unused rule", "two rules", "unused axis"],
)
def test_explains_rules_and_axes_that_do_not_fit(canonical, rules, more, options, expected):
    for key, axes in more.items():
        rules[key] = axes
    assert problems_of(PARAMS, canonical, rules=rules, **options) == (expected,)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("hed", "head"), (r"blocks/\d+/nrm", "blocks/0/norm"), (".*embedding.*", "embed"), ("model/head", "head")],
)
def test_nearest_path(key, nearest):
    assert nearest_path(key, ["embed", "blocks/0/query", "blocks/0/norm", "head"]) == nearest


def test_no_parameters_no_nearest_path(canonical, rules):
    assert all("The model lacks parameters" in problem for problem in problems_of({}, canonical, rules=rules))


def test_rules_for_outputs_match_no_parameter(canonical, rules):
    rules[".*/query/output"] = ("data", None)
    assert resolve(PARAMS, canonical, rules=rules).row("head").rule == "head"


@pytest.mark.parametrize("match", ["fullmatch", "first"])
def test_rules_that_never_decide_warn(canonical, match):
    rules = make_rules(canonical, match, **{"w": (None, "fsdp"), ".*": (None, None)})
    with pytest.warns(UserWarning, match=r"layouts\.rules: 1 rule without effect, '\.\*': every path that matches has"):
        assert resolve({"w": array(4, 4)}, canonical, rules=rules).row("w").rule == "w"


def test_rejects_invalid_arguments(canonical, mesh):
    with pytest.raises(ValueError, match="use one mesh"):
        resolve(PARAMS, mesh, rules=LayoutMap(canonical))
    for policy in ("unmatched", "indivisible"):
        with pytest.raises(ValueError, match=f"Unknown layouts.{policy} 'eror'.*Did you mean 'error'"):
            resolve(PARAMS, canonical, **{policy: "eror"})


# Layouts that do not fit


@pytest.mark.parametrize("axes", [("fsdp",), (None, None, "fsdp")])
def test_one_entry_per_dim(canonical, rules, axes):
    del rules["head"]
    rules["head"] = axes
    [problem] = problems_of(PARAMS, canonical, rules=rules)
    assert problem.startswith("'head' of shape (64, 1002) has 2 dims, but rule 'head' gives the layout (")
    assert f"with {counted(len(axes), 'entry', 'entries')}. Give one entry per dim (null for a whole dim)" in problem


def test_an_axis_once_per_layout(canonical):
    rules = make_rules(canonical, w=("fsdp", ("data", "fsdp")))
    [problem] = problems_of({"w": array(8, 8)}, canonical, rules=rules)
    assert "gets the layout (fsdp, (data, fsdp)) from rule 'w', which uses 'fsdp' twice. An axis can" in problem


def test_indivisible_dims_name_sizes_that_work(canonical):
    [problem] = problems_of(PARAMS["head"], canonical, rules=make_rules(canonical, **{"": (None, "fsdp")}))
    assert problem == (
        "'' of shape (64, 1002) gets the layout (None, fsdp) from rule '', but dim 1 of size 1002 does not divide over "
        "fsdp (size 4): 1002 % 4 = 2; nearest dim sizes that work: 1000 or 1004; numbers of parts that work: 2. "
        "Change the dim or strategy.fsdp, give the parameter its own rule, or set layouts.indivisible to replicate or "
        "next_dim."
    )


def test_indivisible_dims_may_stay_whole(canonical):
    rules = make_rules(canonical, head=("data", "fsdp"))
    row = resolve({"head": PARAMS["head"]}, canonical, rules=rules, indivisible="replicate").row("head")
    assert row.layout == TensorLayout(("data", None), canonical)
    assert row.rule == "head; dim 1 whole (1002 % 4 = 2)"


@pytest.mark.parametrize(
    ("shape", "axes", "moved", "said"),
    [
        ((64, 1002), (None, "fsdp"), ("fsdp", None), "dim 1 -> dim 0 (1002 % 4 = 2)"),
        ((8, 3, 16), (None, "fsdp", None), (None, None, "fsdp"), "dim 1 -> dim 2 (3 % 4 = 3)"),  # the largest
        ((8, 3, 16), (None, "fsdp", "data"), ("fsdp", None, "data"), "dim 1 -> dim 0 (3 % 4 = 3)"),  # the largest whole
        ((16, 12), (None, ("data", "fsdp")), (("data", "fsdp"), None), "dim 1 -> dim 0 (12 % 8 = 4)"),
    ],
)
def test_indivisible_dims_may_move_on(canonical, shape, axes, moved, said):
    row = resolve({"w": array(*shape)}, canonical, rules=make_rules(canonical, w=axes), indivisible="next_dim").row("w")
    assert row.layout == TensorLayout(moved, canonical)
    assert row.rule == f"w; {said}"


def test_moving_on_needs_a_dim_that_divides(canonical):
    rules = make_rules(canonical, w=(None, "fsdp"))
    [problem] = problems_of({"w": array(6, 7)}, canonical, rules=rules, indivisible="next_dim")
    assert "dim 1 of size 7 does not divide over fsdp (size 4): 7 % 4 = 3" in problem


def test_all_problems_at_once(canonical):
    rules = make_rules(
        canonical,
        **{"embed": ("fsdp",), ".*query": ("fsdp", "fsdp"), ".*norm": ("fsdp",), "blocks/0/.*m": ("fsdp",), "hed": ()},
    )
    found = problems_of(PARAMS, canonical, rules=rules, unmatched_floor_bytes=1, required_axes=("data",))
    causes = ["2 rules", "uses 'fsdp' twice", "1 entry", "matches no rule", "Rule 'hed'", "Mesh axis 'data'"]
    assert len(found) == len(causes)
    for cause in causes:
        assert sum(cause in problem for problem in found) == 1, cause
