"""`jax.jit` for programs that run a few times on tiny arrays, where compiling is all the cost."""

import functools

import jax

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
