"""Networks by name, weights from files, and the logits of what they return."""

import collections
import logging
import os
import sys
import types
from urllib.error import URLError

import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support import TINY, tiny_cnn
from torch import nn

from spalier import models, networks, text
from spalier.errors import ConfigError, NetworkError, WeightsError
from spalier.networks import OWN_WEIGHTS, head_of, logits_of, looks_untrained, open_network, warn_if_untrained


def equal(one, other):
    """Whether two networks hold the same tensors under the same names."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def user(monkeypatch):
    """A module of a user's, to be imported by name."""
    module = types.ModuleType("users_networks")
    monkeypatch.setitem(sys.modules, "users_networks", module)
    module.tiny = lambda classes=3: tiny_cnn(classes)
    module.fixed = tiny_cnn
    module.of_width = lambda width, **options: nn.Linear(width, options["classes"]).double().train()
    module.number = lambda: 3
    module.constant = 3
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT of five classes, in half precision, as transformers saves it."""
    path = tmp_path_factory.mktemp("hub") / "vit"
    torch.manual_seed(3)
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, num_labels=5))
    with networks.quiet_transformers():
        net.half().save_pretrained(path)
    return path


def configuration(path):
    transformers.ViTConfig(**TINY).save_pretrained(path)
    return path


# names


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_the_built_in_networks(name):
    net = open_network(name, classes=3, stem="cifar")
    assert isinstance(net, models.ResNet)
    assert net(torch.randn(1, 3, 16, 16)).shape == (1, 3)
    assert net.conv1.kernel_size == (3, 3)


@pytest.mark.parametrize(
    "name", ["torchvision:resnet18", "timm:test_vit", "timm:test_resnet", "users_networks:tiny", "hf:"]
)
def test_networks_are_made_the_same_for_a_seed_in_eval_mode_on_the_cpu(name, user, tmp_path):
    name += str(configuration(tmp_path)) if name == "hf:" else ""
    state = torch.random.get_rng_state()
    net, again, other = (open_network(name, classes=4, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert equal(net, again)
    assert not equal(net, other)
    assert not any(module.training for module in net.modules())
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert networks._layers(net)[head_of(net)] == 4


def test_a_network_has_its_own_number_of_classes_unless_told(user, folder):
    assert open_network("resnet18").fc.out_features == 1000
    assert open_network("torchvision:squeezenet1_1").classifier[1].out_channels == 1000
    assert open_network("timm:test_vit").head.out_features == 1000
    assert open_network("users_networks:tiny")[8].out_features == 3
    assert open_network(f"hf:{folder}").classifier.out_features == 5


def test_a_users_function_gets_the_classes_and_the_options(user):
    net = open_network("users_networks:of_width", classes=2, width=5)
    assert net.weight.shape == (2, 5)
    assert net.weight.dtype == torch.float32
    assert not net.training
    assert open_network("users_networks:fixed", classes=3)[8].out_features == 3


def test_a_function_that_cannot_be_told_its_classes_must_have_them(user):
    user.fixed = lambda: tiny_cnn(3)
    assert open_network("users_networks:fixed", classes=3)[8].out_features == 3
    with pytest.raises(NetworkError, match="no network of 7 classes"):
        open_network("users_networks:fixed", classes=7)


def test_a_library_wins_over_a_module_of_that_name(monkeypatch):
    monkeypatch.setattr(torchvision, "resnet18", lambda: tiny_cnn(), raising=False)
    monkeypatch.setattr(timm, "test_vit", lambda: tiny_cnn(), raising=False)
    assert isinstance(open_network("torchvision:resnet18", classes=2), torchvision.models.ResNet)
    assert isinstance(open_network("timm:test_vit", classes=2), timm.models.VisionTransformer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnet19",
            r"no network 'resnet19'; did you mean .*resnet18.*\? Expected resnet8, .*module:function",
        ),
        ("", "no network ''; Expected resnet8"),
        ("torchvision:", "no network 'torchvision:'"),
        (":function", "no network ':function'"),
        ("folder/file.py:net", "no network 'folder/file.py:net'"),
        (".relative:net", "no network '.relative:net'"),
        ("torchvision:resnet81", r"cannot make 'resnet81'.*did you mean .*resnet18"),
        ("keras:resnet18", "no module 'keras' to import 'resnet18' from"),
        ("timm:test_vitt", r"cannot make 'test_vitt'.*did you mean .*test_vit"),
        ("torchvison:resnet18", r"no module 'torchvison'.*did you mean torchvision\?"),
        ("no.such.module:net", "no module 'no.such.module' to import 'net' from; Expected"),
        ("users_networks:tinny", r"users_networks has no function 'tinny'; did you mean tiny\?"),
        ("users_networks:constant", "has no function 'constant'"),
        ("users_networks:number", "returned a int, expected an nn.Module"),
    ],
)
def test_a_name_that_is_none_is_explained(name, message, user):
    with pytest.raises(NetworkError, match=message):
        open_network(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"stride_on": "conv1"}, "resnet18 takes no option stride_on; it takes classes, stem"),
        ("users_networks:tiny", {"width": 3}, "takes no option width; it takes classes"),
        ("resnet18", {"classes": 0}, "classes is 0"),
        ("resnet18", {"classes": True}, "classes is True"),
        ("timm:test_vit", {"num_classes": 3}, "pass classes="),
        ("resnet20", {"pretrained": True, "weights": "x.pth"}, "both given"),
        ("users_networks:tiny", {"pretrained": True}, "pass weights=FILE"),
        ("timm:test_vit", {"checkpoint_path": "x.pth"}, "pass weights=FILE"),
    ],
)
def test_bad_options(name, options, message, user):
    with pytest.raises(ConfigError, match=message):
        open_network(name, **options)


# pretrained weights: nothing is downloaded, the libraries' caches have a file


@pytest.fixture
def torch_home(tmp_path, monkeypatch):
    """Where torch keeps what torchvision downloads; what is not there cannot be had."""

    def refuse(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    return tmp_path / "hub" / "checkpoints"


def cached(folder, name):
    """A network of torchvision with weights of its own, which its cache holds."""
    torch.manual_seed(5)
    net = torchvision.models.get_model(name)
    for parameter in net.parameters():
        parameter.data.add_(0.01)
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    torch.save(net.state_dict(), folder / url.rpartition("/")[2])
    return net


def test_pretrained_weights_of_torchvision(torch_home):
    source = cached(torch_home, "squeezenet1_1")
    assert equal(open_network("torchvision:squeezenet1_1", pretrained=True), source)
    net = open_network("torchvision:squeezenet1_1", classes=7, pretrained=True)
    assert torch.equal(net.features[0].weight, source.features[0].weight)
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    assert equal(net, open_network("torchvision:squeezenet1_1", classes=7, pretrained=True))  # the new head, too


def test_built_in_networks_take_torchvisions_weights(torch_home):
    source = cached(torch_home, "resnet18")
    net = open_network("resnet18", classes=7, pretrained=True, stem="cifar")
    assert torch.equal(net.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    assert net.conv1.weight.shape[2:] == (3, 3)
    assert not looks_untrained(net)


def test_pretrained_weights_of_timm(tmp_path):
    torch.manual_seed(5)
    source = timm.create_model("test_resnet")
    torch.save(source.state_dict(), tmp_path / "test.pth")
    own = {"pretrained_cfg_overlay": {"file": str(tmp_path / "test.pth")}}
    net = open_network("timm:test_resnet", classes=4, pretrained=True, **own)
    assert torch.equal(net.conv1[0].weight, source.conv1[0].weight)
    assert head_of(net) == "fc"
    assert net.fc.out_features == 4


def test_without_the_internet_it_says_what_was_tried(torch_home, monkeypatch):
    for name in ("torchvision:squeezenet1_1", "resnet18"):
        with pytest.raises(WeightsError, match=r"no route to host.*cache .*checkpoints.*pass weights=FILE"):
            open_network(name, pretrained=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(torch_home))
    with pytest.raises(WeightsError, match=r"timm could not load .*timm:test_resnet.*pass weights=FILE"):
        open_network("timm:test_resnet", pretrained=True, cache_dir=str(torch_home))


def test_a_misspelt_pretrained_network_gets_near_matches():
    with pytest.raises(NetworkError, match="did you mean resnet18"):
        open_network("torchvision:resnet81", pretrained=True)
    with pytest.raises(WeightsError, match="take resnet20"):
        open_network("resnet8", pretrained=True)


def test_a_folder_without_weights_is_not_pretrained(tmp_path):
    with pytest.raises(WeightsError, match="no weights"):
        open_network(f"hf:{configuration(tmp_path)}", pretrained=True)


def test_the_base_that_comes_with_the_package():
    base = open_network("resnet20", pretrained=True)
    assert not looks_untrained(base)
    assert all(bool(torch.isfinite(value).all()) for value in base.state_dict().values())
    assert OWN_WEIGHTS["resnet20"].stat().st_size < 1_500_000
    assert OWN_WEIGHTS["resnet20"].with_suffix(".md").is_file()  # its card
    other = open_network("resnet20", classes=3, pretrained=True)
    assert torch.equal(base.layer3[2].conv2.weight, other.layer3[2].conv2.weight)
    with pytest.raises(WeightsError, match="build the network with the same widths"):
        open_network("resnet20", pretrained=True, width=8)


def test_random_weights_are_called_that(caplog):
    warn_if_untrained(models.resnet8(), "mine")
    assert "mine has random weights: the base is frozen noise" in caplog.text
    caplog.clear()
    trained = models.resnet8()
    trained.bn1.bias.data.fill_(0.1)
    for net in (trained, nn.Sequential(nn.Linear(2, 2)), open_network("timm:test_vit", pretrained=False).double()):
        warn_if_untrained(net, "net")
    assert caplog.text.count("random") == 1  # timm's, of the three


def test_an_error_of_the_users_own_module_is_theirs(tmp_path, monkeypatch):
    (tmp_path / "broken_networks.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        open_network("broken_networks:net")


def test_options_go_to_the_library(tmp_path):
    net = open_network("timm:test_vit", classes=2, embed_dim=32, num_heads=2)
    assert net.head.in_features == 32
    with pytest.raises(NetworkError, match=r"cannot make 'resnet18'.*nonsense"):
        open_network("torchvision:resnet18", nonsense=1)
    name = f"hf:{configuration(tmp_path)}"
    assert open_network(name, num_hidden_layers=1).config.num_hidden_layers == 1
    with pytest.raises(ConfigError, match="no option nonsense"):
        open_network(name, nonsense=1)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_torchvision_that_does_not_load_is_explained(library, monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(text, "import_module", broken)
    with pytest.raises(NetworkError, match="install torch and torchvision of matching versions"):
        open_network(f"{library}:resnet18")


def test_a_library_that_is_missing_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setattr(text, "import_module", missing)
    with pytest.raises(NetworkError, match="pip install 'timm'"):
        open_network("timm:resnet18")


def test_transformers_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NetworkError, match="pip install 'transformers'"):
        open_network("hf:vit")


# weights


def saved(net, path, form):
    state = net.state_dict()
    wrapped = {f"module.{key}": value for key, value in state.items()}
    forms = {
        "state_dict": {"state_dict": state, "epoch": 3},
        "model": {"model": state, "optimizer": {"state": {}, "lr": 0.1}},
        "module": wrapped,
        "both": {"state_dict": wrapped},
    }
    if form == "safetensors":
        safetensors.torch.save_file(state, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    torch.save(forms.get(form, state), path)
    return path


@pytest.mark.parametrize("form", ["plain", "safetensors", "state_dict", "model", "module", "both"])
def test_weights_load_from_every_form_of_file(form, tmp_path, user):
    torch.manual_seed(9)
    source = tiny_cnn(3)
    path = saved(source, tmp_path / "weights.pth", form)
    assert equal(open_network("users_networks:tiny", classes=3, weights=path), source)
    assert equal(open_network("users_networks:tiny", classes=3, weights=str(path)), source)


def test_a_relative_path_is_taken_as_given(tmp_path, user, monkeypatch):
    source = tiny_cnn(3)
    saved(source, tmp_path / "weights.pth", "plain")
    monkeypatch.chdir(tmp_path)
    assert equal(open_network("users_networks:tiny", weights="weights.pth"), source)


def test_another_head_and_another_stem_are_logged(tmp_path, caplog):
    source = models.resnet18(classes=7)
    path = saved(source, tmp_path / "weights.pth", "plain")
    with caplog.at_level(logging.INFO, "spalier"):
        net = open_network("resnet18", classes=10, stem="cifar", weights=path, seed=4)
    assert "pooled conv1.weight; skipped fc.weight, fc.bias" in caplog.text
    assert torch.equal(net.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert torch.equal(net.fc.weight, open_network("resnet18", classes=10, stem="cifar", seed=4).fc.weight)


@pytest.mark.parametrize(
    ("name", "options", "fresh"),
    [
        ("torchvision:squeezenet1_1", {}, {"classifier.1"}),
        ("torchvision:mobilenet_v3_small", {}, {"classifier.3"}),
        ("torchvision:googlenet", {"init_weights": False}, {"fc", "aux1.fc2", "aux2.fc2"}),
        ("timm:test_vit", {}, {"head"}),
        ("timm:test_efficientnet", {}, {"classifier"}),
        ("timm:deit_tiny_distilled_patch16_224", {"depth": 1}, {"head", "head_dist"}),
    ],
)
def test_every_classifier_may_have_other_classes(name, options, fresh, tmp_path):
    source = open_network(name, classes=6, seed=1, **options)
    path = saved(source, tmp_path / "weights.pth", "plain")
    net, own = (open_network(name, classes=4, weights=w, seed=2, **options) for w in (path, None))
    for key, value in net.state_dict().items():
        expected = own if key.rpartition(".")[0] in fresh else source
        assert torch.equal(value, expected.state_dict()[key]), key


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("exploited",)


@pytest.mark.parametrize("name", ["users_networks:tiny", "hf"])
def test_a_pickle_of_code_is_refused_and_does_not_run(name, tmp_path, user, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"0.weight": Exploit()}}, tmp_path / "bad.pth")
    name = f"hf:{configuration(tmp_path / 'vit')}" if name == "hf" else name
    with pytest.raises(WeightsError, match="not a checkpoint of plain tensors"):
        open_network(name, weights=tmp_path / "bad.pth")
    assert not (tmp_path / "exploited").exists()


def test_weights_of_another_width_are_refused(tmp_path):
    path = saved(open_network("timm:test_vit", embed_dim=32, num_heads=2), tmp_path / "weights.pth", "plain")
    with pytest.raises(WeightsError, match=r"cls_token has shape \(1, 1, 32\), expected \(1, 1, 64\)"):
        open_network("timm:test_vit", weights=path)
    with pytest.raises(WeightsError, match="no weights file"):
        open_network("timm:test_vit", weights=tmp_path / "absent.pth")


# transformers


def test_a_folder_of_transformers_gives_its_weights_but_for_other_classes(folder, caplog):
    source = transformers.ViTForImageClassification.from_pretrained(folder, dtype=torch.float32)
    assert equal(open_network(f"hf:{folder}"), source)
    with caplog.at_level(logging.INFO, "spalier"):
        net = open_network(f"hf:{folder}", classes=7)
    assert "initialised anew classifier.bias, classifier.weight; left out nothing" in caplog.text
    assert net.config.num_labels == net.classifier.out_features == 7
    assert equal(net.vit, source.vit)
    assert equal(net, open_network(f"hf:{folder}", classes=7))


def test_weights_of_transformers_from_a_file(folder, tmp_path):
    name = f"hf:{configuration(tmp_path / 'vit')}"
    source = open_network(f"hf:{folder}")
    assert equal(open_network(name, classes=5, weights=folder / "model.safetensors"), source)
    path = saved(source, tmp_path / "weights.pth", "module")
    assert equal(open_network(name, classes=5, weights=path), source)
    other = open_network(name, classes=7, weights=path)
    assert equal(other.vit, source.vit)
    assert other.classifier.out_features == 7


def test_weights_that_do_not_fit_a_configuration_are_refused(folder, tmp_path):
    with pytest.raises(WeightsError, match="do not fit the network"):
        open_network(f"hf:{folder}", intermediate_size=32)
    safetensors.torch.save_file({"some": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="do not fit the network"):
        open_network(f"hf:{folder}", weights=tmp_path / "other.safetensors")


def test_a_folder_with_pickled_weights_is_refused(folder, tmp_path):
    configuration(tmp_path)
    torch.save({"x": Exploit()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(NetworkError, match="safetensors"):
        open_network(f"hf:{tmp_path}")


@pytest.mark.parametrize("given", [{}, {"weights": True}], ids=["folder", "file"])
def test_options_of_the_hub_go_along(given, folder, tmp_path):
    given = dict.fromkeys(given, folder / "model.safetensors")
    net = open_network(f"hf:{folder}", local_files_only=True, cache_dir=str(tmp_path), **given)
    assert net.classifier.out_features == 5
    with pytest.raises(NetworkError, match="cannot make"):
        open_network(f"hf:{folder}", subfolder="absent", **given)
    with pytest.raises(NetworkError, match="trust_remote_code"):
        open_network(f"hf:{folder}", trust_remote_code=True)


def test_code_in_a_folder_never_runs(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Net"}}'
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(NetworkError, match="cannot make"):
        open_network(f"hf:{tmp_path}")


def test_transformers_logs_and_shows_bars_as_before(folder):
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    open_network(f"hf:{folder}", classes=2)
    assert (theirs.get_verbosity(), theirs.is_progress_bar_enabled()) == before


# logits

Pair = collections.namedtuple("Pair", ["logits", "aux_logits"])


def test_logits_of_everything_that_networks_return():
    logits = torch.randn(2, 3)
    output = transformers.modeling_outputs.ImageClassifierOutput(loss=torch.ones(()), logits=logits)
    attributes = types.SimpleNamespace(logits=logits)
    for each in (
        logits,
        output,
        dict(output),
        attributes,
        (None, logits, torch.ones(1)),
        [logits],
        Pair(logits, torch.ones(1)),
    ):
        assert logits_of(each) is logits


def test_logits_of_googlenet_in_training():
    net = open_network("torchvision:googlenet", classes=3, init_weights=False).train()
    assert logits_of(net(torch.randn(2, 3, 64, 64))).shape == (2, 3)


@pytest.mark.parametrize(
    "output", [None, 3, "logits", {}, {"logits": 3}, (), [None], {"loss": torch.ones(1)}], ids=repr
)
def test_what_has_no_logits_is_an_error(output):
    with pytest.raises(NetworkError, match=f"returned a {type(output).__name__} without logits"):
        logits_of(output)


@given(st.lists(st.one_of(st.none(), st.integers(), st.just(torch.zeros(1)), st.text()), max_size=4))
def test_the_first_tensor_of_several_is_the_logits(values):
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors:
        assert logits_of(values) is tensors[0]
        assert logits_of(tuple(values)) is tensors[0]
    else:
        with pytest.raises(NetworkError):
            logits_of(values)
