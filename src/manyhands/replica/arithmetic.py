"""Arithmetic: whether two peers can be expected to compute the same bits."""

from __future__ import annotations

import hashlib

import torch

from manyhands.wire.tensors import bytes_of

_SIZE = 4099  # no multiple of any vector: the last elements are computed by other instructions
_STEPS = 3


@torch.no_grad()
def arithmetic_of(device: torch.device) -> bytes:
    """Its class: equal for peers of one kind of device, with the same torch and settings.

    A few steps of an optimizer are in it, since what a build or a flag does to tiny numbers, or to
    the order of a sum, no version says.
    """
    words = [
        device.type,
        torch.__version__,
        torch.get_num_threads(),  # a sum is cut by them
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cpu.get_cpu_capability(),
    ]
    if device.type == "cuda":
        words.append(torch.cuda.get_device_name(device))
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8, person=b"manyhands-arith")
    # From below the smallest normal number to where a square overflows.
    size = torch.logspace(-42, 21, _SIZE, dtype=torch.float64)
    sign = 1 - 2 * (torch.arange(_SIZE) % 2)
    x = (size * sign).to(torch.float32).to(device)
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(1, _STEPS + 1):
        gradient = torch.sin(x) + x * 1e-3
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = square.sqrt().div_((1 - 0.999**step) ** 0.5).add_(1e-8)
        x.mul_(1 - 1e-5).addcdiv_(mean, scale, value=-1e-3 / (1 - 0.9**step))
    for tensor in (x, mean, square, x.clamp(-1, 1).square().sum()):
        digest.update(bytes_of(tensor))
    return digest.digest()
