"""What a checkpoint folder says about its vocabulary: base ranks, and the names of the special slots.

The readers refuse a file that is damaged or belongs to another model, and say where: with a vocabulary that
is off by one line, a model runs and talks nonsense.
"""

import base64
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from absl import logging

NAMES_FILE = "tokenizer_config.json"
NUM_SPECIAL_SLOTS = 256  # the top of every vocabulary of the family

# Names by offset from the first special id. Every other slot is called <|reserved_token_ID|>, by its full id.
SPECIAL_NAMES: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}


def special_table(base: int, added_names: Mapping[int, str]) -> dict[int, str]:
    """Names the 256 slots from id `base` up, by full id; SPECIAL_NAMES win over `added_names`.

    ValueError for a name outside the slots, and for two names of which one begins with the other.
    """
    names = {i: f"<|reserved_token_{i}|>" for i in range(base, base + NUM_SPECIAL_SLOTS)}
    for token_id, name in added_names.items():
        if token_id not in names:
            raise ValueError(
                f"{NAMES_FILE} names id {token_id} {name!r}, but special slots are ids {base} to "
                f"{base + NUM_SPECIAL_SLOTS - 1}. Use the file that was published with this tiktoken.model."
            )
        names[token_id] = name
    known = {base + offset: name for offset, name in SPECIAL_NAMES.items()}
    changed = [f"{i} {names[i]!r}" for i in sorted(known.keys() & added_names.keys()) if names[i] != known[i]]
    if changed:
        logging.warning("%s has names of another generation, not used: %s", NAMES_FILE, ", ".join(changed))
    names |= known
    by_name = sorted((name, token_id) for token_id, name in names.items())
    for (name, token_id), (next_name, next_id) in itertools.pairwise(by_name):
        if next_name.startswith(name):  # equal included: which of the two a text means would be undecided
            raise ValueError(
                f"special ids {token_id} and {next_id} are called {name!r} and {next_name!r}; names must "
                f"differ, and none may begin with another. Correct {NAMES_FILE}."
            )
    return names


def read_added_names(file: Path) -> dict[int, str]:
    """Reads {id: name} from `added_tokens_decoder` of a tokenizer_config.json; {} without such a file."""
    if not file.is_file():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        names = {int(token_id): entry["content"] for token_id, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read {file}: {error!r}. "
            'Expected {"added_tokens_decoder": {"ID": {"content": "NAME"}, ...}}, in UTF-8.'
        ) from error
    for token_id, name in names.items():
        if not (isinstance(name, str) and name):
            raise ValueError(f"{file}: id {token_id} has the name {name!r}; expected a non-empty string")
    return names


def read_ranks(file: Path) -> dict[bytes, int]:
    """Reads {token bytes: rank} from a tiktoken.model, blank lines aside. ValueError names file and line.

    Ranks must be 0..n-1, each once, in any order; tokens must differ; every single byte must be a token.
    """
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        token, rank = _parse_line(line, f"{file}, line {number}")
        if rank in line_of_rank:
            raise ValueError(f"{file}, line {number}: rank {rank} is already on line {line_of_rank[rank]}")
        if token in ranks:
            other = line_of_rank[ranks[token]]
            raise ValueError(f"{file}, line {number}: token {token!r} is already on line {other}")
        ranks[token] = rank
        line_of_rank[rank] = number
    missing = next((i for i in range(len(ranks)) if i not in line_of_rank), None)
    if missing is not None:
        above = min(rank for rank in line_of_rank if rank > missing)
        raise ValueError(
            f"{file}, line {line_of_rank[above]}: rank {above}, but no line has rank {missing}; "
            "ranks must be 0 to n-1 without a gap. Fetch the file again."
        )
    for value in range(256):
        if bytes((value,)) not in ranks:
            raise ValueError(f"{file}: no token for byte {value:#04x}; all 256 are needed. Fetch the file again.")
    return ranks


def _parse_line(line: bytes, place: str) -> tuple[bytes, int]:
    fields = line.split()
    try:
        encoded, rank = fields
        token = base64.b64decode(encoded, validate=True)
    except ValueError:  # not two fields, or not base64
        token, rank = b"", b""
    if not (token and rank.isdigit()):
        raise ValueError(f"{place}: expected a token in base64, a space and a rank >= 0; got {line[:80]!r}")
    return token, int(rank)
