"""Workshop: what a worker does for its boss: its layers, its place in the plan, its commands."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.collectives.backend.open import open_group
from manyhands.core.address import HubAddress, check_run
from manyhands.core.errors import LinkError, UsageError
from manyhands.core.plan import Plan
from manyhands.stages import commands as words
from manyhands.stages.carrier import exchanging
from manyhands.stages.errors import PlanBroken
from manyhands.stages.layers import Spec, build
from manyhands.stages.pipeline import Pipeline
from manyhands.stages.precision import casting
from manyhands.stages.recipes import NotAllowed, arguments, resolve
from manyhands.wire.tensors import spec_of

COLLECTIVE = (
    *(words.Enter, words.Forward, words.Backward, words.Apply, words.Step),
    *(words.Fetch, words.Load),
)
"""Commands that all peers of the plan carry out together."""


def device_of(name: str | None) -> torch.device:
    """The device of that name; without one, a GPU if there is one. Raises UsageError."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"there is no device {name} here: {str(error).splitlines()[0]}",
            hint="--device cpu, or cuda:0 where there is a GPU",
        ) from None
    return device


class Workshop:
    """One command at a time. `close` leaves the plan; a next `Build` begins another."""

    def __init__(
        self,
        address: HubAddress,
        device: torch.device,
        allowed: Sequence[str],
        memory_bytes: int | None = None,
    ) -> None:
        self._address, self._device, self._allowed = address, device, tuple(allowed)
        self._memory_bytes = memory_bytes  # for parameters and buffers, at most
        self._modules: dict[int, nn.Module] = {}  # by their place in the plan
        self._group: ManyhandsGroup | None = None
        self._pipeline: Pipeline | None = None

    def do(self, command: words.Command) -> words.Done:
        """Raises what layers, optimizers and the other peers make it raise."""
        match command:
            case words.Build():
                self._build(command)
            case words.Enter():
                self._enter(command)
            case words.Optimize():
                self._optimize(command)
            case words.Forward():
                pipeline = self._in_plan()
                pipeline.close()  # a forward without its backward is forgotten
                pipeline.reschedule(1, "afab")
                with casting(self._device, command.precision):
                    _ = pipeline.forward() if command.keep else pipeline.predict()
            case words.Backward():
                self._in_plan().backward()
            case words.Apply():
                self._in_plan().apply()
            case words.Step():
                pipeline = self._in_plan()
                pipeline.close()
                pipeline.reschedule(command.microbatches, command.schedule)
                with casting(self._device, command.precision):
                    pipeline.step()
            case words.Mode():
                self._in_plan().train(command.train)
            case words.Clear():
                self._in_plan().close()
                self._in_plan().zero()
                gc.collect()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            case words.Describe():
                entries = [words.Entry(i, name, spec_of(t)) for i, name, t in self._state()]
                return words.Done(command.id, tuple(entries))
            case words.Fetch():
                self._send()
            case words.Load():
                self._receive()
                self._in_plan().zero()  # those are of other parameters
        return words.Done(command.id)

    def close(self) -> None:
        """Leave the plan, if there is one. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _in_plan(self) -> Pipeline:
        if self._pipeline is None:
            raise UsageError(
                "this worker is in no plan", hint="await boss.distribute_model() comes first"
            )
        return self._pipeline

    def _build(self, command: words.Build) -> None:
        self.close()
        self._modules = {}
        # All of them are looked at before any is made.
        specs = {
            index: Spec(resolve(recipe, nn.Module, self._allowed), arguments(recipe), ())
            for index, recipe in command.layers
        }
        self._check_size(specs.values())
        self._modules = {
            index: build(spec, index, seed=command.seed, device=self._device)
            for index, spec in specs.items()
        }

    def _check_size(self, specs: Iterable[Spec]) -> None:
        """Before memory is taken. A machine that runs out of it may kill any of its processes."""
        if self._memory_bytes is None:
            return
        needed = 0
        for spec in specs:
            try:
                outline = spec.outline()
            except Exception:  # noqa: BLE001, S112  (raised again when it is built)
                continue  # or its constructor looks at values, which an outline has not
            needed += sum(t.nbytes for t in [*outline.parameters(), *outline.buffers()])
            if needed > self._memory_bytes:
                raise NotAllowed(
                    f"these layers have more than {needed / (1 << 20):.1f} MiB of parameters, and "
                    f"this worker offers {self._memory_bytes / (1 << 20):.1f}",
                    hint="more workers, or one with more memory (--memory MIB)",
                )

    def _enter(self, command: words.Enter) -> None:
        self.close()  # a plan at a time
        plan = Plan.from_json(command.plan)
        check_run(command.run)
        elsewhere = Spec(nn.Identity, {}, ())
        model = [self._modules.get(index, elsewhere) for index in range(len(plan.layers))]
        try:
            self._group = open_group(
                replace(self._address, run=command.run),
                rank=command.rank,
                world=len(plan.peers),
                timeout_s=words.OPERATION_S,
                meet_s=words.MEET_S,
                settings=words.SETTINGS,
            )
        except LinkError as error:  # who of them is to blame, the boss knows
            raise PlanBroken(f"the workers did not meet: {error.message}") from error
        self._pipeline = Pipeline(
            model,
            plan,
            loss_fn=_at_the_boss,
            group=self._group,
            device=self._device,
            seed=command.seed,
        )

    def _optimize(self, command: words.Optimize) -> None:
        kind = resolve(command.optimizer, Optimizer, self._allowed)
        kwargs = arguments(command.optimizer)
        self._in_plan().optimize(lambda parameters: kind(parameters, **kwargs))

    # -- the state of the layers ------------------------------------------------------------------

    def _state(self) -> list[tuple[int, str, Tensor]]:
        return [
            (layer.index, name, tensor)
            for layer in self._in_plan().layers()
            for name, tensor in layer.module.state_dict().items()
        ]

    def _send(self) -> None:
        state = self._state()
        assert self._group is not None
        with exchanging():
            sent = [self._group.send([tensor.contiguous()], 0) for _, _, tensor in state]
            for work in sent:
                work.wait()

    def _receive(self) -> None:
        state = self._state()
        assert self._group is not None
        for _, _, tensor in state:
            came = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            with exchanging():
                self._group.recv([came], 0).wait()
            with torch.no_grad():
                tensor.copy_(came)  # a state_dict shows the layer's own memory


def _at_the_boss(output: Any, target: Any) -> Tensor:  # noqa: ANN401
    raise AssertionError("the boss has the last stage, and computes the loss")
