"""Networks of timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn
from zoo.entry import Entry, image, make_entry


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


def entries() -> list[Entry]:
    """The numbers are the sides of the pictures."""
    rows = [*_timm_convolutional(), *_timm_attentive()]
    return [make_entry(f"timm/{name}", build, image(size)) for name, build, size in rows]


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
    four = {"embed_dims": narrow, "num_heads": (2, 2, 4, 4), "sr_ratios": (4, 2, 2, 1)}
    svt = {**four, "depths": (2, 2, 1, 1), "wss": (4, 4, 4, 2)}
    coat = {"img_size": 64, "embed_dims": (16, 32, 32, 32), "serial_depths": ones, "num_heads": 8}
    nest = {"img_size": 64, "embed_dims": (16, 32, 48), "num_heads": (2, 4, 4), "depths": (1, 1, 2)}
    volo = {"img_size": 64, "embed_dims": (24, 48, 48, 48), "num_heads": (2, 4, 4, 4)}
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
        _named("beit_base_patch16_224", 32, **vit),
        _named("coat_tiny", 64, parallel_depth=1, **coat),
        _named("coat_lite_tiny", 64, **coat),
        ("nest_tiny", partial(_timm_class, "nest", "Nest", **nest), 64),
        _named("swinv2_tiny_window8_256", 64, **swin),
        _named("twins_pcpvt_small", 64, img_size=64, depths=ones, **four),
        _named("twins_svt_small", 64, img_size=64, **svt),
        ("volo_d1_224", partial(_timm_class, "volo", "VOLO", ones, **volo), 64),
    ]


def _caformer() -> nn.Module:
    from timm.models import metaformer

    mixers = [metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention]
    norms = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
    return metaformer.MetaFormer(
        num_classes=10, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), token_mixers=mixers, norm_layers=norms
    )
