"""Text to token ids and back, for the family's vocabulary and for tiny models that have none.

`TikTokenTokenizer` reads a checkpoint's `tiktoken.model`: byte-level BPE over a fixed regular expression,
with 256 special slots above the base ranks. `ByteTokenizer` needs no file: one id per byte, and the same
specials where there is room. `StreamDecoder` turns ids into text while they arrive.

One rule keeps users' text from steering the model: `encode` treats everything as data unless the caller says
`allow_special=True`. Text and control are encoded by separate calls and their ids joined, never the strings.

Sources: behaviour of the tokenizer published with the checkpoint; for BPE itself, github.com/openai/tiktoken.
"""

import abc
import codecs
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging

from maxmoe.chat.vocabulary import (
    NAMES_FILE,
    NUM_SPECIAL_SLOTS,
    read_added_names,
    read_ranks,
    special_table,
)

# BPE merges only within a match. The first alternative that matches wins; `&&` intersects two classes.
_SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Long inputs are cut before BPE. Cuts change ids, so both numbers are part of the vocabulary's definition.
_MAX_SLICE_CHARS = 400_000
_MAX_RUN_CHARS = 25_000

_MODEL_FILE = "tiktoken.model"
_FOREIGN_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_BYTE_VOCAB_RANGE = (256, 1024)  # ids; beyond this, a missing vocabulary file is a mistake, not a tiny model


