"""The classifiers of three libraries' networks: each has as many outputs as there are classes, and no other layer."""

import collections

import pytest
import timm
import torch
import torchvision
import transformers
from support import TINY, tiny_cnn
from torch import nn
from zoo import ZOO

from spalier import networks
from spalier.errors import TargetError
from spalier.networks import head_of


def assert_head(head, make):
    """The head has as many outputs as there are classes, and it is all that another number of classes changes."""
    net, other = make(10), make(7)
    assert head_of(net) == head_of(net, classes=10) == head_of(other) == head
    assert networks._layers(net)[head] == 10
    shapes, others = ({k: v.shape for k, v in n.state_dict().items()} for n in (net, other))
    changed = {key for key in shapes if shapes[key] != others[key]}
    assert {key.rpartition(".")[0] for key in changed if "aux" not in key.lower()} == {head}


TORCHVISION = {
    "alexnet": "classifier.6",
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "efficientnet_v2_s": "classifier.1",
    "googlenet": "fc",
    "inception_v3": "fc",
    "maxvit_t": "classifier.5",
    "mnasnet0_5": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "resnet18": "fc",
    "resnext50_32x4d": "fc",
    "shufflenet_v2_x0_5": "fc",
    "squeezenet1_1": "classifier.1",
    "swin_t": "head",
    "swin_v2_t": "head",
    "vgg11_bn": "classifier.6",
    "vit_b_16": "heads.head",
}


@pytest.mark.parametrize(("name", "head"), TORCHVISION.items())
def test_the_head_of_torchvisions_networks(name, head):
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        assert_head(head, lambda n: torchvision.models.get_model(name, num_classes=n, **options))


TIMM = {
    "beit_base_patch16_224": "head",
    "caformer_s18": "head.fc.fc2",
    "convnextv2_atto": "head.fc",
    "cspdarknet53": "head.fc",
    "deit_tiny_patch16_224": "head",
    "dm_nfnet_f0": "head.fc",
    "efficientnet_b0": "classifier",
    "fastvit_t8": "head.fc",
    "ghostnet_050": "classifier",
    "hrnet_w18_small": "classifier",
    "inception_v4": "last_linear",
    "legacy_seresnet18": "last_linear",
    "mixer_s32_224": "head",
    "mobilenetv4_conv_small": "classifier",
    "poolformer_s12": "head.fc",
    "regnetz_005": "head.fc",
    "resnetv2_50x1_bit": "head.fc",
    "skresnet18": "fc",
    "swin_tiny_patch4_window7_224": "head.fc",
    "vgg11": "head.fc",
    "volo_d1_224": "head",
}


@pytest.mark.parametrize(("name", "head"), TIMM.items())
def test_the_head_of_timms_networks(name, head):
    with torch.device("meta"):
        assert_head(head, lambda n: timm.create_model(name, num_classes=n))


HUGGING = {
    "BeitFor": ("classifier", TINY),
    "BitFor": ("classifier.1", {}),
    "ConvNextFor": ("classifier", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "ConvNextV2For": ("classifier", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "DeiTFor": ("classifier", TINY),
    "Dinov2For": ("classifier", TINY),
    "EfficientNetFor": ("classifier", {}),
    "HGNetV2For": ("fc", {}),
    "MobileNetV2For": ("classifier", {}),
    "MobileViTFor": ("classifier", {}),
    "RegNetFor": (
        "classifier.1",
        {"embedding_size": 8, "hidden_sizes": [16], "depths": [1], "groups_width": 8},
    ),
    "ResNetFor": ("classifier.1", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "SegformerFor": ("classifier", {}),
    "SwinFor": ("classifier", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}),
    "Swinv2For": ("classifier", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}),
    "ViTFor": ("classifier", TINY),
}


@pytest.mark.parametrize(("kind", "row"), HUGGING.items())
def test_the_head_of_transformers_networks(kind, row):
    head, options = row
    config = getattr(transformers, kind.replace("For", "Config"))
    net = getattr(transformers, f"{kind}ImageClassification")
    device = "cpu" if kind == "DeiTFor" else "meta"  # its initialisation looks at values
    with torch.device(device):
        assert_head(head, lambda n: net(config(**options, num_labels=n)))


@pytest.mark.parametrize(("kind", "head"), [("Bert", "classifier"), ("Roberta", "classifier.out_proj")])
def test_the_head_of_a_classifier_of_text(kind, head):
    options = {k: v for k, v in TINY.items() if "size" in k or k.startswith("num")}
    config = getattr(transformers, f"{kind}Config")
    net = getattr(transformers, f"{kind}ForSequenceClassification")
    with torch.device("meta"):
        assert_head(head, lambda n: net(config(vocab_size=50, **options, num_labels=n)))


SEVERAL = {
    "timm/deit_tiny_distilled_patch16_224",  # one for the teacher
    "timm/efficientformer_l1",
}


def test_the_head_of_every_picture_classifier_of_the_zoo():
    seen = collections.Counter()
    for entry in ZOO:
        library = entry.name.partition("/")[0]
        if library not in ("torchvision", "timm") or entry.name in SEVERAL:
            continue
        net = entry.make.args[0]()  # without the values that the zoo gives it
        assert networks._layers(net)[head_of(net)] == 10, entry.name
        seen[library] += 1
    assert min(seen.values()) > 15


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s", "crossvit_9_240", "repvit_m1"])
def test_several_heads_are_for_the_caller_to_name(name):
    options = {} if "levit" not in name else {"distilled": True}
    with torch.device("meta"):
        net = timm.create_model(name, num_classes=10, **options)
    with pytest.raises(TargetError, match=r"linear layers of 10 outputs that could be it: head.*pass head="):
        head_of(net)


def test_a_head_is_the_last_layer_where_nothing_has_a_name():
    assert head_of(tiny_cnn()) == "8"
    assert head_of(nn.Linear(3, 2)) == ""
    same = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert head_of(same, classes=4) == "2"


def test_a_head_in_a_row_of_equal_layers_is_the_last():
    net = nn.Module()
    net.classifier = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert head_of(net) == head_of(net, classes=4) == "classifier.2"


def test_names_go_before_places():
    net = nn.Module()
    net.fc, net.decoder = nn.Linear(4, 3), nn.Linear(4, 3)
    assert head_of(net) == "fc"
    net.blocks = nn.ModuleDict({"head": nn.Linear(4, 3)})
    assert head_of(net) == "fc"


def test_no_head_is_an_error():
    with pytest.raises(TargetError, match=r"no linear layer; .*pass head="):
        head_of(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(TargetError, match="no linear layer of 7 outputs"):
        head_of(tiny_cnn(3), classes=7)
    with pytest.raises(TargetError, match="linear layers of 3 outputs that could be it: a; "):
        head_of(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2)}), classes=3)
