"""The preallocated layer: memory of a fixed size and address, and attention over the part that is used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field

from kvrack import (
    AttentionLayer,
    BackendConfig,
    BuildContext,
    Capabilities,
    CapacityExceeded,
    InvalidConfig,
    LayerSpec,
)
from kvrack.buffer import TOKENS, check_states
from kvrack.buffered import check_pair
from kvrack.fixed import FixedBuffer, RingBuffer, TokenCount, view_size
from kvrack.layer import refuse_positive


class StaticConfig(BackendConfig):
    """Config of `static`."""

    max_cache_len: int | None = Field(
        default=None, ge=1, description="tokens to make room for; when unset, what generate needs"
    )
    attend_prefix: bool = Field(
        default=True,
        description="show attention a prefix of 256, 512, 1024, ... slots that holds what is used; "
        "False: always all of them, one shape for life",
    )


class StaticLayer(AttentionLayer):
    """Keys and values in preallocated memory, written in place; unused slots are returned for a mask to hide.

    A full layer, and a windowed one whose window is larger than the capacity, has a slot for each
    token up to the capacity. Any other windowed layer is a ring of `window` slots and takes any number
    of tokens.

    Raises InvalidConfig for a full layer when neither `max_cache_len` nor the build context says how
    many tokens will come, UnsupportedOperation for a layer without attention.
    """

    def __init__(self, spec: LayerSpec, config: StaticConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        if spec.attention is None:
            raise self._refuse("a layer without attention", "Layers with states are kept by kvrack-mamba")
        self._attend_prefix = config.attend_prefix
        capacity = config.max_cache_len if config.max_cache_len is not None else context.max_length
        self._ring = spec.window is not None and (capacity is None or spec.window <= capacity)
        slots = spec.window if self._ring else capacity
        if slots is None:
            raise InvalidConfig(
                context.backend or "static",
                [
                    "max_cache_len: expected a number, as nothing else says how many tokens will come; "
                    "set it to prompt and answer together (or give max_length to create_cache)"
                ],
            )
        self._slots = slots
        buffer = RingBuffer if self._ring else FixedBuffer
        self._keys = buffer(self._slots, context.placement)
        self._values = buffer(self._slots, context.placement)
        self._count = TokenCount()
        # After reset() memory stays for the next prompt, but no longer says what that must look like.
        self._reshapeable = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=self._ring,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=not self._ring,
            early_init=True,
            offloads=True,
            compiles=True,
            stable_address=True,
            lossless=True,
        )

    @property
    def is_compileable(self) -> bool:
        return True

    # --- what a model asks ----------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(key_states, value_states)
        new = key_states.shape[TOKENS]
        seen = self._count.value
        self._check_room(seen, new)
        if self._reshapeable:
            self._keys.allocate_for(key_states)
            self._values.allocate_for(value_states)
            self._count.allocate(key_states.device)
            self._reshapeable = False
        position = self._count.position
        assert position is not None
        if self._overflows(seen + new):
            keys = _write_ring(self._keys, key_states, seen, position)
            values = _write_ring(self._values, value_states, seen, position)
        else:
            shown = self._shown(seen + new)
            keys = _write(self._keys, key_states, seen, position, shown)
            values = _write(self._values, value_states, seen, position, shown)
        self._count.advance(new)
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
        seen = self._count.value
        self._check_room(seen, query_length)
        if self._overflows(seen + query_length):
            past = min(seen, self._slots - 1)
            return past + query_length, seen - past
        return self._shown(seen + query_length), 0

    def get_max_length(self) -> int:
        return -1 if self._ring else self._slots

    # --- what is done with it -------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        if self._ring:
            raise self._refuse(
                f"activate_past_recording [records_past] with a window of {self.spec.window}",
                "Use the backend dynamic where updates are to be cropped",
            )

    @property
    def is_croppable(self) -> bool:
        return not self._overflows(self._count.value)

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        seen = self._count.value
        if tokens < 0 and self._overflows(seen) and -tokens < seen:
            raise self._refuse(
                f"crop({tokens}) [records_past] past a window of {self.spec.window}, {seen} tokens seen,",
                "Call reset(), or use the backend dynamic with activate_past_recording()",
            )

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        if tokens:
            self._count.set(max(0, self._count.value + tokens))

    def reset(self) -> None:
        self._count.set(0)
        self._reshapeable = True
        self._home = None

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the slots in use, at the address they keep; those of a full ring in the order of slots."""
        if self._keys.data is None:
            return {}
        held = min(self._count.value, self._slots)
        return {"keys": self._keys.view(0, held), "values": self._values.view(0, held)}

    def metadata(self) -> dict[str, int]:
        return {"seen": self._count.value, "reshapeable": int(self._reshapeable)}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        if not storage:
            self.reset()
            return
        held = storage["keys"].shape[TOKENS]
        if held > self._slots:
            raise CapacityExceeded(self._slots, 0, held)
        for buffer, tokens in ((self._keys, storage["keys"]), (self._values, storage["values"])):
            if isinstance(buffer, RingBuffer) and held == self._slots:
                buffer.restore_ring(tokens)
            else:
                buffer.restore(tokens)
        self._count.allocate(storage["keys"].device)
        self._count.set(metadata["seen"])
        self._reshapeable = bool(metadata["reshapeable"])

    def flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the whole memory and the length as tensors, for a program that writes to them and is right
        at every length that shows as many slots; beside them the largest such length, -1 for a full ring."""
        keys, values, position = self._keys.data, self._values.data, self._count.position
        if keys is None or values is None or position is None:
            return {}, {}
        self._count.reread()
        after = self._count.value + 1
        largest = -1 if self._overflows(after) else max(0, self._shown(after) - 1)
        return {"keys": keys, "values": values, "position": position}, {
            "largest": largest,
            "reshapeable": int(self._reshapeable),
        }

    def unflatten(self, tensors: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        if not tensors:
            self.reset()
            return
        self._keys.data, self._values.data = tensors["keys"], tensors["values"]
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
        check_states(key_states, None if self._reshapeable else self._keys.data, "keys")
        check_states(value_states, None if self._reshapeable else self._values.data, "values")
        check_pair(key_states, value_states)

    def _check_room(self, seen: int, new: int) -> None:
        if not self._ring and seen + new > self._slots and self._count.is_known:
            raise CapacityExceeded(self._slots, seen, new)

    def _overflows(self, tokens: int) -> bool:
        """Return whether of `tokens` tokens some have left the ring."""
        return self._ring and tokens > self._slots

    def _shown(self, tokens: int) -> int:
        """Return how many slots to return when `tokens` are held."""
        return view_size(tokens, self._slots) if self._attend_prefix else self._slots

    def _held(self, buffer: FixedBuffer) -> torch.Tensor | None:
        if buffer.data is None:
            return None
        seen = self._count.value
        if isinstance(buffer, RingBuffer) and self._overflows(seen):
            return buffer.newest(self._slots, seen)
        return buffer.view(0, seen)


def _write(buffer: FixedBuffer, states: torch.Tensor, seen: int, position: torch.Tensor, shown: int) -> torch.Tensor:
    """Write `states` behind the `seen` tokens held and return the first `shown` slots."""
    buffer.write(states, seen, position)
    if _carries_gradient(states):
        after = seen + states.shape[TOKENS]
        return torch.cat([buffer.view(0, seen), states, buffer.view(after, shown - after)], dim=TOKENS)
    return buffer.view(0, shown)


def _write_ring(buffer: FixedBuffer, states: torch.Tensor, seen: int, position: torch.Tensor) -> torch.Tensor:
    """Write `states` over the oldest tokens and return what their queries see, oldest first."""
    assert isinstance(buffer, RingBuffer)
    new, slots = states.shape[TOKENS], buffer.slots
    if new == 1 and not _carries_gradient(states):
        buffer.write_over(states, seen, position)
        return buffer.newest(slots, seen + 1)
    # The older queries among several see tokens that the newer ones push out.
    past = min(seen, slots - 1)
    everything = torch.cat([buffer.newest(past, seen), states], dim=TOKENS) if past else states
    buffer.write_over(states, seen, position)
    return everything


def _carries_gradient(states: torch.Tensor) -> bool:
    return states.requires_grad and torch.is_grad_enabled()
