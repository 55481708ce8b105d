"""A head as a linear map: the identities of the paper on random weights, and scripts.circuits."""

import cmath
import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from model import GPT, CausalSelfAttention, GPTConfig, rotary_table
from nanorove import circuits
from nanorove.checkpoint import save_checkpoint
from nanorove.config import load_config_file
from nanorove.errors import UserError
from scripts import circuits as script
from tests import reference
from tests.conftest import with_checksum

CONFIG = GPTConfig(70, 32, 2, 2, 24, "rove", rope_base=50.0)
T = 7


def attn_of(pos_emb: str, factor: float = 1.0) -> tuple[CausalSelfAttention, GPTConfig]:
    config = dataclasses.replace(CONFIG, pos_emb=pos_emb, yarn_factor=factor)
    return reference.randomise(CausalSelfAttention(config, 0, "eager").double(), 0.4), config


def sequence(seed: int = 0, B: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, CONFIG.n_embd, dtype=torch.float64, generator=generator)


def mixers(attn: CausalSelfAttention, config: GPTConfig, x: torch.Tensor):
    """[(A, W_V, W_O, mixer)] of the heads, for one sequence x (1, T, C)."""
    cos, sin = rotary_table(config, T)
    A = circuits.attention_weights(attn, x, cos, sin)[0]
    table = (cos, sin) if config.pos_emb == "rove" else (None, None)
    found = []
    for head in range(config.n_head):
        w_v, w_o = circuits.value_weights(attn, head)
        value_map = circuits.value_mixer(A[head], *table, config.head_dim)
        found.append((A[head], w_v, w_o, circuits.matrix_mixer(value_map, w_v)))
    return found


