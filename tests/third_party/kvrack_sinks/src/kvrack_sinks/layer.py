"""A sliding cache with attention sinks, after StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

Models put much of their attention on the first few tokens, whatever those say. A window that drops
them breaks generation; one that keeps them goes on.
"""

from __future__ import annotations

import torch
from pydantic import Field

from kvrack import (
    AttentionLayer,
    BackendConfig,
    BufferedLayer,
    BuildContext,
    Capabilities,
    LayerSpec,
    ShapeMismatch,
    UnsupportedOperation,
)

TOKENS = 2


class SinkConfig(BackendConfig):
    """Config of `sinks`."""

    n_sink: int = Field(default=4, ge=1, description="tokens from the start of the sequence that are always kept")
    window: int = Field(default=1024, ge=2, description="newest tokens that a query attends besides, itself included")


class Part(BufferedLayer):
    """Some of a layer's tokens, kept as kvrack's own layers keep them."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, slides=True, crops=True, records_past=True, lossless=True)


class SinkLayer(AttentionLayer):
    """The first `n_sink` tokens in one layer, the newest ``window - 1`` in another, given back side by side."""

    def __init__(self, spec: LayerSpec, config: SinkConfig, context: BuildContext) -> None:
        if spec.window is not None:
            promise = "slides" if spec.attention == "sliding" else "chunks"
            raise UnsupportedOperation(
                context.backend,
                f"a {spec.attention} layer [{promise}], whose mask would hide the sinks,",
                "Use 'dynamic' for this model",
            )
        super().__init__(spec, config, context)
        self._n_sink = config.n_sink
        self._window = config.window
        self._sinks = Part(spec, config, context)
        self._recent = Part(LayerSpec(attention="sliding", window=config.window), config, context)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=True,
            early_init=True,
            offloads=True,
            lossless=True,
            window=self._window,
            sinks=self._n_sink,
        )

    # --- tokens in, tokens out ------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[:-1] != value_states.shape[:-1]:
            raise ShapeMismatch(
                "keys and values: expected the same batch, heads and tokens, "
                f"got {tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        room = self._n_sink - self._sinks.get_seq_length()
        sink_keys, sink_values = self._sinks.update(key_states[:, :, :room], value_states[:, :, :room])
        keys, values = self._recent.update(key_states[:, :, room:], value_states[:, :, room:])
        return torch.cat([sink_keys, keys], dim=TOKENS), torch.cat([sink_values, values], dim=TOKENS)

    def get_seq_length(self) -> int:
        return self._sinks.get_seq_length() + self._recent.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # A mask takes slot j for position offset + j. The new tokens must get their true positions,
        # so the sinks get those just before the window: earlier than every query, as they are.
        sinks = self._sinks.get_seq_length()
        new = max(0, query_length - (self._n_sink - sinks))
        length, offset = self._recent.get_mask_sizes(new)
        return sinks + (query_length - new) + length, offset

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for part in (self._sinks, self._recent):
            part.early_initialization(batch_size, kv_heads, key_head_dim, value_head_dim, dtype, device)

    @property
    def keys(self) -> torch.Tensor | None:
        return _joined(self._sinks.keys, self._recent.keys)

    @property
    def values(self) -> torch.Tensor | None:
        return _joined(self._sinks.values, self._recent.values)

    # --- back again -----------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        self.record_past = True
        self._recent.activate_past_recording()

    @property
    def is_croppable(self) -> bool:
        return self._recent.get_seq_length() < 2 or self._recent.is_croppable

    def check_crop(self, tokens: int) -> None:
        self._recent.check_crop(tokens)

    def crop(self, tokens: int) -> None:
        recent = self._recent.get_seq_length()
        self._recent.crop(tokens)
        if -tokens > recent:
            self._sinks.crop(tokens + recent)

    def reset(self) -> None:
        self._sinks.reset()
        self._recent.reset()
        self._home = None

    # --- the whole state, from which kvrack derives copies, batch operations and files --------------

    def storage(self) -> dict[str, torch.Tensor]:
        sinks, recent = self._sinks.storage(), self._recent.storage()
        return {f"sinks.{name}": sinks[name] for name in sinks} | {f"recent.{name}": recent[name] for name in recent}

    def metadata(self) -> dict[str, int]:
        sinks, recent = self._sinks.metadata(), self._recent.metadata()
        return {f"sinks.{name}": sinks[name] for name in sinks} | {f"recent.{name}": recent[name] for name in recent}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        for name, part in (("sinks.", self._sinks), ("recent.", self._recent)):
            tensors = {key.removeprefix(name): storage[key] for key in storage if key.startswith(name)}
            numbers = {key.removeprefix(name): metadata[key] for key in metadata if key.startswith(name)}
            part.restore(tensors, numbers)
        self.record_past = self._recent.record_past


def _joined(sinks: torch.Tensor | None, recent: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None or recent is None else torch.cat([sinks, recent], dim=TOKENS)
