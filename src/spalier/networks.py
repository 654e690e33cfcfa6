"""Networks by name (`open_network`), their classifier (`head_of`), and the logits in what they return (`logits_of`)."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalier import models
from spalier.adapters.geometry import is_norm
from spalier.errors import ConfigError, NetworkError, TargetError, WeightsError
from spalier.text import check_integer, close_names, first_few, first_line, import_optional

_LOG = logging.getLogger("spalier")
_BUILT_IN = ("resnet8", "resnet20", "resnet18", "resnet34", "resnet50")
OWN_WEIGHTS = {"resnet20": Path(__file__).parent / "weights" / "resnet20.safetensors"}
"""The bases that come with the package; the card beside each says what it was learned from."""
_FORMS = f"{', '.join(_BUILT_IN)}, torchvision:NAME, timm:NAME, hf:NAME or module:function"


def open_network(
    name: str,
    *,
    classes: int | None = None,
    weights: str | PathLike[str] | None = None,
    pretrained: bool = False,
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
        pretrained: load the library's own weights, through its own loader and cache. Those of ``resnet20`` come with
            Spalier; ResNet-18, -34 and -50 take torchvision's. What ``hf:`` names is pretrained in any case.
        seed: what the network is initialised with; the caller's random state stays as it is.
        options: what else the network's constructor takes.

    >>> net = open_network("resnet18", classes=10, stem="cifar")
    >>> net.fc, net.training
    (Linear(in_features=512, out_features=10, bias=True), False)
    >>> base = open_network("resnet20", classes=3, pretrained=True)
    >>> looks_untrained(base), looks_untrained(net)
    (False, True)
    >>> open_network("resnet58")
    Traceback (most recent call last):
    spalier.errors.NetworkError: there is no network 'resnet58'; did you mean resnet8, resnet50, resnet18? Expected
    resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME or module:function
    """
    if classes is not None:
        check_integer("classes", classes, 1)
    for option in ("num_classes", "num_labels"):
        if option in options:
            raise ConfigError(f"{option} is an option of the library's; pass classes=")
    if options.get("checkpoint_path"):
        raise ConfigError("checkpoint_path lets the library read any file; pass weights=FILE")
    if pretrained and weights is not None:
        raise ConfigError("weights and pretrained are both given; expected one of them")
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        net = _made(name, classes, weights, pretrained, options)
    if not any(tensor.is_meta for tensor in net.state_dict().values()):
        net = net.to("cpu")
    net = net.float().eval()
    source = _state(name) if pretrained and name in _BUILT_IN else weights
    if source is not None and not name.startswith("hf:"):
        loaded = models.load_weights_(net, source, head=_classifiers(net, classes or _class_count(net)))
        done = (", ".join(names) or "nothing" for names in (loaded.pooled, loaded.skipped))
        _LOG.info("%s: pooled %s; skipped %s", weights or name, *done)
    return net


# by name


def _made(
    name: str, classes: int | None, weights: str | PathLike[str] | None, pretrained: bool, options: dict[str, Any]
) -> nn.Module:
    prefix, _, rest = name.partition(":")
    if name in _BUILT_IN:
        return _called(name, getattr(models, name), classes, options)
    if prefix in ("torchvision", "timm") and rest:
        return _of_library(prefix, rest, classes, pretrained, options)
    if prefix == "hf" and rest:
        if pretrained and _is_bare(rest):
            raise WeightsError(f"{rest} has a configuration and no weights; pass weights=FILE, or a name on the hub")
        return _of_transformers(rest, classes, weights, options)
    if pretrained and rest:
        raise ConfigError(f"pretrained is for networks of libraries; let {name} load its weights, or pass weights=FILE")
    if rest and prefix not in _BUILT_IN and all(part.isidentifier() for part in prefix.split(".")):
        return _called(name, _function(prefix, rest), classes, options)
    raise NetworkError(f"there is no network {name!r}{_close(name, _BUILT_IN)} Expected {_FORMS}")


