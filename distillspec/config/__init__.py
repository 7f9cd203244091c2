"""The typed schema of every config group; defaults live here and nowhere else.

The YAML files in `conf/` only select and override. Values are checked in `__post_init__`, so a bad one is
refused before anything is loaded or written.
"""

from distillspec.config.bench import BenchCommand, BenchConfig
from distillspec.config.commands import (
    COMMANDS,
    EvalCommand,
    ExportCommand,
    GenerateCommand,
    InitDraftCommand,
    ReportCommand,
    ServeCommand,
    SimulateCommand,
    TrainCommand,
)
from distillspec.config.data import DataConfig
from distillspec.config.engine import EngineConfig
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
from distillspec.config.profile import ProfileCommand, ProfileConfig
from distillspec.config.serving import ServerConfig
from distillspec.config.simulation import HardwareConfig, ModelFigures, WorkloadConfig
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
    "ProfileCommand",
    "ProfileConfig",
    "ReplayCommand",
    "ReplayConfig",
    "ReportCommand",
    "SamplingConfig",
    "ServeCommand",
    "ServerConfig",
    "SimulateCommand",
    "TargetConfig",
    "TrackerConfig",
    "TrainCommand",
    "TrainConfig",
    "VersionsCommand",
    "WorkloadConfig",
]
