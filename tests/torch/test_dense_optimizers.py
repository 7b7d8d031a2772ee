"""The optimizers of a dense part: torch's bits, without torch's compiler."""

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from shoal.torch.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer, with_defaults  # noqa: E402


def trained(kind, settings, *, resumed=False):
    """Return the parameters after some steps; ``resumed``: with a new optimizer in the middle, which continues."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    optimizer = kind(layers.parameters(), **settings)
    for step in range(6):
        if resumed and step == 3:
            state = optimizer.state_dict()
            optimizer = kind(layers.parameters(), **settings)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        layers(torch.full((4, 7), 0.1 * step)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in layers.parameters()]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_updates_have_the_bits_of_torch(name, resumed):
    settings = with_defaults(dense_optimizer(name), {"lr": 0.03, "weight_decay": 0.01})
    ours, theirs = (
        trained(kind, settings, resumed=resumed) for kind in (dense_optimizer(name), getattr(torch.optim, name))
    )
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_one_call_for_all_parameters_changes_rounding_only(name):
    kind = dense_optimizer(name)
    one_call, as_torch = trained(kind, with_defaults(kind, {"lr": 0.03})), trained(kind, {"lr": 0.03})
    for one, other in zip(one_call, as_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_choice_of_the_user_wins():
    kind = dense_optimizer("Adam")
    assert with_defaults(kind, {"lr": 0.1}) == {"lr": 0.1, "fused": True}
    for choice in ({"foreach": True}, {"fused": False}, {"differentiable": True}):
        assert with_defaults(kind, choice) == choice
    assert with_defaults(dense_optimizer("RMSprop"), {"lr": 0.1}) == {"lr": 0.1}


@pytest.mark.slow
def test_no_step_imports_the_compiler():
    code = """
        import sys
        import torch
        from shoal.torch.dense_optimizers import DENSE_OPTIMIZERS, dense_optimizer, with_defaults
        for name in DENSE_OPTIMIZERS:
            weights = torch.nn.Parameter(torch.ones(3))
            kind = dense_optimizer(name)
            optimizer = kind([weights], **with_defaults(kind, {"lr": 0.1}))
            optimizer.zero_grad()
            weights.square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            assert "torch._dynamo" not in sys.modules, name
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
