"""Metrics for clients who may not see the names of others' domains and drafts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

NAMES = ("domain", "draft", "source")  # labels. A specialist, one of several drafts, is named after its domain
ALL = "all"  # their value here


class WithoutNames(Collector):
    """The series of a collector, added up over domains, drafts and other sources."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        for family in self._collector.collect():
            if any(name in sample.labels for sample in family.samples for name in NAMES):
                family.samples = _added_up(family.samples)
            yield family


def _added_up(samples: Iterable[Sample]) -> list[Sample]:
    sums: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        if sample.name.endswith("_created"):  # a time, which adds up to nothing
            continue
        labels = {name: ALL if name in NAMES else value for name, value in sample.labels.items()}
        key = sample.name, *labels.values()
        before = sums[key].value if key in sums else 0.0
        sums[key] = Sample(sample.name, labels, before + sample.value)
    return list(sums.values())
