"""Simulation of the engine on an event clock: real scheduler, controllers and slots, costs in place of models."""

from distillspec.serving.simulation.by_name import hardware_figures, load_hardware, load_workload
from distillspec.serving.simulation.clock import Simulation, SimulationResult
from distillspec.serving.simulation.hardware import Hardware, derive_hardware
from distillspec.serving.simulation.policies import POLICY_NAMES, Policy, make_policy
from distillspec.serving.simulation.workload import SimulatedRequest, make_workload, read_trace

__all__ = [
    "POLICY_NAMES",
    "Hardware",
    "Policy",
    "SimulatedRequest",
    "Simulation",
    "SimulationResult",
    "derive_hardware",
    "hardware_figures",
    "load_hardware",
    "load_workload",
    "make_policy",
    "make_workload",
    "read_trace",
]
