"""What `mamba` builds for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from kvrack import AttentionLayer, BuildContext, CacheLayer, HybridLayer, InvalidPlugin, LayerSpec, resolve
from kvrack.companions import build_layer
from kvrack_mamba.config import MambaConfig
from kvrack_mamba.states import FixedStateLayer


def build(spec: LayerSpec, config: MambaConfig, context: BuildContext) -> CacheLayer:
    """Return a layer of states, of attention by the backend that `config` names, or of both.

    Raises what the named backend raises.
    """
    if not spec.states:
        return _attention_layer(spec, config, context)
    states = FixedStateLayer(LayerSpec(attention=None, states=spec.states), config, context)
    if spec.attention is None:
        return states
    attention = _attention_layer(replace(spec, states=0), config, context)
    return HybridLayer(spec, config, context, attention, states)


def _attention_layer(spec: LayerSpec, config: MambaConfig, context: BuildContext) -> AttentionLayer:
    layer = build_layer(resolve(config.attention, config.attention_config), spec, context)
    if not isinstance(layer, AttentionLayer):
        raise InvalidPlugin(config.attention, "its layer", f"{type(layer).__name__} is not an AttentionLayer")
    return layer
