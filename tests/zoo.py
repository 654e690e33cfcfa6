"""The networks that tracing and pruning are tested on.

Each is as small and as quick as its architecture permits: it is the ways the layers hang together that matter, not
what they compute. Three collections are real code that was never written with pruning in mind; the fourth, ``made``,
holds small networks that each do one thing that a tracer may get wrong. ``UNTRACEABLE`` are those it must refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Entry:
    """A network and what it is called with; both are the same at each call, whatever was drawn before."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]


def by_name(name: str) -> Entry:
    return {entry.name: entry for entry in (*ZOO, *UNTRACEABLE)}[name]


def arguments(example: Any, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that an example stands for, floating ones in ``dtype``."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(example, dict):
        return (), {key: cast(value) for key, value in example.items()}
    values = example if isinstance(example, tuple) else (example,)
    return tuple(cast(value) for value in values), {}


# ---------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomise_(net: nn.Module, gain: float = 1.3) -> nn.Module:
    """Give every parameter and statistic a value that matters.

    Fresh networks are full of ones, zeros and layer scales of 1e-6, under which a channel that was cut wrongly
    changes nothing that a test could see.
    """
    for name, parameter in net.named_parameters():
        _refill_(name.rpartition(".")[2], parameter, gain)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.6, 1.4)
    return net


@torch.no_grad()
def settle_(net: nn.Module, example: Any) -> nn.Module:
    """Give norms and biases values that suit the example, roughly, as training would.

    With any others, signals grow or fade from layer to layer, and rectifiers shut for good. What the forward pass
    left behind, such as LeViT's table of biases, is dropped by the switch between the modes.
    """
    hooks = []
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(module.register_forward_pre_hook(_observe_))
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and module.bias is not None:
            hooks.append(module.register_forward_hook(_centre_))
    args, kwargs = arguments(example)
    net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return net.train().eval()


