"""Evaluation of drafts: acceptance, block efficiency, cost, speed-up, and the reference speculative decoder."""

from distillspec.evaluation.acceptance import EvaluationResult, cut_share, evaluate
from distillspec.evaluation.cost import StepCost, measure_costs
from distillspec.evaluation.measured import MeasuredSpeedup, measure_speedup
from distillspec.evaluation.pairs import Pair, compare_pairs
from distillspec.evaluation.plot import plot_comparison
from distillspec.evaluation.reference import ReferenceOutput, plain_generate, speculative_generate
from distillspec.evaluation.speedup import Speedup, predict_speedup
from distillspec.evaluation.states import TargetStates
from distillspec.evaluation.table import comparison_table, comparison_text, cut_line, timing_lines

__all__ = [
    "EvaluationResult",
    "MeasuredSpeedup",
    "Pair",
    "ReferenceOutput",
    "Speedup",
    "StepCost",
    "TargetStates",
    "compare_pairs",
    "comparison_table",
    "comparison_text",
    "cut_line",
    "cut_share",
    "evaluate",
    "measure_costs",
    "measure_speedup",
    "plain_generate",
    "plot_comparison",
    "predict_speedup",
    "speculative_generate",
    "timing_lines",
]
