"""A corpus: documents turned into tokens once, then read through a memory map.

The file of tokens lies in the user's cache under a digest of what it was made from (paths, sizes,
times, tokenizer), so another run finds it, and a changed file makes another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.text_files import find_files
from pycomm.train.config import DataConfig
from pycomm.train.data.tokens import Tokenizer, get_tokenizer

_FORMAT = 1
_STRETCHES_MAX = 16
_STRETCH_TOKENS_MIN = 1 << 16
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def documents(files: list[Path], text_key: str) -> Iterator[bytes]:
    """One a file; of a .jsonl one a line.

    Raises:
        ValueError: a line is not JSON, or has no such field; with file and line.
    """
    for path in files:
        if path.suffix != ".jsonl":
            yield path.read_bytes()
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[text_key]
                    if not isinstance(text, str):
                        raise TypeError
                    document = text.encode()
                except (ValueError, KeyError, TypeError) as error:
                    kind = "no text there" if isinstance(error, KeyError | TypeError) else "no JSON"
                    raise ValueError(
                        f"{path}:{number}: {kind} (data.text_key '{text_key}')"
                    ) from None
                yield document


@dataclass(frozen=True)
class Corpus:
    """Tokens for training, and tokens kept aside for validation: the last share of each of a few
    equal stretches, so that both are from everywhere in the text."""

    tokens: Tokens
    validation_share: float
    tokenizer: Tokenizer
    content: str  # digest of the tokens; the same text has the same on every host

    @property
    def training(self) -> list[Tokens]:
        """What training sees."""
        return [stretch[:-kept] for stretch, kept in self._stretches()]

    @property
    def validation(self) -> list[Tokens]:
        """What no training step sees."""
        return [stretch[-kept:] for stretch, kept in self._stretches()]

    def _stretches(self) -> list[tuple[Tokens, int]]:
        count = max(1, min(_STRETCHES_MAX, len(self.tokens) // _STRETCH_TOKENS_MIN))
        bounds = [len(self.tokens) * i // count for i in range(count + 1)]
        stretches = [self.tokens[a:b] for a, b in pairwise(bounds)]
        return [(s, max(1, int(len(s) * self.validation_share))) for s in stretches]


def open_corpus(config: DataConfig, progress: Callable[[int, int], None] | None = None) -> Corpus:
    """Tokenises what is not in the cache yet, and maps it.

    Args:
        progress: called with (bytes done, bytes in all) while tokens are made.

    Raises:
        ValueError: no files, or a bad line.
    """
    tokenizer = get_tokenizer(config.tokenizer)
    files = find_files(config.path, "data.path")
    key = _key(files, config, tokenizer)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pycomm" / "corpora"
    path = folder / f"{key}.bin"
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    if not (path.exists() and path.with_suffix(".digest").exists()):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(path, files, config, tokenizer, dtype, progress)
    tokens: Any = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    content = path.with_suffix(".digest").read_text()
    return Corpus(tokens, config.validation, tokenizer, content)


def check_length(corpus: Corpus, context: int) -> None:
    """Raises ValueError where there is too little text for a few sequences."""
    needed = 20 * (context + 1)
    if len(corpus.tokens) < needed:
        raise ValueError(
            f"the text has {len(corpus.tokens)} tokens, training needs at least {needed}; "
            "give more with data.path"
        )


def _key(files: list[Path], config: DataConfig, tokenizer: Tokenizer) -> str:
    parts = [f"{_FORMAT} {tokenizer.name} {config.text_key}"]
    for path in files:
        stat = path.stat()
        parts.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def _write(
    path: Path,
    files: list[Path],
    config: DataConfig,
    tokenizer: Tokenizer,
    dtype: type,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Whole or not at all: two runs may do it at once, and the disk may be full."""
    total = sum(file.stat().st_size for file in files)
    done = 0
    content = hashlib.blake2b(digest_size=12)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as out:
            for document in documents(files, config.text_key):
                tokens = np.append(tokenizer.encode(document), np.uint32(tokenizer.end_of_text))
                data = tokens.astype(dtype).tobytes()
                out.write(data)
                content.update(data)
                done += len(document)
                if progress is not None:
                    progress(min(done, total), total)
        path.with_suffix(".digest").write_text(content.hexdigest())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def bigram_loss(training: list[Tokens], validation: list[Tokens], vocab_size: int) -> float:
    """Nats per token on `validation` of a bigram model counted on `training`, with 0.1 added to
    each count: the loss of knowing nothing but the token before. Only for small vocabularies."""

    def pairs(tokens: Tokens) -> npt.NDArray[np.int64]:
        return tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]

    counts = np.full(vocab_size**2, 0.1)
    for tokens in training:
        counts += np.bincount(pairs(tokens), minlength=vocab_size**2)
    by_first = counts.reshape(vocab_size, -1)
    log_p = np.log(by_first / by_first.sum(1, keepdims=True)).ravel()
    return float(-np.concatenate([log_p[pairs(tokens)] for tokens in validation]).mean())
