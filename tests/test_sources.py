import inspect
import io
import json
import math
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pyarrow.parquet
import pytest

from data import fineweb_edu, stdlib, text
from data.prepare import prepare
from nanorove.errors import UserError
from tests.hub import SHA, Hub
from tests.test_prepare import check_folder, expected, parse

ROOT = Path(__file__).parent.parent


def script(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run `python -m ...` as a user does."""
    command = [sys.executable, "-m", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def error_line(result: subprocess.CompletedProcess) -> str:
    """The one line of a refusal: exit code 2, the line last, no traceback."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.rstrip().split("\n")[-1]
    assert line.startswith("error: ")
    return line


def parquet(texts: list, column: str = "text", rows: int = 7, kind=None) -> bytes:
    """A parquet file with `column` between two others, in row groups of `rows`."""
    numbers = list(range(len(texts)))
    columns = {"id": numbers, column: pyarrow.array(texts, kind), "score": numbers}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, row_group_size=rows)
    return buffer.getvalue()


def as_parquet(table: pyarrow.Table) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue()


NOT_UTF8 = as_parquet(  # Arrow looks at no byte of what is called a string
    pyarrow.table({"text": pyarrow.array([b"a", b"b", b"c", b"d\xff"]).view(pyarrow.string())})
)
TWICE = as_parquet(pyarrow.table([["a"], ["b"]], names=["text", "text"]))


def same_shards(a: Path, b: Path) -> bool:
    files = sorted(p.name for p in a.glob("*.bin"))
    return files == sorted(p.name for p in b.glob("*.bin")) and all(
        (a / f).read_bytes() == (b / f).read_bytes() for f in files
    )


# The embedded corpus.


@pytest.fixture(scope="module")
def corpus() -> list[stdlib.Document]:
    return sum(stdlib.source().units([None], 0), [])


def test_stdlib_runs_offline_and_alike_with_two_workers(tmp_path):
    refusing = (
        "import runpy, sys\n"
        "def hook(event, args):\n"
        "    assert event not in ('socket.connect', 'socket.getaddrinfo'), (event, args)\n"
        "sys.addaudithook(hook)\n"
        "sys.argv[0] = 'data.stdlib'\n"
        "runpy.run_module('data.stdlib', run_name='__main__', alter_sys=True)\n"
    )
    shared = ["--limit-tokens", "400000", "--val-tokens", "60000", "--shard-tokens", "100000"]
    one = subprocess.run(
        [sys.executable, "-c", refusing, "--workers", "1", "--out", tmp_path / "1", *shared],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert one.returncode == 0, one.stderr
    two = script("data.stdlib", "--workers", 2, "--out", tmp_path / "2", *shared)
    assert two.returncode == 0, two.stderr
    assert same_shards(tmp_path / "1", tmp_path / "2")
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    version = "{}.{}.{}".format(*sys.version_info[:3])
    assert manifest["source"]["python"].split()[1] == version
    assert "depends on what is installed" in manifest["source"]["kind"]
    assert manifest["source"]["packages"].keys() >= {"numpy", "torch"}


def test_stdlib_has_each_kind_and_no_tests(corpus):
    names = {kind: [d.name for d in corpus if d.kind == kind] for kind in
             ("topic", "source", "builtin", "docstrings")}  # fmt: skip
    assert "assert" in names["topic"] and "json/decoder.py" in names["source"]
    assert "sys" in names["builtin"] and "json" not in names["builtin"]
    assert "readline" not in names["builtin"]
    assert {n.split("/")[0] for n in names["docstrings"]} >= {"numpy", "torch"}
    for name in names["source"] + names["docstrings"]:
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "site-packages", "idle_test"} & set(folders), name
    assert "pydoc_data/topics.py" not in names["source"]
    assert len({(d.kind, d.name) for d in corpus}) == len(corpus)