def _observe_(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """A channel's own mean, and its variance, halfway to that of all: the channels stay unlike each other."""
    channels = inputs[0].transpose(0, 1).flatten(1)
    norm.running_mean.mul_(0.5).add_(channels.mean(1))
    variance = channels.var(1, correction=0)
    norm.running_var.mul_((variance + variance.mean()) / 2)


def _centre_(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A channel's mean becomes the size its bias had: above zero, so that no rectifier stops all of it."""
    axis = output.ndim - 1 if isinstance(layer, nn.Linear) else 1
    shift = layer.bias.abs() - output.transpose(0, axis).flatten(1).mean(1)
    layer.bias.add_(shift)
    return output + shift.view(-1, *[1] * (output.ndim - 1 - axis))


def _refill_(name: str, parameter: torch.Tensor, gain: float) -> None:
    """Weights keep the scale of what passes through them; the rest depends on what it was set to."""
    first = parameter.flatten()[0].item()
    constant = bool((parameter == first).all())
    if parameter.ndim > 1 and "weight" in name:
        parameter.normal_(0, gain / math.sqrt(parameter[0].numel()))
    elif "bias" in name:
        parameter.uniform_(-0.2, 0.4)  # more often above zero: fewer rectifiers that never open
    elif constant and abs(first) > 0.1:  # the scale of a norm, a temperature
        parameter.uniform_(0.7, 1.3).mul_(first)
    elif constant and first != 0:  # a layer scale
        parameter.uniform_(0.3, 0.7)
    else:  # tokens, positions, gates that start shut
        parameter.normal_(0, 0.4)


def _made(build: Callable[[], nn.Module], draw: Callable[[], Any], gain: float = 1.3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return settle_(randomise_(build(), gain).eval(), _drawn(draw))


def _drawn(draw: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return draw()


def _entry(name: str, build: Callable[[], nn.Module], draw: Callable[[], Any], gain: float = 1.3) -> Entry:
    return Entry(name, partial(_made, build, draw, gain), partial(_drawn, draw))


def _noise(*shape: int) -> Callable[[], torch.Tensor]:
    return partial(torch.randn, *shape)


def _image(size: int) -> Callable[[], torch.Tensor]:
    return _noise(2, 3, size, size)


def _ids(*names: str, length: int = 7, vocabulary: int = 50) -> Callable[[], dict[str, torch.Tensor]]:
    """Token numbers under each name; under a name with ``mask``, a mask that hides the end of one sequence."""

    def draw() -> dict[str, torch.Tensor]:
        return {name: _mask(length) if "mask" in name else _tokens(length, vocabulary) for name in names}

    return draw


def _tokens(length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, length))


def _mask(length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return mask


# ---------------------------------------------------------------------------------------------------------------
# torchvision
# ---------------------------------------------------------------------------------------------------------------


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
    return _tv(
        "VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=96
    )


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


def _torchvision() -> list[Entry]:
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
    return [_entry(f"torchvision/{name}", build, _image(size)) for name, build, size in rows]


# ---------------------------------------------------------------------------------------------------------------
# timm
# ---------------------------------------------------------------------------------------------------------------


def _timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10, **options)


def _timm_class(module: str, name: str, *positional: Any, **options: Any) -> nn.Module:
    """For factories that let nothing be overridden."""
    return getattr(import_module(f"timm.models.{module}"), name)(*positional, num_classes=10, **options)


def _mobileone() -> nn.Module:
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    def pair(width: int) -> tuple[ByoBlockCfg, ...]:
        return (
            ByoBlockCfg("one", d=1, c=width, s=2, gs=1, block_kwargs={"num_conv_branches": 2}),
            ByoBlockCfg("one", d=1, c=32, s=1, gs=0, block_kwargs={"kernel_size": 1, "num_conv_branches": 2}),
        )

    return ByobNet(ByoModelCfg((pair(16), pair(32)), stem_type="one", stem_chs=16), num_classes=10)


def _repvgg() -> nn.Module:
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    blocks = tuple(ByoBlockCfg("rep", d=depth, c=width, gs=0) for depth, width in ((2, 16), (2, 24), (1, 32)))
    return ByobNet(ByoModelCfg(blocks, stem_type="rep", stem_chs=16), num_classes=10)


def _mobilevit() -> nn.Module:
    import timm.models.mobilevit  # noqa: F401  (it registers its block)
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    bottle = {"type": "bottle", "d": 1, "gs": 1, "br": 2.0}
    inner = {"kernel_size": 3, "transformer_dim": 32, "transformer_depth": 2, "patch_size": 2}
    attend = ByoBlockCfg("mobilevit", d=1, c=24, s=1, block_kwargs=inner)
    blocks = (ByoBlockCfg(c=16, s=1, **bottle), (ByoBlockCfg(c=24, s=2, **bottle), attend))
    config = ByoModelCfg(blocks, stem_chs=16, stem_pool="", downsample="", act_layer="silu", num_features=48)
    return ByobNet(config, num_classes=10)


def _csp(name: str, depths: tuple[int, ...], widths: tuple[int, ...]) -> nn.Module:
    from timm.models import cspnet

    config = cspnet.model_cfgs[name]
    count, stages = len(depths), {}
    for field in fields(config.stages):
        stages[field.name] = getattr(config.stages, field.name)[:count]
    stages |= {"depth": depths, "out_chs": widths}
    stem = replace(config.stem, out_chs=widths[0] // 2)
    small = replace(config, stem=stem, stages=cspnet.CspStagesCfg(**stages))
    return cspnet.CspNet(small, num_classes=10)


def _hrnet() -> nn.Module:
    from timm.models.hrnet import HighResolutionNet

    def stage(kind: str, *widths: int) -> dict[str, Any]:
        ones = (1,) * len(widths)
        return {
            "num_modules": 1,
            "num_branches": len(widths),
            "block_type": kind,
            "num_blocks": ones,
            "num_channels": widths,
            "fuse_method": "SUM",
        }

    config = {"stem_width": 16, "stage1": stage("BOTTLENECK", 8)}
    config |= {f"stage{count}": stage("BASIC", *(8, 12, 16, 24)[:count]) for count in (2, 3, 4)}
    return HighResolutionNet(config, num_classes=10)


def _timm() -> list[Entry]:
    """The numbers are the sides of the pictures."""
    rows = [*_timm_convolutional(), *_timm_attentive()]
    return [_entry(f"timm/{name}", build, _image(size)) for name, build, size in rows]


_Row = tuple[str, Callable[[], nn.Module], int]


def _named(name: str, size: int, **options: Any) -> _Row:
    return name, partial(_timm_model, name, **options), size


def _timm_convolutional() -> list[_Row]:
    narrow, ones = (16, 24, 32, 48), (1, 1, 1, 1)
    ghost = [[[3, 16, 16, 0, 1]], [[3, 48, 24, 0, 2]], [[5, 72, 40, 0.25, 2], [3, 120, 40, 0, 1]]]
    wide = (64, 64, 128, 128)
    bit = partial(_timm_class, "resnetv2", "ResNetV2", ones, channels=wide, stem_chs=64, stem_type="fixed")
    return [
        _named("nf_resnet26", 64, depths=ones, channels=(32, 48, 64, 96)),
        _named("dm_nfnet_f0", 64, depths=ones, channels=(32, 32, 64, 64), group_size=8),
        ("resnetv2_50x1_bit", partial(bit, bottle_ratio=0.5), 64),
        _named("resnest14d", 64, channels=narrow, stem_width=8),
        _named("seresnet18", 64, channels=narrow),
        _named("skresnet18", 64, channels=(32, 48, 64, 96)),
        _named("legacy_seresnet18", 64, layers=[1, 1, 1, 1]),
        _named("res2net50_26w_4s", 64, layers=ones, base_width=8, channels=narrow),
        _named("convnextv2_atto", 64, depths=(1, 1, 2, 1), dims=narrow),
        _named("regnetz_005", 64, depth=6, w0=16, wa=24.0, wm=2.0, group_size=8),
        _named("edgenext_xx_small", 64, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
        ("cspdarknet53", partial(_csp, "cspdarknet53", (1, 2, 2), (16, 24, 32)), 32),
        ("cspresnet50", partial(_csp, "cspresnet50", (1, 2, 1), (16, 32, 48)), 64),
        ("hrnet_w18_small", _hrnet, 64),
        ("mobileone_s0", _mobileone, 32),
        ("repvgg_a0", _repvgg, 64),
        ("ghostnet_050", partial(_timm_class, "ghostnet", "GhostNet", ghost, width=0.5), 64),
    ]


def _timm_attentive() -> list[_Row]:
    narrow, wide, ones = (16, 24, 32, 48), (32, 32, 64, 64), (1, 1, 1, 1)
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
    mixer = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    levit = {"img_size": 64, "embed_dim": (32, 48), "depth": (1, 1), "num_heads": (2, 3), "key_dim": 8}
    swin = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    tiny = {
        "embed_dims": narrow,
        "depths": (1, 2, 1, 1),
        "num_heads": (2, 2, 2, 4),
        "window_sizes": (4, 4, 4, 2),
    }
    former = partial(_timm_class, "efficientformer", "EfficientFormer", ones, narrow, num_vit=1)
    return [
        ("mixer", partial(_timm_class, "mlp_mixer", "MlpMixer", **mixer), 32),
        _named("deit_tiny_distilled_patch16_224", 32, **vit),
        _named("eva02_tiny_patch14_224", 32, **vit),
        _named("cait_xxs24_224", 32, **vit),
        _named("xcit_nano_12_p8_224", 32, img_size=32, embed_dim=48, depth=2, num_heads=4),
        _named("swin_tiny_patch4_window7_224", 64, **swin),
        _named("coatnet_pico_rw_224", 64, img_size=64, depths=(1, 1, 2, 1), embed_dim=wide),
        _named("maxvit_pico_rw_256", 64, img_size=64, depths=ones, embed_dim=wide),
        ("poolformer_s12", partial(_timm_class, "metaformer", "MetaFormer", depths=ones, dims=narrow), 64),
        ("caformer_s18", _caformer, 64),
        ("efficientformer_l1", former, 224),
        ("levit_128s", partial(_timm_class, "levit", "Levit", **levit), 64),
        ("tiny_vit_5m_224", partial(_timm_class, "tiny_vit", "TinyVit", **tiny), 64),
        _named("pvt_v2_b0", 64, depths=ones, embed_dims=narrow, num_heads=(1, 2, 2, 4)),
        ("mobilevit_xxs", _mobilevit, 32),
    ]


def _caformer() -> nn.Module:
    from timm.models import metaformer

    mixers = [metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention]
    norms = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
    return metaformer.MetaFormer(
        num_classes=10, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), token_mixers=mixers, norm_layers=norms
    )


# ---------------------------------------------------------------------------------------------------------------
# transformers
# ---------------------------------------------------------------------------------------------------------------

_BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "use_cache": False}
_PICTURE = {**_BERT, "image_size": 32, "patch_size": 8}
del _PICTURE["vocab_size"], _PICTURE["max_position_embeddings"]


def _hugging(kind: str, task: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}{task}")(config)


def _clip() -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(
        text_config={**_BERT, "projection_dim": 24, "bos_token_id": 1, "eos_token_id": 49},
        vision_config={**_PICTURE, "projection_dim": 24},
        projection_dim=24,
    )
    return transformers.CLIPModel(config)


def _clip_example() -> dict[str, torch.Tensor]:
    return {
        "input_ids": _tokens(7, 50),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "attention_mask": _mask(7),
    }


def _whisper_example() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 20, 40), "decoder_input_ids": _tokens(5, 50)}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _transformers() -> list[Entry]:
    masked, plain = _ids("input_ids", "attention_mask"), _ids("input_ids")
    pair = _ids("input_ids", "decoder_input_ids")
    distil = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    gpt2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
    gpt2 |= {"bos_token_id": 1, "eos_token_id": 2}
    t5 = {
        "vocab_size": 50,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "use_cache": False,
    }
    gated = {**t5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    speech = {
        "vocab_size": 50,
        "num_mel_bins": 20,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 20,
        "max_target_positions": 16,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("bert", partial(_hugging, "Bert", "ForSequenceClassification", **_BERT), masked),
        ("bert_masked_lm", partial(_hugging, "Bert", "ForMaskedLM", **_BERT), plain),
        ("distilbert", partial(_hugging, "DistilBert", "ForSequenceClassification", **distil), masked),
        ("roberta", partial(_hugging, "Roberta", "ForSequenceClassification", **_BERT), masked),
        (
            "electra",
            partial(_hugging, "Electra", "ForSequenceClassification", embedding_size=16, **_BERT),
            plain,
        ),
        ("albert", partial(_hugging, "Albert", "Model", embedding_size=16, **_BERT), masked),
        ("gpt2", partial(_hugging, "GPT2", "LMHeadModel", **gpt2), plain),
        ("t5", partial(_hugging, "T5", "ForConditionalGeneration", **t5), pair),
        ("t5_gated", partial(_hugging, "T5", "ForConditionalGeneration", **gated), pair),
        ("llama", partial(_hugging, "Llama", "ForCausalLM", **_LLAMA), masked),
        ("mistral", partial(_hugging, "Mistral", "ForCausalLM", sliding_window=4, **_LLAMA), plain),
        ("qwen2", partial(_hugging, "Qwen2", "ForCausalLM", **_LLAMA), plain),
        ("qwen3", partial(_hugging, "Qwen3", "ForCausalLM", head_dim=8, **_LLAMA), plain),
        ("gemma", partial(_hugging, "Gemma", "ForCausalLM", head_dim=8, **_LLAMA), masked),
        ("vit", partial(_hugging, "ViT", "ForImageClassification", **_PICTURE), _pixels),
        ("clip", _clip, _clip_example),
        ("whisper", partial(_hugging, "Whisper", "ForConditionalGeneration", **speech), _whisper_example),
    ]
    return [_entry(f"transformers/{name}", build, draw) for name, build, draw in rows]


# ---------------------------------------------------------------------------------------------------------------
# made: convolutional
# ---------------------------------------------------------------------------------------------------------------


def _conv(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class _Head(nn.Sequential):
    """Average over the positions and classify."""

    def __init__(self, inputs: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 5))


class UNet(nn.Module):
    """What went down is concatenated to what comes up, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _conv(3, 8), _conv(8, 12), _conv(12, 16)
        self.up2, self.join2 = nn.ConvTranspose2d(16, 12, 2, stride=2), _conv(24, 12)
        self.up1, self.join1 = nn.ConvTranspose2d(12, 8, 2, stride=2), _conv(16, 8)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        up = self.up2(self.bottom(F.max_pool2d(two, 2)))
        up = self.up1(self.join2(torch.cat([two, up], dim=1)))
        return self.last(self.join1(torch.cat((up, one), dim=-3)))


class SharedModule(nn.Module):
    """One convolution is called twice, so its inputs and outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = _conv(3, 8), _conv(8, 8), _Head(8)

    def forward(self, x):
        return self.head(self.shared(self.shared(self.stem(x))))


class SharedOnTwoInputs(nn.Module):
    """One convolution reads two others, whose channels are thereby the same; the halves are then compared."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared, self.head = _conv(3, 8), _conv(3, 8), _conv(8, 12), _Head(24)

    def forward(self, x):
        return self.head(torch.cat([self.shared(self.left(x)), self.shared(self.right(x))], 1))


class InPlace(nn.Module):
    """Additions and activations that write into what they read, also through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.three, self.act, self.head = nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), _Head(8)

    def forward(self, x):
        x = self.one(x).relu_()
        y = self.two(x)
        y += x
        y.flatten(2).mul_(0.5)
        self.act(y)
        return self.head(self.three(y).add_(y, alpha=2))


class ConstantView(nn.Module):
    """The number of channels is written into the code: a smaller network would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = _conv(3, 8), nn.Linear(8 * 64, 5)

    def forward(self, x):
        return self.linear(self.conv(x).view(-1, 8 * 8 * 8))


class ConstantGroups(nn.Module):
    """Channels are summed in groups of a number that is written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = _conv(3, 12), _Head(4)

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.reshape(x.shape[0], 4, 3, *x.shape[2:]).sum(2))


