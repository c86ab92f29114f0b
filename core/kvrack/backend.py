"""What a plugin offers (`Backend`) and what a built layer promises (`Capabilities`).

This module imports no torch: a plugin's entry-point module builds a `Backend` from strings, and
what the strings name is imported when a cache is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrack.errors import InvalidPlugin

if TYPE_CHECKING:
    from kvrack.config import BackendConfig
    from kvrack.context import BuildContext
    from kvrack.layer import CacheLayer
    from kvrack.model import LayerSpec


def _promise(text: str, default: bool = False) -> bool:
    # Kept in the field's metadata, so that a promise and its meaning stand on one line.
    return field(default=default, metadata={"promise": text})


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a built layer promises. The conformance suite tests both ways.

    A promise that is True must hold; one that is False must be refused with
    `UnsupportedOperation`, whose text names the field. It is read from the *built* layer, since
    config may decide.
    """

    grows: bool = _promise("takes any number of tokens; otherwise a capacity is enforced before anything is written")
    slides: bool = _promise("builds sliding-window layers, holding window - 1 tokens between updates")
    chunks: bool = _promise("builds chunked-attention layers")
    chunked_prefill: bool = _promise("takes several tokens at once on a layer that already holds some")
    unequal_head_dim: bool = _promise("takes keys and values of different head_dim")
    crops: bool = _promise("crop(-n) leaves what feeding n tokens fewer would have left")
    records_past: bool = _promise("activate_past_recording() lets crop go back past a window or a state")
    early_init: bool = _promise("early_initialization() allocates before the first update")
    offloads: bool = _promise("offload() and prefetch() move everything the layer owns and bring it back")
    compiles: bool = _promise("update() traces under torch.compile without a graph break")
    stable_address: bool = _promise("its tensors keep their address from the first allocation on")
    lossless: bool = _promise("returns bit-identical tensors to plain concatenation")
    relative_error: float = 0.0
    """Bound on |returned - given| relative to the largest magnitude given so far in the same batch
    row and head; 0.0 where `lossless`. A token that a crop cut out of its encoded block is encoded
    again, which may add the bound once more."""
    window: int | None = None
    """Tokens that a query of a *full* layer attends at most, itself included, besides the first
    `sinks`; None where every token stays visible. A sliding layer's window is the model's."""
    sinks: int = 0
    """Tokens from the start of the sequence that stay visible besides the window."""

    def __post_init__(self) -> None:
        if self.lossless and self.relative_error != 0.0:
            raise ValueError(
                f"Capabilities: lossless, yet relative_error is {self.relative_error}; declare one of them"
            )
        if self.sinks and self.window is None:
            raise ValueError(f"Capabilities: sinks is {self.sinks}, yet every token stays visible; declare the window")
        if not self.lossless and not self.relative_error > 0.0:
            raise ValueError("Capabilities: not lossless, so relative_error must say its bound (above 0)")

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Return the name of each promise and what it means, in order."""
        return {f.name: f.metadata["promise"] for f in fields(cls) if "promise" in f.metadata}


def import_object(path: str) -> Any:
    """Return the object that ``"module:attribute"`` names. Raises what the import raises."""
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError(f"expected 'module:attribute', got {path!r}")
    return getattr(import_module(module), attribute)


def swallows_arguments(function: Callable[..., Any]) -> str | None:
    """Return the name of a ``*args`` or ``**kwargs`` parameter of `function`, None without one."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            return str(parameter)
    return None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a plugin offers under one name.

    Attributes:
        name: the `cache_implementation` string; equals the entry point's name.
        summary: one line, shown by ``kvrack backends``.
        layer: ``"module:callable"``, called as ``callable(spec, config, context)`` for each layer
            of a model that attends or keeps states; returns a `CacheLayer`. Imported when built.
        codec: instead of `layer`, ``"module:class"`` of the `Codec` subclass that encodes the keys
            and values of an `EncodedLayer`. Imported when built.
        config: ``"module:class"`` of the `BackendConfig` subclass that validates `cache_config`.
        requires: requirements the layer's module needs, as pip takes them (``"hqq>=0.2"``);
            checked when the name is resolved.
        states: whether `layer` builds layers that keep states. Where it doesn't, a companion does,
            and holds this backend's layers where a layer attends too; see `kvrack.companions`.
        cross_attention: whether `layer` builds cross-attention layers. Where it doesn't, a
            companion does, which holds this backend's.
    """

    name: str
    summary: str
    layer: str | None = None
    codec: str | None = None
    config: str = "kvrack.config:BackendConfig"
    requires: tuple[str, ...] = ()
    states: bool = False
    cross_attention: bool = False

    def __post_init__(self) -> None:
        if (self.layer is None) == (self.codec is None):
            given = "neither" if self.layer is None else "both"
            raise InvalidPlugin(self.name, "its Backend", f"expected exactly one of layer= and codec=, got {given}")

    def config_class(self) -> type[BackendConfig]:
        """Return the config class. Raises InvalidPlugin when it is not a `BackendConfig`."""
        from kvrack.config import BackendConfig, LayoutConfig

        # A codec without keys of its own still takes those of the layout.
        found = import_object(self.config)
        if found is BackendConfig and self.codec is not None:
            return LayoutConfig
        if not (isinstance(found, type) and issubclass(found, BackendConfig)):
            raise InvalidPlugin(self.name, self.config, "its config must be a subclass of kvrack.config.BackendConfig")
        return found

    def build_layer(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
        """Return a new, empty layer. Nothing is allocated.

        Raises UnsupportedOperation when the backend refuses this kind of layer, InvalidPlugin when
        the builder swallows arguments or returns something else than a layer, or when `codec` names
        no codec.
        """
        from kvrack.layer import CacheLayer

        if self.codec is not None:
            return self._build_encoded(self.codec, spec, config, context)
        assert self.layer is not None
        builder = self._explicit(self.layer, "builder", "name spec, config and context")
        layer = builder(spec, config, context)
        if not isinstance(layer, CacheLayer):
            raise InvalidPlugin(self.name, self.layer, f"its builder returned {type(layer).__name__}, not a CacheLayer")
        return layer

    def _build_encoded(self, path: str, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
        from kvrack.codec import Codec
        from kvrack.encoded import build_encoded

        codec = self._explicit(path, "constructor", "name config and role")
        if not (isinstance(codec, type) and issubclass(codec, Codec)):
            raise InvalidPlugin(self.name, path, "its codec must be a subclass of kvrack.codec.Codec")
        return build_encoded(spec, config, replace(context, codec=codec))

    def _explicit(self, path: str, what: str, remedy: str) -> Callable[..., Any]:
        found: Callable[..., Any] = import_object(path)
        if swallowed := swallows_arguments(found):
            raise InvalidPlugin(self.name, path, f"its {what} swallows arguments ({swallowed}); {remedy}")
        return found
