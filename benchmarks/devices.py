"""The time of a whole training on 1 to N devices of this machine.

    python -m benchmarks --config configs/voc.yaml
    python -m benchmarks.devices 2 raw_ddp fit --devices 2 --max-steps 4    a run whose first 2 steps do not count

A few steps of each engine are timed, and the median step, times the steps that the training has on
so many devices, is its time, without validation and saving.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.programs import result_of, run_python
from benchmarks.recipe import Recipe
from benchmarks.rounds import Measurement, Numbers, Rows, Topic
from benchmarks.stage import DATA_PARALLEL, SINGLE, Elsewhere, Stage, free_memory
from lit_mnist.errors import InputError
from lit_mnist.profiling import timing as measure
from lit_mnist.profiling.timing import spread


def devices(config: Path | None = None, steps: int | None = None) -> Topic:
    """Returns the topic: the time of the whole training on 1 to N devices.

    Args:
        config: The configuration file; None for the default experiment.
        steps: Optimizer steps of a run; None for as many as the network makes bearable.

    Raises:
        InputError: The configuration or its data are rejected, or one device cannot train it.
    """
    stage = Stage.of(Recipe.read(config), steps)
    if reason := stage.refusal(SINGLE, 1):
        raise InputError(reason)
    return topic_of(stage)


def topic_of(stage: Stage) -> Topic:
    """Returns the topic of the measurements that are possible."""
    measurements = [
        Measurement(name_of(*pair), partial(_take, stage, *pair), "step_ms", partial(_obstacle, stage, *pair))
        for pair in stage.pairs()
    ]
    title = "The whole training, on 1 to N devices"
    return Topic("devices", title, measurements, (), partial(analyse, stage), tuple(_notes(stage)))


def name_of(engine: str, count: int) -> str:
    """Returns the name of an engine's measurement on a number of devices."""
    what = "device" if engine in {SINGLE, DATA_PARALLEL} else "rank"
    return f"{engine}, {count} {what}{'s' * (count != 1)}"


def _take(stage: Stage, engine: str, count: int, folder: Path) -> Numbers:
    recipe, config = stage.recipe, folder / "experiment.yaml"
    config.write_text(yaml.safe_dump(recipe.timed(stage.steps, stage.devices.kind).to_dict()))
    words = (stage.left_out, engine, "fit", "--config", config, "--devices", count, "--run-dir", folder / "run")
    elsewhere = Elsewhere()
    run_python("-m", "benchmarks.devices", *words, folder=folder, gpus=stage.gpu)
    busy = elsewhere.share()
    result = result_of(folder)
    speed, plan = result["train"]["images_per_s"], recipe.plan(count)
    if speed is None:
        raise InputError(f"{stage.steps} steps are too few in a row to be timed: give more with --steps.")
    memory = {} if stage.gpu else {"memory_bytes": float(result["peak_memory_bytes"])}
    return {"step_ms": 1000 * plan.batch_size * plan.accumulate / speed, **memory, **busy}


def _obstacle(stage: Stage, engine: str, count: int, rows: Rows) -> str | None:
    """Returns why an engine is not measured: it is rejected, or does not fit into the memory."""
    if reason := stage.refusal(engine, count):
        return reason
    alone = rows[name_of(SINGLE, 1)]
    free = free_memory()
    if not alone or stage.gpu or free is None:
        return None
    # Each rank of a batch per rank needs what one process does.
    need = count * alone[0]["memory_bytes"]
    if need <= free:
        return None
    sizes = " and ".join(f"{each / 2**30:.1f} GiB" for each in (need, free))
    return f"The ranks would need, and the machine has free, about {sizes}: lower data.batch_size or data.image_size."


def analyse(stage: Stage, rows: Rows) -> dict[str, Any]:
    """Returns the times of the whole training as plain values."""
    recipe = stage.recipe
    alone, plan = rows[name_of(SINGLE, 1)], recipe.plan(1)
    return {
        "devices": {
            "config": str(recipe.config) if recipe.config else None,
            "experiment": recipe.experiment.to_dict(),
            "kind": stage.devices.kind,
            "device": torch.cuda.get_device_name(0) if stage.gpu else None,
            "present": stage.devices.count if stage.gpu else 1,
            "epochs": plan.epochs,
            "train_samples": recipe.train_count,
            "stand_in": "shapes" if recipe.stand_in else None,
            "steps_timed": stage.steps,
            "steps_left_out": stage.left_out,
            "elsewhere": max(
                (each["elsewhere"] for row in rows.values() for each in row if "elsewhere" in each), default=None
            ),
            "measured": [
                measured(recipe, engine, count, rows[name_of(engine, count)], alone, shares=not stage.gpu and count > 1)
                for engine, count in stage.pairs()
                if rows[name_of(engine, count)]
            ],
        }
    }


def measured(
    recipe: Recipe, engine: str, count: int, taken: Sequence[Numbers], alone: Sequence[Numbers], *, shares: bool
) -> dict[str, Any]:
    """Returns an engine's measured row: the time of the whole training, and the speed-up round by round.

    Args:
        recipe: The experiment.
        engine: The engine.
        count: Number of devices.
        taken: Its numbers in each round.
        alone: Those of one device.
        shares: Whether its ranks share the cores of one machine.
    """
    plan = recipe.plan(count)
    steps, steps_alone = plan.total_steps, recipe.plan(1).total_steps
    seconds = [steps * each["step_ms"] / 1000 for each in taken]
    before = [steps_alone * each["step_ms"] / 1000 for each in alone]
    return {
        "engine": engine,
        "devices": count,
        "shares_cores": shares,
        "batch_size": plan.batch_size,
        "steps": steps,
        "seconds": spread(seconds),
        "speed_up": spread([one / each for one, each in zip(before, seconds, strict=True)]),
    }


def _notes(stage: Stage) -> list[str]:
    half = f"Of the {stage.steps} steps of a run the first {stage.left_out} are left out; a step is their median."
    notes = [*stage.recipe.notes(), f"{half} The time of a training is that of its steps alone."]
    notes.append(
        "A speed-up is the time of the whole training on one device divided by that on several. Where the batch grows "
        "with the devices there are fewer steps, and more samples of an epoch may fill no whole batch."
    )
    if stage.gpu:
        notes.append("An engine without float16 is timed where the file has trainer.precision: 32-true.")
    else:
        notes.append(
            "No GPU is used here: one device is this machine with all its cores, and the ranks of a measured run share "
            "them, so that a second rank is not a second device."
        )
    return notes


def train_a_few_steps(words: Sequence[str], main: Callable[..., int]) -> int:
    """Runs a command line whose result has the median step after a shorter warm-up; returns its exit code.

    Args:
        words: Steps to leave out, at least 1, the engine's name, and the command line.
        main: The command line's function.
    """
    # The clock knows no time of the first step.
    measure.WARM_UP_STEPS = int(words[0]) - 1
    return main(list(words[2:]), engine=words[1])


if __name__ == "__main__":
    from lit_mnist.cli.main import main as command_line

    sys.exit(train_a_few_steps(sys.argv[1:], command_line))
