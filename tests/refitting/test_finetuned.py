"""Fine-tuned checkpoints as tasks: whatever form they come in, the same network but for what the bytes leave out."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from support import assert_unchanged, snapshot
from torch import nn
from trained import EXAMPLE, DigitNet, batches
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import spalier as sp
from spalier.errors import SpalierError, WeightsError


def tuned(base, size=0.02, only=None):
    """The network after something like training: every tensor has moved, batch norms' statistics too."""
    torch.manual_seed(1)
    net = copy.deepcopy(base)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.is_floating_point() and (only is None or only in name):
                tensor += size * torch.rand_like(tensor)
            elif only is None:
                tensor += 3
    return net.eval()


@pytest.fixture
def base():
    torch.manual_seed(0)
    return DigitNet().eval()


def outputs(net):
    with torch.no_grad():
        return net(batches(1)[0][0])


def missing(task, base, net):
    return float((outputs(task.build(base)) - outputs(net)).norm() / outputs(net).norm())


def test_the_more_bytes_the_nearer_and_the_base_is_only_read(base):
    net, before = tuned(base), snapshot(base)
    wide = len(sp.Task.from_checkpoint(base, net, adapter=sp.SPDelta(bits=8)).to_bytes())
    errors = []
    for size in (wide // 2, wide // 6):
        task = sp.Task.from_checkpoint(base, net, bytes=size, name="tuned")
        assert 0.95 * size < len(task.to_bytes()) <= size
        assert {row.name for row in task.refitted.rows} >= {"conv1.weight"}
        errors.append(missing(task, base, net))
    assert errors == sorted(errors)
    assert errors[0] < 0.1 < missing(sp.Task.from_checkpoint(base, tuned(base, only="fc")), base, net)
    assert_unchanged(base, before)


def test_all_forms_of_a_checkpoint_are_one(base, tmp_path):
    net = tuned(base)
    state = net.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pth")
    torch.save({"model": {f"module.{key}": value for key, value in state.items()}, "epoch": 3}, tmp_path / "b.pth")
    forms = [net, state, tmp_path / "a.safetensors", str(tmp_path / "a.pth"), tmp_path / "b.pth"]
    forms.append({f"_orig_mod.{key}": value for key, value in state.items()})
    forms.append({key: value for key, value in state.items() if "num_batches" not in key or key.endswith("0")})
    sizes = [sp.Task.from_checkpoint(base, form, adapter=sp.SPLoRA(rank=2, cap=True)).to_bytes() for form in forms[:-1]]
    assert all(data == sizes[0] for data in sizes)
    sp.Task.from_checkpoint(base, forms[-1], adapter=sp.SPPaRA())  # counters may be missing


def test_an_exact_form_gives_the_very_network(base):
    linear = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    net = tuned(linear, 0.5)
    task = sp.Task.from_checkpoint(linear, net, adapter=sp.SPPaRA(), storage="exact")
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(task.build(linear)(x), net(x), rtol=1e-12, atol=1e-12)


def test_accuracy_before_and_after_is_remembered(base):
    net, seen = tuned(base), batches(2)
    with torch.no_grad():
        right = sum(float((net(x).argmax(1) == y).sum()) for x, y in seen) / sum(len(y) for _, y in seen)
    task = sp.Task.from_checkpoint(
        base, net, adapter=sp.SPDelta(bits=1), batches=iter(seen), metrics={"seeds": 1}, classes=list("0123456789")
    )
    assert task.info.metrics["accuracy of the checkpoint"] == pytest.approx(right)
    built = task.build(base)
    with torch.no_grad():
        after = sum(float((built(x).argmax(1) == y).sum()) for x, y in seen) / sum(len(y) for _, y in seen)
    assert task.info.metrics == {"accuracy": after, "accuracy of the checkpoint": right, "seeds": 1}
    again = sp.Task.from_bytes(task.to_bytes())
    assert again.info.metrics == task.info.metrics
    assert "conv1.weight" in str(task.refitted)
    assert sp.Task.from_checkpoint(base, net, adapter=sp.SPPaRA(), batches=[x for x, _ in seen]).info.metrics == {}


def test_a_head_of_other_classes(base):
    net = tuned(base)
    net.fc = nn.Linear(net.fc.in_features, 4)
    task = sp.Task.from_checkpoint(base, net, adapter=sp.SPDelta(bits=1), example=EXAMPLE)
    built = task.build(base)
    assert built.fc.out_features == 4
    assert outputs(built).shape[1] == 4
    assert torch.allclose(built.fc.bias, net.fc.bias, atol=0.01)


def test_where_only_norms_and_head_have_moved_they_are_the_task(base):
    net = tuned(base, only="fc")
    task = sp.Task.from_checkpoint(base, net, storage="exact")
    assert task.refitted is None
    assert torch.equal(outputs(task.build(base)), outputs(net))
    assert not task.adapter_shapes
    again = copy.deepcopy(base)
    task.apply_(again)
    assert torch.equal(outputs(again.eval()), outputs(net))


def test_what_was_frozen_is_not_stored(base):
    net = tuned(base, only="layers.0.conv2")
    task = sp.Task.from_checkpoint(base, net, adapter=sp.SPLoRA(rank=2))
    assert [row.name for row in task.refitted.rows] == ["layers.0.conv2.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_half_precision_has_rounded_is_not_taken_for_learned(base, dtype):
    net = tuned(base, only="layers.0.conv2")
    half = {key: value.to(dtype) if value.is_floating_point() else value for key, value in net.state_dict().items()}
    task = sp.Task.from_checkpoint(base, half, adapter=sp.SPPaRA(), storage="exact")
    assert [row.name for row in task.refitted.rows] == ["layers.0.conv2.weight"]
    with pytest.raises(WeightsError, match="is the base"):
        sp.Task.from_checkpoint(base, {key: value.to(dtype) for key, value in base.state_dict().items()})
    with pytest.raises(WeightsError, match="is the base"):
        sp.Task.from_checkpoint(base, copy.deepcopy(base))


def test_it_is_pruned_further(base):
    net = tuned(base)
    task = sp.Task.from_checkpoint(base, net, adapter=sp.SPDelta(bits=2))  # with no example yet
    again = copy.deepcopy(base)
    task.apply_(again, example=EXAMPLE)
    scores = sp.score(again, batches(2), loss=nn.functional.cross_entropy)
    sp.prune_(again, sp.select(again, scores, channels=0.5), recover=batches(2))
    small = sp.Task.of(again, "small")
    torch.testing.assert_close(outputs(small.build(base)), outputs(again.eval()), rtol=1e-4, atol=1e-5)
    assert small.info.density.channels[0] < small.info.density.channels[1]


def bert(labels=3):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=labels, **sizes)).eval()


