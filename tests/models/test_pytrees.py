"""Parameters and caches are plain pytrees: torch's own tools and a user's functions take them as they are."""

import torch
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.effects import schedule
from mla_fx.models import ModelParams
from tests.setups import Setup

SETUP = Setup(layers=2)


def test_leaves_are_tensors_and_come_back():
    for tree in (SETUP.params()[0], Setup(layers=2, quantization="w8a8").params()[0], SETUP.caches()[0]):
        leaves, spec = pytree.tree_flatten(tree)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert type(pytree.tree_unflatten(leaves, spec)) is type(tree)


def test_a_mapped_tree_runs():
    """Twice the head's weight gives twice the logits."""
    backend, program = backends.get("cpu", ranks=2), schedule(SETUP.step, orchestrations.serial)
    params, (caches, tokens, batches) = SETUP.params(), SETUP.arguments()
    copies = pytree.tree_map(torch.clone, caches)
    logits, _ = backend.compile(program, backend.prepare(program, params))(caches, tokens, batches)
    doubled = [p._replace(lm_head=2 * p.lm_head) for p in pytree.tree_map(torch.clone, params)]
    twice, _ = backend.compile(program, backend.prepare(program, doubled))(copies, tokens, batches)
    torch.testing.assert_close(twice[0], 2 * logits[0])


def test_gradients_of_a_function_of_all_parameters():
    def energy(params: ModelParams[torch.Tensor]) -> torch.Tensor:
        return sum((leaf.double().square().sum() for leaf in pytree.tree_leaves(params)), torch.zeros(()))

    (params, _) = SETUP.params()
    slopes = grad(energy)(params)
    assert isinstance(slopes, ModelParams) and slopes.layers[1].feed_forward._fields == (
        "gate",
        "e_score_correction_bias",
        "gate_up_proj",
        "down_proj",
        "shared_experts",
    )
    for slope, leaf in zip(pytree.tree_leaves(slopes), pytree.tree_leaves(params), strict=True):
        torch.testing.assert_close(slope, 2 * leaf)


def test_ranks_stack_and_are_mapped_over():
    """vmap over the ranks' shares: the size of each rank's part of every weight."""
    params = SETUP.params()
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *params)
    norms = vmap(lambda p: pytree.tree_map(torch.linalg.vector_norm, p))(stacked)
    for rank in range(2):
        torch.testing.assert_close(norms.lm_head[rank], params[rank].lm_head.norm())


def test_a_modules_parameters_by_name():
    """The leaves of a layer as parameters of a torch module, through `functional_call`."""
    layer = SETUP.params()[0].layers[0]
    norm = torch.nn.RMSNorm(24, eps=1e-6)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    found = functional_call(norm, {"weight": layer.input_layernorm}, (x,))
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (24,), layer.input_layernorm, 1e-6))