class SingleChannel(nn.Module):
    """A map of one channel is broadcast over many: there is nothing to cut in it, nor does it tie the many."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.conv, self.head = _conv(3, 8), nn.Conv2d(8, 1, 1), _conv(8, 12), _Head(12)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.conv(x * torch.sigmoid(self.gate(x))))


class UsedTwice(nn.Module):
    """One output is read by two layers, once more by a sum, and returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = _conv(3, 8), _conv(8, 6), _conv(8, 8), _Head(14)

    def forward(self, x):
        x = self.stem(x)
        both = torch.cat([self.left(x), self.right(x) + x], 1)
        return {"classes": self.head(both), "features": x.mean((2, 3))}


class ChannelShuffle(nn.Module):
    """Channels of two groups are interleaved, by the operator's name and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _conv(3, 12), _conv(12, 12, groups=2), _conv(12, 8, groups=2)
        self.shuffle, self.head = nn.ChannelShuffle(2), _Head(8)

    def forward(self, x):
        x = self.two(self.shuffle(self.one(x)))
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return self.head(self.three(x.view(batch, -1, height, width)))


class SuperResolution(nn.Module):
    """Each channel that leaves the pixel shuffle was four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.shuffle = _conv(3, 8), nn.Conv2d(8, 24, 3, padding=1), nn.PixelShuffle(2)
        self.mix, self.fold, self.last = _conv(6, 4), nn.PixelUnshuffle(2), nn.Conv2d(16, 12, 1)

    def forward(self, x):
        x = self.fold(self.mix(self.shuffle(self.wide(self.stem(x)))))
        return F.pixel_shuffle(self.last(x), 2)


