"""Batches that a plan cannot split: what is said."""

import pytest
import toy
from spmdkit.models.moe import moe
from spmdkit.models.moe_config import MoEConfig
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, lay_out
from spmdkit.parallel.sharding.batch_rows import check_eval_rows, check_rows

SIZES = {"vocabulary": 32, "length": 16, "layers": 4, "width": 16, "heads": 4, "mlp_width": 32}
MODEL = transformer(TransformerConfig(**SIZES))
MIXTURE = moe(MoEConfig(**SIZES, experts=4, top_k=2))
FSDP = FSDPConfig(size=2, floor_bytes=64)


def layouts(devices, model=MODEL, **strategy):
    return lay_out(model, strategy, devices=toy.devices(devices))


@pytest.mark.parametrize(
    ("given", "rows", "accumulate", "problem"),
    [
        (layouts(4, data=2, fsdp=FSDP), 6, 1,
         "A batch of 6 rows cannot be split over data 2 x fsdp 2 and accumulate 1: 6 % 4 = 2. Set train.global_batch "
         "to a multiple of 4 (8 is the nearest), or change strategy or train.accumulate."),
        (layouts(4, data=2, pipe={"size": 2, "microbatches": 4}), 20, 2,
         "A batch of 20 rows cannot be split over data 2, strategy.pipe.microbatches 4 and accumulate 2: 20 % 16 = 4. "
         "Set train.global_batch to a multiple of 16 (16 is the nearest), or change strategy or train.accumulate."),
        (layouts(2, tensor=2), 3, 2, "A batch of 3 rows cannot be split over 1 device and accumulate 2: 3 % 2 = 1."),
        (layouts(2, MIXTURE, expert=2), 3, 1, "cannot be split over expert 2 and accumulate 1: 3 % 2 = 1."),
        (layouts(1, data=1), 0, 1, "A batch of 0 rows"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_split(given, rows, accumulate, problem):
    with pytest.raises(ValueError) as raised:
        check_rows(given, rows, accumulate)
    assert problem in str(raised.value)
    check_rows(given, given.num_batch_shards * 8 * accumulate, accumulate)


def test_evaluations_need_no_microbatches():
    given = layouts(4, data=2, pipe={"size": 2, "microbatches": 4})
    check_eval_rows(given, 2)
    with pytest.raises(ValueError, match=r"of 3 rows cannot be split over data 2: 3 % 2 = 1\. Pad it to a"):
        check_eval_rows(given, 3)
