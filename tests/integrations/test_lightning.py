"""Pruning in Lightning's own loop: the trainer, its optimizers, its checkpoints."""

import copy
import importlib
import logging
import math
import runpy
import sys

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import spalier as sp
from spalier.budget import Meter
from spalier.errors import ConfigError, PlanError
from spalier.integrations.lightning import PruningCallback
from spalier.structure.structure import structure_of

pytestmark = [
    # Lightning says so of any loader without processes of its own
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
]

torch.manual_seed(0)
IMAGES, LABELS = torch.randn(24, 3, 8, 8), torch.randint(0, 3, (24,))
BATCHES = [(IMAGES[:8], LABELS[:8])]


class Classifier(pl.LightningModule):
    def __init__(self, net=None, head="8", rank=2, fails_at=None):
        super().__init__()
        self.net = net or tiny_cnn()
        sp.attach_(self.net, sp.SPLoRA(rank=rank), head=head, example=IMAGES[:1])
        self.fails_at = fails_at
        self.losses, self.densities, self.sizes = [], [], []

    def training_step(self, batch, index):
        if self.global_step == self.fails_at:
            raise RuntimeError("the power is out")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.densities.append(density_of(self.net))
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.sizes.append(states_fit(self.trainer.optimizers[0]))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.net.parameters() if p.requires_grad], 0.01)


def states_fit(optimizer):
    """Whether there is state for every parameter, of its own shape."""
    shapes = [(p.shape, optimizer.state[p]["exp_avg"].shape) for g in optimizer.param_groups for p in g["params"]]
    return bool(shapes) and all(one == other for one, other in shapes)


def density_of(net):
    meter = Meter(net, structure_of(net, None))
    return meter.channels(meter.kept) / meter.channels(meter.whole)


def loader(size=4):
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=size)


def schedule(kind="iterative", **options):
    given = {"end": 0.4, "batches": BATCHES, "loss": F.cross_entropy, "steps": 4, "step_size": 0.2}
    return sp.Schedule(kind, **(given | options))


