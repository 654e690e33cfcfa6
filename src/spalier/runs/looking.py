"""What a report shows of a block besides its row: how scores were spread, and images that were told right and wrong."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.criteria.score import Scores, normalised
from spalier.data import Split
from spalier.networks import logits_of
from spalier.pruning.plan import Plan

_BINS = 40
_SIDE = 64
_EACH = 8
_LOOKED_AT = 512


def spread(scores: Scores, plan: Plan) -> dict[str, Any]:
    """How many units of each score stay and go, stream by stream, in bins that all streams share.

    Bins are even in the logarithm. Before them comes one for what is below, zero and negative scores too, and behind
    them one for what is above.
    """
    found: dict[str, Any] = {}
    for name, layers in scores.layers.items():
        if plan.writers == "free" and len(layers) > 1:  # each keeps channels of its own
            found |= {layer: normalised(values, scores.normalise) for layer, values in layers.items()}
        else:
            found[name] = scores.of(name)
    everything = np.concatenate([values[~np.isnan(values)] for values in found.values()])
    positive = everything[everything > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    edges = np.geomspace(low, high if high > low else 2 * low, _BINS + 1)
    streams = {}
    for name, values in found.items():
        stays = np.zeros(len(values), bool)
        stays[list(plan.keep.get(name, range(len(values))))] = True
        alive = ~np.isnan(values)
        streams[name] = {
            "kept": _counts(values[alive & stays], edges),
            "removed": _counts(values[alive & ~stays], edges),
        }
    return {
        "criterion": scores.criterion,
        "samples": scores.samples,
        "edges": edges.tolist(),
        "streams": streams,
    }


def _counts(values: Any, edges: Any) -> list[int]:
    """Counts below, in and above bins; the highest score of all is in the last bin, not above it.

    >>> _counts(np.array([-1.0, 1.0, 1.5, 4.0]), np.array([1.0, 2.0, 4.0]))
    [1, 2, 1, 0]
    """
    places = np.searchsorted(edges, values, side="right")
    places[values == edges[-1]] = len(edges) - 1
    counted: list[int] = np.bincount(places, minlength=len(edges) + 1).tolist()
    return counted


@torch.no_grad()
def examples(net: nn.Module, part: Split, place: Any, batch: int) -> tuple[dict[str, Any], bytes] | None:
    """A few samples of each class that the network is surest of, wrong ones and right ones, their images as one PNG.

    None where samples are no images, or have no labels.
    """
    indices = np.sort(np.random.default_rng(0).permutation(len(part))[:_LOOKED_AT])
    if not len(indices) or bool((part.labels < 0).any()) or not _are_images(part.fetch(indices[:1], None)[0]):
        return None
    logits = torch.cat(
        [
            logits_of(net(place(part.fetch(indices[at : at + batch], None)[0]))).float().cpu()
            for at in range(0, len(indices), batch)
        ]
    )
    labels = torch.from_numpy(part.labels[indices])
    sure, guess = logits.softmax(1).max(1)
    is_right = guess == labels
    chosen = torch.tensor(
        [*_surest(sure, labels, ~is_right), *_surest(sure, labels, is_right)], dtype=torch.long
    )
    items = [
        {"label": int(labels[i]), "guess": int(guess[i]), "confidence": round(float(sure[i]), 4)}
        for i in chosen
    ]
    tiles, side = _tiles(part.fetch(indices[chosen.numpy()], None)[0])
    return {"side": side, "columns": _EACH, "items": items}, _sheet(tiles, side)


def _are_images(samples: Tensor) -> bool:
    return samples.dim() == 4 and samples.shape[1] in (1, 3) and samples.dtype.is_floating_point


def _surest(sure: Tensor, labels: Tensor, among: Tensor) -> list[int]:
    """The samples that the network is surest of, class by class in turns, so that all are seen."""
    order = [int(i) for i in torch.argsort(sure, descending=True, stable=True) if among[i]]
    turns: dict[int, int] = {}
    rounds = []
    for i in order:
        turns[int(labels[i])] = turns.get(int(labels[i]), 0) + 1
        rounds.append(turns[int(labels[i])])
    ranked = sorted(zip(rounds, range(len(order)), order, strict=True))
    return [i for _, _, i in ranked][:_EACH]


def _tiles(images: Tensor) -> tuple[Tensor, int]:
    """Images as bytes of at most so many pixels, each stretched over the whole range of grey."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = (images - low) / (high - low).clamp_min(1e-12)
    side = min(_SIDE, max(images.shape[2:]))
    scaled = torch.nn.functional.interpolate(scaled, (side, side), mode="area")
    pixels = (scaled * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    return pixels.permute(0, 2, 3, 1), side


def _sheet(tiles: Tensor, side: int) -> bytes:
    from PIL import Image

    rows = -(-len(tiles) // _EACH)
    sheet = np.zeros((rows * side, _EACH * side, 3), np.uint8)
    for number, tile in enumerate(tiles.numpy()):
        y, x = divmod(number, _EACH)
        sheet[y * side : (y + 1) * side, x * side : (x + 1) * side] = tile
    out = io.BytesIO()
    Image.fromarray(sheet).save(out, "PNG", optimize=True)
    return out.getvalue()
