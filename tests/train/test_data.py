"""Every sample once an epoch, in an order that is a function of the seed; text from anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.text_files import find_files
from pycomm.train.config import DataConfig
from pycomm.train.data.corpus import bigram_loss, check_length, documents, open_corpus
from pycomm.train.data.cursor import permute, samples_at, samples_of_rank
from pycomm.train.data.source import Sequences
from pycomm.train.data.tokens import ByteTokenizer, Gpt2Tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(num_samples), num_samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_differ_and_the_order_is_mixed() -> None:
    n = 10_000
    orders = [permute(np.arange(n), n, s, e) for s, e in ((0, 0), (0, 1), (1, 0))]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(n))[0, 1]) < 0.05
        for b in orders[:i]:
            assert (a == b).mean() < 0.01
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


@given(
    st.integers(1, 500), st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(0, 9)
)
@settings(deadline=None, max_examples=60)
def test_steps_of_any_size_see_each_sample_once_an_epoch(
    num_samples: int, steps: list[int], seed: int
) -> None:
    seen: list[int] = []
    for size in steps:
        seen += samples_at(len(seen), size, num_samples, seed).tolist()
    for first in range(0, len(seen) - num_samples + 1, num_samples):
        assert sorted(seen[first : first + num_samples]) == list(range(num_samples))
    rest = seen[len(seen) // num_samples * num_samples :]
    assert len(set(rest)) == len(rest)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_ranks_share_a_step_without_gap_or_overlap(passes: int, micro: int, ranks: int) -> None:
    step = np.arange(passes * micro * ranks) + 7
    parts = [samples_of_rank(step, passes, micro, r, ranks) for r in range(ranks)]
    assert all(part.shape == (passes, micro) for part in parts)
    assert sorted(np.concatenate(parts, axis=None).tolist()) == step.tolist()
    for j in range(passes):  # a pass of all ranks is a run of the order
        run = np.concatenate([part[j] for part in parts])
        assert run.tolist() == step[j * micro * ranks : (j + 1) * micro * ranks].tolist()


def test_sequences_cut_stretches_without_crossing_them() -> None:
    stretches = [np.arange(10, dtype=np.uint16), np.arange(100, 125, dtype=np.uint16)]
    source = Sequences(stretches, 4)
    assert len(source) == 2 + 6
    inputs, targets = source.batch(np.arange(8))
    assert inputs[1].tolist() == [4, 5, 6, 7]
    assert targets[1].tolist() == [5, 6, 7, 8]
    assert inputs[2].tolist() == [100, 101, 102, 103]
    assert targets[7].tolist() == [121, 122, 123, 124]
    assert (inputs[:, 1:] == targets[:, :-1]).all()


def test_files_folders_globs_and_jsonl(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "c.jsonl").write_text('{"text": "é\\n"}\n\n{"text": "d", "more": 1}\n')
    assert [p.name for p in find_files(str(folder), "data.path")] == ["a.txt", "b.txt", "c.jsonl"]
    assert [p.name for p in find_files(str(folder / "*.txt"), "data.path")] == ["a.txt", "b.txt"]
    assert len(find_files("", "data.path")) > 100
    texts = documents(find_files(str(folder), "data.path"), "text")
    assert list(texts) == [
        b"a",
        b"b",
        "é\n".encode(),
        b"d",
    ]
    with pytest.raises(ValueError, match="names no file"):
        find_files(str(folder / "nothing"), "data.path")


@pytest.mark.parametrize(
    "line",
    [
        *("not json", '{"other": 1}', "[1]", '"text"', "5"),
        *('{"text": null}', '{"text": ["a"]}', '{"text": "\\ud800"}'),
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: no"):
        list(documents([path], "text"))


def test_a_corpus_is_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(bytes(range(250)) * 20)
    calls: list[int] = []
    config = DataConfig(path=str(path))
    first = open_corpus(config, lambda done, total: calls.append(done))
    again = open_corpus(config, lambda done, total: calls.append(done))
    assert calls == [5000]
    assert np.array_equal(first.tokens, again.tokens)
    assert first.tokens[:250].tolist() == list(range(250))
    assert first.tokens[-1] == ByteTokenizer.end_of_text
    path.write_bytes(b"y" * 6000)
    assert open_corpus(config).tokens[0] == ord("y")
    with pytest.raises(ValueError, match="training needs at least"):
        check_length(open_corpus(config), 1000)


def test_the_same_text_has_the_same_digest_wherever_and_whenever_it_lies(tmp_path: Path) -> None:
    contents = []
    for name, text in (("a", b"x" * 5000), ("b", b"x" * 5000), ("c", b"x" * 5001)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_bytes(text)
        contents.append(open_corpus(DataConfig(path=str(tmp_path / name))).content)
    assert contents[0] == contents[1] != contents[2]


def test_no_samples_are_an_error_not_a_hang() -> None:
    with pytest.raises(ValueError, match="there are no samples"):
        samples_at(0, 4, 0, 0)


def test_a_full_disk_leaves_no_half_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"x" * 5000)

    def fail(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        open_corpus(DataConfig(path=str(path)), fail)
    assert list((tmp_path / "cache" / "pycomm" / "corpora").iterdir()) == []


def test_training_and_validation_share_no_token(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 18))
    corpus = open_corpus(DataConfig(path=str(path), validation=0.1))
    sizes = [sum(len(s) for s in part) for part in (corpus.training, corpus.validation)]
    assert sum(sizes) == len(corpus.tokens)
    assert sizes[1] == pytest.approx(0.1 * len(corpus.tokens), rel=0.01)
    assert len(corpus.training) == 4
    joined = np.concatenate(
        [t for pair in zip(corpus.training, corpus.validation, strict=True) for t in pair]
    )
    assert np.array_equal(joined, corpus.tokens)


def test_a_bigram_model_of_noise_knows_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint16)
    assert bigram_loss([noise[:200_000]], [noise[200_000:]], 257) > 5.4
    same = np.zeros(10_000, np.uint16)
    assert bigram_loss([same], [same], 257) < 0.01


def test_byte_tokens() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve ✓\n"
    tokens = tokenizer.encode(text.encode()).tolist()
    assert tokens == list(text.encode())
    assert tokenizer.decode([*tokens, tokenizer.end_of_text]) == text


def test_gpt2_tokens() -> None:
    tokenizer = Gpt2Tokenizer()
    # The published numbers of GPT-2's vocabulary.
    assert tokenizer.encode(b"Hello world").tolist() == [15496, 995]
    assert tokenizer.encode(b"def f(x):\n    return x").tolist()[:2] == [4299, 277]
    text = "import os\n\n\tnaïve ✓ 12345"
    assert tokenizer.decode(tokenizer.encode(text.encode()).tolist()) == text
    assert json.dumps(tokenizer.vocab_size) == "50257"
