"""LoRAs of PEFT as tasks and back, with the real PEFT on the other side; and folders of strangers."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import spalier as sp
from spalier.errors import ConfigError, SpalierError, WeightsError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
WORDS = torch.arange(24).view(2, 12) % 50


class Mixed(nn.Module):
    """Layers of all kinds that PEFT has a LoRA for, a norm and a head."""

    def __init__(self, classes=3):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.wide = nn.Conv2d(1, 6, 3, padding=1)
        self.strided = nn.Conv2d(6, 5, (3, 1), stride=2, bias=False)
        self.point = nn.Conv2d(5, 7, 1)
        self.norm = nn.BatchNorm2d(7)
        self.inner = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 7))
        self.head = nn.Linear(7, classes)

    def forward(self, x):
        x = self.wide(self.words(x)[:, None]).relu()
        x = self.norm(self.point(self.strided(x).relu()))
        return self.head(self.inner(x.mean((2, 3))))


def bert(labels=3):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=labels, **sizes))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16))


def made(make, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype).eval()


def peft_folder(base, folder, **options):
    """A LoRA as PEFT writes it, with numbers in it, and what its network returns."""
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    net.eval()
    net.save_pretrained(str(folder))
    with torch.no_grad():
        return net(WORDS)


def logits(output):
    return output if isinstance(output, torch.Tensor) else output.logits


LINEAR = ["inner.0", "inner.2"]
CASES = {
    "linear": (Mixed, {"target_modules": LINEAR}),
    "rslora": (Mixed, {"target_modules": LINEAR, "use_rslora": True}),
    "convolutions": (Mixed, {"target_modules": ["wide", "strided", "point"]}),
    "embedding": (Mixed, {"target_modules": ["words", "inner.0"]}),
    "patterns": (
        Mixed,
        {
            "target_modules": [*LINEAR, "wide"],
            "rank_pattern": {"inner.0": 2, r".*wide": 5},
            "alpha_pattern": {"^inner.2": 7, "wide": 1},
        },
    ),
    "head": (Mixed, {"target_modules": LINEAR, "modules_to_save": ["head"]}),
    "head and norm": (Mixed, {"target_modules": LINEAR, "modules_to_save": ["head", "norm"]}),
    "biases": (Mixed, {"target_modules": LINEAR, "bias": "lora_only"}),
    "all biases": (Mixed, {"target_modules": LINEAR, "bias": "all"}),
    "lora_bias": (Mixed, {"target_modules": LINEAR, "lora_bias": True}),
    "regex": (bert, {"target_modules": r".*encoder\.layer\.1\..*\.(query|value)"}),
    "layers": (
        bert,
        {"target_modules": ["query", "dense"], "layers_to_transform": [1], "exclude_modules": ["pooler.dense"]},
    ),
    "bert": (bert, {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_lora_of_peft_is_the_same_network_as_a_task_and_back(case, dtype, tmp_path):
    from peft import PeftModel

    make, options = CASES[case]
    base = made(make, dtype)
    wanted = logits(peft_folder(base, tmp_path / "peft", **options))
    before = snapshot(base)
    task = sp.Task.from_peft(tmp_path / "peft", base, name=case.replace(" ", "-"))
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    with torch.no_grad():
        assert not torch.allclose(logits(base(WORDS)), wanted, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(logits(task.build(base)(WORDS)), wanted, **close)
    assert_unchanged(base, before)
    task.save(tmp_path / "a.task.safetensors")
    sp.Task.load(tmp_path / "a.task.safetensors").to_peft(tmp_path / "back", base)
    again = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "back")).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(again(WORDS)), wanted, **close)


def test_a_task_learned_here_goes_to_peft_and_comes_back(tmp_path):
    from peft import PeftModel

    base = made(Mixed)
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="head", targets=["wide", "strided", "point", "inner"])
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * parameter.requires_grad
        net.norm.running_mean += 0.5
    wanted = net.eval()(WORDS)
    task = sp.Task.of(net, "here")
    task.to_peft(tmp_path / "peft")  # no base needed: neither embeddings nor Conv1D
    there = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "peft")).eval()
    torch.testing.assert_close(there(WORDS), wanted)
    back = sp.Task.from_peft(tmp_path / "peft", base).build(base)
    torch.testing.assert_close(back(WORDS), wanted)


def test_a_head_of_other_classes_and_pruning_further(tmp_path):
    base, other = made(bert), made(lambda: bert(5))
    for name, tensor in base.state_dict().items():
        if not name.startswith("classifier"):
            other.state_dict()[name].copy_(tensor)
    wanted = peft_folder(other, tmp_path, target_modules=["query", "value"], task_type="SEQ_CLS").logits
    example = {"input_ids": WORDS}
    task = sp.Task.from_peft(tmp_path, base, example=example)
    torch.testing.assert_close(task.build(base)(WORDS).logits, wanted, rtol=1e-10, atol=1e-10)
    net = copy.deepcopy(other)  # to prune on, the base needs a head for the task's classes
    task.apply_(net, example=example)
    sp.prune_(net, sp.select(net, sp.score(net, criterion="weight"), channels=0.5))
    small = sp.Task.of(net, "small")
    torch.testing.assert_close(small.build(base)(WORDS).logits, net.eval()(WORDS).logits)
    with pytest.raises(ConfigError, match="pruned"):
        small.to_peft(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_what_peft_cannot_hold_is_refused_by_name(tmp_path):
    base = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPDelta(bits=2), head="2")
    with pytest.raises(ConfigError, match="low rank alone"):
        sp.Task.of(net, "coded").to_peft(tmp_path)
    grouped = made(lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()))
    sp.attach_(grouped, sp.SPLoRA(rank=1))
    with pytest.raises(ConfigError, match="no LoRA for"):
        sp.Task.of(grouped, "grouped").to_peft(tmp_path)
    words = made(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)))
    sp.attach_(words, sp.SPLoRA(rank=1))
    with pytest.raises(ConfigError, match="pass base="):
        sp.Task.of(words, "words").to_peft(tmp_path)


# folders that are not what they should be


@pytest.fixture
def folder(tmp_path):
    base = made(Mixed)
    peft_folder(base, tmp_path, target_modules=LINEAR, modules_to_save=["head"])
    return base, tmp_path


def write(folder, *, config=(), tensors=(), drop=()):
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | dict(config)))
    held = load_file(folder / "adapter_model.safetensors") | dict(tensors)
    save_file({k: v for k, v in held.items() if k not in drop}, folder / "adapter_model.safetensors")


def refused(base, folder, words):
    before = snapshot(base)
    with pytest.raises(SpalierError, match=words) as caught:
        sp.Task.from_peft(folder, base)
    assert len(str(caught.value)) < 600
    assert_unchanged(base, before)


A = "base_model.model.inner.0.lora_A.weight"
HOSTILE = {
    "another method": ({"config": {"peft_type": "IA3"}}, "peft_type LORA"),
    "dora": ({"config": {"use_dora": True}}, "use_dora.*merge"),
    "a setting of tomorrow": ({"config": {"use_magic": 3}}, "use_magic"),
    "pissa": ({"config": {"init_lora_weights": "pissa"}}, "changes the base"),
    "a negative rank": ({"config": {"r": -1}}, "positive"),
    "an endless alpha": ({"config": {"lora_alpha": 1e300}}, "positive"),
    "words for alpha": ({"config": {"alpha_pattern": {"inner": "much"}}}, "positive"),
    "patterns in a list": ({"config": {"alpha_pattern": ["inner"]}}, "positive"),
    "another rank": ({"config": {"r": 4}}, r"expected \(4, 7\)"),
    "a huge rank": ({"config": {"r": 100_000}}, r"expected \(100000, 7\)"),
    "a pattern that never ends": ({"config": {"alpha_pattern": {"(a+)+b": 1}}}, "a simple one"),
    "a pattern that is none": ({"config": {"alpha_pattern": {"(": 1}}}, "which is none"),
    "wrong shapes": ({"tensors": {A: torch.zeros(3, 8)}}, r"expected \(3, 7\)"),
    "nan": ({"tensors": {A: torch.full((3, 7), math.nan)}}, "NaN"),
    "infinity": ({"tensors": {A: torch.full((3, 7), math.inf)}}, "infinite"),
    "whole numbers": ({"tensors": {A: torch.zeros(3, 7, dtype=torch.int64)}}, "floating point"),
    "half a pair": ({"drop": [A]}, "lora_B.weight, expected lora_A and lora_B"),
    "no such layer": ({"tensors": {"base_model.model.other.lora_A.weight": torch.zeros(3, 7)}}, "no such layer"),
    "a layer that has no weight": (
        {"tensors": {"base_model.model.inner.1.lora_A.weight": torch.zeros(3, 7)}},
        "a GELU",
    ),
    "a magnitude": ({"tensors": {"base_model.model.inner.0.lora_magnitude_vector": torch.ones(9)}}, "magnitude.*merge"),
    "a value of nobody": ({"tensors": {"base_model.model.secret.weight": torch.zeros(2)}}, "no such layer"),
    "a path": ({"tensors": {"base_model.model.../../etc/passwd": torch.zeros(2)}}, "no such layer"),
    "a head of other inputs": ({"tensors": {"base_model.model.head.weight": torch.zeros(3, 8)}}, r"expected \(3, 7\)"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_strangers_folder_gets_one_clear_error(attack, folder):
    base, place = folder
    changes, words = HOSTILE[attack]
    write(place, **changes)
    refused(base, place, words)


def test_no_pickle_is_loaded_and_no_other_file_is_taken(folder, tmp_path):
    base, place = folder
    refused(base, place / "absent", "no folder")
    (place / "adapter_model.safetensors").write_bytes(b"\x80\x04 no tensors")
    refused(base, place, "safetensors")
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    refused(base, place, "pickle, which is never loaded")
    (place / "adapter_config.json").write_text("{" * 10_000)
    refused(base, place, "JSON")
    (place / "adapter_config.json").write_text("[1]")
    refused(base, place, "peft_type LORA")
    (place / "adapter_config.json").write_text(" " * (1 << 21))
    refused(base, place, "expected a few hundred")


def test_the_hubs_cache_has_links(folder):
    base, place = folder
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (place / name).rename(place / f"blob-{name}")
        (place / name).symlink_to(place / f"blob-{name}")
    assert sp.Task.from_peft(place, base).info.adapter["rank"] == 3


def test_another_base_is_refused(folder):
    _, place = folder
    refused(tiny_cnn(), place, "no such layer")
    adapted = made(Mixed)
    sp.attach_(adapted, sp.SPLoRA(rank=1), head="head")
    with pytest.raises(SpalierError, match="adapted or pruned already"):
        sp.Task.from_peft(place, adapted)


def test_a_tied_weight_is_not_torn_apart(tmp_path):
    base = made(gpt2)
    peft_folder(base, tmp_path, target_modules=["lm_head"])
    with pytest.raises(WeightsError, match="share one weight"):
        sp.Task.from_peft(tmp_path, base)
