"""Writes a checkpoint back to the published layout, so that other servers can load it.

    python -m maxmoe.checkpoint.export --source ORBAX_DIR --target DIR

Every tensor gets its published name, shape and dtype; one that was converted and not trained since is the same bit
for bit. Experts that a fine-tuning has left as floats are rounded to MXFP4 only when --requantize_experts says so:
per group of 32 the largest power of two scale that the OCP rule gives (floor(log2(max|x|)) - 2), values to the
nearest code, ties to even, beyond 6 times the scale to 6. The same input gives the same bytes everywhere.

Exit code 0 for success, 2 for something that is wrong in the command or the files, 130 after Ctrl-C.
"""

import functools
import os
import sys
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags, logging
from etils import epath

from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.carried import carry_files
from maxmoe.checkpoint.hf_names import FLOAT_EXPERTS, VISION_GROUP, Piece, published_pieces
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.safetensors_writer import TensorOnDemand, write_checkpoint
from maxmoe.checkpoint.sources import OrbaxSource, WeightInfo
from maxmoe.checkpoint.store import match_stored
from maxmoe.checkpoint.stored_arrays import Verify
from maxmoe.command_line import flags_parser
from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer
from maxmoe.ops import mxfp4
from maxmoe.params import PACKED, SCALE

_NAME = "maxmoe.checkpoint.export"


def export(
    source: epath.PathLike,
    target: str | os.PathLike,
    *,
    max_shard_bytes: int = 5 * 10**9,
    requantize_experts: bool = False,
    verify: Verify = "full",
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes the published layout of an Orbax checkpoint: safetensors, index, and the files carried along.

    Args:
      target: A new or empty folder on a disk. The index, or the single file, is written last.
      requantize_experts: Round experts stored as floats to MXFP4, as the module says.
      verify: Of the chunks that are read.
    Raises: CheckpointError for a damaged source, or one that lacks a weight; ValueError for float experts when
      `requantize_experts` is not given, or a target that holds a checkpoint already.
    """
    source = object_storage.connect(source)
    if object_storage.is_remote(target):
        raise ValueError(f"{target}: export writes to a disk; give a folder, and copy it to the bucket afterwards")
    target = epath.Path(target)
    config = load_config(source)
    stored = OrbaxSource(source, verify)
    weights = _RoundedExperts(stored)
    if weights.floats and not requantize_experts:
        raise ValueError(
            f"{source}: {len(weights.floats)} expert weights are stored as floats, the first "
            f"{'/'.join(min(weights.floats))}; the published layout holds MXFP4. Give --requantize_experts to round "
            "them"
        )
    pieces = list(published_pieces(Transformer(config)))
    match_stored(pieces, weights)
    published = stored.published
    tensors = {
        published["prefix"] + piece.name: _on_demand(piece, weights, published["shapes"].get(piece.name))
        for piece in pieces
        if piece.name not in published["absent"]
    }
    if VISION_GROUP in stored.groups:
        for name, info in stored.groups[VISION_GROUP].arrays.items():
            tensors[name] = TensorOnDemand(info.shape, info.dtype, functools.partial(stored.read, VISION_GROUP, name))
    write_checkpoint(target, tensors, max_shard_bytes)
    carry_files(source, target, say)
    for key, report in weights.reports():
        say(f"{'/'.join(key)}: {report}")
    say(f"{len(tensors):,} tensors, {stored.bytes_read / 1e9:,.2f} GB read from {source}")


def _on_demand(piece: Piece, weights: "_RoundedExperts", shape: list[int] | None) -> TensorOnDemand:
    """A published tensor; `shape` is what the file it came from had, where that is longer than usual."""
    key = (piece.group, piece.weight)
    goal = tuple(piece.shape if shape is None else shape)

    def make():
        values = weights.read(*key, piece.inner)
        if piece.padded:
            values = np.pad(values, (0, goal[0] - values.shape[0]))
        return values.reshape(goal)

    return TensorOnDemand(goal, weights.weights[key].dtype, make)


class _RoundedExperts:
    """A source in which experts stored as floats, `experts/gate`, appear as MXFP4, `experts/gate_packed`.

    Attributes:
      floats: The weights that are stored as floats.
    """

    def __init__(self, source: OrbaxSource):
        self._source, self.folder = source, source.folder
        self.weights = dict(source.weights)
        self.floats = [key for key in source.weights if key[1] in FLOAT_EXPERTS]
        self._sums: dict[tuple[str, str], np.ndarray] = {key: np.zeros(2) for key in self.floats}
        for group, name in self.floats:
            *lead, columns = self.weights.pop((group, name)).shape
            self.weights[group, name + PACKED] = WeightInfo((*lead, columns // 2), np.dtype(np.uint8))
            self.weights[group, name + SCALE] = WeightInfo((*lead, columns // mxfp4.GROUP), np.dtype(np.uint8))

    def read(self, group: str, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        for ending in (PACKED, SCALE):
            key = (group, name.removesuffix(ending))
            if name.endswith(ending) and key in self._sums:
                return self._rounded(key, index, ending)
        return self._source.read(group, name, index)

    def _rounded(self, key, index, ending):
        values = self._source.read(*key, index).astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{'/'.join(key)}, expert {index}: holds values that are not finite; nothing can stand for them"
            )
        packed, scale = _quantize(values)
        if ending == SCALE:
            return np.asarray(scale)
        error = np.asarray(_dequantize(packed, scale)) - values
        self._sums[key] += np.square(error, dtype=np.float64).sum(), np.square(values, dtype=np.float64).sum()
        return np.asarray(packed)

    def reports(self):
        """What rounding did to each float weight: its error relative to the values, root mean square."""
        for key, (error, total) in self._sums.items():
            yield key, f"rounded to MXFP4, relative error {np.sqrt(error / max(total, 1e-300)):.2%} (root mean square)"


_quantize, _dequantize = jax.jit(mxfp4.quantize), jax.jit(mxfp4.dequantize)


def _define_flags() -> None:
    """Only the command has flags: whoever imports this module may have others of the same names."""
    flags.DEFINE_string("source", None, "Orbax checkpoint that maxmoe wrote: a path, gs:// or s3://.")
    flags.DEFINE_string("target", None, "New folder for safetensors files, on a disk.")
    flags.DEFINE_float("max_shard_gb", 5.0, "Largest file, in GB.", lower_bound=0.001)
    flags.DEFINE_boolean(
        "requantize_experts", False, "Round experts that are stored as floats to MXFP4. Without it they are refused."
    )


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given = flags.FLAGS
    if not given["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if argv[1:]:
            raise ValueError(f"unexpected arguments {argv[1:]}")
        if not given.source or not given.target:
            raise ValueError("give --source ORBAX_DIR --target DIR")
        export(
            given.source,
            given.target,
            max_shard_bytes=int(given.max_shard_gb * 1e9),
            requantize_experts=given.requantize_experts,
            say=lambda text: print(text, flush=True),
        )
    except (ValueError, OSError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _define_flags()
    app.run(main, flags_parser=flags_parser(_NAME))
