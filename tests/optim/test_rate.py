"""The CPU's rate is that of the formats of the run."""

import dataclasses

from scrimp.config import OptimizerConfig
from scrimp.optim.rate import cpu_update_rate


def test_rounding_takes_several_times_as_long_as_the_fused_update() -> None:
    fp32 = OptimizerConfig(master_weights=False, moments="fp32")
    rounded = dataclasses.replace(fp32, moments="8bit")
    rates = cpu_update_rate("fp32", fp32), cpu_update_rate("bf16", rounded)
    assert 1e11 > rates[0] > 2 * rates[1] > 1e5
