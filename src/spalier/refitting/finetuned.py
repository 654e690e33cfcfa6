"""`Task.from_checkpoint`: a network that somebody has fine-tuned in full, as a task of its base.

The checkpoint's numbers go into a copy of the base whose weights learn themselves (`FineTune`), as if it had been
trained here; then `refit_` writes what was learned in a narrow form. What does not fit the base is listed before that.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.attach import attach_
from spalier.adapters.geometry import is_norm, plain_tensors, tensors_of
from spalier.adapters.kinds import Adapter, ByLayer, FineTune
from spalier.adapters.targets import Names, select_named
from spalier.criteria.probe import batches_of
from spalier.errors import TargetError, WeightsError
from spalier.models import read_weights
from spalier.networks import head_of, logits_of
from spalier.pruning.modules import resized_by_tensors
from spalier.refitting.refit import refit_
from spalier.structure.graph import in_eval_mode
from spalier.tasks.base import Base
from spalier.tasks.task import Storage, Task
from spalier.text import first_few

Finetuned = nn.Module | Mapping[str, Tensor] | str | PathLike[str]


def from_checkpoint(
    base: nn.Module,
    finetuned: Finetuned,
    *,
    name: str,
    bytes: int | None,
    adapter: Adapter | ByLayer | None,
    batches: Iterable[Any] | None,
    test: Iterable[Any] | None,
    head: str | Sequence[str] | None,
    example: Any,
    storage: Storage,
    said: Mapping[str, Any],
) -> Task:
    """What `Task.from_checkpoint` does."""
    known = Base(base)
    state = finetuned.state_dict() if isinstance(finetuned, nn.Module) else finetuned
    heads = heads_of(base, head)
    given = _unrounded(known, fitting(known, read_weights(state), heads))
    other = {key for key, tensor in given.items() if not torch.equal(known.tensors[key], tensor)}
    changed = {key.rpartition(".")[0] for key, first in known.ties.items() if first in other}
    if not changed:
        raise WeightsError("the checkpoint is the base, to the last bit; expected a network that was fine-tuned")
    net = resized_copy(base, given)
    # what was frozen when it was fine-tuned stays the base's; where that is all but norms and head, they are the task
    outside = {module for module in changed if module not in heads and not is_norm(known.modules[module])}
    kind = FineTune() if outside else ByLayer()
    attach_(net, kind, targets=lambda path, _: path in changed, head=heads or None, example=example)
    _fill_(net, given)
    seen = None if batches is None else list(batches)
    asked = seen if test is None else list(test)
    before = {} if asked is None else _measured(net, asked)
    refitted = None
    if outside:
        if bytes is None and adapter is None:
            bytes = default_bytes(net, heads)
        elif type(bytes) is int:  # for the whole file, with what it says of itself
            words = json.dumps(json.dumps([name, said, before, before], default=str))
            bytes = max(1, bytes - len(words) - 32 * len(before))
        refitted = refit_(net, adapter, bytes=bytes, batches=seen, storage=storage)
    task = replace(Task.of(net, name, **said).stored_as(storage), refitted=refitted)
    if asked is None:
        return task
    after = _measured(task.build(base, share=True), asked)
    metrics = after | {f"{key} of the checkpoint": value for key, value in before.items()} | task.info.metrics
    return replace(task, info=replace(task.info, metrics=metrics))


def default_bytes(net: nn.Module, heads: Collection[str]) -> int:
    """A bit for each weight, and what norms, biases and heads take besides.

    On MiniLM that cost one question of 500 (docs/howto/checkpoints.md).
    """
    inside = tuple(f"{head}." for head in heads)
    tensors = {id(tensor): (name, tensor) for name, tensor in tensors_of(net).items()}.values()
    wide = sum(t.numel() for name, t in tensors if t.dim() > 1 and not name.startswith(inside))
    own = sum(t.numel() for _, t in tensors if t.is_floating_point()) - wide
    return wide // 8 + 2 * own + 64 * len(tensors)


# does the checkpoint fit the base?


def heads_of(base: nn.Module, head: str | Sequence[str] | None) -> list[str]:
    """The modules that may have another number of classes: those that are named, or the classifier if there is one."""
    if head is None:
        try:
            return [head_of(base)]
        except TargetError:  # a language model has none, and learns as a whole
            return []
    names = Names(base)
    chosen = select_named(names, "head", head)
    return [names.first(module) for module in names.of if module in chosen]


def fitting(base: Base, state: Mapping[str, Tensor], heads: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the first names that the base has for them; an error lists what does not fit."""
    given: dict[str, Tensor] = {}
    wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape": [], "no longer tied": []}
    inside = tuple(f"{head}." for head in heads)
    for key, tensor in state.items():
        first = base.ties.get(key)
        if first is None:
            wrong["unexpected"].append(key)
            continue
        own = base.tensors[first].shape
        tensor = tensor.reshape(own) if tensor.numel() == own.numel() == 1 else tensor  # (1,) for a scalar
        if tensor.shape != own and not (key.startswith(inside) and tensor.dim() == len(own)):
            wrong["of another shape"].append(f"{key} {tuple(tensor.shape)} for {tuple(own)}")
        elif first in given and not torch.equal(given[first], tensor):
            wrong["no longer tied"].append(f"{key} and {first}")
        given.setdefault(first, tensor)
    # old files lack the counters of norms; a tied tensor is in a file under one of its names
    for key in base.net.state_dict():
        if base.ties.get(key, key) not in given and key in base.ties and not key.endswith("num_batches_tracked"):
            wrong["missing"].append(key)
    found = [f"{what}: {first_few(names)}" for what, names in wrong.items() if names]
    if found:
        raise WeightsError(
            f"the checkpoint does not fit the base, a {type(base.net).__name__}; {'; '.join(found)}. Expected a "
            f"fine-tuned network of the same architecture; only the head ({first_few(heads) or 'there is none'}) may "
            "have other classes: pass head= if it is another"
        )
    return given


