"""A language model that is made in a test: a BERT of two layers with random weights, and a tokenizer of a few words."""

import csv
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

ANIMALS = ["cat", "dog", "horse", "cow", "sheep", "goat"]
NUMBERS = ["one", "two", "three", "four", "five", "six"]
COLORS = ["red", "green", "blue", "white", "black", "pink"]
FILLERS = ["what", "is", "the", "a", "of", "in", "how", "many", "and", "to"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
KINDS = {"animal": ANIMALS, "color": COLORS, "number": NUMBERS}
LONGEST = 24


def tiny_tokenizer(longest: int = LONGEST) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *ANIMALS, *NUMBERS, *COLORS, *FILLERS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **names)


def tiny_config(**changes) -> BertConfig:
    sizes = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 24, "max_position_embeddings": LONGEST, "initializer_range": 0.3}
    return BertConfig(**{**sizes, **more, **changes})


def tiny_bert(folder: Path, **changes) -> Path:
    """A folder as the hub has it: config, weights, tokenizer."""
    torch.manual_seed(0)
    BertModel(tiny_config(**changes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts of various lengths; half of the words of each are of one kind."""
    numbers = torch.Generator().manual_seed(seed)

    def one_of(words):
        return words[int(torch.randint(len(words), (), generator=numbers))]

    found = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        size = int(torch.randint(1, 7, (), generator=numbers))
        words = [one_of(FILLERS), *(one_of(KINDS[kind]) for _ in range(size)), *(one_of(FILLERS) for _ in range(size))]
        found.append((" ".join(words), kind))
    return found


def write_csv(path: Path, rows, header=("text", "label"), delimiter=",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def write_jsonl(path: Path, rows, header=("text", "label")) -> Path:
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows), "utf-8")
    return path


def text_folder(folder: Path, train: int = 90, test: int = 30) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "train.csv", sentences(train))
    write_csv(folder / "test.csv", sentences(test, seed=1))
    return folder
