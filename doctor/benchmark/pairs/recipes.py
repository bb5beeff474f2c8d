"""What the fixture is called with, for each pair of pairs.yaml that is tried by a call: at most 15 lines of our own.

A recipe has the pair's name, runs in the folder in which the files of one commit lie, and returns the arguments of
`assert_same_on_ranks`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed.nn
from torch import nn

Arguments = dict[str, Any]
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
DISTRIBUTED = "classy_vision.generic.distributed_util"


class Stub(ModuleType):
    """A module of which each class is an empty nn.Module, and each function a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (nn.Module,), {"__class_getitem__": lambda _: object, "register": _decorator})
        return _decorator


class Finder(MetaPathFinder, Loader):
    """Makes stubs of the modules that begin with given names."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        wanted = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _decorator(*values: Any, **_: Any) -> Any:
    return values[0] if len(values) == 1 and callable(values[0]) else _decorator


def load(path: str, *stubs: str, **modules: Any) -> Any:
    """Imports a file of the project; of what it imports, `stubs` are empty, and `modules` replace those of a name."""
    root, _, name = path.removesuffix(".py").rpartition("src/")
    sys.path.insert(0, f"{root}src" if root or path.startswith("src/") else ".")
    sys.meta_path.insert(0, Finder(stubs))
    sys.modules.update(modules)
    return import_module(name.replace("/", "."))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))


def views(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the embeddings of two views of samples."""
    return model(x), model(x.flip(1) * 0.9)


def lightly_barlow_twins() -> Arguments:
    loss = load("lightly/loss/barlow_twins_loss.py").BarlowTwinsLoss(gather_distributed=True)
    return {"function": lambda model, x: loss(*views(model, x)), "model": net, "batch": X, "reference": False}


def lightly_nt_xent() -> Arguments:
    loss = load("lightly/loss/ntx_ent_loss.py", "lightly.models.utils").NTXentLoss(gather_distributed=True)
    return {"function": lambda model, x: loss(*views(model, x)), "model": net, "batch": X}


