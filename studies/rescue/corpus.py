"""A corpus every machine with Python has: the sources under site-packages, as BPE tokens."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 16_384
_MOST_BYTES = 600_000_000
_TRAINING_BYTES = 25_000_000
_LONGEST_FILE = 1_000_000


def sources(folder: Path) -> Iterator[str]:
    """The readable Python files below a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        if path.stat().st_size <= _LONGEST_FILE:
            yield path.read_text(encoding="utf-8", errors="ignore")


def prepare(cache: Path, vocabulary: int = VOCABULARY) -> tuple[np.ndarray, dict]:
    """Tokenizes the installed sources once; later calls read the result.

    Args:
        cache: Folder of the result.
        vocabulary: Entries of the byte-level BPE, which is trained on the first 25 MB.

    Returns:
        Tokens, UINT16 `(T,)`, and what they are: files, bytes, tokens, SHA-256 of the tokens.
    """
    tokens_path, facts_path = cache / "tokens.npy", cache / "tokens.json"
    if not facts_path.exists():
        texts, size = [], 0
        for text in sources(Path(sysconfig.get_paths()["purelib"])):
            texts.append(text)
            size += len(text.encode())
            if size >= _MOST_BYTES:
                break
        tokenizer = _trained(texts, vocabulary)
        pieces = [
            np.array(encoding.ids, dtype=np.uint16)
            for start in range(0, len(texts), 512)
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 512])
        ]
        tokens = np.concatenate(pieces)
        cache.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        facts = {"files": len(texts), "bytes": size, "tokens": tokens.size, "sha256": digest}
        # Runs side by side may prepare the same: none is to read what another has half written.
        own = cache / f"{os.getpid()}.npy"
        np.save(own, tokens)
        own.replace(tokens_path)
        own.with_suffix(".json").write_text(json.dumps(facts))
        own.with_suffix(".json").replace(facts_path)
    return np.load(tokens_path, mmap_mode="r"), json.loads(facts_path.read_text())


def _trained(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first, size = [], 0
    for text in texts:
        first.append(text)
        size += len(text)
        if size >= _TRAINING_BYTES:
            break
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(first, trainer)
    return tokenizer