def _of_library(library: str, model: str, classes: int | None, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    module = "torchvision.models" if library == "torchvision" else "timm"
    found = import_optional(module, f"networks called {library}:NAME", NetworkError)
    own: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    make = found.get_model if library == "torchvision" else found.create_model
    if pretrained and library == "torchvision":  # with its weights a network has their classes, and no others
        own, make = {"weights": "DEFAULT"}, partial(_with_classes, found.get_model, classes)
    elif pretrained:
        own["pretrained"] = True
    try:
        made: nn.Module = make(model, **own, **options)
    except Exception as error:  # libraries, and the internet behind them, raise anything
        is_known = model.partition(".")[0] in found.list_models()
        if is_known and pretrained:
            raise _not_loaded(f"{library}:{model}", library, error) from error
        if not isinstance(error, ValueError | RuntimeError | TypeError):
            raise
        close = "" if is_known else _close(model, found.list_models()).rstrip(";")
        raise NetworkError(f"{library} cannot make {model!r}: {error}{close}") from error
    return made


# weights of libraries


def _state(name: str) -> PathLike[str] | Mapping[str, Tensor]:
    """The pretrained weights of a built-in network: our own file, or torchvision's, whose keys ours have."""
    if name in OWN_WEIGHTS:
        return OWN_WEIGHTS[name]
    found = import_optional("torchvision.models", f"the pretrained weights of {name}", NetworkError)
    if name not in found.list_models():
        raise WeightsError(f"there are no pretrained weights of {name}; take resnet20, whose come with Spalier")
    best = found.get_model_weights(name).DEFAULT
    try:
        return best.get_state_dict(progress=False, check_hash=True)  # type: ignore[no-any-return]
    except Exception as error:  # the internet raises anything
        raise _not_loaded(name, "torchvision", error) from error


def _with_classes(make: Callable[..., nn.Module], classes: int | None, model: str, **options: Any) -> nn.Module:
    """A pretrained network of torchvision, with fresh classifiers where it has other classes."""
    net: Any = make(model, **options)
    own = _layers(net)[head_of(net)]
    if classes in (None, own):
        return net  # type: ignore[no-any-return]
    for path in _classifiers(net, own):
        old: Any = net.get_submodule(path)
        sizes, bias = (old.weight.shape[1], classes), old.bias is not None
        is_linear = isinstance(old, nn.Linear)
        net.set_submodule(path, nn.Linear(*sizes, bias) if is_linear else nn.Conv2d(*sizes, 1, old.stride, bias=bias))
    if hasattr(net, "num_classes"):
        net.num_classes = classes
    return net  # type: ignore[no-any-return]


def _not_loaded(name: str, library: str, error: Exception) -> WeightsError:
    """What was tried, and what to do."""
    cache = str(Path(torch.hub.get_dir()) / "checkpoints")
    if library != "torchvision":
        cache = str(import_optional("huggingface_hub.constants", f"weights of {library}", NetworkError).HF_HUB_CACHE)
    return WeightsError(
        f"{library} could not load the pretrained weights of {name}: {type(error).__name__}: {first_line(error)}; it "
        f"looks in its cache {cache} first, and downloads what is not there: go online once, copy the cache here, or "
        "pass weights=FILE"
    )


def looks_untrained(net: nn.Module) -> bool:
    """Whether every norm of a network still is as it began: its weights then are noise. False where there are none.

    >>> looks_untrained(models.resnet8()), looks_untrained(nn.Linear(2, 2))
    (True, False)
    """
    found: Iterable[Any] = filter(is_norm, net.modules())
    norms = [norm for norm in found if isinstance(norm.weight, Tensor) and not norm.weight.is_meta]
    moved = (getattr(norm, name, None) for norm in norms for name in ("bias", "running_mean"))
    are_even = all(bool((norm.weight == norm.weight.reshape(-1)[0]).all()) for norm in norms)
    return bool(norms) and are_even and not any(tensor is not None and bool(tensor.any()) for tensor in moved)


def warn_if_untrained(net: nn.Module, name: str) -> None:
    """Say loudly that a base knows nothing."""
    if looks_untrained(net):
        _LOG.warning(
            "%s has random weights: the base is frozen noise, and every task has to learn everything by itself; pass "
            "pretrained=True (--pretrained), or weights (--weights FILE)",
            name,
        )


def _function(module: str, function: str) -> Callable[..., Any]:
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
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


def _close(name: str, known: Iterable[str]) -> str:
    matches = close_names(name, known)
    return f"; did you mean {', '.join(matches)}?" if matches else ";"


# transformers

_OF_THE_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_SAVED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack")


def _of_transformers(
    name: str, classes: int | None, weights: str | PathLike[str] | None, options: dict[str, Any]
) -> nn.Module:
    """Code of others never runs: neither a folder's own modules nor pickles."""
    transformers = import_optional("transformers", "networks called hf:NAME", NetworkError)
    source = None if weights is None else models.read_weights(weights)
    own = {} if classes is None else {"num_labels": classes}
    hub = {key: value for key, value in options.items() if key in _OF_THE_HUB}
    try:
        with quiet_transformers():
            config, unused = transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=False, return_unused_kwargs=True, **own, **options
            )
            if unused:
                raise ConfigError(f"hf:{name} has no option {', '.join(unused)}; see its config.json")
            auto = _auto_class(transformers, name, config)
            net: Any
            if source is None and not _is_bare(name):
                net, info = auto.from_pretrained(name, trust_remote_code=False, **hub, **_loading(config))
            else:
                net, info = auto.from_config(config, trust_remote_code=False), {}
            if source is not None:
                # in files some tensors have other names than in the network; the class knows how to translate them
                net, info = type(net).from_pretrained(None, state_dict=source, **_loading(config))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise NetworkError(f"transformers cannot make {name!r} of safetensors: {error}") from error
    _check_loaded(name if weights is None else str(weights), net, info)
    return net  # type: ignore[no-any-return]


