"""Layers that BossMan's README uses and does not define."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class wrapped_linear(nn.Linear):
    """nn.Linear plus the variables that it depends on; each of `out_variables` gets the output.

    `in_variables` is another word for `dependencies`: a layer uses one of them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dependencies: Sequence[str] = (),
        in_variables: Sequence[str] = (),
        out_variables: Sequence[str] = (),
    ) -> None:
        super().__init__(in_features, out_features, bias)  # pyright: ignore[reportUnknownMemberType]
        self.dependencies, self.in_variables = list(dependencies), list(in_variables)
        self.out_variables = list(out_variables)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, *variables: Tensor
    ) -> Tensor | tuple[Tensor, list[tuple[str, Tensor]]]:
        """In the order in which they are named."""
        out = super().forward(input)
        for variable in variables:
            out = out + variable
        return (out, [(name, out) for name in self.out_variables]) if self.out_variables else out
