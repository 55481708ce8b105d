"""Drawing text: the limits of every setting, the end of a document, and scripts.sample."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, save_checkpoint
from nanorove.config import Config, DataConfig, LogConfig, TrainConfig
from nanorove.errors import run_cli
from nanorove.sampling import generate
from scripts import sample
from tests import reference

REPO = Path(__file__).parent.parent


def constant_model(logits: list[float], padding: float = 100.0, max_len: int = 4000) -> GPT:
    """A model that gives these logits whatever it reads, and `padding` to the padded ids."""
    config = GPTConfig(len(logits), max_len, 1, 1, 4, "none")
    model = GPT(config)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0, 0, 0]))
        model.transformer.wte.weight[:, 0] = padding
        model.transformer.wte.weight[: len(logits), 0] = torch.tensor(logits)
    return model


def random_model(pos_emb: str = "rove") -> GPT:
    config = GPTConfig(32, 24, 2, 2, 16, pos_emb)
    return reference.randomise(GPT(config), 0.6, seed=1).eval()


def draw(model: GPT, n: int, seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **settings):
    generator = torch.Generator().manual_seed(seed)
    return list(generate(model, torch.tensor(prompt), n, generator=generator, **settings))


# -----------------------------------------------------------------------------
# generate


@pytest.mark.parametrize("pos_emb", ["learned", "rope", "rove", "none"])
def test_temperature_zero_is_the_arg_max_of_a_full_forward(pos_emb):
    # nanoGPT#738
    model = random_model(pos_emb)
    ids = [1, 2, 3]
    for _ in range(21):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert draw(model, 21, seed=1, temperature=0.0) == ids[3:]
    assert draw(model, 21, seed=2, temperature=0.0, top_k=5) == ids[3:]
    assert len(set(ids[3:])) > 1  # not one token over and over


@pytest.mark.parametrize("temperature", [1e-8, 1e-45, 1e-300])
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_tiny_temperature_is_the_arg_max_too(temperature, top_k):
    model = random_model()
    assert draw(model, 20, temperature=temperature, top_k=top_k) == draw(model, 20, temperature=0)


def test_top_k():
    model = random_model()
    assert draw(model, 20, top_k=1) == draw(model, 20, temperature=0.0)
    everything = draw(model, 20, top_k=0)
    assert draw(model, 20, top_k=32) == everything
    assert draw(model, 20, top_k=200_000) == everything  # keras-hub#260
    logits = [0.0, 3.0, 1.0, 2.0, 2.5, -1.0]
    for k in range(1, 7):
        best = set(sorted(range(6), key=lambda i: -logits[i])[:k])
        assert set(draw(constant_model(logits), 300, temperature=2.0, top_k=k)) == best


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(top_k=-1),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="finite and not negative"):
        draw(random_model(), 3, **settings)


def test_lengths_are_checked():
    model = random_model()
    assert len(draw(model, 21)) == 21  # 3 + 21 = max_len
    with pytest.raises(ValueError, match=r"3 tokens and 22 new ones must be 1 to max_len \(24\)"):
        draw(model, 22)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        list(generate(model, torch.tensor([], dtype=torch.int64), 3))
    with pytest.raises(ValueError, match=r"max_new_tokens \(0\) at least 1"):
        draw(model, 0)


def test_equal_seeds_draw_equal_text():
    model = random_model()
    torch.manual_seed(1)
    first = draw(model, 20, seed=5)
    torch.manual_seed(2)
    assert draw(model, 20, seed=5) == first
    assert draw(model, 20, seed=6) != first


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 0), (1.5, 3)])
def test_frequencies_are_the_softmax(temperature, top_k):
    logits, n = [0.0, 1.5, -1.0, 0.7, 1.1], 1500
    drawn = draw(constant_model(logits), n, temperature=temperature, top_k=top_k)
    scaled = torch.tensor(logits, dtype=torch.float64) / temperature
    if top_k:
        scaled[[0, 2]] = -torch.inf  # the three largest stay
    for token, p in enumerate(scaled.softmax(0).tolist()):
        assert abs(drawn.count(token) - n * p) <= 4.5 * (n * p * (1 - p)) ** 0.5


def test_padded_ids_are_never_drawn():
    # build-nanogpt#81: ids behind the vocabulary, here with by far the largest logits
    model = constant_model([0.0] * 50)
    assert model.transformer.wte.weight.shape == (64, 4)
    for settings in (dict(temperature=0.0), dict(), dict(temperature=5.0), dict(top_k=60)):
        assert max(draw(model, 500, **settings)) < 50


def test_stops_before_end_of_text():
    # nanoGPT#36
    model = random_model()
    tokens = draw(model, 20)
    eot = tokens[6]
    assert draw(model, 20, eot=eot) == tokens[: tokens.index(eot)]
    assert draw(model, 20, eot=None) == tokens
    assert draw(constant_model([0.0, 99.0, 0.0]), 20, eot=1) == []
    # an end-of-text in the prompt, which begins every document, stops nothing
    never = next(token for token in range(32) if token not in tokens)
    assert len(draw(model, 20, prompt=(never, 1), eot=never)) > 0


def test_each_token_is_one_forward_of_one_token(monkeypatch):
    # streaming, and no work that grows with the prompt beyond attention itself
    model, lengths = random_model(), []
    hidden = model.hidden

    def spy(idx, kv_cache=None):
        lengths.append(idx.size(1))
        return hidden(idx, kv_cache)

    monkeypatch.setattr(model, "hidden", spy)
    tokens = generate(model, torch.tensor([1, 2, 3]), 4)
    next(tokens)
    assert lengths == [3]
    assert len(list(tokens)) == 3 and lengths == [3, 1, 1, 1]


# -----------------------------------------------------------------------------
# scripts.sample on a small saved run of bytes


def save_run(folder: Path, pos_emb: str, always: int | None = None) -> Path:
    """A run as train.py leaves it; with `always` a model that writes that byte for ever."""
    gpt = GPTConfig(257, 16, 1, 2, 8, pos_emb)
    train = TrainConfig(
        total_batch_size=16,
        micro_batch_size=1,
        max_steps=1,
        warmup_steps=0,
        learning_rate=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        grad_clip=1.0,
        eval_interval=1,
        val_tokens=16,
        checkpoint_interval=1,
        keep_checkpoints=1,
        log_interval=1,
        compile=False,
        attn_backend="sdpa",
    )
    config = Config("tiny", 1, gpt, DataConfig("nowhere"), train, LogConfig("disabled"))
    model = reference.randomise(GPT(gpt))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.arange(16)[None]
    model(ids, ids).backward()
    optimizer.step()
    if always is not None:
        with torch.no_grad():
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.copy_(torch.eye(8)[0])
            model.transformer.wte.weight[:, 0] = 0.0
            model.transformer.wte.weight[always, 0] = 50.0
    tokenizer = get_tokenizer("bytes")
    about = {
        "name": "bytes",
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "sha256": tokenizer.sha256,
    }
    meta = {"data": {"manifest_sha256": "0" * 64, "tokenizer": about}, "val_loss": None}
    save_checkpoint(folder, 1, config, model, optimizer, meta)
    return folder


def run_sample(monkeypatch, run: Path, *args: str) -> list[dict]:
    """scripts.sample's main in this process -> what --json wrote."""
    out = run / "out" / "samples.json"
    argv = ["sample", str(run), *args, "--json", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sample.main()
    return json.loads(out.read_text(encoding="utf-8"))


def written_by(run: Path, prompt: str, n: int, seed: int = 1337) -> str:
    """What scripts.sample is to write, from the pieces below it; stops at end-of-text."""
    tokenizer = get_tokenizer("bytes")
    ids = [256, *prompt.encode()]
    model, _ = load_model(run, max_len=len(ids) + n)
    new = draw(model, n, seed, tuple(ids), temperature=0.8, top_k=50, eot=256)
    return tokenizer.decode(new)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "def main(",
        "<|endoftext|>",
        "naïve 日本語 🙂",
        "longer than the context of 16 tokens " * 5,
    ],
)
def test_sample_goes_on_with_the_prompt(tmp_path, monkeypatch, capsys, prompt):
    # nanochat#581: empty, literal marker, non-ASCII, longer than the context
    run = save_run(tmp_path, "rove")
    results = run_sample(monkeypatch, run, "--prompt", prompt, "--max-new-tokens", "20")
    assert results == [{"prompt": prompt, "text": written_by(run, prompt, 20)}]
    out = capsys.readouterr().out
    assert out.startswith(prompt + results[0]["text"]) and "note" not in out


