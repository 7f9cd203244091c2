"""Training losses: readable references, and one chunked version of them all."""

from distillspec.losses.acceptance_direct import acceptance_rate, lk, lk_hybrid
from distillspec.losses.chunked import ChunkedLoss, chunked_loss
from distillspec.losses.chunks import default_chunk_tokens
from distillspec.losses.divergences import fkl, jsd, rkl, tvd
from distillspec.losses.inputs import LossInputs, PerTokenLoss
from distillspec.losses.mix import LossMix, LossTerm
from distillspec.losses.pairs import BucketedPair, columns_of
from distillspec.losses.registry import LOSS_NAMES, LOSSES, acceptance_of, per_token_loss
from distillspec.losses.sampled import LabelView, advantages, ce, tvdpp
from distillspec.losses.selection import select_tokens
from distillspec.losses.teachers import DenseTeacher, HiddenTeacher, NoTeacher, SignalTeacher, Teacher, TeacherChunk
from distillspec.losses.token_values import TokenValues, chunked_token_values

__all__ = [
    "LOSSES",
    "LOSS_NAMES",
    "BucketedPair",
    "ChunkedLoss",
    "DenseTeacher",
    "HiddenTeacher",
    "LabelView",
    "LossInputs",
    "LossMix",
    "LossTerm",
    "NoTeacher",
    "PerTokenLoss",
    "SignalTeacher",
    "Teacher",
    "TeacherChunk",
    "TokenValues",
    "acceptance_of",
    "acceptance_rate",
    "advantages",
    "ce",
    "chunked_loss",
    "chunked_token_values",
    "columns_of",
    "default_chunk_tokens",
    "fkl",
    "jsd",
    "lk",
    "lk_hybrid",
    "per_token_loss",
    "rkl",
    "select_tokens",
    "tvd",
    "tvdpp",
]
