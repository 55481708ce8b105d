"""Drawing text: the limits of every setting, the end of a document, and scripts.sample."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig
from nanorove.checkpoint import load_model, save_checkpoint
from nanorove.config import Config, DataConfig, LogConfig, TrainConfig
from nanorove.errors import UserError, run_cli
from nanorove.sampling import TextStream, generate, sorted_probs
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
    """The tokens after one prompt."""
    (row,) = draw_rows(model, n, [prompt], seed, **settings)
    return row


def draw_rows(model: GPT, n: int, prompts, seed: int = 0, **settings) -> list[list[int]]:
    """The tokens after each of several prompts of one length."""
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    ids = torch.tensor(prompts, dtype=torch.int64).reshape(len(prompts), -1)
    rows = [[] for _ in prompts]
    for step in generate(model, ids, n, generators=generators, **settings):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


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


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("pos_emb", ["rope", "rove", "none"])
def test_generation_at_four_times_the_trained_length(pos_emb, factor):
    # nanochat#514; each of the 96 tokens with a cache, against a full forward without one
    if pos_emb == "none":
        factor = 1.0
    config = GPTConfig(32, 24, 2, 2, 16, pos_emb, yarn_factor=factor)
    model = reference.randomise(GPT(config, max_len=96), 0.6, seed=1).eval()
    new = draw(model, 93, temperature=0.0)
    logits = model(torch.tensor([[1, 2, 3, *new]]))[0, 2:-1]
    assert logits.argmax(-1).tolist() == new
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-4  # so that rounding cannot decide
    assert len(set(new[24:])) > 1


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
        dict(top_p=0.0),
        dict(top_p=-0.5),
        dict(top_p=1.1),
        dict(top_p=float("nan")),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings):
    message = r"top_p \(.*\) must be" if "top_p" in settings else "finite and not negative"
    with pytest.raises(ValueError, match=message):  # at once, not with the first token
        generate(random_model(), torch.tensor([[1]]), 3, **settings)


def test_a_diverged_model_is_no_die_with_a_missing_face():
    model = random_model()
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="logits are not finite"):
            draw(model, 3, temperature=temperature)


def test_top_p():
    logits = [0.0, 3.0, 1.0, 2.0, 2.5, -1.0]
    probs = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    likeliest = sorted(range(6), key=lambda i: -probs[i])
    for p in (0.01, 0.3, 0.6, 0.8, 0.9, 0.99, 0.9999):
        nucleus, mass = set(), 0.0
        for token in likeliest:  # the fewest whose mass reaches p
            if mass < p:
                nucleus.add(token)
                mass += probs[token]
        drawn = draw(constant_model(logits), 1500, top_p=p)
        assert set(drawn) <= nucleus
        seen = {token for token in nucleus if probs[token] > 0.02}
        assert seen <= set(drawn)
        expected = probs[likeliest[0]] / mass
        assert drawn.count(likeliest[0]) / 1500 == pytest.approx(expected, abs=0.06)
    model = random_model()
    assert draw(model, 20, top_p=1.0) == draw(model, 20)
    assert draw(model, 20, top_p=1e-9) == draw(model, 20, temperature=0.0)


def test_top_p_is_taken_of_what_temperature_and_top_k_left():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).log()[None].double()  # ln 0 = -inf
    weights, ids = sorted_probs(logits, 1.0, 2, 0.55)  # of 3/5 and 2/5 the first is enough
    assert ids[0, 0] == 0 and (weights[0] > 0).tolist() == [True, False, False, False]
    weights, _ = sorted_probs(logits, 1.0, 0, 0.55)  # of 3/6, 2/6, 1/6 it is not
    assert (weights[0] > 0).tolist() == [True, True, False, False]
    weights, _ = sorted_probs(logits, 0.5, 0, 0.6)  # of 9/14, 4/14, 1/14 it is
    assert (weights[0] > 0).tolist() == [True, False, False, False]
    tied, ids = sorted_probs(torch.zeros(1, 4).double(), 1.0, 2, 1.0)
    assert (tied[0] > 0).sum() == 2  # k, also where the k-th has equals


def test_equals_stand_in_the_order_of_their_ids():
    # so that what is drawn does not depend on how a library sorts
    _, ids = sorted_probs(torch.zeros(2, 300).double(), 1.0, 0, 1.0)
    assert ids.tolist() == [list(range(300))] * 2
    logits = [float(id % 3) for id in range(300)]
    _, ids = sorted_probs(torch.tensor([logits]).double(), 1.0, 0, 1.0)
    assert ids[0].tolist() == sorted(range(300), key=lambda id: -logits[id])


def test_lengths_are_checked():
    model = random_model()
    assert len(draw(model, 21)) == 21  # 3 + 21 = max_len
    with pytest.raises(ValueError, match=r"3 tokens and 22 new ones must be 1 to max_len \(24\)"):
        draw(model, 22)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        draw(model, 3, prompt=())
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


def test_rows_stop_each_for_itself():
    # nanoGPT#36: end-of-text in one row ends that row, and no other
    model = random_model()
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    alone = [draw(model, 20, seed=3, prompt=p) for p in prompts]
    assert draw_rows(model, 20, prompts, seed=3) == alone  # rows do not hear of each other
    eot = next(t for t in alone[1] if t not in alone[0])
    cut = [row[: row.index(eot)] if eot in row else row for row in alone]
    assert len(cut[1]) < 20 == len(cut[0])
    assert draw_rows(model, 20, prompts, seed=3, eot=eot) == cut
    steps = list(generate(
        model, torch.tensor(prompts), 20, eot=eot,
        generators=[torch.Generator().manual_seed(3) for _ in prompts],
    ))  # fmt: skip
    assert len(steps) == 20 and steps[-1][1] is None and steps[-1][0] == alone[0][-1]


def test_a_caller_can_end_a_row():
    model = random_model()
    prompts = [(1, 2, 3), (4, 5, 6)]
    alone = [draw(model, 9, prompt=p) for p in prompts]
    asked = []

    def ended(row: int) -> bool:
        asked.append(row)
        return asked.count(row) == (2 if row == 0 else 5)

    assert draw_rows(model, 9, prompts, ended=ended) == [alone[0][:2], alone[1][:5]]
    assert asked.count(0) == 2 and asked.count(1) == 5  # and nothing was computed after that


def test_a_step_costs_attention_and_nothing_else_of_the_prompt():
    # counted, not timed: 2 multiply-adds per key, channel and layer, for scores and for values
    model = GPT(GPTConfig(32, 1000, 2, 2, 16, "none"), attn_backend="eager")
    flops = {}
    for T in (10, 500):
        steps = generate(model, torch.zeros(1, T, dtype=torch.int64), 2, temperature=0.0)
        next(steps)
        with FlopCounterMode(display=False) as counter:
            next(steps)
        flops[T] = counter.get_total_flops()
    assert flops[500] - flops[10] == 2 * 2 * 490 * 16 * 2  # n_embd 16, n_layer 2
    assert flops[10] > 0


def test_each_token_is_one_forward_of_one_token(monkeypatch):
    # streaming, and no work that grows with the prompt beyond attention itself
    model, lengths = random_model(), []
    hidden = model.hidden

    def spy(idx, kv_cache=None):
        lengths.append(idx.size(1))
        return hidden(idx, kv_cache)

    monkeypatch.setattr(model, "hidden", spy)
    tokens = generate(model, torch.tensor([[1, 2, 3]]), 4)
    next(tokens)
    assert lengths == [3]
    assert len(list(tokens)) == 3 and lengths == [3, 1, 1, 1]


# -----------------------------------------------------------------------------
# text as it is written


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def text_until_stop(ids: list[int], stop: list[str]) -> str:
    """The long way: decode everything again after each token and look for the stop strings."""
    for n in range(1, len(ids) + 2):  # the last time as it ends
        seen = decode_bytes(ids[:n])
        if n <= len(ids):
            seen = seen.removesuffix("\ufffd")
        if hits := [seen.index(s) for s in stop if s in seen]:
            return seen[: min(hits)]
    return seen


def test_a_character_is_printed_when_it_is_whole():
    stream = TextStream(decode_bytes)
    pieces = [stream.push(b) for b in "aé日🙂".encode()]
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "🙂"]
    assert stream.finish() == "" and stream.text == "aé日🙂"
    broken = TextStream(decode_bytes)  # ends in the middle of one, and has one that is none
    assert [broken.push(b) for b in b"\xffz\xf0\x9f"] == ["", "\ufffdz", "", ""]
    assert broken.finish() == "\ufffd" and broken.text == "\ufffdz\ufffd"


def test_stop_strings_end_the_text_in_front_of_them():
    stream = TextStream(decode_bytes, ["\n\n", "END"])
    pieces = [stream.push(b) for b in b"x\nEN-EEND"]
    assert pieces == ["x", "", "\n", "", "EN-", "", "E", "", ""]
    assert stream.stopped and stream.text == "x\nEN-E"
    assert stream.push(65) == "" and stream.finish() == "" and stream.text == "x\nEN-E"
    long = TextStream(lambda ids: "".join("a??b!!c" for _ in ids), ["!!", "??"])
    assert long.push(0) == "a" and long.stopped  # both in one token: the first in the text counts
    unfinished = TextStream(decode_bytes, ["END"])
    assert [unfinished.push(b) for b in b"aEN"] == ["a", "", ""]
    assert unfinished.finish() == "EN" and not unfinished.stopped


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@example(ids=[98, 97], stop=["a", "baa"])  # complete inside what may become another one
@given(
    ids=st.one_of(
        st.text("ab日é🙂\ufffd").map(lambda text: list(text.encode())),
        st.lists(st.sampled_from([97, 98, 0x80, 0xC3, 0xA9, 0xE6, 0xF0, 0x9F, 0xFF])),
    ),
    stop=st.lists(st.text("ab日\ufffd", min_size=1, max_size=3), max_size=3),
)
def test_the_pieces_are_the_text(ids, stop):
    stream = TextStream(decode_bytes, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == text_until_stop(ids, stop)


# -----------------------------------------------------------------------------
# scripts.sample on a small saved run of bytes


def save_run(
    folder: Path, pos_emb: str, always: int | None = None, tokenizer_name: str = "bytes"
) -> Path:
    """A run as train.py leaves it; with `always` a model that writes that byte for ever."""
    tokenizer = get_tokenizer(tokenizer_name)
    gpt = GPTConfig(tokenizer.vocab_size, 16, 1, 2, 8, pos_emb)
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
    about = {
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "sha256": tokenizer.sha256,
    }
    meta = {"data": {"manifest_sha256": "0" * 64, "tokenizer": about}, "val_loss": None,
            "best_val_loss": None, "wandb_id": None, "versions": {"torch": "9.9"}}  # fmt: skip
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
    captured = capsys.readouterr()
    assert captured.out == f"{prompt}{results[0]['text']}\n{'-' * 80}\n"
    tokens = 1 + len(prompt.encode()) + 20
    assert captured.err == (
        f"note: {tokens} tokens are more than the 16 this model is for"
        f" (--yarn-factor {-(-tokens // 16)} is made for it)\n"
    )


def test_the_marker_in_a_prompt_is_ordinary_text(tmp_path, monkeypatch):
    # tiktoken#480: it must become its 13 bytes, not the end of the document
    seen = []
    plain = sample.generate
    monkeypatch.setattr(
        sample,
        "generate",
        lambda m, prompts, *a, **k: seen.extend(prompts) or plain(m, prompts, *a, **k),
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
    error = capsys.readouterr().err
    assert error.count("note:") == 1 and "only the last 10 of the prompt are used" in error
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
        (["--max-new-tokens", "16"], r"--max-new-tokens \(16\).*end at 16 tokens"),
        (["--max-new-tokens", "0"], r"--max-new-tokens \(0\): at least 1"),
        (["--max-new-tokens", "-20"], r"--max-new-tokens \(-20\): at least 1"),
        (["--seed", "-1"], r"--seed \(-1\): from 0 to 2\^64 - 1"),
        (["--seed", str(2**64)], r"--seed \(18446744073709551616\): from 0 to 2\^64 - 1"),
        (["--temperature", "-1"], r"temperature \(-1.0\)"),
        (["--temperature", "nan"], r"temperature \(nan\)"),
        (["--top-k", "-5"], r"top_k \(-5\)"),
        (["--top-p", "0"], r"top_p \(0.0\)"),
        (["--stop", ""], r"--stop ''"),
        (["--yarn-factor", "2"], r"--yarn-factor: yarn_factor \(2.0\) needs pos_emb rope or rove"),
        (["--prompt", "a", "--prompt-file", "b"], "give one of the two"),
        (["--prompt-file", "no such file"], "--prompt-file no such file: No such file"),
        (["--prompt-file", __file__ + "/../fixtures"], "--prompt-file .*irectory"),
    ],
    ids=str,
)
def test_sample_refuses_in_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(
        sys, "argv", ["sample", str(save_run(tmp_path, "learned")), "--max-new-tokens", "4", *args]
    )
    with pytest.raises(SystemExit) as exit:
        run_cli(sample.main)
    out, error = capsys.readouterr()
    assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error) and not out


@pytest.mark.parametrize(
    ("pos_emb", "args", "message"),
    [
        ("rove", ["--max-new-tokens", str(10**12)], r"--max-new-tokens \(10+\): [\d,.]+ GB for KV"),
        ("rope", ["--max-new-tokens", str(10**10)], r"--max-new-tokens \(10+\): [\d,.]+ GB for KV"),
        ("none", ["--max-new-tokens", str(10**12)], r"--max-new-tokens \(10+\): [\d,.]+ GB for KV"),
        ("rove", ["--yarn-factor", "1e30"], r"--yarn-factor: yarn_factor \(1e\+30\) .*2\^31"),
        ("rope", ["--yarn-factor", "1e308"], r"--yarn-factor: yarn_factor \(1e\+308\) must be"),
    ],
    ids=str,
)  # fmt: skip
def test_huge_numbers_are_refused_in_one_line(
    tmp_path, monkeypatch, capsys, pos_emb, args, message
):
    monkeypatch.setattr(sys, "argv", ["sample", str(save_run(tmp_path, pos_emb)), *args])
    with pytest.raises(SystemExit) as exit:
        run_cli(sample.main)
    out, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert exit.value.code == 2 and last.startswith("error: ") and not out
    assert re.search(message, last) and "Traceback" not in error


def test_the_limit_of_memory():
    # 16 bytes a token and layer for keys and values of 2 channels, 24 for the table of a head of 2
    rope = GPTConfig(300, 16, 3, 1, 2, "rope")
    none = GPTConfig(300, 16, 3, 1, 2, "none")
    prompts = [[0] * 5, [0] * 5, [0] * 9]  # groups of two and of one, with 10 new tokens
    cache, table = 2 * 15 * 3 * 16, 19 * 24
    for config, need in ((none, cache), (rope, cache + table)):
        sample.check_memory(config, prompts, 10, 2 * need)
        with pytest.raises(UserError, match=r"--max-new-tokens \(10\).*more than half of the"):
            sample.check_memory(config, prompts, 10, 2 * need - 1)
    assert sample.memory_of("cpu") > 10**8


def test_the_rotary_table_is_as_long_as_the_text(tmp_path, monkeypatch):
    # a large YaRN factor alone costs nothing
    built = []
    plain = sample.load_model
    monkeypatch.setattr(
        sample, "load_model", lambda *a, **k: built.append(plain(*a, **k)) or built[-1]
    )
    args = ("--prompt", "ab", "--max-new-tokens", "5", "--yarn-factor", "1e7")
    run_sample(monkeypatch, save_run(tmp_path, "rove"), *args)
    model = built[0][0]
    assert model.config.context == 16 * 10**7 and model.cos.shape == (1 + 2 + 5, 2)


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    # only what generate says of the settings is the user's to mend
    def fault(self, token):
        raise ValueError("a fault")

    monkeypatch.setattr(sample.TextStream, "push", fault)
    with pytest.raises(ValueError, match="a fault"):
        run_sample(monkeypatch, save_run(tmp_path, "rove"), "--prompt", "ab")


@pytest.mark.parametrize("name", ["sample", "export_hf", "import_hf", "circuits"])
def test_help_names_the_command(name, monkeypatch, capsys):
    module = importlib.import_module(f"scripts.{name}")
    monkeypatch.setattr(sys, "argv", ["somewhere/file.py", "--help"])
    with pytest.raises(SystemExit) as exit:
        module.main()
    assert exit.value.code == 0
    assert f"usage: python -m scripts.{name} " in capsys.readouterr().out


def test_sample_stops_at_end_of_text_unless_told_not_to(tmp_path, monkeypatch):
    run = save_run(tmp_path, "rope", always=256)
    stopped = run_sample(monkeypatch, run, "--prompt", "x", "--max-new-tokens", "3")
    assert stopped == [{"prompt": "x", "text": ""}]
    went_on = run_sample(
        monkeypatch, run, "--prompt", "x", "--max-new-tokens", "3", "--stop-at-eot", "False"
    )
    assert went_on == [{"prompt": "x", "text": "<|endoftext|>" * 3}]


def test_several_prompts_are_written_as_if_alone(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path, "rove")
    prompts = ["ab", "c", "de", "", "fg", "h"]  # three lengths, so three groups
    sizes = []
    plain = sample.generate
    monkeypatch.setattr(
        sample, "generate", lambda m, p, *a, **k: sizes.append(p.shape) or plain(m, p, *a, **k)
    )
    results = run_sample(monkeypatch, run, "--prompt", *prompts, "--max-new-tokens", "9")
    assert sorted(sizes) == [(1, 1), (2, 2), (3, 3)]
    assert [r["prompt"] for r in results] == prompts  # in the order they were asked for
    texts = [r["text"] for r in results]
    line = "-" * 80
    out = "".join(f"{p}{t}\n{line}\n" for p, t in zip(prompts, texts, strict=True))
    assert capsys.readouterr().out == out
    assert texts == [written_by(run, prompt, 9) for prompt in prompts]


def test_groups_are_of_one_length_and_not_too_large():
    prompts = [[0] * n for n in (2, 1, 2, 3, 1)] + [[0] * 7] * 40
    found = sample.groups(prompts)
    assert sorted(i for rows in found for i in rows) == list(range(45))
    assert all(len({len(prompts[i]) for i in rows}) == 1 for rows in found)
    assert max(map(len, found)) == 16 and len(found) == 3 + 3


def test_prompt_from_a_file_and_from_standard_input(tmp_path, monkeypatch):
    run = save_run(tmp_path, "rope", always=ord("!"))
    file = tmp_path / "a prompt.txt"
    text = "zwei\r\nZeilen: naïve 日本語\n"
    file.write_bytes(text.encode())
    short = ("--max-new-tokens", "2")
    expected = [{"prompt": text, "text": "!!"}]  # to the last byte, line ends too
    assert run_sample(monkeypatch, run, "--prompt-file", str(file), *short) == expected
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run_sample(monkeypatch, run, "--prompt-file", "-", *short) == expected
    file.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a prompt.txt: not UTF-8 \(byte 2\)"):
        run_sample(monkeypatch, run, "--prompt-file", str(file))


def test_sample_stops_in_front_of_a_stop_string(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path, "rope", always=ord("!"))
    results = run_sample(monkeypatch, run, "--prompt", "x", "--stop", "?", "!!!")
    assert results == [{"prompt": "x", "text": ""}]
    assert capsys.readouterr().out == f"x\n{'-' * 80}\n"


def test_one_prompt_is_printed_while_it_is_written(tmp_path, monkeypatch):
    run = save_run(tmp_path, "rove")
    shown, at = [], []
    plain = sample.TextStream.push
    monkeypatch.setattr(
        "builtins.print", lambda *a, **k: shown.append(a[0]) if "file" not in k else None
    )
    monkeypatch.setattr(
        sample.TextStream, "push", lambda self, t: at.append(len("".join(shown))) or plain(self, t)
    )
    results = run_sample(monkeypatch, run, "--prompt", "ab", "--max-new-tokens", "12")
    assert at[0] == 2 and at[-1] > 6 and at == sorted(at)  # more after each token
    assert "".join(shown) == f"ab{results[0]['text']}\n{'-' * 80}\n"


def test_yarn_factor_of_the_command_line(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path, "rove")
    prompt = "long " * 8
    args = ("--prompt", prompt, "--max-new-tokens", "20")
    (result,) = run_sample(monkeypatch, run, *args, "--yarn-factor", "4")
    assert capsys.readouterr().err == ""  # 61 tokens of 64
    model, _ = load_model(run, yarn_factor=4.0)
    ids = (256, *prompt.encode())
    new = draw(model, 20, 1337, ids, temperature=0.8, top_k=50, eot=256)
    assert result["text"] == get_tokenizer("bytes").decode(new)
    (plain,) = run_sample(monkeypatch, run, *args)
    assert plain["text"] != result["text"]


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
