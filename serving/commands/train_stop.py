"""`distill train-stop`: a draft with a small network that predicts which of its tokens are accepted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from distillspec.commands.drafts import find_draft
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import TrainStopCommand
from distillspec.errors import ConfigError
from distillspec.evaluation import TargetStates
from distillspec.evaluation.acceptance import deployed
from distillspec.evaluation.stopping import StopQuality, stop_examples, stop_quality
from distillspec.models import LanguageModel, load_draft, load_target
from distillspec.models.checkpoint import check_target, save_with_stop_head
from distillspec.models.stop_head import StopExamples, StopHead
from distillspec.progress import progress
from distillspec.serving.commands.stop_text import find_text
from distillspec.training.stop_training import train_stop
from distillspec.types import Sample

DEPTHS = 4  # drafted positions that are learnt from


def run(config: TrainStopCommand, folder: Path) -> None:
    """Write `draft/` (the same draft, with the network) and `summary.json`."""
    path = find_draft(str(config.draft.path))
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    check_target(path, target)
    draft = load_draft(path, target)
    _check_kind(draft)
    text = find_text(config.stop, target, draft, path)
    open_run(folder, config)
    head = StopHead(config.stop.reads, _state_size(draft), config.stop.width, draft.width)
    parts = {"learning": text.learning, "judging": text.judging}
    examples = {name: _examples(config, head, draft, target, part, name) for name, part in parts.items()}
    with progress(f"training on {len(examples['learning'])} tokens") as line:
        losses = train_stop(head, examples["learning"], config.stop.epochs, config.stop.learning_rate, config.seed)
        for epoch, loss in enumerate(losses, 1):
            line.update(epoch / config.stop.epochs, f"epoch {epoch}, {loss:.4f} nats a token")
    judged = stop_quality(head.eval(), examples["judging"])
    print(_told(judged, text.taught_draft))
    save_with_stop_head(path, folder / "draft", head)
    print(f"serve it: distill serve draft.path={folder} engine.draft_confidence={judged.mean:.1f}")
    close_run(folder, "train-stop", {"draft": str(folder / "draft"), "from": str(path), "quality": asdict(judged)})


def _check_kind(draft: LanguageModel) -> None:
    if draft.drafts_block or not draft.attends:
        raise ConfigError(
            f"train-stop is for drafts that write token by token, not for kind {draft.kind}"
            + (": train it with draft.confidence=true" if draft.drafts_block else ", which writes all in one pass")
        )


def _state_size(draft: LanguageModel) -> int:
    return int(draft.model.get_output_embeddings().weight.shape[1])


def _examples(
    config: TrainStopCommand,
    head: StopHead,
    draft: LanguageModel,
    target: LanguageModel,
    samples: list[Sample],
    part: str,
) -> StopExamples:
    with progress(f"reading {len(samples)} answers for {part}") as line, deployed(draft, target) as model:
        return stop_examples(
            head,
            model,
            TargetStates(target),
            samples,
            config.sampling.policy,
            DEPTHS,
            lambda done: line.update(done / len(samples), f"{done} of {len(samples)}"),
        )


def _told(judged: StopQuality, taught_draft: bool) -> str:
    known = " (they taught the draft, and of such text more is accepted than of other)" if taught_draft else ""
    return (
        f"On {judged.places} tokens that taught it nothing{known}, acceptance is {judged.mean:.3f} in the mean. "
        f"Mean squared error of the prediction: {judged.error:.4f}; of the draft's best probability "
        f"{judged.by_best:.4f}, of the mean {judged.by_mean:.4f}. Predictions are {judged.calibration:.3f} off in "
        "calibration."
    )
