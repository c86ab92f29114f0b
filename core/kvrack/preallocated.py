"""PreallocatedLayer: what an attention layer does with tokens in memory of a fixed size and address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kvrack import events
from kvrack.backend import Capabilities
from kvrack.buffer import TOKENS, check_states
from kvrack.buffered import check_pair, of_role, prefixed, tell_evicted
from kvrack.codec import Role
from kvrack.config import BackendConfig
from kvrack.context import BuildContext
from kvrack.count import TokenCount
from kvrack.errors import CapacityExceeded, InvalidConfig
from kvrack.fixed import FixedTokens, view_size
from kvrack.layer import AttentionLayer, refuse_positive
from kvrack.model import LayerSpec

Layer = TypeVar("Layer", bound="PreallocatedLayer")


class PreallocatedLayer(AttentionLayer):
    """An attention layer over preallocated slots for keys and values, written in place.

    Unused slots are returned for a mask to hide. A full layer, and a windowed one whose window is
    larger than the capacity, has a slot for each token up to the capacity. Any other windowed layer
    is a ring of `window` slots and takes any number of tokens. While its past is recorded, a
    windowed layer has a slot for each token too.

    Args:
        spec: the layer to remember.
        config: the backend's.
        context: what it is built with.
        capacity: tokens to make room for; where None, what the context says will come.
        attend_prefix: return a prefix of a few sizes (`view_size`) that holds what is used; False:
            always all slots.

    Raises InvalidConfig for a full layer when neither `capacity` nor the build context says how
    many tokens will come.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: BackendConfig,
        context: BuildContext,
        capacity: int | None = None,
        attend_prefix: bool = True,
    ) -> None:
        super().__init__(spec, config, context)
        self.record_past = False
        self._attend_prefix = attend_prefix
        self._capacity = capacity if capacity is not None else context.max_length
        if spec.window is None and self._capacity is None:
            raise missing_capacity(context)
        self._count = TokenCount()
        # Position of the oldest token held where each has a slot of its own: above 0 after a recorded past was freed.
        self._first = 0
        # After reset() memory stays for the next prompt, but no longer says what that must look like.
        self._reshapeable = True
        self._lay_out(record_past=False)

    def _lay_out(self, record_past: bool) -> None:
        """Decide between ring and a slot for each token, and make buffers that have no memory yet."""
        window, capacity = self.spec.window, self._capacity
        self.record_past = record_past
        self._is_ring = window is not None and (capacity is None or (window <= capacity and not record_past))
        slots = window if self._is_ring else capacity
        assert slots is not None
        self._slots = slots
        self._keys = self._new_slots("keys", slots, self._is_ring)
        self._values = self._new_slots("values", slots, self._is_ring)

    def _new_slots(self, role: Role, slots: int, is_ring: bool) -> FixedTokens:
        """Return `slots` empty slots for keys or values."""
        return self.context.fixed_buffer(slots, is_ring)

    def _promises(self, compiles: bool, relative_error: float = 0.0) -> Capabilities:
        """Return what such a layer promises, by what its slots do."""
        return Capabilities(
            grows=self._is_unbounded,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=self._capacity is not None,
            early_init=True,
            offloads=True,
            compiles=compiles,
            stable_address=True,
            lossless=relative_error == 0.0,
            relative_error=relative_error,
        )

    @property
    def is_compileable(self) -> bool:
        return True

    # --- what a model asks ----------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(key_states, value_states)
        new = key_states.shape[TOKENS]
        seen = self._count.value
        length, first = self._mask_sizes(seen, new)
        if self._reshapeable:
            self._keys.allocate_for(key_states)
            self._values.allocate_for(value_states)
            self._count.allocate(key_states.device)
            self._reshapeable = False
        position = self._count.position
        assert position is not None
        keys = self._keys.append(key_states, seen, position, first, length)
        values = self._values.append(value_states, seen, position, first, length)
        self._count.advance(new)
        if self._is_ring and not torch.compiler.is_compiling() and events.listeners:
            tell_evicted(self.context.origin, seen + new, new, self._slots, key_states.device)
        return keys, values

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not self._reshapeable:
            return
        self._keys.allocate(batch_size, kv_heads, key_head_dim, dtype, device)
        self._values.allocate(batch_size, kv_heads, value_head_dim, dtype, device)
        self._count.allocate(device)
        self._reshapeable = False

    def get_seq_length(self) -> int:
        if torch.compiler.is_compiling() and self._count.position is not None:
            # To a graph the length is a value on the device, for which it is not made again.
            return self._count.position  # type: ignore[return-value]
        return self._count.value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `AttentionLayer.get_mask_sizes`; raises CapacityExceeded where the update would, so that a model
        learns it before its first layer is written."""
        return self._mask_sizes(self._count.value, query_length)

    def get_max_length(self) -> int:
        return -1 if self._is_unbounded or self._capacity is None else self._capacity

    # --- what is done with it -------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """As `CacheLayer.activate_past_recording`. A ring turns into a slot for each token up to the capacity,
        which is then enforced."""
        if self._capacity is None:
            raise self._refuse(
                f"activate_past_recording [records_past] with a window of {self.spec.window} and no capacity",
                "Set max_cache_len, the tokens to make room for",
            )
        if self._is_ring:
            seen = self._count.value
            if seen > self._capacity:
                raise CapacityExceeded(self._capacity, seen, 0)
            held = min(seen, self._slots)
            storage = self._stored(seen - held, held)
            self._lay_out(record_past=True)
            self._take(storage, seen - held)
        self.record_past = True

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        seen = self._count.value
        if tokens < 0 and not self._can_crop_to(max(0, seen + tokens)):
            raise self._refuse_past_window(tokens)

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        if tokens:
            seen, left = self._count.value, max(0, self._count.value + tokens)
            self._keys.drop_newest(seen, left)
            self._values.drop_newest(seen, left)
            self._count.set(left)
        if self.spec.window is not None and not self._is_ring:
            seen = self._count.value
            self._first = min(seen, max(self._first, seen - self.spec.window + 1))

    def reset(self) -> None:
        self._keys.release()
        self._values.release()
        self._count.set(0)
        self._first = 0
        self._reshapeable = True
        self._home = None

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the slots in use, at the address they keep; those of a full ring in the order of slots."""
        # Of a ring these are slots and not tokens, but below its size the two have the same numbers.
        held = min(self._count.value - self._first, self._slots)
        return self._stored(self._first, held)

    def _stored(self, first: int, count: int) -> dict[str, torch.Tensor]:
        keys, values = self._keys.storage(first, count), self._values.storage(first, count)
        return {**prefixed("keys", keys), **prefixed("values", values)}

    def metadata(self) -> dict[str, int]:
        return {
            "seen": self._count.value,
            "first": self._first,
            "record_past": int(self.record_past),
            "reshapeable": int(self._reshapeable),
        }

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        record_past, seen, first = bool(metadata["record_past"]), metadata["seen"], metadata["first"]
        if not self._is_ring and seen > self._slots:
            raise CapacityExceeded(self._slots, 0, seen)
        if record_past != self.record_past:
            self._lay_out(record_past)
        if not storage:
            self.reset()
            return
        self._take(storage, first)
        self._count.allocate(next(iter(storage.values())).device)
        self._count.set(seen)
        self._reshapeable = bool(metadata["reshapeable"])

    def _take(self, storage: dict[str, torch.Tensor], first: int) -> None:
        """Copy what `storage` returned, or what was in a ring in order, the oldest being token `first`."""
        if storage:
            self._keys.restore(of_role("keys", storage), first)
            self._values.restore(of_role("values", storage), first)
        self._first = first

    def fork(self: Layer, memo: dict[int, Any] | None = None) -> Layer:
        """As `CacheLayer.fork`: this layer keeps the memory and its address, the fork copies it before it writes."""
        twin = self._empty_copy({} if memo is None else memo)
        if self.record_past:
            twin._lay_out(record_past=True)
        seen, position = self._count.value, self._count.position
        if not self._reshapeable and position is not None:
            twin._keys.share(self._keys, seen)
            twin._values.share(self._values, seen)
            twin._count.allocate(position.device)
            twin._reshapeable = False
        twin._count.set(seen)
        twin._first = self._first
        return twin

    def flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the whole memory and the length as tensors, for a program that writes to them and is right
        at every length that shows as many slots; beside them the largest such length, -1 for a full ring."""
        keys, values, position = self._keys.memory(), self._values.memory(), self._count.position
        if not keys or position is None:
            return {}, {}
        self._count.reread()
        after = self._count.value + 1
        largest = -1 if self._overflows(after) else max(0, self._shown(after) - 1)
        return {**prefixed("keys", keys), **prefixed("values", values), "position": position}, {
            "largest": largest,
            "first": self._first,
            "record_past": int(self.record_past),
            "reshapeable": int(self._reshapeable),
        }

    def unflatten(self, tensors: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        if not tensors:
            self.reset()
            return
        self._lay_out(bool(metadata["record_past"]))
        self._first = metadata["first"]
        self._keys.adopt(of_role("keys", tensors))
        self._values.adopt(of_role("values", tensors))
        self._count.adopt(tensors["position"], metadata["largest"])
        self._reshapeable = bool(metadata["reshapeable"])
        if not self._count.is_known and metadata["largest"] < 0:
            raise self._refuse(
                f"torch.export of a full window of {self.spec.window} tokens",
                "Export the step while the window isn't full, or use torch.compile",
            )

    @property
    def keys(self) -> torch.Tensor | None:
        return self._held(self._keys)

    @property
    def values(self) -> torch.Tensor | None:
        return self._held(self._values)

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # The memory that reset() left has rows of the last prompt, which say nothing of the next.
        if not self._reshapeable:
            super()._replace(change)

    # --- sizes ----------------------------------------------------------------------------------

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._reshapeable:
            check_states(key_states, None, "keys")
            check_states(value_states, None, "values")
        else:
            self._keys.check(key_states, "keys")
            self._values.check(value_states, "values")
        check_pair(key_states, value_states)

    @property
    def _is_unbounded(self) -> bool:
        """Whether, built so, the layer is a ring; recording makes it something else only while it lasts."""
        window = self.spec.window
        return window is not None and (self._capacity is None or window <= self._capacity)

    def _mask_sizes(self, seen: int, new: int) -> tuple[int, int]:
        self._check_room(seen, new)
        if self._overflows(seen + new):
            past = min(seen, self._window - 1)
            return past + new, seen - past
        return self._shown(seen + new), 0

    def _check_room(self, seen: int, new: int) -> None:
        if not self._is_ring and seen + new > self._slots and self._count.is_known:
            raise CapacityExceeded(self._slots, seen, new)

    @property
    def _window(self) -> int:
        """Tokens that a query sees at most."""
        return self._slots if self.spec.window is None else self.spec.window

    def _overflows(self, tokens: int) -> bool:
        """Return whether of `tokens` tokens some have left the window."""
        return self.spec.window is not None and tokens > self.spec.window

    def _can_crop_to(self, tokens: int) -> bool:
        """Return whether all is there that the next query needs to see after `tokens` tokens."""
        seen, window = self._count.value, self.spec.window
        if window is None or tokens in (0, seen):
            return True
        if self._is_ring:
            return not self._overflows(seen)
        return tokens - self._first >= min(tokens, window - 1)

    def _shown(self, tokens: int) -> int:
        """Return how many slots to return when `tokens` are held."""
        most = min(self._window, self._slots)
        return view_size(tokens, most) if self._attend_prefix else most

    def _held(self, slots: FixedTokens) -> torch.Tensor | None:
        if not slots.is_allocated:
            return None
        seen = self._count.value
        first = max(0, seen - self._slots) if self._is_ring else self._first
        return slots.read(first, seen - first, seen)


def missing_capacity(context: BuildContext) -> InvalidConfig:
    """Return the error for a full layer whose capacity nothing says."""
    return InvalidConfig(
        context.backend or "static",
        [
            "max_cache_len: expected a number, as nothing else says how many tokens will come; "
            "set it to prompt and answer together (or give max_length to create_cache)"
        ],
    )
