"""README and docs are executed: every Python block and every command, in the order of the page, in an empty folder."""

import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from fake_hub import FakeHub
from huggingface_hub import constants

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"docs/data.md": "tests/data", "docs/integrations.md": "tests/integrations"}
"""Pages whose Python needs data of its own, and runs in tests there."""
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if re.search(r"^```(python|sh)$", path.read_text("utf-8"), re.MULTILINE)
)
LONG = (
    "README.md",
    "docs/cli.md",
    "docs/criteria.md",
    "docs/howto/checkpoints.md",
    "docs/howto/criterion.md",
    "docs/howto/deploy.md",
    "docs/howto/edge.md",
    "docs/howto/images.md",
    "docs/howto/machines.md",
    "docs/howto/many-tasks.md",
    "docs/howto/network.md",
    "docs/howto/serve.md",
    "docs/report.md",
    "docs/runs.md",
    "docs/tutorial.md",
)
"""Pages that take more than four seconds; their tests are slow ones."""
DEMO = ("spalier demo", "python3 dev.py demo")
"""A minute each time: tests/test_demo.py runs it once, and says that dev.py runs the same."""
ONLY_ELSEWHERE = {
    r"pip install '?(spalier|\.)(\[[a-z,]+\])?'?": "an installation; the extras are looked up",
    r"torchrun .*train\.py": "real torchrun with two processes is in tests/runs/test_processes.py",
    r"accelerate launch .*train\.py": "so is accelerate",
    r"cat train\.py": "a file of the reader's",
    r"spalier (serve|predict) .*": "a service, or images of the reader's; tests/serve runs both",
    r"curl .*": "asks such a service",
    r"docker .*": "needs Docker; tests/serve/test_container.py reads the Dockerfile",
    r"(import|sp\.).*": "which is shown",
    r"spalier train --network hf:google/\S+ .*": "downloads from the hub",
    r"spalier train .*--weights resnet50\.pth .*": "weights that the reader downloads",
    r"spalier train .*--network timm:resnet18 --pretrained .*": "weights that timm downloads",
    r'python -c "import torchvision as tv; .*"': "where they are",
    r"RAY_ADDRESS=auto spalier sweep .*--place ray": "a cluster; a local Ray is in tests/runs/test_sweep.py",
    r".*_SPALIER_COMPLETE=[a-z]+_source spalier.*": "for a shell; tests/cli/test_command_line.py completes a word",
    r"python3 dev\.py [a-z-]+": "looked up in dev.py",
    r"python3 dev\.py paper .*": "hours; its smallest cells are in tests/experiments",
}
"""Commands of ```console blocks, and why they are not run here."""
QUIET = ["ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"]  # by a library that a page shows


def blocks(page):
    """Pairs of a language and what its block holds."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```(python|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub that commands talk to."""
    with FakeHub() as served:
        for name, value in {
            "ENDPOINT": served.address,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HUGGINGFACE_CO_URL_TEMPLATE": served.address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
        yield served


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES]
)
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch, hub):
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for language, block in blocks(page):  # each goes on where the one before it ended
        if language == "python" and page not in ELSEWHERE:
            exec(compile(block, page, "exec"), names)
        elif language == "sh":
            for line in block.splitlines():
                run(line, monkeypatch)


def run(line, monkeypatch):
    """One command of a page, in this process."""
    from spalier.cli.main import main

    line = line.partition("  #")[0].strip()
    if line in DEMO:
        return
    if re.fullmatch(r"python3 dev\.py ([a-z-]+)", line):
        assert f'    "{line.split()[-1]}": (' in (ROOT / "dev.py").read_text()
        return
    program, *arguments = shlex.split(line)
    assert program == "spalier", line
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(arguments) == 0, line
    if arguments[0] in ("train", "sweep"):
        assert_learned(Path(arguments[arguments.index("--folder") + 1]), line)


def assert_learned(folder, line):
    """What a reader would want of a command: every network, small ones too, is nearer to all right than to chance."""
    found = [json.loads(path.read_text()) for path in folder.rglob("blocks/??*.json")]
    blocks = [block for block in found if "row" in block]
    assert blocks, line
    for block in blocks:
        chance = 1 / len(block["classes"])
        assert block["row"]["test"] > (1 + chance) / 2, (line, block["row"])


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_is_known(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for language, block in blocks(page):
        if language != "console":
            continue
        for line in block.splitlines():
            command = line.removeprefix("$ ").partition("  #")[0].strip()
            assert any(re.fullmatch(known, command) for known in ONLY_ELSEWHERE), command
            for named in re.findall(r"\[([a-z,]+)\]", command if command.startswith("pip") else ""):
                assert set(named.split(",")) <= set(extras)