class Tokenizer(abc.ABC):
    """What the rest of `chat` needs from a vocabulary.

    Attributes:
      vocab_size: Number of ids, specials and unused ones included; equals the rows of the model's embedding.
      bos_id: Id of `[BOS]`. The chat encoding never emits it. None when the vocabulary has no such id.
      end_of_msg_id: Id of `<|end_of_msg|>`, which ends generation (not `[EOS]`). None when unknown.
      pad_id: Id of `[PAD]`. None when unknown.
      special_ids: Every string that `encode(..., allow_special=True)` turns into one id, and that id.
    """

    vocab_size: int
    bos_id: int | None
    end_of_msg_id: int | None
    pad_id: int | None
    special_ids: Mapping[str, int]

    @abc.abstractmethod
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turns text into ids.

        Args:
          text: Any string; "" gives []. Lone surrogates, which have no UTF-8 form, are read as U+FFFD.
          allow_special: False for anything a user, a tool or a model wrote: what looks special is plain
            text there, and no error. True for the control strings that the chat encoding itself writes.
        """

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; for a special, its name. ValueError outside [0, vocab_size)."""

    def decode(self, ids: Iterable[int]) -> str:
        """Turns ids into text: all bytes joined, then read as UTF-8 with U+FFFD for what is not UTF-8.

        Specials appear as their names, and nothing is put between ids. ValueError for an id outside
        [0, vocab_size).
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _valid_id(self, token_id: int) -> int:
        index = operator.index(token_id)  # accepts numpy integers
        if not 0 <= index < self.vocab_size:
            raise ValueError(
                f"token id {index} is outside this vocabulary: ids run from 0 to {self.vocab_size - 1}. "
                "Check that the model and the tokenizer come from the same checkpoint."
            )
        return index

    def _set_special_names(self, names: Mapping[int, str]) -> None:
        self.special_ids = {name: token_id for token_id, name in names.items()}
        self.bos_id = self.special_ids["[BOS]"]
        self.end_of_msg_id = self.special_ids["<|end_of_msg|>"]
        self.pad_id = self.special_ids["[PAD]"]


class TikTokenTokenizer(Tokenizer):
    """The family's vocabulary: base ranks from `tiktoken.model`, then 256 special slots.

    Input of more than 25,000 characters may be cut before BPE, as the published tokenizer does (`_slices`).
    A special string across a cut is not recognised; control strings of the chat encoding are far shorter.
    """

    def __init__(self, model_file: str | Path, vocab_size: int, added_names: Mapping[int, str] | None = None):
        """Reads the ranks; needs the package `tiktoken`, and no network.

        Args:
          model_file: One line per base token: bytes in base64, a space, rank. Ranks are 0..n-1, each once.
          vocab_size: Must be n + 256.
          added_names: Names by id for special slots. The 16 known names win over them (see `load_tokenizer`).
        Raises:
          ValueError: A malformed line, a duplicate, a gap, a missing byte, a wrong size or a wrong name.
        """
        import tiktoken  # here, so that byte tokenizers do without it

        ranks = read_ranks(Path(model_file))
        if len(ranks) + NUM_SPECIAL_SLOTS != vocab_size:
            raise ValueError(
                f"{model_file} has {len(ranks)} base tokens; with {NUM_SPECIAL_SLOTS} special slots "
                f"that makes {len(ranks) + NUM_SPECIAL_SLOTS} ids, but vocab_size is {vocab_size}. "
                "Use the tiktoken.model that was published with this checkpoint."
            )
        self.vocab_size = vocab_size
        names = special_table(len(ranks), added_names or {})
        self._set_special_names(names)
        self._bytes_by_id = sorted(ranks, key=ranks.__getitem__)
        self._bytes_by_id += [names[i].encode() for i in range(len(ranks), vocab_size)]
        self._bpe = tiktoken.Encoding(
            "maxmoe", pat_str=_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=dict(self.special_ids)
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turns text into ids; see `Tokenizer.encode`."""
        ids: list[int] = []
        for piece in _slices(text, _MAX_SLICE_CHARS, _MAX_RUN_CHARS):
            if allow_special:
                ids += self._bpe.encode(piece, allowed_special="all")
            else:
                ids += self._bpe.encode_ordinary(piece)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; see `Tokenizer.token_bytes`."""
        return self._bytes_by_id[self._valid_id(token_id)]


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, for models too small to carry a vocabulary.

    Ids 0..255 are the bytes. From vocab_size 512 up, the top 256 ids are the special slots, with the family's
    names at the family's offsets; below 512 no string is special. All other ids stand for nothing: `encode`
    never gives them, and `decode` shows id 300 as `<|unused_300|>`, so that a model that emits it is seen to.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        bos_id: int | None = None,
        end_of_msg_id: int | None = None,
        pad_id: int | None = None,
    ):
        """Makes the vocabulary; reads no file.

        Args:
          vocab_size: Number of ids, at least 256.
          bos_id, end_of_msg_id, pad_id: What the model's config says, for vocab_size < 512 only. An id below
            256 is a byte too: a text with that byte contains this id.
        Raises:
          ValueError: Too few ids, an id outside the vocabulary, or one given where special slots fix it.
        """
        if vocab_size < 256:
            raise ValueError(f"vocab_size is {vocab_size}; a byte tokenizer needs at least 256 ids, one per byte")
        self.vocab_size = vocab_size
        given = {"bos_id": bos_id, "end_of_msg_id": end_of_msg_id, "pad_id": pad_id}
        given = {name: self._valid_id(value) for name, value in given.items() if value is not None}
        names: dict[int, str] = {}
        if vocab_size >= 256 + NUM_SPECIAL_SLOTS:
            if given:
                raise ValueError(
                    f"got {given}, but with vocab_size {vocab_size} the special slots fix these ids. "
                    "Leave them out, or use a vocab_size below 512."
                )
            names = special_table(vocab_size - NUM_SPECIAL_SLOTS, {})
            self._set_special_names(names)
        else:
            self.special_ids = {}
            self.bos_id = given.get("bos_id")
            self.end_of_msg_id = given.get("end_of_msg_id")
            self.pad_id = given.get("pad_id")
        self._names = names
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, self.special_ids)) + ")")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Turns text into ids; see `Tokenizer.encode`."""
        if not (allow_special and self.special_ids):
            return list(_utf8(text))
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self.special_ids:
                ids.append(self.special_ids[piece])
            else:
                ids += _utf8(piece)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; see `Tokenizer.token_bytes` and, for ids that stand for nothing, the class."""
        token_id = self._valid_id(token_id)
        if token_id < 256:
            return bytes((token_id,))
        return self._names.get(token_id, f"<|unused_{token_id}|>").encode()


class StreamDecoder:
    """Decodes ids as they arrive, giving out every character as soon as its last byte is there.

    Only bytes that may still become a character wait, three at most; others turn into U+FFFD at once. What
    `feed` and `finish` return, joined, equals `tokenizer.decode` of all the ids, however they were grouped.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Starts an empty stream."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, maybe "".

        ValueError for an id outside the vocabulary; the stream is then as it was before the call.
        """
        text = self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))
        held, _ = self._utf8.getstate()
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":  # half of a surrogate, for whose end Python waits in vain
            self._utf8.reset()
            text += "\ufffd" * len(held)
        return text

    def finish(self) -> str:
        """Ends the stream: U+FFFD if it stopped inside a character, else "". The next `feed` starts anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """Makes the tokenizer of a checkpoint folder. Downloads nothing.

    With `tiktoken.model` in the folder: a `TikTokenTokenizer`. A special slot takes its name from the table
    of 16 (`SPECIAL_NAMES`), else from `added_tokens_decoder` in `tokenizer_config.json`, else it is
    `<|reserved_token_ID|>`. The table comes first because the family's previous generation has the same ranks
    with other names on the same ids (`<|im_end|>` for `<|end_of_msg|>`), and some copies of the vocabulary
    come with its tokenizer_config.json. Names that are overruled are logged.

    Without any vocabulary file, and with 256 <= vocab_size <= 1024: a `ByteTokenizer`.

    Args:
      folder: The checkpoint's folder.
      vocab_size: Rows of the model's embedding.
    Raises:
      ValueError: No such folder, no vocabulary that can be read, or files that contradict each other or
        vocab_size.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder that holds the checkpoint's files")
    model_file = folder / _MODEL_FILE
    if model_file.is_file():
        tokenizer = TikTokenTokenizer(model_file, vocab_size, read_added_names(folder / NAMES_FILE))
        logging.info("tokenizer: %s, %d base tokens", model_file, vocab_size - NUM_SPECIAL_SLOTS)
        return tokenizer
    foreign = [name for name in _FOREIGN_FILES if (folder / name).exists()]
    if foreign:
        raise ValueError(
            f"{folder} holds {', '.join(foreign)}, a kind of vocabulary that is not supported; "
            f"only {_MODEL_FILE} is. Add the {_MODEL_FILE} that belongs to this checkpoint."
        )
    low, high = _BYTE_VOCAB_RANGE
    if low <= vocab_size <= high:
        logging.info("tokenizer: bytes, %d ids (%s has no %s)", vocab_size, folder, _MODEL_FILE)
        return ByteTokenizer(vocab_size)
    raise ValueError(
        f"{folder} has no {_MODEL_FILE}, and vocab_size {vocab_size} is not in {low}..{high}, where bytes "
        f"do without one. Copy the {_MODEL_FILE} that was published with the checkpoint into this folder."
    )


def _slices(text: str, max_slice_chars: int, max_run_chars: int) -> Iterator[str]:
    """Cuts text as the published tokenizer does before BPE; joined, the slices are the text.

    First every `max_slice_chars` characters; then, within each slice on its own, every `max_run_chars`
    characters of a run that is all whitespace or all non-whitespace, from the run's start.
    """
    for start in range(0, len(text), max_slice_chars):
        chunk = text[start : start + max_slice_chars]
        done = 0
        if len(chunk) > max_run_chars:
            for run in re.finditer(r"\s+|\S+", chunk):
                for cut in range(run.start() + max_run_chars, run.end(), max_run_chars):
                    yield chunk[done:cut]
                    done = cut
        yield chunk[done:]


def _utf8(text: str) -> bytes:
    """UTF-8 of text; surrogates that form a pair become their character, lone ones U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
