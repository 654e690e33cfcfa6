"""Settings: what they refuse, what recipes make of them, and that files keep them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spalier import TransferPruning
from spalier.errors import ConfigError
from spalier.runs.recipes import RATES, RECIPES


def test_the_papers_recipe():
    config = TransferPruning(recipe="paper", network="resnet50", data="torchvision:CIFAR10")
    assert (config.epochs, config.epochs_per_prune, config.epochs_of(19)) == (30, 20, 20)
    assert config.targets() == tuple(round(1 - 0.05 * i, 6) for i in range(1, 20))
    assert (config.optimizer, config.momentum, config.weight_decay, config.lr_schedule) == (
        "sgd",
        0.9,
        5e-4,
        "step",
    )
    assert config.initial_lr == 0.01
    assert config.replace(batch_size=64).initial_lr == 0.0025
    assert config.network_options == {"stem": "cifar"}
    assert (config.writers, config.criterion, config.rank, config.recovery) == ("free", "taylor", 8, "none")
    large = config.replace(data="torchvision:Flowers102")
    assert (large.epochs, large.epochs_per_prune, large.network_options) == (100, 50, {})


def test_settings_win_over_recipes():
    for recipe in RECIPES:
        config = TransferPruning(recipe=recipe, epochs=3, lr=0.5, densities=(0.4,))
        assert (config.epochs, config.lr, config.targets()) == (3, 0.5, (0.4,))
    assert TransferPruning(final_density=0.1, schedule="agp", prune_steps=2).targets() == (0.2125, 0.1)
    assert TransferPruning(method="fine-pruning").lr < TransferPruning(method="splora").lr


def test_changes_follow_the_recipe_again():
    config = TransferPruning(recipe="fast", epochs=3)
    assert config.replace(recipe="paper").epochs_per_prune == RECIPES["paper"]["epochs_per_prune"]
    assert config.replace(recipe="paper").epochs == 3
    assert config.replace(data="torchvision:CIFAR100").name == "CIFAR100"


def test_what_was_loaded_follows_the_recipe_again(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(TransferPruning(recipe="paper", data="torchvision:CIFAR10", epochs=3).to_yaml())
    loaded = TransferPruning.load(file)
    assert loaded.replace(densities=(0.5,)).targets() == (0.5,)
    assert loaded.replace(data="torchvision:Flowers102").epochs_per_prune == 50
    assert loaded.replace(data="torchvision:Flowers102").network_options == {}
    assert loaded.replace(data="digits").name == "digits"
    assert loaded.replace(recipe="fast").optimizer == "adamw"
    assert loaded.replace(recipe="fast").epochs == 3
    file.write_text(TransferPruning().to_yaml())
    assert TransferPruning.load(file).replace(method="fine-pruning").lr == RATES["fine-pruning"]
    assert TransferPruning.load(file).replace(final_density=0.2).targets()[-1] == 0.2


def test_settings_are_copies():
    options = {"cap": True}
    config = TransferPruning(adapter_options=options)
    options["cap"] = False
    config.given["adapter_options"]["cap"] = False
    assert config.adapter_options == config.replace(seed=1).adapter_options == {"cap": True}


def test_numbers_and_paths_of_other_libraries(tmp_path):
    config = TransferPruning(lr=np.float32(0.5), seed=np.int64(3), weights=tmp_path / "w.pth")
    assert (config.lr, config.seed, config.weights) == (0.5, 3, str(tmp_path / "w.pth"))


BAD = [
    ({"seed": 2**63}, r"less than 2\*\*63"),
    ({"name": "n" * 95}, "name:"),
    ({"rank": "8"}, "rank is '8', expected a whole number or a number"),
    ({"lr": 0}, "lr is 0.0, expected more than 0"),
    ({"lr": "quick"}, "lr is 'quick', expected a number"),
    ({"lr": float("nan")}, "lr is nan"),
    ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
    ({"batch_size": 2.5}, "batch_size is 2.5, expected a whole number"),
    ({"epochs": -1}, "epochs is -1, expected at least 0"),
    ({"epochs": True}, "epochs is True"),
    ({"method": "qlora"}, "method is 'qlora', expected 'splora' or"),
    ({"criterion": "vibes"}, "criterion is 'vibes', expected one of weight"),
    ({"criterion_options": {"lateral": True}}, "criterion_options do not fit taylor"),
    ({"validation_split": 1.0}, r"validation_split is 1.0, expected a number in \[0, 1\)"),
    ({"ema_decay": 1.0}, r"ema_decay is 1.0, expected a number in \(0, 1\)"),
    ({"densities": (0.3, 0.5)}, "expected falling numbers"),
    ({"densities": (0.5, 1.5)}, "expected falling|above 0 and below 1"),
    ({"densities": (0.5,), "final_density": 0.1}, "densities is given, and schedule or final_density too"),
    ({"budget": "bytes"}, "densities has to list them"),
    ({"budget": "bytes", "densities": (0.5,)}, "whole numbers of bytes"),
    ({"select_options": {"channels": 0.5}}, "select_options has 'channels'"),
    ({"network_options": {"classes": 3}}, "network_options has 'classes'"),
    ({"adapter_options": {"kernal": "full"}}, "adapter_options do not fit splora"),
    ({"method": "fine-pruning", "adapter_options": {"cap": True}}, "adapter_options do not fit fine-pruning"),
    ({"labels": False}, "expected a teacher"),
    ({"labels": False, "teacher": "self"}, "together with start_task"),
    ({"keep_best": True, "validation_split": 0.0}, "needs validation_split above 0"),
    ({"name": "../elsewhere"}, "name:"),
    ({"network_options": {"f": print}}, "network_options is"),
    ({"classes": "abc"}, "classes is 'abc', expected a list of text or nothing"),
    ({"rank": 0}, "rank"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=lambda value: str(value)[:40])
def test_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TransferPruning(**settings)


def test_names_that_are_none(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("rnak: 8\n")
    with pytest.raises(ConfigError, match=r"run.yaml has 'rnak', which is no setting; did you mean 'rank'\?"):
        TransferPruning.load(file)
    with pytest.raises(ConfigError, match="no setting"):
        TransferPruning().replace(learning_rate=1)
    with pytest.raises(TypeError):
        TransferPruning("digits")  # keywords only


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "rank: [", "no YAML"),
        ("a.yaml", "- rank", "holds a list"),
        ("a.yaml", "1: 2", "holds a dict"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "no YAML"),
        ("a.toml", "rank = ", "no TOML"),
        ("a.TOML", "rank: 3", "no TOML"),
        ("a.yaml", "rank: 3\nrank: 4", "'rank' is there twice"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        TransferPruning.load(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        TransferPruning.load(tmp_path / "missing.yaml")


def test_toml_and_yaml_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(
        'data = "torchvision:CIFAR10"\nlr = 1e-3\ndensities = [0.5, 0.25]\n[adapter_options]\ncap = true\n'
    )
    (tmp_path / "a.yaml").write_text(
        "data: torchvision:CIFAR10\nlr: 1e-3\ndensities: [0.5, 0.25]\nadapter_options: {cap: true}\n"
    )
    expected = TransferPruning(
        data="torchvision:CIFAR10", lr=1e-3, densities=(0.5, 0.25), adapter_options={"cap": True}
    )
    assert TransferPruning.load(tmp_path / "a.toml") == TransferPruning.load(tmp_path / "a.yaml") == expected


@given(
    recipe=st.sampled_from(list(RECIPES)),
    rate=st.floats(1e-8, 10),
    seed=st.integers(0, 2**40),
    classes=st.none() | st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3),
    densities=st.lists(st.floats(0.01, 0.99), max_size=4, unique=True),
    smoothing=st.floats(0, 0.9),
)
def test_what_is_written_is_read(tmp_path_factory, recipe, rate, seed, classes, densities, smoothing):
    config = TransferPruning(
        recipe=recipe,
        lr=rate,
        seed=seed,
        classes=None if classes is None else tuple(classes),
        densities=tuple(sorted(densities, reverse=True)),
        label_smoothing=smoothing,
    )
    file = tmp_path_factory.mktemp("settings") / "run.yaml"
    file.write_text(config.to_yaml(), "utf-8")
    assert TransferPruning.load(file) == config
