"""Networks side by side: by a clock of our own, and each backend once for real."""

import copy
import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Clock, awaken_, tiny_cnn
from torch import nn

import spalier as sp
from spalier import benching
from spalier.adapters.attachment import attachment_of
from spalier.benching import BASE, Benchmark, Timing, bench, compare, verdict_of
from spalier.errors import ConfigError, ExampleError, TaskFileError

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK = {"rounds": 6, "seconds": 0.0, "batches": (1, 3), "backends": ("eager",)}


def task_of(base, name="small", keep=0.5, **options):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=IMAGE)
    structure = attachment_of(net).structure
    units = {s.name: range(max(1, int(s.size * keep))) for s in structure.streams}
    sp.prune_(awaken_(net), sp.Plan(structure, {key: list(value) for key, value in units.items()}))
    return sp.Task.of(net.eval(), name, **options)


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return tiny_cnn().eval()


@pytest.fixture(scope="module")
def task(base):
    return task_of(base, preprocessing={"size": 8})


# comparisons


def timing(network, seconds, batch=1, **options):
    return Timing(network, "eager", batch, tuple(seconds), **options)


def test_speed_ups_are_ratios_of_the_same_round():
    """A machine that is slow for some rounds is slow for both: medians of each would not tell, ratios do."""
    load = [1, 5, 1, 7, 1, 9, 1, 3]
    slow = timing(BASE, [3.0 * each for each in load], macs=100)
    fast = timing("a", [1.0 * each for each in load], macs=30)
    found = compare(slow, fast)
    assert (found.speedup, found.low, found.high) == (3.0, 3.0, 3.0)
    assert found.verdict == "faster"
    assert str(found) == "faster 3.00x (3.00-3.00x with 30% of the MACs)"


def test_what_is_not_faster_is_said_not_to_be():
    ratios = [0.97, 0.98, 1.0, 1.0, 1.01, 1.04]
    found = compare(timing(BASE, ratios, macs=100), timing("a", [1.0] * 6, macs=30))
    assert found.verdict == "no faster"
    assert str(found) == "no faster than 1.04x: 1.00x (0.97-1.04x although it has 30% of the MACs)"
    hardly = compare(timing(BASE, [1.01, 1.01, 1.02, 1.02, 1.03, 1.04]), timing("a", [1.0] * 6))
    assert str(hardly).startswith("not settled: 1.01-1.04x")  # all rounds say faster, by too little to be sure
    slower = compare(timing(BASE, [0.5] * 6, macs=100), timing("a", [1.0] * 6, macs=30))
    assert str(slower).startswith("slower 0.50x (0.50-0.50x")
    wild = compare(timing(BASE, [0.5, 1, 2, 3, 4, 5]), timing("a", [1.0] * 6))
    assert str(wild).startswith("not settled: 0.50-5.00x")
    assert wild.macs_share is None


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_verdicts_never_go_beyond_the_interval(one, other):
    low, high = sorted((one, other))
    verdict = verdict_of(low, high)
    if low <= 1 <= high:
        assert verdict in ("no faster", "not settled")
    if verdict == "faster":
        assert low > 1
    if verdict == "slower":
        assert high < 1
    if verdict == "no faster":
        assert low <= 1
        assert high <= 1.05


def test_what_was_not_measured_is_not_compared():
    good, bad = timing("a", [1.0] * 6), timing(BASE, (), problem="no compiler")
    assert str(compare(bad, good)) == "not measured: no base to compare with: no compiler"
    assert compare(timing(BASE, [1.0] * 6), timing("a", (), problem="broken")).reason == "broken"


# whole benchmarks

CLOCK = Clock()


class Ticking(nn.Sequential):
    """Takes ten seconds, and one more for each channel and sample."""

    def forward(self, x):
        CLOCK.now += 10 + self[0].weight.shape[0] * x.shape[0]
        return super().forward(x)


def test_a_benchmark_by_a_clock_of_known_relation():
    base = Ticking(*tiny_cnn()).eval()
    tasks = {"half": task_of(base, "a", 0.5), "least": task_of(base, "b", 0.1)}
    found = bench(base, tasks, IMAGE, clock=CLOCK, **QUICK)
    nets = {"base": base} | {name: task.build(base) for name, task in tasks.items()}
    for (name, net), batch in itertools.product(nets.items(), (1, 3)):
        row = found.timing(name, "eager", batch)
        seconds = 10 + net[0].weight.shape[0] * batch
        assert row.seconds == (seconds,) * 6
        assert (row.latency, row.throughput, row.ready_seconds) == (seconds, batch / seconds, seconds)
        assert row.macs == sp.count(net, IMAGE).macs
    assert found.comparison("half", "eager", 3).speedup == pytest.approx(34 / 22)
    assert found.comparison("least", "eager", 1).verdict == "faster"
    assert found.rounds == 6