class GatedUnits(nn.Module):
    """Halves of the channels are multiplied: by ``GLU``, by ``chunk``, by ``split`` and by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 12, 1)
        self.three, self.four, self.head = nn.Conv2d(6, 12, 1), nn.Conv2d(6, 12, 1), _Head(6)

    def forward(self, x):
        value, gate = self.two(F.glu(self.one(x), dim=1)).chunk(2, dim=1)
        value, gate = self.three(value * gate.sigmoid()).split(6, dim=1)
        x = self.four(value * F.gelu(gate))
        return self.head(x[:, :6] * torch.tanh(x[:, 6:]))


class Depthwise(nn.Module):
    """Depthwise convolutions, one with two outputs per channel, between pointwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep, self.point = _conv(3, 8), _conv(8, 8, groups=8), nn.Conv2d(8, 6, 1)
        self.twice, self.last, self.head = _conv(6, 12, groups=6), nn.Conv2d(12, 8, 1), _Head(8)

    def forward(self, x):
        return self.head(self.last(self.twice(self.point(self.deep(self.stem(x))))))


class Grouped(nn.Module):
    """A grouped convolution reads an ordinary one, and one with other groups reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.two, self.three = _conv(3, 12), _conv(12, 12, groups=2), _conv(12, 9, groups=3)
        self.head = _Head(9)

    def forward(self, x):
        return self.head(self.three(self.two(self.stem(x))))


class TransposedGrouped(nn.Module):
    """A transposed convolution's weight holds the inputs first, and only a group's outputs second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = _conv(3, 8), nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1, groups=2)
        self.deep, self.head = nn.ConvTranspose2d(12, 12, 3, padding=1, groups=12), _Head(12)

    def forward(self, x):
        return self.head(F.relu(self.deep(F.relu(self.up(self.stem(x))))))


