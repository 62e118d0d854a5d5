"""Profiles: bytes that can be counted by hand, times that must differ, and nothing left behind."""

import copy
import weakref

import pytest
import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.planner.cost import PeerPower
from manyhands.planner.partition import partition
from manyhands.planner.profile import Ran, profile_layers
from manyhands.stages.layers import Running
from manyhands.stages.variables import Scope, pop, scoped, stash

F4 = 4  # bytes


def given(*modules):
    return [(str(index), lambda module=module: module) for index, module in enumerate(modules)]


def profile(*modules, rows=8, columns=16, **arguments):
    if "inputs" not in arguments:
        arguments["inputs"] = torch.randn(rows, columns)
    return profile_layers(given(*modules), **{"repeats": 1} | arguments)


def test_bytes_of_a_linear_layer():
    (cost,) = profile(nn.Linear(16, 32))
    parameters = F4 * (16 * 32 + 32)
    assert cost.name == "0"
    assert (cost.parameter_bytes, cost.gradient_bytes) == (parameters, parameters)
    assert cost.optimizer_bytes == 2 * parameters
    assert cost.activation_bytes == F4 * 8 * 16  # its input
    assert (cost.input_bytes, cost.output_bytes) == (F4 * 8 * 16, F4 * 8 * 32)
    assert cost.forward_s > 0
    assert cost.backward_s > 0


def test_what_two_layers_keep_of_each_other_is_counted_once():
    one, sigmoid, two = profile(nn.Linear(16, 32), nn.Sigmoid(), nn.Linear(32, 4))
    assert one.activation_bytes == F4 * 8 * 16  # its input
    assert sigmoid.activation_bytes == F4 * 8 * 32  # its output, which is the next one's input
    assert two.activation_bytes == 0


