"""PrefixTree: which pages of a KV cache hold the KV of which tokens, so that requests share common prefixes.

Owns: a radix tree of pages a server, with a root an Origin; it is the one reader of its pool's `take_changed`. A node
is one page and the tokens whose KV is in it: page_size of them, or fewer in a leaf.
Invariants: the tree holds every page it lists once, also one that two origins list; nobody writes where a listed page's
tokens are; no child's tokens are a prefix of a sibling's; an origin without pages is not there; `blocked` of a node is
0 exactly where nobody but the tree holds a page of its subtree, as far as the pool has told.
Life of a page: 1 a request takes it from the pool and writes it. 2 `insert` lists it; that request may go on writing
behind the tokens it listed. 3 `match` finds it for others, who hold it at once, read it, and copy it before they write.
4 Its holders drop it. 5 `evict` lets the least recently used leaf go, or `forget` a whole origin.
Must not: touch device state, read a clock, be used from two threads, or hold pages for a request.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter

import numpy as np

from rl_jax.engine.pages import PagePool

TOKEN_BYTES = 4  # of i32


@dataclass(frozen=True)
class Origin:
    """What KV depends on beside its tokens; pages of different origins are never shared."""

    version: int
    adapter: str | None = None
    owner: str | None = None  # whose KV of mixed versions it is; serves that owner only
    salt: str = ""  # TurnRequest.salt


@dataclass(frozen=True)
class Match:
    """KV of the first num_tokens tokens is in pages, in order.

    Where num_tokens is no multiple of the page size, the last page is another context's from there on: copy it before
    writing behind num_tokens.
    """

    pages: tuple[int, ...]
    num_tokens: int


class _Node:
    """A page of the tree, or a root, which has no page and no parent."""

    __slots__ = (
        "blocked", "children", "in_heap", "is_held", "key", "origin", "page", "parent", "serial", "used",
    )  # fmt: skip

    def __init__(self, origin: Origin, parent: "_Node | None", key: bytes, page: int):
        self.origin, self.parent, self.key, self.page = origin, parent, key, page
        self.children: list[_Node] = []  # sorted by key: neighbours have most in common
        self.serial = 0  # of its making: breaks ties in the heap
        self.used = 0  # tick of the last match or insert that went through it
        self.is_held = False  # by others than the tree, as far as the pool has told
        self.blocked = 0  # is_held + the number of children that are blocked
        self.in_heap = False

    def closest(self, key: bytes) -> tuple["_Node | None", int]:
        """The child with the most leading tokens of key, and how many; None, 0 where none has any."""
        children = self.children
        at = bisect_left(children, key, key=_KEY)
        if at < len(children) and children[at].key == key:
            return children[at], len(key) // TOKEN_BYTES
        best, most = None, 0
        for child in children[max(at - 1, 0) : at + 1]:
            if (num := common_tokens(child.key, key)) > most:
                best, most = child, num
        return best, most


_KEY = attrgetter("key")


class PrefixTree:
    """Pages of tokens over one pool. match and insert cost O(pages + log children), evict O(log leaves) a page."""

    def __init__(self, pool: PagePool, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size={page_size}; a page has at least one token")
        self.pool, self.page_size = pool, page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Origin, _Node] = {}
        # By page; several nodes where origins share it.
        self._nodes: list[list[_Node]] = [[] for _ in range(pool.num_pages)]
        self._num_pages = self._num_nodes = self._num_evictable = 0
        # (used, serial, node) of every leaf that is not blocked, once, with a tick not after its
        # last use; other entries are stale and are dropped when they come up.
        self._heap: list[tuple[int, int, _Node]] = []
        self._tick = self._serial = 0

    @property
    def num_pages(self) -> int:
        """Pages the tree holds."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """What evict can free: pages that, with all that lies behind them, nobody but the tree holds.

        Costs O(pages whose holders changed since the last time).
        """
        self._recount()
        return self._num_evictable

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(self._roots)

    def match(self, origin: Origin, tokens: np.ndarray) -> Match:
        """The longest prefix of tokens, i32[n], whose KV is here. The caller holds its pages at once.

        A child page that agrees in its first tokens only is listed last, and num_tokens ends within it.
        """
        node = self._roots.get(origin)
        if node is None:
            return Match((), 0)
        data, size, page_size = _bytes(tokens), self._page_bytes, self.page_size
        self._tick = tick = self._tick + 1
        pages, num_tokens = [], 0
        for start in range(0, len(data), size):
            key, children = data[start : start + size], node.children
            if len(children) == 1 and children[0].key == key:  # within a history, most often
                child, common = children[0], len(key) // TOKEN_BYTES
            else:
                child, common = node.closest(key)
            if child is None:
                break
            child.used = tick
            pages.append(child.page)
            num_tokens += common
            if common < page_size:
                break
            node = child
        return Match(tuple(pages), num_tokens)

    def insert(self, origin: Origin, tokens: np.ndarray, pages: Sequence[int]) -> int:
        """KV of tokens, i32[n], is in the ceil(n / page_size) pages, in order, which the caller holds.

        Where the tree has a page of the same tokens, or of more, it keeps its own; a partial leaf that these tokens
        extend gives way to the longer page. Returns: how many of the pages the tree holds now and did not before.
        Raises: ValueError, and nothing has changed, if pages are too few or too many, if a new one is not in use, or if
        one is listed for other tokens of this origin.
        """
        if len(pages) != -(-len(tokens) // self.page_size):
            raise ValueError(
                f"{len(pages)} pages for {len(tokens)} tokens; pages of {self.page_size} tokens take "
                f"{-(-len(tokens) // self.page_size)}"
            )
        data, size = _bytes(tokens), self._page_bytes
        self._tick = tick = self._tick + 1
        node = self._roots.get(origin) or _Node(origin, None, b"", -1)
        shorter, known = None, 0
        while known < len(pages):
            key, children = data[known * size : (known + 1) * size], node.children
            if len(children) == 1 and children[0].key == key:  # within a history, most often
                node, known = children[0], known + 1
                node.used = tick
                continue
            child, common = node.closest(key)
            if child is None or common * TOKEN_BYTES < len(key):
                if child is not None and common * TOKEN_BYTES == len(child.key):
                    shorter = child
                break
            child.used = tick
            node, known = child, known + 1
        new = [int(page) for page in pages[known:]]
        self._check_new(origin, new, shorter)
        unheld = [page for page in new if not self._nodes[page]]
        self.pool.hold(unheld)
        for i, page in enumerate(new, known):
            node = self._add(node, data[i * size : (i + 1) * size], page)
        if shorter is not None:
            self._remove(shorter)
        return len(unheld)

    def evict(self, num: int) -> int:
        """Free so many pages, or all of num_evictable, leaves first, the least recently used first. Returns: freed."""
        self._recount()
        heap, free = self._heap, []  # nobody else holds a candidate's page
        while len(free) < num and heap:
            used, _, node = heappop(heap)
            node.in_heap = False
            if node.used != used or not _is_candidate(node):
                self._push(node)
                continue
            while True:
                parent = self._cut(node, free)
                is_next = len(free) < num and not parent.in_heap and _is_candidate(parent)
                # Of one history the last pages were used at once: most often it goes on with them.
                if not is_next or (heap and heap[0] < (parent.used, parent.serial)):
                    break
                node = parent
            self._push(parent)
        return len(self.pool.drop(free))

    def forget(self, origin: Origin) -> int:
        """Let an origin's pages go; those that others hold stay in use by them. Returns: how many became free."""
        root = self._roots.pop(origin, None)
        if root is None:
            return 0
        unlisted: list[int] = []
        stack = root.children
        while stack:
            node = stack.pop()
            stack += node.children
            node.children, node.parent = [], None
            self._unlist(node, unlisted)
        return len(self.pool.drop(unlisted))

    def check(self) -> None:
        """Walk everything and assert the invariants; for tests."""
        self._recount()
        nodes = [node for root in self._roots.values() for node in root.children]
        for node in nodes:  # grows: parents come before their children
            nodes += node.children
        listed: dict[int, list[_Node]] = {}
        blocked: dict[_Node, int] = dict.fromkeys(nodes, 0)
        for node in reversed(nodes):
            listed.setdefault(node.page, []).append(node)
            assert node.is_held == (self.pool.count(node.page) > 1), f"page {node.page}: is_held"
            blocked[node] += node.is_held
            assert node.blocked == blocked[node], f"page {node.page}: blocked"
            if node.blocked and node.parent in blocked:
                blocked[node.parent] += 1
            assert node in node.parent.children and node.origin == node.parent.origin
            assert node.used <= node.parent.used or node.parent.parent is None, (
                "a path's order of use"
            )
            num_bytes = len(node.key)
            assert 0 < num_bytes <= self._page_bytes and num_bytes % TOKEN_BYTES == 0
            assert num_bytes == self._page_bytes or not node.children, "only a leaf may be partial"
            assert node.in_heap or not _is_candidate(node), (
                f"page {node.page} would never be evicted"
            )
        for parent in (*self._roots.values(), *nodes):
            keys = [child.key for child in parent.children]
            assert keys == sorted(keys), "children in order"
            pairs = zip(keys, keys[1:])
            assert not any(b.startswith(a) for a, b in pairs), "a child is a prefix of its sibling"
        assert all(root.children for root in self._roots.values()), "an origin without pages"
        entries = [node for _, _, node in self._heap]
        assert len(set(entries)) == len(entries) and all(node.in_heap for node in entries)
        assert all(used <= node.used for used, _, node in self._heap), "an entry after its last use"
        assert self._num_nodes == len(nodes)
        assert self._num_pages == len(listed)
        for page, group in enumerate(self._nodes):
            assert set(group) == set(listed.get(page, ())), f"page {page}: its nodes"
        for page, group in listed.items():
            assert self.pool.count(page) > 0, f"page {page} is free and listed"
            assert len({node.origin for node in group}) == len(group), (
                f"page {page} is twice in an origin"
            )
            paths = sorted(_path(node) for node in group) if len(group) > 1 else [b""]
            assert all(paths[-1].startswith(path) for path in paths), f"page {page}: two contents"
            assert len({-(-len(path) // self._page_bytes) for path in paths}) == 1
        evictable = [page for page, group in listed.items() if not any(map(blocked.get, group))]
        assert self._num_evictable == len(evictable), "num_evictable"

    # --- private ----------------------------------------------------------------------------

    def _check_new(self, origin: Origin, pages: list[int], leaf: _Node | None) -> None:
        """Raise unless all pages are in use and none is listed under the origin already, but for this leaf."""
        for page in pages:
            if self.pool.count(page) == 0:
                raise ValueError(f"page {page} is free; insert pages before dropping them")
            for node in self._nodes[page]:
                if node.origin == origin and node is not leaf:
                    raise ValueError(
                        f"page {page} is listed for other tokens of {origin}; copy a page before writing over "
                        "tokens of it that were inserted"
                    )
        if len(set(pages)) < len(pages):
            raise ValueError(f"a page comes twice among {pages}")

    def _add(self, parent: _Node, key: bytes, page: int) -> _Node:
        """A new child, whose page the tree holds."""
        node = _Node(parent.origin, parent, key, page)
        self._serial += 1
        node.serial, node.used = self._serial, self._tick
        nodes = self._nodes[page]
        is_held, is_first = self.pool.count(page) > 1, not nodes
        nodes.append(node)
        self._num_nodes += 1
        if parent.children:
            insort(parent.children, node, key=_KEY)
        else:
            parent.children.append(node)
        if parent.parent is None:
            self._roots[parent.origin] = parent
        self._num_pages += is_first
        if is_first and is_held:
            node.is_held, node.blocked = True, 1
            self._block(parent, True)
            return node
        self._num_evictable += is_first
        if is_held:
            self._set_held(node, True)
        else:
            self._push(node)
        return node

    def _remove(self, leaf: _Node) -> None:
        """Take a leaf out, and drop its page."""
        unlisted: list[int] = []
        self._push(self._cut(leaf, unlisted))
        self.pool.drop(unlisted)

    def _cut(self, leaf: _Node, unlisted: list[int]) -> _Node:
        """Take a leaf out. Returns: its parent, which may be a candidate now. unlisted: as of _unlist."""
        if leaf.is_held:
            self._set_held(leaf, False)
        parent, leaf.parent = leaf.parent, None
        assert parent is not None, "a leaf has a parent"
        children = parent.children
        if len(children) == 1:
            children.clear()
        else:
            del children[bisect_left(children, leaf.key, key=_KEY)]
        if parent.parent is None and not children:
            del self._roots[parent.origin]
        self._unlist(leaf, unlisted)
        return parent

    def _unlist(self, node: _Node, unlisted: list[int]) -> None:
        """The tree has a page once less; if that was the last it is added to those that the caller drops for it."""
        nodes = self._nodes[node.page]
        nodes.remove(node)
        self._num_nodes -= 1
        if nodes:
            others_block = any(other.blocked for other in nodes)
            self._num_evictable += node.blocked > 0 and not others_block
            return
        self._num_evictable -= node.blocked == 0
        self._num_pages -= 1
        unlisted.append(node.page)

    def _recount(self) -> None:
        """Learn which pages others hold now."""
        count, nodes = self.pool.count, self._nodes
        for page in self.pool.take_changed():
            is_held = count(page) > 1
            for node in nodes[page]:
                if node.is_held != is_held:
                    self._set_held(node, is_held)

    def _set_held(self, node: _Node, is_held: bool) -> None:
        """Note whether others hold a node's page."""
        node.is_held = is_held
        self._block(node, is_held)

    def _block(self, node: _Node, is_held: bool) -> None:
        """One reason more, or less, why a node may not be evicted; passed up as far as that makes a difference."""
        change = 1 if is_held else -1
        while node.parent is not None:
            node.blocked += change
            if node.blocked != is_held:
                return  # blocked before and after
            nodes = self._nodes[node.page]
            if len(nodes) == 1 or not any(other.blocked for other in nodes if other is not node):
                self._num_evictable -= change
            self._push(node)
            node = node.parent

    def _push(self, node: _Node) -> None:
        """Put a leaf that may be evicted into the heap, if it is not there."""
        if node.in_heap or not _is_candidate(node):
            return
        if len(self._heap) > 2 * self._num_nodes + 64:  # more than half are nodes that are gone
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            heapify(self._heap)
        heappush(self._heap, (node.used, node.serial, node))
        node.in_heap = True


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens are equal."""
    num_bytes = min(len(a), len(b))
    # The highest bit that differs is in the first byte that does.
    differ = int.from_bytes(a[:num_bytes], "big") ^ int.from_bytes(b[:num_bytes], "big")
    return (num_bytes - (differ.bit_length() + 7) // 8) // TOKEN_BYTES


def _bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def _is_candidate(node: _Node) -> bool:
    """Whether evict may take it: a leaf of the tree whose page nobody else holds."""
    return node.parent is not None and not node.children and not node.blocked


def _path(node: _Node) -> bytes:
    """All tokens up to a page's end."""
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return b"".join(reversed(keys))
