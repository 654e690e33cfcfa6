"""Whole runs: methods, budgets, teachers, data and networks of one's own."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from running import Small, outcome, quick
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import spalier as sp
from spalier.data import Data, open_data
from spalier.errors import AttachmentError, ConfigError, DataError, RunError, SpalierError
from spalier.networks import open_network


def learned_digits(folder, **changes):
    """Settings under which the small network does learn."""
    return quick(
        max_train_samples=None,
        epochs=6,
        epochs_per_prune=3,
        lr=2e-2,
        network_options={"width": 16},
        **changes,
    ).run(folder, progress=False)


@pytest.fixture(scope="module")
def fine(tmp_path_factory):
    """A run of fine-pruning, whose tasks teach others."""
    folder = tmp_path_factory.mktemp("fine") / "run"
    return learned_digits(folder, method="fine-pruning", criterion="weight", densities=(0.5,))


def test_a_run_learns_and_its_files_say_so(fine):
    """Accuracy in a row is what the network that is built from the file has, on every test sample."""
    assert [row["test"] > 0.9 for row in fine.rows] == [True, True]
    data = open_data("digits")
    base = open_network("running:small", classes=10, width=16)
    images, labels = data.test.fetch(np.arange(len(data.test)), None)
    for row in fine.rows:
        net = fine.tasks.load(row["task"]).build(base)
        with torch.no_grad():
            right = (net(images).argmax(1) == labels).double().mean().item()
        assert right == pytest.approx(row["test"], abs=1e-12)
        counted = sp.count(net, images[:1])
        assert (counted.parameters, counted.macs) == (row["parameters"], row["macs_left"])
        assert (fine.folder / "tasks" / f"{row['task']}.task.safetensors").stat().st_size == row["bytes"]
    block = json.loads((fine.folder / "blocks/01.json").read_text())
    assert sum(map(sum, block["confusion"]["test"])) == len(labels)
    assert block["classes"] == list("0123456789")
    assert fine.rows[1]["channels"] <= 0.5
    info = fine.tasks.load("digits-50").info
    assert info.metrics["accuracy"] == fine.rows[1]["test"]
    assert info.preprocessing == data.preprocessing
    assert "digits-50" in str(fine)
    assert fine.to_csv().splitlines()[0].startswith("task,block,target,channels")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "sppara"},
        {"method": "lora", "criterion": "magnitude"},
        {"criterion": "lrp", "ranking": "local"},
        {"criterion": "second_order", "budget": "macs", "densities": (0.5,)},
        {"criterion": "gradient", "criterion_options": {"literal": True}, "writers": "free"},
        {
            "criterion": "movement",
            "schedule": "agp",
            "final_density": 0.3,
            "prune_steps": 2,
            "densities": None,
        },
        {"budget": "bytes", "densities": (4000, 3000)},
        {"budget": "weights", "select_options": {"round_to": 2, "rank": 0.5}},
        {
            "mixed_precision": "bf16",
            "ema_decay": 0.9,
            "warmup_epochs": 0.5,
            "grad_clip": 1.0,
            "label_smoothing": 0.1,
        },
        {"channels_last": False, "lr_schedule": "step", "optimizer": "sgd", "weight_decay_norms": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values()))[:40],
)
def test_every_way(tmp_path, changes):
    config = quick(**{"epochs": 1, "densities": (0.5,), **changes})
    results = config.run(tmp_path / "run", progress=False)
    assert len(results.rows) == 1 + len(config.targets())
    assert results.rows[-1]["learned"] < results.rows[0]["learned"]
    assert len(list(results.tasks)) == len(results.rows)
    if config.budget in ("channels", "weights", "macs"):
        assert results.rows[-1][config.budget] <= config.targets()[-1] + 1e-9


def test_no_decay_on_norms_by_choice():
    from spalier.runs.learning import make_optimizer

    net = Small()
    sp.attach_(net, sp.SPLoRA(2), head="fc")
    spared = make_optimizer(quick(weight_decay=0.1, weight_decay_norms=False), net).param_groups
    norms = {id(p) for m in net.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    undecayed = {id(p) for group in spared if not group["weight_decay"] for p in group["params"]}
    assert norms | {id(net.fc.bias)} == undecayed
    assert {group["weight_decay"] for group in spared} == {0.1, 0.0}
    everything = make_optimizer(quick(weight_decay=0.1, weight_decay_norms=True), net).param_groups
    assert {group["weight_decay"] for group in everything} == {0.1}


def test_the_head_may_learn_faster():
    from spalier.runs.learning import make_optimizer, set_lr_

    net = Small()
    sp.attach_(net, sp.SPLoRA(2), head="fc")
    optimizer = make_optimizer(quick(head_lr_scale=4), net)
    set_lr_(optimizer, 1e-3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(net.fc.weight)] == pytest.approx(4e-3)
    assert rates[id(net.fc.bias)] == pytest.approx(4e-3)
    assert rates[id(net.conv1.weight_adapter.up)] == pytest.approx(1e-3)
    assert {group["speed"] for group in make_optimizer(quick(), net).param_groups} == {1.0}


@pytest.mark.slow
def test_training_narrow_strided_convolutions_does_not_crash(tmp_path):
    """PyTorch's weight gradient of these writes past its memory in channels-last layout, with up to 7 or 15 inputs."""
    draw = {"disc": "ellipse", "square": "rectangle"}
    numbers = random.Random(0)
    for kind, method in draw.items():
        (tmp_path / "shapes" / kind).mkdir(parents=True)
        for number in range(20):
            picture = Image.new("RGB", (64, 64), (numbers.randrange(200),) * 3)
            x, y = numbers.randrange(40), numbers.randrange(40)
            getattr(ImageDraw.Draw(picture), method)((x, y, x + 20, y + 20), fill="white")
            picture.save(tmp_path / "shapes" / kind / f"{number}.png")
    settings = {
        "ranking": "local",
        "image_size": 64,
        "batch_size": 16,
        "epochs": 1,
        "epochs_per_prune": 4,
        "densities": 0.5,
    }
    command = [sys.executable, "-m", "spalier", "-q", "train", "--data", f"folder:{tmp_path / 'shapes'}"]
    command += ["--network", "resnet8", "--set", "network_options={width: 8}", "--method", "fine-pruning"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [*command, "--folder", tmp_path / "run"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    kept = sp.Task.load(tmp_path / "run/tasks/shapes-50.task.safetensors").build(
        open_network("resnet8", classes=2, width=8)
    )
    assert kept.get_submodule("layer2.0.downsample.0").in_channels == 4


@pytest.mark.slow
def test_a_teacher_alone_without_labels(tmp_path, fine):
    """Labels are not looked at, and need not be there."""
    start = str(fine.folder / "tasks" / "digits-100.task.safetensors")
    settings = {
        "method": "fine-pruning",
        "labels": False,
        "teacher": "self",
        "start_task": start,
        "densities": (0.5,),
        "epochs_per_prune": 4,
        "max_train_samples": None,
        "network_options": {"width": 16},
        "lr": 3e-3,
    }
    results = quick(**settings).run(tmp_path / "run", progress=False)
    assert results.rows[0]["epochs"] == 0
    assert results.rows[0]["test"] == fine.rows[0]["test"]  # test samples have labels here, to judge by
    assert results.rows[1]["test"] > 0.85
    data = open_data("digits")
    unlabelled = Data.of(_without_labels(data.train), _without_labels(data.test))
    base = open_network("running:small", classes=10, width=16)
    settings |= {"network_options": {}}
    again = quick(**settings).run(tmp_path / "unlabelled", network=base, data=unlabelled, progress=False)
    assert again.rows[0]["test"] == 1.0  # it agrees with itself
    assert again.rows[1]["test"] > 0.9  # and agrees still, with half of the channels
    assert again.tasks.load("given-50").info.classes == data.classes


def _without_labels(part) -> TensorDataset:
    images, labels = part.fetch(np.arange(len(part)), None)
    return TensorDataset(images, torch.full_like(labels, -1))


@pytest.mark.slow
def test_taught_by_a_file(tmp_path, fine):
    teacher = str(fine.folder / "tasks" / "digits-100.task.safetensors")
    results = learned_digits(tmp_path / "run", teacher=teacher, distill_weight=0.7, densities=(0.5,))
    assert results.rows[0]["test"] > 0.6


def test_starting_from_a_task(tmp_path, fine):
    start = str(fine.folder / "tasks" / "digits-50.task.safetensors")
    config = quick(
        start_task=start,
        method="fine-pruning",
        densities=(0.3,),
        max_train_samples=None,
        network_options={"width": 16},
        name="on",
    )
    results = config.run(tmp_path / "run", progress=False)
    assert results.rows[0]["test"] == fine.rows[1]["test"]
    assert results.rows[0]["channels"] == fine.rows[1]["channels"]
    assert results.rows[1]["channels"] <= 0.3
    assert results.rows[0]["task"] == "on-start"
    assert results.rows[0]["target"] == results.rows[0]["channels"] < 0.51
    for changes, message in (
        ({"method": "splora"}, "learned with 'fine-pruning'; set that"),
        (
            {"densities": (0.8, 0.3)},
            f"has {fine.rows[1]['channels']:.1%} of the channels left, and 0.8 is asked for",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config.replace(**changes).run(tmp_path / "other", progress=False)


def digits_as_tensors(first: int = 0) -> Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    labels = torch.tensor(digits.target)
    return Data.of(TensorDataset(images[first:300], labels[first:300]), TensorDataset(images[300:400], labels[300:400]))


def test_a_network_and_data_of_ones_own(tmp_path):
    torch.manual_seed(3)
    net = Small()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    config = quick(epochs=1, densities=(0.5,), max_train_samples=None)
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    results = config.run(tmp_path / "run", network=net, data=digits_as_tensors(), progress=False)
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    assert drawn == (
        torch.rand(1).item(),
        random.random(),
        np.random.rand(),
    )  # nobody's randomness was used up
    assert net.training
    assert not torch.are_deterministic_algorithms_enabled()
    assert {k: v.tolist() for k, v in net.state_dict().items()} == {k: v.tolist() for k, v in before.items()}
    assert sp.TransferPruning.load(results.folder).network == "given:Small"
    assert results.tasks.load("given-50").build(net)(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(ConfigError, match="pass network= again"):
        sp.TransferPruning.load(results.folder).run(tmp_path / "run", progress=False)


def test_another_network_or_other_data_are_refused(tmp_path):
    from spalier.runs import Engine

    class Enough(BaseException):
        pass

    def stop(engine):
        raise Enough

    torch.manual_seed(3)
    net, data = Small(), digits_as_tensors()
    config = quick(epochs=1, densities=(0.5,), max_train_samples=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "score", stop)
        with pytest.raises(Enough):
            config.run(tmp_path / "run", network=net, data=data, progress=False)
    with pytest.raises(RunError, match="other weights") as caught:
        config.run(tmp_path / "run", network=Small(), data=data, progress=False)
    assert caught.value.code == "changed"
    with pytest.raises(RunError, match="the data are others"):
        config.run(tmp_path / "run", network=net, data=digits_as_tensors(first=2), progress=False)
    config.run(tmp_path / "run", network=net, data=data, progress=False)
    assert (tmp_path / "run/results.json").exists()


def test_classes_unlike_the_head(tmp_path):
    with pytest.raises(RunError, match=r"returns \(7,\) numbers for a sample, and digits has 10 classes") as caught:
        quick(head="fc", max_train_samples=None).run(
            tmp_path / "run", network=Small(7), data=open_data("digits"), progress=False
        )
    assert caught.value.code == "classes"


def test_labels_out_of_range(tmp_path):
    images = torch.zeros(40, 3, 8, 8)
    labels = torch.arange(40) % 10
    labels[7] = 12
    with pytest.raises(DataError, match="12"):
        quick().run(tmp_path / "run", data=Data.of(TensorDataset(images, labels), classes=tuple("0123456789")))


def test_an_adapted_network_is_refused(tmp_path):
    net = Small()
    sp.attach_(net, sp.SPLoRA(2))
    with pytest.raises(AttachmentError, match="detach_"):
        quick().run(tmp_path / "run", network=net, progress=False)


def test_modes_and_gradients_come_back(tmp_path):
    net = Small()
    net.train()
    net.bn1.eval()
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    quick(epochs=1, densities=(0.5,)).run(tmp_path / "run", network=net, progress=False)
    assert net.training
    assert not net.bn1.training
    assert torch.equal(net.fc.weight.grad, torch.ones_like(net.fc.weight))
    assert net.conv1.weight.grad is None


def test_an_accelerator_of_the_callers(tmp_path):
    """Its state is one for the process: a run has its own precision, and leaves the caller's alone."""
    accelerate = pytest.importorskip("accelerate")
    own = accelerate.Accelerator(cpu=True)
    before = own.mixed_precision
    other = "bf16" if before == "no" else "no"
    quick(epochs=1, densities=(), mixed_precision=other).run(tmp_path / "run", progress=False)
    assert own.mixed_precision == accelerate.Accelerator(cpu=True).mixed_precision == before


def test_learning_under_no_grad(tmp_path):
    with torch.no_grad():
        results = quick(epochs=1, densities=()).run(tmp_path / "run", progress=False)
        assert not torch.is_grad_enabled()
    assert len(results.rows) == 1


class WithState(Small):
    """A module with state that is no tensor."""

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state) -> None:
        pass


def unlabelled() -> Data:
    return Data.of(TensorDataset(torch.rand(40, 3, 8, 8), torch.full((40,), -1)))


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (
            {},
            {"data": TensorDataset(torch.rand(4, 3), torch.zeros(4))},
            "data is a TensorDataset, expected.*Data.of",
        ),
        ({}, {"network": {}}, "network is a dict, expected a torch.nn.Module"),
        ({"weights": "w.pth"}, {"network": Small()}, "weights is set, and a network was given"),
        ({"network_options": {"width": 4}}, {"network": Small()}, "network_options is set"),
        (
            {"max_train_samples": 3},
            {"data": digits_as_tensors()},
            "max_train_samples is set, and data was given",
        ),
        ({}, {"data": unlabelled()}, "the samples have no labels; set labels: false"),
        (
            {"keep_best": True, "validate_every": 1},
            {"data": digits_as_tensors()},
            "have no validation samples",
        ),
        ({"select_options": {"round_to": "x"}}, {}, "round_to is 'x'"),
        ({"select_options": {"normalise": "l3"}}, {}, "normalise is 'l3'"),
        ({"select_options": {"protect": ["nope"]}}, {}, "nope"),
        ({"densities": (0.5, 0.001)}, {}, "0.001"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_work_is_said_before_anything_is_learned(tmp_path, settings, given, message):
    with pytest.raises(SpalierError, match=message):
        quick(**{"max_train_samples": None, **settings}).run(tmp_path / "run", **given, progress=False)
    assert not (tmp_path / "run/checkpoint.safetensors").exists()


def test_networks_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        net = Small()
    with pytest.raises(ConfigError, match="meta device"):
        quick().run(tmp_path / "run", network=net, progress=False)


def test_state_that_is_no_tensor(tmp_path):
    results = quick(epochs=0, densities=()).run(tmp_path / "run", network=WithState(), progress=False)
    assert len(results.rows) == 1


def test_subtasks_and_seeds(tmp_path):
    one = quick(classes=("3", "5"), epochs=1, densities=())
    first = one.run(tmp_path / "a", progress=False)
    assert len(first.rows) == 1
    one.run(tmp_path / "b", progress=False)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    one.replace(seed=1).run(tmp_path / "c", progress=False)
    assert outcome(tmp_path / "a")["tasks"] != outcome(tmp_path / "c")["tasks"]
    assert first.tasks.load("digits-100").info.classes == ("3", "5")


def test_workers_change_nothing(tmp_path):
    quick(densities=(0.5,)).run(tmp_path / "none", progress=False)
    quick(densities=(0.5,), num_workers=2).run(tmp_path / "two", progress=False)
    assert outcome(tmp_path / "none") == outcome(tmp_path / "two")


def test_progress_in_lines(tmp_path, capsys):
    quick(epochs=1, densities=(0.5,)).run(tmp_path / "run")
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0].startswith("[6/12")  # the last 20 of 180 samples are a batch, too
    assert "block 0/1, epoch 1/1: loss" in lines[0]
    assert any("digits-50: " in line and "of MACs" in line for line in lines)


def test_progress_as_a_bar(monkeypatch):
    import io

    from spalier.runs.processes import Progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    bar = Progress(4, 2, True, stream)
    bar.step("block 1/2, epoch 1/1", 0.5)
    bar.line("something that stays")
    bar.close()
    assert "3/4" in stream.getvalue()
    assert "something that stays" in stream.getvalue()


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = quick(epochs=2, densities=(0.5,), trackers=("auto",)).run(tmp_path / "run", progress=False)
    events = EventAccumulator(str(tmp_path / "run" / "tracking"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "epoch"]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)
    assert [e.value for e in events.Scalars("block/test")] == pytest.approx([row["test"] for row in results.rows])
