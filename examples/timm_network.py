"""A network of timm, and data of your own as a torch dataset.

    python examples/timm_network.py                       # a tiny network, which starts at random: nothing is loaded
    python examples/timm_network.py resnet18.a1_in1k      # with the weights that timm downloads and keeps

Networks of torchvision work alike, as ``torchvision:resnet18``, and so does any nn.Module.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, random_split

import spalier as sp
from spalier.networks import open_network

name = sys.argv[1] if len(sys.argv) > 1 else "test_resnet"
net = open_network(f"timm:{name}", classes=10, pretrained=len(sys.argv) > 1)

digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
images = torch.nn.functional.interpolate(images, size=32)
data = TensorDataset(images, torch.tensor(digits.target))
train, test = random_split(data, [0.7, 0.3], torch.Generator().manual_seed(0))

task = sp.adapt(net, train, target=0.5, test=test, name="digits", epochs=10, epochs_per_prune=4)
small = task.build(net)  # the network itself is as it was
before, after = (sp.count(each, images[:1]).macs for each in (net, small))
print(f"{after:,} of {before:,} multiply-accumulates; {len(task.to_bytes()):,} bytes beside the base")
print(f"{task.info.metrics['accuracy']:.1%} right, chance 10.0%")
