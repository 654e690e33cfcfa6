"""Commands on a run and its tasks; each result is held to what the library itself says."""

import hashlib
import json
import pickle
import shutil
import zipfile

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import tiny_cnn

from spalier.networks import open_network
from spalier.tasks import Store, Task

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def half(ran):
    return ran / "tasks/digits-50.task.safetensors"


@pytest.fixture(scope="module")
def base(ran):
    return open_network("resnet8", classes=10, seed=0, width=8)


def rows(ran):
    return json.loads((ran / "results.json").read_text())["rows"]


def test_train_says_what_came_out_and_goes_on(ran, spalier):
    called = spalier("train", "--folder", ran, "--json")
    assert called.code == 0
    assert called.json["rows"] == rows(ran)
    assert "digits-50" in spalier("train", "--folder", ran).out
    other = spalier("train", "--folder", ran, "--set", "seed=3")
    assert other.code == 1
    assert "other settings" in other.err


def test_train_from_a_file(tmp_path, spalier, ran):
    config = tmp_path / "config.yaml"
    config.write_text((ran / "run.yaml").read_text())
    called = spalier(
        "-q",
        "train",
        config,
        "--set",
        "densities=[]",
        "--set",
        "epochs=0",
        "--folder",
        tmp_path / "run",
        "--json",
    )
    assert called.code == 0, called.err
    assert [row["task"] for row in called.json["rows"]] == ["digits-100"]


def test_eval_finds_the_accuracy_of_the_run(ran, spalier):
    found = spalier("eval", ran, "--json").json["tasks"]
    assert [row["task"] for row in found] == ["digits-100", "digits-50"]
    for row, wanted in zip(found, rows(ran), strict=True):
        assert row["accuracy"] == pytest.approx(wanted["test"])
        assert row["loss"] == pytest.approx(wanted["test_loss"], abs=1e-4)
        assert row["recorded"] == pytest.approx(wanted["test"])
    assert "in the file" in spalier("eval", ran).out
    validation = spalier("eval", ran, "--part", "validation", "--json").json["tasks"]
    assert validation[0]["accuracy"] == pytest.approx(rows(ran)[0]["validation"])


def test_eval_away_from_its_run(half, ran, tmp_path, spalier):
    copy = tmp_path / half.name
    copy.write_bytes(half.read_bytes())
    assert spalier("eval", copy).code == 2
    assert "--base is missing" in spalier("eval", copy).err
    assert (
        "--data is missing" in spalier("eval", copy, "--base", "resnet8", "--option", "width=8", "--classes", "10").err
    )
    named = spalier(
        "eval",
        copy,
        "--base",
        "resnet8",
        "--option",
        "width=8",
        "--data",
        "digits",
        "--classes",
        "10",
        "--json",
    )
    assert named.json["tasks"][0]["accuracy"] == pytest.approx(rows(ran)[1]["test"])
    other = spalier("eval", copy, "--base", "resnet8", "--data", "digits")
    assert other.code == 1
    assert "base" in other.err


def test_code_in_a_runs_file_is_not_run_unasked(half, ran, tmp_path, spalier, monkeypatch):
    """A folder may come from elsewhere: what it names is only imported where the user names the folder."""
    place = tmp_path / "elsewhere"
    (place / "tasks").mkdir(parents=True)
    (place / "tasks" / half.name).write_bytes(half.read_bytes())
    settings = (ran / "run.yaml").read_text().replace("network: resnet8", "network: harmful:code")
    (place / "run.yaml").write_text(settings)
    (tmp_path / "harmful.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    called = spalier("eval", place / "tasks" / half.name)
    assert called.code == 2
    assert "made by code" in called.err


def test_list_info_verify(ran, half, spalier, tmp_path):
    listed = spalier("task", "list", ran / "tasks", "--json").json["tasks"]
    assert [(entry["name"], entry["bytes"]) for entry in listed] == [
        (name, (ran / f"tasks/{name}.task.safetensors").stat().st_size) for name in sorted(Store(ran / "tasks"))
    ]
    assert "a mix like these 2 tasks" in spalier("task", "list", ran).out
    shares = [entry["info"]["density"]["channels"] for entry in listed]
    assert shares == sorted(shares, reverse=True)
    info = spalier("task", "info", half, "--json").json
    assert info["learned"] == rows(ran)[1]["learned"]
    assert info["bytes"] == half.stat().st_size
    assert spalier("task", "verify", ran, "--base", ran).code == 0
    broken = tmp_path / "broken.task.safetensors"
    broken.write_bytes(half.read_bytes()[:-9])
    called = spalier("task", "verify", half, broken, "--json")
    assert called.code == 3
    assert [row["sound"] for row in called.json["tasks"]] == [True, False]
    assert called.json["tasks"][1]["code"]
    wrong = spalier("task", "verify", half, "--base", "resnet8", "--option", "width=8", "--classes", "7", "--json")
    assert wrong.json["tasks"][0]["code"] == "base-values"
    assert wrong.code == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cat.jpg", "is a JPEG image, expected a task file"),
        ("cat.png", "is a PNG image"),
        ("cat.webp", "such as a WebP image"),
        ("net.pt", "is a zip archive, as torch.save writes"),
        ("net.pkl", "is a pickle"),
        ("net.safetensors", "is safetensors of 15 tensors ("),
    ],
)
def test_what_is_no_task_is_called_what_it_is(name, words, spalier, tmp_path):
    path, net = tmp_path / name, tiny_cnn()
    if name.startswith("cat"):
        Image.new("RGB", (8, 8)).save(path)
    elif name.endswith("pkl"):
        path.write_bytes(pickle.dumps([1]))
    elif name.endswith("pt"):
        torch.save(net.state_dict(), path)
    else:
        save_file(net.state_dict(), path)
    called = spalier("task", "info", path)
    assert called.code == 1
    assert words in called.err
    assert str(path) in called.err
    assert "Task.save" not in called.err


