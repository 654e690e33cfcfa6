"""Networks of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo.entry import Entry, image, make_entry


def _resnet(block: str, **options: Any) -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), num_classes=10, **options)


def _tv(name: str, **options: Any) -> nn.Module:
    from torchvision import models

    return getattr(models, name)(num_classes=10, **options)


def _vgg11_bn() -> nn.Module:
    from torchvision.models import vgg

    features = vgg.make_layers([16, "M", 24, "M", 32, 32, "M", 48, 48, "M", 512, 512, "M"], batch_norm=True)
    with torch.device("meta"):
        net = vgg.VGG(nn.Identity(), num_classes=10, init_weights=False)
    net.features, net.classifier = features, _narrow(net.classifier)
    return net


def _alexnet() -> nn.Module:
    with torch.device("meta"):
        net = _tv("alexnet")
    net.classifier = _narrow(net.classifier)
    return net.to_empty(device="cpu")


def _narrow(classifier: nn.Sequential, width: int = 40) -> nn.Sequential:
    """The same layers with ``width`` hidden features for 4096, which would be all of the network's size."""
    inner = {4096: width}
    for index, layer in enumerate(classifier):
        if isinstance(layer, nn.Linear):
            sizes = [inner.get(size, size) for size in (layer.in_features, layer.out_features)]
            classifier[index] = nn.Linear(*sizes)
    return classifier


def _mobilenet_v2() -> nn.Module:
    setting = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2], [6, 48, 2, 1]]
    return _tv("MobileNetV2", width_mult=0.5, inverted_residual_setting=setting)


def _efficientnet_b0() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    rows = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 1)]
    setting = [MBConvConfig(*row, width_mult=0.5, depth_mult=1.0) for row in rows]
    return EfficientNet(setting, dropout=0.2, num_classes=10, last_channel=96)


def _efficientnet_v2() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    setting = [
        FusedMBConvConfig(1, 3, 1, 24, 24, 2),
        FusedMBConvConfig(4, 3, 2, 24, 32, 2),
        MBConvConfig(4, 3, 2, 32, 40, 2),
        MBConvConfig(6, 3, 2, 40, 48, 1),
    ]
    return EfficientNet(setting, dropout=0.2, num_classes=10, last_channel=96)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    sizes = [(16, 24, 1), (24, 32, 1), (32, 48, 2), (48, None, 1)]
    return ConvNeXt([CNBlockConfig(*size) for size in sizes], num_classes=10)


def _regnet_y() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(
        BlockParams([1, 2, 2, 1], [16, 32, 48, 64], [8, 8, 8, 8], [1.0] * 4, [2] * 4, 0.25),
        num_classes=10,
        stem_width=16,
    )


def _swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {} if version == 1 else {"downsample_layer": swin.PatchMergingV2}
    block = swin.SwinTransformerBlock if version == 1 else swin.SwinTransformerBlockV2
    return swin.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10, block=block, **parts)


def _vit() -> nn.Module:
    return _tv("VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=96)


def _maxvit() -> nn.Module:
    return _tv(
        "MaxVit",
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
    )


def entries() -> list[Entry]:
    dense = {"growth_rate": 8, "block_config": (2, 3, 2, 2), "num_init_features": 16}
    shuffle = {"stages_repeats": [2, 3, 2], "stages_out_channels": [16, 24, 48, 96, 128]}
    quick = {"aux_logits": False, "init_weights": False}
    rows: list[tuple[str, Callable[[], nn.Module], int]] = [
        ("resnet18", partial(_tv, "resnet18"), 32),
        ("resnet50", partial(_resnet, "Bottleneck", layers=[2, 1, 1, 1], width_per_group=16), 32),
        (
            "resnext50_32x4d",
            partial(_resnet, "Bottleneck", layers=[1, 2, 1, 1], groups=8, width_per_group=4),
            32,
        ),
        ("densenet121", partial(_tv, "DenseNet", **dense), 64),
        ("vgg11_bn", _vgg11_bn, 32),
        ("alexnet", _alexnet, 64),
        ("mobilenet_v2", _mobilenet_v2, 32),
        ("mobilenet_v3_small", partial(_tv, "mobilenet_v3_small", width_mult=0.5), 64),
        ("efficientnet_b0", _efficientnet_b0, 32),
        ("efficientnet_v2_s", _efficientnet_v2, 32),
        ("shufflenet_v2_x0_5", partial(_tv, "ShuffleNetV2", **shuffle), 64),
        ("convnext_tiny", _convnext, 64),
        ("regnet_y_400mf", _regnet_y, 64),
        ("mnasnet0_5", partial(_tv, "mnasnet0_5"), 64),
        ("googlenet", partial(_tv, "googlenet", **quick), 32),
        ("inception_v3", partial(_tv, "inception_v3", **quick), 75),
        ("squeezenet1_1", partial(_tv, "squeezenet1_1"), 64),
        ("swin_t", partial(_swin, 1), 32),
        ("swin_v2_t", partial(_swin, 2), 32),
        ("vit_b_16", _vit, 32),
        ("maxvit_t", _maxvit, 32),
    ]
    return [make_entry(f"torchvision/{name}", build, image(size)) for name, build, size in rows]