def vissl_simclr() -> Arguments:
    import torch.distributed as dist

    def gather_from_all(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    util = SimpleNamespace(get_cuda_device_index=lambda: -1, get_rank=lambda: dist.get_rank())
    util.gather_from_all, util.is_distributed_training_run = gather_from_all, lambda: True
    util.convert_to_distributed_tensor, util.convert_to_normal_tensor = lambda x: (x, "cpu"), lambda x, _: x
    file = load(
        "vissl/losses/simclr_info_nce_loss.py", "classy_vision", "vissl.utils.hydra_config", **{DISTRIBUTED: util}
    )

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z, ranks = nn.functional.normalize(torch.cat(views(model, x)), dim=1), dist.get_world_size()
        sizes = SimpleNamespace(effective_batch_size=len(z) * ranks, world_size=ranks, embedding_dim=5)
        return file.SimclrInfoNCECriterion(sizes, 0.5)(z)

    return {"function": loss, "model": net, "batch": X}


def metric_learning_wrapper() -> Arguments:
    utils = load("src/pytorch_metric_learning/utils/distributed.py", "sklearn", "scipy")
    losses = load("src/pytorch_metric_learning/losses/__init__.py", "sklearn", "scipy")
    loss = utils.DistributedLossWrapper(losses.MultiSimilarityLoss())
    return {"function": lambda model, batch: loss(model(batch[0]), batch[1]), "model": net, "batch": (X, Y)}


def pylate_world_size() -> Arguments:
    ColBERT = SimpleNamespace(skiplist_mask=lambda input_ids, skiplist: torch.ones_like(input_ids, dtype=torch.bool))
    utils = load("pylate/utils/distributed.py", "pylate.models", "pylate.scores")
    replaced = {"pylate.models": SimpleNamespace(ColBERT=ColBERT), "pylate.utils": utils}
    file = load("pylate/losses/contrastive.py", **replaced)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def encode(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"token_embeddings": model(part["x"])}

        encode.skiplist, encode.do_query_expansion = [], True
        ones = {"input_ids": torch.ones(len(x), 1), "attention_mask": torch.ones(len(x), 1)}
        texts = [ones | {"x": part[:, None]} for part in (x, x.flip(1))]
        return file.Contrastive(encode, score_metric=lambda q, d, **_: q[:, 0] @ d[:, 0].T)(texts)

    return {"function": loss, "model": net, "batch": X, "reference": False}


def allennlp_rouge() -> Arguments:
    import torch.distributed as dist

    util = Stub("allennlp.common.util")
    util.is_distributed = lambda: dist.is_initialized() and dist.get_world_size() > 1
    metric = type("Metric", (), {"register": lambda _: lambda kind: kind, "detach_tensors": lambda _, *all: all})
    replaced = {"allennlp.common.util": util, "allennlp.training.metrics.metric": SimpleNamespace(Metric=metric)}
    stubs = ["overrides", "allennlp.common", "allennlp.data", "allennlp.models", "allennlp.nn"]
    file = load("allennlp/training/metrics/rouge.py", *stubs, **replaced)

    def score(batch: Sequence[torch.Tensor]) -> float:
        rouge = file.ROUGE(exclude_indices={0})
        rouge(*batch)
        return rouge.get_metric()["ROUGE-1_F1"]

    words = torch.randint(1, 6, (8, 12), generator=torch.Generator().manual_seed(0))
    return {"function": score, "batch": (words, words.roll(1, 1) % 5 + 1)}


def sparseml_loss_scale() -> Arguments:
    file = load("src/sparseml/pytorch/utils/module.py", "sparseml.pytorch.utils.logger", "sparseml.pytorch.utils.loss",
                "sparseml.pytorch.utils.helpers")  # fmt: skip
    import torch.distributed as dist

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        trainer = object.__new__(file.ModuleTrainer)
        keys = {"_module": model, "_optimizer": optimizer, "_device": "cpu", "_accumulated": 0, "_scaler": None}
        keys |= {"_num_accumulated_batches": 1, "_optim_closure": None, "_run_hooks": file.ModuleRunHooks()}
        keys |= {"_device_context": file.ModuleDeviceContext(False, dist.get_world_size())}
        functions = SimpleNamespace(to_device=lambda data, _: data, model_forward=lambda data, module: module(data[0]))
        functions.model_backward = lambda losses, *_, **__: losses[file.DEFAULT_LOSS_KEY].backward()
        loss = lambda data, out: {file.DEFAULT_LOSS_KEY: nn.functional.cross_entropy(out, data[1])}  # noqa: E731
        trainer.__dict__ |= keys | {"_run_funcs": functions, "_loss": loss}
        return trainer._runner_batch(0, 0, len(batch[0]), batch, False, 0)[file.DEFAULT_LOSS_KEY]

    return {"function": step, "model": net, "batch": (X, Y), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}


def sentence_transformers_world_size() -> Arguments:
    base = "sentence_transformers"
    sys.modules[f"{base}.util"] = Stub(f"{base}.util")
    sys.modules[f"{base}.util"].__path__ = ["sentence_transformers/util"]
    utils = load(f"{base}/util/distributed.py")
    util = {f"{base}.util": utils, f"{base}.base.losses.merged_forward": SimpleNamespace(embed_columns_padded=columns)}
    utils.stack_padded_token_embeddings = lambda embeddings, masks: (torch.stack(embeddings, 1), torch.stack(masks, 1))
    file = load(f"{base}/multi_vector_encoder/losses/multiple_negatives_ranking.py", f"{base}.multi_vector_encoder.model",
                f"{base}.multi_vector_encoder.scoring", **util)  # fmt: skip

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def encode(part: dict[str, torch.Tensor], task: str = "") -> dict[str, torch.Tensor]:
            return {"token_embeddings": model(part["x"][:, None]), "attention_mask": torch.ones(len(x), 1)}

        scores = lambda q, d, **_: torch.einsum("qtd,bntd->qbn", q, d).flatten(1)  # noqa: E731
        arguments = {"score_metric": scores, "gather_across_devices": True}
        return file.MultiVectorMultipleNegativesRankingLoss(encode, **arguments)([{"x": x}, {"x": x.flip(1)}])

    return {"function": loss, "model": net, "batch": X}


def columns(model: Any, parts: Sequence[Any], *_: Any, **__: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the embeddings and masks of the documents, as the function of the project's other file does."""
    outputs = [model(part) for part in parts]
    return [one["token_embeddings"] for one in outputs], [one["attention_mask"].bool() for one in outputs]


def sentence_transformers_gist() -> Arguments:
    base = "sentence_transformers"
    sys.modules[f"{base}.util"] = Stub(f"{base}.util")
    sys.modules[f"{base}.util"].__path__ = ["sentence_transformers/util"]
    util = load(f"{base}/util/distributed.py")
    stubs = [f"{base}.sentence_transformer.model", f"{base}.sentence_transformer.modules"]
    file = load(f"{base}/sentence_transformer/losses/gist_embed.py", *stubs, **{f"{base}.util": util})

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one = file.GISTEmbedLoss.__new__(file.GISTEmbedLoss)
        nn.Module.__init__(one)
        keys = {"must_retokenize": False, "temperature": 0.5, "margin_strategy": "absolute", "margin": 0.0}
        keys |= {"contrast_anchors": False, "contrast_positives": True, "gather_across_devices": True}
        keys |= {"model": lambda part: {"sentence_embedding": model(part)}, "cross_entropy_loss": nn.CrossEntropyLoss()}
        keys |= {"guide": lambda part: {"sentence_embedding": part}, "similarity_fct": nn.CosineSimilarity(dim=-1)}
        one.__dict__ |= keys
        return one([x, x.roll(1, 1)], None)

    return {"function": loss, "model": net, "batch": X}


def verl_speco_drafter() -> Arguments:
    import asyncio
    from contextlib import nullcontext

    import torch.distributed as dist

    device = SimpleNamespace(get_device_name=lambda: "cpu", get_torch_device=lambda: None)
    stubs = ["omegaconf", "verl", "verl_speco.trainer.data_buffer", "verl_speco.trainer.feature_store"]
    file = load("verl_speco/trainer/base_trainer.py", *stubs, **{"verl.utils.device": device})

    def losses(model: nn.Module, batch: dict[str, torch.Tensor], _: int) -> dict[str, torch.Tensor | float]:
        total, tokens = model(batch["x"]).square().sum() * 1e-3, torch.tensor(float(len(batch["x"])))
        keys = {"local_num_tokens": tokens, "v_weight": 0.0, "p_weight": 1.0}
        return {"total_local_vloss": total * 0, "total_local_ploss": total, **keys}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        one = object.__new__(file.DrafterBaseTrainer)
        keys = {"model": model, "optimizer": optimizer, "_ulysses_group_context": nullcontext, "_current_pad_size": 0}
        keys |= {"backend": SimpleNamespace(compute_loss=losses), "training_steps": 0, "optimizer_steps_total": 0}
        keys |= {"_record_dflash_training_metrics": id, "record_training_timing": lambda *_: None, "lr_scheduler": None}
        keys |= {"_get_sp_group": lambda: None, "_get_dp_group": lambda: dist.group.WORLD, "training_device_mesh": None}
        one.__dict__ |= keys | {"_get_dp_world_size": lambda: dist.get_world_size()}
        asyncio.run(one._training_step_on_batch({"x": x}, 0))

    return {"function": step, "model": net, "batch": X, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}


def torchtitan_validate() -> Arguments:
    import torch.distributed as dist

    names = "components.dataloader components.loss components.metrics components.tokenizer config hf_datasets"
    stubs = [f"torchtitan.{one}" for one in f"{names} protocols tools distributed.context_parallel".split()]
    utils = load("torchtitan/distributed/utils.py", *stubs, "torchtitan.distributed.parallel_dims")
    package = SimpleNamespace(ParallelDims=None, utils=utils, __path__=[])
    loss_file, tools = SimpleNamespace(IGNORE_INDEX=-100, LossFunction=None), SimpleNamespace(device_type="cpu")
    replaced = {"torchtitan.distributed": package, "torchtitan.components.loss": loss_file}
    file = load("torchtitan/components/validate.py", **replaced, **{"torchtitan.tools.utils": tools})

    def score(model: nn.Module, batch: Sequence[torch.Tensor]) -> float: ...

    return {}