def test_a_broken_file_of_a_run_leaves_the_others_alone(ran, spalier, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ran, copy)
    broken = copy / "tasks/digits-100.task.safetensors"
    broken.write_bytes(broken.read_bytes()[:-9])
    called = spalier("task", "verify", copy, "--base", copy, "--json")
    assert called.code == 3
    assert [row["sound"] for row in called.json["tasks"]] == [False, True]
    called = spalier("task", "info", broken)
    assert called.code == 1
    assert str(broken) in called.err


def test_tasks_of_several_runs_have_bases_of_their_own(ran, spalier, tmp_path):
    other = tmp_path / "other"
    given = ["--set", "densities=[]", "--set", "epochs=0", "--set", "seed=5", "--folder", other]
    assert spalier("-q", "train", ran / "run.yaml", *given).code == 0
    found = spalier("eval", ran, other, ran, "--json").json["tasks"]
    assert len(found) == 3
    wanted = json.loads((other / "results.json").read_text())["rows"][0]["test"]
    assert found[2]["accuracy"] == pytest.approx(wanted)


def test_settings_are_what_one_types(ran, spalier, tmp_path):
    given = ["--set", "classes=4,5,6", "--set", "name=123", "--set", "densities=[]", "--set", "epochs=0"]
    called = spalier("-q", "train", ran / "run.yaml", *given, "--folder", tmp_path / "r", "--json")
    assert called.code == 0, called.err
    assert called.json["rows"][0]["task"] == "123-100"
    assert spalier("task", "info", tmp_path / "r/tasks/123-100.task.safetensors", "--json").json["classes"] == [
        "4",
        "5",
        "6",
    ]


def test_what_is_read_is_not_written_over(half, spalier, tmp_path):
    before = half.read_bytes()
    assert spalier("task", "build", half, "-o", half).code == 2
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"x")
    called = spalier("task", "build", half, "--weights", weights, "-o", weights)
    assert called.code == 2
    assert "is what is read" in called.err
    assert (half.read_bytes(), weights.read_bytes()) == (before, b"x")


def test_weights_that_moved_are_named(ran, half, spalier, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ran, copy)
    settings = f"weights: gone.safetensors\n{(copy / 'run.yaml').read_text()}"
    (copy / "run.yaml").write_text(settings)
    called = spalier("eval", copy)
    assert called.code == 1
    assert "run.yaml names the weights gone.safetensors" in called.err
    assert "--weights" in called.err


def test_an_export_with_a_wrong_shape(half, spalier, tmp_path):
    called = spalier("task", "export", half, "-o", tmp_path / "n.pt2", "--shape", "1,8,8")
    assert called.code == 1
    assert "pass the --shape" in called.err
    assert "unexpected" not in called.err


def test_a_folder_of_runs_is_no_store(ran, spalier):
    called = spalier("task", "list", ran.parent)
    assert called.code == 1
    assert "is a folder of runs" in called.err


def test_one_task_is_meant(ran, spalier):
    called = spalier("task", "info", ran)
    assert called.code == 2
    assert "holds 2 tasks; name one of them" in called.err


