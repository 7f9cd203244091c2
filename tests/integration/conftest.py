"""The run of one process that launches of several are compared with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from distillspec.sampling import NonFiniteLogits
from distillspec.training import module

from .distributed_runs import ACCUMULATE, BAD_STEP, WORLD, Run, make_run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, with a step of which one micro-batch is bad."""
    run = make_run(tmp_path_factory.mktemp("alone"))
    plain, calls = module.chunked_loss, []

    def chunked_loss(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == (BAD_STEP - 1) * WORLD * ACCUMULATE + 1:
            raise NonFiniteLogits("draft logits: NaN at position 3")
        return plain(*args, **kwargs)

    with mock.patch.object(module, "chunked_loss", chunked_loss):
        run.train_alone()
    assert [step["train/bad_steps"] for step in run.steps()] == [0, 1, 1, 1]
    return run
