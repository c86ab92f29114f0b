"""Keys and values concatenated, in tensors of the layer's own."""

from __future__ import annotations

import torch

from kvrack import AttentionLayer, Capabilities
from kvrack.layer import refuse_positive


class StrangerLayer(AttentionLayer):
    """Full attention over two tensors."""

    _held: dict[str, torch.Tensor]

    def __init__(self, spec, config, context) -> None:
        super().__init__(spec, config, context)
        self._held = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, chunked_prefill=True, crops=True, records_past=True, lossless=True)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for name, states in (("keys", key_states), ("values", value_states)):
            past = [self._held[name]] if name in self._held else []
            self._held[name] = torch.cat([*past, states.detach()], dim=2)
        return self._held["keys"], self._held["values"]

    def early_initialization(self, batch_size, kv_heads, key_head_dim, value_head_dim, dtype, device) -> None:
        raise self._refuse("early_initialization [early_init]", "Choose dynamic")

    def get_seq_length(self) -> int:
        return self._held["keys"].shape[2] if self._held else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        left = max(0, self.get_seq_length() + tokens)
        self._held = {name: tensor[:, :, :left] for name, tensor in self._held.items()}

    def reset(self) -> None:
        self._held = {}

    def storage(self) -> dict[str, torch.Tensor]:
        return dict(self._held)

    def metadata(self) -> dict[str, int]:
        return {}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._held = {name: tensor.detach().clone() for name, tensor in storage.items()}
