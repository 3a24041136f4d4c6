"""Settings of a run: typed, loaded strictly, checked, and resolved with reasons.

The way of a configuration: `read_config` (file, and its stages), the command line's overrides, `check_values`,
`base_architecture`, `resolve`, and `to_toml` into the run folder. Nothing here imports torch.
"""

from scrimp.config.architecture import Adapter, Architecture, RopeScaling
from scrimp.config.fields import flatten, leaves, nearest_key, nearest_word, replace_values
from scrimp.config.layout import for_ranks, ranks_of
from scrimp.config.model_section import base_architecture
from scrimp.config.presets import OWN_PRESETS, PRESETS, preset
from scrimp.config.read_toml import load_config, parse_config, settings_in
from scrimp.config.resolve import (
    Resolution,
    resolve,
    with_later_choices,
)
from scrimp.config.resolved import ResolvedConfig, closed
from scrimp.config.resuming import MAY_CHANGE_ON_RESUME, decided_anew, differences, may_change
from scrimp.config.sampling import Sampling
from scrimp.config.schema import (
    AdapterConfig,
    BudgetConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LayoutConfig,
    MemoryConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    SnipConfig,
    TrainConfig,
)
from scrimp.config.stages import StagedRun, folder_of, read_config, stage_in, with_command_line
from scrimp.config.values import (
    RANGES,
    Range,
    check_device,
    check_range,
    check_values,
    parse_bytes,
    parse_count,
)
from scrimp.config.write_toml import reasons_in, to_toml

__all__ = [
    "MAY_CHANGE_ON_RESUME",
    "OWN_PRESETS",
    "PRESETS",
    "RANGES",
    "Adapter",
    "AdapterConfig",
    "Architecture",
    "BudgetConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LayoutConfig",
    "MemoryConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OuterConfig",
    "Range",
    "Resolution",
    "ResolvedConfig",
    "RopeScaling",
    "RunConfig",
    "Sampling",
    "ScheduleConfig",
    "SnipConfig",
    "StagedRun",
    "TrainConfig",
    "base_architecture",
    "check_device",
    "check_range",
    "check_values",
    "closed",
    "decided_anew",
    "differences",
    "flatten",
    "folder_of",
    "for_ranks",
    "leaves",
    "load_config",
    "may_change",
    "nearest_key",
    "nearest_word",
    "parse_bytes",
    "parse_config",
    "parse_count",
    "preset",
    "ranks_of",
    "read_config",
    "reasons_in",
    "replace_values",
    "resolve",
    "settings_in",
    "stage_in",
    "to_toml",
    "with_command_line",
    "with_later_choices",
]
