"""Pruning in the loop of transformers' Trainer: its optimizer in Accelerate's wrapper, accumulation, saving."""

import copy
import importlib
import logging
import math
import runpy
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import spalier as sp
from spalier.budget import Meter
from spalier.errors import ConfigError, ScoreError
from spalier.integrations.transformers import PruningCallback
from spalier.structure.structure import structure_of

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
torch.manual_seed(0)
PICTURES = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 3} for i in range(24)]
TEXTS = [
    {"input_ids": torch.randint(3, 50, (7,)), "attention_mask": torch.ones(7).long(), "labels": i % 3}
    for i in range(24)
]
DATA = {"pictures": PICTURES, "texts": TEXTS}


def batch_of(samples):
    return {key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in samples[0]}


def made(kind="pictures"):
    """An adapted classifier of three classes."""
    torch.manual_seed(0)
    if kind == "pictures":
        config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=3)
        net = transformers.ViTForImageClassification(config)
    else:
        config = transformers.BertConfig(**SMALL, vocab_size=50, max_position_embeddings=16, num_labels=3)
        net = transformers.BertForSequenceClassification(config)
    example = {key: value for key, value in batch_of(DATA[kind][:2]).items() if key != "labels"}
    sp.attach_(net, sp.SPLoRA(rank=2), head="classifier", example=example)
    return net


def schedule(kind="iterative", of="pictures", **options):
    given = {"end": 0.5, "batches": [batch_of(DATA[of][:8])], "steps": 4, "step_size": 0.25}
    return sp.Schedule(kind, **(given | options))


class Watch(TrainerCallback):
    """What is left after each step, and whether the optimizer's state is of its parameters' shapes."""

    def __init__(self, fails_at=None):
        self.densities, self.fits, self.fails_at = [], [], fails_at

    def on_step_end(self, args, state, control, *, model, optimizer, **_):
        self.densities.append(density_of(model))
        inner = optimizer.optimizer
        pairs = [
            (p.shape, value.shape)
            for p in inner.param_groups[0]["params"]
            for value in inner.state.get(p, {}).values()
            if value.dim()
        ]
        self.fits.append(bool(pairs) and all(one == other for one, other in pairs))
        if state.global_step == self.fails_at:
            raise RuntimeError("the power is out")


def density_of(net):
    meter = Meter(net, structure_of(net, None))
    return meter.channels(meter.kept) / meter.channels(meter.whole)


def trainer(net, folder, *callbacks, of="pictures", **options):
    given = {"max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 0.01}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(str(folder), **(given | quiet | options))
    return Trainer(net, arguments, train_dataset=DATA[of], callbacks=list(callbacks))


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("of", "kind", "every"),
    [
        ("pictures", "agp", "step"),
        ("texts", "iterative", "epoch"),
        pytest.param("pictures", "one_shot", "step", marks=pytest.mark.slow),
        pytest.param("pictures", "iterative", "epoch", marks=pytest.mark.slow),
        pytest.param("texts", "iterative", "step", marks=pytest.mark.slow),
        pytest.param("texts", "agp", "epoch", marks=pytest.mark.slow),
    ],
)
def test_a_network_is_pruned_as_it_trains(of, kind, every, tmp_path, caplog):
    net, watch = made(of), Watch()
    before = {name: value.clone() for name, value in net.named_parameters()}
    run = trainer(net, tmp_path, PruningCallback(schedule(kind, of), every=every), watch, of=of, max_steps=18)
    with caplog.at_level(logging.INFO, "spalier"):
        run.train()
    assert density_of(net) <= 0.5
    assert len(losses(run)) == 18
    assert all(map(math.isfinite, losses(run)))
    assert watch.densities == sorted(watch.densities, reverse=True)
    assert watch.fits == [True] * 18
    assert "pruned to a density of 0.5" in caplog.text
    assert not torch.equal(net.classifier.bias, before["classifier.bias"])
    base = copy.deepcopy(net)
    sp.detach_(base)
    built = sp.Task.of(net, "pruned").build(base).eval()
    example = batch_of(DATA[of])
    torch.testing.assert_close(built(**example).logits, net.eval()(**example).logits)


def test_progress_is_that_of_the_optimizer_where_gradients_accumulate(tmp_path):
    seen = []

    def kind(progress):
        seen.append(progress)
        return 1 - 0.5 * progress

    net, watch = made(), Watch()
    trainer(
        net,
        tmp_path,
        PruningCallback(schedule(kind)),
        watch,
        gradient_accumulation_steps=3,
        max_steps=4,
    ).train()
    assert sorted(set(seen)) == [0, 0.25, 0.5, 0.75, 1]
    assert watch.fits == [True] * 4
    assert density_of(net) <= 0.5


def test_part_of_a_model_can_be_the_network(tmp_path):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made()

        def forward(self, pixel_values, labels):
            return self.inner(pixel_values=pixel_values, labels=labels)

    net = Around()
    trainer(net, tmp_path, PruningCallback(schedule(), net="inner")).train()
    assert density_of(net.inner) <= 0.5


def test_the_pruned_network_is_saved(tmp_path):
    net = made()
    run = trainer(net, tmp_path, PruningCallback(schedule()))
    run.train()
    run.save_model(tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in net.parameters())
    assert any(key.endswith("weight_adapter.up") for key in weights)
    sp.Task.of(net, "pruned").save(tmp_path / "pruned.task.safetensors")
    assert sp.Task.load(tmp_path / "pruned.task.safetensors").name == "pruned"


def test_nothing_is_left_behind_when_training_raises(tmp_path):
    net, own = made(), schedule("agp")
    given = copy.copy(vars(own))
    callback = PruningCallback(own)
    with pytest.raises(RuntimeError, match="the power is out"):
        trainer(net, tmp_path, callback, Watch(fails_at=5)).train()
    assert vars(own) == given
    assert callback._stepper.schedule.optimizer is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert 0.5 < density_of(net) < 1
    trainer(net, tmp_path, PruningCallback(own)).train()
    assert density_of(net) <= 0.5


def test_an_error_while_pruning_leaves_the_network_whole(tmp_path):
    net = made()
    callback = PruningCallback(schedule("one_shot", batches=[{"pixel_values": torch.zeros(1, 1, 1, 1)}]))
    with pytest.raises(ScoreError):
        trainer(net, tmp_path, callback).train()
    assert callback._stepper.schedule.optimizer is None
    assert density_of(net) == 1


def test_the_best_model_cannot_be_loaded_at_the_end(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    arguments = TrainingArguments(
        str(tmp_path),
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    callback = PruningCallback(schedule())
    run = Trainer(made(), arguments, train_dataset=PICTURES, eval_dataset=PICTURES, callbacks=[callback])
    with pytest.raises(ConfigError, match="load_best_model_at_end"):
        run.train()


def test_transformers_that_is_missing_is_named(monkeypatch):
    module = importlib.import_module("spalier.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        runpy.run_path(module.__file__)


def test_bad_options():
    with pytest.raises(ConfigError, match="every is 'batch'"):
        PruningCallback(schedule(), every="batch")