@pytest.mark.parametrize(("pos_emb", "factor"), [("rope", 1.0), ("rove", 1.0), ("rove", 4.0)])
def test_the_mixers_of_the_heads_are_the_attention_layer(pos_emb, factor):
    attn, config = attn_of(pos_emb, factor)
    with torch.no_grad():
        attn.c_attn.bias[-config.n_embd :] = 0  # the mixer is the linear part
    x = sequence()
    expected = attn(x, *rotary_table(config, T))[0]
    actual = sum(
        torch.einsum("ca,iajb,jb->ic", w_o, mixer, x[0])
        for _, _, w_o, mixer in mixers(attn, config, x)
    )
    torch.testing.assert_close(actual + attn.c_proj.bias, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_rope_is_kronecker_and_rove_is_gated_toeplitz(factor):
    for pos_emb in ("rope", "rove"):
        attn, config = attn_of(pos_emb, factor)
        for A, w_v, _, mixer in mixers(attn, config, sequence(1)):
            forms = {
                "rope": circuits.kronecker_form(A, w_v),
                "rove": circuits.toeplitz_form(A, w_v, config),
            }
            distances = {p: circuits.relative_distance(mixer, form) for p, form in forms.items()}
            assert distances.pop(pos_emb) < 1e-14
            (other,) = distances.values()
            assert other > 0.1  # and it is not the other one


def test_the_forms_are_written_out_sums():
    attn, config = attn_of("rove")
    A, w_v, _, _ = mixers(attn, config, sequence(2))[0]
    kronecker = torch.kron(A, w_v).view(T, 12, T, 24)
    torch.testing.assert_close(circuits.kronecker_form(A, w_v), kronecker, rtol=0, atol=1e-15)
    theta = reference.inv_freq(12, 50.0, 32, 1.0)
    toeplitz = torch.zeros(T, 12, T, 24, dtype=torch.float64)
    for i in range(T):
        for j in range(i + 1):
            for a, angle in enumerate((j - i) * t for t in theta):
                first, second = w_v[a], w_v[a + 6]
                toeplitz[i, a, j] = A[i, j] * (math.cos(angle) * first - math.sin(angle) * second)
                toeplitz[i, a + 6, j] = A[i, j] * (
                    math.sin(angle) * first + math.cos(angle) * second
                )
    actual = circuits.toeplitz_form(A, w_v, config)
    torch.testing.assert_close(actual, toeplitz, rtol=0, atol=1e-13)


def test_attention_weights_are_those_of_the_model():
    for pos_emb in ("learned", "none", "rope", "rove"):
        config = dataclasses.replace(CONFIG, pos_emb=pos_emb)
        model = reference.randomise(GPT(config), 0.3)
        ids = torch.randint(70, (3, 9), generator=torch.Generator().manual_seed(0))
        found = circuits.model_attention(model, ids)
        assert [A.shape for A in found] == [(3, 2, 9, 9)] * 2
        for A in found:
            torch.testing.assert_close(A.sum(-1), torch.ones(3, 2, 9).double(), rtol=0, atol=1e-6)
            assert not A.triu(1).any()
        # by its own weights the first layer puts out what it puts out
        block = model.transformer.h[0]
        x = block.ln_1(model.transformer.wte(ids) + (
            model.transformer.wpe.weight[:9] if pos_emb == "learned" else 0
        ))  # fmt: skip
        cos, sin = (None, None) if model.cos is None else (model.cos[:9], model.sin[:9])
        again = circuits.attention_weights(block.attn, x, cos, sin)
        torch.testing.assert_close(found[0], again.double(), rtol=0, atol=0)
    # and beyond rotations: equal logits, equal weights
    attn, config = attn_of("rope")
    with torch.no_grad():
        attn.c_attn.weight[: config.n_embd] = 0
        attn.c_attn.bias[: config.n_embd] = 0
    A = circuits.attention_weights(attn, sequence(), *rotary_table(config, T))
    expected = torch.ones(T, T).double().tril() / torch.arange(1, T + 1)[:, None]
    torch.testing.assert_close(A[0, 0], expected, rtol=0, atol=1e-12)


def test_reads_and_outputs_are_those_of_the_layers():
    config = dataclasses.replace(CONFIG, pos_emb="rove")
    model = reference.randomise(GPT(config), 0.3)
    ids = torch.randint(70, (2, 9), generator=torch.Generator().manual_seed(0))
    found = circuits.reads_and_outputs(model, ids)
    assert [(x.shape, y.shape) for x, y in found] == [((2, 9, 24), (2, 2, 9, 12))] * 2
    # joined by W_O the outputs are what the layer makes of what it read
    for block, (x, y) in zip(model.transformer.h, found, strict=True):
        layer = block.attn(x.float(), model.cos[:9], model.sin[:9]).double()
        bias = block.attn.c_proj.bias.double()
        parts = [y[:, h] @ circuits.value_weights(block.attn, h)[1].T for h in range(2)]
        torch.testing.assert_close(sum(parts) + bias, layer, rtol=0, atol=1e-5)
    assert not model.transformer.h[0].attn._forward_pre_hooks  # nothing is left behind
    assert not model.transformer.h[0].attn.c_proj._forward_pre_hooks


def test_value_bias():
    attn, config = attn_of("rove")
    assert torch.equal(circuits.value_bias(attn, 1), attn.c_attn.bias[60:72])


def test_offset_kernel_equals_the_matrices():
    distances = [0, 1, 2, 5, 31]
    theta = torch.tensor(reference.inv_freq(12, 50.0, 32, 1.0), dtype=torch.float64)
    attn, config = attn_of("rove")
    w_v, w_o = circuits.value_weights(attn, 1)
    assert torch.equal(w_v, attn.c_attn.weight[60:72]) and w_v.shape == (12, 24)
    assert torch.equal(w_o, attn.c_proj.weight[:, 12:])

    def kernel(angles: torch.Tensor) -> torch.Tensor:  # W_O R W_V, the pairs as complex numbers
        z = torch.complex(w_v[:6], w_v[6:]) * torch.exp(1j * angles)[:, None]
        return w_o @ torch.cat((z.real, z.imag))

    K0, K90 = kernel(0 * theta), kernel(0 * theta - math.pi / 2)
    found = circuits.offset_kernel(w_v, w_o, config, distances)
    for n, d in enumerate(distances):
        K = kernel(-d * theta)
        same = float((K * K0).sum())
        assert found["norm"][n] == pytest.approx(float(K.norm() / K0.norm()), rel=1e-12)
        assert found["cosine"][n] == pytest.approx(same / float(K.norm() * K0.norm()), abs=1e-12)
        z, z0 = (complex(float((M * K0).sum()), float((M * K90).sum())) for M in (K, K0))
        assert found["phase"][n] == pytest.approx(cmath.phase(z / z0), abs=1e-9)
    assert found["norm"][0] == pytest.approx(1) and found["cosine"][0] == pytest.approx(1)
    rope = circuits.offset_kernel(w_v, w_o, attn_of("rope")[1], distances)
    assert rope["norm"] == pytest.approx([1.0] * 5) == rope["cosine"]
    assert rope["phase"] == pytest.approx([0.0] * 5)


def test_phase_of_a_single_pair_is_its_angle():
    config = GPTConfig(64, 32, 1, 1, 2, "rove", rope_base=50.0)  # one pair, theta 1
    w = torch.eye(2, dtype=torch.float64)
    found = circuits.offset_kernel(w, w, config, [0, 1, 2, 3])
    assert found["phase"] == pytest.approx([0, 1, 2, 3], abs=1e-12)
    assert found["norm"] == pytest.approx([1] * 4)
    assert found["cosine"] == pytest.approx([math.cos(d) for d in range(4)])


def test_attention_by_distance():
    A = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    A[:, 0] = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.2, 0.3, 0], [0.1, 0.2, 0.3, 0.4]])
    A[1, 0, 3] = torch.tensor([0.3, 0.2, 0.1, 0.4])
    mass = circuits.attention_by_distance(A)  # of the queries 2 and 3
    expected = [(0.3 + 0.4) / 2, (0.2 + 0.2) / 2, (0.5 + 0.2) / 2, 0.2 / 2]
    assert mass[0].tolist() == pytest.approx(expected)
    assert float(mass.sum()) == pytest.approx(1)
    odd = circuits.attention_by_distance(A[:, :, :3, :3])  # of the queries 1 and 2
    assert odd[0].tolist() == pytest.approx([(0 + 0.3) / 2, (1 + 0.2) / 2, 0.5 / 2])


