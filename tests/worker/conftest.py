"""Workers as tests of their boss have them."""

from tests.compat.bossman.conftest import _torch, context, hands

__all__ = ["_torch", "context", "hands"]
