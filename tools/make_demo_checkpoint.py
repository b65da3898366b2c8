"""Writes the small checkpoint that comes with maxmoe: configs/tiny.py with random weights, in the published layout.

    python tools/make_demo_checkpoint.py [--out=FOLDER] [--seed=N]

The same seed gives the same bytes with the same JAX; another version may round random weights differently.
"""

import json
import shutil
import tempfile
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent

_OUT = flags.DEFINE_string("out", str(ROOT / "maxmoe/data/tiny"), "Folder to write; an older checkpoint is replaced.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights.", lower_bound=0)


def write_demo_checkpoint(folder: Path, seed: int) -> None:
    """Writes config.json and model.safetensors; what stood there is replaced only once both are complete."""
    from maxmoe.checkpoint.hf_names import publish
    from maxmoe.checkpoint.safetensors_writer import write_checkpoint
    from maxmoe.config import load_config
    from maxmoe.model.transformer import Transformer
    from maxmoe.params import init_params
    from maxmoe.published_config import to_published

    config = load_config(ROOT / "configs/tiny.py")
    tensors = publish(init_params(Transformer(config), seed), config)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        write_checkpoint(made, {name: tensors[name] for name in sorted(tensors)})
        text = json.dumps(to_published(config), indent=2) + "\n"
        Path(made, "config.json").write_text(text, encoding="utf-8")
        for file in sorted(Path(made).iterdir()):
            shutil.move(file, folder / file.name)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    folder = Path(_OUT.value)
    write_demo_checkpoint(folder, _SEED.value)
    for file in sorted(folder.iterdir()):
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    app.run(main)
