"""What the fixture is called with, for each pair of pairs.yaml that is tried by a call: at most 15 lines of our own.

A recipe has the pair's name, runs in the folder in which the files of one commit lie, and returns the arguments of
`assert_same_on_ranks`.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

Arguments = dict[str, Any]
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


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


def load(path: str, stubs: str = "", **modules: Any) -> Any:
    """Imports a file of the project; of what it imports, `stubs` are empty, and `modules` replace those of a name."""
    root, _, name = path.removesuffix(".py").rpartition("src/")
    sys.path.insert(0, f"{root}src" if path.startswith("src/") else ".")
    sys.meta_path.insert(0, Finder(stubs.split()))
    sys.modules.update(modules)
    return import_module(name.replace("/", "."))


def stub(name: str, folder: str = "", **values: Any) -> Stub:
    """Makes a stub module, with values; other modules of its package are those of a folder."""
    made = sys.modules[name] = Stub(name)
    made.__dict__.update(values, __path__=[folder])
    return made


def bare(kind: type, **values: Any) -> Any:
    """Returns an object of a class without its initialization, with the attributes that are needed."""
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    made.__dict__.update(values)
    return made


def net() -> nn.Module:
    """Returns an encoder."""
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))


def sgd(weights: Any) -> SGD:
    """Returns the optimizer of the steps."""
    return SGD(weights, lr=0.1)


def views(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the embeddings of two views of samples."""
    return model(x), model(x.flip(1) * 0.9)


def lightly_barlow_twins() -> Arguments:
    loss = load("lightly/loss/barlow_twins_loss.py").BarlowTwinsLoss(gather_distributed=True)
    return {"function": lambda model, x: loss(*views(model, x)), "model": net, "batch": X, "reference": False}


def lightly_nt_xent() -> Arguments:
    loss = load("lightly/loss/ntx_ent_loss.py", "lightly.models.utils").NTXentLoss(gather_distributed=True)
    return {"function": lambda model, x: loss(*views(model, x)), "model": net, "batch": X}


def vissl_simclr() -> Arguments:
    def gather_from_all(x: Tensor) -> Tensor:
        if dist.get_world_size() == 1:
            return x
        dist.all_gather(parts := [torch.zeros_like(x) for _ in range(dist.get_world_size())], x)
        return torch.cat(parts)

    util = SimpleNamespace(get_cuda_device_index=lambda: -1, get_rank=dist.get_rank)
    util.gather_from_all, util.is_distributed_training_run = gather_from_all, lambda: True
    util.convert_to_distributed_tensor, util.convert_to_normal_tensor = lambda x: (x, "cpu"), lambda x, _: x
    replaced = {"classy_vision.generic.distributed_util": util}
    file = load("vissl/losses/simclr_info_nce_loss.py", "classy_vision vissl.utils.hydra_config", **replaced)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z, ranks = F.normalize(torch.cat(views(model, x)), dim=1), dist.get_world_size()
        sizes = SimpleNamespace(effective_batch_size=len(z) * ranks, world_size=ranks, embedding_dim=5)
        return file.SimclrInfoNCECriterion(sizes, 0.5)(z)

    return {"function": loss, "model": net, "batch": X}


def metric_learning_wrapper() -> Arguments:
    utils = load("src/pytorch_metric_learning/utils/distributed.py", "sklearn scipy")
    losses = load("src/pytorch_metric_learning/losses/__init__.py", "sklearn scipy")
    loss = utils.DistributedLossWrapper(losses.MultiSimilarityLoss())
    return {"function": lambda model, batch: loss(model(batch[0]), batch[1]), "model": net, "batch": (X, Y)}


def pylate_world_size() -> Arguments:
    model = SimpleNamespace(skiplist_mask=lambda input_ids, skiplist: torch.ones_like(input_ids, dtype=torch.bool))
    utils = load("pylate/utils/distributed.py", "pylate.models pylate.scores")
    replaced = {"pylate.models": SimpleNamespace(ColBERT=model), "pylate.utils": utils}
    file = load("pylate/losses/contrastive.py", **replaced)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        def encode(part: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"token_embeddings": model(part["x"])}

        encode.skiplist, encode.do_query_expansion = [], True  # type: ignore[attr-defined]
        tokens = dict.fromkeys(("input_ids", "attention_mask"), X[:, :1])
        texts = [tokens | {"x": part[:, None]} for part in (x, x.flip(1))]
        return file.Contrastive(encode, score_metric=lambda q, d, **_: q[:, 0] @ d[:, 0].T)(texts)

    return {"function": loss, "model": net, "batch": X, "reference": False}


def allennlp_rouge() -> Arguments:
    stub("allennlp.common.util", is_distributed=lambda: dist.is_initialized() and dist.get_world_size() > 1)
    metric = type("Metric", (), {"register": lambda _: lambda kind: kind, "detach_tensors": lambda _, *all: all})
    replaced = {"allennlp.training.metrics.metric": SimpleNamespace(Metric=metric)}
    stubs = "overrides allennlp.common allennlp.data allennlp.models allennlp.nn"
    file = load("allennlp/training/metrics/rouge.py", stubs, **replaced)

    def score(batch: Sequence[Tensor]) -> float:
        (rouge := file.ROUGE(exclude_indices={0}))(*batch)
        return rouge.get_metric()["ROUGE-1_F1"]

    words = torch.randint(1, 6, (8, 12), generator=torch.Generator().manual_seed(0))
    return {"function": score, "batch": (words, words.roll(1, 1) % 5 + 1)}


