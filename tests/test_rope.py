"""RoPE, YaRN and RoVE against stored numbers and against the sum over offsets, in float64."""

import copy
import dataclasses
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model as model_file
from model import (
    GPT,
    CausalSelfAttention,
    GPTConfig,
    KVCache,
    rotary_inv_freq,
    rotary_table,
    rotate,
    softmax_scale,
)
from tests import reference

GOLDEN = reference.golden()
PUBLISHED = GPTConfig(n_layer=1, n_head=12, n_embd=768, block_size=1024)  # head size 64, base 1e4
TINY = GPTConfig(vocab_size=70, block_size=32, n_layer=2, n_head=2, n_embd=32)


def head_config(head_dim: int, **changes) -> GPTConfig:
    """One layer, one head."""
    return GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_embd=head_dim, **changes)


# -----------------------------------------------------------------------------
# the table


@pytest.mark.parametrize("factor", ["1", "2", "4", "16"])
def test_golden_yarn_frequencies_and_temperature(factor):
    config = dataclasses.replace(PUBLISHED, yarn_factor=float(factor))
    expected = GOLDEN["yarn"]["factors"][factor]
    frequencies = rotary_inv_freq(config)
    assert frequencies.dtype == torch.float64
    torch.testing.assert_close(
        frequencies, torch.tensor(expected["inv_freq_f64"], dtype=torch.float64), rtol=1e-12, atol=0
    )
    # what transformers and the YaRN repository compute, which is fp32
    torch.testing.assert_close(
        frequencies,
        torch.tensor(expected["inv_freq_hf_f32"], dtype=torch.float64),
        rtol=3e-7,
        atol=0,
    )
    multiplier = softmax_scale(config) * math.sqrt(64)
    assert multiplier == pytest.approx(expected["softmax_scale_multiplier_m2"], rel=1e-14)


@pytest.mark.parametrize("factor", ["1", "2", "4", "16"])
def test_golden_cos_and_sin(factor):
    config = dataclasses.replace(PUBLISHED, yarn_factor=float(factor))
    rows, pairs = GOLDEN["plain_rope"]["positions"], GOLDEN["plain_rope"]["pair_indices"]
    for name, table in zip(("cos", "sin"), rotary_table(config, 16384), strict=True):
        assert table.shape == (16384, 32) and table.dtype == torch.float64
        stored = GOLDEN["yarn"]["factors"][factor][name]
        expected = torch.tensor([stored[str(p)] for p in rows], dtype=torch.float64)
        torch.testing.assert_close(table[rows][:, pairs], expected, rtol=0, atol=1e-11)
        if factor == "1":
            assert stored == GOLDEN["plain_rope"][name]


@pytest.mark.parametrize("head_dim", [2, 16, 48, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
@pytest.mark.parametrize("length", [4, 32, 256, 2048, 65536])
@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0, 16.0])
def test_frequencies_of_other_shapes(head_dim, base, length, factor):
    # base 100 and length 65536 tell the clamp to head_dim - 1 from one to head_dim/2 - 1
    config = head_config(head_dim, block_size=length, rope_base=base, yarn_factor=factor)
    expected = torch.tensor(reference.inv_freq(head_dim, base, length, factor), dtype=torch.float64)
    torch.testing.assert_close(rotary_inv_freq(config), expected, rtol=1e-12, atol=0)
    scale = reference.temperature(factor) / math.sqrt(head_dim)
    assert softmax_scale(config) == pytest.approx(scale, rel=1e-14)


def test_factor_one_is_plain_rope_bit_for_bit():
    # the plain formula with torch, as pow may differ in the last bit from Python's
    theta = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert torch.equal(rotary_inv_freq(PUBLISHED), theta)
    angles = torch.arange(2000, dtype=torch.float64)[:, None] * theta
    cos, sin = rotary_table(PUBLISHED, 2000)
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
    assert softmax_scale(PUBLISHED) == 1 / math.sqrt(64)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
def test_table_has_unit_norm(factor):
    model = GPT(dataclasses.replace(TINY, yarn_factor=factor, pos_emb="rove"), max_len=5000)
    torch.testing.assert_close(
        model.cos**2 + model.sin**2, torch.ones_like(model.cos), rtol=0, atol=2e-7
    )
    cos, sin = rotary_table(model.config, 5000)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=0, atol=1e-15)