class SqueezeExcite(nn.Module):
    """Channels gate themselves by way of a narrower layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze, self.excite = _conv(3, 12), nn.Linear(12, 4), nn.Linear(4, 12)
        self.last, self.head = _conv(12, 8), _Head(8)

    def forward(self, x):
        x = self.stem(x)
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.head(self.last(x * gate[:, :, None, None]))


class FlattenToLinear(nn.Sequential):
    """Each channel becomes sixteen inputs of the linear layer, and thereafter one."""

    def __init__(self) -> None:
        super().__init__(
            _conv(3, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 5)
        )


class Multiplicities(nn.Module):
    """Features that stand for one, four and sixteen positions each, in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _conv(3, 4), _conv(4, 6), _conv(6, 8)
        self.join, self.head = nn.Linear(4 * 16 + 6 * 4 + 8, 10), nn.Linear(10, 5)

    def forward(self, x):
        one = self.one(x)
        two = self.two(F.avg_pool2d(one, 2))
        three = self.three(two)
        parts = [
            F.adaptive_avg_pool2d(one, 4),
            F.adaptive_max_pool2d(two, 2),
            F.adaptive_avg_pool2d(three, 1),
        ]
        return self.head(F.relu(self.join(torch.cat([part.flatten(1) for part in parts], 1))))


class ChannelIndexing(nn.Module):
    """Every second channel, a range of them, a permutation, and one alone; four are read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.even, self.first, self.head = _conv(3, 12), _conv(6, 8), _conv(4, 8), _Head(17)
        self.register_buffer("order", torch.tensor([7, 0, 3, 1, 6, 2, 5, 4]))

    def forward(self, x):
        x = self.stem(x)
        even = self.even(x[:, ::2])[:, self.order]
        return self.head(torch.cat([even, self.first(x[:, 2:6]), x[:, 3].unsqueeze(1)], 1))


class ChannelStatistics(nn.Module):
    """Mean, largest, norm and softmax over the channels, which change when channels leave."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.soft, self.attend, self.head = _conv(3, 8), _conv(8, 8), _conv(3, 1), _Head(8)

    def forward(self, x):
        x = self.stem(x)
        maps = [x.mean(1, keepdim=True), x.amax(1, keepdim=True), x.norm(dim=1, keepdim=True)]
        x = x * self.attend(torch.cat(maps, 1))
        return self.head(F.normalize(self.soft(x).softmax(1), dim=1))


class ChannelMoves(nn.Module):
    """Channels turned round, rolled, repeated, and one spread over many."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.map = _conv(3, 8), _conv(8, 6), _conv(12, 4), _conv(8, 1)
        self.last, self.head = _conv(4, 8), _Head(8)

    def forward(self, x):
        x = self.one(x)
        y = self.two(x.flip(1) + x.roll(3, dims=1)).repeat(1, 2, 1, 1)
        return self.head(self.last(self.three(y) * self.map(x).expand(-1, 4, -1, -1)))


class ChannelOrder(nn.Module):
    """Channels are sorted and summed up: each depends on all that come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.head = _conv(3, 8), _conv(8, 8), _conv(8, 6), _Head(6)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(x).cumsum(1) / 8).sort(dim=1).values))


class ChannelPadding(nn.Module):
    """Shortcuts whose missing channels are zeros, as in the first residual networks for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.head = _conv(3, 8), _conv(8, 16, stride=2), _Head(16)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.wide(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)))


class Dense(nn.Module):
    """Concatenations of concatenations, and one feature twice in the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.last = _conv(3, 4), _conv(4, 5), _conv(9, 6), _conv(24, 7)
        self.head = _Head(7)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.one(x)], 1)
        x = torch.cat([x, self.two(x)], 1)
        return self.head(self.last(torch.cat([x, x[:, 9:], x[:, 6:9]], 1)))


class ManyBranches(nn.Module):
    """Branches are stacked on a new axis and weighed, or left out when they are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branches = _conv(3, 8), nn.ModuleList(_conv(8, 8) for _ in range(3))
        self.weights, self.unused, self.head = nn.Parameter(torch.zeros(3)), _conv(8, 8), _Head(8)

    def forward(self, x):
        x = self.stem(x)
        stack = torch.stack([branch(x) for branch in self.branches], dim=1)
        return self.head((stack * self.weights.softmax(0).view(1, 3, 1, 1, 1)).sum(1))


class FunctionalWeights(nn.Module):
    """Weights without a module of their own, and one that is standardised before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.zeros(8))
        self.second_weight, self.head = nn.Parameter(torch.randn(6, 8, 3, 3)), _Head(6)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.weight, self.bias, padding=1))
        mean = self.second_weight.mean((1, 2, 3), keepdim=True)
        std = self.second_weight.std((1, 2, 3), keepdim=True)
        return self.head(F.conv2d(x, (self.second_weight - mean) / std, stride=2))


class LowRankUpdate(nn.Module):
    """A weight plus the product of two others, as merged on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 10), nn.Linear(10, 5)
        self.a_weight, self.b_weight = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(10, 2))

    def forward(self, x):
        x = F.relu(self.one(x)).mean((2, 3))
        weight = self.two.weight + 0.5 * self.b_weight @ self.a_weight
        return self.head(F.gelu(F.linear(x, weight, self.two.bias)))


class DynamicWeights(nn.Module):
    """Each sample has a mixture of kernels of its own; samples become groups for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = _conv(3, 8), nn.Linear(8, 3), _Head(6)
        self.weight = nn.Parameter(torch.zeros(3, 6, 8, 3, 3))

    def forward(self, x):
        x = self.stem(x)
        batch, channels, height, width = x.shape
        mixture = self.router(x.mean((2, 3))).softmax(-1)
        kernels = (mixture @ self.weight.flatten(1)).view(-1, channels, 3, 3)
        y = F.conv2d(x.view(1, -1, height, width), kernels, padding=1, groups=batch)
        return self.head(y.view(batch, -1, height, width).relu())