def sparseml_loss_scale() -> Arguments:
    stubs = "sparseml.pytorch.utils.logger sparseml.pytorch.utils.loss sparseml.pytorch.utils.helpers"
    file = load("src/sparseml/pytorch/utils/module.py", stubs)
    key, keys = file.DEFAULT_LOSS_KEY, dict.fromkeys(("_scaler", "_optim_closure"))
    keys |= {"_device": "cpu", "_accumulated": 0, "_num_accumulated_batches": 1}
    calls = SimpleNamespace(to_device=lambda data, _: data, model_forward=lambda data, model: model(data[0]))
    calls.model_backward = lambda losses, *_, **__: losses[key].backward()
    keys |= {"_run_funcs": calls, "_loss": lambda data, out: {key: F.cross_entropy(out, data[1])}}

    def step(model: nn.Module, optimizer: SGD, batch: Sequence[Tensor]) -> Tensor:
        context = file.ModuleDeviceContext(False, dist.get_world_size())
        values = keys | {"_module": model, "_optimizer": optimizer, "_device_context": context}
        trainer = bare(file.ModuleTrainer, _run_hooks=file.ModuleRunHooks(), **values)
        return trainer._runner_batch(0, 0, len(batch[0]), batch, False, 0)[key]

    return {"function": step, "model": net, "batch": (X, Y), "optimizer": sgd}


def sentence_transformers_world_size() -> Arguments:
    base, util = "sentence_transformers", sentence_transformers_util()
    util.stack_padded_token_embeddings = lambda embeddings, masks: (torch.stack(embeddings, 1), torch.stack(masks, 1))

    def columns(model: Any, parts: Any, *_: Any, **__: Any) -> tuple[list[Tensor], list[Tensor]]:
        return [(out := model(parts[0]))["token_embeddings"]], [out["attention_mask"].bool()]

    merged = {f"{base}.base.losses.merged_forward": SimpleNamespace(embed_columns_padded=columns)}
    stubs = f"{base}.multi_vector_encoder.model {base}.multi_vector_encoder.scoring"
    kind = load(f"{base}/multi_vector_encoder/losses/multiple_negatives_ranking.py", stubs, **merged)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        encode = lambda z, **_: {"token_embeddings": model(z["x"][:, None]), "attention_mask": z["x"][:, :1]}  # noqa: E731
        options = {"score_metric": lambda q, d, **_: torch.einsum("qtd,bntd->qbn", q, d).flatten(1)}
        made = kind.MultiVectorMultipleNegativesRankingLoss(encode, gather_across_devices=True, **options)
        return made([{"x": x}, {"x": x.flip(1)}])

    return {"function": loss, "model": net, "batch": X}


def sentence_transformers_util() -> Stub:
    """Returns the package's `util` with what its file about ranks has."""
    util = stub("sentence_transformers.util", "sentence_transformers/util")
    values = vars(load("sentence_transformers/util/distributed.py")).items()
    util.__dict__.update({name: value for name, value in values if not name.startswith("__")})
    return util


def sentence_transformers_gist() -> Arguments:
    base = "sentence_transformers/sentence_transformer"
    stubs = "sentence_transformers.sentence_transformer.model sentence_transformers.sentence_transformer.modules"
    sentence_transformers_util()
    file = load(f"{base}/losses/gist_embed.py", stubs)
    options = {"must_retokenize": False, "temperature": 0.5, "margin_strategy": "absolute", "margin": 0.0}
    options |= {"contrast_anchors": False, "contrast_positives": True, "gather_across_devices": True}
    options |= {"similarity_fct": nn.CosineSimilarity(dim=-1), "cross_entropy_loss": nn.CrossEntropyLoss()}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        encoders = {"model": lambda z: {"sentence_embedding": model(z)}, "guide": lambda z: {"sentence_embedding": z}}
        return bare(file.GISTEmbedLoss, **options, **encoders)([x, x.roll(1, 1)], None)

    return {"function": loss, "model": net, "batch": X}