def test_tied_weights_and_files_that_have_them_once(tmp_path):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()
    net = tuned(base)
    net.save_pretrained(tmp_path)  # which leaves lm_head.weight out
    words = torch.arange(24).view(2, 12)
    task = sp.Task.from_checkpoint(base, tmp_path / "model.safetensors", adapter=sp.SPDelta(bits=8))
    assert "lm_head.weight" not in {row.name for row in task.refitted.rows}
    built = task.build(base)
    assert built.lm_head.weight is built.transformer.wte.weight
    with torch.no_grad():
        torch.testing.assert_close(built(words).logits, net(words).logits, rtol=0.05, atol=0.02)
    task = sp.Task.from_checkpoint(base, net, batches=[{"input_ids": words, "labels": words}])
    assert set(task.info.metrics) == {
        f"{what}{of}" for what in ("loss", "perplexity") for of in ("", " of the checkpoint")
    }
    untied = net.state_dict() | {"lm_head.weight": torch.zeros(50, 16)}
    with pytest.raises(WeightsError, match=r"no longer tied: lm_head\.weight"):
        sp.Task.from_checkpoint(base, untied)


def test_buffers_that_files_of_old_versions_have():
    torch.manual_seed(0)
    base = bert()
    state = tuned(base).state_dict() | {"bert.embeddings.position_ids": base.bert.embeddings.position_ids}
    assert sp.Task.from_checkpoint(base, state).name == "checkpoint"


def refused(words, base, checkpoint, **options):
    before = snapshot(base)
    with pytest.raises(SpalierError, match=words):
        sp.Task.from_checkpoint(base, checkpoint, **options)
    assert_unchanged(base, before)


def test_what_does_not_fit_is_listed(base, tmp_path):
    state = tuned(base).state_dict()
    refused(r"missing: conv1\.weight", base, {k: v for k, v in state.items() if k != "conv1.weight"})
    refused(r"unexpected: extra\.weight", base, state | {"extra.weight": torch.zeros(2)})
    wide = state | {"conv1.weight": torch.zeros(2, 1, 3, 3)}
    refused(r"of another shape: conv1\.weight \(2, 1, 3, 3\) for", base, wide)
    refused(r"only the head \(fc\)", base, sp.models.resnet8(classes=10))
    refused("of another shape: fc", base, state | {"fc.bias": torch.zeros(3)}, head="conv1")
    refused("NaN", base, state | {"conv1.weight": state["conv1.weight"] * float("nan")})
    refused("no weights file", base, tmp_path / "absent.pth")
    refused("expected a state_dict", base, ["conv1"])
    (tmp_path / "evil.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    refused("plain tensors", base, tmp_path / "evil.pth")
    refused("not both", base, state, bytes=100_000, adapter=sp.SPPaRA())
    refused("cannot be reached", base, state, bytes=10)
    adapted = copy.deepcopy(base)
    sp.attach_(adapted, sp.SPLoRA(rank=1), head="fc")
    with pytest.raises(SpalierError, match="adapted or pruned already"):
        sp.Task.from_checkpoint(adapted, state)