def test_the_marker_in_a_prompt_is_ordinary_text(tmp_path, monkeypatch):
    # tiktoken#480: it must become its 13 bytes, not the end of the document
    seen = []
    plain = sample.generate
    monkeypatch.setattr(
        sample,
        "generate",
        lambda m, prompt, *a, **k: seen.append(prompt) or plain(m, prompt, *a, **k),
    )
    run_sample(
        monkeypatch, save_run(tmp_path, "rope"), "--prompt", "<|endoftext|>", "", "é",
        "--max-new-tokens", "2",
    )  # fmt: skip
    assert [p.tolist() for p in seen] == [[256, *b"<|endoftext|>"], [256], [256, 0xC3, 0xA9]]


def test_learned_positions_crop_a_long_prompt_with_one_notice(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path, "learned")
    long, short = "0123456789" * 3, "ab"
    results = run_sample(monkeypatch, run, "--prompt", long, short, "--max-new-tokens", "6")
    out = capsys.readouterr().out
    assert out.count("note:") == 1 and "only the last 10 of the prompt are used" in out
    model, _ = load_model(run)
    settings = dict(temperature=0.8, top_k=50, eot=256)
    cropped = draw(model, 6, 1337, tuple(long.encode()[-10:]), **settings)
    whole = draw(model, 6, 1337, (256, *short.encode()), **settings)
    assert [r["text"] for r in results] == [
        get_tokenizer("bytes").decode(cropped),
        get_tokenizer("bytes").decode(whole),
    ]


