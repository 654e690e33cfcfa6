"""From images, tensors and texts to classes with probabilities: one way for the command line, a service and a cluster.

Images are decoded as runs decode them, so that a prediction is what `spalier eval` counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spalier.data.data import Images, Preprocessing, center_crop, normalize
from spalier.data.images import center_square, decode, to_rgb, why_unusable
from spalier.errors import DataError
from spalier.networks import logits_of
from spalier.tasks import TaskInfo

Text = str | tuple[str, str]
Raw = bytes | os.PathLike[str] | Tensor | Text
"""An image file's contents or its path, a tensor as the network takes it, a text or a pair of them."""
Sample = Images | Tensor | Text
"""An input that was looked at alone: an image decoded and resized, a tensor, a text."""
MOST_SIDE, MOST_TOKENS = 4096, 8192
"""A task's file may say anything: larger images and longer texts are not made."""
Tokenizer = Callable[..., Mapping[str, Tensor]]
"""Called as those of transformers are."""


def predict(
    net: nn.Module, info: TaskInfo, inputs: Sequence[Raw], *, tokenizer: Tokenizer | None = None, top: int | None = None
) -> list[dict[str, float]]:
    """What a task's network says of some inputs: for each its classes and their probabilities, the likeliest first.

    Args:
        net: the network that the task makes of its base, in eval mode.
        info: what the task says of itself: how inputs are prepared, and the names of classes.
        inputs: images as bytes or paths, tensors of one sample each, or texts.
        tokenizer: for texts; anything that is called as a tokenizer of transformers.
        top: how many classes; None for all.

    >>> import spalier as sp
    >>> from spalier.networks import open_network
    >>> base = open_network("resnet8", classes=2)
    >>> net = open_network("resnet8", classes=2)
    >>> _ = sp.attach_(net, sp.SPLoRA(rank=2), head="fc")
    >>> task = sp.Task.of(net, "pets", classes=["cat", "dog"])
    >>> sorted(predict(task.build(base), task.info, [torch.zeros(3, 16, 16)])[0])
    ['cat', 'dog']
    """
    samples = [to_sample(info, raw) for raw in inputs]
    return named(info, probabilities(net, collate(info, samples, tokenizer)), top)


def is_text(info: TaskInfo) -> bool:
    """Whether a task reads texts."""
    return info.preprocessing.get("kind") == "text"


def to_sample(info: TaskInfo, raw: Raw, *, pixels: int | None = None) -> Sample:
    """Look at one input: decode an image of at most so many pixels, check a tensor, take a text as it is."""
    if isinstance(raw, Tensor):
        return _checked(info, raw, pixels)
    if isinstance(raw, str | tuple):
        if not is_text(info):
            raise DataError(f"the input is a text, and the task {info.name!r} takes images; pass those")
        return raw
    if is_text(info):
        raise DataError(f"the input is a file, and the task {info.name!r} reads texts; pass those")
    stored = preprocessing_of(info).stored
    try:
        data = raw if isinstance(raw, bytes) else Path(raw).read_bytes()
        return center_square(to_rgb(decode(data, pixels)), stored)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise a dozen kinds
        where = "" if isinstance(raw, bytes) else f"{str(raw)!a}: "
        raise DataError(f"{where}the image cannot be used: {why_unusable(error)}") from error


def preprocessing_of(info: TaskInfo) -> Preprocessing:
    """How a task's images become a batch; an error where the task does not say that, or says what cannot be."""
    said = info.preprocessing
    size, mean, std = (said.get(name) for name in ("size", "mean", "std"))
    stored = said.get("stored", size)
    sizes = type(size) is int and type(stored) is int and 1 <= size <= stored <= min(4 * size, MOST_SIDE)
    if not sizes or not (_is_color(mean) and _is_color(std) and min(std or ()) > 0):
        raise DataError(
            f"the task {info.name!r} does not say how its images are made (size, mean and std); pass tensors that are "
            "prepared as in training"
        )
    return Preprocessing(size, stored, 0, False, tuple(mean), tuple(std))  # type: ignore[arg-type]


def _is_color(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(v, int | float) for v in value)


def sample_shape(info: TaskInfo) -> tuple[int, ...] | None:
    """The shape of one sample, where the task says it."""
    size = info.preprocessing.get("size")
    if type(size) is int and size > 0:
        return (3, size, size)
    match info.inputs.get("args"):
        case [["tensor", str(), [int(), *shape]]]:
            return tuple(shape)
    return None


def _checked(info: TaskInfo, tensor: Tensor, most: int | None) -> Tensor:
    expected, shape = sample_shape(info), tuple(tensor.shape)
    if is_text(info):
        raise DataError(f"the input is a tensor, and the task {info.name!r} reads texts; pass those")
    if expected is not None and shape != expected:
        raise DataError(f"a sample has shape {shape}, expected {expected} as the task {info.name!r} says")
    if expected is None and most is not None and tensor.numel() > 3 * most:
        raise DataError(f"a sample has {tensor.numel():,} numbers, at most {3 * most:,} are taken")
    found = tensor.float()
    if not bool(torch.isfinite(found).all()):
        raise DataError("a sample has numbers that are NaN or infinite")
    return found


def collate(
    info: TaskInfo, samples: Sequence[Sample], tokenizer: Tokenizer | None = None
) -> Tensor | Mapping[str, Tensor]:
    """A batch as the network takes it, of samples of one kind and shape."""
    first = samples[0]
    if isinstance(first, np.ndarray):
        preprocessing = preprocessing_of(info)
        return normalize(center_crop(np.stack(samples), preprocessing.size), preprocessing)
    if isinstance(first, Tensor):
        return torch.stack(samples)  # type: ignore[arg-type]
    if tokenizer is None:
        raise DataError(f"the task {info.name!r} reads texts, and there is no tokenizer; pass one, or --base hf:NAME")
    known, wanted = getattr(tokenizer, "digest", None), info.preprocessing.get("tokenizer_digest")
    if known is not None and wanted is not None and known != wanted:
        raise DataError(
            f"the task {info.name!r} was learned with another tokenizer ({info.preprocessing.get('tokenizer')!a}) than "
            "the base has; expected the base that it was learned on"
        )
    said = info.preprocessing.get("max_length")
    length = min(said, MOST_TOKENS) if type(said) is int and said > 0 else 512
    return tokenizer(list(samples), padding=True, truncation=True, max_length=length, return_tensors="pt")


@torch.no_grad()
def probabilities(net: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The probability of each class for each sample: (samples, classes)."""
    found = net(batch) if isinstance(batch, Tensor) else net(**batch)
    return logits_of(found).float().softmax(1)


def named(info: TaskInfo, found: Tensor, top: int | None = None) -> list[dict[str, float]]:
    """Probabilities by the names of classes, the likeliest first; numbers where the task does not name them."""
    names = info.classes if len(info.classes) == found.shape[1] else tuple(map(str, range(found.shape[1])))
    values, places = found.topk(min(top or found.shape[1], found.shape[1]), dim=1)
    rows = zip(values.tolist(), places.tolist(), strict=True)
    return [{names[place]: value for value, place in zip(*row, strict=True)} for row in rows]
