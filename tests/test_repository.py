"""What holds of the repository as a whole: the direction of imports, the public surface, the cost of an import."""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import spalier

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "spalier"

# Each module may import what stands above it and nothing else of ours.
LAYERS = [
    {"errors", "text"},
    {"models", "distributed", "files", "timing", "inputs"},
    {"adapters"},
    {"structure"},
    {"counting"},
    {"pruning"},
    {"noting"},
    {"tracing"},
    {"criteria"},
    {"budget"},
    {"selecting"},
    {"scheduling"},
    {"tasks", "networks", "data"},
    {"refitting", "predicting"},
    {"runs", "integrations", "benching"},
    {"adapting"},
    {"reporting", "serve"},
    {"cli"},
    {"__main__"},
]
_METHODS = "a method of Task or Store, which needs more than its file does"
UPWARDS = {
    (
        "adapters/attach.py",
        "spalier.tracing",
    ): "attach_(net, adapter, example=x) traces, where it is asked to",
    ("tasks/task.py", "spalier.tasks.extract"): _METHODS,
    ("tasks/task.py", "spalier.tasks.rewrite"): _METHODS,
    ("tasks/task.py", "spalier.tasks.base"): _METHODS,
    ("tasks/task.py", "spalier.tasks.build"): _METHODS,
    ("tasks/task.py", "spalier.tasks.apply"): _METHODS,
    ("tasks/task.py", "spalier.tasks.store"): _METHODS,
    ("tasks/task.py", "spalier.refitting"): _METHODS,
    ("tasks/task.py", "spalier.refitting.finetuned"): _METHODS,
    ("tasks/task.py", "spalier.refitting.peft"): _METHODS,
    ("tasks/store.py", "spalier.tasks.hub"): _METHODS,
}
ADAPTER_LAYERS = [{"geometry", "codes"}, {"kinds"}, {"forward", "targets"}, {"attachment", "calls"}, {"attach"}]
STRUCTURE_LAYERS = [
    {"labels"},
    {"recording"},
    {"graph"},
    {"movement", "arithmetic"},
    {"streams"},
    {"sites"},
    {"structure"},
]
PRUNING_LAYERS = [
    {"modules", "regression", "plan"},
    {"recovery"},
    {"verify"},
    {"prune"},
]
CRITERIA_LAYERS = [{"probe", "relevance"}, {"criterion"}, {"lrp"}, {"score"}]
TASKS_LAYERS = [
    {"format", "memory"},
    {"rows"},
    {"table", "numbers", "dry_run"},
    {"task"},
    {"base"},
    {"build", "extract"},
    {"apply", "store", "rewrite"},
    {"hub", "switcher"},
]
REFITTING_LAYERS = [{"approximate"}, {"measure", "spend"}, {"refit"}, {"finetuned"}, {"peft"}]
RUNS_LAYERS = [
    {"narrow", "settings_files"},
    {"recipes"},
    {"settings"},
    {"checkpoint"},
    {"processes"},
    {"learning"},
    {"engine"},
    {"run"},
    {"sweep"},
]
DATA_LAYERS = [{"data"}, {"images", "loader"}, {"texts"}, {"sources"}]
INTEGRATIONS_LAYERS = [{"lightning", "transformers"}]
REPORTING_LAYERS = [{"draw", "load"}, {"figures"}, {"comparisons"}, {"page"}]
SERVE_LAYERS = [{"service"}, {"web"}, {"cluster"}]
CLI_LAYERS = [
    {"console", "demo"},
    {"opening"},
    {"serving"},
    {"commands", "task_commands"},
    {"main"},
]
PACKAGES = {
    "adapters": ADAPTER_LAYERS,
    "structure": STRUCTURE_LAYERS,
    "pruning": PRUNING_LAYERS,
    "criteria": CRITERIA_LAYERS,
    "tasks": TASKS_LAYERS,
    "refitting": REFITTING_LAYERS,
    "runs": RUNS_LAYERS,
    "data": DATA_LAYERS,
    "integrations": INTEGRATIONS_LAYERS,
    "serve": SERVE_LAYERS,
    "cli": CLI_LAYERS,
    "reporting": REPORTING_LAYERS,
}


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "spalier":
            found |= {f"spalier.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
            if node.module.removeprefix("spalier.") in PACKAGES:
                package = SOURCE.joinpath(*node.module.split(".")[1:])
                modules = [a.name for a in node.names if (package / f"{a.name}.py").exists()]
                found |= {f"{node.module}.{name}" for name in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("spalier.") and name != "spalier.__version__"}


def level(layers: list[set[str]], name: str) -> int:
    return next(i for i, names in enumerate(layers) if name in names)


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_one_way(file):
    inside = file.relative_to(SOURCE)
    if inside.name == "__init__.py":
        return
    for name in imports_of(file):
        if (inside.as_posix(), name) in UPWARDS:
            continue
        parts = name.split(".")[1:]
        assert level(LAYERS, parts[0]) <= level(LAYERS, inside.parts[0].removesuffix(".py")), name
        if parts[0] == inside.parts[0] and parts[0] in PACKAGES and len(parts) > 1:
            layers = PACKAGES[parts[0]]
            assert level(layers, parts[1]) < level(layers, inside.stem), name


def public_surface() -> str:
    lines = []
    for module in (spalier, spalier.criteria, spalier.models, spalier.errors):
        names = getattr(module, "__all__", None) or [
            n
            for n, v in vars(module).items()
            if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
        ]
        lines += [
            line for name in sorted(names) for line in _describe(f"{module.__name__}.{name}", getattr(module, name))
        ]
    return "\n".join(lines) + "\n"


def _describe(name: str, value: object) -> list[str]:
    if inspect.ismodule(value):
        return [f"{name} (module)"]
    if not inspect.isclass(value):
        return [f"{name}{inspect.signature(value)}" if callable(value) else name]
    if issubclass(value, Exception):
        return [f"{name}({value.__base__.__name__}) code={value.code!r}"]
    members = [n for n, v in vars(value).items() if not n.startswith("_") and (callable(v) or isinstance(v, property))]
    return [f"{name}{inspect.signature(value)}", *(f"{name}.{member}" for member in sorted(members))]


def test_the_public_surface_is_the_golden_one():
    """Write it anew with ``python tests/test_repository.py`` when a change of the surface is meant."""
    assert public_surface() == (ROOT / "tests/golden/public_api.txt").read_text()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_needs_torch_numpy_and_safetensors_only():
    code = """
import sys, json, torch, numpy
torch_brought = set(sys.modules)
import spalier
for name in spalier.__all__:
    getattr(spalier, name)
print(json.dumps(sorted({m.split(".")[0] for m in set(sys.modules) - torch_brought})))
"""
    third_party = set(json.loads(run(code))) - set(sys.stdlib_module_names)
    assert third_party <= {"spalier", "safetensors", "numpy"}


def test_the_command_line_answers_before_torch_is_there():
    code = """
import sys
from spalier.cli.main import main
assert main(["--help"]) == 0
for command in ("demo", "train", "task", "bench", "report"):
    assert main([command, "--help"]) == 0
print("torch" in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False"


def test_importing_has_no_side_effects():
    code = """
import json, logging, os, random, torch, warnings
def state():
    return [torch.get_default_dtype().__repr__(), torch.initial_seed(), torch.get_num_threads(), len(warnings.filters),
            torch.backends.mha.get_fastpath_enabled(), len(logging.root.handlers), dict(os.environ), os.getcwd()]
before = state()
import spalier
for name in spalier.__all__:
    getattr(spalier, name)
print(json.dumps(before == state()))
"""
    assert json.loads(run(code)) is True


def test_every_installed_version_is_pinned():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {_canonical(name): version for name, version in pins.items()}
    needed, seen = ["spalier"], set()
    while needed:
        name = _canonical(needed.pop())
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        if name != "spalier":
            assert pins.get(name) == distribution.version.split("+")[0], name
        extras = ("", "cli", "test") if name == "spalier" else ("",)
        for requirement in map(Requirement, distribution.requires or []):
            if not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in extras):
                needed.append(requirement.name)
    assert {"torch", "numpy", "safetensors", "pytest", "ruff", "mypy"} <= seen


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_readmes_commands_are_those_of_dev_py():
    readme = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"python3 dev\.py (\w+)", readme))
    assert {"demo", "test"} <= commands <= set(_dev_commands())
    assert "python3 dev.py all" in (ROOT / ".ci/run").read_text()


def _dev_commands() -> list[str]:
    tree = ast.parse((ROOT / "dev.py").read_text())
    table = next(n for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "COMMANDS")
    return [key.value for key in table.value.keys]


def test_the_version_is_in_the_changelog_and_the_citation():
    assert f"## {spalier.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {spalier.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert importlib.metadata.version("spalier") == spalier.__version__


def test_the_measurements_of_a_training_step_are_the_committed_ones():
    specification = importlib.util.spec_from_file_location("step", ROOT / "benchmarks/training_step.py")
    benchmark = sys.modules["step"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    report = json.loads((ROOT / "benchmarks/results/training_step.json").read_text())
    page = (ROOT / "docs/performance.md").read_text()
    assert benchmark.markdown(report) in page
    extra = json.loads((ROOT / "benchmarks/results/import_time.json").read_text())["extra"]
    assert f"{extra:.2f} s" in page


def test_the_figures_of_pruning_are_the_committed_ones():
    report = json.loads((ROOT / "benchmarks/results/structure.json").read_text())
    page = " ".join((ROOT / "docs/performance.md").read_text().split())  # wherever its lines break
    pruned = list(report["prune_speed"]["networks"].values())
    for name, row in report["trace_speed"]["networks"].items():
        assert f"| {name} | {row['medians']['export']:.2f} | {row['ratios']['trace : export']:.2f} |" in page
    for name in pruned[0]["ratios"]:
        assert all(f"{row['ratios'][name]:.2f}" in page for row in pruned), name


@pytest.mark.parametrize("file", sorted(ROOT.glob("src/**/*.py")), ids=lambda f: f.name)
def test_files_stay_short(file):
    assert len(file.read_text().splitlines()) <= 600


@pytest.mark.parametrize("file", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda f: f.name)
def test_what_a_machine_may_lack_comes_from_a_fixture(file):
    """``browser``, ``compiler``, ``fonts`` and ``shared`` of conftest skip, and are counted, where there is none."""
    if file != Path(__file__):
        text = file.read_text()
        assert not re.search(r"webdriver\.Chrome|\bchromium\b|SPALIER_SHARED|pytest\.skip\(", text)


def test_the_continuous_integration_skips_nothing_that_it_can_install():
    assert "--require browser --require fonts --require compiler" in (ROOT / ".ci/run").read_text()


if __name__ == "__main__":
    (ROOT / "tests/golden/public_api.txt").write_text(public_surface())
