"""Fetching from a loopback hub, with the real huggingface_hub and datasets."""

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from data import fineweb_edu
from data.loader import TrainLoader
from nanorove.errors import UserError
from tests.hub import SHA, Hub
from tests.test_prepare import check_folder, expected
from tests.test_sources import FILES, SETTINGS, error_line, parquet, same_shards, script

PATHS = [f"sample/10BT/{k:03d}_00000.parquet" for k in range(3)]


@pytest.fixture
def hub():
    files = dict(zip(PATHS, map(parquet, FILES), strict=True))
    with Hub("HuggingFaceFW/fineweb-edu", files) as hub:
        yield hub


def fineweb(hub, tmp_path, *args, out="out", home="home", **env):
    environment = hub.environment(tmp_path / home) | env
    args = ["--out", tmp_path / out, "--workers", 1, *SETTINGS, *args]
    return script("data.fineweb_edu", *args, env=environment)


def check_all(tmp_path, out="out") -> dict:
    documents = expected(sum(FILES, []), val_tokens=500)
    return check_folder(tmp_path / out, *documents, 1000, name="finewebedu")


def test_redirected_to_another_server(hub, tmp_path):
    hub.redirect = True
    result = fineweb(hub, tmp_path)
    assert result.returncode == 0, result.stderr
    check_all(tmp_path)
    elsewhere = [path for method, path in hub.requests if path.startswith("/elsewhere")]
    assert len(set(elsewhere)) == 3


def test_the_next_file_is_fetched_ahead_and_in_order(hub, tmp_path):
    hub.slow[PATHS[1]] = 1.0
    result = fineweb(hub, tmp_path)
    assert result.returncode == 0, result.stderr
    assert hub.fetched() == PATHS
    assert "GB to fetch for 3 parquet files" in result.stdout
    manifest = check_all(tmp_path)
    listed = [
        {"file": path, "bytes": len(body), "etag": hashlib.sha256(body).hexdigest()}
        for path, body in hub.files.items()
    ]
    assert manifest["source"]["files"] == listed


def test_a_transfer_cut_half_way_is_taken_up_again(hub, tmp_path):
    # nanochat#344
    hub.cut[PATHS[1]] = 1
    result = fineweb(hub, tmp_path)
    assert result.returncode == 0, result.stderr
    assert hub.fetched().count(PATHS[1]) == 2
    check_all(tmp_path)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><title>sign in</title>", "swapped"])
def test_an_error_page_or_other_content_is_no_data_and_does_not_stay(hub, tmp_path, content):
    # nanochat#344: an error page under status 200, and content of the right length
    body = hub.files[PATHS[1]]
    hub.instead[PATHS[1]] = body[:-1] + b"!" if content == "swapped" else content
    line = error_line(fineweb(hub, tmp_path))
    assert PATHS[1] in line
    assert not list((tmp_path / "home").rglob("001_00000.parquet"))
    hub.instead.clear()
    result = fineweb(hub, tmp_path)
    assert result.returncode == 0 and "going on with what is there" in result.stdout
    check_all(tmp_path)


@pytest.mark.parametrize("status", [401, 403, pytest.param(500, marks=pytest.mark.slow)])
def test_a_refusal_is_one_line(hub, tmp_path, status):
    hub.status[PATHS[0]] = status
    line = error_line(fineweb(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="2"))
    assert PATHS[0] in line and str(status) in line and hub.url in line


def test_gone_after_the_first_success(hub, tmp_path):
    assert fineweb(hub, tmp_path, out="whole", home="full").returncode == 0
    hub.status[PATHS[2]] = 404
    error_line(fineweb(hub, tmp_path, out="part"))
    shutil.copytree(tmp_path / "part", tmp_path / "part2")
    hub.status.clear()
    hub.down = True
    # what is cached is enough to go on, whether we know that we are offline or not
    for out, env in (("part", {}), ("part2", {"HF_HUB_OFFLINE": "1"})):
        result = fineweb(hub, tmp_path, out=out, home="full", **env)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / out / "manifest.json").read_bytes() == (
            tmp_path / "whole" / "manifest.json"
        ).read_bytes()
        assert same_shards(tmp_path / out, tmp_path / "whole")
        assert fineweb(hub, tmp_path, out=out, home="full", **env).returncode == 0
    line = error_line(fineweb(hub, tmp_path, out="new", HF_HUB_OFFLINE="1"))
    assert "sample/10BT" in line and "--local DIR" in line


def test_a_run_that_has_enough_does_not_wait_for_the_next_file(hub, tmp_path):
    # datasets#7467: done, but never ending
    hub.files[PATHS[0]] = parquet([f"{i} " * 5000 for i in range(10)])
    hub.slow[PATHS[1]] = 200
    result = fineweb(hub, tmp_path, "--limit-tokens", 60_000, "--val-tokens", 20_000)
    assert result.returncode == 0, result.stderr  # within script()'s time
    assert PATHS[1] in hub.fetched()


