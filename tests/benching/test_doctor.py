"""What works here, by trying it: trials that are missing, broken, crash, hang or talk too much; the real ones once."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from spalier.doctor import Entry, Examination, examination, examine, probes
from spalier.doctor.catalogue import PROBES, Probe
from spalier.errors import ConfigError

MENDING = "pip install thing"


def trial(code, name="thing", **options):
    return Probe(
        name=name, needed_for="tests", remedy=MENDING, command=(sys.executable, "-c", code), **options
    )


def found_by(code, **options):
    timeout = options.pop("timeout", 30)
    return examine(probes=[trial(code, **options)], timeout=timeout).entry("thing")


def told(**values):
    return f"print({probes.MARK + json.dumps(values)!r})"


def named(name):
    return next(probe for probe in PROBES if probe.name == name)


def test_what_works_says_so_and_needs_nothing():
    entry = found_by(told(state="works", version="1.2", detail="runs"))
    assert entry == Entry(name="thing", state="works", needed_for="tests", version="1.2", detail="runs")


def test_a_crash_is_an_entry():
    entry = found_by("import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    assert entry.state == "broken"
    assert entry.detail == "it crashed (SIGSEGV): so far"
    assert entry.remedy == "pip install --force-reinstall thing"


def test_an_end_without_a_word_is_an_entry():
    assert found_by("raise SystemExit(7)").detail == "it ended with exit code 7"


def test_what_hangs_is_ended_with_its_children(tmp_path):
    note = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(note)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    entry = found_by(code, timeout=3)
    assert entry.state == "broken"
    assert entry.detail == "it did not come back within 3 s"
    assert is_gone(int(note.read_text()))


def is_gone(pid):
    """Ended; a child that nobody has waited for yet counts."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_what_talks_a_lot_does_not_stop():
    code = f"import sys; sys.stdout.write('x' * 5_000_000 + '\\n'); {told(state='works')}; sys.stderr.write('bye')"
    assert found_by(code).state == "works"


def test_an_interrupt_passes_and_leaves_no_process(tmp_path):
    note = tmp_path / "pid"
    slow = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    waits = f"""
import time, pathlib
while not pathlib.Path({str(note)!r}).exists() or not pathlib.Path({str(note)!r}).read_text():
    time.sleep(0.01)
"""

    def interrupt(entry):
        if entry.name == "quick":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(
            probes=[trial(slow, "slow"), trial(waits + told(state="works"), "quick")],
            together=2,
            progress=interrupt,
        )
    assert is_gone(int(note.read_text()))


@pytest.mark.parametrize(
    ("source", "state", "detail", "remedy"),
    [
        (
            "raise ImportError('built for another world')",
            "broken",
            "ImportError: built for another world",
            "reinstall",
        ),
        (
            "import no_such_module",
            "broken",
            "it needs no_such_module, which is not installed",
            "install no_such_module",
        ),
        (
            "import os; os.abort()",
            "broken",
            "it crashed (SIGABRT)",
            "pip install --force-reinstall spalier[train]",
        ),
        (
            "raise ModuleNotFoundError(name='yaml')",
            "missing",
            "yaml is not installed",
            "pip install spalier[train]",
        ),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "broken",
            "RuntimeError: operator torchvision::nms does not exist",
            "torchvision was built for another PyTorch",
        ),
    ],
)
def test_packages_that_are_not_as_they_should_be(tmp_path, source, state, detail, remedy):
    (tmp_path / "yaml.py").write_text(source)
    entry = examine(probes=[named("pyyaml")], environment={**os.environ, "PYTHONPATH": str(tmp_path)}).entry(
        "pyyaml"
    )
    assert entry.state == state
    assert entry.detail.startswith(detail)
    assert remedy in entry.remedy


def test_a_package_that_computes_something_else_is_broken(tmp_path):
    (tmp_path / "yaml.py").write_text("__version__ = '1'\nsafe_dump = safe_load = lambda value: None")
    entry = examine(probes=[named("pyyaml")], environment={**os.environ, "PYTHONPATH": str(tmp_path)}).entry(
        "pyyaml"
    )
    assert (entry.state, entry.detail) == ("broken", "RuntimeError: what was written does not come back")


def test_no_fonts_are_a_fault_of_their_own(tmp_path):
    (tmp_path / "resvg_py.py").write_text("svg_to_bytes = lambda svg_string: b'\\x89PNG'")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    entry = examine(probes=[named("resvg_py")], environment=environment).entry("resvg_py")
    assert entry.state == "broken"
    assert "no text" in entry.detail
    assert entry.remedy.startswith("install a font")


