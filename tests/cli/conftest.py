import pytest
from calling import call

SETTINGS = (
    "epochs=1",
    "epochs_per_prune=1",
    "max_train_samples=120",
    "densities=0.5",
    "score_samples=32",
    "recovery_samples=32",
    "network_options={width: 8}",
    "trackers=[]",
)


@pytest.fixture
def spalier(capsys):
    return lambda *arguments: call(capsys, *arguments)


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """A run that the command line has made, once for all tests."""
    from spalier.cli.main import main

    folder = tmp_path_factory.mktemp("cli") / "run"
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    given = ["--data", "digits", "--network", "resnet8", "--rank", "2"]
    assert main(["-q", "train", *given, *options, "--folder", str(folder)]) == 0
    return folder
