"""Texts with labels: read from files or datasets, checked, tokenised once, and padded batch by batch.

The tokenizer is the base network's own. Texts are turned into numbers when they are opened, so that a batch is nothing
but padding: workers need no tokenizer, and any batch can be had again.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spalier.data.data import BadFile, Data, Ints, check_share, digest
from spalier.data.images import SPLIT_NAMES, TEST, TRAIN, VALIDATION, File, Samples
from spalier.errors import DataError
from spalier.inputs import Inputs
from spalier.networks import padding_token, quiet_transformers
from spalier.text import check_integer, close_names, first_few, import_optional, printable

TEXT_COLUMNS = ("text", "sentence", "question", "content", "review", "utterance", "query", "document", "title")
LABEL_COLUMNS = ("label", "class", "category", "intent", "target", "sentiment", "topic")
"""What columns are called where nobody says; the first that is there is taken, whatever its case, plurals too."""
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")
MAX_FILE_BYTES = 2**31
LONGEST = 512
"""Tokens of a text where neither the tokenizer nor anybody else says how many there may be."""
FAR_TOO_LONG = 100
"""Characters for each token that is kept: a text that is longer is a whole file, or an open quotation mark."""

Row = tuple[int, str, Any, Any]
"""The split of a sample, where it was found, its text and its label."""
Columns = tuple[str | None, str | None]
"""The columns of texts and of classes; None for the usual one."""


# -- a split ----------------------------------------------------------------------------------------------------------


class TextSplit:
    """Texts as rows of tokens. What it fetches are keyword arguments of the network, padded to the batch's longest."""

    def __init__(self, ids: Sequence[Ints], texts: Sequence[str], labels: Ints, pad: int) -> None:
        self.ids, self.texts, self.labels, self.pad = ids, texts, labels, pad
        self.lengths = np.array([len(row) for row in ids], np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Inputs, Tensor]:
        """Tokens, a mask that is 0 where there are none, and labels."""
        rows = [self.ids[int(i)] for i in indices]
        return self._padded(rows, max(map(len, rows))), torch.from_numpy(self.labels[np.asarray(indices)])

    def example(self, count: int, length: int) -> Inputs:
        """Tokens of this split cut, or padded, to a length; the first row has no padding."""
        hardest = self.hardest()
        rows = [np.resize(self.ids[int(i)], length) for i in np.resize(hardest, count)]
        return self._padded([rows[0], *(row[: max(1, length - 1)] for row in rows[1:])], length)

    def hardest(self) -> Ints:
        """The longest text, and the one with the largest token: a network that runs on these runs on all."""
        largest = [int(row.max()) for row in self.ids]
        return np.array([int(self.lengths.argmax()), int(np.argmax(largest))])

    def _padded(self, rows: Sequence[Ints], length: int) -> dict[str, Tensor]:
        ids = np.full((len(rows), length), self.pad, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


# -- the tokenizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """A network's own tokenizer, as transformers loads it."""

    name: str
    library: Any
    limit: int
    """The tokens that the network can read at most, as far as its files say; else `LONGEST`."""
    pad: int
    """The token that fills up a batch; the mask hides it."""

    @staticmethod
    def load(network: str) -> Tokenizer:
        """The tokenizer of ``hf:NAME``, a name on the hub, or a folder; code of others never runs."""
        name = network.removeprefix("hf:")
        transformers = import_optional("transformers", "texts", DataError)
        try:
            with quiet_transformers():
                found = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
                config = None
                with contextlib.suppress(OSError, ValueError):  # a folder may hold a tokenizer alone
                    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
                limit = int(found.model_max_length)
                if limit > 1_000_000:  # how transformers says that nobody knows
                    limit = int(getattr(config, "max_position_embeddings", LONGEST) or LONGEST)
        except Exception as error:  # the library and its backends raise anything
            raise DataError(
                f"{printable(name)} has no tokenizer that can be loaded: {type(error).__name__}: {printable(error)}; "
                "expected a language model (hf:NAME, or a folder with tokenizer.json and config.json), or the setting "
                "tokenizer with the name of one"
            ) from error
        if len(found) <= len(found.all_special_ids):  # transformers makes an empty one where files are missing
            raise DataError(f"{printable(name)} has a tokenizer without words; expected tokenizer.json in its folder")
        pad = padding_token(config, found)
        found.pad_token, found.padding_side = found.convert_ids_to_tokens(pad), "right"
        return Tokenizer(Path(name).name if Path(name).is_dir() else name, found, min(limit, LONGEST), pad)

    def __call__(self, texts: Sequence[Any], **options: Any) -> dict[str, Tensor]:
        """As the library's own; batches are filled up as in a run."""
        return dict(self.library(list(texts), **options))

    @cached_property
    def digest(self) -> str:
        """Of all that decides how texts become tokens; how the last batch was cut and filled up does not."""
        backend = getattr(self.library, "backend_tokenizer", None)
        said = sorted(self.library.get_vocab().items()) if backend is None else json.loads(backend.to_str())
        if isinstance(said, dict):
            said |= {"truncation": None, "padding": None}
        return digest(json.dumps(said, sort_keys=True))

    def preprocessing(self, max_length: int, tokens: int) -> dict[str, Any]:
        """What a task says of how its texts become tokens; costs and latency are stated for so many of them."""
        said = {"kind": "text", "max_length": max_length, "tokens": tokens}
        return {**said, "tokenizer": self.name, "tokenizer_digest": self.digest}

    def encode(self, texts: Sequence[str], max_length: int) -> tuple[list[Ints], int]:
        """The tokens of each text, cut to a length; and how many were longer."""
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        with quiet_transformers():
            found = self.library(list(texts), **options)["input_ids"] if texts else []
            long = [i for i, row in enumerate(found) if len(row) > max_length]
            cut = {"truncation": True, "max_length": max_length}
            for i in long:  # again, so that what ends a text is there
                found[i] = self.library(texts[i], **cut, **options)["input_ids"]
        return [np.array(row, np.int32) for row in found], len(long)


# -- from samples to data ---------------------------------------------------------------------------------------------


def texts_of(
    train: Dataset[Any] | DataLoader[Any],
    test: Dataset[Any] | DataLoader[Any] | None = None,
    validation: float | Dataset[Any] | DataLoader[Any] | None = None,
    *,
    tokenizer: str,
    max_length: int | None = None,
    classes: Sequence[str] | None = None,
    name: str = "given",
    seed: int = 0,
    skip_bad: bool = False,
) -> Data:
    """Map-style datasets of (text, label) as data for a run. Labels are numbers or names.

    Args:
        train: what is learned from.
        test: what is measured on; without it there is no test split.
        validation: a dataset, or the share of each training class to hold out.
        tokenizer: the network whose tokenizer is used: ``hf:NAME``, or a folder.
        max_length: tokens of a text at most; longer ones are cut. By default what the tokenizer says, at most 512.
        classes: the names of the classes, in the order of the network's outputs; by default those that occur.
        name: what the data are called.
        seed: draws the validation split.
        skip_bad: leave out samples that cannot be used, and list them.
    """
    share = check_share(validation) if isinstance(validation, int | float) else 0.0
    given = {TRAIN: train, TEST: test, VALIDATION: None if isinstance(validation, int | float) else validation}
    rows = (row for split, each in given.items() if each is not None for row in _items(split, each))
    samples = to_samples(rows, classes)
    if (samples.splits == VALIDATION).any():
        share = 1.0  # any number but 0: the set's own are used
    return text_data(name, samples, tokenizer, max_length, share, seed, skip_bad)


def _items(split: int, given: Any) -> Iterator[Row]:
    dataset: Any = given.dataset if isinstance(given, DataLoader) else given
    part = SPLIT_NAMES[split][0]
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{part}: sample {i} is a {type(item).__name__}, expected a pair (text, label)")
        yield split, f"{part}/{i}", item[0], item[1]


def text_data(
    name: str, samples: Samples, tokenizer: str, max_length: int | None, share: float, seed: int, skip_bad: bool
) -> Data:
    """Samples whose files are texts: tokenised, checked and split."""
    loaded = Tokenizer.load(tokenizer)
    most = loaded.limit if max_length is None else check_integer("max_length", max_length, 2)
    samples = _without_too_long(samples, most)
    samples.check(name, "texts", skip_bad)
    samples = samples.with_validation(share, seed)
    texts = [file.read() for file in samples.files]
    ids, cut = loaded.encode(texts, most)
    if cut:
        samples = samples.with_note(f"{cut:,} of {len(ids):,} texts are longer than {most} tokens, and cut")
    lengths = [len(row) for row, split in zip(ids, samples.splits, strict=True) if split == TRAIN]
    # what costs and latency are stated for: the typical text, in whole vectors of numbers
    length = min(most, 8 * -(-int(np.median(lengths)) // 8))
    preprocessing = loaded.preprocessing(most, length)

    def make(rows: Ints) -> TextSplit:
        return TextSplit([ids[i] for i in rows], [texts[i] for i in rows], samples.labels[rows], loaded.pad)

    return samples.to_data(name, (length,), preprocessing, make, [*texts, json.dumps(preprocessing)])


def _without_too_long(samples: Samples, max_length: int) -> Samples:
    most = FAR_TOO_LONG * max_length
    sizes = np.array([file.size for file in samples.files], np.int64)
    wrong = [
        BadFile(samples.files[i].name, f"far too long: {sizes[i]:,} characters, and {max_length} tokens are read")
        for i in np.flatnonzero(sizes > most)
    ]
    return replace(samples.at(np.flatnonzero(sizes <= most)), bad=(*samples.bad, *wrong))


def to_samples(rows: Iterable[Row], classes: Sequence[str] | None = None, labels: bool = True) -> Samples:
    """Rows as samples; those that cannot be used are listed. Classes that nobody names are those of training."""
    good: list[tuple[int, str, str, str]] = []
    bad: list[BadFile] = []
    for split, place, text, label in rows:
        label = label.item() if isinstance(label, Tensor | np.generic) and np.prod(label.shape) == 1 else label
        if classes is not None and isinstance(label, int) and 0 <= label < len(classes):
            label = classes[label]
        if problem := _problem(text) or (_label_problem(label, classes) if labels else ""):
            bad.append(BadFile(place, problem))
        else:
            good.append((split, place, text, str(label).strip()))
    names = _in_order({row[3] for row in good if row[0] == TRAIN}) if classes is None else tuple(map(str, classes))
    numbers = {each: i for i, each in enumerate(names)}
    known = [row for row in good if not labels or row[3] in numbers]
    strange = [row for row in good if labels and row[3] not in numbers]
    bad += [BadFile(row[1], f"class {row[3]!r}, which training has not") for row in strange]
    return Samples(
        names if labels else (),
        np.array([numbers[row[3]] if labels else -1 for row in known], np.int64),
        np.array([row[0] for row in known], np.int64),
        tuple(File(place, partial(str, text), len(text)) for _, place, text, _ in known),
        bad=tuple(bad),
    )


def _problem(text: object) -> str:
    if not isinstance(text, str):
        return "no text" if text is None else f"a {type(text).__name__}, expected text"
    if not text.strip():
        return "empty text"
    return "" if _is_unicode(text) else "not UTF-8"


def _label_problem(label: object, classes: Sequence[str] | None) -> str:
    if label is None or (isinstance(label, str) and not label.strip()):
        return "no label"
    if isinstance(label, bool | float) or not isinstance(label, int | str):
        return f"a label of type {type(label).__name__}, expected a name or a whole number"
    if isinstance(label, str) and not _is_unicode(label):
        return "a label that is not UTF-8"
    if classes is not None and str(label).strip() not in classes:
        return f"class {label!r}, expected one of {first_few(classes)}"
    return ""


def _is_unicode(text: str) -> bool:
    """Bytes that were no UTF-8 are lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _in_order(names: set[str]) -> tuple[str, ...]:
    """By number, where all are numbers: 2 before 10."""
    are_numbers = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if are_numbers else 0, name)))


# -- files ------------------------------------------------------------------------------------------------------------


def find_texts(path: str, labels: bool, columns: Columns) -> Samples:
    """One file, or a folder of train, validation (dev) and test files: CSV, TSV or JSON lines, columns by name."""
    root = Path(path).expanduser()
    files = {TRAIN: root} if root.is_file() else _split_files(root)
    problems: list[BadFile] = []
    rows = [row for split, file in files.items() for row in _rows_of(file, split, labels, columns, problems)]
    found = to_samples(rows, labels=labels)
    return replace(found, bad=(*problems, *found.bad)).with_test()


def _split_files(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        raise DataError(
            f"there is no file or folder {printable(root.absolute())}; expected text:PATH of a CSV, TSV or JSON-lines "
            "file, or of a folder with train, validation and test files"
        )
    inside = sorted(file for file in root.iterdir() if file.suffix.lower() in ENDINGS)
    named = {split: [f for f in inside if f.stem.lower() in names] for split, names in SPLIT_NAMES.items()}
    for several in named.values():
        if len(several) > 1:
            raise DataError(f"{printable(root)} has {first_few([f.name for f in several])}, expected one of them")
    if not named[TRAIN]:
        raise DataError(
            f"{printable(root)} has {first_few([f.name for f in inside]) or 'no such files'}, expected train.csv, "
            "train.tsv or train.jsonl among them"
        )
    return {split: several[0] for split, several in named.items() if several}


def _rows_of(file: Path, split: int, labels: bool, columns: Columns, problems: list[BadFile]) -> Iterator[Row]:
    """The rows of one file; what cannot be read is noted."""
    if file.suffix.lower() not in ENDINGS:
        raise DataError(f"{printable(file)} ends in {file.suffix!r}, expected {', '.join(ENDINGS)}")
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        raise DataError(f"{printable(file)} has {size:,} bytes, at most {MAX_FILE_BYTES:,} are read; split it")
    data = file.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:1000]:
        raise DataError(f"{printable(file)} is not UTF-8, but UTF-16 or binary; save it as UTF-8")
    text = data.decode("utf-8-sig", "surrogateescape")  # lines that are not UTF-8 are found row by row
    read = _json_lines if file.suffix.lower() in (".jsonl", ".ndjson") else _table
    names: tuple[str, str] | None = None
    for line, row in read(file, text, problems):
        if names is None:
            names = columns_of(str(file), list(row), *columns, labels=labels)
        yield split, f"{file.name} line {line}", row.get(names[0]), row.get(names[1])


def columns_of(where: str, columns: list[str], text: str | None, label: str | None, *, labels: bool) -> tuple[str, str]:
    """The columns of texts and of classes, which is empty without labels."""
    of_texts = _column_of(where, columns, text, TEXT_COLUMNS, "text_column")
    return of_texts, _column_of(where, columns, label, LABEL_COLUMNS, "label_column") if labels else ""


def _column_of(where: str, columns: list[str], wanted: str | None, usual: Sequence[str], setting: str) -> str:
    """The column that is meant: by its name, else the first with a usual one."""
    plain = {str(column).strip().lower().removesuffix("s"): column for column in reversed(columns)}
    short = [name.removesuffix("s") for name in usual]
    found = [plain[name] for name in short if name in plain] if wanted is None else [c for c in columns if c == wanted]
    if found:
        return found[0]
    close = close_names(wanted, map(str, columns)) if wanted else []
    hint = f"; did you mean {close[0]}?" if close else ""
    asked = printable(wanted) if wanted else f"of the names {', '.join(usual[:4])}..."
    raise DataError(
        f"{printable(where)} has the columns {first_few(columns, 10)}, and none {asked}{hint}; set {setting} to the "
        "name of a column (the first line of a table has the names)"
    )


def _table(file: Path, text: str, problems: list[BadFile]) -> Iterator[tuple[int, dict[str, Any]]]:
    header, lines = text.partition("\n")[0], io.StringIO(text, newline="")
    is_tabs = file.suffix.lower() == ".tsv"
    delimiter = "\t" if is_tabs else max(",;\t", key=header.count)
    # in TSV a quotation mark is a character like any other
    reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if is_tabs else csv.QUOTE_MINIMAL)
    try:
        names = next(reader, [])
        for cells in reader:
            if len(cells) == len(names):
                yield reader.line_num, dict(zip(names, cells, strict=True))
            elif cells:
                words = f"{len(cells)} columns, expected {len(names)}"
                problems.append(BadFile(f"{file.name} line {reader.line_num}", words))
    except csv.Error as error:
        words = f"{error}; is a quotation mark left open?"
        problems.append(BadFile(f"{file.name} line {reader.line_num}", words))


def _json_lines(file: Path, text: str, problems: list[BadFile]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(BadFile(f"{file.name} line {number}", f"no JSON: {error}"))
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            problems.append(BadFile(f"{file.name} line {number}", "no JSON object, expected {...}"))
