"""The presets of well-known models have the published sizes, and train with fewer layers."""

import pytest
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.runtime.build_run import build
from support.runs import losses

PARAMETERS = {
    "gpt2_124m": 124_439_808,  # as the checkpoint gpt2 of Hugging Face
    "llama3_8b": 8_030_261_248,  # as Meta-Llama-3-8B
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_8b": 8_190_735_360,  # as Qwen/Qwen3-8B
    "qwen3_30b_a3b": 30_532_122_624,  # as Qwen/Qwen3-30B-A3B
}
SMALL = {
    "gpt2_124m": ["model.width=64", "model.heads=4"],
    "llama3_8b": ["model.width=64", "model.heads=4", "model.kv_heads=2", "model.mlp_width=128"],
    "qwen3_30b_a3b": [
        "model.width=64",
        "model.heads=4",
        "model.head_width=32",
        "model.mlp_width=32",
        "model.experts=8",
    ],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_has_published_number_of_parameters(name):
    """None of them is created."""
    assert build(load_config(name)).layouts.table.num_elements == PARAMETERS[name]


def test_qwen3_has_published_active_parameters():
    """3.3 billion of them multiply a token, as the model card states; q and k have norms, and the head is its own."""
    active = build(load_config("qwen3_30b_a3b")).model.flops_of_length(1) / 6
    assert active + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    paths = [row.path for row in build(load_config("qwen3_8b")).layouts.table.rows]
    assert {"blocks/attention/query_norm", "blocks/attention/key_norm", "head/logits"} <= set(paths)


@pytest.mark.long_cases("qwen3_30b_a3b")
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_trains_reduced(name, tmp_path):
    reduced = ["model.layers=2", *SMALL[name], "data.vocabulary=256", "data.length=16", "eval.batches=1"]
    assert main(["train", name, *reduced, "train.global_batch=8", "train.steps=2", f"run.dir={tmp_path / 'run'}"]) == 0
    assert losses(tmp_path / "run").keys() == {2}
