"""Trie: values by sequences of tokens, found by how many first tokens they share with another sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")
Tokens = tuple[int, ...]


class _Node(Generic[V]):
    """A run of tokens that nothing branches off, and what ends or goes on behind it."""

    __slots__ = ("children", "label", "value")

    def __init__(self, label: Tokens, value: V | None = None) -> None:
        self.label = label
        self.value = value
        self.children: dict[int, _Node[V]] = {}

    def values(self) -> Iterator[V]:
        """Yield the values that end here or further on."""
        pending = [self]
        while pending:
            node = pending.pop()
            if node.value is not None:
                yield node.value
            pending.extend(node.children.values())


class Trie(Generic[V]):
    """A radix tree: one node for each run of tokens between two branches, so that long sequences cost few nodes."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(())

    def insert(self, tokens: Tokens, value: V) -> V | None:
        """Keep `value` for `tokens`; return what was kept for them before."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                node.children[tokens[at]] = _Node(tokens[at:], value)
                return None
            shared = _shared(child.label, tokens, at)
            if shared < len(child.label):
                node.children[tokens[at]] = child = _split(child, shared)
            node, at = child, at + shared
        former, node.value = node.value, value
        return former

    def remove(self, tokens: Tokens) -> None:
        """Forget what is kept for `tokens`. Raises KeyError where nothing is."""
        path, at = [self._root], 0
        while at < len(tokens):
            child = path[-1].children.get(tokens[at])
            if child is None or _shared(child.label, tokens, at) < len(child.label):
                raise KeyError(tokens)
            path.append(child)
            at += len(child.label)
        if path[-1].value is None:
            raise KeyError(tokens)
        path[-1].value = None
        for parent, node in zip(reversed(path[:-1]), reversed(path), strict=False):
            if node.value is not None or len(node.children) > 1:
                break
            if node.children:
                (only,) = node.children.values()
                only.label = node.label + only.label
                parent.children[node.label[0]] = only
                break
            del parent.children[node.label[0]]

    def nearest(self, tokens: Tokens) -> Iterator[tuple[int, V]]:
        """Yield the values kept for sequences that begin as `tokens` does, and how many tokens they share.

        The most first; of those that share as many, one that ends there before longer ones.
        """
        path: list[tuple[_Node[V], int]] = [(self._root, 0)]
        behind: _Node[V] | None = None
        while True:
            node, at = path[-1]
            child = node.children.get(tokens[at]) if at < len(tokens) else None
            if child is None:
                break
            shared = _shared(child.label, tokens, at)
            if shared < len(child.label):
                for value in child.values():
                    yield at + shared, value
                behind = child
                break
            path.append((child, at + shared))
        for node, at in reversed(path):
            if at == 0:
                return
            if node.value is not None:
                yield at, node.value
            for child in node.children.values():
                if child is not behind:
                    for value in child.values():
                        yield at, value
            behind = node


def _shared(label: Tokens, tokens: Tokens, start: int) -> int:
    """Return how many first tokens of `label` are those of `tokens` from `start` on."""
    given = tokens[start : start + len(label)]
    if given == label:
        return len(label)
    return next((i for i, (one, other) in enumerate(zip(label, given, strict=False)) if one != other), len(given))


def _split(node: _Node[V], at: int) -> _Node[V]:
    """Return a node for the first `at` tokens of `node`, before it."""
    before: _Node[V] = _Node(node.label[:at])
    node.label = node.label[at:]
    before.children[node.label[0]] = node
    return before