def resized_copy(base: nn.Module, given: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the base, in which parameters have the shapes of these: heads of another number of classes."""
    net = copy.deepcopy(base, plain_tensors(base))
    for name, tensor in given.items():
        path, _, key = name.rpartition(".")
        module = net.get_submodule(path)
        old = module._parameters.get(key)
        if old is not None and old.shape != tensor.shape:
            values = tensor.detach().to(old.device, old.dtype, copy=True)
            module._parameters[key] = nn.Parameter(values, requires_grad=old.requires_grad)
            module.__dict__.update(resized_by_tensors(module, {}) or {})
    return net


def _unrounded(base: Base, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's numbers in the base's dtypes.

    A checkpoint of fewer bits has rounded numbers too that nobody has learned: what the base's rounds to is the base's.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        own, tensor = base.tensors[name].detach(), tensor.detach().to(base.tensors[name].device)
        is_same = own.to(tensor.dtype) == tensor if own.shape == tensor.shape else torch.tensor(False)
        found[name] = torch.where(is_same, own, tensor.to(own.dtype)) if is_same.any() else tensor.to(own.dtype)
    return found


@torch.no_grad()
def _fill_(net: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Let the copies that learn hold the checkpoint's numbers; what does not learn is the base's in both."""
    for name, tensor in tensors_of(net).items():
        if name in given:
            tensor.copy_(given[name])


# what it is worth


@torch.no_grad()
def _measured(net: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
    """The accuracy on batches with classes, and the loss that the network returns itself: those that there are.

    Where a loss is of tokens, its mean is over all of them, and its exponential is the perplexity.
    """
    right, losses, total, weight = 0.0, 0.0, 0, 0
    has_classes = has_loss = True
    with in_eval_mode(net):
        for batch in batches_of(batches, net, "from_checkpoint"):
            output = batch.run(net)
            logits = logits_of(output)
            wanted: Any = batch.targets[0] if batch.targets else batch.kwargs.get("labels")
            is_class = isinstance(wanted, Tensor) and wanted.dim() == 1 and not wanted.is_floating_point()
            has_classes = has_classes and is_class and logits.dim() == 2
            loss = getattr(output, "loss", None)
            has_loss = has_loss and isinstance(loss, Tensor)
            right += float(logits.argmax(1).eq(wanted).sum()) if has_classes else 0.0
            is_of_tokens = isinstance(wanted, Tensor) and wanted.dim() == 2 and logits.dim() == 3
            size = _tokens(net, wanted) if is_of_tokens else batch.size
            losses += float(loss) * size if has_loss and loss is not None and size else 0.0
            total, weight = total + batch.size, weight + size
    found = {"accuracy": right / total} if has_classes else {}
    found |= {"loss": losses / weight} if has_loss and weight else {}
    return found | ({"perplexity": math.exp(found["loss"])} if "loss" in found and is_of_tokens else {})


def _tokens(net: nn.Module, labels: Tensor) -> int:
    """How many tokens a loss is the mean of; a decoder is not asked for the first of a row."""
    generates: Any = getattr(net, "can_generate", bool)
    is_decoder = generates() and not getattr(getattr(net, "config", None), "is_encoder_decoder", False)
    return int((labels[:, 1:] if is_decoder else labels).ne(-100).sum())
