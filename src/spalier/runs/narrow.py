"""The narrow forms that a run writes of what it has learned wide, by the names that settings have for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.attachment import attachment_of
from spalier.adapters.codes import LEVELS
from spalier.adapters.kinds import ByLayer, Coded, LowRank, SPDelta, SPLoRA, SPPaRA
from spalier.errors import BudgetError, ConfigError, RunError
from spalier.refitting import refit_
from spalier.tasks import Task
from spalier.tasks.task import Storage

EXPECTED = "splora-r8, splora-r8-full, spdelta-1bit, sppara, bytes-1/20, bytes-200000 or wide"
FAST = 5.0
"""How much faster low-rank factors and the scales of codes learn than codes, norms and head do in a narrow form."""


@dataclass(frozen=True)
class Form:
    """One way to write what was learned: an adapter, a number of bytes, or all kept weights as they are."""

    name: str
    adapter: Any = None
    bytes: int | None = None
    share: float | None = None
    """Of the bytes that all kept weights take in float32."""

    @property
    def label(self) -> str:
        """The name as a part of file names."""
        return self.name.replace("/", "of").replace(".", "_")

    @property
    def is_budget(self) -> bool:
        """Whether it is a number of bytes."""
        return self.bytes is not None or self.share is not None

    def budget(self, wide: int) -> int | None:
        """How many bytes the file may have, where that of the wide network has so many; None for an adapter."""
        return self.bytes if self.share is None else int(self.share * wide)


def form_of(name: str) -> Form:
    """A form by its name.

    >>> form_of("spdelta-2bit").adapter, form_of("bytes-1/20").budget(1000)
    (SPDelta(bits=2, scales='row', init_range=0.01), 50)
    """
    bits = "|".join(map(str, LEVELS))
    if name in ("wide", "sppara"):
        return Form(name, SPPaRA() if name == "sppara" else None)
    if found := re.fullmatch(r"splora-r([1-9]\d*)(-full)?", name):
        # a rank that a layer cannot use any more is lowered there
        return Form(name, SPLoRA(rank=int(found[1]), kernel="full" if found[2] else "center", cap=True))
    if found := re.fullmatch(rf"spdelta-({bits})bits?", name):
        return Form(name, SPDelta(bits=int(found[1])))
    if found := re.fullmatch(r"bytes-1/([1-9]\d*)", name):
        return Form(name, share=1 / int(found[1]))
    if found := re.fullmatch(r"bytes-([1-9]\d*)", name):
        return Form(name, bytes=int(found[1]))
    raise ConfigError(f"codes has {name!r}, expected names such as {EXPECTED}")


def default_codes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The form of a method with its rank and options."""
    method, rank, options = settings["method"], settings["rank"], settings["adapter_options"]
    if method == "splora" and type(rank) is int:
        return (f"splora-r{rank}" + ("-full" if options.get("kernel") == "full" else ""),)
    if method == "spdelta":
        return (f"spdelta-{options.get('bits', 2)}bit",)  # docs/codes.md: two are hardly more bytes, and better
    if method == "sppara":
        return ("sppara",)
    raise ConfigError(
        f"learn is wide, and method {method} with rank {rank} has no narrow form; expected splora with a whole rank, "
        "spdelta or sppara, or codes"
    )


def check_wide(config: Any) -> None:
    """Refuse settings that do not go with how tasks are learned."""
    if config.learn == "direct":
        if config.codes is not None:
            raise ConfigError("codes is given, and learn is direct; set learn: wide to write what was learned in them")
        return
    if not config.codes or len(set(config.codes)) < len(config.codes):
        raise ConfigError(f"codes is {list(config.codes or ())}, expected one or more names, each once")
    for name in config.codes:
        form_of(name)
    wrong = {
        f"method is {config.method}": (config.method in ("lora", "fine-pruning"), "expected splora, spdelta or sppara"),
        "keep_optimizer is true": (config.keep_optimizer, "optimizers begin anew at every density"),
        'teacher is "self"': (config.teacher == "self", "each density teaches its own narrow forms"),
        "the budget is bytes": (config.budget == "bytes", "prune by another budget, and set codes: [bytes-200000]"),
    }
    for what, (is_so, why) in wrong.items():
        if is_so:
            raise ConfigError(f"{what}, and learn is wide; {why}")