class Fourier(nn.Module):
    """Complex numbers: a filter for each channel and frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = _conv(3, 8), _Head(8)
        self.filters = nn.Parameter(torch.zeros(8, 8, 5, 2))

    def forward(self, x):
        spectrum = torch.fft.rfft2(self.stem(x), norm="ortho")
        return self.head(
            torch.fft.irfft2(spectrum * torch.view_as_complex(self.filters), norm="ortho").relu()
        )


class PoolAndUnpool(nn.Module):
    """What is pooled leaves its places behind, for channels elsewhere to be put back to."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.head = _conv(3, 8), _conv(8, 8), _Head(8)

    def forward(self, x):
        x, places = F.max_pool2d(self.down(x), 2, return_indices=True)
        return self.head(F.max_unpool2d(self.inner(x), places, 2))


class SharedNorm(nn.Module):
    """Two convolutions are followed by the same norm, and thereby tied."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.heads = nn.BatchNorm2d(8), nn.ModuleDict({"one": _Head(8), "two": _Head(8)})

    def forward(self, x):
        one, two = self.norm(self.one(x)).relu(), self.norm(self.two(x)).relu()
        return self.heads["one"](one), self.heads["two"](two)


class Parametrised(nn.Module):
    """Weight norm and spectral norm: the weight is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.one, self.two = norms.weight_norm(nn.Conv2d(3, 8, 3)), norms.spectral_norm(nn.Linear(8, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu(self.two(F.relu(self.one(x)).mean((2, 3)))))


class Norms(nn.Module):
    """Every norm over channels in a row; group norms keep groups of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.group = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)
        self.two, self.instance = nn.Conv2d(12, 8, 3), nn.InstanceNorm2d(8, affine=True)
        self.three, self.rms = nn.Conv2d(8, 8, 1), nn.RMSNorm(8)
        self.four, self.whole, self.head = nn.Conv2d(8, 6, 1), nn.GroupNorm(1, 6), _Head(6)

    def forward(self, x):
        x = F.relu(self.group(self.one(x)))
        x = F.relu(self.instance(self.two(x)))
        x = self.rms(self.three(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.whole(self.four(x)).tanh())


class BareNorms(nn.Module):
    """Norms without parameters, prelu with a slope for each channel, local response norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)
        self.slope, self.two = nn.PReLU(8), nn.Conv2d(8, 6, 3)
        self.instance, self.local, self.head = nn.InstanceNorm2d(6), nn.LocalResponseNorm(3), _Head(6)

    def forward(self, x):
        x = self.instance(self.two(self.slope(self.norm(self.one(x)))))
        return self.head(self.local(F.layer_norm(x, x.shape[2:]).abs()))


class OneDimensional(nn.Module):
    """Waveforms: dilated causal convolutions with gates, skips that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(2, 8, 1), nn.Linear(6, 5)
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 6, 1) for _ in range(3))
        self.norm, self.back = nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 8, 3, padding=1)

    def forward(self, x):
        x, total = self.back(self.norm(self.stem(x))), 0
        for i, (filter_, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            value, gate = filter_(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
            total = total + skip(x)
        return self.head(total.relu().mean(-1))


class ThreeDimensional(nn.Sequential):
    """Volumes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(2, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(8, 12, 3, padding=1, groups=4),
            nn.InstanceNorm3d(12, affine=True),
            nn.ELU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )


class Resized(nn.Module):
    """A feature pyramid: maps of several sizes are resized and added, padded and cropped."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _conv(3, 8), _conv(8, 12, stride=2), _conv(12, 16, stride=2)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 10, 1) for width in (8, 12, 16))
        self.smooth = nn.Conv2d(10, 6, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        one = self.one(x)
        two = self.two(one)
        three = self.lateral[2](self.three(two))
        two = self.lateral[1](two) + F.interpolate(three, scale_factor=2.0, mode="nearest")
        one = self.lateral[0](one) + F.interpolate(two, size=one.shape[-2:], mode="bilinear")
        return [self.smooth(F.pad(level, (1, 1, 1, 1))[..., 1:-1, 1:-1]) for level in (one, two, three)]


class Unfolded(nn.Module):
    """Patches by ``unfold``: each channel becomes nine."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = _conv(3, 4), nn.Linear(36, 10), nn.Linear(10, 5)

    def forward(self, x):
        patches = F.unfold(self.stem(x), 3, padding=1)
        return self.head(self.mix(patches.transpose(1, 2)).relu().mean(1))


class TwoInputs(nn.Module):
    """Two inputs, two outputs, and a condition that scales and shifts channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = _conv(3, 8), _conv(8, 6), _Head(6)
        self.condition, self.side = (
            nn.Sequential(nn.Linear(4, 10), nn.SiLU(), nn.Linear(10, 16)),
            nn.Linear(16, 2),
        )

    def forward(self, x, label):
        film = self.condition(label)
        scale, shift = film[:, :, None, None].chunk(2, 1)
        return self.head(self.last(torch.addcmul(shift, self.stem(x), 1 + scale))), self.side(film)


class RawInputAdded(nn.Module):
    """The input and the output are tied to inner channels, which therefore cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = _conv(3, 8), nn.Conv2d(8, 3, 1)
        self.second, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = self.second(x + self.last(self.inner(x)))
        return x + self.out(x)


# ---------------------------------------------------------------------------------------------------------------
# made: sequences and attention
# ---------------------------------------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """``nn.MultiheadAttention`` between norms and a feed-forward pair; the sequence first or second."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.head(x + self.down(F.gelu(self.up(x))))


