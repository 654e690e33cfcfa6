"""Your own training loop: attach, train, prune on the way, store.

    python examples/own_loop.py

Nothing here needs Spalier's runs: the loop is plain PyTorch, and three calls make the network smaller in it.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import spalier as sp
from spalier.networks import open_network

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1)
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1300], order[1300:]

net = open_network("resnet20", classes=10, pretrained=True)
sp.attach_(net, sp.SPLoRA(rank=8), head="auto", example=images[:2])
sp.print_trainable_parameters(net)


def run_epochs(count: int) -> None:
    """An ordinary loop."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count * (len(train) // 64))
    net.train()
    for _ in range(count):
        for batch in train[torch.randperm(len(train))].split(64)[:-1]:
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
    net.eval()


run_epochs(10)
for density in (0.7, 0.5):
    batches = [(images[batch], labels[batch]) for batch in train[:512].split(64)]
    scores = sp.score(net, batches, "taylor", loss=F.cross_entropy)
    sp.prune_(net, sp.select(net, scores, channels=density), recover=batches)
    run_epochs(6)

task = sp.Task.of(net, "digits", classes=[str(digit) for digit in range(10)])
task.save("digits.task.safetensors")
sp.detach_(net)  # the base again, to the bit

small = sp.load(net, "digits.task.safetensors")
with torch.no_grad():
    right = (small(images[test]).argmax(1) == labels[test]).float().mean()
print(f"{len(task.to_bytes()):,} bytes beside the base")
print(f"{float(right):.1%} right, chance 10.0%")