def trainer(*callbacks, **options):
    given = {"max_epochs": 4, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(callbacks=list(callbacks), **(given | quiet | options))


@pytest.mark.parametrize(
    ("kind", "every", "net"),
    [
        ("one_shot", "epoch", "net"),
        ("iterative", "epoch", "net"),
        ("iterative", "step", "net"),
        ("agp", "epoch", lambda module: module.net),
        ("agp", "step", lambda module: module.net),
    ],
)
def test_a_network_is_pruned_as_it_trains(kind, every, net, caplog):
    module = Classifier()
    before = {k: v.clone() for k, v in module.net.named_parameters() if "adapter" in k}
    with caplog.at_level(logging.INFO, "spalier"):
        run = trainer(PruningCallback(schedule(kind), net=net, every=every))
        run.fit(module, loader())
    assert density_of(module.net) <= 0.4
    assert len(module.losses) == 24
    assert all(map(math.isfinite, module.losses))
    assert module.densities == sorted(module.densities, reverse=True)
    assert module.sizes == [True] * 24
    assert "pruned to a density of 0.4" in caplog.text
    assert float(run.callback_metrics["density"]) < 1
    assert any(v.shape != before[k].shape for k, v in module.net.named_parameters() if k in before)
    base = copy.deepcopy(module.net)
    sp.detach_(base)
    built = sp.Task.of(module.net, "pruned").build(base)
    torch.testing.assert_close(built(IMAGES), module.net.eval()(IMAGES))


def test_progress_is_that_of_the_optimizer_where_gradients_accumulate():
    seen = []

    def kind(progress):
        seen.append(progress)
        return 1 - 0.5 * progress

    module = Classifier()
    trainer(PruningCallback(schedule(kind), net="net", every="step"), accumulate_grad_batches=3, max_epochs=2).fit(
        module, loader()
    )
    assert sorted(set(seen)) == [0, 0.25, 0.5, 0.75, 1]
    assert len(module.losses) == 12
    assert module.sizes == [True] * 4
    assert density_of(module.net) <= 0.5


def test_the_module_itself_can_be_the_network():
    class Whole(Classifier):
        def __init__(self):
            pl.LightningModule.__init__(self)
            for name, child in tiny_cnn().named_children():
                self.add_module(f"layer{name}", child)
            self.fails_at, self.losses, self.densities, self.sizes = None, [], [], []
            sp.attach_(self, sp.SPLoRA(rank=2), head="layer8", example=IMAGES[:1])

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

        @property
        def net(self):
            return self

    module = Whole()
    trainer(PruningCallback(schedule(), every="step"), max_epochs=1).fit(module, loader())
    assert density_of(module) <= 0.4
    assert module.sizes == [True] * 6


def test_an_optimizer_of_something_else_is_left_alone():
    class Two(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(2, 2)

        def training_step(self, batch, index):
            mine, theirs = self.optimizers()
            for optimizer, loss in (
                (mine, F.cross_entropy(self.net(batch[0]), batch[1])),
                (theirs, self.other.weight.square().sum()),
            ):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def optimizer_step(self, *args, **kwargs):
            raise AssertionError("not called where optimization is manual")

        def configure_optimizers(self):
            return [super().configure_optimizers(), torch.optim.Adam([self.other.weight])]

    module = Two()
    run = trainer(PruningCallback(schedule(), net="net"))
    run.fit(module, loader())
    assert density_of(module.net) <= 0.4
    assert all(map(states_fit, run.optimizers))


class Residual(nn.Module):
    """Two layers that write into one stream, each of which may keep units of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 20, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(20), nn.Linear(20, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.fc(F.relu(x + self.norm(self.block(x))).mean((2, 3)))


def ranks(net):
    return [len(p) for name, p in net.named_parameters() if name.endswith("adapter.up")]


@pytest.mark.parametrize("options", [{}, {"writers": "free"}, {"rank": 0.5}], ids=str)
def test_training_goes_on_from_a_checkpoint_to_the_same_network(options, tmp_path):
    def run(module, *others, **fit):
        callback = PruningCallback(schedule("agp", options=options), net="net")
        made = trainer(*others, callback)
        made.fit(module, loader(), **fit)
        return made

    torch.manual_seed(5)
    base = Classifier(Residual(), "fc", rank=4)
    straight, halved, fresh = (copy.deepcopy(base) for _ in range(3))
    run(straight)
    half = run(halved, StopAfter(2))
    assert 0.4 < density_of(halved.net) < 1
    assert bool(sp.kept_units(halved.net)["writers"]) == ("writers" in options)
    assert (sum(ranks(halved.net)) < sum(ranks(fresh.net))) == ("rank" in options)
    half.save_checkpoint(tmp_path / "half.ckpt")
    assert density_of(fresh.net) == 1
    run(fresh, ckpt_path=tmp_path / "half.ckpt", weights_only=True)  # plain numbers, so nothing else is needed
    assert "on_load_checkpoint" not in vars(fresh)
    assert sp.kept_units(fresh.net) == sp.kept_units(straight.net)
    assert fresh.losses == straight.losses[12:]
    assert fresh.sizes == [True] * 12
    one, other = fresh.state_dict(), straight.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


class StopAfter(pl.Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def test_a_module_that_stopped_early_is_not_pruned_further():
    module = Classifier()
    trainer(StopAfter(2), PruningCallback(schedule("agp"), net="net")).fit(module, loader())
    assert 0.4 < density_of(module.net) < 1


def test_a_checkpoint_of_more_units_than_are_left_is_refused(tmp_path):
    module = Classifier()
    run = trainer(StopAfter(2), PruningCallback(schedule(), net="net"))
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "half.ckpt")
    trainer(PruningCallback(schedule(), net="net")).fit(module, loader())
    before = snapshot(module.net)
    with pytest.raises(PlanError, match="is gone already"):
        trainer(PruningCallback(schedule(), net="net")).fit(module, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert_unchanged(module.net, before)


def test_nothing_is_left_behind_when_training_raises():
    module, own = Classifier(fails_at=3), schedule()
    given = copy.copy(vars(own))
    with pytest.raises(RuntimeError, match="the power is out"):
        trainer(PruningCallback(own, net="net", every="step")).fit(module, loader())
    assert vars(own) == given
    assert "on_load_checkpoint" not in vars(module)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_nothing_is_left_behind_when_training_does_not_even_begin():
    class Broken(Classifier):
        def configure_optimizers(self):
            assert "on_load_checkpoint" in vars(self)  # the callback waits for a checkpoint
            raise RuntimeError("no optimizer today")

    module = Broken()
    with pytest.raises(RuntimeError, match="no optimizer today"):
        trainer(PruningCallback(schedule(), net="net")).fit(module, loader())
    assert "on_load_checkpoint" not in vars(module)


def test_an_error_while_pruning_leaves_the_network_as_it_was():
    module = Classifier()
    before = snapshot(module.net)
    broken = schedule(batches=[(IMAGES[:, :1], LABELS)])
    callback = PruningCallback(broken, net="net", every="step")

    class Looks(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            self.seen = exception

    looks = Looks()
    with pytest.raises(sp.errors.ScoreError):
        trainer(callback, looks, limit_train_batches=1, max_epochs=1).fit(module, loader())
    assert isinstance(looks.seen, sp.errors.ScoreError)
    assert [name for name, *_ in snapshot(module.net)["modules"]] == [name for name, *_ in before["modules"]]
    assert callback._stepper.schedule.optimizer is None
    assert density_of(module.net) == 1


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield IMAGES[0], LABELS[0]


@pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set")
@pytest.mark.parametrize(
    ("options", "data"),
    [({"max_epochs": -1}, loader()), ({"max_epochs": 2}, DataLoader(Endless(), batch_size=4))],
    ids=["epochs", "data"],
)
def test_training_without_an_end_is_refused(options, data):
    module = Classifier()
    with pytest.raises(ConfigError, match=r"training takes (inf|-1) steps, expected a number"):
        trainer(PruningCallback(schedule(), net="net"), **options).fit(module, data)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("agp", {}, "schedule is a str"),
        (schedule(), {"every": "batch"}, "every is 'batch'"),
        (schedule(), {"net": 3}, "net is a int"),
    ],
)
def test_bad_options(given, options, message):
    with pytest.raises(ConfigError, match=message):
        PruningCallback(given, **options)


def test_lightning_that_is_missing_is_named(monkeypatch):
    module = importlib.import_module("spalier.integrations.lightning")
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        runpy.run_path(module.__file__)


def test_lightning_by_its_older_name(monkeypatch):
    import pytorch_lightning as older

    module = importlib.import_module("spalier.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning", None)
    callback = runpy.run_path(module.__file__)["PruningCallback"]
    assert issubclass(callback, older.Callback)
    assert issubclass(PruningCallback, pl.Callback)


def test_several_processes_are_refused(monkeypatch):
    from spalier import integrations

    monkeypatch.setattr(integrations, "is_distributed", lambda: True)
    with pytest.raises(ConfigError, match="several processes"):
        trainer(PruningCallback(schedule(), net="net")).fit(Classifier(), loader())
