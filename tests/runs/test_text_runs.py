"""Runs on texts: a tiny BERT learns, is pruned, saved, built, measured, exported and shown as others are."""

import json
import re

import numpy as np
import onnx
import onnxruntime
import peft
import pytest
import torch
from calling import call as called
from language import LONGEST, sentences, text_folder, tiny_bert, tiny_config, tiny_tokenizer
from running import outcome
from test_resume import Killed, killed_at
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, DistilBertConfig, LlamaConfig, RobertaConfig, ViTConfig

import spalier as sp
from spalier.data import open_data, texts_of
from spalier.data.texts import Tokenizer
from spalier.errors import ConfigError, NetworkError, RunError
from spalier.inputs import call, tokens
from spalier.networks import heads_of, logits_of, open_network, reads_texts
from spalier.runs import Engine, Settings, TransferPruning

CLASSES = ("animal", "color", "number")
QUICK = {
    "epochs": 6,
    "epochs_per_prune": 2,
    "densities": (0.6,),
    "batch_size": 8,
    "lr": 0.01,
    "score_samples": 32,
    "recovery_samples": 32,
    "rank": 4,
    "trackers": (),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("texts"), train=150)


@pytest.fixture(scope="module")
def config(bert, texts):
    return TransferPruning(data=f"text:{texts}", network=f"hf:{bert}", name="kinds", **QUICK)