CASTS = {
    "as built": lambda m: m,
    "bfloat16()": lambda m: m.bfloat16(),
    "to(float16)": lambda m: m.to(torch.float16),
    "double()": lambda m: m.double(),
    "bfloat16().float()": lambda m: m.bfloat16().float(),
    "a parent's bfloat16()": lambda m: torch.nn.Sequential(m).bfloat16()[0],
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_table_stays_fp32_whatever_the_weights_are(cast, pos_emb):
    # modded-nanogpt#39, transformers#25681: half-precision angles are wrong by whole turns
    config = dataclasses.replace(PUBLISHED, vocab_size=64, n_head=1, n_embd=64, pos_emb=pos_emb)
    model = CASTS[cast](GPT(config, max_len=8192))
    theta = torch.tensor(reference.inv_freq(64, 10000.0, 1024, 1.0), dtype=torch.float64)
    angles = torch.arange(8192, dtype=torch.float64)[:, None] * theta
    for table, exact in ((model.cos, angles.cos()), (model.sin, angles.sin())):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table.double(), exact, rtol=0, atol=4e-8)


def test_table_built_and_used_under_autocast_is_fp32():
    # transformers#25681: inv_freq @ positions came out in bf16 under autocast
    with torch.autocast("cpu", torch.bfloat16):
        model = GPT(TINY, max_len=4096)
        cos, sin = model.cos, model.sin
        exact_cos, exact_sin = rotary_table(TINY, 4096)
        assert cos.dtype == torch.float32 and exact_cos.dtype == torch.float64
        x = torch.randn(2, 4096, TINY.head_dim).bfloat16()
        rotated = rotate(x, cos, sin)
    for table, exact in ((cos, exact_cos), (sin, exact_sin)):
        torch.testing.assert_close(table.double(), exact, rtol=0, atol=4e-8)
    assert rotated.dtype == torch.bfloat16
    # rotated in fp32, rounded once at the end
    assert torch.equal(rotated, rotate(x.float(), cos, sin).bfloat16())


def test_attention_gets_the_fp32_table_under_autocast_and_in_a_bf16_model(monkeypatch):
    seen = []
    plain = model_file.rotate

    def spy(x, cos, sin):
        seen.append((cos.dtype, sin.dtype))
        return plain(x, cos, sin)

    monkeypatch.setattr(model_file, "rotate", spy)
    model = GPT(dataclasses.replace(TINY, pos_emb="rove"))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids)
    model.bfloat16()(ids)
    assert len(seen) == 2 * 2 * 4  # two forwards, two layers; q, k, v and the output
    assert set(seen) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "rove_no_inverse", "none"])
