"""The smallest prefix tree that behaves as SGLang's does towards the residency, and a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvir.sglang_ext import prefix
from kvir.sglang_ext.allocator import KvirAllocator

P = 16


class Tree:
    """A prefix tree of whole pages: node = (parent, tokens of the page) -> logical page."""

    def __init__(self, allocator: KvirAllocator) -> None:
        self.allocator = allocator
        self.page_size = P
        self.clock = 0
        self.nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self.by_page: dict[int, Node] = {}

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def walk(self, tokens: list[int]) -> list[Node]:
        path: list[Node] = []
        parent = 0
        for i in range(0, len(tokens) - P + 1, P):
            node = self.nodes.get((parent, tuple(tokens[i : i + P])))
            if node is None:
                break
            self.clock += 1
            node.used = self.clock
            path.append(node)
            parent = node.page
        return path

    def match(self, request: Request) -> list[int]:
        """As KvirRadixCache: at most all but the last token; cut to what is whole; remember where another
        prompt branches.
        """
        longest = len(request.tokens) - 1
        published = self.allocator.selections.publishes(longest + 1)
        if published <= longest:  # as the hook on `Req._compute_max_prefix_len`
            longest = published - 1
        path = self.walk(request.tokens[:longest])
        pages = np.array([node.page for node in path], np.int64)
        count = prefix.valid_pages(self.allocator.residency, pages) if len(pages) else 0
        if count < len(pages):
            request.kvir_branch_page = len(pages)
        request.locked = path[:count]
        for node in request.locked:
            node.locks += 1
        return pages[:count].tolist()

    def insert(self, request: Request, upto: int) -> None:
        """As checkpoint_into_tree: own [0, floor(upto)), free duplicates, make the row canonical, move the
        lock.
        """
        residency = self.allocator.residency
        if residency.geometry.phased:
            upto = min(upto, residency.requests[id(request.kv)].published_tokens)
        residency.hold_frees()
        row, parent, canonical, duplicates = request.row, 0, [], []
        for i in range(upto // P):
            key = (parent, tuple(request.tokens[i * P : i * P + P]))
            node = self.nodes.get(key)
            if node is None:
                node = Node(page=row[i], key=key)
                self.nodes[key] = self.by_page[row[i]] = node
                if parent:
                    self.by_page[parent].children += 1
            elif node.page != row[i]:
                duplicates.append(row[i])
            self.clock += 1
            node.used = self.clock
            canonical.append(node.page)
            parent = node.page
        if duplicates:
            self.allocator.free_page_ids(torch.tensor(duplicates))
        row[: len(canonical)] = canonical
        request.owned = len(canonical)
        nodes = [self.by_page[page] for page in canonical]
        for node in nodes:
            node.locks += 1
        self.unlock(request)
        request.locked = nodes
        residency.adopt(residency.requests[id(request.kv)], canonical)
        residency.resume_frees()

    def unlock(self, request: Request) -> None:
        for node in request.locked:
            node.locks -= 1
        request.locked = []

    def evict_pages(self, pages: int) -> int:
        gone = 0
        while gone < pages:
            leaves = [n for n in self.nodes.values() if not n.children and not n.locks]
            if not leaves:
                break
            leaf = min(leaves, key=lambda n: n.used)
            del self.nodes[leaf.key], self.by_page[leaf.page]
            if leaf.key[0]:
                self.by_page[leaf.key[0]].children -= 1
            self.allocator.free_page_ids(torch.tensor([leaf.page]))
            gone += 1
        return gone

    def evictable_size(self) -> int:
        return sum(P for n in self.nodes.values() if not n.locks)

    def evict_for_alloc(self, params: Any) -> None:
        self.evict_pages(-(-params.num_tokens // P))

    def prefix_device_indices(self, request: Request) -> torch.Tensor:
        pages = torch.tensor([n.page for n in request.locked], dtype=torch.int64)
        return (pages[:, None] * P + torch.arange(P)).reshape(-1)


@dataclass(eq=False)
class Node:
    page: int
    key: tuple[int, tuple[int, ...]]
    children: int = 0
    locks: int = 0
    used: int = 0


@dataclass(eq=False)
class Request:
    rid: str
    tokens: list[int]  # prompt, then what was generated
    new_tokens: int
    kv: Any = field(default_factory=lambda: SimpleNamespace(kv_committed_len=0))
    row: list[int] = field(default_factory=list[int])  # logical page of every P tokens
    done: int = 0  # tokens whose rows were computed
    owned: int = 0  # pages that the tree owns
    locked: list[Node] = field(default_factory=list[Node])
    kvir_branch_page: int | None = None
    retraction_count: int = 0
    output_ids: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    running: bool = False
    prompt_tokens: int = 0  # of this prefill

    @property
    def full_untruncated_fill_ids(self) -> list[int]:
        return self.tokens

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(max_new_tokens=self.new_tokens)