def test_eager_for_real(base, task):
    lines = []
    found = bench(base, {"mine": task}, IMAGE, threads=1, progress=lines.append, **QUICK)
    assert isinstance(found, Benchmark)
    assert [t.network for t in found.timings] == ["base", "mine"] * 2
    assert all(len(t.seconds) == 6 and min(t.seconds) > 0 and not t.problem for t in found.timings)
    assert lines[0] == "eager, batch 1: base is made ready"
    shown = str(found)
    assert "samples/s" in shown
    assert str(found.comparison("mine", "eager", 3)) in shown
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["machine"]["torch"] == torch.__version__
    assert plain["machine"]["threads"] == 1
    assert [len(row["rounds"]) for row in plain["timings"]] == [6] * 4
    assert plain["comparisons"][0]["text"] == str(found.comparisons[0])


def test_compiled_for_real(base, task, compiler):
    """Many networks of one class, each compiled once: no cache of Dynamo's is shared, or overflows."""
    assert benching._obstacle("compiled", torch.device("cpu")) == ""
    graphs = benching._graph_count()
    with torch._dynamo.config.patch(recompile_limit=1):
        found = bench(base, [task], IMAGE, **{**QUICK, "batches": (2,), "backends": ("compiled",)})
    assert [t.problem for t in found.timings] == ["", ""]
    assert benching._graph_count() == graphs + 2
    assert all(t.ready_seconds > 0 for t in found.timings)
    assert found.comparison("small", "compiled", 2).speedup > 0


@pytest.mark.slow
def test_onnxruntime_for_real(base, task):
    found = bench(base, [task], IMAGE, **{**QUICK, "batches": (2,), "backends": ("onnxruntime", "eager")})
    assert [t.backend for t in found.timings] == ["eager"] * 2 + ["onnxruntime"] * 2
    assert all(not t.problem and len(t.seconds) == 6 for t in found.timings)
    assert "onnxruntime" in found.machine


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_backends_compute_what_float64_does(base, backend, tmp_path):
    x = torch.randn(3, 3, 8, 8)
    with torch.inference_mode():
        oracle = copy.deepcopy(base).double()(x.double())
        found = benching.prepare(backend, base, x, 1, tmp_path / "net.onnx")()
    assert benching.difference(found, oracle, 1e-5) == ""
    assert "differ" in benching.difference(found, oracle * 1.01, 1e-5)
    assert "shapes" in benching.difference(found, oracle[:1], 1e-5)
    assert "not finite" in benching.difference(oracle * math.nan, oracle, 1e-5)


def test_a_backend_that_computes_something_else_is_no_number(base, task, monkeypatch):
    honest = benching.prepare

    def wrong(backend, net, x, threads, file):
        run = honest(backend, net, x, threads, file)
        return (lambda: run() * 1.1) if net is not base else run

    monkeypatch.setattr(benching, "prepare", wrong)
    found = bench(base, [task], IMAGE, **QUICK)
    row = found.timing("small", "eager", 1)
    assert row.seconds == ()
    assert "differ from eager float32 by 1.0e-01" in row.problem
    assert found.timing("base", "eager", 1).seconds
    assert "not measured: outputs differ" in str(found)
    json.dumps(found.to_dict())