def test_stdlib_order_depends_on_the_names_alone(corpus):
    names = [f"{d.kind}/{d.name}" for d in corpus]
    assert names == sorted(names, key=lambda name: sha256(name.encode()).hexdigest())
    assert not any(d.name.startswith("/") or sys.prefix in d.name for d in corpus)
    # every kind is in the first twentieth, which validation comes from
    assert {name.split("/")[0] for name in names[: len(names) // 20]} == {
        *("topic", "source", "builtin", "docstrings")
    }


def test_stdlib_texts(corpus):
    wanted = {("source", "json/decoder.py"), ("topic", "assert"), ("builtin", "math")}
    found = {d[:2]: list(stdlib.read([d])) for d in corpus if d[:2] in wanted}
    assert found["source", "json/decoder.py"] == [
        Path(sys.modules["json"].__file__).with_name("decoder.py").read_text(encoding="utf-8")
    ]
    assert found["topic", "assert"] == [topics["assert"]]
    [doc] = found["builtin", "math"]
    assert doc.startswith(f"math\n\n{inspect.getdoc(math)}\n\n\nmath.acos(x, /)\n\n")
    assert inspect.getdoc(math.sqrt) in doc


def test_docstrings_of_a_source():
    module = '"""Top."""\ndef f(a, *, b=1):\n    """Of f."""\n    def g():\n        """Inner."""\n'
    module += 'def bare(): pass\nclass C:\n    "Of C."\n    async def m(self):\n        """\n'
    module += '        Of m.\n\n            more\n        """\nx = """no docstring"""\n'
    assert stdlib.source_docstrings("pkg/sub/__init__.py", module) == (
        "pkg.sub\n\nTop.\n\n\npkg.sub.f(a, *, b=1)\n\nOf f.\n\n\npkg.sub.f.g()\n\nInner.\n\n\n"
        "pkg.sub.C\n\nOf C.\n\n\npkg.sub.C.m(self)\n\nOf m.\n\n    more"
    )
    assert stdlib.source_docstrings("pkg/a.py", "x = 1") == ""
    assert stdlib.source_docstrings("pkg/a.py", "not python") == ""


def test_a_missing_package_and_an_undecodable_file_are_skipped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(stdlib, "PACKAGES", ("no_such_package_here",))
    assert stdlib.source().description["packages"] == {}
    assert "no_such_package_here is not installed" in capsys.readouterr().err
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    latin = stdlib.Document("source", "latin.py", str(tmp_path / "latin.py"))
    assert list(stdlib.read([latin])) == []


def test_stdlib_imports_no_package():
    code = "import sys; from data.stdlib import *\n"
    code += "[list(read(unit)) for unit in source().units([None], 0)[:9]]\n"
    code += "assert not {'torch', 'sympy', 'networkx'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# FineWeb-Edu, from a loopback hub and from a folder.

FILES = [[f"file {k} document {i} " * (1 + i % 5) for i in range(40)] for k in range(3)]
FILES[0][3:6] = ["", None, "<|endoftext|>"]
SETTINGS = ["--tokenizer", "bytes", "--val-tokens", "500", "--shard-tokens", "1000"]


@pytest.fixture
def fineweb():
    files = {f"sample/10BT/{k:03d}_00000.parquet": parquet(t) for k, t in enumerate(FILES)}
    files |= {"sample/100BT/000_00000.parquet": parquet(["of another sample"])}
    files |= {"sample/10BT/notes.txt": b"no parquet", "README.md": b"hello"}
    with Hub("HuggingFaceFW/fineweb-edu", files) as hub:
        yield hub


def test_fineweb_from_the_hub_and_from_a_folder(tmp_path, fineweb):
    env = fineweb.environment(tmp_path / "home")
    hub = script("data.fineweb_edu", "--out", tmp_path / "hub", "--workers", 2, *SETTINGS, env=env)
    assert hub.returncode == 0, hub.stderr
    documents = expected(sum(FILES, []), val_tokens=500)
    manifest = check_folder(tmp_path / "hub", *documents, 1000, name="finewebedu")
    assert manifest["documents"]["empty"] == 2
    assert [f["file"] for f in manifest["source"]["files"]] == fineweb.fetched()
    assert manifest["source"]["revision"] == "fc9850dff5e2d0f8f776efe41b24a1c49556cfc5"
    assert fineweb.fetched() == [f"sample/10BT/{k:03d}_00000.parquet" for k in range(3)]
    assert all("fc9850dff5e2d0f8f776efe41b24a1c49556cfc5" in path for _, path in fineweb.requests)

    folder = tmp_path / "files"
    folder.mkdir()
    for k, texts in enumerate(FILES):
        (folder / f"{k:03d}_00000.parquet").write_bytes(parquet(texts, rows=11))
    local = ["--local", folder, "--out", tmp_path / "local", "--workers", 1, *SETTINGS]
    requests = len(fineweb.requests)
    assert script("data.fineweb_edu", *local, env=env).returncode == 0
    assert len(fineweb.requests) == requests
    assert same_shards(tmp_path / "hub", tmp_path / "local")

    # complete: the same command needs no network
    again = ["--out", tmp_path / "hub", *SETTINGS]
    result = script("data.fineweb_edu", *again, env=env | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0 and "complete already" in result.stdout


def test_fineweb_cut_like_the_public_shards(tmp_path):
    for k, texts in enumerate(FILES):
        (tmp_path / f"{k:03d}_00000.parquet").write_bytes(parquet(texts))
    args = ["--local", tmp_path, "--out", tmp_path / "out", "--workers", 2, "--tokenizer", "bytes"]
    sizes = ["--val-tokens", 1000, "--shard-tokens", 1000]
    result = script("data.fineweb_edu", *args, *sizes, "--split", "public")
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    stream = sum(([256, *text.encode()] for text in sum(FILES, []) if text), [])
    assert [shard["tokens"] for shard in manifest["shards"][:-1]] == [1000] * (len(stream) // 1000)
    found = sum((parse(tmp_path / "out" / s["file"]) for s in manifest["shards"]), [])
    assert found == stream
    assert [s["split"] for s in manifest["shards"][:2]] == ["val", "train"]
    assert "validation document goes on in training" in result.stdout


def test_fineweb_fetches_no_more_than_it_needs(tmp_path, fineweb):
    env = fineweb.environment(tmp_path / "home")
    few = ["--out", tmp_path / "few", "--workers", 1, "--limit-tokens", 1500, *SETTINGS]
    result = script("data.fineweb_edu", *few, "--revision", "main", env=env)
    assert result.returncode == 0, result.stderr
    assert fineweb.fetched() == ["sample/10BT/000_00000.parquet"]
    documents = expected(FILES[0], val_tokens=500, limit_tokens=1500)
    manifest = check_folder(tmp_path / "few", *documents, 1000, name="finewebedu")
    assert manifest["source"]["revision"] == SHA  # of "main"


def test_fineweb_says_in_one_line_what_the_hub_refused(tmp_path, fineweb):
    env = fineweb.environment(tmp_path / "home")
    args = ["data.fineweb_edu", "--out", tmp_path / "out", "--workers", 2, *SETTINGS]
    fineweb.status["sample/10BT/001_00000.parquet"] = 404
    line = error_line(script(*args, env=env))
    assert "sample/10BT/001_00000.parquet" in line and "404" in line and "--local DIR" in line
    assert not (tmp_path / "out" / "manifest.json").exists()

    fineweb.status.clear()
    shutil.rmtree(tmp_path / "home")
    line = error_line(script(*args, env=env | {"HF_HUB_OFFLINE": "1"}))
    assert "offline" in line.lower() and "--local DIR" in line

    fineweb.files = {"README.md": b"hello"}
    assert "sample/10BT" in error_line(script(*args, env=env))


def test_fineweb_local_refusals(tmp_path):
    def run():
        options = fineweb_edu.Options(out=tmp_path / "out", local=tmp_path, workers=1)
        return prepare(fineweb_edu.source(options), options)

    with pytest.raises(UserError, match="--local .*no .parquet file"):
        run()
    path = tmp_path / "000.parquet"
    path.write_bytes(b"<html>sign in</html>")  # nanochat#344
    with pytest.raises(UserError, match="000.parquet: .*not .all of. a parquet file"):
        run()
    path.write_bytes(parquet(["a", "b"], column="content"))
    with pytest.raises(UserError, match="000.parquet: no column 'text'.*'content'"):
        run()
    path.write_bytes(parquet([1, 2]))
    with pytest.raises(UserError, match="000.parquet: column 'text' is no text but int64"):
        run()
    path.write_bytes(parquet(["a", "b"]))
    with pytest.raises(UserError, match="training would be empty"):
        run()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--sample", "100BT"], "--sample: without effect together with --local"),
        (["--revision", "main"], "--revision: without effect together with --local"),
        (["--remove-parquet"], "--remove-parquet: without effect together with --local"),
        (["--pretokenized"], "--local: without effect together with --pretokenized"),
    ],
)
def test_fineweb_options_that_local_would_not_look_at(tmp_path, args, what):
    args = ["--local", tmp_path, "--out", tmp_path / "out", *args]
    assert what in error_line(script("data.fineweb_edu", *args))
    assert not (tmp_path / "out").exists()


# The user's own text.


def run_text(out: Path, *sources: object, **keys) -> dict:
    given = {"tokenizer": "bytes", "workers": 1, "shard_tokens": 50, "val_tokens": 20}
    options = text.Options(sources=tuple(map(str, sources)), out=out, **(given | keys))
    return prepare(text.source(options), options)


def test_text_of_every_kind(tmp_path):
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "one.txt").write_bytes("one\r\n\u00e9 ".encode())
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"with a byte order mark")
    (folder / "ignored.md").write_text("not this")
    lines = [{"text": "line 1"}, {"text": None}, {"text": "line\n3", "more": 1}, {"text": "\ud800"}]
    (tmp_path / "x.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "x.parquet").write_bytes(
        parquet(["row 1", None, "row 3"], rows=2, kind=pyarrow.large_string())
    )
    manifest = run_text(
        tmp_path / "out", tmp_path / "x.jsonl", folder, tmp_path / "x.parquet", shard_tokens=25
    )
    texts = ["line 1", None, "line\n3", "\ufffd", "with a byte order mark", "one\r\n\u00e9 "]
    texts += ["row 1", None, "row 3"]
    check_folder(tmp_path / "out", *expected(texts), 25, name="text")
    assert [f["file"] for f in manifest["source"]["files"]] == [
        *("x.jsonl", "a.txt", "b/one.txt", "x.parquet")
    ]


