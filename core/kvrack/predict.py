"""How many bytes a cache will hold, before there is a model: by building it, and not by a formula.

The cache is built as ever and given its tokens on torch's meta device, which keeps shapes and no data.
So what is predicted is what the backend's own code allocates, a stranger's too. Where that code needs
data (it reads a number back, or writes to a file), two small caches are really filled, and their bytes
carried on in a straight line, which they are past a window and between whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvrack.cache import Cache, MemoryRow
from kvrack.errors import KvrackError
from kvrack.layer import AttentionLayer, StateLayer
from kvrack.model import LayerSpec, ModelSpec, StateShape
from kvrack.registry import Resolved, resolve

PERIOD = 1024
"""Tokens after which the bytes of blocks and tails repeat, of any block size that divides it."""


@dataclass(frozen=True)
class Prediction:
    """Bytes that a cache will hold.

    Attributes:
        rows: as `Cache.memory()` would return them; "meta" is the device that the states arrive on.
        unknown: layers, by index, of which the model spec doesn't say all they are given (shapes of states, or
            heads and head_dim): the bytes of that aren't in `rows`.
        is_constructed: whether the whole cache was built; else its bytes were carried on from small ones.
    """

    rows: tuple[MemoryRow, ...]
    unknown: tuple[int, ...] = ()
    is_constructed: bool = True

    @property
    def nbytes(self) -> int:
        """All bytes, wherever they are."""
        return sum(row.nbytes for row in self.rows)

    @property
    def resident(self) -> int:
        """Bytes on the device that the states arrive on."""
        return sum(row.nbytes for row in self.rows if row.device == "meta")


def predict_memory(
    name: str,
    model_spec: ModelSpec,
    tokens: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    encoder_tokens: int | None = None,
    **config: Any,
) -> Prediction:
    """Return what a cache built for `tokens` tokens holds once all but the last came at once, then that one.

    Args:
        name: a `cache_implementation` string.
        model_spec: what the model needs remembered, heads, head_dims and shapes of states included.
        tokens: prompt and answer together.
        batch: rows.
        dtype: of the states.
        encoder_tokens: length of the encoder's output; None for as many as `tokens`.
        **config: the backend's own keys, as in `cache_config`.

    Raises ValueError for fewer than one token or row, and what building and filling the cache raises.
    """
    if tokens < 1 or batch < 1:
        raise ValueError(f"predict_memory: expected 1 or more tokens and rows, got {tokens} and {batch}")
    use = _Use(name, resolve(name, config), model_spec, batch, dtype, encoder_tokens)
    unknown = tuple(i for i, spec in enumerate(use.specs) if not _is_known(spec))
    try:
        return Prediction(tuple(use.constructed(tokens)), unknown)
    except KvrackError:
        raise
    except (RuntimeError, NotImplementedError, OSError, TypeError, ValueError):
        # Whatever a backend's code raises for want of data, a cache with data tells.
        return Prediction(tuple(use.carried_on(tokens)), unknown, is_constructed=False)


@dataclass(frozen=True)
class _Use:
    name: str
    resolved: Resolved
    model_spec: ModelSpec
    batch: int
    dtype: torch.dtype
    encoder_tokens: int | None

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.model_spec.layers, *self.model_spec.cross_layers)

    def constructed(self, tokens: int) -> list[MemoryRow]:
        """Return the memory of a cache on the meta device; of layers alike, the first and the last are filled.

        Where those two differ, as where a backend holds some layers elsewhere, all are.
        """
        alike: dict[LayerSpec, list[int]] = {}
        for index, spec in enumerate(self.specs):
            alike.setdefault(spec, []).append(index)
        meta = torch.device("meta")
        rows = self.held(tokens, meta, {index for group in alike.values() for index in (group[0], group[-1])})
        shared = [row for row in rows if row.role.startswith("scratch")]
        found = list(shared)
        for group in alike.values():
            first, last = (self._of_layer(rows, index) for index in (group[0], group[-1]))
            if [(row.role, row.device, row.nbytes) for row in first] != [
                (row.role, row.device, row.nbytes) for row in last
            ]:
                return self.held(tokens, meta)
            found += [replace(row, layer=index) for index in group for row in first]
        return sorted(found, key=lambda row: row.layer)

    def _of_layer(self, rows: list[MemoryRow], index: int) -> list[MemoryRow]:
        return [row for row in rows if row.layer == index and not row.role.startswith("scratch")]

    def held(self, tokens: int, device: torch.device, filled: set[int] | None = None) -> list[MemoryRow]:
        """Return the memory of a cache whose layers `filled` (None for all) were given so many tokens on `device`."""
        cache = Cache(self.resolved, self.model_spec, self.name, tokens)
        encoded = self.encoder_tokens or tokens
        for new in (tokens - 1, 1):
            for index, spec in enumerate(self.specs):
                if filled is not None and index not in filled:
                    continue
                layer = cache.layers[index]
                if isinstance(layer, StateLayer):
                    for state, shape in enumerate(spec.state_shapes):
                        self._give_state(layer, state, shape, new, device)
                if not isinstance(layer, AttentionLayer) or not _has_shape(spec):
                    continue
                if not spec.cross_attention:
                    if new:
                        cache.update(*self._states(spec, new, device), index)
                elif new == 1:
                    cache.update(*self._states(spec, encoded, device), index)
        rows = cache.memory()
        if any(layer.elsewhere() for layer in cache.layers) and device.type == "meta":
            raise NotImplementedError("what is held elsewhere needs data")
        return rows

    def _states(self, spec: LayerSpec, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        assert spec.kv_heads is not None
        assert spec.key_head_dim is not None
        assert spec.value_head_dim is not None
        shape = (self.batch, spec.kv_heads, tokens)
        keys = torch.zeros((*shape, spec.key_head_dim), dtype=self.dtype, device=device)
        return keys, torch.zeros((*shape, spec.value_head_dim), dtype=self.dtype, device=device)

    def _give_state(self, layer: StateLayer, index: int, shape: StateShape, tokens: int, device: torch.device) -> None:
        if not tokens:
            return
        if shape.conv is not None:
            channels, columns = shape.conv
            states = torch.zeros((self.batch, channels, tokens), dtype=self.dtype, device=device)
            layer.update_conv_state(states, index, columns)
        if shape.recurrent is not None:
            dtype = getattr(torch, shape.recurrent_dtype) if shape.recurrent_dtype else self.dtype
            layer.update_recurrent_state(torch.zeros((self.batch, *shape.recurrent), dtype=dtype, device=device), index)

    def carried_on(self, tokens: int) -> list[MemoryRow]:
        """Return the memory for `tokens`, in a straight line from two shorter uses where they are shorter."""
        window = max((spec.window or 0 for spec in self.specs), default=0)
        first = (window // PERIOD + 1) * PERIOD + tokens % PERIOD
        second = first + PERIOD
        cpu = torch.device("cpu")
        if tokens <= second:
            return [_on_device(row, row.nbytes) for row in self.held(tokens, cpu)]
        below, above = _added(self.held(first, cpu)), _added(self.held(second, cpu))
        steps = (tokens - first) // PERIOD
        return [_on_device(row, row.nbytes + steps * (above[key].nbytes - row.nbytes)) for key, row in below.items()]


def _added(rows: list[MemoryRow]) -> dict[tuple[int, str, str], MemoryRow]:
    """Return rows by layer, role and device, as which there are several of scratch, added up."""
    found: dict[tuple[int, str, str], MemoryRow] = {}
    for row in rows:
        key = (row.layer, row.role, row.device)
        found[key] = replace(row, nbytes=row.nbytes + (found[key].nbytes if key in found else 0))
    return found


def _has_shape(spec: LayerSpec) -> bool:
    return None not in (spec.kv_heads, spec.key_head_dim, spec.value_head_dim)


def _is_known(spec: LayerSpec) -> bool:
    return len(spec.state_shapes) == spec.states and (spec.attention is None or _has_shape(spec))


def _on_device(row: MemoryRow, nbytes: int) -> MemoryRow:
    return MemoryRow(row.layer, row.role, "meta" if row.device == "cpu" else row.device, nbytes)
