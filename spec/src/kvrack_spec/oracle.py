"""The oracle: a cache so plain that it is evidently right. Concatenation, and nothing of kvrack's."""

from __future__ import annotations

import torch

TOKENS = 2


def shown(length: int, count: int, sinks: int = 0) -> list[int]:
    """Return the positions of `count` tokens out of `length`: the first `sinks`, then the newest."""
    first = min(sinks, count)
    return [*range(first), *range(length - count + first, length)]


class Oracle:
    """Every token given, ``[batch, heads, tokens, head_dim]``, and what a window of them shows, with
    the first `sinks` of the sequence before it.

    Keeps all tokens, also those that a window hides. `key_scale` and `value_scale`
    ``[batch, heads, 1, 1]`` are the largest magnitudes given so far, for bounds of lossy backends.
    """

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self.window = window
        self.sinks = sinks
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
        if self.window is None:
            return self.shown(self.length)
        return self.shown(min(self.length, self.sinks + self.window - 1 + new))

    def shown(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` tokens of keys and values: the sinks, then the newest."""
        positions = torch.tensor(shown(self.length, count, self.sinks), dtype=torch.long, device=self.keys.device)
        return self.keys.index_select(TOKENS, positions), self.values.index_select(TOKENS, positions)

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
        twin = Oracle(self.window, self.sinks)
        twin.__dict__.update(self.__dict__)  # tensors are replaced here, never written
        return twin
