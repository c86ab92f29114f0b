"""Recipe: how a cache was built, as plain data that builds an equal, empty one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from kvrack.model import ModelSpec

if TYPE_CHECKING:
    from kvrack.cache import Cache


class Recipe(BaseModel):
    """All that a cache was built from. It survives JSON.

    Attributes:
        backend: name of the backend that builds the layers.
        name: the name it was asked for by, which may be an alias.
        config: the backend's config.
        max_length: tokens the whole use will need, None when unknown.
        model: what `ModelSpec.to_dict` wrote.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    backend: str
    name: str
    config: dict[str, Any]
    max_length: int | None
    model: dict[str, Any]

    def spec(self) -> ModelSpec:
        """Return what the model needs remembered. Raises TypeError or ValueError where it isn't a spec."""
        return ModelSpec.from_dict(self.model)

    def build(self) -> Cache:
        """Return a new, empty cache. Raises what `spec` and `kvrack.create_cache` raise."""
        from kvrack.cache import create_cache

        cache = create_cache(self.backend, self.spec(), self.max_length, **self.config)
        cache.name = self.name
        return cache
