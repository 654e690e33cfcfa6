"""No task file, whatever is in it, gets further than an error with the right code; nothing is changed or run."""

import contextlib
import copy
import errno
import json
import os
import socket
import struct
import time
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn

import spalier
from attacks.coded_files import CODED
from attacks.files import CASES as OTHERS
from attacks.files import HOSTILE_TEXT, MARKUP, nested, pickled, saved
from attacks.parts import KINDS as VALID
from attacks.parts import base, changed, example, join, pack, plain, split, task, unpack, valid
from spalier import files
from spalier.errors import TASK_FILE_CODES, TaskFileError
from spalier.tasks import SUFFIX, check_name

CASES = {**OTHERS, **CODED}
SECONDS = 10
"""What no refusal may take of a processor, however slow; nearly all take milliseconds."""
MEGABYTES = 128
"""What no refusal may need beside the file."""


@contextlib.contextmanager
def refused(code, *others):
    """The block has to end in an error with one of these codes, and a message that is safe to print."""
    with pytest.raises(TaskFileError) as caught:
        yield
    error = caught.value
    assert error.code in (code, *others), f"{error.code}: {error}"
    assert error.code in TASK_FILE_CODES
    check_message(str(error))


def check_message(text):
    assert 0 < len(text) < 500
    assert not [c for c in text if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"], ascii(text)


def written(folder, data, name="a"):
    path = folder / f"{name}{SUFFIX}"
    path.write_bytes(data)
    return path


@pytest.fixture
def untouched():
    """The base, which has to be as it was after the test."""
    before = snapshot(base())
    yield base()
    assert_unchanged(base(), before)


# files that lie


def test_the_files_that_are_changed_are_valid(tmp_path, untouched):
    for storage in (*VALID, "fp16", "bf16"):
        for data in (valid(storage), changed(lambda parts: None, storage)):
            loaded = spalier.Task.load(written(tmp_path, data))
            found = loaded.build(untouched, fold=True)(example())
            assert found.isfinite().all()
            again = copy.deepcopy(untouched)
            loaded.apply_(again)
            torch.testing.assert_close(again.eval()(example()), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES, ids=ascii)
def test_a_hostile_file_is_refused(name, tmp_path, untouched):
    case = CASES[name]
    data = case.make()
    path = written(tmp_path, data)
    begin = time.process_time()
    with refused(case.code):
        spalier.Task.load(path).build(untouched, fold=case.fold)
    assert time.process_time() - begin < SECONDS
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "name",
    [
        "a zlib bomb",
        "a zlib bomb of the said size",
        "2^62 bytes",
        "2^40 bytes",
        "header length 2^60",
        "stream of 2^31-1 units",
        "a pattern of 2^30 indices",
        "a thousand patterns",
        "a thousand patterns in format 1",
        "a thousand axes of runs",
        "runs of 2^31-1 indices",
        "codes that inflate to 256 MiB",
        "codes that inflate to more than is said",
        "a rank of 2^31-1 in codes",
        "pattern [0, 2147483648, 2147483648, 2147483648]",
        "the same mask without end",
        "80 thousand tensors",
        "a megabyte of lists",
        "the last of many keys twice",
    ],
)
def test_a_small_file_does_not_take_much_memory(name, tmp_path):
    case = CASES.get(name) or CASES[f"table: {name}"]
    path = written(tmp_path, case.make())
    tracemalloc.start()
    try:
        with refused(case.code):
            spalier.Task.load(path)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTES << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("storage", ["exact", "int8", "by layer", "small"])
def test_a_file_cut_anywhere_is_truncated(storage, tmp_path, untouched):
    data = valid(storage)
    path = written(tmp_path, b"")
    for end in range(len(data)):
        path.write_bytes(data[:end])
        others = ("foreign",) if 0 < end < 8 else ()  # so little may look like the beginning of anything
        with refused("truncated", *others):
            spalier.Task.load(path)


@pytest.mark.parametrize("kind", ["int8-all", "small"])
def test_a_packed_file_is_the_same_as_one_that_is_not(kind):
    data = valid(kind)
    one, other = spalier.Task.from_bytes(data), spalier.Task.from_bytes(plain(data))
    assert len(data) < 0.7 * len(plain(data))
    assert one.info == other.info
    assert one.to_bytes() == other.to_bytes() == data


