"""Tokens and verdicts from logits, for rows of many requests with parameters of their own.

Greedy and seeded rows *choose*: the target's own token is a function of its logits (and of keyed noise), so a drafted
token is accepted if it is that token. The others draw by rejection sampling, or by a lossy rule that settings name.

A step's verdicts are launched together and read at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from distillspec.native.verdict_kernel import Chances, VerdictKernel
from distillspec.sampling import best_ids
from distillspec.serving.base.transfer import rows_of, to_device, to_host
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.block_verification import verify_blocks
from distillspec.serving.decoding.choices import verify_choices
from distillspec.serving.decoding.drafting import Draws, make_draws
from distillspec.serving.decoding.kernel_verdicts import JudgedTree, usable_kernel, verify_by_kernel
from distillspec.serving.decoding.logits import Columns, Place, needs_transform, transform
from distillspec.serving.decoding.noise import hashed_ids
from distillspec.serving.decoding.row_kinds import by_kind
from distillspec.serving.decoding.row_values import Compute, Values, row_probs, seeded_ids, values_at
from distillspec.serving.decoding.target_initialised import CandidatesRule, decided, verify_from_roots
from distillspec.serving.decoding.tree_rules import ChoiceRule, RejectionRule, Rule
from distillspec.serving.decoding.typical import TypicalRule
from distillspec.serving.decoding.verdict import Judgement, TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts, Start, Verify, verify_all_levels, verify_by_level
from distillspec.serving.decoding.windows import KindWindows, StepLogits, VerificationWindow, policies_of


class TokenSampler:
    """Judges windows, and makes drafts' draws. Proposal, acceptance and residual draws have streams of their own.

    Args:
        reads_are_free: reading a number from the device costs nothing. None: true of CPUs alone. Where reads cost time,
            every position of a window is computed, and a step's verdicts are one read.
        verification: `EngineConfig.verification`.
        roots: candidates for the next token, with `target_initialised`.
        kernel: use the C++ kernel where device reads are free and there is a compiler.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        seed: int = 0,
        *,
        reads_are_free: bool | None = None,
        verification: str = "exact",
        roots: int = 1,
        kernel: bool = True,
    ) -> None:
        self.reads_are_free = device.type == "cpu" if reads_are_free is None else reads_are_free
        self.kernel = usable_kernel() if kernel and self.reads_are_free and device.type == "cpu" else None
        self._verify: Verify = verify_by_level if self.reads_are_free else verify_all_levels
        self.verification = verification
        self.roots = roots
        self.columns = Columns(vocab_size)
        self.device = device
        self._hashed = hashed_ids(torch.arange(vocab_size, device=device))
        self._propose, self._accept, self._residual = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))

    def draws(
        self,
        places: Sequence[Place],
        count: int,
        columns: Columns,
        siblings: int = 1,
        *,
        best: bool = False,
        device: torch.device | None = None,
    ) -> Draws:
        """Return what a draft on `columns` chooses the next `count` tokens after `places` by, each with siblings.

        Args:
            best: choose the most probable tokens where others would be drawn.
            device: of the draft, None: the target's.
        """
        drawn = any(not place.sequence.params.is_greedy for place in places)
        shape = (len(places) if drawn else 0, count, siblings)
        uniforms = draw_uniforms(self._propose, shape, device or self.device)
        return make_draws(places, columns, count, uniforms, best=best)

    def proposal_uniforms(self, *shape: int) -> Tensor:
        """Draw float64 in [0, 1) of this shape from the proposals' own stream, on the device."""
        return draw_uniforms(self._propose, shape, self.device)

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        """A judgement of each window.

        `logits [Σ (1 + len(tree)), V]` of any float dtype, window by window, the row after the text first.
        """
        if any(needs_transform(window.sequence) for window in windows):
            logits = _transformed(logits, [place for window in windows for place in window.places()], self.columns)
        step = self._surveyed(windows, logits)
        kernel = self.kernel is not None and step.best is not None
        kinds = by_kind(step.sequences, step.trees, self.verification, kernel)
        launched = [(members, self._verdicts(KindWindows(kind, members, step))) for kind, members in kinds.items()]
        finite, *read = self._read([step.finite, *(pending.numbers for _, pending in launched)])
        verdicts: dict[int, TreeVerdict] = {}
        for (members, pending), numbers in zip(launched, read, strict=True):
            verdicts.update(zip(members, pending.verdicts(numbers), strict=True))
        return _judgements(step, finite, verdicts)

    def _read(self, numbers: Sequence[Tensor]) -> list[list[int]]:
        """Read tensors `[n]` of one dtype from the device: together, where reads cost time."""
        if self.reads_are_free:
            return [part.tolist() for part in numbers]
        read = to_host(torch.cat(list(numbers))).tolist()
        ends = list(accumulate(len(part) for part in numbers))
        return [read[end - len(part) : end] for part, end in zip(numbers, ends, strict=True)]

    def _verdicts(self, windows: KindWindows) -> PendingVerdicts:
        """Launch the verdicts of the rows of one kind."""
        step, members, logits = windows.step, windows.members, windows.step.logits
        if windows.kind == "decided":
            return decided([step.sequences[member] for member in members], logits.device)
        if windows.kind == "greedy":
            ids = best_ids(rows_of(logits, windows.rows)) if step.best is None else rows_of(step.best, windows.rows)
            return verify_choices(windows.trees, ids)
        if windows.kind == "kernel" and self.kernel is not None:
            return self._by_kernel(self.kernel, windows)
        batch = step.batch
        if windows.kind == "block":
            return verify_blocks(batch, members, self._probs(windows), step.accept_uniforms, windows.next_uniforms)
        rule = self._rule(windows)
        if windows.kind == "rooted":
            return verify_from_roots(batch, members, rule, self._verify)
        starts = [Start(step.firsts[member], step.firsts[member]) for member in members]
        return self._verify(batch, starts, rule)

    def _by_kernel(self, kernel: VerdictKernel, windows: KindWindows) -> PendingVerdicts:
        step = windows.step
        trees = []
        for member, tree in zip(windows.members, windows.trees, strict=True):
            params = step.sequences[member].params
            trees.append(JudgedTree(tree, step.firsts[member], params.policy, params.seed is not None))
        seeded = [judged.seeded for judged in trees]
        keys = step.noise_keys() if any(seeded) else torch.empty(0, dtype=torch.int32)
        if all(seeded):  # they leave the streams of the others alone
            accept_uniforms, next_uniforms = torch.zeros(2, step.rows, dtype=torch.float64)
        else:
            accept_uniforms, next_uniforms = step.accept_uniforms, windows.next_uniforms
        chances = Chances(accept_uniforms, next_uniforms, keys)
        paths = self.verification == "exact"
        return verify_by_kernel(kernel, step.logits, step.peaks, trees, chances, paths=paths)

    def _rule(self, windows: KindWindows) -> Rule:
        """Return the rule that accepts the children of the nodes of windows of one kind."""
        step, free = windows.step, self.reads_are_free
        batch, device = step.batch, step.logits.device

        def values(compute: Compute) -> Values:
            return values_at(compute, windows.rows, batch.rows, device, free)

        probs = self._probs(windows)
        if windows.kind == "seeded":
            return ChoiceRule(batch, values(seeded_ids(probs, step.noise_keys(), self._hashed)))
        if windows.kind == "typical":
            return TypicalRule(batch, values(probs), windows.next_uniforms)
        if windows.kind == "drawn":
            return RejectionRule(batch, values(probs), step.accept_uniforms, windows.next_uniforms, free)
        starts = sum([max(1, len(batch.trees[member].roots)) for member in windows.members])
        next_uniforms = draw_uniforms(self._residual, (starts, self.roots), device)
        return CandidatesRule(batch, values(probs), step.accept_uniforms, next_uniforms, free)

    def _probs(self, windows: KindWindows) -> Compute:
        return row_probs(windows.step.logits, policies_of(windows.step.windows), self.reads_are_free)

    def _surveyed(self, windows: Sequence[VerificationWindow], logits: Tensor) -> StepLogits:
        """Find the maxima of all rows, and set rows that define no distribution (NaN, +inf, −inf alone) to zero.

        Where device reads are not free such rows stay, and their verdicts are dropped later.
        """
        peaks, best = self._maxima(logits)
        if self.reads_are_free and all(map(math.isfinite, peaks.tolist())):
            all_finite = torch.ones(len(peaks), dtype=torch.int64)
            return StepLogits(windows, logits, peaks, best, all_finite, self._uniforms_of)
        finite = torch.isfinite(peaks)
        if self.reads_are_free:
            logits, peaks = logits.masked_fill(~finite[:, None], 0.0), peaks.masked_fill(~finite, 0.0)
        return StepLogits(windows, logits, peaks, best, finite.long(), self._uniforms_of)

    def _maxima(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the largest logit of each row, and its id where the kernel takes these logits."""
        kernel = self.kernel
        if kernel is None or logits.dtype not in kernel.survey_rows or logits.stride(-1) != 1:
            return logits.amax(-1), None
        return kernel.survey(logits)

    def _uniforms_of(self, step: StepLogits) -> tuple[Tensor, Tensor]:
        """Return uniforms for the acceptance of each row, and for each window's own token."""
        device = step.logits.device
        accept_uniforms = draw_uniforms(self._accept, (step.rows,), device)
        return accept_uniforms, draw_uniforms(self._residual, (len(step.trees),), device)


def draw_uniforms(stream: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw float64 in [0, 1) from a stream on the host, and bring them to a device."""
    return to_device(torch.rand(shape, generator=stream, dtype=torch.float64), device)


def _judgements(step: StepLogits, finite: Sequence[int], verdicts: Mapping[int, TreeVerdict]) -> list[Judgement]:
    """Return the judgements. Verdicts hold as far as the rows that they depend on are sound.

    Args:
        finite: 1 for each sound row of logits, 0 for others.
        verdicts: of each window, by its place.
    """
    judgements = []
    for i, (first, tree) in enumerate(zip(step.firsts, step.trees, strict=True)):
        rows = finite[first : first + 1 + len(tree)]
        judgements.append(Judgement(_sound_part(verdicts[i], tree, rows), all(rows)))
    return judgements


def _sound_part(verdict: TreeVerdict, tree: TokenTree, rows: Sequence[int]) -> TreeVerdict | None:
    """Return the verdict up to the first accepted node behind which there is no distribution, None for the text itself.

    That node's token is the newest one then, and what follows it is decided in the next step. To start again from the
    text would write it less often than without a draft.
    """
    if not rows[0]:
        return None
    for count, node in enumerate(verdict.path):
        if not rows[1 + node]:
            return TreeVerdict(verdict.path[:count], tree.tokens[node])
    return verdict


def _transformed(logits: Tensor, places: Sequence[Place], columns: Columns) -> Tensor:
    logits = logits.to(torch.float32, copy=True)
    transform(logits, places, columns)
    return logits
