"""Users' torch datasets: labels, shapes and random transforms."""

import random

import numpy as np
import pytest
import torch
from pictures import picture
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from spalier.data import Data, Loader
from spalier.data.data import listed_labels
from spalier.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Items(Dataset):
    """Whatever is given, item by item; counts how often it is asked."""

    def __init__(self, items, **attributes):
        self.items, self.asked = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.asked += 1
        item = self.items[i]
        if isinstance(item, Exception):
            raise item
        return item


def images(given, shape=(3, 4, 4), **attributes):
    return Items([(torch.full(shape, float(i)), label) for i, label in enumerate(given)], **attributes)


class Noisy(Dataset):
    """Draws from each of the three global generators."""

    targets = (0, 1, 0, 1, 0, 1)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        return torch.tensor(drawn).view(3, 1, 1).expand(3, 2, 2), self.targets[i]


def states():
    return random.getstate(), tuple(map(str, np.random.get_state())), torch.random.get_rng_state().tolist()


def test_random_transforms_depend_on_seed_epoch_and_sample():
    split = Data.of(Noisy()).train
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = states()
    every = split.fetch(np.arange(6), 2, seed=7)[0]
    assert states() == before
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert torch.equal(split.fetch(np.array([4, 1]), 2, seed=7)[0], every[[4, 1]])
    others = [split.fetch(np.arange(6), e, seed=s)[0] for e, s in ((3, 7), (2, 8), (None, 7), (0, 7))]
    assert all((every != other).all() for other in others)
    assert every.unique().numel() == 18
    assert torch.equal(split.fetch(np.arange(6), None, seed=7)[0], others[2])
    plain = Loader(split, batch_size=6, seed=7, shuffle=False).epoch(5)
    assert torch.equal(next(plain)[0], others[2])


def test_random_transforms_are_the_same_in_workers():
    split = Data.of(Noisy()).train
    alone = list(Loader(split, batch_size=2, seed=3).epoch(1))
    with Loader(split, batch_size=2, seed=3, num_workers=2) as loader:
        shared = list(loader.epoch(1))
    assert len(shared) == 3
    for (x, y), (z, w) in zip(alone, shared, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, w)


def test_labels_are_taken_from_where_they_are_listed():
    targets = images([0, 1, 2], targets=[0, 1, 2])
    tensors = TensorDataset(torch.rand(4, 3, 2, 2), torch.tensor([2, 1, 0, 1]))
    assert listed_labels(targets).tolist() == [0, 1, 2]
    assert listed_labels(images([0, 1], labels=np.array([0, 1]))).tolist() == [0, 1]
    assert listed_labels(images([0, 1], _labels=[0, 1])).tolist() == [0, 1]
    assert listed_labels(Subset(tensors, [3, 0])).tolist() == [1, 2]
    assert listed_labels(ConcatDataset([targets, Subset(tensors, [0])])).tolist() == [0, 1, 2, 2]
    assert listed_labels(ConcatDataset([targets, images([1])])) is None
    assert listed_labels(images([0, 1], targets=[0])) is None  # of another length
    assert listed_labels(images([0, 1], targets=["a", "b"])) is None
    assert listed_labels(images([0, 1], targets=[1, 0], target_transform=lambda n: 1 - n)) is None
    assert targets.asked == 0


def test_labels_are_gathered_when_they_are_asked_for_and_once():
    dataset = images([0, np.int64(1), torch.tensor(1), 0])
    data = Data.of(dataset, classes=["no", "yes"])
    looks = dataset.asked
    assert looks <= 2 + 16
    assert data.train.labels.tolist() == [0, 1, 1, 0]
    assert data.train.labels.dtype == np.int64
    assert dataset.asked == looks + 4


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        ([0, 1, 2], {"classes": ["a", "b"]}, "sample 2 has label 2, expected 0 to 1"),
        ([0, -1, 1], {"classes": ["a", "b"]}, "sample 1 has label -1"),
        ([0.5, 1], {"classes": ["a", "b"]}, "label 0.5, expected an integer"),
        ([True, False], {"classes": ["a", "b"]}, "expected an integer"),
        (["cat", "dog"], {"classes": ["a", "b"]}, "'cat', expected an integer"),
        ([torch.zeros(2), 1], {"classes": ["a", "b"]}, "expected an integer"),
        ([0, 0, 0], {}, "at least two different"),
        ([0, 1], {"classes": ["a", "a"]}, "at least two different"),
        ([], {"classes": ["a", "b"]}, "empty"),
    ],
)
def test_labels_that_cannot_be_are_refused(labels, options, says):
    with pytest.raises(DataError, match=says):
        _ = Data.of(images(labels), **options).train.labels


