"""What differs between transformers releases, in one place, found by looking at transformers itself.

Each name says what it decides and which release changed it, so that it can go when the oldest
supported release passes it. `DEPRECATIONS` lists what transformers itself is about to remove, with the
release that it names for that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache as HFCache


@dataclass(frozen=True)
class Deprecation:
    """A name that transformers replaces, and that kvrack therefore has to know under both.

    Attributes:
        old: the name, of a keyword, a method or a parameter.
        new: what takes its place.
        since: the first release, about, that has `new`.
        removed_in: the releases that transformers names for the end of `old`, in its various functions.
        here: what of this bridge goes then.
    """

    old: str
    new: str
    since: str
    removed_in: tuple[str, ...]
    here: str


DEPRECATIONS = (
    Deprecation("past_key_values", "cache", "5.22", ("5.40.0", "6.0.0"), "CACHE_ARGUMENT"),
    Deprecation("cache_params", "cache", "5.22", ("5.40.0", "6.0.0"), "PURE_STATE_ARGUMENT"),
    Deprecation("crop(max_length)", "crop(tokens_to_remove)", "5.15", ("5.15",), "CROP_TAKES_LENGTH"),
    Deprecation("get_max_cache_shape", "get_max_length", "5.13", ("5.13",), "OwnsRack.get_max_cache_shape"),
)
"""What kvrack answers by two names. Of `get_mask_sizes` there is one form, ``(query_length, layer_idx)``, in every
release that is supported."""

CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
"""Under which keywords a cache may be given; see `given_caches`."""

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The keyword that carries the cache through a model: "past_key_values", from about 5.22 on "cache"."""

PURE_STATE_ARGUMENT = "cache_params"
"""The keyword of models that keep states alone, before about 5.22."""

CROP_TAKES_LENGTH = "max_length" in inspect.signature(HFCache.crop).parameters
"""Whether generate calls crop with the length to keep (a positive number), as before about 5.15; now
it is the number of tokens to remove (a negative one)."""

READS_STATES_FROM_LAYERS = not hasattr(HFCache, "get_conv_state")
"""Whether models read a layer's states as its attributes, as before about 5.21; now they ask the cache."""

STATES_HAVE_INDICES = "state_idx" in inspect.signature(HFCache.update_conv_state).parameters
"""Whether those attributes are dicts by the state's index; before about 5.14 each is the one state."""

RETURNS_WHOLE_CONV_STATE = (
    "conv_kernel_size" in inspect.signature(cache_utils.LinearAttentionLayer.update_conv_state).parameters
)
"""Whether `update_conv_state` returns the columns held before and the new ones; before about 5.14 it
returned the state alone, as wide as the kernel."""

RECORDS_STATES = hasattr(HFCache, "is_recording_past")
"""Whether models give every convolution input to the cache while past is recorded: from about 5.21 on.
Before, some wrote to the state in place, or gave the prompt cut to the kernel's width."""

VALIDATE_TAKES_USER_ATTRIBUTES = "user_set_attributes" in inspect.signature(GenerationConfig.validate).parameters
"""Whether GenerationConfig.validate has that argument: from about 5.7 on."""


def given_caches(settings: Mapping[str, Any]) -> list[str]:
    """Return under which keywords of a call a cache is given."""
    return [name for name in CACHE_ARGUMENTS if settings.get(name) is not None]


def states_are_hidden(tokens: int) -> str | None:
    """Return how to name a crop of states that models don't report to the cache, None where they do."""
    return None if RECORDS_STATES else f"crop({tokens}) of states in transformers before 5.21"


@functools.cache
def caches_latents() -> bool:
    """Return whether multi-head latent attention caches the latent and the rotary part: in 5.24, in all its families;
    up to 5.13 it cached keys and values expanded from them."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    return hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")


def cache_argument(model: PreTrainedModel) -> str:
    """Return the keyword that carries the cache through this model."""
    taken = inspect.signature(model.forward).parameters
    return CACHE_ARGUMENT if CACHE_ARGUMENT in taken or PURE_STATE_ARGUMENT not in taken else PURE_STATE_ARGUMENT


def tokens_to_crop(given: int, held: int) -> int:
    """Return the argument of kvrack's crop (0 or negative) for what generate asked, with `held` tokens.

    Raises ValueError for a positive number where the release counts the tokens to remove.
    """
    if given <= 0:
        return given
    if not CROP_TAKES_LENGTH:
        raise ValueError(f"crop({given}): expected 0 or a negative number, the tokens to remove. Call crop({-given})")
    return min(0, given - held)
