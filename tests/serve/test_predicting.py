"""Predictions are what evaluation counts: the same pixels, the same probabilities, the names of classes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from served import CLASSES, PREPROCESSING, base, picture, task_of
from torch import nn

import spalier as sp
from spalier.data import open_data
from spalier.errors import DataError
from spalier.networks import open_network
from spalier.predicting import MOST_SIDE, collate, named, predict, probabilities, to_sample


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two classes of image files, large and small, upright and not, whose brightness tells them apart."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for label, low in (("day", 130), ("night", 0)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                side = draw.integers(20, 90, 2)
                pixels = draw.integers(low, low + 120, (*side, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    return folder


@pytest.mark.parametrize("size", [16, 80])  # stored as they come out, and stored larger
def test_a_batch_is_the_one_that_evaluation_sees(pictures, size):
    data = open_data(f"folder:{pictures}", image_size=size)
    info = task_of(base(), preprocessing=data.preprocessing, classes=data.classes).info
    wanted, labels = data.test.fetch(np.arange(len(data.test)), None)
    files = sorted((pictures / "test").glob("*/*.png"))
    assert [data.classes[i] for i in labels] == [file.parent.name for file in files]
    samples = [to_sample(info, file) for file in files]
    found = collate(info, samples)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    assert torch.equal(collate(info, [to_sample(info, file.read_bytes()) for file in files]), wanted)


def test_predict_says_what_eval_counts(pictures, tmp_path, capsys):
    from calling import call

    run = tmp_path / "run"
    settings = ("epochs=1", "epochs_per_prune=1", "densities=0.5", "batch_size=8", "trackers=[]", "image_size=16")
    options = [word for setting in settings for word in ("--set", setting)]
    given = ("--data", f"folder:{pictures}", "--network", "resnet8", "--folder", run)
    assert call(capsys, "-q", "train", *given, *options).code == 0
    task = next((run / "tasks").glob("*-50.task.safetensors"))
    counted = call(capsys, "eval", task, "--json").json["tasks"][0]
    files = sorted((pictures / "test").glob("*/*.png"))
    said = call(capsys, "predict", task, *files, "--json").json["predictions"]
    right = [
        max(row["classes"], key=row["classes"].get) == file.parent.name for row, file in zip(said, files, strict=True)
    ]
    assert sum(right) / len(right) == counted["accuracy"]
    losses = [-np.log(row["classes"][file.parent.name]) for row, file in zip(said, files, strict=True)]
    assert np.mean(losses) == pytest.approx(counted["loss"], rel=1e-5)
    table = call(capsys, "predict", task, files[0], "--top", "1").out
    assert table.split()[:3] == ["image", "class", "probability"]
    assert str(files[0]) in table


def test_probabilities_are_those_of_the_built_network():
    net = base()
    task = task_of(net)
    built, pictures = task.build(net), [picture(seed) for seed in range(3)]
    rows = predict(built, task.info, pictures)
    exact = task.build(net).double()
    batch = collate(task.info, [to_sample(task.info, data) for data in pictures])
    wanted = exact(batch.double()).softmax(1)
    for row, values in zip(rows, wanted.tolist(), strict=True):
        assert list(row) == sorted(CLASSES, key=lambda name: -values[CLASSES.index(name)])
        assert [row[name] for name in CLASSES] == pytest.approx(values, abs=1e-6)
    assert [len(row) for row in predict(built, task.info, pictures, top=2)] == [2, 2, 2]


def test_classes_without_names_are_numbers():
    net = base()
    info = task_of(net, classes=()).info
    assert set(named(info, torch.tensor([[0.2, 0.5, 0.3]]))[0]) == {"0", "1", "2"}


def test_without_a_larger_stored_side_the_whole_square_is_taken():
    known = {key: value for key, value in PREPROCESSING.items() if key != "stored"}
    info = task_of(base(), preprocessing=known).info
    assert to_sample(info, picture()).shape == (16, 16, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 10**6},
        {"size": 16, "stored": MOST_SIDE + 1},
        {"size": 16, "stored": 8},
        {"size": True},
        {"mean": None},
        {"std": [0.0, 1.0, 1.0]},
        {"std": "abc"},
    ],
)
def test_what_a_strangers_file_says_of_images_is_not_believed(wrong):
    info = task_of(base(), preprocessing=PREPROCESSING | wrong).info
    with pytest.raises(DataError, match="does not say how its images"):
        to_sample(info, picture())


def test_bad_inputs_are_said_to_be_bad(tmp_path):
    info = task_of(base()).info
    for raw, words in (
        (b"", "not an image"),
        (picture()[:200], "truncated|damaged"),
        (tmp_path / "none.png", "none.png.*No such file"),
        (torch.zeros(3, 8, 8), r"\(3, 8, 8\), expected \(3, 16, 16\)"),
        (torch.full((3, 16, 16), torch.nan), "NaN"),
        ("a text", "takes images"),
    ):
        with pytest.raises(DataError, match=words):
            to_sample(info, raw)
    with pytest.raises(DataError, match="bomb-sized: 40 x 30 pixels, at most 1,000"):
        to_sample(info, picture(), pixels=1000)
    assert to_sample(info, picture(), pixels=1200).shape == (18, 18, 3)


def test_a_task_that_names_no_size_takes_tensors_of_its_example():
    info = task_of(base(), preprocessing={}).info
    assert to_sample(info, torch.zeros(3, 16, 16)).shape == (3, 16, 16)
    with pytest.raises(DataError, match="expected"):
        to_sample(info, torch.zeros(3, 17, 16))


# texts


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """A tiny BERT, made of its configuration, and a tokenizer of a few words, both saved in a folder."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "what"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    net = BertForSequenceClassification(
        BertConfig(vocab_size=len(words), max_position_embeddings=16, num_labels=2, **sizes)
    )
    net.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return net, tokenizer, folder