def test_sample_of_a_folder_that_is_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_cli(sample.main)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-new-tokens", "16"], r"--max-new-tokens \(16\).*ends at 16 tokens"),
        (["--max-new-tokens", "0"], r"max_new_tokens \(0\) at least 1"),
        (["--temperature", "-1"], r"temperature \(-1.0\)"),
        (["--temperature", "nan"], r"temperature \(nan\)"),
        (["--top-k", "-5"], r"top_k \(-5\)"),
    ],
    ids=str,
)
def test_sample_refuses_in_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(
        sys, "argv", ["sample", str(save_run(tmp_path, "learned")), "--max-new-tokens", "4", *args]
    )
    with pytest.raises(SystemExit) as exit:
        run_cli(sample.main)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)


def test_sample_stops_at_end_of_text_unless_told_not_to(tmp_path, monkeypatch):
    run = save_run(tmp_path, "rope", always=256)
    stopped = run_sample(monkeypatch, run, "--prompt", "x", "--max-new-tokens", "3")
    assert stopped == [{"prompt": "x", "text": ""}]
    went_on = run_sample(
        monkeypatch, run, "--prompt", "x", "--max-new-tokens", "3", "--stop-at-eot", "False"
    )
    assert went_on == [{"prompt": "x", "text": "<|endoftext|>" * 3}]


def test_sample_is_repeatable_and_bytes_that_are_no_text_do_no_harm(tmp_path, monkeypatch):
    run = save_run(tmp_path, "rove")
    args = ("--prompt", "a", "--max-new-tokens", "30", "--temperature", "5", "--top-k", "0")
    first = run_sample(monkeypatch, run, *args)
    assert run_sample(monkeypatch, run, *args) == first
    assert run_sample(monkeypatch, run, *args, "--seed", "7") != first
    assert "\ufffd" in first[0]["text"]


def test_sample_as_a_command(tmp_path):
    run = save_run(tmp_path / "a run", "rove", always=ord("!"))
    command = [sys.executable, "-m", "scripts.sample", str(run), "--prompt", "hé", "--temperature"]
    done = subprocess.run(
        [*command, "0", "--max-new-tokens", "5"], cwd=REPO, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "hé!!!!!"
