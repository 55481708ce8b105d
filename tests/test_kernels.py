"""What torch.compile makes of RoVE: the kernels generated on a CPU, counted.

The bound on graphs over evaluation lengths is in tests/test_model.py.
"""

import re

import pytest
import torch

from model import GPT, GPTConfig
from tests.conftest import needs_inductor


def kernel_calls(pos_emb: str, n_layer: int) -> tuple[list[str], list[str]]:
    """Names of the generated kernels that one forward and one backward pass call, in order; matrix
    products and attention are torch's own and not among them."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model = GPT(GPTConfig(257, 64, n_layer, 2, 64, pos_emb))
    compiled = torch.compile(model, fullgraph=True)  # fullgraph: a graph break is an error
    ids = torch.arange(128).view(2, 64)

    def step() -> torch.Tensor:
        loss = compiled(ids, ids)
        loss.backward()
        return loss

    with torch._inductor.config.patch(fx_graph_cache=False, autotune_local_cache=False):
        loss, codes = run_and_get_code(step)
    assert len(codes) == 2, "one graph each"
    torch.testing.assert_close(loss, model(ids, ids), rtol=0, atol=1e-5)
    torch._dynamo.reset()
    forward, backward = (re.findall(r"^\s+(cpp_fused_\w+)\(", code, re.M) for code in codes)
    return forward, backward


@pytest.mark.slow
@needs_inductor
def test_kernels_that_rotations_cost():
    """A layer more, so that the ends of the network do not count: RoPE has one kernel that reads
    q, k and v; RoVE the same one, and one for the output; backward none, in either."""
    one, two = ({p: kernel_calls(p, n) for p in ("learned", "rope", "rove")} for n in (1, 2))
    forward = {p: len(two[p][0]) - len(one[p][0]) for p in one}
    backward = {p: len(two[p][1]) - len(one[p][1]) for p in one}
    assert forward["rope"] == forward["learned"] + 1, two
    assert forward["rove"] == forward["learned"] + 2, two
    assert backward["rove"] == backward["rope"] == backward["learned"], two
    rotations = {p: sum("mul_" in k and "sub" in k for k in two[p][0]) for p in two}
    assert rotations == {"learned": 0, "rope": 2, "rove": 4}, two  # two layers