def test_a_label_that_changes_is_noticed_when_it_is_fetched():
    dataset = images([0, 1, 0, 1], targets=[0, 1, 0, 1])
    split = Data.of(dataset).train
    dataset.items[2] = (dataset.items[2][0], 5)
    with pytest.raises(DataError, match="sample 2 has label 5"):
        split.fetch(np.arange(4), 0)


def test_items_of_another_kind_are_refused():
    for item, says in (
        (torch.zeros(3, 2, 2), "expected a pair"),
        ((1, 2, 3), "expected a pair"),
        (([[1.0]], 0), "type list, expected a tensor"),
        (ValueError("broken\nfile"), r"sample 0 cannot be had: ValueError: broken\\nfile"),
    ):
        with pytest.raises(DataError, match=says):
            Data.of(Items([item] * 4), classes=["a", "b"])

    class Stream(IterableDataset):
        def __iter__(self):
            yield from ()

    with pytest.raises(DataError, match=r"without len\(\)"):
        Data.of(Stream(), classes=["a", "b"])


def test_images_have_one_shape():
    mixed = Items([(torch.zeros(3, 4, 4), 0), (torch.zeros(3, 4, 5), 1)])
    with pytest.raises(DataError, match=r"sample 1 has shape \(3, 4, 5\), expected \(3, 4, 4\)"):
        Data.of(mixed)
    with pytest.raises(DataError, match="test has images"):
        Data.of(images([0, 1]), test=images([0, 1], shape=(3, 5, 5)))


def test_pillow_and_bytes_are_scaled_and_floats_pass():
    picture_, grey = picture(width=6, height=6), picture(width=6, height=6).convert("L")
    array = np.asarray(picture_)
    raw = torch.from_numpy(array.copy()).permute(2, 0, 1)
    items = [(picture_, 0), (raw, 1), (raw.double() * 3, 0), (grey, 1)]
    found, _ = Data.of(Items(items)).train.fetch(np.arange(4), None)
    expected = torch.from_numpy(array.astype(np.float64) / 255).permute(2, 0, 1).float()
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert torch.equal(found[2], raw.float() * 3)
    assert torch.equal(found[3][0], found[3][2])
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_validation_is_a_share_or_a_dataset():
    dataset = images([i % 2 for i in range(40)])
    data = Data.of(dataset, validation=0.25, test=images([0, 1]), name="mine", seed=4)
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 10, 2)
    assert np.bincount(data.validation.labels).tolist() == [5, 5]
    numbers = [set(p.fetch(np.arange(len(p)), None)[0][:, 0, 0, 0].tolist()) for p in (data.train, data.validation)]
    assert numbers[0] | numbers[1] == set(map(float, range(40)))
    assert not numbers[0] & numbers[1]
    again = Data.of(dataset, validation=0.25, test=images([0, 1]), seed=4)
    assert again.digest == data.digest
    assert Data.of(dataset, validation=0.25, test=images([0, 1]), seed=5).digest != data.digest
    own = Data.of(dataset, validation=images([1, 0, 1]))
    assert len(own.validation) == 3
    assert Data.of(dataset, validation=0).validation is None
    with pytest.raises(ConfigError, match="share for validation is"):
        Data.of(dataset, validation=1.0)
    assert "mine: 2 classes" in str(data)


def test_loaders_give_their_dataset():
    train, test = images([0, 1, 0, 1]), images([1, 0])
    data = Data.of(DataLoader(train, batch_size=2), DataLoader(test), validation=DataLoader(test))
    assert [split.dataset for split in (data.train, data.test, data.validation)] == [train, test, test]


def test_names_of_classes_are_the_datasets_own():
    assert Data.of(images([0, 1], classes=["cat", "dog"])).classes == ("cat", "dog")
    assert Data.of(images([0, 2])).classes == ("0", "1", "2")
    assert Data.of(images([0, 1], classes=["cat", "dog"]), classes=["a", "b", "c"]).classes == ("a", "b", "c")


def test_other_samples_have_another_digest():
    one = images([0, 1, 0, 1])
    other = images([0, 1, 0, 1])
    other.items[3] = (other.items[3][0] + 1, 1)
    assert Data.of(one).digest == Data.of(images([0, 1, 0, 1])).digest
    assert len({Data.of(d).digest for d in (one, other, images([0, 1, 1, 1]), images([0, 1, 0]))}) == 4


def test_samples_need_not_be_images():
    found, _ = Data.of(images([0, 1], shape=(5,))).train.fetch(np.arange(2), 0)
    assert found.shape == (2, 5)
