"""Policy gradients without replay: the forward pass that samples a trained transition also serves its backward pass.

With one update per rollout, the policy that is trained is the one that samples. Every ratio is then 1, nothing is
clipped, and the gradient of the objective is -sum_i A_i G_i times the clips' share, with
G_i = sum_t w_t grad log p(x_t-1 | x_t) of clip i. A_i is known when all clips are scored. Until then either gradients
wait, taken as soon as a transition is sampled (reweighting), or graphs do, and only those of trained clips go backward
(retaining). `gradient_plan` decides how many of them are stored.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from finetrainers.config.grpo import GRPOSection
from finetrainers.rewards.reward_set import Scores
from finetrainers.utils.failures import ExpectedError, InputError, is_out_of_memory

from ..advantage import Advantages
from ..prompts.prompts import RolloutSample
from .gradient_plan import GradientPlan, split_by_prompt
from .group_gradients import Gradient, GroupClips, GroupGradients, add_to

#: A network's prediction with its graph, and the slope of the clip's log-density by it, or None if the transition is
#: not trained.
Graph = tuple[Tensor, Tensor | None]


class NoMemoryForGradients(ExpectedError, RuntimeError):
    """OOM while a rollout takes gradients."""


@contextmanager
def gradient_advice() -> Iterator[None]:
    """Turn an OOM within the block into an error that lists what needs less memory.

    Raises:
        NoMemoryForGradients: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Without the allocator's message, which handlers would take for an OOM of a training step.
        raise NoMemoryForGradients(
            "a rollout cannot hold the gradients of its steps in memory, although it computes them for one clip at a "
            "time. To save memory, use --gradient_checkpointing; a smaller --rollout_size; --offload_trajectory, "
            "which keeps waiting gradients in host memory; with --rollout_gradients retain, --activation_memory "
            "offload, which does so for activations; a smaller --batch_size or --rank; or --rollout_gradients "
            "replay, which stores none"
        ) from error


@dataclass
class ClipGradient:
    """The gradient of a clip's log-densities.

    Attributes:
        weights: the gradient by the trained weights.
        graphs: graphs of the clip's transitions whose gradient is still to be taken.
        norms: norms of the gradients by the network's prediction, with the noise level of each, for metrics.
        loss: loss at an advantage of -1.
    """

    weights: Gradient = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    loss: float = 0.0


@dataclass(frozen=True)
class LocalGradient:
    """A rollout's gradient on one process and its metrics; the only micro-batch of its step.

    Attributes:
        weights: gradient of the step's loss by each trainable tensor, or None where the loss does not depend on it.
        loss: loss of the clips on this process.
        norms, levels: sums of norms of gradients by predictions, `[N]`, and the noise level of each, `[N]`.
    """

    weights: Sequence[Tensor | None]
    loss: float
    norms: Tensor
    levels: Tensor

    #: Not the size of clips, since no activations are to be planned: blocks have stored theirs in the rollout.
    latent_size: ClassVar[tuple[int, ...]] = (0,)

    def __len__(self) -> int:
        return 1

    def split(self, pieces: int) -> list[LocalGradient]:
        """Return this gradient and `pieces` - 1 micro-batches without gradients."""
        spare = LocalGradient([None] * len(self.weights), 0.0, self.norms[:0], self.levels[:0])
        return [self, *[spare] * (pieces - 1)]


@dataclass(frozen=True)
class ReducedGradient:
    """The gradients of all processes together: each trainable tensor with its gradient, where there is one."""

    weights: Sequence[tuple[nn.Parameter, Tensor]]
    local: LocalGradient

    def as_loss(self) -> Tensor:
        """Return the loss; its backward pass hands the gradients to the weights."""
        value = torch.full((), self.local.loss, device=self.local.norms.device)
        weights, gradients = zip(*self.weights, strict=True)
        return _HandOver.apply(value, gradients, *weights)  # type: ignore[no-any-return]