def test_files_with_headers_of_any_length_load(tmp_path):
    """The length stands first, and must not be taken for the mark of a pickle or of a gzip archive."""
    for blanks in range(1200):
        header, body = split(valid())
        data = join(json.dumps(header) + " " * blanks, body)
        assert spalier.Task.load(written(tmp_path, data)).name == "a"


def test_descriptions_of_any_length_are_written_and_read(tmp_path):
    for length in range(0, 1200, 8):
        made = replace(task(), info=replace(task().info, licence="x" * length))
        path = tmp_path / f"a{SUFFIX}"
        made.save(path)
        assert spalier.Task.load(path).info.licence == "x" * length


@pytest.mark.parametrize("depth", range(930, 1000, 2))
def test_nesting_near_the_limit_of_recursion(depth, tmp_path):
    parts = unpack(valid())
    text = nested(depth)
    path = written(tmp_path, pack(parts, description=f'{{"format":{text}}}'))
    with refused("version", "metadata"):
        spalier.Task.load(path)
    del parts.description["table"]
    path.write_bytes(pack(parts, table=f'{{"streams":[],"writers":[],"rows":{text},"heads":[],"folds":[]}}'))
    with refused("table"):
        spalier.Task.load(path)


@pytest.mark.parametrize("place", ["licence", "classes", "provenance", "metrics"])
def test_markup_is_text(place, tmp_path, untouched):
    said = {"licence": MARKUP, "classes": [MARKUP], "provenance": {MARKUP: MARKUP}, "metrics": {MARKUP: 1.0}}
    path = written(tmp_path, changed(lambda parts: parts.description.update({place: said[place]})))
    loaded = spalier.Task.load(path)
    assert MARKUP in str(loaded.info)
    loaded.build(untouched)


def test_a_file_is_not_larger_than_allowed(tmp_path):
    path = written(tmp_path, valid())
    assert spalier.Task.load(path, limit=len(valid())).name == "a"
    with refused("too-large"):
        spalier.Task.load(path, limit=len(valid()) - 1)


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path):
    path = written(tmp_path, valid())
    os.truncate(path, 1 << 40)
    with refused("too-large"):
        spalier.Task.load(path)


