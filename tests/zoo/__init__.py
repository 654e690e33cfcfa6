"""The networks that tracing and pruning are tested on.

Each is as small and as quick as its architecture permits: it is the ways the layers are coupled that matter, not
what they compute. Three collections are real code that was never written with pruning in mind; the fourth, ``made``,
holds small networks that each do one thing that a tracer may get wrong. ``UNTRACEABLE`` are those it must refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
from zoo import (
    made_attention,
    made_convolutional,
    made_inputs,
    made_operations,
    made_weights,
    timm_nets,
    transformers_nets,
    untraceable,
    vision,
)
from zoo.entry import Entry, arguments, image, make_entry, noise, randomise_, settle_

__all__ = [
    "LARGE",
    "UNTRACEABLE",
    "ZOO",
    "Entry",
    "arguments",
    "by_name",
    "image",
    "make_entry",
    "noise",
    "parameters",
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
    *made_operations.entries(),
)

UNTRACEABLE: tuple[Entry, ...] = tuple(untraceable.entries())


LARGE = frozenset(
    {
        "timm/beit_base_patch16_224",
        "timm/caformer_s18",
        "timm/cait_xxs24_224",
        "timm/coat_lite_tiny",
        "timm/coat_tiny",
        "timm/coatnet_pico_rw_224",
        "timm/convnextv2_atto",
        "timm/cspdarknet53",
        "timm/cspresnet50",
        "timm/dm_nfnet_f0",
        "timm/edgenext_xx_small",
        "timm/efficientformer_l1",
        "timm/ghostnet_050",
        "timm/hrnet_w18_small",
        "timm/legacy_seresnet18",
        "timm/levit_128s",
        "timm/maxvit_pico_rw_256",
        "timm/mobilevit_xxs",
        "timm/nest_tiny",
        "timm/nf_resnet26",
        "timm/poolformer_s12",
        "timm/pvt_v2_b0",
        "timm/regnetz_005",
        "timm/res2net50_26w_4s",
        "timm/resnest14d",
        "timm/seresnet18",
        "timm/skresnet18",
        "timm/swin_tiny_patch4_window7_224",
        "timm/swinv2_tiny_window8_256",
        "timm/tiny_vit_5m_224",
        "timm/twins_pcpvt_small",
        "timm/twins_svt_small",
        "timm/volo_d1_224",
        "timm/xcit_nano_12_p8_224",
        "torchvision/convnext_tiny",
        "torchvision/efficientnet_b0",
        "torchvision/efficientnet_v2_s",
        "torchvision/googlenet",
        "torchvision/inception_v3",
        "torchvision/maxvit_t",
        "torchvision/mnasnet0_5",
        "torchvision/mobilenet_v3_small",
        "torchvision/regnet_y_400mf",
        "torchvision/resnet18",
        "torchvision/resnext50_32x4d",
        "torchvision/shufflenet_v2_x0_5",
        "torchvision/swin_t",
        "torchvision/swin_v2_t",
        "transformers/bert_masked_lm",
        "transformers/electra",
        "transformers/gemma",
        "transformers/mistral",
        "transformers/mixtral",
        "transformers/qwen2",
        "transformers/qwen2_moe",
        "transformers/qwen3",
        "transformers/roberta",
        "transformers/t5",
        "transformers/t5_gated",
        "transformers/whisper",
    }
)
"""Those that take longest to trace, prune, save and compare; their tests are slow ones."""


def parameters(*names: str) -> list[Any]:
    """Entries to parametrize a test with, all of them by default."""
    chosen = [by_name(name) for name in names] or ZOO
    return [
        pytest.param(entry, id=entry.name, marks=[pytest.mark.slow] if entry.name in LARGE else []) for entry in chosen
    ]


def by_name(name: str) -> Entry:
    return {entry.name: entry for entry in (*ZOO, *UNTRACEABLE)}[name]
