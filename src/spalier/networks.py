"""Networks by name, their classifier, and the logits in whatever they return."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalier import models
from spalier.errors import ConfigError, NetworkError, TargetError, WeightsError
from spalier.text import import_optional

_LOG = logging.getLogger("spalier")
_BUILT_IN: Mapping[str, Callable[..., nn.Module]] = {
    "resnet8": models.resnet8,
    "resnet20": models.resnet20,
    "resnet18": models.resnet18,
    "resnet34": models.resnet34,
    "resnet50": models.resnet50,
}
_FORMS = f"{', '.join(_BUILT_IN)}, torchvision:NAME, timm:NAME, hf:NAME or module:function"
_OWN_WEIGHTS = ("pretrained", "checkpoint_path")
_OF_THE_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_SAVED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
# a part of a path that says "classifier" in torchvision, timm, transformers and most others
_CLASSIFIER = re.compile(
    r"(\w*classifier\w*|heads?|head_dist|dist_head|cls_head|linear_head|fc|score|classif|last_linear|logits)"
)
_AUXILIARY = re.compile(r"(^|\.)aux", re.IGNORECASE)


def open_network(
    name: str,
    *,
    classes: int | None = None,
    weights: str | PathLike[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """A network by name: the same for the same seed, in eval mode, in float32 on the CPU.

    ``module:function`` imports the module and calls the function: it runs code of that name. Pass only names that
    the user wrote, never one from a file that came from elsewhere.

    Args:
        name: ``resnet8``, ``20``, ``18``, ``34`` or ``50``, ``torchvision:NAME``, ``timm:NAME``, ``hf:NAME`` (a name on
            the Hugging Face hub or a folder), or ``module:function``. A library's prefix wins over a module.
        classes: how many classes; None for the network's own number.
        weights: a local file: safetensors, or a PyTorch checkpoint of tensors alone. Where it has other classes, the
            classifier keeps its fresh values; what was pooled or skipped is logged.
        seed: what the network is initialised with; the caller's random state stays as it is.
        options: what else the network's constructor takes.

    >>> net = open_network("resnet18", classes=10, stem="cifar")
    >>> net.fc, net.training
    (Linear(in_features=512, out_features=10, bias=True), False)
    >>> open_network("resnet58")
    Traceback (most recent call last):
    spalier.errors.NetworkError: there is no network 'resnet58'; did you mean resnet8, resnet50, resnet18? Expected
    resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME or module:function
    """
    _check(name, classes, seed, options)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        net = _made(name, classes, weights, options)
    if not any(tensor.is_meta for tensor in net.state_dict().values()):
        net = net.to("cpu")
    net = net.float().eval()
    if weights is not None and not name.startswith("hf:"):
        _load_(net, weights, classes)
    return net


def head_of(net: nn.Module, *, classes: int | None = None) -> str:
    """The name of the classifier: the last linear layer, or 1x1 convolution, whose outputs are the classes.

    The number of classes is ``classes``, or what the network says of itself. Names that libraries use go before
    others; auxiliary classifiers do not count.

    >>> head_of(models.resnet18(classes=10))
    'fc'
    >>> head_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    '2'
    """
    count = _count(net) if classes is None else classes
    layers = _layers(net)
    fitting = {name: outputs for name, outputs in layers.items() if count is None or outputs == count}
    known = _outermost([name for name in fitting if _root(name) is not None])
    if known and _is_one_path(net, known, layers):
        return known[-1]
    if not known and fitting and list(fitting)[-1] == list(layers)[-1]:
        return list(fitting)[-1]
    wanted = "" if count is None else f" of {count} outputs"
    several = f"linear layers{wanted} that could be it: {', '.join(known or fitting)}"
    found = several if fitting else f"no linear layer{wanted}"
    raise TargetError(
        f"the classifier of the {type(net).__name__} is not known, it has {found}; expected one of a known name, or "
        "the last layer: pass head=, a name or several"
    )


def logits_of(output: object) -> Tensor:
    """The logits in what a network returns: a tensor, ``.logits``, ``["logits"]``, or the first tensor of several.

    >>> logits_of({"loss": None, "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(found, tuple | list):
        found = next((each for each in found if isinstance(each, Tensor)), None)
    if not isinstance(found, Tensor):
        raise NetworkError(
            f"the network returned a {type(output).__name__} without logits; expected a tensor, an output with "
            '.logits or ["logits"], or a tuple that has a tensor'
        )
    return found


def _made(
    name: str, classes: int | None, weights: str | PathLike[str] | None, options: dict[str, Any]
) -> nn.Module:
    prefix, _, rest = name.partition(":")
    if name in _BUILT_IN:
        return _called(name, _BUILT_IN[name], classes, options)
    if prefix in ("torchvision", "timm") and rest:
        return _of_library(prefix, rest, classes, options)
    if prefix == "hf" and rest:
        return _of_transformers(rest, classes, weights, options)
    if rest and prefix not in _BUILT_IN and all(part.isidentifier() for part in prefix.split(".")):
        return _called(name, _function(prefix, rest), classes, options)
    raise NetworkError(f"there is no network {name!r}{_close(name, _BUILT_IN)} Expected {_FORMS}")


def _of_library(library: str, model: str, classes: int | None, options: dict[str, Any]) -> nn.Module:
    own = {} if classes is None else {"num_classes": classes}
    try:
        return models.network(f"{library}:{model}", **own, **options)
    except NetworkError as error:
        if error.__cause__ is None or isinstance(error.__cause__, ModuleNotFoundError):
            raise
        try:
            known = import_module("torchvision.models" if library == "torchvision" else "timm").list_models()
        except RuntimeError:  # the library itself does not load, as the error says
            raise error from error.__cause__
        if model in known:
            raise
        raise NetworkError(f"{error}{_close(model, known)}".rstrip(";")) from error


def _of_transformers(
    name: str, classes: int | None, weights: str | PathLike[str] | None, options: dict[str, Any]
) -> nn.Module:
    transformers = import_optional("transformers", "networks called hf:NAME", NetworkError)
    source = None if weights is None else models.read_weights(weights)
    own = {} if classes is None else {"num_labels": classes}
    hub = {key: value for key, value in options.items() if key in _OF_THE_HUB}
    try:
        with _quiet():
            config, unused = transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=False, return_unused_kwargs=True, **own, **options
            )
            if unused:
                raise ConfigError(f"hf:{name} has no option {', '.join(unused)}; see its config.json")
            net, info = _of_config(transformers.AutoModelForImageClassification, name, config, source, hub)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise NetworkError(f"transformers cannot make {name!r} of safetensors: {error}") from error
    made: nn.Module = net
    _check_loaded(name if weights is None else str(weights), made, info)
    return made


def _of_config(
    auto: Any, name: str, config: Any, source: dict[str, Tensor] | None, hub: dict[str, Any]
) -> Any:
    """The network, and what transformers says of its weights."""
    fresh = None
    if source is not None or _has_no_weights(Path(name)):
        fresh = auto.from_config(config, trust_remote_code=False)
    if fresh is not None and source is None:
        return fresh, {}
    # in files some tensors have other names than in the network; the library knows how to translate them
    kind, place = (auto, name) if fresh is None else (type(fresh), None)
    remote = {} if kind is not auto else {"trust_remote_code": False, **hub}
    return kind.from_pretrained(
        place,
        config=config,
        state_dict=source,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        dtype=torch.float32,
        **remote,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and reports of transformers: what matters of them is logged here, or raised."""
    from transformers.utils import logging as theirs

    verbosity, has_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if has_bars:
            theirs.enable_progress_bar()


def _check_loaded(name: str, net: nn.Module, info: Mapping[str, Any]) -> None:
    """Only the classifier may have other classes, or be missing; the library would let anything pass."""
    changed = {str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys", ())}
    fresh = changed | set(info.get("missing_keys", ()))
    unused = sorted(info.get("unexpected_keys", ()))
    heads = tuple(f"{head}." for head in _classifiers(net, _count(net)))
    wrong = sorted(key for key in fresh if not key.startswith(heads))
    if wrong:
        raise WeightsError(
            f"the weights of {name!r} do not fit the network: {', '.join(wrong[:5])} missing or of another shape; "
            "expected weights of this configuration, with other classes at most"
        )
    if fresh or unused:
        _LOG.info("%s: initialised anew %s; left out %s", name, _listed(sorted(fresh)), _listed(unused))


def _function(module: str, function: str) -> Callable[..., Any]:
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        libraries = _close(module, ("torchvision", "timm", "hf"))
        raise NetworkError(
            f"there is no module {module!r} to import {function!r} from{libraries} Expected {_FORMS}"
        ) from error
    made = getattr(found, function, None)
    if not callable(made):
        names = [name for name, value in vars(found).items() if callable(value)]
        raise NetworkError(f"{module} has no function {function!r}{_close(function, names)}".rstrip(";"))
    return made  # type: ignore[no-any-return]


def _called(name: str, make: Callable[..., Any], classes: int | None, options: dict[str, Any]) -> nn.Module:
    taken = inspect.signature(make).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    unknown = [] if takes_all else sorted(options.keys() - taken.keys())
    if unknown:
        raise ConfigError(f"{name} takes no option {', '.join(unknown)}; it takes {', '.join(taken)}")
    is_told = classes is not None and (takes_all or "classes" in taken)
    net = make(**options, **({"classes": classes} if is_told else {}))
    if not isinstance(net, nn.Module):
        raise NetworkError(f"{name} returned a {type(net).__name__}, expected an nn.Module")
    if classes is not None and classes not in _layers(net).values():
        raise NetworkError(
            f"{name} made no network of {classes} classes: none of its linear layers has as many outputs; "
            "let the function take classes="
        )
    return net


def _load_(net: nn.Module, weights: str | PathLike[str], classes: int | None) -> None:
    heads = _classifiers(net, classes or _count(net))
    loaded = models.load_weights_(net, weights, head=heads)
    _LOG.info("%s: pooled %s; skipped %s", weights, _listed(loaded.pooled), _listed(loaded.skipped))


def _classifiers(net: nn.Module, classes: int | None) -> list[str]:
    """Every layer whose outputs are the classes: the head, a second one for distillation, auxiliary ones."""
    fitting = [
        n for n, outputs in _layers(net, auxiliary=True).items() if classes is None or outputs == classes
    ]
    named = [name for name in fitting if _root(name) is not None or _AUXILIARY.search(name)]
    try:
        return list(dict.fromkeys([*named, head_of(net, classes=classes)]))
    except TargetError:  # several, and all of them are here already
        return named


def _layers(net: nn.Module, *, auxiliary: bool = False) -> dict[str, int]:
    """The outputs of every linear layer and 1x1 convolution, in module order."""
    found = {}
    for name, module in net.named_modules():
        if _AUXILIARY.search(name) and not auxiliary:
            continue
        if isinstance(module, nn.Linear):
            found[name] = module.out_features
        elif isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            found[name] = module.out_channels
    return found


def _count(net: nn.Module) -> int | None:
    """How many classes a network says that it has."""
    config = getattr(net, "config", None)
    for owner, attribute in (
        (config, "num_labels"),
        (net, "num_classes"),
        (net, "num_labels"),
        (net, "classes"),
    ):
        value = getattr(owner, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _root(name: str) -> str | None:
    """The first part of a path that is named like a classifier, with all before it."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if _CLASSIFIER.fullmatch(part):
            return ".".join(parts[: number + 1])
    return None


def _outermost(names: Sequence[str]) -> list[str]:
    """Those whose classifier lies least deep: ``fc`` before a ``blocks.0.attention.head``."""
    depths = {name: str(_root(name)).count(".") for name in names}
    return [name for name in names if depths[name] == min(depths.values())]


def _is_one_path(net: nn.Module, names: Sequence[str], layers: Mapping[str, int]) -> bool:
    """Whether the last of these layers follows the others; layers of as many outputs may stand side by side."""
    if len({_root(name) for name in names}) > 1:
        return False
    equal = [name for name in names if layers[name] == layers[names[-1]]]
    parents = {name.rpartition(".")[0] for name in equal}
    return len(equal) == 1 or (
        len(parents) == 1 and isinstance(net.get_submodule(parents.pop()), nn.Sequential)
    )


def _has_no_weights(folder: Path) -> bool:
    return folder.is_dir() and not any(True for pattern in _SAVED for _ in folder.glob(pattern))


def _close(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(matches)}?" if matches else ";"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _check(name: object, classes: object, seed: object, options: Mapping[str, object]) -> None:
    if not isinstance(name, str):
        raise NetworkError(f"the network is a {type(name).__name__}, expected a name: {_FORMS}")
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 1):
        raise ConfigError(f"classes is {classes!r}, expected an integer of at least 1, or None")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed is {seed!r}, expected an integer")
    told = [option for option in ("num_classes", "num_labels") if option in options]
    if told:
        raise ConfigError(f"{told[0]} is an option of the library's; pass classes=")
    fetched = [option for option in _OWN_WEIGHTS if options.get(option)]
    if fetched:
        raise ConfigError(
            f"{fetched[0]} lets the library fetch weights as it likes; download them, and pass weights=FILE"
        )
