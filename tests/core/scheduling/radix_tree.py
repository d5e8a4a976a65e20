"""An independent reference for prefix reuse: a radix tree over tokens, with least-recently-used leaves evicted first."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    tokens: list[int]
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    used: int = 0


class RadixTree:
    """Holds token sequences; ``capacity`` in tokens (None = endless)."""

    def __init__(self, capacity: int | None = None) -> None:
        self.root = Node([])
        self.capacity = capacity
        self.size = 0
        self.clock = 0

    def match(self, tokens: list[int]) -> int:
        """The length of the longest stored prefix of ``tokens``, which counts as used now."""
        self.clock += 1
        node, length = self.root, 0
        while length < len(tokens) and (child := node.children.get(tokens[length])) is not None:
            common = _common(child.tokens, tokens, length)
            child.used = self.clock
            length += common
            if common < len(child.tokens):
                break
            node = child
        return length

    def insert(self, tokens: list[int]) -> None:
        """Store a sequence; evict until it fits."""
        self.clock += 1
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                child = Node(tokens[length:], node, used=self.clock)
                node.children[tokens[length]] = child
                self.size += len(child.tokens)
                break
            common = _common(child.tokens, tokens, length)
            if common < len(child.tokens):
                child = self._split(child, common)
            child.used = self.clock
            length += common
            node = child
        while self.capacity is not None and self.size > self.capacity:
            self._evict()

    def _split(self, node: Node, at: int) -> Node:
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.parent, {node.tokens[at]: node}, node.used)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        return upper

    def _evict(self) -> None:
        """Cut the least recently used leaf, from its end, by as much as is too much."""
        leaves, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.parent is not None:
                leaves.append(node)
        leaf = min(leaves, key=lambda node: node.used)
        assert self.capacity is not None
        surplus = min(self.size - self.capacity, len(leaf.tokens))
        self.size -= surplus
        assert leaf.parent is not None
        if surplus == len(leaf.tokens):
            del leaf.parent.children[leaf.tokens[0]]
        else:
            leaf.tokens = leaf.tokens[:-surplus]


def _common(edge: list[int], tokens: list[int], start: int) -> int:
    length = 0
    while length < len(edge) and start + length < len(tokens) and edge[length] == tokens[start + length]:
        length += 1
    return length