class CrossAttention(nn.Module):
    """Keys and values of other widths than the queries, with weights that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 16), nn.Linear(5, 10), nn.Linear(5, 14)
        self.attention = nn.MultiheadAttention(16, 2, kdim=10, vdim=14, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x, memory):
        attended, weights = self.attention(self.query(x), self.key(memory), self.value(memory))
        return self.head(attended), weights


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, whose layers have a fast path with an operator of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


class EncoderDecoder(nn.Module):
    """``nn.Transformer``, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Linear(6, 16), nn.Embedding(20, 16), nn.Linear(16, 20)
        self.body = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
        self.body.encoder.enable_nested_tensor = False

    def forward(self, x, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.body(self.source(x), self.target(ids), tgt_mask=mask, tgt_is_causal=True))


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a head on the mean of its states."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(20, 8), kind(8, 10, batch_first=True, **options)
        self.head = nn.Linear(20 if options.get("bidirectional") else 10, 5)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0].mean(1))


class CellLoop(nn.Module):
    """A recurrence that is spelled out: the same cell at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(6, 8), nn.GRUCell(8, 10), nn.Linear(10, 5)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 10)
        for step in self.embed(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class TiedLanguageModel(nn.Module):
    """The embedding's weight is the head's as well: its columns are tied to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(F.relu(self.up(x)))))


class TiedLayers(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 8)
        self.bias_two, self.bias_one = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        code = torch.tanh(self.two(torch.tanh(self.one(x))))
        back = torch.tanh(F.linear(code, self.two.weight.t(), self.bias_two))
        return torch.addmm(self.bias_one, back, self.one.weight)


class HandmadeVit(nn.Module):
    """Class token, positions, layer scales, and queries, keys and values from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
        self.norm1, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale1, self.scale2 = (
            nn.Parameter(torch.full((16,), 1e-5)),
            nn.Parameter(torch.full((16,), 1e-5)),
        )
        self.head = nn.Linear(16, 5)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (width // 4) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.scale1 * self.attend(self.norm1(x))
        x = x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


class EinsumAttention(nn.Module):
    """Heads and widths are axes of the weights, contracted by ``einsum``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.query_weight = nn.Parameter(torch.randn(12, 3, 4))
        self.key_weight = nn.Parameter(torch.randn(12, 3, 4))
        self.value_weight = nn.Parameter(torch.randn(12, 3, 5))
        self.out_weight, self.head = nn.Parameter(torch.randn(3, 5, 12)), nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x)
        q = torch.einsum("bld,dhk->bhlk", x, self.query_weight)
        k = torch.einsum("bld,dhk->bhlk", x, self.key_weight)
        v = torch.einsum("bld,dhk->bhlk", x, self.value_weight)
        weights = torch.einsum("bhlk,bhmk->bhlm", q, k).div(2).softmax(-1)
        return self.head(x + torch.einsum("bhlm,bhmk,hkd->bld", weights, v, self.out_weight))


class GroupedQueries(nn.Module):
    """Two query heads share each pair of key and value heads, with positions that rotate halves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 5)

    def heads(self, x):
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def rotate(self, x):
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class ChannelAttention(nn.Module):
    """Attention between channels, by ``bmm``, and a token that weighs the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.query, self.value, self.head = (
            _conv(3, 8),
            nn.Conv2d(8, 6, 1),
            nn.Conv2d(8, 6, 1),
            _Head(6),
        )

    def forward(self, x):
        x = self.stem(x)
        q, v = self.query(x).flatten(2), self.value(x).flatten(2)
        mixed = torch.bmm(F.softmax(torch.bmm(q, v.mT), dim=-1), v)
        return self.head(mixed.view(*mixed.shape[:2], *x.shape[2:]))


class BilinearLayer(nn.Module):
    """``nn.Bilinear`` has two inputs in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.pair = nn.Linear(6, 8), nn.Linear(6, 7), nn.Bilinear(8, 7, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.head(F.relu(self.pair(F.relu(self.left(x)), F.relu(self.right(x)))))


class OuterProduct(nn.Module):
    """Each pair of features is one input of the next layer, and their inner product another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 5)
        self.join, self.head = nn.Linear(20, 8), nn.Linear(9, 5)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        pairs = F.relu(self.join((left[:, :, None] * right[:, None, :]).flatten(1)))
        return self.head(torch.cat([pairs, (left * left).sum(-1, keepdim=True)], -1))


class TokenMixing(nn.Module):
    """Positions and channels change places between layers, so that a linear layer mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)
        self.mix, self.unmix = nn.Linear(4, 10), nn.Linear(10, 4)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.unmix(F.gelu(self.mix(self.norm(x).transpose(1, 2)))).mT
        return self.head(x.mean(1))


class Experts(nn.Module):
    """Each token's experts are all computed and weighed by the largest two of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 10), nn.SiLU(), nn.Linear(10, 8)) for _ in range(3)
        )

    def forward(self, x):
        x = self.embed(x)
        best, which = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros_like(self.router(x)).scatter(-1, which, best)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head(x + (outputs * weights.unsqueeze(-2)).sum(-1))


class BareParameters(nn.Module):
    """Matrices without a layer, on the right and on the left, and one that is both."""

    def __init__(self) -> None:
        super().__init__()
        self.one_weight, self.two_weight = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(10, 8))
        self.both_weight, self.bias, self.head = (
            nn.Parameter(torch.zeros(10, 10)),
            nn.Parameter(torch.zeros(8)),
            nn.Linear(10, 5),
        )

    def forward(self, x):
        x = torch.relu(x @ self.one_weight + self.bias)
        x = (self.two_weight @ x.t()).t()
        return self.head(torch.tanh(x @ (self.both_weight + self.both_weight.t())))


