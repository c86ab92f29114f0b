"""What differs between transformers releases, in one place, found by looking at transformers itself.

Each name says what it decides and which release changed it, so that it can go when the oldest
supported release passes it.
"""

from __future__ import annotations

import inspect

from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache as HFCache

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The keyword that carries the cache through a model: "past_key_values", from about 5.22 on "cache"."""

CROP_TAKES_LENGTH = "max_length" in inspect.signature(HFCache.crop).parameters
"""Whether generate calls crop with the length to keep (a positive number), as before about 5.15; now
it is the number of tokens to remove (a negative one)."""

VALIDATE_TAKES_USER_ATTRIBUTES = "user_set_attributes" in inspect.signature(GenerationConfig.validate).parameters
"""Whether GenerationConfig.validate has that argument: from about 5.7 on."""


def tokens_to_crop(given: int, held: int) -> int:
    """Return the argument of kvrack's crop (0 or negative) for what generate asked, with `held` tokens.

    Raises ValueError for a positive number where the release counts the tokens to remove.
    """
    if given <= 0:
        return given
    if not CROP_TAKES_LENGTH:
        raise ValueError(f"crop({given}): expected 0 or a negative number, the tokens to remove. Call crop({-given})")
    return min(0, given - held)
