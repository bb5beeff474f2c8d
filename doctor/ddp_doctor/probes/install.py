"""Installs all probes in this process."""

import faulthandler
import multiprocessing
import os
import random
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_doctor.probes.alone import AloneProbe
from ddp_doctor.probes.branches import BranchProbe
from ddp_doctor.probes.calls import CallProbe
from ddp_doctor.probes.loaders import LoaderProbe
from ddp_doctor.probes.micro_batches import MicroBatchProbe, RankBatches, initial_weights, records_of
from ddp_doctor.probes.modules import ModuleProbe
from ddp_doctor.probes.options import watch_options
from ddp_doctor.probes.reports import ReportProbe
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.probes.trainers import TrainerProbe
from ddp_doctor.probes.wrap import wrap
from ddp_doctor.probes.written_files import SAVED, FileProbe
from ddp_doctor.processes import children_of
from ddp_doctor.records.recorder import Recorder, agreed
from ddp_doctor.records.spec import STOP, WRITTEN, Spec

# The ranks of a program that would train for long end after the step that is in this file.
LAST_STEP = "last_step"
_MOST_STEPS, _MOST_SECONDS = 50, 15.0
# Libraries that are imported before the processes of later runs are forked.
_LIBRARIES = {"lightning.pytorch", "torchvision", "torchmetrics", "transformers", "accelerate", "pandas", "sklearn"}


