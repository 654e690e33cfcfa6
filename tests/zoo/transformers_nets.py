"""Networks of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo.entry import Entry, make_entry

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


def _hugging(kind: str, task: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}{task}")(config)


def _experts(kind: str, **options: Any) -> nn.Module:
    """The default, grouped products, does not run in float64."""
    net: Any = _hugging(kind, "ForCausalLM", num_experts_per_tok=2, **_LLAMA, **options)
    net.set_experts_implementation("batched_mm")
    return net


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


def entries() -> list[Entry]:
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
    qwen = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
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
        ("mixtral", partial(_experts, "Mixtral", num_local_experts=4), plain),
        ("qwen2_moe", partial(_experts, "Qwen2Moe", **qwen), plain),
        ("vit", partial(_hugging, "ViT", "ForImageClassification", **_PICTURE), _pixels),
        ("clip", _clip, _clip_example),
        ("whisper", partial(_hugging, "Whisper", "ForConditionalGeneration", **speech), _whisper_example),
    ]
    return [make_entry(f"transformers/{name}", build, draw) for name, build, draw in rows]
