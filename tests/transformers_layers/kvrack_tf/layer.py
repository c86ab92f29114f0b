"""AttentionLayer's methods passed on to a layer of transformers, with the promises that its own code makes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import cache_utils

from kvrack import AttentionLayer, BackendConfig, BuildContext, Capabilities, LayerSpec

OWNED = ("keys", "values", "_quantized_keys", "_quantized_values", "cumulative_length", "_pending_beam_idx")


class Adapter(AttentionLayer):
    """A layer of transformers. What it owns is read from its attributes."""

    def __init__(
        self, spec: LayerSpec, config: BackendConfig, context: BuildContext, inner: Any, promised: Capabilities
    ) -> None:
        super().__init__(spec, config, context)
        self.inner = inner
        self.promised = promised

    @property
    def capabilities(self) -> Capabilities:
        return self.promised

    @property
    def is_initialized(self) -> bool:
        return bool(self.inner.is_initialized)

    @property
    def is_compileable(self) -> bool:
        return bool(self.inner.is_compileable)

    @property
    def is_croppable(self) -> bool:
        return bool(self.inner.is_croppable)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.update(key_states, value_states)  # type: ignore[no-any-return]

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch_size, kv_heads, 0)
        keys = torch.zeros(*shape, key_head_dim, dtype=dtype, device=device)
        self.inner.lazy_initialization(keys, torch.zeros(*shape, value_head_dim, dtype=dtype, device=device))

    def get_seq_length(self) -> int:
        return self.inner.get_seq_length()  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.inner.get_mask_sizes(query_length)  # type: ignore[no-any-return]

    def get_max_length(self) -> int:
        return self.inner.get_max_length()  # type: ignore[no-any-return]

    def activate_past_recording(self) -> None:
        if hasattr(self.inner, "activate_past_recording"):
            self.inner.activate_past_recording()

    def reset(self) -> None:
        self.inner.reset()

    def check_crop(self, tokens: int) -> None:
        copy.deepcopy(self.inner).crop(tokens)

    def crop(self, tokens: int) -> None:
        self.inner.crop(tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.inner.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.inner.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.inner.batch_select_indices(indices)

    def offload(self) -> None:
        self.inner.offload()

    def prefetch(self) -> None:
        self.inner.prefetch()

    def storage(self) -> dict[str, torch.Tensor]:
        if not self.inner.is_initialized:
            return {}
        found: dict[str, torch.Tensor] = {}
        for name in OWNED:
            value = getattr(self.inner, name, None)
            parts = value if isinstance(value, tuple) else (value,)
            for i, part in enumerate(parts):
                if isinstance(part, torch.Tensor):
                    found[f"{name}.{i}" if len(parts) > 1 else name] = part.reshape(1) if part.dim() == 0 else part
        return found

    def metadata(self) -> dict[str, int]:
        return {name: value for name, value in vars(self.inner).items() if type(value) is int and "length" in name}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        pairs: dict[str, list[torch.Tensor]] = {}
        for name, tensor in storage.items():
            owner, _, part = name.partition(".")
            kept = tensor.detach().clone()
            scalar = owner == "cumulative_length" or (part == "1" and kept.numel() == 1)
            pairs.setdefault(owner, []).append(kept.reshape(()) if scalar else kept)
        for name, parts in pairs.items():
            setattr(self.inner, name, parts[0] if len(parts) == 1 else tuple(parts))
        for name, number in metadata.items():
            setattr(self.inner, name, number)
        self.inner.is_initialized = bool(storage)
        if storage:
            self.inner.device = next(iter(storage.values())).device

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        return Adapter(self.spec, self.config, self.context, copy.deepcopy(self.inner, memo), self.promised)

    def twin(self) -> Adapter:
        return Adapter(
            self.spec, self.config, self.context, BUILDERS[type(self.inner)](self.spec, self.context), self.promised
        )


EXACT = {"chunked_prefill": True, "unequal_head_dim": True, "early_init": True, "offloads": True, "lossless": True}


def dynamic(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    """DynamicLayer, or DynamicSlidingWindowLayer where the spec has a window."""
    promised = Capabilities(grows=True, slides=True, chunks=True, crops=True, records_past=True, compiles=True, **EXACT)
    kind = cache_utils.DynamicLayer if spec.window is None else cache_utils.DynamicSlidingWindowLayer
    return Adapter(spec, config, context, BUILDERS[kind](spec, context), promised)


def static(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    """StaticLayer, or StaticSlidingWindowLayer where the spec has a window."""
    promised = Capabilities(slides=True, chunks=True, crops=True, compiles=True, stable_address=True, **EXACT)
    kind = cache_utils.StaticLayer if spec.window is None else cache_utils.StaticSlidingWindowLayer
    return Adapter(spec, config, context, BUILDERS[kind](spec, context), promised)


def _quantized(kind: type, error: float, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    promised = Capabilities(
        grows=True, chunked_prefill=True, unequal_head_dim=True, early_init=True, offloads=True, relative_error=error
    )
    adapter = Adapter(spec, config, context, None, promised)
    if spec.window is not None:
        promise = "slides" if spec.attention == "sliding" else "chunks"
        raise adapter._refuse(f"a {spec.attention} layer [{promise}]", "Choose tf-dynamic")
    adapter.inner = BUILDERS[kind](spec, context)
    return adapter


def fp8(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    """Fp8QuantizedLayer; float8_e4m3fn has a rounding error of 1/16."""
    return _quantized(cache_utils.Fp8QuantizedLayer, 0.0625, spec, config, context)


def hqq(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    """HQQQuantizedLayer at 4 bits, with groups that divide the suite's smallest states."""
    return _quantized(cache_utils.HQQQuantizedLayer, 0.15, spec, config, context)


def quanto(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> Adapter:
    """QuantoQuantizedLayer at 4 bits, with groups that divide the suite's smallest states."""
    return _quantized(cache_utils.QuantoQuantizedLayer, 0.15, spec, config, context)


BUILDERS: dict[type, Any] = {
    cache_utils.DynamicLayer: lambda spec, context: cache_utils.DynamicLayer(),
    cache_utils.DynamicSlidingWindowLayer: lambda spec, context: cache_utils.DynamicSlidingWindowLayer(spec.window),
    cache_utils.StaticLayer: lambda spec, context: cache_utils.StaticLayer(context.max_length),
    cache_utils.StaticSlidingWindowLayer: lambda spec, context: cache_utils.StaticSlidingWindowLayer(
        context.max_length, spec.window
    ),
    cache_utils.Fp8QuantizedLayer: lambda spec, context: cache_utils.Fp8QuantizedLayer(),
    cache_utils.HQQQuantizedLayer: lambda spec, context: cache_utils.HQQQuantizedLayer(q_group_size=16),
    cache_utils.QuantoQuantizedLayer: lambda spec, context: cache_utils.QuantoQuantizedLayer(q_group_size=16),
}
