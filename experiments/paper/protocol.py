"""The two scales of the experiments: the paper's protocol, and one that fits two processor cores.

What differs between them is here and nowhere else: networks, data, epochs, rates, how many seeds, and how much of each
experiment is gone through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import spalier as sp

Scale = Literal["full", "mini"]
CRITERIA = ("taylor", "weight", "gradient", "lrp")
"""The paper's."""
WEIGHTS = "SPALIER_WEIGHTS"
_TORCHVISION = "https://download.pytorch.org/models"


@dataclass(frozen=True)
class Protocol:
    """All that a scale decides."""

    scale: Scale
    shared: Mapping[str, Any]
    """Settings of every run."""
    sets: Mapping[str, Mapping[str, Any]]
    """Settings by data set."""
    rates: Mapping[str, Mapping[str, float]]
    """Learning rates by data set and method."""
    downloads: Mapping[str, str]
    """Where weights come from, by the name of their file."""
    tested: Mapping[str, int]
    """How many of the test images are looked at, where that is not all."""
    seeds: Sequence[int]
    criteria: Mapping[str, Sequence[str]]
    """What the table goes through, by data set."""
    ablation: Mapping[str, Any]
    """Settings of the ablation, where its network is another one; its name first."""
    ablation_ranks: Sequence[int]
    ablation_inits: Sequence[float]
    whole_kernel: Sequence[int]
    """Ranks of adapters of the whole kernel."""
    shown: Sequence[float] = (1.0, 0.5, 0.3, 0.1)
    """The densities that tables show."""

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets."""
        return tuple(self.sets)

    def settings(self, data: str, method: str) -> dict[str, Any]:
        """What a run on these data is given; weights by the name of their file."""
        return {
            **self.shared,
            **self.sets[data],
            "data": data,
            "lr": self.rates[data][method],
            "trackers": (),
        }

    def epochs(self, settings: Mapping[str, Any]) -> int:
        """How many epochs a run has, from its first block to its last density."""
        config = sp.TransferPruning(**{k: v for k, v in settings.items() if k != "weights"})
        return sum(config.epochs_of(block) for block in range(len(config.targets()) + 1))


def protocol_of(scale: Scale) -> Protocol:
    """The protocol of a scale."""
    return FULL if scale == "full" else MINI


def weights_of(protocol: Protocol, folder: Path, name: str) -> Path:
    """A file of pretrained weights; an error that says where to get it, if it is not there."""
    if not (folder / name).is_file():
        raise sp.errors.WeightsError(
            f"{folder / name} is not there; expected {protocol.downloads[name]}: put it there, or name the folder that "
            f"has it by --weights or the variable {WEIGHTS}"
        )
    return folder / name


_PAPERS_RATE = {"fine-pruning": 0.01, "splora": 0.01}
# everything that the recipe derives from a data set's name is said here: runs are given their data as objects
_SMALL = {
    "network_options": {"stem": "cifar"},
    "image_size": 32,
    "batch_size": 64,
    "epochs": 30,
    "epochs_per_prune": 20,
}
_LARGE = {
    "network_options": {"stem": "imagenet"},
    "image_size": 224,
    "batch_size": 32,
    "epochs": 100,
    "epochs_per_prune": 50,
}
_RESNET50 = {"network": "resnet50", "weights": "resnet50-0676ba61.pth"}
FULL = Protocol(
    scale="full",
    # rates are for 256 images and scale with the batch, so the paper's smaller ones for want of memory need not be
    shared={"recipe": "paper", "validation_split": 0.0},
    sets={
        "cifar10": {**_RESNET50, **_SMALL},
        "flowers102": {**_RESNET50, **_LARGE},
        "catsanddogs": {**_RESNET50, **_LARGE},
    },
    rates={"cifar10": _PAPERS_RATE, "flowers102": _PAPERS_RATE, "catsanddogs": _PAPERS_RATE},
    downloads={
        "resnet50-0676ba61.pth": f"torchvision's ResNet-50 of ImageNet, {_TORCHVISION}/resnet50-0676ba61.pth",
        "resnet18-f37072fd.pth": f"torchvision's ResNet-18 of ImageNet, {_TORCHVISION}/resnet18-f37072fd.pth",
    },
    tested={},
    seeds=(0, 1, 2),
    criteria=dict.fromkeys(("cifar10", "flowers102", "catsanddogs"), (*CRITERIA, "random")),
    ablation={"network": "resnet18", "weights": "resnet18-f37072fd.pth"},
    ablation_ranks=(1, 2, 4, 8, 16, 32, 64),
    ablation_inits=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    whole_kernel=(1, 2, 8),
)
_STEPS = {"densities": (0.7, 0.5, 0.3, 0.2, 0.1)}
_IMAGENET_AT_64 = {
    "network": "resnet50",
    "network_options": {"stem": "imagenet", "stride_on": "conv1"},
    "weights": "resnet50-imagenet-caffe.fp16.safetensors",
    "image_size": 64,
    "batch_size": 32,
}
MINI = Protocol(
    scale="mini",
    shared={
        "recipe": "paper",
        "validation_split": 0.0,
        "scale_lr": False,
        "lr_schedule": "cosine",  # steps of a fifth after each quarter would leave only that quarter to learn
        "score_samples": 256,
        **_STEPS,
    },
    sets={
        "cifar10": {
            "network": "experiments.paper.networks:resnet20",
            "weights": "resnet20-cifar100.safetensors",
            "max_train_samples": 2000,
            "batch_size": 64,
            "epochs": 4,
            "epochs_per_prune": 2,
            "final_epochs": 6,
        },
        "flowers102": {**_IMAGENET_AT_64, "epochs": 4, "epochs_per_prune": 2, "final_epochs": 4},
        "catsanddogs": {
            **_IMAGENET_AT_64,
            "max_train_samples": 2000,
            "epochs": 2,
            "epochs_per_prune": 1,
            "final_epochs": 2,
        },
    },
    rates={
        "cifar10": {"fine-pruning": 0.02, "splora": 0.05},
        "flowers102": {"fine-pruning": 0.01, "splora": 0.02},
        "catsanddogs": {"fine-pruning": 0.004, "splora": 0.007},
    },
    downloads={
        "resnet20-cifar100.safetensors": "a ResNet-20 that has learned CIFAR-100, with the layers and names of "
        "experiments/paper/networks.py",
        "resnet50-imagenet-caffe.fp16.safetensors": "the ResNet-50 of ImageNet at "
        "https://github.com/KaimingHe/deep-residual-networks, under torchvision's names",
    },
    tested={"cifar10": 2500, "flowers102": 2000, "catsanddogs": 1000},
    seeds=(0, 1, 2),
    criteria={"cifar10": (*CRITERIA, "random"), "flowers102": ("taylor",), "catsanddogs": ("taylor",)},
    ablation={},
    ablation_ranks=(8,),
    ablation_inits=(1e-6, 1e-4, 1e-2),
    whole_kernel=(2, 8),
)
