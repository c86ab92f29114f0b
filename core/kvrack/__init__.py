"""kvrack: publish, choose and trust a KV cache for PyTorch language models.

Importing kvrack imports neither torch nor any plugin; what needs torch is imported when asked for.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvrack.backend import Backend, Capabilities
from kvrack.errors import (
    BackendLoadError,
    CapacityExceeded,
    DuplicateBackend,
    InvalidConfig,
    InvalidPlugin,
    KvrackError,
    MemoryRefused,
    MissingDependency,
    OffloadError,
    ShapeMismatch,
    SnapshotError,
    UnknownBackend,
    UnsupportedOperation,
)
from kvrack.events import CacheEvent, Listening, listen
from kvrack.hookspecs import hookimpl
from kvrack.model import LayerSpec, ModelSpec, Shard, StateShape
from kvrack.registry import BackendInfo, Resolved, backends, resolve

if TYPE_CHECKING:
    from kvrack.buffer import TokenBuffer
    from kvrack.buffered import BufferedLayer
    from kvrack.cache import Cache, create_cache
    from kvrack.codec import Codec, CodecConfig
    from kvrack.config import BackendConfig, LayoutConfig
    from kvrack.context import BuildContext
    from kvrack.hybrid import HybridLayer
    from kvrack.layer import AttentionLayer, CacheLayer, StateLayer
    from kvrack.placement import Placement
    from kvrack.preallocated import PreallocatedLayer
    from kvrack.predict import Prediction, predict_memory
    from kvrack.prefix import PrefixStats, PrefixStore
    from kvrack.snapshot import describe, load

__version__ = version("kvrack")

_LATE = {
    "AttentionLayer": "kvrack.layer",
    "BackendConfig": "kvrack.config",
    "BufferedLayer": "kvrack.buffered",
    "BuildContext": "kvrack.context",
    "Cache": "kvrack.cache",
    "CacheLayer": "kvrack.layer",
    "Codec": "kvrack.codec",
    "CodecConfig": "kvrack.codec",
    "HybridLayer": "kvrack.hybrid",
    "LayoutConfig": "kvrack.config",
    "PrefixStats": "kvrack.prefix",
    "PrefixStore": "kvrack.prefix",
    "Placement": "kvrack.placement",
    "PreallocatedLayer": "kvrack.preallocated",
    "Prediction": "kvrack.predict",
    "StateLayer": "kvrack.layer",
    "TokenBuffer": "kvrack.buffer",
    "create_cache": "kvrack.cache",
    "describe": "kvrack.snapshot",
    "load": "kvrack.snapshot",
    "predict_memory": "kvrack.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'kvrack' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


__all__ = [
    "AttentionLayer",
    "Backend",
    "BackendConfig",
    "BackendInfo",
    "BackendLoadError",
    "BufferedLayer",
    "BuildContext",
    "Cache",
    "CacheEvent",
    "CacheLayer",
    "Capabilities",
    "CapacityExceeded",
    "Codec",
    "CodecConfig",
    "DuplicateBackend",
    "HybridLayer",
    "InvalidConfig",
    "InvalidPlugin",
    "KvrackError",
    "LayerSpec",
    "LayoutConfig",
    "Listening",
    "MemoryRefused",
    "MissingDependency",
    "ModelSpec",
    "OffloadError",
    "Placement",
    "PrefixStats",
    "PrefixStore",
    "PreallocatedLayer",
    "Prediction",
    "Resolved",
    "ShapeMismatch",
    "Shard",
    "SnapshotError",
    "StateLayer",
    "StateShape",
    "TokenBuffer",
    "UnknownBackend",
    "UnsupportedOperation",
    "backends",
    "create_cache",
    "describe",
    "hookimpl",
    "listen",
    "load",
    "predict_memory",
    "resolve",
]