@pytest.fixture(scope="module")
def ran(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    config.run(folder, progress=False)
    return folder


@pytest.fixture
def spalier(capsys):
    return lambda *arguments: called(capsys, *arguments)


def task_of(folder, name="kinds-60"):
    return sp.Task.load(folder / "tasks" / f"{name}.task.safetensors")


# settings


def test_texts_have_defaults_of_their_own():
    settings = Settings(data="text:some/file.csv")
    assert (settings.optimizer, settings.budget, settings.batch_size, settings.lr) == ("adamw", "macs", 32, 7e-4)
    assert (settings.warmup_epochs, settings.grad_clip, settings.weight_decay_norms) == (0.2, 1.0, False)
    assert settings.name == "file"
    assert settings.is_text
    assert Settings(data="text:a.csv", method="fine-pruning").lr == 1e-4
    assert Settings(data="text:a.csv", recipe="paper").optimizer == "sgd"
    wide = Settings(data="text:a.csv", method="fine-pruning")
    rates = [wide.fitted(1000, 32, size).lr for size in (340_000_000, 110_000_000, 22_700_000, 1000)]
    assert rates == [1e-4, 1e-4, 3e-4, 4e-4], "small language models learn faster"
    assert Settings(data="hf:some/set", text_column="review").budget == "macs"
    images = Settings()
    assert (images.budget, images.warmup_epochs, images.grad_clip, images.is_text) == ("channels", 0, None, False)
    with pytest.raises(ConfigError, match="max_length is 1, expected at least 2"):
        Settings(data="text:a.csv", max_length=1)


# runs


def test_a_run_learns_prunes_and_says_what_a_text_is(ran, bert):
    rows = json.loads((ran / "results.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["kinds-100", "kinds-60"]
    assert rows[0]["validation"] + rows[0]["test"] > 0.9, "chance has 0.67"
    assert 0.5 < rows[1]["macs"] <= 0.6
    info = task_of(ran).info
    assert info.classes == CLASSES
    assert info.preprocessing["kind"] == "text"
    assert info.preprocessing["max_length"] == LONGEST
    assert info.preprocessing["tokens"] == 16
    assert info.preprocessing["tokenizer"] == bert.name
    assert len(info.preprocessing["tokenizer_digest"]) == 64


def test_embeddings_stay_the_bases(ran, bert):
    task, base = task_of(ran, "kinds-100"), open_network(f"hf:{bert}", classes=3)
    built = task.build(base)
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(built.state_dict()[words], base.state_dict()[words])
    query = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(built.state_dict()[query], base.state_dict()[query])


def test_what_is_built_says_what_its_outputs_are_and_the_base_is_left_alone(ran, bert):
    base = open_network(f"hf:{bert}", classes=5)
    before = dict(base.config.id2label)
    built = task_of(ran).build(base)
    assert built.config.id2label == dict(enumerate(CLASSES))
    assert built.config.label2id == {"animal": 0, "color": 1, "number": 2}
    assert (built.config.num_labels, built.num_labels) == (3, 3)
    assert base.config.id2label == before
    inputs = {**tokens(2, 8), "labels": torch.tensor([0, 2])}
    assert torch.isfinite(built(**inputs).loss), "the library's own loss knows the number of classes"


def test_the_built_network_is_right_on_as_many_texts_as_the_row_says(ran, bert, texts):
    built = task_of(ran).build(open_network(f"hf:{bert}", classes=3))
    tokenizer = tiny_tokenizer()
    right = 0
    for text, kind in sentences(30, seed=1):  # one by one, without any padding
        with torch.no_grad():
            guess = int(logits_of(call(built, dict(tokenizer(text, return_tensors="pt")))).argmax())
        right += built.config.id2label[guess] == kind
    assert right / 30 == pytest.approx(task_of(ran).info.metrics["accuracy"])


def test_macs_grow_with_the_length(bert):
    net = open_network(f"hf:{bert}", classes=3)
    short, long = (sp.count(net, tokens(1, length)).macs for length in (8, 16))
    layers, hidden, inner, classes = 2, 16, 24, 3

    def by_hand(length):
        dense = length * layers * (4 * hidden * hidden + 2 * hidden * inner)
        attention = layers * 2 * length * length * hidden
        return dense + attention + hidden * hidden + hidden * classes

    assert (short, long) == (by_hand(8), by_hand(16))


def test_killed_in_the_middle_of_everything(config, ran, tmp_path, monkeypatch):
    eager = config.replace(checkpoint_seconds=0, deterministic=True)
    eager.run(tmp_path / "whole", progress=False)
    kills = 0
    for name, moment, after in (
        ("train_step", 5, False),
        ("_end_epoch", 1, True),
        ("train_step", 9, True),
        ("make_row", 1, True),
        ("score", 1, False),
        ("prune", 1, True),
        ("train_step", 2, True),
    ):
        with monkeypatch.context() as patch:
            killed_at(patch, moment, Engine, name, after=after)
            try:
                eager.run(tmp_path / "run", progress=False)
            except Killed:
                kills += 1
    eager.run(tmp_path / "run", progress=False)
    assert kills == 7
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_learned_wide_and_written_within_a_budget_of_bytes(config, tmp_path):
    wide = config.replace(codes=("wide", "bytes-9000"), refit_epochs=1, lr=0.003)
    rows = wide.run(tmp_path / "run", progress=False).rows
    assert [row["code"] for row in rows] == ["wide", "bytes-9000"] * 2
    assert all(row["bytes"] <= 9000 for row in rows if row["code"] != "wide")
    assert all(0 < row["test"] <= 1 for row in rows)


class Pairs(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def test_a_network_and_a_dataset_of_the_users_own(bert, tmp_path):
    data = texts_of(Pairs(sentences(40)), Pairs(sentences(12, seed=1)), 0.1, tokenizer=str(bert), name="pairs")
    net = open_network(f"hf:{bert}", classes=3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = TransferPruning(epochs=1, densities=(), batch_size=8, trackers=())
    found = run.run(tmp_path / "run", network=net, data=data, progress=False)
    assert found.rows[0]["task"] == "pairs-100"
    settings = Settings.load(tmp_path / "run")
    assert settings.data == "given:text:pairs"
    assert settings.budget == "macs", "the defaults of texts"
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(ConfigError, match="text_column is set, and data was given"):
        run.replace(text_column="text").run(tmp_path / "other", network=net, data=data)


def test_networks_that_do_not_fit_the_texts_are_refused_before_anything_is_learned(bert, texts, tmp_path):
    data = open_data(f"text:{texts}", tokenizer=str(bert))
    run = TransferPruning(epochs=1, densities=(), batch_size=8, trackers=())
    short = AutoModelForSequenceClassification.from_config(tiny_config(max_position_embeddings=8, num_labels=3))
    with pytest.raises(RunError, match=r"texts of up to 24 tokens.*set max_length"):
        run.run(tmp_path / "a", network=short, data=data)
    foreign = AutoModelForSequenceClassification.from_config(tiny_config(vocab_size=9, num_labels=3))
    with pytest.raises(RunError, match="tokenizer to the network whose words it knows"):
        run.run(tmp_path / "b", network=foreign, data=data)
    other = open_network(f"hf:{bert}", classes=3)
    other.config.id2label = dict(enumerate(reversed(CLASSES)))
    with pytest.raises(RunError, match="in another order; set classes"):
        run.run(tmp_path / "c", network=other, data=data)
    with pytest.raises(RunError, match=r"\(4,\) numbers for a sample"):
        run.run(tmp_path / "d", network=open_network(f"hf:{bert}", classes=4), data=data)
    assert not list(tmp_path.rglob("*.safetensors"))
    other.save_pretrained(tmp_path / "tuned")
    tiny_tokenizer().save_pretrained(tmp_path / "tuned")
    named = run.replace(data=f"text:{texts}", network=f"hf:{tmp_path / 'tuned'}")
    with pytest.raises(RunError, match="in another order; set classes"):
        named.run(tmp_path / "e")
    named.replace(classes=tuple(reversed(CLASSES)), epochs=0).run(tmp_path / "f", progress=False)


def test_texts_without_labels_need_no_column_of_them(bert, texts, ran, tmp_path):
    lines = (texts / "train.csv").read_text().splitlines()
    (tmp_path / "texts.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines))
    teacher = str(ran / "tasks" / "kinds-60.task.safetensors")
    run = TransferPruning(data=f"text:{tmp_path / 'texts.csv'}", network=f"hf:{bert}", labels=False, teacher=teacher)
    results = run.replace(epochs=1, densities=(), batch_size=16, trackers=()).run(tmp_path / "run", progress=False)
    assert len(results.rows) == 1
    assert sp.Task.load(next((tmp_path / "run" / "tasks").glob("*.task.safetensors"))).info.classes == CLASSES


# networks


def test_other_language_models_learn_all_of_their_new_head(tmp_path):
    sizes = {"vocab_size": 40, "num_labels": 3}
    distil = DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=32, **sizes)
    roberta = RobertaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, pad_token_id=1, **sizes
    )
    for config, heads in (
        (distil, ["pre_classifier", "classifier"]),
        (roberta, ["classifier.dense", "classifier.out_proj"]),
    ):
        whole = AutoModelForSequenceClassification.from_config(config)
        whole.base_model.save_pretrained(tmp_path / config.model_type)  # as published: without a head
        net = open_network(f"hf:{tmp_path / config.model_type}", classes=4)
        assert heads_of(net) == heads
        assert logits_of(call(net, tokens(2, 8))).shape == (2, 4)
        assert reads_texts(net)


def test_decoders_without_a_padding_token_classify_too(tmp_path):
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2
    )
    config.save_pretrained(tmp_path)
    net = open_network(f"hf:{tmp_path}", classes=3)
    assert logits_of(call(net, tokens(2, 8))).shape == (2, 3)
    assert heads_of(net) == ["score"]


def tiny_llama(folder, pad, **changes):
    """A decoder as published: without a padding token in its configuration; its tokenizer may have one."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=40, **sizes, **changes).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("eos", [3, [3, 5], None])
@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_a_decoder_answers_a_text_alike_however_it_is_padded(pad, eos, texts, tmp_path):
    folder = tiny_llama(tmp_path / "llama", pad, eos_token_id=eos)
    net = open_network(f"hf:{folder}", classes=3)
    split = open_data(f"text:{texts}", tokenizer=f"hf:{folder}").train
    long, short = int(split.lengths.argmax()), int(split.lengths.argmin())
    assert split.lengths[long] > split.lengths[short]
    together = logits_of(call(net, split.fetch(np.array([long, short]), None)[0]))
    alone = [logits_of(call(net, split.fetch(np.array([i]), None)[0])) for i in (long, short)]
    torch.testing.assert_close(together, torch.cat(alone))
    batch = Tokenizer.load(f"hf:{folder}")([split.texts[long], split.texts[short]], padding=True, return_tensors="pt")
    torch.testing.assert_close(logits_of(call(net, batch)), together, msg="predicted as in a run")


def test_images_and_what_is_neither(tmp_path):
    ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=32
    ).save_pretrained(tmp_path / "vit")
    assert not reads_texts(open_network(f"hf:{tmp_path / 'vit'}", classes=3))
    from transformers import WhisperConfig

    WhisperConfig().save_pretrained(tmp_path / "ears")
    with pytest.raises(NetworkError, match="classifies neither images nor texts"):
        open_network(f"hf:{tmp_path / 'ears'}", classes=3)


# the command line


def test_train_eval_and_bench(spalier, bert, texts, tmp_path):
    folder = tmp_path / "run"
    options = ["epochs=1", "densities=[0.6]", "epochs_per_prune=1", "score_samples=16", "trackers=[]", "batch_size=16"]
    given = [part for each in options for part in ("--set", each)]
    done = spalier("train", "--data", f"text:{texts}", "--network", f"hf:{bert}", *given, "--folder", folder, "--json")
    assert done.code == 0, done.err
    rows = done.json["rows"]
    seen = spalier("eval", folder, "--json").json["tasks"]
    assert [each["accuracy"] for each in seen] == pytest.approx([row["test"] for row in rows])
    assert [each["samples"] for each in seen] == [30, 30]
    one = folder / "tasks" / f"{rows[1]['task']}.task.safetensors"
    options = ["--backends", "eager", "--batch", "1", "--rounds", "6", "--json"]
    bench = spalier("bench", folder, one, *options).json
    assert "texts of 16 tokens" in bench["notes"]
    longer = spalier("bench", folder, one, "--shape", "20", *options).json
    assert "texts of 20 tokens" in longer["notes"]
    assert longer["timings"][0]["macs"] > bench["timings"][0]["macs"]
    wrong = spalier("bench", folder, one, "--shape", "3,8,8", *options)
    assert wrong.code == 2
    assert "how many tokens" in wrong.err


def test_eval_refuses_another_tokenizer(spalier, ran, texts, tmp_path):
    other = tiny_bert(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"horse"', '"zebra"'))
    file = tmp_path / "kinds.task.safetensors"
    file.write_bytes((ran / "tasks" / "kinds-60.task.safetensors").read_bytes())
    done = spalier("eval", file, "--base", f"hf:{other}", "--classes", "3", "--data", f"text:{texts}")
    assert done.code == 1
    assert "has another tokenizer" in done.err


def test_a_tokenizer_is_the_same_whatever_it_has_cut(bert):
    tokenizer, other = (Tokenizer.load(str(bert)) for _ in range(2))
    tokenizer.encode(["what is the dog"], 3)
    tokenizer(["a cat", "a"], padding=True, truncation=True, max_length=8)
    assert tokenizer.digest == other.digest


def test_predict_refuses_another_tokenizer(spalier, ran, bert, tmp_path):
    file = ran / "tasks" / "kinds-60.task.safetensors"
    said = spalier("predict", file, "the dog and the cow", "--json")
    assert said.code == 0, said.err
    assert set(said.json["predictions"][0]["classes"]) == set(CLASSES)
    other = tiny_bert(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"horse"', '"zebra"'))
    wrong = spalier("predict", file, "the dog", "--base", f"hf:{other}", "--classes", "3")
    assert wrong.code == 1
    assert "was learned with another tokenizer" in wrong.err


def test_checkpoints_and_loras_of_texts_become_tasks(spalier, bert, texts, tmp_path):
    net = open_network(f"hf:{bert}", classes=3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    net.config.id2label = dict(enumerate(CLASSES))
    net.save_pretrained(tmp_path / "tuned", max_shard_size="5KB")
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) > 1, "a folder of several files, with an index"
    base = ("--base", f"hf:{bert}", "--classes", 3)
    out = tmp_path / "tuned.task.safetensors"
    command = ("task", "from-checkpoint", tmp_path / "tuned", *base, "-o", out, "--code", "spdelta-8bit")
    made = spalier(*command, "--data", f"text:{texts}", "--json")
    assert made.code == 0, made.err
    data = open_data(f"text:{texts}", tokenizer=f"hf:{bert}")
    inputs, labels = data.test.fetch(np.arange(len(data.test)), None)
    right = float((logits_of(call(net, inputs)).argmax(1) == labels).float().mean())
    assert made.json["metrics"]["accuracy of the checkpoint"] == pytest.approx(right), "that of the test samples"
    assert spalier(*command).code == 0
    wrapped = peft.get_peft_model(
        open_network(f"hf:{bert}", classes=3),
        peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], modules_to_save=["classifier"]),
    )
    wrapped.save_pretrained(tmp_path / "lora")
    lora = tmp_path / "lora.task.safetensors"
    done = spalier("task", "from-peft", tmp_path / "lora", *base, "-o", lora)
    assert done.code == 0, done.err
    for file, names in ((out, CLASSES), (lora, ("0", "1", "2"))):  # without data they know their words all the same
        said = spalier("predict", file, "the dog and the cow", *base, "--json")
        assert said.code == 0, said.err
        assert set(said.json["predictions"][0]["classes"]) == set(names)


def test_exported_networks_take_any_number_of_texts_and_tokens(spalier, ran, bert, tmp_path):
    file = ran / "tasks" / "kinds-60.task.safetensors"
    graph, program = tmp_path / "kinds.onnx", tmp_path / "kinds.pt2"
    for out in (graph, program):
        done = spalier("task", "export", file, "-o", out)
        assert done.code == 0, done.err
    built = task_of(ran).build(open_network(f"hf:{bert}", classes=3))
    operators = [node.op_type for node in onnx.load(graph).graph.node]
    assert operators.count("Attention") == built.config.num_hidden_layers
    assert not {"Softmax", "IsNaN"} & set(operators)  # what attention was, before it was one operator
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    loaded = torch.export.load(program).module()
    for count, length in ((1, 5), (3, 16), (4, 20)):
        inputs = tokens(count, length)
        inputs["attention_mask"][-1, length - 2 :] = 0
        with torch.no_grad():
            wanted = logits_of(call(built, inputs))
        feed = {name: value.numpy() for name, value in inputs.items()}
        np.testing.assert_allclose(session.run(None, feed)[0], wanted.numpy(), atol=1e-4)
        np.testing.assert_allclose(logits_of(call(loaded, inputs)).detach().numpy(), wanted.numpy(), atol=1e-5)


def test_trace_shows_a_language_model(spalier, bert):
    found = spalier("trace", f"hf:{bert}", "--shape", "8", "--classes", "3")
    assert found.code == 0, found.err
    assert "bert.encoder.layer.0.intermediate.dense" in found.out


# the report


def test_examples_of_the_report_are_sentences(ran, tmp_path):
    block = json.loads((ran / "blocks" / "01.json").read_text())
    items = block["examples"]["items"]
    known = dict(sentences(30, seed=1))
    assert items
    assert all(known[item["text"]] == CLASSES[item["label"]] for item in items)
    page = sp.report(ran, tmp_path / "report.html").read_text()
    assert 'id="examples-kinds-60"' in page
    assert any(item["text"][:20] in page for item in items)
    assert " ms for one sample of 16 tokens" in page


def test_texts_of_strangers_are_shown_and_never_run(ran, tmp_path):
    import shutil

    shutil.copytree(ran, tmp_path / "run")
    file = tmp_path / "run" / "blocks" / "01.json"
    block = json.loads(file.read_text())
    block["examples"]["items"][0]["text"] = "<script>alert(1)</script> \u202e" + "x" * 5000
    file.write_text(json.dumps(block))
    page = sp.report(tmp_path / "run", tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert not re.search("x{600}", page)


# the real one


@pytest.mark.slow
def test_minilm_learns_trec(shared, tmp_path):
    run = TransferPruning(
        data=f"text:{shared / 'data' / 'text' / 'trec'}",
        network=f"hf:{shared / 'weights' / 'minilm-l6-v2'}",
        method="fine-pruning",
        max_train_samples=1200,
        epochs=2,
        epochs_per_prune=1,
        densities=(0.7,),
        score_samples=64,
        trackers=(),
    )
    rows = run.run(tmp_path / "run", progress=False).rows
    assert rows[0]["test"] > 0.6
    assert rows[1]["macs"] == pytest.approx(0.7, abs=0.01)
    assert rows[1]["test"] > 0.5
