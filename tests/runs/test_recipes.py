"""What follows from data and network where nobody says: batches, epochs, rates, sizes, and that runs keep to it."""

import logging
from pathlib import Path

import pytest
import torch
from running import quick

from spalier import networks
from spalier.data import open_data
from spalier.errors import RunError
from spalier.networks import open_network
from spalier.runs import Engine, Results, Settings, TransferPruning
from spalier.runs.recipes import RATES, STEPS


@pytest.mark.parametrize("samples", [10, 86, 500, 1294, 50_000])
def test_few_samples_get_more_steps(samples):
    config = Settings().fitted(samples, side=32)
    steps = max(1, samples // config.batch_size)
    assert config.batch_size in (8, 16, 32, 64)
    assert steps >= 10 or samples < 80
    assert config.epochs == 50 or config.epochs * steps >= STEPS["epochs"]
    assert config.epochs >= 8
    assert config.final_epochs == config.epochs_per_prune >= 4


def test_small_networks_learn_faster():
    small, large = (Settings().fitted(1000, 32, parameters).lr for parameters in (270_000, 25_000_000))
    assert small > 3 * large
    assert large == RATES["fine-pruning"]
    assert Settings(method="splora").fitted(1000, 32, 25_000_000).lr == RATES["splora"]


def test_what_is_given_stays():
    given = {"batch_size": 48, "epochs": 2, "lr": 0.5, "epochs_per_prune": 3}
    config = Settings(**given).fitted(100, 32, 1000)
    assert {name: getattr(config, name) for name in given} == given
    assert config.final_epochs == 3


def test_the_papers_recipe_is_the_papers_whatever_the_data():
    config = Settings(recipe="paper", network="resnet50")
    fitted = config.fitted(50, 224, 1000)
    assert fitted == config
    assert (config.method, config.learn, config.pretrained) == ("splora", "direct", False)


def test_the_fast_recipe_learns_wide_and_stores_narrow():
    config = Settings()
    assert (config.learn, config.codes, config.network, config.pretrained) == (
        "wide",
        ("spdelta-2bit",),
        "resnet20",
        True,
    )
    for direct in ({"rank": 4}, {"keep_optimizer": True}, {"teacher": "self"}, {"learn": "direct"}):
        assert (Settings(**direct).method, Settings(**direct).learn) == ("splora", "direct")


def test_small_networks_get_small_images():
    assert Settings(data="folder:photos").image_size == 32
    assert Settings(data="folder:photos", image_size=64).image_size == 64
    assert Settings(data="digits").image_size is None  # as they are
    assert Settings(data="folder:photos", network="timm:resnet18").image_size is None
    stems = [Settings(network="resnet18").fitted(100, side).network_options for side in (32, 224)]
    assert stems == [{"stem": "cifar"}, {"stem": "cifar"}]  # digits are small
    folder = Settings(network="resnet18", data="folder:photos")
    assert [folder.fitted(100, side).network_options for side in (32, 224)] == [{"stem": "cifar"}, {}]


# in runs


class Stopped(Engine):
    """A run that is killed as soon as it has a checkpoint."""

    def train(self):
        raise KeyboardInterrupt


def begin(config, folder):
    with pytest.raises(KeyboardInterrupt):
        config.run(folder, progress=False, engine=Stopped)


def test_a_run_goes_on_with_what_it_came_to(tmp_path, monkeypatch):
    config = quick(batch_size=None, epochs=1, epochs_per_prune=1, lr=None)
    begin(config, tmp_path)
    then = Settings.load(tmp_path)
    assert then.batch_size == 8  # of 180 samples
    assert then.lr > RATES["splora"]
    monkeypatch.setattr("spalier.runs.settings.fitted", lambda *_: {"batch_size": 64})  # a later version
    results = config.run(tmp_path, progress=False)
    assert Settings.load(tmp_path) == then
    assert results.rows[-1]["steps"] == 3 * 22  # batches of 8; the 4 samples behind them wait for another epoch


def test_other_pretrained_weights_are_refused(tmp_path, monkeypatch):
    config = TransferPruning(data="digits", max_train_samples=30, trackers=(), epochs=1, densities=())
    begin(config, tmp_path / "run")
    other = open_network("resnet20", seed=7)
    file = tmp_path / "other.pth"
    torch.save(other.state_dict(), file)
    monkeypatch.setitem(networks.OWN_WEIGHTS, "resnet20", file)
    with pytest.raises(RunError, match="pretrained weights of resnet20 are others now") as caught:
        config.run(tmp_path / "run", progress=False)
    assert caught.value.code == "changed"


def test_runs_are_opened_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Settings(data="folder:photos", weights="base.pth", start_task="self.task").with_paths()
    assert config.data == f"folder:{tmp_path / 'photos'}"
    assert config.weights == str(tmp_path / "base.pth")
    assert config.with_paths() is config
    (tmp_path / "bert").mkdir()
    texts = Settings(data="text:mails", network="hf:bert", tokenizer="bert").with_paths()
    assert (texts.data, texts.network) == (f"text:{tmp_path / 'mails'}", f"hf:{tmp_path / 'bert'}")
    assert texts.tokenizer == str(tmp_path / "bert")
    hub = Settings(data="hf:imdb", network="hf:roberta", tokenizer="hf:roberta", text_column="text")
    assert hub.with_paths() is hub, "names on the hub are no folders"
    assert Settings(teacher="self", method="splora").with_paths().teacher == "self"


def test_noise_and_single_steps_are_called_that(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "spalier"):
        begin(quick(batch_size=500), tmp_path)
    assert caplog.text.count("random weights") == 1
    assert "one step an epoch: 180 training samples in batches of 180" in caplog.text


def test_a_run_says_what_came_out():
    rows = [
        {"task": f"d-{share}", "channels": share / 100, "validation": right, "test": 0.9, "bytes": 1000, "seconds": 9.0,
         "steps": 10}
        for share, right in ((100, 0.95), (50, 0.945), (10, 0.6))
    ]  # fmt: skip
    results = Results(Path("runs/d"), rows)
    assert results.best["task"] == "d-50"  # a point below the best is as good; nothing is chosen by test samples
    text = str(results)
    for part in (
        "came out  d-50: 90.0% right (test) with 50.0%",
        "cost      9 s, 10 steps; 1 kB",
        "spalier eval runs/d",
    ):
        assert part in text


# sizes of images


@pytest.mark.parametrize(("side", "expected"), [(20, 20), (64, 64), (90, 96), (300, 224)])
def test_small_images_are_not_blown_up(side, expected, tmp_path):
    from PIL import Image

    for kind, color in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        (tmp_path / kind).mkdir()
        for number in range(3):
            Image.new("RGB", (side + 9, side), color).save(tmp_path / kind / f"{number}.png")
    assert open_data(f"folder:{tmp_path}").shape == (3, expected, expected)
    assert open_data(f"folder:{tmp_path}", image_size=40).shape == (3, 40, 40)
