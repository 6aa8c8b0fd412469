"""English prose that every Debian machine can fetch: texts of documentation packages, tokenized.

    cd DEBS && apt-get download $(cat .../studies/tuned/packages.txt)
    python -m studies.tuned.prose DEBS runs/prose

Takes HTML, info, manual pages and plain text; leaves paragraphs of sentences, each once. A file
goes to training or to the held-out part whole, by a hash of its name. Writes UINT16 `tokens.npy`
(training) and `held_out.npy`, and `facts.json`: packages, files, bytes, tokens, hashes.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: Entries of the BPE, GPT-2's number to a multiple of 64; the last ends a document.
VOCABULARY = 50_304

#: Tokens that are held out, about.
HELD_OUT = 2_000_000

_LONGEST_FILE = 4_000_000
_TRAINING_BYTES = 40_000_000

#: Of a paragraph: its fewest characters, its share of letters and spaces, and distinct words that
#: English sentences are made of.
_SHORTEST, _LETTERS, _COMMON = 80, 0.87, 4
_WORDS = {
    "the", "of", "to", "and", "a", "in", "is", "that", "it", "for", "as", "with", "be", "on", "are",
    "this", "by", "or", "an", "if", "you", "not", "can", "from", "which", "at", "will", "when",
    "have", "has", "was", "we", "but", "all", "one", "may", "used", "use",
}  # fmt: skip

_NO_TEXT = re.compile(r"(?is)<(script|style|pre|head|table)\b.*?</\1\s*>|<!--.*?-->")
_BLOCK = re.compile(r"(?i)</?(?:p|div|li|ul|ol|dl|dt|dd|h[1-6]|br|section|tr|td|th)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_ROFF_FONT = re.compile(r"^[.'](?:[BIR]{1,2}|SM|SB|Nm|Fl|Ar|Pa|Em|Li|Xr|Cm|Ic|Sy)\s+(.*)$")
_ROFF_ESCAPE = re.compile(r"\\(?:f\[?\w*\]|f.|s[-+]?\d+|[&|^/,:])")
_ROFF_SIGNS = (r"\-", "-"), (r"\(aq", "'"), (r"\(cq", "'"), (r"\(oq", "'"), (r"\e", "\\")


def paragraphs_of_html(text: str) -> list[str]:
    """Blocks of a page without markup."""
    blocks = _BLOCK.split(_NO_TEXT.sub(" ", text))
    return [html.unescape(_TAG.sub("", block)) for block in blocks]


def paragraphs_of_roff(text: str) -> list[str]:
    """Paragraphs of a manual page; a macro that is no font ends one."""
    lines = []
    for line in text.splitlines():
        if line.startswith((".", "'")):
            found = _ROFF_FONT.match(line)
            line = found[1].replace('"', "") if found else ""
        for sign, letter in _ROFF_SIGNS:
            line = line.replace(sign, letter)
        lines.append(_ROFF_ESCAPE.sub("", line))
    return "\n".join(lines).split("\n\n")


def paragraphs_of_text(text: str) -> list[str]:
    """Paragraphs of plain text and info."""
    return re.split(r"\n\s*\n", text.replace("\x1f", "\n\n"))


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph, its white space single, is of English sentences."""
    if len(paragraph) < _SHORTEST or not re.search(r"[a-z][.!?:]", paragraph):
        return False
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return (
        letters >= _LETTERS * len(paragraph)
        and len(_WORDS.intersection(paragraph.lower().split())) >= _COMMON
    )


#: What reads a file, by the end of its name.
_KINDS = (
    (r"\.x?html?$", paragraphs_of_html),
    (r"/man/man\d/[^/]*$", paragraphs_of_roff),
    (r"\.(txt|text|info(-\d+)?)$", paragraphs_of_text),
)


def texts_of(package: Path) -> list[tuple[str, list[str]]]:
    """The files of a package, by name, and their paragraphs of prose."""
    found = []
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            name = member.name.removesuffix(".gz").lower()
            split = next((split for end, split in _KINDS if re.search(end, name)), None)
            if split is None or not member.isfile() or member.size > _LONGEST_FILE:
                continue
            data = archive.extractfile(member).read()
            if member.name.endswith(".gz"):
                data = gzip.decompress(data)
            spaced = (" ".join(p.split()) for p in split(data.decode("utf-8", "ignore")))
            if prose := [paragraph for paragraph in spaced if is_prose(paragraph)]:
                found.append((f"{package.name.partition('_')[0]}/{member.name}", prose))
    return found


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file, packages in the order of their names; no paragraph twice."""
    seen = set[bytes]()
    with ProcessPoolExecutor(2) as pool:
        for files in pool.map(texts_of, sorted(folder.glob("*.deb"))):
            for name, prose in files:
                kept = []
                for paragraph in prose:
                    key = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
                    if key not in seen:
                        seen.add(key)
                        kept.append(paragraph)
                if kept:
                    yield name, "\n".join(kept)


def trained(texts: list[str]) -> Tokenizer:
    """A byte-level BPE, trained on a regular part of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = max(1, sum(map(len, texts)) // _TRAINING_BYTES)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[::every], trainer)
    return tokenizer


def main(debs: Path, target: Path) -> None:
    """Writes the corpus."""
    names, texts = zip(*documents(debs), strict=True)
    tokenizer = trained(list(texts))
    end = np.array([VOCABULARY - 1], dtype=np.uint16)
    pieces = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 512]):
            pieces.append(np.concatenate([np.array(encoding.ids, dtype=np.uint16), end]))
    total = sum(map(len, pieces))
    share = HELD_OUT / total * 2**32
    parts: dict[str, list[np.ndarray]] = {"tokens": [], "held_out": []}
    for name, piece in zip(names, pieces, strict=True):
        drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        parts["held_out" if drawn < share else "tokens"].append(piece)
    facts: dict[str, object] = {"packages": [p.name for p in sorted(debs.glob("*.deb"))]}
    target.mkdir(parents=True, exist_ok=True)
    for part, pieces in parts.items():
        tokens = np.concatenate(pieces)
        np.save(target / f"{part}.npy", tokens)
        facts[part] = {
            "files": len(pieces),
            "tokens": tokens.size,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }
    facts["bytes"] = sum(len(text.encode()) for text in texts)
    (target / "facts.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