def write_narrow_(
    net: nn.Module, form: Form, wide: Task, samples: list[Any], storage: Storage, say: Callable[[str], None]
) -> None:
    """Write what a network has learned in a narrow form, in place."""
    if form.name == "wide":
        return
    budget = _left_for_codes(form, wide, storage)
    if budget is None:
        refit_(net, form.adapter, batches=samples, storage=storage)
        return
    _spend_(net, form, budget, samples, storage, say, room=_ROOM)


def hold_budget_(
    net: nn.Module, form: Form, wide: Task, storage: Storage, say: Callable[[str], None], samples: Iterable[Any] = ()
) -> None:
    """Where learning on has made the file larger than it may be, make its codes smaller.

    With samples, which is for the end, it is written once more where that is not enough.
    """
    budget = _left_for_codes(form, wide, storage)
    if budget is None or held_(net, budget, storage):
        return
    left = list(samples)
    if left and attachment_of(net).updated:
        _spend_(net, form, budget, left, storage, say)
    elif left:
        say(f"{form.name}: without any code, norms and head take more than the {budget} bytes that are left for them")


def _spend_(
    net: nn.Module,
    form: Form,
    budget: int,
    samples: list[Any],
    storage: Storage,
    say: Callable[[str], None],
    room: float = 0.0,
) -> None:
    """Spend a budget on codes; where nothing fits, a run goes on with the smallest file that there is."""
    try:
        refit_(net, bytes=budget, batches=samples, storage=storage, room=room)
    except BudgetError as error:
        say(f"{form.name}: {error}; norms and head alone are learned")
        refit_(net, ByLayer(), batches=samples, storage=storage)


@torch.no_grad()
def held_(net: nn.Module, budget: int, storage: Storage) -> bool:
    """Round codes by a wider step, as little as makes the file small enough: those hardly past a half step go first.

    Zeros are what deflating saves most on. Learning on keeps the step, so what is done early is learned around. False
    where that is not enough; nothing is changed then.
    """

    def is_small() -> bool:
        return len(Task.of(net, "refit", base_norms=True).to_bytes(storage=storage)) <= budget

    if is_small():
        return True
    codes = [entry.update for entry in attachment_of(net).updated if isinstance(entry.update, Coded)]
    before = [(c, c.scale.clone(), c.gain.detach().clone()) for c in codes if c.levels > 2]  # signs know no zero

    def widen_(factor: float) -> None:
        for code, step, gain in before:
            code.scale.copy_(factor * step)
            # what a code of three levels stands for stays as it was learned; of more levels, the outer ones move in
            code.gain.copy_(gain / factor if code.levels == 3 else gain)

    low, high = 1.0, _WIDEST
    widen_(high)
    if not is_small():
        widen_(low)
        return False
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        widen_(middle)
        low, high = (low, middle) if is_small() else (middle, high)
    widen_(high)
    return True


def _left_for_codes(form: Form, wide: Task, storage: Storage) -> int | None:
    """The bytes of a form's budget, less those of what a run says of its tasks: classes, preprocessing, metrics."""
    budget = form.budget(len(wide.to_bytes()))
    if budget is None:
        return None
    silent = replace(wide.info, name="refit", metrics={}, classes=(), preprocessing={}, provenance={})
    told, untold = (len(task.to_bytes(storage=storage)) for task in (wide, replace(wide, info=silent)))
    return budget - (told - untold) - _METRICS


_METRICS = 100
"""Bytes that accuracies may take."""
_HALVINGS, _WIDEST = 8, 4.0
_ROOM = 0.04
"""How much codes may grow when they learn on."""


def speed_of(net: nn.Module, name: str) -> float:
    """How much faster a parameter of a narrow form learns than the others.

    Factors that are rounded to a few levels learn like other codes: faster ones forgot more than they learned.
    """
    owner, _, key = name.rpartition(".")
    if not owner.endswith("_adapter"):
        return 1.0
    is_coded = bool(getattr(net.get_submodule(owner), "levels", 0))
    return FAST if key == "gain" or (key in ("down", "up") and not is_coded) else 1.0


# what a task file does not hold: the numbers that codes were rounded from


def unrounded(net: nn.Module) -> dict[str, Tensor]:
    """All numbers of coded updates, by name."""
    found: dict[str, Tensor] = {}
    for path, module in net.named_modules():
        if isinstance(module, Coded) or (isinstance(module, LowRank) and module.levels):
            found |= {f"{path}.{key}": value for key, value in module.state_dict().items()}
    return found


@torch.no_grad()
def set_values_(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values of parameters and buffers back."""
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            raise RunError("checkpoint", f"the checkpoint's {name!r} does not fit the network")
        own[name].copy_(value)
