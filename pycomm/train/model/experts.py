"""Routed experts: each token goes to the k experts with the highest scores.

Capacity and balance are counted in each sequence on its own, so the same tokens take the same way
for every batch size and layout. The experts' weights are one tensor each, first dimension the
expert; a rank of an expert-parallel group holds a share of them and tokens travel by all_to_all.

Shapes: N tokens, K experts of a token, E experts, L experts of this rank, C channels, F hidden.
Sources: N. Shazeer et al., "Outrageously large neural networks", 2017; D. Lepikhin et al., "GShard"
(capacity, balance loss), 2020; W. Fedus et al., "Switch transformers", 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from pycomm.train.config import ModelConfig


@dataclass
class Routes:
    """Where tokens go: one row for each (token, expert) pair that is kept, ordered by expert."""

    token: torch.Tensor  # (pairs,) row of the token
    weight: torch.Tensor  # (pairs,) what its expert's answer counts
    per_expert: torch.Tensor  # (E,) pairs of each expert
    dropped: torch.Tensor  # () share of pairs above an expert's capacity


def apply(function: Any, *arguments: Any) -> torch.Tensor:
    """A custom function's value; torch gives it no type."""
    return cast(torch.Tensor, function.apply(*arguments))


class AddLoss(torch.autograd.Function):
    """Passes x on, and adds a loss to whatever loss x ends up in.

    The balance loss of a layer belongs to the whole model's loss; this way it needs no path of its
    own through pipeline stages.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """The scale is what the main loss is multiplied with before backward."""
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The loss's own gradient is its scale."""
        return grads[0], torch.tensor(ctx.scale, dtype=ctx.dtype), None


class SumGradients(torch.autograd.Function):
    """Identity forward, all_reduce backward: in front of weights that are split over a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Nothing moves."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum over the group."""
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOutputs(torch.autograd.Function):
    """all_reduce forward, identity backward: behind weights that are split over a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The sum over the group."""
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Nothing moves."""
        return grads[0], None


class Exchange(torch.autograd.Function):
    """all_to_all of rows with uneven splits; backward is the same with the splits exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send: list[int],
        receive: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Shape: (sum(send), C) to (sum(receive), C)."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Gradients travel back."""
        grad = grads[0].contiguous()
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad, ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


class ScaleGradient(torch.autograd.Function):
    """Identity forward, a factor backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Nothing happens."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient times the factor."""
        return grads[0] * ctx.factor, None


class Experts(nn.Module):
    """A router and the feed-forward layers it chooses from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        e, c, f = config.experts, config.channels, config.num_ffn_channels
        self.config = config
        self.router = nn.Linear(c, e, bias=False)
        self.weights = ExpertWeights(config, e, c, f)
        self.group: dist.ProcessGroup | None = None  # expert parallel
        self.tensor_group: dist.ProcessGroup | None = None
        self.loss_scale = 1.0  # of the main loss of a pass; the trainer sets it
        self.balance = torch.zeros(())  # of the last pass, unweighted
        self.dropped = torch.zeros(())

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, C) to (B, T, C)."""
        b, t, c = x_btc.shape
        routes, balance = self.route(x_btc)
        self.balance, self.dropped = balance.detach(), routes.dropped
        if self.config.aux_loss and torch.is_grad_enabled():
            x_btc = apply(AddLoss, x_btc, balance * self.config.aux_loss, self.loss_scale)
        x = x_btc.reshape(b * t, c)
        if self.tensor_group is not None:
            x = apply(SumGradients, x, self.tensor_group)
        rows = self._travel(x[routes.token], routes.per_expert)
        if self.tensor_group is not None:
            rows = apply(SumOutputs, rows, self.tensor_group)
        weighted = rows * routes.weight.unsqueeze(1).to(rows.dtype)
        out = torch.zeros_like(x, dtype=weighted.dtype).index_add(0, routes.token, weighted)
        return out.view(b, t, c)

    def route(self, x_btc: torch.Tensor) -> tuple[Routes, torch.Tensor]:
        """Chooses experts, drops what is above capacity (later tokens first), and gives the balance
        loss: E x sum over experts of (share of tokens) x (mean probability), mean over sequences;
        1 when everything is even."""
        b, t, _ = x_btc.shape
        e, k = self.config.experts, self.config.experts_per_token
        with torch.autocast("cpu", enabled=False):
            weight = self.router.weight.float()
            probabilities = (x_btc.float() @ weight.t()).softmax(-1)
        scores, chosen = probabilities.topk(k, -1)
        scores = scores / scores.sum(-1, keepdim=True)
        is_chosen = F.one_hot(chosen, e)  # (B, T, K, E)
        # First choices of the whole sequence before second choices, earlier tokens before later.
        in_order = is_chosen.transpose(1, 2).reshape(b, k * t, e)
        place = (in_order.cumsum(1) * in_order).sum(-1).view(b, k, t).transpose(1, 2)
        capacity = max(1, math.ceil(self.config.capacity_factor * t * k / e))
        kept = place <= capacity
        pairs = kept.flatten().nonzero().squeeze(1)
        expert = chosen.flatten()[pairs]
        order = expert.argsort(stable=True)
        pairs = pairs[order]
        share = is_chosen.sum((1, 2)).float() / (t * k)
        balance = e * (share * probabilities.mean(1)).sum(-1).mean()
        routes = Routes(
            token=pairs // k,
            weight=scores.flatten()[pairs],
            per_expert=expert.bincount(minlength=e),
            dropped=1 - kept.float().mean(),
        )
        return routes, balance

    def _travel(self, rows: torch.Tensor, per_expert: torch.Tensor) -> torch.Tensor:
        """Rows ordered by expert, to the experts and back."""
        if self.group is None:
            return cast(torch.Tensor, self.weights(rows, per_expert.tolist()))
        num_ranks = dist.get_world_size(self.group)
        local = len(per_expert) // num_ranks
        theirs = per_expert.clone()
        dist.all_to_all_single(theirs, per_expert, group=self.group)
        send = per_expert.view(num_ranks, local).sum(1).tolist()
        receive = theirs.view(num_ranks, local).sum(1).tolist()
        # The loss is a mean over data ranks. Dense gradients are averaged after backward; those of
        # experts are summed by the exchange itself, so here they are divided.
        arrived = apply(ScaleGradient, apply(Exchange, rows, send, receive, self.group), num_ranks)
        # By (rank, expert) on arrival; by expert for the products.
        expert = torch.arange(local).repeat(num_ranks).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        counts = theirs.view(num_ranks, local).sum(0).tolist()
        answers = apply(ScaleGradient, self.weights(arrived[order], counts), 1 / num_ranks)
        back = torch.empty_like(answers).index_copy(0, order, answers)
        return apply(Exchange, back, receive, send, self.group)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, differentiably."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ExpertWeights(nn.Module):
    """The feed-forward layers of all experts of this rank; no biases."""

    def __init__(self, config: ModelConfig, e: int, c: int, f: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(e, c, f))
        self.gate = nn.Parameter(torch.empty(e, c, f)) if config.activation == "swiglu" else None
        self.down = nn.Parameter(torch.empty(e, f, c))

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Shape: (N, C) ordered by expert, and how many are each expert's, to (N, C)."""
        up, down = local(self.up), local(self.down)
        gate = None if self.gate is None else local(self.gate)
        outputs = []
        for i, x in enumerate(torch.split(rows, counts)):
            if gate is None:
                hidden = F.gelu(x @ up[i], approximate="tanh")
            else:
                hidden = F.silu(x @ gate[i]) * (x @ up[i])
            outputs.append(hidden @ down[i])
        return torch.cat(outputs)