def test_what_takes_long_is_tried_only_if_there_is_time():
    slow = trial(told(state="works"), slow=True, packages=("numpy",))
    entry = examine(probes=[slow]).entry("thing")
    assert entry.state == "not tried"
    assert entry.version
    assert examine(probes=[slow], quick=False).entry("thing").state == "works"
    absent = trial(told(state="works"), slow=True, packages=("no-such-distribution",))
    assert examine(probes=[absent]).entry("thing").state == "missing"


def test_a_program_that_is_not_there_is_missing():
    for quick in (True, False):
        entry = examine(
            probes=[trial(told(state="works"), programs=("no-such-program",))], quick=quick
        ).entry("thing")
        assert (entry.state, entry.detail) == ("missing", "there is none of no-such-program")
    assert found_by(told(state="works"), programs=("no-such-program", "sh")).state == "works"


def test_only_what_everything_needs_decides():
    optional = trial("raise SystemExit(1)", "optional")
    needed = trial("raise SystemExit(1)", "needed", required=True)
    assert examine(probes=[optional]).is_sound
    found = examine(probes=[optional, needed])
    assert not found.is_sound
    assert str(found).endswith("not sound: needed broken")
    assert {probe.name for probe in PROBES if probe.required} == {"torch", "numpy", "safetensors"}


def test_the_data_folder_is_the_one_that_is_named(tmp_path):
    def looked_at(folder):
        return examine(probes=[], environment={"SPALIER_DATA": str(folder)}).entry("data folder")

    assert looked_at(tmp_path).detail == f"{tmp_path}: empty"
    for name in "abcdefgh":
        (tmp_path / name).mkdir()
    assert looked_at(tmp_path).detail == f"{tmp_path}: a, b, c, d, e, f, ..."
    absent = looked_at(tmp_path / "absent")
    assert absent.state == "missing"
    assert "SPALIER_DATA" in absent.remedy


def test_little_room_is_said(monkeypatch):
    monkeypatch.setattr(examination, "_available", lambda: 1 << 20)
    memory = examine(probes=[]).entry("memory")
    assert (memory.state, memory.detail) == ("broken", "0.0 GiB available")
    monkeypatch.setattr(examination, "_available", lambda: None)
    assert examine(probes=[]).entry("memory").state == "not tried"


def test_entries_keep_their_order_and_are_plain_data():
    seen = []
    found = examine(probes=[trial(told(state="works"), n) for n in "ba"], together=2, progress=seen.append)
    assert [e.name for e in found.entries] == ["Python", "b", "a", "disk space", "memory", "data folder"]
    assert {e.name for e in seen} == {e.name for e in found.entries}
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["is_sound"] is True
    assert plain["entries"][1]["state"] == "works"
    assert "channels-last" in plain["notes"][0]
    with pytest.raises(KeyError, match="was not looked at"):
        found.entry("c")


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"together": 0}])
def test_options_that_do_not_do(options):
    with pytest.raises(ConfigError, match="expected more than 0 seconds"):
        examine(probes=[], **options)


def test_every_trial_is_in_the_catalogue():
    assert [probe.command[-1] for probe in PROBES] != []
    assert {probe.command[-1] for probe in PROBES} == set(probes.PROBES)
    assert len({probe.name for probe in PROBES}) == len(PROBES)


def check_sound(found):
    assert isinstance(found, Examination)
    assert found.is_sound, str(found)
    assert {e.state for e in found.entries} <= {"works", "missing", "broken", "not tried"}
    assert all(entry.remedy for entry in found.entries if entry.state in ("missing", "broken"))
    assert "what" in str(found).splitlines()[0]


def test_real_trials_that_take_no_time():
    light = {"torch", "numpy", "safetensors", "Pillow", "pyyaml", "tqdm", "tensorboard", "file locks"}
    found = examine(probes=[probe for probe in PROBES if probe.name in light])
    check_sound(found)
    assert {e.name: e.state for e in found.entries if e.name in light} == dict.fromkeys(light, "works")


@pytest.mark.slow
def test_a_whole_examination():
    found = examine()
    check_sound(found)
    for name in ("torch", "scikit-learn", "accelerate", "transformers", "onnx", "onnxruntime", "ray"):
        assert found.entry(name).state == "works", found.entry(name)
