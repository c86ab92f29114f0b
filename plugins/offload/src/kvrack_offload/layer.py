"""OffloadedLayer and OffloadedStateLayer: a layer that holds another, whose bytes lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvrack import AttentionLayer, BuildContext, Capabilities, LayerSpec, StateLayer
from kvrack.layer import CacheLayer, Elsewhere
from kvrack_offload.config import PlaceConfig
from kvrack_offload.holds import Hold
from kvrack_offload.homes import Traffic
from kvrack_offload.inner import make_hold


class Offloaded(CacheLayer):
    """What every layer does whose bytes lie elsewhere: it asks the one it holds, and moves the bytes."""

    def __init__(self, spec: LayerSpec, config: PlaceConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._hold: Hold[CacheLayer] = make_hold(spec, config, context)

    @property
    def traffic(self) -> Traffic:
        """Bytes that travelled so far, of all layers of the cache."""
        return self._hold.station.prefetcher.traffic

    @property
    def capabilities(self) -> Capabilities:
        # Between two layers the slots are exchanged, which a graph can't do, and with them the addresses.
        return replace(self._hold.inner.capabilities, offloads=True, compiles=False, stable_address=False)

    @property
    def is_compileable(self) -> bool:
        return self._hold.inner.is_compileable

    @property
    def is_initialized(self) -> bool:
        return bool(self._hold.shapes())

    @property
    def batch_size(self) -> int:
        return next((shape.shape[0] for shape in self._hold.shapes().values()), -1)

    def elsewhere(self) -> list[Elsewhere]:
        return self._hold.elsewhere()

    def storage(self) -> dict[str, torch.Tensor]:
        """Return copies of what is held, in memory of their own: on the device, or in host memory after `offload`."""
        storage = self._hold.reading().storage()
        return storage if self._home is None else {name: tensor.cpu() for name, tensor in storage.items()}

    def metadata(self) -> dict[str, int]:
        return self._hold.reading().metadata()

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        with self._hold.changing() as inner:
            inner.restore(storage, metadata)

    def reset(self) -> None:
        with self._hold.changing() as inner:
            inner.reset()
        self._home = None

    @property
    def record_past(self) -> bool:
        """Whether what a window or a state would drop is kept until the next `crop`."""
        return bool(getattr(self._hold.reading(), "record_past", False))

    @record_past.setter
    def record_past(self, value: bool) -> None:
        with self._hold.changing() as inner:
            setattr(inner, "record_past", value)  # noqa: B010  (CacheLayer itself has no such attribute)

    def activate_past_recording(self) -> None:
        with self._hold.changing() as inner:
            inner.activate_past_recording()

    def check_crop(self, tokens: int) -> None:
        self._hold.reading().check_crop(tokens)

    @property
    def is_croppable(self) -> bool:
        return self._hold.reading().is_croppable

    def crop(self, tokens: int) -> None:
        with self._hold.changing() as inner:
            inner.crop(tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        # Beams often stay where they are, and otherwise everything travels.
        if self.batch_size >= 0 and not torch.equal(beam_idx.cpu(), torch.arange(self.batch_size)):
            super().reorder_cache(beam_idx)

    def offload(self) -> None:
        """Note that storage() is to be in host memory; what is held is elsewhere already."""
        if self._home is None and (shapes := self._hold.shapes()):
            self._home = next(iter(shapes.values())).device

    def prefetch(self) -> None:
        """Note that storage() is to be on the device again."""
        self._home = None

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with self._hold.changing() as inner:
            inner._replace(change)


class OffloadedLayer(Offloaded, AttentionLayer):
    """An attention layer whose bytes lie elsewhere.

    What `update` returns lies in one of two slots on the device, which the layers of a cache take
    in turn; it stays valid until the next update of any of them.
    """

    @property
    def _attention(self) -> AttentionLayer:
        inner = self._hold.reading()
        assert isinstance(inner, AttentionLayer)
        return inner

    # Threads, files and streams are none of a graph's business: it breaks here, around the whole of it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._hold.updating(key_states.shape[2] if key_states.dim() == 4 else 1) as inner:
            assert isinstance(inner, AttentionLayer)
            return inner.update(key_states, value_states)

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        with self._hold.changing() as inner:
            assert isinstance(inner, AttentionLayer)
            inner.early_initialization(batch_size, kv_heads, key_head_dim, value_head_dim, dtype, device)

    def get_seq_length(self) -> int:
        return self._attention.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._attention.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self._attention.get_max_length()

    @property
    def keys(self) -> torch.Tensor | None:
        return self._attention.keys

    @property
    def values(self) -> torch.Tensor | None:
        return self._attention.values


class OffloadedStateLayer(Offloaded, StateLayer):
    """A state layer whose states lie elsewhere, and travel whole: out when another layer needs the slot, since until
    then a model may write to them in place."""

    @property
    def _states(self) -> StateLayer:
        inner = self._hold.reading()
        assert isinstance(inner, StateLayer)
        return inner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        with self._hold.updating(1) as inner:
            assert isinstance(inner, StateLayer)
            return inner.update_conv_state(conv_states, state_idx, conv_kernel_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        with self._hold.updating(1) as inner:
            assert isinstance(inner, StateLayer)
            return inner.update_recurrent_state(recurrent_states, state_idx)

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get_conv_state(state_idx)

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get_recurrent_state(state_idx)

    def has_previous_state(self, state_idx: int | None = None) -> bool:
        return self._states.has_previous_state(state_idx)
