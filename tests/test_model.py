"""The whole GPT: against an independent forward pass, its counts, initialisation and wrappers."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model import GPT, GPTConfig
from tests import reference

POS_EMBS = ["learned", "rope", "rove", "rove_no_inverse", "none"]
CONFIG = GPTConfig(vocab_size=70, block_size=24, n_layer=2, n_head=2, n_embd=32)


def make(pos_emb: str, **changes) -> GPTConfig:
    return dataclasses.replace(CONFIG, pos_emb=pos_emb, **changes)


def ids_of(B: int, T: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(70, (B, T), generator=torch.Generator().manual_seed(seed))


# -----------------------------------------------------------------------------
# the function


@pytest.mark.parametrize(
    ("pos_emb", "factor"),
    [("learned", 1.0), ("none", 1.0), ("rope", 1.0), ("rope", 4.0), ("rove", 1.0), ("rove", 4.0)],
)
@pytest.mark.parametrize("base", [10000.0, 300.0])
def test_logits_and_loss_equal_an_independent_float64_forward(pos_emb, factor, base):
    config = make(pos_emb, yarn_factor=factor, rope_base=base)
    model = reference.randomise(GPT(config))
    ids = ids_of(2, 24)
    expected = torch.stack([reference.logits(model.state_dict(), config, row) for row in ids])
    torch.testing.assert_close(model(ids).double(), expected, rtol=0, atol=1e-4)
    double = GPT(config).double()
    double.load_state_dict(model.state_dict())
    # the table stays fp32, so this is as close as it gets
    torch.testing.assert_close(double(ids), expected, rtol=0, atol=2e-5)
    targets = ids_of(2, 24, seed=1)
    nll = expected.logsumexp(-1) - expected.gather(-1, targets[..., None])[..., 0]
    assert double(ids, targets).item() == pytest.approx(nll.mean().item(), abs=1e-5)


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_hidden_and_head_make_the_logits(pos_emb):
    model = reference.randomise(GPT(make(pos_emb)))
    ids = ids_of(2, 10)
    hidden = model.hidden(ids)
    assert hidden.shape == (2, 10, 32)
    chunks = [model.head(part) for part in hidden.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(chunks, 1), model(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_nothing_depends_on_the_mode(pos_emb):
    # nanoGPT#240: dropout that stays on in evaluation. Here there is none at all
    model = reference.randomise(GPT(make(pos_emb)))
    ids = ids_of(2, 10)
    assert torch.equal(model.train()(ids), model.eval()(ids))


def test_loss_is_fp32_in_a_bf16_model():
    model = reference.randomise(GPT(CONFIG), 0.1).bfloat16()
    ids, targets = ids_of(2, 24), ids_of(2, 24, seed=1)
    loss = model(ids, targets)
    assert loss.dtype == torch.float32
    logits = model(ids).double()  # bf16 logits, summed in float64
    nll = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
    assert loss.item() == pytest.approx(nll.mean().item(), abs=1e-5)


@pytest.mark.parametrize("pos_emb", ["rope", "rove", "none"])
def test_longer_than_trained(pos_emb):
    # nanochat#514: a few-shot prompt longer than the table stopped an evaluation late in a run
    config = make(pos_emb)
    small, large = (reference.randomise(GPT(config, max_len=n)) for n in (100, 3000))
    ids = ids_of(1, 100)
    assert torch.equal(small(ids), large(ids))
    torch.testing.assert_close(small(ids)[:, :24], reference.randomise(GPT(config))(ids[:, :24]))


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_more_tokens_than_max_len_are_refused(pos_emb):
    model = GPT(make(pos_emb))
    model(ids_of(1, 24))
    with pytest.raises(ValueError, match=r"25 tokens are more than max_len \(24\).*larger max_len"):
        model(ids_of(1, 25))


def test_learned_positions_cannot_be_made_longer():
    with pytest.raises(ValueError, match=r"learned positions end at block_size \(24\).*max_len"):
        GPT(make("learned"), max_len=25)
    GPT(make("learned"), max_len=10)


def test_yarn_widens_the_context():
    config = make("rove", yarn_factor=4.0)
    assert config.context == 96 and GPT(config).max_len == 96
    assert CONFIG.context == 24
    for length in range(100, 800):  # a factor of "wanted / trained" is seldom exact in binary
        assert make("rope", block_size=100, yarn_factor=length / 100).context == length


@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_yarn_at_evaluation_fixed_and_fitted_to_each_length(pos_emb):
    # weights trained without YaRN, evaluated with one factor for all lengths or one for each
    state = reference.randomise(GPT(make(pos_emb))).state_dict()
    logits = {}
    for length in (24, 48, 96):
        ids = ids_of(1, 96)[:, :length]
        for name, factor in (("fixed", 4.0), ("fitted", length / 24)):
            config = make(pos_emb, yarn_factor=factor)
            model = GPT(config, max_len=96).double()
            model.load_state_dict(state)
            logits[name, length] = model(ids)[0]
            expected = reference.logits(state, config, ids[0])
            torch.testing.assert_close(logits[name, length], expected, rtol=0, atol=5e-5)
    # they are one model at the longest length and two below it
    assert torch.equal(logits["fixed", 96], logits["fitted", 96])
    assert (logits["fixed", 48] - logits["fitted", 48]).abs().max() > 0.01
    plain = GPT(make(pos_emb)).double()
    plain.load_state_dict(state)
    assert torch.equal(plain(ids_of(1, 96)[:, :24])[0], logits["fitted", 24])


# -----------------------------------------------------------------------------
# parameters


@pytest.mark.parametrize(
    ("shape", "learned", "rotary"),
    [
        (dict(n_layer=12, n_head=12, n_embd=768), 124_475_904, 123_689_472),
        (dict(n_layer=24, n_head=16, n_embd=1024), 354_871_296, 353_822_720),
    ],
    ids=["124M", "354M"],
)
def test_parameter_counts(shape, learned, rotary):
    # transformers#21118: no learned table in a rotary model
    expected = {"learned": learned, "rope": rotary, "rove": rotary, "none": rotary}
    for pos_emb, count in expected.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(pos_emb=pos_emb, **shape))
        assert model.num_params() == count
        assert sum(t.numel() for t in model.state_dict().values()) == count


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_names_are_huggingfaces(pos_emb):
    linear = ("weight", "bias")
    expected = {"transformer.wte.weight", *(f"transformer.ln_f.{p}" for p in linear)}
    if pos_emb == "learned":
        expected.add("transformer.wpe.weight")
    for l in range(2):
        for module in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            expected |= {f"transformer.h.{l}.{module}.{p}" for p in linear}
    assert set(GPT(make(pos_emb)).state_dict()) == expected


def test_learned_and_rotary_checkpoints_do_not_mix():
    learned, rope = GPT(make("learned")), GPT(make("rope"))
    with pytest.raises(RuntimeError, match="wpe"):
        rope.load_state_dict(learned.state_dict())
    with pytest.raises(RuntimeError, match="wpe"):
        learned.load_state_dict(rope.state_dict())


def test_another_vocabulary_padding_is_refused_by_name():
    # nanoGPT#121
    state = GPT(CONFIG).state_dict()
    state["transformer.wte.weight"] = state["transformer.wte.weight"][:70]
    with pytest.raises(RuntimeError, match=r"wte.weight.*\[70, 32\].*\[128, 32\]"):
        GPT(CONFIG).load_state_dict(state)


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_initial_weights(pos_emb):
    config = make(pos_emb, n_layer=4, n_embd=128, n_head=4, block_size=64)
    model = GPT(config)
    seen = 0
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            error = 4 * std / math.sqrt(p.numel())
            assert abs(p.mean().item()) < error, name
            assert p.std().item() == pytest.approx(std, abs=error), name
            seen += "c_proj" in name
        elif ".ln_" in name and name.endswith("weight"):
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            assert not p.any(), name
    assert seen == 8
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert len({round(p[0, 0].item(), 9) for p in matrices}) == len(matrices)  # all drawn afresh


def test_initial_weights_depend_on_the_seed_alone():
    states = []
    for global_seed, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(global_seed)
        states.append(GPT(CONFIG, seed=seed).state_dict())
    for name, p in states[0].items():
        assert torch.equal(p, states[1][name]), name
    assert not torch.equal(*(s["transformer.wte.weight"] for s in states[::2]))


@pytest.mark.parametrize("pos_emb", POS_EMBS)
@pytest.mark.parametrize("vocab_size", [65, 257])
def test_loss_at_the_start_is_ln_v(pos_emb, vocab_size):
    # the real vocabulary's: ln of the padded one (128, 320) is far off
    model = GPT(make(pos_emb, vocab_size=vocab_size))
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(vocab_size, (2, 16, 24), generator=generator)
    assert model(ids, targets).item() == pytest.approx(math.log(vocab_size), abs=0.03)


def test_padded_ids_are_nowhere():
    # build-nanogpt#81
    assert GPTConfig().padded_vocab_size == 50304 and CONFIG.padded_vocab_size == 128
    assert GPTConfig(vocab_size=64).padded_vocab_size == 64
    model = reference.randomise(GPT(CONFIG))
    ids, targets = ids_of(2, 24), ids_of(2, 24, seed=1)
    logits, loss = model(ids), model(ids, targets)
    assert logits.shape == (2, 24, 70) and model.head(model.hidden(ids)).shape == logits.shape
    loss.backward()
    gradient = model.transformer.wte.weight.grad
    assert not gradient[70:].any() and gradient[:70].abs().sum(1).all()
    with torch.no_grad():
        model.transformer.wte.weight[70:] = 1e3
    assert torch.equal(model(ids), logits) and torch.equal(model(ids, targets), loss)


# -----------------------------------------------------------------------------
# wrappers


WRAPPERS = {
    "as built": lambda m: m,
    "load_state_dict": lambda m: m.load_state_dict(GPT(m.config, seed=5).state_dict()) and m,
    "load_state_dict, assign": lambda m: (
        m.load_state_dict(GPT(m.config, seed=5).state_dict(), assign=True) and m
    ),
    "to(float64)": lambda m: m.to(torch.float64),
    "meta, to_empty": lambda m: m.to("meta").to_empty(device="cpu"),
    "compile": lambda m: torch.compile(m, backend="eager"),
}


@pytest.mark.parametrize("how", WRAPPERS)
def test_the_head_is_the_embedding(how):
    # modalities#357, nanoGPT#21: no longer one tensor after some way of loading
    config = make("rove", vocab_size=200)  # 256 padded rows, a shape that no other weight has
    model = WRAPPERS[how](GPT(config))
    weight = model.transformer.wte.weight
    large = [p for p in model.parameters() if 256 in p.shape]
    assert len(large) == 1 and large[0] is weight
    assert model.num_params() == GPT(config).num_params()
    x = torch.randn(3, 32, dtype=weight.dtype)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))
        torch.testing.assert_close(model.head(x), x @ weight[:200].T)


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_compiles_without_breaks_and_at_most_twice(pos_emb, backend):
    # build-nanogpt#79: one more graph for each length
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = reference.randomise(GPT(make(pos_emb, block_size=64), attn_backend=backend))
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for T in (64, 16, 33, 7, 48, 20, 63):
        ids, targets = ids_of(2, T), ids_of(2, T, seed=1)
        model.zero_grad()
        loss = compiled(ids, targets)
        loss.backward()
        gradient = model.transformer.wte.weight.grad.clone()
        model.zero_grad()
        plain = model(ids, targets)
        plain.backward()
        torch.testing.assert_close(loss, plain, rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient, model.transformer.wte.weight.grad, rtol=0, atol=1e-5)
    assert 1 <= len(graphs) <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
def test_compiles_with_aot_autograd(pos_emb):
    torch._dynamo.reset()
    model = reference.randomise(GPT(make(pos_emb)))
    ids, targets = ids_of(2, 24), ids_of(2, 24, seed=1)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, targets)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = model(ids, targets)
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=0, atol=1e-4)
    torch._dynamo.reset()


# what is kept of a block, and how many logits exist at once, must not change a number
SAVING = [
    dict(loss_chunk=7), dict(activation_checkpointing=True),
    dict(loss_chunk=10**6, activation_checkpointing=True),
]  # fmt: skip


@pytest.mark.parametrize("how", SAVING, ids=str)
@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove"])
@pytest.mark.parametrize("compiled", [False, True])
def test_saving_memory_changes_no_number(pos_emb, how, compiled):
    torch._dynamo.reset()
    plain, saving = (reference.randomise(GPT(make(pos_emb), **h)) for h in ({}, how))
    ids, targets = ids_of(3, 24), ids_of(3, 24, seed=1)
    plain(ids, targets).backward()
    # seven does not divide the 72 tokens: the last chunk is a small one
    run = torch.compile(saving, backend="aot_eager", fullgraph=True) if compiled else saving
    loss = run(ids, targets)
    loss.backward()
    expected = torch.stack([reference.logits(plain.state_dict(), plain.config, row) for row in ids])
    nll = expected.logsumexp(-1) - expected.gather(-1, targets[..., None])[..., 0]
    assert loss.item() == pytest.approx(nll.mean().item(), abs=2e-5)
    for (name, p), q in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert not saving.transformer.wte.weight.grad[70:].any()  # the padding
    with torch.no_grad():
        saving.transformer.wte.weight[70:] = 1e3  # and it is in no softmax
    assert torch.equal(run(ids, targets), loss)
    with torch.inference_mode():
        torch.testing.assert_close(saving(ids), plain(ids))
    torch._dynamo.reset()


def test_a_chunked_loss_is_fp32_under_autocast():
    """In bf16 torch's linear_cross_entropy rounds the loss to 8 bits: 7.21875 for 7.2437."""
    model = reference.randomise(GPT(make("rove"), loss_chunk=16))
    ids, targets = ids_of(2, 24), ids_of(2, 24, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, hidden = model(ids, targets), model.hidden(ids)
    logits = (hidden.double() @ model.transformer.wte.weight[:70].double().T).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets.flatten())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5)