class _HandOver(torch.autograd.Function):
    """A number whose backward pass hands over stored gradients.

    Its own gradient is 1: losses are scaled for fp16 alone, which is refused.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *weights: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, *ctx.gradients


class RolloutGradients:
    """The gradients of one rollout's clips on this process.

    Attributes:
        steps: steps at which a clip of the coming batch is trained; where processes wait for each other, a clip of any
            of them.
        together: whether processes wait for each other.
    """

    def __init__(
        self,
        plan: GradientPlan,
        section: GRPOSection,
        *,
        jobs: Sequence[RolloutSample],
        parallel: Any,
        compare: Callable[[Scores], tuple[Advantages, Tensor]],
        weights: Mapping[str, float],
        repeats: int,
    ) -> None:
        """Args:
        plan: decides how many gradients or graphs are stored.
        section: the options.
        jobs: this process's clips.
        parallel: the processes of the run.
        compare: returns advantages for the clips of complete prompts, and which of these are trained, `[P, G]`.
        weights: weights of rewards, by label.
        repeats: trained transitions of a clip.
        """
        self.plan, self.parallel, self.repeats = plan, parallel, repeats
        self.steps: Collection[int] = ()
        self.together: bool = parallel.forward_is_collective
        self._compare, self._weights = compare, weights
        self._combined_first = section.reward_combination == "weighted"
        self._storage_device = torch.device("cpu") if section.offload_trajectory else None
        self._next = parallel.data_rank * len(jobs)  # number within the rollout of the clip that is scored next
        clips = range(self._next, self._next + len(jobs))
        self._groups = {group.start // plan.size: group for group in split_by_prompt(clips, plan.size)}
        self._stored = {slot: GroupGradients(plan, len(group)) for slot, group in self._groups.items()}
        self._retained = {slot: GroupClips[list[Graph]](plan, len(group)) for slot, group in self._groups.items()}
        self._queue: deque[Graph] = deque()  # graphs that go backward next
        self._spare: Tensor | None = None  # a prediction to go back through where nothing is queued
        self._first = self._next
        self._sampled: dict[int, ClipGradient] = defaultdict(ClipGradient)  # by clip, until it is scored
        self._scores: list[tuple[int, Scores]] = []
        self._clip_stats: dict[int, ClipGradient] = {}  # by clip, without the gradients by weights
        self._factors: dict[int, float] = {}  # advantages of the clips that are trained
        self._total: dict[int, Gradient] = {}
        self._parameters: list[Tensor] = []
        self._used: list[bool] = []

    # ---- while sampling --------------------------------------------------------------------------------------------

    def take(
        self, transformer: nn.Module, row: int, log: Tensor, prediction: Tensor, *, weight: float, level: Tensor
    ) -> None:
        """Take the gradient of one transition of a clip, or store its graph.

        Args:
            transformer: the (wrapped) network.
            row: index of the clip in its batch.
            log: log-density of the transition, `[1]`, with the graph.
            prediction: the network's prediction, with the graph.
            weight: weight of the transition; 0 where only other processes, which wait for each other in backward, train
                theirs.
            level: noise level, `[1]`.
        """
        if not self._parameters:
            self._parameters = self.parallel.local_parameters(transformer)
        slope = None
        if weight:
            (slope,) = torch.autograd.grad(weight * log.sum(), prediction, retain_graph=True)
        clip = self._sampled[self._next + row]
        if self.plan.retains:
            clip.graphs.append((prediction, slope))
        else:
            gradient = self._backward(prediction, slope)
            if slope is not None and clip.weights:
                torch._foreach_add_(clip.weights, gradient)
            elif slope is not None:
                clip.weights = gradient
        if slope is not None:
            clip.norms.append((slope.flatten(1).norm(dim=1), level))
            clip.loss += weight

    def _backward(self, prediction: Tensor, slope: Tensor | None, *, retain_graph: bool = False) -> Gradient:
        """Return the gradient of the prediction by the trainable tensors that it depends on.

        `retain_graph` is for a graph with a further backward pass.
        """
        slope = torch.zeros_like(prediction) if slope is None else slope
        # Not `backward`: nothing reaches the weights' own gradients, nor what strategies and optimizers do with them.
        gradients = torch.autograd.grad(
            prediction, self._parameters, slope, allow_unused=True, retain_graph=retain_graph
        )
        if not self._used:
            self._used = [gradient is not None for gradient in gradients]
        return [gradient.float() for gradient in gradients if gradient is not None]

    def scored(self, scores: Scores) -> None:
        """Take the scores of the batch that was sampled last.

        Raises:
            ValueError: a clip lacks the score of a reward with a weight, and has not failed.
        """
        counted = [head.raw for name, head in scores.heads.items() if self._weights[name]]
        if any((raw.isnan() & ~scores.failed).any() for raw in counted):
            message = "a reward returned None for a clip, which is supported only with --rollout_gradients replay"
            raise InputError(message, "unsupported")
        self._scores.append((self._next, scores))
        rows = self._advantage_scores(scores)
        for row, failed in enumerate(scores.failed.tolist()):
            number = self._next + row
            clip = self._sampled.pop(number)
            self._store(number, clip, None if failed else rows[row])
            del clip
            group = self._groups[number // self.plan.size]
            if self.plan.early and len(group) == self.plan.size and group.stop == number + 1:
                self._sum_up_early(number // self.plan.size)
        self._next += len(scores.failed)

    def _store(self, number: int, clip: ClipGradient, scores: tuple[float, ...] | None) -> None:
        """Store the gradient or graphs of a clip until its advantage is known, unless the clip has no scores."""
        gradient, graphs = clip.weights, clip.graphs
        clip.weights, clip.graphs = [], []
        if scores is None:
            self._may_go_back(graphs)
            return
        self._clip_stats[number] = clip
        slot = number // self.plan.size
        if self.plan.retains:
            self._retained[slot].add(number, graphs, scores)
            return
        if self._storage_device is not None:
            gradient = [tensor.to(self._storage_device) for tensor in gradient]
        self._stored[slot].add(number, gradient, scores)

    def _advantage_scores(self, scores: Scores) -> list[tuple[float, ...]]:
        """Return for every clip the scores that its advantage increases with."""
        weighted = [
            self._weights[name] * head.normalized.double() for name, head in scores.heads.items() if self._weights[name]
        ]
        columns = [sum(weighted)] if self._combined_first else weighted
        rows = zip(*(column.tolist() for column in columns), strict=True)  # type: ignore[union-attr]
        return [tuple(row) for row in rows]

    def _sum_up_early(self, slot: int) -> None:
        """Sum up the gradients of a prompt whose clips are all scored; its advantages need no other scores."""
        group = self._groups.pop(slot)
        rows = slice(group.start - self._first, group.stop - self._first)
        advantages, trained = self._compare(Scores.in_order(self._scores).rows(rows))
        self._sum_up(slot, group, advantages.terms[0].sum(1) * trained[0])
        with gradient_advice():
            self._go_back(len(self._queue))

    def _sum_up(self, slot: int, group: range, advantages: Tensor) -> None:
        """Add a prompt's gradients to the total, or queue the graphs of its trained clips; drop the others."""
        stored, retained = self._stored.pop(slot), self._retained.pop(slot)
        scored = retained.scores if self.plan.retains else stored.scores
        factors = {clip: a for clip, a in zip(group, advantages.tolist(), strict=True) if a and clip in scored}
        self._factors |= factors
        if not self.plan.retains:
            gradient = stored.pop_combined(factors)
            if gradient is not None:
                add_to(self._total, 0, gradient, 1.0)
            return
        self._may_go_back(next(iter(retained.stored.values()), []))
        for clip, graphs in retained.pop_selected(factors).items():
            self._queue += [
                (prediction, None if slope is None else factors[clip] * slope) for prediction, slope in graphs
            ]

    def _may_go_back(self, graphs: Sequence[Graph]) -> None:
        """Keep a graph to go back through where nothing is queued.

        It shows which weights are used, and other processes may wait for its backward pass.
        """
        if graphs and (self.together or not self._used):
            self._spare = graphs[0][0]

    def _go_back(self, passes: int) -> None:
        """Run `passes` backward passes: through the queue, then again through its last graph.

        Other processes may have longer queues.
        """
        prediction = self._spare
        for number in range(passes):
            slope: Tensor | None = None
            if self._queue:
                prediction, slope = self._queue.popleft()
            assert prediction is not None, "every process has a graph"
            gradient = self._backward(prediction, slope, retain_graph=not self._queue and number + 1 < passes)
            if slope is not None:
                add_to(self._total, 0, gradient, 1.0)
            del gradient
        if passes:
            self._spare = None

    # ---- when all clips of all processes are scored ----------------------------------------------------------------

    def finish(self, advantages: Advantages, trained: Tensor) -> LocalGradient:
        """Return the gradient of this process's part of the loss.

        Args:
            advantages: advantages of all clips of the rollout.
            trained: which of them are trained, `[P, G]`.
        """
        factors = advantages.terms.sum(2) * trained
        for slot, group in list(self._groups.items()):
            start = slot * self.plan.size
            self._sum_up(slot, group, factors[slot, group.start - start : group.stop - start])
        if self.plan.retains and bool(trained.any()):
            passes = len(self._queue) or int(not self._used)
            with gradient_advice():
                self._go_back(max(self.parallel.gather_objects([passes])) if self.together else passes)
        elif not self._used:  # nothing is trained on any process
            self._used = [False] * len(self._parameters)
        device = self.parallel.device
        share = self.parallel.data_size / max(int(trained.sum()), 1) / self.repeats
        total = iter(self._total.get(0) or [torch.zeros(w.shape, device=device) for w in self._trained()])
        weights = [next(total).to(device).mul_(-share) if used else None for used in self._used]
        clips = [(a, self._clip_stats[clip]) for clip, a in self._factors.items()]
        transitions = [(a, norm, level) for a, clip in clips for norm, level in clip.norms]
        return LocalGradient(
            weights=weights,
            loss=-share * sum(a * clip.loss for a, clip in clips),
            norms=torch.cat([share * abs(a) * norm for a, norm, _ in transitions] or [torch.zeros(0, device=device)]),
            levels=torch.cat([level for _, _, level in transitions] or [torch.zeros(0, device=device)]),
        )

    def _trained(self) -> list[Tensor]:
        return [weight for weight, used in zip(self._parameters, self._used, strict=True) if used]