def test_text_column(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "one two three"}\n{"body": "four five six"}\n')
    (tmp_path / "x.parquet").write_bytes(parquet(["seven"], column="body"))
    run_text(tmp_path / "out", tmp_path / "x.jsonl", tmp_path / "x.parquet", column="body")
    documents = expected(["one two three", "four five six", "seven"])
    check_folder(tmp_path / "out", *documents, 50, name="text")


def test_jsonl_gives_each_line_once_wherever_its_units_end(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    texts = ["", "a", "é" * 5, "line\nbreak", "b" * 40, "c"]
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n")
    for size in [*range(1, 60), 10**6]:
        monkeypatch.setattr(text, "UNIT_BYTES", size)
        units = list(text.file_units(path))
        assert sum((text.read_jsonl(unit, "text") for unit in units), []) == texts


@pytest.mark.parametrize(
    ("file", "data", "what"),
    [
        ("x.txt", b"one\ntwo \xff\n", "x.txt line 2: invalid start byte; save it as UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', "x.jsonl line 3: .*invalid start byte"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b"\n', "x.jsonl line 2: .*delimiter"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "x.jsonl line 2: no field 'text'"),
        ("x.jsonl", b'{"text": 3}\n', "x.jsonl line 1: field 'text' is no text but int"),
        ("x.jsonl", b'["a"]\n', "x.jsonl line 1: "),
        ("x.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "x.jsonl line 2: "),
        ("x.parquet", NOT_UTF8, "x.parquet row group 1: column 'text' is not UTF-8 .invalid"),
        ("x.parquet", TWICE, "x.parquet: 2 columns 'text'; rename all but one"),
        ("x.parquet", parquet(["a"])[:-9], "x.parquet: .*not .all of. a parquet file"),
        ("x.parquet", parquet(["a"], column="b"), "x.parquet: no column 'text'"),
        ("x.csv", b"a,b", "x.csv: unknown kind of file"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [5, 2**20])
def test_text_names_file_and_line_of_a_fault(tmp_path, monkeypatch, file, data, what, unit_bytes):
    monkeypatch.setattr(text, "UNIT_BYTES", unit_bytes)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(UserError, match=what):
        run_text(tmp_path / "out", tmp_path / file)


def test_text_refuses_sources_that_are_none(tmp_path):
    with pytest.raises(UserError, match="nowhere.txt: no such file"):
        run_text(tmp_path / "out", tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="no .txt, .jsonl, .parquet file in this folder"):
        run_text(tmp_path / "out", tmp_path)
    with pytest.raises(UserError, match="name at least one"):
        run_text(tmp_path / "out")
    with pytest.raises(UserError, match="stands alone"):
        run_text(tmp_path / "out", "hf:a/b", "x.txt")
    for spec in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(UserError, match="write hf:NAME"):
            run_text(tmp_path / "out", spec)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("text")
    except OSError:
        pytest.skip("this file system has no such names")
    for source in (folder, next(folder.iterdir())):
        with pytest.raises(UserError, match=r"caf\\xe9.txt'.*: the name is not UTF-8; rename it"):
            text.source(text.Options(sources=(str(source),), out=tmp_path / "out"))


def test_files_of_a_folder_that_are_skipped_are_counted(tmp_path, capsys):
    for name in ("a.txt", "b.md", "c.TXT", "d/e.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [name for name, _ in text.find_files(tmp_path)] == ["a.txt"]
    assert f"{tmp_path}: 3 of 4 files are no .txt" in capsys.readouterr().out


def test_an_edit_that_keeps_the_size_is_seen(tmp_path):
    for name, content in [("a.txt", "one"), ("b.txt", "two " * 10)]:
        (tmp_path / name).write_text(content)
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    run_text(tmp_path / "out", *files)
    run_text(tmp_path / "out", *files)
    (tmp_path / "a.txt").write_text("eno")
    with pytest.raises(UserError, match=r"source.files.0.sha256 '\w+' there, '\w+' asked"):
        run_text(tmp_path / "out", *files)


def test_text_from_the_hub(tmp_path):
    halves = [FILES[0], FILES[1]]
    files = {f"data/train-{i:05d}.parquet": parquet(t, "body") for i, t in enumerate(halves)}
    files["README.md"] = b"---\nlicense: mit\n---\nhello\n"
    with Hub("some/set", files) as hub:
        env = hub.environment(tmp_path / "home")
        args = ["--workers", 2, *SETTINGS, "--column", "body"]
        result = script("data.text", "hf:some/set", "--out", tmp_path / "out", *args, env=env)
        assert result.returncode == 0, result.stderr
        documents = expected(sum(halves, []), val_tokens=500)
        manifest = check_folder(tmp_path / "out", *documents, 1000, name="text")
        assert manifest["source"]["revision"] == SHA
        for i, texts in enumerate(halves):
            (tmp_path / f"{i}.parquet").write_bytes(parquet(texts, "body"))
        local = [tmp_path / "0.parquet", tmp_path / "1.parquet", "--out", tmp_path / "local"]
        assert script("data.text", *local, *args).returncode == 0
        assert same_shards(tmp_path / "out", tmp_path / "local")


@pytest.mark.slow
def test_text_from_the_hub_refusals(tmp_path):
    files = {"data/train.parquet": parquet(FILES[0], "body"), "README.md": b"---\n---\nhello\n"}
    with Hub("some/set", files) as hub:
        env = hub.environment(tmp_path / "home")

        def refused(spec, *more):
            result = script("data.text", spec, "--out", tmp_path / "no", *SETTINGS, *more, env=env)
            return error_line(result)

        assert "'nosplit'" in refused("hf:some/set::nosplit").replace('"', "'")
        assert "no column 'text'" in refused("hf:some/set", "--column", "text")
        assert "some/other" in refused("hf:some/other")
        assert not os.path.exists(tmp_path / "no")
