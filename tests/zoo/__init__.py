"""The networks that tracing and pruning are tested on.

Each is as small and as quick as its architecture permits: it is the ways the layers are coupled that matter, not
what they compute. Three collections are real code that was never written with pruning in mind; the fourth, ``made``,
holds small networks that each do one thing that a tracer may get wrong. ``UNTRACEABLE`` are those it must refuse.
"""

from __future__ import annotations

from zoo import (
    made_attention,
    made_convolutional,
    made_inputs,
    made_weights,
    timm_nets,
    transformers_nets,
    untraceable,
    vision,
)
from zoo.entry import Entry, arguments, image, make_entry, noise, randomise_, settle_

__all__ = [
    "UNTRACEABLE",
    "ZOO",
    "Entry",
    "arguments",
    "by_name",
    "image",
    "make_entry",
    "noise",
    "randomise_",
    "settle_",
]

ZOO: tuple[Entry, ...] = (
    *vision.entries(),
    *timm_nets.entries(),
    *transformers_nets.entries(),
    *made_convolutional.entries(),
    *made_weights.entries(),
    *made_attention.entries(),
    *made_inputs.entries(),
)

UNTRACEABLE: tuple[Entry, ...] = tuple(untraceable.entries())


def by_name(name: str) -> Entry:
    return {entry.name: entry for entry in (*ZOO, *UNTRACEABLE)}[name]