def text_task(net, **said):
    import copy

    adapted = copy.deepcopy(net)
    sp.attach_(adapted, sp.SPLoRA(rank=2), head="classifier")
    nn.init.normal_(adapted.classifier.weight)
    preprocessing = {"kind": "text", "max_length": 6}
    return sp.Task.of(adapted, "reviews", classes=["bad", "good"], preprocessing=preprocessing, **said)


def test_texts_are_tokenised_as_the_task_says(reading):
    net, tokenizer, _ = reading
    task = text_task(net)
    texts = ["a good film", "what a bad bad bad bad bad film", ("a film", "what")]
    rows = predict(task.build(net), task.info, texts, tokenizer=tokenizer)
    with torch.no_grad():
        for row, text in zip(rows, texts, strict=True):
            given = text if isinstance(text, tuple) else (text,)
            alone = tokenizer(*given, truncation=True, max_length=6, return_tensors="pt")
            wanted = task.build(net).double()(**alone).logits.softmax(1)[0].tolist()
            assert [row["bad"], row["good"]] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(DataError, match="no tokenizer"):
        predict(task.build(net), task.info, ["a"])
    with pytest.raises(DataError, match="reads texts"):
        predict(task.build(net), task.info, [picture()], tokenizer=tokenizer)
    with pytest.raises(DataError, match="reads texts"):
        to_sample(task.info, torch.zeros(3))


def test_texts_on_the_command_line(reading, tmp_path, capsys, monkeypatch):
    from calling import call

    net, tokenizer, folder = reading
    task = text_task(net)
    task.save(tmp_path / "reviews.task.safetensors")
    monkeypatch.setattr("spalier.cli.serving.open_base", lambda *given, **options: net)
    called = call(
        capsys, "predict", tmp_path / "reviews.task.safetensors", "--base", f"hf:{folder}", "a good film", "--json"
    )
    (row,) = json.loads(called.out)["predictions"]
    (wanted,) = predict(task.build(net), task.info, ["a good film"], tokenizer=tokenizer)
    assert row == {"input": "a good film", "classes": wanted}


def test_a_network_of_another_library_gives_logits_as_it_likes():
    net = open_network("resnet8", classes=3)
    assert probabilities(net, torch.zeros(1, 3, 16, 16)).sum() == pytest.approx(1)