@torch.no_grad()
def test_build(half, base, spalier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = Task.load(half).build(base)(IMAGES)
    assert spalier("task", "build", half, "-o", "small.pt").code == 0
    assert torch.equal(torch.load("small.pt", weights_only=False)(IMAGES), wanted)
    called = spalier("task", "build", half, "-o", "small.safetensors", "--json")
    tensors = load_file("small.safetensors")
    built = Task.load(half).build(base)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: tuple(t.shape) for name, t in built.state_dict().items()
    }
    assert called.json["parameters"] == sum(p.numel() for p in built.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2", "pte"])
@torch.no_grad()
def test_export(ending, half, base, spalier, tmp_path):
    out = tmp_path / f"net.{ending}"
    called = spalier("task", "export", half, "-o", out, "--json")
    assert called.code == 0, called.err
    assert called.json["difference"] < 1e-4
    assert out.stat().st_size == called.json["bytes"]
    wanted = Task.load(half).build(base)(IMAGES).numpy()
    sha256 = hashlib.sha256(half.read_bytes()).hexdigest()
    if ending == "onnx":
        model = onnx.load(out)
        assert max(each.version for each in model.opset_import if not each.domain) <= 20  # older runtimes too
        said = {prop.key: prop.value for prop in model.metadata_props}
        assert json.loads(said["spalier.classes"]) == list("0123456789")
        assert json.loads(said["spalier.preprocessing"]) == Task.load(half).info.preprocessing
        assert (said["spalier.task"], said["spalier.sha256"]) == ("digits-50", sha256)
        session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
        found = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    if ending == "pt2":
        extra = {"spalier.json": ""}
        loaded = torch.export.load(out, extra_files=extra)
        np.testing.assert_allclose(loaded.module()(IMAGES).numpy(), wanted, rtol=1e-3, atol=1e-4)
        assert json.loads(extra["spalier.json"])["sha256"] == sha256


def test_a_program_does_not_hold_the_sample_that_it_was_made_with(half, spalier, tmp_path):
    shape = (2, 3, 8, 8)
    assert spalier("task", "export", half, "-o", tmp_path / "net.pt2").code == 0
    torch.manual_seed(0)
    sample = torch.randn(shape).numpy().tobytes()
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        held = b"".join(archive.read(name) for name in archive.namelist())
    assert sample[:64] not in held
    program = torch.export.load(tmp_path / "net.pt2")
    assert program.example_inputs is None
    assert program.module()(torch.zeros(5, *shape[1:])).shape == (5, 10)
    # what torch.export does by itself, so that the search above is one that can find something
    torch.manual_seed(0)
    with_sample = torch.export.export(torch.nn.Flatten(), (torch.randn(shape),))
    torch.export.save(with_sample, tmp_path / "other.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2") as archive:
        assert any(sample[:64] in archive.read(name) for name in archive.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "executorch"])
@torch.no_grad()
def test_all_tasks_go_into_a_folder_with_a_manifest(to, ran, base, spalier, tmp_path):
    """Each is run by its runtime from what the manifest says alone."""
    called = spalier("-q", "task", "export", ran, "--to", to, "-o", tmp_path / "edge", "--json")
    assert called.code == 0, called.err
    manifest = json.loads((tmp_path / "edge/manifest.json").read_text())
    assert [entry["task"] for entry in manifest["tasks"]] == ["digits-100", "digits-50"]
    for entry in manifest["tasks"]:
        path = tmp_path / "edge" / entry["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        file = ran / "tasks" / f"{entry['task']}.task.safetensors"
        assert hashlib.sha256(file.read_bytes()).hexdigest() == entry["task_sha256"]
        assert entry["classes"] == list(map(str, range(10)))
        assert entry["metrics"]["accuracy"] > 0
        image = torch.randn(1, *entry["input"][1:])
        wanted = Task.load(file).build(base)(image)
        if to == "onnx":
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: image.numpy()})[0])
        else:
            from executorch.runtime import Runtime

            (found,) = Runtime.get().load_program(path).load_method("forward").execute([image])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_folder_of_exports_says_what_cannot_be(ran, spalier, tmp_path):
    (tmp_path / "bad.task.safetensors").write_bytes(b"garbage")
    called = spalier("task", "export", tmp_path, "--base", ran, "--to", "onnx", "-o", tmp_path / "edge", "--json")
    assert called.code == 3
    (entry,) = json.loads((tmp_path / "edge/manifest.json").read_text())["tasks"]
    assert entry["error"].startswith("truncated")
    assert "pass --to" in spalier("task", "export", "a", "b", "-o", "x.onnx").err


def test_an_export_that_computes_something_else_is_not_written(half, spalier, tmp_path, monkeypatch):
    real = torch.export.load
    monkeypatch.setattr(
        "torch.export.load",
        lambda path: type("P", (), {"module": lambda self: lambda x: real(path).module()(x) + 1})(),
    )
    called = spalier("task", "export", half, "-o", tmp_path / "net.pt2")
    assert called.code == 1
    assert "differ from PyTorch's" in called.err
    assert not (tmp_path / "net.pt2").exists()


def test_files_that_cannot_be_written(half, spalier, tmp_path):
    assert "expected one that ends in .onnx, .pt2, .pte" in spalier("task", "export", half, "-o", "net.zip").err
    called = spalier("task", "build", half, "-o", tmp_path / "absent" / "small.pt")
    assert called.code == 2
    assert "there is no folder" in called.err


