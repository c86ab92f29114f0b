"""Cache: the layers in order, and what a model asks of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvrack import events
from kvrack.backend import Capabilities
from kvrack.companions import build_layer
from kvrack.config import BackendConfig
from kvrack.context import BuildContext
from kvrack.errors import UnsupportedOperation
from kvrack.layer import AttentionLayer, CacheLayer, EmptyLayer, StateLayer, allocations
from kvrack.model import LayerSpec, ModelSpec
from kvrack.recipe import Recipe
from kvrack.registry import Resolved, resolve


@dataclass(frozen=True)
class MemoryRow:
    """Bytes that one role of one layer takes on one device.

    Attributes:
        layer: index of the layer; what several share is the first's.
        role: what the bytes are: keys, values, or their codes, scales, tail; states; scratch.
        device: where they are; "disk" or another place for what a layer holds elsewhere.
        nbytes: bytes allocated, room for further tokens included.
    """

    layer: int
    role: str
    device: str
    nbytes: int


class Cache:
    """The layers of one model, in order. Owns them; they own their memory.

    Args:
        resolved: the backend and config to build layers with.
        model_spec: what the model needs remembered.
        name: the name it was asked for by.
        max_length: tokens the whole use will need, None when unknown.
    """

    def __init__(
        self, resolved: Resolved, model_spec: ModelSpec, name: str = "", max_length: int | None = None
    ) -> None:
        self.backend = resolved.backend
        self.config: BackendConfig = resolved.config
        self.model_spec = model_spec
        self.name = name or resolved.backend.name
        self.max_length = max_length
        self._context = BuildContext(backend=self.name, max_length=max_length)
        self.layers: list[CacheLayer] = []
        for spec in (*model_spec.layers, *model_spec.cross_layers):
            self.layers.append(self._build(spec))
        events.know_plugins()
        self._tell_created()

    def _build(self, spec: LayerSpec) -> CacheLayer:
        """Return a new layer, to be the next in order."""
        context = replace(self._context, layer_index=len(self.layers))
        if spec.holds_nothing:
            return EmptyLayer(spec, self.config, context)
        return build_layer(Resolved(self.backend, self.config), spec, context)

    def _tell_created(self) -> None:
        if events.listeners:
            seen, nbytes = self.get_seq_length(), self.nbytes
            events.emit(events.CacheEvent("created", self.name, None, seen, nbytes))

    def __len__(self) -> int:
        """Return the number of layers; layers created on demand count once they exist."""
        return len(self.layers)

    @property
    def self_attention(self) -> Cache:
        """The decoder's own layers, as a cache that shares them with this one."""
        return self._part(self.layers[: self._own], replace(self.model_spec, cross_layers=()))

    @property
    def cross_attention(self) -> Cache:
        """The cross-attention layers of an encoder-decoder model, as a cache that shares them with this one.

        Raises UnsupportedOperation where there are none.
        """
        spec = self.model_spec
        if not spec.is_encoder_decoder:
            raise UnsupportedOperation(self.name, "cross-attention in a model without it", "Correct the model spec")
        return self._part(self.layers[self._own :], replace(spec, layers=spec.cross_layers, cross_layers=()))

    def _part(self, layers: list[CacheLayer], model_spec: ModelSpec) -> Cache:
        part = copy.copy(self)
        part.layers, part.model_spec = layers, model_spec
        return part

    @property
    def _own(self) -> int:
        """How many layers are the decoder's own; those of cross-attention come after them."""
        return len(self.layers) - len(self.model_spec.cross_layers)

    def __iter__(self) -> Iterator[CacheLayer]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return f"Cache({self.name!r}, {len(self)} layers, {self.get_seq_length()} tokens, {self.nbytes} bytes)"

    # --- what a model asks ----------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give layer `layer_idx` new tokens and return what attention must see; see `AttentionLayer.update`."""
        return self._attention(layer_idx).update(key_states, value_states)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Give layer `layer_idx` new convolution inputs; see `StateLayer.update_conv_state`."""
        return self._states(layer_idx).update_conv_state(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        """Replace a recurrent state of layer `layer_idx` and return it; see `StateLayer.update_recurrent_state`."""
        return self._states(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a convolution state of layer `layer_idx`, None before its first update."""
        return self._states(layer_idx).get_conv_state(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state of layer `layer_idx`, None before its first update."""
        return self._states(layer_idx).get_recurrent_state(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether layer `layer_idx` (None for the last one with states) has state `state_idx`, or all."""
        if layer_idx is None:
            holding = [index for index, layer in enumerate(self.layers) if isinstance(layer, StateLayer)]
            return bool(holding) and self._states(holding[-1]).has_previous_state(state_idx)
        return self._states(layer_idx).has_previous_state(state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen by layer `layer_idx`, by the first one that attends where it doesn't; 0 where
        none does, since states don't count tokens, and for a layer not created yet."""
        layer = self._measured(layer_idx)
        return layer.get_seq_length() if layer is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of what layer `layer_idx` returns for `query_length` new tokens; a layer
        that holds nothing answers for the first that attends."""
        layer = self._measured(layer_idx)
        return layer.get_mask_sizes(query_length) if layer is not None else (query_length, 0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return how many tokens the whole cache (or layer `layer_idx`) can take, -1 for any number.

        It is the smallest of the layers' limits; a window is none, nor is the length of an encoder's output.
        """
        layers = self.layers[: self._own] if layer_idx is None else self.layers[layer_idx : layer_idx + 1]
        limits = [layer.get_max_length() for layer in layers if isinstance(layer, AttentionLayer)]
        return min((limit for limit in limits if limit >= 0), default=-1)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        value_head_dim: int | Sequence[int] | None = None,
    ) -> None:
        """Allocate every layer that attends to the model's own tokens as a first update would.

        States and cross-attention are left to their first update, which alone says their shapes.

        Args:
            batch_size: rows.
            num_heads: key-value heads, one number or one for each layer.
            head_dim: channels of a key, one number or one for each layer.
            dtype: of the states to come.
            device: of the states to come.
            value_head_dim: channels of a value where they differ from a key's.
        """
        heads = self._for_each("num_heads", num_heads)
        keys = self._for_each("head_dim", head_dim)
        values = keys if value_head_dim is None else self._for_each("value_head_dim", value_head_dim)
        for layer, layer_heads, key_dim, value_dim in zip(self.layers[: self._own], heads, keys, values, strict=True):
            if isinstance(layer, AttentionLayer):
                layer.early_initialization(batch_size, layer_heads, key_dim, value_dim, dtype, device)

    def reset(self) -> None:
        """Forget everything; any batch size, dtype and length may follow."""
        for layer in self.layers:
            layer.reset()

    def crop(self, tokens: int) -> None:
        """Remove the newest ``-tokens`` tokens from every layer, or, if one refuses, from none.

        See `CacheLayer.crop` for what is left and what raises.
        """
        for layer in self.layers:
            layer.check_crop(tokens)
        for layer in self.layers:
            layer.crop(tokens)

    def activate_past_recording(self) -> None:
        """From now on keep what a later `crop` needs, in every layer."""
        for layer in self.layers:
            layer.activate_past_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i the former row ``beam_idx[i]`` in every layer, for beam search."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in every layer, its copies side by side."""
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` names in every layer."""
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def offload(self, layer_idx: int) -> None:
        """Move layer `layer_idx` to host memory."""
        self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int) -> None:
        """Bring layer `layer_idx` back to the device it was offloaded from."""
        self.layers[layer_idx].prefetch()

    @property
    def is_compileable(self) -> bool:
        """Whether there are layers that attend, and all may return slots that hold no token; see
        `CacheLayer.is_compileable`."""
        attends = any(layer.spec.attention is not None for layer in self.layers[: self._own])
        return attends and all(layer.is_compileable for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was, now."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers keep a window of tokens only."""
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that keeps anything has its memory."""
        keeping = [layer for layer in self.layers if not layer.spec.holds_nothing]
        return bool(keeping) and all(layer.is_initialized for layer in keeping)

    # --- what a user asks -----------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the first layer that keeps anything promises."""
        for layer in self.layers:
            if not layer.spec.holds_nothing:
                return layer.capabilities
        return self._build(self.model_spec.further or LayerSpec()).capabilities

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first update."""
        return next((layer.batch_size for layer in self.layers if layer.is_initialized), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of memory really held, room for further tokens included, shared memory counted once."""
        return sum(row.nbytes for row in self.memory())

    def memory(self) -> list[MemoryRow]:
        """Return the bytes held by layer, role and device; memory that two share is counted at the first."""
        away = {i: held for i, layer in enumerate(self.layers) if (held := layer.elsewhere())}
        # Asking a layer that is elsewhere for its storage would bring all of it here.
        named = {
            (i, name): tensor
            for i, layer in enumerate(self.layers)
            if i not in away
            for name, tensor in layer.storage().items()
        }
        sizes = allocations({f"{i}.{name}": tensor for (i, name), tensor in named.items()})
        rows = [MemoryRow(i, name, str(tensor.device), sizes[f"{i}.{name}"]) for (i, name), tensor in named.items()]
        rows += [MemoryRow(i, each.role, each.place, each.nbytes) for i, held in away.items() for each in held]
        rows.sort(key=lambda row: row.layer)
        first = rows[0].layer if rows else 0
        scratch = self._context.scratch.tensors().values()
        return rows + [MemoryRow(first, "scratch", str(tensor.device), tensor.nbytes) for tensor in scratch]

    def twin(self) -> Cache:
        """Return a new, empty cache, built as this one was."""
        return Cache(Resolved(self.backend, self.config), self.model_spec, self.name, self.max_length)

    def recipe(self) -> Recipe:
        """Return how this cache was built, as plain data that builds an equal, empty one."""
        return Recipe(
            backend=self.backend.name,
            name=self.name,
            config=self.config.model_dump(mode="json"),
            max_length=self.max_length,
            model=self.model_spec.to_dict(),
        )

    def fork(self, tokens: int | None = None) -> Cache:
        """Return an independent cache with the same state: writing to either leaves the other as it is.

        Layers that can share their memory do so until one of both writes (copy-on-write), so that
        forking takes the same time whatever is held. `copy.deepcopy` copies everything at once.

        Args:
            tokens: branch at an earlier point: how many tokens the fork has seen, from the start.
                None for all.

        Raises ValueError for a number below 0 or above `get_seq_length()`, and what `crop` raises
        where a layer can't go back so far. This cache is left as it is.
        """
        seen = self.get_seq_length()
        removed = 0 if tokens is None else seen - tokens
        if not 0 <= removed <= seen:
            raise ValueError(f"fork(tokens={tokens}): expected 0 to {seen}, the tokens seen")
        if removed:
            for layer in self.layers:
                layer.check_crop(-removed)
        memo: dict[int, Any] = {}
        twin = self._copy(memo, lambda layer: layer.fork(memo))
        if removed:
            twin.crop(-removed)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self._copy(memo, lambda layer: copy.deepcopy(layer, memo))

    def _copy(self, memo: dict[int, Any], copied: Callable[[CacheLayer], CacheLayer]) -> Cache:
        # Not built anew: what the recipe says is immutable and can be the same, and layers are given.
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._context = copy.deepcopy(self._context, memo)
        twin.layers = [copied(layer) for layer in self.layers]
        twin._tell_created()
        return twin

    def save(
        self,
        path: str | Path,
        fingerprint: str | None = None,
        token_ids: Sequence[int] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Write the cache to one safetensors file, which `kvrack.load` reads; each rank its own. See
        `kvrack.snapshot.save`."""
        from kvrack.snapshot import save

        save(self, path, fingerprint, token_ids, notes)

    def grow_to(self, count: int) -> None:
        """Create layers up to `count` of them, where the model spec says that further ones come on demand."""
        further = self.model_spec.further
        while further is not None and len(self.layers) < count:
            self.layers.append(self._build(further))

    # --- finding layers -------------------------------------------------------------------------

    def _attention(self, layer_idx: int) -> AttentionLayer:
        """Return layer `layer_idx` to update, created first where layers come on demand."""
        self.grow_to(layer_idx + 1)
        if layer_idx >= len(self.layers):
            raise IndexError(f"layer {layer_idx}: the cache has {len(self.layers)} layers, as its model spec says")
        layer = self.layers[layer_idx]
        if not isinstance(layer, AttentionLayer):
            kept = "nothing" if layer.spec.holds_nothing else "no keys and values"
            raise UnsupportedOperation(
                self.name,
                f"update of layer {layer_idx}, which its model spec says holds {kept},",
                "Correct the spec or the layer index",
            )
        return layer

    def _states(self, layer_idx: int) -> StateLayer:
        self.grow_to(layer_idx + 1)
        layer = self.layers[layer_idx]
        if not isinstance(layer, StateLayer):
            raise UnsupportedOperation(
                self.name, f"a state of layer {layer_idx}, which has none,", "Correct the spec or the layer index"
            )
        return layer

    def _measured(self, layer_idx: int) -> AttentionLayer | None:
        """Return layer `layer_idx` if it attends, else the first that does; None when there is none yet."""
        if layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            if isinstance(layer, AttentionLayer):
                return layer
            return next((each for each in self.layers if isinstance(each, AttentionLayer)), None)
        return None

    def _for_each(self, what: str, given: int | Sequence[int]) -> Sequence[int]:
        values = [given] * self._own if isinstance(given, int) else list(given)
        if len(values) != self._own:
            raise ValueError(f"{what}: expected one number or {self._own}, one a layer, got {len(values)}")
        return values


def create_cache(name: str, model_spec: ModelSpec, max_length: int | None = None, **config: Any) -> Cache:
    """Return a new, empty cache for a model, from the backend of this name.

    Args:
        name: a `cache_implementation` string.
        model_spec: what the model needs remembered.
        max_length: tokens the whole use will need (prompt and answer), None when unknown; backends
            that preallocate take their size from it, others never make room beyond it.
        **config: the backend's own keys, as in `cache_config`.

    Layers with states and cross-attention layers come from companions; see `kvrack.companions`.

    Raises what `kvrack.resolve` raises, and UnsupportedOperation for a layer the backend refuses, or
    whose companion isn't installed.
    """
    return Cache(resolve(name, config), model_spec, name, max_length)


def _register_pytree() -> None:
    # At the end: kvrack.pytree needs Cache.
    from kvrack.pytree import register

    register()


_register_pytree()