# -----------------------------------------------------------------------------
# scripts.circuits


def about(tokenizer: str) -> dict:
    found = get_tokenizer(tokenizer)
    return {key: getattr(found, key) for key in ("name", "vocab_size", "eot", "sha256")}


def save_tiny(
    tiny_toml, pos_emb: str, seed: int = 0, tokenizer: str = "bytes", trained_on: str | None = None
):
    """A run of random weights whose config names the tiny data, said to be from `tokenizer`."""
    config = load_config_file(tiny_toml(('pos_emb = "rove"', f'pos_emb = "{pos_emb}"')))
    config = dataclasses.replace(config, run_name=f"tiny_{pos_emb}")
    model = reference.randomise(GPT(config.model), 0.3, seed)
    # a copy of the data folder, which other tests use as it is
    folder = config.run_dir.parent.parent / "data"
    shutil.copytree(config.data.dir, folder, dirs_exist_ok=True)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(folder)))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | {"tokenizer": about(tokenizer)}
    path.write_text(json.dumps(with_checksum(manifest)))
    meta = {"data": {"tokenizer": about(trained_on or tokenizer)}, "val_loss": None}
    save_checkpoint(config.run_dir, 3, config, model, torch.optim.AdamW(model.parameters()), meta)
    return config, model


def run_circuits(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["circuits", *map(str, args)])
    script.main()


def test_two_runs_side_by_side(tiny_toml, monkeypatch, capsys):
    rope, rope_model = save_tiny(tiny_toml, "rope")
    rove, rove_model = save_tiny(tiny_toml, "rove")
    args = ("--mixer-tokens", 7, "--val-tokens", 64)
    run_circuits(monkeypatch, rope.run_dir, rove.run_dir, *args)
    out = rope.run_dir / "eval"
    first, second = json.loads((out / "circuits.json").read_text())["runs"]
    assert (out / "circuits.png").read_bytes().startswith(b"\x89PNG")
    assert (first["pos_emb"], second["pos_emb"], second["step"]) == ("rope", "rove", 3)
    for result in (first, second):
        assert [(h["layer"], h["head"]) for h in result["mixer"]["heads"]] == [
            (0, 0), (0, 1), (1, 0), (1, 1)
        ]  # fmt: skip
        assert result["kernel"]["distances"] == [0, 1, 2, 3, 4, 5, 6, 7]
        for layer in result["attention"]["mass"]:
            assert all(sum(mass) == pytest.approx(1, abs=1e-5) for mass in layer)
    theta = reference.inv_freq(8, 10000.0, 8, 1.0)  # with W_O = W_V = 1 the cosine is the mean
    cosine = [sum(math.cos(d * t) for t in theta) / 4 for d in range(8)]
    assert second["kernel"]["identity"]["cosine"] == pytest.approx(cosine)
    assert first["kernel"]["identity"]["cosine"] == pytest.approx([1.0] * 8)
    for h in first["mixer"]["heads"]:
        assert h["to_kronecker"] < 1e-14 and h["to_toeplitz"] > 1e-3
    for h in second["mixer"]["heads"]:
        assert h["to_toeplitz"] < 1e-14 and h["to_kronecker"] > 1e-3

    # the loss of each with the other's values, by the float64 reference on the same windows
    tokens = torch.tensor(
        list(
            memoryview((Path(rope.data.dir) / "tiny_val_000000.bin").read_bytes()[1024:]).cast("H")
        )
    )
    for config, model, result in ((rope, rope_model, first), (rove, rove_model, second)):
        for key, pos_emb in (
            ("as_trained", config.model.pos_emb),
            ("switched", {"rope": "rove", "rove": "rope"}[config.model.pos_emb]),
        ):
            gpt = dataclasses.replace(config.model, pos_emb=pos_emb)
            total = 0.0
            for start in range(0, 64, 8):
                window = tokens[start : start + 9]
                logits = reference.logits(model.state_dict(), gpt, window[:-1])
                total += torch.nn.functional.cross_entropy(logits, window[1:]).item()
            assert result["loss"][key] == pytest.approx(total / 8, abs=1e-4)
    said = capsys.readouterr().out
    assert "switched on" in said and "switched off" in said and "circuits.png" in said


