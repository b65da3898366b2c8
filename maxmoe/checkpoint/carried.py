"""The files that travel with weights: configuration, tokenizer, chat template, licence."""

from collections.abc import Callable

from etils import epath

from maxmoe.checkpoint.files import file_checksum
from maxmoe.checkpoint.sources import INDEX_NAME

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
_OURS = (INDEX_NAME, "conversion.json")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "THIRD_PARTY")


def carry_files(source: epath.Path, target: epath.Path, say: Callable[[str], None]) -> None:
    """Copies every file at the top of a checkpoint that is no weight, and says once where the licence stands."""
    licences = []
    for path in sorted(source.iterdir(), key=lambda path: path.name):
        name = path.name
        if name.startswith(".") or name.endswith((*_WEIGHT_FILES, ".tmp")) or name in _OURS or path.is_dir():
            continue
        if name.upper().startswith(_LICENCES):
            licences.append(path)
        goal = target / name
        if not goal.exists() or file_checksum(goal) != file_checksum(path):
            goal.write_bytes(path.read_bytes())
    if licences:
        say(f"the weights are under the terms of {', '.join(map(str, licences))}, copied along")
    else:
        say(
            f"{source} has no licence file. The published weights of this family are proprietary: their terms stand on "
            "the page where you got them"
        )