def test_meta_construction_then_to_empty(pos_emb):
    # transformers#45902, torchtitan#4783: tables made on the meta device stay garbage after loading
    config = dataclasses.replace(
        TINY, pos_emb=pos_emb, yarn_factor=1.0 if pos_emb in ("learned", "none") else 4.0
    )
    usual = reference.randomise(GPT(config))
    with torch.device("meta"):
        model = GPT(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(usual.state_dict(), strict=True)
    if config.rotary:
        assert torch.equal(model.cos, usual.cos) and torch.equal(model.sin, usual.sin)
    ids = torch.randint(70, (2, 32), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(ids), usual(ids))


@pytest.mark.parametrize("pos_emb", ["learned", "none"])
def test_modes_without_rotation_have_no_table(pos_emb):
    model = GPT(dataclasses.replace(TINY, pos_emb=pos_emb))
    assert model.cos is None and model.sin is None
    assert not [name for name, _ in model.named_buffers()]


def test_the_table_is_in_no_state_dict_and_no_buffer():
    model = GPT(TINY)
    assert model.cos is not None
    assert not list(model.named_buffers())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_rotation_is_half_split_and_counter_clockwise():
    # flash-attention#45: two pairings exist. HuggingFace's is (i, i + hs/2), by +theta
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    a, b = 0.3, 1.1
    cos = torch.tensor([[math.cos(a), math.cos(b)]] * 2, dtype=torch.float64)
    sin = torch.tensor([[math.sin(a), math.sin(b)]] * 2, dtype=torch.float64)
    expected = [[math.cos(a), 0, math.sin(a), 0], [0, math.cos(b), 0, math.sin(b)]]
    torch.testing.assert_close(
        rotate(x, cos, sin), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_rotated_vectors_keep_their_length_and_minus_sin_turns_back():
    config = head_config(16, yarn_factor=4.0, block_size=32)
    cos, sin = rotary_table(config, 300)
    x = torch.randn(3, 300, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotate(x, cos, sin)
    assert not torch.allclose(x, y, atol=0.1)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    torch.testing.assert_close(rotate(y, cos, -sin), x, rtol=0, atol=1e-14)


# -----------------------------------------------------------------------------
# RoVE: each property is a function, so that the negative controls below can ask for its failure


def one_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    factor: float = 1.0,
    block_size: int = 32,
    pos_emb: str = "rove",
    offset: int = 0,
    chunks: list[int] | None = None,
) -> torch.Tensor:
    """What CausalSelfAttention carries for these q, k, v (T, hs), in float64, tokens at `offset`.

    The projections are chosen such that they hand q, k and v in and the output out unchanged.
    chunks: feed that many tokens at a time through a KV cache.
    """
    T, hs = q.shape
    config = head_config(hs, block_size=block_size, yarn_factor=factor, pos_emb=pos_emb)
    attn = CausalSelfAttention(config, 0, "eager").double()
    x = torch.eye(T, hs, dtype=torch.float64)[None]  # token t picks column t of c_attn's weight
    with torch.no_grad():
        attn.c_attn.weight.zero_()
        attn.c_attn.weight[:, :T] = torch.cat((q, k, v), dim=1).T
        attn.c_attn.bias.zero_()
        attn.c_proj.weight.copy_(torch.eye(hs))
        attn.c_proj.bias.zero_()
        cos, sin = (t[offset : offset + T] for t in rotary_table(config, offset + T))
        if chunks is None:
            return attn(x, cos, sin)[0]
        cache, rows = KVCache(config, 1, T, dtype=torch.float64), []
        for part in torch.arange(T).split(chunks):
            rows.append(attn(x[:, part], cos[part], sin[part], cache)[0])
            cache.pos += len(part)
        return torch.cat(rows)


def random_qkv(T: int, hs: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, hs, dtype=torch.float64, generator=generator) for _ in range(3)]


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def equals_the_sum_over_offsets() -> None:
    q, k, v = random_qkv(7, 8)
    theta = reference.inv_freq(8, 10000.0, 32, 4.0)
    scale = reference.temperature(4.0) / math.sqrt(8)
    expected = reference.offset_sum(q, k, v, theta, scale, values=True)
    close(one_head(q, k, v, factor=4.0), expected)


def equals_the_golden_output() -> None:
    micro = GOLDEN["rove_yarn_micro"]
    q, k, v = (torch.tensor(micro[name], dtype=torch.float64) for name in "qkv")
    expected = torch.tensor(micro["output_correct"], dtype=torch.float64)
    for offset in (0, micro["position_offset_used"]):
        close(one_head(q, k, v, factor=micro["factor"], offset=offset), expected, 1e-12)


def shift_invariant() -> None:
    q, k, v = random_qkv(6, 16, seed=1)
    expected = one_head(q, k, v, factor=4.0)
    for offset in (1, 1000, 16000):
        close(one_head(q, k, v, factor=4.0, offset=offset), expected)


def first_token_gets_its_own_value() -> None:
    q, k, v = random_qkv(6, 16, seed=2)
    for factor, offset in itertools.product((1.0, 4.0), (0, 5, 1000)):
        close(one_head(q, k, v, factor=factor, offset=offset)[0], v[0])


def one_key_ignores_the_yarn_factor() -> None:
    q, k, v = random_qkv(1, 16, seed=3)
    for factor in (1.0, 2.0, 4.0, 16.0):
        close(one_head(q, k, v, factor=factor, offset=9), v)


def decoding_equals_the_full_pass() -> None:
    q, k, v = random_qkv(8, 8, seed=4)
    expected = one_head(q, k, v, offset=3)
    for chunks in ([1] * 8, [5, 1, 1, 1], [2, 3, 3]):
        close(one_head(q, k, v, offset=3, chunks=chunks), expected)


PROPERTIES = {
    f.__name__: f
    for f in (
        equals_the_sum_over_offsets,
        equals_the_golden_output,
        shift_invariant,
        first_token_gets_its_own_value,
        one_key_ignores_the_yarn_factor,
        decoding_equals_the_full_pass,
    )
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_rove(name):
    PROPERTIES[name]()


# In RoVE's forward, `rotate` is called for q, k, v and the output, in this order. Each control is
# a wrong answer to one of the calls: a fault that somebody has shipped.


def no_inverse(call, x, cos, sin):
    return x if call == "output" else rotate(x, cos, sin)


def wrong_pairing_in_the_inverse(call, x, cos, sin):
    if call != "output":
        return rotate(x, cos, sin)
    even, odd, sin = x[..., 0::2], x[..., 1::2], sin
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def wrong_direction_of_the_inverse(call, x, cos, sin):
    return rotate(x, cos, -sin if call == "output" else sin)


def values_rotated_twice(call, x, cos, sin):
    x = rotate(x, cos, sin)
    return rotate(x, cos, sin) if call == "v" else x


def values_not_rotated(call, x, cos, sin):
    return x if call == "v" else rotate(x, cos, sin)


def inverse_from_position_zero(call, x, cos, sin):
    if call == "output":  # right for the whole sequence at once, wrong behind a cache
        config = head_config(x.size(-1), block_size=32)
        cos, sin = (t[:, None] for t in rotary_table(config, x.size(1)))  # (T, 1, hs/2)
        sin = -sin
    return rotate(x, cos, sin)


def temperature_on_the_table(call, x, cos, sin):
    m = math.sqrt(reference.temperature(4.0))  # as reference YaRN has it, with a plain softmax
    return rotate(x, m * cos, m * sin)


def temperature_on_the_values(call, x, cos, sin):
    m = math.sqrt(reference.temperature(4.0)) if call in ("v", "output") else 1.0
    return rotate(x, m * cos, m * sin)  # the scores are right, only what is carried is too large


CONTROLS = [
    (no_inverse, "equals_the_sum_over_offsets"),
    (no_inverse, "equals_the_golden_output"),
    (no_inverse, "shift_invariant"),
    (no_inverse, "first_token_gets_its_own_value"),
    (wrong_pairing_in_the_inverse, "equals_the_sum_over_offsets"),
    (wrong_pairing_in_the_inverse, "shift_invariant"),
    (wrong_pairing_in_the_inverse, "first_token_gets_its_own_value"),
    (wrong_direction_of_the_inverse, "equals_the_sum_over_offsets"),
    (wrong_direction_of_the_inverse, "shift_invariant"),
    (values_rotated_twice, "equals_the_sum_over_offsets"),
    (values_rotated_twice, "shift_invariant"),
    (values_rotated_twice, "first_token_gets_its_own_value"),
    (values_not_rotated, "equals_the_sum_over_offsets"),
    (values_not_rotated, "first_token_gets_its_own_value"),
    (inverse_from_position_zero, "decoding_equals_the_full_pass"),
    (temperature_on_the_table, "equals_the_sum_over_offsets"),
    (temperature_on_the_table, "equals_the_golden_output"),
    (temperature_on_the_table, "first_token_gets_its_own_value"),
    (temperature_on_the_table, "one_key_ignores_the_yarn_factor"),
    (temperature_on_the_values, "equals_the_sum_over_offsets"),
    (temperature_on_the_values, "equals_the_golden_output"),
    (temperature_on_the_values, "first_token_gets_its_own_value"),
    (temperature_on_the_values, "one_key_ignores_the_yarn_factor"),
]


def put_in(monkeypatch, fault) -> None:
    calls = itertools.cycle(("q", "k", "v", "output"))
    monkeypatch.setattr(model_file, "rotate", lambda x, cos, sin: fault(next(calls), x, cos, sin))
    if fault is temperature_on_the_table:
        monkeypatch.setattr(model_file, "softmax_scale", lambda config: config.head_dim**-0.5)


@pytest.mark.parametrize(("fault", "name"), CONTROLS, ids=lambda x: getattr(x, "__name__", x))
def test_negative_control(monkeypatch, fault, name):
    put_in(monkeypatch, fault)
    with pytest.raises(AssertionError, match="not close"):
        PROPERTIES[name]()


@pytest.mark.parametrize("fault", [temperature_on_the_table, temperature_on_the_values])
def test_a_shift_cannot_see_the_temperature_on_the_table(monkeypatch, fault):
    # why the properties above are not one: m^2 R_(j-i) still depends on the offset alone
    put_in(monkeypatch, fault)
    shift_invariant()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    T=st.integers(1, 9),
    n_head=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6, 10]),
    factor=st.sampled_from([1.0, 2.5, 8.0]),
    base=st.sampled_from([20.0, 10000.0]),
    offset=st.sampled_from([0, 1, 77, 16000]),
    pos_emb=st.sampled_from(["rope", "rove"]),
    backend=st.sampled_from(["eager", "sdpa"]),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_sum_over_offsets(
    T, n_head, head_dim, factor, base, offset, pos_emb, backend, seed
):
    """CausalSelfAttention = W_O sum_j A_ij R_(j-i) (W_V x_j + b_V) + b_O, with its gradients.

    With pos_emb "rope" the sum is without R_(j-i): RoPE's values are not rotated.
    """
    C, B = n_head * head_dim, 2
    config = GPTConfig(
        vocab_size=64,
        block_size=16,
        n_layer=1,
        n_head=n_head,
        n_embd=C,
        pos_emb=pos_emb,
        rope_base=base,
        yarn_factor=factor,
    )
    attn = reference.randomise(CausalSelfAttention(config, 0, backend).double(), 0.5, seed)
    x = torch.randn(B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    cos, sin = (t[offset:] for t in rotary_table(config, offset + T))
    actual = attn(x, cos, sin)

    theta = reference.inv_freq(head_dim, base, 16, factor)
    scale = reference.temperature(factor) / math.sqrt(head_dim)
    w_q, w_k, w_v = attn.c_attn.weight.split(C)
    b_q, b_k, b_v = attn.c_attn.bias.split(C)
    expected = []
    for row in x:
        q, k, v = row @ w_q.T + b_q, row @ w_k.T + b_k, row @ w_v.T + b_v
        heads = [
            reference.offset_sum(
                q[:, h : h + head_dim],
                k[:, h : h + head_dim],
                v[:, h : h + head_dim],
                theta,
                scale,
                pos_emb == "rove",
            )
            for h in range(0, C, head_dim)
        ]
        expected.append(torch.cat(heads, 1) @ attn.c_proj.weight.T + attn.c_proj.bias)
    expected = torch.stack(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    direction = torch.randn_like(expected)
    inputs = [x, *attn.parameters()]
    gradients = torch.autograd.grad((actual * direction).sum(), inputs)
    references = torch.autograd.grad((expected * direction).sum(), inputs)
    for gradient, ref in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, ref, rtol=1e-8, atol=1e-8)


# -----------------------------------------------------------------------------
# the two arms of the comparison


def test_rope_leaves_the_values_alone():
    q, k, v = random_qkv(6, 16, seed=5)
    config = head_config(16, block_size=32)
    expected = reference.offset_sum(
        q, k, v, reference.inv_freq(16, 10000.0, 32, 1.0), softmax_scale(config), values=False
    )
    close(one_head(q, k, v, pos_emb="rope", offset=11), expected)
    model = GPT(TINY)
    cache = KVCache(TINY, 1, 8)
    ids = torch.arange(8)[None]
    model(ids, kv_cache=cache)
    block = model.transformer.h[0]
    v = block.attn.c_attn(block.ln_1(model.transformer.wte(ids)))[..., -TINY.n_embd :]
    stored = cache.v[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(stored, v)
    assert not torch.allclose(cache.k[0, :, :, 1:], cache.v[0, :, :, 1:])


def test_rope_and_rove_start_from_the_same_weights():
    arms = {
        pos_emb: GPT(dataclasses.replace(TINY, pos_emb=pos_emb), seed=3)
        for pos_emb in ("rope", "rove", "rove_no_inverse", "learned", "none")
    }
    rope = arms["rope"].state_dict()
    for pos_emb, model in arms.items():
        state = model.state_dict()
        extra = ["transformer.wpe.weight"] if pos_emb == "learned" else []
        assert list(state) == list(rope) + extra
        assert all(torch.equal(state[name], rope[name]) for name in rope)
        assert model.num_params() == arms["rope"].num_params() + sum(
            state[name].numel() for name in extra
        )
    other = GPT(TINY, seed=4).state_dict()
    assert not torch.equal(other["transformer.wte.weight"], rope["transformer.wte.weight"])


def test_rope_and_rove_differ_at_the_attention_output():
    # not at the loss: with a zero c_proj the two are the same function
    q, k, v = random_qkv(6, 16, seed=6)
    rope, rove = (one_head(q, k, v, pos_emb=p) for p in ("rope", "rove"))
    close(rope[0], rove[0])
    assert ((rope - rove)[1:].norm(dim=1) > 0.05).all()


def test_the_page_on_rove_quotes_model_py_and_names_tests_that_exist():
    root = reference.FIXTURES.parent.parent
    page, code = (root / "docs" / "rove.md").read_text(), (root / "model.py").read_text()
    quotes = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(quotes) == 2
    for quote in quotes:
        assert quote in code
    tests = "".join(path.read_text() for path in (root / "tests").glob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)", page))
    assert len(names) > 10 and all(f"def {name}(" in tests for name in names)
    properties = set(re.findall(r"`test_rove\[(\w+)\]`", page))
    assert properties <= set(PROPERTIES)
    # the table of negative controls is complete
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page, flags=re.M)
    listed = [(fault, name) for fault, cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert listed == [(fault.__name__, name) for fault, name in CONTROLS]
