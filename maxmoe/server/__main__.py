"""Serves a model of the family over HTTP, in the forms of OpenAI's and Anthropic's interfaces.

    python -m maxmoe.server --checkpoint DIR
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "What is a monad?"}], "stream": true}'
    MAXMOE_API_KEYS=KEY,KEY python -m maxmoe.server --checkpoint DIR --host 0.0.0.0 --ssl_certfile C --ssl_keyfile K
    python -m maxmoe.server --checkpoint DIR --mesh expert=8 --max_batch 64 --max_len 65536 --prefix_cache_gib 8

It listens on this machine alone unless --host says otherwise. /health answers once it listens, /ready once the model
is compiled. SIGTERM lets answers that are being given end, for --drain_s at most. Logs are on standard error, one line
of JSON for each request, without prompts and answers.

Exit code 0 after SIGTERM or Ctrl-C, 1 where the engine has failed, 2 for something in the command or the checkpoint
that is wrong.
"""

import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvicorn
from absl import app, flags

from maxmoe import conversation, model_flags
from maxmoe.chat.tokenizer import load_tokenizer
from maxmoe.checkpoint import object_storage
from maxmoe.command_line import flags_parser
from maxmoe.config import load_config
from maxmoe.inference.compilation_cache import enable_compilation_cache
from maxmoe.inference.engine import Engine
from maxmoe.inference.grammar import Grammars
from maxmoe.server import request_log
from maxmoe.server.app import make_app
from maxmoe.server.connections import PunctualProtocol
from maxmoe.server.engine_thread import EngineThread
from maxmoe.server.keys import Keys, read_keys
from maxmoe.server.metrics import Metrics
from maxmoe.server.page import routes
from maxmoe.server.service import Options, Service
from maxmoe.server.sessions import SessionStore

_NAME = "maxmoe.server"
_KEYS_VARIABLE = "MAXMOE_API_KEYS"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _define_flags() -> None:
    model_flags.define_flags()
    flags.adopt_module_key_flags(model_flags)
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for all of this machine's.")
    flags.DEFINE_integer("port", 8000, "Port to listen on; 0 for one that is free.", lower_bound=0, upper_bound=65_535)
    flags.DEFINE_string("model_name", None, "That clients know the model by. Default: the name of the folder.")
    flags.DEFINE_integer("max_batch", 8, "Requests that are answered together.", lower_bound=1)
    flags.DEFINE_integer(
        "max_len",
        32_768,
        "Most tokens of a prompt and its answer together, up to the context that the model was trained on. Memory for "
        "--max_batch times as many is set aside.",
        lower_bound=2,
    )
    flags.DEFINE_integer("max_waiting", 256, "Requests that may wait; more are refused with 429.", lower_bound=1)
    flags.DEFINE_float(
        "prefix_cache_gib", 0.0, "Device memory for beginnings of prompts that come again, in GiB.", lower_bound=0.0
    )
    flags.DEFINE_float(
        "host_prefix_cache_gib", 0.0, "Host memory for those that must leave it, in GiB.", lower_bound=0.0
    )
    flags.DEFINE_string(
        "api_keys_file",
        None,
        f"File with API keys, one a line; more may be in ${_KEYS_VARIABLE}. Without, none is asked.",
    )
    flags.DEFINE_list(
        "allowed_hosts",
        [],
        "Names besides localhost under which a server of this machine alone and without API keys may be asked, such as "
        "that of a proxy before it.",
    )
    flags.DEFINE_integer("requests_per_minute", None, "Of each API key. Default: no limit.", lower_bound=1)
    flags.DEFINE_enum(
        "history",
        "strict",
        ["strict", "lenient"],
        "Whether a chat that would lose history, such as thinking that was not sent back with a tool call, is refused "
        "or answered with warnings.",
    )
    flags.DEFINE_boolean("mirror_reasoning", False, "Tell thinking as `reasoning` too, besides `reasoning_content`.")
    flags.DEFINE_boolean(
        "lenient_markers", False, "Also read markers that the model spells as text; answers about the markup lose them."
    )
    flags.DEFINE_boolean(
        "force_nonempty_content", False, "Tell thinking as the answer too, where the model ends without an answer."
    )
    flags.DEFINE_boolean("log_bodies", False, "Write requests and answers into the log, prompts and all.")
    flags.DEFINE_string("session_dir", None, "Folder for /v1/sessions. Default: no sessions are kept.")
    flags.DEFINE_float(
        "max_request_s", None, "Seconds after which an answer is given up. Default: none.", lower_bound=0.001
    )
    flags.DEFINE_float("max_body_mib", 16.0, "Largest request, in MiB.", lower_bound=0.001)
    flags.DEFINE_integer("drain_s", 30, "Seconds that answers have to end after SIGTERM.", lower_bound=0)
    flags.DEFINE_string("ssl_certfile", None, "Certificate for TLS, PEM.")
    flags.DEFINE_string("ssl_keyfile", None, "Its private key, PEM.")


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        return _serve(argv)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _serve(argv: list[str]) -> int:
    if argv[1:]:
        raise ValueError(f"unexpected arguments {argv[1:]}: every argument is a flag; --help shows them")
    values = flags.FLAGS
    if (values.ssl_certfile is None) != (values.ssl_keyfile is None):
        raise ValueError("--ssl_certfile and --ssl_keyfile go together: give both, or neither")
    keys = read_keys(values.api_keys_file, os.environ.get(_KEYS_VARIABLE))
    if values.host not in _LOOPBACK and not keys.are_required:
        _tell(f"--host={values.host} without API keys: whoever reaches this machine may use the model")
    with model_flags.checkpoint_folder(_tell) as folder:
        service = _make_service(folder)
    return run(service, keys)


