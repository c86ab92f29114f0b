"""kvrack-transformers: kvrack's backends in Hugging Face transformers.

    import kvrack_transformers as kt

    kt.enable()
    model.generate(**inputs, cache_implementation="dynamic", cache_config={"growth": 1.25})

Importing it imports neither torch nor transformers; what needs them is imported when asked for.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrack_transformers.cache import TransformersCache
    from kvrack_transformers.chat import Chat, Turn
    from kvrack_transformers.creating import create_cache, load, wrap
    from kvrack_transformers.dispatched import layer_devices
    from kvrack_transformers.enabling import disable, enable, is_enabled
    from kvrack_transformers.encoder_decoder import TransformersEncoderDecoderCache
    from kvrack_transformers.generating import generate
    from kvrack_transformers.identity import fingerprint
    from kvrack_transformers.reading import UnknownLayerType, model_spec

__version__ = version("kvrack-transformers")

_LATE = {
    "Chat": "kvrack_transformers.chat",
    "Turn": "kvrack_transformers.chat",
    "fingerprint": "kvrack_transformers.identity",
    "TransformersCache": "kvrack_transformers.cache",
    "TransformersEncoderDecoderCache": "kvrack_transformers.encoder_decoder",
    "UnknownLayerType": "kvrack_transformers.reading",
    "create_cache": "kvrack_transformers.creating",
    "disable": "kvrack_transformers.enabling",
    "enable": "kvrack_transformers.enabling",
    "generate": "kvrack_transformers.generating",
    "is_enabled": "kvrack_transformers.enabling",
    "layer_devices": "kvrack_transformers.dispatched",
    "load": "kvrack_transformers.creating",
    "model_spec": "kvrack_transformers.reading",
    "wrap": "kvrack_transformers.creating",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'kvrack_transformers' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


__all__ = [
    "Chat",
    "Turn",
    "fingerprint",
    "TransformersCache",
    "TransformersEncoderDecoderCache",
    "UnknownLayerType",
    "create_cache",
    "disable",
    "enable",
    "generate",
    "is_enabled",
    "layer_devices",
    "load",
    "model_spec",
    "wrap",
]
