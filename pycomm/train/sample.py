"""Text from a trained model."""

from __future__ import annotations

import torch

from pycomm.train.engine import Engine


def generate(
    engine: Engine, prompt: list[int], num_tokens: int, temperature: float = 0.8
) -> list[int]:
    """Continues a prompt; collective, and the same on every rank.

    The window slides when the context is full. Each token costs a forward pass of the whole
    context: a look at what was learnt, not a server.
    """
    context = engine.config.model.context
    generator = torch.Generator().manual_seed(engine.config.run.seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = tokens[-context:]
        logits = engine.next_logits(window)
        probabilities = (logits / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