@pytest.mark.parametrize("pos_emb", ["learned", "none"])
def test_a_run_without_rotation(tiny_toml, monkeypatch, capsys, pos_emb):
    config, _ = save_tiny(tiny_toml, pos_emb)
    run_circuits(
        monkeypatch, config.run_dir, "--mixer-tokens", 8, "--val-tokens", 64, "--out", "here"
    )
    (result,) = json.loads(Path("here/circuits.json").read_text())["runs"]
    assert result["loss"]["switched"] is None
    assert all(h["to_toeplitz"] is None for h in result["mixer"]["heads"])
    assert all(h["to_kronecker"] < 1e-14 for h in result["mixer"]["heads"])
    assert "switched" not in capsys.readouterr().out


@pytest.mark.parametrize(("data", "model"), [("bytes", "gpt2"), ("gpt2", "bytes")])
def test_data_in_tokens_of_another_tokenizer_is_refused(tiny_toml, monkeypatch, data, model):
    config, _ = save_tiny(tiny_toml, "rope", tokenizer=data, trained_on=model)
    with pytest.raises(UserError, match=f"made with tokenizer {model} .* text is in {data} "):
        run_circuits(monkeypatch, config.run_dir, "--mixer-tokens", 8, "--val-tokens", 64)


@pytest.mark.parametrize("pos_emb", ["rope", "rove"])
def test_a_mixer_that_is_not_the_head_stops_the_script(tiny_toml, monkeypatch, pos_emb):
    # a forward pass that does something else with the values than its config says
    config, _ = save_tiny(tiny_toml, pos_emb)
    plain = script.load_model

    def other(*args, **kwargs):
        model, meta = plain(*args, **kwargs)
        attn = model.transformer.h[1].attn
        attn.rotate_v = not attn.rotate_v
        return model, meta

    monkeypatch.setattr(script, "load_model", other)
    with pytest.raises(UserError, match=r": 1\.0: the mixer is not the head, off by "):
        run_circuits(monkeypatch, config.run_dir, "--mixer-tokens", 8, "--val-tokens", 64)


def test_the_folder_for_the_results_is_made_before_the_work(tiny_toml, monkeypatch):
    config, _ = save_tiny(tiny_toml, "rope")
    Path("taken").write_text("")
    monkeypatch.setattr(script, "analyse", lambda *args: pytest.fail("worked in vain"))
    with pytest.raises(OSError, match="taken"):
        run_circuits(monkeypatch, config.run_dir, "--out", "taken/here")


def test_what_cannot_be_is_refused(tiny_toml, tmp_path, monkeypatch):
    config, _ = save_tiny(tiny_toml, "rope")
    run = config.run_dir
    with pytest.raises(UserError, match="3 runs: name one, or two"):
        run_circuits(monkeypatch, run, run, run)
    with pytest.raises(UserError, match=r"--mixer-tokens \(9\): from 6 to 8"):
        run_circuits(monkeypatch, run, "--mixer-tokens", 9)
    with pytest.raises(UserError, match="no manifest.json"):
        run_circuits(monkeypatch, run, "--mixer-tokens", 8, "--data", tmp_path)
    with pytest.raises(UserError, match="val_tokens"):
        run_circuits(monkeypatch, run, "--mixer-tokens", 8, "--val-tokens", 10**6)
