"""The loop: train, finish a block, score, prune, train again, until the last density.

Each phase takes the run from one `Position` to the next. What a phase does depends on the position, the settings, the
values in the network and nothing else, so a run that was killed goes on from its last checkpoint to the same bits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.adapters.attach import attach_, detach_, fuse
from spalier.criteria.score import Scores, score
from spalier.data import Data, Loader, Split
from spalier.distributed import wait_for_all
from spalier.errors import DataError, NonFiniteError, RunError, TaskFileError
from spalier.networks import logits_of
from spalier.pruning.plan import Plan
from spalier.pruning.prune import prune_
from spalier.pruning.recovery import Recovery
from spalier.runs import losses
from spalier.runs.blocks import Block, block_line, check_start, described, latency_of, plain_plan, share_of
from spalier.runs.checkpoint import Checkpoint, Position, load_checkpoint, save_checkpoint
from spalier.runs.config import Settings
from spalier.runs.evaluating import Evaluation, evaluate
from spalier.runs.folder import RunFolder
from spalier.runs.learning import (
    Average,
    is_safe,
    learned,
    make_optimizer,
    optimizer_state,
    restore_optimizer_,
    set_lr_,
    set_values_,
    settle_,
    values_of,
)
from spalier.runs.looking import examples, spread
from spalier.runs.machine import Machine
from spalier.runs.progress import Progress
from spalier.runs.rates import factor
from spalier.runs.results import Results
from spalier.runs.samples import Samples, mean_loss
from spalier.runs.seeds import seed_of
from spalier.runs.stopping import Stopping
from spalier.runs.syncing import sum_gradients_, summed
from spalier.selecting import select
from spalier.structure.structure import structure_of
from spalier.tasks.format import SUFFIX
from spalier.tasks.store import Store
from spalier.tasks.task import Task


class Engine:
    """One run in one process."""

    def __init__(
        self,
        config: Settings,
        folder: RunFolder,
        net: nn.Module,
        head: str,
        data: Data,
        machine: Machine,
        base_digest: str,
    ) -> None:
        self.config, self.folder, self.net, self.head = config, folder, net, head
        self.data, self.machine, self.base_digest = data, machine, base_digest
        self.targets = config.targets()
        self.example = torch.zeros(2, *data.shape, device=machine.device)
        assert config.batch_size is not None
        fewer = len(data.train) // machine.world * machine.world  # which all processes can share
        self.batch_size = (
            config.batch_size if len(data.train) >= config.batch_size else max(fewer, machine.world)
        )
        self.loader = self._loader(data.train, shuffle=True)
        self.at = Position(phase="finish" if config.start_task else "train")
        self.rows: list[dict[str, Any]] = []
        self.loss_sum = 0.0
        self.best: float | None = None
        self.best_values: dict[str, Tensor] = {}
        self.plan: Plan | None = None
        self.teacher: nn.Module | None = None
        self.channels_last = machine.channels_last
        self.average: Average | None = None
        self.optimizer: Optimizer
        self.seconds, self.since, self.saved = 0.0, time.monotonic(), time.monotonic()
        self.stopping = Stopping()

    # -- the run ------------------------------------------------------------------------------------------------------

    def go(self, shown: bool) -> Results:
        """Go on from wherever the run is to its end."""
        checkpoint = load_checkpoint(self.folder)
        if checkpoint is None:
            self._begin_()
        else:
            self._restore_(checkpoint)
        wait_for_all()  # until everyone has read what the first process is about to replace
        self.progress = Progress(self._steps(), self.at.step, shown and self.machine.is_first)
        phases: dict[str, Callable[[], None]] = {
            "train": self._train_,
            "finish": self._finish_,
            "score": self._score_,
            "prune": self._prune_,
        }
        try:
            with self.stopping:
                while self.at.phase != "done":
                    if self._is_asked():
                        self._stop_()
                    phases[self.at.phase]()
        finally:
            self.progress.close()
            self.loader.close()
        if self.stopping.asked is not None:
            self.stopping.end()
        return self._results()

    def _results(self) -> Results:
        skipped = [str(bad) for bad in self.data.skipped]
        return Results(self.folder.path, self.rows, skipped, self.base_digest, self.data.digest)

    def _begin_(self) -> None:
        """Attach what will learn."""
        self._load_teacher_()
        torch.manual_seed(seed_of(self.config.seed, "adapters"))
        if self.config.start_task is not None:
            start = Task.load(self.config.start_task)
            check_start(self.config, start)
            start.apply_(self.net, example=self.example)
        else:
            attach_(self.net, self.config.make_adapter(), head=self.head, example=self.example)
        self._rehearse()
        self._new_block_()
        if self.machine.is_first:
            self.folder.rewind_(0)
        self._save_()

    def _rehearse(self) -> None:
        """See that the last density can be had, and that all settings are sound, before anything is learned."""
        if self.targets and self.config.budget != "latency":  # which would have to be measured
            self._selected(score(self.net, criterion="weight"), self.targets[-1])

    def _restore_(self, checkpoint: Checkpoint) -> None:
        """Become what a checkpoint says."""
        if checkpoint.teacher != self._teacher_digest():
            raise RunError(
                "changed", "the teacher is another than the one that the run was begun with; give it the same"
            )
        if (checkpoint.base, checkpoint.data) != (self.base_digest, self.data.digest):
            other = (
                "the base has other weights" if checkpoint.base != self.base_digest else "the data are others"
            )
            raise RunError("changed", f"{other} than those that the run was begun with; give it the same")
        self.at, self.rows = checkpoint.at, checkpoint.rows
        self.loss_sum, self.best, self.seconds = checkpoint.loss, checkpoint.best, checkpoint.seconds
        self._load_teacher_()
        checkpoint.task.apply_(self.net, example=self.example)
        if checkpoint.plan is not None:
            self.plan = Plan(structure_of(self.net, None), **checkpoint.plan)
        self._new_block_()
        restore_optimizer_(self.optimizer, self.net, checkpoint.part("optimizer"))
        if checkpoint.scaler is not None and self.machine.scaler is not None:
            self.machine.scaler.load_state_dict(checkpoint.scaler)
        if self.average is not None and checkpoint.part("average"):
            self.average = Average(self.net, self.average.decay, self._here(checkpoint.part("average")))
        self.best_values = self._here(checkpoint.part("best"))
        if self.machine.is_first:
            self.folder.rewind_(checkpoint.metrics)

    def _here(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.machine.device).clone() for name, value in tensors.items()}

    def _new_block_(self, optimizer: Optimizer | None = None) -> None:
        """What a block begins with."""
        self.channels_last = self.machine.channels_last and is_safe(self.net, self.config.method)
        settle_(self.net, self.channels_last)
        self.optimizer = optimizer or make_optimizer(self.config, self.net)
        self.average = Average(self.net, self.config.ema_decay) if self.config.ema_decay is not None else None

    # -- phases -------------------------------------------------------------------------------------------------------

    def _train_(self) -> None:
        """The epochs of a block that are still to do."""
        epochs = self._epochs(self.at.block)
        self.net.train()
        while self.at.epoch < epochs:
            try:
                for images, labels in self.loader.epoch(self.at.epochs, self.at.batch):
                    self._step_(images, labels)
            except DataError:
                if self.stopping.asked is not None:
                    self._stop_()  # a signal for all processes has ended the workers first
                raise
            self._end_epoch_()
        self.at = self.at.to(phase="finish")

    def _step_(self, images: Tensor, labels: Tensor) -> None:
        """One batch: forward, loss, backward, the sum over processes, an update."""
        torch.manual_seed(seed_of(self.config.seed, "step", self.at.step, self.machine.rank))
        images, labels = self._placed(images), labels.to(self.machine.device)
        set_lr_(self.optimizer, self._lr(self.at.batch))
        with self.machine.autocast(), self.machine.synced_norms():
            logits = logits_of(self.net(images))
        loss = self._loss(logits, images, labels) / self.batch_size
        self.machine.accelerator.backward(loss)
        parameters = list(learned(self.net).values())
        asked = 0.0 if self.stopping.asked is None else 1.0
        value, stop = sum_gradients_(parameters, [float(loss.detach()), asked])
        if not np.isfinite(value):
            raise self._not_finite(f"the loss is {value}")
        self.machine.step_(self.optimizer, self.config.grad_clip)
        if self.average is not None:
            self.average.update_(self.net)
        self.loss_sum += value
        self.at = self.at.to(batch=self.at.batch + 1, step=self.at.step + 1)
        self.progress.step(self._where(), value)
        if stop:
            self._stop_()
        if time.monotonic() - self.saved > self.config.checkpoint_seconds:
            self._save_()

    def _loss(self, logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        taught = None
        if self.teacher is not None:
            with torch.no_grad(), self.machine.autocast():
                taught = logits_of(self.teacher(images))
        return losses.together(
            logits,
            labels,
            taught,
            smoothing=self.config.label_smoothing,
            weight=self.config.distill_weight if self.config.labels else 1.0,
            temperature=self.config.temperature,
        )

    def _end_epoch_(self) -> None:
        loss, lr = self.loss_sum / max(len(self.loader), 1), self._lr(self.at.batch - 1)
        self.at = self.at.to(epoch=self.at.epoch + 1, epochs=self.at.epochs + 1, batch=0)
        self.loss_sum = 0.0
        every = self.config.validate_every
        seen = None
        if every and self.at.epoch % every == 0 and self.data.validation is not None:
            seen = self._validated()
        self._log_epoch(loss, lr, seen)

    def _validated(self) -> Evaluation:
        """How good the network is now, or its average; the best so far is kept where that is asked for."""
        assert self.data.validation is not None
        now = values_of(self.net)
        if self.average is not None:
            set_values_(self.net, self.average.values)
        seen = self._evaluated(self.net, self.data.validation)
        if self.config.keep_best and (self.best is None or seen.accuracy > self.best):
            self.best, self.best_values = seen.accuracy, values_of(self.net)
        set_values_(self.net, now)
        self.net.train()
        return seen

    def _finish_(self) -> None:
        """End a block: what was learned becomes a task file, and a row."""
        if self.config.keep_best and self.best_values:
            set_values_(self.net, self.best_values)
        elif self.average is not None and self.at.epoch:
            set_values_(self.net, self.average.values)
        self._check_finite()
        if self.at.block == 0 and self.config.teacher == "self":
            self._teach_(fuse(self.net))
        row = self._row()
        self.rows.append(row)
        self._log({"kind": "block", **row})
        self.machine.log({f"block/{k}": v for k, v in row.items() if isinstance(v, float)}, self.at.step)
        self.progress.line(block_line(row))
        last = self.at.block == len(self.targets)
        self.best, self.best_values, self.plan = None, {}, None
        if last:
            self.at = self.at.to(phase="done")
            if self.machine.is_first:
                self.folder.write_json(self.folder.results, self._results().to_dict())
            return
        self.at = self.at.to(block=self.at.block + 1, phase="score", epoch=0, batch=0)
        self._save_()

    def _score_(self) -> None:
        """Decide what goes next."""
        config = self.config
        self._seed("score")
        scores = score(
            self.net,
            self._samples(config.score_samples, shared=True),
            config.make_criterion(self.at.block),
            loss=mean_loss,
        )
        self.plan = self._selected(scores, self.targets[self.at.block - 1])
        if self.machine.is_first:
            self.folder.write_json(self._block_file(".scores.json"), spread(scores, self.plan))
        self.at = self.at.to(phase="prune")
        self._save_()

    def _selected(self, scores: Scores, target: float) -> Plan:
        config = self.config
        budget: dict[str, Any] = {config.budget: int(target) if config.budget == "bytes" else target}
        assert config.writers is not None
        return select(
            self.net,
            scores,
            ranking=config.ranking,
            writers=config.writers,
            **budget,
            **config.select_options,
        )

    def _prune_(self) -> None:
        """Make the network smaller, and give back in closed form what can be."""
        assert self.plan is not None
        self._seed("prune")
        optimizer = self.optimizer if self.config.keep_optimizer else None
        recovery = None
        if self.config.recovery != "none":
            everything = self.config.recovery == "all"
            batches = self._samples(self.config.recovery_samples, shared=False)
            recovery = Recovery(batches, adapters=everything, head=everything)
        prune_(self.net, self.plan, optimizer=optimizer, recover=recovery)
        self._new_block_(optimizer)
        self.at = self.at.to(phase="train")
        self._save_()

    # -- what phases need ---------------------------------------------------------------------------------------------

    def _load_teacher_(self) -> None:
        """The teacher, made in the same way in a run that goes on as in one that was never killed."""
        if self.config.teacher is None or (self.config.teacher == "self" and self.at.block == 0):
            return
        own = self.config.teacher == "self"
        path = self.folder.tasks / f"{self._task_name(0)}{SUFFIX}" if own else self.config.teacher
        Task.load(path).apply_(self.net)
        self._teach_(fuse(self.net))
        detach_(self.net)

    def _teacher_digest(self) -> str:
        if self.config.teacher in (None, "self"):
            return ""
        return hashlib.sha256(Path(str(self.config.teacher)).read_bytes()).hexdigest()

    def _teach_(self, teacher: nn.Module) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        settle_(self.teacher, self.machine.channels_last)

    def _samples(self, count: int, *, shared: bool) -> Samples:
        """Training samples as they are, the same for all processes or each its share."""
        generator = np.random.default_rng(seed_of(self.config.seed, "samples", self.at.block))
        chosen = generator.permutation(len(self.data.train))[:count]
        if shared and self.machine.world > 1:
            chosen = chosen[self.machine.rank :: self.machine.world]
        teacher = self.teacher if not self.config.labels else None
        return Samples(self.data.train, chosen, self.batch_size, self._placed, teacher)

    def _evaluated(self, net: nn.Module, part: Split) -> Evaluation:
        self._seed("evaluate")
        loader = self._loader(part, shuffle=False)
        teacher = self.teacher if bool((part.labels < 0).all()) else None
        batches = ((self._placed(images), labels) for images, labels in loader.epoch(0))
        try:
            return evaluate(
                net.eval(),
                batches,
                len(self.data.classes),
                self.machine.device,
                self.machine.autocast,
                teacher,
            )
        finally:
            loader.close()

    def _row(self) -> dict[str, Any]:
        """A task file of what was learned, and what is known of it."""
        plain = fuse(self.net).eval()
        settle_(plain, self.channels_last)
        validation, test = (
            None if part is None else self._evaluated(plain, part)
            for part in (self.data.validation, self.data.test)
        )
        metrics = {
            name: seen.accuracy
            for name, seen in (("validation", validation), ("accuracy", test))
            if seen is not None
        }
        task = self._task(metrics)
        target = share_of(task, self.config.budget) if self.at.block == 0 else self.targets[self.at.block - 1]
        block = Block(self.at, target, task, validation, test, self.plan)
        size = 0
        if self.machine.is_first:
            Store(self.folder.tasks).add(task, overwrite=True)
            size = (self.folder.tasks / f"{task.name}{SUFFIX}").stat().st_size
        row = block.row() | {
            "bytes": size,
            "latency_ms": latency_of(plain, self.example[:1]),
            "seconds": self._elapsed(),
        }
        if self.machine.is_first:
            shown = self._shown(plain)
            self.folder.write_json(
                self._block_file(".json"), described(block, row, self.data.classes) | {"examples": shown}
            )
        return row

    def _shown(self, plain: nn.Module) -> dict[str, Any] | None:
        """Samples to look at, with their images in a file of the block's."""
        part = self.data.test if self.data.test is not None else self.data.validation
        self._seed("examples")
        with self.machine.autocast():
            found = None if part is None else examples(plain, part, self._placed, self.batch_size)
        if found is None:
            return None
        self.folder.write(self._block_file(".png"), found[1])
        return found[0]

    def _block_file(self, ending: str) -> Path:
        return self.folder.path / "blocks" / f"{self.at.block:02}{ending}"

    def _task(self, metrics: dict[str, float]) -> Task:
        try:
            return Task.of(
                self.net,
                self._task_name(self.at.block),
                metrics=metrics,
                classes=self.data.classes,
                preprocessing=self.data.preprocessing,
                provenance={
                    "data": self.data.name,
                    "run": self.config.name,
                    "method": self.config.method,
                    "seed": self.config.seed,
                },
            )
        except (NonFiniteError, TaskFileError) as error:
            if error.code != "non-finite":
                raise
            raise self._not_finite(f"what was learned is not finite: {error}") from error

    def _task_name(self, block: int) -> str:
        if block == 0:
            return f"{self.config.name}-start" if self.config.start_task else f"{self.config.name}-100"
        target = self.targets[block - 1]
        return (
            f"{self.config.name}-{target:.0f}B"
            if self.config.budget == "bytes"
            else f"{self.config.name}-{100 * target:g}"
        )

    def _check_finite(self) -> None:
        for name, parameter in learned(self.net).items():
            if not bool(torch.isfinite(parameter).all()):
                raise self._not_finite(f"{name} has become NaN or infinite")

    def _not_finite(self, what: str) -> RunError:
        return RunError(
            "not-finite",
            f"{what} at step {self.at.step} ({self._where()}); the last good state is in {str(self.folder.path)!a}: "
            "begin again with a lower lr, grad_clip or warmup_epochs, in another folder",
        )

    def _save_(self) -> None:
        """Write a checkpoint; processes other than the first have nothing that it does not have."""
        self.saved = time.monotonic()
        if not self.machine.is_first:
            return
        tensors = {f"optimizer:{k}": v for k, v in optimizer_state(self.optimizer, self.net).items()}
        if self.average is not None:
            tensors |= {f"average:{k}": v for k, v in self.average.values.items()}
        tensors |= {f"best:{k}": v for k, v in self.best_values.items()}
        scaler = self.machine.scaler
        save_checkpoint(
            self.folder,
            Checkpoint(
                at=self.at,
                task=self._task({}),
                tensors=tensors,
                base=self.base_digest,
                data=self.data.digest,
                teacher=self._teacher_digest(),
                metrics=self.folder.logged(),
                loss=self.loss_sum,
                best=self.best,
                plan=None if self.plan is None else plain_plan(self.plan),
                rows=self.rows,
                seconds=self._elapsed(),
                scaler=None if scaler is None else scaler.state_dict(),
            ),
        )
        self.saved = time.monotonic()

    def _is_asked(self) -> bool:
        """Whether any process was asked to stop."""
        own = torch.tensor(float(self.stopping.asked is not None), device=self.machine.device)
        return bool(summed(own))

    def _stop_(self) -> None:
        self._save_()
        self.progress.line(f"stopped at step {self.at.step}; run again to go on from here")
        self.stopping.end()

    # -- small things -------------------------------------------------------------------------------------------------

    def _seed(self, what: str) -> None:
        """Networks may draw numbers in eval mode too."""
        torch.manual_seed(seed_of(self.config.seed, what, self.at.block, self.at.epoch))

    def _loader(self, part: Split, *, shuffle: bool) -> Loader:
        return Loader(
            part,
            batch_size=self.batch_size,
            seed=self.config.seed,
            augment=shuffle and self.config.augment,
            num_workers=self.config.num_workers,
            shuffle=shuffle,
            drop_last=shuffle,
            rank=self.machine.rank,
            world_size=self.machine.world,
        )

    def _placed(self, images: Tensor) -> Tensor:
        images = images.to(self.machine.device, non_blocking=True)
        return images if self.channels_last else images.contiguous()

    def _lr(self, batch: int) -> float:
        per_epoch = max(len(self.loader), 1)
        assert self.config.lr_schedule is not None
        step, steps = self.at.epoch * per_epoch + batch, self._epochs(self.at.block) * per_epoch
        return self.config.initial_lr * factor(
            self.config.lr_schedule, step, steps, self.config.warmup_epochs * per_epoch
        )

    def _epochs(self, block: int) -> int:
        return 0 if block == 0 and self.config.start_task else self.config.epochs_of(block)

    def _steps(self) -> int:
        return sum(map(self._epochs, range(len(self.targets) + 1))) * len(self.loader)

    def _where(self) -> str:
        return f"block {self.at.block}/{len(self.targets)}, epoch {self.at.epoch + 1}/{self._epochs(self.at.block)}"

    def _elapsed(self) -> float:
        now = time.monotonic()
        self.seconds, self.since = self.seconds + now - self.since, now
        return round(self.seconds, 3)

    def _log_epoch(self, loss: float, lr: float, seen: Evaluation | None) -> None:
        values = {"loss": loss, "lr": lr, "validation": None if seen is None else seen.accuracy}
        self._log({"kind": "epoch", **asdict(self.at), **values})
        self.machine.log({f"train/{name}": value for name, value in values.items()}, self.at.step)
        shown = "" if seen is None else f", validation {seen.accuracy:.1%}"
        done = self.at.to(epoch=self.at.epoch - 1)
        self.progress.line(f"block {done.block}, epoch {done.epoch + 1}: loss {loss:.4f}{shown}")

    def _log(self, line: dict[str, Any]) -> None:
        if self.machine.is_first:
            self.folder.log(line)
