"""Parts of a step are timed apart, and a block that raises is timed too."""

from __future__ import annotations

from itertools import count

import pytest

from distillspec.serving.step.timer import StepTimer


def test_each_part_has_the_seconds_of_its_blocks() -> None:
    timer = StepTimer(count(0.0, 1.0).__next__)
    with timer.timing("target"), timer.timing("overlapped"):
        pass
    with pytest.raises(ZeroDivisionError), timer.timing("draft"):
        1 / 0  # noqa: B018
    assert timer.seconds == {"planning": 0.0, "draft": 1.0, "target": 3.0, "readings": 0.0, "overlapped": 1.0}
