"""BufferedLayer: what an attention layer does with tokens, whatever its buffers do with bytes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from kvrack import events
from kvrack.buffer import TOKENS, Tokens
from kvrack.config import BackendConfig
from kvrack.context import BuildContext
from kvrack.errors import ShapeMismatch
from kvrack.layer import AttentionLayer, refuse_positive
from kvrack.model import LayerSpec

Part = TypeVar("Part")
Layer = TypeVar("Layer", bound="BufferedLayer")


class BufferedLayer(AttentionLayer):
    """An attention layer over two buffers, one for keys and one for values.

    What a full, sliding or chunked layer does with tokens, whatever its buffers do with bytes. A
    windowed layer holds ``window - 1`` tokens between updates, as many as the next query can see
    besides itself.
    """

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext, growth: float = 1.25) -> None:
        super().__init__(spec, config, context)
        self.record_past = False
        self._seen = 0
        self._keep = spec.window - 1 if spec.window is not None else None
        self._keys: Tokens = context.buffer(growth)
        self._values: Tokens = context.buffer(growth)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys.check(key_states, "keys")
        self._values.check(value_states, "values")
        check_pair(key_states, value_states)
        new = key_states.shape[TOKENS]
        keep = None if self.record_past else self._keep
        keys = self._keys.append(key_states, keep)
        values = self._values.append(value_states, keep)
        self._seen += new
        if self._keep is not None:
            # Asked in this order, a graph does not depend on who listens.
            if keep is not None and not torch.compiler.is_compiling() and events.listeners:
                tell_evicted(self.context.origin, self._seen, new, keep, key_states.device)
            return newest(keys, self._keep + new), newest(values, self._keep + new)
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
        self._keys.allocate(batch_size, kv_heads, key_head_dim, dtype, device)
        self._values.allocate(batch_size, kv_heads, value_head_dim, dtype, device)

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self._seen if self._keep is None else min(self._seen, self._keep)
        return past + query_length, self._seen - past

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if tokens < 0 and self._keep is not None and -tokens < self._seen:
            needed = min(self._seen + tokens, self._keep)
            if len(self._keys) + tokens < needed:
                raise self._refuse_past_window(tokens)

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        if -tokens >= self._seen and tokens:
            removed = self._seen
            self._keys.drop_newest(len(self._keys))
            self._values.drop_newest(len(self._values))
        else:
            removed = -tokens
            self._keys.drop_newest(removed)
            self._values.drop_newest(removed)
        self._seen -= removed
        if self._keep is not None:
            self._keys.keep_newest(self._keep)
            self._values.keep_newest(self._keep)

    def reset(self) -> None:
        self._keys.clear()
        self._values.clear()
        self._seen = 0
        self._home = None

    def storage(self) -> dict[str, torch.Tensor]:
        keys, values = self._keys.storage(), self._values.storage()
        return {**prefixed("keys", keys), **prefixed("values", values)} if keys and values else {}

    def metadata(self) -> dict[str, int]:
        own = {"seen": self._seen, "record_past": int(self.record_past)}
        return {
            **own,
            **prefixed("keys", self._keys.metadata()),
            **prefixed("values", self._values.metadata()),
        }

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        if storage:
            self._keys.load(of_role("keys", storage), of_role("keys", metadata))
            self._values.load(of_role("values", storage), of_role("values", metadata))
        else:
            self.reset()
        self._seen = metadata["seen"]
        self.record_past = bool(metadata["record_past"])
        if len(self._keys) != len(self._values):
            raise ShapeMismatch(f"expected as many values as keys, got {len(self._keys)} and {len(self._values)}")

    def fork(self: Layer, memo: dict[int, Any] | None = None) -> Layer:
        twin = self._empty_copy({} if memo is None else memo)
        twin._keys.share(self._keys)
        twin._values.share(self._values)
        # Through restore, so that what a subclass keeps besides comes along; buffers see that they hold it already.
        twin.restore(self.storage(), self.metadata())
        return twin

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys.view()

    @property
    def values(self) -> torch.Tensor | None:
        return self._values.view()


def prefixed(role: str, parts: dict[str, Part]) -> dict[str, Part]:
    """Return the parts by their names in the layer: "keys" for the nameless one, else "keys.codes"."""
    return {f"{role}.{name}" if name else role: part for name, part in parts.items()}


def of_role(role: str, named: dict[str, Part]) -> dict[str, Part]:
    """Return what `prefixed` named for `role`, by the buffer's own names."""
    return {name[len(role) + 1 :]: part for name, part in named.items() if name == role or name.startswith(f"{role}.")}


def tell_evicted(origin: events.Origin, seen: int, new: int, keep: int, device: torch.device) -> None:
    """Tell how many tokens left a window that keeps `keep`, the newest `new` of `seen` being the last update's."""
    if dropped := min(seen - new, keep) + new - min(seen, keep):
        origin.tell("evicted", dropped, 0, str(device))


def check_pair(key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Raise ShapeMismatch unless keys and values are of the same batch rows, heads and tokens."""
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ShapeMismatch(
            "keys and values: expected the same batch, heads and tokens, "
            f"got {tuple(key_states.shape)} and {tuple(value_states.shape)}"
        )


def newest(states: torch.Tensor, count: int) -> torch.Tensor:
    """Return a view of the newest `count` tokens of `states`, all of them when there are fewer."""
    length = states.shape[TOKENS]
    return states if length <= count else states.narrow(TOKENS, length - count, count)
