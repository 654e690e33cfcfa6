"""Modules that read the weights of layers inside of them instead of calling these layers.

`nn.MultiheadAttention` does so with its ``out_proj``, torchvision's Swin attention with ``qkv`` and ``proj``. An
adapter that sits on such a layer would be passed by in silence. What a module reads shows in the source of its
``forward`` and of the methods that this calls: ``self.proj.weight`` and the like. A weight that is fetched in another
way (by index, by ``getattr``, by a function outside of the class) does not show, nor does anything of a class that
Python has no source of; comparing ``fuse(net)`` with ``net`` on a batch tells.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache

from torch import nn

# self.a.b.some_weight, but not where only its dtype, device or shape is asked for
_READ = re.compile(
    r"\bself\.((?:\w+\.)+)(\w*weight)\b(?!\s*\.\s*(?:dtype|device|shape|size|ndim|dim|numel|requires_grad|is_)\w*)"
)
_MENTIONED = re.compile(r"\bself\.(\w+)")


def read_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers inside of ``module`` whose weights its own forward reads, by their path from it.

    >>> list(read_layers(nn.MultiheadAttention(4, 2)))
    ['out_proj']
    >>> read_layers(nn.Sequential(nn.Linear(4, 4)))
    {}
    """
    paths = _read_paths(type(module))  # type: ignore[arg-type]  # classes are hashable
    return {path: layer for path in sorted(paths) for layer in _at(module, path)}


def _at(module: nn.Module, path: str) -> Iterable[nn.Module]:
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return ()
        module = child
    return (module,)


@cache
def _read_paths(kind: type[nn.Module]) -> frozenset[str]:
    sources = {name: _without_aliases(text) for name, text in _sources(kind).items()}
    reached, waiting = set(), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in sources and name not in reached:
            reached.add(name)
            waiting += _MENTIONED.findall(sources[name])
    found = (match for name in reached for match in _READ.findall(sources[name]))
    return frozenset(path.rstrip(".") for path, _ in found)


def _without_aliases(text: str) -> str:
    """``p = self.proj`` and then ``p.weight`` reads as ``self.proj.weight``."""
    for alias, path in re.findall(r"\b(\w+)\s*=\s*(self(?:\.\w+)+)\s*$", text, re.MULTILINE):
        text = re.sub(rf"(?<![\w.]){alias}\.", f"{path}.", text)
    return text


def _sources(kind: type[nn.Module]) -> dict[str, str]:
    """The source of each method, with those that it reaches by ``super()``; empty where Python has no source."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            function = value.fget if isinstance(value, property) else value
            if inspect.isfunction(function) and ("super()" in found.get(name, "super()")):
                try:
                    text = inspect.getsource(function)
                except (OSError, TypeError):
                    text = ""
                found[name] = found.get(name, "").replace("super()", "") + text
    return found