def _auto_class(transformers: Any, name: str, config: Any) -> Any:
    """Language models classify texts, all others images, by what the library has a network for."""
    for auto in (transformers.AutoModelForImageClassification, transformers.AutoModelForSequenceClassification):
        if type(config) in auto._model_mapping:
            if getattr(config, "pad_token_id", 0) is None:  # decoders look for the last token that is none
                tokenizer = None
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a network may come without one
                    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
                config.pad_token_id = padding_token(config, tokenizer)
            return auto
    raise NetworkError(f"hf:{name} is a {config.model_type}, which classifies neither images nor texts")


def padding_token(config: Any, tokenizer: Any) -> int:
    """What fills up a batch of texts: the network's token for it, the tokenizer's, what ends a text, or the first.

    A decoder that classifies looks for it, so both have to mean the same.
    """
    for key in ("pad_token_id", "eos_token_id"):
        for owner in (config, tokenizer):
            found = getattr(owner, key, None)
            found = found[0] if isinstance(found, list | tuple) and found else found
            if isinstance(found, int):
                return found
    return 0


def reads_texts(net: nn.Module) -> bool:
    """Whether a network of transformers takes tokens."""
    first = getattr(net, "get_input_embeddings", None)
    try:
        return callable(first) and isinstance(first(), nn.Embedding)
    except (NotImplementedError, AttributeError):  # as some networks of images say
        return False


def name_classes_(net: nn.Module, classes: Sequence[str]) -> None:
    """Let the configuration of a network of transformers say what its outputs are.

    It becomes the network's own: the base that a task was built on has the same object.
    """
    config: Any = copy.copy(getattr(net, "config", None))
    if not classes or not hasattr(config, "id2label"):
        return
    net.config = config
    config.id2label, config.label2id = dict(enumerate(classes)), {name: i for i, name in enumerate(classes)}
    if isinstance(getattr(net, "num_labels", None), int):
        net.num_labels = len(classes)  # type: ignore[assignment]


def _is_bare(name: str) -> bool:
    """Whether a name is a folder with a configuration and no weights."""
    return Path(name).is_dir() and not any(file.suffix in _SAVED for file in Path(name).iterdir())


def _loading(config: Any) -> dict[str, Any]:
    wanted = dict.fromkeys(("use_safetensors", "ignore_mismatched_sizes", "output_loading_info"), True)
    return {"config": config, "dtype": torch.float32, **wanted}


