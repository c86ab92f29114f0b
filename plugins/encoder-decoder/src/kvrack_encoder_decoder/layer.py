"""What `encoder-decoder` builds: the named backend's layers, and around those for an encoder's output a CrossLayer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from kvrack import AttentionLayer, BuildContext, CacheLayer, Capabilities, InvalidPlugin, LayerSpec, resolve
from kvrack.buffer import TOKENS
from kvrack.companions import build_layer
from kvrack.layer import Elsewhere, refuse_positive
from kvrack_encoder_decoder.config import EncoderDecoderConfig

LENGTH = "encoder_length"


def build(spec: LayerSpec, config: EncoderDecoderConfig, context: BuildContext) -> CacheLayer:
    """Return a layer by the backend that `config` names for this side of the model.

    Raises what the named backend raises.
    """
    if spec.cross_attention:
        return CrossLayer(spec, config, context)
    return build_layer(resolve(config.self_attention, config.self_attention_config), spec, context)


class CrossLayer(AttentionLayer):
    """What a decoder layer attends to of the encoder's output: given once and whole, read at every later step.

    It holds a layer of the named backend, which is built for as many tokens as the encoder's output
    has when that arrives, so that one that preallocates has exactly the room. The decoder's length,
    window and rollback say nothing about it.

    Attributes:
        inner: keeps the keys and values.
    """

    def __init__(self, spec: LayerSpec, config: EncoderDecoderConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._named = resolve(config.cross_attention, config.cross_attention_config)
        # Built at once, for some length, so that what the backend refuses is refused now.
        self._length = 1
        self.inner = self._build()

    def _build(self) -> AttentionLayer:
        context = replace(self.context, max_length=self._length)
        layer = build_layer(self._named, replace(self.spec, cross_attention=False), context)
        if not isinstance(layer, AttentionLayer):
            name = self._named.backend.name
            raise InvalidPlugin(name, "its layer", f"{type(layer).__name__} is not an AttentionLayer")
        return layer

    def _take_length(self, length: int) -> None:
        """Make the inner layer one for `length` tokens."""
        if length != self._length:
            self._length = length
            self.inner = self._build()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def is_compileable(self) -> bool:
        # It returns no unused slots; True, so that it decides nothing for the decoder's layers.
        return True

    # --- what a model asks ----------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of the encoder's whole output and return them.

        Raises UnsupportedOperation where there are some already; nothing is changed then.
        """
        if self.get_seq_length():
            raise self._refuse(
                "a second update of cross-attention", "The encoder's output is kept whole: call reset() for another one"
            )
        length = key_states.shape[TOKENS] if key_states.dim() > TOKENS else 0
        self._take_length(max(1, length))
        keys, values = self.inner.update(key_states, value_states)
        return keys.narrow(TOKENS, 0, length), values.narrow(TOKENS, 0, length)

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Do nothing: only the encoder's output says how many tokens to make room for."""

    def get_seq_length(self) -> int:
        return self.inner.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() or query_length, 0

    @property
    def keys(self) -> torch.Tensor | None:
        return self.inner.keys

    @property
    def values(self) -> torch.Tensor | None:
        return self.inner.values

    # --- what the decoder's tokens do not touch -------------------------------------------------

    def activate_past_recording(self) -> None:
        """Do nothing: the decoder's past is not kept here."""

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)

    def crop(self, tokens: int) -> None:
        """Remove nothing: the decoder's tokens are not kept here. Raises ValueError for a positive number."""
        self.check_crop(tokens)

    # --- the rest is the inner layer's ----------------------------------------------------------

    def reset(self) -> None:
        self.inner.reset()

    def offload(self) -> None:
        self.inner.offload()

    def prefetch(self) -> None:
        self.inner.prefetch()

    @property
    def is_initialized(self) -> bool:
        return self.inner.is_initialized

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def elsewhere(self) -> list[Elsewhere]:
        return self.inner.elsewhere()

    def storage(self) -> dict[str, torch.Tensor]:
        return self.inner.storage()

    def metadata(self) -> dict[str, int]:
        return {**self.inner.metadata(), LENGTH: self._length}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._take_length(metadata[LENGTH])
        self.inner.restore(storage, _without_length(metadata))

    def flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        tensors, metadata = self.inner.flatten()
        return tensors, {**metadata, LENGTH: self._length}

    def unflatten(self, tensors: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._take_length(metadata[LENGTH])
        self.inner.unflatten(tensors, _without_length(metadata))

    def fork(self, memo: dict[int, Any] | None = None) -> CrossLayer:
        memo = {} if memo is None else memo
        return self._copy(memo, self.inner.fork(memo))

    def __deepcopy__(self, memo: dict[int, Any]) -> CrossLayer:
        return self._copy(memo, copy.deepcopy(self.inner, memo))

    def _copy(self, memo: dict[int, Any], inner: AttentionLayer) -> CrossLayer:
        twin = self._empty_copy(memo)
        twin._length, twin.inner = self._length, inner
        return twin


def _without_length(metadata: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in metadata.items() if name != LENGTH}
