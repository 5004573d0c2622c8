"""Every layout trains the model that one process trains: same losses, same gradient norms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from pycomm.train.config import Config, make_config
from pycomm.train.data.source import Sequences, UserData
from pycomm.train.engine import Engine
from pycomm.train.layout.build import wrap_user_module
from pycomm.train.layout.degrees import resolve
from pycomm.train.layout.mesh import make_meshes
from pycomm.train.layout.tensor import local_tensor
from pycomm.train.model.decoder import Decoder
from pycomm.train.model.experts import Experts
from pycomm.train.offload import CHUNK_BYTES, CHUNKS_MAX
from tests.train.runs import (
    ADAM,
    EXPERTS,
    GPT,
    LLAMA,
    LLAMA_EXPERTS,
    SGD,
    TOKENS,
    alone,
    config,
    engine_of,
    in_ranks,
    initialise,
    numbers,
    train,
)

UNCLIPPED = SGD | {"clip": 0.0, "lr": 0.1}
IN_PARTS: dict[str, Any] = {"batch": {"size": 16, "micro": 2}}
# name: ranks, layout, model, other sections
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "data": (2, {}, GPT, {}),
    "data4_accumulation": (4, {}, GPT, IN_PARTS),
    "zero1": (2, {"zero": 1}, GPT, IN_PARTS),
    "zero2": (2, {"zero": 2}, GPT, IN_PARTS),
    "zero3": (4, {"zero": 3}, LLAMA, {}),
    "zero3_accumulation": (2, {"zero": 3}, GPT, IN_PARTS),
    "zero3_adam": (4, {"zero": 3}, GPT, {"optimizer": ADAM}),
    "zero1_in_flight": (2, {"zero": 1, "overlap": "on"}, GPT, IN_PARTS),
    "zero2_in_flight": (2, {"zero": 2, "overlap": "on"}, GPT, {}),
    "zero2_waited_for": (2, {"zero": 2, "overlap": "on"}, GPT, IN_PARTS),
    "zero3_in_flight": (4, {"zero": 3, "overlap": "on"}, LLAMA, {}),
    "zero3_offload": (2, {"zero": 3, "offload": True}, GPT, {"optimizer": UNCLIPPED}),
    "zero3_offload_in_flight": (
        2,
        {"zero": 3, "offload": True, "overlap": "on"},
        LLAMA,
        {"optimizer": UNCLIPPED},
    ),
    "zero2_offload_parts": (
        2,
        {"zero": 2, "offload": True, "overlap": "on"},
        GPT,
        {"optimizer": UNCLIPPED, **IN_PARTS},
    ),
    "zero1_offload_tensor": (
        4,
        {"zero": 1, "offload": True, "tensor": 2},
        GPT,
        {"optimizer": UNCLIPPED},
    ),
    "zero3_offload_clipped": (2, {"zero": 3, "offload": True}, GPT, {}),
    "expert_offload": (
        4,
        {"zero": 3, "expert": 4, "offload": True, "overlap": "on"},
        EXPERTS,
        {"optimizer": UNCLIPPED},
    ),
    "tensor": (2, {"tensor": 2}, GPT, {}),
    "tensor4": (4, {"tensor": 4}, GPT, {}),
    "tensor_llama": (2, {"tensor": 2}, LLAMA, {}),
    "sequence": (2, {"tensor": 2, "sequence_parallel": True}, GPT, {}),
    "sequence_llama": (2, {"tensor": 2, "sequence_parallel": True}, LLAMA, {}),
    "data_tensor": (4, {"tensor": 2}, GPT, IN_PARTS),
    "zero3_tensor": (4, {"tensor": 2, "zero": 3}, GPT, {}),
    "zero2_sequence": (4, {"tensor": 2, "zero": 2, "sequence_parallel": True}, LLAMA, IN_PARTS),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}, GPT, {}),
    "1f1b": (4, {"pipeline": 4, "schedule": "1f1b"}, GPT, {}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved"}, LLAMA, {}),
    "zero_bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}, GPT, {}),
    "zero_bubble_llama": (4, {"pipeline": 4, "schedule": "zero_bubble"}, LLAMA, {}),
    "data_pipeline": (4, {"pipeline": 2}, GPT, {}),
    "zero2_pipeline": (4, {"pipeline": 2, "zero": 2}, GPT, {}),
    "zero3_interleaved": (4, {"pipeline": 2, "zero": 3, "schedule": "interleaved"}, GPT, {}),
    "tensor_pipeline": (4, {"pipeline": 2, "tensor": 2}, GPT, {}),
    "sequence_pipeline": (4, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, LLAMA, {}),
    "data_tensor_pipeline": (8, {"pipeline": 2, "tensor": 2}, GPT, {}),
    "zero3_tensor_pipeline": (8, {"pipeline": 2, "tensor": 2, "zero": 3}, LLAMA, {}),
    "expert": (2, {"expert": 2}, EXPERTS, {}),
    "expert4_llama": (4, {"expert": 4}, LLAMA_EXPERTS, {}),
    "expert_data": (4, {"expert": 2}, EXPERTS, IN_PARTS),
    "expert_zero3": (4, {"expert": 2, "zero": 3}, EXPERTS, {}),
    "expert_tensor": (4, {"expert": 2, "tensor": 2}, EXPERTS, {}),
    "experts_on_tensor": (2, {"tensor": 2}, LLAMA_EXPERTS, {}),
    "expert_pipeline": (4, {"expert": 2, "pipeline": 2}, EXPERTS, {}),
    "expert_data_tensor": (8, {"expert": 2, "tensor": 2, "zero": 2}, EXPERTS, {}),
}


@lru_cache
def alone_numbers(name: str) -> torch.Tensor:
    """Of the model and batch of a layout; layouts with the same ones share it."""
    _, _, model, sections = LAYOUTS[name]
    same = next(k for k, v in LAYOUTS.items() if v[2] == model and v[3] == sections)
    if same != name:
        return alone_numbers(same)
    return numbers(alone(config(model, **sections)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_the_model_of_one_process(name: str) -> None:
    num_ranks, layout, model, sections = LAYOUTS[name]
    settings = config(model, layout=layout, **sections)
    outcome = in_ranks(
        num_ranks, lambda rank, world: train(engine_of(settings, world)), timeout_s=100
    )
    expected = alone_numbers(name)
    assert expected[0, 0] > expected[-1, 0]  # it learns
    for stats in outcome.results.values():
        assert_close(numbers(stats), expected, rtol=1e-5, atol=1e-6)


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison above can fail: a rank's gradients off by a tenth show in the next loss."""
    settings = config(GPT)

    def body(rank: int, world: int) -> Any:
        engine = engine_of(settings, world)
        for _, parameter, _ in engine.named_parameters():
            parameter.register_hook(lambda grad: grad * 1.1)
        return train(engine)

    wrong = numbers(in_ranks(2, body).results[0])
    with pytest.raises(AssertionError):
        assert_close(wrong, alone_numbers("data"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [{}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_sixteen_bits_follow_thirty_two(compute: str, layout: dict[str, Any]) -> None:
    settings = config(GPT, layout=layout, precision={"compute": compute, "initial_scale_power": 10})
    stats = in_ranks(2, lambda rank, world: train(engine_of(settings, world))).results[0]
    assert not any(s.is_skipped for s in stats)
    assert_close(numbers(stats)[:, 0], alone_numbers("data")[:, 0], rtol=0.01, atol=0)


def test_a_gradient_that_overflows_is_skipped_by_all() -> None:
    settings = config(GPT, precision={"compute": "float16", "initial_scale_power": 30})

    def body(rank: int, world: int) -> Any:
        engine = engine_of(settings, world)
        before = [local_tensor(p).clone() for _, p, _ in engine.named_parameters()]
        stats = engine.train_step()
        after = [local_tensor(p) for _, p, _ in engine.named_parameters()]
        is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return stats.is_skipped, is_same, engine.scale.value

    for result in in_ranks(2, body).results.values():
        assert result == (True, True, 2.0**29)


def test_routed_experts_equal_dense_dispatch() -> None:
    """With room for every token, each token's output is the weighted sum of its experts' outputs,
    computed for all experts and all tokens."""
    model = make_config({"model": EXPERTS | {"capacity_factor": 4.0}}).model
    decoder = Decoder(model)
    initialise(decoder, 0)
    experts = next(m for m in decoder.modules() if isinstance(m, Experts)).double()
    x = torch.randn(3, 16, model.channels, dtype=torch.float64, requires_grad=True)
    out = experts(x)
    probabilities = (x.float() @ experts.router.weight.float().t()).softmax(-1)
    scores, chosen = probabilities.topk(model.experts_per_token, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, scores).double()
    w = experts.weights
    each = torch.einsum("btc,ecf->btef", x, w.up)
    each = torch.einsum("btef,efc->btec", F.gelu(each, approximate="tanh"), w.down)
    dense = (each * weights.unsqueeze(-1)).sum(2)
    assert float(experts.dropped) == 0
    assert_close(out, dense, rtol=1e-6, atol=1e-9)
    wanted = [x, w.up, w.down, experts.router.weight]
    upstream = torch.randn_like(out)
    experts.config = experts.config.model_copy(update={"aux_loss": 0.0})
    got = torch.autograd.grad((experts(x) * upstream).sum(), wanted)
    expected = torch.autograd.grad((dense * upstream).sum(), wanted)
    assert_close(got, expected, rtol=1e-4, atol=1e-7)


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    model = make_config({"model": EXPERTS | {"capacity_factor": 1.0}}).model
    experts = Experts(model)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[0] = 1.0  # everyone's first choice
    x = torch.rand(2, 16, model.channels)
    routes, _ = experts.route(x)
    capacity = 16 * model.experts_per_token // model.experts
    assert int(routes.per_expert[0]) == 2 * capacity
    assert int(routes.per_expert.max()) <= 2 * capacity
    assert 0 < float(routes.dropped) < 1
    # Those that came first were kept.
    of_first = routes.token[: 2 * capacity]
    assert of_first.tolist() == [*range(capacity), *range(16, 16 + capacity)]


class Net(nn.Module):
    """Layers, one that every second half of a step does not use, and a buffer."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.extra = nn.ModuleList([nn.Linear(16, 16)])
        self.out = nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(8))
        self.passes, self.half = 0, 2 // world_size  # a step is four passes on one rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        if self.passes // self.half % 2 == 0:
            hidden = hidden + self.extra[0](hidden)
        self.passes += 1
        self.get_buffer("seen").add_(x.detach().mean(0))
        out: torch.Tensor = self.out(hidden)
        return out


def make_net(world_size: int, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Net(world_size)


OWN = [{"zero": z} for z in (0, 1, 2, 3)]
OWN += [{"zero": 3, "overlap": "on"}, {"zero": 2, "offload": True}]
OWN += [{"zero": 3, "offload": True, "overlap": "on"}]


@pytest.mark.parametrize("layout", OWN, ids=str)
def test_a_module_and_a_dataset_of_ones_own(layout: dict[str, Any]) -> None:
    torch.manual_seed(5)
    data = [(torch.randn(8), torch.randn(3)) for _ in range(50)]
    settings = make_config(
        {"layout": layout, "batch": {"size": 12, "micro": 3}, "optimizer": UNCLIPPED}
    )

    def body(rank: int, world: int, own: Config = settings) -> Any:
        layout = resolve(own, world)
        meshes = make_meshes(layout)
        net = make_net(world, 3 + rank)  # rank 0's values count
        part = wrap_user_module(net, own, layout, meshes)
        engine = Engine(own, layout, meshes, UserData(data), parts=[part], loss=F.mse_loss)
        return numbers(train(engine)).tolist()

    one = settings.model_copy(update={"layout": Config().layout})
    expected = in_ranks(1, lambda rank, world: body(rank, world, one)).results[0]
    for result in in_ranks(2, body).results.values():
        assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_sixteen_bit_parameters_of_ones_own(overlap: str) -> None:
    """Their gradients are cast as soon as a reduction returns: they must be there by then."""
    torch.manual_seed(5)
    data = [(torch.randn(8).bfloat16(), torch.randn(3).bfloat16()) for _ in range(50)]

    def body(rank: int, world: int) -> Any:
        values = {"layout": {"zero": 3, "overlap": overlap}, "precision": {"compute": "bfloat16"}}
        own = make_config(values | {"batch": {"size": 12}, "optimizer": SGD})
        layout = resolve(own, world)
        meshes = make_meshes(layout)
        part = wrap_user_module(make_net(2).bfloat16(), own, layout, meshes)
        engine = Engine(own, layout, meshes, UserData(data), parts=[part], loss=F.mse_loss)
        return numbers(train(engine, 3)).tolist()

    norms = torch.tensor(in_ranks(2, body).results[0])[:, 1]
    assert bool((norms < 50).all())


def test_an_offloaded_gradient_that_is_not_finite_ends_the_run_on_all() -> None:
    settings = config(GPT, layout={"zero": 3, "offload": True}, optimizer=UNCLIPPED)

    def body(rank: int, world: int) -> None:
        engine = engine_of(settings, world)
        loss = engine._loss
        engine._loss = lambda y, t: loss(y, t) * (float("inf") if rank else 1)
        with pytest.raises(FloatingPointError, match="not finite"):
            engine.train_step()

    in_ranks(2, body)


def test_held_gradients_are_bounded() -> None:
    model = GPT | {"layers": 6, "channels": 512, "heads": 4}
    settings = config(model, layout={"zero": 3, "offload": True}, optimizer=ADAM | {"clip": 0.0})

    def body(rank: int, world: int) -> tuple[int, int]:
        engine = engine_of(settings, world)
        engine.train_step()
        own = sum(local_tensor(p).numel() * 4 for _, p, _ in engine.named_parameters())
        assert engine._in_backward is not None
        return engine._in_backward.held_bytes_max, own

    held, own = in_ranks(2, body).results[0]
    assert held < 0.8 * own
    assert held <= (CHUNKS_MAX + 2) * CHUNK_BYTES


EVERYWHERE = ["zero3", "sequence", "1f1b", "interleaved", "data_tensor_pipeline", "expert_zero3"]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_validation_and_next_tokens_are_those_of_one_process(name: str) -> None:
    num_ranks, layout, model, _ = LAYOUTS[name]
    source = Sequences([TOKENS], model["context"])

    def body(rank: int, world: int, settings: Config) -> Any:
        engine = engine_of(settings, world)
        logits = engine.next_logits([1, 2, 3])
        return engine.evaluate(source, 64), logits.tolist()

    shared, one = config(model, layout=layout), config(model)
    results = in_ranks(num_ranks, lambda r, w: body(r, w, shared)).results
    expected = in_ranks(1, lambda r, w: body(r, w, one)).results[0]
    for result in results.values():
        assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_tensor_parallel_layer_costs_two_all_reduces_each_way() -> None:
    """Counted in calls of the backend: per layer two forward and two backward."""

    def count(layers: int) -> int:
        settings = config(LLAMA | {"layers": layers}, layout={"tensor": 2}, optimizer=ADAM)

        def body(rank: int, world: int) -> int:
            engine = engine_of(settings, world)
            engine.train_step()
            assert engine.meshes.tensor is not None
            group: Any = engine.meshes.tensor.get_group()
            backend = group._get_backend(torch.device("cpu"))
            before = backend.flight_records()[-1]["op_number"]
            engine.train_step()
            return int(backend.flight_records()[-1]["op_number"] - before)

        return int(in_ranks(2, body).results[0])

    assert count(4) - count(2) == 2 * 4


def test_layouts_that_cannot_be_are_refused() -> None:
    for world, sections, told in (
        (4, {"layout": {"tensor": 3}}, "needs 3 ranks, there are 4"),
        (3, {"layout": {"tensor": 3}}, "tensor 3 does not divide model.kv_heads 4"),
        (2, {"layout": {"expert": 2}}, "needs a model with model.experts"),
        (8, {"layout": {"pipeline": 8}}, "8 stages for 4 layers"),
        (2, {"batch": {"size": 5}}, "batch.size 5 is no multiple of data 2"),
        (2, {"batch": {"size": 8, "micro": 3}}, "no multiple of micro 3 x data 2"),
        (
            2,
            {"batch": {"size": 8, "micro": 2, "accumulation": 3}},
            "size 8 is not micro 2 x accumulation 3 x data 2",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            resolve(config(GPT, **sections), world)


def test_any_two_of_size_micro_and_accumulation_imply_the_third() -> None:
    for batch in (
        {"size": 24, "micro": 3},
        {"size": 24, "accumulation": 4},
        {"micro": 3, "accumulation": 4},
    ):
        layout = resolve(config(GPT, batch=batch), 2)
        assert (layout.micro, layout.passes, layout.batch) == (3, 4, 24)


def test_ranks_of_a_group_hold_equal_parameters() -> None:
    def body(rank: int, world: int) -> None:
        engine = engine_of(config(GPT, layout={"tensor": 2}), world)
        train(engine, 3)
        for name, parameter, _ in engine.named_parameters():
            if "norm" not in name and "embedding" not in name:
                continue
            own = local_tensor(parameter.detach())
            other = own.clone()
            dist.broadcast(other, src=0)
            assert torch.equal(own, other), name

    in_ranks(2, body)