def test_bench(ran, half, spalier):
    called = spalier(
        "bench", ran, half, "--backends", "eager", "--batch", "2", "--rounds", "6", "--threads", "1", "--json"
    )
    assert called.code == 0, called.err
    assert {timing["network"] for timing in called.json["timings"]} == {"base", "digits-50"}
    assert called.json["machine"]["threads"] == 1


def test_report_and_figures(ran, spalier, tmp_path):
    called = spalier("report", ran, "-o", tmp_path / "r.html", "--figures", tmp_path / "f", "--json")
    assert called.code == 0, called.err
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert {path.rpartition(".")[2] for path in called.json["figures"]} == {"svg", "png", "csv"}


def test_trace(spalier, base):
    from spalier.tracing import trace

    called = spalier("trace", "resnet8", "--shape", "3,8,8", "--option", "width=8", "--json")
    assert called.json == json.loads(json.dumps(trace(base, torch.zeros(2, 3, 8, 8)).to_dict()))
    assert "layer1.0.conv1" in spalier("trace", "resnet8", "--shape", "3,8,8").out


@pytest.mark.slow
def test_sweep_and_a_run_of_it_that_fails(ran, spalier, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text((ran / "run.yaml").read_text())
    quick = ["--set", "densities=[]", "--set", "epochs=0", "--threads", "1"]
    called = spalier("sweep", config, *quick, "--over", "rank=1,2", "--folder", tmp_path / "s", "--json")
    assert called.code == 0, called.err
    assert [row["rank"] for row in called.json["rows"]] == [1, 2]
    assert "--over is missing" in spalier("sweep", config, "--folder", tmp_path / "t").err


def test_a_checkpoint_becomes_a_task(base, tmp_path, spalier):
    torch.manual_seed(0)
    state = {k: v + 0.02 * torch.rand_like(v) if v.is_floating_point() else v for k, v in base.state_dict().items()}
    torch.save(state, tmp_path / "tuned.pth")
    torch.save(base.state_dict(), tmp_path / "base.pth")
    out = tmp_path / "tuned.task.safetensors"
    network = ("--base", "resnet8", "--classes", 10, "--weights", tmp_path / "base.pth", "--option", "width=8")
    command = ("task", "from-checkpoint", tmp_path / "tuned.pth", *network, "-o", out, "--code", "spdelta-2bit")
    made = spalier(*command, "--data", "digits", "--samples", 64, "--json")
    assert made.code == 0, made.err
    assert made.json["bytes"] == out.stat().st_size
    task = Task.load(out)
    assert (task.name, task.info.classes[:2]) == ("tuned", ("0", "1"))
    assert task.info.metrics == made.json["metrics"]
    assert set(task.info.metrics) == {"accuracy", "accuracy of the checkpoint"}
    assert {row["code"] for row in made.json["layers"]} == {"SPDelta(bits=2)"}
    wanted = open_network("resnet8", classes=10, width=8)
    wanted.load_state_dict(state)
    assert "output missing" in spalier(*command[:-1], "spdelta-8bit").out  # without data, so norms stay as they are
    torch.testing.assert_close(Task.load(out).build(base)(IMAGES), wanted(IMAGES), rtol=0.02, atol=0.02)
    for wrong, words in (
        (command[:3] + command[-4:], "Missing option '--base'"),
        ((*command[:-1], "zip"), "expected names"),
    ):
        called = spalier(*wrong)
        assert called.code in (1, 2)
        assert words in called.err
    assert "ends in .task.safetensors" in spalier(*command[:-4], "-o", tmp_path / "a.zip").err


def test_loras_come_and_go(base, tmp_path, spalier):
    import spalier as sp

    net = open_network("resnet8", classes=10, width=8)
    net.load_state_dict(base.state_dict())
    sp.attach_(net, sp.SPLoRA(rank=2, init_range=0.1), head="fc")
    wanted = net.eval()(IMAGES)
    Task.of(net, "lora").save(tmp_path / "lora.task.safetensors")
    torch.save(base.state_dict(), tmp_path / "base.pth")
    assert spalier("task", "to-peft", tmp_path / "lora.task.safetensors", tmp_path / "peft").code == 0
    network = ("--base", "resnet8", "--classes", 10, "--weights", tmp_path / "base.pth", "--option", "width=8")
    back = tmp_path / "back.task.safetensors"
    called = spalier("task", "from-peft", tmp_path / "peft", *network, "-o", back, "--json")
    assert called.code == 0, called.err
    torch.testing.assert_close(Task.load(back).build(base)(IMAGES), wanted, rtol=1e-4, atol=1e-5)