ADAPTERS = {
    "no kind": {"kind": "Adapter"},
    "another kind": {"kind": "SPLoRA", "rank": 2},
    "no adapter": {"kind": "FineTune"},
    "other bits": {"kind": "SPDelta", "bits": 2},
    "bits that there are not": {"kind": "SPDelta", "bits": 5},
    "bits as text": {"kind": "SPDelta", "bits": "1"},
    "one scale": {"kind": "SPDelta", "bits": 1, "scales": "layer"},
    "other scales": {"kind": "SPDelta", "bits": 1, "scales": ["row"]},
    "a scale of nothing": {"kind": "SPDelta", "bits": 1, "init_range": 0},
    "settings that there are not": {"kind": "SPDelta", "bits": 1, "rank": 2},
    "layers with settings": {"kind": "ByLayer", "adapters": {"0.weight": 1}},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_unlike_the_table_is_not_applied(name, tmp_path, untouched):
    data = changed(lambda parts: parts.description.update(adapter=ADAPTERS[name]), "delta")
    loaded = spalier.Task.load(written(tmp_path, data))
    loaded.build(untouched)  # which does not need it
    with refused("metadata"):
        loaded.apply_(untouched)


@pytest.mark.parametrize("rank", [2**31, 10**18, 1025, 0.001, 1.5, 0, True, "2"])
def test_a_rank_that_the_table_does_not_have_is_not_applied(rank, tmp_path, untouched):
    """Memory would be taken for it before the file's own factors take their places."""
    data = changed(lambda parts: parts.description["adapter"].update(rank=rank))
    with refused("metadata"):
        spalier.Task.load(written(tmp_path, data)).apply_(untouched)


def test_layers_of_all_kinds_are_applied_whatever_their_codes(tmp_path, untouched):
    """A stranger may code what Spalier does not: matrices of pointwise adapters, and scales may be negative."""

    def change(parts):
        parts.table["rows"][0][4] = ["pointwise", 7, 1, 0]
        codes = [4] * 6 + parts.numbers("codes")[-14:]  # 12 codes of 7 levels, then the factors' of 15
        parts.set_numbers("codes", codes)
        parts.set_numbers("scales", [-0.1, 0.2, 0.0, 0.3, *parts.numbers("scales")[4:]])

    path = written(tmp_path, changed(change, "by layer"))
    built, net = spalier.Task.load(path).build(untouched), copy.deepcopy(untouched)
    spalier.Task.load(path).apply_(net)
    torch.testing.assert_close(net.eval()(example()), built(example()))


def test_negative_scales_of_signs_are_applied(tmp_path, untouched):
    data = changed(lambda p: p.set_numbers("scales", [-0.1] * len(p.numbers("scales"))), "delta")
    loaded, net = spalier.Task.load(written(tmp_path, data)), copy.deepcopy(untouched)
    loaded.apply_(net)
    torch.testing.assert_close(net.eval()(example()), loaded.build(untouched)(example()))
    assert float(net[0].weight_adapter.scale.min()) > 0


# other formats


@pytest.mark.parametrize("kind", ["pickle 0", "pickle 2", "pickle 3", "pickle 4", "pickle 5", "torch", "old torch"])
def test_pickles_are_never_run(kind, tmp_path, untouched):
    marker = tmp_path / "ran"
    is_pickle = kind.startswith("pickle")
    data = pickled(marker, int(kind[-1])) if is_pickle else saved(marker, zipped=kind == "torch")
    with refused("header-length" if kind == "pickle 0" else "foreign"):
        spalier.Task.load(written(tmp_path, data)).build(untouched)
    padded = written(tmp_path, valid() + data, "b")
    with refused("ranges"):
        spalier.Task.load(padded)
    assert not marker.exists()


# the base


def _other(change):
    """A copy of the base with something changed, or what the change gives in its place."""
    made = copy.deepcopy(base())
    with torch.no_grad():
        found = change(made)
    return found if isinstance(found, nn.Module) else made


def _ulp(net):
    weight = net[0].weight
    weight.view(-1)[5] = torch.nextafter(weight.view(-1)[5], torch.tensor(9.0))


WRONG_BASES = {
    "another stride": ("base", lambda net: setattr(net[3], "stride", (1, 1))),
    "another padding": ("base", lambda net: setattr(net[0], "padding", (0, 0))),
    "another padding mode": ("base", lambda net: setattr(net[0], "padding_mode", "circular")),
    "another dilation": ("base", lambda net: setattr(net[0], "dilation", (2, 2))),
    "another eps": ("base", lambda net: setattr(net[1], "eps", 1e-3)),
    "another activation": ("base", lambda net: net.__setitem__(2, nn.GELU())),
    "more layers": ("base", lambda net: net.append(nn.ReLU())),
    "fewer layers": ("base", lambda net: net[:-1]),
    "other names": ("base", lambda net: nn.Sequential(net)),
    "a wider layer": ("base", lambda net: net.__setitem__(0, nn.Conv2d(3, 9, 3, padding=1))),
    "no bias": ("base", lambda net: setattr(net[0], "bias", None)),
    "another network": ("base", lambda net: nn.Linear(3, 3)),
    "an empty network": ("base", lambda net: nn.Sequential()),
    "double": ("base-values", lambda net: net.double()),
    "half": ("base-values", lambda net: net.half()),
    "one weight by one ulp": ("base-values", _ulp),
    "one bias": ("base-values", lambda net: net[0].bias[0].add_(1)),
    "minus zero": ("base-values", lambda net: net[0].bias.copy_(-0.0 * net[0].bias)),
}


@pytest.mark.parametrize("name", WRONG_BASES)
def test_another_base_is_refused(name, tmp_path):
    code, change = WRONG_BASES[name]
    loaded = spalier.Task.load(written(tmp_path, valid()))
    wrong = _other(change)
    before = snapshot(wrong)
    with refused(code):
        loaded.build(wrong)
    with refused(code):
        loaded.apply_(wrong)
    assert_unchanged(wrong, before)


def test_no_network_at_all_is_refused():
    for wrong in (None, 5, "net", {}, nn.Linear):
        with refused("base"):
            task().build(wrong)


def test_what_the_task_has_of_its_own_may_differ(tmp_path):
    loaded = spalier.Task.load(written(tmp_path, valid()))
    other = _other(lambda net: net.__setitem__(8, nn.Linear(12, 7)))
    with torch.no_grad():
        other[1].running_mean.add_(3)
    torch.testing.assert_close(loaded.build(other)(example()), loaded.build(base())(example()), rtol=0, atol=0)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.zeros(3))

    def forward(self, x):
        return x + self.by


