"""What differs between transformers releases, in one place, found by looking at transformers itself.

Each name says what it decides and which release changed it, so that it can go when the oldest
supported release passes it.
"""

from __future__ import annotations

import functools
import inspect

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache as HFCache

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
