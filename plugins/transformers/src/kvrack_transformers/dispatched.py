"""Models that accelerate spread over devices, or offloaded: where their layers run, and where their weights are.

A weight that accelerate holds on the CPU or on disk is on the meta device between forwards, and
`model.device` is that of the first weight. What runs where, and what the weights are, its hooks know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvrack_transformers.reading import model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Path = tuple[tuple[str, nn.Module], ...]
"""A module with its name in its parent, and then its parents, the outermost last."""


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that the model's tokens go to."""
    embeddings = model.get_input_embeddings()
    found = next((_device_of(path) for path in _paths(model) if path[0][1] is embeddings), None)
    return model.device if found is None else found


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Return for each layer of a cache the device that its keys are made on, which is where it lives.

    One device a layer, for `kvrack.load` and `PrefixStore`; that of the model's inputs for a layer the
    model doesn't tell. Cross-attention layers come after a decoder's own, as in the cache.
    """
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    spec = model_spec(model)
    found: dict[int, torch.device] = {}
    for path in _paths(model):
        # transformers' attention modules say by this name which layer of the cache is theirs.
        index = getattr(path[0][1], "layer_idx", None)
        if isinstance(index, int) and index not in found and any(module is decoder for _, module in path):
            device = _device_of(path)
            if device is not None:
                found[index] = device
    default = input_device(model)
    return [found.get(index, default) for layers in (spec.layers, spec.cross_layers) for index in range(len(layers))]


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight under each of its names, from where it is held while the model doesn't run.

    Of a weight that is split over ranks this rank's part. A weight on the meta device that no hook has
    the data of stays what it is.
    """
    for path in _paths(model):
        for name, weight in path[0][1].named_parameters(recurse=False, remove_duplicate=False):
            full_name = ".".join([*(each for each, _ in reversed(path) if each), name])
            local: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
            yield full_name, _offloaded(path, name, local) if local.is_meta else local


def _paths(module: nn.Module, name: str = "", parents: Path = ()) -> Iterator[Path]:
    path: Path = ((name, module), *parents)
    yield path
    for child_name, child in module.named_children():
        yield from _paths(child, child_name, path)


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks on a module, outer ones first."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _device_of(path: Path) -> torch.device | None:
    """Return where a hook has a module run, its own, its parts' or its parents', else where its weights are; None
    if it has none."""
    inner = path[0][1]
    for module in (*inner.modules(), *(parent for _, parent in path[1:])):
        for hook in _hooks(module):
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device)
    return next((weight.device for weight in inner.parameters()), None)


def _offloaded(path: Path, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the data of a weight on the meta device from the hook that has it, else `weight`.

    A hook may have the weights of its module's own and of those inside, by their name from there.
    """
    for inner, module in path:
        for hook in _hooks(module):
            held = getattr(hook, "weights_map", None)
            if held is not None:
                try:
                    found: torch.Tensor = held[name]
                except KeyError:
                    continue
                return found.to(weight.dtype)
        name = f"{inner}.{name}"
    return weight