def test_parquet_files_are_removed_only_if_asked(hub, tmp_path):
    assert fineweb(hub, tmp_path, out="a").returncode == 0
    assert len(list((tmp_path / "home").rglob("*.parquet"))) == 3
    result = fineweb(hub, tmp_path, "--remove-parquet", out="b")
    assert result.returncode == 0, result.stderr
    assert same_shards(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "home").rglob("*.parquet"))
    assert not [p for p in (tmp_path / "home").rglob("blobs/*") if p.stat().st_size > 1000]


def test_the_room_for_the_download_is_looked_at_first(hub, tmp_path, monkeypatch, capsys):
    # datasets#7502
    options = fineweb_edu.Options(out=tmp_path / "out", tokenizer="bytes", workers=1)
    files = [{"file": path, "bytes": 10**9, "etag": ""} for path in PATHS]
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=25 * 10**8))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def tell(**keys) -> str:
        fineweb_edu.HubFiles(SHA, replace(options, **keys)).tell_room(files, 0)
        return capsys.readouterr().out

    with pytest.raises(UserError, match=r"3.00 GB to fetch for 3 parquet files, 2.50 GB are free"):
        tell()
    assert "2.00 GB to fetch for 2 parquet files, 2.50 GB are free" in tell(limit_tokens=2 * 10**9)
    assert "2.00 GB to fetch for 3 parquet files" in tell(remove_parquet=True)


STREAMING = """
import sys
from datasets import load_dataset
data = load_dataset("HuggingFaceFW/fineweb-edu", data_files="sample/10BT/*.parquet",
                    split="train", streaming=True)
texts = [row["text"] for row in data]
open(sys.argv[1], "w").write("\\0".join(t for t in texts if t))
"""


@pytest.mark.slow
def test_streaming_reads_the_documents_of_our_shards(hub, tmp_path):
    """datasets' streaming, by Range requests, is the independent reader."""
    assert fineweb(hub, tmp_path).returncode == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "streaming.py").write_text(STREAMING)
    hub.requests.clear()
    command = [sys.executable, tmp_path / "streaming.py", tmp_path / "texts"]
    env = hub.environment(tmp_path / "home2")
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    texts = (tmp_path / "texts").read_text().split("\0")
    data = b"".join((tmp_path / "out" / s["file"]).read_bytes()[1024:] for s in manifest["shards"])
    stream = struct.unpack(f"<{len(data) // 2}H", data)
    assert list(stream) == sum(([256, *text.encode()] for text in texts), [])


# The public shards.

EOT = 50256
SHARDS = {
    "finewebedu_val_000000.bin": [EOT, 32, 582, EOT, 318],
    "finewebedu_train_000001.bin": [5586, 319, EOT, 257, 9753],
    "finewebedu_train_000002.bin": [13, 13, 13, 13, EOT],
    "finewebedu_train_000003.bin": [339, 13],
}


def crafted(tokens) -> bytes:
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


@pytest.fixture
def public():
    files = {file: crafted(tokens) for file, tokens in SHARDS.items()}
    with Hub("kjj0/finewebedu10B-gpt2", files) as hub:
        yield hub


def pretokenized(hub, tmp_path, *args, **env):
    args = ["--pretokenized", "--out", tmp_path / "out", *args]
    return script("data.fineweb_edu", *args, env=hub.environment(tmp_path / "home") | env)


