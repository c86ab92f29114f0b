"""The oracle: a cache so plain that it is evidently right. Concatenation, and nothing of kvrack's."""

from __future__ import annotations

import torch

TOKENS = 2


class Oracle:
    """Every token given, ``[batch, heads, tokens, head_dim]``, and what a window of them shows.

    Keeps all tokens, also those that a window hides. `key_scale` and `value_scale`
    ``[batch, heads, 1, 1]`` are the largest magnitudes given so far, for bounds of lossy backends.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = self.key_scale = self.value_scale = torch.empty(0)
        self.length = 0

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [x.detach().abs().amax(dim=(2, 3), keepdim=True).float() for x in (keys, values)]
        if self.length == 0:
            self.keys, self.values, (self.key_scale, self.value_scale) = keys, values, scales
        else:
            self.keys = torch.cat([self.keys, keys], dim=TOKENS)
            self.values = torch.cat([self.values, values], dim=TOKENS)
            self.key_scale = torch.maximum(self.key_scale, scales[0])
            self.value_scale = torch.maximum(self.value_scale, scales[1])
        self.length += keys.shape[TOKENS]
        return self.visible(keys.shape[TOKENS])

    def visible(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention sees of keys and values after an update of `new` tokens."""
        count = self.length if self.window is None else min(self.length, self.window - 1 + new)
        return self.keys[:, :, self.length - count :], self.values[:, :, self.length - count :]

    def crop(self, tokens: int) -> None:
        kept = max(0, self.length + tokens)
        if kept:
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.length = kept

    def pick_rows(self, rows: torch.Tensor) -> None:
        """Keep the rows of these indices, in this order: reorder, repeat and select at once."""
        if self.length:
            self.keys, self.values = self.keys[rows], self.values[rows]
            self.key_scale, self.value_scale = self.key_scale[rows], self.value_scale[rows]

    def copy(self) -> Oracle:
        twin = Oracle(self.window)
        twin.__dict__.update(self.__dict__)  # tensors are replaced here, never written
        return twin
