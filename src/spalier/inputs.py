"""What a network is called with: a tensor, or a dict of keyword arguments, such as the tokens of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Inputs = Tensor | dict[str, Tensor]
"""Of a batch, with samples along the first axis of each tensor."""


def call(net: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """What a network returns for a batch.

    >>> call(lambda input_ids, attention_mask: input_ids * attention_mask, {"input_ids": 3, "attention_mask": 1})
    3
    """
    return net(**inputs) if isinstance(inputs, Mapping) else net(inputs)


def each(function: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    """A function of every tensor, in what they came in.

    >>> each(len, {"input_ids": [1, 2], "attention_mask": [1, 1]})
    {'input_ids': 2, 'attention_mask': 2}
    """
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return function(inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors, the one whose first axis counts samples first."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def tokens(count: int, length: int) -> dict[str, Tensor]:
    """Keyword arguments of a language model of the right shapes: so many texts of so many tokens.

    >>> tokens(2, 5)["input_ids"].shape
    torch.Size([2, 5])
    """
    import torch

    # small numbers that are in any vocabulary, not all alike
    ids = torch.arange(count * length).view(count, length) % 7 + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
