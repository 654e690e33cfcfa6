"""Stock networks from torchvision and transformers: adapted equals fused, training reaches every adapter, and back."""

import pytest
import torch
import torchvision.models as tv
import transformers as hf
import zoo
from support import assert_unchanged, awaken_, snapshot

import spalier as sp

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
}


def image(size=64):
    return {"x": torch.randn(2, 3, size, size, dtype=torch.float64)}


def tokens():
    return {"input_ids": torch.randint(0, 50, (2, 7))}


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16))


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=50)
    )


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=16, **(TINY | {"vocab_size": None})))


NETWORKS = {
    "resnet18": (lambda: tv.resnet18(num_classes=5), image),
    "resnext": (lambda: tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], 5, groups=4, width_per_group=8), image),
    "mobilenet_v3": (lambda: tv.mobilenet_v3_small(num_classes=5), image),
    "efficientnet": (lambda: tv.efficientnet_b0(num_classes=5), image),
    "shufflenet": (lambda: tv.shufflenet_v2_x0_5(num_classes=5), image),
    "densenet": (lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, num_classes=5), image),
    "convnext": (zoo.by_name("torchvision/convnext_tiny").make, image),
    "swin": (zoo.by_name("torchvision/swin_t").make, lambda: image(32)),
    "vit": (lambda: tv.VisionTransformer(32, 16, 2, 2, 16, 24, num_classes=5), lambda: image(32)),
    "gpt2": (gpt2, tokens),
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**TINY)), tokens),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **TINY)), tokens),
    "t5": (t5, lambda: tokens() | {"decoder_input_ids": torch.randint(0, 50, (2, 5))}),
    "hf-vit": (vit, lambda: {"pixel_values": image(32)["x"]}),
}


def run(net, batch):
    out = net(*batch.values()) if "x" in batch else net(**batch)
    return out if isinstance(out, torch.Tensor) else out.logits


def calibrate_(net, batch):
    """Give batch norms the statistics of a batch, so that a deep untrained network's output does not vanish."""
    norms = [m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    if norms:
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            run(net.train(), batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    for parameter in net.parameters():
        if not parameter.any():  # heads that start at zero show nothing of what is before them
            torch.nn.init.normal_(parameter, 0, 0.1)
    return net.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_adapted_equals_fused_and_every_adapter_learns(name):
    make, example = NETWORKS[name]
    batch = example()
    net = calibrate_(make().double(), batch)
    before, output = snapshot(net), run(net, batch)
    summary = sp.attach_(net, sp.SPLoRA(2))
    awaken_(net, 0.1)
    adapted = run(net, batch)
    assert output.abs().max() > 1e-3
    assert not torch.allclose(adapted, output)
    torch.testing.assert_close(run(sp.fuse(net), batch), adapted, rtol=1e-9, atol=1e-9)

    learned = {k: p for k, p in net.named_parameters() if p.requires_grad}
    assert summary.learned == sum(p.numel() for p in learned.values()) == sp.count(net).learned
    grads = torch.autograd.grad(adapted.square().sum(), list(learned.values()), allow_unused=True)
    unused = [k for k, g in zip(learned, grads, strict=True) if g is None or not g.any()]
    assert not [k for k in unused if "_adapter." in k]

    sp.detach_(net)
    assert_unchanged(net, before)
    assert torch.equal(run(net, batch), output)
