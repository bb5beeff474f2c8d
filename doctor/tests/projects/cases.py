"""The planted-bug suite: user projects with one fault each, and healthy ones, and what the doctor says about each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROJECTS = Path(__file__).parent
DEPENDS = "depends on the number of devices"
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "{file}")
PYTHON = ("python", "{file}")


@dataclass(frozen=True)
class Case:
    """A project and the expected report.

    Attributes:
        name: Name of the project's file without `.py`.
        file: Path relative to this folder.
        target: `Module` (a LightningModule), `main` (a function called on each rank: without arguments or with
            `(rank, world_size)`), or empty for a command.
        data: `Data` (a LightningDataModule), or empty if the target needs none.
        command: Words of the command; `{file}` stands for the path.
        codes: The codes of the faults; empty if the project is healthy.
        verdict: Verdict of these codes.
        devices: Number of ranks.
        note: The fault, or what the healthy project shows.
        hangs: Two ranks hang or lose each other if nothing ends them.
        error: A part of the message with which two ranks end; empty if they end normally.
    """

    name: str
    file: str
    target: str = ""
    data: str = ""
    command: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    verdict: str = "fault"
    devices: int = 2
    note: str = ""
    hangs: bool = False
    error: str = ""

    @property
    def path(self) -> Path:
        """Returns the absolute path of the project's file."""
        return PROJECTS / self.file

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the command with the path of the file."""
        return tuple(word.format(file=self.path) for word in self.command)


def _faulty(
    name: str, target: str, note: str, data: str = "", command: tuple[str, ...] = (), **expected: object
) -> Case:
    """Returns the case of a faulty project; its name begins with the number of the fault."""
    codes = (name[:5].upper(),)
    return Case(name, f"faulty/{name}.py", target, data, command, codes, note=note, **expected)  # type: ignore[arg-type]


def _healthy(name: str, target: str, note: str, data: str = "", command: tuple[str, ...] = ()) -> Case:
    return Case(name, f"healthy/{name}.py", target, data, command, note=note)


FAULTY = (
    _faulty("ld001_no_set_epoch", "main", "set_epoch is missing"),
    _faulty("ld002_no_sampler", "main", "no sampler, a seed per rank: the ranks share samples"),
    _faulty("ld003_iterable_duplicated", "Module", "each rank reads the whole stream"),
    _faulty("ld003b_workers_duplicated", "", "each worker reads all samples of its rank", command=TORCHRUN),
    _faulty("ld004_sampler_replaced", "Module", "Lightning splits a rank-aware sampler a second time", data="Data"),
    _faulty(
        "ld005_unseeded_split",
        "Module",
        "random_split without a generator; the ranks' training samples overlap as a result",
        data="Data",
    ),
    _faulty("ld006_set_order", "Module", "class numbers from the order of a set", data="Data"),
    _faulty("ld007_same_augmentation", "main", "workers are seeded alike in each epoch"),
    _faulty(
        "ld008_same_dropout",
        "Module",
        "seed_everything with one seed on all ranks: equal dropout masks",
        verdict="note",
    ),
    _faulty("ld008b_same_noise", "main", "manual_seed with one seed on all ranks: equal noise"),
    _faulty("ld009_ddp_bypassed", "main", "ddp.module.loss() does not average gradients"),
    _faulty("ld010_head_replaced", "main", "the head is replaced after the wrap; find_unused_parameters hides it"),
    _faulty("ld010b_unfrozen_after_wrap", "main", "unfrozen after the wrap, in the second epoch"),
    _faulty("ld011_clipped_on_one_rank", "main", "clip_grad_norm_ on rank 0 only"),
    _faulty("ld012_batch_norm", "Module", "batch norm with the statistics of one rank", data="Data", verdict=DEPENDS),
    _faulty("ld013_padded_tokens", "Module", "mean over unequal numbers of labels per rank", data="Data"),
    _faulty("ld013b_unequal_micro_batches", "main", "mean over unequal numbers of labels per micro-batch and rank"),
    _faulty("ld014_gradients_summed", "main", "gradients are summed by hand and not divided"),
    _faulty("ld014b_sum_reduction", "Module", "a loss with reduction='sum'"),
    _faulty("ld014c_divided_twice", "main", "the loss is divided by the number of ranks, and DDP divides again"),
    _faulty("ld015_gather_without_gradient", "Module", "embeddings are gathered without their gradient", data="Data"),
    _faulty("ld015b_local_negatives", "", "embeddings are not gathered", command=TORCHRUN, verdict=DEPENDS),
    _faulty("ld016_no_sync_inverted", "main", "no_sync covers the last micro-batches"),
    _faulty(
        "ld017_scheduler_steps_twice",
        "",
        "accelerate steps a scheduler once per process, although it was made for the prepared loader",
        command=TORCHRUN,
    ),
    _faulty(
        "ld017b_warmup_steps_twice",
        "",
        "accelerate steps a scheduler once per process; its length may count those of one",
        command=TORCHRUN,
        verdict="note",
    ),
    _faulty("ld018_clipped_before_unscaling", "", "clip_grad_norm_ without scaler.unscale_", command=TORCHRUN),
    _faulty("ld019_optimizer_lacks_encoder", "main", "the optimizer got the head's parameters only"),
    _faulty(
        "ld019b_only_frozen",
        "Module",
        "the optimizer holds only frozen parameters; the head's gradient is never cleared as a result",
    ),
    _faulty("ld020_no_zero_grad", "main", "zero_grad is missing"),
    _faulty("ld021_eval_left_on", "main", "evaluation mode is left on in the second epoch"),
    _faulty("ld021b_eval_on_rank_0", "main", "evaluation mode is left on, on rank 0 only"),
    _faulty("ld022_dropout_in_validation", "Module", "F.dropout without training=self.training", data="Data"),
    _faulty("ld023_validation_padded", "Module", "33 validation samples are counted as 34", data="Data"),
    _faulty(
        "ld024_lightning_mean",
        "Module",
        "PL#21859: the module is right, Lightning 2.6.6 logs 12.5/12 of the mean",
        data="Data",
    ),
    _faulty("ld024b_mean_of_means", "Module", "mean of the batches' means, with a smaller last batch on two ranks"),
    _faulty("ld025_ema_not_saved", "Module", "the EMA teacher is not in the checkpoint", data="Data"),
    _faulty("ld025b_scheduler_not_saved", "Module", "the scheduler is not in the checkpoint"),
    _faulty("ld025c_schedule_restarts", "main", "a program that resumes saves the epoch, and restarts the schedule"),
    _faulty("ld025d_resume_option", "", "an average is saved, and not restored by `--resume`", command=PYTHON),
    _faulty("ld026_nothing_loaded", "main", "load_state_dict(strict=False) matches no key"),
    _faulty("ld027_rank_0_validation", "main", "rank 0 alone broadcasts buffers in its validation", hangs=True),
    _faulty("ld028_uneven_shards", "main", "3 batches on rank 0, 2 on rank 1", hangs=True),
    _faulty("ld028b_uneven_sampler", "Module", "7 batches on rank 0, 6 on rank 1: no hang within 3 steps", data="Data"),
    _faulty(
        "ld029_unused_parameters",
        "Module",
        "the auxiliary head is not used: torch reports it at the second step",
        error="parameters that were not used in producing the loss",
    ),
    _faulty("ld030_predict_shuffled", "Module", "a padding and shuffling sampler for the predictions", data="Data"),
    _faulty("ld030b_predictions_of_one_rank", "Module", "rank 0 writes its own predictions only"),
    _faulty("ld031_graph_kept", "main", "total += loss keeps the graph of each step"),
    _faulty("ld032_ranks_write_one_file", "main", "all ranks write checkpoint.pt"),
    _faulty(
        "ld032b_group_not_destroyed",
        "",
        "destroy_process_group without parentheses",
        command=PYTHON,
        verdict="note",
    ),
)
HEALTHY = (
    _healthy(
        "lightning_digits",
        "Module",
        "stock Lightning module: dropout, schedule per epoch, logged validation values",
        data="Data",
    ),
    _healthy("gan_loop", "main", "GAN in a plain loop: two wrapped networks, critic.module in the generator's step"),
    _healthy("gan_script", "", "GAN with manual optimization in a Lightning script", command=TORCHRUN),
    _healthy(
        "bucket_batch_sampler",
        "",
        "a distributed batch sampler of its own in a Lightning script; batches of different widths",
        command=TORCHRUN,
    ),
    _healthy("sharded_stream", "main", "IterableDataset split over ranks and workers"),
    _healthy(
        "torchmetrics_module", "Module", "torchmetrics and an unpadded sampler for 25 validation samples", data="Data"
    ),
    _healthy("ema_in_checkpoint", "Module", "EMA as a part of the module"),
    _healthy("two_optimizers", "Module", "two optimizers with a schedule each, manual optimization", data="Data"),
    _healthy("tiny_gpt2", "Module", "GPT-2 of transformers with tied weights and dropout", data="Data"),
    _healthy("accumulation_no_sync", "main", "accumulation with no_sync"),
    _healthy("token_weighted_loss", "main", "labels counted over all ranks"),
    _healthy("contrastive_gather", "Module", "contrastive loss, gathered with gradient", data="Data"),
    _healthy("frozen_backbone", "Module", "frozen backbone in evaluation mode"),
    _healthy("torchrun_grad_scaler", "", "autocast, GradScaler, clipping after unscaling", command=TORCHRUN),
    _healthy("resume_option", "", "a job that resumes by an option restores all that it saves", command=PYTHON),
    _healthy("mixup", "Module", "mixup with a random weight per batch", data="Data"),
    _healthy("lstm_loop", "main", "LSTM with RMSprop and a schedule per step"),
    _healthy("predictions_gathered", "Module", "predictions gathered in order", data="Data"),
    _healthy("raw_augmentation", "main", "NumPy noise in workers"),
    _healthy("accelerate_loop", "", "accelerate with gather_for_metrics", command=TORCHRUN),
    _healthy("linear_probe", "main", "loaded backbone, optimizer of the head only"),
    _healthy("private_generators", "Module", "noise from generators of the module and the data set"),
    _healthy("report_after_prediction", "Module", "rank 0 writes a report after the prediction"),
    _healthy("spawned_regression", "", "mp.spawn; rank 0 validates without the wrapper", command=PYTHON),
)
CASES = FAULTY + HEALTHY
