"""A BERT, and texts of your own: a CSV file with columns text and label.

    python examples/bert.py sentence-transformers/all-MiniLM-L6-v2 my/texts.csv     # a name on the hub, or a folder

The texts are one file, or a folder with train.csv and test.csv. Without arguments it makes a tiny BERT with random
weights and 240 short questions, so that nothing is downloaded. Needs spalier[cli] and transformers.
"""

import csv
import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import spalier as sp
from spalier.networks import open_network
from spalier.predicting import predict

WORDS = {
    "animal": ["cat", "dog", "horse", "cow", "sheep"],
    "number": ["one", "two", "three", "four", "five"],
    "place": ["rome", "paris", "oslo", "cairo", "lima"],
}
OTHERS = ["what", "is", "the", "of", "how", "many", "in", "near"]


def make_questions(file: Path) -> None:
    """Some words that say nothing, and one or two that say which kind it is."""
    numbers = random.Random(0)
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["text", "label"])
        for _ in range(80):
            for kind, telling in WORDS.items():
                text = numbers.choices(OTHERS, k=numbers.randint(3, 6)) + numbers.choices(telling, k=2)
                rows.writerow([" ".join(numbers.sample(text, len(text))), kind])


def make_bert(folder: Path) -> None:
    """Two small layers, and a tokenizer that knows the words above."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *OTHERS, *(word for kind in WORDS.values() for word in kind)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, initializer_range=0.2, **sizes)
    transformers.BertModel(config).save_pretrained(folder)


settings = {}
if len(sys.argv) > 2:
    model, texts = sys.argv[1:3]
else:
    model, texts = "tiny-bert", "questions.csv"
    make_bert(Path(model))
    make_questions(Path(texts))
    settings = {"lr": 3e-3}  # it starts from nothing; a pretrained one needs no rate

task = sp.adapt(f"hf:{model}", f"text:{texts}", target=0.5, name="questions", **settings)  # half of the MACs
print(task.info)
task.save("questions.task.safetensors")

base = open_network(f"hf:{model}", classes=len(task.info.classes))
small = sp.load(base, "questions.task.safetensors")  # a plain network of transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
question = "how many is two"
print(question, "->", predict(small, task.info, [question], tokenizer=tokenizer, top=1)[0])
print(f"{len(task.to_bytes()):,} bytes beside the base")
print(f"{task.info.metrics['accuracy']:.1%} right, chance {1 / len(task.info.classes):.1%}")
