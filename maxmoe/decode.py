"""Continues a text with a model of the family, and streams the answer.

    python -m maxmoe.decode --prompt 'The quick brown fox'
    python -m maxmoe.decode --checkpoint DIR --prompt_file question.txt --max_tokens 500
    python -m maxmoe.decode --checkpoint DIR --stream_weights --prompt 'Larger than memory'
    python -m maxmoe.decode --checkpoint DIR --prompt 'Remember this.' --save_session here
    python -m maxmoe.decode --checkpoint DIR --resume_session here --prompt ' And then?'
    some-command | python -m maxmoe.decode --checkpoint DIR --prompt_file - --json
    python -m maxmoe.decode --checkpoint DIR --effort low --system 'Answer in French.' --prompt 'What is a monad?'
    python -m maxmoe.decode --checkpoint DIR --messages conversation.json
    python -m maxmoe.decode --checkpoint DIR --interactive
    python -m maxmoe.decode --checkpoint DIR --tools calculator,clock --prompt 'How many seconds are left of this year?'
    python -m maxmoe.decode --checkpoint DIR --mesh expert=4,tensor=2 --prompt 'On eight devices'
    srun python -m maxmoe.decode --checkpoint DIR --mesh expert=64 --prompt 'On the devices of several hosts'

The prompt is plain text that the model continues, and control tokens are not read from it. --effort, --system,
--messages, --tools and --interactive begin a chat, in which it is a message of the user; on a terminal, thinking and
tool calls are dim. After the answer comes one line: prompt tokens, new tokens, seconds to the first token, tokens per
second.

On several hosts the same command runs on each, as SLURM, Open MPI, Kubernetes or a TPU slice start it. Process 0 prints
the answer. Where one fails, is gone or was told something else, all end.

Exit code 0 for an answer, 2 for something in the command or the checkpoint that is wrong, 130 after Ctrl-C; 1 where
another process is to blame.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from maxmoe import conversation, distributed, model_flags, terminal
from maxmoe.answer_report import AnswerReport, collect
from maxmoe.command_line import flags_parser
from maxmoe.inference import sampling_flags
from maxmoe.inference.answer_error import AnswerError

_NAME = "maxmoe.decode"
_STREAM = flags.DEFINE_boolean(
    "stream_weights",
    False,
    "For a model that does not fit in memory: read weights from the checkpoint for every token, and keep the experts "
    "that were used last.",
)
_EXPERT_CACHE_GIB = flags.DEFINE_float(
    "expert_cache_gib", 8.0, "With --stream_weights: memory for experts that are kept, in GiB.", lower_bound=0.0
)
_SAVE_SESSION = flags.DEFINE_string(
    "save_session", None, "New folder for the state after the answer, also after Ctrl-C: a path, gs:// or s3://."
)
_RESUME_SESSION = flags.DEFINE_string(
    "resume_session",
    None,
    "Folder of --save_session to go on from: with --prompt what follows it, without one the answer that broke off.",
)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue. Give this or --prompt_file.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "File with the text to continue, in UTF-8, taken as it is; - is standard input."
)
_MAX_LEN = flags.DEFINE_integer(
    "max_len",
    None,
    "Most tokens that prompt and answer may have together; decides the memory that is set aside. Default: as many "
    "as this prompt and --max_tokens need, up to the context that the model was trained on.",
    lower_bound=1,
)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object at the end, and nothing else on standard output.")
for _module in (model_flags, conversation, sampling_flags, distributed):
    _module.define_flags()
    flags.adopt_module_key_flags(_module)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        return _decode(argv)
    except BrokenPipeError:  # whoever read the answer has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        distributed.fail("whoever read the answer has closed it")
        return 1
    except (ValueError, OSError, NotImplementedError, AnswerError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        distributed.fail(str(error))
        return 2
    except KeyboardInterrupt:
        distributed.fail("interrupted by Ctrl-C")
        return 130


def _decode(argv: list[str]) -> int:
    if argv[1:]:
        raise ValueError(f"unexpected arguments {argv[1:]}: put the prompt in quotes, after --prompt")
    if (_PROMPT.value is not None) + (_PROMPT_FILE.value is not None) != 1:
        given = "both are given" if _PROMPT.value is not None else "neither is given"
        if _PROMPT.value is not None or not (_RESUME_SESSION.value or conversation.has_messages()):
            raise ValueError(f"give --prompt TEXT or --prompt_file FILE (- is standard input); {given}")
    job = distributed.start_from_flags()
    conversation.check_flags(
        resumes=_RESUME_SESSION.value is not None,
        is_alone=job.num_processes == 1 and not _JSON.value and _SAVE_SESSION.value is None,
        num_processes=job.num_processes,
    )
    prompt = _read_prompt()
    with model_flags.checkpoint_folder(functools.partial(_tell, job)) as folder:
        answer = _answer(folder, prompt, job)
    if conversation.is_interactive():
        return 0
    if job.process_id == 0:
        print(answer.as_json() if _JSON.value else "\n" + answer.summary(), flush=True)
    return 130 if answer.finish_reason == "interrupted" else 0


def _tell(job: distributed.Job, text: str) -> None:
    """Reports on standard error, in one process of a job."""
    if job.process_id == 0:
        print(f"{_NAME}: {text}", file=sys.stderr)


def _read_prompt() -> str:
    if _PROMPT_FILE.value is None:
        return _PROMPT.value or ""
    name = _PROMPT_FILE.value
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file={name} is not UTF-8 text: see byte {error.start}") from error


def _answer(folder: str | Path, prompt: str, job: distributed.Job) -> AnswerReport:
    """Loads the checkpoint and answers, streaming the text unless --json is given."""
    # Imported here, so that --help and mistakes in the flags answer at once.
    from maxmoe.chat.tokenizer import StreamDecoder, load_tokenizer
    from maxmoe.checkpoint import object_storage
    from maxmoe.config import load_config
    from maxmoe.inference.compilation_cache import enable_compilation_cache
    from maxmoe.inference.request import check_request
    from maxmoe.inference.sampling import fresh_seed

    params = sampling_flags.params_from_flags()
    files = object_storage.local_files(folder)
    config = load_config(files)
    tokenizer = load_tokenizer(files, config.vocab_size)
    thinking = None if params.thinking_token_budget is None else conversation.thinking_markers(tokenizer)
    max_len = min(_MAX_LEN.value or config.max_len, config.max_len)
    shows = not _JSON.value and job.process_id == 0
    talk, reader, ids = None, None, tokenizer.encode(prompt)
    if conversation.is_asked_for():
        request, tell = conversation.request_from_flags(prompt), functools.partial(_tell, job)
        talk = conversation.Conversation(request, tokenizer, max_len, tell, shows and terminal.is_terminal())
        reader = talk.next_answer()
        ids = reader.prompt_ids
    distributed.agree("config", repr(config))
    distributed.agree("prompt", hashlib.sha256(repr(ids).encode()).digest())
    model = model_flags.model_from_flags(config)
    mesh = _mesh(job)
    session = None
    with contextlib.ExitStack() as opened:
        fingerprint = _fingerprint(folder, model)  # before minutes of loading, like the checks below
        if _RESUME_SESSION.value is not None:
            session = _load_session(model, mesh, fingerprint)
        elif not ids:
            raise ValueError("the prompt is empty: give at least one character")
        if params.seed is None:
            seed = distributed.from_process_0(fresh_seed()) if session is None else session.seeds[0]
            params = dataclasses.replace(params, seed=seed)
        past = [] if session is None else session.token_ids[0].tolist()
        check_request(past + ids, params, config, max_len)
        logging.getLogger("jax").setLevel(logging.WARNING)  # it reports each platform that is not here
        enable_compilation_cache()
        settings = {"max_len": max_len, "thinking": thinking}
        settings["detokenizer"] = functools.partial(StreamDecoder, tokenizer) if talk is None else talk.reader
        engine = _make_engine(folder, model, mesh, settings, opened)
        answer = AnswerReport(num_prompt_tokens=len(past) + len(ids), seed=params.seed)
        write = (_terminal_writer() if talk is None else terminal.write) if shows else lambda text: None
        run = engine.stream(ids, params) if session is None else engine.resume(session, ids, params)
        collect(run, answer, write)
        if talk is not None:
            answer.message, answer.finish_reason = reader.message(answer.finish_reason)
            run, answer = _go_on_talking(talk, engine, run, answer, params, write)
        if answer.finish_reason == "interrupted" and job.num_processes > 1:
            distributed.fail("interrupted by Ctrl-C")  # the others wait for this one in a step
        elif _SAVE_SESSION.value is not None:
            _tell(job, _save_session(run, model, fingerprint))
        if _STREAM.value:
            _tell(job, engine.stats.summary())
    return answer


def _go_on_talking(
    talk: conversation.Conversation,
    engine: Any,
    run: Any,
    answer: AnswerReport,
    params: Any,
    write: Callable[[str], None],
) -> tuple[Any, AnswerReport]:
    """Answers the results of tools and, with --interactive, line after line. Returns the last run and its answer."""
    while True:
        results = talk.run_tools(answer.message) if answer.finish_reason == "tool_calls" else None
        if results is not None:
            write(results)
        elif not conversation.is_interactive():
            return run, answer
        else:
            print("\n" + answer.summary(), flush=True)
            talk.add(answer.message)
            if not talk.ask():
                return run, answer
        reader = talk.next_answer()
        run = conversation.go_on(engine, run, reader.prompt_ids, params)
        answer = AnswerReport(num_prompt_tokens=len(reader.prompt_ids), seed=params.seed, turn=talk.turn)
        collect(run, answer, write)
        answer.message, answer.finish_reason = reader.message(answer.finish_reason)


def _mesh(job: distributed.Job) -> Any:
    """The mesh that the flags ask for; None for one device."""
    if _STREAM.value and (flags.FLAGS["mesh"].value is not None or job.num_processes > 1):
        raise NotImplementedError(
            "--stream_weights reads weights for one device: leave out --mesh, or --stream_weights"
        )
    return model_flags.mesh_from_flags(job.num_processes)


def _make_engine(
    folder: str | Path,
    model: Any,
    mesh: Any,
    settings: dict[str, Any],
    opened: contextlib.ExitStack,
) -> Any:
    """An engine with all weights in memory, or one that streams them; what it needs open goes onto `opened`."""
    from maxmoe.checkpoint.store import open_source
    from maxmoe.inference.engine import Engine
    from maxmoe.inference.streaming import StreamingEngine

    if _STREAM.value and model_flags.drafts_from_flags():
        raise ValueError("--num_draft_tokens needs weights in memory: leave out --stream_weights")
    if not _STREAM.value:
        weights = model_flags.params_from_flags(folder, model, mesh)
        return Engine(model, weights, mesh, max_batch=1, **settings, **model_flags.drafts_from_flags())
    source = opened.enter_context(open_source(folder, model, flags.FLAGS["verify_checksums"].value))
    cache_bytes = int(_EXPERT_CACHE_GIB.value * 2**30)
    engine = StreamingEngine(
        model, source, expert_cache_bytes=cache_bytes, dtype=model_flags.dtype_from_flags(), **settings
    )
    opened.callback(engine.close)
    return engine


def _fingerprint(folder: str | Path, model: Any) -> str | None:
    """Of the weights, for sessions."""
    from maxmoe.checkpoint.session import fingerprint_weights
    from maxmoe.checkpoint.store import open_source
    from maxmoe.checkpoint.stored_arrays import is_complete

    if _SAVE_SESSION.value is not None and is_complete(_SAVE_SESSION.value):
        raise ValueError(f"--save_session={_SAVE_SESSION.value} already holds a session; give a new folder")
    if _SAVE_SESSION.value is None and _RESUME_SESSION.value is None:
        return None
    with open_source(folder, model, "off") as source:
        return fingerprint_weights(source)


def _load_session(model: Any, mesh: Any, fingerprint: str | None) -> Any:
    from maxmoe.checkpoint.session import load_session

    verify = flags.FLAGS["verify_checksums"].value
    return load_session(_RESUME_SESSION.value, model, mesh=mesh, verify=verify, weights_fingerprint=fingerprint)


def _save_session(run: Any, model: Any, fingerprint: str | None) -> str:
    """Returns what to tell."""
    from maxmoe.checkpoint.session import save_session

    try:
        session = run.session()
    except RuntimeError as error:
        raise ValueError(f"--save_session={_SAVE_SESSION.value}: nothing was saved: {error}") from error
    save_session(_SAVE_SESSION.value, session, model, weights_fingerprint=fingerprint)
    return f"saved {session.num_tokens} tokens to {_SAVE_SESSION.value}"


def _terminal_writer() -> Callable[[str], None]:
    """Writes text to standard output at once. On a terminal, control characters show as pictures of themselves."""
    is_terminal = terminal.is_terminal()
    return lambda text: terminal.write(terminal.without_controls(text) if is_terminal else text)


if __name__ == "__main__":
    app.run(main, flags_parser=flags_parser(_NAME))
