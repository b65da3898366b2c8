"""Tells what a step of a model will do on a slice of TPUs or GPUs, without one.

    python -m maxmoe.plan --config configs/k3_1_pro.py --topology v5p:4x4x4 --context 1048576 --batch 8
    python -m maxmoe.plan --config configs/k3_1_pro.py --topology tpu7x:4x4x4 --phase prefill --mesh seq=8,expert=16
    python -m maxmoe.plan --config configs/k3_1_pro.py --topology h200:128 --json plan.json --plot plan.png

The step is compiled ahead of time for the slice, from shapes alone, and what the compiler says is printed per device:
whether it fits, what is left, the collectives; then what must be read and multiplied against the chip's ratings, and
the tokens per second that these allow. TPU slices need jax[tpu] in this Python, GPUs jax[cuda13]; without them the
part that is arithmetic is printed.

Exit code 0 for a step that fits, or where only arithmetic is known; 1 for one that does not fit; 2 for something in
the command that is wrong.
"""

import json
import os
import sys
from pathlib import Path

from absl import app, flags, logging

from maxmoe.command_line import flags_parser

_NAME = "maxmoe.plan"
_IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu")


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        return _plan(argv)
    except (ValueError, OSError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _plan(argv: list[str]) -> int:
    if argv[1:]:
        raise ValueError(f"unexpected arguments {argv[1:]}: every argument is a flag; --help shows them")
    values = flags.FLAGS
    from maxmoe.planning import targets

    targets.set_environment(os.environ)  # before the imports below bring jax with them
    from maxmoe.planning import planner, report
    from maxmoe.sharding import parse_mesh

    logging.set_verbosity(logging.INFO if values.verbose else logging.WARNING)
    question = _question(values)
    if values.mesh == "auto":
        found = planner.plan_best_mesh(question, values.compile, values.costs)
    else:
        mesh = parse_mesh(values.mesh, question.topology.num_devices)
        found = planner.plan(question, mesh, values.compile, values.costs)
    print(report.as_text(found), flush=True)
    if values.json is not None:
        record = {"config": str(values.config), "implementation": values.implementation} | report.as_json(found)
        Path(values.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if values.plot is not None:
        report.plot(Path(values.plot), found)
    return 1 if found.fits is False else 0


def _question(values):
    """What the flags ask."""
    from maxmoe.config import load_config
    from maxmoe.model.transformer import Transformer
    from maxmoe.planning.arithmetic import Question
    from maxmoe.planning.chips import parse_topology

    topology = parse_topology(values.topology)
    config = load_config(values.config)
    if values.override:
        config = config.override(*values.override)
    context = values.context if values.context is not None else config.max_len
    if context > config.max_len:
        raise ValueError(f"--context={context}: the model was trained on {config.max_len} tokens at most")
    chunk = {"decode": 1, "prefill": min(values.prefill_chunk, context), "train": context}[values.phase]
    return Question(
        model=Transformer(config, implementation=values.implementation),
        topology=topology,
        phase=values.phase,
        batch=values.batch,
        context=context,
        chunk=chunk,
        cache_dtype=values.cache_dtype,
    )


def _define_flags() -> None:
    flags.DEFINE_string(
        "config", None, "The model: a config.json, a folder that holds one, or configs/NAME.py.", required=True
    )
    flags.DEFINE_multi_string("override", [], "FIELD=VALUE of the config, e.g. moe.num_experts=8; may be given again.")
    flags.DEFINE_string(
        "topology",
        None,
        "The slice: v5p:AxBxC, tpu7x:AxBxC, v6e:AxB, v5e:AxB in chips, or h200:N, b200:N in GPUs.",
        required=True,
    )
    flags.DEFINE_enum("phase", "decode", ["decode", "prefill", "train"], "Which step.")
    flags.DEFINE_string(
        "mesh",
        "auto",
        "AXIS=SIZE,... with axes data, seq, expert, tensor, whose product is the number of devices, of which a tpu7x "
        "chip has two; or auto, which searches.",
    )
    flags.DEFINE_integer("batch", 1, "Sequences, over the whole slice.", lower_bound=1)
    flags.DEFINE_integer(
        "context", None, "Tokens of each sequence. Default: what the model was trained on.", lower_bound=1
    )
    flags.DEFINE_integer("prefill_chunk", 8192, "Tokens of each sequence in one prefill step.", lower_bound=1)
    flags.DEFINE_enum(
        "cache_dtype", "bfloat16", ["bfloat16", "float32"], "Of latent rows, index keys and conv inputs in the cache."
    )
    flags.DEFINE_enum(
        "implementation", None, list(_IMPLEMENTATIONS), "Of the operations. Default: the best that the model knows."
    )
    flags.DEFINE_boolean("compile", True, "Compile the step; --nocompile prints the arithmetic part in seconds.")
    flags.DEFINE_boolean(
        "costs", True, "Compile two shallow models as well, from which the FLOPs of the whole one are derived."
    )
    flags.DEFINE_string("json", None, "File for everything that is printed, and more.")
    flags.DEFINE_string("plot", None, "File for a picture, such as plan.png; needs matplotlib.")
    flags.DEFINE_boolean("verbose", True, "Report progress on standard error.")


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=flags_parser(_NAME))