class Bag(nn.Module):
    """Sums of embeddings, and embeddings of two tables side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.one, self.two = (
            nn.EmbeddingBag(20, 8, mode="sum"),
            nn.Embedding(20, 4),
            nn.Embedding(20, 4),
        )
        self.up, self.head = nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, ids):
        both = torch.cat([self.one(ids[:, 0]), self.two(ids[:, 1])], -1)
        return self.head(self.up(self.bag(ids) + both).relu())


class DataDependentSize(nn.Module):
    """How many rows there are is known only when it runs; export gives that number a name and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x):
        x = self.one(x).relu()
        return self.head(self.two(x[x.sum(-1) > 1]).relu())


class MultilayerPerceptron(nn.Sequential):
    """Dropouts, norms and activations that leave channels where they are."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.LeakyReLU(0.1),
            nn.Dropout(0.5),
            nn.Linear(12, 10),
            nn.LayerNorm(10),
            nn.Hardswish(),
            nn.Linear(10, 8, bias=False),
            nn.Softplus(),
            nn.Linear(8, 5),
        )


# ---------------------------------------------------------------------------------------------------------------
# made: what export refuses
# ---------------------------------------------------------------------------------------------------------------


class Selected(nn.Module):
    """How many values there are depends on the values, and so does what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        chosen = x[x > 0]
        chosen = F.pad(chosen, (0, 8 - len(chosen))) if len(chosen) < 8 else chosen[:8]
        return self.two(chosen.view(1, 8))


class Branching(nn.Module):
    """Which layer runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if x.mean().item() > 0 else self.three(x)


class Looping(nn.Module):
    """How often a layer runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.one(x)
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = torch.tanh(self.two(x))
        return x


class ThroughNumpy(nn.Module):
    """A part is computed outside of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        return self.two(torch.tensor(x.detach().numpy().clip(0), dtype=x.dtype))


def _made_convolutional() -> list[Entry]:
    kinds: list[type[nn.Module]] = [
        UNet,
        SharedModule,
        SharedOnTwoInputs,
        InPlace,
        ConstantView,
        ConstantGroups,
        SingleChannel,
        UsedTwice,
        ChannelShuffle,
        SuperResolution,
        GatedUnits,
        Depthwise,
        Grouped,
        TransposedGrouped,
        SqueezeExcite,
        FlattenToLinear,
        Multiplicities,
        ChannelIndexing,
        ChannelStatistics,
        ChannelMoves,
        ChannelOrder,
        ChannelPadding,
        Dense,
        ManyBranches,
        FunctionalWeights,
        LowRankUpdate,
        DynamicWeights,
        Fourier,
        PoolAndUnpool,
        SharedNorm,
        Parametrised,
        Norms,
        BareNorms,
        Resized,
        Unfolded,
        RawInputAdded,
        HandmadeVit,
        ChannelAttention,
    ]
    return [_entry(f"made/{_snake(kind.__name__)}", kind, _image(8)) for kind in kinds]


def _snake(name: str) -> str:
    """``ConstantView`` becomes ``constant_view``."""
    return "".join(
        f"_{c.lower()}" if c.isupper() and i and not name[i - 1].isupper() else c.lower()
        for i, c in enumerate(name)
    )


def _made_sequences() -> list[Entry]:
    sequence, vector, ids = _noise(2, 4, 6), _noise(9, 6), partial(torch.randint, 20, (2, 7))
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("attention_batch_first", partial(AttentionBlock, True), sequence),
        ("attention_sequence_first", partial(AttentionBlock, False, bias=False), sequence),
        ("cross_attention", CrossAttention, lambda: (torch.randn(2, 4, 6), torch.randn(2, 3, 5))),
        ("transformer_encoder", Encoder, sequence),
        ("transformer_encoder_norm_first", partial(Encoder, norm_first=True, activation="gelu"), sequence),
        ("transformer", EncoderDecoder, lambda: (torch.randn(2, 4, 6), torch.randint(20, (2, 7)))),
        ("lstm", partial(Recurrent, nn.LSTM), ids),
        ("lstm_deep", partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True), ids),
        ("gru", partial(Recurrent, nn.GRU), ids),
        ("gru_cell_loop", CellLoop, sequence),
        ("tied_language_model", TiedLanguageModel, ids),
        ("tied_layers", TiedLayers, vector),
        ("einsum_attention", EinsumAttention, sequence),
        ("grouped_queries", GroupedQueries, sequence),
        ("bilinear", BilinearLayer, vector),
        ("outer_product", OuterProduct, vector),
        ("token_mixing", TokenMixing, sequence),
        ("experts", Experts, sequence),
        ("bare_parameters", BareParameters, vector),
        ("bag", Bag, ids),
        ("data_dependent_size", DataDependentSize, vector),
        ("perceptron", MultilayerPerceptron, vector),
        ("conv1d", OneDimensional, _noise(2, 2, 12)),
        ("conv3d", ThreeDimensional, _noise(2, 2, 6, 6, 6)),
        ("two_inputs", TwoInputs, lambda: {"label": torch.randn(2, 4), "x": torch.randn(2, 3, 8, 8)}),
    ]
    return [_entry(f"made/{name}", build, draw) for name, build, draw in rows]


ZOO: tuple[Entry, ...] = (
    *_torchvision(),
    *_timm(),
    *_transformers(),
    *_made_convolutional(),
    *_made_sequences(),
)

UNTRACEABLE: tuple[Entry, ...] = tuple(
    _entry(f"untraceable/{_snake(kind.__name__)}", kind, _noise(3, 6))
    for kind in (Selected, Branching, Looping, ThroughNumpy)
)
