"""The typed schema of every config group, with all defaults.

The YAML files in `conf/` only select and override. `__post_init__` checks values, so a bad one is refused before
anything is loaded or written. Choices by name are in `registry`, settings without effect in `unused`.
"""

from distillspec.config.bench import BenchCommand, BenchConfig
from distillspec.config.commands import (
    COMMANDS,
    EvalCommand,
    ExportCommand,
    GenerateCommand,
    InitDraftCommand,
    ReportCommand,
    SimulateCommand,
    TrainCommand,
)
from distillspec.config.data import DataConfig
from distillspec.config.engine import EngineConfig, SamplingEngineConfig
from distillspec.config.evaluation import EvaluationConfig, SamplingConfig
from distillspec.config.loss import LossConfig
from distillspec.config.models import DraftConfig, DraftPathConfig, ServedDraftConfig, TargetConfig
from distillspec.config.online import AdaptConfig, GateConfig, OnlineConfig, ReplayConfig
from distillspec.config.online_commands import AdaptCommand, ReplayCommand, VersionsCommand
from distillspec.config.online_groups import OnlineGroups
from distillspec.config.profile import ProfileCommand, ProfileConfig
from distillspec.config.quality import QualityCommand, QualityConfig
from distillspec.config.serve import ServeCommand
from distillspec.config.serving import ServerConfig
from distillspec.config.simulation import HardwareConfig, ModelFigures, WorkloadConfig
from distillspec.config.train_stop import StopConfig, TrainStopCommand
from distillspec.config.training import LauncherConfig, TrackerConfig, TrainConfig

__all__ = [
    "COMMANDS",
    "AdaptCommand",
    "AdaptConfig",
    "BenchCommand",
    "BenchConfig",
    "DataConfig",
    "DraftConfig",
    "DraftPathConfig",
    "EngineConfig",
    "EvalCommand",
    "EvaluationConfig",
    "ExportCommand",
    "GateConfig",
    "GenerateCommand",
    "HardwareConfig",
    "InitDraftCommand",
    "LauncherConfig",
    "LossConfig",
    "ModelFigures",
    "OnlineConfig",
    "OnlineGroups",
    "ProfileCommand",
    "ProfileConfig",
    "QualityCommand",
    "QualityConfig",
    "ReplayCommand",
    "ReplayConfig",
    "ReportCommand",
    "SamplingConfig",
    "SamplingEngineConfig",
    "ServeCommand",
    "ServedDraftConfig",
    "ServerConfig",
    "SimulateCommand",
    "StopConfig",
    "TargetConfig",
    "TrackerConfig",
    "TrainCommand",
    "TrainConfig",
    "TrainStopCommand",
    "VersionsCommand",
    "WorkloadConfig",
]