class Probes:
    """The probes of this process, whose environment was `environment` when it began."""

    def __init__(self, folder: Path, spec: Spec, environment: Mapping[str, str] = os.environ) -> None:
        self.spec, self.environment = spec, set(environment.items())
        self.recorder = Recorder(folder)
        changes = spec.interventions
        ranks = records_of(Path(spec.feed), int(changes["ranks"])) if spec.feed else []
        feed = RankBatches(ranks) if ranks and not changes.get("micro_batches") else None
        self.steps = StepProbe(self.recorder, spec)
        in_turn = spec.purpose == "numbers" and not feed
        self.micro = MicroBatchProbe(self.recorder, self.steps, ranks) if in_turn else None
        self.modules = ModuleProbe(self.recorder, spec, self.steps, self.micro)
        self.alone = AloneProbe(self.recorder, spec)
        self.loaders = LoaderProbe(self.recorder, spec, feed, self.micro)
        self.calls = CallProbe(self.recorder, spec, self.steps)
        self.files = FileProbe(self.recorder, self.steps.state)
        self._started = False
        self._since = 0.0

    def install(self) -> None:
        """Installs the probes, and seeds the generators differently on each rank."""
        torch.set_num_threads(1)
        seed = self.spec.seed + (0 if self.spec.same_seed else _rank())
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)
        if self.spec.double:
            torch.set_default_dtype(torch.float64)
            # Nothing is computed in less than 64 bits.
            wrap(torch.autocast, "__enter__", lambda original, mode: mode)
            wrap(torch.autocast, "__exit__", lambda original, mode, *_: None)
            # As libraries do with logits before the loss.
            wrap(torch.Tensor, "float", lambda original, x: x if x.dtype is torch.float64 else original(x))
        others = TrainerProbe(self.recorder, self.spec, self.modules.name), ReportProbe(self.recorder)
        for probe in (self.steps, self.modules, self.loaders, self.calls, self.files, *others):
            probe.install()
        watch_options(self.recorder.folder, self.spec)
        if self.micro:
            self.micro.install()
        self.loaders.finish, self.loaders.first_batch = self.finish, self._on_first_batch
        self.loaders.is_alone = self.alone.is_alone
        self.steps.step_ended = self._after_step
        self.calls.before_collective = self._before_collective
        self.watch()

    def watch(self) -> None:
        """Starts the thread that writes the record of a rank that hangs; a fork has none."""
        threading.Thread(target=self._watch, daemon=True).start()
        if self.spec.later or self.spec.interventions.get("branches"):
            BranchProbe(self.recorder).install()

    def finish(self) -> None:
        """Writes the record, and waits for the end: other ranks may still need this one.

        If the program is to train on after the numbers, it does so.
        """
        if self.spec.later and not self.recorder.later:
            self._begin_later()
            return
        self.loaders.close()
        self.end(reached_end=False)
        self._wait()

    def _begin_later(self) -> None:
        """Completes the record of the numbers, and begins that of the later steps, to which they belong, too."""
        begun = len(self.recorder.events)
        self._complete(reached_end=False, error=None)
        del self.recorder.events[begun:]
        self.recorder.tensors.clear()
        self.recorder.later = True
        self.loaders.ending = False

    def _wait(self) -> None:
        time.sleep(self.spec.timeout + 60)

    def end(self, *, reached_end: bool, error: dict[str, Any] | None = None) -> None:
        """Writes the record of a program that came to its end, or to an error."""
        # A stream that the doctor has shortened; the program does not expect its end.
        cut = error and self.loaders.shortened and "StopIteration" in (error["type"], error["message"][-13:])
        error = None if cut else error
        if self.spec.later and not self.recorder.later and not error:
            self._begin_later()
        recorder = self.recorder
        self._complete(reached_end=reached_end, error=error)
        for name in (WRITTEN, "done"):
            (recorder.folder / f"{name}{recorder.rank}").touch()
        if cut:
            # Its exit code would make a launcher end the other ranks before they have written their records.
            self._wait()

    def _complete(self, *, reached_end: bool, error: dict[str, Any] | None) -> None:
        """Writes the record of a part."""
        recorder = self.recorder
        failures = [*(self.loaders.feed.failures if self.loaders.feed else []), *self.loaders.draws.tape.failures]
        if error:
            recorder.add("error", **error)
        else:
            self.loaders.samples.call_datasets()
        recorder.add(
            "end",
            reached_end=reached_end,
            shortened=self.loaders.shortened,
            failures=failures[:10],
            imported=(sorted(_LIBRARIES & sys.modules.keys()), dict(os.environ.items() - self.environment)),
        )
        recorder.write()

    def _before_collective(self) -> None:
        """Begins again if this rank has trained alone so far: now it joins the others."""
        if self.alone.steps:
            self.alone.forget()
            self.steps.forget()
            self.loaders.forget()

    def _after_step(self) -> None:
        """Ends a run whose training takes its batches from no loader, and so has no epoch that could be shortened."""
        if self.alone.is_alone():
            self.alone.steps += 1
            return
        step, spec, later = self.recorder.step, self.spec, self.recorder.later
        self.calls.after_step(self.steps.parameters().values())
        if self.micro and self.micro.plan:
            if self.micro.turn is None:
                self.finish()
            return
        if self.loaders.ending or (spec.interventions.get("until_saved") and (self.recorder.folder / SAVED).exists()):
            self.finish()
            return
        wanted = spec.epochs * spec.steps * max(1, len(self.steps.optimizers))
        if not later and (self.loaders.trains or step < wanted):
            return
        at_once = spec.purpose == "numbers" and not later
        if (at_once or self._last_step(step) <= step) and not self.alone.is_awaited():
            self.finish()

    def _last_step(self, step: int) -> int:
        """Returns the step after which all ranks end; the first one that has run for long enough decides it."""
        self._since = self._since or time.monotonic()
        if step >= _MOST_STEPS:
            return step
        # The other ranks may be one step ahead.
        return agreed(self.recorder.folder / LAST_STEP, step + 2, late=time.monotonic() > self._since + _MOST_SECONDS)

    def _on_first_batch(self) -> None:
        """Watches parameters that were unfrozen, and gives this process the weights that the ranks began with."""
        parameters, feed = self.steps.parameters(), self.loaders.feed
        self.steps.gradients.watch(parameters.values())
        if not feed or not parameters or self._started:
            return
        self._started = True
        with torch.no_grad():
            for key, tensor in initial_weights(feed.tensors[0]).items():
                if key in parameters and parameters[key].shape == tensor.shape:
                    parameters[key].copy_(tensor)
                else:
                    feed.failures.append("the optimizers of one process have other parameters than those of the ranks")

    def _watch(self) -> None:
        """Writes the stacks and the record of a rank that hangs, when the parent asks for them."""
        folder = self.recorder.folder
        while not (folder / STOP).exists():
            time.sleep(0.1)
        rank = self.recorder.rank
        # The process that has started the ranks is none of them.
        if not (folder / f"done{rank}").exists() and (self.recorder.active or not children_of(os.getpid())):
            with (folder / f"stack{rank}.txt").open("a") as file:
                faulthandler.dump_traceback(file)
            self.recorder.write()
            (folder / f"{WRITTEN}{rank}").touch()


def _rank() -> int:
    """Returns the rank that the environment names, or the number of this process among those of multiprocessing."""
    number = re.search(r"\d+$", multiprocessing.current_process().name)
    return int(os.environ.get("RANK") or (number[0] if number else 0))
