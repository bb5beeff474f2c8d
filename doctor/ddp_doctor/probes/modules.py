"""Probes of the modules: modes, outputs, DistributedDataParallel, batch norm, state that is loaded."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.probes.generators import generators
from ddp_doctor.probes.micro_batches import MicroBatchProbe
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder, digest, is_called_near_user, is_sharded, sample_digests
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import tree_leaves

_MOST_OUTPUTS, _MOST_VALUES, _MOST_OF_A_SAMPLE = 400, 2_000_000, 65_536
# The steps after which the weights of networks that are not trained are digested, and their most values.
_MOST_HELD, _LARGE = 3, 5_000_000
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FORWARD = nn.modules.batchnorm._BatchNorm.forward


def normalize_over_ranks(norm: Any, x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Normalizes each channel of [samples of this rank, channels, ...] with the statistics of all ranks of a group."""
    if not (norm.training and distributed.is_initialized() and distributed.get_world_size(group) > 1):
        return _FORWARD(norm, x)
    group = group or distributed.group.WORLD
    axes, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    wide = x if x.dtype == torch.float64 else x.float()
    count = all_reduce(wide.new_tensor([x.numel() / x.shape[1]]), group=group).detach()
    mean = all_reduce(wide.sum(axes), group=group) / count
    centered = wide - mean.view(shape)
    variance = all_reduce(centered.square().sum(axes), group=group) / count
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
            norm.running_var.lerp_((variance * count / (count - 1)).to(norm.running_var.dtype), factor)
    normal = centered * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
    return normal.to(x.dtype)