def _tell(text: str) -> None:
    print(f"{_NAME}: {text}", file=sys.stderr)


def _make_service(folder: str | Path) -> Service:
    """Loads the checkpoint."""
    values = flags.FLAGS
    files = object_storage.local_files(folder)
    config = load_config(files)
    tokenizer = load_tokenizer(files, config.vocab_size)
    name = values.model_name or Path(str(folder)).name
    sessions = None
    if values.session_dir is not None:
        sessions = SessionStore(values.session_dir, name, config.vocab_size)
    model = model_flags.model_from_flags(config)
    mesh = model_flags.mesh_from_flags()
    logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each platform that is not here
    enable_compilation_cache()
    engine = Engine(
        model,
        model_flags.params_from_flags(folder, model, mesh),
        mesh,
        max_batch=values.max_batch,
        max_len=values.max_len,
        max_waiting=values.max_waiting + values.max_batch,  # the server itself refuses more than this
        prefix_cache_bytes=int(values.prefix_cache_gib * 2**30),
        host_prefix_cache_bytes=int(values.host_prefix_cache_gib * 2**30),
        grammars=_grammars(tokenizer, config.eos_id),
        thinking=conversation.thinking_markers(tokenizer) if conversation.has_markers(tokenizer) else None,
        **model_flags.drafts_from_flags(),
    )
    return Service(
        tokenizer=tokenizer,
        engine_thread=EngineThread(engine, max_waiting=values.max_waiting),
        metrics=Metrics(name),
        options=Options(
            model_name=name,
            strict_history=values.history == "strict",
            mirrors_reasoning=values.mirror_reasoning,
            lenient_markers=values.lenient_markers,
            force_nonempty_content=values.force_nonempty_content,
            logs_bodies=values.log_bodies,
            max_request_s=values.max_request_s,
            max_body_bytes=int(values.max_body_mib * 2**20),
        ),
        sessions=sessions,
    )


def _grammars(tokenizer: Any, eos_id: int) -> Any:
    """For answers that must match a schema; None where that is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        _tell("llguidance is not installed, so schemas of answers and tools are told to the model and not enforced")
        return None
    return Grammars(tokenizer, eos_id)


def run(service: Service, keys: Keys) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code. What is not in the service is read from the flags."""
    values = flags.FLAGS
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # comes once uvicorn has drained
    request_log.LOGGER.setLevel(logging.INFO)
    request_log.LOGGER.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    request_log.LOGGER.addHandler(handler)
    is_private = values.host in _LOOPBACK and not keys.are_required
    served = make_app(
        service,
        keys=keys,
        requests_per_minute=values.requests_per_minute,
        allowed_hosts=frozenset((*_LOOPBACK, *map(str.lower, values.allowed_hosts))) if is_private else None,
        extra_routes=routes(),
    )
    config = uvicorn.Config(
        served,
        http=PunctualProtocol,
        host=values.host,
        port=values.port,
        access_log=False,  # there is another
        server_header=False,
        timeout_graceful_shutdown=values.drain_s,
        ssl_certfile=values.ssl_certfile,
        ssl_keyfile=values.ssl_keyfile,
    )
    server = uvicorn.Server(config)
    server.run()
    if service.engine_thread.fault is not None:
        return 1
    return 0 if server.started else 2


if __name__ == "__main__":
    _define_flags()
    app.run(main, flags_parser=flags_parser(_NAME))