def verl_speco_drafter() -> Arguments:
    stub("verl.utils.device", get_device_name=lambda: "cpu")
    stubs = "omegaconf verl verl_speco.trainer.data_buffer verl_speco.trainer.feature_store"
    kind = load("verl_speco/trainer/base_trainer.py", stubs).DrafterBaseTrainer

    def losses(model: nn.Module, batch: dict[str, Tensor], _: int) -> dict[str, Any]:
        total, tokens = model(batch["x"]).square().sum() * 1e-3, torch.tensor(float(len(batch["x"])))
        sums = {"total_local_vloss": total * 0, "total_local_ploss": total, "local_num_tokens": tokens}
        return sums | {"v_weight": 0.0, "p_weight": 1.0}

    def step(model: nn.Module, optimizer: SGD, x: Tensor) -> None:
        values = {"model": model, "optimizer": optimizer, "backend": SimpleNamespace(compute_loss=losses)}
        ignored = "_record_dflash_training_metrics record_training_timing _get_sp_group"
        values |= dict.fromkeys(ignored.split(), lambda *_: None)
        values |= dict.fromkeys(("_current_pad_size", "training_steps", "optimizer_steps_total"), 0)
        values |= {"_get_dp_group": lambda: dist.group.WORLD, "_get_dp_world_size": dist.get_world_size}
        one = bare(kind, _ulysses_group_context=nullcontext, lr_scheduler=None, training_device_mesh=None, **values)
        asyncio.run(one._training_step_on_batch({"x": x}, 0))

    return {"function": step, "model": net, "batch": X, "optimizer": sgd}


def stable_pretraining_clip() -> Arguments:
    utils = {"stable_pretraining.utils": load("stable_pretraining/utils/distributed.py")}
    loss = load("stable_pretraining/losses/multimodal.py", "loguru", **utils).CLIPLoss(temperature=0.5)
    return {"function": lambda model, x: loss(*views(model, x)), "model": net, "batch": X}


def torchtitan_validate() -> Arguments:
    names = "components.dataloader components.metrics components.tokenizer config hf_datasets protocols tools"
    stubs = " ".join(f"torchtitan.{one}" for one in f"{names} distributed.context_parallel".split())
    stub("torchtitan.tools.utils", device_type="cpu", device_module=None)
    utils = load("torchtitan/distributed/utils.py", f"{stubs} torchtitan.distributed.parallel_dims")
    stub("torchtitan.distributed", "torchtitan/distributed", utils=utils)
    stub("torchtitan.components.loss", IGNORE_INDEX=-100, LossFunction=None)
    file, mesh = load("torchtitan/components/validate.py"), {"get_mesh": lambda _: dist.group.WORLD}
    file.utils = sys.modules["torchtitan.tools.utils"]
    dims = mesh | {"get_optional_mesh": mesh["get_mesh"], "dp_enabled": True, "dp_cp_enabled": True}
    keys = {"job_config": SimpleNamespace(validation=SimpleNamespace(steps=-1)), "validation_context": nullcontext}
    keys |= {"parallel_dims": SimpleNamespace(cp_enabled=False, pp_enabled=False, **dims)}
    keys |= {"maybe_enable_amp": nullcontext()}
    keys |= {"loss_fn": lambda out, y: F.cross_entropy(out, y, reduction="sum")}
    keys |= {"post_dataloading_process": lambda inputs, labels, _: (inputs["input"], labels, {}, {})}

    def score(model: nn.Module, batch: Sequence[Tensor]) -> float:
        values: list[float] = []
        log = SimpleNamespace(ntokens_since_last_log=0, log_validation=lambda loss, step: values.append(loss))
        loader = [({"input": batch[0]}, batch[1])]
        bare(file.Validator, metrics_processor=log, validation_dataloader=loader, **keys).validate([model], 1)
        return values[0]

    return {"function": score, "model": net, "batch": (X, Y)}


def torchmetrics_pearson() -> Arguments:
    file = load("torchmetrics/regression/pearson.py", "pkg_resources")

    def score(batch: Sequence[Tensor]) -> Any:
        (metric := file.PearsonCorrCoef()).update(*batch)
        return metric

    return {"function": score, "batch": (X[:, 0] + 3 * Y, X[:, 1] + Y)}


def ignite_accuracy() -> Arguments:
    file = load("ignite/metrics/accuracy.py")

    def score(batch: Sequence[Tensor]) -> float:
        (metric := file.Accuracy()).update([one[:2] for one in batch])
        metric.compute()
        metric.update([one[2:] for one in batch])
        return metric.compute()

    return {"function": score, "batch": (torch.eye(3)[(Y + (torch.arange(8) > 4)) % 3], Y)}


def ignite_gmrae() -> Arguments:
    file = load("ignite/contrib/metrics/regression/geometric_mean_relative_absolute_error.py")

    def score(batch: Sequence[Tensor]) -> float:
        (metric := file.GeometricMeanRelativeAbsoluteError()).update(batch)
        return metric.compute()

    return {"function": score, "batch": (X[:, 0], X[:, 1])}


def vector_quantize_in_place() -> Arguments:
    # The code casts to 32 bits; the fixture's weights have 64.
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    file = load("vector_quantize_pytorch/vector_quantize_pytorch.py")
    options = {"ema_update": False, "learnable_codebook": True, "sync_codebook": True, "dim": 6, "codebook_size": 4}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.codes = file.VectorQuantize(in_place_codebook_optimizer=sgd, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.codes(self.first(x)[:, None])[0].square().mean()

    def step(model: nn.Module, optimizer: SGD, x: Tensor) -> Tensor:
        (loss := model(x)).backward()
        optimizer.step()
        return loss.detach()

    return {"function": step, "model": Model, "batch": X, "optimizer": sgd}
