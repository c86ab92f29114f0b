"""The protocol a layer keeps: CacheLayer, AttentionLayer, StateLayer.

A layer names every tensor it owns in `storage()`, batch first in each, and its few plain integers
in `metadata()`; `restore` is their inverse. From those three, everything that acts on a layer as a
whole is derived here once: batch operations, moving, deepcopy, size, save and load. So no backend
can forget half of its state in one of them.

spec/SPEC.md states the contract as numbered rules; the conformance suite proves them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvrack.backend import Capabilities
from kvrack.config import BackendConfig
from kvrack.context import BuildContext
from kvrack.errors import UnsupportedOperation
from kvrack.model import LayerSpec

Layer = TypeVar("Layer", bound="CacheLayer")


@dataclass(frozen=True)
class Elsewhere:
    """Bytes that a layer holds outside of its device's memory.

    Attributes:
        role: what they are: keys, values, codes, ...; the name in `storage()`.
        place: where they are, such as "disk" or "host".
        nbytes: how many, room for further tokens included.
    """

    role: str
    place: str
    nbytes: int


class CacheLayer(ABC):
    """What one layer of a model remembers. Owned by a `Cache`, built by a `Backend`.

    A subclass's constructor takes `spec`, `config` and `context`, allocates nothing, and passes
    them on; `twin` calls it again.
    """

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        self.spec = spec
        self.config = config
        self.context = context
        self._home: torch.device | None = None

    # --- what a backend writes ------------------------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this layer, as built, promises."""

    @abstractmethod
    def storage(self) -> dict[str, torch.Tensor]:
        """Return every tensor the layer owns, by name, batch first in each; {} when nothing is allocated.

        Views of what is held, cut to it, not copies. Names are roles such as "keys" and "values",
        or "keys.codes" where a role has several tensors.
        """

    @abstractmethod
    def metadata(self) -> dict[str, int]:
        """Return the plain integers that, with `storage()`, are the layer's whole state."""

    @abstractmethod
    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Take on the state that `storage()` and `metadata()` of an equally built layer returned.

        Copies the tensors (detached) into memory of the layer's own; the caller keeps its own. Any
        batch size, dtype and device is accepted, whatever was held before.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; afterwards the layer serves any batch size, dtype and length, as new."""

    @abstractmethod
    def check_crop(self, tokens: int) -> None:
        """Raise what `crop(tokens)` would raise; change nothing."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Remove the newest ``-tokens`` tokens, `tokens` being 0 or negative.

        Leaves exactly the state that feeding so many tokens fewer would have left; removing more
        than there are empties the layer. ``crop(0)`` removes none and frees recorded past.

        Raises ValueError for a positive number, UnsupportedOperation where the state is gone, with
        what to call. Nothing is changed then.
        """

    def activate_past_recording(self) -> None:
        """From now on keep what a later `crop` needs to go back past a window or a state.

        Does nothing on a layer that keeps all of its past anyway.
        """

    # --- what follows from it -------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether memory is allocated."""
        return bool(self.storage())

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first update."""
        return next((tensor.shape[0] for tensor in self.storage().values()), -1)

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop(-1)`` would work, now."""
        try:
            self.check_crop(-1)
        except UnsupportedOperation:
            return False
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `update` may return slots that hold no token, for a mask to hide.

        It is what transformers reads the name as. That a layer can be traced by torch.compile is
        `Capabilities.compiles`.
        """
        return False

    @property
    def is_sliding(self) -> bool:
        """Whether the layer keeps a window of tokens only."""
        return self.spec.window is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory the layer really holds, room for further tokens included, wherever it is."""
        if away := self.elsewhere():
            return sum(each.nbytes for each in away)
        return sum(allocations(self.storage()).values())

    def elsewhere(self) -> list[Elsewhere]:
        """Return what the layer holds that is not in its device's memory.

        Where it isn't empty, all the layer holds is in it, and `storage()` brings a copy of that.
        """
        return []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i the former row ``beam_idx[i]``, for beam search."""
        self._replace(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, its copies side by side."""
        self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` names (integers or a boolean mask), in that order."""
        self._replace(lambda tensor: tensor[indices.to(tensor.device)])

    def to(self: Layer, device: torch.device | str) -> Layer:
        """Move everything the layer owns to `device`, and return the layer."""
        self._replace(lambda tensor: tensor.to(device))
        return self

    def offload(self) -> None:
        """Move everything the layer owns to host memory."""
        storage = self.storage()
        if storage and self._home is None:
            self._home = next(iter(storage.values())).device
            if self._home.type != "cpu":
                self.to("cpu")

    def prefetch(self) -> None:
        """Bring everything the layer owns back to the device it was offloaded from."""
        if self._home is not None:
            if self._home.type != "cpu":
                self.to(self._home)
            self._home = None

    def flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the tensors that are the layer's leaves in a pytree, by name, and the integers beside them.

        The integers are a constant of an exported program; a layer that can be exported over many
        steps keeps its length among the tensors.
        """
        return self.storage(), self.metadata()

    def unflatten(self, tensors: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Take on what `flatten` of an equally built layer returned."""
        self.restore(tensors, metadata)

    def twin(self: Layer) -> Layer:
        """Return a new, empty layer, built as this one was."""
        return type(self)(self.spec, self.config, self.context)

    def fork(self: Layer, memo: dict[int, Any] | None = None) -> Layer:
        """Return an independent layer with the same state.

        A layer that can shares its memory with the fork until either writes, so that forking takes
        the same time whatever is held; any other copies.

        Args:
            memo: copies made so far, as `copy.deepcopy` passes them on: one for the layers of a
                cache, which share their build context, and for the layers that a layer holds.
        """
        return copy.deepcopy(self, memo)

    def __deepcopy__(self: Layer, memo: dict[int, Any]) -> Layer:
        twin = self._empty_copy(memo)
        twin.restore(self.storage(), self.metadata())
        return twin

    def _empty_copy(self: Layer, memo: dict[int, Any]) -> Layer:
        """Return an empty layer for a copy of this one: in the copy of its context, and noted in `memo`."""
        twin = type(self)(self.spec, self.config, copy.deepcopy(self.context, memo))
        memo[id(self)] = twin
        twin._home = self._home
        return twin

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # Every tensor is made before any is stored: an index out of range changes nothing.
        storage = self.storage()
        if storage:
            self.restore({name: change(tensor) for name, tensor in storage.items()}, self.metadata())

    def _refuse(self, operation: str, remedy: str) -> UnsupportedOperation:
        return UnsupportedOperation(self.context.backend or type(self).__name__, operation, remedy)


class AttentionLayer(CacheLayer):
    """A layer that keeps keys and values."""

    record_past: bool = False
    """Whether what a window would drop is kept until the next `crop`."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        if spec.attention is None:
            raise self._refuse("a layer without attention", "Layers with states are kept by kvrack-mamba")

    @abstractmethod
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember new tokens and return what attention must see.

        The first update decides batch, heads, dtype and device. Both tensors are copied, detached:
        gradient flows through the tokens of this update, what was held before is constant.

        Args:
            key_states: ``[batch, kv_heads, new_tokens, key_head_dim]``.
            value_states: ``[batch, kv_heads, new_tokens, value_head_dim]``.

        Returns:
            Keys and values ``[batch, kv_heads, kv_length, head_dim]``, oldest first, in the dtype
            given; `kv_length` is what `get_mask_sizes` said for as many new tokens. They belong to
            the layer: read, do not write. They stay valid until the cache's next update, of any
            layer (layers that decode share their scratch); where the spec says `read_by_others`,
            until this layer's next, so to the end of the step.

        Raises ShapeMismatch or CapacityExceeded before anything is written.
        """

    @abstractmethod
    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate as the first update would, holding no token. Nothing happens if memory is there already."""

    @abstractmethod
    def get_seq_length(self) -> int:
        """Return the number of tokens seen, those that a window dropped included."""

    @abstractmethod
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of what the next `update` with `query_length` tokens returns, and the
        position of its first token in the sequence."""

    def get_max_length(self) -> int:
        """Return how many tokens the layer can ever take, -1 for any number."""
        return -1

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys held ``[batch, kv_heads, tokens, key_head_dim]``, decoded where they are stored encoded."""
        return self.storage().get("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """The values held ``[batch, kv_heads, tokens, value_head_dim]``, decoded where they are stored encoded."""
        return self.storage().get("values")

    def _refuse_past_window(self, tokens: int) -> UnsupportedOperation:
        return self._refuse(
            f"crop({tokens}) [records_past] past a window of {self.spec.window}, {self.get_seq_length()} tokens seen,",
            "Call activate_past_recording() before the updates that may be cropped",
        )


class StateLayer(CacheLayer):
    """A layer that keeps fixed-size states: convolution inputs and recurrent states, several of each.

    What `get_conv_state` and `get_recurrent_state` return is the state itself: a model may write to
    it in place, which replaces an update.
    """

    record_past: bool = False
    """Whether what a state would drop is kept until the next `crop`. Convolution inputs must then all
    come through `update_conv_state`, and before the forward they belong to changes the recurrent state."""

    @property
    def is_compileable(self) -> bool:
        # States have no slots; True, so that they decide nothing for the attention layers beside them.
        return True

    @abstractmethod
    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Take in the convolution inputs of new tokens, and return what the convolution over them needs.

        Args:
            conv_states: ``[batch, channels, new_tokens]``.
            state_idx: which of the layer's states.
            conv_kernel_size: columns that the state keeps, decided by the first update; None for as
                many as that brings.

        Returns:
            ``[batch, channels, held + new_tokens]``: the columns held before and the new ones. Of a first
            update the new ones alone, with zeros to their left where the kernel is longer.
        """

    @abstractmethod
    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        """Replace recurrent state `state_idx` (batch first, any shape after) and return it."""

    @abstractmethod
    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """Return convolution state `state_idx`, None before the first update."""

    @abstractmethod
    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        """Return recurrent state `state_idx`, None before the first update."""

    @abstractmethod
    def has_previous_state(self, state_idx: int | None = None) -> bool:
        """Return whether state `state_idx`, or each of them, was updated since the last reset."""


class EmptyLayer(CacheLayer):
    """A layer that keeps nothing: it reads another layer's keys and values, or has no attention."""

    keys = None
    values = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True, slides=True, chunks=True, chunked_prefill=True, unequal_head_dim=True, crops=True,
            records_past=True, early_init=True, offloads=True, compiles=True, stable_address=True, lossless=True,
        )  # fmt: skip

    @property
    def is_compileable(self) -> bool:
        # It returns no slots at all; True, so that it decides nothing for the layers beside it.
        return True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: nothing is kept here."""
        raise self._refuse(
            "update of a layer that holds nothing",
            "Its model spec says that it keeps no keys and values; correct the spec or the layer index",
        )

    def storage(self) -> dict[str, torch.Tensor]:
        return {}

    def metadata(self) -> dict[str, int]:
        return {}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        pass

    def reset(self) -> None:
        pass

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)


def refuse_positive(tokens: int) -> None:
    """Raise ValueError if `crop` was given a positive number."""
    if tokens > 0:
        raise ValueError(f"crop({tokens}): expected 0 or a negative number, the tokens to remove. Call crop({-tokens})")


def allocations(storage: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the bytes allocated for each name, memory that two names share counted at the first."""
    seen: set[tuple[torch.device, int]] = set()
    sizes: dict[str, int] = {}
    for name, tensor in storage.items():
        memory = tensor.untyped_storage()
        # On the meta device there is no address.
        identity = memory.device, memory._cdata if memory.device.type == "meta" else memory.data_ptr()
        fresh = identity not in seen
        seen.add(identity)
        sizes[name] = memory.nbytes() if fresh else 0
    return sizes
