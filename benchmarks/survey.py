"""The networks that the survey of docs/structure.md goes through beside those of the test zoo, made small.

Nothing was developed on most of them. They are given options of their own libraries: few layers, few channels, small
pictures. What has no such options is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

zoo: Any = import_module("zoo")  # of the tests, whose types nobody checks
image, noise = zoo.image, zoo.noise

FAMILIES = {
    "torchvision, convolutional": "alexnet convnext deeplab densenet efficientnet fcn googlenet inception lraspp mc3 "
    "mnasnet mobilenet r2plus1d r3d regnet resnet resnext s3d shufflenet squeezenet vgg wide",
    "torchvision, attention": "maxvit mvit swin vit",
    "timm, convolutional": "",
    "timm, attention and mixers": "beit botnet bat caformer cait coat convit crossvit davit deit edgenext eca_bot "
    "efficientformer efficientvit eva fastvit flexi focal gc gmlp halo hiera lambda levit maxvit mixer mobilevit mvit "
    "nest next pit poolformer pvt repvit resmlp samvit sequencer swift swin tiny_vit tnt twins vis vit volo xcit",
    "transformers, text": "",
    "transformers, pictures and sound": "audio beit blip clip convnext cvt data2vec dinov2 deit hubert levit mobilevit "
    "poolformer pvt regnet resnet segformer siglip swin vit wav2vec2 whisper mobilenet",
    "other": "",
}
"""Each family, and how the names of its networks begin; the rest of a library is in the family without beginnings."""


def family(name: str) -> str:
    """The family of a network.

    >>> family("timm/vit_tiny"), family("timm/resnet18d")
    ('timm, attention and mixers', 'timm, convolutional')
    """
    library, _, own = name.partition("/")
    families = [each for each in FAMILIES if each.startswith(library)] or ["other"]
    chosen = [each for each in families if any(own.startswith(start) for start in FAMILIES[each].split())]
    return next(iter(chosen or [each for each in families if not FAMILIES[each]]))


def entries() -> Iterator[Any]:
    """All of them, by library."""
    for name, build, draw in (*_torchvision(), *_timm(), *_transformers()):
        yield zoo.make_entry(name, build, draw)


Row = tuple[str, Callable[[], nn.Module], Callable[[], Any]]


# torchvision


def _tv(path: str, name: str, **options: Any) -> nn.Module:
    net: nn.Module = getattr(import_module(f"torchvision.models{path}"), name)(num_classes=10, **options)
    return net


def _torchvision() -> Iterator[Row]:
    for name in (
        "resnet34",
        "wide_resnet50_2",
        "densenet121",
        "mobilenet_v3_large",
        "shufflenet_v2_x1_0",
        "squeezenet1_0",
        "regnet_x_400mf",
        "efficientnet_b1",
    ):
        yield f"torchvision/{name}_whole", partial(_tv, "", name), image(64)
    clip = noise(1, 3, 8, 32, 32)
    for name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        yield f"torchvision/{name}", partial(_tv, ".video", name), clip
    small: dict[str, Any] = {"patch_size": [2, 4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    swin = partial(_tv, ".video.swin_transformer", "SwinTransformer3d", **small, window_size=[2, 4, 4])
    yield "torchvision/swin3d_t", swin, clip
    yield "torchvision/mvit_v2_s", _mvit, noise(1, 3, 4, 32, 32)
    dense = {"weights": None, "weights_backbone": None}
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield f"torchvision/{name}", partial(_tv, ".segmentation", name, **dense), image(64)


def _mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    def block(heads: int, inputs: int, outputs: int, stride: list[int]) -> MSBlockConfig:
        return MSBlockConfig(heads, inputs, outputs, [3, 3, 3], [3, 3, 3], stride, [1, 2, 2])

    blocks = [block(1, 16, 16, [1, 1, 1]), block(2, 16, 32, [1, 2, 2]), block(2, 32, 32, [1, 1, 1])]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    net: nn.Module = MViT((32, 32), 4, blocks, num_classes=10, **options)
    return net


# timm

_WHOLE = (
    "resnet26t resnet18d gcresnet33ts "
    "lambda_resnet26t halonet26t botnet26t_256 cs3darknet_s darknet17 ese_vovnet19b_dw dla34 "
    "dpn48b selecsls42 fbnetc_100 mobilenetv2_050 mobilenetv3_small_050 "
    "mobilenetv4_conv_small tf_efficientnet_lite0 mixnet_s tinynet_e lcnet_050 rexnet_100 regnetx_002 "
    "ghostnetv2_100 repghostnet_050 hgnetv2_b0 tresnet_m fastvit_t8 "
    "repvit_m0_9 efficientvit_b0 starnet_s1 convnext_atto mobilevitv2_050 mambaout_femto inception_next_atto"
)
_VITS = (
    "vit_tiny_patch16_224 vit_relpos_small_patch16_224 vit_base_patch16_siglip_224 vit_small_patch14_dinov2 "
    "vit_medium_patch16_reg4_gap_256 vit_small_patch16_dinov3 deit3_small_patch16_224 beit_base_patch16_224 "
    "beitv2_base_patch16_224 flexivit_small samvit_base_patch16 convit_tiny"
)


def _timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    net: nn.Module = timm.create_model(name, num_classes=10, **options)
    return net


def _timm() -> Iterator[Row]:
    for name in _WHOLE.split():
        size = 256 if "botnet26t" in name or "halonet" in name else 64
        yield f"timm/{name}", partial(_timm_model, name), noise(1, 3, size, size) if size > 64 else image(size)
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
    for name in _VITS.split():
        yield f"timm/{name}", partial(_timm_model, name, **vit), image(32)
    narrow, ones = (16, 24, 32, 48), (1, 1, 1, 1)
    heads = (2, 2, 4, 4)
    wide: dict[str, dict[str, Any]] = {
        "pit_ti_224": {"img_size": 64, "base_dims": (16, 16, 16), "heads": (1, 2, 2), "depth": (1, 1, 1)},
        "swinv2_tiny_window8_256": {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 24,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
        "swinv2_cr_tiny_224": {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 24,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
        "twins_svt_small": {
            "img_size": 64,
            "embed_dims": (16, 32, 32, 64),
            "depths": ones,
            "num_heads": heads,
            "wss": (4, 4, 2, 2),
        },
        "twins_pcpvt_small": {"img_size": 64, "embed_dims": (16, 32, 32, 64), "depths": ones, "num_heads": heads},
        "coat_lite_tiny": {
            "img_size": 64,
            "embed_dims": [16, 32, 32, 64],
            "serial_depths": [1, 1, 1, 1],
            "num_heads": 8,
        },
        "crossvit_tiny_240": {
            "img_size": 64,
            "img_scale": (1.0, 1.0),
            "patch_size": (8, 16),
            "embed_dim": (32, 48),
            "depth": ((1, 1, 0),),
            "num_heads": (2, 2),
            "mlp_ratio": (2, 2, 1),
        },
        "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 64), "num_heads": heads, "window_size": 2},
        "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)},
        "nextvit_small": {"stem_chs": (16, 16, 16)},
        "swiftformer_xs": {"layers": (1, 1, 1, 1), "embed_dims": narrow},
        "efficientformerv2_s0": {"depths": (1, 1, 1, 2), "embed_dims": narrow},
        "rdnet_tiny": {},
    }
    for name, options in wide.items():
        yield f"timm/{name}", partial(_timm_model, name, **options), image(224 if "formerv2" in name else 64)
    for name, (path, kind, chosen) in _classes().items():
        yield f"timm/{name}", partial(_timm_class, path, kind, chosen), image(64)


def _classes() -> dict[str, tuple[str, str, Callable[[Any], dict[str, Any]]]]:
    """Those whose names let nothing be overridden: their modules, classes, and options by what the module has."""
    ones, heads, dims = (1, 1, 1, 1), (1, 2, 2, 4), (16, 32, 32, 32)
    mixer = {"img_size": 64, "patch_size": 16, "num_blocks": 2, "embed_dim": 32}
    levels = {"embed_dims": (16, 32, 64), "num_heads": (2, 2, 4), "depths": (1, 1, 2), "img_size": 64}
    small = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": 1}
    return {
        "nest_tiny": ("nest", "Nest", lambda m: levels),
        "volo_d1_224": (
            "volo",
            "VOLO",
            lambda m: {"layers": ones, "embed_dims": dims, "num_heads": (2, 2, 2, 2), "img_size": 64},
        ),
        "focalnet_tiny_srf": ("focalnet", "FocalNet", lambda m: {"depths": ones, "embed_dim": 16}),
        "mvitv2_tiny": ("mvitv2", "MultiScaleVit", lambda m: {"cfg": m.MultiScaleVitCfg(**small), "img_size": 64}),
        "gcvit_xxtiny": (
            "gcvit",
            "GlobalContextVit",
            lambda m: {
                "img_size": 64,
                "depths": ones,
                "embed_dim": 16,
                "num_heads": heads,
                "window_size": (2, 2, 2, 2),
            },
        ),
        "gmlp_s16_224": (
            "mlp_mixer",
            "MlpMixer",
            lambda m: {**mixer, "mlp_ratio": 6, "mlp_layer": m.GatedMlp, "block_layer": m.SpatialGatingBlock},
        ),
        "resmlp_12_224": (
            "mlp_mixer",
            "MlpMixer",
            lambda m: {**mixer, "mlp_ratio": 4, "block_layer": m.ResBlock, "norm_layer": m.Affine},
        ),
        "convmixer_768_32": ("convmixer", "ConvMixer", lambda m: {"dim": 32, "depth": 3}),
    }


def _timm_class(path: str, kind: str, options: Callable[[Any], dict[str, Any]]) -> nn.Module:
    module = import_module(f"timm.models.{path}")
    net: nn.Module = getattr(module, kind)(num_classes=10, **options(module))
    return net


# transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "use_cache": False}
_PICTURE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (5, 3),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_SEQ: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
}


def _hugging(kind: str, task: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    net: nn.Module = getattr(transformers, f"{kind}{task}")(config)
    return net


def _transformers() -> Iterator[Row]:
    tokens = partial(_drawn, "input_ids")
    for kind in (
        "XLMRoberta",
        "Camembert",
        "MPNet",
        "RoFormer",
        "ConvBert",
        "LayoutLM",
        "MegatronBert",
        "Ernie",
        "RemBert",
        "DebertaV2",
        "Data2VecText",
        "RobertaPreLayerNorm",
        "Nystromformer",
    ):
        options = _TEXT | ({"embedding_size": 32} if kind in ("RoFormer", "ConvBert") else {})
        options |= {"input_embedding_size": 32, "output_embedding_size": 32} if kind == "RemBert" else {}
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, "ForSequenceClassification", **options), tokens
    mobile = {**_TEXT, "embedding_size": 32, "intra_bottleneck_size": 16, "hidden_size": 32}
    yield "transformers/mobilebert", partial(_hugging, "MobileBert", "ForSequenceClassification", **mobile), tokens
    for kind in (
        "Phi",
        "Phi3",
        "Gemma2",
        "Olmo",
        "Olmo2",
        "StableLm",
        "Cohere",
        "Starcoder2",
        "Granite",
        "SmolLM3",
        "Mixtral",
        "Qwen2Moe",
        "Nemotron",
        "Helium",
        "Glm",
    ):
        task = "ForCausalLM"
        options = _DECODER | ({"head_dim": 8} if kind in ("Gemma2", "Helium", "Glm") else {})
        options |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32} if kind == "Qwen2Moe" else {}
        options |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2} if "M" in kind[4:] else {}
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, task, **options), tokens
    other: dict[str, tuple[str, dict[str, Any]]] = {
        "OPT": ("ForCausalLM", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}),
        "GPTNeoX": ("ForCausalLM", {**_TEXT, "use_cache": False}),
        "GPTJ": (
            "ForCausalLM",
            {
                "vocab_size": 50,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "rotary_dim": 4,
                "use_cache": False,
            },
        ),
        "GPTNeo": (
            "ForCausalLM",
            {
                "vocab_size": 50,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "max_position_embeddings": 64,
                "use_cache": False,
            },
        ),
        "GPTBigCode": (
            "ForCausalLM",
            {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False},
        ),
        "Bloom": ("ForCausalLM", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
        "Falcon": ("ForCausalLM", {**_TEXT, "use_cache": False}),
        "Mpt": (
            "ForCausalLM",
            {
                "vocab_size": 50,
                "d_model": 32,
                "n_layers": 2,
                "n_heads": 4,
                "expansion_ratio": 2,
                "max_seq_len": 64,
                "use_cache": False,
            },
        ),
        "XGLM": (
            "ForCausalLM",
            {
                "vocab_size": 50,
                "d_model": 32,
                "num_layers": 2,
                "attention_heads": 4,
                "ffn_dim": 64,
                "max_position_embeddings": 64,
                "use_cache": False,
            },
        ),
        "XLNet": ("LMHeadModel", {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
        "FNet": ("ForSequenceClassification", {**_TEXT, "tpu_short_seq_length": 7}),
        "SqueezeBert": ("ForSequenceClassification", {**_TEXT, "embedding_size": 32}),
    }
    for kind, (task, options) in other.items():
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, task, **options), tokens
    both = partial(_drawn, "input_ids", "decoder_input_ids")
    for kind in ("Bart", "MBart", "Pegasus", "Marian", "BlenderbotSmall", "M2M100"):
        task = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
        task = "Model" if kind == "M2M100" else task
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, task, **_SEQ), both
    for kind, task in (
        ("DeiT", "ForImageClassification"),
        ("Beit", "ForImageClassification"),
        ("Dinov2", "ForImageClassification"),
        ("Data2VecVision", "ForImageClassification"),
        ("SiglipVision", "Model"),
        ("CLIPVision", "Model"),
        ("ViTMSN", "ForImageClassification"),
    ):
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, task, **_PICTURE), _pixels
    stages = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
    for kind in ("ConvNext", "ConvNextV2", "ResNet", "RegNet"):
        more = {"embedding_size": 16} if kind in ("ResNet", "RegNet") else {}
        more |= {"groups_width": 8} if kind == "RegNet" else {}
        yield (
            f"transformers/{kind.lower()}",
            partial(_hugging, kind, "ForImageClassification", **stages, **more),
            _large,
        )
    swin = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    for kind in ("Swin", "Swinv2"):
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, "ForImageClassification", **swin), _pixels
    pyramid = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [2, 4], "num_encoder_blocks": 2}
    former = {
        **pyramid,
        "decoder_hidden_size": 16,
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    }
    yield "transformers/segformer", partial(_hugging, "Segformer", "ForSemanticSegmentation", **former), _pixels
    pool = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
    yield "transformers/poolformer", partial(_hugging, "PoolFormer", "ForImageClassification", **pool), _large
    for kind, task in (("Wav2Vec2", "ForSequenceClassification"), ("Hubert", "ForSequenceClassification")):
        yield f"transformers/{kind.lower()}", partial(_hugging, kind, task, **_SPEECH), _waves
    sound = {**_PICTURE, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8}
    del sound["image_size"]
    yield "transformers/audio_spectrogram", partial(_hugging, "AST", "ForAudioClassification", **sound), _spectrum


def _drawn(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randint(3, 50, (2, 7)) for name in names}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _large() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def _waves() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 400)}


def _spectrum() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 32, 16)}
