"""The layer that is held elsewhere: built in a placement of its own, and held in the way that it allows."""

from __future__ import annotations

from dataclasses import replace

from kvrack import BufferedLayer, BuildContext, LayerSpec, StateLayer, companions, resolve
from kvrack.layer import CacheLayer
from kvrack.preallocated import PreallocatedLayer
from kvrack_offload.config import PlaceConfig
from kvrack_offload.holds import BufferHold, Hold, StateHold, StorageHold
from kvrack_offload.prefetch import Places, Station


def build_inner(spec: LayerSpec, config: PlaceConfig, context: BuildContext) -> CacheLayer:
    """Return a new layer of the backend that `config` names, or of the companion that keeps states beside it.

    Raises what resolving and building it raise.
    """
    name, own = config.held
    return companions.build_layer(resolve(name, own), spec, context)


def make_hold(spec: LayerSpec, config: PlaceConfig, context: BuildContext) -> Hold[CacheLayer]:
    """Return such a layer in a placement of its own, held through its buffers if it asked for any, else through
    `storage()`."""
    places = context.shared.get(Places, Places)
    station = Station(places.prefetcher(context.scratch, config.tier, config.folder), context.origin)
    inner = build_inner(spec, config, replace(context, placement=station))
    if isinstance(inner, StateLayer):
        return StateHold(inner, station)
    # Core's layers ask for some of their buffers only when the first tokens come.
    asks = station.was_given_out or isinstance(inner, BufferedLayer | PreallocatedLayer)
    return (BufferHold if asks else StorageHold)(inner, station)