@pytest.mark.parametrize("redirect", [False, True])
def test_public_shards(public, tmp_path, redirect):
    public.redirect = redirect
    result = pretokenized(public, tmp_path, "--shards", "1-3")
    assert result.returncode == 0, result.stderr
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == sorted([*SHARDS, "manifest.json"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert [(s["file"], s["tokens"], s["documents"], s["sha256"]) for s in manifest["shards"]] == [
        (file, len(t), t.count(EOT), hashlib.sha256(crafted(t)).hexdigest())
        for file, t in SHARDS.items()
    ]
    # "A", " man" | " is" " sitting" " on" " a" " roof" "." * 4 " he" "."
    assert manifest["text_bytes"] == {"val": 1 + 4 + 3, "train": 8 + 3 + 2 + 5 + 4 + 3 + 1}
    assert manifest["documents"]["val"] == 2 and manifest["documents"]["train"] == 2
    assert manifest["straddling"] == {"val_tokens": 2, "train_tokens": 2}
    assert manifest["source"]["revision"] == SHA
    assert manifest["settings"]["split"] == "public"
    data = TrainLoader(out, block_size=11, micro_batch_size=1, sequences_per_step=1, seed=0)
    stream = sum(list(SHARDS.values())[1:], [])
    assert data.batch(0, 0)[0][0].tolist() == stream[:11]

    again = pretokenized(public, tmp_path, "--shards", "1-3", HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and "complete already" in again.stdout
    other = error_line(pretokenized(public, tmp_path, "--shards", "1-2", HF_HUB_OFFLINE="1"))
    assert "source.shards '1-3' there, '1-2' asked" in other


def test_public_shards_go_on(public, tmp_path):
    public.status["finewebedu_train_000002.bin"] = 401
    line = error_line(pretokenized(public, tmp_path, "--shards", "1-3"))
    assert "401" in line and "kjj0/finewebedu10B-gpt2" in line
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "out" / "finewebedu_train_000001.bin").write_bytes(
        public.files["finewebedu_train_000001.bin"]
    )
    public.status.clear()
    public.requests.clear()
    assert pretokenized(public, tmp_path, "--shards", "1-3").returncode == 0
    fetched = public.fetched()
    assert "finewebedu_train_000002.bin" in fetched
    assert "finewebedu_train_000001.bin" not in fetched


@pytest.mark.parametrize(
    ("instead", "what"),
    [
        (crafted([1, 2, 3, 4, 6]), "not the file that the hub has"),
        (b"<html>sign in</html>", "train_000002.bin|Consistency"),
    ],
)
def test_a_wrong_public_shard_is_refused_and_removed(public, tmp_path, instead, what):
    public.instead["finewebedu_train_000002.bin"] = instead
    assert re.search(what, error_line(pretokenized(public, tmp_path, "--shards", "1-3")))
    assert not (tmp_path / "out" / "finewebedu_train_000002.bin").exists()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_finished_range_grows(public, tmp_path):
    assert pretokenized(public, tmp_path, "--shards", "2").returncode == 0
    public.requests.clear()
    result = pretokenized(public, tmp_path, "--shards", "1-3")
    assert result.returncode == 0, result.stderr
    assert sorted(public.fetched()) == [f"finewebedu_train_00000{i}.bin" for i in (1, 3)]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [shard["file"] for shard in manifest["shards"]] == list(SHARDS)
    assert manifest["source"]["shards"] == "1-3"
    assert [file["file"] for file in manifest["source"]["files"]] == list(SHARDS)


def folder_of(**files) -> dict[str, bytes]:
    return {f"finewebedu_{name}.bin": content for name, content in files.items()}


@pytest.mark.parametrize(
    ("files", "what"),
    [
        # of an interrupted --shards 1-3, or of anybody
        (folder_of(train_000003=crafted([339, 13])), "train_000003.bin is there, .* --shards 1-2"),
        (folder_of(train_000002=crafted([1])), "train_000002.bin: not the file that the hub has"),
        (folder_of(train_000001=b"mine"), "train_000001.bin: not the file that the hub has"),
        ({"mine.bin": b"mine"}, "mine.bin is there"),
    ],
)
def test_shards_of_others_are_refused_and_stay(public, tmp_path, files, what):
    out = tmp_path / "out"
    out.mkdir()
    for name, content in files.items():
        (out / name).write_bytes(content)
    assert re.search(what, error_line(pretokenized(public, tmp_path, "--shards", "1-2")))
    assert {name: (out / name).read_bytes() for name in files} == files


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--tokenizer", "bytes"], "--tokenizer: without effect together with --pretokenized"),
        (["--val-tokens", 5, "--limit-tokens", 9], "--limit-tokens, --val-tokens: without effect"),
        (["--shard-tokens", 5], "--shard-tokens: without"),
        (["--workers", 1023], "--workers: without"),
        (["--encoder", "tiktoken"], "--encoder: without"),
        (["--split", "public"], "--split: without"),
        (["--sample", "100BT"], "--sample: without"),
        (["--remove-parquet"], "--remove-parquet: without"),
    ],
)
def test_options_that_pretokenized_would_not_look_at(public, tmp_path, args, what):
    assert what in error_line(pretokenized(public, tmp_path, *args))
    assert not public.requests and not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", ["0-3", "3-1", "1-100", "a", "1-"])
def test_senseless_ranges(tmp_path, shards):
    assert f"--shards {shards}" in error_line(
        script("data.fineweb_edu", "--pretokenized", "--shards", shards, "--out", tmp_path / "out")
    )


def test_shards_without_pretokenized(tmp_path):
    line = error_line(script("data.fineweb_edu", "--shards", "1-3", "--out", tmp_path / "out"))
    assert "--pretokenized" in line


def test_ids_of_another_tokenizer_in_a_public_shard(public, tmp_path):
    public.files["finewebedu_train_000001.bin"] = crafted([EOT, 50257])
    line = error_line(pretokenized(public, tmp_path, "--shards", "1"))
    assert "train_000001.bin: token id 50257 is outside the vocabulary" in line


@pytest.mark.slow
def test_datasets_data_set_of_the_hub_works_offline_once_it_is_cached(tmp_path):
    files = {"data/train-00000.parquet": parquet(FILES[0]), "README.md": b"---\n---\nhello\n"}
    with Hub("some/set", files) as hub:
        env = hub.environment(tmp_path / "home")
        args = ["data.text", "hf:some/set", "--workers", 1, *SETTINGS]
        assert script(*args, "--out", tmp_path / "a", env=env).returncode == 0
        env |= {"HF_HUB_OFFLINE": "1"}
        assert script(*args, "--out", tmp_path / "b", env=env).returncode == 0
        assert same_shards(tmp_path / "a", tmp_path / "b")