def _check_loaded(name: str, net: nn.Module, info: Mapping[str, Any]) -> None:
    """Only the classifier may have other classes, or be missing; the library would let anything pass."""
    changed = {str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys", ())}
    fresh = sorted(changed | set(info.get("missing_keys", ())))
    unused = sorted(info.get("unexpected_keys", ()))
    heads = tuple(f"{head}." for head in (*_classifiers(net, _class_count(net)), *_beside_body(net)))
    wrong = [key for key in fresh if not key.startswith(heads)]
    if wrong:
        raise WeightsError(
            f"the weights of {name!r} do not fit the network: {first_few(wrong)} missing or of another shape; "
            "expected weights of this configuration, with other classes at most"
        )
    if fresh or unused:
        _LOG.info("%s: initialised anew %s; left out %s", name, *(", ".join(n) or "nothing" for n in (fresh, unused)))


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
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


# classifiers

# a part of a path that says "classifier" in torchvision, timm, transformers and most others
_CLASSIFIER = re.compile(
    r"(\w*classifier\w*|heads?|head_dist|dist_head|cls_head|linear_head|fc|score|classif|last_linear|logits)"
)
_AUXILIARY = re.compile(r"(^|\.)aux", re.IGNORECASE)


def head_of(net: nn.Module, *, classes: int | None = None) -> str:
    """The name of the classifier: the last linear layer, or 1x1 convolution, whose outputs are the classes.

    The number of classes is ``classes``, or what the network says of itself. Names that libraries use go before
    others; auxiliary classifiers do not count.

    >>> head_of(models.resnet18(classes=10))
    'fc'
    >>> head_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    '2'
    """
    count = _class_count(net) if classes is None else classes
    layers = {name: outputs for name, outputs in _layers(net).items() if not _AUXILIARY.search(name)}
    fitting = [name for name, outputs in layers.items() if count is None or outputs == count]
    roots = {name: root for name in fitting if (root := _classifier_root(name))}
    # the classifier that lies least deep: ``fc`` before a ``blocks.0.attention.head``
    depth = min((root.count(".") for root in roots.values()), default=0)
    known = [name for name, root in roots.items() if root.count(".") == depth]
    if known and len({roots[name] for name in known}) == 1:
        equal = [name for name in known if layers[name] == layers[known[-1]]]
        parent = net.get_submodule(known[-1].rpartition(".")[0])
        # of several in a row the last is the head; several side by side are several heads
        is_row = isinstance(parent, nn.Sequential) and len({n.rpartition(".")[0] for n in equal}) == 1
        if len(equal) == 1 or is_row:
            return known[-1]
    if fitting and not known and fitting[-1] == list(layers)[-1]:
        return fitting[-1]
    wanted = "" if count is None else f" of {count} outputs"
    several = f"linear layers{wanted} that could be it: {', '.join(known or fitting)}"
    found = several if fitting else f"no linear layer{wanted}"
    raise TargetError(
        f"the classifier of the {type(net).__name__} is not known, it has {found}; expected one of a known name, or "
        "the last layer: pass head=, a name or several"
    )


def known_head(net: nn.Module) -> str | None:
    """The classifier, where there is one and its name says so."""
    try:
        name = head_of(net)
    except TargetError:
        return None
    return name if _classifier_root(name) else None


def heads_of(net: nn.Module, *, classes: int | None = None) -> list[str]:
    """The classifier and all that is new with it: in networks of transformers, every layer outside of the base model.

    A DistilBERT has ``pre_classifier`` before its classifier, a RoBERTa two layers in it.
    """
    return _beside_body(net) or [head_of(net, classes=classes)]


def _beside_body(net: nn.Module) -> list[str]:
    body = getattr(net, "base_model_prefix", "")
    inside = getattr(net, body, net) if body else net
    return [] if inside is net else [name for name in _layers(net) if not name.startswith(f"{body}.")]


def _classifiers(net: nn.Module, classes: int | None) -> list[str]:
    """Every layer whose outputs are the classes: the head, a second one for distillation, auxiliary ones."""
    fitting = [name for name, outputs in _layers(net).items() if classes is None or outputs == classes]
    named = [name for name in fitting if _classifier_root(name) or _AUXILIARY.search(name)]
    try:
        return list(dict.fromkeys([*named, head_of(net, classes=classes)]))
    except TargetError:  # several, and all of them are here already
        return named


def _layers(net: nn.Module) -> dict[str, int]:
    """The outputs of every linear layer and 1x1 convolution, in module order."""
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = module.out_features
        elif isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            found[name] = module.out_channels
    return found


def _class_count(net: nn.Module) -> int | None:
    """How many classes a network says that it has."""
    said = [getattr(getattr(net, "config", None), "num_labels", None)]
    said += [getattr(net, attribute, None) for attribute in ("num_classes", "num_labels", "classes")]
    return next((n for n in said if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def _classifier_root(name: str) -> str | None:
    """The first part of a path that is named like a classifier, with all before it."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if _CLASSIFIER.fullmatch(part):
            return ".".join(parts[: number + 1])
    return None


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
