"""The typed schema of every config group; defaults live here and nowhere else.

The YAML files in `conf/` only select and override. Values are checked in `__post_init__`, so a bad one is
refused before anything is loaded or written.
"""

from distillspec.config.commands import (
    COMMANDS,
    EvalCommand,
    ExportCommand,
    GenerateCommand,
    InitDraftCommand,
    ReportCommand,
    TrainCommand,
)
from distillspec.config.data import DataConfig
from distillspec.config.evaluation import EvaluationConfig, SamplingConfig
from distillspec.config.loss import LossConfig
from distillspec.config.models import DraftConfig, DraftPathConfig, TargetConfig
from distillspec.config.online import (
    AdaptCommand,
    AdaptConfig,
    GateConfig,
    OnlineConfig,
    ReplayCommand,
    ReplayConfig,
    VersionsCommand,
)
from distillspec.config.training import LauncherConfig, TrackerConfig, TrainConfig

__all__ = [
    "COMMANDS",
    "AdaptCommand",
    "AdaptConfig",
    "DataConfig",
    "DraftConfig",
    "DraftPathConfig",
    "EvalCommand",
    "EvaluationConfig",
    "ExportCommand",
    "GateConfig",
    "GenerateCommand",
    "InitDraftCommand",
    "LauncherConfig",
    "LossConfig",
    "OnlineConfig",
    "ReplayCommand",
    "ReplayConfig",
    "ReportCommand",
    "SamplingConfig",
    "TargetConfig",
    "TrackerConfig",
    "TrainCommand",
    "TrainConfig",
    "VersionsCommand",
]
