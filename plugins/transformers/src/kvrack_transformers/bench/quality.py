"""How far a cache's answers are from the dense one's, and how well they foretell a real text."""

from __future__ import annotations

import math

import torch

from kvrack import KvrackError


class NotFinite(KvrackError):
    """A model's answers through a cache are no numbers."""


class Dense:
    """The dense cache's answers at one step, ready to be compared with.

    Args:
        logits: ``[rows, vocabulary]``.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.log_probabilities = logits.float().log_softmax(-1)
        self.probabilities = self.log_probabilities.exp()
        self.likeliest = logits.argmax(-1)


class Quality:
    """The sums over the steps of one cache."""

    def __init__(self) -> None:
        self._answers = 0
        self._kl = 0.0
        self._surprise = 0.0
        self._agreeing = 0

    def add(self, logits: torch.Tensor, dense: Dense, following: torch.Tensor) -> None:
        """Take in the answers ``[rows, vocabulary]`` of one step.

        Args:
            logits: the cache's.
            dense: the dense cache's.
            following: the tokens that the text really goes on with, ``[rows]``.

        Raises NotFinite where an answer is NaN or infinite.
        """
        seen = logits.float().log_softmax(-1)
        kl = (dense.probabilities * (dense.log_probabilities - seen)).sum(-1)
        surprise = -seen.gather(-1, following[:, None])[:, 0]
        if not bool((torch.isfinite(kl) & torch.isfinite(surprise)).all()):
            raise NotFinite("the model's answers through this cache are not finite numbers")
        self._answers += logits.shape[0]
        self._kl += float(kl.double().sum())
        self._surprise += float(surprise.double().sum())
        self._agreeing += int((logits.argmax(-1) == dense.likeliest).sum())

    @property
    def kl(self) -> float | None:
        """Mean KL(dense || cache) in nats, 0 where rounding made it negative."""
        return max(0.0, self._kl / self._answers) if self._answers else None

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(700.0, self._surprise / self._answers)) if self._answers else None

    @property
    def agreement(self) -> float | None:
        """Share of answers whose likeliest token is the dense cache's."""
        return self._agreeing / self._answers if self._answers else None