def test_a_backend_that_fails_is_a_row_and_the_others_go_on(base, task, monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(benching, "_compiled", no_compiler)
    missing = "onnxruntime is needed for the onnxruntime backend and is not installed; pip install 'spalier[onnx]'"
    known = benching._obstacle
    monkeypatch.setattr(benching, "_obstacle", lambda b, d: missing if b == "onnxruntime" else known(b, d))
    found = bench(base, [task], IMAGE, **{**QUICK, "backends": ("compiled", "onnxruntime", "eager")})
    assert {t.problem for t in found.timings if t.backend == "compiled"} == {"RuntimeError: no C++ compiler"}
    assert {t.problem for t in found.timings if t.backend == "onnxruntime"} == {missing}
    assert all(t.seconds for t in found.timings if t.backend == "eager")
    assert f"onnxruntime\nnot measured: {missing}" in str(found)
    assert found.comparison("small", "compiled", 1).verdict == "not measured"


def test_what_a_backend_needs_is_named(monkeypatch):
    import importlib

    real = importlib.import_module

    absent = set()

    def without(name):
        if name in absent:
            raise ModuleNotFoundError(name=name)
        if name == "onnxruntime":
            raise OSError("a library is missing")
        return real(name)

    cpu = torch.device("cpu")
    monkeypatch.setattr("spalier.text.import_module", without)
    absent.add("onnxscript")
    assert benching._obstacle("onnxruntime", cpu) == (
        "onnxscript is needed for the onnxruntime backend and is not installed; pip install 'spalier[onnx]'"
    )
    absent.clear()
    assert benching._obstacle("onnxruntime", cpu) == "OSError: a library is missing"
    assert "on cuda" in benching._obstacle("onnxruntime", torch.device("cuda"))
    assert benching._obstacle("eager", cpu) == ""


def test_torch_compile_that_is_switched_off_is_not_called_compiled(base, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    with pytest.raises(RuntimeError, match="left the network as it is"), torch.inference_mode():
        benching.prepare("compiled", base, IMAGE, 1, tmp_path / "net.onnx")


def test_everything_is_as_it_was_after_an_interrupt(task):
    torch.manual_seed(0)
    base = tiny_cnn()  # the same weights as the fixture's
    base[1].eval()
    modes = [m.training for m in base.modules()]
    threads = torch.get_num_threads()
    seen = []

    def interrupt(line):
        seen.append((torch.get_num_threads(), base.training))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(base, [task], IMAGE, threads=threads + 1, progress=interrupt, **QUICK)
    assert seen == [(threads + 1, False)]
    assert torch.get_num_threads() == threads
    assert [m.training for m in base.modules()] == modes
    assert not torch.is_inference_mode_enabled()


def test_a_network_that_writes_into_its_input_is_measured_all_the_same(base):
    greedy = nn.Sequential(nn.ReLU(inplace=True), *copy.deepcopy(base)).eval()
    before = IMAGE.clone()
    found = bench(greedy, [], IMAGE, **QUICK)
    assert all(t.seconds for t in found.timings)
    assert torch.equal(IMAGE, before)


def test_half_precision_is_held_against_float32(base):
    found = bench(copy.deepcopy(base).bfloat16(), [], IMAGE.bfloat16(), **QUICK)
    assert [t.problem for t in found.timings] == ["", ""]


def test_heads_of_other_sizes_and_folded_norms_are_said(base, task):
    wide = copy.deepcopy(base)
    wide[8] = nn.Linear(12, 100)
    found = bench(wide, [task], IMAGE, fold=True, **QUICK)
    assert any("small has outputs of 3, the base of 100" in note for note in found.notes)
    assert "the tasks' batch norms are folded, the base's are not" in str(found)
    assert bench(base, [task], IMAGE, **QUICK).notes == ()


def test_without_an_example_the_tasks_size_is_taken(base, task):
    found = bench(base, [task], **QUICK)
    assert found.timing("base", "eager", 1).macs == sp.count(base, IMAGE).macs
    with pytest.raises(ExampleError, match="pass example="):
        bench(base, [task_of(base)], **QUICK)


def test_networks_that_mix_samples_have_no_macs():
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (x[:1] @ self.weight.T)

    found = bench(Mixing(3, 3).eval(), [], torch.ones(2, 3), **QUICK)
    assert [t.macs for t in found.timings] == [None, None]
    assert " -  " in str(found)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rounds": 5}, "at least 6"),
        ({"rounds": True}, "rounds is True"),
        ({"batches": (0,)}, "batches is 0, expected an integer of at least 1"),
        ({"batches": ()}, "integers of at least 1"),
        ({"backends": ("fast",)}, "expected some of eager, compiled, onnxruntime"),
        ({"backends": "eager"}, "expected some of"),
        ({"seconds": -1}, "seconds is -1"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_options_are_refused_before_anything_is_built(base, options, match):
    with pytest.raises(ConfigError, match=match):
        bench(base, [None], IMAGE, **{**QUICK, **options})


def test_names_examples_and_bases_that_do_not_do(base, task):
    for tasks in ([task, task], {"base": task}):
        with pytest.raises(ConfigError, match="name"):
            bench(base, tasks, IMAGE, **QUICK)
    for example in (torch.tensor(1.0), torch.zeros(0, 3, 8, 8), [IMAGE]):
        with pytest.raises(ExampleError, match="at least one sample"):
            bench(base, [task], example, **QUICK)
    with pytest.raises(ExampleError, match="does not run"):
        bench(base, [task], torch.zeros(1, 5), **QUICK)
    other = copy.deepcopy(base)
    with torch.no_grad():
        other[0].weight += 1
    with pytest.raises(TaskFileError):
        bench(other, [task], IMAGE, **QUICK)
    with pytest.raises(KeyError, match="eager"):
        bench(base, [], IMAGE, **QUICK).timing("a", "eager", 1)