@pytest.mark.parametrize("pos_emb", POS_EMBS)
def test_a_bf16_residual_stream_is_close_and_the_same_for_all(pos_emb):
    ids, targets = ids_of(3, 24), ids_of(3, 24, seed=1)
    gradients, losses, streams = [], [], []
    for bf16 in (False, True):
        model = reference.randomise(GPT(make(pos_emb), bf16_residual=bf16), 0.1)
        model.transformer.h[1].register_forward_pre_hook(lambda m, x: streams.append(x[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, targets)
        loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        assert loss.dtype == torch.float32
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert streams == [torch.float32, torch.bfloat16]
    # the tolerances of bf16 in scripts/gpu_check.py
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert (gradients[1] - gradients[0]).norm() < 5e-2 * gradients[0].norm()


def two_steps_under_ddp(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    weights = {}
    for pos_emb in POS_EMBS:
        model = GPT(make(pos_emb, yarn_factor=1.0 if pos_emb in ("learned", "none") else 4.0))
        ddp = torch.nn.parallel.DistributedDataParallel(model)  # no search for unused parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            ids = ids_of(4, 25, seed=step)[2 * rank : 2 * rank + 2]  # each rank has its own half
            ddp(ids[:, :-1], ids[:, 1:]).backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        weights[pos_emb] = model.state_dict()
    torch.save(weights, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_ddp_has_no_unused_parameters_in_any_mode(tmp_path):
    # transformers#21118: a table that a switch leaves idle stops multi-GPU training in step 2
    mp.spawn(two_steps_under_ddp, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for pos_emb in POS_EMBS:
        factor = 1.0 if pos_emb in ("learned", "none") else 4.0
        alone = GPT(make(pos_emb, yarn_factor=factor))
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
        for step in range(2):  # one process, the whole batch
            ids = ids_of(4, 25, seed=step)
            alone(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in alone.state_dict().items():
            assert torch.equal(ranks[0][pos_emb][name], ranks[1][pos_emb][name])
            torch.testing.assert_close(ranks[0][pos_emb][name], p, rtol=0, atol=1e-5)


# -----------------------------------------------------------------------------
# the config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(n_embd=770), r"n_embd \(770\) must be a multiple of n_head \(12\)"),
        (dict(n_embd=36, n_head=12), r"n_embd / n_head \(3\) must be even"),
        (dict(pos_emb="alibi"), r"pos_emb \('alibi'\) must be one of"),
        (dict(yarn_factor=0.5), r"yarn_factor \(0.5\) must be at least 1"),
        (dict(yarn_factor=float("nan")), r"yarn_factor \(nan\)"),
        (dict(yarn_factor=float("inf")), r"yarn_factor \(inf\)"),
        (dict(pos_emb="learned", yarn_factor=2.0), r"yarn_factor \(2.0\) needs pos_emb rope or"),
        (dict(pos_emb="none", yarn_factor=2.0), r"yarn_factor \(2.0\) needs pos_emb rope or"),
        (dict(rope_base=1.0), r"rope_base \(1.0\) must be greater than 1"),
        (dict(rope_base=float("nan")), r"rope_base \(nan\)"),
        (dict(vocab_size=0), r"vocab_size \(0\) must be at least 1"),
        (dict(block_size=-1), r"block_size \(-1\) must be at least 1"),
        (dict(n_layer=0), r"n_layer \(0\) must be at least 1"),
        (dict(n_head=0), r"n_head \(0\) must be at least 1"),
        (dict(n_embd=0), r"n_embd \(0\) must be at least 1"),
        (dict(n_layer=1.5), r"n_layer \(1.5\) must be at least 1, an int"),
        (dict(n_head=True), r"n_head \(True\) must be at least 1, an int"),
        (dict(vocab_size="two"), r"vocab_size \('two'\) must be at least 1, an int"),
        (dict(block_size=1e30), r"block_size \(1e\+30\) must be at least 1, an int"),
        (dict(block_size=10**400), r"block_size \(10+\) must be .* below 2\^31"),
        (dict(yarn_factor=1e30), r"yarn_factor \(1e\+30\) must be .* context .* below 2\^31"),
    ],
    ids=str,
)
def test_impossible_configs_are_refused_with_their_values(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**settings)


def test_an_odd_head_size_is_fine_without_rotation():
    GPT(make("learned", n_embd=6, n_head=2))(ids_of(1, 5))


def test_config_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.pos_emb = "rove"
