"""Texts with labels: files and columns, what is wrong with them, tokens and padding, batches by length."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language import LONGEST, sentences, text_folder, tiny_bert, tiny_tokenizer, write_csv, write_jsonl
from torch.utils.data import DataLoader, Dataset

from spalier.data import Loader, open_data, texts_of
from spalier.data.loader import grouped
from spalier.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def opened(bert, tmp_path_factory):
    folder = text_folder(tmp_path_factory.mktemp("texts"))
    return open_data(f"text:{folder}", tokenizer=bert)


def by_hand(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


# files


def test_a_folder_of_files_has_classes_splits_and_a_summary(opened):
    assert opened.classes == ("animal", "color", "number")
    assert (len(opened.train), len(opened.validation), len(opened.test)) == (81, 9, 30)
    assert opened.is_text
    assert opened.shape == (16,)  # the median in whole eights
    assert "3 classes, 16 tokens" in str(opened)
    assert opened.preprocessing["kind"] == "text"
    assert opened.preprocessing["max_length"] == LONGEST


def test_csv_tsv_and_json_lines_give_the_same_samples(bert, tmp_path):
    rows = [*sentences(30), ('with "quotes" in it', "animal"), ("semi;colon, and comma", "color")]
    files = [
        write_csv(tmp_path / "a.csv", rows),
        write_csv(tmp_path / "b.csv", rows, delimiter=";"),
        write_jsonl(tmp_path / "c.jsonl", rows),
    ]
    (tmp_path / "d.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    found = [open_data(f"text:{file}", tokenizer=bert) for file in (*files, tmp_path / "d.tsv")]
    assert len({data.digest for data in found}) == 1
    assert found[0].test is not None, "a share of training"


def test_dev_is_the_validation_split_and_its_labels_are_those_of_training(bert, tmp_path):
    text_folder(tmp_path)
    write_csv(tmp_path / "dev.csv", sentences(12, seed=2))
    data = open_data(f"text:{tmp_path}", tokenizer=bert)
    assert len(data.validation) == 12
    assert len(data.train) == 90
    assert "the set's own" in str(data)


@pytest.mark.parametrize("header", [("Sentence", "Class"), ("questions", "Labels"), ("TEXT", "category")])
def test_columns_are_found_by_usual_names_whatever_their_case(bert, tmp_path, header):
    file = write_csv(tmp_path / "t.csv", sentences(30), header)
    assert len(open_data(f"text:{file}", tokenizer=bert).classes) == 3


def test_columns_by_name_and_what_is_said_where_there_is_none(bert, tmp_path):
    file = write_csv(tmp_path / "t.csv", sentences(30), ("phrase", "kind"))
    data = open_data(f"text:{file}", tokenizer=bert, text_column="phrase", label_column="kind")
    assert data.classes == ("animal", "color", "number")
    with pytest.raises(DataError, match=r"has the columns phrase, kind, and none of the names text.*text_column"):
        open_data(f"text:{file}", tokenizer=bert)
    with pytest.raises(DataError, match="did you mean phrase"):
        open_data(f"text:{file}", tokenizer=bert, text_column="phrases", label_column="kind")


def test_classes_that_are_numbers_are_in_the_order_of_numbers(bert, tmp_path):
    rows = [(text, str(i % 11)) for i, (text, _) in enumerate(sentences(44))]
    data = open_data(f"text:{write_csv(tmp_path / 't.csv', rows)}", tokenizer=bert)
    assert data.classes == tuple(map(str, range(11)))


def test_some_classes_some_samples_and_no_labels(bert, tmp_path):
    folder = text_folder(tmp_path)
    some = open_data(f"text:{folder}", tokenizer=bert, classes=["number", "animal"], max_train_samples=20)
    assert some.classes == ("number", "animal")
    assert len(some.train) + len(some.validation) == 20
    write_csv(folder / "train.csv", [(text,) for text, _ in sentences(20)], ("text",))
    (folder / "test.csv").unlink()
    none = open_data(f"text:{folder}", tokenizer=bert, labels=False)
    assert none.classes == ()
    assert (none.train.labels == -1).all()


# what is wrong with them


def test_everything_that_cannot_be_used_is_listed_at_once(bert, tmp_path):
    text_folder(tmp_path)
    with (tmp_path / "train.csv").open("ab") as file:
        file.write(b"caf\xe9 is a cat,animal\n")
        file.write(b"   ,animal\nwhat is one,\none,two,three\n")
        file.write(b"cat " * 2000 + b",animal\n")
    with (tmp_path / "test.csv").open("a") as file:
        file.write("what is it,vegetable\n")
    with pytest.raises(DataError) as raised:
        open_data(f"text:{tmp_path}", tokenizer=bert)
    said = str(raised.value)
    assert "6 of 126 texts" in said
    for words in (
        "train.csv line 95: 3 columns, expected 2",
        "train.csv line 92: not UTF-8",
        "train.csv line 93: empty text",
        "train.csv line 94: no label",
        "far too long: 8,000 characters, and 24 tokens are read",
        "test.csv line 32: class 'vegetable', which training has not",
    ):
        assert words in said, words
    left = open_data(f"text:{tmp_path}", tokenizer=bert, skip_bad=True)
    assert len(left.train) + len(left.validation) == 90
    assert len(left.skipped) == 6


def test_lines_that_are_no_json_and_an_open_quotation_mark(bert, tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", sentences(30))
    with file.open("a") as out:
        out.write(
            '{"text": \n[1, 2]\n{"text": 3, "label": "animal"}\n{"label": "animal"}\n{"text": "a", "label": 0.5}\n'
        )
    with pytest.raises(DataError, match=r"5 of 35 texts") as raised:
        open_data(f"text:{file}", tokenizer=bert)
    for words in ("no JSON: ", "no JSON object", "a int, expected text", "no text", "a label of type float"):
        assert words in str(raised.value)
    quoted = write_csv(tmp_path / "q.csv", sentences(30))
    with quoted.open("a") as out:
        out.write('"cat' + " dog" * 40_000 + "\n")
    with pytest.raises(DataError, match="is a quotation mark left open"):
        open_data(f"text:{quoted}", tokenizer=bert)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", "text,label\na,one\nb,one\n", "a single class, one"),
        ("t.csv", "text,label\n", "no training texts"),
        ("t.csv", "", "no training texts"),
        ("t.csv", "text,label\na,one\n".encode("utf-16"), "save it as UTF-8"),
        ("t.xlsx", "text,label\na,one\n", "expected .csv, .tsv, .jsonl"),
        ("other.csv", None, "there is no file or folder"),
    ],
)
def test_files_of_which_nothing_can_be_learned(bert, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        open_data(f"text:{tmp_path / name}", tokenizer=bert)


def test_folders_without_training_and_with_two(bert, tmp_path):
    write_csv(tmp_path / "test.csv", sentences(6))
    with pytest.raises(DataError, match=r"has test.csv, expected train.csv"):
        open_data(f"text:{tmp_path}", tokenizer=bert)
    write_csv(tmp_path / "train.csv", sentences(6))
    write_jsonl(tmp_path / "train.jsonl", sentences(6))
    with pytest.raises(DataError, match=r"train.csv, train.jsonl, expected one of them"):
        open_data(f"text:{tmp_path}", tokenizer=bert)


def test_networks_without_a_tokenizer(tmp_path):
    folder = text_folder(tmp_path / "texts")
    with pytest.raises(ConfigError, match="needs the tokenizer of a network"):
        open_data(f"text:{folder}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no tokenizer that can be loaded"):
        open_data(f"text:{folder}", tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="digits has no texts"):
        open_data("digits", tokenizer="hf:some/network")


# datasets


class Pairs(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def test_datasets_of_a_user(bert):
    named, numbers = sentences(30), [(text, ["animal", "color", "number"].index(kind)) for text, kind in sentences(30)]
    tensors = DataLoader(Pairs([(text, torch.tensor(label)) for text, label in numbers]))
    found = [
        texts_of(Pairs(named), tokenizer=bert, validation=0.2),
        texts_of(Pairs(numbers), tokenizer=bert, validation=0.2, classes=["animal", "color", "number"]),
        texts_of(tensors, tokenizer=bert, validation=0.2, classes=["animal", "color", "number"]),
    ]
    assert len({data.digest for data in found}) == 1
    assert (len(found[0].train), len(found[0].validation), found[0].test) == (24, 6, None)
    both = texts_of(Pairs(named), Pairs(sentences(9, seed=1)), Pairs(sentences(6, seed=2)), tokenizer=bert)
    assert (len(both.train), len(both.validation), len(both.test)) == (30, 6, 9)


def test_datasets_with_samples_that_cannot_be_used(bert):
    with pytest.raises(DataError, match=r"train/30: a Tensor, expected text"):
        texts_of(Pairs([*sentences(30), (torch.zeros(3), "animal")]), tokenizer=bert)
    with pytest.raises(DataError, match=r"train/2: class 7, expected one of a, b"):
        texts_of(Pairs([("cat", 0), ("dog", 1), ("cow", 7)]), tokenizer=bert, classes=["a", "b"])
    with pytest.raises(DataError, match=r"train/30: a label of type Tensor, expected a name"):
        texts_of(Pairs([*sentences(30), ("cat", torch.zeros(3))]), tokenizer=bert)
    with pytest.raises(DataError, match=r"sample 0 is a str, expected a pair"):
        texts_of(Pairs(["cat"]), tokenizer=bert)


def test_sets_of_hugging_face(bert, tmp_path):
    kinds = datasets.ClassLabel(names=["animal", "color", "number"])
    features = datasets.Features({"sentence": datasets.Value("string"), "label": kinds})

    def made(rows, labels):
        columns = {"sentence": [text for text, _ in rows], "label": labels}
        return datasets.Dataset.from_dict(columns, features=features)

    train = made(sentences(30), [kinds.str2int(kind) for _, kind in sentences(30)])
    dev = made(sentences(6, seed=1), [kinds.str2int(kind) for _, kind in sentences(6, seed=1)])
    hidden = made(sentences(5, seed=2), [-1] * 5)
    datasets.DatasetDict({"train": train, "validation": dev, "test": hidden}).save_to_disk(tmp_path / "set")
    data = open_data(f"hf:{tmp_path / 'set'}", tokenizer=bert)
    assert data.classes == ("animal", "color", "number")
    assert len(data.validation) == 6
    assert len(data.test) == 6, "a share of training: those of the set have no labels"
    with pytest.raises(DataError, match="did you mean sentence"):
        open_data(f"hf:{tmp_path / 'set'}", tokenizer=bert, text_column="sentenc")


# tokens


def test_batches_are_what_the_tokenizer_gives_padded_to_their_longest(opened):
    rows = np.array([3, 0, 7])
    inputs, labels = opened.train.fetch(rows, None)
    alone = [by_hand(opened.train.texts[i]) for i in rows]
    longest = max(map(len, alone))
    assert inputs["input_ids"].tolist() == [ids + [0] * (longest - len(ids)) for ids in alone]
    assert inputs["attention_mask"].tolist() == [[1] * len(ids) + [0] * (longest - len(ids)) for ids in alone]
    assert labels.tolist() == opened.train.labels[rows].tolist()
    assert list(inputs) == ["input_ids", "attention_mask"]


def test_long_texts_are_cut_with_their_end_in_place_and_counted(bert, tmp_path):
    rows = [*sentences(30), ("cat " * 100, "animal")]
    data = open_data(f"text:{write_csv(tmp_path / 't.csv', rows)}", tokenizer=bert, validation_split=0, max_length=10)
    cut = [ids for split in (data.train, data.test) for ids in split.ids if len(ids) == 10]
    assert all((ids[0], ids[-1]) == (2, 3) for ids in cut), "[CLS] and [SEP]"
    assert "texts are longer than 10 tokens, and cut" in str(data)
    assert data.preprocessing["max_length"] == 10


def test_examples_have_the_length_that_costs_are_stated_for_and_one_padded_row(opened):
    example = opened.example(3)
    assert example["input_ids"].shape == (3, 16)
    assert example["attention_mask"].sum(1).tolist() == [16, 15, 15]


def test_another_tokenizer_has_another_digest(bert, opened, tmp_path):
    other = tiny_bert(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"horse"', '"zebra"'))
    found = open_data(opened.name, tokenizer=str(other))
    assert found.preprocessing["tokenizer_digest"] != opened.preprocessing["tokenizer_digest"]
    assert found.digest != opened.digest
    again = open_data(opened.name, tokenizer=bert)
    assert again.digest == opened.digest


# batches by length


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=300),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_grouping_loses_and_doubles_nothing(lengths, size, seed):
    lengths, order = np.array(lengths), np.random.default_rng(seed).permutation(len(lengths))
    found = grouped(order, lengths, size, np.random.default_rng(seed))
    assert sorted(found) == list(range(len(lengths)))
    whole = len(lengths) // size * size
    assert found[whole:].tolist() == order[whole:].tolist(), "what is left out was drawn at random"


def test_batches_hold_texts_of_about_one_length_and_depend_on_seed_and_epoch_alone(opened):
    def epoch(number, **options):
        return [inputs["input_ids"] for inputs, _ in Loader(opened.train, 8, **options).epoch(number)]

    def padding(batches):
        return sum(int((ids == 0).sum()) for ids in batches)

    first = epoch(0)
    assert all(torch.equal(a, b) for a, b in zip(first, epoch(0), strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, epoch(1), strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, epoch(0, seed=1), strict=True))
    assert padding(first) < 0.3 * padding(epoch(0, shuffle=False))
    workers = Loader(opened.train, 8, num_workers=2)
    with workers:
        assert all(torch.equal(a, b["input_ids"]) for a, (b, _) in zip(first, workers.epoch(0), strict=True))
    later = [inputs["input_ids"] for inputs, _ in Loader(opened.train, 8).epoch(0, start=4)]
    assert all(torch.equal(a, b) for a, b in zip(first[4:], later, strict=True))


def test_two_processes_share_a_batch_of_texts(opened):
    whole = list(Loader(opened.train, 8).epoch(0))
    halves = [list(Loader(opened.train, 8, rank=rank, world_size=2).epoch(0)) for rank in (0, 1)]
    for (inputs, labels), *parts in zip(whole, *halves, strict=True):
        for rank, (mine, own) in enumerate(parts):
            assert torch.equal(own, labels[rank::2])
            length = mine["input_ids"].shape[1]
            assert torch.equal(mine["input_ids"], inputs["input_ids"][rank::2, :length])
