"""The loop: train, finish a block, score, prune, train again, until the last density.

Where tasks are learned wide, all kept weights learn. At the end of a block they are written in each narrow form in
turn, which learns on for a few epochs with the wide network as teacher and becomes a task; then the wide network goes
on.

Each phase takes the run from one `Position` to the next. What a phase does depends on the position, the settings and
the values in the network alone, so a run that was killed goes on from its last checkpoint to the same bits.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.adapters.attach import attach_, detach_, fuse
from spalier.adapters.kinds import FineTune
from spalier.criteria.score import Scores, score
from spalier.data import Data, Loader, Split
from spalier.distributed import wait_for_all
from spalier.errors import DataError, NonFiniteError, RunError, TaskFileError
from spalier.inputs import Inputs, call, each
from spalier.networks import logits_of
from spalier.pruning.plan import Plan
from spalier.pruning.prune import prune_
from spalier.pruning.recovery import Recovery
from spalier.refitting import refit_
from spalier.runs import learning
from spalier.runs.checkpoint import WIDE, Checkpoint, Position, RunFolder, load_checkpoint, save_checkpoint
from spalier.runs.learning import Evaluation, evaluate
from spalier.runs.narrow import Form, hold_budget_, set_values_, unrounded, write_narrow_
from spalier.runs.processes import Machine, Progress, StopSignals, sum_gradients_, sum_over_ranks
from spalier.runs.settings import Settings, seed_of
from spalier.selecting import select
from spalier.structure.structure import structure_of
from spalier.tasks import SUFFIX, Store, Task
from spalier.tasks.apply import apply_to_
from spalier.tasks.base import Base

_LOG = logging.getLogger("spalier")


class Engine:
    """One run in one process.

    A subclass can do a part of the run in another way: a phase (`train`, `finish`, `refit`, `score`, `prune`), a step
    (`train_step`, `loss`), the choice of units (`select_plan`) or the row of a block (`make_row`).
    ``TransferPruning.run(folder, engine=Mine)`` uses it.
    """

    progress: Progress
    optimizer: Optimizer

    def __init__(
        self, config: Settings, folder: RunFolder, net: nn.Module, head: Sequence[str], data: Data, machine: Machine
    ) -> None:
        self.config, self.folder, self.net, self.head = config, folder, net, head
        self.data, self.machine, self.base_digest = data, machine, learning.digest(net)
        self.targets, self.forms = config.targets(), config.forms
        # the same tensors in modules that nothing is attached to: what task files are built on
        self.base = copy.deepcopy(net, {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())})
        self.example = each(lambda t: t.to(machine.device), data.example())
        self.batch_size = config.batch_size
        if len(data.train) < config.batch_size:  # one batch of what all processes can share equally
            self.batch_size = max(len(data.train) // machine.world_size * machine.world_size, machine.world_size)
        self.loader = self._loader(data.train, is_training=True)
        if len(self.loader) == 1:  # which learns next to nothing
            remedy = "set a smaller batch_size (--batch-size), or more epochs (--epochs)"
            words = "one step an epoch: %d training samples in batches of %d; %s"
            _LOG.warning(words, len(data.train), self.batch_size, remedy)
        self.signals = StopSignals()
        self.started = self.saved = time.monotonic()

        # from here on what a checkpoint holds
        self.position = Position(phase="finish" if config.start_task else "train")
        self.rows: list[dict[str, Any]] = []
        self.loss_sum = 0.0
        self.average: learning.Average | None = None
        self.best: float | None = None
        self.best_values: dict[str, Tensor] = {}
        self.plan: Plan | None = None
        self.teacher: nn.Module | None = None
        self.wide: Task | None = None
        self.wide_net: nn.Module | None = None

    def run(self, progress: bool) -> list[dict[str, Any]]:
        """Begin, or go on from the last checkpoint, to the end; a row for each density."""
        checkpoint = load_checkpoint(self.folder)
        if checkpoint is None:
            self._begin()
        else:
            self._restore(checkpoint)
        wait_for_all()  # until everyone has read what the first process is about to replace
        blocks, forms = range(len(self.targets) + 1), range(len(self.forms) + 1)
        epochs = sum(self.config.epochs_of(block, form) for block in blocks for form in forms)
        shown = progress and self.machine.is_first
        done = self.position.step + self.position.refit_steps
        self.progress = Progress(epochs * len(self.loader), done, shown)
        try:
            with self.signals:
                while self.position.phase != "done":
                    own = torch.tensor(float(self.signals.received is not None), device=self.machine.device)
                    if bool(sum_over_ranks(own)):  # any of the processes has received one
                        self._stop()
                    getattr(self, self.position.phase)()
        finally:
            self.progress.close()
            self.loader.close()
        if self.signals.received is not None:
            self.signals.leave()
        return self.rows

    # beginning and going on

    def _begin(self) -> None:
        """Attach what will be learned."""
        self._load_teacher()
        torch.manual_seed(seed_of(self.config.seed, "adapters"))
        if self.config.start_task is not None:
            start = Task.load(self.config.start_task)
            learning.check_start_task(self.config, start)
            start.apply_(self.net, example=self.example)
            if self.forms and start.info.adapter["kind"] != FineTune.__name__:
                refit_(self.net, FineTune())
        else:
            adapter = FineTune() if self.forms else self.config.make_adapter()
            # tables of words are large, and hardly move
            targets = (lambda _, module: not isinstance(module, nn.Embedding)) if self.data.is_text else None
            attach_(self.net, adapter, head=self.head, example=self.example, targets=targets)
        if self.targets and self.config.budget != "latency":  # which would have to be measured
            # fail now, not after hours of training, if the last density cannot be reached
            self.select_plan(score(self.net, criterion="weight"), self.targets[-1])
        self.begin_block()
        self.folder.truncate_metrics(0)
        self.save()

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Become what a checkpoint says."""
        base = "the base has other weights"
        if self.config.pretrained:
            named = f"the pretrained weights of {self.config.network}"
            base = f"{named} are others now (another version of its library or of them)"
        same = {
            "the teacher is another": checkpoint.teacher == self._teacher_digest(),
            base: checkpoint.base == self.base_digest,
            "the data are others": checkpoint.data == self.data.digest,
        }
        for what, is_same in same.items():
            if not is_same:
                raise RunError("changed", f"{what} than when the run was begun; give it the same")
        self.position, self.rows, self.loss_sum = checkpoint.position, checkpoint.rows, checkpoint.loss
        self.best, self.started = checkpoint.best, time.monotonic() - checkpoint.seconds
        self._load_teacher()
        checkpoint.task.apply_(self.net, example=self.example)
        set_values_(self.net, checkpoint.part("unrounded"))
        if self.position.form:
            self._set_wide(Task.load(self.folder.path / WIDE))
        if checkpoint.plan is not None:
            self.plan = Plan(structure_of(self.net, None), **checkpoint.plan)
        self.begin_block()
        learning.restore_optimizer_(self.optimizer, self.net, checkpoint.part("optimizer"))
        if checkpoint.scaler:
            self.machine.scaler.load_state_dict(checkpoint.scaler)
        if self.average is not None and checkpoint.part("average"):
            self.average.values = self._on_device(checkpoint.part("average"))
        self.best_values = self._on_device(checkpoint.part("best"))
        self.folder.truncate_metrics(checkpoint.metrics)

    def _on_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.machine.device).clone() for name, value in tensors.items()}

    def begin_block(self, optimizer: Optimizer | None = None) -> None:
        """Set up what a block trains with: the memory layout, the optimizer, the moving average."""
        learning.set_memory_format_(self.net, self.machine.channels_last)
        is_narrow = self.position.form > 0 and self.position.phase != "refit"
        self.optimizer = optimizer or learning.make_optimizer(self.config, self.net, is_narrow=is_narrow)
        if self.config.ema_decay is not None:
            self.average = learning.Average(self.net, self.config.ema_decay)

    # training

    def train(self) -> None:
        """Train the epochs of the block that are still to do."""
        self.net.train()
        while self.position.epoch < self._epochs:
            at = self.position
            # every narrow form sees what the wide network would see next
            number = at.epochs + at.epoch if at.form else at.epochs
            try:
                for inputs, labels in self.loader.epoch(number, at.batch):
                    self.train_step(inputs, labels)
            except DataError:
                if self.signals.received is not None:
                    self._stop()  # the signal went to all processes, and has ended the loader's first
                raise
            self._end_epoch()
        self.position = self.position.replace(phase="finish")

    def train_step(self, inputs: Inputs, labels: Tensor) -> None:
        """One batch: forward, loss, backward, the sum over processes, an update."""
        # dropout draws from here: a function of the step, so that a run which goes on draws the same
        at = self.position
        place = ("refit", at.block, at.form, at.epoch, at.batch) if at.form else ("step", at.step)
        torch.manual_seed(seed_of(self.config.seed, *place, self.machine.rank))
        inputs, labels = self.to_device(inputs), labels.to(self.machine.device)
        learning.set_lr_(self.optimizer, self._lr(self.position.batch))
        with self.machine.autocast(), self.machine.synced_norms():
            logits = logits_of(call(self.net, inputs))
        loss = self.loss(logits, inputs, labels) / self.batch_size
        self.machine.accelerator.backward(loss)
        # the wish to stop travels with the gradients, so that all processes stop after the same step
        signalled = float(self.signals.received is not None)
        parameters = learning.learned_parameters(self.net).values()
        value, stop = sum_gradients_(parameters, [float(loss.detach()), signalled])
        if not np.isfinite(value):
            raise self._not_finite(f"the loss is {value}")
        self.machine.step_(self.optimizer, self.config.grad_clip)
        if self.average is not None:
            self.average.update_(self.net)
        self.loss_sum += value
        steps = {"refit_steps": at.refit_steps + 1} if at.form else {"step": at.step + 1}
        self.position = at.replace(batch=at.batch + 1, **steps)
        self.progress.step(self._where(), value)
        if stop:
            self._stop()
        if time.monotonic() - self.saved > self.config.checkpoint_seconds:
            self.save()

    def loss(self, logits: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
        """The loss of a batch, summed over its samples."""
        taught = None
        teacher = self.wide_net if self.position.form else self.teacher
        if teacher is not None:
            with torch.no_grad(), self.machine.autocast():
                taught = logits_of(call(teacher, inputs))
        return learning.training_loss(self.config, logits, labels, taught)

    def _lr(self, batch: int) -> float:
        config, per_epoch = self.config, len(self.loader)
        done, steps = self.position.epoch * per_epoch + batch, self._epochs * per_epoch
        lr, warmup = config.initial_lr, config.warmup_epochs * per_epoch
        if self.position.form:
            lr, warmup = config.refit_lr, 0.1 * steps  # a new optimizer begins near a good place
        return lr * learning.lr_factor(config.lr_schedule, done, steps, warmup)

    def _end_epoch(self) -> None:
        at = self.position
        values: dict[str, float | None] = {"loss": self.loss_sum / len(self.loader), "lr": self._lr(at.batch - 1)}
        where = self._where()
        if self._form is not None and self.wide is not None:  # what is made smaller now is learned around
            hold_budget_(self.net, self._form, self.wide, self.config.storage, self.progress.line)
        self.position = at.replace(epoch=at.epoch + 1, epochs=at.epochs + (not at.form), batch=0)
        self.loss_sum = 0.0
        every = self.config.validate_every or int(self.config.keep_best)
        values["validation"] = self._validate() if every and self.position.epoch % every == 0 else None
        self.folder.log({"kind": "epoch", **asdict(self.position), **values})
        group = f"{self._form.label}/" if self._form else ""
        tracked = {f"{group}train/{name}": value for name, value in values.items()}
        self.machine.log(tracked, self.position.step + self.position.refit_steps)
        accuracy = values["validation"]
        seen = "" if accuracy is None else f", validation {accuracy:.1%}"
        self.progress.line(f"{where}: loss {values['loss']:.4f}{seen}")

    def _validate(self) -> float | None:
        """The accuracy of the network now, or of its average; the best values are kept where that is asked for."""
        if self.data.validation is None:
            return None
        now = learning.values_of(self.net)
        if self.average is not None:
            set_values_(self.net, self.average.values)
        accuracy = self.evaluate(self.net, self.data.validation).accuracy
        if self.config.keep_best and (self.best is None or accuracy > self.best):
            self.best, self.best_values = accuracy, learning.values_of(self.net)
        set_values_(self.net, now)
        self.net.train()
        return accuracy

    # the end of a block

    def finish(self) -> None:
        """End a block: what was learned becomes a task file and a row."""
        if self.best_values:
            set_values_(self.net, self.best_values)
        elif self.average is not None and self.position.epoch:
            set_values_(self.net, self.average.values)
        for name, parameter in learning.learned_parameters(self.net).items():
            if not bool(torch.isfinite(parameter).all()):
                raise self._not_finite(f"{name} has become NaN or infinite")
        if self.position.block == 0 and self.config.teacher == "self":
            self._set_teacher(self._task({}).build(self.base))  # as it will be made of its file, to the bit
        self.best, self.best_values = None, {}
        if self.forms and not self.position.form:
            self._keep_wide()
            return
        if self._form is not None and self.wide is not None:
            self._seed("refit")
            samples = self._samples(self.config.recovery_samples, shared=False)
            hold_budget_(self.net, self._form, self.wide, self.config.storage, self.progress.line, samples)
        self._add_row()
        if self.forms:
            self._restore_wide()
        if self.position.form < len(self.forms):
            self.position = self.position.replace(form=self.position.form + 1, phase="refit", epoch=0, batch=0)
            self.save()
            return
        self.plan = None
        if self.position.block == len(self.targets):
            self.position = self.position.replace(phase="done")
            return
        block = self.position.block + 1
        self.position = self.position.replace(block=block, form=0, phase="score", epoch=0, batch=0)
        self.save()

    def _add_row(self) -> None:
        """Let what was learned become a task file and a row."""
        row = self.make_row()
        self.rows.append(row)
        self.folder.log({"kind": "block", **row})
        numbers = {f"block/{name}": value for name, value in row.items() if isinstance(value, float)}
        self.machine.log(numbers, self.position.step + self.position.refit_steps)
        self.progress.line(learning.row_in_words(row))

    # narrow forms

    def _keep_wide(self) -> None:
        """Keep the wide network, to teach narrow forms and to go on from."""
        wide = self._task({})
        if self.machine.is_first:
            self.folder.write(self.folder.path / WIDE, wide.to_bytes())
        self._set_wide(wide)
        self.position = self.position.replace(form=1, phase="refit", epoch=0, batch=0)
        self.save()

    def _set_wide(self, wide: Task) -> None:
        self.wide, self.wide_net = wide, wide.build(self.base).requires_grad_(False)
        learning.set_memory_format_(self.wide_net, self.machine.channels_last)

    def _restore_wide(self) -> None:
        """Let the network be the wide one again."""
        assert self.wide is not None
        structure = structure_of(self.net, None)
        detach_(self.net)
        apply_to_(self.wide, Base(self.net), structure)
        self.average = None

    def refit(self) -> None:
        """Write what was learned in the next narrow form."""
        assert self.wide is not None
        assert self._form is not None
        self._seed("refit")
        samples = list(self._samples(self.config.recovery_samples, shared=False))
        write_narrow_(self.net, self._form, self.wide, samples, self.config.storage, self.progress.line)
        self.position = self.position.replace(phase="train")
        self.begin_block()
        self.save()

    def make_row(self) -> dict[str, Any]:
        """Write a task file of what was learned, and measure what it holds."""
        storage, is_budget = self.config.storage, self._form is not None and self._form.is_budget
        is_exact = storage == "exact" and not is_budget
        plain = fuse(self.net).eval() if is_exact else self._task({}, is_budget).stored_as(storage).build(self.base)
        learning.set_memory_format_(plain, self.machine.channels_last)
        splits = {"validation": self.data.validation, "test": self.data.test}
        seen = {name: self.evaluate(plain, split) for name, split in splits.items() if split is not None}
        names = {"validation": "validation", "test": "accuracy"}  # as task files have them
        task = self._task({names[name]: found.accuracy for name, found in seen.items()}, is_budget)
        if self.machine.is_first:
            Store(self.folder.tasks).add(task, overwrite=True, storage=storage)
        file = self.folder.tasks / f"{task.name}{SUFFIX}"
        at = self.position
        target = self.targets[at.block - 1] if at.block else learning.share_left(task, self.config.budget)
        row = learning.block_row(at, target, task, seen) | {
            **({"code": self._form.name} if self._form else {}),
            "bytes": file.stat().st_size if self.machine.is_first else 0,
            "latency_ms": learning.latency_ms(plain, self.example),
            "seconds": self._seconds(),
        }
        details = learning.block_details(row, self.data.classes, seen, self.plan, self.machine.device)
        details["examples"] = self._write_examples(plain)
        self.folder.write_json(self._block_file(".json"), details)
        return row

    def evaluate(self, net: nn.Module, split: Split) -> Evaluation:
        """How good a network is on a split of the data."""
        self._seed("evaluate")
        teacher = self.teacher if bool((split.labels < 0).all()) else None
        with self._loader(split, is_training=False) as loader:
            batches = ((self.to_device(inputs), labels) for inputs, labels in loader.epoch(0))
            return evaluate(
                net.eval(), batches, len(self.data.classes), self.machine.device, self.machine.autocast, teacher
            )

    def _write_examples(self, plain: nn.Module) -> dict[str, Any] | None:
        split = self.data.test if self.data.test is not None else self.data.validation
        if split is None or not self.machine.is_first:
            return None
        self._seed("examples")
        with self.machine.autocast():
            said, sheet = learning.examples(plain, split, self.to_device, self.batch_size) or (None, None)
        if sheet is not None:
            self.folder.write(self._block_file(".png"), sheet)
        return said

    def _task(self, metrics: dict[str, float], base_norms: bool = False) -> Task:
        """What was learned so far, as a task."""
        config = self.config
        origin = {"data": self.data.name, "run": config.name, "method": config.method, "seed": config.seed}
        origin |= {"code": self._form.name} if self._form else {}
        said: dict[str, Any] = {"classes": self.data.classes, "preprocessing": self.data.preprocessing}
        try:
            name = self._task_name(self.position.block)
            return Task.of(self.net, name, metrics=metrics, provenance=origin, base_norms=base_norms, **said)
        except (NonFiniteError, TaskFileError) as error:
            if error.code != "non-finite":
                raise
            raise self._not_finite(f"what was learned is not finite: {error}") from error

    def _task_name(self, block: int) -> str:
        name = self.config.name
        if self._form and len(self.forms) > 1:
            name += f"-{self._form.label}"
        if block == 0:
            return f"{name}-start" if self.config.start_task else f"{name}-100"
        target = self.targets[block - 1]
        left = f"{target:.0f}B" if self.config.budget == "bytes" else f"{100 * target:g}"
        return f"{name}-{left}"

    # score and prune

    def score(self) -> None:
        """Decide which units are removed next."""
        self._seed("score")
        samples = self._samples(self.config.score_samples, shared=True)
        criterion = self.config.make_criterion(self.position.block)
        scores = score(self.net, samples, criterion, loss=learning.mean_loss)
        self.plan = self.select_plan(scores, self.targets[self.position.block - 1])
        if warning := self.plan.warning():  # of layers that are nearly gone
            _LOG.warning("at %g of the %s %s", self.targets[self.position.block - 1], self.config.budget, warning)
        self.folder.write_json(self._block_file(".scores.json"), learning.score_histograms(scores, self.plan))
        self.position = self.position.replace(phase="prune")
        self.save()

    def select_plan(self, scores: Scores, target: float) -> Plan:
        """The units that stay at a density."""
        return select(self.net, scores, **learning.select_options(self.config, target))

    def prune(self) -> None:
        """Make the network smaller, and restore in closed form what can be."""
        assert self.plan is not None
        self._seed("prune")
        optimizer = self.optimizer if self.config.keep_optimizer else None
        samples, everything = self._samples(self.config.recovery_samples, shared=False), self.config.recovery == "all"
        recovery = Recovery(samples, adapters=everything, head=everything) if self.config.recovery != "none" else None
        prune_(self.net, self.plan, optimizer=optimizer, recover=recovery)
        self.begin_block(optimizer)
        self.position = self.position.replace(phase="train")
        self.save()

    def _samples(self, count: int, *, shared: bool) -> learning.Samples:
        """Training samples that are not augmented; all of them in every process, or each process its share."""
        generator = np.random.default_rng(seed_of(self.config.seed, "samples", self.position.block))
        chosen = generator.permutation(len(self.data.train))
        if shared:
            chosen, size = chosen[:count][self.machine.rank :: self.machine.world_size], self.batch_size
        else:  # calibration puts all of it into one batch
            chosen, size = learning.alike(self.data.train, chosen, count), count
        teacher = self.teacher if not self.config.labels else None
        return learning.Samples(self.data.train, chosen, size, self.to_device, teacher)

    # the teacher

    def _load_teacher(self) -> None:
        """Make the teacher from its file, in a run that goes on as in one that was never killed."""
        if self.config.teacher is None or (self.config.teacher == "self" and self.position.block == 0):
            return
        path: str | Path = self.config.teacher
        if path == "self":
            path = self.folder.tasks / f"{self._task_name(0)}{SUFFIX}"
        self._set_teacher(Task.load(path).build(self.base))

    def _set_teacher(self, teacher: nn.Module) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        learning.set_memory_format_(self.teacher, self.machine.channels_last)

    def _teacher_digest(self) -> str:
        if self.config.teacher in (None, "self"):
            return ""
        return hashlib.sha256(Path(str(self.config.teacher)).read_bytes()).hexdigest()

    # checkpoints and stops

    def save(self) -> None:
        """Write a checkpoint. Other processes have nothing that the first one does not have."""
        if self.machine.is_first:
            plan = self.plan
            tensors = {
                "optimizer": learning.optimizer_state(self.optimizer, self.net),
                "average": {} if self.average is None else self.average.values,
                "best": self.best_values,
                "unrounded": unrounded(self.net),
            }
            checkpoint = Checkpoint(
                position=self.position,
                task=self._task({}),
                tensors={f"{kind}:{name}": t for kind, some in tensors.items() for name, t in some.items()},
                base=self.base_digest,
                data=self.data.digest,
                teacher=self._teacher_digest(),
                metrics=self.folder.flush_metrics(),
                loss=self.loss_sum,
                best=self.best,
                plan=None if plan is None else {"keep": plan.keep, "writers": plan.writers, "ranks": plan.ranks},
                rows=self.rows,
                seconds=self._seconds(),
                scaler=self.machine.scaler.state_dict() or None,
            )
            save_checkpoint(self.folder, checkpoint)
        self.saved = time.monotonic()

    def _stop(self) -> None:
        self.save()
        self.progress.line(f"stopped at step {self.position.step}; run again to resume")
        self.signals.leave()

    def _not_finite(self, what: str) -> RunError:
        return RunError(
            "not-finite",
            f"{what} at step {self.position.step} ({self._where()}); the last good state is in "
            f"{str(self.folder.path)!a}: begin again in another folder with a lower lr, grad_clip or warmup_epochs",
        )

    # helpers

    def to_device(self, inputs: Inputs) -> Inputs:
        """Inputs where the network is, in its memory layout."""
        inputs = each(lambda t: t.to(self.machine.device, non_blocking=True), inputs)
        return inputs if self.machine.channels_last else each(lambda t: t.contiguous(), inputs)

    def _seed(self, what: str) -> None:
        """Seed a phase: networks may draw numbers in eval mode too."""
        at = self.position
        torch.manual_seed(seed_of(self.config.seed, what, at.block, at.epoch))

    def _loader(self, split: Split, *, is_training: bool) -> Loader:
        return Loader(
            split,
            batch_size=self.batch_size,
            seed=self.config.seed,
            augment=is_training and self.config.augment,
            num_workers=self.config.num_workers,
            shuffle=is_training,
            drop_last=is_training and learning.drops_last(self.config, len(split), self.batch_size, self.machine),
            round_last=learning.SHARED if is_training else 1,
            rank=self.machine.rank,
            world_size=self.machine.world_size,
        )

    @property
    def _form(self) -> Form | None:
        """The narrow form that is learned now."""
        return self.forms[self.position.form - 1] if self.position.form else None

    @property
    def _epochs(self) -> int:
        return self.config.epochs_of(self.position.block, self.position.form)

    def _where(self) -> str:
        at, form = self.position, f", {self._form.name}" if self._form else ""
        return f"block {at.block}/{len(self.targets)}{form}, epoch {at.epoch + 1}/{self._epochs}"

    def _block_file(self, ending: str) -> Path:
        form = f"-{self._form.label}" if self._form and len(self.forms) > 1 else ""
        return self.folder.path / "blocks" / f"{self.position.block:02}{form}{ending}"

    def _seconds(self) -> float:
        return round(time.monotonic() - self.started, 3)
