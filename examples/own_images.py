"""Your own images: a folder with a folder of images for each class.

    python examples/own_images.py my/images      # PATH/CLASS/*.jpg, or PATH/train/CLASS/*.jpg with test beside it

Without an argument it draws 3 x 40 small pictures of circles, squares and triangles. The base is the ResNet-20 that
comes with Spalier; for photographs take a larger one, such as "timm:resnet18" with pretrained=True.
"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

import spalier as sp
from spalier.networks import open_network


def draw_shapes(folder: Path) -> None:
    """Pictures that are worth telling apart."""
    numbers = random.Random(0)
    for kind in ("circle", "square", "triangle"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(40):
            back, front = ([numbers.randrange(256) for _ in range(3)] for _ in range(2))
            front = [(value + 128) % 256 for value in back] if numbers.random() < 0.5 else front
            image = Image.new("RGB", (32, 32), tuple(back))
            x, y, side = numbers.randrange(2, 10), numbers.randrange(2, 10), numbers.randrange(14, 20)
            pen, box = ImageDraw.Draw(image), (x, y, x + side, y + side)
            if kind == "circle":
                pen.ellipse(box, fill=tuple(front))
            elif kind == "square":
                pen.rectangle(box, fill=tuple(front))
            else:
                pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=tuple(front))
            image.save(folder / kind / f"{number}.png")


if len(sys.argv) > 1:
    images = Path(sys.argv[1])
else:
    images = Path("shapes")
    draw_shapes(images)

task = sp.adapt("resnet20", f"folder:{images}", target=0.3, name="shapes")
print(task.info)
task.save("shapes.task.safetensors")

base = open_network("resnet20", classes=len(task.info.classes), pretrained=True)
small = sp.load(base, "shapes.task.safetensors")  # a plain network: nothing of Spalier in it
print(f"{sum(p.numel() for p in small.parameters()):,} of {sum(p.numel() for p in base.parameters()):,} parameters")
print(f"{task.info.metrics['accuracy']:.1%} right, chance {1 / len(task.info.classes):.1%}")
