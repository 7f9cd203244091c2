"""A truncated draft of the tiny target."""

from __future__ import annotations

import pytest
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.vocabulary import choose_kept_ids, count_tokens


@pytest.fixture
def kept_ids(target: LanguageModel) -> Tensor:
    return choose_kept_ids(count_tokens([[100, 100, 101, 5]], target.identity.vocab_size), 40, target.tokenizer)


@pytest.fixture
def truncated(target: LanguageModel, kept_ids: Tensor) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)
