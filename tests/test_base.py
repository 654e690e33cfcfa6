"""The base that comes with the package: what its cards say, and the tool that makes it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import train_base

from spalier.models import load_weights_, resnet20
from spalier.networks import OWN_WEIGHTS, open_network

ROOT = Path(__file__).resolve().parents[1]
FILE = OWN_WEIGHTS["resnet20"]
CARDS = (FILE.with_suffix(".md"), ROOT / "docs" / "base.md")


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_says_what_the_file_is(card):
    text = " ".join(card.read_text("utf-8").split())
    parameters = sum(p.numel() for p in open_network("resnet20").parameters())
    assert f"{parameters:,} parameters, a file of {FILE.stat().st_size:,} bytes" in text
    assert "CIFAR-10 states no licence" in text
    assert train_base.OUT == FILE


def test_the_base_knows_what_its_card_says(shared):
    """On a tenth of the test images, so within a few points of it."""
    said = re.search(r"([\d.]+)% of CIFAR-10.s test images at 32 pixels", CARDS[1].read_text("utf-8"))
    _, (images, labels) = train_base.read(shared / "data")
    net = open_network("resnet20", pretrained=True)
    found = [train_base.accuracy(net, images[::10], labels[::10], side) for side in train_base.SIDES]
    assert said
    assert found[0] == pytest.approx(float(said[1]) / 100, abs=0.05)
    assert min(found) > 0.2  # chance is a tenth


def test_what_the_tool_stores_is_what_it_trained():
    torch.manual_seed(0)
    images, labels = torch.rand(256, 3, 32, 32), torch.arange(256) % 10
    net = train_base.train(images, labels, epochs=2, stop=1, seed=0)
    again = resnet20(classes=10).eval()
    load_weights_(again, train_base.stored(net))
    with torch.no_grad():
        torch.testing.assert_close(again(images[:8]), net(images[:8]), rtol=0.02, atol=0.02)  # convolutions are halves


def test_augmented_images_are_of_one_size_and_differ():
    images = torch.rand(8, 3, 32, 32)
    seen = [train_base.augmented(images.clone(), np.random.default_rng(seed)) for seed in range(12)]
    assert {batch.shape[-1] for batch in seen} == set(train_base.SIDES)
    assert all(batch.shape[:2] == (8, 3) and bool(torch.isfinite(batch).all()) for batch in seen)
    first = train_base.augmented(images.clone(), np.random.default_rng(0))
    assert torch.equal(first, seen[0])
