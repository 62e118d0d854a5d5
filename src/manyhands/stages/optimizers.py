"""Optimizers: which of them can step in a plan."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from manyhands.core.errors import UsageError


def check_steps(kind: type[Optimizer]) -> None:
    """Raises UsageError for one whose `step` asks for something, as LBFGS does for its closure.

    A closure computes the model's loss anew; of a plan no peer has the model.
    """
    try:
        asked = list(inspect.signature(kind.step).parameters.values())[1:]  # without self
    except (TypeError, ValueError):  # not written in Python
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in asked:
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic:
            raise UsageError(
                f"the step of {kind.__qualname__} needs a {parameter.name}, and in a plan it has "
                "the gradients of one batch only",
                hint="take one that steps without: Adam, AdamW, SGD, ...",
            )