def _frozen(module: nn.Module) -> dict[str, str]:
    """Returns a digest of the weights around each batch norm that is frozen with them, but updates its statistics."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, NORMS) and part.training and part.track_running_stats and part.momentum != 0:
            around = list(module.get_submodule(name.rpartition(".")[0]).parameters())
            if around and not any(parameter.requires_grad for parameter in around):
                found[name] = digest([around[0], around[-1]])
    return found


class ModuleProbe:
    """Observes calls of modules."""

    def __init__(self, recorder: Recorder, spec: Spec, steps: StepProbe, micro: MicroBatchProbe | None) -> None:
        self.recorder, self.spec, self.steps, self.micro = recorder, spec, steps, micro
        self.names: dict[int, str] = {}
        self._outputs = 0
        self._depth = 0
        # One process has the samples of all ranks.
        self._most_values = _MOST_VALUES * int(spec.interventions.get("ranks", 1))
        self._roots: list[nn.Module] = []
        self._changed: list[nn.Module] = []

    def install(self) -> None:
        """Installs the probes."""
        wrap(DistributedDataParallel, "__init__", self._on_ddp)
        before(DistributedDataParallel, "forward", self._on_ddp_forward)
        wrap(nn.Module, "__call__", self._on_call)
        if self.spec.interventions.get("sync_batch_norm"):
            wrap(nn.modules.batchnorm._BatchNorm, "forward", lambda _, norm, x: normalize_over_ranks(norm, x))
        before(nn.Module, "eval", lambda module: self.recorder.add("eval", module=type(module).__name__))
        before(nn.Module, "train", self._on_train)
        before(nn.Module, "load_state_dict", self._on_load)
        if self.spec.purpose == "numbers":
            nn.modules.module.register_module_forward_hook(self._keep_output)

    def name(self, root: nn.Module) -> None:
        """Gives a module, its parts and its parameters their names."""
        if root not in self._roots:
            self._roots.append(root)
            self.steps.name_parameters(root)
            for name, part in root.named_modules():
                self.names.setdefault(id(part), name)
                if isinstance(origin := getattr(part, "name_or_path", ""), str) and origin:
                    # A pretrained model of transformers, which loads its weights by itself.
                    self.steps.loaded |= {id(parameter): parameter for parameter in part.parameters()}

    def _on_train(self, module: nn.Module, mode: bool = True) -> None:
        if mode and is_called_near_user(1):
            self.recorder.add("train", module=type(module).__name__)

    def _on_ddp(self, original: Callable[..., Any], wrapped: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.spec.double:
            module.double()
        if self.spec.interventions.get("find_unused"):
            kwargs["find_unused_parameters"] = True
        self.name(module)
        self.steps.gradients.watch(module.parameters())
        self.recorder.active = True
        # Parameters and buffers that DistributedDataParallel is told to ignore, such as experts.
        self.recorder.add("ddp", ignored=sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ())))
        return original(wrapped, module, *args, **kwargs)

    def _widen(self, module: nn.Module) -> None:
        """Converts a module that was not created in 64 bits, as one whose weights were loaded, at its first call."""
        if not self.spec.double or module in self._roots:
            return
        tensors = list(module.parameters())
        if any(tensor.dtype is torch.float32 for tensor in tensors) and not any(map(is_sharded, tensors)):
            module.double()

    def _on_ddp_forward(self, wrapped: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.add(
            "ddp_forward",
            gradients=torch.is_grad_enabled(),
            # Not within no_sync, nor of buffers that the wrapper ignores.
            buffers=bool(wrapped.will_sync_module_buffers()),
            synchronizes=bool(wrapped.require_backward_grad_sync),
        )

    def _on_call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._depth or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        self._depth += 1
        try:
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            self._widen(inner)
            self.name(inner)
            self.steps.name_parameters(inner)
            event = self.recorder.add(
                "forward",
                module=type(inner).__name__,
                gradients=torch.is_grad_enabled(),
                modes={name: part.training for name, part in inner.named_modules() if not list(part.children())},
                random=[name for name, part in inner.named_modules() if _is_random(part)],
                sensitive=[name for name, part in inner.named_modules() if _has_modes(part)],
                frozen_norms=_frozen(inner),
                held=self._held(inner),
                buffers=self._buffers(inner),
                **self._begin(args, kwargs),
            )
            if self.micro:
                args, kwargs = self.micro.model_inputs(type(inner).__name__, args, kwargs)
                self.micro.inside_model = True
            if self.spec.interventions.get("still"):
                self._hold(inner)
                event["weights"] = [] if torch.is_grad_enabled() else list(map(digest, inner.state_dict().values()))
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            if self.micro:
                self.micro.inside_model = False

    def _hold(self, module: nn.Module) -> None:
        """Keeps the statistics of batch norm, and adds the same numbers to the weights of all ranks, if so wanted."""
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.momentum = 0.0
        number = self.spec.interventions.get("other_weights")
        if number is None or module in self._changed:
            return
        self._changed.append(module)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                size = parameter.std() if parameter.numel() > 1 else 0.0
                parameter.add_((noise * max(float(size), 0.1)).to(parameter))

    def _held(self, module: nn.Module) -> str:
        """Returns a digest of the weights of a network that no optimizer has, in the first steps after one."""
        parameters, trained = list(module.parameters()), set(map(id, self.steps.parameters().values()))
        is_held = self._is_early() and not trained.intersection(map(id, parameters))
        return digest(parameters) if is_held and _are_small(parameters) else ""

    def _buffers(self, module: nn.Module) -> dict[str, str]:
        """Returns digests of the buffers as the last step left them, apart from those of batch norm, in early steps.

        This is before DistributedDataParallel broadcasts those of rank 0.
        """
        if not (self._is_early() and torch.is_grad_enabled()):
            return {}
        kinds = (*NORMS, nn.SyncBatchNorm)
        norms = [name for name, part in module.named_modules() if isinstance(part, kinds)]
        found = {name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[0] not in norms}
        return {name: digest(buffer) for name, buffer in found.items()} if _are_small(found.values()) else {}

    def _begin(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Returns digests of the inputs, of their samples and of the generators, as a resumed run is to have them."""
        changed = self.spec.interventions and not self.spec.continues
        if self.spec.purpose != "train" or self.spec.world_size < 2 or changed or not torch.is_grad_enabled():
            return {}
        leaves = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        small = leaves if _are_small(leaves) else []
        return {"inputs": list(map(digest, small)), "rows": sample_digests(small), "generators": generators()}

    def _is_early(self) -> bool:
        return self.spec.purpose == "train" and self.spec.world_size > 1 and 0 < self.recorder.step <= _MOST_HELD

    def _keep_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name, number = self.names.get(id(module)), self._outputs
        leaf = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        wanted = torch.is_grad_enabled() and self.recorder.step == 0 and number < _MOST_OUTPUTS
        if not wanted or leaf is None or name is None or isinstance(module, DistributedDataParallel):
            return
        leaf = _thinned(leaf)
        if leaf.is_floating_point() and leaf.numel() <= self._most_values:
            self._outputs += 1
            self.recorder.keep(f"out/{number}", leaf)
            self.recorder.add("output", number=number, name=name, module=type(module).__name__)

    def _on_load(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, *_: Any, **__: Any
    ) -> None:
        wanted, given = set(module.state_dict()), set(state_dict)
        self.recorder.add(
            "load_state_dict",
            module=type(module).__name__,
            strict=bool(strict),
            matched=len(wanted & given),
            missing=sorted(wanted - given)[:20],
            unexpected=sorted(given - wanted)[:20],
        )
        self.steps.loaded |= {id(value): value for name, value in module.named_parameters() if name in given}


def _thinned(output: torch.Tensor) -> torch.Tensor:
    """Returns an output with every n-th value of its last axis, so that a sample has not too many."""
    step = output[0].numel() // _MOST_OF_A_SAMPLE if output.ndim > 2 and len(output) else 0
    return output[..., :: step + 1] if step else output


def _are_small(tensors: Collection[torch.Tensor]) -> bool:
    """Returns whether tensors are worth a digest."""
    return sum(tensor.numel() for tensor in tensors) <= _LARGE and not any(map(is_sharded, tensors))


def _has_modes(part: nn.Module) -> bool:
    """Returns whether a module has other outputs in evaluation mode."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    return isinstance(part, NORMS) and part.track_running_stats


def _is_random(part: nn.Module) -> bool:
    if isinstance(part, nn.RReLU):
        return part.training
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0
