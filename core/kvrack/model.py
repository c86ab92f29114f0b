"""What a model needs remembered, layer by layer, in kvrack's own words.

A bridge (such as kvrack-transformers) writes a `ModelSpec` from a framework's config; backends
read nothing else about the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

AttentionKind = Literal["full", "sliding", "chunked"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = ("full", "sliding", "chunked")


@dataclass(frozen=True)
class StateShape:
    """Shapes of one state of a layer: what the layer is given, of which it keeps a fixed part.

    Attributes:
        conv: channels and columns of the convolution state, None when there is none.
        recurrent: shape of the recurrent state without its batch dimension, None when there is none.
        recurrent_dtype: torch's name of its dtype, such as "float32"; None for that of keys and values.
    """

    conv: tuple[int, int] | None = None
    recurrent: tuple[int, ...] | None = None
    recurrent_dtype: str | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What one layer of a model must remember.

    A layer with attention keeps keys and values; one with states keeps fixed-size states (Mamba,
    linear attention, convolutions); a hybrid layer keeps both; one with neither keeps nothing (it
    reads another layer's keys and values, or has no attention at all).

    Attributes:
        attention: how the layer attends, None when it keeps no keys and values.
        window: tokens a query attends, itself included: the window of "sliding", the chunk size
            of "chunked". None for "full".
        kv_heads: key-value heads, None when only the first update will tell.
        key_head_dim: channels of a key, None when only the first update will tell.
        value_head_dim: channels of a value, which may differ from a key's (multi-head latent
            attention). None when only the first update will tell.
        states: how many states of each kind (convolution, recurrent) the layer keeps.
        state_shapes: the shapes of each of them, empty when only the first update will tell. They are
            for `kvrack.predict_memory`; the layer goes by what it is given.
        read_by_others: other layers read this one's returned tensors in the same step (KV
            sharing), so they stay valid to the end of the step.
        cross_attention: the keys and values are those of an encoder's output, given once and whole.
    """

    attention: AttentionKind | None = "full"
    window: int | None = None
    kv_heads: int | None = None
    key_head_dim: int | None = None
    value_head_dim: int | None = None
    states: int = 0
    state_shapes: tuple[StateShape, ...] = ()
    read_by_others: bool = False
    cross_attention: bool = False

    def __post_init__(self) -> None:
        if self.attention is not None and self.attention not in ATTENTION_KINDS:
            raise ValueError(
                f"LayerSpec.attention: expected one of {', '.join(ATTENTION_KINDS)} or None, got {self.attention!r}"
            )
        windowed = self.attention in ("sliding", "chunked")
        if windowed and (self.window is None or self.window < 1):
            raise ValueError(
                f"LayerSpec.window: a {self.attention} layer needs a window of 1 or more, got {self.window}"
            )
        if not windowed and self.window is not None:
            raise ValueError(f"LayerSpec.window: only sliding and chunked layers have one, got {self.window}")
        if self.cross_attention and (self.attention != "full" or self.states):
            raise ValueError("LayerSpec.cross_attention: such a layer attends to all of the encoder's output, no more")
        if self.states < 0:
            raise ValueError(f"LayerSpec.states: expected 0 or more, got {self.states}")

        if not self.states:
            # So that replace(spec, states=0) is what a hybrid layer's attention is built from.
            object.__setattr__(self, "state_shapes", ())
        if self.state_shapes and len(self.state_shapes) != self.states:
            raise ValueError(
                f"LayerSpec.state_shapes: expected one for each of {self.states} states, got {len(self.state_shapes)}"
            )

    @property
    def holds_nothing(self) -> bool:
        """Whether the layer keeps neither keys and values nor states."""
        return self.attention is None and self.states == 0


@dataclass(frozen=True)
class Shard:
    """Which part of a model's heads a process holds, where several processes (ranks) hold a part each.

    Attributes:
        rank: which of the parts, from 0.
        count: how many parts there are, 2 or more.
    """

    rank: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 2 or not 0 <= self.rank < self.count:
            raise ValueError(f"Shard: expected a rank from 0 of 2 or more, got rank {self.rank} of {self.count}")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count}"


@dataclass(frozen=True)
class ModelSpec:
    """What a whole model must remember, or one rank's part of it.

    Attributes:
        layers: one spec per layer, in order.
        further: spec of layers past the listed ones, created when first updated; None when
            `layers` is the whole model.
        cross_layers: the cross-attention layers of an encoder-decoder model, empty elsewhere; marked
            `LayerSpec.cross_attention`, whether given so or not.
        max_length: longest sequence the model was made for, None when unknown.
        name: the model's own name, for messages; it never decides anything.
        shard: which part of the heads this is, where the model is split over ranks (tensor parallelism):
            then the specs' `kv_heads` are this rank's. None for the whole model.
    """

    layers: tuple[LayerSpec, ...] = ()
    further: LayerSpec | None = None
    cross_layers: tuple[LayerSpec, ...] = ()
    max_length: int | None = None
    name: str = ""
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if not self.layers and self.further is None:
            raise ValueError("ModelSpec: no layers. List them in `layers`, or give `further` to create them on demand")
        if self.cross_layers and self.further is not None:
            raise ValueError("ModelSpec: layers on demand next to cross-attention layers. List them all in `layers`")
        marked = tuple(replace(layer, cross_attention=True) for layer in self.cross_layers)
        object.__setattr__(self, "cross_layers", marked)

    @classmethod
    def uniform(cls, count: int, layer: LayerSpec | None = None) -> ModelSpec:
        """Return the spec of `count` equal layers."""
        return cls(layers=(layer or LayerSpec(),) * count)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has cross-attention layers."""
        return bool(self.cross_layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data that `from_dict` turns back into an equal spec."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        """Return the spec that `to_dict` wrote. Raises TypeError or ValueError on anything else."""
        fields = dict(data)
        fields["layers"] = tuple(_layer(layer) for layer in fields.get("layers", ()))
        fields["cross_layers"] = tuple(_layer(layer) for layer in fields.get("cross_layers", ()))
        further = fields.get("further")
        fields["further"] = _layer(further) if further is not None else None
        shard = fields.get("shard")
        fields["shard"] = Shard(**shard) if shard is not None else None
        return cls(**fields)


def _layer(data: dict[str, Any]) -> LayerSpec:
    shapes = tuple(
        StateShape(
            conv=_tuple(shape.get("conv")),  # type: ignore[arg-type]
            recurrent=_tuple(shape.get("recurrent")),
            recurrent_dtype=shape.get("recurrent_dtype"),
        )
        for shape in data.get("state_shapes", ())
    )
    return LayerSpec(**{**data, "state_shapes": shapes})


def _tuple(numbers: list[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)