def test_the_sum_is_what_one_process_keeps():
    net = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, 4),
    )
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    seen = {}

    def see(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        net(x)
    costs = profile(*net, inputs=x)
    assert sum(c.activation_bytes for c in costs) == sum(s.nbytes() for s in seen.values())


def test_views_cost_nothing_beside_their_base():
    class Twice(nn.Module):
        def forward(self, x):
            return x[:4] * x[4:]  # saves two views of one storage

    _, cost = profile(nn.Linear(16, 16), Twice())
    assert cost.activation_bytes == F4 * 8 * 16


def test_frozen_layers_have_no_gradients_and_no_optimizer():
    frozen = nn.Linear(16, 16).requires_grad_(False)
    (cost,) = profile(frozen)
    assert (cost.gradient_bytes, cost.optimizer_bytes, cost.activation_bytes) == (0, 0, 0)
    assert cost.state_bytes == cost.parameter_bytes == F4 * (16 * 16 + 16)


def test_buffers_are_memory_but_have_no_gradients():
    (cost,) = profile(nn.BatchNorm1d(16), optimizer_tensors=1)
    assert cost.gradient_bytes == cost.optimizer_bytes == F4 * 2 * 16
    assert cost.parameter_bytes == F4 * 4 * 16 + 8  # means, variances, a counter


def test_embeddings_tuples_and_work_in_place():
    class Split(nn.Module):
        def forward(self, x):
            return x, x.mean(1)

    class Join(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1][:, None]

    words = torch.randint(0, 10, (8, 5))
    costs = profile(nn.Embedding(10, 16), Split(), Join(), nn.ReLU(inplace=True), inputs=words)
    assert [c.output_bytes for c in costs] == [F4 * n for n in (640, 640 + 128, 640, 640)]
    assert costs[3].activation_bytes == F4 * 640


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        module.clock.now += module.forwards.pop(0)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.module.clock.now += ctx.module.backwards.pop(0)
        return gradient, None


class Timed(nn.Module):
    """A layer that takes so long, by a clock of its own."""

    def __init__(self, clock, forwards, backwards):
        super().__init__()
        self.clock, self.forwards, self.backwards = clock, forwards, backwards

    def forward(self, x):
        return Takes.apply(x, self)


def test_times_are_medians_without_the_first_run(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("manyhands.planner.profile.perf_counter", clock)
    steady = [Timed(clock, [1.0] * 4, [2.0] * 4) for _ in range(3)]
    jumpy = Timed(clock, [100.0, 1.0, 50.0, 7.0], [100.0, 2.0, 1.0, 60.0])
    x = torch.randn(8, 16).requires_grad_()
    costs = profile(*steady, jumpy, inputs=x, repeats=3)
    assert [(cost.forward_s, cost.backward_s) for cost in costs] == [(1.0, 2.0)] * 3 + [(7.0, 2.0)]
    assert jumpy.forwards == jumpy.backwards == []
    plan = partition(costs, [PeerPower(name="a"), PeerPower(name="b")], by="time")
    assert [(stage.first, stage.end) for stage in plan.stages] == [(0, 3), (3, 4)]


# -- nothing is left ----------------------------------------------------------------------------


def test_a_module_is_as_it_was():
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    before = copy.deepcopy(net.state_dict())
    net[0].weight.grad = torch.ones(16, 16)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    profile(*net, inputs=x, repeats=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(net[0].weight.grad, torch.ones(16, 16))
    assert x.grad is None
    assert all(p.grad is None for p in net[1:].parameters())


def test_gradients_are_measured_where_they_are_switched_off():
    with torch.no_grad():
        (cost,) = profile(nn.Linear(16, 16))
        assert not torch.is_grad_enabled()
    assert cost.backward_s > 0
    assert cost.activation_bytes > 0


def test_one_layer_is_in_memory_at_a_time():
    built = []

    def build():
        assert [weight for weight in built if weight() is not None] == []
        module = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid())
        built.append(weakref.ref(module[0].weight))
        return module

    costs = profile_layers(((str(i), build) for i in range(4)), torch.randn(8, 16), repeats=2)
    assert len(costs) == len(built) == 4


# -- variables ----------------------------------------------------------------------------------


class Down(nn.Linear):
    def forward(self, x):
        stash("skip", super().forward(x))
        return x.mean(1, keepdim=True)


class Up(nn.Module):
    def forward(self, x):
        return x * pop("skip")


class Both(nn.Module):
    out_variables = ("late",)
    in_variables = ("skip",)

    def forward(self, x, skip):
        return x + skip, [("late", skip * 2)]


def run(module, carried, variables):
    """As the runtime of a plan runs a layer."""
    scope = Scope(variables)
    with scoped(scope):
        output = Running(module, 0, "layer").run(carried, scope)
    gives = {k: v for k, v in scope.values.items() if k not in variables}
    return Ran(output, gives, {k: scope.values[k] for k in scope.popped})


class Late(nn.Module):
    def forward(self, x):
        return x * pop("late")


def test_variables_are_carried_and_their_backward_is_measured():
    modules = [Down(16, 16), nn.Identity(), Up(), Both(), Late()]
    backwards = []
    modules[0].weight.register_hook(backwards.append)
    costs = profile(*modules, inputs=torch.randn(8, 16), run=run, repeats=2)
    assert len(backwards) == 3  # only through its variable
    assert costs[0].activation_bytes == F4 * 8 * 16
    assert costs[2].activation_bytes == F4 * 8  # a column, for the gradient of the variable
    # Its input and the variable: every consumer has a copy of its own.
    assert costs[4].activation_bytes == 2 * F4 * 8 * 16
    assert costs[4].output_bytes == F4 * 8 * 16


# -- errors -------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_name_the_layer():
    with pytest.raises(UsageError, match=r"layer 1 \(1\) cannot be run on \(8, 4\): .*8x4 and 5x2"):
        profile(nn.Linear(16, 4), nn.Linear(5, 2))


def test_a_layer_that_cannot_be_built_is_named():
    layers = [("first", lambda: nn.Linear(16)), ("second", nn.ReLU)]
    with pytest.raises(UsageError, match=r"layer 0 \(first\) cannot be built: .*out_features"):
        profile_layers(layers, torch.randn(2, 16))


def test_other_errors():
    class Text(nn.Module):
        def forward(self, x):
            return {"x": x}

    with pytest.raises(UsageError, match=r"layer 0 \(0\).*returned a dict, not a tensor"):
        profile(Text())
    with pytest.raises(UsageError, match="this model has no layers"):
        profile()
    with pytest.raises(UsageError, match="repeats=0"):
        profile(nn.ReLU(), repeats=0)
    with pytest.raises(UsageError, match="device 'nonsense' cannot be used"):
        profile(nn.ReLU(), device="nonsense")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT TESTED")
@pytest.mark.usefixtures("started_gpu")
def test_on_a_gpu():
    from manyhands.planner.memory import free_memory

    free = free_memory("cuda")
    state = torch.cuda.get_rng_state()
    module = nn.Linear(1024, 1024)
    small, large = profile(nn.Linear(16, 8192), nn.Linear(8192, 8192), device="cuda", rows=8192)
    profile(module, columns=1024, device="cuda")
    assert large.forward_s > small.forward_s > 0  # 1.1 Tflop, or 2 Gflop
    assert small.activation_bytes == F4 * 8192 * 16
    assert module.weight.device.type == "cpu"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert 0 < free_memory("cuda") <= free
