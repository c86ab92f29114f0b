"""The backend under test, built as a user builds it, and the states it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import kvrack
from kvrack.backend import Capabilities
from kvrack.layer import AttentionLayer, StateLayer
from kvrack.model import LayerSpec, ModelSpec

CAPACITY = 512
"""Tokens that caches are built for: more than any check but those of capacity gives."""

WINDOW = 6
"""Window of the sliding and chunked layers that checks build, small enough to be passed soon."""

KINDS = ("full", "sliding", "chunked")
PROMISE_OF_KIND = {"sliding": "slides", "chunked": "chunks"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_spec(kind: str = "full", **fields: Any) -> LayerSpec:
    """Return the spec of a layer of this kind, of `WINDOW` tokens where it has a window."""
    if kind == "full":
        return LayerSpec(**fields)
    return LayerSpec(attention=kind, window=fields.pop("window", WINDOW), **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shape:
    """Batch, heads, head_dims and dtype of states."""

    batch: int = 3
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch}x{self.heads}x{self.key_dim}+{self.value_dim}-{dtype}"


SHAPES = tuple(
    Shape(batch, heads, head_dim, head_dim, dtype)
    for dtype in DTYPES
    for batch in (1, 3)
    for heads in (1, 3)
    for head_dim in (16, 64)
)


@dataclass(frozen=True)
class Subject:
    """A backend by name, the settings it is tested with, and the device its states are on.

    `quick` asks for shorter random sequences.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    quick: bool = False

    def cache(self, *specs: LayerSpec, max_length: int | None = CAPACITY, **fields: Any) -> kvrack.Cache:
        """Return a new cache of these layers (one full layer without any), through the real entry point."""
        model = ModelSpec(layers=specs or (LayerSpec(),), **fields)
        return kvrack.create_cache(self.name, model, max_length, **self.settings)

    def layer(self, kind: str = "full", max_length: int | None = CAPACITY, **fields: Any) -> AttentionLayer:
        """Return a new attention layer."""
        layer = self.cache(layer_spec(kind, **fields), max_length=max_length).layers[0]
        assert isinstance(layer, AttentionLayer), f"{type(layer).__name__} is not an AttentionLayer"
        return layer

    def state_layer(self, states: int = 2) -> StateLayer | None:
        """Return a new state layer, None where the backend leaves states to a companion."""
        if not kvrack.resolve(self.name, self.settings).backend.states:
            return None
        layer = self.cache(LayerSpec(attention=None, states=states)).layers[0]
        assert isinstance(layer, StateLayer), f"{type(layer).__name__} is not a StateLayer"
        return layer

    def serves(self, kind: str) -> bool:
        """Whether layers of this kind are promised."""
        return kind == "full" or bool(getattr(self.capabilities(), PROMISE_OF_KIND[kind]))

    def capabilities(self, kind: str = "full") -> Capabilities:
        """Return what a layer of this kind promises."""
        return self.layer(kind).capabilities

    def states(self, tokens: int, shape: Shape = Shape(), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random keys and values, the same for the same arguments."""
        generator = torch.Generator().manual_seed(1000 * seed + tokens)
        made = []
        for head_dim in (shape.key_dim, shape.value_dim):
            states = torch.randn(shape.batch, shape.heads, tokens, head_dim, generator=generator)
            made.append(states.to(self.device, shape.dtype))
        return made[0], made[1]

    def filled(
        self,
        kind: str = "full",
        prefill: int = 9,
        steps: int = 3,
        shape: Shape = Shape(),
        record: bool = False,
    ) -> AttentionLayer:
        """Return a layer that was given `prefill` tokens and then `steps` single ones."""
        layer = self.layer(kind)
        if record:
            layer.activate_past_recording()
        self.fill(layer, prefill, steps, shape)
        return layer

    def fill(self, layer: AttentionLayer, prefill: int, steps: int, shape: Shape = Shape()) -> None:
        """Give `layer` the tokens that `filled` gives."""
        if prefill:
            layer.update(*self.states(prefill, shape))
        for step in range(steps):
            layer.update(*self.states(1, shape, seed=step + 1))