def test_a_buffer_of_the_base_counts(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 3), Shift(), nn.Linear(3, 2))
    net = copy.deepcopy(plain)
    spalier.attach_(net, spalier.SPLoRA(rank=1), head="2")
    path = tmp_path / f"a{SUFFIX}"
    spalier.Task.of(net, "a").save(path)
    loaded = spalier.Task.load(path)
    loaded.build(plain)
    plain[1].by[0] += 1
    with refused("base-values"):
        loaded.build(plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fusing_beyond_the_dtype_of_the_base_is_refused(dtype, tmp_path):
    torch.manual_seed(0)
    plain = tiny_cnn().to(dtype).eval()
    net = copy.deepcopy(plain)
    spalier.attach_(net, spalier.SPLoRA(rank=2), head="8")
    path = tmp_path / f"a{SUFFIX}"
    spalier.Task.of(awaken_(net), "a").save(path)
    spalier.Task.load(path).build(plain)
    parts = unpack(path.read_bytes())
    del parts.description["table"]
    raw = parts.tensors["adapters"][1]
    big = {torch.float16: struct.pack("<e", 60000), torch.bfloat16: struct.pack("<f", 3e38)[2:]}[dtype]
    parts.tensors["adapters"] = parts.tensors["adapters"][0], big * (len(raw) // 2)
    path.write_bytes(pack(parts))
    before = snapshot(plain)
    with refused("overflow"):
        spalier.Task.load(path).build(plain)
    assert_unchanged(plain, before)


# names

NAMES = {
    "empty": "",
    "a dot": ".",
    "two dots": "..",
    "a way up": "../a",
    "two dots inside": "a..b",
    "a way up, as on Windows": "..\\a",
    "absolute": "/etc/passwd",
    "a drive": "C:a",
    "a folder": "a/b",
    "a folder, as on Windows": "a\\b",
    "a network path": "\\\\host\\a",
    "a stream, as on Windows": "a:b",
    "leading dot": ".a",
    "leading dash": "-rf",
    "trailing dot": "a.",
    "trailing blank": "a ",
    "a blank": "a b",
    "CON": "CON",
    "nul.txt": "nul.txt",
    "com1": "com1",
    "LPT9.x.y": "LPT9.x.y",
    "300 characters": "a" * 300,
    "101 characters": "a" * 101,
    "Cyrillic": "\u0430",
    "full-width": "\uff41",
    "combining": "a\u0301",
    "precomposed": "\u00e1",
    "superscript digit": "\u00b2",
    "Arabic digit": "\u0661",
    "long s": "a\u017f",
    "Kelvin sign": "\u212a",
    "shell": "$(id)",
    "star": "*",
    "the suffix": f"a{SUFFIX}",
    "half of the suffix": "a.task",
    "percent": "%2e%2e",
    **HOSTILE_TEXT,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_that_no_task_can_have(name, tmp_path, untouched):
    made, store = task(), spalier.Store(tmp_path / "store")
    store.add(made)
    outside = written(tmp_path, b"outside")
    for attempt in (
        check_name,
        store.path,
        store.load,
        store.remove,
        lambda name: store.add(made, name),
        lambda name: store.add(made, name, overwrite=True),
        lambda name: spalier.Task.of(untouched, name),
        lambda name: spalier.Switcher(untouched, store).activate(name),
    ):
        with refused("name"):
            attempt(name)
    assert name not in store
    if "\0" not in name and "/" not in name and "\ud800" not in name:
        with refused("name"):
            made.save(str(tmp_path / f"{name}{SUFFIX}"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted([".lock", f"a{SUFFIX}", f"a{SUFFIX}", "store"])
    assert outside.read_bytes() == b"outside"


@pytest.mark.parametrize("name", [None, 5, b"a", ["a"], Path("a")], ids=repr)
def test_names_that_are_no_text(name, tmp_path):
    store = spalier.Store(tmp_path)
    for attempt in (check_name, store.path, store.load, store.remove):
        with refused("name"):
            attempt(name)
    assert name not in store


def test_a_task_is_not_saved_under_another_suffix(tmp_path):
    for name in ("a", "a.safetensors", "a.task", "a.pt", "", ".task.safetensors"):
        with refused("name"):
            task().save(tmp_path / name if name else tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000], ids=["NUL", "surrogate", "5000 characters"])
def test_paths_that_no_system_takes(path):
    """The path is the caller's own, so the message may be as long as it is."""
    name = f"{path}/a{SUFFIX}"
    for code, attempt in (
        ("unreadable", spalier.Task.load),
        ("write", task().save),
        ("unreadable", spalier.Store),
    ):
        with pytest.raises(TaskFileError) as caught:
            attempt(name)
        assert caught.value.code == code
        assert str(caught.value).isprintable()


def test_files_in_a_store_with_hostile_names(tmp_path):
    """Whoever may put a file there must not write to the terminal of whoever lists it."""
    store = spalier.Store(tmp_path)
    strange = ["\x1b[31mred", "a\nb", "\u202e", "x" * 200, "\u212a", "a b", "\udcff"]
    for name in strange:
        (tmp_path / f"{name}{SUFFIX}").write_bytes(valid())
    for number in range(5):
        store.add(task(), f"{number}" * 100)
    with refused("missing"):
        store.load("other")
    codes = {entry.name: entry.error and entry.error.code for entry in store.list()}
    assert {codes.get(name, "name") for name in strange} == {"name"}
    assert all(line.isprintable() for line in str(store.list()).splitlines())
    with refused("exists"):
        store.add(task(), "k")  # some file systems take the Kelvin sign for it


def test_a_store_lists_what_is_wrong(tmp_path, untouched):
    store = spalier.Store(tmp_path)
    store.add(task())
    names = [name for name, case in CASES.items() if not case.fold and case.code != "header-length"][::12]
    for number, name in enumerate(names):
        written(tmp_path, CASES[name].make(), f"b{number}")
    found = {entry.name: entry.error and entry.error.code for entry in store.verify(untouched)}
    assert found == {"a": None, **{f"b{n}": CASES[name].code for n, name in enumerate(names)}}


# what is no regular file


def _linked(folder):
    path = folder / f"link{SUFFIX}"
    path.symlink_to(written(folder, valid()))
    return path


def _looped(folder):
    one, two = folder / f"one{SUFFIX}", folder / f"two{SUFFIX}"
    one.symlink_to(two)
    two.symlink_to(one)
    return one


def _dangling(folder):
    path = folder / f"link{SUFFIX}"
    path.symlink_to(folder / "nowhere")
    return path


def _to_zero(folder):
    path = folder / f"link{SUFFIX}"
    path.symlink_to("/dev/zero")
    return path


def _fifo(folder):
    path = folder / f"fifo{SUFFIX}"
    os.mkfifo(path)
    return path


def _folder(folder):
    path = folder / f"folder{SUFFIX}"
    path.mkdir()
    return path


def _hard_link(folder):
    path = folder / f"hard{SUFFIX}"
    path.hardlink_to(written(folder, valid()))
    return path


def _socket(folder):
    path = folder / f"s{SUFFIX}"
    here = Path.cwd()
    os.chdir(folder)  # addresses of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    return path


KINDS = {
    "symlink": ("symlink", _linked),
    "symlink loop": ("symlink", _looped),
    "dangling symlink": ("symlink", _dangling),
    "symlink to a device": ("symlink", _to_zero),
    "fifo": ("not-regular", _fifo),
    "folder": ("not-regular", _folder),
    "zeros": ("not-regular", lambda folder: Path("/dev/zero")),
    "null": ("not-regular", lambda folder: Path("/dev/null")),
    "standard input": ("symlink", lambda folder: Path("/dev/stdin")),
    "hard link": ("hard-link", _hard_link),
    "socket": ("not-regular", _socket),
    "missing": ("missing", lambda folder: folder / "none"),
    "a file as a folder": ("unreadable", lambda folder: written(folder, valid()) / "x"),
    "an empty path": ("not-regular", lambda folder: ""),
}


@pytest.mark.skipif(os.name == "nt", reason="has other kinds of files")
@pytest.mark.parametrize("name", KINDS)
def test_only_a_regular_file_is_read(name, tmp_path):
    code, make = KINDS[name]
    path = make(tmp_path)
    begin = time.process_time()
    with refused(code):
        spalier.Task.load(path)
    assert time.process_time() - begin < SECONDS


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = written(tmp_path, valid())
    path.chmod(0)
    if os.access(path, os.R_OK):  # whoever may read everything is told by the system's answer to others
        monkeypatch.setattr(os, "open", _denied)
    with refused("unreadable"):
        spalier.Task.load(path)


@pytest.mark.parametrize("path", [None, 5, b"a", ["a"]], ids=repr)
def test_a_path_that_is_none(path):
    with refused("name"):
        spalier.Task.load(path)


def _denied(path, *args, **kwargs):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_a_fifo_that_takes_the_place_of_a_file_does_not_block(tmp_path, monkeypatch):
    """Between the look at the name and the opening, another kind of file may take the name."""
    path = written(tmp_path, valid())
    really = os.open

    def swapped(name, *args, **kwargs):
        monkeypatch.setattr(os, "open", really)
        path.unlink()
        os.mkfifo(path)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    with refused("not-regular"):
        spalier.Task.load(path)


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(tmp_path, monkeypatch):
    path, good = written(tmp_path, valid()), written(tmp_path, valid(), "good")
    really = os.open

    def swapped(name, *args, **kwargs):
        monkeypatch.setattr(os, "open", really)
        path.unlink()
        path.symlink_to(good)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    with refused("symlink", "unreadable"):
        spalier.Task.load(path)


# files that change while they are read


def _replaced(path, new):
    other = path.with_suffix(".new")
    other.write_bytes(new)
    other.replace(path)


def _rewritten(path, new):
    with path.open("r+b") as file:
        file.write(new)
        file.truncate()
    os.utime(path, ns=(0, 10**18))  # as if the clock had gone on


def _appended(path, new):
    with path.open("ab") as file:
        file.write(new)


def _shortened(path, new):
    os.truncate(path, path.stat().st_size // 2)


def _touched(path, new):
    os.utime(path, ns=(0, 10**18))


def _removed(path, new):
    path.unlink()


MEANWHILE = {
    "replaced": (_replaced, None),
    "removed": (_removed, None),
    "rewritten": (_rewritten, "changed"),
    "appended": (_appended, "changed"),
    "shortened": (_shortened, "truncated"),
    "touched": (_touched, "changed"),
}


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("name", MEANWHILE)
def test_a_file_that_changes_while_it_is_read(name, after, tmp_path, monkeypatch):
    """The old file, whole, or an error: never a mixture."""
    act, code = MEANWHILE[name]
    new = changed(lambda parts: parts.set_numbers("values", [7.0] * len(parts.numbers("values"))))
    assert len(new) == len(changed(lambda parts: None))
    path = written(tmp_path, changed(lambda parts: None))
    really, calls = files.read_exactly, []

    def reading(file, size):
        found = really(file, size)
        calls.append(size)
        if len(calls) == after:
            act(path, new)
        return found

    monkeypatch.setattr("spalier.tasks.format.read_exactly", reading)
    if code is None:
        loaded = spalier.Task.load(path)
        assert torch.equal(loaded.values, task().values)
        return
    with refused(code, "changed"):
        spalier.Task.load(path)


def test_a_file_that_shrinks_in_the_middle_of_a_read(tmp_path, monkeypatch):
    path = written(tmp_path, valid())

    class Slow:
        """Gives one byte at a time, and the file loses its end meanwhile."""

        def __init__(self, file):
            self.file = file

        def readinto(self, view):
            if self.file.tell() == 100:
                os.truncate(path, 200)
            return self.file.readinto(view[:1])

    really = files.read_exactly
    monkeypatch.setattr("spalier.tasks.format.read_exactly", lambda file, size: really(Slow(file), size))
    with refused("truncated"):
        spalier.Task.load(path)


def test_a_file_that_cannot_be_read_to_its_end(tmp_path, monkeypatch):
    path = written(tmp_path, valid())

    class Broken:
        def readinto(self, view):
            raise OSError(5, "Input/output error")

    really = files.read_exactly
    monkeypatch.setattr("spalier.tasks.format.read_exactly", lambda file, size: really(Broken(), size))
    with refused("unreadable"):
        spalier.Task.load(path)
