"""Pool: pieces of memory for parts on their way, used again and again.

Fresh memory costs a page fault for every 4 KiB; a part that is received, added and forgotten should
not pay for that each time. What a pool has more of than its rounds need goes back to the system.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.wire.tensors import writable_bytes_of

# From here on memory of its own from the system: given back, it is really free. The allocator would
# keep it, in pieces that others cannot use.
_MAP_BYTES = 64 << 10


class Block(NamedTuple):
    """One piece: the same memory as a uint8 tensor and as a view to receive into."""

    tensor: Tensor
    view: memoryview
    whole: Block | None = None  # the pool's block that this is the beginning of


class Pool:
    """Blocks of `block_bytes`. Thread-safe. Once there are `keep_blocks`, used ones included, those
    that are given back are not kept: after a time that needed more, memory falls to that again.
    """

    def __init__(self, block_bytes: int, keep_blocks: int) -> None:
        self.block_bytes, self._keep_blocks = block_bytes, keep_blocks
        self._free: list[Block] = []
        # Addresses of all blocks that there are. Not a count of those taken and given: who starts
        # over just forgets its blocks. A set needs no lock, which a finalizer could not take.
        self._alive: set[int] = set()
        self._holds: Counter[int] = Counter()  # by address
        self._late: dict[int, Block] = {}  # given back while somebody held them
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """A block of that size, contents undefined. A larger one than usual is made to measure, and
        so is one of no bytes, which is not to keep a whole one from others.
        """
        if num_bytes > self.block_bytes or not num_bytes:
            return _new(num_bytes)
        with self._lock:
            block = self._free.pop() if self._free else None
        block = block or self._make()
        if num_bytes == self.block_bytes:
            return block
        return Block(block.tensor[:num_bytes], block.view[:num_bytes], block)

    def _make(self) -> Block:
        block = _new(self.block_bytes)
        at = block.tensor.data_ptr()
        self._alive.add(at)
        # Called before the memory is free, so before another block can have its address.
        weakref.finalize(block.tensor, self._alive.discard, at).atexit = False
        return block

    def hold(self, block: Block) -> Callable[[], None]:
        """A second reader: the block is free once it is given back *and* the result was called."""
        with self._lock:
            self._holds[block.tensor.data_ptr()] += 1
        return lambda: self._let_go(block)

    def _let_go(self, block: Block) -> None:
        at = block.tensor.data_ptr()
        with self._lock:
            self._holds[at] -= 1
            late = None if self._holds[at] else self._late.pop(at, None)
            if not self._holds[at]:
                del self._holds[at]
        if late is not None:
            self._put_back(late)

    def give(self, block: Block) -> None:
        """Nobody looks at this block any more, but for those who `hold` it."""
        with self._lock:
            if self._holds.get(block.tensor.data_ptr()):
                self._late[block.tensor.data_ptr()] = block
                return
        self._put_back(block)

    def _put_back(self, block: Block) -> None:
        whole = block.whole or block
        if len(whole.view) == self.block_bytes:
            with self._lock:
                if len(self._alive) <= self._keep_blocks:
                    self._free.append(whole)
                else:  # it counts no more, though its last user may not have let go of it yet
                    self._alive.discard(whole.tensor.data_ptr())


def _new(num_bytes: int) -> Block:
    tensor = lasting_memory(num_bytes)
    return Block(tensor, writable_bytes_of(tensor))


def lasting_memory(num_bytes: int) -> Tensor:
    """Bytes that stay for long, contents undefined: apart from what comes and goes.

    In the heap, what stays and what goes would lie between each other, and the holes count.
    """
    with torch.inference_mode(False):  # the next one to use it may be outside of it
        if num_bytes < _MAP_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)
